//! Opens a disk together with the files below it, under a policy of the user.
//!
//! A disk names its backing by file name or by digest. A file name is looked up only in the
//! directory of the file that contains it and in the directories of the user. The name has no
//! directory part, and symbolic links are not followed. The file that is found must be a BCoW file
//! with the recorded size and identity. Digests are resolved by an implementation of [`Digests`],
//! and URLs by one of [`Urls`].
//! The view of an image is made by an implementation of [`Views`], and never looked up.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow_format::{BackingEntry, BackingName, State, Use};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::lock::{FileLock, LockError};
use crate::new_file::parent_of;
use crate::storage::FileIdentity;
use crate::{BackingResolver, BlockDevice, Error, Image, NoBackings, OpenOptions, Storage};

/// Most files below a file, counted along one path (spec section 8).
pub const MAX_DEPTH: u32 = 64;

/// Resolves backings that are named by digest.
pub trait Digests {
    /// Returns the file with this digest and size, which is `depth` files below the first, and the
    /// number of files on the longest path from it downwards, itself included. `None` if the file
    /// is not available; the implementation reports the cause elsewhere.
    fn find(&self, backing: &BackingEntry, depth: u32) -> Option<(Arc<Image>, u32)>;
    /// Called with an image in `directory` before the files below it are resolved, so that the
    /// implementation can use its metadata. The size and identity of the image are compared with
    /// the recorded ones only later.
    fn learn(&self, image: &Image, directory: &Path) {
        let _ = (image, directory);
    }
}

/// Resolves no digest.
pub struct NoDigests;

impl Digests for NoDigests {
    fn find(&self, _: &BackingEntry, _: u32) -> Option<(Arc<Image>, u32)> {
        None
    }
}

/// Resolves backings that are named by URL.
pub trait Urls {
    /// Returns the file at `url` if it is the one with this Merkle root, and the number of files on
    /// the longest path from it downwards, itself included. Fails if the user does not allow the
    /// URL.
    fn find(&self, url: &str, merkle_root: &[u8; 32]) -> Result<(Arc<Image>, u32), UrlFailure>;
}

/// The reason why a file on another machine is not open.
pub type UrlFailure = Box<dyn std::error::Error + Send + Sync>;

/// Resolves no URL.
pub struct NoUrls;

impl Urls for NoUrls {
    fn find(&self, _: &str, _: &[u8; 32]) -> Result<(Arc<Image>, u32), UrlFailure> {
        Err("this program reads no files of other machines".into())
    }
}

/// Makes views of images, or finds them in a cache.
pub trait Views {
    /// Returns the view of `image` that has this layout, size and identity, and the file that has
    /// it. Fails if this program makes another view of the image.
    fn find(&self, image: &Arc<Image>, wanted: &WantedView) -> Result<FoundView, ViewFailure>;
}

/// The view that a disk needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WantedView {
    /// Version of the layout.
    pub layout: u32,
    /// Size of the address space in bytes.
    pub bytes: u64,
    /// Identity of the view.
    pub identity: [u8; 32],
}

/// A view that was made or found.
#[derive(Clone)]
pub struct FoundView {
    /// The open view.
    pub view: Arc<Image>,
    /// Path of the file.
    pub path: PathBuf,
}

/// The reason why there is no view.
pub type ViewFailure = Box<dyn std::error::Error + Send + Sync>;

/// Makes no views.
pub struct NoViews;

impl Views for NoViews {
    fn find(&self, _: &Arc<Image>, _: &WantedView) -> Result<FoundView, ViewFailure> {
        Err("this program makes no views".into())
    }
}

/// Whether a file that may change is locked against writers during reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Share {
    /// The file is locked; a present writer is an error.
    Lock,
    /// The file is not locked; reads may return torn data.
    Force,
}

/// Where and how the files below a disk are opened.
#[derive(Clone)]
pub struct Policy<'a> {
    /// Directories for file names, besides the directory of the file that contains the name.
    pub directories: &'a [PathBuf],
    /// Resolves digests.
    pub digests: &'a dyn Digests,
    /// Resolves URLs.
    pub urls: &'a dyn Urls,
    /// Makes views.
    pub views: &'a dyn Views,
    /// Whether files are locked.
    pub share: Share,
    /// How files are opened.
    pub options: OpenOptions,
}

