//! Disks and the files below them, as the commands open them.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow::chain::{self, ChainFile, ChainProblem, OpenProblem, Opener, Policy, Share};
use bcow::format::{HEADER_AREA_BYTES, Header, State, Use, choose_header, incompatible};
use bcow::lock::FileLock;
use bcow::{Disk, Error, Image, OpenOptions, Storage};
use bcow_oci::ImageName;
use bcow_oci::store::{Places, Stores};

use crate::error::{CommandError, Context};
use crate::image::{StoreArgs, cannot_open_file, parse_name, refuse_what_is_no_file};
use crate::running;

/// A disk, open for reading, with the files below it.
pub struct OpenChain {
    pub image: Arc<Image>,
    /// Where the disk is.
    pub path: PathBuf,
    /// The files below it that were found, the nearest first.
    pub files: Vec<ChainFile>,
    /// What is wrong with files below it.
    pub problems: Vec<Problem>,
}

/// A disk, open for writing, and locked; so are the writable files below it, against writers.
pub struct WritableDisk {
    pub disk: Disk,
    // Dropped behind the disk.
    _lock: FileLock,
}

/// What keeps others from writing to a disk. The files below it are kept by the disk itself.
pub struct Held {
    _lock: FileLock,
}

impl WritableDisk {
    /// The disk alone, for who shares it, and what is to be kept as long.
    pub fn into_parts(self) -> (Disk, Held) {
        (self.disk, Held { _lock: self._lock })
    }
}

/// What is wrong with a file below a disk.
#[derive(Debug, Clone)]
pub struct Problem {
    pub text: String,
    pub hint: Option<String>,
}

/// Whether the file at `path` is a disk, according to its header.
pub fn is_disk(path: &Path) -> bool {
    File::open(path)
        .ok()
        .and_then(|file| header_of(&file))
        .is_some_and(|header| header.purpose != Use::Image)
}

/// Whether the file at `path` is a disk that is not sealed, according to its header.
pub fn is_writable_disk(path: &Path) -> bool {
    File::open(path)
        .ok()
        .and_then(|file| header_of(&file))
        .is_some_and(|header| header.purpose == Use::Disk && header.state == State::Writable)
}

/// The header of a file, if it has one.
pub fn header_of(file: &File) -> Option<Header> {
    let mut area = [0; HEADER_AREA_BYTES];
    Storage::read_at(file, 0, &mut area).ok()?;
    choose_header(&area).ok()
}

/// Finds the files below a disk as the command line allows it.
pub struct Below {
    directories: Vec<PathBuf>,
    stores: Stores,
    share: Share,
    options: OpenOptions,
}

impl Below {
    pub fn new(args: &StoreArgs, options: &OpenOptions) -> Result<Self, CommandError> {
        let directories = args.backing_dirs()?.to_vec();
        let stores = args.directories()?;
        let places = Places {
            stores: &stores,
            named: &directories,
            ..Places::default()
        };
        Ok(Below {
            stores: Stores::new(places, options.clone()),
            directories,
            share: args.share(),
            options: options.clone(),
        })
    }

    /// For the disk at `path`.
    pub fn opener(&self, path: &Path) -> Opener<'_> {
        Opener::new(
            path,
            Policy {
                directories: &self.directories,
                digests: &self.stores,
                share: self.share,
                options: self.options.clone(),
            },
        )
    }

    /// What is wrong with the files that `opener` was asked for.
    pub fn problems(&self, opener: &Opener<'_>) -> Vec<Problem> {
        let in_stores = self.stores.problems();
        let mut in_stores = in_stores.iter();
        opener
            .problems()
            .iter()
            .map(|problem| match &**problem {
                // The stores know better what was wrong with it.
                ChainProblem::NoDigest { .. } => match in_stores.next() {
                    Some(problem) => Problem {
                        text: problem.to_string(),
                        hint: Some(problem.hint().to_owned()),
                    },
                    None => Problem::of(problem),
                },
                problem => Problem::of(problem),
            })
            .collect()
    }
}

