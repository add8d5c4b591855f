"""Damaged images give one clear error and no wrong data, and the advice of `fsck` helps."""

import os
import sys
import tempfile

from support import (TOP, Scratch, assert_refused, bcow, flip, mounted, need, read_bytes, run,
                     served, write_file)
import tree

GENERATOR = os.path.join(TOP, "fixtures", "oci", "generate.py")


class Failures(Scratch):
    @classmethod
    def setUpClass(cls):
        need(root=True, fuse=True)
        super().setUpClass()
        run(sys.executable, GENERATOR, cls.directory, "sizes")
        cls.image = cls.path("image.bcow")
        bcow("convert", f"oci:{cls.directory}/sizes/image", cls.image)

    refused = assert_refused

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


class Advice(Scratch):
    """The commands that `fsck` advises repair the damage, or save the remaining data."""

    @classmethod
    def setUpClass(cls):
        need("skopeo", "qemu-img")
        super().setUpClass()

    def test_a_damaged_blob_is_copied_again_once_it_is_removed(self):
        run(sys.executable, GENERATOR, self.directory, "sizes")
        store, mirror = (f"oci:{self.path(name)}:x" for name in ("store", "mirror"))
        copy = ("skopeo", "--insecure-policy", "copy", mirror, store)
        bcow("convert", "--compress", "none", f"oci:{self.directory}/sizes/image", store)
        run("skopeo", "--insecure-policy", "copy", store, mirror)
        blobs = self.path("store/blobs/sha256")
        layer = max((os.path.join(blobs, name) for name in os.listdir(blobs)), key=os.path.getsize)
        flip(layer, os.path.getsize(layer) // 2)
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
        flip(disk, 2 << 20)
        found = bcow("fsck", "--data", disk, check=False)
        self.assertEqual(found.code, 4, found.out)
        socket = self.path("socket")
        line = next(line for line in found.err.decode().splitlines() if line.startswith("hint: "))
        serve, salvage = (command.split() for command in line.replace("'", "").replace(
                              "SOCKET", socket).replace("SAVED.raw", saved).split("`")[1::2])
        self.assertEqual(serve[:2], ["bcow", "serve"])
        with served(*serve[2:]):
            run(*salvage)
        got = read_bytes(saved)
        self.assertEqual(len(got), len(content))
        # All except one block.
        differs = [at for at in range(0, len(content), 65536)
                   if got[at:at + 65536] != content[at:at + 65536]]
        self.assertEqual(len(differs), 1, differs)
