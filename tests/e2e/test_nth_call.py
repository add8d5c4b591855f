"""Faults at every call: strace fails the n-th system call of a kind in a command, for each n, or
kills or stops the command there; a preloaded library makes the n-th read or write short; and the
command gets few descriptors or little memory. It then succeeds with the right result, or fails with
a message, and loses nothing. The same in the processes of mounts with an upper, in which a program
makes each of its changes durable. A clock that jumps disturbs none of them.

The calls that the dynamic linker makes before the program begins are not failed. Each run fails a
sample of the calls; BCOW_CALLS=all fails up to 250 of each kind in commands and 25 in mounts, and
prints the figures of docs/reliability.md."""

import collections
import contextlib
import glob
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile

import durable_steps
from support import (BCOW, TOP, bcow, children, digest_in, is_mounted, need, read_bytes, run,
                     write_file)
from test_disks import Directory
from test_snapshots import CHANGES, content, snapshots, write
from union import UnionCase

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
    "socket": ("EMFILE",),
    "connect": ("ECONNREFUSED",),
    "sendto": ("ECONNRESET", "EINTR"),
    "recvfrom": ("ECONNRESET", "EINTR"),
}
# Also in the processes of mounts, which send descriptors to each other.
OF_MOUNTS = {
    **ERRORS,
    "sendmsg": ("ECONNRESET", "EINTR", "EMFILE"),
    "recvmsg": ("ECONNRESET", "EINTR"),
    "accept4": ("EMFILE",),
    "poll": ("EINTR", "ENOMEM"),
}
KILLS = {*CHANGES.split(","), "mkdir", "copy_file_range"}
# Sizes of the data in KiB, from too little for anything to enough.
MEMORY = range(2048, 16 << 10, 128)
# Of them, the dynamic linker needs one.
DESCRIPTORS = range(4, 32)
# The last words, without memory, of Rust's library, of its start of a thread, of glibc and of zstd.
NO_MEMORY = (b"memory allocation of|failed to allocate an alternative stack|out of memory|"
             b"zstd returned null pointer when creating new context")
SIZE = 1 << 20


def faults(kind):
    """What can happen at a call of this kind, as strace injects it."""
    return ([f"error={error}" for error in OF_MOUNTS[kind]] + ["signal=STOP"]
            + ["signal=KILL"] * (kind in KILLS))


def preloaded(case, name):
    """The path of a library of tests/e2e/preload."""
    scratch = tempfile.TemporaryDirectory(prefix="preload-")
    case.addCleanup(scratch.cleanup)
    library = os.path.join(scratch.name, f"{name}.so")
    run("gcc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library,
        os.path.join(TOP, "tests", "e2e", "preload", f"{name}.c"))
    return library


def numbers_of(kind, calls, before, most, dice):
    """Numbers of calls to fail, at most that many."""
    first = before[kind] + 1
    last = max((thread[kind] for thread in calls), default=0)
    numbers = range(first, last + 1)
    return numbers if len(numbers) <= most else sorted(dice.sample(numbers, most))


def counts(command):
    run(*tracer("calls"), *command)
    return counted("calls")


def tracer(log):
    return ["strace", "-D", "-f", "-qq", "-o", log, "-e", f"trace={','.join(OF_MOUNTS)}"]


def counted(log):
    """The number of calls of each kind that each thread has made, the main thread first."""
    threads = collections.defaultdict(collections.Counter)
    with open(log) as file:
        for line in file:
            thread, call = line.split(maxsplit=1)
            if match := re.match(r"(\w+)\(", call):
                threads[thread][match[1]] += 1
    os.unlink(log)
    return list(threads.values())


