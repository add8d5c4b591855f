"""bcow diff and bcow commit of uppers and disks in use: with both drivers, in a process of their
own and in a pool. The judges are what programs have written, and the tree that the mount shows."""

import concurrent.futures
import glob
import json
import os
import signal
import struct
import subprocess
import tempfile
import threading
import unittest.mock

import support
from promises import promise
from support import (BCOW, assert_refused, assert_same_tree, bcow, need, read_text, run, until,
                     write_file)
import tree

TIMEOUT = 120
# More differences than a pipe takes.
MANY = 3000


class Live:
    """The tests of each kind of mount."""

    options = ()
    needs_root = True

    @classmethod
    def setUpClass(cls):
        need("e2fsck", root=cls.needs_root, fuse=True)
        super().setUpClass()
        source = cls.path("source")
        os.makedirs(os.path.join(source, "directory"))
        write_file(os.path.join(source, "large"), os.urandom(4 << 20))
        write_file(os.path.join(source, "removed"), "removed")
        write_file(os.path.join(source, "directory", "kept"), "kept")
        cls.image = cls.path("image.bcow")
        bcow("convert", f"dir:{source}", cls.image, timeout=TIMEOUT)

    def setUp(self):
        self.place = tempfile.mkdtemp(prefix="live-", dir=self.directory)
        self.where, self.upper = self.at("mnt"), self.at("upper")
        os.mkdir(self.where)
        self.begin()
        bcow("mount", self.image, self.where, "--upper", self.upper, *self.options,
             timeout=TIMEOUT)
        self.addCleanup(subprocess.run, ["umount", "-l", self.where], stderr=subprocess.DEVNULL)

    def begin(self):
        """What comes before the mount."""

    def at(self, *names):
        return os.path.join(self.place, *names)

    def in_mount(self, *names):
        return os.path.join(self.where, *names)

    def change(self):
        write_file(self.in_mount("new"), os.urandom(70_000))
        support.overwrite(self.in_mount("large"), 1 << 20, b"changed")
        os.unlink(self.in_mount("removed"))
        os.mkdir(self.in_mount("directory", "below"))

    def lines(self, upper=None, *options):
        found = bcow("diff", self.image, "--upper", upper or self.upper, *options, check=False,
                     timeout=TIMEOUT)
        self.assertIn(found.code, (0, 1), str(found))
        return [tuple(line.split("\t")[:2]) for line in found.out.decode().splitlines()]

    def snapshots(self):
        listed = bcow("snapshot", "list", self.upper, "--json", timeout=TIMEOUT)
        return [one["name"] for one in json.loads(listed.out)["snapshots"]]

    def assert_sound(self):
        """The mount goes on, and its upper is sound."""
        write_file(self.in_mount("last"), "last")
        bcow("umount", self.where, timeout=TIMEOUT)
        bcow("fsck", self.upper, self.image, timeout=TIMEOUT)
        self.assertEqual(self.snapshots(), [])
        self.assertIn(("A", "/last"), self.lines())

    @promise("`bcow diff` and `bcow commit` of an upper or a disk in use read all that programs "
             "had written before the command began, and leave no snapshot.")
    def test_the_differences_have_what_programs_wrote(self):
        self.assertEqual(self.lines(), [])
        self.change()
        expected = {("A", "/new"), ("M", "/large"), ("D", "/removed"), ("A", "/directory/below")}
        for name in (self.upper, self.where):
            self.assertLessEqual(expected, set(self.lines(name)))
        sizes = bcow("diff", self.image, "--upper", self.upper, "--stat", check=False,
                     timeout=TIMEOUT).out.decode().splitlines()
        self.assertEqual([line.split("\t")[1:] for line in sizes[:2]],
                         [["", "all"], ["A", "/new"]])
        self.assertEqual(self.snapshots(), [])
        self.assert_sound()

    def test_a_commit_has_the_tree_of_the_mount(self):
        self.change()
        expected = tree.dump(self.where)
        flat, layer = self.at("flat.bcow"), self.at("layer.bcow")
        bcow("commit", self.image, "--upper", self.upper, flat, "--flatten", timeout=TIMEOUT)
        bcow("commit", self.image, "--upper", self.where, layer, timeout=TIMEOUT)
        write_file(self.in_mount("later"), "later")
        with support.mounted(flat) as shown:
            assert_same_tree(self, expected, shown)
        with support.mounted(self.image, layers=[layer]) as shown:
            assert_same_tree(self, expected, shown)
        inside = bcow("commit", self.image, "--upper", self.where,
                      os.path.join(self.upper, "x.bcow"), check=False, timeout=TIMEOUT)
        assert_refused(self, inside, "is in the upper", code=2)
        self.assert_sound()

    def test_a_kept_snapshot_is_read_by_its_name(self):
        write_file(self.in_mount("one"), "one")
        bcow("snapshot", self.where, "one", timeout=TIMEOUT)
        write_file(self.in_mount("two"), "two")
        for name in (f"{self.upper}@one", f"{self.where}@one"):
            found = self.lines(name)
            self.assertIn(("A", "/one"), found)
            self.assertNotIn(("A", "/two"), found)
        made = self.at("one.bcow")
        bcow("commit", self.image, "--upper", f"{self.upper}@one", made, "--flatten",
             timeout=TIMEOUT)
        self.assertEqual(bcow("cat", made, "/one").out, b"one")
        self.assertEqual(bcow("cat", made, "/two", check=False).code, 1)
        self.assertIn(("A", "/two"), self.lines())
        self.assertEqual(self.snapshots(), ["one"])
        refused = bcow("diff", self.image, "--upper", f"{self.upper}@two", check=False,
                       timeout=TIMEOUT)
        self.assertEqual(refused.code, 2)
        self.assertIn("two", refused.err.decode())

    def test_commands_at_the_same_time(self):
        self.change()
        with concurrent.futures.ThreadPoolExecutor() as pool:
            found = list(pool.map(lambda _: self.lines(), range(4)))
        self.assertEqual(found, [found[0]] * 4)
        self.assert_sound()

    def blocked(self):
        """A comparison that has its snapshot, and waits for the reader of its output."""
        process = subprocess.Popen([BCOW, "diff", self.image, "--upper", self.upper],
                                   stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.kill)
        process.stdout.read(1)
        return process

    @staticmethod
    def where_signals_wait(process):
        """The function of the kernel in which the thread for signals of a command waits."""
        [thread] = [os.path.dirname(name) for name in glob.glob(f"/proc/{process.pid}/task/*/comm")
                    if read_text(name) == "signals\n"]
        return read_text(os.path.join(thread, "wchan"))

    def test_interrupted_and_killed_commands_leave_nothing(self):
        for number in range(MANY):
            write_file(self.in_mount("directory", f"a-file-with-a-long-name-{number}"), "")
        interrupted = self.blocked()
        self.assertEqual(self.snapshots(), [f"temporary-{interrupted.pid}"])
        interrupted.send_signal(signal.SIGINT)
        # The thread for signals has noted it, and waits for the end of the command.
        until(lambda: "nanosleep" in self.where_signals_wait(interrupted), "the signal is noted")
        interrupted.stdout.read()
        self.assertEqual(interrupted.wait(TIMEOUT), 130)
        self.assertEqual(self.snapshots(), [])
        killed = self.blocked()
        killed.kill()
        killed.wait(TIMEOUT)
        self.assertEqual(self.snapshots(), [f"temporary-{killed.pid}"])
        # The one of a process that lives stays.
        other = self.blocked()
        self.assertEqual(self.snapshots(), [f"temporary-{other.pid}"])
        other.stdout.read()
        self.assertEqual(other.wait(TIMEOUT), 1)
        self.assertEqual(self.snapshots(), [])
        refused = bcow("snapshot", self.where, "temporary-1", check=False, timeout=TIMEOUT)
        self.assertEqual(refused.code, 2)
        self.assertIn("temporary-", refused.err.decode())


