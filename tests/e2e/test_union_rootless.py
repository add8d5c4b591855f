"""Writable mounts without privilege: of an ordinary user through fusermount3, and of root in a user
namespace."""

import concurrent.futures
import hashlib
import json
import os
import pwd
import re
import shutil
import stat
import subprocess
import sys
import tempfile

import subjects
import support
import syscalls
from promises import promise
from support import UNPRIVILEGED, for_everyone, read_text, run, write_file
from union import UnionCase

NEW_USER, NEW_MOUNTS = 0x10000000, 0x20000
OVERRIDE = "user.containers.override_stat"
BIG = "home/big"


def plant(top):
    """A tree with a part that the user owns."""
    subjects.plant(top)
    home = os.path.join(top, "home")
    os.mkdir(home)
    write_file(os.path.join(home, "big"), subjects.content("big", 500_000))
    write_file(os.path.join(home, "small"), b"small")
    # Symbolic links with several names, which cannot have user attributes.
    os.mkdir(os.path.join(home, "links"))
    for name in ("alone", "first", "third"):
        os.symlink(name, os.path.join(home, "links", name))
    for name, other in (("first", "second"), ("third", "fourth"), ("third", "fifth")):
        os.link(os.path.join(home, "links", name), os.path.join(home, "links", other),
                follow_symlinks=False)
    os.mkdir(os.path.join(home, "folder"))
    for name in ("one", "two"):
        write_file(os.path.join(home, "folder", name), os.fsencode(name))
    for path, folders, files in os.walk(home):
        for name in [".", *files]:
            os.chown(os.path.join(path, name), UNPRIVILEGED, UNPRIVILEGED, follow_symlinks=False)


