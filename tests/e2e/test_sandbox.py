"""The sandbox: from inside each kind of process, every forbidden call and file is refused, and what
the process is for goes on.

A preloaded library makes the calls, at a moment when the process is at work. In a process with
`--sandbox off`, none of them is refused: so the test can fail."""

import contextlib
import errno
import json
import os
import random
import re
import resource
import signal
import stat
import subprocess
import tempfile
import unittest

import uml
from support import (BCOW, TOP, UNPRIVILEGED, WORK, bcow, children, drop_caches, for_everyone,
                     is_mounted, mounter_of, named, need, need_kernel, read_bytes, read_text, run,
                     served, until, write_file)
from test_remote import Server, metrics

ESCAPE = os.path.join(TOP, "tests", "e2e", "preload", "escape.c")
REFUSED = {errno.EPERM, errno.EACCES}
# The parts of the sandbox, in the order in which a process enters them.
PARTS = ["no-new-privileges", "no-core-dumps", "limits", "calls", "capabilities", "files",
         "sockets"]
# The parts of a process that makes many mounts.
PARTS_OF_SERVICES = ["no-new-privileges", "no-core-dumps", "calls-partly", "capabilities-partly",
                     "sockets-partly"]
# What such a process can do.
POSSIBLE_IN_SERVICES = {"mount", "umount2", "move_mount", "fsopen", "chmod", "chown", "setxattr",
                        "utimensat", "mknod", "fchmod", "fchown", "fsetxattr", "socket_tcp",
                        "socket_unix", "connect", "listen", "sendto", "sendmsg", "signal",
                        "memory"}
# The connections of a pool are made by another process.
POSSIBLE_IN_POOLS = POSSIBLE_IN_SERVICES - {"socket_tcp"}
# What starts programs leaves limits to them.
LIMITS = {"setrlimit", "set_own_limit"}
MOUNTS = {"mount", "umount2", "move_mount", "fsopen"}
# The capabilities of a mount with an upper, by their numbers: those to change owners, modes and
# attributes of all files, to make devices, and to use reserved space and passthrough.
OF_UPPERS = sum(1 << number for number in (0, 1, 3, 4, 21, 24, 27, 31, 33))
# Those of a mount of a disk: for its snapshots.
OF_DISKS = sum(1 << number for number in (0, 1, 3, 4, 24))
# Of several blocks, so that a read of it reads from the image.
CONTENT = random.Random(1).randbytes(300_000)
# A file that every user may read, and that no process of bcow needs.
ANY_FILE = "/etc/passwd"


def least_core_limit():
    """The limit of core dumps in a sandbox, in bytes: one, or zero if a process that these tests
    start may not raise the limit."""
    script = "ulimit -Hc 1 && echo 1 || echo 0"
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    return 1 if hard else int(run("sh", "-c", script).out)


