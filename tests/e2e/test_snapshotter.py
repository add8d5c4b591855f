"""bcow-snapshotter: containerd's contract over its socket, crashes, and containers of containerd.
"""

import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import tarfile
import tempfile
import threading
import unittest
import unittest.mock

import support
from kills import Kills
from support import bcow, need, read_bytes, read_json, read_text, run, skopeo_copy, write_file
from test_union_crash import Disk

try:
    import snapshots
    from snapshots import ACTIVE, CODES, COMMITTED, VIEW
except ImportError:
    snapshots = None

SEED = int(os.environ.get("BCOW_SEED", "0")) or random.randrange(1 << 32)
KILLS = int(os.environ.get("BCOW_KILLS", "12"))
# The engine: containerd with its shim and runc, and skopeo for the archive of the image.
ENGINE = ["containerd", "ctr", "containerd-shim-runc-v2", "runc", "skopeo"]
# The sockets of containerd and of the snapshotter.
SOCKETS = """\
[grpc]
address = "{place}/c"
[ttrpc]
address = "{place}/t"
[proxy_plugins.bcow]
type = "snapshot"
address = "{place}/sock"
"""
CONFIG = """
version = 2
root = "{place}/lib"
state = "{place}/run"
disabled_plugins = [
    "io.containerd.grpc.v1.cri", "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
    "io.containerd.internal.v1.tracing", "io.containerd.tracing.processor.v1.otlp",
    "io.containerd.internal.v1.opt"]
""" + SOCKETS + """\
# For containerd 2.x; older versions do not read it.
[[plugins."io.containerd.transfer.v1.local".unpack_config]]
platform = "linux"
snapshotter = "bcow"
"""


def has_containerd_2():
    """Whether the containerd in PATH is 2.x, not 1.x."""
    version = run("containerd", "--version").out.decode()
    return re.search(r" v?(\d+)\.", version)[1] != "1"


def has_ended(pid):
    """Whether a process has ended, also if its parent has not noticed that yet."""
    try:
        return read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def need_snapshotter():
    need(root=True, fuse=True)
    if snapshots is None:
        support.missing("python3-grpcio and python3-protobuf are not installed")


