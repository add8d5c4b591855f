"""The kernel driver: bcow mounts a disk, and the file system on it is the kernel's own.

Each disk has a name that no other run has. The cleanup ends every process, mount and loop device of
such a name, also after a failure.
"""

import contextlib
import ctypes
import glob
import json
import mmap
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import tempfile
import time
import unittest

import support
import syscalls
import test_remote
from support import (assert_refused, bcow, is_mounted, need, overwrite, read_bytes, read_text, run,
                     sparse_file, until, write_file)

MEBIBYTE = 1 << 20
# fsx comes from crates.io; a run has this number of operations.
OPERATIONS = int(os.environ.get("BCOW_FSX") or 2000)
# How often a mount's process is killed.
KILLS = int(os.environ.get("BCOW_CRASHES") or 4)
SEED = int(os.environ.get("BCOW_SEED") or 1)
LIBC = ctypes.CDLL(None, use_errno=True)
# No command of these tests takes longer.
SECONDS = 60


def kernel_has(filesystem):
    with open("/proc/filesystems") as table:
        return any(line.split()[-1] == filesystem for line in table)


def backing_files():
    """The loop devices of this machine and the names of the files behind them."""
    found = {}
    for path in glob.glob("/sys/block/loop*/loop/backing_file"):
        with contextlib.suppress(OSError), open(path) as name:
            found["/dev/" + path.split("/")[3]] = name.read().strip()
    return found


def hidden_connections(pid):
    """The numbers of the FUSE connections whose mounts only this process has. The kernel answers
    without a request to the process, which may hang."""
    at_empty_path, dont_sync, wanted = 0x1000, 0x4000, 1
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/{name}") != "/":
                continue
            file = os.open(f"/proc/{pid}/fd/{name}", os.O_PATH)
            try:
                found = ctypes.create_string_buffer(256)
                if LIBC.statx(file, b"", at_empty_path | dont_sync, wanted, found) == 0:
                    major, minor = struct.unpack_from("II", found.raw, 0x88)
                    if major == 0:
                        yield minor
            finally:
                os.close(file)


def serving_threads(pid):
    """The threads that answer requests for the disk of a mount."""
    found = []
    for tid in sorted(map(int, os.listdir(f"/proc/{pid}/task"))):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if read_text(f"/proc/{pid}/task/{tid}/comm").startswith("fuser-"):
                found.append(tid)
    return found


