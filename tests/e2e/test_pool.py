"""Pools: one process that serves many mounts.

The directory for the sockets is one of the test's own ($BCOW_POOLS), so the pools of the machine do
not matter. Content that two mounts share is counted by the misses of the cache; a pool without
requests empties its cache after ten seconds, so such a test tries again.
"""

import concurrent.futures
import contextlib
import errno
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import schema
import test_ahead
import test_remote
import test_union_fsx
from promises import promise
from support import (BCOW, UNPRIVILEGED, WORK, Scratch, assert_refused, bcow, for_everyone,
                     is_mounted, need, read_bytes, read_text, run, set_environment, stop,
                     until, write_file)

TIMEOUT = 60
# How often a test kills or replaces the process of a pool under load.
STEPS = int(os.environ.get("BCOW_KILLS") or 4)
# Programs that change files at the same time.
PROGRAMS = 3
# Programs that ask a pool at the same time.
CLIENTS = 16
# A pool at rest for ten seconds empties its cache between two steps of a test: rare, but possible.
ATTEMPTS = 5


class PoolCase(Scratch):
    """An image, and a directory for pools."""

    # Seconds for a command, or for a process that takes over.
    timeout = TIMEOUT

    @classmethod
    def setUpClass(cls):
        need(fuse=True, root=True)
        super().setUpClass()
        tree = cls.path("tree")
        os.mkdir(tree)
        source = random.Random(7)
        cls.files = {f"file{n}": source.randbytes(300_000) for n in range(3)}
        for name, data in cls.files.items():
            cls.path(f"tree/{name}", data)
        cls.image = cls.path("image.bcow")
        bcow("convert", f"dir:{tree}", cls.image, timeout=cls.timeout)

    @classmethod
    def make_programs(cls):
        """Makes the tree of an image with a directory for each program that changes files."""
        cls.template = cls.path("template")
        source = random.Random(8)
        for directory in ("d0/e", "d1/e", "d2/e"):
            os.makedirs(os.path.join(cls.template, directory))
        write_file(os.path.join(cls.template, "large"), source.randbytes(12_000_000))
        for directory in ("d0", "d1", "d2"):
            # Up to 64 KiB, a file is copied whole at its first write.
            for name, size in (("f0", 100_000), ("f1", 5000), ("f2", 60_000), ("e/g", 0)):
                write_file(os.path.join(cls.template, directory, name), source.randbytes(size))
            for name in (f"{directory}/e/hard", f"hard-{directory}"):
                os.link(os.path.join(cls.template, directory, "f0"),
                        os.path.join(cls.template, name))
            os.symlink("target", os.path.join(cls.template, directory, "link"))
        tree = cls.path("programs")
        for number in range(PROGRAMS):
            shutil.copytree(cls.template, os.path.join(tree, str(number)), symlinks=True)
            for directory in ("d0", "d1", "d2"):
                # copytree makes files of hard links.
                for name in (f"{directory}/e/hard", f"hard-{directory}"):
                    path = os.path.join(tree, str(number), name)
                    os.remove(path)
                    os.link(os.path.join(tree, str(number), directory, "f0"), path)
        return tree

    def setUp(self):
        # Short: the path of a socket has at most 108 bytes.
        self.pools = tempfile.mkdtemp(prefix="p-", dir=WORK)
        self.addCleanup(shutil.rmtree, self.pools, ignore_errors=True)
        self.env = {"BCOW_POOLS": self.pools}
        self.mounts = []
        self.disturbed = 0
        self.addCleanup(self.clear)

    def tearDown(self):
        for pool in self.list():
            self.bcow("pool", "stop", "--force", pool["name"])

    def clear(self):
        # A failed test leaves its pools.
        for pool in self.list():
            # The supervisor first: it starts the other one again.
            for pid in filter(None, (pool["keeper"], pool["pid"])):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for where in self.mounts:
            if is_mounted(where):
                subprocess.run(["umount", "-l", where])
            os.rmdir(where)

    def bcow(self, *arguments, **options):
        options.setdefault("timeout", self.timeout)
        return bcow(*arguments, env=self.env, **options)

    def start(self, name="pool", *options):
        self.bcow("pool", "start", name, *options)

    def start_of(self, name):
        """Starts the pool with a copy of the program, which a test can replace; gives its path."""
        program = os.path.join(self.pools, name)
        shutil.copy(BCOW, program)
        run(program, "pool", "start", "pool", env=self.env, timeout=TIMEOUT)
        return program

    def place(self):
        where = tempfile.mkdtemp(prefix="mnt-", dir=WORK)
        self.mounts.append(where)
        return where

    def mount(self, *options, pool="pool", image=None, where=None):
        where = where or self.place()
        self.bcow("mount", image or self.image, where, "--pool", pool, *options)
        self.assertTrue(is_mounted(where))
        return where

    def json(self, *arguments):
        return json.loads(self.bcow(*arguments, "--json").out)

    def list(self):
        return self.json("pool", "list")["pools"]

    def services(self):
        """What `bcow ps` lists, by mountpoint."""
        return {row["at"][0]: row for row in self.json("ps")["services"]}

    def stats(self, name="pool"):
        return self.json("pool", "stats", name)

    def find(self, name="pool"):
        return {pool["name"]: pool for pool in self.list()}.get(name)

    def pid(self, name="pool"):
        return self.find(name)["pid"]

    def supervisor(self, name="pool"):
        return self.find(name)["keeper"]

    def kill(self):
        """Kills the process of the pool, and waits for the next one. Returns its number."""
        before = self.find()
        os.kill(before["pid"], signal.SIGKILL)
        until(lambda: (self.find()["restarts"] or 0) > before["restarts"],
              "another process takes over", self.timeout)
        return self.pid()

    def disturb(self, steps, wait):
        """Kills and replaces the process `steps` times, after `wait` each time. A process that ends
        soon after its start makes the supervisor pause, and too many in a row end the pool."""
        for _ in range(steps):
            wait()
            self.disturbed += 1
            if self.disturbed % 4 == 0:
                self.bcow("pool", "restart", "pool")
            else:
                self.kill()
        wait()

    def fail_again_and_again(self):
        """Kills the process of the pool until the supervisor gives up."""
        supervisor = self.supervisor()

        def has_ended():
            pool = self.find()
            if pool and pool["pid"]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pool["pid"], signal.SIGKILL)
            return not os.path.exists(f"/proc/{supervisor}")

        until(has_ended, "the pool ends")

    def read(self, where):
        for name, data in self.files.items():
            self.assertEqual(read_bytes(os.path.join(where, name)), data)

    def assert_ends(self, pid):
        until(lambda: not os.path.exists(f"/proc/{pid}"), f"process {pid} ends")


