"""Containers run on a writable mount: packages are installed in them, servers and databases run,
and their data survives a remount.

The root is the real image, of Debian. Packages are downloaded once, with the machine's own apt, and
installed in containers that have no network. BCOW_CONTAINERS_DRIVER=kernel runs all tests with the
kernel driver.
"""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile

import support
from support import bcow, converted, is_mounted, need, read_json, run, write_file

# The default capabilities of a container in docker and podman.
CAPABILITIES = ["CAP_" + name for name in ("CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD",
                                           "NET_RAW", "SETGID", "SETUID", "SETFCAP", "SETPCAP",
                                           "NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE")]
INSTALL = "DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends {} install {}\n"
# Whether pgbench's four tables agree. They do if each transaction is stored as a whole or not at
# all.
AGREE = """select a.sum = b.sum and b.sum = t.sum and t.sum = coalesce(h.sum, 0) and h.count >= {}
    from
    (select sum(abalance) from pgbench_accounts) a, (select sum(bbalance) from pgbench_branches) b,
    (select sum(tbalance) from pgbench_tellers) t,
    (select sum(delta), count(*) from pgbench_history) h"""
POSTGRES = """
    data=/var/lib/postgresql/15/main
    as_postgres() { setpriv --reuid=postgres --regid=postgres --init-groups -- "$@"; }
    mkdir -p /run/postgresql && chown postgres /run/postgresql
    as_postgres /usr/lib/postgresql/15/bin/pg_ctl -w -D $data -l /tmp/postgres.log \\
        -o "-c config_file=/etc/postgresql/15/main/postgresql.conf" start ||
        { cat /tmp/postgres.log; exit 1; }
    sql() { as_postgres psql -X -A -t -v ON_ERROR_STOP=1 -c "$1" postgres; }
    bench() { as_postgres /usr/lib/postgresql/15/bin/pgbench "$@" postgres; }
    stop() { as_postgres /usr/lib/postgresql/15/bin/pg_ctl -w -D $data -m fast stop; }
"""
MARIADB = """
    mkdir -p /run/mysqld && chown games /run/mysqld
    # Aio may be forbidden in a container, and is not what is tested.
    mariadbd --no-defaults --user=games --datadir=/srv/mariadb --socket=/run/mysqld/s \\
        --skip-networking --innodb-use-native-aio=0 2>/tmp/mariadb.log &
    sql() { mariadb --no-defaults --socket=/run/mysqld/s --user=root -N -e "$1"; }
    tries=0
    until sql 'select 1' >/dev/null 2>&1; do
        tries=$((tries + 1))
        [ $tries -lt 300 ] || { cat /tmp/mariadb.log; exit 1; }
        sleep 0.1
    done
"""


# Options of `bcow mount`, by the name of the kind of upper.
KERNEL = ("--driver", "kernel")
KINDS = {"fuse": (), "kernel": KERNEL}
if os.environ.get("BCOW_CONTAINERS_DRIVER") == "kernel":
    KINDS = dict.fromkeys(KINDS, KERNEL)
SETS = {"nginx": ["nginx"], "mariadb": ["mariadb-server-core", "mariadb-client-core"],
        "again": ["--reinstall", "coreutils"]}


def packages(root):
    """A directory with .deb files for each of SETS: the packages to install that the root lacks.
    Kept beside the images."""
    there = os.path.join(
        os.environ.get("BCOW_IMAGES") or os.path.join(support.TOP, "target", "images"), "packages")
    if os.path.exists(there):
        return there
    need("apt-get")
    with tempfile.TemporaryDirectory(dir=os.path.dirname(there)) as work:
        # Packages of the image's release, with the keys and proxies of this machine's apt.
        apt = ["apt-get", "-q", "-y", "--no-install-recommends"]
        for option in (f"Dir::State::status={root}/var/lib/dpkg/status",
                       f"Dir::Etc::sourcelist={root}/etc/apt/sources.list",
                       "Dir::Etc::sourceparts=/dev/null", f"Dir::State::lists={work}/lists",
                       "Dir::Cache::pkgcache=", "Dir::Cache::srcpkgcache=",
                       "APT::Sandbox::User=root", "Acquire::Languages=none",
                       "Debug::NoLocking=true"):
            apt += ["-o", option]
        os.makedirs(os.path.join(work, "lists", "partial"))
        run(*apt, "update")
        for name, words in SETS.items():
            debs = os.path.join(work, "debs", name)
            os.makedirs(os.path.join(debs, "partial"))
            run(*apt, "-o", f"Dir::Cache::archives={debs}", "--download-only", "install", *words)
            os.rmdir(os.path.join(debs, "partial"))
        os.rename(os.path.join(work, "debs"), there)
    return there


