//! `bcow seal`, and `bcow commit` into a new layer.

use std::path::{Path, PathBuf};

use bcow::format::Use;
use bcow::{Compression, DiskForm, Image, Keep, OpenOptions};

use super::convert::{BlockSize, Compress, block_size, compression};
use crate::disks::{Below, open_to_replace};
use crate::error::{CommandError, Context};
use crate::image::{OpenImage, StoreArgs};
use crate::new_file::NewFile;
use crate::rewrite::{Rewrite, backing_of, inherit, metadata};
use crate::size::{Count, Human};
use crate::ui::Ui;

/// Make a disk immutable
///
/// A sealed disk has compressed blocks, a checksum for every block, and a hash tree over the whole
/// file. It has no record log and never changes. It keeps its backing and stores only the disk's
/// own data; with --flatten, it stores all data in one file.
///
/// Without -o, the sealed disk replaces the disk after it is complete and verified.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The disk
    #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    disk: PathBuf,
    /// Write the sealed disk to this new file and leave FILE unchanged
    #[arg(short, long, value_name = "NEW", value_hint = clap::ValueHint::FilePath)]
    output: Option<PathBuf>,
    /// Also store the data of the backings; the sealed disk then needs no other file
    #[arg(long)]
    flatten: bool,
    #[command(flatten)]
    how: How,
    #[command(flatten)]
    stores: StoreArgs,
}

/// How a sealed disk is written.
#[derive(Debug, clap::Args)]
pub struct How {
    /// Compression of blocks: zstd[:LEVEL] or none [default: zstd:3]
    #[arg(long, value_name = "HOW", value_parser = compression)]
    compress: Option<Compress>,
    /// Block size: auto, or a power of two from 4K to 4M
    #[arg(long, value_name = "SIZE", default_value = "auto", value_parser = block_size)]
    block_size: BlockSize,
    /// Threads that compress [default: one for each CPU]; the output does not depend on N
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    jobs: Option<u16>,
    /// Skip the read-back of the sealed disk before it gets its name
    #[arg(long)]
    no_verify: bool,
}

impl How {
    /// How blocks are stored.
    pub fn compression(&self) -> Result<Compression, CommandError> {
        match self.compress {
            Some(compress) => compress.of_blocks(),
            None => Ok(Compression::Zstd { level: 3 }),
        }
    }

    /// Block size in bytes, if it was chosen.
    pub fn block_bytes(&self) -> Option<u32> {
        self.block_size.0
    }

    /// Threads, if their number was chosen.
    pub fn jobs(&self) -> Option<usize> {
        self.jobs.map(usize::from)
    }

    /// Whether what was written is read back.
    pub fn verify(&self) -> bool {
        !self.no_verify
    }
}

/// Seals.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let keep = match args.flatten {
        true => Keep::All,
        false => Keep::Own,
    };
    if let Some(output) = &args.output {
        return seal_into(&args.disk, output, keep, &args.how, &args.stores, ui);
    }
    // The file does not change, but the lock keeps writers away until the new file has replaced it.
    let old = open_to_replace(&args.disk, &args.stores, "seal")?;
    let new = NewFile::create(&old.path)?;
    inherit(&new, &old.file).context(|| format!("cannot write {}", args.disk.display()))?;
    seal(&old.image, &args.disk, new, &args.disk, keep, &args.how, ui)
}

/// Writes what the disk `name` has, or shows, into a new sealed file.
pub fn seal_into(
    name: &Path,
    output: &Path,
    keep: Keep,
    how: &How,
    stores: &StoreArgs,
    ui: &Ui,
) -> Result<(), CommandError> {
    let opened = OpenImage::open(name, stores)?;
    let image = opened.image();
    if image.header().purpose != Use::Disk {
        return Err(CommandError::new(format!("cannot seal {}", name.display()))
            .caused_by_text("it is no disk; images are sealed as they are made"));
    }
    let new = NewFile::create_new(output)?;
    if let (Keep::Own, Some(entry)) = (keep, backing_of(image)) {
        let below = Below::new(stores, &OpenOptions::default())?;
        let found = below.opener(output).open(&entry);
        found.map_err(|problem| {
            CommandError::new(format!("cannot write {}", output.display()))
                .caused_by_text(format!("it would not find its backing: {problem}"))
                .hint("write it beside the backing, or store everything in it (`bcow seal --flatten`)")
        })?;
    }
    seal(image, name, new, output, keep, how, ui)
}

fn seal(
    image: &Image,
    name: &Path,
    new: NewFile,
    output: &Path,
    keep: Keep,
    how: &How,
    ui: &Ui,
) -> Result<(), CommandError> {
    let compression = how.compression()?;
    let backing = match keep {
        Keep::All => None,
        Keep::Own => backing_of(image),
    };
    let over = backing
        .as_ref()
        .map_or(String::new(), |entry| format!(" over {}", entry.name));
    let block_bytes = how.block_size.0;
    let size = image.header().size;
    let written = Rewrite {
        device: image,
        name,
        keep,
        form: DiskForm {
            size,
            backing,
            ..DiskForm::default()
        },
        compression,
        block_bytes,
        jobs: how.jobs,
        verify: !how.no_verify,
        metadata: metadata(compression, block_bytes, None)?,
    }
    .write(&new, output, ui)?;
    new.complete()?;
    ui.status(format_args!(
        "{}: sealed disk of {} ({} bytes){over}, file of {}",
        output.display(),
        Human(size),
        Count(size),
        Human(written.file_bytes())
    ));
    Ok(())
}