class Mounts(PoolCase):
    @promise("One process serves all mounts of a pool")
    def test_one_process_serves_several_mounts(self):
        self.start()
        upper = os.path.join(self.pools, "upper")
        places = [self.mount(), self.mount(), self.mount("--upper", upper)]
        for where in places:
            self.read(where)
        pid = self.pid()
        rows = self.services()
        for where in places:
            row = rows[os.path.realpath(where)]
            self.assertEqual((row["pid"], row["pool"]), (pid, "pool"))
            statistics = self.json("stats", where)
            self.assertEqual((statistics["process"]["pid"], statistics["pool"]), (pid, "pool"))
        found = self.stats()
        self.assertEqual([mount["mode"] for mount in found["mounts"]], ["ro", "ro", "rw"])
        self.assertTrue(all(mount["requests"] > 0 for mount in found["mounts"]))
        self.assertEqual(found["mounts"][2]["upper"], upper)
        write_file(os.path.join(places[2], "new"), "kept")
        # The end of one mount is not that of the others.
        self.bcow("umount", places[2])
        self.assertEqual(read_text(os.path.join(upper, "new")), "kept")
        run("umount", places[0], timeout=TIMEOUT)
        until(lambda: len(self.stats()["mounts"]) == 1, "the pool notices the unmount")
        self.read(places[1])
        # The upper is free, also for a process outside the pool.
        again = self.place()
        self.bcow("mount", self.image, again, "--upper", upper)
        self.assertEqual(read_text(os.path.join(again, "new")), "kept")
        self.bcow("umount", again)
        self.bcow("umount", places[1])
        until(lambda: self.stats()["mounts"] == [], "the pool notices the unmount")
        self.bcow("pool", "stop", "pool")
        self.assertEqual(self.list(), [])
        self.assert_ends(pid)

    def misses_of(self, where):
        before = self.stats()["cache"]["misses"]
        self.read(where)
        return self.stats()["cache"]["misses"] - before

    @promise("A file that two mounts of a pool show is cached once")
    def test_blocks_of_a_file_are_decoded_once(self):
        self.start("pool", "--memory", "32M")
        self.assertGreater(self.misses_of(self.mount()), 0)
        for _ in range(ATTEMPTS):
            if self.misses_of(self.mount()) == 0:
                break
        else:
            self.fail("each mount decodes the blocks again")
        # Another file, with equal content.
        copy = self.path("copy.bcow")
        shutil.copy(self.image, copy)
        self.assertGreater(self.misses_of(self.mount(image=copy)), 0)
        # A verified mount does not believe what an unverified one has read.
        self.assertGreater(self.misses_of(self.mount("--verify", "merkle")), 0)
        limit = self.stats()["cache"]
        self.assertEqual(limit["limit_bytes"], 32 << 20)

    def test_images_on_other_machines_share_what_was_fetched(self):
        with test_ahead.Server(self.directory) as server:
            url = server.url("image.bcow")
            self.start()

            def fetched():
                server.asked.clear()
                self.read(self.mount("--insecure", "--no-cache", image=url))
                return sum(end - first for first, end in server.asked)

            whole = sum(map(len, self.files.values()))
            self.assertGreater(fetched(), whole)
            for _ in range(ATTEMPTS):
                if fetched() < whole:
                    break
            else:
                self.fail("each mount fetches the blocks again")
            self.bcow("pool", "stop", "--force", "pool")

    def test_paths_are_those_of_the_command(self):
        self.start()
        pid = self.pid()
        where = self.place()
        relative = os.path.relpath(where, self.directory)
        result = subprocess.run([BCOW, "mount", "--pool=pool", "image.bcow", relative],
                                cwd=self.directory, env={**os.environ, **self.env},
                                timeout=TIMEOUT, stderr=subprocess.PIPE)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.read(where)
        tasks = f"/proc/{pid}/task"
        places = {os.readlink(f"{tasks}/{task}/cwd") for task in os.listdir(tasks)}
        self.assertEqual(places, {"/"})
        # mount(8) calls the program by this name.
        helper = self.path("mount.bcow")
        os.symlink(BCOW, helper)
        other = self.place()
        run(helper, self.image, other, "-o", "rw,pool=pool", env=self.env, timeout=TIMEOUT)
        self.read(other)
        self.assertEqual(len(self.stats()["mounts"]), 2)

    def test_ordinary_user_has_pools(self):
        need("fusermount3")
        pools = self.path("own")
        os.mkdir(pools, 0o700)
        os.chown(pools, UNPRIVILEGED, UNPRIVILEGED)
        options = {"user": UNPRIVILEGED, "timeout": TIMEOUT,
                   "env": {"BCOW_POOLS": for_everyone(pools)}}
        self.addCleanup(bcow, "pool", "stop", "--force", "mine", check=False, **options)
        where = self.place()
        os.chown(where, UNPRIVILEGED, UNPRIVILEGED)
        image, place = for_everyone(self.image), for_everyone(where)
        os.chmod(self.image, 0o644)
        cpu = str(min(os.sched_getaffinity(0)))
        bcow("pool", "start", "mine", "--cpus", cpu, **options)
        # The user can use this directory, and cannot reach it by its path.
        inner = os.path.join(self.path("closed"), "inner")
        os.makedirs(inner)
        os.chmod(self.path("closed"), 0o700)
        os.symlink(image, os.path.join(inner, "link"))
        bcow("mount", "link", place, "--pool=mine", cwd=inner, **options)
        read = run("cat", os.path.join(place, "file1"), user=UNPRIVILEGED, timeout=TIMEOUT)
        self.assertEqual(read.out, self.files["file1"])
        # Another process cannot reach that directory by its path either.
        refused = bcow("pool", "restart", "mine", check=False, **options)
        assert_refused(self, refused, place, "cannot open link")
        bcow("umount", place, **options)
        uppers = [os.path.join(pools, f"upper{number}") for number in range(3)]
        bcow("mount", image, place, "--pool=mine", "--upper", for_everyone(uppers[0]), **options)
        found = json.loads(bcow("pool", "stats", "mine", "--json", **options).out)
        # The process that takes over has the same rights and CPUs, and the upper where it is.
        for upper, moved in itertools.pairwise(uppers):
            with open(f"/proc/{found['pid']}/status") as status:
                status = status.read()
            allowed = re.search(r"^Cpus_allowed_list:\s*(\S+)$", status, re.MULTILINE)
            self.assertEqual(allowed[1], cpu)
            user = re.search(r"^Uid:\s*(\d+)\s+(\d+)", status, re.MULTILINE)
            self.assertEqual(user.groups(), (str(UNPRIVILEGED),) * 2)
            read = run("cat", os.path.join(place, "file0"), user=UNPRIVILEGED, timeout=TIMEOUT)
            self.assertEqual(read.out, self.files["file0"])
            os.rename(upper, moved)
            bcow("pool", "restart", "mine", **options)
            self.assertFalse(os.path.exists(upper))
            found = schema.checked(bcow("pool", "stats", "mine", "--json", **options).out)
        self.assertEqual(found["restarts"], 2)
        bcow("pool", "stop", "--force", "mine", **options)
        self.assert_ends(found["pid"])


class Ends(PoolCase):
    def test_stop_follows_the_last_unmount_at_once(self):
        # The thread of a mount may end after `bcow umount`.
        for number in range(10):
            self.start()
            where = self.mount("--upper", os.path.join(self.pools, f"upper{number}"))
            self.bcow("umount", where)
            self.bcow("pool", "stop", "pool")

    @promise("`bcow pool stop` ends a pool with mounts only with --force")
    def test_stop_keeps_mounts_without_force(self):
        self.start()
        where = self.mount("--upper", os.path.join(self.pools, "upper"))
        assert_refused(self, self.bcow("pool", "stop", "pool", check=False), "has 1 mount", "hint:")
        with open(os.path.join(where, "file0"), "ab") as file:
            file.write(b"!")
            file.flush()
            pid = self.pid()
            result = self.bcow("pool", "stop", "--force", "pool")
            self.assertIn(b"1 mount of the pool pool is in use", result.err)
            self.assertFalse(is_mounted(where))
            assert_refused(self, self.bcow("mount", self.image, where, "--pool=pool", check=False),
                           "it is ending")
            file.write(b"?")
        self.assert_ends(pid)
        self.assertEqual(self.list(), [])
        with self.outside("--upper", os.path.join(self.pools, "upper")) as again:
            self.assertEqual(read_bytes(os.path.join(again, "file0")), self.files["file0"] + b"!?")

    @contextlib.contextmanager
    def outside(self, *options):
        """A mount with a process of its own."""
        where = self.place()
        self.bcow("mount", self.image, where, *options)
        yield where
        self.bcow("umount", where)

    def test_signal_unmounts_everything(self):
        self.start()
        upper = os.path.join(self.pools, "upper")
        places = [self.mount(), self.mount("--upper", upper)]
        write_file(os.path.join(places[1], "new"), "kept")
        found = self.find()
        # The supervisor passes the signal on.
        os.kill(found["keeper"], signal.SIGTERM)
        self.assert_ends(found["pid"])
        self.assert_ends(found["keeper"])
        self.assertFalse(any(map(is_mounted, places)))
        self.assertEqual(os.listdir(self.pools), ["upper"])
        self.assertEqual(read_text(os.path.join(upper, "new")), "kept")

    def test_pool_killed_with_its_supervisor_is_dead_and_starts_again(self):
        self.start()
        upper = os.path.join(self.pools, "upper")
        where = self.mount("--upper", upper)
        write_file(os.path.join(where, "new"), "kept")
        run("sync", os.path.join(where, "new"))
        pid, supervisor = self.pid(), self.supervisor()
        os.kill(supervisor, signal.SIGKILL)
        until(lambda: self.supervisor() is None, "the pool notices the end of its supervisor")
        assert_refused(self, self.bcow("pool", "restart", "pool", check=False),
                       "its supervisor has died")
        # The process serves its mounts alone.
        self.read(self.mount())
        os.kill(pid, signal.SIGKILL)
        self.assert_ends(pid)
        self.assertEqual([pool["state"] for pool in self.list()], ["dead"])
        for command in (["pool", "stats", "pool"], ["mount", self.image, where, "--pool", "pool"]):
            assert_refused(self, self.bcow(*command, check=False), "its process has died",
                           "bcow pool start pool")
        self.start()
        self.assertNotEqual(self.pid(), pid)
        # The mount of the dead process is replaced.
        self.mount("--upper", upper, where=where)
        self.assertEqual(read_text(os.path.join(where, "new")), "kept")

    def test_stopped_process_is_silent(self):
        self.start()
        pid = self.pid()
        stop(pid)
        try:
            assert_refused(self, self.bcow("pool", "start", "pool", check=False),
                           "does not answer")
        finally:
            os.kill(pid, signal.SIGCONT)


