"""Other projects' NBD clients and `bcow serve`: qemu-img, qemu-io, nbdinfo, nbdcopy, nbdsh,
nbdfuse; TLS; hostile clients."""

import contextlib
import itertools
import json
import os
import random
import re
import resource
import signal
import socket
import stat
import struct
import subprocess
import time
import unittest

from support import (BCOW, Scratch, Served, assert_refused, bcow, need, read_bytes, read_text, run,
                     served, until, write_file)

MIB = 1 << 20
SIZE = 64 * MIB
# The data ranges of the disk that most tests use.
DATA = ((0, 5 * MIB), (20 * MIB + 4096, 300_000), (63 * MIB, MIB))


def disk_bytes():
    """Deterministic content with holes."""
    content = bytearray(SIZE)
    for at, length in DATA:
        content[at:at + length] = random.Random(at).randbytes(length)
    return bytes(content)


class Serve(Scratch):
    """Each class has a directory with the same disk as raw, sealed and writable file; each test
    runs in it."""

    @classmethod
    def setUpClass(cls):
        # nbdinfo calls file.
        need("qemu-img", "qemu-io", "nbdinfo", "nbdcopy", "file")
        super().setUpClass()
        cls.content = disk_bytes()
        cls.raw = cls.path("disk.raw")
        with open(cls.raw, "wb") as file:
            file.truncate(SIZE)
            for at, length in DATA:
                file.seek(at)
                file.write(cls.content[at:at + length])
        cls.sealed = cls.path("sealed.bcow")
        bcow("convert", f"raw:{cls.raw}", cls.sealed)

    def socket(self):
        return self.path(f"{self.id().rsplit('.', 1)[1][:40]}.sock")

    def writable(self, name="disk.bcow"):
        """A fresh writable disk with the content."""
        path = self.path(name)
        bcow("convert", "--writable", f"raw:{self.raw}", path)
        self.addCleanup(os.remove, path)
        return path

    def content_of(self, disk):
        """The content of a disk, read without the server."""
        raw = self.path("shown.raw")
        bcow("convert", disk, f"raw:{raw}")
        content = read_bytes(raw)
        os.remove(raw)
        return content

    def assert_same_content(self, disk, expected):
        content = self.content_of(disk)
        if content != expected:
            at = next(at for at, pair in enumerate(zip(content, expected)) if pair[0] != pair[1])
            self.fail(f"{disk} differs from what was written from byte {at} on")


def qemu_io(uri, *commands, options=()):
    arguments = [part for command in commands for part in ("-c", command)]
    return run("qemu-io", "-f", "raw", *options, *arguments, uri)


