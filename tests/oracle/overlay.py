"""The kernel's overlayfs as the judge of merged layers.

A Stack takes layers as lists of tar entries, unpacks each into its own directory in overlayfs's
form (whiteout: a character device 0:0; opaque directory: trusted.overlay.opaque), and mounts them.
The mount shows the expected tree. The unpacker is independent of bcow. Overlayfs cannot express
some layers; the unpacker then does the following:

- A hardlink to a file of a lower layer is unpacked as a copy of that file in the mount of the lower
  layers, and recorded: the record tells which names share an inode across layers (inside a layer
  the file system has that information).
- A directory that the layer does not list gets the attributes of the same path in the mount of the
  lower layers, if the layer does not hide a directory there; otherwise mode 0755, owner root, and a
  time of 1970. (mkdir alone would give it a current time.)
- The kernel ignores an opaque mark on the root of a layer: the mount then leaves out the layers
  below it.

It needs root, and a directory on a tmpfs with xattrs: a tmpfs never reuses an inode number.
"""

import contextlib
import ctypes
import dataclasses
import os
import shutil
import stat
import time

import tree

MS_RDONLY, MNT_DETACH, ENOENT = 1, 2, 2
OPAQUE = "trusted.overlay.opaque"
# These attributes are overlayfs's own; they are never taken from an archive.
DROPPED = ("trusted.overlay.", "user.overlay.", "trusted.bcow.")
# The limit of symbolic links in one path, as in the kernel.
MAX_LINKS = 40

libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """An entry without a valid place: below a file, or a link to a missing target."""


class Circle(Refused):
    """A path that leads through too many symbolic links."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tar entry. Whiteouts and opaque marks are files with the names that OCI gives them."""

    path: bytes
    kind: str = "file"  # file, dir, symlink, char, block, fifo, hardlink
    data: bytes = b""
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    mtime: int = 0  # nanoseconds
    link: bytes = b""
    rdev: tuple = (0, 0)
    xattrs: tuple = ()  # pairs of str and bytes


UNLISTED = Entry(b"", "dir", mode=0o755)


def names_of(path):
    return [name for name in path.split(b"/") if name not in (b"", b".")]


def is_whiteout(info):
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def mount_overlay(directory, lowers, where):
    """Mounts directories that lie in `directory`, uppermost first, by their short names.

    Changes the working directory to it: mount(2) takes one page of options, and 500 absolute paths
    would not fit.
    """
    back = os.open(".", os.O_RDONLY)
    try:
        os.chdir(directory)
        data = b"lowerdir=" + b":".join(os.fsencode(name) for name in lowers)
        if len(data) >= 4096:
            raise ValueError("too many layers for one page of mount options")
        if libc.mount(b"overlay", os.fsencode(where), b"overlay", ctypes.c_ulong(MS_RDONLY),
                      data) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"overlay mount of {len(lowers)} layers: {os.strerror(code)}")
    finally:
        os.fchdir(back)
        os.close(back)


def unmount(where):
    # A process that another thread starts may hold a descriptor for a moment.
    for _ in range(200):
        if libc.umount2(os.fsencode(where), 0) == 0:
            return
        time.sleep(0.01)
    libc.umount2(os.fsencode(where), MNT_DETACH)