class WithSnapshotter(support.Scratch):
    @classmethod
    def setUpClass(cls):
        need_snapshotter()
        super().setUpClass()
        # Not in PATH: containerd needs no helper.
        cls.helpers = cls.path("helpers")
        os.mkdir(cls.helpers)
        os.symlink(support.BCOW, os.path.join(cls.helpers, "mount.bcow"))

    def setUp(self):
        # The path of a socket has at most 108 bytes.
        self.place = tempfile.mkdtemp(prefix="s", dir=support.WORK)
        self.addCleanup(shutil.rmtree, self.place, ignore_errors=True)
        self.addCleanup(self.unmount_all)
        self.root = os.path.join(self.place, "root")

    def places(self, below):
        """Where something is mounted below a directory, the first mount first."""
        with open("/proc/self/mounts") as table:
            places = [line.split()[1] for line in table]
        return [place for place in places if place.startswith(below + "/")]

    def unmount_all(self):
        for place in reversed(self.places(self.place)):
            subprocess.run(["umount", "-l", place], check=False)

    def assert_nothing_is_mounted(self):
        self.assertEqual(self.places(self.root), [])

    def services(self):
        """The mounts that processes of bcow serve below the root of the snapshotter."""
        services = json.loads(bcow("ps", "--json").out)["services"]
        return [service for service in services
                if any(at.startswith(self.root + "/") for at in service["at"] or [])]

    def start_pool(self):
        """A pool p, for this process and containerd."""
        self.enterContext(unittest.mock.patch.dict(
            os.environ, BCOW_POOLS=os.path.join(self.place, "pools")))
        self.pool_log = os.path.join(self.place, "pool.log")
        bcow("pool", "start", "--log-file", self.pool_log, "p")
        self.addCleanup(self.kill_pool)

    def kill_pool(self):
        for pool in json.loads(bcow("pool", "list", "--json").out)["pools"]:
            # The supervisor first: it starts the other one again.
            for pid in filter(None, (pool["keeper"], pool["pid"])):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def pool(self):
        [pool] = json.loads(bcow("pool", "list", "--json").out)["pools"]
        return pool

    def image_and_upper(self, root):
        """The image of the mount at a directory, as arguments, and its upper."""
        device = os.stat(root).st_dev

        def is_there(at):
            # The mount of another container may end meanwhile.
            with contextlib.suppress(FileNotFoundError):
                return os.stat(at).st_dev == device
        [found] = [service for service in self.services() if any(map(is_there, service["at"]))]
        return ([found["image"], *(f"--layer={layer}" for layer in found["layers"])],
                found["upper"])

    def pool_mounts(self):
        return json.loads(bcow("pool", "stats", "p", "--json").out)["mounts"]

    def start(self, *options):
        one = snapshots.Snapshotter(self.root, os.path.join(self.place, "sock"), *options)
        self.addCleanup(one.end, signal.SIGKILL)
        return one

    @contextlib.contextmanager
    def mounted(self, answer):
        """The mount of an answer, made as containerd makes it."""
        where = tempfile.mkdtemp(prefix="m", dir=self.place)
        with contextlib.ExitStack() as stack:
            stack.callback(os.rmdir, where)
            for mount in answer.mounts:
                self.mount(mount, where)
                stack.callback(run, "umount", where)
            yield where

    def mount(self, mount, where):
        options = ",".join(mount.options)
        if mount.type == "bind":
            run("mount", "--bind", "-o", options, mount.source, where)
            if "ro" in mount.options:
                run("mount", "-o", "remount,bind,ro", where)
        elif mount.type == "overlay":
            run("mount", "-t", "overlay", "-o", options, mount.source, where)
        else:
            kind = mount.type.removeprefix("fuse3.")
            run("mount.fuse3", mount.source, where, "-o", options, "-t", kind,
                env={"PATH": self.helpers + os.pathsep + os.environ["PATH"]})

    def names(self, *parts):
        return sorted(os.listdir(os.path.join(self.root, *parts)))

    def assert_only(self, client):
        """Nothing is on the disk but what the records need."""
        client.Cleanup()
        infos = client.List()
        records, mounted = {}, set()
        for name in self.names("snapshots"):
            record = read_json(os.path.join(self.root, "snapshots", name, "record.json"))
            records[record["name"]] = record
            files = {"committed": [], "view": ["fs"], "active": ["fs"]}[record["kind"]]
            if files and "parent" in record:
                files = ["upper"] if record["kind"] == "active" else []
            if "parent" in record and record["kind"] != "committed":
                # Without it, a crash came before the mount.
                files += {"root"} & set(self.names("snapshots", name))
            self.assertEqual(self.names("snapshots", name), sorted(files + ["record.json"]))
            mounted.update(os.path.join(self.root, "snapshots", name, part) for part in files)
        self.assertEqual(set(records), {info.name for info in infos})
        layers = [f"{record['id']}.bcow" for record in records.values() if record["has_layer"]]
        self.assertEqual(self.names("layers"), sorted(layers))
        self.assertLessEqual(set(self.names("merged")), set(layers))
        self.assertEqual(self.names("new"), [])
        self.assertLessEqual(set(self.places(self.root)), mounted)
        support.until(lambda: not self.names("trash"), lambda: (
            f"the sweep of {self.names('trash')}; {bcow('ps').out.decode()}"))

    def refused(self, code, call, **fields):
        with self.assertRaises(snapshots.RpcError) as caught:
            call(**fields)
        self.assertEqual(caught.exception.code(), code, caught.exception.details())
        return caught.exception.details()

    def assert_is_the_image(self, client, top):
        # The tree is that of umoci. containerd gives the root directory no time.
        with self.mounted(client.View(key="tree", parent=top)) as root:
            _, expected = support.unpacked("small")
            support.assert_same_tree(self, expected, root, ignore={"mtime:."})
        client.Remove(key="tree")

    def wrapper(self, script):
        """A program that runs a script before bcow."""
        path = os.path.join(self.place, "wrapper")
        write_file(path, f'#!/bin/sh\n{script}\nexec "{support.BCOW}" "$@"\n')
        os.chmod(path, 0o755)
        return path


