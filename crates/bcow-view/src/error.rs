//! Errors.

use bcow_erofs::reader::{ErofsError, Nid};
use bcow_ext4::Ext4Error;

/// A view cannot be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ViewError {
    /// The EROFS cannot be read.
    #[error(transparent)]
    Erofs(#[from] ErofsError),
    /// The ext4 cannot be written.
    #[error(transparent)]
    Ext4(#[from] Ext4Error),
    /// An inode of the EROFS that ext4 cannot hold.
    #[error("ext4 cannot hold nid {nid} of the image: {source}")]
    Inode {
        /// The inode.
        nid: Nid,
        /// Why it cannot.
        source: Ext4Error,
    },
    /// The EROFS has blocks of another size.
    #[error("the EROFS has blocks of {0} bytes; a view needs 4096")]
    BlockBytes(u32),
    /// The ext4 has no room for the content.
    #[error("an ext4 of {bytes} bytes is too small for {content} bytes of content")]
    TooSmall {
        /// Size of the ext4.
        bytes: u64,
        /// Bytes of content that its address space must hold.
        content: u64,
    },
    /// More ends of files and shared blocks than a view holds.
    #[error("the image has more than {0} ends of files and shared blocks")]
    Fragments(usize),
    /// More inodes than ext4 numbers.
    #[error("the image has more inodes than ext4 can number")]
    Inodes,
}
