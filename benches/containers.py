#!/usr/bin/env python3
"""Measures containers of containerd: overlayfs, erofs, and bcow-snapshotter.

The registry and its slow network are those of benches/remote.py: 100 Mbit/s for all connections
together, and 20 ms. Each start has a containerd of its own with an empty directory, and an empty
page cache.

- starts: seconds from the begin of `ctr image pull` to the end of the first program in a container
  (`ctr run --rm`), what the network interface receives until then, and the time of a further
  container of the same image (`ctr run --rm ... /bin/true`, the median of five);
- many: containers of one image that run at the same time: time until all are up, CPU time of the
  whole machine, and the memory of the processes of bcow (PSS);
- dense: containers of one image that import numpy and map and read 100 MB of its libraries: time
  until all have done so, and the memory that the whole machine uses more than before, page cache
  included, then and 30 s later. With --two-images, every other container is one of a second image,
  which has all layers of the first one but the last.

Subjects:

- overlayfs, erofs: the snapshotters of containerd 2.x; erofs with its differ (mkfs.erofs 1.8.2 or
  later);
- ordinary: bcow-snapshotter, which unpacks the ordinary image;
- lazy: bcow-snapshotter with an attached image (`bcow convert --referrer`);
- listed: the same, with the prefetch list of this program;
- pool: bcow-snapshotter with a pool for all mounts;
- differ: the same, and bcow-snapshotter is the differ that makes the layers, three at a time;
- unshared: as pool, and its mounts share no page cache (dense only).

containerd's overlayfs and erofs snapshotters cannot unpack a layer that has a hard link to a file
of a lower layer. --leave-out makes the image without such a layer, for all subjects.

    cargo build --release --bin bcow --bin bcow-snapshotter
    benches/containers.py --work DIR --image oci:LAYOUT:REF --leave-out 3

As root, with containerd 2.x, its ctr and its shim, runc, and mkfs.erofs first in PATH. The path of
DIR is short: sockets are in it. Of a shared machine, read the ratios.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import statistics
import sys
import time

TOP = pathlib.Path(__file__).resolve().parent.parent
PROGRAMS = {"git": ["/usr/bin/git", "--version"],
            "numpy": ["/usr/bin/python3", "-c", "import numpy"],
            "python": ["/usr/bin/python3", "-c", "print(1)"]}
STARTS = ["overlayfs", "erofs", "ordinary", "pool", "differ", "lazy", "listed"]
MANY = ["overlayfs", "erofs", "ordinary", "pool"]
DENSE = ["overlayfs", "ordinary", "unshared", "pool"]
# The subjects that pull the image as it is.
WHOLE = {*MANY, *DENSE, "differ"}
# The argument is the file that says that everything is in memory.
USER = """
import glob, mmap, sys, time
import numpy
maps = []
for path in sorted(glob.glob("/usr/lib/*-linux-gnu/*.so.*")):
    if sum(map(len, maps)) >= 100_000_000:
        break
    with open(path, "rb") as file:
        maps.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    sum(maps[-1][::mmap.PAGESIZE])
