"""Shared parts of the end-to-end tests: the program under test, requirements, mounts, images."""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import glob
import json
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(TOP, "tests", "oracle"))
import tree  # noqa: E402

BCOW = os.path.abspath(os.environ.get("BCOW") or os.path.join(TOP, "target", "release", "bcow"))
READER = os.path.join(TOP, "spec", "reader.py")
WORK = os.path.abspath(os.environ.get("BCOW_E2E") or os.path.join(TOP, "target", "e2e"))
PEAK_BYTES = 256 << 20
# How often a test that counts on cached pages may begin if the kernel reclaims them.
CACHE_ATTEMPTS = 5
# The uid of a user who owns no files, for commands without privilege.
UNPRIVILEGED = 65534

os.makedirs(WORK, exist_ok=True)
os.environ["PATH"] += os.pathsep + os.pathsep.join(("/usr/local/sbin", "/usr/sbin", "/sbin"))


def missing(reason):
    """Reports a missing requirement: a visible skip, or an error in CI, which must have it."""
    if os.environ.get("CI"):
        raise AssertionError(f"CI lacks what this test needs: {reason}")
    raise unittest.SkipTest(reason)


def need(*tools, root=False, fuse=False):
    """Checks the requirements of a test besides bcow itself."""
    for tool in tools:
        if not shutil.which(tool):
            missing(f"{tool} is not installed")
    if root and os.geteuid() != 0:
        missing("not root")
    if fuse and not os.access("/dev/fuse", os.R_OK | os.W_OK):
        missing("/dev/fuse cannot be opened")


def kernel_at_least(*wanted):
    have = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
    return have >= wanted


def need_kernel(major, minor, what):
    if not kernel_at_least(major, minor):
        missing(f"Linux {major}.{minor}, which brought {what}")


