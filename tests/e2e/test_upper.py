"""Unmounted uppers: diff, commit and fsck.

The uppers are bcow's and overlayfs's, which have the same form except for partial files. The tests
compare bcow's output with the tree that the mount showed.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import stat
import struct
import subprocess
import tempfile
import unittest

import support
from support import (UNPRIVILEGED, WORK, append_to, assert_refused, assert_same_tree, bcow, flip,
                     for_everyone, is_mounted, need, overwrite, read_bytes, run, until, write_file)
import tree

OVERLAY = "metacopy=on,redirect_dir=on,index=off,xino=off"
EPOCH = {"SOURCE_DATE_EPOCH": "1700000000"}


def write(path, data, mode=None):
    write_file(path, data)
    if mode is not None:
        os.chmod(path, mode)


def make_lower(top):
    os.makedirs(top)
    for directory in ("etc", "usr/lib/deep/er", "var/lib/data", "gone/with/it", "moved/inside",
                      "swap-a", "swap-b", "empty"):
        os.makedirs(os.path.join(top, directory))
    write(f"{top}/etc/config", b"one\n" * 100)
    write(f"{top}/etc/setuid", b"#!/bin/sh\n", 0o4755)
    write(f"{top}/etc/unchanged", b"u" * 5000)
    write(f"{top}/var/lib/data/table", os.urandom(3 << 20) + b"tail")
    write(f"{top}/var/lib/data/other", b"o" * 100000)
    write(f"{top}/gone/with/it/all", b"gone")
    write(f"{top}/moved/inside/file", b"moved" * 1000)
    write(f"{top}/moved/big", os.urandom(300000))
    write(f"{top}/swap-a/a", b"a")
    write(f"{top}/swap-b/b", b"b")
    write(f"{top}/replaced-by-directory", b"file")
    os.makedirs(f"{top}/replaced-by-file/sub")
    write(f"{top}/linked-1", b"several names" * 1000)
    os.link(f"{top}/linked-1", f"{top}/usr/linked-2")
    os.link(f"{top}/linked-1", f"{top}/moved/linked-3")
    os.symlink("etc/config", f"{top}/link")
    os.mkfifo(f"{top}/fifo")
    os.mknod(f"{top}/null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    with open(f"{top}/sparse", "wb") as file:
        file.seek(12 << 20)
        file.write(b"end")
    os.setxattr(f"{top}/etc/config", "user.kept", b"value")
    os.setxattr(f"{top}/etc/config", "user.dropped", b"value")
    for place, directories, files in os.walk(top):
        for name in directories + files:
            os.utime(os.path.join(place, name), ns=(1, 1600000000_123456789), follow_symlinks=False)


def change(top):
    """Typical changes of a container."""
    append_to(f"{top}/etc/config", b"two\n")
    os.setxattr(f"{top}/etc/config", "user.new", b"\0binary\xff")
    os.removexattr(f"{top}/etc/config", "user.dropped")
    os.chmod(f"{top}/etc/setuid", 0o755)
    os.chown(f"{top}/var/lib/data/other", 1000, 1001)
    overwrite(f"{top}/var/lib/data/table", 1 << 20, b"changed")
    shutil.rmtree(f"{top}/gone")
    os.rename(f"{top}/moved", f"{top}/usr/lib/renamed")
    write(f"{top}/usr/lib/renamed/inside/new", b"new")
    os.unlink(f"{top}/usr/lib/renamed/big")
    os.rename(f"{top}/usr/lib/deep", f"{top}/usr/lib/deeper")
    shutil.rmtree(f"{top}/swap-a")
    os.mkdir(f"{top}/swap-a", 0o750)
    write(f"{top}/swap-a/fresh", b"fresh")
    os.unlink(f"{top}/replaced-by-directory")
    os.mkdir(f"{top}/replaced-by-directory")
    write(f"{top}/replaced-by-directory/in", b"in")
    shutil.rmtree(f"{top}/replaced-by-file")
    write(f"{top}/replaced-by-file", b"now a file")
    os.unlink(f"{top}/linked-1")
    os.unlink(f"{top}/link")
    os.symlink("etc/elsewhere", f"{top}/link")
    os.symlink("x" * 4000, f"{top}/long-link")
    write(f"{top}/new-1", b"n" * 70000)
    os.link(f"{top}/new-1", f"{top}/etc/new-2")
    os.mknod(f"{top}/disk", 0o640 | stat.S_IFBLK, os.makedev(259, 70000))
    os.mkfifo(f"{top}/etc/fifo")
    with open(f"{top}/holes", "wb") as file:
        file.write(b"start")
        file.seek(100 << 20)
        file.write(b"end")
    with open(f"{top}/sparse", "r+b") as file:
        file.truncate(10 << 20)
    os.mkdir(f"{top}/" + "n" * 255)
    write(f"{top}/" + "n" * 255 + "/" + "m" * 255, b"long names")
    write(f"{top}/\xff\n strange".encode("latin-1"), b"bytes")
    os.rename(f"{top}/var/lib/data/other", f"{top}/var/lib/other-elsewhere")
    os.makedirs(f"{top}/made/and/nested")
    os.utime(f"{top}/made/and", ns=(5, 1650000000_000000007))


class Uppers:
    """Tests of an upper of any origin: bcow's output agrees with the tree that the mount showed."""

    @classmethod
    def setUpClass(cls):
        need("mount", root=True, fuse=True)
        cls.top = os.path.join(WORK, cls.NAME)
        if is_mounted(f"{cls.top}/merged"):
            run("umount", f"{cls.top}/merged")
        shutil.rmtree(cls.top, ignore_errors=True)
        os.makedirs(cls.top)
        cls.lower, cls.upper, cls.merged = (os.path.join(cls.top, name)
                                            for name in ("lower", "up", "merged"))
        make_lower(cls.lower)
        for name in ("work", "merged"):
            os.mkdir(os.path.join(cls.top, name))
        cls.base = os.path.join(cls.top, "base.bcow")
        bcow("convert", f"dir:{cls.lower}", cls.base)
        cls.make_upper(cls.upper)
        cls.after = os.path.join(cls.top, "after.bcow")
        with cls.union():
            change(cls.merged)
        # The tree after a remount.
        with cls.union():
            bcow("convert", f"dir:{cls.merged}", cls.after)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.top, ignore_errors=True)

    @classmethod
    def make_upper(cls, path):
        """An upper without changes."""
        os.mkdir(path)
        shutil.copystat(cls.lower, path)

    def path(self, name):
        return os.path.join(self.top, name)

    def test_diff_agrees_with_a_comparison_of_whole_trees(self):
        for options in ((), ("--content",), ("--metadata",), ("--null",)):
            whole = bcow("diff", self.base, self.after, *options, check=False)
            quick = bcow("diff", self.base, "--upper", self.upper, *options, check=False)
            self.assertEqual((quick.code, quick.out), (whole.code, whole.out), f"{whole}\n{quick}")
            self.assertEqual(quick.code, 1)
        summaries = []
        for arguments in ((self.after,), ("--upper", self.upper)):
            found = json.loads(bcow("diff", self.base, *arguments, "--json", check=False).out)
            summaries.append({key: found["summary"][key]
                                   for key in ("added", "removed", "changed", "retyped")})
            names = {entry["path"] for entry in found["entries"] if "path" in entry}
            self.assertIn("/usr/lib/renamed/inside/file", names)
        self.assertEqual(*summaries)

    def test_an_upper_without_changes_differs_in_nothing(self):
        empty = self.path("untouched")
        self.make_upper(empty)
        result = bcow("diff", self.base, "--upper", empty, check=False)
        self.assertEqual((result.code, result.out), (0, b""), str(result))

    def test_unchanged_content_is_not_read(self):
        """The changed file is one of three megabytes; the comparison reads only data that may
        differ."""
        found = json.loads(
            bcow("diff", self.base, "--upper", self.upper, "--json", check=False).out)
        self.assertLess(found["summary"]["compared_bytes"], 5 << 20)

    def commit(self, destination, *options, **others):
        return bcow("commit", self.base, "--upper", self.upper, destination, *options, env=EPOCH,
                    **others)

    def assert_shows_the_union(self, image, *options):
        found = bcow("diff", self.after, image, *options, check=False)
        self.assertEqual((found.code, found.out), (0, b""), str(found))

    def store(self):
        """A store directory in which the image is found by its digest."""
        where = self.path("store")
        os.makedirs(where, exist_ok=True)
        digest = run("sha256sum", self.base).out.decode().split()[0]
        if not os.path.exists(f"{where}/{digest}"):
            os.link(self.base, f"{where}/{digest}")
        return where

    def test_commit_flatten_makes_an_independent_image(self):
        flat = self.path("flat.bcow")
        self.commit(flat, "--flatten")
        self.assert_shows_the_union(flat)
        self.assertEqual(bcow("fsck", "--data", flat).code, 0)

    def test_commit_merge_makes_an_overlay_of_the_image(self):
        merged = self.path("merged.bcow")
        self.commit(merged, "--merge")
        self.assert_shows_the_union(merged)
        # overlayfs copies up the whole file of three megabytes; all other files are small.
        self.assertLess(os.path.getsize(merged), 5 << 20)
        bcow("fsck", "--data", merged)
        elsewhere = self.path("elsewhere")
        os.mkdir(elsewhere)
        moved = shutil.move(merged, elsewhere)
        refused = bcow("cat", moved, "/etc/unchanged", check=False)
        assert_refused(self, refused, os.path.basename(self.base), "is missing", elsewhere,
                       "--store")
        for option in ("--store", "--backing-dir"):
            self.assert_shows_the_union(moved, option, os.path.dirname(self.base))
        self.assert_shows_the_union(moved, "--store", self.store())

    def test_a_mount_shows_layers_on_top_of_their_image(self):
        layer = self.path("on-top.bcow")
        self.commit(layer)
        with (support.mounted(self.base, layers=[layer]) as where,
              support.mounted(self.after) as after):
            assert_same_tree(self, where, after)
        # Written to and committed; then mounted with both layers.
        upper, second, whole = self.path("on-top-upper"), self.path("on-top-2.bcow"), self.path(
            "on-top-whole.bcow")
        with support.mounted(self.base, "--upper", upper, layers=[layer]) as where:
            write(f"{where}/etc/on-top", b"new")
            overwrite(f"{where}/var/lib/data/table", 8192, b"changed")
            os.unlink(f"{where}/new-1")
        commit = ("commit", self.base, "--layer", layer, "--upper", upper)
        bcow(*commit, second, env=EPOCH)
        bcow(*commit, whole, "--flatten", env=EPOCH)
        # Unchanged blocks are in the image and in the first layer.
        self.assertLess(os.path.getsize(second), 1 << 20)
        with (support.mounted(self.base, layers=[layer, second]) as where,
              support.mounted(whole) as shown):
            assert_same_tree(self, where, shown)
            self.assertEqual(read_bytes(f"{where}/etc/on-top"), b"new")
            self.assertFalse(os.path.lexists(f"{where}/new-1"))
        # The upper belongs to the image together with the layer, not to either alone.
        refused = bcow("mount", self.base, self.merged, "--upper", upper, check=False)
        assert_refused(self, refused, "another image|belongs to")
        # The merged metadata is kept, also for an upper from a mount without it.
        merged, made = self.path("on-top-merged"), []
        self.addCleanup(os.remove, merged)
        for layers, image, options in (((layer, second), whole, ()), ((layer, second), whole, ()),
                                       ((layer,), whole, ("--upper", upper)),
                                       ((layer,), self.after, ())):
            with (support.mounted(self.base, "--merged", merged, *options, layers=layers) as where,
                  support.mounted(image) as shown):
                assert_same_tree(self, where, shown)
            made.append(os.stat(merged).st_ino)
            self.assertEqual(stat.S_IMODE(os.stat(merged).st_mode), 0o600)
        self.assertEqual(made[0], made[1])
        self.assertNotEqual(made[1], made[2])
        self.assertEqual(made[2], made[3])

    def test_a_layer_and_its_archive_are_the_same(self):
        layer = self.path("layer.bcow")
        self.commit(layer)
        direct = self.commit("tar:-").out
        through = bcow("export", layer, "--to", "tar", "-o", "-").out
        self.assertEqual(direct, through)
        self.assertEqual(bcow("fsck", "--data", layer).code, 0)

    def test_output_depends_on_the_tree_alone(self):
        outputs = []
        for number, jobs in enumerate(("1", "4")):
            names = [self.path(f"same-{number}{end}") for end in (".bcow", ".flat", ".tar")]
            self.commit(names[0], "-j", jobs)
            self.commit(names[1], "--flatten", "-j", jobs)
            self.commit(f"tar:{names[2]}")
            outputs.append([read_bytes(name) for name in names])
        self.assertEqual(*outputs)

    def test_other_tools_unpack_the_layers(self):
        need("umoci", "skopeo")
        layout = self.path("layout")
        self.commit(f"oci:{layout}:t")
        run("skopeo", "inspect", f"oci:{layout}:t")
        bundle = self.path("bundle")
        run("umoci", "unpack", "--image", f"{layout}:t", bundle)
        with self.union():
            # overlayfs still counts removed names.
            links = [f"nlink:{path}" for path in ("usr/linked-2", "usr/lib/renamed/linked-3")]
            assert_same_tree(self, os.path.join(bundle, "rootfs"), self.merged, ignore=links)
        config = json.loads(run("skopeo", "inspect", "--config", f"oci:{layout}:t").out)
        self.assertEqual(len(config["rootfs"]["diff_ids"]), 2)
        again = self.path("layout-again")
        self.commit(f"oci:{again}:t", "-j", "1")
        self.assertEqual(read_bytes(f"{layout}/index.json"), read_bytes(f"{again}/index.json"))

    def test_gnu_tar_unpacks_the_archive_over_the_lower_tree(self):
        need("tar")
        where, layer = self.path("unpacked"), self.path("layer.tar")
        run("cp", "-a", self.lower, where)
        self.commit(f"tar:{layer}")
        listed = run("tar", "-tf", layer).out
        self.assertIn(b".wh.gone", listed)
        self.assertIn(b"swap-a/.wh..wh..opq", listed)
        run("tar", "-C", where, "--xattrs", "--xattrs-include=*", "--overwrite", "-xpf", layer,
            "etc/config", "holes", "new-1", "etc/new-2", "disk", "var/lib/other-elsewhere")
        for path, content in (("new-1", b"n" * 70000), ("var/lib/other-elsewhere", b"o" * 100000)):
            self.assertEqual(read_bytes(f"{where}/{path}"), content)
        self.assertEqual(os.getxattr(f"{where}/etc/config", "user.new"), b"\0binary\xff")
        self.assertEqual(os.stat(f"{where}/new-1").st_ino, os.stat(f"{where}/etc/new-2").st_ino)
        self.assertLess(os.stat(f"{where}/holes").st_blocks, 1000)

    def test_a_refused_commit_leaves_no_file(self):
        target = self.path("refused.bcow")
        refused = bcow("commit", self.base, "--upper", self.path("nowhere"), target, check=False)
        assert_refused(self, refused, "no such directory")
        assert_refused(self,
                       bcow("commit", self.base, "--upper", self.upper, self.base, check=False),
                       "is made of it")
        assert_refused(self, bcow("commit", self.base, "--upper", self.upper, check=False),
                       "nothing to write", code=2)
        assert_refused(self, bcow("commit", self.base, "--upper", self.upper, "tar:x", "--merge",
                                  check=False), "--merge", code=2)
        damaged = self.path("damaged")
        run("cp", "-a", self.upper, damaged)
        messages = self.damage(damaged)
        refused = bcow("commit", self.base, "--upper", damaged, target, check=False)
        assert_refused(self, refused, *messages)
        self.assertFalse(os.path.exists(target))

    def damage(self, upper):
        """Damages an upper. Returns what the refusal must say."""
        os.setxattr(f"{upper}/usr/lib/renamed", "trusted.overlay.redirect", b"/not/../plain")
        return "usr/lib/renamed", "overlay.redirect is damaged"


