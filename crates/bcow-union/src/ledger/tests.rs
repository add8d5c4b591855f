//! Tests of the ledger alone.

use std::sync::Arc;

use super::node::CELL_BYTES;
use super::*;

fn record(id: u64, name: &[u8]) -> NodeRecord {
    NodeRecord {
        id,
        lower: id.is_multiple_of(2).then_some(id / 2),
        references: 1,
        parent: 1,
        host_inode: id + 100,
        kind: 8,
        flags: Flags::NONE,
        name: name.into(),
        is_place: false,
    }
}

fn read(ledger: &Ledger) -> Inherited {
    Ledger::read(ledger.descriptor().try_clone_to_owned().unwrap()).unwrap()
}

fn nodes(ledger: &Ledger) -> Vec<NodeRecord> {
    let mut nodes = read(ledger).nodes;
    nodes.sort_by_key(|node| (node.id, node.is_place));
    nodes
}

#[test]
fn records_come_back_with_names_of_all_lengths() {
    let ledger = Ledger::new(3).unwrap();
    let names: Vec<Vec<u8>> = (0..=255).map(|length| vec![b'n'; length]).collect();
    let records: Vec<NodeRecord> = (1..)
        .zip(&names)
        .map(|(id, name)| record(id, name))
        .collect();
    let mut entries: Vec<LedgerEntry> = records
        .iter()
        .map(|record| LedgerEntry::new(&ledger, record.clone()))
        .collect();
    assert_eq!(read(&ledger).generation, 3);
    assert_eq!(nodes(&ledger), records);
    // Freed records are used again.
    let end = ledger.file.metadata().unwrap().len();
    for _ in 0..3 {
        entries.truncate(100);
        assert_eq!(nodes(&ledger), records[..100]);
        entries.extend(
            records[100..]
                .iter()
                .map(|one| LedgerEntry::new(&ledger, one.clone())),
        );
        assert_eq!(nodes(&ledger), records);
    }
    assert_eq!(ledger.file.metadata().unwrap().len(), end);
}

#[test]
fn changes_of_a_record_come_back() {
    let ledger = Ledger::new(0).unwrap();
    let entry = LedgerEntry::new(&ledger, record(7, b"name"));
    entry.set_references(9);
    entry.set_host_inode(5);
    entry.set_flags(Flags::REMOVED | Flags::IN_BATCH, true);
    entry.set_flags(Flags::REMOVED, false);
    let mut expected = NodeRecord {
        references: 9,
        host_inode: 5,
        flags: Flags::IN_BATCH,
        ..record(7, b"name")
    };
    assert_eq!(nodes(&ledger), [expected.clone()]);
    // Both places, and then only the new one.
    let long = [b'l'; 200];
    let placing = entry.may_get(3, &long);
    let place = NodeRecord {
        parent: 3,
        name: long.into(),
        is_place: true,
        ..expected.clone()
    };
    assert_eq!(nodes(&ledger), [expected.clone(), place]);
    entry.set_place(3, &long);
    drop(placing);
    (expected.parent, expected.name) = (3, long.into());
    assert_eq!(nodes(&ledger), [expected.clone()]);
    // A change that fails.
    drop(entry.may_get(4, b"other"));
    assert_eq!(nodes(&ledger), [expected]);
    drop(entry);
    assert_eq!(nodes(&ledger), []);
}

#[test]
fn a_record_that_is_half_written_is_not_read() {
    let ledger = Ledger::new(0).unwrap();
    let entries = [7, 8].map(|id| LedgerEntry::new(&ledger, record(id, &[b'n'; 80])));
    // The name is there, and the first cell, which comes last, is not.
    let start = changes::END;
    ledger.file.write_all_at(&[1, 1], start).unwrap();
    assert_eq!(nodes(&ledger), [record(8, &[b'n'; 80])]);
    // Nothing of it was written, and the next record is there.
    ledger.file.write_all_at(&[0; 128], start).unwrap();
    assert_eq!(nodes(&ledger), [record(8, &[b'n'; 80])]);
    drop(entries);
}

#[test]
fn a_name_ends_in_the_cells_of_its_record() {
    let ledger = Ledger::new(0).unwrap();
    let entries = [7, 8].map(|id| LedgerEntry::new(&ledger, record(id, b"name")));
    ledger.file.write_all_at(&[17], changes::END + 4).unwrap();
    let error = Ledger::read(ledger.descriptor().try_clone_to_owned().unwrap()).unwrap_err();
    assert!(error.to_string().contains("damaged at cell 0"), "{error}");
    drop(entries);
}

