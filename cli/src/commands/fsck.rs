//! `bcow fsck`

mod backing;
mod kernel_upper;
mod report;
mod restore;
mod tolerant;
mod upper;
mod upper_image;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow::check::{self, CheckOptions, Repair};
use bcow::format::compatible;
use bcow::{Image, OpenOptions, Storage, header_of};
use bcow_erofs::check as erofs_check;
use bcow_erofs::damage::{DamagedFile, UnreadableRange, damaged_files, unreadable_ranges};
use bcow_erofs::reader::Filesystem;
use bcow_images::{Name, NameParts};
use bcow_oci::store::{self, Opened, Places, StoreError};
use bcow_oci::{Digest, LocalImage};

use crate::disks::{lock_for_reading, open_for_repair};
use crate::error::{CommandError, Context, exit};
use crate::image::{LayerArgs, StoreArgs, cannot_open, cannot_open_file, refuse_what_is_no_file};
use crate::kernel_upper::is_kernel_upper;
use crate::names;
use crate::remote::{self, Pinned, RemoteImage};
use crate::ui::{Progress, Ui};
use bcow_images::args::{IMAGE, NameParser, WHOLE_IMAGE};
use report::{as_json, print_hints, print_report};
use tolerant::tolerant;

/// Check an image, a disk or an upper, and repair it
///
/// The command checks the structure and the checksums of the file, and then the file system in the
/// file: every directory, inode and link. With --data, it also reads and verifies every stored
/// block and the whole Merkle tree. Without --repair, it changes nothing.
///
/// Of a disk over a backing, the command also opens the files below, without a check of their
/// content.
///
/// The command also checks the upper of a writable mount, if no process is writing to the upper:
/// its overlayfs marks (whiteouts, opaque directories), its sketches (files of which only the
/// written blocks are stored) and their maps, and orphan files. If LOWER or the recorded path names
/// the upper's image, the command also checks the upper's references to that image. If the upper
/// was mounted with layers, name them with --layer. For an upper of the kernel door (`bcow mount
/// --door kernel`), the command checks instance.json and the disk, and whether the disk opens over
/// the image's view (the ext4 metadata that bcow generates for it); e2fsck(8) checks the file
/// system on the disk.
///
/// The command prints one line for each finding: severity, code, place and description. Of the
/// findings that follow from the damage of one place, such as the files in one block, three have a
/// line, and the others are counted; --json lists all. Codes are stable. Section 12 of the format
/// specification lists the codes of the format. Codes of the file system begin with `erofs-`; codes
/// of an upper begin with `upper-`; `file-data` names a file with damaged content (with --data).
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Exit status, as in fsck(8):
  0   no errors; there may be warnings
  1   all errors were repaired
  4   errors remain
  8   the check failed: the file is missing, unreadable, not a BCoW file, or of a newer version
  16  the command line is invalid")]
pub struct Args {
    /// The image or disk: a file, oci:DIR[:REF], oci:DIR@sha256:DIGEST, https://..., s3://... or
    /// docker://...; or the directory of an upper
    #[arg(value_name = "IMG", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(WHOLE_IMAGE))]
    image: Name,
    /// The image of an upper [default: the path recorded in the upper]
    #[arg(value_name = "LOWER", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(IMAGE))]
    lower: Option<Name>,
    /// Read and verify every byte. For a file on this machine, --root-hash implies --data
    #[arg(long)]
    data: bool,
    /// Repair errors that have exactly one correct repair: a damaged header slot; the free list
    /// and leaked space of a disk; orphan files and link counts of an upper. The content does not
    /// change
    #[arg(long)]
    repair: bool,
    /// With --repair: replace damaged bytes by those of this copy of the image, if the Merkle tree
    /// confirms them. COPY is a file, oci:DIR[:REF], https://..., s3://... or docker://... (implies
    /// --data)
    #[arg(long, value_name = "COPY", requires = "repair", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(WHOLE_IMAGE))]
    from: Option<Name>,
    /// Threads that read and verify [default: one for each CPU]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    jobs: Option<u16>,
    /// Print JSON (schema bcow.fsck/1)
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    layers: LayerArgs,
    #[command(flatten)]
    stores: StoreArgs,
}

