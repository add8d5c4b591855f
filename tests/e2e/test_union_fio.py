"""Several programs use the same large files at the same time: fio writes (asynchronous, direct,
mapped and buffered) and verifies, while other processes read and map the same files. The next mount
shows the same content.

BCOW_FIO_ROUNDS=100 sets the rounds for each subject, BCOW_SEED=N the first seed. The subjects
`plain` and `overlayfs` check the test itself.
"""

import contextlib
import hashlib
import os
import random
import subprocess
import sys

import subjects
from support import read_bytes, run
from union import LowerCase

ROUNDS = int(os.environ.get("BCOW_FIO_ROUNDS") or 1)
SEED = int(os.environ.get("BCOW_SEED") or 1)
SUBJECTS = (*subjects.KINDS, "bcow+writeback", "bcow+sync=volatile", subjects.KERNEL)
SIZE = 4 << 20
LOWER, NEW = ("file-0", "file-1", "file-2", "holes"), ("new-0", "new-1")
READER = """
import mmap, os, sys
path, mapped = sys.argv[1], sys.argv[2] == "mapped"
print(flush=True)
while True:
    fd = os.open(path, os.O_RDONLY)
    size = os.fstat(fd).st_size
    if mapped and size:
        with mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ) as room:
            for at in range(0, size, 4096):
                room[at]
    else:
        while os.read(fd, 1 << 16):
            pass
    os.close(fd)
"""


def plant(top):
    for name in LOWER:
        with open(os.path.join(top, name), "wb") as file:
            file.write(subjects.content(name, SIZE))
            if name == "holes":
                for at in range(0, SIZE, 3 << 18):
                    os.truncate(file.fileno(), at)
                    file.seek(at + (1 << 18))
                    file.write(b"data" * 1000)
                file.truncate(SIZE)


def job(name, dice):
    """One file, and the way to write it. Several writes are in flight only if no two overlap: fio
    does not know their order."""
    engine = dice.choice(["libaio", "libaio", "io_uring", "psync", "pvsync2", "mmap"])
    direct = engine != "mmap" and dice.random() < 0.6
    sizes = ["4k", "8k", "64k"] if direct or engine == "mmap" else ["4k", "3k", "512", "100k"]
    lines = {"filename": name, "ioengine": engine, "direct": int(direct), "bs": dice.choice(sizes),
             "iodepth": dice.choice([1, 8, 32]),
             "rw": dice.choice(["write", "randwrite", "randwrite", "randrw"]),
             "verify": dice.choice(["crc32c", "md5"]), "fsync": dice.choice([0, 0, 50]),
             "number_ios": 400}
    return f"[{name}]\n" + "".join(f"{key}={value}\n" for key, value in lines.items())


@contextlib.contextmanager
def readers(paths, dice):
    """Processes that continuously read and map these files."""
    running = []
    try:
        for path in paths:
            running.append(subprocess.Popen([sys.executable, "-c", READER, path,
                                             dice.choice(["read", "mapped"])],
                                            stdout=subprocess.PIPE))
        for process in running:
            process.stdout.readline()
        yield
    finally:
        for process in running:
            process.kill()
            process.communicate()


def sums(where):
    found = {}
    for name in sorted(os.listdir(where)):
        found[name] = hashlib.sha256(read_bytes(os.path.join(where, name))).hexdigest()
    return found


class Verified(LowerCase):
    kinds = SUBJECTS
    plant = staticmethod(plant)
    tools = ("fio",)

    def round(self, subject, seed):
        dice = random.Random(seed)
        written = dice.sample(LOWER + NEW, 4)
        script = os.path.join(subject.directory, "jobs.fio")
        with open(script, "w") as file:
            file.write(f"[global]\ndirectory={subject.where}\nsize={SIZE}\nrandseed={seed}\n"
                       "do_verify=1\nverify_fatal=1\nverify_backlog=32\n"
                       "verify_state_save=0\nallow_mounted_write=1\nthread=1\n")
            file.writelines(job(name, dice) for name in written)
        with readers([os.path.join(subject.where, name) for name in written if name in LOWER],
                     dice):
            run("fio", script, f"--aux-path={subject.directory}", f"--output={script}.out",
                timeout=1200)
        before = sums(subject.where)
        subject.remount()
        self.assertEqual(sums(subject.where), before)

    def test_fio_verifies_its_writes_while_others_read(self):
        for name in self.names:
            for number in range(ROUNDS):
                seed = SEED * 100_000 + number
                with (self.subTest(subject=name, seed=seed),
                      subjects.shown(name, self.lower) as subject):
                    self.round(subject, seed)
                    subject.unmount()
                    subject.check()
