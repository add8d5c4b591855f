//! What `bcow commit` made over an image: it finds the image again, beside itself, and nothing else
//! in its place.

use std::fs;
use std::os::unix::fs::symlink;

use crate::support::{Entry, Sandbox, Tar, noise, words};

/// An image, `merged.bcow` and `layer.bcow` of changes over it, and `flat.bcow` that shows the same
/// as the first.
fn committed() -> Sandbox {
    let sandbox = Sandbox::new();
    let archive = Tar::new()
        .directory("./")
        .directory("etc/")
        .file("etc/motd", b"Welcome.\n")
        .file("etc/gone", b"gone\n")
        .file("large", &noise(300_000));
    sandbox.write("base.tar", &archive.finish());
    sandbox.ok(&["convert", "tar:base.tar", "base.bcow"]);
    fs::create_dir_all(sandbox.path("upper/etc")).unwrap();
    sandbox.write("upper/etc/new", b"new\n");
    for (name, form) in [
        ("merged.bcow", &["--merge"][..]),
        ("layer.bcow", &[]),
        ("flat.bcow", &["--flatten"]),
    ] {
        let command = ["commit", "base.bcow", "--upper=upper", name];
        sandbox.ok(&[&command[..], form].concat());
    }
    sandbox
}

/// The largest file of the image below, through the image over it.
fn shown(sandbox: &Sandbox, image: &str) -> Vec<u8> {
    sandbox.ok(&["cat", image, "/large"])
}

#[test]
fn image_over_another_opens_beside_it() {
    let sandbox = committed();
    assert_eq!(shown(&sandbox, "merged.bcow"), noise(300_000));
    assert_eq!(sandbox.ok(&["cat", "merged.bcow", "/etc/new"]), b"new\n");
    assert_eq!(sandbox.ok(&["diff", "merged.bcow", "flat.bcow"]), b"");
    sandbox.ok(&["ls", "-R", "merged.bcow"]);
    sandbox.ok(&["fsck", "--data", "merged.bcow"]);
    let archive = |image| sandbox.ok(&["export", image, "--to=tar", "-o", "-"]);
    assert_eq!(archive("merged.bcow"), archive("flat.bcow"));
    for image in ["merged.bcow", "layer.bcow"] {
        sandbox.ok(&["export", image, "--to", "oci:out"]);
        sandbox.ok(&["inspect", image]);
        sandbox.ok(&["map", image]);
    }
    sandbox.ok(&["extract", "merged.bcow", "tree"]);
    assert_eq!(sandbox.read("tree/large"), noise(300_000));
    // Wherever the command is run.
    let image = sandbox.path("merged.bcow");
    let elsewhere = Sandbox::new();
    let out = elsewhere.ok(&["cat".as_ref(), image.as_os_str(), "/large".as_ref()]);
    assert_eq!(out, noise(300_000));
    // An image over an image over an image, and a disk over that.
    sandbox.ok(&words(
        "commit merged.bcow --upper=upper --merge third.bcow",
    ));
    fs::remove_dir_all(sandbox.path("upper/.bcow")).ok();
    assert_eq!(shown(&sandbox, "third.bcow"), noise(300_000));
    sandbox.ok(&["create", "-b", "third.bcow", "disk.bcow"]);
    assert_eq!(shown(&sandbox, "disk.bcow"), noise(300_000));
}

#[test]
fn image_over_another_opens_where_both_were_moved() {
    let sandbox = committed();
    fs::create_dir(sandbox.path("moved")).unwrap();
    for name in ["base.bcow", "merged.bcow"] {
        fs::rename(sandbox.path(name), sandbox.path("moved").join(name)).unwrap();
    }
    assert_eq!(shown(&sandbox, "moved/merged.bcow"), noise(300_000));
    // A link to it leads to its directory.
    symlink("moved/merged.bcow", sandbox.path("link.bcow")).unwrap();
    assert_eq!(shown(&sandbox, "link.bcow"), noise(300_000));
    // One in another directory is found only if that is named.
    fs::rename(
        sandbox.path("moved/merged.bcow"),
        sandbox.path("merged.bcow"),
    )
    .unwrap();
    for option in ["--store=moved", "--backing-dir=moved"] {
        let out = sandbox.ok(&["cat", option, "merged.bcow", "/large"]);
        assert_eq!(out, noise(300_000));
    }
}