/// A file below a disk.
#[derive(Clone)]
pub struct ChainFile {
    /// The name of the file in the file above.
    pub name: String,
    /// Path of the file, if it was named by a file name.
    pub path: Option<PathBuf>,
    /// The open file.
    pub image: Arc<Image>,
}

/// A problem with a file below a disk.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChainProblem {
    /// None of the directories has the file.
    #[error("backing {name} is not in {}", listed(directories))]
    Missing {
        /// Name of the backing.
        name: String,
        /// The directories that were searched.
        directories: Vec<PathBuf>,
    },
    /// The name leads to something other than a regular file.
    #[error("backing {name}: {} is {kind}", path.display())]
    NoFile {
        /// Name of the backing.
        name: String,
        /// The path that was found.
        path: PathBuf,
        /// "a directory", "a symbolic link", "no regular file".
        kind: &'static str,
    },
    /// The file cannot be opened.
    #[error("backing {name}: cannot open {}: {source}", path.display())]
    Open {
        /// Name of the backing.
        name: String,
        /// Path of the file.
        path: PathBuf,
        /// The cause.
        source: Error,
    },
    /// A writer has locked the file.
    #[error("backing {name}: cannot read {}: {source}", path.display())]
    InUse {
        /// Name of the backing.
        name: String,
        /// Path of the file.
        path: PathBuf,
        /// The failure of the lock, which names the writer.
        source: LockError,
    },
    /// The address space of the file has another size.
    #[error(
        "backing {name}: {} has {found} bytes, not {expected} as when it was made the backing",
        path.display()
    )]
    Size {
        /// Name of the backing.
        name: String,
        /// Path of the file.
        path: PathBuf,
        /// Size of the address space in bytes.
        found: u64,
        /// Size that the file above records, in bytes.
        expected: u64,
    },
    /// The identity of the file is not the recorded one.
    #[error("backing {name}: {} has changed since it was made the backing", path.display())]
    Changed {
        /// Name of the backing.
        name: String,
        /// Path of the file.
        path: PathBuf,
    },
    /// More than [`MAX_DEPTH`] files are below each other, or a file is below itself.
    #[error(
        "backing {name}: more than {MAX_DEPTH} files, one below the other, or a file below itself"
    )]
    TooDeep {
        /// Name of the backing.
        name: String,
    },
    /// The view of an image cannot be made.
    #[error("cannot make {name}: {source}")]
    View {
        /// The view, and the name of its image.
        name: String,
        /// The cause.
        source: ViewFailure,
    },
    /// The file at a URL cannot be opened.
    #[error("backing {name}: {source}")]
    Url {
        /// The URL.
        name: String,
        /// The cause.
        source: UrlFailure,
    },
    /// The address space of the file at a URL has another size.
    #[error("backing {name} has {found} bytes, not {expected} as when it was made the backing")]
    UrlSize {
        /// The URL.
        name: String,
        /// Size of the address space in bytes.
        found: u64,
        /// Size that the file above records, in bytes.
        expected: u64,
    },
    /// The backing is named by a digest that is not available.
    #[error("backing {name} is in no store")]
    NoDigest {
        /// The digest.
        name: String,
    },
}

impl ChainProblem {
    /// The name of the backing in the file above.
    pub fn name(&self) -> &str {
        match self {
            ChainProblem::Missing { name, .. }
            | ChainProblem::NoFile { name, .. }
            | ChainProblem::Open { name, .. }
            | ChainProblem::InUse { name, .. }
            | ChainProblem::Size { name, .. }
            | ChainProblem::Changed { name, .. }
            | ChainProblem::TooDeep { name }
            | ChainProblem::View { name, .. }
            | ChainProblem::Url { name, .. }
            | ChainProblem::UrlSize { name, .. }
            | ChainProblem::NoDigest { name } => name,
        }
    }

    /// Stable code for the findings of a check.
    pub fn code(&self) -> &'static str {
        match self {
            ChainProblem::Missing { .. } | ChainProblem::NoDigest { .. } => "backing-missing",
            ChainProblem::Open { .. }
            | ChainProblem::InUse { .. }
            | ChainProblem::Url { .. }
            | ChainProblem::View { .. } => "backing-unreadable",
            _ => "backing-entry",
        }
    }
}

