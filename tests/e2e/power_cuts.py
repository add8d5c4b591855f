"""What a power cut may leave of a directory.

strace records the system calls with which processes change the files below a directory. From the
recording come the states in which a power cut at any moment may leave the directory, in the model
of crates/bcow-union/tests/partial/world.rs:

- Content that no sync followed is there, lost, or torn between sectors of 512 bytes, in any order.
- The host keeps a journal: names, attributes, sizes and holes are as at some earlier moment.
- fsync and fdatasync of a file make its content and its size durable, fsync also its attributes;
  names are durable by fsync of their directory. So is all that the journal has before these
  changes.
"""

import bisect
import collections
import contextlib
import glob
import hashlib
import os
import random
import re
import shutil
import stat
import subprocess
import tempfile
import time

SECTOR, BLOCK = 512, 4096
CALLS = ("open,openat,openat2,write,pwrite64,writev,pwritev,pwritev2,lseek,fsync,fdatasync,syncfs,"
         "ftruncate,truncate,fallocate,copy_file_range,sendfile,splice,rename,renameat,renameat2,"
         "link,linkat,unlink,unlinkat,rmdir,mkdir,mkdirat,symlink,symlinkat,mknod,mknodat,setxattr,"
         "lsetxattr,fsetxattr,removexattr,lremovexattr,fremovexattr,chmod,fchmod,fchmodat,chown,"
         "lchown,fchown,fchownat,ioctl,fcntl,clone,clone3,fork,vfork")
LINE = re.compile(r"(\d+\.\d+) (\w+)\((.*)\)\s+= (\d+)(?:<([^>]*)>)?.* <(\d+\.\d+)>")
# An open file as strace shows it: its number, its path.
FILE = r"(\d+)<([^>]*)>(?:\(deleted\))?"
TEXT = r'"([^"]*)"'
# A name below a directory, or one alone.
NAME = rf"(?:(?:AT_FDCWD|\d+)<([^>]*)>(?:\(deleted\))?, )?{TEXT}"
DELETED = " (deleted)"

Change = collections.namedtuple("Change", "begin end kind node arguments")


def decoded(text):
    """The bytes of a text of `strace -xx`."""
    return bytes.fromhex(text.replace("\\x", ""))


def path_of(text):
    return os.fsdecode(decoded(text))


