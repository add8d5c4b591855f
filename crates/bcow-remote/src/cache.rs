//! The cache on the disk: one sparse file per remote file, named by its root hash.
//!
//! A cache file has the bytes of the remote file at their own offsets, as far as they were fetched.
//! There is no index: a chunk is present if its bytes match the Merkle tree, and a reader compares
//! them at each read. So several processes may write to one file, a crash may tear a write, and a
//! file may be deleted, at any time.

mod claims;
mod entries;
mod eviction;
mod names;
mod verify;

use std::fmt;
use std::fs::File;
use std::io::{self, IoSliceMut, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::fs::{FileType, FlockOperation, Mode, OFlags, Timespec, Timestamps, XattrFlags};

use sha2::{Digest, Sha256};

use crate::lock::lock;
use crate::tree::Hash;
use eviction::{RecentRanges, RecentRangesByRoot};

pub(crate) use claims::Held;
pub use entries::{CacheEntry, EntryKind, Prune, Pruned};
pub use verify::Verified;

/// Largest size of a manifest or index.
pub(crate) const MANIFEST_BYTES: u64 = 4 << 20;
/// The end of the names of the files.
const ENDING: &str = ".bcow";
/// The extended attribute of a file with the address that it was fetched from, for the user.
const ORIGIN: &str = "user.bcow.origin";
/// The longest address that is recorded.
const ORIGIN_BYTES: usize = 1024;
/// The time of the last use is recorded this often.
const TOUCH_EVERY: Duration = Duration::from_secs(60);
/// How long nothing is written after a failed write: the disk may have room again.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_secs(60);
/// Attempts to lock a file that another process is about to remove.
const LOCK_ATTEMPTS: u32 = 50;

/// A directory of cache files. All files in it belong to the user of this process, and no other
/// user may write there.
///
/// The modification time of a file is the time of its last use. A process that has a file open
/// holds a shared lock (flock(2)) on it; a file that can be locked exclusively is not in use, and
/// may be removed.
#[derive(Clone)]
pub struct Cache(Arc<Directory>);

struct Directory {
    directory: OwnedFd,
    path: PathBuf,
    /// The bytes that all files together may take up on the disk.
    limit: Option<u64>,
    /// Bytes that this process has written since it last compared the cache with the limit.
    uncompared_bytes: AtomicU64,
    /// The ranges of each file that this process has read or written since their last eviction.
    recent_ranges: RecentRangesByRoot,
    /// Locked by the thread that evicts. Other threads do not wait for it. Acquired before the lock
    /// of `recent_ranges`, and before the exclusive lock on the directory, which prevents an
    /// eviction by another process at the same time.
    evicting: Mutex<()>,
}

impl Directory {
    fn new(directory: OwnedFd, path: PathBuf) -> Self {
        Directory {
            directory,
            path,
            limit: None,
            uncompared_bytes: AtomicU64::new(0),
            recent_ranges: RecentRangesByRoot::default(),
            evicting: Mutex::default(),
        }
    }
}

/// A directory cannot be used as a cache.
#[derive(Debug, thiserror::Error)]
#[error("cannot use {} as a cache: {problem}", path.display())]
pub struct CacheProblem {
    path: PathBuf,
    problem: String,
}

impl Cache {
    /// Opens the cache in a directory, which is created with mode 0700 if it is missing.
    pub fn open(path: &Path) -> Result<Cache, CacheProblem> {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(path)
            .map_err(|error| problem(path, error.to_string()))?;
        Cache::open_present(path)
    }

    /// Opens the cache in a directory; `None` if the directory is missing.
    pub fn find(path: &Path) -> Result<Option<Cache>, CacheProblem> {
        match path.symlink_metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            _ => Cache::open_present(path).map(Some),
        }
    }

    fn open_present(path: &Path) -> Result<Cache, CacheProblem> {
        let failed_io = |error: io::Error| problem(path, error.to_string());
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = rustix::fs::open(path, flags, Mode::empty())
            .map_err(|error| failed_io(error.into()))?;
        let found = rustix::fs::fstat(&directory).map_err(|error| failed_io(error.into()))?;
        if found.st_uid != rustix::process::geteuid().as_raw() {
            return Err(problem(
                path,
                format!("it belongs to user {}", found.st_uid),
            ));
        }
        if found.st_mode & 0o022 != 0 {
            return Err(problem(path, "other users may write to it".into()));
        }
        Ok(Cache(Arc::new(Directory::new(directory, path.to_owned()))))
    }

    /// The same cache with a limit for the bytes that its files take up on the disk. What was not
    /// used for the longest time is evicted.
    ///
    /// Files that were opened before keep the earlier limit.
    pub fn with_limit(self, limit: u64) -> io::Result<Cache> {
        // A lock of its own: that of the other cache counts as that of another process.
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::openat(&self.0.directory, ".", flags, Mode::empty())?;
        Ok(Cache(Arc::new(Directory {
            limit: Some(limit),
            // The first write compares: other processes may have filled the cache.
            uncompared_bytes: AtomicU64::new(u64::MAX / 2),
            ..Directory::new(directory, self.0.path.clone())
        })))
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    pub fn limit(&self) -> Option<u64> {
        self.0.limit
    }

    /// The cache file for the remote file with this root hash. `None` if it cannot be opened: the
    /// remote file is then read without it.
    pub(crate) fn file(&self, root: &Hash) -> Option<CacheFile> {
        let name = name(root);
        match self.lock_file(&name) {
            Ok(file) => Some(CacheFile::new(self.clone(), file, root)),
            Err(error) => {
                tracing::warn!(
                    "{} is not used as a cache: {error}",
                    self.0.path.join(name).display()
                );
                None
            }
        }
    }

    /// Opens a file and marks it as in use.
    fn lock_file(&self, name: &str) -> io::Result<File> {
        for _ in 0..LOCK_ATTEMPTS {
            let file = self.open_file(name, OFlags::CREATE)?;
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
                // Removed between the open and the lock.
                Ok(()) if rustix::fs::fstat(&file)?.st_nlink == 0 => {}
                Ok(()) => return Ok(file),
                // Another process is about to remove the file.
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                // Without locks on this file system, the file may be removed while it is in use,
                // which costs time only.
                Err(_) => return Ok(file),
            }
        }
        self.open_file(name, OFlags::CREATE)
    }

    fn open_file(&self, name: &str, more: OFlags) -> io::Result<File> {
        // A pipe of this name must not make the open block.
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC | more;
        let mode = Mode::RUSR | Mode::WUSR;
        let file = rustix::fs::openat(&self.0.directory, name, flags, mode)?;
        let found = rustix::fs::fstat(&file)?;
        if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
            return Err(io::Error::other("it is not a regular file"));
        }
        Ok(file.into())
    }

    /// The first `most` bytes of the document of this name, which may be any; `None` without one.
    pub(crate) fn document(&self, name: &str, most: u64) -> Option<Vec<u8>> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let name = document_name(name);
        let file = rustix::fs::openat(&self.0.directory, name, flags, Mode::empty()).ok()?;
        let file = File::from(file);
        touch(&file);
        let mut bytes = Vec::new();
        file.take(most).read_to_end(&mut bytes).ok()?;
        Some(bytes)
    }

    /// Keeps a document, if the host can. A torn write is found by its digest.
    pub(crate) fn keep_document(&self, name: &str, bytes: &[u8]) {
        let name = document_name(name);
        let written = self.open_file(&name, OFlags::CREATE).and_then(|file| {
            file.write_all_at(bytes, 0)?;
            file.set_len(bytes.len() as u64)
        });
        match written {
            Ok(()) => self.count_written(bytes.len() as u64),
            Err(error) => {
                tracing::warn!("{}: not cached: {error}", self.0.path.join(name).display());
            }
        }
    }
}

