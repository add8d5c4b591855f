//! The on-disk structures of EROFS.
//!
//! Source: the kernel's `Documentation/filesystems/erofs.rst` and `fs/erofs/erofs_fs.h`. All
//! integers are little-endian. This module validates nothing: [`crate::reader`] parses and
//! validates the structures, and [`crate::writer`] writes them.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Magic number of the superblock.
pub const MAGIC: u32 = 0xe0f5_e1e2;

/// Offset of the superblock in bytes. The space in front of it is for a boot sector.
pub const SUPERBLOCK_OFFSET: usize = 1024;

/// log2 of the block size that the writer uses.
pub const BLOCK_SHIFT: u8 = 12;

/// Block size that the writer uses, in bytes.
pub const BLOCK_BYTES: usize = 1 << BLOCK_SHIFT;

/// Size of an inode slot in bytes. Inodes start at multiples of it in the metadata area; a nid is a
/// slot number.
pub const SLOT_BYTES: usize = 32;

/// Longest name in a directory, in bytes.
pub const NAME_MAX: usize = 255;

/// The block address of a hole.
pub const NULL_BLOCK: u32 = u32::MAX;

/// Compatible feature bits.
pub mod compatible {
    /// The superblock has a checksum.
    pub const SUPERBLOCK_CHECKSUM: u32 = 0x1;
    /// Extended inodes have modification times (not change times).
    pub const MTIME: u32 = 0x2;

    /// Bits and their names in messages.
    pub const NAMES: &[(u32, &str)] = &[
        (SUPERBLOCK_CHECKSUM, "superblock-checksum"),
        (MTIME, "mtime"),
        (0x4, "xattr-filter"),
        (0x8, "shared-xattrs-in-metabox"),
        (0x10, "plain-xattr-prefixes"),
    ];
}

/// Incompatible feature bits.
pub mod incompatible {
    /// Zeros in front of compressed data.
    pub const ZERO_PADDING: u32 = 0x1;
    /// Compression configurations, or big physical clusters.
    pub const COMPRESSION_CONFIGS: u32 = 0x2;
    /// Chunk-based files.
    pub const CHUNKED_FILE: u32 = 0x4;
    /// A device table. In a file system without extra devices: a second compression algorithm per
    /// file.
    pub const DEVICE_TABLE: u32 = 0x8;
    /// Compressed tails inline, beside the inode.
    pub const COMPRESSED_TAILS: u32 = 0x10;
    /// Fragments in a packed inode, or deduplicated compressed data.
    pub const FRAGMENTS: u32 = 0x20;
    /// Long xattr name prefixes.
    pub const XATTR_PREFIXES: u32 = 0x40;

    /// Bits and their names in messages.
    pub const NAMES: &[(u32, &str)] = &[
        (ZERO_PADDING, "zero-padding"),
        (COMPRESSION_CONFIGS, "compression-configs"),
        (CHUNKED_FILE, "chunked-file"),
        (DEVICE_TABLE, "device-table"),
        (COMPRESSED_TAILS, "compressed-tails"),
        (FRAGMENTS, "fragments"),
        (XATTR_PREFIXES, "xattr-prefixes"),
        (0x80, "48bit"),
        (0x100, "metabox"),
    ];
}

/// Data layouts of an inode: bits 1 to 3 of its format. The values 1 and 3 are compressed layouts.
pub mod layout {
    /// Contiguous blocks.
    pub const PLAIN: u16 = 0;
    /// Contiguous blocks, and an inline tail beside the inode.
    pub const INLINE: u16 = 2;
    /// Chunks, with a table beside the inode.
    pub const CHUNKED: u16 = 4;
}

/// Bits of a chunk format: log2(chunk size / block size).
pub const CHUNK_SHIFT_MASK: u16 = 0x1f;
/// Bit of a chunk format: the chunk table has 8-byte indexes, not 4-byte block addresses.
pub const CHUNK_INDEXES: u16 = 0x20;

/// The type of an inode in a directory entry, if it is not recorded there.
pub const UNKNOWN_TYPE: u8 = 0;

/// Xattr name prefixes and their indexes.
///
/// The two ACL names are complete: no more characters follow them.
pub const XATTR_PREFIXES: &[(u8, &[u8])] = &[
    (1, b"user."),
    (2, b"system.posix_acl_access"),
    (3, b"system.posix_acl_default"),
    (4, b"trusted."),
    (5, b"lustre."),
    (6, b"security."),
];

/// The bit of an xattr's name index that marks a long prefix.
pub const XATTR_LONG_PREFIX: u8 = 0x80;

