//! Going through the tree of an image that may be hostile: names are checked before they are used,
//! a directory that turns up twice ends the walk, and no directory is held in memory whole.

use std::collections::HashSet;
use std::ops::ControlFlow;

use bcow_erofs::reader::{Inode, Nid};

use crate::error::{CommandError, Context};
use crate::image::Tree;
use crate::names;

/// A name in a directory.
pub struct Entry {
    /// The name: not empty, without slash and NUL, neither `.` nor `..`.
    pub name: Vec<u8>,
    /// What it names.
    pub nid: Nid,
}

/// A directory's entries without `.` and `..`, in the order of their names, read piece by piece.
pub struct Entries {
    directory: Inode,
    cookie: u64,
    read: std::vec::IntoIter<Entry>,
    complete: bool,
}

/// Entries read at once.
const PIECE: usize = 1024;

impl Entries {
    /// The entries of `directory`.
    pub fn new(directory: Inode) -> Self {
        Entries {
            directory,
            cookie: 0,
            read: Vec::new().into_iter(),
            complete: false,
        }
    }

    /// The next entry, or `None` at the end. `path` is the directory's, for messages.
    pub fn next(&mut self, tree: &Tree, path: &[u8]) -> Result<Option<Entry>, CommandError> {
        loop {
            if let Some(entry) = self.read.next() {
                return Ok(Some(entry));
            }
            if self.complete {
                return Ok(None);
            }
            self.read_piece(tree, path)?;
        }
    }

    fn read_piece(&mut self, tree: &Tree, path: &[u8]) -> Result<(), CommandError> {
        let mut piece = Vec::new();
        let mut bad_name = None;
        let mut cookie = self.cookie;
        tree.filesystem()
            .read_dir(&self.directory, self.cookie, &mut |entry| {
                cookie = entry.next_cookie;
                if entry.name == b"." || entry.name == b".." {
                    return ControlFlow::Continue(());
                }
                if entry.name.is_empty() || entry.name.iter().any(|b| matches!(b, b'/' | 0)) {
                    bad_name = Some(entry.name.to_vec());
                    return ControlFlow::Break(());
                }
                piece.push(Entry {
                    name: entry.name.to_vec(),
                    nid: entry.nid,
                });
                match piece.len() < PIECE {
                    true => ControlFlow::Continue(()),
                    false => ControlFlow::Break(()),
                }
            })
            .context(|| tree.cannot_read(path))?;
        if let Some(name) = bad_name {
            return Err(damaged(
                tree,
                path,
                &format!("{} is no file name", names::quoted(&name)),
            ));
        }
        self.complete = piece.len() < PIECE;
        if !self.complete && cookie <= self.cookie {
            return Err(damaged(tree, path, "the directory does not end"));
        }
        self.cookie = cookie;
        self.read = piece.into_iter();
        Ok(())
    }
}

/// Directories seen so far. In a sound file system each has one parent.
#[derive(Default)]
pub struct Seen(HashSet<Nid>);

impl Seen {
    /// Fails if the directory was there before: the walk would not end, or not soon.
    pub fn enter(&mut self, tree: &Tree, directory: Nid, path: &[u8]) -> Result<(), CommandError> {
        if self.0.insert(directory) {
            Ok(())
        } else {
            Err(damaged(
                tree,
                path,
                "the directory is in the tree more than once",
            ))
        }
    }
}

/// `directory/name`
pub fn join(directory: &[u8], name: &[u8]) -> Vec<u8> {
    let mut path = Vec::with_capacity(directory.len() + 1 + name.len());
    path.extend_from_slice(directory);
    if !path.is_empty() && !path.ends_with(b"/") {
        path.push(b'/');
    }
    path.extend_from_slice(name);
    path
}

fn damaged(tree: &Tree, path: &[u8], problem: &str) -> CommandError {
    CommandError::new(format!("{}: {problem}", tree.cannot_read(path)))
        .hint("the file system in the image is damaged; `bcow fsck` says more")
}
