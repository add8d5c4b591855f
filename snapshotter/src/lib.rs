//! `bcow-snapshotter`: a proxy snapshotter for containerd.
//!
//! The path through it: [`service`] decodes a request of containerd ([`protocol`] has the
//! messages), [`snapshots`] does the operation and keeps its directory consistent, [`remote`] finds
//! layers in registries, [`tool`] runs `bcow` for the layers, and [`mount`] has the form in which
//! containerd gets mounts. [`images`] passes requests of a kubelet on to containerd, and
//! [`credentials`] keeps what they have brought.
//!
//! ```no_run
//! use std::process::ExitCode;
//!
//! // Reads the options of the command line, and serves until a signal.
//! let status: ExitCode = bcow_snapshotter::main();
//! ```

mod credentials;
mod error;
mod filter;
#[cfg(feature = "testing")]
mod fuzz;
mod images;
mod mount;
mod protocol;
mod record;
mod remote;
mod repository;
mod service;
mod snapshots;
mod tool;
mod usage;

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use bcow_tool::At;
use bcow_tool::host::{make_private, remove_if_any};
use bcow_tool::metrics::{MetricsArgs, Page};
use bcow_tool::notify::notify;
use bcow_tool::program::{end, start_log};
use bcow_tool::sandbox::SandboxArgs;
use bcow_tool::tool::{Tool, parse_pool};
use clap::Parser;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;

use crate::error::Error;
use crate::images::ImageService;
use crate::remote::RemoteArgs;
use crate::service::SnapshotService;
use crate::snapshots::{ContentStore, Snapshots};

#[cfg(feature = "testing")]
pub use fuzz::fuzz_request;

/// Requests that run at the same time; more wait.
const THREADS: usize = 64;
/// Time between the removal of the socket and the end of the listener, in which the connections are
/// accepted that clients have begun.
const ACCEPTS_FOR: Duration = Duration::from_millis(50);

/// A proxy snapshotter for containerd: container roots on BCoW images
///
/// containerd unpacks the layers of an image into snapshots. Each layer becomes a BCoW layer once,
/// and all containers on this machine share it. A container's root is a mount that this program
/// makes: the layers, and an upper with the container's changes.
#[derive(Debug, Parser)]
#[command(name = "bcow-snapshotter", version, max_term_width = 100)]
struct Args {
    /// Directory for layers, uppers and records. Only one process can use it
    #[arg(long, value_name = "DIR", default_value = "/var/lib/bcow-snapshotter")]
    root: PathBuf,
    /// Unix socket for containerd; created with its directory
    #[arg(
        long,
        value_name = "PATH",
        default_value = "/run/bcow-snapshotter/bcow-snapshotter.sock"
    )]
    socket: PathBuf,
    /// The program bcow, not a script that runs it [default: beside this program, else in PATH]
    #[arg(long, value_name = "PATH")]
    bcow: Option<PathBuf>,
    /// Option for each mount of layers, as in fstab(5): writeback, cache_size=128M (repeatable)
    #[arg(long, value_name = "OPTION")]
    mount_option: Vec<String>,
    /// Let the process of this pool serve all mounts of layers (see `bcow pool`); it must run
    #[arg(long, value_name = "NAME", value_parser = parse_pool)]
    pool: Option<String>,
    /// Also answer as containerd's diff service: make each layer of its archive in this content
    /// store of containerd, which is not unpacked. DIR is ROOT/io.containerd.content.v1.content,
    /// with containerd's own ROOT. containerd 1.7 or later must be configured for it
    #[arg(long, value_name = "DIR")]
    content_store: Option<PathBuf>,
    #[command(flatten)]
    sandbox: SandboxArgs,
    #[command(flatten)]
    metrics: MetricsArgs,
    #[command(flatten)]
    remote: RemoteArgs,
}

/// Runs the program, with the arguments of this process.
pub fn main() -> ExitCode {
    let args = Args::parse();
    start_log();
    end(serve(&args))
}

