"""Databases with their data directory in the image, for benches/union.py: time to the first answer,
then transactions."""

import os
import pathlib
import pwd
import re
import shutil
import subprocess
import time

from measure import MIB, Failed, drop_caches, run

# Database servers refuse to run as root. One of these users also owns the files in the image.
USERS = ("postgres", "mysql", pwd.getpwuid(65534).pw_name)


class Server:
    """A database server on a data directory. The same ordinary user owns the files and runs the
    server."""

    part = ""
    programs = ()

    def __init__(self, bench):
        self.bench, self.process, self.log = bench, None, bench.work / f"{self.part}.log"
        self.user = next(pwd.getpwnam(name) for name in USERS
                         if name in {entry.pw_name for entry in pwd.getpwall()})
        # Short, since a socket's path has at most 108 bytes.
        self.sockets = bench.work / "s"
        self.sockets.mkdir(exist_ok=True)
        os.chown(self.sockets, self.user.pw_uid, self.user.pw_gid)

    @classmethod
    def missing(cls):
        return [name for name in cls.programs if not cls.where(name)]

    @staticmethod
    def where(name):
        """Debian keeps PostgreSQL's programs apart, by version."""
        versions = sorted(pathlib.Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
        return str(versions[-1]) if versions else shutil.which(name)

    def command(self, name, *arguments):
        return ["setpriv", f"--reuid={self.user.pw_uid}", f"--regid={self.user.pw_gid}",
                "--clear-groups", "--", self.where(name), *map(str, arguments)]

    def run_tool(self, name, *arguments):
        """Runs a client or a tool as that user; returns its output."""
        done = subprocess.run(self.command(name, *arguments), stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, cwd="/",
                              env={**os.environ, "HOME": "/"})
        if done.returncode != 0:
            raise Failed(
                f"{name}: exit {done.returncode}\n{done.stdout[-1000:]}{done.stderr[-1000:]}")
        return done.stdout

    def start(self, data):
        """Seconds from the start of the server to its first answer."""
        begin = time.monotonic()
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.serve(data), stdin=subprocess.DEVNULL, stdout=log,
                                            stderr=log, cwd="/")
        while True:
            try:
                self.ask()
                return time.monotonic() - begin
            except Failed:
                if self.process.poll() is not None or time.monotonic() - begin > 300:
                    tail = self.log.read_text(errors="replace")[-1500:]
                    self.kill()
                    raise Failed(f"{self.part} does not start on {data}:\n{tail}") from None
                time.sleep(0.005)

    def stop(self):
        begin = time.monotonic()
        self.shut_down()
        self.process.wait(300)
        return time.monotonic() - begin

    def kill(self):
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Postgres(Server):
    part, title = "postgres", "PostgreSQL, pgbench"
    programs = ("initdb", "postgres", "psql", "pgbench")

    def prepare(self, data):
        self.run_tool("initdb", "-D", data, "-U", "bench", "--auth=trust", "--no-locale", "-E",
                      "UTF8")
        self.start(data)
        try:
            self.run_tool("pgbench", *self.login(), "-i", "-q", "-s", self.bench.args.scale,
                          "postgres")
            self.run_tool("psql", *self.login(), "-c", "checkpoint", "postgres")
        finally:
            self.stop()

    def login(self):
        return ["-h", self.sockets, "-U", "bench"]

    def serve(self, data):
        return self.command("postgres", "-D", data, "-k", self.sockets, "-c", "listen_addresses=",
                            "-c", "shared_buffers=64MB")

    def ask(self):
        self.run_tool("psql", *self.login(), "-X", "-c", "select count(*) from pg_class",
                      "postgres")

    def transactions(self):
        output = self.run_tool("pgbench", *self.login(), "-n", "-c", 4, "-j", 2, "-T",
                         max(1, round(self.bench.args.seconds)), "postgres")
        return (float(re.search(r"tps = ([\d.]+)", output)[1]),
                float(re.search(r"latency average = ([\d.]+)", output)[1]))

    def shut_down(self):
        # Fast shutdown: the server disconnects its clients and writes a checkpoint.
        self.process.send_signal(2)


