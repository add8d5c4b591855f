//! Input bytes: a file, a range of a file, standard input, or a blob of a registry.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};

use crate::cancel::{Cancel, is_cancellation};
use crate::digest::Digest;
use crate::error::{ConvertError, LimitKind, TarPlace, check_equal, check_limit};
use crate::repository::Repository;

/// A source of bytes. Files are read by offset, so that clones do not disturb each other.
#[derive(Debug, Clone)]
pub(crate) struct Blob {
    /// The name in messages.
    pub name: String,
    bytes: Bytes,
}

#[derive(Debug, Clone)]
enum Bytes {
    Range {
        file: Arc<File>,
        offset: u64,
        length: u64,
    },
    /// A pipe, or another file that can only be read in order.
    Stream(Arc<File>),
    /// A blob of a registry. Each reader fetches it once.
    Remote {
        repository: Arc<dyn Repository>,
        digest: Digest,
        length: u64,
    },
}

impl Blob {
    /// A range of a file.
    pub(crate) fn range(name: String, file: Arc<File>, offset: u64, length: u64) -> Blob {
        Blob {
            name,
            bytes: Bytes::Range {
                file,
                offset,
                length,
            },
        }
    }

    /// A blob of a registry. The reader compares it with its digest.
    pub(crate) fn remote(repository: Arc<dyn Repository>, digest: Digest, length: u64) -> Blob {
        Blob {
            name: format!("{digest} in {}", repository.name()),
            bytes: Bytes::Remote {
                repository,
                digest,
                length,
            },
        }
    }

    /// A range of this blob; `None` if the blob can only be read in order.
    pub(crate) fn part(&self, name: String, start: u64, length: u64) -> Option<Blob> {
        match &self.bytes {
            Bytes::Range { file, offset, .. } => {
                Some(Blob::range(name, file.clone(), offset + start, length))
            }
            Bytes::Stream(_) | Bytes::Remote { .. } => None,
        }
    }

    /// Standard input.
    pub(crate) fn stdin() -> Result<Blob, ConvertError> {
        let name = "standard input".to_owned();
        let fd = std::io::stdin()
            .as_fd()
            .try_clone_to_owned()
            .map_err(|e| read_error("read", &name, e))?;
        Ok(Blob {
            name,
            bytes: Bytes::Stream(Arc::new(File::from(fd))),
        })
    }

    /// The output of a pipe.
    pub(crate) fn pipe(name: String, reader: io::PipeReader) -> Blob {
        Blob {
            name,
            bytes: Bytes::Stream(Arc::new(File::from(OwnedFd::from(reader)))),
        }
    }

    /// A file, or a named pipe.
    pub(crate) fn open(path: &Path) -> Result<Blob, ConvertError> {
        let name = path.display().to_string();
        let file = File::open(path).map_err(|e| read_error("open", &name, e))?;
        let metadata = file.metadata().map_err(|e| read_error("open", &name, e))?;
        if metadata.is_dir() {
            return Err(ConvertError::layout(
                name,
                "it is a directory; for a root file system in a directory, use dir:",
            ));
        }
        let file = Arc::new(file);
        let bytes = if metadata.is_file() {
            Bytes::Range {
                file,
                offset: 0,
                length: metadata.len(),
            }
        } else {
            Bytes::Stream(file)
        };
        Ok(Blob { name, bytes })
    }

    /// Length in bytes, if it is known before reading.
    pub(crate) fn length(&self) -> Option<u64> {
        match self.bytes {
            Bytes::Range { length, .. } | Bytes::Remote { length, .. } => Some(length),
            Bytes::Stream(_) => None,
        }
    }

    /// The file, if the blob is a whole file.
    pub(crate) fn file(&self) -> Option<Arc<File>> {
        match &self.bytes {
            Bytes::Range {
                file, offset: 0, ..
            } => Some(file.clone()),
            _ => None,
        }
    }

    /// The file that has the blob, and the offset in it; `None` if the blob can only be read in
    /// order.
    pub(crate) fn place(&self) -> Option<(Arc<File>, u64)> {
        match &self.bytes {
            Bytes::Range { file, offset, .. } => Some((Arc::clone(file), *offset)),
            Bytes::Stream(_) | Bytes::Remote { .. } => None,
        }
    }

