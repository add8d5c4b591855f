"""The process of a pool is killed before the n-th system call with which it changes something or
answers, for each n and each operation of a program on names, sizes and attributes. The next
process completes the operation: the program sees no error, and the directory is what the same
operations make of a plain one, also when the kernel has dropped its caches.

A run checks a sample of the calls; BCOW_CALLS=all checks each one."""

import contextlib
import hashlib
import os
import random
import signal
import stat
import subprocess

from support import bcow, drop_caches, need, read_bytes, run, until, write_file
from test_nth_call import ALL
from test_share import ShareCase
from test_pool import TIMEOUT
from names_model import RENAME_EXCHANGE, rename_with

# The calls before which the process is killed: those that change the upper, and the answers.
CALLS = ("link,linkat,unlink,unlinkat,rename,renameat,renameat2,mkdirat,mknodat,symlinkat,"
         "ftruncate,fallocate,copy_file_range,pwrite64,pwritev,fsetxattr,lsetxattr,setxattr,"
         "fremovexattr,lremovexattr,removexattr,fchmod,fchmodat,fchown,fchownat,utimensat,write,"
         "writev")
# Of a sample.
EACH = 1 if ALL else 5
# No operation has more calls in one thread.
MOST_CALLS = 60
DIRECTORIES = 400 if ALL else 130
# The size from which files are shared, and smaller.
SIZES = {"large": 20_000, "small": 3000, "other": 30_000, "target": 25_000}


def change(path, data=b"changed"):
    with open(path, "r+b") as file:
        file.seek(1000)
        file.write(data)


def nothing(_):
    pass


def unlink_later(at):
    os.link(at("other"), at("another"))
    os.unlink(at("another"))


def forget(at):
    drop_caches()
    # The kernel sends the requests to forget by itself.
    with contextlib.suppress(FileNotFoundError):
        os.stat(at("large"))


# What is done before the process can be killed, and the operation.
OPERATIONS = {
    "link": (nothing, lambda at: os.link(at("large"), at("new"))),
    "link of a changed file": (lambda at: change(at("large")),
                               lambda at: os.link(at("large-2"), at("new"))),
    "link in the place of a removed name": (
        lambda at: os.unlink(at("small")), lambda at: os.link(at("large"), at("small"))),
    "unlink of one of several names": (nothing, lambda at: os.unlink(at("large"))),
    "unlink of one of several names of a changed file": (
        lambda at: change(at("large")), lambda at: os.unlink(at("large-2"))),
    "unlink of the last name": (nothing, lambda at: os.unlink(at("other"))),
    "unlink of a new name": (lambda at: os.link(at("small"), at("new")),
                             lambda at: os.unlink(at("new"))),
    "rename": (nothing, lambda at: os.rename(at("large"), at("below/new"))),
    "rename to another file": (nothing, lambda at: os.rename(at("other"), at("target"))),
    "rename to one of several names": (nothing, lambda at: os.rename(at("small"), at("large"))),
    "rename to one of several names of a changed file": (
        lambda at: change(at("large-2")), lambda at: os.rename(at("small"), at("large"))),
    "rename of a directory": (nothing, lambda at: os.rename(at("below"), at("new"))),
    "exchange": (nothing, lambda at: rename_with(at("large"), at("target"), RENAME_EXCHANGE)),
    "truncate": (nothing, lambda at: os.truncate(at("large"), 5000)),
    "truncate of a small file": (nothing, lambda at: os.truncate(at("small-2"), 10)),
    "first write": (nothing, lambda at: change(at("large"))),
    "attributes": (nothing, lambda at: (os.chmod(at("large"), 0o600),
                                        os.setxattr(at("large-2"), "user.a", b"value"),
                                        os.utime(at("small"), (1, 2)))),
    "new file": (nothing, lambda at: write_file(at("new"), b"new")),
    "new directory": (nothing, lambda at: os.mkdir(at("new"), 0o750)),
    "new symbolic link": (nothing, lambda at: os.symlink("target", at("new"))),
    "removal of a directory": (lambda at: os.unlink(at("below/file")),
                               lambda at: os.rmdir(at("below"))),
    "forgotten files": (unlink_later, forget),
}


