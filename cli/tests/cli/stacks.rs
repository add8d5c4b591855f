//! Images in an OCI layout, layer by layer: what they are called, and what is said of layers that
//! are not as they should be.

use std::fs;
use std::path::PathBuf;

use bcow_oci::Digest;

use crate::support::{Sandbox, Tar, settings, show, words};

/// A layout `src` with an ordinary image `x` of three layers.
fn ordinary() -> Sandbox {
    let sandbox = Sandbox::new();
    let archives = [
        Tar::new()
            .directory("etc")
            .file("etc/hostname", b"lower\n")
            .file("etc/passwd", b"root\n")
            .directory("var")
            .file("var/log", &[b'x'; 9000]),
        Tar::new()
            .file("etc/hostname", b"upper\n")
            .file("var/.wh.log", b""),
        Tar::new()
            .symlink("home", "var")
            .file("big", &[b'y'; 20000]),
    ];
    let names = ["lowest.tar", "middle.tar", "top.tar"];
    for (name, archive) in names.iter().zip(archives) {
        sandbox.write(name, &archive.finish());
    }
    sandbox.layout("src", "x", &names);
    sandbox
}

/// The same, converted into the layout `img`.
fn layered() -> Sandbox {
    layered_with(&["--compress=none", "--block-size=4K"])
}

fn layered_with(options: &[&str]) -> Sandbox {
    let sandbox = ordinary();
    sandbox.ok(&[&["convert"], options, &["oci:src:x", "oci:img:x"]].concat());
    sandbox
}

