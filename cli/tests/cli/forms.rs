//! Images in BCoW form made into others: `bcow convert` of what it wrote, and what DST may be.

use std::fs;

use crate::support::{Sandbox, Tar, noise, sample, words};

/// `image.bcow` as `convert` makes it by default, of a tree with content of several megabytes.
fn image() -> Sandbox {
    let sandbox = Sandbox::new();
    let mut archive = Tar::new().directory("./").directory("many/");
    for number in 0..40usize {
        let content = noise(number * 977);
        archive = archive.file(&format!("many/{number}"), &content);
    }
    let archive = archive
        .file("large", &noise(5_000_000))
        .file("text", "the same line\n".repeat(100_000).as_bytes())
        .hardlink("again", "text");
    sandbox.write("tree.tar", &archive.finish());
    sandbox.ok(&["convert", "tar:tree.tar", "image.bcow"]);
    sandbox
}

fn assert_same_tree(sandbox: &Sandbox, one: &str, other: &str) {
    assert_eq!(sandbox.ok(&["diff", one, other]), b"", "{one} {other}");
}

#[test]
fn image_stored_another_way_and_back_is_the_same_file() {
    let sandbox = image();
    let original = sandbox.read("image.bcow");
    for options in [
        &["--plain"][..],
        &["--plain", "--block-size=4K"],
        &["--compress=none"],
        &["--compress=zstd:1", "--block-size=4K"],
        &["--compress=zstd:19", "--block-size=1M"],
        &["--block-size=4M", "-j1"],
    ] {
        sandbox.ok(&[&["convert"], options, &["image.bcow", "other.bcow"]].concat());
        assert_ne!(sandbox.read("other.bcow"), original, "{options:?}");
        assert_same_tree(&sandbox, "image.bcow", "other.bcow");
        sandbox.ok(&["fsck", "--data", "other.bcow"]);
        sandbox.ok(&["convert", "other.bcow", "back.bcow"]);
        assert_eq!(sandbox.read("back.bcow"), original, "{options:?}");
    }
    // By any name.
    for name in ["bcow:image.bcow", "./image.bcow"] {
        sandbox.ok(&["convert", name, "bcow:a:b.tar"]);
        assert_eq!(sandbox.read("a:b.tar"), original);
    }
    sandbox.ok(&["convert", "./a:b.tar", "back.bcow"]);
    assert_eq!(sandbox.read("back.bcow"), original);
}

#[test]
fn plain_image_made_compressed_and_back_is_the_same_file() {
    let sandbox = image();
    sandbox.ok(&["convert", "--plain", "tar:tree.tar", "plain.bcow"]);
    for options in [&[][..], &["--block-size=64K"], &["--compress=none"]] {
        sandbox.ok(&[&["convert"], options, &["plain.bcow", "other.bcow"]].concat());
        assert_same_tree(&sandbox, "image.bcow", "other.bcow");
        sandbox.ok(&["convert", "--plain", "other.bcow", "back.bcow"]);
        assert_eq!(sandbox.read("back.bcow"), sandbox.read("plain.bcow"));
    }
}

#[test]
fn small_image_stored_another_way_is_the_same_tree() {
    // Its metadata begins in the first region, in which there is one block size.
    let sandbox = Sandbox::with_image();
    for options in [&[][..], &["--plain"], &["--block-size=4M"]] {
        sandbox.ok(&[&["convert"], options, &["image.bcow", "other.bcow"]].concat());
        assert_same_tree(&sandbox, "image.bcow", "other.bcow");
        sandbox.ok(&["fsck", "--data", "other.bcow"]);
    }
}

