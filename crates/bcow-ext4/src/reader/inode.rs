//! Inodes: bytes to fields.

use zerocopy::FromBytes;

use super::{ReadError, Reader, Structure};
use crate::checksum::Checksum;
use crate::format::{FAST_LINK_BYTES, INODE_BYTES, RawInode, inode_flags};
use crate::node::{DeviceNumber, FileKind, InodeNumber, Timestamp};

/// Bytes of an inode in front of the extra fields. Old inodes have no extra fields.
const OLD_BYTES: usize = 128;
/// Least `extra_bytes` of an inode that has the upper half of the checksum.
const WITH_CHECKSUM: u16 = 4;
/// Least `extra_bytes` of an inode that has the extra bits of the modification time.
const WITH_MODIFIED: u16 = 12;
/// Offsets of the two halves of the checksum.
const CHECKSUM_LOW: usize = 124;
const CHECKSUM_HIGH: usize = 130;

/// An inode that is in use.
#[derive(Debug, Clone)]
pub struct Inode {
    pub number: InodeNumber,
    /// The type.
    pub kind: FileKind,
    /// Permission bits with set-id and sticky bits (`0o7777`).
    pub permissions: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Length in bytes.
    pub size: u64,
    /// Number of names. For a directory, it is 2 more than the number of subdirectories, or 1 if
    /// there are more subdirectories than ext4 counts.
    pub links: u16,
    /// Last modification of the content.
    pub modified: Timestamp,
    /// The number of a device; `None` for other types.
    pub device: Option<DeviceNumber>,
    /// A number that distinguishes this inode from earlier inodes with the same inode number.
    pub generation: u32,
    pub(super) flags: u32,
    /// Extent tree, link target or device.
    pub(super) block: [u8; 60],
    pub(super) xattr_block: u64,
    /// The bytes after the extra fields, which can hold extended attributes.
    pub(super) behind: Vec<u8>,
}

impl Inode {
    /// The block with extended attributes, if there is one.
    pub fn xattr_block(&self) -> Option<u64> {
        (self.xattr_block != 0).then_some(self.xattr_block)
    }

    /// Whether the inode has an extent tree, which maps its content to blocks.
    pub(super) fn has_extents(&self) -> bool {
        self.flags & inode_flags::EXTENTS != 0
    }

    /// The target of a symbolic link, if the target is in the inode. The caller checks that the
    /// inode is a symbolic link.
    pub(super) fn short_target(&self) -> Option<&[u8]> {
        let is_short = !self.has_extents() && self.size < FAST_LINK_BYTES as u64;
        is_short.then(|| &self.block[..self.size as usize])
    }
}

impl Reader {
    /// Reads an inode that is in use.
    pub fn inode(&self, number: InodeNumber) -> Result<Inode, ReadError> {
        let bytes = self.raw_inode(number)?;
        self.decode(number, &bytes)
    }

    fn decode(&self, number: InodeNumber, bytes: &[u8; INODE_BYTES]) -> Result<Inode, ReadError> {
        let damaged = |problem| Structure::Inode(number).damaged(problem);
        let Ok((raw, _)) = RawInode::read_from_prefix(bytes) else {
            return Err(damaged("it is too short"));
        };
        let extra = raw.extra_bytes.get();
        if usize::from(extra) > INODE_BYTES - OLD_BYTES || !extra.is_multiple_of(4) {
            return Err(damaged("its extra fields are too long"));
        }
        if let Some(seed) = self.seed_of(number, raw.generation.get()) {
            check(seed, bytes, &raw).map_err(damaged)?;
        }
        let mode = raw.mode.get();
        let Some(kind) = FileKind::of_mode(mode) else {
            return Err(damaged("it has a name, but it is free or has no type"));
        };
        let unsupported = [
            (inode_flags::INLINE_DATA, "content inside the inode"),
            (inode_flags::ENCRYPTED, "encrypted content"),
        ];
        let inode = number;
        if let Some((_, what)) = unsupported
            .into_iter()
            .find(|(flag, _)| raw.flags.get() & flag != 0)
        {
            return Err(ReadError::Unsupported { inode, what });
        }
        let modified_extra = if extra >= WITH_MODIFIED { raw.modified_extra.get() } else { 0 };
        let is_device = matches!(kind, FileKind::CharDevice | FileKind::BlockDevice);
        Ok(Inode {
            number,
            kind,
            permissions: mode & 0o7777,
            uid: u32::from(raw.uid_high.get()) << 16 | u32::from(raw.uid_low.get()),
            gid: u32::from(raw.gid_high.get()) << 16 | u32::from(raw.gid_low.get()),
            size: u64::from(raw.size_high.get()) << 32 | u64::from(raw.size_low.get()),
            links: raw.links.get(),
            modified: join_time(raw.modified.get(), modified_extra),
            device: is_device.then(|| device(&raw.block)),
            generation: raw.generation.get(),
            flags: raw.flags.get(),
            block: raw.block,
            xattr_block: u64::from(raw.xattr_block_high.get()) << 32
                | u64::from(raw.xattr_block_low.get()),
            behind: bytes[OLD_BYTES + usize::from(extra)..].to_vec(),
        })
    }
}

/// Compares an inode with its checksum. The error says what is wrong.
fn check(seed: Checksum, bytes: &[u8; INODE_BYTES], raw: &RawInode) -> Result<(), &'static str> {
    let mut covered = *bytes;
    covered[CHECKSUM_LOW..][..2].fill(0);
    let has_high = raw.extra_bytes.get() >= WITH_CHECKSUM;
    if has_high {
        covered[CHECKSUM_HIGH..][..2].fill(0);
    }
    let (low, high) = seed.with(&covered).halves();
    let is_high = !has_high || high == raw.checksum_high.get();
    if low == raw.checksum_low.get() && is_high {
        Ok(())
    } else {
        Err("its checksum is wrong")
    }
}

/// The inverse of the writer's `split_time`.
fn join_time(low: u32, extra: u32) -> Timestamp {
    Timestamp {
        seconds: i64::from(low as i32) + (i64::from(extra & 3) << 32),
        nanoseconds: (extra >> 2).min(999_999_999),
    }
}

/// Decodes a device number, which is in the place of the extent tree. Linux has an old and a new
/// form of device numbers; in the new form, the first word is 0.
fn device(block: &[u8; 60]) -> DeviceNumber {
    let word =
        |at: usize| u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
    match (word(0), word(4)) {
        (0, new) => DeviceNumber {
            major: new >> 8 & 0xfff,
            minor: new & 0xff | new >> 12 & 0xf_ff00,
        },
        (old, _) => DeviceNumber {
            major: old >> 8 & 0xff,
            minor: old & 0xff,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::{device, join_time};
    use crate::inode;
    use crate::{DeviceNumber, Timestamp};

    #[test]
    fn devices_of_both_forms_are_read() {
        for (major, minor) in [(8, 1), (1, 0), (0, 1), (0x103, 0x4_5678), (0xfff, 0xf_ffff)] {
            let number = DeviceNumber { major, minor };
            let block = inode::device(number).expect("a device");
            assert_eq!(device(&block), number);
        }
    }

    #[test]
    fn times_are_read_as_they_were_written() {
        for seconds in [0, -1, -(1 << 31), 1 << 31, (1 << 32) + 7, 15_032_385_535] {
            let time = Timestamp {
                seconds,
                nanoseconds: 999_999_999,
            };
            let (low, extra) = inode::split_time(time);
            assert_eq!(join_time(low, extra), time);
        }
    }
}