impl Args {
    /// Whether every byte is read. A restored file is read as a whole in any case.
    fn data(&self) -> bool {
        self.data || self.from.is_some() || self.is_pinned_file()
    }

    /// The number of threads that read and verify.
    fn threads(&self) -> usize {
        match self.jobs {
            Some(jobs) => jobs.into(),
            None => std::thread::available_parallelism().map_or(1, |n| n.get()),
        }
    }

    fn check_options(&self) -> CheckOptions {
        CheckOptions {
            data: self.data(),
            threads: self.threads(),
        }
    }

    /// Whether --root-hash names the content of a file on this machine. The root in its header says
    /// nothing about the content until all of it is hashed. Each read of an image on another
    /// machine is verified.
    fn is_pinned_file(&self) -> bool {
        self.stores.remote.root_hash.is_some() && !self.image.is_remote()
    }
}

/// Runs the check; the exit status has the result.
pub fn run(args: &Args, ui: &Ui) -> Result<u8, CommandError> {
    run_check(args, ui).map_err(|error| match error.exit() {
        exit::FAILED => error.exit_with(exit::FSCK_OPERATIONAL),
        exit::USAGE => error.exit_with(exit::FSCK_USAGE),
        _ => error,
    })
}

/// A finding of bcow, bcow-erofs or this command, in one form.
struct Finding {
    error: bool,
    code: &'static str,
    place: String,
    message: String,
}

impl From<check::Finding> for Finding {
    fn from(found: check::Finding) -> Self {
        Finding {
            error: found.severity == check::Severity::Error,
            code: found.code,
            place: found.place,
            message: found.message,
        }
    }
}

impl From<DamagedFile<'_>> for Finding {
    fn from(file: DamagedFile<'_>) -> Self {
        Finding {
            error: true,
            code: "file-data",
            place: names::quoted(&file.path),
            message: format!(
                "cannot be read from byte {} on: {}",
                file.offset, file.range.error
            ),
        }
    }
}

/// A file to check: the image, or a layer below it.
struct Target {
    /// The name of the file in JSON, in the log, and in the line with its verdict.
    name: String,
    /// The short name of the file in lines with findings.
    label: String,
    path: PathBuf,
    file: Arc<dyn Storage>,
    /// The expected digest.
    digest: Option<Digest>,
    /// The code of a finding if the digest does not match.
    digest_code: &'static str,
}

/// The file that IMG names, before its header is checked.
struct Found {
    /// The name in messages.
    shown: PathBuf,
    path: PathBuf,
    storage: Arc<dyn Storage>,
    /// The open file, if it is on this machine.
    file: Option<Arc<std::fs::File>>,
    digest: Option<Digest>,
}

impl Found {
    fn locate(
        args: &Args,
        name: &LocalImage,
        remote: Option<&RemoteImage>,
    ) -> Result<Self, CommandError> {
        if let Some(remote) = remote {
            let name = remote.name.shown();
            return Ok(Found {
                shown: name.to_owned(),
                path: name.to_owned(),
                storage: tolerant(Arc::clone(&remote.storage)),
                file: None,
                digest: None,
            });
        }
        let shown = args.image.shown();
        let located = store::locate(name).map_err(|error| cannot_open(shown, &error))?;
        Ok(Found {
            shown: shown.to_owned(),
            path: located.path,
            storage: located.file.clone(),
            file: Some(located.file),
            digest: located.digest,
        })
    }
}

/// The result for one file.
struct Checked {
    target: Target,
    findings: Vec<Finding>,
    omitted: u64,
    tables: u64,
    blocks: u64,
    bytes_read: u64,
    writable: Option<check::Writable>,
    inodes: Option<u64>,
}

