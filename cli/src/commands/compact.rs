//! `bcow compact`

use std::path::PathBuf;

use bcow::{Compression, DiskForm, Keep, Layout};
use serde_json::Value;

use super::convert::{Compress, compression};
use crate::disks::open_to_replace;
use crate::error::{CommandError, Context};
use crate::image::StoreArgs;
use crate::new_file::NewFile;
use crate::rewrite::{LOG_BYTES, Rewrite, backing_of, inherit};
use crate::size::Human;
use crate::ui::Ui;

/// Blocks that large writes make, in the auto layout.
const LARGE_BLOCK_BYTES: u32 = 64 << 10;
const SMALL_BLOCK_BYTES: u32 = 4 << 10;

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
    /// Write the disk to this new file and leave FILE unchanged. If FILE finds its backing in its
    /// own directory, NEW must be in that directory too
    #[arg(short, long, value_name = "NEW", value_hint = clap::ValueHint::FilePath)]
    output: Option<PathBuf>,
    /// Compress the stored blocks: zstd[:LEVEL]; later writes are not compressed
    #[arg(long, value_name = "HOW", value_parser = compression)]
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
        Some(compress) => compress.of_blocks()?,
        None => Compression::None,
    };
    let shown = args.disk.display();
    let old = open_to_replace(&args.disk, &args.stores, "compact")?;
    let (image, file, path) = (&old.image, &old.file, &old.path);
    let header = image.header();
    let metadata = image
        .metadata()
        .context(|| format!("cannot read {shown}"))?;
    let output = args.output.as_deref().unwrap_or(path);
    let new = match &args.output {
        Some(output) => NewFile::create_new(output)?,
        None => NewFile::create(path)?,
    };
    inherit(&new, file).context(|| format!("cannot write {}", output.display()))?;
    let before = file.metadata().context(|| format!("cannot read {shown}"))?;
    let written = Rewrite {
        device: &**image,
        name: &args.disk,
        keep: Keep::Own,
        form: DiskForm {
            size: header.size,
            backing: backing_of(image),
            region_shift: Some(header.region_shift),
            log_bytes: LOG_BYTES,
        },
        compression,
        block_bytes: largest_block(&metadata, header.region_shift, compression),
        jobs: args.jobs,
        verify: true,
        metadata,
    }
    .write(&new, output, ui)?;
    new.complete()?;
    ui.status(format_args!(
        "{}: file of {}, was {}",
        output.display(),
        Human(written.file_bytes()),
        Human(before.len())
    ));
    Ok(())
}

/// Blocks as the disk's layout would make them; larger ones where they are to be compressed.
fn largest_block(metadata: &Value, region_shift: u8, compression: Compression) -> Option<u32> {
    let options = &metadata["options"];
    let layout = options["layout"].as_str().and_then(Layout::from_name);
    let chosen = options["block_size"]
        .as_u64()
        .and_then(|bytes| u32::try_from(bytes).ok())
        .filter(|bytes| bytes.is_power_of_two() && (4096..=1 << 24).contains(bytes));
    let region = 1u64 << region_shift;
    let bytes = match (layout, compression) {
        (Some(Layout::Performance), _) if region_shift <= 24 => region as u32,
        (_, Compression::Zstd { .. }) => return None,
        (Some(Layout::Space), _) => SMALL_BLOCK_BYTES,
        _ => chosen.unwrap_or(LARGE_BLOCK_BYTES),
    };
    Some(u64::from(bytes).min(region) as u32)
}
