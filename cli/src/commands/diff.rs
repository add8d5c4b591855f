//! `bcow diff`

mod blocks;

use std::collections::HashSet;
use std::path::PathBuf;

use bcow::format::Use;
use bcow_erofs::diff::{
    Change, Compare, ContentDifference, DiffError, DiffOptions, DiffSummary, Differences, Side,
    Stopped, XattrChange, diff,
};
use bcow_erofs::overlay::is_whiteout;
use bcow_erofs::reader::{ExtentSource, FileExtent, FileType, Inode, Timestamp};
use bcow_union::offline::lower_offset;
use serde::Serialize;
use serde_json::json;

use crate::error::{CommandError, exit};
use crate::image::{LayerArgs, OpenImage, StoreArgs, Tree};
use crate::interrupt::Interrupt;
use crate::size::{Human, plural};
use crate::stat::{self, InodeFacts};
use crate::ui::{Output, Ui};
use crate::{changes, names};
use bcow_images::Name;
use bcow_images::args::{IMAGE, NameParser};
use bcow_images::readable_upper::ReadableUpper;

/// Show the differences between two images
///
/// For two images or two layers, the command compares the file trees and prints one line for each
/// path that differs: a letter, the path and the difference, separated by tabs. The letters are A
/// (only B has the path), D (only A has the path), M (both have the path, with differences) and T
/// (the types differ).
///
/// The command compares types, permissions, owners, modification times, sizes, link targets, device
/// numbers, extended attributes, hard links, and content. It does not compare the size and the
/// number of links of a directory. It does not read data that both images have in the same place of
/// the same file.
///
/// For two disks, the command compares the whole content, including their backings, and prints the
/// byte ranges that differ: first byte and length, both multiples of 4096 bytes.
///
/// With --upper, B is the image A with the changes in the upper of a writable mount of A, or in a
/// disk of `bcow create --fs ext4` that shows A. The command reads only directories that the upper
/// changes. Layers (--layer) are on top of A. UPPER can also be the directory of a mount, or a
/// snapshot, UPPER@NAME. If the upper or the disk is in use, the process that uses it takes a
/// snapshot, which the command reads and removes. With two --upper, the command compares what both
/// show, for example two snapshots of a mount.
///
/// On a terminal, the command quotes unusual names as GNU ls does; otherwise it prints the bytes of
/// a name unchanged.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit status: 0 no differences, 1 differences, 2 error.",
    after_long_help = "\
Exit status, as in diff(1):
  0  no differences
  1  differences
  2  error: an unreadable image, a damaged block, an invalid command line"
)]
pub struct Args {
    /// The first image or disk: a file, oci:DIR[:REF], oci:DIR@sha256:DIGEST, https://..., s3://...
    /// or docker://...
    #[arg(value_name = "A", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(IMAGE))]
    a: Name,
    /// The second image or disk; not with --upper
    #[arg(value_name = "B", value_hint = clap::ValueHint::FilePath)]
    #[arg(required_unless_present = "upper", conflicts_with = "upper")]
    #[arg(value_parser = NameParser(IMAGE))]
    b: Option<Name>,
    /// Compare A with A plus the changes in this upper of a writable mount of A, or in this disk of
    /// `bcow create --fs ext4`; both also while they are mounted. Given twice, compare A plus the
    /// changes in the first with A plus the changes in the second
    #[arg(long, value_name = "UPPER|DISK|DIR", value_hint = clap::ValueHint::AnyPath)]
    upper: Vec<PathBuf>,
    /// Print the sizes of what the upper stores for each file, the largest first
    #[arg(long, requires = "upper", conflicts_with_all = ["summary", "null"])]
    stat: bool,
    /// Compare only types, content, link targets and device numbers
    #[arg(long, conflicts_with = "metadata")]
    content: bool,
    /// Compare everything except content
    #[arg(long)]
    metadata: bool,
    /// Print only the number of differences of each kind
    #[arg(long)]
    summary: bool,
    /// End lines with NUL instead of newline, and never quote names
    #[arg(short = '0', long, conflicts_with_all = ["json", "summary"])]
    null: bool,
    /// Print JSON (schema bcow.diff/1), with both inodes of each difference; for disks,
    /// bcow.diff-disk/1
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    layers: LayerArgs,
    #[command(flatten)]
    stores: StoreArgs,
}

/// Compares; returns the exit status.
pub fn run(args: &Args, ui: &Ui) -> Result<u8, CommandError> {
    // As for cmp(1) and diff(1), 1 is a result and not a failure.
    match compare(args, ui) {
        Ok(true) => Ok(exit::DONE),
        Ok(false) => Ok(exit::DIFFERENT),
        Err(error) if error.exit() == exit::FAILED => Err(error.exit_with(exit::DIFF_TROUBLE)),
        Err(error) => Err(error),
    }
}

