"""A real image in layers, through a real registry and back: the same blobs, and umoci's tree.

The registry is Debian's docker-registry (CNCF distribution) on a port of this machine's own, for
the length of the tests.
"""

import json

from support import (PEAK_BYTES, Scratch, assert_same_tree, bcow, blobs_of, converted, digest_in,
                     mounted, need, run, skopeo_copy)
from web import plain_registry


class Registry(Scratch):
    NAME = "real"

    @classmethod
    def setUpClass(cls):
        need("umoci", "skopeo", "docker-registry", root=True, fuse=True)
        super().setUpClass()
        cls.use_image(cls.NAME)
        cls.layout, cls.peak_bytes = converted(cls.NAME, "layout")
        cls.pulled = cls.path("pulled")
        with plain_registry(cls.directory) as port:
            pushed = f"docker://127.0.0.1:{port}/team/image:1"
            for source, destination in ((f"oci:{cls.layout}:tag", pushed),
                                        (pushed, f"oci:{cls.pulled}:tag")):
                skopeo_copy(source, destination)

    def test_all_blobs_come_back_as_they_were(self):
        here, there = blobs_of(self.layout), blobs_of(self.pulled)
        self.assertEqual(set(here), set(there))
        for name in here:
            run("cmp", here[name], there[name])

    def test_the_manifest_keeps_its_digest(self):
        self.assertEqual(digest_in(self.layout), digest_in(self.pulled))

    def test_the_pulled_image_mounts_with_the_tree_that_umoci_unpacks(self):
        with mounted(f"oci:{self.pulled}:tag") as where:
            assert_same_tree(self, self.reference, where)

    def test_the_pulled_image_is_clean(self):
        bcow("fsck", "--data", f"oci:{self.pulled}:tag")

    def test_layers_of_the_pulled_image_are_not_converted_again(self):
        result = bcow("convert", "--json", self.source, f"oci:{self.pulled}:again")
        self.assertEqual({layer["made"] for layer in json.loads(result.out)["layers"]}, {"layout"})
        self.assertEqual(set(blobs_of(self.layout)), set(blobs_of(self.pulled)))

    def test_conversion_stays_within_its_memory(self):
        self.assertLess(self.peak_bytes, PEAK_BYTES)
