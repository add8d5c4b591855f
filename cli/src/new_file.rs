//! A file that gets its name only when it is complete.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use crate::error::{CommandError, Context};

/// A file without a name in the directory of its destination (O_TMPFILE): it vanishes with the
/// process. On file systems without such files it has a temporary name.
pub struct NewFile {
    file: File,
    destination: PathBuf,
    temporary: Option<PathBuf>,
    /// Whether a file that has the name is replaced.
    replace: bool,
}

impl NewFile {
    /// Starts a file that becomes `destination`. The destination must not exist; this never
    /// replaces a file.
    pub fn create_new(destination: &Path) -> Result<Self, CommandError> {
        if destination.symlink_metadata().is_ok() {
            return Err(file_exists(destination));
        }
        let mut new = NewFile::create(destination)?;
        new.replace = false;
        Ok(new)
    }

    /// Starts a file that becomes `destination`, and replaces an existing file of that name.
    pub fn create(destination: &Path) -> Result<Self, CommandError> {
        let cannot = || format!("cannot create {}", destination.display());
        if destination.file_name().is_none() {
            return Err(CommandError::new(cannot()).caused_by_text("missing file name"));
        }
        let destination = match std::fs::metadata(destination) {
            Ok(metadata) if metadata.is_dir() => {
                return Err(CommandError::new(cannot()).caused_by_text("it is a directory"));
            }
            // A rename over a device or a pipe would replace the device or pipe.
            Ok(metadata) if !metadata.is_file() => {
                return Err(CommandError::new(cannot())
                    .caused_by_text("file exists and is not a regular file")
                    .hint("write to standard output (-o -) and redirect that"));
            }
            // A symbolic link stays, and what it points to is replaced.
            Ok(_) => &std::fs::canonicalize(destination).context(cannot)?,
            Err(_) => destination,
        };
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let nameless = rustix::fs::open(
            directory_of(destination),
            flags | OFlags::TMPFILE,
            Mode::from_raw_mode(0o666),
        );
        let (fd, temporary) = match nameless {
            Ok(fd) => (fd, None),
            // EISDIR is the error of kernels and file systems without O_TMPFILE.
            Err(Errno::OPNOTSUPP | Errno::ISDIR) => {
                let (fd, name) = with_temporary_name(destination, |name| {
                    rustix::fs::open(
                        name,
                        flags | OFlags::CREATE | OFlags::EXCL,
                        Mode::from_raw_mode(0o666),
                    )
                })
                .context(cannot)?;
                (fd, Some(name))
            }
            Err(error) => return Err(CommandError::new(cannot()).caused_by(&error)),
        };
        Ok(NewFile {
            file: fd.into(),
            destination: destination.to_owned(),
            temporary,
            replace: true,
        })
    }

    /// The file, to be filled.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Makes the content durable and gives the file its name.
    pub fn complete(mut self) -> Result<(), CommandError> {
        let destination = self.destination.clone();
        let cannot = || format!("cannot write {}", destination.display());
        self.file.sync_all().context(cannot)?;
        let by_descriptor = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let link = |name: &Path| {
            rustix::fs::linkat(CWD, &by_descriptor[..], CWD, name, AtFlags::SYMLINK_FOLLOW)
        };
        match (&self.temporary, self.replace) {
            (Some(temporary), true) => {
                std::fs::rename(temporary, &self.destination).context(cannot)?;
            }
            (Some(temporary), false) => {
                let flags = RenameFlags::NOREPLACE;
                named(
                    rustix::fs::renameat_with(CWD, temporary, CWD, &self.destination, flags),
                    &destination,
                )?;
            }
            (None, true) => {
                // A link replaces nothing, a rename does; so the file gets a name first.
                let ((), name) = with_temporary_name(&self.destination, link).context(cannot)?;
                let name = self.temporary.insert(name);
                std::fs::rename(name, &self.destination).context(cannot)?;
            }
            (None, false) => named(link(&self.destination), &destination)?,
        }
        self.temporary = None;
        // The name is durable only when the directory is.
        File::open(directory_of(&self.destination))
            .and_then(|directory| directory.sync_all())
            .context(cannot)
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            // The first error is already reported; an error of this cleanup is ignored.
            let _ = std::fs::remove_file(temporary);
        }
    }
}

/// The result of giving a new file its name.
fn named(result: Result<(), Errno>, destination: &Path) -> Result<(), CommandError> {
    match result {
        Err(Errno::EXIST) => Err(file_exists(destination)),
        result => result.context(|| format!("cannot create {}", destination.display())),
    }
}

fn file_exists(destination: &Path) -> CommandError {
    CommandError::new(format!("cannot create {}", destination.display()))
        .caused_by_text("file exists; not overwriting it")
}

fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != OsStr::new("") => parent,
        _ => Path::new("."),
    }
}

/// Tries names beside `destination` until one is free.
fn with_temporary_name<T>(
    destination: &Path,
    mut make: impl FnMut(&Path) -> Result<T, Errno>,
) -> Result<(T, PathBuf), Errno> {
    for attempt in 0..100 {
        // Not made from the destination's name, which may be as long as names can be.
        let name = OsString::from(format!(".bcow-{}-{attempt}.part", std::process::id()));
        let path = directory_of(destination).join(name);
        match make(&path) {
            Ok(made) => return Ok((made, path)),
            Err(Errno::EXIST) => {}
            Err(error) => return Err(error),
        }
    }
    Err(Errno::EXIST)
}
