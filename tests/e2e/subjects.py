"""Writable mounts of a tree for the same tests: all kinds of bcow's, and other implementations,
which check the tests themselves.

A Lower is a directory and the image made of it. A Subject mounts it at `where`, and stores changes
in `upper`, which survives an unmount. BCOW_SUBJECTS lists the subjects to test, separated by
spaces:

    plain             a copy on the same file system, no union at all
    overlayfs         the kernel's, with redirected directories, metadata copies and the index
    fuse-overlayfs
    bcow[+OPTION...]  options of `bcow mount` without the dashes, or of its -o:
                      bcow+sync=volatile+writeback
    bcow+driver=kernel  an upper of the kernel driver, likewise with options
    bcow+pool         a pool of its own, likewise with options
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time

import support
import syscalls
from support import BCOW, bcow, is_mounted, need, run, sparse_file, write_file

KINDS = ("bcow",)
KERNEL = "bcow+driver=kernel"
# The first write to a file larger than this makes a partial file.
LARGE = 64 << 10
# 2001, and a part of a second, so that a copy that loses nanoseconds is seen.
EPOCH = 1_000_000_000_123_456_789


def chosen(default=KINDS):
    return tuple((os.environ.get("BCOW_SUBJECTS") or " ".join(default)).split())


class Lower:
    """A tree in a directory, and the image of it."""

    def __init__(self, directory, plant):
        self.tree, self.image = os.path.join(directory, "lower"), os.path.join(
            directory, "image.bcow")
        os.mkdir(self.tree)
        plant(self.tree)

    def make_image(self, *options):
        if not os.path.exists(self.image):
            bcow("convert", *options, f"dir:{self.tree}", self.image)
        return self.image


class Subject:
    """The common part: a directory with `mnt` and `upper`."""

    # Whether a process serves the mount, which can be killed.
    daemon = False

    def __init__(self, name, lower, directory):
        self.name, self.lower, self.directory = name, lower, directory
        self.where, self.upper = os.path.join(directory, "mnt"), os.path.join(directory, "upper")
        for path in (self.where, self.upper):
            os.makedirs(path, exist_ok=True)
        self.prepare()

    def prepare(self):
        os.chmod(self.upper, os.stat(self.lower.tree).st_mode & 0o7777)

    def mount(self):
        raise NotImplementedError

    def unmount(self):
        run("umount", self.where)

    def remount(self):
        self.unmount()
        self.mount()

    def check(self):
        """Fails unless the unmounted upper is consistent."""

    def remove(self):
        """Removes everything, in any state."""
        while is_mounted(self.where):
            subprocess.run(["umount", "-l", self.where], check=False)
        shutil.rmtree(self.directory, ignore_errors=True)


class Plain(Subject):
    def prepare(self):
        self.upper = self.where
        os.rmdir(self.where)
        run("cp", "-a", self.lower.tree, self.where)

    def mount(self):
        # So that its root is a mount point too, for EBUSY and EXDEV.
        run("mount", "--bind", self.where, self.where)


class Overlay(Subject):
    options = "redirect_dir=on,metacopy=on,index=on,xino=auto"

    def prepare(self):
        super().prepare()
        self.work = os.path.join(self.directory, "work")
        os.makedirs(self.work, exist_ok=True)
        shutil.copystat(self.lower.tree, self.upper)

    def mount(self):
        run("mount", "-t", "overlay", "overlay", "-o",
            f"lowerdir={self.lower.tree},upperdir={self.upper},workdir={self.work},{self.options}",
            self.where)


class Foreground(Subject):
    """A foreground process that serves the mount, so that its exit status and its output are
    known."""

    daemon = True
    process = user = None

    def command(self):
        raise NotImplementedError

    def start(self):
        """Starts mounting; the caller checks whether the mount succeeds."""
        self.log = tempfile.TemporaryFile()
        options = ({} if self.user is None
                   else {"user": self.user, "group": self.user, "extra_groups": []})
        self.process = subprocess.Popen(self.command(), stdin=subprocess.DEVNULL, stdout=self.log,
                                        stderr=self.log, start_new_session=True, **options)

    def mount(self):
        self.start()
        deadline = time.monotonic() + 60
        while not self.answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"`{' '.join(self.command())}` did not mount, code "
                                     f"{self.process.poll()}:\n{self.output()}")
            time.sleep(0.002)

    def answers(self):
        """Whether the mount is ready. A dead mount may be there first, and then none, until this
        mount replaces it."""
        return is_mounted(self.where) and syscalls.code_of(os.statvfs, self.where) not in (
            "ENOTCONN", "ECONNABORTED") and is_mounted(self.where)

    def output(self):
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def unmount(self):
        super().unmount()
        self.ended()

    def ended(self):
        code = self.process.wait(timeout=60)
        output = self.release()
        if code != 0 or "panicked" in output:
            raise AssertionError(f"the mount's process ended with {code}:\n{output}")

    def kill(self):
        """Kills the process. The kernel keeps the dead mount."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        output = self.release()
        if "panicked" in output:
            raise AssertionError(f"before it was killed:\n{output}")

    def release(self):
        """Releases the process, which has ended; returns its output."""
        output = self.output()
        self.log.close()
        self.process = None
        return output

    def remove(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.release()
        super().remove()


class FuseOverlay(Foreground, Overlay):
    def command(self):
        return ["fuse-overlayfs", "-f", "-o",
                f"lowerdir={self.lower.tree},upperdir={self.upper},workdir={self.work},allow_other",
                self.where]

    def kill(self):
        super().kill()
        run("umount", self.where)


class Bcow(Foreground):
    access = "allow_other,suid,dev"

    def prepare(self):
        given = self.name.split("+")[1:]
        self.options = [f"--{option}" for option in given if "=" in option]
        self.access = ",".join([self.access, *(option for option in given if "=" not in option)])

    def command(self):
        program, image = BCOW, self.lower.make_image()
        if self.user is not None:
            program, image = support.for_everyone(program), support.for_everyone(image)
        options = self.options + (["-o", self.access] if self.access else [])
        return [program, "mount", "-f", image, self.where, "--upper", self.upper, *options]

    def unmount(self):
        done = bcow("umount", self.where, user=self.user, timeout=300)
        # A mount namespace that was made meanwhile (for a container) keeps the mount until that
        # namespace ends.
        if done.err and b" continues: " not in done.err:
            raise AssertionError(str(done))
        self.ended()

    def check(self):
        done = bcow("fsck", self.upper, check=False, user=self.user)
        if done.code != 0:
            raise AssertionError(str(done))


class Kernel(Bcow):
    """With the kernel driver."""

    def prepare(self):
        super().prepare()
        # e2fsck reads a small file system in a short time.
        self.options.append("--size=2G")
        os.environ.setdefault("BCOW_VIEWS", os.path.join(support.WORK, "views"))

    def kill(self):
        super().kill()
        # What the kernel has cached can still be read there. A process that froze the file system
        # for a snapshot has it open until it sees that the killed one has ended.
        support.until(lambda: run("umount", self.where, check=False).code == 0,
                      "the mount is not busy")

    def check(self):
        super().check()
        raw = os.path.join(self.directory, "check.raw")
        disk = os.path.join(self.upper, ".bcow", "disk.bcow")
        bcow("convert", "--backing-dir", os.path.dirname(self.lower.image), disk, f"raw:{raw}")
        run("e2fsck", "-fn", raw)
        os.unlink(raw)


class Pooled(Bcow):
    """In a pool of its own, so that another process can take over the mount."""

    def prepare(self):
        super().prepare()
        self.access = ",".join(option for option in self.access.split(",") if option != "pool")
        self.pools = os.path.join(self.directory, "pools")
        os.makedirs(self.pools, mode=0o700, exist_ok=True)

    def command(self):
        # The process is the supervisor.
        return ["env", f"BCOW_POOLS={self.pools}", BCOW, "pool", "start", "p", "--foreground"]

    def bcow(self, *arguments, **options):
        return bcow(*arguments, env={"BCOW_POOLS": self.pools}, timeout=60, **options)

    def mount(self):
        self.start()
        # A killed pool has left its socket.
        support.until(lambda: self.serving() is not None or self.process.poll() is not None,
                      "the pool starts")
        self.bcow("mount", self.lower.make_image(), self.where, "--pool", "p", "--upper",
                  self.upper, *self.options, "-o", self.access)

    def ended(self):
        if self.serving() is not None:
            self.bcow("pool", "stop", "p")
        super().ended()

    def serving(self):
        """The process that serves the mount."""
        pools = json.loads(self.bcow("pool", "list", "--json").out)["pools"]
        return pools[0]["pid"] if pools else None

    def kill(self):
        """Kills the supervisor too, so that no process takes over."""
        pid = self.serving()
        super().kill()
        os.kill(pid, signal.SIGKILL)
        support.until(lambda: not os.path.exists(f"/proc/{pid}"), "the process of the pool ends")

    def remove(self):
        if self.process is not None and (pid := self.serving()) is not None:
            self.process.kill()
            os.kill(pid, signal.SIGKILL)
        super().remove()


def subject(name, lower, directory):
    kind = {"plain": Plain, "overlayfs": Overlay, "fuse-overlayfs": FuseOverlay, "bcow": Bcow}[
        name.split("+")[0]]
    if kind is Bcow and "driver=kernel" in name.split("+"):
        kind = Kernel
    if kind is Bcow and "pool" in name.split("+"):
        kind = Pooled
    return kind(name, lower, directory)


def need_for(*names):
    """Checks the requirements of these subjects besides bcow."""
    need(root=True, fuse=True)
    for name in names:
        if name == "fuse-overlayfs":
            need("fuse-overlayfs")
        if "driver=kernel" in name.split("+"):
            need("e2fsck", "losetup")


@contextlib.contextmanager
def shown(name, lower, mount=True):
    """A subject in its own directory for the length of a with block; its process must exit with
    0."""
    directory = tempfile.mkdtemp(prefix="union-", dir=support.WORK)
    os.chmod(directory, 0o755)
    one = subject(name, lower, directory)
    try:
        if mount:
            one.mount()
        yield one
        if is_mounted(one.where):
            one.unmount()
    finally:
        one.remove()


def content(tag, length):
    """Bytes that follow from a tag. None is zero, so that a zero means a byte that was never
    written."""
    piece = random.Random(str(tag)).randbytes(min(length, 4 << 20)).replace(b"\0", b"\1")
    return (piece * (length // max(1, len(piece)) + 1))[:length]


def plant(top):
    """The lower tree of most tests: each type, sizes around every threshold, hardlinks, holes,
    xattrs, ACLs, odd names."""
    def at(*names):
        return os.path.join(top, *names)

    for name in ("d0", "d0/sub", "d0/sub/deep", "d1", "d2", "many", "empty", "sticky", "setgid"):
        os.mkdir(at(name))
    sizes = {"d0/zero": 0, "d0/one": 1, "d0/hundred": 100, "d0/sub/4095": 4095, "d0/sub/4096": 4096,
             "d0/sub/4097": 4097, "d1/small": LARGE, "d1/large": LARGE + 1, "d1/odd": 100_003,
             "d2/blocks": 75 * 4096, "d2/big": (1 << 20) + 123, "d0/sub/deep/file": 200_000,
             "top": 10_000, "setgid/tool": 70_000, "sticky/others": 300}
    for name, size in sizes.items():
        write_file(at(name), content(name, size))
    with open(at("d2/holes"), "wb") as file:
        for offset in (0, 40_000, 500_000, 1_500_000):
            file.seek(offset)
            file.write(content(offset, 9000))
        file.truncate(2_000_000)
    sparse_file(at("d2/hollow"), 300_000)
    for first, *others in (("d0/pair", "d1/pair"), ("d2/three", "d0/sub/three", "three")):
        write_file(at(first), content(first, 90_000 if others[-1] == "three" else 500))
        for other in others:
            os.link(at(first), at(other))
    for name, target in (("link", "d0/hundred"), ("d0/link", "sub"), ("dangling", "nowhere"),
                         ("d1/self", "self"), ("long-link", "d0/" * 300)):
        os.symlink(target, at(name))
    os.link(at("link"), at("d1/link"), follow_symlinks=False)
    os.mkfifo(at("fifo"), 0o640)
    os.mknod(at("null"), 0o20666, os.makedev(1, 3))
    os.mknod(at("d1/block"), 0o60640, os.makedev(7, 300))
    os.mknod(at("d1/socket"), 0o140600)
    for number in range(120):
        with open(at("many", f"entry-{number:03}"), "wb"):
            pass
    for name in ("n" * 255, "back\\slash", "new\nline", "\udcff\udcfe", "über", " ", "-", "#x"):
        write_file(at("d2", name), os.fsencode(name))
    os.setxattr(at("d0/hundred"), "user.one", b"1")
    os.setxattr(at("d2/big"), "user.two", bytes(range(200)))
    os.setxattr(at("d2/big"), "trusted.three", b"3")
    os.setxattr(at("d0"), "user.dir", b"")
    os.setxattr(at("d1/large"), syscalls.ACCESS_ACL,
                syscalls.simple_acl(6, 4, 0, mask=6, users=((1000, 6),)))
    os.setxattr(at("d1"), syscalls.DEFAULT_ACL,
                syscalls.simple_acl(7, 5, 0, mask=7, users=((1000, 7),), groups=((1001, 5),)))
    for name, uid, gid, mode in (("d2/blocks", 1000, 1000, 0o644), ("setgid", 0, 1001, 0o2775),
                                 ("setgid/tool", 1000, 1001, 0o6755), ("sticky", 0, 0, 0o1777),
                                 ("sticky/others", 1001, 1001, 0o666),
                                 ("d0/sub", 1000, 1000, 0o755), ("d2", 0, 0, 0o777),
                                 ("empty", 1000, 1000, 0o700), ("d0/one", 0, 0, 0o400)):
        os.chown(at(name), uid, gid)
        os.chmod(at(name), mode)
    for path, folders, files in os.walk(top, topdown=False):
        for number, name in enumerate(sorted(files + folders)):
            syscalls.utimens(os.path.join(path, name), EPOCH + number, EPOCH + number * 10 ** 9,
                             follow=False)
    syscalls.utimens(top, EPOCH, EPOCH)
