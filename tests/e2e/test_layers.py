"""Images in layers: shared blobs, caches, and failures around both.

The images are tiny layouts, made here. test_merge.py and test_registry.py compare trees; this file
tests blobs, digests, caches and layouts.
"""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import time

from support import (BCOW, PEAK_BYTES, UNPRIVILEGED, Scratch, assert_refused, assert_same_tree,
                     bcow, for_everyone, image, kernel_mounted, mounted, need, read_bytes,
                     read_json, run, write_file)
import sequences
from sequences import ocilib
from overlay import Entry

LAYER, STACK = "application/vnd.bcow.layer.v1", "application/vnd.bcow.stack.v1"


def part(number, size=300_000):
    """A layer with its own content: compressible data, incompressible data, and small files."""
    noise = random.Random(number)
    name = b"part-%d" % number
    return [Entry(name, "dir"), Entry(name + b"/noise", data=noise.randbytes(size)),
            Entry(name + b"/text", data=b"all work and no play, %d\n" % number * (size // 25)),
            *(Entry(name + b"/small-%d" % n, data=noise.randbytes(n)) for n in range(40)),
            Entry(b"last", data=b"%d" % number)]


def tree_bytes(directory):
    """All files below a directory: path -> content."""
    found = {}
    for at, directories, files in os.walk(directory):
        for name in directories + files:
            full = os.path.join(at, name)
            name = os.path.relpath(full, directory)
            found[name] = None if os.path.isdir(full) else read_bytes(full)
    return found


class Layout:
    """An OCI layout on disk."""

    def __init__(self, path):
        self.path = path

    def index(self):
        return read_json(os.path.join(self.path, "index.json"))

    def blob_path(self, digest):
        return os.path.join(self.path, "blobs", *digest.split(":"))

    def entry(self, tag):
        found = [one for one in self.index()["manifests"]
                 if one.get("annotations", {}).get("org.opencontainers.image.ref.name") == tag]
        if len(found) != 1:
            raise AssertionError(f"{len(found)} images are named {tag} in {self.path}")
        return found[0]

    def manifest(self, tag):
        return read_json(self.blob_path(self.entry(tag)["digest"]))

    def layers(self, tag):
        """The digests of an image's BCoW layers, lowest first."""
        return [one["digest"] for one in self.manifest(tag)["layers"] if one["mediaType"] == LAYER]

    def stack(self, tag):
        return self.manifest(tag)["layers"][-1]["digest"]

    def check(self):
        """Fails unless every blob has the digest of its name and every blob of the index exists."""
        blobs = os.path.join(self.path, "blobs", "sha256")
        for name in os.listdir(blobs):
            # Left by a converter that was killed while it replaced a blob: complete, but still with
            # a temporary name.
            if name.startswith(".bcow-") and name.endswith(".part"):
                continue
            if hashlib.sha256(read_bytes(os.path.join(blobs, name))).hexdigest() != name:
                raise AssertionError(f"{self.path}: blob {name} is not what its name says")
        for entry in self.index()["manifests"]:
            manifest = read_json(self.blob_path(entry["digest"]))
            for one in [manifest["config"], *manifest["layers"]]:
                if os.path.getsize(self.blob_path(one["digest"])) != one["size"]:
                    raise AssertionError(f"{self.path}: blob {one['digest']} has another size than "
                                         "its manifest says")


class Layers(Scratch):
    @classmethod
    def setUpClass(cls):
        need("zstd", root=True, fuse=True)
        super().setUpClass()
        cls.top = cls.directory
        cls.parts = [part(number) for number in range(6)]
        cls.a = sequences.write_layout(cls.parts[:4], os.path.join(cls.top, "source-a"))
        cls.b = sequences.write_layout(cls.parts[:3] + [cls.parts[5]],
                                       os.path.join(cls.top, "source-b"))

    def setUp(self):
        self.directory = os.path.join(self.top, self._testMethodName)
        os.makedirs(self.directory)

    def tearDown(self):
        shutil.rmtree(self.directory, ignore_errors=True)

    def path(self, name):
        return os.path.join(self.directory, name)

    def source(self, layers, name, **options):
        return sequences.write_layout(layers, self.path(name), **options)

    def convert(self, source, name, *options, tag="t", **more):
        """Converts into a layout of this test; returns the layout and the report, with standard
        error."""
        layout = Layout(self.path(name))
        result = bcow("convert", "--json", source, f"oci:{layout.path}:{tag}", *options, **more)
        report = json.loads(result.out)
        report["stderr"] = result.err.decode()
        report["result"] = result
        return layout, report

    refused = assert_refused

    def made(self, report):
        return [layer["made"] for layer in report["layers"]]

    def digests(self, report):
        return [layer["digest"] for layer in report["layers"]]

    # The content of the layout.

    def test_manifest_ties_layers_to_their_source_and_keeps_the_configuration(self):
        layout, report = self.convert(self.a, "out")
        source = Layout(os.path.join(self.top, "source-a"))
        manifest, before = layout.manifest("t"), source.manifest("t")
        self.assertEqual(manifest["config"], before["config"])
        config = read_bytes(source.blob_path(before["config"]["digest"]))
        self.assertEqual(read_bytes(layout.blob_path(manifest["config"]["digest"])), config)
        self.assertEqual([one["mediaType"] for one in manifest["layers"]], [LAYER] * 4 + [STACK])
        for one, old, diff_id in zip(manifest["layers"], before["layers"],
                                     json.loads(config)["rootfs"]["diff_ids"]):
            said = set(one["annotations"].values())
            self.assertLessEqual({old["digest"], diff_id}, said)
        self.assertEqual(layout.entry("t")["digest"], report["manifest"])
        layout.check()

    def test_a_recompressed_source_reuses_its_layers(self):
        cache = self.path("cache")
        reports = [self.convert(self.source(self.parts[:4], name, pack=pack), f"out-{name}",
                                "--cache", cache)[1]
                   for name, pack in (("plain", None), ("gzip", ocilib.gz), ("zstd", ocilib.zst))]
        self.assertEqual([self.made(one) for one in reports],
                         [["converted"] * 4, ["cache"] * 4, ["cache"] * 4])
        self.assertEqual(self.digests(reports[0]), self.digests(reports[1]))
        self.assertEqual(self.digests(reports[0]), self.digests(reports[2]))

    def test_cache_keeps_layers_of_other_options_apart(self):
        cache = self.path("cache")
        ways = [[], ["--compress", "none"], ["--compress", "zstd:7"], ["--block-size", "64K"],
                ["--plain"]]
        fresh = [self.convert(self.a, f"fresh-{n}", *way)[1] for n, way in enumerate(ways)]
        self.assertEqual(len({one["manifest"] for one in fresh}), len(ways))
        for expected in ("converted", "cache"):
            for n, way in enumerate(ways):
                _, report = self.convert(self.a, f"{expected}-{n}", "--cache", cache, *way)
                self.assertEqual(self.made(report), [expected] * 4, way)
                self.assertEqual(report["manifest"], fresh[n]["manifest"], way)

    # Damaged and unusable caches.

    def entries(self, cache):
        """The layers of a cache."""
        return sorted(os.path.join(at, name) for at, _, names in os.walk(cache) for name in names
                      if name.endswith(".bcow"))

    def test_foreign_files_in_a_cache_are_ignored(self):
        cache = self.path("cache")
        _, good = self.convert(self.a, "good", "--cache", cache)
        entries = self.entries(cache)
        write_file(os.path.join(cache, "readme"), "not an entry")
        for path in entries:
            directory = os.path.dirname(path)
            os.symlink("/dev/zero", os.path.join(directory, "0" * 64 + ".bcow"))
            os.mkdir(os.path.join(directory, "1" * 64 + ".bcow"))
            os.mkfifo(os.path.join(directory, "2" * 64 + ".bcow"))
            os.symlink("nowhere", os.path.join(directory, "3" * 64 + ".bcow"))
        _, report = self.convert(self.a, "out", "--cache", cache, timeout=60)
        self.assertEqual(report["manifest"], good["manifest"])
        Layout(self.path("out")).check()

    def test_a_read_only_cache_is_used_without_changes(self):
        cache = self.path("cache")
        os.makedirs(cache)
        run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", cache)
        try:
            self.convert(self.source(self.parts[:2], "source"), "first", "--cache", cache)
            run("mount", "-o", "remount,ro", cache)
            _, report = self.convert(self.a, "out", "--cache", cache)
            self.assertEqual(self.made(report), ["cache"] * 2 + ["converted"] * 2)
            self.assertRegex(report["stderr"], r"(?i)warning.*cache.*read-only")
            Layout(self.path("out")).check()
        finally:
            run("umount", cache)

    def test_a_full_cache_does_not_stop_a_conversion(self):
        cache = self.path("cache")
        os.makedirs(cache)
        run("mount", "-t", "tmpfs", "-o", "size=500k", "tmpfs", cache)
        try:
            _, report = self.convert(self.a, "out", "--cache", cache)
            self.assertRegex(report["stderr"], r"(?i)warning.*cache.*no space left")
            Layout(self.path("out")).check()
            _, again = self.convert(self.a, "again", "--cache", cache)
            self.assertEqual(report["manifest"], again["manifest"])
        finally:
            run("umount", cache)

    # Bad sources and destinations.

    def test_a_layer_with_a_wrong_diff_id_is_not_cached(self):
        cache = self.path("cache")
        layout = Layout(self.path("source"))
        self.source(self.parts[:2], "source", pack=ocilib.gz)
        manifest = layout.manifest("t")
        writer = ocilib.Layout(layout.path)
        other = writer.blob(ocilib.gz(sequences.tar(self.parts[2])), ocilib.MEDIA_TAR_GZIP)
        writer.index([(writer.json_blob(dict(manifest, layers=[manifest["layers"][0], other]),
                                        ocilib.MEDIA_MANIFEST), "t", None)])
        result = bcow("convert", f"oci:{layout.path}:t", f"oci:{self.path('out')}:t", "--cache",
                      cache, check=False)
        self.refused(result, r"(?i)diff.?id")
        _, report = self.convert(self.source(self.parts[:2], "good"), "out", "--cache", cache)
        _, fresh = self.convert(self.source(self.parts[:2], "good"), "fresh")
        self.assertEqual(report["manifest"], fresh["manifest"])
        self.assertEqual(report["layers"][1]["made"], "converted")

    def test_other_images_of_the_destination_stay(self):
        source = Layout(self.path("layout"))
        self.source(self.parts[:2], "layout", tag="ordinary")
        index = source.index()
        index["annotations"] = {"org.example.kept": "yes"}
        index["manifests"].append({"mediaType": "application/vnd.example",
                                   "digest": "sha256:" + "0" * 64, "size": 0, "data": "e30="})
        write_file(os.path.join(source.path, "index.json"), json.dumps(index))
        blobs = tree_bytes(os.path.join(source.path, "blobs"))
        # The source's own layout is a valid destination.
        self.convert(f"oci:{source.path}:ordinary", "layout", tag="one")
        self.convert(self.a, "layout", tag="two")
        after = source.index()
        self.assertEqual(after["annotations"], index["annotations"])
        for entry in index["manifests"]:
            self.assertIn(entry, after["manifests"])
        self.assertLessEqual(blobs.items(), tree_bytes(os.path.join(source.path, "blobs")).items())
        self.assertEqual(len(after["manifests"]), 4)
        # The same name then refers to the new image.
        _, report = self.convert(self.b, "layout", tag="two")
        self.assertEqual(source.entry("two")["digest"], report["manifest"])
        self.assertEqual(len(source.index()["manifests"]), 4)

    def test_a_full_disk_leaves_the_layout_unchanged(self):
        disk = self.path("disk")
        os.makedirs(disk)
        run("mount", "-t", "tmpfs", "-o", "size=1000k", "tmpfs", disk)
        try:
            self.convert(self.source(self.parts[:2], "source"), "disk/layout", tag="old")
            before = tree_bytes(disk)
            result = bcow("convert", self.a, f"oci:{disk}/layout:new", check=False)
            self.refused(result, r"(?i)no space left|full")
            self.assertEqual(tree_bytes(disk), before)
            result = bcow("convert", self.a, f"oci:{disk}/other:new", check=False)
            self.refused(result, r"(?i)no space left|full")
            self.assertEqual(tree_bytes(disk), before)
        finally:
            run("umount", disk)

    def test_modes_follow_the_umask(self):
        for umask, file_mode, directory_mode in (("022", 0o644, 0o755), ("077", 0o600, 0o700)):
            with self.subTest(umask=umask):
                out, cache = self.path(f"out-{umask}"), self.path(f"cache-{umask}")
                run("sh", "-c", f'umask {umask}; exec "$@"', "sh", BCOW, "-q", "convert", self.a,
                    f"oci:{out}:t", "--cache", cache)
                for top in (out, cache):
                    for at, directories, files in os.walk(top):
                        self.assertEqual(os.stat(at).st_mode & 0o7777, directory_mode, at)
                        for name in files:
                            self.assertEqual(os.stat(os.path.join(at, name)).st_mode & 0o7777,
                                             file_mode, name)

    def test_no_privilege_is_needed(self):
        own = self.path("user")
        os.makedirs(own)
        os.chown(own, UNPRIVILEGED, UNPRIVILEGED)
        reach = for_everyone(own)
        source = f"oci:{for_everyone(os.path.join(self.top, 'source-a'))}:t"
        bcow("convert", source, f"oci:{reach}/out:t", "--cache", f"{reach}/cache",
             user=UNPRIVILEGED)
        _, report = self.convert(self.a, "root")
        self.assertEqual(Layout(os.path.join(own, "out")).entry("t")["digest"], report["manifest"])

    # Concurrent and killed converters.

    def check_cache(self, cache):
        """Fails unless every cache entry has the digest of its name; an incomplete file has a
        temporary name."""
        for path in self.entries(cache):
            self.assertEqual(hashlib.sha256(read_bytes(path)).hexdigest() + ".bcow",
                             os.path.basename(path))

    def test_killed_converters_leave_no_damaged_file(self):
        cache, out = self.path("cache"), self.path("out")
        layout = Layout(out)
        source = self.source([part(n, 1_000_000) for n in range(4)], "source", pack=ocilib.gz)
        started = time.monotonic()
        _, good = self.convert(source, "good")
        # How long a conversion takes that finds no cache, or finds one: as the last one took that
        # was not killed, for the machine is now busier, now less.
        whole = [time.monotonic() - started] * 2
        dice = random.Random(3)
        killed = n = 0
        while n < 30 or killed < 6 and n < 300:
            if n % 6 == 0:
                shutil.rmtree(cache, ignore_errors=True)
                shutil.rmtree(out, ignore_errors=True)
            finds_cache = os.path.exists(cache)
            started = time.monotonic()
            process = subprocess.Popen([BCOW, "-q", "convert", source, f"oci:{out}:t{n % 6}",
                                        "--cache", cache], stdout=subprocess.DEVNULL,
                                       stderr=subprocess.PIPE)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(dice.uniform(0, whole[finds_cache] * 1.1))
                whole[finds_cache] = time.monotonic() - started
            process.kill()
            killed += process.wait() == -signal.SIGKILL
            process.stderr.close()
            if os.path.exists(cache):
                self.check_cache(cache)
            if os.path.exists(os.path.join(out, "index.json")):
                layout.check()
            if n % 6 == 5:
                _, report = self.convert(source, "out", "--cache", cache)
                self.assertEqual((report["manifest"], report["stderr"]), (good["manifest"], ""))
                layout.check()
            n += 1
        self.assertGreater(killed, 5, "hardly one was killed while it worked")

    def test_a_thousand_layers(self):
        layers = [[Entry(b"same", data=b"%d" % n), Entry(b"d/own-%d" % n, data=b"%d" % n)]
                  + ([Entry(b".wh.gone-%d" % n)] * (n % 3 == 0)) for n in range(1000)]
        layout, report = self.convert(self.source(layers, "source"), "out", timeout=120)
        self.assertLess(report["result"].peak_bytes, PEAK_BYTES)
        self.assertEqual(len(report["layers"]), 1000)
        layout.check()
        listed = bcow("ls", f"oci:{layout.path}:t", "/d", timeout=60).out.split()
        self.assertEqual(len(listed), 1000)
        self.assertEqual(bcow("cat", f"oci:{layout.path}:t", "/same").out, b"999")
        self.assertEqual(bcow("cat", f"oci:{layout.path}:t", "/d/own-500").out, b"500")

    # Stacks with changed layers.

    def test_damaged_stacks_are_refused_by_digest(self):
        source = self.source([part(0, 20_000), part(1, 20_000)], "source")
        layout, _ = self.convert(source, "out")
        name = f"oci:{layout.path}:t"
        bcow("fsck", "--data", name)
        one, two = layout.layers("t")
        whole, other = read_bytes(layout.blob_path(one)), read_bytes(layout.blob_path(two))
        for what, data in (("missing", None), ("emptied", b""), ("cut", whole[:len(whole) // 2]),
                           ("cut by a byte", whole[:-1]), ("another layer", other),
                           ("no image", b"x" * len(whole))):
            os.unlink(layout.blob_path(one))
            if data is not None:
                write_file(layout.blob_path(one), data)
            mnt, out = self.path("mnt"), self.path("tree")
            os.makedirs(mnt, exist_ok=True)
            with self.subTest(what=what):
                for command in (["mount", name, mnt], ["cat", name, "/part-0/noise"],
                                ["extract", name, out]):
                    result = bcow(*command, check=False, timeout=60)
                    self.refused(result, one[len("sha256:"):][:12], r"(?m)^hint:")
                self.assertFalse(os.path.exists(out))
                self.assertIn(bcow("fsck", name, check=False).code, (4, 8))
            write_file(layout.blob_path(one), whole)
        bcow("fsck", "--data", name)

    def test_no_damaged_byte_of_a_layer_is_read_as_wrong_data(self):
        source = self.source([part(0, 20_000), part(1, 20_000)], "source")
        layout, _ = self.convert(source, "out")
        name, path = f"oci:{layout.path}:t", layout.blob_path(layout.layers("t")[0])
        whole = read_bytes(path)
        good = bcow("cat", name, "/part-0/noise").out
        for at in range(0, len(whole), max(1, len(whole) // 40)):
            write_file(path, whole[:at] + bytes([whole[at] ^ 0x21]) + whole[at + 1:])
            result = bcow("cat", name, "/part-0/noise", check=False)
            if result.code == 0:
                self.assertTrue(result.out == good, f"byte {at}")
            else:
                self.assertIn(b"error:", result.err)


class ContainerdCache(Scratch):
    """Files that containerd's erofs snapshotter mounts with the kernel's EROFS, and stacks with
    overlayfs."""

    @classmethod
    def setUpClass(cls):
        need("fsck.erofs", "mount", root=True, fuse=True)
        super().setUpClass()
        noise = random.Random(1).randbytes(300_000)
        low = [Entry(b"d", "dir", mode=0o711), Entry(b"d/noise", data=noise),
               Entry(b"d/both", data=b"low"), Entry(b"d/gone", data=b"1"),
               Entry(b"old", "dir"), Entry(b"old/hidden", data=b"1"),
               Entry(b"link", "symlink", link=b"d/both")]
        high = [Entry(b"d", "dir", mode=0o700, uid=1000), sequences.whiteout(b"d/gone"),
                Entry(b"d/both", data=b"high"), Entry(b"old", "dir", mode=0o755),
                sequences.opaque(b"old"), Entry(b"old/new", "char", rdev=(1, 3))]
        cls.source = sequences.write_layout([low, high], cls.path("source"))
        cls.diff_ids = [ocilib.digest_of(sequences.tar(layer)) for layer in (low, high)]
        cls.cache = cls.path("cache")

    def convert(self):
        return json.loads(bcow("convert", self.source, f"containerd-cache:{self.cache}",
                               "--json").out)["layers"]

    def test_overlayfs_shows_the_image(self):
        layers = self.convert()
        names = [digest.split(":") for digest in self.diff_ids]
        expected = [os.path.join(self.cache, algorithm, digits[:2], f"{digits}.erofs")
                    for algorithm, digits in names]
        self.assertEqual([layer["file"] for layer in layers], expected)
        self.assertEqual(os.listdir(self.cache), ["sha256"])
        image = self.path("image.bcow")
        bcow("convert", self.source, image)
        with contextlib.ExitStack() as stack:
            for path in expected:
                run("fsck.erofs", path)
            below = [stack.enter_context(kernel_mounted(path, "loop")) for path in expected]
            where = self.path("merged")
            os.mkdir(where)
            run("mount", "-t", "overlay", "overlay", where, "-o",
                "ro,lowerdir=" + ":".join(reversed(below)))
            stack.callback(run, "umount", where)
            # No layer has an entry for the root directory, which has a mark in each file.
            assert_same_tree(self, stack.enter_context(mounted(image)), where, ignore=["xattrs:."])
        before = [os.stat(path).st_ino for path in expected]
        self.assertEqual([layer["is_new"] for layer in self.convert()], [False] * 2)
        self.assertEqual([os.stat(path).st_ino for path in expected], before)

    def test_what_cannot_be_such_a_cache_is_refused(self):
        cache = self.path("none")
        low = [Entry(b"d", "dir", mode=0o700), Entry(b"d/f", data=b"1")]
        for number, (entry, mention) in enumerate([
                (Entry(b"d/new", data=b"2"), r"sha256:\w+: d is a directory without an entry"),
                (Entry(b"new", "hardlink", link=b"d/f"), "new is a hard link"),
                (Entry(b"new", "char", rdev=(0, 0)), "new is the device 0:0")]):
            with self.subTest(mention):
                source = sequences.write_layout([low, [entry]], self.path(f"odd-{number}"))
                failed = bcow("convert", source, f"containerd-cache:{cache}", check=False)
                assert_refused(self, failed, mention)
                self.assertFalse(os.path.exists(cache))
        layout = self.path("layout")
        bcow("convert", self.source, f"oci:{layout}:x")
        for source, options, mention in (
                (f"oci:{layout}:x", (), "not supported yet"),
                (f"dir:{layout}", ("--as-files",), "not an image with layers"),
                (self.source, ("--compress", "zstd"), "not compressed"),
                (self.source, ("--dedup-lower",), "--dedup-lower")):
            failed = bcow("convert", source, f"containerd-cache:{cache}", *options, check=False)
            assert_refused(self, failed, mention, code=2)
        self.assertFalse(os.path.exists(cache))
        file = self.path("file", b"")
        failed = bcow("convert", self.source, f"containerd-cache:{file}", check=False)
        assert_refused(self, failed, f"cannot write containerd-cache:{file}")