class Readers(Serve):
    """A sealed disk."""

    def test_nbdinfo_shows_the_features_of_the_server(self):
        with served(self.sealed, "--socket", self.socket(), "--description",
                    "a disk of tests") as server:
            info = json.loads(run("nbdinfo", "--json", server.uri).out)
            export = info["exports"][0]
            self.assertEqual(export["export-size"], SIZE)
            self.assertEqual(export["description"], "a disk of tests")
            self.assertEqual(export["contexts"], ["base:allocation", "qemu:allocation-depth"])
            for key, value in {"is_read_only": True, "can_multi_conn": True, "can_cache": True,
                               "can_df": True, "can_flush": True, "can_trim": False,
                               "can_zero": False, "is_rotational": False, "block_size_minimum": 1,
                               "block_size_preferred": 4096,
                               "block_size_maximum": 32 * MIB}.items():
                self.assertEqual(export[key], value, key)
            self.assertEqual(run("nbdinfo", "--size", server.uri).out.strip(), str(SIZE).encode())
            self.assertEqual(run("nbdinfo", "--can", "structured-reply", server.uri).code, 0)
            self.assertNotEqual(run("nbdinfo", "--can", "write", server.uri, check=False).code, 0)

    def test_several_exports_are_listed_and_found_by_name(self):
        other = self.writable("other one.bcow")
        with served(self.sealed, other, "--export", f"third/ä={self.sealed}", "--socket",
                    self.socket(), "--description", "first", exports=3) as server:
            info = json.loads(
                run("nbdinfo", "--json", "--list", re.sub(r"///[^?]*", "///", server.uri)).out)
            self.assertEqual(
                [(export["export-name"], export.get("description")) for export in info["exports"]],
                [("sealed.bcow", "first"), ("other one.bcow", None), ("third/ä", None)])
            for uri, read_only in zip(server.uris, (True, False, True)):
                export = json.loads(run("nbdinfo", "--json", uri).out)["exports"][0]
                self.assertEqual((export["export-size"], export["is_read_only"]), (SIZE, read_only),
                                 uri)
            listed = run("qemu-nbd", "--list", "-k", self.socket()).out.decode()
            self.assertIn("exports available: 3", listed)
            missing = run("nbdinfo", re.sub(r"///[^?]*", "///fourth", server.uri), check=False)
            self.assertNotEqual(missing.code, 0)
            self.assertIn(b"fourth", missing.err)

    def test_the_map_of_nbdinfo_agrees_with_that_of_bcow(self):
        expected = []
        for extent in json.loads(bcow("map", "--json", self.sealed).out)["extents"]:
            kind = (0, "data") if extent["kind"] in ("raw", "zstd", "open") else (3, "hole,zero")
            if expected and expected[-1][2:] == kind:
                expected[-1] = (expected[-1][0], expected[-1][1] + extent["length"], *kind)
            else:
                expected.append((extent["offset"], extent["length"], *kind))
        with served(self.sealed, "--socket", self.socket()) as server:
            extents = json.loads(run("nbdinfo", "--json", "--map", server.uri).out)
            self.assertEqual([(e["offset"], e["length"], e["type"], e["description"])
                              for e in extents], expected)
            depth = json.loads(
                run("nbdinfo", "--json", "--map=qemu:allocation-depth", server.uri).out)
            self.assertEqual([(e["offset"], e["length"], e["type"]) for e in depth],
                             [(at, length, 0 if kind else 1) for at, length, kind, _ in expected])
            # qemu uses another request; it reports data in the same ranges.
            extents = json.loads(
                run("qemu-img", "map", "--output=json", "-f", "raw", server.uri).out)
            data = [(e["start"], e["length"]) for e in extents if e["data"]]
            self.assertEqual(data, [(at, length) for at, length, kind, _ in expected if kind == 0])

    def test_qemu_img_and_nbdcopy_read_every_byte(self):
        with served(self.sealed, "--socket", self.socket()) as server:
            self.assertIn(f"({SIZE} bytes)", run("qemu-img", "info", server.uri).out.decode())
            run("qemu-img", "compare", "-f", "raw", "-F", "raw", self.raw, server.uri)
            run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", server.uri,
                self.path("copy.qcow2"))
            run("qemu-img", "compare", self.raw, self.path("copy.qcow2"))
            for options in ((), ("--connections=4", "--requests=64"), ("--synchronous",),
                            ("--allocated",)):
                copy = self.path("copy.raw")
                run("nbdcopy", *options, server.uri, copy)
                self.assertTrue(read_bytes(copy) == self.content, options)
                os.remove(copy)

    def test_nothing_can_be_written_to_a_sealed_disk(self):
        with served(self.sealed, "--socket", self.socket()) as server:
            result = run("qemu-io", "-f", "raw", "-c", "write 0 4096", server.uri, check=False)
            self.assertNotEqual(result.code, 0)
            qemu_io(server.uri, "read 0 4096", options=["-r"])

    def test_old_clients_get_simple_replies(self):
        """The handshake of 2013: EXPORT_NAME, no option before it, simple replies."""
        with served(self.sealed, "--socket", self.socket()) as server:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(self.socket())
                stream = client.makefile("rwb")
                self.assertEqual(stream.read(18), b"NBDMAGICIHAVEOPT\0\3")
                stream.write(struct.pack(">I", 1) + b"IHAVEOPT" + struct.pack(">II", 1, 0))
                stream.flush()
                size, _flags = struct.unpack(">QH", stream.read(10))
                self.assertEqual((size, stream.read(124)), (SIZE, bytes(124)))
                at = DATA[1][0]
                stream.write(struct.pack(">IHHQQI", 0x25609513, 0, 0, 9, at, 5000))
                stream.flush()
                self.assertEqual(stream.read(16), struct.pack(">IIQ", 0x67446698, 0, 9))
                self.assertEqual(stream.read(5000), self.content[at:at + 5000])
            self.assertIsNone(server.process.poll())


