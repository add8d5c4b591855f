"""Snapshots of uppers with the FUSE driver, forks, and the way back: at rest, and while programs
use the mount. The tree of each fork is compared with the recorded one."""

import contextlib
import glob
import json
import mmap
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import threading

import support
import test_union_rootless
from promises import promise
from support import (BCOW, UNPRIVILEGED, assert_refused, assert_same_tree, bcow, is_mounted, need,
                     read_bytes, run, tree, until, write_file)
from test_snapshots import killed_at, request
from union import UnionCase

ROUNDS = int(os.environ.get("BCOW_ROUNDS", "3"))
SEED = int(os.environ.get("BCOW_SEED", "1"))
# The system calls that change directories, and those that make files durable.
CHANGES = "mkdirat,renameat,renameat2,unlinkat,linkat,mknodat,fsync,syncfs,ftruncate,fchownat"
# Some calls of a command that makes many.
SOME = (1, 2, 4, 13, 40)


def change(where, seed):
    """Changes of each kind in a mount of the usual tree."""
    dice = random.Random(seed)

    def at(*names):
        return os.path.join(where, *names)

    for name in ("d2/big", "d2/blocks", "d2/holes", "d1/odd"):
        # The first changes remove d1.
        with contextlib.suppress(FileNotFoundError), open(at(name), "r+b", buffering=0) as file:
            for _ in range(5):
                file.seek(dice.randrange(max(1, os.path.getsize(at(name)))))
                file.write(dice.randbytes(dice.choice([1, 100, 5000])))
    os.truncate(at("d2/big"), 900_000 + dice.randrange(1000))
    new = f"new-{seed}"
    os.mkdir(at(new), 0o2750)
    write_file(at(new, "file"), dice.randbytes(20_000))
    os.link(at(new, "file"), at(f"name-{seed}"))
    os.link(at("d0/pair"), at(new, "pair"))
    os.symlink(f"to-{seed}", at(new, "link"))
    os.mknod(at(new, "null"), 0o20640, os.makedev(1, 3))
    os.mkfifo(at(new, "pipe"), 0o604)
    os.setxattr(at(new, "file"), "user.of", b"container")
    os.setxattr(at(new, "file"), "trusted.overlay.opaque", b"of the container")
    os.setxattr(at(new), "user.of", dice.randbytes(40))
    os.chown(at("d0/hundred"), seed, 5)
    os.chmod(at("setgid/tool"), 0o6711)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(at("many", f"entry-{seed:03}"))
        os.unlink(at("d1/pair"))
        os.rename(at("d0/sub"), at("moved"))
        shutil.rmtree(at("d1"))
        os.mkdir(at("d1"))
    write_file(at("d1", f"file-{seed}"), b"new")
    os.utime(at("top"), ns=(seed, seed * 10 ** 9 + 7))


def snapshots(target, user=None):
    """The names of the snapshots, in their order."""
    listed = json.loads(bcow("snapshot", "list", target, "--json", user=user).out)["snapshots"]
    return [snapshot["name"] for snapshot in listed]


class UpperCase(UnionCase):
    def setUp(self):
        super().setUp()
        self.count = 0

    def beside(self, name):
        return os.path.join(self.mount.directory, name)

    @contextlib.contextmanager
    def mounted(self, upper):
        """Mounts another upper of the image. `bcow fsck` finds nothing in it, before and after."""
        self.count += 1
        where = self.beside(f"mounted-{self.count}")
        os.mkdir(where)
        image = self.lower.make_image()
        bcow("fsck", upper, image)
        bcow("mount", image, where, "--upper", upper, "-o", self.mount.access)
        try:
            yield where
        finally:
            bcow("umount", where)
            os.rmdir(where)
        bcow("fsck", upper, image)

    def assert_shows(self, upper, expected):
        with self.mounted(upper) as where:
            assert_same_tree(self, expected, where)

    def assert_upper(self, upper, expected):
        """Checks an upper by a copy, so that it stays as it is."""
        run("cp", "-a", upper, self.beside("checked"))
        self.assert_shows(self.beside("checked"), expected)
        shutil.rmtree(self.beside("checked"))

    def nothing_is_left(self):
        self.assertEqual(glob.glob(self.beside(".*")), [])
        kept = os.path.join(self.upper, ".bcow", "snapshots", ".*")
        self.assertEqual(glob.glob(kept), [])


