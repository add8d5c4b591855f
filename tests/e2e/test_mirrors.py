"""Mirrors, and starts without the server: the bytes are right, wherever they come from.

The servers are those of test_remote.py and test_registries.py, without TLS, on ports of this
machine's own. Every command and every wait has a time limit.
"""

import contextlib
import json
import os
import shutil

import test_registries
import test_remote
from support import (Scratch, assert_same_tree, bcow, blobs_of, digest_in, flip, need, read_bytes,
                     run, write_file)
from web import free_port

TIMEOUT = 120


def load(layout):
    """The image of a layout as the content of a registry, with the tag `1`."""
    content = test_registries.Content()
    tagged = digest_in(layout)
    for name, path in blobs_of(layout).items():
        digest, data = f"sha256:{name}", read_bytes(path)
        if digest == tagged:
            content.manifests[digest] = content.manifests["1"] = (data, test_registries.MANIFEST)
        else:
            content.blobs[digest] = data
    return content, tagged


class Images(Scratch):
    """An image as a file on a server, and in a registry."""

    @classmethod
    def setUpClass(cls):
        need(fuse=True)
        super().setUpClass()
        test_remote.make_served(cls)
        bcow("convert", f"dir:{cls.tree}", f"oci:{cls.path('layout')}:tag", timeout=TIMEOUT)
        cls.content, cls.digest = load(cls.path("layout"))

    @staticmethod
    def make_tree(top):
        test_remote.make_files(top, 40, 100_000)

    def setUp(self):
        self.cache = self.path("cache")
        shutil.rmtree(self.cache, ignore_errors=True)
        self.env = {"BCOW_CACHE": self.cache, "HOME": self.directory, "BCOW_MIRRORS": "",
                    "NO_PROXY": "localhost,127.0.0.1", "no_proxy": "localhost,127.0.0.1"}

    def bcow(self, command, *arguments, wait=30, **options):
        return bcow(command, "--insecure", "--server-timeout", str(wait), *arguments,
                    env=self.env, timeout=TIMEOUT, **options)

    mounted = test_remote.RemoteCase.mounted

    def file_server(self, directory=None):
        return test_remote.Server(directory or self.served)

    def damaged(self, start):
        """A directory with the image, damaged from byte `start` on in each of its chunks."""
        directory = self.path("damaged")
        shutil.rmtree(directory, ignore_errors=True)
        os.mkdir(directory)
        copy = os.path.join(directory, "image.bcow")
        shutil.copy(self.image, copy)
        flip(copy, *range(start, self.bytes, 16384))
        return directory

    def assert_cache_is_right(self):
        (name,) = [name for name in os.listdir(self.cache) if name.endswith(".bcow")]
        # The tree covers the fields of the header, but not each byte of its slots.
        run("cmp", "--ignore-initial=1024", os.path.join(self.cache, name), self.image)


