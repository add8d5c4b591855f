//! Records of nodes, and the reader of all records.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::Ledger;
use crate::bytes::u64_at;

pub(super) const CELL_BYTES: u64 = 64;
/// The bytes of a record before its name.
const FIXED_BYTES: usize = 48;
/// The numbers of cells that a record can have: for names of up to 16, 80 and 272 bytes.
const SIZES: [u64; 3] = [1, 2, 5];
/// Bytes of the longest record.
const MOST_BYTES: u64 = SIZES[2] * CELL_BYTES;
/// Bytes that are read at a time.
const PIECE_BYTES: u64 = 1 << 20;

const TAG_FREE: u8 = 1;
const TAG_NODE: u8 = 2;
/// A place that the node may have.
const TAG_PLACE: u8 = 3;
/// See [`super::backing`].
pub(super) const TAG_BACKING: u8 = 4;

const REFERENCES_AT: u64 = 24;
const NO_LOWER: u64 = u64::MAX;

/// What is known of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flags(u8);

impl Flags {
    pub const NONE: Flags = Flags(0);
    /// The node lost its last name.
    pub const REMOVED: Flags = Flags(1);
    /// The content was copied up whole, and the marks of the file do not say so yet.
    pub const IN_BATCH: Flags = Flags(2);
    /// The host has reported that it could not write the content back.
    pub const SYNC_FAILED: Flags = Flags(4);
    /// A program has opened the file for writing.
    pub const OPENED_FOR_WRITING: Flags = Flags(8);

    /// Whether all flags of `other` are set.
    pub fn contains(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeRecord {
    /// The node id.
    pub id: u64,
    /// The nid of the inode of the image.
    pub lower: Option<u64>,
    /// The references of the kernel.
    pub references: u64,
    /// The node id of the directory; 0 if no name is known.
    pub parent: u64,
    /// The number of the inode on the host; 0 if it is not known.
    pub host_inode: u64,
    /// The type: the upper four bits of a mode.
    pub kind: u8,
    /// What else is known.
    pub flags: Flags,
    /// The name in the directory.
    pub name: Box<[u8]>,
    /// Whether only the place is valid: a place that the node may have.
    pub is_place: bool,
}

/// What a backing is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BackingKind {
    /// A file with the content of the image.
    Image,
    /// The node's file in the upper.
    Upper,
}

/// The backing of a node in the ledger of a process that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackingRecord {
    /// The node id.
    pub node: u64,
    pub kind: BackingKind,
    /// The number that the kernel gave.
    pub number: u32,
}

/// The free cells.
#[derive(Debug)]
pub(super) struct Cells {
    pub(super) end: u64,
    free: [Vec<u64>; SIZES.len()],
}

impl Cells {
    pub(super) fn new(start: u64) -> Self {
        Cells {
            end: start,
            free: Default::default(),
        }
    }
}

/// The place of a record in the file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Spot {
    pub(super) at: u64,
    size: usize,
}

/// The record of a node, as long as the node exists.
#[derive(Debug)]
pub struct LedgerEntry {
    ledger: Arc<Ledger>,
    /// Held to change the record. A leaf, but for the ledger's lock of free cells.
    state: Mutex<RecordState>,
}

#[derive(Debug)]
struct RecordState {
    record: NodeRecord,
    spot: Spot,
    /// The places that the node may have after a change in progress.
    places: Vec<Spot>,
}

/// A place that a node may have, until the drop.
#[must_use]
pub struct Placing<'a> {
    entry: &'a LedgerEntry,
    spot: Option<Spot>,
}

impl std::ops::BitOr for Flags {
    type Output = Flags;

    fn bitor(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }
}

impl LedgerEntry {
    pub fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    pub fn new(ledger: &Arc<Ledger>, record: NodeRecord) -> Self {
        let spot = ledger.store(&record);
        LedgerEntry {
            ledger: Arc::clone(ledger),
            state: Mutex::new(RecordState {
                record,
                spot,
                places: Vec::new(),
            }),
        }
    }

    /// Records the number of references.
    pub fn set_references(&self, references: u64) {
        let mut state = self.state.lock();
        state.record.references = references;
        let at = state.spot.at + REFERENCES_AT;
        self.ledger.write(&references.to_le_bytes(), at);
    }

