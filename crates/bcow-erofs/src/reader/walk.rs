//! Visits all paths of a tree.

use std::collections::HashSet;

use super::{Children, ErofsError, FileType, Filesystem, Inode, Nid};

/// Limit on nested directories. A path of PATH_MAX (4096) bytes cannot have more.
pub(crate) const MAX_DEPTH: usize = 4096;

/// Visits all paths of a tree in the order of their names, a directory before its contents.
///
/// A directory is an error if its names are not sorted, if the walk has already visited it, or if
/// it is too deep for any path.
pub struct Walk<'f> {
    fs: &'f Filesystem,
    /// The children still to visit of each directory from the root to the current one, and the
    /// length of the path of the directory.
    levels: Vec<(Children, usize)>,
    /// The directories that the walk has visited.
    seen: HashSet<Nid>,
    /// The path of the last inode or error.
    path: Vec<u8>,
    is_started: bool,
}

impl<'f> Walk<'f> {
    /// A walk that starts at the root.
    pub fn new(fs: &'f Filesystem) -> Self {
        Walk {
            fs,
            levels: Vec::new(),
            seen: HashSet::new(),
            path: Vec::new(),
            is_started: false,
        }
    }

    /// The next inode, or `None` at the end. [`Walk::path`] returns its path, or after an error the
    /// path of the failed inode or directory. The next call continues with the next inode. If the
    /// names of a directory cannot be read, the walk omits the rest of this directory.
    #[allow(
        clippy::should_implement_trait,
        reason = "an iterator could not return an error at each step and lend the path"
    )]
    pub fn next(&mut self) -> Result<Option<Inode>, ErofsError> {
        if !self.is_started {
            self.is_started = true;
            let root = self.fs.inode(self.fs.root())?;
            self.enter(root)?;
            return Ok(Some(root));
        }
        while let Some((children, path_bytes)) = self.levels.last_mut() {
            self.path.truncate(*path_bytes);
            let child = match children.next(self.fs) {
                Ok(Some(child)) => child,
                end_or_error => {
                    self.levels.pop();
                    end_or_error?;
                    continue;
                }
            };
            if !self.path.is_empty() {
                self.path.push(b'/');
            }
            self.path.extend_from_slice(&child.name);
            let inode = self.fs.inode(child.nid)?;
            if inode.kind == FileType::Directory {
                self.enter(inode)?;
            }
            return Ok(Some(inode));
        }
        Ok(None)
    }

    /// Path of the last inode or error, without a leading slash; empty for the root.
    pub fn path(&self) -> &[u8] {
        &self.path
    }

    /// Adds the children of a directory to the walk.
    fn enter(&mut self, directory: Inode) -> Result<(), ErofsError> {
        if !self.seen.insert(directory.nid) {
            return Err(ErofsError::DirectoryTwice { nid: directory.nid });
        }
        if self.levels.len() == MAX_DEPTH {
            return Err(ErofsError::TooDeep { limit: MAX_DEPTH });
        }
        let level = (Children::sorted(directory), self.path.len());
        self.levels.push(level);
        Ok(())
    }
}
