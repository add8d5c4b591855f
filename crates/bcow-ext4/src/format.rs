//! The on-disk structures of ext4.
//!
//! Source: the kernel's `Documentation/filesystems/ext4` and `fs/ext4/ext4.h`. All integers are
//! little-endian, except those of the journal.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, big_endian};

/// The low and the high half of a number, for fields that are apart.
pub fn halves_of_64(number: u64) -> (U32, U32) {
    ((number as u32).into(), ((number >> 32) as u32).into())
}

/// The same for a number of 32 bits.
pub fn halves_of_32(number: u32) -> (U16, U16) {
    ((number as u16).into(), ((number >> 16) as u16).into())
}

/// Block size in bytes.
pub const BLOCK_BYTES: usize = 4096;
/// Blocks of a group: the bits of one bitmap block.
pub const BLOCKS_PER_GROUP: u64 = 8 * BLOCK_BYTES as u64;
/// Size of an inode in bytes.
pub const INODE_BYTES: usize = 256;
/// Inodes of a block of the inode table.
pub const INODES_PER_BLOCK: u32 = (BLOCK_BYTES / INODE_BYTES) as u32;
pub const DESCRIPTOR_BYTES: usize = size_of::<GroupDescriptor>();
/// Group descriptors of a block.
pub const DESCRIPTORS_PER_BLOCK: u64 = (BLOCK_BYTES / DESCRIPTOR_BYTES) as u64;
/// Byte offset of the superblock in block 0. A backup is at the start of its block.
pub const SUPERBLOCK_OFFSET: usize = 1024;
/// Longest name in a directory, in bytes.
pub const NAME_MAX: usize = 255;
/// More names than that a file cannot have; a directory with more subdirectories counts as 1.
pub const LINK_MAX: u32 = 65_000;
/// Targets of symbolic links below this length are in the inode, others in a block.
pub const FAST_LINK_BYTES: usize = 60;

/// Numbers of inodes with a meaning.
pub mod inode_number {
    /// The root directory.
    pub const ROOT: u32 = 2;
    pub const JOURNAL: u32 = 8;
    /// The first one that is not reserved.
    pub const FIRST: u32 = 11;
}

/// Compatible feature bits.
pub mod compatible {
    /// A journal in an inode.
    pub const JOURNAL: u32 = 0x4;
    /// Extended attributes.
    pub const XATTR: u32 = 0x8;
    /// Hash trees in directories.
    pub const DIRECTORY_INDEX: u32 = 0x20;
}

/// Incompatible feature bits.
pub mod incompatible {
    /// Directory entries have file types.
    pub const FILE_TYPE: u32 = 0x2;
    /// Descriptors from a given one on are in the groups that they describe.
    pub const META_BLOCK_GROUPS: u32 = 0x10;
    /// Files have extents.
    pub const EXTENTS: u32 = 0x40;
    /// Block numbers have 48 bits, and descriptors 64 bytes.
    pub const BITS_64: u32 = 0x80;
    /// The metadata of a group may be in other groups.
    pub const FLEXIBLE_GROUPS: u32 = 0x200;
    /// The journal has changes that are not yet in their places.
    pub const RECOVER: u32 = 0x4;
    /// Several hosts guard the file system against each other.
    pub const MULTIPLE_MOUNTS: u32 = 0x100;
    /// Values of extended attributes may be in inodes.
    pub const XATTR_INODES: u32 = 0x400;
    /// The seed of checksums is in the superblock.
    pub const CHECKSUM_SEED: u32 = 0x2000;
    /// Hash trees of directories may have three levels.
    pub const LARGE_DIRECTORIES: u32 = 0x4000;
}

