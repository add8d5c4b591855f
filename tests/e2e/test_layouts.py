"""The tiny layouts of fixtures/oci: the odd ones convert to the expected tree, the bad ones are
refused.

One test per case, named after it.
"""

import json
import os
import re
import shutil
import subprocess
import sys

from support import (PEAK_BYTES, TOP, Scratch, assert_same_tree, bcow, kernel_at_least,
                     kernel_mounted, mounted, need, run)
import tree

GENERATOR = os.path.join(TOP, "fixtures", "oci", "generate.py")
SECONDS = 60
# No case needs a larger file; this limit stops a decompression bomb.
FILE_BYTES = 3 << 30


class Layouts(Scratch):
    @classmethod
    def setUpClass(cls):
        need("zstd", root=True, fuse=True)
        super().setUpClass()
        cls.out = cls.path("out")
        os.mkdir(cls.out)

    def convert(self, name, *options):
        case = self.path(name)
        run(sys.executable, GENERATOR, self.directory, name)
        with open(os.path.join(case, "source")) as source:
            source, *more = source.read().format(dir=case).split()
        image = os.path.join(self.out, name + ".bcow")
        return (case, image, bcow("convert", source, image, *more, *options, check=False,
                                  timeout=SECONDS, file_bytes=FILE_BYTES))

    def good(self, name):
        case, image, result = self.convert(name)
        self.assertEqual(result.code, 0, str(result))
        self.assertNotIn(b"error:", result.err)
        expected = tree.load(os.path.join(case, "expected.jsonl"))
        with mounted(image) as where:
            assert_same_tree(self, expected, where)
        bcow("fsck", "--data", image)
        if shutil.which("fsck.erofs") and kernel_at_least(6, 12):
            _, image, result = self.convert(name, "--plain")
            self.assertEqual(result.code, 0, str(result))
            run("fsck.erofs", image)
            with kernel_mounted(image, "file") as where:
                assert_same_tree(self, expected, where)

    def bad(self, name):
        case, image, result = self.convert(name)
        with open(os.path.join(case, "error.json")) as rules:
            rules = json.load(rules)
        self.assertLess(result.peak_bytes, PEAK_BYTES, str(result))
        message = result.err.decode(errors="replace")
        self.assertNotIn("panicked", message)
        if rules.get("bounded") and result.code == 0:
            bcow("fsck", "--data", image, timeout=SECONDS)
            return
        self.assertEqual(result.code, rules.get("code", 1), str(result))
        self.assertEqual(len(re.findall(r"^error:", message, re.MULTILINE)), 1, message)
        for pattern in rules.get("mention", ()):
            self.assertRegex(message, pattern)
        left = [one for one in os.listdir(self.out) if name in one]
        self.assertEqual(left, [], "a refused source left output behind")


def add_tests():
    listed = subprocess.run([sys.executable, GENERATOR, "--list"], stdout=subprocess.PIPE,
                            check=True).stdout.decode()
    for line in listed.splitlines():
        name = line.split()[0]
        kind = "bad" if name.startswith(("bad-", "bomb-")) else "good"

        def test(self, name=name, kind=kind):
            getattr(self, kind)(name)

        test.__doc__ = line[len(name):].strip()
        setattr(Layouts, "test_" + name.replace("-", "_"), test)


add_tests()
