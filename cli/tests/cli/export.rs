//! `bcow export --to tar` and `--to oci:DIR` as their users meet them.

use std::os::unix::fs::MetadataExt;
use std::process::Command;

use crate::support::{Entry, Sandbox, Tar, noise, snapshot};

/// Something of everything that headers cannot hold.
fn hard_to_write(sandbox: &Sandbox) {
    let long = format!("{}/{}", "d".repeat(90), "n".repeat(200));
    let directory = format!("{}/", "d".repeat(90));
    let file = |name, time| Entry {
        name,
        time,
        data: b"x",
        ..Entry::default()
    };
    let tar = Tar::new()
        .directory("./")
        .add(file(b"before-1970", "-1.25"))
        .add(file(b"far-future", "99999999999.000000001"))
        .directory(&directory)
        .long(&long, b"long\n")
        .hardlink("link", "before-1970")
        .add(Entry {
            xattrs: &[
                ("user.a=b", b"="),
                ("user.empty", b""),
                ("user.lines", b"\n\n\0"),
            ],
            ..file(b"marked", "0")
        })
        .add(file(b"odd \xff\n", "0"))
        .sparse(
            "sparse",
            &[
                ("GNU.sparse.major", "1"),
                ("GNU.sparse.minor", "0"),
                ("GNU.sparse.name", "sparse"),
                ("GNU.sparse.realsize", "10000000"),
            ],
            &[
                &b"3\n0\n4096\n8192000\n4096\n10000000\n0\n"[..],
                &[0; 479],
                &noise(8192),
            ]
            .concat(),
        )
        .finish();
    sandbox.write("hard.tar", &tar);
    sandbox.ok(&["convert", "-q", "hard.tar", "hard.bcow"]);
}

#[test]
fn an_exported_tree_converts_to_the_same_tree_and_exports_to_the_same_bytes() {
    let sandbox = Sandbox::with_image();
    hard_to_write(&sandbox);
    for image in ["image.bcow", "hard.bcow"] {
        sandbox.ok(&["export", image, "--to=tar", "-o", "one.tar"]);
        sandbox.ok(&["convert", "-q", "one.tar", "again.bcow"]);
        sandbox.ok(&["diff", image, "again.bcow"]);
        let again = sandbox.ok(&["export", "again.bcow", "--to=tar", "-o", "-"]);
        assert!(again == sandbox.read("one.tar"), "{image}");
    }
}

#[test]
fn gnu_tar_extracts_an_exported_archive() {
    let sandbox = Sandbox::new();
    hard_to_write(&sandbox);
    sandbox.ok(&["export", "hard.bcow", "--to=tar", "-o", "hard-again.tar"]);
    let mut trees = Vec::new();
    for archive in ["hard.tar", "hard-again.tar"] {
        let directory = sandbox.path(format!("from-{archive}"));
        std::fs::create_dir(&directory).unwrap();
        let unpacked = Command::new("tar")
            .args(["--xattrs", "--xattrs-include=*", "-xpf"])
            .arg(sandbox.path(archive))
            .current_dir(&directory)
            .output()
            .unwrap();
        assert!(unpacked.status.success(), "{unpacked:?}");
        let sparse = std::fs::metadata(directory.join("sparse")).unwrap();
        assert_eq!(sparse.size(), 10_000_000);
        assert!(sparse.blocks() < 100, "{} blocks", sparse.blocks());
        trees.push(directory.into_os_string().into_string().unwrap());
    }
    // bcow's own eyes see the same as those of GNU tar in both.
    for (tree, image) in trees.iter().zip(["a.bcow", "b.bcow"]) {
        sandbox.ok(&["convert", "-q", &format!("dir:{tree}"), image]);
    }
    let shown = sandbox.shown(&["diff", "a.bcow", "b.bcow"]);
    assert!(shown.contains("no difference in 9 paths"), "{shown}");
}

#[test]
fn archives_are_in_the_order_of_names() {
    let sandbox = Sandbox::with_image();
    let archive = sandbox.ok(&["export", "image.bcow", "--to=tar", "-o", "-"]);
    sandbox.write("out.tar", &archive);
    let listed = Command::new("tar")
        .args(["--numeric-owner", "--utc", "--full-time", "-tvf"])
        .arg(sandbox.path("out.tar"))
        .env("LC_ALL", "C")
        .output()
        .unwrap();
    snapshot!(String::from_utf8(listed.stdout).unwrap());
}

