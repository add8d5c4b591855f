//! The upper of a writable mount: its options, and where it may be.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow_erofs::reader::Filesystem;
use bcow_union::fs::{LowerImage, UnionFs};
use bcow_union::{NodeId, SMALL_BYTES, SyncPolicy, UnionOptions, UpperError};

use super::bind::IfMounted;
use super::host::{Host, UpperUse};
use crate::commands::mount::{self, helper};
use crate::error::{CommandError, Context};
use crate::image::OpenImage;
use crate::names;
use crate::running;
use crate::ui::Ui;
use crate::upper::{name_holders, note, when_free};

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Writable mounts")]
pub struct UpperArgs {
    /// Directory that stores the changes; created if it is missing. Only one mount at a time can
    /// use an upper, and only with the image with which the upper was created
    #[arg(long, value_name = "UPPER", value_hint = clap::ValueHint::DirPath)]
    upper: Option<PathBuf>,
    /// Size of the file system in an upper of the kernel driver, including the content of the
    /// image; a larger size grows an existing upper [default: 64G for a new one]
    #[arg(short, long, value_name = "SIZE", value_parser = crate::size::parse, requires = "upper")]
    size: Option<u64>,
    /// Without effect. Earlier versions had other forms
    #[arg(long = "sketch", value_name = "HOW", value_parser = parse_partial, hide = true)]
    _partial: Option<()>,
    /// When a file that is copied up as a whole becomes durable: each file separately and as soon
    /// as possible (strict), or in groups of N (batch=N; FUSE driver only). With volatile, fsync
    /// has no effect, and a crash of the machine loses the upper
    #[arg(long, value_name = "POLICY", default_value = "strict")]
    #[arg(value_parser = parse_sync)]
    sync: SyncPolicy,
    /// Limit of the bytes that the upper may store; FUSE driver only [default: the space of its
    /// file system]
    #[arg(long, value_name = "SIZE", value_parser = crate::size::parse, requires = "upper")]
    size_limit: Option<u64>,
    /// Limit of the inodes in the upper: files, directories and links; FUSE driver only [default:
    /// with --size-limit, one per 16 KiB of that limit, and at least 4096]
    #[arg(long, value_name = "N", value_parser = parse_count, requires = "upper")]
    inode_limit: Option<u64>,
    /// Threads that complete partly written blocks in the background; FUSE driver only
    #[arg(long, value_name = "N", default_value = "1", requires = "upper")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=64))]
    fillers: u16,
    /// If the upper is mounted already, with the same image: fail, or make DIR a bind mount of that
    /// mount, which then ends with the last of the two (bind; for root only)
    #[arg(long, value_name = "WHAT", default_value = "fail", requires = "upper")]
    #[arg(conflicts_with_all = ["foreground", "record"])]
    if_mounted: IfMounted,
}

/// Parses the form of partial files: the only one, or the word that chose between two forms.
fn parse_partial(text: &str) -> Result<(), String> {
    if !matches!(text, "sparse" | "auto") {
        return Err("only one form is left: sparse".to_owned());
    }
    Ok(())
}

/// Parses a number of things, with the units that a size may have.
fn parse_count(text: &str) -> Result<u64, String> {
    match crate::size::parse(text) {
        Ok(0) => Err("the minimum is 1".to_owned()),
        Ok(count) => Ok(count),
        Err(_) => Err("a count is a number with an optional unit: 5000, 4K, 1M".to_owned()),
    }
}

/// Parses `strict`, `batch=N` or `volatile`.
fn parse_sync(text: &str) -> Result<SyncPolicy, String> {
    match text {
        "strict" => Ok(SyncPolicy::Strict),
        "volatile" => Ok(SyncPolicy::Volatile),
        _ => match text.strip_prefix("batch=").map(str::parse) {
            Some(Ok(0)) => Err("the minimum is batch=1".to_owned()),
            Some(Ok(count)) => Ok(SyncPolicy::Batch(count)),
            _ => Err("use strict, batch=N or volatile".to_owned()),
        },
    }
}

impl UpperArgs {
    /// The upper, if the mount has one.
    pub fn path(&self) -> Option<&Path> {
        self.upper.as_deref()
    }

    /// The upper, if a mount of it is to be bound.
    pub fn path_to_bind(&self) -> Option<&Path> {
        match self.if_mounted {
            IfMounted::Fail => None,
            IfMounted::Bind => self.path(),
        }
    }

    /// Size of a new file system with the kernel driver, in bytes.
    pub fn size(&self) -> Option<u64> {
        self.size
    }

