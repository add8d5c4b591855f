"""The commands of docs/runbook.md, run on the trouble that each section is about; and the run of
README.md.

A test makes the trouble of a section, then runs the commands of the section's code blocks in their
order, and compares their output with that of the page. `/srv` of the page is a directory of the
test, `registry.example.org` a server of the test. In an output, `...` is any text, and a number is
any number; a number with four digits or more is the same one in the whole section, also in
commands. The units of sizes and times are any. White space counts as one space. A command without
output on the page must succeed.
"""

import base64
import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import unittest

import support
import test_remote
import web
from support import (BCOW, TOP, UNPRIVILEGED, bcow, blob_path, digest_in, flip, need, overwrite,
                     read_bytes, read_text, run, sparse_file, until, write_file)

TIMEOUT = 60
NUMBER = r"0x[0-9a-f]+|\d[\d,.]*\d|\d"
QUANTITY = r"\d[\d,.]* (?:[KMG]iB|B|[num]s)\b"


def sections(page=os.path.join("docs", "runbook.md")):
    """The commands of each section of a page, with their outputs."""
    found = {}
    for text in re.split(r"^## ", read_text(os.path.join(TOP, page)), flags=re.MULTILINE)[1:]:
        title, _, body = text.partition("\n")
        steps = []
        for block in re.findall(r"^```\n(.*?)^```$", body, re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", "").splitlines():
                if line[:2] in ("# ", "$ "):
                    steps.append([line[2:], ""])
                elif steps:
                    steps[-1][1] += line + "\n"
        found[title] = steps
    return found


def pattern(text, names, numbers):
    """The regular expression of an output of the page, and the numbers that are its groups."""
    tokens = "|".join([*map(re.escape, ["...", *names]), QUANTITY, NUMBER])
    parts, groups = [], []
    for part in re.split(f"({tokens})", " ".join(text.split())):
        if part == "...":
            parts.append(".*?")
        elif part in names or part in numbers:
            parts.append(re.escape(names.get(part) or numbers[part]))
        elif re.fullmatch(QUANTITY, part):
            parts.append(QUANTITY)
        elif re.fullmatch(NUMBER, part):
            parts.append(f"({NUMBER})")
            groups.append(part)
        else:
            parts.append(re.escape(part))
    # An omission may be empty.
    return "".join(parts).replace(r"\ .*?\ ", r"\ (?:.*?\ )?"), groups


class SlowServer(test_remote.Server):
    """A web server that answers some requests late."""

    slow_requests = 0
    pause = property(lambda self: self.next_pause(), lambda self, _: None)

    def next_pause(self):
        with self.lock:
            self.slow_requests -= 1
            return 3 if self.slow_requests >= 0 else 0


SECRET = base64.b64encode(b"ops:secret").decode()


class Registry(web.Handler):
    """A registry with the images of a layout, for one user."""

    def do_GET(self):
        name = self.path.rpartition("/")[2]
        layout = self.server.layout
        try:
            digest = name if ":" in name else digest_in(layout, name)
            data = read_bytes(blob_path(layout, digest))
        except (OSError, ValueError):
            data = None
        if self.headers.get("Authorization") != f"Basic {SECRET}":
            self.answer(401, b"", {"WWW-Authenticate": 'Basic realm="registry"'})
        elif data is None:
            self.answer(404, b"")
        elif "/manifests/" in self.path:
            self.answer(200, data, {"Content-Type": json.loads(data)["mediaType"]})
        else:
            self.send_content(data)

    do_HEAD = do_GET


class Runbook(support.Scratch):
    @classmethod
    def setUpClass(cls):
        need("mkfs.ext4", "findmnt", "openssl", root=True, fuse=True)
        super().setUpClass()
        test_remote.make_certificates(cls.directory)
        cls.context = web.tls(cls.directory)
        cls.tree = cls.path("tree")
        for name in ("etc", "usr/bin", "var/lib", "var/log"):
            os.makedirs(os.path.join(cls.tree, name))
        write_file(os.path.join(cls.tree, "etc/motd"), "Welcome.\n")
        write_file(os.path.join(cls.tree, "var/lib/table"), os.urandom(3 << 20))
        write_file(os.path.join(cls.tree, "var/log/dpkg.log"), b"installed\n" * 10000)
        cls.original = cls.path("original.bcow")
        bcow("convert", f"dir:{cls.tree}", cls.original, timeout=TIMEOUT)
        cls.bin = cls.path("bin")
        os.mkdir(cls.bin)
        for program in ("bcow", "bcow-snapshotter"):
            os.symlink(os.path.join(os.path.dirname(BCOW), program), os.path.join(cls.bin, program))

    def setUp(self):
        self.srv = tempfile.mkdtemp(prefix="srv-", dir=self.directory)
        os.chmod(self.srv, 0o755)
        self.addCleanup(self.end_everything)
        self.environment = {"PATH": self.bin + os.pathsep + os.environ["PATH"],
                            "SSL_CERT_FILE": self.path("ca.pem"), "BCOW_CACHE": self.at("cache"),
                            "NO_PROXY": "localhost", "no_proxy": "localhost"}
        shutil.copy(self.original, self.at("debian.bcow"))
        os.mkdir(self.at("mnt"))

    def at(self, *names):
        return os.path.join(self.srv, *names)

    def end_everything(self):
        for service in self.services():
            if service["pid"]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(service["pid"], signal.SIGKILL)
        with open("/proc/self/mounts") as table:
            places = [line.split()[1] for line in table]
        for place in reversed(places):
            if place.startswith(self.srv + "/"):
                subprocess.run(["umount", "-l", place], timeout=TIMEOUT)

    def services(self):
        found = json.loads(bcow("ps", "--json", timeout=TIMEOUT).out)["services"]
        return [one for one in found if any(at.startswith(self.srv) for at in one["at"])]

    def bcow(self, *arguments, **options):
        return bcow(*arguments, env=self.environment, timeout=TIMEOUT, **options)

    def mount(self, *options, image=None, upper=True):
        upper = ["--upper", self.at("upper")] if upper else []
        self.bcow("mount", *options, image or self.at("debian.bcow"), self.at("mnt"), *upper)
        return self.services()[0]["pid"]

    def shell(self, command):
        result = run("sh", "-c", command, check=False, env=self.environment, cwd=self.srv,
                     timeout=TIMEOUT)
        return result.code, (result.out + result.err).decode(errors="replace")

    def follow(self, title, **others):
        """Runs the commands of a section, and compares their outputs with those of the page. The
        others are names of servers and values of the page, with what replaces them."""
        names = {"/srv": self.srv}
        for name, value in others.items():
            names[name if name.isupper() else f"{name}.example.org"] = value
        steps = sections()[title]
        self.assertGreaterEqual(len(steps), 2, "a command for the cause, and one for the cure")
        self.run_steps(steps, names)

    def run_steps(self, steps, names):
        numbers = {}
        for command, expected in steps:
            tokens = "|".join(map(re.escape, names)) + r"|\d{4,}"
            command = re.sub(tokens, lambda found: {**numbers, **names}.get(found[0], found[0]),
                             command)
            code, output = self.shell(command)
            if not expected:
                self.assertEqual(code, 0, f"{command}\n{output}")
                continue
            wanted, groups = pattern(expected, names, numbers)
            found = re.search(wanted, " ".join(output.split()))
            self.assertTrue(found, f"{command}\n{output}is not\n{expected}")
            for number, actual in zip(groups, found.groups()):
                if number.isdigit() and len(number) > 3:
                    numbers.setdefault(number, actual)

    def program(self, *command, **options):
        """Runs a program until the test ends."""
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL, **options)
        self.addCleanup(lambda: (process.kill(), process.wait(TIMEOUT)))
        return process

    def backup(self):
        os.mkdir(self.at("backup"))
        shutil.copy(self.original, self.at("backup", "debian.bcow"))

    def assert_mounted(self):
        self.assertEqual(read_text(self.at("mnt/etc/motd")), "Welcome.\n")

    def small_file_system(self, where, mib, kind="tmpfs"):
        os.makedirs(where)
        if kind == "tmpfs":
            run("mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", where)
            return None
        backing = self.at(f"{os.path.basename(where)}.ext4")
        sparse_file(backing, mib << 20)
        run("mkfs.ext4", "-q", "-F", backing)
        run("mount", "-o", "loop", backing, where)
        return backing

    def fill(self, name):
        """Writes into a file of the mount until there is no space."""
        with self.assertRaises(OSError) as failed, open(self.at("mnt", name), "wb") as file:
            for _ in range(1000):
                file.write(os.urandom(1 << 16))
                file.flush()
        self.assertEqual(failed.exception.errno, errno.ENOSPC)

    def test_a_mount_hangs(self):
        pid = self.mount()
        support.stop(pid)
        until(lambda: self.services()[0]["state"] == "stopped", "the process is stopped")
        self.follow("A mount hangs")
        self.assert_mounted()

    def test_error_from_one_file(self):
        self.backup()
        self.damage(self.at("debian.bcow"))
        self.mount(upper=False)
        with self.assertRaises(OSError):
            read_bytes(self.at("mnt/var/lib/table"))
        self.follow("A program gets an I/O error from one file")
        self.assertEqual(read_bytes(self.at("mnt/var/lib/table")),
                         read_bytes(os.path.join(self.tree, "var/lib/table")))

    def damage(self, path):
        """Changes a byte in the content of the large file: random bytes do not compress, so they
        are in the image as they are."""
        wanted = read_bytes(os.path.join(self.tree, "var/lib/table"))[2 << 20:][:64]
        flip(path, read_bytes(path).index(wanted))

    def test_full_disk(self):
        self.small_file_system(self.at("upper"), 2)
        self.mount()
        self.fill("var/log/app.log")
        self.follow("No space: the disk of the upper is full")
        write_file(self.at("mnt/etc/new"), bytes(1000))

    def test_limit_of_the_upper(self):
        self.mount("--size-limit", "1M")
        self.fill("var/log/app.log")
        self.follow("No space: the limit of the upper is reached")
        write_file(self.at("mnt/etc/new"), bytes(2 << 20))

    def test_directory_for_temporary_files(self):
        self.small_file_system(self.at("tmp"), 1)
        self.environment["TMPDIR"] = self.at("tmp")
        self.bcow("export", self.original, "--to", f"oci-archive:{self.at('image.tar')}:tag")
        run("gzip", self.at("image.tar"))
        self.follow("No space: the directory for temporary files is full")
        self.bcow("diff", "--content", self.original, self.at("new.bcow"))

    def test_cache(self):
        with self.web_server() as server:
            self.bcow("cache", "warm", server.url("debian.bcow"))
            self.follow("No space: the cache of remote images is too large",
                        registry=self.host(server))
            self.assertLess(self.stored(self.at("cache")), 1 << 20)

    def stored(self, directory):
        return sum(os.lstat(os.path.join(directory, name)).st_blocks * 512
                   for name in os.listdir(directory))

    def test_dead_process(self):
        pid = self.mount()
        write_file(self.at("mnt/etc/new"), b"new")
        os.sync()
        os.kill(pid, signal.SIGKILL)
        until(lambda: self.listed_states() == ["dead"], "the mount is dead")
        self.follow("The process of a mount has died")
        self.assert_mounted()
        self.assertEqual(read_bytes(self.at("mnt/etc/new")), b"new")

    def listed_states(self):
        return [service["state"] for service in self.services()]

    def test_mount_in_use(self):
        self.mount()
        self.program("sleep", "600", cwd=self.at("mnt/etc"))
        self.follow("A mount cannot be unmounted")
        self.assertFalse(support.is_mounted(self.at("mnt")))

    def test_replaced_image(self):
        self.mount(upper=False)
        shutil.copy(self.original, self.at("new.bcow"))
        os.rename(self.at("new.bcow"), self.at("debian.bcow"))
        self.follow("Which image a mount shows, and whether it was replaced")
        self.assert_mounted()
        code, output = self.shell(f"bcow stats {self.at('mnt')}")
        self.assertNotIn("replaced", output)

    def test_growing_upper(self):
        self.mount()
        write_file(self.at("mnt/var/log/app.log"), os.urandom(2 << 20))
        overwrite(self.at("mnt/var/lib/table"), 1 << 20, b"changed")
        self.follow("The upper grows")
        self.assertFalse(os.path.exists(self.at("mnt/var/log/app.log")))

    def test_slow_mount(self):
        self.mount("--cache-size", "1M", upper=False)
        # Every read decodes, because the blocks do not fit into the cache.
        path = self.at("mnt/var/lib/table")
        self.program("sh", "-c", f"while :; do dd if={path} of=/dev/null bs=64k iflag=direct; done")
        self.follow("A mount is slow")
        self.assert_mounted()

    def test_slow_server(self):
        with self.web_server() as server:
            self.mount(image=server.url("debian.bcow"), upper=False)
            server.slow_requests = 3
            self.program("cat", self.at("mnt/var/lib/table"))
            until(lambda: "1 read, " in self.shell(f"bcow stats {self.at('mnt')}")[1], "it waits")
            self.follow("A mount of a remote image is slow", registry=self.host(server))

    def test_permission(self):
        self.mount(upper=False)
        self.assertNotEqual(self.as_user("cat", self.at("mnt/etc/motd")).code, 0)
        self.follow("Permission denied")
        self.as_user("cat", self.at("mnt/etc/motd"), check=True)

    def as_user(self, *command, check=False):
        return run(*command, user=UNPRIVILEGED, check=check, timeout=TIMEOUT)

    def test_owner(self):
        self.mount("-o", "allow_other", upper=False)
        self.follow("Files have the wrong owner")
        self.assertEqual(os.stat(self.at("mnt/var/lib/table")).st_uid, 100000)

    def test_refused_image(self):
        self.backup()
        os.truncate(self.at("debian.bcow"), 1 << 20)
        self.follow("An image is refused")
        self.mount(upper=False)
        self.assert_mounted()

    def test_registry_does_not_answer(self):
        found = json.loads(self.bcow("inspect", "--json", self.original).out)
        with self.web_server() as server:
            self.follow("A server or registry does not answer", mirror=self.host(server),
                        registry=f"localhost:{web.free_port()}", HEX=found["merkle"]["root"])
            self.assert_mounted()

    def test_registry_denies_access(self):
        with web.WebServer(Registry, self.context) as server:
            server.layout = self.at("layout")
            self.bcow("convert", f"dir:{self.tree}", f"oci:{server.layout}:12")
            host = self.host(server)
            auth = {"auths": {host: {"auth": SECRET}}}
            write_file(self.at("auth.json"), json.dumps(auth))
            self.follow("A registry denies access", registry=host)

    def test_power_cut(self):
        """The disk of the upper is copied while a mount uses it: a power cut leaves such a disk."""
        backing = self.small_file_system(self.at("upper"), 64, "ext4")
        os.rmdir(self.at("upper/lost+found"))
        pid = self.mount()
        synced = self.at("mnt/etc/synced")
        with open(synced, "wb") as file:
            file.write(b"synced")
            file.flush()
            os.fsync(file.fileno())
        overwrite(self.at("mnt/var/lib/table"), 4096, b"not synced")
        shutil.copy(backing, self.at("cut.ext4"))
        os.kill(pid, signal.SIGKILL)
        run("umount", "-l", self.at("mnt"))
        run("umount", "-l", self.at("upper"))
        run("mount", "-o", "loop", self.at("cut.ext4"), self.at("upper"))
        self.follow("After a power cut")
        self.assertEqual(read_bytes(synced), b"synced")

    def test_snapshotter(self):
        running = self.program("bcow-snapshotter", "--root", self.at("snapshots"), "--socket",
                               self.at("other.sock"), env={**os.environ, **self.environment})
        until(lambda: os.path.exists(self.at("other.sock")), "the other one serves")
        self.follow("bcow-snapshotter does not start")
        self.assertEqual(running.wait(TIMEOUT), 0)

    def test_the_run_of_the_readme(self):
        layout, tag = support.image("small")
        os.rmdir(self.at("mnt"))
        self.run_steps(sections("README.md")["One run"],
                       {"oci:target/images/small:small": f"oci:{layout}:{tag}"})

    def test_each_section_has_a_test(self):
        followed = re.findall(r'self\.follow\("([^"]+)"', read_text(__file__))
        self.assertEqual(sorted(followed), sorted(sections()))

    def web_server(self):
        return SlowServer(self.at(), self.context)

    def host(self, server):
        return f"localhost:{server.server_address[1]}"


if __name__ == "__main__":
    unittest.main()
