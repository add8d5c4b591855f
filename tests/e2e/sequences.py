#!/usr/bin/env python3
"""Generates sequences of layers with every effect that layers have on each other, in random order.

    sequences.py SEED            prints the layers of a sequence
    sequences.py SEED LAYOUT     writes them as an OCI layout

A sequence depends on its seed alone. Seed 0 is not random: it has every change of one type into
another, in every way to write the change. A generator proposes entries that suit the merged layers
so far; tests/oracle/overlay.py refuses entries without a valid place (a file below a file), and
they are left out.
"""

import dataclasses
import os
import random
import sys
import tempfile

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[:0] = [os.path.join(TOP, "tests", "oracle"), os.path.join(TOP, "fixtures", "oci")]
import ocilib  # noqa: E402
import overlay  # noqa: E402
from overlay import Entry  # noqa: E402

NS = ocilib.EPOCH * 10 ** 9
# Few names, so that layers change the same paths; the later names are rare.
NAMES = ([b"a", b"b", b"c", b"d", b"lib", b"usr"] * 6
         + [b"\xff\xfe", b"new\nline", b"sp ace", b"gr\xc3\xbcn", b"n" * 255, b".wh", b".whx",
            b"...", b"-", b"a:b,c", b"~"])
MODES = [0o644] * 6 + [0o600, 0o755, 0o4755, 0o2755, 0o1777, 0o6711, 0o000, 0o777]
TYPEFLAGS = {"file": ocilib.REG, "dir": ocilib.DIR, "symlink": ocilib.SYM, "char": ocilib.CHR,
             "block": ocilib.BLK, "fifo": ocilib.FIFO, "hardlink": ocilib.LINK}
ACL = ocilib.acl([(1, 7, 0xFFFFFFFF), (2, 6, 1000), (4, 4, 0xFFFFFFFF), (16, 6, 0xFFFFFFFF),
                  (32, 0, 0xFFFFFFFF)])
ACL_MODE = 0o760


def join(*parts):
    return b"/".join(part for part in parts if part)


def parent_of(path):
    return path.rpartition(b"/")[0]


def whiteout(path):
    return Entry(join(parent_of(path), b".wh." + path.rpartition(b"/")[2]))


def opaque(path):
    return Entry(join(path, b".wh..wh..opq"))


