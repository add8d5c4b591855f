//! `bcow compact`

use bcow_convert::{Compress, Encoding, compact, parse_compression};
use bcow_images::Name;
use bcow_images::args::{IMAGE, NameParser, new_file, new_path};

use crate::error::CommandError;
use crate::image::StoreArgs;
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

/// Compacts.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let output = args.output.as_ref().map(new_path).transpose()?;
    let encoding = Encoding {
        compress: args.compress,
        block_bytes: None,
        jobs: args.jobs.map(usize::from),
        verify: true,
    };
    let compacted = ui.work(|work| compact(&args.disk, output, &encoding, &args.stores, work))?;
    ui.status(format_args!(
        "{}: file of {}, was {}",
        output.unwrap_or(args.disk.shown()).display(),
        Human(compacted.file_bytes),
        Human(compacted.before_bytes)
    ));
    Ok(())
}
