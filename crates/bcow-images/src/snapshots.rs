//! Snapshots of disks: their files, and the disks over them.

use std::fmt;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use bcow::operation::{disks_over, files_beside, snapshot_name, snapshot_path};
use bcow::{backing_of, header_of, snapshot_time};

use crate::error::{CommandError, Context};
use crate::name::Name;
use crate::stores::refuse_what_is_no_file;

/// A snapshot of a disk.
#[derive(Debug, Clone)]
pub struct Snapshot {
    pub name: String,
    pub path: PathBuf,
    /// When it was taken, in seconds since 1970.
    pub taken: i64,
    /// Size of the address space in bytes.
    pub bytes: u64,
    /// Bytes that its file takes up on the host.
    pub stored_bytes: u64,
    /// Its backing, as its file names it.
    pub backing: Option<String>,
    /// The names of the disks and snapshots in its directory that are over it.
    pub used_by: Vec<String>,
    /// The number of other directories that have the file too. The forks of an upper have the
    /// snapshots of the upper.
    pub other_links: u64,
}

/// The path of the disk that the user calls `name`, with its links resolved.
pub fn disk_path(name: &Name) -> Result<PathBuf, CommandError> {
    refuse_what_is_no_file(name)?;
    let path = name.path().unwrap_or(name.shown());
    path.canonicalize()
        .context(|| format!("cannot open {}", name.display()))
}

/// The snapshots of the disk at `disk`, whose links are resolved, the oldest first.
pub fn snapshots(disk: &Path) -> Result<Vec<Snapshot>, CommandError> {
    let cannot = || format!("cannot read the directory of {}", disk.display());
    let over = disks_over(disk).context(cannot)?;
    let own_name = file_name(disk);
    let mut found = Vec::new();
    for path in files_beside(disk).context(cannot)? {
        let file_name = file_name(&path);
        let Some(name) = snapshot_name(&own_name, &file_name) else {
            continue;
        };
        let cannot = || format!("cannot read {}", path.display());
        let file = File::open(&path).context(cannot)?;
        // Another file may have such a name, or an interrupted command may have left it.
        let (Some(taken), Some(header)) = (snapshot_time(&file, &path), header_of(&file)) else {
            continue;
        };
        let metadata = file.metadata().context(cannot)?;
        let since = taken.duration_since(std::time::UNIX_EPOCH);
        let since = since.unwrap_or_default();
        let used_by = over.get(&file_name).into_iter().flatten();
        let snapshot = Snapshot {
            name: name.to_owned(),
            taken: since.as_secs() as i64,
            bytes: header.size,
            stored_bytes: metadata.blocks() * 512,
            other_links: metadata.nlink().saturating_sub(1),
            backing: backing_of(file).map(|entry| entry.name.to_string()),
            used_by: used_by.map(|path| self::file_name(path)).collect(),
            path: path.clone(),
        };
        found.push((since, snapshot));
    }
    found.sort_by_key(|(since, _)| *since);
    Ok(found.into_iter().map(|(_, snapshot)| snapshot).collect())
}

/// The path of the snapshot `snapshot` of the disk at `path`, whose links are resolved, and which
/// the user calls `disk`.
pub fn find_snapshot(
    disk: impl fmt::Display,
    path: &Path,
    snapshot: &str,
) -> Result<PathBuf, CommandError> {
    let path = snapshot_path(path, snapshot).ok();
    path.filter(|path| is_snapshot(path)).ok_or_else(|| {
        CommandError::new(format!("{disk} has no snapshot {snapshot:?}"))
            .hint(format!("`bcow snapshot list {disk}` lists its snapshots"))
    })
}

/// Whether the file at `path` is a snapshot of a disk.
pub fn is_snapshot(path: &Path) -> bool {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    path.is_file() && File::open(&path).is_ok_and(|file| snapshot_time(&file, &path).is_some())
}

/// The name of the file at `path`. A disk names only files whose names are UTF-8.
fn file_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}
