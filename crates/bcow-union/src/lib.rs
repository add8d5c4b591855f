//! A writable file system: a read-only image below, a directory of the host above (the upper), and
//! block-level copy-on-write between them.
//!
//! [`fs::UnionFs`] answers the requests of a mount. Its tree is the union of the image's tree and
//! of the upper's tree. The upper has the on-disk layout of overlayfs's upper directory
//! ([`upper`]). A file of the image that was partly written is a [`sketch`]: the upper stores only
//! the changed blocks.

pub mod account;
pub mod blocks;
pub mod errno;
pub mod errors;
pub mod fs;
pub mod host;
pub mod image;
pub mod log;
pub mod mountinfo;
pub mod node;
pub mod offline;
pub mod options;
pub mod sketch;
pub mod upper;

pub use node::NodeId;

/// What `lseek` searches for (`SEEK_DATA`, `SEEK_HOLE`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seek {
    /// The next stored byte.
    Data,
    /// The next byte that is not stored, or the end of the file.
    Hole,
}
