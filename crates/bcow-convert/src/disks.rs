//! Disks that are sealed, compacted, or committed into their backing.

use std::fs::File;
use std::path::Path;

use bcow::format::{State, Use};
use bcow::operation::{CommitError, Committed, RewriteOptions, commit_into_backing};
use bcow::{BlockDevice, Compression, Image, Keep, OpenOptions};
use bcow_images::Name;
use bcow_images::disks::{
    Below, cannot_lock, lock_disk, lock_note, open_to_replace, require_backing_beside,
};
use bcow_images::error::{CommandError, Context};
use bcow_images::image::{OpenImage, StoreArgs, cannot_open_file};
use bcow_images::new_file::NewFile;
use serde::Serialize;

use crate::options::Encoding;
use crate::rewrite::{metadata, operation_failure, write_new};
use crate::work::Work;

/// A new sealed disk.
#[derive(Debug, Serialize)]
pub struct SealedDisk {
    /// Size of the disk in bytes.
    pub size: u64,
    /// Length of its file in bytes.
    pub file_bytes: u64,
    /// The name of its backing.
    pub backing: Option<String>,
}

/// Writes the own or the visible content of the disk `name` into a new sealed file.
pub fn seal_into(
    name: &Name,
    output: &Path,
    keep: Keep,
    encoding: &Encoding,
    stores: &StoreArgs,
    work: &Work<'_>,
) -> Result<SealedDisk, CommandError> {
    let opened = OpenImage::open(name, &[], stores)?;
    let image = opened.image();
    if image.header().purpose != Use::Disk {
        return Err(
            CommandError::new(format!("cannot write {}", output.display()))
                .caused_by_text(format!("{} is not a disk", name.display()))
                .hint("an image is sealed already: `bcow copy` copies it"),
        );
    }
    let new = NewFile::create_new(output)?;
    if keep == Keep::Own {
        require_backing_beside(image, output, stores)?;
    }
    seal(image, name.shown(), new, output, keep, encoding, work)
}

/// Replaces the disk `name` by a sealed one, when that is complete.
pub fn seal_in_place(
    name: &Name,
    keep: Keep,
    encoding: &Encoding,
    stores: &StoreArgs,
    work: &Work<'_>,
) -> Result<SealedDisk, CommandError> {
    // The file does not change, but the lock keeps writers away until the new file has replaced it.
    let old = open_to_replace(name, stores, "seal")?;
    let new = NewFile::replace(old.file.path())?;
    new.inner()
        .take_attributes(old.file.file())
        .context(|| format!("cannot write {}", name.display()))?;
    let shown = name.shown();
    seal(&old.image, shown, new, shown, keep, encoding, work)
}

fn seal(
    image: &Image,
    name: &Path,
    new: NewFile,
    output: &Path,
    keep: Keep,
    encoding: &Encoding,
    work: &Work<'_>,
) -> Result<SealedDisk, CommandError> {
    let compression = encoding.compression(Compression::Zstd { level: 3 })?;
    let block_bytes = encoding.block_bytes;
    let options = RewriteOptions {
        compression,
        block_bytes,
        threads: encoding.threads(),
        verify: encoding.verify,
        metadata: metadata(compression, block_bytes, None)?,
        ..RewriteOptions::sealed(image, keep)
    };
    let backing = options.form.backing.as_ref();
    let backing = backing.map(|entry| entry.name.to_string());
    let size = options.form.size;
    let written = write_new(image, name, &new, output, options, work).map_err(|error| {
        if keep == Keep::Own && image.has_windows() {
            error.hint("`bcow seal --flatten` stores all content in one file")
        } else {
            error
        }
    })?;
    new.complete()?;
    Ok(SealedDisk {
        size,
        file_bytes: written.file_bytes(),
        backing,
    })
}

/// A disk that was compacted.
#[derive(Debug)]
pub struct CompactedDisk {
    /// Length of the new file in bytes.
    pub file_bytes: u64,
    /// Length of the old file in bytes.
    pub before_bytes: u64,
}