#[test]
fn image_over_other_files_becomes_one_file_without_hidden_content() {
    let sandbox = image();
    sandbox.write(
        "over.tar",
        &Tar::new()
            .file("large", b"small now")
            .file("new", b"new")
            .finish(),
    );
    sandbox.layout("src", "x", &["tree.tar", "over.tar"]);
    sandbox.ok(&["convert", "oci:src:x", "oci:store:x"]);
    sandbox.ok(&["convert", "oci:src:x", "direct.bcow"]);
    let inspected = |image: &str| sandbox.json(&["inspect", "--json", image]);
    for options in [&[][..], &["--plain"]] {
        sandbox.ok(&[&["convert"], options, &["oci:store:x", "flat.bcow"]].concat());
        assert_same_tree(&sandbox, "direct.bcow", "flat.bcow");
        sandbox.ok(&["fsck", "--data", "flat.bcow"]);
        // The five megabytes that the upper layer hides are not in it.
        assert!(sandbox.read("flat.bcow").len() < 4 << 20);
        assert_eq!(
            inspected("flat.bcow")["format"]["features"]
                .to_string()
                .find("windows"),
            None
        );
    }
    fs::create_dir(sandbox.path("upper")).unwrap();
    sandbox.write("upper/newest", b"newest");
    let commit = ["commit", "image.bcow", "--upper=upper"];
    sandbox.ok(&[&commit[..], &["--merge", "merged.bcow"]].concat());
    sandbox.ok(&[&commit[..], &["layer.bcow"]].concat());
    sandbox.ok(&["convert", "merged.bcow", "alone.bcow"]);
    sandbox.ok(&["convert", "layer.bcow", "layer-alone.bcow"]);
    let shown = sandbox.ok(&["ls", "-R", "image.bcow", "--layer=layer-alone.bcow"]);
    assert_eq!(sandbox.ok(&["ls", "-R", "merged.bcow"]), shown);
    fs::rename(sandbox.path("image.bcow"), sandbox.path("away.bcow")).unwrap();
    assert_eq!(sandbox.ok(&["cat", "alone.bcow", "/newest"]), b"newest");
    assert_eq!(
        sandbox.ok(&["cat", "alone.bcow", "/large"]),
        noise(5_000_000)
    );
}

#[test]
fn images_become_layers_and_layers_images() {
    let sandbox = image();
    let over = Tar::new().file("new", b"new").file("many/.wh.7", b"");
    sandbox.write("over.tar", &over.finish());
    sandbox.layout("src", "x", &["tree.tar", "over.tar"]);
    sandbox.ok(&["convert", "oci:src:x", "direct.bcow"]);
    sandbox.ok(&["convert", "oci:src:x", "oci:store:x"]);
    sandbox.ok(&["convert", "direct.bcow", "oci:again:flat"]);
    assert_same_tree(&sandbox, "direct.bcow", "oci:again:flat");
    // A stack stays one, layer by layer.
    sandbox.ok(&["convert", "--plain", "oci:store:x", "oci:again:plain"]);
    assert_same_tree(&sandbox, "direct.bcow", "oci:again:plain");
    let text = sandbox.shown(&["inspect", "oci:again:plain"]);
    assert!(text.matches("sha256:").count() > 2, "{text}");
    assert!(text.contains("2 layers"), "{text}");
    for image in ["oci:again:flat", "oci:again:plain"] {
        sandbox.ok(&["fsck", "--data", image]);
        sandbox.ok(&["convert", image, "back.bcow"]);
        assert_same_tree(&sandbox, "direct.bcow", "back.bcow");
    }
    for command in [
        &["convert", "oci:store:x", "oci:store:x"][..],
        &["export", "oci:store:x", "--to", "oci:store:x"],
    ] {
        let text = sandbox.shown(command);
        assert!(
            text.contains("would take the name of the one that it is made of"),
            "{text}"
        );
    }
    // The same with any number of threads, and from the cache.
    for (name, options) in [("one", &["-j1"][..]), ("four", &["-j4", "--cache=cache"])] {
        let to = format!("oci-archive:{name}.tar:x");
        fs::create_dir_all(sandbox.path("cache")).unwrap();
        sandbox.ok(&[&["convert"], options, &["oci:store:x", &to]].concat());
    }
    assert_eq!(sandbox.read("one.tar"), sandbox.read("four.tar"));
}

#[test]
fn a_name_that_promises_another_form_is_not_written_as_a_bcow_file() {
    let sandbox = Sandbox::new();
    sandbox.ok(&["create", "-s", "1M", "base.bcow"]);
    sandbox.ok(&["create", "-b", "base.bcow", "disk.bcow"]);
    sandbox.ok(&["seal", "base.bcow", "-o", "sealed.bcow"]);
    let before = sandbox.names();
    let refused = |args: &[&str], name: &str| {
        let shown = sandbox.shown(args);
        assert!(shown.contains(name), "{shown}");
        assert!(
            shown.contains(&format!("bcow:{name} is a BCoW file")),
            "{shown}"
        );
        assert!(shown.ends_with("--- exit status 2\n"), "{shown}");
        assert_eq!(sandbox.names(), before, "{shown}");
    };
    for ending in [
        "erofs", "vhd", "vhdx", "vmdk", "vdi", "qed", "qcow", "squashfs", "sqsh", "sif", "iso",
        "ext4", "tar", "tar.gz", "tgz", "tar.xz", "zip", "VMDK",
    ] {
        let name = format!("new.{ending}");
        refused(&["convert", "disk.bcow", &name], &name);
        refused(&["copy", "disk.bcow", &name], &name);
        refused(&["commit", "disk.bcow", &name], &name);
        refused(&["create", "-s", "1M", &name], &name);
        refused(&["seal", "disk.bcow", "-o", &name], &name);
        refused(&["compact", "disk.bcow", "-o", &name], &name);
    }
    for name in ["new.raw", "new.img", "new.qcow2"] {
        refused(&["create", "-s", "1M", name], name);
        refused(&["seal", "disk.bcow", "-o", name], name);
        refused(&["compact", "disk.bcow", "-o", name], name);
        for (command, source) in [("commit", "disk.bcow"), ("copy", "sealed.bcow")] {
            let shown = sandbox.shown(&[command, source, name]);
            let refused =
                format!("invalid destination \"{name}\": `bcow {command}` cannot write to");
            assert!(shown.contains(&refused), "{shown}");
            assert_eq!(sandbox.names(), before, "{shown}");
        }
    }
    sandbox.ok(&["create", "-s", "1M", "bcow:new.raw"]);
    sandbox.ok(&["fsck", "new.raw"]);
}