def most_memory(cache="64M"):
    """The limit of memory in a sandbox, in bytes."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(machine // 2, 4 << 30) + (int(cache.rstrip("M")) << 20)


def worked(results):
    """The tries that were not refused."""
    return {name for name, number in results.items()
            if number not in REFUSED and (name, number) != ("memory", errno.ENOMEM)}


class Sandboxed(unittest.TestCase):
    """Each test has its own directory, with an image and a disk, as the current directory."""

    def setUp(self):
        need("gcc")
        need_kernel(6, 12, "all of Landlock that bcow uses")
        directory = tempfile.TemporaryDirectory(prefix="sandbox-", dir=WORK)
        self.addCleanup(directory.cleanup)
        os.chmod(directory.name, 0o755)
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(directory.name)
        run("gcc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", "escape.so", ESCAPE)
        for name in ("images", "outside", "tree"):
            os.mkdir(name)
        write_file("tree/file", CONTENT)
        write_file("tree/other", CONTENT[::-1])
        bcow("convert", "dir:tree", "images/a.bcow")
        write_file("base.raw", CONTENT[:64 * 4096])
        bcow("convert", "raw:base.raw", "images/base.bcow")
        bcow("create", "-b", "images/base.bcow", "images/disk.bcow")
        self.outside = os.path.abspath("outside/new")
        self.image = os.path.abspath("images/a.bcow")

    def inside(self, at, *paths, go=None):
        """The environment of a process that tries to escape."""
        write_file("report", b"")
        os.chmod("report", 0o666)
        # The tests may run below the usual directory of temporary files, which convert may change.
        os.makedirs("temporary", exist_ok=True)
        return {"LD_PRELOAD": os.path.abspath("escape.so"), "ESCAPE_AT": at,
                "ESCAPE_REPORT": os.path.abspath("report"), "ESCAPE_PATHS": ":".join(paths),
                "TMPDIR": os.path.abspath("temporary"),
                **({} if go is None else {"ESCAPE_GO": os.path.abspath(go)})}

    def results(self):
        """The error number of each try."""
        lines = [line.split() for line in read_text("report").splitlines()]
        results = {name: int(number) for name, number in lines}
        self.assertIn("end", results, "the process did not try")
        del results["end"]
        return results

    def assert_refused(self, allowed=(), possible=()):
        """`allowed` are paths, and `possible` other tries that may have worked."""
        results = self.results()
        for name in possible:
            results.pop(name, None)
        for path in allowed:
            self.assertEqual(results.pop(path), 0, path)
        self.assertEqual(worked(results), set())

    def assert_not_refused(self):
        results = self.results()
        self.assertEqual(set(results) - worked(results), set())

    def assert_limits(self, pid, memory, descriptors=1 << 16):
        """Of the process, in /proc/PID/limits."""
        limits = read_text(f"/proc/{pid}/limits")
        self.assertRegex(limits, rf"Max data size +{memory} +{memory} ")
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        # An upper has no bound of its own.
        self.assertRegex(limits, rf"Max open files +\d+ +{min(hard, descriptors)} ")

    def assert_status(self, pid, **wanted):
        """Lines of /proc/PID/status, and the limit of core dumps."""
        status = dict(re.findall(r"(\w+):\s*(.*)", read_text(f"/proc/{pid}/status")))
        wanted = {"NoNewPrivs": "1", "Seccomp": "2", **wanted}
        self.assertEqual({name: status[name] for name in wanted}, wanted)
        limit = least_core_limit()
        self.assertRegex(read_text(f"/proc/{pid}/limits"), rf"core file size +{limit} +{limit} ")
        for thread in os.listdir(f"/proc/{pid}/task"):
            of_thread = read_text(f"/proc/{pid}/task/{thread}/status")
            for name in ("NoNewPrivs", "Seccomp", "CapEff", "CapPrm"):
                self.assertIn(f"{name}:\t{status[name]}\n", of_thread)


class Commands(Sandboxed):
    """Commands that read an image."""

    def check(self, *arguments, reads=()):
        """Runs a command, in which no file can be opened, except to read these."""
        plain = bcow(*arguments).out
        tries = [f"w{self.outside}", f"w{self.image}"]
        all_files = [f"r{ANY_FILE}", f"r{self.image}"]
        done = bcow(*arguments, "--sandbox", "require",
                    env=self.inside("write", *tries, *all_files))
        self.assertEqual(done.out, plain)
        self.assert_refused(allowed=[f"r{path}" for path in reads])
        self.assertFalse(os.path.exists(self.outside))
        if os.geteuid() == 0:
            done = bcow(*arguments, "--sandbox", "off",
                        env=self.inside("write", *tries, *all_files))
            self.assertEqual(done.out, plain)
            self.assert_not_refused()
            os.unlink(self.outside)

    def test_ls_only_lists(self):
        self.check("ls", "-lR", self.image)

    def test_cat_only_copies(self):
        self.check("cat", self.image, "file", "other")

    def test_what_reads_a_remote_image_has_no_network(self):
        """Another process has."""
        beside = os.path.abspath("cache/beside")
        with Server(os.path.abspath("images")) as server:
            url = server.url("a.bcow")
            for arguments in (["ls", "-lR", url], ["cat", url, "file"], ["map", url],
                              ["inspect", "--json", url], ["fsck", "--data", url],
                              ["convert", url, "made/new.bcow"]):
                os.makedirs("made", exist_ok=True)
                arguments += ["--insecure", "--cache-dir", "cache"]
                readable = arguments[0] in ("fsck", "convert")
                tries = [f"w{self.outside}", f"w{beside}"]
                bcow(*arguments, "--sandbox", "require", env=self.inside(
                    "write", *tries, f"r{ANY_FILE}", f"r{self.image}") | {
                        "ESCAPE_CHANGES_ATTRIBUTES": "open"})
                self.assert_refused(allowed=[f"w{beside}", *(
                    [f"r{ANY_FILE}", f"r{self.image}"] if readable else [])])
                self.assertFalse(os.path.exists(self.outside))

    def test_the_process_with_the_network_does_nothing_else(self):
        with Server(os.path.abspath("images")) as server:
            done = bcow("cat", server.url("a.bcow"), "file", "--insecure", "--no-cache",
                        "--sandbox", "require", env=self.inside("connect", f"r{ANY_FILE}"))
        self.assertTrue(done.out == CONTENT)
        results = self.results()
        possible = (POSSIBLE_IN_SERVICES - MOUNTS - {"memory"}
                    | LIMITS | {"fork", "execve", f"r{ANY_FILE}"})
        self.assertLessEqual(worked(results), possible)
        self.assertLessEqual({"socket_tcp", "connect", f"r{ANY_FILE}"}, worked(results))

    def test_map_only_shows_the_map(self):
        self.check("map", self.image)
        self.check("map", "images/disk.bcow")

    def test_inspect_only_shows_the_properties(self):
        self.check("inspect", "--json", self.image, reads=[self.image])
        self.check("inspect", "images/disk.bcow")

    def test_fsck_only_reads(self):
        for name in (self.image, "images/disk.bcow"):
            self.check("fsck", "--data", name, reads=[ANY_FILE, self.image])

    def test_convert_reads_and_makes_one_file(self):
        run("tar", "-C", "tree", "-cf", "layer.tar", ".")
        os.mkdir("made")
        beside = os.path.abspath("made/beside")
        for source, destination in [("layer.tar", "made/new.bcow"),
                                    ("qcow2:disk.qcow2", "made/disk.bcow"),
                                    ("images/disk.bcow", "raw:made/disk.raw")]:
            if source.startswith("qcow2"):
                bcow("convert", "images/disk.bcow", source)
            plain = destination.replace("made/", "")
            bcow("convert", source, plain)
            tries = [f"w{self.outside}", f"w{self.image}", f"w{beside}", f"r{ANY_FILE}"]
            bcow("convert", source, destination, "--sandbox", "require",
                 env=self.inside("write", *tries))
            self.assert_refused(allowed=[f"w{beside}", f"r{ANY_FILE}"])
            self.assertFalse(os.path.exists(self.outside))
            self.assertTrue(read_bytes(destination.partition(":")[2] or destination)
                            == read_bytes(plain.partition(":")[2] or plain))

    def test_a_disk_over_a_view_that_is_not_cached_is_read(self):
        bcow("create", "-b", self.image, "--fs", "ext4", "images/over.bcow")
        views = os.path.abspath("views/of/user")
        bcow("fsck", "images/over.bcow", "--sandbox", "require", env={"BCOW_VIEWS": views})
        self.assertFalse(os.path.exists(views))
        for command, *more in (["map"], ["convert", "raw:shown.raw"]):
            done = bcow(command, "images/over.bcow", *more, "--sandbox", "require",
                        env={"BCOW_VIEWS": views})
            self.assertNotIn(b"warning", done.err)
            view, = os.listdir(views)
            self.assertEqual(os.stat(f"{views}/{view}").st_mode & 0o777, 0o600)
            os.unlink(f"{views}/{view}")

    def test_a_limit_of_core_dumps_that_cannot_be_raised_is_kept(self):
        """As behind sudo in a container, or for a user to whom the administrator allows none."""
        user = UNPRIVILEGED if os.geteuid() == 0 else None
        listed = run("sh", "-c", "ulimit -Hc 0; exec \"$@\"", "sh", for_everyone(BCOW), "ls",
                     for_everyone(self.image), "--sandbox", "require", user=user)
        self.assertEqual(listed.out, bcow("ls", self.image).out)

    def test_a_sandbox_that_is_required_and_not_possible_is_an_error(self):
        for arguments, reason in [
                (("fsck", "--repair", self.image), "a repair writes"),
                (("convert", "dir:tree", "new.bcow"), "is a directory"),
                (("convert", self.image, "oci:new"), "is not a file"),
                (("mount", self.image, "tree", "--pool", "p"), "that of the pool")]:
            with self.subTest(arguments=arguments):
                refused = bcow(*arguments, "--sandbox", "require", check=False)
                self.assertNotEqual(refused.code, 0)
                self.assertIn("cannot enter the sandbox", refused.err.decode())
                self.assertIn(reason, refused.err.decode())


class Serve(Sandboxed):
    """`bcow serve`, in the thread that begins and in one of a connection."""

    def listed(self, pid):
        services = json.loads(bcow("ps", "--json").out)["services"]
        return next(service for service in services if service["pid"] == pid)

    def connected(self, server):
        import nbd  # From Debian's python3-libnbd.
        client = nbd.NBD()
        client.connect_uri(server.uri)
        return client

    def check(self, name, at, allowed, *options, sandbox="require"):
        """Serves the image or disk, and checks what it is for."""
        tries = [f"w{self.outside}", f"r{ANY_FILE}", *allowed]
        go = "go" if at == "pread64" else None
        env = {**os.environ, **self.inside(at, *tries, go=go)}
        if name != self.image:
            env["ESCAPE_CHANGES_ATTRIBUTES"] = "1"
        arguments = ("--socket", "s.sock", "--pid-file", "pid", "--sandbox", sandbox, *options)
        with served(name, *arguments, env=env) as server:
            pid = server.process.pid
            client = self.connected(server)
            if go:
                write_file(go, b"")
                client.pread(4096, 0)
                os.unlink(go)
            until(lambda: "end" in read_text("report"), "it has tried to escape")
            if sandbox == "off":
                self.assertEqual(self.listed(pid)["sandbox"], [])
                self.assert_not_refused()
                os.unlink(self.outside)
            else:
                self.assertEqual(self.listed(pid)["sandbox"], PARTS)
                self.assert_refused(allowed=allowed)
                self.assert_status(pid)
                self.assert_limits(pid, most_memory())
            if name != self.image:
                client.pwrite(b"x" * 5000, 100)
                client.flush()
                snapshot = f"at-{at}-{sandbox}"
                bcow("snapshot", name, snapshot)
                client.pwrite(b"y", 99)
                self.assertEqual(client.pread(3, 98), CONTENT[98:99] + b"yx")
                bcow("snapshot", "rm", name, snapshot)
                self.assertEqual(client.pread(3, 98), CONTENT[98:99] + b"yx")
            client.shutdown()
        self.assertEqual([name for name in ("s.sock", "pid") if os.path.exists(name)], [])

    def test_an_image(self):
        need("nbdsh")
        for at in ("write", "pread64"):
            self.check(self.image, at, [])
        self.check(self.image, "pread64", [], "--snapshot")

    def test_a_disk_gets_snapshots(self):
        need("nbdsh")
        beside = os.path.abspath("images/beside")
        for at in ("write", "pread64"):
            self.check("images/disk.bcow", at, [f"w{beside}"])
            self.assertTrue(os.path.exists(beside))

    def test_a_disk_over_a_remote_image_gets_snapshots(self):
        need("nbdsh")
        allowed = [f"w{os.path.abspath(name)}" for name in ("images/beside", "cache/beside")]
        with Server(os.path.abspath("images")) as server:
            bcow("create", "--insecure", "-b", server.url("base.bcow"), "images/over.bcow")
            self.check("images/over.bcow", "pread64", allowed, "--insecure", "--cache-dir", "cache",
                       "--backing-url", server.url(""))

    def test_without_a_sandbox_nothing_is_refused(self):
        need("nbdsh", root=True)
        for at in ("write", "pread64"):
            self.check("images/disk.bcow", at, [], sandbox="off")


class Mount(Sandboxed):
    """The process of a mount."""

    def setUp(self):
        super().setUp()
        need(fuse=True)
        os.mkdir("mnt")

    @contextlib.contextmanager
    def mounted(self, *options, image=None, user=None, sandbox="require", allowed=(), refused=(),
                capabilities=0, changes="none", before=lambda where: None):
        """A mount whose process has tried to escape. Ends with the caller's unmount."""
        where = os.path.abspath("mnt")
        tries = [f"w{self.outside}", f"r{ANY_FILE}", f"r{self.image}", *allowed, *refused]
        env = {**self.inside("pread64", *tries, go="go"), "ESCAPE_CHANGES_ATTRIBUTES": changes}
        image = image or self.image
        if user is not None:
            os.chown(where, user, user)
            image = image if "://" in image else for_everyone(image)
            where = for_everyone(where)
            env = {name: for_everyone(value) if "/" in value and ":" not in value else value
                   for name, value in env.items()}
        bcow("mount", image, where, "--sandbox", sandbox, *options, env=env, user=user)
        try:
            before(where)
            write_file("go", b"")
            read = run("cat", f"{where}/file", user=user)
            self.assertTrue(read.out == CONTENT)
            until(lambda: "end" in read_text("report"), "it has tried to escape")
            os.unlink("go")
            stats = json.loads(bcow("stats", "--json", where, user=user).out)
            if sandbox == "off":
                self.assertEqual(stats["sandbox"], [])
                self.assert_not_refused()
            else:
                self.assertEqual(stats["sandbox"], PARTS)
                self.assert_refused(allowed)
                pid = stats["process"]["pid"]
                self.assert_status(pid)
                descriptors = 1 << (20 if capabilities == OF_UPPERS else 16)
                self.assert_limits(pid, most_memory(), descriptors)
                have = re.search(r"CapEff:\s*(\w+)", read_text(f"/proc/{pid}/status"))[1]
                self.assertEqual(int(have, 16) & ~capabilities, 0)
            self.assertTrue(run("cat", f"{where}/other", user=user).out == CONTENT[::-1])
            yield where, stats["process"]["pid"]
        finally:
            if is_mounted(where):
                run("umount", "-l", where)
        until(lambda: not os.path.exists(f"/proc/{stats['process']['pid']}"), "the process ends")

    def assert_helper(self, pid):
        """A process of root that does for another one what that cannot."""
        kept = mask(CAPABILITIES + OF_PROGRAMS)
        self.assert_status(pid, CapEff=kept, CapPrm=kept, CapBnd=kept)

    def end_by_signal(self, where, pid):
        os.kill(pid, signal.SIGTERM)
        until(lambda: not is_mounted(where), "the signal unmounts")

    def test_it_is_confined_until_its_unmount(self):
        with self.mounted() as (where, _):
            self.assertIn("sandbox:     no-new-privileges", bcow("stats", where).out.decode())
            bcow("umount", where)
            self.assertFalse(is_mounted(where))

    def test_it_knows_itself_when_the_kernel_has_dropped_its_caches(self):
        need("mkfs.ext4", root=True)
        for options in ((), ("--upper", "upper"), ("--upper", "disk", "--driver", "kernel")):
            bcow("mount", self.image, "mnt", "--sandbox", "require", *options)
            try:
                before = json.loads(bcow("stats", "--json", "mnt").out)["process"]
                drop_caches("3")
                after = json.loads(bcow("stats", "--json", "mnt").out)["process"]
            finally:
                bcow("umount", "mnt")
            self.assertEqual(after["start_ticks"], before["start_ticks"])

    def test_a_signal_unmounts(self):
        with self.mounted() as (where, pid):
            self.end_by_signal(where, pid)

    def test_a_signal_to_all_its_processes_unmounts(self):
        """As a service manager sends it, or a terminal."""
        for sent in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            with self.mounted() as (where, pid):
                mounter = mounter_of(pid)
                os.kill(int(mounter), sent)
                self.end_by_signal(where, pid)
                until(lambda other=mounter: not os.path.exists(f"/proc/{other}"),
                      "its other process ends too")

    def test_a_mount_in_the_foreground_is_in_it(self):
        where = os.path.abspath("mnt")
        process = subprocess.Popen([BCOW, "mount", self.image, where, "--foreground", "--sandbox",
                                    "require"], start_new_session=True, stderr=subprocess.DEVNULL)
        try:
            until(lambda: is_mounted(where) and bcow("stats", where, check=False).code == 0,
                  "the mount")
            self.assertEqual(json.loads(bcow("stats", "--json", where).out)["sandbox"], PARTS)
            mounter = mounter_of(process.pid)
        finally:
            os.killpg(process.pid, signal.SIGINT)
            self.assertEqual(process.wait(60), 0)
        self.assertFalse(is_mounted(where))
        until(lambda: not os.path.exists(f"/proc/{mounter}"), "its other process ends too")

    def test_a_signal_detaches_a_mount_in_use(self):
        with self.mounted() as (where, pid), open(f"{where}/file", "rb") as file:
            self.end_by_signal(where, pid)
            self.assertTrue(file.read() == CONTENT)

    def test_an_ordinary_user_has_it_too(self):
        need("fusermount3", root=True)
        for end in (self.end_by_signal, lambda where, _: bcow("umount", where, user=UNPRIVILEGED)):
            with self.mounted(user=UNPRIVILEGED) as (where, pid):
                services = json.loads(bcow("ps", "--json", user=UNPRIVILEGED).out)["services"]
                self.assertIn(pid, [service["pid"] for service in services])
                end(where, pid)
                self.assertFalse(is_mounted(where))

    def test_its_log_and_its_trace_are_written(self):
        os.mkdir("log")
        os.mkdir("trace")
        allowed = [f"w{os.path.abspath('log/beside')}", f"w{os.path.abspath('trace/beside')}"]
        options = ("--log-file", "log/log", "--record", "trace/trace", "--metrics",
                   "unix:metrics.sock")
        with self.mounted(*options, allowed=allowed, capabilities=1 << 1) as (where, pid), \
                open(f"{where}/file", "rb"):
            self.assertIn("bcow_", metrics("metrics.sock"))
            self.assertEqual(stat.S_IMODE(os.stat("metrics.sock").st_mode), 0o600)
            os.unlink("log/log")
            self.end_by_signal(where, pid)
            until(lambda: os.path.exists("log/log"), "the log continues in a new file")
        self.assertIn("is in use; detached", read_text("log/log"))
        self.assertIn(b"file", read_bytes("trace/trace"))

    def test_a_killed_process_leaves_a_mount_that_can_be_removed(self):
        with self.mounted() as (where, pid):
            os.kill(pid, signal.SIGKILL)
            until(lambda: not os.path.exists(f"/proc/{pid}/fd/0"), "the process ends")
            with self.assertRaises(OSError) as raised:
                os.statvfs(where)
            # The second if the kernel is about to end the connection.
            self.assertIn(raised.exception.errno, (errno.ENOTCONN, errno.ECONNABORTED))
            self.assertTrue(is_mounted(where))
            bcow("umount", where)

    def test_without_a_sandbox_nothing_is_refused(self):
        need(root=True)
        for options in ((), ("--upper", "upper"), ("--upper", "disk", "--driver", "kernel")):
            with self.mounted(*options, sandbox="off") as (where, _):
                bcow("umount", where)
            os.unlink(self.outside)

    def in_upper(self):
        """A file that the process of a mount with an upper can make."""
        return f"w{os.path.abspath('upper/.bcow/beside')}"

    def change(self, where, user=None):
        """Changes of each kind."""
        script = """set -e; cd "$1"
            echo new > new; mkdir -p d/e; mv new d/e/new; ln d/e/new link; ln -s d symlink
            mkfifo d/pipe; chmod 4711 d/e/new; touch -d @77 link; setfattr -n user.x -v y d || true
            echo end >> file; truncate -s 7777 other; rm -f symlink; cp file copy; sync file
            test $(id -u) != 0 || {
                chown 7:8 copy; mknod d/null c 1 3; setfattr -n trusted.x -v y d/null; rm d/null; }
            mv d moved; rm moved/pipe; test ! -e d"""
        run("sh", "-c", script, "sh", where, user=user)

    def assert_changed(self, where, user=None):
        self.assertEqual(run("cat", f"{where}/moved/e/new", user=user).out, b"new\n")
        self.assertTrue(run("cat", f"{where}/copy", user=user).out == CONTENT + b"end\n")
        self.assertTrue(run("cat", f"{where}/other", user=user).out == CONTENT[::-1][:7777])

    def test_an_upper_is_all_that_its_process_changes(self):
        need("setfattr")
        with self.mounted("--upper", "upper", allowed=[self.in_upper()], changes="all",
                          capabilities=OF_UPPERS) as (where, pid):
            os.unlink(self.in_upper()[1:])
            if os.geteuid() == 0:
                self.assert_helper(mounter_of(pid))
            self.change(where)
            bcow("snapshot", "upper", "one")
            write_file(f"{where}/copy", b"changed")
            bcow("commit", self.image, "--upper", "upper", "images/live.bcow")
            bcow("rollback", where, "one", "--keep", "two", "--restart")
            self.assert_changed(where)
            stats = json.loads(bcow("stats", "--json", where).out)
            self.assertEqual(stats["sandbox"], PARTS)
            bcow("umount", where)
        self.assertEqual(bcow("fsck", "upper", self.image).code, 0)
        self.assertEqual(bcow("cat", "images/live.bcow", "copy").out, b"changed")

    def test_an_ordinary_user_has_an_upper_in_it(self):
        need("fusermount3", "setfattr", root=True)
        for name in ("tree", "tree/file", "tree/other"):
            os.chown(name, UNPRIVILEGED, UNPRIVILEGED)
        bcow("convert", "dir:tree", "images/users.bcow")
        os.mkdir("upper")
        os.chown("upper", UNPRIVILEGED, UNPRIVILEGED)
        with self.mounted("--upper", for_everyone("upper"), image=os.path.abspath(
                "images/users.bcow"), changes="all", user=UNPRIVILEGED) as (where, pid):
            self.change(where, UNPRIVILEGED)
            bcow("snapshot", for_everyone("upper"), "one", user=UNPRIVILEGED)
            self.assert_changed(where, UNPRIVILEGED)
            self.end_by_signal(where, pid)
        self.assertEqual(bcow("fsck", "upper", "images/users.bcow").code, 0)

    def fetcher(self, pid):
        """The process that makes the connections of another one."""
        [fetcher] = named("bcow-fetcher", children(pid))
        return fetcher

    @contextlib.contextmanager
    def remote(self, *options, changes="open", **more):
        """A mount of an image on a server that asks for credentials, which its process does not
        get: those of another process are neither in a file nor in the memory that it can read."""
        write_file("keys", b"[default]\naws_access_key_id = A\naws_secret_access_key = S\n")

        def before(where):
            fetcher = self.fetcher(json.loads(bcow("stats", "--json", where).out)["process"]["pid"])
            for name in ("mem", "environ"):
                os.symlink(f"/proc/{fetcher}/{name}", f"of-fetcher-{name}")

        secrets = [f"r{os.path.abspath(name)}" for name in (
            "keys", "of-fetcher-mem", "of-fetcher-environ")]
        with Server(os.path.abspath("images")) as server, \
                self.mounted("--insecure", "--cache-dir", "cache", *options,
                             image=server.url("a.bcow"), before=before, changes=changes,
                             refused=secrets, **more) as (where, pid):
            fetcher = self.fetcher(pid)
            self.assert_status(fetcher, CapEff=mask([2]), CapPrm=mask([2]), CapBnd=mask([2]))
            self.assertEqual(os.readlink(f"/proc/{fetcher}/cwd"), "/")
            yield where, pid
        until(lambda: not os.path.exists(f"/proc/{fetcher}"), "its other process ends too")

    def test_a_remote_image_is_all_that_its_process_reads(self):
        need(root=True)
        beside = f"w{os.path.abspath('cache/beside')}"
        with self.remote(allowed=[beside], capabilities=1 << 1) as (where, _):
            bcow("umount", where)

    def test_a_remote_image_has_an_upper_in_it(self):
        need("setfattr", root=True)
        beside = f"w{os.path.abspath('cache/beside')}"
        with self.remote("--upper", "upper", allowed=[beside, self.in_upper()], changes="all",
                         capabilities=OF_UPPERS) as (where, pid):
            os.unlink(self.in_upper()[1:])
            self.change(where)
            bcow("snapshot", "upper", "one")
            self.assert_changed(where)
            self.end_by_signal(where, pid)
        self.assertEqual(bcow("fsck", "upper", self.image).code, 0)

    def test_a_remote_image_with_the_kernel_driver_is_in_it(self):
        need("mkfs.ext4", root=True)
        beside = f"w{os.path.abspath('cache/beside')}"
        with self.remote("--driver", "kernel", "--upper", "upper",
                         allowed=[beside, self.in_upper()], capabilities=OF_DISKS) as (where, pid):
            os.unlink(self.in_upper()[1:])
            self.change(where)
            bcow("snapshot", where, "one")
            self.assert_changed(where)
            bcow("snapshot", "rm", where, "one")
            self.end_by_signal(where, pid)
        self.assertEqual(bcow("fsck", "upper", self.image).code, 0)

    def test_a_remote_mount_of_an_ordinary_user_is_in_it(self):
        need("fusermount3", root=True)
        os.mkdir("cache")
        os.chown("cache", UNPRIVILEGED, UNPRIVILEGED)
        cache = for_everyone("cache")
        with Server(os.path.abspath("images")) as server, \
                self.mounted("--insecure", "--cache-dir", cache, image=server.url("a.bcow"),
                             allowed=[f"w{cache}/beside"], changes="open",
                             user=UNPRIVILEGED) as (where, pid):
            self.fetcher(pid)
            bcow("umount", where, user=UNPRIVILEGED)

    def test_a_remote_mount_whose_other_process_is_killed_gives_errors_and_ends(self):
        with Server(os.path.abspath("images")) as server:
            where = os.path.abspath("mnt")
            bcow("mount", server.url("a.bcow"), where, "--insecure", "--no-cache", "--sandbox",
                 "require", "--complete", "never")
            pid = json.loads(bcow("stats", "--json", where).out)["process"]["pid"]
            os.kill(int(self.fetcher(pid)), signal.SIGKILL)
            drop_caches()
            refused = run("cat", f"{where}/file", f"{where}/other", check=False)
            self.assertIn(b"Input/output error", refused.err)
            bcow("umount", where)
            until(lambda: not os.path.exists(f"/proc/{pid}"), "the process ends")

    def test_a_disk_is_all_that_its_process_changes(self):
        """With the kernel driver."""
        need("mkfs.ext4", root=True)
        options = ("--driver", "kernel", "--upper", "upper", "--log-file", "logs/log")
        os.mkdir("logs")
        with self.mounted(*options, allowed=[self.in_upper(), f"w{os.path.abspath('logs/beside')}"],
                          refused=[f"w{os.path.abspath('upper/beside')}"], changes="open",
                          capabilities=OF_DISKS) as (where, pid):
            os.unlink(self.in_upper()[1:])
            self.assert_helper(mounter_of(pid))
            self.change(where)
            bcow("snapshot", "upper", "one")
            bcow("fork", f"{where}@one", "further")
            write_file(f"{where}/copy", b"changed")
            bcow("rollback", where, "one", "--keep", "two", "--restart")
            self.assert_changed(where)
            bcow("snapshot", where, "three")
            bcow("snapshot", "rm", where, "three")
            stats = json.loads(bcow("stats", "--json", where).out)
            self.assertEqual(stats["sandbox"], PARTS)
            self.end_by_signal(where, stats["process"]["pid"])
        self.assertEqual(bcow("fsck", "upper", self.image).code, 0)

    def test_an_image_with_the_kernel_driver_is_all_that_its_process_reads(self):
        need(root=True)
        # The kernel cannot read it by itself.
        with self.mounted("--driver", "kernel", "--verify", "merkle") as (where, pid):
            self.end_by_signal(where, pid)