impl Checked {
    /// Omitted findings count as errors: their severity is not recorded.
    fn errors(&self) -> u64 {
        self.findings.iter().filter(|f| f.error).count() as u64 + self.omitted
    }

    fn warnings(&self) -> u64 {
        self.findings.iter().filter(|f| !f.error).count() as u64
    }
}

fn run_check(args: &Args, ui: &Ui) -> Result<u8, CommandError> {
    if upper::is_upper(args.image.shown()) {
        return check_upper(args, ui);
    }
    refuse_options_of_uppers(args)?;
    let stores = args.stores.directories()?;
    refuse_what_is_no_file(&args.image)?;
    let remote = open_remote(args)?;
    // The files of an image on another machine are not looked up by this name.
    let name = args.image.local();
    let name = name.unwrap_or_else(|| LocalImage::File(args.image.shown().to_owned()));
    let places = Places {
        stores: &stores,
        named: args.stores.backing_dirs()?,
        remote: remote.as_ref().and_then(|remote| remote.files.as_ref()),
        ..Places::default()
    };
    let found = Found::locate(args, &name, remote.as_ref())?;
    let progress = ui.progress();
    // Another image must not be changed. A file without a readable header has no root yet.
    if let Some(file) = found
        .file
        .as_ref()
        .filter(|file| header_of(&***file).is_some())
    {
        require_root(args, file)?;
    }
    let repairs = repair(args, &name, &found, places, &progress)?;
    progress.phase("checking");
    if let Some(file) = &found.file {
        require_root(args, file)?;
        lock_for_reading(args.image.shown(), file, args.stores.share())?;
    }
    let files = check_all(args, &name, found, remote.as_ref(), places, &progress)?;
    drop(progress);

    let errors: u64 = files.iter().map(Checked::errors).sum();
    match args.json {
        true => ui.print_json(&as_json(args, &files, &repairs.lines))?,
        false => {
            print_report(args, ui, &files, &repairs.lines)?;
            print_hints(args, &files, ui);
            if repairs.new_identity {
                ui.hint(format_args!(
                    "disks over this file do not open any more; its content has not changed, so \
                     `bcow rebase --unsafe DISK -b {}` repairs each of them",
                    args.image.display()
                ));
            }
        }
    }
    Ok(match errors {
        0 if repairs.of_damage => exit::FSCK_REPAIRED,
        0 => exit::DONE,
        _ => exit::FSCK_ERRORS_LEFT,
    })
}

/// Checks the upper of a writable mount, at either door.
fn check_upper(args: &Args, ui: &Ui) -> Result<u8, CommandError> {
    if args.from.is_some() {
        let usage = format!("{} is the upper of a writable mount", args.image.display());
        return Err(CommandError::usage(usage).hint("--from restores images"));
    }
    match is_kernel_upper(args.image.shown()) {
        true => kernel_upper::run(args, ui),
        false => upper::run(args, ui),
    }
}

/// Refuses the options that name the image of an upper.
fn refuse_options_of_uppers(args: &Args) -> Result<(), CommandError> {
    if args.lower.is_none() && args.layers.layers.is_empty() {
        return Ok(());
    }
    let usage = format!(
        "{} is not the upper of a writable mount",
        args.image.display()
    );
    Err(CommandError::usage(usage).hint("LOWER and --layer name the image of an upper"))
}

/// Opens an image on another machine, which can be checked but not repaired. `None` for an image on
/// this machine.
fn open_remote(args: &Args) -> Result<Option<RemoteImage>, CommandError> {
    match args.image.parts() {
        NameParts::Url(_) if args.repair => Err(CommandError::usage(format!(
            "cannot repair {}: images on other machines are read-only",
            args.image
        ))
        .hint("repair the file where it is, or a copy")),
        NameParts::Url(url) => remote::open(url, &args.stores.remote, Pinned::AsAsked).map(Some),
        _ => Ok(None),
    }
}

