//! Disks and the files below them, opened as the options of the command line allow.

use std::fs::File;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::name::Name;
use crate::url::Url;
use bcow::chain::{
    self, ChainCause, ChainFile, ChainProblem, OpenProblem, Opener, Policy, Share, UrlFailure, Urls,
};
use bcow::format::{BackingName, FormatError, Header, State, Use};
use bcow::lock::FileLock;
use bcow::{Disk, Error, Image, Ledger, LockFileError, LockedFile, OpenOptions, header_of};
use bcow_oci::store::{Opened, Places, Stores};
use bcow_remote::Root;

use crate::error::{CommandError, Context};
use crate::given::Given;
use crate::remote::{self, Pinned};
use crate::running;
use crate::snapshots::is_snapshot;
use crate::stores::{StoreArgs, cannot_open, cannot_open_file, refuse_what_is_no_file};
use crate::views::UserViews;

/// A disk, open for reading, with the files below it.
pub struct OpenChain {
    /// The disk.
    pub image: Arc<Image>,
    /// The files below it that were found, the nearest first.
    pub files: Vec<ChainFile>,
    /// Problems with the files below it.
    pub problems: Vec<Problem>,
}

/// A disk, open for writing, and its locked file. Writable files below the disk are locked against
/// writers as long as the disk is open, unless --force-share is given.
pub struct WritableDisk {
    pub disk: Disk,
    /// The number of files on the longest path down from it, without the disk.
    pub height: u32,
    /// Its file. Dropped after the disk, which may write to the file until it is dropped.
    pub file: LockedFile,
}

/// A problem with a file below a disk.
#[derive(Debug, Clone)]
pub struct Problem {
    /// The problem.
    pub text: String,
    /// What the user can do.
    pub hint: Option<String>,
    /// Whether it may pass without any change by the user.
    may_pass: bool,
}

/// Whether the file at `path` is a disk, or a packed partial file of a development version,
/// according to its header. Such a file does not contain an image.
pub fn is_disk(path: &Path) -> bool {
    header_at(path).is_some_and(|header| header.purpose != Use::Image)
}

/// The header of the file at `path`, if it has a valid one. A pipe is not opened: that would wait
/// for a writer.
fn header_at(path: &Path) -> Option<Header> {
    let kind = path.metadata().ok()?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return None;
    }
    header_of(&File::open(path).ok()?)
}

/// Whether `name` leads to a disk that is not sealed, according to its header, and no snapshot.
pub fn is_writable_disk(name: &Name) -> bool {
    let Some(path) = name.path() else {
        return false;
    };
    let header = header_at(path);
    header.is_some_and(|header| header.purpose == Use::Disk && header.state == State::Writable)
        && !is_snapshot(path)
}

/// The hint for a disk without a file system.
pub fn new_file_system_hint(disk: &Path) -> String {
    let disk = disk.display();
    format!(
        "as root, `bcow attach {disk} /dev/nbd0 && mkfs.ext4 /dev/nbd0 && bcow detach /dev/nbd0` \
         makes a file system on it"
    )
}

/// The note that this process leaves in a file that it locks: its command and its number.
pub fn lock_note(command: &str) -> String {
    format!("bcow {command}, process {}", std::process::id())
}

/// Where an image is that the command line names, besides a disk that shows it.
#[derive(Default)]
pub struct NamedImage {
    /// The directory of its file, if that is on this machine.
    pub directory: Option<PathBuf>,
    pub files: Vec<PathBuf>,
    /// Its URL, if it is on another machine.
    pub url: Option<String>,
}

/// Finds the files below a disk as the command line allows.
pub struct Below<'a> {
    args: &'a StoreArgs,
    directories: Vec<PathBuf>,
    stores: Stores,
    views: UserViews,
    share: Share,
    options: OpenOptions,
    /// The URL of the [`NamedImage`].
    url: Option<String>,
}

impl<'a> Below<'a> {
    /// Looks where the options say.
    pub fn new(args: &'a StoreArgs, options: &OpenOptions) -> Result<Self, CommandError> {
        Below::beside(args, options, NamedImage::default())
    }

    /// Also looks where the image is that the command line names.
    pub fn beside(
        args: &'a StoreArgs,
        options: &OpenOptions,
        image: NamedImage,
    ) -> Result<Self, CommandError> {
        let directories = [args.backing_dirs()?, image.directory.as_slice()].concat();
        let stores = args.directories()?;
        let places = Places {
            stores: &stores,
            named: &directories,
            files: &image.files,
            ..Places::default()
        };
        Ok(Below {
            args,
            stores: Stores::new(places, options.clone()),
            views: UserViews::new(options),
            directories,
            share: args.share(),
            options: options.clone(),
            url: image.url,
        })
    }