/// Feature bits that concern writers only.
pub mod read_only_compatible {
    /// Backups of the superblock are in a few groups only.
    pub const SPARSE_SUPERBLOCKS: u32 = 0x1;
    /// Files of 2 GiB and more.
    pub const LARGE_FILE: u32 = 0x2;
    /// Block counts of inodes have 48 bits.
    pub const HUGE_FILE: u32 = 0x8;
    /// Directories of more than 65,000 subdirectories.
    pub const DIRECTORY_LINKS: u32 = 0x20;
    /// Inodes with nanoseconds.
    pub const EXTRA_INODE_BYTES: u32 = 0x40;
    /// All metadata has CRC32C checksums.
    pub const METADATA_CHECKSUM: u32 = 0x400;
}

pub mod group_flags {
    /// Inode bitmap and table are not initialized: no inode is in use.
    pub const INODES_UNUSED: u16 = 0x1;
    /// The block bitmap is not initialized: only the metadata of the group itself is in use.
    pub const BLOCKS_UNUSED: u16 = 0x2;
    /// The inode table holds zeros where no inode was written.
    pub const TABLE_ZEROED: u16 = 0x4;
}

pub mod inode_flags {
    /// The directory has a hash tree.
    pub const INDEX: u32 = 0x1000;
    /// The content of the inode is encrypted.
    pub const ENCRYPTED: u32 = 0x800;
    /// The inode has an extent tree.
    pub const EXTENTS: u32 = 0x8_0000;
    /// The inode has content in the place of its extent tree.
    pub const INLINE_DATA: u32 = 0x1000_0000;
}

/// Version of the directory hash: half MD4. With `UNSIGNED_HASH` it takes bytes as unsigned.
pub const HASH_HALF_MD4: u8 = 1;
/// Superblock flag: the directory hash takes the bytes of names as unsigned.
pub const UNSIGNED_HASH: u32 = 0x2;

/// The superblock.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone)]
#[repr(C)]
pub struct SuperBlock {
    pub inodes: U32,
    pub blocks_low: U32,
    pub reserved_blocks_low: U32,
    pub free_blocks_low: U32,
    pub free_inodes: U32,
    pub first_data_block: U32,
    pub log_block_size: U32,
    pub log_cluster_size: U32,
    pub blocks_per_group: U32,
    pub clusters_per_group: U32,
    pub inodes_per_group: U32,
    pub mount_time: U32,
    pub write_time: U32,
    pub mounts: U16,
    pub max_mounts: U16,
    pub magic: U16,
    pub state: U16,
    pub errors: U16,
    pub minor_revision: U16,
    pub check_time: U32,
    pub check_interval: U32,
    pub creator: U32,
    pub revision: U32,
    pub reserved_uid: U16,
    pub reserved_gid: U16,
    pub first_inode: U32,
    pub inode_bytes: U16,
    pub group: U16,
    pub compatible: U32,
    pub incompatible: U32,
    pub read_only_compatible: U32,
    pub uuid: [u8; 16],
    pub label: [u8; 16],
    pub last_mounted: [u8; 64],
    pub algorithm: U32,
    pub preallocated: [u8; 2],
    pub reserved_descriptor_blocks: U16,
    pub journal_uuid: [u8; 16],
    pub journal_inode: U32,
    pub journal_device: U32,
    pub last_orphan: U32,
    pub hash_seed: [u8; 16],
    pub hash_version: u8,
    pub journal_backup_type: u8,
    pub descriptor_bytes: U16,
    pub mount_options: U32,
    pub first_meta_group: U32,
    pub make_time: U32,
    pub journal_blocks: [U32; 17],
    pub blocks_high: U32,
    pub reserved_blocks_high: U32,
    pub free_blocks_high: U32,
    pub min_extra_bytes: U16,
    pub want_extra_bytes: U16,
    pub flags: U32,
    pub raid_stride: U16,
    pub mmp_interval: U16,
    pub mmp_block: U64,
    pub raid_stripe_width: U32,
    pub log_groups_per_flex: u8,
    pub checksum_type: u8,
    pub padding: U16,
    pub written_kib: U64,
    /// Snapshots, errors, quota and other fields that are zero here.
    pub zeros: [u8; 0xf0],
    pub checksum_seed: U32,
    /// Further fields that are zero here.
    pub more_zeros: [u8; 0x188],
    pub checksum: U32,
}

