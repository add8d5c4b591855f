//! Lays a tree out as an EROFS file system and writes its metadata.

use crate::tree::{TailSource, Tree};

/// Where and how the metadata is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteOptions {
    /// Byte position in the address space where the metadata starts; a multiple of 4096. All file data lies below.
    pub metadata_start: u64,
    /// Biggest tail that a regular file keeps beside its inode, in bytes, at most [`MAX_INLINE`].
    /// Longer ones are in blocks already.
    pub inline_max: u16,
}

/// The most that [`WriteOptions::inline_max`] may be.
pub const MAX_INLINE: u16 = 4032;

/// Why a tree cannot be written as EROFS.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The address space would pass 2^32 blocks.
    #[error(
        "the file system ends at byte {end}, beyond the 16 TiB that EROFS block addresses reach"
    )]
    TooLarge {
        /// End of the metadata in bytes.
        end: u64,
    },
}

/// Why [`Plan::write`] stopped.
#[derive(Debug, thiserror::Error)]
pub enum EmitError<E> {
    /// A tail could not be read back.
    #[error("cannot read a file tail back: {0}")]
    Tail(std::io::Error),
    /// The output refused.
    #[error(transparent)]
    Output(E),
}

/// A laid-out file system, ready to be written.
pub struct Plan<'t> {
    _tree: &'t Tree,
}

impl<'t> Plan<'t> {
    /// Lays `tree` out.
    pub fn new(_tree: &'t Tree, _options: &WriteOptions) -> Result<Plan<'t>, WriteError> {
        todo!()
    }

    /// Size of the metadata in bytes, a multiple of 4096.
    pub fn metadata_bytes(&self) -> u64 {
        todo!()
    }

    /// Writes exactly [`Plan::metadata_bytes`] bytes, in order.
    pub fn write<E>(
        &self,
        _tails: &dyn TailSource,
        _out: &mut dyn FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), EmitError<E>> {
        todo!()
    }

    /// Bytes 1024..4096 of block 0. `total_blocks` is the size of the address space.
    pub fn superblock(&self, _total_blocks: u64) -> [u8; 3072] {
        todo!()
    }
}
