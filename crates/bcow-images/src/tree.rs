//! Paths in the file system of an image, with messages that name both.

use std::path::{Path, PathBuf};

use bcow_erofs::reader::{ErofsError, Filesystem, Inode, Nid, Symlinks};

use crate::error::{CommandError, Context};
use crate::names;

/// The file system in an image.
pub struct Tree {
    image: PathBuf,
    filesystem: Filesystem,
}

/// Treatment of a symbolic link as the last component of a path. Other links are followed, always
/// inside the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LastLink {
    /// Take the target.
    Follow,
    /// Take the link.
    Keep,
}

impl Tree {
    /// The file system in the image that the user calls `image`.
    pub fn new(image: &Path, filesystem: Filesystem) -> Self {
        Tree {
            image: image.to_owned(),
            filesystem,
        }
    }

    /// The file system's reader.
    pub fn filesystem(&self) -> &Filesystem {
        &self.filesystem
    }

    /// The name of the image that the user gave.
    pub fn image(&self) -> &Path {
        &self.image
    }

    /// Reads something; `path` is for the message.
    pub fn read<T>(
        &self,
        path: &[u8],
        read: impl FnOnce(&Filesystem) -> Result<T, ErofsError>,
    ) -> Result<T, CommandError> {
        read(&self.filesystem).context(|| self.cannot_read(path))
    }

    /// The file system's reader, for good.
    pub fn into_filesystem(self) -> Filesystem {
        self.filesystem
    }

    /// The inode that `path` names. Relative paths start at the root.
    pub fn find(&self, path: &[u8], last: LastLink) -> Result<Inode, CommandError> {
        let cannot = |error: ErofsError| self.cannot_look_up(path, &error);
        let resolve = |path: &[u8]| {
            let found = self.filesystem.resolve_with(path, Symlinks::Follow);
            found.map_err(cannot)
        };
        let nid = match (last, split_last(path)) {
            (LastLink::Keep, Some((parent, name))) => match resolve(parent)? {
                Some(nid) => {
                    let parent = self.inode(nid, parent)?;
                    let entry = self.filesystem.lookup(&parent, name).map_err(cannot)?;
                    entry.map(|entry| entry.nid)
                }
                None => None,
            },
            _ => resolve(path)?,
        };
        match nid {
            Some(nid) => self.inode(nid, path),
            None => Err(CommandError::new(format!(
                "there is no {} in {}",
                names::quoted(path),
                self.image.display()
            ))),
        }
    }

    fn cannot_look_up(&self, path: &[u8], error: &ErofsError) -> CommandError {
        let failure = CommandError::new(format!(
            "cannot look up {} in {}",
            names::quoted(path),
            self.image.display()
        ));
        match error {
            // The reader knows inodes, the user paths.
            ErofsError::WrongKind { .. } => failure.caused_by_text("a part of it is no directory"),
            _ => failure.caused_by(error),
        }
    }

    /// Reads an inode; `path` is for the message.
    pub fn inode(&self, nid: Nid, path: &[u8]) -> Result<Inode, CommandError> {
        self.read(path, |fs| fs.inode(nid))
    }

    /// "cannot read PATH in IMAGE"
    pub fn cannot_read(&self, path: &[u8]) -> String {
        format!(
            "cannot read {} in {}",
            names::quoted(path),
            self.image.display()
        )
    }
}

/// A path's parent and last component, unless it ends in a slash, `.` or `..` (which follow links
/// anyway) or names the root.
fn split_last(path: &[u8]) -> Option<(&[u8], &[u8])> {
    let (parent, name) = match path.iter().rposition(|&b| b == b'/') {
        Some(slash) => (&path[..=slash], &path[slash + 1..]),
        None => (&b"/"[..], path),
    };
    (!matches!(name, b"" | b"." | b"..")).then_some((parent, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_proper_last_component_is_kept_apart() {
        assert_eq!(split_last(b"/a/b"), Some((&b"/a/"[..], &b"b"[..])));
        assert_eq!(split_last(b"a"), Some((&b"/"[..], &b"a"[..])));
        assert_eq!(split_last(b"/"), None);
        assert_eq!(split_last(b"/a/"), None);
        assert_eq!(split_last(b"/a/.."), None);
        assert_eq!(split_last(b""), None);
    }
}