class Mirrors(Images):
    def test_pinned_file_comes_from_the_first_mirror_alone(self):
        with self.file_server() as origin, self.file_server() as one, self.file_server() as two:
            self.bcow("fsck", "--data", "--root-hash", self.root, "--mirror", one.url(""),
                      "--mirror", two.url("base/"), origin.url("image.bcow"))
            self.assertEqual((origin.sent, two.sent), (0, 0))
        self.assert_cache_is_right()

    def test_server_itself_says_what_a_name_means(self):
        with self.file_server() as origin, self.file_server() as mirror:
            self.env["BCOW_MIRRORS"] = mirror.url("")
            self.bcow("fsck", "--data", origin.url("image.bcow"))
            self.assertLess(origin.sent, 64 << 10)
            self.assertGreater(mirror.sent, self.bytes // 2)

    def test_wrong_bytes_of_a_mirror_are_neither_used_nor_cached(self):
        # Damage in each chunk, in those of the content only, and in the header.
        for start in 20_000, 1 << 20, 0:
            shutil.rmtree(self.cache, ignore_errors=True)
            directory = self.damaged(start)
            with self.file_server() as origin, self.file_server(directory) as mirror:
                checked = self.bcow("fsck", "--data", "--root-hash", self.root, "--mirror",
                                    mirror.url(""), origin.url("image.bcow"))
                self.assertGreater(mirror.sent, 0)
                self.assertIn(mirror.url("image.bcow").encode(), checked.err)
                if start:
                    self.assertRegex(checked.err, rb"bytes \d+\.\.\d+ of http://localhost:\d+/.*"
                                                  rb"do not match the Merkle tree")
            self.assert_cache_is_right()

    def test_next_mirror_is_asked_after_one_with_wrong_bytes(self):
        with self.file_server(self.damaged(20_000)) as wrong, self.file_server() as right:
            gone = f"http://localhost:{free_port()}/image.bcow"
            self.bcow("fsck", "--data", "--root-hash", self.root, "--mirror", wrong.url(""),
                      "--mirror", right.url(""), gone)
        self.assert_cache_is_right()

    def test_dead_slow_and_empty_mirrors_do_no_harm(self):
        empty = self.path("empty")
        os.makedirs(empty, exist_ok=True)
        with contextlib.ExitStack() as stack:
            origin, slow, lacking = (stack.enter_context(self.file_server(directory))
                                     for directory in (None, None, empty))
            slow.pause = TIMEOUT
            dead = f"http://localhost:{free_port()}/"
            checked = self.bcow("fsck", "--data", "--root-hash", self.root, "--mirror", dead,
                                "--mirror", slow.url(""), "--mirror", lacking.url(""),
                                origin.url("image.bcow"), wait=8)
            self.assertIn(dead.encode(), checked.err)
            self.assertIn(slow.url("").encode(), checked.err)
            self.assertEqual((slow.sent, lacking.sent), (0, 0))
        self.assert_cache_is_right()

    def test_mirrors_of_registries_have_what_a_digest_names(self):
        with test_registries.Server(self.content) as origin, \
                test_registries.Server(self.content) as mirror:
            place = f"http://127.0.0.1:{mirror.server_address[1]}"
            self.bcow("fsck", "--data", "--mirror", place, origin.name())
            self.assertEqual([path for path, _ in origin.asked], ["/v2/team/image/manifests/1"])
            self.assertTrue(mirror.asked)
            shutil.rmtree(self.cache)
            origin.asked.clear()
            self.bcow("fsck", "--data", "--mirror", place, origin.name(f"@{self.digest}"))
            self.assertEqual(origin.asked, [])

    def test_wrong_manifest_of_a_mirror_is_not_used(self):
        other = test_registries.Content()
        other.manifests[self.digest] = (b'{"schemaVersion": 2}', test_registries.MANIFEST)
        with test_registries.Server(self.content) as origin, \
                test_registries.Server(other) as mirror:
            place = f"http://127.0.0.1:{mirror.server_address[1]}"
            self.bcow("fsck", "--data", "--mirror", place, origin.name(f"@{self.digest}"))
            self.assertTrue(mirror.asked)

    def test_invalid_mirrors_are_refused(self):
        for mirror in "mirror", "ftp://mirror", "https://user:geheim@mirror":
            failed = self.bcow("ls", "--mirror", mirror, "https://x.invalid/a", check=False)
            self.assertEqual(failed.code, 2)
            self.assertNotIn(b"geheim", failed.err)
        failed = bcow("ls", "--mirror", "http://mirror", "https://x.invalid/a", check=False,
                      env=self.env, timeout=TIMEOUT)
        self.assertIn(b"not encrypted", failed.err)


class Offline(Images):
    def fetched(self):
        """The URL of the image on a server that is gone. The whole image is in the cache."""
        with self.file_server() as server:
            self.bcow("fsck", "--data", server.url("image.bcow"))
            return server.url("image.bcow")

    def test_name_means_what_it_meant_last_while_the_server_is_gone(self):
        with self.file_server() as server:
            url = server.url("image.bcow") + "?signature=geheim"
            self.bcow("fsck", "--data", url)
        with test_registries.Server(self.content) as registry:
            name = registry.name()
            self.bcow("fsck", "--data", name)
        local = bcow("ls", "-R", self.image, timeout=TIMEOUT).out
        for gone in url, name:
            found = self.bcow("ls", "-R", gone)
            self.assertEqual(found.out, local)
            self.assertRegex(found.err, rb"no connection to the server.* ago")
            self.assertNotIn(b"geheim", found.err)
            with self.mounted(gone, "--insecure") as where:
                assert_same_tree(self, self.tree, where)
        listed = json.loads(bcow("cache", "list", "--json", env=self.env, timeout=TIMEOUT).out)
        self.assertEqual((len(listed["names"]), listed["unknown"]), (2, []))
        checked = bcow("cache", "verify", env=self.env, timeout=TIMEOUT)
        self.assertNotIn(b"not a file of the cache", checked.out + checked.err)

    def test_server_that_answers_decides(self):
        with test_registries.Server(self.content) as registry:
            name = registry.name()
            self.bcow("fsck", "--data", name)
            for status in 401, 403, 404, 410, 500, 503:
                registry.fault = lambda handler, _, s=status: handler.answer(s, b"{}") is None
                failed = self.bcow("ls", name, check=False)
                self.assertEqual(failed.code, 1)
                self.assertNotIn(b" ago", failed.err)

    def test_what_is_missing_is_named(self):
        with self.file_server() as server:
            url = server.url("image.bcow")
            self.bcow("ls", url)
            other = server.url("other.bcow")
        failed = self.bcow("ls", other, check=False)
        self.assertEqual(failed.code, 1)
        self.assertIn(b"the cache has no record of this URL", failed.err)
        self.bcow("ls", url)
        failed = self.bcow("cat", url, "/dir-39/file", "/dir-0/file", "/dir-20/file", wait=2,
                           check=False)
        self.assertEqual(failed.code, 1)
        self.assertRegex(failed.err, rb"bytes \d+\.\.\d+ of http://localhost:\d+/image.bcow")
        shutil.rmtree(self.cache)
        failed = self.bcow("ls", f"docker://127.0.0.1:{free_port()}/team/image:1", check=False)
        self.assertIn(b"the cache has no record of this name", failed.err)

    def test_without_a_cache_the_server_is_needed(self):
        url = self.fetched()
        self.assertEqual(self.bcow("ls", "--no-cache", url, check=False).code, 1)

    def test_damaged_notes_cost_a_clear_error_only(self):
        url = self.fetched()
        (note,) = [name for name in os.listdir(self.cache) if name.startswith("name-")]
        for text in "", "{", '{"name": "x", "target": "y", "unix_seconds": 0}', "[" * 100_000:
            write_file(os.path.join(self.cache, note), text)
            failed = self.bcow("ls", url, check=False)
            self.assertEqual(failed.code, 1)
            self.assertIn(b"the cache has no record", failed.err)
