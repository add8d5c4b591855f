//! Findings of a check, and valid states that must give none.

use std::fs;
use std::os::fd::AsFd;

use bcow_union::NodeId;
use bcow_union::fs::UnionFs;
use bcow_union::offline::Scope;
use bcow_union::offline::check::{Place, Severity};
use bcow_union::testing::upper::{
    Attribute, Mark, Marks, Namespace, OVERRIDE, PartialMark, XattrMode,
};
use rustix::io::Errno;

use crate::fixture::{Union, closed, open_many};
use crate::host::make_whiteout;
use crate::unmounted::partial;

#[test]
fn a_promotion_that_was_cut_short_is_no_damage() {
    let Some(union) = partial() else { return };
    let file = fs::File::open(union.host("large")).unwrap();
    let at = Attribute::Open(file.as_fd());
    let set = |mark: PartialMark| {
        let set = Mark::Partial.set(at, Namespace::Trusted, &mark.encode());
        set.unwrap();
    };
    let mark = Marks::read(at, Namespace::Trusted)
        .unwrap()
        .partial
        .unwrap();
    assert!(mark.lower_limit > 8192);
    assert!(Mark::Metacopy.clear(at, Namespace::Trusted).unwrap());
    assert_eq!(union.found(), ["upper-mark-misplaced"]);
    // No block is missing: only the first two could come from the image, and both are stored.
    let lower_limit = 8192;
    set(PartialMark {
        lower_limit,
        ..mark
    });
    union.assert_sound();
    set(PartialMark {
        lower_limit: 8193,
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

#[test]
fn packed_partial_of_an_earlier_version_is_refused_and_named() {
    const MESSAGE: &str = "it is a packed partial file, a form that this version does not read; \
                           commit the upper with the version of bcow that wrote it";
    let Some(mut union) = partial() else { return };
    let name = Mark::Partial.name(Namespace::Trusted);
    let file = fs::File::open(union.host("large")).unwrap();
    let at = Attribute::Open(file.as_fd());
    let mut mark = at.get(name).unwrap().unwrap();
    mark[1] = 2;
    let checksum = bcow_format::crc32c(&mark[..36]);
    mark[36..].copy_from_slice(&checksum.to_le_bytes());
    at.set(name, &mark, XattrMode::Any).unwrap();
    // Such an upper does not say which form its partial files have.
    let record = union.host(".bcow/instance.json");
    let forms = |text: &str| text.matches("\"sketches\":\"sparse\",").count();
    let text = fs::read_to_string(&record).unwrap();
    assert_eq!(forms(&text), 1);
    fs::write(&record, text.replace("\"sketches\":\"sparse\",", "")).unwrap();

    let mounted = UnionFs::open(union.lower(), &union.upper(), "a test", &union.options);
    let expected = format!("{}: {MESSAGE}", union.host("large").display());
    assert_eq!(mounted.err().unwrap().to_string(), expected);
    let error = union.try_changes(Scope::Layer).err().unwrap();
    assert_eq!(error.path, b"large");
    assert_eq!(error.problem.to_string(), MESSAGE);
    let report = union.checked();
    let found = &report.findings[0];
    assert_eq!(found.code, "upper-mark");
    assert_eq!(found.place, Place::Path(b"large"[..].into()));
    assert_eq!(found.message, MESSAGE);
    union.repair();
    assert_eq!(at.get(name).unwrap().unwrap(), mark);

    // An upper without one is mounted, and the next mount does not look again.
    let aside = union.directory().join("aside");
    fs::rename(union.host("large"), &aside).unwrap();
    union.open();
    union.close();
    assert_eq!(forms(&fs::read_to_string(&record).unwrap()), 1);
    fs::rename(&aside, union.host("large")).unwrap();
    union.open();
    let found = union.fs().lookup(NodeId::ROOT, b"large");
    assert_eq!(found.err(), Some(Errno::IO));
    union.close();
}
