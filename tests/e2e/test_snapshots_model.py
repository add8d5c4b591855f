"""Snapshots, forks, rollbacks and commits in random sequences, of disks and of uppers of both
drivers, at rest and in use. Between, processes and commands are killed, and power cuts lose what
the host's file system had not yet written to its disk. Each content is compared with the one that
was recorded, and the ext4 of each snapshot is checked by e2fsck.

BCOW_ROUNDS=1000 runs that many sequences of each kind, BCOW_STEPS=30 longer ones, and BCOW_SEED=7
begins with another one. A failure names the seed of its sequence.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time

import subjects
import support
from promises import promise
from support import BCOW, Served, bcow, is_mounted, need, read_bytes, run, served, write_file
from test_snapshots import connected, snapshots
import test_union_crash
import tree

ROUNDS = int(os.environ.get("BCOW_ROUNDS") or 1)
STEPS = int(os.environ.get("BCOW_STEPS") or 14)
SEED = int(os.environ.get("BCOW_SEED") or 1)
# The longest time after which a command or a process is killed, in seconds.
KILLED_WITHIN = 0.1
TIMEOUT = 120
SIZE, BLOCK = 1 << 20, 4096
# Why a snapshot is not removed.
NEEDED = "it is the backing of|forks have too"


def plant(top):
    """A small tree."""
    for name in "d0", "d1":
        os.mkdir(os.path.join(top, name))
    for name, size in (("d0/large", 300_000), ("d0/small", 100), ("d1/file1", 70_000)):
        write_file(os.path.join(top, name), subjects.content(name, size))
    os.link(os.path.join(top, "d0/small"), os.path.join(top, "d1/file2"))


def change(where, dice):
    """Changes a mount of the tree a few times."""
    def some():
        return os.path.join(where, dice.choice(["d0", "d1"]), f"file{dice.randrange(6)}")

    large = os.path.join(where, "d0", "large")
    for _ in range(dice.randrange(1, 6)):
        step = dice.randrange(9)
        # What is not there, or is a directory, stays as it is.
        with contextlib.suppress(OSError):
            if step < 2:
                write_file(some(), dice.randbytes(dice.choice([10, 5000, 200_000])))
            elif step == 2:
                with open(some(), "ab") as file:
                    file.write(b"more" * dice.randrange(5000))
                    os.fsync(file.fileno())
            elif step == 3:
                os.makedirs(os.path.join(some(), "below"))
            elif step == 4:
                os.unlink(some())
            elif step == 5:
                os.rename(some(), some())
            elif step == 6:
                os.link(some(), some())
            elif step == 7:
                os.setxattr(some(), "user.of", dice.randbytes(20))
                os.chmod(some(), dice.choice([0o600, 0o4755]))
            else:
                os.truncate(large, dice.randrange(200_000, 400_000))
        support.overwrite(large, dice.randrange(190_000), dice.randbytes(5000))


class Disks:
    """Disks, which `bcow serve` uses at times."""

    steps = ("resize", "compact")

    def __init__(self, test, directory, dice):
        self.test, self.directory, self.dice = test, directory, dice
        self.used = []

    def path(self, name):
        return os.path.join(self.directory, f"{name}.bcow")

    def begin(self, name):
        raw, base = self.path("base.raw"), self.path("base")
        data = self.dice.randbytes(SIZE // 2) + bytes(SIZE // 2)
        write_file(raw, data)
        bcow("convert", f"raw:{raw}", base)
        bcow("create", "-b", base, self.path(name))
        return data

    def show(self, name):
        raw = self.path("shown.raw")
        bcow("convert", self.path(name), f"raw:{raw}")
        return self.taken_from(raw)

    def show_snapshot(self, name, snapshot):
        raw, socket = self.path("shown.raw"), os.path.join(self.directory, "socket")
        with served(f"{self.path(name)}@{snapshot}", "--read-only", "--socket", socket) as server:
            run("nbdcopy", server.uri, raw)
        return self.taken_from(raw)

    @staticmethod
    def taken_from(raw):
        data = read_bytes(raw)
        os.unlink(raw)
        return data

    def commit(self, name, snapshot, use):
        if use or snapshot:
            return None
        bcow("commit", self.path(name), self.path("committed"))
        data = self.show("committed")
        os.unlink(self.path("committed"))
        return data

    def check(self, name):
        bcow("fsck", "--data", self.path(name))

    def check_snapshot(self, name, snapshot, is_clean):
        bcow("fsck", "--data", f"{self.path(name)}@{snapshot}")

    def assert_same(self, expected, shown):
        self.test.assertEqual(len(shown), len(expected))
        if shown != expected:
            wrong = next(at for at in range(len(shown)) if shown[at] != expected[at])
            self.test.fail(f"byte {wrong} is another")

    def resize(self, name, data):
        size = self.dice.randrange(SIZE // 2, 2 * SIZE, BLOCK)
        bcow("resize", self.path(name), str(size), "--shrink")
        return data[:size] + bytes(max(0, size - len(data)))

    def compact(self, name, data):
        bcow("compact", self.path(name))
        return data

    def use(self, name, data):
        self.used.append(UsedDisk(self, self.path(name), data))
        return self.used[-1]

    def remove(self):
        for disk in self.used:
            disk.server.process.kill()


class UsedDisk:
    def __init__(self, disks, path, data):
        self.dice, self.data, self.names = disks.dice, data, [path]
        self.server = Served(path, "--socket", os.path.join(disks.directory, "socket"))
        self.client = connected(self.server)

    def change(self):
        data = bytearray(self.data)
        for _ in range(self.dice.randrange(1, 6)):
            new = self.dice.randbytes(self.dice.choice([100, 5000, 100_000]))
            at = self.dice.randrange(len(data) - len(new))
            self.client.pwrite(new, at)
            data[at:at + len(new)] = new
        self.data = bytes(data)
        return self.data

    def end(self):
        self.client.shutdown()
        self.server.end()

    def kill(self):
        self.server.end(signal.SIGKILL)

    def process(self):
        return self.server.process


class Uppers:
    """Uppers of a driver, which mounts use at times."""

    steps = ("diff",)
    subject = "bcow"

    def __init__(self, test, directory, dice):
        self.test, self.directory, self.dice = test, directory, dice
        self.lower, self.uppers = test.lower, {}

    def of(self, name):
        """The mount of an upper, which begins without a directory."""
        if name not in self.uppers:
            directory = os.path.join(self.directory, name)
            self.uppers[name] = subjects.subject(self.subject, self.lower, directory)
            os.rmdir(self.uppers[name].upper)
        return self.uppers[name]

    def path(self, name):
        return self.of(name).upper

    def begin(self, name):
        return self.show(name)

    def show(self, name):
        one = self.of(name)
        one.mount()
        shown = tree.dump(one.where)
        one.unmount()
        return shown

    def show_snapshot(self, name, snapshot):
        bcow("fork", f"{self.path(name)}@{snapshot}", self.path("shown"))
        shown = self.show("shown")
        self.uppers.pop("shown").remove()
        return shown

    def commit(self, name, snapshot, use):
        upper = self.dice.choice(use.names) if use else self.path(name)
        made = os.path.join(self.directory, "committed.bcow")
        bcow("commit", self.lower.image, "--upper", f"{upper}@{snapshot}" if snapshot else upper,
             "--flatten", made)
        with support.mounted(made) as where:
            shown = tree.dump(where)
        os.unlink(made)
        return shown

    def diff(self, name, state):
        """Compares two snapshots, or one and the upper, as they are and as images."""
        found = [f"@{snapshot}" for snapshot in snapshots(self.path(name))]
        pair = [self.path(name) + self.dice.choice(["", *found]) for _ in range(2)]
        images = []
        for number, upper in enumerate(pair):
            images.append(os.path.join(self.directory, f"flat{number}.bcow"))
            bcow("commit", self.lower.image, "--upper", upper, "--flatten", images[-1])
        expected = bcow("diff", *images, check=False)
        compared = bcow("diff", self.lower.image, "--upper", pair[0], "--upper", pair[1],
                        check=False)
        self.test.assertEqual(compared.out.decode(), expected.out.decode(), pair)
        self.test.assertEqual(compared.code, expected.code)
        for image in images:
            os.unlink(image)
        return state

    def check(self, name):
        self.of(name).check()

    def check_snapshot(self, name, snapshot, is_clean):
        path = os.path.join(self.path(name), ".bcow", "snapshots", snapshot)
        bcow("fsck", "--data", path, self.lower.image)

    def assert_same(self, expected, shown):
        support.assert_same_tree(self.test, expected, shown)

    def use(self, name, _):
        return UsedUpper(self.of(name), self.dice)

    def remove(self):
        for one in self.uppers.values():
            one.remove()


class UsedUpper:
    def __init__(self, one, dice):
        self.one, self.dice, self.names = one, dice, [one.upper, one.where]
        one.mount()

    def change(self):
        change(self.one.where, self.dice)
        return tree.dump(self.one.where)

    def end(self):
        self.one.unmount()

    def kill(self):
        self.one.kill()
        if is_mounted(self.one.where):
            run("umount", self.one.where)

    def process(self):
        return self.one.process


class KernelUppers(Uppers):
    subject = subjects.KERNEL

    def check_snapshot(self, name, snapshot, is_clean):
        disk, raw = (os.path.join(self.path(name), ".bcow", f"disk.bcow@{snapshot}"),
                     os.path.join(self.directory, "snapshot.raw"))
        bcow("convert", "--backing-dir", os.path.dirname(self.lower.image), disk, f"raw:{raw}")
        if is_clean:
            self.test.assertNotIn(b"needs_recovery", run("dumpe2fs", "-h", raw).out)
            run("e2fsck", "-fn", raw, timeout=TIMEOUT)
        os.unlink(raw)


class Sequence:
    """A sequence of steps, and what each disk or upper and each of its snapshots must show."""

    steps = ("use", "use", "use", "snapshot", "fork", "rollback", "remove", "commit", "interrupt")

    def __init__(self, test, kind, seed):
        self.test, self.dice, self.count = test, random.Random(seed), 0
        self.directory = test.path(f"sequence-{seed}")
        os.mkdir(self.directory)
        self.host = test_union_crash.Disk(self.directory)
        self.kind = kind(test, self.host.where, self.dice)
        self.states = {"begin": self.kind.begin("begin")}
        # By the names of the disk or upper and of the snapshot.
        self.taken = {}
        # Disks and uppers that a killed process has left, and snapshots of such.
        self.left, self.taken_of_left = set(), set()

    def run(self):
        try:
            for number in range(STEPS):
                name = self.dice.choice(sorted(self.states))
                step = self.dice.choice(self.steps + self.kind.steps)
                try:
                    self.step(step, name)
                except BaseException as error:
                    error.add_note(f"in step {number}: {step} of {name}")
                    raise
            self.verify()
        finally:
            self.kind.remove()
            self.host.remove()
        shutil.rmtree(self.directory)

    def step(self, step, name):
        if step in self.kind.steps:
            self.states[name] = getattr(self.kind, step)(name, self.states[name])
        else:
            getattr(self, step)(name)
        if name not in self.left or self.dice.random() < 0.5:
            self.kind.assert_same(self.states[name], self.kind.show(name))
            self.left.discard(name)

    def new_name(self):
        self.count += 1
        return f"n{self.count}"

    def snapshots(self, name):
        return sorted(snapshot for of, snapshot in self.taken if of == name)

    def command(self, name, use, *arguments):
        """A command for a disk or an upper, whose name in it is a `{}`."""
        path = self.dice.choice(use.names) if use else self.kind.path(name)
        return [argument.format(path) for argument in arguments]

    def record(self, name, snapshot):
        """Notes a snapshot that was taken."""
        self.taken[name, snapshot] = self.states[name]
        if name in self.left:
            self.taken_of_left.add((name, snapshot))

    def record_fork(self, name, snapshot, new, state):
        self.states[new] = state
        if (name, snapshot) in self.taken_of_left or snapshot is None and name in self.left:
            self.left.add(new)
        # Of an upper of the kernel driver, it has the snapshots below it.
        for older in snapshots(self.kind.path(new)):
            self.taken[new, older] = self.taken[name, older]
            if (name, older) in self.taken_of_left:
                self.taken_of_left.add((new, older))

    def use(self, name):
        self.synchronize()
        use = self.kind.use(name, self.states[name])
        self.left.discard(name)
        for _ in range(self.dice.randrange(1, 4)):
            self.states[name] = use.change()
            if step := self.dice.choice(["snapshot", "fork", "commit", "remove", None]):
                getattr(self, step)(name, use)
        if self.dice.random() < 0.5:
            use.end()
            return
        # All changes are durable then.
        self.snapshot(name, use)
        new, asked, old = self.new_name(), None, None
        if self.dice.random() < 0.5:
            command = self.command(name, use, "snapshot", "{}", new)
            if self.dice.random() < 0.5:
                old = self.dice.choice(self.snapshots(name))
                command = self.command(name, use, "snapshot", "rm", "{}", old)
            asked = subprocess.Popen([BCOW, *command], stderr=subprocess.DEVNULL)
            time.sleep(self.dice.uniform(0, KILLED_WITHIN))
        self.end_all(use.kill, use.process(), *([asked] if asked else []))
        self.left.add(name)
        found = snapshots(self.kind.path(name))
        if old and old not in found:
            del self.taken[name, old]
        elif new in found:
            self.record(name, new)
        elif asked:
            self.test.assertNotEqual(asked.returncode, 0)

    def end_all(self, kill, first, *others):
        """Kills a process, and in half of the cases cuts the power. The other processes wait for
        it. `kill` then does what its end needs."""
        is_cut = self.dice.random() < 0.5

        def stop():
            first.kill()
            for process in others:
                # Stopped ones do not end by themselves.
                if is_cut:
                    process.kill()
                process.wait(timeout=TIMEOUT)
            kill()

        if is_cut:
            # Then nothing is written any more.
            for process in (first, *others):
                if process.poll() is None:
                    support.stop(process.pid)
            self.host.cut(stop)
        else:
            stop()

    def synchronize(self):
        """Makes all durable that was done before."""
        run("sync", "-f", self.host.where)

    def snapshot(self, name, use=None):
        new = self.new_name()
        bcow(*self.command(name, use, "snapshot", "{}", new))
        self.record(name, new)

    def fork(self, name, use=None):
        new, names = self.new_name(), self.snapshots(name)
        path = self.kind.path(new)
        if names and self.dice.random() < 0.7:
            snapshot = self.dice.choice(names)
            bcow(*self.command(name, use, "fork", f"{{}}@{snapshot}", path))
            self.record_fork(name, snapshot, new, self.taken[name, snapshot])
            return
        forked = json.loads(bcow(*self.command(name, use, "fork", "{}", path, "--json")).out)
        # A disk has a new snapshot then.
        _, _, snapshot = (forked["backing"] or "").partition("@")
        if snapshot:
            self.record(name, snapshot)
        self.record_fork(name, snapshot or None, new, self.states[name])

    def rollback(self, name):
        if names := self.snapshots(name):
            snapshot = self.dice.choice(names)
            keep = [self.new_name()] if self.dice.random() < 0.5 else []
            options = ["--keep", *keep] if keep else []
            bcow(*self.command(name, None, "rollback", "{}", snapshot, *options))
            for kept in keep:
                self.record(name, kept)
            self.states[name] = self.taken[name, snapshot]

    def remove(self, name, use=None):
        if names := self.snapshots(name):
            snapshot = self.dice.choice(names)
            done = bcow(*self.command(name, use, "snapshot", "rm", "{}", snapshot), check=False)
            if done.code == 0:
                del self.taken[name, snapshot]
            else:
                self.test.assertNotEqual(type(self.kind), Uppers)
                self.test.assertRegex(done.err.decode(), NEEDED)

    def commit(self, name, use=None):
        snapshot = self.dice.choice([None, *self.snapshots(name)])
        shown = self.kind.commit(name, snapshot, use)
        if shown is not None:
            expected = self.taken[name, snapshot] if snapshot else self.states[name]
            self.kind.assert_same(expected, shown)

    def interrupt(self, name):
        """Ends a command by a kill or a power cut."""
        new, names = self.new_name(), self.snapshots(name)
        snapshot = self.dice.choice(names) if names else None
        step = self.dice.choice(["snapshot", "fork", "rollback", "remove"]) if names else "snapshot"
        command = {"snapshot": ["snapshot", "{}", new],
                   "fork": ["fork", f"{{}}@{snapshot}", self.kind.path(new)],
                   "rollback": ["rollback", "{}", snapshot, "--keep", new],
                   "remove": ["snapshot", "rm", "{}", snapshot]}[step]
        arguments = self.command(name, None, *command)
        self.synchronize()
        process = subprocess.Popen([BCOW, *arguments], stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)
        time.sleep(self.dice.uniform(0, KILLED_WITHIN))
        self.end_all(lambda: process.wait(timeout=TIMEOUT), process)
        found, is_done = snapshots(self.kind.path(name)), process.returncode == 0
        is_made = os.path.exists(self.kind.path(new)) if step == "fork" else new in found
        if is_made and step == "fork":
            self.record_fork(name, snapshot, new, self.taken[name, snapshot])
        elif is_made:
            self.record(name, new)
        if step == "rollback":
            shown, old = self.kind.show(name), self.states[name]
            self.test.assertTrue(shown == self.taken[name, snapshot]
                                 or (shown == old and not is_done))
            if shown != old:
                self.test.assertTrue(is_made)
                self.states[name] = shown
        if step == "remove":
            is_made = snapshot not in found
            if is_made:
                del self.taken[name, snapshot]
        self.test.assertTrue(is_made or not is_done)

    def verify(self):
        for name, expected in self.states.items():
            self.kind.assert_same(expected, self.kind.show(name))
            self.kind.check(name)
            self.test.assertEqual(sorted(snapshots(self.kind.path(name))), self.snapshots(name))
        for (name, snapshot), expected in self.taken.items():
            self.kind.check_snapshot(name, snapshot, (name, snapshot) not in self.taken_of_left)
            self.kind.assert_same(expected, self.kind.show_snapshot(name, snapshot))


class Models(support.Scratch):
    @classmethod
    def setUpClass(cls):
        need("nbdcopy", "nbdsh", "mkfs.ext4", "e2fsck", "dumpe2fs", "losetup", root=True,
             fuse=True)
        super().setUpClass()
        cls.lower = subjects.Lower(cls.directory, plant)
        cls.lower.make_image()

    def run_sequences(self, kind):
        for seed in range(SEED, SEED + ROUNDS):
            with self.subTest(BCOW_SEED=seed):
                Sequence(self, kind, seed).run()

    @promise("A fork shows the content of its snapshot. What is written to the fork does not "
             "change the snapshot, the disk or another fork.",
             "A rollback is one step: a disk has its content or that of the snapshot. With "
             "`--keep`, no content is lost.",
             "The removal of a snapshot changes the content of no disk and of no other snapshot.")
    def test_disks_agree_with_the_recorded_bytes(self):
        self.run_sequences(Disks)

    def test_uppers_of_the_fuse_driver_agree_with_the_recorded_trees(self):
        self.run_sequences(Uppers)

    @promise("A snapshot of a mount with the kernel driver has all that programs had written, also "
             "what they had not synchronized. Its file system needs no replay of a log.")
    def test_uppers_of_the_kernel_driver_agree_with_the_recorded_trees(self):
        self.run_sequences(KernelUppers)