#[test]
fn missing_image_below_is_named_with_where_it_was_looked_for() {
    let sandbox = committed();
    fs::rename(sandbox.path("base.bcow"), sandbox.path("renamed.bcow")).unwrap();
    fs::create_dir(sandbox.path("store")).unwrap();
    let text = sandbox.shown(&["cat", "--store=store", "merged.bcow", "/large"]);
    let directory = sandbox.path("").canonicalize().unwrap();
    let place = format!("is missing; searched in store, {}", directory.display());
    assert!(text.contains("backing \"base.bcow\" (sha256:"), "{text}");
    assert!(text.contains(&place), "{text}");
    assert!(text.contains("--store"), "{text}");
    assert!(text.ends_with("--- exit status 1\n"), "{text}");
    // Commands that do not need it go on.
    sandbox.ok(&["ls", "merged.bcow", "/etc"]);
    assert!(
        sandbox
            .shown(&["fsck", "merged.bcow"])
            .contains("backing-missing")
    );
}

#[test]
fn only_the_image_itself_is_taken_for_the_image_below() {
    let sandbox = committed();
    fs::rename(sandbox.path("base.bcow"), sandbox.path("true.bcow")).unwrap();
    let refused = |why: &str| {
        let text = sandbox.shown(&["cat", "merged.bcow", "/large"]);
        assert!(text.contains(why), "{text}");
        assert!(text.ends_with("--- exit status 1\n"), "{text}");
        fs::remove_file(sandbox.path("base.bcow"))
            .or_else(|_| fs::remove_dir(sandbox.path("base.bcow")))
            .unwrap();
    };
    // Another image, a disk, no image, and what is no file.
    fs::copy(sandbox.path("flat.bcow"), sandbox.path("base.bcow")).unwrap();
    refused("is not backing \"base.bcow\"");
    sandbox.ok(&["create", "-s", "1M", "base.bcow"]);
    refused("is not backing \"base.bcow\"");
    sandbox.write("base.bcow", b"text");
    refused("cannot open backing \"base.bcow\"");
    fs::create_dir(sandbox.path("base.bcow")).unwrap();
    refused("it is a directory");
    // A link may lead anywhere, and is not followed.
    symlink("true.bcow", sandbox.path("base.bcow")).unwrap();
    refused("it is a symbolic link");
    fs::rename(sandbox.path("true.bcow"), sandbox.path("base.bcow")).unwrap();
    assert_eq!(shown(&sandbox, "merged.bcow"), noise(300_000));
}

#[test]
fn commit_warns_if_the_image_below_is_in_another_directory() {
    let sandbox = committed();
    fs::create_dir(sandbox.path("other")).unwrap();
    let commit =
        |new: &str| sandbox.shown(&["commit", "base.bcow", "--upper=upper", "--merge", new]);
    let text = commit("other/merged.bcow");
    assert!(
        text.contains("warning: other/merged.bcow needs base.bcow"),
        "{text}"
    );
    assert!(!commit("again.bcow").contains("warning"), "{text}");
    // Nothing else changes in the file, so that names make no difference but for their own.
    assert_eq!(
        sandbox.read("again.bcow"),
        sandbox.read("other/merged.bcow")
    );
}

