//! The interface between a block address space and its user: a file system reader, a mount, a
//! server.

use std::any::Any;
use std::sync::Arc;

use crate::Error;
use crate::storage::FileIdentity;

/// A readable block address space: a BCoW image, a plain file, bytes in memory.
///
/// Implementations are thread-safe and acquire no global lock on the read path.
pub trait BlockDevice: Send + Sync {
    /// Size of the address space in bytes.
    fn size(&self) -> u64;

    /// Fills `buf` with the bytes at `offset`.
    ///
    /// A range that ends beyond [`BlockDevice::size`] is [`Error::OutOfRange`]; there are no short
    /// reads.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Error>;

    /// Calls `sink` with the bytes of `offset..offset + length`, in order, in one or more pieces. A
    /// device with decoded blocks in memory passes references to them, without a copy.
    fn read_with(
        &self,
        offset: u64,
        length: u64,
        sink: &mut dyn FnMut(&[u8]),
    ) -> Result<(), Error> {
        let mut buf = vec![0; length.min(1 << 16) as usize];
        let mut done = 0;
        while done < length {
            let n = (length - done).min(buf.len() as u64) as usize;
            self.read_at(offset + done, &mut buf[..n])?;
            sink(&buf[..n]);
            done += n as u64;
        }
        Ok(())
    }

    /// Returns what is known about the bytes from `offset` on without a read, and the length for
    /// which it holds: at least 1 byte, at most `length`. Two neighbouring pieces may have the same
    /// status.
    ///
    /// The default implementation reports data everywhere.
    fn status(&self, offset: u64, length: u64) -> Result<Status, Error> {
        let range = checked_range(offset, length.max(1), self.size())?;
        Ok(Status::data(range.end - range.start))
    }

    /// Whether the device can have windows or fragments. In their ranges, a [`Status`] with a depth
    /// above 1 does not mean that the backing of the disk has this content at the same address.
    fn has_windows(&self) -> bool {
        false
    }

    /// The BCoW file with this address space, if known. Devices with the same identity have the
    /// same bytes at the same places.
    fn identity(&self) -> Option<FileIdentity> {
        None
    }

    /// The device as a value of its own type, if its mapping does not change while it is open: then
    /// the map of a chain can include it.
    fn into_any(self: Arc<Self>) -> Option<Arc<dyn Any + Send + Sync>> {
        None
    }
}

/// What is known about a piece of an address space without a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status {
    /// Length of the piece in bytes.
    pub length: u64,
    /// Kind of content.
    pub content: Content,
    /// The file of the chain that determines the content: 1 for this file, 2 for its backing, and
    /// so on; 0 if no file does (a hole).
    pub depth: u32,
}

impl Status {
    /// A piece that reads as zeros because no file has it.
    pub fn hole(length: u64) -> Self {
        Status {
            length,
            content: Content::Hole,
            depth: 0,
        }
    }

    /// A piece that this file says is zeros.
    pub fn zeros(length: u64) -> Self {
        let content = Content::Zero;
        Status {
            content,
            ..Status::data(length)
        }
    }

    /// A piece that this file stores.
    pub fn data(length: u64) -> Self {
        Status {
            length,
            content: Content::Data,
            depth: 1,
        }
    }

    /// The same status, seen from the file above.
    pub(crate) fn one_deeper(self) -> Self {
        Status {
            depth: match self.depth {
                0 => 0,
                depth => depth + 1,
            },
            ..self
        }
    }
}

/// Kind of content of a piece of an address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// Stored data.
    Data,
    /// Zeros by an explicit entry; they take no space.
    Zero,
    /// Never written; reads as zeros.
    Hole,
}

/// A writable address space.
///
/// The rules are those of a disk. A write that has returned is visible to all later reads. It is
/// durable when a [`flush`] that began after it returned has succeeded. Calls from several threads
/// run concurrently; concurrent writes that overlap leave one or the other in each block of 4096
/// bytes.
///
/// [`flush`]: WritableDevice::flush
pub trait WritableDevice: BlockDevice {
    /// Writes all of `bytes` at `offset`. After an error, each byte of the range has its old or its
    /// new value.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), Error>;

    /// Makes a range read as zeros.
    fn write_zeroes(&self, offset: u64, length: u64, space: Space) -> Result<(), Error>;

    /// Discards the content of a range. Released space reads as zeros; a part that is too small to
    /// be released keeps its content.
    fn discard(&self, offset: u64, length: u64) -> Result<(), Error>;

    /// Makes all writes durable that returned before the call.
    fn flush(&self) -> Result<(), Error>;
}

/// What happens to the space of a zeroed range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Space {
    /// Release it where possible.
    Free,
    /// Keep it allocated, so that later writes to the range do not fail for lack of space.
    Keep,
}

/// Bytes in memory as an address space.
impl BlockDevice for Vec<u8> {
    fn size(&self) -> u64 {
        self.len() as u64
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        let range = checked_range(offset, buf.len() as u64, self.size())?;
        buf.copy_from_slice(&self[range.start as usize..range.end as usize]);
        Ok(())
    }
}

/// Returns `offset..offset + length` if it lies within `size`, else [`Error::OutOfRange`].
pub(crate) fn checked_range(
    offset: u64,
    length: u64,
    size: u64,
) -> Result<std::ops::Range<u64>, Error> {
    match offset.checked_add(length) {
        Some(end) if end <= size => Ok(offset..end),
        _ => Err(Error::OutOfRange {
            offset,
            length,
            size,
        }),
    }
}
