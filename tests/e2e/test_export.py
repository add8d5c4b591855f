"""Exports of bcow, read by other tools, have the tree that umoci unpacks from the source."""

import json
import os
import shutil
import tempfile
import unittest

from support import (PEAK_BYTES, Scratch, assert_same_tree, assert_second_reader_agrees, bcow,
                     blob_path, converted, kernel_at_least, kernel_mounted, mounted, need,
                     read_json, run, skopeo_copy)
from test_merge import scratch, stack as overlays
from sequences import NS, Entry
import sequences
import tree


class Exported:
    """The tests share the conversions and an export. These tests are for images of any size."""

    # umoci does not read zstd. Better compression takes longer, with the same code.
    COMPRESS = "gzip:1"

    @classmethod
    def setUpClass(cls):
        need("umoci", "skopeo", "tar", root=True, fuse=True)
        super().setUpClass()
        cls.use_image(cls.NAME)
        cls.flat, _ = converted(cls.NAME)
        cls.stack = f"oci:{converted(cls.NAME, 'layout')[0]}:tag"
        cls.layers = cls.path("layers")
        cls.exported = cls.export(cls.stack, cls.layers)

    def umoci(self, layout):
        """The tree that umoci unpacks from an image."""
        bundle = self.path("bundle")
        run("umoci", "unpack", "--image", f"{layout}:t", bundle)
        try:
            return tree.dump(os.path.join(bundle, "rootfs"))
        finally:
            shutil.rmtree(bundle)

    def manifest(self, layout):
        entry = read_json(os.path.join(layout, "index.json"))["manifests"][0]
        manifest = read_json(blob_path(layout, entry["digest"]))
        return manifest, read_json(blob_path(layout, manifest["config"]["digest"]))

    @classmethod
    def export(cls, source, layout, *options):
        return bcow("export", source, "--to", f"oci:{layout}:t", "--compress", cls.COMPRESS,
                    *options)

    def test_an_export_stays_within_its_memory(self):
        self.assertLess(self.exported.peak_bytes, PEAK_BYTES, str(self.exported))

    def test_umoci_unpacks_the_tree_from_an_image_layer_by_layer(self):
        assert_same_tree(self, self.reference, self.umoci(self.layers))
        manifest, config = self.manifest(self.layers)
        source_manifest, source_config = self.manifest(self.source.split(":")[1])
        self.assertEqual(len(manifest["layers"]), len(source_manifest["layers"]))
        for one in (config, source_config):
            one["rootfs"].pop("diff_ids")
        self.assertEqual(json.dumps(config), json.dumps(source_config))

    def test_a_stack_and_a_flattened_image_do_not_differ(self):
        compared = bcow("diff", "--json", "--summary", self.flat, self.stack)
        self.assertLess(compared.peak_bytes, PEAK_BYTES, str(compared))
        summary = json.loads(compared.out)["summary"]
        self.assertEqual(summary["same"], len(self.reference))


