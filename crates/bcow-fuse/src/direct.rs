//! Mounts of images that the kernel reads without a process of bcow.

use std::path::{Path, PathBuf};

use crate::error::MountError;
use crate::mount::usable_mountpoint;
use crate::options::MountOptions;

/// Mounts the EROFS in the first of `files` at `target`; the other files are its further devices.
/// Nothing has to serve the mount. All paths are absolute.
pub fn mount_files(
    files: &[PathBuf],
    target: &Path,
    options: &MountOptions,
) -> Result<(), MountError> {
    let target = usable_mountpoint(target)?;
    let image = files.first().map_or(Path::new(""), PathBuf::as_path);
    let settings = options.for_image(image)?;
    Ok(bcow_mount::mount_files(files, &target, settings)?)
}
