#!/usr/bin/env python3
"""Measures bcow beside its peers, in one run, on one image.

    benches/compare.py --layout DIR:REF --tar FLAT.tar [--bcow target/release/bcow]
                       [--work DIR] [--rounds 3] [--only convert|read|growth]

Prints Markdown tables: CPU seconds (user + system, children included), wall seconds, peak memory
and output size of each conversion, and of each mount. The best of --rounds counts, because machines
are shared. The tables include ratios to the limit (`zstd -3` of the same tar). Needs root
(mounts, dropping the page cache). A peer that is not installed is named and left out.
"""

import argparse
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from measure import (MIB, Failed, best, daemon_of, disk_bytes, drop_caches, have, machine,
                     process_cpu, process_rss, run, table)

# mkfs.erofs 1.5 fails on names of 255 bytes; the made image has a few under this path.
NO_ODD_NAMES = "--exclude-regex=^srv/odd/names"


def layer_files(layout):
    """The layer blobs of the one image of an OCI layout directory."""
    import json

    directory = pathlib.Path(layout.rpartition(":")[0])
    blob = lambda digest: directory / "blobs" / digest.replace(":", "/")
    entry = json.loads((directory / "index.json").read_text())["manifests"][0]
    manifest = json.loads(blob(entry["digest"]).read_text())
    return [blob(layer["digest"]) for layer in manifest["layers"]]


def conversions(args):
    """Each conversion: name, command, output (None: standard output is discarded)."""
    tar, out = str(args.tar), args.work / "out"
    bcow = [str(args.bcow), "-q", "convert"]
    listed = [
        ("*limit:* `zstd -3 -T1` of the tar",
         ["zstd", "-q", "-f", "-3", "-T1", tar, "-o", f"{out}.zst"], f"{out}.zst"),
        ("**bcow**, zstd 3, -j1", bcow + ["-j1", f"tar:{tar}", f"{out}.bcow"], f"{out}.bcow"),
        ("**bcow**, zstd 3, -j2", bcow + ["-j2", f"tar:{tar}", f"{out}.bcow"], f"{out}.bcow"),
        ("**bcow**, zstd 3, -j2, --no-verify",
         bcow + ["-j2", "--no-verify", f"tar:{tar}", f"{out}.bcow"], f"{out}.bcow"),
        ("mksquashfs, zstd 3, from a directory",
         ["mksquashfs", str(args.tree), f"{out}.sqfs", "-quiet", "-no-progress", "-comp", "zstd",
          "-Xcompression-level", "3", "-noappend"], f"{out}.sqfs"),
        # As sqfstar, of which some versions refuse the level.
        ("mksquashfs, zstd 3, from the tar",
         ["sh", "-c", f"exec mksquashfs - {out}.sqfs -tar -quiet -no-progress -noappend -comp zstd "
                      f"-Xcompression-level 3 < {tar}"], f"{out}.sqfs"),
        ("nydus-image, zstd, chunks of 1 MiB",
         ["nydus-image", "create", "--type", "tar-rafs", "--compressor", "zstd", "--chunk-size",
          "0x100000", "--bootstrap", f"{out}.boot", "--blob", f"{out}.blob", tar], f"{out}.blob"),
        ("tar2ext4, then qemu-img convert -c, zstd",
         ["sh", "-c", f"tar2ext4 -i {tar} -o {out}.ext4 && exec qemu-img convert -c -O qcow2 "
                      f"-o compression_type=zstd {out}.ext4 {out}.qcow2"], f"{out}.qcow2"),
        ("mkfs.erofs, " + args.erofs_codec + ", from a directory",
         ["mkfs.erofs", f"-z{args.erofs_codec}", "-C65536", "--quiet", NO_ODD_NAMES, f"{out}.erofs",
          str(args.tree)], f"{out}.erofs"),
        ("*copy:* `dd conv=fsync` of the tar",
         ["dd", f"if={tar}", f"of={out}.tar", "bs=1M", "conv=fsync"], f"{out}.tar"),
        ("**bcow --plain**, -j2", bcow + ["-j2", "--plain", f"tar:{tar}", f"{out}.plain"],
         f"{out}.plain"),
        ("**bcow --plain**, -j2, --no-verify",
         bcow + ["-j2", "--plain", "--no-verify", f"tar:{tar}", f"{out}.plain"], f"{out}.plain"),
        ("mkfs.erofs, uncompressed, from a directory",
         ["mkfs.erofs", "--quiet", NO_ODD_NAMES, f"{out}.erofs", str(args.tree)], f"{out}.erofs"),
        ("`tar -x`", ["sh", "-c", f"mkdir {out}.d && exec tar -xf {tar} -C {out}.d"], f"{out}.d"),
        ("gunzip of the layers (gzip -dc)",
         ["sh", "-c", "exec gzip -dc " + " ".join(map(str, args.layers)) + " > /dev/null"], None),
        ("**bcow**, zstd 3, -j2, from the gzip layers",
         bcow + ["-j2", f"oci:{args.layout}", f"{out}.bcow"], f"{out}.bcow"),
        ("umoci unpack, from the gzip layers",
         ["umoci", "unpack", "--image", args.layout, f"{out}.d"], f"{out}.d")]
    return [entry for entry in listed if have(entry[1][0])
            and (entry[1][0] != "sh" or have(entry[1][2].split("exec ")[1].split()[0]))]