impl fmt::Debug for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cache").field(&self.0.path).finish()
    }
}

/// The name of a document with a digest (`sha256:HEX`).
fn document_name(digest: &str) -> String {
    format!("{}.json", digest.replace(':', "-"))
}

/// The digest of a document: `sha256:HEX`.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    format!(
        "sha256:{}",
        data_encoding::HEXLOWER.encode(&Sha256::digest(bytes))
    )
}

fn name(root: &Hash) -> String {
    format!("{}{ENDING}", data_encoding::HEXLOWER.encode(root))
}

fn problem(path: &Path, problem: String) -> CacheProblem {
    CacheProblem {
        path: path.to_owned(),
        problem,
    }
}

/// Records that a file is used now.
fn touch(file: &File) {
    // On failure, the file counts as unused since the last success.
    let _ = set_last_use(file, 0, rustix::fs::UTIME_NOW);
}

/// Sets the time of the last use of a file, in seconds and nanoseconds.
fn set_last_use(file: &File, seconds: i64, nanoseconds: i64) -> rustix::io::Result<()> {
    let time = Timespec {
        tv_sec: seconds,
        tv_nsec: nanoseconds,
    };
    let times = Timestamps {
        last_access: time,
        last_modification: time,
    };
    rustix::fs::futimens(file, &times)
}

