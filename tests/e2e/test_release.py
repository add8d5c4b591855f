"""The packages of scripts/release, on a fresh machine without a compiler.

They are made of the programs that are already built. BCOW_RELEASE names the directory of a real
release instead.
"""

import glob
import json
import os
import re
import shutil
import unittest

import fresh
import support
from support import BCOW, TOP, WORK, need, read_text, run

PROGRAMS = ("bcow", "bcow-snapshotter", "bcow-layer-store")
# What the README's image is here: no test asks a registry on the internet.
SUBSTITUTES = {"docker://debian:12": "oci:/images/small:small",
               "apt install": "apt-get -q -y install"}


def release(out):
    run("scripts/release", "--binaries", os.path.dirname(BCOW), out, cwd=TOP)


def commands_of_readme():
    """The commands of the section Install, as a user types them, and the directory of packages."""
    section = read_text(os.path.join(TOP, "README.md")).split("\n## Install\n")[1].split("\n## ")[0]
    block = section.split("```")[1]
    for line in block.splitlines():
        if line.startswith("$ "):
            command = line[2:].split("  #")[0].strip()
            # As of diff(1): there are differences.
            yield f"{command} || [ $? = 1 ]" if "bcow diff" in command else command


class Release(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        need("debootstrap", "unshare", "nsenter", "objcopy", "dpkg-deb", "skopeo", root=True)
        support.image("small")
        cls.dist = os.environ.get("BCOW_RELEASE")
        if not cls.dist:
            cls.dist = os.path.join(WORK, "dist")
            release(cls.dist)
        binds = {cls.dist: "/dist", fresh.images(): "/images"}
        cls.machine = cls.enterClassContext(fresh.machine(WORK, binds, toolchain=False))
        cls.machine.add_user()
        # As udev and systemd make them.
        cls.on_machine("mknod -m 666 /dev/fuse c 10 229; ln -sf ../proc/self/mounts /etc/mtab")

    @classmethod
    def on_machine(cls, script, user=False, check=True):
        done = cls.machine.run("sh", "-ec", script, user=user, directory=fresh.home(user),
                               capture_output=True, text=True, timeout=300)
        if check and done.returncode:
            raise AssertionError(f"{script!r} ended with {done.returncode}: "
                                 f"{done.stdout[-4000:]}{done.stderr[-4000:]}")
        return done.stdout

    def files(self):
        """What packages and administrators leave, without the records of dpkg and apt."""
        found = self.on_machine("find /etc /lib/ /opt /sbin/ /usr /var -xdev "
                                "-not -path '/var/lib/dpkg/*' -not -path '/var/lib/apt/*' "
                                "-not -path '/var/cache/*' -not -path '/var/log/*'")
        return set(found.splitlines())

    def debs(self):
        return " ".join(f"/dist/{os.path.basename(path)}"
                        for path in glob.glob(f"{self.dist}/*.deb"))

    def test_packages_install_upgrade_and_leave_nothing(self):
        # A machine with systemd, whose calls are recorded.
        self.on_machine("mkdir -p /run/systemd/system; cd /usr/bin; "
                        "printf '#!/bin/sh\\necho \"$*\" >>/run/calls\\n' >systemctl; "
                        "chmod 755 systemctl")
        self.addCleanup(self.on_machine, "rm -r /run/systemd /usr/bin/systemctl")

        def calls():
            said = self.on_machine("cat /run/calls; rm /run/calls")
            return set(said.splitlines())
        before = self.files()
        self.on_machine(f"apt-get -q -y --no-install-recommends install {self.debs()}")
        self.assertEqual(calls(), {"daemon-reload"})
        self.on_machine("dpkg --verify bcow bcow-snapshotter bcow-layer-store")
        for program in PROGRAMS:
            self.assertRegex(self.on_machine(f"{program} --version", user=True), f"^{program} ")
            self.assertRegex(self.on_machine(f"sudo {program} --version", user=True), program)
        added = self.files() - before
        self.assertLessEqual({
            "/sbin/mount.bcow", "/usr/share/man/man1/bcow-mount.1.gz",
            "/usr/share/bash-completion/completions/bcow",
            "/usr/share/zsh/vendor-completions/_bcow",
            "/usr/share/fish/vendor_completions.d/bcow.fish",
            "/usr/lib/systemd/system/bcow-snapshotter.service",
            "/usr/lib/systemd/system/bcow-pool@.service"}, added)
        self.assertEqual([path for path in added if path.startswith("/etc")], [])
        self.on_machine(f"dpkg -i {self.debs()}")
        self.assertEqual(calls(), {"daemon-reload", "try-restart bcow-snapshotter.service",
                                   "try-restart bcow-layer-store.service"})
        self.assertEqual(self.files() - before, added)
        self.on_machine(f"apt-get -q -y remove {' '.join(PROGRAMS)}")
        self.assertEqual(calls(), {"daemon-reload", "disable --now bcow-snapshotter.service",
                                   "disable --now bcow-layer-store.service"})
        self.assertEqual(self.files() ^ before, set())
        self.on_machine(f"apt-get -q -y purge {' '.join(PROGRAMS)}")
        self.assertEqual(self.files() ^ before, set())
        self.assertEqual(self.on_machine("dpkg -l | grep bcow || true"), "")

    def test_the_first_page_of_the_readme_runs(self):
        commands = list(commands_of_readme())
        self.assertTrue(any("apt install" in command for command in commands), commands)
        # The user has downloaded the packages.
        self.on_machine("cp /dist/bcow_*.deb .", user=True)
        script = "\n".join(commands)
        for written, here in SUBSTITUTES.items():
            self.assertIn(written, script)
            script = script.replace(written, here)
        self.on_machine(script, user=True)
        self.on_machine("mount -t bcow debian.bcow /mnt -o ro && ls /mnt/usr/bin/python3; "
                        "umount /mnt".replace("debian.bcow", f"{fresh.home(True)}/debian.bcow"))
        self.on_machine("apt-get -q -y remove bcow")

    def test_the_action_for_workflows_converts(self):
        steps = re.findall(r"^ *run: \|\n((?: {8}.*\n)+)",
                           read_text(os.path.join(TOP, "contrib", "github", "action.yml")),
                           re.MULTILINE)
        self.assertEqual(len(steps), 2)
        for to, schema in (("image.bcow", "bcow.convert/1"),
                           ("oci:layout:x", "bcow.convert-layout/1")):
            variables = (f"export PACKAGE=/dist/bcow_*.deb RUNNER_TEMP=/tmp GITHUB_OUTPUT=output "
                         f"FROM=oci:/images/small:small TO={to} OPTIONS=--plain\n"
                         f"PACKAGE=$(echo $PACKAGE)\n")
            # As the runner runs `shell: bash`.
            for step in steps:
                write = f"cat >step <<'END'\n{variables}{step}END\n"
                self.on_machine(f"{write}bash --noprofile --norc -eo pipefail step", user=True)
            summary = self.on_machine("cat output; rm output", user=True)
            self.assertEqual(summary.count("\n"), 1)
            document = json.loads(summary.removeprefix("summary="))
            self.assertEqual(document["schema"], schema)
        self.on_machine("apt-get -q -y remove bcow")

    def test_the_tarball_unpacks_into_a_prefix(self):
        (tarball,) = (path for path in glob.glob(f"{self.dist}/*.tar.gz") if "debug" not in path)
        self.on_machine("tar -C /usr/local --strip-components=1 --no-same-owner "
                        f"-xzf /dist/{os.path.basename(tarball)}")
        said = self.on_machine("bcow version && ls -l /usr/local/sbin/mount.bcow && "
                               "cat /usr/local/lib/systemd/system/*.service && "
                               "bash -n /usr/local/share/bash-completion/completions/bcow",
                               user=True)
        self.assertIn("-> ../bin/bcow\n", said)
        self.assertIn("ExecStart=/usr/local/bin/bcow-snapshotter\n", said)

    def test_checksums_symbols_and_the_image(self):
        run("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=self.dist)
        self.assertEqual(len(read_text(f"{self.dist}/SHA256SUMS").splitlines()),
                         len(os.listdir(self.dist)) - 1)
        (archive,) = glob.glob(f"{self.dist}/*-oci.tar")
        run("skopeo", "inspect", f"oci-archive:{archive}:bcow")
        (symbols,) = glob.glob(f"{self.dist}/*-debug.tar.gz")
        listed = run("tar", "-tzf", symbols).out.decode()
        for program in PROGRAMS:
            self.assertIn(f"/{program}.debug\n", listed)

    @unittest.skipIf(os.environ.get("BCOW_RELEASE"), "the release is made elsewhere")
    def test_the_same_programs_give_the_same_packages(self):
        again = os.path.join(WORK, "dist-again")
        release(again)
        self.assertEqual(read_text(f"{again}/SHA256SUMS"), read_text(f"{self.dist}/SHA256SUMS"))
        shutil.rmtree(again)