class Stack:
    """Layers, lowest first, above two empty directories (the minimum of overlayfs)."""

    EMPTY = ("e", "f")

    def __init__(self, directory):
        self.directory = directory
        for name in self.EMPTY:
            full = os.path.join(directory, name)
            os.makedirs(full)
            attributes(full, UNLISTED)
        os.makedirs(os.path.join(directory, "mnt"))
        self.count = 0
        # The lowest visible layer: the last one with an opaque root.
        self.lowest = 0
        # Inode of a copy -> inode of the original file.
        self.same = {}

    def path(self, layer):
        return os.path.join(self.directory, str(layer))

    @contextlib.contextmanager
    def mounted(self):
        """The merged view of all layers so far."""
        where = os.path.join(self.directory, "mnt")
        lowers = [str(layer) for layer in range(self.count - 1, self.lowest - 1, -1)]
        mount_overlay(self.directory, lowers + list(self.EMPTY), where)
        try:
            yield where
        finally:
            unmount(where)

    def unpack(self, entries):
        """Adds a layer on top; returns the accepted entries."""
        entries = list(entries)
        while True:
            layer = Layer(self)
            try:
                accepted = layer.unpack(entries)
            except UnresolvedLinks as unresolved:
                entries = [entry for entry in entries if entry not in unresolved.entries]
                shutil.rmtree(layer.top)
                continue
            break
        self.count += 1
        return accepted

    def dump(self):
        """The merged tree, in the form of tree.dump."""
        with self.mounted() as where:
            return self.dump_mounted(where)

    def dump_mounted(self, where):
        entries, groups = tree.dump(where, ghosts=True), {}
        for path, entry in entries.items():
            if entry["type"] != "dir":
                inode = os.lstat(os.path.join(os.fsencode(where), os.fsencode(path))).st_ino
                groups.setdefault(self.same.get(inode, inode), []).append(path)
        for names in groups.values():
            for path in names:
                # Not the file system's link count: hidden names of a layer do not count.
                entries[path]["nlink"] = len(names)
                entries[path]["links"] = sorted(names)
        return entries


class UnresolvedLinks(Exception):
    def __init__(self, entries):
        super().__init__()
        self.entries = entries


