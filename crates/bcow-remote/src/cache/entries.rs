//! What is in the cache, for users: the list of files, and the removal of those not in use.

use std::io;
use std::time::{Duration, SystemTime};

use bcow::header_of;
use rustix::fs::{AtFlags, Dir, FileType, FlockOperation, Mode, OFlags};

use super::names::RECORD_PREFIX;
use super::{Cache, ENDING, ORIGIN, ORIGIN_BYTES};
use crate::tree::Root;

/// The end of the names of manifests.
const DOCUMENT_ENDING: &str = ".json";
/// The directory of another cache, which is not listed.
const VIEWS: &str = "views";

/// A file in the directory of a cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheEntry {
    /// Its name in the directory.
    pub name: String,
    /// What it is.
    pub kind: EntryKind,
    /// The address from which it was last fetched, without a query, if that is known.
    pub origin: Option<String>,
    /// The length of the remote file, if the cache has its header.
    pub file_bytes: Option<u64>,
    /// The bytes that the file takes up on the disk.
    pub held_bytes: u64,
    /// The time of the last use, in seconds since 1970.
    pub last_use: i64,
    /// Whether a process has it open as a cache.
    pub is_in_use: bool,
}

/// What a file in the directory of a cache is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryKind {
    /// Bytes of the remote file with this root.
    File(Root),
    /// A manifest of a registry, with its digest.
    Manifest([u8; 32]),
    /// A record of the target of a name, with a hash of the name.
    Name([u8; 32]),
    /// Not a file of the cache.
    Unknown,
}

/// Which files are removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prune {
    /// All.
    All,
    /// Those that were not used for this time.
    OlderThan(Duration),
    /// The least recently used ones, until the cache takes up this many bytes.
    Limit(u64),
}

impl Prune {
    /// Whether a file is removed with this last use, in seconds since 1970, while all files take up
    /// `held_bytes`.
    pub fn selects(self, last_use: i64, held_bytes: u64) -> bool {
        match self {
            Prune::All => true,
            Prune::OlderThan(time) => {
                let last_use = u64::try_from(last_use).unwrap_or(0);
                let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
                now.as_secs()
                    .checked_sub(last_use)
                    .is_some_and(|age| age >= time.as_secs())
            }
            Prune::Limit(limit) => held_bytes > limit,
        }
    }
}

/// What was removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pruned {
    /// Files that were removed.
    pub removed_files: u64,
    /// The bytes that they took up.
    pub removed_bytes: u64,
    /// Files that were to be removed, but are in use.
    pub in_use_files: u64,
    /// The bytes that all files take up now.
    pub held_bytes: u64,
}

/// A file, as the directory shows it.
pub(super) struct Scanned {
    pub(super) name: String,
    pub(super) kind: EntryKind,
    pub(super) held_bytes: u64,
    /// Seconds and nanoseconds.
    pub(super) last_use: (i64, i64),
}

/// The result of a removal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Removal {
    Removed,
    InUse,
    Missing,
}

impl EntryKind {
    fn of(name: &str) -> EntryKind {
        let hash = |hex: &str| hex.parse().ok().filter(|_| hex.len() == 64);
        if let Some(root) = name.strip_suffix(ENDING).and_then(hash) {
            return EntryKind::File(root);
        }
        let document = |start| name.strip_suffix(DOCUMENT_ENDING)?.strip_prefix(start);
        if let Some(Root(digest)) = document("sha256-").and_then(hash) {
            return EntryKind::Manifest(digest);
        }
        match document(RECORD_PREFIX).and_then(hash) {
            Some(Root(name)) => EntryKind::Name(name),
            None => EntryKind::Unknown,
        }
    }
}

impl Cache {
    /// All files, in the order of their last use, the latest first.
    pub fn entries(&self) -> io::Result<Vec<CacheEntry>> {
        let mut files = self.scan()?;
        files.sort_by_key(|file| std::cmp::Reverse(file.last_use));
        Ok(files.into_iter().map(|file| self.entry(file)).collect())
    }

