"""Random sequences of operations on a writable mount and on a plain directory must have the same
results.

The plain directory is the model. A Generator proposes the next operation from the state of the
model; a Pair runs the operation on both sides and compares. EXCEPTIONS lists every allowed
difference.
"""

import contextlib
import os
import random
import stat

import operations
import syscalls
from operations import NoSlot, Side

# The number of slots. The last two hold files opened with O_DIRECT, whose offsets and lengths are
# aligned.
SLOTS, DIRECT = 8, 6
LIST_SLOTS = MAP_KEYS = 3
MOST_BYTES = 3 << 20
NAMES = ["a", "b", "new", "x" * 255, "\udcfe", "two words", "entry-007", "file", "sub", "hundred",
         ".wh.a", "..c"]
XATTRS = ["user.one", "user.two", "user.dir", "user." + "n" * 60, "trusted.three", "security.test",
          "user.overlay.x", "trusted.overlay.opaque", "trusted.overlay.metacopy",
          "trusted.overlay.overlay.y", "trusted.bcow.sketch", "user.bcow.x"]
WHITEOUT = os.makedev(0, 0)

# (subject, operation, answer of the model, answer of the mount): why. Answers are errno names or
# "ok".
EXCEPTIONS = {("bcow", "tmpfile", "ok", "EOPNOTSUPP"):
                  "docs/semantics.md: the library that speaks FUSE has no such request",
              ("fuse-overlayfs", "tmpfile", "ok", "EOPNOTSUPP"): "it has no O_TMPFILE",
              ("overlayfs", "set_xattr", "ok", "EOPNOTSUPP"):
                  "the process that sets attributes with overlayfs's own names has to escape them"}


class Mismatch(Exception):
    """The mount and the model answered differently."""


