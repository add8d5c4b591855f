"""bcow-snapshotter with images in BCoW form in a registry: containers start before the image is
here.

The registry is Debian's docker-registry with TLS and a password. The image has busybox, and a large
file that no program reads.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import unittest

import schema
import support
from kills import Kills
from sequences import ocilib
from support import bcow, need, read_bytes, read_text, run, skopeo_copy, write_file
from test_remote import PASSWORD, USER, credentials, make_certificates, registry
from test_snapshotter import SOCKETS, WithContainerd, WithSnapshotter, has_containerd_2
from web import listening

# Without them, the base of the tests reports what is missing.
with contextlib.suppress(ImportError):
    import cri
    from snapshots import CODES, COMMITTED, RpcError

LABEL = "containerd.io/snapshot"
LARGE = random.Random(7).randbytes(16 << 20)
APPLETS = ["sh", "cat", "echo", "sleep", "wc", "ls", "rm", "true", "tr", "cut"]
CONFIG = """
root = "{place}/lib"
state = "{place}/run"
disabled_plugins = [
    "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.zfs", "io.containerd.internal.v1.tracing",
    "io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.opt"]
""" + SOCKETS + """\
capabilities = ["remap-ids"]
"""
# containerd 1.6 and 1.7.
CONFIG_2 = """
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause}"
stream_server_port = "0"
disable_apparmor = true
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "bcow"
disable_snapshot_annotations = false
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{place}/cni"
conf_dir = "{place}/cni"
[plugins."io.containerd.grpc.v1.cri".registry]
config_path = "{place}/certs.d"
"""
# containerd 2.x.
CONFIG_3 = """
[proxy_plugins.bcow.exports]
enable_remote_snapshot_annotations = "true"
[[plugins."io.containerd.transfer.v1.local".unpack_config]]
platform = "linux"
snapshotter = "bcow"
[plugins."io.containerd.grpc.v1.cri"]
stream_server_port = "0"
[plugins."io.containerd.cri.v1.images"]
snapshotter = "bcow"
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{pause}"
[plugins."io.containerd.cri.v1.images".registry]
config_path = "{place}/certs.d"
[plugins."io.containerd.cri.v1.runtime"]
disable_apparmor = true
restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["{place}/cni"]
conf_dir = "{place}/cni"
"""


def libraries(program):
    """The files that the loader maps for a program."""
    # ldd fails for a static program, which has none.
    listed = run("ldd", program, check=False).out.decode()
    return re.findall(r"(/\S+) \(0x", listed)


def directories(path):
    """The directories above a path, the highest first."""
    parts = path.split("/")[:-1]
    return ["/".join(parts[:n + 1]) for n in range(len(parts))]


def image_layers():
    """Three layers, as names with data; None is a whiteout, a tuple a symbolic link."""
    program = os.path.realpath(shutil.which("busybox"))
    low = {"bin/busybox": program, "gone": b"1", "both": b"low", "large": LARGE}
    low.update({name.lstrip("/"): name for name in libraries(program)})
    low.update({f"bin/{name}": ("busybox",) for name in APPLETS})
    return [low, {"gone": None, "both": b"middle", "etc/motd": b"hello"}, {"top": b"3"}]


def archive(files):
    """A layer as a tar archive."""
    made, out = set(), []
    for name, data in files.items():
        for directory in directories(name):
            if directory not in made:
                made.add(directory)
                out.append(ocilib.entry(directory.encode() + b"/", ocilib.DIR))
        if data is None:
            out.append(ocilib.entry(f".wh.{name}".encode()))
        elif isinstance(data, tuple):
            out.append(ocilib.entry(name.encode(), ocilib.SYM, link=data[0].encode()))
        elif isinstance(data, bytes):
            out.append(ocilib.entry(name.encode(), data=data))
        else:
            out.append(ocilib.entry(name.encode(), data=read_bytes(data), mode=0o755))
    return b"".join(out) + ocilib.END


def chain_ids(diff_ids):
    """As the OCI image specification defines them."""
    chain = diff_ids[:1]
    for diff_id in diff_ids[1:]:
        chain.append(ocilib.digest_of(f"{chain[-1]} {diff_id}".encode()))
    return chain


def allocated(directory):
    """Bytes that the files in a directory take up. A file may be removed meanwhile."""
    total = 0
    for where, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(where, name)).st_blocks * 512
    return total


class WithRegistry:
    """A registry with an ordinary image, the BCoW form attached to it, and another image over its
    lowest two layers without one."""

    @classmethod
    def setUpClass(cls):
        need("busybox", "ldd", "docker-registry", "openssl", "skopeo")
        super().setUpClass()
        make_certificates(cls.directory)
        layout = ocilib.Layout(cls.path("image"))
        tars = [archive(files) for files in image_layers()]
        other = archive({"other": b"4"})
        cls.diff_ids = [ocilib.digest_of(data) for data in tars]
        cls.chain = chain_ids(cls.diff_ids)
        blobs = [layout.blob(ocilib.gz(data), ocilib.MEDIA_TAR_GZIP) for data in [*tars, other]]
        config = {"Cmd": ["sleep", "1000000"], "Env": ["PATH=/bin"]}
        first = layout.manifest(blobs[:3], cls.diff_ids, config)
        over = [*cls.diff_ids[:2], ocilib.digest_of(other)]
        second = layout.manifest([*blobs[:2], blobs[3]], over, config)
        layout.index([(first, "image", None), (second, "over", None)])
        cls.manifest = first["digest"]
        cls.bytes = sum(len(data) for data in tars)
        cls.registry = contextlib.ExitStack()
        cls.addClassCleanup(cls.registry.close)
        cls.address = cls.registry.enter_context(registry(cls.directory))
        cls.auth = cls.path("auth.json")
        # For the mounts, too: they are processes of the snapshotter.
        support.set_environment(cls, SSL_CERT_FILE=cls.path("ca.pem"))
        for name in "image", "over":
            skopeo_copy(f"oci:{layout.path}:{name}", f"docker://{cls.address}/team/{name}:1",
                        cls.auth)
        cls.name = f"{cls.address}/team/image:1"
        bcow("convert", "--referrer", "--auth-file", cls.auth, f"oci:{layout.path}:image",
             f"docker://{cls.name}", env={"BCOW_CACHE": cls.path("unused")})
        resolved = bcow("inspect", "--resolve", "--json", "--auth-file", cls.auth, "--no-cache",
                        f"docker://{cls.name}")
        cls.resolved = schema.checked(resolved.out)["name"]

    def start(self, *options):
        return super().start("--auth-file", self.auth, *options)

    def cached(self):
        return allocated(os.path.join(self.root, "cache"))

    def assert_nothing_is_left(self):
        support.until(lambda: not (self.cached() or self.names("trash") or self.names("auth")),
                      "all is removed")
        self.assertEqual(self.names("layers"), [])
        self.assertEqual(self.names("snapshots"), [])


class Registered(WithRegistry, WithSnapshotter):
    """Layers in a registry, by the socket of the snapshotter."""

    def labels(self, number, **changes):
        labels = {f"{LABEL}.ref": self.chain[number],
                  f"{LABEL}/cri.image-ref": self.name,
                  f"{LABEL}/cri.manifest-digest": self.manifest, f"{LABEL}/x": "kept"}
        return {**labels, **{f"{LABEL}/{name}": value for name, value in changes.items()}}

    def find(self, client, number, parent):
        """The snapshot of a layer, as containerd finds it."""
        found = client.List(filters=[f'labels."{LABEL}.ref"=={self.chain[number]},'
                                     f'parent=="{parent}"'])
        [one] = found
        self.assertEqual(one.kind, COMMITTED)
        return one.name

    def register(self, client, key="k", count=3):
        """The names of the snapshots of the lowest layers, which the snapshotter does not let
        containerd fetch."""
        names = []
        for number in range(count):
            parent = names[-1] if names else ""
            self.refused(CODES.ALREADY_EXISTS, client.Prepare, key=f"{key}{number}", parent=parent,
                         labels=self.labels(number))
            names.append(self.find(client, number, parent))
        return names

    def shown(self, root):
        """The small files in the root directory."""
        shown = {}
        for name in sorted(os.listdir(root)):
            path = os.path.join(root, name)
            if name != "large" and os.path.isfile(path):
                shown[name] = read_bytes(path)
        return shown

    def test_layers_are_registered_and_read_when_they_are_used(self):
        one = self.start()
        names = self.register(one.client)
        self.assertEqual(self.names("layers"), [])
        self.assertEqual(one.client.Stat(key=names[1]).info.labels[f"{LABEL}/x"], "kept")
        for key, parent, expected in (
                ("v0", names[0], {"both": b"low", "gone": b"1"}),
                ("v1", names[1], {"both": b"middle"}),
                ("v2", names[2], {"both": b"middle", "top": b"3"})):
            with self.mounted(one.client.View(key=key, parent=parent)) as root:
                self.assertEqual(self.shown(root), expected)
            one.client.Remove(key=key)
        mounts = one.client.Prepare(key="c", parent=names[2])
        [place] = [mount.source for mount in mounts.mounts]
        self.assertIn(f"{self.resolved} {place} fuse.bcow", read_text("/proc/self/mounts"))
        self.assertEqual(one.end(signal.SIGKILL), -9)
        with self.mounted(mounts) as root:
            with open(os.path.join(root, "both"), "a") as file:
                file.write(" and more")
            os.remove(os.path.join(root, "top"))
        one.start()
        self.assertEqual({info.name for info in one.client.List()}, {*names, "c"})
        with self.mounted(one.client.Mounts(key="c")) as root:
            self.assertEqual(self.shown(root), {"both": b"middle and more"})
        usage = sum(one.client.Usage(key=name).size for name in names)
        self.assertLess(0, usage)
        self.assertLessEqual(usage, self.cached())
        self.assertLess(self.cached(), self.bytes // 8)
        # What was registered for another namespace of containerd is the same snapshot.
        self.assertEqual(self.register(one.client, "again"), names)
        for name in ["c", *reversed(names)]:
            one.client.Remove(key=name)
        self.assert_nothing_is_left()

    def test_changes_of_remote_layers_are_committed(self):
        client = self.start().client
        names = self.register(client)
        for name, parent in (("whole", names[2]), ("part", names[1]), ("lowest", names[0])):
            with self.subTest(name):
                with self.mounted(client.Prepare(key="a", parent=parent)) as root:
                    before = self.shown(root)
                    with open(os.path.join(root, "both"), "a") as file:
                        file.write("+")
                    with open(os.path.join(root, "large"), "r+b") as file:
                        file.seek(1 << 20)
                        file.write(b"changed")
                client.Commit(name=name, key="a")
                expected = {**before, "both": before["both"] + b"+"}
                # A further layer over both.
                with self.mounted(client.Prepare(key="b", parent=name)) as root:
                    self.assertEqual(self.shown(root), expected)
                    with open(os.path.join(root, "large"), "rb") as file:
                        file.seek((1 << 20) - 10)
                        self.assertEqual(file.read(27),
                                         LARGE[(1 << 20) - 10:1 << 20] + b"changed"
                                         + LARGE[(1 << 20) + 7:(1 << 20) + 17])
                    os.remove(os.path.join(root, "both"))
                client.Commit(name=f"{name}2", key="b")
                with self.mounted(client.View(key="v", parent=f"{name}2")) as root:
                    self.assertNotIn("both", self.shown(root))
                for key in "v", f"{name}2", name:
                    client.Remove(key=key)
        for name in reversed(names):
            client.Remove(key=name)
        self.assert_nothing_is_left()

    def test_without_a_bcow_image_containerd_fetches_the_layer(self):
        key = self.path("key.pem")
        run("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", key)
        run("openssl", "ec", "-in", key, "-pubout", "-out", key + ".pub")
        other = "sha256:" + "0" * 64
        for number, (options, changes) in enumerate([
                ((), {"cri.manifest-digest": other}),
                ((), {"cri.image-ref": f"{self.address}/team/over:1"}),
                ((), {"cri.image-ref": f"{self.address}/team/none:1"}),
                # The digest of the ordinary image does not cover what is attached to it.
                ((), {"cri.image-ref": f"{self.name}@{self.manifest}"}),
                (("--no-remote",), {}),
                (("--verify-key", key + ".pub"), {})]):
            with self.subTest(options=options, changes=changes):
                self.root = os.path.join(self.place, f"root{number}")
                one = self.start(*options)
                [mount] = one.client.Prepare(key="a", labels=self.labels(0, **changes)).mounts
                self.assertEqual(mount.type, "bind")
                one.client.Remove(key="a")
                self.assertEqual(one.end(), 0)
        one.start()
        wrong = {**self.labels(0), f"{LABEL}.ref": other}
        self.assertEqual(one.client.Prepare(key="a", labels=wrong).mounts[0].type, "bind")

    def test_a_registry_that_does_not_answer_is_not_one_without_a_bcow_image(self):
        one = self.start()
        self.registry.close()
        try:
            text = self.refused(CODES.UNAVAILABLE, one.client.Prepare, key="a",
                                labels=self.labels(0))
            self.assertIn("it is not known whether a BCoW image is attached", text)
            self.assertIn(self.address, text)
            self.assertIn(f"ERROR /containerd.services.snapshots.v1.Snapshots/Prepare: "
                          f"{self.name}: ", one.output())
            self.assert_only(one.client)
            # The operator can ask for the whole image instead.
            self.assertEqual(one.end(), 0)
            one.options += ("--if-unanswered", "pull")
            one.start()
            mounts = one.client.Prepare(key="a", labels=self.labels(0)).mounts
            self.assertEqual([mount.type for mount in mounts], ["bind"])
            self.assertIn("it is pulled whole", one.output())
            one.client.Remove(key="a")
            self.assertEqual(one.end(), 0)
            one.options = ("--auth-file", self.auth)
            one.start()
            self.refused(CODES.UNAVAILABLE, one.client.Prepare, key="a", labels=self.labels(0))
        finally:
            self.restart_registry()
        # No failure is remembered.
        self.register(one.client, count=1)

    def test_a_registry_that_denies_access_is_an_error_in_the_log(self):
        good = self.auth
        one = self.start()
        self.assertEqual(one.end(), 0)
        one.options = ("--auth-file", self.path("later"))
        one.start()
        mounts = one.client.Prepare(key="a", labels=self.labels(0)).mounts
        self.assertEqual([mount.type for mount in mounts], ["bind"])
        errors = [line for line in one.output().splitlines() if "ERROR" in line]
        denied = f"{self.address} denies access; the file for credentials, {self.path('later')}, " \
                 "does not exist; it is pulled whole"
        self.assertTrue(any(f"{self.name}: " in line and denied in line for line in errors), errors)
        one.client.Remove(key="a")
        # No failure is remembered.
        shutil.copy(good, self.path("later"))
        names = self.register(one.client)
        # The password changes. A mount that asks the registry fails.
        cache = os.path.join(self.root, "cache")
        for name in os.listdir(cache):
            os.remove(os.path.join(cache, name))
        write_file(self.path("later"), credentials(self.address, f"{USER}:wrong"))
        details = self.refused(CODES.FAILED_PRECONDITION, one.client.Prepare, key="c",
                               parent=names[2])
        for expected in ('snapshot "c": cannot mount ', self.resolved,
                         f"{self.address} denies access; the file with the credentials is "
                         f"{self.path('later')}"):
            self.assertIn(expected, details)
        self.assertIn(f"ERROR /containerd.services.snapshots.v1.Snapshots/Prepare: {details}",
                      one.output())
        shutil.copy(good, self.path("later"))
        with self.mounted(one.client.Prepare(key="c", parent=names[2])) as root:
            self.assertIn("top", os.listdir(root))

    def test_the_lowest_layers_have_a_name(self):
        options = ["--auth-file", self.auth, "--cache-dir", os.path.join(self.place, "cache")]

        def small(name):
            listed = bcow("ls", name, *options).out.decode().split()
            return {path.strip("/") for path in listed} & {"both", "gone", "top", "etc"}
        for count, expected in ((1, {"both", "gone"}), (2, {"both", "etc"}),
                                (3, {"both", "etc", "top"})):
            self.assertEqual(small(f"docker://{self.name}#layers={count}"), expected)
        for end, code, mention in (("#layers=4", 1, "the image has 3 layers"),
                                   ("#layers=0", 2, "#layers=0"), ("#x", 2, "#x")):
            failed = bcow("ls", self.resolved + end, *options, check=False)
            support.assert_refused(self, failed, mention, code=code)
        failed = bcow("inspect", "--resolve", self.directory, check=False)
        support.assert_refused(self, failed, "is not in a registry", code=2)

    def test_killed_before_and_after_the_image_is_found(self):
        for moment, script in (
                ("before", 'case "$*" in *resolve*) kill -9 $PPID; exit ;; esac'),
                ("after", f'case "$*" in *resolve*) "{support.BCOW}" "$@"; kill -9 $PPID; '
                          'exit ;; esac')):
            with self.subTest(moment):
                self.root = os.path.join(self.place, moment)
                one = self.start("--bcow", self.wrapper(script))
                self.refused(CODES.UNAVAILABLE, one.client.Prepare, key="a",
                             labels=self.labels(0))
                self.assertEqual(one.process.wait(timeout=60), -9)
                one.client.close()
                one.options = ("--auth-file", self.auth)
                one.start()
                self.assertEqual(one.client.List(), [])
                # The part of the image that was read is removed: no snapshot needs it.
                support.until(lambda: not self.cached(), "the cache is empty")
                [name] = self.register(one.client, count=1)
                one.client.Remove(key=name)
                self.assert_nothing_is_left()
                self.assertEqual(one.end(), 0)

    def test_a_complete_image_starts_without_the_registry(self):
        one = self.start("--complete", "always")
        names = self.register(one.client)
        with self.mounted(one.client.Prepare(key="a", parent=names[2])):
            support.until(lambda: self.cached() > len(LARGE), "the image is complete")
            # The last bytes may still be on their way.
            bcow("cache", "warm", self.resolved, "--cache-dir", os.path.join(self.root, "cache"),
                 "--auth-file", self.auth)
        self.registry.close()
        try:
            self.assertEqual(one.end(), 0)
            one.options += ("--mount-option", "server_timeout=1")
            one.start()
            answer = one.client.Prepare(key="b", parent=names[2])
            with self.mounted(answer) as root:
                self.assertEqual(read_bytes(os.path.join(root, "large")), LARGE)
            # Without the cache, the mount fails, and names the image.
            run("umount", answer.mounts[0].source)
            shutil.rmtree(os.path.join(self.root, "cache"))
            self.assertIn(self.resolved, self.refused(CODES.FAILED_PRECONDITION,
                                                      one.client.Mounts, key="b"))
        finally:
            self.restart_registry()

    def restart_registry(self):
        """The same registry at the same address, for the other tests."""
        port = int(self.address.split(":")[1])
        self.registry.enter_context(
            listening(port, "docker-registry", "serve", self.path("registry.yml")))


class Pods(Kills, WithRegistry, WithContainerd):
    """containerd starts containers from the image, as Kubernetes asks it to: the credentials come
    with the pull, through the snapshotter. A pool serves the mounts."""

    namespace = "k8s.io"

    @classmethod
    def setUpClass(cls):
        need("containerd", "ctr", "containerd-shim-runc-v2", "runc")
        super().setUpClass()

    def setUp(self):
        super().setUp()
        self.start_pool()
        self.auth = self.path("none")
        self.snapshotter = self.start("--pool", "p", "--image-service",
                                      os.path.join(self.place, "c"))
        is_new = has_containerd_2()
        config = f"version = {3 if is_new else 2}" + CONFIG + (CONFIG_3 if is_new else CONFIG_2)
        with open(os.path.join(self.place, "config.toml"), "w") as file:
            file.write(config.format(place=self.place, pause=self.name))
        hosts = os.path.join(self.place, "certs.d", self.address)
        os.makedirs(hosts)
        with open(os.path.join(hosts, "hosts.toml"), "w") as file:
            file.write(f'[host."https://{self.address}"]\nca = "{self.path("ca.pem")}"\n')
        self.addCleanup(self.stop_all)
        self.start_containerd()
        self.cri = cri.Client(os.path.join(self.place, "c"))
        self.addCleanup(self.cri.close)

    def pull(self, name, password=PASSWORD):
        with contextlib.closing(cri.Client(self.snapshotter.socket)) as client:
            client.PullImage(image={"image": name}, auth={"username": USER, "password": password})

    def content(self):
        """Bytes that containerd has fetched."""
        return allocated(os.path.join(self.place, "lib", "io.containerd.content.v1.content"))

    def run_in(self, name, script, *options):
        done = self.ctr("run", "--snapshotter", "bcow", *options, self.name, name, "/bin/sh", "-ec",
                        script)
        return done.out.decode()

    def test_containers_start_before_the_image_is_here(self):
        self.pull(self.name)
        self.assertLess(self.content(), 100_000)
        self.assertEqual(self.names("layers"), [])
        # runc and cgroups know containers by name, also those of another containerd.
        one, two = (f"{os.getpid()}-{n}" for n in "12")
        self.assertEqual(self.run_in(one, "cat both; echo", "--rm"), "middle\n")
        self.assertLess(self.cached(), self.bytes // 8)
        # An ordinary image over the same layers.
        self.pull(f"{self.address}/team/over:1")
        self.assertEqual(len(self.names("layers")), 1)
        script = "echo begun >/state; until [ -e /go ]; do sleep 0.1; done; cat /state /go"
        self.ctr("run", "--detach", "--snapshotter", "bcow", self.name, two, "/bin/sh", "-ec",
                 script)
        self.assertEqual(self.snapshotter.end(signal.SIGKILL), -9)
        self.stop_containerd(signal.SIGKILL)
        self.snapshotter.start()
        self.start_containerd()
        self.ctr("tasks", "exec", "--exec-id", "e", two, "/bin/sh", "-c",
                 "rm /both; echo went on >/go")
        support.until(lambda: b"STOPPED" in self.ctr("tasks", "ls").out, "the container ends")
        self.ctr("tasks", "rm", two)
        client = self.snapshotter.client
        [active] = [info.name for info in client.List() if info.name.endswith(f"/{two}")]
        with self.mounted(client.Mounts(key=active)) as root:
            self.assertNotIn("both", os.listdir(root))
            self.assertEqual(read_text(os.path.join(root, "go")), "went on\n")
        self.ctr("containers", "rm", two)
        for name in self.listed("images"):
            self.ctr("images", "rm", "--sync", name)
        support.until(lambda: not client.List(), "containerd removes all snapshots")
        self.assert_nothing_is_left()
        self.stop_containerd()
        self.assertEqual(self.snapshotter.end(), 0)

    def test_containers_outlive_kills(self):
        images = [self.name, f"{self.address}/team/over:1"]
        for name in images:
            self.pull(name)
        self.assert_containers_outlive_kills(images)

    def test_a_pod(self):
        images = [self.name, f"{self.address}/team/over:1"]
        with self.assertRaisesRegex(RpcError, "(?i)unauthorized"):
            self.pull(images[0], "wrong")
        self.assertEqual(self.names("auth"), [])
        self.pull(images[0])
        self.assertLess(self.content(), 100_000)
        # An ordinary image needs no credentials once it is here.
        self.pull(images[1])
        self.assertEqual(self.names("auth"), [f"{self.address}+team+image.json"])
        kept = os.path.join(self.root, "auth", *self.names("auth"))
        self.assertEqual(os.stat(kept).st_mode & 0o7777, 0o600)
        # The namespace of the node, so that the pod needs no network of its own.
        node = {"network": 2, "pid": 1, "ipc": 2}
        script = "echo 1 >/written; cat /written both; cat top other 2>/dev/null; true"
        with self.pod(node) as run_in:
            for image, expected in ((images[0], b"3"), (images[1], b"4")):
                self.assertEqual(run_in(image, script), b"1\nmiddle" + expected)
        self.remove_images(images)

    @contextlib.contextmanager
    def pod(self, namespaces):
        """A pod, as a function that runs a script in a container of an image."""
        context = {"security_context": {"namespace_options": namespaces}}
        config = {"metadata": {"name": "p", "uid": "u", "namespace": "n"}, "log_directory": "",
                  "linux": context}
        pod = self.cri.RunPodSandbox(config=config).pod_sandbox_id

        def run_in(image, script):
            container = {"metadata": {"name": "c"}, "image": {"image": image},
                         "command": ["/bin/sleep", "1000000"], "linux": context}
            made = self.cri.CreateContainer(pod_sandbox_id=pod, config=container,
                                            sandbox_config=config).container_id
            self.cri.StartContainer(container_id=made)
            done = self.cri.ExecSync(container_id=made, cmd=["/bin/sh", "-c", script], timeout=60)
            self.assertEqual(done.exit_code, 0, done.stderr)
            support.until(lambda: len(self.pool_mounts()) == 2, "the pod and one container")
            self.cri.StopContainer(container_id=made, timeout=0)
            self.cri.RemoveContainer(container_id=made)
            return done.stdout
        try:
            yield run_in
        finally:
            self.cri.StopPodSandbox(pod_sandbox_id=pod)
            self.cri.RemovePodSandbox(pod_sandbox_id=pod)

    def remove_images(self, images):
        for name in images:
            self.cri.RemoveImage(image={"image": name})
        client = self.snapshotter.client
        support.until(lambda: not client.List(), "containerd removes all snapshots")
        self.assert_nothing_is_left()

    def test_a_pod_with_a_user_namespace(self):
        """As Kubernetes asks for one with `hostUsers: false`."""
        if not has_containerd_2() or b"idmap" not in run("runc", "features", check=False).out:
            # CI has Debian's.
            raise unittest.SkipTest("containerd 2.x and runc 1.2, for user namespaces of pods")
        self.network()
        os.chmod(self.place, 0o755)
        ids = [{"host_id": 100000, "container_id": 0, "length": 65536}]
        users = {"mode": 0, "uids": ids, "gids": ids}
        self.pull(self.name)
        script = ("cat /proc/self/uid_map; echo 1 >/written; "
                  "ls -ln /written /bin/busybox | tr -s ' ' | cut -d ' ' -f 3,4,9")
        with self.pod({"network": 0, "pid": 1, "ipc": 0, "userns_options": users}) as run_in:
            lines = run_in(self.name, script).decode().split("\n")
        self.assertEqual(lines[0].split(), ["0", "100000", "65536"])
        self.assertEqual(sorted(lines[1:3]), ["0 0 /bin/busybox", "0 0 /written"])
        self.assertLess(self.content(), 100_000)
        self.remove_images([self.name])

    def network(self):
        """A network plugin that connects a pod to nothing."""
        directory = os.path.join(self.place, "cni")
        os.makedirs(directory, exist_ok=True)
        answer = '{"cniVersion": "1.0.0", "ips": [{"address": "10.9.8.7/24"}]}'
        for name in "loopback", "none":
            path = os.path.join(directory, name)
            write_file(path, f"#!/bin/sh\n[ $CNI_COMMAND != ADD ] || echo '{answer}'\n")
            os.chmod(path, 0o755)
        write_file(os.path.join(directory, "net.conflist"),
                   '{"cniVersion": "1.0.0", "name": "n", "plugins": [{"type": "none"}]}')


if __name__ == "__main__":
    unittest.main()