class Layer:
    """A layer during unpacking. A place is a tuple of names without a link among the
    directories."""

    def __init__(self, stack):
        self.stack = stack
        self.top = os.fsencode(stack.path(stack.count))
        os.mkdir(self.top)
        # Listed directories, with their attributes; all other directories are implicit.
        self.directories = {}
        # Directories with an opaque mark in them, and places that had a whiteout.
        self.marked, self.whited = set(), set()
        # Links without a target yet: place -> (entry, inode of the placeholder, target).
        self.pending = {}

    def full(self, place):
        return os.path.join(self.top, *place)

    def unpack(self, entries):
        # The mount of the layers below, made once.
        with self.stack.mounted() as self.below:
            accepted = []
            for entry in entries:
                try:
                    self.apply(entry)
                except Refused:
                    continue
                accepted.append(entry)
            self.link_pending()
            self.finish()
        return accepted

    def apply(self, entry):
        names = names_of(entry.path)
        if not names:
            if entry.kind != "dir":
                raise Refused
            self.directories[()] = entry
            return
        made = []
        try:
            # Makes missing directories, and follows links of this layer.
            parent, name = self.walk(names[:-1], made), names[-1]
            if name == b".wh..wh..opq":
                self.marked.add(parent)
            elif name.startswith(b".wh."):
                self.whiteout(parent + (name[4:],))
            else:
                self.place(entry, parent + (name,))
        except Refused:
            for place in reversed(made):
                os.rmdir(self.full(place))
                if place in self.whited:
                    os.mknod(self.full(place), stat.S_IFCHR, os.makedev(0, 0))
            raise

    def walk(self, names, made=None):
        """The place of the directory that a path leads to. With `made`, missing directories are
        made and recorded there."""
        def look(place):
            info = self.lstat(place)
            if info is None or is_whiteout(info):
                if made is None:
                    raise Refused
                if info is not None:
                    os.unlink(self.full(place))
                os.mkdir(self.full(place))
                made.append(place)
            return self.full(place)

        return follow(names, look, last=True)

    def lstat(self, place):
        try:
            return os.lstat(self.full(place))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def whiteout(self, place):
        self.whited.add(place)
        if self.lstat(place) is None:
            os.mknod(self.full(place), stat.S_IFCHR, os.makedev(0, 0))

    def place(self, entry, place):
        info = self.lstat(place)
        if entry.kind == "dir" and info is not None and stat.S_ISDIR(info.st_mode):
            self.directories[place] = entry
            return
        if entry.kind == "hardlink":
            self.hardlink(entry, place)
            return
        self.remove(place)
        full = self.full(place)
        if entry.kind == "dir":
            os.mkdir(full)
            self.directories[place] = entry
            return
        make(full, entry)

    def remove(self, place):
        info = self.lstat(place)
        if info is None:
            return
        if not stat.S_ISDIR(info.st_mode):
            os.unlink(self.full(place))
            return
        shutil.rmtree(self.full(place))
        inside = lambda other: other[:len(place)] == place
        self.directories = {at: entry for at, entry in self.directories.items() if not inside(at)}
        self.marked = {at for at in self.marked if not inside(at)}
        self.whited = {at for at in self.whited if at == place or not inside(at)}

    def own(self, target):
        """The place in this layer that a hardlink's target names, or None."""
        names = names_of(target)
        try:
            place = self.walk(names[:-1]) + (names[-1],)
        except Circle:
            raise
        except Refused:
            return None
        info = self.lstat(place)
        if info is None or is_whiteout(info):
            return None
        if stat.S_ISDIR(info.st_mode):
            raise Refused
        return place

    def is_pending(self, place):
        waiting = self.pending.get(place)
        info = self.lstat(place)
        return waiting is not None and info is not None and info.st_ino == waiting[1]

    def hardlink(self, entry, place):
        if not names_of(entry.link):
            raise Refused
        source = self.own(entry.link)
        if source is not None and not self.is_pending(source):
            self.link(source, place)
            return
        # A link to a link has the same target.
        target = entry.link if source is None else self.pending[source][2]
        # The entry is no directory in any case, and takes the place now.
        self.remove(place)
        os.close(os.open(self.full(place), os.O_CREAT | os.O_EXCL))
        self.pending[place] = (entry, self.lstat(place).st_ino, target)

    def link(self, source, place):
        if source == place:
            return
        # The source may be in a directory that the link replaces.
        aside = os.path.join(os.fsencode(self.stack.directory), b"link")
        os.link(self.full(source), aside, follow_symlinks=False)
        self.remove(place)
        os.rename(aside, self.full(place))

    def link_pending(self):
        """Resolves pending links: to a file of the lower layers, as a program that unpacks entries
        in order. Without such a file, to a later file of this layer."""
        waiting = [place for place in self.pending if self.is_pending(place)]
        for last_chance in (False, True):
            progress = True
            while progress:
                progress, rest = False, []
                for place in waiting:
                    if self.resolve(place, last_chance):
                        progress = True
                    else:
                        rest.append(place)
                waiting = rest
        if waiting:
            raise UnresolvedLinks([self.pending[place][0] for place in waiting])

    def resolve(self, place, last_chance):
        target = self.pending[place][2]
        found = file_at(target, self.below_at)
        if found is None:
            try:
                source = self.own(target)
            except Refused:
                return False
            if source is not None:
                if self.is_pending(source):
                    return False
                self.link(source, place)
                return True
            if last_chance:
                # The path may lead through a link of this layer and end in a lower layer.
                found = file_at(target, self.merged)
        if found is None:
            return False
        copied = entry_of(found)
        inode = os.lstat(found).st_ino
        self.remove(place)
        make(self.full(place), copied)
        self.stack.same[self.lstat(place).st_ino] = self.stack.same.get(inode, inode)
        return True

    def merged(self, place):
        """The path of a place of this layer or of the lower layers."""
        info = self.lstat(place)
        if info is not None and (is_whiteout(info) or self.is_pending(place)):
            raise Refused
        full = self.full(place) if info is not None else self.lower(place)
        if full is None:
            raise Refused
        return full

    def below_at(self, place):
        """The path of a place in the mount of the lower layers."""
        full = os.path.join(os.fsencode(self.below), *place)
        if not os.path.lexists(full):
            raise Refused
        return full

    def lower(self, place):
        """The path in the mount of the lower layers, unless this layer hides it."""
        for length in range(len(place) + 1):
            part = place[:length]
            if part in self.whited or (part in self.marked and length < len(place)):
                return None
            if length < len(place):
                own = self.lstat(part)
                if own is not None and not stat.S_ISDIR(own.st_mode):
                    return None
        full = os.fsencode(self.below)
        for name in place:
            if not stat.S_ISDIR(os.lstat(full).st_mode):
                return None
            full = os.path.join(full, name)
            if not os.path.lexists(full):
                return None
        return full

    def finish(self):
        """Sets the attributes of directories, after the last change in them."""
        if () in self.marked:
            self.stack.lowest = self.stack.count
        for at, _, _ in os.walk(self.top):
            place = tuple(at[len(self.top) + 1:].split(b"/")) if at != self.top else ()
            entry = self.directories.get(place)
            if entry is None:
                lower = self.lower(place)
                entry = UNLISTED
                if lower is not None and stat.S_ISDIR(os.lstat(lower).st_mode):
                    entry = entry_of(lower)
            if place in self.marked or place in self.whited:
                os.setxattr(at, OPAQUE, b"y")
            attributes(at, entry)


