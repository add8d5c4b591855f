"""Disks: into BCoW and out of it, chains, and what changes them. qemu-img is the judge."""

import json
import os
import random
import struct
import tempfile
import unittest

from support import WORK, assert_refused, bcow, need, run

MEBIBYTE = 1 << 20
# A tree of a real system for the file system in a disk; a larger one where there is time for it.
TREE = os.environ.get("BCOW_DISK_TREE", "/usr/share/doc")
DISK_BYTES = int(os.environ.get("BCOW_DISK_MIB", "200")) * MEBIBYTE


def write(path, data, at=0):
    with open(path, "r+b" if os.path.exists(path) else "w+b") as file:
        file.seek(at)
        file.write(data)


def read(path):
    with open(path, "rb") as file:
        return file.read()


class Directory(unittest.TestCase):
    """Each test in a directory of its own, as the current one."""

    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="disks-", dir=WORK)
        self.addCleanup(directory.cleanup)
        before = os.getcwd()
        self.addCleanup(os.chdir, before)
        os.chdir(directory.name)

    def refused(self, *arguments, mention=(), code=1):
        """A command that must fail, say all this, and leave the directory as it was."""
        names = sorted(os.listdir("."))
        result = bcow(*arguments, check=False)
        assert_refused(self, result, *mention, code=code)
        self.assertEqual(sorted(os.listdir(".")), names)


