"""Snapshots, forks and rollback of mounts with the kernel driver and of their uppers. The judges
are e2fsck, and the trees as they were when the snapshots were taken."""

import contextlib
import json
import mmap
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time

import support
from promises import promise
from support import (BCOW, UNPRIVILEGED, assert_refused, assert_same_tree, bcow, children, need,
                     read_bytes, read_text, run, stop, until, write_file)
from test_kernel_driver import KILLS, SECONDS, SEED
from test_kernel_upper import KernelUpper
from test_snapshots import SOME, killed_at, request, snapshots
import tree

# The system calls of a command that change files. A fork also makes directories.
CHANGES = ("pwrite64,fsync,fdatasync,linkat,renameat2,unlink,fchmod,mkdir,rename,"
           "ftruncate").split(",")
# The system calls by which the process that freezes a file system reads its requests, and with
# which it freezes and thaws.
OF_FREEZER = {"read": "read,recvfrom", "ioctl": "ioctl"}


def is_held(parent):
    """Whether a tracer holds the only child of a process at one system call."""
    seen = set()
    for _ in range(4):
        with contextlib.suppress(OSError, ValueError):
            [child] = children(parent)
            state = support.read_text(f"/proc/{child}/stat").rpartition(") ")[2][0]
            seen.add((child, state, support.read_text(f"/proc/{child}/syscall")))
        time.sleep(0.05)
    return len(seen) == 1 and next(iter(seen))[1] == "t"


class Snapshots(KernelUpper):
    def setUp(self):
        need("strace", "dumpe2fs")
        super().setUp()
        self.random = random.Random(SEED)
        self.count = 0

    def change(self, where=None):
        """Changes a few files, as a program does."""
        where = where or self.where
        for _ in range(4):
            self.count += 1
            name = os.path.join(where, f"file{self.random.randrange(12)}")
            step = self.random.randrange(5)
            if step < 2:
                write_file(name, self.random.randbytes(self.random.choice([10, 5000, 300_000])))
            elif step == 2:
                with open(name, "ab") as file:
                    file.write(b"more" * self.random.randrange(5000))
                    os.fsync(file.fileno())
            elif step == 3:
                os.makedirs(os.path.join(where, f"dir{self.count}", "below"))
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name)
        # A file of the image.
        with open(os.path.join(where, "d2", "big"), "r+b") as file:
            file.seek(self.random.randrange(100_000))
            file.write(self.random.randbytes(5000))

    @contextlib.contextmanager
    def raw(self, disk):
        """A disk as a raw file, for the length of a with block."""
        raw = self.path("disk.raw")
        bcow("convert", "--backing-dir", self.dir, disk, f"raw:{raw}", timeout=SECONDS)
        try:
            yield raw
        finally:
            os.unlink(raw)

    def needs_replay(self, disk):
        with self.raw(disk) as raw:
            return b"needs_recovery" in run("dumpe2fs", "-h", raw).out

    def assert_sound(self, upper, name):
        """The ext4 of a snapshot has no error, and no log to replay."""
        with self.raw(f"{self.disk(upper)}@{name}") as raw:
            self.assertNotIn(b"needs_recovery", run("dumpe2fs", "-h", raw).out)
            run("e2fsck", "-fn", raw, timeout=SECONDS)

    @contextlib.contextmanager
    def shown(self, upper):
        """The mount of an upper, for the length of a with block."""
        where = self.point("shown")
        self.mount(self.image, where, "--upper", upper, "-o", "suid,dev")
        try:
            yield where
        finally:
            self.umount(where)

    def assert_shows(self, upper, expected):
        with self.shown(upper) as where:
            assert_same_tree(self, expected, where)

    def assert_fork_shows(self, name, expected, upper=None):
        fork = self.upper_path("fork")
        bcow("fork", f"{upper or self.upper}@{name}", fork)
        self.assert_shows(fork, expected)
        shutil.rmtree(fork)


