//! `bcow map`

use bcow::{Extent, Mapping, ShownBy};
use bcow_images::Name;
use bcow_images::args::{IMAGE, NameParser};
use bcow_images::extents::ChainExtents;
use bcow_images::sandbox::{self, SandboxArgs};
use serde_json::{Value, json};

use crate::error::{CommandError, Context};
use crate::image::{OpenImage, StoreArgs};
use crate::names::printable;
use crate::size;
use crate::ui::{Output, Ui};

/// Show where the address space of an image is stored
///
/// The command prints one line per stored block, and one line per run of adjacent zeros, holes, or
/// windows onto one layer. The columns are the first byte in the address space (LBA), the length,
/// and the kind; for a stored block also its first byte in the file (UBA) and its size in the file.
/// For a window, a fragment or a backing, the last columns are the index of the referenced file,
/// counted from 0 as in `bcow inspect`, and the first byte in the address space of that file.
///
/// Kinds: `raw` (stored uncompressed), `zstd` (stored compressed), `zero` (zeros), `hole` (never
/// written; reads as zeros), `window` (a range of another file), `fragment` (some bytes of another
/// file, followed by zeros), `backing` (the same range of the backing), `open` (stored
/// uncompressed, and overwritten in place).
///
/// For a disk with a backing, each line ends with the file of the chain that has the data: its
/// position (0 is the disk) and its name.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The image or disk: a file, oci:DIR[:REF], oci:DIR@sha256:DIGEST, https://..., s3://... or
    /// docker://...
    #[arg(value_name = "IMG", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(IMAGE))]
    image: Name,
    /// First byte of the address space to show [default: 0]
    #[arg(
        long,
        value_name = "SIZE",
        value_parser = size::parse,
        default_value = "0",
        hide_default_value = true
    )]
    start: u64,
    /// Number of bytes of the address space to show [default: all]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    length: Option<u64>,
    /// Number of files of a disk's chain to follow; 1 is the disk alone [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    depth: Option<u32>,
    /// Print JSON (schema bcow.map/1)
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    stores: StoreArgs,
    #[command(flatten)]
    sandbox: SandboxArgs,
}

/// Prints the map.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let sandbox = args.sandbox.begin([&args.image], &args.stores)?;
    let image = OpenImage::open_without_content(&args.image, &[], &args.stores, ui)?;
    sandbox::close(sandbox, &args.stores)?;
    let size = image.image().header().size;
    if args.start > size {
        return Err(CommandError::usage(format!(
            "--start {} lies behind the end of the address space ({size} bytes)",
            args.start
        )));
    }
    let end = match args.length {
        Some(length) => args.start.saturating_add(length).min(size),
        None => size,
    };
    let below = image.chain().iter();
    let chain = std::iter::once(image.path().display().to_string());
    let chain = chain.chain(below.clone().map(|file| file.name.clone()));
    let files = std::iter::once(image.image().clone()).chain(below.map(|file| file.image.clone()));
    let depth = args.depth.map_or(usize::MAX, |depth| depth as usize);
    let backings = image.image().backings();
    let names = Names {
        chain: chain.collect(),
        backings: backings.map(|backing| backing.name.to_string()).collect(),
    };
    let mut out = ui.output();
    if args.json {
        out.open_document(&json!({ "schema": "bcow.map/1", "size": size }))?;
        out.open_list("extents")?;
    } else {
        let file = if names.has_chain() { "  FILE" } else { "" };
        writeln!(
            out,
            "{:>16} {:>12} {:<8} {:>16} {:>12}{file}",
            "LBA", "LENGTH", "KIND", "UBA", "STORED"
        )?;
    }
    for extent in ChainExtents::new(files.take(depth).collect(), args.start..end) {
        let cannot = || format!("cannot read the map of {}", image.path().display());
        let (file, extent) = extent.context(cannot)?;
        if args.json {
            out.item(&names.json(file, &extent))?;
        } else {
            names.print(file, &extent, &mut out)?;
        }
    }
    if args.json {
        out.close_list()?;
        out.close_document()?;
    }
    out.finish()
}

/// The names of the files that extents refer to.
struct Names {
    /// The disk and the files below it.
    chain: Vec<String>,
    /// By index.
    backings: Vec<String>,
}

impl Names {
    fn has_chain(&self) -> bool {
        self.chain.len() > 1
    }

    /// For a disk with a backing: the file of the chain that has the data.
    fn of_file(&self, file: usize) -> Option<&String> {
        self.chain.get(file).filter(|_| self.has_chain())
    }

    /// An extent of a file of the chain.
    fn json(&self, file: usize, extent: &Extent) -> Value {
        let mut row = json!({
            "offset": extent.offset,
            "length": extent.length,
            "kind": kind(&extent.mapping),
        });
        if let Some(name) = self.of_file(file) {
            row["file"] = json!(file);
            row["file_name"] = json!(name);
        }
        match extent.mapping {
            Mapping::Raw { stored } | Mapping::Compressed { stored } | Mapping::Open { stored } => {
                row["uba"] = json!(stored.at.0);
                row["stored_bytes"] = json!(stored.bytes);
                if !matches!(extent.mapping, Mapping::Open { .. }) {
                    row["crc32c"] = json!(format!("{:08x}", stored.crc));
                }
            }
            Mapping::Backing {
                index,
                offset,
                bytes,
                ..
            } => {
                row["backing"] = json!(index);
                row["backing_name"] = json!(self.backings.get(index as usize));
                row["backing_offset"] = json!(offset);
                row["backing_bytes"] = json!(bytes);
            }
            Mapping::Zero | Mapping::Hole => {}
        }
        row
    }

    fn print(&self, file: usize, extent: &Extent, out: &mut Output) -> Result<(), CommandError> {
        let dash = || "-".to_owned();
        let (at, bytes) = match extent.mapping {
            Mapping::Raw { stored } | Mapping::Compressed { stored } | Mapping::Open { stored } => {
                (stored.at.0.to_string(), stored.bytes.to_string())
            }
            Mapping::Backing { index, offset, .. } => (format!("{index}:{offset}"), dash()),
            Mapping::Zero | Mapping::Hole => (dash(), dash()),
        };
        let (offset, length, kind) = (extent.offset, extent.length, kind(&extent.mapping));
        write!(
            out,
            "{offset:>16} {length:>12} {kind:<8} {at:>16} {bytes:>12}"
        )?;
        match self.of_file(file) {
            Some(name) => writeln!(out, "  {file} {}", printable(name)),
            None => writeln!(out),
        }
    }
}

fn kind(mapping: &Mapping) -> &'static str {
    match mapping {
        Mapping::Raw { .. } => "raw",
        Mapping::Compressed { .. } => "zstd",
        Mapping::Open { .. } => "open",
        Mapping::Zero => "zero",
        Mapping::Hole => "hole",
        Mapping::Backing { by, .. } => match by {
            ShownBy::Absent => "backing",
            ShownBy::Window => "window",
            ShownBy::Fragment => "fragment",
        },
    }
}
