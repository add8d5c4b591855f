//! Disks in other forms: raw and qcow2, into BCoW and out of it.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow::format::{SECTOR_BYTES, State, Use};
use bcow::operation::{RewriteOptions, WRITABLE_LOG_BYTES};
use bcow::{BlockDevice, Compression};
use bcow_foreign::{ClusterCompression, ForeignError, Qcow2Disk, RawDisk};
use bcow_images::NameParts;
use bcow_images::args::{CONVERT_FROM, CONVERT_TO};
use bcow_images::error::CommandError;
use bcow_images::foreign_format::format_hint;
use bcow_images::image::OpenImage;
use bcow_images::new_file::NewFile;
use bcow_images::push::Destination;
use bcow_images::replace::{self, Replacement};
use bcow_images::size::plural;
use bcow_oci::ConvertOptions;
use serde::Serialize;
use serde_json::json;

use crate::conversion::Conversion;
use crate::copy_out::CopyOut;
use crate::options::Compress;
use crate::rewrite::{metadata, write_new};
use crate::sending::Sending;
use crate::work::Work;

/// A new disk.
#[derive(Debug, Serialize)]
pub struct DiskReport {
    /// Size of the disk in bytes.
    pub size: u64,
    /// Length of its file in bytes.
    pub file_bytes: u64,
    /// `None` for a disk in another form.
    #[serde(flatten)]
    pub bcow: Option<BcowDisk>,
}

/// A new disk in BCoW form.
#[derive(Debug, Serialize)]
pub struct BcowDisk {
    /// Whether it is immutable; otherwise it is writable.
    pub sealed: bool,
    /// Whether it was read back.
    pub verified: bool,
}

/// Converts a disk, or an image to a disk. `image` is the source, if it is in BCoW form.
pub(crate) fn convert(
    asked: &Conversion<'_>,
    destination: &Destination,
    image: Option<OpenImage>,
    sending: Option<&Sending>,
    work: &Work<'_>,
) -> Result<DiskReport, CommandError> {
    let source = open_source(asked, image)?;
    let (Destination::Raw(path) | Destination::Qcow2(path) | Destination::File(path)) = destination
    else {
        return Err(CONVERT_TO.refuse(asked.destination).into());
    };
    source.refuse_as_destination(path)?;
    let _replaced = replace::check(path, Replacement::Disk, asked.force)?;
    match destination {
        Destination::Raw(_) => {
            asked.refuse_for_foreign("raw", asked.encoding.compress.is_some_and(is_compressed))?;
            write_foreign(&source, path, None, work)
        }
        Destination::Qcow2(_) => {
            asked.refuse_for_foreign("qcow2", false)?;
            let compression = match asked.encoding.compress {
                None | Some(Compress::None) => ClusterCompression::None,
                Some(Compress::Zlib) => ClusterCompression::Zlib,
                Some(Compress::Zstd { level }) => ClusterCompression::Zstd { level },
            };
            write_foreign(&source, path, Some(compression), work)
        }
        _ => write_disk(asked, &source, path, sending, work),
    }
}

fn is_compressed(compress: Compress) -> bool {
    compress != Compress::None
}

/// The disk to convert.
struct DiskSource {
    device: Arc<dyn BlockDevice>,
    name: PathBuf,
    /// Length in bytes of the disk; the device continues with zeros up to the next sector.
    bytes: u64,
    /// All files of the disk and its backings.
    files: Vec<PathBuf>,
}

fn open_source(
    asked: &Conversion<'_>,
    image: Option<OpenImage>,
) -> Result<DiskSource, CommandError> {
    let name = asked.source.shown().to_owned();
    match (asked.source.parts(), image) {
        (NameParts::Raw(path), _) => {
            let disk = RawDisk::open(path).map_err(|error| foreign_failure(&error))?;
            Ok(DiskSource {
                name,
                bytes: disk.bytes(),
                files: vec![path.to_owned()],
                device: Arc::new(disk),
            })
        }
        (NameParts::Qcow2(path), _) => {
            let disk = Qcow2Disk::open(path, asked.stores.backing_dirs()?)
                .map_err(|error| foreign_failure(&error))?;
            Ok(DiskSource {
                name,
                bytes: disk.bytes(),
                files: disk.files().to_vec(),
                device: Arc::new(disk),
            })
        }
        (_, Some(image)) => Ok(DiskSource {
            bytes: true_size(&image)?,
            files: image.files(),
            device: image.image().clone(),
            name,
        }),
        (_, None) => Err(CONVERT_FROM.refuse(asked.source).into()),
    }
}

/// The exact size of a disk made from a file whose length was not a multiple of a sector, if the
/// disk has not changed since.
fn true_size(image: &OpenImage) -> Result<u64, CommandError> {
    let header = image.image().header();
    let size = image.image().size();
    if header.purpose != Use::Disk || header.state != State::Sealed {
        return Ok(size);
    }
    Ok(match image.metadata()?["source"]["bytes"].as_u64() {
        Some(bytes) if bytes.checked_next_multiple_of(SECTOR_BYTES) == Some(size) => bytes,
        _ => size,
    })
}