class OneMoment(Live):
    """Where the kernel writes no file of the upper without the process."""

    def test_what_is_read_is_of_one_moment(self):
        ends = threading.Event()

        def count():
            files = [os.open(self.in_mount(name), os.O_RDWR | os.O_CREAT) for name in "ab"]
            number = 0
            while not ends.is_set():
                number += 1
                for file in files:
                    os.pwrite(file, struct.pack("<Q", number), 0)
            for file in files:
                os.close(file)
            return number

        with concurrent.futures.ThreadPoolExecutor() as pool:
            counting = pool.submit(count)
            self.addCleanup(ends.set)
            try:
                until(lambda: os.path.exists(self.in_mount("b")), "the first writes")
                last = 0
                for turn in range(5):
                    made = self.at(f"{turn}.bcow")
                    bcow("commit", self.image, "--upper", self.upper, made, "--flatten",
                         timeout=TIMEOUT)
                    a, b = (struct.unpack("<Q", bcow("cat", made, name).out or bytes(8))[0]
                            for name in ("/a", "/b"))
                    self.assertIn(a - b, (0, 1), f"{a} {b}")
                    self.assertGreaterEqual(b, last)
                    last = a
            finally:
                ends.set()
            self.assertGreaterEqual(counting.result(TIMEOUT), last)
        self.assertGreater(last, 0)


