//! The cache on the disk: one sparse file per remote file, named by its root hash.
//!
//! A cache file has the bytes of the remote file at their own offsets, as far as they were fetched.
//! There is no index: a chunk is present if its bytes match the hash tree, and a reader compares
//! them at each read. So several processes may write to one file, a crash may tear a write, and a
//! file may be deleted, at any time.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Timespec, Timestamps};

use crate::tree::Hash;

/// The end of the names of the files.
const ENDING: &str = ".bcow";

/// A directory of cache files. All files in it belong to the user of this process, and no other
/// user may write there.
#[derive(Clone)]
pub struct Cache {
    directory: Arc<OwnedFd>,
    path: PathBuf,
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
        let failed = |problem: String| CacheProblem {
            path: path.to_owned(),
            problem,
        };
        let failed_io = |error: io::Error| failed(error.to_string());
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(path)
            .map_err(failed_io)?;
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = rustix::fs::open(path, flags, Mode::empty())
            .map_err(|error| failed_io(error.into()))?;
        let found = rustix::fs::fstat(&directory).map_err(|error| failed_io(error.into()))?;
        if found.st_uid != rustix::process::geteuid().as_raw() {
            return Err(failed(format!("it belongs to user {}", found.st_uid)));
        }
        if found.st_mode & 0o022 != 0 {
            return Err(failed("other users may write to it".into()));
        }
        Ok(Cache {
            directory: Arc::new(directory),
            path: path.to_owned(),
        })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The cache file for the remote file with this root hash. `None` if it cannot be opened: the
    /// remote file is then read without it.
    pub(crate) fn file(&self, root: &Hash) -> Option<CacheFile> {
        let name = name(root);
        match self.open_file(&name) {
            Ok(file) => Some(CacheFile {
                file,
                name: self.path.join(name),
                is_full: AtomicBool::new(false),
            }),
            Err(error) => {
                tracing::warn!(
                    "{} is not used as a cache: {error}",
                    self.path.join(name).display()
                );
                None
            }
        }
    }

    fn open_file(&self, name: &str) -> io::Result<File> {
        // A pipe of this name must not make the open block.
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        let file = rustix::fs::openat(&*self.directory, name, flags, mode)?;
        let found = rustix::fs::fstat(&file)?;
        if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
            return Err(io::Error::other("it is not a regular file"));
        }
        // The modification time is the time of the last use; `prune` goes by it.
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: rustix::fs::UTIME_NOW,
        };
        let _ = rustix::fs::futimens(
            &file,
            &Timestamps {
                last_access: now,
                last_modification: now,
            },
        );
        Ok(file.into())
    }

    /// The first `most` bytes of the document of this name, which may be any; `None` without one.
    pub(crate) fn document(&self, name: &str, most: u64) -> Option<Vec<u8>> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let name = document_name(name);
        let file = rustix::fs::openat(&*self.directory, name, flags, Mode::empty()).ok()?;
        let mut bytes = Vec::new();
        File::from(file).take(most).read_to_end(&mut bytes).ok()?;
        Some(bytes)
    }

    /// Keeps a document, if the host can. A torn write is found by its digest.
    pub(crate) fn keep_document(&self, name: &str, bytes: &[u8]) {
        let name = document_name(name);
        let written = self.open_file(&name).and_then(|file| {
            file.write_all_at(bytes, 0)?;
            file.set_len(bytes.len() as u64)
        });
        if let Err(error) = written {
            tracing::warn!("{}: not cached: {error}", self.path.join(name).display());
        }
    }

    /// A file in the directory of the cache, which gets its name when it is complete.
    pub(crate) fn new_file(&self) -> io::Result<NewCacheFile> {
        let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        let file = rustix::fs::openat(&*self.directory, ".", flags, mode)?;
        Ok(NewCacheFile {
            cache: self.clone(),
            file: file.into(),
        })
    }
}

impl fmt::Debug for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cache").field(&self.path).finish()
    }
}

/// The name of a document with a digest (`sha256:HEX`).
fn document_name(digest: &str) -> String {
    format!("{}.json", digest.replace(':', "-"))
}

fn name(root: &Hash) -> String {
    format!("{}{ENDING}", data_encoding::HEXLOWER.encode(root))
}

/// A file of the cache.
pub(crate) struct CacheFile {
    file: File,
    name: PathBuf,
    /// Set when a write has failed. Reading goes on, and nothing more is written.
    is_full: AtomicBool,
}

impl CacheFile {
    /// Fills `buf` with the bytes at `offset`, which may be any; `false` if there are none.
    pub(crate) fn read(&self, offset: u64, buf: &mut [u8]) -> bool {
        self.file.read_exact_at(buf, offset).is_ok()
    }

    /// Stores bytes, if the host can.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) {
        if self.is_full.load(Ordering::Relaxed) {
            return;
        }
        if let Err(error) = self.file.write_all_at(bytes, offset)
            && !self.is_full.swap(true, Ordering::Relaxed)
        {
            tracing::warn!("{}: nothing more is cached: {error}", self.name.display());
        }
    }
}

/// A file that is written whole.
pub(crate) struct NewCacheFile {
    cache: Cache,
    file: File,
}

impl NewCacheFile {
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Gives the file its name; a file that has the name already is replaced. Readers of the
    /// replaced file keep it.
    pub(crate) fn publish(self, root: &Hash) -> io::Result<CacheFile> {
        let name = name(root);
        let directory = &*self.cache.directory;
        let own = format!(
            "/proc/self/fd/{}",
            std::os::fd::AsRawFd::as_raw_fd(&self.file)
        );
        match rustix::fs::unlinkat(directory, &*name, AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
        let linked = rustix::fs::linkat(
            rustix::fs::CWD,
            &*own,
            directory,
            &*name,
            AtFlags::SYMLINK_FOLLOW,
        );
        match linked {
            // Another process has published the same file meanwhile.
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(CacheFile {
            file: self.file,
            name: self.cache.path.join(name),
            is_full: AtomicBool::new(false),
        })
    }
}
