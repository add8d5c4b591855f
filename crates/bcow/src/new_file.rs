//! A file that gets its name only when it is complete.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use crate::attributes;

/// A file in the directory of its destination that has no name yet. If the process ends before
/// [`NewFile::complete`], nothing remains. On a file system without unnamed files (O_TMPFILE) the
/// file has a temporary name.
#[derive(Debug)]
pub struct NewFile {
    file: File,
    destination: PathBuf,
    /// Removed on drop.
    temporary: Option<PathBuf>,
    /// Whether a file of the name of the destination is replaced.
    replaces: bool,
}

/// The reason why a new file was not created or completed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NewFileError {
    /// The destination exists.
    #[error("file exists; not overwriting it")]
    Exists,
    /// The path has no last component.
    #[error("missing file name")]
    NoName,
    /// The destination is a directory.
    #[error("it is a directory")]
    Directory,
    /// The destination is a device, a pipe or a socket, which a rename would replace.
    #[error("file exists and is not a regular file")]
    NoRegularFile,
    /// The file system can give the file its name only with the risk of replacing another file.
    #[error(
        "the file system has neither hard links nor a rename that refuses to replace a file: {0}"
    )]
    NoSafeName(io::Error),
    /// The host cannot create the file.
    #[error(transparent)]
    Create(io::Error),
    /// The host cannot write, sync or rename the file.
    #[error(transparent)]
    Write(io::Error),
}

impl NewFile {
    /// Starts a file that becomes `destination`. The destination must not exist; this never
    /// replaces a file.
    pub fn create_new(destination: &Path) -> Result<Self, NewFileError> {
        if destination.symlink_metadata().is_ok() {
            return Err(NewFileError::Exists);
        }
        let mut new = NewFile::create(destination)?;
        new.replaces = false;
        Ok(new)
    }

    /// Starts a file that becomes `destination`, and replaces an existing file of that name.
    pub fn create(destination: &Path) -> Result<Self, NewFileError> {
        if destination.file_name().is_none() {
            return Err(NewFileError::NoName);
        }
        let destination = match std::fs::metadata(destination) {
            Ok(metadata) if metadata.is_dir() => return Err(NewFileError::Directory),
            Ok(metadata) if !metadata.is_file() => return Err(NewFileError::NoRegularFile),
            // A symbolic link stays; its target is replaced.
            Ok(_) => destination.canonicalize().map_err(NewFileError::Create)?,
            Err(_) => destination.to_owned(),
        };
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(0o666);
        let unnamed = rustix::fs::open(parent_of(&destination), flags | OFlags::TMPFILE, mode);
        let (file, temporary) = match unnamed {
            Ok(file) => (file, None),
            // EISDIR comes from kernels and file systems that take O_TMPFILE for O_DIRECTORY.
            Err(Errno::OPNOTSUPP | Errno::ISDIR) => {
                let flags = flags | OFlags::CREATE | OFlags::EXCL;
                let (file, name) =
                    with_temporary_name(&destination, |name| rustix::fs::open(name, flags, mode))
                        .map_err(NewFileError::Create)?;
                (file, Some(name))
            }
            Err(error) => return Err(NewFileError::Create(error.into())),
        };
        Ok(NewFile {
            file: file.into(),
            destination,
            temporary,
            replaces: true,
        })
    }

    /// The file, to be filled.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Gives the file the owner, the group, the mode, the ACL and the extended attributes of `old`,
    /// as far as the host allows. No other user gets a right that `old` denies.
    pub fn take_attributes(&self, old: &File) -> io::Result<()> {
        attributes::pass(old, &self.file)
    }

