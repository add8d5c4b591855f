"""Files that mounts of a pool share: one page cache for the files that the mounts have not changed.

Whether a read reaches bcow is seen by the counters of the pool: a read that the kernel answers from
its page cache changes none of them.
"""

import ctypes
import errno
import fcntl
import functools
import hashlib
import json
import mmap
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import sequences
import test_ahead
import test_pool
from overlay import Entry
from promises import promise
from support import (UNPRIVILEGED, WORK, Caches, assert_refused, bcow, children, drop_caches,
                     is_mounted, named, need, need_kernel, read_bytes, run, until)

STEPS = test_pool.STEPS
LARGE = 300_000
SMALL = 5000


def mapped(fd, flags=mmap.MAP_SHARED):
    return mmap.mmap(fd, 0, flags=flags, prot=mmap.PROT_READ)


class ShareCase(test_pool.PoolCase):
    """An image with files of each kind, and mounts with uppers of their own."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        need_kernel(6, 12, "passthrough to other files")
        tree = cls.path("shared")
        os.makedirs(os.path.join(tree, "directory", "below"))
        source = random.Random(9)
        cls.data = {f"file{number}": source.randbytes(LARGE) for number in range(12)}
        cls.data["small"] = source.randbytes(SMALL)
        cls.data["directory/large"] = source.randbytes(3_000_000)
        cls.data["hard1"] = cls.data["directory/hard2"] = source.randbytes(LARGE)
        for name, data in cls.data.items():
            if name != "directory/hard2":
                cls.path(f"shared/{name}", data)
        os.link(os.path.join(tree, "hard1"), os.path.join(tree, "directory/hard2"))
        os.symlink("file0", os.path.join(tree, "link"))
        shutil.copy(shutil.which("sleep"), os.path.join(tree, "sleep"))
        cls.shared = cls.path("shared.bcow")
        bcow("convert", f"dir:{tree}", cls.shared, timeout=test_pool.TIMEOUT)

    def setUp(self):
        super().setUp()
        self.uppers = tempfile.mkdtemp(prefix="uppers-", dir=WORK)
        self.addCleanup(shutil.rmtree, self.uppers, ignore_errors=True)
        self.descriptors = []
        self.addCleanup(self.close)

    def close(self):
        while self.descriptors:
            os.close(self.descriptors.pop())

    def change(self, *options, name=None, where=None):
        """Mounts the image with an upper."""
        upper = os.path.join(self.uppers, name or f"upper{len(self.mounts)}")
        return self.mount("--upper", upper, "-o", "allow_other", *options, image=self.shared,
                          where=where)

    def open(self, where, name, flags=os.O_RDONLY):
        self.descriptors.append(os.open(os.path.join(where, name), flags))
        return self.descriptors[-1]

    def statistics(self, where):
        return json.loads(self.bcow("stats", where, "--json").out)

    def looked_up(self):
        """How many blocks were read from the cache of the pool or into it."""
        cache = self.stats()["cache"]
        return cache["hits"] + cache["misses"]

    def assert_cached(self, before):
        """Fails if content was looked up since `before`. Attributes may be."""
        self.assertLess(self.looked_up() - before, 5)

    def assert_content(self, where, changed=None):
        for name, data in (self.data | (changed or {})).items():
            self.assertTrue(read_bytes(os.path.join(where, name)) == data, name)

    def stop(self):
        self.close()
        self.bcow("pool", "stop", "--force", "pool")


class Sharing(ShareCase):
    @Caches.counted_on
    def test_unchanged_files_have_one_page_cache(self):
        self.start()
        first, second = self.change(), self.change()
        for where in (first, second):
            self.assertEqual(self.statistics(where)["share"], {"on": True, "reason": None})
        large = "directory/large"
        data = read_bytes(os.path.join(first, large))
        self.assertTrue(data == self.data[large])
        # All that the open needs is in the cache of the kernel afterwards.
        fd = self.open(second, large)
        before = self.looked_up()
        self.assertTrue(os.pread(fd, len(data), 0) == data)
        with mapped(fd) as memory:
            self.assertTrue(memory[:] == data)
        self.assert_cached(before)
        kinds = {operation["operation"] for operation in self.statistics(second)["operations"]}
        self.assertNotIn("read", kinds)
        self.assertIn("open", kinds)
        # A mount with its own page cache reads all of it.
        own = self.change("--share", "off")
        found = self.statistics(own)["share"]
        self.assertEqual(found, {"on": False, "reason": "as --share says"})
        before = self.looked_up()
        self.assertTrue(read_bytes(os.path.join(own, large)) == data)
        self.assertGreater(self.looked_up(), before + 10)
        self.assertIn(b"one for all mounts", self.bcow("stats", first).out)
        self.assertIn(b"of this mount only: as --share says", self.bcow("stats", own).out)
        self.stop()

    def test_a_verified_mount_does_not_show_what_another_one_has_read(self):
        self.start()
        first, second = self.change(), self.change("--verify", "merkle")
        self.assertTrue(self.statistics(second)["share"]["on"])
        self.assert_content(first)
        fd = self.open(second, "directory/large")
        before = self.looked_up()
        os.pread(fd, 3_000_000, 0)
        self.assertGreater(self.looked_up(), before + 10)
        self.stop()

    def test_each_way_of_reading_gives_the_content(self):
        self.start()
        first, second = self.change(), self.change()
        name = "directory/large"
        data = self.data[name]
        for where in (first, second):
            fd = self.open(where, name, os.O_RDONLY | os.O_DIRECT)
            buffer = mmap.mmap(-1, 1 << 20)
            self.assertEqual(os.preadv(fd, [buffer], 1 << 20), 1 << 20)
            self.assertTrue(buffer[:] == data[1 << 20:2 << 20])
            fd = self.open(where, name)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
            with tempfile.TemporaryFile(dir=WORK) as target:
                # Through a pipe of the kernel.
                self.assertEqual(os.sendfile(target.fileno(), fd, 0, len(data)), len(data))
                self.assertTrue(os.pread(target.fileno(), len(data), 0) == data)
            copy = os.path.join(where, "copy")
            run("cp", os.path.join(where, name), copy)
            self.assertTrue(read_bytes(copy) == data)
            # As another user, who may not reach the hidden mount.
            out = run("cat", os.path.join(where, name), user=UNPRIVILEGED).out
            self.assertTrue(out == data)
            self.assertEqual(os.pread(fd, 10, len(data) - 3), data[-3:])
            self.assertEqual(os.pread(fd, 10, len(data)), b"")
        self.stop()

    def test_damage_is_counted_for_each_mount(self):
        image = self.path("damaged.bcow")
        shutil.copy(self.shared, image)
        with open(image, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            # Random bytes are stored as they are.
            at = memory.find(self.data["file5"][200_000:200_064])
            self.assertGreater(at, 0)
            memory[at] ^= 1
        self.start()
        places = [self.mount("-o", "allow_other", "--upper", os.path.join(self.uppers, f"u{n}"),
                             image=image) for n in range(2)]
        for where in places:
            with self.assertRaises(OSError) as caught:
                read_bytes(os.path.join(where, "file5"))
            self.assertEqual(caught.exception.errno, errno.EIO)
            self.assertTrue(read_bytes(os.path.join(where, "file1")) == self.data["file1"])
        for where in places:
            found = self.statistics(where)["errors"]
            self.assertGreater(found["total"], 0)
            self.assertEqual(found["recent"][0]["paths"], ["/file5"])
        self.stop()

    def described(self, where):
        """All files with their content and attributes."""
        found = {}
        for path, directories, files in os.walk(where):
            for name in directories + files:
                at = os.path.join(path, name)
                status = os.lstat(at)
                content = None
                if name in files and not os.path.islink(at):
                    content = hashlib.sha256(read_bytes(at)).hexdigest()
                found[os.path.relpath(at, where)] = (
                    status.st_ino, status.st_mode, status.st_nlink, status.st_uid, status.st_size,
                    status.st_mtime_ns, status.st_blocks, content)
        return found

    def test_the_tree_is_that_of_an_unshared_mount(self):
        self.start()
        places = [self.change(), self.change(), self.change("--share", "off")]
        for where in places[:2]:
            with open(os.path.join(where, "file1"), "r+b") as file:
                file.write(b"changed")
            os.chmod(os.path.join(where, "file2"), 0o600)
        with open(os.path.join(places[2], "file1"), "r+b") as file:
            file.write(b"changed")
        os.chmod(os.path.join(places[2], "file2"), 0o600)
        times = (10**18, 10**18)
        for where in places:
            os.utime(os.path.join(where, "file1"), ns=times)
        first, second, own = map(self.described, places)
        self.assertEqual(first, own)
        self.assertEqual(second, own)
        self.stop()

    def test_small_files_are_not_shared(self):
        self.start()
        where = self.change()
        fd = self.open(where, "small")
        with open(os.path.join(where, "small"), "r+b") as file:
            file.write(b"changed")
        self.assertEqual(os.pread(fd, 7, 0), b"changed")
        self.stop()

    def assert_first_change(self, where, name, change, expected):
        """A file that is open and mapped, changed by `change`, which gets its path."""
        path, old = os.path.join(where, name), self.data[name]
        fd, number = self.open(where, name), os.stat(path).st_ino
        memory, private = mapped(fd), mapped(fd, mmap.MAP_PRIVATE)
        # In memory before the change, and after it.
        self.assertEqual(memory[:10], old[:10])
        change(path)
        self.assertTrue(memory[:] == old, name)
        self.assertTrue(private[:] == old, name)
        self.assertTrue(os.pread(fd, len(old) + 1, 0) == old, name)
        self.assertTrue(read_bytes(path) == expected, name)
        for status in (os.fstat(fd), os.stat(path)):
            self.assertEqual((status.st_size, status.st_ino), (len(expected), number), name)
        with open(path, "rb") as later, mapped(later.fileno()) as new:
            self.assertTrue(new[:] == expected, name)
            os.posix_fadvise(later.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            self.assertTrue(later.read() == expected, name)
        # The old content is found where it is.
        self.assertEqual(os.lseek(fd, 0, os.SEEK_DATA), 0)
        copy = os.path.join(where, f"copy-{os.path.basename(name)}")
        with open(copy, "wb") as target:
            while os.copy_file_range(fd, target.fileno(), 1 << 20):
                pass
        self.assertTrue(read_bytes(copy)[:len(expected)] == old[:len(expected)], name)
        os.remove(copy)
        # Attributes by the old descriptor are those of the file.
        os.fchmod(fd, 0o640)
        self.assertEqual(os.stat(path).st_mode & 0o777, 0o640)
        os.setxattr(fd, "user.name", b"value")
        self.assertEqual(os.getxattr(path, "user.name"), b"value")
        os.chmod(path, 0o604)
        self.assertEqual(os.fstat(fd).st_mode & 0o777, 0o604)
        memory.close()
        private.close()

    @promise("A descriptor or a mapping from before the first open for writing shows the content "
             "of the image for ever. Descriptors that are opened later show the new content.",
             "`fstat` of a descriptor from before shows the attributes of now, also the size, and "
             "`st_ino` does not change.")
    def test_first_change_leaves_what_is_open(self):
        self.start()
        where, other = self.change(name="changed"), self.change()

        def write(path, flags=os.O_WRONLY, at=100_000):
            fd = os.open(path, flags)
            os.pwrite(fd, b"x" * 20, at)
            os.close(fd)

        def shared_mapping(path):
            with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
                memory[100_000:100_020] = b"x" * 20
                # Not written back yet.
                with open(path, "rb") as reader:
                    self.assertEqual(os.pread(reader.fileno(), 20, 100_000), b"x" * 20)

        def truncated(path):
            write(path, os.O_WRONLY | os.O_TRUNC, 0)

        def appended(path):
            fd = os.open(path, os.O_WRONLY | os.O_APPEND)
            os.write(fd, b"x" * 20)
            os.close(fd)

        def holed(path):
            run("fallocate", "--punch-hole", "--offset", "0", "--length", "8192", path)

        def replaced(data):
            return data[:100_000] + b"x" * 20 + data[100_020:]

        changed = {}
        for name, change, expected in (
                ("file0", write, replaced),
                ("file1", lambda path: write(path, os.O_RDWR), replaced),
                ("file2", truncated, lambda data: b"x" * 20),
                ("file3", lambda path: os.truncate(path, 100), lambda data: data[:100]),
                ("file4", lambda path: os.truncate(path, 400_000),
                 lambda data: data + bytes(100_000)),
                ("file5", appended, lambda data: data + b"x" * 20),
                ("file6", shared_mapping, replaced),
                ("file7", holed, lambda data: bytes(8192) + data[8192:]),
                ("directory/large", write, replaced)):
            changed[name] = expected(self.data[name])
            with self.subTest(name=name):
                self.assert_first_change(where, name, change, changed[name])
        self.assert_content(where, changed)
        self.assert_content(other)
        self.close()
        self.bcow("umount", where)
        for options in ((), ("--share", "off")):
            self.change(*options, name="changed", where=where)
            self.assert_content(where, changed)
            self.bcow("umount", where)
        self.stop()

    @promise("Opening a descriptor from before once more, through `/proc/self/fd`, fails with "
             "ESTALE. So does an open for writing of a file that is itself the root of a bind "
             "mount, or that was opened with `O_PATH` before.")
    def test_descriptors_from_before_cannot_be_opened_again(self):
        self.start()
        where = self.change()
        fd = self.open(where, "file0")
        link = f"/proc/self/fd/{fd}"
        self.assertTrue(read_bytes(link) == self.data["file0"])
        with self.assertRaises(OSError) as caught:
            open(link, "r+b")
        self.assertEqual(caught.exception.errno, errno.ESTALE)
        # Asking for it counts as an open for writing.
        with self.assertRaises(OSError) as caught:
            open(link, "rb")
        self.assertEqual(caught.exception.errno, errno.ESTALE)
        new = self.open(where, "file0", os.O_RDWR)
        os.pwrite(new, b"new", 0)
        with open(f"/proc/self/fd/{new}", "r+b") as file:
            self.assertEqual(file.read(3), b"new")
        # Nor can files that the kernel does not look up again.
        only = self.open(where, "file1", os.O_PATH)
        bound = self.path("bound", b"")
        run("mount", "--bind", os.path.join(where, "file2"), bound)
        try:
            self.assertTrue(read_bytes(bound) == self.data["file2"])
            for path in (f"/proc/self/fd/{only}", bound):
                with self.assertRaises(OSError) as caught:
                    open(path, "r+b")
                self.assertEqual(caught.exception.errno, errno.ESTALE)
        finally:
            run("umount", bound)
        for name in ("file1", "file2"):
            with open(os.path.join(where, name), "r+b") as file:
                self.assertTrue(file.read() == self.data[name])
        self.stop()

    @promise("A lock or an inotify watch from before the first open for writing concerns only "
             "descriptors from before. Watches of directories are not affected, nor are files of "
             "less than 16 KiB.")
    def test_locks_and_watches_belong_to_what_is_open(self):
        self.start()
        where = self.change()
        libc = ctypes.CDLL(None, use_errno=True)
        watch = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self.assertGreaterEqual(watch, 0)
        self.descriptors.append(watch)

        def events(path, change):
            """The number of bytes about writes to `path` during a change."""
            modified = 2
            added = libc.inotify_add_watch(watch, os.fsencode(path), modified)
            self.assertGreaterEqual(added, 0)
            change()
            try:
                return len(os.read(watch, 4096))
            except BlockingIOError:
                return 0
            finally:
                libc.inotify_rm_watch(watch, added)
                try:
                    os.read(watch, 4096)
                except BlockingIOError:
                    pass

        def write(name):
            with open(os.path.join(where, name), "r+b") as file:
                file.write(b"new")

        for name, is_shared in (("small", False), ("file1", True)):
            fd = self.open(where, name)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path = os.path.join(where, name)
            self.assertEqual(events(path, lambda name=name: write(name)) == 0, is_shared)
            with open(path, "r+b") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    excluded = False
                except BlockingIOError:
                    excluded = True
            self.assertEqual(excluded, not is_shared)
            # From now on all programs have the same file.
            self.assertGreater(events(path, lambda name=name: write(name)), 0)
        self.assertGreater(events(where, lambda: write("file2")), 0)
        self.stop()

    @promise("A program that is running cannot be written to (ETXTBSY), as in other mounts.")
    def test_programs_that_run_cannot_be_written_to(self):
        self.start()
        where = self.change()
        path = os.path.join(where, "sleep")
        running = subprocess.Popen([path, "60"])
        self.addCleanup(running.wait)
        self.addCleanup(running.kill)
        until(lambda: os.path.realpath(f"/proc/{running.pid}/exe") == os.path.realpath(path),
              "the program runs")
        for flags in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC):
            with self.assertRaises(OSError) as caught:
                os.open(path, flags)
            self.assertEqual(caught.exception.errno, errno.ETXTBSY)
        with self.assertRaises(OSError) as caught:
            os.truncate(path, 0)
        self.assertEqual(caught.exception.errno, errno.ETXTBSY)
        os.chmod(path, 0o700)
        with self.assertRaises(OSError) as caught:
            os.open(path, os.O_WRONLY)
        self.assertEqual(caught.exception.errno, errno.ETXTBSY)
        running.kill()
        running.wait()
        fd = self.open(where, "sleep", os.O_RDWR)
        with self.assertRaises(OSError) as caught:
            subprocess.run([path, "0"])
        self.assertEqual(caught.exception.errno, errno.ETXTBSY)
        os.pwrite(fd, b"\0", os.fstat(fd).st_size)
        self.close()
        run(path, "0")
        self.stop()

    def test_names_change_as_in_any_mount(self):
        self.start()
        where = self.change()

        def at(name):
            return os.path.join(where, name)

        # A removed file, and its name again.
        fd = self.open(where, "file0")
        memory = mapped(fd)
        os.remove(at("file0"))
        self.assertEqual(os.fstat(fd).st_nlink, 0)
        self.assertTrue(memory[:] == self.data["file0"])
        self.assertTrue(read_bytes(f"/proc/self/fd/{fd}") == self.data["file0"])
        with open(at("file0"), "wb") as file:
            file.write(b"another")
        self.assertEqual(read_bytes(at("file0")), b"another")
        self.assertTrue(os.pread(fd, LARGE, 0) == self.data["file0"])
        memory.close()
        # A renamed one, and one that is replaced.
        moved, replaced = self.open(where, "file1"), self.open(where, "file2")
        os.rename(at("file1"), at("file2"))
        self.assertTrue(os.pread(moved, LARGE, 0) == self.data["file1"])
        self.assertTrue(os.pread(replaced, LARGE, 0) == self.data["file2"])
        self.assertTrue(read_bytes(at("file2")) == self.data["file1"])
        with open(at("file2"), "r+b") as file:
            file.write(b"new")
        self.assertEqual(read_bytes(at("file2"))[:3], b"new")
        self.assertFalse(os.path.exists(at("file1")))
        # A new name of a file that is open.
        os.link(at("file3"), at("linked"))
        self.assertEqual(os.stat(at("linked")).st_ino, os.stat(at("file3")).st_ino)
        self.stop()

    def test_hard_links_stay_one_file(self):
        self.start()
        where = self.change()
        names = [os.path.join(where, name) for name in ("hard1", "directory/hard2")]
        # The kernel knows both names by the first number.
        fds = [self.open(where, name) for name in ("hard1", "directory/hard2")]
        content = bytearray(self.data["hard1"])

        def agree():
            status = [os.stat(name) for name in names] + [os.fstat(fd) for fd in fds]
            keys = {(one.st_ino, one.st_size, one.st_mtime_ns, one.st_nlink, one.st_mode)
                    for one in status}
            self.assertEqual(len(keys), 1, keys)
            for name in names:
                self.assertTrue(read_bytes(name) == content)

        agree()
        with open(names[0], "r+b") as file:
            file.write(b"first")
        content[:5] = b"first"
        agree()
        os.truncate(names[1], 1000)
        del content[1000:]
        agree()
        with open(names[1], "ab") as file:
            file.write(b"second")
        content += b"second"
        agree()
        os.chmod(names[1], 0o600)
        agree()
        os.truncate(names[0], 2000)
        content += bytes(2000 - len(content))
        agree()
        third = os.path.join(where, "third")
        os.link(names[0], third)
        agree()
        os.remove(names[0])
        names[0] = third
        agree()
        os.remove(third)
        names.pop(0)
        agree()
        self.stop()

    @Caches.counted_on
    def test_an_open_file_shows_changes_of_names_that_the_kernel_knows_from_before(self):
        self.start()
        where = self.change()
        first, second = (os.path.join(where, name) for name in ("hard1", "directory/hard2"))
        # The kernel knows both names by the number of the node, and the descriptor by the alias.
        os.stat(first)
        os.stat(second)
        writer = self.open(where, "hard1", os.O_RDWR)
        os.pwrite(writer, b"changed", 0)
        self.assertEqual(os.fstat(writer).st_nlink, 2)
        os.unlink(first)
        self.assertEqual(os.fstat(writer).st_nlink, 1)
        for name in ("moved", "hard1"):
            before = os.fstat(writer)
            os.rename(second, os.path.join(where, name))
            second = os.path.join(where, name)
            self.assertEqual(os.fstat(writer), os.stat(second))
            self.assertGreater(os.fstat(writer).st_ctime_ns, before.st_ctime_ns)
        os.rename(os.path.join(where, "small"), second)
        self.assertEqual(os.fstat(writer).st_nlink, 0)
        self.stop()

    def test_a_name_that_the_kernel_knows_from_before_can_be_opened_for_writing(self):
        self.start()
        # The kernel may forget the file between its two requests; it does so in one of five cases.
        for _ in range(20):
            where = self.change()
            first, second = (os.path.join(where, name) for name in ("hard1", "directory/hard2"))
            self.assertEqual(os.stat(first).st_ino, os.stat(second).st_ino)
            with open(first, "r+b"):
                pass
            # So the kernel knows the file only by the number from before, by its second name.
            os.unlink(first)
            time.sleep(0.05)
            with open(second, "r+b") as file:
                file.write(b"changed")
            self.assertEqual(read_bytes(second), b"changed" + self.data["hard1"][7:])
            self.bcow("umount", where)
        self.stop()

    def test_listings_show_the_numbers_of_the_files(self):
        self.start()
        where = self.change()
        for name in ("file0", "file4", "file11"):
            with open(os.path.join(where, name), "r+b") as file:
                file.write(b"changed")
        for _ in range(3):
            with os.scandir(where) as entries:
                found = {}
                for entry in entries:
                    # The attributes follow the names in the kernel's requests.
                    status = entry.stat(follow_symlinks=False)
                    found[entry.name] = (entry.inode(), status.st_ino)
            self.assertEqual(sorted(found), sorted(os.listdir(where)))
            for name, (listed, number) in found.items():
                self.assertEqual(listed, number, name)
        out = run("ls", "-li", where).out
        self.assertEqual(len(out.splitlines()), len(os.listdir(where)) + 1)
        self.stop()

    def test_nothing_is_left_after_an_unmount(self):
        self.start()
        # The hidden mount lasts as long as the pool.
        first = self.change()
        self.assert_content(first)
        pid, supervisor = self.pid(), self.supervisor()

        def held():
            return [len(os.listdir(f"/proc/{one}/fd")) for one in (pid, supervisor)]

        before = held()
        second = self.change()
        self.assert_content(second)
        with open(os.path.join(second, "file0"), "r+b") as file:
            file.write(b"changed")
        os.listdir(second)
        list(os.scandir(second))
        self.bcow("umount", second)

        def is_closed():
            # The one of the command that gave the process may have been open before.
            return all(now <= then for now, then in zip(held(), before))

        until(is_closed, "the descriptors of the mount are closed")
        self.bcow("umount", first)
        [starter] = named("bcow-starter", children(pid))
        [opener] = children(starter)
        self.bcow("pool", "stop", "pool")
        for one in (pid, supervisor, starter, opener):
            self.assert_ends(one)
        self.assertFalse(is_mounted(first))

    def test_mounts_that_cannot_share_are_refused_on_demand(self):
        self.start()
        place, upper = self.place(), os.path.join(self.uppers, "refused")

        def refused(*options, mention, code=2):
            result = self.bcow("mount", self.shared, place, "--share", "on", *options, check=False)
            assert_refused(self, result, mention, code=code)
            self.assertFalse(is_mounted(place))

        refused("--upper", upper, mention="only mounts of a pool share files")
        refused("--pool", "pool", mention="the mount has no upper")
        refused("--pool", "pool", "--upper", upper, "--driver", "kernel",
                mention="only the FUSE driver shares files")
        refused("--pool", "pool", "--upper", upper, "-o", "writeback",
                mention="the mount has the option writeback", code=1)
        for options, reason in ((("-o", "writeback"), "the mount has the option writeback"),
                                (("--share", "off"), "as --share says")):
            found = self.statistics(self.change(*options))["share"]
            self.assertEqual(found, {"on": False, "reason": reason})
        found = self.statistics(self.mount())["share"]
        self.assertEqual(found, {"on": False, "reason": "the mount has no upper"})
        self.assertTrue(self.statistics(self.change("--share", "on"))["share"]["on"])
        self.stop()


class Background:
    """A program in a thread until the end of the context. `run` counts its rounds, and keeps what
    fails."""

    def __init__(self, where):
        self.where = where
        self.failure, self.rounds = None, 0
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self):
        raise NotImplementedError

    def at(self, name):
        return os.path.join(self.where, name)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.is_over.set()
        self.thread.join(test_pool.TIMEOUT)
        assert not self.thread.is_alive(), "the program hangs"

    def goes_on(self):
        target = self.rounds + 2
        until(lambda: self.rounds >= target or self.failure, "the program goes on")


class Worker(Background):
    """A program that reads, maps and changes files of a mount."""

    def __init__(self, where, data):
        super().__init__(where)
        self.data = data

    def run(self):
        try:
            kept = {}
            for name in ("file0", "file1", "directory/large", "hard1"):
                fd = os.open(self.at(name), os.O_RDONLY)
                kept[name] = fd, mapped(fd)
            changed = dict(self.data)
            source = random.Random(self.rounds)
            while not self.is_over.is_set():
                for name, (fd, memory) in kept.items():
                    data = self.data[name]
                    # Pages of the hidden file: the next access is a request to the pool.
                    memory.madvise(mmap.MADV_DONTNEED)
                    at = source.randrange(len(data) - 5000)
                    assert memory[at:at + 5000] == data[at:at + 5000], f"map of {name}"
                    assert os.pread(fd, len(data), 0) == data, f"descriptor of {name}"
                name = f"file{source.randrange(12)}"
                at = source.randrange(LARGE - 100)
                new = source.randbytes(100)
                with open(self.at(name), "r+b") as file:
                    os.pwrite(file.fileno(), new, at)
                changed[name] = changed[name][:at] + new + changed[name][at + 100:]
                for name, data in changed.items():
                    with open(self.at(name), "rb") as file:
                        assert file.read() == data, name
                self.rounds += 1
        except (OSError, AssertionError) as failure:
            self.failure = failure


class Takeovers(ShareCase):
    @promise("If the process of the pool is killed or replaced, programs that read or map shared "
             "files wait, and see no error.")
    @Caches.counted_on
    def test_programs_go_on_while_the_process_is_killed_and_replaced(self):
        self.start()
        places = [self.change() for _ in range(3)]
        with Worker(places[0], self.data) as one, Worker(places[1], self.data) as two:
            def wait():
                one.goes_on()
                two.goes_on()
                drop_caches("3")

            self.disturb(2 * STEPS, wait)
        for worker in (one, two):
            self.assertIsNone(worker.failure)
            self.assertGreater(worker.rounds, 0)
        self.assert_content(places[2])
        for where in places:
            self.assertTrue(self.statistics(where)["share"]["on"])
            self.assertEqual(self.statistics(where)["errors"]["total"], 0)
        # A mount made after a takeover has the page cache of the others.
        later = self.change()
        fd = self.open(later, "directory/large")
        before = self.looked_up()
        os.pread(fd, 3_000_000, 0)
        self.assert_cached(before)
        self.stop()

    def test_what_was_opened_for_writing_stays_apart(self):
        self.start()
        where = self.change()
        path = os.path.join(where, "file0")
        old = self.open(where, "file0")
        writer = self.open(where, "file0", os.O_RDWR)
        with mmap.mmap(writer, 0) as memory:
            memory[:7] = b"changed"
            # The kernel has the change, and bcow does not.
            self.kill()
            drop_caches("3")
            self.assertEqual(read_bytes(path)[:7], b"changed")
            self.assertTrue(os.pread(old, LARGE, 0) == self.data["file0"])
            self.kill()
            os.rename(path, path + "-moved")
            self.assertEqual(read_bytes(path + "-moved")[:7], b"changed")
        self.stop()

    @Caches.counted_on
    def test_a_change_that_was_not_answered_is_known_to_each_name(self):
        need("strace")
        self.start()
        where = self.change()
        first, second = (os.path.join(where, name) for name in ("hard1", "directory/hard2"))
        os.stat(first)
        os.stat(second)
        # Each answer is late, and the process is killed before it says that the size has changed.
        before = self.find()
        trace = subprocess.Popen(
            ["strace", "-f", "-p", str(before["pid"]), "-o", "/dev/null", "-e", "trace=writev",
             "-e", "inject=writev:delay_enter=1500000"], stderr=subprocess.PIPE, text=True)
        self.addCleanup(trace.stderr.close)
        self.addCleanup(trace.kill)
        self.assertIn("attached", trace.stderr.readline())
        # It does not open the file.
        program = f"import os; os.truncate({first!r}, 5000)"
        change = subprocess.Popen([sys.executable, "-c", program])
        changed = os.path.join(self.uppers, os.listdir(self.uppers)[0], "hard1")
        until(lambda: os.path.exists(changed) and os.path.getsize(changed) == 5000, "the change")
        self.assertEqual(self.kill(), self.pid())
        self.assertEqual(change.wait(test_pool.TIMEOUT), 0)
        self.assertEqual(os.stat(second), os.stat(first))
        os.unlink(first)
        self.assertEqual(os.stat(second).st_nlink, 1)
        self.stop()

    def test_a_new_image_after_a_restart_gets_a_place_of_its_own(self):
        self.start()
        first = self.change()
        self.assert_content(first)
        self.kill()
        self.bcow("umount", first)
        other = self.path("other.bcow")
        tree = self.path("other-tree")
        shutil.rmtree(tree, ignore_errors=True)
        os.mkdir(tree)
        source = random.Random(5)
        data = {f"file{number}": source.randbytes(LARGE) for number in range(12)}
        for name, content in data.items():
            self.path(f"other-tree/{name}", content)
        bcow("convert", "--force", f"dir:{tree}", other, timeout=test_pool.TIMEOUT)
        upper = os.path.join(self.uppers, "other")
        second = self.mount("--upper", upper, image=other)
        for name, content in data.items():
            self.assertTrue(read_bytes(os.path.join(second, name)) == content, name)
        self.assert_content(self.change())
        self.stop()


class FirstOpens(test_pool.PoolCase):
    """Many files, each of which is opened for the first time while the process is killed."""

    FILES, SIZE = 400, 17_000

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        need_kernel(6, 12, "passthrough to other files")
        os.mkdir(cls.path("many"))
        for number in range(cls.FILES):
            cls.path(f"many/{number}", cls.content(number))
        cls.many = cls.path("many.bcow")
        bcow("convert", f"dir:{cls.path('many')}", cls.many, timeout=test_pool.TIMEOUT)

    @classmethod
    def content(cls, number):
        return random.Random(number).randbytes(cls.SIZE)

    def use(self, where, seed, failures):
        """Reads and changes each file in an order of its own."""
        source = random.Random(seed)
        try:
            for number in source.sample(range(self.FILES), self.FILES):
                path, data = os.path.join(where, str(number)), self.content(number)
                fd = os.open(path, os.O_RDONLY) if source.random() < 0.5 else None
                with open(path, "r+b") as file:
                    file.write(b"new")
                if fd is not None:
                    assert os.pread(fd, self.SIZE + 1, 0) == data, f"descriptor of {path}"
                    os.close(fd)
                assert read_bytes(path) == b"new" + data[3:], path
        except (OSError, AssertionError) as failure:
            failures.append(failure)

    def test_no_open_fails_while_the_process_is_killed(self):
        self.start()
        uppers = tempfile.mkdtemp(prefix="uppers-", dir=WORK)
        self.addCleanup(shutil.rmtree, uppers, ignore_errors=True)
        pauses, failures = random.Random(3), []
        for step in range(STEPS):
            where = self.mount("--upper", os.path.join(uppers, str(step)), image=self.many)
            thread = threading.Thread(target=self.use, args=(where, step, failures))
            thread.start()
            self.disturb(1, lambda: time.sleep(pauses.random() / 10))
            thread.join(test_pool.TIMEOUT)
            self.assertFalse(thread.is_alive())
            self.assertEqual(failures, [])
            self.bcow("umount", where)
        self.bcow("pool", "stop", "pool")


class Layered(ShareCase):
    """Two images with common layers, as stacks in a layout."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        source = random.Random(21)
        # The end of the second file is beside its inode, so each stack has a copy of it.
        cls.common = {"lib/large": source.randbytes(3_000_000),
                      "lib/end": source.randbytes((80 << 12) + 100),
                      "lib/holes": bytes(1 << 20) + source.randbytes(LARGE) + bytes(1 << 20),
                      "lib/moved": source.randbytes(LARGE)}
        replaced = [source.randbytes(LARGE) for _ in range(3)]

        def layer(files, *more):
            return [Entry(b"lib", "dir"), *(Entry(os.fsencode(name), data=data)
                                            for name, data in files.items()), *more]

        base = [layer({**cls.common, "lib/replaced": replaced[0]}),
                layer({"lib/second": source.randbytes(LARGE)},
                      Entry(b"lib/hard", "hardlink", link=b"lib/moved"))]
        cls.common["lib/second"] = base[1][1].data
        cls.contents, cls.layers = {}, {}
        for number, tag in enumerate("ab"):
            top = {"lib/replaced": replaced[1 + number], f"lib/own-{tag}": source.randbytes(LARGE)}
            if tag == "b":
                # With --dedup-lower, its content is in two layers.
                top["lib/mixed"] = cls.common["lib/large"] + source.randbytes(LARGE)
            files = {**cls.common, "lib/hard": cls.common["lib/moved"], **top}
            more = []
            if tag == "b":
                files["lib/hard-b"] = files.pop("lib/moved")
                more = [Entry(b"lib/.wh.moved"),
                        Entry(b"lib/hard-b", "hardlink", link=b"lib/moved")]
            cls.contents[tag] = files
            ordinary = sequences.write_layout([*base, layer(top, *more)],
                                              cls.path(f"ordinary-{tag}"))
            for kind, options in (("", ()), ("-dedup", ("--dedup-lower",))):
                bcow("convert", *options, ordinary, f"oci:{cls.path('layout')}:{tag}{kind}",
                     timeout=test_pool.TIMEOUT)
            found = json.loads(bcow("inspect", "--json", cls.name(tag)).out)
            digests = [one["digest"] for one in found["stack"]["layers"]]
            cls.layers[tag] = [os.path.join(cls.path("layout"), "blobs", *digest.split(":"))
                               for digest in digests]
        assert cls.layers["a"][:2] == cls.layers["b"][:2]

    @classmethod
    def name(cls, tag):
        return f"oci:{cls.path('layout')}:{tag}"

    def change_image(self, image, *options):
        upper = os.path.join(self.uppers, f"upper{len(self.mounts)}")
        where = self.mount("--upper", upper, "-o", "allow_other", *options, image=image)
        self.assertTrue(self.statistics(where)["share"]["on"])
        return where

    def assert_files(self, where, tag, changed=None):
        for name, data in (self.contents[tag] | (changed or {})).items():
            self.assertTrue(read_bytes(os.path.join(where, name)) == data, name)
        self.assertEqual(os.path.exists(os.path.join(where, "lib/moved")), tag == "a")

    def is_cached(self, where, name):
        """Whether the kernel has the content of a file that this mount has not read."""
        fd = self.open(where, name)
        before = self.looked_up()
        data = os.pread(fd, 4_000_000, 0)
        # All of it, with the end of the file and its holes.
        self.assertEqual(os.fstat(fd).st_size, len(data))
        return self.looked_up() - before < 5

    def assert_common(self, first, second, tag):
        """Two images share exactly the files that are wholly in common layers."""
        self.assert_files(first, "a")
        for name in self.common.keys() - {"lib/moved"}:
            self.assertTrue(self.is_cached(second, name), name)
        for name in ("lib/replaced", f"lib/own-{tag}"):
            self.assertFalse(self.is_cached(second, name), name)
        self.assert_files(second, tag)

    @Caches.counted_on
    def test_images_with_common_layers_share_the_files_of_the_layers(self):
        self.start()
        for kind in ("", "-dedup"):
            with self.subTest(kind):
                first = self.change_image(self.name(f"a{kind}"))
                second = self.change_image(self.name(f"b{kind}"))
                self.assert_common(first, second, "b")
        self.stop()

    @Caches.counted_on
    def test_images_that_are_named_by_their_layers_share_them_too(self):
        self.start()
        first, second = (self.change_image(layers[0], *(f"--layer={one}" for one in layers[1:]))
                         for layers in self.layers.values())
        self.assert_common(first, second, "b")
        # The lowest layer alone is an image, with the same files.
        self.assertTrue(self.is_cached(self.change_image(self.layers["a"][0]), "lib/large"))
        self.stop()

    @Caches.counted_on
    def test_a_verified_image_does_not_show_what_another_image_has_read(self):
        self.start()
        first = self.change_image(self.name("a"))
        second = self.change_image(self.name("b"), "--verify", "merkle")
        self.assert_files(first, "a")
        self.assertFalse(self.is_cached(second, "lib/large"))
        self.assertTrue(self.is_cached(self.change_image(self.name("a"), "--verify", "merkle"),
                                       "lib/large"))
        self.stop()

    def test_a_first_change_is_not_seen_in_the_other_image(self):
        self.start()
        first, second = self.change_image(self.name("a")), self.change_image(self.name("b"))
        fds = [self.open(where, "lib/large") for where in (first, second)]
        maps = [mapped(fd) for fd in fds]
        old = self.common["lib/large"]
        changed = {"lib/large": b"new" + old[3:]}
        with open(os.path.join(first, "lib/large"), "r+b") as file:
            file.write(b"new")
        os.remove(os.path.join(first, "lib/end"))
        os.rename(os.path.join(second, "lib/holes"), os.path.join(second, "lib/renamed"))
        restart = functools.partial(self.bcow, "pool", "restart", "pool")
        for step in (drop_caches, self.kill, restart):
            step()
            drop_caches("3")
            for fd, memory in zip(fds, maps):
                self.assertTrue(os.pread(fd, len(old), 0) == old)
                self.assertTrue(memory[:] == old)
            self.assertTrue(read_bytes(os.path.join(first, "lib/large")) == changed["lib/large"])
            for name in ("lib/large", "lib/end"):
                self.assertTrue(read_bytes(os.path.join(second, name)) == self.common[name], name)
            renamed = os.path.join(second, "lib/renamed")
            self.assertTrue(read_bytes(renamed) == self.common["lib/holes"])
        for memory in maps:
            memory.close()
        self.stop()

    @Caches.counted_on
    def test_the_next_process_finds_the_files_of_the_layers(self):
        self.start()
        first, second = self.change_image(self.name("a")), self.change_image(self.name("b"))
        self.assert_files(second, "b")
        self.kill()
        # Only the image that no program has read keeps the layer.
        self.bcow("umount", second)
        self.assertTrue(self.is_cached(first, "lib/large"))
        drop_caches("3")
        self.assert_files(first, "a")
        third = self.change_image(self.name("b"))
        self.assertTrue(self.is_cached(third, "lib/end"))
        self.assertEqual(self.statistics(first)["errors"]["total"], 0)
        self.stop()

    def test_damage_of_a_layer_is_an_error_of_each_image(self):
        layout = self.path("damaged-layout")
        shutil.copytree(self.path("layout"), layout)
        path = os.path.join(layout, os.path.relpath(self.layers["a"][0], self.path("layout")))
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            # Random bytes are stored as they are.
            at = memory.find(self.common["lib/large"][1 << 20:(1 << 20) + 64])
            self.assertGreater(at, 0)
            memory[at] ^= 1
        self.start()
        places = [self.change_image(f"oci:{layout}:{tag}") for tag in "ab"]
        for where in places:
            with self.assertRaises(OSError) as caught:
                read_bytes(os.path.join(where, "lib/large"))
            self.assertEqual(caught.exception.errno, errno.EIO)
            self.assertTrue(read_bytes(os.path.join(where, "lib/end")) == self.common["lib/end"])
        for where in places:
            found = self.statistics(where)["errors"]
            self.assertGreater(found["total"], 0)
            self.assertEqual(found["recent"][0]["paths"], ["/lib/large"])
        self.stop()


