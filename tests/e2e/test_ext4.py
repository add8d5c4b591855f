"""Disks that show an image as ext4 (`bcow create --fs ext4`).

The judges are e2fsck, the kernel's ext4, and the tree that umoci unpacks. Their device is a loop
device on the file that nbdfuse shows of a served disk, or on a raw copy of the disk.
"""

import contextlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile

from support import (READER, TOP, WORK, Scratch, append_to, assert_refused, assert_same_tree, bcow,
                     converted, flip, need, overwrite, read_bytes, read_text, run, served,
                     set_environment, until, write_file)
import tree
import vm

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
GENERATOR = os.path.join(TOP, "fixtures", "oci", "generate.py")
# What a virtual machine does with the image as its root, as the first process.
GUEST = """
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
trap 'echo o > /proc/sysrq-trigger; sleep 60' EXIT
set -e
echo "@ $(. /etc/os-release && echo $ID $VERSION_ID)"
dpkg -i /run/greeting.deb > /dev/console 2>&1
echo "@ $(greeting)"
useradd --create-home --shell /bin/bash guest
mv /etc/apt /etc/apt.old
rm -r /usr/share/doc
mkdir /usr/share/doc
chmod 4711 /usr/bin/env
ln /usr/bin/env /usr/bin/env.too
printf guest | dd of=/usr/bin/perl bs=1 seek=1000000 conv=notrunc status=none
mount -o remount,ro /
echo "@ done"
"""
# All tiny layouts, or a few of them.
ALL_LAYOUTS = bool(os.environ.get("BCOW_EXT4_LAYOUTS"))
FEW_LAYOUTS = 6


@contextlib.contextmanager
def loop(file):
    device = run("losetup", "--find", "--show", "--direct-io=on", file).out.decode().strip()
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", device], timeout=60)


@contextlib.contextmanager
def mounted(device, *options):
    where = tempfile.mkdtemp(prefix="mnt-", dir=WORK)
    try:
        run("mount", "-t", "ext4", "-o", ",".join(["noatime", *options]), device, where,
            timeout=60)
        try:
            yield where
        finally:
            run("umount", where, timeout=60)
    finally:
        os.rmdir(where)


