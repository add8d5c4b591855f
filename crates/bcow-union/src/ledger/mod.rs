//! The ledger: what a process has to know to serve a mount that another process served.
//!
//! The kernel names inodes by node ids, and never tells their names again. The ledger records the
//! nodes that the kernel holds, with their places, and the written bytes of partial files that no
//! flush has recorded. It is a memory file: it survives a process that is killed, as the host's
//! page cache does, if another process has it open too. It need not survive the machine.
//!
//! A process may be killed between any two stores. So the ledger never claims what is not true yet:
//! a node that is about to be renamed has both places, and the reader of the ledger checks which
//! one the upper has. Each record is in one piece that one write(2) replaces as a whole, because
//! the piece lies within a page.
//!
//! ```text
//! 0       header: version, generation, whether the ledger is complete, begun changes of names
//! 4096    two areas of changes of partial files, 32 bytes each
//! ...     records of nodes and of backings: cells of 64 bytes; long names take further cells
//! ```

mod backing;
mod changes;
mod node;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use rustix::fs::MemfdFlags;

use crate::bytes::u64_at;
use crate::log::{self, Severity};
use changes::Changes;
use node::Cells;

pub use backing::BackingEntry;
pub use changes::Pass;
pub use node::{BackingKind, BackingRecord, Flags, LedgerEntry, NodeRecord, Placing};

/// The version of the layout. A process refuses other versions.
const VERSION: u64 = 2;
const MAGIC: [u8; 8] = *b"bcowledg";

const VERSION_AT: u64 = 8;
const GENERATION_AT: u64 = 16;
/// Not zero if a record could not be written.
const BROKEN_AT: u64 = 24;
const BEGUN_AT: u64 = 1024;
/// The number of begun changes that are remembered: more than the kernel has in flight at a time.
const BEGUN: u64 = 192;
/// The number of the request, and the node.
const BEGUN_BYTES: u64 = 16;
/// Set beside the node if [`BegunChange::is_restored`]. No node has this bit.
const RESTORED: u64 = 1 << 63;
const HEADER_BYTES: u64 = 4096;

/// A change of names that a process has begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BegunChange {
    /// The node that had the first name, or of which a name is removed.
    pub node: u64,
    /// Whether the number of names of the node is exact again, as before the change.
    pub is_restored: bool,
}

impl BegunChange {
    fn of_word(word: u64) -> Self {
        BegunChange {
            node: word & !RESTORED,
            is_restored: word & RESTORED != 0,
        }
    }
}

/// The ledger of a mount.
#[derive(Debug)]
pub struct Ledger {
    file: File,
    /// How many processes served the mount before.
    generation: u64,
    cells: Mutex<Cells>,
    changes: Changes,
    next_begun: AtomicU64,
    is_broken: AtomicBool,
}

/// The content of the ledger of a process that has ended.
#[derive(Debug, Default)]
pub struct Inherited {
    /// The generation of that process.
    pub generation: u64,
    /// The nodes. A node can have several records, with different places.
    pub nodes: Vec<NodeRecord>,
    /// The written bytes of partial files, by the number of the partial file.
    pub written: HashMap<u64, Vec<Range<u64>>>,
    /// See [`Ledger::begin_change`]: changes by the numbers of requests.
    pub begun: BTreeMap<u64, BegunChange>,
    /// The files that the kernel reads instead of nodes.
    pub backings: Vec<BackingRecord>,
}

impl Ledger {
    /// An empty ledger, for a mount that `generation` processes served before.
    pub fn new(generation: u64) -> io::Result<Arc<Self>> {
        let file = File::from(rustix::fs::memfd_create(
            "bcow-ledger",
            MemfdFlags::CLOEXEC,
        )?);
        file.write_all_at(&MAGIC, 0)?;
        file.write_all_at(&VERSION.to_le_bytes(), VERSION_AT)?;
        file.write_all_at(&generation.to_le_bytes(), GENERATION_AT)?;
        // So that the store that marks the ledger as incomplete needs no memory.
        file.write_all_at(&0_u64.to_le_bytes(), BROKEN_AT)?;
        file.set_len(changes::END)?;
        Ok(Arc::new(Ledger {
            file,
            generation,
            cells: Mutex::new(Cells::new(changes::END)),
            changes: Changes::default(),
            next_begun: AtomicU64::new(0),
            is_broken: AtomicBool::new(false),
        }))
    }

