"""bcow-layer-store: podman finds layers of images in a registry before it pulls them.

The registry is Debian's docker-registry with TLS and a password. The image has busybox, a large
file that no program reads, and what overlayfs and BCoW layers do in different ways: a hard link
into a lower layer, an opaque directory, a file that becomes a directory, and directories of the
root that an upper layer removes.
"""

import base64
import contextlib
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import unittest

import support
from sequences import ocilib
from support import (bcow, blob_path, is_mounted, manifest_in, need, read_bytes, read_json,
                     read_text, run, skopeo_copy)
from test_remote import USER, credentials, make_certificates, registry, samples
from test_snapshotter import has_ended
from test_snapshotter_remote import allocated, directories, libraries

PROGRAM = os.path.join(os.path.dirname(support.BCOW), "bcow-layer-store")
LARGE = random.Random(14).randbytes(12 << 20)
APPLETS = ["sh", "cat", "echo", "sleep", "ls", "rm", "mkdir", "true", "stat"]


def archive(entries):
    """A layer as a tar archive, with the directories above its names."""
    made, out = set(), []
    for name, fields in entries:
        for directory in directories(name.rstrip("/")):
            if directory not in made:
                made.add(directory)
                out.append(ocilib.entry(directory.encode() + b"/", ocilib.DIR))
        made.add(name.rstrip("/"))
        out.append(ocilib.entry(name.encode(), **fields))
    return b"".join(out) + ocilib.END


def link(target, typeflag=ocilib.SYM):
    return {"typeflag": typeflag, "link": target.encode()}


def image_layers():
    program = os.path.realpath(shutil.which("busybox"))
    low = [("bin/busybox", {"data": read_bytes(program), "mode": 0o755})]
    low += [(name.lstrip("/"), {"data": read_bytes(name), "mode": 0o755})
            for name in libraries(program)]
    low += [(f"bin/{name}", link("busybox")) for name in APPLETS]
    low += [("large", {"data": LARGE}),
            ("gone/", {"typeflag": ocilib.DIR}), ("gone/file", {"data": b"1"}),
            ("back/", {"typeflag": ocilib.DIR}), ("back/old", {"data": b"1"}),
            ("dir/sub/file", {"data": b"linked", "uid": 5, "gid": 6, "mode": 0o640}),
            ("dir/sub/other", {"data": b"1"}),
            ("opaque/old", {"data": b"1"}), ("changes", {"data": b"a file"}),
            ("tmp/", {"typeflag": ocilib.DIR, "mode": 0o1777}),
            ("set", {"data": b"id", "mode": 0o4755, "xattrs": [
                ("user.x", b"y"), ("security.capability", ocilib.capability(1 << 10))]}),
            ("deep/er", {"data": b"1"})]
    middle = [(".wh.gone", {}), (".wh.back", {}), ("dir/sub/.wh.other", {}),
              ("dir/hard", link("dir/sub/file", ocilib.LINK)),
              ("opaque/.wh..wh..opq", {}), ("opaque/new", {"data": b"2"}),
              ("changes/inside", {"data": b"2"}), ("only/middle", {"data": b"2"})]
    high = [("back/new", {"data": b"3"}), (".wh.only", {}), ("top", {"data": b"3"}),
            ("deep/", {"typeflag": ocilib.DIR, "mode": 0o700})]
    return [archive(layer) for layer in (low, middle, high)]


class Store(support.Daemon):
    """A running bcow-layer-store."""

    def __init__(self, place, *options):
        self.root, self.at = os.path.join(place, "store"), os.path.join(place, "layers")
        self.options, self.log = options, os.path.join(place, "store.log")
        os.makedirs(self.at, exist_ok=True)
        self.start()

    def start(self):
        self.launch(PROGRAM, "--root", self.root, *self.options, self.at)

    def path(self, reference, *names):
        name = base64.b64encode(reference.encode()).decode()
        return os.path.join(self.at, name, *names)

    def mounts(self):
        return sorted(os.listdir(os.path.join(self.root, "mounts")))

    def records(self):
        directory = os.path.join(self.root, "layers")
        return [read_json(os.path.join(directory, name)) for name in os.listdir(directory)]

    def remove(self):
        self.end(signal.SIGKILL)
        run("umount", "-l", self.at, check=False)
        for name in self.mounts():
            run("umount", "-l", os.path.join(self.root, "mounts", name), check=False)


