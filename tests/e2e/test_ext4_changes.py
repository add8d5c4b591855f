"""`bcow diff` and `bcow commit` of disks that show an image as ext4.

The judge is the tree that the kernel shows of the same disk, and the tree that umoci unpacks of a
committed image. The kernel's own replay judges disks that were not unmounted.
"""

import contextlib
import hashlib
import os
import random
import shutil
import stat
import subprocess
import tempfile
import unittest

import support
import test_upper
from support import (UNPRIVILEGED, WORK, Scratch, append_to, assert_refused, assert_same_tree, bcow,
                     for_everyone, need, overwrite, read_bytes, run, set_environment, sparse_file,
                     until)
from test_kernel_driver import LIBC, SECONDS
from test_upper import EPOCH, write

MIB, GIB = 1 << 20, 1 << 30
SEED = int(os.environ.get("BCOW_SEED") or 1)
# Rounds of random changes, and operations of each.
ROUNDS = int(os.environ.get("BCOW_ROUNDS") or 4)
OPERATIONS = 120
# How many damaged disks are read.
FLIPS = int(os.environ.get("BCOW_FLIPS") or 60)


@contextlib.contextmanager
def mounted(disk, where, *options):
    bcow("mount", disk, where, "-o", "suid,dev", *options, timeout=SECONDS)
    try:
        yield where
    finally:
        bcow("umount", where, timeout=SECONDS)


def digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class OfDisk(test_upper.Uppers, unittest.TestCase):
    """What holds for uppers holds for a disk."""
    NAME = "upper-disk"

    @classmethod
    def setUpClass(cls):
        need("e2fsck", "losetup", root=True, fuse=True)
        set_environment(cls, BCOW_VIEWS=os.path.join(WORK, cls.NAME, "views"))
        super().setUpClass()

    @classmethod
    def make_upper(cls, path):
        bcow("create", "-b", cls.base, "--fs", "ext4", "-s", "2G", path)

    @classmethod
    @contextlib.contextmanager
    def union(cls):
        with mounted(cls.upper, cls.merged):
            yield

    def damage(self, upper):
        for at in range(65536, os.path.getsize(upper), 4096):
            overwrite(upper, at, b"damage")
        return "upper-disk/damaged", "damaged|checksum"

    def test_diff_and_commit_do_not_write_to_the_disk(self):
        before = digest(self.upper)
        bcow("diff", self.base, "--upper", self.upper, check=False)
        self.commit(self.path("unwritten.bcow"))
        self.assertEqual(digest(self.upper), before)


class OfKernelUpper(OfDisk):
    """What holds for uppers holds for an upper of the kernel driver."""
    NAME = "upper-kernel"

    @classmethod
    def make_upper(cls, path):
        cls.mount(path)
        bcow("umount", cls.merged, timeout=SECONDS)

    @classmethod
    def mount(cls, upper):
        bcow("mount", cls.base, cls.merged, "--upper", upper, "--driver", "kernel", "-s", "2G",
             "-o", "suid,dev", timeout=SECONDS)

    @classmethod
    @contextlib.contextmanager
    def union(cls):
        cls.mount(cls.upper)
        try:
            yield
        finally:
            bcow("umount", cls.merged, timeout=SECONDS)

    def damage(self, upper):
        super().damage(f"{upper}/.bcow/disk.bcow")
        return "upper-kernel/damaged", "damaged|checksum"

    def test_diff_and_commit_do_not_write_to_the_disk(self):
        disk = f"{self.upper}/.bcow/disk.bcow"
        before = digest(disk)
        bcow("diff", self.base, "--upper", self.upper, check=False)
        self.commit(self.path("unwritten.bcow"))
        self.assertEqual(digest(disk), before)