class AtRest(Snapshots):
    @promise("What a snapshot shows never changes.")
    def test_uppers_have_the_snapshots_of_their_disks(self):
        self.begin()
        self.change()
        self.umount(self.where)
        taken = json.loads(bcow("snapshot", self.upper, "one", "--json").out)
        self.assertEqual((taken["schema"], taken["upper"], taken["snapshot"], taken["file"]),
                         ("bcow.snapshot/1", self.upper, "one", f"{self.disk()}@one"))
        file = read_bytes(taken["file"])
        before = bcow("diff", self.image, "--upper", self.upper, check=False).out
        self.continue_()
        one = tree.dump(self.where)
        self.change()
        two = tree.dump(self.where)
        self.umount(self.where)
        self.assertTrue(read_bytes(taken["file"]) == file)
        self.assert_sound(self.upper, "one")
        # Changes are found in all files of the disk.
        forked = json.loads(bcow("fork", f"{self.upper}@one", self.upper_path("one"),
                                 "--json").out)
        self.assertEqual((forked["upper"], forked["backing"]),
                         (self.upper_path("one"), "disk.bcow@one"))
        self.assertEqual(bcow("diff", self.image, "--upper", self.upper_path("one"),
                              check=False).out, before)
        self.assert_shows(self.upper_path("one"), one)
        self.assert_shows(self.upper, two)
        self.assert_upper_clean()
        self.assert_upper_clean(self.upper_path("one"))
        [listed] = snapshots(self.upper).values()
        self.assertEqual((listed["used_by"], listed["other_directories"]), (["disk.bcow"], 1))
        self.assertRegex(bcow("snapshot", "list", self.upper).out.decode(),
                         r"(?m)^one +\S+ +1 GiB .* disk\.bcow, 1 elsewhere$")
        layer = self.path("layer.tar")
        bcow("commit", self.image, "--upper", self.upper, f"tar:{layer}")
        self.assertGreater(os.path.getsize(layer), 5000)
        for command, mention in (
                (("snapshot", self.upper, "one"), "disk.bcow@one exists"),
                (("rollback", self.upper, "none"), 'has no snapshot "none"'),
                (("snapshot", "rm", self.upper, "none"), 'has no snapshot "none"'),
                (("fork", f"{self.upper}@none", self.upper_path("x")), 'has no snapshot "none"'),
                (("fork", f"{self.upper}@one", self.upper_path("one")), "exists"),
                (("snapshot", self.dir, "one"), "no mount of bcow"),
                (("fork", self.upper, "/dev/shm/bcow-fork"), "in another file system")):
            assert_refused(self, bcow(*command, check=False), mention)
        assert_refused(self, bcow("snapshot", self.upper, "a/b", check=False),
                       "the name of a snapshot", code=2)
        self.nothing_is_left()

    @promise("If the command is killed at any moment, the disk has its content under its name, and "
             "the snapshot is complete or absent.")
    def test_commands_that_are_killed_end_completely_or_not_at_all(self):
        self.begin()
        old = tree.dump(self.where)
        self.umount(self.where)
        bcow("snapshot", self.upper, "old")
        with self.shown(self.upper) as where:
            self.change(where)
            new = tree.dump(where)
        saved = self.path("saved")
        run("cp", "-a", "--sparse=always", self.upper, saved)
        fork = self.upper_path("fork")
        commands = (["snapshot", self.upper, "one"], ["fork", f"{self.upper}@old", fork],
                    ["rollback", self.upper, "old", "--keep", "kept"],
                    ["snapshot", "rm", self.upper, "old"])
        for command in commands:
            results = set()
            for kind in CHANGES:
                for call in SOME:
                    with self.subTest(command=command, kind=kind, call=call):
                        ended = killed_at(kind, call, command)
                        results.add(self.check_killed(command, old, new, fork))
                        for upper in (self.upper, fork):
                            shutil.rmtree(upper, ignore_errors=True)
                        run("cp", "-a", "--sparse=always", saved, self.upper)
                    if ended:
                        break
            self.assertEqual(results, {False, True}, command)
        # The next fork removes what killed ones have left.
        bcow("fork", f"{self.upper}@old", fork)
        self.nothing_is_left()

    def nothing_is_left(self):
        self.assertEqual([name for name in os.listdir(self.dir) if name.startswith(".")], [])

    def check_killed(self, command, old, new, fork):
        """Whether the killed command had its effect."""
        taken = snapshots(self.upper)
        if command[0] == "fork":
            self.assert_shows(self.upper, new)
            if os.path.exists(fork):
                self.assert_shows(fork, old)
            return os.path.exists(fork)
        if command[0] == "rollback":
            with self.shown(self.upper) as where:
                shown = tree.dump(where)
            self.assertIn(shown, (old, new))
            if shown == old or "kept" in taken:
                self.assert_fork_shows("kept", new)
            return shown == old
        self.assert_shows(self.upper, new)
        if command[1] == "rm":
            bcow("fsck", "--data", self.upper)
            return "old" not in taken
        if "one" in taken:
            self.assert_fork_shows("one", new)
        return "one" in taken

    @promise("An upper that another user can write to is not forked, and its snapshots belong to "
             "its user.")
    def test_uppers_of_other_users_are_refused(self):
        self.begin()
        self.umount(self.where)
        bcow("snapshot", self.upper, "one")
        for command in (("snapshot", self.upper, "two"), ("fork", f"{self.upper}@one", "x"),
                        ("rollback", self.upper, "one"), ("snapshot", "list", self.upper)):
            refused = bcow(*command, user=UNPRIVILEGED, check=False)
            self.assertNotEqual(refused.code, 0)
        os.chown(f"{self.disk()}@one", UNPRIVILEGED, UNPRIVILEGED)
        refused = bcow("fork", f"{self.upper}@one", self.upper_path("fork"), check=False)
        assert_refused(self, refused, "another user can write it")
        self.assertFalse(os.path.exists(self.upper_path("fork")))

    def test_a_snapshot_that_was_replaced_is_not_merged(self):
        other = self.upper_path("other")
        for upper in (self.upper, other):
            self.begin(upper)
            self.change()
            shown = tree.dump(self.where)
            self.umount(self.where)
            bcow("snapshot", upper, "one")
        one, of_other = (f"{self.disk(upper)}@one" for upper in (self.upper, other))
        os.rename(one, self.path("one"))
        shutil.copyfile(of_other, one)
        refused = bcow("snapshot", "rm", self.upper, "one", check=False)
        assert_refused(self, refused, "disk.bcow@one is not the file")
        os.rename(self.path("one"), one)
        bcow("snapshot", "rm", self.upper, "one")
        bcow("snapshot", "rm", other, "one")
        self.assert_shows(other, shown)


