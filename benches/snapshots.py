#!/usr/bin/env python3
"""Measures snapshots, forks and rollbacks while a program writes and fsyncs: of writable mounts of
bcow with both drivers, of btrfs with subvolumes, and of overlayfs, whose upper is copied (on xfs
and btrfs, which are in files on loop devices, by reflinks); and of disks, which `bcow serve` and
qemu-storage-daemon (qcow2) serve.

    benches/snapshots.py --work DIR [--bcow target/release/bcow] [--image IMG] [--rounds 3]
                         [--changed 10,1024] [--subjects fuse,kernel,btrfs,overlayfs]
                         [--hosts ext4,xfs,btrfs] [--parts sizes,disks,depth,row,steps,forks]
                         [--row 100] [--steps 200] [--forks 999]

- sizes: each sample begins with a new mount, and changes --changed MiB in it, in files of 1 MiB.
  "Pause" is the longest time from one fsync of the program to the next. With overlayfs it is that
  of the copy, for which the program would have to be stopped. "Fork" and "rollback" end with the
  first list of the root directory. "Stored" is what the snapshot and the fork together take of the
  file system. With --image, a BCoW file of a root file system, python3 imports numpy in the fork.
- disks: the same with a disk. "Fork" and "rollback" end with the first read from a server.
- depth: random reads of 4 KiB of a served disk of 1 GiB, after more and more snapshots, with 2,000
  writes of 4 KiB all over it after each. "First" is a new server with an empty page cache, "later"
  the same server after 20,000 reads; each with its ratio to the disk without a snapshot.
- row: --row snapshots (of the kernel driver, at most 120) one after the other while the program
  writes. Reads of 4 KiB, past the page cache, and first writes of 4 KiB with fsync, before and
  after.
- steps: a program of --steps steps: it writes five files, reads them, and takes a snapshot in the
  place of the last one, or goes back in every fourth step.
- forks: --forks forks of one instance, each mounted, in one pool, which has at most 1,000 mounts.

Tables have medians. A size from 512 MiB on is measured once. Needs root, and in DIR the space of
six times what is changed. The sizes of 8 GiB take long: `--parts sizes --changed 8192 --hosts ext4
--subjects kernel,overlayfs`.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import subjects
from measure import MIB, Failed, drop_caches, have, machine, process_rss, run, table
from results import shown

FILE = MIB
LARGE = 512
BLOCK = 4096
# Reads and first writes of the part `row`.
PROBES = 2000
# At most 128 files can be below a disk: where the parts `depth` and `row` of the kernel driver end.
MOST_SNAPSHOTS = 120
DISK = 4 << 30
# The part `depth`: the MiB that are written first, numbers of snapshots, writes after each, and
# reads before those that are measured as "later".
DEPTH_MIB = 1024
DEPTHS = [0, 1, 16, MOST_SNAPSHOTS]
SPREAD = 2000
WARM = 20_000


class Writer:
    """A program that writes 4 KiB and makes them durable, again and again."""

    def __init__(self, write):
        self.write, self.times, self.stop = write, [], threading.Event()
        self.thread = threading.Thread(target=self.work)

    def work(self):
        while not self.stop.is_set():
            self.write(len(self.times) % 1000 * BLOCK, os.urandom(BLOCK))
            self.times.append(time.monotonic())

    def __enter__(self):
        self.thread.start()
        time.sleep(0.5)
        return self

    def __exit__(self, *_):
        time.sleep(0.2)
        self.stop.set()
        self.thread.join()

    def pause(self, begin, end):
        """The longest pause in that time."""
        pairs = zip(self.times, self.times[1:])
        return max(after - before for before, after in pairs if after >= begin and before <= end)


@contextlib.contextmanager
def writing(path):
    """A program that writes to a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT)

    def write(at, data):
        os.pwrite(file, data, at)
        os.fsync(file)

    try:
        with Writer(write) as writer:
            yield writer
    finally:
        os.close(file)


def seconds(work):
    begin = time.monotonic()
    work()
    return time.monotonic() - begin


