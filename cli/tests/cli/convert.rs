//! What `bcow convert` takes, and what it replaces.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::support::{Sandbox, Tar, missing, sample, words};

/// Fails with a message that has each of these words; the files in the directory are what they
/// were.
fn refused(sandbox: &Sandbox, input: &str, args: &[&str], words: &[&str]) {
    let before: Vec<_> = sandbox
        .names()
        .into_iter()
        .map(|n| (sandbox.read(&n), n))
        .collect();
    let input = File::open(sandbox.path(input)).unwrap();
    let output = sandbox.command(args).stdin(input).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{args:?} succeeded");
    for word in words {
        assert!(text.contains(word), "{args:?}: no {word:?} in {text}");
    }
    let after: Vec<_> = sandbox
        .names()
        .into_iter()
        .map(|n| (sandbox.read(&n), n))
        .collect();
    assert!(before == after, "{args:?} changed a file");
}

#[test]
fn an_archive_that_is_not_whole_replaces_no_image() {
    let sandbox = Sandbox::with_image();
    let whole = sample();
    let entries = whole.len() - 1024;
    sandbox.write("empty", b"");
    sandbox.write("cut.tar", &whole[..entries]);
    let convert = ["convert", "tar:-", "image.bcow"];
    // `(exit 1) | bcow convert tar:- image.bcow`
    refused(
        &sandbox,
        "empty",
        &convert,
        &["standard input", "the archive is empty"],
    );
    refused(
        &sandbox,
        "cut.tar",
        &convert,
        &["no end-of-archive marker", "--allow-truncated"],
    );
    let allow = ["convert", "--allow-truncated", "tar:-", "image.bcow"];
    refused(&sandbox, "empty", &allow, &["the archive is empty"]);
    let warned = sandbox.run(&["convert", "--allow-truncated", "tar:cut.tar", "cut.bcow"]);
    assert!(warned.status.success());
    let text = String::from_utf8_lossy(&warned.stderr);
    assert!(
        text.starts_with("warning: cut.tar: no end-of-archive marker"),
        "{text}"
    );
    assert_eq!(
        sandbox
            .run(&["diff", "image.bcow", "cut.bcow"])
            .status
            .code(),
        Some(0)
    );
}

#[test]
fn an_image_replaces_an_image_and_who_has_the_old_one_open_keeps_it() {
    let sandbox = Sandbox::with_image();
    let old = sandbox.read("image.bcow");
    let mut open = File::open(sandbox.path("image.bcow")).unwrap();
    sandbox.write("empty.tar", &[0; 1024]);
    sandbox.ok(&["convert", "empty.tar", "image.bcow"]);
    assert!(sandbox.read("image.bcow") != old);
    let mut still = Vec::new();
    open.read_to_end(&mut still).unwrap();
    assert!(still == old);
    // What mktemp makes is there to be replaced.
    sandbox.write("temporary", b"");
    sandbox.ok(&["convert", "empty.tar", "temporary"]);
}

#[test]
fn files_that_may_be_the_only_copy_are_replaced_by_force_only() {
    let sandbox = Sandbox::with_image();
    sandbox.write("disk.raw", &[7; 8192]);
    sandbox.ok(&["convert", "raw:disk.raw", "sealed.bcow"]);
    sandbox.ok(&["create", "-s", "1M", "writable.bcow"]);
    sandbox.ok(&["convert", "sample.tar", "base.bcow"]);
    sandbox.ok(&["create", "-b", "base.bcow", "over.bcow"]);
    sandbox.ok(&["convert", "sample.tar", "viewed.bcow"]);
    sandbox.ok(&["create", "-b", "viewed.bcow", "--fs=ext4", "ext4.bcow"]);
    // With another digest than the other images.
    sandbox.ok(&["convert", "--compress=none", "sample.tar", "digested.bcow"]);
    sandbox.ok(&words("create -b digested.bcow --by-digest by-digest.bcow"));
    sandbox.write("letter.txt", b"precious");
    std::os::unix::fs::symlink("base.bcow", sandbox.path("link.bcow")).unwrap();
    for (destination, why) in [
        ("sealed.bcow", ["is a BCoW disk", "--force"]),
        ("writable.bcow", ["is a BCoW disk", "--force"]),
        ("base.bcow", ["it is the backing of ", "/over.bcow\n"]),
        ("link.bcow", ["it is the backing of ", "/over.bcow\n"]),
        ("viewed.bcow", ["it is the backing of ", "/ext4.bcow\n"]),
        (
            "digested.bcow",
            ["it is the backing of ", "/by-digest.bcow\n"],
        ),
        ("letter.txt", ["and is not in BCoW format", "--force"]),
        ("bcow:disk.raw", ["and is not in BCoW format", "--force"]),
    ] {
        for source in ["sample.tar", "raw:disk.raw"] {
            if (source, destination) != ("raw:disk.raw", "bcow:disk.raw") {
                refused(
                    &sandbox,
                    "letter.txt",
                    &["convert", source, destination],
                    &[why[0], why[1], "--force"],
                );
            }
        }
    }
    for destination in ["qcow2:letter.txt", "raw:letter.txt", "raw:base.bcow"] {
        refused(
            &sandbox,
            "letter.txt",
            &["convert", "sealed.bcow", destination],
            &["--force"],
        );
    }
    sandbox.ok(&["convert", "--force", "sample.tar", "base.bcow"]);
    sandbox.ok(&["convert", "-f", "raw:disk.raw", "writable.bcow"]);
    sandbox.ok(&["convert", "-f", "sealed.bcow", "raw:letter.txt"]);
    assert!(sandbox.read("letter.txt") == sandbox.read("disk.raw"));
}

