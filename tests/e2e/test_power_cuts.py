"""Power cuts under all that bcow keeps on the host: disks, uppers of both drivers, records of the
snapshotter, caches, views, merged metadata, and new files.

strace records what a command or a process does with a directory. The directory then gets the states
that a power cut at any moment may leave (power_cuts.py), and bcow opens each: what was answered is
there, what was asked for is done or not, and nothing else is shown. BCOW_POWER_CUTS=N examines N
times as many states, from another seed with BCOW_SEED, and prints their numbers.
"""

import os
import random
import shutil
import subprocess
import sys
import unittest.mock

import durable_steps
import power_cuts
import support
import test_remote
import test_snapshotter
from support import BCOW, bcow, is_mounted, need, read_bytes, run, served, write_file
from test_disks import Directory
from test_layouts import GENERATOR
from test_snapshots import connected, content, snapshots
from union import UnionCase

TIMES = int(os.environ.get("BCOW_POWER_CUTS") or 1)
SEED = int(os.environ.get("BCOW_SEED") or 1)
BLOCK = 4096
TOP = "top"


def examined(case, recorder, check, count=8):
    """Checks states of what a recorder has recorded."""
    done = power_cuts.examine(case, recorder.end(), check, count * TIMES, SEED)
    if TIMES > 1:
        print(f"{case.id()}: {done} states", file=sys.stderr)


