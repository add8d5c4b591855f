//! Going through the tree of an image that may be hostile: a directory that turns up twice ends the walk, and no
//! directory is held in memory whole.

use std::collections::HashSet;

use bcow_erofs::reader::{Child, Children, Inode, Nid};

use crate::error::CommandError;
use crate::image::Tree;

/// A directory's entries without `.` and `..`, in the order of their names, read piece by piece.
pub struct Entries(Children);

impl Entries {
    /// The entries of `directory`.
    pub fn new(directory: Inode) -> Self {
        Entries(Children::new(directory))
    }

    /// The next entry, or `None` at the end. `path` is the directory's, for messages.
    pub fn next(&mut self, tree: &Tree, path: &[u8]) -> Result<Option<Child>, CommandError> {
        tree.read(path, |fs| self.0.next(fs))
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
        .in_image()
        .hint("the file system in the image is damaged; `bcow fsck` says more")
}
