//! The written bytes of partial files that no flush has recorded yet.
//!
//! The records are in two areas. A thread appends to the current one. A pass makes the other area
//! current, flushes all partial files, and then empties the area that was current before. An append
//! that is late by a pass is harmless: the flush has recorded the change. A written range stays
//! valid, because the bytes stay in the host's file until they are truncated, and truncated blocks
//! ignore it.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::Errno;

use super::{HEADER_BYTES, Ledger};
use crate::bytes::u64_at;

/// The size of an area. Only the pages that are written take memory.
const AREA_BYTES: u64 = 64 << 20;
const RECORD_BYTES: u64 = 32;
const WRITTEN: u64 = 1;
/// The end of both areas.
pub(super) const END: u64 = HEADER_BYTES + 2 * AREA_BYTES;

#[derive(Debug, Default)]
pub(super) struct Changes {
    /// The number of the current area; its last bit selects the place in the file.
    area: AtomicU64,
    /// The next free byte of each area.
    ends: [AtomicU64; 2],
    /// Whether the area before the current one has changes that no flush may have recorded.
    has_earlier: AtomicBool,
}

/// A pass of flushes over all partial files.
#[must_use]
pub struct Pass<'a> {
    ledger: &'a Ledger,
}

impl Changes {
    pub(super) fn area(&self) -> u64 {
        self.area.load(Ordering::SeqCst)
    }

    /// The place of the next record; `None` if the area is full.
    pub(super) fn place(&self) -> Option<u64> {
        let side = self.area() & 1;
        let at = self.ends[side as usize].fetch_add(RECORD_BYTES, Ordering::Relaxed);
        (at < AREA_BYTES).then_some(HEADER_BYTES + side * AREA_BYTES + at)
    }
}

impl<'a> Pass<'a> {
    pub(super) fn begin(ledger: &'a Ledger) -> Self {
        let changes = &ledger.changes;
        // If the pass before has failed, its area is still needed.
        if !changes.has_earlier.swap(true, Ordering::SeqCst) {
            changes.area.fetch_add(1, Ordering::SeqCst);
        }
        Pass { ledger }
    }

    /// All partial files are flushed: removes what was written before the pass.
    pub fn succeeded(self) {
        let changes = &self.ledger.changes;
        let side = (changes.area() + 1) & 1;
        let start = HEADER_BYTES + side * AREA_BYTES;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(&self.ledger.file, flags, start, AREA_BYTES) {
            Ok(()) => {
                changes.ends[side as usize].store(0, Ordering::SeqCst);
                changes.has_earlier.store(false, Ordering::SeqCst);
            }
            // The next pass tries it again.
            Err(errno) => tracing::debug!("cannot empty a part of the ledger: {errno}"),
        }
    }
}

/// The record of bytes that were written in a partial file.
pub(super) fn encode(partial: u64, bytes: &Range<u64>) -> [u8; RECORD_BYTES as usize] {
    let fields = [WRITTEN, partial, bytes.start, bytes.end];
    let mut record = [0; RECORD_BYTES as usize];
    for (place, field) in record.chunks_exact_mut(8).zip(fields) {
        place.copy_from_slice(&field.to_le_bytes());
    }
    record
}

fn decode(bytes: &[u8]) -> Option<(u64, Range<u64>)> {
    let written = u64_at(bytes, 16)..u64_at(bytes, 24);
    (u64_at(bytes, 0) == WRITTEN).then_some((u64_at(bytes, 8), written))
}

/// The records of both areas: numbers of partial files, and written bytes.
pub(super) fn read_all(file: &File) -> io::Result<Vec<(u64, Range<u64>)>> {
    let mut records = Vec::new();
    let mut piece = vec![0; 64 << 10];
    let mut at = HEADER_BYTES;
    while at < END {
        // Skips what was never written.
        at = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(data) => at.max(data / RECORD_BYTES * RECORD_BYTES),
            Err(Errno::NXIO) => break,
            Err(errno) => return Err(errno.into()),
        };
        if at >= END {
            break;
        }
        let count = piece.len().min((END - at) as usize);
        file.read_exact_at(&mut piece[..count], at)?;
        let pieces = piece[..count].chunks_exact(RECORD_BYTES as usize);
        records.extend(pieces.filter_map(decode));
        at += count as u64;
    }
    Ok(records)
}
