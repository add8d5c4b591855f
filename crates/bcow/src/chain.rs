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
pub const MAX_DEPTH: u32 = 128;

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
    fn find(
        &self,
        image: Option<&Arc<Image>>,
        wanted: &WantedView,
    ) -> Result<FoundView, ViewFailure>;
    /// Whether the implementation has an image. Then the name that a disk has for its image does
    /// not count, and [`Views::find`] gets none.
    fn have_image(&self) -> bool {
        false
    }
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
    fn find(&self, _: Option<&Arc<Image>>, _: &WantedView) -> Result<FoundView, ViewFailure> {
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
#[error("{}{name}{cause}", cause.subject())]
pub struct ChainProblem {
    /// The name of the backing in the file above.
    pub name: String,
    /// What is wrong with it.
    pub cause: ChainCause,
}

/// What is wrong with a file below a disk. As a text, it follows the name of the backing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChainCause {
    /// None of the directories has the file.
    #[error(" is not in {}", listed(.0))]
    Missing(Vec<PathBuf>),
    /// The name leads to something other than a regular file: "a directory", "a symbolic link", "no
    /// regular file".
    #[error(": {} is {}", .0.display(), .1)]
    NoFile(PathBuf, &'static str),
    /// The file at this path cannot be opened.
    #[error(": cannot open {}: {}", .0.display(), .1)]
    Open(PathBuf, Error),
    /// A writer has locked the file at this path. The failure of the lock names the writer.
    #[error(": cannot read {}: {}", .0.display(), .1)]
    InUse(PathBuf, LockError),
    /// The address space of the file has another size.
    #[error(
        "{} has {found} bytes, not {expected} as when it was made the backing",
        found_at(path)
    )]
    Size {
        /// Path of the file; `None` if it is at a URL.
        path: Option<PathBuf>,
        /// Size of the address space in bytes.
        found: u64,
        /// Size that the file above records, in bytes.
        expected: u64,
    },
    /// The identity of the file at this path is not the recorded one.
    #[error(": {} has changed since it was made the backing", .0.display())]
    Changed(PathBuf),
    /// More than [`MAX_DEPTH`] files are below each other, or a file is below itself.
    #[error(": more than {MAX_DEPTH} files, one below the other, or a file below itself")]
    TooDeep,
    /// The view of an image cannot be made.
    #[error(": {0}")]
    View(ViewFailure),
    /// The file at a URL cannot be opened.
    #[error(": {0}")]
    Url(UrlFailure),
    /// The backing is named by a digest that is not available.
    #[error(" is in no store")]
    NoDigest,
}

impl ChainProblem {
    /// Stable code for the findings of a check.
    pub fn code(&self) -> &'static str {
        match self.cause {
            ChainCause::Missing(_) | ChainCause::NoDigest => "backing-missing",
            ChainCause::Open(..)
            | ChainCause::InUse(..)
            | ChainCause::Url(_)
            | ChainCause::View(_) => "backing-unreadable",
            _ => "backing-entry",
        }
    }
}

impl ChainCause {
    /// The words in front of the name of the backing.
    fn subject(&self) -> &'static str {
        match self {
            ChainCause::View(_) => "cannot make ",
            _ => "backing ",
        }
    }
}