class Writable:
    """A writable mount whose upper survives an unmount."""

    def __init__(self, made, directory, kind):
        self.image, self.options = made, KINDS[kind]
        self.where, self.upper = os.path.join(directory, "mnt"), os.path.join(directory, "upper")
        os.mkdir(self.where)
        os.mkdir(self.upper)

    def mount(self):
        bcow("mount", self.image, self.where, "--upper", self.upper, *self.options, "-o",
             "allow_other,suid,dev", timeout=60)

    def unmount(self):
        """Unmounts and checks that the upper is clean."""
        bcow("umount", self.where, timeout=60)
        bcow("fsck", self.upper)

    def remount(self):
        self.unmount()
        self.mount()

    def stored_bytes(self):
        return sum(os.lstat(os.path.join(path, name)).st_blocks * 512
                   for path, _, names in os.walk(self.upper) for name in names)


def run_in_runc(directory, where, script, *binds):
    """Runs a script as root of a container on a directory; returns its output. The container has
    Docker's capabilities and only a network of its own. Its bundle is below `directory`."""
    bundle = tempfile.mkdtemp(prefix="bundle-", dir=directory)
    run("runc", "spec", "--bundle", bundle)
    config = os.path.join(bundle, "config.json")
    spec = read_json(config)
    process = spec["process"]
    process.update(terminal=False, args=["/bin/sh", "-ec", script], capabilities={
                       kind: CAPABILITIES for kind in ("bounding", "effective", "permitted")})
    process["env"] = ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LC_ALL=C.UTF-8"]
    spec["root"] = {"path": where, "readonly": False}
    for source, inside, *options in binds:
        spec["mounts"].append({"destination": inside, "type": "bind", "source": source,
                               "options": ["rbind", *options]})
    write_file(config, json.dumps(spec))
    try:
        return run("runc", "--root", os.path.join(bundle, "state"), "run", "--bundle", bundle,
                   os.path.basename(bundle), timeout=300).out.decode()
    finally:
        shutil.rmtree(bundle, ignore_errors=True)


class WithMounts(support.Scratch):
    """Writable mounts of the real image."""

    @classmethod
    def setUpClass(cls):
        need("runc", root=True, fuse=True)
        super().setUpClass()
        cls.image, _ = converted("real")

    @contextlib.contextmanager
    def writable(self, made=None, kind="fuse"):
        directory = tempfile.mkdtemp(prefix="writable-", dir=self.directory)
        os.chmod(directory, 0o755)
        one = Writable(made or self.image, directory, kind)
        try:
            one.mount()
            yield one
            one.unmount()
        finally:
            if is_mounted(one.where):
                subprocess.run(["umount", "-l", one.where], check=False)
            shutil.rmtree(directory, ignore_errors=True)


