//! Which existing destinations a conversion may replace.
//!
//! A makefile or a pipeline makes an image again and again under the same name, from a source that
//! still exists. So an image replaces an image, as with mkfs.erofs. Any other file may be the only
//! copy of its data: a disk has its written data, a sealed disk is the backing of other disks, and
//! the contents of other files are unknown. To replace such a file, `--force` is needed. (`qemu-img
//! convert` replaces any file, even a backing in use.)

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow::format::{BackingName, Use};
use bcow::lock::FileLock;
use bcow::{Image, OpenOptions, header_of};

use crate::disks;
use crate::error::{CommandError, Context};
use crate::form::{Form, form};

/// The new content of the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// A BCoW image, which may replace another.
    Image,
    /// An OCI layout in an archive, which may replace an archive.
    Archive,
    /// A disk, in any format.
    Disk,
}

/// Refuses to replace the file at `destination` if it may be the only copy of its data and the user
/// has not given `--force`.
pub fn check(destination: &Path, by: By, force: bool) -> Result<(), CommandError> {
    // Without a file, there is nothing to replace. The write reports any other error.
    let Ok(metadata) = std::fs::metadata(destination) else {
        return Ok(());
    };
    if !metadata.is_file() || metadata.len() == 0 {
        return Ok(());
    }
    let cannot = || format!("cannot write {}", destination.display());
    let file = File::open(destination).context(cannot)?;
    if disks::is_writable_disk(destination) {
        FileLock::shared(&file).context(cannot)?;
    }
    if force {
        return Ok(());
    }
    let why = match header_of(&file).map(|header| header.purpose) {
        Some(Use::Image) => match (disk_over(destination), by) {
            (Some(disk), _) => format!("it is the backing of {}", disk.display()),
            (None, By::Image) => return Ok(()),
            (None, _) => "the file exists, and is a BCoW image".to_owned(),
        },
        Some(Use::Disk) => "the file exists, and is a BCoW disk".to_owned(),
        Some(_) => "the file exists, and belongs to a writable mount".to_owned(),
        None if by == By::Archive && form(destination) == Some(Form::Archive) => {
            return Ok(());
        }
        None => "the file exists, and is not in BCoW format".to_owned(),
    };
    Err(CommandError::new(cannot())
        .caused_by_text(why)
        .hint("give another name, or replace it with --force"))
}

/// A disk in the same directory that has the file as its backing. Disks in other directories, which
/// find the file with --backing-dir, are not found.
fn disk_over(destination: &Path) -> Option<PathBuf> {
    // A disk finds its backing by the name of the file itself, not by the name of a link to it.
    let path = destination.canonicalize().ok()?;
    let name = path.file_name()?.to_str()?;
    let entries = std::fs::read_dir(path.parent()?).ok()?;
    let mut over: Vec<PathBuf> = entries
        .filter_map(Result::ok)
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()))
        .map(|entry| entry.path())
        .filter(|disk| disks::is_disk(disk) && names(disk, name))
        .collect();
    over.sort();
    over.into_iter().next()
}

/// Whether the disk has a backing of this name. The disk is not opened as a disk: it may be in use.
fn names(disk: &Path, backing: &str) -> bool {
    let Ok(file) = File::open(disk) else {
        return false;
    };
    Image::open_storage(Arc::new(file), &OpenOptions::default()).is_ok_and(|image| {
        image.backings().any(
            |entry| matches!(&entry.name, BackingName::FileName { name, .. } if name == backing),
        )
    })
}