fn listed(directories: &[PathBuf]) -> String {
    let names: Vec<String> = directories
        .iter()
        .map(|directory| directory.display().to_string())
        .collect();
    match &names[..] {
        [] => "any directory".to_owned(),
        names => names.join(", "),
    }
}

/// Opens the files below a disk and records them. It is the resolver for the disk itself.
pub struct Opener<'a> {
    policy: Policy<'a>,
    /// Directory of the disk.
    directory: PathBuf,
    found: RefCell<ChainFiles>,
}

#[derive(Default)]
struct ChainFiles {
    files: Vec<ChainFile>,
    problems: Vec<Arc<ChainProblem>>,
    known: HashMap<FileIdentity, Known>,
}

#[derive(Clone)]
enum Known {
    /// The file is being opened. A request for it now means that it is below itself.
    Opening,
    /// The file is open; with the number of files on the longest path from it downwards, itself
    /// included.
    Open(Arc<Image>, u32),
    /// The file is not available; the problem is recorded.
    Failed,
}

impl<'a> Opener<'a> {
    /// Makes an opener for the disk at `path`.
    pub fn new(path: &Path, policy: Policy<'a>) -> Self {
        Opener {
            policy,
            directory: directory_of(path),
            found: RefCell::default(),
        }
    }

    /// The files that were found, each once, nearest first.
    pub fn files(&self) -> Vec<ChainFile> {
        self.found.borrow().files.clone()
    }

    /// The problems of the requested files, in the order of the requests.
    pub fn problems(&self) -> Vec<Arc<ChainProblem>> {
        self.found.borrow().problems.clone()
    }

    /// Opens the device that `backing` names, as an opening of the disk does. Fails with a problem
    /// of the file or of a file below it.
    pub fn open(&self, backing: &BackingEntry) -> Result<Arc<dyn BlockDevice>, Arc<ChainProblem>> {
        let found = self.level().resolve(backing).ok().flatten();
        match (self.found.borrow().problems.first(), found) {
            (None, Some(device)) => Ok(device),
            (Some(problem), _) => Err(problem.clone()),
            (None, None) => Err(Arc::new(ChainProblem::TooDeep {
                name: backing.name.to_string(),
            })),
        }
    }

    fn level(&self) -> Level<'_> {
        Level {
            opener: self,
            directory: &self.directory,
            depth: 1,
            height: Cell::new(0),
        }
    }
}

impl BackingResolver for Opener<'_> {
    fn resolve(&self, backing: &BackingEntry) -> Result<Option<Arc<dyn BlockDevice>>, Error> {
        self.level().resolve(backing)
    }
}

/// Resolves the backings of one file of the chain.
struct Level<'o> {
    opener: &'o Opener<'o>,
    /// Directory of that file.
    directory: &'o Path,
    /// Depth of the backings that are resolved: 1 for the files directly below the disk.
    depth: u32,
    /// Length of the longest path of files found so far.
    height: Cell<u32>,
}

impl BackingResolver for Level<'_> {
    fn resolve(&self, backing: &BackingEntry) -> Result<Option<Arc<dyn BlockDevice>>, Error> {
        match self.find(backing) {
            Ok(image) => Ok(Some(image)),
            Err(problem) => {
                if let Some(problem) = problem {
                    let mut found = self.opener.found.borrow_mut();
                    found.problems.push(Arc::new(problem));
                }
                Ok(None)
            }
        }
    }
}

