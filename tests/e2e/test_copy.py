"""`bcow copy`: the same bytes and digests in files, layouts, archives and registries.

The registry is Debian's docker-registry with TLS and a password, the web server is that of
test_remote, and skopeo is the peer. Every command and every wait has a time limit.
"""

import contextlib
import json
import os
import shutil
import sys
import tempfile
import unittest.mock

from support import (UNPRIVILEGED, assert_refused, assert_same_tree, bcow, blob_path, blobs_of,
                     digest_in, is_mounted, mounted, need, overwrite, read_bytes, read_text, run,
                     write_file)
import test_registries
from test_remote import Server
import tree
from web import tls

TIMEOUT = 240


class Copies(test_registries.WithRegistry):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.context = tls(cls.directory)
        cls.served = cls.path("served")
        os.mkdir(cls.served)
        cls.file = os.path.join(cls.served, "image.bcow")
        bcow("convert", cls.source, cls.file, timeout=TIMEOUT)

    def setUp(self):
        super().setUp()
        self.here = tempfile.mkdtemp(prefix="copy-", dir=self.directory)

    def at(self, name):
        return os.path.join(self.here, name)

    def copy(self, *arguments, **options):
        return bcow("copy", *arguments, env=self.env, timeout=TIMEOUT, **options)

    def copied(self, *arguments):
        """The bytes that a copy of an image took."""
        report = json.loads(self.copy("--json", *arguments).out)
        return sum(blob["copied_bytes"] for blob in report["blobs"])

    def assert_same_blobs(self, first, second):
        one, two = blobs_of(first), blobs_of(second)
        self.assertEqual(set(one), set(two))
        for name in one:
            run("cmp", one[name], two[name])

    def test_image_goes_through_every_place_and_keeps_its_digest(self):
        digest = digest_in(self.layout)
        first, second = self.name("copied"), self.name("copied-again")
        self.assertGreater(self.copied(f"oci:{self.layout}:tag", first), 1 << 20)
        self.assertEqual(self.copied(f"oci:{self.layout}:tag", first), 0)
        pulled, packed = self.at("pulled"), self.at("packed.tar")
        self.copy(first, f"oci:{pulled}:tag")
        self.assert_same_blobs(self.layout, pulled)
        self.copy(f"oci:{pulled}:tag", f"oci-archive:{packed}:tag")
        self.copy(f"oci-archive:{packed}:tag", second)
        for name in first, second:
            self.assertEqual(self.digest_in_registry(name)[0], digest)
        self.assertEqual(digest_in(pulled), digest)
        unpacked = self.at("unpacked")
        self.skopeo(f"oci-archive:{packed}:tag", f"oci:{unpacked}:tag")
        self.assertEqual(digest_in(unpacked), digest)
        with mounted(f"oci:{pulled}:tag") as where:
            assert_same_tree(self, self.reference, where)

    def test_skopeo_and_bcow_copy_the_same_image_back_and_forth(self):
        digest = digest_in(self.layout)
        self.skopeo(f"oci:{self.layout}:tag", self.name("by-skopeo"))
        here, back = self.at("here"), self.at("back")
        self.copy(self.name("by-skopeo"), f"oci:{here}:tag")
        self.copy(f"oci:{here}:tag", self.name("by-bcow"))
        self.skopeo(self.name("by-bcow"), f"oci:{back}:tag")
        for layout in here, back:
            self.assertEqual(digest_in(layout), digest)
            self.assert_same_blobs(self.layout, layout)
        self.assertLess(self.copied(self.name("by-skopeo"), f"oci:{here}:other"), 1 << 16)

    def test_blobs_of_another_repository_are_mounted(self):
        self.copy(f"oci:{self.layout}:tag", self.name("origin"))
        self.assertEqual(self.copied(self.name("origin"), self.name("mounted")), 0)
        self.assertEqual(self.digest_in_registry(self.name("mounted"))[0],
                         digest_in(self.layout))

    def test_file_is_fetched_from_a_web_server_byte_for_byte(self):
        target = self.at("fetched.bcow")
        with Server(self.served, self.context) as server:
            self.copy(server.url("image.bcow"), target)
            self.assertLess(server.sent, os.path.getsize(self.file) * 1.1)
        run("cmp", target, self.file)
        self.assertEqual(os.listdir(self.here), ["fetched.bcow"])

    def test_interrupted_copy_is_completed_and_not_begun_again(self):
        target, size = self.at("fetched.bcow"), os.path.getsize(self.file)
        with Server(self.served, self.context) as server:
            url = server.url("image.bcow")
            failed = self.until_broken(server, url, target, size // 2)
            assert_refused(self, failed, "cannot read https://", "no connection|in the middle")
            (partial,) = os.listdir(self.here)
            self.assertRegex(partial, r"^\.fetched\.bcow\.[0-9a-f]{16}\.partial$")
            # Damage in what is there costs that chunk only.
            overwrite(self.at(partial), 100_000, b"damage")
            server.broken, before = False, server.sent
            report = json.loads(self.copy("--json", url, target).out)
            self.assertLess(server.sent - before, size * 0.75)
            self.assertLess(report["copied_bytes"], size * 0.75)
        run("cmp", target, self.file)
        self.assertEqual(os.listdir(self.here), ["fetched.bcow"])

    def until_broken(self, server, url, target, limit):
        """Copies from a server that breaks after some bytes."""
        handler = server.RequestHandlerClass
        answer = handler.answer

        def limited(request, *arguments, **options):
            answer(request, *arguments, **options)
            if server.sent > limit:
                server.broken = True
        handler.answer = limited
        try:
            return self.copy("--server-timeout", "2", "-j", "1", url, target, check=False)
        finally:
            handler.answer = answer

    def test_interrupted_copy_into_a_layout_is_completed(self):
        name, layout = self.name("interrupted"), self.at("layout")
        self.copy(f"oci:{self.layout}:tag", name)
        blobs = blobs_of(self.layout)
        largest = max(blobs, key=lambda blob: os.path.getsize(blobs[blob]))
        size = os.path.getsize(blobs[largest])
        partial = blob_path(layout, f"sha256:.{largest}.partial")
        os.makedirs(os.path.dirname(partial))
        with open(blobs[largest], "rb") as whole, open(partial, "wb") as out:
            out.write(whole.read(size * 3 // 4))
        report = json.loads(self.copy("--json", name, f"oci:{layout}:tag").out)
        (taken,) = [blob["copied_bytes"] for blob in report["blobs"]
                    if blob["digest"].endswith(largest)]
        self.assertLess(taken, size // 2)
        self.assert_same_blobs(self.layout, layout)

    def test_file_becomes_an_image_and_comes_back(self):
        name, layout, back = self.name("file"), self.at("layout"), self.at("back.bcow")
        self.copy(self.file, name)
        self.copy(name, f"oci:{layout}:tag")
        self.copy(f"oci:{layout}:tag", back)
        run("cmp", back, self.file)
        listed = bcow("ls", "-R", name, env=self.env, timeout=TIMEOUT).out
        self.assertEqual(listed, bcow("ls", "-R", self.file, timeout=TIMEOUT).out)
        self.assertEqual(self.digest_in_registry(name)[0], digest_in(layout))
        pulled = self.at("by-skopeo")
        self.skopeo(name, f"oci:{pulled}:tag")
        self.assertEqual(digest_in(pulled), digest_in(layout))

    def test_commit_goes_into_the_registry_with_the_files_below_it(self):
        upper, merged = self.at("upper"), self.at("merged.bcow")
        os.mkdir(upper)
        with mounted(f"oci:{self.layout}:tag", "--upper", upper) as where:
            write_file(os.path.join(where, "new-file"), "written\n")
        bcow("commit", f"oci:{self.layout}:tag", "--upper", upper, "--merge", merged,
             timeout=TIMEOUT)
        self.copy(f"oci:{self.layout}:tag", self.name("base"))
        name = self.name("merged")
        self.copy("--store", self.layout, merged, name)
        read = bcow("cat", name, "/new-file", env=self.env, timeout=TIMEOUT)
        self.assertEqual(read.out, b"written\n")
        bcow("diff", "--store", self.layout, name, merged, env=self.env, timeout=TIMEOUT)
        # The layers are in the repository of the base already.
        self.assertLess(self.copied("--store", self.layout, merged, self.name("base", "merged")),
                        4 << 20)

    def test_a_snapshot_is_pushed_and_forked_elsewhere(self):
        need("setpriv")
        self.copy(f"oci:{self.layout}:tag", self.name("work", "base"))
        self.env["BCOW_VIEWS"] = self.at("views")
        for driver in "fuse", "kernel":
            with self.subTest(driver=driver):
                self.push_and_fork(driver)

    def push_and_fork(self, driver):
        base, made = f"oci:{self.layout}:tag", self.at(f"{driver}.bcow")
        with (unittest.mock.patch.dict(os.environ, self.env),
              mounted(base, "--upper", self.at(driver), "--driver", driver) as where):
            write_file(os.path.join(where, "root", "step"), "7\n")
            overwrite(os.path.join(where, "etc", "passwd"), 0, b"R")
            os.unlink(os.path.join(where, "etc", "motd"))
            bcow("snapshot", where, "step-7", timeout=TIMEOUT)
            expected = tree.dump(where)
            write_file(os.path.join(where, "root", "step"), "8\n")
            bcow("commit", base, "--upper", f"{where}@step-7", "--merge", made, timeout=TIMEOUT)
        name = self.name("work", driver)
        # The registry has the layers of the base.
        self.assertLess(self.copied("--store", self.layout, made, name), 4 << 20)
        with self.elsewhere(name, driver) as (where, cache, run_there):
            self.assertEqual(run_there("cat", f"{where}/root/step").out, b"7\n")
            fetched = sum(file.stat().st_blocks * 512 for file in os.scandir(cache))
            self.assertLess(fetched, sum(map(os.path.getsize, blobs_of(self.layout).values())) // 4)
            shown = run_there(sys.executable, tree.__file__, "dump", where).out.splitlines()
            assert_same_tree(self, expected, {entry["path"]: entry
                                              for entry in map(json.loads, shown)})
            run_there("sh", "-c", f"echo changed >{where}/tmp/new")

    @contextlib.contextmanager
    def elsewhere(self, name, driver):
        """A mount of an image with an upper, with another cache and, with the FUSE driver, of an
        ordinary user. Gives its place, its cache, and a function that runs a command as its user,
        who may read all files."""
        user = UNPRIVILEGED if driver == "fuse" else 0
        home = tempfile.mkdtemp(prefix="bcow-fork-", dir="/var/tmp")
        where, cache = os.path.join(home, "mnt"), os.path.join(home, "cache")
        env = {**self.env, "HOME": home, "TMPDIR": home, "BCOW_CACHE": cache}
        for variable in "SSL_CERT_FILE", "REGISTRY_AUTH_FILE":
            env[variable] = shutil.copy(env[variable], home)
            os.chmod(env[variable], 0o644)
        os.mkdir(where)
        for path in home, where:
            os.chown(path, user, user)

        def run_there(*command):
            rights = "+dac_read_search,+sys_admin"
            return run("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups",
                       f"--inh-caps={rights}", f"--ambient-caps={rights}", *command,
                       timeout=TIMEOUT)
        try:
            bcow("mount", name, where, "--upper", os.path.join(home, "upper"), "--driver", driver,
                 env=env, user=user, timeout=TIMEOUT)
            yield where, cache, run_there
            bcow("umount", where, env=env, user=user, timeout=TIMEOUT)
        finally:
            if is_mounted(where):
                run("umount", "-l", where, timeout=TIMEOUT)
            shutil.rmtree(home)

    def test_damaged_source_is_an_error_and_leaves_nothing(self):
        layout, target = self.at("damaged"), self.at("target")
        shutil.copytree(self.layout, layout)
        blobs = blobs_of(layout)
        largest = max(blobs, key=lambda blob: os.path.getsize(blobs[blob]))
        overwrite(blobs[largest], os.path.getsize(blobs[largest]) // 2, b"damage")
        failed = self.copy(f"oci:{layout}:tag", f"oci:{target}:tag", check=False)
        assert_refused(self, failed, "layer . of", "do not match the Merkle tree")
        self.assertFalse(os.path.exists(os.path.join(target, "index.json")))
        failed = self.copy(f"oci:{layout}:tag", self.name("damaged"), check=False)
        assert_refused(self, failed, "digest is sha256")

    def test_existing_files_are_replaced_as_by_convert(self):
        other, target = self.at("other"), self.at("target")
        for path in other, target:
            write_file(path, "precious")
        refused = self.copy(self.file, target, check=False)
        assert_refused(self, refused, "not in BCoW format", "--force")
        self.assertEqual(read_text(target), "precious")
        self.copy("--force", self.file, target)
        run("cmp", target, self.file)
        self.copy(self.file, target)
        refused = self.copy(target, target, check=False)
        assert_refused(self, refused, "cannot write")

    def test_pinned_root_refuses_another_image(self):
        found = json.loads(bcow("inspect", "--json", self.file, timeout=TIMEOUT).out)
        self.copy("--root-hash", found["merkle"]["root"], self.file, self.at("a.bcow"))
        for source, target in ((self.file, self.at("b.bcow")),
                               (f"oci:{self.layout}:tag", f"oci:{self.at('x')}")):
            refused = self.copy("--root-hash", "0" * 64, source, target, check=False)
            assert_refused(self, refused, "its root hash is [0-9a-f]{64}, not 0000")
        self.assertEqual(os.listdir(self.here), ["a.bcow"])

    def test_what_cannot_be_copied_is_refused_with_a_way_out(self):
        disk = self.at("disk.bcow")
        bcow("create", "-s", "1M", disk, timeout=TIMEOUT)
        raw = self.at("raw")
        write_file(raw, os.urandom(1 << 20))
        sealed = self.at("sealed.bcow")
        bcow("convert", f"raw:{raw}", sealed, timeout=TIMEOUT)
        upper, layer = self.at("upper"), self.at("layer.bcow")
        os.mkdir(upper)
        with mounted(self.file, "--upper", upper) as where:
            write_file(os.path.join(where, "new-file"), "written\n")
        bcow("commit", self.file, "--upper", upper, layer, timeout=TIMEOUT)
        self.skopeo(self.source, self.name("ordinary"))
        for source, target, message in (
                (f"oci:{self.layout}:tag", self.at("x.bcow"), "the image has layers"),
                (self.source, f"oci:{self.at('x')}", "is an ordinary OCI image"),
                (self.name("ordinary"), f"oci:{self.at('x')}", "is an ordinary OCI image"),
                (disk, self.at("x.bcow"), "no Merkle tree"),
                (sealed, f"oci:{self.at('x')}", "is a disk"),
                (layer, f"oci:{self.at('x')}", "is a single layer"),
                (raw, self.at("x.bcow"), "not a BCoW file"),
                (self.file, f"raw:{self.at('x')}", "cannot write to raw:"),
                (self.file, "https://localhost/x", "cannot write to https"),
                (self.at("missing"), self.at("x.bcow"), "No such file"),
                (self.file, self.name("x") + "@sha256:" + "0" * 64, "follows from its content")):
            with self.subTest(source=source, target=target):
                failed = self.copy(source, target, check=False)
                self.assertIn(failed.code, (1, 2), str(failed))
                self.assertRegex(failed.err.decode(), message)
                self.assertFalse(os.path.exists(self.at("x.bcow")))
                self.assertFalse(os.path.exists(self.at("x")))
        self.copy(sealed, self.at("copy.bcow"))
        run("cmp", sealed, self.at("copy.bcow"))

    def test_ordinary_user_copies(self):
        here = tempfile.mkdtemp(prefix="bcow-copy-", dir="/var/tmp")
        try:
            os.chown(here, UNPRIVILEGED, UNPRIVILEGED)
            self.copy(f"oci:{self.layout}:tag", self.name("for-user"))
            for name in "ca.pem", "auth.json":
                shutil.copy(self.path(name), here)
                os.chmod(os.path.join(here, name), 0o644)
            self.env.update(HOME=here, BCOW_CACHE="", XDG_CACHE_HOME="",
                            SSL_CERT_FILE=os.path.join(here, "ca.pem"),
                            REGISTRY_AUTH_FILE=os.path.join(here, "auth.json"))
            layout = os.path.join(here, "layout")
            self.copy(self.name("for-user"), f"oci:{layout}:tag", user=UNPRIVILEGED)
            self.copy(f"oci:{layout}:tag", self.name("by-user"), user=UNPRIVILEGED)
            self.assert_same_blobs(self.layout, layout)
        finally:
            shutil.rmtree(here)

    def test_hostile_registry_brings_nothing_wrong(self):
        content = test_registries.Content()
        data = read_bytes(self.file)
        root = json.loads(bcow("inspect", "--json", self.file, timeout=TIMEOUT).out)
        root = root["merkle"]["root"].removeprefix("sha256:")
        config = content.blob(b"{}", "application/vnd.oci.image.config.v1+json")
        wrong = bytearray(data)
        wrong[len(wrong) // 2] ^= 1
        stack = content.blob(data, "application/vnd.bcow.stack.v1")
        stack["annotations"] = {"io.bcow.merkle-root": root}
        content.document({"schemaVersion": 2, "config": config, "layers": [stack]},
                         "application/vnd.oci.image.manifest.v1+json", "1")
        env = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        with test_registries.Server(content) as server:
            target = self.at("good.bcow")
            bcow("copy", "--insecure", server.name(), target, env=env, timeout=TIMEOUT)
            run("cmp", target, self.file)
            content.blobs[stack["digest"]] = bytes(wrong)
            failed = bcow("copy", "--insecure", server.name(), self.at("bad.bcow"), env=env,
                          check=False, timeout=TIMEOUT)
            assert_refused(self, failed, "do not match the Merkle tree")
            self.assertFalse(os.path.exists(self.at("bad.bcow")))
