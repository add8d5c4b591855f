"""A program starts from an image in a registry before the image is here, and its changes go back.

An ordinary user mounts the real image, runs Python with numpy there, writes, commits and pushes.
The registry is Debian's docker-registry with TLS: once with a password, and once with tokens of a
server of these tests, whose signatures the registry verifies. Where distribution and versitygw are
installed, also with blobs in S3. Every command has a time limit.
"""

import base64
import json
import os
import shutil
import ssl
import subprocess
import tarfile
import tempfile
import time
import urllib.parse

import web
from support import BCOW, UNPRIVILEGED, Scratch, bcow, for_everyone, need, run, skopeo_copy
from test_remote import PASSWORD, USER, make_certificates, registry
from test_s3 import s3_storage, versitygw
from web import WebServer, tls

TIMEOUT = 240
SERVICE, ISSUER = "bcow tests", "bcow test tokens"
# The program of the image, and what changes the image afterwards.
PROGRAM = """
import numpy
numpy.save("/srv/cubes.npy", numpy.arange(1000) ** 3)
with open("/etc/motd", "a") as motd:
    motd.write("changed from afar\\n")
print(int(numpy.load("/srv/cubes.npy")[7]))
"""
# $1 bcow, $2 the image, $3 the destination, $4 the program. Root of a user namespace owns the files
# of the image.
WORK = """
set -e
mkdir mnt upper
"$1" mount "$2" mnt --upper upper
trap '"$1" umount -z mnt 2>/dev/null || true' EXIT
chroot mnt python3 -c "$4"
"$1" umount mnt
du --block-size=1 --summarize cache | cut -f1
"$1" commit "$2" --upper upper "$3"
"""


def url64(data):
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


class TokenHandler(web.Handler):
    """Gives a token to clients with the password, for the access that they ask for."""

    timeout = TIMEOUT

    def do_GET(self):
        given = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if self.headers.get("Authorization") != f"Basic {given}":
            self.answer(401, {"errors": [{"code": "UNAUTHORIZED"}]})
            return
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
        access = []
        for scope in " ".join(query.get("scope", [])).split():
            kind, name, actions = scope.split(":")
            access.append({"type": kind, "name": name, "actions": actions.split(",")})
        token = self.server.token(access)
        self.answer(200, {"token": token, "access_token": token, "expires_in": 300})

    def answer(self, status, document):
        data = json.dumps(document).encode()
        super().answer(status, data, {"Content-Type": "application/json"})


class Tokens(WebServer):
    """A token server with TLS."""

    def __init__(self, directory):
        self.directory, self.given = directory, []
        super().__init__(TokenHandler, tls(directory))
        # A key of its own, because RSA signatures have the form that tokens need.
        run("openssl", "req", "-newkey", "rsa:2048", "-nodes", "-keyout", self.at("token.key"),
            "-out", self.at("token.csr"), "-subj", "/CN=tokens", timeout=TIMEOUT)
        run("openssl", "x509", "-req", "-in", self.at("token.csr"), "-CA", self.at("ca.pem"),
            "-CAkey", self.at("ca.key"), "-CAcreateserial", "-days", "2", "-out",
            self.at("token.pem"), timeout=TIMEOUT)
        with open(self.at("token.pem")) as file:
            self.certificate = base64.b64encode(ssl.PEM_cert_to_DER_cert(file.read())).decode()

    def at(self, name):
        return os.path.join(self.directory, name)

    def auth(self):
        """The registry's configuration."""
        return (f'{{token: {{realm: "https://localhost:{self.server_address[1]}/token", '
                f'service: "{SERVICE}", issuer: "{ISSUER}", rootcertbundle: '
                f'"{self.at("ca.pem")}"}}}}')

    def token(self, access):
        now = int(time.time())
        with self.lock:
            self.given.append(access)
            number = len(self.given)
        head = {"typ": "JWT", "alg": "RS256", "x5c": [self.certificate]}
        claims = {"iss": ISSUER, "sub": USER, "aud": SERVICE, "exp": now + 300, "nbf": now - 60,
                  "iat": now, "jti": str(number), "access": access}
        text = ".".join(url64(json.dumps(part).encode()) for part in (head, claims))
        signed = subprocess.run(["openssl", "dgst", "-sha256", "-sign", self.at("token.key")],
                                input=text.encode(), stdout=subprocess.PIPE, check=True,
                                timeout=TIMEOUT)
        return f"{text}.{url64(signed.stdout)}"


