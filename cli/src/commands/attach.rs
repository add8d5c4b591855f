//! `bcow attach`

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use bcow::BlockCache;
use bcow_fuse::daemon::{self, Readiness};
use bcow_images::Name;
use bcow_images::sandbox::{self, SandboxArgs};
use bcow_mounts::failure as daemon_failure;
use bcow_mounts::mount::in_background;
use bcow_mounts::nbd_device::{NbdDevice, driver_failure};
use bcow_nbd::netlink::{Connect, Driver};
use bcow_nbd::proto::Framing;
use bcow_nbd::{Exports, Server, ServerOptions};
use bcow_sandbox::fork::{fork, keep_only};
use bcow_sandbox::{Access, CapabilitySet, Sandbox, Service};
use bcow_union::log;

use super::serve::failure as nbd_failure;
use super::serve::open::{self, DeviceOptions, Served};
use super::serve::ready::Signals;
use super::serve::{attributes, needs};
use crate::error::{CommandError, Context, exit};
use crate::heap;
use crate::image::StoreArgs;
use crate::limits;
use crate::running::{self, Published};
use crate::ui::Ui;
use bcow_images::args::{IMAGE, NameParser};

/// Attach an image or a disk as a block device of this machine (/dev/nbdN)
///
/// The command returns when the device is ready. A background process serves the device. The
/// process ends when the device is detached with `bcow detach` or `nbd-client -d`. The device of a
/// sealed image or disk is read-only. The device of a writable disk (`bcow create`) is writable,
/// and no other process can write to that disk in the meantime.
///
/// The command needs root and the kernel's nbd driver.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The image or disk: a file, oci:DIR[:REF], oci:DIR@sha256:DIGEST, https://..., s3://... or
    /// docker://...
    #[arg(value_name = "IMG", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(IMAGE))]
    image: Name,
    /// The device: /dev/nbdN
    #[arg(value_name = "DEVICE", value_hint = clap::ValueHint::FilePath)]
    device: PathBuf,
    /// Serve the device in the foreground
    #[arg(short, long)]
    foreground: bool,
    /// Make the device read-only
    #[arg(short, long, conflicts_with = "snapshot")]
    read_only: bool,
    /// Make the device writable and discard all writes at the end; until then, an unnamed file in
    /// $TMPDIR (or /tmp) stores them
    #[arg(long)]
    snapshot: bool,
    /// Detach when the last program closes the device
    #[arg(long)]
    until_closed: bool,
    /// Number of connections between the kernel and the server, at most 16 [default: one for each
    /// CPU, up to 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=16))]
    connections: Option<u16>,
    /// Logical block size of the device: 512, 1024, 2048 or 4096
    #[arg(long, value_name = "SIZE", default_value = "512", value_parser = block_size)]
    block_size: u64,
    /// Fail requests that take longer than this time [default: no limit]
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<u32>,
    /// Size of the cache of decoded blocks
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = crate::size::parse)]
    cache_size: u64,
    #[command(flatten)]
    stores: StoreArgs,
    #[command(flatten)]
    sandbox: SandboxArgs,
}

fn block_size(text: &str) -> Result<u64, String> {
    let bytes = crate::size::parse(text)?;
    match bytes {
        512 | 1024 | 2048 | 4096 => Ok(bytes),
        _ => Err("a block size is 512, 1024, 2048 or 4096".into()),
    }
}

