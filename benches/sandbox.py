#!/usr/bin/python3
"""Measures what the sandbox costs: each action with `--sandbox auto` and with `off`, in turns.

    benches/sandbox.py [--bcow target/release/bcow] [--work DIR] [--rounds 301]

Short actions: list a small image, convert a small archive, serve until a client has its first byte,
mount until a program has its first byte, and unmount; the same with the smallest Debian system,
where a program starts and answers, and with an upper, which has its first change before the
unmount, with both drivers. Then the first change of each of 50 files of an upper; convert 64 MiB;
read 64 MiB from a served image and from a mount, in pieces of 4 KiB at random places. And with
images in a docker-registry on this machine, without a cache: list, mount, and read 64 MiB. The
ratio is the median of the ratios of the pairs, with the standard error of that median.
Needs root, and debootstrap when it runs for the first time.
"""

import argparse
import contextlib
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import nbd
from measure import MIB, machine, table

TOP = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TOP / "tests" / "e2e"))
import fresh  # noqa: E402
from web import plain_registry  # noqa: E402

LONG_ROUNDS = 61
LARGE_BYTES = 64 * MIB


class Bench:
    def __init__(self, bcow, directory):
        self.bcow, self.directory = bcow, directory
        self.where = directory / "mnt"
        self.where.mkdir()
        tree = directory / "tree"
        tree.mkdir()
        chance = random.Random(1)
        for number in range(50):
            (tree / f"file-{number}").write_bytes(chance.randbytes(3000))
        subprocess.run(["tar", "-C", tree, "-cf", directory / "small.tar", "."], check=True)
        self.run("convert", f"tar:{directory}/small.tar", directory / "small.bcow")
        (tree / "large").write_bytes(chance.randbytes(LARGE_BYTES))
        subprocess.run(["tar", "-C", tree, "-cf", directory / "large.tar", "."], check=True)
        self.run("convert", f"dir:{tree}", directory / "large.bcow")
        self.run("convert", f"dir:{fresh.minimal()}", directory / "system.bcow")
        self.places = [chance.randrange(LARGE_BYTES // 4096) * 4096 for _ in range(16384)]

    def push(self, port):
        """Into a registry at this port."""
        for name in ("small", "large"):
            self.run("convert", self.directory / f"{name}.bcow", self.in_registry(port, name),
                     "--insecure")
        self.port = port

    def in_registry(self, port, name):
        return f"docker://127.0.0.1:{port}/bench/{name}:1"

    def remote(self, name, when):
        return [self.in_registry(self.port, name), "--insecure", "--no-cache", "--sandbox", when]

    def run(self, *arguments):
        subprocess.run([self.bcow, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)

    def ls(self, when):
        self.run("ls", "-R", self.directory / "small.bcow", "--sandbox", when)

    def ls_remote(self, when):
        self.run("ls", "-R", *self.remote("small", when))

    def mount_remote(self, when):
        name, *options = self.remote("small", when)
        self.run("mount", name, self.where, *options)
        (self.where / "file-1").read_bytes()
        self.run("umount", self.where)

    def reads_remote(self, when):
        name, *options = self.remote("large", when)
        self.run("mount", name, self.where, *options)
        begin = time.perf_counter()
        (self.where / "large").read_bytes()
        seconds = time.perf_counter() - begin
        self.run("umount", self.where)
        return seconds

    def convert(self, when):
        self.run("convert", "--force", self.directory / "small.tar", self.directory / "new.bcow",
                 "--sandbox", when)

    def convert_large(self, when):
        self.run("convert", "--force", self.directory / "large.tar", self.directory / "new.bcow",
                 "--sandbox", when)

    def connected(self, when, name):
        """A server and its client."""
        socket = self.directory / "sock"
        server = subprocess.Popen([self.bcow, "serve", self.directory / name, "--socket", socket,
                                   "--sandbox", when], stdout=subprocess.PIPE)
        uri = server.stdout.readline().decode().strip()
        client = nbd.NBD()
        client.connect_uri(uri)
        return server, client

    def end(self, server, client):
        client.shutdown()
        server.terminate()
        server.communicate()

    def first_byte(self, when):
        server, client = self.connected(when, "small.bcow")
        client.pread(4096, 0)
        self.end(server, client)

    def mount(self, when):
        self.run("mount", self.directory / "small.bcow", self.where, "--sandbox", when)
        (self.where / "file-1").read_bytes()
        self.run("umount", self.where)

    def program(self, when):
        self.run("mount", self.directory / "system.bcow", self.where, "--sandbox", when)
        subprocess.run(["chroot", self.where, "sh", "-c", "cat /etc/os-release"], check=True,
                       stdout=subprocess.DEVNULL)
        self.run("umount", self.where)

    def written_upper(self, when, driver="fuse", files=1):
        """A mount with an upper, and its end. Returns how long the first changes of files took."""
        upper = self.directory / "upper"
        self.run("mount", self.directory / "small.bcow", self.where, "--upper", upper,
                 "--driver", driver, "--sandbox", when)
        seconds = sum(self.changed(number) for number in range(files))
        self.run("umount", self.where)
        shutil.rmtree(upper)
        return seconds

    def changed(self, number):
        """The seconds that a change of a file takes."""
        begin = time.perf_counter()
        with open(self.where / f"file-{number}", "ab") as file:
            file.write(b"x")
        return time.perf_counter() - begin

    def first_write(self, when):
        return self.written_upper(when, files=50)

    def mount_upper(self, when):
        self.written_upper(when)

    def mount_kernel(self, when):
        self.written_upper(when, "kernel")

    def served_reads(self, when):
        server, client = self.connected(when, "large.bcow")
        begin = time.perf_counter()
        for at in self.places:
            client.pread(4096, at)
        seconds = time.perf_counter() - begin
        self.end(server, client)
        return seconds

    def mounted_reads(self, when):
        self.run("mount", self.directory / "large.bcow", self.where, "--sandbox", when)
        file = os.open(self.where / "large", os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        begin = time.perf_counter()
        for at in self.places:
            os.pread(file, 4096, at)
        seconds = time.perf_counter() - begin
        os.close(file)
        self.run("umount", self.where)
        return seconds


def seconds_of(action, when):
    begin = time.perf_counter()
    own = action(when)
    return own if own is not None else time.perf_counter() - begin


def row(name, action, rounds):
    taken = {"auto": [], "off": []}
    for turn in range(rounds + 1):
        for when in ("auto", "off") if turn % 2 else ("off", "auto"):
            seconds = seconds_of(action, when)
            # The first round fills caches.
            if turn:
                taken[when].append(seconds)
    ratios = [auto / off for auto, off in zip(taken["auto"], taken["off"])]
    low, middle, high = statistics.quantiles(ratios, n=4)
    off = statistics.median(taken["off"]) * 1000
    # As for values that are distributed normally.
    error = 0.93 * (high - low) / len(ratios) ** 0.5
    return [name, f"{off:.2f}", f"{middle:.3f}", f"{error:.3f}"]


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bcow", type=pathlib.Path, default="target/release/bcow")
    parser.add_argument("--work", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=301)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(dir=options.work))
        bench = Bench(str(options.bcow.resolve()), pathlib.Path(directory))
        registry = stack.enter_context(plain_registry(directory))
        bench.push(registry)
        rows = [row(name, action, rounds) for name, action, rounds in [
            ("`ls` of a small image", bench.ls, options.rounds),
            ("`convert` of a small archive", bench.convert, options.rounds),
            ("`convert` of an archive of 64 MiB", bench.convert_large, 4 * LONG_ROUNDS),
            ("`serve`, to the first byte, and its end", bench.first_byte, options.rounds),
            ("`mount`, to the first byte, and `umount`", bench.mount, options.rounds),
            ("`mount` of a Debian system, to the answer of `sh` and `cat` in it, and `umount`",
             bench.program, options.rounds),
            ("`mount` with an upper, to the first change, and `umount`", bench.mount_upper,
             options.rounds),
            ("the same with the kernel driver", bench.mount_kernel, options.rounds),
            ("the first changes of 50 files of an upper", bench.first_write, 4 * options.rounds),
            ("16,384 reads of 4 KiB over NBD", bench.served_reads, 4 * LONG_ROUNDS),
            ("16,384 reads of 4 KiB in a mount", bench.mounted_reads, LONG_ROUNDS),
            ("`ls` of a small image in a registry", bench.ls_remote, options.rounds),
            ("`mount` of it, to the first byte, and `umount`", bench.mount_remote, options.rounds),
            ("64 MiB from a registry, in a mount", bench.reads_remote, LONG_ROUNDS)]]
    print(machine())
    table("Cost of the sandbox", ["action", "without, ms", "ratio", "±"], rows)


if __name__ == "__main__":
    main()