# CAP_CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER, FSETID, SYS_PTRACE, SYS_ADMIN, SYS_RESOURCE,
# MKNOD, SETFCAP and MAC_ADMIN; for programs also SETGID, SETUID and NET_BIND_SERVICE.
CAPABILITIES = [0, 1, 2, 3, 4, 19, 21, 24, 27, 31, 33]
OF_PROGRAMS = [6, 7, 10]


def mask(capabilities):
    """These capabilities, as far as the tests have them, in the form of /proc/PID/status."""
    own = int(re.search(r"CapEff:\s*(\w+)", read_text("/proc/self/status"))[1], 16)
    return f"{sum(1 << number for number in capabilities) & own:016x}"


class Service(Sandboxed):
    """What opens files, mounts or starts programs as long as it lives."""

    def assert_only(self, kept):
        """Root: the process could do exactly this."""
        self.assertEqual(worked(self.results()), kept)


class Pool(Service):
    """The process with the mounts of a pool."""

    def setUp(self):
        super().setUp()
        need(root=True, fuse=True)
        self.user, self.pools = None, "pools"
        # Every user may change the files.
        for name in ("tree", "tree/file", "tree/other"):
            os.chmod(name, 0o777)
        bcow("convert", "--force", "dir:tree", "images/a.bcow")

    def bcow(self, *arguments, env=None, **options):
        place = for_everyone if self.user else os.path.abspath
        return bcow(*arguments, user=self.user,
                    env={"BCOW_POOLS": place(self.pools), **(env or {})}, **options)

    @contextlib.contextmanager
    def pool(self, sandbox="require"):
        """A pool with a mount that has an upper. Its process has tried to escape."""
        place = for_everyone if self.user else os.path.abspath
        for name in ("mnt", "other", "uppers"):
            os.mkdir(name)
            os.chown(name, self.user or 0, self.user or 0)
        if self.user:
            self.pools = "outside/pools"
            os.chown("outside", self.user, self.user)
        env = self.inside("pread64", f"r{ANY_FILE}", go="go")
        env = {name: place(value) if value.startswith("/") and ":" not in value else value
               for name, value in env.items()}
        self.bcow("pool", "start", "p", "--sandbox", sandbox, env=env)
        where = place("mnt")
        try:
            self.bcow("mount", "--pool", "p", place(self.image), where, "--upper",
                      place("uppers/u"))
            write_file("go", b"")
            self.assertTrue(run("cat", f"{where}/file", user=self.user).out == CONTENT)
            until(lambda: "end" in read_text("report"), "it has tried to escape")
            os.unlink("go")
            yield where, json.loads(self.bcow("pool", "stats", "--json", "p").out)
        finally:
            self.bcow("pool", "stop", "--force", "p")
        self.assertFalse(is_mounted(where))

    def work(self, where):
        """What the process is for."""
        run("sh", "-c", f"echo changed >> {where}/file && mv {where}/other {where}/moved",
            user=self.user)
        other = where.removesuffix("mnt") + "other"
        self.bcow("mount", "--pool", "p", where.removesuffix("mnt") + "images/a.bcow", other)
        self.assertTrue(run("cat", f"{other}/other", user=self.user).out == CONTENT[::-1])
        refused = self.bcow("mount", "--pool", "p", where.removesuffix("mnt") + "images/a.bcow",
                            other, check=False)
        self.assertIn(b"already mounted", refused.err)
        self.bcow("umount", other)
        self.assertFalse(is_mounted(other))
        self.assertTrue(run("cat", f"{where}/file", user=self.user).out == CONTENT + b"changed\n")

    def test_it_opens_and_mounts_and_no_more(self):
        with self.pool() as (where, stats):
            self.assertEqual(stats["sandbox"], PARTS_OF_SERVICES)
            self.assertIn("sandbox:     no-new-privileges, ",
                          self.bcow("pool", "stats", "p").out.decode())
            services = json.loads(self.bcow("ps", "--json").out)["services"]
            self.assertEqual([one["sandbox"] for one in services if one["pid"] == stats["pid"]],
                             [PARTS_OF_SERVICES])
            self.assertEqual(json.loads(self.bcow("stats", "--json", where).out)["sandbox"],
                             PARTS_OF_SERVICES)
            self.assert_only(POSSIBLE_IN_POOLS | {f"r{ANY_FILE}"})
            kept, of_helpers = mask(CAPABILITIES), mask(CAPABILITIES + OF_PROGRAMS)
            self.assert_status(stats["pid"], CapEff=kept, CapPrm=kept, CapBnd=of_helpers,
                               CapInh="0" * 16)
            self.work(where)
            # The mount has an upper, and shares its files: there is an opener.
            processes = {read_text(f"/proc/{one}/comm").strip(): one
                         for one in children(stats["pid"])}
            starter, fetcher = processes.pop("bcow-starter"), processes.pop("bcow-fetcher")
            self.assertEqual(processes, {})
            self.assert_status(fetcher, CapEff=mask([2]), CapPrm=mask([2]), CapBnd=of_helpers)
            self.assert_limits(fetcher, most_memory("0M"), 1 << 20)
            supervisor = re.search(r"PPid:\s*(\d+)", read_text(f"/proc/{stats['pid']}/status"))[1]
            for helper in (supervisor, starter):
                self.assert_status(helper, CapEff=of_helpers, CapPrm=of_helpers, CapBnd=of_helpers)
            [opener] = children(starter)
            self.assert_status(opener, CapEff="0" * 16, CapPrm="0" * 16, CapBnd=of_helpers)
            self.bcow("pool", "restart", "p")
            self.assertEqual(json.loads(self.bcow("stats", "--json", where).out)["sandbox"],
                             PARTS_OF_SERVICES)

    def test_an_ordinary_user_has_it_too(self):
        need("fusermount3")
        self.user = UNPRIVILEGED
        with self.pool() as (where, stats):
            self.assertEqual(stats["sandbox"], PARTS_OF_SERVICES)
            results = self.results()
            self.assertLessEqual(worked(results), POSSIBLE_IN_POOLS | {f"r{ANY_FILE}"})
            self.assert_status(stats["pid"], CapEff="0" * 16)
            self.work(where)

    def test_it_goes_on_when_the_process_with_the_connections_was_killed(self):
        def now():
            return json.loads(self.bcow("pool", "stats", "--json", "p").out)["pid"]

        with self.pool() as (where, stats):
            [fetcher] = named("bcow-fetcher", children(stats["pid"]))
            os.kill(int(fetcher), signal.SIGKILL)
            until(lambda: not os.path.exists(f"/proc/{stats['pid']}"), "the process ends too")
            self.work(where)
            self.assertNotEqual(now(), stats["pid"])
            with Server(os.path.abspath("images")) as server:
                further = where.removesuffix("mnt") + "other"
                self.bcow("mount", "--pool", "p", "--insecure", "--no-cache", server.url("a.bcow"),
                          further)
                self.assertTrue(run("cat", f"{further}/file").out == CONTENT)
                self.bcow("umount", further)

    def test_without_a_sandbox_nothing_is_refused(self):
        with self.pool(sandbox="off") as (where, stats):
            self.assertEqual(stats["sandbox"], [])
            self.assert_not_refused()
            self.work(where)


