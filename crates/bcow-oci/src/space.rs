//! The units of an image's address space, and its division between an image and the images below.

/// Size of an EROFS block in bytes.
pub(crate) const BLOCK_BYTES: u64 = 4096;
/// Size of the largest piece that is looked up for deduplication.
pub(crate) const PIECE_BYTES: usize = 1 << 20;
/// First block number for content of lower layers. The windows onto those layers get their
/// addresses after the metadata is laid out; until then, blocks of lower layers have numbers from
/// here on.
pub(crate) const FIRST_LOWER_BLOCK: u32 = 1 << 31;
/// Windows start at a multiple of this size.
pub(crate) const REGION_BYTES: u64 = 4 << 20;

/// Longest file tail that is stored inline, beside its inode, in a compressed image. In a block of
/// its own, the zeros behind a tail compress to almost nothing; but a larger inode table slows down
/// every lookup. Measured on 1.4 GB of Debian with Python: limits from 0 to 512 give the same file
/// size within 0.1 %, and 2000 gives 0.3 % more.
pub(crate) const INLINE_MAX: u16 = 256;
/// The same in a plain image, where a tail that is not inline takes a block of 4096 bytes; inline
/// tails reduce the same image by 5 %.
const INLINE_MAX_PLAIN: u16 = 2000;

/// Longest inline tail of an image that holds all its content, in bytes.
pub(crate) fn inline_max(plain: bool) -> u16 {
    if plain { INLINE_MAX_PLAIN } else { INLINE_MAX }
}

/// An image whose first bytes a window shows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shown {
    /// The block number of its first block in the contents of the tree.
    pub first_block: u64,
    /// Number of bytes in the window.
    pub bytes: u64,
    /// The digest by which the new image names it.
    pub digest: [u8; 32],
    /// Size of its address space in bytes.
    pub size: u64,
}
