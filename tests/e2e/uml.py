"""A Linux kernel as an ordinary process (User-Mode Linux), as a client of `bcow serve`.

The guest sees the host's files, read-only. Its network is a user-mode one (slirp4netns), so that
neither a network device nor root is needed: the host is 10.0.2.2 there.
"""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time

import support

HERE = os.path.join(support.TOP, "tests", "e2e", "guest")
MEMORY = "256M"


class GuestFailed(AssertionError):
    """A guest did not complete its steps."""


def need():
    support.need("linux.uml", "slirp4netns", "nbd-client", "gcc", "mkfs.ext4", "mkfs.xfs",
                 "mkfs.btrfs")


def boot(steps, disks=(), memory=MEMORY, timeout=120):
    """Boots a guest that runs the steps (see guest/init.py) and then loses power; returns their
    values. The disks are files, /dev/ubda and so on in the guest."""
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="uml-", dir=support.WORK))
        # The path of a Unix socket has at most 107 bytes, and the path of a checkout may be long.
        short = stack.enter_context(tempfile.TemporaryDirectory(prefix="uml-"))
        with open(os.path.join(scratch, "steps"), "w") as file:
            json.dump([[name, arguments] for name, arguments in steps], file)
        preload = os.path.join(scratch, "xstate.so")
        support.run("gcc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", preload,
                    os.path.join(HERE, "xstate.c"))
        wire = os.path.join(short, "net")
        with open(os.path.join(scratch, "network"), "wb") as log:
            network = subprocess.Popen(["slirp4netns", "--target-type=bess", wire],
                                       stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                       start_new_session=True)
        stack.callback(network.wait)
        # slirp4netns has two processes.
        stack.callback(os.killpg, network.pid, signal.SIGKILL)
        wait_for(wire, network)
        command = ["linux.uml", f"mem={memory}",
                   *(f"ubd{number}={path}" for number, path in enumerate(disks)),
                   "root=none", "rootfstype=hostfs", "rootflags=/",
                   "ro", "quiet", "con=null", "con0=null,fd:1", "ssl=null", f"uml_dir={short}",
                   f"vec0:transport=bess,dst={wire},depth=128,gro=1", "init=/usr/bin/python3", "--",
                   os.path.join(HERE, "init.py"), os.path.join(scratch, "steps")]
        environment = {"LD_PRELOAD": preload, "HOME": short}
        guest = support.run(*command, timeout=timeout, check=False, env=environment)
        text = guest.out.decode(errors="replace")
    results = [json.loads(line[2:]) for line in text.splitlines() if line.startswith("@ ")]
    if len(results) != len(steps):
        raise GuestFailed(f"the guest did {len(results)} of {len(steps)} steps:\n"
                          f"{text[-6000:]}{guest.err.decode(errors='replace')[-2000:]}")
    return [result["value"] for result in results]


def wait_for(path, process, seconds=20):
    deadline = time.monotonic() + seconds
    while not os.path.exists(path):
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"{process.args[0]} made no {path}")
        time.sleep(0.01)
