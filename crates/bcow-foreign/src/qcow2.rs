//! A qcow2 image, read with the library imago.
//!
//! An image may name its backing file and its data file by a path, a URL or a full device
//! description (`json:`). The image may come from an untrusted source. bcow therefore refuses
//! everything but a path. It uses only the last component of the path and opens only a regular file
//! of that name in a directory that the user gave. bcow takes the format from the image; it never
//! detects the format.
//!
//! The module `header` checks headers before imago reads them. Calls of imago that use the content
//! of a file run under [`guarded`], which converts a panic to an error.

mod header;

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bcow::format::SECTOR_BYTES;
use bcow::{BlockDevice, Error, Status};
use imago::file::File as ImagoFile;
use imago::format::drivers::FormatDriverInstance;
use imago::qcow2::Qcow2;
use imago::raw::Raw;
use imago::{FormatAccess, Mapping, Storage};

use crate::guard::{guarded, is_panic};
use crate::raw::{check, check_size, io_error, without_padding};
use crate::{ForeignError, host};
use header::Header;

/// Limit of the chain of files below an image.
const MAX_DEPTH: usize = 64;
const MAGIC: &[u8] = b"QFI\xfb";

type Format = FormatAccess<ImagoFile>;
type Image = Qcow2<ImagoFile, Arc<Format>>;

/// A qcow2 image as a disk, with its chain of backing files.
///
/// The size of the address space is rounded up to sectors of 4096 bytes. Bytes beyond the end of
/// the image read as zeros.
pub struct Qcow2Disk {
    format: Arc<Format>,
    bytes: u64,
    /// The largest cluster size in the chain, in bytes.
    cluster_bytes: u64,
    files: Vec<PathBuf>,
    /// imago has panicked, and bcow does not call it again.
    broken: AtomicBool,
}

impl Qcow2Disk {
    /// Opens the image at `path` for reading. Looks for the files that it names only in
    /// `directories`.
    pub fn open(path: &Path, directories: &[PathBuf]) -> Result<Qcow2Disk, ForeignError> {
        let mut opener = Opener {
            directories,
            files: Vec::new(),
            cluster_bytes: 0,
        };
        let format = opener.qcow2(path, host::open(path)?)?;
        let bytes = format.size();
        check_size(path, bytes)?;
        Ok(Qcow2Disk {
            format,
            bytes,
            cluster_bytes: opener.cluster_bytes,
            files: opener.files,
            broken: AtomicBool::new(false),
        })
    }

    /// Size of the disk in bytes, from the header of the image.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The files of the chain, the image first.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// Calls imago for a request at `offset`.
    fn call_imago<T>(
        &self,
        offset: u64,
        request: impl FnOnce() -> io::Result<T>,
    ) -> Result<T, Error> {
        let result = if self.broken.load(Ordering::Relaxed) {
            Err(io::Error::other("the reader of the image failed before"))
        } else {
            guarded(request)
        };
        result.map_err(|error| {
            if is_panic(&error) {
                self.broken.store(true, Ordering::Relaxed);
            }
            io_error(offset, error)
        })
    }
}

impl Drop for Qcow2Disk {
    /// After a panic, imago's own cleanup does not run either: its state may be inconsistent.
    fn drop(&mut self) {
        if self.broken.load(Ordering::Relaxed) {
            std::mem::forget(Arc::clone(&self.format));
        }
    }
}

struct Opener<'a> {
    directories: &'a [PathBuf],
    files: Vec<PathBuf>,
    cluster_bytes: u64,
}

