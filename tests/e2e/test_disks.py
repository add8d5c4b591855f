"""Disks: conversion into BCoW and back, chains, and the commands that change them. qemu-img is the
judge."""

import fcntl
import json
import os
import random
import struct
import tempfile
import unittest

from support import (BCOW, WORK, assert_refused, bcow, for_everyone, need, read_bytes, run,
                     sparse_file, write_file)

MEBIBYTE = 1 << 20
# A tree of a real system for the file system in a disk. A larger one takes more time.
TREE = os.environ.get("BCOW_DISK_TREE", os.path.dirname(os.__file__))
DISK_BYTES = int(os.environ.get("BCOW_DISK_MIB", "128")) * MEBIBYTE


def write(path, data, at=0):
    with open(path, "r+b" if os.path.exists(path) else "w+b") as file:
        file.seek(at)
        file.write(data)


class Directory(unittest.TestCase):
    """Each test has its own directory as the current directory."""

    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="disks-", dir=WORK)
        self.addCleanup(directory.cleanup)
        before = os.getcwd()
        self.addCleanup(os.chdir, before)
        os.chdir(directory.name)

    def refused(self, *arguments, mention=(), code=1):
        """Runs a command that must fail with this message and leave the directory unchanged."""
        names = sorted(os.listdir("."))
        result = bcow(*arguments, check=False)
        assert_refused(self, result, *mention, code=code)
        self.assertEqual(sorted(os.listdir(".")), names)