class Bcow:
    """`home` is a directory of the host."""

    def __init__(self, bench, home, driver):
        self.bench, self.home, self.driver = bench, home, driver
        self.title = f"**bcow**, {driver} driver"

    def bcow(self, *arguments):
        return run([self.bench.bcow, *arguments])

    def mount(self, *options):
        self.bcow("mount", self.bench.image, self.home / "mnt", "--upper", self.home / "upper",
                  "--driver", self.driver, *options)

    def snapshot(self, name):
        self.bcow("snapshot", self.home / "mnt", name)

    def fork(self, name, number=2):
        (self.home / f"fork{number}").mkdir()
        self.bcow("fork", f"{self.home}/mnt@{name}", self.home / f"upper{number}", "--mount",
                  self.home / f"fork{number}")

    def roll_back(self, name):
        self.bcow("rollback", self.home / "mnt", name, "--restart")

    def remove(self, name):
        self.bcow("snapshot", "rm", self.home / "mnt", name)

    def unmount(self, name):
        self.bcow("umount", self.home / name)


class Overlayfs:
    """The upper is copied with all attributes."""

    title = "overlayfs, `cp -a`"

    def __init__(self, bench, home, _):
        self.bench, self.home = bench, home

    def overlay(self, number, name):
        for part in ("upper", "scratch"):
            (self.home / f"{part}{number}").mkdir(exist_ok=True)
        options = (f"lowerdir={self.bench.tree()},upperdir={self.home}/upper{number},"
                   f"workdir={self.home}/scratch{number}")
        run(["mount", "-t", "overlay", "overlay", "-o", options, self.home / name])

    def copy(self, source, to):
        run(["cp", "-a", self.home / source, self.home / to])
        run(["sync", "-f", self.home])

    def mount(self):
        self.overlay("", "mnt")

    def snapshot(self, name):
        self.copy("upper", name)

    def fork(self, name):
        (self.home / "fork2").mkdir()
        self.copy(name, "upper2")
        self.overlay("2", "fork2")

    def roll_back(self, name):
        self.unmount("mnt")
        shutil.rmtree(self.home / "upper")
        self.copy(name, "upper")
        self.overlay("", "mnt")

    def remove(self, name):
        shutil.rmtree(self.home / name)

    def unmount(self, name):
        run(["umount", self.home / name])


class Btrfs:
    """Subvolumes, which need no mounts of their own."""

    title = "btrfs, subvolumes"

    def __init__(self, bench, home, _):
        self.bench, self.home = bench, home

    def btrfs(self, *arguments):
        run(["btrfs", "-q", "subvolume", *arguments])

    def mount(self):
        base = self.home.parent / "base"
        if not base.exists():
            self.btrfs("create", base)
            run(["cp", "-a", f"{self.bench.tree()}/.", base])
        os.rmdir(self.home / "mnt")
        self.btrfs("snapshot", base, self.home / "mnt")

    def snapshot(self, name):
        self.btrfs("snapshot", "-r", self.home / "mnt", self.home / name)
        run(["btrfs", "filesystem", "sync", self.home])

    def fork(self, name):
        self.btrfs("snapshot", self.home / name, self.home / "fork2")

    def roll_back(self, name):
        self.unmount("mnt")
        self.btrfs("snapshot", self.home / name, self.home / "mnt")

    def remove(self, name):
        self.btrfs("delete", self.home / name)

    def unmount(self, name):
        self.btrfs("delete", self.home / name)


KINDS = {"fuse": Bcow, "kernel": Bcow, "btrfs": Btrfs, "overlayfs": Overlayfs}


class BcowDisk:
    title = "**bcow**, `bcow serve`"
    suffix = "bcow"

    def __init__(self, bench, home):
        self.bench, self.home = bench, home
        run([bench.bcow, "create", "-s", str(DISK), home / "base.bcow"])
        run([bench.bcow, "create", "-b", home / "base.bcow", home / "vm.bcow"])

    def command(self, disk):
        return [self.bench.bcow, "serve", disk, "--socket", f"{disk}.s"]

    def snapshot(self, _):
        run([self.bench.bcow, "snapshot", self.home / "vm.bcow", "one"])

    def fork(self, new):
        run([self.bench.bcow, "fork", f"{self.home}/vm.bcow@one", new])

    def roll_back(self):
        run([self.bench.bcow, "rollback", self.home / "vm.bcow", "one"])


