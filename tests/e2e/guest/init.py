"""The first and only process of a guest: runs a list of steps, prints each result as a line, and
cuts the power.

The steps are in a JSON file, which the host shares: [[name, {arguments}], ...]. A line of output
that begins with `@ ` is a result; a line that begins with `! ` is an error that ended the run. The
content of a file follows from its name, so that two boots need no shared state.
"""

import ctypes
import fcntl
import hashlib
import json
import os
import random
import socket
import struct
import subprocess
import sys
import time
import traceback

import changes
from changes import content

libc = ctypes.CDLL(None, use_errno=True)
os.environ.update(PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", LC_ALL="C",
                  HOME="/tmp", BCOW_VIEWS="/tmp/views")
POWER_OFF = 0x4321FEDC
INIT_MODULE = 175
FITRIM = 0xC0185879


def call(result, what):
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def mount(source, where, kind, flags=0, options=""):
    os.makedirs(where, exist_ok=True)
    call(libc.mount(source.encode(), where.encode(), kind.encode(), ctypes.c_ulong(flags),
                    options.encode()), f"mount {source} {where}")


def tool(*command, ok=(0,)):
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    text = done.stdout.decode(errors="replace")
    if done.returncode not in ok:
        raise RuntimeError(f"{' '.join(command)}: {done.returncode}\n{text}")
    return text


