//! Opens images in BCoW form, and finds the files below them.
//!
//! An image names the files below it by digest. The finder looks a digest up in the layout that
//! contains the image, then in the stores that the user names. Where the image also has a file name
//! for a digest, the finder looks for that name: in the directory of the image, in the directories
//! that the user names, then in the stores. No path is read from an image.
//!
//! The finder checks each file that it finds against the image's metadata: the length of the file
//! and the root of its hash tree, both from the file's header. If the metadata does not describe
//! the file, the finder hashes the whole file.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow::chain::{self, Digests, Named, directory_of};
use bcow::format::{BackingEntry, BackingName, is_plain_name};
use bcow::{BackingResolver, BlockDevice, Image, OpenOptions, Storage, Verify};

use rustix::io::Errno;

use crate::archive::Files;
use crate::blob::open_regular;
use crate::digest::Digest;
use crate::error::ConvertError;
use crate::layout;
use crate::name::ImageName;

/// Largest number of files below a file, one below the other (spec section 8).
const MAX_DEPTH: u32 = 64;

/// An open image.
pub struct Opened {
    /// The address space.
    pub image: Arc<Image>,
    /// The path of the image's file.
    pub path: PathBuf,
    /// The layers of a stack, lowest first; empty for an image that is not a stack.
    pub layers: Vec<StackLayer>,
    /// Every file below the image that was found, each once: first the layers in their order, then
    /// the other files in the order of their digests.
    pub below: Vec<BelowFile>,
    /// The problems of the files below the image, in the order of the lookups. A read of a block
    /// that such a file has to supply fails.
    pub problems: Vec<Arc<LayerProblem>>,
}

/// A layer of a stack.
pub struct StackLayer {
    /// What the stack's metadata records about the layer.
    pub facts: LayerFacts,
    /// The file, if it was found and matches `facts`.
    pub file: Option<LayerFile>,
}

/// What identifies a layer, from a stack's metadata (spec section 13).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerFacts {
    /// Digest of the file.
    pub digest: Digest,
    /// `file_bytes` of the file's header.
    pub file_bytes: u64,
    /// `merkle_root` of the file's header.
    pub merkle_root: [u8; 32],
}

/// What an image's metadata records about a file below it that the image names by digest (spec
/// section 13, `backings`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackingFacts {
    /// What identifies the file.
    pub facts: LayerFacts,
    /// The file name that the file had when the image was written.
    pub name: Option<String>,
}

/// Where the user allows bcow to look for files below an image.
#[derive(Clone, Copy, Default)]
pub struct Places<'p> {
    /// OCI layouts, and directories of files named by their digests.
    pub stores: &'p [PathBuf],
    /// Directories to search by file name, besides those of the image and the stores.
    pub named: &'p [PathBuf],
    /// Files that the user named. Each is a candidate for every digest.
    pub files: &'p [PathBuf],
    /// The place on another machine from which the image comes. It is searched last.
    pub remote: Option<&'p Arc<dyn RemoteFiles>>,
}

/// A place on another machine that has files by digest.
pub trait RemoteFiles: Send + Sync {
    /// The name of the file with this digest, for messages.
    fn name(&self, digest: &Digest) -> PathBuf;

    /// Opens the file with this digest; `None` if the place does not have it. Every byte that the
    /// storage returns is checked against the root hash in `facts`.
    fn open(
        &self,
        digest: &Digest,
        facts: &LayerFacts,
    ) -> Result<Option<Arc<dyn Storage>>, RemoteFailure>;
}

/// The cause for which a file of another machine does not open.
pub type RemoteFailure = Box<dyn std::error::Error + Send + Sync>;

/// A file that was found by its digest or its name.
#[derive(Clone)]
pub struct LayerFile {
    /// The path of the file.
    pub path: PathBuf,
    /// The bytes of the file.
    pub storage: Arc<dyn Storage>,
    /// The address space of the file.
    pub image: Arc<Image>,
}

/// A file below an image.
pub struct BelowFile {
    /// A short name: `layer 2 of 5` or `backing sha256:0123456789ab`.
    pub label: String,
    /// The name in messages: `layer 2 of 5 (sha256:...)`, `backing "NAME" (sha256:...)` or `backing
    /// sha256:...`.
    pub name: String,
    /// The digest of the file.
    pub digest: Digest,
    /// The path of the file.
    pub path: PathBuf,
    /// The bytes of the file.
    pub storage: Arc<dyn Storage>,
}

