"""Power cuts and memory pressure below a mount with the kernel driver.

In User-Mode Linux a disk that shows an image lies on ext4 on dm-log-writes, which records each
write of the host's file system. A program in the mount makes changes durable, one by one; a mark in
the log follows each fsync that returned. Then the log is replayed up to each mark, and to other
places with unflushed writes left out, and each change before the mark must be there.
"""

import contextlib
import os
import shutil
import sys
import tarfile
import tempfile
import unittest

import support
import uml
import writelog
from support import BCOW, bcow, need, run, sparse_file, until

sys.path.insert(0, uml.HERE)
import changes  # noqa: E402

MIB = 1 << 20
# Durable changes, and power cuts besides those at their marks.
CHANGES = int(os.environ.get("BCOW_POWER_CHANGES") or 12)
CUTS = int(os.environ.get("BCOW_POWER_CUTS") or 1) * 12
SEED = int(os.environ.get("BCOW_SEED") or 1)
SECONDS = 120
MODULES = ["fs/fuse/fuse", "drivers/block/loop max_loop=8"]
LOGGING = ["drivers/md/dm-mod", "drivers/md/dm-log-writes"]
HOST, DRIVER = "/tmp/host", "/tmp/driver"
LOGGED = "logged"
# MiB that a guest of 96 MiB writes without a flush.
FLOOD = 200


def step(name, /, **arguments):
    return name, arguments


class Power(unittest.TestCase):
    def setUp(self):
        uml.need()
        need("dmsetup", "e2fsck", "mkfs.ext4", "losetup", root=True, fuse=True)
        scratch = tempfile.TemporaryDirectory(prefix="power-", dir=support.WORK)
        self.addCleanup(scratch.cleanup)
        self.dir = scratch.name

    def path(self, name):
        return os.path.join(self.dir, name)

    def host_file_system(self, mebibytes):
        """A file with an ext4 that holds an image and a disk that shows it."""
        made = self.path("host")
        os.mkdir(made)
        with tarfile.open(self.path("image.tar"), "w") as tar:
            for number in range(200):
                tar.addfile(tarfile.TarInfo(f"file{number:03}"))
            big = tarfile.TarInfo(changes.BIG)
            big.size = CHANGES * changes.PART
            with open("/dev/urandom", "rb") as source:
                tar.addfile(big, source)
        bcow("convert", "tar:" + self.path("image.tar"), f"{made}/image.bcow")
        bcow("create", "-b", f"{made}/image.bcow", "--fs", "ext4", "-s", "1G", f"{made}/vm.bcow",
             env={"BCOW_VIEWS": self.path("views")})
        disk = self.path("host.img")
        sparse_file(disk, mebibytes * MIB)
        run("mkfs.ext4", "-q", "-F", "-d", made, disk, timeout=SECONDS)
        shutil.rmtree(made)
        return disk

    def test_a_power_cut_at_any_write_keeps_what_fsync_acknowledged(self):
        host = self.host_file_system(192)
        disk, log = self.path("disk.img"), self.path("log.img")
        run("cp", "--sparse=always", host, disk)
        sparse_file(log, 1 << 30)
        uml.boot([
            step("load", modules=MODULES + LOGGING),
            step("log_writes", device="/dev/ubda", log="/dev/ubdb", name=LOGGED),
            step("attach", device="/dev/dm-0", kind="ext4", where=HOST, options=""),
            step("command", arguments=["mkdir", DRIVER]),
            step("command", arguments=[BCOW, "mount", f"{HOST}/vm.bcow", DRIVER]),
            step("mark", name=LOGGED, text="0"),
            step("commit_one_by_one", where=DRIVER, name=LOGGED, count=CHANGES, busy=50_000),
            step("mark", name=LOGGED, text=f"{CHANGES}"),
            # A thread of the guest writes the log; it is lost if the guest halts before.
            step("command", arguments=["sleep", "2"]),
        ], disks=[disk, log], timeout=300)
        recorded = writelog.Log(log)
        self.addCleanup(recorded.close)
        marks = [int(text) for _, text in recorded.marks()]
        self.assertEqual(marks, [*range(CHANGES + 1), CHANGES])
        cuts = list(recorded.cuts(CUTS, SEED))
        self.assertTrue(any(lost for _, lost, _ in cuts), "no cut loses a write")
        for end, lost, mark in cuts:
            with self.subTest(end=end, lost=lost, mark=mark):
                run("cp", "--sparse=always", host, disk)
                recorded.replay(disk, end, lost)
                self.assert_has_changes(disk, int(mark))

    def assert_has_changes(self, disk, count):
        with contextlib.ExitStack() as stack:
            at = self.mounted(stack, lambda at: run("mount", "-o", "loop", disk, at,
                                                    timeout=SECONDS))
            image = os.path.join(at, "vm.bcow")
            self.assertEqual(bcow("fsck", "--data", image, timeout=SECONDS).code, 0)
            with contextlib.ExitStack() as inner:
                inner.callback(until, lambda: bcow("fsck", image, check=False).code == 0,
                               "the end of the process")
                driver = self.mounted(inner, lambda driver: bcow("mount", image, driver,
                                                             timeout=SECONDS))
                for number in range(count):
                    self.assertTrue(changes.is_made(driver, number), f"change {number}")
                # What the image has is there too, and the file system takes another change.
                self.assertEqual(os.path.getsize(f"{driver}/file199"), 0)
                changes.make(driver, CHANGES * 4)
            raw = self.path("check.raw")
            bcow("convert", image, f"raw:{raw}", timeout=SECONDS)
            run("e2fsck", "-fn", raw, timeout=SECONDS)
            os.unlink(raw)

    def mounted(self, stack, mount):
        at = stack.enter_context(tempfile.TemporaryDirectory(prefix="mnt-", dir=self.dir))
        mount(at)
        stack.callback(run, "umount", at, timeout=SECONDS)
        return at

    def test_more_dirty_data_than_memory_gets_written(self):
        disk = self.host_file_system(1024)
        [*_, memory, _, _] = uml.boot([
            step("load", modules=MODULES),
            step("attach", device="/dev/ubda", kind="ext4", where=HOST, options=""),
            step("command", arguments=["mkdir", DRIVER]),
            step("command", arguments=[BCOW, "mount", f"{HOST}/vm.bcow", DRIVER]),
            step("flood", where=DRIVER, mebibytes=FLOOD),
            step("command", arguments=[BCOW, "umount", DRIVER]),
            step("command", arguments=[BCOW, "fsck", "--data", f"{HOST}/vm.bcow"]),
        ], disks=[disk], memory="96M", timeout=600)
        self.assertLess(memory, FLOOD * MIB / 2)
