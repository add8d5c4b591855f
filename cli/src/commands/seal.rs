//! `bcow seal`, and `bcow commit` into a new layer.

use std::path::Path;

use bcow::format::Use;
use bcow::operation::RewriteOptions;
use bcow::{BlockDevice, Compression, Image, Keep};
use bcow_images::Name;

use super::create::new_path;
use crate::conversion::{BlockSize, Compress, parse_block_size, parse_compression};
use crate::disks::{open_to_replace, require_backing_beside};
use crate::error::{CommandError, Context};
use crate::image::{OpenImage, StoreArgs};
use crate::new_file::NewFile;
use crate::rewrite::{TerminalMonitor, metadata, threads, write_new};
use crate::size::{Human, plural};
use crate::ui::Ui;
use bcow_images::args::{IMAGE, NameParser, new_file};

/// Make a disk immutable
///
/// A sealed disk has compressed blocks, a checksum for every block, and a Merkle tree over the
/// whole file. It has no record log and never changes. It keeps its backing and stores only the
/// disk's own data; with --flatten, it stores all data in one file.
///
/// Without -o, the sealed disk replaces the disk after it is complete and verified.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The disk
    #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(IMAGE))]
    disk: Name,
    /// Write the sealed disk to this new file and leave FILE unchanged
    #[arg(short, long, value_name = "NEW", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(new_file("seal")))]
    output: Option<Name>,
    /// Also store the data of the backings; the sealed disk then needs no other file
    #[arg(long)]
    flatten: bool,
    #[command(flatten)]
    seal: SealArgs,
    #[command(flatten)]
    stores: StoreArgs,
}

/// The form of a sealed disk.
#[derive(Debug, clap::Args)]
pub struct SealArgs {
    /// Compression of blocks: zstd[:LEVEL] or none [default: zstd:3]
    #[arg(long, value_name = "HOW", value_parser = parse_compression)]
    compress: Option<Compress>,
    /// Block size: auto, or a power of two from 4K to 4M [default: auto]
    #[arg(long, value_name = "SIZE", value_parser = parse_block_size)]
    block_size: Option<BlockSize>,
    /// Threads that compress [default: one for each CPU]; the output does not depend on N
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    jobs: Option<u16>,
    /// Do not read back and verify the new file before it gets its name
    #[arg(long)]
    no_verify: bool,
}

impl SealArgs {
    /// Compression of blocks.
    pub fn compression(&self) -> Result<Compression, CommandError> {
        match self.compress {
            Some(compress) => compress.for_blocks(),
            None => Ok(Compression::Zstd { level: 3 }),
        }
    }

    /// Block size in bytes, if the user chose one.
    pub fn block_bytes(&self) -> Option<u32> {
        self.block_size.and_then(|size| size.0)
    }

    /// Number of threads, if the user chose one.
    pub fn jobs(&self) -> Option<usize> {
        self.jobs.map(usize::from)
    }

    /// One of the options that was given and is for a new BCoW file only.
    pub fn for_file(&self) -> Option<&'static str> {
        let given = [
            (self.compress.is_some(), "--compress"),
            (self.block_size.is_some(), "--block-size"),
            (self.no_verify, "--no-verify"),
        ];
        given.into_iter().find(|(is, _)| *is).map(|(_, name)| name)
    }

    /// Whether the new file is read back.
    pub fn verify(&self) -> bool {
        !self.no_verify
    }
}

/// Seals.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let keep = if args.flatten { Keep::All } else { Keep::Own };
    if let Some(output) = &args.output {
        return seal_into(
            &args.disk,
            new_path(output)?,
            keep,
            &args.seal,
            &args.stores,
            ui,
        );
    }
    // The file does not change, but the lock keeps writers away until the new file has replaced it.
    let old = open_to_replace(&args.disk, &args.stores, "seal")?;
    let new = NewFile::replace(old.file.path())?;
    new.inner()
        .take_attributes(old.file.file())
        .context(|| format!("cannot write {}", args.disk.display()))?;
    let (name, image) = (args.disk.shown(), &old.image);
    seal(image, name, new, name, keep, &args.seal, ui)
}

/// Writes the own or the visible content of the disk `name` into a new sealed file.
pub fn seal_into(
    name: &Name,
    output: &Path,
    keep: Keep,
    args: &SealArgs,
    stores: &StoreArgs,
    ui: &Ui,
) -> Result<(), CommandError> {
    let opened = OpenImage::open(name, stores)?;
    let image = opened.image();
    if image.header().purpose != Use::Disk {
        return Err(
            CommandError::new(format!("cannot write {}", output.display()))
                .caused_by_text(format!("{} is not a disk", name.display()))
                .hint("an image is sealed already: `bcow copy` copies it"),
        );
    }
    let new = NewFile::create_new(output)?;
    if keep == Keep::Own {
        require_backing_beside(image, output, stores)?;
    }
    seal(image, name.shown(), new, output, keep, args, ui)
}

fn seal(
    image: &Image,
    name: &Path,
    new: NewFile,
    output: &Path,
    keep: Keep,
    args: &SealArgs,
    ui: &Ui,
) -> Result<(), CommandError> {
    let compression = args.compression()?;
    let block_bytes = args.block_bytes();
    let options = RewriteOptions {
        compression,
        block_bytes,
        threads: threads(args.jobs),
        verify: args.verify(),
        metadata: metadata(compression, block_bytes, None)?,
        ..RewriteOptions::sealed(image, keep)
    };
    let over = match &options.form.backing {
        Some(entry) => format!(" over {}", entry.name),
        None => String::new(),
    };
    let size = options.form.size;
    let written = write_new(
        image,
        name,
        &new,
        output,
        options,
        &TerminalMonitor::new(ui),
    )
    .map_err(|error| {
        if keep == Keep::Own && image.has_windows() {
            error.hint("`bcow seal --flatten` stores all content in one file")
        } else {
            error
        }
    })?;
    new.complete()?;
    ui.status(format_args!(
        "{}: sealed disk of {} ({}){over}, file of {}",
        output.display(),
        Human(size),
        plural(size, "byte"),
        Human(written.file_bytes())
    ));
    Ok(())
}