assert sum(map(len, maps)) >= 100_000_000
open(sys.argv[1], "w").close()
time.sleep(1_000_000)
"""
NAMES = {"overlayfs": "overlayfs snapshotter", "erofs": "erofs snapshotter",
         "ordinary": "**bcow-snapshotter**, ordinary image",
         "lazy": "**bcow-snapshotter**, attached image",
         "listed": "**bcow-snapshotter**, attached image with a list",
         "pool": "**bcow-snapshotter**, in a pool",
         "differ": "**bcow-snapshotter**, in a pool, with its differ",
         "unshared": "**bcow-snapshotter**, in a pool with `--share off`"}
AGAIN = 5
CONFIG = """
[[plugins."io.containerd.transfer.v1.local".unpack_config]]
platform = "linux"
snapshotter = "{snapshotter}"
differ = "{differ}"
"""
EROFS = """
[plugins."io.containerd.service.v1.diff-service"]
default = ["erofs", "walking"]
[plugins."io.containerd.differ.v1.erofs"]
mkfs_options = ["-T0", "--mkfs-time", "--sort=none"]
"""
DIFFER = """
[proxy_plugins.bcow-diff]
type = "diff"
address = "{place}/sock"
[plugins."io.containerd.transfer.v1.local"]
max_concurrent_unpacks = 3
"""
EXPORTS = """
[proxy_plugins.bcow.exports]
enable_remote_snapshot_annotations = "true"
"""


def parsed():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--image", required=True, help="oci:LAYOUT:REF")
    parser.add_argument("--leave-out", type=int, action="append", default=[], metavar="N",
                        help="make the image without this layer, from 1; may be repeated")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--part", choices=["prepare", "starts", "many", "dense"],
                        default="starts")
    parser.add_argument("--prepared", action="store_true",
                        help="the images are in DIR, from a run with --part prepare")
    parser.add_argument("--program", choices=PROGRAMS, default="numpy")
    parser.add_argument("--subject", dest="subjects", action="append", choices=NAMES,
                        help="measure this; may be repeated [default: all of the part]")
    parser.add_argument("--containers", default="20,50,100",
                        type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--two-images", action="store_true", help="dense")
    parser.add_argument("--bcow", default=str(TOP / "target" / "release" / "bcow"))
    options = parser.parse_args()
    all_subjects = {"many": MANY, "dense": DENSE}.get(options.part, STARTS)
    options.subjects = options.subjects or all_subjects
    options.work = options.work.absolute()
    options.work.mkdir(parents=True, exist_ok=True)
    return options


OPTIONS = parsed() if __name__ == "__main__" else None
if OPTIONS:
    # The modules of the tests read these when they are imported.
    os.environ.update(BCOW=OPTIONS.bcow, BCOW_E2E=str(OPTIONS.work))
sys.path.insert(0, str(TOP / "tests" / "e2e"))

import remote  # noqa: E402
import support  # noqa: E402
import test_snapshotter  # noqa: E402
import test_snapshotter_remote  # noqa: E402
from measure import MIB, drop_caches, machine, run, table  # noqa: E402
from pool import pss, used  # noqa: E402


class Node(test_snapshotter.WithContainerd):
    """A containerd with one snapshotter, and nothing in it."""

    subject, name = None, None
    made = 0

    def runTest(self):
        """The tests' modules make nodes for test cases."""

    @classmethod
    @contextlib.contextmanager
    def started(cls, subject, image):
        Node.made += 1
        node = cls()
        node.subject, node.name = subject, f"{remote.HOST}:5001/bench/{image}:1"
        node.setUp()
        try:
            node.start_all()
            yield node
        finally:
            node.doCleanups()

    def start_all(self):
        self.snapshotter = self.subject if self.subject in ("overlayfs", "erofs") else "bcow"
        base, table_of_bcow, address = test_snapshotter_remote.CONFIG.partition(
            "[proxy_plugins.bcow]")
        config = "version = 3" + base
        if self.snapshotter == "bcow":
            more = ["--pool", "p"] if self.subject in ("pool", "differ", "unshared") else []
            if more:
                self.start_pool()
            if self.subject == "unshared":
                more += ["--mount-option", "share=off"]
            if self.subject == "differ":
                store = pathlib.Path(self.place, "lib/io.containerd.content.v1.content")
                store.mkdir(parents=True)
                more += ["--content-store", store]
                address = address.replace('capabilities = [', 'capabilities = ["rebase", ')
            self.start("--insecure", *map(str, more))
            config += table_of_bcow + address + EXPORTS
            config += DIFFER.format(place=self.place) if self.subject == "differ" else ""
        differ = {"erofs": "erofs", "differ": "bcow-diff"}.get(self.subject, "walking")
        config = config.format(place=self.place)
        config += CONFIG.format(snapshotter=self.snapshotter, differ=differ)
        config += EROFS if differ == "erofs" else ""
        pathlib.Path(self.place, "config.toml").write_text(config)
        self.addCleanup(self.stop_all)
        self.start_containerd()

    def pull(self, name=None):
        self.ctr("image", "pull", "--plain-http", "--snapshotter", self.snapshotter,
                 name or self.name)

    def run_in(self, name, *command, options=("--rm",), image=None):
        """Runs a container; runc knows it by name, beside those of other containerds."""
        self.ctr("run", *options, "--snapshotter", self.snapshotter, image or self.name,
                 f"bench-{os.getpid()}-{Node.made}-{name}", *command)

    @property
    def second(self):
        """The second image of --two-images."""
        return self.name.replace("/whole:", "/shorter:")


