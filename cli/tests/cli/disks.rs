//! Disks and chains as their users meet them.

use std::os::unix::fs::PermissionsExt;

use crate::support::{Sandbox, is_root, missing, noise, snapshot, words};

/// `base.bcow` sealed, `disk.bcow` over it with two changes of its own.
fn chain() -> Sandbox {
    let sandbox = Sandbox::new();
    let mut content = vec![0; 1 << 20];
    content[..300_000].copy_from_slice(&noise(300_000));
    sandbox.write("old.raw", &content);
    content[8192..12288].fill(1);
    content[100_000..120_000].fill(0);
    sandbox.write("new.raw", &content);
    let none = "--compress=none";
    sandbox.ok(&["convert", "-q", none, "raw:old.raw", "old.bcow"]);
    sandbox.ok(&["convert", "-q", none, "raw:new.raw", "base.bcow"]);
    sandbox.ok(&["create", "-q", "-b", "old.bcow", "-s", "2M", "disk.bcow"]);
    sandbox.ok(&["rebase", "-q", "disk.bcow", "-b", "base.bcow"]);
    sandbox
}

/// What commands print, wherever the directory is.
fn shown(sandbox: &Sandbox, commands: &[&[&str]]) -> String {
    let directory = sandbox.path("").canonicalize().unwrap();
    let directory = format!("{}/", directory.display());
    sandbox.all_shown(commands).replace(&directory, "DIR/")
}

#[test]
fn a_chain_is_shown_with_all_its_files() {
    let sandbox = chain();
    snapshot!(shown(
        &sandbox,
        &[
            &["map", "disk.bcow"],
            &["map", "--depth=1", "disk.bcow"],
            &["map", "--json", "--start=8K", "--length=4K", "disk.bcow"],
            &["inspect", "disk.bcow"],
            &["diff", "disk.bcow", "base.bcow"],
            &["diff", "disk.bcow", "old.bcow"],
        ],
    ));
}

#[test]
fn a_backing_by_digest_that_is_over_a_name_is_refused() {
    let sandbox = Sandbox::new();
    sandbox.ok(&["create", "-q", "-s", "1M", "base.bcow"]);
    sandbox.ok(&["create", "-q", "-b", "base.bcow", "named.bcow"]);
    sandbox.ok(&["seal", "-q", "named.bcow"]);
    sandbox.ok(&["create", "-q", "-s", "1M", "disk.bcow"]);
    let refused = |args: &[&str]| {
        let shown = sandbox.shown(args);
        let why = "it is over base.bcow, and below a backing by digest";
        assert!(shown.contains(why), "{shown}");
        assert!(shown.contains("hint: leave out --by-digest"), "{shown}");
    };
    refused(&["create", "-b", "named.bcow", "--by-digest", "new.bcow"]);
    refused(&["rebase", "disk.bcow", "-b", "named.bcow", "--by-digest"]);
    refused(&words(
        "rebase --unsafe disk.bcow -b named.bcow --by-digest",
    ));
    assert!(!sandbox.path("new.bcow").exists());
    // A disk that another version made.
    let digest = bcow_oci::Digest::of(&sandbox.read("named.bcow"));
    let hex = digest.hex();
    let options = bcow::OpenOptions::default();
    let mut open = std::fs::File::options();
    let file = open.read(true).write(true);
    let file = file.open(sandbox.path("disk.bcow")).unwrap();
    let entry = bcow::format::BackingEntry {
        name: bcow::format::BackingName::Digest(digest.sha256().unwrap()),
        size: 1 << 20,
    };
    let shown: std::sync::Arc<dyn bcow::BlockDevice> = std::sync::Arc::new(vec![0; 1 << 20]);
    let file = std::sync::Arc::new(file);
    bcow::operation::rebase_reference(file, Some((entry, shown)), &options).unwrap();
    std::fs::create_dir(sandbox.path("store")).unwrap();
    std::fs::rename(sandbox.path("named.bcow"), sandbox.path("store").join(hex)).unwrap();
    let over = "is over base.bcow, and below such a file bcow looks up only digests";
    for args in [
        &["fsck", "--store=store", "disk.bcow"][..],
        &["convert", "--store=store", "disk.bcow", "raw:out"],
        &["resize", "--store=store", "disk.bcow", "2M"],
    ] {
        let shown = sandbox.shown(args);
        assert!(shown.contains(over), "{shown}");
        assert!(!shown.ends_with("--- exit status 0\n"), "{shown}");
    }
    let shown = sandbox.shown(&["fsck", "--store=store", "disk.bcow"]);
    assert!(shown.contains("error backing-unreadable: "), "{shown}");
    assert_eq!(shown.matches("error backing-").count(), 1, "{shown}");
}

