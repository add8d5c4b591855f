#!/usr/bin/env python3
"""Dumps directory trees and compares them, entry by entry and attribute by attribute.

    tree.py dump DIR                     one JSON line per entry, on standard output
    tree.py diff A B                     A and B are directories, or files written by `dump`
            --ignore-xattr NAME          leave an xattr out, `NAME*` for a prefix (repeatable)
            --ignore FIELD[:PATH]        leave a field out, everywhere or for one path (repeatable)
            --limit N                    differences shown (default 40)

diff exits 0 when the trees are equal, 1 when they differ, 2 when they could not be read.

An entry has: path, type, mode (octal), uid, gid, mtime (nanoseconds), xattrs (name to hex), and,
depending on its type: size, sha256, target, rdev, nlink (not for directories), links (the names of
one inode inside the tree, if there are several). Names that are not UTF-8 keep their bytes as
Python's surrogate escapes. A field that is missing on one side is not compared, so that an
expectation written by hand need not be complete. The dump leaves out a directory's size and nlink,
which depend on the file system, and inode numbers, atime and ctime.

As a module: dump(directory) returns the entries, differences(a, b) the lines of a diff.
"""

import argparse
import hashlib
import json
import os
import stat
import sys

TYPES = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "symlink", stat.S_IFCHR: "char",
         stat.S_IFBLK: "block", stat.S_IFIFO: "fifo", stat.S_IFSOCK: "socket"}


def text(name):
    return name.decode("utf-8", "surrogateescape")


def xattrs(path):
    """All xattrs of a path itself, without a filter."""
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError as error:
        if error.errno in (95,):  # EOPNOTSUPP: this file system has none.
            return {}
        raise
    return {name: os.getxattr(path, name, follow_symlinks=False).hex() for name in sorted(names)}


def content(path):
    """The SHA-256 of a file's content, and the number of bytes."""
    digest, length = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as data:
        while chunk := data.read(1 << 20):
            digest.update(chunk)
            length += len(chunk)
    return digest.hexdigest(), length


def dump(directory, ghosts=False):
    """Every entry below a directory, itself included as `.`, by path.

    With `ghosts`, leaves out names that are listed but do not exist: overlayfs lists the whiteouts
    of a directory that only one layer has.
    """
    top = os.fsencode(directory)
    entries, inodes, hashed = {}, {}, {}

    def visit(full, path):
        info = os.lstat(full)
        kind = TYPES[stat.S_IFMT(info.st_mode)]
        entry = {"path": text(path), "type": kind, "mode": f"{stat.S_IMODE(info.st_mode):04o}",
                 "uid": info.st_uid, "gid": info.st_gid, "mtime": info.st_mtime_ns,
                 "xattrs": xattrs(full)}
        inode = (info.st_dev, info.st_ino)
        if kind != "dir":
            entry["nlink"] = info.st_nlink
            inodes.setdefault(inode, []).append(text(path))
        if kind == "file":
            entry["size"] = info.st_size
            if inode not in hashed:
                hashed[inode] = content(full)
            entry["sha256"], length = hashed[inode]
            if length != info.st_size:
                entry["read"] = length  # The content is shorter or longer than the file's size.
        elif kind == "symlink":
            entry["target"] = text(os.readlink(full))
        elif kind in ("char", "block"):
            entry["rdev"] = [os.major(info.st_rdev), os.minor(info.st_rdev)]
        entries[entry["path"]] = entry
        if kind == "dir":
            for name in sorted(os.listdir(full)):
                below = os.path.join(full, name)
                if not ghosts or os.path.lexists(below):
                    visit(below, name if path == b"." else path + b"/" + name)

    sys.setrecursionlimit(100000)
    visit(top, b".")
    for names in inodes.values():
        if len(names) > 1:
            for name in names:
                entries[name]["links"] = sorted(names)
    for entry in entries.values():
        if entry["type"] != "dir":
            entry.setdefault("links", [entry["path"]])
    return entries


def load(path):
    """Entries of a directory, or of a file that `dump` wrote."""
    if os.path.isdir(path):
        return dump(path)
    with open(path, encoding="utf-8") as lines:
        return {entry["path"]: entry for entry in map(json.loads, lines)}


def differences(a, b, ignore_xattrs=(), ignore=()):
    """One line for each difference between tree a and tree b."""
    everywhere = {rule for rule in ignore if ":" not in rule}
    somewhere = {tuple(rule.split(":", 1)) for rule in ignore if ":" in rule}

    def ignored(name):
        return any(name == rule or (rule.endswith("*") and name.startswith(rule[:-1]))
                   for rule in ignore_xattrs)

    for path in sorted(a.keys() | b.keys()):
        if path not in b:
            yield f"{path!r}: only in the first ({a[path]['type']})"
            continue
        if path not in a:
            yield f"{path!r}: only in the second ({b[path]['type']})"
            continue
        left, right = a[path], b[path]
        for field in sorted((left.keys() & right.keys()) - {"path"} - everywhere):
            if (field, path) in somewhere:
                continue
            one, two = left[field], right[field]
            if field == "xattrs":
                one = {name: value for name, value in one.items() if not ignored(name)}
                two = {name: value for name, value in two.items() if not ignored(name)}
                for name in sorted(one.keys() | two.keys()):
                    if one.get(name) != two.get(name):
                        yield (f"{path!r}: xattr {name!r}: {show(one.get(name))} became "
                               f"{show(two.get(name))}")
            elif one != two:
                yield f"{path!r}: {field}: {show(one)} became {show(two)}"
        for side, entry in (("first", left), ("second", right)):
            if "read" in entry:
                yield (f"{path!r}: {side}: size says {entry['size']}, reading gives "
                       f"{entry['read']} bytes")


def show(value):
    if value is None:
        return "nothing"
    full = repr(value)
    return full if len(full) <= 120 else full[:120] + "..."


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("dump")
    one.add_argument("directory")
    two = commands.add_parser("diff")
    two.add_argument("a")
    two.add_argument("b")
    two.add_argument("--ignore-xattr", action="append", default=[])
    two.add_argument("--ignore", action="append", default=[])
    two.add_argument("--limit", type=int, default=40)
    options = parser.parse_args()
    try:
        if options.command == "dump":
            for entry in dump(options.directory).values():
                print(json.dumps(entry))
            return 0
        a, b = load(options.a), load(options.b)
    except (OSError, ValueError) as error:
        print(f"tree.py: {error}", file=sys.stderr)
        return 2
    found = list(differences(a, b, options.ignore_xattr, options.ignore))
    for line in found[:options.limit]:
        print(line)
    if found:
        print(f"{len(found)} differences between {len(a)} and {len(b)} entries")
        return 1
    print(f"equal: {len(a)} entries")
    return 0


if __name__ == "__main__":
    sys.exit(main())
