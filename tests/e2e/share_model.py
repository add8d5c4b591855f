"""A program that reads, maps, runs and changes files of a mount of a pool that shares files, mounts
it again now and then, and compares each result with a model of its own.

    python3 share_model.py DIRECTORY TEMPLATE SEED MOUNT

DIRECTORY is the root of the mount, TEMPLATE the tree of its image. MOUNT is a JSON object: `image`,
`upper`, `options` (of `bcow mount`), and `lock`, a file that is locked while the process of the
pool must not be killed. The rest is as in `names_model.py`.

The rules for what a descriptor or a map shows are those of docs/semantics.md ("Files that mounts of
a pool share"): one from before the first open for writing shows the content of the image for ever,
any other one shows the content of now.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time

import names_model
from support import BCOW, is_mounted

PAGE = mmap.PAGESIZE
# The size from which files are shared.
SHARED_BYTES = 16 << 10
MAX_KEPT = 12
MAX_RUNNING = 2
# How long a command may fail because the process of the pool is killed again and again.
PATIENCE = 300
UNKNOWN = "it is not known whether all written data is in"
IN_USE = "cannot use the upper"
# The message of an unmount after which the upper can be in use for longer: the process has not
# noticed the unmount within seconds, or a mount namespace that another program of this machine has
# made still has the mount. The next mount waits for its end.
STILL_IN_USE = " continues: "
PUNCH_HOLE = 3
PR_SET_PDEATHSIG = 1
# Of the image. Copies of them only grow, so that they run.
PROGRAMS = ("echo", "sleep")


def end_with_parent():
    names_model.LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class File(names_model.File):
    """A file, and whether descriptors show the content of the image."""

    # The name of the program, for a copy of one: its content only grows.
    program = None
    # Of the image and large enough.
    is_shared = False
    was_opened_for_writing = False

    def write(self, offset, data):
        super().write(offset, data)
        self.change()

    def truncate(self, size):
        super().truncate(size)
        self.change()

    def change(self):
        self.is_shared = False
        self.was_opened_for_writing = True


class Kept:
    """An open descriptor, perhaps with a map."""

    def __init__(self, descriptor, file, path):
        self.descriptor, self.file, self.path = descriptor, file, path
        # What it can show: the content of the image, or (None) the content of now. A file that was
        # opened for writing and not changed is shared again once the kernel has forgotten it.
        self.views = [None]
        if file.is_shared:
            self.views = [bytes(file.content)] + ([None] if file.was_opened_for_writing else [])
        self.memory, self.is_writer, self.is_appending = None, False, False
        # The pages of a private map to which the program has written.
        self.own = {}

    def contents(self):
        return [self.file.content if view is None else view for view in self.views]

    def expect(self, found, start, end, how):
        """Compares bytes from `start` to `end` with each view that is possible."""
        views = [view for view, content in zip(self.views, self.contents())
                 if found == content[start:end]]
        if not views:
            content = self.contents()[0]
            first = next((at for at, (one, other) in enumerate(zip(found, content[start:end]))
                          if one != other), min(len(found), len(content[start:end])))
            raise AssertionError(
                f"{how} of {self.path} {self.kind()} shows {len(found)} bytes from {start} on "
                f"instead of {len(content[start:end])}, others from {start + first} on: "
                f"{bytes(found[first:first + 8]).hex()} instead of "
                f"{bytes(content[start + first:start + first + 8]).hex()}")
        self.views = views

    def kind(self):
        views = ["of now" if view is None else "of the image" for view in self.views]
        return f"(the content {' or '.join(views)})"

    def check(self, is_dropped):
        if is_dropped:
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        end = max(map(len, self.contents())) + 1
        self.expect(os.pread(self.descriptor, end, 0), 0, end, "a descriptor")
        status = os.fstat(self.descriptor)
        if (status.st_size, status.st_nlink) != (len(self.file.content), self.file.links):
            raise AssertionError(f"{self.path} has {status.st_size} bytes and {status.st_nlink} "
                                 f"links instead of {len(self.file.content)} and "
                                 f"{self.file.links}")
        if self.memory is not None:
            self.check_map(is_dropped)

    def mapped_bytes(self):
        # Behind the end of the file there is nothing.
        return min(len(self.memory), *map(len, self.contents()))

    def check_map(self, is_dropped):
        if is_dropped and not self.own:
            self.memory.madvise(mmap.MADV_DONTNEED)
        end = self.mapped_bytes()
        for page, content in self.own.items():
            if self.memory[page:page + PAGE] != content:
                raise AssertionError(f"a private map of {self.path} lost what was written at "
                                     f"{page}")
        found = bytearray(self.memory[:end])
        for page in self.own:
            found[page:page + PAGE] = self.views[0][page:page + PAGE]
        self.expect(found, 0, end, "a map")

    def close(self):
        if self.memory is not None:
            self.memory.close()
        os.close(self.descriptor)


class Model(names_model.Model):
    file_type = File

    def __init__(self, directory, template, seed, mount):
        self.template, self.mount = template, mount
        self.kept, self.running = [], []
        super().__init__(directory, template, seed)

    def take(self, template):
        super().take(template)
        for path, file in self.objects.items():
            if isinstance(file, File):
                file.is_shared = len(file.content) >= SHARED_BYTES
                name = os.path.basename(path)
                file.program = name if name in PROGRAMS else None

    def step(self):
        steps = [self.keep_reader] * 4 + [self.keep_writer] * 2 + [self.check_kept] * 3 + [
            self.write_kept, self.write_kept, self.write_map, self.write_map, self.end_kept,
            self.end_kept, self.open_only, self.open_again, self.punch, self.copy_kept, self.sync,
            self.read_direct, self.run_program, self.run_for_long, self.end_program,
            self.write_running]
        if self.random.random() < 0.012:
            return self.do(self.begin_again)
        if self.random.random() < 0.4:
            return super().step()
        return self.do(self.random.choice(steps))

    def do(self, step):
        try:
            super().do(step)
        except OSError as error:
            # A program that runs.
            if error.errno != errno.ETXTBSY or not error.filename:
                raise
            path = os.path.relpath(os.fsdecode(error.filename), self.directory)
            if not self.is_running(self.objects[path]):
                raise
        for _, file in self.nameless:
            file.was_opened_for_writing = True

    def is_running(self, file):
        return any(file is other for _, other in self.running)

    def write_to(self, descriptor, file, most=20_000):
        if file.program is None:
            return super().write_to(descriptor, file, most)
        data = self.random.randbytes(self.random.randrange(1, 5000))
        os.pwrite(descriptor, data, len(file.content))
        file.write(len(file.content), data)

    def truncate(self):
        if self.some_program() is None or self.random.random() < 0.9:
            self.truncate_to(*self.some_size())
        else:
            path = self.some_program()
            self.truncate_to(path, len(self.objects[path].content) + 5000)

    def some_size(self):
        path = self.random.choice([path for path in self.files()
                                   if self.objects[path].program is None])
        size = len(self.objects[path].content)
        return path, self.random.choice([size + 5000, max(0, size - 3000), size // 4096 * 4096, 0])

    def truncate_to(self, path, size):
        os.truncate(self.at(path), size)
        self.objects[path].truncate(size)

    # Descriptors and maps that stay open.

    def keep(self, path, flags):
        if len(self.kept) >= MAX_KEPT:
            self.end_kept()
        kept = Kept(os.open(self.at(path), flags), self.objects[path], path)
        self.kept.append(kept)
        return kept

    def keep_reader(self):
        kept = self.keep(self.some_file(), os.O_RDONLY)
        size = len(kept.file.content)
        dice = self.random.random()
        if not size or dice < 0.3:
            return
        if dice < 0.6:
            kept.memory = mmap.mmap(kept.descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ)
            return
        kept.memory = mmap.mmap(kept.descriptor, size, mmap.MAP_PRIVATE,
                                mmap.PROT_READ | mmap.PROT_WRITE)
        if kept.views == [None] or len(kept.views) > 1:
            return
        for _ in range(self.random.randrange(3)):
            page = self.random.randrange(size // PAGE) * PAGE
            content = bytearray(kept.views[0][page:page + PAGE])
            content[100:200] = kept.memory[page + 100:page + 200] = self.random.randbytes(100)
            kept.own[page] = content

    def keep_writer(self):
        flags = self.random.choice([os.O_RDWR, os.O_RDWR | os.O_APPEND])
        kept = self.keep(self.some_file(), flags)
        kept.file.was_opened_for_writing = True
        kept.views, kept.is_writer, kept.is_appending = [None], True, bool(flags & os.O_APPEND)
        if kept.file.content and self.random.random() < 0.6:
            kept.memory = mmap.mmap(kept.descriptor, len(kept.file.content), mmap.MAP_SHARED)

    def writers(self):
        return [kept for kept in self.kept if kept.is_writer]

    def check_kept(self):
        if self.kept:
            self.random.choice(self.kept).check(self.random.random() < 0.5)

    def write_kept(self):
        if not self.writers():
            return
        kept = self.random.choice(self.writers())
        if kept.file.program is None and not kept.is_appending:
            self.write_to(kept.descriptor, kept.file, 1 << 30)
        else:
            data = self.random.randbytes(self.random.randrange(1, 5000))
            os.lseek(kept.descriptor, 0, os.SEEK_END)
            os.write(kept.descriptor, data)
            kept.file.write(len(kept.file.content), data)
        kept.check(False)

    def write_map(self):
        writers = [kept for kept in self.writers()
                   if kept.memory is not None and kept.file.program is None]
        if not writers:
            return
        kept = self.random.choice(writers)
        end = kept.mapped_bytes()
        if not end:
            return
        start = self.random.randrange(end)
        data = self.random.randbytes(min(end - start, self.random.choice([1, 100, 9000])))
        kept.memory[start:start + len(data)] = data
        kept.file.write(start, data)
        if self.random.random() < 0.2:
            kept.memory.flush()
        kept.check(self.random.random() < 0.3)

    def end_kept(self):
        if self.kept:
            kept = self.kept.pop(self.random.randrange(len(self.kept)))
            kept.check(False)
            kept.close()

    def open_only(self):
        """Opens a file for writing, and does not write."""
        path = self.some_file()
        with open(self.at(path), "r+b"):
            self.objects[path].was_opened_for_writing = True

    def open_again(self):
        """Opens a descriptor once more."""
        if not self.kept:
            return
        kept = self.random.choice(self.kept)
        try:
            descriptor = os.open(f"/proc/self/fd/{kept.descriptor}", os.O_RDONLY)
        except OSError as error:
            if error.errno != errno.ESTALE or kept.views == [None] or (
                    not kept.file.was_opened_for_writing):
                raise
            return
        again = Kept(descriptor, kept.file, f"{kept.path}, opened again,")
        again.views = list(kept.views)
        again.check(True)
        again.close()

    def copy_kept(self):
        """Copies what a descriptor shows, in the kernel, into a new file."""
        if not self.kept or len(self.small_files()) >= names_model.MAX_FILES:
            return
        kept, path = self.random.choice(self.kept), self.new_path()
        size = max(map(len, kept.contents()))
        # The kernel copies up to the size that it knows.
        os.fstat(kept.descriptor)
        target = os.open(self.at(path), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
        try:
            done = 0
            while done < size and (copied := os.copy_file_range(kept.descriptor, target,
                                                                size - done, done)):
                done += copied
            found = os.pread(target, size + 1, 0)
        finally:
            os.close(target)
        # It ends where the file of now ends.
        size = min(size, len(kept.file.content))
        kept.expect(found[:size], 0, size, "a copy of a descriptor")
        self.objects[path] = file = self.file_type()
        file.write(0, found)

    def read_direct(self):
        path = self.some_file()
        content = self.objects[path].content
        descriptor = os.open(self.at(path), os.O_RDONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, max(PAGE, len(content) // PAGE * PAGE + PAGE)) as buffer:
                count = os.preadv(descriptor, [buffer], 0)
                if buffer[:count] != content[:count] or count != len(content):
                    raise AssertionError(f"{path} has other content without the page cache")
        finally:
            os.close(descriptor)

    def punch(self):
        path = self.some_file()
        file = self.objects[path]
        if file.program or not file.content:
            return
        start = self.random.randrange(len(file.content))
        length = min(self.random.choice([100, 5000, 40_000]), len(file.content) - start)
        with open(self.at(path), "r+b") as target:
            file.was_opened_for_writing = True
            result = names_model.LIBC.fallocate(target.fileno(), PUNCH_HOLE,
                                                ctypes.c_long(start), ctypes.c_long(length))
            if result != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), self.at(path))
        file.write(start, bytes(length))

    def sync(self):
        path = self.random.choice(self.files() + self.directories)
        self.sync_path(path)

    def sync_path(self, path):
        descriptor = os.open(self.at(path), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    # Programs.

    def some_program(self, name=None):
        programs = [path for path in self.files()
                    if self.objects[path].program in ([name] if name else PROGRAMS)]
        return self.random.choice(programs) if programs else None

    def run_program(self):
        path = self.some_program("echo")
        if path and not any(kept.file is self.objects[path] for kept in self.writers()) and not any(
                file is self.objects[path] for _, file in self.nameless):
            found = subprocess.run([self.at(path), path], capture_output=True, check=True).stdout
            if found != os.fsencode(path) + b"\n":
                raise AssertionError(f"{path} printed {found!r}")

    def run_for_long(self):
        path = self.some_program("sleep")
        if path is None or len(self.running) >= MAX_RUNNING:
            return
        is_written = any(kept.file is self.objects[path] for kept in self.writers())
        try:
            process = subprocess.Popen(
                [self.at(path), "1000"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, preexec_fn=end_with_parent)
        except OSError as error:
            if error.errno == errno.ETXTBSY and is_written:
                return
            raise
        self.running.append((process, self.objects[path]))
        if is_written:
            raise AssertionError(f"{path} runs although it is open for writing")

    def end_program(self):
        if self.running:
            process, _ = self.running.pop(self.random.randrange(len(self.running)))
            if process.poll() is not None:
                raise AssertionError(f"a program has ended with {process.returncode}")
            process.kill()
            process.wait()

    def write_running(self):
        """A program that runs cannot be written to."""
        paths = [path for path in self.files() if self.is_running(self.objects[path])]
        if not paths:
            return
        path = self.random.choice(paths)
        with contextlib.suppress(OSError):
            if self.random.random() < 0.5:
                os.close(os.open(self.at(path), os.O_RDWR))
            else:
                os.truncate(self.at(path), 5)
            raise AssertionError(f"{path} was written to while it runs")

    # The mount.

    def begin_again(self):
        """Unmounts, and mounts the same upper or a new one."""
        while self.running:
            self.end_program()
        while self.kept:
            self.end_kept()
        while self.nameless:
            os.close(self.nameless.pop()[0])
        is_synchronized = self.random.random() < 0.5
        if is_synchronized:
            # So the process of the pool may be killed during the unmount.
            for path in self.files() + self.directories:
                self.sync_path(path)
        with open(self.mount["lock"]) as lock:
            if not is_synchronized:
                fcntl.flock(lock, fcntl.LOCK_SH)
            is_certain = self.command("umount", self.directory)
        if self.random.random() < 0.5 and is_certain:
            self.command("fsck", self.mount["upper"])
            shutil.rmtree(self.mount["upper"])
            self.objects, self.directories = {}, [""]
            self.take(self.template)
            self.large = self.objects["large"]
        for file in self.objects.values():
            if isinstance(file, File) and file.is_shared:
                file.was_opened_for_writing = False
        self.command("mount", self.mount["image"], self.directory, "--upper", self.mount["upper"],
                     *self.mount["options"])

    def command(self, name, *arguments):
        """Runs a command of bcow, and repeats it if it fails because the process of the pool is
        killed. Returns whether its effect is certain."""
        end, was_killed = time.monotonic() + PATIENCE, False
        while True:
            before = self.pool()
            done = subprocess.run([BCOW, name, *arguments], capture_output=True, text=True)
            if done.returncode == 0:
                return STILL_IN_USE not in done.stderr
            print(f"{name}: {done.stderr.strip()}", flush=True)
            if name == "mount" and was_killed and is_mounted(self.directory):
                # The process was killed before it answered, and the next one has the mount.
                return False
            if name == "umount" and not is_mounted(self.directory) and (
                    was_killed or UNKNOWN in done.stderr):
                # The process was killed, or did not answer within seconds. The next mount waits for
                # its end, and must show everything.
                return False
            time.sleep(1)
            was_killed = was_killed or self.pool() != before
            may_fail = was_killed or name == "mount" and IN_USE in done.stderr
            if not may_fail or time.monotonic() > end:
                raise AssertionError(f"bcow {name} {' '.join(arguments)}: {done.stderr}")

    def pool(self):
        done = subprocess.run([BCOW, "pool", "list", "--json"], capture_output=True)
        return [pool["pid"] for pool in json.loads(done.stdout)["pools"]]

    def check(self):
        super().check()
        for kept in self.kept:
            kept.check(self.random.random() < 0.5)
        for process, _ in self.running:
            if process.poll() is not None:
                raise AssertionError(f"a program has ended with {process.returncode}")


if __name__ == "__main__":
    directory, template, seed, mount = sys.argv[1:]
    names_model.run(Model(directory, template, int(seed), json.loads(mount)))