const _: () = {
    assert!(size_of::<SuperBlock>() == 1024);
    assert!(std::mem::offset_of!(SuperBlock, magic) == 0x38);
    assert!(std::mem::offset_of!(SuperBlock, uuid) == 0x68);
    assert!(std::mem::offset_of!(SuperBlock, hash_seed) == 0xec);
    assert!(std::mem::offset_of!(SuperBlock, journal_blocks) == 0x10c);
    assert!(std::mem::offset_of!(SuperBlock, flags) == 0x160);
    assert!(std::mem::offset_of!(SuperBlock, log_groups_per_flex) == 0x174);
    assert!(std::mem::offset_of!(SuperBlock, checksum_seed) == 0x270);
    assert!(std::mem::offset_of!(SuperBlock, checksum) == 0x3fc);
};

/// Magic number of the superblock.
pub const MAGIC: u16 = 0xef53;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Default)]
#[repr(C)]
pub struct GroupDescriptor {
    pub block_bitmap_low: U32,
    pub inode_bitmap_low: U32,
    pub inode_table_low: U32,
    pub free_blocks_low: U16,
    pub free_inodes_low: U16,
    pub directories_low: U16,
    pub flags: U16,
    pub exclude_low: U32,
    pub block_bitmap_checksum_low: U16,
    pub inode_bitmap_checksum_low: U16,
    pub unused_inodes_low: U16,
    pub checksum: U16,
    pub block_bitmap_high: U32,
    pub inode_bitmap_high: U32,
    pub inode_table_high: U32,
    pub free_blocks_high: U16,
    pub free_inodes_high: U16,
    pub directories_high: U16,
    pub unused_inodes_high: U16,
    pub exclude_high: U32,
    pub block_bitmap_checksum_high: U16,
    pub inode_bitmap_checksum_high: U16,
    pub reserved: U32,
}

const _: () = {
    assert!(size_of::<GroupDescriptor>() == 64);
    assert!(std::mem::offset_of!(GroupDescriptor, checksum) == 0x1e);
};

/// An inode, up to the end of its extra fields; extended attributes follow.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone)]
#[repr(C)]
pub struct RawInode {
    pub mode: U16,
    pub uid_low: U16,
    pub size_low: U32,
    pub accessed: U32,
    pub changed: U32,
    pub modified: U32,
    pub deleted: U32,
    pub gid_low: U16,
    pub links: U16,
    pub sectors_low: U32,
    pub flags: U32,
    pub version: U32,
    pub block: [u8; 60],
    pub generation: U32,
    pub xattr_block_low: U32,
    pub size_high: U32,
    pub fragment: U32,
    pub sectors_high: U16,
    pub xattr_block_high: U16,
    pub uid_high: U16,
    pub gid_high: U16,
    pub checksum_low: U16,
    pub reserved: U16,
    pub extra_bytes: U16,
    pub checksum_high: U16,
    pub changed_extra: U32,
    pub modified_extra: U32,
    pub accessed_extra: U32,
    pub created: U32,
    pub created_extra: U32,
    pub version_high: U32,
    pub project: U32,
}

/// Bytes of [`RawInode`] behind the 128 bytes of old inodes.
pub const EXTRA_BYTES: u16 = (size_of::<RawInode>() - 128) as u16;

const _: () = {
    assert!(size_of::<RawInode>() == 160);
    assert!(std::mem::offset_of!(RawInode, block) == 40);
    assert!(std::mem::offset_of!(RawInode, checksum_low) == 124);
    assert!(std::mem::offset_of!(RawInode, extra_bytes) == 128);
};

/// Magic number of a node of an extent tree.
pub const EXTENT_MAGIC: u16 = 0xf30a;