impl Level<'_> {
    /// Returns the backing, or its problem; `None` as the problem if it is already recorded.
    fn find(&self, backing: &BackingEntry) -> Result<Arc<Image>, Option<ChainProblem>> {
        let name = backing.name.to_string();
        let too_deep = || Some(ChainProblem::TooDeep { name: name.clone() });
        if self.depth > MAX_DEPTH {
            return Err(too_deep());
        }
        let (image, height) = match &backing.name {
            BackingName::Digest(_) => {
                let digests = self.opener.policy.digests;
                let (image, height) = digests
                    .find(backing, self.depth)
                    .ok_or_else(|| Some(ChainProblem::NoDigest { name: name.clone() }))?;
                self.add(&name, None, &image);
                (image, height)
            }
            BackingName::FileName { identity, .. } => {
                let (image, path, height) = self.find_named(&name)?;
                if image.size() != backing.size {
                    return Err(Some(ChainProblem::Size {
                        name,
                        path,
                        found: image.size(),
                        expected: backing.size,
                    }));
                }
                if identity.is_some_and(|identity| identity != image.identity_hash()) {
                    return Err(Some(ChainProblem::Changed { name, path }));
                }
                (image, height)
            }
            BackingName::Url { url, merkle_root } => {
                let found = self.opener.policy.urls.find(url, merkle_root);
                let (image, height) = found.map_err(|source| {
                    let name = name.clone();
                    Some(ChainProblem::Url { name, source })
                })?;
                if image.size() != backing.size {
                    return Err(Some(ChainProblem::UrlSize {
                        name,
                        found: image.size(),
                        expected: backing.size,
                    }));
                }
                self.add(&name, None, &image);
                (image, height)
            }
            BackingName::View {
                layout,
                identity,
                image,
            } => {
                let wanted = WantedView {
                    layout: *layout,
                    bytes: backing.size,
                    identity: *identity,
                };
                self.find_view(&name, image, &wanted)?
            }
        };
        if self.depth - 1 + height > MAX_DEPTH {
            return Err(too_deep());
        }
        self.height.set(self.height.get().max(height));
        Ok(image)
    }

    /// The view of an image that is found like a backing of the same file.
    fn find_view(
        &self,
        name: &str,
        image: &BackingEntry,
        wanted: &WantedView,
    ) -> Result<(Arc<Image>, u32), Option<ChainProblem>> {
        let below = Level {
            opener: self.opener,
            directory: self.directory,
            depth: self.depth + 1,
            height: Cell::new(0),
        };
        // The view is listed before the files below it.
        let position = self.opener.found.borrow().files.len();
        let image = below.find(image)?;
        let found = self.opener.policy.views.find(&image, wanted);
        let FoundView { view, path } = found.map_err(|source| {
            Some(ChainProblem::View {
                name: name.to_owned(),
                source,
            })
        })?;
        let file = ChainFile {
            name: name.to_owned(),
            path: Some(path),
            image: view.clone(),
        };
        self.opener.found.borrow_mut().files.insert(position, file);
        Ok((view, below.height.get() + 1))
    }

    fn add(&self, name: &str, path: Option<&Path>, image: &Arc<Image>) {
        self.opener.found.borrow_mut().files.push(ChainFile {
            name: name.to_owned(),
            path: path.map(Path::to_owned),
            image: image.clone(),
        });
    }

    fn find_named(&self, name: &str) -> Result<(Arc<Image>, PathBuf, u32), Option<ChainProblem>> {
        let own = std::iter::once(self.directory);
        let allowed = self.opener.policy.directories.iter().map(PathBuf::as_path);
        let directories: Vec<&Path> = own.chain(allowed).collect();
        for directory in &directories {
            let path = directory.join(name);
            let failed = |error: io::Error| {
                Some(ChainProblem::Open {
                    name: name.to_owned(),
                    path: path.clone(),
                    source: Error::Io {
                        action: "open",
                        offset: 0,
                        source: error,
                    },
                })
            };
            let no_file = |kind| {
                Some(ChainProblem::NoFile {
                    name: name.to_owned(),
                    path: path.clone(),
                    kind,
                })
            };
            match open_named(directory, name) {
                Ok(Named::File(file)) => {
                    let (image, height) = self.open_file(name, &path, file)?;
                    return Ok((image, path, height));
                }
                Ok(Named::Other(kind)) => return Err(no_file(kind)),
                Err(Errno::NOENT) => {}
                Err(error) => return Err(failed(error.into())),
            }
        }
        Err(Some(ChainProblem::Missing {
            name: name.to_owned(),
            directories: directories.into_iter().map(Path::to_owned).collect(),
        }))
    }

    fn open_file(
        &self,
        name: &str,
        path: &Path,
        file: File,
    ) -> Result<(Arc<Image>, u32), Option<ChainProblem>> {
        let failed = |source| {
            Some(ChainProblem::Open {
                name: name.to_owned(),
                path: path.to_owned(),
                source,
            })
        };
        let Some(identity) = Storage::identity(&file) else {
            return Err(failed(Error::Unsupported("a file without a number".into())));
        };
        // In a separate statement, because the opening of files below borrows `found` again.
        let known = self.opener.found.borrow().known.get(&identity).cloned();
        match known {
            Some(Known::Open(image, height)) => return Ok((image, height)),
            Some(Known::Opening) => {
                return Err(Some(ChainProblem::TooDeep {
                    name: name.to_owned(),
                }));
            }
            Some(Known::Failed) => return Err(None),
            None => {}
        }
        let know = |known| {
            let mut found = self.opener.found.borrow_mut();
            found.known.insert(identity, known);
        };
        know(Known::Opening);
        let opened = self.open_new(name, path, file);
        match &opened {
            Ok((image, height)) => know(Known::Open(image.clone(), *height)),
            Err(_) => know(Known::Failed),
        }
        opened
    }

    fn open_new(
        &self,
        name: &str,
        path: &Path,
        file: File,
    ) -> Result<(Arc<Image>, u32), Option<ChainProblem>> {
        let below = Level {
            opener: self.opener,
            directory: &directory_of(path),
            depth: self.depth + 1,
            height: Cell::new(0),
        };
        // A file is listed before the files below it.
        let position = self.opener.found.borrow().files.len();
        let file = Arc::new(file);
        let policy = &self.opener.policy;
        learn(&file, &policy.options, policy.digests, below.directory);
        let image =
            open_shared(&file, policy.share, &policy.options, &below).map_err(|problem| {
                match problem {
                    OpenProblem::InUse(source) => Some(ChainProblem::InUse {
                        name: name.to_owned(),
                        path: path.to_owned(),
                        source,
                    }),
                    OpenProblem::Failed(source) => Some(ChainProblem::Open {
                        name: name.to_owned(),
                        path: path.to_owned(),
                        source,
                    }),
                }
            })?;
        self.opener.found.borrow_mut().files.insert(
            position,
            ChainFile {
                name: name.to_owned(),
                path: Some(path.to_owned()),
                image: image.clone(),
            },
        );
        Ok((image, below.height.get() + 1))
    }
}

