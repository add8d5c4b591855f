"""The base of the test cases of writable mounts: one lower tree for a class, one mount for a
test."""

import concurrent.futures
import os

import subjects
import support
from support import read_bytes, sparse_file
import syscalls


class LowerCase(support.Scratch):
    """A class of tests with one lower tree and its image, for subjects of these kinds."""

    kinds = subjects.KINDS
    plant = staticmethod(subjects.plant)
    # Programs that the tests need.
    tools = ()

    @classmethod
    def setUpClass(cls):
        cls.names = subjects.chosen(cls.kinds)
        subjects.need_for(*cls.names)
        support.need(*cls.tools)
        super().setUpClass()
        cls.lower = subjects.Lower(cls.directory, cls.plant)
        if any(name.startswith("bcow") for name in cls.names):
            cls.lower.make_image()

    def assert_no_failure(self, names, function, *arguments):
        """Calls a function, which returns a failure or None, for each subject, two at a time."""
        with concurrent.futures.ProcessPoolExecutor(2) as pool:
            running = [pool.submit(function, name, self.lower, *arguments) for name in names]
            found = [one.result() for one in running]
        self.assertEqual([failure for failure in found if failure], [])


class UnionCase(LowerCase):
    """Each test has its own mount of the class's tree, at `self.where`."""

    kind = "bcow"
    # Whether setUp mounts. A test with its own options mounts by itself.
    mounts = True

    @classmethod
    def setUpClass(cls):
        cls.kinds = (cls.kind,)
        super().setUpClass()
        cls.kind = cls.names[0]

    def setUp(self):
        self.mount = self.enterContext(subjects.shown(self.kind, self.lower, mount=self.mounts))
        self.where, self.upper = self.mount.where, self.mount.upper
        self.descriptors = []
        self.addCleanup(self.close)

    def at(self, *names):
        return os.path.join(self.where, *names)

    def below(self, *names):
        """A path of the lower tree on the host."""
        return os.path.join(self.lower.tree, *names)

    def read(self, name):
        return read_bytes(self.at(name))

    def write(self, name, data=b"", mode=0o644):
        fd = self.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)
        return self.at(name)

    def open(self, name, flags=os.O_RDWR, mode=0o644):
        return os.open(self.at(name), flags, mode)

    def opened(self, name, flags=os.O_RDWR):
        """Opens a file until the test ends or remounts."""
        self.descriptors.append(self.open(name, flags))
        return self.descriptors[-1]

    def close(self):
        while self.descriptors:
            os.close(self.descriptors.pop())

    def remount(self):
        self.close()
        self.mount.remount()

    def original(self, name):
        return bytearray(read_bytes(self.below(name)))

    def assert_error(self, code, function, *arguments, **options):
        """Fails unless a call raises the errno of this name."""
        self.assertEqual(syscalls.code_of(function, *arguments, **options), code)

    def stored(self):
        """Bytes that the upper's files occupy on the host, in blocks of 4 KiB."""
        total = 0
        for path, _, files in os.walk(self.upper):
            for name in files:
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
        return total

    def give_to_ordinary_user(self):
        """Makes the mount and its directories an ordinary user's."""
        user = support.UNPRIVILEGED
        self.mount.user, self.mount.access = user, None
        for path in (self.where, self.upper):
            os.chown(path, user, user)
        self.mount.where = self.where = support.for_everyone(self.where)
        self.mount.upper = self.upper = support.for_everyone(self.upper)

    def disk(self, mib, options="loop", at=None):
        """Mounts a small ext4 for the length of the test; its file is in the directory `at`.
        Returns the mount point."""
        image, where = os.path.join(at or self.mount.directory, "disk.ext4"), os.path.join(
            self.mount.directory, "disk")
        sparse_file(image, mib << 20)
        support.run("mkfs.ext4", "-q", "-F", "-m", "0", image)
        os.mkdir(where)
        support.run("mount", "-o", options, image, where)
        self.addCleanup(lambda: support.is_mounted(where) and support.run("umount", "-l", where))
        return where
