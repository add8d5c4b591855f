"""Images in S3: `s3://BUCKET/KEY`, with signatures that the server checks.

The server is these tests' own: it computes each signature by itself, from the request that arrived,
and refuses what differs, what is too old, and what is not signed. versitygw is a second one, if
this machine has it. Every command and every wait has a time limit.
"""

import base64
import contextlib
import datetime
import hashlib
import hmac
import html
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
import urllib.parse

import support
import test_remote
import web
from support import (assert_refused, assert_same_tree, bcow, blobs_of, mounted, overwrite,
                     read_bytes, run, until, write_file)
from test_registries import archive, digest_of
from test_remote import TIMEOUT, registry
from web import WebServer, free_port, listening

KEY_ID, SECRET = "AKIATESTSOFBCOW", "geheim/4711+Schluessel"
REGION = "eu-test-1"
BUCKET = "images"
EMPTY = hashlib.sha256(b"").hexdigest()
CREDENTIAL = re.compile(r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d{8})/([^/]+)/s3/aws4_request, "
                        r"SignedHeaders=([a-z0-9;-]+), Signature=([0-9a-f]{64})")


def mac(key, text):
    return hmac.new(key, text.encode(), hashlib.sha256).digest()


def signature(secret, method, target, headers, names, day, region):
    """The signature of a request (AWS Signature Version 4), from what arrived of it."""
    path, _, query = target.partition("?")
    pairs = urllib.parse.parse_qsl(query, keep_blank_values=True)
    query = "&".join(f"{urllib.parse.quote(name, safe='-_.~')}="
                     f"{urllib.parse.quote(value, safe='-_.~')}" for name, value in sorted(pairs))
    path = urllib.parse.quote(urllib.parse.unquote(path), safe="/-_.~")
    lines = [method, path, query]
    lines += [f"{name}:{' '.join((headers.get(name) or '').split())}" for name in names]
    lines += ["", ";".join(names), headers["x-amz-content-sha256"]]
    request = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    scope = f"{day}/{region}/s3/aws4_request"
    key = ("AWS4" + secret).encode()
    for part in day, region, "s3", "aws4_request":
        key = mac(key, part)
    text = f"AWS4-HMAC-SHA256\n{headers['x-amz-date']}\n{scope}\n{request}"
    return mac(key, text).hex()


def tag_of(data):
    return hashlib.sha1(data).hexdigest()


def s3_storage(url, bucket):
    """The configuration of a registry that keeps its blobs in this bucket."""
    return json.dumps({"s3": {"accesskey": KEY_ID, "secretkey": SECRET, "region": REGION,
                              "bucket": bucket, "regionendpoint": url, "forcepathstyle": True}})


@contextlib.contextmanager
def versitygw(test, *buckets):
    """The directory of a versitygw with these buckets, and its URL."""
    if not shutil.which("versitygw"):
        test.skipTest("versitygw is not installed")
    port = free_port()
    posix = tempfile.mkdtemp(prefix="posix-", dir=test.directory)
    for bucket in buckets:
        os.mkdir(os.path.join(posix, bucket))
    with listening(port, "versitygw", "--access", KEY_ID, "--secret", SECRET, "--region", REGION,
                   "--port", f"127.0.0.1:{port}", "--cert", test.path("leaf.pem"), "--key",
                   test.path("leaf.key"), "posix", posix):
        yield posix, f"https://localhost:{port}"