class Conversion(Directory):
    """raw and qcow2, in and out."""

    def test_a_real_disk_goes_round_and_stays_the_same(self):
        need("qemu-img", "mkfs.ext4", "e2fsck")
        with open("disk.raw", "wb") as file:
            file.truncate(DISK_BYTES)
        run("mkfs.ext4", "-q", "-d", TREE, "disk.raw")
        bcow("convert", "raw:disk.raw", "a.bcow")
        bcow("convert", "a.bcow", "qcow2:disk.qcow2")
        bcow("convert", "qcow2:disk.qcow2", "b.bcow")
        bcow("convert", "b.bcow", "raw:again.raw")
        run("qemu-img", "check", "disk.qcow2")
        for other in ("disk.qcow2", "again.raw"):
            run("qemu-img", "compare", "disk.raw", other)
        run("e2fsck", "-fn", "again.raw")
        self.assertTrue(read("disk.raw") == read("again.raw"))
        self.assertLess(os.path.getsize("a.bcow"), os.stat("disk.raw").st_blocks * 512)
        self.assertLessEqual(os.stat("again.raw").st_blocks, os.stat("disk.raw").st_blocks)
        for image in ("a.bcow", "b.bcow"):
            bcow("fsck", "--data", image)
        for compress in ("zlib", "zstd"):
            bcow("convert", "a.bcow", "qcow2:small.qcow2", "--compress", compress)
            run("qemu-img", "check", "small.qcow2")
            run("qemu-img", "compare", "disk.raw", "small.qcow2")
            self.assertLess(os.path.getsize("small.qcow2"), os.path.getsize("disk.qcow2"))
        # What is read by imago was compressed by qemu too.
        run("qemu-img", "convert", "-c", "-O", "qcow2", "disk.raw", "qemu.qcow2")
        bcow("convert", "qcow2:qemu.qcow2", "raw:again.raw")
        run("qemu-img", "compare", "disk.raw", "again.raw")

    def test_holes_are_not_read(self):
        with open("big.raw", "wb") as file:
            file.truncate(4 << 40)
        write("big.raw", b"in the middle", at=2 << 40)
        result = bcow("convert", "raw:big.raw", "big.bcow", timeout=60)
        self.assertLess(result.peak_bytes, 256 * MEBIBYTE)
        bcow("convert", "big.bcow", "raw:again.raw")
        with open("again.raw", "rb") as file:
            file.seek(2 << 40)
            self.assertEqual(file.read(13), b"in the middle")
        self.assertLess(os.stat("again.raw").st_blocks * 512, 4 * MEBIBYTE)

    def test_sizes_are_kept_on_the_way_back(self):
        need("qemu-img")
        noise = random.Random(1).randbytes(MEBIBYTE + 1)
        for size in (0, 1, 511, 512, 4095, 4096, 4097, MEBIBYTE + 1):
            with self.subTest(size=size):
                write("disk.raw", b"")
                os.truncate("disk.raw", 0)
                write("disk.raw", noise[:size])
                result = bcow("convert", "raw:disk.raw", "disk.bcow")
                self.assertEqual(b"warning:" in result.err, size % 4096 != 0, str(result))
                bcow("convert", "disk.bcow", "raw:again.raw")
                self.assertTrue(read("again.raw") == noise[:size])
                bcow("convert", "disk.bcow", "qcow2:disk.qcow2")
                run("qemu-img", "check", "disk.qcow2")
                info = json.loads(run("qemu-img", "info", "--output=json", "disk.qcow2").out)
                self.assertEqual(info["virtual-size"], -(-size // 512) * 512)
                bcow("convert", "raw:disk.raw", "qcow2:direct.qcow2")
                run("qemu-img", "compare", "disk.qcow2", "direct.qcow2")

    def test_the_same_disk_gives_the_same_bytes(self):
        write("disk.raw", random.Random(2).randbytes(3 * MEBIBYTE) + bytes(5 * MEBIBYTE) + b"end" * 4096)
        for jobs in ("1", "3"):
            bcow("convert", "raw:disk.raw", f"{jobs}.bcow", "-j", jobs)
        self.assertEqual(read("1.bcow"), read("3.bcow"))

    def test_qcow2_opens_only_what_the_user_allows(self):
        need("qemu-img")
        os.mkdir("allowed")
        write("allowed/base.raw", random.Random(3).randbytes(MEBIBYTE))
        write("secret", random.Random(4).randbytes(MEBIBYTE))
        secret = os.path.abspath("secret")

        def overlay(name, backing, form="raw"):
            # As a file that came from elsewhere: the name is never opened here.
            run("qemu-img", "create", "-q", "-u", "-f", "qcow2", "-b", backing, "-F", form, name, "1M")

        overlay("good.qcow2", "base.raw")
        self.refused("convert", "qcow2:good.qcow2", "x.bcow", mention=("base.raw", "--backing-dir"))
        bcow("convert", "qcow2:good.qcow2", "x.bcow", "--backing-dir", "allowed")
        bcow("convert", "x.bcow", "raw:x.raw")
        self.assertEqual(read("x.raw"), read("allowed/base.raw"))
        os.unlink("x.bcow")
        os.unlink("x.raw")
        for name in (secret, "../secret", f"json:{{\"driver\":\"file\",\"filename\":\"{secret}\"}}", f"file:{secret}",
                     "nbd://localhost/x"):
            with self.subTest(name=name):
                overlay("bad.qcow2", name)
                self.refused("convert", "qcow2:bad.qcow2", "x.bcow", "--backing-dir", "allowed", mention=("names another file",))
        os.symlink(secret, "allowed/link.raw")
        overlay("bad.qcow2", "link.raw")
        self.refused("convert", "qcow2:bad.qcow2", "x.bcow", "--backing-dir", "allowed", mention=("link.raw",))
        # A file below itself.
        overlay("allowed/self.qcow2", "self.qcow2", "qcow2")
        self.refused("convert", "qcow2:allowed/self.qcow2", "x.bcow", "--backing-dir", "allowed", mention=("more than 64 files",))
        run("qemu-img", "create", "-q", "-f", "qcow2", "-o", f"data_file={secret},data_file_raw=on", "data.qcow2", "1M")
        self.refused("convert", "qcow2:data.qcow2", "x.bcow", mention=("data file", "--backing-dir"))

    def test_damaged_qcow2_ends_in_an_error(self):
        need("qemu-img")
        write("disk.raw", random.Random(5).randbytes(2 * MEBIBYTE))
        run("qemu-img", "convert", "-c", "-O", "qcow2", "disk.raw", "good.qcow2")
        good = read("good.qcow2")
        rounds = random.Random(6)
        for _ in range(150):
            bad = bytearray(good)
            for _ in range(rounds.randrange(1, 4)):
                # Mostly where the header and the tables are.
                at = rounds.randrange(rounds.choice((120, 4096, len(bad) - 4)))
                bad[at:at + 4] = struct.pack(">I", rounds.choice((0, 1, 0x7fffffff, 0xffffffff, rounds.getrandbits(32))))
            if rounds.randrange(4) == 0:
                del bad[rounds.randrange(len(bad)):]
            with open("bad.qcow2", "wb") as file:
                file.write(bad)
            result = bcow("convert", "qcow2:bad.qcow2", "x.bcow", "--no-verify", check=False, timeout=60)
            self.assertIn(result.code, (0, 1), str(result))
            self.assertNotIn(b"panicked", result.err)
            self.assertLess(result.peak_bytes, 512 * MEBIBYTE)

    def test_what_is_not_asked_for_is_refused(self):
        write("disk.raw", bytes(8192))
        bcow("convert", "raw:disk.raw", "disk.bcow")
        self.refused("convert", "disk.raw", "x.bcow", mention=("raw:FILE",), code=2)
        self.refused("convert", "disk.bcow", "x.bcow", code=2)
        self.refused("convert", "raw:disk.raw", "raw:disk.raw", mention=("which the disk is read from",))
        self.refused("convert", "disk.bcow", "raw:./disk.bcow", mention=("which the disk is read from",))
        self.refused("convert", "raw:disk.raw", "x.bcow", "--plain", mention=("--plain",), code=2)
        self.refused("convert", "raw:disk.raw", "oci:layout", mention=("images, not disks",), code=2)
        self.refused("convert", "raw:-", "x.bcow", code=2)
        self.refused("convert", "raw:.", "x.bcow", mention=("it is a directory",))
        self.refused("convert", "qcow2:disk.raw", "x.bcow", mention=("it is no qcow2 image",))
        self.refused("convert", "disk.bcow", "raw:x", "--writable", code=2)
        self.refused("convert", "disk.bcow", "raw:/dev/null", mention=("no regular file",))


if __name__ == "__main__":
    unittest.main()