def make_files(directory, source):
    os.makedirs(os.path.join(directory, "below"))
    for name, size in SIZES.items():
        write_file(os.path.join(directory, name), source.randbytes(size))
    for name in ("large", "small"):
        os.link(os.path.join(directory, name), os.path.join(directory, f"{name}-2"))
    write_file(os.path.join(directory, "below", "file"), b"file")


def shown(top):
    """What a program finds: type, mode, number of names and content of each path."""
    found = {}
    for directory, directories, names in os.walk(top):
        for name in sorted(directories) + sorted(names):
            path = os.path.join(directory, name)
            status = os.lstat(path)
            content = None
            if stat.S_ISREG(status.st_mode):
                digest, attribute = hashlib.sha256(read_bytes(path)).hexdigest(), None
                with contextlib.suppress(OSError):
                    attribute = os.getxattr(path, "user.a")
                content = (status.st_size, status.st_nlink, digest, attribute)
            found[os.path.relpath(path, top)] = (status.st_mode, content)
    return found


class Kills(ShareCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        need("strace")
        cls.image = cls.path("killed.bcow")
        source = random.Random(11)
        tree = cls.path("killed")
        for number in range(DIRECTORIES):
            make_files(os.path.join(tree, str(number)), source)
        bcow("convert", f"dir:{tree}", cls.image, timeout=TIMEOUT)
        cls.tree = tree

    def begin(self, *options):
        self.start()
        self.plain = os.path.join(self.uppers, "plain")
        run("cp", "-a", self.tree, self.plain)
        self.directories = iter(range(DIRECTORIES))
        self.kills = 0
        self.upper = os.path.join(self.uppers, "killed")
        self.where = self.mount("--upper", self.upper, *options, image=self.image)

    def restarts(self):
        return self.find()["restarts"] or 0

    def killed_at(self, number, prepare, operation):
        """Executes the operation, and kills the process before its call with this number. Returns
        whether it was killed."""
        name = str(next(self.directories))
        top, plain = os.path.join(self.where, name), os.path.join(self.plain, name)
        # The kernel knows all names and attributes.
        shown(top)
        for where in (top, plain):
            prepare(lambda path, where=where: os.path.join(where, path))
        before = self.find()
        trace = subprocess.Popen(
            ["strace", "-f", "-p", str(before["pid"]), "-o", "/dev/null", "-e", f"trace={CALLS}",
             "-e", f"inject={CALLS}:signal=KILL:when={number}"],
            stderr=subprocess.PIPE, text=True)
        try:
            self.assertIn("attached", trace.stderr.readline())
            for where in (top, plain):
                operation(lambda path, where=where: os.path.join(where, path))
            if operation is forget:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    trace.wait(0.2)
            was_killed = trace.poll() is not None or self.restarts() > before["restarts"]
        finally:
            trace.send_signal(signal.SIGTERM)
            trace.wait(TIMEOUT)
            trace.stderr.close()
        if was_killed:
            until(lambda: self.restarts() > before["restarts"], "another process takes over")
        expected = shown(plain)
        self.assertEqual(shown(top), expected)
        drop_caches()
        self.assertEqual(shown(top), expected)
        if was_killed:
            self.kills += 1
            if self.kills % 4 == 0:
                # Too many processes that end soon would end the pool.
                self.bcow("pool", "restart", "pool")
                self.assertEqual(shown(top), expected)
        return was_killed

    def kill_at_each_call(self, *options):
        self.begin(*options)
        source = random.Random(12)
        figures = {}
        for name, (prepare, operation) in OPERATIONS.items():
            with self.subTest(name):
                for number in range(1 + source.randrange(EACH), MOST_CALLS, EACH):
                    if not self.killed_at(number, prepare, operation):
                        break
                    figures[name] = figures.get(name, 0) + 1
                else:
                    self.fail(f"more than {MOST_CALLS} calls")
        print(figures, flush=True)
        self.assertGreater(self.kills, len(OPERATIONS) // 2 if EACH > 1 else 3 * len(OPERATIONS))
        self.bcow("umount", self.where)
        bcow("fsck", self.upper, timeout=TIMEOUT)
        self.stop()

    def test_each_request_is_completed_once(self):
        self.kill_at_each_call()

    def test_each_request_is_completed_once_without_sharing(self):
        self.kill_at_each_call("--share", "off")
