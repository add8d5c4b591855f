"""Containers of containerd run, start and end while what serves them is killed."""

import concurrent.futures
import contextlib
import os
import random
import signal
import threading
import time

import support
from support import bcow

SEED = int(os.environ.get("BCOW_SEED", "0")) or random.randrange(1 << 32)
KILLS = int(os.environ.get("BCOW_KILLS", "4"))
# It ends at its first error, and if a line is missing. It removes /ask when it finds it.
SCRIPT = ("n=0; while n=$((n + 1)); do echo more >>/log; test $(wc -l </log) = $n; "
          "rm -f /ask; sleep 0.05; done")


def stopped_tree(pid):
    """A process and all that it has started, stopped so that none starts another one."""
    found = [pid]
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        support.stop(pid)
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in support.read_text(f"/proc/{pid}/task/{thread}/children").split():
                found += stopped_tree(int(child))
    return found


class Kills:
    """For a test with containerd and a snapshotter (test_snapshotter.WithContainerd)."""

    def assert_containers_outlive_kills(self, images):
        """Random starts and removals of containers. The mounts are in a pool if the snapshotter has
        the option for it; containerd has the images. Nothing is left of them at the end."""
        choose = random.Random(SEED)
        in_pool = "--pool" in self.snapshotter.options
        victims = ["snapshotter", "containerd", *(["pool", "new pool"] if in_pool else [])]
        running, number = set(), 0
        with concurrent.futures.ThreadPoolExecutor() as threads:
            for kill in range(KILLS):
                victim = choose.choice(victims)
                where = f"seed {SEED}, kill {kill}: {victim}"
                struck = threading.Event()
                hit = threads.submit(self.hit, victim, choose.uniform(0.0, 1.0), struck)
                cut_off = set()
                while not hit.done():
                    number += 1
                    if len(running) < 2 or (len(running) < 6 and choose.random() < 0.6):
                        name = f"{os.getpid()}-k{number}"
                        done = self.ctr("run", "--detach", "--snapshotter", "bcow",
                                        choose.choice(images), name, "/bin/sh", "-ec", SCRIPT,
                                        check=False)
                        if done.code == 0:
                            running.add(name)
                    else:
                        name = choose.choice(sorted(running))
                        running.remove(name)
                        done = self.remove(name)
                    if done.code != 0:
                        # The process of a pool may be replaced at any time. If it is killed, it
                        # takes the request that it works at with it: that may be the cause.
                        self.assertTrue(struck.is_set() and victim != "new pool",
                                        f"{where}: {done}")
                        cut_off.add(name)
                hit.result()
                for name in cut_off:
                    self.remove(name)
                self.assertEqual(sorted(self.listed("containers")), sorted(running), where)
                for name in running:
                    self.assert_goes_on(name, where)
        for name in sorted(running):
            self.assertEqual(self.remove(name).code, 0)
        self.assert_containerd_removes_all()

    def hit(self, victim, delay, struck):
        """Kills a process and waits until it is replaced."""
        time.sleep(delay)
        struck.set()
        if victim == "containerd":
            self.stop_containerd(signal.SIGKILL)
            self.start_containerd()
        elif victim == "snapshotter":
            self.assertEqual(self.snapshotter.end(signal.SIGKILL), -9)
            self.snapshotter.start()
        else:
            before = self.pool()
            if victim == "pool":
                os.kill(before["pid"], signal.SIGKILL)
            else:
                done = bcow("pool", "restart", "p", check=False)
                self.assertEqual(done.code, 0, f"{done}\n{support.read_text(self.pool_log)}")
            support.until(lambda: (self.pool()["restarts"] or 0) > before["restarts"],
                          "another process takes over")
        support.until(lambda: self.ctr("snapshots", "--snapshotter", "bcow", "ls",
                                       check=False).code == 0, "containerd connects again")

    def remove(self, name):
        """Removes a container as far as it is there; returns the last result."""
        self.ctr("tasks", "rm", "-f", name, check=False)
        return self.ctr("containers", "rm", name, check=False)

    def assert_goes_on(self, name, where):
        def exec_in(script):
            identity = f"e{random.randrange(1 << 32)}"
            return self.ctr("tasks", "exec", "--exec-id", identity, name, "/bin/sh", "-c", script,
                            check=False)
        asked = exec_in(": >/ask")
        self.assertEqual(asked.code, 0, f"{where}: {name}: {asked}")
        support.until(lambda: exec_in("test ! -e /ask").code == 0, f"{where}: {name} goes on")

    def assert_containerd_removes_all(self):
        """Removes the images; then nothing is left in containerd and on the machine."""
        for lease in self.listed("leases"):
            # That of a command which was cut off, else it ends a day later.
            self.ctr("leases", "rm", lease)
        for name in self.listed("images"):
            self.ctr("images", "rm", "--sync", name)
        client = self.snapshotter.client
        support.until(lambda: not client.List(), "containerd removes all snapshots")
        self.kill_left_shims()
        self.assert_only(client)
        self.assertEqual(self.names("layers"), [])
        self.assert_nothing_is_mounted()
        self.assertEqual([place for place in self.places(self.place) if "/run/" in place], [])
        support.until(lambda: not self.services(), "the processes of the mounts end")
        if "--pool" in self.snapshotter.options:
            self.assertEqual(self.pool_mounts(), [])

    def kill_left_shims(self):
        """containerd that is killed when it starts a shim leaves it, and the shim may have made a
        container already. Its process waits for ever, and uses the upper of a removed snapshot."""
        for shim in self.shims():
            for pid in stopped_tree(shim):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def shims(self):
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                command = support.read_bytes(f"/proc/{pid}/cmdline").split(b"\0")
                if command[0].endswith(b"containerd-shim-runc-v2") and os.fsencode(
                        os.path.join(self.place, "c")) in command:
                    found.append(int(pid))
        return found
