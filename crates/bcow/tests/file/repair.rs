//! Repair: it restores what it can, and leaves other damage unchanged.

use std::fs;
use std::sync::Arc;

use bcow::check::{CheckOptions, Repair, Report, Severity, check, repair};
use bcow::{BlockDevice, Image, MemoryStorage, OpenOptions, Storage};

use crate::vectors::{folder, vectors};

fn vector(name: &str) -> Arc<MemoryStorage> {
    let path = folder(name).with_extension("bcow");
    Arc::new(MemoryStorage::new(fs::read(path).unwrap()))
}

fn report(storage: &Arc<MemoryStorage>) -> Report {
    check(storage.clone(), &CheckOptions::FULL).unwrap()
}

fn errors(storage: &Arc<MemoryStorage>) -> Vec<&'static str> {
    let findings = report(storage).findings.into_iter();
    let errors = findings.filter(|finding| finding.severity == Severity::Error);
    errors.map(|finding| finding.code).collect()
}

/// Each sector of the address space as a reader gets it; `None` for unreadable sectors.
fn content(storage: &Arc<MemoryStorage>) -> Option<Vec<Option<Vec<u8>>>> {
    let image = Image::open_storage(storage.clone(), &OpenOptions::default()).ok()?;
    let sectors = (0..image.size().min(8 << 20)).step_by(4096).map(|at| {
        let mut sector = vec![0; 4096];
        let read = image.read_at(at, &mut sector);
        read.ok().map(|()| sector)
    });
    Some(sectors.collect())
}

#[test]
fn no_repair_changes_what_a_file_shows() {
    let mut repaired = 0;
    for path in [vectors("valid"), vectors("invalid")].concat() {
        let name = path.display();
        let storage = Arc::new(MemoryStorage::new(fs::read(&path).unwrap()));
        let (before, shown, found) = (storage.to_vec(), content(&storage), errors(&storage));
        let done = repair(storage.clone()).unwrap();
        let left = errors(&storage);
        assert!(left.is_empty() || left == found, "{name}: {left:?}");
        if done.is_empty() {
            assert!(storage.to_vec() == before, "{name}");
        }
        if shown.is_some() {
            assert!(content(&storage) == shown, "{name}: {done:?}");
        }
        repaired += usize::from(!done.is_empty());
        assert_eq!(repair(storage).unwrap(), [], "{name}: repaired twice");
    }
    assert!(repaired > 25, "{repaired}");
}

#[test]
fn a_slot_is_as_it_was() {
    for (name, slot) in [("use-image", 0), ("use-image", 1), ("merkle-two-levels", 0)] {
        let storage = vector(&format!("valid/{name}"));
        let before = storage.to_vec();
        storage.write_at(slot * 512 + 70, &[0xFF; 9]).unwrap();
        assert_eq!(report(&storage).findings[0].code, "header-slot");
        assert_eq!(repair(storage.clone()).unwrap().len(), 1);
        assert_eq!(storage.to_vec(), before, "{name}");
    }
}

#[test]
fn a_free_list_is_made_anew() {
    for name in [
        "invalid/free-list-crc",
        "invalid/free-list-overlapping",
        "invalid/overlap-free-list-and-block",
        "invalid/overlap-free-list-and-log",
        "valid/free-list-leak",
    ] {
        let storage = vector(name);
        assert!(!report(&storage).findings.is_empty(), "{name}");
        assert!(!repair(storage.clone()).unwrap().is_empty(), "{name}");
        let after = report(&storage);
        assert_eq!(after.findings, [], "{name}");
        assert_eq!(after.writable.unwrap().leaked_bytes, 0, "{name}");
    }
}

#[test]
fn records_go_into_the_tables_only_with_another_repair() {
    for name in ["log-two-records", "log-only-without-its-block"] {
        let storage = vector(&format!("valid/{name}"));
        let before = storage.to_vec();
        assert_eq!(repair(storage.clone()).unwrap(), [], "{name}");
        assert_eq!(storage.to_vec(), before, "{name}");
    }
    let storage = vector("valid/free-list-used-by-record");
    let done = repair(storage.clone()).unwrap();
    assert_eq!(done, [Repair::LostBytes(4096), Repair::Records(1)]);
    assert!(done[0].is_of_damage() && !done[1].is_of_damage());
    assert!(done.iter().all(Repair::changes_identity));
    assert_eq!(
        done[1].to_string(),
        "1 record of the log is in the tables now"
    );
    assert_eq!(report(&storage).writable.unwrap().records, 0);
}

#[test]
fn contradictions_are_left_alone() {
    for name in [
        "overlap-two-blocks",
        "overlap-two-records",
        "record-lost-at-first",
        "record-padding",
        "table-crc-below-records",
    ] {
        let storage = vector(&format!("invalid/{name}"));
        let before = storage.to_vec();
        assert_eq!(repair(storage.clone()).unwrap(), [], "{name}");
        assert_eq!(storage.to_vec(), before, "{name}");
    }
}
