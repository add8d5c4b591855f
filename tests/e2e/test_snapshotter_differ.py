"""bcow-snapshotter as containerd's diff service: layers are made of archives, without unpacking."""

import concurrent.futures
import hashlib
import io
import os
import signal
import tarfile
import unittest

import support
from kills import Kills
from support import (bcow, blob_path, manifest_in, need, read_bytes, read_json, read_text,
                     skopeo_copy, write_file)
from test_snapshotter import (CODES, CONFIG, ENGINE, WithContainerd, WithSnapshotter,
                              has_containerd_2)

TAR = "application/vnd.oci.image.layer.v1.tar"


class Applied(WithSnapshotter):
    """The contract, over the socket. The blobs of an OCI layout are where a content store has
    them."""

    def store(self, layout):
        """Starts a snapshotter whose content store is this layout."""
        one = self.start("--content-store", layout)
        return one, one.client

    def blob(self, layout, data, media_type=TAR):
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        path = blob_path(layout, digest)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_file(path, data)
        return {"media_type": media_type, "digest": digest, "size": len(data)}

    def apply(self, client, key, diff, parent="", name=None):
        """Makes a layer of an archive; returns the answer."""
        answer = client.Prepare(key=key, parent=parent)
        applied = client.Apply(diff=diff, mounts=answer.mounts).applied
        client.Commit(name=name or key + "-done", key=key, parent=parent)
        return applied

    def image(self):
        """The small image: its layout, the descriptors of its layers, and their diffIDs."""
        layout, tag = support.image("small")
        manifest = manifest_in(layout, tag)
        diffs = [{"media_type": layer["mediaType"], "digest": layer["digest"],
                  "size": layer["size"]} for layer in manifest["layers"]]
        config = read_json(blob_path(layout, manifest["config"]["digest"]))
        return layout, diffs, config["rootfs"]["diff_ids"]

    def test_the_layers_of_an_image_are_made_of_its_archives(self):
        layout, diffs, diff_ids = self.image()
        one, client = self.store(layout)
        parent = ""
        for number, (diff, diff_id) in enumerate(zip(diffs, diff_ids)):
            key = f"default/{number}/extract-{number} sha256:{number}"
            applied = self.apply(client, key, diff, parent, f"layer-{number}")
            self.assertEqual((applied.digest, applied.media_type), (diff_id, TAR))
            self.assertGreater(applied.size, diff["size"])
            parent = f"layer-{number}"
            # The layers below are not mounted for that.
            self.assertNotIn(self.root, read_text("/proc/self/mounts"))
        self.assertEqual(len(self.names("layers")), len(diffs))
        self.assertGreater(client.Usage(key=parent).size, 0)
        self.assert_is_the_image(client, parent)
        self.assert_only(client)
        for path in self.names("layers"):
            bcow("fsck", "--data", os.path.join(self.root, "layers", path))
        self.assertEqual(one.end(), 0)

    def test_layers_are_made_at_the_same_time_and_then_stacked(self):
        layout, diffs, diff_ids = self.image()
        one, client = self.store(layout)

        def apply(number):
            answer = client.Prepare(key=f"extract-{number}")
            return client.Apply(diff=diffs[number], mounts=answer.mounts).applied.digest
        with concurrent.futures.ThreadPoolExecutor() as pool:
            self.assertEqual(list(pool.map(apply, range(len(diffs)))), diff_ids)
        for number in range(len(diffs)):
            client.Commit(name=f"layer-{number}", key=f"extract-{number}",
                          parent=f"layer-{number - 1}" if number else "")
        self.refused(CODES.FAILED_PRECONDITION, client.Remove, key="layer-0")
        self.assert_is_the_image(client, f"layer-{len(diffs) - 1}")
        # Unpacked files depend on what is below them.
        client.Prepare(key="unpacked")
        self.refused(CODES.UNIMPLEMENTED, client.Commit, name="n", key="unpacked",
                     parent="layer-0")
        answer = client.Prepare(key="extract-n")
        client.Apply(diff=diffs[0], mounts=answer.mounts)
        self.refused(CODES.NOT_FOUND, client.Commit, name="n", key="extract-n", parent="none")
        self.refused(CODES.INVALID_ARGUMENT, client.Commit, name="n", key="extract-n",
                     parent="unpacked")
        client.Remove(key="extract-n")
        client.Remove(key="unpacked")
        self.assert_only(client)

    def archive(self, *entries):
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name, content in entries:
                entry = tarfile.TarInfo(name)
                entry.mtime = 1_000_000_000
                if content is None:
                    entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                elif isinstance(content, tuple):
                    entry.type, entry.linkname = tarfile.LNKTYPE, content[0]
                else:
                    entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content) if isinstance(content, bytes) else None)
        return data.getvalue()

    def test_what_a_layer_removes_and_links_is_below_it(self):
        layout = os.path.join(self.place, "store")
        os.makedirs(layout)
        one, client = self.store(layout)
        low = self.archive(("d", None), ("d/gone", b"gone"), ("d/kept", b"kept"), ("o", None),
                           ("o/below", b"below"), ("file", b"f" * 100_000))
        high = self.archive(("d/.wh.gone", b""), ("o", None), ("o/.wh..wh..opq", b""),
                            ("o/above", b"above"), ("link", ("file",)), ("d/new/deep", b"deep"))
        self.apply(client, "extract-1", self.blob(layout, low), name="low")
        self.apply(client, "extract-2", self.blob(layout, high), "low", "high")
        with self.mounted(client.Prepare(key="c", parent="high")) as root:
            listed = sorted(os.path.relpath(os.path.join(place, name), root)
                            for place, directories, files in os.walk(root)
                            for name in directories + files)
            self.assertEqual(listed, ["d", "d/kept", "d/new", "d/new/deep", "file", "link", "o",
                                      "o/above"])
            self.assertTrue(os.path.samefile(os.path.join(root, "file"),
                                             os.path.join(root, "link")))
            write_file(os.path.join(root, "link"), "changed")
            self.assertEqual(read_text(os.path.join(root, "file")), "changed")
        # A container's change is a layer above them.
        client.Commit(name="changed", key="c")
        with self.mounted(client.View(key="v", parent="changed")) as root:
            self.assertEqual(read_text(os.path.join(root, "link")), "changed")
        # The lowest layer removes what no layer has.
        self.apply(client, "extract-3", self.blob(layout, high), name="alone")
        self.refused(CODES.FAILED_PRECONDITION, client.Mounts, key="alone")
        self.assert_only(client)

    def test_what_it_cannot_do_is_left_to_the_next_differ(self):
        layout = os.path.join(self.place, "store")
        os.makedirs(layout)
        one, client = self.store(layout)
        diff = self.blob(layout, self.archive(("a", b"a")))
        answer = client.Prepare(key="a")
        missing = {**diff, "digest": "sha256:" + "0" * 64}
        encrypted = {**diff, "media_type": TAR + "+gzip+encrypted"}
        elsewhere = [{"type": "bind", "source": "/elsewhere", "options": ["rw"]}]
        for other, mounts in ((missing, answer.mounts), (encrypted, answer.mounts),
                              (diff, elsewhere), (diff, [])):
            self.refused(CODES.UNIMPLEMENTED, client.Apply, diff=other, mounts=mounts)
        self.refused(CODES.INVALID_ARGUMENT, client.Apply,
                     diff={**diff, "digest": "sha256:../../x"}, mounts=answer.mounts)
        self.refused(CODES.INVALID_ARGUMENT, client.Apply, mounts=answer.mounts)
        # A damaged archive leaves nothing, and another one can be applied.
        damaged = self.blob(layout, b"\x1f\x8b" + os.urandom(1000), TAR + "+gzip")
        details = self.refused(CODES.INTERNAL, client.Apply, diff=damaged, mounts=answer.mounts)
        self.assertIn(damaged["digest"].removeprefix("sha256:"), details)
        self.assert_only(client)
        client.Apply(diff=diff, mounts=answer.mounts)
        self.refused(CODES.FAILED_PRECONDITION, client.Apply, diff=diff, mounts=answer.mounts)
        self.refused(CODES.FAILED_PRECONDITION, client.Mounts, key="a")
        client.Commit(name="low", key="a")
        self.refused(CODES.FAILED_PRECONDITION, client.Apply, diff=diff, mounts=answer.mounts)
        # containerd may unpack a layer by itself. What is below it is mounted only then, by the
        # helper.
        need("mount.fuse3")
        for key, parent in (("extract-1", ""), ("extract-2", "low")):
            answer = client.Prepare(key=key, parent=parent)
            kinds = ["fuse3.mount.bcow"] if parent else ["bind"]
            self.assertEqual([mount.type for mount in answer.mounts], kinds)
            with self.mounted(answer) as root:
                write_file(os.path.join(root, "b"), "b")
            self.refused(CODES.UNIMPLEMENTED, client.Apply, diff=diff, mounts=answer.mounts)
            client.Commit(name=key + "-done", key=key)
        with self.mounted(client.View(key="v", parent="extract-2-done")) as root:
            self.assertEqual(sorted(os.listdir(root)), ["a", "b"])
        self.assertEqual(one.end(), 0)
        one.options = ()
        one.start()
        self.refused(CODES.UNIMPLEMENTED, one.client.Apply, diff=diff, mounts=answer.mounts)

    def test_an_applied_layer_outlives_a_crash(self):
        layout = os.path.join(self.place, "store")
        os.makedirs(layout)
        one, client = self.store(layout)
        diff = self.blob(layout, self.archive(("a", b"a")))
        for key in ("a", "b"):
            client.Apply(diff=diff, mounts=client.Prepare(key=key).mounts)
        self.assertEqual(one.end(signal.SIGKILL), -9)
        # Also of a process without the option.
        one.options = ()
        one.start()
        one.client.Remove(key="b")
        one.client.Commit(name="low", key="a")
        with self.mounted(one.client.View(key="v", parent="low")) as root:
            self.assertEqual(read_bytes(os.path.join(root, "a")), b"a")
        self.assert_only(one.client)

    def test_a_missing_store_is_named(self):
        missing = os.path.join(self.place, "none")
        with self.assertRaisesRegex(AssertionError, f"cannot open {missing}: No such file"):
            self.start("--content-store", missing)