def follow(names, look, last=False):
    """The place that a path leads to in a tree in which `look` gives the full path of a place.
    Follows links inside of the tree; with `last` also a link at the end, and then expects a
    directory."""
    todo, at, links = list(reversed(names)), (), 0
    while todo:
        name = todo.pop()
        if name == b"..":
            at = at[:-1]
            continue
        place = at + (name,)
        full = look(place)
        mode = os.lstat(full).st_mode
        if stat.S_ISDIR(mode) or not (todo or last):
            at = place
        elif stat.S_ISLNK(mode):
            links += 1
            if links > MAX_LINKS:
                raise Circle
            target = os.readlink(full)
            if target.startswith(b"/"):
                at = ()
            todo.extend(reversed(names_of(target)))
        else:
            raise Refused
    return at


def file_at(target, look):
    """The full path of what a hardlink's target names. None for a directory, or for nothing."""
    try:
        full = look(follow(names_of(target), look))
    except Refused:
        return None
    return None if stat.S_ISDIR(os.lstat(full).st_mode) else full


def entry_of(full, path=b""):
    """An entry for a copy of an existing file, link, device or (without its content) directory."""
    info = os.lstat(full)
    kind = tree.TYPES[stat.S_IFMT(info.st_mode)]
    data = b""
    if kind == "file":
        with open(full, "rb") as source:
            data = source.read()
    xattrs = tuple((name, os.getxattr(full, name, follow_symlinks=False))
                   for name in sorted(os.listxattr(full, follow_symlinks=False)))
    return Entry(path, kind, data, stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid,
                 info.st_mtime_ns, os.readlink(full) if kind == "symlink" else b"",
                 (os.major(info.st_rdev), os.minor(info.st_rdev)) if kind in ("char", "block")
                 else (0, 0), xattrs)


def make(full, entry):
    """Makes an entry of any type except directory and hardlink."""
    if entry.kind == "file":
        with open(full, "xb") as out:
            out.write(entry.data)
    elif entry.kind == "symlink":
        os.symlink(entry.link, full)
    else:
        kind = {"char": stat.S_IFCHR, "block": stat.S_IFBLK, "fifo": stat.S_IFIFO}[entry.kind]
        os.mknod(full, kind | 0o600, os.makedev(*entry.rdev))
    attributes(full, entry)


def attributes(full, entry):
    """Owner, then mode, then xattrs: chown clears set-id bits and capabilities, chmod changes
    ACLs."""
    os.lchown(full, entry.uid, entry.gid)
    if entry.kind != "symlink":
        os.chmod(full, entry.mode)
    for name, value in entry.xattrs:
        if not name.startswith(DROPPED):
            os.setxattr(full, name, value, follow_symlinks=False)
    os.utime(full, ns=(entry.mtime, entry.mtime), follow_symlinks=False)
