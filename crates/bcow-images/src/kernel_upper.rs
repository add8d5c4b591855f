//! Uppers of the kernel driver that are open for reading: their disk is over the view of an image.

use std::path::Path;
use std::sync::Arc;

use bcow::{Image, OpenOptions};
use bcow_union::{DiskReader, Driver};
use bcow_view::{Instance, ViewCache};

use crate::error::CommandError;
use crate::image::{Messages, OpenImage};
use crate::stores::open_hint;
use crate::upper::{cannot_use, refuse_lost, require_image, when_free};
use crate::views::{UserViews, cannot_view};

/// Whether the directory is an upper of the kernel driver. If it cannot be examined, the command
/// that opens it as an upper of the other driver names the problem.
pub fn is_kernel_upper(path: &Path) -> bool {
    matches!(bcow_union::driver_of(path), Ok(Some(Driver::Kernel)))
}

/// An upper that no process writes to while this lives.
pub struct ReadUpper {
    /// The disk, over the view of the image.
    pub disk: Arc<Image>,
    /// The files below it, the nearest first. The view is the last one.
    pub below: Vec<Arc<Image>>,
    /// Holds the locks.
    pub reader: DiskReader,
}

/// Opens the upper of `image` for reading; with `snapshot`, which is the file of a snapshot of it,
/// its content at that moment.
pub fn read(
    image: &OpenImage,
    upper: &Path,
    snapshot: Option<&Path>,
    options: &OpenOptions,
    messages: &dyn Messages,
) -> Result<ReadUpper, CommandError> {
    let snapshot = snapshot.and_then(|snapshot| snapshot.file_name()?.to_str());
    let open = || match snapshot {
        Some(snapshot) => DiskReader::open_snapshot(upper, snapshot),
        None => DiskReader::open(upper),
    };
    let reader = when_free(messages, open).map_err(|error| cannot_use(&error))?;
    require_same_image(&reader, image)?;
    refuse_lost(upper, reader.is_lost())?;
    let (disk, below) = read_disk(&reader, image, options)?;
    Ok(ReadUpper {
        disk,
        below,
        reader,
    })
}

/// Refuses an upper of another image.
pub fn require_same_image(reader: &DiskReader, image: &OpenImage) -> Result<(), CommandError> {
    let record = reader.record();
    require_image(reader.path(), record.identity(), &record.image_name, image)
}

/// Opens the disk of an upper over the view of its image, for reading. Also returns the files below
/// it, as [`ReadUpper::below`].
pub fn read_disk(
    reader: &DiskReader,
    image: &OpenImage,
    options: &OpenOptions,
) -> Result<(Arc<Image>, Vec<Arc<Image>>), CommandError> {
    let disk = Instance {
        storage: reader.disk(),
        path: &reader.disk_path(),
        image,
        cache: &views(image, options)?,
        options,
    };
    disk.read()
        .map_err(|error| cannot_open_disk(reader.path(), &error))
}

/// The cache with the view of `image`.
pub fn views(image: &OpenImage, options: &OpenOptions) -> Result<ViewCache, CommandError> {
    let views = UserViews::new(options).cache();
    views.map_err(|error| cannot_view(image.path(), &error))
}

/// The error of a disk of the upper at `upper` that does not open.
pub fn cannot_open_disk(upper: &Path, error: &bcow::Error) -> CommandError {
    let shown = upper.display();
    let failure =
        CommandError::new(format!("cannot open the disk of the upper {shown}")).caused_by(error);
    let hint = match error.code() {
        Some(_) => Some(format!("`bcow fsck {shown}` lists all damage")),
        None => open_hint(upper, upper, error),
    };
    failure.hint_if(hint)
}