class Changer:
    """Random changes of a tree."""

    def __init__(self, top, seed):
        self.top, self.rng = top, random.Random(seed)

    def find(self):
        """All paths: directories without the top, and other files."""
        directories, files = [], []
        # In an order that does not depend on the hashes of directories.
        for place, below, names in os.walk(self.top):
            below.sort()
            names.sort()
            real = [name for name in below if not os.path.islink(os.path.join(place, name))]
            directories += [os.path.join(place, name) for name in real]
            files += [os.path.join(place, name) for name in names + below if name not in real]
        return directories, files

    def run(self, operations):
        for _ in range(operations):
            directories, files = self.find()
            choice = self.rng.choice
            new = os.path.join(choice(directories + [self.top]),
                               f"{choice('abcdef')}{self.rng.randrange(12)}")
            regular = [path for path in files if stat.S_ISREG(os.lstat(path).st_mode)]
            action = choice((self.write, self.write, self.append, self.truncate, self.rename,
                             self.rename, self.remove, self.remove_tree, self.make, self.make,
                             self.link, self.symlink, self.attributes, self.attributes, self.node,
                             self.punch, self.replace))
            with contextlib.suppress(FileExistsError, NotADirectoryError, IsADirectoryError):
                action(new, directories, files, regular)

    def write(self, new, directories, files, regular):
        if regular:
            with open(self.rng.choice(regular), "r+b") as file:
                file.seek(self.rng.randrange(200_000))
                file.write(self.rng.randbytes(self.rng.randrange(1, 20_000)))

    def append(self, new, directories, files, regular):
        if regular:
            append_to(self.rng.choice(regular), b"more")

    def truncate(self, new, directories, files, regular):
        if regular:
            os.truncate(self.rng.choice(regular), self.rng.randrange(100_000))

    def punch(self, new, directories, files, regular):
        if regular:
            # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, or memory without content behind the end.
            with open(self.rng.choice(regular), "r+b") as file:
                LIBC.fallocate(file.fileno(), self.rng.choice((3, 1, 0)),
                               support.ctypes.c_int64(self.rng.randrange(50_000)),
                               support.ctypes.c_int64(self.rng.randrange(1, 90_000)))

    def rename(self, new, directories, files, regular):
        with contextlib.suppress(OSError):
            os.rename(self.rng.choice(directories + files), new)

    def replace(self, new, directories, files, regular):
        if regular:
            path = self.rng.choice(regular)
            write(path + ".new", self.rng.randbytes(5000))
            os.rename(path + ".new", path)

    def remove(self, new, directories, files, regular):
        if files:
            os.unlink(self.rng.choice(files))

    def remove_tree(self, new, directories, files, regular):
        if directories and self.rng.random() < 0.3:
            path = self.rng.choice(directories)
            shutil.rmtree(path)
            if self.rng.random() < 0.5:
                os.mkdir(path)
                write(os.path.join(path, "again"), b"again")

    def make(self, new, directories, files, regular):
        if self.rng.random() < 0.5:
            os.mkdir(new, 0o750)
        elif os.path.lexists(new) and not stat.S_ISREG(os.lstat(new).st_mode):
            # A write to a pipe waits for its reader, and one to a device changes that device.
            raise FileExistsError(new)
        else:
            write(new, self.rng.randbytes(self.rng.randrange(60_000)))

    def link(self, new, directories, files, regular):
        if files:
            os.link(self.rng.choice(files), new, follow_symlinks=False)

    def symlink(self, new, directories, files, regular):
        os.symlink(self.rng.choice("xyz") * self.rng.choice((1, 59, 60, 61, 500)), new)

    def node(self, new, directories, files, regular):
        os.mknod(new, self.rng.choice((0o644 | stat.S_IFIFO, 0o600 | stat.S_IFCHR,
                                       0o600 | stat.S_IFBLK)),
                 os.makedev(self.rng.randrange(1, 500), self.rng.randrange(1, 70_000)))

    def attributes(self, new, directories, files, regular):
        path = self.rng.choice(directories + files + [self.top])
        how = self.rng.randrange(5)
        if how == 0 and not os.path.islink(path):
            os.chmod(path, self.rng.randrange(0o10000))
        elif how == 1:
            os.chown(path, self.rng.randrange(70_000), self.rng.randrange(70_000),
                     follow_symlinks=False)
        elif how == 2:
            os.utime(path, ns=(1, self.rng.randrange(1 << 60)), follow_symlinks=False)
        elif how == 3:
            os.setxattr(path, f"trusted.{self.rng.choice('abc')}",
                        self.rng.randbytes(self.rng.randrange(2000)), follow_symlinks=False)
        elif not os.path.islink(path):
            run("setfacl", "-m", f"u:{self.rng.randrange(1, 2000)}:rwx", path)