fn serve(args: &Args) -> Result<(), Error> {
    args.sandbox.enter().map_err(Error::State)?;
    let tool = Tool::new(args.bcow.clone())?;
    for option in &args.mount_option {
        if option.is_empty() || option.contains(',') {
            return Err(Error::Invalid(format!(
                "--mount-option {option:?} is not one option"
            )));
        }
    }
    let mut mount_options = args.mount_option.clone();
    if let Some(name) = &args.pool {
        refuse_options_of_processes(&mount_options)?;
        mount_options.push(format!("pool={name}"));
        if let Err(error) = tool.require_pool(name) {
            tracing::warn!("{error}; until it runs, containers do not start");
        }
    }
    let content = args.content_store.as_deref();
    let content = content.map(ContentStore::open).transpose()?;
    let snapshots = Snapshots::open(&args.root, tool, &args.remote, mount_options, content)?;
    let shown = Arc::downgrade(&snapshots);
    let page = move || shown.upgrade().map_or_else(Page::default, |it| it.page());
    let _metrics = args.metrics.serve(page).map_err(Error::State)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(THREADS)
        .build()
        .at("start threads for", &args.socket)?;
    let containerd = args.remote.image_service();
    let images = containerd.map(|path| ImageService::new(path.to_owned(), snapshots.clone()));
    let service = SnapshotService::new(snapshots, images);
    runtime.block_on(listen(&args.socket, service))
}

/// Refuses options of the process of a mount, which a mount in a pool does not have.
fn refuse_options_of_processes(options: &[String]) -> Result<(), Error> {
    const OF_PROCESSES: [&str; 6] = [
        "cache_size",
        "cpus",
        "log_file",
        "metrics",
        "pool",
        "record",
    ];
    let name = |option: &str| option.split('=').next().unwrap_or_default().to_owned();
    let is_refused = |option: &&String| OF_PROCESSES.contains(&&*name(option));
    match options.iter().find(is_refused) {
        None => Ok(()),
        Some(option) => Err(Error::Invalid(format!(
            "--mount-option {option} cannot be used with --pool: `bcow pool start` has the options \
             of the process"
        ))),
    }
}

async fn listen(socket: &Path, service: SnapshotService) -> Result<(), Error> {
    let listener = bind(socket)?;
    let mut terminate = signal(SignalKind::terminate()).at("catch signals for", socket)?;
    let mut interrupt = signal(SignalKind::interrupt()).at("catch signals for", socket)?;
    tracing::info!("serving at {}", socket.display());
    notify("READY=1");
    let ended = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        notify("STOPPING=1");
        // containerd waits a second for a socket that is missing, and the next process makes it. A
        // socket without a listener refuses a connection, and containerd's request fails.
        if let Err(error) = fs::remove_file(socket) {
            tracing::warn!("cannot remove {}: {error}", socket.display());
        }
        tokio::time::sleep(ACCEPTS_FOR).await;
    };
    Server::builder()
        .serve_with_incoming_shutdown(service, UnixListenerStream::new(listener), ended)
        .await
        .map_err(std::io::Error::other)
        .at("serve at", socket)?;
    Ok(())
}

/// Listens at `socket`. The lock on the directory of the snapshots guarantees that a socket which
/// is there has no listener of the same snapshots. The new socket gets its name when it takes
/// connections.
fn bind(socket: &Path) -> Result<UnixListener, Error> {
    if let Some(directory) = socket.parent().filter(|path| !path.as_os_str().is_empty()) {
        make_private(directory)?;
    }
    if std::os::unix::net::UnixStream::connect(socket).is_ok() {
        return Err(Error::State(format!(
            "another process listens at {}",
            socket.display()
        )));
    }
    let mut new = socket.as_os_str().to_owned();
    new.push(".new");
    let new = PathBuf::from(new);
    remove_if_any(&new)?;
    let listener = UnixListener::bind(&new).at("listen at", &new)?;
    fs::set_permissions(&new, Permissions::from_mode(0o600)).at("protect", &new)?;
    fs::rename(&new, socket).at("listen at", socket)?;
    Ok(listener)
}
