//! Sketches: files of the upper that store only the written blocks of a lower file.
//!
//! A sketch shows the content of a [`Lower`] file, overlaid by the blocks that were written. It
//! stores only blocks of 4 KiB that were written, at least in part. A write to a part of a block
//! stores these bytes and returns. The rest of the block is copied from the lower file later
//! (*copy-after-write*): by a background thread, or by the read or flush that needs it. Until then
//! the block is *in transit*. The ranges that were written in it are known in memory only.

mod copy;
mod error;
pub mod host;
pub mod journal;
mod locks;
mod map;
mod maps;
mod mark;
mod options;
mod packed;
mod shared;
mod sketches;
mod sparse;
mod times;
mod transit;

use std::fs::File;
use std::ops::Range;

use rustix::io::Errno;

use crate::host::HiddenChange;

use crate::Seek;

pub use crate::upper::{SketchKind, SketchMark};
pub use error::{Damage, SketchError};
pub use options::SketchOptions;
pub use sketches::{Sketches, Statistics};

/// A file of the image. Its content never changes.
pub trait Lower: Send + Sync {
    /// Size in bytes.
    fn size(&self) -> u64;
    /// Fills `buf` with the bytes at `offset`. The range lies within the file.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Errno>;
    /// The offset of the first byte of data, or of the first byte in a hole, at or behind `offset`;
    /// `None` if the file ends before one. The end of the file counts as a hole (as in lseek(2)).
    fn seek(&self, offset: u64, what: Seek) -> Result<Option<u64>, Errno>;
}

/// Whether an operation beyond the end of the file changes its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeepSize {
    /// The size does not change.
    Keep,
    /// The file grows to the end of the range, if it is shorter.
    Grow,
}

/// What a flush guarantees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// All earlier writes are on the disk when the flush returns.
    Durable,
    /// The sketch can be opened again from the data that the host's kernel has. A crash of the host
    /// may lose or damage it.
    Volatile,
}

/// Figures of a sketch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SketchStatus {
    /// Blocks of the whole file, a partial last block included.
    pub blocks: u64,
    /// Blocks that do not need the lower file: written, punched, or beyond its end.
    pub present: u64,
    /// Blocks that were written in part and still need bytes of the lower file.
    pub in_transit: u64,
    /// Bytes of the host's disk that the sketch's file takes.
    pub stored_bytes: u64,
}

/// Reads or sets the times of a host's file, which has this last change that is no change of the
/// file in the mount.
pub type HeldTimes<'a> = &'a mut dyn FnMut(Option<HiddenChange>) -> Result<(), Errno>;

/// A partly modified file. All methods can be called from several threads at once. Calls on
/// different blocks run in parallel.
///
/// After a failed operation, each byte of its range has either the old or the new value.
pub trait Sketch: Send + Sync {
    /// The sketch's number in this upper.
    fn id(&self) -> u64;

    /// How the sketch is stored.
    fn kind(&self) -> SketchKind;

    /// Size of the file in bytes.
    fn size(&self) -> u64;

    /// Reads from `offset` and returns the number of bytes read. It is less than the buffer's
    /// length only at the end of the file.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize, SketchError>;

    /// Writes at `offset` and returns the number of bytes written. The file grows if needed. The
    /// number is less than the length of `data`, but at least one, if the host or the size limit
    /// has no room for the rest, or if the host failed after the first byte.
    fn write_at(&self, offset: u64, data: &[u8]) -> Result<usize, SketchError>;

    /// Truncates or extends the file to `size` bytes. Truncated content never becomes visible
    /// again. An extension reads as zeros.
    fn set_size(&self, size: u64) -> Result<(), SketchError>;

    /// Makes a range read as zeros, and frees its space where possible.
    fn zero(&self, offset: u64, length: u64, size: KeepSize) -> Result<(), SketchError>;

    /// Allocates space for a range, so that later writes to the range do not fail for lack of
    /// space. The content does not change. A packed sketch answers EOPNOTSUPP.
    fn allocate(&self, offset: u64, length: u64, size: KeepSize) -> Result<(), SketchError>;

    /// The offset of the first byte of data, or of the first byte in a hole, at or behind `offset`;
    /// `None` if the file ends before one.
    fn seek(&self, offset: u64, what: Seek) -> Result<Option<u64>, SketchError>;

    /// Completes all blocks in transit. After that, only the caller's own calls change the host's
    /// file. A caller does this before it reads or sets the file's times, because the completion of
    /// a block changes the time of last modification.
    fn settle(&self) -> Result<(), SketchError>;

    /// Calls `work`, which reads or sets the times of the host's file, while no background work is
    /// about to restore a saved time. `work` gets the last change of the host's file that is no
    /// change of the file.
    fn hold_times(&self, work: HeldTimes<'_>) -> Result<(), Errno>;

    /// Completes all blocks in transit and records them, so that the sketch can be opened again
    /// with all earlier writes.
    fn flush(&self, how: Durability) -> Result<(), SketchError>;

    /// Flushes, and leaves the host's file in a state in which bcow does not write to it until the
    /// content changes again. Neither the background threads nor the next open write to it. The
    /// reason is that the host's kernel removes a file's capabilities (the xattr
    /// `security.capability`) at each write.
    fn quiesce(&self, how: Durability) -> Result<(), SketchError>;

    /// Records durably how much of the sketch is durable, so that a later open does not take damage
    /// for a crash. A user calls this before it closes the sketch. Does nothing if the record is up
    /// to date, or if some changes are not recorded.
    fn confirm(&self) -> Result<(), SketchError>;

    /// Whether the sketch can be closed and opened again without the loss of a write: a flush has
    /// recorded all writes, and no barrier has failed.
    fn is_recorded(&self) -> bool;

    /// Figures of the sketch.
    fn status(&self) -> Result<SketchStatus, SketchError>;

    /// Whether the sketch does not need the lower file any more.
    fn is_complete(&self) -> Result<bool, SketchError>;

    /// Takes over these bytes, which another process has written into the host's file of a sparse
    /// sketch and not recorded. For a packed sketch nothing is known of such bytes.
    fn restore(&self, written: &[Range<u64>]) -> Result<(), SketchError>;

    /// Refuses all further changes and flushes with `errno`: changes were lost.
    fn fail(&self, errno: Errno);

    /// Makes a plain file of a sparse sketch that is complete. Returns whether the host's file is a
    /// plain file now. Open users of the sketch continue to work.
    fn promote(&self) -> Result<bool, SketchError>;

    /// Removes the data beside the host's file, because the file has lost its last name. Open users
    /// of the sketch continue to work.
    fn discard(&self) -> Result<(), SketchError>;

    /// Writes the content into an empty file of the host and returns the number of bytes written.
    /// Holes of the sketch become holes of the file. The file is not synced.
    fn copy_out(&self, to: &File) -> Result<u64, SketchError>;
}

impl std::fmt::Debug for dyn Sketch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sketch")
            .field("id", &format_args!("{:016x}", self.id()))
            .field("kind", &self.kind())
            .field("size", &self.size())
            .finish_non_exhaustive()
    }
}
