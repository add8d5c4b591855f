"""The process of a writable mount is killed at random times while programs write. The next mount
has all synced data, no block with parts of two writes, and every name whose call returned.

A power cut is simulated too: data that the host's file system had not yet written to its disk is
lost as well.

A round mounts, lets writers work for a moment, kills, mounts again and checks everything; the next
round continues from there. After a few rounds `bcow fsck` checks the upper, and a new upper begins.
BCOW_CRASHES=2000 sets the number of kills for each kind and policy; the number of power cuts is a
quarter of it. BCOW_SEED=N selects other rounds.
"""

import contextlib
import errno
import mmap
import os
import pickle
import random
import tempfile
import time
import traceback

import subjects
import support
import syscalls
from promises import promise
from support import read_bytes, run, sparse_file, write_file
from union import LowerCase

ROUNDS = int(os.environ.get("BCOW_CRASHES") or 10)
SEED = int(os.environ.get("BCOW_SEED") or 1)
KINDS = ("bcow", "bcow+sync=batch=8", "bcow+sync=volatile")
DURABLE = tuple(kind for kind in KINDS if "volatile" not in kind)
# Rounds of one upper.
LIFE = 5
SIZES = (70_001, 300_000, 131_072, 1 << 20, 600_017, 2_000_000)
MOST_BYTES = 3 << 20
PAGE = 4096
WRITERS = 3
# The temporary name of a file before it replaces another.
SAVING = ".saving"
FOLDERS = 3


def plant(top):
    for number, size in enumerate(SIZES):
        write_file(os.path.join(top, f"data-{number}"), subjects.content(f"data-{number}", size))
    for number in range(FOLDERS):
        folder = os.path.join(top, f"folder-{number}")
        os.makedirs(os.path.join(folder, "below"))
        for name in ("one", "two", "below/three"):
            with open(os.path.join(folder, name), "wb") as file:
                file.write(subjects.content(name, 100_000 if name == "two" else 300))


class Wrong(Exception):
    """Data or names were lost or invented."""


def apply(content, kind, offset, what):
    if kind == "size":
        del content[offset:]
        content.extend(bytes(offset - len(content)))
    else:
        content.extend(bytes(max(0, offset - len(content))))
        content[offset:offset + len(what)] = what


class File:
    """The history of a file: its content at the start, the operations since then, and how many of
    them were synced."""

    def __init__(self, content):
        self.content, self.events, self.synced = content, [], 0
        self.now = bytearray(content)

    def did(self, kind, offset, what):
        """Records the next operation: `size` sets the size, `data` writes."""
        self.events.append((kind, offset, what))
        apply(self.now, kind, offset, what)

    def check(self, have, name, synchronizes=True):
        """Fails unless every byte, and the size, is the synced one or that of a later operation."""
        done = self.synced if synchronizes else 0
        base, later = bytearray(self.content), self.events[done:]
        for event in self.events[:done]:
            apply(base, *event)
        size, sizes, zeroed = len(base), {len(base)}, []
        for kind, offset, what in later:
            end = offset + len(what)
            if kind == "size":
                zeroed.append(offset)
                size = offset
            else:
                size = max(size, end)
            sizes.add(size)
            # Any subset of them may be missing.
            sizes.add(max(len(base), end) if kind != "size" else offset)
        most = max(sizes)
        if len(have) not in sizes and not (later and min(sizes) <= len(have) <= most):
            raise Wrong(f"{name}: {len(have)} bytes, expected one of {sorted(sizes)[:20]}")
        base.extend(bytes(max(0, len(have) - len(base))))
        if base[:len(have)] == have:
            return
        for start in range(0, len(have), PAGE):
            end = min(start + PAGE, len(have))
            if have[start:end] != base[start:end]:
                self.check_page(have, base, later, min(zeroed, default=most), start, end, name)

    def check_page(self, have, base, later, zero_from, start, end, name):
        near = [(offset, what) for kind, offset, what in later
                if kind == "data" and offset < end and offset + len(what) > start]
        for at in range(start, end):
            if (have[at] != base[at]
                and not any(offset <= at < offset + len(what) and what[at - offset] == have[at]
                            for offset, what in near) and not (have[at] == 0 and at >= zero_from)):
                raise Wrong(f"{name}: byte {at} (block {at // PAGE}, byte {at % PAGE} of it) is "
                            f"{have[at]}, expected {base[at]} or one of {len(near)} later writes; "
                            f"around it {bytes(have[max(start, at - 4):at + 8])}; "
                            f"{len(self.content)} bytes at first, {len(have)} now; {self.synced} "
                            f"of {len(self.events)} operations synced; operations on this byte: "
                            f"{self.about(at, have[at])}")

    def about(self, at, value):
        """The calls that touched a byte: number, kind, offset, length, and whether the call wrote
        the found value."""
        return [(number, kind, offset, len(what), kind == "data" and what[at - offset] == value)
                for number, (kind, offset, what) in enumerate(self.events)
                if kind == "size" or offset <= at < offset + len(what)]