    /// An option that was given, and that only the FUSE driver has.
    pub fn only_for_fuse(&self) -> Option<&'static str> {
        match self {
            _ if self.size_limit.is_some() => Some("--size-limit"),
            _ if self.inode_limit.is_some() => Some("--inode-limit"),
            _ if self.fillers != 1 => Some("--fillers"),
            _ => None,
        }
    }

    /// When data becomes durable.
    pub fn sync(&self) -> SyncPolicy {
        self.sync
    }

    fn options(&self, can_be_taken_over: bool) -> UnionOptions {
        UnionOptions {
            sync: self.sync,
            size_limit: self.size_limit,
            inode_limit: self.inode_limit,
            small_bytes: SMALL_BYTES,
            fillers: self.fillers.into(),
            can_be_taken_over,
        }
    }

    /// The union of `image`, with its file system `tree`, and the upper, to be mounted at
    /// `directory`. `None` if the mount has no upper, or the upper is to be left alone.
    pub fn open(
        &self,
        directory: &Path,
        image: &OpenImage,
        tree: &Arc<Filesystem>,
        host: &Host<'_>,
        upper_use: UpperUse<'_>,
        ui: &Ui,
    ) -> Result<Option<Arc<UnionFs>>, CommandError> {
        let ledger = match upper_use {
            UpperUse::New => None,
            UpperUse::TakeOver(ledger) => Some(ledger),
            UpperUse::None => return Ok(None),
        };
        let Some(path) = self.path() else {
            return Ok(None);
        };
        let options = self.options(host.pool.is_some());
        // The process changes its directory later, and publishes the path of the upper.
        let path = &std::path::absolute(path)
            .context(|| format!("cannot use upper {}", path.display()))?;
        let note = note(directory);
        host.let_signals_through()
            .map_err(|error| mount::failure(&error))?;
        when_free(ui, || {
            // A wait for the end of another mount may be interrupted. Only the call that blocked
            // the signals can fail.
            let _ = host.let_signals_through();
            let lower = LowerImage {
                fs: Arc::clone(tree),
                identity: image.identity(),
                name: image.path().to_string_lossy().into_owned(),
            };
            let Some(ledger) = ledger else {
                return UnionFs::open(lower, path, &note, &options);
            };
            let ledger = ledger.try_clone_to_owned();
            let ledger = ledger.map_err(|source| UpperError::Ledger { source })?;
            UnionFs::take_over(lower, path, &note, &options, ledger)
        })
        .map(Some)
        .map_err(|error| failure(&error))
    }
}

/// Fails if one of the upper and the mountpoint is inside the other: the mount would cover its own
/// upper, or be inside it.
pub fn refuse_one_in_the_other(upper: &Path, mountpoint: &Path) -> Result<(), CommandError> {
    let (Ok(mountpoint), Ok(resolved)) = (mountpoint.canonicalize(), resolve(upper)) else {
        // A later step fails with the reason.
        return Ok(());
    };
    let relation = if resolved == mountpoint {
        "is the mountpoint"
    } else if resolved.starts_with(&mountpoint) {
        "is inside the mountpoint"
    } else if mountpoint.starts_with(&resolved) {
        "contains the mountpoint"
    } else {
        return Ok(());
    };
    Err(
        CommandError::usage(format!("upper {} {relation}", upper.display()))
            .hint("choose a directory beside the mountpoint"),
    )
}

/// The owner of the root directory that `union` shows, if this user cannot write there. Root of a
/// user namespace can.
pub fn owner_who_is_needed(union: &UnionFs) -> Option<u32> {
    use rustix::process::{getegid, geteuid, getgroups};
    const WRITE: u16 = 0o2;
    // If the root is damaged, the first program that accesses it gets the error.
    let root = union.attributes(NodeId::ROOT).ok()?;
    let user = geteuid();
    let is_in = |group: u32| {
        let groups = getgroups().unwrap_or_default();
        getegid().as_raw() == group || groups.iter().any(|one| one.as_raw() == group)
    };
    let class = match () {
        () if root.uid == user.as_raw() => root.permissions >> 6,
        () if is_in(root.gid) => root.permissions >> 3,
        () => root.permissions,
    };
    if user.is_root() || class & WRITE != 0 { None } else { Some(root.uid) }
}

/// Warns that this user can change little in the mount. The hint is a command with which the user
/// can change everything.
pub fn warn_of_owner(owner: u32, image: &Path, directory: &Path, has_hint: bool, ui: &Ui) {
    let user = running::user_name(rustix::process::geteuid().as_raw());
    let owner = running::user_name(owner);
    ui.warning(format_args!(
        "the root directory of {} belongs to {owner}, and {user} cannot write to it: the kernel \
         checks every access by the owners and modes in the image",
        image.display()
    ));
    let mut words = std::env::args_os();
    if !has_hint || helper::is_called(words.next().as_deref()) {
        return;
    }
    let words: Vec<String> = words.map(|word| names::quoted(word.as_bytes())).collect();
    let script = r#"bcow "$@" && { sh; bcow umount "$0"; }"#;
    ui.hint(format_args!(
        "unmount it and run this line instead, which mounts it in a user namespace, starts a \
         shell there as root, and unmounts it afterwards: unshare -rm -- sh -c '{script}' {} {}",
        names::quoted(directory.as_os_str().as_bytes()),
        words.join(" ")
    ));
}

/// Where the upper is, or where it would be made.
fn resolve(upper: &Path) -> std::io::Result<PathBuf> {
    match upper.canonicalize() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let absolute = std::path::absolute(upper)?;
            match (absolute.parent(), absolute.file_name()) {
                (Some(parent), Some(name)) => Ok(parent.canonicalize()?.join(name)),
                _ => Err(error),
            }
        }
        other => other,
    }
}

/// The library's error in the command's form.
fn failure(error: &UpperError) -> CommandError {
    let failure = CommandError::new("cannot use the upper").caused_by(error);
    match error {
        UpperError::NoAttributes { .. } | UpperError::NoWhiteouts { .. } => {
            failure.hint("ext4, xfs, btrfs and tmpfs (Linux 6.6 and later) can hold an upper")
        }
        UpperError::AnotherImage { .. } => failure
            .hint("an upper stores the changes of one image: name that image, or another upper"),
        UpperError::Inside { outer: path, .. } | UpperError::Around { inner: path, .. } => {
            name_holders(failure, path).hint(
                "choose a directory outside that upper, or unmount it first with `bcow umount`",
            )
        }
        UpperError::InUse { path, .. } => name_holders(failure, path)
            .hint("unmount the other mount first with `bcow umount`, or use another upper"),
        UpperError::NamespaceDenied { .. } | UpperError::OwnershipDenied { .. } => {
            failure.hint("root created the upper: mount it as root")
        }
        _ => failure,
    }
}
