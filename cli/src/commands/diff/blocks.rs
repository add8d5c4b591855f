//! `bcow diff` of disks: ranges of bytes.

use std::ops::Range;

use bcow::BlockDevice;
use bcow::operation::{CompareError, compare as compare_images};
use serde_json::json;

use super::Args;
use crate::error::CommandError;
use crate::image::OpenImage;
use crate::size::{Count, plural};
use crate::ui::{Output, Ui};

/// Whether two disks show the same content. Data of one behind the end of the other one differs,
/// unless it is zeros.
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
        ranges: 0,
        bytes: 0,
    };
    if args.json {
        let schema = "bcow.diff-disk/1";
        let head = json!({ "schema": schema, "a_size": sizes[0], "b_size": sizes[1] });
        report.out.open_document(&head)?;
        report.out.open_list("ranges")?;
    }
    let cannot_read = |image: &OpenImage, error: &bcow::Error| {
        CommandError::new(format!("cannot read {}", image.path().display())).caused_by(error)
    };
    let compared = compare_images(a.image(), b.image(), &mut |range| report.range(&range));
    compared.map_err(|error| match error {
        CompareError::First(error) => cannot_read(a, &error),
        CompareError::Second(error) => cannot_read(b, &error),
        CompareError::Sink(error) => error,
    })?;
    report.end(sizes, ui)
}

struct Report<'a> {
    args: &'a Args,
    out: Output,
    ranges: u64,
    bytes: u64,
}

impl Report<'_> {
    fn range(&mut self, range: &Range<u64>) -> Result<(), CommandError> {
        let (start, length) = (range.start, range.end - range.start);
        self.bytes += length;
        self.ranges += 1;
        match (self.args.summary, self.args.json) {
            (true, _) => Ok(()),
            (false, true) => {
                let item = json!({ "offset": start, "length": length });
                self.out.item(&item)
            }
            (false, false) => writeln!(self.out, "{start:>16} {length:>12}"),
        }
    }

    fn end(mut self, sizes: [u64; 2], ui: &Ui) -> Result<bool, CommandError> {
        let is_same = self.ranges == 0 && sizes[0] == sizes[1];
        let words = match (self.ranges, sizes[0] == sizes[1]) {
            (0, true) => format!("no difference in {}", plural(sizes[0], "byte")),
            (_, is_equal) => format!(
                "{} differ in {}{}",
                plural(self.bytes, "byte"),
                plural(self.ranges, "range"),
                if is_equal {
                    String::new()
                } else {
                    format!(
                        "; A has {}, B {}",
                        plural(sizes[0], "byte"),
                        Count(sizes[1])
                    )
                }
            ),
        };
        if self.args.json {
            self.out.close_list()?;
            let summary = json!({ "ranges": self.ranges, "bytes": self.bytes });
            self.out.field("summary", &summary)?;
            self.out.close_document()?;
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
