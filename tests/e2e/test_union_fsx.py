"""Partial files: large files of the lower tree under every kind of write, with each byte compared
with a copy in memory.

The fsx of crates.io begins with an empty file; a test runs it too. The operations here begin with a
lower file's content. BCOW_SKETCH_OPERATIONS=2000000 sets the number for each kind, BCOW_SEED=N the
first seed.
"""

import contextlib
import mmap
import os
import random
import tempfile

import subjects
import support
import syscalls
from promises import promise
from support import read_bytes, run, write_file
from union import LowerCase

OPERATIONS = int(os.environ.get("BCOW_SKETCH_OPERATIONS") or 12_000)
# Operations on one file before the next file: a file with every block written is no partial file
# any more.
TURN = (50, 400, 2500)
SEED = int(os.environ.get("BCOW_SEED") or 1)
SIZES = (subjects.LARGE + 1, 75 * 4096, 300_001, (1 << 20) + 4095, 2 << 20, 5_000_011, 777_777,
         150_000)
MOST_BYTES = 6 << 20
PAGE = 4096
FSX = """
flen = 1000000
[opsize]
min = 1
max = 65536
[weights]
close_open = 2
read = 10
write = 20
mapread = 10
mapwrite = 10
truncate = 5
fsync = 1
fdatasync = 1
invalidate = 1
punch_hole = 5
posix_fallocate = 3
sendfile = 2
posix_fadvise = 1
copy_file_range = 5
"""


def plant(top):
    for number, size in enumerate(SIZES):
        path = os.path.join(top, f"file-{number}")
        write_file(path, subjects.content(path[-6:], size))
        if number % 3 == 2:
            # Holes of the lower file: zeros without storage.
            with open(path, "r+b") as file:
                for at in range(50_000, size, 170_000):
                    syscalls.fallocate(file.fileno(), syscalls.PUNCH_HOLE | syscalls.KEEP_SIZE, at,
                                       60_001)
    write_file(os.path.join(top, "source"), subjects.content("source", 400_000))


class Wrong(Exception):
    """The content differs from the written content."""