class Writers(Serve):
    """A writable disk."""

    def test_what_qemu_io_writes_is_there_afterwards(self):
        disk = self.writable()
        expected = bytearray(self.content)
        expected[12345:12345 + 70000] = b"\x11" * 70000
        expected[10 * MIB:14 * MIB] = b"\x22" * (4 * MIB)
        expected[MIB:2 * MIB] = bytes(MIB)
        expected[2 * MIB:2 * MIB + 65536] = bytes(65536)
        expected[3 * MIB:4 * MIB] = bytes(MIB)
        with served(disk, "--socket", self.socket()) as server:
            qemu_io(server.uri, "write -P 0x11 12345 70000", "write -f -P 0x22 10M 4M",
                    "write -z 1M 1M", "write -z -u 2M 64k", "discard 3M 1M", "flush",
                    "read -P 0x11 12345 70000", "read -P 0x22 10M 4M", "read -P 0 1M 1M",
                    "read -P 0 2M 64k")
            run("nbdinfo", "--can", "fua", server.uri)
            run("nbdinfo", "--can", "zero", server.uri)
            run("nbdinfo", "--can", "trim", server.uri)
        self.assert_same_content(disk, bytes(expected))
        bcow("fsck", disk)

    def test_whole_disks_are_copied_in(self):
        other = (random.Random(7).randbytes(3 * MIB) + bytes(40 * MIB)
                 + random.Random(8).randbytes(SIZE - 43 * MIB))
        write_file(self.path("other.raw"), other)
        for command in (("nbdcopy", "--flush", self.path("other.raw")),
                        ("nbdcopy", "--connections=4", "--flush", self.path("other.raw")),
                        ("qemu-img", "convert", "-n", "-f", "raw", "-O", "raw",
                         self.path("other.raw"))):
            disk = self.writable("copied.bcow")
            with served(disk, "--socket", self.socket()) as server:
                run(*command, server.uri)
                run("qemu-img", "compare", "-f", "raw", "-F", "raw", self.path("other.raw"),
                    server.uri)
            self.assert_same_content(disk, other)
            self.doCleanups()

    def test_nbdsh_requests_give_the_expected_results(self):
        need("nbdsh")
        disk = self.writable()
        script = """
import nbd
assert h.get_size() == 64 << 20 and h.can_meta_context("base:allocation")
before = h.pread(10, 5 << 20)
h.pwrite(b"x" * 4096, 8 << 20, nbd.CMD_FLAG_FUA)
h.zero(4096, 8 << 20, nbd.CMD_FLAG_NO_HOLE)
assert h.pread(4096, 8 << 20) == bytes(4096)
h.pwrite(b"y" * 8192, 8 << 20)
h.zero(4096, (8 << 20) + 4096, nbd.CMD_FLAG_FAST_ZERO)
assert h.pread(8192, 8 << 20) == b"y" * 4096 + bytes(4096)
h.trim(8192, 8 << 20)
h.cache(1 << 20, 0)
h.flush()
for flags in (0, nbd.CMD_FLAG_REQ_ONE):
    found = {}
    h.block_status(64 << 20, 0,
                   lambda name, at, extents, error: found.update({name: extents}), flags)
    assert set(found) == {"base:allocation", "qemu:allocation-depth"}, found
    assert (len(found["base:allocation"]) == 2) == bool(flags), found
pieces = []
def add(data, at, status, error):
    pieces.append((at, len(data), status))
h.pread_structured(1 << 20, 19 << 20, add, nbd.CMD_FLAG_DF)
assert pieces == [(19 << 20, 1 << 20, nbd.READ_DATA)], pieces
pieces.clear()
h.pread_structured(1 << 20, 19 << 20, add)
assert pieces == [(19 << 20, 1 << 20, nbd.READ_HOLE)], pieces
h.set_strict_mode(0)
for bad in (lambda: h.pread(1, 64 << 20), lambda: h.pwrite(b"z", 64 << 20),
            lambda: h.trim(1, 64 << 20),
            lambda: h.zero(4096, 0, nbd.CMD_FLAG_FAST_ZERO | nbd.CMD_FLAG_NO_HOLE)):
    try:
        bad()
        raise SystemExit("nothing failed")
    except nbd.Error:
        pass
h.shutdown()
"""
        with served(disk, "--socket", self.socket()) as server:
            # nbdsh finds python3 by the PATH, and needs Debian's.
            run("nbdsh", "--base-allocation", "-c", "h.add_meta_context('qemu:allocation-depth')",
                "-u", server.uri, "-c", script, env={"PATH": f"/usr/bin:{os.environ['PATH']}"})

    def test_nbdfuse_shows_the_disk_as_a_file(self):
        need("nbdfuse", "fusermount3", fuse=True)
        disk = self.writable()
        where = self.path("nbdfuse")
        os.mkdir(where)
        expected = bytearray(self.content)
        with served(disk, "--socket", self.socket()) as server:
            fuse = subprocess.Popen(["nbdfuse", where, server.uri])
            try:
                file = os.path.join(where, "nbd")
                until(lambda: os.path.exists(file), "nbdfuse shows the disk")
                with open(file, "r+b", buffering=0) as nbd:
                    nbd.seek(1_000_001)
                    self.assertEqual(nbd.read(100_000), self.content[1_000_001:1_100_001])
                    nbd.seek(30 * MIB + 7)
                    nbd.write(b"through a file" * 1000)
                    os.fsync(nbd.fileno())
                expected[30 * MIB + 7:30 * MIB + 7 + 14000] = b"through a file" * 1000
            finally:
                subprocess.run(["fusermount3", "-u", where])
                fuse.wait(timeout=30)
        self.assert_same_content(disk, bytes(expected))

    def test_changes_of_a_snapshot_export_are_discarded(self):
        disk = self.writable()
        with served(disk, self.sealed, "--snapshot", "--socket", self.socket(),
                    exports=2) as server:
            for uri in server.uris:
                qemu_io(uri, "write -P 0x55 1M 1M", "write -P 0x56 30M 4k", "flush")
                # All clients share one overlay.
                qemu_io(uri, "read -P 0x55 1M 1M", "read -P 0x56 30M 4k")
        self.assert_same_content(disk, self.content)
        self.assert_same_content(self.sealed, self.content)

    def test_a_read_only_export_refuses_writes(self):
        disk = self.writable()
        with served(disk, "--read-only", "--socket", self.socket()) as server:
            self.assertTrue(
                json.loads(run("nbdinfo", "--json", server.uri).out)["exports"][0]["is_read_only"])
            run("qemu-img", "compare", "-f", "raw", "-F", "raw", self.raw, server.uri)

    def test_a_flush_on_one_connection_covers_another(self):
        need("nbdsh")
        disk = self.writable()
        server = Served(disk, "--socket", self.socket())
        script = f"""
import nbd
other = nbd.NBD()
other.connect_uri({server.uri!r})
h.pwrite(b"q" * 65536, 50 << 20)
other.flush()
"""
        run("nbdsh", "-u", server.uri, "-c", script, env={"PATH": f"/usr/bin:{os.environ['PATH']}"})
        server.end(signal.SIGKILL)
        expected = bytearray(self.content)
        expected[50 * MIB:50 * MIB + 65536] = b"q" * 65536
        self.assert_same_content(disk, bytes(expected))

    def test_sigterm_in_mid_load_loses_nothing_that_was_answered(self):
        need("nbdsh")
        disk = self.writable()
        # Writes numbered blocks one by one, and prints the numbers of the answered writes.
        script = f"""
import sys
for number in range(1, 1 << 20):
    h.pwrite(number.to_bytes(8, "big") * 512, (number % 4000) * 4096)
    print(number, flush=True)
"""
        with served(disk, "--socket", self.socket()) as server:
            client = subprocess.Popen(["nbdsh", "-u", server.uri, "-c", script],
                                      stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                      env={**os.environ, "PATH": "/usr/bin:/bin"})
            lines = iter(client.stdout.readline, b"")
            for _ in range(500):
                next(lines)
            server.process.send_signal(signal.SIGTERM)
            answered = max([500, *map(int, lines)])
            client.wait(timeout=60)
            client.stdout.close()
            self.assertEqual(server.process.wait(timeout=60), 0)
        shown = self.content_of(disk)
        for number in range(max(1, answered - 3000), answered + 1):
            at = (number % 4000) * 4096
            self.assertEqual(shown[at:at + 4096], number.to_bytes(8, "big") * 512, number)
        self.assertFalse(os.path.exists(self.socket()))

    def test_a_second_writer_is_refused_by_name_of_the_first(self):
        disk = self.writable()
        with served(disk, "--socket", self.socket()) as server:
            result = bcow("serve", disk, "--socket", self.path("second.sock"), check=False,
                          timeout=60)
            assert_refused(self, result, "bcow serve", str(server.process.pid))
            self.assertFalse(os.path.exists(self.path("second.sock")))