class Rootless(UnionCase):
    plant = staticmethod(plant)
    mounts = False
    tools = ("fusermount3", "fuse-overlayfs")

    def setUp(self):
        super().setUp()
        self.give_to_ordinary_user()

    def user(self, program, *arguments):
        """Runs lines of Python as the user; returns their output."""
        here = support.reachable(os.path.dirname(os.path.abspath(__file__)))
        head = ("import os, sys, stat\nsys.dont_write_bytecode = True\n"
                f"sys.path.insert(0, {here!r})\nimport syscalls\nos.chdir({self.where!r})\n")
        return run(sys.executable, "-c", head + program, *arguments, user=UNPRIVILEGED).out.decode()

    def work(self):
        self.user("""
fd = os.open('home/big', os.O_RDWR)
os.pwrite(fd, b'written', 300_001)
os.fsync(fd)
open('home/small', 'ab').write(b' and more')
os.mkdir('home/new', 0o700)
with open('home/new/file', 'w') as file:
    file.write('new')
os.chmod('home/new/file', 0)
os.symlink('new/file', 'home/link')
os.mkfifo('home/pipe', 0o640)
os.rename('home/folder', 'home/moved')
os.unlink('home/moved/two')
os.setxattr('home/small', 'user.x', b'y')
os.utime('home/small', ns=(5, 6))
os.link('home/small', 'home/small-too')
""")

    @promise("An ordinary user mounts through `fusermount3`, and all features work as in a mount "
             "by root. The upper keeps owners, modes and devices in the attribute "
             "`user.containers.override_stat`, which podman and containers-storage read. The files "
             "on the host belong to the user who mounted. Symbolic links cannot have this "
             "attribute: a symbolic link in the upper belongs to the user who mounted.")
    def test_an_ordinary_user_changes_files_and_finds_them_again(self):
        self.mount.mount()
        self.work()
        program = ("print([oct(os.stat(n).st_mode) for n in ('home/new/file', 'home/pipe')], "
                   "[os.lstat('d2/big').st_uid, os.lstat('d2/blocks').st_uid])")
        want = "['0o100000', '0o10640'] [0, 1000]"
        self.assertEqual(self.user(program).strip(), want)
        self.mount.remount()
        self.assertEqual(self.user(program).strip(), want)
        big = bytearray(self.original(BIG))
        big[300_001:300_008] = b"written"
        self.assertEqual(self.user("import hashlib; print(hashlib.sha256(open('home/big', "
                                   "'rb').read()).hexdigest())").strip(),
                         hashlib.sha256(big).hexdigest())
        self.assertEqual(
            self.user("print(open('home/small').read(), os.stat('home/small-too').st_nlink, "
                      "os.stat('home/small').st_mtime_ns, os.getxattr('home/small', 'user.x'), "
                      "sorted(os.listdir('home/moved')))").strip(),
            "small and more 2 6 b'y' ['one']")
        # On the host the user owns every file, and an attribute holds the file's owner in the
        # mount.
        for path, folders, files in os.walk(self.upper):
            for name in folders + files:
                self.assertEqual(os.lstat(os.path.join(path, name)).st_uid, UNPRIVILEGED,
                                 os.path.join(path, name))
                names = os.listxattr(os.path.join(path, name), follow_symlinks=False)
                self.assertFalse([one for one in names if one.startswith("trusted.")])
        stored = os.path.join(self.upper, "home")

        def override(name):
            uid, gid, mode, kind = os.getxattr(os.path.join(stored, name), OVERRIDE).decode().split(
                ":")
            return int(uid), int(gid), int(mode, 8), kind

        self.assertEqual(override("new/file"), (UNPRIVILEGED, UNPRIVILEGED, 0, "file"))
        self.assertEqual(override("new"), (UNPRIVILEGED, UNPRIVILEGED, 0o700, "dir"))
        self.assertEqual(override("pipe"), (UNPRIVILEGED, UNPRIVILEGED, 0o640, "pipe"))
        self.assertTrue(stat.S_ISREG(os.lstat(os.path.join(stored, "pipe")).st_mode))
        self.assertEqual(os.lstat(os.path.join(stored, "new/file")).st_mode & 0o777, 0o600)
        self.mount.unmount()
        self.mount.check()

    def test_symbolic_links_with_several_names_work(self):
        self.mount.mount()
        show = ("print([(n, os.readlink('home/links/' + n), os.lstat('home/links/' + n).st_nlink) "
                "for n in sorted(os.listdir('home/links'))])")
        self.assertEqual(self.user("os.rename('home/links/alone', 'home/links/moved'); "
                                   "os.unlink('home/links/first')\n"
                                   "os.symlink('new', 'home/links/new'); "
                                   "os.rename('home/links/new', 'home/links/third')\n"
                                   "print(syscalls.code_of(os.rename, 'home/links/fourth', "
                                   "'home/links/other'))").strip(), "EPERM")
        for _ in range(2):
            self.assertEqual(self.user(show).strip(),
                             "[('fifth', 'third', 3), ('fourth', 'third', 3), ('moved', 'alone', "
                             "1), " "('second', 'first', 2), ('third', 'new', 1)]")
            self.mount.remount()
        self.user("import shutil; shutil.rmtree('home/links')")
        self.mount.remount()
        self.assertEqual(self.user("print(os.path.exists('home/links'))").strip(), "False")
        self.mount.unmount()
        self.mount.check()

    def test_modes_without_owner_permission_work(self):
        """Git creates its objects read-only."""
        self.mount.mount()
        program = """
os.umask(0)
fd = os.open('home/folder/object', os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o444)
os.write(fd, b'object')
os.close(fd)
os.close(os.open('home/folder/none', os.O_WRONLY | os.O_CREAT, 0))
os.mkdir('home/folder/closed', 0o555)
os.mkdir('home/folder/shut', 0)
"""
        self.user(program)
        show = ("print(open('home/folder/object').read(), *(oct(os.stat('home/folder/' + "
                "n).st_mode & 0o7777) for n in ('object', 'none', 'closed', 'shut')))")
        want = "object 0o444 0o0 0o555 0o0"
        self.assertEqual(self.user(show).strip(), want)
        self.mount.remount()
        self.assertEqual(self.user(show).strip(), want)

    def test_a_user_who_cannot_change_the_image_is_warned_with_the_line_that_can(self):
        tree = os.path.join(self.mount.directory, "tree")
        os.mkdir(tree)
        write_file(os.path.join(tree, "file"), "old")
        image = for_everyone(os.path.join(self.mount.directory, "root's.bcow"))
        arguments = ["mount", image, self.where, "--upper", self.upper]
        # The line calls the program `bcow`.
        path = {"PATH": os.path.dirname(for_everyone(support.BCOW)) + ":" + os.environ["PATH"]}

        def mount(*options):
            result = run(for_everyone(support.BCOW), *arguments, *options, user=UNPRIVILEGED)
            run(for_everyone(support.BCOW), "umount", self.where, user=UNPRIVILEGED)
            return result.err.decode()

        support.bcow("convert", f"dir:{tree}", image)
        output = mount()
        name = pwd.getpwuid(UNPRIVILEGED).pw_name
        self.assertRegex(output,
                         rf"warning: .*root's\.bcow belongs to root, and {name} cannot write to it")
        (line,) = re.findall("(unshare -rm -- .*)$", output, re.MULTILINE)
        # The user's input to the shell that the line starts.
        commands = f"echo new > {self.where}/file; echo made > {self.where}/made; exit"
        with tempfile.TemporaryFile() as typed:
            typed.write(commands.encode())
            typed.seek(0)
            run("sh", "-c", line, stdin=typed, env=path, user=UNPRIVILEGED)
        self.assertFalse(support.is_mounted(self.where))
        for name, want in (("file", "new\n"), ("made", "made\n")):
            self.assertEqual(read_text(os.path.join(self.upper, name)), want)
        self.assertEqual(mount("-o", "ro"), "")
        # An image whose root directory the user owns.
        os.chown(tree, UNPRIVILEGED, UNPRIVILEGED)
        support.bcow("convert", "--force", f"dir:{tree}", image)
        shutil.rmtree(self.upper)
        os.mkdir(self.upper)
        os.chown(self.upper, UNPRIVILEGED, UNPRIVILEGED)
        self.assertEqual(mount(), "")

    def test_operations_without_permission_are_refused(self):
        self.mount.mount()
        output = self.user("""
def code(function, *arguments):
    return syscalls.code_of(function, *arguments)
print(code(os.open, 'd0/hundred', os.O_WRONLY), code(os.chown, 'home/small', 0, 0),
      code(os.unlink, 'd0/hundred'),
      code(os.mknod, 'home/device', stat.S_IFCHR | 0o600, os.makedev(1, 3)),
      code(os.setxattr, 'home/small', 'trusted.x', b''))
""")
        self.assertEqual(output.split(), ["EACCES", "EPERM", "EACCES", "EPERM", "EPERM"])

    def test_fuse_overlayfs_reads_the_upper(self):
        """fuse-overlayfs, which rootless podman uses, shows the same tree of the upper where there
        is no partial file."""
        self.mount.mount()
        self.user("""
open('home/small', 'ab').write(b' and more')
os.mkdir('home/new', 0o700)
with open('home/new/file', 'w') as file:
    file.write('new')
os.chmod('home/new/file', 0o4750)
os.symlink('new/file', 'home/link')
os.unlink('home/folder/two')
os.unlink('home/big')
""")
        want = self.user_home(self.where)
        self.mount.unmount()
        work, seen = (os.path.join(self.mount.directory, name) for name in ("work", "seen"))
        for path in (work, seen):
            os.mkdir(path)
            os.chown(path, UNPRIVILEGED, UNPRIVILEGED)
        seen = for_everyone(seen)
        run("fuse-overlayfs", "-o", f"lowerdir={for_everyone(self.lower.tree)},"
            f"upperdir={self.upper},workdir={for_everyone(work)}", seen, user=UNPRIVILEGED)
        try:
            have = self.user_home(seen)
        finally:
            run("umount", "-l", seen)
        self.maxDiff = None
        self.assertEqual(have, want)

    def user_home(self, where):
        """The user's view of the changed part of the tree: type, mode, owner, size, link,
        content."""
        return json.loads(self.user("""
import json
seen = {}
for path, folders, files in os.walk(sys.argv[1]):
    for name in ['.', *folders, *files]:
        full = os.path.join(path, name)
        info = os.lstat(full)
        entry = [oct(info.st_mode), info.st_uid, info.st_gid]
        seen[os.path.relpath(full, sys.argv[1])] = entry
        if stat.S_ISREG(info.st_mode):
            entry += [info.st_size, open(full, 'rb').read().decode('latin-1')]
        elif stat.S_ISLNK(info.st_mode):
            entry.append(os.readlink(full))
print(json.dumps(seen))
""", os.path.join(where, "home")))