impl Problem {
    fn of(problem: &ChainProblem) -> Self {
        Problem {
            text: problem.to_string(),
            hint: problem.hint().map(str::to_owned),
        }
    }

    /// What to say when the disk that the user calls `name` cannot do without the file.
    pub fn failure(&self, name: &Path) -> CommandError {
        let failure = CommandError::new(format!("cannot open {}", name.display()))
            .caused_by_text(self.text.clone());
        match &self.hint {
            Some(hint) => failure.hint(hint.clone()),
            None => failure,
        }
    }
}

/// Opens the disk in `file` for reading, with whatever can be had of the files below it.
pub fn open_chain(
    name: &Path,
    path: &Path,
    stores: &StoreArgs,
    options: &OpenOptions,
) -> Result<OpenChain, CommandError> {
    let cannot = || format!("cannot open {}", name.display());
    let below = Below::new(stores, options)?;
    let opener = below.opener(path);
    let file = Arc::new(File::open(path).context(cannot)?);
    let image =
        chain::open_shared(&file, stores.share(), options, &opener).map_err(
            |problem| match problem {
                OpenProblem::InUse(error) => in_use(cannot(), path, &error, true),
                OpenProblem::Failed(error) => cannot_open_file(name, path, &error),
            },
        )?;
    Ok(OpenChain {
        image,
        path: path.to_owned(),
        files: opener.files(),
        problems: below.problems(&opener),
    })
}

