//! The check of an image or a disk: its file, the file system in it, and the files below it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow::check::{self, CheckOptions, Finding, Findings, Place};
use bcow::format::{Use, compatible};
use bcow::{Image, OpenOptions, Storage, header_of};
use bcow_erofs::check as erofs_check;
use bcow_erofs::damage::{UnreadableRange, damaged_files, unreadable_ranges};
use bcow_erofs::reader::Filesystem;
use bcow_images::NameParts;
use bcow_images::disks::{lock_for_reading, open_for_repair};
use bcow_images::error::{CommandError, Context};
use bcow_images::image::{cannot_open, cannot_open_file};
use bcow_images::names::quoted;
use bcow_images::remote::Pinned;
use bcow_images::sandbox;
use bcow_oci::store::{Opened, Places, StoreError};
use bcow_oci::{Digest, LocalImage};
use bcow_sandbox::{Access, CapabilitySet};

use crate::backing::{self, BACKING_TABLE};
use crate::found::Found;
use crate::report::{CheckedFile, FsckReport, ReadCounts, Repairs};
use crate::tolerant::tolerant;
use crate::{Fsck, restore, unread_content};

/// A file to check: the image, or a layer below it.
struct FileToCheck {
    /// The name of the file in JSON, in the log, and in the line with its verdict.
    name: String,
    /// As [`CheckedFile::label`].
    label: Option<String>,
    path: PathBuf,
    storage: Arc<dyn Storage>,
    /// The expected digest.
    digest: Option<Digest>,
    /// The code of a finding if the digest does not match.
    digest_code: &'static str,
}

/// Repairs the image if asked, and checks it and the files below it.
pub fn check(asked: &Fsck<'_>) -> Result<FsckReport, CommandError> {
    refuse_options_of_uppers(asked)?;
    let stores = asked.stores.directories()?;
    if asked.repair.is_some() && asked.image.is_remote() {
        let usage = format!("cannot repair {}: remote images are read-only", asked.image);
        return Err(CommandError::usage(usage).hint("repair the file where it is, or a copy"));
    }
    let mut sandbox = match asked.repair {
        None => asked.sandbox.begin([asked.image], asked.stores)?,
        Some(_) => asked.sandbox.without("a repair writes to the file")?,
    };
    let found = Found::of(asked.image, &asked.stores.remote, Pinned::AsAsked)?;
    let places = Places {
        stores: &stores,
        named: asked.stores.backing_dirs()?,
        remote: found.remote_files(),
        ..Places::default()
    };
    let mut repairs = Repairs::default();
    if let Found::Here { name, located, .. } = &found {
        let file = &*located.file;
        // Another image must not be changed. A file without a readable header has no root yet.
        if header_of(file).is_some() {
            require_root(asked, file)?;
        }
        repairs = repair(asked, name, &located.path, places)?;
        require_root(asked, file)?;
        lock_for_reading(asked.image.shown(), file, asked.stores.share())?;
    }
    // Before the progress has a thread. The files below are not known yet.
    let all = (PathBuf::from("/"), Access::Read);
    let capabilities = CapabilitySet::DAC_READ_SEARCH;
    sandbox::complete(&mut sandbox, asked.stores, &[all], capabilities)?;
    asked.progress.phase("checking");
    let checked = check_all(asked, &found, places)?;
    let mut hints = hints(asked, &checked);
    if repairs.new_identity {
        hints.push(format!(
            "disks over this file do not open any more; its content has not changed, so \
             `bcow rebase --unsafe DISK -b {}` repairs each of them",
            asked.image.display()
        ));
    }
    Ok(FsckReport {
        shown: asked.image.shown().to_owned(),
        checked,
        repairs,
        data: asked.reads_data(),
        hints,
    })
}

/// Refuses the options that name the image of an upper.
fn refuse_options_of_uppers(asked: &Fsck<'_>) -> Result<(), CommandError> {
    if asked.lower.is_none() && asked.layers.layers.is_empty() {
        return Ok(());
    }
    let usage = format!(
        "{} is not the upper of a writable mount",
        asked.image.display()
    );
    Err(CommandError::usage(usage).hint("LOWER and --layer name the image of an upper"))
}

