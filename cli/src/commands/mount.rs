//! `bcow mount`

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use bcow::{BlockCache, OpenOptions, Verify};
use bcow_fuse::daemon::{self, Launch};
use bcow_fuse::options::Access;
use bcow_fuse::signals::{Ground, Signals};
use bcow_fuse::{ImageFs, MountError, MountOptions, Session};

use crate::error::CommandError;
use crate::image::{OpenImage, StoreArgs, parse_name};
use crate::ui::Ui;

/// Mount an image, read-only
///
/// Returns when programs can use the mount; a process of its own serves it in the background, and ends
/// when somebody unmounts it, with `bcow umount`, umount(8) or `fusermount3 -u`.
///
/// Root and ordinary users can mount; an ordinary user needs fusermount3 and a directory of their own.
/// The mount is read-only, for the user who mounts, and without set-user-ID files and devices, unless
/// options say otherwise.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Mount options (-o, separated by commas; of two opposites the last holds):
  allow_other             other users may enter too; the kernel checks every access against
                          owner, mode and ACL of the file. Ordinary users need the line
                          user_allow_other in /etc/fuse.conf
  default_permissions     the kernel checks in an owner-only mount too; without it, the user
                          who mounts may read everything
  suid, nosuid            honour set-user-ID, set-group-ID and file capabilities, or not
                          (default; suid is for root)
  dev, nodev              devices work, or not (default; dev is for root)
  exec, noexec            programs can be run (default), or not
  noatime, relatime, nodiratime
                          taken and without effect: a read-only mount keeps no access times
  fsname=NAME             what /proc/mounts shows as the source, instead of the image's path
  ro, subtype=bcow, defaults
                          taken, and the case anyway

The background process logs to the system log, in the foreground to standard error. SIGTERM and
SIGINT unmount; if files are in use then, nobody else can enter any more, and the mount ends with
its last user or with a second signal. SIGHUP unmounts in the foreground only.")]
pub struct Args {
    /// The image: a file, oci:DIR[:REF] or oci:DIR@sha256:DIGEST
    #[arg(value_name = "IMG", value_hint = clap::ValueHint::FilePath)]
    image: PathBuf,
    /// The directory to mount on
    #[arg(value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    directory: PathBuf,
    /// Stay in the foreground
    #[arg(short, long)]
    foreground: bool,
    /// Mount options; `--help` lists them
    #[arg(short = 'o', long = "options", value_name = "OPTIONS")]
    options: Vec<OsString>,
    /// Memory for decoded blocks
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = crate::size::parse)]
    cache_size: u64,
    /// What to check on every read: the checksums of tables and blocks, or the Merkle tree too
    #[arg(long, value_name = "WHAT", default_value = "checksums")]
    verify: VerifyWhat,
    /// Threads that answer requests [default: one for each CPU, 2 to 16]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    #[command(flatten)]
    stores: StoreArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum VerifyWhat {
    Checksums,
    Merkle,
}

/// Mounts; returns when the mount is ready, or in the foreground when it has ended.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    // Before anything is started or opened: a spelling mistake costs nothing then.
    let mut options = MountOptions::default();
    for list in &args.options {
        options.apply(list).map_err(|error| match error {
            MountError::UnknownOption(_) | MountError::BadOption { .. } => {
                failure(&error).exit_with(crate::error::exit::USAGE)
            }
            error => failure(&error),
        })?;
    }
    let readiness = match args.foreground {
        true => None,
        false => match daemon::started_by_launch() {
            Some(readiness) => Some(readiness),
            None => return in_background(),
        },
    };
    let signals = Signals::block(match readiness {
        Some(_) => Ground::Background,
        None => Ground::Foreground,
    })
    .map_err(|error| failure(&error))?;
    let shown = args.image.display();
    let image = OpenImage::open_with(
        &args.image,
        &args.stores,
        &OpenOptions {
            cache: BlockCache::new(args.cache_size),
            verify: match args.verify {
                VerifyWhat::Checksums => Verify::Checksums,
                VerifyWhat::Merkle => Verify::Merkle,
            },
        },
    )?;
    let fs = image.tree()?.into_filesystem();
    options.set_default_source(parse_name(&args.image)?.absolute());
    let session = Session::mount(
        ImageFs::new(Arc::new(fs)),
        &args.directory,
        &options,
        args.threads.map_or_else(default_threads, usize::from),
    )
    .map_err(|error| failure(&error))?;
    match readiness {
        Some(readiness) => readiness.announce().map_err(|error| failure(&error))?,
        None => ui.status(format_args!(
            "{shown} is mounted at {}{}",
            args.directory.display(),
            match options.access() {
                Access::Owner => "",
                Access::Everyone => ", for everybody",
            }
        )),
    }
    session
        .serve_until_signal(signals)
        .map_err(|error| failure(&error))
}

fn in_background() -> Result<(), CommandError> {
    match daemon::launch().map_err(|error| failure(&error))? {
        Launch::Ready => Ok(()),
        // The background process has said why.
        Launch::Failed(code) => std::process::exit(code.into()),
    }
}

/// Enough that one slow read does not hold up the others; more than that only competes for the CPU.
fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(2, |cpus| cpus.get().clamp(2, 16))
}

/// The library's error in the command's form.
pub fn failure(error: &MountError) -> CommandError {
    let mut failure = CommandError::new(error.to_string());
    if let Some(source) = std::error::Error::source(error) {
        failure = failure.caused_by(source);
    }
    match error.hint() {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}
