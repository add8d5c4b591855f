"""Failures around a writable mount: unusable uppers, full and limited space, a damaged image, a
damaged upper. Errors are clear, no data is lost, no byte is wrong, and unaffected files keep
working."""

import concurrent.futures
import contextlib
import errno
import fcntl
import itertools
import os
import random
import re
import shutil
import signal
import struct
import tempfile

import syscalls
from promises import promise
from support import (UNPRIVILEGED, append_to, assert_refused, bcow, flip, is_mounted, overwrite,
                     read_bytes, read_text, run, stop, until, write_file)
from union import UnionCase

BIG = "d2/big"
PAGE = 4096


class Refusals(UnionCase):
    mounts = False
    tools = ("mkfs.ext4",)

    def refused(self, upper, *mention, image=None):
        """Fails unless mounting with this upper is refused with one clear error and leaves no
        file."""
        result = bcow("mount", image or self.lower.make_image(), self.where, "--upper", upper,
                      check=False, timeout=60)
        assert_refused(self, result, *mention)
        self.assertFalse(is_mounted(self.where))

    @promise("bcow refuses an upper on a read-only file system, or on a file system without "
             "extended attributes, before it mounts anything.")
    def test_an_upper_that_cannot_be_written_is_refused(self):
        disk = self.disk(16)
        os.mkdir(os.path.join(disk, "upper"))
        run("mount", "-o", "remount,ro", disk)
        self.refused(os.path.join(disk, "upper"), "disk/upper", r"(?i)read-only")
        self.assertEqual(os.listdir(os.path.join(disk, "upper")), [])

    def test_an_upper_without_extended_attributes_is_refused(self):
        where = os.path.join(self.mount.directory, "ramfs")
        os.mkdir(where)
        run("mount", "-t", "ramfs", "ramfs", where)
        self.addCleanup(run, "umount", where)
        self.refused(where, "ramfs", r"(?i)attribute")
        self.assertEqual(os.listdir(where), [])

    @promise("An upper has one writer at a time: bcow refuses a second mount and names the process "
             "that uses the upper. bcow also refuses an upper that was created for another image.")
    def test_an_upper_has_one_writer_and_one_image(self):
        self.mount.mount()
        self.write("kept", b"kept")
        other = os.path.join(self.mount.directory, "other")
        os.mkdir(other)
        result = bcow("mount", self.lower.image, other, "--upper", self.upper, check=False)
        assert_refused(self, result, "upper", str(self.mount.process.pid))
        self.assertEqual(self.read("kept"), b"kept")
        self.mount.unmount()
        tree = os.path.join(self.mount.directory, "tree")
        os.mkdir(tree)
        image = os.path.join(self.mount.directory, "another.bcow")
        write_file(os.path.join(tree, "kept"), b"of another image")
        bcow("convert", f"dir:{tree}", image)
        self.refused(self.upper, "upper", r"(?i)image", image=image)
        self.mount.mount()
        self.assertEqual(self.read("kept"), b"kept")

    @promise("bcow refuses an upper that is inside the upper of an active mount, or that contains "
             "such an upper.")
    def test_an_upper_inside_another_and_around_it(self):
        self.mount.mount()
        os.mkdir(os.path.join(self.where, "sub"))
        directory = os.path.dirname(self.upper)
        bound = os.path.join(directory, "bound")
        os.mkdir(bound)
        # Outside of the uppers.
        other = tempfile.mkdtemp(dir=os.path.dirname(directory))
        self.addCleanup(os.rmdir, other)
        inside = os.path.join(self.upper, "sub")
        # Its path does not lead through the upper.
        run("mount", "--bind", inside, bound)
        self.addCleanup(run, "umount", bound)
        around = os.path.join(directory, "around")
        os.mkdir(around)
        run("mount", "--bind", directory, around)
        self.addCleanup(run, "umount", around)
        for upper in (inside, os.path.join(self.upper, ".bcow", "new"), os.path.join(bound, "new"),
                      directory, around):
            with self.subTest(upper):
                result = bcow("mount", self.lower.image, other, "--upper", upper, check=False)
                assert_refused(self, result, upper, self.upper, str(self.mount.process.pid),
                               self.where)
                self.assertFalse(is_mounted(other))
        for path in (bound, directory):
            self.assertFalse(os.path.exists(os.path.join(path, ".bcow")))
        self.assertEqual(os.listdir(inside), [])
        self.mount.unmount()
        self.mount.check()

    @promise("After a machine crash, bcow refuses the upper.")
    def test_a_volatile_upper_after_the_machine_stopped(self):
        self.mount.options.append("--sync=volatile")
        self.mount.mount()
        self.write("kept", b"kept")
        self.mount.kill()
        # In the same boot no data is lost.
        self.mount.mount()
        self.assertEqual(self.read("kept"), b"kept")
        self.mount.kill()
        run("umount", "-l", self.where)
        write_file(os.path.join(self.upper, ".bcow", "volatile"),
                   "11111111-2222-3333-4444-555555555555\n")
        self.refused(self.upper, "upper", r"(?i)volatile")


