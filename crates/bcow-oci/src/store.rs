//! Opens images in BCoW form, and finds the files below them.
//!
//! An image names the files below it by digest. The finder looks a digest up in the layout that
//! contains the image, then in the stores that the user names. Where the image also has a file name
//! for a digest, the finder looks for that name: in the directory of that image, in the directories
//! that the user names, then in the stores. Last come the files that the user named, and the
//! repository from which the image comes. No path is read from an image.
//!
//! The finder compares the header of each file that it finds (length of the file, Merkle root) with
//! the image's metadata. If the metadata does not describe the file, the finder compares the digest
//! of the whole file. In both cases, it compares the size of the address space with the backing
//! entry.

mod candidate;
mod error;
mod finder;
mod locate;
mod recorded;
mod remote;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow::chain::{Digests, directory_of};
use bcow::format::{BackingEntry, BackingName};
use bcow::{Image, OpenOptions, Storage, Verify};

use crate::digest::Digest;
use crate::name::LocalImage;
use finder::{Finder, FinderResolver, Lookup};
use locate::check_digest;
use recorded::recorded_layers;

pub use error::{LayerProblem, StoreError};
pub use finder::{BelowFile, LayerFile, Places};
pub use locate::{Located, locate};
pub use recorded::{RecordedBacking, RecordedFile, recorded_backings};
pub use remote::{RemoteFailure, RemoteFiles};

/// An open image.
pub struct Opened {
    /// The address space.
    pub image: Arc<Image>,
    /// The path of the image's file; for an image of another machine, its name for messages.
    pub path: PathBuf,
    /// The layers that the image's metadata describes, lowest first; empty if there are none or the
    /// metadata cannot be read.
    pub layers: Vec<StackLayer>,
    /// Every file below the image that was found, each once: first the layers in their order, then
    /// the other files in the order of their digests.
    pub below: Vec<BelowFile>,
    /// The problems of the files below the image, in the order of the lookups. A read of a block
    /// that such a file has to supply fails.
    pub problems: Vec<Arc<LayerProblem>>,
    /// Number of files on the longest path from the image downwards, the image included.
    pub height: u32,
}

/// A layer of a stack.
pub struct StackLayer {
    /// The layer, as the stack's metadata records it.
    pub recorded: RecordedFile,
    /// The file, if it was found and matches `recorded`.
    pub file: Option<LayerFile>,
}

impl Opened {
    /// Returns [`StoreError::Layers`] if a file below the image is missing or wrong.
    pub fn require_all(&self) -> Result<(), StoreError> {
        match &self.problems[..] {
            [] => Ok(()),
            [first, others @ ..] => Err(StoreError::Layers {
                first: first.clone(),
                others: others.len(),
            }),
        }
    }

    /// Whether the image's metadata describes layers.
    pub fn is_stack(&self) -> bool {
        !self.layers.is_empty()
    }
}

/// Opens the image `name`. Files below the image are looked up in the layout that contains the
/// image, then in `places`.
///
/// A layer that is missing or wrong is not an error of this function: [`Opened::problems`] lists
/// it. If `name` is an image or a blob of a layout, [`Verify::Merkle`] also checks the digest of
/// its file.
pub fn open(
    name: &LocalImage,
    places: Places<'_>,
    options: &OpenOptions,
) -> Result<Opened, StoreError> {
    let found = locate(name)?;
    if let (Some(digest), Verify::Merkle) = (&found.digest, options.verify) {
        check_digest(&found, digest)?;
    }
    let directory = directory_of(&found.path);
    let finder = Finder::new(found.layout.as_deref(), places, options.clone());
    open_found(found.path, found.file, Some(&directory), finder, options)
}

/// Opens the image in `storage`, which comes from another machine and is called `name` in messages.
/// As [`open`] otherwise, but the image has no directory in which files are looked up by name.
pub fn open_remote(
    name: PathBuf,
    storage: Arc<dyn Storage>,
    places: Places<'_>,
    options: &OpenOptions,
) -> Result<Opened, StoreError> {
    let finder = Finder::new(None, places, options.clone());
    open_found(name, storage, None, finder, options)
}

fn open_found(
    path: PathBuf,
    storage: Arc<dyn Storage>,
    directory: Option<&Path>,
    finder: Finder,
    options: &OpenOptions,
) -> Result<Opened, StoreError> {
    let cannot_open = |source| StoreError::Open {
        path: path.clone(),
        source,
    };
    // The metadata describes the files below, so it is read before they are opened.
    let alone = Image::open_storage(storage.clone(), options).map_err(cannot_open)?;
    let recorded = match alone.metadata() {
        Ok(metadata) => {
            finder.record_backings(&recorded_backings(&metadata), directory);
            recorded_layers(&metadata)
        }
        // An unreadable metadata section is not an error here: the files below are then hashed
        // whole.
        Err(error) if error.code().is_some() => Vec::new(),
        Err(error) => return Err(cannot_open(error)),
    };
    finder.record_layers(&recorded);
    finder.open_remote_files(&alone);
    drop(alone);
    let resolver = FinderResolver::new(&finder, 0);
    let image =
        Image::open_with_backings(storage.clone(), options, &resolver).map_err(cannot_open)?;
    let height = resolver.height() + 1;
    let below = finder.open_files(&recorded);
    let lookups = finder.lookups.into_inner();
    let layers = recorded
        .into_iter()
        .map(|recorded| StackLayer {
            file: match lookups.get(&recorded.digest) {
                Some(Lookup::Open(file, _)) => Some(file.clone()),
                _ => None,
            },
            recorded,
        })
        .collect();
    Ok(Opened {
        image,
        path,
        layers,
        below,
        problems: finder.problems.into_inner(),
        height,
    })
}

/// A lookup of files by digest in the places that the user allows.
pub struct Stores(Finder);

impl Stores {
    /// Looks in `places`.
    pub fn new(places: Places<'_>, options: OpenOptions) -> Self {
        Stores(Finder::new(None, places, options))
    }

    /// The problems of the files that were looked up, in the order of the lookups.
    pub fn problems(&self) -> Vec<Arc<LayerProblem>> {
        self.0.problems.borrow().clone()
    }
}

impl Digests for Stores {
    fn learn(&self, image: &Image, directory: &Path) {
        self.0.record_metadata(image, Some(directory));
    }

    fn find(&self, backing: &BackingEntry, depth: u32) -> Option<(Arc<Image>, u32)> {
        let BackingName::Digest(digest) = backing.name else {
            return None;
        };
        let digest = Digest::from_sha256(digest);
        let before = self.0.problems.borrow().len();
        let (file, height) = self.0.find(&digest, backing.size, depth)?;
        // A file is available if the files below it are.
        let is_complete = self.0.problems.borrow().len() == before;
        is_complete.then_some((file.image, height))
    }
}