class Generator:
    def __init__(self, seed, stack):
        self.random, self.stack = random.Random(seed), stack
        self.long = seed % 50 == 7
        # The merged tree of the layers below: path -> entry of the tree's dump.
        self.below = {}

    def layers(self):
        """Proposes and unpacks the layers; yields the accepted entries of each."""
        count = self.random.randint(30, 60) if self.long else self.random.randint(2, 8)
        done = []
        for _ in range(count):
            with self.stack.mounted() as self.where:
                self.below = {os.fsencode(path): entry for path, entry in overlay.tree.dump(
                                  self.where, ghosts=True).items()}
                proposed = self.layer(done)
            done.append(self.stack.unpack(proposed))
        return done

    def layer(self, done):
        dice = self.random.random()
        if dice < 0.04:
            return []
        if dice < 0.10 and done:
            return self.random.choice(done)
        self.entries, self.fresh = [], []
        if self.random.random() < 0.15:
            self.add(self.directory(b"."))
        steps = (self.random.randint(1, 3) if self.long else self.random.randint(4, 14) if done
                 else self.random.randint(8, 24))
        for _ in range(steps):
            self.random.choice(self.STEPS)(self)
        if self.random.random() < 0.2:
            self.random.shuffle(self.entries)
        return self.entries

    def add(self, *entries):
        self.entries.extend(entries)

    # Places.

    def lower(self, *kinds):
        """A path of the merged tree, or a new one."""
        found = [path for path, entry in self.below.items()
                 if path != b"." and (not kinds or entry["type"] in kinds)]
        return self.random.choice(sorted(found)) if found else self.new()

    def folder(self):
        """A directory: the root, a lower one, one of this layer, or one that no layer lists."""
        dice = self.random.random()
        if dice < 0.2:
            return b""
        if dice < 0.6:
            return self.lower("dir")
        if dice < 0.85 and self.fresh:
            return self.random.choice(self.fresh)
        return join(self.random.choice(NAMES), self.random.choice(NAMES))

    def new(self):
        return join(self.folder(), self.random.choice(NAMES))

    def some(self):
        return self.lower() if self.random.random() < 0.6 else self.new()

    def own(self):
        mine = [entry.path for entry in self.entries
                if entry.kind not in ("dir", "hardlink") and b".wh." not in entry.path]
        return self.random.choice(mine) if mine else self.lower("file", "symlink", "char", "fifo")

    # Content and attributes.

    def content(self):
        size = self.random.choice([0, 1, 10, 100, 1000, 4095, 4096, 4097, 10000, 70000])
        if self.random.random() < 0.01:
            size = 5 << 20
        # From few seeds: content that other files and layers have too.
        return random.Random(self.random.randint(0, 5)).randbytes(size)

    def meta(self, kind):
        pick = self.random.choice
        xattrs, mode = {}, 0o777 if kind == "symlink" else pick(MODES) if kind != "dir" else pick(
            [0o755] * 4 + MODES)
        if self.random.random() < 0.3:
            xattrs[pick(["trusted.bin", "trusted.other",
                         "security.test"])] = self.random.randbytes(pick([1, 5, 300])) + b"\n"
        if kind in ("file", "dir") and self.random.random() < 0.3:
            xattrs[pick(["user.a", "user.b"])] = pick([b"1", b"value", b"\0\xff"])
        if kind == "file" and self.random.random() < 0.1:
            xattrs["security.capability"] = ocilib.capability(1 << pick([10, 13]))
        if kind in ("file", "dir") and self.random.random() < 0.08:
            xattrs["system.posix_acl_access"], mode = ACL, ACL_MODE
        if self.random.random() < 0.05:
            # A layer must not have this attribute; the judge drops it too.
            xattrs[pick(["trusted.overlay.opaque", "trusted.overlay.redirect",
                         "trusted.bcow.implicit", "trusted.bcow.link"])] = b"y"
        return {"mode": mode, "uid": pick([0] * 4 + [1, 1000, 65534, 3000000]),
                "gid": pick([0] * 4 + [1, 50, 3000000]),
                "mtime": pick([0, NS, NS + 1, NS + self.random.randrange(10 ** 9), 10 ** 9]),
                "xattrs": tuple(xattrs.items())}

    def directory(self, path):
        if path != b".":
            self.fresh.append(path)
        return Entry(path, "dir", **self.meta("dir"))

    def target(self):
        """The target of a symbolic link: inside the tree, up and down, or missing."""
        path = self.some()
        return self.random.choice([path, b"/" + path, path.rpartition(b"/")[2], b"../" + path,
                                   b"nowhere", b"."])

    def thing(self, path, kind=None):
        """An entry of some kind at a path."""
        kind = (kind or self.random.choice(["file"] * 5 + ["dir"] * 3 + ["symlink"] * 2
                                           + ["char", "block", "fifo"]))
        if kind == "dir":
            return self.directory(path)
        more = {}
        if kind == "file":
            more["data"] = self.content()
        elif kind == "symlink":
            more["link"] = self.target()
        elif kind != "fifo":
            # 0:0 is a whiteout of overlayfs.
            more["rdev"] = self.random.choice([(1, 3), (0, 1), (7, 0), (259, 300000)])
        return Entry(path, kind, **self.meta(kind), **more)

    def copy_of(self, path, to):
        return dataclasses.replace(overlay.entry_of(os.path.join(os.fsencode(self.where), path)),
                                   path=to)

    # Steps.

    def make_something(self):
        self.add(self.thing(self.new()))

    def make_folder_with_content(self):
        path = self.new()
        if self.random.random() < 0.7:
            self.add(self.directory(path))
        for _ in range(self.random.randint(0, 4)):
            self.add(self.thing(join(path, self.random.choice(NAMES))))

    def change_content(self):
        self.add(self.thing(self.lower("file"), "file"))

    def change_attributes(self):
        path = self.lower()
        if path in self.below:
            kind = self.below[path]["type"]
            if kind == "dir":
                self.add(self.directory(path))
            else:
                self.add(dataclasses.replace(self.copy_of(path, path), **self.meta(kind)))

    def change_type(self):
        path = self.lower()
        entries = [self.thing(path)]
        dice = self.random.random()
        if dice < 0.4:
            entries.insert(self.random.randint(0, 1), whiteout(path))
        if entries[-1].kind == "dir" and self.random.random() < 0.6:
            entries.append(self.thing(join(path, self.random.choice(NAMES))))
        self.add(*entries)

    def delete(self):
        self.add(whiteout(self.lower()))

    def delete_nothing(self):
        self.add(whiteout(self.new()))

    def make_opaque(self):
        path = self.lower("dir") if self.random.random() < 0.8 else self.new()
        entries = [opaque(path)]
        if self.random.random() < 0.5:
            entries.append(self.directory(path))
        for _ in range(self.random.randint(0, 3)):
            entries.append(self.thing(join(path, self.random.choice(NAMES))))
        self.random.shuffle(entries)
        self.add(*entries)

    def make_root_opaque(self):
        if self.random.random() < 0.1:
            self.add(opaque(b""))

    def link_inside(self):
        self.add(Entry(self.some(), "hardlink", link=self.own()))

    def link_below(self):
        path = self.lower("file", "symlink", "char", "block", "fifo")
        self.add(Entry(self.new(), "hardlink",
                       link=self.random.choice([b"", b"", b"./", b"/"]) + path))
        if self.random.random() < 0.3:
            self.add(Entry(self.new(), "hardlink", link=self.entries[-1].path))
        dice = self.random.random()
        if dice < 0.3:
            self.add(whiteout(path))
        elif dice < 0.6:
            # The link comes before the new object, so it refers to the lower file.
            self.add(self.thing(path))

    def link_before_target(self):
        path = self.new()
        if path not in self.below:
            self.add(Entry(self.new(), "hardlink", link=path), self.thing(path, "file"))

    def rename(self):
        """Moves a path with its whole content to another place."""
        path, to = self.lower(), self.new()
        if to.startswith(path + b"/") or path == to:
            return
        moved = [whiteout(path)]
        for old in sorted(self.below):
            if old == path or old.startswith(path + b"/"):
                new = to + old[len(path):]
                if len(new) > 1500:
                    return
                moved.append(self.copy_of(old, new))
        if self.random.random() < 0.5:
            moved.append(moved.pop(0))
        self.add(*moved)

    def symlinked_folder(self):
        """A link to a directory, and entries whose path leads through it."""
        path, to = self.new(), self.folder()
        self.add(Entry(path, "symlink",
                       link=b"/" + to if self.random.random() < 0.5 or b"/" in path else to or b".",
                       mode=0o777))
        for _ in range(self.random.randint(0, 3)):
            inside = join(path, self.random.choice(NAMES))
            self.add(self.random.choice([self.thing, whiteout])(inside))

    def through_lower_symlink(self):
        self.add(self.thing(join(self.lower("symlink"), self.random.choice(NAMES))))

    def again(self):
        """A second entry for a name of this layer."""
        if self.entries:
            path = self.random.choice(self.entries).path
            if b".wh." not in path and path != b".":
                self.add(self.thing(path))

    def smaller_folder(self):
        """A file in the place of a directory, or a directory with content in the place of a
        file."""
        path = self.lower("file", "dir")
        if path in self.below and self.below[path]["type"] == "dir":
            self.add(self.thing(path, "file"))
        else:
            self.add(self.thing(join(path, self.random.choice(NAMES))))

    STEPS = ([make_something] * 4 + [make_folder_with_content] * 3
             + [change_content, change_attributes, change_type, delete] * 2
             + [delete_nothing, make_opaque, make_root_opaque, link_inside, link_below, link_below,
                link_before_target, rename, rename, symlinked_folder, through_lower_symlink, again,
                smaller_folder])


