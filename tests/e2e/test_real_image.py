"""A real image of more than 1 GB: converted, mounted, checked, exported, run; against umoci's tree.

The reference is the tree of `umoci unpack` from the same layout. The comparison includes every
attribute of the dump (see tests/oracle/tree.py).
"""

import json
import os
import shutil

from support import (PEAK_BYTES, UNPRIVILEGED, Scratch, assert_same_tree,
                     assert_second_reader_agrees, bcow, converted, flip, for_everyone, image,
                     kernel_at_least, kernel_mounted, mounted, need, need_kernel, read_json, run,
                     write_file)
import tree


def sha256(path):
    return tree.content(path)[0]


class RealImage(Scratch):
    """The tests share the conversions of setUpClass."""

    NAME = "real"

    @classmethod
    def setUpClass(cls):
        need("umoci", root=True, fuse=True)
        super().setUpClass()
        cls.use_image(cls.NAME)
        cls.compressed, peak_bytes = converted(cls.NAME)
        cls.plain = cls.path("plain.bcow")
        conversion = bcow("convert", cls.source, cls.plain, "--plain")
        cls.peaks_bytes = peak_bytes, conversion.peak_bytes

    def test_mounted_tree_equals_the_tree_that_umoci_unpacks(self):
        with mounted(self.compressed) as where:
            assert_same_tree(self, self.reference, where)

    def test_plain_image_mounted_by_bcow_has_the_same_tree(self):
        with mounted(self.plain) as where:
            assert_same_tree(self, self.reference, where)

    def test_an_ordinary_user_mounts_and_sees_the_same_tree(self):
        need("fusermount3")
        with mounted(self.compressed, user=UNPRIVILEGED) as where:
            dumped = run("/usr/bin/python3", for_everyone(tree.__file__), "dump", where,
                         user=UNPRIVILEGED).out
            seen = {entry["path"]: entry for entry in map(json.loads, dumped.splitlines())}
        assert_same_tree(self, self.reference, seen)

    def test_plain_image_satisfies_fsck_erofs(self):
        need("fsck.erofs")
        run("fsck.erofs", self.plain)

    def test_kernel_mounts_the_plain_file_itself(self):
        need_kernel(6, 12, "EROFS mounts of files")
        with kernel_mounted(self.plain, "file") as where:
            assert_same_tree(self, self.reference, where)

    def test_kernel_mounts_the_plain_file_through_a_loop_device(self):
        need("losetup")
        with kernel_mounted(self.plain, "loop") as where:
            assert_same_tree(self, self.reference, where)

    def test_erofs_exported_from_a_compressed_image_is_a_kernel_file_system(self):
        need("fsck.erofs", "losetup")
        exported = os.path.join(self.directory, "exported.erofs")
        bcow("export", self.compressed, "--to", "erofs", "-o", exported)
        run("fsck.erofs", exported)
        how = "file" if kernel_at_least(6, 12) else "loop"
        with kernel_mounted(exported, how) as where:
            assert_same_tree(self, self.reference, where)
        os.unlink(exported)

    def test_the_second_reader_gives_the_same_address_space(self):
        assert_second_reader_agrees(self, self.compressed, self.compressed)

    def test_fsck_finds_every_image_clean(self):
        for image_file in (self.compressed, self.plain):
            bcow("fsck", "--data", image_file)

    def test_fsck_finds_one_flipped_bit(self):
        damaged = os.path.join(self.directory, "damaged.bcow")
        shutil.copy(self.compressed, damaged)
        flip(damaged, os.path.getsize(damaged) // 2)
        checked = bcow("fsck", "--data", damaged, check=False)
        self.assertEqual(checked.code, 4, str(checked))
        os.unlink(damaged)

    def test_output_does_not_depend_on_the_number_of_threads(self):
        # The real image takes minutes of CPU time.
        name = os.environ.get("BCOW_THREADS_IMAGE") or "small"
        other = os.path.join(self.directory, "one-thread.bcow")
        bcow("convert", "oci:" + ":".join(image(name)), other, "-j", "1")
        self.assertEqual(sha256(other), sha256(converted(name)[0]))
        os.unlink(other)

    def test_conversion_stays_within_its_memory(self):
        for peak_bytes in self.peaks_bytes:
            self.assertLess(peak_bytes, PEAK_BYTES)

    def test_a_program_runs_in_a_chroot_on_the_mount(self):
        need("chroot")
        with mounted(self.compressed) as where:
            self.assertIn(b"30\n", run("chroot", where, *self.program()).out)

    def test_a_program_runs_in_runc_on_the_mount(self):
        need("runc")
        with mounted(self.compressed, "-o", "allow_other,dev,suid") as where:
            bundle = os.path.join(self.directory, "bundle")
            os.makedirs(bundle)
            run("runc", "spec", "--bundle", bundle)
            spec = read_json(os.path.join(bundle, "config.json"))
            spec["process"]["terminal"] = False
            spec["process"]["args"] = self.program()
            spec["root"] = {"path": where, "readonly": True}
            write_file(os.path.join(bundle, "config.json"), json.dumps(spec))
            state = os.path.join(self.directory, "runc")
            self.assertIn(b"30\n", run("runc", "--root", state, "run", "--bundle", bundle,
                                       f"bcow-{os.getpid()}").out)
            shutil.rmtree(bundle)

    def test_image_is_as_large_as_it_should_be_for_a_test(self):
        self.assertGreater(sum(one.get("size", 0) for one in self.reference.values()), 10 ** 9)

    def program(self):
        return ["/usr/bin/python3", "-B", "-c",
                "import numpy, pandas; print(int(pandas.DataFrame({'x': numpy.arange(5) ** "
                "2}).x.sum()))"]
