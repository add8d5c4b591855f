"""pjdfstest tests POSIX behaviour case by case: every case that passes on overlayfs over ext4
passes on a writable mount."""

import os
import re

import subjects
import support
from support import run
from union import LowerCase

CONFIGURATION = """
[features]
posix_fallocate = {}
rename_ctime = {}
stat_st_birthtime = {}
utime_now = {}
utimensat = {}
[settings]
naptime = 0.02
[dummy_auth]
entries = [["games", "games"], ["daemon", "daemon"]]
"""
PRELOAD = os.path.join(support.TOP, "tests", "e2e", "preload", "no_whiteouts.c")
# Of 398 cases, those that remount are left out.
CASES = 380


def plant(top):
    """A lower tree without files: the cases make their own."""
    os.chmod(top, 0o755)


class Pjdfstest(LowerCase):
    kinds = (*subjects.KINDS, subjects.KERNEL)
    plant = staticmethod(plant)
    tools = ("pjdfstest", "gcc")

    def setUp(self):
        self.preload = self.path("preload.so")
        self.configuration = self.path("configuration", CONFIGURATION.encode())
        run("gcc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", self.preload, PRELOAD)
        # Another file system, for links and renames across file systems.
        self.other = self.path("other")
        os.mkdir(self.other)
        run("mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", self.other)
        self.addCleanup(run, "umount", self.other)

    def outcome(self, name):
        """Each case with `ok`, `skipped` or `FAILED`, and the whole output."""
        with subjects.shown(name, self.lower) as subject:
            done = run("pjdfstest", "-c", self.configuration, "-s", self.other, "-p", subject.where,
                       check=False, timeout=300,
                       env={"LD_PRELOAD": self.preload, "RUST_BACKTRACE": "0"})
        text = done.out.decode(errors="replace")
        return dict(re.findall(r"^([a-z_0-9:]+) +(ok|skipped|FAILED)$", text, re.MULTILINE)), text

    def test_every_case_that_passes_on_overlayfs_passes(self):
        judge, text = self.outcome("overlayfs")
        passed = {case for case, how in judge.items() if how == "ok"}
        self.assertGreaterEqual(len(passed), CASES, text)
        for name in self.names:
            with self.subTest(subject=name):
                found, text = self.outcome(name)
                worse = sorted(case for case in passed if found.get(case) != "ok")
                lines = text.splitlines()
                said = ("\n".join("\n".join(lines[at:at + 3]) for at, line in enumerate(lines)
                                  if line.split(" ")[0] in worse))
                self.assertEqual(worse, [], said)