def children():
    """Child processes of this process, from any thread."""
    found = set()
    for task in os.listdir("/proc/self/task"):
        found |= set(read_text(f"/proc/self/task/{task}/children").split())
    return found


class UserNamespace(UnionCase):
    """Root of a user namespace, as in rootless podman: it mounts by itself, gives files away
    inside, and has no `trusted.` attributes."""

    mounts = False
    SHIFT = 200_000

    def inside(self, *command):
        """Runs a command as root of a new mount namespace and a new user namespace with 65536 ids
        of the host; returns its output."""
        def enter():
            syscalls.checked(syscalls.libc.unshare(NEW_USER | NEW_MOUNTS))
            os.write(ready[1], b"x")
            os.read(mapped[0], 1)
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)

        ready, mapped = os.pipe(), os.pipe()
        with tempfile.TemporaryFile() as out:
            def start():
                return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out,
                                        stderr=subprocess.STDOUT, preexec_fn=enter)

            # Popen returns when the command runs; the command waits for its ids.
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                before = children()
                started = pool.submit(start)
                os.read(ready[0], 1)
                (child,) = children() - before
                for kind in ("uid_map", "gid_map"):
                    write_file(f"/proc/{child}/{kind}", f"0 {self.SHIFT} 65536")
                os.write(mapped[1], b"x")
                code = started.result().wait(timeout=120)
            for fd in (*ready, *mapped):
                os.close(fd)
            out.seek(0)
            output = out.read().decode()
        self.assertEqual(code, 0, output)
        return output

    def test_root_of_a_user_namespace(self):
        lower, directory = for_everyone(self.lower.image), for_everyone(self.mount.directory)
        # The image's owners are ids inside the namespace; the files on the host belong to ids of
        # its range.
        for path in (self.where, self.upper):
            os.chown(path, self.SHIFT, self.SHIFT)
        script = os.path.join(directory, "inside")
        where, upper = os.path.join(directory, "mnt"), os.path.join(directory, "upper")
        with open(script, "w") as file:
            file.write(f"""set -e
{for_everyone(support.BCOW)} mount {lower} {where} --upper {upper}
cd {where}
chown 1000:1001 d0/hundred
echo more >> d0/hundred
# The write takes set-user-ID away: only root outside may keep it.
chmod 4711 d2/big
printf x | dd of=d2/big bs=1 seek=500000 conv=notrunc status=none
mkdir made; chown 1001 made
rm -r many
mv d1 d9
mv dangling dangling-moved; mv fifo fifo-moved; chmod 600 fifo-moved
touch -h dangling-moved; rm link
cd /
{for_everyone(support.BCOW)} umount {where}
{for_everyone(support.BCOW)} mount {lower} {where} --upper {upper}
cd {where}
stat -c '%n %u %g %a' d0/hundred d2/big made d9/odd
ls
cd /
{for_everyone(support.BCOW)} umount {where}
""")
        output = self.inside("sh", script).split("\n")
        self.assertEqual(output[:4], ["d0/hundred 1000 1001 644", "d2/big 0 0 711",
                                      "made 1001 0 755", "d9/odd 0 0 644"])
        self.assertNotIn("many", output)
        stored = os.stat(os.path.join(self.upper, "d0/hundred"))
        self.assertEqual((stored.st_uid, stored.st_gid), (self.SHIFT + 1000, self.SHIFT + 1001))
        for path, folders, files in os.walk(self.upper):
            for name in folders + files:
                names = os.listxattr(os.path.join(path, name), follow_symlinks=False)
                self.assertFalse([one for one in names if one.startswith("trusted.")])