impl Opener<'_> {
    fn qcow2(&mut self, path: &Path, file: File) -> Result<Arc<Format>, ForeignError> {
        let refused = |problem: String| ForeignError::Qcow2Header {
            path: path.to_owned(),
            problem,
        };
        let failed = unreadable(path);
        let header =
            Header::read(&file).map_err(|problem| match problem.downcast::<io::Error>() {
                Ok(source) => ForeignError::io("read", path)(*source),
                Err(problem) => refused(problem.to_string()),
            })?;
        let Some(header) = header else {
            let path = path.to_owned();
            return Err(ForeignError::NotQcow2 { path });
        };
        self.cluster_bytes = self.cluster_bytes.max(header.cluster_bytes);
        self.files.push(path.to_owned());
        if self.files.len() > MAX_DEPTH {
            return Err(refused(format!(
                "its chain has more than {MAX_DEPTH} files"
            )));
        }
        let mut image =
            guarded(|| Image::open_image(ImagoFile::try_from(file)?, false)).map_err(&failed)?;
        if image.requires_external_data_file() {
            let name = image.implicit_external_data_file().cloned();
            let found = self.find(path, "its data file", name.as_deref().unwrap_or_default())?;
            self.files.push(found.clone());
            let data = host::open_named(&found)?;
            let data = guarded(|| ImagoFile::try_from(data)).map_err(&failed)?;
            image.set_data_file(Some(data));
        } else {
            image.set_data_file(None);
        }
        let backing = match image.implicit_backing_file().cloned() {
            Some(name) => {
                let format = header.backing_format.as_deref();
                Some(self.backing(path, &name, format)?)
            }
            None => None,
        };
        image.set_backing(backing);
        access(path, image)
    }

    fn backing(
        &mut self,
        path: &Path,
        name: &str,
        format: Option<&str>,
    ) -> Result<Arc<Format>, ForeignError> {
        const WHAT: &str = "its backing file";
        let refused = |problem: String| ForeignError::NotAllowed {
            path: path.to_owned(),
            what: WHAT,
            name: name.to_owned(),
            problem,
        };
        let found = self.find(path, WHAT, name)?;
        let file = host::open_named(&found)?;
        match format {
            Some("qcow2") => self.qcow2(&found, file),
            Some("raw" | "file") => {
                self.files.push(found.clone());
                let raw = guarded(|| Raw::open_image(ImagoFile::try_from(file)?, false));
                access(&found, raw.map_err(ForeignError::io("read", &found))?)
            }
            Some(other) => Err(refused(format!(
                "bcow does not support its format {other:?}"
            ))),
            None => Err(refused(
                "the image does not record its format (`qemu-img rebase -u -F FORMAT -b NAME` \
                 records it)"
                    .into(),
            )),
        }
    }

    /// The path at which bcow may open a file that an image names.
    fn find(&self, path: &Path, what: &'static str, name: &str) -> Result<PathBuf, ForeignError> {
        let refused = |problem: &str| ForeignError::NotAllowed {
            path: path.to_owned(),
            what,
            name: name.to_owned(),
            problem: problem.to_owned(),
        };
        if self.directories.is_empty() {
            return Err(refused("no directory is allowed for it"));
        }
        let protocol = name.split('/').next().unwrap_or_default();
        if name.is_empty() || protocol.contains(':') {
            return Err(refused("it is not the path of a file"));
        }
        let Some(last) = Path::new(name).file_name() else {
            return Err(refused("it has no file name"));
        };
        self.directories
            .iter()
            .map(|directory| directory.join(last))
            .find(|candidate| candidate.symlink_metadata().is_ok())
            .ok_or_else(|| refused("the allowed directories have no such file"))
    }
}

/// The requests' side of an opened file, for the disk or for the image above.
fn access(
    path: &Path,
    image: impl FormatDriverInstance<Storage = ImagoFile> + 'static,
) -> Result<Arc<Format>, ForeignError> {
    guarded(|| Ok(Arc::new(FormatAccess::new(image)))).map_err(unreadable(path))
}

fn unreadable(path: &Path) -> impl Fn(io::Error) -> ForeignError {
    move |source| ForeignError::Qcow2 {
        path: path.to_owned(),
        source,
    }
}

impl BlockDevice for Qcow2Disk {
    fn size(&self) -> u64 {
        self.bytes.next_multiple_of(SECTOR_BYTES)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        let data = without_padding(offset, buf, self.bytes)?;
        if data.is_empty() {
            Ok(())
        } else {
            self.call_imago(offset, || self.format.read(data, offset))
        }
    }

    fn status(&self, offset: u64, length: u64) -> Result<Status, Error> {
        let length = length.max(1);
        check(offset, length, self.size())?;
        let there = self.bytes.saturating_sub(offset).min(length);
        if there == 0 {
            return Ok(Status::hole(length));
        }
        let (mapping, known) = self.call_imago(offset, || {
            let (mapping, known) = self.format.get_mapping(offset, there)?;
            let known = known.clamp(1, there);
            // Like qemu, imago reads zeros beyond the end of a file. Only the last cluster may be
            // incomplete in the file.
            if let Mapping::Raw {
                storage,
                offset: at,
                ..
            } = &mapping
                && at.saturating_add(known) > storage.size()?.next_multiple_of(self.cluster_bytes)
            {
                return Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "the image is truncated: it ends before the data",
                ));
            }
            Ok((mapping, known))
        })?;
        Ok(match mapping {
            Mapping::Zero { explicit: true, .. } => Status::zeros(known),
            Mapping::Zero { .. } => Status::hole(known),
            _ => Status::data(known),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An index beyond the end, as in imago on values of an image that it does not check.
    fn panics() -> io::Result<()> {
        let table = [0u8; 2];
        let _ = table[std::hint::black_box(7)];
        Ok(())
    }

    #[test]
    fn after_a_panic_each_request_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        let file = File::create_new(&path).unwrap();
        let mut writer =
            crate::Qcow2Writer::new(&file, 1 << 20, crate::ClusterCompression::None).unwrap();
        writer.data(&[7; 1 << 16]).unwrap();
        writer.zeros((1 << 20) - (1 << 16)).unwrap();
        writer.finish().unwrap();
        let disk = Qcow2Disk::open(&path, &[]).unwrap();
        let mut sector = [0; 4096];
        disk.read_at(8192, &mut sector).unwrap();
        assert_eq!(sector, [7; 4096]);

        let error = disk.call_imago(8192, panics).unwrap_err();
        assert!(matches!(error, Error::Io { offset: 8192, .. }), "{error}");
        assert!(
            format!("{error:?}").contains("index out of bounds"),
            "{error:?}"
        );
        let failed = |result: Result<(), Error>| {
            let error = result.unwrap_err();
            assert!(format!("{error:?}").contains("failed before"), "{error:?}");
        };
        failed(disk.read_at(8192, &mut sector));
        failed(disk.status(0, 4096).map(|_| ()));
    }
}
