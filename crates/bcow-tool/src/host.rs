//! Files and directories of the host.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

/// A failed operation on a file or a directory.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}: {source}", path.display())]
pub struct HostError {
    /// A verb.
    action: &'static str,
    /// The file or directory.
    path: PathBuf,
    /// The cause.
    source: io::Error,
}

impl HostError {
    /// The kind of the cause.
    pub fn kind(&self) -> io::ErrorKind {
        self.source.kind()
    }
}

/// Adds what failed, and where, to an error of the host.
pub trait At<T> {
    /// `action` is a verb, `path` its object.
    fn at(self, action: &'static str, path: &Path) -> Result<T, HostError>;
}

impl<T, E: Into<io::Error>> At<T> for Result<T, E> {
    fn at(self, action: &'static str, path: &Path) -> Result<T, HostError> {
        self.map_err(|error| HostError {
            action,
            path: path.to_owned(),
            source: error.into(),
        })
    }
}

/// Creates a directory, and those above it, which only their owner enters. An existing one stays as
/// it is.
pub fn make_private(path: &Path) -> Result<(), HostError> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.at("create", path)
}

/// Locks a directory for this process. `None`: another process has the lock.
pub fn lock(directory: &Path) -> Result<Option<File>, HostError> {
    let path = directory.join("lock");
    let mut options = OpenOptions::new();
    let options = options.create(true).truncate(false).write(true).mode(0o600);
    let lock = options.open(&path).at("open", &path)?;
    let locked = flock(&lock, FlockOperation::NonBlockingLockExclusive);
    Ok(locked.is_ok().then_some(lock))
}

/// Makes the content of a file, or the names in a directory, durable.
pub fn sync(path: &Path) -> Result<(), HostError> {
    File::open(path)
        .and_then(|file| file.sync_all())
        .at("synchronize", path)
}

/// The paths in a directory.
pub fn entries(directory: &Path) -> Result<Vec<PathBuf>, HostError> {
    let list = fs::read_dir(directory).at("list", directory)?;
    let paths = list.map(|entry| entry.map(|entry| entry.path()));
    paths.collect::<Result<_, _>>().at("list", directory)
}

/// The paths in a directory; none if the directory does not exist.
pub fn entries_if_any(directory: &Path) -> Result<Vec<PathBuf>, HostError> {
    match entries(directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        list => list,
    }
}

/// Removes a file, if there is one.
pub fn remove_if_any(path: &Path) -> Result<(), HostError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed.at("remove", path),
    }
}

/// Writes a file that only its owner may read, and makes its content durable.
pub fn write_private(path: &Path, bytes: &[u8]) -> Result<(), HostError> {
    let mut options = OpenOptions::new();
    let options = options.create(true).truncate(true).write(true).mode(0o600);
    let mut file = options.open(path).at("create", path)?;
    file.write_all(bytes)
        .and_then(|()| file.sync_all())
        .at("write", path)
}

/// Replaces the file `path` by one with this content, durably. Until then, the content is in the
/// file `new` of the same directory.
pub fn replace(path: &Path, new: &Path, bytes: &[u8]) -> Result<(), HostError> {
    let written = write_private(new, bytes).and_then(|()| fs::rename(new, path).at("write", path));
    if written.is_err() {
        // The error above is more precise than one here.
        let _ = fs::remove_file(new);
    }
    written?;
    sync(path.parent().unwrap_or(path))
}
