//! `bcow diff` as its users meet it.

use serde_json::Value;

use crate::support::{Entry, Sandbox, Tar, noise, snapshot, words};

fn image(sandbox: &Sandbox, name: &str, tar: Tar, options: &[&str]) {
    let archive = format!("{name}.tar");
    sandbox.write(&archive, &tar.finish());
    let mut args = vec!["convert", "-q", &archive, name];
    args.extend(options);
    sandbox.ok(&args);
}

/// `a` and `b`, with a difference of every kind.
fn two_images() -> Sandbox {
    let sandbox = Sandbox::new();
    let file = |name, mode, time, data| Entry {
        name,
        mode,
        time,
        data,
        ..Entry::default()
    };
    let device = |name, device| Entry {
        name,
        kind: b'3',
        device,
        ..Entry::default()
    };
    let (old, new) = ("1600000000", "1600000001.5");
    let big = noise(300_000);
    let mut changed = big.clone();
    changed[200_000] ^= 1;
    let a = Tar::new()
        .directory("./")
        .add(file(b"big", 0o644, old, &big))
        .directory("dir/")
        .file("dir/gone", b"gone\n")
        .add(device(b"hidden", (1, 3)))
        .symlink("kind", "dir")
        .file("linked", b"linked\n")
        .hardlink("linked-too", "linked")
        .add(Entry {
            xattrs: &[("user.a", b"1"), ("user.b", b"1")],
            ..file(b"marked", 0o644, old, b"x")
        })
        .add(device(b"null", (1, 3)))
        .add(file(b"odd \n\xff", 0o644, old, b"1"))
        .add(file(b"passwd", 0o644, old, b"root\n"))
        .file("same", b"same\n")
        .symlink("target", "from here");
    let b = Tar::new()
        .directory("./")
        .add(file(b"big", 0o644, old, &changed))
        .directory("dir/")
        .add(device(b"hidden", (0, 0)))
        .directory("kind/")
        .file("kind/of", b"new\n")
        .file("linked", b"linked\n")
        .file("linked-too", b"linked\n")
        .add(Entry {
            owner: (5, 6),
            xattrs: &[("user.b", b"2"), ("user.c", b"1")],
            ..file(b"marked", 0o4755, old, b"x")
        })
        .add(device(b"new-null", (1, 3)))
        .add(device(b"null", (1, 5)))
        .add(file(b"odd \n\xff", 0o644, old, b"2"))
        .add(file(b"passwd", 0o644, new, b"root\nuser\n"))
        .file("same", b"same\n")
        .symlink("target", "to there");
    image(&sandbox, "a", a, &[]);
    // Stored in quite another way.
    image(&sandbox, "b", b, &["--plain", "--block-size=64K"]);
    sandbox
}

#[test]
fn differences_for_people() {
    let sandbox = two_images();
    snapshot!(sandbox.shown(&["diff", "a", "b"]));
}

#[test]
fn only_content_or_only_metadata() {
    let sandbox = two_images();
    let shown = [
        sandbox.shown(&["diff", "--content", "a", "b"]),
        sandbox.shown(&["diff", "--metadata", "a", "b"]),
        sandbox.shown(&["diff", "--summary", "a", "b"]),
    ];
    snapshot!(shown.join("\n"));
}

#[test]
fn differences_for_programs() {
    let sandbox = two_images();
    snapshot!(sandbox.shown(&["diff", "--json", "a", "b"]));
    let json: Value =
        serde_json::from_slice(&sandbox.run(&["diff", "--json", "a", "b"]).stdout).unwrap();
    assert_eq!(json["schema"], "bcow.diff/1");
    let count = |status: &str| {
        let entries = json["entries"].as_array().unwrap();
        entries
            .iter()
            .filter(|entry| entry["status"] == status)
            .count()
    };
    for (status, key) in [
        ("A", "added"),
        ("D", "removed"),
        ("M", "changed"),
        ("T", "retyped"),
    ] {
        assert_eq!(json["summary"][key], count(status), "{key}");
    }
    let short = sandbox.run(&["diff", "--json", "--summary", "a", "b"]);
    let short: Value = serde_json::from_slice(&short.stdout).unwrap();
    assert_eq!(short["summary"], json["summary"]);
    assert!(short.get("entries").is_none());
}

