"""Fetching ahead of the reads of programs, and what a read fetches beyond what it needs.

The server is that of test_remote, without TLS. It logs the ranges that are requested, and holds
the answers that a test wants to be late. The tests compare the order of events and numbers of
bytes and requests; nothing depends on the speed of the machine.
"""

import contextlib
import os
import random
import re
import shutil
import tempfile
import threading
import time
import unittest

import test_remote
from support import WORK, bcow, mounted, need, until

TIMEOUT = 60
# Longer than any wait here, so that no held request is sent again.
PATIENT = ("--server-timeout", "600")
# Completion requests 2 MiB at a time; a read of a file requests its block, and then up to twice as
# much for each block that follows.
LARGE = 3 << 19


def in_background(first, end):
    """Whether a request is for completion, and not for what the mount itself reads first."""
    return first >= 4 << 20 and end - first > LARGE


class Handler(test_remote.Handler):
    """Logs each range, and answers when the server does not hold it."""

    timeout = 10 * TIMEOUT

    def do_GET(self):
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        server = self.server
        if asked:
            first, end = int(asked[1]), int(asked[2]) + 1
            with server.changed:
                server.asked.append((first, end))
                server.changed.notify_all()
                server.changed.wait_for(lambda: not server.holds(first, end), TIMEOUT)
        super().do_GET()


class Server(test_remote.Server):
    def __init__(self, directory):
        super().__init__(directory)
        self.RequestHandlerClass = Handler
        self.changed = threading.Condition()
        self.asked = []
        self.holds = lambda first, end: False

    def hold(self, holds):
        with self.changed:
            self.holds = holds
            self.changed.notify_all()