class AtRest(UpperCase):
    """Uppers that no process uses."""

    @promise("Owners, modes, times, extended attributes, hard links and whiteouts are those of the "
             "upper.",
             "A fork needs neither the upper nor the snapshot. What is written to it does not "
             "change them.")
    def test_snapshots_and_forks_show_the_tree(self):
        expected = {}
        for seed in range(3):
            change(self.where, seed)
            expected[f"s{seed}"] = tree.dump(self.where)
            self.mount.unmount()
            taken = json.loads(bcow("snapshot", self.upper, f"s{seed}", "--json").out)
            self.assertEqual(taken["schema"], "bcow.snapshot/1")
            self.mount.mount()
        last = tree.dump(self.where)
        self.mount.unmount()
        self.assertEqual(sorted(snapshots(self.upper)), sorted(expected))
        for name, shown in expected.items():
            fork = self.beside(f"fork-{name}")
            bcow("fork", f"{self.upper}@{name}", fork)
            with self.mounted(fork) as where:
                assert_same_tree(self, shown, where)
                change(where, 77)
        # The state of now, into an empty directory.
        os.mkdir(self.beside("now"))
        bcow("fork", self.upper, self.beside("now"))
        self.assert_shows(self.beside("now"), last)
        for name, shown in expected.items():
            bcow("rollback", self.upper, name)
            self.assert_upper(self.upper, shown)
        self.nothing_is_left()
        os.rename(self.beside("fork-s1"), self.beside("alone"))
        shutil.rmtree(self.upper)
        os.mkdir(self.upper)
        with self.mounted(self.beside("alone")) as where:
            self.assertTrue(os.path.exists(os.path.join(where, "new-77/file")))

    def two_states(self):
        """Makes the snapshot `one`, and further changes; gives the trees. The upper is at rest."""
        change(self.where, 1)
        one = tree.dump(self.where)
        self.mount.unmount()
        bcow("snapshot", self.upper, "one")
        self.mount.mount()
        change(self.where, 2)
        two = tree.dump(self.where)
        self.mount.unmount()
        return one, two

    def test_a_rollback_keeps_what_it_replaces(self):
        one, two = self.two_states()
        bcow("rollback", self.upper, "one", "--keep", "two")
        self.assert_upper(self.upper, one)
        self.assertEqual(snapshots(self.upper), ["one", "two"])
        bcow("rollback", self.upper, "two")
        self.assert_upper(self.upper, two)
        bcow("snapshot", "rm", self.upper, "one")
        self.assertEqual(snapshots(self.upper), ["two"])
        self.assert_upper(self.upper, two)
        self.nothing_is_left()

    @promise("What a snapshot shows never changes: no command writes to it, and no mount uses it "
             "as its upper.",
             "A command that fails, for example because the host has no space, leaves the upper "
             "and all snapshots as they were.")
    def test_a_snapshot_is_read_and_never_written(self):
        change(self.where, 1)
        self.mount.unmount()
        image = self.lower.make_image()
        bcow("snapshot", self.upper, "one")
        one = os.path.join(self.upper, ".bcow", "snapshots", "one")
        before, layer = tree.dump(one), self.beside("layer.tar")
        for options in (["diff", image, "--upper"], ["commit", image, "--upper"]):
            target = [f"tar:{layer}"] if options[0] == "commit" else []
            of_upper, of_one = (bcow(*options, upper, *target, check=False)
                                for upper in (self.upper, one))
            self.assertEqual((of_upper.code, of_upper.out), (of_one.code, of_one.out))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(layer)
        bcow("fsck", "--data", one, image)
        where = self.beside("elsewhere")
        os.mkdir(where)
        refused = bcow("mount", image, where, "--upper", one, check=False)
        assert_refused(self, refused, one, "a snapshot, which never changes")
        for command, said in (
                (["snapshot", self.upper, "one"], "exists"),
                (["snapshot", "rm", self.upper, "two"], "two"),
                (["rollback", self.upper, "two"], "two"),
                (["fork", f"{self.upper}@two", self.beside("fork")], "two"),
                (["fork", f"{self.upper}@one", self.upper], "exists")):
            result = bcow(*command, check=False)
            assert_refused(self, result, said)
        self.assertEqual(snapshots(self.upper), ["one"])
        self.assertEqual(tree.dump(one), before)
        self.nothing_is_left()

    @promise("If the command is killed at any moment, the upper has its content, and the snapshot, "
             "the fork or the rollback is complete or absent.")
    def test_commands_that_are_killed_are_complete_or_absent(self):
        need("strace")
        one, two = self.two_states()
        copy = self.beside("copy")
        of_copy = os.path.join(copy, "upper")
        fork = os.path.join(copy, "fork")

        def is_rolled_back():
            self.assertIn("one", snapshots(of_copy))
            with self.mounted(of_copy) as where:
                found = tree.dump(where)
            self.assertIn("one", snapshots(of_copy))
            is_one = "new-2" not in found
            assert_same_tree(self, one if is_one else two, found)
            return is_one

        def is_there(name, expected):
            if name in snapshots(of_copy):
                bcow("fork", f"{of_copy}@{name}", fork)
                self.assert_shows(fork, expected)
                return True
            return False

        def is_forked():
            if os.path.exists(fork):
                self.assert_shows(fork, one)
                return True
            bcow("fork", f"{of_copy}@one", fork)
            return False

        for command, check in (
                (["snapshot", of_copy, "two"], lambda: is_there("two", two)),
                (["rollback", of_copy, "one"], is_rolled_back),
                (["fork", f"{of_copy}@one", fork], is_forked),
                (["snapshot", "rm", of_copy, "one"], lambda: is_there("one", one))):
            found = set()
            for kind in CHANGES.split(","):
                for call in SOME:
                    os.mkdir(copy)
                    run("cp", "-a", self.upper, of_copy)
                    ended = killed_at(kind, call, command)
                    with self.subTest(command=command[:2], kind=kind, call=call):
                        found.add(check())
                        # What was left is removed.
                        bcow("snapshot", of_copy, "after")
                        bcow("fork", f"{of_copy}@after", os.path.join(copy, "fork-2"))
                        if command[0] != "fork":
                            self.assertEqual(glob.glob(os.path.join(copy, ".*")), [])
                        if command[0] != "rollback":
                            self.assert_shows(of_copy, two)
                    shutil.rmtree(copy)
                    if ended:
                        break
            self.assertEqual(found, {False, True}, command[:2])

    @promise("The same is true after a power failure.")
    def test_a_snapshot_is_durable_before_it_has_its_name(self):
        need("strace")
        change(self.where, 1)
        self.mount.unmount()
        for command in (["snapshot", self.upper, "one"],
                        ["fork", f"{self.upper}@one", self.beside("fork")],
                        ["rollback", self.upper, "one"]):
            calls = f"trace={CHANGES},pwrite64,copy_file_range"
            run("strace", "-f", "-o", self.beside("log"), "-e", calls, BCOW, *command)
            with open(self.beside("log")) as log:
                lines = [line.split(None, 1)[1] for line in log
                         if "(" in line and "unlinkat" not in line]
            calls = [line.split("(")[0] for line in lines]
            by = "EXCHANGE" if command[0] == "rollback" else "rename"
            placed = [at for at, line in enumerate(lines) if by in line]
            # The call by which the result gets its name. Later ones remove the old upper.
            last = placed[-1]
            before = calls[:last]
            synced = len(before) - 1 - before[::-1].index("syncfs")
            written = [call for call in before[synced + 1:]
                       if call in ("copy_file_range", "mknodat", "linkat", "fchownat")]
            self.assertEqual(written, [], command)
            self.assertIn("fsync", calls[last:], command)

    def test_reflinks_share_the_blocks(self):
        need("mkfs.xfs")
        self.mount.unmount()
        disk = self.beside("xfs")
        support.sparse_file(disk + ".img", 512 << 20)
        run("mkfs.xfs", "-q", disk + ".img")
        os.mkdir(disk)
        run("mount", "-o", "loop", disk + ".img", disk)
        self.addCleanup(lambda: is_mounted(disk) and run("umount", "-l", disk))
        upper = os.path.join(disk, "upper")
        size = 64 << 20
        with self.mounted_new(upper) as where:
            change(where, 1)
            write_file(os.path.join(where, "large"), os.urandom(size))
            shown = tree.dump(where)

        def used():
            run("sync", "-f", disk)
            found = os.statvfs(disk)
            return (found.f_blocks - found.f_bfree) * found.f_bsize

        before = used()
        bcow("snapshot", upper, "one")
        bcow("fork", f"{upper}@one", os.path.join(disk, "fork"))
        self.assertLess(used() - before, size // 4)
        self.assert_shows(os.path.join(disk, "fork"), shown)
        run("umount", disk)

    @contextlib.contextmanager
    def mounted_new(self, upper):
        os.mkdir(self.beside("new"))
        bcow("mount", self.lower.make_image(), self.beside("new"), "--upper", upper, "-o",
             self.mount.access)
        try:
            yield self.beside("new")
        finally:
            bcow("umount", self.beside("new"))

    def test_a_full_host_changes_nothing(self):
        self.mount.unmount()
        disk = self.disk(48)
        upper = os.path.join(disk, "upper")
        with self.mounted_new(upper) as where:
            change(where, 1)
            write_file(os.path.join(where, "large"), os.urandom(30 << 20))
            shown = tree.dump(where)
            full = bcow("snapshot", where, "one", check=False)
            assert_refused(self, full, "No space left on device")
            self.assertEqual(tree.dump(where), shown)
        full = bcow("snapshot", upper, "one", check=False)
        assert_refused(self, full, "No space left on device")
        self.assertEqual(snapshots(upper), [])
        self.assert_shows(upper, shown)


class Writer:
    """A program that numbers its steps. Each step writes its number into a partial file, makes a
    file, and renames it over `current`, so that each state shows how far it goes."""

    PROGRAM = """
import os, struct, sys
where, slots = sys.argv[1], int(sys.argv[2])
large = os.open(os.path.join(where, "d2/big"), os.O_RDWR)
number = 0
while True:
    number += 1
    data = struct.pack("<Q", number) * 16
    assert os.pwrite(large, data, number % slots * 9001) == len(data)
    new = os.path.join(where, f"step-{number}")
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    assert os.write(file, data) == len(data)
    if number % 50 == 0:
        os.fsync(large)
    os.close(file)
    os.rename(new, os.path.join(where, "current"))
    print(number, flush=True)
"""
    SLOTS = 100

    def __init__(self, where):
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.PROGRAM, where, str(self.SLOTS)], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True)
        self.number = 0
        self.thread = threading.Thread(target=self.follow, daemon=True)
        self.thread.start()

    def follow(self):
        for line in self.process.stdout:
            self.number = int(line)

    def goes_on(self, steps=20):
        target = self.number + steps
        until(lambda: self.number >= target or self.process.poll() is not None, "steps")

    def __enter__(self):
        self.goes_on()
        return self

    def __exit__(self, *_):
        code = self.process.poll()
        self.process.kill()
        self.process.wait()
        self.thread.join()
        errors = self.process.stderr.read()
        self.process.stdout.close()
        self.process.stderr.close()
        if code is not None:
            raise AssertionError(f"the writer ended with {code}: {errors}")

    def check(self, test, where):
        """Fails unless the tree is that of one moment. Returns the number of the last step."""
        def number_in(data):
            numbers = set(struct.unpack("<16Q", data))
            test.assertEqual(len(numbers), 1)
            return numbers.pop()

        current = number_in(read_bytes(os.path.join(where, "current")))
        steps = [name for name in os.listdir(where) if name.startswith("step-")]
        # The next step may have begun.
        test.assertIn(steps, ([], [f"step-{current + 1}"]))
        large = read_bytes(os.path.join(where, "d2/big"))
        for number in range(max(1, current - self.SLOTS + 2), current + 1):
            at = number % self.SLOTS * 9001
            test.assertEqual(number_in(large[at:at + 128]), number)
        return current


