//! Disks in other forms: raw and qcow2, into BCoW and out of it.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use bcow::BlockDevice;
use bcow::format::{SECTOR_BYTES, State, Use};
use bcow::operation::{RewriteOptions, WRITABLE_LOG_BYTES};
use bcow_foreign::{ClusterCompression, ForeignError, Qcow2Disk, RawDisk};
use bcow_images::NameParts;
use bcow_oci::ConvertOptions;
use serde_json::json;

use super::{Args, Sending};
use crate::conversion::Compress;
use crate::copy_out::CopyOut;
use crate::error::CommandError;
use crate::foreign_format::format_hint;
use crate::image::OpenImage;
use crate::interrupt::Interrupt;
use crate::new_file::NewFile;
use crate::push::Destination;
use crate::replace::{self, Replacement};
use crate::rewrite::{TerminalMonitor, metadata, threads, write_new};
use crate::size::{Human, plural};
use crate::ui::Ui;
use bcow_images::args::{CONVERT_FROM, CONVERT_TO};

/// A file in another form than BCoW.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Foreign<'a> {
    Raw(&'a Path),
    Qcow2(&'a Path),
}

impl<'a> Foreign<'a> {
    fn path(&self) -> &'a Path {
        match self {
            Foreign::Raw(path) | Foreign::Qcow2(path) => path,
        }
    }

    fn transport(&self) -> &'static str {
        match self {
            Foreign::Raw(_) => "raw",
            Foreign::Qcow2(_) => "qcow2",
        }
    }
}

/// Converts a disk, or an image to a disk. `image` is the source, if it is in BCoW form.
pub fn run(
    args: &Args,
    destination: &Destination,
    image: Option<OpenImage>,
    sending: Option<&Sending>,
    ui: &Ui,
) -> Result<(), CommandError> {
    let source = open_source(args, image)?;
    let foreign = match destination {
        Destination::Raw(path) => Foreign::Raw(path),
        Destination::Qcow2(path) => Foreign::Qcow2(path),
        Destination::File(path) => {
            source.refuse_as_destination(path)?;
            let _replaced = replace::check(path, Replacement::Disk, args.force)?;
            return write_disk(args, &source, path, sending, ui);
        }
        _ => return Err(CONVERT_TO.refuse(&args.destination).into()),
    };
    source.refuse_as_destination(foreign.path())?;
    let _replaced = replace::check(foreign.path(), Replacement::Disk, args.force)?;
    write_foreign(args, &source, foreign, ui)
}

/// The disk to convert.
struct DiskSource {
    device: Box<dyn BlockDevice>,
    name: PathBuf,
    /// Length in bytes of the disk; the device continues with zeros up to the next sector.
    bytes: u64,
    /// All files of the disk and its backings.
    files: Vec<PathBuf>,
}

