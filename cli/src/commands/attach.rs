//! `bcow attach`

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use bcow::BlockCache;
use bcow_fuse::daemon::{self, Readiness};
use bcow_images::Name;
use bcow_mounts::failure as daemon_failure;
use bcow_mounts::mount::in_background;
use bcow_mounts::nbd_device::{NbdDevice, driver_failure};
use bcow_nbd::netlink::{Connect, Driver};
use bcow_nbd::proto::Framing;
use bcow_nbd::{Exports, Server, ServerOptions};

use super::serve::failure as nbd_failure;
use super::serve::open::{Access, DeviceOptions, Served};
use super::serve::ready::Signals;
use crate::error::{CommandError, Context, exit};
use crate::heap;
use crate::image::StoreArgs;
use crate::limits;
use crate::running;
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
                return match in_background()? {
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
    let mut driver = Driver::open().map_err(|error| driver_failure(&error))?;
    let mut served = Served::default();
    let opening = DeviceOptions {
        stores: &args.stores,
        cache: BlockCache::new(args.cache_size),
        access: Access::of_options(args.read_only, args.snapshot),
        command: "attach",
    };
    served.add(&args.image, String::new(), String::new(), &opening)?;
    let result = attach(args, ui, &served, &device, &mut driver, readiness, signals);
    let closed = served.close();
    result.and(closed)
}

/// Serves until the device is detached.
fn attach(
    args: &Args,
    ui: &Ui,
    served: &Served,
    device: &NbdDevice,
    driver: &mut Driver,
    readiness: Option<Readiness>,
    signals: Signals,
) -> Result<(), CommandError> {
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
    std::thread::scope(|scope| {
        // The device is read as soon as it is there.
        let serving = scope.spawn(|| server.serve_attached(ours));
        let sockets: Vec<_> = theirs.iter().map(AsFd::as_fd).collect();
        let connected = driver.connect(&Connect {
            index: device.index(),
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
        let place = args.device.to_string_lossy().into_owned();
        let services = served.services("attach", |_| vec![place.clone()]);
        let _published = running::publish(services);
        if let Err(error) = attached(args, ui, device, readiness, signals) {
            // No other process knows of the device yet, so it is removed, and no data is lost.
            if let Err(other) = device.disconnect() {
                ui.warning(other.in_one_line());
            }
            return Err(error);
        }
        match serving.join() {
            Ok(served) => served.map_err(|error| nbd_failure(&error)),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Reports that the device is ready, and handles signals.
fn attached(
    args: &Args,
    ui: &Ui,
    device: &NbdDevice,
    readiness: Option<Readiness>,
    signals: Signals,
) -> Result<(), CommandError> {
    let ours = device.clone();
    signals.on_first(move || {
        // Should that fail, the device is still there for another try.
        if let Err(error) = ours.flush().and_then(|()| ours.disconnect()) {
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
