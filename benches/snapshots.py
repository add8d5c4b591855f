#!/usr/bin/env python3
"""Measures snapshots, forks and rollbacks of writable mounts, while a program writes and fsyncs:
bcow with both drivers, and overlayfs, whose upper is copied. On xfs and btrfs, which are in files
on loop devices, copies are reflinks.

    benches/snapshots.py --work DIR [--bcow target/release/bcow] [--changed 10,1024] [--rounds 3]
                         [--subjects fuse,kernel,overlayfs] [--hosts ext4,xfs,btrfs]

Each sample begins with a new mount, and changes --changed MiB in it, in files of 1 MiB. "Pause" is
the longest time from one fsync of the program to the next. With overlayfs it is that of the copy,
for which the program would have to be stopped. "Fork" and "rollback" end with the first list of the
root directory. "Stored" is what the snapshot and the fork together take of the file system. Tables
have medians. Needs root, and in DIR, on ext4, the space of six times what is changed.
"""

import argparse
import contextlib
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import threading
import time

import subjects
from measure import MIB, Failed, have, machine, run, table
from results import shown

FILE = MIB


class Writer:
    """A program that writes 4 KiB and makes them durable, again and again."""

    def __init__(self, path):
        self.path, self.times, self.stop = path, [], threading.Event()
        self.thread = threading.Thread(target=self.write)

    def write(self):
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT)
        while not self.stop.is_set():
            os.pwrite(file, os.urandom(4096), len(self.times) % 1000 * 4096)
            os.fsync(file)
            self.times.append(time.monotonic())
        os.close(file)

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


class Bcow:
    """`home` is a directory of the host."""

    def __init__(self, bench, home, driver):
        self.bench, self.home, self.driver = bench, home, driver
        self.title = f"**bcow**, {driver} driver"

    def bcow(self, *arguments):
        return run([self.bench.bcow, *arguments])

    def mount(self):
        self.bcow("mount", self.bench.image, self.home / "mnt", "--upper", self.home / "upper",
                  "--driver", self.driver)

    def snapshot(self):
        return self.bcow("snapshot", self.home / "mnt", "one").wall

    def fork(self):
        self.bcow("fork", f"{self.home}/mnt@one", self.home / "upper2", "--mount",
                  self.home / "fork")

    def roll_back(self):
        self.bcow("rollback", self.home / "mnt", "one", "--restart")

    def unmount(self, name):
        self.bcow("umount", self.home / name)


class Overlayfs:
    """The upper is copied with all attributes."""

    title = "overlayfs, `cp -a`"

    def __init__(self, bench, home, _driver):
        self.bench, self.home = bench, home

    def overlay(self, number, name):
        for part in ("upper", "scratch"):
            (self.home / f"{part}{number}").mkdir(exist_ok=True)
        options = (f"lowerdir={self.bench.tree},upperdir={self.home}/upper{number},"
                   f"workdir={self.home}/scratch{number}")
        run(["mount", "-t", "overlay", "overlay", "-o", options, self.home / name])

    def copy(self, source, to):
        run(["cp", "-a", self.home / source, self.home / to])
        run(["sync", "-f", self.home])

    def mount(self):
        self.overlay("", "mnt")

    def snapshot(self):
        begin = time.monotonic()
        self.copy("upper", "one")
        return time.monotonic() - begin

    def fork(self):
        self.copy("one", "upper2")
        self.overlay("2", "fork")

    def roll_back(self):
        self.unmount("mnt")
        shutil.rmtree(self.home / "upper")
        self.copy("one", "upper")
        self.overlay("", "mnt")

    def unmount(self, name):
        run(["umount", self.home / name])