class Drivers(Serve):
    """Sockets, service managers, signals."""

    def test_the_socket_is_private_and_goes_with_the_server(self):
        with served(self.sealed, "--socket", self.socket(), umask=0):
            mode = os.lstat(self.socket()).st_mode
            self.assertTrue(stat.S_ISSOCK(mode))
            self.assertEqual(stat.S_IMODE(mode), 0o600)
            result = bcow("serve", self.sealed, "--socket", self.socket(), check=False)
            assert_refused(self, result, "another server listens there")
        self.assertFalse(os.path.exists(self.socket()))

    def test_the_socket_of_a_dead_server_is_replaced_and_a_file_is_not(self):
        server = Served(self.sealed, "--socket", self.socket())
        server.end(signal.SIGKILL)
        self.assertTrue(os.path.exists(self.socket()))
        with served(self.sealed, "--socket", self.socket()) as server:
            run("nbdinfo", "--size", server.uri)
        before = os.stat(self.raw)
        assert_refused(self, bcow("serve", self.sealed, "--socket", self.raw, check=False),
                       "is not a socket")
        self.assertEqual(os.stat(self.raw), before)

    def test_without_a_place_the_socket_is_in_the_runtime_directory(self):
        runtime = self.path("run")
        os.mkdir(runtime)
        with served(self.sealed, env={**os.environ, "XDG_RUNTIME_DIR": runtime}) as server:
            self.assertIn(runtime, server.uri)
            run("nbdinfo", "--size", server.uri)
        self.assertEqual(os.listdir(os.path.join(runtime, "bcow")), [])

    def test_tcp_listens_on_the_given_addresses(self):
        with served(self.sealed, "--listen", "127.0.0.1:0", "--listen", "[::1]:0",
                    exports=2) as server:
            for uri in server.uris:
                run("qemu-img", "compare", "-f", "raw", "-F", "raw", self.raw, uri)
            self.assertEqual(server.output(), "")
        with served(self.sealed, "--listen", "0.0.0.0:0") as server:
            self.assertIn("warning: every client that reaches 0.0.0.0", server.output())

    def test_systemd_passes_sockets(self):
        need("systemd-socket-activate")
        path = self.socket()
        manager = subprocess.Popen(["systemd-socket-activate", "-l", path, BCOW, "serve",
                                    self.sealed, "--exit-on-idle", "1"], stdout=subprocess.PIPE,
                                   stderr=subprocess.DEVNULL)
        try:
            until(lambda: os.path.exists(path), "systemd-socket-activate listens")
            uri = f"nbd+unix:///?socket={path}"
            self.assertEqual(run("nbdinfo", "--size", uri).out.strip(), str(SIZE).encode())
            self.assertEqual(manager.stdout.readline().decode().strip(), uri)
            # The process becomes the server, and ends when no client is left; it does not own the
            # socket.
            self.assertEqual(manager.wait(timeout=30), 0)
            self.assertTrue(os.path.exists(path))
        finally:
            manager.kill()
            manager.wait()
            manager.stdout.close()

    def test_service_managers_are_notified(self):
        notify = self.path("notify")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
            listener.bind(notify)
            listener.settimeout(30)
            pid_file = self.path("pid")
            sockets = [end.detach() for end in socket.socketpair()]
            for reader, writer in os.pipe(), sockets:
                with served(self.sealed, "--socket", self.socket(), "--ready-fd", str(writer),
                            "--pid-file", pid_file, pass_fds=[writer],
                            env={**os.environ, "NOTIFY_SOCKET": notify}) as server:
                    os.close(writer)
                    self.assertEqual(os.read(reader, 10), b"\n")
                    self.assertEqual(listener.recv(100), b"READY=1")
                    self.assertEqual(int(read_text(pid_file)), server.process.pid)
                self.assertEqual(listener.recv(100), b"STOPPING=1")
                os.close(reader)
                self.assertFalse(os.path.exists(pid_file))

    def test_invalid_arguments_are_refused(self):
        assert_refused(self, bcow("serve", "--socket", "x", check=False), "required", code=2)
        for arguments, mention in (
                ((self.sealed, self.sealed), "two exports"),
                ((self.sealed, "--export", "x"), "NAME=IMG"),
                ((self.sealed, "--listen", "nonsense"), "cannot listen on nonsense"),
                ((self.sealed, "--tls-cert", self.raw, "--tls-key", self.raw), "disk.raw"),
                ((self.raw,), "raw"),
                ((self.path("missing.bcow"),), "missing.bcow")):
            result = bcow("serve", *arguments, "--socket", self.socket(), check=False)
            assert_refused(self, result, mention, code=result.code)
            self.assertIn(result.code, (1, 2))
            self.assertFalse(os.path.exists(self.socket()))


