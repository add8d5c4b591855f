"""bcow-snapshotter mounts each snapshot once, and containerd binds the mount."""

import contextlib
import copy
import ctypes
import errno
import os
import shutil
import signal
import struct
import subprocess
import tempfile
import threading
import types
import unittest

import support
import test_remote
from support import bcow, need_kernel, read_bytes, read_text, run, write_file
from test_snapshotter import WithImage, WithSnapshotter, has_ended

# Without them, the base of the tests reports what is missing.
with contextlib.suppress(ImportError):
    from snapshots import CODES


class Executions:
    """Counts how often a program is executed, by any process (fanotify(7))."""

    OPEN_EXEC, ADD, CLOEXEC, NONBLOCK, FROM_HERE = 0x1000, 1, 1, 2, -100
    EVENT = struct.Struct("=IBBHQii")

    def __init__(self, program):
        need_kernel(5, 0, "events of executions")
        libc = ctypes.CDLL(None, use_errno=True)
        self.events = libc.fanotify_init(self.CLOEXEC | self.NONBLOCK, os.O_RDONLY | os.O_CLOEXEC)
        marked = libc.fanotify_mark(
            self.events, self.ADD, ctypes.c_uint64(self.OPEN_EXEC), self.FROM_HERE,
            os.fsencode(program))
        if marked != 0:
            raise AssertionError(f"{program}: {os.strerror(ctypes.get_errno())}")

    def take(self):
        """The number of executions since the last call."""
        count = 0
        with contextlib.suppress(BlockingIOError):
            while events := os.read(self.events, 1 << 16):
                for event in self.EVENT.iter_unpack(events):
                    os.close(event[5])
                    count += 1
        return count

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self.events)


class WithMounts(WithSnapshotter):
    def devices(self):
        """The file systems of bcow in this test's directory: device numbers, and where each is."""
        found = {}
        with open("/proc/self/mountinfo") as table:
            for line in table:
                fields, _, rest = line.partition(" - ")
                _, _, device, _, place, *_ = fields.split()
                if rest.startswith("fuse.bcow ") and place.startswith(self.place + "/"):
                    found.setdefault(device, []).append(place)
        return found

    def own_bcow(self):
        """A program that no other test executes."""
        own = os.path.join(self.place, "bcow")
        shutil.copy(support.BCOW, own)
        return own


