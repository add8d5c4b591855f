"""What the test cases of writable mounts share: one lower tree for a class, one mount for a
test."""

import os
import shutil
import tempfile
import unittest

import subjects
import support
import syscalls


class UnionCase(unittest.TestCase):
    """Each test has a mount of its own of the class's tree, at `self.where`."""

    kind = "bcow+sketch=sparse"
    plant = staticmethod(subjects.plant)
    # What the tests need that is not the mount: programs.
    tools = ()
    # Not mounted by setUp: for tests that want to say how.
    mounts = True

    @classmethod
    def setUpClass(cls):
        cls.kind = subjects.chosen((cls.kind,))[0]
        subjects.need_for(cls.kind)
        support.need(*cls.tools)
        cls.directory = tempfile.mkdtemp(prefix="union-", dir=support.WORK)
        cls.addClassCleanup(shutil.rmtree, cls.directory)
        os.chmod(cls.directory, 0o755)
        cls.lower = subjects.Lower(cls.directory, cls.plant)
        if cls.kind.startswith("bcow"):
            cls.lower.make_image()

    def setUp(self):
        self.mount = self.enterContext(subjects.shown(self.kind, self.lower, mount=self.mounts))
        self.where, self.upper = self.mount.where, self.mount.upper
        self.descriptors = []
        self.addCleanup(self.close)

    def at(self, *names):
        return os.path.join(self.where, *names)

    def below(self, *names):
        """The same in the lower tree, as it lies on the host."""
        return os.path.join(self.lower.tree, *names)

    def read(self, name):
        with open(self.at(name), "rb") as file:
            return file.read()

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
        """Open until the test ends, or mounts again."""
        self.descriptors.append(self.open(name, flags))
        return self.descriptors[-1]

    def close(self):
        while self.descriptors:
            os.close(self.descriptors.pop())

    def remount(self):
        self.close()
        self.mount.remount()

    def original(self, name):
        with open(self.below(name), "rb") as file:
            return bytearray(file.read())

    def assert_error(self, code, function, *arguments, **options):
        """Fails unless a call ends with this errno, named."""
        self.assertEqual(syscalls.code_of(function, *arguments, **options), code)

    def stored(self):
        """Bytes of file content that the upper takes on the host; where it has them, in blocks of 4
        KiB."""
        total = 0
        for path, _, files in os.walk(self.upper):
            for name in files:
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
        return total

    def give_to_ordinary_user(self):
        """The mount will be an ordinary user's, and so are its directories."""
        user = support.NOBODY
        self.mount.user, self.mount.access = user, None
        for path in (self.where, self.upper):
            os.chown(path, user, user)
        self.mount.where = self.where = support.for_everyone(self.where)
        self.mount.upper = self.upper = support.for_everyone(self.upper)

    def disk(self, mib, options="loop", at=None):
        """A small ext4 of its own, in a file in the directory `at`, for the length of the test: the
        directory where it is mounted."""
        image, where = os.path.join(at or self.mount.directory, "disk.ext4"), os.path.join(
            self.mount.directory, "disk")
        with open(image, "wb") as file:
            file.truncate(mib << 20)
        support.run("mkfs.ext4", "-q", "-F", "-m", "0", image)
        os.mkdir(where)
        support.run("mount", "-o", options, image, where)
        self.addCleanup(lambda: support.is_mounted(where) and support.run("umount", "-l", where))
        return where