/// Restores and repairs the file, as far as the user asks for this.
fn repair(
    asked: &Fsck<'_>,
    name: &LocalImage,
    path: &Path,
    places: Places<'_>,
) -> Result<Repairs, CommandError> {
    let mut repairs = Repairs::default();
    let Some(repair) = asked.repair else {
        return Ok(repairs);
    };
    if let Some(from) = repair.from {
        asked.progress.phase("restoring");
        repairs.lines = restore::run(asked, name, path, from, places)?;
        repairs.of_damage = !repairs.lines.is_empty();
    }
    asked.progress.phase("repairing");
    let (file, _lock) = open_for_repair(asked.image.shown(), path)?;
    let done = check::repair(file);
    repairs.add(&done.context(|| format!("cannot repair {}", asked.image.display()))?);
    Ok(repairs)
}

/// Checks the file, and then the files below it, in this order.
fn check_all(
    asked: &Fsck<'_>,
    found: &Found,
    places: Places<'_>,
) -> Result<Vec<CheckedFile>, CommandError> {
    let shown = found.shown();
    let options = &asked.check_options();
    let (path, storage, digest) = match found {
        Found::Here { located, .. } => (&*located.path, found.storage(), located.digest.clone()),
        Found::There(_) => (shown, tolerant(found.storage()), None),
    };
    let target = FileToCheck {
        name: shown.display().to_string(),
        label: None,
        path: path.to_owned(),
        storage: Arc::clone(&storage),
        digest,
        digest_code: "blob-digest",
    };
    let mut files = vec![check_file(shown, target, options)?];
    let opened = found.open(storage, places);
    let Some(opened) = with_layers(shown, opened, &files[0].findings)? else {
        return Ok(files);
    };
    let mut problems: Vec<Finding> = opened
        .problems
        .iter()
        .map(|problem| Finding::error(problem.code(), BACKING_TABLE, problem.to_string()))
        .collect();
    if let Found::Here { .. } = found {
        for of_chain in backing::check(&opened.image, path, asked.stores)? {
            // Both lookups report a file by digest.
            if !problems
                .iter()
                .any(|known| known.message == of_chain.message)
            {
                problems.push(of_chain);
            }
        }
    }
    files[0].findings.extend(problems);
    let count = opened.below.len();
    for (index, layer) in opened.below.into_iter().enumerate() {
        let phase = format!("checking file {} of {count} below", index + 1);
        asked.progress.phase(&phase);
        let target = FileToCheck {
            name: layer.name,
            label: Some(layer.label),
            path: layer.path,
            storage: match found {
                Found::Here { .. } => layer.storage,
                Found::There(_) => tolerant(layer.storage),
            },
            digest: Some(layer.digest),
            digest_code: "backing-entry",
        };
        files.push(check_file(shown, target, options)?);
    }
    Ok(files)
}

/// The image with the files below it. `None` if damage that the check of its file has reported
/// hides which files these are; a damaged image may still name them. Any other failure is an error:
/// files below would go unchecked.
fn with_layers(
    image: &Path,
    opened: Result<Opened, StoreError>,
    top: &Findings,
) -> Result<Option<Opened>, CommandError> {
    match opened {
        Ok(opened) => Ok(Some(opened)),
        Err(StoreError::Open { source, .. }) if source.code().is_some() && !top.is_sound() => {
            Ok(None)
        }
        Err(error) => Err(cannot_open(image, &error)),
    }
}

/// Refuses a file whose header has another root hash than --root-hash.
fn require_root(asked: &Fsck<'_>, file: &std::fs::File) -> Result<(), CommandError> {
    let Some(root) = asked.stores.remote.root_hash else {
        return Ok(());
    };
    let tree = header_of(file).and_then(|header| header.merkle);
    if tree.is_some_and(|tree| tree.root == root.0) {
        return Ok(());
    }
    let cannot = CommandError::new(format!("cannot check {}", asked.image.display()));
    Err(cannot.caused_by_text(format!("its root hash is not {root}")))
}

