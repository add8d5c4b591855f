"""Ordinary images straight from registries, and images written straight into them.

The registries are Debian's docker-registry with TLS and a password, and a server of these tests
that fails in every way: cuts, errors, tokens, wrong bytes. skopeo and umoci are the peers. Every
command and every wait has a time limit.
"""

import contextlib
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import socket
import subprocess
import tarfile
import tempfile
import threading
import unittest
import unittest.mock

import schema
import web
from support import (UNPRIVILEGED, Scratch, assert_refused, assert_same_tree, bcow, blob_path,
                     blobs_of, converted, digest_in, mounted, need, overwrite, read_bytes,
                     read_json, read_text, run, skopeo_copy, write_file)
from test_remote import make_certificates, registry
from web import WebServer, plain_registry

TIMEOUT = 240

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
SCHEMA_1 = "application/vnd.docker.distribution.manifest.v1+prettyjws"


def digest_of(data):
    return "sha256:" + hashlib.sha256(data).hexdigest()


def archive(files):
    """A tar archive of regular files, given as {name: content}."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return out.getvalue()


class Content:
    """The documents and blobs of a registry."""

    def __init__(self):
        self.blobs, self.manifests = {}, {}

    def blob(self, data, media_type):
        self.blobs[digest_of(data)] = data
        return {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}

    def document(self, document, media_type, *tags):
        data = document if isinstance(document, bytes) else json.dumps(document).encode()
        for name in (*tags, digest_of(data)):
            self.manifests[name] = (data, media_type)
        return {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}

    def image(self, layers, *tags, architecture="amd64"):
        """An image of layers, given as pairs of archive and compression."""
        descriptors = []
        for data, compression in layers:
            end = f"+{compression}" if compression else ""
            packed = {"": lambda d: d, "gzip": gzip.compress, "zstd": zstd}[compression](data)
            descriptors.append(self.blob(packed, LAYER + end))
        config = {"os": "linux", "architecture": architecture,
                  "rootfs": {"type": "layers", "diff_ids": [digest_of(d) for d, _ in layers]}}
        config = self.blob(json.dumps(config).encode(), CONFIG)
        return self.document({"schemaVersion": 2, "mediaType": MANIFEST, "config": config,
                              "layers": descriptors}, MANIFEST, *tags)


def zstd(data):
    done = subprocess.run(["zstd", "-q", "-c"], input=data, stdout=subprocess.PIPE, check=True,
                          timeout=TIMEOUT)
    return done.stdout


class Handler(web.Handler):
    """Answers like a registry, except where the test's `fault` takes over."""

    timeout = TIMEOUT

    def do_GET(self):
        server = self.server
        with server.lock:
            server.asked.append((self.path, self.headers.get("Range")))
            count = sum(1 for path, _ in server.asked if path == self.path)
        if server.fault and server.fault(self, count):
            return
        match = re.fullmatch(r"/v2/(.+)/(manifests|blobs)/([^/?]+)", self.path)
        content = server.content
        if match and match[2] == "manifests" and match[3] in content.manifests:
            data, media_type = content.manifests[match[3]]
            self.answer(200, data, {"Content-Type": media_type})
        elif match and match[2] == "blobs" and match[3] in content.blobs:
            self.send_content(content.blobs[match[3]])
        else:
            self.answer(404, b"{}")


class Server(WebServer):
    """A registry without TLS."""

    def __init__(self, content, fault=None):
        super().__init__(Handler)
        self.content, self.fault, self.asked = content, fault, []
        self.silence = threading.Event()

    def name(self, end=":1"):
        return f"docker://127.0.0.1:{self.server_address[1]}/team/image{end}"

    def __exit__(self, *details):
        self.silence.set()
        super().__exit__(*details)