/// Layers over `base.bcow`: `one.bcow` over it, `two.bcow` over both; `whole.bcow` shows what all
/// three show.
fn layered() -> Sandbox {
    let sandbox = committed();
    sandbox.ok(&["commit", "base.bcow", "--upper=upper", "one.bcow"]);
    fs::create_dir_all(sandbox.path("second/etc")).unwrap();
    sandbox.write("second/etc/motd", b"Changed.\n");
    sandbox.write("second/etc/newer", b"newer\n");
    let second = ["commit", "base.bcow", "--layer=one.bcow", "--upper=second"];
    sandbox.ok(&[&second[..], &["two.bcow"]].concat());
    sandbox.ok(&[&second[..], &["--flatten", "whole.bcow"]].concat());
    sandbox.ok(&[&second[..], &["--merge", "both.bcow"]].concat());
    sandbox
}

#[test]
fn device_that_looks_like_a_whiteout_is_kept() {
    let sandbox = Sandbox::new();
    let device = Entry {
        name: b"dev",
        kind: b'3',
        ..Entry::default()
    };
    sandbox.write("base.tar", &Tar::new().file("a", b"a").add(device).finish());
    sandbox.ok(&["convert", "tar:base.tar", "base.bcow"]);
    fs::create_dir(sandbox.path("upper")).unwrap();
    sandbox.write("upper/b", b"b");
    let commit = ["commit", "base.bcow", "--upper=upper"];
    sandbox.ok(&[&commit[..], &["--merge", "merged.bcow"]].concat());
    sandbox.ok(&[&commit[..], &["--flatten", "flat.bcow"]].concat());
    sandbox.ok(&[&commit[..], &["layer.bcow"]].concat());
    sandbox.ok(&["convert", "merged.bcow", "again.bcow"]);
    // As layers of an image, the device is the lowest one's.
    sandbox.ok(&[&commit[..], &["oci:new:x"]].concat());
    sandbox.ok(&["convert", "oci:new:x", "layers.bcow"]);
    for image in [
        &["layers.bcow"][..],
        &["merged.bcow"],
        &["flat.bcow"],
        &["again.bcow"],
        &["base.bcow", "--layer=layer.bcow"],
    ] {
        assert_eq!(sandbox.ok(&[&["ls"], image].concat()), b"a\nb\ndev\n");
    }
}

#[test]
fn layers_are_shown_on_top_of_their_image() {
    let sandbox = layered();
    let stack = ["base.bcow", "--layer=one.bcow", "--layer=two.bcow"];
    let shown = |command: &[&str], rest: &[&str]| sandbox.ok(&[command, &stack, rest].concat());
    assert_eq!(shown(&["cat"], &["/etc/new"]), b"new\n");
    assert_eq!(
        shown(&["cat"], &["/etc/motd", "/etc/newer"]),
        b"Changed.\nnewer\n"
    );
    assert_eq!(shown(&["cat"], &["/large"]), noise(300_000));
    let archive = sandbox.ok(&["export", "whole.bcow", "--to=tar", "-o", "-"]);
    assert_eq!(shown(&["export", "--to=tar", "-o", "-"], &[]), archive);
    assert_eq!(
        sandbox.ok(&["ls", "-R", "whole.bcow"]),
        shown(&["ls", "-R"], &[])
    );
    shown(&["extract"], &["tree"]);
    assert_eq!(sandbox.read("tree/etc/new"), b"new\n");
    // What was merged with layers below it finds them all.
    assert_eq!(sandbox.ok(&["diff", "both.bcow", "whole.bcow"]), b"");
    sandbox.ok(&["fsck", "--data", "both.bcow"]);
    // The layers need no place of their own: those below are given.
    fs::create_dir(sandbox.path("away")).unwrap();
    fs::rename(sandbox.path("two.bcow"), sandbox.path("away/two.bcow")).unwrap();
    fs::rename(sandbox.path("base.bcow"), sandbox.path("renamed.bcow")).unwrap();
    let moved = words("cat renamed.bcow --layer=one.bcow --layer=away/two.bcow");
    assert_eq!(
        sandbox.ok(&[&moved[..], &["/large"]].concat()),
        noise(300_000)
    );
}