/// The head of a node of an extent tree.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone)]
#[repr(C)]
pub struct ExtentHeader {
    pub magic: U16,
    pub entries: U16,
    pub max: U16,
    pub depth: U16,
    pub generation: U32,
}

/// An entry of a leaf of an extent tree.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone)]
#[repr(C)]
pub struct ExtentLeaf {
    pub logical: U32,
    pub blocks: U16,
    pub physical_high: U16,
    pub physical_low: U32,
}

/// An entry of an inner node of an extent tree.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone)]
#[repr(C)]
pub struct ExtentIndex {
    pub logical: U32,
    pub node_low: U32,
    pub node_high: U16,
    pub unused: U16,
}

const _: () = {
    assert!(size_of::<ExtentHeader>() == 12);
    assert!(size_of::<ExtentLeaf>() == 12);
    assert!(size_of::<ExtentIndex>() == 12);
};

/// File types of directory entries.
pub mod entry_type {
    pub const REGULAR: u8 = 1;
    pub const DIRECTORY: u8 = 2;
    pub const CHAR_DEVICE: u8 = 3;
    pub const BLOCK_DEVICE: u8 = 4;
    pub const FIFO: u8 = 5;
    pub const SOCKET: u8 = 6;
    pub const SYMLINK: u8 = 7;
    /// The entry at the end of a block that holds its checksum.
    pub const CHECKSUM: u8 = 0xde;
}

/// The head of a directory entry; the name follows.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone)]
#[repr(C)]
pub struct DirectoryEntry {
    pub inode: U32,
    pub record_bytes: U16,
    pub name_bytes: u8,
    pub file_type: u8,
}

/// The last 12 bytes of a block with directory entries.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone)]
#[repr(C)]
pub struct DirectoryTail {
    pub zero: U32,
    pub record_bytes: U16,
    pub name_bytes: u8,
    pub file_type: u8,
    pub checksum: U32,
}

/// The part of a hash tree's root behind its entries `.` and `..`.
#[derive(IntoBytes, Immutable, Unaligned)]
#[repr(C)]
pub struct IndexRoot {
    pub zero: U32,
    pub hash_version: u8,
    pub info_bytes: u8,
    pub levels: u8,
    pub flags: u8,
}

const _: () = {
    assert!(size_of::<DirectoryEntry>() == 8);
    assert!(size_of::<DirectoryTail>() == 12);
    assert!(size_of::<IndexRoot>() == 8);
};

/// Magic number in front of extended attributes, in an inode and in a block.
pub const XATTR_MAGIC: u32 = 0xea02_0000;

/// The head of a block with extended attributes.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone)]
#[repr(C)]
pub struct XattrHeader {
    pub magic: U32,
    pub references: U32,
    pub blocks: U32,
    pub hash: U32,
    pub checksum: U32,
    pub reserved: [U32; 3],
}

/// The head of an extended attribute; the name follows, the value is elsewhere.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone)]
#[repr(C)]
pub struct XattrEntry {
    pub name_bytes: u8,
    pub name_index: u8,
    pub value_offset: U16,
    pub value_inode: U32,
    pub value_bytes: U32,
    pub hash: U32,
}

const _: () = {
    assert!(size_of::<XattrHeader>() == 32);
    assert!(size_of::<XattrEntry>() == 16);
};

/// The journal's superblock.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone)]
#[repr(C)]
pub struct JournalSuperBlock {
    pub magic: big_endian::U32,
    pub block_type: big_endian::U32,
    pub header_sequence: big_endian::U32,
    pub block_bytes: big_endian::U32,
    pub blocks: big_endian::U32,
    pub first: big_endian::U32,
    pub sequence: big_endian::U32,
    pub start: big_endian::U32,
    pub error: big_endian::U32,
    pub compatible: big_endian::U32,
    pub incompatible: big_endian::U32,
    pub read_only_compatible: big_endian::U32,
    pub uuid: [u8; 16],
    pub users: big_endian::U32,
    /// Fields that are zero here, or that a reader does not need.
    pub zeros: [u8; 0xc],
    pub checksum_type: u8,
    /// Further fields of this kind.
    pub more_zeros: [u8; 0xab],
    pub checksum: big_endian::U32,
}

