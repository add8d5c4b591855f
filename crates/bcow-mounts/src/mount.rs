//! A mount, from its options to its end, in a process of its own; [`pooled`] has those in the
//! process of a pool.

mod ahead;
mod bind;
mod direct;
mod driver;
pub mod fuse;
pub mod host;
pub mod kernel;
pub mod pooled;
mod sandbox;
mod share;
mod upper;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow::BlockCache;
use bcow_fuse::daemon::{self, Launch, Readiness};
use bcow_fuse::kernel::DiskMount;
use bcow_fuse::mounter::Mounter;
use bcow_fuse::options::{Access, Writing};
use bcow_fuse::session::show_closing;
use bcow_fuse::signals::{Ground, Signals};
use bcow_fuse::{MountError, MountOptions, MountStats};
use bcow_images::disks::is_writable_disk;
use bcow_images::error::{CommandError, Context, exit};
use bcow_images::record::Recording;
use bcow_images::running::{self, Service};
use bcow_union::log::{self, Severity};

use crate::args::MountArgs;
use crate::ask::{self, Answer};
use crate::error::{failure, usage};
use crate::limits;
use crate::metrics::{self, Metrics};
use bcow_images::image::Messages;
pub use bind::Attempt;
use driver::Way;
use fuse::Mounted;
use host::{Host, UpperUse};

/// Mounts; returns when the mount is ready, or in the foreground when it has ended. Returns the
/// exit status: the background process has printed the reason of a failure.
pub fn run(args: &MountArgs, ui: &dyn Messages) -> Result<u8, CommandError> {
    // A spelling mistake fails before any process is started.
    let (way, mut options) = check(args)?;
    if args.fake {
        return Ok(exit::DONE);
    }
    let mut readiness = if args.foreground { None } else { daemon::started_by_launch() };
    if !args.foreground && readiness.is_none() {
        return match bind_or_check(args, &options, ui)? {
            Attempt::Done => Ok(exit::DONE),
            Attempt::Free(_turn) => {
                in_background(sandbox::mounter_of_daemon(args, &way, &options).as_deref())
            }
        };
    }
    if args.foreground {
        refuse_mounted(args.directory())?;
    }
    limits::adapt_for_service();
    let signals = Signals::block(match readiness {
        Some(_) => Ground::Background,
        None => Ground::Foreground,
    })
    .map_err(|error| failure(&error))?;
    if let Some(cpus) = &args.cpus {
        cpus.confine()?;
    }
    let mounter = readiness.as_mut().and_then(|daemon| daemon.mounter.take());
    let mut prepared = sandbox::prepare(args, &way, &options, mounter)?;
    let metrics = args.metrics.as_deref().map(metrics::listen).transpose()?;
    if let Some(path) = &args.log_file {
        log_to(path)?;
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
    let confine = |disk: &_| prepared.confine(args, disk);
    let mut mounted = match make(args, way, &mut options, &host, confine, ui)? {
        Made::Served(mounted) => mounted,
        Made::Direct(files) => {
            return direct::run(&files, running, &options)
                .map(|()| exit::DONE)
                .map_err(|error| kernel::cannot_mount(args.image.shown(), &error));
        }
    };
    prepared.enter(args, &mut mounted)?;
    running.answer_metrics(mounted.stats)?;
    let session = mounted.session;
    let recording = mounted.recording.as_ref();
    let _fetching = mounted.fetching.and_then(ahead::Ready::start);
    running.serve(mounted.service, mounted.access, recording, |signals| {
        session.serve_until_signal(signals)
    })?;
    Ok(exit::DONE)
}

/// Checks the command line and the directory of a mount in a pool, and binds the mount of the upper
/// if that is asked for.
pub fn prepare(args: &MountArgs, ui: &dyn Messages) -> Result<Attempt, CommandError> {
    match check(args)? {
        _ if args.fake => Ok(Attempt::Done),
        (_, options) => bind_or_check(args, &options, ui),
    }
}

/// Binds the mount of the upper, or fails if an image is mounted at the directory. Here, because
/// that starts a program, which a process in a sandbox cannot.
fn bind_or_check(
    args: &MountArgs,
    options: &MountOptions,
    ui: &dyn Messages,
) -> Result<Attempt, CommandError> {
    let attempt = bind::attempt(args, options, ui)?;
    if let Attempt::Free(_) = attempt {
        refuse_mounted(args.directory())?;
    }
    Ok(attempt)
}

/// Also appends log messages to this file from now on.
pub fn log_to(path: &Path) -> Result<(), CommandError> {
    log::use_file(path).context(|| format!("cannot write the log file {}", path.display()))
}

/// A mount, or what it needs.
enum Made {
    /// A mount that this process has to serve.
    Served(Box<Mounted>),
    /// Files that the kernel can mount by itself. They are not mounted yet.
    Direct(Vec<PathBuf>),
}

/// Opens the content, and mounts it with its driver. `confine`: see [`kernel::mount`].
fn make(
    args: &MountArgs,
    way: Way,
    options: &mut MountOptions,
    host: &Host<'_>,
    confine: impl FnOnce(&DiskMount) -> Result<Option<Mounter>, CommandError>,
    ui: &dyn Messages,
) -> Result<Made, CommandError> {
    let opened = match (way, args.upper.path()) {
        (Way::Upper { reason }, Some(upper)) => {
            Ok(kernel::open_upper(args, host, upper, reason, options, ui)?)
        }
        (Way::Fuse { reason }, _) => Err(reason),
        // Whether the kernel mounts a disk depends on its content.
        (Way::Content | Way::Upper { .. }, _) => {
            kernel::open(args, host)?.ok_or_else(|| DRIVER_OF_IMAGES.to_owned())
        }
    };
    let opened = match opened {
        Ok(opened) => opened,
        Err(reason) => {
            settle(args, options)?;
            let opened = fuse::open(args, options.clone(), reason, host, UpperUse::New, ui)?;
            let mounted = opened.mount(args, host, ui)?;
            let may_write = is_writable_disk(&args.image) && args.upper.path().is_none();
            if may_write && !options.asks_for_read_only() {
                ui.hint(
                    "the mount is read-only: the disk shows an image. `bcow create -b IMG --fs \
                     ext4 NEW.bcow` makes a disk that is mounted writable, and `--upper UPPER` \
                     stores the changes in a directory",
                );
            }
            return Ok(Made::Served(Box::new(mounted)));
        }
    };
    if let Some(files) = opened.files {
        return Ok(Made::Direct(files));
    }
    let mounted = kernel::mount(opened, args, options, host, confine)?;
    Ok(Made::Served(Box::new(mounted)))
}

/// Why an image is mounted with the FUSE driver.
const DRIVER_OF_IMAGES: &str = "the driver of images";

/// Checks the command line. Returns the way of the mount, and its mount options.
fn check(args: &MountArgs) -> Result<(Way, MountOptions), CommandError> {
    let mut options = MountOptions::default();
    for list in &args.options {
        options.apply(list).map_err(|error| match error {
            MountError::UnknownOption(_) | MountError::BadOption { .. } => usage(&error),
            error => failure(&error),
        })?;
    }
    bcow_fuse::refuse_root(args.directory()).map_err(|error| usage(&error))?;
    let way = driver::select(args)?;
    share::check(args, &way)?;
    match way {
        Way::Fuse { .. } => settle(args, &mut options)?,
        // Before the upper is made.
        Way::Upper { .. } if options.overlay_lower().is_some() => {
            let error = MountError::OnlyWithoutUpper("overlay_lower");
            return Err(usage(&error));
        }
        Way::Upper { .. } | Way::Content => {}
    }
    sandbox::check(args)?;
    if let Some(upper) = args.upper.path() {
        upper::refuse_one_in_the_other(upper, args.directory())?;
    }
    Ok((way, options))
}

/// Settles the options of a mount with the FUSE driver.
fn settle(args: &MountArgs, options: &mut MountOptions) -> Result<(), CommandError> {
    options
        .settle(match args.upper.path() {
            Some(_) => Writing::ToUpper,
            None => Writing::Never,
        })
        .map_err(|error| usage(&error))
}

/// What a mount with either driver needs while it is being made.
struct Running<'a> {
    args: &'a MountArgs,
    /// In the background: the pipe to the waiting command.
    readiness: Option<Readiness>,
    signals: Signals,
    metrics: Option<Metrics>,
    ui: &'a dyn Messages,
}

