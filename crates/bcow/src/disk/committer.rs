//! The state that a flush or a checkpoint changes, and the content of the next record.

use std::ops::Range;

use bcow_format::{Header, LogMapping};

use super::extents::Extents;
use super::region::Region;
use super::space::sectors;
use crate::sync::Arc;

/// The state of the newest durable record or header. One flush or checkpoint at a time changes it,
/// when its own write is durable.
pub(super) struct Committer {
    /// The newest header.
    pub(super) header: Header,
    /// The slot that has it, 0 or 1; the other slot has the same header or an older one.
    pub(super) slot: usize,
    /// Offset in the log of the next record.
    pub(super) tail: u64,
    /// Sequence number of the next record.
    pub(super) sequence: u64,
    /// Length of the file as the newest record or header has it.
    pub(super) file_bytes: u64,
    /// Ranges that neither the header nor a record uses.
    pub(super) free: Extents,
    /// Regions whose tables are older than the log.
    pub(super) logged: Vec<Arc<Region>>,
    /// Memory of the regions in `logged`, in bytes.
    pub(super) logged_bytes: u64,
    /// Number of successive flushes of little data.
    pub(super) small_flushes: u32,
    /// Length in bytes of the part of the log that is known to have been written.
    pub(super) written_log: u64,
}

impl Committer {
    /// Records a new length of the file. The new part is free until a record or header uses it.
    pub(super) fn grow(&mut self, file_bytes: u64) {
        if file_bytes > self.file_bytes {
            self.free.insert(self.file_bytes..file_bytes);
            self.file_bytes = file_bytes;
        }
    }
}

/// The content of the next record.
#[derive(Default)]
pub(super) struct Taken {
    pub(super) mappings: Vec<LogMapping>,
    pub(super) regions: Vec<Arc<Region>>,
    /// Number of blocks in it.
    pub(super) blocks: u64,
}

impl Taken {
    /// Ranges that the record puts into use.
    pub(super) fn used(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.mappings
            .iter()
            .filter_map(|mapping| mapping.entry.stored())
            .map(sectors)
    }
}