/// An image could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The layout is missing, unreadable or invalid.
    #[error(transparent)]
    Layout(#[from] ConvertError),
    /// The image of the layout is not in BCoW form.
    #[error("{place} is an ordinary OCI image")]
    OrdinaryImage {
        /// The manifest.
        place: String,
    },
    /// The image is on another machine.
    #[error("this command does not read images from other machines")]
    NotLocal,
    /// The layout does not have this blob.
    #[error("{} has no blob {digest}", directory.display())]
    NoSuchBlob {
        /// The layout.
        directory: PathBuf,
        /// The digest that was asked for.
        digest: Digest,
    },
    /// The file does not open as an image.
    #[error("cannot open {}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: bcow::Error,
    },
    /// Files below the image are missing or wrong.
    #[error("{first}{}", further(*others))]
    Layers {
        /// The first of the problems.
        first: Arc<LayerProblem>,
        /// How many more problems there are.
        others: usize,
    },
}

/// The problem of a file below an image. `name` is the file's name in messages; see
/// [`BelowFile::name`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayerProblem {
    /// No place has the file.
    #[error("{name} is missing{}", searched_in(places))]
    Missing {
        /// The name of the file.
        name: String,
        /// The directories that were searched.
        places: Vec<PathBuf>,
    },
    /// The file is there, but does not open.
    #[error("cannot open {name} in {}: {source}", path.display())]
    Open {
        /// The name of the file.
        name: String,
        /// The path of the file.
        path: PathBuf,
        /// The cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A file is there, but it is a different file.
    #[error("{} is not {name}: its {what} is {found}, not {expected}", path.display())]
    Wrong {
        /// The name of the expected file.
        name: String,
        /// The path of the file that is there.
        path: PathBuf,
        /// The property that differs.
        what: &'static str,
        /// The value in the file that is there.
        found: String,
        /// The expected value.
        expected: String,
    },
    /// More than 64 files lie one below the other, or a file is below itself.
    #[error("more than {MAX_DEPTH} files, one below the other, end in {name}")]
    TooDeep {
        /// The name of the file.
        name: String,
    },
}

fn further(others: usize) -> String {
    match others {
        0 => String::new(),
        1 => ", and 1 more is missing or wrong".to_owned(),
        others => format!(", and {others} more are missing or wrong"),
    }
}

fn searched_in(places: &[PathBuf]) -> String {
    let places: Vec<String> = places.iter().map(|p| p.display().to_string()).collect();
    match &places[..] {
        [] => String::new(),
        places => format!("; searched in {}", places.join(", ")),
    }
}

impl LayerProblem {
    /// A stable code, for the findings of `bcow check`.
    pub fn code(&self) -> &'static str {
        match self {
            LayerProblem::Missing { .. } => "backing-missing",
            LayerProblem::Open { .. } => "backing-unreadable",
            LayerProblem::Wrong { .. } | LayerProblem::TooDeep { .. } => "backing-entry",
        }
    }

    /// The name of the file that is missing or wrong.
    pub fn name(&self) -> &str {
        match self {
            LayerProblem::Missing { name, .. }
            | LayerProblem::Open { name, .. }
            | LayerProblem::Wrong { name, .. }
            | LayerProblem::TooDeep { name } => name,
        }
    }

    /// A hint for the user.
    pub fn hint(&self) -> &'static str {
        match self {
            LayerProblem::Missing { .. } => {
                "copy it from the origin of the image, or name its directory with --store"
            }
            LayerProblem::Open { source, .. }
                if source
                    .downcast_ref::<io::Error>()
                    .and_then(io::Error::raw_os_error)
                    .is_some_and(|number| {
                        [Errno::MFILE, Errno::NFILE].contains(&Errno::from_raw_os_error(number))
                    }) =>
            {
                "every layer takes a file descriptor; raise the limit (ulimit -n)"
            }
            LayerProblem::Open { .. } | LayerProblem::Wrong { .. } => {
                "copy it again from the origin of the image, or name the directory of the right \
                 file with --store"
            }
            LayerProblem::TooDeep { .. } => "convert the image again",
        }
    }
}

