#!/usr/bin/python3
"""Makes the files of a version in fixtures/compat, and reads such files with any later version.

    BCOW=target/debug/bcow tests/e2e/frozen.py fixtures/compat/VERSION

The directory must not exist: the files of a version are made once, at its release. Needs root.
"""

import contextlib
import json
import os
import shutil
import sys
import tempfile

import support
import tree
from support import TOP, bcow, kernel_mounted, mounted, read_text, run, served, write_file

sys.path.insert(0, os.path.join(TOP, "fixtures", "oci"))
import ocilib  # noqa: E402
from ocilib import CHR, DIR, END, LINK, SYM, entry  # noqa: E402

# As in packages of software: compressible, and each block differs.
LARGE = b"".join(b"%06d of a file that is copied in blocks\n" % n for n in range(5000))
# The names of disks, with how each continues: written, in a snapshot, forked.
DISKS = ("base.bcow", "disk.bcow", "disk.bcow@clean", "fork.bcow")
MIB = 1 << 20

# Names of the documents, and the commands that print them, in a copy of the directory.
DOCUMENTS = {
    "inspect-image": "inspect image.bcow", "inspect-stack": "inspect oci:store:tag",
    "inspect-layer": "inspect layer.bcow", "inspect-disk": "inspect disk.bcow",
    "map-image": "map image.bcow", "map-disk": "map disk.bcow", "ls": "ls -R oci:store:tag",
    "fsck": "fsck --data disk.bcow", "diff": "diff plain.bcow oci:store:tag",
    "diff-upper": "diff image.bcow --upper upper", "diff-disk": "diff base.bcow disk.bcow",
    "snapshots": "snapshot list disk.bcow", "version": "version",
    "convert": "convert --plain image.bcow made/plain.bcow",
    "convert-layout": "convert oci:store:tag oci:made/layout:tag",
    "convert-disk": "convert disk.bcow raw:made/disk",
    "copy": "copy oci:store:tag oci:made/copy:tag",
    "create": "create -b base.bcow made/new.bcow --backing-dir .",
    "commit": "commit image.bcow --upper upper made/layer.bcow",
    "export": "export image.bcow --to tar -o made/tar", "extract": "extract image.bcow made/tree",
    "fork": "fork disk.bcow@clean fork-2.bcow", "snapshot": "snapshot fork-2.bcow now",
    "rollback": "rollback fork-2.bcow now", "snapshot-rm": "snapshot rm disk.bcow late",
    "commit-archive": "commit image.bcow --upper upper tar:made/layer.tar",
    "commit-layout": "commit image.bcow --upper upper oci:made/committed:tag",
    "commit-disk": "commit disk.bcow sealed.bcow",
    "create-alone": "create -s 1M made/alone.bcow",
    "create-ext4": "create -b image.bcow --fs ext4 made/fs.bcow --backing-dir .",
    "export-layout": "export image.bcow --to oci:made/exported:tag",
    "convert-containerd-cache": "convert oci:made/exported:tag containerd-cache:made/cache",
    "export-raw": "export disk.bcow --to raw -o made/raw",
    "copy-file": "copy image.bcow made/x.bcow",
    "fsck-upper": "fsck upper image.bcow", "fork-upper": "fork upper made/upper",
    "snapshot-upper": "snapshot made/upper one", "snapshots-upper": "snapshot list made/upper",
    "rollback-upper": "rollback made/upper one", "map-upper-disk": "map root.bcow",
    "pools": "pool list",
}


def image(directory):
    """An ordinary image of three layers with links, a device, a whiteout, an opaque directory,
    attributes and a large file."""
    layers = [
        (entry(b"etc/", DIR), entry(b"etc/config", data=b"one\n" * 100, mode=0o640, uid=5, gid=7),
         entry(b"etc/removed", data=b"removed above"), entry(b"old/", DIR),
         entry(b"old/below", data=b"hidden"), entry(b"large", data=LARGE),
         entry(b"dev/", DIR), entry(b"dev/null", CHR, mode=0o666, dev=(1, 3)),
         entry(b"run", data=b"#!/bin/sh\n", mode=0o4755,
               xattrs=[("security.capability", ocilib.capability(1 << 10)), ("user.key", b"\0v")])),
        (entry(b"etc/.wh.removed"), entry(b"old/", DIR), entry(b"old/.wh..wh..opq"),
         entry(b"old/new", data=b"n" * 5000), entry(b"link", SYM, link=b"etc/config"),
         entry(b"again", LINK, link=b"large")),
        (entry(b"\xc3\xa9t\xc3\xa9", data=b"name", mtime_ns=1706933106123456789),
         entry(b"zeros", data=bytes(100_000))),
    ]
    layout = ocilib.Layout(directory)
    tars = [b"".join(entries) + END for entries in layers]
    blobs = [layout.blob(ocilib.gz(one), ocilib.MEDIA_TAR_GZIP) for one in tars]
    made = layout.manifest(blobs, [ocilib.digest_of(one) for one in tars],
                           config={"Cmd": ["/run"], "Env": ["A=b"]})
    layout.index([(made, "tag", None)])


def change(where):
    """Changes the tree of a mount in every way that an upper stores."""
    support.overwrite(f"{where}/large", 70_000, b"changed", sync=True)
    os.truncate(f"{where}/zeros", 90_001)
    support.append_to(f"{where}/etc/config", b"more")
    write_file(f"{where}/etc/created", b"c" * 200_000)
    os.chown(f"{where}/run", 1, 2)
    os.setxattr(f"{where}/etc", "user.added", b"value")
    os.remove(f"{where}/link")
    shutil.rmtree(f"{where}/old")
    os.mkdir(f"{where}/old")
    os.symlink("nowhere", f"{where}/old/link")
    for name in ("old", "etc", "."):
        os.utime(f"{where}/{name}", ns=(0, 1_700_000_000_000_000_001))