class OfOverlayfs(Uppers, unittest.TestCase):
    NAME = "upper-overlayfs"

    @classmethod
    @contextlib.contextmanager
    def union(cls):
        run("mount", "-t", "overlay", "overlay", "-o",
            f"lowerdir={cls.lower},upperdir={cls.upper},workdir={cls.top}/work,{OVERLAY}",
            cls.merged)
        try:
            yield
        finally:
            run("umount", cls.merged)


class OfBcow(Uppers, unittest.TestCase):
    NAME = "upper-bcow"

    @classmethod
    @contextlib.contextmanager
    def union(cls):
        bcow("mount", cls.base, cls.merged, "--upper", cls.upper, timeout=60)
        try:
            yield
        finally:
            bcow("umount", cls.merged, timeout=60)

    def fsck(self, upper, *options, code=0):
        result = bcow("fsck", upper, self.base, *options, check=False)
        self.assertEqual(result.code, code, str(result))
        return result.out.decode()

    def copy(self, name):
        where = self.path(name)
        run("cp", "-a", "--sparse=always", self.upper, where)
        return where

    def partial(self, upper):
        """The map of the only partial file with blocks."""
        names = os.listdir(f"{upper}/.bcow/maps")
        self.assertEqual(len(names), 1)
        return f"{upper}/.bcow/maps/{names[0]}"

    def test_a_stack_keeps_the_layers_that_it_was_made_of(self):
        need("umoci", "skopeo")
        layout = self.path("images")
        self.commit(f"oci:{layout}:plain")
        bcow("convert", f"oci:{layout}:plain", f"oci:{layout}:stack")
        upper = self.path("second-upper")
        shutil.rmtree(upper, ignore_errors=True)
        with support.mounted(f"oci:{layout}:stack", "--upper", upper) as where:
            append_to(f"{where}/etc/unchanged", b"changed after all")
            os.unlink(f"{where}/holes")
        bcow("commit", f"oci:{layout}:stack", "--upper", upper, f"oci:{layout}:third", env=EPOCH)
        before, after = (json.loads(run("skopeo", "inspect", "--raw", f"oci:{layout}:{name}").out)
                         for name in ("plain", "third"))
        self.assertEqual(after["layers"][:-1], before["layers"])
        config = json.loads(run("skopeo", "inspect", "--config", f"oci:{layout}:third").out)
        self.assertEqual(len(config["rootfs"]["diff_ids"]), 3)
        bundle = self.path("third")
        run("umoci", "unpack", "--image", f"{layout}:third", bundle)
        self.assertEqual(read_bytes(f"{bundle}/rootfs/etc/unchanged"),
                         b"u" * 5000 + b"changed after all")
        self.assertFalse(os.path.exists(f"{bundle}/rootfs/holes"))
        assert_refused(self, bcow("commit", f"oci:{layout}:stack", "--upper", upper,
                                  f"oci:{layout}:stack", check=False),
                       "take the name of the one that it is made of")

    def test_fsck_refuses_an_upper_in_use_with_the_name_of_its_user(self):
        with self.union():
            result = bcow("fsck", self.upper, check=False)
            self.assertNotEqual(result.code, 0, str(result))
            self.assertRegex(result.err.decode(),
                             r"it is being written by .*mount.*process [0-9]+")

    def test_an_upper_of_another_image_is_refused_by_both_names(self):
        result = bcow("diff", self.after, "--upper", self.upper, check=False)
        assert_refused(self, result, "belongs to the image .*base.bcow", "not to .*after.bcow",
                       code=2)
        assert_refused(self, bcow("fsck", self.upper, self.after, check=False),
                       "belongs to the image", code=8)

    def test_only_what_changed_of_a_large_file_is_in_a_layer(self):
        layer = self.path("accurate.bcow")
        self.commit(layer)
        self.assertLess(os.path.getsize(layer), 200 << 10)
        wanted = read_bytes(f"{self.lower}/var/lib/data/table")
        wanted = wanted[:1 << 20] + b"changed" + wanted[(1 << 20) + 7:]
        shown = bcow("cat", layer, "/var/lib/data/table").out
        self.assertEqual(shown, wanted)

    def test_fsck_finds_nothing_in_a_sound_upper(self):
        self.assertRegex(self.fsck(self.upper), r"clean \([0-9]+ directories, [0-9]+ files, [0-9]+ "
                                                r"whiteouts, 2 partial files\)")
        found = json.loads(self.fsck(self.upper, "--json"))
        self.assertEqual((found["verdict"], found["findings"], found["upper"]["sketches"]),
                         ("clean", [], 2))

    def test_fsck_finds_nothing_when_a_mount_has_ended_in_order(self):
        for end in ("umount", "SIGTERM", "SIGINT"):
            for foreground in (True, False):
                with self.subTest(end=end, foreground=foreground):
                    upper = self.path(f"ended-{end}-{foreground}")
                    options = ("--upper", upper)
                    if foreground:
                        program = subprocess.Popen([support.BCOW, "mount", "-f", self.base,
                                                    self.merged, *options])
                    else:
                        bcow("mount", self.base, self.merged, *options, timeout=60)
                    until(lambda: is_mounted(self.merged), "mounted")
                    # The process of a mount holds the lock, and its note names it.
                    with open(f"{upper}/.bcow/lock", "rb") as lock:
                        (holder,) = re.findall(rb"process ([0-9]+)", lock.read()[1024:1280])
                    for name in ("linked-1", "etc/unchanged"):
                        os.unlink(f"{self.merged}/{name}")
                    # Records appended to a map.
                    for block in (1, 20):
                        overwrite(f"{self.merged}/var/lib/data/table", block * 4096,
                                  b"x", sync=True)
                    if end == "umount":
                        bcow("umount", self.merged, timeout=60)
                    else:
                        os.kill(int(holder), getattr(signal, end))
                    if foreground:
                        self.assertEqual(program.wait(timeout=60), 0)
                    until(lambda: not os.path.exists(f"/proc/{int(holder)}"), "the holder is gone")
                    found = json.loads(self.fsck(upper, "--json"))
                    self.assertEqual((found["verdict"], found["findings"]), ("clean", []))
                    self.assertEqual(os.listdir(f"{upper}/.bcow/work"), [])

    def test_acls_of_the_parent_directory_are_not_inherited(self):
        entries = [(0x01, 0xFFFFFFFF), (0x02, 1000), (0x04, 0xFFFFFFFF), (0x10, 0xFFFFFFFF),
                   (0x20, 0xFFFFFFFF)]
        acl = struct.pack("<I",
                          2) + b"".join(struct.pack("<HHI", tag, 7, who) for tag, who in entries)
        for user in (None, UNPRIVILEGED):
            with self.subTest(user=user):
                around = tempfile.mkdtemp(prefix="shared-", dir=WORK)
                os.chmod(around, 0o755)
                os.makedirs(f"{around}/tree/directory")
                os.mkdir(f"{around}/mnt")
                write(f"{around}/tree/directory/secret", b"secret", 0o640)
                if user is not None:
                    run("chown", "-R", f"{user}:{user}", around)
                bcow("convert", f"dir:{around}/tree", f"{around}/base.bcow")
                os.setxattr(around, "system.posix_acl_default", acl)
                upper, where, image = (os.path.join(around, name)
                                       for name in ("upper", "mnt", "base.bcow"))
                if user is not None:
                    upper, where, image = (for_everyone(path) for path in (upper, where, image))
                bcow("mount", image, where, "--upper", upper, user=user, timeout=60)
                try:
                    script = ('cd "$1"; mkdir -m 750 made; touch made/new root directory/secret; '
                              'getfattr -dm- . made made/new root directory directory/secret')
                    shown = run("sh", "-ec", script, "sh", where, user=user).out.decode()
                finally:
                    bcow("umount", where, user=user, timeout=60)
                self.assertNotIn("posix_acl", shown)
                for place, directories, files in os.walk(upper):
                    for name in directories + files:
                        names = os.listxattr(os.path.join(place, name), follow_symlinks=False)
                        held = [name for name in names if "posix_acl" in name]
                        # Files directly in .bcow are not part of the tree.
                        self.assertTrue(not held or place.endswith("/.bcow") and name in files,
                                        (place, name, held))
                self.assertNotIn("system.posix_acl_default", os.listxattr(upper))
                shutil.rmtree(around)

    def test_fsck_finds_the_image_or_reports_it_missing(self):
        self.assertEqual(bcow("fsck", self.upper).err, b"")
        moved = self.path("moved-away.bcow")
        os.rename(self.base, moved)
        try:
            result = bcow("fsck", self.upper)
            self.assertRegex(result.err.decode(), "warning: the image .*base.bcow.* is not usable")
        finally:
            os.rename(moved, self.base)

    def test_fsck_removes_unreferenced_files(self):
        upper = self.copy("leaky")
        write(f"{upper}/.bcow/maps/00000000000000aa", b"x" * 512)
        os.makedirs(os.path.join(upper, ".bcow", "work", "left", "over"))
        # A temporary file is a hardlink; its removal must not make the link count wrong.
        (entry,) = os.listdir(f"{upper}/.bcow/index")
        os.link(f"{upper}/.bcow/index/{entry}", os.path.join(upper, ".bcow", "work", "link"))
        os.setxattr(f"{upper}/.bcow/index/{entry}", "trusted.overlay.nlink", b"U+9")
        # A hardlink to a file with one name in the image.
        number = int.from_bytes(os.getxattr(f"{upper}/etc/config", "trusted.overlay.origin")[21:],
                                "little")
        spare = f"{upper}/.bcow/index/{number:016x}"
        run("cp", "-a", f"{upper}/etc/config", spare)
        os.setxattr(spare, "trusted.overlay.nlink", b"U-1")
        found = self.fsck(upper)
        for code in ("upper-map-leak", "upper-work-leak", "upper-index-leak", "upper-nlink"):
            self.assertIn(f"warning {code}", found)
        found = self.fsck(upper, "--repair", code=1)
        self.assertEqual(found.count("repaired: "), 4)
        self.assertNotIn("warning", self.fsck(upper))
        self.assertEqual(os.listdir(f"{upper}/.bcow/work"), [])
        self.partial(upper)

    def test_fsck_names_damage_and_does_not_change_it(self):
        def mark(name, value, path="var/lib/data/table"):
            return lambda upper: os.setxattr(f"{upper}/{path}", f"trusted.{name}", value)

        damages = {
            "upper-sketch-map": [lambda upper: os.unlink(self.partial(upper)),
                                 lambda upper: flip(self.partial(upper), 600),
                                 lambda upper: flip(self.partial(upper), 20),
                                 lambda upper: os.truncate(self.partial(upper), 512)],
            "upper-mark": [mark("bcow.sketch", b"?" * 40), mark("overlay.metacopy", b"\1"),
                           mark("overlay.origin", b"\0\xfb"),
                           mark("overlay.redirect", b"a/b", "usr/lib/renamed")],
            "upper-mark-misplaced":
                [lambda upper: os.removexattr(f"{upper}/var/lib/data/table", "trusted.bcow.sketch"),
                 mark("overlay.opaque", b"y")],
            "upper-origin": [mark("overlay.origin",
                                  bytes([0, 0xfb, 29, 0, 0xbc]) + bytes(16) + b"\xff" * 8)],
            "upper-record": [lambda upper: os.truncate(f"{upper}/.bcow/instance.json", 20)]}
        for code, ways in damages.items():
            for number, damage in enumerate(ways):
                upper = self.copy(f"{code}-{number}")
                damage(upper)
                before = run("find", upper, "-type", "f", "-size", "-9M", "-exec", "sha256sum",
                             "{}", "+").out
                with self.subTest(code=code, number=number):
                    self.assertIn(f"error {code}: ", self.fsck(upper, code=4))
                    self.fsck(upper, "--repair", code=4)
                    after = run("find", upper, "-type", "f", "-size", "-9M", "-exec", "sha256sum",
                                "{}", "+").out
                    self.assertEqual(before, after)
                shutil.rmtree(upper)

    def test_an_upper_that_a_stop_of_the_machine_left_without_synchronisation_is_refused(self):
        upper = self.copy("volatile")
        write(f"{upper}/.bcow/volatile", b"another boot\n")
        self.assertIn("error upper-volatile: .bcow/volatile", self.fsck(upper, code=4))
        assert_refused(self, bcow("commit", self.base, "--upper", upper, "tar:-", check=False),
                       "volatile")

    def test_overlayfs_shows_the_same_tree_except_for_partials(self):
        """overlayfs refuses partial files, and so does not show holes. bcow stores the root's mode
        in an attribute that overlayfs ignores."""
        upper, work = self.copy("for-overlayfs"), self.path("work-2")
        shutil.rmtree(f"{upper}/.bcow")
        os.mkdir(work)
        options = f"lowerdir={self.lower},upperdir={upper},workdir={work},{OVERLAY}"
        partials = ("var/lib/data/table", "sparse")
        with self.union():
            shown = tree.dump(self.merged)
        run("mount", "-t", "overlay", "overlay", "-o", options, self.merged)
        try:
            for path in partials:
                with self.assertRaises(OSError) as refused:
                    read_bytes(f"{self.merged}/{path}")
                self.assertEqual(refused.exception.errno, errno.EIO)
                os.unlink(f"{upper}/{path}")
                shutil.copy(f"{self.lower}/{path}", f"{upper}/{path}")
            run("umount", self.merged)
            run("mount", "-t", "overlay", "overlay", "-o", options, self.merged)
            ignore = ["mode:.", "mtime:.", "mtime:var/lib/data", "nlink:usr/linked-2",
                      "nlink:usr/lib/renamed/linked-3"]
            ignore += [f"{field}:{path}" for field in ("mtime", "sha256", "size")
                       for path in partials]
            assert_same_tree(self, shown, self.merged, ignore=ignore)
        finally:
            run("umount", self.merged)

    def test_a_refused_upper_leaves_no_file(self):
        where = self.path("ramfs")
        os.makedirs(f"{where}/given", exist_ok=True)
        run("mount", "-t", "ramfs", "ramfs", where)
        try:
            os.mkdir(f"{where}/given")
            for name in ("given", "new"):
                refused = bcow("mount", self.base, self.merged, "--upper", f"{where}/{name}",
                               check=False)
                assert_refused(self, refused, "does not support extended attributes")
            self.assertEqual((os.listdir(where), os.listdir(f"{where}/given")), (["given"], []))
        finally:
            run("umount", where)

    def test_fsck_warns_of_a_whiteout_without_a_target(self):
        upper = self.copy("white")
        os.mknod(f"{upper}/etc/nothing", stat.S_IFCHR, os.makedev(0, 0))
        self.assertIn("warning upper-whiteout: etc/nothing", self.fsck(upper))