class Exerciser:
    """One file, its expected content, and its last operations."""

    def __init__(self, subject, name, dice):
        self.subject, self.name, self.dice = subject, name, dice
        self.want = bytearray(read_bytes(os.path.join(subject.lower.tree, name)))
        self.source = read_bytes(os.path.join(subject.lower.tree, "source"))
        self.done, self.fd = [], None
        self.open()

    def open(self):
        self.fd = os.open(os.path.join(self.subject.where, self.name), os.O_RDWR)
        self.direct = os.open(os.path.join(self.subject.where, self.name), os.O_RDWR | os.O_DIRECT)
        self.other = os.open(os.path.join(self.subject.where, "source"), os.O_RDONLY)

    def close(self):
        for fd in (self.fd, self.direct, self.other):
            os.close(fd)

    def turn(self, count):
        try:
            for _ in range(count):
                name = self.dice.choices(self.NAMES, self.WEIGHTS)[0]
                self.done.append([name])
                getattr(self, name)()
                size = os.fstat(self.fd).st_size
                if size != len(self.want):
                    raise Wrong(f"{size} bytes instead of {len(self.want)}")
            self.whole()
            self.remount()
            self.whole()
        except (Wrong, OSError) as error:
            last = "\n".join(" ".join(map(str, one)) for one in self.done[-40:])
            raise Wrong(f"{self.name}, operation {len(self.done)}: {error}\n{last}") from error
        finally:
            self.close()

    # Each operation is recorded first, with its arguments.

    def note(self, *arguments):
        self.done[-1] += arguments

    def place(self, most=40_000):
        dice, size = self.dice, len(self.want)
        offset = dice.choice([dice.randint(0, size), dice.randint(0, size),
                              dice.randint(0, size) // PAGE * PAGE,
                              max(0, size - dice.randint(0, 9000))])
        length = dice.choice([1, dice.randint(1, 500), dice.randint(1, PAGE), PAGE,
                              dice.randint(1, 3 * PAGE), dice.randint(1, most)])
        return offset, length

    def bytes(self, length):
        return self.dice.randbytes(length)

    def same(self, offset, have, length):
        want = self.want[offset:offset + length]
        if have != want:
            at = next((n for n, (a, b) in enumerate(zip(have, want)) if a != b),
                      min(len(have), len(want)))
            raise Wrong(
                f"byte {offset + at} ({(offset + at) // PAGE} * 4096 + {(offset + at) % PAGE}): "
                f"expected {bytes(want[at:at + 8])}, "
                f"got {bytes(have[at:at + 8])}; {len(want)} bytes expected, {len(have)} read")

    def put(self, offset, data):
        if len(self.want) < offset:
            self.want.extend(bytes(offset - len(self.want)))
        self.want[offset:offset + len(data)] = data

    def read(self):
        offset, length = self.place(200_000)
        self.note(offset, length)
        self.same(offset, os.pread(self.fd, length, offset), length)

    def write(self):
        offset, length = self.place()
        if offset + length > MOST_BYTES:
            return
        self.note(offset, length)
        data = self.bytes(length)
        if os.pwrite(self.fd, data, offset) != length:
            raise Wrong("a short write")
        self.put(offset, data)

    def append(self):
        length = self.dice.randint(1, 10_000)
        if len(self.want) + length > MOST_BYTES:
            return
        self.note(len(self.want), length)
        data = self.bytes(length)
        fd = os.open(f"/proc/self/fd/{self.fd}", os.O_WRONLY | os.O_APPEND)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)
        self.put(len(self.want), data)

    def aligned(self):
        offset, length = self.place()
        return offset // PAGE * PAGE, -(-length // PAGE) * PAGE

    def read_direct(self):
        offset, length = self.aligned()
        self.note(offset, length)
        with mmap.mmap(-1, length) as room:
            done = os.preadv(self.direct, [room], offset)
            self.same(offset, room[:done], length)

    def write_direct(self):
        offset, length = self.aligned()
        if offset + length > MOST_BYTES:
            return
        self.note(offset, length)
        data = self.bytes(length)
        with mmap.mmap(-1, length) as room:
            room[:] = data
            if os.pwritev(self.direct, [room], offset) != length:
                raise Wrong("a short write")
        self.put(offset, data)

    def map_read(self):
        offset, length = self.place(200_000)
        if not self.want:
            return
        self.note(offset, length)
        with mmap.mmap(self.fd, len(self.want), mmap.MAP_SHARED, mmap.PROT_READ) as room:
            self.same(offset, room[offset:offset + length], length)

    def map_write(self):
        offset, length = self.place()
        length = min(length, len(self.want) - offset)
        if length <= 0:
            return
        flush = self.dice.random() < 0.6
        self.note(offset, length, flush)
        data = self.bytes(length)
        with mmap.mmap(self.fd, len(self.want), mmap.MAP_SHARED) as room:
            room[offset:offset + length] = data
            if flush:
                start = offset // PAGE * PAGE
                room.flush(start, offset + length - start)
        self.put(offset, data)

    def truncate(self):
        size = self.dice.choice([self.place()[0],
                                 max(0, len(self.want) - self.dice.randint(0, 9000))])
        self.note(size)
        os.ftruncate(self.fd, size)
        del self.want[size:]

    def extend(self):
        size = min(MOST_BYTES, len(self.want) + self.dice.randint(0, 100_000))
        self.note(size)
        os.ftruncate(self.fd, size)
        self.want.extend(bytes(size - len(self.want)))

    def punch(self):
        offset, length = self.place()
        self.note(offset, length)
        syscalls.fallocate(self.fd, syscalls.PUNCH_HOLE | syscalls.KEEP_SIZE, offset, length)
        end = min(offset + length, len(self.want))
        if end > offset:
            self.want[offset:end] = bytes(end - offset)

    def zero(self):
        offset, length = self.place()
        keep = self.dice.random() < 0.5
        if offset + length > MOST_BYTES:
            return
        self.note(offset, length, keep)
        syscalls.fallocate(self.fd, syscalls.ZERO_RANGE | (syscalls.KEEP_SIZE if keep else 0),
                           offset, length)
        end = min(offset + length, len(self.want)) if keep else offset + length
        if end > offset:
            self.put(offset, bytes(end - offset))

    def allocate(self):
        offset, length = self.place()
        keep = self.dice.random() < 0.5
        if offset + length > MOST_BYTES:
            return
        self.note(offset, length, keep)
        syscalls.fallocate(self.fd, syscalls.KEEP_SIZE if keep else 0, offset, length)
        if not keep and offset + length > len(self.want):
            self.want.extend(bytes(offset + length - len(self.want)))

    def copy(self):
        """Copies from one place of the file to another, or from another lower file."""
        (at, _), (offset, length) = self.place(), self.place()
        inside = self.dice.random() < 0.5
        have = self.want if inside else self.source
        length = min(length, len(have) - offset, MOST_BYTES - at)
        if length <= 0 or (inside and abs(at - offset) < length):
            return
        self.note(offset, at, length, inside)
        done = 0
        while done < length:
            now = os.copy_file_range(self.fd if inside else self.other, self.fd, length - done,
                                     offset + done, at + done)
            if now == 0:
                raise Wrong(f"copied {done} of {length} bytes")
            done += now
        self.put(at, bytes(have[offset:offset + length]))

    def holes(self):
        """A reported hole reads as zeros."""
        size = len(self.want)
        at = self.dice.randint(0, size)
        self.note(at)
        try:
            data = os.lseek(self.fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != 6:
                raise
            data = size
        if bytes(self.want[at:data]).strip(b"\0"):
            raise Wrong(f"SEEK_DATA from {at} gave {data}: data lie between")
        if at < size:
            hole = os.lseek(self.fd, at, os.SEEK_HOLE)
            if not at <= hole <= size or (hole < size and self.want[hole] != 0):
                raise Wrong(f"SEEK_HOLE from {at} gave {hole}")
            if data == hole:
                raise Wrong(f"{at} is both data and a hole")

    def sync(self):
        os.fsync(self.fd)

    def datasync(self):
        os.fdatasync(self.fd)

    def drop_pages(self):
        os.fsync(self.fd)
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def reopen(self):
        self.close()
        self.open()

    def remount(self):
        self.close()
        try:
            self.subject.remount()
        finally:
            self.open()

    def attributes(self):
        """Changes without content, between writes."""
        os.fchmod(self.fd, self.dice.choice([0o600, 0o644]))
        os.utime(self.fd, ns=(subjects.EPOCH, subjects.EPOCH + len(self.done)))
        if os.fstat(self.fd).st_mtime_ns != subjects.EPOCH + len(self.done):
            raise Wrong("the time that was set is gone")
        if self.dice.random() < 0.5:
            os.fsync(self.fd)
            if os.fstat(self.fd).st_mtime_ns != subjects.EPOCH + len(self.done):
                raise Wrong("synchronizing changed the time")

    def whole(self):
        self.done.append(["whole"])
        self.same(0, os.pread(self.fd, MOST_BYTES + 1, 0), MOST_BYTES + 1)

    NAMES, WEIGHTS = zip(("read", 12), ("write", 26), ("append", 2), ("read_direct", 3),
                         ("write_direct", 3), ("map_read", 6), ("map_write", 8), ("truncate", 1),
                         ("extend", 1), ("punch", 3), ("zero", 2), ("allocate", 2), ("copy", 5),
                         ("holes", 4), ("sync", 1), ("datasync", 1), ("drop_pages", 1),
                         ("reopen", 1.5), ("remount", 0.15), ("attributes", 1.5))


def exercise(name, lower, seed, operations):
    """Runs `count` operations on files of one subject; returns the failure, or None."""
    done, number = 0, seed * 1000
    while done < operations:
        with subjects.shown(name, lower) as subject:
            for file in random.Random(number).sample(range(len(SIZES)), len(SIZES)):
                number += 1
                dice = random.Random(number)
                count = min(dice.choice(TURN), operations - done)
                if count > 0:
                    try:
                        Exerciser(subject, f"file-{file}", dice).turn(count)
                    except Wrong as error:
                        return f"{name}, BCOW_SEED={seed}, turn {number}: {error}"
                    done += count
    return None


class Partials(LowerCase):
    kinds = (*subjects.KINDS, subjects.KERNEL)
    plant = staticmethod(plant)

    @promise("Unmounting makes all changes durable, except with `--sync volatile`.")
    def test_every_byte_is_the_written_one_or_the_lower_one(self):
        self.assert_no_failure(self.names, exercise, SEED, OPERATIONS)

    def test_the_fsx_of_crates_io_finds_no_error(self):
        """fsx truncates its file first: a lower file, and a new one."""
        support.need("fsx")
        configuration = self.path("fsx.toml", FSX.encode())
        for name in self.names:
            with subjects.shown(name, self.lower) as subject, contextlib.ExitStack() as stack:
                for file in ("file-5", "new"):
                    artifacts = stack.enter_context(tempfile.TemporaryDirectory(dir=support.WORK))
                    with self.subTest(subject=name, file=file):
                        run("fsx", "-f", configuration, "-N", str(max(2000, OPERATIONS // 10)),
                            "-S", str(SEED), "-P", artifacts, os.path.join(subject.where, file),
                            timeout=36_000)