/// What the command has changed in the file, before the check.
struct Repairs {
    /// A description of each change.
    lines: Vec<String>,
    /// Whether a change repaired damage. A log that was applied is not damage.
    of_damage: bool,
    /// Whether a change gave the file another identity.
    new_identity: bool,
}

/// Restores and repairs the file, as far as the options ask for this.
fn repair(
    args: &Args,
    name: &LocalImage,
    found: &Found,
    places: Places<'_>,
    progress: &Progress,
) -> Result<Repairs, CommandError> {
    let mut lines = Vec::new();
    if let Some(from) = &args.from {
        progress.phase("restoring");
        lines = restore::run(args, name, &found.path, from, places)?;
    }
    let mut of_damage = !lines.is_empty();
    let mut new_identity = false;
    if args.repair {
        progress.phase("repairing");
        let (file, _lock) = open_for_repair(args.image.shown(), &found.path)?;
        let done = check::repair(file);
        let done = done.context(|| format!("cannot repair {}", args.image.display()))?;
        of_damage |= done.iter().any(Repair::is_of_damage);
        new_identity = done.iter().any(Repair::changes_identity);
        lines.extend(done.iter().map(Repair::to_string));
    }
    Ok(Repairs {
        lines,
        of_damage,
        new_identity,
    })
}

/// Checks the file, and then the files below it, in this order.
fn check_all(
    args: &Args,
    name: &LocalImage,
    found: Found,
    remote: Option<&RemoteImage>,
    places: Places<'_>,
    progress: &Progress,
) -> Result<Vec<Checked>, CommandError> {
    let options = &args.check_options();
    let shown = found.shown;
    let target = Target {
        name: shown.display().to_string(),
        label: shown.display().to_string(),
        path: found.path,
        file: found.storage,
        digest: found.digest,
        digest_code: "blob-digest",
    };
    let path = target.path.clone();
    let mut files = vec![check_file(&shown, target, options)?];
    let opening = OpenOptions::default();
    let opened = match remote {
        Some(image) => {
            let storage = Arc::clone(&files[0].target.file);
            store::open_remote(image.name.shown().to_owned(), storage, places, &opening)
        }
        None => store::open(name, places, &opening),
    };
    let Some(opened) = with_layers(&shown, opened, &files[0])? else {
        return Ok(files);
    };
    let mut problems: Vec<Finding> = opened
        .problems
        .iter()
        .map(|problem| Finding {
            error: true,
            code: problem.code(),
            place: BACKING_TABLE.into(),
            message: problem.to_string(),
        })
        .collect();
    if remote.is_none() {
        for found in backing::check(&opened.image, &path, &args.stores)? {
            // Both lookups report a file by digest.
            if !problems.iter().any(|known| known.message == found.message) {
                problems.push(found);
            }
        }
    }
    files[0].findings.extend(problems);
    let count = opened.below.len();
    for (index, layer) in opened.below.into_iter().enumerate() {
        progress.phase(&format!("checking file {} of {count} below", index + 1));
        let target = Target {
            name: layer.name,
            label: layer.label,
            path: layer.path,
            file: match remote {
                Some(_) => tolerant(layer.storage),
                None => layer.storage,
            },
            digest: Some(layer.digest),
            digest_code: "backing-entry",
        };
        files.push(check_file(&shown, target, options)?);
    }
    Ok(files)
}

/// The image with the files below it. `None` if damage that the check of its file has reported
/// hides which files these are; a damaged image may still name them. Any other failure is an error:
/// files below would go unchecked.
fn with_layers(
    image: &Path,
    opened: Result<Opened, StoreError>,
    top: &Checked,
) -> Result<Option<Opened>, CommandError> {
    match opened {
        Ok(opened) => Ok(Some(opened)),
        Err(StoreError::Open { source, .. }) if source.code().is_some() && top.errors() > 0 => {
            Ok(None)
        }
        Err(error) => Err(cannot_open(image, &error)),
    }
}

