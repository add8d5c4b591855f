"""Snapshots of disks, forks, and the way back. qemu-img and the recorded bytes are the judges."""

import contextlib
import glob
import json
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time

import support
from promises import promise
from support import BCOW, UNPRIVILEGED, bcow, need, read_bytes, run, served, stop, write_file
from test_disks import MEBIBYTE, Directory

SIZE = 4 * MEBIBYTE
BLOCK = 4096
SEED = int(os.environ.get("BCOW_SEED", "1"))
# The system calls that change files.
CHANGES = "pwrite64,ftruncate,fallocate,fsync,fdatasync,linkat,rename,renameat2,unlink,fchmod"
ALL_CALLS = os.environ.get("BCOW_CALLS") == "all"
# Some calls of a command that makes many.
SOME = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89)


def snapshots(disk):
    """The documents of the snapshots of a disk, by name."""
    listed = json.loads(bcow("snapshot", "list", disk, "--json").out)["snapshots"]
    return {snapshot["name"]: snapshot for snapshot in listed}


def request(control, file, name, ends=False, **more):
    """Asks the process with this socket for a snapshot of the disk `file`, or of the upper with
    this lock, as a program does. Returns the file from which to read the answer. With `ends`, the
    connection has an end after the request."""
    found = os.stat(file)
    asked = {"device": found.st_dev, "inode": found.st_ino, "snapshot": name, **more}
    with socket.socket(socket.AF_UNIX) as client:
        client.connect("\0" + control)
        client.sendall(json.dumps(asked).encode() + b"\n")
        if ends:
            client.shutdown(socket.SHUT_WR)
        return client.makefile("rb")


def killed_at(kind, call, command):
    """Runs a command that is killed in front of a system call. Returns whether it ended itself."""
    killed = run("strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={kind}", "-e",
                 f"inject={kind}:signal=SIGKILL:when={call}", BCOW, *command, check=False)
    return killed.code == 0


def content(name):
    """What a disk shows."""
    bcow("convert", name, "raw:shown.raw")
    shown = read_bytes("shown.raw")
    os.unlink("shown.raw")
    return shown


def write(disk, *writes, end=None):
    """Writes pairs of an offset and bytes through `bcow serve`, and flushes."""
    options = {} if end is None else {"end": end}
    with served(disk, "--socket", "written.sock", **options) as server:
        client = connected(server)
        for at, data in writes:
            client.pwrite(data, at)
        client.flush()
        client.shutdown()


def connected(server):
    import nbd  # From Debian's python3-libnbd.
    client = nbd.NBD()
    client.connect_uri(server.uri)
    return client


