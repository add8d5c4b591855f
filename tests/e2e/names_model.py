"""A program that changes files of a mount at random, and compares them with a model of its own.

    python3 names_model.py DIRECTORY TEMPLATE SEED

DIRECTORY belongs to this program. At first it is a copy of TEMPLATE, which has a file "large". The
program goes on until its standard input ends. It prints a line for each
round, and the reason if a request fails or a file has other content than the model; the exit status
is then 1.
"""

import collections
import ctypes
import errno
import mmap
import os
import random
import select
import stat
import sys
import traceback

STEPS = 40
MAX_FILES = 20
RENAME_EXCHANGE = 2
RENAME_NOREPLACE = 1
AT_FDCWD = -100

LIBC = ctypes.CDLL(None, use_errno=True)


def rename_with(old, new, flags):
    if LIBC.renameat2(AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), old)


def describe(found, file):
    """The first ranges in which bytes differ from the content of a file, and what they are."""
    ranges, at = [], 0
    for at in range(0, max(len(found), len(file.content)), 512):
        piece = found[at:at + 512]
        if piece == file.content[at:at + 512]:
            continue
        kind = ("zeros" if not any(piece) else
                "the first content" if piece == file.original[at:at + 512] else "others")
        if ranges and ranges[-1][1:] == (at, kind):
            ranges[-1] = (ranges[-1][0], at + 512, kind)
        else:
            ranges.append((at, at + 512, kind))
    return ", ".join(f"{kind} from {start} to {end}" for start, end, kind in ranges[:9]) or "right"


class File:
    """A file: its content, and the attributes that were set."""

    def __init__(self, content=b""):
        self.original, self.content = bytes(content), bytearray(content)
        self.attributes = {}
        self.links = 1

    def write(self, offset, data):
        if len(self.content) < offset:
            self.content.extend(bytes(offset - len(self.content)))
        self.content[offset:offset + len(data)] = data

    def truncate(self, size):
        del self.content[size:]
        self.content.extend(bytes(size - len(self.content)))


