//! Sizes and limits of the format (spec sections 3 to 8).

/// Bytes of one slot.
pub const SLOT_BYTES: usize = 512;
/// Bytes of both slots.
pub const HEADER_AREA_BYTES: usize = 2 * SLOT_BYTES;
/// Bytes of a sector, the unit of sizes and windows.
pub const SECTOR_BYTES: u64 = 4096;
/// Bytes of an entry of the backing table.
pub const BACKING_ENTRY_BYTES: usize = 64;
/// Most entries of a root table.
pub const MAX_ROOT_ENTRIES: u64 = 1 << 22;
/// Longest metadata section in bytes.
pub const MAX_METADATA_BYTES: u32 = 16 << 20;
/// Longest backing table in bytes.
pub const MAX_BACKING_BYTES: u32 = 16 << 20;
/// Most room for a record log in bytes.
pub const MAX_LOG_BYTES: u64 = 64 << 20;
/// Longest free list in bytes.
pub const MAX_FREE_BYTES: u32 = 16 << 20;
/// Largest size of an address space or file.
pub const MAX_ADDRESS: u64 = 1 << 48;
/// Most entries of a backing table.
pub const MAX_BACKINGS: u32 = 65536;
/// Bytes of one entry.
pub const ENTRY_BYTES: usize = 16;
