"""The file systems that benches/union.py compares: each shows a directory as a writable tree and
stores changes separately."""

import contextlib
import os
import pathlib
import shutil
import stat
import subprocess
import time

from measure import Failed, daemon_of, process_cpu, process_rss, run

# The nominal size of file systems in files.
DISK = 200 << 30


def stored_bytes(directory):
    """The disk space of the files and directories below a directory; an inode counts once."""
    total, seen = 0, set()
    for path, folders, files in os.walk(directory):
        for name in [*folders, *files]:
            with contextlib.suppress(OSError):
                about = os.lstat(os.path.join(path, name))
                if (about.st_dev, about.st_ino) not in seen:
                    seen.add((about.st_dev, about.st_ino))
                    total += about.st_blocks * 512
    return total


def remove(path):
    """Removes a tree; fails if a part stays, since that would count for the next subject."""
    path = pathlib.Path(path)
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def thin(directory):
    """Frees the space of large files. Small files stay until the end: for minutes ext4 skips each
    recently freed inode, which slows the creation of later files."""
    for path, _, names in os.walk(directory):
        for name in names:
            file = os.path.join(path, name)
            about = os.lstat(file)
            if stat.S_ISREG(about.st_mode) and about.st_blocks * 512 > 1 << 20:
                os.truncate(file, 0)


def kernel_knows(name):
    if shutil.which("modprobe"):
        subprocess.run(["modprobe", name], stderr=subprocess.DEVNULL)
    return name in pathlib.Path("/proc/filesystems").read_text().split()


def unmount_below(directory):
    """Unmounts what an error has left mounted, so that the removal of the directory does not enter
    a mount."""
    table = pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
    for where in reversed([line.split()[4] for line in table]):
        if pathlib.Path(where).is_relative_to(directory):
            subprocess.run(["umount", "-l", where], check=False)


def runs(process):
    """Whether a process has not ended. A zombie has ended."""
    try:
        return (pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
                != "Z")
    except OSError:
        return False


class Instance:
    """One writable tree: its mount point, its upper, and its remount."""

    def __init__(self, subject, path, upper, again):
        self.subject, self.path, self.upper, self._again = subject, pathlib.Path(path), upper, again
        self.daemon = 0
        self.mounted = False

    def mount(self):
        self._again()
        self.mounted = True
        self.daemon = daemon_of(str(self.path)) if self.subject.has_daemon else 0
        return self

    def unmount(self):
        if not self.mounted:
            return
        self.subject.unmount(self)
        self.mounted = False
        # A daemon may still be working; its upper is in use until the daemon ends.
        until = time.monotonic() + 120
        while self.daemon and runs(self.daemon) and time.monotonic() < until:
            time.sleep(0.002)

    def upper_bytes(self):
        return self.subject.upper_bytes(self)

    def cpu(self):
        return process_cpu(self.daemon) if self.daemon else 0.0

    def rss(self):
        return process_rss(self.daemon) if self.daemon else 0


class Subject:
    """One kind of file system. `lower` makes its kind of lower from a directory, once for each
    directory."""

    name = ""
    title = ""
    has_daemon = False
    # Whether the size of an upper is measured by the free space of its file system.
    by_free_space = False
    # Whether an instance was mounted already.
    has_started = False

    def __init__(self, bench):
        self.bench, self.lowers, self.count = bench, {}, 0
        self.home = bench.work / self.name
        self.home.mkdir()

    def missing(self):
        """The reason why it cannot be measured here, or None."""

    def lower(self, tree):
        if tree not in self.lowers:
            self.lowers[tree] = self.make_lower(tree)
        return self.lowers[tree]

    def make_lower(self, tree):
        return tree

    def drop(self, tree):
        """Removes the lower that was made from a tree."""
        made = self.lowers.pop(tree, tree)
        if made != tree:
            made.unlink()

    def where(self):
        """The directory of uppers."""
        return self.home

    @contextlib.contextmanager
    def instance(self, tree, **options):
        """A mounted instance with an upper of its own."""
        self.count += 1
        directory = self.where() / f"instance-{self.count}"
        for name in ("upper", "work", "mnt"):
            (directory / name).mkdir(parents=True)
        one = Instance(self, directory / "mnt", directory / "upper", None)
        one._again = lambda: self.attach(self.lower(tree), directory, **options)
        try:
            self.before(one)
            yield one.mount()
        finally:
            one.unmount()
            thin(directory)

    def before(self, instance):
        """Records the state before the first change."""

    def attach(self, lower, directory, **options):
        raise NotImplementedError

    def unmount(self, instance):
        run(["umount", instance.path])

    def upper_bytes(self, instance):
        return stored_bytes(instance.upper)

