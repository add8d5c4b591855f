//! Operations on whole disks: commit into the backing, rebase, rewrite, snapshot, compare.
//!
//! | operation | effect |
//! |---|---|
//! | [`commit_into_backing`] | moves the own data of a disk into the writable disk below it |
//! | [`rebase`] | gives a disk another backing; the visible content does not change |
//! | [`rewrite`] | writes a disk to a new file: sealed, compacted, flattened or compressed |
//! | [`name_backing`] | makes the entry by which a disk names its backing |
//! | [`snapshot`](snapshot()) | makes the file of a disk read-only, with a new disk over it |
//! | [`copy_snapshot`] | makes a copy of the file of a disk read-only |
//! | [`LiveDisk`] | does both while programs use the disk, and removes snapshots |
//! | [`absorb_backing`] | copies the own data of the backing into the disk |
//! | [`compare`] | finds the ranges in which two address spaces differ |
//!
//! Each operation that writes leaves the visible content of the disk unchanged at every moment,
//! also after a crash or a power cut, and can then run again. A long operation reports its progress
//! to a [`Monitor`], which can cancel it.
//!
//! ```
//! use std::sync::Arc;
//! use bcow::operation::{RewriteOptions, rewrite};
//! use bcow::{CreateOptions, Disk, Image, Keep, MemoryStorage, OpenOptions, WritableDevice};
//!
//! let storage = Arc::new(MemoryStorage::default());
//! let disk = Disk::create_alone(storage.clone(), &CreateOptions::disk(1 << 20))?;
//! disk.write_at(0, b"a disk")?;
//! disk.close()?;
//!
//! let image = Image::open_storage(storage, &OpenOptions::default())?;
//! let sealed = Arc::new(MemoryStorage::default());
//! let written = rewrite(&*image, sealed, RewriteOptions::sealed(&image, Keep::Own), &())?;
//! assert!(written.header.merkle.is_some());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod commit;
mod compare;
mod live;
mod name;
mod over;
mod rebase;
mod remove;
mod rewrite;
mod snapshot;

use crate::Error;

pub use commit::{CommitError, Committed, commit, commit_into_backing, open_over, record_identity};
pub use compare::{CompareError, compare};
pub use live::{LiveDisk, Taken};
pub use name::{NameError, name_backing, require_in_reach};
pub use over::{Over, disks_over, files_beside, is_shared, tree_over};
pub use rebase::{rebase, rebase_reference};
pub use remove::{RemoveError, Removed, tree_to_change};
pub use rewrite::{RewriteOptions, WRITABLE_LOG_BYTES, rewrite};
pub use snapshot::{
    Earlier, SnapshotError, Snapshotted, absorb_backing, copy_snapshot, is_snapshot_name,
    remove_unfinished, snapshot, snapshot_name, snapshot_path, sync_directory_of,
};

/// Bytes per step of an operation.
const STEP_BYTES: u64 = 1 << 20;

/// A part of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Phase {
    /// Data of a disk is copied into its backing, or the other way round.
    Commit,
    /// The old backing is compared with the new one.
    Compare,
    /// A new file is written.
    Write,
    /// The Merkle tree of the new file is computed.
    Hash,
    /// The new file is read back.
    Verify,
    /// Data is made durable.
    Sync,
}

/// Observes an operation, and can cancel it.
pub trait Monitor {
    /// A phase begins. `total` is the number of bytes that [`Monitor::advance`] will report; `None`
    /// if the phase reports none.
    fn phase(&self, phase: Phase, total: Option<u64>) {
        let _ = (phase, total);
    }
    /// `bytes` more bytes of the phase are done.
    fn advance(&self, bytes: u64) {
        let _ = bytes;
    }
    /// Whether the operation has to end with [`OperationError::Cancelled`]. It asks between any two
    /// steps, each of which copies at most 1 MiB.
    fn is_cancelled(&self) -> bool {
        false
    }
}

/// Observes nothing and cancels nothing.
impl Monitor for () {}

/// The reason why an operation ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OperationError {
    /// The [`Monitor`] cancelled the operation.
    #[error("cancelled")]
    Cancelled,
    /// The source cannot be read.
    #[error(transparent)]
    Read(Error),
    /// The destination cannot be written.
    #[error(transparent)]
    Write(Error),
}

/// Ends the operation if the monitor cancels it, else reports progress.
fn step(monitor: &dyn Monitor, bytes: u64) -> Result<(), OperationError> {
    monitor.advance(bytes);
    if monitor.is_cancelled() { Err(OperationError::Cancelled) } else { Ok(()) }
}
