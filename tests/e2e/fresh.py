#!/usr/bin/python3
"""Runs a command on a fresh machine: a minimal Debian in its own namespaces, with only Rust added.

    tests/e2e/fresh.py [--user] [--keep] [COMMAND...]
    tests/e2e/fresh.py --readme

Runs the command there in a clean clone of the last commit of this checkout: as root, or as an
ordinary user with sudo. The default command is scripts/test, as in the README. With --readme, both
commands of the README run, one after the other in one clone: first as root, and then on another
fresh machine as an ordinary user. That takes hours. The script needs root, debootstrap and the
Debian mirror of this machine's apt. The minimal system stays in $BCOW_IMAGES, or target/images.
"""

import argparse
import contextlib
import fcntl
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SUITE = "bookworm"
# The commands of the README.
README = ("scripts/try", "scripts/test")
# The ordinary user there.
USER, UID = "someone", 1000
# The place of the Rust toolchain in the guest. It is this machine's toolchain: the compiler that
# Debian 12 packages is too old.
RUST = "/opt/rust"

# The machine's first process. It makes the /dev of a machine without udev, mounts the caller's bind
# mounts, and changes the root (not by chroot: a process in a chroot cannot make a user namespace).
# Then it waits and reaps orphaned processes.
BOOT = r"""
set -e
root=$1
binds=$2
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
node() { mknod -m "$2" "$root/dev/$1" "$3" "$4" "$5"; }
node null 666 c 1 3
node zero 666 c 1 5
node full 666 c 1 7
node random 666 c 1 8
node urandom 666 c 1 9
node tty 666 c 5 0
node loop-control 660 c 10 237
for n in $(seq 0 63); do node "loop$n" 660 b 7 "$n"; done
ln -s /proc/self/fd "$root/dev/fd"
ln -s /proc/self/fd/0 "$root/dev/stdin"
ln -s /proc/self/fd/1 "$root/dev/stdout"
ln -s /proc/self/fd/2 "$root/dev/stderr"
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
while read -r from to; do
    # Not --rbind: mounts of other tests below it would live as long as this machine.
    mount --bind "$from" "$root$to"
done < "$binds"
echo fresh > /proc/sys/kernel/hostname
cd "$root"
mkdir -p old
pivot_root . old
umount -l old
rmdir old
echo booted
exec >&- 2>&-
sleep infinity &
wait $!
"""


