"""Snapshots of containers in use. PostgreSQL runs under pgbench, and sees no error. It starts in
each fork, with tables that agree.

BCOW_SNAPSHOTS=100 BCOW_FORKS=20 takes more. BCOW_CONTAINERD=1 does the same with a container of
containerd 2.x.
"""

import concurrent.futures
import os
import re
import shutil
import tempfile

import test_containers
import test_snapshotter_differ
from support import bcow, is_mounted, run, until, write_file
from test_containers import AGREE, KINDS, POSTGRES, run_in_runc

SNAPSHOTS = int(os.environ.get("BCOW_SNAPSHOTS") or 3)
FORKS = int(os.environ.get("BCOW_FORKS") or 1)
TIMEOUT = 240
LOAD = POSTGRES + f"""
    bench -i -q -s 1
    bench -n -c 2 -j 2 -T 1
    touch /begun
    until [ -e /end ]; do bench -n -c 2 -j 2 -T 1; done
    sql "{AGREE.format(1)}"
    stop
"""
# The server of a fork finds the files of one that runs, as after a crash of the machine.
FORK = f"""
    rm -f /var/lib/postgresql/15/main/postmaster.pid /run/postgresql/.s.*
    {POSTGRES}
    sql "{AGREE.format(1)}"
    sql "select count(*) from pgbench_history"
    bench -n -c 2 -j 2 -t 10
    stop
"""


class Forks:
    """The part of the tests with each engine."""

    def check(self, where, begin):
        """Takes and removes snapshots of a mount while a container runs there, and forks some of
        them. `begin` runs a script in that container, and returns its output."""
        transactions = 0
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            running = pool.submit(begin, LOAD)
            try:
                until(lambda: running.done() or os.path.exists(os.path.join(where, "begun")),
                      "pgbench runs", TIMEOUT)
                for number in range(SNAPSHOTS):
                    self.assertFalse(running.done(), running.done() and running.result())
                    name = f"s{number}"
                    bcow("snapshot", where, name, timeout=TIMEOUT)
                    if (number + 1) * FORKS // SNAPSHOTS > number * FORKS // SNAPSHOTS:
                        found = self.transactions_of_fork(f"{where}@{name}")
                        self.assertGreaterEqual(found, transactions)
                        transactions = found
                    # Some stay for a while, so that the removed one is between two others.
                    if number % 3 == 2:
                        for name in (f"s{number - 1}", f"s{number}", f"s{number - 2}"):
                            bcow("snapshot", "rm", where, name, timeout=TIMEOUT)
            finally:
                write_file(os.path.join(where, "end"), "")
            out = running.result(timeout=TIMEOUT)
        self.assertIn("\nt\n", out)
        self.assertEqual(re.findall(r"number of failed transactions: (?!0 )", out), [])

    def transactions_of_fork(self, snapshot):
        """Runs PostgreSQL in a fork; returns the number of its transactions."""
        directory = tempfile.mkdtemp(prefix="fork-", dir=self.directory)
        os.chmod(directory, 0o755)
        upper, where = os.path.join(directory, "upper"), os.path.join(directory, "mnt")
        os.mkdir(where)
        try:
            bcow("fork", snapshot, upper, "--mount", where, "--", "-o", "allow_other,suid,dev",
                 timeout=TIMEOUT)
            out = run_in_runc(directory, where, FORK)
            bcow("umount", where, timeout=TIMEOUT)
            bcow("fsck", upper, timeout=TIMEOUT)
        finally:
            if is_mounted(where):
                run("umount", "-l", where)
            shutil.rmtree(directory, ignore_errors=True)
        agree = re.search(r"^t\n(\d+)$", out, re.MULTILINE)
        self.assertTrue(agree, out)
        return int(agree[1])


class Runc(Forks, test_containers.WithMounts):
    def test_forks_of_postgresql_under_pgbench_start_and_agree(self):
        for kind in KINDS:
            with self.subTest(kind), self.writable(kind=kind) as one:
                self.check(one.where, lambda script: run_in_runc(self.directory, one.where, script))


if "BCOW_CONTAINERD" in os.environ:
    class Containerd(Forks, test_snapshotter_differ.WithContainerd2):
        def test_forks_of_a_container_start_and_agree(self):
            self.import_image("real")
            self.ctr("snapshots", "--snapshotter", "bcow", "ls")
            client = self.snapshotter.client
            self.ctr("containers", "create", "--snapshotter", "bcow", "bcow.test/real:1", "one",
                     "/bin/sh", "-ec", LOAD)
            [active] = [info.name for info in client.List() if info.name.endswith("/one")]
            [mount] = client.Mounts(key=active).mounts
            self.check(mount.source,
                       lambda _: self.ctr("tasks", "start", "one", timeout=3600).out.decode())
