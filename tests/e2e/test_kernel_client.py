"""Real kernels use a disk that bcow serves: file systems are made, filled, cut off, remounted and
checked.

Three kinds of kernel client, none of which needs a module of this machine's kernel: User-Mode Linux
with nbd.ko, a virtual machine with virtio-blk on qemu's NBD client, and nbdfuse with a loop device.
"""

import contextlib
import os
import signal
import subprocess
import tempfile
import unittest

import support
import uml
import vm
from support import BCOW, bcow, run, served, write_file

MIB = 1 << 20
KINDS = ("ext4", "xfs", "btrfs")
# Numbers of files in three sets: one is deleted in part, one is synced file by file, one is written
# during the second boot.
FILES = 40
DURABLE = 10
# fsx comes from crates.io; a run has this number of operations.
OPERATIONS = int(os.environ.get("BCOW_FSX") or 3000)


class KernelClients(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory(prefix="kernel-", dir=support.WORK)
        self.addCleanup(scratch.cleanup)
        self.dir = scratch.name
        # The path of a Unix socket must be short.
        short = tempfile.TemporaryDirectory(prefix="nbd-")
        self.addCleanup(short.cleanup)
        self.socket = os.path.join(short.name, "s")

    def path(self, name):
        return os.path.join(self.dir, name)

    def create(self, *arguments):
        bcow("create", *arguments)
        return arguments[-1]

    def assert_clean(self, *paths):
        for path in paths:
            self.assertEqual(bcow("fsck", path).code, 0, path)

    def test_file_systems_of_a_kernel_with_nbd_outlive_reboots_and_a_killed_server(self):
        uml.need()
        # mkfs.xfs refuses smaller disks.
        disks = {kind: self.create("-s", "320M", "--layout", layout, self.path(f"{kind}.bcow"))
                 for kind, layout in zip(KINDS, ("auto", "space", "performance"))}
        each = [(kind, f"/dev/nbd{number}", f"/tmp/{kind}") for number, kind in enumerate(KINDS)]
        listen = ["--listen", "127.0.0.1:0"]

        def step(name, **arguments):
            return name, arguments

        def connected(server, files):
            return {kind: step("connect", device=device, port=server.port,
                               export=os.path.basename(files[kind])) for kind, device, _ in each}

        # The guest fills the disks and reconnects; its power is cut while they are mounted; then
        # the server is killed.
        with served(*disks.values(), *listen, end=signal.SIGKILL) as server:
            connect = connected(server, disks)
            steps = [step("network")]
            for kind, device, at in each:
                steps += [connect[kind], step("make", device=device, kind=kind),
                          step("attach", device=device, kind=kind, where=at),
                          step("fill", where=at, prefix="a", count=FILES), step("detach", where=at),
                          step("disconnect", device=device), connect[kind],
                          step("attach", device=device, kind=kind, where=at),
                          step("verify", where=at, prefix="a", count=FILES),
                          step("remove", where=at, prefix="a", count=FILES, kept=3),
                          step("fill", where=at, prefix="b", count=DURABLE, durable=True)]
            values = uml.boot(steps)
            for (name, _), value in zip(steps, values):
                if name == "connect":
                    self.assertEqual((value["bytes"], value["read_only"], value["discard"]),
                                     (320 * MIB, False, True))
                    self.assertEqual((value["write_cache"], value["fua"]), ("write back", True))

        def verified(kind, device, at):
            return [step("attach", device=device, kind=kind, where=at),
                    step("verify", where=at, prefix="a", count=FILES, kept=3),
                    step("verify", where=at, prefix="b", count=DURABLE)]

        # All durable data is there, the file systems replay their logs, and the checks find no
        # error.
        with served(*disks.values(), *listen) as server:
            connect = connected(server, disks)
            steps = [step("network")]
            for kind, device, at in each:
                steps += [connect[kind], *verified(kind, device, at),
                          step("fill", where=at, prefix="c", count=DURABLE),
                          step("detach", where=at), step("check", device=device, kind=kind),
                          step("disconnect", device=device)]
            uml.boot(steps)
        self.assert_clean(*disks.values())

        # The disks as backings: an overlay stores the changes, and the backing does not change.
        uppers = {kind: self.create("-b", disk, self.path(f"{kind}-upper.bcow"))
                        for kind, disk in disks.items()}
        before = {kind: sha256(disk) for kind, disk in disks.items()}
        with served(*uppers.values(), *listen) as server:
            connect = connected(server, uppers)
            steps = [step("network")]
            for kind, device, at in each:
                steps += [
                    connect[kind], *verified(kind, device, at),
                    step("verify", where=at, prefix="c", count=DURABLE),
                    step("remove", where=at, prefix="a", count=FILES, kept=9),
                    step("fill", where=at, prefix="d", count=DURABLE),
                    step("detach", where=at), step("attach", device=device, kind=kind, where=at),
                    step("verify", where=at, prefix="a", count=FILES, kept=9),
                    step("verify", where=at, prefix="d", count=DURABLE), step("detach", where=at),
                    step("check", device=device, kind=kind), step("disconnect", device=device)]
            uml.boot(steps)
        self.assert_clean(*uppers.values())
        self.assertEqual({kind: sha256(disk) for kind, disk in disks.items()}, before)

    def test_attach_makes_a_device_and_detach_keeps_what_was_written(self):
        uml.need()
        program = [os.path.abspath(BCOW)]
        disk, device, at = "/tmp/disk.bcow", "/dev/nbd5", "/tmp/attached"

        def bcow_in_guest(*arguments, ok=(0,)):
            return "command", {"arguments": program + list(arguments), "ok": ok}

        mounted = ("attach", {"device": device, "kind": "ext4", "where": at})
        values = uml.boot([
            bcow_in_guest("create", "-s", "64M", disk),
            bcow_in_guest("attach", disk, device),
            ("device_facts", {"device": device}),
            # The device and the disk are in use, and `detach` refuses a mounted device.
            bcow_in_guest("attach", disk, device, ok=(1,)),
            bcow_in_guest("attach", disk, "/dev/nbd6", ok=(1,)),
            ("make", {"device": device, "kind": "ext4"}), mounted,
            ("fill", {"where": at, "prefix": "a", "count": FILES}),
            bcow_in_guest("detach", device, ok=(1,)),
            ("detach", {"where": at}),
            bcow_in_guest("detach", device),
            bcow_in_guest("detach", device, ok=(1,)),
            # When `detach` returns, the disk is free and holds all data.
            bcow_in_guest("fsck", disk),
            bcow_in_guest("attach", "--read-only", disk, device),
            ("device_facts", {"device": device}),
            ("attach", {"device": device, "kind": "ext4", "where": at, "read_only": True}),
            ("verify", {"where": at, "prefix": "a", "count": FILES}),
            ("detach", {"where": at}),
            bcow_in_guest("detach", device),
        ])
        self.assertEqual((values[2]["bytes"], values[2]["read_only"], values[2]["discard"],
                          values[2]["fua"]), (64 * MIB, False, True, True))
        for step, mention in ((3, "attached already, by process"),
                              (4, "being written by bcow attach"), (8, f"mounted at {at}"),
                              (11, "is not attached")):
            self.assertIn(mention, values[step])
        self.assertTrue(values[14]["read_only"])

    def test_a_virtual_machine_finds_its_disks_again(self):
        vm.need()
        kinds = ("ext4", "xfs")
        disks = {kind: self.create("-s", "320M", self.path(f"{kind}.bcow")) for kind in kinds}
        addresses = {kind: f"nbd:unix:{self.socket}:exportname={kind}.bcow" for kind in kinds}
        with served(*disks.values(), "--socket", self.socket, end=signal.SIGKILL):
            said = vm.boot("make", addresses)
            for line in said:
                self.assertRegex(line, r"make write back, discard [1-9]")
        os.unlink(self.socket)
        with served(*disks.values(), "--socket", self.socket):
            vm.boot("verify", addresses)
        self.assert_clean(*disks.values())

    def test_a_loop_device_on_nbdfuse_carries_ext4_and_fsx(self):
        support.need("nbdfuse", "losetup", "mkfs.ext4", "fsck.ext4", "fsx", root=True, fuse=True)
        base = self.create("-s", "256M", self.path("base.bcow"))
        self.on_loop(base, lambda device: run("mkfs.ext4", "-q", "-F", device))
        disk = self.create("-b", base, self.path("disk.bcow"))

        def work(device):
            with tempfile.TemporaryDirectory(dir=self.dir) as at:
                run("mount", "-t", "ext4", "-o", "discard", device, at)
                try:
                    # Half of the data in pieces of odd lengths.
                    for seed, config in ((1, ""), (2, "[opsize]\nmax = 9999\nalign = 1\n")):
                        write_file(self.path("fsx.toml"), "flen = 4194304\n" + config)
                        run("fsx", "-q", "-N", str(OPERATIONS), "-S", str(seed), "-f",
                            self.path("fsx.toml"), "-P", self.dir, os.path.join(at, f"x{seed}"))
                    run("cp", "-a", os.path.join(support.TOP, "crates"),
                        os.path.join(support.TOP, "docs"), at)
                    run("fstrim", at)
                    run("sync", "-f", at)
                finally:
                    run("umount", at)
            run("fsck.ext4", "-f", "-n", device)

        self.on_loop(disk, work)
        self.assert_clean(disk)

        def look(device):
            with tempfile.TemporaryDirectory(dir=self.dir) as at:
                run("mount", "-t", "ext4", "-o", "ro", device, at)
                try:
                    for part in ("crates", "docs"):
                        run("diff", "-r", os.path.join(support.TOP, part), os.path.join(at, part))
                finally:
                    run("umount", at)

        self.on_loop(disk, look)

    def on_loop(self, disk, work):
        """Calls `work` with a loop device on the file that nbdfuse shows of a disk."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(served(disk, "--socket", self.socket))
            at = stack.enter_context(tempfile.TemporaryDirectory(dir=self.dir))
            fuse = subprocess.Popen(["nbdfuse", f"{at}/disk", f"nbd+unix:///?socket={self.socket}"],
                                    stdin=subprocess.DEVNULL)
            stack.callback(fuse.wait)
            stack.callback(subprocess.run, ["umount", "-l", at])
            uml.wait_for(f"{at}/disk", fuse)
            device = run("losetup", "--find", "--show", "--direct-io=on",
                         f"{at}/disk").out.decode().strip()
            stack.callback(run, "losetup", "--detach", device)
            work(device)
            run("blockdev", "--flushbufs", device)


def sha256(path):
    return run("sha256sum", path).out.split()[0]
