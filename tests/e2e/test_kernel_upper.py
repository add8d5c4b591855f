"""Uppers of the kernel driver: `bcow mount IMG DIR --upper UPPER --driver kernel`.

The upper is a disk that shows the image as ext4. The judges are e2fsck, a copy of the tree on the
kernel's own ext4, and `bcow fsck`.
"""

import errno
import json
import mmap
import os
import random
import re
import shutil
import signal
import subprocess
import time
from unittest import mock

import subjects
import support
from promises import promise
from support import (assert_refused, assert_same_tree, bcow, drop_caches, flip, is_mounted,
                     read_bytes, read_json, read_text, run, until, write_file)
from test_kernel_driver import (KILLS, LIBC, MEBIBYTE, SECONDS, SEED, KernelDriver,
                              backing_files)
import tree

INSTANCES = 20
# Small file systems, so that e2fsck has little to read.
SIZE = "1G"
# What os does not have.
SYS_SYNCFS = {"x86_64": 306, "aarch64": 267}[os.uname().machine]


class KernelUpper(KernelDriver):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.views = os.path.join(support.WORK, "views")

    def setUp(self):
        super().setUp()
        before = os.environ.get("BCOW_VIEWS")
        os.environ["BCOW_VIEWS"] = self.views
        self.addCleanup(os.environ.pop, "BCOW_VIEWS")
        if before is not None:
            self.addCleanup(os.environ.__setitem__, "BCOW_VIEWS", before)
        self.lower = subjects.Lower(self.dir, subjects.plant)
        # The cleanup knows the processes of this test by the name.
        self.image = self.lower.image = self.disk_path("image")
        self.lower.make_image()
        self.where, self.upper = self.point(), self.upper_path("upper")

    def upper_path(self, name):
        return self.path(f"{self.tag}-{name}")

    def begin(self, upper=None, where=None, *options, **more):
        return self.mount(self.image, where or self.where, "--upper", upper or self.upper,
                          "--driver", "kernel", "-s", SIZE, "-o", "suid,dev", *options, **more)

    def continue_(self, *options, **more):
        return self.mount(self.image, self.where, "--upper", self.upper, "-o", "suid,dev",
                          *options, **more)

    def disk(self, upper=None):
        return os.path.join(upper or self.upper, ".bcow", "disk.bcow")

    def assert_upper_clean(self, upper=None):
        """bcow and e2fsck find no error in an upper that no mount uses."""
        done = bcow("fsck", "--data", upper or self.upper, timeout=SECONDS)
        self.assertIn(b": clean (kernel driver", done.out)
        raw = self.path("check.raw")
        bcow("convert", "--backing-dir", self.dir, self.disk(upper), f"raw:{raw}",
             timeout=SECONDS)
        self.assertEqual(run("e2fsck", "-fn", raw, timeout=SECONDS).code, 0)
        os.unlink(raw)


