//! File content: extents and bytes.

use bcow::give_zeros;
use zerocopy::FromBytes;

use super::inode::{ChunkTable, Data};
use super::{ErofsError, FileType, Filesystem, Inode, InodeProblem};
use crate::format::{ChunkIndex, NULL_BLOCK};

/// Longest target of a symbolic link in bytes: a path with its NUL has at most 4096.
const LINK_MAX: u64 = 4095;

/// Chunk table entries per read.
const BATCH_ENTRIES: u64 = 512;

/// A run of a file's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileExtent {
    /// First byte in the file.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// The location of the run.
    pub source: ExtentSource,
}

/// The location of a run of a file's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExtentSource {
    /// On the device. The whole extent lies on the device.
    Device {
        /// Byte offset of the run on the device.
        offset: u64,
    },
    /// A hole, which reads as zeros.
    Hole,
}

impl Filesystem {
    /// The extents of a regular file from byte `offset` to its end, in order, without gaps and of
    /// maximal length. After an error the iterator ends.
    pub fn extents(
        &self,
        inode: &Inode,
        offset: u64,
    ) -> impl Iterator<Item = Result<FileExtent, ErofsError>> + use<'_> {
        Extents::new(self, inode, offset, inode.size)
    }

    /// Reads a regular file from byte `offset` on. Returns the number of bytes, which is less than
    /// the length of `buf` only at the end of the file.
    pub fn read(&self, inode: &Inode, offset: u64, buf: &mut [u8]) -> Result<usize, ErofsError> {
        inode.require(FileType::Regular, "regular file")?;
        self.read_content(inode, offset, buf)
    }

    /// Passes `length` bytes of a regular file from byte `offset` on to `sink`, in order and in
    /// pieces as the device has them; fewer only at the end of the file. If the call fails, `sink`
    /// may have received some pieces.
    pub fn read_with(
        &self,
        inode: &Inode,
        offset: u64,
        length: u64,
        sink: &mut dyn FnMut(&[u8]),
    ) -> Result<(), ErofsError> {
        inode.require(FileType::Regular, "regular file")?;
        let end = offset.saturating_add(length);
        for extent in Extents::new(self, inode, offset, end) {
            let extent = extent?;
            match extent.source {
                ExtentSource::Device { offset } => {
                    self.device.read_with(offset, extent.length, sink)?;
                }
                ExtentSource::Hole => give_zeros(extent.length, sink),
            }
        }
        Ok(())
    }

    /// A symbolic link's target.
    pub fn read_link(&self, inode: &Inode) -> Result<Vec<u8>, ErofsError> {
        inode.require(FileType::Symlink, "symbolic link")?;
        if inode.size == 0 || inode.size > LINK_MAX {
            let (nid, problem) = (inode.nid, InodeProblem::LinkTarget(inode.size));
            return Err(ErofsError::Inode { nid, problem });
        }
        let mut target = vec![0; inode.size as usize];
        self.read_content(inode, 0, &mut target)?;
        Ok(target)
    }

    /// Reads the content of a file of any type with content.
    pub(super) fn read_content(
        &self,
        inode: &Inode,
        offset: u64,
        buf: &mut [u8],
    ) -> Result<usize, ErofsError> {
        let end = offset.saturating_add(buf.len() as u64);
        let mut done = 0;
        for extent in Extents::new(self, inode, offset, end) {
            let extent = extent?;
            // The extents together are not longer than `buf`.
            let piece = &mut buf[done..done + extent.length as usize];
            match extent.source {
                ExtentSource::Device { offset } => self.device_read(offset, piece)?,
                ExtentSource::Hole => piece.fill(0),
            }
            done += piece.len();
        }
        Ok(done)
    }
}

/// Iterator over the extents between two bytes of a file.
struct Extents<'a> {
    fs: &'a Filesystem,
    inode: Inode,
    at: u64,
    /// End of the range, within the file.
    end: u64,
    /// A part of the chunk table, and the number of its first chunk.
    batch: Vec<u8>,
    batch_first: u64,
}

impl<'a> Extents<'a> {
    fn new(fs: &'a Filesystem, inode: &Inode, start: u64, end: u64) -> Self {
        Extents {
            fs,
            inode: *inode,
            at: start,
            end: end.min(inode.size),
            batch: Vec::new(),
            batch_first: 0,
        }
    }

