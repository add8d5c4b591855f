//! Opening an image, and finding things in its tree, with messages that name both.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow::format::FormatError;
use bcow::{Error, Image, OpenOptions};
use bcow_erofs::reader::{ErofsError, Filesystem, Inode, Nid, Symlinks};

use crate::error::{CommandError, Context};
use crate::names;

/// An open image and the name the user gave it.
pub struct OpenImage {
    path: PathBuf,
    image: Arc<Image>,
}

impl OpenImage {
    /// Opens the BCoW file at `path`.
    pub fn open(path: &Path) -> Result<Self, CommandError> {
        refuse_what_is_no_file(path)?;
        let image = Image::open(path, &OpenOptions::default())
            .map_err(|error| cannot_open(path, &error))?;
        Ok(OpenImage {
            path: path.to_owned(),
            image,
        })
    }

    /// What the user called it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The address space.
    pub fn image(&self) -> &Arc<Image> {
        &self.image
    }

    /// The file system in it.
    pub fn tree(&self) -> Result<Tree, CommandError> {
        let filesystem = Filesystem::open(self.image.clone())
            .context(|| format!("cannot read the file system in {}", self.path.display()))?;
        Ok(Tree::new(&self.path, filesystem))
    }
}

/// Fails with a clear message if there is nothing at `path` that could be an image.
pub fn refuse_what_is_no_file(path: &Path) -> Result<(), CommandError> {
    let metadata = std::fs::metadata(path).context(|| format!("cannot open {}", path.display()))?;
    if metadata.is_dir() {
        return Err(CommandError::new(format!(
            "cannot open {}: it is a directory",
            path.display()
        ))
        .hint(
            "`bcow convert` makes an image of a directory (dir:PATH) or of an OCI layout (oci:DIR)",
        ));
    }
    Ok(())
}

/// What to say when the file at `path` does not open as an image.
pub fn cannot_open(path: &Path, error: &Error) -> CommandError {
    let failure = CommandError::new(format!("cannot open {}", path.display()));
    let failure = match error {
        // "cannot open at byte 0" would tell nobody anything.
        Error::Io {
            action: "open",
            source,
            ..
        } => failure.caused_by(source),
        _ => failure.caused_by(error),
    };
    match error {
        Error::Format(FormatError::NotBcow) => match guess(path) {
            Some(hint) => failure.hint(hint),
            None => failure,
        },
        // There is nothing to find in a file that this program does not know.
        Error::Format(FormatError::Version(_) | FormatError::UnknownFeature { .. }) => failure,
        Error::Format(FormatError::Truncated { .. }) => {
            failure.hint("copy it again from where it came, or convert its source again")
        }
        Error::Format(_) | Error::BadBlock { .. } | Error::Merkle { .. } => failure.hint(format!(
            "`bcow fsck {}` says what else is wrong",
            path.display()
        )),
        _ => failure,
    }
}

/// What the file probably is, by its first bytes, and what to do with it then.
fn guess(path: &Path) -> Option<String> {
    let mut start = Vec::new();
    File::open(path)
        .ok()?
        .take(1028)
        .read_to_end(&mut start)
        .ok()?;
    let shown = path.display();
    let has = |offset: usize, magic: &[u8]| {
        start
            .get(offset..)
            .is_some_and(|rest| rest.starts_with(magic))
    };
    if start.is_empty() {
        Some("the file is empty".to_owned())
    } else if has(257, b"ustar") || has(0, b"\x1f\x8b") || has(0, b"\x28\xb5\x2f\xfd") {
        Some(format!(
            "it looks like an archive; `bcow convert tar:{shown} IMAGE.bcow` makes an image of it"
        ))
    } else if has(0, b"QFI\xfb") {
        Some("it is a qcow2 image".to_owned())
    } else if has(1024, b"\xe2\xe1\xf5\xe0") {
        Some("it is an EROFS image without BCoW headers; the kernel can mount it".to_owned())
    } else if has(0, b"hsqs") {
        Some("it is a squashfs image".to_owned())
    } else {
        None
    }
}

/// The file system in an image.
pub struct Tree {
    image: PathBuf,
    filesystem: Filesystem,
}

/// What to do if a path's last component is a symbolic link. Links on the way are followed, always
/// inside the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LastLink {
    /// Take what it points to.
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

    /// What the user called the image.
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

    /// The inode that `path` names. Relative paths start at the root.
    pub fn find(&self, path: &[u8], last: LastLink) -> Result<Inode, CommandError> {
        let cannot = |error: ErofsError| self.cannot_look_up(path, &error);
        let nid = match (last, split_last(path)) {
            (LastLink::Keep, Some((parent, name))) => {
                match self
                    .filesystem
                    .resolve_with(parent, Symlinks::Follow)
                    .map_err(cannot)?
                {
                    Some(nid) => {
                        let parent = self.inode(nid, parent)?;
                        self.filesystem
                            .lookup(&parent, name)
                            .map_err(cannot)?
                            .map(|entry| entry.nid)
                    }
                    None => None,
                }
            }
            _ => self
                .filesystem
                .resolve_with(path, Symlinks::Follow)
                .map_err(cannot)?,
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
