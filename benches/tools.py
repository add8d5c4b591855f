"""Real programs in a change root of a real root file system, for benches/union.py: git, dpkg, and
Python's compiler."""

import os
import pathlib
import shutil
import subprocess
import tempfile

from measure import MIB, drop_caches, run

# What a build installs, by the beginning of the archives' names.
PACKAGES = ("vim-runtime_", "perl-modules-", "python3-numpy_", "git-man_", "locales_", "tzdata_")
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LC_ALL": "C",
               "DEBIAN_FRONTEND": "noninteractive", "GIT_CONFIG_NOSYSTEM": "1"}


def missing(args):
    """The reason why the part cannot be measured, or None."""
    if not args.rootfs or not args.debs:
        return "--rootfs names no root file system, or --debs no directory of Debian packages"
    for program in ("usr/bin/git", "usr/bin/dpkg", "usr/bin/python3"):
        if not os.path.lexists(args.rootfs / program):
            return f"{args.rootfs} has no {program}"
    return None if packages(args.debs) else f"{args.debs} has none of the packages"


def packages(directory):
    return [path for path in sorted(directory.glob("*.deb")) if path.name.startswith(PACKAGES)]


def inside(root, *command):
    """Runs a command with another root directory; returns its seconds."""
    return run(["env", "-i", *[f"{name}={value}" for name, value in ENVIRONMENT.items()],
                "chroot", root, *command]).wall


def repository(bench, source):
    """A bare repository with the files of a directory."""
    bare = bench.work / "sources.git"
    git = ["git", "-C", str(source), "-c", "user.name=bench", "-c", "user.email=bench@example.org"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "sources"]):
        subprocess.run([*git, *command], check=True, stdin=subprocess.DEVNULL)
    run(["git", "clone", "-q", "--bare", source, bare])
    return bare


def sources(bench, tree):
    """A repository of source files in the tree."""
    with tempfile.TemporaryDirectory(dir=bench.work) as source:
        source = pathlib.Path(source)
        bench.small_files(source, bench.args.storm_files // 100, 100, 6_000)
        shutil.move(repository(bench, source), tree / "srv" / "sources.git")
    run(["chown", "-R", "0:0", tree / "srv" / "sources.git"])


def measure(bench):
    lack = missing(bench.args)
    if lack:
        print(f"left out: tools: {lack}")
        return
    with bench.tree("tools") as tree:
        run(["cp", "-a", f"{bench.args.rootfs}/.", tree])
        (tree / "srv" / "debs").mkdir(parents=True)
        for path in packages(bench.args.debs):
            shutil.copy(path, tree / "srv" / "debs")
        sources(bench, tree)
        names = [f"/srv/debs/{path.name}" for path in packages(bench.args.debs)]
        bench.prepare(tree)

        def each(subject):
            def note(row, seconds):
                bench.results.note("tools", row, "ms", subject, seconds * 1e3)

            with subject.instance(tree) as one:
                device = one.path / "dev" / "null"
                if not device.exists():
                    device.parent.mkdir(exist_ok=True)
                    os.mknod(device, 0o20666, os.makedev(1, 3))
                drop_caches()
                note("git clone, cold", inside(one.path, "git", "clone", "-q", "/srv/sources.git",
                                               "/srv/clone"))
                note("git status", inside(one.path, "git", "-C", "/srv/clone", "status", "-s"))
                note(f"dpkg -i of {len(names)} packages",
                     inside(one.path, "dpkg", "--force-all", "-i", *names))
                note("python3 -m compileall of its packages",
                     inside(one.path, "python3", "-m", "compileall", "-q", "-f",
                            "/usr/lib/python3/dist-packages/numpy"))
                note("rm -rf of the clone", inside(one.path, "rm", "-rf", "/srv/clone"))
                stored = one.upper_bytes()
                bench.results.note("tools", "upper after it", "MiB", subject,
                                   stored and stored / MIB)

        bench.rounds(each)
    bench.results.show("tools", "Programs in a real root file system", bench.measured)