class Podman:
    """podman with a storage of its own."""

    def __init__(self, place, auth, *storage):
        self.home = os.path.join(place, "podman")
        # podman refuses a path of more than 50 characters.
        self.run_root = tempfile.mkdtemp(prefix="bcow-", dir="/run")
        self.auth = auth
        self.command = ["podman", f"--root={self.home}/root", f"--runroot={self.run_root}",
                        f"--tmpdir={self.home}/tmp", "--storage-driver=overlay", *storage,
                        "--runtime=runc", "--cgroup-manager=cgroupfs", "--events-backend=none"]

    def __call__(self, *arguments, check=True):
        return run(*self.command, *arguments, check=check, timeout=120)

    def pull(self, name, check=True):
        return self("pull", "-q", f"--authfile={self.auth}", name, check=check)

    def start(self, name, *command, options=("--rm",)):
        made = self("run", *options, "--log-driver=none", "--network=none",
                    "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024", "--pull=never", name,
                    *command)
        return made.out.decode()

    @contextlib.contextmanager
    def root_of(self, name):
        """The root file system of a new container, which does not run."""
        container = self("create", "--pull=never", name, "/bin/true").out.decode().strip()
        try:
            yield self("mount", container).out.decode().strip()
        finally:
            self("umount", container)
            self("rm", container)

    def remove(self):
        self("rm", "-f", "-t", "0", "-a", check=False)
        for path in (f"{self.home}/root/overlay", self.run_root):
            run("umount", "-l", path, check=False)
        shutil.rmtree(self.run_root, ignore_errors=True)


