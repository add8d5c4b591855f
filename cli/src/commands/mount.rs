//! `bcow mount`

mod ahead;
mod bind;
mod direct;
mod driver;
pub mod fuse;
pub mod helper;
pub mod host;
pub mod kernel;
pub mod pooled;
pub mod upper;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow::{BlockCache, OpenOptions, Verify};
use bcow_fuse::daemon::{self, Launch, Readiness};
use bcow_fuse::options::{Access, Writing};
use bcow_fuse::session::show_closing;
use bcow_fuse::signals::{Ground, Signals};
use bcow_fuse::{MountError, MountOptions, MountStats};
use bcow_images::Name;
use bcow_nbd::ListenAddress;
use bcow_union::log::{self, Severity};

use crate::ask::{self, Answer};
use crate::cpus::Cpus;
use crate::error::{CommandError, Context};
use crate::image::{LayerArgs, OpenImage, StoreArgs};
use crate::limits;
use crate::metrics::Metrics;
use crate::pool::{self, PoolName};
use crate::record::Recording;
use crate::running::{self, Service};
use crate::ui::Ui;
use ahead::CompleteWhen;
use bcow_images::args::{IMAGE, NameParser};
use bind::Attempt;
use driver::Way;
use fuse::Mounted;
use host::Host;
use upper::UpperArgs;

/// Mount an image, read-only or with an upper that stores changes, or a disk
///
/// The command returns when programs can use the mount. A background process serves the mount. The
/// process ends when the mount is unmounted with `bcow umount`, umount(8) or `fusermount3 -u`.
///
/// Root and ordinary users can mount; an ordinary user needs fusermount3 and must own DIR. By
/// default, only the user who mounts can access the mount, and set-user-ID files and devices do not
/// work (see -o). To stack layers of `bcow commit --upper` on top of the image, list the layers
/// between IMG and DIR, the lowest first.
///
/// IMG can also be a disk that contains ext4, xfs or btrfs. The kernel's own driver mounts it; this
/// is called the kernel driver, in contrast to the FUSE driver (see --driver). Only root can use
/// the kernel driver, and every user can access the mount as far as owners and modes of the files
/// allow.
///
/// The mount is read-only unless --upper names a directory for the changes. The upper has the form
/// of an overlayfs upper; of a large file of the image, it stores only the written blocks. With
/// --driver kernel, a new upper is a disk that shows the image as ext4, which the kernel mounts.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "bcow mount [OPTIONS] <IMG> [LAYER]... <DIR>",
    after_long_help = "\
Mount options (-o, separated by commas; of two opposite options the last one applies):
  allow_other             other users can access the mount; the kernel checks every access against
                          owner, mode and ACL of the file. For ordinary users, /etc/fuse.conf must
                          contain the line user_allow_other
  default_permissions     the kernel also checks every access of the user who mounts; without this
                          option, that user can read everything
  suid, nosuid            honour set-user-ID, set-group-ID and file capabilities, or not
                          (default; only root can use suid)
  dev, nodev              devices work, or not (default; only root can use dev)
  exec, noexec            programs can be executed (default), or not
  noatime, relatime, nodiratime
                          with the kernel driver, as in mount(8) (default: noatime); with the
                          FUSE driver, reading never updates access times
  rw, ro                  a mount with --upper is writable (default), or read-only
  discard, nodiscard      with the kernel driver: space of deleted files is released at once, or not
                          (default)
  commit=SECONDS          with the kernel driver: ext4 and btrfs make all changes durable at least
                          this often [default: that of the kernel, 5 for ext4]
  sync, async             each write is durable before it returns, or not (default)
  writeback, nowriteback  the kernel collects writes in its page cache, or not (default). With
                          writeback, small writes take a quarter of the time, but errors such as
                          a full disk appear at fsync or never, and a write to a part of an
                          uncached block first reads that block
  overlay_lower           the mount is a lower directory of overlayfs that hides those below it: the
                          directories in its root have opaque marks, and there are whiteouts for
                          what only lower layers have in their roots. overlay_lower=trusted marks
                          by trusted.overlay.opaque, overlay_lower=user by user.overlay.opaque
                          [default: user in a user namespace, else trusted]
  uidmap=RANGE, gidmap=RANGE
                          RANGE is CONTAINER:HOST:COUNT: the COUNT users (groups) of the image from
                          CONTAINER on are shown as those of the host from HOST on, and an upper
                          stores those of the image; other IDs have no counterpart (repeatable)
  fsname=NAME             source that /proc/mounts shows [default: the path of the image]
  subtype=bcow, defaults  accepted without effect