/// Refuses a file whose header has another root hash than --root-hash.
fn require_root(args: &Args, file: &std::fs::File) -> Result<(), CommandError> {
    let Some(root) = args.stores.remote.root_hash else {
        return Ok(());
    };
    let tree = header_of(file).and_then(|header| header.merkle);
    match tree.is_some_and(|tree| tree.root == root.0) {
        true => Ok(()),
        false => Err(
            CommandError::new(format!("cannot check {}", args.image.display()))
                .caused_by_text(format!("its root hash is not {root}")),
        ),
    }
}

/// The place of findings about files below that are missing or wrong: the table of the file above
/// names these files.
const BACKING_TABLE: &str = "backing table";
/// Limit on findings about files with damaged content in one file. The others are counted.
const MAX_FILES: usize = 1000;

/// Checks one file, and the file system in it.
fn check_file(
    image: &Path,
    target: Target,
    options: &CheckOptions,
) -> Result<Checked, CommandError> {
    let path = &target.path;
    let cannot = || format!("cannot check {}", path.display());
    let begun = std::time::Instant::now();
    tracing::info!(
        "{}: checking {}, {}, with {} threads",
        target.name,
        path.display(),
        match options.data {
            true => "every byte",
            false => "header and tables",
        },
        options.threads
    );
    let report = check::check(target.file.clone(), options).context(cannot)?;
    tracing::info!(
        "{}: {} tables and {} blocks, {} bytes of blocks read, {} findings, in {} ms",
        target.name,
        report.tables,
        report.blocks,
        report.bytes_read,
        report.findings.len(),
        begun.elapsed().as_millis()
    );
    if let Some(writable) = &report.writable {
        tracing::debug!("{}: {writable:?}", target.name);
    }
    // The check cannot judge a file that is not a BCoW file, or one of a newer version.
    if report
        .findings
        .iter()
        .any(|f| matches!(f.code, "not-bcow" | "version" | "unknown-feature"))
    {
        let opened = Image::open_storage(target.file.clone(), &OpenOptions::default());
        return Err(match opened {
            Err(error) => cannot_open_file(image, path, &error),
            Ok(_) => CommandError::new(format!("{} changed during the check", path.display())),
        });
    }
    let mut findings: Vec<Finding> = Vec::new();
    if let (Some(expected), true) = (&target.digest, options.data) {
        let found = Digest::of_storage(&*target.file, expected.algorithm()).context(cannot)?;
        if found != *expected {
            findings.push(Finding {
                error: true,
                code: target.digest_code,
                place: "file".into(),
                message: format!("its digest is {found}, not {expected}"),
            });
        }
    }
    findings.extend(report.findings.iter().cloned().map(Finding::from));
    // With --data, all blocks were read. If there was no error, no file is damaged. Otherwise a
    // second read finds out which files are damaged.
    let read_files = options.data && !report.is_sound();
    let tree = check_tree(path, target.file.clone(), read_files, &mut findings)?;
    Ok(Checked {
        target,
        findings,
        omitted: report.omitted + tree.omitted,
        tables: report.tables,
        blocks: report.blocks,
        bytes_read: report.bytes_read,
        writable: report.writable,
        inodes: tree.inodes,
    })
}

/// The result for the file system in a file, besides its findings.
#[derive(Default)]
struct CheckedTree {
    /// The number of inodes in the superblock. `None` if the file has no file system, or if the
    /// image or the superblock is damaged.
    inodes: Option<u64>,
    /// The number of damaged files beyond [`MAX_FILES`].
    omitted: u64,
}