#[test]
fn exports_and_commits_of_uppers_replace_no_disk() {
    let sandbox = Sandbox::with_image();
    sandbox.ok(&["create", "-b", "image.bcow", "--fs", "ext4", "disk.bcow"]);
    sandbox.ok(&["create", "-b", "image.bcow", "other.bcow"]);
    for (arguments, why) in [
        (
            &["export", "--to", "tar", "image.bcow"][..],
            "is in BCoW format",
        ),
        (
            &["export", "--to", "raw", "image.bcow"],
            "is in BCoW format",
        ),
        (
            &["commit", "image.bcow", "--upper", "disk.bcow"],
            "is a BCoW disk",
        ),
    ] {
        for destination in ["disk.bcow", "other.bcow"] {
            let output = match arguments[0] {
                "export" => &["-o", destination][..],
                _ => &[destination],
            };
            let words = [why, "remove the file first"];
            refused(&sandbox, destination, &[arguments, output].concat(), &words);
        }
    }
    // An image that is built again.
    for _ in 0..2 {
        sandbox.ok(&["commit", "image.bcow", "--upper", "disk.bcow", "layer.bcow"]);
        sandbox.ok(&["export", "--to", "tar", "image.bcow", "-o", "image.tar"]);
    }
}

#[test]
fn commit_writes_neither_into_the_upper_nor_over_an_image_that_is_needed() {
    let sandbox = Sandbox::with_image();
    std::fs::create_dir(sandbox.path("upper")).unwrap();
    sandbox.write("upper/new", b"new");
    let refused = |args: &[&str], why: &str| {
        let output = sandbox.run(args);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && text.contains(why),
            "{args:?}: {text}"
        );
    };
    let upper = ["commit", "image.bcow", "--upper", "upper"];
    for destination in ["upper/layer.bcow", "tar:upper/layer.tar", "oci:upper/a/b:x"] {
        refused(&[&upper[..], &[destination]].concat(), "is in the upper");
    }
    let entries = std::fs::read_dir(sandbox.path("upper")).unwrap();
    assert_eq!(entries.count(), 1);
    sandbox.ok(&[&upper[..], &["--merge", "above.bcow"]].concat());
    let why = "it is the backing of ";
    refused(&["convert", "sample.tar", "image.bcow"], why);
}

#[test]
fn bcow_file_with_a_damaged_header_is_named_as_one() {
    let sandbox = Sandbox::with_image();
    sandbox.ok(&["create", "-s", "1M", "damaged.bcow"]);
    sandbox.patch("damaged.bcow", |bytes| {
        for slot in bytes[..1024].chunks_mut(512) {
            slot[100] ^= 1;
        }
    });
    let words = ["BCoW file that bcow cannot read", "header slots", "--force"];
    let convert = ["convert", "sample.tar", "damaged.bcow"];
    refused(&sandbox, "sample.tar", &convert, &words);
}