def make(directory):
    """Makes the files of this version, and records in a new directory what they show."""
    os.makedirs(directory)
    os.environ["SOURCE_DATE_EPOCH"] = "1700000000"
    with tempfile.TemporaryDirectory() as work:
        make_files(work)
        run("tar", "--xattrs", "--xattrs-include=*", "--sparse", "-C", work, "-czf",
            f"{directory}/files.tar.gz", ".")
    with unpacked(directory) as here:
        recorded = {"expected": observe(here), "documents": dict(documents(here))}
    for name, value in recorded.items():
        text = json.dumps(value, indent=1, sort_keys=True)
        write_file(f"{directory}/{name}.json", text + "\n")


def make_files(work):
    os.chdir(work)
    with tempfile.TemporaryDirectory() as layout:
        image(layout)
        source = f"oci:{layout}:tag"
        bcow("convert", source, "image.bcow")
        bcow("convert", "--plain", source, "plain.bcow")
        bcow("convert", source, "oci:store:tag")
        with mounted("image.bcow", "--record", "reads.trace") as where:
            read_text(f"{where}/etc/config")
        support.until(lambda: os.path.exists("reads.trace"), "the mount writes its trace")
        bcow("convert", "--prefetch", "reads.trace", source, "prefetch.bcow")
    for upper, driver in (("upper", "fuse"), ("kernel-upper", "kernel")):
        with mounted("image.bcow", "--upper", upper, "--driver", driver) as where:
            change(where)
    bcow("commit", "image.bcow", "--upper", "upper", "layer.bcow")
    support.sparse_file("raw", 4 * MIB)
    support.overwrite("raw", MIB, LARGE)
    bcow("convert", "raw:raw", "base.bcow")
    os.remove("raw")
    bcow("create", "-b", "base.bcow", "disk.bcow")
    write_disk("disk.bcow", "write -P 1 1M 8k", "write -P 2 3M 3k", "flush")
    bcow("snapshot", "disk.bcow", "clean")
    write_disk("disk.bcow", "write -P 3 1028k 64k", "write -z 2M 64k", "flush")
    bcow("fork", "disk.bcow@clean", "fork.bcow")
    write_disk("fork.bcow", "write -P 4 0 5k", "discard 1M 512k")
    bcow("snapshot", "disk.bcow", "late")
    bcow("create", "-b", "image.bcow", "--fs", "ext4", "root.bcow")


def write_disk(name, *commands):
    with served(name) as server:
        run("qemu-io", "-f", "raw", *(part for one in commands for part in ("-c", one)), server.uri)


@contextlib.contextmanager
def unpacked(directory):
    """A copy of a version's files for the length of a with block."""
    with tempfile.TemporaryDirectory(prefix="frozen-", dir=support.WORK) as here:
        run("tar", "--xattrs", "--xattrs-include=*", "-C", here, "-xzf",
            f"{directory}/files.tar.gz")
        os.mkdir(f"{here}/made")
        yield here


def observe(here):
    """All content of a version's files, as this version of bcow shows it. A tree that was seen
    before is the name of that one."""
    at = {name: f"{here}/{name}" for name in os.listdir(here)}
    stack = f"oci:{here}/store:tag"
    names = [at[name] for name in sorted(at) if name.endswith(".bcow") or "@" in name]
    for name in (*names, stack, at["upper"], at["kernel-upper"]):
        bcow("fsck", *(() if "upper" in name else ("--data",)), name)
    seen = {}
    for name, mount in {
            "image": lambda: mounted(at["image.bcow"]), "plain": lambda: mounted(at["plain.bcow"]),
            "stack": lambda: mounted(stack), "prefetch": lambda: mounted(at["prefetch.bcow"]),
            "layer": lambda: mounted(at["image.bcow"], layers=[at["layer.bcow"]]),
            "kernel": lambda: kernel_mounted(at["plain.bcow"], "loop"),
            "root": lambda: mounted(at["root.bcow"]),
            "upper": lambda: mounted(at["image.bcow"], "--upper", at["upper"]),
            "kernel-upper": lambda: mounted(at["image.bcow"], "--upper", at["kernel-upper"]),
    }.items():
        with mount() as where:
            dump = tree.dump(where)
        same = [other for other in seen if seen[other] == dump]
        seen[name] = same[0] if same else dump
    for disk in DISKS:
        bcow("export", at[disk], "--to", "raw", "-o", f"{here}/made/raw")
        seen[disk], _ = tree.content(f"{here}/made/raw")
    return seen


def documents(here):
    """The documents of DOCUMENTS and that of a mount, made in a copy of the files."""
    def document(*command, check=True):
        result = bcow(*command, "--json", cwd=here, check=check)
        text = result.out.decode().replace(here, "HERE").replace(support.WORK, "WORK")
        return json.loads(text)

    for name, command in DOCUMENTS.items():
        yield name, document(*command.split(), check=not name.startswith("diff"))
    shown = bcow("convert", "--progress", "json", "image.bcow", "made/shown.bcow", cwd=here).err
    yield "progress", json.loads(shown.splitlines()[-1])
    with mounted(f"{here}/image.bcow", "--upper", f"{here}/upper") as where:
        read_text(f"{where}/etc/config")
        yield "stats", document("stats", where)
        yield "ps", document("ps")
        yield "top", document("top", "--once", "--interval", "1")


if __name__ == "__main__":
    support.need("qemu-io", "tar", root=True, fuse=True)
    make(os.path.abspath(*sys.argv[1:]))
