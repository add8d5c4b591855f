"""Faults at every call: strace fails the n-th system call of a kind in a command, for each n. The
command then succeeds with the right result, or fails with a message, and loses nothing.

The calls that the dynamic linker makes before the program begins are not failed. Each run fails a
sample of the calls; BCOW_CALLS=all fails up to 250 of each kind, and prints the figures of
docs/reliability.md."""

import collections
import glob
import os
import random
import re
import shutil
import sys

from support import BCOW, bcow, need, read_bytes, run, write_file
from test_disks import Directory
from test_snapshots import content, snapshots, write

ALL = os.environ.get("BCOW_CALLS") == "all"
# The errors with which calls fail.
ERRORS = {
    "openat": ("EMFILE", "EIO"),
    "read": ("EIO", "EINTR"),
    "pread64": ("EIO", "EINTR"),
    "write": ("ENOSPC", "EINTR"),
    "pwrite64": ("ENOSPC", "EIO", "EINTR"),
    "ftruncate": ("ENOSPC", "EIO"),
    "fallocate": ("ENOSPC", "EIO"),
    "copy_file_range": ("ENOSPC", "EIO"),
    "fsync": ("EIO", "ENOSPC"),
    "fdatasync": ("EIO", "ENOSPC"),
    "linkat": ("ENOSPC", "EIO"),
    "rename": ("ENOSPC", "EIO"),
    "renameat2": ("ENOSPC", "EIO"),
    "unlink": ("EIO",),
    "unlinkat": ("EIO",),
    "mkdir": ("ENOSPC",),
    "getdents64": ("EIO",),
    "statx": ("EIO",),
    "lseek": ("EIO",),
    "flock": ("EIO", "EINTR"),
    "fcntl": ("ENOLCK",),
    "fchmod": ("EIO",),
    "fchown": ("EIO",),
    "fgetxattr": ("EIO",),
    "flistxattr": ("EIO",),
    "fsetxattr": ("ENOSPC",),
    "ioctl": ("EIO",),
    "madvise": ("ENOMEM",),
    "clone3": ("EAGAIN",),
    "getrandom": ("EIO",),
}
SIZE = 1 << 20


def counts(command):
    """The number of calls of each kind that each thread makes, the main thread first."""
    run("strace", "-f", "-qq", "-o", "calls", "-e", f"trace={','.join(ERRORS)}", *command)
    threads = collections.defaultdict(collections.Counter)
    with open("calls") as file:
        for line in file:
            thread, call = line.split(maxsplit=1)
            if match := re.match(r"(\w+)\(", call):
                threads[thread][match[1]] += 1
    os.unlink("calls")
    return list(threads.values())