class Node:
    """A file, a directory, a symbolic link or a device."""

    def __init__(self, mode, rdev=0, target=None):
        self.mode, self.rdev, self.target = mode, rdev, target
        self.owner = (os.geteuid(), os.getegid())
        self.names, self.attributes = {}, {}
        # The content, and which of its blocks are not holes.
        self.content, self.blocks = bytearray(), set()

    def copy(self):
        new = Node(self.mode, self.rdev, self.target)
        new.owner, new.names = self.owner, dict(self.names)
        new.attributes = dict(self.attributes)
        new.content, new.blocks = bytearray(self.content), set(self.blocks)
        return new

    def set_size(self, size):
        if size < len(self.content):
            del self.content[size:]
            self.blocks = {block for block in self.blocks if block * BLOCK < size}
        else:
            self.content.extend(bytes(size - len(self.content)))

    def write(self, at, data, may_grow=True):
        end = at + len(data)
        if end > len(self.content) and may_grow:
            self.set_size(end)
        end = min(end, len(self.content))
        if at < end:
            self.content[at:end] = data[:end - at]
            self.blocks.update(range(at // BLOCK, -(-end // BLOCK)))

    def punch(self, at, length):
        end = min(at + length, len(self.content))
        if at < end:
            self.content[at:end] = bytes(end - at)
            last = -(-end // BLOCK) if end == len(self.content) else end // BLOCK
            self.blocks.difference_update(range(-(-at // BLOCK), last))


class Tree:
    """The state of a directory. Nodes have numbers; that of the directory is 0."""

    def __init__(self, nodes):
        self.nodes = nodes

    @classmethod
    def load(cls, top):
        nodes, seen = {}, {}

        def add(path):
            found = os.lstat(path)
            key = found.st_dev, found.st_ino
            if key in seen:
                return seen[key]
            number = seen[key] = len(seen)
            node = nodes[number] = Node(found.st_mode, found.st_rdev)
            node.owner = found.st_uid, found.st_gid
            for name in os.listxattr(path, follow_symlinks=False):
                node.attributes[name] = os.getxattr(path, name, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                for name in sorted(os.listdir(path)):
                    node.names[name] = add(os.path.join(path, name))
            elif stat.S_ISLNK(found.st_mode):
                node.target = os.readlink(path)
            elif stat.S_ISREG(found.st_mode):
                node.set_size(found.st_size)
                for at, data in data_of(path):
                    node.write(at, data)
            return number

        add(top)
        return cls(nodes)

    def copy(self):
        return Tree({number: node.copy() for number, node in self.nodes.items()})

    def store(self, top):
        """Makes the directory, which must not exist."""
        made = {}

        def make(number, path):
            node = self.nodes[number]
            if number in made:
                return os.link(made[number], path, follow_symlinks=False)
            made[number] = path
            if stat.S_ISDIR(node.mode):
                os.mkdir(path)
                for name, below in node.names.items():
                    make(below, os.path.join(path, name))
            elif stat.S_ISLNK(node.mode):
                os.symlink(node.target, path)
            elif stat.S_ISREG(node.mode):
                with open(path, "wb") as file:
                    for block in sorted(node.blocks):
                        file.seek(block * BLOCK)
                        file.write(node.content[block * BLOCK:(block + 1) * BLOCK])
                    file.truncate(len(node.content))
            else:
                os.mknod(path, node.mode, node.rdev)
            os.chown(path, *node.owner, follow_symlinks=False)
            if not stat.S_ISLNK(node.mode):
                os.chmod(path, stat.S_IMODE(node.mode))
            for name, value in node.attributes.items():
                os.setxattr(path, name, value, follow_symlinks=False)

        make(0, top)

    def described(self):
        """Each path with what it is, to compare trees."""
        found = {}

        def describe(number, path):
            node = self.nodes[number]
            found[path] = (oct(node.mode), node.owner, node.rdev, node.target, number_of(number),
                           sorted(node.attributes.items()), len(node.content),
                           hashlib.sha256(node.content).hexdigest())
            for name, below in sorted(node.names.items()):
                describe(below, f"{path}/{name}")

        order = {}

        def number_of(number):
            return order.setdefault(number, len(order))

        describe(0, "")
        return found

    def apply(self, change, may_grow=True):
        """Makes a change. One of a node that does not exist changes nothing."""
        kind, arguments = change.kind, change.arguments
        if kind == "node":
            self.nodes[change.node] = arguments[0].copy()
            return
        node = self.nodes.get(change.node)
        if node is None:
            return
        if kind == "write":
            node.write(*arguments, may_grow)
        elif kind in ("set_size", "punch"):
            getattr(node, kind)(*arguments)
        elif kind == "link":
            name, below = arguments
            node.names[name] = below
        elif kind == "unlink":
            del node.names[arguments[0]]
        elif kind == "rename":
            name, to, to_name, exchanges, whiteout = arguments
            to = self.nodes[to]
            moved, replaced = node.names.pop(name), to.names.get(to_name)
            if exchanges:
                node.names[name] = replaced
            elif whiteout is not None:
                node.names[name] = whiteout
            to.names[to_name] = moved
        elif kind == "attribute":
            name, value = arguments
            node.attributes.pop(name, None)
            if value is not None:
                node.attributes[name] = value
        elif kind == "mode":
            node.mode = stat.S_IFMT(node.mode) | arguments[0]
        elif kind == "owner":
            node.owner = tuple(old if new == -1 else new
                               for old, new in zip(node.owner, arguments))


def data_of(path):
    """The ranges of data of a file: (offset, bytes)."""
    with open(path, "rb") as file:
        end = 0
        with contextlib.suppress(OSError):
            while True:
                start = os.lseek(file.fileno(), end, os.SEEK_DATA)
                end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
                yield start, os.pread(file.fileno(), end - start, start)


class Recorder:
    """Records what commands do with a directory, and when the test learnt of their results."""

    def __init__(self, top):
        self.top = os.path.realpath(top)
        self.first = Tree.load(self.top)
        self.logs = tempfile.TemporaryDirectory(prefix="calls-")
        self.runs = 0
        # When the test asked for each thing, and when it was answered.
        self.asked, self.answered = [], []

    def command(self, *command):
        """The command that also records the calls of a command."""
        self.runs += 1
        log = os.path.join(self.logs.name, str(self.runs))
        # With -D, the process that the caller starts is the command.
        return [shutil.which("strace"), "-D", "-ff", "-qq", "-ttt", "-T", "-y", "-xx",
                "-s", str(1 << 28), "-o", log, "-e", f"trace={CALLS}", "-e", "signal=none",
                *command]

    @contextlib.contextmanager
    def step(self):
        """Something that the test asks for, and that is answered when the block ends."""
        self.asked.append(time.time())
        yield
        self.answered.append(time.time())

    def run(self, *command, **options):
        with self.step():
            subprocess.run(self.command(*command), check=True, stdin=subprocess.DEVNULL,
                           stdout=subprocess.DEVNULL, **options)

    def end(self):
        """The recording, when all recorded processes have ended."""
        lines = []
        for path in glob.glob(os.path.join(self.logs.name, "*")):
            run, thread = os.path.basename(path).split(".")
            with open(path) as log:
                for line in log:
                    if match := LINE.match(line):
                        begin, call, arguments, result, shown, seconds = match.groups()
                        lines.append((float(begin), float(begin) + float(seconds), run, thread,
                                      call, arguments, int(result), shown))
        lines.sort(key=lambda line: line[0])
        self.logs.cleanup()
        return Recording(self.top, self.first, lines, self.asked, self.answered)


class Recording:
    """The changes of a directory, in the order of their beginnings."""

    def __init__(self, top, first, lines, asked, answered):
        self.top, self.first, self.asked, self.answered = top, first, asked, answered
        self.changes = []
        self.tree = first.copy()
        self.next = len(first.nodes)
        # Nodes by the paths of files without a name.
        self.unnamed = {}
        # For each thread, the nodes and the positions of its open files, by their numbers. The
        # threads of a process have the same ones.
        self.files = {}
        # The current directory of each recorded command.
        self.currents = {}
        for begin, end, self.run, thread, call, arguments, result, shown in lines:
            self.moment = begin, end
            self.opened, self.positions = self.files.setdefault((self.run, thread), ({}, {}))
            if match := re.search("AT_FDCWD<([^>]*)>", arguments):
                self.currents[self.run] = path_of(match[1])
            if handler := getattr(self, f"on_{call}", None):
                handler(arguments, result, shown)
        self.prepare()

    # From calls to changes.

    def add(self, kind, node, *arguments):
        change = Change(*self.moment, kind, node, arguments)
        grows = (kind == "write"
                 and arguments[0] + len(arguments[1]) > len(self.tree.nodes[node].content))
        self.changes.append((change, grows))
        self.tree.apply(change)

    def new(self, node):
        self.next += 1
        self.add("node", self.next, node)
        return self.next

    def make(self, place, node):
        if place is not None:
            self.add("link", place[0], place[1], self.new(node))

    def find(self, path):
        """The node at a path, or None if it is not below the directory."""
        if path.endswith(DELETED):
            return self.unnamed.get(path.removesuffix(DELETED))
        if path in self.unnamed:
            return self.unnamed[path]
        if path != self.top and not path.startswith(self.top + "/"):
            return None
        number = 0
        for name in path.removeprefix(self.top).split("/")[1:]:
            number = self.tree.nodes[number].names.get(name)
            if number is None:
                return None
        return number

    def place(self, directory, name):
        """The directory and the name that a call names, or None if they are elsewhere."""
        directory = path_of(directory) if directory else self.currents[self.run]
        path = os.path.normpath(os.path.join(directory, path_of(name)))
        if match := re.match(r"/proc/(?:self|thread-self)/fd/(\d+)(/.*)?$", path):
            node, rest = self.opened.get(match[1]), match[2]
            while rest and node is not None and rest.count("/") > 1:
                _, first, rest = rest.split("/", 2)
                node, rest = self.tree.nodes[node].names.get(first), "/" + rest
            return None if node is None else (node, rest[1:] if rest else None)
        parent = self.find(os.path.dirname(path))
        return None if parent is None else (parent, os.path.basename(path))

    def named(self, directory, name):
        """The node that a call names, or None."""
        if directory and not name:
            return self.find(path_of(directory))
        place = self.place(directory, name)
        if place is None:
            return 0 if os.path.normpath(path_of(name)) == self.top else None
        return place[0] if place[1] is None else self.tree.nodes[place[0]].names.get(place[1])

    def on_clone(self, arguments, result, _):
        own = self.opened, self.positions
        shares = "CLONE_FILES" in arguments
        self.files[self.run, str(result)] = own if shares else tuple(map(dict, own))

    on_clone3 = on_fork = on_vfork = on_clone

    def on_openat(self, arguments, result, shown):
        directory, name, rest = re.match(rf"{NAME}, (.*)", arguments).groups()
        path, number = path_of(shown), str(result)
        mode = re.search(r"(?:, |mode=)(0[0-7]*)", rest)
        mode = int(mode[1], 8) & ~0o022 if mode else 0
        self.positions.pop(number, None)
        if "O_TMPFILE" in rest:
            if path.startswith(self.top + "/"):
                node = self.new(Node(stat.S_IFREG | mode))
                self.opened[number] = self.unnamed[path.removesuffix(DELETED)] = node
            return
        node = self.find(path)
        if node is None and "O_CREAT" in rest:
            self.make(self.place(directory, name), Node(stat.S_IFREG | mode))
            node = self.find(path)
        elif node is not None and "O_TRUNC" in rest and self.tree.nodes[node].content:
            self.add("set_size", node, 0)
        self.opened[number] = node

    on_open = on_openat2 = on_openat

    def on_fcntl(self, arguments, result, shown):
        if "F_DUPFD" in arguments:
            self.opened[str(result)] = self.find(path_of(shown))
            self.positions.pop(str(result), None)

    def on_lseek(self, arguments, result, _):
        self.positions[re.match(r"\d+", arguments)[0]] = result

    def on_write(self, arguments, result, _):
        match = re.match(rf"{FILE}, {TEXT}", arguments)
        self.append(match[1], match[2], decoded(match[3])[:result])

    def on_writev(self, arguments, result, _):
        match = re.match(FILE, arguments)
        data = b"".join(map(decoded, re.findall(rf"iov_base={TEXT}", arguments)))
        self.append(match[1], match[2], data[:result])

    def append(self, number, path, data):
        node = self.find(path_of(path))
        if node is not None:
            at = self.positions.get(number, 0)
            self.add("write", node, at, data)
            self.positions[number] = at + len(data)

    def on_pwrite64(self, arguments, result, _):
        _, path, data, at = re.match(rf"{FILE}, {TEXT}, \d+, (\d+)", arguments).groups()
        node = self.find(path_of(path))
        if node is not None:
            self.add("write", node, int(at), decoded(data)[:result])

    def on_pwritev(self, arguments, result, _):
        node = self.find(path_of(re.match(FILE, arguments)[2]))
        if node is not None:
            data = b"".join(map(decoded, re.findall(rf"iov_base={TEXT}", arguments)))
            at = int(re.search(r"\], \d+, (\d+)", arguments)[1])
            self.add("write", node, at, data[:result])

    on_pwritev2 = on_pwritev

    def on_copy_file_range(self, arguments, result, _):
        file, source, at, target_file, target, to = re.match(
            rf"{FILE}, (NULL|\[\d+).*?, {FILE}, (NULL|\[\d+)", arguments).groups()
        node = self.find(path_of(target))
        if node is None or not result:
            return

        def position(file, given):
            if given != "NULL":
                return int(given[1:])
            at = self.positions.get(file, 0)
            self.positions[file] = at + result
            return at

        at, to = position(file, at), position(target_file, to)
        known = self.find(path_of(source))
        if known is None:
            with open(path_of(source), "rb") as file:
                data = os.pread(file.fileno(), result, at)
        else:
            data = bytes(self.tree.nodes[known].content[at:at + result])
        self.add("write", node, to, data)

    def on_sendfile(self, arguments, result, _):
        if self.find(path_of(re.match(FILE, arguments)[2])) is not None:
            raise AssertionError("sendfile into a recorded file")

    on_splice = on_sendfile

    def on_ioctl(self, arguments, result, _):
        if "CLONE" in arguments or "DEDUPE" in arguments:
            raise AssertionError("blocks of recorded files are shared: use ext4")

    def on_ftruncate(self, arguments, *_):
        _, path, size = re.match(rf"{FILE}, (\d+)", arguments).groups()
        node = self.find(path_of(path))
        if node is not None and len(self.tree.nodes[node].content) != int(size):
            self.add("set_size", node, int(size))

    def on_fallocate(self, arguments, *_):
        _, path, mode, at, length = re.match(rf"{FILE}, (\S+), (\d+), (\d+)", arguments).groups()
        node = self.find(path_of(path))
        if node is None:
            return
        at, length = int(at), int(length)
        if "PUNCH_HOLE" in mode or "ZERO_RANGE" in mode:
            self.add("punch", node, at, length)
        elif mode not in ("0", "FALLOC_FL_KEEP_SIZE"):
            raise AssertionError(f"fallocate with {mode}")
        if "KEEP_SIZE" not in mode and at + length > len(self.tree.nodes[node].content):
            self.add("set_size", node, at + length)

    def on_fsync(self, arguments, *_):
        self.sync(arguments, "sync")

    def on_fdatasync(self, arguments, *_):
        self.sync(arguments, "sync_data")

    def sync(self, arguments, kind):
        node = self.find(path_of(re.match(FILE, arguments)[2]))
        if node is not None:
            self.add(kind, node)

    def on_syncfs(self, *_):
        self.add("sync_all", 0)

    def rename(self, old, new, flags=""):
        if old and new:
            whiteout = self.new(Node(stat.S_IFCHR)) if "WHITEOUT" in flags else None
            self.add("rename", *old, *new, "EXCHANGE" in flags, whiteout)
        elif old or new:
            raise AssertionError("a file is moved from or to elsewhere")

    def on_renameat2(self, arguments, *_):
        match = re.match(rf"{NAME}, {NAME}(.*)", arguments)
        self.rename(self.place(match[1], match[2]), self.place(match[3], match[4]), match[5])

    on_rename = on_renameat = on_renameat2

    def on_linkat(self, arguments, *_):
        match = re.match(rf"{NAME}, {NAME}", arguments)
        place = self.place(match[3], match[4])
        if place is not None:
            node = self.named(match[1], match[2])
            if node is None:
                raise AssertionError(f"a link of an unknown file: {arguments}")
            self.add("link", *place, node)

    on_link = on_linkat

    def on_unlinkat(self, arguments, *_):
        place = self.place(*re.match(NAME, arguments).groups())
        if place is not None:
            self.add("unlink", *place)

    on_unlink = on_rmdir = on_unlinkat

    def on_mkdirat(self, arguments, *_):
        directory, name, mode = re.match(rf"{NAME}, (\d+)", arguments).groups()
        self.make(self.place(directory, name), Node(stat.S_IFDIR | int(mode, 8) & ~0o022))

    on_mkdir = on_mkdirat

    def on_symlinkat(self, arguments, *_):
        target, directory, name = re.match(rf"{TEXT}, {NAME}", arguments).groups()
        self.make(self.place(directory, name), Node(stat.S_IFLNK | 0o777, target=path_of(target)))

    on_symlink = on_symlinkat

    def on_mknodat(self, arguments, *_):
        directory, name, kind, mode, major, minor = re.match(
            rf"{NAME}, (S_\w+)(?:\|(\d+))?(?:, makedev\((\w+), (\w+)\))?", arguments).groups()
        device = os.makedev(int(major, 0), int(minor, 0)) if major else 0
        mode = getattr(stat, kind) | int(mode or "0", 8) & ~0o022
        self.make(self.place(directory, name), Node(mode, device))

    on_mknod = on_mknodat

    def attribute(self, node, name, value):
        if node is not None:
            self.add("attribute", node, path_of(name), value)

    def on_setxattr(self, arguments, *_):
        path, name, value = re.match(rf"{TEXT}, {TEXT}, (?:{TEXT}|NULL)", arguments).groups()
        self.attribute(self.named(None, path), name, decoded(value or ""))

    on_lsetxattr = on_setxattr

    def on_fsetxattr(self, arguments, *_):
        _, path, name, value = re.match(rf"{FILE}, {TEXT}, (?:{TEXT}|NULL)", arguments).groups()
        self.attribute(self.find(path_of(path)), name, decoded(value or ""))

    def on_removexattr(self, arguments, *_):
        path, name = re.match(rf"{TEXT}, {TEXT}", arguments).groups()
        self.attribute(self.named(None, path), name, None)

    on_lremovexattr = on_removexattr

    def on_fremovexattr(self, arguments, *_):
        _, path, name = re.match(rf"{FILE}, {TEXT}", arguments).groups()
        self.attribute(self.find(path_of(path)), name, None)

    def on_fchmod(self, arguments, *_):
        _, path, mode = re.match(rf"{FILE}, (\d+)", arguments).groups()
        self.set_mode(self.find(path_of(path)), mode)

    def on_fchmodat(self, arguments, *_):
        directory, name, mode = re.match(rf"{NAME}, (\d+)", arguments).groups()
        self.set_mode(self.named(directory, name), mode)

    on_chmod = on_fchmodat

    def set_mode(self, node, mode):
        if node is not None:
            self.add("mode", node, int(mode, 8))

    def on_fchown(self, arguments, *_):
        _, path, *owner = re.match(rf"{FILE}, (-?\d+), (-?\d+)", arguments).groups()
        self.set_owner(self.find(path_of(path)), owner)

    def on_fchownat(self, arguments, *_):
        directory, name, *owner = re.match(rf"{NAME}, (-?\d+), (-?\d+)", arguments).groups()
        self.set_owner(self.named(directory, name), owner)

    on_chown = on_lchown = on_fchownat

    def set_owner(self, node, owner):
        if node is not None:
            self.add("owner", node, *map(int, owner))

    # From changes to states.

    def prepare(self):
        """What each sync makes durable."""
        self.changes, grows = zip(*self.changes) if self.changes else ((), ())
        self.syncs = []
        content = collections.defaultdict(list)
        journal = {False: collections.defaultdict(list), True: collections.defaultdict(list)}
        everything = []
        for number, change in enumerate(self.changes):
            kind, node = change.kind, change.node
            if kind.startswith("sync"):
                # Not what another thread was still doing when the sync began.
                def before(numbers):
                    return next((at for at in reversed(numbers)
                                 if self.changes[at].end <= change.begin), -1)
                has_names = stat.S_ISDIR(self.tree.nodes[node].mode)
                least = (before(everything) if kind == "sync_all"
                         else before(journal[kind == "sync" or has_names][node]))
                covered = ([at for number in content.values() for at in number]
                           if kind == "sync_all" else content[node])
                covered = {at for at in covered if self.changes[at].end <= change.begin}
                self.syncs.append((number, change.end, least + 1, covered))
            elif kind == "write":
                content[node].append(number)
                if grows[number]:
                    for of in journal.values():
                        of[node].append(number)
                    everything.append(number)
            else:
                everything.append(number)
                journal[True][node].append(number)
                if kind in ("set_size", "punch"):
                    journal[False][node].append(number)
                if kind == "rename":
                    journal[True][arguments_of(change)].append(number)

    def cut(self, end, dice, whole=None):
        """A state after a power cut between the changes before `end` and the rest, with the number
        of answers before it and of requests. With `whole`, all that happened is there, or only
        what is durable."""
        changes = self.changes[:end]
        moment = self.changes[end].begin if end < len(self.changes) else float("inf")
        least, durable = 0, set()
        for number, done, upto, covered in self.syncs:
            if number < end and done <= moment:
                least = max(least, upto)
                durable |= covered
        if whole is None:
            journal = dice.choice((least, end, dice.randint(least, end)))
            lost, torn = dice.choice((1, 0.5, 0.2, 0)), dice.choice((1, 0.3, 0))
        else:
            journal, lost, torn = (end, 0, 0) if whole else (least, 1, 0)
        # A file can grow until the first journaled change that is lost.
        grows = next((number for number in range(journal, end)
                      if changes[number].kind != "write"
                      and not changes[number].kind.startswith("sync")), end)
        tree = self.first.copy()
        for number, change in enumerate(changes):
            if change.kind != "write":
                if number < journal:
                    tree.apply(change)
            elif number in durable:
                tree.apply(change)
            elif dice.random() >= lost:
                for piece in pieces(change, dice) if dice.random() < torn else (change,):
                    tree.apply(piece, number <= grows)
        return (tree, bisect.bisect_right(self.answered, moment),
                bisect.bisect_right(self.asked, moment))

    def states(self, count, seed=1):
        """Different states: (description, tree, answers, requests), at most `count`."""
        dice = random.Random(seed)
        ends = range(len(self.changes) + 1)
        cuts = [(end, whole) for end in ends for whole in (True, False)]
        dice.shuffle(cuts)
        # At most half of the states are of the extreme kinds.
        cuts = cuts[:count // 2]
        seen = set()
        for attempt in range(4 * count):
            end, whole = cuts[attempt] if attempt < len(cuts) else (dice.choice(ends), None)
            tree, answers, requests = self.cut(end, dice, whole)
            key = hashlib.sha256(repr((tree.described(), answers, requests)).encode()).digest()
            if key not in seen:
                seen.add(key)
                yield f"seed {seed}, {attempt}: {self.describe(end)}", tree, answers, requests
            if len(seen) == count:
                return

    def describe(self, end):
        """The last changes before a cut, for messages."""
        lines = []
        for number, change in enumerate(self.changes[:end]):
            shown = [f"{len(part)} bytes" if isinstance(part, bytes) else part
                     for part in change.arguments if not isinstance(part, Node)]
            lines.append(f"{number}: {change.kind} {change.node} {shown}")
        return f"cut before change {end} of {len(self.changes)}\n" + "\n".join(lines[-40:])

    def assert_complete(self):
        """Fails unless the directory is as the recording says."""
        found, expected = Tree.load(self.top).described(), self.tree.described()
        for path in sorted(found.keys() | expected.keys()):
            if found.get(path) != expected.get(path):
                raise AssertionError(f"{path!r} is {found.get(path)}, and the recorded calls made "
                                     f"it {expected.get(path)}")


def arguments_of(change):
    """The directory into which a change renames."""
    return change.arguments[1]


def pieces(change, dice):
    """Some sectors of a write."""
    at, data = change.arguments
    first, last = at // SECTOR, (at + len(data) - 1) // SECTOR
    for sector in range(first, last + 1):
        if dice.random() < 0.5:
            begin, end = max(at, sector * SECTOR), min(at + len(data), (sector + 1) * SECTOR)
            yield change._replace(arguments=(begin, data[begin - at:end - at]))


def examine(case, recording, check, count, seed=1):
    """Checks states of a recording: `check` gets a directory, the number of answers before the
    power cut, and that of requests. Returns the number of states."""
    recording.assert_complete()
    done = 0
    for what, tree, answers, requests in recording.states(count, seed):
        shutil.rmtree(recording.top)
        tree.store(recording.top)
        try:
            check(answers, requests)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{what}") from error
        done += 1
    case.assertGreater(done, 0)
    return done