def until(condition, what, seconds=60):
    """Waits for a condition; fails after `seconds`. `what` is a text or makes one."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s: {what() if callable(what) else what}")
        time.sleep(0.01)


def named(name, processes):
    """Those of the processes that have this name."""
    return [pid for pid in processes if read_text(f"/proc/{pid}/comm") == f"{name}\n"]


def stop(pid):
    """Stops a process by a signal, and waits until it runs no more: until one of its threads has
    taken the signal, which lasts on a busy machine, the others run on. A thread inside a system
    call that no signal ends stops when that is over."""
    os.kill(pid, signal.SIGSTOP)

    def runs_no_more():
        for thread in os.listdir(f"/proc/{pid}/task"):
            with (contextlib.suppress(FileNotFoundError, ProcessLookupError),
                  open(f"/proc/{pid}/task/{thread}/stat", "rb") as stat):
                if stat.read().rpartition(b") ")[2][:1] not in b"TDZX":
                    return False
        return True

    until(runs_no_more, f"process {pid} is stopped")


class Caches:
    """The caches of the kernel, which all suites share: a test that drops them waits for those that
    count on what is in them."""

    file, are_counted_on, own_drops = None, False, 0

    @classmethod
    def lock(cls, how):
        if cls.file is None:
            os.makedirs(os.path.join(TOP, "target"), exist_ok=True)
            cls.file = open(os.path.join(TOP, "target", "caches.lock"), "w")
        fcntl.flock(cls.file, how)

    @classmethod
    def losses(cls):
        """How often the kernel has dropped or reclaimed cached pages, except for the test's own
        drops."""
        lines = [line.split() for line in read_text("/proc/vmstat").splitlines()]
        counts = {name: int(count) for name, count in lines}
        reclaimed = sum(count for name, count in counts.items() if name.startswith("pgsteal_"))
        return reclaimed, counts["drop_pagecache"] + counts["drop_slab"] - cls.own_drops

    @classmethod
    def counted_on(cls, test):
        """A test that only itself drops caches during. It begins anew if it fails and the kernel
        has reclaimed pages, because memory is short or another program has asked for it."""
        @functools.wraps(test)
        def counting(self):
            for left in reversed(range(CACHE_ATTEMPTS)):
                cls.lock(fcntl.LOCK_SH)
                cls.are_counted_on = True
                before = cls.losses()
                try:
                    return test(self)
                except AssertionError:
                    if left == 0 or cls.losses() == before:
                        raise
                    print("again, because the kernel has reclaimed pages", flush=True)
                finally:
                    cls.are_counted_on = False
                    cls.lock(fcntl.LOCK_UN)
                self.doCleanups()
                self.setUp()
        return counting


def drop_caches(what="2"):
    """Makes the kernel forget the files that no program uses (2), and all content too (3)."""
    Caches.lock(fcntl.LOCK_EX)
    try:
        write_file("/proc/sys/vm/drop_caches", what)
        # The kernel counts both kinds.
        Caches.own_drops += int(what) % 2 + int(what) // 2
    finally:
        Caches.lock(fcntl.LOCK_SH if Caches.are_counted_on else fcntl.LOCK_UN)


def read_bytes(path):
    with open(path, "rb") as file:
        return file.read()


def read_text(path):
    with open(path) as file:
        return file.read()


def read_json(path):
    return json.loads(read_bytes(path))


def blob_path(layout, digest):
    return os.path.join(layout, "blobs", *digest.split(":"))


def blobs_of(layout):
    """The paths of the blobs of a layout, by the hexadecimal digest."""
    return {name: blob_path(layout, f"sha256:{name}")
            for name in os.listdir(os.path.join(layout, "blobs", "sha256"))}


def digest_in(layout, tag="tag"):
    """The digest of the manifest with this name in a layout."""
    entries = read_json(os.path.join(layout, "index.json"))["manifests"]
    (found,) = [entry["digest"] for entry in entries
                if entry.get("annotations", {}).get("org.opencontainers.image.ref.name") == tag]
    return found


def manifest_in(layout, tag="tag"):
    return read_json(blob_path(layout, digest_in(layout, tag)))


def write_file(path, data):
    """Writes text or bytes into a new or an empty file."""
    with open(path, "w" if isinstance(data, str) else "wb") as file:
        file.write(data)


def append_to(path, data):
    with open(path, "ab") as file:
        file.write(data)


def sparse_file(path, size):
    """Makes an empty file of this size."""
    with open(path, "wb") as file:
        file.truncate(size)


def overwrite(path, at, data, sync=False):
    """Writes bytes into an existing file, with one system call unless they are many."""
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def flip(path, *places):
    """Changes one bit of each of these bytes of a file."""
    with open(path, "r+b") as file:
        for at in places:
            file.seek(at)
            byte = file.read(1)[0] ^ 0x10
            file.seek(at)
            file.write(bytes([byte]))


class Result:
    """The result of a command: exit code, output, seconds, and peak memory."""

    def __init__(self, command, code, out, err, seconds, peak_bytes):
        self.command, self.code, self.out, self.err = command, code, out, err
        self.seconds, self.peak_bytes = seconds, peak_bytes

    def __str__(self):
        return (f"`{' '.join(self.command)}` ended with {self.code}\n"
                f"{self.out.decode(errors='replace')[-2000:]}"
                f"{self.err.decode(errors='replace')[-4000:]}")


def run(*command, stdin=None, timeout=600, check=True, env=None, user=None, cwd=None,
        file_bytes=None):
    """Runs a command and measures it. With `check`, an exit code other than 0 is a test failure.

    `file_bytes` limits the size of each file that the command writes, so that no test fills the
    disk.
    """
    # With such a function, Python forks. After vfork, the peak is at least that of this process.
    def limit():
        if file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        begin = time.monotonic()
        options = {} if user is None else {"user": user, "group": user, "extra_groups": []}
        process = subprocess.Popen(command, stdin=stdin or subprocess.DEVNULL, stdout=out,
                                   stderr=err, env={**os.environ, **(env or {})}, preexec_fn=limit,
                                   cwd=cwd, start_new_session=True, **options)
        usage = None
        while usage is None:
            pid, status, spent = os.wait4(process.pid, os.WNOHANG)
            if pid:
                usage = spent
            elif time.monotonic() - begin > timeout:
                os.killpg(process.pid, signal.SIGKILL)
                os.wait4(process.pid, 0)
                process.returncode = -9
                raise AssertionError(f"`{' '.join(command)}` did not end within {timeout} s")
            else:
                time.sleep(0.005)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        result = Result(command, process.returncode, out.read(), err.read(),
                        time.monotonic() - begin, usage.ru_maxrss * 1024)
    if check and result.code != 0:
        raise AssertionError(str(result))
    return result


def bcow(*arguments, user=None, **options):
    if not os.path.exists(BCOW):
        raise AssertionError(f"{BCOW} is not there: cargo build --release, or name it in $BCOW")
    return run(BCOW if user is None else for_everyone(BCOW), *arguments, user=user, **options)


def for_everyone(path):
    """A path of the same file that an ordinary user can reach, even if the checkout is in a private
    directory."""
    directory, name = os.path.split(os.path.abspath(path))
    return os.path.join(reachable(directory), name)


@functools.cache
def reachable(directory):
    parts = directory.split("/")
    if all(os.stat("/".join(parts[:n + 1]) or "/").st_mode & 0o001 for n in range(len(parts))):
        return directory
    where = tempfile.mkdtemp(prefix="bcow-", dir="/var/tmp")
    os.chmod(where, 0o755)
    run("mount", "--bind", directory, where)
    atexit.register(lambda: (subprocess.run(["umount", where]), os.rmdir(where)))
    return where


def children(pid):
    """The processes that a process has started."""
    found = []
    for task in glob.glob(f"/proc/{pid}/task/*/children"):
        # A thread may have ended.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += read_text(task).split()
    return found


def mounter_of(pid):
    """The process that mounts and unmounts for that of a mount: a copy of the same command."""
    command = read_text(f"/proc/{pid}/cmdline")
    mounters = []
    for path in glob.glob("/proc/[0-9]*"):
        # A process may have ended.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if (read_text(f"{path}/comm") == "bcow-mounter\n"
                    and read_text(f"{path}/cmdline") == command):
                mounters.append(os.path.basename(path))
    [mounter] = mounters
    return mounter


def is_mounted(where):
    """Reads the kernel's table: even root cannot stat another user's FUSE mount."""
    with open("/proc/self/mountinfo", "rb") as table:
        places = [line.split()[4] for line in table]
    escaped = "".join(f"\\{ord(c):03o}" if c in " \t\n\\" else c for c in os.path.abspath(where))
    return os.fsencode(escaped) in places


def set_environment(case, **variables):
    """Sets variables of the environment for the tests of a class."""
    case.enterClassContext(unittest.mock.patch.dict(os.environ, variables))


def skopeo_copy(source, destination, auth=None, *options):
    """Copies an image, also from and to servers without TLS."""
    return run("skopeo", "--insecure-policy", "copy", *options, "--src-tls-verify=false",
               "--dest-tls-verify=false", *(("--authfile", auth) if auth else ()), source,
               destination)


@contextlib.contextmanager
def mounted(image, *options, layers=(), user=None):
    """A bcow mount for the length of a with block."""
    where = tempfile.mkdtemp(prefix="mnt-", dir=WORK)
    if user is not None:
        os.chown(where, user, user)
        image, where = for_everyone(image), for_everyone(where)
    bcow("mount", image, *layers, where, *options, user=user, timeout=60)
    try:
        if not is_mounted(where):
            raise AssertionError("bcow mount returned, and nothing is mounted")
        yield where
        bcow("umount", where, user=user, timeout=60)
        if is_mounted(where):
            raise AssertionError("bcow umount returned, and it is still mounted")
    finally:
        if is_mounted(where):
            subprocess.run(["umount", "-l", where])
        os.rmdir(where)


@contextlib.contextmanager
def kernel_mounted(image, how, options=""):
    """A kernel mount of an EROFS image: `file` by mount(2) on the file itself, `loop` through a
    loop device.

    mount(8) would make a loop device silently, so the file-backed mount calls the kernel directly.
    """
    where = tempfile.mkdtemp(prefix="mnt-", dir=WORK)
    try:
        if how == "loop":
            run("mount", "-t", "erofs", "-o", "ro,loop", image, where)
        else:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.mount(os.fsencode(image), os.fsencode(where), b"erofs", ctypes.c_ulong(1),
                          os.fsencode(options)) != 0:
                code = ctypes.get_errno()
                raise AssertionError(f"mount(2) of {image} as erofs: {os.strerror(code)}")
        yield where
    finally:
        if is_mounted(where):
            run("umount", where)
        os.rmdir(where)


def assert_same_tree(test, first, second, **rules):
    """Fails with the first differences of two trees (dumps, or directories)."""
    a, b = (side if isinstance(side, dict) else tree.dump(side) for side in (first, second))
    found = list(tree.differences(a, b, **rules))
    if found:
        test.fail(f"{len(found)} differences between {len(a)} and {len(b)} entries:\n" +
                  "\n".join(found[:30]))


def assert_second_reader_agrees(test, name, path, *options):
    """Fails unless the second reader extracts the address space of the file `path` as bcow exports
    it from the image `name`."""
    with tempfile.TemporaryDirectory(prefix="raw-", dir=WORK) as directory:
        ours, theirs = (os.path.join(directory, raw) for raw in ("ours", "theirs"))
        bcow("export", name, "--to", "raw", "-o", ours)
        run(os.environ.get("BCOW_PYTHON", sys.executable), READER, "extract", path, theirs,
            *options)
        compared = run("cmp", ours, theirs, check=False)
        test.assertEqual(compared.code, 0, str(compared))


def assert_refused(test, result, *mention, code=1):
    """Fails unless a command ended with this code and one error, which matches all these regular
    expressions."""
    message = result.err.decode(errors="replace")
    test.assertEqual(result.code, code, str(result))
    test.assertNotIn("panicked", message)
    test.assertEqual(len(re.findall(r"^error:", message, re.MULTILINE)), 1, message)
    for pattern in mention:
        test.assertRegex(message, pattern)


@functools.cache
def image(name):
    """The real or the small image as (layout directory, tag); the first use makes it."""
    need("debootstrap", "chroot", "tar", root=True)
    maker = os.path.join(TOP, "tests", "images", "make-real-image")
    done = subprocess.run([sys.executable, maker] + (["--small"] if name == "small" else []),
                          stdout=subprocess.PIPE)
    if done.returncode:
        raise AssertionError(f"make-real-image ended with {done.returncode}")
    directory, tag = done.stdout.decode().strip()[len("oci:"):].rsplit(":", 1)
    return directory, tag


@functools.cache
def shared(name):
    """A directory that the suites of one run share, in $BCOW_TREES; without that, it stays until
    the tests end."""
    trees = os.environ.get("BCOW_TREES")
    if not trees:
        trees = tempfile.mkdtemp(prefix="trees-", dir=WORK)
        atexit.register(shutil.rmtree, trees, ignore_errors=True)
    directory = os.path.join(trees, name)
    os.makedirs(directory, exist_ok=True)
    return directory


@contextlib.contextmanager
def made_once(done):
    """Lets one process make the files beside `done`. Yields the path to which it writes `done` when
    they are complete, or None if they are."""
    with open(done + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(done):
            yield None
            return
        yield done + ".partial"
        os.rename(done + ".partial", done)


@functools.cache
def unpacked(name):
    """The tree that umoci unpacks from the image, and its dump."""
    need("umoci")
    directory, tag = image(name)
    bundle = os.path.join(shared(name), "umoci")
    dump = os.path.join(shared(name), "umoci.json")
    with made_once(dump) as partial:
        if partial:
            shutil.rmtree(bundle, ignore_errors=True)
            run("umoci", "unpack", "--image", f"{directory}:{tag}", bundle)
            dumped = run(sys.executable, tree.__file__, "dump", os.path.join(bundle, "rootfs"))
            write_file(partial, dumped.out)
    return os.path.join(bundle, "rootfs"), tree.load(dump)


@functools.cache
def converted(name, form="file"):
    """What `bcow convert` makes of the image without options: one file, or the tag `tag` of a
    layout (`form="layout"`); and the peak memory of the conversion. Tests only read it."""
    made, peak = (os.path.join(shared(name), f"{form}.{end}") for end in ("bcow", "peak"))
    with made_once(peak) as partial:
        if partial:
            shutil.rmtree(made, ignore_errors=True)
            to = made if form == "file" else f"oci:{made}:tag"
            result = bcow("convert", "oci:" + ":".join(image(name)), to)
            write_file(partial, str(result.peak_bytes))
    return made, int(read_text(peak))


class Scratch(unittest.TestCase):
    """The base of test cases with a directory for the class, which is removed afterwards."""

    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.mkdtemp(prefix=f"{cls.__name__.lower()}-", dir=WORK)
        cls.addClassCleanup(shutil.rmtree, cls.directory, ignore_errors=True)
        os.chmod(cls.directory, 0o755)

    @classmethod
    def use_image(cls, name):
        """Sets the source of the real or the small image, and the tree that umoci unpacks."""
        cls.source = "oci:" + ":".join(image(name))
        cls.rootfs, cls.reference = unpacked(name)

    @classmethod
    def path(cls, name, data=None):
        """A path in the directory; with `data`, a new file."""
        path = os.path.join(cls.directory, name)
        if data is not None:
            write_file(path, data)
        return path


class Daemon:
    """A running program of bcow whose log says when it serves."""

    process = None

    def launch(self, program, *arguments):
        name = os.path.basename(program)
        if not os.path.exists(program):
            raise AssertionError(f"{program} is not there: cargo build --bin {name}")
        with open(self.log, "ab") as log:
            begin = log.tell()
            self.process = subprocess.Popen([program, *arguments], stdin=subprocess.DEVNULL,
                                            stdout=log, stderr=log)

        def is_serving():
            if self.process.poll() is not None:
                raise AssertionError(f"it ended: {self.output(begin)}")
            return "serving at" in self.output(begin)
        until(is_serving, f"{name} serves")

    def output(self, begin=0):
        """Its messages, from this byte of the log."""
        with open(self.log, errors="replace") as log:
            log.seek(begin)
            return log.read()

    def end(self, how=signal.SIGTERM):
        """Ends the process; returns its status."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.process.wait(timeout=60)