    /// Records the number of the inode on the host.
    pub fn set_host_inode(&self, host_inode: u64) {
        let mut state = self.state.lock();
        if state.record.host_inode != host_inode {
            state.record.host_inode = host_inode;
            self.ledger.rewrite(&state.record, state.spot);
        }
    }

    /// Sets or clears flags.
    pub fn set_flags(&self, flags: Flags, are_set: bool) {
        let mut state = self.state.lock();
        let before = state.record.flags.0;
        let after = if are_set { before | flags.0 } else { before & !flags.0 };
        if after != before {
            state.record.flags = Flags(after);
            self.ledger.rewrite(&state.record, state.spot);
        }
    }

    /// Records the only place of the node: `parent` is 0 if it has none.
    pub fn set_place(&self, parent: u64, name: &[u8]) {
        let mut state = self.state.lock();
        if state.record.parent == parent && *state.record.name == *name {
            return;
        }
        state.record.parent = parent;
        state.record.name = name.into();
        let old = state.spot;
        // For a moment there are two records. Both have a place that the node has or had.
        state.spot = self.ledger.store(&state.record);
        self.ledger.free(old);
    }

    /// Records a place that the node may have from now on, beside the one that it has.
    pub fn may_get(&self, parent: u64, name: &[u8]) -> Placing<'_> {
        let mut state = self.state.lock();
        let spot = self.ledger.store(&NodeRecord {
            parent,
            name: name.into(),
            is_place: true,
            ..state.record.clone()
        });
        state.places.push(spot);
        Placing {
            entry: self,
            spot: Some(spot),
        }
    }
}

impl Drop for Placing<'_> {
    fn drop(&mut self) {
        if let Some(spot) = self.spot.take() {
            let mut state = self.entry.state.lock();
            state.places.retain(|place| place.at != spot.at);
            self.entry.ledger.free(spot);
        }
    }
}

impl Drop for LedgerEntry {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        for &spot in state.places.iter().chain([&state.spot]) {
            self.ledger.free(spot);
        }
    }
}

impl Ledger {
    /// Writes a record to free cells.
    fn store(&self, record: &NodeRecord) -> Spot {
        let cells = ((FIXED_BYTES + record.name.len()) as u64).div_ceil(CELL_BYTES);
        let size = SIZES.iter().position(|&size| size >= cells);
        let size = size.unwrap_or(SIZES.len() - 1);
        let (spot, is_new) = self.take_cells(size);
        let at = spot.at;
        if size > 0 {
            if is_new {
                // A reader must find the end of the record before its name is complete.
                self.write(&[TAG_FREE, size as u8], at);
            }
            // The first cell, which makes the record valid, comes last.
            let rest = &record.name[CELL_BYTES as usize - FIXED_BYTES..];
            let rest = &rest[..rest.len().min(((SIZES[size] - 1) * CELL_BYTES) as usize)];
            self.write(rest, at + CELL_BYTES);
        }
        self.rewrite(record, spot);
        spot
    }

    /// Free cells for a record of this size, and whether they were never used.
    pub(super) fn take_cells(&self, size: usize) -> (Spot, bool) {
        let mut cells = self.cells.lock();
        let (at, is_new) = match cells.free[size].pop() {
            Some(at) => (at, false),
            None => {
                let at = cells.end;
                cells.end += SIZES[size] * CELL_BYTES;
                (at, true)
            }
        };
        (Spot { at, size }, is_new)
    }

    /// Writes all of a record but the part of its name beyond the first cell.
    fn rewrite(&self, record: &NodeRecord, spot: Spot) {
        let mut cell = [0; CELL_BYTES as usize];
        cell[0] = if record.is_place { TAG_PLACE } else { TAG_NODE };
        cell[1] = spot.size as u8;
        cell[2] = record.kind;
        cell[3] = record.flags.0;
        cell[4..6].copy_from_slice(&(record.name.len() as u16).to_le_bytes());
        let fields = [
            record.id,
            record.lower.unwrap_or(NO_LOWER),
            record.references,
            record.parent,
            record.host_inode,
        ];
        for (index, field) in fields.into_iter().enumerate() {
            cell[8 + index * 8..][..8].copy_from_slice(&field.to_le_bytes());
        }
        let first = record.name.len().min(CELL_BYTES as usize - FIXED_BYTES);
        cell[FIXED_BYTES..FIXED_BYTES + first].copy_from_slice(&record.name[..first]);
        self.write(&cell, spot.at);
    }

