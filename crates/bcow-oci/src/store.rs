//! Opens images in BCoW form, and finds the layers below them.
//!
//! An image names what lies below it by digest. The files are looked up by digest: in the layout that the image stands in,
//! then in the stores that the user names. Where the image has a file name for a digest too, the file is also looked up under
//! that name: beside the image, then in the directories that the user names. No path ever comes out of a file.
//!
//! That a file found under a digest or a name is the right one is checked by what the image says of it: the length and the
//! hash tree's root in its header. A file of which the image says nothing is hashed as a whole.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow::chain::{self, Digests, Named, directory_of};
use bcow::format::{BackingEntry, BackingName, is_plain_name};
use bcow::{BackingResolver, BlockDevice, Image, OpenOptions, Verify};

use rustix::io::Errno;

use crate::archive::Files;
use crate::blob::open_regular;
use crate::digest::Digest;
use crate::error::ConvertError;
use crate::layout;
use crate::name::ImageName;

/// Files below a file, one below the other (spec section 8).
const MAX_DEPTH: u32 = 64;

/// An open image.
pub struct Opened {
    /// The address space.
    pub image: Arc<Image>,
    /// The file that holds it.
    pub path: PathBuf,
    /// What a stack says of its layers, lowest first; empty for other images.
    pub layers: Vec<StackLayer>,
    /// Every file below it that was found, each once: layers in their order, then what only layers need.
    pub below: Vec<BelowFile>,
    /// What is wrong with the files below it, in the order they were asked for. What needs them will fail.
    pub problems: Vec<Arc<LayerProblem>>,
}

/// A layer of a stack.
pub struct StackLayer {
    /// What the stack says of it.
    pub facts: LayerFacts,
    /// The file, if it was found and is the right one.
    pub file: Option<LayerFile>,
}

/// What identifies a layer, from a stack's metadata (spec section 13).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerFacts {
    /// Digest of the file.
    pub digest: Digest,
    /// `file_bytes` of its header.
    pub file_bytes: u64,
    /// `merkle_root` of its header.
    pub merkle_root: [u8; 32],
}

/// What an image says of a file below it that it names by digest (spec section 13, `backings`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackingFacts {
    /// What identifies it.
    pub facts: LayerFacts,
    /// The file name it had.
    pub name: Option<String>,
}

/// Where files below an image may be, as the user allows it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Places<'p> {
    /// OCI layouts, and directories of files named by their digests.
    pub stores: &'p [PathBuf],
    /// Directories for file names, beside that of the image and the stores.
    pub named: &'p [PathBuf],
    /// Files that the user named and that may be the ones, whatever their names.
    pub given: &'p [PathBuf],
}

/// A file that was found by its digest or its name.
#[derive(Clone)]
pub struct LayerFile {
    /// Where it was found.
    pub path: PathBuf,
    /// Its address space.
    pub image: Arc<Image>,
}

/// A file below an image.
pub struct BelowFile {
    /// A short name: `layer 2 of 5` or `backing sha256:0123456789ab`.
    pub label: String,
    /// How messages name it: `layer 2 of 5 (sha256:...)` or `backing sha256:...`.
    pub name: String,
    /// Its digest.
    pub digest: Digest,
    /// Where it was found.
    pub path: PathBuf,
}

/// Failure to open an image.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The name is not written as bcow expects.
    #[error("{text:?} names no image: {problem}")]
    NameSyntax {
        /// What was given.
        text: String,
        /// Why it is none.
        problem: &'static str,
    },
    /// The layout is not as it should be.
    #[error(transparent)]
    Layout(#[from] ConvertError),
    /// An image of the layout that is not in BCoW form.
    #[error("{place} is an ordinary OCI image")]
    OrdinaryImage {
        /// The manifest.
        place: String,
    },
    /// There is no such blob in the layout.
    #[error("{} has no blob {digest}", directory.display())]
    NoSuchBlob {
        /// The layout.
        directory: PathBuf,
        /// What was asked for.
        digest: Digest,
    },
    /// The file does not open as an image.
    #[error("cannot open {}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        source: bcow::Error,
    },
    /// Files below the image are missing or wrong.
    #[error("{first}{}", match others { 0 => String::new(), 1 => ", and 1 more is missing or wrong".into(), n => format!(", and {n} more are missing or wrong") })]
    Layers {
        /// The first of them.
        first: Arc<LayerProblem>,
        /// How many more there are.
        others: usize,
    },
}

