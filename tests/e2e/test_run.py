"""bcow run: a program in the root file system of an image, of root and of an ordinary user."""

import contextlib
import json
import os
import signal
import stat
import subprocess
import tempfile
import unittest.mock

import support
from support import BCOW, UNPRIVILEGED, bcow, for_everyone, need, read_text, until

TIMEOUT = 120


class Run(support.Scratch):
    # The user of the commands; None is root.
    user = None

    @classmethod
    def setUpClass(cls):
        need("unshare", root=True, fuse=True)
        super().setUpClass()
        cls.use_image("small")
        cls.image = cls.path("image.bcow")
        bcow("convert", cls.source, cls.image, timeout=TIMEOUT)

    def setUp(self):
        place = tempfile.mkdtemp(prefix="run-", dir=self.directory)
        if self.user is not None:
            os.chown(place, self.user, self.user)
        self.place = for_everyone(place)
        self.enterContext(unittest.mock.patch.dict(os.environ, TMPDIR=self.place))

    def at(self, name):
        return os.path.join(self.place, name)

    def bcow(self, *words, **options):
        return bcow(*words, user=self.user, timeout=TIMEOUT, cwd=self.place, **options)

    def run_in(self, *words, code=0):
        """Runs a program; returns its output."""
        ended = self.bcow("run", for_everyone(self.image), *words, check=False)
        self.assertEqual(ended.code, code, str(ended))
        self.assertEqual([name for name in os.listdir(self.place) if name.startswith("bcow-run")],
                         [])
        return ended.out.decode()

    def test_a_program_sees_the_image_and_nothing_else(self):
        self.assertEqual(self.run_in("cat", "/etc/debian_version"),
                         read_text(os.path.join(self.rootfs, "etc/debian_version")))
        self.assertEqual(self.run_in("id", "-u"), "0\n")
        self.assertEqual(self.run_in("test", "-e", self.place, code=1), "")
        script = ("echo x > /dev/null && head -c 4 /dev/urandom | wc -c && "
                  "head -c 3 /dev/zero | wc -c && ls -d /dev/pts/ptmx /dev/shm && "
                  "ls /proc | grep -c '^[0-9]' && cat /etc/resolv.conf")
        lines = self.run_in("sh", "-c", script).splitlines()
        self.assertEqual(lines[:4], ["4", "3", "/dev/pts/ptmx", "/dev/shm"])
        # Its own processes: the first one, and those of the shell.
        self.assertLess(int(lines[4]), 7)
        self.assertEqual(lines[5:], read_text("/etc/resolv.conf").splitlines())

    def test_changes_are_kept_in_an_upper_only(self):
        self.run_in("sh", "-c", "echo lost > /etc/motd; rm /etc/debian_version")
        self.assertNotEqual(self.run_in("cat", "/etc/motd"), "lost\n")
        self.assertEqual(os.listdir(self.place), [])
        upper = self.at("upper")
        self.run_in("--upper", upper, "sh", "-c", "echo kept > /etc/motd; exit 5", code=5)
        self.assertEqual(self.run_in("--upper", upper, "cat", "/etc/motd"), "kept\n")
        found = self.bcow("diff", for_everyone(self.image), "--upper", upper, check=False)
        self.assertIn("M\t/etc/motd\t", found.out.decode())
        self.bcow("fsck", upper)
        # Of an upper and of a snapshot.
        self.bcow("snapshot", upper, "one")
        self.run_in("--upper", upper, "sh", "-c", "echo two > /etc/motd")
        self.assertEqual(self.run_in("--fork", f"{upper}@one", "cat", "/etc/motd"), "kept\n")
        self.assertEqual(self.run_in("--fork", upper, "sh", "-c",
                                     "cat /etc/motd; echo three > /etc/motd"), "two\n")
        forked = self.at("forked")
        self.run_in("--fork", upper, "--upper", forked, "sh", "-c", "echo four > /etc/motd")
        self.assertEqual(self.run_in("--upper", forked, "cat", "/etc/motd"), "four\n")
        self.assertEqual(self.run_in("--upper", upper, "cat", "/etc/motd"), "two\n")

    def test_statuses_are_those_of_programs(self):
        self.run_in("sh", "-c", "exit 3", code=3)
        self.run_in("sh", "-c", "kill -9 $$", code=137)
        self.run_in("/no/such/program", code=127)
        self.run_in("/etc", code=126)
        missing = self.bcow("run", "missing.bcow", "true", check=False)
        self.assertEqual(missing.code, 1)
        self.assertIn("missing.bcow", missing.err.decode())
        # An upper that another mount uses.
        upper, where = self.at("upper"), self.at("mnt")
        self.bcow("run", for_everyone(self.image), "--upper", upper, "true")
        os.mkdir(where)
        if self.user is not None:
            os.chown(where, self.user, self.user)
        self.bcow("mount", for_everyone(self.image), where, "--upper", upper)
        self.addCleanup(subprocess.run, ["umount", "-l", where], stderr=subprocess.DEVNULL)
        self.run_in("--upper", upper, "true", code=1)
        self.bcow("umount", where)

    def started(self, *words):
        """The process of a program that runs until a signal ends it. In the background of a shell,
        SIGINT would be ignored."""
        options = {} if self.user is None else {"user": self.user, "group": self.user,
                                                "extra_groups": []}
        process = subprocess.Popen([for_everyone(BCOW), "run", for_everyone(self.image), *words,
                                    "sh", "-c", "echo $$; echo begun > /begun; sleep 1000"],
                                   stdout=subprocess.PIPE, start_new_session=True,
                                   preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                                   **options)
        self.addCleanup(process.kill)
        self.addCleanup(process.stdout.close)
        self.assertGreater(int(process.stdout.readline()), 1)
        # A signal between the fork and the execution of `sleep` would be lost.
        until(lambda: self.sleeps_in(process.pid), "the program sleeps")
        return process

    @staticmethod
    def sleeps_in(group):
        """Whether a process of this process group executes `sleep`."""
        for one in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                name, _, fields = read_text(f"/proc/{one}/stat").partition("(")[2].rpartition(")")
                if name == "sleep" and int(fields.split()[2]) == group:
                    return True
        return False

    def test_signals_end_the_program_and_unmount(self):
        upper = self.at("upper")
        process = self.started("--upper", upper)
        until(lambda: os.path.exists(os.path.join(upper, "begun")), "the file is written")
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(TIMEOUT), 137)
        self.assertEqual(os.listdir(self.place), ["upper"])
        self.assertEqual(self.run_in("--upper", upper, "cat", "/begun"), "begun\n")
        # Ctrl-C: all processes of the terminal get the signal, and bcow waits for the program.
        process = self.started()
        os.killpg(process.pid, signal.SIGINT)
        self.assertEqual(process.wait(TIMEOUT), 130)
        self.assertEqual(os.listdir(self.place), ["upper"])


