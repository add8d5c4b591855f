//! What of an existing destination may be lost.
//!
//! An image is made again and again at the same name, by a makefile or in a pipeline, and comes from a source that is still
//! there: so one image replaces another, as with mkfs.erofs. Anything else may be all that there is of it: a disk has what
//! was written to it, a sealed disk is there to be the backing of others, and what bcow did not make is not known at all. It
//! takes `--force`. (`qemu-img convert` replaces whatever is there, a backing in use too.)

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow::format::{BackingName, Use};
use bcow::lock::FileLock;
use bcow::{Image, OpenOptions};

use crate::disks::{self, header_of};
use crate::error::{CommandError, Context};
use crate::image::{self, Form};

/// What is to take the place of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// A BCoW image, which may replace another.
    Image,
    /// An OCI layout in an archive, which may replace an archive.
    Archive,
    /// A disk, in whatever form.
    Disk,
}

/// Refuses to replace the file at `destination`, if it would be missed and the user has not said `--force`.
pub fn check(destination: &Path, by: By, force: bool) -> Result<(), CommandError> {
    // What cannot be looked at cannot be written either, and that tells why.
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
            (Some(disk), _) => format!("{} has it for its backing", disk.display()),
            (None, By::Image) => return Ok(()),
            (None, _) => "it is there already, and is a BCoW image".to_owned(),
        },
        Some(Use::Disk) => "it is there already, and is a disk".to_owned(),
        Some(_) => "it is there already, and belongs to a writable mount".to_owned(),
        None if by == By::Archive && image::form(destination) == Some(Form::Archive) => {
            return Ok(());
        }
        None => "it is there already, and bcow did not make it".to_owned(),
    };
    Err(CommandError::new(cannot())
        .caused_by_text(why)
        .hint("give another name, or replace it with --force"))
}

/// A disk beside the file that names it as its backing. Disks elsewhere, which find it with --backing-dir, are not seen.
fn disk_over(destination: &Path) -> Option<PathBuf> {
    // Backings are found by the name of the file itself, not of a link to it.
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

/// Whether the disk names a backing so. It is not opened as a disk: it may be in use.
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
