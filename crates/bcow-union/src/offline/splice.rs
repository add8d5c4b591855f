//! A device that combines the image, the upper's files and a file system of both, without a copy of
//! their content. The layout of its addresses is in [`addresses`](super::addresses).
//!
//! So each operation that reads an image (an export, a comparison) can read a union.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use bcow::{BlockDevice, Error};
use bcow_erofs::reader::{ErofsError, Filesystem};
use bcow_erofs::tree::{TailSource, Tree};
use bcow_erofs::writer::{EmitError, MAX_INLINE, Plan, WriteError, WriteOptions};
use bcow_ext4::Extents;
use bcow_view::Compared;
use parking_lot::Mutex;

use super::addresses::{LOWER_START, Segments, UPPER_START};
use super::body::{Body, Own, PieceSource};
use crate::blocks::BLOCK_BYTES;
use crate::upper::DiskReader;
use crate::upper::beneath::open_regular_beneath;

/// The addresses of the superblock and of the metadata.
const SUPERBLOCK_AT: u64 = 1024;
const METADATA_AT: u64 = BLOCK_BYTES;
/// The number of files that stay open.
const OPEN_FILES: usize = 16;

/// The content of a union.
pub struct Store {
    pub(super) lower: Arc<Filesystem>,
    pub(super) device: Arc<dyn BlockDevice>,
    pub(super) place: PiecePlace,
    pub(super) bodies: Vec<Body>,
    pub(super) segments: Segments,
    pub(super) open: Mutex<Vec<(u32, OpenFile)>>,
}

/// Where the content is that is not the image's.
pub(super) enum PiecePlace {
    /// In files of an upper.
    Upper {
        /// The upper's root.
        root: OwnedFd,
        /// The shared lock. It keeps writers away until this is dropped, because content is read
        /// until then.
        _lock: Option<Arc<File>>,
    },
    /// In blocks of a disk.
    Disk {
        /// The file system of the disk.
        compared: Arc<Compared>,
        /// As that of an upper.
        _lock: Option<Arc<DiskReader>>,
    },
}

/// A file above the image.
#[derive(Clone)]
pub(super) enum OpenFile {
    Host(Arc<File>),
    Disk(Arc<Compared>, Arc<Extents>),
}

impl OpenFile {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        match self {
            OpenFile::Host(file) => {
                let read = file.read_exact_at(buf, offset);
                read.map_err(|error| io_error(offset, error))
            }
            OpenFile::Disk(disk, extents) => {
                let read = disk.disk().read(extents, offset, buf);
                read.map_err(|error| Error::Io {
                    action: "read a file of the disk",
                    offset,
                    source: io::Error::other(error),
                })
            }
        }
    }
}

fn io_error(offset: u64, source: io::Error) -> Error {
    Error::Io {
        action: "read a file of the upper",
        offset,
        source,
    }
}

impl Store {
    /// Writes the metadata of `tree` and opens the file system on a new device over this content.
    pub fn filesystem(self: &Arc<Self>, tree: &Tree) -> Result<Spliced, SpliceError> {
        let options = WriteOptions {
            metadata_start: METADATA_AT,
            inline_max: MAX_INLINE,
        };
        let plan = Plan::new(tree, &options)?.with_uuid(self.lower.superblock().uuid);
        let mut metadata = Vec::new();
        plan.write::<io::Error>(&Tails(self), &mut |bytes| {
            metadata.extend_from_slice(bytes);
            Ok(())
        })
        .map_err(|error| match error {
            EmitError::Tail(error) | EmitError::Output(error) => SpliceError::Tail(error),
        })?;
        let size = LOWER_START + self.device.size();
        let device = Arc::new(Splice {
            superblock: plan.superblock(size / BLOCK_BYTES),
            metadata,
            size,
            store: self.clone(),
        });
        Ok(Spliced {
            filesystem: Filesystem::open(device.clone())?,
            device,
        })
    }

    /// Reads content that is not the image's.
    fn read_own(&self, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        let mut done = 0;
        while done < buf.len() {
            let at = offset + done as u64;
            let rest = &mut buf[done..];
            let Some((segment, within)) = self.segments.at(at) else {
                rest.fill(0);
                return Ok(());
            };
            let padded = segment.length.next_multiple_of(BLOCK_BYTES);
            if within >= padded {
                rest.fill(0);
                return Ok(());
            }
            let n = rest.len().min((padded - within) as usize);
            let stored = segment.length.saturating_sub(within).min(n as u64) as usize;
            self.read_body(segment.body, segment.offset + within, &mut rest[..stored])?;
            rest[stored..n].fill(0);
            done += n;
        }
        Ok(())
    }