/// The superblock.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SuperBlock {
    /// [`MAGIC`].
    pub magic: U32,
    /// CRC32C of the superblock to the end of its block.
    pub checksum: U32,
    /// Compatible features.
    pub feature_compat: U32,
    /// log2 of the block size.
    pub block_shift: u8,
    /// The size of the superblock in bytes is 128 + 16 times this value.
    pub extension_slots: u8,
    /// nid of the root directory.
    pub root_nid: U16,
    /// Number of inodes.
    pub inodes: U64,
    /// Modification time of compact inodes, in seconds since 1970.
    pub build_time: U64,
    /// The nanoseconds of `build_time`.
    pub build_time_nanoseconds: U32,
    /// Number of blocks.
    pub blocks: U32,
    /// First block of the metadata area, from which nids count.
    pub metadata_block: U32,
    /// First block of the shared xattr area.
    pub xattr_block: U32,
    /// Volume id.
    pub uuid: [u8; 16],
    /// Volume name, padded with NULs, the last byte NUL.
    pub volume_name: [u8; 16],
    /// Incompatible features.
    pub feature_incompat: U32,
    /// Bits of compression algorithms; without [`incompatible::COMPRESSION_CONFIGS`], the window of
    /// LZ4.
    pub compression: U16,
    /// Number of extra devices.
    pub extra_devices: U16,
    /// Start of the device table, in slots of 128 bytes.
    pub device_table_slot: U16,
    /// log2(directory block size / block size).
    pub directory_block_shift: u8,
    /// Number of long xattr prefixes.
    pub xattr_prefix_count: u8,
    /// Start of the long xattr prefixes, in units of 4 bytes.
    pub xattr_prefix_start: U32,
    /// nid of the packed inode, which holds fragments.
    pub packed_nid: U64,
    /// Zero.
    pub reserved: [u8; 24],
}

/// A slot of the device table. The table has one slot for each extra device.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DeviceSlot {
    /// Identifier of the device; the kernel uses it with fscache only.
    pub tag: [u8; 64],
    /// Number of blocks on the device.
    pub blocks: U32,
    /// Block address of the device in the address space of the first device; 0 if it has none.
    pub mapped_block: U32,
    /// Zero.
    pub reserved: [u8; 56],
}

/// The 32-byte inode. Its modification time is that of the superblock, plus `mtime_delta`.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct CompactInode {
    /// Bit 0 is 0; bits 1 to 3 are the data layout.
    pub format: U16,
    /// 0 if the inode has no xattrs. Otherwise their size in bytes is 12 + 4 * (this value - 1).
    pub xattr_count: U16,
    /// File type and permissions.
    pub mode: U16,
    /// Number of names.
    pub nlink: U16,
    /// Size in bytes.
    pub size: U32,
    /// Seconds to add to the time of the superblock. Linux before 6.15 ignores the field.
    pub mtime_delta: U32,
    /// First block, device number or chunk format, depending on type and layout.
    pub union: U32,
    /// Inode number for 32-bit stat.
    pub ino: U32,
    /// Owner.
    pub uid: U16,
    /// Group.
    pub gid: U16,
    /// Zero.
    pub reserved: U32,
}

/// The 64-byte inode.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ExtendedInode {
    /// Bit 0 is 1; bits 1 to 3 are the data layout.
    pub format: U16,
    /// As in [`CompactInode`].
    pub xattr_count: U16,
    /// File type and permissions.
    pub mode: U16,
    /// Zero (with the feature `48bit`, high bits of addresses).
    pub reserved: U16,
    /// Size in bytes.
    pub size: U64,
    /// As in [`CompactInode`].
    pub union: U32,
    /// Inode number for 32-bit stat.
    pub ino: U32,
    /// Owner.
    pub uid: U32,
    /// Group.
    pub gid: U32,
    /// Modification time in seconds since 1970, two's complement.
    pub mtime: U64,
    /// The nanoseconds of `mtime`.
    pub mtime_nanoseconds: U32,
    /// Number of names.
    pub nlink: U32,
    /// Zero.
    pub reserved2: [u8; 16],
}

/// The header of the xattrs of an inode. After it come `shared_count` ids of 4 bytes, and then
/// entries.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct XattrHeader {
    /// Bloom filter of the names (compatible feature `xattr-filter`).
    pub name_filter: U32,
    /// Number of shared ids.
    pub shared_count: u8,
    /// Zero.
    pub reserved: [u8; 7],
}

/// The header of an xattr. The name (without prefix) and the value follow, then zeros to a multiple
/// of 4 bytes.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct XattrEntry {
    /// Length of the name without prefix.
    pub name_bytes: u8,
    /// Index of the prefix, see [`XATTR_PREFIXES`].
    pub name_index: u8,
    /// Length of the value.
    pub value_bytes: U16,
}

