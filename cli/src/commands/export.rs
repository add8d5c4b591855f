//! `bcow export`

use std::io::{BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use bcow::{BlockDevice, Mapping};
use bcow_oci::export::{ExportError, ExportOptions, TarForm, TarReport, export_tar};

use crate::error::{CommandError, Context};
use crate::image::{OpenImage, StoreArgs};
use crate::interrupt::{Interrupt, interrupted};
use crate::names;
use crate::new_file::NewFile;
use crate::size::{Count, Human};
use crate::ui::{Progress, Ui};

/// Write an image's content in another form
///
/// `tar` is an archive of the tree, in the order of names. What the archive's headers cannot hold is in
/// PAX records, as GNU tar and container engines read them; holes stay holes, sockets are left out.
///
/// `erofs` is the EROFS file system in the image, which Linux mounts (`mount -t erofs`) and fsck.erofs
/// checks. `raw` is the address space, byte by byte. Both come as a sparse file: what is zero in the
/// image takes no space.
///
/// Every block is checked on the way. The file gets its name when it is complete; a file of that name is
/// then replaced.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The image: a file, oci:DIR[:REF] or oci:DIR@sha256:DIGEST
    #[arg(value_name = "IMG", value_hint = clap::ValueHint::FilePath)]
    image: PathBuf,
    /// The form: tar, erofs or raw (oci is not supported yet)
    #[arg(long, value_name = "FORMAT", hide_possible_values = true)]
    to: Format,
    /// Where to; - is standard output
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    #[command(flatten)]
    stores: StoreArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    Erofs,
    Raw,
    Tar,
    Oci,
}

/// Read at once.
const PIECE: u64 = 4 << 20;
/// Written at once, of what comes in small pieces.
const BUFFER_BYTES: usize = 1 << 20;

/// Exports.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    match args.to {
        Format::Erofs | Format::Raw => address_space(args, ui),
        Format::Tar => archive(args, ui),
        Format::Oci => Err(CommandError::not_supported_yet("export to an OCI layout")),
    }
}

fn archive(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let image = OpenImage::open(&args.image, &args.stores)?;
    let tree = image.tree()?;
    let interrupt = Interrupt::catch();
    let options = ExportOptions {
        cancel: Some(interrupt.flag()),
        ..ExportOptions::default()
    };
    let progress = ui.progress();
    progress.phase("exporting");
    let write = |out: &mut dyn Write| {
        export_tar(tree.filesystem(), TarForm::Tree, out, &options, &progress)
    };
    if args.output == Path::new("-") {
        let mut out = ui.output();
        write(out.stream()).map_err(|error| match error {
            ExportError::Write(error) => CommandError::standard_output(&error),
            _ => export_failure(&image, &error),
        })?;
        return out.finish();
    }
    let new = NewFile::create(&args.output)?;
    let cannot = || format!("cannot write {}", args.output.display());
    let mut out = BufWriter::with_capacity(BUFFER_BYTES, new.file());
    let report = write(&mut out).map_err(|error| match error {
        ExportError::Write(error) => CommandError::new(cannot()).caused_by(&error),
        _ => export_failure(&image, &error),
    })?;
    out.flush().context(cannot)?;
    drop(out);
    progress.phase("syncing");
    new.complete()?;
    drop(progress);
    let TarReport {
        entries,
        content_bytes,
        ..
    } = report;
    ui.status(format_args!(
        "{}: {} entries exported, {} of file content",
        args.output.display(),
        Count(entries),
        Human(content_bytes)
    ));
    Ok(())
}

/// What to say when an export fails, but for its output.
fn export_failure(image: &OpenImage, error: &ExportError) -> CommandError {
    let failure = |path: &[u8], doing: &str| {
        CommandError::new(format!(
            "cannot {doing} {} in {}",
            names::quoted(path),
            image.path().display()
        ))
    };
    match error {
        ExportError::Interrupted => interrupted(),
        ExportError::Read { path, source } => failure(path, "read").caused_by(source),
        ExportError::Unrepresentable { path, problem } => {
            failure(path, "export").caused_by_text(problem)
        }
        _ => {
            CommandError::new(format!("cannot export {}", image.path().display())).caused_by(error)
        }
    }
}