#[test]
fn disk_is_converted_without_a_transport() {
    let sandbox = Sandbox::new();
    sandbox.write("disk.img", &noise(1 << 20));
    sandbox.ok(&["convert", "raw:disk.img", "base.bcow"]);
    sandbox.ok(&["create", "-b", "base.bcow", "top.bcow"]);
    sandbox.ok(&["convert", "top.bcow", "sealed.bcow"]);
    sandbox.ok(&["convert", "sealed.bcow", "raw:out.img"]);
    assert_eq!(sandbox.read("out.img"), sandbox.read("disk.img"));
    sandbox.ok(&["convert", "--writable", "sealed.bcow", "again.bcow"]);
    sandbox.ok(&["diff", "again.bcow", "top.bcow"]);
    // A file called so is one.
    for name in ["out.qcow2", "OUT.QCOW2"] {
        sandbox.ok(&["convert", "top.bcow", name]);
        assert!(sandbox.read(name).starts_with(b"QFI\xfb"));
    }
    for name in ["copy.img", "copy.raw"] {
        sandbox.ok(&["convert", "top.bcow", name]);
        assert_eq!(sandbox.read(name), sandbox.read("disk.img"));
    }
    sandbox.ok(&["convert", "top.bcow", "bcow:bcow.raw"]);
    sandbox.ok(&["fsck", "bcow.raw"]);
    let text = sandbox.shown(&["convert", "top.bcow", "oci:layout:x"]);
    assert!(
        text.contains("oci:layout:x takes images, not disks"),
        "{text}"
    );
    for (command, hint) in [
        (&["convert", "raw:-", "x.bcow"], "store it in a file first"),
        (
            &["convert", "top.bcow", "raw:-"],
            "writes to standard output",
        ),
    ] {
        let text = sandbox.shown(command);
        assert!(text.contains(hint), "{text}");
    }
}

#[test]
fn destinations_that_are_not_written_are_refused_and_nothing_is_made() {
    let sandbox = Sandbox::new();
    sandbox.write("a.tar", &sample());
    sandbox.ok(&["convert", "tar:a.tar", "a.bcow"]);
    fs::create_dir(sandbox.path("upper")).unwrap();
    let before = sandbox.names();
    for destination in [
        "docker-archive:out.tar",
        "docker-archive:out.tar:x",
        "docker-daemon:x:y",
        "containers-storage:x",
        "docker:host/x",
        "dir:out",
        "nothing:out",
        "out.tar",
        "out.tar.gz",
    ] {
        for command in [
            &["convert", "tar:a.tar", destination][..],
            &["convert", "a.bcow", destination],
            &["commit", "a.bcow", "--upper=upper", destination],
        ] {
            let text = sandbox.shown(command);
            assert!(text.contains("invalid destination"), "{text}");
            assert!(text.contains("hint: "), "{text}");
            assert!(text.ends_with("--- exit status 2\n"), "{text}");
        }
    }
    for command in [
        &["convert", "tar:a.tar", "tar:out.tar"][..],
        &["commit", "a.bcow", "--upper=upper", "raw:out"],
        &["export", "a.bcow", "--to", "docker-archive:out"],
        &["export", "a.bcow", "--to", "tar:out"],
        &["export", "a.bcow", "--to", "raw:out"],
        &["export", "a.bcow", "--to", "zip"],
        &["convert", "a.bcow", "oci-archive:"],
        &["convert", "a.bcow", "oci-archive:x:"],
    ] {
        let text = sandbox.shown(command);
        assert!(text.ends_with("--- exit status 2\n"), "{text}");
    }
    let text = sandbox.shown(&["convert", "a.bcow", "a.bcow"]);
    assert!(text.contains("a.bcow is made of it"), "{text}");
    let text = sandbox.shown(&["convert", "--platform=linux/arm64", "a.bcow", "b.bcow"]);
    assert!(text.ends_with("--- exit status 2\n"), "{text}");
    assert_eq!(sandbox.names(), before);
}

