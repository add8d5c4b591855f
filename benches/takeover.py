#!/usr/bin/env python3
"""Measures what it costs that another process can take over a mount with an upper.

    benches/takeover.py [--bcow target/release/bcow] [--work DIR] [--rounds 5] [--nodes 50000]

Requests: the same changes in a mount with a process of its own and in a pool, which keeps a ledger.
Pause: the time until a request is answered after the process of the pool was killed, when the
kernel holds few inodes, --nodes of them, and as many that are in the upper. Disks: the same two
with the kernel driver, where the ledger has the blocks that no flush has recorded. Restarts: the
longest time between two fsync of a program when `bcow pool restart` replaces the process, with both
drivers.
Needs root.
"""

import argparse
import json
import mmap
import os
import pathlib
import random
import shutil
import signal
import statistics
import subprocess
import tempfile
import threading
import time

from measure import MIB, machine, table

FILES = 3000
WRITES = 8000
SYNCHRONIZED = 500
LARGE_BYTES = 100_000_000
BLOCK_BYTES = 4096
# A process that ends sooner makes the supervisor pause before it starts the next one.
SETTLED_SECONDS = 11


class Bench:
    def __init__(self, options, directory):
        self.bcow, self.directory = str(options.bcow.resolve()), directory
        self.env = {**os.environ, "BCOW_POOLS": str(directory / "pools")}
        self.where, self.upper = directory / "mnt", directory / "upper"
        self.where.mkdir()

    def run(self, *arguments):
        return subprocess.run([self.bcow, *map(str, arguments)], check=True, env=self.env,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE).stdout

    def convert(self, name, plant):
        tree = self.directory / name
        tree.mkdir()
        plant(tree)
        self.run("convert", f"dir:{tree}", self.directory / f"{name}.bcow")
        shutil.rmtree(tree)
        return self.directory / f"{name}.bcow"

    def mount(self, image, *options):
        shutil.rmtree(self.upper, ignore_errors=True)
        self.run("mount", image, self.where, "--upper", self.upper, *options)

    def pool(self):
        [pool] = json.loads(self.run("pool", "list", "--json"))["pools"]
        return pool


def plant_changes(tree):
    (tree / "below").mkdir()
    for number in range(FILES):
        (tree / "below" / str(number)).write_bytes(b"x" * 100)
    (tree / "large").write_bytes(random.Random(1).randbytes(LARGE_BYTES))