#[test]
fn lines_can_end_with_zeros() {
    let sandbox = two_images();
    let output = sandbox.run(&["diff", "-0", "-q", "a", "b"]);
    assert!(output.stderr.is_empty());
    let lines: Vec<&[u8]> = output.stdout.split(|&b| b == 0).collect();
    assert!(lines.contains(&b"M\t/odd \n\xff\tcontent from byte 0".as_slice()));
    assert_eq!(lines.last(), Some(&b"".as_slice()));
}

#[test]
fn images_of_one_tree_do_not_differ_however_they_are_stored() {
    let sandbox = Sandbox::with_image();
    sandbox.ok(&["convert", "-q", "sample.tar", "other.bcow"]);
    snapshot!(sandbox.shown(&["diff", "image.bcow", "other.bcow"]), @r"
    $ bcow diff image.bcow other.bcow
    --- stderr
    no difference in 20 paths
    --- exit status 0
    ");
    let json = sandbox.json(&["diff", "--json", "image.bcow", "other.bcow"]);
    assert_eq!(json["entries"], serde_json::json!([]));
    assert!(json["summary"]["compared_bytes"].as_u64().unwrap() > 200_000);
}

#[test]
fn content_in_one_place_is_not_read() {
    let sandbox = Sandbox::with_image();
    std::fs::hard_link(sandbox.path("image.bcow"), sandbox.path("same.bcow")).unwrap();
    let json = sandbox.json(&["diff", "--json", "image.bcow", "same.bcow"]);
    assert_eq!(json["summary"]["compared_bytes"], 0);
}

#[test]
fn trouble_is_something_else_than_a_difference() {
    let sandbox = Sandbox::with_image();
    sandbox.write("no-image", b"nothing of the kind");
    sandbox.ok(&words(
        "convert -q sample.tar --compress=none --block-size=4K damaged.bcow",
    ));
    sandbox.damage_su("damaged.bcow", 0);
    let shown = [
        sandbox.shown(&["diff", "image.bcow", "no-image"]),
        sandbox.shown(&["diff", "no-such-file", "image.bcow"]),
        sandbox.shown(&["diff", "image.bcow", "damaged.bcow"]),
        sandbox.shown(&["diff", "image.bcow"]),
        sandbox.shown(&words("diff --content --metadata image.bcow image.bcow")),
        // What is not read cannot be found damaged.
        sandbox.shown(&["diff", "--metadata", "image.bcow", "damaged.bcow"]),
    ];
    snapshot!(shown.join("\n"));
}

#[test]
fn layers_that_two_stacks_share_are_not_read() {
    let sandbox = Sandbox::new();
    sandbox.write("base.tar", &crate::support::sample());
    let upper = Tar::new()
        .file("etc/.wh.motd", b"")
        .file("etc/passwd", b"root:x:0:0:root:/root:/bin/bash\n");
    sandbox.write("upper.tar", &upper.finish());
    sandbox.layout("one", "x", &["base.tar"]);
    sandbox.layout("two", "x", &["base.tar", "upper.tar"]);
    for name in ["one", "two"] {
        let (from, to) = (format!("oci:{name}:x"), format!("oci:stacks:{name}"));
        sandbox.ok(&["convert", "-q", &from, &to]);
    }
    let shown = sandbox.shown(&["diff", "oci:stacks:one", "oci:stacks:two"]);
    snapshot!(shown, @r"
    $ bcow diff oci:stacks:one oci:stacks:two
    D	/etc/motd	file
    M	/etc/passwd	size 30->32, content
    --- stderr
    0 added, 1 removed, 1 changed, 0 of another type, 18 the same
    --- exit status 1
    ");
    let summary = |a: &str, b: &str| -> Value {
        let output = sandbox.run(&["diff", "--json", "--summary", a, b]);
        let json: Value = serde_json::from_slice(&output.stdout).unwrap();
        json["summary"].clone()
    };
    // Only what lies beside the inodes, in the stacks themselves.
    let shared = summary("oci:stacks:one", "oci:stacks:two");
    assert!(
        shared["compared_bytes"].as_u64().unwrap() < 10_000,
        "{shared}"
    );
    // A copy of the layout has the same digests, and is another place.
    let copied = std::process::Command::new("cp")
        .args(["-r", "stacks", "copies"])
        .current_dir(sandbox.path(""))
        .status();
    assert!(copied.unwrap().success());
    let copied = summary("oci:stacks:one", "oci:copies:one");
    assert!(
        copied["compared_bytes"].as_u64().unwrap() > 100_000,
        "{copied}"
    );
    assert_eq!(copied["changed"], 0);
}

#[test]
fn a_layer_against_another_shows_its_whiteouts() {
    let sandbox = Sandbox::new();
    sandbox.write(
        "base.tar",
        &Tar::new().directory("a/").file("a/b", b"b").finish(),
    );
    let upper = Tar::new()
        .directory("a/")
        .file("a/.wh.b", b"")
        .file("a/.wh..wh..opq", b"");
    sandbox.write("upper.tar", &upper.finish());
    sandbox.layout("source", "x", &["base.tar", "upper.tar"]);
    sandbox.ok(&["convert", "-q", "oci:source:x", "oci:stack:x"]);
    let facts = sandbox.json(&["inspect", "--json", "oci:stack:x"]);
    let layer = |index: usize| {
        let digest = &facts["metadata"]["layers"][index]["digest"];
        format!("oci:stack@{}", digest.as_str().unwrap())
    };
    let output = sandbox.run(&["diff", "-q", &layer(0), &layer(1)]);
    assert_eq!(output.status.code(), Some(1));
    let shown = String::from_utf8(output.stdout).unwrap();
    snapshot!(shown, @r"
    M	/a	xattr trusted.overlay.opaque added
    T	/a/b	file->whiteout
    ");
}

#[test]
fn the_image_of_a_disk_is_found_where_the_command_line_names_it() {
    let sandbox = Sandbox::new();
    let archive = Tar::new().directory("./").file("file", &noise(10_000));
    sandbox.write("image.tar", &archive.finish());
    sandbox.ok(&["convert", "-q", "image.tar", "oci:layout:x"]);
    sandbox.ok(&["convert", "-q", "image.tar", "image.bcow"]);
    let create = ["create", "-q", "-s1G", "--fs=ext4", "-b"];
    sandbox.ok(&[&create[..], &["oci:layout:x", "over-layout.bcow"]].concat());
    sandbox.ok(&[&create[..], &["image.bcow", "over-file.bcow"]].concat());
    let by_digest = ["image.bcow", "--by-digest", "over-digest.bcow"];
    sandbox.ok(&[&create[..], &by_digest].concat());
    std::fs::create_dir(sandbox.path("elsewhere")).unwrap();
    std::fs::rename(
        sandbox.path("image.bcow"),
        sandbox.path("elsewhere/image.bcow"),
    )
    .unwrap();
    for (image, disk) in [
        ("oci:layout:x", "over-layout.bcow"),
        ("elsewhere/image.bcow", "over-file.bcow"),
        ("elsewhere/image.bcow", "over-digest.bcow"),
    ] {
        assert_eq!(sandbox.ok(&["diff", image, "--upper", disk]), b"");
        let layer = format!("layer-of-{disk}");
        sandbox.ok(&["commit", "-q", image, "--upper", disk, &layer]);
    }
    let shown = sandbox.shown(&words("create -s512M --fs=ext4 -b oci:layout:x new.bcow"));
    assert!(
        shown.contains("an ext4 of 512 MiB is too small for the image, which needs "),
        "{shown}"
    );
    let (_, least) = shown.split_once("hint: -s ").expect("a hint");
    let least = format!("-s{}", least.split_whitespace().next().unwrap());
    sandbox.ok(&[
        "create",
        &least,
        "--fs=ext4",
        "-b",
        "oci:layout:x",
        "new.bcow",
    ]);
}