class Programs(Service):
    """bcow-snapshotter and bcow-layer-store, with the programs that they run."""

    def setUp(self):
        super().setUp()
        need(root=True, fuse=True)

    def check(self, name, *arguments, is_ready):
        program = os.path.join(os.path.dirname(BCOW), name)
        command = [program, "--bcow", BCOW, "--sandbox", "require", *arguments]
        # The programs write to standard output.
        env = {**os.environ, **self.inside("write", f"r{ANY_FILE}")}
        process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
        try:
            until(lambda: is_ready() or process.poll() is not None, "it is ready")
            self.assert_only(POSSIBLE_IN_SERVICES | LIMITS | {"fork", "execve", f"r{ANY_FILE}"})
            kept = mask(CAPABILITIES + OF_PROGRAMS)
            self.assert_status(process.pid, CapEff=kept, CapPrm=kept, CapBnd=kept)
        finally:
            process.terminate()
            self.assertEqual(process.wait(60), 0)
        refused = run(for_everyone(program), *command[1:], user=UNPRIVILEGED, check=False)
        self.assertNotEqual(refused.code, 0)
        self.assertIn(b"root", refused.err)

    def test_the_snapshotter(self):
        self.check("bcow-snapshotter", "--root", os.path.abspath("root"), "--socket",
                   os.path.abspath("sock"), is_ready=lambda: os.path.exists("sock"))

    def test_the_layer_store(self):
        os.mkdir("store")
        self.check("bcow-layer-store", "--root", os.path.abspath("root"), os.path.abspath("store"),
                   is_ready=lambda: is_mounted(os.path.abspath("store")))


