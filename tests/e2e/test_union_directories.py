"""Attributes of directories of a writable mount change only if a program changes the directory,
never by a copy-up, a listing, a flush or a remount. A directory on ext4 with the same changes says
which of the attributes may change.

BCOW_ROUNDS=100 runs more sequences, BCOW_STEPS=500 longer ones, and BCOW_SEED=7 others.
"""

import os
import random
import stat
import tarfile
import time

import operations
import subjects
import support
import syscalls
from promises import promise
from support import append_to, bcow, drop_caches, read_bytes, run, write_file
from union import LowerCase

ROUNDS = int(os.environ.get("BCOW_ROUNDS") or 3)
STEPS = int(os.environ.get("BCOW_STEPS") or 60)
SEED = int(os.environ.get("BCOW_SEED") or 1)
# The clock of the kernel for times of files advances by ticks.
COARSE = 5  # CLOCK_REALTIME_COARSE


def plant(tree):
    for path in ("d", "d/e", "d/e/f", "other", "other/empty"):
        os.mkdir(os.path.join(tree, path))
    for path in ("top", "d/one", "d/e/two", "d/e/f/three", "other/four"):
        write_file(os.path.join(tree, path), subjects.content(path, 5_000))
        os.utime(os.path.join(tree, path), ns=(subjects.EPOCH,) * 2)
    write_file(os.path.join(tree, "d/e/large"), subjects.content("large", 300_000))
    os.link(os.path.join(tree, "d/one"), os.path.join(tree, "other/link"))
    for path, _, _ in os.walk(tree, topdown=False):
        os.utime(path, ns=(subjects.EPOCH,) * 2)


def tick():
    """Waits until the time of the next change differs from that of the last one."""
    now = time.clock_gettime_ns(COARSE)
    while time.clock_gettime_ns(COARSE) == now:
        time.sleep(0.0005)


def facts(path):
    found = os.lstat(path)
    return {"mtime": found.st_mtime_ns, "ctime": found.st_ctime_ns, "nlink": found.st_nlink,
            "size": found.st_size, "blocks": found.st_blocks, "mode": found.st_mode,
            "owner": (found.st_uid, found.st_gid), "inode": found.st_ino, "device": found.st_dev}


class Wrong(Exception):
    """An attribute changed, or did not."""


class Sides:
    """A directory on ext4 and a mount, with the same changes."""

    def __init__(self, copy, mount):
        self.copy, self.mount = copy, mount
        self.before = self.seen()

    def directories(self):
        return [os.path.relpath(path, self.copy.where) for path, _, _ in os.walk(self.copy.where)]

    def seen(self):
        """The attributes of each directory on both sides, by its inode number in the copy."""
        seen = {}
        for path in self.directories():
            copied = facts(os.path.join(self.copy.where, path))
            seen[copied["inode"]] = path, copied, facts(os.path.join(self.mount.where, path))
        return seen

    def list_all(self):
        for path, _, _ in os.walk(self.mount.where):
            with os.scandir(path) as entries:
                for entry in entries:
                    entry.stat(follow_symlinks=False)

    def require_unchanged(self, action):
        """The mount has the attributes of the last check."""
        for path, _, known in self.before.values():
            now = facts(os.path.join(self.mount.where, path))
            changed = {name: (known[name], now[name]) for name in now if now[name] != known[name]}
            if changed:
                raise Wrong(f"{path} after {action}: {changed}")

    def remount(self, action):
        self.mount.remount()
        # The number of the device is that of the mount.
        device = os.lstat(self.mount.where).st_dev
        for _, _, known in self.before.values():
            known["device"] = device
        self.require_unchanged(f"{action} and a remount")

    def check(self, action):
        """Both sides have made the same change."""
        seen = self.seen()
        for inode in seen.keys() & self.before.keys():
            path, copied, mounted = seen[inode]
            _, copied_before, mounted_before = self.before[inode]

            def changed(name):
                return copied[name] != copied_before[name], mounted[name] != mounted_before[name]

            for name in ("mtime", "ctime"):
                expected, found = changed(name)
                if expected != found:
                    raise Wrong(f"{name} of {path} after {action}: changed is {found}, on ext4 "
                                f"{expected}: {mounted_before[name]} {mounted[name]}")
            # A file system need not count links and blocks of directories as ext4 does.
            if changed("nlink") == (False, True):
                raise Wrong(f"nlink of {path} after {action}: {mounted_before} {mounted}")
            for name in ("size", "blocks"):
                if changed(name)[1] and not changed("mtime")[0]:
                    raise Wrong(f"{name} of {path} after {action}: {mounted_before} {mounted}")
            for name in ("inode", "device"):
                if changed(name)[1]:
                    raise Wrong(f"{name} of {path} after {action}")
            for name in ("mode", "owner"):
                if mounted[name] != copied[name]:
                    raise Wrong(f"{name} of {path} after {action}: {mounted[name]}")
        self.before = seen
        self.list_all()
        self.require_unchanged(f"{action} and a listing")


