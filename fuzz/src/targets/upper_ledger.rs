//! The ledger of a mount with an upper, read by the process that takes over.
//!
//! If the first byte is even, the input is the content of the ledger; else the ledger is that of a
//! union which has done what the first byte says, with changes of its bytes. Records are written as
//! they were read, and a union takes over with them. Without a change of a byte, all nodes and all
//! data are there.

use std::fs::{File, remove_dir_all};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use bcow_erofs::reader::Filesystem;
use bcow_union::fs::{Caller, LowerImage, New, Privileges, RenameMode, UnionFs};
use bcow_union::testing::ledger::{BackingEntry, Inherited, Ledger, LedgerEntry};
use bcow_union::{NodeId, SyncPolicy, UnionOptions};
use rustix::fs::MemfdFlags;

const HEADER_BYTES: usize = 4096;
const AREA_BYTES: u64 = 64 << 20;
/// Where the cells begin.
const CELLS_AT: u64 = HEADER_BYTES as u64 + 2 * AREA_BYTES;
const CELL_BYTES: usize = 64;
/// The longest name that fits a record.
const MOST_NAME_BYTES: usize = 5 * CELL_BYTES - 48;
/// In an area of changes, only this many bytes are used.
const CHANGES_BYTES: usize = 4096;

/// The parts of a ledger that are not empty.
struct Parts {
    header: Vec<u8>,
    areas: [Vec<u8>; 2],
    cells: Vec<u8>,
}

impl Parts {
    /// The header of an empty ledger.
    fn empty() -> Self {
        let ledger = Ledger::new(7).expect("a ledger");
        Parts::of(&File::from(
            ledger
                .descriptor()
                .try_clone_to_owned()
                .expect("a descriptor"),
        ))
    }

    fn of(file: &File) -> Self {
        let read = |at: u64, bytes: usize| {
            let mut content = vec![0; bytes];
            file.read_exact_at(&mut content, at).expect("a part");
            content
        };
        let end = file.metadata().expect("a length").len();
        let area = |side: u64| read(HEADER_BYTES as u64 + side * AREA_BYTES, CHANGES_BYTES);
        Parts {
            header: read(0, HEADER_BYTES),
            areas: [area(0), area(1)],
            cells: read(CELLS_AT, (end - CELLS_AT) as usize),
        }
    }

    fn file(&self) -> OwnedFd {
        let file = rustix::fs::memfd_create("fuzz", MemfdFlags::CLOEXEC);
        let file = File::from(file.expect("a file in memory"));
        file.set_len(CELLS_AT).expect("a length");
        let [first, second] = &self.areas;
        for (bytes, at) in [
            (&self.header, 0),
            (first, HEADER_BYTES as u64),
            (second, HEADER_BYTES as u64 + AREA_BYTES),
            (&self.cells, CELLS_AT),
        ] {
            if bytes.iter().any(|&byte| byte != 0) {
                file.write_all_at(bytes, at).expect("written");
            }
        }
        file.set_len(CELLS_AT + self.cells.len() as u64)
            .expect("a length");
        file.into()
    }

    /// Changes bytes as `changes` says: each change begins with a byte that says how. What is left
    /// goes behind the cells.
    fn change(&mut self, mut changes: &[u8]) {
        while let Some((&how, rest)) = changes.split_first() {
            match (how, rest) {
                (0, [low, high, value, after @ ..]) => {
                    let at = usize::from(u16::from_le_bytes([*low, *high]));
                    self.header[at % HEADER_BYTES] = *value;
                    changes = after;
                }
                (1, [low, high, value, after @ ..]) if !self.cells.is_empty() => {
                    let at = usize::from(u16::from_le_bytes([*low, *high]));
                    let length = self.cells.len();
                    self.cells[at % length] = *value;
                    changes = after;
                }
                (2, [at, value, after @ ..]) => {
                    let (side, at) = (usize::from(at & 1), usize::from(at >> 1));
                    self.areas[side][at * 8] = *value;
                    changes = after;
                }
                (3, [at, record @ ..]) if record.len() >= 32 => {
                    let (record, after) = record.split_at(32);
                    let (side, at) = (usize::from(at & 1), usize::from(at >> 1));
                    self.areas[side][at * 32 % CHANGES_BYTES..][..32].copy_from_slice(record);
                    changes = after;
                }
                (4, [cells, after @ ..]) => {
                    self.cells.truncate(usize::from(*cells) * CELL_BYTES / 2);
                    changes = after;
                }
                _ => {
                    self.cells.extend(rest);
                    return;
                }
            }
        }
    }
}

