//! The first walk over a tree: it numbers the inodes, and counts names and fragments.

use bcow_erofs::reader::{FileType, Filesystem};
use bcow_ext4::FileKind;

use crate::BLOCK_BYTES;
use crate::ViewError;
use crate::numbers::Numbers;
use crate::place::{Pieces, RunOrigin};

/// All inodes, directories before their entries.
pub(crate) struct Survey {
    pub numbers: Numbers,
    /// Blocks that become fragments.
    pub fragments: u64,
}

impl Survey {
    /// Walks over the whole tree, one level after the other.
    pub fn new(fs: &Filesystem) -> Result<Survey, ViewError> {
        let mut fragments = 0;
        let mut pieces = Pieces::new(fs.device_bytes() / BLOCK_BYTES);
        let numbers = Numbers::walk(fs, &mut |known| {
            let inode = fs.inode(known.nid)?;
            match inode.kind {
                FileType::Directory => return Ok(Some(inode)),
                FileType::Regular => pieces.of_file(fs, &inode, &mut |piece| {
                    if let RunOrigin::Fragment(_) = piece.source {
                        fragments += u64::from(piece.blocks);
                    }
                })?,
                _ => {}
            }
            Ok(None)
        })?;
        Ok(Survey { numbers, fragments })
    }
}

/// A type in ext4's words.
pub(crate) fn kind(kind: FileType) -> FileKind {
    match kind {
        FileType::Regular => FileKind::Regular,
        FileType::Directory => FileKind::Directory,
        FileType::CharDevice => FileKind::CharDevice,
        FileType::BlockDevice => FileKind::BlockDevice,
        FileType::Fifo => FileKind::Fifo,
        FileType::Socket => FileKind::Socket,
        FileType::Symlink => FileKind::Symlink,
    }
}