class Attach(unittest.TestCase):
    """`bcow attach`, in a guest whose kernel has the nbd driver."""

    def test_attach_serves_its_device(self):
        uml.need()
        directory = tempfile.TemporaryDirectory(prefix="sandbox-", dir=WORK)
        self.addCleanup(directory.cleanup)
        escape = os.path.join(directory.name, "escape.so")
        run("gcc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", escape, ESCAPE)
        program, device = os.path.abspath(BCOW), "/dev/nbd5"
        variables = (f"ESCAPE_AT=pread64 ESCAPE_GO=/tmp/go ESCAPE_REPORT=/tmp/report "
                     f"ESCAPE_CHANGES_ATTRIBUTES=open ESCAPE_PATHS=w/tmp/outside:r{ANY_FILE}")

        def shell(script):
            return "command", {"arguments": ["sh", "-c", f"set -e; bcow={program}; {script}"]}

        *_, read, services, report, helper = uml.boot([
            shell("mkdir /tmp/disks; $bcow create -s 8M /tmp/disks/disk.bcow"),
            shell(f'LD_PRELOAD="$LD_PRELOAD:{escape}" {variables} '
                  f"$bcow attach /tmp/disks/disk.bcow {device}"),
            shell(f"yes | dd of={device} bs=1M count=4 oflag=direct iflag=fullblock status=none; "
                  f"$bcow snapshot /tmp/disks/disk.bcow one 2> /tmp/taken; > /tmp/go; "
                  f"dd if={device} bs=1M count=4 iflag=direct status=none | uniq -c"),
            shell("$bcow ps --json"),
            shell("while ! grep -q end /tmp/report; do sleep 0.1; done; cat /tmp/report"),
            # The process that detaches does so at a signal to the other one.
            shell(f"helper=$(pgrep -x bcow-detach); grep -E 'NoNewPrivs|Seccomp:|CapEff' "
                  f"/proc/$helper/status; kill $(ps -o ppid= -p $helper); "
                  f"while test -e /sys/block/{os.path.basename(device)}/pid; do sleep 0.1; done; "
                  f"$bcow fsck --data /tmp/disks/disk.bcow > /dev/null"),
        ])
        self.assertEqual(dict(line.split() for line in helper.splitlines()), {
            "NoNewPrivs:": "1", "Seccomp:": "2", "CapEff:": f"{1 << 21:016x}"})
        self.assertEqual(read.split(), [str((4 << 20) // 2), "y"])
        service, = json.loads(services)["services"]
        results = {name: int(number) for name, number in map(str.split, report.splitlines())}
        del results["end"]
        parts = set(PARTS)
        if "files" not in service["sandbox"]:
            # The kernel of the guest has no Landlock.
            parts.remove("files")
            for name in ("signal", "w/tmp/outside", f"r{ANY_FILE}"):
                self.assertEqual(results.pop(name), 0)
        self.assertEqual(set(service["sandbox"]), parts)
        self.assertEqual(worked(results), set())