    fn extent(&mut self) -> Result<FileExtent, ErofsError> {
        let at = self.at;
        let left = self.end - at;
        let device = |offset| ExtentSource::Device { offset };
        let (length, source) = match self.inode.data {
            Data::None | Data::Hole => (left, ExtentSource::Hole),
            Data::Plain { offset } => (left, device(offset + at)),
            Data::Inline {
                offset,
                tail_offset,
            } => {
                let inline_from = self.inode.size - self.inode.tail_bytes(self.fs.block_bytes());
                if at < inline_from {
                    (left.min(inline_from - at), device(offset + at))
                } else {
                    (left, device(tail_offset + (at - inline_from)))
                }
            }
            Data::Chunked(table) => self.chunks(table)?,
            Data::Compressed => {
                return Err(ErofsError::UnsupportedInode {
                    nid: self.inode.nid,
                    feature: "EROFS compression",
                });
            }
        };
        Ok(FileExtent {
            offset: at,
            length,
            source,
        })
    }

    /// The longest run of chunks from `self.at` on that are contiguous, or all holes.
    fn chunks(&mut self, table: ChunkTable) -> Result<(u64, ExtentSource), ErofsError> {
        let shift = table.shift;
        let chunk_bytes = 1u64 << shift;
        let first = self.at >> shift;
        let within = self.at & (chunk_bytes - 1);
        let start = self.chunk(table, first)?;
        let mut next = first + 1;
        let mut length = (chunk_bytes - within).min(self.end - self.at);
        while self.at + length < self.end {
            let here = self.chunk(table, next)?;
            let follows = match (start, here) {
                (None, None) => true,
                // Below 2^44 + 2^63, because the file is shorter than 2^63 bytes.
                (Some(start), Some(here)) => here == start + ((next - first) << shift),
                _ => false,
            };
            if !follows {
                break;
            }
            next += 1;
            length = length.saturating_add(chunk_bytes).min(self.end - self.at);
        }
        let source = match start {
            None => ExtentSource::Hole,
            Some(start) => {
                let offset = start + within;
                let nid = self.inode.nid;
                self.fs.check_content(nid, self.at, length, offset)?;
                ExtentSource::Device { offset }
            }
        };
        Ok((length, source))
    }

    /// The start of a chunk on the device, `None` for a hole. `index` is below the table's length.
    fn chunk(&mut self, table: ChunkTable, index: u64) -> Result<Option<u64>, ErofsError> {
        let entry_bytes = u64::from(table.entry_bytes);
        let loaded = self.batch.len() as u64 / entry_bytes;
        if index < self.batch_first || index >= self.batch_first + loaded {
            // The inode was refused if its table was not on the device.
            let wanted = (self.end - 1) >> table.shift;
            let count = (wanted - index + 1).min(BATCH_ENTRIES);
            self.batch.clear();
            self.batch.resize((count * entry_bytes) as usize, 0);
            let start = table.start + index * entry_bytes;
            self.fs.device_read(start, &mut self.batch)?;
            self.batch_first = index;
        }
        let at = ((index - self.batch_first) * entry_bytes) as usize;
        let bytes = &self.batch[at..at + entry_bytes as usize];
        let (block, device) = match ChunkIndex::ref_from_bytes(bytes) {
            Ok(index) => (index.block.get(), index.device.get()),
            // A block address only.
            Err(_) => {
                let block = [bytes[0], bytes[1], bytes[2], bytes[3]];
                (u32::from_le_bytes(block), 0)
            }
        };
        if block == NULL_BLOCK {
            return Ok(None);
        }
        // Content on another device is readable if that device is mapped into the addresses of the
        // first one.
        let devices = &self.fs.superblock.devices;
        let start = match device {
            0 => Some(0),
            _ => devices.get(usize::from(device) - 1).copied(),
        };
        let problem = InodeProblem::ChunkDevice(device);
        let nid = self.inode.nid;
        let start = start.filter(|&start| device == 0 || start > 0);
        let start = start.ok_or(ErofsError::Inode { nid, problem })?;
        Ok(Some(start + u64::from(block) * self.fs.block_bytes()))
    }
}

impl Iterator for Extents<'_> {
    type Item = Result<FileExtent, ErofsError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.at >= self.end {
            return None;
        }
        let extent = self.extent();
        match &extent {
            Ok(extent) => self.at += extent.length,
            Err(_) => self.at = self.end,
        }
        Some(extent)
    }
}