def remove(path):
    if path and os.path.isdir(path):
        shutil.rmtree(path)
    elif path and os.path.exists(path):
        os.unlink(path)


def bench_convert(args):
    limit = None
    rows = []
    for name, command, output in conversions(args):
        def once():
            remove(output)
            cost = run(command)
            once.bytes = 0 if output is None or os.path.isdir(output) else disk_bytes(output)
            remove(output)
            return cost

        try:
            cost = best(args.rounds, once)
        except Failed as error:
            if "bcow" in name:
                raise
            print(f"left out, for it failed: {error}")
            remove(output)
            continue
        limit = limit or cost
        size = f"{once.bytes / 1e6:.0f}" if once.bytes else "-"
        rows.append([name, f"{cost.cpu:.2f}", f"{cost.cpu / limit.cpu:.2f}", f"{cost.wall:.2f}",
                     f"{cost.wall / limit.wall:.2f}", size, f"{cost.rss / MIB:.0f}"])
    table("### Conversion", ["what", "CPU s", "x limit", "wall s", "x limit", "MB", "peak RSS MiB"],
          rows)


def bench_growth(args):
    """Peak memory of a conversion as the image grows."""
    rows = []
    size = os.path.getsize(args.tar)
    with tempfile.TemporaryDirectory(dir=args.work) as scratch:
        for parts in (1, 2, 4):
            out = os.path.join(scratch, "grown.bcow")

            # Members of noise: content that neither compresses nor repeats.
            def members(parts=parts):
                import tarfile

                read, write = os.pipe()
                child = os.fork()
                if child == 0:
                    os.close(read)
                    with (os.fdopen(write, "wb") as pipe,
                          tarfile.open(fileobj=pipe, mode="w|") as archive,
                          open("/dev/urandom", "rb") as noise):
                        for index in range(parts * 64):
                            info = tarfile.TarInfo(f"noise/{index}")
                            info.size = 8 * MIB
                            archive.addfile(info, noise)
                    os._exit(0)
                os.close(write)
                return read, child

            source, child = members()
            cost = run([str(args.bcow), "-q", "convert", "-j2", "tar:-", out], stdin=source)
            os.close(source)
            os.waitpid(child, 0)
            rows.append([f"{parts * 64 * 8} MiB of noise", f"{cost.rss / MIB:.0f}",
                         f"{cost.wall:.2f}"])
            os.unlink(out)
    out = args.work / "out.bcow"
    cost = run([str(args.bcow), "-q", "convert", "-j2", f"tar:{args.tar}", str(out)])
    rows.append([f"the image, {size / 1e6:.0f} MB of tar", f"{cost.rss / MIB:.0f}",
                 f"{cost.wall:.2f}"])
    os.unlink(out)
    table("### Peak memory of a conversion (zstd 3, -j2)", ["input", "peak RSS MiB", "wall s"],
          rows)


def mounts(args):
    """Each mount: name, the command that mounts on MNT (None for a plain directory), the command
    that unmounts."""
    work, mnt = args.work, str(args.work / "mnt")
    loop = ["mount", "-o", "ro,loop"]
    listed = [("kernel EROFS, uncompressed (bcow --plain file, loop)",
               loop + ["-t", "erofs", str(work / "img.plain"), mnt]),
              ("kernel squashfs, zstd", loop + ["-t", "squashfs", str(work / "img.sqfs"), mnt]),
              ("**bcow mount**, zstd 3", [str(args.bcow), "mount", str(work / "img.bcow"), mnt]),
              ("**bcow mount**, --plain", [str(args.bcow), "mount", str(work / "img.plain"), mnt]),
              ("squashfuse_ll, zstd", ["squashfuse_ll", str(work / "img.sqfs"), mnt]),
              ("erofsfuse, uncompressed", ["erofsfuse", str(work / "img.plain"), mnt]),
              ("fuse-overlayfs over a directory",
               ["fuse-overlayfs", "-o", f"lowerdir={args.tree}:{work / 'empty'}", mnt])]
    return [entry for entry in listed if have(entry[1][0])]