class Remote(ShareCase):
    """Images on servers."""

    def change_remote(self, server, *options):
        upper = os.path.join(self.uppers, f"upper{len(self.mounts)}")
        where = self.mount("--upper", upper, "--insecure", "--no-cache", *test_ahead.PATIENT,
                           *options, image=server.url("shared.bcow"))
        self.assertTrue(self.statistics(where)["share"]["on"])
        return where

    @Caches.counted_on
    def test_mounts_of_an_image_on_a_server_share_files(self):
        self.start()
        with test_ahead.Server(self.directory) as server:
            first, second = self.change_remote(server), self.change_remote(server)
            local = self.change("--verify", "merkle")
            self.assert_content(first)
            fd = self.open(second, "directory/large")
            before = self.looked_up()
            self.assertTrue(os.pread(fd, 3_000_000, 0) == self.data["directory/large"])
            self.assert_cached(before)
            self.assert_content(local)
            self.close()
            for where in (first, second):
                self.bcow("umount", where)
        self.stop()

    @promise("A mount does not wait for the server of another image.")
    def test_a_server_that_does_not_answer_delays_only_its_image(self):
        self.start()
        with test_ahead.Server(self.directory) as server:
            remote = [self.change_remote(server) for _ in range(2)]
            names = [name for name in self.data if name != "small"]
            fds = [self.open(remote[0], name) for name in names]
            server.hold(lambda first, end: True)
            begun = len(server.asked)
            reads = [(os.pread, fd, LARGE, 0) for fd in fds]
            reads += [(read_bytes, os.path.join(remote[1], name)) for name in names]
            readers = [threading.Thread(target=read, args=arguments, daemon=True)
                       for read, *arguments in reads]
            for reader in readers:
                reader.start()
            until(lambda: len(server.asked) > begun, "a read waits for the server")
            for _ in range(2):
                self.assert_content(self.change("--verify", "merkle"))
            # More than the threads that receive the requests to hidden files.
            self.assertGreater(sum(reader.is_alive() for reader in readers), len(names))
            server.hold(lambda first, end: False)
            for reader in readers:
                reader.join(test_pool.TIMEOUT)
                self.assertFalse(reader.is_alive())
            self.close()
            for where in remote:
                self.assert_content(where)
                self.bcow("umount", where)
        self.stop()


class Memory(ShareCase):
    def test_a_file_is_in_memory_once(self):
        self.start()
        sizes = {}
        for share in ("on", "off"):
            maps = []
            for _ in range(4):
                where = self.change("--share", share)
                memory = mapped(self.open(where, "directory/large"))
                self.assertEqual(len(memory[:]), 3_000_000)
                maps.append(memory)
            sizes[share] = proportional("directory/large")
            for memory in maps:
                memory.close()
        self.assertLess(sizes["on"], 3_100_000)
        self.assertGreater(sizes["off"], 4 * 2_900_000)
        self.stop()


def proportional(name):
    """The memory of this process for maps of files with this name: of a page that it maps several
    times, each map has a part."""
    total, is_meant = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            first, *rest = line.split()
            if not first.endswith(":"):
                is_meant = bool(rest) and rest[-1].endswith(name)
            elif first == "Pss:" and is_meant:
                total += int(rest[0]) << 10
    return total
