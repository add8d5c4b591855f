"""Changes of files in a mount with an upper, each of which a program makes durable."""

import errno
import os
import random

from support import bcow, read_bytes, write_file


def plant(top):
    """The lower tree of these steps."""
    dice = random.Random(7)
    os.mkdir(os.path.join(top, "folder"))
    for name, size in (("large", 300_000), ("cut", 100_003), ("small", 300), ("folder/x", 50),
                       ("folder/y", 90_000), ("gone", 10)):
        write_file(os.path.join(top, name), dice.randbytes(size))


def files_at(top):
    """The content of all files, by path."""
    found = {}
    for path, _, files in os.walk(top):
        for name in files:
            found[os.path.relpath(os.path.join(path, name), top)] = read_bytes(
                os.path.join(path, name))
    return found


def steps(where, seed):
    """Functions that change the mount, make the change durable, and then change a dictionary of the
    files' content. A step fails if the mount has ended: it may have changed the directory below."""
    dice, device = random.Random(seed), os.stat(where).st_dev

    def in_mount(step):
        def checked(files):
            step(files)
            if os.stat(where).st_dev != device:
                raise OSError(errno.ENOTCONN, "the mount has ended", where)
        return checked

    def at(name):
        return os.path.join(where, name)

    def sync(path=""):
        file = os.open(at(path), os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def write(name, offset, data):
        def step(files):
            old = files.get(name, b"")
            files[name] = old[:offset] + data + old[offset + len(data):]
            with open(at(name), "r+b" if old else "w+b", buffering=0) as file:
                done = 0
                while done < len(data):
                    done += os.pwrite(file.fileno(), data[done:], offset + done)
                os.fsync(file.fileno())
            sync(os.path.dirname(name))
        return step

    def rename(old, new):
        def step(files):
            for name in [name for name in files if name == old or name.startswith(old + "/")]:
                files[new + name[len(old):]] = files.pop(name)
            os.rename(at(old), at(new))
            sync()
        return step

    def unlink(files):
        del files["gone"]
        os.unlink(at("gone"))
        sync()

    def truncate(files):
        files["cut"] = files["cut"][:50_000]
        with open(at("cut"), "r+b") as file:
            file.truncate(50_000)
            os.fsync(file.fileno())

    def snapshot(_):
        bcow("snapshot", where, "one")

    all_steps = [write("large", 70_001, dice.randbytes(5000)), write("small", 10, b"changed"),
                 write("new", 0, dice.randbytes(9000)), rename("folder", "moved"), unlink,
                 snapshot, write("large", 8192, dice.randbytes(40_000)), truncate,
                 write("moved/y", 3, dice.randbytes(20_000)), rename("new", "small"),
                 write("cut", 0, dice.randbytes(60_000))]
    return [in_mount(step) for step in all_steps]


def is_between(have, old, new):
    """Whether a file that changed from `old` to `new` may have this content; None if there is no
    file. Bytes behind the end of the shorter content may be zero."""
    if have is None:
        return old is None or new is None
    if have in (old, new):
        return True
    old, new = old or b"", new or b""
    if not min(len(old), len(new)) <= len(have) <= max(len(old), len(new)):
        return False
    shorter = min(len(old), len(new))
    return all(have[at:at + 1] in (old[at:at + 1], new[at:at + 1])
               or have[at] == 0 and at >= shorter for at in range(len(have)))


def problem_between(have, old, new):
    """What is wrong with the files of a mount that may be as in `old` or in `new`; or None."""
    if set(have) not in (set(old), set(new)):
        return f"{sorted(have)}, expected {sorted(old)} or {sorted(new)}"
    wrong = [name for name in have if not is_between(have[name], old.get(name), new.get(name))]
    return f"{wrong}: wrong content" if wrong else None