class MariaDb(Server):
    part, title = "mariadb", "MariaDB, sysbench oltp_read_write"
    programs = ("mariadbd", "mariadb-install-db", "mariadb", "sysbench")

    def prepare(self, data):
        self.run_tool("mariadb-install-db", "--no-defaults", f"--datadir={data}",
                  "--auth-root-authentication-method=normal", "--skip-test-db")
        self.start(data)
        try:
            self.run_tool("mariadb", *self.login(), "-e", "create database sbtest")
            self.sysbench("prepare", "--threads=2")
        finally:
            self.stop()

    def login(self):
        return ["--no-defaults", f"--socket={self.sockets}/m", "--user=root"]

    def serve(self, data):
        return self.command("mariadbd", "--no-defaults", f"--datadir={data}",
                            f"--socket={self.sockets}/m", f"--pid-file={self.sockets}/m.pid",
                            "--skip-networking", "--innodb-buffer-pool-size=128M",
                            "--innodb-log-file-size=32M")

    def ask(self):
        self.run_tool("mariadb", *self.login(), "-e",
                  "select count(*) from information_schema.tables where table_schema='sbtest'")

    def sysbench(self, *what):
        return self.run_tool("sysbench", "oltp_read_write", "--db-driver=mysql",
                         f"--mysql-socket={self.sockets}/m", "--mysql-user=root", "--tables=8",
                         f"--table-size={10_000 * self.bench.args.scale}", *what)

    def transactions(self):
        output = self.sysbench("--threads=4", f"--time={max(1, round(self.bench.args.seconds))}",
                             "run")
        return (float(re.search(r"transactions:\s+\d+\s+\(([\d.]+) per sec", output)[1]),
                float(re.search(r"avg:\s+([\d.]+)", output)[1]))

    def shut_down(self):
        self.run_tool("mariadb", *self.login(), "-e", "shutdown")


def created(bench):
    """pgbench on a database that is created in the mount."""
    lack = Postgres.missing()
    if lack:
        print(f"left out: created: not installed: {', '.join(lack)}")
        return
    server = Postgres(bench)
    with bench.tree("created") as tree:
        (tree / "file").write_bytes(b"x")
        bench.prepare(tree)

        def each(subject):
            def note(row, unit, value):
                bench.results.note("created", row, unit, subject, value)

            try:
                with subject.instance(tree) as one:
                    data = one.path / "data"
                    data.mkdir(mode=0o700)
                    os.chown(data, server.user.pw_uid, server.user.pw_gid)
                    begin = time.monotonic()
                    server.prepare(data)
                    note(f"initdb, and pgbench -i -s {bench.args.scale}", "s",
                         time.monotonic() - begin)
                    server.start(data)
                    for when in ("first", "next"):
                        rate, _ = server.transactions()
                        note(f"transactions, {when} {bench.args.seconds:g} s", "per s", rate)
                    server.stop()
            finally:
                server.kill()

        bench.rounds(each)
    bench.results.show("created", "PostgreSQL, pgbench: created in the mount", bench.measured)


def measure(bench, kind):
    lack = kind.missing()
    if lack:
        print(f"left out: {kind.part}: not installed: {', '.join(lack)}")
        return
    server = kind(bench)
    with bench.tree(kind.part) as tree:
        data = tree / "data"
        data.mkdir(mode=0o700)
        os.chown(data, server.user.pw_uid, server.user.pw_gid)
        server.prepare(data)
        bench.prepare(tree)

        def each(subject):
            def note(row, unit, value):
                bench.results.note(kind.part, row, unit, subject, value)

            seconds = f"{bench.args.seconds:g} s"
            try:
                with subject.instance(tree) as one:
                    drop_caches()
                    note("start to first answer, cold", "ms", server.start(one.path / "data") * 1e3)
                    for when in ("first", "next"):
                        rate, latency = server.transactions()
                        note(f"transactions, {when} {seconds}", "per s", rate)
                        note(f"transactions, {when} {seconds}: mean", "ms", latency)
                    note("shutdown", "ms", server.stop() * 1e3)
                    stored = one.upper_bytes()
                    note("upper after it", "MiB", stored and stored / MIB)
                    note("daemon: CPU for all of this", "s", one.cpu() or None)
                    note("daemon: peak memory", "MiB", one.rss() / MIB or None)
                with subject.instance(tree) as one:
                    run(["find", one.path, "-type", "f", "-exec", "cat", "{}", "+"])
                    note("start to first answer, lower cached", "ms",
                         server.start(one.path / "data") * 1e3)
                    server.stop()
                    stored = one.upper_bytes()
                    note("upper after start and shutdown", "MiB", stored and stored / MIB)
            finally:
                server.kill()

        bench.rounds(each)
        size = file_bytes(tree)
    bench.results.show(kind.part, f"{kind.title}: {size / MIB:,.0f} MiB in the image",
                       bench.measured)


def file_bytes(tree):
    return sum(os.lstat(os.path.join(path, name)).st_size for path, _, names in os.walk(tree)
               for name in names)
