//! `bcow diff` of disks: ranges of bytes.

use bcow::format::SECTOR_BYTES;
use bcow::{BlockDevice, Content, Image};
use serde_json::json;

use super::Args;
use crate::error::{CommandError, Context};
use crate::image::OpenImage;
use crate::size::{Count, plural};
use crate::ui::{Output, Ui};

/// Compared at once.
const PIECE_BYTES: u64 = 1 << 20;

/// Whether two disks have the same content. Data behind the end of the smaller disk differs, unless
/// it is zeros.
pub fn compare(args: &Args, a: &OpenImage, b: &OpenImage, ui: &Ui) -> Result<bool, CommandError> {
    if args.content || args.metadata {
        return Err(CommandError::usage(
            "--content and --metadata are for trees; a disk is compared block by block",
        ));
    }
    let sizes = [a.image().size(), b.image().size()];
    let mut report = Report {
        args,
        out: ui.output(),
        run: None,
        ranges: 0,
        bytes: 0,
    };
    if args.json {
        write!(
            report.out,
            "{{\"schema\":\"bcow.diff-disk/1\",\"a_size\":{},\"b_size\":{},\"ranges\":[",
            sizes[0], sizes[1]
        )?;
    }
    let size = sizes[0].max(sizes[1]);
    let mut buffers = [Vec::new(), Vec::new()];
    let mut at = 0;
    while at < size {
        let left = PIECE_BYTES.min(size - at);
        let same = known_same(a.image(), b.image(), at, size - at);
        if same > 0 {
            at += same;
            continue;
        }
        let (a_zero, a_length) = zeros(a, at, left)?;
        let (b_zero, length) = zeros(b, at, a_length)?;
        if a_zero && b_zero {
            at += length;
            continue;
        }
        for (image, buffer) in [a, b].into_iter().zip(&mut buffers) {
            read(image, at, length, buffer)?;
        }
        let sectors = |index: usize| buffers[index].chunks(SECTOR_BYTES as usize);
        for (offset, (a, b)) in (at..)
            .step_by(SECTOR_BYTES as usize)
            .zip(sectors(0).zip(sectors(1)))
        {
            if a != b {
                report.differs(offset, a.len() as u64)?;
            }
        }
        at += length;
    }
    report.end(sizes, ui)
}

fn known_same(a: &Image, b: &Image, at: u64, length: u64) -> u64 {
    match at < a.size().min(b.size()) {
        true => bcow::known_same(a, at, b, at, length.min(a.size().min(b.size()) - at)),
        false => 0,
    }
}

/// Whether zeros follow from `at` on that need not be read, and how far that holds.
fn zeros(image: &OpenImage, at: u64, length: u64) -> Result<(bool, u64), CommandError> {
    let size = image.image().size();
    if at >= size {
        return Ok((true, length));
    }
    let status = image
        .image()
        .status(at, length.min(size - at))
        .context(|| format!("cannot read {}", image.path().display()))?;
    let is_zero = status.content != Content::Data;
    Ok((is_zero, status.length.clamp(1, length)))
}

fn read(image: &OpenImage, at: u64, length: u64, buffer: &mut Vec<u8>) -> Result<(), CommandError> {
    buffer.clear();
    buffer.resize(length as usize, 0);
    let there = image.image().size().saturating_sub(at).min(length);
    if there == 0 {
        return Ok(());
    }
    image
        .image()
        .read_at(at, &mut buffer[..there as usize])
        .context(|| format!("cannot read {}", image.path().display()))
}

struct Report<'a> {
    args: &'a Args,
    out: Output,
    /// The range that may go on.
    run: Option<(u64, u64)>,
    ranges: u64,
    bytes: u64,
}

impl Report<'_> {
    fn differs(&mut self, offset: u64, length: u64) -> Result<(), CommandError> {
        self.bytes += length;
        if let Some((_, end)) = &mut self.run
            && *end == offset
        {
            *end += length;
            return Ok(());
        }
        self.flush()?;
        self.run = Some((offset, offset + length));
        Ok(())
    }

    fn flush(&mut self) -> Result<(), CommandError> {
        let Some((start, end)) = self.run.take() else {
            return Ok(());
        };
        self.ranges += 1;
        match (self.args.summary, self.args.json) {
            (true, _) => Ok(()),
            (false, true) => {
                let separator = if self.ranges == 1 { "" } else { "," };
                let range = json!({ "offset": start, "length": end - start });
                write!(self.out, "{separator}\n{range}")
            }
            (false, false) => writeln!(self.out, "{start:>16} {:>12}", end - start),
        }
    }

    fn end(mut self, sizes: [u64; 2], ui: &Ui) -> Result<bool, CommandError> {
        self.flush()?;
        let is_same = self.ranges == 0 && sizes[0] == sizes[1];
        let words = match (self.ranges, sizes[0] == sizes[1]) {
            (0, true) => format!("no difference in {}", plural(sizes[0], "byte")),
            (_, is_equal) => format!(
                "{} differ in {}{}",
                plural(self.bytes, "byte"),
                plural(self.ranges, "range"),
                match is_equal {
                    true => String::new(),
                    false => format!(
                        "; A has {}, B {}",
                        plural(sizes[0], "byte"),
                        Count(sizes[1])
                    ),
                }
            ),
        };
        if self.args.json {
            let summary = json!({ "ranges": self.ranges, "bytes": self.bytes });
            writeln!(self.out, "\n],\"summary\":{summary}}}")?;
        } else if self.args.summary {
            writeln!(self.out, "{words}")?;
        }
        self.out.finish()?;
        if !self.args.json && !self.args.summary {
            ui.status(words);
        }
        Ok(is_same)
    }
}
