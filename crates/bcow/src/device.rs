//! The seam between a block address space and whoever reads a file system out of it.

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

    /// The BCoW file whose address space this is, if that is known: devices that say the same have the same bytes
    /// at the same places.
    fn identity(&self) -> Option<FileIdentity> {
        None
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