class Bench:
    def __init__(self, options, work):
        self.options, self.work, self.bcow = options, work, options.bcow.resolve()
        self.count = 0
        self.tree, self.image = work / "tree", work / "tree.bcow"
        for directory in range(20):
            (self.tree / f"d{directory}").mkdir(parents=True)
            for file in range(50):
                (self.tree / f"d{directory}" / f"f{file}").write_bytes(os.urandom(4000))
        run([self.bcow, "convert", f"dir:{self.tree}", self.image])
        os.environ["BCOW_VIEWS"] = str(work / "views")

    @contextlib.contextmanager
    def host(self, kind):
        """A directory in a file system of this kind."""
        where = self.work / kind
        where.mkdir()
        if kind == "ext4":
            yield where
            return
        disk = self.work / f"{kind}.img"
        with open(disk, "wb") as file:
            file.truncate(subjects.DISK)
        run([f"mkfs.{kind}", "-q", disk])
        run(["mount", "-t", kind, "-o", "loop,discard", disk, where])
        try:
            yield where
        finally:
            run(["umount", where])
            disk.unlink()

    def sample(self, kind, host, driver, changed):
        """The pause, the seconds of a snapshot, a fork and a rollback, and MiB."""
        self.count += 1
        home = host / f"sample{self.count}"
        for name in ("mnt", "fork"):
            (home / name).mkdir(parents=True)
        subject = kind(self, home, driver)
        subject.mount()
        for number in range(changed):
            directory = home / "mnt" / f"changed{number // 100}"
            directory.mkdir(exist_ok=True)
            (directory / f"{number}").write_bytes(os.urandom(FILE))
        os.sync()
        free = self.free(host)
        with Writer(home / "mnt" / "written") as writer:
            begin = time.monotonic()
            snapshot = subject.snapshot()
            end = time.monotonic()
        pause = snapshot if kind is Overlayfs else writer.pause(begin, end)
        fork = self.until_listed(subject.fork, home / "fork")
        stored = free - self.free(host)
        back = self.until_listed(subject.roll_back, home / "mnt")
        subject.unmount("fork")
        subject.unmount("mnt")
        shutil.rmtree(home)
        return pause * 1e3, snapshot * 1e3, fork * 1e3, back * 1e3, stored / MIB

    @staticmethod
    def until_listed(make, where):
        begin = time.monotonic()
        make()
        os.listdir(where)
        return time.monotonic() - begin

    @staticmethod
    def free(where):
        run(["sync", "-f", where])
        figures = os.statvfs(where)
        return figures.f_bfree * figures.f_frsize

    def run(self):
        failed = 0
        kinds = {"fuse": Bcow, "kernel": Bcow, "overlayfs": Overlayfs}
        for changed in self.options.changed:
            rows = []
            for name in self.options.hosts:
                if name != "ext4" and not (have(f"mkfs.{name}") and subjects.kernel_knows(name)):
                    print(f"left out: {name}: the machine does not have it")
                    continue
                with self.host(name) as host:
                    for subject in self.options.subjects:
                        try:
                            samples = [self.sample(kinds[subject], host, subject, changed)
                                       for _ in range(self.options.rounds)]
                        except (Failed, OSError) as error:
                            failed += 1
                            print(f"FAILED: {subject} on {name}: {error}", flush=True)
                            subjects.unmount_below(host / f"sample{self.count}")
                            continue
                        title = kinds[subject](self, host, subject).title
                        middle = map(statistics.median, zip(*samples))
                        rows.append([title, name, *map(shown, middle)])
                shutil.rmtree(self.work / name)
            table(f"### Snapshots, with {changed} MiB changed",
                  ["", "on", "pause, ms", "snapshot, ms", "fork to the first `ls`, ms",
                   "rollback to the first `ls`, ms", "stored, MiB"], rows)
        return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    words = lambda text: text.split(",")
    parser.add_argument("--bcow", type=pathlib.Path, default=pathlib.Path("target/release/bcow"))
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()))
    parser.add_argument("--changed", type=lambda text: [int(one) for one in text.split(",")],
                        default=[10, 1024], help="in MiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--subjects", type=words, default=["fuse", "kernel", "overlayfs"])
    parser.add_argument("--hosts", type=words, default=["ext4", "xfs", "btrfs"])
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("snapshots.py: needs root (mounts)")
    print(f"{machine()}; {options.rounds} rounds", flush=True)
    work = pathlib.Path(tempfile.mkdtemp(prefix="bcow-bench-", dir=options.work.resolve()))
    try:
        failed = Bench(options, work).run()
    finally:
        subjects.unmount_below(work)
        shutil.rmtree(work, ignore_errors=True)
    sys.exit(1 if failed else 0)


main()
