"""System calls that Python's standard library lacks, and calls with another user's credentials."""

import contextlib
import ctypes
import errno
import os
import struct

libc = ctypes.CDLL(None, use_errno=True)

RENAME_NOREPLACE, RENAME_EXCHANGE, RENAME_WHITEOUT = 1, 2, 4
KEEP_SIZE, PUNCH_HOLE, COLLAPSE_RANGE, ZERO_RANGE, INSERT_RANGE = 1, 2, 8, 16, 32
UTIME_NOW, UTIME_OMIT = (1 << 30) - 1, (1 << 30) - 2
AT_FDCWD, AT_SYMLINK_NOFOLLOW, AT_SYMLINK_FOLLOW = -100, 0x100, 0x400
MS_SYNC = 4
GETDENTS64, SETFSUID, SETFSGID = 217, 122, 123
IO_SETUP, IO_DESTROY, IO_GETEVENTS, IO_SUBMIT, IOCB_CMD_PWRITE = 206, 207, 208, 209, 1
ACCESS_ACL, DEFAULT_ACL = "system.posix_acl_access", "system.posix_acl_default"

libc.syscall.restype = ctypes.c_long
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def checked(result, what=None):
    """Calls a function of the C library; raises its error as an OSError."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)
    return result


def rename(old, new, flags=0):
    checked(libc.renameat2(AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new),
                           ctypes.c_uint(flags)), new)


def fallocate(fd, mode, offset, length):
    checked(libc.fallocate(fd, mode, offset, length))


def syncfs(fd):
    checked(libc.syncfs(fd))


@contextlib.contextmanager
def stopped_threads(tids):
    """Stops threads of another process by ptrace(2). At the end the process has been killed."""
    seize, interrupt, all_children = 0x4206, 0x4207, 0x40000000
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    stopped = []
    for tid in tids:
        with contextlib.suppress(ProcessLookupError):
            checked(libc.ptrace(seize, tid, None, None), f"ptrace of {tid}")
            checked(libc.ptrace(interrupt, tid, None, None), f"ptrace of {tid}")
            os.waitpid(tid, all_children)
            stopped.append(tid)
    try:
        yield
    finally:
        for tid in stopped:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(tid, all_children)


def utimens(path, atime, mtime, follow=True):
    """Sets times; each is nanoseconds, "now" (UTIME_NOW), or None (no change)."""
    def spec(time):
        if time is None:
            return 0, UTIME_OMIT
        return (0, UTIME_NOW) if time == "now" else divmod(time, 10 ** 9)

    times = struct.pack("qqqq", *spec(atime), *spec(mtime))
    checked(libc.utimensat(AT_FDCWD, os.fsencode(path), times,
                           0 if follow else AT_SYMLINK_NOFOLLOW), path)


def link_descriptor(fd, new):
    """Links an open file, even one that never had a name."""
    checked(libc.linkat(AT_FDCWD, f"/proc/self/fd/{fd}".encode(), AT_FDCWD, os.fsencode(new),
                        AT_SYMLINK_FOLLOW), new)


def directory_entries(fd, room):
    """One getdents64 with a buffer of this size: a list of (name, inode, type), empty at the
    end."""
    buffer = ctypes.create_string_buffer(room)
    length = checked(libc.syscall(GETDENTS64, fd, buffer, room))
    entries, at = [], 0
    while at < length:
        inode, _, size, kind = struct.unpack_from("QqHB", buffer.raw, at)
        name = buffer.raw[at + 19:at + size].split(b"\0", 1)[0]
        entries.append((os.fsdecode(name), inode, kind))
        at += size
    return entries


class Control(ctypes.Structure):
    """One request of asynchronous I/O (struct iocb)."""

    _fields_ = [("data", ctypes.c_uint64), ("key", ctypes.c_uint32), ("rw_flags", ctypes.c_int),
                ("opcode", ctypes.c_uint16), ("priority", ctypes.c_int16), ("fd", ctypes.c_uint32),
                ("buffer", ctypes.c_uint64), ("length", ctypes.c_uint64),
                ("offset", ctypes.c_int64), ("reserved", ctypes.c_uint64),
                ("flags", ctypes.c_uint32), ("event_fd", ctypes.c_uint32)]


class Event(ctypes.Structure):
    """The result of one request (struct io_event)."""

    _fields_ = [("data", ctypes.c_uint64), ("control", ctypes.c_uint64), ("result", ctypes.c_int64),
                ("result2", ctypes.c_int64)]


class AsynchronousWrites:
    """Asynchronous writes: submitted together (io_submit), completed later (io_getevents)."""

    def __init__(self, most):
        self.most, self.pending, self.context = most, {}, ctypes.c_ulong()
        checked(libc.syscall(IO_SETUP, most, ctypes.byref(self.context)))

    def submit(self, fd, buffer, pieces):
        """Writes pieces (offset, length) of a buffer, a writable mapping, each at its own offset in
        the file."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        controls = [Control(data=offset, opcode=IOCB_CMD_PWRITE, fd=fd, buffer=address + offset,
                            length=length, offset=offset) for offset, length in pieces]
        addresses = (ctypes.c_void_p * len(controls))(*map(ctypes.addressof, controls))
        done = checked(libc.syscall(IO_SUBMIT, self.context, ctypes.c_long(len(controls)),
                                    addresses))
        self.pending.update((control.data, control.length) for control in controls[:done])
        return done

    def wait(self):
        """Waits for all. Fails unless each wrote its whole piece."""
        events = (Event * self.most)()
        while self.pending:
            count = checked(libc.syscall(IO_GETEVENTS, self.context, ctypes.c_long(1),
                                         ctypes.c_long(self.most), events, None))
            for event in events[:count]:
                if event.result != self.pending.pop(event.data):
                    raise AssertionError(f"the write at {event.data} ended with {event.result}")

    def close(self):
        checked(libc.syscall(IO_DESTROY, self.context))


@contextlib.contextmanager
def acting_as(uid, gid, umask=0o022):
    """Runs a with block with the file-system credentials of another user, without capabilities."""
    before = os.umask(umask)
    groups = os.getgroups()
    if uid:
        os.setgroups([])
        libc.syscall(SETFSGID, gid)
        libc.syscall(SETFSUID, uid)
    try:
        yield
    finally:
        if uid:
            libc.syscall(SETFSUID, 0)
            libc.syscall(SETFSGID, 0)
            os.setgroups(groups)
        os.umask(before)


def acl(*entries):
    """The bytes of a POSIX ACL with (tag, permissions, id) entries."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


NO_ID = 0xFFFFFFFF
USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER = 1, 2, 4, 8, 16, 32


def simple_acl(owner, group, other, mask=None, users=(), groups=()):
    entries = [(USER_OBJ, owner, NO_ID)] + [(USER, bits, uid) for uid, bits in users]
    entries += [(GROUP_OBJ, group, NO_ID)] + [(GROUP, bits, gid) for gid, bits in groups]
    if mask is not None:
        entries.append((MASK, mask, NO_ID))
    return acl(*entries, (OTHER, other, NO_ID))


def name_of(code):
    """The name of an errno; of two names for one number, the one that file systems use."""
    return "EOPNOTSUPP" if code == errno.EOPNOTSUPP else errno.errorcode[code]


def code_of(function, *arguments, **options):
    """The name of the errno that a call raises, or None."""
    try:
        function(*arguments, **options)
    except OSError as error:
        return name_of(error.errno)
    return None
