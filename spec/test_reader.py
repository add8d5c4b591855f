#!/usr/bin/env python3
"""Tests of reader.py against the vectors, and of the vectors against their generator.

    python3 spec/test_reader.py

Without a zstd module the tests skip the vectors that need one, and report this.
"""

import hashlib
import io
import json
import os
import random
import sys
import tempfile
import unittest
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

HERE = Path(__file__).resolve().parent
VECTORS = HERE.parent / "fixtures" / "vectors"
sys.dont_write_bytecode = True
sys.path[:0] = [str(HERE), str(VECTORS)]

import generate  # noqa: E402
import reader  # noqa: E402

CODES = set("not-bcow version header-crc header-field unknown-feature truncated root-crc "
            "root-entry table-crc table-header table-entry block-crc block-data metadata-crc "
            "metadata-json backing-crc backing-entry "
            "window-range merkle record free-list overlap".split())
NEEDS_ZSTD = {
    "valid/zstd-checksum",
    "valid/zstd-compressed-block",
    "invalid/block-data-checksum-wrong",
    "invalid/block-data-compressed-block-without-table",
}


def run(*arguments):
    """Exit code, standard output and standard error of a command."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = reader.main([str(argument) for argument in arguments])
        except SystemExit as exit:
            code = exit.code
    return code, out.getvalue(), err.getvalue()


def vectors(folder):
    for path in sorted((VECTORS / folder).glob("*.bcow")):
        if reader.zstd_library() is not None or f"{folder}/{path.stem}" not in NEEDS_ZSTD:
            yield path


class Crc(unittest.TestCase):
    def test_of_the_digits_is_that_of_the_text(self):
        self.assertEqual(reader.crc32c(b"123456789"), 0xE3069283)

    def test_folded_equals_bytewise(self):
        source = random.Random(1)
        for length in [*range(0, 1200, 13), 4096, 65535, 65536, 65537, 200001]:
            data = source.randbytes(length)
            self.assertEqual(reader.crc32c(data), generate.crc32c(data), length)

    def test_fold_is_a_multiple_of_the_polynomial(self):
        reflected = int(f"{0x11EDC6F41:b}"[::-1], 2)
        value = 1 | sum(1 << term for term in reader.FOLD)
        while value.bit_length() > 32:
            value ^= reflected << (value.bit_length() - 33)
        self.assertEqual(value, 0)


class Vectors(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.TemporaryDirectory()
        self.addCleanup(self.directory.cleanup)
        self.out = Path(self.directory.name) / "out"

    def test_zstd_module_is_there(self):
        if reader.zstd_library() is None:
            self.assertFalse(os.environ.get("CI"), "CI lacks the zstd module")
            self.skipTest(f"no zstd module: {len(NEEDS_ZSTD)} vectors are not tested")

    def test_valid_files_are_accepted(self):
        for path in vectors("valid"):
            with self.subTest(path.stem):
                self.assertEqual(run("check", path), (0, "ok\n", ""))
                self.assertEqual(run("info", path)[0], 0)
                if path.stem not in ("backing-by-name-unused", "backing-name-with-identity"):
                    self.assertEqual(run("check", path, "--store", VECTORS / "valid/store"),
                                     (0, "ok\n", ""))

    def test_maps_are_as_expected(self):
        for path in vectors("valid"):
            with self.subTest(path.stem):
                code, out, _ = run("map", path)
                self.assertEqual((code, out), (0, path.with_suffix(".map").read_text()))

    def test_maps_cover_the_address_space(self):
        for path in vectors("valid"):
            header, *lines = path.with_suffix(".map").read_text().splitlines()
            end = 0
            for line in lines:
                lba, length = map(int, line.split()[:2])
                self.assertEqual(lba, end, path.stem)
                end += length
            self.assertIn(f" size={end} ", header)

    def test_content_is_as_expected(self):
        for path in vectors("valid"):
            with self.subTest(path.stem):
                self.assertEqual(
                    run("extract", path, self.out, "--store", VECTORS / "valid/store")[0], 0)
                digest = hashlib.sha256(self.out.read_bytes()).hexdigest()
                self.assertEqual(digest + "\n", path.with_suffix(".sha256").read_text())

    def test_invalid_files_are_rejected_with_their_code(self):
        for path in vectors("invalid"):
            with self.subTest(path.stem):
                code, out, err = run("check", path)
                wanted = path.with_suffix(".code").read_text().strip()
                self.assertEqual((code, out.split()[:1]), (1, [wanted]), err)
                self.assertTrue(err.startswith(f"{wanted}: "))

    def test_every_code_has_an_invalid_file(self):
        found = {path.read_text().strip() for path in (VECTORS / "invalid").glob("*.code")}
        self.assertEqual(found, CODES)

    def test_refused_backings(self):
        for path in vectors("refused"):
            with self.subTest(path.stem):
                self.assertEqual(run("check", path)[:2], (0, "ok\n"))
                code, _, err = run("extract", path, self.out, "--store", VECTORS / "refused/store")
                self.assertEqual((code, err.split(":")[0]),
                                 (1, path.with_suffix(".code").read_text().strip()))
                self.assertFalse(self.out.exists())

    def test_backing_is_not_opened_without_permission(self):
        for path in (VECTORS / "valid/backing-absent.bcow", VECTORS / "valid/windows.bcow"):
            self.assertEqual(run("extract", path, self.out)[0], 2)
            self.assertEqual(os.listdir(self.directory.name), [])

    def test_generator_gives_what_is_committed(self):
        wanted = generate.vectors()
        found = {
            str(path.relative_to(VECTORS))
            for folder in ("valid", "invalid", "refused")
            for path in (VECTORS / folder).rglob("*")
            if path.is_file()
        }
        self.assertEqual(found, set(wanted))
        for name, data in wanted.items():
            self.assertEqual((VECTORS / name).read_bytes(), data, name)


class Other(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.TemporaryDirectory()
        self.addCleanup(self.directory.cleanup)
        self.path = Path(self.directory.name) / "file.bcow"
        self.out = Path(self.directory.name) / "out"

    def code_of(self, data):
        self.path.write_bytes(data)
        code, out, _ = run("check", self.path)
        return "ok" if code == 0 else out.split()[0]

    def test_usage_is_exit_code_2(self):
        self.assertEqual(run("check")[0], 2)
        self.assertEqual(run("unknown", "x")[0], 2)
        self.assertEqual(run("check", self.directory.name + "/absent")[0], 2)

    def test_every_truncation_is_rejected(self):
        data = generate.small(chunk_shift=12).build()
        for length in [*range(0, 1100, 7), *range(1100, len(data), 97), len(data) - 1]:
            self.assertIn(self.code_of(data[:length]), CODES, length)

    def test_every_changed_byte_of_an_image_is_found(self):
        # All of it is under the hash tree; only the slot that is not chosen may change.
        data = generate.small(chunk_shift=12, metadata=b"{}").build()
        for at in [*range(0, 1024), *range(1024, len(data), 41)]:
            changed = bytearray(data)
            changed[at] ^= 0x10
            code = self.code_of(changed)
            if at < 1024:
                # The reader uses the other slot, which is equal.
                self.assertEqual(code, "ok", at)
            else:
                self.assertIn(code, CODES, at)

    def test_random_damage_with_right_checks_ends_in_a_code(self):
        # Entries and header fields are changed before their checks are made.
        source = random.Random(7)
        seen = set()
        for _ in range(400):
            field = source.choice([name for name, form, _ in generate.SLOT[4:]
                                   if form != "32s" and form != "304s"])
            form = {name: form for name, form, _ in generate.SLOT}[field]
            bits = {"B": 8, "I": 32, "Q": 64}[form]
            index = source.randrange(2)
            entry = source.choice([("kind", 8), ("address", 48), ("length", 32), ("check", 32),
                                   ("reserved", 8)])
            value = source.getrandbits(source.randrange(1, entry[1] + 1))
            hooks = source.choice([{}, {"root": generate.set_entry(index, **{entry[0]: value})}])
            hooks = hooks or {"table": generate.in_table(index, **{entry[0]: value})}
            if source.randrange(2):
                hooks = {"header": {field: source.getrandbits(source.randrange(1, bits + 1))}}
            seen.add(self.code_of(generate.small(**hooks).build()))
        self.assertLessEqual(seen, CODES | {"ok"})

    def test_overlapping_stored_ranges_are_found_by_the_check_only(self):
        noise = generate.noise("o", 8192)
        whole = generate.Raw(noise)
        half = generate.set_entry(1, address=6144, check=generate.crc32c(noise[2048:6144]))
        data = generate.small(regions=[whole, generate.Raw(bytes(4096))], root=half).build()
        self.assertEqual(self.code_of(data), "overlap")
        self.assertEqual(run("extract", self.path, self.out)[0], 0)
        in_table = generate.in_table(1, kind=2, address=6144, length=4096,
                                     check=generate.crc32c(noise[2048:6144]))
        table = generate.Table(12, [generate.Zero(), generate.Zero()])
        self.assertEqual(self.code_of(generate.small(regions=[whole, table], size=16384,
                                                     table=in_table).build()), "overlap")

    def chain(self, depth):
        """A file with a chain of `depth` backings; returns the content of the lowest."""
        below = generate.File([generate.Raw(generate.noise("chain", 4096))])
        data = below.build()
        content = bytes(below.content)
        for _ in range(depth):
            (Path(self.directory.name) / hashlib.sha256(data).hexdigest()).write_bytes(data)
            data = generate.File([generate.Absent(content)],
                                 backings=[generate.by_digest(data, 4096)]).build()
        self.path.write_bytes(data)
        return content

    def test_chain_of_128_backings_reads_and_of_129_is_refused(self):
        content = self.chain(128)
        self.assertEqual(run("extract", self.path, self.out, "--store", self.directory.name)[0], 0)
        self.assertEqual(self.out.read_bytes(), content)
        self.chain(129)
        code, _, err = run("extract", self.path, self.out, "--store", self.directory.name)
        self.assertEqual((code, err.split(":")[0]), (1, "backing-entry"))

    def test_backing_by_name_is_found_in_its_directory(self):
        below = generate.File([generate.Raw(generate.noise("name", 4096))])
        (Path(self.directory.name) / "low.bcow").write_bytes(below.build())
        backing = generate.backing_entry(2, name_bytes=8, name_offset=64)
        top = generate.File([generate.Absent(below.content)], use=3, state=0, backings=[backing],
                            names=b"low.bcow")
        self.path.write_bytes(top.build())
        self.assertEqual(run("extract", self.path, self.out, "--names", self.directory.name)[0], 0)
        self.assertEqual(self.out.read_bytes(), bytes(below.content))
        self.assertEqual(run("extract", self.path, self.out, "--store", self.directory.name)[0], 2)

    def over(self, below, name):
        """An image over `below`, which its metadata calls `name`."""
        data = below.build()
        described = {"digest": f"sha256:{hashlib.sha256(data).hexdigest()}", "name": name}
        metadata = json.dumps({"backings": [described]}).encode()
        window = generate.Window(0, 0, 1, bytes(below.content))
        return generate.File([window], use=1, chunk_shift=12, metadata=metadata,
                             backings=[generate.by_digest(data, 4096)])

    def test_backing_by_digest_is_found_under_the_name_in_the_metadata(self):
        below = generate.File([generate.Raw(generate.noise("name", 4096))])
        low = Path(self.directory.name) / "low.bcow"
        low.write_bytes(below.build())
        self.path.write_bytes(self.over(below, "low.bcow").build())
        self.assertEqual(run("extract", self.path, self.out, "--names", self.directory.name)[0], 0)
        self.assertEqual(self.out.read_bytes(), bytes(below.content))
        self.assertEqual(run("extract", self.path, self.out)[0], 2)
        # Another file of that name is not used.
        low.write_bytes(generate.File([generate.Raw(generate.noise("other", 4096))]).build())
        code, _, err = run("extract", self.path, self.out, "--names", self.directory.name)
        self.assertEqual((code, err.split(":")[0]), (1, "backing-entry"))

    def test_names_in_the_metadata_that_lead_elsewhere_are_ignored(self):
        below = generate.File([generate.Raw(generate.noise("name", 4096))])
        place = Path(self.directory.name) / "below"
        place.mkdir()
        (Path(self.directory.name) / "low.bcow").write_bytes(below.build())
        for name in ("../low.bcow", str(place.parent / "low.bcow"), "..", "", "low.bcow\0", 7,
                     None):
            self.path.write_bytes(self.over(below, name).build())
            self.assertEqual(run("extract", self.path, self.out, "--names", place)[0], 2, name)

    def test_backing_by_name_that_changed_is_refused(self):
        record = generate.Record(generate.Map(0, 12, generate.Raw(generate.noise("one", 4096))))
        options = {"state": 0, "log_bytes": 4096}
        low = Path(self.directory.name) / "low.bcow"

        def extract(identity):
            backing = generate.backing_entry(2, name_bytes=8, name_offset=64, digest=identity)
            top = generate.File([generate.Absent(b"x")], use=3, state=0, backings=[backing],
                                names=b"low.bcow")
            self.path.write_bytes(top.build())
            code, _, err = run("extract", self.path, self.out, "--names", self.directory.name)
            return code, err.split(":")[0]

        def identity():
            return bytes.fromhex(json.loads(run("info", low)[1])["identity"])

        low.write_bytes(generate.File([generate.Zero()], **options).build())
        empty = identity()
        self.assertEqual(extract(empty), (0, ""))
        self.assertEqual(extract(bytes(32)), (0, ""))
        low.write_bytes(generate.File([generate.Zero()], records=[record], **options).build())
        self.assertEqual(extract(empty), (1, "backing-entry"))
        self.assertEqual(extract(identity()), (0, ""))
        # A record that does not count changes nothing.
        torn = generate.File([generate.Zero()], records=[record],
                             damage=generate.flip(("logged[1][0]", 7)), **options)
        low.write_bytes(torn.build())
        self.assertEqual(identity(), empty)
        sealed = generate.File([generate.Zero()], chunk_shift=12)
        low.write_bytes(sealed.build())
        self.assertEqual(identity(), sealed.tree_root)


if __name__ == "__main__":
    unittest.main()
