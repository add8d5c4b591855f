//! Sizes and limits of the format (spec sections 3 to 8).

/// Size of a header slot in bytes.
pub const SLOT_BYTES: usize = 512;
/// Size of both header slots in bytes.
pub const HEADER_AREA_BYTES: usize = 2 * SLOT_BYTES;
/// Size of a sector in bytes. Sizes and windows are multiples of it.
pub const SECTOR_BYTES: u64 = 4096;
/// Size of an entry of the backing table in bytes.
pub const BACKING_ENTRY_BYTES: usize = 64;
/// Limit of the entries of a root table.
pub const MAX_ROOT_ENTRIES: u64 = 1 << 22;
/// Limit of the metadata section in bytes.
pub const MAX_METADATA_BYTES: u32 = 16 << 20;
/// Limit of the backing table in bytes.
pub const MAX_BACKING_BYTES: u32 = 16 << 20;
/// Limit of the record log in bytes.
pub const MAX_LOG_BYTES: u64 = 64 << 20;
/// Limit of the free list in bytes.
pub const MAX_FREE_BYTES: u32 = 16 << 20;
/// Limit of the size of an address space or file in bytes.
pub const MAX_ADDRESS: u64 = 1 << 48;
/// Limit of the URL of a backing in bytes.
pub const MAX_URL_BYTES: usize = 2048;
/// Limit of the entries of a backing table.
pub const MAX_BACKINGS: u32 = 65536;
/// Size of an entry of a root or sub-block table in bytes.
pub const ENTRY_BYTES: usize = 16;