class Ahead(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        need(root=True, fuse=True)
        cls.directory = tempfile.mkdtemp(prefix="ahead-", dir=WORK)
        cls.addClassCleanup(shutil.rmtree, cls.directory, ignore_errors=True)
        cls.tree = cls.path("tree")
        os.mkdir(cls.tree)
        cls.make_tree()
        cls.served = cls.path("served")
        os.mkdir(cls.served)
        cls.image = os.path.join(cls.served, "image.bcow")
        bcow("convert", f"dir:{cls.tree}", cls.image, timeout=TIMEOUT)
        cls.bytes = os.path.getsize(cls.image)

    @classmethod
    def path(cls, name):
        return os.path.join(cls.directory, name)

    def setUp(self):
        self.cache = tempfile.mkdtemp(prefix="cache-", dir=self.directory)
        self.log = os.path.join(self.cache, "..", os.path.basename(self.cache) + ".log")

    @contextlib.contextmanager
    def mounted(self, server, *arguments):
        url = server.url("image.bcow")
        with mounted(url, "--insecure", "--cache-dir", self.cache, "--log-file", self.log, *PATIENT,
                     *arguments) as where:
            yield where

    def logged(self, text):
        with contextlib.suppress(OSError), open(self.log) as log:
            return text in log.read()
        return False

    def own(self, name):
        with open(os.path.join(self.tree, name), "rb") as file:
            return file.read()

    def read(self, where, name):
        with open(os.path.join(where, name), "rb") as file:
            return file.read()


class Completion(Ahead):
    """An image of some 32 MB that do not compress."""

    @classmethod
    def make_tree(cls):
        for n in range(64):
            with open(os.path.join(cls.tree, f"file-{n:02}"), "wb") as out:
                out.write(os.urandom(500_000))

    def wait_for_background(self, server):
        until(lambda: any(in_background(*asked) for asked in server.asked),
              "a request in the background", TIMEOUT)

    def test_complete_image_needs_no_server(self):
        with Server(self.served) as server:
            with self.mounted(server, "--complete", "always") as where:
                until(lambda: self.logged("complete: "), "completion", TIMEOUT)
                self.assertLess(server.sent, self.bytes * 1.02)
                server.broken = True
                for n in range(64):
                    self.assertEqual(self.read(where, f"file-{n:02}"), self.own(f"file-{n:02}"))
        (cached,) = [name for name in os.listdir(self.cache) if name.endswith(".bcow")]
        with open(os.path.join(self.cache, cached), "rb") as file, open(self.image, "rb") as image:
            self.assertTrue(file.read() == image.read(), "the cache file has the bytes of the file")

    def test_only_what_is_read_is_fetched_without_being_asked(self):
        with Server(self.served) as server, self.mounted(server) as where:
            self.assertEqual(self.read(where, "file-40"), self.own("file-40"))
            self.assertFalse(self.logged("complete: "))
            self.assertLess(server.sent, self.bytes // 4)

    def test_read_does_not_wait_for_what_is_fetched_in_the_background(self):
        with Server(self.served) as server:
            server.hold(in_background)
            with self.mounted(server, "--complete", "always") as where:
                self.wait_for_background(server)
                # Its requests begin small.
                with open(os.path.join(where, "file-60"), "rb") as file:
                    self.assertEqual(os.pread(file.fileno(), 4096, 0), self.own("file-60")[:4096])
                server.hold(lambda first, end: False)
                until(lambda: self.logged("complete: "), "completion", TIMEOUT)

    def test_idle_completion_makes_no_request_while_a_read_waits(self):
        with Server(self.served) as server:
            server.hold(in_background)
            with self.mounted(server, "--complete", "idle") as where:
                self.wait_for_background(server)
                server.hold(lambda first, end: True)
                before = len(server.asked)
                found = []
                reader = threading.Thread(
                    target=lambda: found.append(self.read(where, "file-60")), daemon=True)
                reader.start()

                def waits():
                    return any(not in_background(*asked) for asked in server.asked[before:])
                until(waits, "the request of the read", TIMEOUT)
                # Those that began before the read are answered; no other may follow them.
                server.hold(lambda first, end: not in_background(first, end))
                begun = len(server.asked)
                time.sleep(1)
                self.assertFalse(any(in_background(*asked) for asked in server.asked[begun:]))
                server.hold(lambda first, end: False)
                reader.join(TIMEOUT)
                self.assertEqual(found, [self.own("file-60")])
                until(lambda: self.logged("complete: "), "completion", TIMEOUT)

    def test_mount_goes_on_when_the_server_fails_in_the_background(self):
        with Server(self.served) as server:
            server.hold(in_background)
            with self.mounted(server, "--complete", "always") as where:
                self.wait_for_background(server)
                os.listdir(where)
                server.broken = True
                server.hold(lambda first, end: False)
                until(lambda: self.logged("not fetched ahead"), "the failure in the log", TIMEOUT)
                server.broken = False
                until(lambda: self.logged("complete: "), "completion", TIMEOUT)
                self.assertEqual(self.read(where, "file-33"), self.own("file-33"))

    def test_unmount_does_not_wait_for_the_server(self):
        with Server(self.served) as server:
            server.hold(in_background)
            with self.mounted(server, "--complete", "always"):
                self.wait_for_background(server)
            # The answers are still held.
            server.hold(lambda first, end: False)

    def test_nothing_is_completed_without_a_cache(self):
        with Server(self.served) as server:
            url = server.url("image.bcow")
            with mounted(url, "--insecure", "--no-cache", "--complete", "always", "--log-file",
                         self.log) as where:
                until(lambda: self.logged("not completed"), "the reason in the log", TIMEOUT)
                self.assertEqual(self.read(where, "file-09"), self.own("file-09"))
            self.assertLess(server.sent, self.bytes // 4)


class Readahead(Ahead):
    """One file of 64 MB that does not compress."""

    @classmethod
    def make_tree(cls):
        with open(os.path.join(cls.tree, "large"), "wb") as out:
            for _ in range(64):
                out.write(os.urandom(1 << 20))

    def test_sequential_read_needs_few_requests(self):
        with Server(self.served) as server, self.mounted(server) as where:
            self.assertTrue(self.read(where, "large") == self.own("large"), "the content of /large")
            # Growing to 2 MiB; a few for the header, the tables and the tree of hashes.
            self.assertLess(len(server.asked), 64)
            self.assertLess(server.sent, self.bytes * 1.02)

    def test_random_reads_fetch_little_more_than_their_blocks(self):
        chosen = random.Random(5)
        offsets = [block << 18 for block in chosen.sample(range(1, 250), 40)]
        with Server(self.served) as server, self.mounted(server) as where:
            with open(os.path.join(where, "large"), "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                os.pread(file.fileno(), 4096, 0)
                begun = server.sent
                own = self.own("large")
                for offset in offsets:
                    self.assertEqual(os.pread(file.fileno(), 4096, offset),
                                     own[offset:offset + 4096])
            # A read of a block that was stored raw needs 256 KiB.
            self.assertLess(server.sent - begun, 1.3 * len(offsets) * (256 << 10))


if __name__ == "__main__":
    unittest.main()