class Load:
    """A program that reads files of a mount in a loop until the end of the context."""

    def __init__(self, where, files):
        self.where, self.files = where, files
        self.rounds = 0
        self.failure = None
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self):
        try:
            with contextlib.ExitStack() as stack:
                kept = {name: stack.enter_context(open(os.path.join(self.where, name), "rb"))
                        for name in self.files}
                while not self.is_over.is_set():
                    for name, data in self.files.items():
                        self.compare(kept[name], data)
                        with open(os.path.join(self.where, name), "rb") as file:
                            self.compare(file, data)
                    os.statvfs(self.where)
                    assert sorted(os.listdir(self.where)) == sorted(self.files)
                    self.rounds += 1
        except (OSError, AssertionError) as failure:
            self.failure = failure

    @staticmethod
    def compare(file, data):
        # The kernel asks the pool again for what is not in its cache.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if os.pread(file.fileno(), len(data) + 1, 0) != data:
            raise AssertionError(f"{file.name} has other bytes")

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.is_over.set()
        self.thread.join(TIMEOUT)

    def goes_on(self):
        """Waits until a round that begins now has ended."""
        target = self.rounds + 2
        until(lambda: self.rounds >= target or self.failure, "the reader goes on")


class Restarts(PoolCase):
    @promise("If the process of a pool is killed or replaced, programs that read its mounts wait")
    def test_readers_see_no_error_when_the_pool_is_killed(self):
        with test_ahead.Server(self.directory) as server, contextlib.ExitStack() as stack:
            self.start()
            url = server.url("image.bcow")
            places = [self.mount(), self.mount("-o", "allow_other", "--verify", "merkle"),
                      self.mount("--insecure", "--no-cache", image=url)]
            loads = [stack.enter_context(Load(where, self.files)) for where in places]
            pids = [self.pid()]
            for step in (self.kill, self.kill, self.restart, self.kill):
                for load in loads:
                    load.goes_on()
                pids.append(step())
            for load in loads:
                load.goes_on()
            stack.close()
            self.assertEqual([load.failure for load in loads], [None] * 3)
            self.assertEqual(len(set(pids)), 5)
            # Reports name the process that serves now.
            served = self.services()
            found = self.stats()
            self.assertEqual((found["pid"], found["restarts"]), (pids[-1], 4))
            for where, mount in zip(places, found["mounts"], strict=True):
                self.assertEqual(mount["at"], os.path.realpath(where))
                self.assertGreater(mount["requests"], 0)
                self.assertEqual(mount["errors"], 0)
                self.assertEqual(served[mount["at"]]["pid"], pids[-1])
                statistics = self.json("stats", where)
                self.assertEqual(statistics["process"]["pid"], pids[-1])
            # A mount that was taken over ends as any other.
            supervisor = self.supervisor()
            held = os.listdir(f"/proc/{supervisor}/fd")
            self.bcow("umount", places[0])
            run("umount", places[1], timeout=TIMEOUT)
            until(lambda: len(self.stats()["mounts"]) == 1, "the pool notices the unmount")
            until(lambda: len(os.listdir(f"/proc/{supervisor}/fd")) == len(held) - 4,
                  "the supervisor closes what belongs to the mounts")
            self.read(self.mount())
            self.bcow("pool", "stop", "--force", "pool")
        self.assert_ends(supervisor)
        self.assertEqual(os.listdir(self.pools), [])

    def test_metrics_are_those_of_all_mounts_also_after_a_restart(self):
        address = os.path.join(self.pools, "metrics")
        self.start("pool", "--metrics", f"unix:{address}")
        places = [os.path.realpath(self.mount()),
                  os.path.realpath(self.mount("--upper", os.path.join(self.pools, "upper")))]
        for restarts, step in enumerate((self.pid, self.kill, self.restart)):
            step()
            for where in places:
                # A request that the kernel does not answer.
                os.statvfs(where)

            def all_are_counted():
                # A request is counted after its answer.
                samples = test_remote.samples(address)
                return all(int(samples[f'bcow_mount_requests_total{{mountpoint="{where}"}}'])
                           for where in places)
            until(all_are_counted, "each mount has a request")
            samples = test_remote.samples(address)
            self.assertEqual(samples["bcow_pool_mounts"], "2")
            self.assertEqual(samples["bcow_pool_restarts_total"], str(restarts))
            for where in places:
                label = f'mountpoint="{where}"'
                self.assertEqual(
                    samples[f'bcow_errors_total{{{label},kind="image-damage"}}'], "0")
            self.assertIn(f'bcow_sketches_open{{mountpoint="{places[1]}"}}', samples)
            page = test_remote.metrics(address)
            types = [line for line in page.splitlines() if line.startswith("# TYPE")]
            self.assertEqual(len(types), len(set(types)))
        # The address belongs to the pool until its end.
        assert_refused(self, self.bcow("pool", "start", "other", "--metrics", f"unix:{address}",
                                       check=False), address)
        self.bcow("pool", "stop", "--force", "pool")
        until(lambda: not os.path.exists(address), "the pool removes its sockets")

    def restart(self, *options):
        self.bcow("pool", "restart", "pool", *options)
        return self.pid()

    def test_another_program_takes_over(self):
        installed = self.start_of("installed")
        where = self.mount()

        def program():
            return os.stat(f"/proc/{self.pid()}/exe").st_ino

        old = program()
        self.assertEqual(old, os.stat(installed).st_ino)
        shutil.copy(BCOW, installed + ".new")
        os.rename(installed + ".new", installed)
        self.restart()
        self.assertEqual(program(), os.stat(installed).st_ino)
        self.read(where)
        # One that fails is not used.
        os.remove(installed)
        write_file(installed, "#!/bin/false\n")
        os.chmod(installed, 0o755)
        self.restart()
        self.assertEqual(program(), old)
        self.read(where)

    def test_image_that_was_replaced_is_not_shown(self):
        image = self.path("own.bcow")
        shutil.copy(self.image, image)
        self.start()
        gone, stays = self.mount(image=image), self.mount()
        other = self.path("other")
        os.mkdir(other)
        self.path("other/file0", b"other")
        bcow("convert", f"dir:{other}", image + ".new", timeout=TIMEOUT)
        os.rename(image + ".new", image)
        refused = self.bcow("pool", "restart", "pool", check=False)
        assert_refused(self, refused, os.path.realpath(gone), "another image has its place now")
        # The first process reads the file that it has open.
        self.read(gone)
        self.kill()
        self.assertFalse(is_mounted(gone))
        self.read(stays)
        self.assertEqual([mount["at"] for mount in self.stats()["mounts"]],
                         [os.path.realpath(stays)])

    @promise("A mount that is asked for during a restart begins when the new process is there")
    def test_mounts_that_begin_during_a_restart_succeed(self):
        self.start()
        done = threading.Event()

        def restart():
            try:
                for _ in range(5):
                    self.restart()
            finally:
                done.set()
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            restarts = threads.submit(restart)
            places = []
            while not done.is_set() and len(places) < 200:
                places.append(os.path.realpath(self.mount()))
            restarts.result()
        self.assertEqual(sorted(mount["at"] for mount in self.stats()["mounts"]), sorted(places))
        for where in places:
            self.read(where)

    @promise("If the serving process of a pool fails at once several times in a row, the pool "
             "unmounts")
    def test_pool_that_fails_again_and_again_ends(self):
        self.start()
        where = self.mount()
        self.fail_again_and_again()
        self.assertFalse(is_mounted(where))
        self.assertEqual(self.list(), [])


