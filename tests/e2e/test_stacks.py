"""A Debian image stored layer by layer: every reader of the stack finds the tree that umoci
unpacks."""

import json
import os
import sys
import tempfile

from support import (READER, WORK, Scratch, assert_same_tree, assert_second_reader_agrees, bcow,
                     blob_path, is_mounted, manifest_in, mounted, need, need_kernel, run)

KINDS = {"compressed": [], "plain": ["--plain"], "dedup": ["--dedup-lower"]}


class Stacks(Scratch):
    @classmethod
    def setUpClass(cls):
        need("umoci", root=True, fuse=True)
        super().setUpClass()
        cls.use_image("small")
        cls.layout = cls.path("layout")
        for name, options in KINDS.items():
            bcow("convert", *options, cls.source, f"oci:{cls.layout}:{name}")

    def name(self, kind):
        return f"oci:{self.layout}:{kind}"

    def blobs(self, kind):
        """The files of the layers, lowest first, and that of the stack."""
        shown = json.loads(bcow("inspect", "--json", self.name(kind)).out)
        digests = [layer["digest"] for layer in manifest_in(self.layout, kind)["layers"]]
        self.assertEqual(digests[:-1], [layer["digest"] for layer in shown["stack"]["layers"]])
        return [blob_path(self.layout, digest) for digest in digests]

    def test_the_mounted_stack_is_the_tree(self):
        for kind in KINDS:
            with self.subTest(kind), mounted(self.name(kind), "--verify", "merkle") as where:
                assert_same_tree(self, self.reference, where)

    def test_fsck_finds_every_file_clean(self):
        for kind in KINDS:
            out = bcow("fsck", "--data", "--json", self.name(kind)).out
            self.assertEqual({one["verdict"] for one in json.loads(out)["files"]}, {"clean"})

    def test_inspect_accounts_for_every_name_and_byte_of_the_tree(self):
        shown = json.loads(bcow("inspect", "--json", self.name("compressed")).out)["stack"][
            "layers"]
        names = json.loads(bcow("ls", "-R", "-a", "--json", self.name("compressed")).out)["entries"]
        files = {entry["inode"]: entry["size"] for entry in names if entry["type"] == "file"}
        self.assertEqual(sum(layer["adds"]["entries"] for layer in shown), len(names))
        self.assertEqual(sum(layer["adds"]["bytes"] for layer in shown), sum(files.values()))
        for what in ("entries", "bytes"):
            self.assertEqual(sum(layer["hides"][what] for layer in shown),
                             sum(layer["hidden"][what] for layer in shown))

    def test_the_kernel_mounts_a_plain_stack_by_the_printed_line(self):
        need("losetup", root=True)
        need_kernel(5, 16, "extra devices of EROFS")
        where = tempfile.mkdtemp(prefix="the kernel's ", dir=WORK)
        line = bcow("inspect", f"--mount-command={where}", self.name("plain")).out
        try:
            run("sh", "-ec", line)
            assert_same_tree(self, self.reference, where)
        finally:
            if is_mounted(where):
                run("umount", where)
            for blob in self.blobs("plain"):
                for device in run("losetup", "-n", "-O", "NAME", "-j", blob).out.split():
                    run("losetup", "-d", os.fsdecode(device))
            os.rmdir(where)

    def test_the_second_reader_gives_the_same_address_space(self):
        for kind in KINDS:
            stack = self.blobs(kind)[-1]
            run(os.environ.get("BCOW_PYTHON", sys.executable), READER, "check", stack)
            assert_second_reader_agrees(self, self.name(kind), stack, "--store", self.layout)