class Served:
    """A running `bcow serve` and the URIs that it printed."""

    def __init__(self, *arguments, exports=1, wrapper=(), **options):
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen([*wrapper, BCOW, "serve", *arguments],
                                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                        stderr=self.log, **options)
        self.uris = [self.process.stdout.readline().decode().strip() for _ in range(exports)]
        if not all(self.uris):
            code = self.process.wait(timeout=60)
            raise AssertionError(
                f"bcow serve {' '.join(arguments)} ended with {code}: {self.output()}")
        self.uri = self.uris[0]

    @property
    def port(self):
        return int(re.search(r":(\d+)(?:/|$)", self.uri)[1])

    def output(self):
        # The server writes at the file's offset, which must not change.
        return os.pread(self.log.fileno(), 1 << 20, 0).decode(errors="replace")

    def peak_bytes(self):
        with open(f"/proc/{self.process.pid}/status") as status:
            return int(re.search(r"VmHWM:\s+(\d+) kB", status.read()).group(1)) * 1024

    def end(self, how=signal.SIGTERM):
        if self.process.poll() is None:
            self.process.send_signal(how)
        code = self.process.wait(timeout=60)
        self.process.stdout.close()
        output = self.output()
        self.log.close()
        if how == signal.SIGTERM and (code != 0 or "panicked" in output):
            raise AssertionError(f"bcow serve ended with {code}: {output}")


@contextlib.contextmanager
def served(*arguments, end=signal.SIGTERM, **options):
    """`bcow serve` for the length of a with block, ended by this signal."""
    server = Served(*arguments, **options)
    try:
        yield server
    except BaseException:
        server.end(signal.SIGKILL)
        raise
    server.end(end)
