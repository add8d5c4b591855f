"""bcow-snapshotter on a full disk, and with damaged, stray or missing files in its directory: it
starts, lists its snapshots, and removes them."""

import contextlib
import errno
import os
import shutil
import unittest

import support
from support import need, overwrite, read_bytes, read_text, run, write_file
from test_snapshotter import WithSnapshotter

# Without them, the base of the tests reports what is missing.
with contextlib.suppress(ImportError):
    from snapshots import CODES

SIZE = 24 << 20
# Kinds of file systems: what makes one, and the options of its mount.
TMPFS = ("tmpfs", f"size={SIZE},nr_inodes=1000")
EXT4 = ("ext4", "loop")


class WithSnapshots(WithSnapshotter):
    """A root with two layers, a container "c" that has written, and a view "v"."""

    def make(self, client):
        with self.mounted(client.Prepare(key="a")) as root:
            write_file(os.path.join(root, "low"), os.urandom(1 << 20))
        client.Commit(name="low", key="a")
        with self.mounted(client.Prepare(key="extract-b", parent="low")) as root:
            write_file(os.path.join(root, "high"), "high")
        client.Commit(name="high", key="extract-b")
        with self.mounted(client.Prepare(key="c", parent="high")) as root:
            write_file(os.path.join(root, "written"), "by c")
        client.View(key="v", parent="high")
        return client.List()

    def remove_all(self, client):
        """As containerd's garbage collection: children first."""
        while infos := client.List():
            parents = {info.parent for info in infos}
            for info in infos:
                if info.name not in parents:
                    client.Remove(key=info.name)
        client.Cleanup()

    def listed(self, client):
        return sorted(info.name for info in client.List())


class FullDisk(WithSnapshots):
    @contextlib.contextmanager
    def disk(self, kind, options):
        """A small file system as the root. The log is beside it."""
        where = os.path.join(self.place, kind)
        os.mkdir(where)
        source = "tmpfs"
        if kind == "ext4":
            need("mkfs.ext4")
            source = os.path.join(self.place, "disk")
            write_file(source, "")
            os.truncate(source, SIZE)
            run("mkfs.ext4", "-q", "-m", "0", "-N", "1000", "-F", source)
        run("mount", "-t", kind, "-o", options, source, where)
        self.root = where
        try:
            yield
        finally:
            run("umount", "-l", where)

    def fill(self, where):
        """Leaves neither a byte nor an inode."""
        with open(os.path.join(where, "ballast"), "ab", buffering=0) as ballast:
            for size in (1 << 20, 4096, 1):
                with contextlib.suppress(OSError):
                    while ballast.write(b"x" * size):
                        pass
        with self.assertRaises(OSError) as full:
            for number in range(2000):
                os.close(os.open(os.path.join(where, f"file{number}"), os.O_CREAT))
        self.assertEqual(full.exception.errno, errno.ENOSPC)

    def test_snapshots_are_removed_from_a_full_disk(self):
        for kind in TMPFS, EXT4:
            with self.subTest(kind), self.disk(*kind):
                self.removed_from_full_disk()

    def removed_from_full_disk(self):
        one = self.start()
        before = self.make(one.client)
        self.fill(self.root)
        # The space that this start needs for a probe of overlayfs, for example, is not there.
        self.assertEqual(one.end(), 0)
        one.start()
        client = one.client
        self.assertEqual(client.List(), before)
        for call, fields in ((client.Prepare, {"key": "new", "parent": "high"}),
                             (client.Prepare, {"key": "extract-new", "parent": "high"}),
                             (client.View, {"key": "new", "parent": "high"}),
                             (client.Update, {"info": {"name": "v", "labels": {"l": "1"}}})):
            self.assertIn("No space left", self.refused(CODES.INTERNAL, call, **fields))
        self.assertEqual(client.List(), before)
        with self.mounted(client.Mounts(key="v")) as root:
            self.assertEqual(read_text(os.path.join(root, "high")), "high")
        self.assertEqual(one.end(), 0)
        one.start()
        client = one.client
        self.assertEqual(client.List(), before)
        for key in "v", "c", "high", "low":
            client.Remove(key=key)
        client.Cleanup()
        self.assert_only(client)
        self.assertEqual(self.names("layers"), [])
        # There is space again, and overlayfs is found.
        self.assertEqual(client.Prepare(key="a").mounts[0].type, "bind")
        client.Commit(name="low", key="a")
        answer = client.Prepare(key="extract-b", parent="low")
        self.assertEqual([mount.type for mount in answer.mounts], ["bind", "overlay"])
        client.Remove(key="extract-b")
        client.Remove(key="low")
        self.assertEqual(one.end(), 0)