/// An entry of a chunk table with [`CHUNK_INDEXES`].
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ChunkIndex {
    /// Zero (with the feature `48bit`, high bits of the address).
    pub reserved: U16,
    /// Device number; 0 is the first device.
    pub device: U16,
    /// First block, or [`NULL_BLOCK`].
    pub block: U32,
}

/// A directory entry. A directory block has the entries, then the names in the same order.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Dirent {
    /// nid of the inode.
    pub nid: U64,
    /// Byte offset of the name in the block. The offset of the first name is also the end of the
    /// entries.
    pub name_offset: U16,
    /// The number of the type: see [`crate::reader::FileType`].
    pub file_type: u8,
    /// Zero.
    pub reserved: u8,
}

const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(size_of::<SuperBlock>() == 128);
    assert!(size_of::<DeviceSlot>() == 128);
    assert!(offset_of!(SuperBlock, checksum) == 4);
    assert!(offset_of!(SuperBlock, root_nid) == 14);
    assert!(offset_of!(SuperBlock, inodes) == 16);
    assert!(offset_of!(SuperBlock, build_time) == 24);
    assert!(offset_of!(SuperBlock, blocks) == 36);
    assert!(offset_of!(SuperBlock, metadata_block) == 40);
    assert!(offset_of!(SuperBlock, xattr_block) == 44);
    assert!(offset_of!(SuperBlock, uuid) == 48);
    assert!(offset_of!(SuperBlock, volume_name) == 64);
    assert!(offset_of!(SuperBlock, feature_incompat) == 80);
    assert!(offset_of!(SuperBlock, extra_devices) == 86);
    assert!(offset_of!(SuperBlock, directory_block_shift) == 90);
    assert!(offset_of!(SuperBlock, xattr_prefix_count) == 91);
    assert!(offset_of!(SuperBlock, packed_nid) == 96);
    assert!(size_of::<CompactInode>() == 32);
    assert!(offset_of!(CompactInode, size) == 8);
    assert!(offset_of!(CompactInode, union) == 16);
    assert!(offset_of!(CompactInode, ino) == 20);
    assert!(offset_of!(CompactInode, uid) == 24);
    assert!(size_of::<ExtendedInode>() == 64);
    assert!(offset_of!(ExtendedInode, size) == 8);
    assert!(offset_of!(ExtendedInode, union) == 16);
    assert!(offset_of!(ExtendedInode, ino) == 20);
    assert!(offset_of!(ExtendedInode, uid) == 24);
    assert!(offset_of!(ExtendedInode, mtime) == 32);
    assert!(offset_of!(ExtendedInode, mtime_nanoseconds) == 40);
    assert!(offset_of!(ExtendedInode, nlink) == 44);
    assert!(size_of::<XattrHeader>() == 12);
    assert!(offset_of!(XattrHeader, shared_count) == 4);
    assert!(size_of::<XattrEntry>() == 4);
    assert!(offset_of!(XattrEntry, value_bytes) == 2);
    assert!(size_of::<ChunkIndex>() == 8);
    assert!(offset_of!(ChunkIndex, block) == 4);
    assert!(size_of::<Dirent>() == 12);
    assert!(offset_of!(Dirent, name_offset) == 8);
    assert!(offset_of!(Dirent, file_type) == 10);
};

/// Size of an xattr in bytes: header, name, value and padding.
pub fn xattr_entry_bytes(name_bytes: usize, value_bytes: usize) -> usize {
    (size_of::<XattrEntry>() + name_bytes + value_bytes).next_multiple_of(4)
}

/// Splits a full xattr name into the index of its prefix and the rest. `None` if EROFS has no index
/// for the name.
pub fn split_xattr_name(name: &[u8]) -> Option<(u8, &[u8])> {
    XATTR_PREFIXES.iter().find_map(|&(index, prefix)| {
        let rest = name.strip_prefix(prefix)?;
        // An ACL name is complete. After every other prefix, a name must follow.
        let is_complete = !prefix.ends_with(b".");
        (is_complete == rest.is_empty()).then_some((index, rest))
    })
}

/// The checksum of a superblock: CRC32C without the final inversion, with zeros in place of the
/// checksum field. `bytes` are those from the start of the superblock to the end of its block.
pub fn superblock_checksum(bytes: &[u8]) -> u32 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    let field = std::mem::offset_of!(SuperBlock, checksum);
    digest.update(&bytes[..field]);
    digest.update(&[0; 4]);
    digest.update(&bytes[field + 4..]);
    !(digest.finalize() as u32)
}

/// Encodes a device number for an inode (the kernel's `new_encode_dev`).
pub fn encode_device(major: u32, minor: u32) -> u32 {
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}

/// Decodes an inode's device number into major and minor.
pub fn decode_device(device: u32) -> (u32, u32) {
    (
        (device & 0xfff00) >> 8,
        (device & 0xff) | ((device >> 12) & 0xfff00),
    )
}
