//! Inodes: fields to bytes.

use zerocopy::{FromZeros, IntoBytes};

use crate::checksum::Checksum;
use crate::format::{BLOCK_BYTES, EXTRA_BYTES, INODE_BYTES, RawInode, halves_of_32, halves_of_64};
use crate::node::{DeviceNumber, Node, Timestamp};
use crate::xattr::IN_INODE_BYTES;

pub(crate) type InodeBytes = [u8; INODE_BYTES];

/// Sectors of 512 bytes in a block: the unit in which inodes count their blocks.
const SECTORS: u64 = BLOCK_BYTES as u64 / 512;

/// The seconds that 34 bits hold, from 1901 to 2446.
const FIRST_SECOND: i64 = -(1 << 31);
const LAST_SECOND: i64 = (1 << 34) - 1 - (1 << 31);

/// What an inode refers to.
pub(crate) struct Body {
    /// Length in bytes.
    pub bytes: u64,
    /// Extent tree, link target or device.
    pub block: [u8; 60],
    /// Blocks that the inode uses, with those of its metadata.
    pub blocks: u64,
    /// Bits of [`crate::format::inode_flags`].
    pub flags: u32,
    /// Names; 1 for a directory with more subdirectories than ext4 counts.
    pub links: u16,
    /// Block of extended attributes, or 0.
    pub xattr_block: u64,
    /// Extended attributes in the inode.
    pub xattrs: [u8; IN_INODE_BYTES],
}

pub(crate) fn encode(node: &Node<'_>, body: &Body, seed: Checksum) -> InodeBytes {
    let mut raw = RawInode::new_zeroed();
    let sectors = body.blocks * SECTORS;
    raw.mode = (node.content.kind().mode_bits() | node.permissions & 0o7777).into();
    (raw.uid_low, raw.uid_high) = halves_of_32(node.uid);
    (raw.gid_low, raw.gid_high) = halves_of_32(node.gid);
    (raw.size_low, raw.size_high) = halves_of_64(body.bytes);
    raw.links = body.links.into();
    raw.sectors_low = (sectors as u32).into();
    raw.sectors_high = ((sectors >> 32) as u16).into();
    raw.flags = body.flags.into();
    raw.block = body.block;
    raw.xattr_block_low = (body.xattr_block as u32).into();
    raw.xattr_block_high = ((body.xattr_block >> 32) as u16).into();
    raw.extra_bytes = EXTRA_BYTES.into();
    let (seconds, extra) = split_time(node.accessed);
    (raw.accessed, raw.accessed_extra) = (seconds.into(), extra.into());
    let (seconds, extra) = split_time(node.changed);
    (raw.changed, raw.changed_extra) = (seconds.into(), extra.into());
    let (seconds, extra) = split_time(node.modified);
    (raw.modified, raw.modified_extra) = (seconds.into(), extra.into());
    let (seconds, extra) = split_time(node.created);
    (raw.created, raw.created_extra) = (seconds.into(), extra.into());
    let checksum = seed.with(raw.as_bytes()).with(&body.xattrs);
    (raw.checksum_low, raw.checksum_high) = halves_of_32(checksum.0);
    let mut bytes = [0; INODE_BYTES];
    let (fields, xattrs) = bytes.split_at_mut(size_of::<RawInode>());
    fields.copy_from_slice(raw.as_bytes());
    xattrs.copy_from_slice(&body.xattrs);
    bytes
}

/// The lower 32 bits of the seconds; then 2 bits of the upper ones, and the nanoseconds.
pub(crate) fn split_time(time: Timestamp) -> (u32, u32) {
    let (seconds, nanoseconds) = match time.seconds {
        ..FIRST_SECOND => (FIRST_SECOND, 0),
        seconds if seconds > LAST_SECOND => (LAST_SECOND, 0),
        seconds => (seconds, time.nanoseconds.min(999_999_999)),
    };
    let low = seconds as u32;
    let epoch = ((seconds - i64::from(low as i32)) >> 32) as u32;
    (low, nanoseconds << 2 | epoch)
}

/// A device number in the place of the extent tree, or `None` if it is out of range.
pub(crate) fn device(device: DeviceNumber) -> Option<[u8; 60]> {
    let DeviceNumber { major, minor } = device;
    if major >= 1 << 12 || minor >= 1 << 20 {
        return None;
    }
    let mut block = [0; 60];
    if major < 256 && minor < 256 {
        block[..4].copy_from_slice(&(major << 8 | minor).to_le_bytes());
    } else {
        let new = minor & 0xff | major << 8 | (minor & !0xff) << 12;
        block[4..8].copy_from_slice(&new.to_le_bytes());
    }
    Some(block)
}

#[cfg(test)]
mod tests {
    use super::{device, split_time};
    use crate::{DeviceNumber, Timestamp};

    #[test]
    fn times_have_34_bits() {
        let split = |seconds| {
            split_time(Timestamp {
                seconds,
                nanoseconds: 5,
            })
        };
        assert_eq!(split(0), (0, 5 << 2));
        assert_eq!(split(-1), (u32::MAX, 5 << 2));
        assert_eq!(split(1 << 31), (1 << 31, 5 << 2 | 1));
        assert_eq!(split((1 << 32) + 7), (7, 5 << 2 | 1));
        assert_eq!(split(15_032_385_535), (0x7fff_ffff, 5 << 2 | 3));
        assert_eq!(split(15_032_385_536), (0x7fff_ffff, 3));
        assert_eq!(split(i64::MIN), (1 << 31, 0));
    }

    #[test]
    fn devices_have_an_old_and_a_new_form() {
        let encoded = |major, minor| device(DeviceNumber { major, minor });
        let old = encoded(8, 1).expect("a device");
        assert_eq!(old[..8], [1, 8, 0, 0, 0, 0, 0, 0]);
        let new = encoded(0x103, 0x4_5678).expect("a device");
        assert_eq!(new[..8], [0, 0, 0, 0, 0x78, 0x03, 0x61, 0x45]);
        assert_eq!(encoded(1 << 12, 0), None);
        assert_eq!(encoded(0, 1 << 20), None);
    }
}