    /// Which files below a disk may be opened.
    pub fn policy(&self) -> Policy<'_> {
        Policy {
            directories: &self.directories,
            digests: &self.stores,
            urls: self,
            views: &self.views,
            share: self.share,
            options: self.options.clone(),
        }
    }

    fn open_url(&self, url: &str, root: Root) -> Result<Opened, CommandError> {
        let url = Url::parse(url).map_err(|syntax| {
            CommandError::new(format!("invalid URL: {}", syntax.problem)).hint(syntax.hint)
        })?;
        let remote = remote::open(&url, &self.args.remote, Pinned::To(root))?;
        let opened = self
            .args
            .open_remote(&remote, &Given::default(), &self.options)?;
        let all = opened.require_all();
        all.map_err(|error| cannot_open(remote.name.shown(), &error))?;
        Ok(opened)
    }

    /// The opener of the files below the disk at `path`.
    pub fn opener(&self, path: &Path) -> Opener<'_> {
        Opener::new(path, self.policy())
    }

    /// Opens the disk at `path` for reading, with those files below it that are available.
    pub fn open_chain(&self, name: &Path, path: &Path) -> Result<OpenChain, CommandError> {
        let cannot = || format!("cannot open {}", name.display());
        let opener = self.opener(path);
        let file = Arc::new(File::open(path).context(cannot)?);
        let opened = chain::open_shared(&file, self.share, &self.options, &opener);
        let image = opened.map_err(|problem| match problem {
            OpenProblem::InUse(error) => in_use(cannot(), path, &error).hint(END_OR_SHARE),
            OpenProblem::Failed(error) => cannot_open_file(name, path, &error),
        })?;
        Ok(OpenChain {
            image,
            files: opener.files(),
            problems: self.problems(&opener.problems()),
        })
    }

    /// Adds the hint, and for a digest the cause, to the problems of an opener that has
    /// [`Below::policy`].
    fn problems(&self, problems: &[Arc<ChainProblem>]) -> Vec<Problem> {
        let mut in_stores = self.stores.problems();
        // The stores know the cause: the problem with this digest, or with a file below it.
        let mut cause_of = |digest: &str| {
            let named = in_stores.iter().position(|one| one.name().contains(digest));
            let index = named.or((!in_stores.is_empty()).then_some(0))?;
            Some(in_stores.remove(index))
        };
        problems
            .iter()
            .map(|problem| match problem.cause {
                ChainCause::NoDigest => match cause_of(&problem.name) {
                    Some(problem) => Problem {
                        text: problem.to_string(),
                        hint: Some(problem.hint().to_owned()),
                        // The stores are directories of this machine.
                        may_pass: false,
                    },
                    None => Problem::of(problem),
                },
                _ => Problem::of(problem),
            })
            .collect()
    }

    /// The same for the first problem of such an opener.
    pub fn first_problem(&self, problem: &Arc<ChainProblem>) -> Problem {
        let first = self.problems(std::slice::from_ref(problem)).pop();
        first.unwrap_or_else(|| Problem::of(problem))
    }

    /// Opens the disk in a locked file, which the user calls `name`. Writable files below the disk
    /// are locked against writers as long as the disk is open, unless --force-share is given.
    /// With a ledger, as [`Disk::open_with_ledger`]. Also returns the number of files on the
    /// longest path down from the disk.
    pub fn open_disk(
        &self,
        name: &Path,
        file: &LockedFile,
        ledger: Option<Arc<Ledger>>,
    ) -> Result<(Disk, u32), CommandError> {
        let opener = self.opener(file.path());
        let opened = Disk::open_with_ledger(file.storage(), &self.options, &opener, ledger);
        match opened {
            Ok(disk) => Ok((disk, opener.height())),
            Err(error) => Err(self.cannot_open_disk(name, &error, opener.problems().first())),
        }
    }

    /// The error for a disk that does not open. If a backing is missing, the cause is `problem`,
    /// the first problem with a file below the disk.
    pub fn cannot_open_disk(
        &self,
        name: &Path,
        error: &Error,
        problem: Option<&Arc<ChainProblem>>,
    ) -> CommandError {
        match (error, problem) {
            (Error::MissingBacking { .. }, Some(problem)) => {
                self.first_problem(problem).failure(name)
            }
            _ => cannot_open_file(name, name, error),
        }
    }
}

