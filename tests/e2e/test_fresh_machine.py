"""The README's commands on a fresh machine, as root and as an ordinary user with sudo."""

import json
import os
import re
import shutil
import subprocess
import tempfile
import unittest

import fresh
import support
from support import BCOW, TOP, WORK, need, write_file

# Fewer rounds for random searches, which depend neither on the user nor on the machine; `cargo
# test` has done them all.
ROUNDS = {"PROPTEST_CASES": "8", "BCOW_KILLS": "20"}
# The parts of long programs that run here: the rest works in memory.
PARTS = {
    "bcow/stress (test)": ["kill::", "operations::"],
    # Cargo has no crates there, whose licences could be read.
    "bcow-testkit/house (test)": ["--skip", "dependencies::"],
}


def test_programs():
    """The executables of all tests of the workspace, with their packages' directories, from cargo's
    list."""
    listed = os.environ.get("BCOW_TESTS")
    if not listed:
        support.missing("no list of test programs in BCOW_TESTS; scripts/test makes one")
    programs = {}
    with open(listed) as lines:
        for message in map(json.loads, lines):
            if message.get("executable") and message["profile"]["test"]:
                package = os.path.dirname(message["manifest_path"])
                target = message["target"]
                name = f"{os.path.basename(package)}/{target['name']} ({target['kind'][0]})"
                programs[name] = (message["executable"], package)
    return programs


class Setup(unittest.TestCase):
    """What scripts/setup says on a machine that it changes nothing of."""

    def test_an_old_rust_is_refused_with_advice(self):
        need(root=True)
        for version, said in (("1.65.0", "is of Rust 1.65.0, and bcow needs 1"),
                              (None, "there is no cargo; bcow needs Rust 1")):
            with self.subTest(version=version), tempfile.TemporaryDirectory() as home:
                tools = os.path.join(home, ".cargo", "bin")
                os.makedirs(tools)
                for tool in ("cargo", "rustc") if version else ():
                    path = os.path.join(tools, tool)
                    write_file(path, f"#!/bin/sh\necho '{tool} {version} (897e37553 2022-11-02)'\n")
                    os.chmod(path, 0o755)
                # Debian's directories alone, without a Rust of this machine.
                done = subprocess.run(["scripts/setup", "try"], cwd=TOP, stdin=subprocess.DEVNULL,
                                      capture_output=True, text=True, timeout=60,
                                      env={"HOME": home, "PATH": self.without_rust(home)})
                self.assertEqual((done.returncode, done.stdout), (1, ""), done.stderr)
                first, *hints = done.stderr.splitlines()
                self.assertRegex(first, "^setup: error: ")
                self.assertIn(said, first)
                self.assertTrue(all(hint.startswith("setup: hint: ") for hint in hints), hints)
                self.assertIn("https://sh.rustup.rs | sh", "".join(hints))
                self.assertIn("Run this again with --install-rust", "".join(hints))

    def test_rust_is_installed_by_its_installer_if_the_option_allows_it(self):
        need(root=True)
        # In place of curl: it prints an installer of programs that say a version.
        installer = """#!/bin/sh
echo "echo fetched: $* >&2; PATH=/usr/bin:/bin; mkdir -p \$HOME/.cargo/bin"
echo 'for tool in cargo rustc; do'
echo '    printf "#!/bin/sh\necho $tool 1.%s.0\n" "$MINOR" >$HOME/.cargo/bin/$tool'
echo '    chmod 755 $HOME/.cargo/bin/$tool'
echo done
"""
        for minor, ends in (("99", ["setup: Rust is there: 1.99.0, in "]),
                            ("80", ["setup: error: ", "is of Rust 1.80.0", "also after rustup"])):
            with self.subTest(minor=minor), tempfile.TemporaryDirectory() as home:
                path = self.without_rust(home)
                curl = os.path.join(path, "curl")
                write_file(curl, installer)
                os.chmod(curl, 0o755)
                done = subprocess.run(["scripts/setup", "try", "--install-rust"], cwd=TOP,
                                      stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                      stderr=subprocess.STDOUT, text=True, timeout=60,
                                      env={"HOME": home, "PATH": path, "MINOR": minor})
                self.assertIn("fetched: --proto =https --tlsv1.2 -sSf https://", done.stdout)
                for end in ends:
                    self.assertIn(end, done.stdout)
                # The next steps lack their programs in this PATH.
                self.assertNotEqual(done.returncode, 0, done.stdout)

    @staticmethod
    def without_rust(directory):
        """A directory for PATH with the programs of this machine, except for Rust's."""
        programs = os.path.join(directory, "bin")
        os.mkdir(programs)
        for name in ("cut", "dirname", "id", "sed", "sh", "sort"):
            os.symlink(shutil.which(name), os.path.join(programs, name))
        return programs


