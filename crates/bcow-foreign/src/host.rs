//! Opens files of the host.

use std::fs::File;
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags};

use crate::ForeignError;

/// Opens a path of the user for reading: a regular file or a block device.
pub(crate) fn open(path: &Path) -> Result<File, ForeignError> {
    open_with(path, OFlags::empty(), true)
}

/// Opens a path for reading whose name comes from an image: a regular file, not a symbolic link.
pub(crate) fn open_named(path: &Path) -> Result<File, ForeignError> {
    open_with(path, OFlags::NOFOLLOW, false)
}

fn open_with(path: &Path, flags: OFlags, device: bool) -> Result<File, ForeignError> {
    let failed = ForeignError::io("open", path);
    // Without O_NONBLOCK, opening a pipe would wait for a writer.
    let flags = flags | OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = rustix::fs::open(path, flags, Mode::empty()).map_err(&failed)?;
    let kind = FileType::from_raw_mode(rustix::fs::fstat(&file).map_err(&failed)?.st_mode);
    match kind {
        FileType::RegularFile => Ok(file.into()),
        FileType::BlockDevice if device => Ok(file.into()),
        FileType::Directory => Err(ForeignError::unsuitable(path, "it is a directory")),
        _ => Err(ForeignError::unsuitable(path, "it is not a regular file")),
    }
}