impl StoreError {
    /// A hint for the user, if there is one.
    pub fn hint(&self) -> Option<String> {
        match self {
            StoreError::Layout(error) => error.hint(),
            StoreError::OrdinaryImage { .. } => Some(
                "`bcow convert` makes a BCoW image of it, in one file or layer by layer".into(),
            ),
            StoreError::NotLocal => {
                Some("`bcow convert URL FILE.bcow` copies it to this machine".into())
            }
            StoreError::NoSuchBlob { .. } | StoreError::Open { .. } => None,
            StoreError::Layers { first, .. } => Some(first.hint().into()),
        }
    }
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

    /// Whether the image is a stack of layers.
    pub fn is_stack(&self) -> bool {
        !self.layers.is_empty()
    }
}

/// Opens the image `name`. Files below the image are looked up in the layout that contains the
/// image, then in `places`.
///
/// A layer that is missing or wrong is not an error of this function: [`Opened::problems`] lists
/// it. With [`Verify::Merkle`] the function also checks the digest of a layout's blob.
pub fn open(
    name: &ImageName,
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
/// As [`open`] otherwise. Files are looked up by name only in the directories that the user names.
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
    let facts = Image::open_storage(storage.clone(), options)
        .and_then(|image| match image.metadata() {
            Ok(metadata) => {
                finder.record_backings(&backing_facts(&metadata), directory);
                Ok(stack_facts(&metadata))
            }
            // An unreadable metadata section is not an error here: the files below are then hashed
            // whole.
            Err(error) if error.code().is_some() => Ok(Vec::new()),
            Err(error) => Err(error),
        })
        .map_err(cannot_open)?;
    finder.record_layers(&facts);
    let image =
        Image::open_with_backings(storage.clone(), options, &FinderResolver::new(&finder, 0))
            .map_err(cannot_open)?;
    let below = finder.below(&facts);
    let known = finder.lookups.into_inner();
    let layers = facts
        .into_iter()
        .map(|facts| StackLayer {
            file: match known.get(&facts.digest) {
                Some(Lookup::Open(file, _)) => Some(file.clone()),
                _ => None,
            },
            facts,
        })
        .collect();
    Ok(Opened {
        image,
        path,
        layers,
        below,
        problems: finder.problems.into_inner(),
    })
}

/// The file of an image name.
#[derive(Debug)]
pub struct Located {
    /// The path of the file.
    pub path: PathBuf,
    /// The open file.
    pub file: Arc<File>,
    /// The digest that the name or the manifest gives the file.
    pub digest: Option<Digest>,
    /// The layout that contains the file.
    pub layout: Option<PathBuf>,
}

/// Finds the file of `name`. The file is opened, but not checked to be an image.
pub fn locate(name: &ImageName) -> Result<Located, StoreError> {
    let (directory, digest, size) = match name {
        ImageName::File(path) => {
            let file = File::open(path).map_err(|source| StoreError::Open {
                path: path.clone(),
                source: bcow::Error::Io {
                    action: "open",
                    offset: 0,
                    source,
                },
            })?;
            return Ok(Located {
                layout: layout_around(path),
                path: path.clone(),
                file: Arc::new(file),
                digest: None,
            });
        }
        ImageName::Layout {
            directory,
            reference,
        } => {
            let files = Files::directory(directory)?;
            let manifest = layout::find_bcow(&files, reference.as_deref())?;
            match manifest.stack {
                Some((digest, size)) => (directory, digest, Some(size)),
                None => {
                    return Err(StoreError::OrdinaryImage {
                        place: manifest.place,
                    });
                }
            }
        }
        ImageName::Remote(_) => return Err(StoreError::NotLocal),
        ImageName::Blob { directory, digest } => {
            let files = Files::directory(directory)?;
            layout::check_version(&files)?;
            (directory, digest.clone(), None)
        }
    };
    let path = directory.join(layout::blob_path(&digest));
    let Some(blob) = open_regular(&path)? else {
        return Err(match name {
            ImageName::Blob { .. } => StoreError::NoSuchBlob {
                directory: directory.clone(),
                digest,
            },
            _ => StoreError::Layout(ConvertError::MissingBlob {
                place: format!("stack in {}", directory.display()),
                digest,
                foreign: false,
            }),
        });
    };
    if let (Some(expected), Some(found)) = (size, blob.length())
        && expected != found
    {
        return Err(StoreError::Layout(ConvertError::SizeMismatch {
            place: path.display().to_string(),
            expected,
            found,
        }));
    }
    let Some(file) = blob.file() else {
        return Err(StoreError::NoSuchBlob {
            directory: directory.clone(),
            digest,
        });
    };
    Ok(Located {
        path,
        file,
        digest: Some(digest),
        layout: Some(directory.clone()),
    })
}

