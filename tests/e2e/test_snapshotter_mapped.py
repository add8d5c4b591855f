"""bcow-snapshotter and containers in user namespaces: the IDs of their files are mapped.

containerd gives a container's snapshot the mapping in labels, and the mount maps the owners. To a
snapshotter without the capability `remap-ids`, containerd gives all files away one by one, in a
snapshot that it commits. The image has hard links.
"""

import contextlib
import os
import shutil
import stat
import struct
import unittest

import support
from sequences import ocilib
from support import need, read_bytes, run, skopeo_copy, write_file
from test_snapshotter import (
    CONFIG, ENGINE, WithContainerd, WithSnapshotter, has_containerd_2)
from test_snapshotter_remote import APPLETS, libraries

# Without them, the base of the tests reports what is missing.
with contextlib.suppress(ImportError):
    from snapshots import ACTIVE, CODES

FIRST = 100000
MAPPING = f"0:{FIRST}:65536"
LABELS = {f"containerd.io/snapshot/{kind}mapping": MAPPING for kind in ("uid", "gid")}
IMAGE = "bcow.test/links:1"
MORE_APPLETS = ["id", "stat", "chown", "ln"]
# cap_net_raw=ep, as in the images of distributions (linux/capability.h).
CAPABILITY = struct.pack("<IIIII", 0x02000001, 1 << 13, 0, 0, 0)


def acl(*ids):
    """An ACL for these users (linux/posix_acl_xattr.h)."""
    entries = [(1, 7, -1), *((2, 5, user) for user in ids), (4, 5, -1), (16, 5, -1), (32, 5, -1)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)


