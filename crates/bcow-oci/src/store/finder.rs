//! The lookups of the files below one image.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use bcow::chain::MAX_DEPTH;
use bcow::format::{BackingEntry, BackingName, Header};
use bcow::{BackingResolver, BlockDevice, Image, OpenOptions, Storage};

use super::candidate::Candidate;
use super::error::LayerProblem;
use super::recorded::{RecordedBacking, RecordedFile, recorded_backings, recorded_layers};
use super::remote::{RemoteFailure, RemoteFiles};
use crate::digest::Digest;
use crate::{layout, parallel};

/// The number of remote files that are opened at the same time. Each open sends a few requests at a
/// time.
const OPENINGS: usize = 8;

/// A file that was found by its digest or its name.
#[derive(Clone)]
pub struct LayerFile {
    /// The path of the file; of a file of another machine, its name for messages.
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
    /// The path of the file; of a file of another machine, its name for messages.
    pub path: PathBuf,
    /// The bytes of the file.
    pub storage: Arc<dyn Storage>,
}

/// The places in which the user allows bcow to search for files below an image.
#[derive(Clone, Copy, Default)]
pub struct Places<'p> {
    /// OCI layouts, and directories in which each file is named by its digest.
    pub stores: &'p [PathBuf],
    /// Directories to search by file name, besides those of the image and the stores.
    pub named: &'p [PathBuf],
    /// Files that the user named. Each is a candidate for every digest.
    pub files: &'p [PathBuf],
    /// The store on another machine from which the image comes. It is searched last.
    pub remote: Option<&'p Arc<dyn RemoteFiles>>,
}

/// The lookups of the files below one image, and their results.
pub(super) struct Finder {
    /// Searched by digest. Also searched by name, after the directories in `FileRecord::names` and
    /// `named`.
    stores: Vec<PathBuf>,
    /// Searched by name only.
    named: Vec<PathBuf>,
    /// Candidates for every digest.
    files: Vec<PathBuf>,
    /// Searched last.
    remote: Option<Arc<dyn RemoteFiles>>,
    options: OpenOptions,
    /// The records of images about the files below them. If several images record a digest, the
    /// first record counts: it comes from the uppermost of these images.
    recorded: RefCell<HashMap<Digest, FileRecord>>,
    pub(super) lookups: RefCell<HashMap<Digest, Lookup>>,
    /// Files of `remote` that were opened before their lookup.
    opened: RefCell<HashMap<Digest, RemoteOpening>>,
    pub(super) problems: RefCell<Vec<Arc<LayerProblem>>>,
}

/// The outcome of [`RemoteFiles::open`].
type RemoteOpening = Result<Option<Arc<dyn Storage>>, RemoteFailure>;

/// The records of images about one file.
#[derive(Default)]
struct FileRecord {
    /// `layer 2 of 5`.
    label: Option<String>,
    recorded: Option<RecordedFile>,
    /// The names that the file may have, each with the directory of the image that records the
    /// name, if that image is on this machine.
    names: Vec<(Option<PathBuf>, String)>,
}

pub(super) enum Lookup {
    /// The file is being opened. Another lookup of the same digest in this state means that the
    /// file is below itself.
    Opening,
    /// The file is open. The number is the length of the longest chain of files that begins with
    /// this one.
    Open(LayerFile, u32),
    /// The file cannot be opened; `problems` has the reason.
    Failed,
}

impl Finder {
    pub(super) fn new(layout: Option<&Path>, places: Places<'_>, options: OpenOptions) -> Self {
        let stores = layout.into_iter().map(Path::to_owned);
        Finder {
            stores: stores.chain(places.stores.iter().cloned()).collect(),
            named: places.named.to_vec(),
            files: places.files.to_vec(),
            remote: places.remote.cloned(),
            options,
            recorded: RefCell::default(),
            lookups: RefCell::default(),
            opened: RefCell::default(),
            problems: RefCell::default(),
        }
    }

    pub(super) fn record_layers(&self, layers: &[RecordedFile]) {
        let count = layers.len();
        let mut all = self.recorded.borrow_mut();
        for (index, layer) in layers.iter().enumerate() {
            let known = all.entry(layer.digest.clone()).or_default();
            known
                .label
                .get_or_insert_with(|| format!("layer {} of {count}", index + 1));
            known.recorded.get_or_insert_with(|| layer.clone());
        }
    }

    /// `directory` is that of the image whose metadata has `backings`.
    pub(super) fn record_backings(&self, backings: &[RecordedBacking], directory: Option<&Path>) {
        let mut all = self.recorded.borrow_mut();
        for backing in backings {
            let known = all.entry(backing.file.digest.clone()).or_default();
            known.recorded.get_or_insert_with(|| backing.file.clone());
            if let Some(name) = &backing.name {
                known
                    .names
                    .push((directory.map(Path::to_owned), name.clone()));
            }
        }
    }

