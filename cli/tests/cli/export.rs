//! `bcow export --to tar` as its users meet it.

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
fn gnu_tar_unpacks_what_is_exported() {
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
fn what_tar_has_no_form_for_is_told() {
    let sandbox = Sandbox::new();
    std::fs::create_dir(sandbox.path("tree")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(sandbox.path("tree/socket")).unwrap();
    sandbox.ok(&["convert", "-q", "dir:tree", "tree.bcow"]);
    snapshot!(sandbox.shown(&["export", "tree.bcow", "--to=tar", "-o", "tree.tar"]));
}

#[test]
fn a_damaged_image_gives_no_archive() {
    let sandbox = Sandbox::with_image();
    let needle = &noise(10_000)[..64];
    sandbox.patch("image.bcow", |file| {
        let at = file
            .windows(64)
            .position(|window| window == needle)
            .unwrap();
        file[at] ^= 1;
    });
    let before = sandbox.names();
    snapshot!(sandbox.shown(&["export", "image.bcow", "--to=tar", "-o", "x.tar"]));
    assert_eq!(sandbox.names(), before);
}