def network():
    """Sets a fixed address on the interface to the host's user-mode network; the host is
    10.0.2.2."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for request, address in ((0x8916, "10.0.2.100"), (0x891C, "255.255.255.0")):
            fcntl.ioctl(control, request, struct.pack(
                            "16sHH4s8x", b"vec0", socket.AF_INET, 0, socket.inet_aton(address)))
        fcntl.ioctl(control, 0x8914, struct.pack("16sH22x", b"vec0", 0x41))


def host(where, path):
    """Mounts a directory of the host for writing."""
    mount("none", where, "hostfs", options=path)


def load(modules):
    """Loads modules of the kernel: paths below its directory, each after those that it needs."""
    for name in modules:
        name, *options = name.split()
        with open(f"/usr/lib/uml/modules/{os.uname().release}/kernel/{name}.ko", "rb") as module:
            code = module.read()
        call(libc.syscall(INIT_MODULE, code, len(code), " ".join(options).encode()), name)


def log_writes(device, log, name):
    """Makes a device that logs its writes (dm-log-writes); the first one is /dev/dm-0."""
    table = f"0 {device_facts(device)['bytes'] // 512} log-writes {device} {log}"
    return tool("dmsetup", "--noudevsync", "create", name, "--table", table)


def mark(name, text):
    """Writes a mark into the log of a device of log_writes."""
    return tool("dmsetup", "message", name, "0", "mark", text)


def connect(device, port, export):
    tool("nbd-client", "-N", export, "-b", "4096", "10.0.2.2", str(port), device)
    return device_facts(device)


def disconnect(device):
    tool("nbd-client", "-d", device)
    deadline = time.monotonic() + 10
    while os.path.exists(f"/sys/block/{os.path.basename(device)}/pid"):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{device} is still connected")
        time.sleep(0.01)


def device_facts(device):
    name = os.path.basename(device)

    def fact(path):
        with open(f"/sys/block/{name}/{path}") as file:
            return file.read().strip()

    return {"bytes": int(fact("size")) * 512, "read_only": fact("ro") == "1",
            "discard": fact("queue/discard_max_bytes") != "0",
            "write_cache": fact("queue/write_cache"), "fua": fact("queue/fua") == "1"}


def command(arguments, ok=(0,)):
    return tool(*arguments, ok=ok)


def make(device, kind):
    options = {"ext4": ["-q", "-F"], "xfs": ["-q", "-f"], "btrfs": ["-q", "-f"]}[kind]
    return tool(f"mkfs.{kind}", *options, device)


def attach(device, kind, where, read_only=False, options="discard"):
    mount(device, where, kind, flags=1 if read_only else 0, options="" if read_only else options)


def detach(where):
    call(libc.umount2(where.encode(), 0), f"umount {where}")


def check(device, kind):
    return tool(*{"ext4": ["fsck.ext4", "-f", "-n"], "xfs": ["xfs_repair", "-n"],
                  "btrfs": ["btrfs", "check"]}[kind], device)


def names(prefix, count):
    return [f"{prefix}{number:03}" for number in range(count)]


def fill(where, prefix, count, durable=False):
    """Writes files; a durable file is on the disk before the next file is begun."""
    total = 0
    for name in names(prefix, count):
        data = content(name)
        with open(f"{where}/{name}", "wb") as file:
            # Out of order, so that the file system has to rewrite blocks and allocate between them.
            middle = len(data) // 2
            file.seek(middle)
            file.write(data[middle:])
            file.seek(0)
            file.write(data[:middle])
            if durable:
                file.flush()
                os.fsync(file.fileno())
        total += len(data)
    if durable:
        directory = os.open(where, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
    return total


def verify(where, prefix, count, kept=1):
    """Compares the files that fill wrote, past the page cache. One of `kept` files exists; the
    others were removed."""
    total, sums = 0, hashlib.sha256()
    for number, name in enumerate(names(prefix, count)):
        if number % kept:
            if os.path.exists(f"{where}/{name}"):
                raise RuntimeError(f"{name} was removed and is back")
            continue
        want = content(name)
        with open(f"{where}/{name}", "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            have = file.read()
        if hashlib.sha256(have).digest() != hashlib.sha256(want).digest():
            first = next((at for at, (a, b) in enumerate(zip(have, want)) if a != b),
                         min(len(have), len(want)))
            raise RuntimeError(
                f"{where}/{name}: {len(have)} bytes of {len(want)}, different from byte {first}")
        sums.update(have)
        total += len(have)
    return {"bytes": total, "sha256": sums.hexdigest()}


def remove(where, prefix, count, kept):
    """Removes all but one of `kept` files and discards their blocks."""
    for number, name in enumerate(names(prefix, count)):
        if number % kept and os.path.exists(f"{where}/{name}"):
            os.unlink(f"{where}/{name}")
    directory = os.open(where, os.O_RDONLY)
    os.fsync(directory)
    trimmed = bytearray(struct.pack("QQQ", 0, 2**64 - 1, 0))
    fcntl.ioctl(directory, FITRIM, trimmed)
    os.close(directory)
    return struct.unpack("QQQ", trimmed)[1]


def commit_one_by_one(where, name, count, busy=0):
    """Makes `count` changes below a directory; each is durable before its mark is in the log of the
    device `name`. Between them are writes that nothing makes durable."""
    for number in range(count):
        changes.make(where, number)
        mark(name, f"{number + 1}")
        with open(f"{where}/noise", "ab") as noise:
            noise.write(random.Random(number).randbytes(busy))
    return count


def flood(where, mebibytes):
    """Writes more dirty data than the guest has memory, to several files, and nothing flushes it;
    then compares all of it."""
    block = 1 << 20
    files = [open(f"{where}/flood{number}", "w+b", buffering=0) for number in range(4)]
    for number in range(mebibytes):
        files[number % 4].write(random.Random(number).randbytes(block))
    for file in files:
        file.seek(0)
    for number in range(mebibytes):
        if files[number % 4].read(block) != random.Random(number).randbytes(block):
            raise RuntimeError(f"{where}: other bytes in MiB {number} than were written")
    for file in files:
        file.close()
    with open("/proc/meminfo") as table:
        return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in table}["MemTotal"]


def synchronize(where):
    directory = os.open(where, os.O_RDONLY)
    call(libc.syncfs(directory), f"syncfs {where}")
    os.close(directory)


def room(where):
    """The size of a file system in bytes."""
    found = os.statvfs(where)
    return found.f_blocks * found.f_frsize


STEPS = {step.__name__: step for step in (
    network, host, load, log_writes, mark, connect, disconnect, device_facts, command, make, attach,
    detach, check, fill, verify, remove, commit_one_by_one, flood, synchronize,
    room)}


def main(path):
    # A later mount hides the host's /tmp.
    with open(path) as file:
        steps = json.load(file)
    mount("proc", "/proc", "proc")
    mount("sys", "/sys", "sysfs")
    mount("tmp", "/tmp", "tmpfs")
    mount("run", "/run", "tmpfs")
    load(["drivers/block/nbd nbds_max=8"])
    for name, arguments in steps:
        begin = time.monotonic()
        value = STEPS[name](**arguments)
        print("@", json.dumps({"step": name, "value": value,
                               "seconds": round(time.monotonic() - begin, 2)}), flush=True)


try:
    main(sys.argv[1])
except BaseException:
    for line in traceback.format_exc().splitlines():
        print("!", line)
sys.stdout.flush()
# No unmount and no sync: data that no step made durable is lost, as in a power cut.
libc.reboot(POWER_OFF)
