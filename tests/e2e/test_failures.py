"""Failures around bcow (full disks, wrong files, wrong places, signals) give one clear error and
leave no file behind."""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import unittest

from support import (BCOW, TOP, WORK, Scratch, assert_refused, assert_same_tree, bcow, is_mounted,
                     mounted, need, read_bytes, run, until, write_file)
import tree
from sequences import ocilib

GENERATOR = os.path.join(TOP, "fixtures", "oci", "generate.py")


class Failures(Scratch):
    @classmethod
    def setUpClass(cls):
        need(root=True, fuse=True)
        super().setUpClass()
        run(sys.executable, GENERATOR, cls.directory, "sizes")
        cls.source = f"oci:{cls.directory}/sizes/image"
        cls.image = os.path.join(cls.directory, "image.bcow")
        bcow("convert", cls.source, cls.image)

    refused = assert_refused

    @contextlib.contextmanager
    def foreground(self):
        """A foreground mount of the image: its process and its mount point."""
        where = tempfile.mkdtemp(dir=self.directory)
        process = subprocess.Popen([BCOW, "mount", "-f", self.image, where],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            until(lambda: process.poll() is not None or is_mounted(where), "mounted")
            self.assertIsNone(process.poll(), "bcow mount -f ended by itself")
            yield process, where
        finally:
            process.kill()
            if is_mounted(where):
                subprocess.run(["umount", "-l", where])

    def test_convert_onto_a_full_disk_leaves_nothing(self):
        small = self.path("small-disk")
        os.makedirs(small)
        run("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small)
        try:
            result = bcow("convert", "--compress", "none", self.source,
                          os.path.join(small, "out.bcow"), check=False)
            self.refused(result, r"(?i)no space left|full")
            self.assertEqual(os.listdir(small), [])
        finally:
            run("umount", small)

    def test_convert_into_a_missing_directory_is_refused(self):
        result = bcow("convert", self.source, self.path("not/there/out.bcow"), check=False)
        self.refused(result, r"not/there", r"(?i)no such")

    def test_convert_replaces_no_file_when_it_fails(self):
        kept = self.path("kept.bcow", b"precious")
        bcow("convert", f"oci:{self.directory}/nothing", kept, check=False)
        self.assertEqual(read_bytes(kept), b"precious")

    def test_interrupted_convert_leaves_nothing(self):
        where = self.path("interrupted")
        os.makedirs(where)
        read, write = os.pipe()
        process = subprocess.Popen([BCOW, "convert", "tar:-", os.path.join(where, "out.bcow")],
                                   stdin=read, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(read)
        try:
            # The conversion has read the beginning of a file, so the image is incomplete.
            os.write(write, ocilib.entry(b"large", ocilib.REG, bytes(1 << 20))[:60_000])
            until(lambda: fcntl.ioctl(write, termios.FIONREAD, bytes(4)) == bytes(4),
                  "what was written is read")
            process.send_signal(signal.SIGINT)
            self.assertNotEqual(process.wait(60), 0)
        finally:
            process.kill()
            process.wait()
            os.close(write)
        self.assertEqual(os.listdir(where), [])

    def test_mount_of_another_file_is_refused(self):
        for name, data in (("empty", b""), ("text", b"hello\n" * 2000), ("zeros", b"\0" * 65536)):
            with self.subTest(name=name):
                where = tempfile.mkdtemp(dir=self.directory)
                self.refused(bcow("mount", self.path(name, data), where, check=False), name)
                self.assertFalse(is_mounted(where))

    def test_mount_of_a_missing_file_is_refused(self):
        where = tempfile.mkdtemp(dir=self.directory)
        self.refused(bcow("mount", self.path("absent.bcow"), where, check=False), r"absent\.bcow",
                     r"(?i)no such")

    def test_mount_onto_a_file_is_refused(self):
        self.refused(bcow("mount", self.image, self.path("a-file", b""), check=False), r"a-file",
                     r"(?i)directory")
        self.refused(bcow("mount", self.image, self.path("no-directory"), check=False),
                     r"no-directory", r"(?i)no such")

    def test_umount_of_an_unmounted_directory_is_refused(self):
        self.refused(bcow("umount", tempfile.mkdtemp(dir=self.directory), check=False),
                     r"(?i)not mounted|no.*mount")

    def test_truncated_image_is_refused_by_all(self):
        whole = read_bytes(self.image)
        for length in (1, 511, 1024, 4096, len(whole) // 2, len(whole) - 1):
            with self.subTest(length=length):
                cut = self.path("cut.bcow", whole[:length])
                where = tempfile.mkdtemp(dir=self.directory)
                self.refused(bcow("mount", cut, where, check=False), r"cut\.bcow")
                self.refused(bcow("inspect", cut, check=False), r"cut\.bcow")
                self.assertIn(bcow("fsck", cut, check=False).code, (4, 8))

    def test_every_damaged_byte_is_found_or_harmless(self):
        """No single flipped byte makes a mount return wrong data: the mount is refused, a read
        fails with EIO, or the byte has no effect."""
        whole = read_bytes(self.image)
        with mounted(self.image) as where:
            good = tree.dump(where)
        step = max(1, len(whole) // 60)
        for at in list(range(0, 64,
                             4)) + list(range(512, 560, 8)) + list(range(4096, len(whole), step)):
            damaged = bytearray(whole)
            damaged[at] ^= 0x5A
            path = self.path("damaged.bcow", bytes(damaged))
            where = tempfile.mkdtemp(dir=self.directory)
            result = bcow("mount", path, where, check=False, timeout=30)
            if result.code != 0:
                self.refused(result)
                continue
            try:
                try:
                    seen = tree.dump(where)
                except OSError as error:
                    self.assertEqual(error.errno, 5, f"byte {at}: {error}")
                else:
                    self.assertEqual(list(tree.differences(good, seen)), [],
                                     f"byte {at} was damaged")
            finally:
                bcow("umount", where)

    def test_usage_errors_exit_with_2(self):
        for arguments in (["convert"], ["mount", "x"], ["convert", "a", "b", "--block-size", "5K"],
                          ["nonsense"], ["convert", "--no-such-option", "a", "b"]):
            with self.subTest(arguments=arguments):
                self.assertEqual(bcow(*arguments, check=False).code, 2)
        self.assertEqual(bcow("fsck", check=False).code, 16)

    def test_daemon_unmounts_and_ends_on_signals(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            with self.subTest(signal=number), self.foreground() as (process, where):
                process.send_signal(number)
                process.wait(60)
                self.assertFalse(is_mounted(where))

    def test_foreground_daemon_ends_when_unmounted(self):
        with self.foreground() as (process, where):
            run("umount", where)
            self.assertEqual(process.wait(60), 0)

    def test_mount_is_read_only_nosuid_and_nodev(self):
        with mounted(self.image) as where:
            with self.assertRaises(OSError) as caught:
                open(os.path.join(where, "new"), "w")
            self.assertEqual(caught.exception.errno, 30)
            flags = os.statvfs(where).f_flag
            for name in ("ST_RDONLY", "ST_NOSUID", "ST_NODEV"):
                self.assertTrue(flags & getattr(os, name), f"{name} is not set")

    def test_two_mounts_of_one_image_at_a_time(self):
        with mounted(self.image) as one, mounted(self.image) as two:
            assert_same_tree(self, one, two)


class Advice(unittest.TestCase):
    """The commands that `fsck` advises repair the damage, or save the remaining data."""

    def setUp(self):
        need("skopeo", "qemu-img")
        self.directory = tempfile.mkdtemp(dir=WORK)
        self.addCleanup(shutil.rmtree, self.directory)

    def path(self, name):
        return os.path.join(self.directory, name)

    def damage(self, path, at):
        with open(path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 0x40]))

    def test_a_damaged_blob_is_copied_again_once_it_is_removed(self):
        need("skopeo")
        run(sys.executable, GENERATOR, self.directory, "sizes")
        store, mirror = (f"oci:{self.path(name)}:x" for name in ("store", "mirror"))
        copy = ("skopeo", "--insecure-policy", "copy", mirror, store)
        bcow("convert", "--compress", "none", f"oci:{self.directory}/sizes/image", store)
        run("skopeo", "--insecure-policy", "copy", store, mirror)
        blobs = self.path("store/blobs/sha256")
        layer = max((os.path.join(blobs, name) for name in os.listdir(blobs)), key=os.path.getsize)
        self.damage(layer, os.path.getsize(layer) // 2)
        run(*copy)
        found = bcow("fsck", "--data", store, check=False)
        # skopeo does not verify a blob that exists.
        self.assertEqual(found.code, 4, found.out)
        self.assertIn(f"hint: the damaged file is {layer}: remove it before you copy",
                      found.err.decode())
        os.remove(layer)
        run(*copy)
        bcow("fsck", "--data", store)

    def test_the_readable_blocks_of_a_damaged_disk_are_saved(self):
        raw, disk, saved = (self.path(name) for name in ("disk.raw", "disk.bcow", "saved.raw"))
        content = os.urandom(4 << 20)
        write_file(raw, content)
        bcow("convert", f"raw:{raw}", disk)
        self.damage(disk, 2 << 20)
        found = bcow("fsck", "--data", disk, check=False)
        self.assertEqual(found.code, 4, found.out)
        socket = self.path("socket")
        line = next(line for line in found.err.decode().splitlines() if line.startswith("hint: "))
        serve, salvage = (command.split() for command in line.replace("'", "").replace(
                              "SOCKET", socket).replace("SAVED.raw", saved).split("`")[1::2])
        server = subprocess.Popen([BCOW, *serve[1:]], stdin=subprocess.DEVNULL,
                                  stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            self.assertTrue(server.stdout.readline())
            run(*salvage)
        finally:
            server.terminate()
            server.wait(60)
            server.stdout.close()
        got = read_bytes(saved)
        self.assertEqual(len(got), len(content))
        # All except one block.
        differs = [at for at in range(0, len(content), 65536)
                   if got[at:at + 65536] != content[at:at + 65536]]
        self.assertEqual(len(differs), 1, differs)


if __name__ == "__main__":
    unittest.main()