fn open_source(args: &Args, image: Option<OpenImage>) -> Result<DiskSource, CommandError> {
    let name = args.source.shown().to_owned();
    match (args.source.parts(), image) {
        (NameParts::Raw(path), _) => {
            let disk = RawDisk::open(path).map_err(|error| foreign_failure(&error))?;
            Ok(DiskSource {
                name,
                bytes: disk.bytes(),
                files: vec![path.to_owned()],
                device: Box::new(disk),
            })
        }
        (NameParts::Qcow2(path), _) => {
            let disk = Qcow2Disk::open(path, args.stores.backing_dirs()?)
                .map_err(|error| foreign_failure(&error))?;
            Ok(DiskSource {
                name,
                bytes: disk.bytes(),
                files: disk.files().to_vec(),
                device: Box::new(disk),
            })
        }
        (_, Some(image)) => Ok(DiskSource {
            bytes: true_size(&image)?,
            files: image.files(),
            device: Box::new(image.image().clone()),
            name,
        }),
        (_, None) => Err(CONVERT_FROM.refuse(&args.source).into()),
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
    let metadata = crate::commands::export::metadata(image)?;
    Ok(match metadata["source"]["bytes"].as_u64() {
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
        (ForeignError::NotQcow2 { path }, None) => match format_hint(path) {
            Some(hint) => failure.hint(hint),
            None => failure,
        },
        _ => failure,
    }
}

/// Makes a raw file or a qcow2 image.
fn write_foreign(
    args: &Args,
    source: &DiskSource,
    destination: Foreign<'_>,
    ui: &Ui,
) -> Result<(), CommandError> {
    let usage = |what: &str| {
        let text = format!(
            "{what} is for disks in BCoW form, not for {}",
            destination.transport()
        );
        Err(CommandError::usage(text).hint(format!("leave out {what}")))
    };
    if args.writable {
        return usage("--writable");
    }
    if args.block_size.0.is_some() {
        return usage("--block-size");
    }
    let compression = match (destination, args.compress) {
        (_, None | Some(Compress::None)) => ClusterCompression::None,
        (Foreign::Raw(_), Some(_)) => return usage("--compress"),
        (_, Some(Compress::Zlib)) => ClusterCompression::Zlib,
        (_, Some(Compress::Zstd { level })) => ClusterCompression::Zstd { level },
    };
    let path = destination.path();
    let interrupt = Interrupt::catch();
    let progress = ui.progress();
    progress.phase("converting");
    progress.total(Some(source.bytes));
    let copy = CopyOut {
        device: &*source.device,
        name: &source.name,
        end: source.bytes,
        interrupt: &interrupt,
        progress: &progress,
    };
    let new = NewFile::replace(path)?;
    let cannot = || format!("cannot write {}", path.display());
    let file_bytes = match destination {
        Foreign::Raw(_) => copy.raw(&new, &cannot).map(|()| source.bytes)?,
        Foreign::Qcow2(_) => copy.qcow2(&new, compression, &cannot)?,
    };
    progress.phase("syncing");
    new.complete()?;
    drop(progress);
    let size = match destination {
        Foreign::Qcow2(_) => source.bytes.next_multiple_of(512),
        Foreign::Raw(_) => source.bytes,
    };
    report(args, ui, size, file_bytes, None)
}

/// Makes a BCoW disk.
fn write_disk(
    args: &Args,
    source: &DiskSource,
    destination: &Path,
    sending: Option<&Sending>,
    ui: &Ui,
) -> Result<(), CommandError> {
    let size = source.device.size();
    if size != source.bytes {
        ui.warning(format_args!(
            "{} has {}, which is not a multiple of the sector size ({SECTOR_BYTES} bytes): the \
             disk ends with {} of zeros",
            source.name.display(),
            plural(source.bytes, "byte"),
            plural(size - source.bytes, "byte")
        ));
    }
    let compression = match args.compress {
        Some(compress) => compress.for_blocks()?,
        // Blocks that will be overwritten soon are not compressed.
        None if args.writable => bcow::Compression::None,
        None => ConvertOptions::default().compression,
    };
    let verified = !args.no_verify;
    let source_json = json!({ "bytes": source.bytes });
    let new = NewFile::replace(destination)?;
    let mut options = RewriteOptions {
        compression,
        block_bytes: args.block_size.0,
        threads: threads(args.jobs),
        verify: verified,
        metadata: metadata(compression, args.block_size.0, Some(source_json))?,
        ..RewriteOptions::new(size)
    };
    if args.writable {
        options.form.log_bytes = WRITABLE_LOG_BYTES;
    }
    let device = &*source.device;
    let monitor = TerminalMonitor::new(ui);
    let written = write_new(device, &source.name, &new, destination, options, &monitor)?;
    new.complete()?;
    if let Some(sending) = sending {
        sending.send_file(destination, monitor.progress(), monitor.interrupt())?;
    }
    drop(monitor);
    report(
        args,
        ui,
        size,
        written.file_bytes(),
        Some((verified, args.writable)),
    )
}

/// Prints the result; of a BCoW disk also whether it was read back, and whether it is writable.
fn report(
    args: &Args,
    ui: &Ui,
    size: u64,
    file_bytes: u64,
    disk: Option<(bool, bool)>,
) -> Result<(), CommandError> {
    if args.json {
        let mut value = json!({
            "schema": "bcow.convert-disk/1",
            "size": size,
            "file_bytes": file_bytes,
        });
        if let Some((verified, writable)) = disk {
            value["sealed"] = (!writable).into();
            value["verified"] = verified.into();
        }
        return ui.print_json(&value);
    }
    let kind = match disk {
        None => "",
        Some((_, true)) => "writable ",
        Some((_, false)) => "sealed ",
    };
    let verified = matches!(disk, Some((true, _)));
    let mut out = ui.output();
    writeln!(
        out,
        "{}: {kind}disk of {} ({}), file of {}{}",
        args.destination,
        Human(size),
        plural(size, "byte"),
        Human(file_bytes),
        if verified { ", verified" } else { "" }
    )?;
    out.finish()
}
