//! `bcow compact`

use std::fs::File;
use std::path::Path;

use bcow::format::{State, Use};
use bcow::operation::RewriteOptions;
use bcow::{Compression, Image};
use bcow_images::Name;

use super::create::new_path;
use crate::conversion::{Compress, parse_compression};
use crate::disks::{open_to_replace, require_backing_beside};
use crate::error::{CommandError, Context};
use crate::image::{OpenImage, StoreArgs};
use crate::new_file::NewFile;
use crate::rewrite::{TerminalMonitor, threads, write_new};
use crate::size::Human;
use crate::ui::Ui;
use bcow_images::args::{IMAGE, NameParser, new_file};

/// Rewrite a disk without its unused space
///
/// The command writes the disk to a new file, verifies that file, and (without -o) replaces the old
/// file with it. The disk stays writable; its content, size, layout and backing do not change.
///
/// Other disks that have the replaced disk as their backing do not open afterwards, because their
/// backing is a different file. `bcow rebase --unsafe` records the new file as their backing.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The disk
    #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(IMAGE))]
    disk: Name,
    /// Write the disk to this new file and leave FILE unchanged. If the backing is in the
    /// directory of FILE, NEW must be in that directory too
    #[arg(short, long, value_name = "NEW", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(new_file("compact")))]
    output: Option<Name>,
    /// Compress the stored blocks: zstd[:LEVEL]; later writes are not compressed [default: no
    /// compression]
    #[arg(long, value_name = "HOW", value_parser = parse_compression)]
    compress: Option<Compress>,
    /// Threads that compress [default: one for each CPU]; the output does not depend on N
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    jobs: Option<u16>,
    #[command(flatten)]
    stores: StoreArgs,
}

impl Args {
    fn cannot_read(&self) -> String {
        format!("cannot read {}", self.disk.display())
    }
}

/// Compacts.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let Some(output) = &args.output else {
        let old = open_to_replace(&args.disk, &args.stores, "compact")?;
        let path = old.file.path();
        let new = NewFile::replace(path)?;
        return write(args, &old.image, old.file.file(), new, path, ui);
    };
    let output = new_path(output)?;
    let opened = OpenImage::open(&args.disk, &args.stores)?;
    let header = opened.image().header();
    if (header.purpose, header.state) != (Use::Disk, State::Writable) {
        return Err(
            CommandError::new(format!("cannot compact {}", args.disk.display()))
                .caused_by_text("it is not a writable disk")
                .hint("a sealed file has no unused space"),
        );
    }
    let path = opened.files().remove(0);
    let file = File::open(path).context(|| args.cannot_read())?;
    let new = NewFile::create_new(output)?;
    require_backing_beside(opened.image(), output, &args.stores)?;
    write(args, opened.image(), &file, new, output, ui)
}

/// Writes the disk `image`, which is in `file`, into a new file, which becomes `output`.
fn write(
    args: &Args,
    image: &Image,
    file: &File,
    new: NewFile,
    output: &Path,
    ui: &Ui,
) -> Result<(), CommandError> {
    let compression = match args.compress {
        Some(compress) => compress.for_blocks()?,
        None => Compression::None,
    };
    let cannot_read = || args.cannot_read();
    let mut options = RewriteOptions::compacted(image, compression).context(cannot_read)?;
    options.threads = threads(args.jobs);
    new.inner()
        .take_attributes(file)
        .context(|| format!("cannot write {}", output.display()))?;
    let before = file.metadata().context(cannot_read)?;
    let monitor = TerminalMonitor::new(ui);
    let written = write_new(image, args.disk.shown(), &new, output, options, &monitor)?;
    drop(monitor);
    new.complete()?;
    ui.status(format_args!(
        "{}: file of {}, was {}",
        output.display(),
        Human(written.file_bytes()),
        Human(before.len())
    ));
    Ok(())
}
