//! Opens a disk together with the files below it, by a policy of the user's.
//!
//! A disk names its backing by file name or by digest. A name is looked up in the directory of the file that says it and in
//! directories that the user gave, and nowhere else; it has no directories in it, and symbolic links are not followed. What
//! it leads to has to be a BCoW file with the recorded size and identity. Digests are looked up by whoever knows stores
//! ([`Digests`]).

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
use crate::storage::FileIdentity;
use crate::{BackingResolver, BlockDevice, Error, Image, NoBackings, OpenOptions, Storage};

/// Files below a file, one below the other (spec section 8).
pub const MAX_DEPTH: u32 = 64;

/// Finds backings that are named by digest.
pub trait Digests {
    /// The file of this digest and size, `depth` files below the first; and how many files, one below the other, it is.
    /// `None` if it cannot be had; the caller says why elsewhere.
    fn find(&self, backing: &BackingEntry, depth: u32) -> Option<(Arc<Image>, u32)>;
    /// Takes note of what an image that stands in `directory` says of files below it, before they are looked for. The image
    /// is known to be the right one.
    fn learn(&self, image: &Image, directory: &Path) {
        let _ = (image, directory);
    }
}

/// Finds nothing.
pub struct NoDigests;

impl Digests for NoDigests {
    fn find(&self, _: &BackingEntry, _: u32) -> Option<(Arc<Image>, u32)> {
        None
    }
}

/// Whether a file that may change is locked against writers while it is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Share {
    /// It is, and somebody who writes it already is an error.
    Lock,
    /// It is not. What is read may be torn.
    Force,
}

/// Where the files below a disk may be.
pub struct Policy<'a> {
    /// Directories for names, beside that of the file that says them.
    pub directories: &'a [PathBuf],
    /// Finds digests.
    pub digests: &'a dyn Digests,
    /// Whether files are locked.
    pub share: Share,
    /// How files are opened.
    pub options: OpenOptions,
}

/// A file below a disk that was found.
#[derive(Clone)]
pub struct ChainFile {
    /// How the file above names it.
    pub name: String,
    /// Where it is, if it was named by a file name.
    pub path: Option<PathBuf>,
    /// Its address space.
    pub image: Arc<Image>,
}

/// What is wrong with a file below a disk.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChainProblem {
    /// It is in none of the places to look.
    #[error("backing {name} is not in {}", listed(directories))]
    Missing {
        /// Its name.
        name: String,
        /// Where it was looked for.
        directories: Vec<PathBuf>,
    },
    /// There is something else in its place.
    #[error("backing {name}: {} is {what}", path.display())]
    NoFile {
        /// Its name.
        name: String,
        /// What was found.
        path: PathBuf,
        /// "a directory", "a symbolic link", "no regular file".
        what: &'static str,
    },
    /// It does not open.
    #[error("backing {name}: cannot open {}: {source}", path.display())]
    Open {
        /// Its name.
        name: String,
        /// Where it was found.
        path: PathBuf,
        /// Why.
        source: Error,
    },
    /// Somebody is writing to it.
    #[error("backing {name}: cannot read {}: {source}", path.display())]
    InUse {
        /// Its name.
        name: String,
        /// Where it was found.
        path: PathBuf,
        /// By whom.
        source: LockError,
    },
    /// Its address space has another size.
    #[error("backing {name}: {} has {found} bytes, not {expected} as when it was made the backing", path.display())]
    Size {
        /// Its name.
        name: String,
        /// Where it was found.
        path: PathBuf,
        /// Bytes it has.
        found: u64,
        /// Bytes it had.
        expected: u64,
    },
    /// It is not what it was.
    #[error("backing {name}: {} has changed since it was made the backing", path.display())]
    Changed {
        /// Its name.
        name: String,
        /// Where it was found.
        path: PathBuf,
    },
    /// The files below it are too many, one below the other, or one of them is below itself.
    #[error(
        "backing {name}: more than {MAX_DEPTH} files, one below the other, or a file below itself"
    )]
    TooDeep {
        /// Its name.
        name: String,
    },
    /// It is named by a digest, and nothing of this digest could be had.
    #[error("backing {name} is in no store")]
    NoDigest {
        /// The digest.
        name: String,
    },
}

impl ChainProblem {
    /// How the file above calls it.
    pub fn name(&self) -> &str {
        match self {
            ChainProblem::Missing { name, .. }
            | ChainProblem::NoFile { name, .. }
            | ChainProblem::Open { name, .. }
            | ChainProblem::InUse { name, .. }
            | ChainProblem::Size { name, .. }
            | ChainProblem::Changed { name, .. }
            | ChainProblem::TooDeep { name }
            | ChainProblem::NoDigest { name } => name,
        }
    }