/// The layout that has the file at `path` as a blob, if there is one.
fn layout_around(path: &Path) -> Option<PathBuf> {
    let folder = path.canonicalize().ok()?.parent()?.to_owned();
    let blobs = folder.parent().filter(|_| folder.ends_with("sha256"))?;
    let layout = blobs.parent().filter(|_| blobs.ends_with("blobs"))?;
    Some(layout.to_owned())
}

fn check_digest(found: &Located, digest: &Digest) -> Result<(), StoreError> {
    let (actual, _) = Digest::of_file(&found.file, digest.algorithm()).map_err(|source| {
        StoreError::Layout(crate::blob::read_error(
            "read",
            &found.path.display().to_string(),
            source,
        ))
    })?;
    match actual == *digest {
        true => Ok(()),
        false => Err(StoreError::Layout(ConvertError::DigestMismatch {
            place: found.path.display().to_string(),
            what: "digest",
            expected: digest.clone(),
            found: actual,
        })),
    }
}

/// The layers in a stack's metadata; empty for an image that is not a stack. A layer without one of
/// the required fields is left out.
fn stack_facts(metadata: &serde_json::Value) -> Vec<LayerFacts> {
    let layers = metadata["layers"].as_array().map_or(&[][..], Vec::as_slice);
    layers.iter().filter_map(facts_of).collect()
}

fn facts_of(object: &serde_json::Value) -> Option<LayerFacts> {
    let root: Digest = object["merkle_root"].as_str()?.parse().ok()?;
    Some(LayerFacts {
        digest: object["digest"].as_str()?.parse().ok()?,
        file_bytes: object["file_bytes"].as_u64()?,
        merkle_root: root.sha256()?,
    })
}

/// The files below an image that its metadata names by digest. A file without one of the required
/// fields is left out; a name that is not a plain file name counts as no name.
pub fn backing_facts(metadata: &serde_json::Value) -> Vec<BackingFacts> {
    let backings = metadata["backings"].as_array();
    backings
        .map_or(&[][..], Vec::as_slice)
        .iter()
        .filter_map(|backing| {
            let name = backing["name"].as_str().filter(|name| is_plain_name(name));
            Some(BackingFacts {
                facts: facts_of(backing)?,
                name: name.map(str::to_owned),
            })
        })
        .collect()
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
        let (file, height) = self.0.find(&digest, backing.size, depth)?;
        self.0.require_size(&digest, &file, backing.size)?;
        Some((file.image, height))
    }
}

/// The lookups of the files below one image, and their results.
struct Finder {
    /// Searched by digest, and by name after the directories of `FileRecord::names` and `named`.
    stores: Vec<PathBuf>,
    /// Searched by name only.
    named: Vec<PathBuf>,
    /// Candidates for every digest.
    files: Vec<PathBuf>,
    /// Searched last.
    remote: Option<Arc<dyn RemoteFiles>>,
    options: OpenOptions,
    /// What images record about the files below them. The first record of a digest, which comes
    /// from the uppermost file, stays.
    facts: RefCell<HashMap<Digest, FileRecord>>,
    lookups: RefCell<HashMap<Digest, Lookup>>,
    problems: RefCell<Vec<Arc<LayerProblem>>>,
}

/// What images record about one file.
#[derive(Default)]
struct FileRecord {
    /// `layer 2 of 5`.
    label: Option<String>,
    facts: Option<LayerFacts>,
    /// The names that the file may have, each with the directory of the image that records the
    /// name, if that image is on this machine.
    names: Vec<(Option<PathBuf>, String)>,
}

enum Lookup {
    /// The file is being opened. A lookup of the same digest meanwhile means that the file is below
    /// itself.
    Opening,
    /// The file is open. The number is the length of the longest chain of files from this one down,
    /// this one included.
    Open(LayerFile, u32),
    /// The file cannot be opened; `problems` has the reason.
    Failed,
}

impl Finder {
    fn new(layout: Option<&Path>, places: Places<'_>, options: OpenOptions) -> Self {
        let stores = layout.into_iter().map(Path::to_owned);
        Finder {
            stores: stores.chain(places.stores.iter().cloned()).collect(),
            named: places.named.to_vec(),
            files: places.files.to_vec(),
            remote: places.remote.cloned(),
            options,
            facts: RefCell::default(),
            lookups: RefCell::default(),
            problems: RefCell::default(),
        }
    }