class Contract(WithSnapshotter):
    def test_layers_are_stacked_and_shared(self):
        client = self.start().client
        with self.mounted(client.Prepare(key="a")) as root:
            self.assertEqual(os.stat(root).st_mode & 0o7777, 0o755)
            for name, data in (("both", b"low"), ("low", os.urandom(1 << 20)), ("gone", b"")):
                write_file(os.path.join(root, name), data)
            os.chmod(root, 0o711)
        client.Commit(name="low", key="a")
        with self.mounted(client.Prepare(key="b", parent="low")) as root:
            self.assertEqual(os.stat(root).st_mode & 0o7777, 0o711)
            os.remove(os.path.join(root, "gone"))
            write_file(os.path.join(root, "both"), b"high")
            with open(os.path.join(root, "low"), "r+b") as file:
                file.seek(500_000)
                file.write(b"changed")
            expected = support.tree.dump(root)
        client.Commit(name="high", key="b")
        # A snapshot without a change has no layer, and the root's mode stays.
        with self.mounted(client.Prepare(key="c", parent="high")) as root:
            self.assertEqual(os.stat(root).st_mode & 0o7777, 0o711)
        client.Commit(name="same", key="c")
        self.assertEqual(len(self.names("layers")), 2)
        for parent in ("high", "same"):
            with self.mounted(client.View(key=f"v-{parent}", parent=parent)) as root:
                support.assert_same_tree(self, expected, root)
                with self.assertRaises(OSError):
                    open(os.path.join(root, "new"), "w")
        # Both views show the same layers.
        self.assertEqual(len(self.names("merged")), 1)
        # Only the changed block is in the upper layer.
        self.assertLess(client.Usage(key="high").size, 100_000)
        self.assertGreater(client.Usage(key="low").size, 1 << 20)
        self.assertEqual(client.Usage(key="same").size, 0)
        self.assertEqual(client.Usage(key="v-high").size, 0)
        # The mode of the root is a change.
        with self.mounted(client.Prepare(key="d", parent="same")) as root:
            os.chmod(root, 0o700)
        client.Commit(name="mode", key="d")
        self.assertEqual(len(self.names("layers")), 3)
        with self.mounted(client.View(key="v-mode", parent="mode")) as root:
            self.assertEqual(os.stat(root).st_mode & 0o7777, 0o700)
        self.assert_only(client)
        for key in ("v-mode", "mode", "v-high", "v-same", "same", "high"):
            client.Remove(key=key)
        self.assert_only(client)
        self.assertEqual(self.names("merged"), [])
        self.assert_nothing_is_mounted()
        support.until(lambda: not self.services(), "the processes of the mounts end")

    def lowest_layer(self, client):
        """Commits a layer "low", below those of the tests of unpacking."""
        with self.mounted(client.Prepare(key="a")) as root:
            for name in ("d/gone", "d/kept", "replaced/below", "file"):
                os.makedirs(os.path.dirname(os.path.join(root, name)), exist_ok=True)
                write_file(os.path.join(root, name), name * 1000)
            os.chmod(os.path.join(root, "d"), 0o750)
            os.chmod(root, 0o711)
            os.chown(root, 3, 4)
            os.setxattr(root, "user.x", b"of the root")
        client.Commit(name="low", key="a")

    def unpack(self, root):
        """Changes what lowest_layer has made, as the unpacking of a layer does."""
        def at(name):
            return os.path.join(root, name)
        os.remove(at("d/gone"))
        write_file(at("d/new"), "new")
        os.link(at("file"), at("d/link"))
        shutil.rmtree(at("replaced"))
        os.mkdir(at("replaced"))
        write_file(at("replaced/above"), "above")
        os.setxattr(at("replaced"), "user.y", b"1")
        os.symlink("d/kept", at("link"))
        os.chown(at("d"), 5, 6)
        for name in ("d/new", "d", "replaced/above", "replaced", "link", ""):
            os.utime(at(name), (7, 8), follow_symlinks=False)

    def test_a_layer_is_unpacked_into_overlayfs(self):
        self.start_pool()
        for options in ((), ("--pool", "p")):
            with self.subTest(options=options):
                self.root = os.path.join(self.place, f"root{len(options)}")
                one = self.start(*options)
                self.unpack_into_overlayfs(one)
                self.assertEqual(one.end(), 0)

    def unpack_into_overlayfs(self, one):
        self.lowest_layer(one.client)
        with self.mounted(one.client.Prepare(key="b", parent="low")) as root:
            self.unpack(root)
        one.client.Commit(name="expected", key="b")
        key = "default/7/extract-1-x sha256:2"
        answer = one.client.Prepare(key=key, parent="low")
        self.assertEqual([mount.type for mount in answer.mounts], ["bind", "overlay"])
        with self.mounted(answer) as root:
            # The unpacking goes on while the snapshotter is replaced.
            self.assertEqual(one.end(signal.SIGKILL), -9)
            one.start()
            self.assertEqual(one.client.Mounts(key=key), answer)
            self.unpack(root)
            details = self.refused(CODES.FAILED_PRECONDITION, one.client.Commit,
                                   name="high", key=key)
            self.assertIn("is mounted with overlayfs", details)
        one.client.Commit(name="high", key=key)
        self.assert_nothing_is_mounted()
        with self.mounted(one.client.View(key="e", parent="expected")) as root:
            expected = support.tree.dump(root)
        with self.mounted(one.client.View(key="v", parent="high")) as root:
            support.assert_same_tree(self, expected, root)
            self.assertEqual(os.stat(root).st_mode & 0o7777, 0o711)
            self.assertEqual(os.getxattr(root, "user.x"), b"of the root")
        # A layer that changes nothing but the root.
        with self.mounted(one.client.Prepare(key="extract-2", parent="high")) as root:
            os.chmod(root, 0o700)
        one.client.Commit(name="root", key="extract-2")
        with self.mounted(one.client.View(key="w", parent="root")) as root:
            self.assertEqual(os.stat(root).st_mode & 0o7777, 0o700)
            self.assertEqual(os.listdir(os.path.join(root, "replaced")), ["above"])
        self.assert_only(one.client)
        for key in ("e", "v", "w"):
            one.client.Remove(key=key)
        # Neither one that cannot be mounted nor one that is not committed leaves anything.
        layer = os.path.join(self.root, "layers/1.bcow")
        os.rename(layer, layer + ".lost")
        self.refused(CODES.FAILED_PRECONDITION, one.client.Prepare, key="extract-3", parent="high")
        os.rename(layer + ".lost", layer)
        one.client.Prepare(key="extract-3", parent="high")
        one.client.Remove(key="extract-3")
        self.assert_nothing_is_mounted()
        self.assert_only(one.client)

    def test_a_layer_with_a_name_of_uppers_is_refused(self):
        client = self.start().client
        self.lowest_layer(client)
        with self.mounted(client.Prepare(key="extract-1", parent="low")) as root:
            os.makedirs(os.path.join(root, ".bcow/maps"))
        details = self.refused(CODES.FAILED_PRECONDITION, client.Commit, name="n", key="extract-1")
        self.assertIn("/.bcow, a name that bcow reserves", details)
        client.Remove(key="extract-1")
        self.assert_nothing_is_mounted()
        self.assert_only(client)

    def test_layers_are_unpacked_through_fuse_where_overlayfs_cannot_be_used(self):
        # The three paths do not fit into the page that mount(2) takes.
        self.root = os.path.join(self.place, *["long" * 60] * 6)
        os.makedirs(os.path.dirname(self.root))
        one = self.start()
        self.lowest_layer(one.client)
        answer = one.client.Prepare(key="extract-1", parent="low")
        self.assertEqual([mount.type for mount in answer.mounts], ["bind"])
        with self.mounted(answer) as root:
            write_file(os.path.join(root, "new"), "new")
        one.client.Commit(name="high", key="extract-1")
        with self.mounted(one.client.View(key="v", parent="high")) as root:
            self.assertEqual(read_text(os.path.join(root, "new")), "new")
        self.assertEqual(one.end(), 0)

    def test_containers_share_layers_and_keep_their_changes(self):
        one = self.start()
        client = one.client
        with self.mounted(client.Prepare(key="a")) as root:
            write_file(os.path.join(root, "file"), "image")
        client.Commit(name="image", key="a")
        with contextlib.ExitStack() as stack:
            roots = [stack.enter_context(self.mounted(client.Prepare(key=f"c{n}", parent="image")))
                     for n in range(3)]
            # The mounts outlive the snapshotter.
            self.assertEqual(one.end(signal.SIGKILL), -9)
            for n, root in enumerate(roots):
                with open(os.path.join(root, "file"), "a") as file:
                    file.write(f" of {n}")
            one.start()
            client = one.client
            # A container that still runs keeps its files until it ends.
            client.Remove(key="c2")
            client.Cleanup()
            self.assertEqual(len(self.names("trash")), 1)
            self.assertEqual(read_text(os.path.join(roots[2], "file")), "image of 2")
        for n in range(2):
            with self.mounted(client.Mounts(key=f"c{n}")) as root:
                self.assertEqual(read_text(os.path.join(root, "file")), f"image of {n}")
        support.until(lambda: not self.names("trash"), "the sweep after the end of a mount")
        self.assert_only(client)
        self.assertEqual(one.end(), 0)

    def test_each_refusal_has_its_code(self):
        client = self.start().client
        client.Prepare(key="a")
        client.Commit(name="p", key="a")
        client.Prepare(key="active", parent="p")
        client.View(key="view", parent="p")
        for code, call, fields in [
            (CODES.NOT_FOUND, client.Stat, {"key": "none"}),
            (CODES.NOT_FOUND, client.Stat, {"key": "a"}),
            (CODES.NOT_FOUND, client.Usage, {"key": "none"}),
            (CODES.NOT_FOUND, client.Mounts, {"key": "none"}),
            (CODES.NOT_FOUND, client.Remove, {"key": "none"}),
            (CODES.NOT_FOUND, client.Update, {"info": {"name": "none"}}),
            (CODES.NOT_FOUND, client.Prepare, {"key": "x", "parent": "none"}),
            (CODES.NOT_FOUND, client.Commit, {"name": "x", "key": "none"}),
            (CODES.ALREADY_EXISTS, client.Prepare, {"key": "active", "parent": "p"}),
            (CODES.ALREADY_EXISTS, client.View, {"key": "p"}),
            (CODES.ALREADY_EXISTS, client.Commit, {"name": "p", "key": "active"}),
            (CODES.ALREADY_EXISTS, client.Commit, {"name": "active", "key": "active"}),
            (CODES.FAILED_PRECONDITION, client.Mounts, {"key": "p"}),
            (CODES.FAILED_PRECONDITION, client.Remove, {"key": "p"}),
            (CODES.FAILED_PRECONDITION, client.Commit, {"name": "x", "key": "view"}),
            (CODES.INVALID_ARGUMENT, client.Prepare, {"key": "x", "parent": "active"}),
            (CODES.INVALID_ARGUMENT, client.Prepare, {"key": ""}),
            (CODES.INVALID_ARGUMENT, client.Commit, {"name": "", "key": "active"}),
            (CODES.INVALID_ARGUMENT, client.Commit,
             {"name": "x", "key": "active", "parent": "other"}),
            (CODES.INVALID_ARGUMENT, client.List, {"filters": ["name="]}),
            (CODES.INVALID_ARGUMENT, client.Update,
             {"info": {"name": "p"}, "update_mask": {"paths": ["kind"]}}),
            (CODES.INVALID_ARGUMENT, client.Update, {}),
        ]:
            with self.subTest(call=fields):
                self.refused(code, call, **fields)
        unknown = client.channel.unary_unary("/containerd.services.snapshots.v1.Snapshots/Other")
        with self.assertRaisesRegex(Exception, "UNIMPLEMENTED"):
            unknown(b"")
        self.assertIn("children", self.refused(CODES.FAILED_PRECONDITION, client.Remove, key="p"))
        self.assert_only(client)

    def test_a_mounted_snapshot_is_not_committed(self):
        client = self.start().client
        client.Prepare(key="a")
        client.Commit(name="p", key="a")
        with self.mounted(client.Prepare(key="b", parent="p")) as root:
            write_file(os.path.join(root, "file"), "kept")
            details = self.refused(CODES.FAILED_PRECONDITION, client.Commit, name="n", key="b")
            self.assertIn("the snapshot is mounted", details)
            # The snapshot that is still active shows the same files.
            with self.mounted(client.Mounts(key="b")) as again:
                self.assertEqual(os.stat(again).st_dev, os.stat(root).st_dev)
        client.Commit(name="n", key="b")
        with self.mounted(client.View(key="v", parent="n")) as root:
            self.assertEqual(read_text(os.path.join(root, "file")), "kept")

    def test_records_outlive_restarts(self):
        one = self.start()
        one.client.Prepare(key="ü", labels={"one": "1", "two": "2"})
        one.client.Commit(name="base", key="ü", labels={"three": "3"})
        one.client.View(key="view", parent="base", labels={"containerd.io/gc.root": "now"})
        one.client.Update(info={"name": "view", "labels": {"l": "5", "m": "6"}},
                          update_mask={"paths": ["labels.l"]})
        before = one.client.List()
        kinds = {info.name: info.kind for info in before}
        self.assertEqual(kinds, {"base": COMMITTED, "view": VIEW})
        labels = {info.name: dict(info.labels) for info in before}
        self.assertEqual(labels, {"base": {"three": "3"},
                                  "view": {"containerd.io/gc.root": "now", "l": "5"}})
        self.assertEqual(one.end(), 0)
        one.start()
        self.assertEqual(one.client.List(), before)
        self.assertEqual([info.name for info in one.client.List(
            filters=['kind==view,labels."containerd.io/gc.root"~=/^n/', "name==none"])], ["view"])

    def test_a_long_list_comes_in_parts(self):
        client = self.start().client
        labels = {f"label-{n}": "x" * 4000 for n in range(60)}
        for n in range(30):
            client.Prepare(key=f"k{n}", labels=labels)
        self.assertEqual(sorted(info.name for info in client.List()),
                         sorted(f"k{n}" for n in range(30)))

    def test_parallel_requests_for_one_name_have_one_winner(self):
        client = self.start().client
        client.Prepare(key="a")
        client.Commit(name="p", key="a")
        for call, fields in ((client.Prepare, {"key": "same", "parent": "p"}),
                             (client.Commit, {"key": "same", "name": "done"}),
                             (client.Remove, {"key": "done"})):
            results = []

            def attempt():
                try:
                    call(**fields)
                    results.append(True)
                except Exception:
                    results.append(False)
            threads = [threading.Thread(target=attempt) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.assertEqual(sorted(results), [False] * 7 + [True], fields)
        self.assert_only(client)

    def test_a_second_process_is_refused(self):
        one = self.start()
        self.assertEqual(stat.S_IMODE(os.stat(one.socket).st_mode), 0o600)
        for socket, expected in (("other", "another process uses"), ("sock", "another process")):
            refused = run(snapshots.PROGRAM, "--root", self.root, "--socket",
                          os.path.join(self.place, socket), check=False)
            support.assert_refused(self, refused, expected)
        refused = run(snapshots.PROGRAM, "--root", self.root + "2", "--socket", one.socket,
                      check=False)
        support.assert_refused(self, refused, "another process listens")
        refused = run(snapshots.PROGRAM, "--root", self.root + "3", "--socket", one.socket,
                      "--bcow", "/nonexistent", check=False)
        support.assert_refused(self, refused, "/nonexistent version failed")
        refused = run(snapshots.PROGRAM, "--pool", "p", "--mount-option", "cache_size=1M",
                      check=False)
        support.assert_refused(self, refused, "--mount-option cache_size=1M")
        one.client.List()

    def test_a_failed_commit_can_be_repeated(self):
        wrapper = self.wrapper('case "$*" in *convert*) [ -e "$0.works" ] || exit 5 ;; esac')
        client = self.start("--bcow", wrapper).client
        client.Prepare(key="a", labels={"kept": "1"})
        self.assertIn("exit status: 5", self.refused(CODES.INTERNAL, client.Commit, name="n",
                                                     key="a"))
        self.assert_only(client)
        self.assertEqual(dict(client.Stat(key="a").info.labels), {"kept": "1"})
        with open(wrapper + ".works", "w"):
            pass
        client.Commit(name="n", key="a")
        self.assertEqual(client.Stat(key="n").info.kind, COMMITTED)


class Crashes(WithSnapshotter):
    """The snapshotter is killed; the next one finds each snapshot complete, or not at all."""

    def test_killed_before_and_after_the_layer_is_written(self):
        for moment, script in (
                ("before", 'case "$*" in *convert*) kill -9 $PPID; sleep 0.2 ;; esac'),
                ("after", f'case "$*" in *convert*) "{support.BCOW}" "$@"; kill -9 $PPID; '
                          'exit ;; esac')):
            with self.subTest(moment):
                self.root = os.path.join(self.place, moment)
                one = self.start("--bcow", self.wrapper(script))
                one.client.Prepare(key="a")
                self.refused(CODES.UNAVAILABLE, one.client.Commit, name="n", key="a")
                self.assertEqual(one.process.wait(timeout=60), -9)
                one.client.close()
                one.options = ()
                one.start()
                self.assertEqual([info.name for info in one.client.List()], ["a"])
                self.assert_only(one.client)
                one.client.Commit(name="n", key="a")
                self.assert_only(one.client)
                self.assertEqual(one.end(), 0)

    def test_what_was_answered_survives_a_power_cut(self):
        need("mkfs.ext4", "mount")
        disk = Disk(self.place)
        self.addCleanup(disk.remove)
        self.root = os.path.join(disk.where, "root")
        one = self.start()
        content = random.Random(SEED).randbytes(3 << 20)

        def change(answer, name):
            with self.mounted(answer) as root:
                write_file(os.path.join(root, name), content)

        def update(client):
            client.Update(info={"name": "high", "labels": {"new": "1"}})
        steps = [lambda client: change(client.Prepare(key="a"), "low"),
                 lambda client: client.Commit(name="low", key="a", labels={"old": "1"}),
                 lambda client: change(client.Prepare(key="b", parent="low"), "high"),
                 lambda client: client.Commit(name="high", key="b"),
                 update,
                 lambda client: client.View(key="v", parent="high"),
                 lambda client: client.Remove(key="v")]
        for number, step in enumerate(steps):
            with self.subTest(step=number):
                if number in (1, 3):
                    # What a power cut took from an active snapshot is written once more.
                    key, name = ("a", "low") if number == 1 else ("b", "high")
                    change(one.client.Mounts(key=key), name)
                step(one.client)
                before = one.client.List()
                self.assertEqual(one.end(signal.SIGKILL), -9)
                self.kill_mounts()
                disk.cut()
                one.start()
                self.assertEqual(one.client.List(), before)
                self.assert_only(one.client)
        for name in self.names("layers"):
            support.bcow("fsck", "--data", os.path.join(self.root, "layers", name))
        with self.mounted(one.client.View(key="w", parent="high")) as root:
            for name in ("low", "high"):
                self.assertEqual(read_bytes(os.path.join(root, name)), content)
        one.client.Remove(key="w")
        self.assertEqual(one.end(), 0)

    def test_killed_at_random_moments(self):
        choose = random.Random(SEED)
        one = self.start()
        # Names and kinds of all snapshots, and what the request that was cut off changes.
        known, pending = {}, None
        for kill in range(KILLS):
            timer = threading.Timer(choose.uniform(0.0, 0.3), one.process.kill)
            timer.start()
            number = 0
            while True:
                number += 1
                pending = self.next_request(choose, known, f"{kill}-{number}")
                call, fields, removed, added = pending
                try:
                    getattr(one.client, call)(**fields)
                except Exception:
                    break
                known = self.after(known, removed, added)
            timer.join()
            self.assertEqual(one.process.wait(timeout=60), -9, f"seed {SEED}: {pending}")
            one.client.close()
            one.start()
            found = {info.name: info.kind for info in one.client.List()}
            possible = (known, self.after(known, removed, added))
            self.assertIn(found, possible, f"seed {SEED}: {pending}")
            known = found
            self.assert_only(one.client)
        for name in self.names("layers"):
            support.bcow("fsck", "--data", os.path.join(self.root, "layers", name))

    def kill_mounts(self):
        """Ends the processes of all mounts, as a power cut does."""
        pids = {service["pid"] for service in self.services()}
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for place in reversed(self.places(self.root)):
            run("umount", "-l", place)
        # Then they have no open file.
        support.until(lambda: all(map(has_ended, pids)), "the processes end")

    @staticmethod
    def after(known, removed, added):
        return {**{name: kind for name, kind in known.items() if name != removed}, **added}

    @staticmethod
    def next_request(choose, known, new):
        active = sorted(name for name, kind in known.items() if kind == ACTIVE)
        committed = sorted(name for name, kind in known.items() if kind == COMMITTED)
        kind = choose.choice(("Prepare", "Prepare", "Commit", "View", "Update", "Remove"))
        if kind == "Commit" and active:
            old = choose.choice(active)
            return kind, {"name": f"c{new}", "key": old}, old, {f"c{new}": COMMITTED}
        if kind == "Remove" and active:
            old = choose.choice(active)
            return kind, {"key": old}, old, {}
        if kind == "Update" and known:
            name = choose.choice(sorted(known))
            return kind, {"info": {"name": name, "labels": {"n": new}}}, None, {}
        parent = choose.choice(committed) if committed else ""
        if kind == "View":
            return kind, {"key": f"v{new}", "parent": parent}, None, {f"v{new}": VIEW}
        parent = choose.choice((parent, ""))
        return "Prepare", {"key": f"a{new}", "parent": parent}, None, {f"a{new}": ACTIVE}


class WithContainerd(WithSnapshotter):
    """A containerd of the test's own."""

    containerd = None
    namespace = "default"

    def start_containerd(self):
        log = os.path.join(self.place, "containerd.log")
        with open(log, "ab") as out:
            self.containerd = subprocess.Popen(
                ["containerd", "--config", os.path.join(self.place, "config.toml")],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out)

        def answers():
            if self.containerd.poll() is not None:
                with open(log, errors="replace") as text:
                    raise AssertionError(f"containerd ended: {text.read()[-4000:]}")
            return self.ctr("version", check=False).code == 0
        support.until(answers, "containerd answers")

    def stop_containerd(self, how=signal.SIGTERM):
        self.containerd.send_signal(how)
        self.containerd.wait(timeout=60)

    def stop_all(self):
        """Ends what a failed test has left: containers and their shims."""
        if self.containerd and self.containerd.poll() is None:
            for name in self.listed("tasks"):
                self.ctr("tasks", "rm", "-f", name, check=False)
            self.stop_containerd()

    def ctr(self, *arguments, check=True, **options):
        return run("ctr", "--address", os.path.join(self.place, "c"), "--namespace",
                   self.namespace, *arguments, check=check, **options)

    def listed(self, what):
        return self.ctr(what, "ls", "-q").out.decode().split()


class WithImage(WithContainerd):
    """containerd and the archive of an ordinary image."""

    @classmethod
    def setUpClass(cls):
        need(*ENGINE)
        super().setUpClass()
        cls.archive = cls.path("small.tar")
        layout, tag = support.image("small")
        skopeo_copy(f"oci:{layout}:{tag}", f"docker-archive:{cls.archive}:bcow.test/small:1")

    def setUp(self):
        super().setUp()
        self.start_pool()
        self.snapshotter = self.start()
        write_file(os.path.join(self.place, "config.toml"), CONFIG.format(place=self.place))
        self.addCleanup(self.stop_all)
        self.start_containerd()

    def run_in(self, name, script, *options):
        """Runs a script as a new container; returns its output. The container stays."""
        done = self.ctr("run", "--snapshotter", "bcow", *options, "bcow.test/small:1", name,
                        "/bin/sh", "-ec", script)
        return done.out.decode()

    def layers(self):
        result = run("skopeo", "inspect", f"docker-archive:{self.archive}")
        return len(json.loads(result.out)["Layers"])


class Containers(Kills, WithImage):
    """containerd runs containers of an ordinary image."""

    def test_containers_outlive_kills(self):
        self.ctr("images", "import", "--snapshotter", "bcow", self.archive)
        self.assertEqual(self.snapshotter.end(), 0)
        self.snapshotter.options = ("--pool", "p")
        self.snapshotter.start()
        self.assert_containers_outlive_kills(["bcow.test/small:1"])

    def test_containers_write_and_outlive_restarts(self):
        self.ctr("images", "import", "--snapshotter", "bcow", self.archive)
        client = self.snapshotter.client
        committed = [info for info in client.List() if info.kind == COMMITTED]
        self.assertEqual(len(committed), self.layers())
        [top] = {info.name for info in committed} - {info.parent for info in committed}
        self.assert_is_the_image(client, top)
        # containerd waits for a socket that is missing, if only a second.
        self.assertEqual(self.snapshotter.end(), 0)
        self.assertFalse(os.path.exists(self.snapshotter.socket))
        self.snapshotter.start()
        client = self.snapshotter.client
        support.until(lambda: self.ctr("snapshots", "--snapshotter", "bcow", "ls",
                                       check=False).code == 0, "containerd connects again")
        self.assertEqual(self.run_in("one", "python3 -c 'print(6 * 7)'; echo 1 >/written; "
                                     "rm /etc/motd; echo more >>/etc/passwd; exit 0",
                                     "--rm"), "42\n")
        # A container runs while the snapshotter and containerd are killed and start again.
        script = ("echo begun >/state; until [ -e /go ]; do sleep 0.1; done; cat /state /go")
        self.ctr("run", "--detach", "--snapshotter", "bcow", "bcow.test/small:1", "two", "/bin/sh",
                 "-ec", script)
        self.assertEqual(self.snapshotter.end(signal.SIGKILL), -9)
        self.stop_containerd(signal.SIGKILL)
        self.snapshotter.options = ("--pool", "p")
        self.snapshotter.start()
        client = self.snapshotter.client
        self.start_containerd()
        self.assertEqual(self.listed("tasks"), ["two"])
        # The container may end before this program, which is killed then.
        self.ctr("tasks", "exec", "--exec-id", "e", "two", "/bin/sh", "-c", "echo went on >/go",
                 check=False)

        def has_ended():
            return b"STOPPED" in self.ctr("tasks", "ls").out
        support.until(has_ended, "the container ends")
        self.ctr("tasks", "rm", "two")
        # Its root is there as it was left. containerd may have been killed before it collected the
        # root of the first container.
        [active] = [info.name for info in client.List()
                    if info.kind == ACTIVE and info.name.endswith("/two")]
        with self.mounted(client.Mounts(key=active)) as root:
            self.assertEqual(sorted({"go", "state"} & set(os.listdir(root))), ["go", "state"])
            self.assertNotIn("written", os.listdir(root))
            self.assertEqual(read_text(os.path.join(root, "go")), "went on\n")
        # It has the mount that it had. The next one is in the pool.
        self.assertEqual(self.pool_mounts(), [])
        [mount] = client.Mounts(key=active).mounts
        run("umount", mount.source)
        self.assertEqual(self.ctr("tasks", "start", "two").out, b"begun\nwent on\n")
        self.assertEqual([one["at"] for one in self.pool_mounts()], [mount.source])
        # A container in the pool does not notice that the process is killed and replaced.
        self.ctr("run", "--detach", "--snapshotter", "bcow", "bcow.test/small:1", "three",
                 "/bin/sh", "-ec", "until [ -e /go ]; do echo more >>/log; sleep 0.05; done; "
                 "cat /go; rm /log /go")
        # What `nerdctl commit` and `docker commit` do with a running container. Both pause it: the
        # writer of tar archives fails when a file grows while it is archived, on any file system.
        support.until(lambda: self.ctr("tasks", "exec", "--exec-id", "e", "three", "/bin/sh", "-c",
                                       "test -e /log", check=False).code == 0, "it writes")
        self.ctr("tasks", "pause", "three")
        changes = self.ctr("snapshots", "--snapshotter", "bcow", "diff", "three").out
        self.ctr("tasks", "resume", "three")
        with tarfile.open(fileobj=io.BytesIO(changes)) as changed:
            self.assertIn("log", changed.getnames())
        [three] = [info.name for info in client.List() if info.name.endswith("/three")]
        image, upper = self.image_and_upper(client.Mounts(key=three).mounts[0].source)
        layer = os.path.join(self.place, "three.bcow")
        bcow("commit", *image, "--upper", upper, layer)
        self.assertIn(b"more\n", bcow("cat", *image, f"--layer={layer}", "/log").out)
        self.assertIn(b"A\t/log\tfile\n", bcow("diff", *image, "--upper", upper, check=False).out)

        def lines():
            return int(self.ctr("tasks", "exec", "--exec-id", "e", "three", "/bin/sh", "-c",
                                "wc -l </log").out)
        self.assertEqual(self.snapshotter.end(signal.SIGKILL), -9)
        before = lines()
        support.until(lambda: lines() > before, "it writes without the snapshotter")
        self.snapshotter.start()
        client = self.snapshotter.client
        support.until(lambda: self.ctr("snapshots", "--snapshotter", "bcow", "ls",
                                       check=False).code == 0, "containerd connects again")
        for step in ("kill", "restart"):
            before = self.pool()
            if step == "kill":
                os.kill(before["pid"], signal.SIGKILL)
            else:
                bcow("pool", "restart", "p")
            support.until(lambda: (self.pool()["restarts"] or 0) > before["restarts"],
                          "another process takes over")
        self.ctr("tasks", "exec", "--exec-id", "e", "three", "/bin/sh", "-ec",
                 "grep -q more /log; echo went on >/go")
        support.until(lambda: b"STOPPED" in self.ctr("tasks", "ls").out, "the container ends")
        self.ctr("tasks", "rm", "three")
        self.ctr("containers", "rm", "three")
        # The mount of a snapshot stays without a container, and ends with the pool.
        support.until(lambda: len(self.pool_mounts()) == 1, "the mount of the container ends")
        bcow("pool", "stop", "--force", "p")
        details = self.refused(CODES.FAILED_PRECONDITION, client.Mounts, key=active)
        self.assertIn("`bcow pool start p`", details)
        self.assertIn("`bcow pool start p`", str(self.ctr("tasks", "start", "two", check=False)))
        bcow("pool", "start", "p")
        self.assertEqual(self.ctr("tasks", "start", "two").out, b"begun\nwent on\n")
        self.ctr("containers", "rm", "two")
        # containerd's garbage collection removes the layers with the image.
        self.ctr("images", "rm", "--sync", "bcow.test/small:1")
        support.until(lambda: not client.List(), "containerd removes all snapshots")
        self.assert_only(client)
        self.assertEqual(self.names("layers"), [])
        self.assert_nothing_is_mounted()
        support.until(lambda: not self.services(), "the processes of the mounts end")
        self.stop_containerd()
        self.assertEqual(self.snapshotter.end(), 0)


if __name__ == "__main__":
    unittest.main()