class LayerStore(support.Scratch):
    """podman with the store."""

    @classmethod
    def setUpClass(cls):
        need("podman", "runc", "conmon", "busybox", "ldd", "docker-registry", "openssl", "skopeo",
             "umoci", root=True, fuse=True)
        super().setUpClass()
        make_certificates(cls.directory)
        cls.layout = ocilib.Layout(cls.path("image"))
        cls.tars = image_layers()
        cls.bytes = sum(len(data) for data in cls.tars)
        images = {"app": cls.tars, "other": [cls.tars[0], archive([("other", {"data": b"4"})])],
                  # The uppermost layer of "app" over other layers.
                  "moved": [cls.tars[0], cls.tars[2]]}
        cls.blobs = {}
        described = []
        for name, tars in images.items():
            blobs = [cls.layout.blob(ocilib.gz(data), ocilib.MEDIA_TAR_GZIP) for data in tars]
            cls.blobs[name] = [blob["digest"] for blob in blobs]
            manifest = cls.layout.manifest(blobs, [ocilib.digest_of(data) for data in tars],
                                           {"Cmd": ["sleep", "1000000"], "Env": ["PATH=/bin"]})
            described.append((manifest, name, None))
        cls.layout.index(described)
        cls.servers = contextlib.ExitStack()
        cls.addClassCleanup(cls.servers.close)
        cls.address = cls.servers.enter_context(registry(cls.directory))
        cls.auth = cls.path("auth.json")
        support.set_environment(cls, SSL_CERT_FILE=cls.path("ca.pem"))
        for name in "app", "other":
            cls.push(name, name)
        cls.attach("app", "app")
        run("umoci", "unpack", "--image", f"{cls.layout.path}:app", cls.path("bundle"))
        run("umoci", "unpack", "--image", f"{cls.layout.path}:moved", cls.path("bundle2"))

    @classmethod
    def name(cls, name):
        return f"{cls.address}/team/{name}:1"

    @classmethod
    def push(cls, image, name):
        skopeo_copy(f"oci:{cls.layout.path}:{image}", f"docker://{cls.name(name)}", cls.auth)

    @classmethod
    def attach(cls, image, name):
        bcow("convert", "--referrer", "--auth-file", cls.auth, f"oci:{cls.layout.path}:{image}",
             f"docker://{cls.name(name)}", env={"BCOW_CACHE": cls.path("unused")})

    def setUp(self):
        self.place = tempfile.mkdtemp(prefix="place-", dir=self.directory)
        self.store = Store(self.place, "--auth-file", self.auth)
        self.addCleanup(self.store.remove)
        self.podman = Podman(self.place, self.auth,
                             f"--storage-opt=additionallayerstore={self.store.at}:ref")
        self.addCleanup(self.podman.remove)

    def cached(self):
        return allocated(os.path.join(self.store.root, "cache"))

    def assert_unpacked(self, bundle, root):
        # The root directory is one of podman.
        support.assert_same_tree(self, self.path(f"{bundle}/rootfs"), root, ignore=["mtime:."])

    def ended(self):
        return not self.store.mounts() and not self.store.records()

    def test_containers_start_on_the_attached_image(self):
        app, podman, store = self.name("app"), self.podman, self.store
        podman.pull(app)
        self.assertEqual(len(store.mounts()), 3)
        self.assertEqual([record["uses"] for record in store.records()], [1, 1, 1])
        self.assertLess(self.cached(), self.bytes // 8)
        self.assertEqual(podman.start(app, "cat", "/dir/hard", "/top", "/back/new"), "linked33")
        with podman.root_of(app) as root:
            self.assertLess(self.cached(), self.bytes // 4)
            self.assert_unpacked("bundle", root)
            self.assertEqual(os.lstat(os.path.join(root, "dir/hard")).st_nlink, 2)
        # Changes, as an ordinary layer on top.
        podman.start(app, "sh", "-c", "echo more >> /large; rm -r /back /opaque; mkdir /opaque",
                     options=("--name=changed",))
        podman("commit", "-q", "changed", "changed")
        script = "stat -c %s /large; ls / /opaque; cat /dir/hard"
        shown = podman.start("changed", "sh", "-c", script).split()
        self.assertEqual(shown[0], str(len(LARGE) + 5))
        self.assertEqual(shown[-1], "linked")
        self.assertNotIn("back", shown)
        self.assertNotIn("new", shown)
        # The layers are those of the registry, byte for byte.
        saved = self.path("saved")
        podman("push", "-q", "--format=oci", app, f"oci:{saved}:app")
        layers = manifest_in(saved, "app")["layers"]
        for layer, tar in zip(layers, self.tars, strict=True):
            data = read_bytes(blob_path(saved, layer["digest"]))
            self.assertEqual(subprocess.run(["gzip", "-dc"], input=data, check=True,
                                            stdout=subprocess.PIPE).stdout, tar)
        # The store is killed while a container runs.
        podman.start(app, options=("-d", "--name=long"))
        self.assertEqual(store.end(signal.SIGKILL), -9)
        self.assertEqual(podman("exec", "long", "cat", "/opaque/new").out, b"2")
        store.start()
        self.assertEqual(podman.start(app, "cat", "/top"), "3")
        # The next container makes the mount again, also without the registry.
        for name in store.mounts():
            run("umount", "-l", os.path.join(store.root, "mounts", name))
        self.assertEqual(store.end(), 0)
        self.assertFalse(is_mounted(store.at))
        store.start()
        self.assertEqual(podman("exec", "long", "cat", "/opaque/new").out, b"2")
        self.assertEqual(podman.start(app, "cat", "/top"), "3")
        podman("rm", "-f", "-t", "0", "long", "changed")
        podman("rmi", "changed", app)
        support.until(self.ended, "all mounts end")

    def test_a_dead_mount_is_reported_and_made_again(self):
        app, podman, store = self.name("app"), self.podman, self.store
        self.assertEqual(store.end(), 0)
        # The path of a socket has at most 108 bytes.
        address = os.path.join(podman.run_root, "metrics")
        store.options += ("--metrics", f"unix:{address}")
        store.start()
        podman.pull(app)
        before = store.mounts()
        found = samples(address)
        self.assertEqual([found[f"bcow_layer_store_{name}"] for name in (
            "layers", "uses", "mounts", "mounts_made_again_total", "omitted_layers")],
            ["3", "3", "3", "0", "0"])

        def of_layers(name):
            begin = f'bcow_layer_{name}{{layer="docker://{self.address}/team/app@'
            return [value for key, value in sorted(samples(address).items())
                    if key.startswith(begin) and f'mountpoint="{store.root}/mounts/' in key]
        self.assertEqual(of_layers("up"), ["1", "1", "1"])
        for name in before:
            place = os.path.join(store.root, "mounts", name)
            [pid] = {served["pid"] for served in json.loads(bcow("ps", "--json").out)["services"]
                     if served["at"] == [place]}
            os.kill(pid, signal.SIGKILL)
            support.until(lambda pid=pid: has_ended(pid), "the process ends")
        self.assertEqual(of_layers("up"), ["0", "0", "0"])
        self.assertEqual(podman.start(app, "cat", "/top", "/dir/hard"), "3linked")
        self.assertEqual(of_layers("up"), ["1", "1", "1"])
        self.assertEqual(samples(address)["bcow_layer_store_mounts_made_again_total"], "3")
        # The container has read some files.
        self.assertTrue(any(int(value) for value in of_layers("fetched_bytes_total")))
        self.assertTrue(all(int(value) for value in of_layers("requests_total")))
        for name in before:
            place = os.path.join(store.root, "mounts", name)
            self.assertIn(f"at {place} has no process any more; it is made again", store.output())
            self.assertTrue(is_mounted(place))
        self.assertEqual(store.mounts(), before)
        podman("rmi", app)
        support.until(self.ended, "all mounts end")

    def test_image_without_an_attached_one_is_pulled(self):
        app, other, store = self.name("app"), self.name("other"), self.store
        # It shares the lowest layer with an image that starts on BCoW layers.
        self.podman.pull(app)
        self.podman.pull(other)
        self.assertIn(f"{other}: pulled whole:", store.output())
        self.assertEqual(self.podman.start(other, "cat", "/other", "/dir/sub/other"), "41")
        self.podman("rmi", app)
        self.assertEqual(self.podman.start(other, "cat", "/other", "/dir/sub/other"), "41")
        self.assertEqual(len(store.records()), 1, "the shared one")
        self.podman("rmi", other)
        self.assertEqual(store.records(), [])

    def test_registry_that_denies_access_is_an_error_in_the_log(self):
        app, store = self.name("app"), self.store
        self.assertEqual(store.end(), 0)
        changed = os.path.join(self.place, "auth.json")
        shutil.copy(self.auth, changed)
        store.options = ("--auth-file", changed)
        store.start()
        layer = store.path(app, self.blobs["app"][1])
        self.assertTrue(os.path.exists(os.path.join(layer, "info")))
        support.write_file(changed, credentials(self.address, f"{USER}:wrong"))
        denied = f"{self.address} denies access; the file with the credentials is {changed}"
        # The store knows the layer, and cannot read the image.
        cache = os.path.join(store.root, "cache")
        for name in os.listdir(cache):
            os.remove(os.path.join(cache, name))
        self.assertFalse(os.path.lexists(os.path.join(layer, "diff")))
        self.assertIn(f"ERROR {app}: ", store.output())
        self.assertIn(denied, store.output())
        # Later, it asks again.
        support.until(lambda: not os.path.exists(os.path.join(layer, "info")), "the question")
        self.assertIn(f"ERROR {app}: it is not known whether", store.output())
        self.assertIn(f"{denied}; it is pulled whole", store.output())
        shutil.copy(self.auth, changed)
        support.until(lambda: os.path.exists(os.path.join(layer, "diff")), "the next question")

    def test_layer_over_others_is_another_layer(self):
        tag, store = self.name("tag"), self.store
        self.push("app", "tag")
        self.attach("app", "tag")
        self.podman.pull(tag)
        before = self.podman.start(tag, "cat", "/dir/hard", "/top")
        # The tag moves to an image with the same uppermost layer.
        self.push("moved", "tag")
        self.attach("moved", "tag")
        self.podman("tag", tag, "before")
        support.until(lambda: self.looks_moved(tag), "the store asks the registry again")
        self.podman.pull(tag)
        with self.podman.root_of(tag) as root:
            self.assert_unpacked("bundle2", root)
        self.assertEqual(self.podman.start("before", "cat", "/dir/hard", "/top"), before)
        with self.podman.root_of("before") as root:
            self.assert_unpacked("bundle", root)
        self.podman("rmi", tag, "before")
        self.assertEqual(store.records(), [])

    def looks_moved(self, tag):
        """Whether the store does not serve the middle layer any more."""
        return not os.path.exists(self.store.path(tag, self.blobs["app"][1], "info"))

    def test_blob_is_verified_and_unknown_names_are_missing(self):
        app, store = self.name("app"), self.store
        digest = self.blobs["app"][1]
        layer = store.path(app, digest)
        info = json.loads(read_text(os.path.join(layer, "info")))
        data = read_bytes(self.layout.blob_path(digest))
        self.assertEqual(info, {
            "compressed-diff-digest": digest, "compressed-size": len(data), "compression": 2,
            "diff-digest": ocilib.digest_of(self.tars[1]), "diff-size": len(self.tars[1])})
        self.assertEqual(read_bytes(os.path.join(layer, "blob")), data)
        self.assertEqual(sorted(os.listdir(layer)), ["blob", "diff", "info"])
        self.assertTrue(stat.S_ISLNK(os.lstat(os.path.join(layer, "diff")).st_mode))
        # What overlayfs needs of a lower directory.
        diff = os.path.join(layer, "diff")
        self.assertEqual(os.getxattr(os.path.join(diff, "dir"), "trusted.overlay.opaque"), b"y")
        hidden = [name for name in os.listdir(diff)
                  if stat.S_ISCHR(os.lstat(os.path.join(diff, name)).st_mode)]
        self.assertEqual(sorted(hidden), ["back", "gone"])
        for path in (store.path("app"), store.path("localhost/../x"), store.path(app, "x"),
                     os.path.join(store.at, "x"), store.path(app, "sha256:" + "0" * 64),
                     store.path(self.name("missing"), digest), os.path.join(layer, "x")):
            self.assertFalse(os.path.exists(path), path)
        with self.assertRaises(OSError):
            open(os.path.join(layer, "blob"), "w")
        with self.assertRaises(OSError):
            os.mkdir(os.path.join(layer, "new"))
        for path in (os.path.join(layer, "use"),) * 2:
            with self.assertRaises(FileNotFoundError):
                open(path, "w")
        self.assertEqual([record["uses"] for record in store.records()], [2])
        for _ in range(3):
            with self.assertRaises(FileNotFoundError):
                os.rmdir(layer)
        self.assertEqual(store.records(), [])
        # Another blob under this digest in the registry.
        storage = self.path("storage/docker/registry/v2/blobs/sha256")
        digest = self.blobs["app"][2]
        hexadecimal = digest.split(":")[1]
        place = os.path.join(storage, hexadecimal[:2], hexadecimal, "data")
        good = read_bytes(place)
        support.write_file(place, good[:-1] + b"!")
        try:
            with self.assertRaises(OSError):
                read_bytes(store.path(app, digest, "blob"))
        finally:
            support.write_file(place, good)
        self.assertEqual(read_bytes(store.path(app, digest, "blob")), good)

    def test_start_and_end_of_a_use_need_no_space(self):
        self.assertEqual(self.store.end(), 0)
        root = self.store.root
        run("mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", root)
        try:
            self.store.start()
            layer = self.store.path(self.name("app"), self.blobs["app"][1])
            self.assertTrue(os.path.exists(os.path.join(layer, "diff")))
            for _ in range(2):
                with self.assertRaises(FileNotFoundError):
                    open(os.path.join(layer, "use"), "w")
            # Neither a damaged record nor one that cannot be removed prevents a start.
            support.write_file(os.path.join(root, "layers", "x.json"), "{")
            os.mkdir(os.path.join(root, "layers", "y.new"))
            with open(os.path.join(root, "ballast"), "ab", buffering=0) as ballast:
                with contextlib.suppress(OSError):
                    while ballast.write(b"x" * 4096):
                        pass
            self.assertEqual(self.store.end(), 0)
            self.store.start()
            self.assertIn("the file is ignored", self.store.output())
            for left in 3, 2:
                with self.assertRaises(FileNotFoundError):
                    os.rmdir(layer)
                self.assertEqual(len(os.listdir(os.path.join(root, "layers"))), left)
        finally:
            self.store.remove()
            run("umount", "-l", root)

    def test_second_process_and_wrong_options_are_refused(self):
        other = os.path.join(self.place, "other")
        os.mkdir(other)
        for arguments, expected in (
                (("--root", self.store.root, other), "another process uses"),
                (("--root", other, self.store.at), "another process serves a store"),
                (("--root", other, "--bcow", "/nonexistent", other), "/nonexistent version failed"),
                (("--root", other, "--mirror", "a,b", other), "cannot be an option of a mount")):
            refused = run(PROGRAM, *arguments, check=False)
            support.assert_refused(self, refused, expected)
        self.assertEqual(os.listdir(self.store.at), [])


if __name__ == "__main__":
    sys.exit(unittest.main())
