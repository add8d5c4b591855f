//! The seam between a block address space and whoever uses it: a file system's reader, a mount, a server.

use crate::Error;
use crate::storage::FileIdentity;

/// A readable block address space: a BCoW image, a plain file, bytes in memory.
///
/// Implementations are thread-safe and take no global lock on the read path.
pub trait BlockDevice: Send + Sync {
    /// Size of the address space in bytes.
    fn size(&self) -> u64;

    /// Fills `buf` with the bytes at `offset`.
    ///
    /// A range that ends beyond [`BlockDevice::size`] is [`Error::OutOfRange`]; nothing is read short.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Error>;

    /// Calls `sink` with the bytes of `offset..offset + length`, in order, in as many pieces as the
    /// device finds convenient. Devices that hold decoded blocks in memory lend them without a copy.
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

    /// What is known of the bytes from `offset` on without reading them, and how far it holds: at least 1 byte, at
    /// most `length`. Neighbouring pieces may say the same.
    ///
    /// A device that knows nothing of itself says that all of it is data.
    fn status(&self, offset: u64, length: u64) -> Result<Status, Error> {
        let range = checked_range(offset, length.max(1), self.size())?;
        Ok(Status {
            length: range.end - range.start,
            content: Content::Data,
            depth: 1,
        })
    }

    /// The BCoW file whose address space this is, if that is known: devices that say the same have the same bytes
    /// at the same places.
    fn identity(&self) -> Option<FileIdentity> {
        None
    }
}

/// What is known of a piece of an address space without reading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status {
    /// Bytes it holds for.
    pub length: u64,
    /// What is there.
    pub content: Content,
    /// Which file of the chain says so: 1 for this one, 2 for its backing, and so on; 0 if none does (a hole).
    pub depth: u32,
}

impl Status {
    /// The same, seen from a file above.
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

/// What stands at a piece of an address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// Stored bytes, which may be anything.
    Data,
    /// Zeros, and said so; takes no space.
    Zero,
    /// Nothing was ever there; reads as zeros.
    Hole,
}

/// An address space that can be changed.
///
/// As with a disk: a write, once it has returned, is seen by every later read; it is durable when a [`flush`]
/// that began after it returned has succeeded. Calls from several threads run side by side; overlapping writes that do so
/// leave one or the other in each block of 4096 bytes.
///
/// [`flush`]: WritableDevice::flush
pub trait WritableDevice: BlockDevice {
    /// Writes all of `bytes` at `offset`. After an error each byte of the range is as it was or as it should be.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), Error>;

    /// Makes a range read as zeros.
    fn write_zeroes(&self, offset: u64, length: u64, space: Space) -> Result<(), Error>;

    /// Says that nobody needs the content of a range any more. What is given back reads as zeros; what is too
    /// small to be given back keeps its content.
    fn discard(&self, offset: u64, length: u64) -> Result<(), Error>;

    /// Returns when every write that returned before is durable.
    fn flush(&self) -> Result<(), Error>;
}

/// What becomes of the space under zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Space {
    /// Give it back where possible.
    Free,
    /// Take it, so that later writes there do not fail for want of it.
    Keep,
}

impl<T: WritableDevice + ?Sized> WritableDevice for std::sync::Arc<T> {
    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        (**self).write_at(offset, bytes)
    }
    fn write_zeroes(&self, offset: u64, length: u64, space: Space) -> Result<(), Error> {
        (**self).write_zeroes(offset, length, space)
    }
    fn discard(&self, offset: u64, length: u64) -> Result<(), Error> {
        (**self).discard(offset, length)
    }
    fn flush(&self) -> Result<(), Error> {
        (**self).flush()
    }
}

impl<T: BlockDevice + ?Sized> BlockDevice for std::sync::Arc<T> {
    fn size(&self) -> u64 {
        (**self).size()
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        (**self).read_at(offset, buf)
    }
    fn read_with(
        &self,
        offset: u64,
        length: u64,
        sink: &mut dyn FnMut(&[u8]),
    ) -> Result<(), Error> {
        (**self).read_with(offset, length, sink)
    }
    fn status(&self, offset: u64, length: u64) -> Result<Status, Error> {
        (**self).status(offset, length)
    }
    fn identity(&self) -> Option<FileIdentity> {
        (**self).identity()
    }
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

/// `offset..offset + length` if it lies within `size`, else [`Error::OutOfRange`].
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
