//! The destination appears complete or not at all.

use std::path::Path;

use bcow_oci::{ConvertError, ConvertOptions, Source, TarInput, convert};
use bcow_testkit::{changed, lacks, umount};

use crate::support::{Layout, options};
use bcow_testkit::tar::Tar;

fn layout() -> Layout {
    Layout::of(&[Tar::new().file("a", "content").done()])
}

fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(directory)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn an_existing_image_is_replaced_only_by_a_complete_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    std::fs::write(&path, "old").unwrap();
    let missing = Source::Tar(TarInput::File("/no/such.tar".into()));
    assert!(convert(&missing, &path, &options(), &()).is_err());
    let broken = Layout::of(&[b"x".repeat(512)]);
    assert!(convert(&broken.source(None), &path, &options(), &()).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), b"old");
    convert(&layout().source(None), &path, &options(), &()).unwrap();
    assert!(std::fs::read(&path).unwrap().len() > 4096);
    assert_eq!(names(dir.path()), ["image"]);
}

#[test]
fn a_full_disk_is_named_and_leaves_nothing() {
    // Only root can make a small file system.
    if lacks("root", rustix::process::geteuid().is_root()) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mount = |args: &[&str]| {
        std::process::Command::new(args[0])
            .args(&args[1..])
            .arg(dir.path())
            .output()
            .is_ok_and(|output| output.status.success())
    };
    let mounted = mount(&["mount", "-t", "tmpfs", "-o", "size=256k", "none"]);
    if lacks("the right to mount a tmpfs", mounted) {
        return;
    }
    let noise: Vec<u8> = (0..1_000_000u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 7) as u8 ^ (i >> 9) as u8)
        .collect();
    let layout = Layout::of(&[Tar::new().file("noise", noise).done()]);
    let path = dir.path().join("image");
    let options = ConvertOptions {
        compression: bcow_oci::Compression::None,
        ..options()
    };
    let result = convert(&layout.source(None), &path, &options, &());
    let left = names(dir.path());
    umount(dir.path());
    let error = result.unwrap_err();
    assert!(matches!(error, ConvertError::Write { .. }), "{error}");
    assert!(error.to_string().starts_with("cannot write"), "{error}");
    assert!(error.hint().unwrap().starts_with("free space in "));
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn wrong_options_are_refused_before_anything_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |options: &ConvertOptions| {
        let path = dir.path().join("x");
        let error = convert(&layout().source(None), &path, options, &()).unwrap_err();
        assert!(matches!(error, ConvertError::Options(_)), "{error}");
        error.to_string()
    };
    let block = changed(options(), |new| new.block_bytes = Some(5000));
    assert_eq!(
        refused(&block),
        "block size 5000: must be a power of two from 4096 to 4194304"
    );
    let level = ConvertOptions {
        compression: bcow_oci::Compression::Zstd { level: 23 },
        ..options()
    };
    insta::assert_snapshot!(refused(&level), @"zstd has no level 23, only -7 to 22");
    assert!(names(dir.path()).is_empty());
}