    /// Reads a document of at most `limit` bytes and checks its digest, if one is given.
    pub(crate) fn document(
        &self,
        limit: u64,
        expected: Option<&Digest>,
    ) -> Result<Vec<u8>, ConvertError> {
        let check = |bytes| {
            check_limit(LimitKind::DocumentBytes, bytes, limit)
                .map_err(|exceeded| exceeded.at(TarPlace::layer(&self.name)))
        };
        self.length().map_or(Ok(()), check)?;
        let mut bytes = Vec::new();
        BlobReader::new(self, Cancel::default())
            .take(limit + 1)
            .read_to_end(&mut bytes)
            .map_err(|e| read_error("read", &self.name, e))?;
        check(bytes.len() as u64)?;
        if let Some(expected) = expected {
            let found = Digest::of_bytes(&bytes, expected.algorithm());
            check_equal(&self.name, "digest", expected, &found)?;
        }
        Ok(bytes)
    }
}

/// Reads a blob from start to end.
pub(crate) struct BlobReader<'b> {
    blob: &'b Blob,
    at: u64,
    /// The bytes of a registry, from the first read on.
    fetched: Option<Box<dyn Read + Send>>,
    cancel: Cancel<'b>,
}

impl<'b> BlobReader<'b> {
    pub(crate) fn new(blob: &'b Blob, cancel: Cancel<'b>) -> Self {
        BlobReader {
            blob,
            at: 0,
            fetched: None,
            cancel,
        }
    }

    /// Skips up to `bytes` bytes; returns the number of skipped bytes, which is 0 for what can only
    /// be read in order.
    pub(crate) fn skip(&mut self, bytes: u64) -> u64 {
        match self.blob.bytes {
            Bytes::Range { length, .. } => {
                let skipped = bytes.min(length - self.at);
                self.at += skipped;
                skipped
            }
            Bytes::Stream(_) | Bytes::Remote { .. } => 0,
        }
    }
}

impl Read for BlobReader<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.cancel.check()?;
        let read = match &self.blob.bytes {
            Bytes::Range {
                file,
                offset,
                length,
            } => {
                let wanted = (length - self.at).min(buf.len() as u64) as usize;
                if wanted == 0 {
                    return Ok(0);
                }
                let read = file.read_at(&mut buf[..wanted], offset + self.at)?;
                if read == 0 {
                    // The file had its full length when it was opened.
                    return Err(io::Error::other(Shrunk));
                }
                read
            }
            Bytes::Stream(file) => (&**file).read(buf)?,
            Bytes::Remote {
                repository,
                digest,
                length,
            } => {
                let reader = match &mut self.fetched {
                    Some(reader) => reader,
                    None => self.fetched.insert(repository.blob(digest, *length)?),
                };
                reader.read(buf)?
            }
        };
        self.at += read as u64;
        Ok(read)
    }
}

/// The file became shorter.
#[derive(Debug, thiserror::Error)]
#[error("the file became shorter")]
struct Shrunk;

/// An error that names what could not be read.
pub(crate) fn read_error(
    action: &'static str,
    what: &str,
    source: impl Into<io::Error>,
) -> ConvertError {
    let source = source.into();
    match source.get_ref() {
        _ if is_cancellation(&source) => ConvertError::Interrupted,
        Some(inner) if inner.is::<Shrunk>() => ConvertError::changed(what),
        _ => ConvertError::Read {
            action,
            what: what.to_owned(),
            source,
        },
    }
}

/// Opens a regular file; `None` if it does not exist. The function never blocks on a FIFO.
pub(crate) fn open_regular(path: &Path) -> Result<Option<Blob>, ConvertError> {
    let name = path.display().to_string();
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let fd = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(fd) => fd,
        Err(rustix::io::Errno::NOENT) => return Ok(None),
        Err(error) => return Err(read_error("open", &name, error)),
    };
    let file = File::from(fd);
    let metadata = file.metadata().map_err(|e| read_error("open", &name, e))?;
    if !metadata.is_file() {
        return Err(ConvertError::layout(name, "not a regular file"));
    }
    let length = metadata.len();
    Ok(Some(Blob::range(name, Arc::new(file), 0, length)))
}
