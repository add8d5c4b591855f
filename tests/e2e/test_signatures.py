"""`--verify-key`: signatures of manifests, in the form of cosign (simple signing).

The tests make the signatures with openssl, as cosign makes them with a key pair; one test has
cosign itself, where it is installed. The registry is the one of test_registries.py. Every command
has a time limit.
"""

import base64
import json
import os
import shutil
import subprocess

import test_mirrors
from support import bcow, need, run
from test_mirrors import TIMEOUT
from test_registries import INDEX, MANIFEST, Content, Server, digest_of
from web import plain_registry

SIGNED = "application/vnd.dev.cosign.simplesigning.v1+json"
REFERRER = "application/vnd.dev.cosign.artifact.sig.v1+json"


def openssl(*arguments, data=None):
    done = subprocess.run(["openssl", *arguments], input=data, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, check=False, timeout=TIMEOUT)
    if done.returncode:
        raise AssertionError(f"openssl {' '.join(arguments)}: {done.stderr.decode()}")
    return done.stdout


def payload(digest):
    return json.dumps({"critical": {"identity": {"docker-reference": "x/team/image"},
                                    "image": {"docker-manifest-digest": digest},
                                    "type": "cosign container image signature"},
                       "optional": None}).encode()


class Signatures(test_mirrors.Images):
    @classmethod
    def setUpClass(cls):
        need("openssl")
        super().setUpClass()
        for name in "one", "two":
            cls.key(name, "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:prime256v1")
        cls.key("rsa", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048")
        cls.key("p384", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-384")

    @classmethod
    def key(cls, name, *options):
        openssl("genpkey", *options, "-out", cls.path(f"{name}.key"))
        openssl("pkey", "-in", cls.path(f"{name}.key"), "-pubout", "-out", cls.path(f"{name}.pub"))

    def sign(self, text, key="one"):
        return openssl("dgst", "-sha256", "-sign", self.path(f"{key}.key"), data=text)

    def registry(self):
        """The content of a registry with the image."""
        content = Content()
        content.blobs.update(self.content.blobs)
        content.manifests.update(self.content.manifests)
        return content

    def manifest(self, content, *signed):
        """A manifest with signed documents: pairs of document and signature."""
        layers = []
        for text, signature in signed:
            layer = content.blob(text, SIGNED)
            encoded = base64.b64encode(signature).decode()
            layers.append({**layer, "annotations": {"dev.cosignproject.cosign/signature": encoded}})
        config = content.blob(b"{}", "application/vnd.oci.image.config.v1+json")
        return {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers}

    def tag(self, content, *signed, digest=None):
        tag = (digest or self.digest).replace(":", "-") + ".sig"
        content.document(self.manifest(content, *signed), MANIFEST, tag)
        return content

    def ls(self, content, *options, key="one.pub", end=":1", check=True):
        shutil.rmtree(self.cache, ignore_errors=True)
        with Server(content) as server:
            result = self.bcow("ls", "-R", "--verify-key", self.path(key), server.name(end),
                               *options, check=check)
            self.blobs = [path for path, _ in server.asked if "/blobs/" in path]
        return result

    def refused(self, content, *mention, **options):
        failed = self.ls(content, check=False, **options)
        self.assertEqual(failed.code, 1, str(failed))
        self.assertEqual(failed.out, b"")
        for text in mention:
            self.assertIn(text.encode(), failed.err)
        # Of the image itself, nothing is fetched.
        stack = [path for path in self.blobs if path.rsplit("/", 1)[1] in self.content.blobs]
        self.assertEqual(stack, [])

    def test_signed_image_opens_by_tag_and_by_digest(self):
        text = payload(self.digest)
        content = self.tag(self.registry(), (text, self.sign(text)))
        local = bcow("ls", "-R", self.image, timeout=TIMEOUT).out
        self.assertEqual(self.ls(content).out, local)
        self.assertEqual(self.ls(content, end=f"@{self.digest}").out, local)

    def test_one_right_signature_of_several_is_enough(self):
        text = payload(self.digest)
        content = self.tag(self.registry(), (text, b"damaged"), (text, self.sign(text, "two")),
                           (text, self.sign(text)))
        self.ls(content)

    def test_signature_is_found_as_a_referrer(self):
        content = self.registry()
        text = payload(self.digest)
        manifest = self.manifest(content, (text, self.sign(text)))
        manifest["subject"] = {"digest": self.digest, "mediaType": MANIFEST, "size": 1}
        entry = content.document(manifest, MANIFEST)
        index = {"schemaVersion": 2, "mediaType": INDEX,
                 "manifests": [{**entry, "artifactType": REFERRER}]}
        content.document(index, INDEX, self.digest.replace(":", "-"))
        self.ls(content)

    def test_unsigned_image_is_refused(self):
        self.refused(self.registry(), "the registry has no signature", "hint: ")

    def test_signature_by_another_key_is_refused(self):
        text = payload(self.digest)
        content = self.tag(self.registry(), (text, self.sign(text, "two")))
        self.refused(content, "by the given key")

    def test_signature_of_another_image_is_refused(self):
        other = payload(digest_of(b"another manifest"))
        content = self.tag(self.registry(), (other, self.sign(other)))
        self.refused(content, digest_of(b"another manifest"), self.digest)

    def test_changed_or_invalid_documents_are_refused(self):
        text = payload(self.digest)
        other = payload(digest_of(b"another manifest"))
        content = self.tag(self.registry(), (text, self.sign(other)))
        self.refused(content, "by the given key")
        for broken in b"", b"{}", b"[" * 60_000, b'{"critical": {"image": 7}}':
            content = self.tag(self.registry(), (broken, self.sign(broken)))
            self.refused(content, "signed document is invalid")
        # The registry sends another document than the manifest of the signature names.
        content = self.tag(self.registry(), (text, self.sign(text)))
        content.blobs[digest_of(text)] = text + b" "
        self.refused(content, "digest of the document")

    def test_image_behind_an_index_is_covered_by_the_signature_of_the_index(self):
        content = self.registry()
        data, _ = content.manifests["1"]
        entry = {"mediaType": MANIFEST, "digest": self.digest, "size": len(data)}
        machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine)
        entry["platform"] = {"os": "linux", "architecture": machine or os.uname().machine}
        index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [entry]}
        signed = content.document(index, INDEX, "1")["digest"]
        self.refused(content, "the registry has no signature")
        text = payload(signed)
        self.ls(self.tag(content, (text, self.sign(text)), digest=signed))

    def test_signed_image_starts_without_the_registry(self):
        text = payload(self.digest)
        content = self.tag(self.registry(), (text, self.sign(text)))
        with Server(content) as server:
            name = server.name()
            self.bcow("fsck", "--data", "--verify-key", self.path("one.pub"), name)
        self.bcow("ls", "--verify-key", self.path("one.pub"), name)
        failed = self.bcow("ls", "--verify-key", self.path("two.pub"), name, check=False)
        self.assertEqual(failed.code, 1)

    def test_cosign_signs(self):
        if not shutil.which("cosign"):
            self.skipTest("cosign is not installed; openssl signs for the other tests")
        need("docker-registry")

        def cosign(*arguments):
            run("cosign", *arguments, timeout=TIMEOUT, cwd=self.directory,
                env={"COSIGN_PASSWORD": "", "HOME": self.directory})

        def ls(key):
            return self.bcow("ls", "-R", "--no-cache", "--verify-key", self.path(f"{key}.pub"),
                             f"docker://{name}:1", check=False)

        with plain_registry(self.directory) as port:
            name = f"127.0.0.1:{port}/team/image"
            self.bcow("copy", f"oci:{self.path('layout')}:tag", f"docker://{name}:1")
            cosign("generate-key-pair", "--output-key-prefix", "cosign")
            self.assertIn(b"has no signature", ls("cosign").err)
            cosign("sign", "--yes", "--tlog-upload=false", "--key", "cosign.key",
                   f"{name}@{self.digest}")
            cosign("verify", "--insecure-ignore-tlog", "--key", "cosign.pub", f"{name}:1")
            self.assertEqual(ls("cosign").out, bcow("ls", "-R", self.image, timeout=TIMEOUT).out)
            self.assertIn(b"by the given key", ls("one").err)

    def test_other_keys_and_other_images_are_refused(self):
        for key in "rsa.pub", "p384.pub":
            self.refused(self.registry(), "not supported yet", key=key)
        self.refused(self.registry(), "no PEM public key", key="one.key")
        self.refused(self.registry(), "cannot use the key", key="none.pub")
        for name in self.image, "https://x.invalid/a.bcow", "s3://bucket/key":
            failed = self.bcow("ls", "--verify-key", self.path("one.pub"), name, check=False)
            self.assertEqual(failed.code, 2)
            self.assertIn(b"only images of registries have signatures", failed.err)