#[test]
fn disk_that_is_replaced_is_locked_until_the_new_file_has_its_name() {
    let sandbox = Sandbox::with_image();
    sandbox.ok(&["create", "-s", "1M", "disk.bcow"]);
    let mut convert = sandbox
        .command(&["convert", "--force", "tar:-", "disk.bcow"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = convert.stdin.take().unwrap();
    // More than a pipe can hold: when the write ends, the conversion has locked the disk and reads.
    let archive = Tar::new().file("big", &vec![7; 4 << 20]).finish();
    let (start, end) = archive.split_at(archive.len() - 1024);
    input.write_all(start).unwrap();
    let resized = sandbox.run(&["resize", "disk.bcow", "2M"]);
    let text = String::from_utf8_lossy(&resized.stderr);
    assert!(text.contains("in use by another program"), "{text}");
    input.write_all(end).unwrap();
    drop(input);
    assert!(convert.wait().unwrap().success());
    sandbox.ok(&["ls", "disk.bcow"]);
}

#[test]
fn an_interrupted_command_says_what_it_keeps() {
    let sandbox = Sandbox::with_image();
    let old = sandbox.read("image.bcow");
    let mut convert = sandbox
        .command(&["convert", "tar:-", "image.bcow"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = convert.stdin.take().unwrap();
    // An archive without an end: the file again and again.
    let archive = Tar::new().file("big", &vec![7; 1 << 20]).finish();
    let member = &archive[..archive.len() - 1024];
    // More than a pipe can hold: when the write ends, the conversion reads.
    input.write_all(member).unwrap();
    kill_process(Pid::from_child(&convert), Signal::INT).unwrap();
    while input.write_all(member).is_ok() {}
    let output = convert.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(
        text,
        "error: interrupted\nhint: the destination is as it was\n"
    );
    assert!(sandbox.read("image.bcow") == old);
}

/// Puts an image for amd64 with an annotation, and one for arm64, into the layout `multi`.
fn layout_of_two_platforms(sandbox: &Sandbox) {
    sandbox.layout("multi", "x", &["sample.tar"]);
    let json = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap();
    let entry = json(&sandbox.read("multi/index.json"))["manifests"][0].clone();
    let blob = |digest: &str| format!("multi/blobs/sha256/{}", &digest["sha256:".len()..]);
    let manifest = json(&sandbox.read(&blob(entry["digest"].as_str().unwrap())));
    let entries = ["amd64", "arm64"].map(|architecture| {
        let mut manifest = manifest.clone();
        manifest["annotations"] = json!({"org.example.of": architecture});
        let bytes = manifest.to_string().into_bytes();
        let digest = bcow_oci::Digest::of(&bytes).to_string();
        sandbox.write(&blob(&digest), &bytes);
        let mut entry = entry.clone();
        entry["platform"] = json!({"os": "linux", "architecture": architecture});
        entry["digest"] = json!(digest);
        entry["size"] = json!(bytes.len());
        entry
    });
    let index = json!({"schemaVersion": 2, "manifests": entries});
    sandbox.write("multi/index.json", index.to_string().as_bytes());
}

#[test]
fn annotations_stay_and_what_is_left_out_is_said() {
    let sandbox = Sandbox::with_image();
    layout_of_two_platforms(&sandbox);
    let run = |args: &[&str]| {
        let output = sandbox.run(args);
        assert!(output.status.success(), "{args:?}");
        (
            String::from_utf8(output.stderr).unwrap(),
            String::from_utf8(output.stdout).unwrap(),
        )
    };
    let annotation = |layout: &str| {
        let json = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap();
        let index = json(&sandbox.read(&format!("{layout}/index.json")));
        let digest = index["manifests"][0]["digest"].as_str().unwrap();
        let hex = &digest["sha256:".len()..];
        let manifest = json(&sandbox.read(&format!("{layout}/blobs/sha256/{hex}")));
        manifest["annotations"]["org.example.of"].clone()
    };
    let amd64 = "--platform=linux/amd64";
    let (said, report) = run(&["convert", "--json", amd64, "oci:multi:x", "flat.bcow"]);
    assert_eq!(
        said,
        "note: not taken from oci:multi:x: 1 image for other platforms (linux/arm64); 1 annotation \
         (org.example.of)\n"
    );
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["source"], "oci:multi:x");
    let left_out = json!({
        "platforms": ["linux/arm64"], "attestations": 0, "annotations": ["org.example.of"],
    });
    assert_eq!(report["left_out"], left_out);
    let (said, _) = run(&["convert", amd64, "oci:multi:x", "oci:layered:x"]);
    assert!(said.ends_with("platforms (linux/arm64)\n"), "{said}");
    run(&["convert", "--compress=none", "oci:layered:x", "oci:again:x"]);
    run(&["copy", "oci:layered:x", "oci:copied:x"]);
    run(&["export", "oci:copied:x", "--to=oci:exported:x"]);
    for layout in ["layered", "again", "copied", "exported"] {
        assert_eq!(annotation(layout), "amd64", "{layout}");
    }
    let (said, _) = run(&["convert", "--force", "oci:layered:x", "flat.bcow"]);
    assert_eq!(
        said,
        "note: not taken from oci:layered:x: 1 annotation (org.example.of)\n"
    );
}

#[test]
fn refused_source_has_a_hint_about_its_form() {
    let sandbox = Sandbox::with_image();
    sandbox.layout("layout", "test", &["sample.tar"]);
    sandbox.write("disk.qcow2", b"QFI\xfb and so on");
    sandbox.write("disk.img", &[7; 8192]);
    std::fs::create_dir(sandbox.path("root")).unwrap();
    let asked = |source: &str, destination: &str| {
        let output = sandbox.run(&["convert", source, destination]);
        assert_eq!(output.status.code(), Some(2), "{source} {destination}");
        String::from_utf8(output.stderr).unwrap()
    };
    for (source, meant) in [
        ("disk.img", "did you mean raw:disk.img?"),
        ("disk.qcow2", "did you mean qcow2:disk.qcow2?"),
        ("layout", "did you mean oci:layout?"),
        ("root", "did you mean dir:root,"),
    ] {
        let text = asked(source, "x.bcow");
        assert!(
            text.contains("missing transport") && text.contains(meant),
            "{text}"
        );
    }
    for (source, kind) in [
        ("dir:root", "dir:root is a directory"),
        ("tar:sample.tar", "tar:sample.tar is a tar archive"),
        (
            "docker-archive:nosuch",
            "docker-archive:nosuch is a container image",
        ),
    ] {
        for destination in ["qcow2:x", "raw:x"] {
            let text = asked(source, destination);
            let expected = format!("{destination} can be made only from a disk, and {kind}");
            assert!(text.contains(&expected), "{text}");
        }
    }
    for (source, hint) in [
        (
            "qcow2:disk.qcow2",
            "hint: `qemu-img check` says whether it is damaged",
        ),
        ("qcow2:sample.tar", "hint: it looks like an archive"),
    ] {
        let output = sandbox.run(&["convert", source, "x.bcow"]);
        assert_eq!(output.status.code(), Some(1), "{source}");
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains(hint), "{text}");
    }
    let text = asked("dir:layout", "x.bcow");
    assert!(text.contains("hint: use oci:layout,"), "{text}");
}

#[test]
fn counts_of_one_are_singular() {
    let sandbox = Sandbox::new();
    sandbox.write("empty.tar", &[0; 1024]);
    let text = String::from_utf8(sandbox.ok(&["convert", "empty.tar", "a.bcow"])).unwrap();
    assert!(text.starts_with("a.bcow: 1 layer, 1 entry, "), "{text}");
    sandbox.write("one", b"x");
    let output = sandbox.run(&["convert", "raw:one", "one.bcow"]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("raw:one has 1 byte, "), "{text}");
    let output = sandbox.run(&["create", "-s", "1", "new.bcow"]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("a disk of 1 byte:"), "{text}");
    let output = sandbox.run(&["convert", "one.bcow", "raw:out"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("disk of 1 B (1 byte)"), "{text}");
}

/// An image of two layers in the layout `source`.
fn image_in_layers() -> Sandbox {
    let sandbox = Sandbox::new();
    for (name, content) in [("low", &b"low"[..]), ("high", b"high")] {
        let archive = Tar::new().directory("./").file(name, content).finish();
        sandbox.write(&format!("{name}.tar"), &archive);
    }
    sandbox.layout("source", "x", &["low.tar", "high.tar"]);
    sandbox
}

/// The layers in a report about `containerd-cache:`.
fn cached_layers(json: &[u8]) -> Vec<Value> {
    let report: Value = serde_json::from_slice(json).unwrap();
    report["layers"].as_array().unwrap().clone()
}

#[test]
fn files_of_a_containerd_cache_follow_the_umask() {
    let sandbox = image_in_layers();
    for (umask, mode) in [("077", 0o600), ("022", 0o644)] {
        let cache = format!("containerd-cache:cache-{umask}");
        let mut convert = Command::new("sh");
        let script = format!("umask {umask} && exec \"$@\"");
        convert.args(["-c", &script, "sh", env!("CARGO_BIN_EXE_bcow")]);
        convert.args(["convert", "--json", "oci:source:x", &cache]);
        let output = convert.current_dir(sandbox.path("")).output().unwrap();
        let layers = cached_layers(&output.stdout);
        assert_eq!(layers.len(), 2);
        for layer in &layers {
            let file = sandbox.path(layer["file"].as_str().unwrap());
            let found = file.metadata().unwrap().permissions().mode() & 0o777;
            assert_eq!(found, mode, "umask {umask}");
        }
    }
}

#[test]
fn kept_files_of_a_containerd_cache_are_reported_as_they_are() {
    let sandbox = image_in_layers();
    let convert = words("convert --json oci:source:x containerd-cache:cache");
    let layers = cached_layers(&sandbox.ok(&convert));
    let sizes = |layers: &[Value]| -> Vec<u64> {
        let sizes = layers.iter().map(|layer| layer["file_bytes"].as_u64());
        sizes.map(Option::unwrap).collect()
    };
    let [low, high] = sizes(&layers)[..] else {
        panic!("{layers:?}");
    };
    // A file of another version of the program may have another size.
    let file = layers[1]["file"].as_str().unwrap();
    sandbox.patch(file, |bytes| bytes.resize(high as usize + 4096, 0));
    // One of two files is missing.
    std::fs::remove_file(sandbox.path(layers[0]["file"].as_str().unwrap())).unwrap();
    let again = cached_layers(&sandbox.ok(&convert));
    assert_eq!(sizes(&again), [low, high + 4096]);
    let is_new = |layer: &Value| layer["is_new"].as_bool().unwrap();
    assert_eq!(again.iter().map(is_new).collect::<Vec<_>>(), [true, false]);
    // All are there, so no layer is read: the damage of both remains unknown.
    for archive in ["low.tar", "high.tar"] {
        let digest = bcow_oci::Digest::of(&sandbox.read(archive)).hex();
        sandbox.patch(&format!("source/blobs/sha256/{digest}"), |bytes| {
            bytes.fill(1)
        });
    }
    let again = cached_layers(&sandbox.ok(&convert));
    assert_eq!(sizes(&again), [low, high + 4096]);
    assert!(!again.iter().any(is_new));
    assert_eq!(std::fs::read_dir(sandbox.path("cache")).unwrap().count(), 1);
}

#[test]
fn failed_link_leaves_no_directory_in_a_containerd_cache() {
    let sandbox = image_in_layers();
    let Ok(elsewhere) = tempfile::tempdir_in("/dev/shm") else {
        return missing("/dev/shm", &"it is not writable");
    };
    let device = |path: &Path| path.metadata().unwrap().dev();
    if device(elsewhere.path()) == device(&sandbox.path("")) {
        return missing("a second file system", &"/dev/shm is the one of the tests");
    }
    // No file can have a second name on another file system.
    std::fs::create_dir(sandbox.path("cache")).unwrap();
    std::os::unix::fs::symlink(elsewhere.path(), sandbox.path("cache/sha256")).unwrap();
    let shown = sandbox.shown(&["convert", "oci:source:x", "containerd-cache:cache"]);
    assert!(shown.ends_with("--- exit status 1\n"), "{shown}");
    assert_eq!(std::fs::read_dir(elsewhere.path()).unwrap().count(), 0);
}

#[test]
fn an_archive_without_a_transport_is_what_its_content_says() {
    let sandbox = Sandbox::with_image();
    sandbox.layout("layout", "x", &["sample.tar"]);
    std::fs::create_dir(sandbox.path("scratch")).unwrap();
    for archive in [
        "tar -C layout -c .",
        "tar -C layout -cz .",
        "cat sample.tar",
        "gzip -c sample.tar",
    ] {
        let script = format!(
            "{archive} | TMPDIR=scratch \"$1\" convert --force - new.bcow
             {archive} | TMPDIR=scratch \"$1\" convert - oci:again:x
             {archive} > 'debian:12'
             \"$1\" convert --force 'debian:12' file.bcow
             \"$1\" diff image.bcow new.bcow
             \"$1\" diff image.bcow file.bcow
             \"$1\" diff image.bcow oci:again:x
             rmdir scratch && mkdir scratch"
        );
        let output = Command::new("sh")
            .args(["-ec", &script, "sh", env!("CARGO_BIN_EXE_bcow")])
            .current_dir(sandbox.path(""))
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{archive}: {text}");
    }
}