class Writer:
    """Works in its own process until the mount is gone. A journal records each operation before it
    begins, since SIGBUS may end the process."""

    def start(self):
        self.journal = tempfile.TemporaryFile()
        self.child = os.fork()
        if self.child:
            return
        try:
            self.work()
        except OSError as error:
            self.note("end", error.errno)
        except BaseException:
            self.note("end", traceback.format_exc())
        os._exit(0)

    def note(self, *record):
        self.journal.write(pickle.dumps(record))
        self.journal.flush()

    def end(self):
        """In the test's process: waits for the end."""
        os.waitpid(self.child, 0)

    def learn(self):
        """Then reads the journal."""
        self.journal.seek(0)
        with self.journal, contextlib.suppress(EOFError):
            while True:
                kind, *what = pickle.load(self.journal)
                if kind != "end":
                    self.take(kind, *what)
                elif what[0] not in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO):
                    raise Wrong(f"a writer ended before the mount was killed: {what[0]}")


class DataWriter(Writer):
    """Writes to large lower files in every way, with an occasional sync."""

    def __init__(self, where, dice, files):
        self.where, self.dice, self.files = where, dice, files

    def take(self, kind, name, *what):
        if kind == "synced":
            self.files[name].synced = what[0]
        else:
            self.files[name].did(kind, *what)

    def tell(self, kind, name, *what):
        self.note(kind, name, *what)
        self.take(kind, name, *what)

    def work(self):
        fds = {name: os.open(os.path.join(self.where, name), os.O_RDWR)
                     for name in sorted(self.files)}
        while True:
            name = self.dice.choice(sorted(fds))
            self.step(fds[name], name, self.files[name])

    def step(self, fd, name, file):
        dice, size = self.dice, len(file.now)
        offset = dice.choice([dice.randint(0, size), dice.randint(0, size) // PAGE * PAGE,
                              dice.randint(max(0, size - 5000), size)])
        length = dice.choice([1, dice.randint(1, 600), dice.randint(1, PAGE), PAGE,
                              dice.randint(1, 20_000)])
        length = min(length, MOST_BYTES - offset)
        data = dice.randbytes(length).replace(b"\0", b"\1")
        kind = dice.choices(("write", "read", "sync", "datasync", "truncate", "punch", "copy",
                             "map"), (24, 4, 3, 3, 1, 2, 2, 2))[0]
        if kind in ("sync", "datasync"):
            (os.fsync if kind == "sync" else os.fdatasync)(fd)
            self.tell("synced", name, len(file.events))
        elif kind == "read":
            have, want = os.pread(fd, length, offset), file.now[offset:offset + length]
            if have != want and want.startswith(have):
                # The kernel had dirty pages when the mount went away: the sync fails.
                os.statvfs(self.where)
            if have != want:
                raise Wrong(
                    f"{name}: {length} bytes from {offset} are not what was written a moment ago")
        elif kind == "write":
            self.tell("data", name, offset, data)
            os.pwrite(fd, data, offset)
        elif kind == "truncate":
            to = dice.choice([offset, min(MOST_BYTES, size + dice.randint(0, 50_000))])
            self.tell("size", name, to, b"")
            os.ftruncate(fd, to)
        elif kind == "punch":
            length = min(length, size - offset)
            if length > 0:
                self.tell("data", name, offset, bytes(length))
                syscalls.fallocate(fd, syscalls.PUNCH_HOLE | syscalls.KEEP_SIZE, offset, length)
        elif kind == "copy":
            source = dice.randint(0, size)
            length = min(length, size - source)
            if length > 0 and abs(source - offset) >= length:
                self.tell("data", name, offset, bytes(file.now[source:source + length]))
                done = os.copy_file_range(fd, fd, length, source, offset)
                if done != length:
                    os.statvfs(self.where)  # The mount went away, and the call fails.
                    raise Wrong(f"{name}: copy_file_range copied {done} of {length} bytes")
        elif offset + length <= size and length > 0:
            self.map(fd, name, file, size, offset, data)

    def map(self, fd, name, file, size, offset, data):
        self.tell("data", name, offset, data)
        with mmap.mmap(fd, size, mmap.MAP_SHARED) as room:
            room[offset:offset + len(data)] = data
            if self.dice.random() < 0.5:
                start = offset // PAGE * PAGE
                room.flush(start, offset + len(data) - start)
                # msync syncs these pages only; it syncs the file if all earlier writes were synced.
                if file.synced == len(file.events) - 1:
                    self.tell("synced", name, len(file.events))