fn in_use(
    cannot: String,
    path: &Path,
    error: &(dyn std::error::Error + 'static),
    reading: bool,
) -> CommandError {
    let failure = running::describe_lock_holders(path).into_iter().fold(
        CommandError::new(cannot).caused_by(error),
        CommandError::caused_by_text,
    );
    match reading {
        true => failure.hint("end that program, or read what is there with --force-share"),
        false => failure,
    }
}

/// Opens the disk that the user calls `name` for writing. `what` is the command, for the error of a
/// second writer.
pub fn open_writable(
    name: &Path,
    stores: &StoreArgs,
    options: &OpenOptions,
    what: &str,
) -> Result<WritableDisk, CommandError> {
    let below = Below::new(stores, options)?;
    let (file, path, lock) = lock_disk(name, what)?;
    let disk = open_locked(name, &path, &file, &below, options)?;
    Ok(WritableDisk { disk, _lock: lock })
}

/// Opens the disk in a file that [`lock_disk`] gave. The writable files below it are locked against writers as long as it
/// is open.
pub fn open_locked(
    name: &Path,
    path: &Path,
    file: &Arc<File>,
    below: &Below,
    options: &OpenOptions,
) -> Result<Disk, CommandError> {
    let opener = below.opener(path);
    Disk::open(file.clone(), options, &opener).map_err(|error| {
        match (&error, below.problems(&opener).first()) {
            (Error::MissingBacking { .. }, Some(problem)) => problem.failure(name),
            _ => cannot_open_file(name, name, &error),
        }
    })
}

/// A writable disk opened for reading, locked against writers.
pub struct LockedImage {
    pub image: Arc<Image>,
    pub file: Arc<File>,
    /// The path, with links resolved.
    pub path: PathBuf,
    _lock: FileLock,
}

/// Opens the writable disk that the user calls `name`, to replace its file. `what` is the command,
/// for the error of a second writer.
pub fn open_to_replace(
    name: &Path,
    stores: &StoreArgs,
    what: &str,
) -> Result<LockedImage, CommandError> {
    let options = OpenOptions::default();
    let (file, path, lock) = lock_disk(name, what)?;
    let below = Below::new(stores, &options)?;
    let opener = below.opener(&path);
    let image = Image::open_with_backings(file.clone(), &options, &opener)
        .map_err(|error| cannot_open_file(name, name, &error))?;
    match below.problems(&opener).first() {
        Some(problem) => Err(problem.failure(name)),
        None => Ok(LockedImage {
            image,
            file,
            path,
            _lock: lock,
        }),
    }
}

/// Opens and locks the file of a writable disk, without its backings. Also returns its path, with
/// links resolved.
pub fn lock_disk(name: &Path, what: &str) -> Result<(Arc<File>, PathBuf, FileLock), CommandError> {
    let parsed = parse_name(name)?;
    refuse_what_is_no_file(&parsed)?;
    let ImageName::File(named) = parsed else {
        return Err(
            CommandError::new(format!("cannot write to {}", name.display()))
                .caused_by_text("what is in an OCI layout is sealed")
                .hint("`bcow create -b` makes a disk on top of it"),
        );
    };
    let cannot = || format!("cannot write to {}", name.display());
    let note = format!("bcow {what}, process {}", std::process::id());
    for _ in 0..100 {
        let path = named.canonicalize().context(cannot)?;
        // The error of a file that cannot be a disk comes before the error of one that cannot be
        // written.
        let sealed = File::open(&path).ok().and_then(|file| header_of(&file));
        if let Some(header) = sealed {
            refuse_sealed(name, &header)?;
        }
        let mut open = File::options();
        let file = open.read(true).write(true).open(&path).context(cannot)?;
        let lock = FileLock::exclusive(&file, &note)
            .map_err(|error| in_use(cannot(), &path, &error, false))?;
        // The previous holder of the lock may have replaced the file (`bcow compact`).
        let (locked, there) = (
            file.metadata().context(cannot)?,
            std::fs::metadata(&path).context(cannot)?,
        );
        if (locked.dev(), locked.ino()) == (there.dev(), there.ino()) {
            return Ok((Arc::new(file), path, lock));
        }
    }
    Err(CommandError::new(cannot()).caused_by_text("another file takes its place again and again"))
}

/// Keeps writers away from a file that may change, for as long as `file` is open.
pub fn lock_for_reading(name: &Path, file: &File, share: Share) -> Result<(), CommandError> {
    let writable = header_of(file).is_some_and(|header| header.state == State::Writable);
    if share == Share::Lock && writable {
        let cannot = || format!("cannot read {}", name.display());
        FileLock::shared(file).map_err(|error| in_use(cannot(), name, &error, true))?;
    }
    Ok(())
}

/// Opens a file for repair, with the lock of a writer. A sealed file is never written, and needs no
/// lock.
pub fn open_for_repair(
    name: &Path,
    path: &Path,
) -> Result<(Arc<File>, Option<FileLock>), CommandError> {
    let cannot = || format!("cannot repair {}", name.display());
    let mut open = File::options();
    let file = open.read(true).write(true).open(path).context(cannot)?;
    let writable = header_of(&file).is_some_and(|header| header.state == State::Writable);
    let note = format!("bcow fsck --repair, process {}", std::process::id());
    let lock = match writable {
        true => Some(
            FileLock::exclusive(&file, &note)
                .map_err(|error| in_use(cannot(), path, &error, false))?,
        ),
        false => None,
    };
    Ok((Arc::new(file), lock))
}

fn refuse_sealed(name: &Path, header: &Header) -> Result<(), CommandError> {
    let cannot = || CommandError::new(format!("cannot write to {}", name.display()));
    if header.state == State::Sealed {
        return Err(cannot()
            .caused_by_text("it is sealed, and never changes")
            .hint(format!(
                "`bcow create -b {} NEW` makes a disk on top of it",
                name.display()
            )));
    }
    if header.purpose != Use::Disk {
        return Err(cannot().caused_by_text("it belongs to a writable mount, and is no disk"));
    }
    if header.features.has_incompatible(incompatible::WINDOWS) {
        return Err(cannot().caused_by_text("it has windows onto other files"));
    }
    Ok(())
}