def matrix():
    """Every type below every other type, with each way to write the change; then every change
    reverted."""
    xattrs = (("user.layer", b"0"),)
    kinds = {
        "absent": lambda path, layer: [],
        "file": lambda path, layer: [Entry(path, "file", b"layer %d" % layer, mtime=NS + layer)],
        "empty": lambda path, layer: [Entry(path, "dir", mode=0o750 + layer, mtime=NS)],
        "full": lambda path, layer: [
            Entry(path, "dir", mode=0o700, xattrs=xattrs), Entry(path + b"/%d" % layer, data=b"in"),
            Entry(path + b"/same", data=b"%d" % layer), Entry(path + b"/sub/deep/%d" % layer)],
        "implied": lambda path, layer: [Entry(path + b"/%d" % layer, data=b"in"),
                                        Entry(path + b"/sub/%d" % layer)],
        "opaque": lambda path, layer: [opaque(path), Entry(path, "dir", mode=0o711),
                                       Entry(path + b"/%d" % layer)],
        "opaque-implied": lambda path, layer: [opaque(path), Entry(path + b"/%d" % layer)],
        "opaque-empty": lambda path, layer: [opaque(path)],
        "symlink":
            lambda path, layer: [Entry(path, "symlink", link=b"../other", mode=0o777, mtime=NS)],
        "char": lambda path, layer: [Entry(path, "char", rdev=(1, 3 + layer))],
        "block": lambda path, layer: [Entry(path, "block", rdev=(7, layer))],
        "fifo": lambda path, layer: [Entry(path, "fifo", mode=0o620, uid=5)],
        "hardlink": lambda path, layer: [Entry(path, "hardlink", link=b"other/file")]}
    ways = {
        "plain": lambda path, entries: entries,
        "before": lambda path, entries: [whiteout(path)] + entries,
        "after": lambda path, entries: entries + [whiteout(path)],
        "twice": lambda path, entries: [Entry(path, "fifo")] + entries,
        "hidden": lambda path, entries: [whiteout(path), Entry(path)] + entries,
        "undone": lambda path, entries: entries + [Entry(path, "fifo", mode=0o600)],
    }
    others = [Entry(b"other", "dir"), Entry(b"other/file", data=b"linked to", uid=7, mtime=NS)]
    layers = [list(others), [], list(others[:1])]
    for one in kinds:
        for two in kinds:
            for way, write in ways.items():
                path = f"{one}-{two}-{way}".encode()
                layers[0] += kinds[one](path, 0)
                layers[1] += write(path, kinds[two](path, 1))
                layers[2] += kinds[one](path, 2)
    return layers


