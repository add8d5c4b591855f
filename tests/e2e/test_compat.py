"""Files and documents of earlier versions (fixtures/compat): docs/compatibility.md; and programs
that use the crates: docs/guide/library.md."""

import json
import os
import tempfile
import unittest

import frozen
import schema
from support import BCOW, TOP, WORK, assert_same_tree, bcow, missing, need, read_json, run

VERSIONS = os.path.join(TOP, "fixtures", "compat")


def lacks(old, new, at=""):
    """The members of a document that a later one of the same schema lacks, or has in another
    type."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key, value in old.items():
            if key not in new:
                yield f"{at}.{key} is missing"
            elif key == "schema" and new[key] != value:
                yield f"{at}.schema is {new[key]}"
            else:
                yield from lacks(value, new[key], f"{at}.{key}")
    elif isinstance(old, list) and isinstance(new, list):
        if old and not new:
            yield f"{at} is empty"
        for number, (one, other) in enumerate(zip(old, new)):
            yield from lacks(one, other, f"{at}[{number}]")
    elif old is not None and type(old) is not type(new):
        yield f"{at} is {new!r}, and was {old!r}"


class Compatibility(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        need("qemu-io", "tar", root=True, fuse=True)
        cls.versions = [os.path.join(VERSIONS, name) for name in sorted(os.listdir(VERSIONS))
                        if name != "README.md"]

    def each(self):
        for version in self.versions:
            with self.subTest(version=version), frozen.unpacked(version) as here:
                yield version, here
        self.assertTrue(self.versions)

    def test_files_of_each_version_show_what_they_showed(self):
        for version, here in self.each():
            expected = read_json(os.path.join(version, "expected.json"))
            seen = frozen.observe(here)
            self.assertLessEqual(expected.keys(), seen.keys())
            for name, value in expected.items():
                with self.subTest(name=name):
                    if name in frozen.DISKS:
                        self.assertEqual(seen[name], value)
                    else:
                        assert_same_tree(self, *(side.get(side[name], side[name])
                                                 if isinstance(side[name], str) else side[name]
                                                 for side in (expected, seen)))

    def test_documents_have_all_members_of_earlier_versions(self):
        for version, here in self.each():
            new = dict(frozen.documents(here))
            for name, document in new.items():
                with self.subTest(name=name):
                    found = list(schema.problems(document, schema.of(document["schema"])))
                    self.assertEqual(found, [])
            # Each schema has a document.
            known = {name.removesuffix(".json") for name in os.listdir(schema.SCHEMAS)}
            made = {document["schema"].replace("/", "-") for document in new.values()}
            self.assertEqual(known, made | schema.ELSEWHERE)
            for name, old in read_json(os.path.join(version, "documents.json")).items():
                with self.subTest(name=name):
                    self.assertEqual(list(lacks(old, new[name])), [])

    def test_disks_of_each_version_are_written_without_new_features(self):
        for _, here in self.each():
            def features():
                shown = bcow("inspect", "disk.bcow", "--json", cwd=here).out
                return json.loads(shown)["format"]["feature_masks"]

            def content():
                bcow("export", "disk.bcow", "--to", "raw", "-o", "made/raw", cwd=here)
                return frozen.tree.content(f"{here}/made/raw")[0]
            before = features(), content()
            frozen.write_disk(f"{here}/disk.bcow", "write -P 9 64k 4k", "flush")
            self.assertEqual(features(), before[0])
            self.assertNotEqual(content(), before[1])
            bcow("rollback", "disk.bcow", "late", cwd=here)
            self.assertEqual(content(), before[1])
            self.assertEqual(features(), before[0])

    def test_a_document_that_its_schema_refuses_is_found(self):
        good = {"schema": "bcow.version/1", "version": "1", "list": [1]}
        wanted = {"type": "object", "required": ["version"],
                  "properties": {"version": {"type": ["string", "null"]},
                                 "list": {"type": "array", "items": {"type": "integer"}}}}
        self.assertEqual(list(schema.problems(good, wanted)), [])
        bad = {"version": 1, "list": [True]}
        self.assertEqual(list(schema.problems(bad, wanted)),
                         [".version is 1, and not string or null",
                          ".list[0] is True, and not integer"])
        self.assertEqual(list(schema.problems({}, wanted)), [".version is missing"])

    def test_a_missing_and_a_changed_member_are_found(self):
        old = {"schema": "a/1", "list": [{"size": 1}], "kept": None}
        self.assertEqual(list(lacks(old, {**old, "added": 1, "kept": "text"})), [])
        self.assertEqual(list(lacks(old, {"schema": "a/2", "list": [{"size": "1"}]})),
                         [".schema is a/2", ".list[0].size is '1', and was 1", ".kept is missing"])


class Library(unittest.TestCase):
    def test_the_programs_of_the_guide_run(self):
        examples = os.path.join(os.path.dirname(BCOW), "examples")
        if not os.path.exists(os.path.join(examples, "print_file")):
            missing(f"no examples in {examples}; `cargo test` makes them")
        with tempfile.TemporaryDirectory(prefix="library-", dir=WORK) as directory:
            layout, image = (os.path.join(directory, name) for name in ("layout", "image.bcow"))
            frozen.image(layout)
            listed = run(os.path.join(examples, "largest_files"), layout, "tag", image).out.decode()
            size = len(frozen.LARGE)
            self.assertRegex(listed, rf"^{image}: \d+ inodes in \d+ bytes\n"
                                     rf" +{size} large\n +{size} again\n")
            shown = run(os.path.join(examples, "print_file"), image, "/large").out
            self.assertEqual(shown, frozen.LARGE)