/// Whether there are no differences.
fn compare(args: &Args, ui: &Ui) -> Result<bool, CommandError> {
    let image = OpenImage::open(&args.a, &args.layers.layers, &args.stores)?;
    let is_disk = |image: &OpenImage| image.image().header().purpose != Use::Image;
    let Some(b) = &args.b else {
        return match &args.upper[..] {
            [] => Err(CommandError::usage("missing the second image")),
            [_] | [_, _] => compare_uppers(args, &image, &args.upper, ui),
            [..] => Err(CommandError::usage("more than two --upper")),
        };
    };
    let other = OpenImage::open_second(b, &args.stores)?;
    if is_disk(&image) || is_disk(&other) {
        return blocks::compare(args, &image, &other, ui);
    }
    let known_same =
        |here, there, length| bcow::known_same(image.image(), here, other.image(), there, length);
    compare_trees(
        args,
        &image.tree()?,
        &other.tree()?,
        &known_same,
        &|| Ok(()),
        ui,
    )
}

/// Whether an upper has no changes to its image, or two uppers have the same changes.
fn compare_uppers(
    args: &Args,
    image: &OpenImage,
    uppers: &[PathBuf],
    ui: &Ui,
) -> Result<bool, CommandError> {
    // Before the snapshot of an upper in use, which has to be removed.
    let interrupt = Interrupt::catch();
    let find = |upper: &PathBuf| ReadableUpper::find(upper, ui);
    let found: Vec<_> = uppers.iter().map(find).collect::<Result<_, _>>()?;
    let [a, b] = match &found[..] {
        [first, second] => changes::trees_of_two(image, [first, second], &args.stores, ui)?,
        found => changes::trees(image, &found[0], &args.stores, ui)?,
    };
    let known_same = |here, there, length| match lower_offset(here) {
        Some(offset) if lower_offset(there) == Some(offset) => length,
        _ => 0,
    };
    compare_trees(args, &a, &b, &known_same, &|| interrupt.check(), ui)
}

fn compare_trees(
    args: &Args,
    a: &Tree,
    b: &Tree,
    known_same: &dyn Fn(u64, u64, u64) -> u64,
    check: &dyn Fn() -> Result<(), CommandError>,
    ui: &Ui,
) -> Result<bool, CommandError> {
    let options = DiffOptions {
        compare: match (args.content, args.metadata) {
            (true, _) => Compare::Content,
            (_, true) => Compare::Metadata,
            _ => Compare::All,
        },
        known_same: Some(known_same),
    };
    let mut report = Report {
        args,
        a,
        b,
        quote: ui.stdout_is_terminal() && !args.null,
        out: ui.output(),
        stored: Vec::new(),
        counted: HashSet::new(),
    };
    report.begin(options.compare)?;
    let compared = diff(
        a.filesystem(),
        b.filesystem(),
        &options,
        &mut |path, change| check().and_then(|()| report.difference(path, &change)),
    );
    let summary = match compared {
        Ok(summary) => summary,
        Err(Stopped::Caller(error)) => return Err(error),
        Err(Stopped::Tree(error)) => {
            // The differences found so far are correct and may suffice.
            report.out.finish()?;
            return Err(trouble(&error, a, b));
        }
    };
    report.end(&summary)?;
    if !args.json && !args.summary {
        ui.status(in_words(&summary));
    }
    Ok(summary.is_same())
}

fn trouble(error: &DiffError, a: &Tree, b: &Tree) -> CommandError {
    let tree = match error.side {
        Side::A => a,
        Side::B => b,
    };
    CommandError::new(tree.cannot_read(&error.path))
        .caused_by(&error.source)
        .hint(format!(
            "the comparison is incomplete; `bcow fsck --data {}` lists all damage",
            tree.image().display()
        ))
}

fn in_words(summary: &DiffSummary) -> String {
    if summary.is_same() {
        return format!("no difference in {}", plural(summary.same, "path"));
    }
    format!(
        "{} added, {} removed, {} changed, {} of another type, {} the same",
        summary.added, summary.removed, summary.changed, summary.retyped, summary.same
    )
}

/// A path that differs, as JSON has it.
#[derive(Serialize)]
struct Difference {
    status: &'static str,
    path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    path_hex: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    changes: Option<Vec<&'static str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content_differs_at: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stored_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    a: Option<InodeFacts>,
    #[serde(skip_serializing_if = "Option::is_none")]
    b: Option<InodeFacts>,
}

