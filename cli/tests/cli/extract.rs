//! What `bcow extract` makes, and what it does not.

use std::os::unix::fs::{MetadataExt, PermissionsExt};

use crate::support::{Entry, Sandbox, Tar, is_root, noise, snapshot, words};

fn metadata(sandbox: &Sandbox, name: &str) -> std::fs::Metadata {
    std::fs::symlink_metadata(sandbox.path(name)).unwrap()
}

/// The tests of `bcow-erofs` compare all other attributes, and the content.
#[test]
fn extracted_files_have_their_extended_attributes() {
    let sandbox = Sandbox::with_image();
    sandbox.ok(&["extract", "image.bcow", "out"]);
    let mode = if is_root() { 0o4755 } else { 0o755 };
    let su = metadata(&sandbox, "out/usr/bin/su");
    assert_eq!(su.permissions().mode() & 0o7777, mode);
    let mut note = [0; 16];
    match rustix::fs::getxattr(sandbox.path("out/usr/bin/su"), "user.note", &mut note[..]) {
        Ok(length) => assert_eq!(note[..length], *b"\x00\n\xff"),
        Err(error) => crate::support::missing("extended attributes", &error),
    }
}

#[test]
fn a_directory_of_the_image_becomes_the_destination() {
    let sandbox = Sandbox::with_image();
    snapshot!(sandbox.shown(&["extract", "image.bcow", "/usr", "usr"]), @r"
    $ bcow extract image.bcow /usr usr
    --- stderr
    usr: 4 entries extracted, 9.77 KiB of file content
    --- exit status 0
    ");
    assert!(sandbox.read("usr/bin/sudo") == noise(10_000));
}

#[test]
fn holes_stay_holes() {
    let sandbox = Sandbox::new();
    // GNU tar's sparse format 1.0: a map of (offset, length), padded to a block, then the data.
    let mut data = b"1\n1048576\n5\n".to_vec();
    data.resize(512, 0);
    data.extend(b"data\n");
    let sparse = [
        ("GNU.sparse.major", "1"),
        ("GNU.sparse.minor", "0"),
        ("GNU.sparse.name", "sparse"),
        ("GNU.sparse.realsize", "8388608"),
    ];
    sandbox.write(
        "sparse.tar",
        &Tar::new().sparse("sparse", &sparse, &data).finish(),
    );
    sandbox.ok(&["convert", "sparse.tar", "image.bcow"]);
    sandbox.ok(&["extract", "image.bcow", "out"]);
    let metadata = metadata(&sandbox, "out/sparse");
    assert_eq!(metadata.len(), 8 << 20);
    assert!(metadata.blocks() * 512 <= 64 << 10, "{}", metadata.blocks());
    assert_eq!(sandbox.read("out/sparse")[1 << 20..][..5], *b"data\n");
}

#[test]
fn extract_does_not_write_into_an_existing_file() {
    let sandbox = Sandbox::with_image();
    std::fs::create_dir_all(sandbox.path("out/etc")).unwrap();
    sandbox.write("precious", b"precious");
    std::fs::hard_link(sandbox.path("precious"), sandbox.path("out/etc/motd")).unwrap();
    assert_eq!(
        sandbox.run(&["extract", "image.bcow", "out"]).status.code(),
        Some(1)
    );
    assert_eq!(sandbox.read("out/etc/motd"), b"precious");
    sandbox.ok(&["extract", "--force", "image.bcow", "out"]);
    assert_eq!(sandbox.read("out/etc/motd"), b"Welcome.\n");
    assert_eq!(sandbox.read("precious"), b"precious");
}

#[test]
fn unpacking_twice_with_force_gives_the_same_tree() {
    let sandbox = Sandbox::with_image();
    sandbox.ok(&["extract", "image.bcow", "out"]);
    sandbox.ok(&["extract", "--force", "image.bcow", "out"]);
    assert_eq!(metadata(&sandbox, "out/usr/bin/su").nlink(), 2);
    assert_eq!(metadata(&sandbox, "out/etc").mtime(), 1_700_000_000);
}

#[test]
fn existing_directories_keep_their_attributes() {
    let sandbox = Sandbox::with_image();
    std::fs::create_dir_all(sandbox.path("out/etc")).unwrap();
    let private = std::fs::Permissions::from_mode(0o700);
    std::fs::set_permissions(sandbox.path("out"), private.clone()).unwrap();
    std::fs::set_permissions(sandbox.path("out/etc"), private).unwrap();
    sandbox.ok(&["extract", "image.bcow", "out"]);
    for directory in ["out", "out/etc"] {
        assert_eq!(
            metadata(&sandbox, directory).permissions().mode() & 0o7777,
            0o700
        );
    }
}

#[test]
fn trees_deeper_than_the_usual_number_of_open_files_unpack() {
    let sandbox = Sandbox::new();
    let deep: String = (0..1500).map(|_| "d/").collect();
    let mut tar = Tar::new();
    // A path of 3000 bytes needs a PAX record; parents come by themselves.
    tar = tar.long(&format!("{deep}file"), b"deep");
    sandbox.write("deep.tar", &tar.finish());
    sandbox.ok(&["convert", "deep.tar", "image.bcow"]);
    sandbox.ok(&["extract", "image.bcow", "out"]);
    let cat = sandbox.ok(&["cat", "image.bcow", &format!("{deep}file")]);
    assert_eq!(cat, b"deep");
    assert_eq!(sandbox.read(&format!("out/{deep}file")), b"deep");
}

#[test]
fn ordinary_user_gets_files_without_privileged_attributes() {
    if !is_root() {
        return crate::support::missing("root", &"to run as another user");
    }
    let sandbox = Sandbox::with_image();
    let tar = Tar::new()
        .add(Entry {
            name: b"capable",
            mode: 0o4711,
            owner: (1, 2),
            xattrs: &[
                (
                    "security.capability",
                    b"\x01\0\0\x02\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
                ),
                ("user.note", b"x"),
            ],
            ..Entry::default()
        })
        .add(Entry {
            name: b"sealed",
            kind: b'5',
            mode: 0o555,
            ..Entry::default()
        })
        .file("sealed/file", b"inside")
        .add(Entry {
            name: b"disk",
            kind: b'4',
            device: (8, 1),
            ..Entry::default()
        });
    sandbox.write("odd.tar", &tar.finish());
    sandbox.ok(&["convert", "odd.tar", "odd.bcow"]);
    sandbox.open_to_others();
    let open = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(sandbox.path(""), open).unwrap();
    let args = ["extract", "odd.bcow", "out"];
    let output = sandbox.command_as(65534, &args).output().unwrap();
    snapshot!(crate::support::show(&args, &output), @r"
    $ bcow extract odd.bcow out
    --- stderr
    warning: left out 1 device node that only root can create (the first: disk)
    warning: left out 1 extended attribute that only root can set (the first: capable)
    out: 5 entries extracted, 6 B of file content
    --- exit status 0
    ");
    let capable = metadata(&sandbox, "out/capable");
    assert_eq!(capable.permissions().mode() & 0o7777, 0o711);
    assert_eq!((capable.uid(), capable.gid()), (65534, 65534));
    assert_eq!(sandbox.read("out/sealed/file"), b"inside");
    assert_eq!(
        metadata(&sandbox, "out/sealed").permissions().mode() & 0o7777,
        0o555
    );
    assert!(!sandbox.path("out/disk").exists());
}

#[test]
fn root_may_leave_owners_and_attributes_out() {
    let sandbox = Sandbox::with_image();
    sandbox.ok(&words(
        "extract --no-same-owner --no-xattrs image.bcow usr out",
    ));
    let su = metadata(&sandbox, "out/bin/su");
    assert_eq!(su.permissions().mode() & 0o7777, 0o755);
    assert_eq!(su.gid(), rustix::process::getegid().as_raw());
    let mut note = [0; 16];
    let found = rustix::fs::getxattr(sandbox.path("out/bin/su"), "user.note", &mut note[..]);
    assert!(found.is_err());
}
