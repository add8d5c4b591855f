//! The disks over a file, which record its identity.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use bcow_format::BackingName;

use crate::backing_of;
use crate::new_file::parent_of;

/// A disk or snapshot that is over another one.
#[derive(Debug, PartialEq, Eq)]
pub struct Over {
    /// Its path.
    pub path: PathBuf,
    /// The index of the file below it; `None` for the ones directly over the bottom of the tree.
    pub parent: Option<usize>,
}

/// The disks in the directory of the file at `beside` that name their backing by a file name, by
/// that name. Disks in other directories are not found.
pub fn disks_over(beside: &Path) -> io::Result<BTreeMap<String, Vec<PathBuf>>> {
    let mut over: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    for path in files_beside(beside)? {
        // A file that this user may not read is not a disk of this user.
        let backing = File::open(&path).ok().and_then(backing_of);
        if let Some(BackingName::FileName { name, .. }) = backing.map(|entry| entry.name) {
            over.entry(name).or_default().push(path);
        }
    }
    Ok(over)
}

/// The regular files in the directory of the file at `path`, by their names.
pub fn files_beside(path: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = parent_of(path).read_dir()?.flatten();
    let files = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()));
    let mut files: Vec<PathBuf> = files.map(|entry| entry.path()).collect();
    files.sort();
    Ok(files)
}

/// The disks that are over the file at `bottom`, directly and through others. Each is behind the
/// disk below it.
pub fn tree_over(bottom: &Path) -> io::Result<Vec<Over>> {
    let mut over = disks_over(bottom)?;
    let mut tree: Vec<Over> = Vec::new();
    let mut parent = None;
    loop {
        let below = parent.map_or(bottom, |index: usize| tree[index].path.as_path());
        let name = below.file_name().unwrap_or_default().to_string_lossy();
        let paths = over.remove(&*name).unwrap_or_default();
        tree.extend(paths.into_iter().map(|path| Over { path, parent }));
        let next = parent.map_or(0, |index| index + 1);
        if next == tree.len() {
            return Ok(tree);
        }
        parent = Some(next);
    }
}

/// Whether another directory has the file at `path` too.
pub fn is_shared(path: &Path) -> bool {
    path.metadata().is_ok_and(|file| file.nlink() > 1)
}