/// Magic number of the journal.
pub const JOURNAL_MAGIC: u32 = 0xc03b_3998;
/// Type of the journal's superblock.
pub const JOURNAL_SUPERBLOCK: u32 = 4;
/// The type of CRC32C checksums of a journal.
pub const CHECKSUM_CRC32C: u8 = 4;
/// Bytes of the journal's superblock that its checksum covers.
pub const JOURNAL_SUPERBLOCK_BYTES: usize = 1024;

const _: () = {
    assert!(size_of::<JournalSuperBlock>() == 0x100);
    assert!(std::mem::offset_of!(JournalSuperBlock, uuid) == 0x30);
    assert!(std::mem::offset_of!(JournalSuperBlock, checksum_type) == 0x50);
    assert!(std::mem::offset_of!(JournalSuperBlock, checksum) == 0xfc);
};

/// The head of a block of the journal.
#[derive(FromBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct JournalHeader {
    pub magic: big_endian::U32,
    pub block_type: big_endian::U32,
    pub sequence: big_endian::U32,
}

/// The head of a commit block. The rest of the block is zero.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone)]
#[repr(C)]
pub struct JournalCommit {
    pub magic: big_endian::U32,
    pub block_type: big_endian::U32,
    pub sequence: big_endian::U32,
    pub checksum_type: u8,
    pub checksum_bytes: u8,
    pub padding: [u8; 2],
    pub checksums: [big_endian::U32; 8],
    pub seconds: big_endian::U64,
    pub nanoseconds: big_endian::U32,
    pub more_padding: [u8; 4],
}

impl JournalCommit {
    /// The type and the length of a checksum of version 1.
    pub const CRC32: (u8, u8) = (1, 4);
}

const _: () = {
    assert!(size_of::<JournalCommit>() == 64);
    assert!(std::mem::offset_of!(JournalCommit, checksums) == 16);
    assert!(std::mem::offset_of!(JournalCommit, seconds) == 48);
};

/// Types of blocks of the journal.
pub mod journal_block {
    /// Names the blocks whose new content follows.
    pub const DESCRIPTOR: u32 = 1;
    /// Ends a transaction.
    pub const COMMIT: u32 = 2;
    /// Names blocks whose older content must not be restored.
    pub const REVOKE: u32 = 5;
}

/// Compatible feature bits of the journal.
pub mod journal_compatible {
    /// Checksums of version 1: of all blocks of a transaction, in its commit block.
    pub const CHECKSUM: u32 = 0x1;
}

/// Incompatible feature bits of the journal.
pub mod journal_incompatible {
    /// There are revoke blocks.
    pub const REVOKE: u32 = 0x1;
    /// Block numbers have 64 bits.
    pub const BITS_64: u32 = 0x2;
    /// Commits do not wait for the blocks of their transaction.
    pub const ASYNC_COMMIT: u32 = 0x4;
    /// Checksums, of 16 bits for a block of content.
    pub const CHECKSUM_2: u32 = 0x8;
    /// Checksums of 32 bits.
    pub const CHECKSUM_3: u32 = 0x10;
    /// Small changes follow the journal in another form.
    pub const FAST_COMMIT: u32 = 0x20;
}

/// Flags of a block that a descriptor names.
pub mod journal_flags {
    /// The first four bytes were the magic number of the journal, and are zeros.
    pub const ESCAPED: u32 = 0x1;
    /// No UUID follows.
    pub const SAME_UUID: u32 = 0x2;
    /// The last block of this descriptor.
    pub const LAST: u32 = 0x8;
}
