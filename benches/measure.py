"""Shared parts of the benchmarks: the cost of a command, tables, the daemons of mounts."""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

MIB = 1 << 20
# The tables of this run, for the file that BCOW_BENCH_JSON names.
TABLES = []


class Failed(Exception):
    """A command failed."""


class Cost:
    """The cost of a run."""

    def __init__(self, wall, cpu, rss):
        self.wall, self.cpu, self.rss = wall, cpu, rss


def run(command, stdin=None, stdout=subprocess.DEVNULL):
    """Runs a command to its end; returns its cost, including its children."""
    start = time.monotonic()
    process = subprocess.Popen(list(map(str, command)), stdin=stdin, stdout=stdout,
                               stderr=subprocess.PIPE)
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.monotonic() - start
    if process.returncode != 0:
        raise Failed(f"{' '.join(map(str, command))}: exit {process.returncode}\n"
                     f"{errors.decode(errors='replace')[-2000:]}")
    return Cost(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def best(rounds, once):
    costs = [once() for _ in range(rounds)]
    return Cost(min(c.wall for c in costs), min(c.cpu for c in costs), max(c.rss for c in costs))


def drop_caches():
    os.sync()
    pathlib.Path("/proc/sys/vm/drop_caches").write_text("3\n")


def disk_bytes(path):
    return os.stat(path).st_blocks * 512


def machine():
    """One line about the machine."""
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo")
                if line.startswith("model name")), "?")
    return f"{os.cpu_count()} cores, {cpu}, Linux {os.uname().release}"


def table(title, head, rows):
    print(f"\n{title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)
    if path := os.environ.get("BCOW_BENCH_JSON"):
        TABLES.append({"title": title.strip("# "), "head": head, "rows": rows})
        commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], stdout=subprocess.PIPE,
                                cwd=pathlib.Path(__file__).parent, text=True).stdout.strip()
        about = {"date": time.strftime("%Y-%m-%d"), "commit": commit, "machine": machine(),
                 "command": f"benches/{pathlib.Path(sys.argv[0]).name}", "tables": TABLES}
        pathlib.Path(path).write_text(json.dumps(about, ensure_ascii=False, indent=1) + "\n")


def have(tool):
    return shutil.which(tool) is not None


def process_cpu(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def process_rss(pid):
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def process_resident(pid):
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


def daemon_of(marker):
    """The newest process with the mount point in its command line; 0 for a kernel mount."""
    newest = 0
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                line = pathlib.Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
                if marker.encode() in line:
                    newest = max(newest, int(entry))
    return newest
