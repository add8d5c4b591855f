#!/usr/bin/env python3
"""Measures many mounts of one image: with a process for each, in a pool, and with overlayfs.

    benches/pool.py --image IMG.bcow [--bcow target/release/bcow] [--work DIR]
                    [--mounts 20,50,100] [--seconds 10] [--upper] [--fill]
                    [--only density|neighbour|programs] [--program CODE]

Density: memory of all processes (PSS), time until all mounts are up, and CPU. Each mount is listed
and reads one file (--file), so that its threads have worked; with --fill also the largest 20, which
fill the caches. A process gives its caches back after ten seconds without a request.

Neighbours: one mount is read as fast as possible by several processes, past the kernel's cache; the
other reads 4 KiB at random at a fixed rate, and its p99 counts: alone, beside programs that use no
other mount, in one pool, in two pools, in two pools with --cpus.

Programs: ten mounts with an upper each, one after the other, and in each a Python program that
imports scipy and stays: time until all have done so, mounts included, and the memory that the whole
machine uses more than before. Needs root.
"""

import argparse
import functools
import json
import mmap
import multiprocessing
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import tempfile
import time

from measure import MIB, drop_caches, machine, process_cpu, table

# Reads of the quiet mount per second.
RATE = 200
READ_BYTES = 4096
# Processes that read the noisy mount.
READERS = 4


class Bench:
    # The tree of the image as files of the host, for overlayfs.
    unpacked = None

    def __init__(self, options, directory):
        self.bcow, self.image = str(options.bcow.resolve()), str(options.image.resolve())
        self.directory, self.file, self.fill = directory, options.file, options.fill
        self.env = {**os.environ, "BCOW_POOLS": str(directory / "pools")}
        self.number = 0

    def run(self, *arguments):
        subprocess.run([self.bcow, *map(str, arguments)], check=True, env=self.env,
                       stdin=subprocess.DEVNULL)

    def place(self):
        self.number += 1
        where = self.directory / f"mnt{self.number}"
        where.mkdir()
        return where

    def mount(self, *options, upper=False):
        where = self.place()
        if upper:
            options = (*options, "--upper", self.directory / f"upper{self.number}")
        self.run("mount", self.image, where, *options)
        return where

    def unpack(self):
        """Copies the tree of the image."""
        where = self.mount()
        self.unpacked, empty = self.directory / "unpacked", self.directory / "empty"
        subprocess.run(["cp", "-a", where, self.unpacked], check=True)
        empty.mkdir()
        self.end([where], None)

    def overlay(self, upper):
        """A mount of the tree of the image by overlayfs."""
        where = self.place()
        layers = f"lowerdir={self.unpacked}:{self.directory / 'empty'}"
        if upper:
            parts = [self.directory / f"{part}{self.number}" for part in ("upper", "work")]
            for part in parts:
                part.mkdir()
            layers += f",upperdir={parts[0]},workdir={parts[1]}"
        subprocess.run(["mount", "-t", "overlay", "-o", layers, "overlay", where], check=True)
        return where

    def read(self, where):
        if self.fill:
            for path in large_files(where):
                pathlib.Path(path).read_bytes()
        (where / self.file).read_bytes()
        os.listdir(where)

    def listed(self, *arguments):
        out = subprocess.run([self.bcow, *arguments, "--json"], check=True, env=self.env,
                             stdout=subprocess.PIPE).stdout
        return json.loads(out)

    def processes(self):
        """The processes of the mounts, as `bcow ps` lists them, and the supervisors of pools."""
        prefix = str(self.directory)
        serving = {row["pid"] for row in self.listed("ps")["services"]
                   if row["at"][0].startswith(prefix)}
        supervisors = {pool["keeper"] for pool in self.listed("pool", "list")["pools"]}
        return serving | supervisors - {None}

    def end(self, places, pool):
        if pool:
            self.run("pool", "stop", "--force", pool)
        for where in places:
            if not pool:
                self.run("umount", where)
            where.rmdir()

    def end_overlays(self, places):
        for where in places:
            subprocess.run(["umount", where], check=True)
            where.rmdir()