impl Urls for Below<'_> {
    fn find(&self, url: &str, merkle_root: &[u8; 32]) -> Result<(Arc<Image>, u32), UrlFailure> {
        let failed = |text: &str, hint: Option<String>, may_pass: bool| {
            Box::new(Problem {
                text: text.to_owned(),
                hint,
                may_pass,
            })
        };
        if self.url.as_deref() != Some(url) && !self.args.allows_url(url) {
            let server = url.split('/').take(3).collect::<Vec<_>>().join("/");
            return Err(failed(
                "it is on another machine, and its URL is not allowed",
                Some(format!(
                    "--backing-url {server} allows the backings there; so does the variable \
                     BCOW_BACKING_URLS"
                )),
                false,
            ));
        }
        let opened = self.open_url(url, Root(*merkle_root)).map_err(|error| {
            let text = match error.causes() {
                [] => error.message().to_owned(),
                causes => causes.join(": "),
            };
            let hint = error.hint_text().map(str::to_owned);
            failed(&text, hint, error.may_pass())
        })?;
        let image = opened.image;
        match lost_backing(&image) {
            Some(problem) => Err(failed(&problem, None, false)),
            None => Ok((image, opened.height)),
        }
    }
}

/// The reason why `image` cannot be a backing that is named by digest or by URL. Below such a file,
/// only digests are looked up.
pub fn lost_backing(image: &Image) -> Option<String> {
    let mut names = image.backings().map(|entry| &entry.name);
    let name = names.find(|name| !matches!(name, BackingName::Digest(_)))?;
    Some(format!(
        "it is over {name}, and below a backing by digest or by URL bcow looks up only digests"
    ))
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Problem {}

impl Problem {
    fn of(problem: &ChainProblem) -> Self {
        let of_url = match &problem.cause {
            ChainCause::Url(source) => source.downcast_ref::<Problem>(),
            _ => None,
        };
        Problem {
            text: problem.to_string(),
            hint: match of_url {
                Some(problem) => problem.hint.clone(),
                None => hint(&problem.cause).map(str::to_owned),
            },
            may_pass: of_url.is_some_and(|problem| problem.may_pass),
        }
    }

    /// The error for the disk that the user calls `name`, above the file that has the problem.
    pub fn failure(&self, name: &Path) -> CommandError {
        self.cause_of(CommandError::new(format!("cannot open {}", name.display())))
    }

    /// Adds the problem as a cause, and its hint, to an error.
    pub fn cause_of(&self, failure: CommandError) -> CommandError {
        let failure = failure.caused_by_text(self.text.clone());
        let failure = failure.passes_if(self.may_pass);
        failure.hint_if(self.hint.clone())
    }
}

fn hint(cause: &ChainCause) -> Option<&'static str> {
    match cause {
        ChainCause::Missing(_) => Some(
            "name the directory that has it with --backing-dir, or another backing with \
             `bcow rebase --unsafe`",
        ),
        ChainCause::Changed(_) | ChainCause::Size { .. } => Some(
            "the backing has changed, and its data no longer matches this disk; \
             if the change is intended, `bcow rebase --unsafe` accepts it",
        ),
        ChainCause::NoDigest => Some("name a directory that has it with --store"),
        ChainCause::InUse(..) => {
            Some("end the program that writes to it, or read the file anyway with --force-share")
        }
        ChainCause::Open(_, source) => match source.innermost() {
            Error::Format(FormatError::NotBcow) => {
                Some("a backing is a BCoW file; `bcow convert raw:FILE` or `qcow2:FILE` makes one")
            }
            _ => None,
        },
        _ => None,
    }
}

/// Fails if the disk `image`, written to the file `output`, would not find its backing.
pub fn require_backing_beside(
    image: &Image,
    output: &Path,
    stores: &StoreArgs,
) -> Result<(), CommandError> {
    let Some(entry) = image.disk_backing() else {
        return Ok(());
    };
    let below = Below::new(stores, &OpenOptions::default())?;
    let found = below.opener(output).open(entry);
    found.map(drop).map_err(|problem| {
        CommandError::new(format!("cannot write {}", output.display()))
            .caused_by_text(format!("it would not find its backing: {problem}"))
            .hint("write it beside the backing, or store everything in it (`bcow seal --flatten`)")
    })
}

/// The hint for a file that cannot be read.
const END_OR_SHARE: &str = "end that program, or read the file anyway with --force-share";

