"""The cache of remote images: list, check, limit, fetching ahead; and what happens to
readers when it is full, shared by many processes, evicted, or deleted.

The server is that of test_remote.py. Every command and every wait has a time limit.
"""

import os
import random
import shutil
import signal
import subprocess
import tempfile
import time

import test_remote
from schema import checked
from support import assert_refused, assert_same_tree, overwrite, read_bytes, run, until, write_file

TIMEOUT = test_remote.TIMEOUT


class Cache(test_remote.WebCase):
    def listed(self):
        return checked(self.bcow("cache", "list", "--json").out)

    def verified(self):
        return checked(self.bcow("cache", "verify", "--json").out)

    def cached(self):
        (name,) = (name for name in os.listdir(self.cache) if name.endswith(".bcow"))
        return os.path.join(self.cache, name)

    def test_list_shows_what_is_present_and_where_it_comes_from(self):
        self.assertEqual(self.listed()["files"], [])
        with self.server() as server:
            url = server.url("image.bcow")
            self.bcow("ls", url + "?signature=geheim")
            (entry,) = self.listed()["files"]
            self.assertEqual(entry["root"], self.root.removeprefix("sha256:"))
            self.assertEqual(entry["file_bytes"], self.bytes)
            self.assertLess(entry["present_bytes"], self.bytes // 4)
            self.assertFalse(entry["in_use"])
            self.assertEqual(entry["origin"], url + "?...")
            with self.mounted(url):
                (entry,) = self.listed()["files"]
                self.assertTrue(entry["in_use"])
        text = self.bcow("cache", "list").out.decode()
        self.assertIn(entry["root"][:12], text)
        self.assertNotIn("geheim", text)

    def test_missing_cache_is_empty(self):
        self.env["BCOW_CACHE"] = self.path("never-made")
        self.assertEqual(self.listed()["files"], [])
        self.bcow("cache", "verify")
        self.bcow("cache", "prune", "--all")
        self.assertFalse(os.path.exists(self.path("never-made")))

    def test_warm_needs_room_and_a_remote_image(self):
        with self.server() as server:
            url = server.url("image.bcow")
            assert_refused(self, self.bcow("cache", "warm", "--cache-limit", "1M", url,
                                           check=False), "limit of the cache is 1 MiB")
            assert_refused(self, self.bcow("cache", "warm", "--no-cache", url, check=False),
                           "there is no cache")
            small = self.small_disk()
            self.env["BCOW_CACHE"] = small
            assert_refused(self, self.bcow("cache", "warm", url, check=False),
                           "No space left on device")
        assert_refused(self, self.bcow("cache", "warm", self.image, check=False),
                       "on this machine", code=2)

    def small_disk(self):
        small = tempfile.mkdtemp(prefix="small-", dir=self.directory)
        run("mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", small, timeout=TIMEOUT)
        self.addCleanup(subprocess.run, ["umount", small], timeout=TIMEOUT, check=False)
        return small

    def test_verify_removes_damage_and_names_unknown_files(self):
        with self.server() as server:
            url = server.url("image.bcow")
            self.bcow("cache", "warm", url)
            for at in 1 << 20, (1 << 20) + 5, 5 << 20:
                overwrite(self.cached(), at, b"damage")
            write_file(os.path.join(self.cache, "notes"), "mine")
            text = self.bcow("cache", "verify").out.decode()
            self.assertRegex(text, r"removed 32,768 bytes that did not match")
            self.assertIn("notes: not a file of the cache", text)
            found = self.verified()
            self.assertEqual(found["damaged_bytes"], 0)
            self.assertEqual(found["unknown"], ["notes"])
            self.assertFalse(found["files"][0]["complete"])
            sent = server.sent
            self.bcow("cache", "warm", url)
            self.assertLess(server.sent - sent, 1 << 20)
            run("cmp", self.cached(), self.image)
        self.assertTrue(os.path.exists(os.path.join(self.cache, "notes")))

    def test_prune_keeps_what_a_mount_uses(self):
        assert_refused(self, self.bcow("cache", "prune", check=False), code=2)
        with self.server() as server:
            url = server.url("image.bcow")
            with self.mounted(url) as where:
                os.listdir(where)
                self.bcow("cache", "prune", "--all")
                self.assertEqual(len(self.listed()["files"]), 1)
            self.bcow("cache", "prune", "--older-than", "1h")
            self.bcow("cache", "prune", "--limit", "1G")
            self.assertEqual(len(self.listed()["files"]), 1)
            done = checked(self.bcow("cache", "prune", "--limit", "0", "--json").out)
            self.assertEqual((done["removed_files"], done["held_bytes"]), (1, 0))
            self.assertEqual(os.listdir(self.cache), [])

    def test_limit_of_the_command_line_goes_before_the_environment(self):
        with self.server() as server:
            url = server.url("image.bcow")
            self.env["BCOW_CACHE_LIMIT"] = "many"
            assert_refused(self, self.bcow("ls", url, check=False), "BCOW_CACHE_LIMIT", code=2)
            self.bcow("fsck", "--data", "--cache-limit", "1G", url)
            self.assertGreater(self.listed()["held_bytes"], self.bytes - 1)
            self.env["BCOW_CACHE_LIMIT"] = "2M"
            self.bcow("fsck", "--data", "--no-cache", url)
            other = os.path.join(self.served, "second.bcow")
            self.bcow("convert", "--block-size", "64K", f"dir:{self.tree}", other)
            self.bcow("ls", server.url("second.bcow"))
        self.assertLess(self.listed()["held_bytes"], 2 << 20)

    def test_mount_goes_on_when_its_cache_is_deleted_or_its_disk_is_full(self):
        with self.server() as server:
            url = server.url("image.bcow")
            with self.mounted(url) as where:
                os.listdir(where)
                shutil.rmtree(self.cache)
                assert_same_tree(self, self.tree, where)
            self.env["BCOW_CACHE"] = self.small_disk()
            with self.mounted(url) as where:
                assert_same_tree(self, self.tree, where)

    def test_two_hundred_processes_fetch_each_byte_once_into_one_cache(self):
        with self.server() as server:
            url = server.url("image.bcow")
            names = [f"/dir-{n % 40}/file-{n % 20}" for n in range(200)]
            # A process waits a quarter of this for one that makes no progress.
            running = [self.started("cat", "--server-timeout", "1200", "--root-hash", self.root,
                                    url, name, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                       for name in names]
            try:
                for name, process in zip(names, running):
                    out, err = process.communicate(timeout=4 * TIMEOUT)
                    self.assertEqual(process.returncode, 0, err.decode())
                    self.assertTrue(out == read_bytes(self.tree + name), name)
            finally:
                for process in running:
                    if process.poll() is None:
                        process.kill()
                        process.communicate()
            asked = sorted(server.ranges)
            self.assertGreater(len(asked), 10)
            for (_, last), (first, _) in zip(asked, asked[1:]):
                self.assertLess(last, first, "bytes that two processes fetched")
            self.assertEqual(len(self.listed()["files"]), 1)
            self.assertEqual(self.verified()["damaged_bytes"], 0)

    def test_killed_processes_leave_a_cache_that_is_right_or_fetched_again(self):
        rng = random.Random(3)
        with self.server() as server:
            url = server.url("image.bcow")
            killed = 0
            for _ in range(12):
                process = self.started("cache", "warm", url, stdout=subprocess.DEVNULL,
                                       stderr=subprocess.DEVNULL)
                sent, wanted = server.sent, rng.randrange(self.bytes // 8)
                until(lambda: process.poll() is not None or server.sent - sent >= wanted,
                      "the fetch is under way")
                process.send_signal(signal.SIGKILL)
                killed += process.wait(TIMEOUT) == -signal.SIGKILL
            self.assertGreater(killed, 3)
            self.bcow("fsck", "--data", url)
            self.bcow("cache", "warm", url)
            run("cmp", self.cached(), self.image)
            self.assertEqual(self.verified()["damaged_bytes"], 0)

    def test_interrupted_warm_keeps_what_arrived(self):
        with self.server() as server:
            url = server.url("image.bcow")
            server.pause = 0.1
            process = self.started("cache", "warm", "--connections", "1", url,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            until(lambda: server.sent > self.bytes // 4, "a quarter of the image is fetched")
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=TIMEOUT)
            self.assertEqual(process.returncode, 130, err.decode())
            server.pause = 0
            time.sleep(0.3)
            sent = server.sent
            self.bcow("cache", "warm", url)
            self.assertLess(server.sent - sent, self.bytes * 0.9)
            run("cmp", self.cached(), self.image)
