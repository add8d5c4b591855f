"""Operations on a file system as plain data, and a Side that runs them and returns each result.

An operation is [name, {arguments}], so that a sequence can be printed, stored and replayed. Open
files have slots. The results of two Sides can be compared: they leave out inode numbers, current
times and all that POSIX leaves open. `Pair` checks these with both sides at hand.
"""

import errno
import hashlib
import mmap
import os
import stat
import struct
import time

import subjects
import syscalls

PAGE = 4096
# Earlier times were set by an operation; later ones are current times.
NOW_BEGINS = 1_500_000_000 * 10 ** 9
FLAGS = {name: getattr(os, name) for name
               in ("O_RDONLY", "O_WRONLY", "O_RDWR", "O_CREAT", "O_EXCL", "O_TRUNC", "O_APPEND",
                   "O_DIRECTORY", "O_NOFOLLOW", "O_DIRECT", "O_SYNC", "O_PATH", "O_NOATIME")}
VALUES = {"small": syscalls.simple_acl(6, 4, 0),
          "users": syscalls.simple_acl(7, 5, 1, mask=5, users=((1000, 7), (1001, 0)),
                                       groups=((1001, 4),)),
          "narrow": syscalls.simple_acl(6, 6, 6, mask=0, users=((1000, 6),)),
          "broken": b"\x02\0\0\0\x01\0",
          # No ACL: a capability of a program, which the kernel interprets too.
          "capability": struct.pack("<5I", 0x02000001, 1 << 10, 0, 0, 0)}
USERS = {"root": (0, 0), "alice": (1000, 1000), "bob": (1001, 1001)}


class NoSlot(Exception):
    """The slot of an operation holds no open file: both sides skip the operation."""


def value_of(tag, length):
    """The bytes that a write or an attribute of a tag has."""
    return subjects.content(tag, length)


def digest(data):
    return [len(data), hashlib.sha1(data).hexdigest()[:12]]


def time_of(nanoseconds):
    return nanoseconds if nanoseconds < NOW_BEGINS else "now"


def facts(info):
    """The attributes that must agree. A directory's size and link count are specific to its file
    system, and the kernel does not report writes to a pipe to a mount."""
    fact = {"mode": oct(info.st_mode), "uid": info.st_uid, "gid": info.st_gid}
    if not stat.S_ISFIFO(info.st_mode):
        fact["mtime"] = time_of(info.st_mtime_ns)
    if not stat.S_ISDIR(info.st_mode):
        fact |= {"nlink": info.st_nlink, "size": info.st_size}
    if stat.S_ISBLK(info.st_mode) or stat.S_ISCHR(info.st_mode):
        fact["rdev"] = [os.major(info.st_rdev), os.minor(info.st_rdev)]
    return fact