class Mounts(KernelUpper):
    def test_an_upper_keeps_the_changes_and_its_driver(self):
        self.begin()
        assert_same_tree(self, self.lower.tree, self.where)
        statistics = self.stats(self.where)
        self.assertEqual(statistics["door"], {"name": "kernel", "reason": "as --driver says"})
        self.assertEqual((statistics["image"]["file"], statistics["disk"]["upper"],
                          statistics["disk"]["path"], statistics["disk"]["filesystem"]),
                         (self.image, self.upper, self.disk(), "ext4"))
        shown = bcow("stats", self.where).out.decode()
        self.assertIn("driver:        kernel: as --driver says\n", shown)
        self.assertIn(f"upper:       {self.upper}\n", shown)
        [service] = self.services()
        self.assertEqual((service["image"], service["upper"], service["mode"], service["at"]),
                         (self.image, self.upper, "rw", [self.where]))
        run("sh", "-c", 'cd "$0" && rm -r d0 && mv d1 moved && printf more >> d2/big && '
            "chmod 600 top && mkdir -p new/below && ln d2/blocks new/hard && : > new/empty",
            self.where, timeout=SECONDS)
        before = tree.dump(self.where)
        self.end(self.where)
        record = read_json(os.path.join(self.upper, ".bcow", "instance.json"))
        self.assertEqual((record["schema"], record["door"], record["fs"], record["size"],
                          record["image"]),
                         ("bcow.instance/2", "kernel", "ext4", 1 << 30,
                          statistics["image"]["identity"]))
        self.assertEqual(os.listdir(self.upper), [".bcow"])
        self.assertEqual(sorted(os.listdir(os.path.join(self.upper, ".bcow"))),
                         ["disk.bcow", "instance.json", "lock"])
        self.assert_upper_clean()
        # Without --driver, the upper's driver serves.
        self.continue_()
        self.assertEqual(self.stats(self.where)["door"],
                         {"name": "kernel", "reason": "the upper belongs to it"})
        assert_same_tree(self, before, self.where)
        self.umount(self.where)
        # The image is as it was, and so is what a new upper shows.
        self.assertEqual(bcow("fsck", "--data", self.image).code, 0)
        self.begin(self.upper_path("other"))
        assert_same_tree(self, self.lower.tree, self.where)
        self.end(self.where)

    def test_an_upper_is_refused_by_name_at_the_other_driver(self):
        self.begin()
        refused = self.mount(self.image, self.point("b"), "--upper", self.upper, check=False)
        assert_refused(self, refused, "is being written by bcow mount, process")
        self.umount(self.where)
        refused = self.continue_("--driver", "fuse", check=False)
        assert_refused(self, refused, "belongs to the kernel driver, and cannot be mounted with "
                       "the FUSE driver", "--driver kernel", code=2)
        fuse = self.upper_path("fuse")
        self.mount(self.image, self.where, "--upper", fuse)
        driver = self.stats(self.where)["door"]
        self.assertEqual(driver["name"], "fuse")
        self.assertIn("the default for a new upper", driver["reason"])
        self.umount(self.where)
        refused = self.begin(fuse, check=False)
        assert_refused(self, refused, "belongs to the FUSE driver, and cannot be mounted with "
                       "the kernel driver", "--driver fuse", code=2)
        for arguments in (["inspect", self.upper], ["ls", self.upper],
                          ["extract", self.upper, self.path("out")]):
            refused = bcow(*arguments, check=False)
            assert_refused(self, refused, "it is a directory", "upper of a writable mount")

    def test_what_does_not_fit_the_driver_begins_no_upper(self):
        other = self.disk_path("other")
        bcow("convert", f"dir:{os.path.join(support.TOP, 'spec')}", other)
        disk = self.make_disk()
        occupied = self.point(f"{self.tag}-occupied")
        with open(os.path.join(occupied, "file"), "w"):
            pass
        for image, upper, options, reason, code in (
                (self.image, self.upper, ["--size-limit", "1G"], "--size-limit is not", 2),
                (self.image, self.upper, ["--inode-limit", "9"], "--inode-limit is not", 2),
                (self.image, self.upper, ["--sketch", "packed"], "only one form is left: sparse",
                 2),
                (self.image, self.upper, ["--fillers", "2"], "--fillers is not", 2),
                (self.image, self.upper, ["--sync", "batch=3"], "commit=SECONDS", 2),
                (self.image, self.upper, ["--layer", other], "a complete image, not a layer", 1),
                (self.image, self.upper, ["-s", "4096"], "an ext4 of 4096 bytes is too small", 1),
                (disk, self.upper, [], "this is a disk", 1),
                (self.image, occupied, [], "not empty", 1)):
            with self.subTest(options=options, image=image, upper=upper):
                refused = self.mount(image, self.where, "--upper", upper, "--driver", "kernel",
                                     *options, check=False)
                assert_refused(self, refused, reason, code=code)
        self.assertFalse(os.path.exists(self.upper))
        self.assertEqual(os.listdir(occupied), ["file"])
        refused = self.mount(self.image, self.where, "--upper", self.upper, "--size", "1G",
                             check=False)
        assert_refused(self, refused, "--size is for", code=2)
        self.begin()
        self.umount(self.where)
        refused = self.mount(other, self.where, "--upper", self.upper, check=False)
        assert_refused(self, refused, "belongs to the image .*image.bcow")
        # The kernel would trust what another user has written.
        os.chmod(self.disk(), 0o666)
        refused = self.continue_(check=False)
        assert_refused(self, refused, "another user can write")
        os.chmod(self.disk(), 0o600)
        os.chown(self.disk(), 65534, 65534)
        refused = self.continue_(check=False)
        assert_refused(self, refused, "another user can write")
        self.assert_ended()

    def test_mount_of_fstab_and_options(self):
        helper = self.path("mount.bcow")
        os.symlink(support.BCOW, helper)
        options = f"rw,upper={self.upper},driver=kernel,size={SIZE},nosuid,relatime,discard"
        run(helper, self.image, self.where, "-o", options, timeout=SECONDS)
        with open("/proc/self/mountinfo") as table:
            [line] = [line.split() for line in table if line.split()[4] == self.where]
        self.assertEqual(set(line[5].split(",")), {"rw", "nosuid", "relatime"})
        self.assertIn("discard", line[-1])
        self.assertEqual(self.stats(self.where)["disk"]["size_bytes"], 1 << 30)
        # A second mount of the upper is a bind mount of the first.
        second = self.path("second")
        os.mkdir(second)
        run(helper, self.image, second, "-o", f"ro,upper={self.upper},if_mounted=bind",
            timeout=SECONDS)
        self.assertEqual(os.stat(second).st_dev, os.stat(self.where).st_dev)
        with self.assertRaises(OSError) as refused:
            os.mkdir(os.path.join(second, "new"))
        self.assertEqual(refused.exception.errno, errno.EROFS)
        run("umount", second, timeout=SECONDS)
        run("umount", self.where, timeout=SECONDS)
        log = self.path("log")
        self.continue_("-o", "ro", "--log-file", log, "--sync", "volatile")
        self.assertEqual(self.services()[0]["mode"], "ro")
        self.assertEqual(self.stats(self.where)["disk"]["sync"], "volatile")
        self.assertTrue(os.path.exists(os.path.join(self.upper, ".bcow", "volatile")))
        with self.assertRaises(OSError) as refused:
            os.mkdir(os.path.join(self.where, "new"))
        self.assertEqual(refused.exception.errno, errno.EROFS)
        self.umount(self.where)
        self.assertFalse(os.path.exists(os.path.join(self.upper, ".bcow", "volatile")))
        self.assertTrue(os.path.exists(log))
        self.assert_ended()

    def test_the_cache_commands_know_the_views(self):
        views, cache = self.path("views"), self.path("cache")
        os.environ["BCOW_VIEWS"] = views

        def cached(what, *options):
            return json.loads(bcow("cache", what, "--json", "--cache-dir", cache, *options).out)

        self.begin()
        os.chmod(views, 0o700)
        write_file(os.path.join(views, "notes.txt"), "not a view")
        listed = cached("list")
        [view] = listed["views"]
        path = os.path.join(views, view["name"])
        self.assertEqual((listed["views_directory"], listed["views_bytes"], view["held_bytes"]),
                         (views, os.stat(path).st_blocks * 512, listed["views_bytes"]))
        self.assertEqual((view["image"], view["bytes"], view["layout"], view["in_use"]),
                         (self.image, 1 << 30, 1, True))
        self.assertIn(self.image.encode(), bcow("cache", "list", "--cache-dir", cache).out)
        pruned = cached("prune", "--all")
        self.assertEqual((pruned["removed_views"], pruned["in_use_views"]), (0, 1))
        self.end(self.where)
        self.assertFalse(cached("list")["views"][0]["in_use"])
        for option in ("--older-than=1d", "--limit=1G"):
            pruned = cached("prune", option)
            self.assertEqual((pruned["removed_views"], pruned["views_bytes"]),
                             (0, view["held_bytes"]))
        two_days_ago = os.stat(path).st_mtime - 2 * 24 * 3600
        for option in ("--older-than=1d", "--limit=0", "--all"):
            with self.subTest(option):
                os.utime(path, (two_days_ago, two_days_ago))
                pruned = cached("prune", option)
                self.assertEqual((pruned["removed_views"], pruned["views_bytes"]), (1, 0))
                self.assertEqual(os.listdir(views), ["notes.txt"])
                # It is made again.
                self.continue_()
                self.umount(self.where)
        found = cached("verify")
        self.assertEqual((found["views"], found["damaged_views"]), (1, []))
        flip(path, 5000)
        found = cached("verify")
        self.assertEqual((found["views"], found["damaged_views"]), (1, [view["name"]]))
        self.assertEqual(os.listdir(views), ["notes.txt"])
        self.continue_()
        assert_same_tree(self, self.lower.tree, self.where)
        self.umount(self.where)
        # Without the variable, the views are those of the cache.
        listed = json.loads(bcow("cache", "list", "--json", "--cache-dir", cache,
                                 env={"BCOW_VIEWS": ""}).out)
        self.assertEqual(listed["views_directory"], os.path.join(cache, "views"))
        self.assertEqual(listed["views"], [])
        with mock.patch.dict(os.environ, BCOW_VIEWS="", BCOW_CACHE=cache):
            self.continue_()
            self.umount(self.where)
            listed = json.loads(bcow("cache", "list", "--json").out)
        self.assertEqual(listed["views_directory"], os.path.join(cache, "views"))
        self.assertEqual(len(listed["views"]), 1)
        self.assert_ended()

    def test_many_instances_of_one_image_at_once(self):
        places = [(self.upper_path(f"upper-{number}"), self.point(f"mnt-{number}"))
                  for number in range(INSTANCES)]
        for upper, where in places:
            self.begin(upper, where)
        stored = [sum(os.lstat(os.path.join(path, name)).st_blocks * 512
                      for path, _, names in os.walk(upper) for name in names)
                  for upper, _ in places]
        self.assertLess(max(stored), 2 * MEBIBYTE)
        writers = [subprocess.Popen(["sh", "-c", 'cd "$0" && echo $1 > top && cp -r d0 copy && '
                                     "rm -r many && sync -f .", where, str(number)])
                   for number, (_, where) in enumerate(places)]
        for writer in writers:
            self.assertEqual(writer.wait(timeout=SECONDS), 0)
        self.assertEqual(len(self.services()), INSTANCES)
        for number, (upper, where) in enumerate(places):
            self.assertEqual(read_text(os.path.join(where, "top")), f"{number}\n")
            self.umount(where)
        self.assert_ended()
        # They share one view.
        for upper, _ in places[:2]:
            self.assert_upper_clean(upper)

    def test_each_upper_has_a_file_system_of_its_own(self):
        """By its UUID, with which the kernel and udev tell file systems apart."""
        uuids = []
        for name in ("one", "other"):
            where = self.point(name)
            self.begin(self.upper_path(name), where)
            [device] = [device for device, file in backing_files().items()
                        if file.endswith(f":{self.tag}-{name}")]
            uuids.append(run("blkid", "-p", "-o", "value", "-s", "UUID", device).out)
            assert_same_tree(self, self.lower.tree, where)
        self.assertEqual(len(set(uuids)), 2, uuids)
        for name in ("one", "other"):
            self.umount(self.point(name))
            compared = bcow("diff", self.image, "--upper", self.upper_path(name), timeout=SECONDS)
            self.assertEqual((compared.code, compared.out), (0, b""))
            self.assert_upper_clean(self.upper_path(name))

    def test_unnamed_files_syncfs_and_shared_mappings_work(self):
        self.begin()
        # A file without a name gets one.
        fd = os.open(self.where, os.O_TMPFILE | os.O_RDWR, 0o640)
        os.write(fd, b"unnamed")
        here, follow = -100, 0x400
        self.assertEqual(LIBC.linkat(here, os.fsencode(f"/proc/self/fd/{fd}"), here,
                                     os.fsencode(os.path.join(self.where, "named")), follow), 0)
        self.assertEqual(LIBC.syscall(SYS_SYNCFS, fd), 0)
        os.close(fd)
        # A shared mapping of a file of the image, seen through another descriptor.
        with open(os.path.join(self.where, "d2/big"), "r+b") as file:
            with mmap.mmap(file.fileno(), 1 << 20) as room:
                room[5000:5004] = b"here"
                room.flush()
                with open(os.path.join(self.where, "d2/big"), "rb") as other:
                    self.assertEqual(os.pread(other.fileno(), 4, 5000), b"here")
        self.umount(self.where)
        self.continue_()
        self.assertEqual(read_bytes(os.path.join(self.where, "named")), b"unnamed")
        wanted = bytearray(read_bytes(os.path.join(self.lower.tree, "d2/big")))
        wanted[5000:5004] = b"here"
        self.assertEqual(read_bytes(os.path.join(self.where, "d2/big")), wanted)
        self.end(self.where)
        self.assert_upper_clean()

    @promise("When no request arrives for ten to twenty seconds, the process frees this cache.")
    def test_a_mount_at_rest_gives_its_memory_back(self):
        content = os.urandom(20 * MEBIBYTE).hex().encode()
        tree_of_it = self.point("tree")
        write_file(os.path.join(tree_of_it, "file"), content)
        image = self.disk_path("large")
        bcow("convert", f"dir:{tree_of_it}", image, timeout=SECONDS)
        for driver in ("kernel", "fuse"):
            where = self.point(f"at-{driver}")
            self.mount(image, where, "--driver", driver, "--upper", self.upper_path(driver))
            process = self.stats(where)["process"]["pid"]

            def resident():
                with open(f"/proc/{process}/status") as status:
                    return int(re.search(r"VmRSS:\s+(\d+) kB", status.read())[1]) << 10

            def read():
                return read_bytes(os.path.join(where, "file")) == content

            self.assertTrue(read())
            held = self.stats(where)["cache"]["held_bytes"]
            self.assertGreater(held, 30 * MEBIBYTE)
            until(lambda: resident() < 32 * MEBIBYTE, f"memory returned, {driver}", SECONDS)
            self.assertEqual(self.stats(where)["cache"]["held_bytes"], 0)
            drop_caches("3")
            self.assertTrue(read())
            self.umount(where)

    def test_deleted_space_returns_to_the_host(self):
        for option, command in (("discard", "true"), ("nodiscard", "fstrim")):
            with self.subTest(option):
                self.begin(None, None, "-o", option)
                data = os.path.join(self.where, "data")
                run("dd", "if=/dev/urandom", f"of={data}", "bs=1M", "count=60", "conv=fsync",
                    timeout=SECONDS)
                stored = os.stat(self.disk()).st_blocks * 512
                self.assertGreater(stored, 60 * MEBIBYTE)
                os.unlink(data)
                run("sync", "-f", self.where, timeout=SECONDS)
                run(command, self.where, timeout=SECONDS)
                until(lambda: os.stat(self.disk()).st_blocks * 512 < stored - 50 * MEBIBYTE,
                      "a smaller upper", SECONDS)
                self.umount(self.where)
        self.assert_upper_clean()