class NthCall(Directory):
    """Each test has files in its directory, which each run of the command gets as copies."""

    # Whether the command was killed.
    was_killed = False
    # With which status a command may fail if the clock jumps.
    clock_errors = ()

    def setUp(self):
        need("strace", "gcc")
        super().setUp()
        self.short, self.clock = preloaded(self, "short"), preloaded(self, "clock")
        self.random = random.Random(1)
        # Of the dynamic linker and the start of the program.
        self.before_begin = counts([BCOW, "version"])[0]

    def fail_everywhere(self, command, check):
        """Fails calls of a command. `check` gets whether the command succeeded."""
        name = " ".join(word for word in command if re.fullmatch("[a-z]+", word))
        self.files, table = glob.glob("*"), collections.Counter()
        with self.copied_files():
            calls = counts([BCOW, *command])
            check(True)

        def fail(kind, number, fault):
            with self.subTest(command=name, kind=kind, number=number, fault=fault), \
                    self.copied_files():
                succeeded = self.succeeds(command, kind, number, fault)
                check(succeeded)
                table[fault.partition("=")[2] if "signal" in fault else "failed"] += 1
                table["command failed"] += not succeeded and "error" in fault

        for kind in ERRORS:
            # A command that looks at all processes makes many calls.
            for number in numbers_of(kind, calls, self.before_begin, 250 if ALL else 2,
                                     self.random):
                for fault in faults(kind) if ALL else (self.random.choice(faults(kind)),):
                    fail(kind, number, fault)
        # A sample can have only calls that a command does without.
        for kind in ERRORS:
            for number in numbers_of(kind, calls, self.before_begin, 250, self.random):
                if not table["command failed"]:
                    fail(kind, number, faults(kind)[0])
        self.shorten_everywhere(name, command, check, table)
        self.starve(name, command, check, table)
        if ALL:
            print(name, dict(table), file=sys.stderr)
        self.assertGreater(table["command failed"], 0)

    @contextlib.contextmanager
    def copied_files(self):
        """Copies of the files of the test, in a directory of their own."""
        top = os.getcwd()
        os.mkdir("copy")
        if self.files:
            run("cp", "-a", "--sparse=always", *self.files, "copy")
        os.chdir("copy")
        try:
            yield
        finally:
            os.chdir(top)
            shutil.rmtree("copy")

    def succeeds(self, command, kind, number, fault):
        """Runs a command with a fault; returns whether it succeeds."""
        process = subprocess.Popen(
            ["strace", "-D", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={kind}",
             "-e", f"inject={kind}:{fault}:when={number}", BCOW, *command],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while True:
            try:
                out, err = process.communicate(timeout=0.05 if "STOP" in fault else 600)
                break
            except subprocess.TimeoutExpired:
                for one in (process.pid, *children(process.pid)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(one), signal.SIGCONT)
        self.was_killed = "KILL" in fault
        if self.was_killed and b"makes the connections has ended" not in err:
            self.assertIn(process.returncode, (0, -signal.SIGKILL), err)
        else:
            self.assertTrue(0 <= process.returncode < 128, (process.returncode, err))
        if "STOP" in fault:
            self.assertEqual(process.returncode, 0, err)
        if process.returncode > 0:
            self.assertRegex(out + err, b"error[: ]")
        self.assertNotIn(b"panicked", err)
        return process.returncode == 0

    def shorten_everywhere(self, name, command, check, table):
        """Makes reads and writes of a command short, with which it succeeds."""
        with self.copied_files():
            self.was_killed = False
            env = {"LD_PRELOAD": self.short, "SHORT_COUNTS": os.path.join(os.getcwd(), "counts")}
            run(BCOW, *command, env=env)
            with open("counts") as file:
                made = {call: int(count) for call, count in map(str.split, file)}
        for call, count in made.items():
            most = 250 if ALL else 1
            for number in sorted(self.random.sample(range(1, count + 1), min(most, count))):
                with self.subTest(command=name, short=call, number=number), self.copied_files():
                    run(BCOW, *command, env={"LD_PRELOAD": self.short, "SHORT_CALL": call,
                                             "SHORT_AT": str(number)})
                    check(True)
                    table["short"] += 1

    def starve(self, name, command, check, table):
        """Runs a command with few descriptors, with little memory, and with a clock that jumps."""
        def limited(option, limits):
            for limit in limits if ALL else self.random.sample(limits, 2):
                with self.subTest(command=name, limit=f"{option}={limit}"), self.copied_files():
                    # Rust's library can deadlock if it has no memory to print a backtrace.
                    process = subprocess.run(["prlimit", f"--{option}={limit}", BCOW, *command],
                                             stdin=subprocess.DEVNULL, capture_output=True,
                                             timeout=600, env={**os.environ, "RUST_BACKTRACE": "0"})
                    self.was_killed = process.returncode == -signal.SIGABRT
                    if self.was_killed:
                        self.assertRegex(process.stderr, NO_MEMORY)
                    elif process.returncode:
                        self.assertTrue(0 < process.returncode < 128, process)
                        self.assertRegex(process.stdout + process.stderr, b"error[: ]")
                    for panic in re.findall(rb"panicked at .*\n(.*)", process.stderr):
                        self.assertRegex(panic, NO_MEMORY)
                    check(process.returncode == 0)
                    table["starved"] += 1

        limited("nofile", DESCRIPTORS)
        limited("data", [kib << 10 for kib in MEMORY])
        with self.subTest(command=name, fault="clock"), self.copied_files():
            self.was_killed = False
            result = run(BCOW, *command, env={"LD_PRELOAD": self.clock}, check=False)
            self.assertTrue(result.code in (0, *self.clock_errors), result)
            check(result.code == 0)

    def assert_no_more(self, *names):
        # A killed command leaves its hidden files.
        left = [name for name in os.listdir() if not (self.was_killed and name.startswith("."))]
        self.assertEqual(sorted(left), sorted(names))

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


    def test_a_layout_gets_the_whole_image_or_none(self):
        os.mkdir("tree")
        write_file("tree/large", self.random.randbytes(300_000))
        bcow("convert", "dir:tree", "a.bcow")
        bcow("copy", "a.bcow", "oci:expected:tag")
        digest = digest_in("expected")
        for name in ("tree", "expected"):
            shutil.rmtree(name)

        def check(succeeded):
            try:
                self.assertEqual(digest_in("store"), digest)
            except (FileNotFoundError, ValueError):
                self.assertFalse(succeeded)
                # A further copy completes it.
                bcow("copy", "a.bcow", "oci:store:tag")
            bcow("fsck", "--data", "oci:store:tag")

        self.fail_everywhere(["copy", "a.bcow", "oci:store:tag"], check)


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


class Mounts(UnionCase):
    """The processes of mounts. A call that fails may fail a change of the program, or end the
    mount; each change before it is there after the next mount."""

    mounts = False
    plant = staticmethod(durable_steps.plant)

    def setUp(self):
        need("strace")
        super().setUp()
        self.command = self.mount.command
        self.random = random.Random(1)

    def run_steps(self, prefix):
        """Mounts with a process that a command starts, and makes changes until one fails. Returns
        the files before and after the last change, and whether something failed."""
        shutil.rmtree(self.upper)
        os.mkdir(self.upper)
        self.mount.command = lambda: [*prefix, *self.command()]
        files = durable_steps.files_at(self.lower.tree)
        before, failed, self.was_mounted = dict(files), False, False
        try:
            self.mount.mount()
            self.was_mounted = True
            for number, step in enumerate(durable_steps.steps(self.where, 1)):
                self.before_step(number)
                before = dict(files)
                step(files)
            before = dict(files)
        except (OSError, AssertionError):
            failed = True
        finally:
            self.mount.command = self.command
        if is_mounted(self.where):
            failed |= bcow("umount", self.where, check=False, timeout=60).code != 0
        if is_mounted(self.where):
            run("umount", "-l", self.where)
        code = self.end_process()
        self.assertNotIn("panicked", self.mount.release())
        return before, files, failed or code != 0

    def before_step(self, number):
        pass

    def end_process(self):
        """Waits until the process without a mount has ended; returns its exit code."""
        return self.mount.process.wait(timeout=60)

    def fail_everywhere(self, count):
        log = os.path.join(self.mount.directory, "calls")
        before, _, failed = self.run_steps(tracer(log))
        self.assertFalse(failed)
        calls, table = counted(log), collections.Counter()
        # Without random numbers, which Linux always has, Rust's library ends the process.
        kinds = [kind for kind in OF_MOUNTS if kind != "getrandom"]
        chosen = [(kind, number, fault) for kind in kinds for number in numbers_of(
                      kind, calls, {kind: 0}, 25, self.random)
                  for fault in faults(kind) if "STOP" not in fault]
        for kind, number, fault in chosen if ALL else self.random.sample(chosen, count):
            with self.subTest(kind=kind, number=number, fault=fault):
                table["failed"] += self.fail_one(kind, number, fault)
                table[kind] += 1
        if ALL:
            print(self.kind, sum(table.values()) - table["failed"], dict(table), file=sys.stderr)

    def fail_one(self, kind, number, fault):
        """Fails one call of each thread. Returns whether something failed."""
        old, new, failed = self.run_steps(
            ["strace", "-D", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={kind}",
             "-e", f"inject={kind}:{fault}:when={number}"])
        if self.was_mounted:
            bcow("fsck", self.upper)
        self.mount.mount()
        problem = durable_steps.problem_between(durable_steps.files_at(self.where), old, new)
        self.mount.unmount()
        self.assertIsNone(problem)
        return failed

    def test_changes_before_the_fault_are_kept(self):
        self.fail_everywhere(4)

    def test_a_clock_that_jumps_disturbs_no_program(self):
        _, files, failed = self.run_steps(["env", f"LD_PRELOAD={preloaded(self, 'clock')}"])
        self.assertFalse(failed)
        bcow("fsck", self.upper)
        self.mount.mount()
        problem = durable_steps.problem_between(durable_steps.files_at(self.where), files, files)
        self.mount.unmount()
        self.assertIsNone(problem)


class KernelMounts(Mounts):
    kind = "bcow+driver=kernel"

    def test_a_process_without_requests_of_the_kernel_ends(self):
        # Each thread fails to read one, also while the file system is being mounted.
        for number in (2, 4, 6):
            with self.subTest(number=number):
                self.assertTrue(self.fail_one("read", number, "error=EIO"))

    def test_changes_before_the_fault_are_kept(self):
        self.fail_everywhere(2)


class PooledMounts(Mounts):
    """The supervisor of a pool, and the processes that serve its mount one after the other: the
    first is killed between two changes."""

    kind = "bcow+pool"

    def before_step(self, number):
        if number == 5:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.mount.serving() or self.fail("no process serves the mount"),
                        signal.SIGKILL)

    def end_process(self):
        serving = self.mount.serving()
        if self.mount.bcow("pool", "stop", "--force", "p", check=False).code != 0:
            # If its threads cannot send, no request reaches it.
            self.mount.process.terminate()
        try:
            return super().end_process()
        finally:
            for pid in filter(None, (self.mount.process.poll() is None and self.mount.process.pid,
                                     serving)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