class QemuDisk:
    title = "qemu-storage-daemon, qcow2"
    suffix = "qcow2"

    def __init__(self, _, home):
        self.home, self.below = home, home / "vm.qcow2"
        run(["qemu-img", "create", "-q", "-f", "qcow2", home / "base.qcow2", str(DISK)])
        self.fork(home / "vm.qcow2", home / "base.qcow2")

    def command(self, disk):
        return ["qemu-storage-daemon", "--blockdev",
                f"driver=qcow2,node-name=disk,file.driver=file,file.filename={disk}",
                "--nbd-server", f"addr.type=unix,addr.path={disk}.s", "--export",
                "type=nbd,id=e,node-name=disk,name=,writable=on", "--chardev",
                f"socket,id=c,path={disk}.m,server=on,wait=off", "--monitor", "chardev=c"]

    def snapshot(self, disk):
        with socket.socket(socket.AF_UNIX) as monitor:
            monitor.connect(f"{disk}.m")
            lines = monitor.makefile("rw")
            lines.readline()
            for command in ({"execute": "qmp_capabilities"},
                            {"execute": "blockdev-snapshot-sync", "arguments": {
                                "node-name": "disk", "snapshot-file": f"{self.home}/top.qcow2",
                                "snapshot-node-name": "top"}}):
                lines.write(json.dumps(command) + "\n")
                lines.flush()
                while "return" not in (answer := json.loads(lines.readline())):
                    if "error" in answer:
                        raise Failed(str(answer))

    def fork(self, new, below=None):
        run(["qemu-img", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", below or self.below,
             new])

    def roll_back(self):
        self.fork(self.home / "new.qcow2")
        (self.home / "new.qcow2").rename(self.home / "top.qcow2")


@contextlib.contextmanager
def serving(disk, command):
    """A client of a new server of the disk."""
    import nbd  # From Debian's python3-libnbd.
    pathlib.Path(f"{disk}.s").unlink(missing_ok=True)
    server = subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL,
                              stdout=subprocess.DEVNULL)
    try:
        client = nbd.NBD()
        while True:
            try:
                client.connect_unix(f"{disk}.s")
                break
            except nbd.Error:
                if server.poll() is not None:
                    raise Failed(f"{command[0]} ended")
                client = nbd.NBD()
                time.sleep(0.001)
        yield client
        client.shutdown()
    finally:
        server.terminate()
        server.wait()