class RunByAnOrdinaryUser(Run):
    user = UNPRIVILEGED

    def test_there_is_no_other_user(self):
        ended = self.bcow("run", for_everyone(self.image), "--user", "www-data", "id", check=False)
        self.assertNotEqual(ended.code, 0)
        self.run_in("--upper", self.at("upper"), "touch", "/new")
        self.assertEqual(os.stat(self.at("upper/new")).st_uid, self.user)


class Configuration(support.Scratch):
    """What the configuration of an image says."""

    def setUp(self):
        need("unshare", "umoci", root=True, fuse=True)
        self.use_image("small")
        self.layout, self.image = self.path("layout"), self.path("image.bcow")
        support.run("skopeo", "--insecure-policy", "copy", self.source, f"oci:{self.layout}:tag")
        support.run("umoci", "config", "--image", f"{self.layout}:tag",
                    "--config.entrypoint", "sh", "--config.entrypoint", "-c",
                    "--config.cmd", "echo $A; pwd; id -un; echo $HOME $PATH",
                    "--config.env", "A=of the image", "--config.workingdir", "/srv/new",
                    "--config.user", "www-data")
        bcow("convert", f"oci:{self.layout}:tag", self.image, timeout=TIMEOUT)

    def shown(self, *words):
        return bcow("run", *words, timeout=TIMEOUT).out.decode().splitlines()

    def test_the_program_is_that_of_the_image(self):
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        self.assertEqual(self.shown(self.image)[:3], ["of the image", "/srv/new", "www-data"])
        self.assertTrue(self.shown(self.image)[3].startswith("/var/www /"))
        own = self.shown("-e", "A=own", "-w", "/tmp", "-u", "0:0", "-e", f"PATH={path}", "-it",
                         "--rm", self.image)
        self.assertEqual(own, ["own", "/tmp", "root", f"/root {path}"])
        # Behind the entry point.
        self.assertEqual(self.shown(self.image, "echo $1-$0", "a", "--user"), ["--user-a"])
        group = self.shown("-u", "www-data:mail", self.image, "id -gn")
        self.assertEqual(group, ["mail"])
        refused = bcow("run", "-u", "missing", self.image, check=False, timeout=TIMEOUT)
        self.assertIn("has no user", refused.err.decode())
        # Without the program of the image.
        shell = support.run(BCOW, "run", "--shell", self.image, stdin=subprocess.DEVNULL)
        self.assertEqual(shell.out, b"")
        document = json.loads(bcow("inspect", self.image, "--json").out)
        self.assertEqual(document["metadata"]["config"]["config"]["User"], "www-data")
        text = bcow("inspect", self.image).out.decode()
        for line in (r'entrypoint +\["sh","-c"\]', "command +.*id -un", "user +www-data",
                     "directory +/srv/new", "environment +PATH=", "A=of the image"):
            self.assertRegex(text, rf"(?m)^ +{line}")

    def test_disks_are_refused(self):
        disk = self.path("disk.bcow")
        bcow("create", disk, "1M")
        support.assert_refused(self, bcow("run", disk, check=False), "it is a disk")
        self.assertFalse(stat.S_ISDIR(os.stat(disk).st_mode))