    /// Records what the metadata of `image` describes: the files below the image. The file of the
    /// image is in `directory`.
    pub(super) fn record_metadata(&self, image: &Image, directory: Option<&Path>) {
        // Without the metadata, the lookup compares the digest of each whole file.
        if image.backings().next().is_some()
            && let Ok(metadata) = image.metadata()
        {
            self.record_layers(&recorded_layers(&metadata));
            self.record_backings(&recorded_backings(&metadata), directory);
        }
    }

    /// Opens the backings of `image` for which this machine has no candidate, several at the same
    /// time. The lookups come later, one after the other, and then need not wait for the other
    /// machine.
    pub(super) fn open_remote_files(&self, image: &Image) {
        let Some(remote) = &self.remote else {
            return;
        };
        let is_local =
            |digest: &Digest| self.candidates(digest).iter().any(Candidate::may_be_local);
        let mut seen = HashSet::new();
        let recorded: Vec<RecordedFile> = image
            .backings()
            .filter_map(|backing| match backing.name {
                BackingName::Digest(digest) => Some(Digest::from_sha256(digest)),
                _ => None,
            })
            .filter(|digest| seen.insert(digest.clone()) && !is_local(digest))
            .filter_map(|digest| self.recorded.borrow().get(&digest)?.recorded.clone())
            .collect();
        let order: Vec<usize> = (0..recorded.len()).collect();
        let open = |index: usize| Ok(remote.open(&recorded[index].digest, &recorded[index]));
        // A file that does not open is reported at its lookup.
        if let Ok(opened) = parallel::run(&order, OPENINGS, &AtomicBool::new(false), open) {
            let digests = recorded.iter().map(|recorded| recorded.digest.clone());
            self.opened.borrow_mut().extend(digests.zip(opened));
        }
    }

    /// The name in messages of the file with this digest.
    fn name(&self, digest: &Digest) -> String {
        let all = self.recorded.borrow();
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
        let all = self.recorded.borrow();
        match all.get(digest).and_then(|known| known.label.clone()) {
            Some(label) => label,
            None => format!("backing {}", digest.short()),
        }
    }

