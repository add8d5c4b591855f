"""Fetching ahead of the reads of programs: by the list of a trace, and to completion; and what a
read fetches beyond what it needs.

The server is that of test_remote, without TLS. It logs the ranges that are requested, and holds
the answers that a test wants to be late. The tests compare the order of events and numbers of
bytes and requests; nothing depends on the speed of the machine.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import test_remote
from support import (BCOW, READER, Scratch, assert_refused, bcow, is_mounted, mounted, need,
                     overwrite, read_bytes, read_text, run, until, write_file)
from web import plain_registry

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


class Ahead(Scratch):
    @classmethod
    def setUpClass(cls):
        need(root=True, fuse=True)
        super().setUpClass()
        test_remote.make_served(cls)

    def setUp(self):
        self.cache = tempfile.mkdtemp(prefix="cache-", dir=self.directory)
        self.log = os.path.join(self.cache, "..", os.path.basename(self.cache) + ".log")

    @contextlib.contextmanager
    def mounted(self, server, *arguments, name="image.bcow"):
        url = server.url(name)
        with mounted(url, "--insecure", "--cache-dir", self.cache, "--log-file", self.log, *PATIENT,
                     *arguments) as where:
            yield where

    def logged(self, text):
        with contextlib.suppress(OSError), open(self.log) as log:
            return text in log.read()
        return False

    def own(self, name):
        return read_bytes(os.path.join(self.tree, name))

    def read(self, where, name):
        return read_bytes(os.path.join(where, name))


class Completion(Ahead):
    """An image of some 32 MB that do not compress."""

    @staticmethod
    def make_tree(top):
        for n in range(64):
            write_file(os.path.join(top, f"file-{n:02}"), os.urandom(500_000))

    def wait_for_background(self, server, requests=1):
        until(lambda: sum(in_background(*asked) for asked in server.asked) >= requests,
              "requests in the background", TIMEOUT)

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
                # A thread that has decided to send a request before the read may send it later, so
                # the server holds one of each of the three threads.
                self.wait_for_background(server, requests=3)
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

    @staticmethod
    def make_tree(top):
        with open(os.path.join(top, "large"), "wb") as out:
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


class Listed(Ahead):
    """Forty files of 300 kB that do not compress, and a directory of small ones. A start reads the
    chosen files, in this order."""

    chosen = [f"file-{n:02}" for n in (31, 7, 22, 4, 39, 16)]

    @staticmethod
    def make_tree(top):
        for n in range(40):
            write_file(os.path.join(top, f"file-{n:02}"), os.urandom(300_000))
        os.mkdir(os.path.join(top, "small"))
        for n in range(500):
            write_file(os.path.join(top, "small", f"name-{n}"), f"{n}\n" * 100)

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.trace = cls.path("trace")
        with mounted(cls.image, "--record", cls.trace) as where:
            cls.begin(where)
        cls.listed = os.path.join(cls.served, "listed.bcow")
        bcow("convert", "--prefetch", cls.trace, f"dir:{cls.tree}", cls.listed, timeout=TIMEOUT)

    @classmethod
    def begin(cls, where):
        """What the start reads."""
        found = []
        for name in cls.chosen:
            found.append(read_bytes(os.path.join(where, name)))
        found.append(read_text(os.path.join(where, "small", "name-250")))
        return found

    def parts(self, trace):
        with open(trace) as text:
            header, *lines = [json.loads(line) for line in text]
        self.assertEqual(header["bcow_trace"], 1)
        inspected = json.loads(bcow("inspect", "--json", self.image, timeout=TIMEOUT).out)
        self.assertEqual("sha256:" + header["image"], inspected["merkle"]["root"])
        return lines

    def assert_recorded(self, trace):
        parts = self.parts(trace)
        files = {part["file"]: part["blocks"] for part in parts if "file" in part}
        self.assertEqual(list(files), [*self.chosen, "small/name-250"])
        self.assertEqual(files.pop("small/name-250"), [[0, 1]])
        for blocks in files.values():
            # The 74 blocks in order, unless the reads of the kernel overtake one another.
            self.assertEqual(sum(count for _, count in blocks), 74, blocks)
        self.assertIn("small", [part.get("directory") for part in parts])

    def test_trace_has_the_files_in_the_order_of_their_use(self):
        self.assert_recorded(self.trace)
        self.assertLess(os.path.getsize(self.trace), 2000)

    def test_file_that_was_read_is_recorded_and_not_one_with_the_same_content(self):
        tree, image, trace = (self.path(name) for name in ("same", "same.bcow", "same.trace"))
        for name in ("a", "m", "z"):
            os.makedirs(os.path.join(tree, name))
            shutil.copy(os.path.join(self.tree, "file-00"), os.path.join(tree, name, "same"))
            # So that the inodes of the copies are not in one block.
            for n in range(200):
                write_file(os.path.join(tree, name, f"other-{n}"), b"")
        bcow("convert", f"dir:{tree}", image, timeout=TIMEOUT)
        for chosen in (("a",), ("z",), ("m", "z")):
            with self.subTest(chosen):
                with mounted(image, "--record", trace) as where:
                    for name in chosen:
                        read_bytes(os.path.join(where, name, "same"))
                with open(trace) as text:
                    lines = [json.loads(line) for line in text]
                os.unlink(trace)
                files = [line["file"] for line in lines if "file" in line]
                self.assertEqual(sorted(files), [f"{name}/same" for name in chosen])

    def test_second_read_adds_nothing(self):
        trace = self.path("twice")
        with mounted(self.image, "--record", trace) as where:
            self.begin(where)
            self.begin(where)
        self.assert_recorded(trace)

    def test_trace_is_written_at_the_end_by_a_signal(self):
        trace, where = self.path("signal"), tempfile.mkdtemp(dir=self.directory)
        mount = subprocess.Popen([BCOW, "mount", "-f", "--record", trace, self.image, where],
                                 stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            until(lambda: is_mounted(where), "the mount", TIMEOUT)
            self.begin(where)
            self.assertFalse(os.path.exists(trace))
            mount.send_signal(signal.SIGTERM)
            self.assertEqual(mount.wait(TIMEOUT), 0)
        finally:
            mount.kill()
            mount.wait(TIMEOUT)
            if is_mounted(where):
                subprocess.run(["umount", "-l", where], check=False)
        self.assert_recorded(trace)

    def test_kernel_driver_records_too(self):
        trace = self.path("kernel")
        with mounted(self.image, "--driver", "kernel", "--record", trace) as where:
            self.begin(where)
        # The kernel reads ahead, also behind the end of a file.
        files = [part["file"] for part in self.parts(trace) if "file" in part]
        self.assertLessEqual(set(self.chosen), set(files))

    def test_mount_with_an_upper_records_what_is_read_below_it(self):
        trace, upper = self.path("writable"), self.path("upper")
        with mounted(self.image, "--upper", upper, "--record", trace) as where:
            overwrite(os.path.join(where, "file-05"), 0, b"changed")
            write_file(os.path.join(where, "new"), b"new")
            self.begin(where)
        # A write to a part of a block reads the rest of it.
        files = [part["file"] for part in self.parts(trace) if "file" in part]
        self.assertEqual([name for name in files if name != "file-05"],
                         [*self.chosen, "small/name-250"])

    def test_record_that_cannot_be_made_is_refused_before_the_mount(self):
        where = tempfile.mkdtemp(dir=self.directory)
        upper = ("--driver", "kernel", "--upper", self.path("kernel-upper"))
        for trace, arguments, code, cause in (
                ("none/trace", (), 1, "cannot create .*none/trace"),
                ("t", upper, 2, "--record is not supported yet for disks")):
            refused = bcow("mount", "--record", self.path(trace), *arguments, self.image, where,
                           check=False, timeout=TIMEOUT)
            assert_refused(self, refused, cause, code=code)
            self.assertFalse(is_mounted(where))
        self.assertFalse(os.path.exists(self.path("t")))

    def test_umount_reports_a_trace_that_was_not_written(self):
        directory = self.path("removed")
        os.mkdir(directory)
        where = tempfile.mkdtemp(dir=self.directory)
        bcow("mount", "--record", os.path.join(directory, "trace"), "--log-file", self.log,
             self.image, where, timeout=TIMEOUT)
        os.rmdir(directory)
        ended = bcow("umount", where, check=False, timeout=TIMEOUT)
        self.assertEqual(ended.code, 1)
        self.assertIn(b"was not written", ended.err)
        self.assertFalse(is_mounted(where))
        self.assertTrue(self.logged("removed/trace"))

    def test_listed_image_has_the_same_tree_and_the_same_bytes_each_time(self):
        bcow("diff", self.image, self.listed, timeout=TIMEOUT)
        bcow("fsck", "--data", self.listed, timeout=TIMEOUT)
        again = self.path("again.bcow")
        bcow("convert", "--jobs", "1", "--prefetch", self.trace, f"dir:{self.tree}", again,
             timeout=TIMEOUT)
        run("cmp", again, self.listed)
        found = json.loads(bcow("inspect", "--json", self.listed, timeout=TIMEOUT).out)
        independent = json.loads(run(sys.executable, READER, "info", self.listed).out)
        self.assertEqual(found["metadata"]["prefetch"], independent["metadata"]["prefetch"])
        # Six files, one block of metadata or two, and parts of blocks.
        self.assertLess(found["prefetch"]["stored_bytes"], 6 * 300_000 + (1 << 20))
        # The content of the start is one range, behind the superblock.
        content = found["metadata"]["content"]["metadata_start"] // 4096
        ranges = found["metadata"]["prefetch"]["ranges"]
        self.assertEqual([first for first, _ in ranges if first < content], [0, 1])

    def test_trace_fits_an_image_that_was_converted_in_another_way(self):
        other = self.path("other.bcow")
        bcow("convert", "--plain", "--prefetch", self.trace, self.image, other, timeout=TIMEOUT)
        found = json.loads(bcow("inspect", "--json", other, timeout=TIMEOUT).out)
        self.assertGreater(found["prefetch"]["bytes"], 6 * 300_000)
        bcow("diff", self.image, other, timeout=TIMEOUT)
        back = self.path("back.bcow")
        bcow("convert", other, back, timeout=TIMEOUT)
        bcow("diff", self.image, back, timeout=TIMEOUT)

    def test_wrong_traces_are_refused_and_leave_no_image(self):
        nothing = self.path("nothing.trace")
        with open(self.trace) as text, open(nothing, "w") as out:
            out.write(text.readline() + '{"file": "none", "blocks": [[0, 1]]}\n')
        for trace, cause in ((self.image, "no trace"), (nothing, "names no file")):
            destination = self.path("refused.bcow")
            refused = bcow("convert", "--prefetch", trace, f"dir:{self.tree}", destination,
                           check=False, timeout=TIMEOUT)
            self.assertNotEqual(refused.code, 0)
            self.assertIn(cause.encode(), refused.err)
            self.assertFalse(os.path.exists(destination))

    def test_start_needs_only_what_was_fetched_ahead(self):
        with Server(self.served) as server:
            with self.mounted(server, "--complete", "never", name="listed.bcow") as where:
                until(lambda: self.logged("fetched ahead: "), "the list", TIMEOUT)
                # Few large ranges, and little else.
                self.assertLess(len(server.asked), 30)
                self.assertLess(server.sent, 6 * 300_000 * 1.3 + (1 << 20))
                server.broken = True
                self.assertEqual(self.begin(where), self.begin(self.tree))

    def test_listed_image_is_completed_without_being_asked(self):
        with Server(self.served) as server:
            with self.mounted(server, name="listed.bcow") as where:
                until(lambda: self.logged("complete: "), "completion", TIMEOUT)
                lines = read_text(self.log)
                self.assertLess(lines.index("fetched ahead: "), lines.index("complete: "))
                server.broken = True
                self.assertEqual(self.read(where, "file-01"), self.own("file-01"))

    def test_stack_in_a_registry_fetches_its_list_from_the_layers(self):
        need("docker-registry")
        directory = tempfile.mkdtemp(dir=self.directory)
        with plain_registry(directory) as port:
            name = f"docker://127.0.0.1:{port}/listed:1"
            bcow("convert", "--insecure", "--prefetch", self.trace, f"dir:{self.tree}", name,
                 timeout=TIMEOUT)
            where = tempfile.mkdtemp(dir=self.directory)
            bcow("mount", "--insecure", "--complete", "never", "--cache-dir", self.cache,
                 "--log-file", self.log, name, where, timeout=TIMEOUT)
            try:
                until(lambda: self.logged("fetched ahead: "), "the list", TIMEOUT)
                count = int(re.search(r"fetched ahead: (\d+) bytes", read_text(self.log))[1])
                self.assertGreater(count, 6 * 300_000)
                self.assertLess(count, 6 * (300_000 + (2 << 18)) + (1 << 20))
                self.assertEqual(self.begin(where), self.begin(self.tree))
            finally:
                bcow("umount", where, timeout=TIMEOUT)
