#!/usr/bin/env python3
"""Measures layers and stacks: conversion in parallel, rebuilds, lookups through many layers, sizes.

    benches/layers.py --layout DIR:REF --tar FLAT.tar [--bcow target/release/bcow]
                      [--work DIR] [--rounds 3] [--only parallel|rebuild|lookup|size]
                      [--files 20000] [--layers 1,10,100,500,1000]

Prints Markdown tables. The layers of the first two parts have the flat tar's files, distributed to
layers of equal size and compressed with gzip. The best of --rounds counts. Needs root (mounts,
dropping the page cache). A peer that is not installed, or that lacks the feature, is named and left
out.
"""

import argparse
import contextlib
import ctypes
import hashlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time

TOP = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TOP / "fixtures" / "oci"), str(TOP / "tests" / "oracle")]
import ocilib  # noqa: E402
import overlay  # noqa: E402
from measure import (MIB, Failed, best, daemon_of, disk_bytes, drop_caches,  # noqa: E402
                     have, machine, process_cpu, run, table)


def gzip_of(path):
    """Compresses a file; returns the new path."""
    out = path.with_suffix(".gz")
    with open(out, "wb") as stream:
        run(["pigz" if have("pigz") else "gzip", "-n", "-6", "-c", path], stdout=stream)
    return out


def deal(tar, count, directory):
    """Distributes the files of a tar to `count` tars of about equal size. The first also has all
    other entries."""
    paths = [directory / f"part-{number}.tar" for number in range(count)]
    outs = [tarfile.open(path, "w", format=tarfile.PAX_FORMAT) for path in paths]
    filled, where = [0] * count, {}
    with tarfile.open(tar) as source:
        for member in source:
            # GNU tar's sparse members are written by Python as whole files.
            member.sparse = None
            if member.isreg():
                number = filled.index(min(filled))
                outs[number].addfile(member, source.extractfile(member))
                filled[number] += member.size
                where[member.name] = number
            else:
                outs[where.get(member.linkname, 0) if member.islnk() else 0].addfile(member)
    for out in outs:
        out.close()
    return paths