class Model:
    file_type = File

    def __init__(self, directory, template, seed):
        self.directory = directory
        # The last steps, for a report.
        self.steps, self.history = 0, collections.deque(maxlen=20)
        self.random = random.Random(seed)
        # Path to File, to a set of names (a directory), or to a string (a symbolic link).
        self.objects = {}
        self.count = 0
        # Open files without a name: descriptor and File.
        self.nameless = []
        self.directories = [""]
        self.take(template)
        self.large = self.objects["large"]

    def take(self, template):
        """Reads the template."""
        files = {}
        for directory, directories, names in os.walk(template):
            # With a seed, the same steps on each host.
            directories.sort()
            below = os.path.relpath(directory, template)
            for name in directories + sorted(names):
                path = os.path.normpath(os.path.join(below, name))
                source = os.path.join(directory, name)
                found = os.lstat(source)
                if stat.S_ISLNK(found.st_mode):
                    self.objects[path] = os.readlink(source)
                elif stat.S_ISDIR(found.st_mode):
                    self.objects[path] = set()
                    self.directories.append(path)
                elif found.st_ino in files:
                    files[found.st_ino].links += 1
                    self.objects[path] = files[found.st_ino]
                else:
                    with open(source, "rb") as file:
                        files[found.st_ino] = self.objects[path] = self.file_type(file.read())

    def at(self, path):
        return os.path.join(self.directory, path)

    def new_path(self):
        self.count += 1
        long = "x" * 100 if self.random.random() < 0.2 else ""
        return os.path.join(self.random.choice(self.directories), f"n{self.count}{long}")

    def files(self):
        return [path for path, file in self.objects.items() if isinstance(file, File)]

    def some_file(self):
        return self.random.choice(self.files())

    def small_files(self):
        return [path for path in self.files() if path != "large"]

    def step(self):
        steps = [self.write, self.write, self.write_large, self.write_large, self.create, self.move,
                 self.exchange, self.remove, self.link, self.directory_step, self.symlink,
                 self.attribute, self.truncate, self.replace, self.list, self.write_nameless]
        self.do(self.random.choice(steps))

    def do(self, step):
        self.steps += 1
        self.history.append(step.__name__)
        step()

    def create(self):
        if len(self.small_files()) >= MAX_FILES:
            return self.remove()
        path = self.new_path()
        mode = self.random.choice([0o644, 0o600, 0o4755, 0o1666])
        os.umask(0)
        descriptor = os.open(self.at(path), os.O_CREAT | os.O_EXCL | os.O_RDWR, mode)
        try:
            found = stat.S_IMODE(os.fstat(descriptor).st_mode)
            if found != mode:
                raise AssertionError(f"{path} has mode {found:o} instead of {mode:o}")
            self.objects[path] = self.file_type()
            self.write_to(descriptor, self.objects[path])
        finally:
            os.close(descriptor)

    def write_to(self, descriptor, file, most=20_000):
        offset = self.random.randrange(max(1, min(len(file.content), most)))
        data = self.random.randbytes(self.random.randrange(1, 9_000))
        if os.pwrite(descriptor, data, offset) != len(data):
            raise AssertionError("short write")
        file.write(offset, data)
        if self.random.random() < 0.1:
            os.fsync(descriptor)

    def write(self):
        path = self.some_file()
        descriptor = os.open(self.at(path), os.O_RDWR)
        try:
            self.write_to(descriptor, self.objects[path])
        finally:
            os.close(descriptor)

    def write_large(self):
        descriptor = os.open(self.at("large"), os.O_RDWR)
        try:
            for _ in range(4):
                size = self.random.choice([1, 100, 4096, 5000, 70_000])
                offset = self.random.randrange(max(1, len(self.large.content) - size))
                if self.random.random() < 0.5:
                    offset -= offset % 4096
                data = self.random.randbytes(size)
                if os.pwrite(descriptor, data, offset) != size:
                    raise AssertionError("short write")
                self.large.write(offset, data)
            if self.random.random() < 0.1:
                os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def truncate(self):
        path = self.some_file()
        file = self.objects[path]
        size = len(file.content)
        size = self.random.choice([size + 5000, max(0, size - 3000), size // 4096 * 4096])
        os.truncate(self.at(path), size)
        file.truncate(size)

    def move(self):
        names = [path for path in self.objects if path != "large"]
        if not names:
            return
        path, new = self.random.choice(names), self.new_path()
        if isinstance(self.objects[path], set) and (new + "/").startswith(path + "/"):
            return
        rename_with(self.at(path), self.at(new), self.random.choice([0, RENAME_NOREPLACE]))
        self.moved(path, new)

    def moved(self, path, new):
        for old in [old for old in self.objects if old == path or old.startswith(path + "/")]:
            self.objects[new + old[len(path):]] = self.objects.pop(old)
        self.directories = [new + old[len(path):] if old == path or old.startswith(path + "/")
                            else old for old in self.directories]

    def exchange(self):
        files = self.small_files()
        if len(files) < 2:
            return
        one, other = self.random.sample(files, 2)
        rename_with(self.at(one), self.at(other), RENAME_EXCHANGE)
        objects = self.objects
        objects[one], objects[other] = objects[other], objects[one]

    def replace(self):
        """Renames a file over another one."""
        files = self.small_files()
        if len(files) < 2:
            return
        one, other = self.random.sample(files, 2)
        if self.objects[one] is self.objects[other]:
            return
        os.rename(self.at(one), self.at(other))
        self.objects[other].links -= 1
        self.objects[other] = self.objects.pop(one)

    def remove(self):
        files = self.small_files()
        if not files:
            return
        path = self.random.choice(files)
        file = self.objects[path]
        is_kept = len(self.nameless) < 3 and file.links == 1 and self.random.random() < 0.5
        descriptor = os.open(self.at(path), os.O_RDWR) if is_kept else None
        os.unlink(self.at(path))
        del self.objects[path]
        file.links -= 1
        if is_kept:
            self.nameless.append((descriptor, file))

    def write_nameless(self):
        if not self.nameless:
            return
        index = self.random.randrange(len(self.nameless))
        descriptor, file = self.nameless[index]
        self.write_to(descriptor, file)
        if self.random.random() < 0.2:
            self.check_descriptor(descriptor, file, "a file without a name")
            found = os.fstat(descriptor).st_nlink
            if found != 0:
                raise AssertionError(f"a file without a name has {found} links")
            os.close(descriptor)
            del self.nameless[index]

    def link(self):
        files = self.small_files()
        if not files or len(files) >= MAX_FILES:
            return
        path, new = self.random.choice(files), self.new_path()
        os.link(self.at(path), self.at(new))
        self.objects[new] = self.objects[path]
        self.objects[path].links += 1

    def directory_step(self):
        empty = [path for path in self.directories
                 if path and not any(other.startswith(path + "/") for other in self.objects)]
        if empty and self.random.random() < 0.5:
            path = self.random.choice(empty)
            os.rmdir(self.at(path))
            del self.objects[path]
            self.directories.remove(path)
        elif len(self.directories) < 7:
            path = self.new_path()
            os.mkdir(self.at(path), 0o750)
            self.objects[path] = set()
            self.directories.append(path)

    def symlink(self):
        links = [path for path, target in self.objects.items() if isinstance(target, str)]
        if len(links) > 3:
            path = self.random.choice(links)
            os.unlink(self.at(path))
            del self.objects[path]
            return
        path = self.new_path()
        os.symlink("to" + path, self.at(path))
        self.objects[path] = "to" + path

    def attribute(self):
        path = self.some_file()
        attributes = self.objects[path].attributes
        name = f"user.a{self.random.randrange(3)}"
        if name in attributes:
            if self.random.random() < 0.5:
                os.removexattr(self.at(path), name)
                del attributes[name]
                return
            value = self.random.randbytes(20)
            os.setxattr(self.at(path), name, value, os.XATTR_REPLACE)
        else:
            value = self.random.randbytes(20)
            os.setxattr(self.at(path), name, value, os.XATTR_CREATE)
        attributes[name] = value

    def list(self):
        """Reads a directory in pieces."""
        path = self.random.choice(self.directories)
        with os.scandir(self.at(path)) as entries:
            self.compare_names(path, [entry.name for entry in entries])

    def compare_names(self, path, found):
        prefix = path + "/" if path else ""
        names = sorted(other[len(prefix):] for other in self.objects
                       if other.startswith(prefix) and "/" not in other[len(prefix):])
        if sorted(found) != names:
            raise AssertionError(f"{path}: {sorted(found)} instead of {names}")

    def check_descriptor(self, descriptor, file, path):
        # The kernel's cache would hide what the process of the mount has lost.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        found = os.pread(descriptor, len(file.content) + 1, 0)
        if found != file.content:
            raise AssertionError(f"{path} has {len(found)} bytes instead of "
                                 f"{len(file.content)}: {describe(found, file)}; "
                                 f"{self.read_again(descriptor, file)}")

    def read_again(self, descriptor, file):
        """Reads without the page cache, and says what is there."""
        try:
            again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            return f"cannot open it again: {error}"
        try:
            with mmap.mmap(-1, len(file.content) // 4096 * 4096 + 4096) as buffer:
                found = buffer[:os.preadv(again, [buffer], 0)]
        except OSError as error:
            return f"cannot read it again: {error}"
        finally:
            os.close(again)
        return f"without the page cache: {describe(found, file)}"

    def check(self):
        for path, file in self.objects.items():
            if isinstance(file, str):
                if os.readlink(self.at(path)) != file:
                    raise AssertionError(f"{path} has another target")
            elif isinstance(file, set):
                self.compare_names(path, os.listdir(self.at(path)))
            else:
                self.check_file(path, file)
        self.compare_names("", os.listdir(self.directory))
        for descriptor, file in self.nameless:
            self.check_descriptor(descriptor, file, "a file without a name")

    def check_file(self, path, file):
        descriptor = os.open(self.at(path), os.O_RDONLY)
        try:
            self.check_descriptor(descriptor, file, path)
            links = os.fstat(descriptor).st_nlink
            if links != file.links:
                raise AssertionError(f"{path} has {links} links instead of {file.links}")
            for name in os.listxattr(descriptor):
                if name.startswith("user.a") and name not in file.attributes:
                    raise AssertionError(f"{path} has the attribute {name}")
            for name, value in file.attributes.items():
                if os.getxattr(descriptor, name) != value:
                    raise AssertionError(f"{path} has another value of {name}")
        finally:
            os.close(descriptor)


def run(model):
    """Makes steps until the standard input ends."""
    try:
        rounds = 0
        while not select.select([sys.stdin], [], [], 0)[0]:
            for _ in range(STEPS):
                model.step()
            model.check()
            rounds += 1
            print(rounds, flush=True)
        model.check()
    except (OSError, AssertionError) as failure:
        if isinstance(failure, OSError):
            failure = f"{errno.errorcode.get(failure.errno)}: {failure}"
        traceback.print_exc()
        print(f"failed at step {model.steps} ({', '.join(model.history)}): {failure}", flush=True)
        sys.exit(1)


if __name__ == "__main__":
    directory, template, seed = sys.argv[1:]
    run(Model(directory, template, int(seed)))
