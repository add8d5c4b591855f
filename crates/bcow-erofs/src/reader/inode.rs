//! Reads and validates inodes.

use zerocopy::FromBytes;

use super::kind::{FileType, Nid};
use super::{ErofsError, Filesystem, InodeProblem};
use crate::format::{
    self, BLOCK_SHIFT, CHUNK_INDEXES, CHUNK_SHIFT_MASK, ChunkIndex, CompactInode, ExtendedInode,
    NULL_BLOCK, SLOT_BYTES, XattrHeader, layout,
};
use crate::tree::{DeviceNumber, Timestamp};

/// A valid inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Inode {
    /// The number of the slot of the inode.
    pub nid: Nid,
    /// Type of the file.
    pub kind: FileType,
    /// Permission bits with set-id and sticky bits (`0o7777`).
    pub permissions: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Size in bytes.
    pub size: u64,
    /// Number of names.
    pub nlink: u32,
    /// Modification time.
    pub mtime: Timestamp,
    /// Device number of a device inode.
    pub rdev: Option<DeviceNumber>,
    /// Inode number for stat(2), the same as that of the kernel's EROFS. It is unique, and never 0
    /// in images made by bcow.
    pub ino: u64,
    pub(super) data: Data,
    /// Offset of the xattrs on the device, in bytes.
    pub(super) xattr_offset: u64,
    /// Length of the xattrs in bytes: 0, or at least that of the header.
    pub(super) xattr_bytes: u32,
}

impl Inode {
    /// Fails if the inode is of another kind.
    pub(super) fn require(&self, kind: FileType, expected: &'static str) -> Result<(), ErofsError> {
        if self.kind == kind {
            return Ok(());
        }
        Err(ErofsError::WrongKind {
            nid: self.nid,
            expected,
            found: self.kind,
        })
    }

    /// `st_mode`: type and permissions.
    pub fn mode(&self) -> u32 {
        self.kind.mode_bits() | u32::from(self.permissions)
    }

    /// Whether the inode has extended attributes. Reads nothing from the device.
    pub fn has_xattrs(&self) -> bool {
        self.xattr_bytes > size_of::<XattrHeader>() as u32
    }

    /// For a chunk-based file: log2 of the chunk size in blocks of 4096 bytes. The blocks of the
    /// file system must have 4096 bytes.
    pub(crate) fn chunk_shift(&self) -> Option<u8> {
        match self.data {
            Data::Chunked(table) => Some(table.shift.saturating_sub(BLOCK_SHIFT)),
            _ => None,
        }
    }

    /// Whether an extent of this file that starts at device byte `offset` is its inline tail.
    pub fn is_inline_tail(&self, offset: u64) -> bool {
        matches!(self.data, Data::Inline { tail_offset, .. } if tail_offset == offset)
    }

    /// Start and end, in bytes of the device, of the inode with its xattrs and its inline tail or
    /// chunk table.
    pub fn footprint(&self, fs: &Filesystem) -> (u64, u64) {
        let start = fs.superblock.metadata_offset + self.nid.0 * SLOT_BYTES as u64;
        let end = self.xattr_offset + u64::from(self.xattr_bytes);
        let end = match self.data {
            Data::Inline { tail_offset, .. } => tail_offset + self.tail_bytes(fs.block_bytes()),
            Data::Chunked(table) => table.start + table.bytes(self.size),
            _ => end,
        };
        (start, end)
    }

    /// Length of the tail in the inline layout. The tail is a whole block if the size is a multiple
    /// of the block size, and empty only in an empty file.
    pub(super) fn tail_bytes(&self, block_bytes: u64) -> u64 {
        match self.size {
            0 => 0,
            size => size - (size - 1) / block_bytes * block_bytes,
        }
    }
}

/// The location of the content. [`Filesystem::inode`] has checked that all of it lies on the
/// device, except for the content of chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Data {
    /// No content: devices, pipes, sockets, and empty files.
    None,
    /// All content is contiguous, from `offset` on the device.
    Plain { offset: u64 },
    /// All content is a hole.
    Hole,
    /// Whole blocks from `offset` on the device, and the tail at `tail_offset`.
    Inline { offset: u64, tail_offset: u64 },
    /// Chunks.
    Chunked(ChunkTable),
    /// Compressed content.
    Compressed,
}