class Snapshots(Directory):
    """Each test has a disk of random content over an image."""

    def setUp(self):
        need("nbdsh", "qemu-img")
        super().setUp()
        self.random = random.Random(SEED)
        write_file("base.raw", self.random.randbytes(SIZE // 2) + bytes(SIZE // 2))
        bcow("convert", "raw:base.raw", "base.bcow")
        bcow("create", "-b", "base.bcow", "vm.bcow")
        self.content = bytearray(read_bytes("base.raw"))
        self.change()

    def change(self):
        """Writes at a few places of the disk."""
        writes = []
        for _ in range(5):
            data = self.random.randbytes(self.random.choice([100, 5000, 200_000]))
            at = self.random.randrange(SIZE - len(data))
            self.content[at:at + len(data)] = data
            writes.append((at, data))
        write("vm.bcow", *writes)

    def assert_content(self, name, expected):
        shown = content(name)
        self.assertEqual(len(shown), len(expected), name)
        if shown != expected:
            at = next(at for at in range(len(shown)) if shown[at] != expected[at])
            self.fail(f"{name} is another from byte {at} on")


class AtRest(Snapshots):
    """Disks that no process uses."""

    @promise("What a snapshot shows never changes. Only `bcow fsck --repair` and `bcow snapshot "
             "rm` write to its file.",
             "A command that fails leaves the disk and all snapshots as they were.")
    def test_every_command_reads_a_snapshot_and_none_writes_to_it(self):
        before = bytes(self.content)
        taken = json.loads(bcow("snapshot", "vm.bcow", "one", "--json").out)
        self.assertEqual(taken["schema"], "bcow.snapshot/1")
        self.assertEqual(os.path.basename(taken["file"]), "vm.bcow@one")
        self.change()
        file = read_bytes("vm.bcow@one")
        write_file("before.raw", before)
        bcow("convert", "vm.bcow@one", "one.qcow2")
        run("qemu-img", "compare", "before.raw", "one.qcow2")
        bcow("fsck", "--data", "vm.bcow@one")
        bcow("fsck", "--data", "vm.bcow")
        bcow("map", "vm.bcow@one")
        described = json.loads(bcow("inspect", "--json", "vm.bcow@one").out)
        self.assertEqual(described["format"]["use"], "disk")
        self.assertEqual(bcow("diff", "vm.bcow@one", "vm.bcow", check=False).code, 1)
        with served("vm.bcow@one", "--socket", "s") as server:
            info = json.loads(run("nbdinfo", "--json", server.uri).out)
            self.assertTrue(info["exports"][0]["is_read_only"])
        mention = ("vm.bcow@one", "it is a snapshot, and never changes")
        self.refused("resize", "vm.bcow@one", "8M", mention=mention)
        self.refused("rebase", "vm.bcow@one", "--no-backing", mention=mention)
        self.refused("commit", "vm.bcow@one", mention=mention)
        self.refused("seal", "vm.bcow@one", mention=mention)
        self.refused("compact", "vm.bcow@one", mention=mention)
        self.refused("snapshot", "vm.bcow@one", "two", mention=mention)
        self.refused("commit", "vm.bcow", mention=mention)
        self.refused("snapshot", "vm.bcow", "one", mention=("vm.bcow@one exists",))
        self.refused("snapshot", "vm.bcow", "a/b", mention=("the name of a snapshot",), code=2)
        self.refused("rollback", "vm.bcow", "two", mention=('has no snapshot "two"',))
        self.refused("snapshot", "rm", "vm.bcow", "two", mention=('has no snapshot "two"',))
        self.refused("fork", "vm.bcow@one", "base.bcow", mention=("not overwriting",))
        self.assertTrue(read_bytes("vm.bcow@one") == file)
        self.assert_content("vm.bcow", self.content)
        # A copy of the file is a disk of its own.
        shutil.copy("vm.bcow@one", "copy.bcow")
        write("copy.bcow", (0, b"changed"))
        self.assert_content("copy.bcow", b"changed" + before[7:])
        self.assert_content("vm.bcow@one", before)

    def test_list_has_times_sizes_and_users(self):
        begun = int(time.time())
        bcow("snapshot", "vm.bcow", "one")
        bcow("fork", "vm.bcow@one", "fork.bcow")
        self.change()
        bcow("snapshot", "vm.bcow", "two")
        # No snapshots: another disk, and a file that only has such a name.
        bcow("create", "-s", "1M", "vm.bcow@other")
        write_file("vm.bcow@text", b"text")
        found = snapshots("vm.bcow")
        self.assertEqual(list(found), ["one", "two"])
        one, two = found["one"], found["two"]
        self.assertEqual((one["backing"], two["backing"]), ("base.bcow", "vm.bcow@one"))
        self.assertEqual((one["used_by"], two["used_by"]),
                         (["fork.bcow", "vm.bcow@two"], ["vm.bcow"]))
        for snapshot in (one, two):
            self.assertEqual(snapshot["bytes"], SIZE)
            self.assertTrue(begun <= snapshot["taken_unix_seconds"] <= time.time())
            stored = os.stat(snapshot["file"]).st_blocks * 512
            self.assertEqual(snapshot["stored_bytes"], stored)
        text = bcow("snapshot", "list", "vm.bcow").out.decode()
        row = r"(?m)^one +\S+ +4 MiB +\S+ .* base\.bcow +fork\.bcow, vm\.bcow@two$"
        self.assertRegex(text, row)

    @promise("The time does not depend on the size of the disk, and no data is copied.")
    def test_an_empty_disk_over_a_snapshot_is_small(self):
        bcow("snapshot", "vm.bcow", "one")
        inode = os.stat("vm.bcow@one").st_ino
        bcow("fork", "vm.bcow@one", "fork.bcow")
        for disk in ("vm.bcow", "fork.bcow"):
            self.assertLess(os.stat(disk).st_blocks * 512, 64 << 10)
        bcow("snapshot", "vm.bcow", "two")
        self.assertEqual(os.stat("vm.bcow@one").st_ino, inode)

    def test_owner_mode_and_layout_stay(self):
        bcow("create", "-s", "64M", "--layout", "performance", "--block-size", "32K", "p.bcow")
        os.chmod("p.bcow", 0o640)
        bcow("snapshot", "p.bcow", "one")
        bcow("fork", "p.bcow@one", "fork.bcow")
        self.assertEqual(os.stat("p.bcow").st_mode & 0o7777, 0o640)
        geometry = [json.loads(bcow("inspect", "--json", name).out)["geometry"]
                    for name in ("p.bcow@one", "p.bcow", "fork.bcow")]
        for key in ("size", "region_bytes"):
            self.assertEqual(len({document[key] for document in geometry}), 1, key)

    @promise("If the command is killed at any moment, the disk has its content under its name, and "
             "the snapshot is complete or absent.")
    def test_a_snapshot_that_is_killed_is_complete_or_absent(self):
        def check(before):
            taken = snapshots("vm.bcow")
            self.assertEqual(glob.glob(".*"), [])
            self.assert_content("vm.bcow", before)
            if not taken:
                bcow("snapshot", "vm.bcow", "one")
            self.assert_content("vm.bcow@one", before)
            return bool(taken)

        complete = self.kill_everywhere(["snapshot", "vm.bcow", "one"], check)
        self.assertEqual(complete, {False, True})

    def test_a_rollback_that_is_killed_leaves_one_of_both(self):
        old = bytes(self.content)
        bcow("snapshot", "vm.bcow", "old")
        self.change()

        def check(before):
            shown = content("vm.bcow")
            self.assertIn(shown, (before, old))
            if "kept" in snapshots("vm.bcow"):
                self.assert_content("vm.bcow@kept", before)
            else:
                self.assertEqual(shown, before)
            self.assert_content("vm.bcow@old", old)
            bcow("rollback", "vm.bcow", "old")
            self.assert_content("vm.bcow", old)
            return shown == before

        command = ["rollback", "vm.bcow", "old", "--keep", "kept"]
        found = self.kill_everywhere(command, check, SOME)
        self.assertEqual(found, {False, True})

    def test_a_removal_that_is_killed_changes_no_content(self):
        states = {}
        for name in ("one", "two", "three"):
            states[name] = bytes(self.content)
            bcow("snapshot", "vm.bcow", name)
            self.change()

        def check(before):
            self.assert_content("vm.bcow", before)
            found = snapshots("vm.bcow")
            for name in found:
                self.assert_content(f"vm.bcow@{name}", states[name])
            if "one" in found:
                bcow("snapshot", "rm", "vm.bcow", "one")
            self.assertNotIn("one", snapshots("vm.bcow"))
            bcow("fsck", "--data", "vm.bcow")
            self.assert_content("vm.bcow", before)
            return "one" in found

        found = self.kill_everywhere(["snapshot", "rm", "vm.bcow", "one"], check, SOME)
        self.assertEqual(found, {False, True})

    def test_a_snapshot_that_changes_is_detected_also_after_a_removal(self):
        for name in ("one", "two", "three"):
            bcow("snapshot", "vm.bcow", name)
            self.change()
        bcow("snapshot", "rm", "vm.bcow", "one")
        self.assert_content("vm.bcow", self.content)
        shutil.copy("vm.bcow@two", "changed.bcow")
        write("changed.bcow", (0, b"changed"))
        os.rename("changed.bcow", "vm.bcow@two")
        for disk in ("vm.bcow", "vm.bcow@three"):
            self.refused("convert", disk, "raw:shown.raw", mention=("has changed since",))

    def kill_everywhere(self, command, check, calls=range(1, 1000)):
        """Kills a command in front of each system call that changes a file, or of these calls of
        each kind, each time in a copy of this directory. `check` gets the content before. Returns
        what it found."""
        need("strace")
        before, found = bytes(self.content), set()
        top = os.getcwd()
        for kind in CHANGES.split(","):
            for call in calls:
                os.mkdir("copy")
                # With their holes.
                run("cp", "--sparse=always", "--preserve=all", *glob.glob("*.bcow*"), "copy")
                os.chdir("copy")
                ended = killed_at(kind, call, command)
                with self.subTest(kind=kind, call=call):
                    found.add(check(before))
                os.chdir(top)
                shutil.rmtree("copy")
                if ended:
                    break
        return found

    @promise("The same is true after a power failure.")
    def test_both_files_are_durable_before_they_exchange_their_names(self):
        need("strace")
        # Flushed, with records in the log.
        write("vm.bcow", (5000, b"x" * 9000), end=9)
        run("strace", "-f", "-y", "-o", "log", "-e", f"trace={CHANGES}", BCOW,
            "snapshot", "vm.bcow", "one")
        dirty, exchanged, directory_synced = set(), False, False
        with open("log") as log:
            for line in log:
                call = re.match(r"\d+ +(\w+)\((?:\d+<(.*?)>(?: |,|\)))?", line)
                if not call:
                    continue
                name, path = call[1], call[2] or ""
                if name == "renameat2":
                    self.assertIn("RENAME_EXCHANGE", line)
                    self.assertEqual(dirty, set())
                    exchanged = True
                elif name in ("fsync", "fdatasync"):
                    dirty.discard(path)
                    directory_synced |= exchanged and path == os.getcwd()
                elif path.startswith(os.getcwd()) and name in ("pwrite64", "ftruncate"):
                    dirty.add(path)
        self.assertTrue(exchanged and directory_synced)


class Live(Snapshots):
    """A disk that `bcow serve` uses."""

    @promise("A snapshot has all that was written, and answered, before the command began, and "
             "nothing that was written after it ended.",
             "Clients of a served disk wait while a snapshot is taken, and see no error.",
             "A client that writes nothing else until a write is answered finds in each snapshot "
             "what it had written up to some moment of the command.")
    def test_snapshots_of_a_disk_that_is_written_are_moments_of_it(self):
        blocks = 256
        bcow("create", "-s", "4M", "live.bcow")
        with served("live.bcow", "--socket", "s") as server:
            writer = Writer(server, blocks)
            taken = {}
            for number in range(8):
                before = writer.answered
                while writer.answered < before + 50:
                    writer.check()
                    time.sleep(0.001)
                begun = writer.answered
                if number % 2:
                    name = f"s{number}"
                    bcow("snapshot", "live.bcow", name)
                    taken[f"live.bcow@{name}"] = (begun, writer.sent)
                else:
                    bcow("fork", "live.bcow", f"fork{number}.bcow")
                    taken[f"fork{number}.bcow"] = (begun, writer.sent)
            writer.end()
            run("qemu-io", "-f", "raw", "-c", "write -P 7 3M 64k", "-c", "read -P 7 3M 64k",
                "-c", "flush", server.uri)
        for name, (first, last) in taken.items():
            self.assertTrue(first <= writer.state(content(name), blocks) <= last, name)
        shown = content("live.bcow")
        self.assertEqual(writer.state(shown, blocks), writer.answered)
        self.assertTrue(shown[3 * MEBIBYTE:][:64 << 10] == b"\7" * (64 << 10))
        for name in ("live.bcow", *taken):
            bcow("fsck", "--data", name)

    def test_a_server_that_is_killed_after_a_snapshot_loses_nothing(self):
        with served("vm.bcow", "--socket", "s", end=9) as server:
            client = connected(server)
            client.pwrite(b"before", 0)
            bcow("snapshot", "vm.bcow", "one")
            client.pwrite(b"after", MEBIBYTE)
            client.flush()
        self.content[:6] = b"before"
        self.assert_content("vm.bcow@one", self.content)
        self.content[MEBIBYTE:MEBIBYTE + 5] = b"after"
        self.assert_content("vm.bcow", self.content)

    def test_a_served_disk_is_refused_where_no_server_can_help(self):
        bcow("snapshot", "vm.bcow", "one")
        with served("vm.bcow", "--socket", "s"):
            self.refused("snapshot", "vm.bcow", "one", mention=("vm.bcow@one exists",))
            self.refused("snapshot", "vm.bcow", "a b", mention=("the name of a snapshot",), code=2)
            self.refused("rollback", "vm.bcow", "one", mention=("written by bcow serve",))
            os.mkdir("elsewhere")
            self.refused("fork", "vm.bcow", "elsewhere/fork.bcow", mention=("--backing-dir",))
            self.assertEqual(list(snapshots("vm.bcow")), ["one"])
            # A snapshot can be read and forked meanwhile.
            bcow("fork", "vm.bcow@one", "fork.bcow")
            self.assert_content("fork.bcow", self.content)
            self.refused("snapshot", "rm", "vm.bcow", "one", mention=("it is the backing of",))
            self.refused("snapshot", "rm", "vm.bcow", "two", mention=("no snapshot \"two\"",))
        with served("vm.bcow", "--read-only", "--socket", "s"):
            self.refused("snapshot", "vm.bcow", "two", mention=("in use",))

    def take(self, server, *names):
        """Takes snapshots of the served disk, with changes after each; returns their contents."""
        client, taken = connected(server), {}
        for name in names:
            taken[name] = bytes(self.content)
            bcow("snapshot", "vm.bcow", name)
            for size in 100, 5000, 200_000:
                data = self.random.randbytes(size)
                at = self.random.randrange(SIZE - size)
                client.pwrite(data, at)
                self.content[at:at + size] = data
        client.flush()
        client.shutdown()
        return taken

    @promise("Programs that use the disk go on while a snapshot of it is removed, and see no "
             "error.",
             "A snapshot is not removed while another process reads it, or a snapshot that is over "
             "it.")
    def test_snapshots_are_removed_while_the_disk_is_used(self):
        names = [f"s{number}" for number in range(9)]
        with served("vm.bcow", "--socket", "s") as server:
            taken = self.take(server, *names)
            with served("vm.bcow@s4", "--read-only", "--socket", "r"):
                for name in "s4", "s3", "s1":
                    self.refused("snapshot", "rm", "vm.bcow", name, mention=("in use",))
            self.random.shuffle(names)
            # Requests go on all the time.
            reader, end, errors = connected(server), threading.Event(), []

            def read():
                while not end.is_set():
                    shown = reader.pread(SIZE, 0)
                    if shown != self.content:
                        errors.append("other content")
                        return
                    reader.pwrite(bytes(self.content[:5000]), 0)
            thread = threading.Thread(target=read)
            thread.start()
            try:
                for number, name in enumerate(names):
                    removed = json.loads(bcow("snapshot", "rm", "vm.bcow", name, "--json").out)
                    self.assertRegex(removed["into"], r"/vm\.bcow(@s\d)?$")
                    del taken[name]
                    self.assertEqual(set(snapshots("vm.bcow")), set(taken))
                    for other in taken if number % 3 == 1 else ():
                        self.assert_content(f"vm.bcow@{other}", taken[other])
            finally:
                end.set()
                thread.join()
            self.assertEqual(errors, [])
            reader.shutdown()
        self.assert_content("vm.bcow", self.content)
        bcow("fsck", "--data", "vm.bcow")
        inspected = json.loads(bcow("inspect", "vm.bcow", "--json").out)
        self.assertEqual(inspected["backings"][0]["name"], "base.bcow")

    @promise("If the command is killed before, the removal ends.")
    def test_a_removal_ends_with_its_command(self):
        with served("vm.bcow", "--socket", "s") as server:
            self.take(server, "one", "two")
            with open("/proc/net/unix") as sockets:
                control = re.search(rf"@(bcow-serve-{server.process.pid}-\d+)", sockets.read())[1]
            for name in "one", "two":
                stop(server.process.pid)
                request(control, "vm.bcow", name, remove=True).close()
                server.process.send_signal(signal.SIGCONT)
                # The removal is cancelled at its first step, so the snapshot is still there.
                bcow("snapshot", "rm", "vm.bcow", name)
            # A client that only says that it sends nothing more gets its answer.
            self.take(server, "three")
            with request(control, "vm.bcow", "three", remove=True, ends=True) as answer:
                self.assertIn("removed", json.loads(answer.read()))
            self.assertEqual(snapshots("vm.bcow"), {})
        self.assert_content("vm.bcow", self.content)

    @promise("If the command, or the process that serves the disk, is killed at any moment, or the "
             "power fails, that is true too; the snapshot is removed or complete.")
    def test_a_server_that_is_killed_during_a_removal_loses_nothing(self):
        need("strace")
        with served("vm.bcow", "--socket", "s") as server:
            taken = self.take(server, "one", "two", "three")
        found = set()
        for name in taken:
            for kind in "pwrite64", "fsync", "fdatasync", "linkat", "rename", "unlink":
                for call in SOME if ALL_CALLS else SOME[:3]:
                    os.mkdir("copy")
                    run("cp", "--sparse=always", "--preserve=all", *glob.glob("*.bcow*"), "copy")
                    with self.subTest(name=name, kind=kind, call=call), contextlib.chdir("copy"):
                        is_killed = self.kill_during_removal(name, kind, call)
                        found.add(self.check_removed(name, taken))
                    shutil.rmtree("copy")
                    if not is_killed:
                        break
        self.assertEqual(found, {False, True})

    def kill_during_removal(self, name, kind, call):
        """Removes a snapshot of a served disk, whose server is killed in front of a system call.
        Returns whether it was."""
        server = support.Served("vm.bcow", "--socket", "s")
        pid = server.process.pid
        tracer = subprocess.Popen(["strace", "-f", "-qq", "-o", "/dev/null", "-p", str(pid), "-e",
                                   f"trace={kind}", "-e",
                                   f"inject={kind}:signal=SIGKILL:when={call}"])
        support.until(lambda: "TracerPid:\t0" not in support.read_text(f"/proc/{pid}/status"),
                      "strace")
        removed = bcow("snapshot", "rm", "vm.bcow", name, check=False)
        server.end(signal.SIGKILL)
        tracer.wait()
        return removed.code != 0

    def check_removed(self, name, taken):
        """Checks what is left after a removal that was killed. Returns whether it was done."""
        left = set(snapshots("vm.bcow"))
        self.assertLessEqual({*taken} - {name}, left)
        for other in left:
            self.assert_content(f"vm.bcow@{other}", taken[other])
        self.assert_content("vm.bcow", self.content)
        if name in left:
            bcow("snapshot", "rm", "vm.bcow", name)
        for other in left - {name}:
            self.assert_content(f"vm.bcow@{other}", taken[other])
            bcow("fsck", "--data", f"vm.bcow@{other}")
        self.assert_content("vm.bcow", self.content)
        bcow("fsck", "--data", "vm.bcow")
        return name not in left

    @promise("Only the user of a serving process, and root, can ask it for a snapshot.")
    def test_other_users_cannot_ask_for_a_snapshot(self):
        need(root=True)
        with served("vm.bcow", "--socket", "s") as server:
            with open("/proc/net/unix") as sockets:
                name = re.search(rf"@(bcow-serve-{server.process.pid}-\d+)", sockets.read())[1]
            file = os.stat("vm.bcow")
            request = json.dumps({"device": file.st_dev, "inode": file.st_ino, "snapshot": "x"})
            # The server refuses another user before it reads, so the request may find the
            # connection closed; the answer is there all the same.
            script = ("import contextlib, socket, sys\n"
                      "client = socket.socket(socket.AF_UNIX)\n"
                      "client.connect(b'\\0' + sys.argv[1].encode())\n"
                      "with contextlib.suppress(BrokenPipeError):\n"
                      "    client.sendall(sys.argv[2].encode() + b'\\n')\n"
                      "print(client.makefile().readline())")
            asked = run("/usr/bin/python3", "-c", script, name, request, user=UNPRIVILEGED)
            self.assertIn(b"another user", asked.out)
            self.assertEqual(snapshots("vm.bcow"), {})
            # Bad requests, and then a good one.
            for line in ("{}", "x" * 10_000):
                asked = run("/usr/bin/python3", "-c", script, name, line)
                self.assertIn(b"failed", asked.out)
            asked = run("/usr/bin/python3", "-c", script, name, request)
            self.assertEqual(json.loads(asked.out), "done")
        self.assertEqual(list(snapshots("vm.bcow")), ["x"])


class Writer:
    """Writes numbers into the blocks of a disk in turn, one request at a time."""

    def __init__(self, server, blocks):
        self.blocks = blocks
        self.sent = self.answered = 0
        self.error = None
        self.ended = threading.Event()
        self.client = connected(server)
        self.thread = threading.Thread(target=self.write)
        self.thread.start()

    def write(self):
        try:
            while not self.ended.is_set():
                self.sent += 1
                data = struct.pack("<Q", self.sent) * (BLOCK // 8)
                self.client.pwrite(data, self.sent % self.blocks * BLOCK)
                self.answered = self.sent
                if self.sent % 20 == 0:
                    self.client.flush()
            self.client.shutdown()
        except Exception as error:
            self.error = error

    def check(self):
        if self.error:
            raise self.error

    def end(self):
        self.ended.set()
        self.thread.join()
        self.check()

    @staticmethod
    def state(content, blocks):
        """The number of the last write in this content; fails if an earlier one is missing."""
        numbers = {}
        for block in range(blocks):
            data = content[block * BLOCK:(block + 1) * BLOCK]
            number = struct.unpack_from("<Q", data)[0]
            if data != struct.pack("<Q", number) * (BLOCK // 8):
                raise AssertionError(f"block {block} has parts of two writes")
            numbers[block] = number
        last = max(numbers.values())
        for number in range(max(1, last - blocks + 1), last + 1):
            if numbers[number % blocks] != number:
                raise AssertionError(f"write {number} is missing, and {last} is there")
        return last
