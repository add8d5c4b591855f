"""Remote images: read over HTTPS, checked, cached, and without the server.

The servers are Python's http.server with ranges and TLS, which counts what it sends, and Debian's
docker-registry with TLS and a password, on ports of this machine's own. Every command and every
wait has a time limit.
"""

import base64
import contextlib
import errno
import hashlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import unittest
import unittest.mock

import web
from support import (BCOW, Scratch, assert_same_tree, bcow, blob_path, blobs_of, converted,
                     digest_in, for_everyone, image, manifest_in, mounted, need, overwrite,
                     read_bytes, read_json, read_text, run, served, skopeo_copy, until, write_file)
from web import WebServer, free_port, listening, tls

TIMEOUT = 60


class Handler(web.Handler):
    """Sends files of one directory, whole or a range."""

    def do_GET(self):
        server = self.server
        if server.broken:
            self.close_connection = True
            return
        time.sleep(server.pause)
        path = os.path.join(server.directory, os.path.basename(self.path.split("?")[0]))
        try:
            file = open(path, "rb")
        except OSError:
            self.answer(404, b"")
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            asked = self.asked_range(size)
            if not asked:
                self.answer(200, file.read())
                return
            first, last = asked
            file.seek(first)
            with server.lock:
                server.ranges.append(asked)
            self.answer(206, file.read(last + 1 - first),
                        {"Content-Range": f"bytes {first}-{last}/{size}"})

    def answer(self, status, data, *more):
        super().answer(status, data, *more)
        with self.server.lock:
            self.server.sent += len(data)


class Server(WebServer):
    """Serves the files of a directory, and counts what it sends."""

    def __init__(self, directory, context=None):
        super().__init__(Handler, context)
        self.directory = directory
        self.sent, self.broken, self.pause = 0, False, 0
        # First and last byte of each range that was asked for.
        self.ranges = []

    def url(self, name):
        return f"{self.scheme}://localhost:{self.server_address[1]}/{name}"


def make_certificates(directory):
    """A CA, and a certificate of it for localhost: rustls refuses self-signed ones."""
    def openssl(*arguments):
        run("openssl", *arguments, timeout=TIMEOUT)

    def at(name):
        return os.path.join(directory, name)

    openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-keyout", at("ca.key"), "-out", at("ca.pem"), "-days", "2", "-subj", "/CN=test CA",
            "-addext", "basicConstraints=critical,CA:TRUE")
    openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-keyout", at("leaf.key"), "-out", at("leaf.csr"), "-subj", "/CN=localhost")
    write_file(at("extensions"), "subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    openssl("x509", "-req", "-in", at("leaf.csr"), "-CA", at("ca.pem"), "-CAkey", at("ca.key"),
            "-CAcreateserial", "-days", "2", "-extfile", at("extensions"), "-out", at("leaf.pem"))