class Live(Snapshots):
    def ask_and_kill(self, pid):
        """Asks for the snapshot `one` of the mount, and kills its process meanwhile. Returns the
        exit status of the command."""
        asker = subprocess.Popen([support.BCOW, "snapshot", self.where, "one"],
                                 stderr=subprocess.DEVNULL)
        time.sleep(self.random.uniform(0, 0.1))
        os.kill(pid, signal.SIGKILL)
        return asker.wait(timeout=SECONDS)

    @promise("A snapshot of a mount with the kernel driver has all that programs had written, also "
             "what they had not synchronized. Its file system needs no replay of a log.",
             "Programs that write to the mount wait while a snapshot is taken, and see no error.",
             "A program that waits for each of its writes finds in the snapshot what it had "
             "written up to some moment of the command.")
    def test_snapshots_of_a_mount_that_is_written_are_moments_of_it(self):
        self.begin()
        writer = Writer(self.where)
        taken = {}
        for number in range(6):
            before = writer.written
            until(lambda: writer.error or writer.written > before + 20, "writes")
            begun, name = writer.written, f"s{number}"
            if number % 3 == 2:
                bcow("fork", self.where, self.upper_path(name))
                taken[f"fork-{number // 3 + 1}"] = (begun, writer.begun)
                continue
            bcow("snapshot", (self.where, self.upper)[number % 2], name)
            taken[name] = (begun, writer.begun)
        writer.end()
        statistics = self.stats(self.where)
        self.assertEqual(statistics["errors"]["total"], 0)
        self.end(self.where)
        self.assert_upper_clean()
        self.assert_moments(writer, taken)
        with self.shown(self.upper_path("s2")) as where:
            first, last = taken["fork-1"]
            self.assertTrue(first <= writer.state(where) <= last)

    def assert_moments(self, writer, taken):
        """Checks that each snapshot has what the writer had written at a moment between two."""
        for name, (first, last) in taken.items():
            self.assert_sound(self.upper, name)
            fork = self.upper_path("fork")
            bcow("fork", f"{self.upper}@{name}", fork)
            with self.shown(fork) as where:
                self.assertTrue(first <= writer.state(where) <= last, name)
            shutil.rmtree(fork)

    def test_snapshots_are_removed_while_the_mount_is_written(self):
        self.begin()
        writer = Writer(self.where)
        taken = {}
        for number in range(8):
            before = writer.written
            until(lambda: writer.error or writer.written > before + 10, "writes")
            self.change()
            begun = writer.written
            bcow("snapshot", self.where, f"s{number}")
            taken[f"s{number}"] = (begun, writer.begun)
        for name in self.random.sample(sorted(taken), 6):
            before = writer.written
            bcow("snapshot", "rm", self.random.choice([self.where, self.upper]), name)
            del taken[name]
            until(lambda: writer.error or writer.written > before, "writes")
        self.assertEqual(set(snapshots(self.where)), set(taken))
        writer.end()
        self.assertEqual(self.stats(self.where)["errors"]["total"], 0)
        expected = tree.dump(self.where)
        self.end(self.where)
        self.assert_upper_clean()
        self.assert_shows(self.upper, expected)
        self.assert_moments(writer, taken)
        # The forks are gone, so nothing else needs the files.
        for name in taken:
            bcow("snapshot", "rm", self.upper, name)
        self.assert_shows(self.upper, expected)

    def test_a_mounted_disk_takes_snapshots_through_its_process(self):
        disk = self.make_disk("disk")
        self.mount(disk, self.where)
        write_file(os.path.join(self.where, "file"), b"before")
        bcow("snapshot", self.where, "one")
        write_file(os.path.join(self.where, "file"), b"after")
        bcow("snapshot", disk, "two")
        assert_refused(self, bcow("rollback", disk, "one", check=False), "written by bcow mount")
        self.end(self.where)
        self.assertEqual(list(snapshots(disk)), ["one", "two"])
        for name, content in (("one", b"before"), ("two", b"after")):
            fork = self.disk_path(f"fork-{name}")
            bcow("fork", f"{disk}@{name}", fork)
            self.assert_clean(fork)
            self.mount(fork, self.where)
            self.assertEqual(read_bytes(os.path.join(self.where, "file")), content)
            self.end(self.where)

    def test_forks_are_mounted_and_rollbacks_restart_the_mount(self):
        self.begin()
        self.change()
        one = tree.dump(self.where)
        bcow("snapshot", self.where, "one")
        self.change()
        two = tree.dump(self.where)
        where = self.point("fork")
        bcow("fork", f"{self.where}@one", self.upper_path("fork"), "--mount", where)
        assert_same_tree(self, one, where)
        self.umount(where)
        bcow("rollback", self.where, "one", "--keep", "two", "--restart")
        assert_same_tree(self, one, self.where)
        bcow("rollback", self.where, "two", "--restart")
        assert_same_tree(self, two, self.where)
        self.end(self.where)
        self.assert_upper_clean()

    @promise("If the process of the mount or the command is killed meanwhile, the file system does "
             "not stay frozen. If only the command is killed, the snapshot is completed.")
    def test_a_kill_leaves_no_frozen_file_system_and_no_part_of_a_snapshot(self):
        for number in range(4 * KILLS):
            with self.subTest(number=number):
                upper = self.upper_path(f"killed{number}")
                self.begin(upper)
                self.change()
                os.sync()
                expected = tree.dump(self.where)
                [pid] = self.processes()
                [service] = self.services()
                # Only the process can take it.
                lock = os.path.join(upper, ".bcow", "lock")
                with request(service["control"], lock, "one") as answer:
                    time.sleep(self.random.uniform(0, 0.1))
                    os.kill(pid, signal.SIGKILL)
                    answered = b""
                    with contextlib.suppress(ConnectionResetError):
                        answered = answer.read()
                self.umount_killed(self.where)
                self.assert_ended()
                taken = list(snapshots(upper))
                self.assertIn(taken, ([], ["one"]))
                if answered:
                    self.assertEqual((answered, taken), (b'"done"\n', ["one"]))
                if taken:
                    self.assert_sound(upper, "one")
                self.assert_shows(upper, expected)
                if taken:
                    self.assert_fork_shows("one", expected, upper)
                bcow("fsck", "--data", upper)
        self.begin()
        writer = Writer(self.where)
        for delay in (0.001, 0.01, 0.03):
            asker = subprocess.Popen([support.BCOW, "snapshot", self.where, f"s{delay}"])
            time.sleep(delay)
            asker.kill()
            asker.wait()
            before = writer.written
            until(lambda: writer.error or writer.written > before + 5, "writes")
        writer.end()
        self.end(self.where)
        self.assert_upper_clean()

    @promise("If the process of the mount was killed, also before it had the request of the "
             "command, the snapshot is that of the upper which is left, and needs the replay that "
             "this upper needs.")
    def test_after_a_kill_the_snapshot_needs_the_replay_that_the_upper_needs(self):
        self.begin()
        self.change()
        os.sync()
        expected = tree.dump(self.where)
        [pid] = self.processes()
        os.kill(pid, signal.SIGKILL)
        self.umount_killed(self.where)
        self.assert_ended()
        bcow("snapshot", self.upper, "killed")
        for disk in (self.disk(), f"{self.disk()}@killed"):
            self.assertTrue(self.needs_replay(disk))
        bcow("commit", self.image, "--upper", f"{self.upper}@killed", "--flatten",
             self.path("killed.bcow"))
        with support.mounted(self.path("killed.bcow")) as where:
            assert_same_tree(self, expected, where)
        self.assert_fork_shows("killed", expected)
        self.assert_shows(self.upper, expected)
        # That mount has replayed the log.
        bcow("snapshot", self.upper, "replayed")
        self.assert_sound(self.upper, "replayed")
        self.assertTrue(self.needs_replay(f"{self.disk()}@killed"))

    @promise("If there is no space for the new disk, the command fails, and the mount continues as "
             "before.")
    def test_without_space_nothing_changes(self):
        small = self.point("small")
        run("mount", "-t", "tmpfs", "-o", "size=64M", "tmpfs", small)
        upper = os.path.join(small, f"{self.tag}-upper")
        self.begin(upper)
        self.change()
        full = os.path.join(small, "full")
        os.sync()
        file = os.open(full, os.O_WRONLY | os.O_CREAT)
        with contextlib.suppress(OSError):
            while True:
                os.write(file, bytes(4096))
        os.close(file)
        expected = tree.dump(self.where)
        refused = bcow("snapshot", self.where, "one", check=False)
        assert_refused(self, refused, "No space left on device")
        os.unlink(full)
        assert_same_tree(self, expected, self.where)
        self.assertEqual(snapshots(upper), {})
        self.change()
        expected = tree.dump(self.where)
        bcow("snapshot", self.where, "one")
        self.change()
        # A removal has no place for its copy.
        write_file(os.path.join(self.where, "large"), self.random.randbytes(5 << 20))
        bcow("snapshot", self.where, "two")
        self.change()
        os.sync()
        with contextlib.suppress(OSError), open(full, "wb", 0) as file:
            while True:
                file.write(bytes(4096))
        last = tree.dump(self.where)
        for name in ("one", "two"):
            refused = bcow("snapshot", "rm", self.where, name, check=False)
            assert_refused(self, refused, "No space left on device")
        os.unlink(full)
        assert_same_tree(self, last, self.where)
        self.change()
        bcow("snapshot", "rm", self.where, "two")
        last = tree.dump(self.where)
        self.end(self.where)
        self.assert_shows(upper, last)
        self.assertEqual(bcow("fsck", "--data", upper).code, 0)
        fork = os.path.join(small, "fork")
        bcow("fork", f"{upper}@one", fork)
        self.assert_shows(fork, expected)

    @promise("A snapshot of a mount with `--sync volatile` is durable.")
    def test_a_volatile_mount_has_durable_snapshots(self):
        self.begin(None, None, "--sync", "volatile")
        self.change()
        expected = tree.dump(self.where)
        bcow("snapshot", self.where, "one")
        self.change()
        self.end(self.where)
        self.assert_sound(self.upper, "one")
        self.assert_fork_shows("one", expected)

    def test_a_file_system_that_its_user_has_frozen_stays_frozen(self):
        need("fsfreeze")
        self.begin()
        self.change()
        expected = tree.dump(self.where)
        run("fsfreeze", "--freeze", self.where)
        bcow("snapshot", self.where, "one")
        # It fails if the file system is not frozen.
        run("fsfreeze", "--unfreeze", self.where)
        self.end(self.where)
        self.assert_fork_shows("one", expected)

    @promise("If the process of the mount or the command is killed meanwhile, the file system does "
             "not stay frozen.")
    def test_a_file_system_whose_freezer_is_killed_does_not_stay_frozen(self):
        self.begin()
        [pid] = set(self.processes())
        mounter = support.mounter_of(pid)
        # When it is about to freeze, has frozen it and not said so, and is about to thaw it. The
        # tracer holds it there.
        for number, (call, hold, when) in enumerate((("read", "enter", 1), ("ioctl", "exit", 1),
                                                     ("ioctl", "enter", 2))):
            with self.subTest(call=call, when=when):
                self.change()
                tracer = subprocess.Popen(["strace", "-f", "-qq", "-o", "/dev/null", "-p",
                                           str(mounter), "-e", f"trace={OF_FREEZER[call]}", "-e",
                                           f"inject={OF_FREEZER[call]}:delay_{hold}=4000000:"
                                           f"when={when}"])
                until(lambda: "TracerPid:\t0" not in support.read_text(f"/proc/{mounter}/status"),
                      "strace")
                asker = subprocess.Popen([support.BCOW, "snapshot", self.where, f"s{number}"],
                                         stderr=subprocess.DEVNULL)
                until(lambda: is_held(mounter), "the freezer is held")
                [freezer] = children(mounter)
                os.kill(int(freezer), signal.SIGKILL)
                code = asker.wait(timeout=SECONDS)
                tracer.terminate()
                tracer.wait(timeout=SECONDS)
                self.assertEqual(code == 0, (call, when) == ("ioctl", 2))
                run("timeout", str(SECONDS), "touch", os.path.join(self.where, f"after{number}"))
        self.assertEqual(set(snapshots(self.upper)), {"s2"})
        last = tree.dump(self.where)
        self.end(self.where)
        self.assert_shows(self.upper, last)

    def test_a_pool_continues_with_the_new_disk(self):
        pool = f"snap{self.tag}"
        bcow("pool", "start", pool)
        self.addCleanup(bcow, "pool", "stop", pool, "--force", check=False)
        self.begin(None, None, "--pool", pool)
        expected = {}
        for number in range(4):
            self.change()
            expected[f"s{number}"] = tree.dump(self.where)
            bcow("snapshot", self.where, f"s{number}")
            # Without a flush of it, the disk has it by its ledger.
            write_file(os.path.join(self.where, "last"), str(number))
            last = tree.dump(self.where)
            [pid] = set(self.processes())
            if number % 2:
                os.kill(pid, signal.SIGKILL)
            else:
                bcow("pool", "restart", pool)
            until(lambda: set(self.processes()) not in ({pid}, set()), "the next process")
            assert_same_tree(self, last, self.where)
        expected["last"] = last
        bcow("rollback", self.where, "s1", "--keep", "last", "--restart")
        assert_same_tree(self, expected["s1"], self.where)
        self.assertIn(pool, [one["pool"] for one in self.services()])
        self.umount(self.where)
        self.assert_upper_clean()
        self.assert_shows(self.upper, expected["s1"])
        for name, dump in expected.items():
            self.assert_sound(self.upper, name)
            self.assert_fork_shows(name, dump)

    def test_a_snapshot_waits_for_the_next_process_of_a_pool(self):
        """As for one that has mounted, and does not say yet that it serves the mount."""
        pool = f"snap{self.tag}"
        bcow("pool", "start", pool)
        self.addCleanup(bcow, "pool", "stop", pool, "--force", check=False)
        self.begin(None, None, "--pool", pool)
        self.change()
        where, shown = self.where, tree.dump(self.where)
        pid = json.loads(bcow("pool", "stats", pool, "--json").out)["pid"]
        supervisor = int(re.search(r"PPid:\s*(\d+)", read_text(f"/proc/{pid}/status"))[1])
        stop(supervisor)
        try:
            os.kill(pid, signal.SIGKILL)
            until(lambda: not os.path.exists(f"/proc/{pid}/fd/0"), "the process is gone")
            command = subprocess.Popen([BCOW, "snapshot", where, "one"])
            # It has looked for the process by then.
            with self.assertRaises(subprocess.TimeoutExpired):
                command.wait(0.3)
        finally:
            os.kill(supervisor, signal.SIGCONT)
        self.assertEqual(command.wait(SECONDS), 0)
        assert_same_tree(self, shown, where)

    def test_a_pool_that_is_killed_during_a_snapshot_loses_nothing(self):
        pool = f"snap{self.tag}"
        bcow("pool", "start", pool)
        self.addCleanup(bcow, "pool", "stop", pool, "--force", check=False)
        # A pool that ends often in a short time does not begin again.
        for number in range(min(KILLS, 4)):
            with self.subTest(number=number):
                upper = self.upper_path(f"killed{number}")
                self.begin(upper, None, "--pool", pool)
                self.change()
                last = tree.dump(self.where)
                [pid] = set(self.processes())
                self.ask_and_kill(pid)
                until(lambda: set(self.processes()) not in ({pid}, set()), "the next process")
                assert_same_tree(self, last, self.where)
                write_file(os.path.join(self.where, "after"), b"after")
                last = tree.dump(self.where)
                self.umount(self.where)
                self.assert_upper_clean(upper)
                self.assert_shows(upper, last)

    def test_a_pool_that_is_killed_during_a_removal_loses_nothing(self):
        pool = f"snap{self.tag}"
        # A pool that ends often in a short time does not begin again, so each has its own.
        for kind, call in (("fdatasync", 2), ("linkat", 1), ("rename", 1), ("fdatasync", 5),
                           ("unlink", 1)):
            with self.subTest(kind=kind, call=call):
                upper = self.upper_path(f"{kind}{call}")
                bcow("pool", "start", pool)
                self.begin(upper, None, "--pool", pool)
                expected = {}
                for name in ("one", "two", "three"):
                    self.change()
                    expected[name] = tree.dump(self.where)
                    bcow("snapshot", self.where, name)
                self.change()
                last = tree.dump(self.where)
                [pid] = set(self.processes())
                tracer = subprocess.Popen(["strace", "-f", "-qq", "-o", "/dev/null", "-p",
                                           str(pid), "-e", f"trace={kind}", "-e",
                                           f"inject={kind}:signal=SIGKILL:when={call}"])
                until(lambda: "TracerPid:\t0" not in support.read_text(f"/proc/{pid}/status"),
                      "strace")
                removed = bcow("snapshot", "rm", self.where, "two", check=False)
                self.assertNotEqual(removed.code, 0)
                tracer.wait(timeout=SECONDS)
                until(lambda: set(self.processes()) not in ({pid}, set()), "the next process")
                assert_same_tree(self, last, self.where)
                self.change()
                last = tree.dump(self.where)
                if "two" in snapshots(upper):
                    bcow("snapshot", "rm", self.where, "two")
                assert_same_tree(self, last, self.where)
                self.umount(self.where)
                bcow("pool", "stop", pool)
                self.assert_upper_clean(upper)
                self.assertEqual(set(snapshots(upper)), {"one", "three"})
                self.assert_shows(upper, last)
                for name in ("one", "three"):
                    self.assert_fork_shows(name, expected[name], upper)

    def test_the_new_disk_of_a_killed_snapshot_is_kept_by_all_later_processes(self):
        """The process is killed when the new disk has its name, before the supervisor has it."""
        pool = f"snap{self.tag}"
        bcow("pool", "start", pool)
        self.addCleanup(bcow, "pool", "stop", pool, "--force", check=False)
        self.begin(None, None, "--pool", pool)
        path = os.path.join(self.where, "direct")
        write_file(path, bytes(1 << 20))
        file = os.open(path, os.O_RDWR | os.O_DIRECT)
        self.addCleanup(os.close, file)
        os.fsync(file)
        [pid] = set(self.processes())
        # The first message asks the starter to freeze the file system.
        tracer = subprocess.Popen(["strace", "-f", "-qq", "-o", "/dev/null", "-p", str(pid), "-e",
                                   "inject=sendmsg:signal=SIGKILL:when=2"])
        until(lambda: "TracerPid:\t0" not in support.read_text(f"/proc/{pid}/status"), "strace")
        self.assertNotEqual(bcow("snapshot", self.where, "one", check=False).code, 0)
        tracer.wait(timeout=SECONDS)
        written, read = mmap.mmap(-1, 1 << 20), mmap.mmap(-1, 1 << 20)
        for _ in range(2):
            until(lambda: set(self.processes()) not in ({pid}, set()), "the next process")
            [pid] = set(self.processes())
            written[:] = self.random.randbytes(1 << 20)
            # The disk has it, and is not flushed.
            os.pwrite(file, written, 0)
            os.kill(pid, signal.SIGKILL)
            os.preadv(file, [read], 0)
            self.assertTrue(read[:] == written[:])
        until(lambda: set(self.processes()) not in ({pid}, set()), "the next process")
        self.assertEqual(set(snapshots(self.upper)), {"one"})


