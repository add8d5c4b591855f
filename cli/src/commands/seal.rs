//! `bcow seal`

use bcow::Keep;
use bcow_convert::{seal_in_place, seal_into};
use bcow_images::Name;
use bcow_images::args::{IMAGE, NameParser, new_file, new_path};

use crate::error::CommandError;
use crate::image::StoreArgs;
use crate::sealing::{SealArgs, show_sealed};
use crate::ui::Ui;

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

/// Seals.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let keep = if args.flatten { Keep::All } else { Keep::Own };
    let (disk, encoding, stores) = (&args.disk, args.seal.encoding(), &args.stores);
    let (path, sealed) = match &args.output {
        Some(output) => {
            let path = new_path(output)?;
            let sealed = ui.work(|work| seal_into(disk, path, keep, &encoding, stores, work));
            (path, sealed?)
        }
        None => {
            let sealed = ui.work(|work| seal_in_place(disk, keep, &encoding, stores, work));
            (disk.shown(), sealed?)
        }
    };
    show_sealed(path, &sealed, ui);
    Ok(())
}