class Bench:
    def __init__(self, options, work):
        self.options, self.work, self.bcow = options, work, options.bcow.resolve()
        self.count, self.failed, self.random = 0, 0, random.Random(1)
        os.environ["BCOW_VIEWS"] = str(work / "views")
        os.environ["BCOW_POOLS"] = str(work / "pools")
        self.image, tree = options.image, work / "tree"
        if self.image:
            self.image = self.image.resolve()
            return
        for directory in range(20):
            (tree / f"d{directory}").mkdir(parents=True)
            for file in range(50):
                (tree / f"d{directory}" / f"f{file}").write_bytes(os.urandom(4000))
        self.image = work / "tree.bcow"
        run([self.bcow, "convert", f"dir:{tree}", self.image])

    def tree(self):
        """The files of the image, for those who need them in a directory."""
        tree = self.work / "tree"
        if not tree.exists():
            run([self.bcow, "extract", self.image, tree])
        return tree

    @contextlib.contextmanager
    def host(self, kind):
        """A directory in a file system of this kind."""
        where = self.work / kind
        where.mkdir()
        if kind == "ext4":
            yield where
            shutil.rmtree(where)
            return
        disk = self.work / f"{kind}.img"
        with open(disk, "wb") as file:
            file.truncate(subjects.DISK)
        run([f"mkfs.{kind}", "-q", disk])
        run(["mount", "-t", kind, "-o", "loop,discard", disk, where])
        try:
            yield where
        finally:
            # With what a failed sample has left.
            subjects.unmount_below(where)
            disk.unlink()
            where.rmdir()

    def home(self, host):
        self.count += 1
        home = host / f"sample{self.count}"
        (home / "mnt").mkdir(parents=True)
        return home

    def attempt(self, what, host, work):
        """The result of `work`, or None with a message."""
        try:
            return work()
        except (Failed, OSError) as error:
            self.failed += 1
            print(f"FAILED: {what}: {error}", flush=True)
            subjects.unmount_below(host / f"sample{self.count}")
            return None

    def chosen(self, host, names=tuple(KINDS)):
        """The subjects on this host, with their names."""
        for name in self.options.subjects:
            if name in names and (name != "btrfs" or host == "btrfs"):
                yield name, KINDS[name]

    def hosts(self, names=None):
        for name in names or self.options.hosts:
            if name != "ext4" and not (have(f"mkfs.{name}") and subjects.kernel_knows(name)):
                print(f"left out: {name}: the machine does not have it")
                continue
            with self.host(name) as host:
                yield name, host

    @staticmethod
    def free(where):
        run(["sync", "-f", where])
        figures = os.statvfs(where)
        return figures.f_bfree * figures.f_frsize

    @staticmethod
    def until_listed(work, where):
        return seconds(lambda: (work(), os.listdir(where)))

    @staticmethod
    def fill(where, count):
        for number in range(count):
            directory = where / f"changed{number // 100}"
            directory.mkdir(exist_ok=True)
            (directory / f"{number}").write_bytes(os.urandom(FILE))
        os.sync()

    def sizes(self):
        for changed in self.options.changed:
            rounds, rows = 1 if changed >= LARGE else self.options.rounds, []
            for name, host in self.hosts():
                for driver, kind in self.chosen(name):
                    samples = self.attempt(f"{driver} on {name}", host, lambda: [
                        self.sample(kind, host, driver, changed) for _ in range(rounds)])
                    if samples:
                        middle = map(statistics.median, zip(*samples))
                        rows.append([kind(self, host, driver).title, name, *map(shown, middle)])
            numpy = ["fork to `import numpy`, ms"] if self.options.image else []
            table(f"### Snapshots, with {changed} MiB changed",
                  ["", "on", "pause, ms", "snapshot, ms", "fork to the first `ls`, ms", *numpy,
                   "rollback to the first `ls`, ms", "stored, MiB"], rows)

    def sample(self, kind, host, driver, changed):
        """The pause, the milliseconds of a snapshot, a fork and a rollback, and MiB."""
        home = self.home(host)
        subject = kind(self, home, driver)
        subject.mount()
        self.fill(home / "mnt", changed)
        free = self.free(host)
        with writing(home / "mnt" / "written") as writer:
            begin = time.monotonic()
            subject.snapshot("one")
            end = time.monotonic()
        pause = end - begin if kind is Overlayfs else writer.pause(begin, end)
        times = [pause, end - begin, self.until_listed(lambda: subject.fork("one"), home / "fork2")]
        if self.options.image:
            times.append(times[-1] + seconds(lambda: run(
                ["chroot", home / "fork2", "/usr/bin/python3", "-c", "import numpy"])))
        stored = free - self.free(host)
        times.append(self.until_listed(lambda: subject.roll_back("one"), home / "mnt"))
        for name in ("fork2", "mnt"):
            subject.unmount(name)
        if kind is Btrfs:
            subject.remove("one")
        shutil.rmtree(home)
        return [*(time * 1e3 for time in times), stored / MIB]

    def disks(self):
        rows, host = [], self.work / "disks"
        kinds = [BcowDisk, *([QemuDisk] if have("qemu-storage-daemon") else [])]
        for changed in self.options.changed:
            if changed * MIB * 2 > DISK:
                continue
            for kind in kinds:
                rounds = 1 if changed >= LARGE else self.options.rounds
                samples = self.attempt(kind.title, host, lambda: [
                    self.disk_sample(kind, host, changed) for _ in range(rounds)])
                if samples:
                    middle = map(statistics.median, zip(*samples))
                    rows.append([kind.title, str(changed), *map(shown, middle)])
        table("### Snapshots of served disks",
              ["", "MiB changed", "pause, ms", "snapshot, ms", "fork to the first read, ms",
               "rollback to the first read, ms", "stored, MiB"], rows)

    def disk_sample(self, kind, host, changed):
        home = self.home(host)
        subject = kind(self, home)
        disk, fork = home / f"vm.{kind.suffix}", home / f"fork.{kind.suffix}"

        def read(of):
            with serving(of, subject.command(of)) as client:
                client.pread(BLOCK, MIB)

        with serving(disk, subject.command(disk)) as client:
            for number in range(changed):
                client.pwrite(os.urandom(MIB), number * MIB)
            client.flush()

            def write(at, data):
                client.pwrite(data, DISK // 2 + at)
                client.flush()

            free = self.free(host)
            with Writer(write) as writer:
                begin = time.monotonic()
                subject.snapshot(disk)
                end = time.monotonic()
        to_fork = seconds(lambda: (subject.fork(fork), read(fork)))
        stored = free - self.free(host)
        top = home / "top.qcow2" if kind is QemuDisk else disk
        back = seconds(lambda: (subject.roll_back(), read(top)))
        shutil.rmtree(home)
        times = writer.pause(begin, end), end - begin, to_fork, back
        return [*(time * 1e3 for time in times), stored / MIB]

    def depth(self):
        rows = self.attempt("reads through snapshots", self.work / "depth", self.depth_rows)
        table("### Random reads of 4 KiB of a served disk, by the number of its snapshots",
              ["snapshots", "first, us", "ratio", "later, us", "ratio"], rows or [])

    def depth_rows(self):
        home = self.home(self.work / "depth")
        subject, disk = BcowDisk(self, home), home / "vm.bcow"
        with serving(disk, subject.command(disk)) as client:
            for number in range(DEPTH_MIB):
                client.pwrite(os.urandom(MIB), number * MIB)
            client.flush()
        rows, taken, alone = [], 0, None
        for count in DEPTHS:
            with serving(disk, subject.command(disk)) as client:
                for number in range(taken, count):
                    run([self.bcow, "snapshot", disk, f"s{number}"])
                    for _ in range(SPREAD):
                        client.pwrite(os.urandom(BLOCK), self.random_block())
                    client.flush()
            taken = count
            drop_caches()
            with serving(disk, subject.command(disk)) as client:
                first = self.read_time(client)
                for _ in range(WARM):
                    client.pread(BLOCK, self.random_block())
                times = [first, self.read_time(client)]
            alone = alone or times
            cells = ((shown(time * 1e6), shown(time / base)) for time, base in zip(times, alone))
            rows.append([str(count), *(cell for pair in cells for cell in pair)])
        shutil.rmtree(home)
        return rows

    def random_block(self):
        return self.random.randrange(DEPTH_MIB * MIB // BLOCK) * BLOCK

    def read_time(self, client):
        """The median of random reads."""
        return statistics.median(seconds(lambda: client.pread(BLOCK, self.random_block()))
                                 for _ in range(PROBES))

    def row(self):
        rows = []
        for name, host in self.hosts(["ext4"]):
            for driver, kind in self.chosen(name, ("fuse", "kernel")):
                count = self.options.row
                if driver == "kernel":
                    count = min(count, MOST_SNAPSHOTS)
                values = self.attempt(f"{driver}, {count} snapshots", host,
                                      lambda: self.row_sample(kind, host, driver, count))
                if values:
                    rows.append([kind(self, host, driver).title, str(count), *map(shown, values)])
        table("### Snapshots one after the other, while a program writes",
              ["", "snapshots", "snapshot, ms", "random read before, us", "after, us",
               "first write before, ms", "after, ms", "memory of the process, MiB"], rows)

    def row_sample(self, kind, host, driver, count):
        home = self.home(host)
        subject = kind(self, home, driver)
        subject.mount()
        self.fill(home / "mnt", 128)
        before = self.probe(home / "mnt")
        times = []
        with writing(home / "mnt" / "written"):
            for number in range(count):
                times.append(seconds(lambda: subject.snapshot(f"s{number}")))
        after = self.probe(home / "mnt")
        listed = subprocess.run([self.bcow, "ps", "--json"], stdout=subprocess.PIPE, check=True)
        services = json.loads(listed.stdout)["services"]
        pid = next(row["pid"] for row in services if row["at"][0] == str(home / "mnt"))
        memory = process_rss(pid)
        subject.unmount("mnt")
        shutil.rmtree(home)
        return (statistics.median(times) * 1e3, before[0] * 1e6, after[0] * 1e6, before[1] * 1e3,
                after[1] * 1e3, memory / MIB)

    def probe(self, where):
        """The medians of a random read of old data and of a first write to a block of it."""
        run(["sync", "-f", where])
        drop_caches()
        files = sorted(where.glob("changed*/*"))
        times = [], []
        for number in range(PROBES):
            file = os.open(self.random.choice(files), os.O_RDWR)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
            at = self.random.randrange(FILE // BLOCK) * BLOCK
            times[0].append(seconds(lambda: os.pread(file, BLOCK, at)))
            if number % 10 == 0:
                times[1].append(seconds(lambda: (os.pwrite(file, bytes(BLOCK), at),
                                                 os.fsync(file))))
            os.close(file)
        return [statistics.median(some) for some in times]

    def steps(self):
        rows = []
        for name, host in self.hosts(["ext4", "btrfs"]):
            for driver, kind in self.chosen(name):
                times = self.attempt(f"{driver} on {name}, steps", host,
                                     lambda: self.step_times(kind, host, driver))
                if times:
                    forth, back = map(statistics.median, times)
                    rows.append([kind(self, host, driver).title, name, shown(forth * 1e3),
                                 shown(back * 1e3)])
        table(f"### A program of {self.options.steps} steps",
              ["", "on", "step with a snapshot, ms", "step with a rollback, ms"], rows)

    def step_times(self, kind, host, driver):
        home = self.home(host)
        subject = kind(self, home, driver)
        subject.mount()
        subject.snapshot("s0")
        last, times, steps = "s0", ([], []), self.options.steps
        for number in range(1, steps + 1):
            begin = time.monotonic()
            for file in range(5):
                path = home / "mnt" / f"file{self.random.randrange(100)}"
                path.write_bytes(os.urandom(20_000))
                path.read_bytes()
            is_failure = number % 4 == 0
            if is_failure:
                subject.roll_back(last)
            else:
                subject.snapshot(f"s{number}")
                subject.remove(last)
                last = f"s{number}"
            times[is_failure].append(time.monotonic() - begin)
        subject.unmount("mnt")
        if kind is Btrfs:
            subject.remove(last)
        shutil.rmtree(home)
        return times

    def forks(self):
        rows = []
        for name, host in self.hosts(["ext4"]):
            for driver, kind in self.chosen(name, ("fuse", "kernel")):
                values = self.attempt(f"{driver}, forks", host,
                                      lambda: self.fork_all(kind, host, driver))
                if values:
                    rows.append([kind(self, host, driver).title, *map(shown, values)])
        table(f"### {self.options.forks} forks of one instance, mounted in one pool",
              ["", "all, s", "memory of the pool, MiB", "stored for each, KiB"], rows)

    def fork_all(self, kind, host, driver):
        home, count = self.home(host), self.options.forks
        subject = kind(self, home, driver)
        run([self.bcow, "pool", "start", "forks"])
        try:
            subject.mount("--pool", "forks")
            self.fill(home / "mnt", 10)
            subject.snapshot("one")
            free = self.free(host)
            wall = seconds(lambda: [subject.fork("one", number) for number in range(2, count + 2)])
            stored = free - self.free(host)
            listed = subprocess.run([self.bcow, "pool", "list", "--json"], stdout=subprocess.PIPE,
                                    check=True)
            memory = process_rss(json.loads(listed.stdout)["pools"][0]["pid"])
        finally:
            run([self.bcow, "pool", "stop", "--force", "forks"])
        shutil.rmtree(home)
        return wall, memory / MIB, stored / count / 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    words = lambda text: text.split(",")
    parser.add_argument("--bcow", type=pathlib.Path, default=pathlib.Path("target/release/bcow"))
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()))
    parser.add_argument("--image", type=pathlib.Path)
    parser.add_argument("--changed", type=lambda text: [int(one) for one in text.split(",")],
                        default=[10, 1024], help="in MiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--subjects", type=words, default=[*KINDS])
    parser.add_argument("--hosts", type=words, default=["ext4", "xfs", "btrfs"])
    parser.add_argument("--parts", type=words,
                        default=["sizes", "disks", "depth", "row", "steps", "forks"])
    parser.add_argument("--row", type=int, default=100)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--forks", type=int, default=999)
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("snapshots.py: needs root (mounts)")
    print(f"{machine()}; {options.rounds} rounds", flush=True)
    work = pathlib.Path(tempfile.mkdtemp(prefix="bcow-bench-", dir=options.work.resolve()))
    try:
        bench = Bench(options, work)
        for part in options.parts:
            getattr(bench, part)()
    finally:
        subjects.unmount_below(work)
        shutil.rmtree(work, ignore_errors=True)
    sys.exit(1 if bench.failed else 0)


main()