fn found_at(path: &Option<PathBuf>) -> String {
    let path = path.as_ref();
    path.map_or_else(String::new, |path| format!(": {}", path.display()))
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
    height: u32,
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

    /// The number of files on the longest path down from the disk, without the disk.
    pub fn height(&self) -> u32 {
        self.found.borrow().height
    }

    /// The problems of the requested files, in the order of the requests.
    pub fn problems(&self) -> Vec<Arc<ChainProblem>> {
        self.found.borrow().problems.clone()
    }

    /// Opens the device that `backing` names, as an opening of the disk does. Fails with a problem
    /// of the file or of a file below it.
    pub fn open(&self, backing: &BackingEntry) -> Result<Arc<dyn BlockDevice>, Arc<ChainProblem>> {
        let found = self.level().find(backing);
        match (self.found.borrow().problems.first(), found) {
            (None, Some(image)) => Ok(image),
            (Some(problem), _) => Err(problem.clone()),
            (None, None) => Err(Arc::new(ChainProblem {
                name: backing.name.to_string(),
                cause: ChainCause::TooDeep,
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
            Some(image) => Ok(Some(image)),
            None => Ok(None),
        }
    }
}

impl Level<'_> {
    /// Returns the backing. If it is not available, its problem is recorded.
    fn find(&self, backing: &BackingEntry) -> Option<Arc<Image>> {
        let name = backing.name.to_string();
        match self.find_as(&name, backing) {
            Ok(image) => Some(image),
            Err(cause) => {
                let problem = Arc::new(ChainProblem {
                    name,
                    cause: cause?,
                });
                self.opener.found.borrow_mut().problems.push(problem);
                None
            }
        }
    }

    /// Returns the backing, or what is wrong; `None` if that is already recorded.
    fn find_as(
        &self,
        name: &str,
        backing: &BackingEntry,
    ) -> Result<Arc<Image>, Option<ChainCause>> {
        if self.depth > MAX_DEPTH {
            return Err(Some(ChainCause::TooDeep));
        }
        let policy = &self.opener.policy;
        let (image, height) = match &backing.name {
            BackingName::Digest(_) => {
                let found = policy.digests.find(backing, self.depth);
                let (image, height) = found.ok_or(ChainCause::NoDigest)?;
                self.list(self.position(), name, None, &image);
                (image, height)
            }
            BackingName::FileName { identity, .. } => {
                let (image, path, height) = self.find_named(name)?;
                check_size(&image, backing, Some(&path))?;
                if identity.is_some_and(|identity| identity != image.identity_hash()) {
                    return Err(Some(ChainCause::Changed(path)));
                }
                (image, height)
            }
            BackingName::Url { url, merkle_root } => {
                let found = policy.urls.find(url, merkle_root);
                let (image, height) = found.map_err(ChainCause::Url)?;
                check_size(&image, backing, None)?;
                self.list(self.position(), name, None, &image);
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
                self.find_view(name, image, &wanted)?
            }
        };
        if self.depth - 1 + height > MAX_DEPTH {
            return Err(Some(ChainCause::TooDeep));
        }
        self.height.set(self.height.get().max(height));
        let mut found = self.opener.found.borrow_mut();
        found.height = found.height.max(self.depth - 1 + height);
        Ok(image)
    }

    /// The view of an image that is found like a backing of the same file.
    fn find_view(
        &self,
        name: &str,
        image: &BackingEntry,
        wanted: &WantedView,
    ) -> Result<(Arc<Image>, u32), Option<ChainCause>> {
        let below = self.below(self.directory);
        // The view is listed before the files below it.
        let position = self.position();
        let views = self.opener.policy.views;
        let image = if views.have_image() {
            // The image.
            below.height.set(1);
            None
        } else {
            Some(below.find(image).ok_or(None)?)
        };
        let found = views.find(image.as_ref(), wanted);
        let FoundView { view, path } = found.map_err(ChainCause::View)?;
        self.list(position, name, Some(path), &view);
        Ok((view, below.height.get() + 1))
    }

    /// Resolves the backings of a file in `directory` that this level has found.
    fn below<'d>(&'d self, directory: &'d Path) -> Level<'d> {
        Level {
            opener: self.opener,
            directory,
            depth: self.depth + 1,
            height: Cell::new(0),
        }
    }

    /// The number of files that were found so far.
    fn position(&self) -> usize {
        self.opener.found.borrow().files.len()
    }

    fn list(&self, position: usize, name: &str, path: Option<PathBuf>, image: &Arc<Image>) {
        let file = ChainFile {
            name: name.to_owned(),
            path,
            image: image.clone(),
        };
        self.opener.found.borrow_mut().files.insert(position, file);
    }

    fn find_named(&self, name: &str) -> Result<(Arc<Image>, PathBuf, u32), Option<ChainCause>> {
        let own = std::iter::once(self.directory);
        let allowed = self.opener.policy.directories.iter().map(PathBuf::as_path);
        let directories: Vec<&Path> = own.chain(allowed).collect();
        for directory in &directories {
            let path = directory.join(name);
            match open_named(directory, name) {
                Ok(Named::File(file)) => {
                    let (image, height) = self.open_file(name, &path, file)?;
                    return Ok((image, path, height));
                }
                Ok(Named::Other(kind)) => return Err(Some(ChainCause::NoFile(path, kind))),
                Err(Errno::NOENT) => {}
                Err(errno) => {
                    let source = Error::io("open", 0, errno.into());
                    return Err(Some(ChainCause::Open(path, source)));
                }
            }
        }
        let directories = directories.into_iter().map(Path::to_owned);
        Err(Some(ChainCause::Missing(directories.collect())))
    }

    fn open_file(
        &self,
        name: &str,
        path: &Path,
        file: File,
    ) -> Result<(Arc<Image>, u32), Option<ChainCause>> {
        let Some(identity) = Storage::identity(&file) else {
            let source = Error::Unsupported("a file without a number".into());
            return Err(Some(ChainCause::Open(path.to_owned(), source)));
        };
        // In a separate statement, because the opening of files below borrows `found` again.
        let known = self.opener.found.borrow().known.get(&identity).cloned();
        match known {
            Some(Known::Open(image, height)) => return Ok((image, height)),
            Some(Known::Opening) => return Err(Some(ChainCause::TooDeep)),
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
    ) -> Result<(Arc<Image>, u32), Option<ChainCause>> {
        let directory = directory_of(path);
        let below = self.below(&directory);
        // A file is listed before the files below it.
        let position = self.position();
        let file = Arc::new(file);
        let policy = &self.opener.policy;
        learn(&file, &policy.options, policy.digests, below.directory);
        let opened = open_shared(&file, policy.share, &policy.options, &below);
        let image = opened.map_err(|problem| match problem {
            OpenProblem::InUse(source) => ChainCause::InUse(path.to_owned(), source),
            OpenProblem::Failed(source) => ChainCause::Open(path.to_owned(), source),
        })?;
        self.list(position, name, Some(path.to_owned()), &image);
        Ok((image, below.height.get() + 1))
    }
}

/// Fails if a file has another size than the file above records.
fn check_size(
    image: &Image,
    backing: &BackingEntry,
    path: Option<&Path>,
) -> Result<(), ChainCause> {
    let (found, expected) = (image.size(), backing.size);
    if found == expected {
        return Ok(());
    }
    Err(ChainCause::Size {
        path: path.map(Path::to_owned),
        found,
        expected,
    })
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