class Writer:
    """Writes numbered files with fsync, each after the one before."""

    FILES = 40

    def __init__(self, where):
        self.where = where
        self.begun = self.written = 0
        self.error = None
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.write)
        self.thread.start()

    def write(self):
        try:
            while not self.ended.is_set():
                self.begun += 1
                name = os.path.join(self.where, f"written{self.begun % self.FILES}")
                with open(name, "wb") as file:
                    file.write(f"{self.begun:08}".encode() * 1000)
                    file.flush()
                    if self.begun % 3 == 0:
                        os.fsync(file.fileno())
                self.written = self.begun
        except Exception as error:
            self.error = error

    def end(self):
        self.ended.set()
        self.thread.join()
        if self.error:
            raise self.error

    def state(self, where):
        """The number of the last file in this tree that is complete. Fails if an earlier one is
        missing or has another content."""
        numbers = {}
        for name in os.listdir(where):
            if name.startswith("written"):
                content = read_bytes(os.path.join(where, name))
                if re.fullmatch(rb"(\d{8})\1{999}", content):
                    numbers[int(content[:8])] = name
        last = max(numbers, default=0)
        # The file that was being written can be empty or short.
        for number in range(max(1, last - self.FILES + 2), last):
            if number not in numbers:
                raise AssertionError(f"file {number} is missing, and {last} is there")
        return last
