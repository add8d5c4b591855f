"""Generated sequences of layers: bcow and the kernel's overlayfs merge them into the same tree.

sequences.py generates the layers; tests/oracle/overlay.py makes the expected tree. A sequence that
fails is reduced to a few entries before it is printed; `sequences.py SEED` prints the whole.

$BCOW_SEEDS is a range of seeds to try instead, as `1000-1999`.
"""

import concurrent.futures
import contextlib
import os
import shutil
import tempfile
import time
import unittest

from support import (WORK, bcow, blob_path, kernel_at_least, kernel_mounted, manifest_in, mounted,
                     need, run)
import overlay
import sequences
import tree

SEEDS = range(70)
# The time limit of the reduction of a failing sequence.
SHRINK_SECONDS = 40


@contextlib.contextmanager
def scratch():
    """A tmpfs, and a directory on a disk for bcow's images: the kernel mounts no image on a
    tmpfs."""
    directory = tempfile.mkdtemp(prefix="merge-", dir=WORK)
    ram = os.path.join(directory, "ram")
    os.mkdir(ram)
    run("mount", "-t", "tmpfs", "-o", "mode=700", "tmpfs", ram)
    try:
        yield directory, ram
    finally:
        run("umount", ram)
        shutil.rmtree(directory)


def flattened(source, directory):
    """The tree of one image of all layers. The kernel mounts it, which is faster than a daemon."""
    image = os.path.join(directory, "image.bcow")
    if kernel_at_least(6, 12):
        bcow("convert", "--plain", "-j1", source, image)
        with kernel_mounted(image, "file") as where:
            return tree.dump(where)
    bcow("convert", source, image)
    with mounted(image) as where:
        return tree.dump(where)


def stacked(source, directory):
    """The tree of a stack that bcow mounts."""
    layout = os.path.join(directory, "layout")
    bcow("convert", "-j1", source, f"oci:{layout}:t")
    bcow("fsck", f"oci:{layout}:t")
    with mounted(f"oci:{layout}:t") as where:
        return tree.dump(where)


def plain(source, directory):
    """The tree of a plain stack that the kernel mounts, with a device for each layer."""
    layout = os.path.join(directory, "layout")
    bcow("convert", "--plain", "-j1", source, f"oci:{layout}:t")
    *layers, stack = blobs_of(layout)
    # Short names, since mount(2) takes one page of options.
    for number, layer in enumerate(layers):
        os.symlink(layer, os.path.join(directory, str(number)))
    devices = ",".join(f"device={number}" for number in range(len(layers)))
    with contextlib.chdir(directory), kernel_mounted(stack, "file", devices) as where:
        return tree.dump(where)


def blobs_of(layout):
    """The files of the one image of a layout: the layers, lowest first, and the stack."""
    layers = manifest_in(layout, "t")["layers"]
    return [blob_path(layout, layer["digest"]) for layer in layers]


def exported(source, directory):
    """The tree of a stack after an export, layer by layer."""
    layout, out = os.path.join(directory, "layout"), os.path.join(directory, "exported")
    bcow("convert", "-j1", source, f"oci:{layout}:t")
    bcow("export", "-j1", f"oci:{layout}:t", "--to", f"oci:{out}:t", "--compress=none")
    return flattened(f"oci:{out}:t", directory)


WAYS = {"flattened": flattened, "stacked": stacked, "plain": plain, "exported": exported}


def ways():
    return [way for way in WAYS if way != "plain" or kernel_at_least(6, 12)]


def differences(expected, layers, way, directory, ram):
    """The differences between bcow's tree and overlayfs's. A refusal by bcow is a difference
    too."""
    layout, out = os.path.join(ram, "layout"), os.path.join(directory, "out")
    os.makedirs(out)
    try:
        return list(tree.differences(expected,
                                     WAYS[way](sequences.write_layout(layers, layout), out)))
    except AssertionError as error:
        return [str(error)]
    finally:
        shutil.rmtree(layout)
        shutil.rmtree(out)


@contextlib.contextmanager
def stack(ram):
    with tempfile.TemporaryDirectory(dir=ram) as directory:
        yield overlay.Stack(directory)


def check(seed):
    """Tries one sequence; returns a message if it fails."""
    with scratch() as (directory, ram):
        with stack(ram) as truth:
            layers = sequences.build(seed, truth)
            expected = truth.dump()
        for way in ways():
            found = differences(expected, layers, way, directory, ram)
            if found:
                return (f"seed {seed}, {way}:\n" + "\n".join(found[:5]) +
                        "\n" + smaller(layers, way, directory, ram))
    return None


def smaller(layers, way, directory, ram):
    """Reduces the sequence while it still fails; returns it as text."""
    deadline = time.monotonic() + SHRINK_SECONDS

    def weight(layers):
        return sum(1000 + len(repr(one)) for entries in layers for one in entries) + len(layers)

    def short(path):
        return path.replace(b"n" * 255, b"n*255")

    def fails(candidate):
        with stack(ram) as truth:
            # An entry may depend on one that was removed.
            candidate = [truth.unpack(entries) for entries in candidate]
            return candidate, differences(truth.dump(), candidate, way, directory, ram)

    def cuts(current):
        """Smaller candidates: without layers, then without runs of entries, then with simpler
        entries."""
        for number in range(len(current)):
            yield current[:number] + current[number + 1:]
        for number, entries in enumerate(current):
            size = len(entries)
            while size:
                for at in range(0, len(entries), size):
                    yield (current[:number] + [entries[:at] + entries[at + size:]]
                           + current[number + 1:])
                size //= 2
            for at, one in enumerate(entries):
                plain = overlay.Entry(one.path, one.kind, link=one.link, rdev=one.rdev,
                                      mode=0o777 if one.kind == "symlink" else 0o644)
                if one.kind != "dir" and plain != one:
                    yield (current[:number] + [entries[:at] + [plain] + entries[at + 1:]]
                           + current[number + 1:])

    layers, found = fails(layers)
    progress = True
    while progress and time.monotonic() < deadline:
        progress = False
        for candidate in cuts(layers):
            if time.monotonic() > deadline:
                break
            candidate, now = fails(candidate)
            if now and weight(candidate) < weight(layers):
                layers, found, progress = candidate, now, True
                break
    shown = [f"  layer {number}: {one.kind} {short(one.path)!r}"
             + (f" -> {short(one.link)!r}" if one.link else "")
             for number, entries in enumerate(layers) for one in entries]
    return "cut down to:\n" + "\n".join(shown + found[:5])


class Merge(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        need(root=True, fuse=True)

    def test_generated_layers_look_as_in_overlayfs(self):
        seeds = SEEDS
        if "BCOW_SEEDS" in os.environ:
            first, last = os.environ["BCOW_SEEDS"].split("-")
            seeds = range(int(first), int(last) + 1)
        # Processes, not threads: the judge changes its working directory.
        with concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as pool:
            failed = [message for message in pool.map(check, seeds) if message]
        self.assertEqual(failed, [],
                         f"{len(failed)} of {len(seeds)} sequences:\n" + "\n\n".join(failed[:5]))