class FreshMachine(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        need("debootstrap", "git", "unshare", "nsenter", root=True)
        support.image("small")
        # The test programs contain paths of this checkout.
        binds = {path: path for path in (TOP, WORK, os.path.dirname(BCOW), fresh.images())}
        rust = os.environ.get("BCOW_RUST")
        cls.machine = cls.enterClassContext(fresh.machine(WORK, binds, rust))
        # Compiled already; compiling takes more than a minute.
        for program in ("fsx", "pjdfstest"):
            need(program)
            shutil.copy(shutil.which(program), cls.machine.path("/usr/local/bin"))

    def assert_passes(self, *command, **options):
        with tempfile.TemporaryFile() as output:
            done = self.machine.run(*command, stdout=output, stderr=output, timeout=900, **options)
            output.seek(0)
            text = output.read().decode(errors="replace")
        self.assertEqual(done.returncode, 0, f"`{' '.join(command)}`: {text[-8000:]}")
        return text

    def test_both_commands_of_the_readme_work_for_root_and_for_a_user(self):
        tests = test_programs()
        directory = self.machine.check_out()
        self.sets_up("try", directory)
        self.demonstrates(directory)
        self.machine.add_user()
        users = self.machine.check_out(user=True)
        self.sets_up("test", users, user=True)
        self.demonstrates(users, user=True)
        self.assertLessEqual(PARTS.keys(), tests.keys())
        # As the user alone: `cargo test` has run all of them as root. BCOW_FRESH=all runs them as
        # root here too.
        for user in (False, True) if os.environ.get("BCOW_FRESH") == "all" else (True,):
            # The PATH of scripts/test: Debian's has no sbin for ordinary users.
            path = f"{fresh.RUST}/bin:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
            env = {"INSTA_WORKSPACE_ROOT": TOP, "PATH": path, **ROUNDS}
            # With CI set, tests that need root would fail instead of being skipped.
            if not user:
                env["CI"] = "true"
            for name, (program, package) in tests.items():
                with self.subTest(test=name, user=user):
                    output = self.assert_passes(program, *PARTS.get(name, ()), directory=package,
                                                user=user, env=env)
                    self.assertNotIn("\nrunning 0 tests\n", output if name in PARTS else "")
        env = {"CI": "true", "BCOW": BCOW, "BCOW_E2E": "/tmp/e2e",
               "PYTHONPATH": os.path.join(TOP, "tests", "e2e")}
        self.assert_passes("/usr/bin/python3", "-m", "unittest", "test_serve", env=env)

    def sets_up(self, what, directory, user=False):
        """The setup announces each step; a second run has no step to do."""
        output = self.assert_passes("scripts/setup", what, directory=directory, user=user)
        lines = [line for line in output.splitlines() if line.startswith("setup: ")]
        self.assertRegex(lines[0], "^setup: Rust is there: ")
        self.assertEqual(lines[1], "setup: these Debian packages are missing:")
        self.assertEqual(lines[-1], "setup: all is there")
        self.assertEqual("chmod 666 /dev/fuse" in output, what == "test", output)
        output = self.assert_passes("scripts/setup", what, directory=directory, user=user)
        self.assertEqual(output.splitlines(), [lines[0], lines[-1]])

    def demonstrates(self, directory, user=False):
        """With the existing image and bcow, since making them takes minutes."""
        output = self.assert_passes("scripts/try", directory=directory, user=user,
                                  env={"BCOW": BCOW, "BCOW_IMAGES": fresh.images()})
        self.assertIn("from the image\n", output)
        self.assertEqual("== Mount it without root" in output, user, output)
        stored = dict(re.findall(r"^(\w+): [\d.]+ ms, (\d+) KiB stored$", output, re.MULTILINE))
        self.assertLess(int(stored["bcow"]), 64, output)
        # Not where the directory itself is on overlayfs.
        self.assertGreaterEqual(int(stored.get("overlayfs", 1 << 18)), 1 << 18, output)
        self.assertIn("== That was it.", output)
