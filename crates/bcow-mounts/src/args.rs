//! The options of a mount, as the command line has them.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use bcow::{BlockCache, OpenOptions, Verify};
use bcow_images::Name;
use bcow_images::args::{IMAGE, NameParser};
use bcow_images::error::CommandError;
use bcow_images::image::{LayerArgs, OpenImage, StoreArgs};
use bcow_images::sandbox::SandboxArgs;
use bcow_images::{remote, size};
use bcow_union::{SMALL_BYTES, SyncPolicy, UnionOptions};

use crate::cpus::{self, Cpus};
use crate::pool_name::PoolName;

/// The options of a mount, and what is mounted where.
#[derive(Debug, clap::Args)]
pub struct MountArgs {
    /// The image or disk: a file, oci:DIR[:REF], oci:DIR@sha256:DIGEST, https://..., s3://... or
    /// docker://...
    #[arg(value_name = "IMG", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(IMAGE))]
    pub(crate) image: Name,
    /// The directory to mount on; after the layers, if there are any
    #[arg(value_name = "DIR", value_hint = clap::ValueHint::AnyPath)]
    pub(crate) directory: PathBuf,
    /// More arguments: DIR is then a layer, and the last of these is the directory
    #[arg(hide = true)]
    pub(crate) more: Vec<PathBuf>,
    /// How programs reach the content. fuse: through FUSE. kernel: through a file system of the
    /// kernel (ext4, xfs or btrfs of a disk, ext4 over an image with --upper, EROFS of an image),
    /// for root only. auto: kernel for a disk with ext4, xfs or btrfs, and for an upper that was
    /// created with the kernel driver; fuse for an image, and for a new upper
    #[arg(long, alias = "door", value_name = "DRIVER", default_value = "auto")]
    pub(crate) driver: DriverChoice,
    /// Serve the mount in the foreground
    #[arg(short, long)]
    pub(crate) foreground: bool,
    /// Mount options, separated by commas: allow_other, default_permissions, suid, nosuid, dev,
    /// nodev, exec, noexec, noatime, relatime, nodiratime, rw, ro, sync, async, discard,
    /// nodiscard, commit=SECONDS, writeback, nowriteback, overlay_lower, uidmap=RANGE,
    /// gidmap=RANGE, fsname=NAME, subtype=bcow, loop, defaults
    #[arg(short = 'o', long = "options", value_name = "OPTIONS")]
    pub(crate) options: Vec<OsString>,
    /// Size of the cache of decoded blocks
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = size::parse)]
    pub(crate) cache_size: u64,
    /// What bcow verifies on every read: the checksums of tables and blocks, or also the Merkle
    /// tree [default: checksums; nothing if the kernel reads a plain image without a process of
    /// bcow]
    #[arg(long, value_name = "WHAT")]
    pub(crate) verify: Option<VerifyWhat>,
    /// Threads that answer requests [default: one for each CPU, 2 to 16, and at least 4 with
    /// --upper; 16 for a remote image]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,
    /// CPUs for the process of the mount, in the form of taskset(1): 0,2-5 [default: all CPUs that
    /// the process may use]
    #[arg(long, value_name = "LIST", value_parser = cpus::parse)]
    pub(crate) cpus: Option<Cpus>,
    /// Serve Prometheus metrics at http://ADDR:PORT/metrics, or at the Unix socket unix:PATH. Every
    /// client that can connect to a TCP address can read the metrics
    #[arg(long, value_name = "ADDR:PORT")]
    pub(crate) metrics: Option<String>,
    /// Also append log messages to FILE, with the time: for machines without a system log
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub(crate) log_file: Option<PathBuf>,
    /// When the mount ends, write to TRACE a list of the parts of the image that programs have
    /// read, for `bcow convert --prefetch`
    #[arg(long, value_name = "TRACE", value_hint = clap::ValueHint::FilePath)]
    pub(crate) record: Option<PathBuf>,
    /// When to fetch the rest of a remote image into the cache: all the time (always),
    /// only while no program waits for the server (idle), or never [default: idle if the image has
    /// a list of `bcow convert --prefetch`, else never]
    #[arg(long, value_name = "WHEN", hide_short_help = true)]
    #[arg(help_heading = remote::HEADING)]
    pub(crate) complete: Option<CompleteWhen>,
    /// Let the process of this pool serve the mount (see `bcow help pool`). Not with --foreground,
    /// --cache-size, --cpus, --metrics, --log-file or --record
    #[arg(long, value_name = "NAME")]
    #[arg(conflicts_with_all = ["foreground", "cache_size", "cpus", "metrics", "log_file"])]
    #[arg(conflicts_with = "record")]
    pub pool: Option<PoolName>,
    /// Share one page cache with the other mounts of the pool that show the same image or layers,
    /// for the files that a mount has not changed. A program that has such a file open keeps
    /// reading the content of the image when another program changes the file. Without a limit, the
    /// kernel also reads and writes files that are wholly in the upper itself. auto: on in a pool
    /// of root, with the FUSE driver and --upper, on Linux 6.12 or later
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    pub(crate) share: ShareChoice,
    /// Check the command line only
    #[arg(long, hide = true)]
    pub(crate) fake: bool,
    #[command(flatten)]
    pub(crate) layers: LayerArgs,
    /// Keep the merged metadata of the layers in FILE, so that later mounts of the same image with
    /// the same layers start sooner. A file of other layers is replaced
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub(crate) merged: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) stores: StoreArgs,
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,
    #[command(flatten)]
    pub(crate) upper: UpperArgs,
}

/// The driver, as the user asks for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum DriverChoice {
    Auto,
    Fuse,
    Kernel,
}

