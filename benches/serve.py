#!/usr/bin/env python3
"""Measures `bcow serve` beside qemu-nbd on qcow2 with a backing file, and nbdkit on a plain file,
in one run.

All servers use a Unix socket and the page cache, and make a flush durable. All have the same
clients: fio's nbd engine, nbdcopy, and a few lines of Python for the first reply. In each round
each server in turn gets a fresh overlay on the same base; the tables have medians over the rounds.
Bases are not compressed: qcow2 has 64 KiB clusters, its default; BCoW has 4 KiB blocks, and
compares their checksums at each read (qcow2 has none). nbdkit has no copy-on-write: it gets a copy
of the base, and shows the cost of the protocol alone.

    cargo build --release --bin bcow
    benches/serve.py --work DIR [--rounds 5] [--seconds 2] [--json FILE]
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time

from measure import MIB, Failed, disk_bytes, machine, process_cpu, process_rss, run

BASE = 1024 * MIB
# Repeated writes go to a part of the disk that was written before.
OWNED = 256 * MIB
VM = 1 << 40

# Name, the row's title, unit, options of fio. `first` rows write ranges that only the base stores.
JOBS = [("randread-1", "random 4 KiB read, depth 1", "IOPS",
         dict(rw="randread", bs="4k", iodepth=1)),
        ("randread-32", "random 4 KiB read, depth 32", "IOPS",
         dict(rw="randread", bs="4k", iodepth=32)),
        ("read", "sequential 1 MiB read, depth 4", "MB/s", dict(rw="read", bs="1m", iodepth=4)),
        ("first-1", "first 4 KiB write into a backed range, depth 1", "IOPS",
         dict(rw="randwrite", bs="4k", iodepth=1, offset=OWNED, size=512 * MIB)),
        ("first-32", "first 4 KiB write into a backed range, depth 32", "IOPS",
         dict(rw="randwrite", bs="4k", iodepth=32, offset=OWNED + 512 * MIB, size=128 * MIB,
              io_size=96 * MIB, time_based=False)),
        ("part-1", "first 1 KiB write (part of a block), depth 1", "IOPS",
         dict(rw="randwrite", bs="1k", blockalign="4k", iodepth=1, offset=OWNED + 640 * MIB,
              size=128 * MIB)),
        ("write", "sequential 1 MiB write, depth 4", "MB/s",
         dict(rw="write", bs="1m", iodepth=4, size=OWNED)),
        ("randwrite-1", "random 4 KiB write, depth 1", "IOPS",
         dict(rw="randwrite", bs="4k", iodepth=1, size=OWNED)),
        ("randwrite-32", "random 4 KiB write, depth 32", "IOPS",
         dict(rw="randwrite", bs="4k", iodepth=32, size=OWNED)),
        ("flush", "4 KiB write and flush, depth 1", "IOPS",
         dict(rw="randwrite", bs="4k", iodepth=1, size=OWNED, fsync=1))]


class Client:
    """The part of NBD that the time to a first reply needs."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(path))
        self.take(8 + 8 + 2)
        self.socket.sendall(struct.pack(">I", 3) + b"IHAVEOPT" + struct.pack(">II", 1, 0))
        self.size, _ = struct.unpack(">QH", self.take(10))

    def take(self, count):
        data = b""
        while len(data) < count:
            more = self.socket.recv(count - len(data))
            if not more:
                raise Failed("the server closed the connection")
            data += more
        return data

    def read(self, offset, length):
        self.socket.sendall(struct.pack(">IHHQQI", 0x25609513, 0, 0, 1, offset, length))
        magic, error, _ = struct.unpack(">IIQ", self.take(16))
        if magic != 0x67446698 or error:
            raise Failed(f"a read failed: error {error}")
        return self.take(length)

    def close(self):
        self.socket.sendall(struct.pack(">IHHQQI", 0x25609513, 0, 2, 2, 0, 0))
        self.socket.close()