class Mounts(WithMounts):
    def image(self, client):
        with self.mounted(client.Prepare(key="a")) as root:
            write_file(os.path.join(root, "file"), "image")
            write_file(os.path.join(root, "large"), os.urandom(1 << 20))
        client.Commit(name="p", key="a")

    def root_of(self, answer):
        """The directory of an answer that has one bind mount."""
        [mount] = answer.mounts
        self.assertEqual(mount.type, "bind")
        return mount.source

    def bound(self, answer):
        """A bind mount, without another program."""
        where = tempfile.mkdtemp(prefix="b", dir=self.place)
        libc = ctypes.CDLL(None, use_errno=True)
        done = libc.mount(os.fsencode(self.root_of(answer)), os.fsencode(where), None, 0x5000, None)
        self.assertEqual(done, 0, os.strerror(ctypes.get_errno()))
        return where

    def test_a_snapshot_is_mounted_once(self):
        self.start_pool()
        one = self.start()
        self.image(one.client)
        # The command, and the process of the mount unless that is the pool.
        own = self.own_bcow()
        for options, programs in (((), 2), (("--pool", "p"), 1)):
            with self.subTest(options=options), Executions(own) as executed:
                self.assertEqual(one.end(), 0)
                one.options = ("--bcow", own, *options)
                one.start()
                client = one.client
                executed.take()
                answer = client.Prepare(key="b", parent="p")
                self.assertEqual(executed.take(), programs)
                self.assertEqual(list(answer.mounts[0].options), ["rw", "rbind"])
                view = client.View(key="v", parent="p")
                self.assertEqual(executed.take(), programs)
                self.assertEqual(list(view.mounts[0].options), ["ro", "rbind"])
                for key, expected in (("b", answer), ("v", view)):
                    for _ in range(3):
                        self.assertEqual(client.Mounts(key=key), expected)
                roots = [[self.root_of(it)] for it in (answer, view)]
                self.assertEqual(sorted(self.devices().values()), sorted(roots))
                # Each container adds a bind mount, and no program.
                places = [self.bound(answer) for _ in range(3)]
                self.assertEqual(len(self.devices()), 2)
                self.assertEqual(executed.take(), 0)
                write_file(os.path.join(places[0], "new"), "new")
                self.assertEqual(read_text(os.path.join(places[2], "new")), "new")
                for place in places:
                    run("umount", place)
                with self.mounted(view) as root, self.assertRaises(OSError) as refused:
                    open(os.path.join(root, "new"), "w")
                self.assertEqual(refused.exception.errno, errno.EROFS)
                client.Remove(key="v")
                client.Remove(key="b")
                self.assert_nothing_is_mounted()
                support.until(lambda: not self.services(), "the processes of the mounts end")
                self.assert_only(client)

    def test_a_read_only_mount_does_not_hinder_a_writable_one(self):
        client = self.start().client
        self.image(client)
        answer = client.Prepare(key="b", parent="p")
        read_only = copy.deepcopy(answer)
        read_only.mounts[0].options[:] = ["rbind", "ro"]
        with self.mounted(read_only) as first, self.mounted(client.Mounts(key="b")) as second:
            write_file(os.path.join(second, "new"), "new")
            self.assertEqual(read_text(os.path.join(first, "new")), "new")
            with self.assertRaises(OSError) as refused:
                open(os.path.join(first, "other"), "w")
            self.assertEqual(refused.exception.errno, errno.EROFS)

    def start_where_mounts_propagate(self):
        """As below the root of a host with systemd."""
        shared = os.path.join(self.place, "shared")
        os.mkdir(shared)
        run("mount", "--bind", shared, shared)
        run("mount", "--make-shared", shared)
        self.root = os.path.join(shared, "root")
        return self.start()

    def test_a_mount_inside_a_container_is_not_in_the_snapshot(self):
        client = self.start_where_mounts_propagate().client
        self.image(client)
        answer = client.Prepare(key="b", parent="p")
        with self.mounted(answer) as root:
            os.mkdir(os.path.join(root, "d"))
            run("mount", "-t", "tmpfs", "none", os.path.join(root, "d"))
            self.assertEqual(self.places(self.root), [self.root_of(answer)])
            run("umount", os.path.join(root, "d"))

    def test_another_mount_namespace_sees_the_mounts_and_their_end(self):
        client = self.start_where_mounts_propagate().client
        self.image(client)
        other = subprocess.Popen(["unshare", "--mount", "--propagation", "slave", "sleep", "1000"])
        self.addCleanup(other.wait)
        self.addCleanup(other.kill)

        def entered():
            return read_text(f"/proc/{other.pid}/comm") == "sleep\n"
        support.until(entered, "the namespace")
        place = self.root_of(client.Prepare(key="b", parent="p"))
        seen = run("nsenter", "--mount", f"--target={other.pid}", "cat", f"{place}/file")
        self.assertEqual(seen.out, b"image")
        client.Remove(key="b")
        self.assertNotIn(place, read_text(f"/proc/{other.pid}/mounts"))
        support.until(lambda: not self.services(), "the process of the mount ends")

    def test_changes_are_read_while_a_container_has_the_mount(self):
        self.start_pool()
        one = self.start()
        self.image(one.client)
        # The second mount has two layers.
        for parent, name, options in (("p", "q", ()), ("q", "r", ("--pool", "p"))):
            with self.subTest(options=options):
                self.assertEqual(one.end(), 0)
                one.options = options
                one.start()
                with self.mounted(one.client.Prepare(key="b", parent=parent)) as root:
                    write_file(os.path.join(root, f"new-{name}"), name)
                    support.overwrite(os.path.join(root, "large"), 1 << 19, name.encode() * 8)
                    image, upper = self.image_and_upper(root)
                    for at in (upper, os.path.join(os.path.dirname(upper), "root")):
                        found = bcow("diff", *image, "--upper", at, check=False).out.decode()
                        self.assertIn(f"A\t/new-{name}\tfile\n", found)
                        self.assertRegex(found, r"(?m)^M\t/large\t.*content from byte 5242..$")
                    flat = os.path.join(self.place, f"{name}.bcow")
                    bcow("commit", *image, "--upper", upper, flat, "--flatten")
                    with support.mounted(flat) as shown:
                        support.assert_same_tree(self, root, shown)
                one.client.Commit(name=name, key="b")
                self.assert_only(one.client)

    def test_mounts_outlive_the_snapshotter(self):
        self.start_pool()
        one = self.start()
        self.image(one.client)
        own = self.own_bcow()
        for options in ((), ("--pool", "p")):
            with self.subTest(options=options), Executions(own) as executed:
                self.assertEqual(one.end(), 0)
                one.options = ("--bcow", own, *options)
                one.start()
                key = f"c{len(options)}"
                answer = one.client.Prepare(key=key, parent="p")
                with self.mounted(answer) as root, open(os.path.join(root, "log"), "a") as file:
                    self.assertEqual(one.end(signal.SIGKILL), -9)
                    file.write("without")
                    file.flush()
                    one.start()
                    executed.take()
                    self.assertEqual(one.client.Mounts(key=key), answer)
                    self.assertEqual(executed.take(), 0)
                    file.write(", with")
                with self.mounted(one.client.Mounts(key=key)) as root:
                    self.assertEqual(read_text(os.path.join(root, "log")), "without, with")
                self.assertNotIn("no process any more", one.output())

    def test_a_dead_mount_is_reported_and_made_again(self):
        one = self.start()
        self.image(one.client)
        answers = {"c": one.client.Prepare(key="c", parent="p"),
                   "v": one.client.View(key="v", parent="p"),
                   "extract-1": one.client.Prepare(key="extract-1", parent="p")}
        with self.mounted(answers["c"]) as root:
            write_file(os.path.join(root, "kept"), "kept")
        for key, answer in answers.items():
            with self.subTest(key):
                place = answer.mounts[0].source
                [pid] = {served["pid"] for served in self.services() if served["at"] == [place]}
                os.kill(pid, signal.SIGKILL)
                support.until(lambda: has_ended(pid), "the process ends")
                begin = len(one.output())
                self.assertEqual(one.client.Mounts(key=key), answer)
                self.assertIn(f'ERROR snapshot "{key}": the mount at {place} has no process any '
                              "more", one.output(begin))
                self.assertEqual(read_text(os.path.join(place, "file")), "image")
                self.assertEqual(self.places(self.root).count(place), 1)
        self.assertEqual(read_text(os.path.join(self.root_of(answers["c"]), "kept")), "kept")
        for key in answers:
            one.client.Remove(key=key)
        self.assert_nothing_is_mounted()
        self.assert_only(one.client)

    def test_metrics_name_each_snapshot(self):
        address = os.path.join(self.place, "metrics")
        one = self.start("--metrics", f"unix:{address}")
        self.image(one.client)
        roots = {key: self.root_of(one.client.Prepare(key=key, parent="p")) for key in ("c", "d")}
        roots["v"] = self.root_of(one.client.View(key="v", parent="p"))
        roots["extract-1"] = one.client.Prepare(key="extract-1", parent="p").mounts[0].source
        one.client.Prepare(key="plain")
        self.refused(CODES.NOT_FOUND, one.client.Stat, key="none")
        self.refused(CODES.INVALID_ARGUMENT, one.client.Prepare, key="")

        def of(name, key):
            at = f'{{snapshot="{key}",mountpoint="{roots[key]}"}}'
            return test_remote.samples(address).get(f"bcow_snapshot_{name}{at}")

        def own(name):
            return test_remote.samples(address)[f"bcow_snapshotter_{name}"]
        self.assertEqual([own(f'snapshots{{kind="{kind}"}}')
                          for kind in ("active", "view", "committed")], ["4", "1", "1"])
        self.assertEqual([own(f'failed_requests_total{{kind="{kind}"}}')
                          for kind in ("invalid", "state", "mount")], ["1", "0", "0"])
        self.assertEqual((own("mounts"), own("omitted_snapshots")), ("4", "0"))
        read_text(os.path.join(roots["c"], "file"))
        for key in roots:
            self.assertEqual((of("up", key), of("errors_total", key)), ("1", "0"))
            self.assertIsNone(of("fetched_bytes_total", key))
        support.until(lambda: int(of("requests_total", "c")), "the requests are counted")
        pids = {served["at"][0]: served["pid"] for served in self.services()}
        support.stop(pids[roots["c"]])
        try:
            # It hangs; the page has the others, and asks once.
            for _ in range(2):
                self.assertEqual([of("up", key) for key in roots], ["0", "1", "1", "1"])
        finally:
            os.kill(pids[roots["c"]], signal.SIGCONT)
        support.until(lambda: of("up", "c") == "1", "the mount answers again")
        os.kill(pids[roots["d"]], signal.SIGKILL)
        support.until(lambda: has_ended(pids[roots["d"]]), "the process ends")
        self.assertEqual((of("up", "d"), of("requests_total", "d")), ("0", None))
        self.assertEqual((own("mounts"), own("mounts_made_again_total")), ("4", "0"))
        one.client.Mounts(key="d")
        self.assertEqual((of("up", "d"), own("mounts_made_again_total")), ("1", "1"))
        one.client.Remove(key="d")
        self.assertIsNone(of("up", "d"))
        self.assertEqual(one.end(), 0)
        self.assertFalse(os.path.exists(address))

    def test_a_pool_that_was_killed_is_needed_for_the_next_mount(self):
        self.start_pool()
        one = self.start("--pool", "p")
        self.image(one.client)
        answer = one.client.Prepare(key="c", parent="p")
        with self.mounted(answer) as root:
            write_file(os.path.join(root, "kept"), "kept")
            before = self.pool()
            os.kill(before["pid"], signal.SIGKILL)
            # Another process takes over; the mount is the same.
            support.until(lambda: (self.pool()["restarts"] or 0) > before["restarts"],
                          "the next process")
            self.assertEqual(one.client.Mounts(key="c"), answer)
            self.assertEqual(read_text(os.path.join(root, "kept")), "kept")
            self.assertNotIn("no process any more", one.output())
        self.kill_pool()
        with self.assertRaises(OSError):
            os.listdir(self.root_of(answer))
        details = self.refused(CODES.FAILED_PRECONDITION, one.client.Mounts, key="c")
        self.assertIn("`bcow pool start p`", details)
        self.assertIn("has no process any more", one.output())
        bcow("pool", "start", "p")
        with self.mounted(one.client.Mounts(key="c")) as root:
            self.assertEqual(read_text(os.path.join(root, "kept")), "kept")
        one.client.Remove(key="c")
        self.assert_nothing_is_mounted()
        support.until(lambda: not self.pool_mounts(), "the pool has no mount")

    def test_a_start_ends_the_mounts_of_no_snapshot(self):
        one = self.start()
        client = one.client
        self.image(client)
        answers = {key: client.Prepare(key=key, parent="p") for key in ("c", "removed", "damaged")}
        roots = {key: self.root_of(answer) for key, answer in answers.items()}
        directories = {key: os.path.dirname(root) for key, root in roots.items()}
        with self.mounted(answers["removed"]) as used:
            write_file(os.path.join(used, "new"), "new")
            self.assertEqual(one.end(signal.SIGKILL), -9)
            # As a crash in a removal leaves it, and an entry that cannot be used.
            number = os.path.basename(directories["removed"])
            os.rename(directories["removed"], os.path.join(self.root, "trash", number))
            write_file(os.path.join(directories["damaged"], "record.json"), "{")
            # Two mounts at one place.
            run("mount", "--bind", roots["c"], roots["c"])
            one.start()
            client = one.client
            support.until(lambda: set(self.places(self.root)) == {roots["c"]}, "the start's sweep")
            # A container that runs has its files.
            self.assertEqual(read_text(os.path.join(used, "new")), "new")
            self.assertEqual(read_text(os.path.join(used, "file")), "image")
            self.assertEqual(self.names("trash"), [number])
        support.until(lambda: not self.names("trash"), "the sweep after the end of the mount")
        self.assertEqual({info.name for info in client.List()}, {"p", "c"})
        client.Remove(key="c")
        self.assert_nothing_is_mounted()
        support.until(lambda: not self.services(), "the processes of the mounts end")

    def test_a_mounted_upper_is_mounted_again_as_the_same_mount(self):
        """By the helper of mount(8), with `if_mounted=bind`."""
        self.start_pool()
        one = self.start()
        self.image(one.client)
        layer = os.path.join(self.root, "layers", *self.names("layers"))
        for options in ((), ("pool=p",)):
            with self.subTest(options=options):
                upper = os.path.join(self.place, f"upper{len(options)}")
                os.mkdir(upper)
                mount = types.SimpleNamespace(
                    type="fuse3.mount.bcow", source=layer,
                    options=["allow_other", f"upper={upper}", "if_mounted=bind", *options])
                self.second_mounts(types.SimpleNamespace(mounts=[mount]))
                # The changes of both are there.
                with support.mounted(layer, "--upper", upper) as root:
                    self.assertEqual(read_bytes(os.path.join(root, "large"))[:4], b"1234")
                    self.assertEqual(read_text(os.path.join(root, "late")), "late")

    def second_mounts(self, answer):
        [mount] = answer.mounts
        read_only = copy.deepcopy(answer)
        read_only.mounts[0].options.append("ro")
        with contextlib.ExitStack() as second:
            with self.mounted(answer) as root:
                # A partial file: only the changed block is in the upper.
                with open(os.path.join(root, "large"), "r+b", buffering=0) as file:
                    file.write(b"12")
                    with self.mounted(read_only) as other:
                        self.assertEqual(os.stat(other).st_dev, os.stat(root).st_dev)
                        file.write(b"34")
                        with open(os.path.join(other, "large"), "rb") as file_there:
                            self.assertEqual(file_there.read(4), b"1234")
                        with self.assertRaises(OSError) as refused:
                            open(os.path.join(other, "new"), "w")
                        self.assertEqual(refused.exception.errno, errno.EROFS)
                    # The end of the second mount is not that of the first one.
                    file.write(b"5")
                write_file(os.path.join(root, "early"), "early")
                later = second.enter_context(self.mounted(answer))
            # Nor the end of the first one that of the second, which a third one finds.
            write_file(os.path.join(later, "late"), "late")
            with self.mounted(answer) as third:
                self.assertEqual(os.stat(third).st_dev, os.stat(later).st_dev)
                self.assertEqual(read_text(os.path.join(third, "early")), "early")
        # Two that start together are one mount.
        with contextlib.ExitStack() as both:
            places = []

            def mount_one():
                places.append(both.enter_context(self.mounted(answer)))
            threads = [threading.Thread(target=mount_one) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.assertEqual(len(places), len(threads))
            self.assertEqual(len({os.stat(place).st_dev for place in places}), 1)
            # Other users, or another image: this is another mount, and the upper has one already.
            options = [option for option in mount.options if option != "allow_other"]
            expected = "is being written by"
            if "pool=p" in options:
                options = [*mount.options, f"layer={mount.source}"]
                expected = "cannot put"
            failed = run(os.path.join(self.helpers, "mount.bcow"), mount.source, self.helpers, "-o",
                         ",".join(options), check=False)
            support.assert_refused(self, failed, expected, code=32)


class FurtherContainers(WithMounts, WithImage):
    """containerd starts a further container of an image."""

    def test_a_container_has_one_mount_and_executes_no_helper(self):
        self.ctr("images", "import", "--snapshotter", "bcow", self.archive)
        own = self.own_bcow()
        for options, programs in (((), 2), (("--pool", "p"), 1)):
            with self.subTest(options=options), Executions(own) as executed:
                self.assertEqual(self.snapshotter.end(), 0)
                self.snapshotter.options = ("--bcow", own, *options)
                self.snapshotter.start()
                support.until(lambda: self.ctr("snapshots", "--snapshotter", "bcow", "ls",
                                               check=False).code == 0, "containerd connects again")
                first, further = (f"{os.getpid()}-{len(options)}-{n}" for n in (1, 2))
                # It makes the merged metadata.
                self.run_in(first, "true", "--rm")
                support.until(lambda: not self.devices(), "the first container is removed")
                executed.take()
                self.run_in(further, "sleep 1000000", "--detach")
                self.assertEqual(executed.take(), programs)
                [places] = self.devices().values()
                # The snapshot's mount, and the bind mount of the container.
                roots = [place for place in places if place.startswith(self.root)]
                self.assertEqual((len(roots), len(places)), (1, 2))
                self.ctr("tasks", "rm", "-f", further)
                self.assertEqual(list(self.devices().values()), [roots])
                # A container that starts again needs none at all.
                executed.take()
                self.ctr("tasks", "start", "--detach", further)
                self.assertEqual(executed.take(), 0)
                self.ctr("tasks", "rm", "-f", further)
                self.ctr("containers", "rm", further)
                support.until(lambda: not self.devices(), "the snapshot is removed")
                support.until(lambda: not self.services(), "the process of the mount ends")


if __name__ == "__main__":
    unittest.main()