class Uppers(PoolCase):
    """Mounts with an upper, whose process is killed or replaced."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        tree = cls.make_programs()
        with contextlib.closing(sqlite3.connect(os.path.join(tree, "database"))) as database:
            database.execute("CREATE TABLE numbers (number INTEGER PRIMARY KEY, text TEXT)")
            with database:
                database.executemany("INSERT INTO numbers VALUES (?, ?)",
                                     ((number, "x" * 500) for number in range(20_000)))
        cls.programs = cls.path("programs.bcow")
        bcow("convert", f"dir:{tree}", cls.programs, timeout=TIMEOUT)

    def setUp(self):
        super().setUp()
        self.upper = os.path.join(self.pools, "upper")
        self.start()

    def change(self, *options):
        """Mounts; gives the mountpoint."""
        return self.mount("--upper", self.upper, *options, image=self.programs)

    def assert_sound(self, where):
        """The mount ends, and its upper is right and free."""
        self.bcow("umount", where)

        def check():
            return self.bcow("fsck", "--data", self.upper, self.programs, check=False)
        # A mount namespace that another test has made meanwhile, for a container, keeps the mount
        # until that namespace ends.
        until(lambda: b"it is being written" not in check().err, "the upper is free", TIMEOUT)
        checked = check()
        self.assertEqual(checked.code, 0, checked)
        self.assertIn(b"clean", checked.out)
        self.assertEqual(os.listdir(os.path.join(self.upper, ".bcow/work")), [])
        bcow("mount", self.programs, where, "--upper", self.upper, timeout=TIMEOUT)
        bcow("umount", where, timeout=TIMEOUT)

    @promise("Programs that change files in a mount of a pool see no error when the process of the "
             "pool is killed or replaced, and lose no change")
    def test_programs_see_no_error(self):
        for options in ((), ("--sync", "batch=40"), ("-o", "writeback"), ("--size-limit", "1G")):
            with self.subTest(options=options):
                self.upper = os.path.join(self.pools, "upper" + "".join(options))
                where = self.change(*options)
                with contextlib.ExitStack() as stack:
                    programs = [
                        stack.enter_context(Program(os.path.join(where, str(number)),
                                                    self.template, random.randrange(1 << 30)))
                        for number in range(PROGRAMS)]

                    def wait(programs=programs):
                        for program in programs:
                            program.goes_on(1)
                        # At any moment of a round.
                        time.sleep(random.random() / 4)

                    self.disturb(STEPS, wait)
                    for program in programs:
                        program.finish()
                statistics = self.json("stats", where)
                self.assertEqual(statistics["process"]["pid"], self.pid())
                self.assertEqual(statistics["errors"]["total"], 0)
                self.assert_sound(where)

    def test_an_upper_that_was_removed_while_no_process_served_it_is_not_lost(self):
        """The program that takes over first unmounts and removes, as an engine could."""
        self.bcow("pool", "stop", "pool")
        program = self.start_of("program")
        gone, self.upper = self.change(), os.path.join(self.pools, "other")
        where = self.change()
        os.remove(program)
        # umount(8) would ask for the attributes of the mount, which nothing answers.
        write_file(program, f"""#!/bin/sh
{sys.executable} -c 'import ctypes; ctypes.CDLL(None).umount2(b"{gone}", 0)'
rm -rf {os.path.join(self.pools, "upper")}
exec {BCOW} "$@"
""")
        os.chmod(program, 0o755)
        for step in (lambda: self.bcow("pool", "restart", "pool"), self.kill):
            write_file(os.path.join(where, "new"), b"new")
            step()
            # A mount namespace that another test has made meanwhile, for a container, keeps the
            # other mount until that namespace ends.
            until(lambda: [mount["at"] for mount in self.stats()["mounts"]] == [where],
                  "the other mount ends", TIMEOUT)
            self.assertEqual(read_bytes(os.path.join(where, "new")), b"new")
        self.assert_sound(where)

    @promise("The upper of a mount of a pool can be moved while the mount is in use")
    def test_an_upper_that_was_moved_is_found(self):
        where, name = self.change(), self.upper
        # A snapshot that an engine has removed, while a container ends.
        detached = self.mount("--upper", os.path.join(self.pools, "removed"), image=self.programs)
        used = os.open(detached, os.O_PATH | os.O_DIRECTORY)
        self.addCleanup(os.close, used)
        run("umount", "-l", detached)
        steps = (lambda: self.bcow("pool", "restart", "pool"), self.kill, self.kill)
        for number, step in enumerate(steps):
            moved = os.path.join(self.pools, f"moved{number}")
            os.rename(self.upper, moved)
            os.rename(os.path.join(self.pools, f"removed{number or ''}"),
                      os.path.join(self.pools, f"removed{number + 1}"))
            self.upper = moved
            if number == 1:
                # Another upper, of the same image, has the earlier name.
                other = self.mount("--upper", name, image=self.programs)
                write_file(os.path.join(other, "other"), b"")
                self.bcow("umount", other)
            for place in (where, f"/proc/self/fd/{used}"):
                write_file(os.path.join(place, "0/d0/f0"), b"%d" % number)
            step()
            for place in (where, f"/proc/self/fd/{used}"):
                self.assertEqual(read_bytes(os.path.join(place, "0/d0/f0")), b"%d" % number)
                self.assertFalse(os.path.exists(os.path.join(place, "other")))
                write_file(os.path.join(place, f"new{number}"), b"")
            self.assertTrue(os.path.exists(os.path.join(self.upper, f"new{number}")))
            self.assertEqual(self.services()[os.path.realpath(where)]["upper"], self.upper)
            self.assertEqual(os.path.exists(name), number > 0)
        self.assert_sound(where)

    @promise("Until the next process serves a mount, no other process can open its upper or its "
             "disk for writing")
    def test_an_upper_stays_locked_while_no_process_serves_it(self):
        """The program that takes over first tries to change the upper, as another process could."""
        self.bcow("pool", "stop", "pool")
        program = self.start_of("program")
        outer = os.path.join(self.pools, "outer")
        os.mkdir(outer)
        self.upper = os.path.join(outer, "upper")
        where, tried = self.change(), os.path.join(self.pools, "tried")
        changes = ([BCOW, "fsck", "--repair", self.upper, self.programs],
                   [BCOW, "mount", "--upper", self.upper, self.programs, self.place()])
        os.remove(program)
        lines = [f"{' '.join(change)} 2>>{tried} || echo failed >>{tried}" for change in changes]
        write_file(program, "\n".join(["#!/bin/sh", *lines, f'exec {BCOW} "$@"']) + "\n")
        os.chmod(program, 0o755)
        for step in (lambda: self.bcow("pool", "restart", "pool"), self.kill):
            with open(os.path.join(where, "0/large"), "r+b") as file:
                file.write(b"changed")
                step()
                file.seek(1 << 20)
                file.write(b"changed")
            self.assertEqual(read_bytes(tried).count(b"failed"), len(changes), read_bytes(tried))
            os.remove(tried)
            self.assertEqual(read_bytes(os.path.join(where, "0/large"))[:7], b"changed")
        # It names the process that has the lock now, not the one that took it.
        refused = self.bcow(*changes[0][1:], check=False)
        assert_refused(self, refused, self.upper, rf"process {self.pid()} \(", code=8)
        self.assertNotIn(b"has ended", refused.err)
        # An upper around it is refused, although the list of locks names a process that has ended.
        around = self.bcow("mount", "--upper", outer, self.programs, self.place(), check=False)
        assert_refused(self, around, self.upper)
        self.assert_sound(where)

    def test_fsx_finds_no_error(self):
        need("fsx")
        where = self.change()
        config = os.path.join(self.pools, "fsx.toml")
        write_file(config, test_union_fsx.FSX)
        for name in ("0/large", "new"):
            with subprocess.Popen(["fsx", "-q", "-N", "30000", "-S", str(random.randrange(1 << 30)),
                                   "-f", config, "-P", self.pools, os.path.join(where, name)],
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as fsx:
                for _ in range(STEPS):
                    time.sleep(random.random() / 2)
                    self.disturb(1, lambda: None)
                out = fsx.communicate(timeout=10 * TIMEOUT)[0]
                self.assertEqual(fsx.returncode, 0, out)
        self.assert_sound(where)

    def test_a_database_keeps_its_transactions(self):
        """SQLite, whose file is in the image: a partial file."""
        where = self.change()
        done = []
        is_over = threading.Event()
        failures = []

        def run_transactions():
            try:
                path = os.path.join(where, "database")
                with contextlib.closing(sqlite3.connect(path)) as database:
                    database.execute("PRAGMA synchronous=FULL")
                    numbers = random.Random(3)
                    while not is_over.is_set():
                        number, text = numbers.randrange(20_000), str(len(done)) * 100
                        with database:
                            database.execute("UPDATE numbers SET text = ? WHERE number = ?",
                                             (text, number))
                        done.append((number, text))
            except sqlite3.Error as failure:
                failures.append(failure)

        thread = threading.Thread(target=run_transactions)
        thread.start()
        try:
            def wait():
                before = len(done)
                until(lambda: len(done) > before + 5 or failures, "transactions end")

            self.disturb(STEPS, wait)
        finally:
            is_over.set()
            thread.join()
        self.assertEqual(failures, [])
        # Also without what only memory has.
        self.assert_sound(where)
        self.mount("--upper", self.upper, image=self.programs, where=where)
        with contextlib.closing(sqlite3.connect(os.path.join(where, "database"))) as database:
            self.assertEqual(database.execute("PRAGMA integrity_check").fetchall(), [("ok",)])
            found = dict(database.execute("SELECT number, text FROM numbers"))
        self.assertEqual({number: found[number] for number, _ in done}, dict(done))

    def test_removed_files_and_directories_in_use_stay(self):
        where = self.change()
        directory = os.path.join(where, "directory")
        os.mkdir(directory)
        handle = os.open(directory, os.O_RDONLY)
        os.rmdir(directory)
        file = os.open(os.path.join(where, "0/large"), os.O_RDWR)
        os.remove(os.path.join(where, "0/large"))
        os.pwrite(file, b"written", 5000)
        expected = bytearray(read_bytes(os.path.join(self.template, "large")))
        expected[5000:5007] = b"written"
        self.disturb(2, lambda: None)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        self.assertEqual(os.pread(file, len(expected) + 1, 0), expected)
        self.assertEqual((os.fstat(file).st_nlink, os.fstat(handle).st_nlink), (0, 0))
        self.assertEqual(os.listdir(handle), [])
        work = os.path.join(self.upper, ".bcow/work")

        def orphans():
            return [name for name in os.listdir(work) if name.startswith("orphan-")]

        self.assertEqual(len(orphans()), 2)
        os.close(file)
        os.close(handle)
        until(lambda: not orphans(), "the kernel forgets the files")
        self.assert_sound(where)

    def test_supervisor_and_process_killed_keep_what_was_synchronized(self):
        where = self.change()
        write_file(os.path.join(where, "new"), b"durable")
        run("sync", os.path.join(where, "new"))
        for pid in (self.supervisor(), self.pid()):
            os.kill(pid, signal.SIGKILL)
        until(lambda: not self.is_served(where), "the mount answers ENOTCONN")
        run("umount", "-l", where, timeout=TIMEOUT)
        self.start()
        self.mount("--upper", self.upper, image=self.programs, where=where)
        self.assertEqual(read_bytes(os.path.join(where, "new")), b"durable")

    @staticmethod
    def is_served(where):
        try:
            os.statvfs(where)
            return True
        except OSError as error:
            return error.errno != errno.ENOTCONN

    def test_an_unmount_knows_what_the_next_process_has_stored(self):
        need("strace")
        for step in (lambda: self.bcow("pool", "restart", "pool"), self.kill):
            where = self.change()
            write_file(os.path.join(where, "new"), b"new")
            # It has asked the process of the pool when it makes this call.
            unmount = subprocess.Popen(
                ["strace", "-qq", "-o", "/dev/null", "-e", "inject=umount2:delay_enter=1500000",
                 BCOW, "umount", where], env={**os.environ, **self.env}, stderr=subprocess.PIPE)
            children = f"/proc/{unmount.pid}/task/{unmount.pid}/children"

            def has_asked(children=children):
                with contextlib.suppress(OSError, IndexError):
                    child = f"/proc/{read_text(children).split()[0]}/fd"
                    links = (os.readlink(os.path.join(child, number))
                             for number in os.listdir(child) if int(number) > 2)
                    return any(link.startswith("pipe:") for link in links)

            until(has_asked, "the question")
            step()
            _, error = unmount.communicate(timeout=TIMEOUT)
            self.assertEqual((unmount.returncode, error), (0, b""))
            self.assert_sound(self.mount("--upper", self.upper, image=self.programs, where=where))

    def test_image_that_was_replaced_ends_the_mount_and_frees_the_upper(self):
        image = self.path("own.bcow")
        shutil.copy(self.programs, image)
        where = self.mount("--upper", self.upper, image=image)
        write_file(os.path.join(where, "new"), b"kept")
        shutil.copy(self.image, image + ".new")
        os.rename(image + ".new", image)
        refused = self.bcow("pool", "restart", "pool", check=False)
        assert_refused(self, refused, os.path.realpath(where), "another image has its place now")
        self.assertEqual(read_bytes(os.path.join(where, "new")), b"kept")
        self.kill()
        self.assertFalse(is_mounted(where))
        self.mount("--upper", self.upper, image=self.programs, where=where)
        self.assertEqual(read_bytes(os.path.join(where, "new")), b"kept")
        # With --force, such a mount is unmounted, and the others stay.
        self.bcow("umount", where)
        shutil.copy(self.programs, image)
        other = self.mount()
        self.mount("--upper", self.upper, image=image, where=where)
        os.remove(image)
        self.bcow("pool", "restart", "--force", "pool")
        self.assertFalse(is_mounted(where))
        self.read(other)
        # One that is in use is detached, and ends with its process. Its data is durable.
        shutil.copy(self.programs, image)
        self.mount("--upper", self.upper, image=image, where=where)
        with open(os.path.join(where, "in-use"), "wb", buffering=0) as file:
            file.write(b"written")
            os.remove(image)
            lost = self.bcow("pool", "restart", "--force", "pool", check=False)
            assert_refused(self, lost, "1 mount of the pool pool could not be taken over")
            self.assertFalse(is_mounted(where))
            self.read(other)
        self.mount("--upper", self.upper, image=self.programs, where=where)
        self.assertEqual(read_bytes(os.path.join(where, "in-use")), b"written")


class Descriptors(PoolCase):
    """A pool with fewer descriptors than the files that its mounts have changed."""

    def test_files_of_many_mounts_need_no_descriptors(self):
        run("prlimit", "--nofile=1024", BCOW, "pool", "start", "pool", env=self.env,
            timeout=TIMEOUT)
        places = [self.mount("--upper", os.path.join(self.pools, f"upper{number}"))
                  for number in range(16)]
        paths = [os.path.join(where, f"new{number}") for where in places for number in range(400)]
        for path in paths:
            write_file(path, b"1")
        for path in paths:
            os.chmod(path, 0o600)
        for _ in range(2):
            for path in paths:
                with open(path, "ab") as file:
                    file.write(b"2")
            self.kill()
        for path in paths:
            self.assertEqual(read_bytes(path), b"122")
        for where in places:
            self.assertEqual(self.json("stats", where)["errors"]["total"], 0)
            self.bcow("umount", where)


class KernelDriver(PoolCase):
    """Mounts with the kernel driver: an image, a disk and an upper."""

    @classmethod
    def setUpClass(cls):
        need("e2fsck", "losetup")
        super().setUpClass()
        # Loop devices show the names of disks and uppers, and other tests have some too.
        cls.disk = cls.path(f"disk-{os.path.basename(cls.directory)}.bcow")
        set_environment(cls, BCOW_VIEWS=cls.path("views"))
        bcow("create", "-b", cls.image, "--fs", "ext4", "-s", "1G", cls.disk, timeout=TIMEOUT)
        cls.plain = cls.path(f"plain-{os.path.basename(cls.directory)}.bcow")
        bcow("convert", "--plain", cls.image, cls.plain, timeout=TIMEOUT)
        cls.programs = cls.path("programs.bcow")
        bcow("convert", f"dir:{cls.make_programs()}", cls.programs, timeout=TIMEOUT)

    def setUp(self):
        super().setUp()
        self.upper = self.named("upper")
        self.start()

    def named(self, name):
        """The path of a disk or an upper, with a name that no other test has."""
        return os.path.join(self.pools, f"{os.path.basename(self.pools)}-{name}")

    def change(self, upper=None, where=None, *options, image=None):
        return self.mount("--driver", "kernel", "--upper", upper or self.upper, "--size", "1G",
                          *options, where=where, image=image)

    def new_disk(self, name):
        disk = self.named(name)
        bcow("create", "-b", self.programs, "--fs", "ext4", "-s", "1G", "--backing-dir",
             self.directory, disk, timeout=TIMEOUT)
        return disk

    def loop_devices(self):
        """The files of this test that loop devices have."""
        listed = run("losetup", "--list", "--noheadings", "--output", "BACK-FILE").out.decode()
        names = [os.path.basename(path) for path in (self.pools, self.directory)]
        return [line for line in listed.splitlines() if any(name in line for name in names)]

    def assert_sound(self, upper):
        raw = os.path.join(self.pools, "check.raw")
        self.bcow("convert", "--backing-dir", self.directory,
                  os.path.join(upper, ".bcow/disk.bcow"), f"raw:{raw}")
        run("e2fsck", "-fn", raw, timeout=TIMEOUT)
        os.remove(raw)

    @promise("A pool can have mounts of both drivers")
    def test_a_pool_serves_both_drivers(self):
        places = {"image": self.mount("--driver", "kernel", image=self.plain),
                  "disk": self.mount(image=self.disk), "upper": self.change(),
                  "fuse": self.mount()}
        types = {name: run("stat", "-f", "-c", "%T", where).out.decode().strip()
                 for name, where in places.items()}
        self.assertEqual(types["disk"], "ext2/ext3")
        self.assertEqual(types["upper"], "ext2/ext3")
        self.assertTrue(types["image"].startswith(("erofs", "UNKNOWN (0xe0f5e1e2)")), types)
        self.assertEqual(len(self.loop_devices()), 3)
        pid = self.pid()
        rows = self.services()
        for where in places.values():
            self.read(where)
            row = rows[os.path.realpath(where)]
            self.assertEqual((row["pid"], row["pool"]), (pid, "pool"))
            statistics = self.json("stats", where)
            self.assertEqual((statistics["process"]["pid"], statistics["pool"]), (pid, "pool"))
        self.assertEqual([mount["mode"] for mount in self.stats()["mounts"]],
                         ["ro", "rw", "rw", "ro"])
        self.assertIn(b"--pool needs a process", self.bcow("stats", places["image"]).out)
        # What is written is there in the next mount, in the pool and outside.
        for name in ("disk", "upper"):
            write_file(os.path.join(places[name], "new"), name.encode())
            self.bcow("umount", places[name])
        self.mount(image=self.disk, where=places["disk"])
        bcow("mount", self.image, places["upper"], "--upper", self.upper, timeout=TIMEOUT)
        for name in ("disk", "upper"):
            self.assertEqual(read_bytes(os.path.join(places[name], "new")), name.encode())
            self.read(places[name])
            self.bcow("umount", places[name])
        self.assert_sound(self.upper)
        self.bcow("pool", "stop", "--force", "pool")
        self.assertEqual(self.loop_devices(), [])
        self.assertFalse(any(map(is_mounted, places.values())))

    @promise("Programs in mounts of a pool with the kernel driver see no error when the process of "
             "the pool is killed or replaced, and lose no change")
    def test_programs_see_no_error(self):
        disk = self.new_disk("own.bcow")
        volatile = self.named("volatile")
        changed = {"upper": self.change(image=self.programs),
                   "volatile": self.change(volatile, None, "--sync", "volatile",
                                           image=self.programs),
                   "disk": self.mount("--backing-dir", self.directory, image=disk)}
        image = self.mount("--driver", "kernel", image=self.plain)
        everywhere = [*changed.values(), image]
        devices = {where: os.stat(where).st_dev for where in everywhere}
        with contextlib.ExitStack() as stack:
            load = stack.enter_context(Load(image, self.files))
            programs = [stack.enter_context(Program(os.path.join(where, "0"), self.template,
                                                    random.randrange(1 << 30)))
                        for where in changed.values()]
            pids = []

            def wait():
                pids.append(self.pid())
                for program in programs:
                    program.goes_on(1)
                load.goes_on()
                # At any moment of a round.
                time.sleep(random.random() / 4)

            self.disturb(STEPS, wait)
            for program in programs:
                program.finish()
        self.assertIsNone(load.failure)
        self.assertEqual(len(set(pids)), STEPS + 1)
        self.assertEqual({where: os.stat(where).st_dev for where in everywhere}, devices)
        rows = self.services()
        for where in everywhere:
            self.assertEqual(rows[os.path.realpath(where)]["pid"], pids[-1])
            statistics = self.json("stats", where)
            self.assertEqual(statistics["process"]["pid"], pids[-1])
            self.assertEqual(statistics["errors"]["total"], 0)
        # The process that took over does all that the first one did.
        grown = self.bcow("resize", changed["disk"], "2G", check=False)
        # Without the capability, the file system cannot grow; the disk has, or has not.
        if grown.code == 0:
            self.assertGreater(os.statvfs(changed["disk"]).f_blocks * 4096, 3 << 29)
        else:
            assert_refused(self, grown, "CAP_SYS_RESOURCE")
        for name, where in changed.items():
            write_file(os.path.join(where, "new"), name.encode())
        supervisor = self.supervisor()
        for where in everywhere:
            self.bcow("umount", where)
        until(lambda: self.stats()["mounts"] == [], "the pool notices the unmounts")
        self.assertEqual(self.loop_devices(), [])
        self.assertEqual(os.readlink(f"/proc/{supervisor}/exe"), os.path.realpath(BCOW))
        links = [os.readlink(f"/proc/{supervisor}/fd/{number}")
                 for number in os.listdir(f"/proc/{supervisor}/fd")]
        self.assertNotIn("/dev/fuse", links)
        self.assert_sound(self.upper)
        self.assert_sound(volatile)
        for upper in (self.upper, volatile):
            where = self.change(upper, image=self.programs)
            self.assertEqual(read_bytes(os.path.join(where, "new")),
                             upper.rsplit("-", 1)[1].encode())

    @promise("A mount of an image with the kernel driver stays if the process of its pool is "
             "killed")
    def test_an_image_stays_if_the_process_is_killed(self):
        where = self.mount("--driver", "kernel", image=self.plain)
        with Load(where, self.files) as load:
            for step in (self.kill, self.kill, lambda: self.bcow("pool", "restart", "pool"),
                         self.kill):
                load.goes_on()
                step()
            load.goes_on()
        self.assertIsNone(load.failure)
        self.bcow("umount", where)
        until(lambda: self.stats()["mounts"] == [], "the pool notices the unmount")
        # The last process is gone, and so the supervisor unmounts.
        where = self.mount("--driver", "kernel", image=self.plain)
        self.fail_again_and_again()
        self.assertFalse(is_mounted(where))

    @promise("Until the next process serves a mount, no other process can open its upper or its "
             "disk for writing")
    def test_a_disk_stays_locked_while_no_process_serves_it(self):
        """The program that takes over first tries to change the disk, as another process could."""
        self.bcow("pool", "stop", "pool")
        disk = self.new_disk("own.bcow")
        program = self.start_of("program")
        where = self.mount("--backing-dir", self.directory, image=disk)
        upper = self.change()
        changes = ([BCOW, "resize", "--backing-dir", self.directory, disk, "2G"],
                   [BCOW, "fsck", "--repair", self.upper, self.image])
        os.remove(program)
        tried = os.path.join(self.pools, "tried")
        lines = [f"{' '.join(change)} 2>>{tried} || echo failed >>{tried}" for change in changes]
        write_file(program, "\n".join(["#!/bin/sh", *lines, f'exec {BCOW} "$@"']) + "\n")
        os.chmod(program, 0o755)
        for step in (lambda: self.bcow("pool", "restart", "pool"), self.kill):
            # In the kernel's cache, and in the ledger.
            for place in (where, upper):
                write_file(os.path.join(place, "new"), random.randbytes(3_000_000))
                run("sync", os.path.join(place, "new"), timeout=TIMEOUT)
                write_file(os.path.join(place, "new"), b"new")
            step()
            self.assertEqual(read_bytes(tried).count(b"failed"), len(changes), read_bytes(tried))
            self.assertIn(os.fsencode(disk), read_bytes(tried))
            os.remove(tried)
            for place in (where, upper):
                self.assertEqual(read_bytes(os.path.join(place, "new")), b"new")
        # It is free when the mount has ended.
        self.bcow("umount", where)
        self.bcow("resize", "--backing-dir", self.directory, disk, "2G")
        self.bcow("pool", "stop", "--force", "pool")
        self.assert_sound(self.upper)

    @promise("The upper of a mount of a pool can be moved while the mount is in use")
    def test_an_upper_that_was_moved_is_found(self):
        where, name = self.change(), self.upper
        for number, step in enumerate((lambda: self.bcow("pool", "restart", "pool"), self.kill)):
            moved = os.path.join(self.pools, f"moved{number}")
            os.rename(self.upper, moved)
            self.upper = moved
            write_file(os.path.join(where, "new"), b"%d" % number)
            step()
            self.assertEqual(read_bytes(os.path.join(where, "new")), b"%d" % number)
            self.assertEqual(self.services()[os.path.realpath(where)]["upper"], self.upper)
            self.assertFalse(os.path.exists(name))
        write_file(os.path.join(where, "new"), b"last")
        self.bcow("umount", where)
        self.change(where=where)
        self.assertEqual(read_bytes(os.path.join(where, "new")), b"last")
        self.bcow("pool", "stop", "--force", "pool")
        self.assert_sound(self.upper)

    def test_a_disk_that_was_unmounted_when_the_process_was_killed_has_everything(self):
        """The process is killed when the kernel has closed the file, before it closes the disk."""
        where = self.change()
        pid = self.pid()
        write_file(os.path.join(where, "new"), b"new" * 300_000)
        unmount = subprocess.Popen(["umount", where])
        os.kill(pid, signal.SIGKILL)
        self.assertEqual(unmount.wait(TIMEOUT), 0)
        until(lambda: (self.find() or {}).get("restarts"), "another process takes over")
        until(lambda: not self.loop_devices(), "the loop device is gone")
        until(lambda: self.stats()["mounts"] == [], "the pool notices the unmount")
        self.change(where=where)
        self.assertEqual(read_bytes(os.path.join(where, "new")), b"new" * 300_000)
        self.bcow("pool", "stop", "--force", "pool")
        self.assert_sound(self.upper)

    def test_restart_is_refused_if_the_disk_could_not_be_opened_again(self):
        disk = self.new_disk("own.bcow")
        where, stays = self.mount("--backing-dir", self.directory, image=disk), self.change()
        pid = self.pid()
        os.rename(disk, disk + ".away")
        shutil.copy(self.disk, disk)
        refused = self.bcow("pool", "restart", "pool", check=False)
        assert_refused(self, refused, os.path.realpath(where), "another file has the name",
                       "--force")
        self.assertEqual(self.pid(), pid)
        write_file(os.path.join(where, "new"), b"kept")
        self.bcow("pool", "restart", "--force", "pool")
        self.assertNotEqual(self.pid(), pid)
        self.assertFalse(is_mounted(where))
        self.read(stays)
        os.rename(disk + ".away", disk)
        where = self.mount("--backing-dir", self.directory, image=disk)
        self.assertEqual(read_bytes(os.path.join(where, "new")), b"kept")

    def test_a_signal_while_the_mounts_are_stopped_goes_to_the_next_process(self):
        """The process could not end if it waited for one of its own mounts then."""
        uppers = [self.named(f"stopped{number}") for number in range(12)]
        places = [self.change(upper) for upper in uppers]
        for round in range(STEPS):
            for where in places:
                # In the kernel's cache only.
                write_file(os.path.join(where, f"new{round}"), b"x" * 300_000)
            pool = self.find()
            # The last mount is stopped first, which erases the note of its lock.
            lock = os.open(os.path.join(uppers[-1], ".bcow/lock"), os.O_RDONLY)
            self.assertTrue(os.pread(lock, 256, 1024).strip(b"\0"))
            restart = subprocess.Popen([BCOW, "pool", "restart", "pool"],
                                       env={**os.environ, **self.env},
                                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            deadline = time.monotonic() + TIMEOUT
            while os.pread(lock, 256, 1024).strip(b"\0") and time.monotonic() < deadline:
                pass
            with contextlib.suppress(ProcessLookupError):
                os.kill(pool["pid"], signal.SIGTERM)
            os.close(lock)
            restart.wait(TIMEOUT)
            if (self.find() or {}).get("pid") not in (None, pool["pid"]):
                # The process may have ended just before the signal. A second signal would not wait.
                self.bcow("pool", "stop", "--force", "pool", check=False)
            self.assert_ends(pool["keeper"])
            self.assertFalse(any(map(is_mounted, places)))
            self.assertEqual(self.loop_devices(), [])
            self.start()
            for upper, where in zip(uppers, places, strict=True):
                self.change(upper, where)
                self.assertEqual(read_bytes(os.path.join(where, f"new{round}")), b"x" * 300_000)

    def test_a_signal_while_no_process_serves_loses_nothing(self):
        """The program that takes over first signals the supervisor, or itself as another could."""
        for number, signals in enumerate(("kill -TERM $PPID", "kill -TERM $$")):
            self.bcow("pool", "stop", "pool")
            program = self.start_of(f"program{number}")
            upper = self.named(f"signal{number}")
            where = self.change(upper)
            # In the kernel's cache only.
            write_file(os.path.join(where, "new"), b"x" * 3_000_000)
            os.remove(program)
            write_file(program, f"#!/bin/sh\n{signals}\nexec {BCOW} \"$@\"\n")
            os.chmod(program, 0o755)
            supervisor = self.supervisor()
            self.bcow("pool", "restart", "pool", check=False)
            self.assert_ends(supervisor)
            self.assertFalse(is_mounted(where))
            self.assertEqual(self.loop_devices(), [])
            self.start()
            self.change(upper, where)
            self.assertEqual(read_bytes(os.path.join(where, "new")), b"x" * 3_000_000)
            self.bcow("umount", where)

    def test_mounts_end_while_the_pool_restarts(self):
        """Nothing is lost and nothing stays, whichever process closes the disk."""
        uppers = [self.named(f"upper{number}") for number in range(4)]
        places = [self.change(upper) for upper in uppers]
        for round in range(STEPS):
            for where in places:
                write_file(os.path.join(where, f"file{round}"), b"x" * 100_000)
            commands = (["umount"], [BCOW, "umount"], [BCOW, "umount"], ["umount"])
            unmounts = [subprocess.Popen([*command, where], env={**os.environ, **self.env},
                                         stderr=subprocess.PIPE)
                        for command, where in zip(commands, places, strict=True)]
            time.sleep(random.random() / 10)
            self.bcow("pool", "restart", "pool")
            for unmount in unmounts:
                _, error = unmount.communicate(timeout=TIMEOUT)
                self.assertEqual(unmount.returncode, 0, error.decode())
            until(lambda: self.stats()["mounts"] == [], "the mounts end")
            until(lambda: not self.loop_devices(), "the loop devices are gone")
            for upper, where in zip(uppers, places, strict=True):
                self.change(upper, where)
                for before in range(round + 1):
                    self.assertEqual(len(read_bytes(os.path.join(where, f"file{before}"))),
                                     100_000)
        for upper, where in zip(uppers, places, strict=True):
            self.bcow("umount", where)
            self.assert_sound(upper)

    def test_a_pool_with_open_files_ends_with_the_last_one(self):
        where = self.change()
        pid = self.pid()
        with open(os.path.join(where, "new"), "wb") as file:
            stopped = self.bcow("pool", "stop", "--force", "pool")
            self.assertIn(b"1 mount of the pool pool is in use", stopped.err)
            self.assertFalse(is_mounted(where))
            file.write(b"late")
        self.assert_ends(pid)
        self.start()
        self.change(where=where)
        self.assertEqual(read_bytes(os.path.join(where, "new")), b"late")

    def kill_both(self):
        """Kills the supervisor and the process of the pool."""
        pool = self.find()
        for pid in (pool["keeper"], pool["pid"]):
            os.kill(pid, signal.SIGKILL)
        for pid in (pool["keeper"], pool["pid"]):
            self.assert_ends(pid)

    def test_killed_pools_leave_nothing_behind(self):
        """Programs write to two uppers and synchronize."""
        uppers = [self.named(name) for name in ("one", "two")]
        places = [self.change(upper) for upper in uppers]
        for _ in range(3):
            synchronized = [0, 0]

            def write(index, synchronized=synchronized):
                path = os.path.join(places[index], "numbers")
                with contextlib.suppress(OSError), \
                        open(path, "ab") as file:
                    for number in range(1, 1 << 30):
                        file.write(b"%d " % number)
                        file.flush()
                        os.fsync(file.fileno())
                        synchronized[index] = number

            threads = [threading.Thread(target=write, args=(index,)) for index in (0, 1)]
            for thread in threads:
                thread.start()
            until(lambda: min(synchronized) > 20, "programs write", seconds=TIMEOUT)
            self.kill_both()
            for thread in threads:
                thread.join(TIMEOUT)
                self.assertFalse(thread.is_alive())
            for where in places:
                run("umount", "-l", where, timeout=TIMEOUT)
            until(lambda: not self.loop_devices(), "the loop devices are gone")
            self.start()
            for upper, where, last in zip(uppers, places, synchronized, strict=True):
                self.change(upper, where)
                numbers = [int(one) for one in read_bytes(os.path.join(where, "numbers")).split()]
                self.assertEqual(numbers[:last], list(range(1, last + 1)))
                os.remove(os.path.join(where, "numbers"))
        for upper, where in zip(uppers, places, strict=True):
            self.bcow("umount", where)
            self.assert_sound(upper)

    def test_processes_killed_while_they_mount_end(self):
        """A thread that waits for its own process in the kernel could never be killed."""
        places = [self.place() for _ in range(3)]
        for round in range(STEPS):
            pid = self.pid()
            mounts = [subprocess.Popen(
                [BCOW, "mount", self.image, where, "--pool", "pool", "--driver", "kernel",
                 "--upper", self.named(f"upper{index}"), "--size", "1G"],
                env={**os.environ, **self.env}, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL) for index, where in enumerate(places)]
            time.sleep(random.random() / 5)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.assert_ends(pid)
            for mount in mounts:
                mount.wait(TIMEOUT)
            until(lambda: (self.find() or {}).get("pid") not in (None, pid), "the next process")
            for where in places:
                while is_mounted(where):
                    run("umount", "-l", where, timeout=TIMEOUT)
            until(lambda: not self.loop_devices(), "the loop devices are gone")
            if round % 4 == 3:
                # Too many short processes in a row end a pool.
                self.bcow("pool", "restart", "pool")
        for index, where in enumerate(places):
            self.change(self.named(f"upper{index}"), where)
            self.read(where)

    def test_batches_are_for_the_fuse_driver(self):
        # For a disk, the command selects the driver itself.
        refused = bcow("mount", self.disk, self.place(), "--sync", "batch=3", check=False)
        assert_refused(self, refused, "--sync batch is for the FUSE driver", code=2)

    def test_an_ordinary_user_is_refused(self):
        pools = tempfile.mkdtemp(prefix="u-", dir=WORK)
        self.addCleanup(shutil.rmtree, pools, ignore_errors=True)
        os.chown(pools, UNPRIVILEGED, UNPRIVILEGED)
        program, image = for_everyone(BCOW), for_everyone(self.image)
        where = os.path.join(pools, "mnt")

        def as_user(*arguments, check=True):
            return run(program, *arguments, user=UNPRIVILEGED, env={"BCOW_POOLS": pools},
                       check=check, timeout=TIMEOUT)

        as_user("pool", "start", "own")
        try:
            os.mkdir(where)
            os.chown(where, UNPRIVILEGED, UNPRIVILEGED)
            for options in (("--upper", os.path.join(pools, "upper")), ()):
                refused = as_user("mount", image, where, "--pool", "own", "--driver", "kernel",
                                  *options, check=False)
                assert_refused(self, refused, "only root can mount")
        finally:
            as_user("pool", "stop", "own")


class Program:
    """A program of `names_model.py`, or of another model."""

    def __init__(self, directory, template, seed, *more, model="names_model.py", env=None):
        self.rounds, self.lines = 0, []
        self.process = subprocess.Popen(
            [sys.executable, os.path.join(os.path.dirname(__file__), model), directory, template,
             str(seed), *more], env={**os.environ, **(env or {})},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.thread = threading.Thread(target=self.follow, daemon=True)
        self.seed = seed

    def follow(self):
        for line in self.process.stdout:
            self.lines.append(line)
            self.rounds += line.strip().isdigit()

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.thread.join()
        self.process.stdout.close()

    def goes_on(self, rounds):
        target = self.rounds + rounds
        until(lambda: self.rounds >= target or self.process.poll() is not None,
              "the program goes on")

    def ask_to_end(self):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def finish(self, seconds=TIMEOUT):
        """Ends the program, which compares all files once more."""
        self.ask_to_end()
        code = self.process.wait(timeout=seconds)
        self.thread.join()
        if code != 0:
            raise AssertionError(f"seed {self.seed}: {''.join(self.lines[-60:])}")


class Refusals(PoolCase):
    def refused(self, *arguments, mention, code=1, **options):
        result = self.bcow(*arguments, check=False, **options)
        assert_refused(self, result, *mention, code=code)

    def test_options_of_the_process_are_those_of_the_pool(self):
        where = self.place()
        for option in (["--cpus", "0"], ["--cache-size", "1M"], ["-f"], ["--log-file", "x"],
                       ["--metrics", "127.0.0.1:0"]):
            self.refused("mount", self.image, where, "--pool=pool", *option,
                         mention=["cannot be used with"], code=2)
        self.refused("mount", self.image, where, "--pool=../x", mention=["a name"], code=2)
        self.refused("mount", self.image, where, "--pool=pool",
                     mention=["it does not run", "bcow pool start pool"])
        self.refused("pool", "stop", "pool", mention=["it does not run"])

    def test_errors_are_those_of_a_mount(self):
        self.start()
        where = self.place()
        missing = self.path("missing.bcow")
        arguments = ["mount", missing, where]
        alone = self.bcow(*arguments, check=False)
        self.refused(*arguments, "--pool=pool", mention=["missing.bcow"])
        self.assertEqual(self.bcow(*arguments, "--pool=pool", check=False).err, alone.err)
        self.mount(where=where)
        self.refused("mount", self.image, where, "--pool=pool", mention=["already mounted"])
        self.refused("pool", "start", "pool", mention=["runs it already"])

    def test_other_namespace_is_refused(self):
        need("unshare")
        self.start()
        command = ["unshare", "-m", BCOW, "mount", self.image, self.place(), "--pool=pool"]
        result = run(*command, env=self.env, timeout=TIMEOUT, check=False)
        assert_refused(self, result, "another mount or user namespace")

    def test_files_inside_a_mount_of_the_pool_are_refused(self):
        outer = self.path("outer")
        os.mkdir(outer)
        shutil.copy(self.image, outer)
        image = self.path("outer.bcow")
        bcow("convert", f"dir:{outer}", image, timeout=TIMEOUT)
        self.start()
        self.start("other")
        where = self.mount(image=image)
        inner = os.path.join(where, "image.bcow")
        self.refused("mount", inner, self.place(), "--pool=pool",
                     mention=["inside a mount of the same pool"])
        self.refused("mount", self.image, self.place(), "--pool=pool", "--store", where,
                     mention=[where, "inside a mount of the same pool"])
        self.refused("mount", "https://127.0.0.1:9/image.bcow", self.place(), "--pool=pool",
                     "--cache-dir", os.path.join(where, "cache"),
                     mention=["inside a mount of the same pool"])
        disk = self.path("disk.bcow")
        bcow("create", "-b", inner, "--backing-dir", where, disk, timeout=TIMEOUT)
        self.refused("mount", disk, self.place(), "--pool=pool", "--backing-dir", where,
                     mention=[where, "inside a mount of the same pool"])
        self.read(self.mount(pool="other", image=inner))
        self.bcow("pool", "stop", "--force", "other")


class Protocol(PoolCase):
    def connect(self):
        connection = socket.socket(socket.AF_UNIX)
        self.addCleanup(connection.close)
        connection.settimeout(TIMEOUT)
        connection.connect(os.path.join(self.pools, "pool.sock"))
        return connection.makefile("rwb")

    def ask(self, line):
        stream = self.connect()
        hello = json.loads(stream.readline())
        # The pool may refuse before it has read everything.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            stream.write(line)
            stream.flush()
        return hello, json.loads(stream.readline())["result"]

    def test_what_the_pool_does_not_know_is_named(self):
        self.start()
        hello, _ = self.ask(b'{"version":1,"request":"stats"}\n')
        self.assertEqual((hello["version"], hello["pool"]), (1, "pool"))
        for line, mention in [
            (b'{"version":99,"request":"stats"}\n', "version 99"),
            (b'{"version":1,"request":"sing"}\n', "`sing`"),
            (b'{"version":1,"request":"stop"}\n', "force"),
            (b"\0\xff\n", "invalid request"),
            (b"x" * ((1 << 20) + 1), "the line has more than 1048576 bytes"),
        ]:
            failed = self.ask(line)[1]["failed"]
            self.assertIn(mention, " ".join([failed["message"], *failed["causes"]]))
        # Fields of later versions are ignored.
        self.assertIn("done", self.ask(b'{"version":1,"request":"stats","more":1}\n')[1])
        # A client that leaves, before and after the hello.
        self.connect().close()
        self.connect().readline()
        self.read(self.mount())

    def ask_again_and_again(self, done):
        """Gives the number of answers, and that of requests that were read and not answered."""
        answered = lost = 0
        while not done.is_set():
            # The next process may not listen yet, or this one may end before it reads the request.
            with contextlib.suppress(ConnectionError, FileNotFoundError), \
                    socket.socket(socket.AF_UNIX) as client:
                client.settimeout(TIMEOUT)
                client.connect(os.path.join(self.pools, "pool.sock"))
                if not client.recv(4096):
                    continue
                client.sendall(b'{"version":1,"request":"stats"}\n')
                if client.recv(4096):
                    answered += 1
                else:
                    lost += 1
        return answered, lost

    def test_a_process_that_ends_for_a_restart_answers_what_it_has_read(self):
        self.start()
        done = threading.Event()
        with concurrent.futures.ThreadPoolExecutor(CLIENTS) as threads:
            clients = [threads.submit(self.ask_again_and_again, done) for _ in range(CLIENTS)]
            try:
                for _ in range(10):
                    self.bcow("pool", "restart", "pool")
            finally:
                done.set()
            found = [client.result() for client in clients]
        self.assertGreater(sum(answered for answered, _ in found), 100)
        self.assertEqual(sum(lost for _, lost in found), 0)

    @promise("Only its owner can make mounts in a pool")
    def test_other_users_are_refused(self):
        os.rmdir(self.pools)
        self.start()
        path = os.path.join(self.pools, "pool.sock")
        self.assertEqual(stat.S_IMODE(os.stat(self.pools).st_mode), 0o700)
        self.assertEqual(stat.S_IMODE(os.stat(path).st_mode), 0o600)
        where = for_everyone(self.pools)
        env = {"BCOW_POOLS": where}
        result = bcow("pool", "stats", "pool", env=env, user=UNPRIVILEGED, check=False,
                      timeout=TIMEOUT)
        assert_refused(self, result, "it belongs to another user")
        # Also with a connection.
        os.chmod(self.pools, 0o711)
        os.chmod(path, 0o666)
        program = ("import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); "
                   "f = s.makefile('rwb'); f.readline(); "
                   "f.write(b'{\"version\":1,\"request\":\"stop\",\"force\":true}\\n'); f.flush(); "
                   "print(f.readline().decode())")
        result = run("/usr/bin/python3", "-c", program, os.path.join(where, "pool.sock"),
                     user=UNPRIVILEGED, timeout=TIMEOUT)
        self.assertIn(b"it belongs to root", result.out)
        # A directory that others can enter is refused by the program itself.
        assert_refused(self, self.bcow("pool", "list", check=False), "other users can enter it")
        os.chmod(self.pools, 0o700)
        self.bcow("pool", "stop", "pool")


if __name__ == "__main__":
    unittest.main()