/// Whether a mount shares files with other mounts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ShareChoice {
    Auto,
    On,
    Off,
}

/// What each read verifies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum VerifyWhat {
    Checksums,
    Merkle,
}

impl MountArgs {
    /// The directory to mount on.
    pub(crate) fn directory(&self) -> &Path {
        self.more.last().unwrap_or(&self.directory)
    }

    /// Opens the image with its layers.
    pub(crate) fn open_image(&self, options: &OpenOptions) -> Result<OpenImage, CommandError> {
        let merged = self.merged.as_deref();
        OpenImage::open_with(&self.image, &self.layers()?, &self.stores, options, merged)
    }

    /// The layers on top of the image, the lowest first.
    pub(crate) fn layers(&self) -> Result<Vec<Name>, CommandError> {
        let mut layers = self.layers.layers.clone();
        if let Some((_, between)) = self.more.split_last() {
            for layer in std::iter::once(&self.directory).chain(between) {
                layers.push(IMAGE.parse(layer.as_os_str())?);
            }
        }
        Ok(layers)
    }

    pub(crate) fn has_layers(&self) -> bool {
        !self.layers.layers.is_empty() || !self.more.is_empty()
    }

    /// How bcow opens the image or the disk.
    pub(crate) fn open_options(&self, cache: &BlockCache) -> OpenOptions {
        OpenOptions {
            cache: cache.clone(),
            verify: match self.verify {
                None | Some(VerifyWhat::Checksums) => Verify::Checksums,
                Some(VerifyWhat::Merkle) => Verify::Merkle,
            },
        }
    }

    /// The layers by names that mean the same to other processes.
    pub(crate) fn layer_names(&self) -> Result<Vec<String>, CommandError> {
        let names = self.layers()?.into_iter().map(|layer| {
            let name = layer.absolute();
            name.to_string_lossy().into_owned()
        });
        Ok(names.collect())
    }
}

/// When the rest of an image is fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum CompleteWhen {
    Always,
    Idle,
    Never,
}

/// What to do if the upper is mounted already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum IfMounted {
    Fail,
    Bind,
}

/// The options of the upper.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Writable mounts")]
pub struct UpperArgs {
    /// Directory that stores the changes; created if it is missing. Only one mount at a time can
    /// use an upper, and only with the image with which the upper was created
    #[arg(long, value_name = "UPPER", value_hint = clap::ValueHint::DirPath)]
    pub(crate) upper: Option<PathBuf>,
    /// Size of the file system in an upper of the kernel driver, including the content of the
    /// image; a larger size grows an existing upper [default: 64G for a new one]
    #[arg(short, long, value_name = "SIZE", value_parser = size::parse, requires = "upper")]
    pub(crate) size: Option<u64>,
    /// Without effect. Earlier versions had other forms
    #[arg(long = "sketch", value_name = "HOW", value_parser = parse_partial, hide = true)]
    pub(crate) _partial: Option<()>,
    /// When a file that is copied up as a whole becomes durable: each file separately and as soon
    /// as possible (strict), or in groups of N (batch=N; FUSE driver only). With volatile, fsync
    /// has no effect, and a crash of the machine loses the upper
    #[arg(long, value_name = "POLICY", default_value = "strict")]
    #[arg(value_parser = parse_sync)]
    pub(crate) sync: SyncPolicy,
    /// Limit of the bytes that the upper may store; FUSE driver only [default: the space of its
    /// file system]
    #[arg(long, value_name = "SIZE", value_parser = size::parse, requires = "upper")]
    pub(crate) size_limit: Option<u64>,
    /// Limit of the inodes in the upper: files, directories and links; FUSE driver only [default:
    /// with --size-limit, one per 16 KiB of that limit, and at least 4096]
    #[arg(long, value_name = "N", value_parser = parse_count, requires = "upper")]
    pub(crate) inode_limit: Option<u64>,
    /// Threads that complete partly written blocks in the background; FUSE driver only
    #[arg(long, value_name = "N", default_value = "1", requires = "upper")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) fillers: u16,
    /// If the upper is mounted already, with the same image: fail, or make DIR a bind mount of that
    /// mount, which then ends with the last of the two (bind; for root only)
    #[arg(long, value_name = "WHAT", default_value = "fail", requires = "upper")]
    #[arg(conflicts_with_all = ["foreground", "record"])]
    pub(crate) if_mounted: IfMounted,
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
    match size::parse(text) {
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

impl MountArgs {
    /// Another path of the upper, which was moved.
    pub fn set_upper(&mut self, path: PathBuf) {
        self.upper.upper = Some(path);
    }
}

impl UpperArgs {
    /// The upper, if the mount has one.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.upper.as_deref()
    }

    /// The upper, if a mount of it is to be bound.
    pub(crate) fn path_to_bind(&self) -> Option<&Path> {
        match self.if_mounted {
            IfMounted::Fail => None,
            IfMounted::Bind => self.path(),
        }
    }

    /// An option that was given, and that only the FUSE driver has.
    pub(crate) fn only_for_fuse(&self) -> Option<&'static str> {
        match self {
            _ if self.size_limit.is_some() => Some("--size-limit"),
            _ if self.inode_limit.is_some() => Some("--inode-limit"),
            _ if self.fillers != 1 => Some("--fillers"),
            _ => None,
        }
    }

    pub(crate) fn options(&self, can_be_taken_over: bool) -> UnionOptions {
        UnionOptions {
            sync: self.sync,
            size_limit: self.size_limit,
            inode_limit: self.inode_limit,
            small_bytes: SMALL_BYTES,
            fillers: self.fillers.into(),
            can_be_taken_over,
        }
    }
}