/// The error of a lock that another process holds.
fn in_use(cannot: String, path: &Path, error: &(dyn std::error::Error + 'static)) -> CommandError {
    running::describe_lock_holders(path).into_iter().fold(
        CommandError::new(cannot).caused_by(error).passes_if(true),
        CommandError::caused_by_text,
    )
}

/// Opens the disk that the user calls `name` for writing. `command` names this process to a second
/// writer.
pub fn open_writable(
    name: &Name,
    stores: &StoreArgs,
    options: &OpenOptions,
    command: &str,
) -> Result<WritableDisk, CommandError> {
    let below = Below::new(stores, options)?;
    let file = lock_disk(name, command)?;
    let (disk, height) = below.open_disk(name.shown(), &file, None)?;
    Ok(WritableDisk { disk, height, file })
}

/// A writable disk opened for reading, and its locked file.
pub struct LockedImage {
    /// The disk.
    pub image: Arc<Image>,
    pub file: LockedFile,
}

/// Opens the writable disk that the user calls `name`, to replace its file. `command` names this
/// process to a second writer.
pub fn open_to_replace(
    name: &Name,
    stores: &StoreArgs,
    command: &str,
) -> Result<LockedImage, CommandError> {
    let options = OpenOptions::default();
    let file = lock_disk(name, command)?;
    let below = Below::new(stores, &options)?;
    let opener = below.opener(file.path());
    let image = Image::open_with_backings(file.storage(), &options, &opener)
        .map_err(|error| cannot_open_file(name.shown(), name.shown(), &error))?;
    match opener.problems().first() {
        Some(problem) => Err(below.first_problem(problem).failure(name.shown())),
        None => Ok(LockedImage { image, file }),
    }
}

/// Opens and locks the file of the writable disk that the user calls `name`, without its backings.
pub fn lock_disk(name: &Name, command: &str) -> Result<LockedFile, CommandError> {
    refuse_what_is_no_file(name)?;
    let Some(path) = name.path() else {
        return Err(CommandError::new(format!("cannot write to {name}"))
            .caused_by_text("images in an OCI layout and on other machines are sealed")
            .hint("`bcow create -b` makes a disk on top of it"));
    };
    let locked = LockedFile::open(path, &lock_note(command));
    locked.map_err(|error| cannot_lock(name.shown(), path, &error))
}

/// The error of a disk that cannot be locked for writing.
pub fn cannot_lock(name: &Path, path: &Path, error: &LockFileError) -> CommandError {
    let shown = name.display();
    let cannot = format!("cannot write to {shown}");
    match error {
        LockFileError::Lock(error) => in_use(cannot, path, error),
        LockFileError::Sealed => CommandError::new(cannot).caused_by(error).hint(format!(
            "`bcow create -b {shown} NEW` makes a disk on top of it"
        )),
        LockFileError::Snapshot => CommandError::new(cannot)
            .caused_by(error)
            .hint(format!("`bcow fork {shown} NEW` makes a disk over it")),
        _ => CommandError::new(cannot).caused_by(error),
    }
}

/// Keeps writers away from a file that may change, for as long as `file` is open.
pub fn lock_for_reading(name: &Path, file: &File, share: Share) -> Result<(), CommandError> {
    let writable = header_of(file).is_some_and(|header| header.state == State::Writable);
    if share == Share::Lock && writable {
        let cannot = || format!("cannot read {}", name.display());
        FileLock::shared(file)
            .map_err(|error| in_use(cannot(), name, &error).hint(END_OR_SHARE))?;
    }
    Ok(())
}

/// Opens a file for repair. A writable file is locked as by a writer. A sealed file is not locked:
/// the repair only replaces damaged bytes by those with which the file was sealed. A file without a
/// valid header is not locked either.
pub fn open_for_repair(
    name: &Path,
    path: &Path,
) -> Result<(Arc<File>, Option<FileLock>), CommandError> {
    let cannot = || format!("cannot repair {}", name.display());
    let mut open = File::options();
    let file = open.read(true).write(true).open(path).context(cannot)?;
    let writable = header_of(&file).is_some_and(|header| header.state == State::Writable);
    let lock = if writable {
        Some(
            FileLock::exclusive(&file, &lock_note("fsck --repair"))
                .map_err(|error| in_use(cannot(), path, &error))?,
        )
    } else {
        None
    };
    // The previous holder of the lock may have replaced the file.
    let there = path.metadata().context(cannot)?;
    let opened = file.metadata().context(cannot)?;
    if (there.dev(), there.ino()) == (opened.dev(), opened.ino()) {
        Ok((Arc::new(file), lock))
    } else {
        Err(CommandError::new(cannot())
            .caused_by_text("another program has replaced it")
            .hint("repeat the command"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backing_whose_server_does_not_answer_may_be_there_later() {
        for may_pass in [true, false] {
            let source = Problem {
                text: "the server did not answer within 30 s".to_owned(),
                hint: None,
                may_pass,
            };
            let problem = ChainProblem {
                name: "https://host/image.bcow".to_owned(),
                cause: ChainCause::Url(Box::new(source)),
            };
            let failure = Problem::of(&problem).failure(Path::new("disk.bcow"));
            assert_eq!(failure.may_pass(), may_pass);
        }
    }
}