class Ext4(Scratch):
    @classmethod
    def setUpClass(cls):
        need("umoci", "e2fsck", "losetup", "nbdfuse", root=True, fuse=True)
        super().setUpClass()
        cls.use_image("small")
        cls.views = cls.path("views")
        set_environment(cls, BCOW_VIEWS=cls.views)
        cls.image = cls.path("small.bcow")
        bcow("convert", cls.source, cls.image)

    def create(self, backing, *options):
        disk = tempfile.mktemp(prefix="disk-", suffix=".bcow", dir=self.directory)
        bcow("create", "-b", backing, "--fs", "ext4", *options, disk)
        return disk

    @contextlib.contextmanager
    def device(self, disk, *options):
        """A loop device on what nbdfuse shows of the served disk."""
        with contextlib.ExitStack() as stack:
            # The path of a Unix socket must be short.
            short = stack.enter_context(tempfile.TemporaryDirectory(prefix="nbd-"))
            socket = os.path.join(short, "s")
            stack.enter_context(served(disk, *options, "--socket", socket))
            at = stack.enter_context(tempfile.TemporaryDirectory(dir=self.directory))
            fuse = subprocess.Popen(["nbdfuse", f"{at}/disk", f"nbd+unix:///?socket={socket}"],
                                    stdin=subprocess.DEVNULL)
            stack.callback(fuse.wait, timeout=60)
            stack.callback(subprocess.run, ["umount", "-l", at], timeout=60)
            until(lambda: os.path.exists(f"{at}/disk") or fuse.poll() is not None, "nbdfuse")
            with loop(f"{at}/disk") as device:
                yield device
                run("blockdev", "--flushbufs", device, timeout=60)

    def assert_is_the_tree(self, disk, *options):
        with self.device(disk, *options) as device:
            run("e2fsck", "-fn", device)
            with mounted(device) as where:
                assert_same_tree(self, self.reference, where)
            run("e2fsck", "-fn", device)

    def test_the_kernel_shows_the_tree_and_writes_to_it(self):
        disk = self.create(self.image)
        self.assertLess(os.stat(disk).st_blocks * 512, 512 * KIB)
        before = os.listdir(self.views)
        [view] = [name for name in before if f"-{64 * GIB}-" in name]
        self.assertLess(os.path.getsize(os.path.join(self.views, view)), 4 * MIB)
        with self.device(disk) as device:
            run("e2fsck", "-fn", device)
            with mounted(device) as where:
                assert_same_tree(self, self.reference, where)
                append_to(f"{where}/etc/passwd", b"guest:x:77:77::/:/bin/sh\n")
                os.rename(f"{where}/bin", f"{where}/old")
                os.mkdir(f"{where}/bin")
                shutil.rmtree(f"{where}/usr/share/doc")
                write_file(f"{where}/bin/large", bytes(range(256)) * 20_000)
                written = tree.dump(where)
            run("e2fsck", "-fn", device)
        self.assertEqual(bcow("fsck", "--data", disk).code, 0)
        with self.device(disk) as device, mounted(device, "ro") as where:
            assert_same_tree(self, written, where)
        # The image did not change, and a second disk shows it.
        self.assertEqual(bcow("fsck", "--data", self.image).code, 0)
        self.assert_is_the_tree(self.create(self.image))
        self.assertEqual(os.listdir(self.views), before)

    def package(self):
        """A Debian package with a program and a script that runs after unpacking."""
        root = tempfile.mkdtemp(dir=self.directory)
        files = {
            "DEBIAN/control": "Package: greeting\nVersion: 1\nArchitecture: all\n"
                              "Maintainer: Tests <tests@localhost>\nDescription: greets\n",
            "DEBIAN/postinst": "#!/bin/sh\necho hello from $(cat /etc/debian_version) "
                               "> /var/lib/greeting\n",
            "usr/bin/greeting": "#!/bin/sh\ncat /var/lib/greeting\n",
        }
        for name, text in files.items():
            os.makedirs(os.path.dirname(f"{root}/{name}"), exist_ok=True)
            write_file(f"{root}/{name}", text)
            os.chmod(f"{root}/{name}", 0o644 if name.endswith("control") else 0o755)
        os.chmod(root, 0o755)
        file = self.path("greeting.deb")
        run("dpkg-deb", "--root-owner-group", "--build", root, file)
        return file

    def test_a_virtual_machine_has_a_fork_of_a_served_disk_as_its_root(self):
        vm.need()
        first, disk = self.create(self.image), self.path("fork.bcow")
        with tempfile.TemporaryDirectory(prefix="nbd-") as short:
            socket = os.path.join(short, "s")
            with served(first, "--socket", socket):
                bcow("fork", first, disk)
            with served(disk, "--socket", socket):
                said = vm.boot_root(f"nbd:unix:{socket}:exportname={os.path.basename(disk)}",
                                    GUEST, [self.package()])
        self.assertEqual(said[0], "debian 12")
        self.assertRegex(said[1], "^hello from 12")
        self.assertEqual(bcow("fsck", "--data", disk).code, 0)
        # Its changes are a layer of an ordinary image.
        layout, bundle = self.path("changed"), self.path("changed-bundle")
        bcow("commit", self.image, "--upper", disk, f"oci:{layout}:vm")
        run("umoci", "unpack", "--image", f"{layout}:vm", bundle)
        with self.device(disk) as device:
            run("e2fsck", "-fn", device)
            with mounted(device, "ro") as where:
                assert_same_tree(self, os.path.join(bundle, "rootfs"), where)
                self.assertIn("guest:x:", read_text(f"{where}/etc/passwd"))
                self.assertEqual(os.listdir(f"{where}/usr/share/doc"), [])

    def test_every_form_of_the_image_is_the_tree(self):
        plain = self.path("plain.bcow")
        bcow("convert", "--plain", self.source, plain)
        layout, _ = converted("small", "layout")
        for backing, options in ((plain, []), (f"oci:{layout}:tag", ["--store", layout])):
            with self.subTest(backing):
                disk = self.create(backing, "-s", "3G", *options)
                self.assert_is_the_tree(disk, *options)

    def test_the_disk_is_its_image_as_raw_bytes_and_sealed_and_compacted(self):
        disk = self.create(self.image, "-s", "1G")
        raw, sealed = self.path("disk.raw"), self.path("sealed.bcow")
        bcow("convert", disk, f"raw:{raw}")
        self.assertEqual(os.path.getsize(raw), GIB)
        with loop(raw) as device, mounted(device) as where:
            assert_same_tree(self, self.reference, where)
            os.unlink(f"{where}/etc/passwd")
        run("e2fsck", "-fn", raw)
        bcow("commit", disk, sealed)
        bcow("compact", disk)
        for one in (disk, sealed):
            again = self.path("again.raw")
            bcow("convert", one, f"raw:{again}")
            run("e2fsck", "-fn", again)
            with loop(again) as device, mounted(device, "ro") as where:
                assert_same_tree(self, self.reference, where)
            os.unlink(again)
        # A disk over the sealed one.
        upper = self.path("upper.bcow")
        bcow("create", "-b", sealed, upper)
        shown = json.loads(bcow("inspect", "--json", upper).out)["disk"]["chain"]
        self.assertEqual(len(shown), 4)
        self.assert_is_the_tree(upper)
        assert_refused(self, bcow("commit", disk, check=False), "view", "never changes")

    def test_map_names_the_places_of_content(self):
        disk = self.create(self.image, "-s", "2G")
        extents = json.loads(bcow("map", "--json", disk).out)["extents"]
        self.assertEqual(extents[0]["offset"], 0)
        for one, next_one in zip(extents, extents[1:]):
            self.assertEqual(one["offset"] + one["length"], next_one["offset"])
        self.assertEqual(extents[-1]["offset"] + extents[-1]["length"], 2 * GIB)
        kinds = {extent["kind"] for extent in extents}
        # The disk itself has the superblock.
        self.assertEqual(kinds, {"raw", "zstd", "hole", "window", "fragment"})
        [view] = [name for name in os.listdir(self.views) if f"-{2 * GIB}-" in name]
        run(sys.executable, READER, "check", os.path.join(self.views, view))

    def test_a_view_counts_only_if_no_other_user_can_have_written_it(self):
        views = tempfile.mkdtemp(dir=self.directory)
        env = {"BCOW_VIEWS": views}
        disk = self.path("trusted.bcow")
        create = ["create", "-b", self.image, "--fs", "ext4", "-s", "1G"]
        bcow(*create, disk, env=env)
        [name] = os.listdir(views)
        view = os.path.join(views, name)
        self.assertEqual(stat.S_IMODE(os.stat(view).st_mode), 0o600)
        good = read_bytes(view)

        def is_made_again():
            number = os.stat(view).st_ino
            bcow("map", disk, env=env)
            self.assertEqual(read_bytes(view), good)
            return os.stat(view).st_ino != number

        self.assertFalse(is_made_again())
        os.chmod(view, 0o622)
        self.assertTrue(is_made_again())
        os.chown(view, 65534, 65534)
        self.assertTrue(is_made_again())
        overwrite(view, 0, b"x" * 1024)
        self.assertTrue(is_made_again())
        os.rename(view, view + ".away")
        os.symlink(view + ".away", view)
        bcow("map", disk, env=env)
        os.unlink(view + ".away")
        os.unlink(view)
        bcow("map", disk, env=env)
        self.assertEqual(os.listdir(views), [name])
        os.chmod(views, 0o777)
        refused = bcow("seal", "--flatten", disk, env=env, check=False)
        assert_refused(self, refused, "another user can write")
        os.chmod(views, 0o700)
        # A file beside the image is never a view of it.
        shutil.copy(view, os.path.join(self.directory, name))
        os.truncate(view, 0)
        bcow("map", disk, env=env)
        self.assertEqual(os.path.getsize(view), len(good))

    def test_a_damaged_view_is_made_again(self):
        views = tempfile.mkdtemp(dir=self.directory)
        env = {"BCOW_VIEWS": views}
        disk = self.path("intact.bcow")
        bcow("create", "-b", self.image, "--fs", "ext4", "-s", "1G", disk, env=env)
        [name] = os.listdir(views)
        view = os.path.join(views, name)
        good = read_bytes(view)
        # The header, before the first of these places, has a copy.
        for at in range(len(good) // 16, len(good), len(good) // 16):
            flip(view, at)
            compared = bcow("diff", self.image, "--upper", disk, env=env)
            self.assertEqual((compared.code, compared.out), (0, b""), at)
            self.assertEqual(read_bytes(view), good, at)
            self.assertIn(f"{view} is damaged: bcow makes this view again", compared.err.decode())
        self.assertEqual(os.listdir(views), [name])

    def test_a_view_that_is_damaged_while_it_is_open_is_made_again(self):
        views = tempfile.mkdtemp(dir=self.directory)
        env = {**os.environ, "BCOW_VIEWS": views}
        disk, expected = self.path("open.bcow"), self.path("open-expected.raw")
        bcow("create", "-b", self.image, "--fs", "ext4", "-s", "1G", disk, env=env)
        bcow("convert", disk, f"raw:{expected}", env=env)
        [name] = os.listdir(views)
        view = os.path.join(views, name)
        good = read_bytes(view)
        with served(disk, "--socket", self.path("open.sock"), env=env) as server:
            flip(view, *range(len(good) // 16, len(good), len(good) // 16))
            copied = self.path("open-copied.raw")
            run("nbdcopy", server.uri, copied)
            self.assertIn(f"{view} was damaged, and was made again", server.output())
        run("cmp", expected, copied)
        self.assertEqual(read_bytes(view), good)

    def test_each_disk_has_a_uuid_of_its_own(self):
        """Which is no change of the image, and needs no view of its own."""
        uuids = set()
        views = tempfile.mkdtemp(dir=self.directory)
        env = {"BCOW_VIEWS": views}
        for number in range(3):
            disk, raw = self.path(f"own-{number}.bcow"), self.path(f"own-{number}.raw")
            bcow("create", "-b", self.image, "--fs", "ext4", "-s", "1G", disk, env=env)
            compared = bcow("diff", self.image, "--upper", disk, env=env)
            self.assertEqual((compared.code, compared.out), (0, b""))
            bcow("convert", disk, f"raw:{raw}", env=env)
            run("e2fsck", "-fn", raw)
            uuids.add(run("blkid", "-p", "-o", "value", "-s", "UUID", raw).out)
            with loop(raw) as device, mounted(device) as where:
                assert_same_tree(self, self.reference, where)
                write_file(f"{where}/new", "new")
            run("e2fsck", "-fn", raw)
            # The first backup of the superblock has another UUID; e2fsck ends that.
            backup = ["dumpe2fs", "-h", "-o", "superblock=32768", "-o", "blocksize=4096", raw]
            uuid = re.compile(rb"^Filesystem UUID: .*", re.MULTILINE)
            before = uuid.search(run(*backup).out)[0]
            corrected = 1
            self.assertEqual(run("e2fsck", "-fy", raw, check=False).code, corrected)
            first = uuid.search(run("dumpe2fs", "-h", raw).out)[0]
            self.assertNotEqual(before, first)
            self.assertEqual(uuid.search(run(*backup).out)[0], first)
            run("e2fsck", "-fn", raw)
            os.unlink(raw)
        self.assertEqual(len(uuids), 3, uuids)
        [_] = os.listdir(views)

    def test_an_error_of_a_view_names_the_file(self):
        archive, image = self.path("large-attribute.tar"), self.path("large-attribute.bcow")
        with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
            entry = tarfile.TarInfo("directory/file with attributes")
            entry.pax_headers = {"SCHILY.xattr.user.large": "x" * 20_000}
            tar.addfile(entry)
        bcow("convert", f"tar:{archive}", image)
        refused = bcow("create", "-b", image, "--fs", "ext4", self.path("none.bcow"), check=False)
        assert_refused(self, refused, "ext4 cannot hold /directory/file with attributes: ")
        self.assertNotRegex(refused.err, rb"\bnid\b|inode \d")

    def test_an_image_that_moved_is_named_again_and_another_is_refused(self):
        there = tempfile.mkdtemp(dir=self.directory)
        image, disk = os.path.join(there, "image.bcow"), os.path.join(there, "disk.bcow")
        shutil.copy(self.image, image)
        bcow("create", "-b", image, "--fs", "ext4", "-s", "1G", disk)
        moved = os.path.join(there, "moved.bcow")
        os.rename(image, moved)
        refused = bcow("convert", disk, "raw:" + self.path("moved.raw"), check=False)
        assert_refused(self, refused, "image.bcow")
        bcow("rebase", "--unsafe", "-b", moved, disk)
        bcow("map", disk)
        other, tiny = os.path.join(there, "other.bcow"), os.path.join(there, "tiny")
        os.mkdir(tiny)
        bcow("convert", f"dir:{tiny}", other)
        for how in ([], ["--unsafe"]):
            result = bcow("rebase", *how, "-b", other, disk, check=False)
            assert_refused(self, result, "not the image that the disk was made over")
        shown = bcow("map", disk).out
        self.assertIn(b"fragment", shown)

    def test_what_is_no_image_and_what_does_not_fit_is_refused(self):
        create = ["create", "--fs", "ext4", self.path("none.bcow")]
        disk = self.path("plain-disk.bcow")
        bcow("create", "-s", "1G", disk)
        refused = bcow(*create, "-b", disk, check=False)
        assert_refused(self, refused, "this is a disk")
        refused = bcow(*create, "-b", self.image, "-s", "64M", check=False)
        assert_refused(self, refused, "too small", "-s")
        refused = bcow(*create, "-b", self.image, "-s", "4096", check=False)
        assert_refused(self, refused, "an ext4 of 4096 bytes is too small", "-s")
        refused = bcow(*create, "-b", self.image, "-s", "17T", check=False)
        assert_refused(self, refused, "larger than 16 TiB")
        self.assertFalse(os.path.exists(self.path("none.bcow")))

    def test_the_tiny_layouts_are_their_trees(self):
        """Layouts that are odd in one way each; all of them with BCOW_EXT4_LAYOUTS."""
        names = [line.split()[0] for line in
                 run(sys.executable, GENERATOR, "--list").out.decode().splitlines()]
        names = [name for name in names if not re.match("bad-|bomb-", name)]
        step = 1 if ALL_LAYOUTS else -(-len(names) // FEW_LAYOUTS)
        chosen = names[::step]
        made = run(sys.executable, GENERATOR, self.directory, *chosen)
        self.assertEqual(made.code, 0)
        for name in chosen:
            with self.subTest(name):
                case = self.path(name)
                with open(os.path.join(case, "source")) as source:
                    source = source.read().format(dir=case).split()
                image = self.path(name + ".bcow")
                bcow("convert", source[0], image, *source[1:])
                disk, raw = self.create(image, "-s", "1G"), self.path(name + ".raw")
                bcow("convert", disk, f"raw:{raw}")
                run("e2fsck", "-fn", raw)
                expected = tree.load(os.path.join(case, "expected.jsonl"))
                with loop(raw) as device, mounted(device) as where:
                    assert_same_tree(self, expected, where)
                run("e2fsck", "-fn", raw)
                os.unlink(raw)