class DamagedStates(WithSnapshots):
    def at(self, *parts):
        return os.path.join(self.root, *parts)

    def record(self, name):
        """The directory of a snapshot."""
        for number in self.names("snapshots"):
            path = self.at("snapshots", number)
            if f'"name":"{name}"' in read_text(os.path.join(path, "record.json")):
                return path
        raise AssertionError(f"{name} has no record")

    def change_record(self, name, change):
        path = os.path.join(self.record(name), "record.json")
        write_file(path, change(read_bytes(path)))

    def test_one_bad_entry_does_not_prevent_the_start(self):
        every = ["c", "high", "low", "v"]

        def without(*names):
            return sorted(set(every) - set(names))

        def replace_by_directory(path):
            os.remove(path)
            os.mkdir(path)

        # What happens to the root, and the snapshots that are then there.
        cases = {
            "record is cut off": (lambda: self.change_record("v", lambda it: it[:20]),
                                  without("v")),
            "record is empty": (lambda: self.change_record("v", lambda it: b""), without("v")),
            "record has a wrong byte": (
                lambda: self.change_record("v", lambda it: it.replace(b"{", b"[", 1)),
                without("v")),
            "record is no text": (lambda: self.change_record("v", lambda it: b"\xff" * 9),
                                  without("v")),
            "record is missing": (lambda: os.remove(os.path.join(self.record("v"), "record.json")),
                                  without("v")),
            "record is a directory": (
                lambda: replace_by_directory(os.path.join(self.record("v"), "record.json")),
                without("v")),
            "record is of a later version": (
                lambda: self.change_record("v", lambda it: it.replace(b"shot/1", b"shot/9")),
                without("v")),
            "record has the name of another": (
                lambda: self.change_record("v", lambda it: it.replace(b'"v"', b'"c"')),
                without("v")),
            "record of a layer is damaged": (lambda: self.change_record("low", lambda it: b"{"),
                                             without("low")),
            "record of a container is damaged": (lambda: self.change_record("c", lambda it: b"{"),
                                                 without("c")),
            "stray file": (lambda: write_file(self.at("snapshots/stray"), "x"), every),
            "stray directory": (lambda: os.mkdir(self.at("snapshots/99")), every),
            "stray link": (lambda: os.symlink("/", self.at("snapshots/98")), every),
            "stray files elsewhere": (
                lambda: [os.makedirs(self.at(name, "1x/2")) for name in
                         ("layers", "merged", "new", "trash", "cache", "auth/+pull-7")], every),
            "directories are missing": (
                lambda: [shutil.rmtree(self.at(name), ignore_errors=True) for name in
                         ("merged", "new", "trash", "auth", "cache")], every),
            "files of a crash": (
                lambda: [write_file(os.path.join(self.record("c"), "record.json.new"), "{"),
                         os.makedirs(self.at("new/97/fs"))], every),
            "layer is missing": (
                lambda: os.remove(self.at("layers", os.path.basename(self.record("high"))
                                          + ".bcow")), every),
            "layers are missing": (lambda: shutil.rmtree(self.at("layers")), every),
        }
        for number, (case, (damage, expected)) in enumerate(cases.items()):
            with self.subTest(case):
                self.root = os.path.join(self.place, f"root{number}")
                one = self.start()
                self.make(one.client)
                layers = set(self.names("layers"))
                self.assertEqual(one.end(), 0)
                damage()
                one.start()
                client = one.client
                self.assertEqual(self.listed(client), expected)
                if expected != every:
                    self.assertIn("cannot use ", one.output())
                if "layer" not in case:
                    # Nothing that may be of value is removed, and what is whole works.
                    self.assertLessEqual(layers, set(self.names("layers")))
                    with self.mounted(client.Prepare(key="new", parent="high")) as root:
                        self.assertEqual(read_text(os.path.join(root, "high")), "high")
                # The same after another start.
                self.assertEqual(one.end(), 0)
                one.start()
                client = one.client
                client.Prepare(key="empty")
                self.remove_all(client)
                self.assertEqual(self.listed(client), [])
                support.until(lambda: not self.names("trash"), "the sweep of what was removed")
                self.assertEqual(one.end(), 0)

    def test_what_was_set_aside_can_be_put_back(self):
        one = self.start()
        before = self.make(one.client)
        path = os.path.join(self.record("high"), "record.json")
        good = read_bytes(path)
        self.assertEqual(one.end(), 0)
        write_file(path, "{")
        one.start()
        number = os.path.basename(os.path.dirname(path))
        self.assertIn(f"it is set aside as {self.at('damaged', number)}", one.output())
        # Its children cannot be mounted. containerd's garbage collection sees them as roots.
        self.refused(CODES.NOT_FOUND, one.client.Mounts, key="c")
        self.assertEqual({info.name: info.parent for info in one.client.List()},
                         {"low": "", "c": "", "v": ""})
        self.assertEqual(one.end(), 0)
        write_file(self.at("damaged", number, "record.json"), good)
        os.rename(self.at("damaged", number), os.path.dirname(path))
        one.start()
        self.assertEqual(one.client.List(), before)
        with self.mounted(one.client.Mounts(key="c")) as root:
            self.assertEqual(read_text(os.path.join(root, "written")), "by c")

    def test_damaged_merged_metadata_is_made_again(self):
        one = self.start()
        self.make(one.client)
        [name] = self.names("merged")
        path = self.at("merged", name)
        place = os.path.join(self.record("v"), "root")
        good = read_bytes(path)
        for at in range(0, len(good), len(good) // 16):
            with self.subTest(byte=at):
                # The snapshot is mounted. The next mount reads the file.
                run("umount", place)
                write_file(path, good[:at] + bytes([good[at] ^ 1]) + good[at + 1:])
                with self.mounted(one.client.Mounts(key="v")) as root:
                    self.assertEqual(sorted(os.listdir(root)), ["high", "low"])
                    self.assertEqual(read_text(os.path.join(root, "high")), "high")
                run("umount", place)
                # While it is mounted, in every byte that was not read yet.
                with self.mounted(one.client.Mounts(key="v")) as root:
                    overwrite(path, 0, bytes(byte ^ 1 for byte in good))
                    self.assertEqual(sorted(os.listdir(root)), ["high", "low"])
                    self.assertEqual(read_text(os.path.join(root, "high")), "high")
                write_file(path, good)


if __name__ == "__main__":
    unittest.main()
