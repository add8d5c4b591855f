//! Reads a directory's children in pieces, so that no directory is in memory as a whole.

use std::ops::ControlFlow;

use super::{ErofsError, FileType, Filesystem, Inode, Nid};

/// Entries per read.
const PIECE: usize = 256;

/// A directory entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Child {
    /// The name: 1..=255 bytes without slash and NUL, neither `.` nor `..`.
    pub name: Vec<u8>,
    /// The inode's number. It is not validated; [`Filesystem::inode`] validates it.
    pub nid: Nid,
    /// The type in the directory entry.
    pub kind: FileType,
}

/// The entries of a directory without `.` and `..`, in stored order, which in a valid file system
/// is byte order.
#[derive(Debug)]
pub struct Children {
    directory: Inode,
    cookie: u64,
    read: std::vec::IntoIter<Child>,
    is_complete: bool,
    /// The last name, if the next one must be greater.
    last: Option<Vec<u8>>,
}

impl Children {
    /// The children of `directory`.
    pub fn new(directory: Inode) -> Self {
        Children {
            directory,
            cookie: 0,
            read: Vec::new().into_iter(),
            is_complete: false,
            last: None,
        }
    }

    /// The children of `directory`; names that are not in ascending order give
    /// [`ErofsError::Unsorted`].
    pub fn sorted(directory: Inode) -> Self {
        Children {
            last: Some(Vec::new()),
            ..Children::new(directory)
        }
    }

    /// The next child, or `None` at the end. `fs` must be the file system of the directory.
    pub fn next(&mut self, fs: &Filesystem) -> Result<Option<Child>, ErofsError> {
        loop {
            if let Some(child) = self.read.next() {
                if let Some(last) = &mut self.last {
                    if child.name <= *last {
                        let nid = self.directory.nid;
                        return Err(ErofsError::Unsorted { nid });
                    }
                    last.clone_from(&child.name);
                }
                return Ok(Some(child));
            }
            if self.is_complete {
                return Ok(None);
            }
            self.read_piece(fs)?;
        }
    }

    fn read_piece(&mut self, fs: &Filesystem) -> Result<(), ErofsError> {
        let mut piece = Vec::new();
        // The cookie grows with every entry, so the loop ends.
        let mut cookie = self.cookie;
        fs.read_dir(&self.directory, self.cookie, &mut |entry| {
            cookie = entry.next_cookie;
            if entry.name != b"." && entry.name != b".." {
                piece.push(Child {
                    name: entry.name.to_vec(),
                    nid: entry.nid,
                    kind: entry.kind,
                });
            }
            if piece.len() < PIECE {
                ControlFlow::Continue(())
            } else {
                ControlFlow::Break(())
            }
        })?;
        self.is_complete = piece.len() < PIECE;
        self.cookie = cookie;
        self.read = piece.into_iter();
        Ok(())
    }
}