    fn record_layers(&self, layers: &[LayerFacts]) {
        let count = layers.len();
        let mut all = self.facts.borrow_mut();
        for (index, layer) in layers.iter().enumerate() {
            let known = all.entry(layer.digest.clone()).or_default();
            known
                .label
                .get_or_insert_with(|| format!("layer {} of {count}", index + 1));
            known.facts.get_or_insert_with(|| layer.clone());
        }
    }

    /// `directory` is that of the image whose metadata has `backings`.
    fn record_backings(&self, backings: &[BackingFacts], directory: Option<&Path>) {
        let mut all = self.facts.borrow_mut();
        for backing in backings {
            let known = all.entry(backing.facts.digest.clone()).or_default();
            known.facts.get_or_insert_with(|| backing.facts.clone());
            if let Some(name) = &backing.name {
                known
                    .names
                    .push((directory.map(Path::to_owned), name.clone()));
            }
        }
    }

    /// Records what the metadata of the image, whose file is in `directory`, says of the files
    /// below it.
    fn record_metadata(&self, image: &Image, directory: Option<&Path>) {
        // If the metadata is unreadable, the files below are hashed whole.
        if image.backings().next().is_some()
            && let Ok(metadata) = image.metadata()
        {
            self.record_layers(&stack_facts(&metadata));
            self.record_backings(&backing_facts(&metadata), directory);
        }
    }

    /// The name in messages of the file with this digest.
    fn name(&self, digest: &Digest) -> String {
        let all = self.facts.borrow();
        let Some(known) = all.get(digest) else {
            return format!("backing {digest}");
        };
        match (&known.label, known.names.first()) {
            (Some(label), _) => format!("{label} ({digest})"),
            (None, Some((_, name))) => format!("backing {name:?} ({digest})"),
            (None, None) => format!("backing {digest}"),
        }
    }

    fn label(&self, digest: &Digest) -> String {
        let all = self.facts.borrow();
        match all.get(digest).and_then(|known| known.label.clone()) {
            Some(label) => label,
            None => format!("backing {}", digest.short()),
        }
    }

    /// Every open file, once.
    fn below(&self, layers: &[LayerFacts]) -> Vec<BelowFile> {
        let known = self.lookups.borrow();
        let mut others: Vec<&Digest> = known.keys().collect();
        others.sort();
        let mut seen = HashSet::new();
        layers
            .iter()
            .map(|layer| &layer.digest)
            .chain(others)
            .filter(|digest| seen.insert(*digest))
            .filter_map(|digest| match known.get(digest)? {
                Lookup::Open(file, _) => Some(BelowFile {
                    label: self.label(digest),
                    name: self.name(digest),
                    digest: digest.clone(),
                    path: file.path.clone(),
                    storage: file.storage.clone(),
                }),
                _ => None,
            })
            .collect()
    }

    /// The file of this digest, which must have an address space of `size` bytes, and the length of
    /// the longest chain of files from this one down. `depth` is the number of files below the
    /// image at which the lookup takes place.
    fn find(&self, digest: &Digest, size: u64, depth: u32) -> Option<(LayerFile, u32)> {
        let too_deep = match self.lookups.borrow().get(digest) {
            Some(Lookup::Open(file, height)) => return Some((file.clone(), *height)),
            Some(Lookup::Failed) => return None,
            Some(Lookup::Opening) => true,
            None => depth > MAX_DEPTH,
        };
        if !too_deep {
            return self.open_first(digest, size, depth);
        }
        self.problem(LayerProblem::TooDeep {
            name: self.name(digest),
        });
        None
    }

    /// A known file may be named by a second entry with a different size.
    fn require_size(&self, digest: &Digest, file: &LayerFile, size: u64) -> Option<()> {
        if file.image.size() == size {
            return Some(());
        }
        self.problem(LayerProblem::Wrong {
            name: self.name(digest),
            path: file.path.clone(),
            what: "address space in bytes",
            found: file.image.size().to_string(),
            expected: size.to_string(),
        });
        None
    }

    fn problem(&self, problem: LayerProblem) {
        self.problems.borrow_mut().push(Arc::new(problem));
    }