class KernelDriver(unittest.TestCase):
    # Where the directory of a test is.
    top = support.WORK

    def setUp(self):
        need("mkfs.ext4", "e2fsck", "losetup", "umount", root=True, fuse=True)
        self.dir = tempfile.mkdtemp(prefix="driver-", dir=self.top)
        self.tag = f"t{os.getpid()}{random.randrange(1 << 32):08x}"
        self.addCleanup(self.clean_up)

    def clean_up(self):
        self.abort()
        with open("/proc/self/mountinfo") as table:
            places = [line.split()[4] for line in table]
        for place in reversed(places):
            if place.startswith(self.dir + "/"):
                subprocess.run(["umount", "-l", place], timeout=SECONDS, stderr=subprocess.DEVNULL)
        # A process that still serves one of the disks prevents the end of its mount.
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for device in self.loop_devices():
            subprocess.run(["losetup", "-d", device], timeout=SECONDS, stderr=subprocess.DEVNULL)
        shutil.rmtree(self.dir, ignore_errors=True)

    def abort(self, connections=()):
        """Ends the service of all disks of this test, or these connections, at once: each request
        fails, so nothing that waits for one stays blocked, not even for memory."""
        connections = connections or [number for pid in self.processes()
                                      for number in hidden_connections(pid)]
        if not connections:
            return
        control = self.point("fusectl")
        run("mount", "-t", "fusectl", "fusectl", control, timeout=SECONDS)
        for number in connections:
            with contextlib.suppress(OSError):
                write_file(os.path.join(control, str(number), "abort"), "1")
        run("umount", control, timeout=SECONDS)

    def guarded(self, *command, codes=(0,)):
        """Runs a command on a mount, which must end with one of `codes`, and gives its code. If it
        does not end in time, the mount is ended first: a blocked process cannot be killed."""
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        try:
            code = process.wait(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            self.abort()
            process.kill()
            process.wait(timeout=SECONDS)
            self.fail(f"`{' '.join(command)}` did not end within {SECONDS} s")
        self.assertIn(code, codes, command)
        return code

    def loop_devices(self):
        return [device for device, name in backing_files().items() if self.tag in name]

    def services(self):
        listed = json.loads(bcow("ps", "--json", timeout=SECONDS).out)["services"]
        return [one for one in listed if self.tag in one["image"]]

    def processes(self):
        return [one["pid"] for one in self.services() if one["pid"]]

    def path(self, name):
        return os.path.join(self.dir, name)

    def disk_path(self, name):
        return self.path(f"{self.tag}-{name}.bcow")

    def point(self, name="mnt"):
        where = self.path(name)
        os.makedirs(where, exist_ok=True)
        return where

    def make_disk(self, name="disk", mebibytes=256, make=("mkfs.ext4", "-q", "-F"), writable=True):
        raw = self.path(f"{name}.raw")
        sparse_file(raw, mebibytes * MEBIBYTE)
        if make:
            run(*make, raw, timeout=SECONDS)
        disk = self.disk_path(name)
        form = ["--writable"] if writable else []
        bcow("convert", f"raw:{raw}", disk, *form, timeout=SECONDS)
        os.unlink(raw)
        return disk

    def mount(self, disk, where, *options, **more):
        return bcow("mount", disk, where, *options, timeout=SECONDS, **more)

    def umount(self, where, *options, **more):
        return bcow("umount", where, *options, timeout=SECONDS, **more)

    def umount_killed(self, where):
        """Unmounts after the process was killed. The command fails if that was before the kernel
        and the process had ended the mount."""
        ended = self.umount(where, check=False)
        if ended.code:
            assert_refused(self, ended, "is unmounted, but its process had been killed")

    def mounters(self):
        """The processes that mount for those of this test."""
        found = []
        for path in glob.glob("/proc/[0-9]*"):
            with contextlib.suppress(OSError):
                if (read_text(f"{path}/comm") == "bcow-mounter\n"
                        and self.tag in read_text(f"{path}/cmdline")):
                    found.append(path)
        return found

    def end_killed(self, where):
        """Ends what is left of a mount whose process was killed, perhaps while it began: then the
        process that mounts for it may just unmount."""
        until(lambda: not self.mounters(), "the end of the process that mounts")
        if is_mounted(where):
            self.umount_killed(where)

    def assert_ended(self):
        """Fails unless processes and loop devices of the disks of this test end soon."""
        until(lambda: not self.processes() and not self.loop_devices(),
              "the end of the process and of the loop device")

    def end(self, where):
        """Unmounts; the process of the mount ends."""
        self.umount(where)
        self.assert_ended()

    def assert_clean(self, disk):
        """e2fsck and bcow find no error on a disk that nothing uses."""
        self.assertEqual(bcow("fsck", "--data", disk, timeout=SECONDS).code, 0)
        raw = self.path("check.raw")
        bcow("convert", disk, f"raw:{raw}", timeout=SECONDS)
        self.assertEqual(run("e2fsck", "-fn", raw, timeout=SECONDS).code, 0)
        os.unlink(raw)

    def stats(self, where):
        return json.loads(bcow("stats", "--json", where, timeout=SECONDS).out)

    def may_protect_itself(self):
        effective = re.search(r"^CapEff:\s+([0-9a-f]+)$", read_text("/proc/self/status"),
                              re.MULTILINE)
        cap_sys_resource = 24
        return bool(int(effective[1], 16) >> cap_sys_resource & 1)

    @contextlib.contextmanager
    def foreground(self, log, *arguments):
        """A mount in the foreground for the length of a with block."""
        with open(log, "wb") as err:
            process = subprocess.Popen(
                [support.BCOW, "mount", "-f", "--driver", "kernel", *arguments],
                stdin=subprocess.DEVNULL, stderr=err)
        try:
            yield process
        finally:
            process.kill()
            process.wait(timeout=SECONDS)

    def memory_group(self, limit):
        for top, file in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
                          ("/sys/fs/cgroup", "memory.max")):
            group = os.path.join(top, f"bcow-{self.tag}")
            try:
                os.mkdir(group)
            except OSError:
                continue
            self.addCleanup(lambda: until(lambda: self.removed(group), "an empty control group"))
            try:
                write_file(os.path.join(group, file), str(limit))
                return group
            except OSError:
                continue
        support.missing("no control group of memory can be made")

    def kills_of(self, group):
        """How many processes of a control group the kernel has killed because memory was short."""
        for file in ("memory.oom_control", "memory.events"):
            with contextlib.suppress(FileNotFoundError), open(os.path.join(group, file)) as counts:
                return int(dict(line.split() for line in counts)["oom_kill"])

    def removed(self, group):
        try:
            os.rmdir(group)
            return True
        except OSError:
            return False