class WithContainerd2(WithContainerd):
    """containerd 2.x, configured as contrib/containerd/config-v3.toml is."""

    def setUp(self):
        need(*ENGINE)
        if not has_containerd_2():
            # containerd 1.6 has no proxies of the type "diff".
            self.skipTest("containerd 2.x is not in PATH")
        super().setUp()
        store = os.path.join(self.place, "lib/io.containerd.content.v1.content")
        os.makedirs(store)
        self.snapshotter = self.start("--content-store", store)
        config = CONFIG.format(place=self.place)
        unpack = 'snapshotter = "bcow"\n'
        self.assertIn(unpack, config)
        config = config.replace(unpack, unpack + 'differ = "bcow-diff"\n')
        first = '[[plugins."io.containerd.transfer.v1.local"'
        self.assertIn(first, config)
        config = config.replace(first, first[1:] + "]\nmax_concurrent_unpacks = 3\n" + first)
        config = config.replace('[proxy_plugins.bcow]', "[proxy_plugins.bcow-diff]\n"
                                f'type = "diff"\naddress = "{self.place}/sock"\n'
                                '[proxy_plugins.bcow]\ncapabilities = ["rebase"]')
        write_file(os.path.join(self.place, "config.toml"), config)
        self.addCleanup(self.stop_all)
        self.start_containerd()

    def import_image(self, name):
        """Imports the small or the real image as bcow.test/NAME:1."""
        archive = self.path(f"{name}.tar")
        layout, tag = support.image(name)
        skopeo_copy(f"oci:{layout}:{tag}", f"docker-archive:{archive}:bcow.test/{name}:1")
        self.ctr("images", "import", "--snapshotter", "bcow", archive)
        os.unlink(archive)


class Imports(Kills, WithContainerd2):
    def test_containers_outlive_kills(self):
        self.import_image("small")
        self.assert_containers_outlive_kills(["bcow.test/small:1"])

    def test_an_imported_image_is_not_unpacked(self):
        self.import_image("small")
        client = self.snapshotter.client
        committed = client.List()
        [top] = {info.name for info in committed} - {info.parent for info in committed}
        self.assert_is_the_image(client, top)
        applied = self.snapshotter.output()
        self.assertNotIn("unpacked", applied)
        done = self.ctr("run", "--rm", "--snapshotter", "bcow", "bcow.test/small:1", "one",
                        "/bin/sh", "-ec", "python3 -c 'print(6 * 7)'; echo 1 >/written")
        self.assertEqual(done.out, b"42\n")
        self.ctr("images", "rm", "--sync", "bcow.test/small:1")
        support.until(lambda: not client.List(), "the layers are collected")
        self.assert_only(client)


if __name__ == "__main__":
    unittest.main()