#[test]
fn a_socket_is_left_out_with_a_warning() {
    let sandbox = Sandbox::new();
    std::fs::create_dir(sandbox.path("tree")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(sandbox.path("tree/socket")).unwrap();
    sandbox.ok(&["convert", "-q", "dir:tree", "tree.bcow"]);
    snapshot!(sandbox.shown(&["export", "tree.bcow", "--to=tar", "-o", "tree.tar"]), @r"
    $ bcow export tree.bcow --to=tar -o tree.tar
    --- stderr
    warning: left out 1 socket, which tar cannot represent
    tree.tar: 1 entry exported, 0 B of file content
    --- exit status 0
    ");
}

#[test]
fn a_damaged_image_gives_no_archive() {
    let sandbox = Sandbox::with_image();
    sandbox.damage_su("image.bcow", 0);
    let before = sandbox.names();
    snapshot!(sandbox.shown(&["export", "image.bcow", "--to=tar", "-o", "x.tar"]));
    assert_eq!(sandbox.names(), before);
}

/// A second layer on top of the sample: changes, deletions, an opaque directory, a link into the
/// layer below.
fn two_layers(sandbox: &Sandbox) {
    sandbox.write("base.tar", &crate::support::sample());
    let upper = Tar::new()
        .file("etc/.wh.motd", b"")
        .file("etc/passwd", b"root:x:0:0:root:/root:/bin/bash\n")
        .hardlink("su", "usr/bin/su")
        .file("usr/bin/.wh.su", b"")
        .directory("var/")
        .file("var/.wh..wh..opq", b"")
        .file("var/new", b"new\n")
        .finish();
    sandbox.write("upper.tar", &upper);
    sandbox.layout("layers", "two", &["base.tar", "upper.tar"]);
}

#[test]
fn a_layer_on_its_own_is_exported_as_a_layer() {
    let sandbox = Sandbox::new();
    two_layers(&sandbox);
    sandbox.ok(&["convert", "-q", "oci:layers:two", "oci:stack:two"]);
    let stack = sandbox.json(&["inspect", "--json", "oci:stack:two"]);
    let digest = stack["metadata"]["layers"][1]["digest"].as_str().unwrap();
    let layer = format!("oci:stack@{digest}");
    sandbox.ok(&["export", &layer, "--to=tar", "-o", "layer.tar"]);
    let listed = Command::new("tar")
        .arg("-tf")
        .arg(sandbox.path("layer.tar"))
        .output()
        .unwrap();
    assert_eq!(
        String::from_utf8(listed.stdout).unwrap(),
        "su\netc/.wh.motd\netc/passwd\nusr/bin/.wh.su\nvar/\nvar/.wh..wh..opq\nvar/new\n"
    );
    // It says the same as the one that it was made of.
    sandbox.layout("again", "two", &["base.tar", "layer.tar"]);
    sandbox.ok(&["convert", "-q", "oci:layers:two", "flat.bcow"]);
    sandbox.ok(&["convert", "-q", "oci:again:two", "again.bcow"]);
    sandbox.ok(&["diff", "flat.bcow", "again.bcow"]);
}

#[test]
fn export_to_a_layout_where_it_cannot() {
    let sandbox = Sandbox::with_image();
    std::fs::create_dir(sandbox.path("tree")).unwrap();
    sandbox.write("tree/.wh.name", b"");
    sandbox.ok(&["convert", "-q", "dir:tree", "tree.bcow"]);
    let before = sandbox.names();
    let shown = [
        sandbox.shown(&["export", "image.bcow", "--to=oci:tree"]),
        sandbox.shown(&["export", "image.bcow", "--to=oci:image.bcow"]),
        sandbox.shown(&["export", "image.bcow", "--to=oci:no/such/place"]),
        sandbox.shown(&["export", "tree.bcow", "--to=oci:layout"]),
        sandbox.shown(&["export", "oci:layout", "--to=oci:other"]),
    ];
    snapshot!(shown.join("\n"), @r"
    $ bcow export image.bcow --to=oci:tree
    --- stderr
    error: cannot write the image to tree: it is neither an OCI image layout nor empty
    --- exit status 1

    $ bcow export image.bcow --to=oci:image.bcow
    --- stderr
    error: cannot write the image to image.bcow: it is not a directory
    --- exit status 1

    $ bcow export image.bcow --to=oci:no/such/place
    --- stderr
    error: cannot create no/such/place
      caused by: No such file or directory
    --- exit status 1

    $ bcow export tree.bcow --to=oci:layout
    --- stderr
    error: cannot export /.wh.name in tree.bcow
      caused by: its name begins with .wh., which makes a whiteout of it in a layer
    --- exit status 1

    $ bcow export oci:layout --to=oci:other
    --- stderr
    error: cannot open oci:layout
      caused by: cannot open layout: No such file or directory
    --- exit status 1
    ");
    assert_eq!(sandbox.names(), before);
}