def pss(pid):
    for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def own_cpu():
    """CPU seconds of this process and of the commands that it has run."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def density_of(bench, count, upper, way):
    """PSS of all processes, seconds, and CPU seconds of many mounts."""
    drop_caches()
    pool = "density" if way == "pool" else None
    if pool:
        bench.run("pool", "start", pool)
    begin, spent = time.monotonic(), own_cpu()
    places = []
    for _ in range(count):
        if way == "overlayfs":
            where = bench.overlay(upper)
        else:
            where = bench.mount(*(("--pool", pool) if pool else ()), upper=upper)
        bench.read(where)
        places.append(where)
    seconds, cpu = time.monotonic() - begin, own_cpu() - spent
    if way == "overlayfs":
        bench.end_overlays(places)
        return 0, seconds, cpu
    pids = bench.processes()
    found = sum(map(pss, pids)), seconds, cpu + sum(map(process_cpu, pids))
    bench.end(places, pool)
    return found


def density(bench, options):
    bench.unpack()
    rows = []
    for count in options.mounts:
        alone, pooled, overlay = (density_of(bench, count, options.upper, way)
                                  for way in ("alone", "pool", "overlayfs"))
        rows.append([str(count), f"{alone[0] / MIB / count:.2f}", f"{pooled[0] / MIB / count:.2f}",
                     f"{pooled[0] / alone[0]:.2f}", f"{alone[1]:.2f}", f"{pooled[1]:.2f}",
                     f"{overlay[1]:.2f}", f"{alone[1] / overlay[1]:.2f}",
                     f"{pooled[1] / overlay[1]:.2f}", f"{alone[2]:.2f}", f"{pooled[2]:.2f}",
                     f"{overlay[2]:.2f}"])
    what = "with an upper each" if options.upper else "read-only"
    what += ", caches filled" if options.fill else ""
    table(f"### Mounts of one image, {what}: a process for each, one pool, and overlayfs",
          ["mounts", "PSS a mount, alone, MiB", "in a pool", "ratio", "until all are up, alone, s",
           "in a pool", "overlayfs", "alone / overlayfs", "pool / overlayfs", "CPU, alone, s",
           "in a pool", "overlayfs"], rows)


def used():
    """Bytes of memory that are not free. The free pages that the kernel keeps for each processor,
    gigabytes of them since Linux 6.7, are not in MemFree."""
    fields = dict(line.split(":") for line in open("/proc/meminfo"))
    total, free = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemFree"))
    kept = sum(int(line.split()[1]) for line in open("/proc/zoneinfo")
               if line.strip().startswith("count:"))
    return total - free - kept * mmap.PAGESIZE


def programs_of(bench, options, way):
    """Seconds and bytes of memory of programs in mounts of their own."""
    drop_caches()
    before, begin = used(), time.monotonic()
    if way == "pool":
        bench.run("pool", "start", "programs")
    places, running = [], []
    for _ in range(10):
        where = (bench.overlay(True) if way == "overlayfs" else
                 bench.mount(*(["--pool", "programs"] if way == "pool" else []),
                             "-o", "allow_other,suid,dev", upper=True))
        places.append(where)
        running.append(subprocess.Popen(
            ["chroot", where, "/usr/bin/python3", "-Bc", options.program +
             "; print(1, flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        if running[-1].stdout.readline() != b"1\n":
            raise SystemExit(f"the program failed in {where}")
    found = time.monotonic() - begin, used() - before
    for process in running:
        process.communicate(b"\n")
    if way == "overlayfs":
        bench.end_overlays(places)
    else:
        bench.end(places, "programs" if way == "pool" else None)
    return found


def programs(bench, options):
    if not bench.unpacked:
        bench.unpack()
    ways = ("overlayfs", "pool", "alone")
    rounds = [{way: programs_of(bench, options, way) for way in ways}
              for _ in range(options.rounds)]
    rows, reference = [], None
    for way in ways:
        seconds, memory = (statistics.median(one[way][kind] for one in rounds) for kind in (0, 1))
        reference = reference or (seconds, memory)
        rows.append([way, f"{seconds:.2f}", f"{seconds / reference[0]:.2f}",
                     f"{memory / MIB:.0f}", f"{memory / reference[1]:.2f}"])
    table(f"### Ten mounts, and in each: {options.program}",
          ["", "all up, s", "/ overlayfs", "memory of the machine, MiB", "/ overlayfs"], rows)


def large_files(where):
    """Files for the readers: the largest of the image."""
    found = sorted(((path.stat().st_size, path) for path in where.rglob("*")
                    if path.is_file() and not path.is_symlink()), reverse=True)
    return [str(path) for _, path in found[:20]]


def noise(paths, seed):
    """Reads for ever, without the kernel's page cache."""
    source = random.Random(seed)
    while True:
        descriptor = os.open(source.choice(paths), os.O_RDONLY)
        while os.read(descriptor, 1 << 20):
            pass
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def noise_on_host(directory, paths, seed):
    """As `noise`, with copies of the files on the file system of the host: what such readers cost
    without a second mount."""
    own = directory / f"copies{seed}"
    own.mkdir()
    noise([shutil.copy(path, own) for path in paths], seed)