FIND = ["find", ".", "-printf", "%s %u %p\\n"]
READ = ["sh", "-c", "find . -type f -print0 | xargs -0 cat > /dev/null"]
READ_TWO = ["sh", "-c", "find . -type f -print0 | xargs -0 -P2 -n200 cat > /dev/null"]


def bench_read(args):
    mnt = args.work / "mnt"
    mnt.mkdir(exist_ok=True)
    (args.work / "empty").mkdir(exist_ok=True)
    convert = [str(args.bcow), "-q", "convert", "-j2"]
    run(convert + [f"tar:{args.tar}", str(args.work / "img.bcow")])
    run(convert + ["--plain", f"tar:{args.tar}", str(args.work / "img.plain")])
    if have("mksquashfs"):
        remove(args.work / "img.sqfs")
        run(["mksquashfs", str(args.tree), str(args.work / "img.sqfs"), "-quiet", "-no-progress",
             "-comp", "zstd", "-Xcompression-level", "3", "-noappend"])
    rows = []
    for name, command in mounts(args):
        print(f"measuring {name}", file=sys.stderr, flush=True)
        samples = []
        for _ in range(args.rounds):
            drop_caches()
            start = time.monotonic()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            os.listdir(mnt)
            ready = time.monotonic() - start
            pid = daemon_of(str(mnt))
            sample = [ready * 1000]
            try:
                for job in (FIND, FIND, READ, READ, READ_TWO):
                    before = process_cpu(pid) if pid else 0
                    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
                    start = time.monotonic()
                    subprocess.run(job, cwd=mnt, check=True, stdout=subprocess.DEVNULL)
                    wall = time.monotonic() - start
                    after = resource.getrusage(resource.RUSAGE_CHILDREN)
                    cpu = after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime
                    cpu += (process_cpu(pid) - before) if pid else 0
                    sample.append((wall, cpu))
                    if len(sample) == 3:
                        drop_caches()
                sample.append(process_rss(pid) if pid else 0)
            finally:
                subprocess.run(["umount", str(mnt)], check=True)
            samples.append(sample)
        column = lambda i: "{:.2f} / {:.2f}".format(min(s[i][0] for s in samples),
                                                    min(s[i][1] for s in samples))
        rss = max(s[6] for s in samples)
        rows.append([name, f"{min(s[0] for s in samples):.0f}"] + [column(i) for i in range(1, 6)]
                    + [f"{rss / MIB:.0f}" if rss else "-"])
    table("### Mounts (wall s / CPU s, the daemon's included)",
          ["mount", "mount to first ls, ms", "find, cold", "find, warm",
           "read all, page cache cold", "read all, warm", "read all, warm, 2 readers",
           "daemon RSS MiB"], rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", required=True, help="an OCI layout, DIR:REF, with gzip layers")
    parser.add_argument("--tar", required=True, type=pathlib.Path,
                        help="the same image as one flat tar")
    parser.add_argument("--bcow", type=pathlib.Path, default=pathlib.Path("target/release/bcow"))
    parser.add_argument("--work", type=pathlib.Path,
                        help="a directory for output; default: a new temporary one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["convert", "read", "growth"])
    args = parser.parse_args()
    args.bcow, args.tar = args.bcow.resolve(), args.tar.resolve()
    if os.geteuid() != 0:
        sys.exit("compare.py: needs root (mounts, dropping the page cache)")
    made = args.work is None
    args.work = args.work or pathlib.Path(tempfile.mkdtemp(prefix="bcow-bench-"))
    args.work = args.work.resolve()
    args.work.mkdir(exist_ok=True, parents=True)
    args.tree = args.work / "tree"
    if not args.tree.is_dir():
        args.tree.mkdir()
        run(["tar", "-xpf", str(args.tar), "--xattrs", "--xattrs-include=*", "-C", str(args.tree)])
    codecs = subprocess.run(["mkfs.erofs", "--help"], capture_output=True, text=True)
    args.erofs_codec = "zstd,level=3" if "zstd" in codecs.stdout + codecs.stderr else "lz4hc"
    args.layers = layer_files(args.layout)
    for tool in ("zstd", "mksquashfs", "nydus-image", "tar2ext4", "qemu-img", "mkfs.erofs",
                 "umoci", "squashfuse_ll", "erofsfuse", "fuse-overlayfs"):
        if not have(tool):
            print(f"not installed, left out: {tool}")
    print(f"{machine()}, {os.path.getsize(args.tar) / 1e6:.0f} MB of tar")
    try:
        if args.only in (None, "convert"):
            bench_convert(args)
        if args.only in (None, "growth"):
            bench_growth(args)
        if args.only in (None, "read"):
            bench_read(args)
    finally:
        if made:
            shutil.rmtree(args.work)


signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
main()