    /// Every open file, each once: first those of `layers`, then the others in the order of their
    /// digests.
    pub(super) fn open_files(&self, layers: &[RecordedFile]) -> Vec<BelowFile> {
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

    /// Finds the file of this digest, which must have an address space of `size` bytes. Returns the
    /// file, and the length of the longest chain of files that begins with it. `depth` is the
    /// position of the file in the chain of this lookup: 1 for a file directly below the image.
    pub(super) fn find(&self, digest: &Digest, size: u64, depth: u32) -> Option<(LayerFile, u32)> {
        let too_deep = match self.lookups.borrow().get(digest) {
            // Two backing entries can name one file with different sizes.
            Some(Lookup::Open(file, _)) if file.image.size() != size => {
                self.report(LayerProblem::Wrong {
                    name: self.name(digest),
                    path: file.path.clone(),
                    property: "address space in bytes",
                    found: file.image.size().to_string(),
                    expected: size.to_string(),
                });
                return None;
            }
            Some(Lookup::Open(file, height)) => return Some((file.clone(), *height)),
            Some(Lookup::Failed) => return None,
            Some(Lookup::Opening) => true,
            None => depth > MAX_DEPTH,
        };
        if !too_deep {
            return self.open_first(digest, size, depth);
        }
        self.report(LayerProblem::TooDeep {
            name: self.name(digest),
        });
        None
    }

    fn report(&self, problem: LayerProblem) {
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
                // The user's file is tried for every digest, so most attempts fail.
                Err(_) if matches!(candidate, Candidate::UserFile(_)) => {}
                Err(problem) => {
                    first_problem.get_or_insert(problem);
                }
            }
        }
        set(Lookup::Failed);
        self.report(first_problem.unwrap_or_else(|| LayerProblem::Missing {
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
        let all = self.recorded.borrow();
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

    /// The candidates for a digest, in the order of the search: files that the stores name by the
    /// digest, files with names that images record, the files that the user named, and the file on
    /// the other machine.
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

    /// Opens a candidate, and checks that it is the file with this digest. Returns the file, and
    /// the length of the longest chain of files that begins with it; `None` if the file does not
    /// exist.
    fn open_candidate(
        &self,
        candidate: &Candidate,
        digest: &Digest,
        size: u64,
        depth: u32,
    ) -> Result<Option<(LayerFile, u32)>, LayerProblem> {
        let recorded = self
            .recorded
            .borrow()
            .get(digest)
            .and_then(|known| known.recorded.clone());
        let checked = CheckedFile {
            name: self.name(digest),
            path: candidate.path(),
        };
        let opened = match candidate {
            Candidate::Remote { .. } => self.opened.borrow_mut().remove(digest),
            _ => None,
        };
        let opened = opened.unwrap_or_else(|| candidate.open(recorded.as_ref()));
        let Some(file) = opened.map_err(|source| checked.cannot_open(source))? else {
            return Ok(None);
        };
        // The files below the candidate are opened only after the candidate is known to be the
        // right file.
        let alone = Image::open_storage(file.clone(), &self.options)
            .map_err(|error| checked.cannot_open(error.into()))?;
        match recorded {
            Some(recorded) => checked.check_header(alone.header(), &recorded)?,
            None => checked.check_digest(&*file, digest)?,
        }
        let below = FinderResolver {
            file: Some(&checked.name),
            ..FinderResolver::new(self, depth)
        };
        let has_no_backings = alone.backings().next().is_none();
        let image = if has_no_backings {
            alone
        } else {
            let directory = candidate.directory();
            self.record_metadata(&alone, directory.as_deref());
            Image::open_with_backings(file.clone(), &self.options, &below)
                .map_err(|error| checked.cannot_open(error.into()))?
        };
        if image.size() != size {
            return Err(checked.differs(
                "address space in bytes",
                image.size().to_string(),
                size.to_string(),
            ));
        }
        let height = below.height() + 1;
        if height > MAX_DEPTH {
            return Err(LayerProblem::TooDeep { name: checked.name });
        }
        let found = LayerFile {
            path: checked.path,
            storage: file,
            image,
        };
        Ok(Some((found, height)))
    }
}

/// A candidate during its check: its names for the problems that the check finds.
struct CheckedFile {
    /// The name in messages of the file that is looked up.
    name: String,
    /// The path of the candidate.
    path: PathBuf,
}

impl CheckedFile {
    /// Compares the header of the candidate with the values that an image records.
    fn check_header(&self, header: &Header, recorded: &RecordedFile) -> Result<(), LayerProblem> {
        let root = header.merkle.as_ref().map(|tree| tree.root);
        if root != Some(recorded.merkle_root) {
            let shown = |root: [u8; 32]| Digest::from_sha256(root).to_string();
            return Err(self.differs(
                "Merkle tree's root",
                root.map_or("none".into(), shown),
                shown(recorded.merkle_root),
            ));
        }
        if header.file_bytes != recorded.file_bytes {
            return Err(self.differs(
                "length in bytes",
                header.file_bytes.to_string(),
                recorded.file_bytes.to_string(),
            ));
        }
        Ok(())
    }

    /// Compares the digest of the whole candidate with `digest`.
    fn check_digest(&self, file: &dyn Storage, digest: &Digest) -> Result<(), LayerProblem> {
        let found = Digest::of_storage(file, digest.algorithm())
            .map_err(|error| self.cannot_open(error.into()))?;
        if found == *digest {
            Ok(())
        } else {
            Err(self.differs("digest", found.to_string(), digest.to_string()))
        }
    }

    fn cannot_open(&self, source: RemoteFailure) -> LayerProblem {
        LayerProblem::Open {
            name: self.name.clone(),
            path: self.path.clone(),
            source,
        }
    }

    fn differs(&self, property: &'static str, found: String, expected: String) -> LayerProblem {
        LayerProblem::Wrong {
            name: self.name.clone(),
            path: self.path.clone(),
            property,
            found,
            expected,
        }
    }
}

/// Resolves the backings of one file.
pub(super) struct FinderResolver<'f> {
    finder: &'f Finder,
    /// The name in messages of the file, if it was looked up here. The caller looks up the backings
    /// of another file that are not named by digest.
    file: Option<&'f str>,
    /// The number of files above this file in the chain.
    depth: u32,
    /// The length of the longest chain of files that begins with a backing resolved so far.
    height: Cell<u32>,
}

impl<'f> FinderResolver<'f> {
    pub(super) fn new(finder: &'f Finder, depth: u32) -> Self {
        FinderResolver {
            finder,
            file: None,
            depth,
            height: Cell::new(0),
        }
    }

    /// The length of the longest chain of files that begins with one of the resolved backings.
    pub(super) fn height(&self) -> u32 {
        self.height.get()
    }
}

impl BackingResolver for FinderResolver<'_> {
    fn resolve(&self, backing: &BackingEntry) -> Result<Option<Arc<dyn BlockDevice>>, bcow::Error> {
        let BackingName::Digest(digest) = backing.name else {
            if let Some(file) = self.file {
                self.finder.report(LayerProblem::NotByDigest {
                    name: file.to_owned(),
                    backing: backing.name.to_string(),
                });
            }
            return Ok(None);
        };
        let digest = Digest::from_sha256(digest);
        let Some((file, height)) = self.finder.find(&digest, backing.size, self.depth + 1) else {
            return Ok(None);
        };
        self.height.set(self.height.get().max(height));
        Ok(Some(file.image))
    }
}