class Handler(web.Handler):
    """Sends objects of one bucket to clients that sign as they should."""

    timeout = TIMEOUT

    def refusal(self):
        """The status and the code of an error; None for a request that is right."""
        server, headers = self.server, self.headers
        if server.public:
            return None
        found = CREDENTIAL.fullmatch(headers.get("Authorization", ""))
        if not found:
            return 403, "AccessDenied"
        key_id, day, region, names, sent = found.groups()
        names = names.split(";")
        if key_id not in server.keys:
            return 403, "InvalidAccessKeyId"
        secret, token = server.keys[key_id]
        if headers.get("x-amz-security-token") != token:
            return 403, "ExpiredToken"
        if region != REGION:
            return 400, "AuthorizationHeaderMalformed"
        wanted = {name.lower() for name in headers
                  if name.lower() in ("host", "range") or name.lower().startswith("x-amz-")}
        if sorted(names) != names or not wanted <= set(names) or "host" not in wanted:
            return 403, "AccessDenied"
        time = datetime.datetime.strptime(headers["x-amz-date"], "%Y%m%dT%H%M%SZ")
        now = datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None)
        if abs((now - time).total_seconds()) > 900 or not headers["x-amz-date"].startswith(day):
            return 403, "RequestTimeTooSkewed"
        if headers["x-amz-content-sha256"] != hashlib.sha256(self.body).hexdigest():
            return 400, "XAmzContentSHA256Mismatch"
        checksum = headers.get("x-amz-checksum-sha256")
        if checksum and base64.b64decode(checksum) != hashlib.sha256(self.body).digest():
            return 400, "BadDigest"
        right = signature(secret, self.command, self.path, headers, names, day, region)
        return None if hmac.compare_digest(sent, right) else (403, "SignatureDoesNotMatch")

    def is_refused(self):
        server = self.server
        self.body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        refused = self.refusal()
        with server.lock:
            server.asked.append((self.path, refused and refused[1]))
        if refused:
            self.refuse(*refused)
        return refused is not None

    def refuse(self, status, code):
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>"
        wrong_region = code == "AuthorizationHeaderMalformed"
        self.answer(status, text.encode(), {"x-amz-bucket-region": REGION} if wrong_region else {})

    def do_GET(self):
        if self.is_refused():
            return
        server = self.server
        path, fields = self.parts()
        if "uploads" in fields:
            listed = "".join(
                f"<Upload><Key>{html.escape(key)}</Key><UploadId>{number}</UploadId></Upload>"
                for number, (key, _, _) in server.uploads.items()
                if key.startswith(fields["prefix"]))
            self.answer(200, f"<ListMultipartUploadsResult>{listed}".encode())
            return
        if "uploadId" in fields:
            parts = server.uploads[fields["uploadId"]][2]
            # Pages of two parts.
            after = int(fields.get("part-number-marker", 0))
            numbers = [number for number in sorted(parts) if number > after]
            listed = "".join(
                f"<Part><PartNumber>{n}</PartNumber><ETag>&quot;{tag_of(parts[n])}&quot;</ETag>"
                f"<Size>{len(parts[n])}</Size><ChecksumSHA256>"
                f"{base64.b64encode(hashlib.sha256(parts[n]).digest()).decode()}</ChecksumSHA256>"
                "</Part>" for n in numbers[:2])
            more = len(numbers) > 2
            self.answer(200, (f"<ListPartsResult><IsTruncated>{str(more).lower()}</IsTruncated>"
                              f"<NextPartNumberMarker>{(numbers + [0])[:2][-1]}"
                              f"</NextPartNumberMarker>{listed}").encode())
            return
        data = server.objects.get(urllib.parse.unquote(self.path))
        if data is None:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        self.send_content(data)

    def parts(self):
        path, _, query = self.path.partition("?")
        return (urllib.parse.unquote(path),
                dict(urllib.parse.parse_qsl(query, keep_blank_values=True)))

    def do_HEAD(self):
        if self.is_refused():
            return
        path, _ = self.parts()
        data = None if self.server.is_hidden else self.server.objects.get(path)
        if data is None:
            self.answer(404, b"")
            return
        self.answer(200, data, {"ETag": f'"{self.server.tags[path]}"',
                                **self.server.marks.get(path, {})})

    def exists(self, path):
        return self.headers.get("If-None-Match") == "*" and path in self.server.objects

    def do_PUT(self):
        if self.is_refused():
            return
        server, (path, fields) = self.server, self.parts()
        if server.fault and server.fault(self, fields):
            return
        if "uploadId" in fields:
            with server.lock:
                server.uploads[fields["uploadId"]][2][int(fields["partNumber"])] = self.body
                server.sent.append(int(fields["partNumber"]))
            self.answer(200, b"", {"ETag": f'"{tag_of(self.body)}"'})
        elif self.exists(path):
            self.refuse(412, "PreconditionFailed")
        else:
            server.keep(path, self.body, tag_of(self.body), self.mark())
            self.answer(200, b"", {"ETag": f'"{tag_of(self.body)}"'})

    def mark(self):
        name = "x-amz-meta-bcow-merkle-root"
        return {name: self.headers[name]} if name in self.headers else {}

    def do_POST(self):
        if self.is_refused():
            return
        server, (path, fields) = self.server, self.parts()
        if "uploads" in fields:
            key = path.split("/", 2)[2]
            with server.lock:
                number = f"<{len(server.uploads)}+&>"
                server.uploads[number] = (key, self.mark(), {})
            self.answer(200, f"<X><UploadId>{html.escape(number)}</UploadId></X>".encode())
        elif fields["uploadId"] not in server.uploads:
            self.refuse(404, "NoSuchUpload")
        elif self.exists(path):
            self.refuse(412, "PreconditionFailed")
        else:
            _, mark, parts = server.uploads.pop(fields["uploadId"])
            listed = re.findall(rb"<ETag>&quot;(\w+)&quot;</ETag><PartNumber>(\d+)<", self.body)
            assert [(tag_of(parts[n]), n) for n in sorted(parts)] == [
                (tag.decode(), int(n)) for tag, n in listed], "the list of parts"
            data = b"".join(parts[n] for n in sorted(parts))
            server.keep(path, data, f"{tag_of(data)}-{len(parts)}", mark)
            if server.fault and server.fault(self, fields):
                return
            self.answer(200, f'<X><ETag>"{tag_of(data)}-{len(parts)}"</ETag></X>'.encode())

    def do_DELETE(self):
        if self.is_refused():
            return
        with self.server.lock:
            self.server.uploads.pop(self.parts()[1]["uploadId"], None)
        self.answer(204, b"")