/// The reason why a file cannot be opened for reading.
#[derive(Debug)]
pub enum OpenProblem {
    /// A writer has locked the file.
    InUse(LockError),
    /// The file is damaged or cannot be read.
    Failed(Error),
}

/// Passes an image to `digests` before the files below it are resolved. An error is ignored here,
/// because the opening of the image reports it.
fn learn(file: &Arc<File>, options: &OpenOptions, digests: &dyn Digests, directory: &Path) {
    let names_some = crate::checked::read_header(&**file)
        .is_ok_and(|header| header.purpose == Use::Image && header.backing_count > 0);
    if names_some && let Ok(image) = Image::open_with_backings(file.clone(), options, &NoBackings) {
        digests.learn(&image, directory);
    }
}

/// Opens a file for reading. With [`Share::Lock`] a writable file is locked against writers for as
/// long as `file` is open.
pub fn open_shared(
    file: &Arc<File>,
    share: Share,
    options: &OpenOptions,
    resolver: &dyn BackingResolver,
) -> Result<Arc<Image>, OpenProblem> {
    if share == Share::Lock {
        let header = crate::checked::read_header(&**file).map_err(OpenProblem::Failed)?;
        if header.state == State::Writable {
            FileLock::shared(file).map_err(OpenProblem::InUse)?;
        }
    }
    Image::open_with_backings(file.clone(), options, resolver).map_err(OpenProblem::Failed)
}

/// The object that a file name leads to.
pub enum Named {
    /// A regular file, open for reading.
    File(File),
    /// Another object: "a directory", "a symbolic link", "no regular file".
    Other(&'static str),
}

/// Opens `name`, a single path component, in a directory. Does not follow a symbolic link.
pub fn open_named(directory: &Path, name: &str) -> Result<Named, Errno> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(directory, flags | OFlags::DIRECTORY, Mode::empty())?;
    // Without O_NONBLOCK, the opening of a FIFO would wait for a writer.
    let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = match rustix::fs::openat(&directory, name, flags, Mode::empty()) {
        Err(Errno::LOOP) => return Ok(Named::Other("a symbolic link")),
        opened => opened?,
    };
    let kind = FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode);
    Ok(match kind {
        FileType::RegularFile => Named::File(file.into()),
        FileType::Directory => Named::Other("a directory"),
        _ => Named::Other("no regular file"),
    })
}

/// The directory of a file, with symbolic links resolved.
pub fn directory_of(path: &Path) -> PathBuf {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    parent_of(&path).to_owned()
}
