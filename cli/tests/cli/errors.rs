//! Every error message, read as the user reads it.

use std::process::Stdio;

use bcow::format::crc32c;

use crate::support::{Sandbox, Tar, sample, snapshot, words};

/// Changes a field of both header slots and makes their checksums right again.
fn patch_header(sandbox: &Sandbox, name: &str, offset: usize, bytes: &[u8]) {
    sandbox.patch(name, |file| {
        for slot in [0, 512] {
            file[slot + offset..slot + offset + bytes.len()].copy_from_slice(bytes);
            file[slot + 12..slot + 16].fill(0);
            let crc = crc32c(&file[slot..slot + 512]);
            file[slot + 12..slot + 16].copy_from_slice(&crc.to_le_bytes());
        }
    });
}

#[test]
fn invalid_command_lines() {
    let sandbox = Sandbox::with_image();
    snapshot!(sandbox.all_shown(&[
        &["nonsense"],
        &["ls"],
        &["ls", "--bogus", "image.bcow"],
        &["-q", "-v", "ls", "image.bcow"],
        &["--color=maybe", "ls", "image.bcow"],
        &["fsck"],
        &["fsck", "--bogus", "image.bcow"],
        &["export", "image.bcow", "--to=vhd", "-o", "x"],
        &["export", "image.bcow", "--to=raw"],
        &["export", "image.bcow", "--to=oci", "-o", "x"],
        &["export", "image.bcow", "--to=oci:"],
        &["export", "image.bcow", "--to=oci:layout:x", "-o", "x"],
        &["export", "image.bcow", "--to=oci:layout", "--compress=lz4"],
        &words("export image.bcow --to=tar -o x --compress=gzip"),
        &["map", "--start=4Q", "image.bcow"],
        &["map", "--start=1T", "image.bcow"],
        &["completions", "tcsh"],
        &["extract", "image.bcow"],
        &["extract", "image.bcow", "a", "b", "c"],
        &["cat", "image.bcow"],
    ]));
}