class Export(Exported, Scratch):
    NAME = "small"

    def test_gnu_tar_unpacks_the_tree_from_an_archive(self):
        for number, source in enumerate((self.flat, self.stack)):
            archive, where = self.path(f"{number}.tar"), self.path("unpacked")
            exported = bcow("export", source, "--to", "tar", "-o", archive)
            self.assertLess(exported.peak_bytes, PEAK_BYTES, str(exported))
            os.makedirs(where)
            run("tar", "-C", where, "--xattrs", "--xattrs-include=*", "--numeric-owner", "-xpf",
                archive)
            assert_same_tree(self, self.reference, where)
            shutil.rmtree(where)
        # However the image is stored.
        run("cmp", self.path("0.tar"), self.path("1.tar"))

    def test_an_archive_converts_to_the_same_tree_and_exports_to_the_same_bytes(self):
        first, second, again = self.path("first.tar"), self.path("second.tar"), self.path(
            "again.bcow")
        bcow("export", self.stack, "--to", "tar", "-o", first)
        bcow("convert", f"tar:{first}", again)
        bcow("diff", self.flat, again)
        bcow("export", again, "--to", "tar", "-o", second)
        run("cmp", first, second)
        os.unlink(first)
        os.unlink(second)

    def test_umoci_unpacks_the_tree_from_an_image_of_one_layer(self):
        layout = self.path("flattened")
        exported = bcow("export", self.flat, "--to", f"oci:{layout}:t")
        self.assertLess(exported.peak_bytes, PEAK_BYTES, str(exported))
        assert_same_tree(self, self.reference, self.umoci(layout))
        self.assertEqual(len(self.manifest(layout)[0]["layers"]), 1)

    def test_skopeo_takes_an_exported_image_and_it_converts_to_the_same_tree(self):
        copy = self.path("copy")
        skopeo_copy(f"oci:{self.layers}:t", f"oci:{copy}:t")
        again = self.path("copy.bcow")
        bcow("convert", f"oci:{copy}:t", again)
        bcow("diff", self.flat, again)
        with mounted(again) as where:
            assert_same_tree(self, self.reference, where)

    def test_other_tools_take_an_archive_of_a_layout(self):
        archive, layout = self.path("oci.tar"), self.path("from-archive")
        bcow("export", self.stack, "--to", f"oci-archive:{archive}:t", "--compress", self.COMPRESS)
        found = json.loads(run("skopeo", "inspect", f"oci-archive:{archive}:t").out)
        self.assertEqual(len(found["Layers"]),
                         len(self.manifest(self.source.split(":")[1])[0]["layers"]))
        run("skopeo", "copy", "--quiet", f"oci-archive:{archive}:t", f"oci:{layout}:t")
        assert_same_tree(self, self.reference, self.umoci(layout))
        # Members are in order and contain no data of this machine.
        listed = run("tar", "--numeric-owner", "-tvf", archive).out.decode().splitlines()
        self.assertEqual([line.split()[-1] for line in listed[:2]], ["oci-layout", "index.json"])
        for line in listed:
            self.assertRegex(line, r" 0/0 .* 1970-01-01 ")
        # The archive contains the same bytes as a layout directory.
        where = self.path("unpacked")
        os.makedirs(where)
        run("tar", "-C", where, "-xf", archive)
        run("diff", "-r", self.layers, where)
        for path in (layout, where):
            shutil.rmtree(path)
        os.unlink(archive)

    def test_an_image_in_bcow_form_travels_in_an_archive(self):
        archive, layout = self.path("bcow.tar"), self.path("travelled")
        bcow("convert", self.stack, f"oci-archive:{archive}:t")
        run("skopeo", "copy", "--quiet", f"oci-archive:{archive}:t", f"oci:{layout}:t")
        bcow("fsck", "--data", f"oci:{layout}:t")
        with mounted(f"oci:{layout}:t") as where:
            assert_same_tree(self, self.reference, where)
        shutil.rmtree(layout)
        os.unlink(archive)

    def assert_kernel_shows_the_tree(self, plain):
        run("fsck.erofs", plain)
        if kernel_at_least(6, 12):
            with kernel_mounted(plain, "file") as where:
                assert_same_tree(self, self.reference, where)

    def test_an_image_stored_another_way_is_the_same_tree(self):
        need("fsck.erofs")
        plain, back, flat = self.path("plain.bcow"), self.path("back.bcow"), self.path("again.bcow")
        converted = bcow("convert", "--plain", self.flat, plain)
        self.assertLess(converted.peak_bytes, PEAK_BYTES, str(converted))
        self.assert_kernel_shows_the_tree(plain)
        assert_second_reader_agrees(self, plain, plain)
        bcow("convert", plain, back)
        run("cmp", self.flat, back)
        os.unlink(back)
        # A stack, compressed and plain, in one file, and as layers again.
        for options in ((), ("--plain",)):
            converted = bcow("convert", *options, self.stack, flat)
            self.assertLess(converted.peak_bytes, PEAK_BYTES, str(converted))
            bcow("fsck", "--data", flat)
            with mounted(flat) as where:
                assert_same_tree(self, self.reference, where)
            stack = f"oci:{self.path('stack-again')}:t"
            bcow("convert", *options, self.stack, stack)
            with mounted(stack) as where:
                assert_same_tree(self, self.reference, where)
            shutil.rmtree(self.path("stack-again"))
        self.assert_kernel_shows_the_tree(flat)
        for path in (plain, flat):
            os.unlink(path)

    def test_an_exported_image_does_not_depend_on_the_number_of_threads(self):
        for threads in ("1", "5"):
            layout = self.path(f"threads-{threads}")
            self.export(self.stack, layout, "-j", threads)
            self.assertEqual(self.manifest(layout), self.manifest(self.layers))
            shutil.rmtree(layout)