class Mounted(UpperCase):
    """Mounts that programs use."""

    @promise("A snapshot has all that requests wrote that the mount had answered before the "
             "command began, and nothing that was requested after it ended.",
             "Programs that use the mount wait while the upper is copied, and see no error.")
    def test_snapshots_under_load_are_of_one_moment(self):
        with Writer(self.where) as writer:
            for number in range(ROUNDS * 3):
                writer.goes_on()
                before = writer.number
                bcow("snapshot", self.where, f"s{number}")
                # The line of a step can be late.
                after = writer.number + 2
                fork = self.beside(f"fork-{number}")
                bcow("fork", f"{self.where}@s{number}", fork)
                with self.mounted(fork) as where:
                    self.assertTrue(before <= writer.check(self, where) <= after)
            writer.goes_on()
        self.mount.unmount()
        bcow("fsck", self.upper, self.lower.make_image())
        bcow("rollback", self.upper, "s1")
        self.assert_upper(self.upper, self.shown(self.beside("fork-1")))

    def shown(self, upper):
        with self.mounted(upper) as where:
            return tree.dump(where)

    @promise("It has also what programs wrote to maps, and what the kernel has collected for `-o "
             "writeback`.",
             "A file without a name, which a program still has open, is in no snapshot.")
    def test_the_tree_of_a_quiet_mount(self):
        for options in ((), ("-o", "writeback")):
            upper = self.beside(f"upper-{len(options)}")
            where = self.beside("where")
            os.makedirs(where, exist_ok=True)
            bcow("mount", self.lower.make_image(), where, "--upper", upper, "-o", self.mount.access,
                 *options)
            change(where, 1)
            nameless = os.open(os.path.join(where, "nameless"), os.O_RDWR | os.O_CREAT)
            os.write(nameless, b"x" * 100_000)
            os.unlink(os.path.join(where, "nameless"))
            with open(os.path.join(where, "d2/big"), "r+b") as file:
                with mmap.mmap(file.fileno(), 0) as memory:
                    memory[70_000:70_006] = b"mapped"
                    bcow("snapshot", where, "one")
            shown = tree.dump(where)
            bcow("fork", where, self.beside(f"now-{len(options)}"))
            change(where, 2)
            bcow("fork", f"{where}@one", self.beside(f"fork-{len(options)}"))
            os.close(nameless)
            bcow("umount", where)
            for fork in ("now", "fork"):
                # Of the map, the time of the change is known only later.
                with self.mounted(self.beside(f"{fork}-{len(options)}")) as again:
                    assert_same_tree(self, shown, again, ignore=("mtime:d2/big",))
                    self.assertEqual(read_bytes(os.path.join(again, "d2/big"))[70_000:70_006],
                                     b"mapped")
            self.assertEqual(snapshots(upper), ["one"])

    def test_a_fork_is_mounted_with_the_image_of_its_source(self):
        change(self.where, 1)
        shown = tree.dump(self.where)
        bcow("snapshot", self.where, "one")
        change(self.where, 2)
        fork, where = self.beside("fork"), self.beside("elsewhere")
        os.mkdir(where)
        forked = json.loads(bcow("fork", f"{self.where}@one", fork, "--mount", where, "--json",
                                 "--", "-o", self.mount.access).out)
        self.assertEqual((forked["upper"], forked["mount"]), (fork, where))
        assert_same_tree(self, shown, where)
        bcow("umount", where)
        # The fork exists when its mount fails, and the command says so.
        refused = bcow("fork", f"{self.where}@one", self.beside("fork-2"), "--mount",
                       self.beside("none"), check=False)
        assert_refused(self, refused, "cannot use mountpoint", "hint: .*fork-2 is complete")
        self.assert_shows(self.beside("fork-2"), shown)
        self.mount.unmount()
        refused = bcow("fork", f"{self.upper}@one", self.beside("fork-3"), "--mount", where,
                       check=False)
        assert_refused(self, refused, "it is not mounted, so its image is not known")
        self.assertFalse(os.path.exists(self.beside("fork-3")))

    @promise("`rollback --restart` of a mount whose files are in use changes nothing. If the "
             "rollback fails, the mount shows what it did before. The new mount has the options of "
             "the earlier one.")
    def test_a_rollback_restarts_the_mount(self):
        where, upper = self.beside("restarted"), self.beside("restarted-upper")
        os.mkdir(where)
        # Paths of the command line are relative to its directory, and the options stay.
        run("env", "-C", self.mount.directory, BCOW, "mount", self.lower.make_image(),
            "restarted", "--upper=restarted-upper", "--inode-limit", "5000", "-o",
            self.mount.access)
        change(where, 1)
        shown = tree.dump(where)
        bcow("snapshot", where, "one")
        change(where, 2)
        two = tree.dump(where)
        inodes = os.statvfs(where).f_files
        bcow("rollback", where, "one", "--keep", "two", "--restart")
        assert_same_tree(self, shown, where)
        self.assertEqual(os.statvfs(where).f_files, inodes)
        bcow("rollback", where, "two", "--restart")
        assert_same_tree(self, two, where)
        # A rollback that fails leaves it mounted, as it was.
        for name, opened in (("none", None), ("one", "d2/big")):
            with contextlib.ExitStack() as stack:
                if opened:
                    stack.enter_context(open(os.path.join(where, opened), "rb"))
                refused = bcow("rollback", where, name, "--restart", check=False)
            assert_refused(self, refused, opened and "is in use" or name)
            assert_same_tree(self, two, where)
        bcow("umount", where)
        for name, mention in ((upper, "it is no mount of bcow"),
                              (self.where, "the mount runs in the foreground")):
            refused = bcow("rollback", name, "one", "--restart", check=False)
            assert_refused(self, refused, mention)

    def test_a_program_asks_the_process_itself(self):
        write_file(self.at("file"), b"before")
        [mount] = [row for row in json.loads(bcow("ps", "--json").out)["services"]
                   if row["at"] == [self.where]]
        lock = os.path.join(self.upper, ".bcow/lock")

        def ask(name, file=lock):
            with request(mount["control"], file, name) as answer:
                return json.loads(answer.read())

        self.assertEqual(ask("one"), "done")
        write_file(self.at("file"), b"after")
        self.assertEqual(ask("two"), "done")
        for answer, mention in ((ask("two"), "exists"), (ask("three", self.upper), "does not use")):
            self.assertIn(mention, json.dumps(answer["failed"]))
        self.mount.unmount()
        for name, content in (("one", b"before"), ("two", b"after")):
            one = os.path.join(self.upper, ".bcow/snapshots", name, "file")
            self.assertEqual(read_bytes(one), content)

    def test_an_upper_in_use_is_refused_where_it_must_be_free(self):
        bcow("snapshot", self.where, "one")
        refused = bcow("rollback", self.upper, "one", check=False)
        assert_refused(self, refused, self.upper)
        bcow("snapshot", self.where, "two")
        bcow("snapshot", "rm", self.where, "one")
        self.assertEqual(snapshots(self.where), ["two"])
        self.assertEqual(snapshots(self.upper), ["two"])
        self.assertNotIn(".bcow", os.listdir(self.where))

    @promise("Snapshots do not count against `--size-limit` and `--inode-limit`. The mount does "
             "not show them.")
    def test_snapshots_need_no_room_in_the_limit(self):
        self.mount.unmount()
        self.mount.options.append("--size-limit=40M")
        self.mount.mount()
        write_file(self.at("file"), os.urandom(30 << 20))
        for name in ("one", "two"):
            bcow("snapshot", self.where, name)
        write_file(self.at("more"), os.urandom(5 << 20))
        self.remount()
        write_file(self.at("most"), os.urandom(3 << 20))

    @promise("A snapshot is durable when the command ends, also that of a mount with `--sync "
             "volatile`.")
    def test_a_snapshot_of_a_volatile_mount_is_not_volatile(self):
        self.mount.unmount()
        self.mount.options.append("--sync=volatile")
        self.mount.mount()
        change(self.where, 1)
        shown = tree.dump(self.where)
        bcow("snapshot", self.where, "one")
        one = os.path.join(self.upper, ".bcow", "snapshots", "one")
        self.assertFalse(os.path.exists(os.path.join(one, ".bcow", "volatile")))
        self.mount.kill()
        run("umount", self.where)
        # As after a reboot.
        note = os.path.join(self.upper, ".bcow", "volatile")
        write_file(note, b"another boot")
        fork = bcow("fork", self.upper, self.beside("fork"), check=False)
        assert_refused(self, fork, "--sync volatile")
        bcow("rollback", self.upper, "one")
        self.assert_shows(self.upper, shown)

    def test_the_copy_of_a_killed_fork_is_removed(self):
        need("strace")
        command, fork = ["fork", self.where], self.beside("fork")
        self.assertFalse(killed_at("mkdirat", 1, [*command, fork]))
        self.assertEqual(len(snapshots(self.upper)), 1)
        bcow(*command, fork)
        self.assertEqual(snapshots(self.upper), [])