    /// What the user could do about it, if there is something.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            ChainProblem::Missing { .. } => Some(
                "name the directory that has it with --backing-dir, or another backing with `bcow rebase --unsafe`",
            ),
            ChainProblem::Changed { .. } | ChainProblem::Size { .. } => Some(
                "what the disk shows of it is not what it was; if that is meant, `bcow rebase --unsafe` accepts the file as it is",
            ),
            ChainProblem::NoDigest { .. } => Some("name a directory that has it with --store"),
            ChainProblem::InUse { .. } => {
                Some("end the program that writes to it, or read what is there with --force-share")
            }
            ChainProblem::Open { source, .. }
                if matches!(
                    source.innermost(),
                    Error::Format(bcow_format::FormatError::NotBcow)
                ) =>
            {
                Some("a backing is a BCoW file; `bcow convert raw:FILE` or `qcow2:FILE` makes one")
            }
            ChainProblem::Open { .. }
            | ChainProblem::NoFile { .. }
            | ChainProblem::TooDeep { .. } => None,
        }
    }

    /// Stable code, for a checker's findings.
    pub fn code(&self) -> &'static str {
        match self {
            ChainProblem::Missing { .. } | ChainProblem::NoDigest { .. } => "backing-missing",
            ChainProblem::Open { .. } | ChainProblem::InUse { .. } => "backing-unreadable",
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

/// Opens the files below a disk, and keeps account of them. It is the resolver for the disk itself.
pub struct Opener<'a> {
    policy: Policy<'a>,
    /// Directory of the disk.
    directory: PathBuf,
    found: RefCell<Found>,
}

#[derive(Default)]
struct Found {
    files: Vec<ChainFile>,
    problems: Vec<Arc<ChainProblem>>,
    known: HashMap<FileIdentity, Known>,
}

#[derive(Clone)]
enum Known {
    /// It is being opened; whoever asks for it meanwhile is below itself.
    Opening,
    /// Open, with so many files one below the other, itself included.
    Open(Arc<Image>, u32),
    /// It cannot be had, and the problems say why.
    Failed,
}

impl<'a> Opener<'a> {
    /// For a disk at `path`.
    pub fn new(path: &Path, policy: Policy<'a>) -> Self {
        Opener {
            policy,
            directory: directory_of(path),
            found: RefCell::default(),
        }
    }

    /// The files that were found, each once, the nearest first.
    pub fn files(&self) -> Vec<ChainFile> {
        self.found.borrow().files.clone()
    }

    /// What is wrong with files that were asked for, in that order.
    pub fn problems(&self) -> Vec<Arc<ChainProblem>> {
        self.found.borrow().problems.clone()
    }

    /// The device that `backing` names, as the disk itself would open it, if nothing is wrong with it or below it.
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

/// Finds the backings of one file of the chain.
struct Level<'o> {
    opener: &'o Opener<'o>,
    /// Of the file.
    directory: &'o Path,
    /// Files above those that are found, themselves included.
    depth: u32,
    /// Files one below the other, as far as they were found.
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
    /// The backing; or what is wrong with it, if that is not told yet.
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
        };
        if self.depth - 1 + height > MAX_DEPTH {
            return Err(too_deep());
        }
        self.height.set(self.height.get().max(height));
        Ok(image)
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
        let given = self.opener.policy.directories.iter().map(PathBuf::as_path);
        let directories: Vec<&Path> = own.chain(given).collect();
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
            let no_file = |what| {
                Some(ChainProblem::NoFile {
                    name: name.to_owned(),
                    path: path.clone(),
                    what,
                })
            };
            match open_named(directory, name) {
                Ok(Named::File(file)) => {
                    let (image, height) = self.open_file(name, &path, file)?;
                    return Ok((image, path, height));
                }
                Ok(Named::Other(what)) => return Err(no_file(what)),
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
        // Taken out first: what is opened below borrows it again.
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
        // Listed before those below it.
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

/// Why a file does not open for reading.
#[derive(Debug)]
pub enum OpenProblem {
    /// Somebody writes to it.
    InUse(LockError),
    /// It is not as it should be, or cannot be read.
    Failed(Error),
}

/// Lets `digests` know what an image says of the files below it. What does not open is for others to say.
fn learn(file: &Arc<File>, options: &OpenOptions, digests: &dyn Digests, directory: &Path) {
    let names_some = crate::checked::read_header(&**file)
        .is_ok_and(|header| header.purpose == Use::Image && header.backing_count > 0);
    if names_some && let Ok(image) = Image::open_with_backings(file.clone(), options, &NoBackings) {
        digests.learn(&image, directory);
    }
}

/// Opens a file for reading, locked against writers for as long as `file` is open if it may change.
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

/// What a name that came out of a file leads to.
pub enum Named {
    /// A regular file, open for reading.
    File(File),
    /// Something else: "a directory", "a symbolic link", "no regular file".
    Other(&'static str),
}

/// Opens what has a name, which is a single one, in a directory. A symbolic link is not followed.
pub fn open_named(directory: &Path, name: &str) -> Result<Named, Errno> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(directory, flags | OFlags::DIRECTORY, Mode::empty())?;
    // O_NONBLOCK, lest opening a pipe waits for somebody who writes to it.
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

/// The directory that a file stands in, links followed.
pub fn directory_of(path: &Path) -> PathBuf {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}
