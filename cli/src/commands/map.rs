//! `bcow map`

use std::path::PathBuf;

use bcow::format::incompatible;
use bcow::{Extent, Mapping};
use serde_json::{Value, json};

use crate::error::{CommandError, Context};
use crate::image::{OpenImage, StoreArgs};
use crate::size;
use crate::ui::{Output, Ui};

/// Show where an image's address space is stored
///
/// One line per stored block, and one per run of neighbouring zeros or holes, or of windows onto one
/// layer: its first byte in the address space (LBA) and its length, what it is, and for stored blocks
/// their first byte in the file (UBA) and the bytes they take there. A window has instead the index of
/// the file it shows, as `bcow inspect` lists them from 0 on, and the first byte in its address space.
///
/// Kinds: `raw` (stored as it is), `zstd` (stored compressed), `zero` (zeros), `hole` (nothing was ever there;
/// reads as zeros), `window` (bytes of another file), `backing` (the same bytes of the file below).
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The image: a file, oci:DIR[:REF] or oci:DIR@sha256:DIGEST
    #[arg(value_name = "IMG", value_hint = clap::ValueHint::FilePath)]
    image: PathBuf,
    /// Begin at this byte of the address space
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "0", hide_default_value = true)]
    start: u64,
    /// Show this many bytes of it (all, if not given)
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    length: Option<u64>,
    /// Print JSON (schema bcow.map/1)
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    stores: StoreArgs,
}

/// Prints the map.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let image = OpenImage::open_without_content(&args.image, &args.stores, ui)?;
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
    let windows = image
        .image()
        .header()
        .features
        .has_incompatible(incompatible::WINDOWS);
    let mut map = Map {
        json: args.json,
        names,
        backing_kind: if windows { "window" } else { "backing" },
        out: ui.output(),
        first: true,
    };
    map.begin(size)?;
    let mut pending: Option<Extent> = None;
    let mut at = args.start;
    while at < end {
        let extent = image
            .image()
            .map(at)
            .context(|| format!("cannot read the map of {}", image.path().display()))?;
        at = extent.offset.saturating_add(extent.length);
        if pending.as_mut().is_some_and(|run| join(run, &extent)) {
            continue;
        }
        if let Some(run) = pending.replace(extent) {
            map.extent(&run)?;
        }
    }
    if let Some(run) = pending {
        map.extent(&run)?;
    }
    map.end()
}

/// Makes the run longer by `next` if they belong together. Zeros, holes and windows are not stored block by block, so
/// there is nothing to tell block by block.
fn join(run: &mut Extent, next: &Extent) -> bool {
    match (&mut run.mapping, next.mapping) {
        (Mapping::Zero, Mapping::Zero) | (Mapping::Hole, Mapping::Hole) => {}
        (
            Mapping::Backing {
                index,
                offset,
                bytes,
            },
            Mapping::Backing {
                index: next_index,
                offset: next_offset,
                bytes: next_bytes,
            },
        ) if *index == next_index
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

struct Map {
    json: bool,
    /// Of the backings, by index.
    names: Vec<String>,
    backing_kind: &'static str,
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
            writeln!(
                self.out,
                "{:>16} {:>12} {:<8} {:>16} {:>12}",
                "LBA", "LENGTH", "KIND", "UBA", "STORED"
            )
        }
    }

    fn extent(&mut self, extent: &Extent) -> Result<(), CommandError> {
        if self.json {
            let separator = if self.first { "" } else { "," };
            self.first = false;
            let value = self.as_json(extent);
            return write!(self.out, "{separator}\n{value}");
        }
        write!(
            self.out,
            "{:>16} {:>12} {:<8}",
            extent.offset,
            extent.length,
            self.kind(&extent.mapping)
        )?;
        match extent.mapping {
            Mapping::Raw { stored } | Mapping::Compressed { stored } | Mapping::Open { stored } => {
                writeln!(self.out, " {:>16} {:>12}", stored.at.0, stored.bytes)
            }
            Mapping::Zero | Mapping::Hole => writeln!(self.out, " {:>16} {:>12}", "-", "-"),
            Mapping::Backing { index, offset, .. } => {
                writeln!(self.out, " {:>16} {:>12}", format!("{index}:{offset}"), "-")
            }
        }
    }

    fn end(mut self) -> Result<(), CommandError> {
        if self.json {
            writeln!(self.out, "\n]}}")?;
        }
        self.out.finish()
    }

    fn kind(&self, mapping: &Mapping) -> &'static str {
        match mapping {
            Mapping::Raw { .. } => "raw",
            Mapping::Compressed { .. } => "zstd",
            Mapping::Open { .. } => "open",
            Mapping::Zero => "zero",
            Mapping::Hole => "hole",
            Mapping::Backing { .. } => self.backing_kind,
        }
    }

    fn as_json(&self, extent: &Extent) -> Value {
        let mut value = json!({
            "offset": extent.offset,
            "length": extent.length,
            "kind": self.kind(&extent.mapping),
        });
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