class Pair:
    def __init__(self, subject, model):
        self.subject, self.model, self.mount = subject, Side(model), Side(subject.where)
        # The mount's inode number of each inode of the model. The model's inodes are pinned, so
        # that no number is reused.
        self.inodes, self.pins = {}, {}
        # For each directory stream: the names that were there all the time, the names that were
        # there at any time, and the names that each side listed.
        self.lists = {}
        # The change times of the previous snapshot: path and inode -> times.
        self.times = {}
        self.compare()

    def close(self):
        self.model.forget_all()
        self.mount.forget_all()
        for fd in self.pins.values():
            os.close(fd)
        self.pins = {}

    def step(self, name, arguments):
        """Runs one operation on both sides; raises Mismatch if the results differ."""
        if name == "remount":
            return self.remount()
        if name == "compare":
            return self.compare()
        if self.kernel_keeps_time(name, arguments):
            return None
        want = self.answer(self.model, name, arguments)
        got = self.answer(self.mount, name, arguments)
        if want != got:
            key = (self.subject.name.split("+")[0], name, want[0], got[0])
            if key not in EXCEPTIONS:
                raise Mismatch(f"{name} {arguments}: expected {want}, got {got}")
            if name == "tmpfile":
                for side in (self.model, self.mount):
                    side.drop(arguments["slot"])
        elif want[0] == "ok":
            self.judge(name, arguments)
        for slot, names in self.lists.items():
            now = self.listed(slot)
            names["always"] &= now
            names["ever"] |= now
        return want[0]

    def kernel_keeps_time(self, name, arguments):
        """Whether the kernel, and no mount, decides that an operation changes no time. With
        `writeback` it keeps the times of files, and leaves them as they are if a truncation does
        not change the size (docs/shortcomings.md)."""
        if "+writeback" not in self.subject.name or name not in ("truncate", "ftruncate"):
            return False
        path = (self.model.at(arguments["path"]) if name == "truncate" else
                f"/proc/self/fd/{self.model.files.get(arguments['slot'])}")
        try:
            return os.stat(path).st_size == arguments["size"]
        except OSError:
            return False

    def answer(self, side, name, arguments):
        try:
            return side.do(name, arguments)
        except NoSlot:
            return ["left out", None]

    def judge(self, name, arguments):
        """The checks that need both sides."""
        one, two = self.model.seen, self.mount.seen
        if name in ("stat", "fstat"):
            path = (self.model.at(arguments["path"]) if name == "stat"
                    else f"/proc/self/fd/{self.model.files[arguments['slot']]}")
            self.same_inode(one, two, path, arguments.get("follow", True))
        elif name == "seek_hole":
            for side in (one, two):
                self.true_hole(*side)
        elif name in ("open_list", "rewind"):
            now = self.listed(arguments["slot"])
            self.lists[arguments["slot"]] = {"always": set(now), "ever": set(now), "model": [],
                                             "mount": []}
        elif name == "next":
            for side, seen in (("model", one), ("mount", two)):
                self.read_list(side, *seen)

    def same_inode(self, one, two, path, follow):
        if one.st_ino not in self.inodes:
            self.inodes[one.st_ino] = two.st_ino
            self.pins[one.st_ino] = os.open(path, os.O_PATH | (0 if follow else os.O_NOFOLLOW))
        elif self.inodes[one.st_ino] != two.st_ino:
            raise Mismatch(f"{path}: inode number {self.inodes[one.st_ino]} became {two.st_ino}")

    def true_hole(self, slot, offset, what, found):
        fd = os.open(f"/proc/self/fd/{self.model.files[slot]}", os.O_RDONLY)
        try:
            data = os.pread(fd, os.fstat(fd).st_size, 0)
        finally:
            os.close(fd)
        tail = data[offset:]
        if what == "data":
            right = (not tail.strip(b"\0") if found is None
                     else offset <= found < len(data) and not data[offset:found].strip(b"\0"))
        else:
            right = (not tail if found is None
                     else offset <= found <= len(data) and (found == len(data) or data[found] == 0))
        if not right:
            raise Mismatch(
                f"SEEK_{what.upper()} from {offset} found {found} in a file of {len(data)} bytes")

    def listed(self, slot):
        try:
            # Another open file description than the one in use by the stream.
            return set(os.listdir(f"/proc/self/fd/{self.model.lists[slot]}"))
        except FileNotFoundError:
            return set()

    def read_list(self, side, slot, entries):
        names = self.lists[slot]
        listed = names[side]
        listed += [name for name, _, _ in entries if name not in (".", "..")]
        invented = set(listed) - names["ever"]
        if invented:
            raise Mismatch(f"the {side} listed {sorted(invented)}, which never existed")
        if not entries:
            for name in sorted(names["always"]):
                if listed.count(name) != 1:
                    raise Mismatch(f"the {side} listed {name!r} {listed.count(name)} times, which "
                                   "existed all the time")

    def remount(self):
        self.model.forget_all()
        self.mount.forget_all()
        self.lists = {}
        self.subject.remount()

    def compare(self):
        """Compares both trees with all attributes, and which times have changed."""
        operations.settle_clock()
        (want, ours), (got, theirs) = self.model.snapshot(), self.mount.snapshot()
        found = [f"{path!r}: only in the {'model' if path in want else 'mount'}"
                 for path in sorted(want.keys() ^ got.keys())]
        for path in sorted(want.keys() & got.keys()):
            found += [
                f"{path!r}: {field}: expected {want[path].get(field)}, got {got[path].get(field)}"
                for field in sorted(want[path].keys() | got[path].keys())
                if want[path].get(field) != got[path].get(field)]
        if found:
            raise Mismatch(f"{len(found)} differences:\n" + "\n".join(found[:20]))
        for path, info in ours.items():
            self.same_inode(info, theirs[path], self.model.at(path), False)
        live = {}
        for path, info in ours.items():
            if live.setdefault(theirs[path].st_ino, info.st_ino) != info.st_ino:
                raise Mismatch(f"{path!r} has the inode number of another file")
        times = {}
        for path, info in ours.items():
            key = path, info.st_ino
            if stat.S_ISFIFO(info.st_mode):
                continue  # As in facts.
            times[key] = ((info.st_mtime_ns, info.st_ctime_ns),
                          (theirs[path].st_mtime_ns, theirs[path].st_ctime_ns))
            if key not in self.times:
                continue
            before, then = self.times[key]
            now, later = times[key]
            if (now[0] != before[0]) != (later[0] != then[0]):
                raise Mismatch(f"{path!r}: mtime {'moved' if later[0] != then[0] else 'stayed'}, "
                               "in the model it did not")
            # A mount may change a ctime more often than the model, but not less often.
            if now[1] != before[1] and later[1] == then[1]:
                raise Mismatch(f"{path!r}: ctime stayed, in the model it moved")
        self.times = times
        operations.settle_clock()