class Side(operations.Side):
    """With whole files."""

    def do_create(self, path):
        write_file(self.at(path), b"new")

    def do_append(self, path):
        with open(self.at(path), "ab", buffering=0) as file:
            file.write(b"more")
            os.fsync(file.fileno())

    def do_read_all(self, path):
        return operations.digest(read_bytes(self.at(path)))


class Changes:
    """Random changes, which both sides make."""

    def __init__(self, sides, seed):
        self.sides, self.random, self.count = sides, random.Random(seed), 0
        self.copy, self.mount = Side(sides.copy.where), Side(sides.mount.where)

    def step(self):
        tick()
        name, arguments = self.propose()
        action = f"{name} {arguments}"
        results = [side.do(name, arguments) for side in (self.copy, self.mount)]
        if results[0] != results[1]:
            raise Wrong(f"{action}: {results}")
        self.sides.check(action)
        choice = self.random.random()
        if choice < 0.1:
            self.sides.remount(action)
        elif choice < 0.3:
            # The kernel forgets what it knows, and asks again.
            drop_caches()
            self.sides.require_unchanged(f"{action} and a new lookup")

    def propose(self):
        """An operation that may change directories, but leaves a few files and directories."""
        pick = self.random.choice
        files, directories = [], []
        for path, info in sorted(self.copy.entries().items()):
            if path != ".":
                (directories if stat.S_ISDIR(info.st_mode) else files).append(path)
        self.count += 1
        new = {"path": os.path.join(pick([".", *directories]), f"n{self.count}")}
        file, directory = {"path": pick(files)}, {"path": pick(directories)}
        some = pick([file, directory, directory])
        user, time = pick([0, 1000]), subjects.EPOCH + self.random.randrange(10**12)
        create, mkdir = ("create", new), ("mkdir", {**new, "mode": 0o777})
        append = ("append", file)
        return pick([
            create, append, append, append, mkdir, ("read_all", file),
            ("unlink", file) if len(files) > 4 else create,
            ("rmdir", directory) if len(directories) > 3 else mkdir,
            ("rename", {**file, "new": pick([new["path"], pick(files)]), "flags": 0}),
            ("rename", {**directory, "new": pick([new["path"], pick(directories)]), "flags": 0}),
            ("rename", {**pick([file, directory]), "new": pick([pick(files), pick(directories)]),
                        "flags": syscalls.RENAME_EXCHANGE}),
            ("link", {**file, "new": new["path"]}),
            ("chmod", {**some, "mode": pick([0o755, 0o700, 0o2775])}),
            ("chown", {**some, "uid": user, "gid": user, "follow": True}),
            ("utimens", {**some, "atime": time, "mtime": time, "follow": True}),
            ("set_xattr", {**some, "name": "user.test", "tag": self.count, "length": 8,
                           "flags": 0})])


