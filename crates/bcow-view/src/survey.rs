//! The first walk over a tree: it numbers the inodes, and counts names and fragments.

use std::collections::HashMap;

use bcow_erofs::reader::{Child, Children, ErofsError, FileType, Filesystem, Inode, Nid};
use bcow_ext4::FileKind;

use crate::BLOCK_BYTES;
use crate::ViewError;
use crate::place::{Pieces, Source};

/// An inode that has been found.
pub(crate) struct Known {
    pub nid: Nid,
    /// Names that directories have for it.
    pub links: u32,
    /// The place of the first directory with such a name in the survey. The root's is its own.
    pub parent: u32,
}

/// All inodes, directories before their entries.
pub(crate) struct Survey {
    pub inodes: Vec<Known>,
    numbers: HashMap<Nid, u32>,
    /// Blocks that become fragments.
    pub fragments: u64,
}

impl Survey {
    /// Walks over the whole tree, one level after the other.
    pub fn new(fs: &Filesystem) -> Result<Survey, ViewError> {
        let mut survey = Survey {
            inodes: Vec::new(),
            numbers: HashMap::new(),
            fragments: 0,
        };
        survey.find(fs.root(), 0)?;
        let mut pieces = Pieces::new(fs.device_bytes() / BLOCK_BYTES);
        let mut at = 0;
        while let Some(known) = survey.inodes.get(at) {
            let inode = fs.inode(known.nid)?;
            match inode.kind {
                FileType::Directory => survey.directory(fs, &inode, at as u32)?,
                FileType::Regular => pieces.of_file(fs, &inode, &mut |piece| {
                    if let Source::Fragment(_) = piece.source {
                        survey.fragments += u64::from(piece.blocks);
                    }
                })?,
                _ => {}
            }
            at += 1;
        }
        Ok(survey)
    }

    /// The place of an inode that the survey found.
    pub fn number(&self, nid: Nid) -> u32 {
        // The same entries were read before, by the survey.
        self.numbers.get(&nid).copied().unwrap_or(u32::MAX)
    }

    fn directory(
        &mut self,
        fs: &Filesystem,
        directory: &Inode,
        number: u32,
    ) -> Result<(), ViewError> {
        each_child(fs, directory, &mut |child| {
            let is_known = self.numbers.contains_key(&child.nid);
            if is_known && child.kind == FileType::Directory {
                return Err(ErofsError::DirectoryTwice { nid: child.nid }.into());
            }
            self.find(child.nid, number)
        })
    }

    fn find(&mut self, nid: Nid, parent: u32) -> Result<(), ViewError> {
        let next = self.inodes.len();
        let number = *self.numbers.entry(nid).or_insert(next as u32);
        if number as usize == next {
            // Some numbers are ext4's own.
            if next > u32::MAX as usize - 16 {
                return Err(ViewError::Inodes);
            }
            self.inodes.push(Known {
                nid,
                links: 0,
                parent,
            });
        }
        self.inodes[number as usize].links += 1;
        Ok(())
    }
}

/// Calls `each` with the entries of a directory.
pub(crate) fn each_child(
    fs: &Filesystem,
    directory: &Inode,
    each: &mut dyn FnMut(Child) -> Result<(), ViewError>,
) -> Result<(), ViewError> {
    let mut children = Children::sorted(*directory);
    while let Some(child) = children.next(fs)? {
        each(child)?;
    }
    Ok(())
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