/// A table of the places of chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ChunkTable {
    /// Offset on the device in bytes.
    pub start: u64,
    /// log2 of the chunk size in bytes.
    pub shift: u8,
    /// Bytes of an entry: a [`ChunkIndex`], or a block address of 4 bytes.
    pub entry_bytes: u8,
}

impl ChunkTable {
    /// Length in bytes of the table of a file of `size` bytes. It cannot overflow: the size is
    /// below 2^63, so the table is below 2^63 / 512 * 8.
    fn bytes(&self, size: u64) -> u64 {
        size.div_ceil(1 << self.shift) * u64::from(self.entry_bytes)
    }
}

/// The fields of both forms of an inode, before validation.
struct InodeFields {
    /// Size of the inode in bytes.
    bytes: u64,
    format: u16,
    xattr_count: u16,
    mode: u16,
    size: u64,
    union: u32,
    uid: u32,
    gid: u32,
    mtime: Timestamp,
    nlink: u32,
}

impl Filesystem {
    /// Reads and validates an inode.
    pub fn inode(&self, nid: Nid) -> Result<Inode, ErofsError> {
        let damaged = |problem| ErofsError::Inode { nid, problem };
        let offset = self
            .nid_offset(nid)
            .filter(|&offset| self.on_device(offset, size_of::<CompactInode>() as u64))
            .ok_or(damaged(InodeProblem::OutOfRange))?;
        let raw = self.inode_fields(nid, offset)?;
        let Some(kind) = FileType::from_mode(raw.mode) else {
            return Err(damaged(InodeProblem::Mode(raw.mode)));
        };
        if raw.size > i64::MAX as u64 {
            return Err(damaged(InodeProblem::Size(raw.size)));
        }
        if raw.mtime.nanoseconds >= 1_000_000_000 {
            return Err(damaged(InodeProblem::Nanoseconds(raw.mtime.nanoseconds)));
        }
        let xattr_offset = offset + raw.bytes;
        let xattr_bytes = match raw.xattr_count {
            0 => 0,
            count => size_of::<XattrHeader>() as u32 + 4 * (u32::from(count) - 1),
        };
        if !self.on_device(xattr_offset, xattr_bytes.into()) {
            return Err(damaged(InodeProblem::PartOutOfRange("xattr area")));
        }
        let data_offset = xattr_offset + u64::from(xattr_bytes);
        let rdev = match kind {
            FileType::CharDevice | FileType::BlockDevice => {
                let (major, minor) = format::decode_device(raw.union);
                Some(DeviceNumber { major, minor })
            }
            _ => None,
        };
        let mut inode = Inode {
            nid,
            kind,
            permissions: raw.mode & 0o7777,
            uid: raw.uid,
            gid: raw.gid,
            size: raw.size,
            nlink: raw.nlink,
            mtime: raw.mtime,
            rdev,
            ino: nid.0,
            data: Data::None,
            xattr_offset,
            xattr_bytes,
        };
        inode.data = self.data(&inode, &raw, data_offset)?;
        Ok(inode)
    }

    /// Reads the fields of the inode at `offset` of the device.
    fn inode_fields(&self, nid: Nid, offset: u64) -> Result<InodeFields, ErofsError> {
        let damaged = |problem| ErofsError::Inode { nid, problem };
        // One read covers both forms of an inode.
        let mut buf = [0; size_of::<ExtendedInode>()];
        let available = (self.device_bytes - offset).min(buf.len() as u64) as usize;
        self.device_read(offset, &mut buf[..available])?;
        let format = u16::from_le_bytes([buf[0], buf[1]]);
        if format & 1 == 0 {
            let Ok((raw, _)) = CompactInode::ref_from_prefix(&buf) else {
                return Err(damaged(InodeProblem::OutOfRange));
            };
            let base = self.superblock.build_time;
            let delta = i64::from(raw.mtime_delta.get());
            Ok(InodeFields {
                bytes: size_of::<CompactInode>() as u64,
                format,
                xattr_count: raw.xattr_count.get(),
                mode: raw.mode.get(),
                size: raw.size.get().into(),
                union: raw.union.get(),
                uid: raw.uid.get().into(),
                gid: raw.gid.get().into(),
                mtime: Timestamp {
                    seconds: base.seconds.wrapping_add(delta),
                    nanoseconds: base.nanoseconds,
                },
                nlink: raw.nlink.get().into(),
            })
        } else {
            let Ok(raw) = ExtendedInode::ref_from_bytes(&buf[..available]) else {
                return Err(damaged(InodeProblem::OutOfRange));
            };
            Ok(InodeFields {
                bytes: size_of::<ExtendedInode>() as u64,
                format,
                xattr_count: raw.xattr_count.get(),
                mode: raw.mode.get(),
                size: raw.size.get(),
                union: raw.union.get(),
                uid: raw.uid.get(),
                gid: raw.gid.get(),
                mtime: Timestamp {
                    seconds: raw.mtime.get() as i64,
                    nanoseconds: raw.mtime_nanoseconds.get(),
                },
                nlink: raw.nlink.get(),
            })
        }
    }

