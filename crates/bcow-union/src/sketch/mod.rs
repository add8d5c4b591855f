//! Sketches: lower files of which some blocks were written.
//!
//! A sketch shows a [`Lower`] file through whatever was written over it: only blocks of 4 KiB that were touched are stored.
//! A write that covers a block in part stores its own bytes and returns; the rest is copied later (*copy-after-write*), in the
//! background or by the read or flush that needs it. Until then the block is *in transit*, which is known in memory only.

pub mod blocks;
mod copy;
mod error;
pub mod host;
pub mod journal;
mod locks;
mod map;
mod mark;
mod packed;
mod shared;
mod sketches;
mod sparse;
mod times;
mod transit;

use std::fs::File;

use rustix::io::Errno;

use crate::Seek;

pub use crate::upper::{SketchKind, SketchMark};
pub use error::{Damage, SketchError};
pub use host::{HostFile, MapStore, MarkedFile};
pub use packed::LowerDevice;
pub use sketches::{SketchOptions, Sketches, Statistics};

/// Bytes of a block, the unit of copy-on-write and of the size limit.
pub const BLOCK_BYTES: u64 = 4096;

/// A file of the image, which never changes.
pub trait Lower: Send + Sync {
    /// Size in bytes.
    fn size(&self) -> u64;
    /// Fills `buf` with the bytes at `offset`. The range lies within the file.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Errno>;
    /// The first byte from `offset` on that is data, or in a hole; `None` if there is none before the end. The end of the file
    /// is a hole.
    fn seek(&self, offset: u64, what: Seek) -> Result<Option<u64>, Errno>;
}

/// Whether an operation beyond the end makes the file longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeepSize {
    /// The size stays as it is.
    Keep,
    /// The file reaches at least to the end of the range.
    Grow,
}

/// What a flush promises.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// Everything that was written before is on the disk when it returns.
    Durable,
    /// The sketch can be opened again from what the host's kernel has; a crash of the host may lose or spoil it.
    Volatile,
}

/// What a sketch holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SketchStatus {
    /// Blocks of the whole file, the last one perhaps in part.
    pub blocks: u64,
    /// Blocks that no longer need the lower file: written, punched, or beyond its end.
    pub present: u64,
    /// Blocks written in part, of which the rest is still to be copied.
    pub in_transit: u64,
    /// Bytes that the host stores for it.
    pub stored_bytes: u64,
}

/// A partly modified file. All calls may come from several threads at once; those on different blocks run side by side.
///
/// After an error every byte of the range is as it was or as it should be.
pub trait Sketch: Send + Sync + std::fmt::Debug {
    /// Its number in this upper.
    fn id(&self) -> u64;

    /// How it is kept.
    fn kind(&self) -> SketchKind;

    /// Size of the file in bytes.
    fn size(&self) -> u64;

    /// Reads from `offset` on and says how many bytes there were: fewer than asked for only at the end of the file.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize, SketchError>;

    /// Writes at `offset`, making the file longer if needed, and says how many bytes were written: fewer than all, but at least
    /// one, if there is no room (on the host or by the limit) for the rest, or the host failed after the first.
    fn write_at(&self, offset: u64, data: &[u8]) -> Result<usize, SketchError>;

    /// Cuts or lengthens the file. What is cut off never comes back; what is new reads as zeros.
    fn set_size(&self, size: u64) -> Result<(), SketchError>;

    /// Makes a range read as zeros and gives back its space where possible.
    fn zero(&self, offset: u64, length: u64, size: KeepSize) -> Result<(), SketchError>;

    /// Takes space for a range, so that writes to it do not fail for want of it. The content stays.
    fn allocate(&self, offset: u64, length: u64, size: KeepSize) -> Result<(), SketchError>;

    /// The first byte from `offset` on that is data, or in a hole; `None` if there is none before the end.
    fn seek(&self, offset: u64, what: Seek) -> Result<Option<u64>, SketchError>;

    /// Completes all blocks in transit, after which nothing but the caller changes the host's file: to be done before its times
    /// are read or set, as its time of change is that of the last block.
    fn settle(&self) -> Result<(), SketchError>;

    /// Calls `work`, which looks at times of the host's file or sets them, when nothing is about to set back what they were.
    fn hold_times(&self, work: &mut dyn FnMut() -> Result<(), Errno>) -> Result<(), Errno>;

    /// Completes all blocks in transit and sees to it that the sketch can be opened again with all that was written.
    fn flush(&self, how: Durability) -> Result<(), SketchError>;

    /// Flushes, and leaves the host's file such that nothing writes to it before the content changes again: no background, and
    /// not the next opening either. The host takes capabilities away with each write to a file, whoever writes.
    fn rest(&self, how: Durability) -> Result<(), SketchError>;

    /// Says beside the host's file how much there must be of what was made durable, so that it is noticed if some goes missing. Done
    /// by dropping it too; nothing if it was done.
    fn confirm(&self) -> Result<(), SketchError>;

    /// Whether it can be let go and opened again with all that was written: a flush recorded that, and no barrier failed.
    fn is_recorded(&self) -> bool;

    /// What it holds.
    fn status(&self) -> Result<SketchStatus, SketchError>;

    /// Whether nothing of the lower file is needed any more.
    fn is_complete(&self) -> Result<bool, SketchError>;

    /// Makes a plain file of it, whose whole content the host's file has, if it is sparse and complete; whether it is one now. What
    /// is in use goes on as before.
    fn promote(&self) -> Result<bool, SketchError>;

    /// Forgets what is kept beside the host's file, as nobody can open that again. What is in use goes on as before.
    fn discard(&self) -> Result<(), SketchError>;

    /// Writes the content into an empty file of the host, with holes where there is nothing, and gives the bytes written. It is
    /// not synced.
    fn copy_out(&self, to: &File) -> Result<u64, SketchError>;
}