/// What is wrong with a file below an image. `name` is `layer 2 of 5 (sha256:...)` or `backing sha256:...`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayerProblem {
    /// It is in none of the places to look.
    #[error("{name} is not there{}", looked_in(places))]
    Missing {
        /// What it is.
        name: String,
        /// Where it was looked for.
        places: Vec<PathBuf>,
    },
    /// It is there, but does not open.
    #[error("cannot open {name} in {}: {source}", path.display())]
    Open {
        /// What it is.
        name: String,
        /// Where it was found.
        path: PathBuf,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// There is a file in its place that is another one.
    #[error("{} is not {name}: its {what} is {found}, not {expected}", path.display())]
    Wrong {
        /// What it should be.
        name: String,
        /// Where it was found.
        path: PathBuf,
        /// In what it differs.
        what: &'static str,
        /// What it is there.
        found: String,
        /// What it should be.
        expected: String,
    },
    /// The files below it are too many, one below the other, or one of them is below itself.
    #[error("more than {MAX_DEPTH} files, one below the other, end in {name}")]
    TooDeep {
        /// What it is.
        name: String,
    },
}

fn looked_in(places: &[PathBuf]) -> String {
    let places: Vec<String> = places.iter().map(|p| p.display().to_string()).collect();
    match &places[..] {
        [] => String::new(),
        places => format!("; looked in {}", places.join(", ")),
    }
}

impl LayerProblem {
    /// Stable code, for a checker's findings.
    pub fn code(&self) -> &'static str {
        match self {
            LayerProblem::Missing { .. } => "backing-missing",
            LayerProblem::Open { .. } => "backing-unreadable",
            LayerProblem::Wrong { .. } | LayerProblem::TooDeep { .. } => "backing-entry",
        }
    }

    /// What it is that is missing or wrong.
    pub fn name(&self) -> &str {
        match self {
            LayerProblem::Missing { name, .. }
            | LayerProblem::Open { name, .. }
            | LayerProblem::Wrong { name, .. }
            | LayerProblem::TooDeep { name } => name,
        }
    }

    /// What the user could do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            LayerProblem::Missing { .. } => {
                "copy it from where the image came, or name a directory that has it with --store"
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
                "copy it again from where the image came, or name a directory that has the right one with --store"
            }
            LayerProblem::TooDeep { .. } => "convert the image again",
        }
    }
}

impl StoreError {
    /// What the user could do about it, if there is something.
    pub fn hint(&self) -> Option<String> {
        match self {
            StoreError::NameSyntax { .. } => {
                Some("images are FILE, oci:DIR[:REF] and oci:DIR@sha256:DIGEST".into())
            }
            StoreError::Layout(error) => error.hint(),
            StoreError::OrdinaryImage { .. } => Some(
                "`bcow convert` makes a BCoW image of it, in one file or layer by layer".into(),
            ),
            StoreError::NoSuchBlob { .. } | StoreError::Open { .. } => None,
            StoreError::Layers { first, .. } => Some(first.hint().into()),
        }
    }
}

impl Opened {
    /// Refuses an image of which something is missing or wrong.
    pub fn require_all(&self) -> Result<(), StoreError> {
        match &self.problems[..] {
            [] => Ok(()),
            [first, others @ ..] => Err(StoreError::Layers {
                first: first.clone(),
                others: others.len(),
            }),
        }
    }

    /// Whether it is the stack of layers.
    pub fn is_stack(&self) -> bool {
        !self.layers.is_empty()
    }
}