/// The digests of the layers, lowest first, and that of the stack.
fn digests(sandbox: &Sandbox) -> Vec<String> {
    let read =
        |name: &str| -> serde_json::Value { serde_json::from_slice(&sandbox.read(name)).unwrap() };
    let blob =
        |digest: &serde_json::Value| format!("img/blobs/sha256/{}", hex(digest.as_str().unwrap()));
    let index = read("img/index.json");
    let manifest = read(&blob(&index["manifests"][0]["digest"]));
    manifest["layers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|layer| layer["digest"].as_str().unwrap().to_owned())
        .collect()
}

fn hex(digest: &str) -> &str {
    digest.strip_prefix("sha256:").unwrap()
}

fn blob_path(digest: &str) -> String {
    format!("img/blobs/sha256/{}", hex(digest))
}

/// Snapshots without digests, short ones too.
fn snapshot(name: &str, text: &str) {
    let mut settings = settings();
    settings.add_filter(r"blobs/sha256/[0-9a-f]{64}", "blobs/sha256/[HEX]");
    settings.add_filter(r"sha256:[0-9a-f]{12}\b", "sha256:[SHORT]");
    settings.bind(|| insta::assert_snapshot!(name, text));
}

#[test]
fn a_stack_is_the_image_that_one_file_would_be() {
    for options in [&["--compress=none"][..], &["--plain"], &["--dedup-lower"]] {
        let sandbox = layered_with(options);
        sandbox.ok(&["convert", "oci:src:x", "flat.bcow"]);
        let stack = digests(&sandbox).pop().unwrap();
        let blob = blob_path(&stack);
        for name in ["oci:img:x", "oci:img", &format!("oci:img@{stack}"), &blob] {
            let same = sandbox.run(&["diff", "flat.bcow", name]);
            assert_eq!(
                same.status.code(),
                Some(0),
                "{}",
                show(&["diff", name], &same)
            );
            assert_eq!(
                sandbox.ok(&["cat", name, "etc/hostname", "etc/passwd"]),
                b"upper\nroot\n"
            );
            assert_eq!(sandbox.ok(&["ls", name]), b"big\netc\nhome\nvar\n");
            sandbox.ok(&["fsck", "--data", name]);
        }
        sandbox.ok(&["extract", "oci:img", "out"]);
        assert_eq!(sandbox.read("out/big"), [b'y'; 20000]);
        assert!(!sandbox.path("out/var/log").exists());
    }
}

#[test]
fn a_layer_on_its_own_is_an_image_in_overlayfs_form() {
    let sandbox = layered();
    let name = format!("oci:img@{}", digests(&sandbox)[1]);
    let listed = sandbox.ok(&["ls", "-lR", &name]);
    let listed = String::from_utf8(listed).unwrap();
    assert!(
        listed.contains("c---------") && listed.contains("/var/log"),
        "{listed}"
    );
    assert_eq!(sandbox.ok(&["cat", &name, "/etc/hostname"]), b"upper\n");
}

#[test]
fn inspect_draws_the_stack() {
    let sandbox = layered();
    snapshot("inspect", &sandbox.shown(&["inspect", "oci:img:x"]));
    let json = sandbox.json(&["inspect", "--json", "oci:img:x"]);
    let stack = &json["stack"];
    let amounts = |key: &str| -> Vec<(u64, u64)> {
        stack["layers"]
            .as_array()
            .unwrap()
            .iter()
            .map(|layer| {
                let number = |part: &str| layer[key][part].as_u64().unwrap();
                (number("entries"), number("bytes"))
            })
            .collect()
    };
    assert_eq!(amounts("adds"), [(3, 5), (1, 6), (2, 20000)]);
    assert_eq!(amounts("hides"), [(0, 0), (2, 9006), (0, 0)]);
    assert_eq!(amounts("hidden"), [(2, 9006), (0, 0), (0, 0)]);
    let sum: u64 = digests(&sandbox)[..3]
        .iter()
        .map(|digest| fs::metadata(sandbox.path(blob_path(digest))).unwrap().len())
        .sum();
    assert_eq!(stack["layers_bytes"], sum);
}

#[test]
fn map_shows_windows() {
    let sandbox = layered();
    let text = sandbox.shown(&["map", "--start=4M", "oci:img:x"])
        + &sandbox.shown(&["map", "--start=4M", "--length=4K", "--json", "oci:img:x"]);
    snapshot("map", &text);
}

#[test]
fn fsck_checks_every_file_of_a_stack() {
    let sandbox = layered();
    snapshot("fsck", &sandbox.shown(&["fsck", "oci:img:x"]));
    // A byte of the content of the third layer's one large file.
    let third = digests(&sandbox)[2].clone();
    sandbox.patch(&blob_path(&third), |bytes| {
        let at = bytes
            .windows(100)
            .position(|run| run == [b'y'; 100])
            .unwrap();
        bytes[at + 50] ^= 1;
    });
    snapshot(
        "fsck_damaged",
        &sandbox.shown(&["fsck", "--data", "oci:img:x"]),
    );
    let json = sandbox.run(&["fsck", "--data", "--json", "oci:img:x"]);
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json["files"][3]["digest"], third.as_str());
    assert_eq!(json["files"][3]["verdict"], "errors");
    assert_eq!(json["files"][0]["verdict"], "clean");
    let codes: Vec<_> = json["findings"]
        .as_array()
        .unwrap()
        .iter()
        .map(|f| &f["code"])
        .collect();
    assert!(codes.contains(&&"backing-entry".into()) && codes.contains(&&"file-data".into()));
    snapshot(
        "cat_damaged",
        &sandbox.all_shown(&[&["cat", "oci:img:x", "big"]]),
    );
}

#[test]
fn commands_that_need_a_missing_layer_name_it_and_others_go_on() {
    let sandbox = layered();
    let second = digests(&sandbox)[1].clone();
    fs::create_dir(sandbox.path("store")).unwrap();
    fs::create_dir(sandbox.path("mnt")).unwrap();
    let moved = sandbox.path("store").join(hex(&second));
    fs::rename(sandbox.path(blob_path(&second)), &moved).unwrap();
    snapshot(
        "missing",
        &sandbox.all_shown(&[
            &["ls", "oci:img:x"],
            &["cat", "oci:img:x", "big"],
            &["fsck", "oci:img:x"],
            &["inspect", "--mount-command", "oci:img:x"],
            &["cat", "--store=nowhere", "oci:img:x", "big"],
            &["cat", "--store=src/index.json", "oci:img:x", "big"],
        ]),
    );
    let reason = sandbox.run(&["cat", "oci:img:x", "big"]).stderr;
    for (line, status) in [
        ("extract oci:img:x out", 1),
        ("export --to=raw -o out oci:img:x", 1),
        ("diff oci:img:x oci:img:x", 2),
        ("mount oci:img:x mnt", 1),
    ] {
        let refused = sandbox.run(&words(line));
        assert_eq!(refused.status.code(), Some(status), "{line}");
        assert!(
            refused.stdout.is_empty() && refused.stderr == reason,
            "{line}"
        );
    }
    assert!(!sandbox.path("out").exists());
    let inspected = sandbox.run(&["inspect", "oci:img:x"]);
    assert!(inspected.status.success());
    let text = String::from_utf8(inspected.stdout).unwrap();
    assert!(text.contains("  missing\n"), "{text}");

    let cat = words("cat --store=src --store=store oci:img:x etc/hostname");
    assert_eq!(sandbox.ok(&cat), b"upper\n");
    let mut by_environment = sandbox.command(&["cat", "oci:img:x", "etc/hostname"]);
    by_environment.env("BCOW_STORE", "src:store");
    assert_eq!(by_environment.output().unwrap().stdout, b"upper\n");
}

