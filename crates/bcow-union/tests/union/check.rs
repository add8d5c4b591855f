//! Findings of a check, and valid states that must give none.

use std::fs;
use std::os::fd::AsFd;

use bcow_union::offline::Scope;
use bcow_union::offline::check::{Place, Severity};
use bcow_union::testing::upper::{
    Attribute, Mark, Marks, Namespace, OVERRIDE, SketchKind, SketchMark, XattrMode,
};
use bcow_union::{NodeId, SketchChoice};
use rustix::io::Errno;

use crate::fixture::{Union, closed, open_many, open_with, with_sketches};
use crate::host::make_whiteout;
use crate::image::noise;
use crate::unmounted::sketched;

#[test]
fn a_promotion_that_was_cut_short_is_no_damage() {
    let Some(union) = sketched() else { return };
    let file = fs::File::open(union.host("large")).unwrap();
    let at = Attribute::Open(file.as_fd());
    let set = |mark: SketchMark| {
        let set = Mark::Sketch.set(at, Namespace::Trusted, &mark.encode());
        set.unwrap();
    };
    let mark = Marks::read(at, Namespace::Trusted).unwrap().sketch.unwrap();
    assert!(mark.lower_limit > 8192);
    assert!(Mark::Metacopy.clear(at, Namespace::Trusted).unwrap());
    assert_eq!(union.found(), ["upper-mark-misplaced"]);
    // No block is missing: only the first two could come from the image, and both are stored.
    let lower_limit = 8192;
    set(SketchMark {
        lower_limit,
        ..mark
    });
    union.assert_sound();
    set(SketchMark {
        lower_limit: 8193,
        ..mark
    });
    assert_eq!(union.found(), ["upper-mark-misplaced"]);
    // overlayfs cannot read a packed sketch either.
    set(SketchMark {
        kind: SketchKind::Packed,
        lower_limit: 0,
        map_exists: false,
        size: 8192,
        ..mark
    });
    assert_eq!(union.found(), ["upper-mark-misplaced"]);
}

#[test]
fn no_number_of_warnings_is_an_error_or_hides_one() {
    let Some(mut union) = open_many() else { return };
    union.close();
    for index in 0..1003 {
        make_whiteout(&union.host(&format!("white{index}")));
    }
    let report = union.checked();
    assert!(report.is_sound());
    assert_eq!(report.findings.len(), 1000);
    let file = fs::File::create(union.host("zzz")).unwrap();
    let at = Attribute::Open(file.as_fd());
    at.set(b"trusted.overlay.metacopy", b"?", XattrMode::Any)
        .unwrap();
    let report = union.checked();
    assert!(!report.is_sound());
    let is_error = |code: &str| {
        let mut found = report.findings.iter();
        found.any(|found| found.severity == Severity::Error && found.code == code)
    };
    assert!(is_error("upper-mark"), "{:#?}", report.findings.last());
}

#[test]
fn internal_directory_of_another_type_is_reported() {
    for name in [".bcow/index", ".bcow/maps", ".bcow/work"] {
        let Some(mut union) = open_many() else { return };
        union.close();
        fs::remove_dir_all(union.host(name)).unwrap();
        fs::write(union.host(name), "x").unwrap();
        let report = union.checked();
        assert_eq!(union.found(), ["upper-host"], "{name}");
        assert_eq!(report.findings[0].place, Place::Path(name.into()));
        if name == ".bcow/index" {
            let error = union.try_changes(Scope::Layer).err().unwrap();
            assert_eq!(error.to_string(), "cannot read \".bcow/index\"");
        }
    }
}

#[test]
fn owner_type_that_the_host_file_cannot_represent_is_found() {
    let Some(mut union) = closed() else { return };
    union.begin_with_owners_in_attributes();
    fs::write(union.host("file"), "").unwrap();
    fs::create_dir(union.host("directory")).unwrap();
    let keep = |union: &Union, name: &str, kind: &str| {
        let value = format!("1:2:0644:{kind}");
        let file = fs::File::open(union.host(name)).unwrap();
        let at = Attribute::Open(file.as_fd());
        at.set(OVERRIDE, value.as_bytes(), XattrMode::Any).unwrap();
    };
    for (name, kind, fits) in [
        ("file", "file", true),
        ("file", "pipe", true),
        ("file", "block-7-0", true),
        ("file", "dir", false),
        ("file", "symlink", false),
        ("directory", "dir", true),
        ("directory", "file", false),
        ("directory", "char-1-3", false),
    ] {
        keep(&union, "file", "file");
        keep(&union, "directory", "dir");
        keep(&union, name, kind);
        union.open();
        let found = union.fs().lookup(NodeId::ROOT, name.as_bytes());
        assert_eq!(found.err(), (!fits).then_some(Errno::IO), "{name} {kind}");
        union.close();
        assert_eq!(union.checked().is_sound(), fits, "{name} {kind}");
        let is_found = union.found().contains(&"upper-mark-misplaced");
        assert_eq!(is_found, !fits, "{name} {kind}");
        let changes = union.try_changes(Scope::Layer);
        assert_eq!(changes.is_ok(), fits, "{name} {kind}");
    }
}

/// Changes one byte of the block `bytes` in a host file.
fn damage(union: &Union, name: &str, bytes: &[u8]) {
    let path = union.host(name);
    let mut stored = fs::read(&path).unwrap();
    let at = stored.windows(64).position(|piece| piece == &bytes[..64]);
    stored[at.unwrap() + 100] ^= 1;
    fs::write(&path, stored).unwrap();
}

#[test]
fn damage_in_a_packed_sketch_is_not_a_crash_after_a_clean_close() {
    let Some(mut union) = open_with(with_sketches(SketchChoice::Packed)) else {
        return;
    };
    let (first, second) = (noise(21, 4096), noise(22, 4096));
    let before = union.content("big");
    union.write("big", 0, &first);
    union.write("big", 8192, &second);
    union.sync("big");
    let running = fs::read(union.host("big")).unwrap();
    union.close();

    damage(&union, "big", &first);
    let report = union.checked_data();
    assert_eq!(report.findings[0].code, "upper-sketch-file");
    assert_eq!(report.cut_records, 0);
    union.open();
    let id = union.id("big");
    let read = |at| {
        let mut scratch = Vec::new();
        union.fs().read(id, at, 4096, &mut scratch, <[u8]>::to_vec)
    };
    assert_eq!(read(0), Err(Errno::IO));
    assert_eq!(read(8192), Ok(second));
    union.forget_all();
    union.close();

    // After a crash, the same damage looks like a flush that the crash cut short.
    fs::write(union.host("big"), running).unwrap();
    damage(&union, "big", &first);
    let report = union.checked_data();
    assert!(report.is_sound(), "{:#?}", report.findings);
    assert_eq!(report.cut_records, 1);
    union.open();
    assert!(union.content("big") == before);
    union.close();
}