class Rootless(unittest.TestCase):
    """An upper of an ordinary user: marks are user.* attributes; an attribute holds owners and
    device numbers."""

    def test_diff_shows_and_commit_stores_the_changes_of_a_user(self):
        need("fusermount3", "setpriv", root=True, fuse=True)
        top = os.path.join(WORK, "upper-rootless")
        shutil.rmtree(top, ignore_errors=True)
        make_lower(f"{top}/lower")
        os.makedirs(f"{top}/user/merged")
        run("chown", "-hR", f"{UNPRIVILEGED}:{UNPRIVILEGED}", top)
        base, after = f"{top}/base.bcow", f"{top}/user/after.bcow"
        bcow("convert", f"dir:{top}/lower", base)
        base, after, merged, upper = (for_everyone(path) for path in
                                      (base, after, f"{top}/user/merged", f"{top}/user/up"))
        script = """
            cd "$1"
            chmod 4711 etc/config
            printf changed | dd of=var/lib/data/table bs=1 seek=1048576 conv=notrunc status=none
            rm -r gone
            mv moved usr/lib/renamed
            ln new-link etc/hard 2>/dev/null || ln etc/unchanged etc/hard
            ln -s somewhere soft
            mkfifo pipe
            mkdir -m 1777 sticky
            rm null link
            """
        bcow("mount", base, merged, "--upper", upper, user=UNPRIVILEGED, timeout=60)
        try:
            run("sh", "-ec", script, "sh", merged, user=UNPRIVILEGED)
        finally:
            bcow("umount", merged, user=UNPRIVILEGED)
        bcow("mount", base, merged, "--upper", upper, user=UNPRIVILEGED, timeout=60)
        try:
            bcow("convert", f"dir:{merged}", after, user=UNPRIVILEGED)
        finally:
            bcow("umount", merged, user=UNPRIVILEGED)
        self.assertIn(b"user.overlay.origin",
                      os.fsencode("\n".join(os.listxattr(f"{top}/user/up/etc/config"))))
        for user in (UNPRIVILEGED, None):
            whole = bcow("diff", base, after, user=user, check=False)
            quick = bcow("diff", base, "--upper", upper, user=user, check=False)
            self.assertEqual((quick.code, quick.out), (1, whole.out), str(quick))
            self.assertEqual(bcow("fsck", upper, base, user=user).code, 0)
        flat = f"{top}/user/flat.bcow"
        bcow("commit", base, "--upper", upper, for_everyone(flat), "--flatten", user=UNPRIVILEGED)
        found = bcow("diff", after, flat, check=False)
        self.assertEqual((found.code, found.out), (0, b""), str(found))
        self.assertIn(b"4711", bcow("ls", "--json", flat, "/etc/config").out)