class Changes(Scratch):
    """One image, and disks that are changed in one way each."""

    @classmethod
    def setUpClass(cls):
        need("umoci", "e2fsck", "losetup", "setfacl", root=True, fuse=True)
        super().setUpClass()
        set_environment(cls, BCOW_VIEWS=cls.path("views"))
        cls.lower = cls.path("lower")
        test_upper.make_lower(cls.lower)
        cls.base = cls.path("base.bcow")
        bcow("convert", f"dir:{cls.lower}", cls.base)

    def setUp(self):
        self.disk = tempfile.mktemp(prefix="disk-", suffix=".bcow", dir=self.directory)
        bcow("create", "-b", self.base, "--fs", "ext4", "-s", "1G", self.disk)
        self.where = tempfile.mkdtemp(prefix="mnt-", dir=self.directory)

    def mounted(self, *options, disk=None):
        return mounted(disk or self.disk, self.where, *options)

    def diff(self, *options, disk=None, **others):
        return bcow("diff", self.base, "--upper", disk or self.disk, *options, check=False,
                    **others)

    def changed(self):
        """The lines of a diff: letter and path."""
        found = self.diff()
        self.assertIn(found.code, (0, 1), str(found))
        return [tuple(line.split("\t")[:2]) for line in found.out.decode().splitlines()]

    def assert_shows(self, disk=None):
        """diff and commit agree with the tree that the kernel shows of the disk."""
        disk = disk or self.disk
        flat, after = (tempfile.mktemp(suffix=".bcow", dir=self.directory) for _ in "12")
        quick = self.diff(disk=disk)
        before = digest(disk)
        bcow("commit", self.base, "--upper", disk, flat, "--flatten", env=EPOCH)
        self.assertEqual(digest(disk), before)
        layout = tempfile.mkdtemp(dir=self.directory)
        bcow("commit", self.base, "--upper", disk, f"oci:{layout}:t", env=EPOCH)
        bundle = os.path.join(layout, "bundle")
        run("umoci", "unpack", "--image", f"{layout}:t", bundle)
        with self.mounted(disk=disk) as where:
            bcow("convert", f"dir:{where}", after)
            assert_same_tree(self, os.path.join(bundle, "rootfs"), where)
        whole = bcow("diff", self.base, after, check=False)
        self.assertEqual((quick.code, quick.out), (whole.code, whole.out), f"{whole}\n{quick}")
        found = bcow("diff", after, flat, check=False)
        self.assertEqual((found.code, found.out), (0, b""), str(found))
        shutil.rmtree(layout)
        os.unlink(flat)
        os.unlink(after)

    def test_a_mount_without_a_change_gives_an_empty_layer(self):
        with self.mounted("-o", "relatime") as where:
            run("find", where, "-type", "f", "-exec", "cat", "{}", "+")
        found = self.diff()
        self.assertEqual((found.code, found.out), (0, b""), str(found))
        layer = self.path("empty.bcow")
        said = bcow("commit", self.base, "--upper", self.disk, layer, env=EPOCH).err
        self.assertIn(b"layer of 1 inode,", said)
        self.assertEqual(bcow("commit", self.base, "--upper", self.disk, "tar:-", env=EPOCH).out,
                         bcow("export", layer, "--to", "tar", "-o", "-").out)

    def test_random_changes_are_committed(self):
        for number in range(ROUNDS):
            with self.subTest(seed=SEED + number):
                self.setUp()
                for part in range(2):
                    with self.mounted() as where:
                        Changer(where, (SEED + number) * 10 + part).run(OPERATIONS)
                    self.assert_shows()

    def test_content_without_a_new_time_is_found(self):
        """A program restores the times; the inode has nothing but the time of its own change."""
        path = "var/lib/data/table"
        with self.mounted() as where:
            time = os.stat(f"{where}/{path}").st_mtime_ns
            overwrite(f"{where}/{path}", 1 << 20, b"changed")
            os.utime(f"{where}/{path}", ns=(time, time))
            # These only read, or change what an image does not have.
            read_bytes(f"{where}/etc/config")
            os.chmod(f"{where}/etc/unchanged", 0o644)
        self.assertEqual(self.changed(), [("M", f"/{path}")])

    def test_content_that_a_killed_mount_made_durable_without_its_inode_is_found(self):
        """fdatasync does not write the times. So after a crash only the block says that the file
        has changed."""
        path = "var/lib/data/table"
        process = subprocess.Popen([support.BCOW, "mount", "-f", self.disk, self.where])
        try:
            until(lambda: os.path.ismount(self.where), "the mount")
            # The inode belongs to no open transaction, which fdatasync would write.
            os.stat(f"{self.where}/{path}")
            os.sync()
            with open(f"{self.where}/{path}", "r+b") as file:
                file.seek(2 << 20)
                file.write(b"durable")
                file.flush()
                os.fdatasync(file.fileno())
        finally:
            process.kill()
            process.wait()
            run("umount", "-l", self.where)
        self.assertIn(("M", f"/{path}"), self.changed())
        self.assert_shows()

    def test_a_killed_mount_is_read_as_the_next_mount_shows_it(self):
        for number in range(3):
            process = subprocess.Popen([support.BCOW, "mount", "-f", self.disk, self.where,
                                        "-o", "suid,dev"])
            try:
                until(lambda: os.path.ismount(self.where), "the mount")
                changer = Changer(self.where, SEED * 100 + number)
                for _ in range(6):
                    changer.run(OPERATIONS // 6)
                    os.sync()
                    # Blocks that were metadata become content: the journal revokes them.
                    os.mkdir(f"{self.where}/many-{number}")
                    for name in range(300):
                        write(f"{self.where}/many-{number}/{'long' * 20}{name}", b"")
                    os.sync()
                    shutil.rmtree(f"{self.where}/many-{number}")
                    write(f"{self.where}/large-{number}", os.urandom(4 << 20))
                    directory = os.open(self.where, os.O_RDONLY)
                    os.fsync(directory)
                    os.close(directory)
            finally:
                process.kill()
                process.wait()
                run("umount", "-l", self.where)
            self.assert_shows()

    def test_an_empty_lost_and_found_is_not_in_a_layer(self):
        # As e2fsck makes it where it is missing.
        with self.mounted() as where:
            os.mkdir(f"{where}/lost+found", 0o700)
        self.assertNotIn("/lost+found", [path for _, path in self.changed()])
        with self.mounted() as where:
            write(f"{where}/lost+found/#12", b"found")
        self.assertIn(("A", "/lost+found/#12"), self.changed())

    def test_large_directories_and_many_links(self):
        with self.mounted() as where:
            os.mkdir(f"{where}/large")
            for number in range(3000):
                write(f"{where}/large/name-{number}-{'x' * 60}", b"")
                os.link(f"{where}/etc/unchanged", f"{where}/large/link-{number}")
            for number in range(0, 3000, 3):
                os.unlink(f"{where}/large/link-{number}")
        self.assert_shows()

    def test_capabilities_and_large_attributes(self):
        need("setcap")
        with self.mounted() as where:
            run("setcap", "cap_net_raw+ep", f"{where}/etc/setuid")
            os.setxattr(f"{where}/etc/config", "user.large", os.urandom(3000))
            run("setfacl", "-d", "-m", "u:7:rwx,g:8:r", f"{where}/etc")
            os.setxattr(f"{where}/etc", "trusted.overlay.opaque", b"y")
        self.assertIn(b"trusted.overlay.opaque", self.diff().err)
        found = [path for _, path in self.changed()]
        self.assertLessEqual({"/etc", "/etc/config", "/etc/setuid"}, set(found))
        with self.mounted() as where:
            os.removexattr(f"{where}/etc", "trusted.overlay.opaque")
        self.assert_shows()

    def test_a_disk_over_a_disk_and_a_sealed_one(self):
        with self.mounted() as where:
            write(f"{where}/first", b"first")
        sealed, second = self.path("sealed.bcow"), self.path("second.bcow")
        bcow("commit", self.disk, sealed)
        bcow("create", "-b", sealed, second)
        with self.mounted(disk=second) as where:
            write(f"{where}/second", b"second")
            os.unlink(f"{where}/etc/config")
        found = self.diff(disk=second).out.decode()
        for path in ("/first", "/second", "/etc/config"):
            self.assertIn(f"\t{path}\t", found)
        self.assert_shows(second)

    def test_an_ordinary_user_reads_a_disk(self):
        with self.mounted() as where:
            write(f"{where}/new", b"new")
            os.chown(f"{where}/etc/config", 12, 34)
        there = tempfile.mkdtemp(prefix="user-", dir=WORK)
        try:
            os.chmod(there, 0o777)
            for path in (self.disk, self.base):
                shutil.copy(path, there)
                os.chmod(os.path.join(there, os.path.basename(path)), 0o644)
            there = for_everyone(there)
            disk = os.path.join(there, os.path.basename(self.disk))
            base, layer = os.path.join(there, "base.bcow"), os.path.join(there, "layer.bcow")
            views = {"BCOW_VIEWS": os.path.join(there, "views")}
            found = bcow("diff", base, "--upper", disk, check=False, user=UNPRIVILEGED, env=views)
            self.assertEqual((found.code, found.out), (1, self.diff().out), str(found))
            bcow("commit", base, "--upper", disk, layer, user=UNPRIVILEGED, env={**views, **EPOCH})
            self.assertEqual(os.stat(layer).st_uid, UNPRIVILEGED)
        finally:
            shutil.rmtree(there)

    def test_what_is_no_disk_of_the_image_is_refused(self):
        other, tiny = self.path("other.bcow"), self.path("tiny")
        os.makedirs(tiny, exist_ok=True)
        bcow("convert", f"dir:{tiny}", other)
        plain = self.path("plain-disk.bcow")
        bcow("create", "-s", "64M", plain)
        for image, disk, *words in ((other, self.disk, "does not show .*other.bcow"),
                                    (self.base, plain, "does not show an image"),
                                    (self.base, other, "it is not a disk"),
                                    (self.base, "/etc/hostname", "it is not a disk")):
            with self.subTest(disk):
                refused = bcow("commit", image, "--upper", disk, self.path("no.bcow"), check=False)
                assert_refused(self, refused, *words)
        self.assertFalse(os.path.exists(self.path("no.bcow")))
        raw = self.path("anew.raw")
        sparse_file(raw, GIB)
        run("mkfs.ext4", "-q", "-F", "-N", "1000", raw)
        anew = self.path("anew.bcow")
        shutil.copy(self.disk, anew)
        self.overwrite(anew, raw)
        refused = self.diff(disk=anew)
        assert_refused(self, refused, "made anew|features", code=2)

    def overwrite(self, disk, raw):
        """Writes the first bytes of a raw file to a disk."""
        need("nbdcopy", "nbdfuse")
        short = tempfile.mkdtemp(prefix="nbd-")
        try:
            with support.served(disk, "--socket", f"{short}/s"):
                run("nbdcopy", raw, f"nbd+unix:///?socket={short}/s", timeout=SECONDS)
        finally:
            shutil.rmtree(short)

    def test_damage_is_an_error_or_does_no_harm(self):
        with self.mounted() as where:
            Changer(where, SEED).run(OPERATIONS)
        whole = read_bytes(self.disk)
        rng, damaged = random.Random(SEED), self.path("damaged.bcow")
        for number in range(FLIPS):
            data = bytearray(whole)
            # The file of the disk has checksums of its own for its tables, not for its content.
            for _ in range(rng.randrange(1, 20)):
                data[rng.randrange(4096, len(data))] ^= 1 << rng.randrange(8)
            write(damaged, data)
            result = self.diff(disk=damaged, timeout=SECONDS)
            self.assertIn(result.code, (0, 1, 2), str(result))
            self.assertNotIn(b"panicked", result.err)
            self.assertLess(result.peak_bytes, support.PEAK_BYTES)