class Native(Subject):
    """A copy of the tree, changed in place: the limit for every union."""

    name, title = "native", "ext4"

    def attach(self, lower, directory, **options):
        mnt = directory / "mnt"
        if not any(mnt.iterdir()):
            shutil.copystat(lower, mnt)
            run(["cp", "-a", "--sparse=never", f"{lower}/.", mnt])
            # A fresh copy is in the page cache and not on the disk, but the others' lowers are on
            # the disk.
            os.sync()

    def unmount(self, instance):
        pass

    def upper_bytes(self, instance):
        return None


class Overlay(Subject):
    name, title = "overlay", "overlayfs"

    def attach(self, lower, directory, options=(), **rest):
        fields = [f"lowerdir={lower},upperdir={directory}/upper,workdir={directory}/work", *options]
        # overlayfs refuses an upper of a volatile mount until this directory is removed.
        remove(directory / "work" / "work" / "incompat")
        run(["mount", "-t", "overlay", "overlay", "-o", ",".join(fields), directory / "mnt"])


class OverlayErofs(Overlay):
    """The lower is an image, as composefs and others have it: uncompressed EROFS on a loop
    device."""

    name, title = "overlay-erofs", "overlayfs on EROFS"

    def missing(self):
        if not shutil.which("mkfs.erofs"):
            return "mkfs.erofs is not installed"
        return None if kernel_knows("erofs") else "the kernel has no EROFS"

    def make_lower(self, tree):
        image, mnt = self.home / f"{tree.name}.erofs", self.home / f"lower-{tree.name}"
        run(["mkfs.erofs", "--quiet", image, tree])
        mnt.mkdir()
        run(["mount", "-t", "erofs", "-o", "ro,loop", image, mnt])
        return mnt

    def drop(self, tree):
        mnt = self.lowers.pop(tree)
        run(["umount", mnt])
        mnt.rmdir()
        (self.home / f"{tree.name}.erofs").unlink()


class OverlayReflink(Overlay):
    """Lower and upper on one file system that shares blocks: a copy-up clones. It is in a file, on
    a loop device."""

    kind, make = "", []
    by_free_space = True

    def missing(self):
        if not shutil.which(f"mkfs.{self.kind}"):
            return f"mkfs.{self.kind} is not installed"
        return None if kernel_knows(self.kind) else f"the kernel has no {self.kind}"

    def where(self):
        disk = self.home / "disk"
        if not disk.exists():
            image = self.home / "disk.img"
            with open(image, "wb") as file:
                file.truncate(DISK)
            run([f"mkfs.{self.kind}", *self.make, image])
            disk.mkdir()
            run(["mount", "-t", self.kind, "-o", "loop,discard", image, disk])
        return disk

    def make_lower(self, tree):
        copy = self.where() / f"lower-{tree.name}"
        run(["cp", "-a", "--reflink=never", "--sparse=never", tree, copy])
        os.sync()
        return copy

    def drop(self, tree):
        """Removes the tree and everything made from it."""
        self.lowers.pop(tree)
        run(["umount", self.home / "disk"])
        (self.home / "disk").rmdir()
        (self.home / "disk.img").unlink()

    def free(self):
        run(["sync", "-f", self.where()])
        figures = os.statvfs(self.where())
        return figures.f_bfree * figures.f_frsize

    def before(self, instance):
        instance.free = self.free()

    def upper_bytes(self, instance):
        # st_blocks includes shared blocks, so the free space is measured.
        return instance.free - self.free()