/// Limit on findings about files with damaged content in one file. The others are counted.
const MAX_FILES: usize = 1000;

/// Checks one file, and the file system in it.
fn check_file(
    image: &Path,
    target: FileToCheck,
    options: &CheckOptions,
) -> Result<CheckedFile, CommandError> {
    let path = &target.path;
    let cannot = || format!("cannot check {}", path.display());
    let begun = std::time::Instant::now();
    tracing::info!(
        "{}: checking {}, {}, with {} threads",
        target.name,
        path.display(),
        if options.data { "every byte" } else { "header and tables" },
        options.threads
    );
    let report = check::check(target.storage.clone(), options).context(cannot)?;
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
        let opened = Image::open_storage(target.storage.clone(), &OpenOptions::default());
        return Err(match opened {
            Err(error) => cannot_open_file(image, path, &error),
            Ok(_) => CommandError::new(format!("{} changed during the check", path.display())),
        });
    }
    let mut findings = Findings::default();
    if let (Some(expected), true) = (&target.digest, options.data) {
        let found = Digest::of_storage(&*target.storage, expected.algorithm()).context(cannot)?;
        if found != *expected {
            let message = format!("its digest is {found}, not {expected}");
            findings.add(Finding::error(target.digest_code, "file", message));
        }
    }
    let counts = ReadCounts::of(&report);
    // With --data, all blocks were read. If there was no error, no file is damaged. Otherwise a
    // second read finds out which files are damaged.
    let read_files = options.data && !report.is_sound();
    findings.append(report.findings);
    let inodes = check_tree(path, target.storage.clone(), read_files, &mut findings)?;
    Ok(CheckedFile {
        name: target.name,
        label: target.label,
        findings,
        path: target.path.to_string_lossy().into_owned(),
        storage: Some(target.storage),
        digest: target.digest,
        counts: Some(counts),
        inodes,
        writable: report.writable,
        upper: None,
    })
}

