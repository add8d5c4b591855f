//! The rule for existing destinations of `bcow convert`, `bcow copy` and `bcow commit --upper`.
//!
//! A makefile or a pipeline builds an image again under the same name, from a source that still
//! exists. So an image replaces an image without `--force`, as with mkfs.erofs. Any other file may
//! be the only copy of its data: a disk contains data that users wrote, a sealed disk can be the
//! backing of other disks, and the content of other files is unknown. So `--force` is required to
//! replace such a file. (`qemu-img convert` replaces any file, even a backing in use.)

use std::cell::LazyCell;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow::format::{
    BackingName, FormatError, HEADER_AREA_BYTES, Header, State, Use, choose_header,
};
use bcow::lock::FileLock;
use bcow::{Image, OpenOptions};
use bcow_oci::digest::Algorithm;
use bcow_oci::{Digest, LayoutForm, LayoutPlace};

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

/// Whether `--force` allows to replace any file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Force {
    /// It does.
    Given,
    /// It does not.
    NotGiven,
    /// The command has no such option.
    NoOption,
}

impl From<bool> for Force {
    fn from(is_given: bool) -> Self {
        if is_given { Force::Given } else { Force::NotGiven }
    }
}

/// As [`check`], for a layout in an archive. Other layouts replace no file.
pub fn check_archive(
    to: &LayoutPlace,
    force: impl Into<Force>,
) -> Result<Option<File>, CommandError> {
    match to.form {
        LayoutForm::Archive => check(&to.path, Replacement::Archive, force),
        LayoutForm::Directory | LayoutForm::Registry(_) => Ok(None),
    }
}

/// Refuses to replace the file at `destination` if another process writes to it. Without `--force`,
/// also refuses if the file may be the only copy of its data.
///
/// Returns the file that is to be replaced, if there is one. If it is a writable disk, it has a
/// shared lock: no process writes to it until the caller drops it, after the replacement.
pub fn check(
    destination: &Path,
    replacement: Replacement,
    force: impl Into<Force>,
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
    let force = force.into();
    if force == Force::Given {
        return Ok(Some(file));
    }
    let reason = match header.map(|header| header.purpose) {
        Ok(Use::Image) => match (file_over(destination), replacement) {
            (Some(file), _) => format!("it is the backing of {}", file.display()),
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
        .hint(match force {
            Force::NoOption => "give another name, or remove the file first",
            _ => "give another name, or replace it with --force",
        }))
}

/// Whether the file at `path` is in BCoW format, damaged or not.
pub fn is_bcow(path: &Path) -> bool {
    // A pipe is not opened: that would wait for a writer.
    let is_file = path.metadata().is_ok_and(|found| found.is_file());
    let header = || header_of(&File::open(path)?);
    is_file && header().is_ok_and(|header| !matches!(header, Err(FormatError::NotBcow)))
}

/// The header of the file, which can be shorter than a header.
fn header_of(file: &File) -> io::Result<Result<Header, FormatError>> {
    let mut area = Vec::new();
    file.take(HEADER_AREA_BYTES as u64).read_to_end(&mut area)?;
    Ok(choose_header(&area))
}

/// A disk, or an image of `bcow commit --upper`, over the file at `destination`, in the same
/// directory. Those in other directories, which use the file through --backing-dir or --store, are
/// not found.
fn file_over(destination: &Path) -> Option<PathBuf> {
    // A disk records the name of the backing file, not the name of a symbolic link to it.
    let path = destination.canonicalize().ok()?;
    let name = path.file_name()?.to_str()?;
    // The digest of the whole file. Few files record it.
    let digest = LazyCell::new(|| digest_of(&path));
    let is_over = |file: &Path| {
        // It may be a disk that is in use, so this opens it without its lock.
        let image = File::open(file)
            .ok()
            .and_then(|file| Image::open_storage(Arc::new(file), &OpenOptions::default()).ok());
        image.is_some_and(|image| {
            let mut backings = image.backings();
            backings.any(|entry| is_named(&entry.name, name, &|| *digest))
        })
    };
    let entries = std::fs::read_dir(path.parent()?).ok()?;
    let mut files_over: Vec<PathBuf> = entries
        .filter_map(Result::ok)
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()))
        .map(|entry| entry.path())
        .filter(|file| *file != path && is_bcow(file) && is_over(file))
        .collect();
    files_over.sort();
    files_over.into_iter().next()
}

/// Whether another file records this name or this digest as its backing.
fn is_named(
    backing: &BackingName,
    own_name: &str,
    own_digest: &dyn Fn() -> Option<[u8; 32]>,
) -> bool {
    match backing {
        BackingName::FileName { name, .. } => name == own_name,
        BackingName::Digest(digest) => own_digest() == Some(*digest),
        BackingName::View { image, .. } => is_named(&image.name, own_name, own_digest),
        BackingName::Url { .. } => false,
    }
}

fn digest_of(path: &Path) -> Option<[u8; 32]> {
    let digest = Digest::of_storage(&File::open(path).ok()?, Algorithm::Sha256).ok()?;
    digest.sha256()
}
