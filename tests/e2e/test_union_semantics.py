"""Tests of the promises of docs/semantics.md about writable mounts; each test quotes its sentences.
Tests that need random sequences, kills, faults or another user are in the neighbouring files.
The first test checks that some test in these files quotes each promise."""

import contextlib
import errno
import fcntl
import importlib
import mmap
import os
import random
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
import unittest

import promises
import support
import syscalls
import tree
from promises import promise
from subjects import content
from support import (append_to, drop_caches, overwrite, read_bytes, run, sparse_file,
                     write_file)
from union import UnionCase

ROOT, ALICE, BOB = (0, 0), (1000, 1000), (1001, 1001)
BIG = "d2/big"
# linux/fs.h, of 64 bits.
FS_IOC_GETFLAGS, FS_IOC_SETFLAGS = 0x8008_6601, 0x4008_6602
# Space for attributes and journals of a changed file in the upper.
OVERHEAD = 32 << 10


class Page(unittest.TestCase):
    def test_every_promise_has_a_test(self):
        here = os.path.dirname(os.path.abspath(__file__))
        for name in sorted(os.listdir(here)):
            if name.startswith("test_union_"):
                importlib.import_module(name[:-3])
        self.assertGreater(len(promises.made()), 40)
        self.assertEqual(promises.untested(), [])