With --upper, the kernel always checks owner, mode and ACL (default_permissions). `bcow umount`
returns when all data is durable (with --sync volatile: in the file system of the upper), and fails
if that file system did not accept all data. If the process of an earlier mount of the same upper is
still ending, a new mount waits for that process.

The background process logs to the system log; a foreground mount logs to standard error. Both also
log to the file of --log-file, and `bcow stats` shows the last errors. SIGTERM and SIGINT unmount.
If files are in use, the mount is detached: programs cannot open further files by path, and the
mount ends when the last open file is closed, or at a second signal. SIGHUP unmounts only in the
foreground."
)]
pub struct Args {
    /// The image or disk: a file, oci:DIR[:REF], oci:DIR@sha256:DIGEST, https://..., s3://... or
    /// docker://...
    #[arg(value_name = "IMG", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(IMAGE))]
    image: Name,
    /// The directory to mount on; after the layers, if there are any
    #[arg(value_name = "DIR", value_hint = clap::ValueHint::AnyPath)]
    directory: PathBuf,
    /// More arguments: DIR is then a layer, and the last of these is the directory
    #[arg(hide = true)]
    more: Vec<PathBuf>,
    /// How programs reach the content. fuse: through FUSE. kernel: through a file system of the
    /// kernel (ext4, xfs or btrfs of a disk, ext4 over an image with --upper, EROFS of an image),
    /// for root only. auto: kernel for a disk with ext4, xfs or btrfs, and for an upper that was
    /// created with the kernel driver; fuse for an image, and for a new upper
    #[arg(long, alias = "door", value_name = "DRIVER", default_value = "auto")]
    driver: DriverChoice,
    /// Serve the mount in the foreground
    #[arg(short, long)]
    foreground: bool,
    /// Mount options, separated by commas: allow_other, default_permissions, suid, nosuid, dev,
    /// nodev, exec, noexec, noatime, relatime, nodiratime, rw, ro, sync, async, discard,
    /// nodiscard, commit=SECONDS, writeback, nowriteback, overlay_lower, uidmap=RANGE,
    /// gidmap=RANGE, fsname=NAME, subtype=bcow, defaults
    #[arg(short = 'o', long = "options", value_name = "OPTIONS")]
    options: Vec<OsString>,
    /// Size of the cache of decoded blocks
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = crate::size::parse)]
    cache_size: u64,
    /// What bcow verifies on every read: the checksums of tables and blocks, or also the Merkle
    /// tree [default: checksums; nothing if the kernel reads a plain image without a process of
    /// bcow]
    #[arg(long, value_name = "WHAT")]
    verify: Option<VerifyWhat>,
    /// Threads that answer requests [default: one for each CPU, 2 to 16, and at least 4 with
    /// --upper; 16 for a remote image]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// CPUs for the process of the mount, in the form of taskset(1): 0,2-5 [default: all CPUs that
    /// the process may use]
    #[arg(long, value_name = "LIST", value_parser = crate::cpus::parse)]
    cpus: Option<Cpus>,
    /// Serve Prometheus metrics at http://ADDR:PORT/metrics, or at the Unix socket unix:PATH. Every
    /// client that can connect to a TCP address can read the metrics
    #[arg(long, value_name = "ADDR:PORT")]
    metrics: Option<String>,
    /// Also append log messages to FILE, with the time: for machines without a system log
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    log_file: Option<PathBuf>,
    /// When the mount ends, write to TRACE a list of the parts of the image that programs have
    /// read, for `bcow convert --prefetch`
    #[arg(long, value_name = "TRACE", value_hint = clap::ValueHint::FilePath)]
    record: Option<PathBuf>,
    /// When to fetch the rest of a remote image into the cache: all the time (always),
    /// only while no program waits for the server (idle), or never [default: idle if the image has
    /// a list of `bcow convert --prefetch`, else never]
    #[arg(long, value_name = "WHEN", hide_short_help = true)]
    #[arg(help_heading = crate::remote::HEADING)]
    complete: Option<CompleteWhen>,
    /// Let the process of this pool serve the mount (see `bcow help pool`). Not with --foreground,
    /// --cache-size, --cpus, --metrics, --log-file or --record
    #[arg(long, value_name = "NAME", value_parser = pool::parse_name)]
    #[arg(conflicts_with_all = ["foreground", "cache_size", "cpus", "metrics", "log_file"])]
    #[arg(conflicts_with = "record")]
    pool: Option<PoolName>,
    /// Check the command line only
    #[arg(long, hide = true)]
    fake: bool,
    #[command(flatten)]
    layers: LayerArgs,
    /// Keep the merged metadata of the layers in FILE, so that later mounts of the same image with
    /// the same layers start sooner. A file of other layers is replaced
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    merged: Option<PathBuf>,
    #[command(flatten)]
    stores: StoreArgs,
    #[command(flatten)]
    upper: UpperArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum DriverChoice {
    Auto,
    Fuse,
    Kernel,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum VerifyWhat {
    Checksums,
    Merkle,
}

impl Args {
    /// The directory to mount on.
    fn directory(&self) -> &Path {
        self.more.last().unwrap_or(&self.directory)
    }

    /// Opens the image with its layers.
    fn open_image(&self, options: &OpenOptions) -> Result<OpenImage, CommandError> {
        let merged = self.merged.as_deref();
        OpenImage::open_merged(&self.image, &self.layers()?, &self.stores, options, merged)
    }

    /// The layers on top of the image, the lowest first.
    fn layers(&self) -> Result<Vec<Name>, CommandError> {
        let mut layers = self.layers.layers.clone();
        if let Some((_, between)) = self.more.split_last() {
            for layer in std::iter::once(&self.directory).chain(between) {
                layers.push(IMAGE.parse(layer.as_os_str())?);
            }
        }
        Ok(layers)
    }

    fn has_layers(&self) -> bool {
        !self.layers.layers.is_empty() || !self.more.is_empty()
    }

    /// What each read of bcow verifies.
    fn verify(&self) -> Verify {
        match self.verify {
            None | Some(VerifyWhat::Checksums) => Verify::Checksums,
            Some(VerifyWhat::Merkle) => Verify::Merkle,
        }
    }

    /// The layers by names that mean the same to other processes.
    fn layer_names(&self) -> Result<Vec<String>, CommandError> {
        let names = self.layers()?.into_iter().map(|layer| {
            let name = layer.absolute();
            name.to_string_lossy().into_owned()
        });
        Ok(names.collect())
    }
}

/// Mounts; returns when the mount is ready, or in the foreground when it has ended.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    // A spelling mistake fails before any process is started.
    let (way, mut options) = check(args)?;
    if args.fake {
        return Ok(());
    }
    if let Some(name) = &args.pool {
        return match bind::attempt(args, &options, ui)? {
            Attempt::Bound => Ok(()),
            Attempt::Free(_turn) => pooled::request(name, ui),
        };
    }
    let readiness = if args.foreground {
        None
    } else {
        match daemon::started_by_launch() {
            Some(readiness) => Some(readiness),
            None => {
                return match bind::attempt(args, &options, ui)? {
                    Attempt::Bound => Ok(()),
                    Attempt::Free(_turn) => in_background(),
                };
            }
        }
    };
    limits::adapt_for_service();
    let signals = Signals::block(match readiness {
        Some(_) => Ground::Background,
        None => Ground::Foreground,
    })
    .map_err(|error| failure(&error))?;
    if let Some(cpus) = &args.cpus {
        cpus.confine().map_err(|cause| {
            CommandError::new("cannot restrict the process to --cpus").caused_by_text(cause)
        })?;
    }
    let metrics = args.metrics.as_deref().map(Metrics::listen).transpose()?;
    if let Some(path) = &args.log_file {
        log::use_file(path).context(|| format!("cannot write the log file {}", path.display()))?;
    }
    let running = Running {
        args,
        readiness,
        signals,
        metrics,
        ui,
    };
    let host = Host {
        cache: BlockCache::new(args.cache_size),
        signals: Some(&running.signals),
        pool: None,
    };
    let mounted = match make(args, way, &mut options, &host, ui)? {
        Made::Served(mounted) => mounted,
        Made::Direct(files) => {
            let mounted = direct::run(&files, running, &options);
            return mounted.map_err(|error| kernel::cannot_mount(args.image.shown(), &error));
        }
    };
    running.answer_metrics(mounted.stats)?;
    let session = mounted.session;
    let recording = mounted.recording.as_ref();
    let _fetching = mounted.fetching;
    running.serve(mounted.service, mounted.access, recording, |signals| {
        session.serve_until_signal(signals)
    })
}

