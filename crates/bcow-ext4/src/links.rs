//! Whether names and inodes fit together.

use crate::node::{Content, Entry, FileKind, InodeNumber, Node};
use crate::{Ext4Error, InodeProblem};

/// What is known of an inode that was described, or that a directory names.
#[derive(Debug, Clone, Copy, Default)]
struct Known {
    /// Type, and for a directory its parent, by its description.
    described: Option<(FileKind, u32)>,
    /// The same by the name seen first.
    named: Option<(FileKind, u32)>,
    /// Names by the description. For a directory 1.
    links: u32,
    /// Names seen.
    names: u32,
}

/// All inodes of a tree. The n-th has the n-th number that is not reserved; the root is apart.
pub(crate) struct Links {
    first: u32,
    known: Vec<Known>,
    described: u32,
}

impl Links {
    /// `first` is the first number that a description can have.
    pub fn new(first: u32) -> Links {
        Links {
            first,
            known: Vec::new(),
            described: 0,
        }
    }

    /// Inodes that were described, without the root.
    pub fn described(&self) -> u32 {
        self.described
    }

    /// Takes note of the next inode.
    pub fn describe(&mut self, number: InodeNumber, node: &Node<'_>) -> Result<(), InodeProblem> {
        let kind = node.content.kind();
        let mut above = 0;
        let mut links = node.links;
        if let Content::Directory { parent, .. } = node.content {
            // So that no directory is below itself.
            if parent != InodeNumber::ROOT && !(self.first..number.0).contains(&parent.0) {
                return Err(InodeProblem::Parent(parent));
            }
            above = parent.0;
            links = 1;
        }
        if number == InodeNumber::ROOT {
            return Ok(());
        }
        self.described += 1;
        let known = self.known(number)?;
        known.described = Some((kind, above));
        known.links = links;
        Ok(())
    }

    /// Takes note of a directory's names.
    pub fn name(
        &mut self,
        directory: InodeNumber,
        entries: &[Entry<'_>],
    ) -> Result<(), (InodeNumber, InodeProblem)> {
        for entry in entries {
            let above = match entry.kind {
                FileKind::Directory => directory.0,
                _ => 0,
            };
            let known = self
                .known(entry.inode)
                .map_err(|problem| (entry.inode, problem))?;
            let named = *known.named.get_or_insert((entry.kind, above));
            if named != (entry.kind, above) {
                let problem = InodeProblem::Contradiction(directory);
                return Err((entry.inode, problem));
            }
            known.names += 1;
        }
        Ok(())
    }

    /// Compares names and descriptions of all inodes.
    pub fn finish(&self) -> Result<(), Ext4Error> {
        for (number, known) in (self.first..).zip(&self.known) {
            let problem = match (known.described, known.named) {
                (None, _) => InodeProblem::Missing,
                (Some(described), Some(named)) if described != named => {
                    InodeProblem::Contradiction(InodeNumber(named.1))
                }
                _ if known.links != known.names => InodeProblem::Names {
                    links: known.links,
                    names: known.names,
                },
                _ => continue,
            };
            let inode = InodeNumber(number);
            return Err(Ext4Error::Inode { inode, problem });
        }
        Ok(())
    }

    fn known(&mut self, number: InodeNumber) -> Result<&mut Known, InodeProblem> {
        let index = number
            .0
            .checked_sub(self.first)
            .ok_or(InodeProblem::Missing)? as usize;
        if self.known.len() <= index {
            self.known.resize(index + 1, Known::default());
        }
        Ok(&mut self.known[index])
    }
}