class Tls(Serve):
    """Certificates by openssl, clients by GnuTLS."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        need("openssl")
        cls.certificates = cls.path("certificates")
        os.mkdir(cls.certificates)
        in_it = {"cwd": cls.certificates, "check": True, "stderr": subprocess.DEVNULL}
        for ca in ("ca", "other"):
            subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout",
                            f"{ca}-key.pem", "-out", f"{ca}-cert.pem", "-days", "3", "-subj",
                            f"/CN={ca}", "-addext", "keyUsage=keyCertSign"], **in_it)
        for name, ca in (("server", "ca"), ("client", "ca"), ("stranger", "other")):
            use = "serverAuth" if name == "server" else "clientAuth"
            with open(os.path.join(cls.certificates, "extensions"), "w") as file:
                file.write("subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=CA:FALSE\n"
                           f"extendedKeyUsage={use}\n")
            subprocess.run(["openssl", "req", "-newkey", "rsa:2048", "-nodes", "-keyout",
                            f"{name}-key.pem", "-out", "request", "-subj", f"/CN={name}"], **in_it)
            subprocess.run(["openssl", "x509", "-req", "-in", "request", "-CA", f"{ca}-cert.pem",
                            "-CAkey", f"{ca}-key.pem", "-CAcreateserial", "-out",
                            f"{name}-cert.pem", "-days", "3", "-extfile", "extensions"], **in_it)
        # Without extensions openssl makes a certificate of version 1.
        subprocess.run(["openssl", "req", "-newkey", "rsa:2048", "-nodes", "-keyout", "old-key.pem",
                        "-out", "request", "-subj", "/CN=old"], **in_it)
        subprocess.run(["openssl", "x509", "-req", "-in", "request", "-CA", "ca-cert.pem", "-CAkey",
                        "ca-key.pem", "-CAcreateserial", "-out", "old-cert.pem", "-days", "3"],
                       **in_it)
        # A client has a directory, with the usual file names of GnuTLS programs.
        for name in ("anonymous", "stranger", "old"):
            os.mkdir(os.path.join(cls.certificates, name))
            os.symlink("../ca-cert.pem", os.path.join(cls.certificates, name, "ca-cert.pem"))
        for name, part in itertools.product(("stranger", "old"), ("cert", "key")):
            os.symlink(f"../{name}-{part}.pem",
                       os.path.join(cls.certificates, name, f"client-{part}.pem"))

    def options(self, *more, ca=True):
        at = lambda name: os.path.join(self.certificates, name)
        options = ["--tls-cert", at("server-cert.pem"), "--tls-key", at("server-key.pem"), *more]
        return options + (["--tls-ca", at("ca-cert.pem")] if ca else [])

    def with_certificates(self, uri, directory="."):
        mark = "&" if "?" in uri else "?"
        return f"{uri}{mark}tls-certificates={os.path.join(self.certificates, directory)}"

    def test_nbdinfo_nbdcopy_and_qemu(self):
        disk = self.writable()
        with served(disk, "--socket", self.socket(), "--listen", "127.0.0.1:0", *self.options(),
                    exports=2) as server:
            for uri in server.uris:
                info = json.loads(run("nbdinfo", "--json", self.with_certificates(uri)).out)
                self.assertTrue(info["TLS"])
            copy = self.path("tls.raw")
            run("nbdcopy", self.with_certificates(server.uri), copy)
            self.assertTrue(read_bytes(copy) == self.content)
            port = re.search(r":(\d+)/", server.uris[1]).group(1)
            run("qemu-io", "--object",
                f"tls-creds-x509,id=tls,dir={self.certificates},endpoint=client,verify-peer=yes",
                "-c", "write -P 0x31 1M 2M", "-c", "read -P 0x31 1M 2M", "-c", "flush",
                "--image-opts",
                "driver=raw,file.driver=nbd,file.host=127.0.0.1,"
                f"file.port={port},file.tls-creds=tls")
        expected = bytearray(self.content)
        expected[MIB:3 * MIB] = b"\x31" * (2 * MIB)
        self.assert_same_content(disk, bytes(expected))

    def test_clients_without_a_valid_certificate_are_refused(self):
        with served(self.sealed, "--socket", self.socket(), *self.options()) as server:
            for directory in ("anonymous", "stranger"):
                result = run("nbdinfo", "--size", self.with_certificates(server.uri, directory),
                             check=False)
                self.assertNotEqual(result.code, 0, directory)
            run("nbdinfo", "--size", self.with_certificates(server.uri))
        with served(self.sealed, "--socket", self.socket(), *self.options(ca=False)) as server:
            run("nbdinfo", "--size", self.with_certificates(server.uri, "anonymous"))

    def test_requests_without_tls_are_refused_unless_allowed(self):
        with served(self.sealed, "--socket", self.socket(), *self.options()) as server:
            plain = server.uri.replace("nbds+", "nbd+")
            for command in (("--size", plain), ("--list", plain)):
                result = run("nbdinfo", *command, check=False)
                self.assertNotEqual(result.code, 0)
                self.assertNotIn(str(SIZE).encode(), result.out)
        with served(self.sealed, "--socket", self.socket(),
                    *self.options("--tls", "allow")) as server:
            run("nbdinfo", "--size", server.uri.replace("nbds+", "nbd+"))
            run("nbdinfo", "--size", self.with_certificates(server.uri))
        for how, warnings in (("allow", 1), ("require", 0)):
            with (self.subTest(tls=how),
                  served(self.sealed, "--listen", "0.0.0.0:0",
                         *self.options("--tls", how)) as server):
                self.assertEqual(server.output().count("without encryption"), warnings)

    def test_the_log_names_the_reason_of_a_refusal(self):
        certificate = subprocess.run(["openssl", "x509", "-in", "old-cert.pem", "-noout", "-text"],
                                     cwd=self.certificates, capture_output=True, check=True)
        self.assertIn(b"Version: 1 ", certificate.stdout)
        for directory, why in (("old", "not of X.509 version 3"), ("anonymous", "no certificate"),
                               (None, "did not start TLS")):
            with (self.subTest(directory),
                  served(self.sealed, "--listen", "127.0.0.1:0", *self.options()) as server):
                uri = (self.with_certificates(server.uri, directory) if directory
                       else server.uri.replace("nbds", "nbd"))
                self.assertNotEqual(run("nbdinfo", "--size", uri, check=False).code, 0)
                until(lambda: "is refused" in server.output(), "the refusal is in the log",
                      seconds=30)
                lines = [line for line in server.output().splitlines() if "is refused" in line]
                self.assertEqual(len(lines), 1, lines)
                self.assertIn(why, lines[0])
                self.assertIn("at 127.0.0.1:", lines[0])

    def test_options_injected_before_tls_are_not_answered(self):
        """CVE-2021-3716: a man in the middle adds options behind STARTTLS, which the server would
        attribute to the client."""
        list_option = b"IHAVEOPT" + struct.pack(">II", 3, 0)
        with served(self.sealed, "--socket", self.socket(),
                    *self.options("--tls", "allow")) as server:
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(30)
                client.connect(self.socket())
                client.sendall(struct.pack(">I", 3) +
                               b"IHAVEOPT" + struct.pack(">II", 5, 0) + list_option)
                output = b""
                with contextlib.suppress(ConnectionResetError):
                    while piece := client.recv(4096):
                        output += piece
            self.assertNotIn(b"sealed.bcow", output)
            run("nbdinfo", "--size", self.with_certificates(server.uri))


class Crowds(Serve):
    """Too many clients, and clients with too many requests."""

    def test_a_thousand_clients_with_32_mib_each_in_bounded_memory(self):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.addCleanup(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        with served(self.sealed, "--socket", self.socket(), "--request-timeout", "5",
                    "--handshake-timeout", "5", "--max-clients", "900") as server:
            # Compact requests with simple replies: the server has to have the whole read before it
            # answers.
            hello = struct.pack(">I", 3) + b"IHAVEOPT" + struct.pack(">II", 1, 0)
            greedy = (b"".join(struct.pack(">IHHQQI", 0x25609513, 0, 0, n, 0, 32 * MIB)
                               for n in range(20)))
            crowd = []
            for _ in range(1000):
                client = socket.socket(socket.AF_UNIX)
                self.addCleanup(client.close)
                client.connect(self.socket())
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    client.sendall(hello + greedy)
                crowd.append(client)
            # None of the clients reads a reply. The server disconnects them after a time, and then
            # accepts new clients.
            def there_is_room():
                return run("nbdinfo", "--size", server.uri, check=False).code == 0
            until(there_is_room, "the crowd is gone")
            self.assertLess(server.peak_bytes(), 900 << 20)

    def test_rate_counts_data_and_not_holes(self):
        with open(self.path("hole.raw"), "wb") as file:
            file.write(self.content[:16384])
            file.truncate(SIZE)
        bcow("convert", f"raw:{self.path('hole.raw')}", self.path("hole.bcow"))
        with served(self.path("hole.bcow"), "--socket", self.socket(), "--rate", "64K") as server:
            # The first second's amount is not delayed. At this rate, the whole disk would take 1024
            # seconds.
            run("nbdcopy", "--connections=1", server.uri, self.path("slow.raw"), timeout=300)
        with served(self.sealed, "--socket", self.socket(), "--rate", "16M") as server:
            # 36 MiB: at least a second, however fast the machine is.
            begin = time.monotonic()
            qemu_io(server.uri, *["read 0 4M"] * 9, options=["-r"])
            self.assertGreater(time.monotonic() - begin, 1)


if __name__ == "__main__":
    unittest.main()