#[test]
fn options_for_another_destination_of_commit_are_refused() {
    let sandbox = Sandbox::new();
    sandbox.write("a.tar", &sample());
    sandbox.ok(&["convert", "tar:a.tar", "a.bcow"]);
    sandbox.ok(&["create", "-s", "1M", "base.bcow"]);
    sandbox.ok(&["create", "-b", "base.bcow", "disk.bcow"]);
    sandbox.ok(&["seal", "base.bcow", "-o", "sealed.bcow"]);
    let before = sandbox.names();
    let upper = ["commit", "a.bcow", "--upper=upper"];
    for (new, option) in [
        ("oci:new", "--compress=zstd:9"),
        ("oci:new", "--block-size=64K"),
        ("tar:new.tar", "--no-verify"),
        ("tar:new.tar", "--layer-compress=none"),
        ("new.bcow", "--layer-compress=none"),
    ] {
        let text = sandbox.shown(&[&upper[..], &[new, option]].concat());
        let name = option.split('=').next().unwrap();
        assert!(text.contains(&format!("error: {name} is for ")), "{text}");
        assert!(text.ends_with("--- exit status 2\n"), "{text}");
    }
    for option in [
        "--compress=none",
        "--block-size=auto",
        "--jobs=2",
        "--no-verify",
    ] {
        let text = sandbox.shown(&["commit", "disk.bcow", option]);
        assert!(text.contains(" is for NEW"), "{text}");
    }
    assert_eq!(sandbox.names(), before);
}

#[test]
fn oci_archive_has_the_content_of_the_layout() {
    let sandbox = Sandbox::new();
    sandbox.write("a.tar", &sample());
    sandbox.ok(&["convert", "tar:a.tar", "a.bcow"]);
    fs::create_dir(sandbox.path("upper")).unwrap();
    sandbox.write("upper/new", b"new");
    // An ordinary image, as `export` and `commit` write it.
    sandbox.ok(&["export", "a.bcow", "--to", "oci-archive:out.tar:v1"]);
    let archive = sandbox.read("out.tar");
    sandbox.ok(&["export", "a.bcow", "-j1", "--to", "oci-archive:out.tar:v1"]);
    assert_eq!(sandbox.read("out.tar"), archive);
    sandbox.ok(&["convert", "oci-archive:out.tar:v1", "back.bcow"]);
    assert_same_tree(&sandbox, "a.bcow", "back.bcow");
    // `convert` writes a BCoW image into the archive, and no file of that name.
    sandbox.ok(&["convert", "tar:a.tar", "oci-archive:made.tar"]);
    assert!(sandbox.names().contains(&"made.tar".to_owned()));
    assert!(!sandbox.path("oci-archive:made.tar").exists());
    let refused = sandbox.shown(&["convert", "oci-archive:made.tar", "made.bcow"]);
    assert!(refused.contains("with `bcow copy` first"), "{refused}");
    sandbox.ok(&["copy", "oci-archive:made.tar", "oci:made:x"]);
    assert_same_tree(&sandbox, "a.bcow", "oci:made:x");
    sandbox.ok(&["commit", "a.bcow", "--upper=upper", "oci-archive:new.tar"]);
    sandbox.ok(&["convert", "oci-archive:new.tar", "new.bcow"]);
    assert_eq!(sandbox.ok(&["cat", "new.bcow", "/new"]), b"new");
    // One in BCoW form, of layers. In a directory that is a layout, its blobs are not taken for the
    // archive's.
    sandbox.ok(&["convert", "oci-archive:out.tar:v1", "oci:layout:x"]);
    sandbox.ok(&words(
        "convert oci-archive:out.tar:v1 oci-archive:layout/bcow.tar:x",
    ));
    let text = sandbox.ok(&["export", "oci:layout:x", "--to=oci:plain:x"]);
    assert_eq!(text, b"");
    let members = sandbox.read("layout/bcow.tar").len();
    assert!(members > 10_000, "{members} bytes");
    let mut names = sandbox.names();
    names.retain(|name| name.starts_with('.'));
    assert!(names.is_empty(), "{names:?}");
}
