#!/usr/bin/env python3
"""Measures writable mounts: bcow beside ext4, overlayfs (on ext4, of EROFS, on xfs and btrfs with
reflinks) and fuse-overlayfs, in one run.

    cargo build --release --bin bcow
    benches/union.py --work DIR [--only write-once,fio,...] [--subjects native,overlay,bcow]
                     [--rounds 3] [--json FILE]

Each subject gets the same files as its lower, and a fresh upper for each sample; subjects take
turns within a round, tables have medians over the rounds. Defaults take some minutes; the papers'
sizes are asked for by options. Prints Markdown, with the paper's result beside each row, and writes
JSON. Needs root (mounts, dropping the page cache), rustc and the measured programs; a missing
program is named and left out. "Cold": with the page cache dropped and a new daemon.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import databases
import papers
import subjects
import tools
import workloads
from measure import Failed, machine, run
from results import Results

HERE = pathlib.Path(__file__).resolve().parent
PARTS = {"start": workloads.start, "write-once": workloads.write_once,
         "write-many": workloads.write_many, "fio": workloads.fio, "storms": workloads.storms,
         "unpack": workloads.unpack, "instances": workloads.instances,
         "append": workloads.append, "sync": workloads.sync, "fsync": workloads.fsync,
         "postgres": lambda bench: databases.measure(bench, databases.Postgres),
         "mariadb": lambda bench: databases.measure(bench, databases.MariaDb),
         "created": databases.created, "tools": tools.measure}


def size_of(text):
    return (int(text[:-1]) << {"K": 10, "M": 20, "G": 30}[text[-1]] if text[-1] in "KMG"
            else int(text))


def sizes_of(text):
    return [(one, size_of(one)) for one in text.split(",")]


class Bench:
    def __init__(self, args):
        self.args, self.work, self.bcow = args, args.work, args.bcow
        self.mount_options, self.convert_options = args.mount_options, args.convert_options
        self.results, self.failures = Results(), []
        self.strokes = self.work / "strokes"
        run(["rustc", "--edition", "2021", "-O", "-o", self.strokes, HERE / "strokes.rs"])
        self.measured = []
        for kind in subjects.ALL:
            if kind.name in args.subjects:
                one = kind(self)
                lack = one.missing()
                if lack:
                    print(f"left out: {one.name}: {lack}", flush=True)
                else:
                    self.measured.append(one)

    # Operations of the parts.

    def stroke(self, what, **arguments):
        """Runs a command of strokes.rs; returns its result."""
        command = [str(self.strokes), what,
                   *[f"{name}={value}" for name, value in arguments.items()]]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            raise Failed(f"{' '.join(command)}: {done.stderr.strip()}")
        return json.loads(done.stdout)

    def seconds(self, *command):
        return run(command).wall

    @contextlib.contextmanager
    def tree(self, name):
        """A directory for a lower; it is removed together with the lowers that subjects made from
        it."""
        path = self.work / name
        path.mkdir()
        try:
            yield path
        finally:
            for subject in self.measured:
                if path in subject.lowers:
                    subject.drop(path)
            subjects.thin(path)

    def small_files(self, tree, directories, files, size):
        """d000/f000 and so on, each with its own content."""
        noise = os.urandom(size // 2 + 8)
        for directory in range(directories):
            (tree / f"d{directory:03}").mkdir()
            for file in range(files):
                head = b"%d/%d " % (directory, file)
                data = head + noise + bytes(32 + directory % 64 for _ in range(size))
                (tree / f"d{directory:03}" / f"f{file:03}").write_bytes(data[:size])

    def rounds(self, each):
        """The subjects in turn, in another order in each round. A subject that fails is named, and
        left out of the rest of the part."""
        failed = set()
        for number in range(self.args.rounds):
            turn = number % len(self.measured)
            for subject in self.measured[turn:] + self.measured[:turn]:
                if subject.name in failed:
                    continue
                try:
                    each(subject)
                except (Failed, OSError, subprocess.SubprocessError) as error:
                    failed.add(subject.name)
                    self.failures.append(subject.name)
                    print(f"FAILED: {subject.name}: {str(error).strip()[-600:]}", flush=True)

    def prepare(self, tree):
        """Makes the lowers first, so that no round includes that time."""
        for subject in self.measured:
            subject.lower(tree)
        os.sync()

    def run(self):
        for part in PARTS:
            if not self.args.only or part in self.args.only:
                begin = time.monotonic()
                PARTS[part](self)
                print(f"{part}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
                self.save()
        return 1 if self.failures else 0

    def save(self):
        if self.args.json:
            self.args.json.write_text(json.dumps([{"part": part, "what": row, "unit": unit,
                                                   "paper": papers.result(part, row),
                                                   "values": values} for (part, row, unit), values
                                                  in self.results.values.items()], indent=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [kind.name for kind in subjects.ALL]
    words = lambda text: text.split(",")
    parser.add_argument("--bcow", type=pathlib.Path, default=pathlib.Path("target/release/bcow"))
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()),
                        help="where lowers and uppers go: eight times the largest tree")
    parser.add_argument("--only", type=words, help="some parts: " + ", ".join(PARTS))
    parser.add_argument("--subjects", type=words, default=[
                            name for name in names if name not in ("bcow-plain", "bcow-pool",
                                                              "bcow-writeback")],
                        help="some of: " + ", ".join(names))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--sizes", type=sizes_of, default=sizes_of("1K,64K,4M,100M"),
                        help="write-once; the papers': 1K,64K,4M,100M,1G,10G")
    parser.add_argument("--many-size", type=size_of, default=size_of("128M"),
                        help="write-many; the paper's: 2G")
    parser.add_argument("--fio-size", type=size_of, default=size_of("64M"), help="the paper's: 40G")
    parser.add_argument("--fio-random", type=size_of, default=size_of("32M"),
                        help="at most this much at random in small pieces")
    parser.add_argument("--storm-files", type=int, default=5000)
    parser.add_argument("--instances", type=lambda text: [int(one) for one in text.split(",")],
                        default=[1, 2, 5, 10, 20])
    parser.add_argument("--instance-files", type=int, default=100,
                        help="to be written in each instance")
    parser.add_argument("--append-size", type=size_of, default=size_of("16M"),
                        help="the paper's: 2G")
    parser.add_argument("--sync-files", type=int, default=500)
    parser.add_argument("--fsyncs", type=int, default=300)
    parser.add_argument("--scale", type=int, default=5,
                        help="of the databases: pgbench's scale, and the number of 10,000 rows in "
                             "each of sysbench's 8 tables")
    parser.add_argument("--seconds", type=float, default=5, help="of pgbench and sysbench")
    parser.add_argument("--rootfs", type=pathlib.Path,
                        help="tools: a Debian root file system with git, dpkg and python3, such as "
                             "umoci unpacks from the real image of the tests")
    parser.add_argument("--debs", type=pathlib.Path, help="tools: a directory of its packages")
    parser.add_argument("--mount-options", type=str.split, default=[], help="more for bcow mount")
    parser.add_argument("--convert-options", type=str.split, default=[],
                        help="more for bcow convert")
    args = parser.parse_args()
    unknown = set(args.only or []) - set(PARTS) | set(args.subjects) - set(names)
    if unknown:
        parser.error(f"not known: {', '.join(sorted(unknown))}")
    if os.geteuid() != 0:
        sys.exit("union.py: needs root (mounts, dropping the page cache)")
    args.bcow = args.bcow.resolve()
    print(f"{machine()}; {args.rounds} rounds; union.py {' '.join(sys.argv[1:])}", flush=True)
    args.work = pathlib.Path(tempfile.mkdtemp(prefix="bcow-bench-", dir=args.work.resolve()))
    # Database servers run as ordinary users below it.
    args.work.chmod(0o755)
    code = 1
    try:
        code = Bench(args).run()
    finally:
        subjects.unmount_below(args.work)
        shutil.rmtree(args.work, ignore_errors=True)
    sys.exit(code)


signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
main()