    pub(super) fn free(&self, spot: Spot) {
        self.write(&[TAG_FREE, spot.size as u8], spot.at);
        self.cells.lock().free[spot.size].push(spot.at);
    }
}

impl BackingRecord {
    /// The record in a cell with [`TAG_BACKING`].
    fn of_cell(cell: &[u8]) -> Self {
        BackingRecord {
            node: u64_at(cell, 8),
            kind: if cell[2] == 0 { BackingKind::Image } else { BackingKind::Upper },
            // The number has 32 bits.
            number: u64_at(cell, 16) as u32,
        }
    }
}

/// The records of nodes and of backings.
pub(super) type Records = (Vec<NodeRecord>, Vec<BackingRecord>);

pub(super) fn read_all(file: &File, start: u64) -> io::Result<Records> {
    let mut records = Records::default();
    let end = file.metadata()?.len();
    let mut piece = Vec::new();
    let mut at = start;
    while at < end {
        // Skips what was never written.
        at = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(data) => at.max(data),
            Err(Errno::NXIO) => break,
            Err(errno) => return Err(errno.into()),
        };
        let bytes = end.saturating_sub(at).min(PIECE_BYTES);
        piece.resize(bytes as usize, 0);
        file.read_exact_at(&mut piece, at)?;
        // The last record of a piece may continue in the next one.
        let most = if at + bytes < end { bytes - MOST_BYTES } else { bytes };
        at += read_cells(&piece, most as usize, at - start, &mut records)?;
    }
    Ok(records)
}

/// Reads the records that begin in the first `most` of these bytes, which are `at` bytes behind the
/// first cell. Returns the bytes of these records.
fn read_cells(bytes: &[u8], most: usize, at: u64, records: &mut Records) -> io::Result<u64> {
    let mut start = 0;
    while start < most {
        let place = at + start as u64;
        let cell = &bytes[start..];
        if cell.len() < CELL_BYTES as usize {
            // It was written in part.
            return Ok(bytes.len() as u64);
        }
        let size = match (cell[0], SIZES.get(usize::from(cell[1]))) {
            // The end of the file grew for a cell that was never written.
            (0, _) => SIZES[0],
            (TAG_FREE | TAG_NODE | TAG_PLACE | TAG_BACKING, Some(&size)) => size,
            _ => return Err(damaged(place)),
        };
        let record_bytes = (size * CELL_BYTES) as usize;
        let record = &cell[..record_bytes.min(cell.len())];
        match cell[0] {
            TAG_BACKING => records.1.push(BackingRecord::of_cell(cell)),
            TAG_NODE | TAG_PLACE => {
                let record = NodeRecord::of_cells(record).ok_or_else(|| damaged(place))?;
                records.0.push(record);
            }
            _ => {}
        }
        start += record_bytes;
    }
    Ok(start as u64)
}

impl NodeRecord {
    /// The record in these cells; `None` if its name does not end in them.
    fn of_cells(cells: &[u8]) -> Option<Self> {
        let length = usize::from(u16::from_le_bytes([cells[4], cells[5]]));
        let lower = u64_at(cells, 16);
        Some(NodeRecord {
            id: u64_at(cells, 8),
            lower: (lower != NO_LOWER).then_some(lower),
            references: u64_at(cells, 24),
            parent: u64_at(cells, 32),
            host_inode: u64_at(cells, 40),
            kind: cells[2],
            flags: Flags(cells[3]),
            name: cells.get(FIXED_BYTES..FIXED_BYTES + length)?.into(),
            is_place: cells[0] == TAG_PLACE,
        })
    }
}

fn damaged(at: u64) -> io::Error {
    io::Error::other(format!("the ledger of the mount is damaged at cell {at}"))
}