class Pooled(UpperCase):
    """Mounts of a pool that shares files."""

    kind = "bcow+pool"

    def bcow(self, *arguments):
        return self.mount.bcow(*arguments)

    def test_a_fork_is_mounted_in_the_pool_of_its_source(self):
        fork, where = self.beside("fork"), self.beside("elsewhere")
        os.mkdir(where)
        write_file(self.at("file"), b"of the mount")
        self.bcow("fork", self.where, fork, "--mount", where)
        self.assertEqual(read_bytes(os.path.join(where, "file")), b"of the mount")
        pools = {tuple(row["at"]): row["pool"]
                 for row in json.loads(self.bcow("ps", "--json").out)["services"]}
        self.assertEqual(pools[where,], pools[self.where,])
        self.bcow("umount", where)

    def test_a_rollback_restarts_a_mount_of_the_pool(self):
        where = self.beside("restarted")
        os.mkdir(where)
        # Paths of the command line are relative to its directory, and the options stay.
        run("env", "-C", self.mount.directory, BCOW, "mount", self.lower.make_image(), "restarted",
            "--pool", "p", "--upper=restarted-upper", "--inode-limit", "5000", "-o",
            self.mount.access, env={"BCOW_POOLS": self.mount.pools})
        change(where, 1)
        shown = tree.dump(where)
        self.bcow("snapshot", where, "one")
        change(where, 2)
        two, inodes = tree.dump(where), os.statvfs(where).f_files
        # The next process of the pool knows the command line too.
        self.bcow("pool", "restart", "p")
        for name, keep, expected in (("one", ("--keep", "two"), shown), ("two", (), two)):
            self.bcow("rollback", where, name, *keep, "--restart")
            assert_same_tree(self, expected, where)
            self.assertEqual(os.statvfs(where).f_files, inodes)
        mounts = json.loads(self.bcow("pool", "stats", "p", "--json").out)["mounts"]
        self.assertEqual({mount["at"] for mount in mounts}, {self.where, where})
        # The pool of another directory is not found, so nothing is unmounted.
        refused = bcow("rollback", where, "one", "--restart", check=False,
                       env={"BCOW_POOLS": self.beside("none")})
        assert_refused(self, refused, "cannot use the pool p")
        assert_same_tree(self, two, where)
        self.bcow("umount", where)

    @promise("A file that the kernel reads and writes itself (a whole file of the upper, in a pool "
             "that shares files) can change while it is copied.")
    def test_snapshots_in_a_pool(self):
        stop = threading.Event()

        def write_whole_file():
            with open(self.at("d0/hundred"), "r+b", buffering=0) as file:
                while not stop.is_set():
                    file.seek(0)
                    file.write(os.urandom(100))

        thread = threading.Thread(target=write_whole_file)
        thread.start()
        try:
            with Writer(self.where) as writer:
                for number in range(ROUNDS):
                    writer.goes_on()
                    before = writer.number
                    self.bcow("snapshot", self.where, f"s{number}")
                    after = writer.number + 2
                    fork = self.beside(f"fork-{number}")
                    self.bcow("fork", f"{self.where}@s{number}", fork)
                    with self.mounted(fork) as where:
                        self.assertTrue(before <= writer.check(self, where) <= after)
                        self.assertEqual(os.path.getsize(os.path.join(where, "d0/hundred")), 100)
                    if number % 2 == 0:
                        self.bcow("pool", "restart", "p")
        finally:
            stop.set()
            thread.join()

    def test_a_process_that_is_killed_leaves_no_part_of_a_snapshot(self):
        write_file(self.at("large"), os.urandom(20 << 20))
        dice = random.Random(SEED)
        with Writer(self.where) as writer:
            # A pool that ends often in a short time does not begin again.
            for number in range(min(ROUNDS, 4)):
                writer.goes_on(5)
                taking = subprocess.Popen([BCOW, "snapshot", self.where, f"s{number}"],
                                          stderr=subprocess.PIPE,
                                          env=os.environ | {"BCOW_POOLS": self.mount.pools})
                threading.Event().wait(dice.random() * 0.2)
                os.kill(self.mount.serving(), signal.SIGKILL)
                taking.communicate(timeout=60)
                writer.goes_on(5)
                # Without what the mount keeps there, whiteouts.
                work = os.scandir(os.path.join(self.upper, ".bcow/work"))
                self.assertEqual([entry.name for entry in work if entry.is_dir()], [])
                is_taken = f"s{number}" in snapshots(self.upper)
                self.assertTrue(is_taken or taking.returncode != 0)
                for name in snapshots(self.upper):
                    fork = self.beside(f"fork-{number}-{name}")
                    self.bcow("fork", f"{self.upper}@{name}", fork)
                    with self.mounted(fork) as where:
                        writer.check(self, where)
                    shutil.rmtree(fork)