class Space(UnionCase):
    mounts = False
    tools = ("mkfs.ext4",)

    def write_once(self, name, data):
        """Writes a new file with one system call; returns the number of written bytes."""
        fd = self.open(name, os.O_WRONLY | os.O_CREAT)
        try:
            return os.write(fd, data)
        finally:
            os.close(fd)

    def fill(self, name, total, data=b"f" * 65_536):
        """Writes a new file of up to `total` bytes, until the disk is full; returns the number of
        bytes."""
        fd = self.open(name, os.O_WRONLY | os.O_CREAT)
        done = 0
        try:
            while done < total:
                done += os.write(fd, data)
            os.fsync(fd)
        except OSError as error:
            self.assertEqual(error.errno, errno.ENOSPC)
        finally:
            os.close(fd)
        return done

    def wait_for_room(self, room=1 << 20):
        """The kernel reports the last close of an unlinked file to the mount with a short delay."""
        until(lambda: os.statvfs(self.where).f_bavail * os.statvfs(self.where).f_frsize >= room,
              "room after a file was removed")

    @promise("If the host's file system is full or fails, the system call that depends on it fails "
             "with the same error, ENOSPC or EIO. Existing data is not lost. When space is "
             "available again, the mount continues to work normally.")
    def test_writes_on_a_full_disk_fail_and_resume_after_space_is_freed(self):
        self.mount.upper = self.upper = os.path.join(self.disk(24), "upper")
        os.mkdir(self.upper)
        self.mount.mount()
        names = [BIG, "d1/odd", "d2/three", "d0/sub/deep/file"]
        want = {name: self.original(name) for name in names}
        for name in names:
            overwrite(self.at(name), 5000, b"before")
            want[name][5000:5006] = b"before"
        self.fill("filler", 1 << 30)
        self.fill("filler-too", 1 << 30, b"f")
        dice, refused = random.Random(3), 0
        for _ in range(400):
            name = dice.choice(names)
            offset, length = dice.randrange(len(want[name]) - 5000), dice.choice(
                [1, 700, 4096, 5000])
            data = dice.randbytes(length)
            try:
                with open(self.at(name), "r+b", buffering=0) as file:
                    done = os.pwrite(file.fileno(), data, offset)
                want[name][offset:offset + done] = data[:done]
            except OSError as error:
                self.assertEqual(error.errno, errno.ENOSPC)
                refused += 1
        self.assertGreater(refused, 50)
        for call in (lambda: self.write("d0/new-file", bytes(20_000)),
                     lambda: self.fill("more", 1 << 20)):
            with contextlib.suppress(OSError):
                call()
        for name in names:
            self.assertEqual(self.read(name), want[name], name)
        # There is room again: every sync succeeds, and writes continue.
        os.unlink(self.at("filler"))
        self.wait_for_room()
        for name in names:
            overwrite(self.at(name), 60_000, b"after", sync=True)
            want[name][60_000:60_005] = b"after"
        os.rename(self.at("d1"), self.at("d7"))
        self.remount()
        for name in names:
            self.assertEqual(self.read(name.replace("d1/", "d7/")), want[name], name)
        self.mount.unmount()
        self.mount.check()

    @promise("What a write to a partial file needs later is reserved on the host before the write.")
    def test_writes_that_succeeded_survive_an_unmount_on_a_full_disk(self):
        disk = self.disk(24)
        self.mount.upper = self.upper = os.path.join(disk, "upper")
        os.mkdir(self.upper)
        self.mount.mount()
        names = [BIG, "d1/odd", "d2/three", "d0/sub/deep/file"]
        want = {name: self.original(name) for name in names}
        for number, name in enumerate(names):
            overwrite(self.at(name), 5000, b"written", sync=number == 0)
            overwrite(self.at(name), 50_000, b"written")
            for at in 5000, 50_000:
                want[name][at:at + 7] = b"written"
        # Before the next flush, another program fills the host's file system, root's share too.
        stop(self.mount.process.pid)
        for size in 1 << 20, PAGE:
            with (open(os.path.join(disk, "filler"), "ab", buffering=0) as file,
                  contextlib.suppress(OSError)):
                while True:
                    file.write(bytes(size))
        self.mount.process.send_signal(signal.SIGCONT)
        self.mount.unmount()
        os.unlink(os.path.join(disk, "filler"))
        self.mount.mount()
        for name in names:
            self.assertEqual(self.read(name), want[name], name)
        self.mount.unmount()
        self.mount.check()

    def test_changes_on_a_full_disk_are_whole_or_not_at_all(self):
        self.mount.upper = self.upper = os.path.join(self.disk(8), "upper")
        os.mkdir(self.upper)
        self.mount.mount()
        self.fill("filler", 1 << 30)
        self.fill("filler-too", 1 << 30, b"f")
        self.assertEqual(os.statvfs(self.where).f_bavail, 0)
        done = []
        for number in range(300):
            path = self.at(f"d0/directory-{number}")
            with contextlib.suppress(OSError):
                os.mkdir(path)
                done.append(path)
            if number == 250:
                # Only the host's own reserve is left.
                self.assertLess(len(done), 250)
        before = {name: os.lstat(self.at(name))
                        for name in ("d0/hundred", "d1/small", BIG, "d0/sub", "link")}
        for name, info in before.items():
            for call in (lambda path=self.at(name): os.chown(path, 7, 7, follow_symlinks=False),
                         lambda path=self.at(name): os.rename(path, path + "-moved"),
                         lambda path=self.at(name): os.link(
                             path, path + "-linked", follow_symlinks=False)):
                code = syscalls.code_of(call)
                self.assertIn(code, ("ENOSPC", None, "EPERM"))
        # Each change happened as a whole or not at all.
        for name, info in before.items():
            there = [path for path in (name, name + "-moved") if os.path.lexists(self.at(path))]
            self.assertEqual(len(there), 1, name)
            self.assertEqual(os.lstat(self.at(there[0])).st_size,
                             info.st_size) if name != "d0/sub" else None
            if name in ("d0/hundred", BIG):
                self.assertEqual(self.read(there[0]), self.original(name))
        os.unlink(self.at("filler"))
        self.wait_for_room()
        os.mkdir(self.at("room"))
        self.remount()
        self.assertTrue(all(os.path.isdir(path) for path in done))
        self.mount.unmount()
        self.mount.check()

    @promise("If no program has the removed file open, the room is available at once, also on a "
             "full host file system.")
    def test_a_removed_file_frees_its_space_at_once(self):
        """The kernel reports the last close to the mount with a delay, and the host then needs time
        to free the space."""
        self.mount.upper = self.upper = os.path.join(self.disk(128), "upper")
        os.mkdir(self.upper)
        self.mount.mount()
        for number in range(10):
            self.fill("filler", 1 << 30, bytes(1 << 20))
            self.fill("filler-too", 1 << 30, bytes(4096))
            os.unlink(self.at("filler"))
            os.mkdir(self.at(f"room-{number}"))
            self.write("next", bytes(2 << 20))
            os.unlink(self.at("next"))
            os.unlink(self.at("filler-too"))

    @promise("`--size-limit` limits the bytes that the upper takes on the host, as `du` counts "
             "them: data, directories, maps, and those link targets and attributes that do not fit "
             "into an inode. A write fails with ENOSPC, and changes nothing, if none of it fits. "
             "If only a part fits, the write stores that part and returns its length. Removing "
             "files or data makes room again.")
    def test_a_limit(self):
        limit = 4 << 20
        self.mount.options.append(f"--size-limit={limit}")
        self.mount.mount()
        fd = self.opened(BIG)
        # A stored block of a partial file counts once.
        blocks = (1 << 20) // PAGE
        want = self.original(BIG)
        for _ in range(2):
            for block in range(0, blocks, 2):
                os.pwrite(fd, b"x", block * PAGE)
                want[block * PAGE:block * PAGE + 1] = b"x"
        os.fsync(fd)
        taken = blocks // 2 * PAGE
        written = self.fill("filler", 1 << 30, b"f" * PAGE)
        self.assertLessEqual(written + taken, limit)
        self.assertGreater(written + taken, limit - (256 << 10))
        self.assert_error("ENOSPC", os.pwrite, fd, b"yyy", PAGE + 50)
        self.assertEqual(self.read(BIG), want)
        # A stored block is overwritten in place.
        os.pwrite(fd, b"zzz", 0)
        want[:3] = b"zzz"
        self.assertEqual(self.read(BIG), want)
        self.remount()
        fd = self.opened(BIG)
        self.assertEqual(self.read(BIG), want)
        self.assert_error("ENOSPC", os.pwrite, fd, b"yyy", PAGE + 50)
        os.truncate(self.at("filler"), written - (64 << 10))
        for block in range(8):
            os.pwrite(fd, b"www", block * PAGE * 2 + PAGE + 50)
            want[block * PAGE * 2 + PAGE + 50:block * PAGE * 2 + PAGE + 53] = b"www"
        os.unlink(self.at("filler"))
        self.wait_for_room(written - (256 << 10))
        again = self.fill("filler", 1 << 30, b"f" * PAGE)
        self.assertLess(abs(again - written), 256 << 10)
        self.assertEqual(self.read(BIG), want)
        # A punched hole and a truncation free space.
        os.unlink(self.at("filler"))
        os.ftruncate(fd, 4096)
        self.wait_for_room(again + taken - (256 << 10))
        more = self.fill("filler", 1 << 30, b"f" * PAGE)
        self.assertGreater(more, again + taken - (256 << 10))
        os.unlink(self.at("filler"))
        self.wait_for_room(more - (256 << 10))
        # There is space for a part of this write only.
        self.assertIn(self.write_once("filler", b"f" * 2 * limit), range(PAGE, limit))

    @promise("`--inode-limit` limits the number of inodes in the upper. With `--size-limit` alone, "
             "the limit is one inode per 16 KiB of the size, and at least 4096 inodes. Beyond that "
             "limit, creating a file or copying up a file fails with ENOSPC.")
    def test_a_limit_of_inodes(self):
        self.mount.options.append("--inode-limit=20")
        self.mount.mount()
        for number in range(20):
            self.write(f"file-{number}")
        info = os.statvfs(self.where)
        self.assertEqual((info.f_files, info.f_ffree), (20, 0))
        for call in (os.mkdir, os.mkfifo, os.mknod, lambda path: os.symlink("x", path)):
            self.assert_error("ENOSPC", call, self.at("more"))
        self.assert_error("ENOSPC", os.chmod, self.at("d0/hundred"), 0o600)
        self.assert_error("ENOSPC", os.rename, self.at("d0"), self.at("d9"))
        # A hardlink needs no inode.
        os.link(self.at("file-0"), self.at("another"))
        os.rename(self.at("file-1"), self.at("file-2"))
        os.mkdir(self.at("more"))
        self.assert_error("ENOSPC", os.mkdir, self.at("even-more"))
        self.remount()
        self.assert_error("ENOSPC", os.mkdir, self.at("even-more"))
        os.rmdir(self.at("more"))
        os.mkdir(self.at("even-more"))
        self.mount.unmount()
        for size, inodes in (("256M", 16_384), ("16M", 4096)):
            self.mount.options[-1] = f"--size-limit={size}"
            self.mount.mount()
            until(lambda: os.statvfs(self.where)[5:7] == (inodes, inodes - 20),
                  f"{inodes} inodes, and 20 of them used")
            self.mount.unmount()

    def changed_on_a_full_disk(self, mib, fill):
        """Removes and renames copied-up files, with a full disk before each step."""
        disk = self.disk(mib)
        self.mount.upper = self.upper = os.path.join(disk, "upper")
        os.mkdir(self.upper)
        self.mount.mount()
        for name in ("d0/hundred", "d1/small", BIG):
            overwrite(self.at(name), 0, b"changed")
            os.setxattr(self.at(name), "user.x", b"x")
        os.chmod(self.at("d0/sub"), 0o700)
        shutil.rmtree(self.at("d0/sub/deep"))
        # A partial file's map, and its dirty blocks. The disk may have no room for them.
        for where in (self.where, disk):
            run("sync", "-f", where, check=False)
        self.write("new", b"new")
        gone = []
        for call, *names in ((os.unlink, "d0/hundred"), (os.rename, "d1/small", "d1/moved"),
                             (os.unlink, BIG), (os.unlink, "new"), (os.unlink, "d1/moved"),
                             (os.rmdir, "d0/sub")):
            fill(disk)
            with self.subTest(call=call.__name__, names=names):
                for name in os.listdir(self.at("d0/sub")) if call is os.rmdir else ():
                    os.unlink(self.at("d0/sub", name))
                call(*map(self.at, names))
                gone.append(names[0])
        for name in gone:
            self.assertFalse(os.path.lexists(self.at(name)), name)
        shutil.rmtree(os.path.join(disk, "filler"))
        self.remount()
        for name in gone:
            self.assertFalse(os.path.lexists(self.at(name)), name)
        self.mount.unmount()
        self.mount.check()

    @promise("When a limit is reached, or the host has no space or no inodes left, a name can "
             "still be removed if its directory is in the upper, as in overlayfs.")
    def test_removing_on_a_disk_without_inodes(self):
        def fill(disk):
            os.makedirs(os.path.join(disk, "filler"), exist_ok=True)

            def full():
                with contextlib.suppress(OSError):
                    for number in itertools.count(len(os.listdir(os.path.join(disk, "filler")))):
                        os.mknod(os.path.join(disk, "filler", str(number)))
                return os.statvfs(disk).f_ffree == 0
            # A removed file returns its inode a moment later.
            until(full, "no inode is left")

        self.changed_on_a_full_disk(16, fill)

    def test_removing_on_a_disk_without_space(self):
        def fill(disk):
            os.makedirs(os.path.join(disk, "filler"), exist_ok=True)
            for size in (1 << 20, 4096, 1):
                with (open(os.path.join(disk, "filler", "bytes"), "ab", buffering=0) as file,
                      contextlib.suppress(OSError)):
                    while True:
                        file.write(bytes(size))
            run("sync", "-f", disk, check=False)

        self.changed_on_a_full_disk(16, fill)

    @promise("Writing to many large files costs a few blocks for each file (data, attributes and "
             "map), not the size of the files.")
    def test_many_large_files(self):
        tree, image = os.path.join(self.mount.directory, "tree"), os.path.join(
            self.mount.directory, "many.bcow")
        os.mkdir(tree)
        count, size = 60, 8 << 20
        for number in range(count):
            write_file(os.path.join(tree, str(number)), bytes([number + 1]) * size)
        bcow("convert", f"dir:{tree}", image)
        self.mount.lower = type("Other", (), {"make_image": lambda _: image})()
        self.mount.options.append("--size-limit=2M")
        self.mount.mount()
        for number in range(count):
            overwrite(self.at(str(number)), size // 2 + 100, b"!")
        self.mount.unmount()
        stored = self.stored()
        self.assertLess(stored, count * 5 * PAGE)
        self.mount.mount()
        for number in (0, count - 1):
            want = bytearray(bytes([number + 1]) * size)
            want[size // 2 + 100] = ord("!")
            self.assertEqual(self.read(str(number)), want)


class LastFlush(UnionCase):
    """The messages of `bcow umount` after written data could not be stored."""

    mounts = False
    tools = ("mkfs.ext4",)
    FREEZE, THAW, FIBMAP = 0xC0045877, 0xC0045878, 1

    def setUp(self):
        super().setUp()
        # A disk that fails when this tmpfs is full.
        self.memory = os.path.join(self.mount.directory, "memory")
        os.mkdir(self.memory)
        run("mount", "-t", "tmpfs", "-o", "size=80M", "tmpfs", self.memory)
        self.addCleanup(run, "umount", "-l", self.memory)
        disk = self.disk(64, at=self.memory)
        self.mount.upper = self.upper = os.path.join(disk, "upper")
        os.mkdir(self.upper)

    def fail_writes(self):
        """From now on the disk fails each write to an unallocated block."""
        with (open(os.path.join(self.memory, "filler"), "wb", buffering=0) as file,
              contextlib.suppress(OSError)):
            while True:
                file.write(bytes(1 << 20))

    def recover(self):
        """The disk works again, with its state after a restart of the machine."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.memory, "filler"))
        disk = os.path.join(self.mount.directory, "disk")
        if is_mounted(disk):
            run("umount", disk)
        image = os.path.join(self.memory, "disk.ext4")
        # As long as the old loop device is in use, the kernel would mount its failed file system.
        until(lambda: not run("losetup", "--associated", image).out, f"no loop device has {image}")
        run("mount", "-o", "loop", image, disk)

    def synchronised(self):
        """Writes to a file and syncs it; returns its content."""
        overwrite(self.at(BIG), 500_000, b"synchronised", sync=True)
        want = self.original(BIG)
        want[500_000:500_012] = b"synchronised"
        return want

    def assert_reported(self, result, *mention):
        assert_refused(self, result, "is unmounted, but not all written data is in the upper",
                       re.escape(self.upper), *mention)
        self.assertFalse(is_mounted(self.where))

    def lose(self, user=None):
        """Writes data that the disk cannot store, and unmounts; returns the content before that."""
        want = self.synchronised() if self.mount.user is None else None
        self.fail_writes()
        # The host's file system may fail to write its journal at once, and then becomes read-only.
        if self.mount.user is None:
            for name in (BIG, "new"):
                with contextlib.suppress(OSError), open(self.at(name), "ab", buffering=0) as file:
                    file.write(os.urandom(2 << 20))
        else:
            run("sh", "-c", f"head -c 2000000 /dev/urandom > {self.at('mine', 'new')}",
                user=self.mount.user, check=False)
        result = bcow("umount", self.where, check=False, user=user, timeout=60)
        self.assert_reported(result, "caused by: (Input/output error|No space left on "
                                     "device|Read-only " "file system)\n")
        self.assertEqual(self.mount.process.wait(timeout=60), 1)
        self.assertRegex(self.mount.release(), "cannot flush all writes to the upper "
                                               + re.escape(self.upper))
        return want

    @promise("If the host fails to make them durable, or if it is not known whether it did "
             "(because the process was killed or is stopped), `bcow umount` fails and prints the "
             "reason; umount(8) does not report the failure.")
    def test_unmount_reports_data_that_was_not_stored(self):
        self.mount.mount()
        want = self.lose()
        self.recover()
        self.mount.mount()
        self.assertEqual(self.read(BIG)[:len(want)], want)
        self.write("again", b"again")
        self.mount.unmount()
        self.mount.check()

    def test_unmount_reports_an_earlier_disk_failure(self):
        self.mount.options.append("--sync=batch=4")
        self.mount.mount()
        size = 64 << 10
        self.write("victim", b"v" * size)
        with open(self.at("victim"), "rb") as file:
            os.fsync(file.fileno())
        # The disk fails only at the place of this file.
        with open(os.path.join(self.upper, "victim"), "rb") as file:
            block = struct.unpack("i",
                                  fcntl.ioctl(file.fileno(), self.FIBMAP, struct.pack("i", 0)))[0]
            at = block * os.statvfs(self.upper).f_bsize
        run("sync", "-f", self.upper)
        image = os.path.join(self.memory, "disk.ext4")
        free = os.statvfs(self.memory).f_bavail
        run("fallocate", "-l", "64M", image)
        self.assertLess(os.statvfs(self.memory).f_bavail, free)
        run("fallocate", "-p", "-o", str(at), "-l", str(size), image)
        self.fail_writes()
        with open(self.at("victim"), "r+b", buffering=0) as file:
            # A loop device reports no error for a partly completed write.
            os.pwrite(file.fileno(), b"l" * (size // 2), -at % PAGE)
        # The kernel reports the error to the first process that syncs the file system: here the
        # mount's background.
        for number in range(4):
            append_to(self.at("many", f"entry-{number:03}"), b"copied")
        marked = [os.path.join(self.upper, "many", f"entry-{number:03}") for number in range(4)]
        until(lambda: not any("trusted.overlay.metacopy" in os.listxattr(path) for path in marked),
              "the copies are whole")
        os.unlink(os.path.join(self.memory, "filler"))
        self.assert_reported(bcow("umount", self.where, check=False, timeout=60),
                         "caused by: (Input/output error|No space left on device)\n")
        self.assertEqual(self.mount.process.wait(timeout=60), 1)
        self.mount.release()

    def test_unmount_reports_that_the_process_was_killed(self):
        self.mount.mount()
        want = self.synchronised()
        overwrite(self.at(BIG), 900_000, b"lost")
        disk = os.open(os.path.dirname(self.upper), os.O_RDONLY)
        process = self.mount.process
        fcntl.ioctl(disk, self.FREEZE, 0)
        try:
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                try:
                    result = pool.submit(bcow, "umount", self.where, check=False, timeout=60)
                    until(lambda: result.done() or self.name_of(process) == "bcow-closing",
                          "the mount is about to close")
                    self.assertFalse(result.done(), "it did not wait")
                    process.kill()
                finally:
                    fcntl.ioctl(disk, self.THAW, 0)
                process.wait(timeout=60)
                self.assert_reported(result.result(), f"process {process.pid} of the mount "
                                                      "ended before all data was written")
        finally:
            os.close(disk)
        self.mount.release()
        self.mount.mount()
        have = self.read(BIG)
        if have[900_000:900_004] == b"lost":
            want[900_000:900_004] = b"lost"
        self.assertEqual(have, want)
        self.mount.unmount()
        self.mount.check()

    def name_of(self, process):
        return read_text(f"/proc/{process.pid}/comm").strip()


class LastFlushOfAUser(LastFlush):
    """The same with a mount of an ordinary user, which no other user can access."""

    tools = ("mkfs.ext4", "fusermount3")

    @staticmethod
    def plant(top):
        os.mkdir(os.path.join(top, "mine"))
        os.chown(os.path.join(top, "mine"), UNPRIVILEGED, UNPRIVILEGED)

    def setUp(self):
        super().setUp()
        self.give_to_ordinary_user()

    def test_unmount_reports_data_that_was_not_stored(self):
        for user in (UNPRIVILEGED, None):
            self.mount.mount()
            self.lose(user)
            self.recover()

    test_unmount_reports_an_earlier_disk_failure = None
    test_unmount_reports_that_the_process_was_killed = None


class Damage(UnionCase):
    mounts = False

    def damaged_image(self, *names):
        """A copy of an uncompressed image with a changed second mebibyte in each of these files."""
        image = os.path.join(self.mount.directory, "damaged.bcow")
        bcow("convert", "--compress", "none", "--block-size", "4K", f"dir:{self.lower.tree}", image)
        data = read_bytes(image)
        for name in names:
            at = data.index(bytes(self.original(name)[40_960:45_056]))
            overwrite(image, at + 100, b"damage")
        return image

    @promise("A damaged block of the image, or a damaged map of a partial file, causes EIO for "
             "that file only. The log names the file by its path or, if the path is not known, by "
             "its inode number.")
    def test_a_damaged_image(self):
        image = self.damaged_image("d1/odd")
        self.mount.lower = type("Other", (), {"make_image": lambda _: image})()
        self.mount.mount()
        self.assert_error("EIO", self.read, "d1/odd")
        # A partial write into the damaged block cannot be completed; one into another block can.
        fd = self.opened("d1/odd")
        os.pwrite(fd, b"elsewhere", 4)
        os.fsync(fd)
        self.assertEqual(os.pread(fd, 100, 0), self.original("d1/odd")[:4] +
                                               b"elsewhere" + self.original("d1/odd")[13:100])
        with contextlib.suppress(OSError):
            os.pwrite(fd, b"inside", 41_000)
        self.assert_error("EIO", os.pread, fd, 4096, 40_960)
        self.assert_error("EIO", os.fsync, fd)
        # The rest is readable and writable.
        overwrite(self.at(BIG), 0, b"lives", sync=True)
        self.assertEqual(self.read(BIG), b"lives" + self.original(BIG)[5:])
        self.assertRegex(self.mount.output(),
                         r"damaged.bcow at \S+: /d1/odd: cannot read at byte \d+: .*checksum")
        # An overwrite of the whole block repairs it.
        whole = os.urandom(4096 * 40)
        offset = 0
        os.pwrite(fd, whole[:len(self.original("d1/odd"))], offset)
        os.fsync(fd)
        self.assertEqual(self.read("d1/odd"), whole[:100_003])
        self.close()
        with contextlib.suppress(AssertionError):
            self.mount.unmount()

    def test_a_damaged_map(self):
        self.mount.mount()
        for name in (BIG, "d1/odd"):
            with open(self.at(name), "r+b", buffering=0) as file:
                for block in range(0, 20, 2):
                    file.seek(block * PAGE + 7)
                    file.write(b"written")
                    os.fsync(file.fileno())
        inode = os.stat(self.at(BIG)).st_ino
        self.mount.unmount()
        damaged = self.damage_map()
        self.assertNotEqual(bcow("fsck", self.upper, check=False).code, 0)
        self.mount.mount()
        self.assertEqual(syscalls.code_of(self.read, BIG), "EIO", damaged)
        self.assertEqual(self.read("d1/odd")[7:14], b"written")
        self.assertEqual(self.read("d0/hundred"), self.original("d0/hundred"))
        self.assertEqual(syscalls.code_of(self.write_some, BIG), "EIO")
        self.assertRegex(self.mount.output(), f"{os.path.basename(damaged)}|inode {inode}: ")
        # The file can be removed, which is the only remedy.
        os.unlink(self.at(BIG))
        self.assertFalse(os.path.exists(self.at(BIG)))

    def write_some(self, name):
        fd = self.open(name)
        try:
            os.pwrite(fd, b"x", 5)
            os.fsync(fd)
        finally:
            os.close(fd)

    def damage_map(self):
        """Damages the map of BIG's stored blocks; returns the map's path."""
        # BIG's mark names its map.
        mark = os.getxattr(os.path.join(self.upper, BIG), "trusted.bcow.sketch")
        path = os.path.join(self.upper, ".bcow", "maps",
                            f"{int.from_bytes(mark[8:16], 'little'):016x}")
        size = os.path.getsize(path)
        self.assertGreater(size, 100)
        flip(path, min(40, size // 2))
        return path