def build(seed, stack):
    """Unpacks the sequence of a seed into a stack; returns its layers."""
    if seed:
        return Generator(seed, stack).layers()
    return [stack.unpack(entries) for entries in matrix()]


def tar(entries):
    out = []
    for one in entries:
        path = one.path + b"/" if one.kind == "dir" else one.path
        out.append(ocilib.entry(path, TYPEFLAGS[one.kind], one.data, one.mode, one.uid, one.gid,
                                one.mtime, one.link, one.rdev, one.xattrs))
    return b"".join(out) + ocilib.END


def write_layout(layers, path, tag="t", pack=None):
    """Writes an OCI layout with one image of layers, compressed by `pack` if given; adds to an
    existing layout."""
    layout = ocilib.Layout(path)
    tars = [tar(entries) for entries in layers]
    media = (ocilib.MEDIA_TAR if pack is None
             else {ocilib.gz: ocilib.MEDIA_TAR_GZIP, ocilib.zst: ocilib.MEDIA_TAR_ZSTD}[pack])
    blobs = [layout.blob(pack(data) if pack else data, media) for data in tars]
    layout.index([(layout.manifest(blobs, [ocilib.digest_of(data) for data in tars]), tag, None)])
    return f"oci:{path}:{tag}"


def main():
    seed = int(sys.argv[1])
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        layers = build(seed, overlay.Stack(directory))
    if len(sys.argv) > 2:
        print(write_layout(layers, sys.argv[2]))
        return
    for number, entries in enumerate(layers):
        print(f"layer {number}:")
        for one in entries:
            fields = {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
            shown = {name: value if len(repr(value)) < 60 else f"{len(value)} bytes"
                           for name, value in fields.items()
                           if name not in ("path", "kind") and value != getattr(Entry(b""), name)}
            print(f"    {one.kind:8} {one.path[:60]!r} {shown or ''}")


if __name__ == "__main__":
    main()
