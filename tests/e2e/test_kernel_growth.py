"""Disks and uppers with the kernel driver that grow while they are mounted.

Linux lets only CAP_SYS_RESOURCE grow an ext4, which a container may lack: User-Mode Linux has it.
The judges are statfs, the checks of the file systems, and the content after another mount.
"""

import json
import os
import shutil
import tempfile
import unittest

import subjects
import support
import uml
from support import BCOW, assert_refused, bcow, need, run, sparse_file, write_file
from test_kernel_driver import MEBIBYTE, SECONDS, KernelDriver, kernel_has
from test_kernel_upper import KernelUpper

GIBIBYTE = 1 << 30
MODULES = ["fs/fuse/fuse", "drivers/block/loop max_loop=8"]
# Prints a digest of the end of a file.
END = "tail -c 4194304 | sha256sum"
HOST, MNT = "/tmp/host", "/tmp/mnt"


def room(where):
    found = os.statvfs(where)
    return found.f_blocks * found.f_frsize


class Disks(KernelDriver):
    def test_a_mounted_disk_grows_with_its_file_system(self):
        kinds = [("xfs", ("mkfs.xfs", "-q"), ("xfs_repair", "-n")),
                 ("btrfs", ("mkfs.btrfs", "-q"), ("btrfs", "check"))]
        if self.may_protect_itself():
            kinds.append(("ext4", ("mkfs.ext4", "-q", "-F"), ("e2fsck", "-fn")))
        for kind, make, check in kinds:
            if not kernel_has(kind) or not shutil.which(make[0]) or not shutil.which(check[0]):
                continue
            with self.subTest(kind):
                disk, where = self.make_disk(kind, 512, make), self.point(kind)
                self.mount(disk, where)
                write_file(os.path.join(where, "kept"), "kept")
                before = room(where)
                # By the mountpoint, by the disk, and once more to the size that it has.
                for named, size in ((where, "+1G"), (disk, "3G"), (where, str(3 * GIBIBYTE))):
                    bcow("resize", named, size, timeout=SECONDS)
                self.assertGreater(room(where), before + 2 * GIBIBYTE)
                self.assertEqual(self.stats(where)["disk"]["size_bytes"], 3 * GIBIBYTE)
                run("dd", "if=/dev/urandom", f"of={where}/data", "bs=1M", "count=20", "conv=fsync",
                    "status=none", timeout=SECONDS)
                digest = run("sha256sum", f"{where}/data", timeout=SECONDS).out.split()[0]
                self.end(where)
                raw = self.path("check.raw")
                bcow("convert", disk, f"raw:{raw}", timeout=SECONDS)
                self.assertEqual(os.path.getsize(raw), 3 * GIBIBYTE)
                self.assertEqual(run(*check, raw, timeout=SECONDS).code, 0)
                os.unlink(raw)
                self.mount(disk, where)
                self.assertGreater(room(where), before + 2 * GIBIBYTE)
                self.assertEqual(run("sha256sum", f"{where}/data", timeout=SECONDS).out.split()[0],
                                 digest)
                self.umount(where)

    def test_what_cannot_grow_is_refused(self):
        disk, where, image = self.make_disk(), self.point(), self.disk_path("image")
        bcow("convert", f"dir:{os.path.join(support.TOP, 'spec')}", image)
        self.mount(disk, where)
        for size, options in (("-1M", ["--shrink"]), ("128M", ["--shrink"]), ("1M", [])):
            refused = bcow("resize", where, size, *options, check=False)
            assert_refused(self, refused, "a mounted file system cannot shrink")
        assert_refused(self, bcow("resize", where, "300000001", check=False),
                       "must be a multiple of 4096", code=2)
        assert_refused(self, bcow("resize", where, "+900P", check=False), "can have at most")
        self.assertEqual(self.stats(where)["disk"]["size_bytes"], 256 * MEBIBYTE)
        if not self.may_protect_itself():
            refused = bcow("resize", where, "+1G", check=False)
            assert_refused(self, refused, "cannot grow the mounted ext4", "CAP_SYS_RESOURCE")
            self.assertEqual(self.stats(where)["disk"]["size_bytes"], 256 * MEBIBYTE)
        self.umount(where)
        self.mount(disk, where, "-o", "ro")
        assert_refused(self, bcow("resize", where, "+1G", check=False), "is mounted read-only")
        self.end(where)
        # Without the mount, the disk alone changes.
        bcow("resize", disk, "+1M")
        self.mount(image, where)
        assert_refused(self, bcow("resize", where, "+1M", check=False), "with the FUSE driver")
        self.umount(where)
        self.mount(image, where, "--driver", "kernel")
        assert_refused(self, bcow("resize", where, "+1M", check=False), "is mounted read-only")
        self.end(where)
        assert_refused(self, bcow("resize", where, "+1M", check=False), "no mount or upper")
        assert_refused(self, bcow("resize", "/proc", "+1M", check=False), "type proc")


class Uppers(KernelUpper):
    def test_an_upper_that_cannot_grow_stays_as_it_is(self):
        self.begin()
        self.umount(self.where)
        refused = bcow("resize", self.upper, "2G", check=False)
        assert_refused(self, refused, "is not mounted", "bcow mount IMG DIR")
        refused = self.continue_("-s", "512M", check=False)
        assert_refused(self, refused, "cannot shrink to 536870912", code=2)
        refused = self.continue_("-s", "2G", "-o", "ro", check=False)
        assert_refused(self, refused, "to be mounted read-only")
        refused = self.continue_("-s", "900P", check=False)
        assert_refused(self, refused, "can have at most")
        if not self.may_protect_itself():
            refused = self.continue_("-s", "2G", check=False)
            assert_refused(self, refused, "cannot grow the upper", "CAP_SYS_RESOURCE")
        # The size that it has is no growth.
        self.continue_("-s", "1G")
        self.assertEqual(self.stats(self.where)["disk"]["size_bytes"], GIBIBYTE)
        self.end(self.where)
        self.assert_upper_clean()