class ExportOfTheRealImage(Exported, Scratch):
    NAME = "real"


class Sequences(unittest.TestCase):
    """Generated layers, exported and unpacked by umoci, against the kernel's overlayfs; see
    test_merge.py."""

    SEEDS = range(25)
    # A link in the place of a directory above its own target: no order of entries expresses it.
    UNSPEAKABLE = {18}

    def test_umoci_unpacks_what_overlayfs_shows(self):
        need("umoci", root=True)
        for seed in sorted(set(self.SEEDS) - self.UNSPEAKABLE):
            with self.subTest(seed=seed), scratch() as (directory, ram):
                with overlays(ram) as truth:
                    layers = sequences.build(seed, truth)
                    expected = truth.dump()
                source = sequences.write_layout(layers, os.path.join(ram, "source"))
                stack, out = (os.path.join(directory, name) for name in ("stack", "out"))
                bcow("convert", "-j1", source, f"oci:{stack}:t")
                bcow("export", f"oci:{stack}:t", "--to", f"oci:{out}:t", "--compress=none")
                run("umoci", "unpack", "--image", f"{out}:t", os.path.join(ram, "bundle"))
                assert_same_tree(self, expected, os.path.join(ram, "bundle", "rootfs"))


class LowerLinks(unittest.TestCase):
    """Hard links into lower layers, for podman, which gives the attributes of a link's header to
    the file, and refuses a layer with two entries of one name."""

    LAYERS = [[Entry(b"d", "dir", mode=0o755),
               Entry(b"d/su", data=b"old", mode=0o4750, uid=1000, gid=1001, mtime=NS),
               Entry(b"x", "dir", mode=0o755), Entry(b"x/y", "dir", mode=0o755),
               Entry(b"x/y/old", data=b"hidden")],
              [Entry(b"x", "dir", mode=0o755, mtime=NS), Entry(b"x/.wh..wh..opq"),
               Entry(b"x/y", "dir", mode=0o700, mtime=NS + 10 ** 9),
               Entry(b"x/y/link", "hardlink", link=b"d/su", mode=0o777),
               Entry(b"d", "dir", mode=0o755), Entry(b"d/su", data=b"new", mtime=NS)]]

    def test_podman_and_umoci_unpack_the_tree_of_overlayfs(self):
        need("podman", "umoci", root=True)
        with scratch() as (directory, ram), tempfile.TemporaryDirectory(dir="/run") as run_root:
            with overlays(ram) as truth:
                layers = [truth.unpack(entries) for entries in self.LAYERS]
                expected = truth.dump()
            source = sequences.write_layout(layers, os.path.join(ram, "source"))
            stack, out = (os.path.join(directory, name) for name in ("stack", "out"))
            bcow("convert", source, f"oci:{stack}:t")
            bcow("export", f"oci:{stack}:t", "--to", f"oci:{out}:t")
            run("umoci", "unpack", "--image", f"{out}:t", os.path.join(ram, "bundle"))
            assert_same_tree(self, expected, os.path.join(ram, "bundle", "rootfs"))
            podman = ["podman", f"--root={directory}/root", f"--runroot={run_root}",
                      "--storage-driver=vfs", "--events-backend=none"]
            # podman makes a name for the image from the path.
            pull = run("env", "-C", directory, *podman, "pull", "-q", "oci:out:t")
            image = pull.out.decode().strip()
            where = run(*podman, "image", "mount", image).out.decode().strip()
            found = tree.dump(where)
            run(*podman, "image", "umount", image)
            # podman does not unpack an entry for the root.
            for one in (expected, found):
                one.pop(".")
            assert_same_tree(self, expected, found)
