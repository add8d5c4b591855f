//! The rule for existing destinations of `bcow convert` and `bcow copy`.
//!
//! A makefile or a pipeline builds an image again under the same name, from a source that still
//! exists. So an image replaces an image without `--force`, as with mkfs.erofs. Any other file may
//! be the only copy of its data: a disk contains data that users wrote, a sealed disk can be the
//! backing of other disks, and the content of other files is unknown. So `--force` is required to
//! replace such a file. (`qemu-img convert` replaces any file, even a backing in use.)

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow::format::{
    BackingName, FormatError, HEADER_AREA_BYTES, Header, State, Use, choose_header,
};
use bcow::lock::FileLock;
use bcow::{Image, OpenOptions};

use crate::disks;
use crate::error::{CommandError, Context};
use crate::foreign_format::{self, ForeignFormat};

/// The kind of the file that is to replace the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replacement {
    /// A BCoW image. It may replace another image.
    Image,
    /// An archive with an OCI layout. It may replace another archive.
    Archive,
    /// A disk in any format. It replaces a file that is not empty only with `--force`.
    Disk,
}

/// Refuses to replace the file at `destination` if another process writes to it. Without `--force`,
/// also refuses if the file may be the only copy of its data.
///
/// Returns the file that is to be replaced, if there is one. If it is a writable disk, it has a
/// shared lock: no process writes to it until the caller drops it, after the replacement.
pub fn check(
    destination: &Path,
    replacement: Replacement,
    force: bool,
) -> Result<Option<File>, CommandError> {
    // The destination does not exist, or cannot be examined. In the second case, the conversion
    // reports the error when it creates the file.
    let Ok(metadata) = std::fs::metadata(destination) else {
        return Ok(None);
    };
    if !metadata.is_file() || metadata.len() == 0 {
        return Ok(None);
    }
    let cannot = || format!("cannot write {}", destination.display());
    let file = File::open(destination).context(cannot)?;
    let header = header_of(&file).context(cannot)?;
    if let Ok(header) = &header
        && header.purpose == Use::Disk
        && header.state == State::Writable
    {
        FileLock::shared(&file).context(cannot)?;
    }
    if force {
        return Ok(Some(file));
    }
    let reason = match header.map(|header| header.purpose) {
        Ok(Use::Image) => match (disk_over(destination), replacement) {
            (Some(disk), _) => format!("it is the backing of {}", disk.display()),
            (None, Replacement::Image) => return Ok(Some(file)),
            (None, _) => "the file exists, and is a BCoW image".to_owned(),
        },
        Ok(Use::Disk) => "the file exists, and is a BCoW disk".to_owned(),
        Ok(_) => "the file exists, and belongs to a writable mount".to_owned(),
        Err(FormatError::NotBcow)
            if replacement == Replacement::Archive
                && foreign_format::detect(destination) == Some(ForeignFormat::Archive) =>
        {
            return Ok(Some(file));
        }
        Err(FormatError::NotBcow) => "the file exists, and is not in BCoW format".to_owned(),
        Err(error) => {
            format!("the file exists, and is a BCoW file that bcow cannot read: {error}")
        }
    };
    Err(CommandError::new(cannot())
        .caused_by_text(reason)
        .hint("give another name, or replace it with --force"))
}

/// The header of the file, which can be shorter than a header.
fn header_of(file: &File) -> io::Result<Result<Header, FormatError>> {
    let mut area = Vec::new();
    file.take(HEADER_AREA_BYTES as u64).read_to_end(&mut area)?;
    Ok(choose_header(&area))
}

/// A disk over the file at `destination`, in the same directory. Disks in other directories, which
/// use the file through --backing-dir, are not found.
fn disk_over(destination: &Path) -> Option<PathBuf> {
    // A disk records the name of the backing file, not the name of a symbolic link to it.
    let path = destination.canonicalize().ok()?;
    let name = path.file_name()?.to_str()?;
    let entries = std::fs::read_dir(path.parent()?).ok()?;
    let mut disks_over: Vec<PathBuf> = entries
        .filter_map(Result::ok)
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()))
        .map(|entry| entry.path())
        .filter(|disk| disks::is_disk(disk) && has_backing_named(disk, name))
        .collect();
    disks_over.sort();
    disks_over.into_iter().next()
}

/// Whether the disk records a backing with this file name. The disk may be in use, so this opens it
/// without its lock.
fn has_backing_named(disk: &Path, backing: &str) -> bool {
    let Ok(file) = File::open(disk) else {
        return false;
    };
    Image::open_storage(Arc::new(file), &OpenOptions::default()).is_ok_and(|image| {
        image.backings().any(
            |entry| matches!(&entry.name, BackingName::FileName { name, .. } if name == backing),
        )
    })
}
