"""Faults at every call of commands that use servers: reads with a cache, the commands of the cache,
and copies into a registry. The servers are in other processes, and their calls do not fail.

After each command, whether it succeeded or not, the same cache gives the right bytes, and a further
copy completes the image. BCOW_CALLS=all fails more calls, as for test_nth_call.py."""

import json
import os
import shutil
import tempfile
import unittest.mock

from support import bcow, digest_in, need, read_bytes, write_file
from test_nth_call import NthCall
from test_remote import Server, make_certificates, registry, tls


class Remote(NthCall):
    """An image of one large file on a server with TLS; each run has a cache of its own."""

    # The certificate of the server is not valid at each time.
    clock_errors = (1,)

    def setUp(self):
        need("openssl")
        super().setUp()
        servers = tempfile.TemporaryDirectory(prefix="servers-")
        self.addCleanup(servers.cleanup)
        self.servers = servers.name
        make_certificates(self.servers)
        os.mkdir("tree")
        self.data = self.random.randbytes(700_000)
        write_file("tree/large", self.data)
        bcow("convert", "dir:tree", os.path.join(self.servers, "image.bcow"))
        shutil.rmtree("tree")
        self.enterContext(unittest.mock.patch.dict(
            os.environ, SSL_CERT_FILE=os.path.join(self.servers, "ca.pem"),
            BCOW_CACHE=os.path.join(os.getcwd(), "copy", "cache"), NO_PROXY="localhost",
            no_proxy="localhost"))


class Caches(Remote):
    def setUp(self):
        super().setUp()
        server = self.enterContext(Server(self.servers, tls(self.servers)))
        self.url = server.url("image.bcow")

    def extract(self, name):
        bcow("extract", self.url, name)
        self.assertTrue(read_bytes(os.path.join(name, "large")) == self.data, name)

    def assert_good_cache(self, _):
        self.extract("again")
        # All is in the cache now, and right.
        verified = json.loads(bcow("cache", "verify", "--json").out)
        self.assertEqual([file["damaged_bytes"] for file in verified["files"]], [0])

    def test_what_is_read_is_right_or_an_error(self):
        def check(succeeded):
            if succeeded:
                self.assertTrue(read_bytes("out/large") == self.data)
            self.assert_good_cache(succeeded)

        self.fail_everywhere(["extract", self.url, "out"], check)

    def test_what_another_process_fetches_is_right_or_an_error(self):
        """In a sandbox. The calls of the process that makes the connections fail, too."""
        def check(succeeded):
            made = os.path.exists("new.bcow")
            self.assertTrue(made or not succeeded)
            if made:
                self.assertTrue(bcow("cat", "new.bcow", "large").out == self.data)
                os.unlink("new.bcow")
            self.assert_good_cache(succeeded)

        self.fail_everywhere(["convert", self.url, "new.bcow"], check)

    def test_a_cache_is_filled_as_far_as_possible(self):
        self.fail_everywhere(["cache", "warm", self.url], self.assert_good_cache)

    def test_a_cache_that_is_verified_or_cleared_stays_good(self):
        with unittest.mock.patch.dict(os.environ, BCOW_CACHE=os.path.abspath("cache")):
            bcow("cache", "warm", self.url)
        for command in "verify", "prune":
            options = ["--all"] if command == "prune" else []
            self.fail_everywhere(["cache", command, *options], self.assert_good_cache)


class Pushes(Remote):
    def test_an_image_is_in_the_registry_as_a_whole_or_not_at_all(self):
        need("docker-registry")
        address = self.enterContext(registry(self.servers))
        auth = os.path.join(self.servers, "auth.json")
        self.enterContext(unittest.mock.patch.dict(os.environ, REGISTRY_AUTH_FILE=auth))
        name = f"docker://{address}/image:1"
        shutil.move(os.path.join(self.servers, "image.bcow"), "image.bcow")
        bcow("copy", "image.bcow", "oci:expected:tag")
        digest = digest_in("expected")
        shutil.rmtree("expected")

        def check(succeeded):
            shown = bcow("fsck", "--data", name, check=False)
            if shown.code:
                self.assertFalse(succeeded)
                self.assertRegex(shown.err, b"404|not found|unknown")
                # A further copy completes it.
                bcow("copy", "image.bcow", name)
            bcow("copy", name, "oci:found:tag")
            self.assertEqual(digest_in("found"), digest)
            shutil.rmtree(os.path.join(self.servers, "storage"))

        self.fail_everywhere(["copy", "image.bcow", name], check)