class Server(WebServer):
    """A bucket."""

    def __init__(self, objects, context):
        super().__init__(Handler, context)
        self.objects = {f"/{BUCKET}/{key}": data for key, data in objects.items()}
        self.keys = {KEY_ID: (SECRET, None)}
        self.public, self.asked = False, []
        # What was written: tags and metadata by path, uploads by ID, and numbers of parts.
        self.tags = {path: tag_of(data) for path, data in self.objects.items()}
        self.marks, self.uploads, self.sent = {}, {}, []
        self.fault, self.is_hidden = None, False

    def keep(self, path, data, tag, mark):
        with self.lock:
            self.objects[path], self.tags[path], self.marks[path] = data, tag, mark


class Bucket(test_remote.WebCase):
    @staticmethod
    def make_tree(top):
        test_remote.make_files(top, 20, 100_000)

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        data = read_bytes(cls.image)
        cls.key = "team x/\u00e9+=&.bcow"
        cls.objects = {"image.bcow": data, cls.key: data}

    def setUp(self):
        super().setUp()
        home = tempfile.mkdtemp(prefix="home-", dir=self.directory)
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            self.addCleanup(os.environ.__setitem__, name, os.environ.pop(name))
        scratch = tempfile.mkdtemp(prefix="scratch-", dir=self.directory)
        self.env.update(HOME=home, TMPDIR=scratch, AWS_REGION=REGION, AWS_ACCESS_KEY_ID=KEY_ID,
                        AWS_SECRET_ACCESS_KEY=SECRET)

    def server(self):
        server = Server(self.objects, self.context)
        self.env["AWS_ENDPOINT_URL"] = f"https://localhost:{server.server_address[1]}"
        return server

    def credentials(self, text):
        """Keys in a file instead of the environment."""
        for name in "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY":
            self.env.pop(name, None)
        os.makedirs(os.path.join(self.env["HOME"], ".aws"), exist_ok=True)
        write_file(os.path.join(self.env["HOME"], ".aws", "credentials"), text)

    def test_image_reads_and_mounts_with_signed_requests(self):
        local = bcow("ls", "-R", self.image, timeout=TIMEOUT).out
        with self.server() as server:
            for key in self.objects:
                self.assertEqual(self.bcow("ls", "-R", f"s3://{BUCKET}/{key}").out, local)
            name = f"s3://{BUCKET}/image.bcow"
            self.bcow("fsck", "--data", name)
            with self.mounted(name) as where:
                pid = json.loads(bcow("stats", "--json", where).out)["process"]["pid"]
                # The keys are in the memory of one of them, where no other process can look.
                for process in (pid, *support.children(pid)):
                    environment = read_bytes(f"/proc/{process}/environ")
                    self.assertIn(KEY_ID.encode(), environment)
                    self.assertNotIn(SECRET.encode(), environment)
                assert_same_tree(self, self.tree, where)
            copy = os.path.join(self.cache, "copy")
            self.bcow("copy", name, copy)
            self.assertTrue(read_bytes(copy) == self.objects["image.bcow"], "the copy")
            overwrite(copy, 300_000, b"wrong")
            os.truncate(copy, self.bytes - 50_000)
            self.bcow("fsck", "--repair", "--from", name, copy, check=False)
            self.assertTrue(read_bytes(copy) == self.objects["image.bcow"], "the restored file")
            self.assertEqual({code for _, code in server.asked}, {None})

    def test_wrong_missing_and_refused_keys_are_errors_without_secrets(self):
        with self.server() as server:
            def failure(*arguments):
                failed = self.bcow("-vv", "ls", *arguments, check=False)
                self.assertEqual(failed.code, 1)
                self.assertNotIn(SECRET.encode(), failed.err)
                return failed.err.decode()

            name = f"s3://{BUCKET}/image.bcow"
            self.assertIn("status 404", failure(f"s3://{BUCKET}/none.bcow"))
            self.env["AWS_SECRET_ACCESS_KEY"] = "falsch"
            self.assertIn("SignatureDoesNotMatch", failure(name))
            self.env["AWS_ACCESS_KEY_ID"] = "AKIANONE"
            self.assertIn("InvalidAccessKeyId", failure(name))
            self.env.update(AWS_ACCESS_KEY_ID=KEY_ID, AWS_SECRET_ACCESS_KEY=SECRET,
                            AWS_REGION="us-east-1")
            self.assertIn(f"the bucket is in the region {REGION}", failure(name))
            del self.env["AWS_ACCESS_KEY_ID"], self.env["AWS_SECRET_ACCESS_KEY"]
            self.assertIn("AWS_ACCESS_KEY_ID", failure(name))
            # Without keys, a public bucket is read without signatures.
            server.public = True
            self.bcow("ls", name)

    def test_keys_come_from_the_profile_in_the_file(self):
        with self.server():
            self.credentials(f"[default]\naws_access_key_id = x\naws_secret_access_key = y\n\n"
                             f"[work]\naws_access_key_id = {KEY_ID}\n"
                             f"aws_secret_access_key = {SECRET}\n")
            name = f"s3://{BUCKET}/image.bcow"
            self.assertEqual(self.bcow("ls", name, check=False).code, 1)
            self.env["AWS_PROFILE"] = "work"
            self.bcow("ls", name)
            self.env["AWS_PROFILE"] = "none"
            failed = self.bcow("ls", name, check=False)
            self.assertIn(b"no keys for the profile", failed.err)

    def test_expired_keys_are_read_again(self):
        def keys(token):
            self.credentials(f"[default]\naws_access_key_id = {KEY_ID}\n"
                             f"aws_secret_access_key = {SECRET}\naws_session_token = {token}\n")

        with self.server() as server:
            server.keys[KEY_ID] = (SECRET, "token-1")
            keys("token-1")
            with self.mounted(f"s3://{BUCKET}/image.bcow") as where:
                os.listdir(where)
                server.keys[KEY_ID] = (SECRET, "token-2")
                keys("token-2")
                assert_same_tree(self, self.tree, where)
            self.assertIn("ExpiredToken", {code for _, code in server.asked})

    def test_plain_http_needs_permission_and_other_hosts_get_no_keys(self):
        self.env["AWS_ENDPOINT_URL"] = "http://s3.invalid"
        name = f"s3://{BUCKET}/image.bcow"
        self.assertIn(b"--insecure", self.bcow("ls", name, check=False).err)
        failed = self.bcow("ls", "--insecure", name, check=False)
        self.assertIn(b"not sent to s3.invalid without encryption", failed.err)

    def test_files_are_written_whole_and_not_replaced_without_force(self):
        name = f"s3://{BUCKET}/team y/\u00e9+=&.bcow"
        path = name.removeprefix("s3:/")
        with self.server() as server:
            self.bcow("copy", self.image, name)
            self.assertTrue(server.objects[path] == self.objects["image.bcow"], "the file")
            for command in ("copy", self.image), ("convert", f"dir:{self.tree}"):
                failed = self.bcow(*command, name, check=False)
                assert_refused(self, failed, "there is a file of this name already", "--force")
            # Another writer is first: only the condition of the request knows.
            server.is_hidden = True
            failed = self.bcow("copy", self.image, name, check=False)
            self.assertEqual(failed.code, 1, str(failed))
            server.is_hidden = False
            del server.objects[path]
            done = self.bcow("convert", f"dir:{self.tree}", name)
            self.assertIn(name.encode(), done.out)
            with self.mounted(name) as where:
                assert_same_tree(self, self.tree, where)
            self.bcow("copy", "--force", self.image, name)
            for command in ("export", self.image, "--to", name), ("commit", self.image, name):
                refused = self.bcow(*command, check=False)
                assert_refused(self, refused, "hint", code=2)
            self.assertEqual({code for _, code in server.asked}, {None})
            damaged = os.path.join(self.cache, "damaged.bcow")
            shutil.copy(self.image, damaged)
            overwrite(damaged, 200_000, b"wrong")
            failed = self.bcow("copy", damaged, f"s3://{BUCKET}/damaged.bcow", check=False)
            self.assertEqual(failed.code, 1)
            self.assertNotIn(f"/{BUCKET}/damaged.bcow", server.objects)

    def large(self):
        """A file of four parts."""
        raw, large = os.path.join(self.cache, "raw"), os.path.join(self.cache, "large.bcow")
        write_file(raw, os.urandom(26 << 20))
        bcow("convert", f"raw:{raw}", large, timeout=TIMEOUT)
        return large

    def copy_until_part(self, number, server, source, name):
        """A copy that is killed while it sends this part, for the first time."""
        reached = threading.Event()

        def hang(handler, fields):
            if fields.get("partNumber") == str(number) and not reached.is_set():
                reached.set()
                handler.close_connection = True
                return until(lambda: process.poll() is not None, "the end", TIMEOUT) or True
            return False

        server.fault = hang
        process = self.started("copy", source, name, stderr=subprocess.DEVNULL)
        try:
            self.assertTrue(reached.wait(TIMEOUT), f"part {number} is not sent")
        finally:
            process.kill()
            process.wait(TIMEOUT)

    def test_interrupted_upload_is_continued(self):
        large, name = self.large(), f"s3://{BUCKET}/large.bcow"
        with self.server() as server:
            self.copy_until_part(4, server, large, name)
            self.assertEqual((server.sent, len(server.uploads)), ([1, 2, 3], 1))
            # What arrived of another file is not used.
            (_, _, parts), = server.uploads.values()
            parts[2] = b"x" * len(parts[2])
            server.sent.clear()
            self.bcow("copy", large, name)
            self.assertEqual((server.sent, server.uploads), ([2, 4], {}))
            self.assertTrue(server.objects[f"/{BUCKET}/large.bcow"] == read_bytes(large), "bytes")

    def test_failed_upload_leaves_nothing_and_lost_answers_do_no_harm(self):
        large, name = self.large(), f"s3://{BUCKET}/large.bcow"
        with self.server() as server:
            def forbid(handler, fields):
                if fields.get("partNumber") == "2":
                    handler.refuse(403, "AccessDenied")
                    return True
                return False

            server.fault = forbid
            failed = self.bcow("copy", large, name, check=False)
            assert_refused(self, failed, "AccessDenied")
            self.assertEqual(server.uploads, {})
            self.assertNotIn(f"/{BUCKET}/large.bcow", server.objects)
            answers = []

            def lose(handler, fields):
                # One answer to a part, and the one to the end.
                which = fields.get("partNumber", "end")
                if which in ("2", "end") and which not in answers:
                    answers.append(which)
                    handler.close_connection = True
                    return True
                return False

            server.fault = lose
            self.bcow("copy", large, name)
            self.assertEqual((answers, server.uploads), (["2", "end"], {}))
            self.bcow("fsck", "--data", "--no-cache", name)

    def layered(self):
        """A docker archive with two layers, of which the upper one changes the lower one."""
        layers = [archive({f"a-{n}": os.urandom(100_000) for n in range(120)}),
                  archive({"a-1": b"changed", ".wh.a-2": b"", "b": b"new"})]
        config = {"architecture": "amd64", "os": "linux", "config": {"Env": ["A=b"]},
                  "rootfs": {"type": "layers", "diff_ids": [digest_of(data) for data in layers]}}
        manifest = [{"Config": "config.json", "Layers": ["lower.tar", "upper.tar"]}]
        path = os.path.join(self.cache, "layered.tar")
        write_file(path, archive({
            "manifest.json": json.dumps(manifest).encode(),
            "config.json": json.dumps(config).encode(),
            "lower.tar": layers[0], "upper.tar": layers[1]}))
        return f"docker-archive:{path}"

    @staticmethod
    def blobs(layout):
        """The BCoW files of a layout: layers and stacks, by the hexadecimal digest."""
        files = {name: read_bytes(path) for name, path in blobs_of(layout).items()}
        return {name: data for name, data in files.items() if data.startswith(b"BCoW")}

    def layout(self, source):
        """A layout of the source, its BCoW files, and the digest of its stack."""
        layout = os.path.join(self.cache, "layout")
        bcow("convert", source, f"oci:{layout}:1", timeout=TIMEOUT)
        shown = json.loads(bcow("inspect", "--json", f"oci:{layout}:1", timeout=TIMEOUT).out)
        layers = {layer["digest"].removeprefix("sha256:") for layer in shown["stack"]["layers"]}
        files = self.blobs(layout)
        (stack,) = set(files) - layers
        return f"oci:{layout}:1", files, stack

    def test_stack_is_written_with_its_layers_and_read_everywhere(self):
        source, files, stack = self.layout(self.layered())
        name, place = f"s3://{BUCKET}/team/debian.bcow", f"/{BUCKET}/team"
        listed = bcow("ls", "-lR", source, timeout=TIMEOUT).out
        with self.server() as server:
            report = json.loads(self.bcow("copy", "--json", source, name).out)
            self.assertEqual([blob["copied_bytes"] for blob in report["blobs"]],
                             [blob["bytes"] for blob in report["blobs"]])
            written = {key: data for key, data in server.objects.items()
                       if key.startswith(f"{place}/")}
            expected = {f"{place}/blobs/sha256/{digest}": data for digest, data in files.items()
                        if digest != stack}
            expected[f"{place}/debian.bcow"] = files[stack]
            self.assertEqual(set(written), set(expected))
            self.assertTrue(written == expected, "the bytes")

            # Every command finds the layers, also by way of a second image with the same layers.
            self.assertEqual(self.bcow("ls", "-lR", name).out, listed)
            self.assertEqual(self.bcow("cat", name, "/a-1").out, b"changed")
            self.bcow("fsck", "--data", "--no-cache", name)
            shown = json.loads(self.bcow("inspect", "--json", name).out)
            self.assertEqual(len(shown["stack"]["layers"]), 2)
            with mounted(source) as local, self.mounted(name) as where:
                assert_same_tree(self, local, where)
            report = json.loads(self.bcow("copy", "--json", source,
                                          f"s3://{BUCKET}/team/again.bcow").out)
            self.assertEqual([bool(blob["copied_bytes"]) for blob in report["blobs"]],
                             [False, False, True])
            assert_refused(self, self.bcow("copy", source, name, check=False), "--force")
            self.bcow("copy", "--force", source, name)

            # Back in a layout, it is the same image, and can be mounted without the server.
            back = os.path.join(self.cache, "back")
            self.bcow("copy", name, f"oci:{back}:1")
            self.assertTrue(self.blobs(back) == files, "the files that were copied back")
            self.assertEqual(bcow("ls", "-lR", f"oci:{back}:1", timeout=TIMEOUT).out, listed)
            # From one bucket to another place of it.
            other = f"s3://{BUCKET}/other/debian.bcow"
            self.bcow("copy", name, other)
            self.assertEqual(self.bcow("ls", "-lR", other).out, listed)

            # A web server has layers at the same places: beside the stack, or of a whole layout.
            server.public = True
            for digest, data in files.items():
                server.objects[f"/web/blobs/sha256/{digest}"] = data
            for path in f"{place}/debian.bcow", f"/web/blobs/sha256/{stack}":
                url = self.env["AWS_ENDPOINT_URL"] + path
                self.assertEqual(self.bcow("ls", "-lR", "--no-cache", url).out, listed)
                self.bcow("fsck", "--data", "--no-cache", url)
            server.public = False

            # A disk over it.
            self.env["BCOW_BACKING_URLS"] = f"s3://{BUCKET}"
            disk = os.path.join(self.cache, "disk.bcow")
            self.bcow("create", "-b", name, disk)
            self.bcow("fsck", "--data", disk)
            # A missing layer is named with its place.
            lost = next(key for key in server.objects if key.startswith(f"{place}/blobs"))
            del server.objects[lost]
            failed = self.bcow("ls", "--no-cache", name, check=False)
            self.assertEqual(failed.code, 0, str(failed))
            failed = self.bcow("cat", "--no-cache", name, "/a-3", check=False)
            assert_refused(self, failed, "layer 1 of 2", "missing")
            self.bcow("copy", "--force", source, name)
            self.assertTrue(server.objects[lost] == expected[lost], "the layer that was lost")
            self.assertEqual({code for _, code in server.asked}, {None})

    def test_conversion_writes_layers_and_disks(self):
        source = self.layered()
        flat = os.path.join(self.cache, "flat.bcow")
        bcow("convert", source, flat, timeout=TIMEOUT)
        listed = bcow("ls", "-lR", flat, timeout=TIMEOUT).out
        name = f"s3://{BUCKET}/converted.bcow"
        _, files, stack = self.layout(source)
        with self.server() as server:
            done = self.bcow("convert", "--layers", source, name)
            self.assertIn(b"2 layers", done.out)
            self.assertIn(name.encode(), done.out)
            self.assertTrue(server.objects[f"/{BUCKET}/converted.bcow"] == files[stack], "stack")
            self.assertEqual(self.bcow("ls", "-lR", name).out, listed)
            # From the stack in S3 into another one, layer by layer.
            self.bcow("convert", "--layers", "--compress", "none", name,
                      f"s3://{BUCKET}/x/plain.bcow")
            self.assertEqual(self.bcow("ls", "-lR", f"s3://{BUCKET}/x/plain.bcow").out, listed)

            raw = os.path.join(self.cache, "disk.raw")
            write_file(raw, os.urandom(3 << 20))
            disk = f"s3://{BUCKET}/disk.bcow"
            report = json.loads(self.bcow("convert", "--json", f"raw:{raw}", disk).out)
            self.assertTrue(report["sealed"])
            back = os.path.join(self.cache, "back.raw")
            self.bcow("convert", disk, f"raw:{back}")
            run("cmp", raw, back, timeout=TIMEOUT)
            for options in ("--writable", f"raw:{raw}"), ("--layers", f"raw:{raw}"):
                refused = self.bcow("convert", *options, f"s3://{BUCKET}/new.bcow", check=False)
                self.assertEqual(refused.code, 2, str(refused))
            refused = bcow("convert", "--layers", source, flat, check=False, timeout=TIMEOUT)
            assert_refused(self, refused, "only for s3://", code=2)
            self.assertNotIn(f"/{BUCKET}/new.bcow", server.objects)
        self.assertEqual([name for name in os.listdir(self.env["TMPDIR"])], [])

    def test_interrupted_stack_is_continued_and_sends_each_part_once(self):
        source, files, stack = self.layout(self.layered())
        name = f"s3://{BUCKET}/debian.bcow"
        with self.server() as server:
            self.copy_until_part(2, server, source, name)
            # Without all layers, there is no stack.
            self.assertNotIn(f"/{BUCKET}/debian.bcow", server.objects)
            self.assertEqual(server.sent, [1])
            self.bcow("copy", source, name)
            self.assertEqual((server.sent, server.uploads), ([1, 2], {}))
            self.bcow("fsck", "--data", "--no-cache", name)
            self.assertTrue(server.objects[f"/{BUCKET}/debian.bcow"] == files[stack], "stack")

    def test_versitygw_takes_stacks(self):
        source, files, stack = self.layout(self.layered())
        with versitygw(self, BUCKET) as (posix, url):
            self.env["AWS_ENDPOINT_URL_S3"] = url
            name = f"s3://{BUCKET}/team x/debian.bcow"
            self.bcow("copy", source, name)
            here = os.path.join(posix, BUCKET, "team x")
            for digest, data in files.items():
                key = "debian.bcow" if digest == stack else f"blobs/sha256/{digest}"
                self.assertTrue(read_bytes(os.path.join(here, key)) == data, key)
            report = json.loads(self.bcow("copy", "--json", "--force", source, name).out)
            self.assertEqual([bool(blob["copied_bytes"]) for blob in report["blobs"]],
                             [False, False, True])
            with mounted(source) as local, self.mounted(name) as where:
                assert_same_tree(self, local, where)
            self.bcow("fsck", "--data", "--no-cache", name)
            back = os.path.join(self.cache, "back")
            self.bcow("copy", name, f"oci:{back}:1")
            self.assertTrue(self.blobs(back) == files, "the files that were copied back")

    def test_versitygw_accepts_the_signatures(self):
        with versitygw(self, BUCKET) as (posix, url):
            for key, data in self.objects.items():
                at = os.path.join(posix, BUCKET, key)
                os.makedirs(os.path.dirname(at), exist_ok=True)
                write_file(at, data)
            self.env["AWS_ENDPOINT_URL_S3"] = url
            for key in self.objects:
                self.bcow("fsck", "--data", "--no-cache", f"s3://{BUCKET}/{key}")
            with self.mounted(f"s3://{BUCKET}/image.bcow") as where:
                assert_same_tree(self, self.tree, where)
            large = self.large()
            for source, key in (self.image, "new x/\u00e9+=&.bcow"), (large, "large.bcow"):
                name = f"s3://{BUCKET}/{key}"
                self.bcow("copy", source, name)
                assert_refused(self, self.bcow("copy", source, name, check=False), "--force")
                self.bcow("copy", "--force", source, name)
                run("cmp", os.path.join(posix, BUCKET, key), source, timeout=TIMEOUT)
            read = os.path.join(self.cache, "read")
            run("curl", "-sS", "--fail", "--cacert", self.path("ca.pem"), "--user",
                f"{KEY_ID}:{SECRET}", "--aws-sigv4", f"aws:amz:{REGION}:s3", "-H",
                f"x-amz-content-sha256: {EMPTY}", "-o", read, f"{url}/{BUCKET}/large.bcow",
                timeout=TIMEOUT)
            run("cmp", read, large, timeout=TIMEOUT)
            self.env["AWS_SECRET_ACCESS_KEY"] = "falsch"
            failed = self.bcow("ls", f"s3://{BUCKET}/image.bcow", check=False)
            self.assertIn(b"SignatureDoesNotMatch", failed.err)

    def test_registry_redirects_to_signed_addresses_of_s3(self):
        distribution = shutil.which("registry")
        if not distribution:
            self.skipTest("distribution (registry) is not installed; the tests of bcow-remote have "
                          "a server that redirects")
        with versitygw(self, "blobs") as (posix, url), registry(
                self.directory, storage=s3_storage(url, "blobs"), program=distribution,
                env=self.env) as address:
            self.env["REGISTRY_AUTH_FILE"] = self.path("auth.json")
            # The keys are the registry's. Its signatures are all that bcow has.
            for name in [name for name in self.env if name.startswith("AWS_")]:
                del self.env[name]
            name = f"docker://{address}/team/tree:1"
            self.bcow("convert", f"dir:{self.tree}", name)
            listed = self.bcow("-vv", "ls", "-R", "--no-cache", name)
            self.assertEqual(listed.out, bcow("ls", "-R", self.image, timeout=TIMEOUT).out)
            shown = listed.err.decode()
            self.assertIn(f"redirects to {url}/blobs/", shown)
            self.assertNotIn("Signature", shown)
            with self.mounted(name) as where:
                assert_same_tree(self, self.tree, where)
            self.bcow("fsck", "--data", "--no-cache", name)
            layout = os.path.join(self.cache, "layout")
            self.bcow("copy", name, f"oci:{layout}:1")
            kept = os.path.join(posix, "blobs/docker/registry/v2/blobs/sha256")
            for digest, path in blobs_of(layout).items():
                run("cmp", path, os.path.join(kept, digest[:2], digest, "data"), timeout=TIMEOUT)