/// A mount, or what it needs.
enum Made {
    /// A mount that this process has to serve.
    Served(Box<Mounted>),
    /// Files that the kernel can mount by itself. They are not mounted yet.
    Direct(Vec<PathBuf>),
}

/// Opens the content, and mounts it with its driver.
fn make(
    args: &Args,
    way: Way,
    options: &mut MountOptions,
    host: &Host<'_>,
    ui: &Ui,
) -> Result<Made, CommandError> {
    let opened = match (way, args.upper.path()) {
        (Way::Upper { reason }, Some(upper)) => {
            Some(kernel::open_upper(args, host, upper, reason, options, ui)?)
        }
        (Way::Fuse { reason }, _) => {
            let mounted = fuse::mount(args, options.clone(), reason, host, ui)?;
            return Ok(Made::Served(Box::new(mounted)));
        }
        // Whether the kernel mounts a disk depends on its content.
        (Way::Content | Way::Upper { .. }, _) => kernel::open(args, host)?,
    };
    let Some(opened) = opened else {
        settle(args, options)?;
        let mounted = fuse::mount(args, options.clone(), DRIVER_OF_IMAGES.to_owned(), host, ui)?;
        return Ok(Made::Served(Box::new(mounted)));
    };
    if let Some(files) = opened.files() {
        refuse_mounted(args.directory())?;
        return Ok(Made::Direct(files.to_owned()));
    }
    let mounted = kernel::mount(opened, args, options, host)?;
    Ok(Made::Served(Box::new(mounted)))
}