class Guest(unittest.TestCase):
    """With the capability, in User-Mode Linux."""

    def test_an_upper_grows_mounted_and_when_it_is_mounted(self):
        uml.need()
        need("e2fsck", "mkfs.ext4", root=True)
        scratch = tempfile.mkdtemp(prefix="growth-", dir=support.WORK)
        self.addCleanup(shutil.rmtree, scratch, ignore_errors=True)
        made, disk = os.path.join(scratch, "made"), os.path.join(scratch, "host.img")
        os.mkdir(made)
        lower = subjects.Lower(scratch, subjects.plant)
        lower.image = os.path.join(made, "image.bcow")
        lower.make_image()
        sparse_file(disk, 768 * MEBIBYTE)
        run("mkfs.ext4", "-q", "-F", "-d", made, disk, timeout=SECONDS)

        def step(name, /, **arguments):
            return name, arguments

        def command(*arguments):
            return step("command", arguments=list(arguments))

        image, upper = f"{HOST}/image.bcow", f"{HOST}/upper"
        stats = step("command", arguments=[BCOW, "stats", "--json", MNT])
        results = uml.boot([
            step("load", modules=MODULES),
            step("attach", device="/dev/ubda", kind="ext4", where=HOST, options=""),
            command("mkdir", MNT),
            command(BCOW, "mount", image, MNT, "--upper", upper, "--driver", "kernel", "-s", "1G"),
            step("fill", where=MNT, prefix="before", count=40),
            stats, step("room", where=MNT),
            # More than a group, beyond a block of descriptors, and by the path of the upper.
            command(BCOW, "resize", MNT, "+1G"), step("room", where=MNT),
            command(BCOW, "resize", upper, "9G"), step("room", where=MNT), stats,
            command("fallocate", "-l", "1200M", f"{MNT}/large"),
            command("dd", "if=/dev/urandom", f"of={MNT}/large", "bs=1M", "count=4", "seek=1196",
                    "conv=notrunc", "status=none"),
            command("sh", "-c", f"{END} < {MNT}/large"),
            step("fill", where=MNT, prefix="after", count=40),
            step("verify", where=MNT, prefix="before", count=40),
            command(BCOW, "umount", MNT),
            command(BCOW, "fsck", "--data", upper),
            command("cat", f"{upper}/.bcow/instance.json"),
            # At the next mount, it has the size and takes another one.
            command(BCOW, "mount", image, MNT, "--upper", upper, "-s", "12G"),
            step("room", where=MNT),
            step("verify", where=MNT, prefix="after", count=40),
            step("fill", where=MNT, prefix="last", count=10, durable=True),
            command(BCOW, "umount", MNT),
            command("cat", f"{upper}/.bcow/instance.json"),
            command(BCOW, "fsck", "--data", upper),
            step("detach", where=HOST),
        ], disks=[disk], timeout=400)
        first, second, third, fourth = (results[at] for at in (6, 8, 10, 21))
        self.assertLess(first, GIBIBYTE)
        self.assertGreater(second, first + GIBIBYTE * 0.95)
        self.assertGreater(third, 8 * GIBIBYTE)
        self.assertGreater(fourth, third + GIBIBYTE * 2.9)
        sizes = [json.loads(results[at])["disk"]["size_bytes"] for at in (5, 11)]
        self.assertEqual(sizes, [GIBIBYTE, 9 * GIBIBYTE])
        self.assertEqual(json.loads(results[-3])["size"], 12 * GIBIBYTE)
        # Outside, the tree of its changes is complete, and the file system has no error.
        mounted = os.path.join(scratch, "mounted")
        os.mkdir(mounted)
        run("mount", "-o", "loop,ro,noload", disk, mounted, timeout=SECONDS)
        try:
            views = {"BCOW_VIEWS": os.path.join(scratch, "views")}
            image, upper = os.path.join(mounted, "image.bcow"), os.path.join(mounted, "upper")
            tar, raw = os.path.join(scratch, "layer.tar"), os.path.join(scratch, "check.raw")
            bcow("commit", image, "--upper", upper, f"tar:{tar}", env=views, timeout=SECONDS)
            names = set(run("tar", "-tf", tar, timeout=SECONDS).out.decode().split())
            self.assertIn("large", names)
            for prefix, count in (("before", 40), ("after", 40), ("last", 10)):
                self.assertLessEqual({f"{prefix}{n:03}" for n in range(count)}, names)
            run("tar", "-C", scratch, "-xf", tar, "large", timeout=SECONDS)
            end = run("sh", "-c", f'{END} < "$0"/large', scratch, timeout=SECONDS).out
            self.assertEqual(end.decode(), results[14])
            bcow("convert", "--backing-dir", mounted, os.path.join(upper, ".bcow", "disk.bcow"),
                 f"raw:{raw}", env=views, timeout=SECONDS)
            self.assertEqual(run("e2fsck", "-fn", raw, timeout=SECONDS).code, 0)
        finally:
            run("umount", mounted, timeout=SECONDS)