class Mounts(WithSnapshotter):
    """Snapshots with the labels of a container in a user namespace."""

    def layers(self, client):
        """Two layers with the IDs of an image."""
        with self.mounted(client.Prepare(key="a")) as root:
            for name in ("root", "other", "caps", "acl", "far"):
                write_file(os.path.join(root, name), name)
            os.link(os.path.join(root, "root"), os.path.join(root, "link"))
            os.chown(os.path.join(root, "other"), 5, 6)
            os.chown(os.path.join(root, "far"), 70000, 70000)
            os.chmod(os.path.join(root, "other"), 0o4755)
            os.setxattr(os.path.join(root, "caps"), "security.capability", CAPABILITY)
            os.setxattr(os.path.join(root, "acl"), "system.posix_acl_access", acl(5))
            os.chmod(root, 0o777)
        client.Commit(name="low", key="a")
        with self.mounted(client.Prepare(key="b", parent="low")) as root:
            write_file(os.path.join(root, "high"), "high")
        client.Commit(name="high", key="b")

    def owners(self, root):
        found = {name: os.lstat(os.path.join(root, name)) for name in os.listdir(root)}
        return {name: (one.st_uid, one.st_gid) for name, one in found.items()}

    def in_container(self, root, script):
        """As root of the user namespace."""
        done = run("setpriv", "--reuid", str(FIRST), "--regid", str(FIRST), "--clear-groups",
                   "--inh-caps=-all", "sh", "-ec", script, cwd=root)
        return done.out.decode()

    def test_owners_are_mapped_in_the_mount(self):
        client = self.start().client
        self.layers(client)
        mapped = {"root": (FIRST, FIRST), "link": (FIRST, FIRST), "high": (FIRST, FIRST),
                  "other": (FIRST + 5, FIRST + 6), "caps": (FIRST, FIRST), "acl": (FIRST, FIRST),
                  # These IDs have no counterpart.
                  "far": (65534, 65534)}
        with self.mounted(client.View(key="v", parent="high", labels=LABELS)) as root:
            self.assertEqual(self.owners(root), mapped)
            self.mapped_attributes(root)
        with self.mounted(client.Prepare(key="c", parent="high", labels=LABELS)) as root:
            self.assertEqual(self.owners(root), mapped)
            self.mapped_attributes(root)
            self.assertEqual(os.lstat(os.path.join(root, "link")).st_nlink, 2)
            # The container makes files, and gives them away.
            self.in_container(root, "echo 1 >new; mkdir made; ln -s x symbolic; echo 2 >>root")
            new = os.path.join(root, "new")
            os.chown(os.path.join(root, "link"), FIRST + 7, -1)
            self.assertEqual(self.owners(root),
                             {**mapped, **{name: (FIRST, FIRST) for name in
                                           ("new", "made", "symbolic")},
                              "root": (FIRST + 7, FIRST), "link": (FIRST + 7, FIRST)})
            os.setxattr(new, "system.posix_acl_access", acl(FIRST + 9))
            self.assertEqual(os.getxattr(new, "system.posix_acl_access"), acl(FIRST + 9))
            # A program of the owner loses no set-user-ID bit that it may keep, and others do.
            other = os.path.join(root, "other")
            run("setpriv", "--reuid", str(FIRST + 5), "--clear-groups", "sh", "-c",
                "echo more >>other", cwd=root)
            self.assertFalse(os.stat(other).st_mode & stat.S_ISUID)
            # IDs without a counterpart.
            for change in (lambda: os.chown(new, 5, -1),
                           lambda: write_file(os.path.join(root, "of-host"), "x")):
                with self.assertRaises(OSError) as refused:
                    change()
                self.assertEqual(os.strerror(refused.exception.errno),
                                 "Value too large for defined data type")
        # The upper, and a layer of it, have the IDs of the container.
        client.Commit(name="top", key="c")
        with self.mounted(client.View(key="w", parent="top")) as root:
            owners = self.owners(root)
            self.assertEqual({owners[name] for name in ("new", "made", "symbolic")}, {(0, 0)})
            self.assertEqual(owners["link"], (7, 0))
            self.assertEqual(owners["far"], (70000, 70000))
            self.assertEqual(os.getxattr(os.path.join(root, "new"), "system.posix_acl_access"),
                             acl(9))
            self.assertEqual(os.getxattr(os.path.join(root, "caps"), "security.capability"),
                             CAPABILITY)

    def mapped_attributes(self, root):
        self.assertEqual(os.getxattr(os.path.join(root, "acl"), "system.posix_acl_access"),
                         acl(FIRST + 5))
        value = os.getxattr(os.path.join(root, "caps"), "security.capability")
        self.assertEqual((value[3], value[4:20], value[20:]),
                         (3, CAPABILITY[4:], struct.pack("<I", FIRST)))

    def test_a_pool_keeps_the_mapping_when_its_process_is_replaced(self):
        self.start_pool()
        client = self.start("--pool", "p").client
        self.layers(client)
        with self.mounted(client.Prepare(key="c", parent="high", labels=LABELS)) as root:
            for step in ("before", "after"):
                self.in_container(root, f"echo 1 >{step}")
                self.assertEqual(self.owners(root)[step], (FIRST, FIRST))
                support.bcow("pool", "restart", "p")

    def test_a_mapping_that_cannot_be_mounted_is_refused(self):
        client = self.start().client
        self.layers(client)
        for value, expected in (("0:1", "uidmapping"), ("0:1:0", "range of IDs"),
                                ("0:1:2,1:9:1", "common ID")):
            labels = {"containerd.io/snapshot/uidmapping": value}
            with self.subTest(value):
                code = (CODES.INVALID_ARGUMENT if expected == "uidmapping"
                        else CODES.FAILED_PRECONDITION)
                self.assertIn(expected, self.refused(code, client.Prepare, key="c", parent="low",
                                                     labels=labels))
        self.assertIn("without a parent", self.refused(CODES.UNIMPLEMENTED, client.Prepare,
                                                       key="c", labels=LABELS))
        self.assert_only(client)


def image_tar():
    """A layer with busybox, and with other owners, hard links and a set-user-ID program."""
    program = os.path.realpath(shutil.which("busybox"))
    out, made = [], set()

    def directories(name):
        parts = name.split("/")[:-1]
        for path in ("/".join(parts[:n + 1]) for n in range(len(parts))):
            if path not in made:
                made.add(path)
                out.append(ocilib.entry(path.encode() + b"/", ocilib.DIR))
    for name, path in [("bin/busybox", program), *((lib.lstrip("/"), lib)
                                                   for lib in libraries(program))]:
        directories(name)
        out.append(ocilib.entry(name.encode(), data=read_bytes(path), mode=0o755))
    for name in APPLETS + MORE_APPLETS:
        out.append(ocilib.entry(f"bin/{name}".encode(), ocilib.LINK, link=b"bin/busybox",
                                mode=0o755))
    directories("srv/x")
    out.append(ocilib.entry(b"srv/of-5", data=b"5", uid=5, gid=6, mode=0o4755))
    out.append(ocilib.entry(b"srv/link", ocilib.LINK, link=b"srv/of-5", uid=5, gid=6, mode=0o4755))
    return b"".join(out) + ocilib.END