class Machine:
    """A running system, with commands to run in its root."""

    def __init__(self, directory, binds):
        self.directory = directory
        self.root = os.path.join(directory, "root")
        if not os.path.exists(self.root):
            subprocess.run(["cp", "-a", "--reflink=auto", minimal(), self.root], check=True)
        # All machines share the downloaded packages.
        binds = {packages(): "/var/cache/apt/archives", **binds}
        listed = os.path.join(directory, "binds")
        with open(listed, "w") as out:
            for source, where in binds.items():
                out.write(f"{os.path.realpath(source)} {where}\n")
                self.mount_point(where)
        self.boot = subprocess.Popen(["unshare", "--mount", "--pid", "--uts", "--fork",
                                      "--kill-child", "sh", "-c", BOOT, "sh", self.root, listed],
                                     stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        if self.boot.stdout.readline() != b"booted\n":
            self.shut_down()
            raise AssertionError(f"the machine in {directory} did not boot")
        with open(f"/proc/{self.boot.pid}/task/{self.boot.pid}/children") as children:
            self.init = children.read().strip()

    def mount_point(self, where):
        """A directory that every user of the machine can reach."""
        os.makedirs(self.path(where), exist_ok=True)
        while (where := os.path.dirname(where)) != "/":
            os.chmod(self.path(where), os.stat(self.path(where)).st_mode | 0o111)

    def path(self, inside):
        return os.path.join(self.root, inside.lstrip("/"))

    def add_user(self):
        """Adds an ordinary user with sudo without a password."""
        for command in ("apt-get -q -y update",
                        "apt-get -q -y install --no-install-recommends sudo",
                        # The mode of a home directory after Debian's installer: private to the
                        # user.
                        f"useradd --create-home --key HOME_MODE=0700 --uid {UID} {USER}"):
            self.run(*command.split(), check=True, stdout=subprocess.DEVNULL)
        # A checkout that the machine sees below it may have made the directory before.
        os.chown(self.path(home(user=True)), UID, UID)
        with open(self.path("/etc/sudoers.d/tests"), "w") as out:
            out.write(f"{USER} ALL=(ALL) NOPASSWD: ALL\n")

    def check_out(self, user=False):
        """Clones this checkout for the user or for root; returns the path in the machine."""
        where = f"{home(user)}/bcow"
        if os.path.exists(self.path(where)):
            # This checkout itself, which the machine can see at its own path.
            where += "-clone"
        with tempfile.NamedTemporaryFile("w") as config:
            # Git otherwise refuses a checkout of another user: this process runs as root.
            config.write("[safe]\n\tdirectory = *\n")
            config.flush()
            subprocess.run(["git", "clone", "-q", "--no-hardlinks", TOP, self.path(where)],
                           check=True, env={**os.environ, "GIT_CONFIG_GLOBAL": config.name})
        if user:
            subprocess.run(["chown", "-R", f"{UID}:{UID}", self.path(where)], check=True)
        return where

    def run(self, *command, user=False, directory="/", env=None, **options):
        """Runs a command in the machine, in the environment of a new login."""
        path = f"{RUST}/bin:/usr/local/bin:/usr/bin:/bin"
        become = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--init-groups"]
        if not user:
            path += ":/usr/local/sbin:/usr/sbin:/sbin"
            become = []
        env = {"HOME": home(user), "USER": USER if user else "root", "PATH": path,
               "LANG": "C.UTF-8", **(env or {})}
        enter = ["nsenter", f"--target={self.init}", "--mount", "--pid", "--uts", *become,
                 "env", "-i", f"--chdir={directory}"]
        enter += [f"{key}={value}" for key, value in env.items()]
        return subprocess.run([*enter, *command], **{"stdin": subprocess.DEVNULL, **options})

    def shut_down(self):
        self.boot.kill()
        self.boot.wait()
        self.boot.stdout.close()


@contextlib.contextmanager
def machine(parent, binds=None, rust=None, keep=False, toolchain=True):
    """A machine for the length of a with block; `binds` are host directories that it can see."""
    directory = tempfile.mkdtemp(prefix="fresh-", dir=parent)
    fresh = None
    try:
        if toolchain:
            binds = {rust or sysroot(): RUST, **(binds or {})}
        fresh = Machine(directory, binds or {})
        yield fresh
    finally:
        if fresh:
            fresh.shut_down()
        if keep:
            print(f"fresh: the machine's root stays in {directory}", file=sys.stderr)
        else:
            # Python's rmtree recurses, and tests make trees of a thousand levels.
            subprocess.run(["rm", "-rf", "--one-file-system", directory], check=True)


def home(user):
    return f"/home/{USER}" if user else "/root"


def images():
    return os.path.abspath(os.environ.get("BCOW_IMAGES") or os.path.join(TOP, "target", "images"))


def packages():
    """The directory of downloaded packages. It is not that of the real image, whose maker may run
    at the same time."""
    directory = os.path.join(images(), f"minimal-{SUITE}-debs")
    os.makedirs(os.path.join(directory, "partial"), exist_ok=True)
    return directory


def sysroot():
    """The directory of the Rust compiler in use."""
    return subprocess.run(["rustc", "--print", "sysroot"], check=True, stdout=subprocess.PIPE,
                          text=True).stdout.strip()


def minimal():
    """The smallest system that debootstrap makes; the first use makes it."""
    done = os.path.join(images(), f"minimal-{SUITE}")
    os.makedirs(images(), exist_ok=True)
    with open(os.path.join(images(), "minimal.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(done):
            partial = done + ".partial"
            shutil.rmtree(partial, ignore_errors=True)
            with open(os.path.join(images(), "minimal.log"), "wb") as log:
                subprocess.run(["debootstrap", "--variant=minbase", f"--cache-dir={packages()}",
                                SUITE, partial, mirror()], check=True, stdout=log, stderr=log)
            with open(os.path.join(partial, "etc/hosts"), "w") as out:
                out.write("127.0.0.1 localhost fresh\n::1 localhost\n")
            shutil.copy("/etc/resolv.conf", os.path.join(partial, "etc/resolv.conf"))
            # No file has to survive a power cut, so dpkg need not sync.
            with open(os.path.join(partial, "etc/dpkg/dpkg.cfg.d/unsafe-io"), "w") as out:
                out.write("force-unsafe-io\n")
            # The network's own certificate authorities; ca-certificates includes them at its
            # installation.
            own = "usr/local/share/ca-certificates"
            if os.path.isdir(f"/{own}"):
                shutil.copytree(f"/{own}", os.path.join(partial, own), dirs_exist_ok=True)
            os.rename(partial, done)
    return done


def mirror():
    """The Debian mirror that make-real-image uses."""
    path = os.path.join(TOP, "tests", "images", "make-real-image")
    loader = importlib.machinery.SourceFileLoader("make_real_image", path)
    spec = importlib.util.spec_from_loader("make_real_image", loader)
    maker = importlib.util.module_from_spec(spec)
    loader.exec_module(maker)
    return maker.own_mirror()


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--user", action="store_true", help="as an ordinary user with sudo")
    parser.add_argument("--keep", action="store_true", help="leave the machine's root afterwards")
    parser.add_argument("--readme", action="store_true",
                        help="both commands of the README, as root and as an ordinary user")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("this needs root: it makes a root file system, and namespaces")
    if options.readme and (options.user or options.command):
        parser.error("--readme runs commands of its own, for both users")
    os.makedirs(os.path.join(TOP, "target"), exist_ok=True)
    users = (False, True) if options.readme else (options.user,)
    commands = [[command] for command in README] if options.readme \
        else [options.command or ["scripts/test"]]
    results = [result for user in users for result in run_all(commands, user, options.keep)]
    if options.readme:
        for command, user, seconds, code in results:
            print(f"fresh: {' '.join(command)} as {USER if user else 'root'}: "
                  f"status {code}, {seconds / 60:.0f} min")
    sys.exit(next((code for *_, code in results if code), 0))


def run_all(commands, user, keep):
    """Runs commands in one clone on one fresh machine; yields the time and the status of each."""
    # With CI set, tests that need root would fail for the user instead of being skipped.
    env = {"CI": os.environ["CI"]} if "CI" in os.environ and not user else {}
    with machine(os.path.join(TOP, "target"), keep=keep) as fresh:
        if user:
            fresh.add_user()
        directory = fresh.check_out(user)
        for command in commands:
            begin = time.monotonic()
            done = fresh.run(*command, user=user, directory=directory, env=env, stdin=None)
            yield command, user, time.monotonic() - begin, done.returncode


if __name__ == "__main__":
    main()