/// What a ledger says, in an order that does not depend on the places of its records.
fn sorted(mut inherited: Inherited) -> Inherited {
    let key = |node: &bcow_union::testing::ledger::NodeRecord| format!("{node:?}");
    inherited.nodes.sort_by_cached_key(key);
    inherited
        .backings
        .sort_by_key(|backing| format!("{backing:?}"));
    for ranges in inherited.written.values_mut() {
        ranges.sort_by_key(|range| (range.start, range.end));
    }
    inherited
}

/// Writes what was read, and reads it again.
fn check(inherited: Inherited, cells: usize) -> Inherited {
    assert!(inherited.nodes.len() + inherited.backings.len() <= cells);
    let ledger = Ledger::new(inherited.generation).expect("a ledger");
    let nodes: Vec<_> = inherited
        .nodes
        .iter()
        .map(|node| {
            assert!(
                node.name.len() <= MOST_NAME_BYTES,
                "a name beyond its record"
            );
            LedgerEntry::new(&ledger, node.clone())
        })
        .collect();
    let backings = inherited.backings.iter();
    let backings: Vec<_> = backings
        .map(|backing| BackingEntry::new(&ledger, *backing))
        .collect();
    for (&partial, ranges) in &inherited.written {
        for range in ranges {
            ledger.written(partial, range.clone());
        }
    }
    for (&number, change) in &inherited.begun {
        let place = ledger.begin_change(number, change.node);
        ledger.set_restored(place, change.node, change.is_restored);
    }
    let again = ledger
        .descriptor()
        .try_clone_to_owned()
        .expect("a descriptor");
    let again = sorted(Ledger::read(again).expect("a ledger that was written"));
    let inherited = sorted(inherited);
    assert_eq!(again.nodes, inherited.nodes);
    assert_eq!(again.backings, inherited.backings);
    assert_eq!(again.written, inherited.written);
    assert_eq!(again.begun, inherited.begun);
    assert_eq!(again.generation, inherited.generation);
    drop((nodes, backings));
    inherited
}

static IMAGE: LazyLock<Arc<Filesystem>> = LazyLock::new(|| {
    let mut bytes = include_bytes!("../../../fixtures/erofs/tree.erofs").to_vec();
    bytes.resize(bytes.len().next_multiple_of(4096), 0);
    Arc::new(Filesystem::open(Arc::new(bytes)).expect("an image"))
});

/// The directory of an upper, until the drop.
struct Upper(std::path::PathBuf);

impl Upper {
    fn new() -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("bcow-fuzz-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).expect("a directory");
        Upper(path)
    }

    fn lower() -> LowerImage {
        LowerImage {
            fs: IMAGE.clone(),
            identity: [7; 32],
            name: "image".into(),
        }
    }
}

impl Drop for Upper {
    fn drop(&mut self) {
        let _ = remove_dir_all(&self.0);
    }
}

fn options() -> UnionOptions {
    UnionOptions {
        sync: SyncPolicy::Batch(100),
        // Partial files of small files too.
        small_bytes: 1000,
        fillers: 0,
        can_be_taken_over: true,
        ..UnionOptions::default()
    }
}

const CALLER: Caller = Caller {
    uid: 0,
    gid: 0,
    pid: 1,
    umask: 0,
};
const NAMES: [&[u8]; 6] = [b"large", b"small", b"holes", b"many", b"two", b"sub"];

