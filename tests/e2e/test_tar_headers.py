"""Tar archives whose headers have every form of their fields, at random: bcow reads the entries
that Python's tarfile reads.

BCOW_ROUNDS=1000 makes as many archives instead of a few, BCOW_SEED=2 others.
"""

import datetime
import hashlib
import json
import os
import random
import tarfile

from support import Scratch, bcow, need, run

ROUNDS = int(os.environ.get("BCOW_ROUNDS") or 4)
SEED = int(os.environ.get("BCOW_SEED") or 1)
ENTRIES = 150
KINDS = {tarfile.DIRTYPE: "directory", tarfile.SYMTYPE: "symlink", tarfile.CHRTYPE: "char_device",
         tarfile.BLKTYPE: "block_device", tarfile.FIFOTYPE: "fifo"}


class Archive:
    """An archive at random. Each entry is written field by field, as tarfile writes one form of
    each only."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.bytes = bytearray()
        self.files = []
        for number in range(ENTRIES):
            self.entry(number)
        self.bytes += bytes(512 * self.random.choice([2, 2, 3, 20]))

    def number(self, value, width):
        """A number in a field of this width, in one of the forms that fit."""
        forms = [b"%0*o\0" % (width - 1, value), b"%*o\0" % (width - 1, value),
                 b"%0*o " % (width - 1, value), (b"%o\0" % value).ljust(width, b"\0"),
                 (b" %o " % value).ljust(width, b" "), b"%0*o" % (width, value)]
        forms = [form for form in forms if len(form) == width]
        if width > 8 or not forms:
            forms.append(b"\x80" + value.to_bytes(width - 1, "big"))
        return self.random.choice(forms)

    def header(self, name, kind, *, mode=0o644, uid=0, gid=0, size=0, mtime=0, link=b"",
               device=(0, 0), prefix=b"", magic=b"ustar\x0000"):
        fields = [name.ljust(100, b"\0"), self.number(mode, 8), self.number(uid, 8),
                  self.number(gid, 8), self.number(size, 12), self.number(mtime, 12), b" " * 8,
                  kind, link.ljust(100, b"\0"), magic, b"root".ljust(32, b"\0"),
                  b"root".ljust(32, b"\0"), self.number(device[0], 8), self.number(device[1], 8),
                  prefix.ljust(155, b"\0"), bytes(12)]
        header = bytearray(b"".join(fields))
        form = self.random.choice([b"%06o\0 ", b"%07o\0", b"%06o \0", b"%6o\0 "])
        header[148:156] = form % sum(header)
        return bytes(header)

    def add(self, header, content=b""):
        self.bytes += header + content + bytes(-len(content) % 512)

    def extended(self, records):
        """The records of a PAX header."""
        text = b""
        for key, value in records.items():
            length = len(key) + len(value) + 3
            while length != len(key) + len(value) + 3 + len(str(length)):
                length = len(key) + len(value) + 3 + len(str(length))
            text += b"%d %s=%s\n" % (length, key, value)
        self.add(self.header(b"././@PaxHeader", b"x", size=len(text)), text)

    def name(self, number):
        """A name that no other entry has."""
        letters = "abcdefghij \u00e4\u4e2d-_.+"
        length = self.random.choice([0, 1, 5, 40, 60, 90, 120, 200])
        text = "".join(self.random.choice(letters) for _ in range(length))
        directory = self.random.choice(["", "", "implied/", "a/b/c/", "./", f"{'p' * 100}/"])
        last = f"{number}-{text}".encode()[:230].decode(errors="ignore").rstrip(" .")
        return (directory + last).encode()

    def entry(self, number):
        choose, roll = self.random.choice, self.random.random
        kind = choose([b"0", b"0", b"0", b"\0", b"7", b"1", b"2", b"3", b"4", b"5", b"5", b"6"])
        if kind == b"1" and not self.files:
            kind = b"0"
        name, records = self.name(number), {}
        content = b""
        if kind in (b"0", b"\0", b"7"):
            content = self.random.randbytes(choose([0, 1, 511, 512, 513, 5000]))
        fields = {"mode": self.random.randrange(0o10000), "uid": choose([0, 1, 1000, 0o7777777]),
                  "gid": choose([0, 5, 65534, 2097152]), "size": len(content),
                  "mtime": choose([0, 1, 1234567890, 0o77777777777, 1 << 34])}
        if kind in (b"3", b"4"):
            fields["device"] = (self.random.randrange(4096), self.random.randrange(1 << 20))
        link = b""
        if kind == b"2":
            link = choose([b"target", b"../up", b"/abs/x", b"t" * 90, b"l" * 100, b"m" * 300])
        if kind == b"1":
            # A hard link has the attributes of its file.
            link, fields, records = self.random.choice(self.files)
            fields, records = dict(fields, size=0), dict(records)
        elif roll() < 0.3:
            whole = self.random.randrange(1 << 33)
            records[b"mtime"] = choose([b"%d" % whole, b"%d.5" % whole, b"-%d.25" % (whole >> 8)])
        if kind != b"1" and roll() < 0.2:
            records[b"uid"], records[b"gid"] = b"3000000000", b"77"
        if kind in (b"0", b"5") and roll() < 0.2:
            records[b"SCHILY.xattr.user.note"] = self.random.randbytes(choose([1, 20]))
        if roll() < 0.1:
            records[b"comment"] = b"no meaning\nin two lines"
        if kind in (b"0", b"\0") and roll() < 0.2:
            records[b"size"], fields = b"%d" % len(content), dict(fields, size=choose([0, 7]))
        if kind not in (b"1", b"2", b"5"):
            self.files.append((name, dict(fields), {key: value for key, value in records.items()
                                                    if key != b"size"}))
        self.long(name + (b"/" if kind == b"5" and roll() < 0.7 else b""), kind, link, fields,
                  records, content)

    def long(self, name, kind, link, fields, records, content):
        """Adds an entry, in one of the forms that its name and its link fit into."""
        prefix = b""
        magic = b"ustar\x0000"
        forms = ["pax", "gnu"]
        cut = name.rfind(b"/", 0, 156)
        if len(name) <= 100:
            forms += ["plain"] * 4
        elif 0 < cut and len(name) - cut - 1 <= 100 and len(name) > cut + 1:
            forms += ["prefix"] * 4
        form = self.random.choice(forms)
        if form == "pax":
            records = {**records, b"path": name}
            name = name[:100]
        elif form == "prefix":
            prefix, name = name[:cut], name[cut + 1:]
        if len(link) > 100 and form != "gnu":
            records = {**records, b"linkpath": link}
            link = link[:100]
        if records:
            self.extended(records)
        if form == "gnu":
            magic = b"ustar  \0"
            for text, letter in ((name, b"L"), (link, b"K")):
                if len(text) > 100 or letter == b"L":
                    size = len(text) + 1
                    self.add(self.header(b"././@LongLink", letter, size=size, magic=magic),
                             text + b"\0")
            name, link = name[:100], link[:100]
        self.add(self.header(name, kind, link=link, prefix=prefix, magic=magic, **fields), content)


def by_tarfile(path):
    """The entries of an archive by their path, as tarfile reads them."""
    found = {}
    with tarfile.open(path, errors="surrogateescape") as archive:
        for member in archive:
            name = os.path.normpath("/" + member.name)
            if member.islnk():
                found[name] = found[os.path.normpath("/" + member.linkname)]
                continue
            is_file = member.isreg()
            content = archive.extractfile(member).read() if is_file else None
            xattrs = {key.removeprefix("SCHILY.xattr."):
                      value.encode(errors="surrogateescape").hex()
                      for key, value in member.pax_headers.items() if key.startswith("SCHILY")}
            device = (member.devmajor, member.devminor) if member.isdev() else None
            found[name] = {
                "type": "file" if is_file else KINDS[member.type], "mode": member.mode & 0o7777,
                "uid": member.uid, "gid": member.gid, "mtime": float(member.mtime),
                "content": hashlib.sha256(content).hexdigest() if is_file else None,
                "target": member.linkname if member.issym() else None,
                "device": device if not member.isfifo() else None, "xattrs": xattrs}
    return found


def by_bcow(image, directory):
    """The same entries, as bcow shows those of an image; the content is in the directory."""
    found = {}
    for entry in json.loads(bcow("ls", "-aR", "--json", image).out)["entries"]:
        time = entry["mtime"].removesuffix("Z")
        whole, nanoseconds = time.rsplit(".", 1)
        whole = datetime.datetime.fromisoformat(whole).replace(tzinfo=datetime.timezone.utc)
        path = entry["path"]
        is_file = entry["type"] == "file"
        if is_file:
            with open(os.path.join(directory, path.lstrip("/")), "rb") as file:
                content = hashlib.sha256(file.read()).hexdigest()
        device = entry.get("device")
        found[path] = {
            "type": entry["type"], "mode": int(entry["mode"], 8), "uid": entry["uid"],
            "gid": entry["gid"], "mtime": whole.timestamp() + int(nanoseconds) / 1e9,
            "content": content if is_file else None, "target": entry.get("target"),
            "device": (device["major"], device["minor"]) if device else None,
            "xattrs": {xattr["name"]: xattr["value_hex"] for xattr in entry.get("xattrs", [])}}
    return found


class Headers(Scratch):
    @classmethod
    def setUpClass(cls):
        need(root=True)
        super().setUpClass()

    def test_every_form_of_a_header_is_read_as_tarfile_reads_it(self):
        for seed in range(SEED * 1_000_000, SEED * 1_000_000 + ROUNDS):
            with self.subTest(seed=seed):
                archive = self.path("archive.tar", bytes(Archive(seed).bytes))
                image, tree = self.path("image.bcow"), self.path("tree")
                bcow("convert", "--force", f"tar:{archive}", image)
                bcow("extract", image, "/", tree)
                expected, found = by_tarfile(archive), by_bcow(image, tree)
                self.assertGreater(len(expected), ENTRIES - 5)
                for path, entry in expected.items():
                    self.assertEqual(entry, found.get(path), path)
                run("rm", "-rf", tree)