class Conversion(Directory):
    """Conversion from and to raw and qcow2."""

    def test_a_real_disk_survives_conversions_unchanged(self):
        need("qemu-img", "mkfs.ext4", "e2fsck")
        sparse_file("disk.raw", DISK_BYTES)
        run("mkfs.ext4", "-q", "-d", TREE, "disk.raw")
        bcow("convert", "raw:disk.raw", "a.bcow")
        bcow("convert", "a.bcow", "qcow2:disk.qcow2")
        bcow("convert", "qcow2:disk.qcow2", "b.bcow")
        bcow("convert", "b.bcow", "raw:again.raw")
        run("qemu-img", "check", "disk.qcow2")
        for other in ("disk.qcow2", "again.raw"):
            run("qemu-img", "compare", "disk.raw", other)
        run("e2fsck", "-fn", "again.raw")
        self.assertTrue(read_bytes("disk.raw") == read_bytes("again.raw"))
        self.assertLess(os.path.getsize("a.bcow"), os.stat("disk.raw").st_blocks * 512)
        self.assertLessEqual(os.stat("again.raw").st_blocks, os.stat("disk.raw").st_blocks)
        for image in ("a.bcow", "b.bcow"):
            bcow("fsck", "--data", image)
        for compress in ("zlib", "zstd"):
            bcow("convert", "--force", "a.bcow", "qcow2:small.qcow2", "--compress", compress)
            run("qemu-img", "check", "small.qcow2")
            run("qemu-img", "compare", "disk.raw", "small.qcow2")
            self.assertLess(os.path.getsize("small.qcow2"), os.path.getsize("disk.qcow2"))
        # imago also reads data that qemu compressed.
        run("qemu-img", "convert", "-c", "-O", "qcow2", "disk.raw", "qemu.qcow2")
        bcow("convert", "--force", "qcow2:qemu.qcow2", "raw:again.raw")
        run("qemu-img", "compare", "disk.raw", "again.raw")

    def test_holes_are_not_read(self):
        sparse_file("big.raw", 4 << 40)
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
                write_file("disk.raw", noise[:size])
                result = bcow("convert", "--force", "raw:disk.raw", "disk.bcow")
                self.assertEqual(b"warning:" in result.err, size % 4096 != 0, str(result))
                bcow("convert", "--force", "disk.bcow", "raw:again.raw")
                self.assertTrue(read_bytes("again.raw") == noise[:size])
                bcow("convert", "--force", "disk.bcow", "qcow2:disk.qcow2")
                run("qemu-img", "check", "disk.qcow2")
                info = json.loads(run("qemu-img", "info", "--output=json", "disk.qcow2").out)
                self.assertEqual(info["virtual-size"], -(-size // 512) * 512)
                bcow("convert", "--force", "raw:disk.raw", "qcow2:direct.qcow2")
                run("qemu-img", "compare", "disk.qcow2", "direct.qcow2")

    def test_the_same_disk_gives_the_same_bytes(self):
        write("disk.raw",
              random.Random(2).randbytes(3 * MEBIBYTE) + bytes(5 * MEBIBYTE) + b"end" * 4096)
        for jobs in ("1", "3"):
            bcow("convert", "raw:disk.raw", f"{jobs}.bcow", "-j", jobs)
        self.assertEqual(read_bytes("1.bcow"), read_bytes("3.bcow"))

    def test_qcow2_opens_only_what_the_user_allows(self):
        need("qemu-img")
        os.mkdir("allowed")
        write("allowed/base.raw", random.Random(3).randbytes(MEBIBYTE))
        write("secret", random.Random(4).randbytes(MEBIBYTE))
        secret = os.path.abspath("secret")

        def overlay(name, backing, form="raw"):
            # A file from another machine: bcow never opens the name.
            run("qemu-img", "create", "-q", "-u", "-f", "qcow2", "-b", backing, "-F", form, name,
                "1M")

        overlay("good.qcow2", "base.raw")
        self.refused("convert", "qcow2:good.qcow2", "x.bcow", mention=("base.raw", "--backing-dir"))
        bcow("convert", "qcow2:good.qcow2", "x.bcow", "--backing-dir", "allowed")
        bcow("convert", "x.bcow", "raw:x.raw")
        self.assertEqual(read_bytes("x.raw"), read_bytes("allowed/base.raw"))
        os.unlink("x.bcow")
        os.unlink("x.raw")
        for name in (secret, "../secret", f"json:{{\"driver\":\"file\",\"filename\":\"{secret}\"}}",
                     f"file:{secret}", "nbd://localhost/x"):
            with self.subTest(name=name):
                overlay("bad.qcow2", name)
                self.refused("convert", "qcow2:bad.qcow2", "x.bcow", "--backing-dir", "allowed",
                             mention=("names another file",))
        os.symlink(secret, "allowed/link.raw")
        overlay("bad.qcow2", "link.raw")
        self.refused("convert", "qcow2:bad.qcow2", "x.bcow", "--backing-dir", "allowed",
                     mention=("link.raw",))
        # A file that is its own backing.
        overlay("allowed/self.qcow2", "self.qcow2", "qcow2")
        self.refused("convert", "qcow2:allowed/self.qcow2", "x.bcow", "--backing-dir", "allowed",
                     mention=("more than 64 files",))
        run("qemu-img", "create", "-q", "-f", "qcow2", "-o", f"data_file={secret},data_file_raw=on",
            "data.qcow2", "1M")
        self.refused("convert", "qcow2:data.qcow2", "x.bcow",
                     mention=("data file", "--backing-dir"))

    def test_damaged_qcow2_ends_in_an_error(self):
        need("qemu-img")
        write("disk.raw", random.Random(5).randbytes(2 * MEBIBYTE))
        run("qemu-img", "convert", "-c", "-O", "qcow2", "disk.raw", "good.qcow2")
        good = read_bytes("good.qcow2")
        rounds = random.Random(6)
        for _ in range(60):
            bad = bytearray(good)
            for _ in range(rounds.randrange(1, 4)):
                # Mostly in the header and the tables.
                at = rounds.randrange(rounds.choice((120, 4096, len(bad) - 4)))
                bad[at:at + 4] = struct.pack(
                    ">I", rounds.choice((0, 1, 0x7fffffff, 0xffffffff, rounds.getrandbits(32))))
            if rounds.randrange(4) == 0:
                del bad[rounds.randrange(len(bad)):]
            write_file("bad.qcow2", bad)
            result = bcow("convert", "qcow2:bad.qcow2", "x.bcow", "--force", "--no-verify",
                          check=False, timeout=60)
            self.assertIn(result.code, (0, 1), str(result))
            self.assertNotIn(b"panicked", result.err)
            self.assertLess(result.peak_bytes, 512 * MEBIBYTE)

    def test_ambiguous_and_invalid_conversions_are_refused(self):
        write("disk.raw", bytes(8192))
        bcow("convert", "raw:disk.raw", "disk.bcow")
        self.refused("convert", "disk.raw", "x.bcow", mention=("raw:disk.raw",), code=2)
        self.refused("convert", "raw:disk.raw", "raw:disk.raw",
                     mention=("which the disk is read from",))
        self.refused("convert", "disk.bcow", "raw:./disk.bcow",
                     mention=("which the disk is read from",))
        self.refused("convert", "raw:disk.raw", "x.bcow", "--plain", mention=("--plain",), code=2)
        self.refused("convert", "raw:disk.raw", "oci:layout", mention=("images, not disks",),
                     code=2)
        self.refused("convert", "raw:-", "x.bcow", code=2)
        self.refused("convert", "raw:.", "x.bcow", mention=("it is a directory",))
        self.refused("convert", "qcow2:disk.raw", "x.bcow", mention=("not a qcow2 image",))
        self.refused("convert", "disk.bcow", "raw:x", "--writable", code=2)
        self.refused("convert", "disk.bcow", "raw:/dev/null", mention=("not a regular file",))


class Chains(Directory):
    """Disks with a backing disk."""

    def setUp(self):
        super().setUp()
        noise = random.Random(7)
        one = bytearray(noise.randbytes(6 * MEBIBYTE) + bytes(3 * MEBIBYTE)
                        + noise.randbytes(MEBIBYTE // 2))
        two = bytearray(one)
        # The differences: whole sectors, parts of sectors, and zeros on one side.
        two[40960:45056] = noise.randbytes(4096)
        two[MEBIBYTE + 5:MEBIBYTE + 10] = bytes(5)
        two[5 * MEBIBYTE:6 * MEBIBYTE] = bytes(MEBIBYTE)
        two[7 * MEBIBYTE:7 * MEBIBYTE + 100] = b"x" * 100
        self.one, self.two = bytes(one), bytes(two)
        sectors = [at for at in range(0, len(one), 4096) if one[at:at + 4096] != two[at:at + 4096]]
        self.differing = len(sectors) * 4096
        write("one.raw", self.one)
        write("two.raw", self.two)
        for name in ("one", "two"):
            bcow("convert", f"raw:{name}.raw", f"{name}.bcow")

    def content(self, disk, *options):
        bcow("convert", disk, "raw:content.raw", *options)
        try:
            return read_bytes("content.raw")
        finally:
            os.unlink("content.raw")

    def own(self, disk):
        """The bytes that the disk's own file stores, by its map."""
        extents = json.loads(bcow("map", "--json", disk).out)["extents"]
        return sum(extent["length"] for extent in extents
                   if extent.get("file", 0) == 0 and extent["kind"] != "hole")

    def overlay(self, name="disk.bcow", backing="two.bcow"):
        """A disk with content `one` over a backing with content `two`: it stores the
        differences."""
        bcow("create", "-b", "one.bcow", name)
        bcow("rebase", name, "-b", backing)

    def test_a_rebased_disk_shows_the_same_and_stores_what_differs(self):
        self.overlay()
        self.assertTrue(self.content("disk.bcow") == self.one)
        self.assertEqual(self.own("disk.bcow"), self.differing)
        bcow("rebase", "disk.bcow", "--no-backing")
        self.assertTrue(self.content("disk.bcow") == self.one)
        os.unlink("one.bcow")
        os.unlink("two.bcow")
        self.assertTrue(self.content("disk.bcow") == self.one)
        bcow("fsck", "--data", "disk.bcow")

    def test_an_unsafe_rebase_changes_only_the_reference(self):
        bcow("create", "-b", "one.bcow", "disk.bcow")
        os.rename("one.bcow", "moved.bcow")
        self.refused("convert", "disk.bcow", "raw:x", mention=("backing one.bcow is not in",))
        bcow("rebase", "--unsafe", "disk.bcow", "-b", "moved.bcow")
        self.assertTrue(self.content("disk.bcow") == self.one)
        bcow("rebase", "--unsafe", "disk.bcow", "-b", "two.bcow")
        self.assertTrue(self.content("disk.bcow") == self.two)
        self.assertEqual(self.own("disk.bcow"), 0)

    def test_a_layer_has_the_changes_of_the_disk(self):
        self.overlay()
        bcow("commit", "disk.bcow", "layer.bcow")
        self.assertTrue(self.content("layer.bcow") == self.one)
        self.assertTrue(self.content("disk.bcow") == self.one)
        self.assertEqual(self.own("layer.bcow"), self.differing)
        self.refused("commit", "disk.bcow", "layer.bcow", mention=("file exists",))
        self.refused("commit", "disk.bcow", mention=("sealed", "NEW.bcow"))
        self.refused("commit", "layer.bcow", mention=("sealed",))
        bcow("fsck", "--data", "layer.bcow")
        # A layer can be a backing too.
        bcow("create", "-b", "layer.bcow", "-s", "16M", "top.bcow")
        self.assertTrue(self.content("top.bcow") == self.one + bytes(16 * MEBIBYTE - len(self.one)))
        extents = json.loads(bcow("map", "--json", "top.bcow").out)["extents"]
        self.assertEqual({extent["file_name"] for extent in extents}, {"layer.bcow", "two.bcow"})

    def test_changes_go_into_a_backing_that_can_be_written(self):
        bcow("convert", "--writable", "raw:two.raw", "base.bcow")
        self.overlay(backing="base.bcow")
        bcow("create", "-b", "base.bcow", "other.bcow")
        bcow("commit", "disk.bcow")
        self.assertTrue(self.content("base.bcow") == self.one)
        self.assertTrue(self.content("disk.bcow") == self.one)
        self.assertEqual(self.own("disk.bcow"), 0)
        self.refused("convert", "other.bcow", "raw:x",
                     mention=("backing base.bcow", "has changed since"))
        for disk in ("base.bcow", "disk.bcow"):
            bcow("fsck", "--data", disk)
        # The backing grows with the disk.
        bcow("resize", "disk.bcow", "+1M")
        bcow("commit", "disk.bcow")
        self.assertTrue(self.content("base.bcow") == self.one + bytes(MEBIBYTE))
        bcow("create", "-s", "1M", "alone.bcow")
        self.refused("commit", "alone.bcow", mention=("no backing",))

    def test_a_sealed_disk_keeps_its_backing_or_is_flattened(self):
        self.overlay()
        bcow("seal", "disk.bcow", "-o", "sealed.bcow")
        bcow("seal", "disk.bcow", "--flatten", "-o", "alone.bcow")
        for disk in ("sealed.bcow", "alone.bcow"):
            self.assertTrue(self.content(disk) == self.one)
            self.assertEqual(bcow("diff", "one.bcow", disk).out, b"")
            bcow("fsck", "--data", disk)
        self.assertEqual(self.own("sealed.bcow"), self.differing)
        bcow("seal", "disk.bcow")
        self.assertTrue(self.content("disk.bcow") == self.one)
        self.refused("seal", "disk.bcow", mention=("sealed",))
        self.refused("resize", "disk.bcow", "1M", mention=("sealed", "bcow create -b"))
        os.unlink("two.bcow")
        self.assertTrue(self.content("alone.bcow") == self.one)
        self.refused("convert", "sealed.bcow", "raw:x", mention=("backing two.bcow is not in",))

    def test_compact_removes_only_unused_blocks(self):
        for layout in ("auto", "performance", "space"):
            with self.subTest(layout=layout):
                bcow("create", "-b", "one.bcow", "--layout", layout, "disk.bcow")
                os.chmod("disk.bcow", 0o640)
                bcow("rebase", "disk.bcow", "-b", "two.bcow")
                bcow("rebase", "disk.bcow", "--no-backing")
                full = os.path.getsize("disk.bcow")
                for options in ((), ("--compress", "zstd")):
                    bcow("compact", "disk.bcow", *options)
                    self.assertTrue(self.content("disk.bcow") == self.one)
                    bcow("fsck", "--data", "disk.bcow")
                    self.assertLessEqual(os.path.getsize("disk.bcow"), full + 2 * MEBIBYTE)
                    self.assertEqual(os.stat("disk.bcow").st_mode & 0o777, 0o640)
                # The compacted disk is still writable.
                bcow("rebase", "disk.bcow", "-b", "two.bcow")
                bcow("resize", "disk.bcow", "8M", "--shrink")
                bcow("compact", "disk.bcow", "-o", "small.bcow")
                self.assertTrue(self.content("small.bcow") == self.one[:8 * MEBIBYTE])
                os.unlink("disk.bcow")
                os.unlink("small.bcow")

    def test_resize_grows_and_shrinks_a_disk(self):
        bcow("create", "-b", "one.bcow", "disk.bcow")
        size = len(self.one)
        bcow("resize", "disk.bcow", "+4M")
        self.assertTrue(self.content("disk.bcow") == self.one + bytes(4 * MEBIBYTE))
        self.refused("resize", "disk.bcow", "4M", mention=("--shrink",))
        bcow("resize", "disk.bcow", "4M", "--shrink")
        bcow("resize", "disk.bcow", str(size))
        self.assertTrue(self.content("disk.bcow")
                        == self.one[:4 * MEBIBYTE] + bytes(size - 4 * MEBIBYTE))
        self.refused("resize", "disk.bcow", "4097", mention=("must be a multiple of 4096",), code=2)
        self.refused("resize", "disk.bcow", "-1T", "--shrink", code=2)
        self.refused("create", "disk.bcow", "-s", "1M", mention=("not overwriting",))
        self.refused("create", "new.bcow", code=2)

    def test_differences_are_ranges(self):
        self.overlay()
        self.assertEqual(bcow("diff", "one.bcow", "disk.bcow").out, b"")
        result = bcow("diff", "two.bcow", "disk.bcow", "--json", check=False)
        self.assertEqual(result.code, 1, str(result))
        found = json.loads(result.out)
        self.assertEqual(sum(part["length"] for part in found["ranges"]), self.differing)
        self.assertEqual(found["summary"]["bytes"], self.differing)
        for part in found["ranges"]:
            start, end = part["offset"], part["offset"] + part["length"]
            self.assertNotEqual(self.one[start:end], self.two[start:end])
        bcow("resize", "disk.bcow", "+1M")
        self.assertEqual(bcow("diff", "one.bcow", "disk.bcow", check=False).code, 1)
        self.assertEqual(bcow("diff", "one.bcow", "nothing.bcow", check=False).code, 2)

    def test_a_changed_backing_is_refused(self):
        bcow("create", "-b", "one.bcow", "disk.bcow")
        good = read_bytes("one.bcow")

        def refused(*mention):
            for command in (("convert", "disk.bcow", "raw:x"), ("resize", "disk.bcow", "+1M"),
                            ("commit", "disk.bcow", "x")):
                self.refused(*command, mention=("one.bcow", *mention))

        os.replace("two.bcow", "one.bcow")
        refused("has changed since")
        bcow("create", "-s", "1M", "short.bcow")
        os.replace("short.bcow", "one.bcow")
        refused("1048576 bytes, not")
        os.replace("one.raw", "one.bcow")
        refused("cannot open", "bcow convert raw:FILE")
        os.unlink("one.bcow")
        refused("is not in")
        os.mkdir("one.bcow")
        refused("is a directory")
        os.rmdir("one.bcow")
        os.mkfifo("one.bcow")
        refused("no regular file")
        os.unlink("one.bcow")
        os.mkdir("away")
        write("away/one.bcow", good)
        os.symlink("away/one.bcow", "one.bcow")
        refused("a symbolic link")
        os.unlink("one.bcow")
        self.assertTrue(self.content("disk.bcow", "--backing-dir", "away") == self.one)
        self.refused("create", "-b", "away/one.bcow", "new.bcow", mention=("--backing-dir",))
        self.refused("create", "-b", "raw:two.raw", "new.bcow", mention=("bcow convert",), code=2)
        self.refused("create", "-b", "two.raw", "new.bcow")

    def test_a_backing_by_digest_is_found_in_stores(self):
        result = run("sha256sum", "one.bcow")
        digest = result.out.split()[0].decode()
        os.mkdir("store")
        bcow("create", "-b", "one.bcow", "--by-digest", "disk.bcow")
        self.refused("convert", "disk.bcow", "raw:x", mention=(digest, "--store"))
        os.rename("one.bcow", f"store/{digest}")
        self.assertTrue(self.content("disk.bcow", "--store", "store") == self.one)
        write(f"store/{digest}", b"!", at=5000)
        self.refused("convert", "disk.bcow", "raw:x", "--store", "store",
                     mention=("its digest is",))
        bcow("create", "-s", "1M", "changes.bcow")
        self.refused("create", "-b", "changes.bcow", "--by-digest", "new.bcow",
                     mention=("it is writable",))

    def test_one_writer_at_a_time(self):
        bcow("create", "-s", "1M", "disk.bcow")
        bcow("create", "-b", "disk.bcow", "top.bcow")
        with open("disk.bcow", "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            for command in (("resize", "disk.bcow", "+1M"), ("compact", "disk.bcow"),
                            ("seal", "disk.bcow"), ("convert", "disk.bcow", "raw:x"),
                            ("convert", "raw:one.raw", "disk.bcow"), ("resize", "top.bcow", "+1M")):
                self.refused(*command, mention=("in use by another program",))
            file.seek(1024)
            file.write(b"bcow serve, process 7\0")
            file.flush()
            self.refused("resize", "disk.bcow", "+1M",
                         mention=("written by bcow serve, process 7",))
            bcow("convert", "-U", "disk.bcow", "raw:x")
        bcow("resize", "top.bcow", "+1M")

    def test_a_pipe_is_not_opened(self):
        os.mkfifo("pipe")
        os.mkdir("mnt")
        mention = "cannot open pipe: it is a pipe, a socket or a character device"
        for command in (("inspect", "pipe"), ("mount", "pipe", "mnt"), ("resize", "pipe", "+1M"),
                        ("map", "pipe"), ("create", "-b", "pipe", "new.bcow")):
            self.refused(*command, mention=(mention,))

    @unittest.skipUnless(os.geteuid() == 0, "changes owners")
    def test_a_rewritten_disk_stays_with_its_group(self):
        """Of another user than the owner: in a shared directory, through the group or for all."""
        need("setpriv")
        shared, own, user = 4321, 4322, 4323
        os.chmod(".", 0o777)
        for groups, mode, expected in ((f"--groups={shared}", 0o660, (shared, 0o660)),
                                       # That user may write, but not give the file to the group.
                                       ("--clear-groups", 0o666, (own, 0o606))):
            bcow("create", "-q", "-s", "1M", "disk.bcow")
            os.chown("disk.bcow", 0, shared)
            os.chmod("disk.bcow", mode)
            run("setpriv", f"--reuid={user}", f"--regid={own}", groups, for_everyone(BCOW),
                "compact", "disk.bcow")
            stat = os.stat("disk.bcow")
            self.assertEqual((stat.st_gid, stat.st_mode & 0o7777), expected)
            os.remove("disk.bcow")


if __name__ == "__main__":
    unittest.main()
