#!/usr/bin/env python3
"""Measures starts from an image in a registry behind a slow network, cold.

docker-registry runs in a network namespace of its own. A token bucket (tc tbf) limits what leaves
the namespace to 100 Mbit/s, for all connections together. A proxy in the namespace delays what the
registry answers by 20 ms, as kernels without netem cannot. Bytes are those of the network
interface, with all headers. Each cold start has a new mount and an empty cache:

- pull: `skopeo copy` of the whole BCoW image, then a mount of the copy;
- lazy: a mount that fetches what the program reads;
- listed: the image placed by a trace of this program (`bcow mount --record`, `bcow convert
  --prefetch`), whose list is fetched ahead;
- layers, listed: the stack of converted layers, which has the list only.

`/ list` is the ratio to the stored bytes of the listed blocks; the bound is the time that these
bytes take at the bandwidth.

    cargo build --release --bin bcow
    benches/remote.py --work DIR --image oci:LAYOUT:REF

As root. Of a shared machine, read the ratios.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time

from measure import MIB, Failed, machine, process_rss, run, table

MBIT = 100
DELAY_SECONDS = 0.02
HOST = "10.231.77.1"
HERE = "10.231.77.2"
POSTGRES = """
set -e
PATH=$(echo /usr/lib/postgresql/*/bin):$PATH
initdb -D /tmp/data -U postgres --no-sync > /dev/null
pg_ctl -D /tmp/data -w -o "-c listen_addresses= -k /tmp" start > /dev/null
psql -h /tmp -U postgres -Atc "select 1" > /dev/null
pg_ctl -D /tmp/data -m immediate stop > /dev/null
"""
# The title, the command, and whether it needs a writable mount.
PROGRAMS = [("`git --version`", ["git", "--version"], False),
            ("`import numpy`", ["python3", "-c", "import numpy"], False),
            ("PostgreSQL: initdb, start, query",
             ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", "sh", "-c",
              POSTGRES], True)]
# Which of them runs in many instances, and in how many.
MANY, INSTANCES = 1, 50
PARTS = ["starts", "whole", "many"]


async def delay(listen, port):
    """Passes connections on to the port on the loopback, and the answers on after a delay."""
    async def answer(reader, writer):
        waiting, most = collections.deque(), 4 * MIB
        changed = asyncio.Condition()

        async def receive():
            data = b"-"
            while data:
                data = await reader.read(1 << 16)
                async with changed:
                    waiting.append((time.monotonic() + DELAY_SECONDS, data))
                    changed.notify()
                    await changed.wait_for(lambda: sum(len(d) for _, d in waiting) < most)

        async def send():
            while True:
                async with changed:
                    await changed.wait_for(lambda: waiting)
                    due, data = waiting.popleft()
                    changed.notify()
                await asyncio.sleep(due - time.monotonic())
                if not data:
                    writer.write_eof()
                    return
                writer.write(data)
                await writer.drain()

        await asyncio.gather(receive(), send())

    async def ask(reader, writer):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write_eof()

    async def serve(reader, writer):
        with contextlib.suppress(OSError), contextlib.closing(writer):
            back, forth = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.closing(forth):
                await asyncio.gather(ask(reader, forth), answer(back, writer))

    server = await asyncio.start_server(serve, *listen)
    await server.serve_forever()


class Network:
    """A registry behind a slow network, for the length of a with block."""

    def __init__(self, work):
        self.work = work
        self.space, self.link = f"bcow{os.getpid()}", f"bc{os.getpid()}"
        self.servers = contextlib.ExitStack()

    def inside(self, *command):
        return ["ip", "netns", "exec", self.space, *command]

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            run(["ip", "netns", "add", self.space])
            stack.callback(subprocess.run, ["ip", "netns", "del", self.space])
            run(["ip", "link", "add", self.link, "type", "veth", "peer", "name", "out", "netns",
                 self.space])
            run(["ip", "addr", "add", f"{HERE}/30", "dev", self.link])
            run(["ip", "link", "set", self.link, "up"])
            for command in (["ip", "addr", "add", f"{HOST}/30", "dev", "out"],
                            ["ip", "link", "set", "out", "up"], ["ip", "link", "set", "lo", "up"],
                            ["tc", "qdisc", "add", "dev", "out", "root", "tbf", "rate",
                             f"{MBIT}mbit", "burst", "64k", "latency", "400ms"]):
                run(self.inside(*command))
            config = self.work / "registry.yml"
            config.write_text(f"""version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {self.work}/registry}}}}
http: {{addr: "127.0.0.1:5000"}}
""")
            for command in (["docker-registry", "serve", str(config)],
                            [sys.executable, __file__, "--delay"]):
                server = subprocess.Popen(self.inside(*command), stdout=subprocess.DEVNULL,
                                          stderr=subprocess.DEVNULL)
                stack.callback(server.wait)
                stack.callback(server.kill)
            end = time.monotonic() + 30
            while subprocess.run(["curl", "-sf", f"http://{HOST}:5001/v2/"],
                                 stdout=subprocess.DEVNULL).returncode != 0:
                if time.monotonic() > end:
                    raise Failed("the registry does not answer")
                time.sleep(0.1)
            self.servers = stack.pop_all()
        return self

    def __exit__(self, *_):
        self.servers.close()

    def received(self):
        return int(pathlib.Path(f"/sys/class/net/{self.link}/statistics/rx_bytes").read_text())


class Bench:
    def __init__(self, options, network):
        self.options, self.network = options, network
        self.work, self.bcow = options.work, options.bcow
        self.lazy = self.work / "lazy.bcow"

    def name(self, image):
        return f"docker://{HOST}:5001/bench/{image}:1"

    @contextlib.contextmanager
    def scratch(self, prefix):
        path = pathlib.Path(tempfile.mkdtemp(prefix=prefix, dir=self.work))
        try:
            yield path
        finally:
            shutil.rmtree(path)

    @contextlib.contextmanager
    def mounted(self, image, *arguments):
        where = pathlib.Path(tempfile.mkdtemp(prefix="mnt-", dir=self.work))
        run([self.bcow, "mount", image, where, *arguments])
        try:
            yield where
        finally:
            run([self.bcow, "umount", where])
            where.rmdir()

    def cold_mounted(self, image, cache, *arguments):
        return self.mounted(self.name(image), "--insecure", "--cache-dir", cache, *arguments)

    def inside_mount(self, where, program):
        """A command that runs a program in a mount, with /dev and /proc."""
        shell = 'mount --rbind /dev "$0/dev"; mount -t proc proc "$0/proc"; exec chroot "$0" "$@"'
        return ["unshare", "-m", "sh", "-ec", shell, str(where), *program]

    def start(self, program, image, *arguments):
        """Mounts an image, and runs a program in it: seconds, bytes, peak memory of the mount."""
        _, command, is_writable = program
        with self.scratch("upper-") as upper:
            writable = ["--upper", upper / "upper", "-o", "allow_other"] if is_writable else []
            before, begun = self.network.received(), time.monotonic()
            with self.mounted(image, *writable, *arguments) as where:
                run(self.inside_mount(where, command))
                seconds = time.monotonic() - begun
                received = self.network.received() - before
                return seconds, received, process_rss(self.process(where))

    def process(self, where):
        found = subprocess.run([self.bcow, "stats", "--json", where], check=True,
                               stdout=subprocess.PIPE).stdout
        return json.loads(found)["process"]["pid"]

    def cold(self, program, image):
        with self.scratch("cache-") as cache:
            return self.start(program, self.name(image), "--insecure", "--cache-dir", cache,
                              "--complete", "never")

    def prepare(self):
        """Makes the images, and pushes them past the slow network."""
        def inside(image):
            return f"docker://127.0.0.1:5000/bench/{image}:1"
        bcow, image = self.bcow, self.options.image
        parts = self.options.parts
        run([bcow, "convert", "--force", image, self.lazy])
        run(self.network.inside(bcow, "copy", "--insecure", self.lazy, inside("lazy")))
        for number, program in enumerate(PROGRAMS):
            if "starts" not in parts and (number, "many" in parts) != (MANY, True):
                continue
            trace, listed = self.work / f"{number}.trace", self.work / f"{number}.bcow"
            self.start(program, self.lazy, "--record", trace)
            run([bcow, "convert", "--force", "--prefetch", trace, self.lazy, listed])
            run(self.network.inside(bcow, "copy", "--insecure", listed, inside(f"listed-{number}")))
            if "starts" in parts:
                run(self.network.inside(bcow, "convert", "--insecure", "--cache",
                                        self.work / "layers", "--prefetch", trace, image,
                                        inside(f"layers-{number}")))
        if "whole" in parts:
            run(self.network.inside("skopeo", "copy", "--dest-tls-verify=false", image,
                                    inside("ordinary")))

    def listed_bytes(self, number):
        """The stored bytes of the listed blocks."""
        found = subprocess.run([self.bcow, "inspect", "--json", self.work / f"{number}.bcow"],
                               check=True, stdout=subprocess.PIPE).stdout
        return json.loads(found)["prefetch"]["stored_bytes"]

    def skopeo(self, image, destination):
        """Seconds and bytes of a copy of an image by skopeo."""
        shutil.rmtree(destination, ignore_errors=True)
        before, begun = self.network.received(), time.monotonic()
        run(["skopeo", "copy", "--src-tls-verify=false", self.name(image), f"oci:{destination}:1"])
        return time.monotonic() - begun, self.network.received() - before

    def starts(self):
        whole = self.lazy.stat().st_size
        pulled_seconds, pulled_bytes = self.skopeo("lazy", self.work / "pulled")
        rows = []
        for number, program in enumerate(PROGRAMS):
            needed = self.listed_bytes(number)
            least = needed * 8 / (MBIT * 1e6)
            local, _, rss = self.start(program, f"oci:{self.work}/pulled:1")
            pull = pulled_seconds + local
            ways = [("a file here", (local, 0, rss)),
                    ("pull, then mount", (pull, pulled_bytes, rss))]
            for way, image in (("lazy", "lazy"), ("listed", f"listed-{number}"),
                               ("layers, listed", f"layers-{number}")):
                found = [self.cold(program, image) for _ in range(self.options.rounds)]
                ways.append((way, min(found)))
            for way, (seconds, count, rss) in ways:
                rows.append([program[0], way, f"{count / MIB:.1f}", f"{100 * count / whole:.1f} %",
                             f"{count / needed:.2f}", f"{seconds:.2f}", f"{seconds / pull:.3f}",
                             f"{seconds / least:.2f}", f"{seconds / (least + local):.2f}",
                             f"{rss / MIB:.0f}"])
        table("### Cold starts", ["program", "way", "MiB", "of the image", "/ list", "seconds",
                                  "/ pull", "/ bound", "/ (bound + file here)", "peak RSS MiB"],
              rows)

    def pulled_digest(self):
        manifest = json.loads((self.work / "pulled" / "index.json").read_text())
        return manifest["manifests"][0]["digest"]

    def completion(self):
        """The seconds until the image is complete in the cache, and those of curl."""
        if not (self.work / "pulled").exists():
            self.skopeo("lazy", self.work / "pulled")
        digest = self.pulled_digest().removeprefix("sha256:")
        blob = self.work / "pulled" / "blobs" / "sha256" / digest
        layer = json.loads(blob.read_text())["layers"][0]["digest"]
        rows = []
        begun = time.monotonic()
        run(["curl", "-sf", "-o", self.work / "curl",
             f"http://{HOST}:5001/v2/bench/lazy/blobs/{layer}"])
        curl = time.monotonic() - begun
        rows.append(["curl of the file", f"{curl:.1f}", "1"])
        skopeo, _ = self.skopeo("ordinary", self.work / "skopeo")
        rows.append(["skopeo copy of the ordinary image", f"{skopeo:.1f}", f"{skopeo / curl:.2f}"])
        with self.scratch("cache-") as cache:
            log, begun = cache / "mount.log", time.monotonic()
            with self.cold_mounted("lazy", cache, "--complete", "always", "--log-file", log):
                while not (log.exists() and "complete: " in log.read_text()):
                    if time.monotonic() - begun > 1800:
                        raise Failed("the image is not complete after half an hour")
                    time.sleep(0.05)
                seconds = time.monotonic() - begun
            rows.append(["mount --complete always", f"{seconds:.1f}", f"{seconds / curl:.2f}"])
            table("### The whole image", ["until all is here", "seconds", "/ curl"], rows)
            self.warm(cache)

    def warm(self, cache):
        """Starts and reads from a complete cache, beside those from the file: as it is, and with
        each read checked against the Merkle tree, as reads from the cache are."""
        options = ["--insecure", "--cache-dir", cache]
        tag = self.name("lazy")
        # The registry is not asked for the meaning of a digest.
        digest = f"{tag.removesuffix(':1')}@{self.pulled_digest()}"
        images = [(self.lazy,), (self.lazy, "--verify", "merkle"), (digest, *options),
                  (tag, *options)]
        rows = []

        def add(title, measure, rounds):
            found = [[measure(*image) for image in images] for _ in range(rounds)]
            local, *others = (min(column) for column in zip(*found))
            rows.append([title, f"{local:.3f}", *(f"{each:.3f}" for each in others),
                         *(f"{each / local:.2f}" for each in others)])

        for program in PROGRAMS:
            add(f"{program[0]}, s", lambda *image: self.start(program, *image)[0],
                self.options.rounds + 2)
        add("a large file from begin to end, s", self.reads_whole, self.options.rounds + 2)
        add("4 KiB read at random, ms", self.reads, self.options.rounds)
        table("### A complete cache", ["", "file", "file, verified", "cache, by digest",
                                       "cache, by tag", "verified / file", "digest / file",
                                       "tag / file"], rows)

    def largest(self, where):
        return max((path for path in (where / "usr" / "lib").rglob("*")
                    if path.is_file() and not path.is_symlink()),
                   key=lambda path: path.stat().st_size)

    def reads_whole(self, image, *arguments):
        """Seconds of a sequential read of a large file of the image."""
        with self.mounted(image, *arguments) as where:
            largest = self.largest(where)
            begun = time.monotonic()
            run(["cat", largest])
            return time.monotonic() - begun

    def reads(self, image, *arguments):
        """Milliseconds of a read of 4 KiB at a random place in a large file of the image."""
        with self.mounted(image, *arguments) as where:
            largest = self.largest(where)
            chosen = random.Random(1)
            with open(largest, "rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                blocks = os.fstat(file.fileno()).st_size // 4096
                places = chosen.sample(range(blocks), min(blocks, 5000))
                begun = time.monotonic()
                for place in places:
                    os.pread(file.fileno(), 4096, place * 4096)
                return (time.monotonic() - begun) / len(places) * 1e3

    def many(self):
        """Bytes that many instances of an image fetch at once, beside those of one."""
        program, name = PROGRAMS[MANY], f"listed-{MANY}"
        _, one, _ = self.cold(program, name)
        with self.scratch("cache-") as cache, contextlib.ExitStack() as stack:
            before, begun = self.network.received(), time.monotonic()
            places = [self.work / f"many-{n}" for n in range(INSTANCES)]
            mounts = []
            for place in places:
                place.mkdir(exist_ok=True)
                mounts.append(subprocess.Popen(
                    [self.bcow, "mount", self.name(name), place, "--insecure", "--cache-dir",
                     cache, "--complete", "never"]))
            for place, mount in zip(places, mounts):
                if mount.wait() != 0:
                    raise Failed("a mount of many failed")
                stack.callback(run, [self.bcow, "umount", place])
            programs = [subprocess.Popen(self.inside_mount(place, program[1]))
                        for place in places]
            if any([running.wait() for running in programs]):
                raise Failed("a program of many failed")
            seconds = time.monotonic() - begun
            many = self.network.received() - before
        for place in places:
            place.rmdir()
        table("### Many instances of one image at once", ["instances", "MiB", "/ one", "seconds"],
              [["1", f"{one / MIB:.1f}", "1", ""],
               [f"{INSTANCES}", f"{many / MIB:.1f}", f"{many / one:.2f}", f"{seconds:.1f}"]])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=pathlib.Path)
    parser.add_argument("--image")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--part", dest="parts", action="append", choices=PARTS,
                        help="measure this; may be given several times [default: all]")
    parser.add_argument("--delay", action="store_true", help=argparse.SUPPRESS)
    top = pathlib.Path(__file__).resolve().parent.parent
    parser.add_argument("--bcow", default=str(top / "target" / "release" / "bcow"))
    options = parser.parse_args()
    if options.delay:
        asyncio.run(delay((HOST, 5001), 5000))
    if options.work is None or options.image is None:
        parser.error("--work and --image are needed")
    options.parts = options.parts or PARTS
    options.work = options.work.absolute()
    options.work.mkdir(parents=True, exist_ok=True)
    print(machine())
    with Network(options.work) as network:
        bench = Bench(options, network)
        bench.prepare()
        for part, measure in zip(PARTS, (bench.starts, bench.completion, bench.many)):
            if part in options.parts:
                measure()


if __name__ == "__main__":
    main()