struct Report<'a> {
    args: &'a Args,
    a: &'a Tree,
    b: &'a Tree,
    quote: bool,
    out: Output,
    /// With `--stat`: the bytes that the upper stores for a file, the letter and the path.
    stored: Vec<(u64, &'static str, Vec<u8>)>,
    /// Inodes with several names that were counted.
    counted: HashSet<u64>,
}

impl Report<'_> {
    fn begin(&mut self, compare: Compare) -> Result<(), CommandError> {
        if !self.args.json {
            return Ok(());
        }
        let compare = match compare {
            Compare::All => "all",
            Compare::Metadata => "metadata",
            Compare::Content => "content",
        };
        let mut head = json!({ "schema": "bcow.diff/1" });
        for (name, tree) in [("a", self.a), ("b", self.b)] {
            let bytes = tree.image().as_os_str().as_encoded_bytes();
            head[name] = names::text(bytes).into();
            if let Some(hex) = names::text_hex(bytes) {
                head[format!("{name}_hex")] = hex.into();
            }
        }
        head["compared"] = compare.into();
        self.out.open_document(&head)?;
        // The entries follow; they are not held in memory.
        if self.args.summary { Ok(()) } else { self.out.open_list("entries") }
    }

    fn end(mut self, summary: &DiffSummary) -> Result<(), CommandError> {
        if self.args.json {
            if !self.args.summary {
                self.out.close_list()?;
            }
            let facts = json!({
                "added": summary.added,
                "removed": summary.removed,
                "changed": summary.changed,
                "retyped": summary.retyped,
                "same": summary.same,
                "compared_bytes": summary.compared_bytes,
            });
            self.out.field("summary", &facts)?;
            self.out.close_document()?;
        } else if self.args.summary {
            writeln!(self.out, "{}", in_words(summary))?;
        } else if self.args.stat {
            self.sizes()?;
        }
        self.out.finish()
    }

    fn difference(&mut self, path: &[u8], change: &Change<'_>) -> Result<(), CommandError> {
        let stored = match change {
            Change::Added(b) | Change::Retyped(_, b) | Change::Changed(_, b, _)
                if self.args.stat && b.kind == FileType::Regular =>
            {
                self.stored_bytes(path, b)?
            }
            _ => 0,
        };
        match (self.args.summary, self.args.json) {
            (true, _) => {}
            (false, true) => return self.as_json(path, change, stored),
            (false, false) if self.args.stat => {
                self.stored.push((stored, letter(change), path.to_owned()));
            }
            (false, false) => return self.as_line(path, change),
        }
        Ok(())
    }

    /// The bytes of a file that the upper stores; 0 for further names of the file.
    fn stored_bytes(&mut self, path: &[u8], inode: &Inode) -> Result<u64, CommandError> {
        if inode.nlink > 1 && !self.counted.insert(inode.ino) {
            return Ok(0);
        }
        self.b.read(path, |fs| {
            let mut extents = fs.extents(inode, 0);
            extents.try_fold(0, |sum, extent| {
                let FileExtent { length, source, .. } = extent?;
                let is_stored = matches!(source, ExtentSource::Device { offset }
                    if lower_offset(offset).is_none());
                Ok(sum + if is_stored { length } else { 0 })
            })
        })
    }

    /// The lines of `--stat`.
    fn sizes(&mut self) -> Result<(), CommandError> {
        let sum: u64 = self.stored.iter().map(|(bytes, ..)| bytes).sum();
        writeln!(self.out, "{:>10}\t\tall", Human(sum).to_string())?;
        self.stored
            .sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.2.cmp(&b.2)));
        let stored = std::mem::take(&mut self.stored).into_iter();
        for (bytes, letter, path) in stored.filter(|(bytes, ..)| *bytes > 0) {
            write!(self.out, "{:>10}\t{letter}\t", Human(bytes).to_string())?;
            self.out.name(&path, self.quote)?;
            writeln!(self.out)?;
        }
        Ok(())
    }

    fn as_json(
        &mut self,
        path: &[u8],
        change: &Change<'_>,
        stored: u64,
    ) -> Result<(), CommandError> {
        let (before, after, what) = match change {
            Change::Added(b) => (None, Some(*b), None),
            Change::Removed(a) => (Some(*a), None, None),
            Change::Retyped(a, b) => (Some(*a), Some(*b), None),
            Change::Changed(a, b, what) => (Some(*a), Some(*b), Some(*what)),
        };
        let facts = |tree: &Tree, inode: Option<&Inode>| {
            let facts = inode.map(|inode| {
                let mut facts = InodeFacts::of(tree, inode, path)?;
                facts.kind = type_word(tree, inode, path)?;
                Ok::<_, CommandError>(facts)
            });
            facts.transpose()
        };
        self.out.item(&Difference {
            status: letter(change),
            path: names::text(path),
            path_hex: names::text_hex(path),
            changes: what.map(changes_in_words),
            content_differs_at: match what.and_then(|what| what.content) {
                Some(ContentDifference::At(at)) => Some(at),
                _ => None,
            },
            stored_bytes: self.args.stat.then_some(stored),
            a: facts(self.a, before)?,
            b: facts(self.b, after)?,
        })
    }

    fn as_line(&mut self, path: &[u8], change: &Change<'_>) -> Result<(), CommandError> {
        write!(self.out, "{}\t", letter(change))?;
        self.out.name(path, self.quote)?;
        write!(self.out, "\t")?;
        match change {
            Change::Added(b) => write!(self.out, "{}", type_word(self.b, b, path)?)?,
            Change::Removed(a) => write!(self.out, "{}", type_word(self.a, a, path)?)?,
            Change::Retyped(a, b) => {
                let a = type_word(self.a, a, path)?;
                let b = type_word(self.b, b, path)?;
                write!(self.out, "{a}->{b}")?;
            }
            Change::Changed(a, b, what) => self.details(a, b, what)?,
        }
        self.out
            .write_bytes(if self.args.null { b"\0" } else { b"\n" })
    }

    fn details(&mut self, a: &Inode, b: &Inode, what: &Differences) -> Result<(), CommandError> {
        let mut words = Vec::new();
        if what.permissions {
            words.push(format!("mode {:04o}->{:04o}", a.permissions, b.permissions));
        }
        if what.uid {
            words.push(format!("uid {}->{}", a.uid, b.uid));
        }
        if what.gid {
            words.push(format!("gid {}->{}", a.gid, b.gid));
        }
        if what.size {
            words.push(format!("size {}->{}", a.size, b.size));
        }
        if what.mtime {
            words.push(format!("mtime {}->{}", time(a.mtime), time(b.mtime)));
        }
        if let (true, Some(a), Some(b)) = (what.device, a.rdev, b.rdev) {
            let (a, b) = ((a.major, a.minor), (b.major, b.minor));
            words.push(format!("device {}:{}->{}:{}", a.0, a.1, b.0, b.1));
        }
        if what.links {
            words.push(if a.nlink == b.nlink {
                "links with other names".to_owned()
            } else {
                format!("links {}->{}", a.nlink, b.nlink)
            });
        }
        match what.content {
            Some(ContentDifference::Length) => words.push("content".to_owned()),
            Some(ContentDifference::At(at)) => words.push(format!("content from byte {at}")),
            None => {}
        }
        write!(self.out, "{}", words.join(", "))?;
        // The remaining values are bytes of the image, not text.
        let mut separator = if words.is_empty() { "" } else { ", " };
        if let Some((a, b)) = &what.target {
            write!(self.out, "{separator}target ")?;
            self.out.name(a, self.quote)?;
            write!(self.out, "->")?;
            self.out.name(b, self.quote)?;
            separator = ", ";
        }
        for (name, change) in &what.xattrs {
            write!(self.out, "{separator}xattr ")?;
            self.out.name(name, self.quote)?;
            let change = match change {
                XattrChange::Added => "added",
                XattrChange::Removed => "removed",
                XattrChange::Changed => "changed",
            };
            write!(self.out, " {change}")?;
            separator = ", ";
        }
        Ok(())
    }
}