class Containers(WithContainerd):
    """ctr runs containers in user namespaces."""

    @classmethod
    def setUpClass(cls):
        need(*ENGINE, "busybox", "ldd")
        super().setUpClass()
        layout = ocilib.Layout(cls.path("image"))
        tars = [image_tar(), ocilib.entry(b"top", data=b"top", uid=7) + ocilib.END]
        manifest = layout.manifest([layout.blob(ocilib.gz(data), ocilib.MEDIA_TAR_GZIP)
                                    for data in tars],
                                   [ocilib.digest_of(data) for data in tars],
                                   {"Cmd": ["sh"], "Env": ["PATH=/bin"]})
        layout.index([(manifest, "image", None)])
        cls.archive = cls.path("links.tar")
        skopeo_copy(f"oci:{layout.path}:image", f"docker-archive:{cls.archive}:{IMAGE}")

    def setUp(self):
        super().setUp()
        # The IDs of the containers reach their root directories.
        os.chmod(self.place, 0o755)
        self.snapshotter = self.start()
        write_file(os.path.join(self.place, "config.toml"), CONFIG.format(place=self.place))
        self.addCleanup(self.stop_all)
        self.start_containerd()
        self.ctr("images", "import", "--snapshotter", "bcow", self.archive)

    SCRIPT = ("id -u; stat -c '%u %g %h %a' /bin/busybox /srv/link /top /; "
              "echo 1 >/new; ln /srv/of-5 /srv/more; chown 8:9 /new; "
              "stat -c '%u %g %h' /new /srv/more; cat /top; echo")

    def run_mapped(self, name, *options):
        return self.ctr("run", "--rm", "--snapshotter", "bcow", "--uidmap", MAPPING, "--gidmap",
                        MAPPING, *options, IMAGE, name, "sh", "-ec", self.SCRIPT).out.decode()

    def test_the_ids_of_all_files_are_those_of_the_container(self):
        is_new = has_containerd_2()
        client = self.snapshotter.client
        for has_capability in False, True:
            if has_capability:
                self.stop_containerd()
                proxy = "[proxy_plugins.bcow]\n"
                config = CONFIG.replace(proxy, proxy + 'capabilities = ["remap-ids"]\n')
                write_file(os.path.join(self.place, "config.toml"), config.format(place=self.place))
                self.start_containerd()
            for options in [], ["--remap-labels"]:
                # ctr sends labels if it is asked to. containerd 1.6 knows no capabilities.
                by_labels = bool(options) and (has_capability or not is_new)
                with self.subTest(capability=has_capability, options=options):
                    self.run_container(options, by_labels)
                    # Nothing that containerd does not know is left.
                    support.until(lambda: ACTIVE not in {info.kind for info in client.List()},
                                  "the container's snapshot is removed")
        self.ctr("images", "rm", "--sync", IMAGE)
        support.until(lambda: not client.List(), "containerd removes all snapshots")
        self.assert_only(client)

    def run_container(self, options, by_labels):
        out = self.run_mapped(f"{os.getpid()}-{len(options)}", *options)
        lines = out.splitlines()
        self.assertEqual(lines[0], "0")
        shown = [line.split() for line in lines[1:5]]
        links = 1 + len(APPLETS) + len(MORE_APPLETS)
        expected = [["0", "0", str(links), "755"], ["5", "6", "2", "4755"], ["7", "0", "1", "644"]]
        if by_labels:
            self.assertEqual(shown[:3], expected)
            self.assertEqual(lines[6], "5 6 3")
        # containerd's change of one name at a time takes hard links, and set-user-ID bits.
        self.assertEqual([line[:2] for line in shown],
                         [line[:2] for line in expected] + [["0", "0"]])
        self.assertEqual(lines[5][:4], "8 9 ")
        self.assertEqual(lines[7], "top")


if __name__ == "__main__":
    unittest.main()