/// Why an image is mounted with the FUSE driver.
const DRIVER_OF_IMAGES: &str = "the default for images";

/// Checks the command line. Returns the way of the mount, and its mount options.
fn check(args: &Args) -> Result<(Way, MountOptions), CommandError> {
    let mut options = MountOptions::default();
    for list in &args.options {
        options.apply(list).map_err(|error| match error {
            MountError::UnknownOption(_) | MountError::BadOption { .. } => {
                failure(&error).exit_with(crate::error::exit::USAGE)
            }
            error => failure(&error),
        })?;
    }
    bcow_fuse::refuse_root(args.directory())
        .map_err(|error| failure(&error).exit_with(crate::error::exit::USAGE))?;
    let way = driver::select(args)?;
    match way {
        Way::Fuse { .. } => settle(args, &mut options)?,
        // Before the upper is made.
        Way::Upper { .. } if options.overlay_lower().is_some() => {
            let error = MountError::OnlyWithoutUpper("overlay_lower");
            return Err(failure(&error).exit_with(crate::error::exit::USAGE));
        }
        Way::Upper { .. } | Way::Content => {}
    }
    if let Some(upper) = args.upper.path() {
        upper::refuse_one_in_the_other(upper, args.directory())?;
    }
    Ok((way, options))
}

/// Settles the options of a mount with the FUSE driver.
fn settle(args: &Args, options: &mut MountOptions) -> Result<(), CommandError> {
    options
        .settle(match args.upper.path() {
            Some(_) => Writing::ToUpper,
            None => Writing::Never,
        })
        .map_err(|error| failure(&error).exit_with(crate::error::exit::USAGE))
}