#[test]
fn no_command_at_all_shows_the_help() {
    let output = Sandbox::new().run::<&str>(&[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(output.stdout.is_empty());
    assert!(String::from_utf8_lossy(&output.stderr).contains("Commands:"));
}

#[test]
fn files_that_are_no_images() {
    let sandbox = Sandbox::new();
    sandbox.write("empty", b"");
    sandbox.write("short", b"BCoW");
    sandbox.write("text", "hello\n".repeat(1000).as_bytes());
    sandbox.write("sample.tar", &sample());
    sandbox.write("sample.gz", b"\x1f\x8b\x08 and so on");
    sandbox.write("disk.qcow2", b"QFI\xfb and so on");
    sandbox.write("root.squashfs", b"hsqs and so on");
    let mut erofs = vec![0; 8192];
    erofs[1024..1028].copy_from_slice(&[0xe2, 0xe1, 0xf5, 0xe0]);
    sandbox.write("root.erofs", &erofs);
    std::fs::create_dir(sandbox.path("directory")).unwrap();
    snapshot!(sandbox.all_shown(&[
        &["ls", "missing"],
        &["ls", "directory"],
        &["ls", "empty"],
        &["ls", "short"],
        &["inspect", "text"],
        &["cat", "sample.tar", "etc/motd"],
        &["map", "sample.gz"],
        &["extract", "disk.qcow2", "out"],
        &["export", "root.squashfs", "--to=raw", "-o", "out"],
        &["ls", "root.erofs"],
        &["fsck", "missing"],
        &["fsck", "directory"],
        &["fsck", "text"],
        &["fsck", "--json", "empty"],
    ]));
    assert!(!sandbox.path("out").exists());
}

#[test]
fn images_of_another_time() {
    let sandbox = Sandbox::with_image();
    sandbox.ok(&["convert", "-q", "sample.tar", "newer.bcow"]);
    // Section 3 of the specification: version at 8, incompatible features at 24.
    patch_header(&sandbox, "newer.bcow", 8, &2u16.to_le_bytes());
    patch_header(&sandbox, "image.bcow", 24, &(1u64 << 40).to_le_bytes());
    snapshot!(sandbox.all_shown(&[
        &["ls", "newer.bcow"],
        &["fsck", "newer.bcow"],
        &["ls", "image.bcow"],
        &["inspect", "image.bcow"],
        &["fsck", "image.bcow"],
    ]));
}

#[test]
fn paths_that_are_missing_or_of_another_type() {
    let sandbox = Sandbox::with_image();
    snapshot!(sandbox.all_shown(&[
        &["ls", "image.bcow", "/nowhere"],
        &["ls", "image.bcow", "etc/motd/below"],
        &["ls", "image.bcow", "etc/loop/x"],
        &["cat", "image.bcow", "etc/loop"],
        &["cat", "image.bcow", "etc"],
        &["cat", "image.bcow", "dev/null"],
        &["cat", "image.bcow", "etc/motd", "no\u{1b}[31m\nname"],
        &["extract", "image.bcow", "nowhere", "out"],
    ]));
}

#[test]
fn extract_where_it_cannot() {
    let sandbox = Sandbox::with_image();
    std::fs::create_dir_all(sandbox.path("taken/etc")).unwrap();
    sandbox.write("taken/etc/passwd", b"mine");
    sandbox.write("file", b"");
    snapshot!(sandbox.all_shown(&[
        &["extract", "image.bcow", "etc", "taken/etc"],
        &["extract", "image.bcow", "file"],
        &["extract", "image.bcow", "not/there"],
        &["extract", "image.bcow", "etc/motd", "file"],
    ]));
    assert_eq!(sandbox.read("taken/etc/passwd"), b"mine");
}

#[test]
fn export_where_it_cannot() {
    let sandbox = Sandbox::with_image();
    std::fs::create_dir(sandbox.path("directory")).unwrap();
    snapshot!(sandbox.all_shown(&[
        &["export", "image.bcow", "--to=raw", "-o", "directory"],
        &["export", "image.bcow", "--to=raw", "-o", "not/there"],
        &["export", "image.bcow", "--to=raw", "-o", "/dev/null"],
        &["export", "image.bcow", "--to=raw", "-o", ".."],
    ]));
}

#[test]
fn man_where_it_cannot() {
    let sandbox = Sandbox::new();
    sandbox.write("file", b"");
    snapshot!(sandbox.shown(&["man", "file"]));
}

#[test]
fn convert_from_invalid_sources() {
    let sandbox = Sandbox::new();
    sandbox.write("sample.tar", &sample());
    sandbox.write("text.tar", "hello\n".repeat(1000).as_bytes());
    sandbox.write("cut.tar", &sample()[..60_000]);
    sandbox.write("unended.tar", &sample()[..sample().len() - 1024]);
    sandbox.write(
        "bad.tar.gz",
        b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03 and so on",
    );
    sandbox.write("out.tar", &Tar::new().file("../../x", b"").finish());
    sandbox.write("link.tar", &Tar::new().hardlink("a", "nothing").finish());
    let before = sandbox.names();
    snapshot!(sandbox.all_shown(&[
        &["convert", "sample", "x.bcow"],
        &["convert", "docker://Debian", "x.bcow"],
        &["convert", "missing.tar", "x.bcow"],
        &["convert", "oci:missing", "x.bcow"],
        &["convert", "dir:missing", "x.bcow"],
        &["convert", "text.tar", "x.bcow"],
        &["convert", "cut.tar", "x.bcow"],
        &["convert", "unended.tar", "x.bcow"],
        &["convert", "bad.tar.gz", "x.bcow"],
        &["convert", "out.tar", "x.bcow"],
        &["convert", "link.tar", "x.bcow"],
        &["convert", "--max-entries=5", "sample.tar", "x.bcow"],
        &words("convert --max-entries=2147483649 sample.tar x.bcow"),
        &["convert", "--max-size=100K", "sample.tar", "x.bcow"],
    ]));
    assert_eq!(sandbox.names(), before);
}

#[test]
fn convert_with_invalid_options() {
    let sandbox = Sandbox::new();
    sandbox.write("sample.tar", &sample());
    std::fs::create_dir(sandbox.path("directory")).unwrap();
    let before = sandbox.names();
    let mut shown = sandbox.all_shown(&[
        &["convert", "sample.tar"],
        &["convert", "sample.tar", "-"],
        &["convert", "sample.tar", "directory"],
        &["convert", "sample.tar", "not/there.bcow"],
        &["convert", "--platform=linux", "sample.tar", "x.bcow"],
        &["convert", "--block-size=5K", "sample.tar", "x.bcow"],
        &["convert", "--compress=lz4", "sample.tar", "x.bcow"],
        &["convert", "--compress=zstd:99", "sample.tar", "x.bcow"],
        &words("convert --plain --compress=zstd sample.tar x.bcow"),
        &["convert", "-j0", "sample.tar", "x.bcow"],
    ]);
    let output = sandbox
        .command(&["convert", "sample.tar", "x.bcow"])
        .env("SOURCE_DATE_EPOCH", "yesterday")
        .output()
        .unwrap();
    shown += "\n";
    shown += &crate::support::show(&["convert", "sample.tar", "x.bcow"], &output);
    snapshot!(shown);
    // RFC 3339 ends with the year 9999.
    let output = sandbox
        .command(&["convert", "sample.tar", "x.bcow"])
        .env("SOURCE_DATE_EPOCH", "253402300800")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("not in the years 0 to 9999"), "{text}");
    assert_eq!(sandbox.names(), before);
}

#[test]
fn names_in_the_wrong_place_lead_to_the_right_command() {
    let sandbox = Sandbox::new();
    sandbox.write("root.tar", &sample());
    sandbox.layout("layout", "x", &["root.tar"]);
    let before = sandbox.names();
    snapshot!(sandbox.all_shown(&[
        // Commands that take a BCoW image.
        &["ls", "tar:root.tar"],
        &["mount", "tar:root.tar", "mnt"],
        &["inspect", "docker-archive:missing.tar"],
        &["fsck", "oci-archive:missing.tar"],
        &["create", "-b", "raw:disk.img", "new.bcow"],
        &["extract", "dir:root", "out"],
        &["copy", "docker-daemon:box:1", "oci:new"],
        &["ls", "other:name"],
        // Sources of a conversion.
        &["convert", "missing.bcow", "oci:new"],
        &["convert", "debian:12", "x.bcow"],
        &["convert", "docker-daemon:box:1", "x.bcow"],
        &["convert", "containerd-cache:cache", "x.bcow"],
        &["convert", "oci:root.tar", "x.bcow"],
        &["convert", "dir:root.tar", "x.bcow"],
        &["convert", "tar:layout", "x.bcow"],
        &["convert", "oci-archive:layout", "x.bcow"],
        &["convert", "oci-archive:root.tar", "x.bcow"],
        &["convert", "docker-archive:root.tar", "x.bcow"],
        &["convert", "root.tar", "layout"],
    ]));
    assert_eq!(sandbox.names(), before);
}

#[test]
fn full_directory_for_temporary_files_is_named() {
    let sandbox = Sandbox::new();
    sandbox.write("root.tar", &sample());
    sandbox.layout("layout", "x", &["root.tar"]);
    let script = "mkdir small && mount -t tmpfs -o size=64k none small || exit 99
                  tar -C layout -czf image.tgz . || exit 99
                  TMPDIR=small exec \"$1\" convert oci-archive:image.tgz x.bcow";
    let Some(output) = sandbox.in_namespace(script, &[]) else {
        return;
    };
    let text = String::from_utf8(output.stderr).unwrap();
    let expected = "error: cannot write the uncompressed archive to a file in small\n  caused by: \
                    No space left on device\nhint: free space in small, the directory for \
                    temporary files, or set TMPDIR to another one\n";
    assert_eq!(text, expected);
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let sandbox = Sandbox::with_image();
    for args in [
        &["ls", "-laR", "image.bcow"][..],
        &["cat", "image.bcow", "var/data"],
        &["map", "image.bcow"],
        &["inspect", "--json", "image.bcow"],
        &["export", "image.bcow", "--to=raw", "-o", "-"],
        &["export", "image.bcow", "--to=tar", "-o", "-"],
        &["completions", "bash"],
        &["--help"],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = sandbox
            .command(args)
            .stdout(writer)
            .stderr(Stdio::piped())
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(141), "{args:?}");
        assert!(
            output.stderr.is_empty(),
            "{args:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
}

#[test]
fn colour_is_used_where_it_is_asked_for() {
    let sandbox = Sandbox::new();
    let shown = |args: &[&str]| String::from_utf8(sandbox.run(args).stderr).unwrap();
    assert!(shown(&["--color=always", "ls", "missing"]).starts_with("\x1b[1;31merror:\x1b[0m "));
    assert!(shown(&["ls", "missing"]).starts_with("error: "));
}

#[test]
fn logs_go_to_standard_error_where_they_are_asked_for() {
    let sandbox = Sandbox::with_image();
    let output = sandbox
        .command(&["ls", "image.bcow"])
        .env("BCOW_LOG", "trace, what is this")
        .output()
        .unwrap();
    assert!(output.status.success());
    assert_eq!(output.stdout, sandbox.ok(&["ls", "image.bcow"]));
}