    fn entry(&self, scanned: Scanned) -> CacheEntry {
        let mut entry = CacheEntry {
            name: scanned.name,
            kind: scanned.kind,
            origin: None,
            file_bytes: None,
            held_bytes: scanned.held_bytes,
            last_use: scanned.last_use.0,
            is_in_use: false,
        };
        if !matches!(entry.kind, EntryKind::File(_)) {
            return entry;
        }
        // Without the file, the rest is not known.
        let Ok(file) = self.open_file(&entry.name, OFlags::empty()) else {
            return entry;
        };
        let mut origin = vec![0; ORIGIN_BYTES];
        if let Ok(length) = rustix::fs::fgetxattr(&file, ORIGIN, &mut *origin) {
            origin.truncate(length);
            entry.origin = String::from_utf8(origin).ok();
        }
        entry.file_bytes = header_of(&file).map(|header| header.file_bytes);
        let lock = rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive);
        entry.is_in_use = lock.is_err();
        entry
    }

    /// Removes files that are not in use. If a file cannot be removed, the other ones are, and then
    /// this fails with the first error.
    pub fn prune(&self, which: Prune) -> io::Result<Pruned> {
        let mut files = self.scan()?;
        files.retain(|file| file.kind != EntryKind::Unknown);
        files.sort_by_key(|file| file.last_use);
        let mut pruned = Pruned {
            held_bytes: files.iter().map(|file| file.held_bytes).sum(),
            ..Pruned::default()
        };
        let mut failed = None;
        let named = |name: &str, error: &io::Error| {
            io::Error::new(error.kind(), format!("cannot remove {name}: {error}"))
        };
        for file in &files {
            if !which.selects(file.last_use.0, pruned.held_bytes) {
                continue;
            }
            match self.remove_unused(&file.name) {
                Ok(Removal::Removed) => {
                    pruned.removed_files += 1;
                    pruned.removed_bytes += file.held_bytes;
                    pruned.held_bytes -= file.held_bytes;
                }
                Ok(Removal::Missing) => pruned.held_bytes -= file.held_bytes,
                Ok(Removal::InUse) => pruned.in_use_files += 1,
                Err(error) => failed = failed.or(Some(named(&file.name, &error))),
            }
        }
        match failed {
            Some(error) => Err(error),
            None => Ok(pruned),
        }
    }

    /// The regular files, and what else has a name of this cache's own.
    pub(super) fn scan(&self) -> io::Result<Vec<Scanned>> {
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::openat(&self.0.directory, ".", flags, Mode::empty())?;
        let mut found = Vec::new();
        for entry in Dir::new(directory)? {
            let entry = entry?;
            let name = entry.file_name();
            if [&b"."[..], b"..", VIEWS.as_bytes()].contains(&name.to_bytes()) {
                continue;
            }
            let stat = rustix::fs::statat(&self.0.directory, name, AtFlags::SYMLINK_NOFOLLOW);
            let stat = match stat {
                Ok(stat) => stat,
                // Removed meanwhile.
                Err(rustix::io::Errno::NOENT) => continue,
                Err(error) => return Err(error.into()),
            };
            let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
            let name = String::from_utf8_lossy(name.to_bytes()).into_owned();
            found.push(Scanned {
                kind: if is_file { EntryKind::of(&name) } else { EntryKind::Unknown },
                name,
                held_bytes: stat.st_blocks as u64 * 512,
                last_use: (stat.st_mtime as i64, stat.st_mtime_nsec as i64),
            });
        }
        Ok(found)
    }

    /// Removes a file, unless a process has it open as a cache.
    pub(super) fn remove_unused(&self, name: &str) -> io::Result<Removal> {
        let file = match self.open_file(name, OFlags::empty()) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Removal::Missing),
            Err(error) => return Err(error),
        };
        // Without locks (another error), what is in use is not known. Its readers keep it.
        let locked = rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive);
        if locked == Err(rustix::io::Errno::WOULDBLOCK) {
            return Ok(Removal::InUse);
        }
        // Another process may have removed it, and a third one may have made a new one.
        let opened = rustix::fs::fstat(&file)?;
        let named = rustix::fs::statat(&self.0.directory, name, AtFlags::SYMLINK_NOFOLLOW);
        match named {
            Ok(named) if (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino) => {}
            _ => return Ok(Removal::Missing),
        }
        rustix::fs::unlinkat(&self.0.directory, name, AtFlags::empty())?;
        Ok(Removal::Removed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_what_a_file_is() {
        let hex = "5e".repeat(32);
        let root = [0x5e; 32];
        for (name, kind) in [
            (format!("{hex}.bcow"), EntryKind::File(Root(root))),
            (format!("sha256-{hex}.json"), EntryKind::Manifest(root)),
            (format!("name-{hex}.json"), EntryKind::Name(root)),
            (format!("{hex}.json"), EntryKind::Unknown),
            (format!("sha256:{hex}.bcow"), EntryKind::Unknown),
            ("notes.bcow".to_owned(), EntryKind::Unknown),
            (hex, EntryKind::Unknown),
        ] {
            assert_eq!(EntryKind::of(&name), kind, "{name}");
        }
    }
}