class NthCall(Directory):
    """Each test has files in its directory, which each run of the command gets as copies."""

    def setUp(self):
        need("strace")
        super().setUp()
        self.random = random.Random(1)
        # Of the dynamic linker and the start of the program.
        self.before_begin = counts([BCOW, "version"])[0]

    def fail_everywhere(self, command, check):
        """Fails calls of a command. `check` gets whether the command succeeded."""
        name = " ".join(word for word in command if re.fullmatch("[a-z]+", word))
        files = glob.glob("*")
        top, table = os.getcwd(), collections.Counter()
        os.mkdir("copy")
        run("cp", "-a", "--sparse=always", *files, "copy")
        os.chdir("copy")
        calls = counts([BCOW, *command])
        check(True)
        os.chdir(top)
        for kind, errors in ERRORS.items():
            first = self.before_begin[kind] + 1
            last = max(thread[kind] for thread in calls)
            numbers = range(first, last + 1)
            # A command that looks at all processes makes many calls.
            most = 250 if ALL else 2
            if len(numbers) > most:
                numbers = sorted(self.random.sample(numbers, most))
            for number in numbers:
                for error in errors if ALL else (self.random.choice(errors),):
                    shutil.rmtree("copy")
                    os.mkdir("copy")
                    run("cp", "-a", "--sparse=always", *files, "copy")
                    os.chdir("copy")
                    inject = f"inject={kind}:error={error}:when={number}"
                    done = run("strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={kind}",
                               "-e", inject, BCOW, *command, check=False)
                    with self.subTest(command=name, kind=kind, number=number, error=error):
                        self.assertTrue(0 <= done.code < 128, done)
                        if done.code:
                            self.assertRegex(done.out + done.err, b"error[: ]")
                        self.assertNotIn(b"panicked", done.err)
                        check(done.code == 0)
                    table[kind] += 1
                    table["failed"] += done.code != 0
                    os.chdir(top)
        shutil.rmtree("copy")
        if ALL:
            print(name, dict(table), file=sys.stderr)
        self.assertGreater(table["failed"], 0)

    def assert_no_more(self, *names):
        self.assertEqual(sorted(os.listdir()), sorted(names))

    def make_disk(self):
        """A disk of random content over an image. Returns the content."""
        shown = bytearray(self.random.randbytes(SIZE // 2) + bytes(SIZE // 2))
        write_file("base.raw", shown)
        bcow("convert", "raw:base.raw", "base.bcow")
        os.unlink("base.raw")
        bcow("create", "-b", "base.bcow", "vm.bcow")
        for length in (100, 5000, 100_000):
            data = self.random.randbytes(length)
            at = self.random.randrange(SIZE - length)
            shown[at:at + length] = data
            write("vm.bcow", (at, data))
        return bytes(shown)


class Conversions(NthCall):
    def test_a_conversion_makes_the_whole_image_or_none(self):
        os.mkdir("tree")
        write_file("tree/large", self.random.randbytes(300_000))
        write_file("tree/small", b"content")
        os.symlink("small", "tree/link")
        bcow("convert", "dir:tree", "expected.bcow")
        expected = read_bytes("expected.bcow")
        os.unlink("expected.bcow")

        def check(succeeded):
            made = os.path.exists("new.bcow")
            self.assertTrue(made or not succeeded)
            if made:
                self.assertTrue(read_bytes("new.bcow") == expected)
            self.assert_no_more("tree", *(["new.bcow"] if made else []))

        self.fail_everywhere(["convert", "dir:tree", "new.bcow"], check)

    def test_content_is_shown_right_or_not_at_all(self):
        os.mkdir("tree")
        data = self.random.randbytes(300_000)
        write_file("tree/large", data)
        bcow("convert", "dir:tree", "a.bcow")
        shutil.rmtree("tree")

        def check(succeeded):
            if succeeded:
                self.assertTrue(bcow("cat", "a.bcow", "large").out == data)

        self.fail_everywhere(["extract", "a.bcow", "out"], lambda succeeded: self.check_extracted(
            succeeded, data))
        self.fail_everywhere(["fsck", "--data", "a.bcow"], check)

    def check_extracted(self, succeeded, data):
        if succeeded:
            self.assertTrue(read_bytes("out/large") == data)


class Disks(NthCall):
    def setUp(self):
        super().setUp()
        need("nbdsh")
        self.shown = self.make_disk()

    def assert_shown(self, disk="vm.bcow"):
        self.assertTrue(content(disk) == self.shown, disk)

    def test_a_new_disk_is_complete_or_absent(self):
        def check(succeeded):
            made = os.path.exists("new.bcow")
            self.assertTrue(made or not succeeded)
            if made:
                self.assert_shown("new.bcow")
            self.assert_shown()
            self.assert_no_more("base.bcow", "vm.bcow", *(["new.bcow"] if made else []))

        self.fail_everywhere(["create", "-b", "vm.bcow", "new.bcow"], check)

    def test_a_snapshot_is_complete_or_absent(self):
        def check(succeeded):
            taken = "one" in snapshots("vm.bcow")
            self.assertTrue(taken or not succeeded)
            self.assert_shown()
            if not taken:
                bcow("snapshot", "vm.bcow", "one")
            self.assert_shown("vm.bcow@one")
            self.assert_shown()
            self.assert_no_more("base.bcow", "vm.bcow", "vm.bcow@one")

        self.fail_everywhere(["snapshot", "vm.bcow", "one"], check)

    def test_a_removal_of_a_snapshot_changes_no_content(self):
        bcow("snapshot", "vm.bcow", "one")

        def check(succeeded):
            self.assert_shown()
            if "one" in snapshots("vm.bcow"):
                self.assertFalse(succeeded)
                bcow("snapshot", "rm", "vm.bcow", "one")
            self.assert_shown()
            bcow("fsck", "--data", "vm.bcow")

        self.fail_everywhere(["snapshot", "rm", "vm.bcow", "one"], check)

    def test_a_commit_can_be_completed(self):
        bcow("create", "-s", "1M", "low.bcow")
        bcow("create", "-b", "low.bcow", "top.bcow")
        data = self.random.randbytes(200_000)
        write("top.bcow", (1000, data))
        shown = bytes(1000) + data + bytes(SIZE - 1000 - len(data))

        def check(succeeded):
            self.assertTrue(content("top.bcow") == shown)
            if not succeeded:
                bcow("commit", "top.bcow")
            self.assertTrue(content("low.bcow") == shown)

        self.fail_everywhere(["commit", "top.bcow"], check)

    def test_a_disk_that_is_changed_as_a_whole_keeps_its_content(self):
        for command in (["compact", "vm.bcow"], ["seal", "vm.bcow"], ["resize", "vm.bcow", "2M"],
                        ["rebase", "vm.bcow", "--no-backing"]):
            def check(succeeded, command=command):
                shown = content("vm.bcow")
                self.assertIn(len(shown), (SIZE, 2 * SIZE))
                self.assertTrue(shown[:SIZE] == self.shown and not any(shown[SIZE:]))
                self.assert_no_more("base.bcow", "vm.bcow")

            self.fail_everywhere(command, check)