class NameWriter(Writer):
    """Creates, renames and removes names in one directory. The result of a call is durable when it
    returns."""

    def __init__(self, where, dice, folder, tree):
        self.where, self.dice, self.folder = where, dice, folder
        # path -> content of a file, None for a directory; and the same after the call in progress.
        self.tree, self.next, self.history = tree, None, []
        # The states of the tree since the last sync of all of it.
        self.states = [tree]

    def at(self, path):
        return os.path.join(self.where, self.folder, path)

    def work(self):
        number = 0
        while True:
            number += 1
            kind = self.dice.choice(("save", "save", "rename", "unlink", "make", "move", "exchange",
                                     "link", "remove", "synchronize"))
            getattr(self, kind)(number)
            if self.next is not None:
                self.note("did")
                self.take("did")

    def files(self):
        return sorted(path for path, content in self.tree.items() if content is not None)

    def folders(self):
        return sorted(path for path, content in self.tree.items() if content is None)

    def new(self):
        folder = self.dice.choice(["", *self.folders()])
        return os.path.join(folder, self.dice.choice("abcdefgh"))

    def will(self, remove=(), add=None):
        self.note("will", remove, add or {})
        self.take("will", remove, add or {})

    def take(self, kind, remove=(), add=None):
        if kind == "will":
            self.next = {path: content for path, content in self.tree.items()
                               if path not in remove} | add
            self.history.append(f"-{sorted(remove)} +{sorted(add)}")
        elif kind == "did":
            self.tree, self.next = self.next, None
            self.states.append(self.tree)
        else:
            self.states = [self.tree]

    def below(self, path):
        return [other for other in self.tree if other == path or other.startswith(path + "/")]

    def synchronize(self, _):
        for path in ["", *self.folders()]:
            fd = os.open(self.at(path), os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
        self.note("synced")
        self.take("synced")

    def save(self, number):
        """Replaces a file like an editor or a database: writes a new file, syncs it, renames it
        over the old one."""
        path = self.dice.choice([self.new(), *self.files()[:3]])
        if path in self.folders():
            return
        data = self.dice.randbytes(self.dice.choice([0, 10, 5000, 150_000]))
        hidden = self.at(SAVING)
        with open(hidden, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self.will(add={path: data})
        os.rename(hidden, self.at(path))

    def rename(self, _):
        if not self.files():
            return
        path, to = self.dice.choice(self.files()), self.new()
        if to in self.folders() or to == path:
            return
        if to in self.tree and os.path.samefile(self.at(path), self.at(to)):
            return  # Two names of one file: rename does nothing.
        self.will([path], {to: self.tree[path]})
        os.rename(self.at(path), self.at(to))

    def unlink(self, _):
        if self.files():
            path = self.dice.choice(self.files())
            self.will([path])
            os.unlink(self.at(path))

    def make(self, _):
        path = self.new()
        if path not in self.tree and path.count("/") < 4:
            self.will(add={path: None})
            os.mkdir(self.at(path))

    def move(self, _):
        """Removes a directory with its content; a lower one too."""
        if not self.folders():
            return
        path, to = self.dice.choice(self.folders()), self.new()
        if to in self.tree or to.startswith(path + "/") or to.count("/") > 4:
            return
        self.will(self.below(path),
                  {to + other[len(path):]: self.tree[other] for other in self.below(path)})
        os.rename(self.at(path), self.at(to))

    def exchange(self, _):
        files = self.files()
        if len(files) > 1:
            one, two = self.dice.sample(files, 2)
            self.will(add={one: self.tree[two], two: self.tree[one]})
            syscalls.rename(self.at(one), self.at(two), syscalls.RENAME_EXCHANGE)

    def link(self, _):
        if self.files():
            path, to = self.dice.choice(self.files()), self.new()
            if to not in self.tree:
                self.will(add={to: self.tree[path]})
                os.link(self.at(path), self.at(to))

    def remove(self, _):
        empty = [path for path in self.folders() if self.below(path) == [path]]
        if empty:
            path = self.dice.choice(empty)
            self.will([path])
            os.rmdir(self.at(path))


def read_tree(top):
    """The content of a directory in a NameWriter's form. The temporary file of a replacement may be
    there or not."""
    found = {}
    for path, folders, files in os.walk(top):
        for name in folders:
            found[os.path.relpath(os.path.join(path, name), top)] = None
        for name in files:
            if name == SAVING:
                continue
            with open(os.path.join(path, name), "rb") as file:
                found[os.path.relpath(os.path.join(path, name), top)] = file.read()
    return found


class Disk:
    """A small ext4 for uppers with simulated power cuts: data that was not yet written to its
    device is lost."""

    # The commit interval of the host's file system is longer than a round.
    OPTIONS = "loop,noauto_da_alloc,commit=300"

    def __init__(self, directory):
        self.image, self.where = os.path.join(directory, "disk.ext4"), os.path.join(
            directory, "disk")
        sparse_file(self.image, 64 << 20)
        run("mkfs.ext4", "-q", "-F", self.image)
        os.mkdir(self.where)
        run("mount", "-o", self.OPTIONS, self.image, self.where)

    def cut(self, stop=lambda: None):
        """Copies the disk at one moment. A copy during which a write happened could have later
        writes without earlier ones. `stop` then ends all that uses the disk."""
        copy = self.image + ".cut"
        for _ in range(100):
            before = self.written()
            run("cp", "--sparse=always", self.image, copy)
            under_way, *_ = after = self.written()
            if after == before and under_way == 0:
                break
        else:
            raise AssertionError("the disk is written to all the time")
        stop()
        run("umount", self.where)
        os.replace(copy, self.image)
        run("mount", "-o", self.OPTIONS, self.image, self.where)

    def written(self):
        """The block device's requests in flight, and its total of written and discarded sectors
        (Documentation/block/stat.rst)."""
        device = os.stat(self.where).st_dev
        with open(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat") as file:
            numbers = [int(number) for number in file.read().split()]
        return numbers[8], numbers[4], numbers[6], numbers[11]

    def remove(self):
        run("umount", "-l", self.where)


def rounds(name, lower, seed, count, power=False):
    """Runs `count` rounds with one kind of mount; returns the failure, or None."""
    done = 0
    while done < count:
        number = seed * 1_000_000 + done
        try:
            done += life(name, lower, number, min(LIFE, count - done), power)
        except (Wrong, OSError, AssertionError) as error:
            return f"{name}, BCOW_SEED={seed}, in the life that began with round {done}: {error}"
    return None


def life(name, lower, number, count, power):
    """The rounds of one upper."""
    dice = random.Random(number)
    files = {}
    for path in (f"data-{n}" for n in range(len(SIZES))):
        files[path] = File(read_bytes(os.path.join(lower.tree, path)))
    trees = {f"folder-{n}": read_tree(os.path.join(lower.tree, f"folder-{n}"))
                            for n in range(FOLDERS)}
    with contextlib.ExitStack() as stack:
        subject = stack.enter_context(subjects.shown(name, lower, mount=False))
        disk = None
        if power:
            disk = Disk(subject.directory)
            stack.callback(disk.remove)
            subject.upper = os.path.join(disk.where, "upper")
        # Runs before the disk is unmounted.
        stack.callback(lambda: subject.daemon and subject.process and subject.kill())
        subject.mount()
        for round_number in range(count):
            one_round(subject, disk, dice, f"{number} {round_number}", files, trees,
                      f"folder-{round_number % FOLDERS}")
        # A further mount finds the same.
        subject.unmount()
        subject.check()
        subject.mount()
        for path, file in files.items():
            with open(os.path.join(subject.where, path), "rb") as data:
                if data.read() != file.content:
                    raise Wrong(f"{path} changed by unmounting and mounting again")
        subject.unmount()
    return count


def one_round(subject, disk, dice, label, files, trees, folder):
    """The writers work until the crash; the state that the next mount shows is the start of the
    next round."""
    names = sorted(files)
    writers = [DataWriter(subject.where, random.Random(f"{label} {n}"),
                          {path: files[path] for path in names[n::WRITERS]})
               for n in range(WRITERS)]
    writers.append(NameWriter(subject.where, random.Random(label), folder, trees[folder]))
    for writer in writers:
        writer.start()
    time.sleep(dice.choice([0.005, 0.03, 0.1, 0.25]) * dice.random() + 0.01)
    subject.kill()
    for writer in writers:
        writer.end()
    if disk:
        run("umount", "-l", subject.where)
        disk.cut()
    for writer in writers:
        writer.learn()
    subject.mount()
    for path, file in files.items():
        have = read_bytes(os.path.join(subject.where, path))
        file.check(have, f"{label}: {path}", "volatile" not in subject.name)
        files[path] = File(have)
    trees[folder] = check_names(writers[-1], label, bool(disk))
    for path, tree in trees.items():
        if path != folder and read_tree(os.path.join(subject.where, path)) != tree:
            raise Wrong(f"{label}: {path} changed without an operation")


def check_names(writer, label, power):
    """Fails unless the tree is the result of the last call, or of the call in progress; after a
    power cut, the result of any call since the last sync of all of it."""
    have = read_tree(os.path.join(writer.where, writer.folder))
    states = writer.states if power else [writer.tree]
    if have not in [*states, writer.next]:
        near = min(states, key=lambda state: len(differing(state, have)))
        raise Wrong(f"{label}: {writer.folder}: other than expected: {differing(near, have)}, of "
                    f"{len(states)} states; the call in progress leads to "
                    f"{sorted(writer.next) if writer.next else None}; "
                    f"last calls: {writer.history[-8:]}")
    return have


def differing(one, two):
    return sorted(path for path in one.keys() | two.keys() if one.get(path, 0) != two.get(path, 0))


class Crashes(LowerCase):
    kinds = KINDS
    plant = staticmethod(plant)

    @promise("Creating, renaming and removing files, directories, links, pipes, sockets and "
             "devices is atomic. Every program sees the tree before or after the operation, and so "
             "does the next mount after a crash.",
             "When fsync or fdatasync of a file returns, all earlier writes to the file are "
             "durable on the host's disk, and so are the names that lead to the file. When fsync "
             "of a directory returns, the names in the directory are durable.",
             "After the mount's process was killed or the machine crashed, the next mount of the "
             "same upper recovers automatically, and `bcow fsck UPPER` finds no errors. All "
             "synchronized data is present. In data that was written later, each byte has its old "
             "or its new value, never a value of another file, and no block is partly filled.",
             "This mode loses no data that a program has synchronized with fsync.",
             "If only the process is killed, no name and no file that is stored whole is lost, but "
             "recent writes to partial files may be lost.")
    def test_synced_data_survives_a_kill(self):
        self.assert_no_failure(self.names, rounds, SEED, ROUNDS)

    @promise("or the machine crashed, the next mount of the same upper recovers automatically")
    def test_synced_data_survives_a_power_cut(self):
        support.need("mkfs.ext4")
        self.assert_no_failure(subjects.chosen(DURABLE), rounds, SEED, ROUNDS // 4 + 2, True)