class Layers(KernelUpper):
    """Layers on the command line, between the image and the mountpoint."""

    def tree_at_the_fuse_driver(self, *layers):
        where = self.point("fuse")
        bcow("mount", self.image, *layers, where, "-o", "suid,dev", timeout=SECONDS)
        found = tree.dump(where)
        self.umount(where)
        return found

    def test_an_upper_over_layers_keeps_changes_and_is_committed(self):
        first, second = self.disk_path("first"), self.disk_path("second")
        self.begin()
        run("sh", "-c", 'cd "$0" && rm -r d0 && mv d1 moved && printf more >> d2/big && '
            "mkdir new && echo one > new/file && chmod 600 top", self.where, timeout=SECONDS)
        self.umount(self.where)
        bcow("commit", self.image, "--upper", self.upper, first, timeout=SECONDS)
        upper = self.upper_path("over")
        over = [self.image, first, self.where, "--upper", upper, "-o", "suid,dev"]
        bcow("mount", *over, "--driver", "kernel", "-s", SIZE, timeout=SECONDS)
        assert_same_tree(self, self.tree_at_the_fuse_driver(first), self.where)
        [service] = self.services()
        self.assertEqual((service["image"], service["layers"]), (self.image, [first]))
        run("sh", "-c", 'cd "$0" && rm new/file && echo two > new/other && mv moved d0 && '
            "printf less >> d2/big && ln top hard", self.where, timeout=SECONDS)
        before = tree.dump(self.where)
        self.umount(self.where)
        # The same layers, or an error.
        for wrong in ([self.image, self.where], [self.image, first, first, self.where]):
            refused = bcow("mount", *wrong, "--upper", upper, check=False, timeout=SECONDS)
            self.assertEqual(refused.code, 1, str(refused))
            self.assertRegex(refused.err.decode(), "belongs to the image|made over another image")
        bcow("mount", *over, timeout=SECONDS)
        assert_same_tree(self, before, self.where)
        self.end(self.where)
        bcow("fsck", "--data", upper, self.image, "--layer", first, timeout=SECONDS)
        changed = bcow("diff", self.image, "--layer", first, "--upper", upper, check=False)
        self.assertIn(b"new/other", changed.out)
        bcow("commit", self.image, "--layer", first, "--upper", upper, second, timeout=SECONDS)
        found = self.tree_at_the_fuse_driver(first, second)
        assert_same_tree(self, found, before)
        # Read-only, the kernel's EROFS shows the layers.
        bcow("mount", self.image, first, second, self.where, "--driver", "kernel", "-o", "suid,dev",
             timeout=SECONDS)
        assert_same_tree(self, found, self.where)
        self.end(self.where)
        disk = self.make_disk()
        refused = bcow("mount", disk, first, self.where, "--driver", "kernel", check=False)
        assert_refused(self, refused, "is a disk, and has no layers")