class Disks(Directory):
    def setUp(self):
        need("strace", "nbdsh")
        super().setUp()
        self.random = random.Random(SEED)
        os.mkdir(TOP)

    def make_disk(self, size=1 << 20):
        """A disk of random content over an image; returns its content."""
        shown = bytearray(self.random.randbytes(size // 2) + bytes(size // 2))
        write_file("base.raw", shown)
        bcow("convert", "raw:base.raw", f"{TOP}/base.bcow")
        bcow("create", "-b", f"{TOP}/base.bcow", f"{TOP}/vm.bcow")
        return shown

    def writes(self, shown):
        """Some random writes, as pairs of an offset and bytes, which it makes in `shown`."""
        found = []
        for length in (100, 5000, 60_000):
            at = self.random.randrange(len(shown) - length)
            data = self.random.randbytes(length)
            shown[at:at + length] = data
            found.append((at, data))
        return found

    def assert_blocks(self, name, old, new):
        """Each block of a disk is as before or after a step."""
        have = content(name)
        self.assertEqual(len(have), len(old))
        for at in range(0, len(have), BLOCK):
            block = slice(at, at + BLOCK)
            if have[block] not in (old[block], new[block]):
                # A write may have changed a part of the block.
                for sector in range(at, at + BLOCK, 512):
                    place = slice(sector, sector + 512)
                    self.assertIn(have[place], (old[place], new[place]), (name, sector))

    def test_a_served_disk_with_snapshots(self):
        shown = self.make_disk()
        states, taken = [bytes(shown)], {}
        recorder = power_cuts.Recorder(TOP)
        with served(f"{TOP}/vm.bcow", "--socket", "socket", wrapper=recorder.command()) as server:
            client = connected(server)
            for number in range(6):
                if number in (2, 4):
                    taken[f"s{number}"] = len(states), states[-1]
                    with recorder.step():
                        bcow("snapshot", f"{TOP}/vm.bcow", f"s{number}")
                else:
                    writes = self.writes(shown)
                    with recorder.step():
                        for at, data in writes:
                            client.pwrite(data, at)
                        client.flush()
                states.append(bytes(shown))
            client.shutdown()

        def check(answers, requests):
            bcow("fsck", "--data", f"{TOP}/vm.bcow")
            self.assert_blocks(f"{TOP}/vm.bcow", states[answers], states[requests])
            found = snapshots(f"{TOP}/vm.bcow")
            for name, (step, expected) in taken.items():
                self.assertTrue(name in found or answers < step, name)
                if name in found:
                    self.assertTrue(content(f"{TOP}/vm.bcow@{name}") == expected, name)
            # It takes another write.
            with served(f"{TOP}/vm.bcow", "--socket", "again") as server:
                client = connected(server)
                client.pwrite(b"x" * BLOCK, 0)
                client.flush()
                client.shutdown()
            bcow("fsck", "--data", f"{TOP}/vm.bcow")

        examined(self, recorder, check)

    def test_commands_on_disks(self):
        shown = self.make_disk()
        with served(f"{TOP}/vm.bcow", "--socket", "socket") as server:
            client = connected(server)
            for at, data in self.writes(shown):
                client.pwrite(data, at)
            client.shutdown()
        shown = bytes(shown)
        commands = [["snapshot", "vm.bcow", "one"], ["fork", "vm.bcow@one", "fork.bcow"],
                    ["resize", "fork.bcow", "2M"], ["snapshot", "vm.bcow", "two"],
                    ["snapshot", "rm", "vm.bcow", "two"], ["rollback", "vm.bcow", "one"],
                    ["rebase", "fork.bcow", "--no-backing"], ["compact", "fork.bcow"],
                    ["seal", "fork.bcow"], ["convert", "vm.bcow", "copy.bcow"]]
        recorder = power_cuts.Recorder(TOP)
        for command in commands:
            recorder.run(BCOW, *command, cwd=TOP)

        def check(answers, _):
            self.assertTrue(content(f"{TOP}/vm.bcow") == shown)
            bcow("fsck", "--data", f"{TOP}/vm.bcow")
            there = snapshots(f"{TOP}/vm.bcow")
            if answers >= 1:
                self.assertTrue(content(f"{TOP}/vm.bcow@one") == shown)
            self.assertEqual("two" in there, answers == 4 or answers in (3, 4) and "two" in there)
            for name, made in (("fork.bcow", 2), ("copy.bcow", 10)):
                if os.path.exists(f"{TOP}/{name}"):
                    bcow("fsck", "--data", f"{TOP}/{name}")
                    have = content(f"{TOP}/{name}")
                    self.assertTrue(have[:len(shown)] == shown and not any(have[len(shown):]))
                    if name == "fork.bcow" and answers >= 3:
                        self.assertEqual(len(have), 2 * len(shown))
                else:
                    self.assertLess(answers, made, name)

        examined(self, recorder, check)

    def test_a_commit_into_the_backing(self):
        shown = self.make_disk()
        bcow("create", "-s", "1M", f"{TOP}/low.bcow")
        bcow("create", "-b", f"{TOP}/low.bcow", f"{TOP}/high.bcow")
        shown = bytearray(1 << 20)
        with served(f"{TOP}/high.bcow", "--socket", "socket") as server:
            client = connected(server)
            for at, data in self.writes(shown):
                client.pwrite(data, at)
            client.shutdown()
        shown = bytes(shown)
        recorder = power_cuts.Recorder(TOP)
        recorder.run(BCOW, "commit", "high.bcow", cwd=TOP)

        def check(answers, _):
            self.assertTrue(content(f"{TOP}/high.bcow") == shown)
            if not answers:
                bcow("commit", f"{TOP}/high.bcow")
            self.assertTrue(content(f"{TOP}/low.bcow") == shown)
            bcow("fsck", "--data", f"{TOP}/low.bcow")

        examined(self, recorder, check)


class Files(Directory):
    """What commands write beside each other."""

    def setUp(self):
        need("strace")
        super().setUp()
        os.mkdir(TOP)
        os.mkdir("tree")
        dice = random.Random(SEED)
        for name, size in (("large", 300_000), ("small", 100)):
            write_file(f"tree/{name}", dice.randbytes(size))
        bcow("convert", "dir:tree", "image.bcow")

    def test_views(self):
        os.mkdir("expected")
        shutil.copy("image.bcow", "expected")
        os.rename("image.bcow", f"{TOP}/image.bcow")
        create = ["create", "--fs", "ext4", "-s", "1G", "-b"]
        bcow(*create, "expected/image.bcow", "expected/one.bcow",
             env={"BCOW_VIEWS": "expected/views"})
        self.enterContext(unittest.mock.patch.dict(os.environ, BCOW_VIEWS=f"{TOP}/views"))
        recorder = power_cuts.Recorder(TOP)
        for name in ("one", "two"):
            recorder.run(BCOW, *create, f"{TOP}/image.bcow", f"{TOP}/{name}.bcow")

        def check(answers, _):
            for number, name in enumerate(("one", "two", "three"), 1):
                disk = f"{TOP}/{name}.bcow"
                self.assertTrue(os.path.exists(disk) or answers < number, disk)
                if not os.path.exists(disk):
                    bcow(*create, f"{TOP}/image.bcow", disk)
                bcow("fsck", "--data", disk)
                # Each file system has a UUID of its own.
                differs = bcow("diff", disk, "expected/one.bcow", check=False).out
                self.assertEqual(differs.split(), [b"0", b"4096"])

        examined(self, recorder, check)

    def test_the_cache_of_layers_and_layouts(self):
        need("zstd")
        name = "directory-attributes-replaced"
        run(sys.executable, GENERATOR, "case", name)
        with open(f"case/{name}/source") as source:
            source, *options = source.read().format(dir=f"case/{name}").split()
        convert = ["convert", "--cache", f"{TOP}/cache", source, *options]
        recorder = power_cuts.Recorder(TOP)
        recorder.run(BCOW, *convert, f"oci:{TOP}/store:tag")
        recorder.run(BCOW, *convert, f"oci:{TOP}/store:again")
        recorder.run(BCOW, "copy", f"oci:{TOP}/store:tag", f"oci:{TOP}/copied:tag")
        digest = support.digest_in(f"{TOP}/store")

        def check(answers, _):
            for number, (where, tag) in enumerate((("store", "tag"), ("store", "again"),
                                                   ("copied", "tag")), 1):
                name = f"oci:{TOP}/{where}:{tag}"
                if answers < number:
                    made = ["copy", f"oci:{TOP}/store:tag"] if number == 3 else convert
                    bcow(*made, name)
                bcow("fsck", "--data", name)
                self.assertEqual(support.digest_in(f"{TOP}/{where}", tag), digest)

        examined(self, recorder, check)

    def test_merged_metadata(self):
        need(root=True, fuse=True)
        for name in ("mnt", "upper"):
            os.mkdir(name)
        bcow("mount", "image.bcow", "mnt", "--upper", "upper")
        write_file("mnt/new", b"of the layer")
        bcow("umount", "mnt")
        bcow("commit", "image.bcow", "--upper", "upper", "layer.bcow")
        mount = ["mount", "image.bcow", "layer.bcow", "mnt", "--merged", f"{TOP}/merged.bcow"]
        recorder = power_cuts.Recorder(TOP)
        self.addCleanup(lambda: is_mounted("mnt") and run("umount", "-l", "mnt"))
        recorder.run(BCOW, *mount)
        bcow("umount", "mnt")

        def check(*_):
            bcow(*mount)
            self.assertEqual(sorted(os.listdir("mnt")), ["large", "new", "small"])
            for name in ("large", "small"):
                self.assertTrue(read_bytes(f"mnt/{name}") == read_bytes(f"tree/{name}"))
            self.assertEqual(read_bytes("mnt/new"), b"of the layer")
            bcow("umount", "mnt")

        examined(self, recorder, check)


class Chunks(test_remote.WebCase):
    """The cache of images on servers."""

    @classmethod
    def make_tree(cls, top):
        test_remote.make_files(top, 3, 200_000)

    def test_the_cache_of_an_image_on_a_server(self):
        need("strace")
        with self.server() as server:
            url = server.url("image.bcow")

            def cat(number):
                return self.bcow("cat", url, f"/dir-{number}/file").out

            recorder = power_cuts.Recorder(self.cache)
            env = {**os.environ, **self.env}
            recorder.run(BCOW, "cat", url, "/dir-0/file", env=env)
            recorder.run(BCOW, "cache", "warm", url, env=env)

            def check(*_):
                for number in range(3):
                    path = os.path.join(self.tree, f"dir-{number}", "file")
                    self.assertTrue(cat(number) == read_bytes(path), number)
                self.bcow("cache", "verify")

            examined(self, recorder, check)


class Uppers(UnionCase):
    """A mount with an upper, in which a program makes each of its changes durable."""

    mounts = False

    plant = staticmethod(durable_steps.plant)

    def power_cuts(self, count):
        need("strace")
        recorder = power_cuts.Recorder(self.upper)
        command = self.mount.command
        self.mount.command = lambda: recorder.command(*command())
        files = durable_steps.files_at(self.lower.tree)
        with recorder.step():
            self.mount.mount()
        states, at_snapshot = [dict(files), dict(files)], None
        for step in durable_steps.steps(self.where, SEED):
            with recorder.step():
                step(files)
            if not at_snapshot and snapshots(self.upper):
                at_snapshot = len(states)
            states.append(dict(files))
        with recorder.step():
            self.mount.unmount()
        states.append(dict(files))
        self.mount.command = command

        def check(answers, requests):
            if answers:
                bcow("fsck", self.upper)
            self.mount.mount()
            try:
                have = durable_steps.files_at(self.where)
                self.assertIsNone(durable_steps.problem_between(have, states[answers],
                                                                states[requests]))
                found = "one" in snapshots(self.upper)
                if not answers < at_snapshot <= requests:
                    self.assertEqual(found, answers >= at_snapshot)
                # The upper takes a further change.
                write_file(self.at("further"), b"change")
            finally:
                self.mount.unmount()
            bcow("fsck", self.upper)

        examined(self, recorder, check, count)

    def test_an_upper(self):
        self.power_cuts(8)


class KernelUppers(Uppers):
    kind = "bcow+driver=kernel"

    def test_an_upper(self):
        self.power_cuts(4)


class Snapshots(test_snapshotter.WithSnapshotter):
    """The records and layers of the snapshotter."""

    def test_records_and_layers(self):
        need("strace")
        os.mkdir(self.root, 0o700)
        recorder = power_cuts.Recorder(self.root)
        known, states, launch = {}, [{}, {}], support.Daemon.launch
        with recorder.step(), unittest.mock.patch.object(
                support.Daemon, "launch",
                lambda one, *command: launch(one, *recorder.command(*command))):
            one = self.start()
        write_file(f"{self.place}/data", os.urandom(100_000))

        def ask(call, removed=None, added=None, **fields):
            with recorder.step():
                getattr(one.client, call)(**fields)
            known.pop(removed, None)
            known.update({added: fields.get("labels", {})} if added else {})
            states.append(dict(known))

        ask("Prepare", added="a", key="a")
        [number] = os.listdir(os.path.join(self.root, "snapshots"))
        recorder.run("dd", f"if={self.place}/data", "conv=fsync",
                     f"of={self.root}/snapshots/{number}/fs/data", stderr=subprocess.DEVNULL)
        states.append(dict(known))
        ask("Commit", "a", "low", name="low", key="a")
        with recorder.step():
            one.client.Update(info={"name": "low", "labels": {"n": "1"}})
        known["low"] = {"n": "1"}
        states.append(dict(known))
        ask("Prepare", added="b", key="b")
        ask("Commit", "b", "empty", name="empty", key="b")
        ask("Prepare", added="c", key="c")
        ask("Remove", "c", key="c")
        ask("Remove", "low", key="low")
        self.assertEqual(one.end(), 0)

        def check(answers, requests):
            one.start()
            found = {info.name: dict(info.labels) for info in one.client.List()}
            self.assertIn(found, (states[answers], states[requests]))
            self.assert_only(one.client)
            for name in self.names("layers"):
                bcow("fsck", "--data", os.path.join(self.root, "layers", name))
            self.assertEqual(one.end(), 0)

        examined(self, recorder, check)


class Model(support.Scratch):
    """The model itself."""

    def states_of(self, script, count=300):
        need("strace")
        top = self.path("top")
        os.mkdir(top)
        recorder = power_cuts.Recorder(top)
        recorder.run(sys.executable, "-c", f"import os\n{script}", cwd=top)
        recording = recorder.end()
        recording.assert_complete()
        found = set()
        for _, tree, answers, _ in recording.states(count, SEED):
            shown = tree.described()
            found.add((answers, tuple((path, shown[path][6]) for path in sorted(shown) if path)))
        return found

    def test_what_is_synchronized_stays_and_the_rest_may_go(self):
        found = self.states_of("""
file = os.open("a", os.O_RDWR | os.O_CREAT)
os.pwrite(file, b"x" * 1000, 0)
os.rename("a", "b")
os.fsync(file)
top = os.open(".", os.O_RDONLY)
os.fsync(top)
os.unlink("b")
""")
        # Before the barriers: nothing, either name, with or without the content.
        for names in ((), (("/a", 0),), (("/b", 0),), (("/a", 1000),), (("/b", 1000),)):
            self.assertIn((0, names), found)
        # After them, only the removal is open.
        self.assertEqual({names for answers, names in found if answers}, {(("/b", 1000),), ()})