    fn read_body(&self, index: u32, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        let body = &self.bodies[index as usize];
        let mut done = 0;
        while done < buf.len() {
            let at = offset + done as u64;
            let piece = body.piece(at);
            let n = (buf.len() - done).min((piece.end - at).min(1 << 30) as usize);
            let part = &mut buf[done..done + n];
            match (piece.source, &body.lower) {
                (PieceSource::Own, _) => self.own(index)?.read_at(at, part)?,
                (PieceSource::Lower, Some(inode)) => {
                    let read = self.lower.read(inode, at, part).map_err(lower_error)?;
                    part[read..].fill(0);
                }
                _ => part.fill(0),
            }
            done += n;
        }
        Ok(())
    }

    /// The file above the image of a body. The last [`OPEN_FILES`] files stay open.
    fn own(&self, index: u32) -> Result<OpenFile, Error> {
        let mut open = self.open.lock();
        if let Some(at) = open.iter().position(|(known, _)| *known == index) {
            let entry = open.remove(at);
            let file = entry.1.clone();
            open.push(entry);
            return Ok(file);
        }
        let own = &self.bodies[index as usize].own;
        let file = match (own, &self.place) {
            (Some(Own::Host { path, inode }), PiecePlace::Upper { root, .. }) => {
                OpenFile::Host(Arc::new(open_host(root.as_fd(), path, *inode)?))
            }
            (Some(Own::Disk(extents)), PiecePlace::Disk { compared, .. }) => {
                OpenFile::Disk(compared.clone(), extents.clone())
            }
            _ => return Err(io_error(0, io::ErrorKind::NotFound.into())),
        };
        if open.len() == OPEN_FILES {
            open.remove(0);
        }
        open.push((index, file.clone()));
        Ok(file)
    }
}

fn open_host(root: BorrowedFd<'_>, path: &[u8], inode: u64) -> Result<File, Error> {
    let file = open_regular_beneath(root, path).map_err(|errno| io_error(0, errno.into()))?;
    let stat = rustix::fs::fstat(&file).map_err(|errno| io_error(0, errno.into()))?;
    if stat.st_ino != inode {
        let changed = io::Error::other("the file was replaced");
        return Err(io_error(0, changed));
    }
    Ok(File::from(file))
}

fn lower_error(error: ErofsError) -> Error {
    match error {
        ErofsError::Device(error) => error,
        other => Error::Io {
            action: "read the image",
            offset: 0,
            source: io::Error::other(other),
        },
    }
}

/// The tails of the image's files, which lie beside their inodes.
struct Tails<'s>(&'s Store);

impl TailSource for Tails<'_> {
    fn read_tail(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let at = offset
            .checked_sub(LOWER_START)
            .ok_or(io::ErrorKind::InvalidInput)?;
        self.0.device.read_at(at, buf).map_err(io::Error::other)
    }
}

/// Why a union cannot become a file system.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpliceError {
    /// The union is larger than EROFS can address.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The generated file system cannot be read.
    #[error(transparent)]
    Read(#[from] ErofsError),
    #[error("cannot read the end of a file of the image")]
    Tail(#[source] io::Error),
}

/// A file system over a union's content.
pub struct Spliced {
    /// The file system.
    pub filesystem: Filesystem,
    /// The device of the file system.
    pub device: Arc<dyn BlockDevice>,
}

struct Splice {
    superblock: [u8; 3072],
    metadata: Vec<u8>,
    size: u64,
    store: Arc<Store>,
}

impl Splice {
    /// Copies the overlap of `bytes`, which begin at `start`, with the range of `buf`. The rest of
    /// `buf` does not change.
    fn memory(start: u64, bytes: &[u8], offset: u64, buf: &mut [u8]) {
        let end = start + bytes.len() as u64;
        let from = offset.clamp(start, end);
        let to = (offset + buf.len() as u64).clamp(start, end);
        if from < to {
            buf[(from - offset) as usize..(to - offset) as usize]
                .copy_from_slice(&bytes[(from - start) as usize..(to - start) as usize]);
        }
    }
}

impl BlockDevice for Splice {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        let end = offset.checked_add(buf.len() as u64);
        if end.is_none_or(|end| end > self.size) {
            return Err(Error::OutOfRange {
                offset,
                length: buf.len() as u64,
                size: self.size,
            });
        }
        let mut done = 0;
        while done < buf.len() {
            let at = offset + done as u64;
            let rest = &mut buf[done..];
            let limit = [UPPER_START, LOWER_START, u64::MAX]
                .into_iter()
                .find(|limit| at < *limit);
            let n = rest
                .len()
                .min((limit.unwrap_or(u64::MAX) - at).min(1 << 30) as usize);
            let part = &mut rest[..n];
            match limit {
                Some(UPPER_START) => {
                    part.fill(0);
                    Splice::memory(SUPERBLOCK_AT, &self.superblock, at, part);
                    Splice::memory(METADATA_AT, &self.metadata, at, part);
                }
                Some(LOWER_START) => self.store.read_own(at, part)?,
                _ => self.store.device.read_at(at - LOWER_START, part)?,
            }
            done += n;
        }
        Ok(())
    }
}
