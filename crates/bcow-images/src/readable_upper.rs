//! What `--upper` names: an upper or a disk, also one that is in use, or a snapshot of one.

use std::path::{Path, PathBuf};

use bcow_union::{DiskReader, Driver, META, UpperReader, disk_path, driver_of, snapshot_directory};

use crate::disks::{is_writable_disk, lock_note};
use crate::error::CommandError;
use crate::image::Messages;
use crate::name::Name;
use crate::requests::ask_for_copy;
use crate::running::{self, LOCK_IN_UPPER};
use crate::snapshots::find_snapshot;
use crate::target::Target;
use crate::upper::{tree_snapshot, when_free};

/// The names of snapshots that a command takes of what is in use, and removes at its end, begin
/// with this. The number of the process follows.
const TEMPORARY: &str = "temporary-";

/// An upper or a disk that a command reads.
#[derive(Debug)]
pub struct ReadableUpper {
    /// The upper or the disk of which this is the content.
    pub of: PathBuf,
    /// The upper, or the file of the disk, with that content.
    pub path: PathBuf,
    /// The file of the snapshot of an upper of the kernel driver.
    pub snapshot: Option<PathBuf>,
    /// Dropped when nothing reads it any more.
    _temporary: Option<Temporary>,
}

/// A snapshot. Dropping this removes it.
#[derive(Debug)]
enum Temporary {
    /// The file of a snapshot.
    File(PathBuf),
    /// An upper of the FUSE driver, and the name of the snapshot.
    Tree(PathBuf, String),
}

impl ReadableUpper {
    /// Finds what `upper` names: an upper, a disk, a directory where either is mounted, or a
    /// snapshot `UPPER@NAME`. If it is in use, the process that uses it takes a snapshot first,
    /// which lasts as long as this.
    pub fn find(upper: &Path, messages: &dyn Messages) -> Result<Self, CommandError> {
        let (target, snapshot) = target(upper)?;
        let (path, lock) = match &target {
            Target::Upper(path) => (path.clone(), Some(path.join(LOCK_IN_UPPER))),
            Target::Disk(disk) => {
                let path = disk.path().unwrap_or(disk.shown()).to_owned();
                let lock = is_writable_disk(disk).then(|| path.clone());
                (path, lock)
            }
        };
        if let Some(name) = snapshot {
            return ReadableUpper::snapshot(&path, &name, false);
        }
        if let Some(lock) = lock {
            remove_left_over(&path);
            let name = format!("{TEMPORARY}{}", std::process::id());
            match ask_for_copy(&lock, upper.display(), &name) {
                Ok(true) => return ReadableUpper::snapshot(&path, &name, true),
                // The mount may have ended meanwhile.
                Err(error) if !is_at_rest(&path, messages) => return Err(error),
                Ok(false) | Err(_) => {}
            }
        }
        let is_same = upper.canonicalize().is_ok_and(|upper| upper == path);
        Ok(ReadableUpper {
            path: if is_same { upper.to_owned() } else { path.clone() },
            of: path,
            snapshot: None,
            _temporary: None,
        })
    }

    /// The snapshot `name` of the upper or the disk at `path`.
    fn snapshot(path: &Path, name: &str, is_temporary: bool) -> Result<Self, CommandError> {
        let file = if is_kernel_upper(path) {
            Some(disk_path(path))
        } else {
            path.is_file().then(|| path.to_owned())
        };
        let found = match &file {
            Some(file) => find_snapshot(path.display(), file, name)?,
            None => tree_snapshot(path, name)?,
        };
        // Dropping one removes the snapshot.
        let temporary = is_temporary.then(|| match &file {
            Some(_) => Temporary::File(found.clone()),
            None => Temporary::Tree(path.to_owned(), name.to_owned()),
        });
        let is_kernels = path.is_dir() && found.is_file();
        Ok(ReadableUpper {
            of: path.to_owned(),
            path: if is_kernels { path.to_owned() } else { found.clone() },
            snapshot: is_kernels.then_some(found),
            _temporary: temporary,
        })
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // If this fails, the next command removes it.
        match self {
            Temporary::File(path) => drop(std::fs::remove_file(path)),
            Temporary::Tree(upper, name) => {
                let note = lock_note("diff or commit");
                drop(bcow_union::remove_snapshot(upper, name, &note));
            }
        }
    }
}

/// Refuses a name that only bcow itself gives to snapshots.
pub fn refuse_temporary(name: &str) -> Result<(), CommandError> {
    if !name.starts_with(TEMPORARY) {
        return Ok(());
    }
    Err(CommandError::usage(format!(
        "the snapshot cannot have the name {name:?}"
    ))
    .hint(format!(
        "`bcow diff` and `bcow commit` give names that begin with {TEMPORARY:?}, and remove the \
         snapshots"
    )))
}

fn target(upper: &Path) -> Result<(Target, Option<String>), CommandError> {
    // Of overlayfs: no mount of bcow has used it.
    if upper.is_dir()
        && matches!(driver_of(upper), Ok(None))
        && let Ok(path) = upper.canonicalize()
        && running::mount_at(&path).is_none()
    {
        return Ok((Target::Upper(path), None));
    }
    Target::with_snapshot(&Name::file(upper))
}

fn is_kernel_upper(path: &Path) -> bool {
    path.is_dir() && matches!(driver_of(path), Ok(Some(Driver::Kernel)))
}

/// Whether no process writes to the upper at `path`, possibly after a short time.
fn is_at_rest(path: &Path, messages: &dyn Messages) -> bool {
    let is_kernel = is_kernel_upper(path);
    let open = || {
        if is_kernel {
            DiskReader::open(path).map(drop)
        } else {
            UpperReader::open(path).map(drop)
        }
    };
    path.is_dir() && when_free(messages, open).is_ok()
}

/// Removes the temporary snapshots of the upper or the disk at `path` that killed processes left.
fn remove_left_over(path: &Path) {
    let (directory, prefix) = match path.parent() {
        _ if is_kernel_upper(path) => (path.join(META), disk_path(path)),
        Some(directory) if path.is_file() => (directory.to_owned(), path.to_owned()),
        _ => (snapshot_directory(path), PathBuf::new()),
    };
    let mut prefix = match prefix.file_name() {
        Some(disk) => format!("{}@", disk.to_string_lossy()),
        None => String::new(),
    };
    prefix += TEMPORARY;
    for entry in directory.read_dir().into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let process = name.strip_prefix(&prefix);
        let process = process.and_then(|process| process.parse().ok());
        if process.is_some_and(|process| running::state(process).is_none()) {
            drop(if entry.path().is_dir() {
                Temporary::Tree(path.to_owned(), name)
            } else {
                Temporary::File(entry.path())
            });
        }
    }
}