class Bytes(UnionCase):
    @promise("A read sees all earlier writes, through any descriptor, name or mapping. This "
             "includes descriptors and mappings that were opened for reading before the first "
             "write.")
    def test_readers_see_writes_after_their_open(self):
        for name in (BIG, "d0/hundred", "d2/three"):
            with self.subTest(name=name):
                want = self.original(name)
                reader, size = self.opened(name, os.O_RDONLY), len(want)
                with mmap.mmap(reader, size, mmap.MAP_SHARED, mmap.PROT_READ) as room:
                    self.assertEqual((os.pread(reader, size, 0), room[:]), (want, want))
                    writer = self.opened(name)
                    for offset in (0, size // 2, size - 3):
                        os.pwrite(writer, b"new", offset)
                        want[offset:offset + 3] = b"new"
                        self.assertEqual(os.pread(reader, size, 0), want)
                        self.assertEqual(room[:], want)
                    self.assertEqual(self.read(name), want)

    @promise("Opening for writing, chmod, chown, utimens, rename, link and setting extended "
             "attributes copy no file content, for files of any size.")
    def test_changes_of_metadata_copy_no_content(self):
        before = self.stored()
        os.close(self.open(BIG))
        os.close(self.open(BIG, os.O_WRONLY | os.O_APPEND))
        os.chmod(self.at(BIG), 0o640)
        os.chown(self.at(BIG), 1000, 1001)
        syscalls.utimens(self.at(BIG), 1, 2)
        os.setxattr(self.at(BIG), "user.x", b"y")
        os.link(self.at(BIG), self.at("linked"))
        os.rename(self.at(BIG), self.at("moved"))
        os.rename(self.at("d1"), self.at("d9"))
        self.assertLess(self.stored() - before, OVERHEAD)
        self.remount()
        self.assertEqual(self.read("moved"), self.original(BIG))
        self.assertEqual(self.read("linked"), self.original(BIG))
        info = os.stat(self.at("moved"))
        self.assertEqual((info.st_mode & 0o7777, info.st_uid, info.st_gid, info.st_mtime_ns,
                          info.st_nlink), (0o640, 1000, 1001, 2, 2))
        self.assertEqual(os.getxattr(self.at("linked"), "user.x"), b"y")
        self.assertEqual(self.read("d9/large"), self.original("d1/large"))

    @promise("The first write to a file of the image stores the blocks of 4 KiB that it touches. A "
             "file of up to 64 KiB is copied whole instead.")
    def test_a_write_stores_the_blocks_it_touches(self):
        want = self.original(BIG)
        before = self.stored()
        fd = self.opened(BIG)
        os.pwrite(fd, b"x", 500_000)
        os.pwrite(fd, b"yy", 8191)
        want[500_000:500_001], want[8191:8193] = b"x", b"yy"
        os.fsync(fd)
        self.assertLess(self.stored() - before, OVERHEAD + 3 * 4096)
        self.assertEqual(self.read(BIG), want)
        self.remount()
        self.assertEqual(self.read(BIG), want)
        before = self.stored()
        small = self.opened("d1/small")
        os.pwrite(small, b"x", 0)
        os.fsync(small)
        self.assertGreaterEqual(self.stored() - before, 64 << 10)

    @promise("A range that was truncated or punched out reads as zeros from then on. Content of "
             "the image does not reappear there when the file grows again.")
    def test_truncated_and_punched_content_does_not_reappear(self):
        want = self.original(BIG)
        for how in ("as it was mounted", "mounted again"):
            with self.subTest(how=how):
                fd = self.opened(BIG)
                syscalls.fallocate(fd, syscalls.PUNCH_HOLE | syscalls.KEEP_SIZE, 10_001, 50_000)
                want[10_001:60_001] = bytes(50_000)
                os.ftruncate(fd, 100_001)
                del want[100_001:]
                os.ftruncate(fd, 600_000)
                want.extend(bytes(600_000 - len(want)))
                self.assertEqual(os.pread(fd, 2 << 20, 0), want)
                os.pwrite(fd, b"far", 900_000)
                want.extend(bytes(900_000 - len(want)) + b"far")
                self.assertEqual(os.pread(fd, 2 << 20, 0), want)
                self.remount()
                self.assertEqual(self.read(BIG), want)

    @promise("`fallocate` reserves space (with or without a new file size), punches holes and "
             "zeroes ranges. Collapsing and inserting ranges fail with EOPNOTSUPP.")
    def test_fallocate(self):
        fd = self.opened(BIG)
        want = self.original(BIG)
        size = len(want)
        syscalls.fallocate(fd, syscalls.KEEP_SIZE, size, 100_000)
        self.assertEqual(os.fstat(fd).st_size, size)
        syscalls.fallocate(fd, 0, size - 10, 50_000)
        want.extend(bytes(49_990))
        syscalls.fallocate(fd, syscalls.ZERO_RANGE, 5000, 5000)
        want[5000:10_000] = bytes(5000)
        syscalls.fallocate(fd, syscalls.ZERO_RANGE | syscalls.KEEP_SIZE, len(want) - 5, 5000)
        want[-5:] = bytes(5)
        syscalls.fallocate(fd, syscalls.PUNCH_HOLE | syscalls.KEEP_SIZE, 20_000, 30_000)
        want[20_000:50_000] = bytes(30_000)
        self.assertEqual(os.pread(fd, 2 << 20, 0), want)
        for mode in (syscalls.COLLAPSE_RANGE, syscalls.INSERT_RANGE):
            self.assert_error("EOPNOTSUPP", syscalls.fallocate, fd, mode, 0, 4096)
        self.assert_error("EINVAL", syscalls.fallocate, fd, 0, 0, 0)
        self.assertEqual(os.pread(fd, 2 << 20, 0), want)

    @promise("`SEEK_DATA` and `SEEK_HOLE` report the holes of the image and the holes that "
             "programs made. Every range that they report as a hole reads as zeros.")
    def test_holes(self):
        def holes(fd):
            found, at, size = [], 0, os.fstat(fd).st_size
            while at < size:
                hole = os.lseek(fd, at, os.SEEK_HOLE)
                if hole == size:
                    break
                try:
                    at = os.lseek(fd, hole, os.SEEK_DATA)
                except OSError:
                    at = size
                found.append((hole, at))
            return found

        with open(self.below("d2/holes"), "rb") as lower:
            known = holes(lower.fileno())
        self.assertEqual(holes(self.opened("d2/holes", os.O_RDONLY)), known)
        fd, want = self.opened("d2/holes"), self.original("d2/holes")
        os.pwrite(fd, b"x", 0)
        want[0:1] = b"x"
        syscalls.fallocate(fd, syscalls.PUNCH_HOLE | syscalls.KEEP_SIZE, 500_000 // 4096 * 4096,
                           16_384)
        want[499_712:516_096] = bytes(16_384)
        made = holes(fd)
        for begin, end in made:
            self.assertEqual(want[begin:end].strip(b"\0"), b"")
        # The holes of the image, except for the end of a written block, and the new hole.
        for begin, end in known:
            self.assertTrue(any(first <= begin + 4096 and end - 4096 <= last
                                for first, last in made), (begin, end, made))
        self.assertTrue(any(first <= 500_000 and 515_000 <= last for first, last in made), made)
        self.assert_error("ENXIO", os.lseek, fd, len(want), os.SEEK_DATA)

    @promise("Appending is atomic: if several programs append to a file at the same time, the file "
             "contains every append, each in one piece.")
    def test_appending(self):
        name, pieces, size = "d2/three", 300, 100
        writers = []
        for number in range(4):
            program = (
                f"import os\nfd = os.open({self.at(name)!r}, os.O_WRONLY | os.O_APPEND)\n"
                f"for n in range({pieces}): os.write(fd, b'%d%03d' % ({number}, n) * {size // 4})")
            writers.append(subprocess.Popen([sys.executable, "-c", program]))
        self.assertEqual([writer.wait() for writer in writers], [0] * 4)
        before, have = self.original(name), self.read(name)
        self.assertEqual(have[:len(before)], before)
        tail = have[len(before):]
        found = sorted(tail[at:at + size] for at in range(0, len(tail), size))
        self.assertEqual(found, sorted(b"%d%03d" % (number, n) * (size // 4) for number in range(4)
                                       for n in range(pieces)))

    @promise("Shared mappings are writable and coherent with `read` and `write`, and `msync` makes "
             "their changes durable. Writing to a program that is running fails with ETXTBSY.")
    def test_mappings(self):
        fd, want = self.opened(BIG), self.original(BIG)
        with mmap.mmap(fd, len(want), mmap.MAP_SHARED) as room:
            room[70_000:70_005] = b"abcde"
            want[70_000:70_005] = b"abcde"
            self.assertEqual(os.pread(fd, 10, 69_999), want[69_999:70_009])
            os.pwrite(fd, b"XYZ", 70_001)
            want[70_001:70_004] = b"XYZ"
            self.assertEqual(room[69_999:70_009], want[69_999:70_009])
            room[4096 * 9 - 2:4096 * 9 + 2] = b"edge"
            want[4096 * 9 - 2:4096 * 9 + 2] = b"edge"
            room.flush()
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self.assertEqual(os.pread(fd, len(want), 0), want)
        self.remount()
        self.assertEqual(self.read(BIG), want)
        shutil.copy("/bin/sleep", self.at("sleeper"))
        running = subprocess.Popen([self.at("sleeper"), "60"])
        self.addCleanup(running.wait)
        self.addCleanup(running.kill)
        self.assert_error("ETXTBSY", self.open, "sleeper", os.O_WRONLY)

    @promise("`O_DIRECT` works with any alignment.")
    def test_direct(self):
        fd, want = self.opened(BIG, os.O_RDWR | os.O_DIRECT), self.original(BIG)
        with mmap.mmap(-1, 8192) as room:
            room[:] = b"d" * 8192
            self.assertEqual(os.pwritev(fd, [room], 4096), 8192)
            want[4096:12_288] = b"d" * 8192
            self.assertEqual(os.preadv(fd, [room], 8192), 8192)
            self.assertEqual(room[:], want[8192:16_384])
        os.pwrite(fd, b"odd", 333_333)
        want[333_333:333_336] = b"odd"
        self.assertEqual(os.pread(fd, 1000, 333_000), want[333_000:334_000])
        self.assertEqual(self.read(BIG), want)

    @promise("`copy_file_range` copies between any two files of the mount.")
    def test_copying(self):
        source, to = self.opened(BIG, os.O_RDONLY), self.opened("d1/odd")
        want, data = self.original("d1/odd"), self.original(BIG)

        def copy(one, at, other, into, length):
            done = 0
            while done < length:
                done += os.copy_file_range(one, other, length - done, at + done, into + done)

        copy(source, 12_345, to, 6789, 50_000)
        want[6789:56_789] = data[12_345:62_345]
        copy(source, 0, to, len(want), 100)
        want += data[:100]
        copy(to, 0, to, 70_000, 20_000)
        want[70_000:90_000] = want[:20_000]
        self.write("new")
        new = self.opened("new")
        copy(to, 0, new, 0, len(want))
        self.assertEqual((self.read("d1/odd"), self.read("new"), self.read(BIG)),
                         (want, want, data))

    @promise("An unlinked file exists until its last descriptor is closed. Its space is then free.")
    def test_files_without_a_name(self):
        empty = self.stored()
        for name in (BIG, "d0/hundred", "new"):
            with self.subTest(name=name):
                want = self.original(name) if name != "new" else bytearray(b"n" * 200_000)
                if name == "new":
                    self.write(name, want)
                reader, fd = self.open(name, os.O_RDONLY), self.open(name)
                os.pwrite(fd, b"before", 10)
                os.unlink(self.at(name))
                self.assertEqual(os.fstat(fd).st_nlink, 0)
                os.pwrite(fd, b"after", 50)
                want[10:16], want[50:55] = b"before", b"after"
                os.fsync(fd)
                os.fchmod(fd, 0o600)
                self.write(name, b"another")
                self.assertEqual(os.pread(reader, 2 << 20, 0), want)
                os.ftruncate(fd, 20)
                self.assertEqual((os.pread(reader, 100, 0), self.read(name)),
                                 (want[:20], b"another"))
                os.close(fd)
                os.close(reader)
                os.unlink(self.at(name))
        self.remount()
        self.assertLess(self.stored() - empty, OVERHEAD)

    def test_flags_of_files_are_refused(self):
        """docs/shortcomings.md says so."""
        fd = self.opened(BIG)
        for request in (FS_IOC_GETFLAGS, FS_IOC_SETFLAGS):
            self.assertIn(syscalls.code_of(fcntl.ioctl, fd, request, bytearray(8)),
                          ("ENOTTY", "EOPNOTSUPP"))

    @promise("`O_TMPFILE` fails with EOPNOTSUPP. Programs then create a named file and unlink it.")
    def test_unnamed_files(self):
        self.assert_error("EOPNOTSUPP", os.open, self.where, os.O_TMPFILE | os.O_RDWR, 0o600)
        with tempfile.TemporaryFile(dir=self.where) as file:
            file.write(b"x")
        self.assertNotIn("x", os.listdir(self.where))


class Remounts(UnionCase):
    """What a program sees right before and after mounts."""

    def test_a_place_is_either_data_or_a_hole_right_after_a_remount(self):
        names = ["d2/holes", "d2/hollow", BIG, "d1/large", "new"]
        self.write("new", b"x")
        for round_ in range(8):
            for at, name in enumerate(names):
                size = os.stat(self.at(name)).st_size
                fd = self.opened(name)
                place = (round_ * 30_000 + at * 7000) % size
                os.pwrite(fd, b"y" * 5000, place)
                syscalls.fallocate(fd, syscalls.PUNCH_HOLE | syscalls.KEEP_SIZE, 0,
                                   4096 * round_ + 1)
            self.remount()
            for name in names:
                fd = self.opened(name, os.O_RDONLY)
                size = os.fstat(fd).st_size
                for place in {*range(0, size, 20_000), size - 1}:
                    hole = os.lseek(fd, place, os.SEEK_HOLE)
                    try:
                        data = os.lseek(fd, place, os.SEEK_DATA)
                    except OSError as error:
                        if error.errno != errno.ENXIO:
                            raise
                        data = size
                    with self.subTest(name=name, place=place, round=round_):
                        self.assertEqual(place, min(data, hole))
                        self.assertNotEqual(data, hole)

    def test_a_mount_that_no_program_uses_is_never_busy(self):
        """umount(8), right after the last file is closed, by this process and by others."""
        names = ("d0/hundred", "d2/holes", BIG, "d1/large", "top")
        for round_ in range(40):
            for name in names:
                overwrite(self.at(name), 5000 * round_ % 90_000, b"x" * 10)
                self.write(f"new-{os.path.basename(name)}", b"y" * 5000)
            support.run("cat", *map(self.at, names))
            support.run("umount", self.where)
            self.mount.ended()
            self.mount.mount()


class VolatileRemounts(Remounts):
    kind = "bcow+sync=volatile"


class AsynchronousWriting(UnionCase):
    """Writes of io_submit with O_DIRECT, while readers of the same file fill the page cache."""

    SIZE, PIECE = 1 << 20, 4096

    def cycles(self, name, turns, between):
        """Writes the whole file repeatedly, in more pieces than the kernel sends to the mount's
        process at once, and compares the content through a descriptor and a mapping. Calls
        `between` with the buffered descriptor while the writes are in flight."""
        direct, buffered = self.opened(name, os.O_RDWR | os.O_DIRECT), self.opened(
            name, os.O_RDONLY)
        pieces = [(offset, self.PIECE) for offset in range(0, self.SIZE, self.PIECE)]
        with (contextlib.closing(syscalls.AsynchronousWrites(len(pieces))) as writes,
              mmap.mmap(-1, self.SIZE) as room,
              mmap.mmap(buffered, self.SIZE, mmap.MAP_SHARED, mmap.PROT_READ) as shown):
            for turn in range(turns):
                room[:] = content((name, turn), self.SIZE)
                self.assertEqual(writes.submit(direct, room, pieces), len(pieces))
                between(buffered)
                writes.wait()
                for what, have in (("read", os.pread(buffered, self.SIZE, 0)),
                                   ("mapping", shown[:])):
                    old = [offset for offset, length in pieces
                           if have[offset:offset + length] != room[offset:offset + length]]
                    self.assertEqual(old, [], f"turn {turn}: the {what} shows what was there "
                                              "before at these offsets")

    def files(self):
        self.write("new", b"n" * self.SIZE)
        return BIG, "new"

    @promise("After an asynchronous `O_DIRECT` write (`io_submit`, io_uring) has completed, every "
             "later read sees it.")
    def test_asynchronous_writes_are_seen_by_readers_that_read_meanwhile(self):
        def read(buffered):
            # Page by page; the pages that are written last come first.
            os.posix_fadvise(buffered, 0, 0, os.POSIX_FADV_RANDOM)
            for offset in range(self.SIZE - self.PIECE, -1, -self.PIECE):
                os.pread(buffered, 1, offset)

        for name in self.files():
            with self.subTest(name=name):
                self.cycles(name, 3, read)

    def test_asynchronous_writes_are_seen_by_a_continuous_reader(self):
        for name in self.files():
            with self.subTest(name=name):
                reader = subprocess.Popen(["sh", "-c",
                                           'echo; while :; do cat "$0" >/dev/null; done',
                                           self.at(name)], stdout=subprocess.PIPE)
                try:
                    reader.stdout.readline()
                    self.cycles(name, 10, lambda buffered: None)
                finally:
                    reader.kill()
                    reader.communicate()


class CollectedAsynchronousWriting(AsynchronousWriting):
    kind = "bcow+writeback"


class Names(UnionCase):
    @promise("Directories of the image can be renamed with all their contents, like other "
             "directories. This includes renaming onto an empty directory, RENAME_NOREPLACE and "
             "RENAME_EXCHANGE.",
             "`RENAME_WHITEOUT` fails with EINVAL, as in overlayfs.")
    def test_directories_are_renamed(self):
        inside = {name: os.stat(self.at("d0", name), follow_symlinks=False).st_ino
                        for name in os.listdir(self.at("d0"))}
        inode = os.stat(self.at("d0")).st_ino
        os.rename(self.at("d0"), self.at("d1/moved"))
        os.mkdir(self.at("target"))
        os.rename(self.at("d1/moved"), self.at("target"))
        self.assert_error("EEXIST", syscalls.rename, self.at("target"), self.at("d1"),
                          syscalls.RENAME_NOREPLACE)
        self.assert_error("ENOTEMPTY", os.rename, self.at("target"), self.at("d1"))
        self.assert_error("EINVAL", os.rename, self.at("target"), self.at("target/sub/x"))
        syscalls.rename(self.at("target"), self.at("d1"), syscalls.RENAME_EXCHANGE)
        self.assert_error("EINVAL", syscalls.rename, self.at("top"), self.at("else"),
                          syscalls.RENAME_WHITEOUT)
        for again in (False, True):
            self.assertEqual({name: os.stat(self.at("d1", name), follow_symlinks=False).st_ino
                                    for name in os.listdir(self.at("d1"))}, inside)
            self.assertEqual(os.stat(self.at("d1")).st_ino, inode)
            self.assertEqual(self.read("d1/sub/deep/file"), self.original("d0/sub/deep/file"))
            self.assertEqual(self.read("target/odd"), self.original("d1/odd"))
            self.assertFalse(os.path.lexists(self.at("d0")))
            if not again:
                self.remount()
        # A new directory at the old path is empty.
        os.mkdir(self.at("d0"))
        self.assertEqual(os.listdir(self.at("d0")), [])
        self.remount()
        self.assertEqual(os.listdir(self.at("d0")), [])

    @promise("The hard links of a file, including a file of the image, remain links of one file "
             "when the file is changed. Each name shows the change, and the link count is right.")
    def test_links_stay_links(self):
        names = ["d2/three", "d0/sub/three", "three"]
        want = self.original("three")
        overwrite(self.at(names[0]), 0, b"changed")
        want[:7] = b"changed"
        os.link(self.at(names[1]), self.at("fourth"))
        names.append("fourth")
        os.chmod(self.at("fourth"), 0o600)
        for again in (False, True):
            infos = [os.stat(self.at(name)) for name in names]
            self.assertEqual({(info.st_ino, info.st_nlink, info.st_mode & 0o7777)
                              for info in infos}, {(infos[0].st_ino, 4, 0o600)})
            self.assertEqual([self.read(name) for name in names], [want] * 4)
            if not again:
                self.remount()
        os.unlink(self.at("three"))
        self.assertEqual({os.stat(self.at(name)).st_nlink for name in names if name != "three"},
                         {3})
        self.remount()
        self.assertEqual({os.stat(self.at(name)).st_nlink for name in names if name != "three"},
                         {3})
        # Links of a link, too, and of one that only lost a name.
        os.unlink(self.at("d1/link"))
        self.assertEqual((os.lstat(self.at("link")).st_nlink, os.stat(self.at("d0/pair")).st_nlink),
                         (1, 2))
        os.unlink(self.at("d0/pair"))
        self.assertEqual(os.stat(self.at("d1/pair")).st_nlink, 1)
        self.remount()
        self.assertEqual(os.stat(self.at("d1/pair")).st_nlink, 1)
        self.assertEqual(self.read("d1/pair"), self.original("d1/pair"))

    @promise("A file keeps its inode number when it is changed or renamed, and when the tree is "
             "mounted again. Directory listings show the same number.")
    def test_inode_numbers_stay(self):
        os.mkdir(self.at("made"))
        self.write("made/file", b"x")
        names = [BIG, "d0/hundred", "d2/three", "three", "link", "fifo", "null", "d1", "made",
                 "made/file", "d0/sub", "d0/sub/deep/file"]

        def numbers(paths):
            return [os.lstat(self.at(path)).st_ino for path in paths]

        before = numbers(names)
        listed = {path: {entry.name: entry.inode() for entry in os.scandir(self.at(path))}
                        for path in (".", "d1", "d2", "made")}
        for path in names:
            os.chown(self.at(path), 5, 6, follow_symlinks=False)
        for path in (BIG, "d0/hundred", "three", "made/file"):
            overwrite(self.at(path), 0, b"changed")
        self.assertEqual(numbers(names), before)
        os.rename(self.at("d1"), self.at("d8"))
        os.rename(self.at("d0/hundred"), self.at("d8/hundred"))
        names = [{"d1": "d8", "d0/hundred": "d8/hundred"}.get(path, path) for path in names]
        self.assertEqual(numbers(names), before)
        self.remount()
        self.assertEqual(numbers(names), before)
        for path, entries in listed.items():
            for entry in os.scandir(self.at("d8" if path == "d1" else path)):
                self.assertEqual(entry.inode(), entry.stat(follow_symlinks=False).st_ino,
                                 entry.path)
                self.assertEqual(entry.inode(), entries.get(
                                     "d1" if entry.name == "d8" else entry.name, entry.inode()),
                                 entry.path)

    @promise("If entries are added and removed while a program lists a directory, the listing "
             "contains each entry that existed all the time exactly once. It contains no entry "
             "that never existed.")
    def test_directories_are_listed_while_they_change(self):
        kept = {f"kept-{number}" for number in range(500)}
        for name in kept:
            self.write(f"many/{name}")
        kept |= {name for name in os.listdir(self.at("many"))
                 if name.startswith("entry-") and int(name[6:]) % 3 == 0}
        dice = random.Random(1)
        for turn in range(6):
            if turn == 3:
                self.remount()
            fd = os.open(self.at("many"), os.O_RDONLY | os.O_DIRECTORY)
            ever, listed = set(os.listdir(self.at("many"))), []
            while entries := syscalls.directory_entries(fd, dice.choice([200, 500, 3000])):
                listed += [name for name, _, _ in entries]
                for _ in range(4):
                    name = dice.choice([f"entry-{dice.randrange(40) * 3 + 1:03}",
                                        f"fresh-{dice.randrange(200)}"])
                    if os.path.exists(self.at("many", name)):
                        os.rename(self.at("many", name), self.at("many", name + "~"))
                        os.unlink(self.at("many", name + "~"))
                    else:
                        self.write(f"many/{name}")
                    ever |= {name, name + "~"}
            os.close(fd)
            self.assertEqual({name: listed.count(name) for name in kept}, dict.fromkeys(kept, 1))
            self.assertLessEqual(set(listed) - {".", ".."}, ever)

    @promise("A name has up to 255 bytes of any value except `/` and zero. Directories can be "
             "nested deeper than one path can express (PATH_MAX).")
    def test_names_and_depths_at_the_limits(self):
        every = bytes(set(range(1, 256)) - {ord("/")})
        for name in (every[:127], every[127:], b"\xff" * 255, b"." * 255, b"\n", b".wh.x",
                     b".wh..wh..opq"):
            path = os.fsencode(self.where) + b"/" + name
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
            os.rename(path, path)
            self.assertIn(name, os.listdir(os.fsencode(self.where)))
        self.assert_error("ENAMETOOLONG", self.write, "x" * 256)
        self.assert_error("ENAMETOOLONG", os.mkdir, self.at("x" * 256))
        self.assert_error("ENAMETOOLONG", os.rename, self.at("top"), self.at("x" * 256))
        self.assert_error("ENAMETOOLONG", os.stat, self.at("x" * 256))
        # A name of that length in the image can still be changed, renamed and removed.
        long = "d2/" + "n" * 255
        append_to(self.at(long), b"more")
        os.rename(self.at(long), self.at("e" * 255))
        self.remount()
        self.assertEqual(self.read("e" * 255), b"n" * 255 + b"more")
        os.unlink(self.at("e" * 255))
        depth, here = 60, os.open(self.at("d0"), os.O_RDONLY)
        for _ in range(depth):
            os.mkdir("d" * 200, dir_fd=here)
            deeper = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = deeper
        with os.fdopen(os.open("bottom", os.O_CREAT | os.O_WRONLY, dir_fd=here), "w") as file:
            file.write("deep")
        os.close(here)
        os.rename(self.at("d0"), self.at("deep"))
        self.remount()
        here = os.open(self.at("deep"), os.O_RDONLY)
        for _ in range(depth):
            deeper = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = deeper
        with os.fdopen(os.open("bottom", os.O_RDONLY, dir_fd=here)) as file:
            self.assertEqual(file.read(), "deep")
        os.close(here)
        run("rm", "-rf", self.at("deep"))
        self.assertFalse(os.path.exists(self.at("deep")))

    @promise("The name `.bcow` in the root directory is reserved for the mount. The mount hides "
             "this name, and creating it fails with EPERM.")
    def test_the_name_of_the_mount_itself(self):
        path = self.at(".bcow")
        self.assertNotIn(".bcow", os.listdir(self.where))
        self.assertFalse(os.path.lexists(path))
        self.assertIn(".bcow", os.listdir(self.upper))
        self.assert_error("EPERM", os.mkdir, path)
        self.assert_error("EPERM", self.write, ".bcow")
        self.assert_error("EPERM", os.symlink, "x", path)
        self.assert_error("EPERM", os.rename, self.at("top"), path)
        self.assert_error("EPERM", os.rename, self.at("d0"), path)
        self.assert_error("EPERM", os.link, self.at("top"), path)
        self.assertEqual(self.read("top"), self.original("top"))
        os.mkdir(self.at("d0/.bcow"))
        self.remount()
        self.assertTrue(os.path.isdir(self.at("d0/.bcow")))

    @promise("Creating a character device 0:0 fails with EPERM, because this device is a whiteout "
             "in the upper. overlayfs refuses it too.")
    def test_whiteouts_cannot_be_made(self):
        self.assert_error("EPERM", os.mknod, self.at("top-white"), stat.S_IFCHR | 0o600,
                          os.makedev(0, 0))
        os.mknod(self.at("zero-block"), stat.S_IFBLK | 0o600, os.makedev(0, 0))
        os.mknod(self.at("null-too"), stat.S_IFCHR | 0o666, os.makedev(1, 3))
        self.remount()
        write_file(self.at("null-too"), b"away")
        self.assertEqual((os.stat(self.at("zero-block")).st_rdev,
                          os.stat(self.at("null-too")).st_rdev), (0, os.makedev(1, 3)))

    @promise("A character device 0:0 of the image can be removed. Changing, linking or renaming it "
             "fails with EPERM, because its copy in the upper would be a whiteout. If the upper "
             "keeps owners in attributes, as for ordinary users, a device 0:0 works like any other "
             "device.")
    def test_whiteouts_of_the_image_stay(self):
        self.mount.unmount()
        tree, image = os.path.join(self.mount.directory, "tree"), os.path.join(
            self.mount.directory, "zero.bcow")
        os.mkdir(tree)
        os.mknod(os.path.join(tree, "zero"), stat.S_IFCHR | 0o600, os.makedev(0, 0))
        support.bcow("convert", f"dir:{tree}", image)
        self.mount.lower = type("Other", (), {"make_image": lambda _: image})()
        self.mount.upper = self.upper = os.path.join(self.mount.directory, "upper-of-zero")
        os.mkdir(self.upper)
        self.mount.mount()
        about = os.lstat(self.at("zero"))
        self.assertEqual((about.st_rdev, stat.S_ISCHR(about.st_mode)), (0, True))

        def seen():
            # Without the device number, which another mount may get during the remount.
            about = os.lstat(self.at("zero"))
            return (about.st_mode, about.st_ino, about.st_nlink, about.st_uid, about.st_gid,
                    about.st_size, about.st_mtime_ns, about.st_ctime_ns)

        before = seen()
        for call, *arguments in ((os.chmod, 0o666), (os.chown, 7, 7), (os.utime,),
                                 (os.link, self.at("two")), (os.rename, self.at("two")),
                                 (os.setxattr, "trusted.x", b"y")):
            self.assert_error("EPERM", call, self.at("zero"), *arguments)
        self.remount()
        self.assertEqual(seen(), before)
        os.unlink(self.at("zero"))
        self.remount()
        self.assertEqual(os.listdir(self.where), [])

    @promise("Programs can bind and connect to sockets, and open pipes at both ends.")
    def test_sockets_and_pipes(self):
        os.chdir(self.where)
        self.addCleanup(os.chdir, "/")
        with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
            server.bind("s")
            server.listen()
            client.connect("s")
            peer, _ = server.accept()
            with peer:
                client.sendall(b"through a socket")
                self.assertEqual(peer.recv(100), b"through a socket")
        for name in ("fifo", "new-fifo"):
            if name == "new-fifo":
                os.mkfifo(name)
            reader = os.open(name, os.O_RDONLY | os.O_NONBLOCK)
            writer = os.open(name, os.O_WRONLY)
            os.write(writer, b"pipe")
            self.assertEqual(os.read(reader, 10), b"pipe")
            os.close(reader)
            os.close(writer)


class Attributes(UnionCase):
    def as_user(self, user, function, *arguments, umask=0o022, **options):
        with syscalls.acting_as(*user, umask):
            return function(*arguments, **options)

    @promise("The kernel checks every access by owner, mode and ACL, with or without "
             "`allow_other`.")
    def test_access_is_checked(self):
        def denied(function, *arguments):
            self.assertEqual(self.as_user(ALICE, syscalls.code_of, function, *arguments),
                             "EACCES")

        denied(self.open, "d0/one", os.O_RDONLY)
        denied(self.open, "d0/hundred", os.O_WRONLY)
        denied(self.write, "d0/new")
        denied(os.unlink, self.at("d0/hundred"))
        self.assertEqual(self.as_user(ALICE, syscalls.code_of, os.chmod, self.at("top"), 0o777),
                         "EPERM")
        self.assertEqual(self.as_user(ALICE, syscalls.code_of, os.chown, self.at("d2/blocks"),
                                          0, 0), "EPERM")
        # Access by owner and by ACL, and no access after the ACL is removed.
        os.close(self.as_user(ALICE, self.open, "d2/blocks", os.O_RDWR))
        os.close(self.as_user(ALICE, self.open, "d1/large", os.O_RDWR))
        os.setxattr(self.at("d1/large"), syscalls.ACCESS_ACL,
                    syscalls.simple_acl(6, 4, 0, mask=6, users=((1001, 6),)))
        denied(self.open, "d1/large", os.O_RDWR)
        os.close(self.as_user(BOB, self.open, "d1/large", os.O_RDWR))
        self.remount()
        denied(self.open, "d1/large", os.O_RDWR)
        os.close(self.as_user(BOB, self.open, "d1/large", os.O_RDWR))

    @promise("A new file belongs to the user and group of the process that creates it, and has the "
             "mode that the umask permits. In a directory with a default ACL, the ACL replaces the "
             "umask.")
    def test_new_files(self):
        self.as_user(ALICE, self.write, "d2/hers", mode=0o666, umask=0o027)
        self.as_user(ALICE, os.mkdir, self.at("d2/her-directory"), 0o777, umask=0o077)
        for again in (False, True):
            info, directory = os.stat(self.at("d2/hers")), os.stat(self.at("d2/her-directory"))
            self.assertEqual((info.st_uid, info.st_gid, info.st_mode & 0o7777), (*ALICE, 0o640))
            self.assertEqual((directory.st_uid, directory.st_gid, directory.st_mode & 0o7777),
                             (*ALICE, 0o700))
            if not again:
                self.remount()
        # d1 has a default ACL in the image, d2 is given one.
        default = syscalls.simple_acl(7, 5, 1, mask=7, users=((1001, 6),))
        os.setxattr(self.at("d2"), syscalls.DEFAULT_ACL, default)
        shutil.copytree(self.lower.tree, os.path.join(self.mount.directory, "plain"), symlinks=True,
                        copy_function=shutil.copy2, ignore=lambda path, names: [
                            name for name in names if not os.path.isdir(os.path.join(path, name))])
        plain = os.path.join(self.mount.directory, "plain")
        os.setxattr(os.path.join(plain, "d2"), syscalls.DEFAULT_ACL, default)
        for folder in ("d1", "d2"):
            for side in (self.where, plain):
                with syscalls.acting_as(0, 0, 0o077):
                    os.close(os.open(os.path.join(side, folder, "inherits"), os.O_CREAT, 0o666))
                    os.mkdir(os.path.join(side, folder, "inherits-too"), 0o777)
                    os.mkfifo(os.path.join(side, folder, "pipe"), 0o660)
            for name in ("inherits", "inherits-too", "pipe"):
                here, there = (os.path.join(side, folder, name) for side in (self.where, plain))
                self.assertEqual(tree.xattrs(here), tree.xattrs(there), here)
                self.assertEqual(oct(os.stat(here).st_mode), oct(os.stat(there).st_mode), here)

    @promise("In a directory with the set-group-ID bit, a new file belongs to the group of the "
             "directory. A new directory also inherits the bit.")
    def test_set_group_id_directories(self):
        os.chmod(self.at("setgid"), 0o2777)
        self.as_user(ALICE, self.write, "setgid/file", mode=0o666)
        self.as_user(ALICE, os.mkdir, self.at("setgid/directory"))
        self.as_user(ALICE, self.write, "setgid/directory/file", mode=0o666)
        os.symlink("x", self.at("setgid/link"))
        for name, mode in (("file", 0o644), ("directory", 0o2755), ("directory/file", 0o644),
                           ("link", 0o777)):
            info = os.lstat(self.at("setgid", name))
            self.assertEqual((info.st_gid, info.st_mode & 0o7777), (1001, mode), name)

    @promise("In a directory with the sticky bit, only the owner of a file, the owner of the "
             "directory and root can remove or rename the file.")
    def test_sticky_directories(self):
        self.as_user(ALICE, self.write, "sticky/hers")
        for name in ("sticky/others", "sticky/hers"):
            user = ALICE if name == "sticky/others" else BOB
            self.assertEqual(self.as_user(user, syscalls.code_of, os.unlink, self.at(name)),
                             "EPERM")
            self.assertEqual(self.as_user(user, syscalls.code_of, os.rename, self.at(name),
                                              self.at("sticky/x")), "EPERM")
        self.as_user(BOB, os.rename, self.at("sticky/others"), self.at("sticky/mine"))
        self.as_user(BOB, os.unlink, self.at("sticky/mine"))
        os.unlink(self.at("sticky/hers"))

    @promise("Writing to a file or truncating it removes its set-user-ID and set-group-ID bits, "
             "unless root does it, and removes its capabilities in any case. Changing the owner "
             "removes the bits and the capabilities, also if root does it. `chown(-1, -1)`, which "
             "sets no owner, removes the bits if the owner of the file calls it. For root and for "
             "other users, the call succeeds and changes nothing.",
             "`chown(-1, -1)` updates the change time only if it removes set-id bits.")
    def test_set_id_bits(self):
        capability = struct.pack("<5I", 0x02000001, 1 << 10, 0, 0, 0)

        def mode(name):
            return os.stat(self.at(name)).st_mode & 0o7777

        def write(name):
            overwrite(self.at(name), 0, b"x")

        def grow(name):
            fd = self.open(name)
            try:
                syscalls.fallocate(fd, syscalls.ZERO_RANGE, 0, 200_000)
            finally:
                os.close(fd)

        for name in ("setgid/tool", "d2/made"):
            for how in (write, grow, lambda path: os.truncate(self.at(path), 5),
                        lambda path: os.chown(self.at(path), 1000, 1000)):
                if name == "d2/made":
                    self.write(name, b"made")
                os.chown(self.at(name), 1000, 1000)
                os.chmod(self.at(name), 0o6777)
                self.assertEqual(mode(name), 0o6777)
                self.as_user(ALICE, how, name)
                self.assertEqual(oct(mode(name)), oct(0o777))
        os.chmod(self.at("setgid/tool"), 0o6777)
        write("setgid/tool")
        grow("setgid/tool")
        os.truncate(self.at("setgid/tool"), 5)
        self.assertEqual(oct(mode("setgid/tool")), oct(0o6777))
        # The completion of a block in the background sets the change time; fsync completes all.
        fd = self.open("setgid/tool")
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        for owner, caller, expected in ((ROOT, ROOT, 0o6777), (ROOT, ALICE, 0o6777),
                                        (ALICE, ALICE, 0o777)):
            os.chown(self.at("setgid/tool"), *owner)
            os.chmod(self.at("setgid/tool"), 0o6777)
            before = os.stat(self.at("setgid/tool")).st_ctime_ns
            self.as_user(caller, os.chown, self.at("setgid/tool"), -1, -1)
            self.assertEqual(oct(mode("setgid/tool")), oct(expected))
            if expected == 0o6777:
                self.assertEqual(os.stat(self.at("setgid/tool")).st_ctime_ns, before)
        os.chmod(self.at("setgid/tool"), 0o755)
        for change in (write, lambda name: os.truncate(self.at(name), 3)):
            os.setxattr(self.at("setgid/tool"), "security.capability", capability)
            change("setgid/tool")
            self.assertNotIn("security.capability", os.listxattr(self.at("setgid/tool")))
        os.chmod(self.at("setgid/tool"), 0o6777)
        os.setxattr(self.at("setgid/tool"), "security.capability", capability)
        os.chown(self.at("setgid/tool"), 5, 5)
        self.assertEqual((oct(mode("setgid/tool")),
                          "security.capability" in os.listxattr(self.at("setgid/tool"))),
                         (oct(0o777), False))
        os.setxattr(self.at("setgid/tool"), "security.capability", capability)
        self.remount()
        self.assertEqual(os.getxattr(self.at("setgid/tool"), "security.capability"), capability)

    @promise("Extended attributes of `user.`, `trusted.` and `security.` can be set on every type "
             "of file on which ext4 permits them. All attributes of a file share the space that "
             "the host's file system provides (4 KiB on ext4). Setting an attribute that does not "
             "fit fails with ENOSPC or E2BIG.")
    def test_extended_attributes(self):
        for name, attribute in (("d0/hundred", "user.new"), ("d1", "trusted.new"),
                                ("link", "trusted.new"), ("null", "security.new"),
                                ("d2/big", "user." + "x" * 250), ("fifo", "trusted." + "y" * 230)):
            path = self.at(name)
            had = set(os.listxattr(path, follow_symlinks=False))
            os.setxattr(path, attribute, b"1" * 100, os.XATTR_CREATE, follow_symlinks=False)
            self.assert_error("EEXIST", os.setxattr, path, attribute, b"2", os.XATTR_CREATE,
                              follow_symlinks=False)
            os.setxattr(path, attribute, b"", os.XATTR_REPLACE, follow_symlinks=False)
            self.assertEqual(set(os.listxattr(path, follow_symlinks=False)), had | {attribute})
        self.assert_error("EPERM", os.setxattr, self.at("link"), "user.x", b"",
                          follow_symlinks=False)
        self.assert_error("EPERM", os.setxattr, self.at("fifo"), "user.x", b"")
        self.assert_error("ENODATA", os.removexattr, self.at("d0/hundred"), "user.none")
        self.assert_error("ENODATA", os.setxattr, self.at("d0/hundred"), "user.none", b"",
                          os.XATTR_REPLACE)
        self.assert_error("ENODATA", os.getxattr, self.at("d0/hundred"), "user.none")
        self.assert_error("EOPNOTSUPP", os.setxattr, self.at("d0/hundred"), "other.x", b"")
        self.assertIn(syscalls.code_of(os.setxattr, self.at("top"), "user.much", bytes(65_536)),
                      ("ENOSPC", "E2BIG", None))
        self.assert_error("E2BIG", os.setxattr, self.at("top"), "user.more", bytes(65_537))
        os.removexattr(self.at("d2/big"), "user.two")
        self.remount()
        self.assertEqual(os.getxattr(self.at("d0/hundred"), "user.new"), b"")
        self.assertEqual(os.getxattr(self.at("d0/hundred"), "user.one"), b"1")
        self.assertEqual(os.getxattr(self.at("null"), "security.new"), b"")
        self.assertNotIn("user.two", os.listxattr(self.at("d2/big")))

    @promise("File flags of `chattr` (`FS_IOC_SETFLAGS`, `FS_IOC_FSSETXATTR`) can be neither read "
             "nor set (ENOTTY). Files never have such flags.")
    def test_flags(self):
        calls = {"FS_IOC_GETFLAGS": (0x80086601, 8), "FS_IOC_SETFLAGS": (0x40086602, 8),
                 "FS_IOC_FSGETXATTR": (0x801C581F, 28), "FS_IOC_FSSETXATTR": (0x401C5820, 28)}
        for path in (BIG, "d2"):
            fd = self.opened(path, os.O_RDONLY)
            for name, (call, size) in calls.items():
                with self.subTest(name, path=path):
                    self.assert_error("ENOTTY", fcntl.ioctl, fd, call, bytes(size))

    @promise("Attributes whose names overlayfs or bcow uses in the upper (such as "
             "`trusted.overlay.opaque`) are ordinary attributes in the mount. The upper stores "
             "them separately from its own attributes, and they have no special effect.")
    def test_containers_can_use_the_names_of_marks(self):
        names = ["trusted.overlay.opaque", "trusted.overlay.redirect", "trusted.overlay.metacopy",
                 "trusted.overlay.origin", "trusted.overlay.nlink", "trusted.overlay.overlay.x",
                 "trusted.bcow.sketch", "trusted.bcow.bcow.y", "user.overlay.opaque",
                 "user.containers.override_stat"]
        seen = sorted(os.listdir(self.at("d2")))
        for path in ("d2", BIG, "d0/hundred"):
            for name in names:
                self.assert_error("ENODATA", os.getxattr, self.at(path), name)
                os.setxattr(self.at(path), name, b"/made/up")
        overwrite(self.at(BIG), 0, b"sketch")
        os.setxattr(self.at("d2"), "trusted.overlay.opaque", b"y")
        want = self.original(BIG)
        want[:6] = b"sketch"
        for again in (False, True):
            self.assertEqual(sorted(os.listdir(self.at("d2"))), seen)
            self.assertEqual(self.read(BIG), want)
            for name in names:
                self.assertEqual(os.getxattr(self.at(BIG), name), b"/made/up")
            self.assertEqual(sorted(os.listxattr(self.at(BIG))),
                             sorted(["user.two", "trusted.three", *names]))
            if not again:
                self.remount()
        for name in names:
            os.removexattr(self.at(BIG), name)
        self.assertEqual(sorted(os.listxattr(self.at(BIG))), ["trusted.three", "user.two"])
        self.remount()
        self.assertEqual(self.read(BIG), want)

    @promise("Modification and change times have a resolution of one nanosecond. The modification "
             "time is the time of the last change by a program.",
             "The copy keeps the modification time",
             "Reading does not update the access time; utimens sets it. (For a symbolic link in "
             "the upper, the host may update the access time when the kernel reads the link again "
             "after evicting it.)")
    def test_times(self):
        path = self.at(BIG)

        def times():
            info = os.stat(path)
            return info.st_mtime_ns, info.st_ctime_ns

        first = times()
        os.chmod(path, 0o600)
        second = times()
        self.assertEqual((second[0], second[1] > first[1]), (first[0], True))
        begin = time.time_ns()
        for offset in range(0, 200_000, 5000):
            overwrite(path, offset, b"x")
        third = times()
        self.assertGreater(third[0], second[0])
        self.assertGreaterEqual(third[0], begin - 20_000_000)
        time.sleep(0.05)
        # Neither the completion of blocks, nor a sync, nor a remount changes the times.
        self.assertEqual(times(), third)
        fd = self.open(BIG)
        os.fsync(fd)
        os.close(fd)
        self.assertEqual(times()[0], third[0])
        self.remount()
        self.assertEqual(times()[0], third[0])
        # No stat happens before the block is completed: by the background, by a read, or at the
        # unmount.
        def read_all():
            time.sleep(0.008)
            self.read(BIG)

        for number, complete in enumerate((lambda: time.sleep(0.05), read_all, self.remount)):
            time.sleep(0.05)
            begin = time.time_ns()
            with open(path, "r+b", buffering=0) as file:
                os.pwrite(file.fileno(), b"x", 300_000 + number * 10_000)
                end = time.time_ns()
            complete()
            self.assertTrue(begin - 20_000_000 <= times()[0] <= end, (begin, times()[0], end))
        with open(path, "r+b", buffering=0) as file:
            file.seek(900_000)
            file.write(b"x")
            os.utime(file.fileno(), ns=(123_456_789, 987_654_321))
        self.remount()
        info = os.stat(path)
        self.assertEqual((info.st_atime_ns, info.st_mtime_ns), (123_456_789, 987_654_321))
        self.read(BIG)
        self.assertEqual(os.stat(path).st_atime_ns, 123_456_789)
        self.read("d0/hundred")
        self.remount()
        self.assertEqual(os.stat(path).st_atime_ns, 123_456_789)
        moment = os.stat(self.at("d2")).st_mtime_ns
        time.sleep(0.012)
        self.write("d2/entry")
        self.assertGreater(os.stat(self.at("d2")).st_mtime_ns, moment)

    def test_reading_does_not_change_the_access_time(self):
        """On a host with strict access times."""
        self.reads_and_compares_times()

    def test_reading_does_not_change_the_access_time_with_noatime(self):
        self.mount.access += ",noatime"
        self.reads_and_compares_times()

    def reads_and_compares_times(self):
        self.mount.unmount()
        memory = os.path.join(self.mount.directory, "noting")
        os.mkdir(memory)
        disk = os.path.join(self.mount.directory, "noting.ext4")
        sparse_file(disk, 32 << 20)
        support.run("mkfs.ext4", "-q", "-F", disk)
        support.run("mount", "-o", "loop,strictatime", disk, memory)
        self.addCleanup(support.run, "umount", "-l", memory)
        self.mount.upper = self.upper = os.path.join(memory, "upper")
        os.mkdir(self.upper)
        self.mount.mount()
        self.addCleanup(lambda: support.is_mounted(self.where) and self.mount.unmount())
        self.write("new-file", b"x" * 9000)
        os.mkdir(self.at("new-directory"))
        self.write("new-directory/entry")
        os.symlink("new-file", self.at("new-link"))
        os.chmod(self.at("d0"), 0o750)
        os.chmod(self.at("d0/hundred"), 0o640)
        overwrite(self.at(BIG), 0, b"changed")
        os.chown(self.at("link"), 7, 7, follow_symlinks=False)
        names = ["new-file", "new-directory", "new-link", "d0", "d0/hundred", BIG, "link", "d2",
                 "."]

        def times():
            return {name: os.lstat(self.at(name)).st_atime_ns for name in names}

        def read_all():
            for name in names:
                path = self.at(name)
                if os.path.islink(path):
                    os.readlink(path)
                elif os.path.isdir(path):
                    os.listdir(path)
                else:
                    self.read(name)

        for again in (False, True):
            before = times()
            time.sleep(0.02)
            read_all()
            self.assertEqual(times(), before)
            names = [name for name in names if "link" not in name]
            drop_caches()
            read_all()
            self.assertEqual(times(), {name: before[name] for name in names})
            if not again:
                self.remount()

    @promise("`st_blocks` counts all blocks of a file, in the image and in the upper. It does not "
             "jump when the file is copied up.")
    def test_blocks(self):
        whole = -(-os.stat(self.at(BIG)).st_size // 4096) * 8
        self.assertEqual(os.stat(self.at(BIG)).st_blocks, whole)
        os.chmod(self.at(BIG), 0o600)
        self.assertEqual(os.stat(self.at(BIG)).st_blocks, whole)
        overwrite(self.at(BIG), 0, b"x")
        self.assertTrue(whole <= os.stat(self.at(BIG)).st_blocks <= whole + 64,
                        os.stat(self.at(BIG)).st_blocks)
        # Holes do not count, even in a file without data.
        self.assertLess(os.stat(self.at("d2/hollow")).st_blocks, 8)
        holes = os.stat(self.at("d2/holes")).st_blocks
        self.assertLess(holes, 200)
        os.chmod(self.at("d2/holes"), 0o600)
        # The host may use a block for the attributes.
        self.assertTrue(holes <= os.stat(self.at("d2/holes")).st_blocks <= holes + 8,
                        os.stat(self.at("d2/holes")).st_blocks)

    @promise("The link count of a directory of the image is always 1: its subdirectories are not "
             "counted, as in overlayfs. Its size is that in the image.")
    def test_form_of_directories(self):
        def form():
            found = os.stat(self.at("d0"))
            return found.st_nlink, found.st_size, found.st_blocks

        before = form()
        self.assertEqual(before[0], 1)
        for number in range(300):
            self.write(f"d0/new{number}")
        self.assertEqual(form(), before)

    @promise("`flock` and `fcntl` locks work between all programs that use the mount. The kernel "
             "manages them; they have no effect in other mounts of the same image.")
    def test_locks(self):
        for name in (BIG, "d0/hundred"):
            one, two = self.opened(name), self.opened(name)
            fcntl.flock(one, fcntl.LOCK_EX)
            self.assert_error("EAGAIN", fcntl.flock, two, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(two, b"x", 0)  # The copy-up happens while the lock is held.
            self.assert_error("EAGAIN", fcntl.flock, self.opened(name),
                              fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(one, fcntl.LOCK_UN)
            fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.lockf(one, fcntl.LOCK_EX, 10, 5)
            other = (f"import fcntl, sys\nfile = open({self.at(name)!r}, 'r+b')\n"
                     "for length, start in ((5, 0), (5, 7)):\n"
                     "    try:\n        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, length, "
                     "start)\n        print('free')\n"
                     "    except BlockingIOError:\n        print('locked')\n")
            states = run(sys.executable, "-c", other).out.split()
            self.assertEqual(states, [b"free", b"locked"])


class NewFiles(UnionCase):
    @promise("The modification time of a new file is the same after the next mount.")
    def test_times_of_new_files_stay(self):
        """The first change comes in the tick of the clock in which the file was made. A kernel that
        keeps the times itself then sends none."""
        def write(path, flags=0):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o644)
            with contextlib.closing(mmap.mmap(-1, 86016)) as aligned:
                os.write(fd, aligned)
            return fd

        def write_to_node(path):
            os.mknod(path, stat.S_IFREG | 0o644)
            return write(path)

        def allocate(path):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
            os.posix_fallocate(fd, 0, 10_000)
            return fd

        def copy(path):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
            source = self.open(BIG)
            os.copy_file_range(source, fd, 10_000)
            os.close(source)
            return fd

        ways = {"written": write, "direct": lambda path: write(path, os.O_DIRECT),
                "node": write_to_node, "allocated": allocate, "copied": copy}
        for name, make in ways.items():
            for number in range(10):
                fd = make(self.at(f"d0/{name}-{number}"))
                # Cached pages reach the mount's process in a later tick.
                time.sleep(0.01)
                os.close(fd)
        made = [f"d0/{name}-{number}" for name in ways for number in range(10)]
        times = {path: os.stat(self.at(path)).st_mtime_ns for path in made}
        self.remount()
        self.assertEqual({path: os.stat(self.at(path)).st_mtime_ns for path in made}, times)


class CollectedNewFiles(NewFiles):
    kind = "bcow+writeback"


class InOtherHands(UnionCase):
    @promise("The upper has the layout of an overlayfs upper directory. If the upper has no "
             "partial file, the kernel's overlayfs shows the same tree from the upper and the "
             "extracted image (`metacopy=on,redirect_dir=on`). Reading a partial file through "
             "overlayfs fails with EIO.",
             "If a file of the image has several names, overlayfs continues to show the old file "
             "under the names that were not changed themselves.")
    def test_overlayfs_shows_the_same_tree(self):
        os.unlink(self.at("top"))
        run("rm", "-rf", self.at("many"))
        self.write("d0/hundred", b"written whole")
        os.chmod(self.at(BIG), 0o604)
        os.chown(self.at("d2/holes"), 7, 8)
        os.rename(self.at("d0/sub"), self.at("d1/sub"))
        os.rename(self.at("d2/blocks"), self.at("d0/blocks"))
        run("rm", "-rf", self.at("setgid"))
        os.mkdir(self.at("setgid"))
        self.write("setgid/new", b"in what was removed and made again")
        os.setxattr(self.at("d1/odd"), "user.x", b"y")
        os.symlink("somewhere", self.at("empty/link"))
        os.truncate(self.at("d1/large"), 0)
        size = os.stat(self.at("d2/holes")).st_size
        with open(self.at("d2/holes"), "r+b", buffering=0) as file:
            for offset in range(0, size, 3000):
                file.write(b"t" * min(3000, size - offset))
            os.fsync(file.fileno())
        syscalls.rename(self.at("d0/one"), self.at("d0/zero"), syscalls.RENAME_EXCHANGE)
        os.mknod(self.at("device"), stat.S_IFCHR | 0o600, os.makedev(10, 229))
        want = tree.dump(self.where)
        self.mount.unmount()
        seen = self.overlay()
        self.addCleanup(run, "umount", seen)
        have = tree.dump(seen, ghosts=True)
        for entries in (want, have):
            entries["."].pop("mtime")
            entries.pop(".bcow", None)
            for path in [path for path in entries if path.startswith(".bcow/")]:
                del entries[path]
        support.assert_same_tree(self, want, have)

    def test_a_partial_is_no_file_to_overlayfs(self):
        overwrite(self.at(BIG), 300_000, b"partly")
        self.mount.unmount()
        seen = self.overlay()
        self.addCleanup(run, "umount", seen)

        def read():
            return read_bytes(os.path.join(seen, BIG))

        self.assert_error("EIO", read)
        self.assertEqual(read_bytes(os.path.join(seen, "d1/odd")), self.original("d1/odd"))

    def overlay(self):
        """The kernel's overlayfs of the upper over the extracted image; read-only, so that it does
        not change the upper."""
        seen = os.path.join(self.mount.directory, "seen")
        os.mkdir(seen)
        run("mount", "-t", "overlay", "-o",
            f"ro,lowerdir={self.upper}:{self.lower.tree},metacopy=on,redirect_dir=on,xino=off",
            "overlay", seen)
        return seen


class Space(UnionCase):
    mounts = False

    @promise("`statfs` reports the space and the inodes of the host's file system. With "
             "`--size-limit`, it reports the space and the inodes that the upper may still use.")
    def test_statfs(self):
        self.mount.mount()
        here, host = os.statvfs(self.where), os.statvfs(self.upper)
        self.assertEqual(here.f_blocks * here.f_frsize, host.f_blocks * host.f_frsize)
        self.assertLess(abs(here.f_bavail * here.f_frsize - host.f_bavail * host.f_frsize), 1 << 30)
        self.assertEqual((here.f_namemax, here.f_flag & os.ST_RDONLY), (255, 0))
        self.mount.unmount()
        self.mount.options.append("--size-limit=50M")
        self.mount.mount()
        self.write("ten", bytes(10 << 20))
        fd = self.opened("ten")
        os.fsync(fd)
        here = os.statvfs(self.where)
        self.assertEqual(here.f_blocks * here.f_frsize, 50 << 20)
        self.assertTrue(39 << 20 <= here.f_bavail * here.f_frsize <= 40 << 20, here)
        # The minimum with a size limit, and the file.
        self.assertEqual((here.f_files, here.f_ffree), (4096, 4095))
