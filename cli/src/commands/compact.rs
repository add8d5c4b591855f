//! `bcow compact`

use std::path::PathBuf;

use bcow::Compression;
use bcow::operation::RewriteOptions;

use crate::conversion::{Compress, parse_compression};
use crate::disks::open_to_replace;
use crate::error::{CommandError, Context};
use crate::image::StoreArgs;
use crate::new_file::NewFile;
use crate::rewrite::{TerminalMonitor, threads, write_new};
use crate::size::Human;
use crate::ui::Ui;

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
    disk: PathBuf,
    /// Write the disk to this new file and leave FILE unchanged. If the backing is in the
    /// directory of FILE, NEW must be in that directory too
    #[arg(short, long, value_name = "NEW", value_hint = clap::ValueHint::FilePath)]
    output: Option<PathBuf>,
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

/// Compacts.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let compression = match args.compress {
        Some(compress) => compress.for_blocks()?,
        None => Compression::None,
    };
    let cannot_read = || format!("cannot read {}", args.disk.display());
    let old = open_to_replace(&args.disk, &args.stores, "compact")?;
    let mut options = RewriteOptions::compacted(&old.image, compression).context(cannot_read)?;
    options.threads = threads(args.jobs);
    let output = args.output.as_deref().unwrap_or(old.file.path());
    let new = match &args.output {
        Some(output) => NewFile::create_new(output)?,
        None => NewFile::replace(output)?,
    };
    old.file
        .pass_attributes(new.inner())
        .context(|| format!("cannot write {}", output.display()))?;
    let before = old.file.file().metadata().context(cannot_read)?;
    let written = write_new(
        &old.image,
        &args.disk,
        &new,
        output,
        options,
        &TerminalMonitor::new(ui),
    )?;
    new.complete()?;
    ui.status(format_args!(
        "{}: file of {}, was {}",
        output.display(),
        Human(written.file_bytes()),
        Human(before.len())
    ));
    Ok(())
}
