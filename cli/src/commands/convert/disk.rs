//! Disks in other forms: raw and qcow2, into BCoW and out of it.

use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use bcow::BlockDevice;
use bcow::format::{SECTOR_BYTES, State, Use};
use bcow::operation::{RewriteOptions, WRITABLE_LOG_BYTES};
use bcow_foreign::{ClusterCompression, ForeignError, Qcow2Disk, RawDisk};
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
use crate::place::{self, Destination};
use crate::replace::{self, Replacement};
use crate::rewrite::{TerminalMonitor, metadata, threads, write_new};
use crate::size::{Human, plural};
use crate::ui::Ui;

/// A file in another form than BCoW, as the user names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Foreign<'a> {
    Raw(&'a Path),
    Qcow2(&'a Path),
}

impl<'a> Foreign<'a> {
    fn of_source(source: &'a place::Source) -> Option<Self> {
        match source {
            place::Source::Raw(path) => Some(Foreign::Raw(path)),
            place::Source::Qcow2(path) => Some(Foreign::Qcow2(path)),
            _ => None,
        }
    }

    fn of_destination(destination: &'a Destination) -> Option<Self> {
        match destination {
            Destination::Raw(path) => Some(Foreign::Raw(path)),
            Destination::Qcow2(path) => Some(Foreign::Qcow2(path)),
            _ => None,
        }
    }

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

    /// Refuses names that no file can have.
    fn check(&self, side: Side) -> Result<(), CommandError> {
        let path = self.path().as_os_str();
        if path.is_empty() {
            return Err(CommandError::usage(format!(
                "missing file name after {}:",
                self.transport()
            )));
        }
        if path == "-" {
            let error = CommandError::usage(format!("{}:- is not a file", self.transport()));
            return Err(error.hint(match side {
                Side::Source => "a disk is read at any offset: store it in a file first",
                Side::Destination => {
                    "a disk is written at any offset; `bcow export --to raw -o -` writes to \
                     standard output"
                }
            }));
        }
        Ok(())
    }
}

/// The side of a conversion that a name is for.
#[derive(Clone, Copy)]
enum Side {
    Source,
    Destination,
}

/// Whether the command line converts a disk, not a container image. `image` is the source, if it is
/// a BCoW file.
pub fn is_disk_conversion(
    source: &place::Source,
    destination: &Destination,
    image: Option<&OpenImage>,
) -> bool {
    Foreign::of_source(source).is_some()
        || Foreign::of_destination(destination).is_some()
        || image.is_some_and(|image| image.image().header().purpose != Use::Image)
}

/// Converts a disk.
pub fn run(
    args: &Args,
    from: &place::Source,
    destination: &Destination,
    image: Option<OpenImage>,
    sending: Option<&Sending>,
    ui: &Ui,
) -> Result<(), CommandError> {
    refuse_options_of_images(args)?;
    let source = open_source(args, from, image)?;
    match Foreign::of_destination(destination) {
        Some(foreign) => {
            foreign.check(Side::Destination)?;
            source.refuse_as_destination(foreign.path())?;
            let _replaced = replace::check(foreign.path(), Replacement::Disk, args.force)?;
            write_foreign(args, &source, foreign, ui)
        }
        None => {
            let destination = match destination {
                Destination::File(path) => path,
                _ => {
                    let shown = args.destination.display();
                    return Err(
                        CommandError::usage(format!("{shown} takes images, not disks"))
                            .hint("write to a file"),
                    );
                }
            };
            source.refuse_as_destination(destination)?;
            let _replaced = replace::check(destination, Replacement::Disk, args.force)?;
            write_disk(args, &source, destination, sending, ui)
        }
    }
}

fn refuse_options_of_images(args: &Args) -> Result<(), CommandError> {
    let given = [
        (args.platform.is_some(), "--platform"),
        (args.plain, "--plain"),
        (args.cache.is_some(), "--cache"),
        (args.dedup_lower, "--dedup-lower"),
        (args.layers, "--layers"),
        (args.allow_truncated, "--allow-truncated"),
        (args.as_files, "--as-files"),
    ];
    match given.iter().find(|(is_given, _)| *is_given) {
        Some((_, option)) => Err(CommandError::usage(format!(
            "{option} is for container images, not for disks"
        ))),
        None => Ok(()),
    }
}

/// The disk to convert.
struct Source {
    device: Box<dyn BlockDevice>,
    name: PathBuf,
    /// Length in bytes of the disk; the device continues with zeros up to the next sector.
    bytes: u64,
    /// All files of the disk and its backings.
    files: Vec<PathBuf>,
}

fn open_source(
    args: &Args,
    from: &place::Source,
    image: Option<OpenImage>,
) -> Result<Source, CommandError> {
    let name = PathBuf::from(&args.source);
    let foreign = Foreign::of_source(from);
    if let Some(foreign) = &foreign {
        foreign.check(Side::Source)?;
    }
    match foreign {
        Some(Foreign::Raw(path)) => {
            let disk = RawDisk::open(path).map_err(|error| foreign_failure(&error))?;
            Ok(Source {
                name,
                bytes: disk.bytes(),
                files: vec![path.to_owned()],
                device: Box::new(disk),
            })
        }
        Some(Foreign::Qcow2(path)) => {
            let disk = Qcow2Disk::open(path, args.stores.backing_dirs()?)
                .map_err(|error| foreign_failure(&error))?;
            Ok(Source {
                name,
                bytes: disk.bytes(),
                files: disk.files().to_vec(),
                device: Box::new(disk),
            })
        }
        None => {
            let image = match image {
                Some(image) => image,
                None => {
                    refuse_files(&args.source, &args.destination)?;
                    OpenImage::open(&name, &args.stores)?
                }
            };
            Ok(Source {
                bytes: true_size(&image)?,
                files: image.files(),
                device: Box::new(image.image().clone()),
                name,
            })
        }
    }
}

/// Refuses a source of files, of which no disk can be made. `oci:DIR` may have a BCoW image, and a
/// file of any name may be one.
fn refuse_files(source: &OsStr, destination: &Path) -> Result<(), CommandError> {
    use bcow_oci::Source;
    let Some(Ok(files)) = source.to_str().map(str::parse::<Source>) else {
        return Ok(());
    };
    if matches!(files, Source::Oci { .. }) || Path::new(source).exists() {
        return Ok(());
    }
    let kind = match files {
        Source::Directory(_) => "a directory",
        Source::Tar(_) => "a tar archive",
        _ => "a container image",
    };
    Err(no_disk(&source.to_string_lossy(), kind, destination))
}

/// The error for a source of which no disk can be made.
pub fn no_disk(shown: &str, kind: &str, destination: &Path) -> CommandError {
    CommandError::usage(format!(
        "{} can be made only from a disk, and {shown} is {kind}",
        destination.display()
    ))
    .hint(format!(
        "`bcow convert {shown} IMAGE.bcow` makes an image of it first"
    ))
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

impl Source {
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
    source: &Source,
    destination: Foreign<'_>,
    ui: &Ui,
) -> Result<(), CommandError> {
    let usage = |what: &str| {
        Err(CommandError::usage(format!(
            "{what} is for disks in BCoW form, not for {}",
            destination.transport()
        )))
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
    report(args, ui, &args.destination, size, file_bytes, None)
}

/// Makes a BCoW disk.
fn write_disk(
    args: &Args,
    source: &Source,
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
        &args.destination,
        size,
        written.file_bytes(),
        Some((verified, args.writable)),
    )
}

/// Prints the result; of a BCoW disk also whether it was read back, and whether it is writable.
fn report(
    args: &Args,
    ui: &Ui,
    destination: &Path,
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
        destination.display(),
        Human(size),
        plural(size, "byte"),
        Human(file_bytes),
        if verified { ", verified" } else { "" }
    )?;
    out.finish()
}