class Rootless(UpperCase):
    """Mounts of an ordinary user."""

    plant = staticmethod(test_union_rootless.plant)
    mounts = False
    tools = ("fusermount3",)

    def setUp(self):
        super().setUp()
        self.give_to_ordinary_user()
        os.chown(self.mount.directory, UNPRIVILEGED, UNPRIVILEGED)

    user = test_union_rootless.Rootless.user

    def command(self, *arguments, **options):
        return bcow(*arguments, user=UNPRIVILEGED, **options)

    @promise("A user can take a snapshot of an upper, and fork it, only with the permissions to "
             "read its files and to give them their owners.")
    def test_an_ordinary_user_takes_snapshots(self):
        self.mount.mount()
        test_union_rootless.Rootless.work(self)
        program = ("import os\nfor top, names, files in sorted(os.walk('.')):\n"
                   "    for name in sorted(names + files):\n"
                   "        path = os.path.join(top, name)\n"
                   "        found = os.lstat(path)\n"
                   "        print(path, oct(found.st_mode), found.st_uid, found.st_nlink, "
                   "found.st_mtime_ns, found.st_size if not os.path.isdir(path) else '', "
                   "os.listxattr(path, follow_symlinks=False))\n")
        shown = self.listed(self.where, program)
        self.command("snapshot", self.where, "one")
        fork, where = self.mount.directory + "/fork", self.mount.directory + "/elsewhere"
        self.command("fork", f"{self.where}@one", fork)
        run("mkdir", where, user=UNPRIVILEGED)
        image = support.for_everyone(self.lower.make_image())
        self.command("mount", image, where, "--upper", fork)
        self.assertEqual(self.listed(where, program), shown)
        self.command("umount", where)
        self.mount.unmount()
        self.command("rollback", self.upper, "one")
        self.mount.mount()
        self.assertEqual(self.listed(self.where, program), shown)

    def test_the_upper_of_another_user_is_refused(self):
        self.mount.mount()
        self.command("snapshot", self.where, "one")
        fork = self.beside("fork")
        os.chmod(self.mount.directory, 0o777)
        for source in (f"{self.upper}@one", self.upper):
            refused = bcow("fork", source, fork, user=UNPRIVILEGED + 1, check=False)
            self.assertEqual(refused.code, 1)
        self.assertEqual(glob.glob(fork), [])

    def listed(self, where, program):
        return run(sys.executable, "-c", f"import os\nos.chdir({where!r})\n" + program,
                   user=UNPRIVILEGED).out