def reduced(image, leave_out, directory):
    """A layout with the image without these layers."""
    layout, ref = image.removeprefix("oci:").rsplit(":", 1)
    run(["skopeo", "--insecure-policy", "copy", f"oci:{layout}:{ref}", f"oci:{directory}:whole"])
    blobs = directory / "blobs" / "sha256"

    def read(digest):
        return json.loads((blobs / digest.removeprefix("sha256:")).read_bytes())

    def kept(items):
        return [item for number, item in enumerate(items, 1) if number not in leave_out]

    layouts = test_snapshotter_remote.ocilib.Layout(str(directory))
    index = json.loads((directory / "index.json").read_bytes())
    manifest = read(index["manifests"][0]["digest"])
    config = read(manifest["config"]["digest"])
    made = layouts.manifest(kept(manifest["layers"]), kept(config["rootfs"]["diff_ids"]),
                            config.get("config", {}))
    layouts.index([(made, "image", None)])
    return f"oci:{directory}:image"


def image_of(options, subject):
    """The name of the image in the registry for a subject."""
    return "whole" if subject in WHOLE else f"{subject}-{options.program}"


def prepare(options, network):
    """Pushes the images past the slow network."""
    shutil.rmtree(options.work / "layout", ignore_errors=True)
    image, bcow = reduced(options.image, options.leave_out, options.work / "layout"), options.bcow

    def inside(name):
        return f"docker://127.0.0.1:5000/bench/{name}"

    if options.two_images:
        shutil.rmtree(options.work / "shorter", ignore_errors=True)
        manifest = support.run("skopeo", "inspect", "--raw", image).out
        shorter = reduced(image, [len(json.loads(manifest)["layers"])], options.work / "shorter")
        run(network.inside("skopeo", "--insecure-policy", "copy", "--dest-tls-verify=false",
                           shorter, inside("shorter:1")))

    names = {subject: image_of(options, subject) for subject in options.subjects}
    for name in sorted(set(names.values())):
        run(network.inside("skopeo", "--insecure-policy", "copy", "--dest-tls-verify=false", image,
                           inside(f"{name}:1")))
    attach = [bcow, "convert", "--insecure", "--cache", options.work / "layers", "--referrer"]
    if "lazy" in options.subjects:
        run(network.inside(*attach, image, inside(names["lazy"])))
    if "listed" in options.subjects:
        recorded, trace = options.work / "recorded.bcow", options.work / "trace"
        run([bcow, "convert", "--force", image, recorded])
        trace.unlink(missing_ok=True)
        bench = remote.Bench(options, network)
        bench.start(("", PROGRAMS[options.program], False), recorded, "--record", trace)
        run(network.inside(*attach, "--prefetch", trace, image, inside(names["listed"])))


def starts(options, network):
    program = PROGRAMS[options.program]
    found = {subject: [] for subject in options.subjects}
    for _ in range(options.rounds):
        for subject in options.subjects:
            with Node.started(subject, image_of(options, subject)) as node:
                drop_caches()
                before, begun = network.received(), time.monotonic()
                node.pull()
                pulled = time.monotonic() - begun
                node.run_in("first", *program)
                first, received = time.monotonic() - begun, network.received() - before
                again = []
                for number in range(AGAIN):
                    begun = time.monotonic()
                    node.run_in(f"again{number}", "/bin/true")
                    again.append(time.monotonic() - begun)
                found[subject].append((first, pulled, received, statistics.median(again)))
                print(f"{subject}: {first:.2f} s, pull {pulled:.2f} s, {received / MIB:.1f} MiB, "
                      f"again {[round(one * 1e3) for one in again]} ms", file=sys.stderr)
    best = {subject: [min(values) for values in zip(*rounds)] for subject, rounds in found.items()}
    reference = best.get("overlayfs")
    rows = []
    for subject, (first, pulled, received, again) in best.items():
        ratios = [first / reference[0], again / reference[3]] if reference else []
        shown = [f"{ratio:.3f}" for ratio in ratios] or ["-", "-"]
        rows.append([NAMES[subject], f"{received / MIB:.1f}", f"{pulled:.2f}", f"{first:.2f}",
                     shown[0], f"{again * 1e3:.0f}", shown[1]])
    table(f"### From the pull to the end of `{' '.join(program)}`",
          ["", "MiB", "pull, s", "pull and first program, s", "/ overlayfs",
           "a further container, ms", "/ overlayfs"], rows)