    /// Validates the layout of an inode and finds its content. `data_offset` is the end of its
    /// xattrs on the device.
    fn data(&self, inode: &Inode, raw: &InodeFields, data_offset: u64) -> Result<Data, ErofsError> {
        let nid = inode.nid;
        let damaged = |problem| ErofsError::Inode { nid, problem };
        if raw.format & !0xf != 0 {
            return Err(ErofsError::UnsupportedInode {
                nid,
                feature: "an inode format beyond layout and size (feature 48bit)",
            });
        }
        let block_bytes = self.block_bytes();
        let form = raw.format >> 1;
        if form > layout::CHUNKED {
            return Err(damaged(InodeProblem::Layout(form)));
        }
        let has_content = matches!(
            inode.kind,
            FileType::Regular | FileType::Directory | FileType::Symlink
        );
        if !has_content || inode.size == 0 {
            return Ok(Data::None);
        }
        let offset = u64::from(raw.union) * block_bytes;
        match form {
            layout::PLAIN if raw.union == NULL_BLOCK => Ok(Data::Hole),
            layout::PLAIN => {
                self.check_content(nid, 0, inode.size, offset)?;
                Ok(Data::Plain { offset })
            }
            layout::INLINE => {
                let tail = inode.tail_bytes(block_bytes);
                if !self.on_device(data_offset, tail) {
                    return Err(damaged(InodeProblem::PartOutOfRange("inline tail")));
                }
                if data_offset % block_bytes + tail > block_bytes {
                    return Err(damaged(InodeProblem::TailCrossesBlock));
                }
                if inode.size > tail {
                    self.check_content(nid, 0, inode.size - tail, offset)?;
                }
                Ok(Data::Inline {
                    offset,
                    tail_offset: data_offset,
                })
            }
            layout::CHUNKED => {
                let chunk_format = (raw.union & 0xffff) as u16;
                if chunk_format & !(CHUNK_SHIFT_MASK | CHUNK_INDEXES) != 0 {
                    return Err(ErofsError::UnsupportedInode {
                        nid,
                        feature: "a chunk format beyond size and indexes (feature 48bit)",
                    });
                }
                let entry_bytes = match chunk_format & CHUNK_INDEXES {
                    0 => 4,
                    _ => size_of::<ChunkIndex>() as u8,
                };
                let block_shift = block_bytes.trailing_zeros() as u8;
                let table = ChunkTable {
                    start: data_offset.next_multiple_of(entry_bytes.into()),
                    // At most 12 + 31.
                    shift: block_shift + (chunk_format & CHUNK_SHIFT_MASK) as u8,
                    entry_bytes,
                };
                if !self.on_device(table.start, table.bytes(inode.size)) {
                    return Err(damaged(InodeProblem::PartOutOfRange("chunk table")));
                }
                Ok(Data::Chunked(table))
            }
            _ => Ok(Data::Compressed),
        }
    }

    /// Checks that content lies on the device: `length` bytes at `device_offset`. In an error,
    /// `offset` is the place of the content in the file.
    pub(super) fn check_content(
        &self,
        nid: Nid,
        offset: u64,
        length: u64,
        device_offset: u64,
    ) -> Result<(), ErofsError> {
        if self.on_device(device_offset, length) {
            return Ok(());
        }
        Err(ErofsError::Inode {
            nid,
            problem: InodeProblem::Content {
                offset,
                length,
                device_offset,
            },
        })
    }
}