/// Opens the image that `name` means. Files below it are looked up in the layout it stands in, then in `places`.
///
/// Layers that are missing or wrong are no error here; they stand in [`Opened::problems`]. With [`Verify::Merkle`] the
/// digest of a layout's blob is checked too, so that every byte read is what the manifest says.
pub fn open(
    name: &ImageName,
    places: Places<'_>,
    options: &OpenOptions,
) -> Result<Opened, StoreError> {
    let found = locate(name)?;
    if let (Some(digest), Verify::Merkle) = (&found.digest, options.verify) {
        check_digest(&found, digest)?;
    }
    let cannot_open = |source| StoreError::Open {
        path: found.path.clone(),
        source,
    };
    let finder = Finder::new(found.layout.as_deref(), places, options.clone());
    // What the image says of the files below it has to be known before they are opened.
    let facts = Image::open_with_backings(found.file.clone(), options, &NoLayers)
        .and_then(|image| match image.metadata() {
            Ok(metadata) => {
                let directory = directory_of(&found.path);
                finder.learn_names(&backing_facts(&metadata), &directory);
                Ok(stack_facts(&metadata))
            }
            // Who reads no metadata does not need it; what it would have said of layers is then hashed.
            Err(error) if error.code().is_some() => Ok(Vec::new()),
            Err(error) => Err(error),
        })
        .map_err(cannot_open)?;
    finder.learn(&facts);
    let image = Image::open_with_backings(found.file.clone(), options, &Below::new(&finder, 0))
        .map_err(cannot_open)?;
    let below = finder.below(&facts);
    let known = finder.known.into_inner();
    let layers = facts
        .into_iter()
        .map(|facts| StackLayer {
            file: match known.get(&facts.digest) {
                Some(Known::Open(file, _)) => Some(file.clone()),
                _ => None,
            },
            facts,
        })
        .collect();
    Ok(Opened {
        image,
        path: found.path,
        layers,
        below,
        problems: finder.problems.into_inner(),
    })
}

/// A file that a name means.
#[derive(Debug)]
pub struct Located {
    /// Where it is.
    pub path: PathBuf,
    /// The file.
    pub file: Arc<File>,
    /// The digest it goes by.
    pub digest: Option<Digest>,
    /// The layout it stands in.
    pub layout: Option<PathBuf>,
}

/// Finds the file that `name` means; it may still turn out to be no image.
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

/// The layout whose blob the file at `path` is, if it is one.
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

/// What a stack's metadata says of its layers. Nothing for an image that holds its content itself, and nothing for
/// layers of which it does not say enough.
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

/// What an image's metadata says of the files below it that it names by digest. Nothing of files of which it does not say
/// enough; a name that is no plain file name is no name.
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

/// Gives no layer, for a first look.
struct NoLayers;

impl BackingResolver for NoLayers {
    fn resolve(&self, _: &BackingEntry) -> Result<Option<Arc<dyn BlockDevice>>, bcow::Error> {
        Ok(None)
    }
}

/// Directories that have files by their digests.
pub struct Stores(Finder);

impl Stores {
    /// Looks in `places`.
    pub fn new(places: Places<'_>, options: OpenOptions) -> Self {
        Stores(Finder::new(None, places, options))
    }

    /// What is wrong with files that were asked for, in that order.
    pub fn problems(&self) -> Vec<Arc<LayerProblem>> {
        self.0.problems.borrow().clone()
    }
}