class Containers(WithMounts):
    @classmethod
    def setUpClass(cls):
        need("podman", "conmon")
        super().setUpClass()
        with support.mounted(cls.image) as root:
            cls.packages = packages(root)

    def runc(self, where, script, *binds):
        return run_in_runc(self.directory, where, script, (self.packages, "/mnt", "ro"), *binds)

    def podman(self, where, script):
        """The same by podman, with podman's default setup."""
        home = os.path.join(self.directory, "podman")
        # podman refuses a path of more than 50 characters.
        run_root = tempfile.mkdtemp(prefix="bcow-", dir="/run")
        command = ["podman", f"--root={home}/root", f"--runroot={run_root}", f"--tmpdir={home}/tmp",
                   "--storage-driver=vfs", "--runtime=runc", "--cgroup-manager=cgroupfs",
                   "--events-backend=none", "run", "--rm", "--log-driver=none", "--network=none",
                   "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024",
                   f"--volume={self.packages}:/mnt:ro", "--env=LC_ALL=C.UTF-8", "--rootfs", where,
                   "/bin/sh", "-ec", script]
        try:
            return run(*command, timeout=900).out.decode()
        finally:
            subprocess.run(["umount", "-l", f"{home}/root/vfs"], stderr=subprocess.DEVNULL,
                           check=False)
            shutil.rmtree(run_root, ignore_errors=True)

    def assert_installed(self, where, *names):
        """Compares the packages' files with dpkg's checksums, in the container; the output lists
        differences."""
        for name in names:
            run("chroot", where, "dpkg", "--status", name)
            self.assertEqual(run("chroot", where, "dpkg", "--verify", name).out.decode(), "")

    def test_runc_installs_packages_and_a_server_runs(self):
        for kind in KINDS:
            with self.subTest(kind), self.writable(kind=kind) as one:
                self.install_and_serve(one)

    def install_and_serve(self, one):
        fetch = ("python3 -c 'import urllib.request as u; "
                 "print(u.urlopen(\"http://127.0.0.1/\").read().decode())'")
        serve = f"nginx; {fetch}; nginx -s quit; tail -n 1 /var/log/nginx/access.log"
        out = self.runc(one.where, INSTALL.format("", "/mnt/nginx/*.deb")
                                   + INSTALL.format("--reinstall", "/mnt/again/*.deb") +
                                   "nginx -t\n" + serve)
        self.assertIn("Welcome to nginx", out)
        one.remount()
        self.assert_installed(one.where, "nginx", "nginx-common", "coreutils")
        out = self.runc(one.where, "wc -l </var/log/nginx/access.log\n" + serve)
        self.assertEqual(out.split()[0], "1")
        self.assertIn("Welcome to nginx", out)
        self.runc(one.where, "apt-get -q -y purge nginx nginx-common")
        one.remount()
        self.assertFalse(os.path.exists(os.path.join(one.where, "etc/nginx")))

    def test_podman_installs_mariadb_which_keeps_its_data(self):
        with self.writable() as one:
            out = self.podman(one.where, INSTALL.format("", "/mnt/mariadb/*.deb")
                              + "mariadb-install-db --no-defaults --user=games "
                                "--datadir=/srv/mariadb --skip-test-db >/dev/null\n" + MARIADB
                              + """
                sql 'create database d'
                sql 'create table d.t (id int primary key auto_increment, what varchar(200))
                     engine=innodb'
                sql 'insert into d.t (what) select repeat(uuid(), 5)
                     from information_schema.columns'
                sql 'update d.t set what = md5(what) where id % 3 = 0'
                sql 'delete from d.t where id % 7 = 0'
                sql 'select "sum", count(*), sum(crc32(what)) from d.t; shutdown'
                wait""")
            sums = [line for line in out.splitlines() if line.startswith("sum")]
            self.assertEqual(len(sums), 1, out)
            self.assertGreater(int(sums[0].split()[1]), 500)
            one.remount()
            self.assert_installed(one.where, "mariadb-server-core", "mariadb-client-core")
            again = self.runc(one.where, MARIADB + """
                sql 'select "sum", count(*), sum(crc32(what)) from d.t; check table d.t extended
                     ; shutdown'
                wait""")
            self.assertIn(sums[0], again)
            self.assertIn("status\tOK", again)

    def test_postgresql_with_its_data_in_the_image_passes_pgbench(self):
        with self.writable() as one:
            out = self.runc(one.where, POSTGRES + "bench -i -q -s 3; bench -n -c 2 -j 2 -T 2; " +
                                       f'sql "{AGREE.format(10)}"; stop')
            self.assertIn("\nt\n", out)
            one.remount()
            self.assertIn("\nt\n",
                          self.runc(one.where, POSTGRES + f'sql "{AGREE.format(10)}"; stop'))
            # Again, with tables of some size in the image itself.
            made = os.path.join(self.directory, "data.bcow")
            cluster = os.path.join(one.where, "var/lib/postgresql")
            bcow("convert", "--no-verify", f"dir:{cluster}", made)
            in_image = sum(os.lstat(os.path.join(path, name)).st_size
                           for path, _, names in os.walk(cluster) for name in names)
            for kind in KINDS:
                with self.subTest(kind), self.writable(made, kind) as data:
                    self.session_on_data_of_the_image(one, data, in_image)

    def session_on_data_of_the_image(self, one, data, in_image):
        def session(script):
            return self.runc(one.where, POSTGRES + script + f'\nsql "{AGREE.format(10)}"; stop',
                             (data.where, "/var/lib/postgresql"))

        self.assertIn("\nt\n", session("bench -n -S -c 2 -t 50"))
        self.assertLess(data.stored_bytes(), in_image // 4, "a start copies no tables")
        out = session("bench -n -c 2 -j 2 -T 2")
        self.assertIn("\nt\n", out)
        self.assertRegex(out, r"number of failed transactions: 0 ")
        data.remount()
        # Reads every page of every table and index.
        self.assertIn("\nt\n", session("as_postgres vacuumdb --all --freeze --analyze --quiet; "
                                       "as_postgres reindexdb --all --quiet"))
        data.remount()
        self.assertIn("\nt\n", session(""))
