"""bcow top: the rates, latency and totals of mounts with both ways of serving (a process of their
own, a pool), what it shows of those that hang, died or have no statistics, the containers on a
mount, the order and the filter, and the live list on a terminal."""

import contextlib
import glob
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock

import support
from support import BCOW, bcow, need, run, until, write_file

TIMEOUT = 60


class Top(support.Scratch):
    @classmethod
    def setUpClass(cls):
        need(root=True, fuse=True)
        super().setUpClass()
        tree = cls.path("tree")
        os.mkdir(tree)
        write_file(os.path.join(tree, "large"), os.urandom(4 << 20))
        cls.image = cls.path("image.bcow")
        bcow("convert", f"dir:{tree}", cls.image, timeout=TIMEOUT)

    def setUp(self):
        self.place = tempfile.mkdtemp(prefix="top-", dir=self.directory)

    def at(self, name):
        return os.path.join(self.place, name)

    def mount(self, name, *options):
        os.mkdir(self.at(name))
        bcow("mount", self.image, self.at(name), "--upper", self.at(f"{name}-upper"), *options,
             timeout=TIMEOUT)
        self.addCleanup(subprocess.run, ["umount", "-l", self.at(name)], stderr=subprocess.DEVNULL)

    def top(self, *options, place=None):
        """The rows of this test, in their order."""
        found = bcow("top", "--once", "--interval", "1", "--json", "--filter", place or self.place,
                     *options, timeout=TIMEOUT)
        document = json.loads(found.out)
        self.assertEqual(document["schema"], "bcow.top/1")
        return document["services"]

    def use(self, name):
        """Requests to a mount until the test ends."""
        script = 'n=0; while :; do n=$((n+1)); [ -e "$0/$n" ]; done'
        process = subprocess.Popen(["sh", "-c", script, self.at(name)])
        self.addCleanup(lambda: (process.kill(), process.wait(TIMEOUT)))

    def pid(self, name):
        [row] = [row for row in self.top() if row["at"] == [self.at(name)]]
        return row["pid"]

    def test_rates_and_totals(self):
        self.mount("busy", "--size-limit", "1M")
        self.mount("idle")
        write_file(os.path.join(self.at("busy"), "new"), bytes(100_000))
        with open(os.path.join(self.at("busy"), "large"), "r+b") as file:
            file.write(b"changed")
        with self.assertRaises(OSError):
            write_file(os.path.join(self.at("busy"), "too-large"), bytes(2 << 20))
        self.use("busy")
        busy, idle = self.top()
        self.assertEqual((busy["at"], idle["at"]), ([self.at("busy")], [self.at("idle")]))
        activity, totals = busy["activity"], busy["activity"]["totals"]
        self.assertGreater(activity["requests_per_second"], 0)
        self.assertGreater(activity["mean_ns"], 0)
        self.assertGreaterEqual(totals["requests"], activity["requests_per_second"])
        self.assertEqual(totals["copied_files"], 1)
        self.assertGreater(totals["stored_bytes"], 100_000)
        self.assertGreater(totals["errors"], 0)
        self.assertGreaterEqual(totals["in_flight"], 0)
        self.assertIsNone(idle["activity"]["totals"]["stored_bytes"])
        self.assertEqual(idle["activity"]["totals"]["errors"], 0)
        # By any other column, too.
        for column in ("errors", "stored", "copied"):
            self.assertEqual(self.top("--sort", column)[0]["at"], [self.at("busy")], column)
        means = [row["activity"]["mean_ns"] or 0 for row in self.top("--sort", "latency")]
        self.assertEqual(means, sorted(means, reverse=True))
        [row] = self.top(place=self.at("idle"))
        self.assertEqual(row["at"], [self.at("idle")])

    def test_mounts_that_do_not_answer_have_no_activity(self):
        self.mount("stopped")
        self.mount("dead")
        stopped, dead = self.pid("stopped"), self.pid("dead")
        self.addCleanup(os.kill, stopped, signal.SIGKILL)
        support.stop(stopped)
        os.kill(dead, signal.SIGKILL)
        until(lambda: {row["state"] for row in self.top()} == {"stopped", "dead"}, "both states")
        self.assertEqual([row["activity"] for row in self.top()], [None, None])
        text = bcow("top", "--once", "--interval=1", "--filter", self.place,
                    timeout=TIMEOUT).out.decode()
        self.assertEqual(len(re.findall(r"^(- +){8}(stopped|dead) ", text, re.MULTILINE)), 2, text)
        os.kill(stopped, signal.SIGCONT)

    def test_mounts_of_a_pool(self):
        self.enterContext(unittest.mock.patch.dict(os.environ, BCOW_POOLS=self.at("pools")))
        bcow("pool", "start", "web", timeout=TIMEOUT)
        self.addCleanup(bcow, "pool", "stop", "--force", "web", timeout=TIMEOUT)
        for name in ("a", "b"):
            self.mount(name, "--pool", "web")
        self.use("b")
        rows = self.top()
        self.assertEqual([(row["at"], row["pool"]) for row in rows],
                         [([self.at("b")], "web"), ([self.at("a")], "web")])
        text = bcow("top", "--once", "--interval=1", "--filter", self.place,
                    timeout=TIMEOUT).out.decode()
        self.assertIn("2 mounts and served disks, 1 pool: ", text)

    def test_containers_are_named(self):
        # Of version 2, or of a controller of version 1.
        groups = [*glob.glob("/sys/fs/cgroup/cgroup.procs"), *glob.glob("/sys/fs/cgroup/*/tasks")]
        if not groups:
            support.missing("cgroups are not mounted")
        group = os.path.join(os.path.dirname(groups[0]), "bcow-top-test")
        os.mkdir(group)
        self.addCleanup(lambda: until(lambda: self.removed(group), "the cgroup is empty"))
        self.mount("root")
        script = "import os, sys; os.chroot(sys.argv[1]); input()"
        process = subprocess.Popen(["unshare", "-m", sys.executable, "-c", script, self.at("root")],
                                   stdin=subprocess.PIPE)
        write_file(os.path.join(group, "cgroup.procs"), str(process.pid))
        self.addCleanup(lambda: (process.kill(), process.communicate(timeout=TIMEOUT)))
        until(lambda: self.top()[0]["containers"] == ["bcow-top-test"], "the container is named")
        text = bcow("top", "--once", "--interval=1", "--filter", "bcow-top-test",
                    timeout=TIMEOUT).out.decode()
        self.assertIn(f"at {self.at('root')}", text)

    def removed(self, group):
        with contextlib.suppress(OSError):
            os.rmdir(group)
            return True
        return False

    def test_served_disks_are_listed(self):
        disk, socket = self.at("disk.bcow"), self.at("socket")
        bcow("create", disk, "16M", timeout=TIMEOUT)
        process = subprocess.Popen([BCOW, "serve", disk, "--socket", socket],
                                   stdout=subprocess.DEVNULL)
        self.addCleanup(lambda: (process.terminate(), process.wait(TIMEOUT)))
        until(lambda: os.path.exists(socket), "the disk is served")
        until(lambda: [row["kind"] for row in self.top()] == ["serve"], "it is listed")
        self.assertIsNone(self.top()[0]["activity"])

    def test_the_list_is_live_on_a_terminal(self):
        self.mount("one")
        child, terminal = pty.fork()
        if child == 0:
            # In the background of a shell, it would be ignored.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.execv(BCOW, [BCOW, "top", "--interval", "1"])
        shown = b""
        end = time.monotonic() + TIMEOUT
        while shown.count(b"\x1b[2J") < 3 and time.monotonic() < end:
            if select.select([terminal], [], [], 1)[0]:
                shown += os.read(terminal, 1 << 16)
        os.kill(child, signal.SIGINT)
        os.waitpid(child, 0)
        os.close(terminal)
        self.assertGreaterEqual(shown.count(b"\x1b[2J"), 3)
        self.assertIn(b"REQ/S", shown)


if __name__ == "__main__":
    unittest.main()