#[test]
fn extraction_goes_on_without_a_missing_layer_below_further_layers() {
    let sandbox = layered();
    fs::create_dir(sandbox.path("upper")).unwrap();
    sandbox.write("upper/new", b"new\n");
    sandbox.ok(&["commit", "oci:img:x", "--upper=upper", "layer.bcow"]);
    fs::remove_file(sandbox.path(blob_path(&digests(&sandbox)[2]))).unwrap();
    let extract = ["extract", "oci:img:x", "--layer=layer.bcow", "out"];
    let refused = sandbox.shown(&extract);
    assert!(refused.ends_with("--- exit status 1\n"), "{refused}");
    assert!(!sandbox.path("out").exists());

    let text = sandbox.shown(&[&extract[..], &["--keep-going"]].concat());
    assert!(
        text.contains("error: cannot read /big in oci:img:x\n"),
        "{text}"
    );
    let summary = "error: 1 part of the image could not be read and is missing in out\n";
    assert!(text.contains(summary), "{text}");
    assert!(text.ends_with("--- exit status 1\n"), "{text}");
    assert_eq!(sandbox.read("out/new"), b"new\n");
    assert_eq!(sandbox.read("out/etc/hostname"), b"upper\n");
    assert!(!sandbox.path("out/big").exists());
    let listed = sandbox.ok(&["ls", "oci:img:x", "--layer=layer.bcow"]);
    assert_eq!(listed, b"big\netc\nhome\nnew\nvar\n");
}

#[test]
fn another_file_in_the_place_of_a_layer_is_refused() {
    let sandbox = layered();
    let digests = digests(&sandbox);
    let path = |index: usize| -> PathBuf { sandbox.path(blob_path(&digests[index])) };
    fs::copy(path(2), path(0)).unwrap();
    snapshot(
        "wrong",
        &sandbox.all_shown(&[
            &["cat", "oci:img:x", "big"],
            &["ls", "oci:img:x"],
            &["fsck", "oci:img:x"],
        ]),
    );
}

#[test]
fn names_of_images_that_are_not_there() {
    let sandbox = layered();
    fs::create_dir(sandbox.path("empty")).unwrap();
    let nothing = format!("oci:img@{}", Digest::of(b"nothing"));
    snapshot(
        "names",
        &sandbox.all_shown(&[
            &["ls", "oci:"],
            &["ls", "oci:img:"],
            &["ls", "oci:img@sha256:123"],
            &["ls", "oci:nowhere"],
            &["ls", "oci:empty"],
            &["ls", "oci:img:y"],
            &["ls", "oci:src:x"],
            &["ls", "img"],
            &["ls", &nothing],
            &["fsck", "oci:img:y"],
        ]),
    );
}

#[test]
fn the_kernels_mount_command_names_every_file() {
    let sandbox = layered_with(&["--plain"]);
    fs::rename(sandbox.path("img"), sandbox.path("it's img")).unwrap();
    sandbox.ok(&["convert", "--plain", "oci:src:x", "flat.bcow"]);
    let text = sandbox.all_shown(&[
        &["inspect", "--mount-command", "oci:it's img:x"],
        &["inspect", "--mount-command=/a dir", "flat.bcow"],
    ]);
    let root = sandbox.path("").canonicalize().unwrap();
    let text = text.replace(root.to_str().unwrap(), "[ROOT]");
    snapshot("mount_command", &text);
    let compressed = layered();
    snapshot(
        "mount_command_refused",
        &compressed.shown(&["inspect", "--mount-command", "oci:img:x"]),
    );
}