impl Running<'_> {
    /// Answers requests for metrics from now on.
    fn answer_metrics(&self, stats: Arc<MountStats>) -> Result<(), CommandError> {
        if let Some(metrics) = &self.metrics {
            let answered = metrics.answer(move || stats.for_prometheus());
            answered.context(|| "cannot serve metrics")?;
            metrics::announce(metrics, self.ui);
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
        let announced = announce(self.readiness, self.args, access, self.ui);
        announced.map_err(|error| failure(&error))?;
        let served = serve(self.signals).map_err(|error| failure(&error));
        let recorded = recording.map_or(Ok(()), |recording| {
            show_closing();
            recording.finish()
        });
        served.and(recorded).inspect_err(|failure| {
            if in_background {
                // No process reads standard error any more.
                log::log(Severity::Error, &failure.in_one_line());
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

/// Reports that the mount is ready: to the waiting command, or in the foreground to the user.
fn announce(
    readiness: Option<Readiness>,
    args: &MountArgs,
    access: Access,
    ui: &dyn Messages,
) -> Result<(), MountError> {
    let Some(readiness) = readiness else {
        ui.status(&format_args!(
            "{} is mounted at {}{}",
            args.image,
            args.directory().display(),
            match access {
                Access::Owner => "",
                Access::Everyone => ", for all users",
            }
        ));
        return Ok(());
    };
    readiness.announce()
}

/// Starts this program again as a background process, and waits until that is ready. Returns its
/// exit status if it has failed; it has printed the reason. `start_mounter`: see
/// [`daemon::launch`].
pub fn in_background(start_mounter: Option<&dyn Fn(OwnedFd)>) -> Result<u8, CommandError> {
    match daemon::launch(start_mounter).map_err(|error| failure(&error))? {
        Launch::Ready => Ok(exit::DONE),
        Launch::Failed(code) => Ok(code),
    }
}
