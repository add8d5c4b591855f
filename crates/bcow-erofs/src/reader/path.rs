//! Resolves paths from the root.

use super::{ErofsError, FileType, Filesystem, Inode, Nid};

/// Whether [`Filesystem::resolve_with`] follows symbolic links.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Symlinks {
    /// Links are not followed, neither on the way nor at the end. `..` is resolved in the text of
    /// the path.
    Keep,
    /// Links are followed inside the file system, at most 40, the last component included.
    Follow,
}

/// Limit on symbolic links in a path, as in the kernel.
const MAX_LINKS: u32 = 40;

impl Filesystem {
    /// Finds a path from the root, with or without leading slash. Links are not followed. `..` is
    /// resolved in the text of the path and stops at the root. `None` if the path does not exist.
    pub fn resolve(&self, path: &[u8]) -> Result<Option<Nid>, ErofsError> {
        self.resolve_with(path, Symlinks::Keep)
    }

    /// Finds a path from the root, with or without leading slash. The parent of the root is the
    /// root.
    pub fn resolve_with(&self, path: &[u8], links: Symlinks) -> Result<Option<Nid>, ErofsError> {
        match links {
            Symlinks::Keep => self.walk(lexical(path), links),
            Symlinks::Follow => self.walk(path.to_vec(), links),
        }
    }

    fn walk(&self, path: Vec<u8>, links: Symlinks) -> Result<Option<Nid>, ErofsError> {
        // The remaining components, the last one first.
        let mut todo: Vec<Vec<u8>> = components(&path).rev().map(<[u8]>::to_vec).collect();
        let mut way: Vec<Inode> = vec![self.inode(self.root())?];
        let mut links_passed = 0;
        while let Some(name) = todo.pop() {
            if name == b".." {
                if way.len() > 1 {
                    way.pop();
                }
                continue;
            }
            let Some(here) = way.last().filter(|here| here.kind == FileType::Directory) else {
                return Ok(None);
            };
            let Some(entry) = self.lookup(here, &name)? else {
                return Ok(None);
            };
            let inode = self.inode(entry.nid)?;
            if inode.kind == FileType::Symlink && links == Symlinks::Follow {
                links_passed += 1;
                if links_passed > MAX_LINKS {
                    return Err(ErofsError::TooManyLinks);
                }
                let target = self.read_link(&inode)?;
                if target.starts_with(b"/") {
                    way.truncate(1);
                }
                todo.extend(components(&target).rev().map(<[u8]>::to_vec));
            } else {
                way.push(inode);
            }
        }
        Ok(way.last().map(|inode| inode.nid))
    }
}

fn components(path: &[u8]) -> impl DoubleEndedIterator<Item = &[u8]> {
    path.split(|&b| b == b'/')
        .filter(|name| !name.is_empty() && *name != b".")
}

/// The path without `..`.
fn lexical(path: &[u8]) -> Vec<u8> {
    let mut names: Vec<&[u8]> = Vec::new();
    for name in components(path) {
        match name {
            b".." => {
                names.pop();
            }
            _ => names.push(name),
        }
    }
    names.join(&b'/')
}
