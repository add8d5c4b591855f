"""Disks and uppers over remote images.

The servers are those of test_remote: a web server with TLS, and docker-registry with TLS and a
password. Every command and every wait has a time limit.
"""

import contextlib
import json
import os
import shutil
import tempfile

import test_remote
from support import (assert_refused, bcow, need, overwrite, read_bytes, read_text, run, served,
                     write_file)
from test_remote import TIMEOUT, registry


class Disks(test_remote.WebCase):
    @classmethod
    def make_tree(cls, top):
        """Some 6 MB that do not compress."""
        test_remote.make_files(top, 20, 300_000)

    def setUp(self):
        super().setUp()
        self.scratch = tempfile.mkdtemp(prefix="scratch-", dir=self.directory)
        self.env["BCOW_VIEWS"] = os.path.join(self.scratch, "views")
        self.disk = os.path.join(self.scratch, "disk.bcow")

    def inspect(self, *arguments):
        return json.loads(self.bcow("inspect", "--json", *arguments).out)

    def raw(self, name, *options):
        """The content of an image or a disk."""
        out = os.path.join(self.scratch, "raw")
        self.bcow("convert", "--force", *options, name, f"raw:{out}")
        return read_bytes(out)

    def test_disk_over_a_web_server(self):
        need("qemu-img")
        with self.server() as server:
            url = server.url("image.bcow")
            allowed = ("--backing-url", url.rsplit("/", 1)[0])
            self.bcow("create", "-b", url, self.disk)
            (backing,) = self.inspect(*allowed, self.disk)["backings"]
            self.assertEqual(backing["name"], url)
            base = self.raw(self.image)
            # A file decides about no connection.
            raw = f"raw:{self.scratch}/refused"
            refused = self.bcow("convert", self.disk, raw, check=False)
            assert_refused(self, refused, "its URL is not allowed", allowed[1])
            for prefix in url[:-1], "https://", "https://localhost", f"{url}/":
                warning = self.bcow("map", "--backing-url", prefix, self.disk).err
                self.assertEqual(b"not allowed" in warning, prefix != f"{url}/", prefix)
            self.assertEqual(self.bcow("map", *allowed, self.disk).err, b"")
            shown = self.bcow("inspect", *allowed, self.disk).out.decode()
            self.assertIn(url, shown)
            self.assertTrue(self.raw(self.disk, *allowed) == base, "the content")
            self.env["BCOW_BACKING_URLS"] = f"s3://other {allowed[1]}"
            with contextlib.ExitStack() as ended:
                ended.callback(os.environ.update, dict(os.environ))
                os.environ.update(self.env)
                socket = os.path.join(self.scratch, "socket")
                with served(self.disk, "--socket", socket) as export:
                    run("qemu-io", "-f", "raw", "-c", "write -P 7 8192 4096", export.uri,
                        timeout=TIMEOUT)
            changed = bytearray(base)
            changed[8192:12288] = bytes([7]) * 4096
            self.assertTrue(self.raw(self.disk) == changed, "the written block")
            assert_refused(self, self.bcow("commit", self.disk, check=False),
                           "on another machine", "bcow commit DISK NEW")
            # The image is in the cache; no server is needed.
            server.broken = True
            self.assertTrue(self.raw(self.disk) == changed, "without the server")
            server.broken = False
            local = os.path.join(self.served, "image.bcow")
            self.bcow("rebase", "--backing-dir", self.served, "-b", local, self.disk)
            self.assertTrue(self.raw(self.disk, "--backing-dir", self.served) == changed)
            self.bcow("rebase", "--backing-dir", self.served, "-b", url, self.disk)
            self.assertEqual(self.inspect(self.disk)["backings"][0]["name"], url)
            self.assertTrue(self.raw(self.disk) == changed, "after two changes of the backing")
            self.bcow("rebase", "--no-backing", self.disk)
            self.assertTrue(self.raw(self.disk, "--no-cache") == changed, "without a backing")

    def test_changed_file_and_secret_urls_are_refused(self):
        with self.server() as server:
            url = server.url("own.bcow")
            own = os.path.join(self.served, "own.bcow")
            shutil.copy(self.image, own)
            self.bcow("create", "-b", url, self.disk)
            other = os.path.join(self.scratch, "other")
            os.mkdir(other)
            bcow("convert", "--force", f"dir:{other}", own, timeout=TIMEOUT)
            refused = self.bcow("convert", "--no-cache", "--backing-url", url, self.disk,
                                f"raw:{self.scratch}/raw", check=False)
            assert_refused(self, refused, "the root hash of the file is", url)
            new = os.path.join(self.scratch, "new.bcow")
            for name in f"{url}?signature=geheim", url.replace("//", "//me@"):
                refused = self.bcow("create", "-b", name, new, check=False)
                self.assertIn(refused.code, (1, 2))
                self.assertNotIn(b"geheim", refused.err)
            self.assertFalse(os.path.exists(new))

    def test_disk_with_a_file_system_over_a_registry(self):
        need("docker-registry", "e2fsck")
        with registry(self.directory) as address:
            self.env["REGISTRY_AUTH_FILE"] = self.path("auth.json")
            name = f"docker://{address}/team/tree:1"
            self.bcow("convert", f"dir:{self.tree}", name)
            self.bcow("create", "--fs", "ext4", "-s", "1G", "-b", name, self.disk)
            self.bcow("create", "-s", "1G", "-b", name, f"{self.disk}.plain")
            self.env["BCOW_BACKING_URLS"] = f"docker://{address}/team/tree"
            (backing,) = self.inspect(self.disk)["backings"]
            self.assertRegex(backing["name"], r"docker://.*/team/tree@sha256:[0-9a-f]{64}$")
            self.assertNotIn(b"geheim", read_bytes(self.disk))
            with self.mounted(self.disk) as where:
                for n in range(20):
                    run("cmp", os.path.join(where, f"dir-{n}/file"),
                        os.path.join(self.tree, f"dir-{n}/file"), timeout=TIMEOUT)
                write_file(os.path.join(where, "new"), "new")
            # The tag moves on; the disk keeps its image.
            self.bcow("convert", "--force", f"dir:{self.scratch}", name)
            self.bcow("fsck", "--data", self.disk)
            self.raw(f"{self.disk}.plain", "--no-cache")
        # The registry is gone.
        with self.mounted(self.disk) as where:
            self.assertEqual(read_text(os.path.join(where, "new")), "new")
            os.listdir(os.path.join(where, "dir-7"))

    def test_uppers_over_a_registry_at_both_drivers(self):
        need("docker-registry")
        with registry(self.directory) as address:
            self.env["REGISTRY_AUTH_FILE"] = self.path("auth.json")
            name = f"docker://{address}/team/tree:2"
            self.bcow("convert", f"dir:{self.tree}", name)
            for driver in "fuse", "kernel":
                upper = os.path.join(self.scratch, driver)
                options = ("--upper", upper, "--driver", driver)
                with self.mounted(name, *options) as where:
                    overwrite(os.path.join(where, "dir-3/file"), 0, b"changed")
                    os.remove(os.path.join(where, "dir-4/file"))
                with self.mounted(name, *options) as where:
                    with open(os.path.join(where, "dir-3/file"), "rb") as file:
                        self.assertEqual(file.read(7), b"changed")
                    self.assertEqual(os.listdir(os.path.join(where, "dir-4")), [])
                if driver == "kernel":
                    disk = os.path.join(upper, ".bcow", "disk.bcow")
                    allowed = ("--backing-url", f"docker://{address}/team/tree")
                    (backing,) = self.inspect(*allowed, disk)["backings"]
                    self.assertRegex(backing["name"], r"docker://.*/team/tree@sha256:\w{64}$")
                    self.bcow("fsck", "--data", *allowed, disk)
                found = self.bcow("diff", "--upper", upper, name, check=False).out.decode()
                self.assertEqual([line.split()[1] for line in found.splitlines()],
                                 ["/dir-3/file", "/dir-4", "/dir-4/file"], found)
                layer = os.path.join(self.scratch, f"{driver}.bcow")
                self.bcow("commit", name, "--upper", upper, layer)
                with self.mounted(name, "--layer", layer) as where:
                    self.assertFalse(os.path.exists(os.path.join(where, "dir-4/file")))