class Failures(KernelUpper):
    def test_a_begin_that_was_cut_short_is_completed(self):
        self.begin()
        write_file(os.path.join(self.where, "kept"), "kept")
        self.end(self.where)
        # Without its record, the upper still belongs to the kernel driver, and keeps its disk.
        os.unlink(os.path.join(self.upper, ".bcow", "instance.json"))
        refused = self.continue_("--driver", "fuse", check=False)
        assert_refused(self, refused, "belongs to the kernel driver", code=2)
        found = bcow("fsck", "--json", self.upper)
        self.assertEqual([one["code"] for one in json.loads(found.out)["findings"]],
                         ["upper-incomplete"])
        self.continue_()
        self.assertEqual(read_text(os.path.join(self.where, "kept")), "kept")
        self.umount(self.where)
        self.assert_upper_clean()
        # With its lock only, either driver begins.
        lock = self.upper_path("lock")
        os.makedirs(os.path.join(lock, ".bcow"), mode=0o700)
        write_file(os.path.join(lock, ".bcow", "lock"), "")
        bcow("fsck", lock)
        copy = shutil.copytree(lock, self.upper_path("copy"))
        self.begin(lock)
        self.umount(self.where)
        self.mount(self.image, self.where, "--upper", copy, "--driver", "fuse")
        self.end(self.where)

    def test_a_process_killed_while_it_begins_leaves_a_usable_upper(self):
        rng = random.Random(SEED)
        for kill in range(3 * KILLS):
            upper = self.upper_path(f"upper-{kill}")
            process = subprocess.Popen(
                [support.BCOW, "mount", "-f", self.image, self.where, "--upper", upper, "--driver",
                 "kernel", "-s", SIZE], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            time.sleep(rng.random() * 0.1)
            process.kill()
            process.wait(timeout=SECONDS)
            self.end_killed(self.where)
            self.begin(upper)
            assert_same_tree(self, self.lower.tree, self.where)
            self.umount(self.where)
            if kill % 4 == 0:
                self.assert_upper_clean(upper)
            shutil.rmtree(upper)
        self.assert_ended()

    def test_fsck_finds_damage_and_missing_parts(self):
        self.begin()
        self.end(self.where)

        def codes(*options, code=4):
            done = bcow("fsck", "--json", *options, self.upper, check=False)
            self.assertEqual(done.code, code, str(done))
            return {one["code"] for one in json.loads(done.out)["findings"]}

        self.assertEqual(codes(code=0), set())
        good = read_bytes(self.disk())
        # There is nothing to repair after a clean end.
        self.assertEqual(codes("--repair", code=0), set())
        write_file(self.disk(), b"x" * len(good))
        self.assertNotEqual(codes(), set())
        refused = self.continue_(check=False)
        assert_refused(self, refused, "cannot open the disk of the upper", "fsck")
        self.assertFalse(is_mounted(self.where))
        os.unlink(self.disk())
        self.assertEqual(codes(), {"upper-record"})
        refused = self.continue_(check=False)
        assert_refused(self, refused, "disk.bcow: damaged: it is missing")
        write_file(self.disk(), good)
        os.chmod(self.disk(), 0o600)
        write_file(os.path.join(self.upper, ".bcow", "volatile"), "another boot\n")
        self.assertEqual(codes(), {"upper-volatile"})
        assert_refused(self, self.continue_(check=False), "mounted with --sync volatile")
        os.unlink(os.path.join(self.upper, ".bcow", "volatile"))
        # Without its image, the disk is still checked.
        away = self.disk_path("away")
        os.rename(self.image, away)
        done = bcow("fsck", self.upper)
        self.assertIn(b"is not usable, so what the disk shows of it is not checked", done.err)
        self.assertEqual(bcow("fsck", self.upper, away).err, b"")
        os.rename(away, self.image)
        # A disk of another image has another view.
        other = self.disk_path("other")
        bcow("convert", f"dir:{os.path.join(support.TOP, 'spec')}", other)
        foreign = self.disk_path("foreign")
        bcow("create", "-b", other, "--fs", "ext4", "-s", SIZE, foreign)
        os.replace(foreign, self.disk())
        os.chmod(self.disk(), 0o600)
        self.assertEqual(codes(), {"backing-unreadable"})
        refused = self.continue_(check=False)
        assert_refused(self, refused, "the view of the image is not the one")

    def test_an_upper_that_was_removed_while_it_was_mounted_is_reported(self):
        self.begin()
        write_file(os.path.join(self.where, "new"), b"new")
        shutil.rmtree(self.upper)
        ended = self.umount(self.where, check=False)
        assert_refused(self, ended, f"the upper {self.upper} was removed while it was mounted")
        self.assert_ended()

    def test_without_the_privilege_no_upper_is_begun(self):
        support.need("unshare")
        # Root of the namespace cannot enter the private directory of a user who is not in it.
        refused = run("unshare", "-rm", support.for_everyone(support.BCOW), "mount", self.image,
                      self.where, "--upper", self.upper, "--driver", "kernel", "-s", SIZE,
                      check=False, timeout=SECONDS)
        assert_refused(self, refused, "it lacks CAP_SYS_ADMIN outside user namespaces")
        self.assertFalse(os.path.exists(self.upper))

    def test_a_stopped_process_is_named_before_the_unmount_blocks(self):
        self.begin()
        write_file(os.path.join(self.where, "new"), b"new")
        [pid] = self.processes()
        support.stop(pid)
        try:
            refused = self.umount(self.where, check=False)
            assert_refused(self, refused, f"its process {pid} is stopped by a signal")
            self.assertTrue(is_mounted(self.where))
        finally:
            os.kill(pid, signal.SIGCONT)
        self.end(self.where)

    def begin_on_a_small_disk(self):
        """A mount whose upper is in a file system of 48 MiB. Returns the mountpoint of that, and a
        file of zeros that is synced."""
        small = self.point("small")
        run("mount", "-t", "tmpfs", "-o", "size=48M", f"tmpfs-{self.tag}", small, timeout=SECONDS)
        self.upper = os.path.join(small, f"{self.tag}-upper")
        self.begin()
        kept = os.path.join(self.where, "kept")
        run("dd", "if=/dev/zero", f"of={kept}", "bs=1M", "count=8", "conv=fsync", timeout=SECONDS)
        return small, kept

    def test_a_full_host_disk_loses_nothing_that_was_synced(self):
        small, kept = self.begin_on_a_small_disk()
        full = run("dd", "if=/dev/urandom", f"of={self.where}/full", "bs=1M", "count=120",
                   "conv=fsync", check=False, timeout=SECONDS)
        self.assertNotEqual(full.code, 0)
        errors = {one["kind"]: one["count"] for one in self.stats(self.where)["errors"]["kinds"]}
        self.assertGreater(errors["no-space"], 0)
        ended = self.umount(self.where, check=False)
        assert_refused(self, ended, f"not all written data is in the upper {self.upper}")
        self.assert_ended()
        run("mount", "-o", "remount,size=400M", small, timeout=SECONDS)
        self.continue_()
        self.assertEqual(read_bytes(kept), bytes(8 * MEBIBYTE))
        self.end(self.where)
        self.assert_upper_clean()

    def test_after_a_crash_on_a_full_host_disk_the_lack_of_space_is_named(self):
        small, kept = self.begin_on_a_small_disk()
        [pid] = self.processes()
        os.kill(pid, signal.SIGKILL)
        until(lambda: not self.processes(), "the end of the killed process")
        self.umount_killed(self.where)
        self.assert_ended()
        run("dd", "if=/dev/zero", f"of={small}/fill", "bs=4K", check=False, timeout=SECONDS)
        refused = self.continue_(check=False)
        assert_refused(self, refused, "No space left on device", "free some space where")
        self.assert_ended()
        # Without a log, it is the journal of the file system that needs space.
        os.unlink(f"{small}/fill")
        bcow("resize", self.disk(), "--backing-dir", self.dir, "+0", timeout=SECONDS)
        run("dd", "if=/dev/zero", f"of={small}/fill", "bs=4K", check=False, timeout=SECONDS)
        refused = self.continue_(check=False)
        assert_refused(self, refused, "cannot write to .* while the kernel mounts",
                       "No space left on device", "free some space where")
        self.assert_ended()
        os.unlink(f"{small}/fill")
        self.continue_()
        self.assertEqual(read_bytes(kept), bytes(8 * MEBIBYTE))
        self.end(self.where)
        self.assert_upper_clean()

    def test_more_dirty_pages_than_memory(self):
        group = self.memory_group(64 * MEBIBYTE)
        enter = f'echo $$ > "{group}/cgroup.procs" && exec "$@"'
        inside = run("sh", "-c", enter, "sh", support.BCOW, "mount", self.image, self.where,
                     "--upper", self.upper, "--driver", "kernel", "-s", SIZE, check=False,
                     timeout=SECONDS)
        if inside.code != 0:
            # Where the process may not protect itself, it refuses to be in such a group.
            assert_refused(self, inside, "lacks CAP_SYS_RESOURCE")
            self.assertFalse(self.may_protect_itself())
            self.assertFalse(os.path.exists(self.upper))
            self.begin()
        code = self.guarded("sh", "-c", enter, "sh", "dd", "if=/dev/urandom",
                            f"of={self.where}/data", "bs=1M", "count=200", "conv=fsync",
                            "status=none", codes=(0, -signal.SIGKILL))
        # A group of version 1 does not slow a writer down. If the disk of the host is busy for
        # long, the kernel kills the writer instead. The mount and what was written stay.
        self.assertEqual(self.kills_of(group) > 0, code != 0)
        first = run("sha256sum", f"{self.where}/data", timeout=SECONDS).out.split()[0]
        self.umount(self.where)
        self.continue_()
        second = run("sha256sum", f"{self.where}/data", timeout=SECONDS).out.split()[0]
        self.assertEqual(first, second)
        self.end(self.where)
        self.assert_upper_clean()
