"""A virtual machine without acceleration (qemu's tcg): Debian's kernel, busybox, and disks on
virtio-blk."""

import functools
import os
import re
import shutil
import subprocess
import tempfile

import support
from support import read_bytes, write_file

HERE = os.path.join(support.TOP, "tests", "e2e", "guest")
MODULES = ("virtio_pci", "virtio_blk", "ext4", "xfs")
TOOLS = ("mkfs.ext4", "fsck.ext4", "mkfs.xfs", "xfs_repair")


def need():
    support.need("qemu-system-x86_64", "busybox", "cpio", "apt-get", "dpkg-deb", *TOOLS)


@functools.cache
def kernel():
    done = subprocess.run([os.path.join(support.TOP, "tests", "images", "fetch-kernel")],
                          stdout=subprocess.PIPE)
    if done.returncode:
        raise AssertionError(f"fetch-kernel ended with {done.returncode}")
    return done.stdout.decode().strip()


def modules(directory):
    """The files of the modules and of their dependencies, in load order."""
    files = {name[:-3].replace("-", "_"): os.path.join(place, name)
             for place, _, names in os.walk(directory) for name in names if name.endswith(".ko")}
    order = []

    def visit(name):
        # A module without a file is built into the kernel.
        if name not in files or files[name] in order:
            return
        wants = re.search(rb"\0depends=([^\0]*)\0", read_bytes(files[name]))
        for other in wants.group(1).decode().split(",") if wants else []:
            visit(other.replace("-", "_"))
        order.append(files[name])

    for name in MODULES:
        visit(name)
    return order


@functools.cache
def initramfs():
    """The first root file system: busybox, the file systems' tools with their libraries, modules,
    and init.sh."""
    path = os.path.join(support.WORK, "initramfs")
    with tempfile.TemporaryDirectory(prefix="initramfs-", dir=support.WORK) as root:
        def put(source, where):
            where = root + where
            os.makedirs(os.path.dirname(where), exist_ok=True)
            shutil.copyfile(source, where)
            os.chmod(where, 0o755)

        put(os.path.join(HERE, "init.sh"), "/init")
        for tool in ("busybox", *TOOLS):
            program = shutil.which(tool)
            put(program, f"/bin/{tool}")
            # A program without libraries makes ldd fail.
            for library in re.findall(r"(/\S+) \(0x",
                                      support.run("ldd", program, check=False).out.decode()):
                put(library, library)
        order = modules(os.path.join(kernel(), "modules"))
        for module in order:
            put(module, "/modules/" + os.path.basename(module))
        with open(f"{root}/modules/order", "w") as file:
            file.writelines(os.path.basename(module) + "\n" for module in order)
        with open(path, "wb"):
            pack(root, path)
    return path


def pack(root, path):
    """Appends a cpio archive of a directory to a file."""
    with open(path, "ab") as out:
        names = subprocess.run(["find", ".", "-print0"], cwd=root, stdout=subprocess.PIPE,
                               check=True).stdout
        subprocess.run(["cpio", "--quiet", "-0", "-o", "-H", "newc"], cwd=root, input=names,
                       stdout=out, check=True)


def boot(mode, disks, timeout=240):
    """Boots with the disks, given as {file system: NBD address}; returns the guest's output for
    each."""
    lines = start(f"mode={mode} disks={','.join(disks)}", disks.values(), initramfs(), timeout)
    if len(lines) != len(disks):
        raise AssertionError(f"the machine answered for {len(lines)} of {len(disks)} disks")
    return lines


def boot_root(disk, script, files=(), timeout=300):
    """Boots with the ext4 of a disk, given as NBD address, as the writable root. The script of a
    shell runs there as the first process, with the files in /run; returns its lines that begin with
    `@ `."""
    with tempfile.TemporaryDirectory(prefix="vm-", dir=support.WORK) as scratch:
        run = os.path.join(scratch, "more", "run")
        os.makedirs(run)
        for file in files:
            shutil.copy(file, run)
        write_file(os.path.join(run, "script"), script)
        # The kernel unpacks one archive after the other.
        both = os.path.join(scratch, "initramfs")
        shutil.copy(initramfs(), both)
        pack(os.path.dirname(run), both)
        return start("mode=root", [disk], both, timeout)


def start(words, addresses, initrd, timeout):
    command = ["qemu-system-x86_64", "-accel", "tcg", "-cpu", "max", "-m", "256", "-nodefaults",
               "-no-user-config", "-display", "none", "-serial", "stdio", "-no-reboot", "-kernel",
               os.path.join(kernel(), "vmlinuz"), "-initrd", initrd, "-append",
               f"console=ttyS0 quiet panic=-1 {words}"]
    for address in addresses:
        command += ["-drive", f"file={address},format=raw,if=virtio,discard=unmap,cache=none"]
    result = support.run(*command, timeout=timeout)
    said = [line.strip() for line in result.out.decode(errors="replace").splitlines()]
    lines = [line[2:] for line in said if line.startswith("@ ")]
    if lines[-1:] != ["done"]:
        raise AssertionError(f"the machine did not do `{words}`:\n" +
                             "\n".join(said[-60:]) + result.err.decode(errors="replace"))
    return lines[:-1]