/// Checks the file system in the file. Returns [`CheckedFile::inodes`].
fn check_tree(
    path: &Path,
    storage: Arc<dyn Storage>,
    read_files: bool,
    findings: &mut Findings,
) -> Result<Option<u64>, CommandError> {
    let image = match Image::open_storage(storage, &OpenOptions::default()) {
        Ok(image) => image,
        // The check of the structure has already reported this damage.
        Err(error) if error.code().is_some() && !findings.is_empty() => return Ok(None),
        Err(error) => return Err(cannot_open_file(path, path, &error)),
    };
    if !image.header().features.has_compatible(compatible::EROFS) {
        return Ok(None);
    }
    let filesystem = match Filesystem::open(image.clone()) {
        Ok(filesystem) => filesystem,
        Err(error) => {
            let message = error.to_string();
            findings.add(Finding::error("erofs-superblock", "superblock", message));
            return Ok(None);
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
    findings.extend(found);
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
        findings.extend(damaged.files.iter().map(|file| {
            let message = format!(
                "cannot be read from byte {} on: {}",
                file.offset, file.range.error
            );
            Finding::error("file-data", quoted(&file.path), message)
        }));
        findings.omit_errors(damaged.omitted);
    }
    Ok(Some(filesystem.superblock().inodes))
}

/// Recovery commands. A test runs each of these commands.
fn hints(asked: &Fsck<'_>, files: &[CheckedFile]) -> Vec<String> {
    let image = asked.image;
    let is_damaged = |file: &&CheckedFile| !file.findings.is_sound();
    let mut damaged = files.iter().filter(is_damaged).peekable();
    if damaged.peek().is_none() {
        // A repair often follows an accident, which may have damaged data too.
        let is_unread = asked.repair.is_some() && !asked.reads_data();
        return Vec::from_iter(is_unread.then(|| unread_content(image)));
    }
    let mut findings = damaged.flat_map(|file| &*file.findings);
    if asked.repair.is_none() && findings.all(|finding| finding.repair.is_some()) {
        return vec![format!("`bcow fsck --repair {image}` repairs this")];
    }
    let top = &files[0];
    let Some(storage) = &top.storage else {
        return Vec::new();
    };
    let header = header_of(&**storage);
    let has_header = header.is_some();
    if header.is_some_and(|header| header.purpose != Use::Image) {
        let mut errors = top.findings.iter().filter(|finding| finding.is_error());
        if errors.all(is_of_backing) {
            return vec![
                "name the directory of the backing with --backing-dir, or accept another file as \
                 the backing with `bcow rebase --unsafe`"
                    .to_owned(),
            ];
        }
        // If the disk does not open, none of its data can be read.
        return match Image::open_storage(storage.clone(), &OpenOptions::default()) {
            Ok(_) => vec![format!(
                "these commands save the readable data of the disk: \
                 `bcow serve --read-only {image} --socket SOCKET` and \
                 `qemu-img convert --salvage -O raw 'nbd+unix:///?socket=SOCKET' SAVED.raw`"
            )],
            Err(_) => Vec::new(),
        };
    }
    let mut hints = Vec::new();
    match image.parts() {
        NameParts::Url(_) => hints.push(
            "replace the damaged file on the server: `bcow fsck --repair --from COPY FILE` \
             restores a copy on this machine, and `bcow convert` creates the image again from its \
             source"
                .to_owned(),
        ),
        NameParts::File(_) | NameParts::Bcow(_) => {
            hints.push("`bcow convert` creates the image again from its source".to_owned());
            if asked.copy().is_none() && has_header {
                hints.push(format!(
                    "`bcow fsck --repair --from COPY {image}` restores it from another copy"
                ));
            }
        }
        _ => {
            // A stack is not damaged itself if its layers are missing or do not match.
            let is_bad = |finding: &Finding| finding.is_error() && !is_of_backing(finding);
            let bad = files.iter().filter(|file| file.findings.iter().any(is_bad));
            hints.extend(bad.map(|file| {
                format!(
                    "the damaged file is {}: remove it before you copy the image here again with \
                     skopeo or a similar tool, which keeps existing files",
                    file.path
                )
            }));
            // A repair does not restore a missing file.
            let can_restore = asked.copy().is_none() && !hints.is_empty();
            hints.push(format!(
                "`bcow convert SOURCE {image}` replaces damaged and missing files"
            ));
            if can_restore {
                hints.push(format!(
                    "`bcow fsck --repair --from COPY {image}` restores damaged files from another \
                     copy of the image"
                ));
            }
        }
    }
    if top.inodes.is_some() {
        hints.push(format!(
            "`bcow extract --keep-going {image} DIR` extracts the readable files"
        ));
    }
    hints
}

fn is_of_backing(finding: &Finding) -> bool {
    matches!(&finding.place, Place::Text(place) if place == BACKING_TABLE)
}

#[cfg(test)]
mod tests {
    use bcow::Error;
    use bcow::check::Severity;

    use super::*;

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
        let found = |severity| {
            let mut findings = Findings::default();
            findings.add(Finding::error("merkle", "byte 0", "differs").of(severity));
            findings
        };
        let clean = Findings::default;
        let image = Path::new("a");
        let text = |opened, top: &Findings| match with_layers(image, opened, top) {
            Ok(opened) => panic!("no error, {}", opened.is_some()),
            Err(error) => error.causes().join(": "),
        };
        // The layers would be unchecked, and the image called clean.
        assert!(text(unreadable(), &clean()).contains("timed out"));
        assert!(text(unreadable(), &found(Severity::Error)).contains("timed out"));
        assert!(text(damaged(), &clean()).contains("Merkle"));
        assert!(text(damaged(), &found(Severity::Warning)).contains("Merkle"));
        // Reported damage is no reason to stop.
        assert!(matches!(
            with_layers(image, damaged(), &found(Severity::Error)),
            Ok(None)
        ));
    }
}
