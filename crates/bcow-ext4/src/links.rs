//! Checks that the names in directories agree with the descriptions of inodes.

use crate::node::{Content, DirEntry, FileKind, InodeNumber, Node};
use crate::{Ext4Error, InodeProblem};

/// The facts about one inode, from its description and from the names in directories.
#[derive(Debug, Clone, Copy, Default)]
struct InodeRecord {
    /// From the description: the type, and for a directory the number of its parent, otherwise 0.
    described: Option<(FileKind, u32)>,
    /// The same two values from the first name that a directory has for the inode.
    named: Option<(FileKind, u32)>,
    /// The number of names that the description requires: the link count, or 1 for a directory.
    links: u32,
    /// The number of names that directories have for the inode.
    names: u32,
}

/// The facts about all inodes of a tree except the root. Element 0 of `inodes` has the number
/// `first`.
pub(crate) struct LinkCheck {
    first: u32,
    inodes: Vec<InodeRecord>,
    described: u32,
}

impl LinkCheck {
    /// `first` is the first number that a description can have.
    pub fn new(first: u32) -> LinkCheck {
        LinkCheck {
            first,
            inodes: Vec::new(),
            described: 0,
        }
    }

    /// The number of described inodes, without the root.
    pub fn described(&self) -> u32 {
        self.described
    }

    /// Records the description of the next inode. The parent of a directory must be described
    /// before the directory.
    pub fn record_inode(&mut self, number: InodeNumber, node: &Node<'_>) -> Result<(), Ext4Error> {
        let kind = node.content.kind();
        let mut parent_number = 0;
        let mut links = node.links;
        if let Content::Directory { parent, .. } = node.content {
            // This order excludes a directory that is below itself.
            if parent != InodeNumber::ROOT && !(self.first..number.0).contains(&parent.0) {
                return Err(number.refused(InodeProblem::Parent(parent)));
            }
            parent_number = parent.0;
            links = 1;
        }
        if number == InodeNumber::ROOT {
            return Ok(());
        }
        self.described += 1;
        let record = self.record(number)?;
        record.described = Some((kind, parent_number));
        record.links = links;
        Ok(())
    }

    /// Records the names in a directory.
    pub fn record_names(
        &mut self,
        directory: InodeNumber,
        entries: &[DirEntry<'_>],
    ) -> Result<(), Ext4Error> {
        for entry in entries {
            let parent_number = match entry.kind {
                FileKind::Directory => directory.0,
                _ => 0,
            };
            let record = self.record(entry.inode)?;
            let named = *record.named.get_or_insert((entry.kind, parent_number));
            if named != (entry.kind, parent_number) {
                let problem = InodeProblem::Contradiction(directory);
                return Err(entry.inode.refused(problem));
            }
            record.names += 1;
        }
        Ok(())
    }

    /// Compares the names of each inode with its description.
    pub fn finish(&self) -> Result<(), Ext4Error> {
        for (number, record) in (self.first..).zip(&self.inodes) {
            let problem = match (record.described, record.named) {
                (None, _) => InodeProblem::Missing,
                (Some(described), Some(named)) if described != named => {
                    InodeProblem::Contradiction(InodeNumber(named.1))
                }
                _ if record.links != record.names => InodeProblem::Names {
                    links: record.links,
                    names: record.names,
                },
                _ => continue,
            };
            return Err(InodeNumber(number).refused(problem));
        }
        Ok(())
    }

    fn record(&mut self, number: InodeNumber) -> Result<&mut InodeRecord, Ext4Error> {
        let index = number.0.checked_sub(self.first);
        let index = index.ok_or_else(|| number.refused(InodeProblem::Missing))? as usize;
        if self.inodes.len() <= index {
            self.inodes.resize(index + 1, InodeRecord::default());
        }
        Ok(&mut self.inodes[index])
    }
}