def metrics(path):
    """The page for Prometheus at a Unix socket."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(TIMEOUT)
        client.connect(path)
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        with client.makefile() as answer:
            return answer.read()


def make_files(top, count, size):
    """Directories, each with a file of `size` bytes that do not compress."""
    for n in range(count):
        os.mkdir(os.path.join(top, f"dir-{n}"))
        write_file(os.path.join(top, f"dir-{n}", "file"), os.urandom(size))


def samples(path):
    """The samples on that page, by name and labels."""
    return dict(line.rsplit(" ", 1) for line in metrics(path).splitlines()
                if line.startswith("bcow_"))


def make_served(case):
    """Makes the tree of a class, and the image of it in a directory for a server."""
    case.tree, case.served = case.path("tree"), case.path("served")
    os.mkdir(case.tree)
    os.mkdir(case.served)
    case.make_tree(case.tree)
    case.image = os.path.join(case.served, "image.bcow")
    bcow("convert", f"dir:{case.tree}", case.image, timeout=TIMEOUT)
    case.bytes = os.path.getsize(case.image)
    found = json.loads(bcow("inspect", "--json", case.image, timeout=TIMEOUT).out)
    case.root = found["merkle"]["root"]


class RemoteCase(Scratch):
    """The base of tests with remote images."""

    def setUp(self):
        self.cache = tempfile.mkdtemp(prefix="cache-", dir=self.directory)
        self.env = {"SSL_CERT_FILE": self.path("ca.pem"), "BCOW_CACHE": self.cache,
                    "NO_PROXY": "localhost,127.0.0.1", "no_proxy": "localhost,127.0.0.1"}

    def bcow(self, *arguments, **options):
        return bcow(*arguments, env=self.env, timeout=TIMEOUT, **options)

    def started(self, *arguments, **options):
        """The running command."""
        return subprocess.Popen([BCOW, *arguments], env={**os.environ, **self.env},
                                stdin=subprocess.DEVNULL, **options)

    @contextlib.contextmanager
    def mounted(self, *arguments):
        with unittest.mock.patch.dict(os.environ, self.env), mounted(*arguments) as where:
            yield where


class WebCase(RemoteCase):
    """The base of tests with an image on a web server with TLS."""

    @classmethod
    def setUpClass(cls):
        need("openssl", root=True, fuse=True)
        super().setUpClass()
        make_certificates(cls.directory)
        cls.context = tls(cls.directory)
        make_served(cls)

    @classmethod
    def make_tree(cls, top):
        """Some 24 MB that do not compress, in files of all sizes."""
        for n in range(40):
            directory = os.path.join(top, f"dir-{n}")
            os.makedirs(directory)
            for m in range(20):
                write_file(os.path.join(directory, f"file-{m}"), os.urandom(3000 * m))
        write_file(os.path.join(top, "large"), os.urandom(1 << 20))
        os.symlink("dir-1/file-1", os.path.join(top, "link"))

    def server(self):
        return Server(self.served, self.context)


class Remote(WebCase):
    def test_listing_fetches_a_small_part_of_the_file(self):
        with self.server() as server:
            local = bcow("ls", "-R", self.image, timeout=TIMEOUT).out
            self.assertEqual(self.bcow("ls", "-R", server.url("image.bcow")).out, local)
            self.assertLess(server.sent, self.bytes // 10)
            sent = server.sent
            self.bcow("cat", server.url("image.bcow"), "/dir-7/file-3")
            self.assertLess(server.sent - sent, self.bytes // 10)

    def test_every_byte_is_checked_over_tls(self):
        with self.server() as server:
            self.bcow("fsck", "--data", server.url("image.bcow"))
            self.assertLess(server.sent, self.bytes * 1.1)
            self.bcow("diff", "--root-hash", self.root, server.url("image.bcow"), self.image)
            copy = self.path("copy.bcow")
            self.bcow("convert", "--force", server.url("image.bcow"), copy)
            bcow("diff", copy, self.image, timeout=TIMEOUT)

    def test_mount_shows_the_tree(self):
        with self.server() as server, self.mounted(server.url("image.bcow")) as where:
            assert_same_tree(self, self.tree, where)

    def test_dead_server_is_an_input_output_error_until_it_is_back(self):
        with self.server() as server:
            url = server.url("image.bcow")
            log = self.path("mount.log")
            with self.mounted(url, "--server-timeout", "2", "--log-file", log) as where:
                os.listdir(where)
                server.broken = True
                large = os.path.join(where, "large")
                begin = time.monotonic()
                with self.assertRaises(OSError) as failed:
                    read_bytes(large)
                self.assertEqual(failed.exception.errno, errno.EIO)
                self.assertLess(time.monotonic() - begin, TIMEOUT)
                self.assertRegex(read_text(log), r"bytes \d+\.\.\d+ of https://localhost:\d+/image")
                server.broken = False
                own = read_bytes(os.path.join(self.tree, "large"))
                self.assertTrue(read_bytes(large) == own, "the content of /large")

    def statistics(self, where):
        return json.loads(bcow("stats", "--json", where, timeout=TIMEOUT).out)["remote"]

    def test_statistics_tell_what_is_here_what_came_from_where_and_what_waits(self):
        socket_path = os.path.join(self.cache, "metrics")
        with self.server() as server:
            url = server.url("image.bcow") + "?signature=geheim"
            with self.mounted(url, "--metrics", f"unix:{socket_path}") as where:
                large = os.path.join(where, "large")
                read_bytes(large)
                until(lambda: self.statistics(where)["running_requests"] == 0, "no request runs")
                found = self.statistics(where)
                self.assertEqual((found["files"], found["file_bytes"]), (1, self.bytes))
                self.assertGreaterEqual(found["held_bytes"], 1 << 20)
                self.assertLess(found["held_bytes"], self.bytes // 2)
                self.assertGreaterEqual(found["fetched_bytes"], 1 << 20)
                self.assertEqual([one["server"] for one in found["servers"]],
                                 [server.url("").rstrip("/")])
                received = found["servers"][0]["received_bytes"]
                until(lambda: server.sent == received, "as many bytes came as were sent", 10)
                self.assertEqual((found["waiting_reads"], found["longest_wait_seconds"]), (0, 0))
                self.assertFalse(any(kind["count"] for kind in found["errors"]), found)

                # A read waits for a server that is gone, and ends when it is back.
                server.broken = True
                reader = subprocess.Popen(["diff", "-r", "--no-dereference", self.tree, where])
                try:
                    until(lambda: self.statistics(where)["waiting_reads"] > 0, "a read waits", 20)
                    until(lambda: self.statistics(where)["retries"] > 0, "a second attempt", 20)
                    server.broken = False
                    self.assertEqual(reader.wait(TIMEOUT), 0)
                finally:
                    server.broken = False
                    reader.kill()
                    reader.wait(TIMEOUT)
                found = self.statistics(where)
                kinds = {kind["kind"]: kind["count"] for kind in found["errors"]}
                self.assertGreater(kinds["connection"], 0)

                shown = bcow("stats", where, timeout=TIMEOUT).out
                for name in b"here:", b"fetched:", b"server:", b"waiting:", b"failed:":
                    self.assertIn(name, shown)
                page = metrics(socket_path)
                for name in ("bcow_remote_file_bytes", "bcow_remote_held_bytes",
                             "bcow_remote_requests_total{server=\"https://localhost:",
                             "bcow_remote_errors_total{kind=\"connection\"}"):
                    self.assertIn(f"\n{name}", page)
                self.assertNotIn("geheim", page + shown.decode())
        with mounted(self.image) as where:
            self.assertIsNone(self.statistics(where))

    def damaged(self, name, chunks):
        """A copy of the image on the server, in which these chunks are zeros."""
        data = bytearray(read_bytes(self.image))
        for chunk in chunks:
            data[chunk << 14:(chunk + 1) << 14] = bytes(1 << 14)
        write_file(os.path.join(self.served, name), data)

    def test_fsck_names_the_files_of_all_wrong_chunks(self):
        with self.server() as server:
            self.damaged("damaged.bcow", (40, 300, 301, 900))
            url = server.url("damaged.bcow")
            checked = self.bcow("fsck", "--data", "--json", url, check=False)
            self.assertEqual(checked.code, 4, str(checked))
            found = json.loads(checked.out)
            codes = {finding["code"] for finding in found["findings"]}
            self.assertLessEqual({"merkle", "file-data"}, codes)
            local = json.loads(bcow("fsck", "--data", "--json",
                                    os.path.join(self.served, "damaged.bcow"), check=False,
                                    timeout=TIMEOUT).out)

            def files(document):
                return sorted(f["place"] for f in document["findings"] if f["code"] == "file-data")
            self.assertEqual(files(found), files(local))
            self.assertGreaterEqual(len(files(found)), 3)
            shown = self.bcow("fsck", "--data", url, check=False)
            self.assertIn(b"hint: replace the damaged file on the server", shown.err)

    def test_damaged_disk_on_a_server_gets_the_hints_for_disks(self):
        disk = os.path.join(self.served, "disk.bcow")
        raw = self.path("disk.raw")
        write_file(raw, os.urandom(1 << 20))
        bcow("convert", "--compress", "none", f"raw:{raw}", disk, timeout=TIMEOUT)
        overwrite(disk, 1 << 19, b"wrong")
        with self.server() as server:
            shown = self.bcow("fsck", "--data", server.url("disk.bcow"), check=False)
        self.assertEqual(shown.code, 4, str(shown))
        self.assertIn(b"qemu-img convert --salvage", shown.err)
        self.assertNotIn(b"bcow convert", shown.err)

    def test_damaged_and_missing_bytes_are_restored_from_the_server(self):
        broken = os.path.join(self.cache, "broken.bcow")
        with self.server() as server:
            shutil.copy(self.image, broken)
            for place in 5000, 1 << 20, self.bytes - 9:
                overwrite(broken, place, b"wrong")
            self.bcow("fsck", "--repair", "--from", server.url("image.bcow"), broken, check=False)
            run("cmp", broken, self.image, timeout=TIMEOUT)
            os.truncate(broken, self.bytes // 2)
            sent = server.sent
            self.bcow("fsck", "--repair", "--no-cache", "--from", server.url("image.bcow"), broken,
                      check=False)
            run("cmp", broken, self.image, timeout=TIMEOUT)
            self.assertLess(server.sent - sent, self.bytes * 3 // 4)

    def test_unknown_certificate_is_refused(self):
        del self.env["SSL_CERT_FILE"]
        with self.server() as server:
            failed = self.bcow("ls", server.url("image.bcow"), check=False)
        self.assertEqual(failed.code, 1)
        self.assertIn(b"TLS failed", failed.err)
        self.assertEqual(server.sent, 0)

    def test_plain_http_needs_permission(self):
        with Server(self.served) as server:
            url = server.url("image.bcow")
            refused = self.bcow("ls", url, check=False)
            self.assertEqual(refused.code, 1)
            self.assertIn(b"--insecure", refused.err)
            self.assertEqual(server.sent, 0)
            encrypted = self.bcow("ls", url.replace("http:", "https:"), check=False)
            self.assertIn(b"probably speaks plain HTTP", encrypted.err)
            self.assertIn(b"--insecure", encrypted.err)
            self.bcow("ls", "--insecure", url)

    def test_signature_in_the_query_is_shown_nowhere(self):
        with self.server() as server:
            url = server.url("image.bcow") + "?signature=geheim"
            extracted = self.path("extracted")
            os.mkdir(extracted)
            shown = [self.bcow("-vv", *command) for command in (
                ("inspect", url), ("fsck", url), ("map", url), ("diff", url, url),
                ("extract", url, "/dir-1", extracted))]
            mounted_at = self.path("mounted")
            os.mkdir(mounted_at)
            try:
                shown.append(self.bcow("-vv", "mount", url, mounted_at))
            finally:
                shown.append(self.bcow("umount", mounted_at))
            failed = self.bcow("-vv", "ls", server.url("none.bcow") + "?signature=geheim",
                               check=False)
            with self.mounted(url) as where:
                os.listdir(where)
                self.assertNotIn("geheim", read_text("/proc/self/mounts"))
                running = bcow("ps", "--json", timeout=TIMEOUT).out
            # Clients see the names of exports: the second export makes them a part of the URIs.
            with served(url, "--export", f"other={url}", "--socket", self.path("nbd"),
                        exports=2, env={**os.environ, **self.env}) as exports:
                self.assertIn("/image.bcow?", exports.uris[0])
                running += bcow("ps", "--json", timeout=TIMEOUT).out
                running += exports.output().encode() + " ".join(exports.uris).encode()
        for result in (*shown, failed):
            self.assertNotIn(b"geheim", result.out + result.err)
        self.assertNotIn(b"geheim", running)
        self.assertEqual(failed.code, 1)

    def test_ordinary_user_has_a_private_cache(self):
        home = tempfile.mkdtemp(prefix="bcow-remote-", dir="/var/tmp")
        try:
            os.chown(home, 65534, 65534)
            self.env = {**self.env, "HOME": home, "BCOW_CACHE": "", "XDG_CACHE_HOME": ""}
            shutil.copy(self.path("ca.pem"), home)
            self.env["SSL_CERT_FILE"] = os.path.join(home, "ca.pem")
            with self.server() as server:
                url = server.url("image.bcow")
                self.bcow("ls", url, user=65534)
                # As root of a user namespace, who cannot use the cache of the machine's root.
                listed = run("unshare", "--user", "--map-root-user", for_everyone(BCOW), "ls", url,
                             user=65534, env=self.env, timeout=TIMEOUT)
                self.assertEqual(listed.err, b"")
            cache = os.path.join(home, ".cache", "bcow")
            self.assertEqual(os.stat(cache).st_mode & 0o777, 0o700)
            files = [name for name in os.listdir(cache) if name.endswith(".bcow")]
            self.assertEqual(len(files), 1)
        finally:
            shutil.rmtree(home)


REGISTRY = """
version: 0.1
log: {level: error, accesslog: {disabled: true}}
storage: %s
http: {addr: "127.0.0.1:%d", tls: {certificate: "%s", key: "%s"}}
auth: %s
"""
FILES = '{filesystem: {rootdirectory: "%s"}}'
PASSWORDS = '{htpasswd: {realm: "bcow tests", path: "%s"}}'
USER, PASSWORD = "alice", "geheim-4711"
# The bcrypt hash of the password, with the smallest cost.
HASH = "$2b$04$abcdefghijklmnopqrstuu6EAB/ArTDFiaszTBeVMcBMJt4dIHZwO"


def credentials(server, key):
    """A file with the credentials of a server."""
    key = base64.b64encode(key.encode()).decode()
    return json.dumps({"auths": {server: {"auth": key}}})


@contextlib.contextmanager
def registry(directory, auth=None, storage=None, program="docker-registry", env=None):
    """The address of a registry with TLS, for the length of a with block. It asks for a password,
    or what the configuration `auth` says, and keeps blobs in files, or where `storage` says."""
    def at(name):
        return os.path.join(directory, name)

    port = free_port()
    write_file(at("htpasswd"), f"{USER}:{HASH}\n")
    write_file(at("registry.yml"), REGISTRY % (
        storage or FILES % at("storage"), port, at("leaf.pem"), at("leaf.key"),
        auth or PASSWORDS % at("htpasswd")))
    write_file(at("auth.json"), credentials(f"localhost:{port}", f"{USER}:{PASSWORD}"))
    with listening(port, program, "serve", at("registry.yml"), env=env):
        yield f"localhost:{port}"


class Registry(RemoteCase):
    """A stack of layers in a registry."""

    @classmethod
    def setUpClass(cls):
        need("openssl", "skopeo", "docker-registry", root=True, fuse=True)
        super().setUpClass()
        make_certificates(cls.directory)
        cls.source = "oci:" + ":".join(image("small"))
        cls.layout, _ = converted("small", "layout")
        cls.address = cls.enterClassContext(registry(cls.directory))
        for source, name in (f"oci:{cls.layout}:tag", "image:1"), (cls.source, "ordinary:1"):
            skopeo_copy(source, f"docker://{cls.address}/team/{name}", cls.path("auth.json"))
        cls.digest = digest_in(cls.layout)
        cls.name = f"docker://{cls.address}/team/image:1"

    def setUp(self):
        super().setUp()
        self.env["REGISTRY_AUTH_FILE"] = self.path("auth.json")

    def test_image_is_clean_and_reads_like_the_layout(self):
        local = f"oci:{self.layout}:tag"
        self.assertEqual(self.bcow("ls", "-R", self.name).out,
                         bcow("ls", "-R", local, timeout=TIMEOUT).out)
        cached = sum(os.stat(os.path.join(self.cache, name)).st_blocks * 512
                     for name in os.listdir(self.cache))
        stored = sum(map(os.path.getsize, blobs_of(self.layout).values()))
        self.assertLess(cached, stored // 4)
        self.bcow("fsck", "--data", self.name)
        self.bcow("diff", self.name, local)

    def test_digest_covers_every_byte_and_is_enough_without_the_registry(self):
        pinned = f"docker://{self.address}/team/image@{self.digest}"
        self.bcow("fsck", "--data", pinned)
        dead = f"docker://localhost:{free_port()}/team/image@{self.digest}"
        self.assertEqual(self.bcow("ls", "-R", dead).out, self.bcow("ls", "-R", pinned).out)
        other = pinned[:-1] + ("0" if pinned[-1] != "0" else "1")
        self.assertEqual(self.bcow("ls", other, check=False).code, 1)

    def test_manifest_without_a_root_hash_is_read_too(self):
        layout = self.path("older")
        shutil.copytree(self.layout, layout)
        manifest = manifest_in(layout)
        for layer in manifest["layers"]:
            del layer["annotations"]["io.bcow.merkle-root"]
        text = json.dumps(manifest).encode()
        digest = f"sha256:{hashlib.sha256(text).hexdigest()}"
        write_file(blob_path(layout, digest), text)
        index = read_json(os.path.join(layout, "index.json"))
        index["manifests"][0].update(digest=digest, size=len(text))
        write_file(os.path.join(layout, "index.json"), json.dumps(index))
        name = f"docker://{self.address}/team/older:1"
        skopeo_copy(f"oci:{layout}:tag", name, self.path("auth.json"))
        self.bcow("ls", name)

    def test_access_without_a_password_or_with_a_wrong_one_is_denied(self):
        wrong = self.path("wrong.json", credentials(self.address, "alice:falsch-0815"))
        for auth in wrong, self.path("missing.json"):
            self.env["REGISTRY_AUTH_FILE"] = auth
            self.env["DOCKER_CONFIG"] = self.path("none")
            failed = self.bcow("-vv", "ls", self.name, check=False)
            self.assertEqual(failed.code, 1)
            self.assertIn(b"denies access", failed.err)
            self.assertNotIn(b"falsch", failed.err)
            self.assertNotIn(base64.b64encode(b"alice:falsch-0815"), failed.err)

    def test_credentials_come_from_a_helper(self):
        """A program, which a process in a sandbox cannot start."""
        key = read_json(self.path("auth.json"))["auths"][self.address]["auth"]
        user, _, password = base64.b64decode(key).decode().partition(":")
        secret = json.dumps({"ServerURL": self.address, "Username": user, "Secret": password})
        for name in "programs", "helpers", "by-helper":
            os.mkdir(self.path(name))
        helper = self.path("programs/docker-credential-of-test")
        write_file(helper, f"#!/bin/sh\ncat > /dev/null; test \"$1\" = get && echo '{secret}'\n")
        os.chmod(helper, 0o755)
        write_file(self.path("helpers/config.json"),
                   json.dumps({"credHelpers": {self.address: "of-test"}}))
        del self.env["REGISTRY_AUTH_FILE"]
        # Relative to the directory of the command, which the process of a mount leaves later.
        self.env["DOCKER_CONFIG"] = "helpers"
        self.env["PATH"] = os.pathsep.join((self.path("programs"), os.environ["PATH"]))
        options = ("--no-cache", "--sandbox", "require")
        listed = self.bcow("ls", self.name, *options, cwd=self.directory)
        self.assertIn(b"etc\n", listed.out)
        where = self.path("by-helper")
        self.bcow("mount", self.name, where, *options, cwd=self.directory)
        try:
            self.assertIn("etc", os.listdir(where))
        finally:
            bcow("umount", where)
        self.env["DOCKER_CONFIG"] = self.path("helpers")
        self.env["BCOW_POOLS"] = self.path("pools")
        self.bcow("pool", "start", "p", "--sandbox", "require")
        try:
            self.bcow("mount", "--pool", "p", "--no-cache", self.name, where)
            self.assertIn("etc", os.listdir(where))
            self.bcow("umount", where)
        finally:
            self.bcow("pool", "stop", "--force", "p")

    def test_layers_are_restored_from_the_registry(self):
        broken = os.path.join(self.cache, "layout")
        shutil.copytree(self.layout, broken)
        largest = max(blobs_of(broken).values(), key=os.path.getsize)
        whole = read_bytes(largest)
        overwrite(largest, len(whole) // 3, b"wrong")
        os.truncate(largest, len(whole) - 20_000)
        self.bcow("fsck", "--repair", "--from", self.name, f"oci:{broken}:tag", check=False)
        self.assertTrue(read_bytes(largest) == whole, "the layer")