    /// Opens the first candidate that is the right file.
    fn open_first(&self, digest: &Digest, size: u64, depth: u32) -> Option<(LayerFile, u32)> {
        let set = |lookup| self.lookups.borrow_mut().insert(digest.clone(), lookup);
        set(Lookup::Opening);
        let mut first_problem = None;
        for candidate in self.candidates(digest) {
            match self.open_candidate(&candidate, digest, size, depth) {
                Ok(None) => {}
                Ok(Some((file, height))) => {
                    set(Lookup::Open(file.clone(), height));
                    return Some((file, height));
                }
                // The user named this file for a different purpose.
                Err(_) if matches!(candidate, Candidate::UserFile(_)) => {}
                Err(problem) => {
                    first_problem.get_or_insert(problem);
                }
            }
        }
        set(Lookup::Failed);
        self.problem(first_problem.unwrap_or_else(|| LayerProblem::Missing {
            name: self.name(digest),
            places: self.places(digest),
        }));
        None
    }

    /// The directories that are searched for a file of this digest, each once.
    fn places(&self, digest: &Digest) -> Vec<PathBuf> {
        let mut places = self.stores.clone();
        for (directory, _) in self.named_places(digest) {
            if !places.contains(&directory) {
                places.push(directory);
            }
        }
        places
    }

    /// The directories that are searched by name for a file of this digest, each with the name.
    fn named_places(&self, digest: &Digest) -> Vec<(PathBuf, String)> {
        let all = self.facts.borrow();
        let names = all.get(digest).map_or(&[][..], |known| &known.names);
        let searched = || self.named.iter().chain(&self.stores);
        names
            .iter()
            .flat_map(|(own, name)| {
                own.iter()
                    .chain(searched())
                    .map(move |directory| (directory.clone(), name.clone()))
            })
            .collect()
    }

    /// The candidates for a digest: by hexadecimal digits, by the names that images record, and the
    /// files that the user named.
    fn candidates(&self, digest: &Digest) -> Vec<Candidate> {
        let hex = digest.hex();
        let algorithm = digest.algorithm().name();
        let by_digest = self.stores.iter().flat_map(|directory| {
            [
                directory.join(layout::blob_path(digest)),
                directory.join(&hex),
                directory.join(algorithm).join(&hex),
            ]
        });
        let named = self.named_places(digest);
        by_digest
            .map(Candidate::Path)
            .chain(named.into_iter().map(|(d, name)| Candidate::Named(d, name)))
            .chain(self.files.iter().cloned().map(Candidate::UserFile))
            .chain(self.remote.iter().map(|remote| Candidate::Remote {
                files: remote.clone(),
                digest: digest.clone(),
            }))
            .collect()
    }

    /// Opens a candidate; `None` if the file does not exist.
    fn open_candidate(
        &self,
        candidate: &Candidate,
        digest: &Digest,
        size: u64,
        depth: u32,
    ) -> Result<Option<(LayerFile, u32)>, LayerProblem> {
        let path = candidate.path();
        let failed = |source: Box<dyn std::error::Error + Send + Sync>| LayerProblem::Open {
            name: self.name(digest),
            path: path.clone(),
            source,
        };
        let facts = self
            .facts
            .borrow()
            .get(digest)
            .and_then(|k| k.facts.clone());
        let Some(file) = candidate.open(facts.as_ref()).map_err(failed)? else {
            return Ok(None);
        };
        // The files below the candidate are opened only after the candidate is known to be the
        // right file.
        let alone = Image::open_storage(file.clone(), &self.options)
            .map_err(|error| failed(error.into()))?;
        let wrong = |what, found: String, expected: String| LayerProblem::Wrong {
            name: self.name(digest),
            path: path.clone(),
            what,
            found,
            expected,
        };
        let header = alone.header();
        match facts {
            Some(facts) => {
                let root = header.merkle.as_ref().map(|tree| tree.root);
                if root != Some(facts.merkle_root) {
                    let shown = |root: [u8; 32]| Digest::from_sha256(root).to_string();
                    return Err(wrong(
                        "hash tree's root",
                        root.map_or("none".into(), shown),
                        shown(facts.merkle_root),
                    ));
                }
                if header.file_bytes != facts.file_bytes {
                    return Err(wrong(
                        "length in bytes",
                        header.file_bytes.to_string(),
                        facts.file_bytes.to_string(),
                    ));
                }
            }
            None => {
                let found = Digest::of_storage(&*file, digest.algorithm())
                    .map_err(|error| failed(error.into()))?;
                if found != *digest {
                    return Err(wrong("digest", found.to_string(), digest.to_string()));
                }
            }
        }
        let below = FinderResolver::new(self, depth);
        let has_no_backings = alone.backings().next().is_none();
        let image = match has_no_backings {
            true => alone,
            false => {
                let directory = candidate.directory();
                self.record_metadata(&alone, directory.as_deref());
                Image::open_with_backings(file.clone(), &self.options, &below)
                    .map_err(|error| failed(error.into()))?
            }
        };
        if image.size() != size {
            return Err(wrong(
                "address space in bytes",
                image.size().to_string(),
                size.to_string(),
            ));
        }
        let height = below.height.get() + 1;
        if height > MAX_DEPTH {
            return Err(LayerProblem::TooDeep {
                name: self.name(digest),
            });
        }
        let found = LayerFile {
            path,
            storage: file,
            image,
        };
        Ok(Some((found, height)))
    }
}