def compute(_paths, seed):
    """Computes for ever: what any program on the same CPUs costs the quiet mount."""
    source = random.Random(seed)
    while True:
        source.random()


def quiet(paths, seconds):
    """The times of reads at a fixed rate, in seconds; each begins when it is due."""
    source = random.Random(1)
    descriptors = [os.open(path, os.O_RDONLY) for path in paths]
    sizes = [os.fstat(descriptor).st_size for descriptor in descriptors]
    for descriptor in descriptors:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    times = []
    begin = time.monotonic()
    for number in range(int(seconds * RATE)):
        due = begin + number / RATE
        time.sleep(max(0, due - time.monotonic()))
        chosen = source.randrange(len(descriptors))
        offset = source.randrange(sizes[chosen] // READ_BYTES) * READ_BYTES
        os.posix_fadvise(descriptors[chosen], offset, READ_BYTES, os.POSIX_FADV_DONTNEED)
        start = time.monotonic()
        os.pread(descriptors[chosen], READ_BYTES, offset)
        times.append(time.monotonic() - start)
    for descriptor in descriptors:
        os.close(descriptor)
    return sorted(times)


def neighbour(bench, options):
    cpus = sorted(os.sched_getaffinity(0))
    half = len(cpus) // 2
    halves = [",".join(map(str, part)) for part in (cpus[:half] or cpus, cpus[half:] or cpus)]
    rows, alone = [], None
    for name, pools, beside in [
            ("alone", [("quiet", [])], None),
            (f"beside {READERS} programs that only compute", [("quiet", [])], compute),
            (f"beside {READERS} readers of the host's file system", [("quiet", [])],
             functools.partial(noise_on_host, bench.directory)),
            ("beside a noisy mount, one pool", [("both", [])], noise),
            ("two pools", [("quiet", []), ("noisy", [])], noise),
            ("two pools, each with half of the CPUs",
             [("quiet", ["--cpus", halves[0]]), ("noisy", ["--cpus", halves[1]])], noise)]:
        drop_caches()
        for pool, settings in pools:
            bench.run("pool", "start", pool, "--memory", "32M", *settings)
        places = [bench.mount("--pool", pools[0][0]), bench.mount("--pool", pools[-1][0])]
        paths = large_files(places[0])
        others = [str(places[1] / os.path.relpath(path, places[0])) for path in paths]
        readers = [multiprocessing.Process(target=beside, args=(others, seed), daemon=True)
                   for seed in range(READERS if beside else 0)]
        for reader in readers:
            reader.start()
        quiet(paths, 1)
        times = quiet(paths, options.seconds)
        for reader in readers:
            reader.terminate()
            reader.join()
        p50, p99 = (times[int(len(times) * share)] * 1e3 for share in (0.5, 0.99))
        alone = alone or p99
        rows.append([name, f"{p50:.2f}", f"{p99:.2f}", f"{p99 / alone:.2f}"])
        for pool, _ in pools:
            bench.run("pool", "stop", "--force", pool)
        for where in places:
            where.rmdir()
    table(f"### A quiet mount beside a noisy one ({RATE} reads of 4 KiB per second; {READERS} "
          "readers)", ["", "p50 ms", "p99 ms", "p99 against alone"], rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", type=pathlib.Path, required=True)
    parser.add_argument("--bcow", type=pathlib.Path, default=pathlib.Path("target/release/bcow"))
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("/tmp"))
    parser.add_argument("--mounts", default="20,50,100",
                        type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--file", default="etc/passwd", help="the file that each mount reads")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--fill", action="store_true", help="each mount reads the largest files")
    parser.add_argument("--upper", action="store_true", help="each mount has an upper")
    parser.add_argument("--only", choices=["density", "neighbour", "programs"])
    parser.add_argument("--program", default="import scipy", help="Python, for programs")
    parser.add_argument("--rounds", type=int, default=3, help="of programs")
    options = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory(prefix="pool-", dir=options.work) as directory:
        bench = Bench(options, pathlib.Path(directory))
        for name, part in (("density", density), ("neighbour", neighbour),
                           ("programs", programs)):
            if options.only in (None, name):
                part(bench, options)


if __name__ == "__main__":
    main()