class Directories(LowerCase):
    kinds = (*subjects.KINDS, "bcow+pool", subjects.KERNEL)
    plant = staticmethod(plant)

    @promise("The times, the size and the link count of a directory change only if a program "
             "changes the directory, and never by a copy-up.")
    def test_attributes_of_directories_change_as_on_ext4(self):
        for name in self.names:
            for seed in range(SEED, SEED + ROUNDS):
                with (self.subTest(subject=name, seed=seed),
                      subjects.shown("plain", self.lower) as copy,
                      subjects.shown(name, self.lower) as mount):
                    changes = Changes(Sides(copy, mount), seed)
                    try:
                        for _ in range(STEPS):
                            changes.step()
                    except Wrong as error:
                        self.fail(str(error))
                    mount.unmount()
                    mount.check()

    def test_programs_that_compare_attributes_see_no_change(self):
        """tar, find and git compare the attributes of files and directories of two moments."""
        for name in self.names:
            with self.subTest(subject=name), subjects.shown(name, self.lower) as mount:
                for path in ("d/e/f/three", "d/one", "other/four", "d/e/large"):
                    full = os.path.join(mount.where, path)
                    append_to(full, b"more")
                    archive = os.path.join(mount.directory, "a.tar")
                    packed = run("tar", "-C", mount.where, "-cf", archive, ".")
                    self.assertEqual(packed.err, b"", path)
                    found = run("find", mount.where, "-newer", full).out
                    self.assertEqual(found, b"", path)
                    compared = run("tar", "-C", mount.where, "--compare", "-f", archive)
                    self.assertEqual(compared.out + compared.err, b"", path)


class Times(support.Scratch):
    """Times that the file system of the upper cannot store."""

    # 2500, before 1901, and a time with nanoseconds.
    times = (16_725_225_600, -3_000_000_000, 1_000_000_000.123456789)

    def setUp(self):
        support.need("mkfs.ext4", root=True, fuse=True)
        # From an archive: the file system of the host may not have such times either.
        self.archive = os.path.join(self.directory, "times.tar")
        with tarfile.open(self.archive, "w", format=tarfile.PAX_FORMAT) as archive:
            for number, seconds in enumerate(self.times):
                for kind, name in ((tarfile.REGTYPE, "file"), (tarfile.DIRTYPE, "dir"),
                                   (tarfile.SYMTYPE, "link")):
                    member = tarfile.TarInfo(f"{name}{number}")
                    member.type, member.mtime, member.linkname = kind, seconds, "target"
                    archive.addfile(member)

    @promise("A time that the file system of the upper cannot store, such as a year after 2446 on "
             "ext4, is stored in an attribute, and stays.")
    def test_times_that_the_host_cannot_store_stay(self):
        image = os.path.join(self.directory, "times.bcow")
        bcow("convert", f"tar:{self.archive}", image)
        small, host = (os.path.join(self.directory, name) for name in ("small.ext4", "host"))
        os.mkdir(host)
        # Inodes of 128 bytes have 32 bits for the seconds, and no nanoseconds.
        run("mkfs.ext4", "-q", "-I", "128", small, "64M")
        run("mount", "-o", "loop", small, host)
        self.addCleanup(run, "umount", host)
        upper = os.path.join(host, "upper")

        def seen(where):
            return {name: os.lstat(os.path.join(where, name)).st_mtime_ns
                    for name in sorted(os.listdir(where))}

        with support.mounted(image, "--upper", upper) as where:
            before = seen(where)
            self.assertEqual(len(before), 3 * len(self.times))
            for name in before:
                os.lchown(os.path.join(where, name), 7, 7)
            self.assertEqual(seen(where), before)
        bcow("fsck", upper)
        with support.mounted(image, "--upper", upper) as where:
            self.assertEqual(seen(where), before)
        # A layer of the upper has them too.
        layer = os.path.join(self.directory, "layer.bcow")
        bcow("commit", "--upper", upper, image, layer)
        with support.mounted(image, layers=[layer]) as where:
            self.assertEqual(seen(where), before)