/// A file of the cache, in use.
pub(crate) struct CacheFile {
    cache: Cache,
    file: File,
    name: PathBuf,
    recent: Arc<RecentRanges>,
    /// Milliseconds from `opened` until a write is tried again after a failed one; 0 without a
    /// failure.
    paused_until: AtomicU64,
    /// The cause of the last failed write. The lock is held to set or copy it.
    failure: Mutex<Option<String>>,
    /// Milliseconds from `opened` to the time at which the last use was recorded.
    touched: AtomicU64,
    /// Milliseconds from `opened` until this process waits again for others that fetch; 0 if it
    /// has not waited in vain.
    unshared_until: AtomicU64,
    opened: Instant,
}

impl CacheFile {
    fn new(cache: Cache, file: File, root: &Hash) -> Self {
        touch(&file);
        CacheFile {
            name: cache.0.path.join(name(root)),
            recent: cache.0.recent_ranges.of(root),
            cache,
            file,
            paused_until: AtomicU64::new(0),
            failure: Mutex::default(),
            touched: AtomicU64::new(0),
            unshared_until: AtomicU64::new(0),
            opened: Instant::now(),
        }
    }

    /// Fills `buf` with the bytes at `offset`, which may be any; `false` if there are none.
    pub(crate) fn read(&self, offset: u64, buf: &mut [u8]) -> bool {
        let found = self.file.read_exact_at(buf, offset).is_ok();
        if found {
            self.was_read(offset);
        }
        found
    }

    /// As [`CacheFile::read`], into several parts with one system call.
    pub(crate) fn read_parts(&self, offset: u64, parts: &mut [IoSliceMut<'_>]) -> bool {
        let wanted: usize = parts.iter().map(|part| part.len()).sum();
        // Only the end of a file makes a read of it shorter.
        let found = rustix::io::preadv(&self.file, parts, offset) == Ok(wanted);
        if found {
            self.was_read(offset);
        }
        found
    }

    /// Records a use of the bytes at `offset`.
    fn was_read(&self, offset: u64) {
        self.recent.mark(offset);
        let now = self.now();
        let touched = self.touched.load(Ordering::Relaxed);
        if now >= touched + TOUCH_EVERY.as_millis() as u64 {
            self.touched.store(now, Ordering::Relaxed);
            touch(&self.file);
        }
    }

    /// Stores bytes, if the host can.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) {
        if self.is_paused() {
            return;
        }
        if let Err(error) = self.file.write_all_at(bytes, offset) {
            let until = self.now() + PAUSE_AFTER_FAILURE.as_millis() as u64;
            if self.paused_until.swap(until, Ordering::Relaxed) == 0 {
                tracing::warn!("{}: not cached: {error}", self.name.display());
            }
            *lock(&self.failure) = Some(error.to_string());
            return;
        }
        self.recent.mark(offset);
        self.cache.count_written(bytes.len() as u64);
    }

    /// Whether nothing is written for now, as the last write has failed.
    fn is_paused(&self) -> bool {
        let paused = self.paused_until.load(Ordering::Relaxed);
        paused > 0 && self.now() < paused
    }

    /// Bytes that the file takes up on the disk.
    pub(crate) fn held_bytes(&self) -> u64 {
        rustix::fs::fstat(&self.file).map_or(0, |found| found.st_blocks as u64 * 512)
    }

    /// The cause of the last failed write.
    pub(crate) fn failure(&self) -> Option<String> {
        lock(&self.failure).clone()
    }

    /// The limit of the cache.
    pub(crate) fn limit(&self) -> Option<u64> {
        self.cache.limit()
    }

    /// Evicts data if the cache exceeds its limit. Called when no other thread waits for this one.
    pub(crate) fn enforce_limit(&self) {
        self.cache.enforce_limit();
    }

    /// Records where the file comes from, for the user. Not every file system can.
    pub(crate) fn record_origin(&self, origin: &str) {
        if origin.len() <= ORIGIN_BYTES {
            let flags = XattrFlags::empty();
            let _ = rustix::fs::fsetxattr(&self.file, ORIGIN, origin.as_bytes(), flags);
        }
    }

    fn now(&self) -> u64 {
        self.opened.elapsed().as_millis() as u64
    }
}