class Generator:
    """Proposes operations, which follow from the seed and from the state of the model."""

    def __init__(self, seed, pair):
        self.random, self.pair, self.number = random.Random(seed), pair, 0
        self.tag = 0

    def sequence(self, length):
        """Generates operations one by one; the caller runs each before it takes the next."""
        remounts = set(self.random.sample(range(length), self.random.randint(1, 3)))
        for number in range(length):
            if number in remounts:
                yield "compare", {}
                yield "remount", {}
                yield "compare", {}
            self.entries = self.pair.model.entries()
            make = self.random.choices(self.MAKERS, self.WEIGHTS)[0]
            name, arguments = make(self)
            # The listing process still has CAP_SYS_ADMIN, which ext4 checks; the mount checks the
            # user only.
            if self.random.random() < 0.15 and name != "list_xattrs":
                arguments["user"] = self.random.choice(["alice", "bob"])
            if self.random.random() < 0.1:
                arguments["umask"] = self.random.choice([0, 0o077, 0o027])
            yield name, arguments
        yield "compare", {}
        yield "remount", {}
        yield "compare", {}

    # What and where.

    def pick(self, *kinds):
        """An existing path, of one of these types if there is one."""
        paths = [path for path, info in self.entries.items()
                 if path != "." and (not kinds or stat.S_IFMT(info.st_mode) in kinds)
                 and (not path.startswith("many/") or self.random.random() < 0.05)]
        return self.random.choice(sorted(paths)) if paths else "a"

    def file(self):
        if self.random.random() < 0.3:
            # Large ones: partial files.
            large = [path for path, info in self.entries.items()
                     if stat.S_ISREG(info.st_mode) and info.st_size > 64 << 10]
            if large:
                return self.random.choice(sorted(large))
        return self.pick(stat.S_IFREG)

    def folder(self):
        return self.pick(stat.S_IFDIR) if self.random.random() < 0.85 else "."

    def new(self):
        folder = self.folder()
        name = self.random.choice(NAMES)
        return name if folder == "." else f"{folder}/{name}"

    def some(self, new=0.15):
        return self.new() if self.random.random() < new else self.pick()

    def slot(self):
        """A slot: most of the time one with an open file."""
        return (self.random.choice(sorted(self.pair.model.files) or [0])
                if self.random.random() < 0.95 else self.random.randrange(SLOTS))

    def place(self, slot):
        """An offset and a length, in and around the file of a slot."""
        try:
            size = os.fstat(self.pair.model.files[slot]).st_size
        except (KeyError, OSError):
            size = 5000
        size = min(size, MOST_BYTES)
        pick = self.random.choice
        offset = pick([0, size, self.random.randint(0, size), self.random.randint(0, size),
                       self.random.randint(0, size) // 4096 * 4096,
                       max(0, size - self.random.randint(0, 5000)),
                       size + self.random.randint(0, 20_000)])
        length = pick([1, 7, self.random.randint(1, 4096), 4096, self.random.randint(1, 20_000),
                       16_384, self.random.randint(1, 150_000)])
        if slot >= DIRECT:
            return offset // 4096 * 4096, (length + 4095) // 4096 * 4096
        return offset, length

    def mode(self):
        return self.random.choice([0o644, 0o600, 0o755, 0o777, 0o666, 0, 0o4755, 0o2755, 0o6777,
                                   0o1777, 0o2644])

    def owner(self):
        """A new owner and a new group; at least one of them is set, since the effect of chown(-1,
        -1) on ctime is an exception."""
        pick = self.random.choice
        return pick([{"uid": pick([0, 1000, 1001, 70_000]), "gid": pick([-1, 0, 1000, 1001])},
                     {"uid": -1, "gid": pick([0, 1000, 1001])}])

    def time(self):
        return self.random.choice([None, "now", 0, 1,
                                   operations.NOW_BEGINS - 1 - self.random.randrange(10 ** 18),
                                   10 ** 18 + 5])

    def fresh(self):
        self.tag += 1
        return self.tag

    # Operations.

    def open(self):
        slot = self.random.randrange(SLOTS)
        flags = [self.random.choice(["O_RDONLY", "O_WRONLY", "O_RDWR", "O_RDWR", "O_RDWR"])]
        chance = self.random.random
        path = self.file() if chance() < 0.8 else self.some(0.5)
        if chance() < 0.35:
            flags.append("O_CREAT")
            if chance() < 0.3:
                flags.append("O_EXCL")
            if chance() < 0.6:
                path = self.new()
        flags += [flag for flag, how in (("O_TRUNC", 0.1), ("O_APPEND", 0.15), ("O_NOFOLLOW", 0.1),
                                         ("O_SYNC", 0.05), ("O_DIRECTORY", 0.02)) if chance() < how]
        if slot >= DIRECT:
            # Without O_APPEND, which would write at the end of the file, aligned or not.
            flags = [flag for flag in flags if flag != "O_APPEND"] + ["O_DIRECT"]
        return "open", {"slot": slot, "path": path, "flags": "|".join(flags), "mode": self.mode()}

    def tmpfile(self):
        return ("tmpfile",
                {"slot": self.random.randrange(DIRECT), "path": self.folder(), "mode": self.mode()})

    def link_open(self):
        return "link_open", {"slot": self.slot(), "new": self.new()}

    def on_slot(self):
        return self.random.choice(["close", "fsync", "fdatasync", "drop_pages", "fstat", "fstat",
                                   "syncfs"]), {"slot": self.slot()}

    def pread(self):
        slot = self.slot()
        offset, length = self.place(slot)
        return "pread", {"slot": slot, "offset": offset, "length": length}

    def pwrite(self):
        slot = self.slot()
        offset, length = self.place(slot)
        return "pwrite", {"slot": slot, "offset": offset, "tag": self.fresh(), "length": length}

    def write(self):
        slot = self.slot()
        return "write", {"slot": slot, "tag": self.fresh(), "length": self.place(slot)[1]}

    def seek(self):
        slot = self.slot()
        if self.random.random() < 0.5:
            return "lseek", {"slot": slot, "offset": self.place(slot)[0], "whence": os.SEEK_SET}
        return ("seek_hole", {"slot": slot, "offset": self.place(slot)[0],
                              "what": self.random.choice(["data", "hole"])})

    def ftruncate(self):
        slot = self.slot()
        return "ftruncate", {"slot": slot, "size": self.place(slot)[0]}

    def fallocate(self):
        slot = self.slot()
        offset, length = self.place(slot)
        keep, punch, zero = syscalls.KEEP_SIZE, syscalls.PUNCH_HOLE, syscalls.ZERO_RANGE
        mode = self.random.choice([0, keep, punch | keep, punch | keep, punch | keep, zero,
                                   zero | keep, punch])
        return "fallocate", {"slot": slot, "mode": mode, "offset": offset, "length": length}

    def copy_range(self):
        slot, to = (min(self.slot(), DIRECT - 1) for _ in range(2))
        offset, length = self.place(slot)
        return ("copy_range", {"slot": slot, "offset": offset, "to": to, "at": self.place(to)[0],
                               "length": length})

    def map(self):
        key, slot = self.random.randrange(MAP_KEYS), self.slot()
        offset, length = self.place(slot)
        return self.random.choice(
            [("map", {"slot": slot, "key": key, "writable": self.random.random() < 0.8}),
             ("map_read", {"key": key, "offset": offset, "length": length}),
             ("map_write", {"key": key, "offset": offset, "tag": self.fresh(), "length": length,
                            "sync": self.random.random() < 0.5}),
             ("map_write",
              {"key": key, "offset": offset, "tag": self.fresh(), "length": length, "sync": True})])

    def slot_attributes(self):
        return self.random.choice([("fchmod", {"slot": self.slot(), "mode": self.mode()}),
                                   ("fchown", {"slot": self.slot(), **self.owner()})])

    def stat(self):
        return "stat", {"path": self.some(), "follow": self.random.random() < 0.5}

    def make(self):
        return self.random.choice(
            [("mkdir", {"path": self.some(0.8), "mode": self.mode()}),
             ("mkdir", {"path": self.some(0.8), "mode": self.mode()}),
             ("symlink",
              {"target": self.random.choice(["nowhere", "d0", "d0/hundred", "a", "t" * 1000, "."]),
               "path": self.some(0.8)}),
             ("mknod", {"path": self.some(0.8),
                        "mode": self.random.choice([stat.S_IFIFO, stat.S_IFCHR, stat.S_IFBLK,
                                                    stat.S_IFREG, stat.S_IFSOCK]) | self.mode(),
                        "rdev": self.random.choice([(1, 3), (0, 1), (259, 300_000)])})])

    def link(self):
        return "link", {"path": self.some(0.05), "new": self.some(0.8)}

    def unlink(self):
        return "unlink", {"path": self.some(0.05)}

    def rmdir(self):
        empty = [path for path, info in self.entries.items() if stat.S_ISDIR(info.st_mode)
                 and not any(other.startswith(path + "/") for other in self.entries)]
        return ("rmdir", {"path": self.random.choice(sorted(empty) or ["a"])
                                  if self.random.random() < 0.6 else self.some(0.05)})

    def rename(self):
        flags = self.random.choice([0, 0, 0, syscalls.RENAME_NOREPLACE, syscalls.RENAME_EXCHANGE])
        path = self.folder() if self.random.random() < 0.3 else self.some(0.05)
        return ("rename",
                {"path": path, "new": self.some(0.2 if flags == syscalls.RENAME_EXCHANGE else 0.6),
                 "flags": flags})

    def empty_folder(self):
        """Removes the content of a directory and then the directory, over some steps."""
        inside = [path for path, info in self.entries.items() if path.startswith(
                      ("d0/sub/", "setgid/", "d1/")) and not stat.S_ISDIR(info.st_mode)]
        return "unlink", {"path": self.random.choice(sorted(inside) or ["a"])}

    def attributes(self):
        return self.random.choice(
            [("chmod", {"path": self.some(0.05), "mode": self.mode()}),
             ("chown",
              {"path": self.some(0.05), **self.owner(), "follow": self.random.random() < 0.5}),
             ("utimens", {"path": self.some(0.05), "atime": self.time(), "mtime": self.time(),
                          "follow": self.random.random() < 0.5}),
             ("truncate", {"path": self.file(), "size": self.random.choice(
                               [0, 1, 4096, 50_000, self.random.randint(0, 500_000)])})])

    def xattr(self):
        path, name = self.some(0.03), self.random.choice(XATTRS)
        which = self.random.choice(["set", "set", "set", "acl", "capability", "get", "list",
                                    "remove"])
        if which == "set":
            return ("set_xattr",
                    {"path": path, "name": name, "tag": self.fresh(),
                     "length": self.random.choice([0, 1, 20, 200]),
                     "flags": self.random.choice([0, 0, 0, os.XATTR_CREATE, os.XATTR_REPLACE])})
        if which == "acl":
            return ("set_xattr",
                    {"path": path, "name": self.random.choice(
                         [syscalls.ACCESS_ACL, syscalls.ACCESS_ACL, syscalls.DEFAULT_ACL]),
                     "tag": self.random.choice(["small", "users", "narrow", "broken"]), "length": 0,
                     "flags": 0})
        if which == "capability":
            return ("set_xattr", {"path": self.file(), "name": "security.capability",
                                  "tag": "capability", "length": 0, "flags": 0})
        if which == "list":
            return "list_xattrs", {"path": path}
        if self.random.random() < 0.5:
            names = []
            # The path may be new; and of several processes, another may have just removed it.
            with contextlib.suppress(OSError):
                names = os.listxattr(self.pair.model.at(path), follow_symlinks=False)
            name = self.random.choice(sorted(names) or [name])
        return ("get_xattr" if which == "get" else "remove_xattr"), {"path": path, "name": name}

    def ask(self):
        path = self.some()
        return self.random.choice([("list", {"path": self.folder()}), ("readlink", {"path": path}),
                                   ("statvfs", {"path": path}),
                                   ("access", {"path": path, "mode": self.random.choice(
                                                   [os.O_RDONLY, os.O_WRONLY, os.O_RDWR])})])

    def read_list(self):
        slot = self.random.randrange(LIST_SLOTS)
        return self.random.choice(
            [("open_list", {"slot": slot, "path": self.random.choice(["many", self.folder()])})]
            + [("next", {"slot": slot, "room": self.random.choice([300, 700, 2000, 70_000])})] * 4
            + [("rewind", {"slot": slot})])

    def crowd(self):
        """Creates and removes entries of a large directory."""
        number = self.random.randrange(160)
        path = f"many/entry-{number:03}" if "many" in self.entries else self.new()
        if path in self.entries:
            return "unlink", {"path": path}
        return "mknod", {"path": path, "mode": stat.S_IFREG | 0o644, "rdev": (0, 0)}

    MAKERS, WEIGHTS = zip((open, 14), (tmpfile, 1), (link_open, 1), (on_slot, 8), (pread, 8),
                          (pwrite, 14), (write, 4), (seek, 4), (ftruncate, 4), (fallocate, 5),
                          (copy_range, 3), (map, 6), (slot_attributes, 2), (stat, 5), (make, 7),
                          (link, 4), (unlink, 4), (rmdir, 2), (rename, 8), (empty_folder, 2),
                          (attributes, 6), (xattr, 6), (ask, 4), (read_list, 5), (crowd, 3))