/// A file that may be the right one.
enum Candidate {
    /// A path made of a directory of the user's choice and of the digest.
    Path(PathBuf),
    /// A name in a directory. Symbolic links are not followed, because the name comes from an image
    /// file.
    Named(PathBuf, String),
    /// A file that the user named, perhaps for a different purpose.
    UserFile(PathBuf),
    /// A file of another machine.
    Remote {
        files: Arc<dyn RemoteFiles>,
        digest: Digest,
    },
}

impl Candidate {
    fn path(&self) -> PathBuf {
        match self {
            Candidate::Remote { files, digest } => files.name(digest),
            Candidate::Path(path) | Candidate::UserFile(path) => path.clone(),
            Candidate::Named(directory, name) => directory.join(name),
        }
    }

    /// The directory of the file, if it is on this machine.
    fn directory(&self) -> Option<PathBuf> {
        match self {
            Candidate::Remote { .. } => None,
            _ => Some(directory_of(&self.path())),
        }
    }

    /// Opens the file; `None` if it does not exist.
    fn open(&self, facts: Option<&LayerFacts>) -> Result<Option<Arc<dyn Storage>>, RemoteFailure> {
        match self {
            Candidate::Remote { files, digest } => match facts {
                Some(facts) => files.open(digest, facts),
                // Its bytes could be checked only by reading all of them.
                None => Err("the image does not record its root hash".into()),
            },
            Candidate::Path(path) | Candidate::UserFile(path) => match open_regular(path) {
                Ok(Some(blob)) => Ok(blob.file().map(|file| file as Arc<dyn Storage>)),
                Ok(None) => Ok(None),
                // The caller's error has the path.
                Err(ConvertError::Read { source, .. }) => Err(source.into()),
                Err(error) => Err(error.into()),
            },
            Candidate::Named(directory, name) => match chain::open_named(directory, name) {
                Ok(Named::File(file)) => Ok(Some(Arc::new(file))),
                Ok(Named::Other(what)) => Err(format!("it is {what}").into()),
                Err(Errno::NOENT) => Ok(None),
                Err(error) => Err(io::Error::from(error).into()),
            },
        }
    }
}

/// Resolves the backings of one file.
struct FinderResolver<'f> {
    finder: &'f Finder,
    /// Number of files above the backings.
    depth: u32,
    /// Longest chain of files among the backings resolved so far.
    height: Cell<u32>,
}

impl<'f> FinderResolver<'f> {
    fn new(finder: &'f Finder, depth: u32) -> Self {
        FinderResolver {
            finder,
            depth,
            height: Cell::new(0),
        }
    }
}

impl BackingResolver for FinderResolver<'_> {
    fn resolve(&self, backing: &BackingEntry) -> Result<Option<Arc<dyn BlockDevice>>, bcow::Error> {
        // Backings with a file name are not looked up here.
        let BackingName::Digest(digest) = backing.name else {
            return Ok(None);
        };
        let digest = Digest::from_sha256(digest);
        let Some((file, height)) = self.finder.find(&digest, backing.size, self.depth + 1) else {
            return Ok(None);
        };
        if self
            .finder
            .require_size(&digest, &file, backing.size)
            .is_none()
        {
            return Ok(None);
        }
        self.height.set(self.height.get().max(height));
        Ok(Some(file.image))
    }
}
