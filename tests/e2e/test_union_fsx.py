"""Partial files: large files of the lower tree under every kind of write, with each result
compared with that of a plain directory.

The fsx of crates.io begins with an empty file; a test runs it too. The operations here begin with a
lower file's content. BCOW_SKETCH_OPERATIONS=2000000 sets the number for each kind, BCOW_SEED=N the
first seed.
"""

import contextlib
import os
import random
import tempfile

import model
import subjects
import support
import syscalls
from promises import promise
from support import run, write_file
from union import LowerCase

OPERATIONS = int(os.environ.get("BCOW_SKETCH_OPERATIONS") or 12_000)
# Operations on one file before the next file: a file with every block written is no partial file
# any more.
TURN = (50, 400, 2500)
SEED = int(os.environ.get("BCOW_SEED") or 1)
SIZES = (subjects.LARGE + 1, 75 * 4096, 300_001, (1 << 20) + 4095, 2 << 20, 5_000_011, 777_777,
         150_000)
MOST_BYTES = 6 << 20
PAGE = 4096
FSX = """
flen = 1000000
[opsize]
min = 1
max = 65536
[weights]
close_open = 2
read = 10
write = 20
mapread = 10
mapwrite = 10
truncate = 5
fsync = 1
fdatasync = 1
invalidate = 1
punch_hole = 5
posix_fallocate = 3
sendfile = 2
posix_fadvise = 1
copy_file_range = 5
"""


def plant(top):
    for number, size in enumerate(SIZES):
        path = os.path.join(top, f"file-{number}")
        write_file(path, subjects.content(path[-6:], size))
        if number % 3 == 2:
            # Holes of the lower file: zeros without storage.
            with open(path, "r+b") as file:
                for at in range(50_000, size, 170_000):
                    syscalls.fallocate(file.fileno(), syscalls.PUNCH_HOLE | syscalls.KEEP_SIZE, at,
                                       60_001)
    write_file(os.path.join(top, "source"), subjects.content("source", 400_000))


