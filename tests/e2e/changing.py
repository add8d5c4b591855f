"""A program that makes the same random changes in a directory of a mount and in a plain copy of it,
and compares both.

    changing.py DIRECTORY KIND SEED

DIRECTORY belongs to this program; KIND is the name of the subject (subjects.py). The program goes
on until its standard input ends. It prints a line for each round; if the two directories differ, it
prints how and fails.
"""

import contextlib
import itertools
import os
import select
import sys
import tempfile
import types

import model
from support import WORK, run

STEPS = 40


def check(pair):
    """Compares all files, also the open ones without a name."""
    # A write to a mapped page changes the time of the file only if the page is clean, and the next
    # step makes pages of the mount clean.
    pair.model.forget_maps()
    pair.mount.forget_maps()
    # The kernel's cache would hide what the process of the mount has lost.
    for path in pair.mount.entries():
        with contextlib.suppress(OSError):
            drop_pages(os.open(pair.mount.at(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW))
    for slot in sorted(pair.mount.files):
        with contextlib.suppress(OSError):
            drop_pages(os.dup(pair.mount.files[slot]))
        pair.step("fstat", {"slot": slot})
        pair.step("pread", {"slot": slot, "offset": 0, "length": model.MOST_BYTES})
    pair.compare()


def drop_pages(descriptor):
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def main(directory, kind, seed):
    with tempfile.TemporaryDirectory(prefix="changing-", dir=WORK) as scratch:
        copy = os.path.join(scratch, "copy")
        run("cp", "-a", directory, copy)
        mount = types.SimpleNamespace(name=kind, where=directory, remount=lambda: None)
        pair = model.Pair(mount, copy)
        steps = model.Generator(int(seed), pair).sequence(1 << 30)
        rounds = 0
        while not select.select([sys.stdin], [], [], 0)[0]:
            for name, arguments in itertools.islice(steps, STEPS):
                if name == "seek_hole":
                    # The kernel asks for holes before it writes what was changed in a mapping.
                    pair.step("fsync", {"slot": arguments["slot"]})
                # The mount is for one user.
                pair.step(name, {key: value for key, value in arguments.items() if key != "user"})
            check(pair)
            rounds += 1
            print(rounds, flush=True)
        check(pair)
        pair.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
