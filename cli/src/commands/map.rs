//! `bcow map`

use std::ops::Range;
use std::sync::Arc;

use bcow::{BlockDevice, Extent, FileIdentity, Image, Mapping, ShownBy};
use serde_json::{Value, json};

use crate::error::{CommandError, Context};
use crate::image::{LayerArgs, OpenImage, StoreArgs};
use crate::names::printable;
use crate::size;
use crate::ui::{Output, Ui};
use bcow_images::Name;
use bcow_images::args::{IMAGE, NameParser};

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
}

/// Prints the map.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let image =
        OpenImage::open_without_content(&args.image, &LayerArgs::default(), &args.stores, ui)?;
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

    let names: Vec<String> = image
        .image()
        .backings()
        .map(|backing| backing.name.to_string())
        .collect();
    let chain = Chain::of(&image, args.depth);
    let mut map = Map {
        json: args.json,
        chain: chain.names(&image),
        names,
        out: ui.output(),
        first: true,
    };
    map.begin(size)?;
    let mut pending: Option<(usize, Extent)> = None;
    let mut at = args.start;
    while at < end {
        let (file, extent) = chain
            .map(&image, at)
            .context(|| format!("cannot read the map of {}", image.path().display()))?;
        at = extent.offset.saturating_add(extent.length);
        if let Some((run_file, run)) = &mut pending
            && *run_file == file
            && (join(run, &extent) || (file > 0 && join_block(run, &extent)))
        {
            continue;
        }
        if let Some((file, run)) = pending.replace((file, extent)) {
            map.extent(file, &run)?;
        }
    }
    if let Some((file, run)) = pending {
        map.extent(file, &run)?;
    }
    map.end()
}

/// The files of a disk, each below the one before.
struct Chain(Vec<Arc<Image>>);

impl Chain {
    fn of(image: &OpenImage, depth: Option<u32>) -> Self {
        let below = image.chain().iter().map(|file| file.image.clone());
        let files = std::iter::once(image.image().clone()).chain(below);
        Chain(
            files
                .take(depth.map_or(usize::MAX, |n| n as usize))
                .collect(),
        )
    }

    /// Names of the files; empty if there is only one file.
    fn names(&self, image: &OpenImage) -> Vec<String> {
        if image.chain().is_empty() {
            return Vec::new();
        }
        let below = image.chain().iter().map(|file| file.name.clone());
        std::iter::once(image.path().display().to_string())
            .chain(below)
            .collect()
    }

    /// The extent of `at`, in the file that has it: its place in the chain.
    fn map(&self, image: &OpenImage, at: u64) -> Result<(usize, Extent), bcow::Error> {
        let mut file = 0;
        let mut extent = image.image().map(at)?;
        // Below an absent entry, the file has the same bytes at the same address.
        while let Mapping::Backing {
            by: ShownBy::Absent,
            offset,
            bytes,
            ..
        } = extent.mapping
            && offset == extent.offset
            && bytes == extent.length
            && let Some(below) = self.0.get(file + 1)
            && identity_below(&self.0[file]) == below.identity()
        {
            file += 1;
            let end = extent.offset + extent.length;
            if at >= below.size() {
                extent = Extent {
                    offset: extent.offset.max(below.size()),
                    length: end - extent.offset.max(below.size()),
                    mapping: Mapping::Hole,
                };
                continue;
            }
            extent = cut(below.map(at)?, extent.offset..end);
        }
        Ok((file, extent))
    }
}

fn identity_below(image: &Image) -> Option<FileIdentity> {
    image.backing(0).and_then(|below| below.identity())
}

/// The part of an extent within `range`. A stored block keeps its full UBA and size.
fn cut(extent: Extent, range: Range<u64>) -> Extent {
    let offset = extent.offset.max(range.start);
    let length = (extent.offset + extent.length).min(range.end) - offset;
    let mapping = match extent.mapping {
        Mapping::Backing {
            by,
            index,
            offset: from,
            bytes,
        } => {
            let skip = offset - extent.offset;
            Mapping::Backing {
                by,
                index,
                offset: from + skip,
                bytes: bytes.saturating_sub(skip).min(length),
            }
        }
        mapping => mapping,
    };
    Extent {
        offset,
        length,
        mapping,
    }
}

