//! Backings of new disks: by which name a disk records them.

use std::path::Path;
use std::sync::Arc;

use bcow::format::{BackingEntry, BackingName, State};
use bcow::operation::{self, NameError, name_backing};
use bcow::{BlockDevice, Image, OpenOptions};
use bcow_oci::Digest;
use bcow_oci::digest::Algorithm;
use bcow_oci::store;

use crate::args::IMAGE;
use crate::disks::{Below, lost_backing};
use crate::error::{CommandError, Context};
use crate::image::{OpenImage, StoreArgs, cannot_open};
use crate::name::{Name, NameParts};

/// The entry of the backing `name` for the disk at `disk`, and the content of the backing.
pub fn backing(
    name: &Name,
    by_digest: bool,
    disk: &Path,
    stores: &StoreArgs,
    options: &OpenOptions,
) -> Result<(BackingEntry, Arc<Image>), CommandError> {
    let image = OpenImage::open_with(name, &[], stores, options, None)?;
    let device = image.image().clone();
    let size = device.size();
    let is_by_name = name.path().is_some() && !by_digest;
    if !is_by_name && let Some(problem) = lost_backing(&device) {
        let cannot = format!("cannot make {} a backing", name.display());
        let error = CommandError::new(cannot).caused_by_text(problem);
        let first = if by_digest { "leave out --by-digest, or " } else { "" };
        return Err(error.hint(format!(
            "{first}store all its content in one file with `bcow seal --flatten`"
        )));
    }
    match name.parts() {
        _ if name.is_remote() => Ok((by_url(&image, by_digest)?, device)),
        NameParts::File(path) | NameParts::Bcow(path) if !by_digest => {
            let entry = by_name(path, disk, stores, options, &image)?;
            Ok((entry, device))
        }
        _ => {
            let cannot = || format!("cannot make {} a backing", name.display());
            if device.header().state != State::Sealed {
                return Err(CommandError::new(cannot())
                    .caused_by_text("it is writable, so its digest changes")
                    .hint("leave out --by-digest, or make it immutable with `bcow seal`"));
            }
            let Some(local) = name.local() else {
                return Err(IMAGE.refuse(name).into());
            };
            let located =
                store::locate(&local).map_err(|error| cannot_open(name.shown(), &error))?;
            let digest = match located.digest {
                Some(digest) => digest,
                None => Digest::of_storage(&*located.file, Algorithm::Sha256).context(cannot)?,
            };
            let digest = digest.sha256().ok_or_else(|| {
                CommandError::new(cannot()).caused_by_text("its digest is not SHA-256")
            })?;
            let entry = BackingEntry {
                name: BackingName::Digest(digest),
                size,
            };
            Ok((entry, device))
        }
    }
}

/// Fails if a disk at `disk` would not find the file at `below`, whose links are resolved, by its
/// file name.
pub fn require_in_reach(disk: &Path, below: &Path, stores: &StoreArgs) -> Result<(), CommandError> {
    let place = Below::new(stores, &OpenOptions::default())?;
    operation::require_in_reach(disk, below, &place.policy())
        .map_err(|error| not_named(below, error, &place))
}

/// The entry of a remote image, with its URL.
fn by_url(image: &OpenImage, by_digest: bool) -> Result<BackingEntry, CommandError> {
    let name = image.path().display();
    let cannot = format!("cannot make {name} a backing");
    if by_digest {
        return Err(CommandError::usage(format!("{cannot} by its digest"))
            .caused_by_text("it is on another machine")
            .hint("leave out --by-digest: the disk records the root hash of the image"));
    }
    let header = image.image().header();
    let (Some(url), Some(tree)) = (image.lasting_url(), &header.merkle) else {
        return Err(CommandError::new(cannot)
            .caused_by_text("a disk records only a URL without a user name, a query or a fragment")
            .hint("give such a URL, or `bcow copy` the image to this machine"));
    };
    Ok(BackingEntry {
        name: BackingName::Url {
            url: url.to_owned(),
            merkle_root: tree.root,
        },
        size: header.size,
    })
}

/// The entry of the backing at `path`, with its file name.
fn by_name(
    path: &Path,
    disk: &Path,
    stores: &StoreArgs,
    options: &OpenOptions,
    image: &OpenImage,
) -> Result<BackingEntry, CommandError> {
    let below = Below::new(stores, options)?;
    let named = name_backing(disk, path, image.image(), &below.policy());
    named.map_err(|error| not_named(path, error, &below))
}

/// The error of a backing at `path` that a disk cannot name.
fn not_named(path: &Path, error: NameError, below: &Below<'_>) -> CommandError {
    let cannot = CommandError::new(format!("cannot make {} a backing", path.display()));
    match error {
        NameError::OutOfReach { ref directory, .. } => cannot.caused_by(&error).hint(format!(
            "make the disk in {0}, or allow that directory with --backing-dir {0}, here and \
             wherever the disk is used",
            directory.display()
        )),
        NameError::Chain(problem) => below.first_problem(&problem).cause_of(cannot),
        error => cannot.caused_by(&error),
    }
}