class Side:
    """One of two file systems, below a directory."""

    def __init__(self, root):
        self.root, self.files, self.lists, self.maps = root, {}, {}, {}
        # Inode numbers that the last operation saw, and its results of SEEK_DATA and SEEK_HOLE.
        self.seen = None

    def at(self, path):
        return os.path.join(self.root, path) if path != "." else self.root

    def do(self, name, arguments):
        """Runs an operation; returns ["ok", value] or ["E...", None]. Raises NoSlot without an open
        slot."""
        arguments = dict(arguments)
        user, umask = arguments.pop("user", "root"), arguments.pop("umask", 0o022)
        self.seen = None
        try:
            with syscalls.acting_as(*USERS[user], umask):
                return ["ok", getattr(self, "do_" + name)(**arguments)]
        except OSError as error:
            return [syscalls.name_of(error.errno), None]

    def file(self, slot):
        if slot not in self.files:
            raise NoSlot
        return self.files[slot]

    def drop(self, slot):
        if slot in self.files:
            os.close(self.files.pop(slot))

    def forget_all(self):
        for kept, _ in self.maps.values():
            kept.close()
        for fd in [*self.files.values(), *self.lists.values()]:
            os.close(fd)
        self.files, self.lists, self.maps = {}, {}, {}

    def stat(self, info):
        self.seen = info
        return facts(info)

    # Open files.

    def do_open(self, slot, path, flags, mode):
        bits = 0
        for flag in flags.split("|"):
            bits |= FLAGS[flag]
        fd = os.open(self.at(path), bits | os.O_NONBLOCK, mode)
        self.drop(slot)
        self.files[slot] = fd

    def do_tmpfile(self, slot, path, mode):
        fd = os.open(self.at(path), os.O_TMPFILE | os.O_RDWR, mode)
        self.drop(slot)
        self.files[slot] = fd

    def do_link_open(self, slot, new):
        syscalls.link_descriptor(self.file(slot), self.at(new))

    def do_close(self, slot):
        self.file(slot)
        self.drop(slot)

    def do_pread(self, slot, offset, length):
        return self.into_room(length, lambda room: os.preadv(self.file(slot), [room], offset))

    def do_read(self, slot, length):
        return self.into_room(length, lambda room: os.readv(self.file(slot), [room]))

    def into_room(self, length, read):
        """Reads into aligned memory, which O_DIRECT requires; returns the digest."""
        with (mmap.mmap(-1, max(length, 1)) as room, memoryview(room) as whole,
              whole[:length] as view):
            done = read(view)
            return digest(view[:done])

    def do_pwrite(self, slot, offset, tag, length):
        return self.from_room(tag, length, lambda room: os.pwritev(self.file(slot), [room], offset))

    def do_write(self, slot, tag, length):
        done = self.from_room(tag, length, lambda room: os.writev(self.file(slot), [room]))
        return [done, os.lseek(self.file(slot), 0, os.SEEK_CUR)]

    def from_room(self, tag, length, write):
        with (mmap.mmap(-1, max(length, 1)) as room, memoryview(room) as whole,
              whole[:length] as view):
            view[:] = value_of(tag, length)
            return write(view)

    def do_lseek(self, slot, offset, whence):
        return os.lseek(self.file(slot), offset, whence)

    def do_seek_hole(self, slot, offset, what):
        """A file system may choose where data and holes begin; Pair checks that the answer is
        true."""
        if not stat.S_ISREG(os.fstat(self.file(slot)).st_mode):
            raise OSError(errno.EISDIR, "only files have comparable holes")
        try:
            found = os.lseek(self.file(slot), offset,
                             os.SEEK_DATA if what == "data" else os.SEEK_HOLE)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            found = None
        finally:
            try:
                os.lseek(self.file(slot), 0, os.SEEK_SET)
            except OSError:
                pass
        self.seen = (slot, offset, what, found)

    def do_ftruncate(self, slot, size):
        os.ftruncate(self.file(slot), size)

    def do_fallocate(self, slot, mode, offset, length):
        syscalls.fallocate(self.file(slot), mode, offset, length)

    def do_fsync(self, slot):
        os.fsync(self.file(slot))

    def do_fdatasync(self, slot):
        os.fdatasync(self.file(slot))

    def do_copy_range(self, slot, offset, to, at, length):
        done, fd, other = 0, self.file(slot), self.file(to)
        # One call may copy any part; all calls together copy everything.
        while done < length:
            now = os.copy_file_range(fd, other, length - done, offset + done, at + done)
            if now == 0:
                break
            done += now
        return done

    def do_drop_pages(self, slot):
        """Drops the kernel's cache, so that the next read reaches the file system."""
        os.fsync(self.file(slot))
        os.posix_fadvise(self.file(slot), 0, 0, os.POSIX_FADV_DONTNEED)

    def do_fstat(self, slot):
        return self.stat(os.fstat(self.file(slot)))

    def do_fchmod(self, slot, mode):
        os.fchmod(self.file(slot), mode)

    def do_fchown(self, slot, uid, gid):
        os.fchown(self.file(slot), uid, gid)

    def do_syncfs(self, slot):
        syscalls.syncfs(self.file(slot))

    def do_map(self, slot, key, writable):
        """Maps the whole file and keeps the mapping."""
        size = os.fstat(self.file(slot)).st_size
        if size == 0:
            raise NoSlot
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        made = mmap.mmap(self.file(slot), size, mmap.MAP_SHARED, protection)
        if key in self.maps:
            self.maps.pop(key)[0].close()
        self.maps[key] = made, writable
        return size

    def do_map_read(self, key, offset, length):
        kept, _, end = self.mapped(key)
        return digest(kept[min(offset, end):min(offset + length, end)])

    def do_map_write(self, key, offset, tag, length, sync):
        kept, writable, end = self.mapped(key)
        length = min(length, end - offset)
        if not writable or length <= 0:
            raise NoSlot
        kept[offset:offset + length] = value_of(tag, length)
        if sync:
            start = offset // PAGE * PAGE
            kept.flush(start, offset + length - start)
        return length

    def mapped(self, key):
        """A mapping, whether it is writable, and its usable length: access past the file's end
        raises a signal."""
        if key not in self.maps:
            raise NoSlot
        kept, writable = self.maps[key]
        return kept, writable, min(len(kept), kept.size())

    # Names.

    def do_stat(self, path, follow):
        return self.stat(os.stat(self.at(path), follow_symlinks=follow))

    def do_mkdir(self, path, mode):
        os.mkdir(self.at(path), mode)

    def do_mknod(self, path, mode, rdev):
        os.mknod(self.at(path), mode, os.makedev(*rdev))

    def do_symlink(self, target, path):
        os.symlink(target, self.at(path))

    def do_readlink(self, path):
        return os.readlink(self.at(path))

    def do_link(self, path, new):
        os.link(self.at(path), self.at(new), follow_symlinks=False)

    def do_unlink(self, path):
        os.unlink(self.at(path))

    def do_rmdir(self, path):
        os.rmdir(self.at(path))

    def do_rename(self, path, new, flags):
        syscalls.rename(self.at(path), self.at(new), flags)

    def do_truncate(self, path, size):
        os.truncate(self.at(path), size)

    def do_chmod(self, path, mode):
        os.chmod(self.at(path), mode)

    def do_chown(self, path, uid, gid, follow):
        os.chown(self.at(path), uid, gid, follow_symlinks=follow)

    def do_utimens(self, path, atime, mtime, follow):
        syscalls.utimens(self.at(path), atime, mtime, follow)

    def do_access(self, path, mode):
        # With the identity of acting_as, which access(2) ignores.
        return syscalls.code_of(self.probe, path, mode)

    def probe(self, path, mode):
        fd = os.open(self.at(path), mode | os.O_NONBLOCK | os.O_NOFOLLOW)
        os.close(fd)

    def do_set_xattr(self, path, name, tag, length, flags):
        value = VALUES[tag] if tag in VALUES else value_of(tag, length)
        os.setxattr(self.at(path), name, value, flags, follow_symlinks=False)

    def do_get_xattr(self, path, name):
        return os.getxattr(self.at(path), name, follow_symlinks=False).hex()

    def do_list_xattrs(self, path):
        return sorted(os.listxattr(self.at(path), follow_symlinks=False))

    def do_remove_xattr(self, path, name):
        os.removexattr(self.at(path), name, follow_symlinks=False)

    def do_list(self, path):
        return sorted(os.listdir(self.at(path)))

    def do_statvfs(self, path):
        info = os.statvfs(self.at(path))
        sane = (info.f_bavail <= info.f_bfree <= info.f_blocks and info.f_ffree <= info.f_files
                and info.f_bsize >= 512)
        return [sane, info.f_namemax, bool(info.f_flag & os.ST_RDONLY)]

    # Directory streams, read in parts.

    def do_open_list(self, slot, path):
        fd = os.open(self.at(path), os.O_RDONLY | os.O_DIRECTORY)
        if slot in self.lists:
            os.close(self.lists.pop(slot))
        self.lists[slot] = fd

    def do_next(self, slot, room):
        """Names have no fixed order, so Pair compares them."""
        if slot not in self.lists:
            raise NoSlot
        self.seen = (slot, syscalls.directory_entries(self.lists[slot], room))

    def do_rewind(self, slot):
        if slot not in self.lists:
            raise NoSlot
        os.lseek(self.lists[slot], 0, os.SEEK_SET)

    # Whole trees.

    def entries(self):
        """Every path below the root with what lstat says, parents first, without following
        anything."""
        found = {".": os.lstat(self.root)}
        waiting = ["."]
        while waiting:
            path = waiting.pop()
            for name in os.listdir(self.at(path)):
                below = name if path == "." else f"{path}/{name}"
                found[below] = os.lstat(self.at(below))
                if stat.S_ISDIR(found[below].st_mode):
                    waiting.append(below)
        return found

    def snapshot(self):
        """Every path with all comparable attributes, and the lstat results."""
        entries, shown, read = self.entries(), {}, {}
        for path, info in entries.items():
            fact = facts(info)
            fact["xattrs"] = {name: os.getxattr(self.at(path), name, follow_symlinks=False).hex()
                                    for name
                                    in sorted(os.listxattr(self.at(path), follow_symlinks=False))}
            if stat.S_ISREG(info.st_mode):
                if info.st_ino not in read:
                    with open(self.at(path), "rb", buffering=0) as file:
                        read[info.st_ino] = digest(file.read())
                fact["content"] = read[info.st_ino]
            elif stat.S_ISLNK(info.st_mode):
                fact["target"] = os.readlink(self.at(path))
            shown[path] = fact
        return shown, entries


def settle_clock():
    """Waits for a tick of the clock that file systems take times from; a tick takes up to 10 ms."""
    time.sleep(0.012)