fn address_space(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let image = OpenImage::open(&args.image, &args.stores)?;
    let end = match args.to {
        Format::Erofs => erofs_bytes(&image)?,
        _ => image.image().size(),
    };
    let interrupt = Interrupt::catch();
    let progress = ui.progress();
    progress.phase("exporting");
    progress.total(Some(end));
    let export = Export {
        image: &image,
        end,
        interrupt: &interrupt,
        progress: &progress,
    };
    if args.output == Path::new("-") {
        let mut out = ui.output();
        export.copy(&mut |piece| match piece {
            Piece::Data { bytes, .. } => out.write_bytes(bytes),
            Piece::Zeros { length } => write_zeros(length, &interrupt, &mut out),
        })?;
        out.finish()
    } else {
        let new = NewFile::create(&args.output)?;
        let cannot = || format!("cannot write {}", args.output.display());
        // The length first: what nobody writes to is then a hole.
        new.file().set_len(end).context(cannot)?;
        export.copy(&mut |piece| match piece {
            Piece::Data { offset, bytes } => new.file().write_all_at(bytes, offset).context(cannot),
            Piece::Zeros { .. } => Ok(()),
        })?;
        progress.phase("syncing");
        new.complete()?;
        drop(progress);
        ui.status(format_args!(
            "{}: {} exported",
            args.output.display(),
            Human(end)
        ));
        Ok(())
    }
}

/// How much of the address space the file system takes.
fn erofs_bytes(image: &OpenImage) -> Result<u64, CommandError> {
    let tree = image.tree()?;
    let superblock = tree.filesystem().superblock();
    let size = image.image().size();
    if !superblock.devices.is_empty() {
        // The superblock counts the blocks of the first device; the others lie behind it here.
        return Ok(size);
    }
    match superblock.blocks.checked_mul(superblock.block_bytes.into()) {
        Some(bytes) if bytes <= size => Ok(bytes),
        _ => Err(CommandError::new(format!(
            "cannot export {}: its EROFS superblock claims {} blocks of {} bytes, the address space has {size} bytes",
            image.path().display(),
            superblock.blocks,
            superblock.block_bytes
        ))),
    }
}

enum Piece<'a> {
    Data { offset: u64, bytes: &'a [u8] },
    Zeros { length: u64 },
}

struct Export<'a> {
    image: &'a OpenImage,
    end: u64,
    interrupt: &'a Interrupt,
    progress: &'a Progress<'a>,
}

impl Export<'_> {
    fn copy(
        &self,
        take: &mut dyn FnMut(Piece<'_>) -> Result<(), CommandError>,
    ) -> Result<(), CommandError> {
        let image = self.image.image();
        let cannot = || format!("cannot read {}", self.image.path().display());
        let mut at = 0;
        while at < self.end {
            self.interrupt.check()?;
            let extent = image.map(at).context(cannot)?;
            let length = (extent.offset + extent.length).min(self.end) - at;
            match extent.mapping {
                Mapping::Zero | Mapping::Hole => take(Piece::Zeros { length })?,
                _ => self.copy_stored(at, length, take)?,
            }
            self.progress.advance(length);
            at += length;
        }
        Ok(())
    }

    fn copy_stored(
        &self,
        start: u64,
        length: u64,
        take: &mut dyn FnMut(Piece<'_>) -> Result<(), CommandError>,
    ) -> Result<(), CommandError> {
        let mut done = 0;
        while done < length {
            let piece = PIECE.min(length - done);
            let mut offset = start + done;
            let mut taken = Ok(());
            self.image
                .image()
                .read_with(offset, piece, &mut |bytes| {
                    if taken.is_ok() {
                        taken = take(Piece::Data { offset, bytes });
                    }
                    offset += bytes.len() as u64;
                })
                .context(|| format!("cannot read {}", self.image.path().display()))?;
            taken?;
            done += piece;
        }
        Ok(())
    }
}

/// Zeros for a stream, which has no holes.
fn write_zeros(
    mut length: u64,
    interrupt: &Interrupt,
    out: &mut crate::ui::Output,
) -> Result<(), CommandError> {
    static ZEROS: [u8; 1 << 16] = [0; 1 << 16];
    while length > 0 {
        interrupt.check()?;
        let n = length.min(ZEROS.len() as u64);
        out.write_bytes(&ZEROS[..n as usize])?;
        length -= n;
    }
    Ok(())
}