class Server:
    """A server on a socket; `start` measures from the start of the process to the first byte
    read."""

    name = None

    def __init__(self, bench):
        self.bench, self.work = bench, bench.work
        self.socket = self.work / "s"

    def start(self, file):
        self.socket.unlink(missing_ok=True)
        begin = time.monotonic()
        self.process = subprocess.Popen([str(part) for part in self.command(file)],
                                        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        while True:
            try:
                client = Client(self.socket)
                break
            except (FileNotFoundError, ConnectionRefusedError):
                if self.process.poll() is not None:
                    raise Failed(f"{self.name} did not start")
                time.sleep(0.0005)
        client.read(self.bench.probe, 4096)
        took = time.monotonic() - begin
        client.close()
        return took

    def stop(self):
        self.process.terminate()
        self.process.wait()


class Bcow(Server):
    name = "bcow"

    def __init__(self, bench, layout, base=("4k", "--compress", "none", "--block-size", "4K")):
        super().__init__(bench)
        self.layout, (self.base_name, *self.base_options) = layout, base
        if layout != "auto":
            self.name = f"bcow, {layout}"
        if self.base_name != "4k":
            self.name += f", {self.base_name} base"

    def base(self):
        path = self.work / f"base-{self.base_name}.bcow"
        if not path.exists():
            run([self.bench.bcow, "convert", f"raw:{self.work}/base.raw", path, *self.base_options])
        return path

    def fresh(self):
        path = self.work / "disk.bcow"
        path.unlink(missing_ok=True)
        run([self.bench.bcow, "create", "-b", self.base(), "--layout", self.layout, path])
        return path

    def large(self):
        path = self.work / "large.bcow"
        path.unlink(missing_ok=True)
        run([self.bench.bcow, "create", "-s", str(VM), "--layout", self.layout, path])
        return path

    def command(self, file):
        return [self.bench.bcow, "serve", file, "--socket", self.socket]


class QemuNbd(Server):
    name = "qemu-nbd, qcow2"

    def base(self):
        path = self.work / "base.qcow2"
        if not path.exists():
            run(["qemu-img", "convert", "-O", "qcow2", self.work / "base.raw", path])
        return path

    def fresh(self):
        path = self.work / "disk.qcow2"
        path.unlink(missing_ok=True)
        run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", self.base(), "-F", "qcow2", path])
        return path

    def large(self):
        path = self.work / "large.qcow2"
        path.unlink(missing_ok=True)
        run(["qemu-img", "create", "-q", "-f", "qcow2", path, str(VM)])
        return path

    def command(self, file):
        return ["qemu-nbd", "-f", "qcow2", "-t", "-e", "8", "--cache=writeback", "--discard=unmap",
                "-k", self.socket, file]


class Nbdkit(Server):
    name = "nbdkit file"

    def fresh(self):
        path = self.work / "disk.raw"
        path.unlink(missing_ok=True)
        run(["cp", "--reflink=never", self.work / "base.raw", path])
        return path

    def large(self):
        path = self.work / "large.raw"
        path.unlink(missing_ok=True)
        with open(path, "wb") as file:
            file.truncate(VM)
        return path

    def command(self, file):
        return ["nbdkit", "-f", "-U", self.socket, "file", f"file={file}"]


class Bench:
    def __init__(self, args):
        self.args, self.work, self.bcow = args, args.work, args.bcow
        self.probe = 0
        self.values = {}
        self.layouts = args.layouts
        self.servers = [Bcow(self, layout) for layout in self.layouts]
        if args.compressed:
            self.servers.append(Bcow(self, "auto", ("compressed", "--block-size", "64K")))
        for program, server in (("qemu-nbd", QemuNbd), ("nbdkit", Nbdkit)):
            if shutil.which(program):
                self.servers.append(server(self))
            else:
                print(f"not installed, left out: {program}")

    def note(self, row, server, value):
        self.values.setdefault(row, {}).setdefault(server.name, []).append(value)

    def make_base(self):
        """A disk of moderate compressibility: random pieces between text-like ones."""
        with open(self.work / "base.raw", "wb") as file:
            text = (b"".join(b"%08x the quick brown fox jumps over it\n" % n
                             for n in range(MIB // 46)))
            text += bytes(MIB - len(text))
            for n in range(BASE // MIB):
                file.write(os.urandom(MIB) if n % 2 else text[n:] + text[:n])
            file.flush()
            os.fsync(file.fileno())

    def fio(self, server, name, options):
        options = {"size": BASE, "offset": 0, "time_based": True, **options}
        command = ["fio", f"--name={name}", "--ioengine=nbd",
                   f"--uri=nbd+unix:///?socket={server.socket}", "--thread", "--output-format=json",
                   "--randrepeat=1", "--refill_buffers", "--percentile_list=50:90:99:99.9"]
        if options.pop("time_based"):
            command += ["--time_based", f"--runtime={self.args.seconds}"]
        command += [f"--{key}={value}" for key, value in options.items()]
        cpu = process_cpu(server.process.pid)
        begin = os.times()
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.work)
        end = os.times()
        if done.returncode:
            raise Failed(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        job = json.loads(done.stdout[done.stdout.index("{"):])["jobs"][0]
        if job["error"]:
            raise Failed(f"fio {name} on {server.name}: error {job['error']}")
        side = job["read"] if options["rw"].endswith("read") else job["write"]
        cpu = process_cpu(server.process.pid) - cpu
        client = (end.children_user + end.children_system - begin.children_user
                  - begin.children_system)
        return side, job["sync"], cpu, client

    def round(self, server):
        disk = server.fresh()
        server.start(disk)
        try:
            for name, title, unit, options in JOBS:
                if self.args.only and name not in self.args.only:
                    continue
                if name == "randwrite-1" and self.args.only:
                    self.fio(server, "prepare",
                             dict(rw="write", bs="1m", iodepth=4, size=OWNED, time_based=False))
                side, sync, cpu, client = self.fio(server, name, options)
                self.note((name, title, unit), server,
                          side["bw_bytes"] / 1e6 if unit == "MB/s" else side["iops"])
                self.note((name, f"{title}: server CPU", "us"), server,
                          cpu / side["total_ios"] * 1e6)
                self.note((name, f"{title}: client CPU", "us"), server,
                          client / side["total_ios"] * 1e6)
                if name in ("first-1", "part-1", "randread-1", "randwrite-1"):
                    for percent in ("50.000000", "99.000000", "99.900000"):
                        self.note((name, f"{title}: p{float(percent):g}", "us"), server,
                                  side["clat_ns"]["percentile"][percent] / 1e3)
                if name == "flush":
                    for percent in ("50.000000", "99.000000", "99.900000"):
                        self.note((name, f"flush: p{float(percent):g}", "us"), server,
                                  sync["lat_ns"]["percentile"][percent] / 1e3)
            if not self.args.only or "copy" in self.args.only:
                uri = f"nbd+unix:///?socket={server.socket}"
                cpu = process_cpu(server.process.pid)
                cost = run(["nbdcopy", uri, "null:"])
                self.note(("copy", "nbdcopy of the whole disk", "MB/s"), server,
                          BASE / 1e6 / cost.wall)
                self.note(("copy", "nbdcopy: server CPU", "s"), server,
                          process_cpu(server.process.pid) - cpu)
            self.note(("memory", "server memory after all of this (peak)", "MiB"), server,
                      process_rss(server.process.pid) / MIB)
        finally:
            server.stop()
        self.note(("space", "file on disk after all of this", "MiB"), server,
                  disk_bytes(disk) / MIB)
        disk.unlink()

    def start_up(self, server):
        """A disk of 1 TB: empty, and with some GB in one piece and 64 MiB in 4 KiB pieces all over
        it."""
        disk = server.large()
        for _ in range(self.args.rounds):
            self.note(("start", "start to first reply, 1 TB, empty", "ms"), server,
                      server.start(disk) * 1e3)
            server.stop()
        server.start(disk)
        try:
            self.fio(server, "fill", dict(rw="write", bs="1m", iodepth=4, size=self.args.fill << 30,
                                          time_based=False))
            self.fio(server, "scatter", dict(rw="randwrite", bs="4k", iodepth=32, size=VM,
                                             io_size=64 * MIB, time_based=False, norandommap=1))
        finally:
            server.stop()
        for _ in range(self.args.rounds):
            self.note(("start", f"start to first reply, 1 TB, {self.args.fill} GiB and 16,384 "
                                "places written", "ms"), server, server.start(disk) * 1e3)
            self.note(("start", "memory then (peak)", "MiB"), server,
                      process_rss(server.process.pid) / MIB)
            server.stop()
        disk.unlink()

    def show(self):
        names = [server.name for server in self.servers]
        print(f"\n| | unit | {' | '.join(names)} | {names[0]} / qemu-nbd |\n"
              f"|{'---|' * (len(names) + 3)}")
        rival = QemuNbd.name
        for (_, title, unit), values in self.values.items():
            middle = {name: statistics.median(values[name]) for name in names if name in values}
            ratio = "-"
            if rival in middle and names[0] in middle and middle[names[0]] and middle[rival]:
                # The inverse for units in which less is better: a ratio above 1 is always better.
                better_high = unit in ("IOPS", "MB/s")
                factor = middle[names[0]] / middle[rival]
                ratio = f"{factor if better_high else 1 / factor:.2f}"
            cells = [f"{middle[name]:,.0f}" if middle.get(name, 0) >= 100 else f"{middle[name]:.1f}"
                     if name in middle else "-" for name in names]
            print(f"| {title} | {unit} | {' | '.join(cells)} | {ratio} |")
        if self.args.json:
            self.args.json.write_text(json.dumps([{"job": job, "what": title, "unit": unit,
                                                   "values": values} for (job, title, unit), values
                                                  in self.values.items()], indent=1))

    def run(self):
        self.make_base()
        for number in range(self.args.rounds):
            turn = number % len(self.servers)
            for server in self.servers[turn:] + self.servers[:turn]:
                self.round(server)
            print(f"round {number + 1} of {self.args.rounds}", file=sys.stderr, flush=True)
        try:
            if not self.args.only or "start" in self.args.only:
                for server in self.servers:
                    self.start_up(server)
        finally:
            self.show()


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bcow", type=pathlib.Path, default=pathlib.Path("target/release/bcow"))
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()),
                        help="where disks may go: 12 GB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2, help="for each workload")
    parser.add_argument("--fill", type=int, default=4, help="GiB in the large disk")
    parser.add_argument("--layouts", type=lambda text: [one for one in text.split(",") if one],
                        default=["auto"])
    parser.add_argument("--compressed", action="store_true",
                        help="also a disk over a base of 64 KiB blocks compressed with zstd")
    parser.add_argument("--only", type=lambda text: text.split(","),
                        help="some workloads: " +
                             ", ".join([job[0] for job in JOBS] + ["copy", "start"]))
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    args.bcow = args.bcow.resolve()
    print(f"{machine()}; {args.rounds} rounds of {args.seconds:g} s each")
    args.work = pathlib.Path(tempfile.mkdtemp(prefix="bcow-bench-", dir=args.work.resolve()))
    try:
        Bench(args).run()
    finally:
        shutil.rmtree(args.work)


signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
main()