/// Checks the file system in the file.
fn check_tree(
    path: &Path,
    storage: Arc<dyn Storage>,
    read_files: bool,
    findings: &mut Vec<Finding>,
) -> Result<CheckedTree, CommandError> {
    let image = match Image::open_storage(storage, &OpenOptions::default()) {
        Ok(image) => image,
        // The check of the structure has already reported this damage.
        Err(error) if error.code().is_some() && !findings.is_empty() => {
            return Ok(CheckedTree::default());
        }
        Err(error) => return Err(cannot_open_file(path, path, &error)),
    };
    if !image.header().features.has_compatible(compatible::EROFS) {
        return Ok(CheckedTree::default());
    }
    let filesystem = match Filesystem::open(image.clone()) {
        Ok(filesystem) => filesystem,
        Err(error) => {
            findings.push(Finding {
                error: true,
                code: "erofs-superblock",
                place: "superblock".into(),
                message: error.to_string(),
            });
            return Ok(CheckedTree::default());
        }
    };
    // The check of the blocks covers the content of files. `damaged_files` names the damaged ones.
    let options = erofs_check::CheckOptions { read_data: false };
    let begun = std::time::Instant::now();
    let superblock = filesystem.superblock();
    tracing::debug!(
        "{}: file system of {} blocks of {} bytes, metadata from byte {}, {} further devices",
        path.display(),
        superblock.blocks,
        superblock.block_bytes,
        superblock.metadata_offset,
        superblock.devices.len()
    );
    let found = erofs_check::check(&filesystem, &options);
    tracing::info!(
        "{}: file system of {} inodes checked in {} ms, {} findings",
        path.display(),
        filesystem.superblock().inodes,
        begun.elapsed().as_millis(),
        found.len()
    );
    findings.extend(found.into_iter().map(Finding::from));
    let mut tree = CheckedTree {
        inodes: Some(filesystem.superblock().inodes),
        omitted: 0,
    };
    if read_files {
        let unreadable = unreadable_ranges(&image);
        for UnreadableRange { bytes, error } in &unreadable {
            tracing::debug!(
                "{}: bytes {}..{} of the address space cannot be read: {error}",
                path.display(),
                bytes.start,
                bytes.end
            );
        }
        let damaged = damaged_files(&filesystem, &unreadable, MAX_FILES);
        findings.extend(damaged.files.into_iter().map(Finding::from));
        tree.omitted = damaged.omitted;
    }
    Ok(tree)
}

#[cfg(test)]
mod tests {
    use bcow::{Error, MemoryStorage};

    use super::*;

    fn checked(findings: Vec<Finding>) -> Checked {
        Checked {
            target: Target {
                name: "a".into(),
                label: "a".into(),
                path: "a".into(),
                file: Arc::new(MemoryStorage::new(Vec::new())),
                digest: None,
                digest_code: "blob-digest",
            },
            findings,
            omitted: 0,
            tables: 0,
            blocks: 0,
            bytes_read: 0,
            writable: None,
            inodes: None,
        }
    }

    #[test]
    fn image_that_does_not_open_after_its_check_is_an_error() {
        let unreadable = || {
            Err(StoreError::Open {
                path: "a".into(),
                source: Error::Io {
                    action: "read",
                    offset: 0,
                    source: std::io::ErrorKind::TimedOut.into(),
                },
            })
        };
        let damaged = || {
            Err(StoreError::Open {
                path: "a".into(),
                source: Error::Merkle { start: 0, end: 1 },
            })
        };
        let found = |error| {
            checked(vec![Finding {
                error,
                code: "merkle",
                place: "byte 0".into(),
                message: "differs".into(),
            }])
        };
        let image = Path::new("a");
        let text = |opened, top: &Checked| match with_layers(image, opened, top) {
            Ok(opened) => panic!("no error, {}", opened.is_some()),
            Err(error) => error.causes().join(": "),
        };
        // The layers would be unchecked, and the image called clean.
        assert!(text(unreadable(), &checked(Vec::new())).contains("timed out"));
        assert!(text(unreadable(), &found(true)).contains("timed out"));
        assert!(text(damaged(), &checked(Vec::new())).contains("Merkle"));
        assert!(text(damaged(), &found(false)).contains("Merkle"));
        // Reported damage is no reason to stop.
        assert!(matches!(
            with_layers(image, damaged(), &found(true)),
            Ok(None)
        ));
    }
}