/// Makes the changes that the bits of `what` select. Returns the bytes that a node must have.
fn work(union: &UnionFs, what: u8) -> Vec<(NodeId, u64, Vec<u8>)> {
    let mut expected = Vec::new();
    let root = NodeId::ROOT;
    for (number, name) in NAMES.iter().enumerate() {
        let Ok(Some(found)) = union.lookup(root, name) else {
            continue;
        };
        let (at, bytes) = (100 * number as u64, vec![number as u8; 50]);
        let is_written = what >> number & 1 == 1;
        if is_written
            && union
                .write(found.node, at, &bytes, Privileges::Drop)
                .is_ok()
        {
            expected.push((found.node, at, bytes));
        }
    }
    if what & 0x40 != 0
        && let Ok(made) = union.make(&CALLER, root, b"new", 0o644, &New::File)
    {
        let _ = union.write(made.node, 0, b"new", Privileges::Drop);
        expected.push((made.node, 0, b"new".to_vec()));
        let _ = union.rename(root, b"new", root, b"renamed", RenameMode::Replace);
        let _ = union.unlink(root, b"two");
    }
    expected
}

/// A union works, its process ends, and another one takes over with a changed ledger.
fn take_over(what: u8, changes: &[u8]) {
    let upper = Upper::new();
    // A host may lack attributes for uppers.
    let Ok(union) = UnionFs::open(Upper::lower(), &upper.0, "a fuzzer", &options()) else {
        return;
    };
    let expected = work(&union, what);
    let ledger = union.ledger().expect("a ledger").try_clone_to_owned();
    let before = Parts::of(&File::from(ledger.expect("a descriptor")));
    drop(union);
    let mut parts = Parts {
        ..Parts::of(&File::from(before.file()))
    };
    parts.change(changes);
    let is_changed = [
        &before.header,
        &before.areas[0],
        &before.areas[1],
        &before.cells,
    ] != [
        &parts.header,
        &parts.areas[0],
        &parts.areas[1],
        &parts.cells,
    ];
    let inherited = Ledger::read(parts.file());
    let taken = UnionFs::take_over(
        Upper::lower(),
        &upper.0,
        "next",
        &options(),
        parts.file(),
        None,
    );
    let union = match taken {
        Ok(union) => union,
        Err(error) => {
            assert!(is_changed, "{error}");
            return;
        }
    };
    let inherited = inherited.expect("a ledger that was taken over");
    let inherited = check(inherited, parts.cells.len() / CELL_BYTES);
    let mut scratch = Vec::new();
    if !is_changed {
        for (node, at, bytes) in expected {
            let same = |found: &[u8]| found == bytes;
            let same = union.read(node, at, bytes.len() as u32, &mut scratch, same);
            assert_eq!(same, Ok(true), "{node:?}");
        }
    }
    for record in inherited.nodes.iter().take(20) {
        let node = NodeId(record.id);
        if union.attributes(node).is_ok() {
            let _ = union.read(node, 0, 9000, &mut scratch, |_| ());
            let _ = union.write(node, 60, b"later", Privileges::Drop);
            let _ = union.lookup(node, b"1");
        }
        union.forget(node, record.references);
    }
    for name in NAMES {
        let _ = union.lookup(NodeId::ROOT, name);
    }
    let _ = union.close();
}

pub fn fuzz(bytes: &[u8]) {
    let Some((&first, rest)) = bytes.split_first() else {
        return;
    };
    if first & 1 == 1 {
        return take_over(first >> 1, rest);
    }
    let mut parts = Parts::empty();
    parts.change(rest);
    if let Ok(inherited) = Ledger::read(parts.file()) {
        let written: &dyn Fn(&Vec<Range<u64>>) -> usize = &Vec::len;
        let written: usize = inherited.written.values().map(written).sum();
        assert!(written <= 2 * CHANGES_BYTES / 32);
        check(inherited, parts.cells.len() / CELL_BYTES);
    }
}