def write_to(path, size):
    numbers = random.Random(2)
    file = os.open(path, os.O_RDWR)
    try:
        for _ in range(WRITES):
            os.pwrite(file, b"y" * size, numbers.randrange(LARGE_BYTES // 4096) * 4096)
    finally:
        os.close(file)


def steps(where):
    """The names of the steps, and what they do."""
    new, below = where / "new", where / "below"

    def create():
        new.mkdir()
        for number in range(FILES):
            (new / str(number)).write_bytes(b"x")

    def each(do, directory):
        return lambda: [do(directory / str(number)) for number in range(FILES)]

    yield "stat a file of the image", each(os.stat, below)
    yield "create a file", create
    yield "rename a new file", each(lambda path: path.rename(f"{path}.new"), new)
    yield "remove a new file", each(lambda path: os.unlink(f"{path}.new"), new)
    yield "remove a file of the image", each(os.unlink, below)
    yield "write 4096 bytes, first write", lambda: write_to(where / "large", 4096)
    yield "write 100 bytes", lambda: write_to(where / "large", 100)


def requests(bench, rounds):
    image = bench.convert("changes", plant_changes)
    seconds = {}
    for _ in range(rounds):
        for subject, options in (("alone", ()), ("pool", ("--pool", "p"))):
            bench.mount(image, *options)
            for name, step in steps(bench.where):
                begin = time.perf_counter()
                step()
                took = time.perf_counter() - begin
                seconds.setdefault(name, {}).setdefault(subject, []).append(took)
            bench.run("umount", bench.where)
    rows = []
    for name, found in seconds.items():
        alone, pool = (statistics.median(found[subject]) for subject in ("alone", "pool"))
        count = WRITES if name.startswith("write") else FILES
        rows.append([name, f"{alone / count * 1e6:.0f}", f"{pool / alone:.2f}"])
    table("Requests", ["request", "alone, µs", "in a pool, ratio"], rows)


def pause(bench, nodes):
    def plant(tree):
        for number in range(nodes):
            directory = tree / str(number // 1000)
            directory.mkdir(exist_ok=True)
            (directory / str(number)).write_bytes(b"x")

    bench.mount(bench.convert("many", plant), "--pool", "p")
    rows = []
    for name, program in (
            ("few inodes", None),
            (f"{nodes} inodes", ["find", bench.where, "-size", "+1"]),
            (f"{nodes} inodes, all in the upper", ["chmod", "-R", "g+w", bench.where])):
        if program:
            subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
        time.sleep(SETTLED_SECONDS)
        before = bench.pool()
        ledger = sum(bytes_of_ledgers(before["keeper"]))
        os.kill(before["pid"], signal.SIGKILL)
        begin = time.perf_counter()
        os.statvfs(bench.where)
        rows.append([name, f"{(time.perf_counter() - begin) * 1e3:.0f}", f"{ledger / MIB:.2f}"])
    bench.run("umount", bench.where)
    table("Pause", ["the kernel holds", "pause, ms", "ledger, MiB"], rows)


class Direct:
    """A file of a mount with the kernel driver, past the page cache of the kernel's file system."""

    def __init__(self, where):
        self.file = os.open(where / "large", os.O_RDWR | os.O_DIRECT)
        # Direct writes need a page of their own.
        self.block = mmap.mmap(-1, BLOCK_BYTES)
        self.numbers = random.Random(2)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self.file)

    def write(self, block=None):
        if block is None:
            block = self.numbers.randrange(LARGE_BYTES // BLOCK_BYTES)
        os.pwrite(self.file, self.block, block * BLOCK_BYTES)

    def write_and_synchronize(self):
        self.write()
        os.fdatasync(self.file)


def disks(bench, rounds):
    """The ledger of disks with the kernel driver."""
    image, driver = bench.convert("on-disk", plant_changes), ("--driver", "kernel", "--size", "4G")
    seconds = {}
    for _ in range(rounds):
        for subject, options in (("alone", ()), ("pool", ("--pool", "p"))):
            bench.mount(image, *driver, *options)
            with Direct(bench.where) as direct:
                for name, step, count in (("write 4096 bytes", direct.write, WRITES),
                                          ("write 4096 bytes and synchronize",
                                           direct.write_and_synchronize, SYNCHRONIZED)):
                    begin = time.perf_counter()
                    for _ in range(count):
                        step()
                    took = (time.perf_counter() - begin) / count
                    seconds.setdefault(name, {}).setdefault(subject, []).append(took)
            bench.run("umount", bench.where)
    rows = []
    for name, found in seconds.items():
        alone, pool = (statistics.median(found[subject]) for subject in ("alone", "pool"))
        rows.append([name, f"{alone * 1e6:.0f}", f"{pool / alone:.2f}"])
    table("Requests with the kernel driver", ["request", "alone, µs", "in a pool, ratio"], rows)
    bench.mount(image, *driver, "--pool", "p")
    rows = []
    with Direct(bench.where) as direct:
        for count in (0, 1000, 20_000):
            time.sleep(SETTLED_SECONDS)
            os.fdatasync(direct.file)
            for block in range(count):
                direct.write(block)
            before = bench.pool()
            ledger = sum(bytes_of_ledgers(before["keeper"]))
            os.kill(before["pid"], signal.SIGKILL)
            begin = time.perf_counter()
            direct.write()
            rows.append([str(count), f"{(time.perf_counter() - begin) * 1e3:.0f}",
                         f"{ledger / MIB:.2f}"])
    bench.run("umount", bench.where)
    table("Pause with the kernel driver", ["blocks that no flush has recorded", "pause, ms",
                                       "ledger, MiB"], rows)


class Writer:
    """Writes and synchronizes in a loop, and notes when each fsync ends."""

    def __init__(self, path):
        self.path, self.ends = path, []
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self):
        with open(self.path, "wb", buffering=0) as file:
            while not self.is_over.is_set():
                file.write(b"x" * 4096)
                os.fsync(file.fileno())
                self.ends.append(time.perf_counter())

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.is_over.set()
        self.thread.join()

    def longest(self, begin):
        """The longest time between two ends since `begin`, in ms."""
        ends = [end for end in self.ends if end >= begin]
        return max(later - end for end, later in zip(ends, ends[1:])) * 1e3


def restarts(bench, rounds):
    """The pause that a program sees when the process is replaced as planned, with both drivers."""
    image = bench.convert("restarted", plant_changes)
    rows = []
    for driver, options in (("FUSE", ()), ("kernel", ("--driver", "kernel", "--size", "4G"))):
        bench.mount(image, "--pool", "p", *options)
        pauses, usual = [], []
        with Writer(bench.where / "log") as writer:
            for _ in range(rounds):
                begin = time.perf_counter()
                time.sleep(1)
                usual.append(writer.longest(begin))
                begin = time.perf_counter()
                bench.run("pool", "restart", "p")
                time.sleep(0.5)
                pauses.append(writer.longest(begin))
        bench.run("umount", bench.where)
        rows.append([driver, f"{statistics.median(usual):.0f}", f"{statistics.median(pauses):.0f}",
                     f"{max(pauses):.0f}"])
    table("Pause at a restart: a program writes 4 KiB and synchronizes, again and again",
          ["driver", "longest of a second without one, ms", "at a restart, median, ms",
           "at a restart, longest, ms"], rows)


def bytes_of_ledgers(supervisor):
    for link in pathlib.Path(f"/proc/{supervisor}/fd").iterdir():
        if "bcow-ledger" in os.readlink(link):
            yield link.stat().st_blocks * 512


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bcow", type=pathlib.Path, default="target/release/bcow")
    parser.add_argument("--work", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=50_000)
    options = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory(prefix="takeover-", dir=options.work) as directory:
        bench = Bench(options, pathlib.Path(directory))
        bench.run("pool", "start", "p")
        try:
            requests(bench, options.rounds)
            pause(bench, options.nodes)
            disks(bench, options.rounds)
            restarts(bench, options.rounds)
        finally:
            subprocess.run(["umount", "-l", bench.where], stderr=subprocess.DEVNULL)
            bench.run("pool", "stop", "--force", "p")


if __name__ == "__main__":
    main()
