//! What a snapshot takes on the host's disk.

use std::collections::HashSet;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::error::Error;
use bcow_tool::At;
use bcow_tool::host::entries_if_any;

/// Bytes and inodes on the host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Allocated bytes.
    pub bytes: u64,
    /// Files and directories.
    pub inodes: u64,
}

impl std::iter::Sum for Usage {
    fn sum<I: Iterator<Item = Usage>>(all: I) -> Usage {
        all.fold(Usage::default(), |sum, one| Usage {
            bytes: sum.bytes + one.bytes,
            inodes: sum.inodes + one.inodes,
        })
    }
}

/// The usage of a file, or of a directory with everything in it. Files that disappear meanwhile do
/// not count: programs may be writing.
pub fn of(path: &Path) -> Result<Usage, Error> {
    const BLOCK: u64 = 512;
    let mut usage = Usage::default();
    let mut with_names = HashSet::new();
    let mut pending = vec![path.to_owned()];
    while let Some(path) = pending.pop() {
        let metadata = match path.symlink_metadata() {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            found => found.at("look at", &path)?,
        };
        let is_counted = metadata.is_dir()
            || metadata.nlink() < 2
            || with_names.insert((metadata.dev(), metadata.ino()));
        if is_counted {
            usage.bytes += metadata.blocks() * BLOCK;
            usage.inodes += 1;
        }
        if metadata.is_dir() {
            pending.extend(entries_if_any(&path)?);
        }
    }
    Ok(usage)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_two_names_counts_once() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        std::fs::create_dir(path("d")).unwrap();
        std::fs::write(path("d/a"), vec![1; 100_000]).unwrap();
        let before = of(directory.path()).unwrap();
        std::fs::hard_link(path("d/a"), path("b")).unwrap();
        assert_eq!(of(directory.path()).unwrap(), before);
        assert_eq!(before.inodes, 3);
        assert!(before.bytes >= 100_000);
        assert_eq!(of(&path("missing")).unwrap(), Usage::default());
    }
}
