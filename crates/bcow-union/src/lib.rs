//! A writable file system: an image below, a directory of the host above, and block-level copy-on-write between them.
//!
//! [`fs::UnionFs`] answers what a mount is asked. Its tree is the union of the image's and of the upper's, which lies on
//! the host as overlayfs lays out its own ([`upper`]). A lower file that was written to in part is a [`sketch`]: only the
//! blocks that were touched are stored.

pub mod account;
pub mod errno;
pub mod errors;
pub mod fs;
pub mod image;
pub mod log;
pub mod node;
pub mod options;
pub mod sketch;
pub mod upper;

pub use node::NodeId;

/// What `lseek` looks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seek {
    /// The next byte that is stored.
    Data,
    /// The next byte that is not, or the end of the file.
    Hole,
}