#[test]
fn a_disk_in_a_new_file_finds_its_backing_or_is_not_written() {
    let sandbox = chain();
    std::fs::create_dir(sandbox.path("sub")).unwrap();
    for command in [&["seal"][..], &["compact"], &["commit"]] {
        let output = match command {
            ["commit"] => &["sub/new.bcow"][..],
            _ => &["-o", "sub/new.bcow"],
        };
        let shown = sandbox.shown(&[command, &["disk.bcow"], output].concat());
        assert!(shown.contains("it would not find its backing: "), "{shown}");
        assert!(!sandbox.path("sub/new.bcow").exists(), "{shown}");
        sandbox.ok(&[command, &["disk.bcow", "--backing-dir=."], output].concat());
        std::fs::remove_file(sandbox.path("sub/new.bcow")).unwrap();
    }
}

#[test]
fn commands_report_changes_to_disks() {
    let sandbox = chain();
    snapshot!(shown(
        &sandbox,
        &[
            &["create", "-s", "64M", "new.bcow"],
            &["resize", "new.bcow", "1M"],
            &["resize", "new.bcow", "1M", "--shrink"],
            &["rebase", "new.bcow", "-b", "old.bcow"],
            &["commit", "disk.bcow", "layer.bcow"],
            &["commit", "disk.bcow"],
            &["seal", "disk.bcow", "--flatten", "-o", "alone.bcow"],
            &["seal", "disk.bcow"],
            &["seal", "disk.bcow"],
            &["convert", "new.raw", "x.bcow"],
            &["convert", "raw:missing", "x.bcow"],
            &["create", "-b", "missing.bcow", "x.bcow"],
            &["create", "-b", "new.raw", "x.bcow"],
        ],
    ));
}

#[test]
fn fsck_finds_a_backing_that_is_missing_or_has_changed() {
    let sandbox = chain();
    sandbox.ok(&["create", "-q", "-b", "disk.bcow", "top.bcow"]);
    let fsck = |name| shown(&sandbox, &[&["fsck", "--data", name]]);
    assert!(fsck("top.bcow").contains("--- exit status 0"));
    std::fs::rename(sandbox.path("base.bcow"), sandbox.path("moved.bcow")).unwrap();
    for name in ["disk.bcow", "top.bcow"] {
        let text = fsck(name);
        let missing = "error backing-missing: backing table: backing base.bcow is not in";
        assert!(text.contains(missing), "{text}");
        assert!(text.contains("--- exit status 4"), "{text}");
    }
    std::fs::copy(sandbox.path("old.bcow"), sandbox.path("base.bcow")).unwrap();
    let text = fsck("disk.bcow");
    assert!(
        text.contains("error backing-entry: backing table: backing base.bcow"),
        "{text}"
    );
    assert!(text.contains("--- exit status 4"), "{text}");
}

#[test]
fn compact_into_a_new_file_only_reads_the_disk() {
    if !is_root() {
        return missing("root", &"to run as another user");
    }
    let sandbox = chain();
    sandbox.open_to_others();
    std::fs::create_dir(sandbox.path("out")).unwrap();
    let everyone = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(sandbox.path("out"), everyone).unwrap();
    for name in ["disk.bcow", "base.bcow"] {
        let readable = std::fs::Permissions::from_mode(0o644);
        std::fs::set_permissions(sandbox.path(name), readable).unwrap();
    }
    let compact = |args: &[&str]| {
        let mut command = sandbox.command_as(1, &[&["compact", "disk.bcow"], args].concat());
        command.output().unwrap()
    };
    assert_eq!(compact(&[]).status.code(), Some(1));
    let output = compact(&["-o", "out/new.bcow", "--backing-dir=."]);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let sealed = shown(&sandbox, &[&["compact", "base.bcow", "-o", "other.bcow"]]);
    assert!(sealed.contains("it is not a writable disk"), "{sealed}");
}

#[test]
fn disk_in_an_unsupported_format_is_not_called_raw() {
    let sandbox = Sandbox::new();
    let at_64 = [&[0; 64][..], b"\x7f\x10\xda\xbe"].concat();
    for (name, start) in [
        ("a.vmdk", &b"KDMV"[..]),
        ("a.vdi", &at_64),
        ("a.vhdx", b"vhdxfile"),
        ("a.vhd", b"conectix"),
    ] {
        sandbox.write(name, start);
        let text = shown(&sandbox, &[&["convert", name, "out.bcow"]]);
        assert!(!text.contains("raw:"), "{text}");
        let hint = format!("`qemu-img convert -O qcow2 {name} DISK.qcow2`");
        assert!(text.contains(&hint), "{text}");
    }
}

#[test]
fn server_does_not_take_itself_for_another_writer() {
    let sandbox = chain();
    for names in [["disk.bcow", "disk.bcow"], ["disk.bcow", "./disk.bcow"]] {
        let text = shown(&sandbox, &[&["serve", "--socket=s", names[0], names[1]]]);
        assert!(text.contains("are one disk"), "{text}");
        assert!(text.contains("--- exit status 2"), "{text}");
    }
}