/// What a mount with either driver needs while it is being made.
struct Running<'a> {
    args: &'a Args,
    /// In the background: the pipe to the waiting command.
    readiness: Option<Readiness>,
    signals: Signals,
    metrics: Option<Metrics>,
    ui: &'a Ui,
}

impl Running<'_> {
    /// Answers requests for metrics from now on.
    fn answer_metrics(&self, stats: Arc<MountStats>) -> Result<(), CommandError> {
        let Some(metrics) = &self.metrics else {
            return Ok(());
        };
        metrics.answer(move || stats.for_prometheus())?;
        // Only this process knows which port the host selected.
        if let ListenAddress::Tcp(address) = metrics.place()
            && self
                .args
                .metrics
                .as_deref()
                .is_some_and(|asked| asked.ends_with(":0"))
        {
            self.ui
                .status(format_args!("metrics at http://{address}/metrics"));
        }
        Ok(())
    }

    /// Reports that the mount is ready, and serves it to its end.
    fn serve(
        self,
        service: Service,
        access: Access,
        recording: Option<&Recording>,
        serve: impl FnOnce(Signals) -> Result<(), MountError>,
    ) -> Result<(), CommandError> {
        let _published = running::publish(vec![service]);
        let in_background = self.readiness.is_some();
        match self.readiness {
            Some(readiness) => readiness.announce().map_err(|error| failure(&error))?,
            None => announce(self.args, access, self.ui),
        }
        let served = serve(self.signals).map_err(|error| failure(&error));
        let recorded = recording.map_or(Ok(()), |recording| {
            show_closing();
            recording.finish()
        });
        served.and(recorded).inspect_err(|failure| {
            if in_background {
                // No process reads standard error any more.
                let text = [failure.message()].into_iter();
                let causes = failure.causes().iter().map(String::as_str);
                log::log(
                    Severity::Error,
                    &text.chain(causes).collect::<Vec<_>>().join(": "),
                );
            }
        })
    }
}

/// The mapping of owners, for the entry of the mount.
fn owners(options: &MountOptions) -> Option<String> {
    let owners = options.owners();
    (!owners.are_same()).then(|| owners.to_string())
}

/// Fails if an image is mounted there. A mount whose process is dead is replaced.
fn refuse_mounted(directory: &Path) -> Result<(), CommandError> {
    let Ok(mount) = bcow_fuse::mounted_image(directory) else {
        return Ok(());
    };
    let already = MountError::AlreadyMounted(directory.to_owned());
    match ask::ask(&mount, ask::ANSWER_TIMEOUT) {
        Answer::NotServed => Ok(()),
        Answer::Statistics(..) | Answer::Refused(_) | Answer::NoProcess => Err(failure(&already)),
        Answer::Timeout => Err(CommandError::new(already.to_string())
            .caused_by_text(ask::explain_timeout(&mount).0)
            .hint("`bcow umount --lazy` detaches the mount at once")),
    }
}

fn announce(args: &Args, access: Access, ui: &Ui) {
    ui.status(format_args!(
        "{} is mounted at {}{}",
        args.image,
        args.directory().display(),
        match access {
            Access::Owner => "",
            Access::Everyone => ", for all users",
        }
    ));
}

pub fn in_background() -> Result<(), CommandError> {
    match daemon::launch().map_err(|error| failure(&error))? {
        Launch::Ready => Ok(()),
        // The background process has printed the reason.
        Launch::Failed(code) => std::process::exit(code.into()),
    }
}

/// Reads that wait for a server do not delay reads of what is here.
const REMOTE_THREADS: usize = 16;

/// The number of threads that answer requests.
fn threads(args: &Args, is_writable: bool) -> usize {
    match args.threads {
        Some(threads) => threads.into(),
        None if args.image.is_remote() => REMOTE_THREADS,
        None => default_threads(is_writable),
    }
}

/// With these numbers, one slow read does not delay the others, nor do two requests to an upper
/// that wait for the disk. More threads only compete for the CPU.
fn default_threads(is_writable: bool) -> usize {
    let least = if is_writable { 4 } else { 2 };
    std::thread::available_parallelism().map_or(least, |cpus| cpus.get().clamp(least, 16))
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