class OverlayXfs(OverlayReflink):
    name, title, kind, make = "overlay-xfs", "overlayfs on xfs, reflinks", "xfs", [
        "-q", "-m", "reflink=1"]


class OverlayBtrfs(OverlayReflink):
    name, title, kind, make = "overlay-btrfs", "overlayfs on btrfs", "btrfs", ["-q"]


class FuseOverlay(Subject):
    name, title = "fuse-overlayfs", "fuse-overlayfs"
    has_daemon = True

    def missing(self):
        return None if shutil.which("fuse-overlayfs") else "fuse-overlayfs is not installed"

    def attach(self, lower, directory, options=(), **rest):
        fields = [
            f"lowerdir={lower},upperdir={directory}/upper,workdir={directory}/work,allow_other",
            *options]
        run(["fuse-overlayfs", "-o", ",".join(fields), directory / "mnt"])


class Bcow(Subject):
    name, title = "bcow", "**bcow**"
    has_daemon = True
    mount_options, convert_options = [], []

    def missing(self):
        try:
            run([self.bench.bcow, "mount", "--upper", "/nowhere", "--help"])
        except (Failed, OSError):
            return f"{self.bench.bcow} has no writable mounts"
        return None

    def make_lower(self, tree):
        image = self.home / f"{tree.name}.bcow"
        run([self.bench.bcow, "convert", f"dir:{tree}", image, "--no-verify", *self.convert_options,
             *self.bench.convert_options])
        return image

    def attach(self, lower, directory, options=(), **rest):
        run([self.bench.bcow, "mount", lower, directory / "mnt", "--upper", directory / "upper",
             "-o", "allow_other,suid,dev", *self.mount_options, *self.bench.mount_options,
             *options])

    def unmount(self, instance):
        run([self.bench.bcow, "umount", instance.path])


class BcowPool(Bcow):
    """In a pool, where mounts share files."""

    name, title = "bcow-pool", "**bcow**, in a pool"
    has_daemon = False

    def attach(self, lower, directory, options=(), **rest):
        run([self.bench.bcow, "pool", "start", self.pool(directory)])
        super().attach(lower, directory, ["--pool", self.pool(directory), "--share", "on",
                                          *options])

    def unmount(self, instance):
        super().unmount(instance)
        run([self.bench.bcow, "pool", "stop", self.pool(instance.path.parent)])

    def pool(self, directory):
        # Each instance has one of its own, so that its caches are empty.
        return f"bench-{os.getpid()}-{directory.name}"


class BcowKernel(Bcow):
    """The kernel's ext4, on a disk that shows the image."""

    name, title = "bcow-kernel", "**bcow**, kernel driver"

    def make_lower(self, tree):
        os.environ["BCOW_VIEWS"] = str(self.home / "views")
        return super().make_lower(tree)

    def attach(self, lower, directory, options=(), **rest):
        run([self.bench.bcow, "mount", lower, directory / "mnt", "--upper", directory / "upper",
             "--driver", "kernel", "-o", "suid,dev", *self.bench.mount_options, *options])


class BcowWriteback(Bcow):
    """With the kernel's write-back cache."""

    name, title = "bcow-writeback", "**bcow**, writeback"
    mount_options = ["-o", "writeback"]


class BcowPlain(Bcow):
    """With an uncompressed image."""

    name, title = "bcow-plain", "**bcow**, plain image"
    convert_options = ["--plain"]


ALL = [Native, Overlay, OverlayErofs, OverlayXfs, OverlayBtrfs, FuseOverlay, Bcow, BcowPool,
       BcowKernel, BcowWriteback, BcowPlain]