def aside(function, *arguments):
    """Calls a function in its own process; returns its result (through JSON).

    Otherwise its memory would count as that of every later command: the peak of a command includes
    that of the process that starts it.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        code = 1
        try:
            with os.fdopen(write, "w") as out:
                json.dump(function(*arguments), out, default=str)
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    if os.waitpid(child, 0)[1] != 0:
        sys.exit("layers.py: a helper process failed")
    return json.loads(text)


def small_files(files, count, directory):
    """Tars of small files, with the same directories in all layers."""
    paths = [directory / f"part-{number}.tar" for number in range(count)]
    for number, path in enumerate(paths):
        with open(path, "wb") as out:
            for folder in range(files // 1000):
                out.write(ocilib.entry(b"d%03d/" % folder, ocilib.DIR))
            for file in range(number, files, count):
                out.write(ocilib.entry(b"d%03d/file-%d" % (file // 1000, file),
                                       data=b"%d\n" % file))
            out.write(ocilib.END)
    return paths


def digest_of(path):
    with open(path, "rb") as data:
        return "sha256:" + hashlib.file_digest(data, "sha256").hexdigest()


def make_layout(tars, path):
    """An OCI layout of gzip layers; returns the source argument."""
    layout, blobs, diff_ids = ocilib.Layout(str(path)), [], []
    for tar in tars:
        diff_ids.append(digest_of(tar))
        packed = gzip_of(tar)
        descriptor = {"mediaType": ocilib.MEDIA_TAR_GZIP, "digest": digest_of(packed),
                      "size": packed.stat().st_size}
        packed.rename(layout.blob_path(descriptor["digest"]))
        blobs.append(descriptor)
    layout.index([(layout.manifest(blobs, diff_ids), "t", None)])
    return f"oci:{path}:t"


def remove(path):
    shutil.rmtree(path, ignore_errors=True)


class Bench:
    def __init__(self, args):
        self.args, self.work = args, args.work
        self.report = args.work / "report.json"

    def convert(self, *arguments, cpus=None):
        """The cost of one conversion; stores its report."""
        command = [self.args.bcow, "convert", "--json", *arguments]
        if cpus:
            command = ["taskset", "-c", cpus, *command]
        with open(self.report, "wb") as out:
            cost = run(command, stdout=out)
        self.reported = json.loads(self.report.read_text())
        return cost

    # Five layers, one and two processors.

    def parallel(self):
        parts = self.work / "five"
        parts.mkdir()
        tars = [pathlib.Path(path) for path in aside(deal, self.args.tar, 5, parts)]
        size = sum(tar.stat().st_size for tar in tars)
        source = make_layout(tars, parts / "layout")
        for tar in tars:
            tar.unlink()
        out = self.work / "out"
        rows, costs = [], {}
        for name, destination in (("into layers", f"oci:{out}:t"), ("flattened", str(out))):
            for cpus, jobs in (("0", "1"), ("0,1", "2")):
                def once():
                    remove(out)
                    out.unlink(missing_ok=True) if out.is_file() else None
                    return self.convert(source, destination, "-j", jobs, cpus=cpus)

                cost = costs[name, jobs] = best(self.args.rounds, once)
                one = costs[name, "1"]
                rows.append([f"five layers of {size / 5e6:.0f} MB {name}, {jobs} "
                             f"CPU{'s' * (jobs != '1')}", f"{cost.cpu:.2f}", f"{cost.wall:.2f}",
                             f"{one.wall / cost.wall:.2f}", f"{cost.rss / MIB:.0f}"])
            remove(out)
            out.unlink(missing_ok=True)
        table("### Layers in parallel",
              ["what", "CPU s", "wall s", "times as fast", "peak RSS MiB"], rows)
        remove(parts)

    # Twenty layers, one of them new.

    def rebuild(self):
        parts = self.work / "twenty"
        parts.mkdir()
        rows = self.rebuild_of("the image", aside(deal, self.args.tar, 20, parts), parts)
        parts.mkdir()
        rows += self.rebuild_of("200,000 small files", aside(small_files, 200_000, 20, parts),
                                parts)
        table("### Twenty layers, one of them changed",
              ["of", "what is converted", "CPU s", "wall s", "of the whole", "merge ms", "inodes",
               "merge ms / 100,000", "peak RSS MiB"], rows)

    def rebuild_of(self, what, tars, parts):
        tars = [pathlib.Path(path) for path in tars]
        before = make_layout(tars, parts / "before")
        with tarfile.open(tars[9], "a", format=tarfile.PAX_FORMAT) as changed:
            changed.addfile(tarfile.TarInfo("changed"))
        after = make_layout(tars, parts / "after")
        alone = make_layout(tars[9:10], parts / "alone")
        for tar in tars:
            tar.unlink()
        cache, warm, base, out = (self.work / name for name in ("cache", "warm", "base", "out"))
        self.convert(before, f"oci:{base}:t", "--cache", cache)
        rows, whole = [], None
        for name, source, kind in (("all twenty layers", after, "fresh"),
                                   ("that layer alone", alone, "fresh"),
                                   ("one layer is new, 19 in the cache", after, "cache"),
                                   ("one layer is new, 19 in the layout", after, "layout"),
                                   ("nothing is new, all in the layout", before, "layout"),
                                   ("the same, --no-verify", before, "unverified")):
            merges = []

            def once():
                remove(out)
                remove(warm)
                options = []
                if kind == "cache":
                    # Hardlinks are enough: a conversion replaces files and never writes into them.
                    run(["cp", "-al", cache, warm])
                    options = ["--cache", warm]
                elif kind != "fresh":
                    run(["cp", "-al", base, out])
                if kind == "unverified":
                    options.append("--no-verify")
                cost = self.convert(source, f"oci:{out}:t", *options)
                merges.append(self.reported["merge_milliseconds"])
                return cost

            cost = best(self.args.rounds, once)
            whole = whole or cost
            entries, merge = self.reported["stack"]["entries"], min(merges)
            rows.append([what, name, f"{cost.cpu:.2f}", f"{cost.wall:.2f}",
                         f"{cost.wall / whole.wall:.3f}", f"{merge}", f"{entries:,}",
                         f"{merge * 1e5 / entries:.0f}", f"{cost.rss / MIB:.0f}"])
        for directory in (cache, warm, base, out, parts):
            remove(directory)
        return rows

    # Lookups.

    def tree(self, count, rng):
        """Entries of `count` layers that together hold all files."""
        layers = [{} for _ in range(count)]
        paths = []
        for number in range(self.args.files):
            path = f"d{number // 100:03}/f{number % 100:02}"
            paths.append(path)
            layers[rng.randrange(count) if count > 1 else 0][path] = b"%d\n" % number
        return layers, paths

    def lookup(self):
        rows = []
        for count in self.args.layers:
            rng = random.Random(count)
            layers, paths = self.tree(count, rng)
            rng.shuffle(paths)
            directory = self.work / f"lookup-{count}"
            directory.mkdir()
            tars, unpacked = [], directory / "unpacked"
            unpacked.mkdir()
            (unpacked / "e").mkdir()
            for number, files in enumerate(layers):
                folders = sorted({os.path.dirname(path) for path in files})
                tars.append(b"".join([ocilib.entry(f"{folder}/".encode(), ocilib.DIR)
                                      for folder in folders]
                                     + [ocilib.entry(path.encode(), data=data)
                                        for path, data in files.items()]) + ocilib.END)
                (unpacked / str(number)).mkdir()
                for folder in folders:
                    (unpacked / str(number) / folder).mkdir()
                for path, data in files.items():
                    (unpacked / str(number) / path).write_bytes(data)
            layout = ocilib.Layout(str(directory / "source"))
            layout.index([(layout.manifest([layout.blob(tar, ocilib.MEDIA_TAR) for tar in tars],
                                           [ocilib.digest_of(tar) for tar in tars]), "t", None)])
            source = f"oci:{directory / 'source'}:t"
            self.convert(source, f"oci:{directory / 'zstd'}:t")
            self.convert(source, f"oci:{directory / 'plain'}:t", "--plain")
            mnt = directory / "mnt"
            mnt.mkdir()
            for name, mount in (
                    ("**bcow mount** of the stack, zstd",
                     lambda: run([self.args.bcow, "mount", f"oci:{directory / 'zstd'}:t", mnt])),
                    ("**plain stack**, kernel mount, a device per layer",
                     lambda: mount_plain(directory / "plain", mnt)),
                    ("overlayfs, a directory per layer", lambda: overlay.mount_overlay(
                         unpacked, [str(n) for n in reversed(range(count))] + ["e"] * (count == 1),
                         mnt))):
                try:
                    rows.append([name, str(count), *self.storm(mount, mnt, paths)])
                except (Failed, OSError, ValueError) as error:
                    rows.append([name, str(count), "-", "-", "-", "-",
                                 f"refused: {str(error).strip().splitlines()[-1][:80]}"])
            if count == self.args.layers[0]:
                rows.append(["*a directory of ext4, no mount*", "-",
                             *self.storm(lambda: mnt.rmdir() or mnt.symlink_to(unpacked / "0"), mnt,
                                         paths)])
            remove(directory)
        rows.sort(key=lambda row: row[0])
        table(f"### open, fstat and close of {self.args.files:,} random paths (microseconds each)",
              ["mount", "layers", "cold, wall", "cold, CPU", "warm, wall", "warm, CPU", "mount ms"],
              rows)

    def storm(self, mount, mnt, paths):
        """Microseconds for each path, cold and warm, and milliseconds to mount; the best of the
        rounds."""
        samples = []
        for _ in range(self.args.rounds):
            drop_caches()
            begin = time.monotonic()
            mount()
            os.listdir(mnt)
            sample = [(time.monotonic() - begin) * 1000]
            pid = daemon_of(str(mnt))
            try:
                for _ in range(2):
                    cpu, begin = process_cpu(pid) if pid else 0, (
                        time.monotonic(), time.process_time())
                    for path in paths:
                        file = os.open(f"{mnt}/{path}", os.O_RDONLY)
                        os.fstat(file)
                        os.close(file)
                    spent = time.process_time() - begin[1] + (process_cpu(pid) - cpu if pid else 0)
                    sample += [(time.monotonic() - begin[0]) * 1e6 / len(paths),
                               spent * 1e6 / len(paths)]
            finally:
                if mnt.is_symlink():
                    mnt.unlink()
                    mnt.mkdir()
                else:
                    overlay.unmount(str(mnt))
            samples.append(sample)
        lowest = [min(column) for column in zip(*samples)]
        return [f"{value:.1f}" for value in lowest[1:]] + [f"{lowest[0]:.0f}"]

    # Sizes.

    def size(self):
        source, tar = f"oci:{self.args.layout}", self.args.tar
        out = self.work / "out"
        rows, gzip_bytes = [], None

        def row(name, size, cost=None, note=""):
            rows.append([name, f"{size / 1e6:.1f}", f"{size / gzip_bytes:.2f}",
                         f"{cost.cpu:.2f}" if cost else "-", f"{cost.wall:.2f}" if cost else "-",
                         f"{cost.rss / MIB:.0f}" if cost else "-", note])

        for options, name in (([], "**layers and stack**, zstd 3"),
                              (["--compress", "zstd:9"], "**layers and stack**, zstd 9"),
                              (["--block-size", "1M"],
                               "**layers and stack**, zstd 3, 1 MiB blocks"),
                              (["--dedup-lower"], "**layers and stack**, zstd 3, --dedup-lower"),
                              (["--plain"], "**layers and stack**, --plain")):
            def once():
                remove(out)
                return self.convert(source, f"oci:{out}:t", *options)

            cost = best(self.args.rounds if not options else 1, once)
            if gzip_bytes is None:
                gzip_bytes = sum(layer["source_bytes"] for layer in self.reported["layers"])
                row(f"*the source:* {len(self.reported['layers'])} gzip layers", gzip_bytes)
            stack, layers = self.reported["stack"]["file_bytes"], sum(
                layer["file_bytes"] for layer in self.reported["layers"])
            row(name, stack + layers, cost, f"stack {stack / 1e6:.2f} MB")
        remove(out)
        for options, name in (([], "**bcow**, flattened, zstd 3"),
                              (["--plain"], "**bcow**, flattened, --plain")):
            cost = best(1, lambda: self.convert(source, out, *options))
            row(name, disk_bytes(out), cost, "what upper layers hide is not in it")
            out.unlink()
        if have("mkfs.erofs"):
            tree = self.work / "tree"
            tree.mkdir()
            run(["tar", "-xpf", tar, "--xattrs", "--xattrs-include=*", "-C", tree])
            # mkfs.erofs 1.5 fails on names of 255 bytes; the made image has a few under this path.
            odd = "--exclude-regex=^srv/odd/names"
            codecs = subprocess.run(["mkfs.erofs", "--help"], capture_output=True, text=True)
            codec = "zstd,level=3" if "zstd" in codecs.stdout + codecs.stderr else "lz4hc"
            for name, options in ((codec, [f"-z{codec}", "-C65536"]), ("uncompressed", [])):
                with contextlib.suppress(Failed):
                    cost = run(["mkfs.erofs", "--quiet", *options, odd, out, tree])
                    row(f"mkfs.erofs, {name}, flattened", disk_bytes(out), cost)
                out.unlink(missing_ok=True)
            remove(tree)
        else:
            print("not installed, left out: mkfs.erofs")
        table("### Sizes",
              ["what", "MB", "of the gzip layers", "CPU s", "wall s", "peak RSS MiB", ""], rows)


def mount_plain(layout, mnt):
    """Mounts a plain stack by fsconfig(2), which takes each option in its own call: the option page
    of mount(2) holds few devices."""
    index = json.loads((layout / "index.json").read_text())
    blob = lambda digest: str(layout / "blobs" / digest.replace(":", "/"))
    manifest = json.loads(pathlib.Path(blob(index["manifests"][0]["digest"])).read_text())
    *layers, stack = [blob(layer["digest"]) for layer in manifest["layers"]]
    libc = ctypes.CDLL(None, use_errno=True)

    def call(number, *arguments):
        result = libc.syscall(ctypes.c_long(number), *arguments)
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return result

    fsopen, fsconfig, fsmount, move_mount = 430, 431, 432, 429
    SET_FLAG, SET_STRING, CREATE = 0, 1, 6
    context = call(fsopen, b"erofs", 0)
    try:
        call(fsconfig, context, SET_FLAG, b"ro", None, 0)
        call(fsconfig, context, SET_STRING, b"source", os.fsencode(stack), 0)
        for layer in layers:
            call(fsconfig, context, SET_STRING, b"device", os.fsencode(layer), 0)
        call(fsconfig, context, CREATE, None, None, 0)
        mount = call(fsmount, context, 0, 1)
        try:
            # Moves the mount of the descriptor itself: MOVE_MOUNT_F_EMPTY_PATH.
            call(move_mount, mount, b"", -100, os.fsencode(str(mnt)), 4)
        finally:
            os.close(mount)
    finally:
        os.close(context)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", required=True, help="an OCI layout, DIR:REF, with gzip layers")
    parser.add_argument("--tar", required=True, type=pathlib.Path,
                        help="the same image as one flat tar")
    parser.add_argument("--bcow", type=pathlib.Path, default=pathlib.Path("target/release/bcow"))
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()),
                        help="where output may go")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", type=int, default=20000)
    parser.add_argument("--layers", type=lambda text: [int(one) for one in text.split(",")],
                        default=[1, 10, 100, 500, 1000])
    parser.add_argument("--only", choices=["parallel", "rebuild", "lookup", "size"])
    args = parser.parse_args()
    args.bcow, args.tar = args.bcow.resolve(), args.tar.resolve()
    if os.geteuid() != 0:
        sys.exit("layers.py: needs root (mounts, dropping the page cache)")
    print(f"{machine()}, {args.tar.stat().st_size / 1e6:.0f} MB of tar")
    args.work = pathlib.Path(tempfile.mkdtemp(prefix="bcow-bench-", dir=args.work.resolve()))
    try:
        bench = Bench(args)
        for name in ("parallel", "rebuild", "lookup", "size"):
            if args.only in (None, name):
                getattr(bench, name)()
    finally:
        remove(args.work)


signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
main()