class Writes(model.Generator):
    """Operations on the content of one file, which is open in several ways."""

    FILE, APPEND, SOURCE, DIRECT = 0, 1, 2, model.DIRECT

    def __init__(self, seed, pair, name):
        super().__init__(seed, pair)
        self.name = name

    def sequence(self, length):
        yield from self.opened()
        for _ in range(length):
            made = self.random.choices(self.MAKERS, self.WEIGHTS)[0](self)
            yield from made if isinstance(made, list) else [made]
            yield "fstat", {"slot": self.FILE}
        yield from self.remount()

    def opened(self):
        return [("open", {"slot": slot, "path": path, "flags": flags, "mode": 0})
                for slot, path, flags in ((self.FILE, self.name, "O_RDWR"),
                                          (self.APPEND, self.name, "O_RDWR|O_APPEND"),
                                          (self.SOURCE, "source", "O_RDONLY"),
                                          (self.DIRECT, self.name, "O_RDWR|O_DIRECT"))]

    def slot(self):
        return self.random.choices([self.FILE, self.DIRECT], [6, 1])[0]

    def place(self, slot):
        dice, size = self.random, os.fstat(self.pair.model.files[slot]).st_size
        offset = dice.choice([dice.randint(0, size), dice.randint(0, size),
                              dice.randint(0, size) // PAGE * PAGE,
                              max(0, size - dice.randint(0, 9000))])
        length = dice.choice([1, dice.randint(1, 500), dice.randint(1, PAGE), PAGE,
                              dice.randint(1, 3 * PAGE), dice.randint(1, 40_000)])
        if slot == self.DIRECT:
            offset, length = offset // PAGE * PAGE, -(-length // PAGE) * PAGE
        return offset, max(0, min(length, MOST_BYTES - offset))

    def append(self):
        length = self.random.randint(1, 10_000)
        return "write", {"slot": self.APPEND, "tag": self.fresh(), "length": length}

    def truncate(self):
        size = os.fstat(self.pair.model.files[self.FILE]).st_size
        size = self.random.choice([self.random.randint(0, size),
                                   max(0, size - self.random.randint(0, 9000)),
                                   size + self.random.randint(0, 100_000)])
        return "ftruncate", {"slot": self.FILE, "size": min(size, MOST_BYTES)}

    def copy_range(self):
        """From one place of the file to another, or from another lower file."""
        slot, at = self.random.choice([self.FILE, self.SOURCE]), self.place(self.FILE)[0]
        offset, length = self.place(slot)
        return ("copy_range", {"slot": slot, "offset": offset, "to": self.FILE, "at": at,
                               "length": max(0, min(length, MOST_BYTES - at))})

    def holes(self):
        # The kernel asks for holes before it writes what was changed in a mapping.
        return [("fsync", {"slot": self.FILE}),
                ("seek_hole", {"slot": self.FILE, "offset": self.place(self.FILE)[0],
                               "what": self.random.choice(["data", "hole"])})]

    def synchronize(self):
        return self.random.choice(["fsync", "fdatasync", "drop_pages"]), {"slot": self.FILE}

    def attributes(self):
        """Changes without content, between writes; synchronizing changes no time."""
        sync, look = ("fsync", {"slot": self.FILE}), ("fstat", {"slot": self.FILE})
        times = [("utimens", {"path": self.name, "atime": time, "mtime": time, "follow": True})
                 for time in (subjects.EPOCH + self.fresh(), "now")]
        mode = ("fchmod", {"slot": self.FILE, "mode": self.random.choice([0o600, 0o644])})
        return [sync, mode, times[0], look, sync, look, times[1]]

    def remount(self):
        # A write to a mapping changes the time of the file at a moment that the kernel chooses.
        return [("fsync", {"slot": self.FILE}), ("compare", {}), ("remount", {}), ("compare", {}),
                *self.opened()]

    MAKERS, WEIGHTS = zip((model.Generator.pread, 15), (model.Generator.pwrite, 29), (append, 2),
                          (model.Generator.map, 18), (truncate, 2), (model.Generator.fallocate, 7),
                          (copy_range, 5), (holes, 4), (synchronize, 3), (opened, 1.5),
                          (remount, 0.15), (attributes, 1.5))


def exercise(name, lower, seed, operations):
    """Runs operations on files of one subject; returns the failure, or None."""
    done, number = 0, seed * 1000
    while done < operations:
        with (subjects.shown("plain", lower) as copy, subjects.shown(name, lower) as subject,
              contextlib.closing(model.Pair(subject, copy.where)) as pair):
            for file in random.Random(number).sample(range(len(SIZES)), len(SIZES)):
                number += 1
                count = min(random.Random(number).choice(TURN), operations - done)
                steps = []
                try:
                    for step in Writes(number, pair, f"file-{file}").sequence(count):
                        steps.append(step)
                        pair.step(*step)
                except model.Mismatch as error:
                    last = "\n".join(map(str, steps[-40:]))
                    return f"{name}, BCOW_SEED={seed}, turn {number}, {len(steps)}: {error}\n{last}"
                done += count
    return None


class Partials(LowerCase):
    kinds = (*subjects.KINDS, subjects.KERNEL)
    plant = staticmethod(plant)

    @promise("Unmounting makes all changes durable, except with `--sync volatile`.")
    def test_every_byte_is_the_written_one_or_the_lower_one(self):
        self.assert_no_failure(self.names, exercise, SEED, OPERATIONS)

    def test_the_fsx_of_crates_io_finds_no_error(self):
        """fsx truncates its file first: a lower file, and a new one."""
        support.need("fsx")
        configuration = self.path("fsx.toml", FSX.encode())
        for name in self.names:
            with subjects.shown(name, self.lower) as subject, contextlib.ExitStack() as stack:
                for file in ("file-5", "new"):
                    artifacts = stack.enter_context(tempfile.TemporaryDirectory(dir=support.WORK))
                    with self.subTest(subject=name, file=file):
                        run("fsx", "-f", configuration, "-N", str(max(2000, OPERATIONS // 10)),
                            "-S", str(SEED), "-P", artifacts, os.path.join(subject.where, file),
                            timeout=36_000)
