#!/usr/bin/python3
"""Runs the end-to-end suites side by side, each in a process of its own.

    tests/e2e/run.py [--jobs N] [--limit SECONDS] [--total SECONDS] [SUITE...]

SUITE is a module such as test_serve; without one, all suites run. Each suite has its own directory
of scratch files below $BCOW_E2E (default target/e2e), and a log in target/e2e-logs. The trees that
umoci unpacks, and what `bcow convert` makes without options, are shared. A suite that does not end
within the limits prints where its threads are and is killed with all its processes, so that a
process which waits forever costs minutes of a run and not the whole of it. The exit status is 0 if
every suite passed.
"""

import argparse
import contextlib
import faulthandler
import glob
import itertools
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import support

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
LOGS = os.path.join(TOP, "target", "e2e-logs")
# The longest suites begin first, so that none of them runs alone at the end.
LONGEST = ["test_fresh_machine", "test_real_image", "test_export", "test_containers",
           "test_union_semantics", "test_serve", "test_kernel_client", "test_union_crash"]
# Suites that run beside no other, at the end: `bcow run` makes mount namespaces. Where mounts do
# not propagate, each has a copy of all mounts of that moment, so those of other suites would stay.
ALONE = ["test_run"]
# Seconds between the request for the threads' stacks and the kill.
GRACE = 5


class Suite:
    """A running suite."""

    def __init__(self, name, scratch, end):
        self.name = name
        self.scratch = scratch
        self.end = end
        self.log = os.path.join(LOGS, f"{name}.log")
        # Commands without privilege work below it.
        os.chmod(self.scratch, 0o755)
        self.begin = time.monotonic()
        self.cpu = 0
        path = os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": path, "BCOW_E2E": self.scratch}
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", __file__, "--in-process", name],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, cwd=TOP,
                start_new_session=True)

    def seconds(self):
        return time.monotonic() - self.begin

    def result(self):
        """What ended the suite, or None while it runs."""
        pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        if pid:
            code = self.process.returncode = os.waitstatus_to_exitcode(status)
            # Of the suite and its children; daemons are not counted.
            self.cpu = usage.ru_utime + usage.ru_stime
            return "passed" if code == 0 else f"failed with {code}"
        if time.monotonic() < self.end:
            return None
        # The suite registered this signal for the stacks of its threads.
        self.process.send_signal(signal.SIGUSR1)
        time.sleep(GRACE)
        kill(processes_of(self.scratch))
        # A process that waits in the kernel may outlive even that; it is left behind.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=GRACE)
        return "killed: it did not end in time"

    def clear(self):
        """Unmounts and removes the scratch files that the suite left."""
        unmount(self.scratch)
        attempt("rm", "-rf", "--one-file-system", self.scratch)


def new_directory(parent):
    """A directory with a short name: the path of a socket has at most 108 bytes."""
    for number in itertools.count():
        path = os.path.join(parent, str(number))
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
            return path


def processes_of(scratch):
    """Processes that have the environment of a suite: daemons have other sessions and parents."""
    mark = b"BCOW_E2E=" + os.fsencode(scratch)
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb") as environ:
                if mark in environ.read().split(b"\0"):
                    yield int(entry)


def kill(processes):
    for process in processes:
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)


def attempt(*command, seconds=60):
    """Runs a command that may wait forever, as on a mount whose server is stuck: it is then left
    behind."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        print(f"left behind: {' '.join(command)}", flush=True)


def unmount(directory):
    """Detaches what is still mounted below a directory."""
    with open("/proc/self/mounts") as table:
        places = [line.split()[1].encode().decode("unicode_escape") for line in table]
    for place in reversed(places):
        if place.startswith(directory + "/"):
            attempt("umount", "-l", place)


class Result(unittest.TextTestResult):
    """Prints what a test took: the time and the CPU time since the end of the test before it, so
    with the preparation of its class."""

    def startTestRun(self):
        self.before = self.now()

    def stopTest(self, test):
        super().stopTest(test)
        now = self.now()
        seconds, cpu = (after - before for after, before in zip(now, self.before))
        self.before = now
        if seconds > 1:
            self.stream.writeln(f"        {seconds:.0f} s, CPU {cpu:.1f} s")

    def now(self):
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return time.monotonic(), sum(one.ru_utime + one.ru_stime for one in used)


def in_process(name):
    """Runs one suite here."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    unittest.main(module=None, argv=["run.py", name],
                  testRunner=unittest.TextTestRunner(verbosity=2, resultclass=Result))


def run(names, options, scratch):
    """Runs the suites; returns the names of those that did not pass."""
    waiting = [name for name in LONGEST if name in names]
    waiting += [name for name in names if name not in waiting + ALONE]
    waiting += [name for name in ALONE if name in names]
    begin = time.monotonic()
    running, failed = [], []
    while waiting or running:
        if time.monotonic() > begin + options.total:
            failed += waiting
            waiting = []
        while waiting and len(running) < (1 if waiting[0] in ALONE else options.jobs):
            directory = new_directory(scratch)
            end = min(time.monotonic() + options.limit, begin + options.total)
            running.append(Suite(waiting.pop(0), directory, end))
        time.sleep(0.1)
        for suite in list(running):
            result = suite.result()
            if result is None:
                continue
            running.remove(suite)
            print(f"[{time.monotonic() - begin:5.0f} s] {suite.name}: {result}, "
                  f"{suite.seconds():.0f} s, CPU {suite.cpu:.0f} s", flush=True)
            suite.clear()
            if result != "passed":
                failed.append(suite.name)
                with open(suite.log, errors="replace") as log:
                    print(log.read()[-100_000:], flush=True)
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=max(4, os.cpu_count() or 4),
                        help="suites that run at the same time")
    parser.add_argument("--limit", type=float, default=2400, help="seconds for one suite")
    parser.add_argument("--total", type=float, default=3000, help="seconds for all suites")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("suites", nargs="*")
    options = parser.parse_args()
    if options.in_process:
        in_process(options.suites[0])
        return
    names = options.suites or sorted(os.path.basename(path)[:-3] for path
                                     in glob.glob(os.path.join(HERE, "test_*.py")))
    os.makedirs(LOGS, exist_ok=True)
    # Commands without privilege work there too, and the home directory may be private.
    scratch = support.reachable(support.WORK)
    with tempfile.TemporaryDirectory(prefix="trees-", dir=scratch) as trees:
        os.chmod(trees, 0o755)
        os.environ["BCOW_TREES"] = trees
        failed = run(names, options, scratch)
    if failed:
        sys.exit(f"end to end: failed: {' '.join(failed)}")
    print(f"end to end: {len(names)} suites passed")


if __name__ == "__main__":
    main()
