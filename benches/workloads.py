"""The workloads of benches/union.py, which are the papers' workloads: one function each."""

import contextlib
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import tempfile
import time

import papers
import tools
from measure import MIB, Failed, drop_caches, have, process_resident, run, table
from results import mib, shown


def write_once(bench):
    """Open, write one byte, close: of files of each size."""
    def count(size):
        return 8 if size <= 4 * MIB else 1

    with bench.tree("once") as tree:
        for name, size in bench.args.sizes:
            for number in range(count(size)):
                bench.stroke("make", file=tree / f"{name}-{number}", size=size, seed=size + number)
        bench.stroke("make", file=tree / "other", size=8192)
        bench.prepare(tree)

        def each(subject):
            def note(row, unit, value):
                bench.results.note("write-once", row, unit, subject, value)

            with subject.instance(tree) as one:
                drop_caches()
                # The very first change has a cost of the mount, not of a file.
                bench.stroke("touch", file=one.path / "other")
                for name, size in bench.args.sizes:
                    files = [one.path / f"{name}-{number}" for number in range(count(size))]
                    before = one.upper_bytes()
                    note(f"{name}: first write, cold", "us",
                         statistics.median(bench.stroke("touch", file=file, at=size // 2)["first"]
                                           for file in files) / 1e3)
                    for file in files:
                        bench.stroke("sync", file=file)
                    after = one.upper_bytes()
                    note(f"{name}: upper after it", "KiB",
                         after and (after - before) / 1024 / len(files))
                    note(f"{name}: write to the same block again", "us", bench.stroke(
                             "touch", file=files[0], at=size // 2, rounds=500)["p50"] / 1e3)
                    if size >= 4 * MIB:
                        note(f"{name}: first write to another block", "us",
                             bench.stroke("touch", file=files[0], at=size // 4, step=4096,
                                          rounds=200)["p50"] / 1e3)
            with subject.instance(tree) as one:
                bench.stroke("touch", file=one.path / "other")
                for name, size in bench.args.sizes:
                    files = [one.path / f"{name}-{number}" for number in range(count(size))]
                    for file in files:
                        run(["cat", file])
                    note(f"{name}: first write, lower cached", "us",
                         statistics.median(bench.stroke("touch", file=file, at=size // 2)["first"]
                                           for file in files) / 1e3)

        bench.rounds(each)
    bench.results.show("write-once", "Write-once: open, write 1 byte, close", bench.measured)


def start(bench):
    """The time from a mount to its first listing, and the memory of the daemon then."""
    directories, files = bench.args.storm_files // 100, 100
    with bench.tree("start") as tree:
        bench.small_files(tree, directories, files, 3000)
        bench.prepare(tree)

        def each(subject):
            # It is a copy, and has no mount.
            if subject.name == "native":
                return

            def note(row, unit, value):
                bench.results.note("start", row, unit, subject, value)

            # What is made once for each image, and kept, is made by the first mount of all.
            first = not subject.has_started
            subject.has_started = True
            for row in (["first mount of the image, and ls, cold"] * first +
                        ["mount of a new upper, and ls, cold", "mount of a new upper, and ls"]):
                if row.endswith("cold"):
                    drop_caches()
                begin = time.monotonic()
                with subject.instance(tree) as one:
                    run(["ls", one.path])
                    note(row, "ms", (time.monotonic() - begin) * 1e3)
                    if row == "mount of a new upper, and ls" and one.daemon:
                        note("daemon: peak memory after it", "MiB", one.rss() / MIB)
                        # Its caches are given back after ten seconds without a request.
                        time.sleep(12)
                        note("daemon: memory at rest", "MiB", process_resident(one.daemon) / MIB)

        bench.rounds(each)
    bench.results.show("start", f"Mounting an image of {bench.args.storm_files:,} files",
                       bench.measured)


def fsync(bench):
    """Blocks of 4 KiB in place in a file, each made durable."""
    count = bench.args.fsyncs
    with bench.tree("fsync") as tree:
        bench.stroke("make", file=tree / "data", size=64 * MIB)
        bench.prepare(tree)

        def each(subject):
            with subject.instance(tree) as one:
                for when in ("first", "next"):
                    done = bench.stroke("durable", file=one.path / "data", count=count)
                    bench.results.note("fsync", f"write of 4 KiB and fdatasync, {when} {count:,}",
                                       "per s", subject, done["count"] / done["seconds"])

        bench.rounds(each)
    bench.results.show("fsync", "Durable writes in place, a file of 64 MiB", bench.measured)


def write_many(bench):
    """Writes some bytes into each block of a large file, then reads: before and after the
    background completes the blocks."""
    with bench.tree("many") as tree:
        bench.stroke("make", file=tree / "big", size=bench.args.many_size)
        bench.prepare(tree)

        def each(subject):
            def note(row, unit, value):
                bench.results.note("write-many", row, unit, subject, value)

            with subject.instance(tree) as one:
                big = one.path / "big"
                drop_caches()
                cpu, rss = one.cpu(), one.rss()
                many = bench.stroke("strew", file=big)
                note("lower cold: all writes", "s", many["seconds"])
                note("lower cold: mean of the writes after the first", "us",
                     many["mean_of_rest"] / 1e3)
                note("lower cold: p99", "us", many["p99"] / 1e3)
                note("lower cold: first write", "us", many["first"] / 1e3)
                note("then 20 % of the blocks read at once: mean", "us",
                     bench.stroke("probe", file=big)["mean"] / 1e3)
                note("then fsync", "s", bench.stroke("sync", file=big)["seconds"])
                note("then 20 % of the blocks read: mean", "us",
                     bench.stroke("probe", file=big, seed=8)["mean"] / 1e3)
                drop_caches()
                note("then 20 % of the blocks read, cache dropped: mean", "us",
                     bench.stroke("probe", file=big, seed=9)["mean"] / 1e3)
                note("daemon: CPU for all of this", "s", one.daemon and one.cpu() - cpu or None)
                note("daemon: peak memory, more than after mounting", "MiB",
                     one.daemon and (one.rss() - rss) / MIB or None)
                note("upper after it", "MiB", mib(one.upper_bytes()))
                one.unmount()
                one.mount()
                run(["cat", big])
                note("mounted again, the same writes: mean", "us",
                     bench.stroke("strew", file=big)["mean"] / 1e3)
            with subject.instance(tree) as one:
                big = one.path / "big"
                run(["cat", big])
                many = bench.stroke("strew", file=big)
                note("lower cached: all writes", "s", many["seconds"])
                note("lower cached: mean of the writes after the first", "us",
                     many["mean_of_rest"] / 1e3)
                note("lower cached: first write", "us", many["first"] / 1e3)
            with subject.instance(tree) as one:
                big = one.path / "big"
                run(["cat", big])
                count = max(1, bench.args.many_size // 4096 // 20)
                many = bench.stroke("strew", file=big, random=1, count=count)
                note("lower cached: 5 % of the blocks at random: mean of the writes after the "
                     "first", "us", many["mean_of_rest"] / 1e3)
                bench.stroke("sync", file=big)
                note("upper after 5 % of the blocks", "MiB", mib(one.upper_bytes()))

        bench.rounds(each)
    bench.results.show("write-many", "Write-many: 410 bytes in every 4 KiB of "
                                     f"{bench.args.many_size // MIB:,} MiB", bench.measured)


def fio(bench):
    """Reads and writes of a file of the lower: the first time and again."""
    if not have("fio"):
        print("left out: fio: not installed")
        return
    jobs = [(f"{how} {what} of {size}", dict(rw=rw, bs=size.lower()))
            for what, kinds in (("writes", (("sequential", "write"), ("random", "randwrite"))),
                                ("reads", (("sequential", "read"), ("random", "randread"))))
            for how, rw in kinds for size in ("4K", "64K", "1M")]
    jobs += [("sequential writes of 1K of each 4K", dict(rw="write:3k", bs="1k", part=4)),
             ("random writes of 1K of each 4K",
              dict(rw="randwrite", bs="1k", blockalign="4k", part=4))]
    with bench.tree("fio") as tree:
        bench.stroke("make", file=tree / "data", size=bench.args.fio_size)
        bench.prepare(tree)

        def each(subject):
            for title, options in jobs:
                with subject.instance(tree) as one:
                    drop_caches()
                    for when in ("first", "again"):
                        side, both = fio_job(bench, one.path / "data", options)
                        bench.results.note("fio", f"{title}, {when}", "MB/s", subject,
                                           side["bw_bytes"] / 1e6)
                        if options["bs"] in ("4k", "1k"):
                            bench.results.note("fio", f"{title}, {when}: p99", "us", subject,
                                               side["clat_ns"]["percentile"]["99.000000"] / 1e3)
                        if when == "first" and "read" not in options["rw"]:
                            bench.results.note("fio", f"{title}, {when}: CPU, daemon's and fio's",
                                               "s", subject, both + one.cpu())

        bench.rounds(each)
    bench.results.show("fio", f"fio, one thread, a file of {bench.args.fio_size // MIB:,} MiB",
                       bench.measured)


def fio_job(bench, file, options):
    options = dict(options)
    size = bench.args.fio_size
    # A job of partial blocks touches each block once, and so writes a quarter of the size.
    amount = size // options.pop("part", 1)
    if options["bs"] in ("4k", "1k") and options["rw"].startswith("rand"):
        amount = min(amount, bench.args.fio_random)
    report = bench.work / "fio.json"
    before = os.times()
    run(["fio", "--name=job", f"--filename={file}", f"--size={size}", f"--io_size={amount}",
         "--ioengine=psync", "--thread", "--allow_file_create=0", "--invalidate=0",
         "--fallocate=none", "--output-format=json", f"--output={report}", "--randseed=7",
         *[f"--{name}={value}" for name, value in options.items()]])
    after = os.times()
    output = report.read_text()
    # fio prints its warnings first.
    job = json.loads(output[output.index("{\n"):])["jobs"][0]
    spent = (after.children_user + after.children_system - before.children_user
             - before.children_system)
    return job["read" if "read" in options["rw"] else "write"], spent


def storms(bench):
    """Many small files: stat, read, create, change and remove."""
    directories, files = bench.args.storm_files // 100, 100
    with bench.tree("storms") as tree:
        bench.small_files(tree, directories, files, 3000)
        bench.prepare(tree)

        def each(subject):
            def note(row, seconds):
                bench.results.note("storms", row, "ms", subject, seconds * 1e3)

            def storm(root, what, **more):
                return bench.stroke("each", root=root, do=what, directories=directories,
                                    files=files, **more)["seconds"]

            with subject.instance(tree) as one:
                path = one.path
                find = ["find", path, "-printf", "%s %u %m\n"]
                drop_caches()
                note("find, cold", bench.seconds(*find))
                note("find", bench.seconds(*find))
                note("stat of all files", storm(path, "stat"))
                note("open and close of all files", storm(path, "open"))
                drop_caches()
                note("reading all files, cold", storm(path, "read"))
                note("reading all files", storm(path, "read"))
                # A tenth of the files.
                new = dict(prefix="n", bytes=1024, count=bench.args.storm_files // 10)
                note("creating a tenth as many, 1 KiB each", storm(path, "create", **new))
                note("unlinking them", storm(path, "unlink", **new))
                part, copy = path / "d000", path / "copy"
                note("cp -a of 100 files", bench.seconds("cp", "-a", part, copy))
                note("rm -rf of the copy", bench.seconds("rm", "-rf", copy))
                note("chmod -R of all", bench.seconds("chmod", "-R", "g+w", path))
                note("chmod -R of all, again", bench.seconds("chmod", "-R", "g-w", path))
                note("chown -R of all", bench.seconds("chown", "-R", "1234:1234", path))
                bench.results.note("storms", "upper after all of this", "MiB", subject,
                                   mib(one.upper_bytes()))
                note("rm -rf of all, changed",
                     bench.seconds("find", path, "-mindepth", "1", "-delete"))
            with subject.instance(tree) as one:
                note("rm -rf of all, as they were",
                     bench.seconds("rm", "-rf", *sorted(one.path.iterdir())))
                bench.results.note("storms", "upper after it", "MiB", subject,
                                   mib(one.upper_bytes()))

        bench.rounds(each)
    bench.results.show("storms", f"Trees: {bench.args.storm_files:,} files of 3,000 bytes in "
                                 f"{directories} directories", bench.measured)


def unpack(bench):
    """`tar x` of a source tree, and what a build does with it after that."""
    directories, files = bench.args.storm_files // 100, 100
    with bench.tree("unpack") as tree:
        bench.stroke("make", file=tree / "other", size=8192)
        bench.prepare(tree)
        archive = bench.work / "unpack.tar"
        with tempfile.TemporaryDirectory(dir=bench.work) as source:
            bench.small_files(pathlib.Path(source), directories, files, 12_000)
            run(["tar", "-C", source, "-cf", archive, "."])
            bare = tools.repository(bench, source)

        def each(subject):
            def note(row, seconds):
                bench.results.note("unpack", row, "ms", subject, seconds * 1e3)

            with subject.instance(tree) as one:
                to = one.path / "sources"
                to.mkdir()
                run(["cat", archive])
                note("tar x", bench.seconds("tar", "-C", to, "-xf", archive))
                note("then sync -f", bench.seconds("sync", "-f", to))
                note("reading the files",
                     bench.seconds("find", to, "-type", "f", "-exec", "cat", "{}", "+"))
                note("cp -a of them", bench.seconds("cp", "-a", to, one.path / "copy"))
                note("rm -rf of the copy", bench.seconds("rm", "-rf", one.path / "copy"))
                note("git clone of them", bench.seconds("git", "clone", "-q", "--no-hardlinks",
                                                        bare, one.path / "clone"))

        bench.rounds(each)
        archive.unlink()
        shutil.rmtree(bare)
    bench.results.show("unpack", f"Unpacking {bench.args.storm_files:,} files of 12,000 bytes",
                       bench.measured)


def together(bench, commands):
    """Runs commands of strokes.rs that begin at the same moment; returns the seconds until the last
    has ended, and their results."""
    read, write = os.pipe()
    running = [subprocess.Popen([str(bench.strokes), *map(str, command), "wait=1"], stdin=read,
                                stdout=subprocess.PIPE, text=True, close_fds=True)
               for command in commands]
    os.close(read)
    time.sleep(0.1)
    start = time.monotonic()
    os.close(write)
    answers = [process.communicate()[0] for process in running]
    wall = time.monotonic() - start
    if any(process.returncode for process in running):
        raise Failed("strokes.rs has failed in one of the instances")
    return wall, [json.loads(answer) for answer in answers]


def instances(bench):
    """Writes and unlinks in up to twenty instances of one image at the same time."""
    files, size = bench.args.instance_files, 128 << 10
    with bench.tree("instances") as tree:
        bench.small_files(tree, 2, files, size)
        bench.prepare(tree)

        def each(subject):
            for count in bench.args.instances:
                with contextlib.ExitStack() as stack:
                    ones = [stack.enter_context(subject.instance(tree)) for _ in range(count)]
                    for one in ones:
                        bench.stroke("each", root=one.path, do="read", directories=2, files=files)
                    for what, more in (("write", dict(bytes=4096)), ("unlink", {})):
                        # Files of d000 are written; of all, those of d000 too, are unlinked.
                        words = dict(do=what, directories=1 if what == "write" else 2, files=files,
                                     **more)
                        wall, _ = together(bench,
                                           [["each", f"root={one.path}",
                                             *[f"{name}={value}" for name, value in words.items()]]
                                            for one in ones])
                        number = files * words["directories"]
                        title = ("first write of 4 KiB to files of 128 KiB" if what == "write"
                                 else "unlink of files of the lower, half of them written")
                        bench.results.note("instances", f"{title}, {count} at once: each instance",
                                           "per s", subject, number / wall)

        bench.rounds(each)
    bench.results.show("instances", "Instances of one image at once", bench.measured)


def append(bench):
    """Danaus's Fileappend, in up to twenty instances at the same time."""
    with bench.tree("append") as tree:
        bench.stroke("make", file=tree / "log", size=bench.args.append_size)
        bench.prepare(tree)

        def each(subject):
            for count in bench.args.instances:
                with contextlib.ExitStack() as stack:
                    ones = [stack.enter_context(subject.instance(tree)) for _ in range(count)]
                    drop_caches()
                    wall, _ = together(bench, [["append", f"file={one.path}/log"] for one in ones])
                    bench.results.note("append", f"{count} at once: until all have ended", "s",
                                       subject, wall)
                    # If the free space is measured, the first instance's value is that of all.
                    stored = [one.upper_bytes()
                              for one in (ones[:1] if subject.by_free_space else ones)]
                    bench.results.note("append", f"{count} at once: uppers after it", "MiB",
                                       subject, mib(None if None in stored else sum(stored)))

        bench.rounds(each)
    bench.results.show("append",
                       f"Appending 1 MiB to a file of {bench.args.append_size // MIB:,} MiB",
                       bench.measured)


def sync(bench):
    """The cost of durability of the first changes, by policy."""
    files = bench.args.sync_files
    policies = {"overlay": [("default", ()), ("volatile", ("volatile",))],
                "fuse-overlayfs": [("default", ()), ("volatile", ("volatile",))],
                "bcow": [(policy, ("--sync", policy))
                         for policy in ("strict", "batch=10", "batch=50", "volatile")],
                "native": [("", ())]}
    with bench.tree("sync") as tree:
        bench.small_files(tree, files // 100, 100, 8000)
        (tree / "large").mkdir()
        bench.small_files(tree / "large", files // 500, 100, 128 << 10)
        bench.prepare(tree)
        rows = {}

        def each(subject):
            for policy, options in policies.get(subject.name, []):
                with subject.instance(tree, options=options) as one:
                    bench.stroke("each", root=one.path, do="read", directories=files // 100,
                                 files=100)
                    name = f"{subject.title} {policy}".strip()
                    cost = rows.setdefault(name, {})

                    def note(what, value):
                        cost.setdefault(what, []).append(value)
                        bench.results.note("sync", f"{what}, {policy or 'as it is'}", "ms", subject,
                                           value)

                    small = bench.stroke("each", root=one.path, do="write",
                                         directories=files // 100, files=100)
                    note("8 KB, all", small["seconds"] * 1e3)
                    note("8 KB, p50 us", small["p50"] / 1e3)
                    large = bench.stroke("each", root=one.path / "large", do="write",
                                         directories=files // 500, files=100)
                    note("128 KiB, all", large["seconds"] * 1e3)
                    start = time.monotonic()
                    run(["sync", "-f", one.path])
                    one.unmount()
                    os.sync()
                    note("unmount and sync", (time.monotonic() - start) * 1e3)

        bench.rounds(each)
        head = list(dict.fromkeys(what for cost in rows.values() for what in cost))
        table(f"### Synchronising: {files:,} files of 8 KB and {files // 500 * 100:,} of 128 KiB, "
              "1 byte into each, ms", ["", *head],
              [[name, *[shown(statistics.median(cost[what])) if what in cost else "-"
                        for what in head]] for name, cost in rows.items()])
        print(papers.result("sync", "all"), flush=True)