/// Extends the run by `next` if both have one mapping. Zeros, holes and windows are not stored in
/// blocks, so they are shown as one range.
fn join(run: &mut Extent, next: &Extent) -> bool {
    match (&mut run.mapping, next.mapping) {
        (Mapping::Zero, Mapping::Zero) | (Mapping::Hole, Mapping::Hole) => {}
        (
            Mapping::Backing {
                by,
                index,
                offset,
                bytes,
            },
            Mapping::Backing {
                by: next_by,
                index: next_index,
                offset: next_offset,
                bytes: next_bytes,
            },
        ) if *by == next_by
            && *index == next_index
            && *bytes == run.length
            && offset.checked_add(*bytes) == Some(next_offset) =>
        {
            *bytes += next_bytes;
        }
        _ => return false,
    }
    run.length += next.length;
    true
}

/// Extends the run by `next` if both are pieces of one stored block of a lower file, which smaller
/// blocks of the files above divide.
fn join_block(run: &mut Extent, next: &Extent) -> bool {
    let is_stored = matches!(
        run.mapping,
        Mapping::Raw { .. } | Mapping::Compressed { .. } | Mapping::Open { .. }
    );
    let is_one = is_stored && run.mapping == next.mapping;
    if is_one {
        run.length += next.length;
    }
    is_one
}

struct Map {
    json: bool,
    /// Names of the files of a chain; empty if there is only one file.
    chain: Vec<String>,
    /// Names of the backings, by index.
    names: Vec<String>,
    out: Output,
    first: bool,
}

impl Map {
    fn begin(&mut self, size: u64) -> Result<(), CommandError> {
        if self.json {
            write!(
                self.out,
                "{{\"schema\":\"bcow.map/1\",\"size\":{size},\"extents\":["
            )
        } else {
            let file = if self.chain.is_empty() { "" } else { "  FILE" };
            writeln!(
                self.out,
                "{:>16} {:>12} {:<8} {:>16} {:>12}{file}",
                "LBA", "LENGTH", "KIND", "UBA", "STORED"
            )
        }
    }

    fn extent(&mut self, file: usize, extent: &Extent) -> Result<(), CommandError> {
        if self.json {
            let separator = if self.first { "" } else { "," };
            self.first = false;
            let value = self.as_json(file, extent);
            return write!(self.out, "{separator}\n{value}");
        }
        write!(
            self.out,
            "{:>16} {:>12} {:<8}",
            extent.offset,
            extent.length,
            kind(&extent.mapping)
        )?;
        match extent.mapping {
            Mapping::Raw { stored } | Mapping::Compressed { stored } | Mapping::Open { stored } => {
                write!(self.out, " {:>16} {:>12}", stored.at.0, stored.bytes)?;
            }
            Mapping::Zero | Mapping::Hole => write!(self.out, " {:>16} {:>12}", "-", "-")?,
            Mapping::Backing { index, offset, .. } => {
                write!(self.out, " {:>16} {:>12}", format!("{index}:{offset}"), "-")?;
            }
        }
        match self.chain.get(file) {
            Some(name) => writeln!(self.out, "  {file} {}", printable(name)),
            None => writeln!(self.out),
        }
    }

    fn end(mut self) -> Result<(), CommandError> {
        if self.json {
            writeln!(self.out, "\n]}}")?;
        }
        self.out.finish()
    }

    fn as_json(&self, file: usize, extent: &Extent) -> Value {
        let mut value = json!({
            "offset": extent.offset,
            "length": extent.length,
            "kind": kind(&extent.mapping),
        });
        if let Some(name) = self.chain.get(file) {
            value["file"] = file.into();
            value["file_name"] = name.as_str().into();
        }
        match extent.mapping {
            Mapping::Raw { stored } | Mapping::Compressed { stored } => {
                value["uba"] = stored.at.0.into();
                value["stored_bytes"] = stored.bytes.into();
                value["crc32c"] = format!("{:08x}", stored.crc).into();
            }
            Mapping::Backing {
                index,
                offset,
                bytes,
                ..
            } => {
                value["backing"] = index.into();
                value["backing_name"] = self.names.get(index as usize).cloned().into();
                value["backing_offset"] = offset.into();
                value["backing_bytes"] = bytes.into();
            }
            Mapping::Open { stored } => {
                value["uba"] = stored.at.0.into();
                value["stored_bytes"] = stored.bytes.into();
            }
            Mapping::Zero | Mapping::Hole => {}
        }
        value
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