impl Digests for Stores {
    fn learn(&self, image: &Image, directory: &Path) {
        self.0.learn_from(image, directory);
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

/// Everything that was looked for below one image.
struct Finder {
    /// For digests, and behind the directories of `Facts::names` for names.
    stores: Vec<PathBuf>,
    /// For names only.
    named: Vec<PathBuf>,
    /// For whatever they are.
    given: Vec<PathBuf>,
    options: OpenOptions,
    /// What is known of files that were not looked for yet. What the uppermost file says of one holds.
    facts: RefCell<HashMap<Digest, Facts>>,
    known: RefCell<HashMap<Digest, Known>>,
    problems: RefCell<Vec<Arc<LayerProblem>>>,
}

/// What is known of a file.
#[derive(Default)]
struct Facts {
    /// `layer 2 of 5`.
    label: Option<String>,
    facts: Option<LayerFacts>,
    /// File names that it may have, each with the directory of the file that says so.
    names: Vec<(PathBuf, String)>,
}

enum Known {
    /// It is being opened; whoever asks for it meanwhile is below itself.
    Opening,
    /// Open, with so many files one below the other, itself included.
    Open(LayerFile, u32),
    /// It cannot be had, and the problems say why.
    Failed,
}

impl Finder {
    fn new(layout: Option<&Path>, places: Places<'_>, options: OpenOptions) -> Self {
        let stores = layout.into_iter().map(Path::to_owned);
        Finder {
            stores: stores.chain(places.stores.iter().cloned()).collect(),
            named: places.named.to_vec(),
            given: places.given.to_vec(),
            options,
            facts: RefCell::default(),
            known: RefCell::default(),
            problems: RefCell::default(),
        }
    }

    fn learn(&self, layers: &[LayerFacts]) {
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

    /// `directory` is that of the file that says so.
    fn learn_names(&self, backings: &[BackingFacts], directory: &Path) {
        let mut all = self.facts.borrow_mut();
        for backing in backings {
            let known = all.entry(backing.facts.digest.clone()).or_default();
            known.facts.get_or_insert_with(|| backing.facts.clone());
            if let Some(name) = &backing.name {
                known.names.push((directory.to_owned(), name.clone()));
            }
        }
    }

    /// What the image, which stands in `directory`, says of the files below it.
    fn learn_from(&self, image: &Image, directory: &Path) {
        // Without metadata the files below it are hashed as a whole.
        if image.backings().next().is_some()
            && let Ok(metadata) = image.metadata()
        {
            self.learn(&stack_facts(&metadata));
            self.learn_names(&backing_facts(&metadata), directory);
        }
    }

    /// How messages name what has this digest.
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
        let known = self.known.borrow();
        let mut others: Vec<&Digest> = known.keys().collect();
        others.sort();
        let mut seen = HashSet::new();
        layers
            .iter()
            .map(|layer| &layer.digest)
            .chain(others)
            .filter(|digest| seen.insert(*digest))
            .filter_map(|digest| match known.get(digest)? {
                Known::Open(file, _) => Some(BelowFile {
                    label: self.label(digest),
                    name: self.name(digest),
                    digest: digest.clone(),
                    path: file.path.clone(),
                }),
                _ => None,
            })
            .collect()
    }

    /// The file of this digest with an address space of `size` bytes, `depth` files below the image; and how many files
    /// one below the other it is.
    fn find(&self, digest: &Digest, size: u64, depth: u32) -> Option<(LayerFile, u32)> {
        let too_deep = match self.known.borrow().get(digest) {
            Some(Known::Open(file, height)) => return Some((file.clone(), *height)),
            Some(Known::Failed) => return None,
            Some(Known::Opening) => true,
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

    /// Another entry may give another size for what is known already.
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

    /// Opens the first file that has the name of the digest and is the right one.
    fn open_first(&self, digest: &Digest, size: u64, depth: u32) -> Option<(LayerFile, u32)> {
        let know = |known| self.known.borrow_mut().insert(digest.clone(), known);
        know(Known::Opening);
        let mut first_problem = None;
        for candidate in self.candidates(digest) {
            match self.open_candidate(&candidate, digest, size, depth) {
                Ok(None) => {}
                Ok(Some((file, height))) => {
                    know(Known::Open(file.clone(), height));
                    return Some((file, height));
                }
                // It was named for something else.
                Err(_) if matches!(candidate, Candidate::Given(_)) => {}
                Err(problem) => {
                    first_problem.get_or_insert(problem);
                }
            }
        }
        know(Known::Failed);
        self.problem(first_problem.unwrap_or_else(|| LayerProblem::Missing {
            name: self.name(digest),
            places: self.places(digest),
        }));
        None
    }

    /// The directories in which a file of this digest is looked for, each once.
    fn places(&self, digest: &Digest) -> Vec<PathBuf> {
        let mut places = self.stores.clone();
        for (directory, _) in self.named_places(digest) {
            if !places.contains(&directory) {
                places.push(directory);
            }
        }
        places
    }

    /// The directories in which names of a file of this digest are looked for, with the names.
    fn named_places(&self, digest: &Digest) -> Vec<(PathBuf, String)> {
        let all = self.facts.borrow();
        let names = all.get(digest).map_or(&[][..], |known| &known.names);
        let given = || self.named.iter().chain(&self.stores);
        names
            .iter()
            .flat_map(|(own, name)| {
                std::iter::once(own)
                    .chain(given())
                    .map(move |directory| (directory.clone(), name.clone()))
            })
            .collect()
    }

    /// Where a file of this digest may be: under its hexadecimal digits, or under a name that a file above has for it.
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
            .chain(self.given.iter().cloned().map(Candidate::Given))
            .collect()
    }

    /// Opens a candidate; `None` if there is no such file.
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
        let Some(file) = candidate.open().map_err(failed)? else {
            return Ok(None);
        };
        // What it says of files below it counts only when it is known to be the right one.
        let alone = Image::open_with_backings(file.clone(), &self.options, &NoLayers)
            .map_err(|error| failed(error.into()))?;
        let wrong = |what, found: String, expected: String| LayerProblem::Wrong {
            name: self.name(digest),
            path: path.clone(),
            what,
            found,
            expected,
        };
        let header = alone.header();
        let facts = self
            .facts
            .borrow()
            .get(digest)
            .and_then(|k| k.facts.clone());
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
                let (found, _) = Digest::of_file(&file, digest.algorithm())
                    .map_err(|error| failed(error.into()))?;
                if found != *digest {
                    return Err(wrong("digest", found.to_string(), digest.to_string()));
                }
            }
        }
        let below = Below::new(self, depth);
        let stands_alone = alone.backings().next().is_none();
        let image = match stands_alone {
            true => alone,
            false => {
                self.learn_from(&alone, &directory_of(&path));
                Image::open_with_backings(file, &self.options, &below)
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
        Ok(Some((LayerFile { path, image }, height)))
    }
}

/// A file that may be the right one.
enum Candidate {
    /// Under a path made of names that the user gave and of hexadecimal digits.
    Path(PathBuf),
    /// Under a name in a directory. Symbolic links are not followed: the name comes out of a file.
    Named(PathBuf, String),
    /// One that the user named, perhaps for something else.
    Given(PathBuf),
}

impl Candidate {
    fn path(&self) -> PathBuf {
        match self {
            Candidate::Path(path) | Candidate::Given(path) => path.clone(),
            Candidate::Named(directory, name) => directory.join(name),
        }
    }

    /// Opens it; `None` if there is no such file.
    fn open(&self) -> Result<Option<Arc<File>>, Box<dyn std::error::Error + Send + Sync>> {
        match self {
            Candidate::Path(path) | Candidate::Given(path) => match open_regular(path) {
                Ok(Some(blob)) => Ok(blob.file()),
                Ok(None) => Ok(None),
                // The path is told beside it.
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

/// Gives a file's backings.
struct Below<'f> {
    finder: &'f Finder,
    /// Files above those that are given.
    depth: u32,
    /// Files one below the other, as far as they were given.
    height: Cell<u32>,
}

impl<'f> Below<'f> {
    fn new(finder: &'f Finder, depth: u32) -> Self {
        Below {
            finder,
            depth,
            height: Cell::new(0),
        }
    }
}

impl BackingResolver for Below<'_> {
    fn resolve(&self, backing: &BackingEntry) -> Result<Option<Arc<dyn BlockDevice>>, bcow::Error> {
        // Images name no files; what does is not looked up here.
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