/// More than is read at a time, with a part that was never written.
#[test]
fn records_of_many_pieces_come_back() {
    let ledger = Ledger::new(0).unwrap();
    let name = |id: u64| vec![b'n'; id as usize % 256];
    let many = 1..=20_000;
    let entries: Vec<LedgerEntry> = many
        .clone()
        .map(|id| LedgerEntry::new(&ledger, record(id, &name(id))))
        .collect();
    let end = ledger.file.metadata().unwrap().len();
    let hole = end.next_multiple_of(CELL_BYTES) + (3 << 20);
    ledger.cells.lock().end = hole;
    let last = LedgerEntry::new(&ledger, record(30_000, &[b'l'; 100]));
    let expected: Vec<NodeRecord> = many.map(|id| record(id, &name(id))).collect();
    let found = nodes(&ledger);
    assert_eq!(found[..20_000], expected);
    assert_eq!(found[20_000..], [record(30_000, &[b'l'; 100])]);
    drop((entries, last));
}

#[test]
fn ranges_stay_until_all_partials_are_flushed() {
    let ledger = Ledger::new(0).unwrap();
    ledger.written(5, 10..20);
    let pass = ledger.begin_pass();
    ledger.written(5, 30..40);
    pass.succeeded();
    assert_eq!(read(&ledger).written[&5], vec![30..40; 1]);
    // A pass that fails keeps everything.
    let _ = ledger.begin_pass();
    ledger.written(6, 0..1);
    let pass = ledger.begin_pass();
    ledger.written(7, 2..3);
    let written = read(&ledger).written;
    assert_eq!(
        (written[&5].len(), written[&6].len(), written[&7].len()),
        (1, 1, 1)
    );
    pass.succeeded();
    // Everything before the pass that failed is flushed. What came during it waits for the next.
    assert_eq!(read(&ledger).written.len(), 2);
    for _ in 0..2 {
        ledger.begin_pass().succeeded();
    }
    assert!(read(&ledger).written.is_empty());
    ledger.written(8, 0..u64::MAX);
    assert_eq!(read(&ledger).written[&8], vec![0..u64::MAX; 1]);
}

#[test]
fn the_last_begun_changes_are_remembered() {
    let ledger = Ledger::new(0).unwrap();
    let mut last = 0;
    for number in 1..=BEGUN + 2 {
        last = ledger.begin_change(number, number + 1000);
    }
    ledger.end_change(last);
    let begun = read(&ledger).begun;
    assert_eq!(begun.len() as u64, BEGUN - 1);
    assert!(!begun.contains_key(&2) && !begun.contains_key(&(BEGUN + 2)));
    assert_eq!(begun[&3].node, 1003);
}

#[test]
fn a_full_area_is_reported_and_refused() {
    let ledger = Ledger::new(0).unwrap();
    let place = || ledger.changes.place();
    while place().is_some() {}
    ledger.written(1, 0..1);
    let error = Ledger::read(ledger.descriptor().try_clone_to_owned().unwrap()).unwrap_err();
    assert!(error.to_string().contains("exhausted"), "{error}");
}

#[test]
fn another_version_is_refused() {
    let ledger = Ledger::new(0).unwrap();
    ledger.file.write_all_at(&[9], VERSION_AT).unwrap();
    let error = Ledger::read(ledger.descriptor().try_clone_to_owned().unwrap()).unwrap_err();
    assert!(error.to_string().contains("version 9"), "{error}");
}

#[test]
fn entries_can_be_changed_from_several_threads() {
    let ledger = Ledger::new(0).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let ledger = Arc::clone(&ledger);
            scope.spawn(move || {
                for round in 0..500 {
                    let id = thread * 1000 + round % 7 + 1;
                    let entry = LedgerEntry::new(&ledger, record(id, &[b'n'; 30]));
                    entry.set_place(2, &vec![b'm'; (round % 256) as usize]);
                    entry.set_references(round);
                }
            });
        }
    });
    assert_eq!(nodes(&ledger), []);
}

#[test]
fn backings_come_back_until_they_are_dropped() {
    let ledger = Ledger::new(0).unwrap();
    let backing = |node, kind, number| BackingRecord { node, kind, number };
    let records = [
        backing(7, BackingKind::Image, 70),
        backing(9, BackingKind::Upper, u32::MAX),
    ];
    let first = BackingEntry::new(&ledger, records[0]);
    let entry = LedgerEntry::new(&ledger, record(8, b"name"));
    let second = BackingEntry::new(&ledger, records[1]);
    assert_eq!(read(&ledger).backings, records);
    drop(first);
    assert_eq!(read(&ledger).backings, records[1..]);
    // A record of a node takes the free cell.
    let other = LedgerEntry::new(&ledger, record(10, b""));
    assert_eq!(nodes(&ledger), [record(8, b"name"), record(10, b"")]);
    assert_eq!(read(&ledger).backings.len(), 1);
    drop((entry, second, other));
    assert!(read(&ledger).backings.is_empty());
}