def busy():
    """CPU seconds of the whole machine, without those of idle and waiting processors."""
    fields = pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    spent = [int(field) for number, field in enumerate(fields) if number not in (3, 4)]
    return sum(spent) / os.sysconf("SC_CLK_TCK")


def processes(bcow):
    """The processes that run the program bcow."""
    wanted, found = os.path.realpath(bcow), []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and os.readlink(f"/proc/{entry}/exe") == wanted:
                found.append(int(entry))
    return found


def nodes(options):
    """A node for each number of containers and each subject, with the image."""
    for count in options.containers:
        for subject in options.subjects:
            with Node.started(subject, "whole") as node:
                node.pull()
                if options.two_images:
                    node.pull(node.second)
                drop_caches()
                yield count, node


def many(options, network):
    rows, references = [], {}
    for count, node in nodes(options):
        before, begun = busy(), time.monotonic()
        for number in range(count):
            node.run_in(number, "/bin/sleep", "1000000", options=("--detach",))
        seconds, cpu = time.monotonic() - begun, busy() - before
        serving = processes(options.bcow)
        memory = sum(map(pss, serving)) / MIB / count
        reference = references.setdefault(count, seconds)
        rows.append([str(count), NAMES[node.subject], f"{seconds:.2f}",
                     f"{seconds / count * 1e3:.0f}", f"{seconds / reference:.2f}",
                     f"{cpu:.1f}", f"{memory:.2f}" if serving else "0"])
        print(" | ".join(rows[-1]), file=sys.stderr)
    table("### Containers of one image", ["containers", "", "until all are up, s", "ms each",
                                          f"/ {options.subjects[0]}", "CPU, s",
                                          "PSS of bcow for each, MiB"], rows)


def dense(options, network):
    rows, references = [], {}
    for count, node in nodes(options):
        ready = pathlib.Path(node.place, "ready")
        ready.mkdir()
        mount = f"type=bind,src={ready},dst=/mnt,options=rbind:rw"
        before, begun = used(), time.monotonic()
        for number in range(count):
            node.run_in(number, "/usr/bin/python3", "-c", USER, f"/mnt/{number}",
                        options=("--detach", "--mount", mount),
                        image=node.second if options.two_images and number % 2 else None)
        up = time.monotonic() - begun
        while len(os.listdir(ready)) < count:
            time.sleep(0.01)
        seconds, memory = time.monotonic() - begun, (used() - before) / MIB
        time.sleep(30)
        rest = (used() - before) / MIB
        figures = (seconds, memory, rest)
        ratios = [f"{one / other:.2f}"
                  for one, other in zip(figures, references.setdefault(count, figures))]
        rows.append([str(count), NAMES[node.subject], f"{up:.2f}", f"{seconds:.2f}", ratios[0],
                     f"{memory:.0f}", ratios[1], f"{rest:.0f}", ratios[2]])
        print(" | ".join(rows[-1]), file=sys.stderr)
    first = options.subjects[0]
    table("### Containers that import numpy and map 100 MB",
          ["containers", "", "until all are up, s", "until all have read, s", f"/ {first}",
           "memory of the machine, MiB", f"/ {first}", "after 30 s, MiB", f"/ {first}"], rows)


def main():
    support.need("containerd", "ctr", "containerd-shim-runc-v2", "runc", "skopeo",
                 "docker-registry", "mkfs.erofs", root=True)
    print(machine())
    version = support.run("containerd", "--version").out.decode()
    print(re.search(r" v?(\d\S*)", version)[0].strip())
    # Ends containers, daemons and mounts, if containerd does not get the signal too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    Node.setUpClass()
    try:
        with remote.Network(OPTIONS.work) as network:
            if not OPTIONS.prepared:
                prepare(OPTIONS, network)
            if OPTIONS.part != "prepare":
                {"starts": starts, "many": many, "dense": dense}[OPTIONS.part](OPTIONS, network)
    finally:
        Node.doClassCleanups()


if __name__ == "__main__":
    main()
