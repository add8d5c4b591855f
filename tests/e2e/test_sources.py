"""Every kind of source, made by other tools, converts to the tree that umoci unpacks."""

import os
import shutil
import subprocess

from support import (UNPRIVILEGED, Scratch, assert_refused, assert_same_tree, bcow, converted,
                     for_everyone, image, mounted, need, run)


class Sources(Scratch):
    @classmethod
    def setUpClass(cls):
        need("umoci", "skopeo", "tar", "zstd", root=True, fuse=True)
        super().setUpClass()
        cls.use_image("small")
        cls.image = cls.path("image.bcow")

    def tearDown(self):
        if os.path.exists(self.image):
            os.unlink(self.image)

    def check(self, source, **options):
        bcow("convert", source, self.image, **options)
        self.assert_is_the_tree(self.image)

    def assert_is_the_tree(self, image):
        with mounted(image) as where:
            assert_same_tree(self, self.reference, where)

    def skopeo(self, destination, *options):
        run("skopeo", "--insecure-policy", "copy", *options, self.source, destination)

    def test_layout(self):
        self.assert_is_the_tree(converted("small")[0])

    def test_layout_with_zstd_layers_by_skopeo(self):
        self.skopeo(f"oci:{self.path('zstd')}:z", "--dest-compress-format", "zstd")
        self.check(f"oci:{self.path('zstd')}:z")

    def test_zstd_chunked_layers_by_skopeo_give_the_tree_or_are_refused(self):
        """skopeo 1.9 writes the holes of a sparse file as zeros, and keeps the diffID of the
        layer."""
        source = f"oci:{self.path('chunked')}:c"
        self.skopeo(source, "--dest-compress", "--dest-compress-format", "zstd:chunked")
        result = bcow("convert", source, self.image, check=False)
        if result.code == 0:
            return self.assert_is_the_tree(self.image)
        assert_refused(self, result, r"layer \d of \d", "diffID")
        self.assertFalse(os.path.exists(self.image))

    def test_oci_archive_by_skopeo(self):
        self.skopeo(f"oci-archive:{self.path('oci.tar')}:small")
        self.check(f"oci-archive:{self.path('oci.tar')}:small")
        self.check(self.path("oci.tar"))

    def test_docker_archive_by_skopeo(self):
        self.skopeo(f"docker-archive:{self.path('docker.tar')}:example/small:latest")
        self.check(f"docker-archive:{self.path('docker.tar')}")
        for program in ("gzip", "zstd"):
            with subprocess.Popen([program, "-1c", self.path("docker.tar")],
                                  stdout=subprocess.PIPE) as packer:
                bcow("convert", "-", self.image, stdin=packer.stdout)
            self.assertEqual(packer.returncode, 0)
            bcow("diff", converted("small")[0], self.image)
        with open(self.path("docker.tar"), "rb") as archive:
            stack = f"oci:{self.path('piped')}:tag"
            bcow("convert", "-", stack, stdin=archive)
        bcow("diff", self.image, stack)

    def tar(self, *options):
        return subprocess.Popen(["tar", "--create", "--format=pax", "--xattrs",
                                 "--xattrs-include=*", "--numeric-owner", "--sparse", *options,
                                 "--directory", self.rootfs, "."], stdout=subprocess.PIPE)

    def test_tar_on_standard_input(self):
        with self.tar() as packer:
            self.check("tar:-", stdin=packer.stdout)
        self.assertEqual(packer.returncode, 0)

    def test_tar_named_by_its_file_name_alone(self):
        gzip = self.tar("--use-compress-program=gzip -1")
        with open(self.path("tree.tar.gz"), "wb") as out, gzip as packer:
            shutil.copyfileobj(packer.stdout, out)
        self.assertEqual(packer.returncode, 0)
        self.check(self.path("tree.tar.gz"))

    def test_directory(self):
        self.check(f"dir:{self.rootfs}")

    def test_conversion_needs_no_privilege(self):
        own = self.path("user")
        os.makedirs(own)
        os.chown(own, UNPRIVILEGED, UNPRIVILEGED)
        directory, tag = image("small")
        theirs = os.path.join(for_everyone(own), "image.bcow")
        bcow("convert", f"oci:{for_everyone(directory)}:{tag}", theirs, user=UNPRIVILEGED)
        run("cmp", converted("small")[0], os.path.join(own, "image.bcow"))

    def test_every_block_size_gives_the_same_tree(self):
        for size in ("4K", "64K", "1M", "4M"):
            with self.subTest(size=size):
                bcow("convert", self.source, self.image, "--block-size", size)
                self.assert_is_the_tree(self.image)

    def test_uncompressed_gives_the_same_tree(self):
        bcow("convert", self.source, self.image, "--compress", "none")
        self.assert_is_the_tree(self.image)