    /// Reads the ledger of a process that has ended.
    pub fn read(file: OwnedFd) -> io::Result<Inherited> {
        let file = File::from(file);
        let mut header = [0; HEADER_BYTES as usize];
        file.read_exact_at(&mut header, 0)?;
        let word = |at: u64| u64_at(&header, at as usize);
        if header[..8] != MAGIC || word(VERSION_AT) != VERSION {
            return Err(io::Error::other(format!(
                "the ledger of the mount has version {}, and this program has version {VERSION}",
                word(VERSION_AT)
            )));
        }
        if word(BROKEN_AT) != 0 {
            return Err(io::Error::other(
                "the memory for the ledger of the mount was exhausted",
            ));
        }
        let begun = (0..BEGUN).map(|index| BEGUN_AT + index * BEGUN_BYTES);
        let begun = begun.map(|at| (word(at), BegunChange::of_word(word(at + 8))));
        let (nodes, backings) = node::read_all(&file, changes::END)?;
        let mut inherited = Inherited {
            generation: word(GENERATION_AT),
            nodes,
            backings,
            begun: begun.filter(|&(number, _)| number != 0).collect(),
            ..Inherited::default()
        };
        for (partial, bytes) in changes::read_all(&file)? {
            inherited.written.entry(partial).or_default().push(bytes);
        }
        Ok(inherited)
    }

    /// The memory file.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// How many processes served the mount before.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Records that the request with this number is about to change a name, in a way that cannot be
    /// seen in the upper afterwards: to exchange the name of `node` with another, or to remove a
    /// name of `node` while the count of its names is not exact. Returns the place of the record.
    pub fn begin_change(&self, number: u64, node: u64) -> u64 {
        let at = self.next_begun.fetch_add(1, Ordering::Relaxed) % BEGUN * BEGUN_BYTES + BEGUN_AT;
        let mut record = [0; BEGUN_BYTES as usize];
        record[..8].copy_from_slice(&number.to_le_bytes());
        record[8..].copy_from_slice(&node.to_le_bytes());
        self.write(&record, at);
        at
    }

    /// Records whether the number of names of the node of the change at this place is exact again,
    /// as before the change.
    pub fn set_restored(&self, place: u64, node: u64, is_restored: bool) {
        let word = if is_restored { node | RESTORED } else { node };
        self.write(&word.to_le_bytes(), place + 8);
    }

    /// Removes a record of [`Ledger::begin_change`]: the upper shows the result of the change.
    pub fn end_change(&self, at: u64) {
        self.write(&0_u64.to_le_bytes(), at);
    }

    /// Records that bytes of a partial file are at their place in the host's file, and that no
    /// flush has recorded them.
    pub fn written(&self, partial: u64, bytes: Range<u64>) {
        match self.changes.place() {
            Some(at) => self.write(&changes::encode(partial, &bytes), at),
            None => self.broken("too many written blocks wait for a flush"),
        }
    }

    /// The number of the area that [`Ledger::written`] uses now. A later [`Ledger::begin_pass`]
    /// changes it.
    pub fn area(&self) -> u64 {
        self.changes.area()
    }

    /// Begins to flush all partial files. When all flushes have succeeded, [`Pass::succeeded`]
    /// removes the changes before it. Only one thread may do so at a time.
    pub fn begin_pass(&self) -> Pass<'_> {
        Pass::begin(self)
    }

    /// Writes a piece of the ledger. If that fails, no process can take over the mount.
    fn write(&self, bytes: &[u8], at: u64) {
        if let Err(error) = self.file.write_all_at(bytes, at) {
            self.broken(&error.to_string());
        }
    }

    fn broken(&self, cause: &str) {
        if self.is_broken.swap(true, Ordering::AcqRel) {
            return;
        }
        // The page is there, so this needs no memory.
        let _ = self.file.write_all_at(&1_u64.to_le_bytes(), BROKEN_AT);
        log::log(
            Severity::Warning,
            &format!("a mount cannot be taken over by another process any more: {cause}"),
        );
    }
}