class Mounts(KernelDriver):
    """What a mount shows, and how it ends."""

    def test_content_is_that_of_the_kernels_own_ext4(self):
        source = os.path.join(support.TOP, "crates", "bcow-nbd")
        base = self.make_disk("base", make=("mkfs.ext4", "-q", "-F", "-d", source), writable=False)
        disk = self.disk_path("over")
        bcow("create", "-b", base, disk)
        where, other = self.point(), self.point("other")
        self.mount(disk, where)
        for name in os.listdir(source):
            run("diff", "-r", os.path.join(source, name), os.path.join(where, name))
        run("cp", "-a", os.path.join(support.TOP, "docs"), where, timeout=SECONDS)
        run("sh", "-c", 'cd "$0" && mknod null c 1 3 && ln Cargo.toml hard && ln -s x soft && '
            "chmod 4755 src && rm -r tests && : > empty && truncate -s 5G sparse && "
            "printf tail | dd of=sparse bs=1 seek=4294967296 conv=notrunc status=none",
            where, timeout=SECONDS)
        statistics = self.stats(where)
        self.assertEqual(statistics["door"]["name"], "kernel")
        self.assertEqual(statistics["disk"]["filesystem"], "ext4")
        self.assertGreater(statistics["operations"][0]["count"], 0)
        [service] = self.services()
        self.assertEqual((service["image"], service["at"], service["mode"], service["state"]),
                         (disk, [where], "rw", "running"))
        self.assertEqual(backing_files()[statistics["disk"]["loop_device"]],
                         f"/bcow:{service['pid']}:{os.path.basename(disk)}")
        run("cp", "-a", where, self.path("copy"), timeout=SECONDS)
        self.end(where)
        self.assert_clean(disk)
        # The kernel, on a loop device without bcow, sees the same tree.
        raw = self.path(f"{self.tag}.raw")
        bcow("convert", disk, f"raw:{raw}", timeout=SECONDS)
        run("mount", "-t", "ext4", "-o", "ro,loop", raw, other, timeout=SECONDS)
        try:
            support.assert_same_tree(self, self.path("copy"), other)
        finally:
            run("umount", other, timeout=SECONDS)

    def test_every_end_of_a_mount_keeps_the_data(self):
        disk, where = self.make_disk(), self.point()
        ends = {
            "bcow umount": lambda: self.umount(where),
            "umount(8)": lambda: run("umount", where, timeout=SECONDS),
            "SIGTERM": lambda: os.kill(self.processes()[0], signal.SIGTERM),
            "lazy": lambda: self.umount(where, "--lazy"),
        }
        for number, (name, end) in enumerate(ends.items()):
            with self.subTest(name):
                # A mount of a disk whose process is still ending waits for it.
                self.mount(disk, where)
                for earlier in range(number):
                    self.assertEqual(read_text(os.path.join(where, f"file-{earlier}")),
                                     f"content {earlier}")
                # Without fsync: the unmount writes it back.
                write_file(os.path.join(where, f"file-{number}"), f"content {number}")
                end()
                until(lambda: not is_mounted(where), "the unmount")
        self.assert_ended()
        self.assert_clean(disk)

    def test_a_mount_that_is_in_use_ends_with_its_last_user(self):
        disk, where = self.make_disk(), self.point()
        self.mount(disk, where)
        [pid] = self.processes()
        with open(os.path.join(where, "file"), "w") as file:
            refused = self.umount(where, check=False)
            assert_refused(self, refused, "is in use")
            os.kill(pid, signal.SIGTERM)
            until(lambda: not is_mounted(where), "the lazy unmount")
            file.write("after the signal")
            file.flush()
            os.fsync(file.fileno())
            self.assertEqual(self.processes(), [pid])
        self.assert_ended()
        self.mount(disk, where)
        self.assertEqual(read_text(os.path.join(where, "file")), "after the signal")
        self.umount(where)
        self.assert_clean(disk)

    def test_a_foreground_mount_logs_and_ends_by_a_signal(self):
        disk, where, log = self.make_disk(), self.point(), self.path("log")
        address = self.path("metrics")
        with self.foreground(log, "--metrics", f"unix:{address}", disk, where) as process:
            until(lambda: is_mounted(where) and self.services(), "the mount")
            write_file(os.path.join(where, "file"), "x")
            run("sync", os.path.join(where, "file"), timeout=SECONDS)
            page = test_remote.metrics(address)
            flushes = re.search(r"^bcow_disk_flushes_total (\d+)$", page, re.MULTILINE)
            self.assertGreater(int(flushes[1]), 0)
            self.assertIn('mode="rw"', page)
            process.send_signal(signal.SIGINT)
            self.assertEqual(process.wait(timeout=SECONDS), 0)
        self.assertIn(f"{disk} is mounted at {where}", read_text(log))
        self.assert_ended()
        self.assert_clean(disk)

    def test_two_disks_are_mounted_at_once_and_one_disk_only_once(self):
        disks = [self.make_disk(name) for name in ("one", "two")]
        places = [self.point(name) for name in ("a", "b")]
        for disk, where in zip(disks, places):
            self.mount(disk, where)
        assert_refused(self, self.mount(disks[0], self.point("c"), check=False),
                       "being written by bcow mount, process")
        third = self.make_disk("three")
        assert_refused(self, self.mount(third, places[0], check=False), "already mounted")
        writers = [subprocess.Popen(["dd", "if=/dev/urandom", f"of={where}/data", "bs=1M",
                                     "count=60", "conv=fsync", "status=none"])
                   for where in places]
        for writer in writers:
            self.assertEqual(writer.wait(timeout=SECONDS), 0)
        digests = [run("sha256sum", f"{where}/data", timeout=SECONDS).out.split()[0]
                   for where in places]
        for where in places:
            self.umount(where)
        for disk, where, digest in zip(disks, places, digests):
            self.mount(disk, where)
            found = run("sha256sum", f"{where}/data", timeout=SECONDS).out.split()[0]
            self.assertEqual(found, digest)
            self.umount(where)
            self.assert_clean(disk)

    def test_disks_over_one_backing_are_mounted_at_once(self):
        """Their file systems have the same UUID. btrfs takes that since Linux 6.7."""
        release = tuple(map(int, re.match(r"(\d+)\.(\d+)", os.uname().release).groups()))
        kinds = [("ext4", ("mkfs.ext4", "-q", "-F"), 64)]
        if kernel_has("xfs") and shutil.which("mkfs.xfs"):
            kinds.append(("xfs", ("mkfs.xfs", "-q"), 320))
        if kernel_has("btrfs") and shutil.which("mkfs.btrfs") and release >= (6, 7):
            kinds.append(("btrfs", ("mkfs.btrfs", "-q"), 128))
        for kind, make, mebibytes in kinds:
            with self.subTest(kind):
                base = self.make_disk(f"{kind}-base", mebibytes, make, writable=False)
                places = {}
                for number in ("1", "2"):
                    disk = self.disk_path(f"{kind}-{number}")
                    bcow("create", "-b", base, disk)
                    places[number] = where = self.point(f"{kind}-{number}")
                    self.mount(disk, where)
                    write_file(os.path.join(where, "file"), number)
                for number, where in places.items():
                    self.assertEqual(read_text(os.path.join(where, "file")), number)
                    self.umount(where)
        self.assert_ended()

    def test_options_of_the_mount_hold(self):
        disk, where = self.make_disk(), self.point()
        self.mount(disk, where, "-o", "ro,noexec,suid,dev,relatime,discard,commit=9")
        with open("/proc/self/mountinfo") as table:
            [options] = [line.split() for line in table if line.split()[4] == where]
        self.assertEqual(set(options[5].split(",")), {"ro", "noexec", "relatime"})
        self.assertIn("discard", options[-1])
        self.assertIn("commit=9", options[-1])
        self.assertRaises(OSError, open, os.path.join(where, "file"), "w")
        self.umount(where)
        bcow("seal", disk)
        self.mount(disk, where)
        self.assertEqual(self.stats(where)["disk"]["is_writable"], False)
        self.end(where)
        assert_refused(self, self.mount(disk, where, "-o", "rw", check=False), "is sealed", code=2)

    def test_what_the_driver_does_not_have_is_refused(self):
        disk, where = self.make_disk(), self.point()
        for options, reason in (
                (("--driver", "kernel", "--fillers", "2", "--upper", self.path("upper")),
                 "--fillers is not supported"),
                (("-o", "fsname=x"), "fsname.* not supported with the kernel driver"),
                (("-o", "commit=0"), "1 to 300"),
                (("--driver", "fuse", "-o", "commit=9"),
                 "commit.* not supported with the FUSE driver"),
                (("--door", "fuse", "-o", "commit=9"),
                 "commit.* not supported with the FUSE driver"),
                (("--driver", "kernel", "--sync", "batch=3"), "commit=SECONDS")):
            refused = self.mount(disk, where, *options, check=False)
            assert_refused(self, refused, reason, code=2)
        zeros = self.make_disk("zeros", make=None)
        refused = self.mount(zeros, where, "--driver", "kernel", check=False)
        assert_refused(self, refused, "holds only zeros at its start, not ext4")
        parted = self.make_disk("parted", make=(
            "sh", "-c", r"printf '\125\252' | dd of=$0 bs=1 seek=510 conv=notrunc status=none"))
        refused = self.mount(parted, where, "--driver", "kernel", check=False)
        assert_refused(self, refused, "partition table")
        # The kernel refuses what has only the magic number of an ext4.
        broken = self.make_disk("broken", make=(
            "sh", "-c", r"printf '\123\357' | dd of=$0 bs=1 seek=1080 conv=notrunc status=none"))
        refused = self.mount(broken, where, check=False)
        assert_refused(self, refused, "cannot mount its ext4")
        self.assert_ended()
        self.assertFalse(os.path.exists(self.path("upper")))

    def test_small_blocks_and_other_file_systems(self):
        kinds = [("ext4", ("mkfs.ext4", "-q", "-F", "-b", "1024"), 64)]
        for kind, make, mebibytes in (("xfs", ("mkfs.xfs", "-q"), 320),
                                      ("btrfs", ("mkfs.btrfs", "-q"), 128)):
            if kernel_has(kind) and shutil.which(make[0]):
                kinds.append((kind, make, mebibytes))
        where = self.point()
        for kind, make, mebibytes in kinds:
            with self.subTest(kind):
                disk = self.make_disk(kind, mebibytes, make)
                self.mount(disk, where)
                self.assertEqual(self.stats(where)["disk"]["filesystem"], kind)
                write_file(os.path.join(where, "file"), kind)
                self.umount(where)
                self.mount(disk, where, "-o", "ro")
                self.assertEqual(read_text(os.path.join(where, "file")), kind)
                self.umount(where)
        self.assert_ended()

    def test_direct_io_has_the_alignment_of_a_hard_disk(self):
        """Also of parts of blocks that the disk has not stored, or that it has discarded."""
        kinds = [("ext4", ("mkfs.ext4", "-q", "-F"), 64)]
        for kind, make, mebibytes in (
                ("xfs", ("mkfs.xfs", "-q"), 320),
                ("xfs-4k", ("mkfs.xfs", "-q", "-s", "size=4096"), 320)):
            if kernel_has("xfs") and shutil.which(make[0]):
                kinds.append((kind, make, mebibytes))
        for kind, make, mebibytes in kinds:
            with self.subTest(kind):
                base, disk = self.make_disk(f"{kind}-base", mebibytes, make, writable=False), \
                    self.disk_path(kind)
                bcow("create", "-b", base, disk)
                where = self.point(kind)
                self.mount(disk, where, "-o", "discard")
                file = os.path.join(where, "file")
                model = bytearray(random.Random(SEED).randbytes(MEBIBYTE))
                write_file(file, bytes(model))
                # The base has it then.
                self.umount(where)
                sealed = self.disk_path(f"{kind}-sealed")
                bcow("commit", disk, sealed)
                over = self.disk_path(f"{kind}-over")
                bcow("create", "-b", sealed, over)
                self.mount(over, where, "-o", "discard")
                self.write_sectors(file, model)
                self.assertEqual(read_bytes(file), model)
                self.umount(where)
                self.mount(over, where, "-o", "ro")
                self.assertEqual(read_bytes(file), model)
                self.umount(where)
                self.assertEqual(bcow("fsck", "--data", over).code, 0)
        self.assert_ended()

    def write_sectors(self, file, model):
        """Writes runs of sectors, and holes, directly to a file, and reads some. `model` is its
        content."""
        sector, dice = 512, random.Random(SEED)
        fd = os.open(file, os.O_RDWR | os.O_DIRECT)
        # A mapping is aligned to a page, so a part of it to a sector.
        memory = mmap.mmap(-1, 64 * sector)
        try:
            for step in range(200):
                sectors = dice.randrange(1, 20)
                at = dice.randrange(len(model) // sector - sectors) * sector
                part = memoryview(memory)[sector * (step % 8):][:sectors * sector]
                if step % 10 == 9:
                    mode = syscalls.PUNCH_HOLE | syscalls.KEEP_SIZE
                    syscalls.fallocate(fd, mode, at, len(part))
                    model[at:at + len(part)] = bytes(len(part))
                elif step % 5 == 4:
                    self.assertEqual(os.preadv(fd, [part], at), len(part))
                    self.assertEqual(part, model[at:at + len(part)])
                else:
                    part[:] = dice.randbytes(len(part))
                    self.assertEqual(os.pwritev(fd, [part], at), len(part))
                    model[at:at + len(part)] = part
        finally:
            os.close(fd)

    def test_a_static_dev_without_the_node_of_the_free_device_suffices(self):
        need("unshare", "mknod")
        disk, where = self.make_disk(), self.point()
        last = max(int(path[len("/sys/block/loop"):]) for path in glob.glob("/sys/block/loop*"))
        control = os.stat("/dev/loop-control").st_rdev
        script = f"""
            set -e
            mount -t tmpfs none /dev
            mknod /dev/null c 1 3; mknod /dev/fuse c 10 229
            mknod /dev/loop-control c {os.major(control)} {os.minor(control)}
            mknod /dev/loop{last} b 7 {last}; mknod /dev/loop{last - 1} b 7 {last - 1}
            "$0" mount "$1" "$2"
            echo here > "$2/file"
            "$0" umount "$2"
        """
        run("unshare", "-m", "sh", "-c", script, support.BCOW, disk, where, timeout=SECONDS)
        self.assert_ended()
        self.assert_clean(disk)


class Failures(KernelDriver):
    """Killed processes. test_kernel_upper.py has full disks, and too little memory."""

    def assert_has(self, where, expected):
        for name, content in expected.items():
            self.assertTrue(read_bytes(os.path.join(where, name)) == content, name)

    def test_synced_data_outlives_a_killed_process(self):
        disk, where = self.make_disk(), self.point()
        rng, expected = random.Random(SEED), {}
        for kill in range(KILLS):
            # A mount whose process is dead is replaced.
            self.mount(disk, where)
            self.assert_has(where, expected)
            [pid] = self.processes()
            churn = subprocess.Popen(
                ["sh", "-c", 'cd "$0" && while cp -r /usr/share/doc/bash churn && rm -r churn; '
                 "do :; done", where], stderr=subprocess.DEVNULL)
            try:
                for number in range(10):
                    name = f"file-{kill}-{number}"
                    content = rng.randbytes(rng.randrange(1, 300_000))
                    write_file(os.path.join(where, name), content)
                    run("sync", os.path.join(where, name), timeout=SECONDS)
                    expected[name] = content
                os.kill(pid, signal.SIGKILL)
                until(lambda: churn.poll() is not None, "an error of the mount")
            finally:
                churn.kill()
                churn.wait(timeout=SECONDS)
            until(lambda: not self.processes(), "the end of the killed process")
        listed = json.loads(bcow("ps", "--json", timeout=SECONDS).out)["services"]
        [dead] = [one for one in listed if one["at"] == [where]]
        self.assertEqual(dead["state"], "dead")
        refused = bcow("stats", where, check=False, timeout=SECONDS)
        assert_refused(self, refused, "process of the mount is dead")
        self.umount_killed(where)
        self.assert_ended()
        # The journal is replayed by the next mount.
        self.mount(disk, where)
        self.assert_has(where, expected)
        self.umount(where)
        self.assert_clean(disk)

    def test_a_process_killed_while_it_mounts_or_unmounts_leaves_nothing(self):
        disk, where = self.make_disk(), self.point()
        rng = random.Random(SEED)
        for kill in range(3 * KILLS):
            process = subprocess.Popen([support.BCOW, "mount", "-f", disk, where],
                                       stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                if kill % 2:
                    until(lambda: is_mounted(where) or process.poll() is not None, "the mount",
                          SECONDS)
                    run("dd", "if=/dev/urandom", f"of={where}/data", "bs=1M", "count=20",
                        check=False, timeout=SECONDS)
                    process.terminate()
                time.sleep(rng.random() * 0.06)
            finally:
                process.kill()
                process.wait(timeout=SECONDS)
            self.end_killed(where)
        self.assert_ended()
        self.mount(disk, where)
        self.umount(where)
        self.assert_clean(disk)

    def test_a_process_killed_while_it_waits_for_its_own_threads_ends(self):
        """The kernel locks a loop device while it attaches a file to it. It must not wait there
        for a dead process."""
        disk, where = self.make_disk(), self.point()
        rng = random.Random(SEED)
        for _ in range(5 * KILLS):
            process = subprocess.Popen([support.BCOW, "mount", "-f", disk, where],
                                       stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            # Without pauses: all steps of the mount together take some milliseconds.
            while not serving_threads(process.pid) and process.poll() is None:
                pass
            time.sleep(rng.choice((0, rng.random() * 0.002)))
            with syscalls.stopped_threads(serving_threads(process.pid)):
                # The mounting thread gets to its next request.
                time.sleep(0.02)
                connections = list(hidden_connections(process.pid))
                process.kill()
            self.assert_ends(process, connections)
            self.end_killed(where)
        self.assert_ended()

    def assert_ends(self, process, connections):
        try:
            process.wait(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            self.abort(connections)
            process.wait(timeout=SECONDS)
            self.fail("the killed process did not end")

    def test_without_barriers_a_clean_end_keeps_the_data(self):
        disk, where = self.make_disk(), self.point()
        self.mount(disk, where, "--sync", "volatile")
        write_file(os.path.join(where, "file"), "volatile")
        run("sync", os.path.join(where, "file"), timeout=SECONDS)
        statistics = self.stats(where)
        self.assertEqual(statistics["disk"]["sync"], "volatile")
        self.assertEqual(statistics["disk"]["flushes"], 0)
        self.umount(where)
        self.mount(disk, where)
        self.assertEqual(read_text(os.path.join(where, "file")), "volatile")
        self.umount(where)
        self.assert_clean(disk)


class Images(KernelDriver):
    """Images with the kernel driver, read-only."""

    def setUp(self):
        super().setUp()
        self.source = os.path.join(support.TOP, "crates", "bcow-nbd")

    def test_an_image_shows_the_same_tree_at_both_drivers(self):
        where, other = self.point(), self.point("other")
        # The kernel reads a plain image by itself unless it shall be verified.
        for name, options, checks in (("compressed", (), ()),
                                      ("plain", ("--plain",), ("--verify", "checksums"))):
            with self.subTest(name):
                image = self.disk_path(name)
                bcow("convert", f"dir:{self.source}", image, *options, timeout=SECONDS)
                # The kernel mounts an image only on request.
                self.mount(image, other)
                self.assertEqual(self.stats(other)["door"]["name"], "fuse")
                self.mount(image, where, "--driver", "kernel", *checks)
                statistics = self.stats(where)
                self.assertEqual(statistics["door"]["name"], "kernel")
                self.assertEqual(statistics["disk"]["filesystem"], "erofs")
                self.assertEqual([one["mode"] for one in self.services()], ["ro", "ro"])
                support.assert_same_tree(self, other, where)
                run("diff", "-r", self.source, where, timeout=SECONDS)
                self.assertRaises(OSError, open, os.path.join(where, "new"), "w")
                self.umount(where)
                self.umount(other)
                self.assert_ended()

    def test_layers_in_a_layout_are_mounted_as_one_file_system(self):
        tar, layout, where = self.path("a.tar"), self.path("layout"), self.point()
        run("tar", "-C", self.source, "-cf", tar, ".", timeout=SECONDS)
        bcow("convert", f"tar:{tar}", f"oci:{layout}:{self.tag}", timeout=SECONDS)
        self.mount(f"oci:{layout}:{self.tag}", where, "--driver", "kernel")
        run("diff", "-r", self.source, where, timeout=SECONDS)
        self.end(where)

    def test_damaged_metadata_never_reaches_the_kernel(self):
        image, raw, where = self.disk_path("image"), self.path("raw"), self.point()
        bcow("convert", f"dir:{self.source}", image, timeout=SECONDS)
        bcow("export", image, "--to", "erofs", "-o", raw, timeout=SECONDS)
        # A name behind the block that the superblock's checksum covers loses its place.
        overwrite(raw, read_bytes(raw).index(b"hostile.rs", 4096), b"z")
        disk = self.disk_path("disk")
        bcow("convert", f"raw:{raw}", disk, timeout=SECONDS)
        refused = self.mount(disk, where, "--driver", "kernel", check=False)
        assert_refused(self, refused, "its file system is damaged")
        self.assert_ended()
        upper = self.mount(image, where, "--driver", "kernel", "-o", "rw", check=False)
        assert_refused(self, upper, "is sealed", code=2)


class PlainImages(KernelDriver):
    """Plain images, which the kernel reads without a process of bcow."""

    # All directories above it are root's: another user could replace a file elsewhere.
    top = "/var/tmp"

    def setUp(self):
        super().setUp()
        self.source = os.path.join(support.TOP, "crates", "bcow-nbd")
        self.where = self.point()

    def plain(self, name="plain"):
        image = self.disk_path(name)
        bcow("convert", "--plain", f"dir:{self.source}", image, timeout=SECONDS)
        return image

    def mount_directly(self, image, *options):
        self.mount(image, self.where, "--driver", "kernel", *options)
        self.assert_direct()

    def assert_direct(self):
        """Fails unless the kernel serves the mount by itself."""
        statistics = self.stats(self.where)
        self.assertEqual((statistics["process"], statistics["door"]["name"]), (None, "kernel"))
        listed = json.loads(bcow("ps", "--json", timeout=SECONDS).out)["services"]
        [mount] = [one for one in listed if one["at"] == [self.where]]
        self.assertEqual((mount["pid"], mount["state"], mount["mode"], mount["image"]),
                         (None, "kernel", "ro", statistics["image"]["file"]))
        # The process that has mounted ends soon after it has reported success.
        until(lambda: not any(self.commands()), "the end of the process that mounts")

    def commands(self):
        """The command lines of processes that name the mount."""
        for path in glob.glob("/proc/[0-9]*/cmdline"):
            with contextlib.suppress(OSError), open(path, "rb") as file:
                line = file.read()
                if os.fsencode(self.where) in line:
                    yield line

    def assert_ended(self):
        super().assert_ended()
        self.assertFalse(is_mounted(self.where))

    def test_the_tree_is_that_of_umoci_for_an_image_and_for_a_stack(self):
        need("umoci", "fsck.erofs")
        source = "oci:" + ":".join(support.image("small"))
        _, reference = support.unpacked("small")
        image, layout = self.disk_path("small"), self.path("layout")
        bcow("convert", "--plain", source, image, timeout=SECONDS)
        run("fsck.erofs", image, timeout=SECONDS)
        bcow("convert", "--plain", source, f"oci:{layout}:{self.tag}", timeout=SECONDS)
        for name in (image, f"oci:{layout}:{self.tag}"):
            with self.subTest(name):
                self.mount_directly(name, "-o", "suid,dev")
                support.assert_same_tree(self, reference, self.where)
                self.umount(self.where)
        self.assert_ended()

    def test_a_file_that_the_kernel_cannot_mount_gets_a_loop_device(self):
        # EROFS reads files of tmpfs only through a device, so far.
        small = self.point("small")
        run("mount", "-t", "tmpfs", "-o", "size=64M", f"tmpfs-{self.tag}", small, timeout=SECONDS)
        layout = f"oci:{small}/{self.tag}:tag"
        tar = self.path("a.tar")
        run("tar", "-C", self.source, "-cf", tar, ".", timeout=SECONDS)
        bcow("convert", "--plain", f"tar:{tar}", layout, timeout=SECONDS)
        image = os.path.join(small, f"{self.tag}.bcow")
        shutil.move(self.plain(), image)
        for name in (image, layout):
            with self.subTest(name):
                self.mount_directly(name)
                run("diff", "-r", self.source, self.where, timeout=SECONDS)
                run("umount", self.where, timeout=SECONDS)
                self.assert_ended()

    def test_the_mount_outlives_the_name_of_its_file(self):
        # A read-only medium, too.
        medium = self.point("medium")
        image, kept = self.plain(), self.path("kept")
        shutil.copyfile(image, kept)
        run("mount", "--bind", self.dir, medium, timeout=SECONDS)
        run("mount", "-o", "remount,bind,ro", medium, timeout=SECONDS)
        self.mount_directly(os.path.join(medium, os.path.basename(image)))
        self.umount(self.where)
        self.mount_directly(image)
        changed = self.path("changed")
        os.mkdir(changed)
        bcow("convert", "--plain", f"dir:{changed}", self.path("other"), timeout=SECONDS)
        os.rename(self.path("other"), image)
        for _ in range(2):
            run("diff", "-r", self.source, self.where, timeout=SECONDS)
            refused = self.mount(kept, self.where, "--driver", "kernel", check=False)
            assert_refused(self, refused, "already mounted")
            self.assert_direct()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(image)
        with open(os.path.join(self.where, "Cargo.toml")) as file:
            assert_refused(self, self.umount(self.where, check=False), "is in use")
            self.umount(self.where, "--lazy")
            self.assertIn("bcow-nbd", file.read())
        self.assert_ended()

    def test_what_needs_a_process_gets_one(self):
        image, foreign = self.plain(), self.plain("foreign")
        os.chown(foreign, support.UNPRIVILEGED, support.UNPRIVILEGED)
        shared = self.path("shared")
        os.mkdir(shared)
        os.chmod(shared, 0o777)
        inside = shutil.copy(image, shared)
        root = json.loads(bcow("inspect", "--json", image).out)["merkle"]["root"]
        for name, options, reason in (
                (image, ("--verify", "merkle"), "--verify"),
                (image, ("--root-hash", root), "--root-hash"),
                (image, ("--metrics", f"unix:{self.path('metrics')}"), "--metrics"),
                (foreign, (), f"{foreign}, which another user can change"),
                (inside, (), f"{inside}, which another user can change")):
            with self.subTest(reason):
                self.mount(name, self.where, "--driver", "kernel", *options)
                statistics = self.stats(self.where)
                self.assertEqual(statistics["door"]["name"], "kernel")
                self.assertIn(reason, statistics["door"]["reason"])
                self.assertEqual([statistics["process"]["pid"]], self.processes())
                run("diff", "-r", self.source, self.where, timeout=SECONDS)
                self.umount(self.where)
        self.assert_ended()

    def test_options_hold_and_others_are_refused(self):
        image = self.plain()
        for option, reason in (("rw", "is sealed"), ("commit=9", "only ext4 and btrfs"),
                               ("fsname=x", "not supported with the kernel driver")):
            refused = self.mount(image, self.where, "--driver", "kernel", "-o", option, check=False)
            assert_refused(self, refused, reason, code=2)
        with self.foreground(self.path("log"), image, self.where) as process:
            until(lambda: is_mounted(self.where) and self.processes(), "the mount")
            process.send_signal(signal.SIGTERM)
            self.assertEqual(process.wait(timeout=SECONDS), 0)
        helper = self.path("mount.bcow")
        os.symlink(support.BCOW, helper)
        options = "rw,driver=kernel,nodev,noexec,relatime"
        run(helper, image, self.where, "-o", options, timeout=SECONDS)
        self.assert_direct()
        with open("/proc/self/mountinfo") as table:
            [line] = [line.split() for line in table if line.split()[4] == self.where]
        self.assertEqual(set(line[5].split(",")), {"ro", "nodev", "noexec", "relatime"})
        assert_refused(self, bcow("resize", self.where, "9G", check=False), "never changes")
        run("umount", self.where, timeout=SECONDS)
        os.chmod(self.dir, 0o755)
        os.chown(self.where, support.UNPRIVILEGED, support.UNPRIVILEGED)
        refused = bcow("mount", "--driver", "kernel", support.for_everyone(image),
                       support.for_everyone(self.where), user=support.UNPRIVILEGED, check=False,
                       timeout=SECONDS)
        assert_refused(self, refused, "only root can mount")
        self.assert_ended()

    def test_damaged_metadata_never_reaches_the_kernel(self):
        image = self.plain()
        overwrite(image, read_bytes(image).index(b"hostile.rs"), b"z")
        refused = self.mount(image, self.where, "--driver", "kernel", check=False)
        assert_refused(self, refused, "damaged|checksum")
        self.assert_ended()


class Work(KernelDriver):
    """Programs on the mount."""

    def test_discarded_space_returns_to_the_host(self):
        disk, where = self.make_disk(), self.point()
        self.mount(disk, where)
        data = os.path.join(where, "data")
        run("dd", "if=/dev/urandom", f"of={data}", "bs=1M", "count=100", "conv=fsync",
            timeout=SECONDS)
        stored = os.stat(disk).st_blocks * 512
        self.assertGreater(stored, 100 * MEBIBYTE)
        os.unlink(data)
        # ext4 trims only what its journal has freed.
        run("sync", "-f", where, timeout=SECONDS)
        run("fstrim", where, timeout=SECONDS)
        until(lambda: os.stat(disk).st_blocks * 512 < stored - 80 * MEBIBYTE, "a smaller file",
              SECONDS)
        self.umount(where)
        self.assert_clean(disk)

    def test_fsx_finds_no_error(self):
        need("fsx")
        base = self.make_disk("base", 128, writable=False)
        disk, where = self.disk_path("over"), self.point()
        bcow("create", "-b", base, disk)
        self.mount(disk, where, "-o", "discard")
        for seed, config in ((SEED, ""), (SEED + 1, "[opsize]\nmax = 9999\nalign = 1\n")):
            write_file(self.path("fsx.toml"), "flen = 4194304\n" + config)
            run("fsx", "-q", "-N", str(OPERATIONS), "-S", str(seed), "-f", self.path("fsx.toml"),
                "-P", self.dir, os.path.join(where, f"x{seed}"), timeout=SECONDS)
        self.umount(where)
        self.assert_clean(disk)