/// Writes the disk `name` without its unused space, to `output` or in its own place.
pub fn compact(
    name: &Name,
    output: Option<&Path>,
    encoding: &Encoding,
    stores: &StoreArgs,
    work: &Work<'_>,
) -> Result<CompactedDisk, CommandError> {
    let Some(output) = output else {
        let old = open_to_replace(name, stores, "compact")?;
        let path = old.file.path();
        let new = NewFile::replace(path)?;
        return write_compacted(name, &old.image, old.file.file(), new, path, encoding, work);
    };
    let opened = OpenImage::open(name, &[], stores)?;
    let image = opened.image();
    if (image.header().purpose, image.header().state) != (Use::Disk, State::Writable) {
        return Err(
            CommandError::new(format!("cannot compact {}", name.display()))
                .caused_by_text("it is not a writable disk")
                .hint("a sealed file has no unused space"),
        );
    }
    let path = opened.files().remove(0);
    let file = File::open(path).context(|| format!("cannot read {}", name.display()))?;
    let new = NewFile::create_new(output)?;
    require_backing_beside(image, output, stores)?;
    write_compacted(name, image, &file, new, output, encoding, work)
}

/// Writes the disk `image`, which is in `file`, into a new file, which becomes `output`.
fn write_compacted(
    name: &Name,
    image: &Image,
    file: &File,
    new: NewFile,
    output: &Path,
    encoding: &Encoding,
    work: &Work<'_>,
) -> Result<CompactedDisk, CommandError> {
    let compression = encoding.compression(Compression::None)?;
    let cannot_read = || format!("cannot read {}", name.display());
    let mut options = RewriteOptions::compacted(image, compression).context(cannot_read)?;
    options.threads = encoding.threads();
    new.inner()
        .take_attributes(file)
        .context(|| format!("cannot write {}", output.display()))?;
    let before = file.metadata().context(cannot_read)?;
    let written = write_new(image, name.shown(), &new, output, options, work)?;
    new.complete()?;
    Ok(CompactedDisk {
        file_bytes: written.file_bytes(),
        before_bytes: before.len(),
    })
}

/// Writes the own data of the disk `name` into its backing. The disk is empty afterwards.
pub fn commit_disk(
    name: &Name,
    stores: &StoreArgs,
    work: &Work<'_>,
) -> Result<Committed, CommandError> {
    let file = lock_disk(name, "commit")?;
    let below = Below::new(stores, &OpenOptions::default())?;
    commit_into_backing(&file, &below.policy(), &lock_note("commit"), work)
        .map_err(|error| cannot_commit(name, &below, error))
}

fn cannot_commit(name: &Name, below: &Below<'_>, error: CommitError) -> CommandError {
    let cannot = || format!("cannot commit {}", name.display());
    match error {
        CommitError::Disk(error) => cannot_open_file(name.shown(), name.shown(), &error),
        CommitError::BackingByDigest => CommandError::new(cannot())
            .caused_by(&error)
            .hint("`bcow commit DISK NEW` makes a layer on top of the backing"),
        CommitError::Url(_) => CommandError::new(cannot())
            .caused_by(&error)
            .hint("`bcow commit DISK NEW` makes a layer on top of it, and `bcow copy` copies it"),
        CommitError::View => CommandError::new(cannot())
            .caused_by(&error)
            .hint("`bcow commit DISK NEW` makes a layer of the disk on top of the view"),
        CommitError::Chain(problem) => {
            let problem = below.first_problem(&problem);
            problem.cause_of(CommandError::new(cannot()))
        }
        CommitError::Lock { path, source } => cannot_lock(&path, &path, &source).hint(format!(
            "`bcow commit {} NEW.bcow` makes a layer on top of the backing instead",
            name.display()
        )),
        CommitError::Backing {
            path,
            source,
            below: problem,
        } => below.cannot_open_disk(&path, &source, problem.as_ref()),
        CommitError::Operation(error) => operation_failure(&error, cannot, cannot),
        error => CommandError::new(cannot()).caused_by(&error),
    }
}