fn letter(change: &Change<'_>) -> &'static str {
    match change {
        Change::Added(_) => "A",
        Change::Removed(_) => "D",
        Change::Changed(..) => "M",
        Change::Retyped(..) => "T",
    }
}

/// The type as `ls --json` has it, or that it is a whiteout.
fn type_word(tree: &Tree, inode: &Inode, path: &[u8]) -> Result<&'static str, CommandError> {
    if inode.kind == FileType::CharDevice && tree.read(path, |fs| is_whiteout(fs, inode))? {
        return Ok("whiteout");
    }
    Ok(stat::type_name(inode.kind))
}

/// The differences, in the words of the guide.
fn changes_in_words(what: &Differences) -> Vec<&'static str> {
    [
        (what.permissions, "mode"),
        (what.uid, "uid"),
        (what.gid, "gid"),
        (what.size, "size"),
        (what.mtime, "mtime"),
        (what.device, "device"),
        (what.links, "links"),
        (what.content.is_some(), "content"),
        (what.target.is_some(), "target"),
        (!what.xattrs.is_empty(), "xattrs"),
    ]
    .into_iter()
    .filter_map(|(differs, word)| differs.then_some(word))
    .collect()
}

/// A time, without a zero fraction.
fn time(time: Timestamp) -> String {
    stat::full_time(time).replace(".000000000", "")
}
