"""Files of an upper that the kernel reads and writes itself, in mounts of a pool.

Whether a read or write reaches bcow is seen by the numbers of requests in the statistics.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import random
import shutil
import sqlite3
import stat
import subprocess
import sys
import time

import test_pool
from promises import promise
from support import (UNPRIVILEGED, bcow, drop_caches, is_mounted, read_bytes, run, until,
                     write_file)
from test_share import LARGE, SMALL, STEPS, Background, ShareCase

PAGE = mmap.PAGESIZE
MIB = 1 << 20


class WholeCase(ShareCase):
    def at(self, name):
        return os.path.join(self.where, name)

    def begin(self, *options):
        """Starts a pool with one mount."""
        self.start()
        self.where = self.change(*options, name="upper")
        self.upper = os.path.join(self.uppers, "upper")

    def used(self, where=None):
        """How many requests read and wrote content."""
        counts = {found["operation"]: found["count"]
                  for found in self.statistics(where or self.where)["operations"]}
        return counts.get("read", 0) + counts.get("write", 0)

    def passes_now(self, name):
        before = self.used()
        fd = os.open(self.at(name), os.O_RDWR)
        try:
            os.pwrite(fd, os.pread(fd, 1, 0), 0)
        finally:
            os.close(fd)
        return self.used() == before

    def assert_passes(self, name, passes=True):
        """A new descriptor of a file reads and writes without requests, or with."""
        self.assertEqual(self.passes_now(name), passes, name)


class Whole(WholeCase):
    def test_files_that_are_created_send_no_reads_and_writes(self):
        self.begin()
        self.assertEqual(self.statistics(self.where)["passthrough"], {"on": True, "reason": None})
        data = random.Random(1).randbytes(3 * MIB)
        for name, flags in (("new", os.O_WRONLY), ("both", os.O_RDWR), ("synced", os.O_RDWR |
                            os.O_SYNC), ("end", os.O_WRONLY | os.O_APPEND)):
            with self.subTest(name=name):
                fd = os.open(self.at(name), flags | os.O_CREAT | os.O_EXCL, 0o640)
                try:
                    for at in range(0, len(data), 70_000):
                        os.write(fd, data[at:at + 70_000])
                        self.assertEqual(os.fstat(fd).st_size, min(at + 70_000, len(data)))
                    os.fsync(fd)
                finally:
                    os.close(fd)
                self.assertTrue(read_bytes(self.at(name)) == data)
                self.assertTrue(read_bytes(os.path.join(self.upper, name)) == data)
                found = os.stat(self.at(name))
                self.assertEqual((found.st_size, stat.S_IMODE(found.st_mode), found.st_nlink),
                                 (len(data), 0o640, 1))
        os.mknod(self.at("made"), 0o600 | stat.S_IFREG)
        write_file(self.at("made"), data)
        self.assertTrue(read_bytes(self.at("made")) == data)
        self.assertEqual(self.used(), 0)
        self.assertIn(b"the kernel reads and writes", self.bcow("stats", self.where).out)
        # The next mount finds them.
        self.bcow("umount", self.where)
        self.change(name="upper", where=self.where)
        for name in ("new", "both", "synced", "end", "made"):
            self.assertTrue(read_bytes(self.at(name)) == data, name)
        self.assertEqual(self.used(), 0)
        self.stop()

    def test_mounts_that_cannot_say_why(self):
        self.start()
        for options, reason in ((("--share", "off"), "as --share says"),
                                (("--size-limit", "1G"), "the upper has a limit"),
                                (("--inode-limit", "5000"), "the upper has a limit"),
                                (("-o", "writeback"), "the mount has the option writeback")):
            self.where = self.change(*options)
            write_file(self.at("new"), b"content")
            self.assertEqual(self.statistics(self.where)["passthrough"],
                             {"on": False, "reason": reason})
            self.assertIn(reason.encode(), self.bcow("stats", self.where).out)
            if "writeback" not in options:
                self.assertGreater(self.used(), 0)
        self.assertIsNone(self.statistics(self.mount())["passthrough"])
        self.stop()

    def test_files_of_the_image_are_used_once_they_are_whole(self):
        self.begin()
        # Copied whole: the copy must be durable, and no descriptor open that sends requests.
        fd = self.open(self.where, "small", os.O_RDWR)
        os.pwrite(fd, b"written", 0)
        self.assert_passes("small", passes=False)
        os.fsync(fd)
        self.assert_passes("small", passes=False)
        self.close()
        until(lambda: self.passes_now("small"), "the descriptor is released")
        self.assert_passes("small")
        self.assertEqual(read_bytes(self.at("small")), b"written" + self.data["small"][7:])
        # Truncated, so without content of the image. A flush in the background can make it durable
        # before the fsync does, but its descriptor sends requests.
        fd = self.open(self.where, "file1", os.O_WRONLY | os.O_TRUNC)
        os.write(fd, b"new content")
        self.assert_passes("file1", passes=False)
        os.fsync(fd)
        self.assert_passes("file1", passes=False)
        self.close()
        until(lambda: self.passes_now("file1"), "the descriptor is released")
        # A partial file of which a program writes all blocks.
        new = random.Random(2).randbytes(LARGE)
        fd = self.open(self.where, "file2", os.O_RDWR)
        os.pwrite(fd, new[:LARGE // 2], 0)
        self.assert_passes("file2", passes=False)
        os.pwrite(fd, new[LARGE // 2:], LARGE // 2)
        os.fsync(fd)
        self.close()
        until(lambda: self.passes_now("file2"), "the partial file is whole")
        self.assertTrue(read_bytes(self.at("file2")) == new)
        with open(self.at("file2"), "r+b") as file:
            file.seek(1000)
            file.write(b"again")
        self.assertTrue(read_bytes(self.at("file2")) == new[:1000] + b"again" + new[1005:])
        self.assert_passes("file2")
        # As all others, with the number that it had.
        self.assertEqual(os.stat(self.at("file2")).st_ino,
                         os.stat(os.path.join(self.change(), "file2")).st_ino)
        self.stop()

    @promise("When programs have read or written a partial file at least as many times as it lacks "
             "blocks, the mount copies these blocks from the image in the background, unless they "
             "take more than a tenth of the free space of the host.")
    def test_a_partial_file_that_is_used_often_becomes_whole(self):
        self.begin()
        name = "directory/large"
        source, content = random.Random(6), bytearray(self.data[name])
        fd = self.open(self.where, name, os.O_RDWR)

        def write(times):
            for _ in range(times):
                at, new = source.randrange(100_000), source.randbytes(10)
                self.assertEqual(os.pwrite(fd, new, at), 10)
                content[at:at + 10] = new

        def partial_files():
            return self.statistics(self.where)["upper"]["sketches"]["open"]

        def is_whole():
            write(len(content) // PAGE)
            return partial_files() == 0

        def passes():
            # The kernel holds the file, of which the next process does not know the descriptors.
            drop_caches("3")
            return self.passes_now(name)

        write(100)
        self.assertEqual(partial_files(), 1)
        write(len(content) // PAGE)
        # The next process counts for itself.
        self.kill()
        until(is_whole, "the file becomes whole")
        os.fsync(fd)
        self.close()
        until(passes, "the descriptor is released")
        self.assertTrue(read_bytes(self.at(name)) == content)
        self.assertTrue(read_bytes(os.path.join(self.upper, name)) == content)
        self.stop()

    def test_all_ways_of_changing_a_file_agree(self):
        self.begin()
        data = bytearray(random.Random(3).randbytes(MIB))
        write_file(self.at("file"), data)
        fd, reader = (self.open(self.where, "file", flags) for flags in (os.O_RDWR, os.O_RDONLY))
        memory, seen = mmap.mmap(fd, MIB), mmap.mmap(reader, MIB, prot=mmap.PROT_READ)

        def agree():
            size = len(data)
            for one in (fd, reader):
                self.assertEqual(os.fstat(one).st_size, size)
                self.assertTrue(os.pread(one, size + 1, 0) == data)
                self.assertEqual(os.lseek(one, 0, os.SEEK_END), size)
            for one in (memory, seen):
                self.assertTrue(one[:min(size, MIB)] == data[:MIB])
            self.assertTrue(read_bytes(self.at("file")) == data)
            self.assertTrue(read_bytes(os.path.join(self.upper, "file")) == data)

        agree()
        os.pwrite(fd, b"x" * 9000, 5000)
        data[5000:14_000] = b"x" * 9000
        agree()
        memory[20_000:20_010] = b"y" * 10
        data[20_000:20_010] = b"y" * 10
        agree()
        end = self.open(self.where, "file", os.O_WRONLY | os.O_APPEND)
        os.write(end, b"z" * 5000)
        data += b"z" * 5000
        agree()
        os.truncate(self.at("file"), MIB)
        del data[MIB:]
        agree()
        run("fallocate", "--punch-hole", "--offset", str(8 * PAGE), "--length", str(4 * PAGE),
            self.at("file"))
        data[8 * PAGE:12 * PAGE] = bytes(4 * PAGE)
        agree()
        run("fallocate", "--offset", str(MIB), "--length", "10000", self.at("file"))
        data += bytes(10_000)
        agree()
        self.assertEqual(os.copy_file_range(reader, fd, 3000, 5000, len(data)), 3000)
        data += data[5000:8000]
        agree()
        aligned = mmap.mmap(-1, PAGE)
        aligned[:] = b"d" * PAGE
        direct = self.open(self.where, "file", os.O_RDWR | os.O_DIRECT)
        self.assertEqual(os.pwritev(direct, [aligned], 2 * PAGE), PAGE)
        data[2 * PAGE:3 * PAGE] = aligned[:]
        agree()
        os.ftruncate(fd, MIB)
        del data[MIB:]
        agree()
        with open(self.at("source"), "wb") as source:
            source.write(b"s" * 10_000)
        with open(self.at("source"), "rb") as source:
            self.assertEqual(os.sendfile(fd, source.fileno(), 0, 10_000), 10_000)
        position = os.lseek(fd, 0, os.SEEK_CUR) - 10_000
        data[position:position + 10_000] = b"s" * 10_000
        del data[position + 10_000:], memory, seen
        memory = mmap.mmap(fd, MIB)
        seen = mmap.mmap(reader, MIB, prot=mmap.PROT_READ)
        self.assertTrue(read_bytes(self.at("file"))[position:] == data[position:])
        memory.close()
        seen.close()
        self.stop()

    @promise("When a program writes to a map of a whole file, `stat` can show the times from "
             "before for 0.01 seconds.")
    def test_times_follow_writes(self):
        self.begin()
        fd = os.open(self.at("file"), os.O_RDWR | os.O_CREAT)
        self.descriptors.append(fd)
        os.ftruncate(fd, 4 * PAGE)

        def later(change):
            before = os.stat(self.at("file"))
            time.sleep(0.02)
            change()
            until(lambda: os.stat(self.at("file")).st_mtime_ns > before.st_mtime_ns, "a new time")
            after, host = os.stat(self.at("file")), os.stat(os.path.join(self.upper, "file"))
            self.assertGreater(after.st_ctime_ns, before.st_ctime_ns)
            self.assertEqual(after.st_mtime_ns, host.st_mtime_ns)

        with mmap.mmap(fd, 4 * PAGE) as memory:
            # Each page, because the host changes the times when a page becomes dirty.
            for page in range(3):
                later(lambda page=page: memory.__setitem__(page * PAGE, 1))
        later(lambda: os.pwrite(fd, b"1", 0))
        before = os.stat(self.at("file")).st_mtime_ns
        time.sleep(0.02)
        os.pwrite(fd, b"1", 0)
        # A write is seen at once.
        self.assertGreater(os.stat(self.at("file")).st_mtime_ns, before)
        os.utime(self.at("file"), ns=(10**18, 10**18))
        self.assertEqual(os.fstat(fd).st_mtime_ns, 10**18)
        self.stop()

    @promise("Reading a whole file updates its access time as the mount options of the upper's "
             "file system say (usually `relatime`).")
    def test_the_host_decides_about_access_times(self):
        self.start()
        disk = os.path.join(self.uppers, "disk")
        os.mkdir(disk)
        run("mount", "-t", "tmpfs", "-o", "strictatime", "tmpfs", disk)
        self.addCleanup(run, "umount", "-l", disk)
        self.where = self.change(name="disk/upper")
        write_file(self.at("new"), b"content")
        before = os.stat(self.at("new")).st_atime_ns
        time.sleep(0.02)
        self.assertEqual(read_bytes(self.at("new")), b"content")
        self.assertGreater(os.stat(self.at("new")).st_atime_ns, before)
        self.stop()

    @promise("`O_DIRECT` on a whole file needs the alignment that the upper's file system needs.")
    def test_direct_writes_need_the_alignment_of_the_host(self):
        self.begin()
        for directory in (self.where, self.upper):
            with self.subTest(directory=directory):
                fd = os.open(os.path.join(directory, "direct"),
                             os.O_RDWR | os.O_CREAT | os.O_DIRECT)
                self.descriptors.append(fd)
                with self.assertRaises(OSError) as caught:
                    os.pwrite(fd, b"odd", 1)
                self.assertEqual(caught.exception.errno, errno.EINVAL)
        self.stop()

    @promise("A file that has set-id bits when it is opened is not used in this way. If it gets "
             "them later, a write by a user that does not own the file clears them only if the "
             "mode lets the group or others write. In this case, `chown(-1, -1)` of any user "
             "clears them too.")
    def test_set_id_bits(self):
        self.begin()
        change = ("import os, sys\n"
                  "os.setresgid(1, 1, 1); os.setgroups([]); os.setresuid(*[int(sys.argv[2])] * 3)\n"
                  "exec(sys.argv[3])\n")

        path = self.at("program")
        write_file(path, b"a program")
        # So that the kernel does not forget the file.
        self.open(self.where, "program")

        def mode_after(mode, user, call):
            os.chown(path, UNPRIVILEGED, 1)
            os.chmod(path, mode)
            subprocess.run([sys.executable, "-c", change, path, str(user), call], check=True,
                           timeout=60)
            return oct(stat.S_IMODE(os.stat(path).st_mode))

        write = "with open(sys.argv[1], 'r+b') as file: file.write(b'x')"
        nothing = "os.chown(sys.argv[1], -1, -1)"
        self.assertEqual(mode_after(0o4755, UNPRIVILEGED, write), oct(0o755))
        self.assertEqual(mode_after(0o6777, 1000, write), oct(0o777))
        self.assertEqual(mode_after(0o6777, 0, write), oct(0o6777))
        self.assertEqual(mode_after(0o4755, UNPRIVILEGED, nothing), oct(0o755))
        self.assertEqual(mode_after(0o4755, 1000, nothing), oct(0o4755))
        self.assertEqual(mode_after(0o4777, 1000, nothing), oct(0o777))
        self.assertEqual(mode_after(0o4755, 0, nothing), oct(0o4755))
        self.assertEqual(self.used(), 0)
        privileged = os.open(self.at("privileged"), os.O_RDWR | os.O_CREAT, 0o4755)
        self.descriptors.append(privileged)
        os.pwrite(privileged, b"by root", 0)
        self.assertGreater(self.used(), 0)
        # A write takes the capabilities, also one of root.
        capability = bytes([1, 0, 0, 2]) + bytes([0, 4]) + bytes(14)
        os.setxattr(path, "security.capability", capability)
        with open(path, "r+b") as file:
            file.write(b"y")
        self.assertNotIn("security.capability", os.listxattr(path))
        self.stop()

    def test_names_change_while_a_file_is_open(self):
        self.begin()
        write_file(self.at("first"), b"1" * 10_000)
        fd = self.open(self.where, "first", os.O_RDWR)
        memory = mmap.mmap(fd, 0)
        os.link(self.at("first"), self.at("second"))
        os.rename(self.at("first"), self.at("third"))
        with open(self.at("second"), "r+b") as file:
            file.write(b"by the other name")
        self.assertEqual(memory[:17], b"by the other name")
        os.chmod(self.at("third"), 0o600)
        status = [os.fstat(fd), os.stat(self.at("second")), os.stat(self.at("third"))]
        self.assertEqual(len({(one.st_ino, one.st_nlink, one.st_mode, one.st_mtime_ns)
                              for one in status}), 1)
        write_file(self.at("other"), b"another file")
        os.rename(self.at("other"), self.at("third"))
        self.assertEqual(read_bytes(self.at("third")), b"another file")
        os.remove(self.at("second"))
        self.assertEqual(os.fstat(fd).st_nlink, 0)
        os.pwrite(fd, b"still", 0)
        self.assertEqual(memory[:5], b"still")
        with open(f"/proc/self/fd/{fd}", "r+b") as file:
            self.assertEqual(file.read(5), b"still")
            file.write(b"there")
        self.assertEqual(memory[5:10], b"there")
        memory.close()
        # A name is used again.
        for number in range(20):
            write_file(self.at("again"), bytes([number]) * 5000)
            self.assertEqual(read_bytes(self.at("again")), bytes([number]) * 5000)
            os.remove(self.at("again"))
        self.assertEqual(self.used(), 0)
        self.stop()

    def test_programs_that_were_installed_run(self):
        self.begin()
        shutil.copy(shutil.which("sleep"), self.at("program"))
        running = subprocess.Popen([self.at("program"), "60"])
        self.addCleanup(running.wait)
        self.addCleanup(running.kill)
        until(lambda: os.path.realpath(f"/proc/{running.pid}/exe") ==
              os.path.realpath(self.at("program")), "the program runs")
        with self.assertRaises(OSError) as caught:
            self.open(self.where, "program", os.O_RDWR)
        self.assertEqual(caught.exception.errno, errno.ETXTBSY)
        running.kill()
        running.wait()
        self.open(self.where, "program", os.O_RDWR)
        with self.assertRaises(OSError) as caught:
            subprocess.run([self.at("program"), "0"])
        self.assertEqual(caught.exception.errno, errno.ETXTBSY)
        self.stop()

    def test_locks_and_watches_are_those_of_one_file(self):
        self.begin()
        write_file(self.at("file"), b"content")
        libc = ctypes.CDLL(None, use_errno=True)
        watch = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self.descriptors.append(watch)
        modified = 2
        self.assertGreaterEqual(libc.inotify_add_watch(watch, os.fsencode(self.at("file")),
                                                       modified), 0)
        with open(self.at("file"), "r+b") as file:
            os.lockf(file.fileno(), os.F_LOCK, 0)
            taken = subprocess.run([sys.executable, "-c",
                                    "import os, sys\nfd = os.open(sys.argv[1], os.O_RDWR)\n"
                                    "os.lockf(fd, os.F_TLOCK, 0)", self.at("file")],
                                   stderr=subprocess.DEVNULL)
            self.assertNotEqual(taken.returncode, 0)
            file.write(b"changed")
        self.assertGreater(len(os.read(watch, 4096)), 0)
        self.stop()

    def test_space_of_removed_files_is_free(self):
        self.start()
        disk = os.path.join(self.uppers, "disk")
        os.mkdir(disk)
        run("mount", "-t", "tmpfs", "tmpfs", disk)
        self.addCleanup(run, "umount", "-l", disk)
        self.where = self.change(name="disk/upper")

        def free():
            return os.statvfs(disk).f_bfree * os.statvfs(disk).f_frsize

        before = free()
        write_file(self.at("large"), bytes(20 * MIB))
        fd = self.open(self.where, "large", os.O_RDWR)
        os.remove(self.at("large"))
        self.assertLess(free(), before - 19 * MIB)
        os.pwrite(fd, b"still there", 0)
        self.close()
        until(lambda: free() > before - MIB, "the space of the file is free")
        # Also after another process has taken over.
        write_file(self.at("large"), bytes(20 * MIB))
        fd = self.open(self.where, "large", os.O_RDWR)
        os.remove(self.at("large"))
        self.kill()
        self.assertEqual(os.pread(fd, 4, 0), bytes(4))
        self.close()
        until(lambda: free() > before - MIB, "the space of the file is free")
        self.stop()

    def test_a_mount_with_a_map_is_busy(self):
        self.begin()
        write_file(self.at("file"), bytes(PAGE))
        fd = os.open(self.at("file"), os.O_RDWR)
        memory = mmap.mmap(fd, PAGE)
        os.close(fd)
        refused = subprocess.run(["umount", self.where], stderr=subprocess.PIPE)
        self.assertNotEqual(refused.returncode, 0)
        memory[:5] = b"later"
        memory.close()
        self.bcow("umount", self.where)
        self.assertFalse(is_mounted(self.where))
        self.assertEqual(read_bytes(os.path.join(self.upper, "file"))[:5], b"later")
        self.stop()


class Writer(Background):
    """A program that appends to a file, writes to a map of it, and makes others."""

    def run(self):
        try:
            source = random.Random(5)
            path = os.path.join(self.where, "log")
            content, small = bytearray(source.randbytes(MIB)), {}
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            os.write(fd, content)
            nameless = os.open(path + "-removed", os.O_RDWR | os.O_CREAT | os.O_EXCL)
            os.unlink(path + "-removed")
            memory = mmap.mmap(fd, MIB)
            while not self.is_over.is_set():
                new = source.randbytes(1000)
                content += new
                os.lseek(fd, 0, os.SEEK_END)
                os.write(fd, new)
                at = source.randrange(MIB - 100)
                content[at:at + 100] = memory[at:at + 100] = new[:100]
                os.pwrite(nameless, new, 0)
                assert os.pread(nameless, 2000, 0) == new, "a file without a name"
                name = os.path.join(self.where, f"small{self.rounds % 50}")
                if source.random() < 0.3 and name in small:
                    os.rename(name, name + "-renamed")
                    small[name + "-renamed"] = small.pop(name)
                else:
                    with open(name, source.choice(["wb", "ab"])) as file:
                        old = small.get(name, b"") if file.tell() else b""
                        file.write(new)
                    small[name] = old + new
                with open(path, "rb") as file:
                    assert file.read() == content, "the log"
                for name in source.sample(sorted(small), min(5, len(small))):
                    with open(name, "rb") as file:
                        assert file.read() == small[name], name
                if source.random() < 0.1:
                    os.fsync(fd)
                self.rounds += 1
            self.content = content
            memory.close()
            os.close(fd)
            os.close(nameless)
        except (OSError, AssertionError) as failure:
            self.failure = failure


class Takeovers(WholeCase):
    @promise("Programs that read or write whole files do not wait while the process of the pool is "
             "killed or replaced. Their other requests do.")
    def test_programs_go_on_while_the_process_is_killed_and_replaced(self):
        self.begin()
        with Writer(self.where) as writer:
            self.disturb(2 * STEPS, writer.goes_on)
        self.assertIsNone(writer.failure)
        self.assertTrue(read_bytes(os.path.join(self.upper, "log")) == writer.content)
        self.assertTrue(self.statistics(self.where)["passthrough"]["on"])
        self.assertEqual(self.statistics(self.where)["errors"]["total"], 0)
        self.stop()
        self.assertTrue(read_bytes(os.path.join(self.upper, "log")) == writer.content)
        bcow("fsck", self.upper, timeout=test_pool.TIMEOUT)

    def test_each_descriptor_stays_of_its_kind(self):
        self.begin()
        write_file(self.at("new"), b"whole")
        write_file(self.at("unopened"), b"not open when the process ends")
        os.stat(self.at("unopened"))
        new = self.open(self.where, "new", os.O_RDWR)
        partial = self.open(self.where, "file0", os.O_RDWR)
        os.pwrite(partial, b"partial", 0)
        small = self.open(self.where, "small", os.O_RDWR)
        os.pwrite(small, b"small", 0)
        os.fsync(small)
        for _ in range(2):
            self.kill()
            # A descriptor of another kind would fail with EIO.
            for name, fd, content in (("new", new, b"whole"), ("file0", partial, b"partial"),
                                      ("small", small, b"small")):
                with open(self.at(name), "r+b") as file:
                    self.assertEqual(file.read(len(content)), content)
                self.assertEqual(os.pread(fd, len(content), 0), content)
            self.assertEqual(read_bytes(self.at("unopened"))[:3], b"not")
        self.assert_passes("new")
        # The kernel forgets the files.
        self.close()
        drop_caches("3")
        self.assertEqual(read_bytes(self.at("small")), b"small" + self.data["small"][5:SMALL])
        until(lambda: self.passes_now("small"), "the kernel has forgotten the file")
        self.stop()

    @promise("If both processes of a pool are killed, a descriptor or a map of a whole file still "
             "reads and writes the file in the upper, also after the next mount of the upper.")
    def test_descriptors_outlive_the_pool(self):
        self.begin()
        write_file(self.at("file"), b"before")
        fd = self.open(self.where, "file", os.O_RDWR)
        pool = self.find()
        for pid in (pool["keeper"], pool["pid"]):
            os.kill(pid, 9)
        self.assert_ends(pool["pid"])
        os.pwrite(fd, b"after!", 0)
        self.assertEqual(read_bytes(os.path.join(self.upper, "file")), b"after!")
        subprocess.run(["umount", "-l", self.where], check=True)
        self.start()
        self.change(name="upper", where=self.where)
        self.assertEqual(read_bytes(self.at("file")), b"after!")
        os.pwrite(fd, b"again!", 0)
        self.assertEqual(read_bytes(self.at("file")), b"again!")
        self.stop()


class Databases(WholeCase):
    def test_a_database_that_was_created_there_keeps_its_transactions(self):
        self.begin()
        with contextlib.closing(sqlite3.connect(self.at("db"))) as database:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("CREATE TABLE numbers (number INTEGER)")
            for first in range(0, 3000, 1000):
                with database:
                    database.executemany("INSERT INTO numbers VALUES (?)",
                                         ((number,) for number in range(first, first + 1000)))
                self.kill()
            found = database.execute("SELECT SUM(number) FROM numbers").fetchone()
            self.assertEqual(found, (sum(range(3000)),))
            self.assertEqual(database.execute("PRAGMA integrity_check").fetchone(), ("ok",))
        self.assertEqual(self.used(), 0)
        self.stop()