    /// Makes the content durable, gives the file its name, and makes the name durable.
    pub fn complete(mut self) -> Result<(), NewFileError> {
        self.file.sync_all().map_err(NewFileError::Write)?;
        let descriptor = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let link = |name: &Path| {
            rustix::fs::linkat(CWD, &descriptor[..], CWD, name, AtFlags::SYMLINK_FOLLOW)
        };
        let destination = &self.destination;
        match (&self.temporary, self.replaces) {
            (Some(temporary), true) => {
                std::fs::rename(temporary, destination).map_err(NewFileError::Write)?;
            }
            (Some(temporary), false) => name_new(temporary, destination, rename_new)?,
            (None, true) => {
                // A rename replaces a file, a link does not; so the file gets a temporary name.
                let ((), name) =
                    with_temporary_name(destination, link).map_err(NewFileError::Write)?;
                let name = self.temporary.insert(name);
                std::fs::rename(name, destination).map_err(NewFileError::Write)?;
            }
            (None, false) => link(destination).map_err(not_named)?,
        }
        self.temporary = None;
        File::open(parent_of(destination))
            .and_then(|directory| directory.sync_all())
            .map_err(NewFileError::Write)
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            // The error that caused the drop is more precise than an error here.
            let _ = std::fs::remove_file(temporary);
        }
    }
}

/// Gives the file at `temporary` the new name `destination`. Uses a hard link if the file system
/// does not support `rename`.
fn name_new(
    temporary: &Path,
    destination: &Path,
    rename: impl FnOnce(&Path, &Path) -> Result<(), Errno>,
) -> Result<(), NewFileError> {
    match rename(temporary, destination) {
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {}
        renamed => return renamed.map_err(not_named),
    }
    rustix::fs::link(temporary, destination).map_err(|error| match error {
        Errno::PERM | Errno::NOSYS | Errno::OPNOTSUPP => NewFileError::NoSafeName(error.into()),
        error => not_named(error),
    })?;
    // The file is complete, so a temporary name that stays is no failure.
    let _ = std::fs::remove_file(temporary);
    Ok(())
}

/// Renames a file; never replaces another one. Network file systems and some FUSE file systems do
/// not support this.
fn rename_new(from: &Path, to: &Path) -> Result<(), Errno> {
    rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE)
}

fn not_named(error: Errno) -> NewFileError {
    match error {
        Errno::EXIST => NewFileError::Exists,
        error => NewFileError::Create(error.into()),
    }
}

/// The directory of a file, as its path names it.
pub(crate) fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != OsStr::new("") => parent,
        _ => Path::new("."),
    }
}

/// Tries temporary names in the directory of `destination` until one is free.
fn with_temporary_name<T>(
    destination: &Path,
    mut make: impl FnMut(&Path) -> Result<T, Errno>,
) -> io::Result<(T, PathBuf)> {
    for attempt in 0..100 {
        // Does not contain the name of the destination, which may have the greatest length.
        let name = format!(".bcow-{}-{attempt}.part", std::process::id());
        let path = parent_of(destination).join(name);
        match make(&path) {
            Ok(made) => return Ok((made, path)),
            Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(Errno::EXIST.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_system_without_exclusive_renames_gets_the_file_by_a_link() {
        let directory = tempfile::tempdir().unwrap();
        let entries = || std::fs::read_dir(&directory).unwrap().count();
        let [temporary, new, other] =
            ["temporary", "new", "other"].map(|name| directory.path().join(name));
        std::fs::write(&temporary, "content").unwrap();
        std::fs::write(&other, "other content").unwrap();
        for error in [Errno::INVAL, Errno::NOSYS, Errno::OPNOTSUPP] {
            let refused = name_new(&temporary, &other, |_, _| Err(error)).unwrap_err();
            assert!(matches!(refused, NewFileError::Exists), "{refused}");
            assert_eq!(std::fs::read(&other).unwrap(), b"other content");
            name_new(&temporary, &new, |_, _| Err(error)).unwrap();
            assert_eq!(std::fs::read(&new).unwrap(), b"content");
            assert_eq!(entries(), 2);
            std::fs::rename(&new, &temporary).unwrap();
        }
        let refused = name_new(&temporary, &new, |_, _| Err(Errno::NOSPC)).unwrap_err();
        assert!(matches!(refused, NewFileError::Create(_)), "{refused}");
    }
}