class Start(Scratch):
    """The image in its ordinary form, with its BCoW form attached."""

    @classmethod
    def setUpClass(cls):
        need("openssl", "skopeo", "docker-registry", "unshare", "gzip", root=True, fuse=True)
        super().setUpClass()
        make_certificates(cls.directory)
        cls.use_image("real")
        with registry(cls.directory) as address:
            cls.push(address)
        layers = cls.manifest(cls.source)["layers"]
        cls.stored = sum(layer["size"] for layer in layers)
        cls.layers = [layer["digest"] for layer in layers]

    @classmethod
    def push(cls, address):
        name = f"docker://{address}/team/science:1"
        cls.skopeo(cls.source, name)
        bcow("convert", "--referrer", cls.source, name, timeout=TIMEOUT,
             env=cls.environment(cls.directory))

    @classmethod
    def environment(cls, home):
        def at(name):
            return os.path.join(home, name)

        return {"HOME": home, "TMPDIR": home, "BCOW_CACHE": at("cache"),
                "SSL_CERT_FILE": at("ca.pem"), "REGISTRY_AUTH_FILE": at("auth.json"),
                "NO_PROXY": "localhost", "no_proxy": "localhost"}

    @classmethod
    def skopeo(cls, source, destination):
        skopeo_copy(source, destination, cls.path("auth.json"))

    @classmethod
    def manifest(cls, name):
        asked = run("skopeo", "inspect", "--raw", "--tls-verify=false", "--authfile",
                    cls.path("auth.json"), name, timeout=TIMEOUT)
        return json.loads(asked.out)

    def start_change_push(self, address):
        name, changed = (f"docker://{address}/team/science:{tag}" for tag in ("1", "changed"))
        home = tempfile.mkdtemp(prefix="bcow-start-", dir="/var/tmp")
        try:
            for file in "ca.pem", "auth.json":
                shutil.copy(self.path(file), home)
                os.chmod(os.path.join(home, file), 0o644)
            os.chown(home, UNPRIVILEGED, UNPRIVILEGED)
            done = run("unshare", "--user", "--map-root-user", "--mount", "sh", "-c",
                       f"cd {home}\n{WORK}", "sh", for_everyone(BCOW), name, changed, PROGRAM,
                       user=UNPRIVILEGED, env=self.environment(home), timeout=TIMEOUT)
            number, fetched, *_ = done.out.split()
            self.assertEqual(number, b"343")
            self.assertLess(0, int(fetched))
            self.assertLess(int(fetched), self.stored // 10, "more than a tenth of the image")
        finally:
            shutil.rmtree(home)
        found = [layer["digest"] for layer in self.manifest(changed)["layers"]]
        self.assertEqual(found[:-1], self.layers, "the registry has these layers")
        pulled = self.path("pulled")
        self.skopeo(changed, f"oci:{pulled}:tag")
        with tarfile.open(os.path.join(pulled, "blobs", *found[-1].split(":"))) as layer:
            files = {entry.name for entry in layer if entry.isfile()}
            self.assertLessEqual({"etc/motd", "srv/cubes.npy"}, files)
            self.assertTrue(layer.extractfile("etc/motd").read().endswith(b"changed from afar\n"))
        shutil.rmtree(pulled)

    def test_registry_with_a_password(self):
        with registry(self.directory) as address:
            self.start_change_push(address)

    def test_registry_with_tokens(self):
        with Tokens(self.directory) as tokens, \
                registry(self.directory, tokens.auth()) as address:
            self.start_change_push(address)
            asked = {(access["name"], action) for given in tokens.given for access in given
                     for action in access["actions"]}
        self.assertEqual(asked, {("team/science", "pull"), ("team/science", "push")})

    def test_registry_with_its_blobs_in_s3(self):
        if not shutil.which("registry"):
            self.skipTest("distribution (registry) is not installed")
        with versitygw(self, "blobs") as (_, url), registry(
                self.directory, storage=s3_storage(url, "blobs"), program="registry",
                env={name: self.path("ca.pem")
                     for name in ("SSL_CERT_FILE", "AWS_CA_BUNDLE")}) as address:
            self.push(address)
            self.start_change_push(address)