#[test]
fn other_images_are_refused_as_layers() {
    let sandbox = layered();
    let refused = |args: &[&str], why: &str| {
        let text = sandbox.shown(&[&["cat"], args, &["/etc/new"]].concat());
        assert!(text.contains(why), "{text}");
        assert!(text.contains("hint: "), "{text}");
        assert!(text.ends_with("--- exit status 1\n"), "{text}");
    };
    let over_another = "it was made over another image";
    refused(&["flat.bcow", "--layer=one.bcow"], over_another);
    refused(&["base.bcow", "--layer=two.bcow"], over_another);
    refused(
        &["base.bcow", "--layer=two.bcow", "--layer=one.bcow"],
        over_another,
    );
    refused(
        &["base.bcow", "--layer=flat.bcow"],
        "a complete image, not a layer",
    );
    sandbox.ok(&["create", "-s", "1M", "disk.bcow"]);
    refused(
        &["base.bcow", "--layer=disk.bcow"],
        "a complete image, not a layer",
    );
}

#[test]
fn layers_are_written_as_oci_layers_and_archives() {
    let sandbox = layered();
    // The changes over an image and its layer, as one more layer.
    let changes = ["commit", "base.bcow", "--layer=one.bcow", "--upper=second"];
    let direct = sandbox.ok(&[&changes[..], &["tar:-"]].concat());
    let layer = sandbox.ok(&["export", "two.bcow", "--to=tar", "-o", "-"]);
    assert_eq!(direct, layer);
    sandbox.ok(&words("export base.bcow --layer=one.bcow --to oci:out:x"));
    sandbox.ok(&["convert", "oci:out:x", "back.bcow"]);
    assert_eq!(sandbox.ok(&["diff", "back.bcow", "merged.bcow"]), b"");
}

#[test]
fn image_with_unreadable_metadata_is_not_joined() {
    let sandbox = layered();
    let name = "base.bcow";
    sandbox.ok(&["ls", name, "--layer=one.bcow"]);
    let at = u64::from_le_bytes(sandbox.read(name)[88..96].try_into().unwrap());
    sandbox.patch(name, |file| file[at as usize] ^= 0x40);
    // The metadata says whether the image is a layer, whose whiteouts are not files.
    let text = sandbox.shown(&["ls", name, "--layer=one.bcow"]);
    assert!(text.contains("cannot read base.bcow"), "{text}");
    assert!(text.ends_with("--- exit status 1\n"), "{text}");
    sandbox.ok(&["ls", name]);
}

#[test]
fn sizes_of_what_an_upper_stores_are_listed_the_largest_first() {
    let sandbox = committed();
    sandbox.write("upper/etc/log", &noise(70_000));
    fs::hard_link(
        sandbox.path("upper/etc/log"),
        sandbox.path("upper/etc/name"),
    )
    .unwrap();
    symlink("new", sandbox.path("upper/etc/link")).unwrap();
    let command = ["diff", "base.bcow", "--upper=upper", "--stat"];
    let output = sandbox.run(&command);
    let text = String::from_utf8(output.stdout).unwrap();
    let sizes = "  68.4 KiB\t\tall\n  68.4 KiB\tA\t/etc/log\n       4 B\tA\t/etc/new\n";
    assert_eq!(text, sizes);
    let output = sandbox.run(&[&command[..], &["--json"]].concat());
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let entries = document["entries"].as_array().unwrap();
    let stored = |path: &str| {
        let entry = entries.iter().find(|entry| entry["path"] == path);
        entry.unwrap()["stored_bytes"].as_u64()
    };
    assert_eq!(stored("/etc/log"), Some(70_000));
    assert_eq!(stored("/etc/name"), Some(0));
    assert_eq!(stored("/etc/link"), Some(0));
}