/// Attaches the device. Returns when the device is ready; in the foreground, when it is detached.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    heap::use_one_arena();
    let readiness = if args.foreground {
        None
    } else {
        match daemon::started_by_launch() {
            Some(readiness) => Some(readiness),
            None => {
                return match in_background(None)? {
                    exit::DONE => Ok(()),
                    // The background process has reported the cause.
                    code => std::process::exit(code.into()),
                };
            }
        }
    };
    limits::adapt_for_service();
    let signals = Signals::block()?;
    let device = NbdDevice::find(&args.device)?;
    device.refuse_attached()?;
    let detaching = Detaching::start(args).context(|| "cannot start a process")?;
    let driver = Driver::open().map_err(|error| driver_failure(&error))?;
    let sandbox = args
        .sandbox
        .begin_with_sockets([&args.image], &args.stores, args.cache_size)?;
    let mut served = Served::default();
    let opening = DeviceOptions {
        stores: &args.stores,
        cache: BlockCache::new(args.cache_size),
        access: open::Access::of_options(args.read_only, args.snapshot),
        command: "attach",
    };
    served.add(&args.image, String::new(), String::new(), &opening)?;
    let attaching = Attaching {
        index: device.index(),
        driver,
        detaching,
        sandbox,
        readiness,
        signals,
    };
    let result = attach(args, ui, &served, attaching);
    let closed = served.close();
    result.and(closed)
}

/// What is needed to attach the device, and to detach it.
struct Attaching {
    index: u32,
    driver: Driver,
    detaching: Detaching,
    sandbox: Sandbox,
    readiness: Option<Readiness>,
    signals: Signals,
}

/// A process that detaches the device for this one, which may be in a sandbox by then.
struct Detaching(UnixStream);

impl Detaching {
    /// Starts it. It ends with this process, which has one thread.
    fn start(args: &Args) -> io::Result<Self> {
        let (own, theirs) = UnixStream::pair()?;
        let path = std::path::absolute(&args.device)?;
        let when = args.sandbox.when();
        let serve = || {
            let kept = keep_only(&[theirs.as_raw_fd()], c"bcow-detach");
            if kept.is_ok() && Sandbox::of_service(when, Service::Devices).is_ok() {
                let _ = detach_on_request(&theirs, &path);
            }
        };
        fork(serve).map(|_| Detaching(own))
    }

    /// Writes the dirty pages of the device, flushes and detaches it.
    fn detach(&self) -> Result<(), CommandError> {
        let mut error = String::new();
        let answered = (&self.0).write_all(b"d");
        let answered = answered.and_then(|()| BufReader::new(&self.0).read_line(&mut error));
        match (answered, error.trim_end()) {
            (Ok(1..), "") => Ok(()),
            (Ok(1..), error) => Err(CommandError::new(error)),
            _ => Err(CommandError::new(
                "the process that detaches the device has ended",
            )),
        }
    }
}

/// Answers each byte with a line: that of an error, or an empty one.
fn detach_on_request(mut stream: &UnixStream, path: &Path) -> io::Result<()> {
    while stream.read(&mut [0])? == 1 {
        let device = NbdDevice::find(path);
        let detached = device.and_then(|device| device.flush().and_then(|()| device.disconnect()));
        let error = detached.err().map(|error| error.in_one_line());
        writeln!(stream, "{}", error.unwrap_or_default())?;
    }
    Ok(())
}