impl DiskSource {
    /// Refuses to write over a file that is being read.
    fn refuse_as_destination(&self, destination: &Path) -> Result<(), CommandError> {
        // A file that does not exist is not a source.
        let Ok(target) = std::fs::metadata(destination) else {
            return Ok(());
        };
        let same = self.files.iter().find(|path| {
            std::fs::metadata(path)
                .is_ok_and(|file| (file.dev(), file.ino()) == (target.dev(), target.ino()))
        });
        match same {
            Some(path) => Err(
                CommandError::new(format!("cannot write {}", destination.display()))
                    .caused_by_text(format!(
                        "it is {}, which the disk is read from",
                        path.display()
                    ))
                    .hint("give the new disk another name"),
            ),
            None => Ok(()),
        }
    }
}

fn foreign_failure(error: &ForeignError) -> CommandError {
    let failure = CommandError::new("cannot open the disk").caused_by(error);
    match (error, error.hint()) {
        (_, Some(hint)) => failure.hint(hint),
        (ForeignError::NotQcow2 { path }, None) => failure.hint_if(format_hint(path)),
        _ => failure,
    }
}

impl Conversion<'_> {
    /// Refuses options that a disk in another form does not have.
    fn refuse_for_foreign(&self, form: &str, is_compressed: bool) -> Result<(), CommandError> {
        let given = [
            (self.writable, "--writable"),
            (self.encoding.block_bytes.is_some(), "--block-size"),
            (is_compressed, "--compress"),
        ];
        match given.into_iter().find(|(is_given, _)| *is_given) {
            Some((_, option)) => Err(CommandError::usage(format!(
                "{option} is for disks in BCoW form, not for {form}"
            ))
            .hint(format!("leave out {option}"))),
            None => Ok(()),
        }
    }
}

/// Makes a qcow2 image with this compression; without one, a raw file.
fn write_foreign(
    source: &DiskSource,
    path: &Path,
    qcow2: Option<ClusterCompression>,
    work: &Work<'_>,
) -> Result<DiskReport, CommandError> {
    work.progress.phase("converting");
    work.progress.total(Some(source.bytes));
    let copy = CopyOut {
        device: &*source.device,
        name: &source.name,
        end: source.bytes,
        work,
    };
    let new = NewFile::replace(path)?;
    let cannot = || format!("cannot write {}", path.display());
    let (size, file_bytes) = match qcow2 {
        None => {
            copy.raw(&new, &cannot)?;
            (source.bytes, source.bytes)
        }
        Some(compression) => {
            let file_bytes = copy.qcow2(&new, compression, &cannot)?;
            (
                source.bytes.next_multiple_of(SECTOR_BYTES_OF_QCOW2),
                file_bytes,
            )
        }
    };
    work.progress.phase("syncing");
    new.complete()?;
    Ok(DiskReport {
        size,
        file_bytes,
        bcow: None,
    })
}

/// The size of a qcow2 image is a multiple of this number of bytes.
const SECTOR_BYTES_OF_QCOW2: u64 = 512;

/// Makes a BCoW disk.
fn write_disk(
    asked: &Conversion<'_>,
    source: &DiskSource,
    destination: &Path,
    sending: Option<&Sending>,
    work: &Work<'_>,
) -> Result<DiskReport, CommandError> {
    let size = source.device.size();
    if size != source.bytes {
        work.messages.warning(&format_args!(
            "{} has {}, which is not a multiple of the sector size ({SECTOR_BYTES} bytes): the \
             disk ends with {} of zeros",
            source.name.display(),
            plural(source.bytes, "byte"),
            plural(size - source.bytes, "byte")
        ));
    }
    let encoding = &asked.encoding;
    // Blocks that will be overwritten soon are not compressed.
    let default = if asked.writable {
        Compression::None
    } else {
        ConvertOptions::default().compression
    };
    let compression = encoding.compression(default)?;
    let source_json = json!({ "bytes": source.bytes });
    let new = NewFile::replace(destination)?;
    let mut options = RewriteOptions {
        compression,
        block_bytes: encoding.block_bytes,
        threads: encoding.threads(),
        verify: encoding.verify,
        metadata: metadata(compression, encoding.block_bytes, Some(source_json))?,
        ..RewriteOptions::new(size)
    };
    if asked.writable {
        options.form.log_bytes = WRITABLE_LOG_BYTES;
    }
    let device = &*source.device;
    let written = write_new(device, &source.name, &new, destination, options, work)?;
    new.complete()?;
    if let Some(sending) = sending {
        sending.send_file(destination, work)?;
    }
    Ok(DiskReport {
        size,
        file_bytes: written.file_bytes(),
        bcow: Some(BcowDisk {
            sealed: !asked.writable,
            verified: encoding.verify,
        }),
    })
}