class FuseDriver(OneMoment, support.Scratch):
    options = ("--driver", "fuse")
    needs_root = False

    def test_an_ended_mount_is_read_as_it_is(self):
        self.change()
        before = self.lines()
        # Also when the process of the mount still lives.
        run(*(["umount"] if os.geteuid() == 0 else ["fusermount3", "-u"]), self.where)
        self.assertEqual(self.lines(), before)


class KernelDriver(OneMoment, support.Scratch):
    options = ("--driver", "kernel", "-s", "1G")


class Pool:
    def begin(self):
        self.enterContext(unittest.mock.patch.dict(os.environ, BCOW_POOLS=self.at("pools")))
        bcow("pool", "start", "live", timeout=TIMEOUT)
        self.addCleanup(bcow, "pool", "stop", "--force", "live", timeout=TIMEOUT)


class FuseDriverInAPool(Pool, Live, support.Scratch):
    options = ("--driver", "fuse", "--pool", "live")


class KernelDriverInAPool(Pool, OneMoment, support.Scratch):
    options = ("--driver", "kernel", "-s", "1G", "--pool", "live")


class Disks(support.Scratch):
    """Disks that show an image."""

    @classmethod
    def setUpClass(cls):
        need("e2fsck", root=True, fuse=True)
        super().setUpClass()
        source = cls.path("source")
        os.mkdir(source)
        write_file(os.path.join(source, "file"), os.urandom(1 << 20))
        cls.image = cls.path("image.bcow")
        bcow("convert", f"dir:{source}", cls.image, timeout=TIMEOUT)

    def setUp(self):
        self.place = tempfile.mkdtemp(prefix="live-", dir=self.directory)
        # Beside its image.
        self.disk, self.where = f"{self.place}.bcow", os.path.join(self.place, "mnt")
        os.mkdir(self.where)
        bcow("create", "-b", self.image, "--fs", "ext4", "-s", "1G", self.disk, timeout=TIMEOUT)

    def diff(self, upper):
        found = bcow("diff", self.image, "--upper", upper, check=False, timeout=TIMEOUT)
        self.assertIn(found.code, (0, 1), str(found))
        self.assertEqual(glob.glob(f"{self.disk}@*"), [])
        return found.out.decode()

    def test_mounted_disks_are_read(self):
        bcow("mount", self.disk, self.where, timeout=TIMEOUT)
        self.addCleanup(subprocess.run, ["umount", "-l", self.where], stderr=subprocess.DEVNULL)
        write_file(os.path.join(self.where, "new"), os.urandom(70_000))
        for name in (self.disk, self.where):
            self.assertIn("A\t/new\t", self.diff(name))
        made = os.path.join(self.place, "made.bcow")
        bcow("commit", self.image, "--upper", self.disk, made, "--flatten", timeout=TIMEOUT)
        with open(os.path.join(self.where, "new"), "rb") as file:
            self.assertEqual(bcow("cat", made, "/new").out, file.read())
        bcow("umount", self.where, timeout=TIMEOUT)
        self.assertIn("A\t/new\t", self.diff(self.disk))

    def test_served_disks_are_read(self):
        socket = os.path.join(self.place, "socket")
        serving = subprocess.Popen([BCOW, "serve", self.disk, "--socket", socket],
                                   stdout=subprocess.DEVNULL)
        self.addCleanup(lambda: (serving.terminate(), serving.wait(TIMEOUT)))
        until(lambda: os.path.exists(socket), "the disk is served")
        self.assertEqual(self.diff(self.disk), "")


if __name__ == "__main__":
    unittest.main()