/// Serves until the device is detached.
fn attach(args: &Args, ui: &Ui, served: &Served, attaching: Attaching) -> Result<(), CommandError> {
    let Attaching {
        index,
        mut driver,
        detaching,
        mut sandbox,
        readiness,
        signals,
    } = attaching;
    let exports = Exports::new(served.exports.clone()).map_err(|error| nbd_failure(&error))?;
    let export = &served.exports[0];
    let size = export.device.reader().size();
    if !size.is_multiple_of(args.block_size) {
        return Err(CommandError::new(format!(
            "cannot attach {}: its size ({size} bytes) is no multiple of the block size",
            args.image
        )));
    }
    // The kernel may pause in the middle of a request when memory is short, and is not hostile.
    let options = ServerOptions {
        request_timeout: None,
        failures: served.failure_report(),
        ..ServerOptions::default()
    };
    let server = Server::new(exports, options).map_err(|error| nbd_failure(&error))?;
    let connections = args
        .connections
        .map_or_else(default_connections, usize::from);
    let mut ours = Vec::new();
    let mut theirs = Vec::new();
    for _ in 0..connections {
        let (one, other) = UnixStream::pair().context(|| "cannot make a pair of sockets")?;
        ours.push(OwnedFd::from(one));
        theirs.push(other);
    }
    sandbox::seal(&args.stores)?;
    let (mut paths, capabilities) = needs(served, &args.stores);
    // To detach from the terminal.
    paths.push((PathBuf::from("/dev/null"), Access::Write));
    log::connect_syslog();
    // Only such a process can attach a device.
    let until_attached = capabilities | CapabilitySet::SYS_ADMIN;
    let confined = sandbox.confine(&paths, until_attached);
    confined.context(sandbox::cannot)?;
    let of_serving = sandbox.clone();
    thread::scope(|scope| {
        // The device is read as soon as it is there.
        let serve = || {
            let limited = of_serving.keep_only(capabilities);
            limited.context(sandbox::cannot)?;
            let served = server.serve_attached(ours);
            served.map_err(|error| nbd_failure(&error))
        };
        let serving = thread::Builder::new().spawn_scoped(scope, serve);
        let serving = serving.context(|| "cannot start a thread".to_owned())?;
        let sockets: Vec<_> = theirs.iter().map(AsFd::as_fd).collect();
        let connected = driver.connect(&Connect {
            index,
            size,
            block_bytes: args.block_size,
            flags: export.transmission_flags(Framing::Simple),
            sockets: &sockets,
            timeout: args
                .timeout
                .map(|seconds| Duration::from_secs(seconds.into())),
            dead_timeout: None,
            until_closed: args.until_closed,
        });
        // The kernel has its own hold on them. If it has not, this ends the serving.
        drop(sockets);
        drop(theirs);
        connected.map_err(|error| driver_failure(&error))?;
        let detaching = Arc::new(detaching);
        let limited = sandbox.keep_only(capabilities).context(sandbox::cannot);
        let published = limited.and_then(|()| publish(args, served, &mut sandbox));
        let ready = published.and_then(|published| {
            attached(args, ui, &detaching, readiness, signals).map(|()| published)
        });
        let _published = ready.inspect_err(|_| {
            // No other process knows of the device yet, so it is removed, and no data is lost.
            if let Err(other) = detaching.detach() {
                ui.warning(other.in_one_line());
            }
        })?;
        match serving.join() {
            Ok(served) => served,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Takes requests of other commands, completes the sandbox, and publishes the device.
fn publish(
    args: &Args,
    served: &Served,
    sandbox: &mut Sandbox,
) -> Result<Option<Published>, CommandError> {
    let place = args.device.to_string_lossy();
    let mut services = served.services("attach", |_| vec![place.to_string()]);
    let finished = sandbox.finish(attributes(served, &args.stores));
    finished.context(sandbox::cannot)?;
    for service in &mut services {
        service.sandbox = sandbox.in_force();
    }
    Ok(running::publish(services))
}

/// Reports that the device is ready, and handles signals.
fn attached(
    args: &Args,
    ui: &Ui,
    detaching: &Arc<Detaching>,
    readiness: Option<Readiness>,
    signals: Signals,
) -> Result<(), CommandError> {
    let ours = Arc::clone(detaching);
    signals.on_first(move || {
        // Should that fail, the device is still there for another try.
        if let Err(error) = ours.detach() {
            tracing::error!("{}", error.in_one_line());
        }
    })?;
    match readiness {
        Some(readiness) => readiness.announce().map_err(|error| daemon_failure(&error)),
        None => {
            ui.status(format_args!(
                "{} is attached to {}",
                args.image,
                args.device.display()
            ));
            Ok(())
        }
    }
}

/// One per CPU, up to a limit: each connection adds threads.
fn default_connections() -> usize {
    std::thread::available_parallelism().map_or(1, |cpus| cpus.get().clamp(1, 4))
}