class Sources(Scratch):
    """`bcow convert docker://...` of a server that fails as the test wants."""

    @classmethod
    def setUpClass(cls):
        need("zstd", fuse=True)
        super().setUpClass()
        cls.content = Content()
        cls.noise = os.urandom(3 << 20)
        cls.layers = [
            (archive({"etc/name": b"lower\n", "large": cls.noise}), "gzip"),
            (archive({"etc/name": b"upper\n"}), "zstd"),
            (archive({"plain": b"not compressed\n"}), ""),
        ]
        amd64 = cls.content.image(cls.layers, "1")
        arm64 = cls.content.image([(archive({"arm": b"64\n"}), "gzip")], architecture="arm64")
        for entry, architecture in (amd64, "amd64"), (arm64, "arm64"):
            entry["platform"] = {"os": "linux", "architecture": architecture}
        cls.content.document({"schemaVersion": 2, "mediaType": INDEX,
                              "manifests": [amd64, arm64]}, INDEX, "index")
        cls.large = cls.content.manifests["1"]
        cls.large = json.loads(cls.large[0])["layers"][0]["digest"]

    def setUp(self):
        self.image = self.path("image.bcow")
        for name in os.listdir(self.directory):
            if name.endswith(".bcow"):
                os.remove(self.path(name))

    def convert(self, name, *options, wait=60, **more):
        env = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "HOME": self.directory,
               "BCOW_CACHE": self.path("cache")}
        return bcow("convert", "--insecure", "--server-timeout", str(wait), name, self.image,
                    *options, env=env, timeout=TIMEOUT, **more)

    def cat(self, path):
        return bcow("cat", self.image, path, timeout=TIMEOUT).out

    def refused(self, fault, *mention, name=":1", wait=60):
        with Server(self.content, fault) as server:
            result = self.convert(server.name(name), check=False, wait=wait)
        assert_refused(self, result, *mention)
        self.assertFalse(os.path.exists(self.image), "an image is left")

    def on(self, kind, act):
        """A fault of requests for manifests or for the large blob."""
        def fault(handler, count):
            part = "/manifests/" if kind == "manifests" else f"/blobs/{self.large}"
            return part in handler.path and act(handler, count) is not False
        return fault

    def test_layers_of_every_compression_become_one_tree(self):
        with Server(self.content) as server:
            self.convert(server.name(), "--platform", "linux/amd64")
            blobs = [path for path, _ in server.asked if "/blobs/" in path]
        self.assertEqual(self.cat("/etc/name"), b"upper\n")
        self.assertEqual(self.cat("/plain"), b"not compressed\n")
        self.assertEqual(self.cat("/large"), self.noise)
        self.assertEqual(len(blobs), len(set(blobs)), "a blob was fetched twice")

    def test_layers_come_from_mirrors_first_and_wrong_bytes_are_not_used(self):
        def wrong(handler, _):
            if self.large not in handler.path:
                return False
            data = bytearray(self.content.blobs[self.large])
            data[len(data) // 2] ^= 1
            handler.answer(200, bytes(data))
            return True

        def blobs(server):
            return {path for path, _ in server.asked if "/blobs/" in path}

        with Server(self.content) as origin, Server(self.content) as good, \
                Server(self.content, wrong) as liar, Server(Content()) as empty:
            def mirrors(*servers):
                return [f"--mirror=http://127.0.0.1:{one.server_address[1]}" for one in servers]

            self.convert(origin.name(), "--no-cache", *mirrors(empty, good))
            self.assertEqual((blobs(origin), len(blobs(good)), len(blobs(empty))), (set(), 4, 4))
            result = self.convert(origin.name(), "--no-cache", "--force", *mirrors(liar, good))
            self.assertIn(b"this mirror is not asked for 600 s", result.err)
            self.assertEqual(blobs(origin), set())
            self.assertEqual(self.cat("/large"), self.noise)
            address = empty.server_address[1]
        with Server(self.content) as origin:
            result = self.convert(origin.name(), "--no-cache", "--force",
                                  f"--mirror=http://127.0.0.1:{address}")
            self.assertIn(b"this mirror is not asked for 60 s", result.err)
            self.assertEqual(len(blobs(origin)), 4)
            self.assertEqual(self.cat("/large"), self.noise)

    def test_platform_selects_from_an_index(self):
        with Server(self.content) as server:
            self.convert(server.name(":index"), "--platform", "linux/arm64")
            self.assertEqual(self.cat("/arm"), b"64\n")
            os.remove(self.image)
            self.convert(server.name(":index"), "--platform", "linux/amd64")
            self.assertEqual(self.cat("/etc/name"), b"upper\n")
            failed = self.convert(server.name(":index"), "--force", "--platform", "linux/s390x",
                                  check=False)
        assert_refused(self, failed, "no image for platform linux/s390x", "linux/arm64")

    def test_server_without_ranges_is_read_again_from_the_start(self):
        def cut(handler, count):
            data = self.content.blobs[self.large]
            handler.answer(200, data, cut=1 << 20 if count == 1 else None)
        with Server(self.content, self.on("blobs", cut)) as server:
            self.convert(server.name(), "--platform", "linux/amd64")
        self.assertEqual(self.cat("/large"), self.noise)

    def test_silent_server_is_an_error(self):
        def stall(handler, _):
            handler.send_content(self.content.blobs[self.large], cut=1000)
            handler.server.silence.wait(20)
        self.refused(self.on("blobs", stall), "did not answer within", wait=3)

    def test_wrong_bytes_are_an_error(self):
        def damage(handler, _):
            data = bytearray(self.content.blobs[self.large])
            data[len(data) // 2] ^= 1
            handler.send_content(bytes(data))
        self.refused(self.on("blobs", damage), "layer 1 of 3", "digest is sha256")

    def test_wrong_lengths_are_an_error(self):
        data = self.content.blobs[self.large]
        self.refused(self.on("blobs", lambda h, _: h.send_content(data[:-1])),
                     f"the blob has {len(data) - 1} bytes there")
        self.refused(self.on("blobs", lambda h, _: h.send_content(data + b"x")),
                     f"the blob has {len(data) + 1} bytes there")

    def test_endless_blob_is_read_to_its_length(self):
        sent = []

        def endless(handler, _):
            handler.send_response(200)
            handler.send_header("Connection", "close")
            handler.end_headers()
            with contextlib.suppress(OSError):
                handler.wfile.write(self.content.blobs[self.large])
                while True:
                    sent.append(handler.wfile.write(bytes(1 << 16)))
            handler.close_connection = True
        with Server(self.content, self.on("blobs", endless)) as server:
            self.convert(server.name())
        self.assertEqual(self.cat("/large"), self.noise)
        # What the sockets of both sides hold.
        self.assertLess(sum(sent), 64 << 20)

    def test_each_status_has_its_message(self):
        for status, message in ((403, "denies access .status 403"), (404, "status 404"),
                                (429, "limits the number of requests"), (500, "status 500"),
                                (401, "unknown form of credentials|status 401")):
            for kind in "manifests", "blobs":
                def answer(handler, _, status=status):
                    handler.answer(status, b"", {"Retry-After": "0"})
                self.refused(self.on(kind, answer), message)

    def test_documents_that_are_no_images_are_refused(self):
        content = Content()
        content.document({"schemaVersion": 1, "name": "x", "fsLayers": []}, SCHEMA_1, "old")
        content.document({"schemaVersion": 2, "mediaType": "application/vnd.other+json",
                          "layers": []}, "application/vnd.other+json", "other")
        content.document({"schemaVersion": 2, "manifests": [], "layers": []}, INDEX, "both")
        content.document(b"not JSON", MANIFEST, "text")
        helm = content.blob(b"{}", "application/vnd.cncf.helm.config.v1+json")
        content.document({"schemaVersion": 2, "config": helm, "layers": []}, MANIFEST, "helm")
        descriptor = content.document({"schemaVersion": 2, "manifests": []}, INDEX, "empty")
        for depth in range(6):
            descriptor = content.document(
                {"schemaVersion": 2, "manifests": [descriptor]}, INDEX, f"deep{depth}")
        ours, type(self).content = self.content, content
        try:
            for tag, message in (("old", "schema 1"), ("other", "vnd.other.json.* not supported"),
                                 ("both", "manifests and layers"), ("text", "invalid document"),
                                 ("helm", "helm.* not supported"), ("empty", "no image"),
                                 ("deep5", "nested image indexes")):
                with self.subTest(tag=tag):
                    self.refused(None, message, name=f":{tag}")
        finally:
            type(self).content = ours

    def test_manifest_must_match_the_digest_in_the_name(self):
        # The cache may have the right one.
        shutil.rmtree(self.path("cache"), ignore_errors=True)
        data, _ = self.content.manifests["1"]
        name = f"@{digest_of(data)}"

        def damage(handler, _):
            handler.answer(200, data.replace(b'"schemaVersion": 2', b'"schemaVersion":  2'))
        self.refused(self.on("manifests", damage), "the digest of the document is", name=name)
        with Server(self.content) as server:
            self.convert(server.name(name), "--platform", "linux/amd64")

    def test_registry_lists_what_is_attached(self):
        bcow("convert", f"tar:{self.path('a.tar', archive({'a': b'attached'}))}", self.image,
             timeout=TIMEOUT)
        stack = self.content.blob(read_bytes(self.image), "application/vnd.bcow.stack.v1")
        found = json.loads(bcow("inspect", "--json", self.image, timeout=TIMEOUT).out)
        root = found["merkle"]["root"].removeprefix("sha256:")
        stack["annotations"] = {"io.bcow.merkle-root": root}
        ordinary = digest_of(self.content.manifests["1"][0])
        config = self.content.blob(b"{}", CONFIG)

        def attached(subject):
            entry = self.content.document({
                "schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [stack],
                "subject": {"mediaType": MANIFEST, "digest": subject, "size": 1}}, MANIFEST)
            return {**entry, "artifactType": "application/vnd.bcow.image.v1"}

        other = {"mediaType": MANIFEST, "digest": ordinary, "size": 1,
                 "artifactType": "application/vnd.other"}
        deleted = {**other, "digest": "sha256:" + "d" * 64,
                   "artifactType": "application/vnd.bcow.image.v1"}

        def read(*pages):
            """Reads the attached image; a page is a list of entries, or a status."""
            def lists(handler, _):
                path = f"/referrers/{ordinary}?"
                if path not in handler.path:
                    return False
                number = int(handler.path.partition("page=")[2] or 0)
                page = pages[number]
                if isinstance(page, int):
                    handler.answer(page, b"")
                    return True
                link = {"Link": f'</v2/team/image{path}page={number + 1}>; rel="next"'}
                index = json.dumps({"schemaVersion": 2, "manifests": page}).encode()
                handler.answer(200, index, link if number + 1 < len(pages) else None)
                return True
            with Server(self.content, lists) as server:
                return bcow("cat", "--insecure", "--no-cache", "--server-timeout", "3",
                            server.name(), "/a", check=False, env={"NO_PROXY": "127.0.0.1"},
                            timeout=TIMEOUT)

        good = attached(ordinary)
        for pages in ([good, other],), ([good, deleted],), ([other], [good]), ([good], [deleted]):
            found = read(*pages)
            self.assertEqual(found.out, b"attached", str(found))
        for pages in ([attached("sha256:" + "0" * 64)],), ([other],), ([deleted], []), (404,):
            assert_refused(self, read(*pages), "ordinary OCI image")
        # An older image, or none, would be a wrong result.
        for pages in ([good], 503), ([good], 404), ([other], 500), (503,), (500,), (403,):
            failed = read(*pages)
            assert_refused(self, failed, "referrers of sha256:")
            self.assertNotIn(b"ordinary OCI image", failed.err)

    def test_changes_over_an_image_with_a_sha512_digest_name_its_sha256(self):
        """A layer names the images below it by SHA-256, with any digest in the manifest."""
        bcow("convert", f"tar:{self.path('a.tar', archive({'a': self.noise}))}", self.image,
             timeout=TIMEOUT)
        found = json.loads(bcow("inspect", "--json", self.image, timeout=TIMEOUT).out)
        data = read_bytes(self.image)
        digest = "sha512:" + hashlib.sha512(data).hexdigest()
        content = Content()
        content.blobs[digest] = data
        content.document({
            "schemaVersion": 2, "mediaType": MANIFEST, "config": content.blob(b"{}", CONFIG),
            "artifactType": "application/vnd.bcow.image.v1",
            "layers": [{"mediaType": "application/vnd.bcow.stack.v1", "digest": digest,
                        "size": len(data), "annotations": {
                            "io.bcow.merkle-root":
                                found["merkle"]["root"].removeprefix("sha256:")}}]}, MANIFEST, "1")
        layer, upper = self.path("layer.bcow"), self.path("upper")
        with Server(content) as server:
            options = {"env": {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
                               "HOME": self.directory, "BCOW_CACHE": self.path("cache")},
                       "timeout": TIMEOUT}
            where = tempfile.mkdtemp(prefix="mnt-", dir=self.directory)
            bcow("mount", "--insecure", server.name(), where, "--upper", upper, **options)
            try:
                # The rest of the file stays in the image.
                overwrite(os.path.join(where, "a"), 0, b"above")
            finally:
                bcow("umount", where, **options)
            bcow("commit", "--insecure", server.name(), "--upper", upper, layer, **options)
        (backing,) = json.loads(bcow("inspect", "--json", layer, check=False,
                                     timeout=TIMEOUT).out)["backings"]
        self.assertIn(hashlib.sha256(data).hexdigest(), json.dumps(backing))

    def test_wrong_options_are_refused(self):
        with Server(self.content) as server:
            for options, message in ((("--root-hash", "0" * 64), "--root-hash is for BCoW images"),
                                     (("--writable",), "--writable is only for disks")):
                result = self.convert(server.name(), *options, check=False)
                assert_refused(self, result, message, code=2)
            disk = bcow("convert", "--insecure", server.name(), f"raw:{self.path('disk')}",
                        check=False, timeout=TIMEOUT, env={"NO_PROXY": "127.0.0.1"})
            assert_refused(self, disk,
                           "can be made only from a disk, and .* is a container image", code=2)


class Cutter:
    """Passes connections on to a port; breaks some after 3 MiB of uploads."""

    def __init__(self, port, cuts):
        self.port, self.cuts, self.lock = port, cuts, threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                threading.Thread(target=self.serve, args=(client,), daemon=True).start()

    def serve(self, client):
        with socket.create_connection(("127.0.0.1", self.port), TIMEOUT) as server, client:
            back = threading.Thread(target=self.back, args=(server, client), daemon=True)
            back.start()
            passed = 0
            with contextlib.suppress(OSError):
                while data := client.recv(1 << 16):
                    server.sendall(data)
                    passed += len(data)
                    with self.lock:
                        is_cut = passed > 3 << 20 and self.cuts > 0
                        self.cuts -= is_cut
                    if is_cut:
                        break
            for end in server, client:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            back.join(TIMEOUT)

    def back(self, server, client):
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                client.sendall(data)


class WithRegistry(Scratch):
    """A registry with TLS and a password; the small image converted into an OCI layout."""

    @classmethod
    def setUpClass(cls):
        need("openssl", "skopeo", "docker-registry", root=True, fuse=True)
        super().setUpClass()
        make_certificates(cls.directory)
        cls.use_image("small")
        cls.address = cls.enterClassContext(registry(cls.directory))
        cls.auth = cls.path("auth.json")
        os.chmod(cls.auth, 0o644)
        cls.layout, _ = converted("small", "layout")

    def setUp(self):
        self.env = {"SSL_CERT_FILE": self.path("ca.pem"), "REGISTRY_AUTH_FILE": self.auth,
                    "BCOW_CACHE": self.path("cache"), "NO_PROXY": "localhost",
                    "no_proxy": "localhost"}

    @classmethod
    def name(cls, repository, tag="1"):
        return f"docker://{cls.address}/team/{repository}:{tag}"

    @classmethod
    def skopeo(cls, source, destination, *options):
        skopeo_copy(source, destination, cls.auth, *options)

    def digest_in_registry(self, name):
        raw = run("skopeo", "inspect", "--raw", "--tls-verify=false", "--authfile", self.auth, name,
                  timeout=TIMEOUT).out
        return digest_of(raw), json.loads(raw)


class Registries(WithRegistry):
    """docker-registry, skopeo and umoci as peers."""

    @classmethod
    def setUpClass(cls):
        need("umoci")
        super().setUpClass()
        cls.skopeo(cls.source, cls.name("ordinary"))

    def setUp(self):
        super().setUp()
        self.env["TMPDIR"] = self.path("scratch")
        os.makedirs(self.path("scratch"), exist_ok=True)

    def bcow(self, *arguments, **options):
        result = bcow(*arguments, env=self.env, timeout=TIMEOUT, **options)
        self.assertEqual(os.listdir(self.path("scratch")), [], "a file is left")
        return result

    def test_conversion_from_the_registry_gives_the_tree_of_umoci(self):
        image = self.path("from-registry.bcow")
        self.bcow("convert", self.name("ordinary"), image)
        with mounted(image) as where:
            assert_same_tree(self, self.reference, where)
        layers = self.path("from-registry")
        self.bcow("convert", self.name("ordinary"), f"oci:{layers}:tag")
        # No file depends on the place of the source.
        self.assertEqual(set(blobs_of(layers)), set(blobs_of(self.layout)))

    def test_conversion_into_the_registry_is_that_into_a_layout(self):
        name = self.name("converted")
        self.bcow("convert", self.source, name)
        found, _ = self.digest_in_registry(name)
        self.assertEqual(found, digest_in(self.layout))
        pulled = self.path("pulled")
        self.skopeo(name, f"oci:{pulled}:tag")
        self.assertEqual(digest_in(pulled), found)
        with mounted(f"oci:{pulled}:tag") as where:
            assert_same_tree(self, self.reference, where)
        self.bcow("diff", name, f"oci:{self.layout}:tag")

    def test_registry_to_registry_by_an_ordinary_user(self):
        scratch = tempfile.mkdtemp(prefix="bcow-push-", dir="/var/tmp")
        try:
            os.chown(scratch, UNPRIVILEGED, UNPRIVILEGED)
            shutil.copy(self.path("ca.pem"), scratch)
            shutil.copy(self.auth, scratch)
            env = {**self.env, "HOME": scratch, "BCOW_CACHE": "", "XDG_CACHE_HOME": "",
                   "TMPDIR": scratch, "SSL_CERT_FILE": os.path.join(scratch, "ca.pem"),
                   "REGISTRY_AUTH_FILE": os.path.join(scratch, "auth.json")}
            os.chmod(env["REGISTRY_AUTH_FILE"], 0o644)
            bcow("convert", self.name("ordinary"), self.name("by-user"), env=env, timeout=TIMEOUT,
                 user=UNPRIVILEGED)
        finally:
            shutil.rmtree(scratch)
        self.bcow("fsck", "--data", self.name("by-user"))

    def test_commit_and_export_go_into_the_registry(self):
        base = f"oci:{self.layout}:tag"
        upper = self.path("upper")
        os.makedirs(upper, exist_ok=True)
        with mounted(base, "--upper", upper) as where:
            write_file(os.path.join(where, "new-file"), "written\n")
        committed = self.name("ordinary", "committed")
        self.bcow("commit", base, "--upper", upper, committed)
        _, manifest = self.digest_in_registry(committed)
        _, before = self.digest_in_registry(self.name("ordinary"))
        layers = [layer["digest"] for layer in manifest["layers"]]
        self.assertEqual(layers[:-1], [layer["digest"] for layer in before["layers"]],
                         "layers that the registry has are used as they are")
        layout, bundle = self.path("committed"), self.path("bundle")
        self.skopeo(committed, f"oci:{layout}:tag")
        run("umoci", "unpack", "--image", f"{layout}:tag", bundle, timeout=TIMEOUT)
        self.assertEqual(read_text(os.path.join(bundle, "rootfs", "new-file")), "written\n")
        exported = self.name("exported")
        self.bcow("export", base, "--to", exported, "--compress", "gzip:1")
        again = self.path("again.bcow")
        self.bcow("convert", exported, again)
        with mounted(again) as where:
            assert_same_tree(self, self.reference, where)

    def test_converted_image_is_found_beside_the_ordinary_one(self):
        name = self.name("beside")
        self.skopeo(self.source, name)
        before, _ = self.digest_in_registry(name)
        refused = self.bcow("ls", name, check=False)
        assert_refused(self, refused, "ordinary OCI image", "convert --referrer")
        self.bcow("convert", "--referrer", name, name)
        self.assertEqual(self.digest_in_registry(name)[0], before, "the tag has moved")
        with unittest.mock.patch.dict(os.environ, self.env), mounted(name) as where:
            assert_same_tree(self, self.reference, where)
        self.bcow("diff", name, f"oci:{self.layout}:tag")
        # The list that writers keep, because this registry has none of its own.
        tag = before.replace(":", "-")
        _, referrers = self.digest_in_registry(name.removesuffix(":1") + f":{tag}")
        (entry,) = referrers["manifests"]
        self.assertEqual(entry["artifactType"], "application/vnd.bcow.image.v1")
        _, manifest = self.digest_in_registry(name.removesuffix(":1") + "@" + entry["digest"])
        self.assertEqual(manifest["subject"]["digest"], before)
        # Attached again, there is one entry; attached in another form, the last one counts.
        self.bcow("convert", "--referrer", name, name)
        self.bcow("convert", "--referrer", "--plain", name, name)
        _, referrers = self.digest_in_registry(name.removesuffix(":1") + f":{tag}")
        self.assertEqual(len(referrers["manifests"]), 2)
        self.assertIn(b"plain", self.bcow("inspect", name).out)
        # A digest does not cover what is attached, and a conversion takes the original.
        pinned = name.removesuffix(":1") + "@" + before
        refused = self.bcow("ls", pinned, check=False)
        assert_refused(self, refused, "its digest does not cover")
        self.bcow("convert", name, self.path("original.bcow"))

    def test_index_is_converted_and_copied_with_all_platforms(self):
        """The judge of a copy is skopeo: the same bytes of the index, and all that it lists."""
        both, ordinary, packed = self.path("both"), self.name("both"), self.path("both.tar")
        self.skopeo(self.source, f"oci:{both}:tag")
        (entry,) = read_json(os.path.join(both, "index.json"))["manifests"]
        tar = archive({"arm": b"64\n"})

        def blob(data, media_type):
            write_file(blob_path(both, digest_of(data)), data)
            return {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}

        def image(config, layers, **more):
            manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config,
                        "layers": layers}
            return {**blob(json.dumps(manifest).encode(), MANIFEST), **more}

        config = {"os": "linux", "architecture": "arm64",
                  "rootfs": {"type": "layers", "diff_ids": [digest_of(tar)]}}
        arm64 = image(blob(json.dumps(config).encode(), CONFIG), [blob(tar, LAYER)],
                      platform={"os": "linux", "architecture": "arm64"})
        statement = blob(b'{"_type": "https://in-toto.io/Statement/v0.1"}',
                         "application/vnd.in-toto+json")
        attestation = image(blob(b'{"rootfs": {}}', CONFIG), [statement],
                            platform={"os": "unknown", "architecture": "unknown"},
                            annotations={"vnd.docker.reference.type": "attestation-manifest",
                                         "vnd.docker.reference.digest": arm64["digest"]})
        amd64 = {"mediaType": entry["mediaType"], "digest": entry["digest"], "size": entry["size"],
                 "platform": {"os": "linux", "architecture": "amd64"}}
        index = blob(json.dumps({"schemaVersion": 2, "mediaType": INDEX,
                                 "manifests": [amd64, arm64, attestation]}).encode(), INDEX)
        index["annotations"] = {"org.opencontainers.image.ref.name": "tag"}
        write_file(os.path.join(both, "index.json"),
                   json.dumps({"schemaVersion": 2, "manifests": [index]}))
        self.skopeo(f"oci:{both}:tag", ordinary, "--all", "--preserve-digests")

        made, layout, again = self.name("index"), self.path("index"), self.name("index-again")
        self.bcow("convert", "--platform", "all", ordinary, made)
        digest, found = self.digest_in_registry(made)
        platforms = [entry["platform"]["architecture"] for entry in found["manifests"]]
        self.assertEqual(platforms, ["amd64", "arm64", "unknown"])
        self.assertEqual(found["manifests"][0]["digest"], digest_in(self.layout))
        self.assertEqual(found["manifests"][2]["annotations"]["vnd.docker.reference.digest"],
                         found["manifests"][1]["digest"])
        self.assertEqual(found["manifests"][2]["digest"], attestation["digest"])
        with unittest.mock.patch.dict(os.environ, self.env), mounted(made) as where:
            assert_same_tree(self, self.reference, where)
        report = json.loads(self.bcow("convert", "--platform", "all", "--json", f"oci:{both}:tag",
                                      f"oci:{layout}:tag").out)
        self.assertEqual(list(schema.problems(report, schema.of("bcow.convert-index/1"))), [])
        self.assertEqual((report["index"], report["attestations"]), (digest, 1))
        self.assertEqual(digest_in(layout), digest)

        self.bcow("copy", made, f"oci-archive:{packed}:tag")
        self.bcow("copy", f"oci-archive:{packed}:tag", f"oci:{self.path('copied')}:tag")
        self.bcow("copy", f"oci:{self.path('copied')}:tag", again)
        self.assertEqual(set(blobs_of(self.path("copied"))), set(blobs_of(layout)))
        self.assertEqual(self.digest_in_registry(again)[0], digest)
        third = self.name("index-third")
        report = json.loads(self.bcow("copy", "--json", again, third).out)
        self.assertEqual(sum(blob["copied_bytes"] for blob in report["blobs"]), 0)
        self.assertEqual(self.digest_in_registry(third)[0], digest)
        # skopeo 1.9 writes an index anew, and keeps all that it lists.
        pulled = self.path("pulled-index")
        self.skopeo(third, f"oci:{pulled}:tag", "--all")
        listed = set(blobs_of(layout)) - {digest.removeprefix("sha256:")}
        self.assertLessEqual(listed, set(blobs_of(pulled)))

        refused = self.bcow("convert", ordinary, third, check=False)
        assert_refused(self, refused, "is an index of 3 manifests", "--force")
        self.assertEqual(self.digest_in_registry(third)[0], digest)
        self.bcow("convert", "--force", ordinary, third)
        self.assertEqual(self.digest_in_registry(third)[0], digest_in(self.layout))

    def test_referrer_needs_the_ordinary_image_in_its_repository(self):
        refused = self.bcow("convert", "--referrer", self.source, self.name("nowhere"),
                            check=False)
        assert_refused(self, refused, "does not have the ordinary image", "skopeo copy")
        small = self.path("small.tar", archive({"a": b"a"}))
        refused = self.bcow("convert", "--referrer", f"tar:{small}", self.name("nowhere"),
                            check=False)
        assert_refused(self, refused, "no manifest", code=2)
        refused = self.bcow("convert", "--referrer", self.source, self.path("x.bcow"),
                            check=False)
        assert_refused(self, refused, "only for an image in a registry", code=2)

    def test_upload_through_breaking_connections_arrives(self):
        self.env["NO_PROXY"] = self.env["no_proxy"] = "127.0.0.1"
        with plain_registry(self.directory) as port:
            cutter = Cutter(port, 3)
            with cutter.listener:
                name = f"docker://127.0.0.1:{cutter.address}/team/image:1"
                self.bcow("copy", "--insecure", f"oci:{self.layout}:tag", name)
                self.assertEqual(cutter.cuts, 0)
                self.bcow("fsck", "--insecure", "--no-cache", "--data", name)

    def test_read_only_registry_is_named(self):
        self.env["NO_PROXY"] = self.env["no_proxy"] = "127.0.0.1"
        with plain_registry(self.directory, read_only=True) as port:
            name = f"docker://127.0.0.1:{port}/team/image:1"
            failed = self.bcow("copy", "--insecure", f"oci:{self.layout}:tag", name, check=False)
        assert_refused(self, failed, "takes no uploads", "read-only")

    def test_refusals_say_why(self):
        wrong = self.path("wrong.json")
        write_file(wrong, "{}")
        self.env["REGISTRY_AUTH_FILE"] = wrong
        self.env["DOCKER_CONFIG"] = self.path("none")
        small = self.path("small.tar", archive({"a": b"a"}))
        failed = self.bcow("convert", f"tar:{small}", self.name("denied"), check=False)
        assert_refused(self, failed, "cannot write docker://", "denies access")
        # Before the source is read.
        failed = self.bcow("convert", "tar:/missing.tar", self.name("denied"), check=False)
        assert_refused(self, failed, "cannot write docker://", "denies access")
        missing = self.path("missing.json")
        failed = self.bcow("convert", "--auth-file", missing, f"tar:{small}", self.name("x"),
                           check=False)
        assert_refused(self, failed, f"cannot read the credentials in {missing}", "No such file")
        failed = self.bcow("convert", f"tar:{small}", self.name("x") + "@sha256:" + "0" * 64,
                           check=False)
        assert_refused(self, failed, "follows from its content", code=2)
