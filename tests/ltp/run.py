#!/usr/bin/python3
"""Runs the file system tests of the Linux Test Project (LTP) in writable mounts, and prints which
of them fail although they pass in the first one.

    tests/ltp/run.py SOURCE INSTALLED SUBJECT [SUBJECT...]

SOURCE is LTP's source tree and INSTALLED the directory of `make install`, of which some parts are
enough: tests without a program are left out. A SUBJECT is one of tests/e2e/subjects.py, the first
mostly `plain` or `overlayfs`. The image has the programs and a directory for the tests, so they are
executed from the mount, too. Needs root. BCOW and BCOW_E2E are as for the end-to-end tests;
BCOW_LTP=REGEX chooses some tests by their names.
"""

import collections
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "e2e"))

import subjects
import support

# Lists of tests in `runtest`, and those of them that are meant.
LISTS = {"syscalls": "", "fs": "", "fs_perms_simple": "", "dio": "", "ltp-aiodio.part3": "fsx"}
# They test other file systems than that of their directory.
ELSEWHERE = re.compile(r"\.(needs_device|mount_device|all_filesystems|needs_rofs|format_device)\b"
                       r"|tst_acquire_device")
NOT_MEANT = re.compile(r"(proc|read_all|quota_remount|isofs|fs_fill|binfmt_misc|squashfs)")
# Limit in seconds for the longest runs.
LONGEST = 5
TIMEOUT = 120
SKIPPED = 32


def tests(source, installed):
    """Gives the names and command lines."""
    files = {}
    for directory, _, names in os.walk(os.path.join(source, "testcases")):
        for name in names:
            base, end = os.path.splitext(name)
            if end == ".c":
                files[base] = os.path.join(directory, name)
    found = {}
    for name, prefix in LISTS.items():
        with open(os.path.join(source, "runtest", name)) as lines:
            for line in lines:
                words = line.split(None, 1)
                if len(words) != 2 or line.startswith("#") or not words[0].startswith(prefix):
                    continue
                test, command = words[0], words[1].strip()
                program = re.search(r"(?:.*;\s*)?(\S+)", command).group(1)
                text = support.read_text(files[program]) if program in files else ""
                if NOT_MEANT.match(test) or test.endswith("_16") or ELSEWHERE.search(text) or (
                        not re.search(os.environ.get("BCOW_LTP", ""), test)):
                    continue
                if os.path.exists(os.path.join(installed, "testcases/bin", program)):
                    found[test] = re.sub(r"(-L|-i) (\d\d+)(s?)\b(?= )", shorter, command)
    return found


def shorter(match):
    option, number, unit = match.groups()
    is_time = option == "-L" or unit
    return f"{option} {min(int(number), LONGEST) if is_time else number}{unit}"


def run(command, where):
    """Runs a test; gives `ok`, `skipped` or how it failed, and its output."""
    top = os.path.join(where, "ltp")
    directory = os.path.join(where, "tmp")
    environment = os.environ | {"LTPROOT": top, "TMPDIR": directory, "LTP_COLORIZE_OUTPUT": "n",
                                "PATH": f"{top}/testcases/bin:{os.environ['PATH']}"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(["sh", "-c", command], env=environment, cwd=directory,
                                   stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                   start_new_session=True)
        try:
            code = process.wait(TIMEOUT)
            outcome = {0: "ok", SKIPPED: "skipped"}.get(code, f"failed with {code}")
        except subprocess.TimeoutExpired:
            outcome = f"ran for {TIMEOUT} s"
        # Also processes that a test has left.
        subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)
        process.wait()
        log.seek(0)
        return outcome, log.read().decode(errors="replace")


def end_users_of(where):
    """Kills what tests have left in sessions of their own."""
    for process in filter(str.isdigit, os.listdir("/proc")):
        directory = os.path.join("/proc", process)
        links = [os.path.join(directory, name) for name in ("cwd", "root", "exe")]
        with contextlib.suppress(OSError):
            links += [entry.path for entry in os.scandir(os.path.join(directory, "fd"))]
        for link in links:
            with contextlib.suppress(OSError):
                if (os.readlink(link) + "/").startswith(where + "/"):
                    os.kill(int(process), signal.SIGKILL)


def run_all(name, lower, commands):
    outcomes, outputs = {}, {}
    with subjects.shown(name, lower) as subject:
        for test, command in commands.items():
            begun = time.monotonic()
            outcomes[test], outputs[test] = run(command, subject.where)
            if os.environ.get("BCOW_LTP_LOG"):
                print(f"{name}: {test}: {outcomes[test]} ({time.monotonic() - begun:.1f} s)",
                      flush=True)
        end_users_of(subject.where)
    return outcomes, outputs


def main(source, installed, *names):
    def plant(top):
        shutil.copytree(installed, os.path.join(top, "ltp"), symlinks=True)
        os.mkdir(os.path.join(top, "tmp"))
        os.chmod(os.path.join(top, "tmp"), 0o1777)
        os.chmod(top, 0o755)

    commands = tests(source, installed)
    with tempfile.TemporaryDirectory(prefix="ltp-", dir=support.WORK) as directory:
        os.chmod(directory, 0o755)
        return compare(names, subjects.Lower(directory, plant), commands)


def compare(names, lower, commands):
    subjects.need_for(*names)
    first, code = None, 0
    for name in names:
        outcomes, outputs = run_all(name, lower, commands)
        first = first or outcomes
        counts = collections.Counter(outcome if outcome in ("ok", "skipped") else "failed"
                                     for outcome in outcomes.values())
        worse = [test for test, outcome in outcomes.items() if outcome != first[test] == "ok"]
        print(f"{name}: {len(outcomes)} tests, {counts['ok']} ok, {counts['skipped']} skipped, "
              f"{counts['failed']} failed; worse than {names[0]}: {' '.join(worse) or 'none'}",
              flush=True)
        for test in worse:
            print(f"--- {name}: {test} ({shlex.quote(commands[test])}): {outcomes[test]}\n"
                  f"{outputs[test][-3000:]}", flush=True)
            code = 1
    return code


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
