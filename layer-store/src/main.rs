//! `bcow-layer-store`: an additional layer store for podman, buildah, skopeo and cri-o.
//!
//! The path through it: [`files`] decodes the requests of the kernel with the inodes in [`nodes`],
//! and [`store`] does what they ask for. [`answers`] finds layers in registries, [`uses`] records
//! which of them engines use, [`mounts`] mounts them, and [`blobs`] fetches the layers of ordinary
//! images. `bcow` does the work of the last four.

mod answers;
mod blobs;
mod error;
mod files;
mod layer;
mod mounting;
mod mounts;
mod nodes;
mod reference;
mod store;
mod uses;

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bcow_tool::host::{lock, make_private};
use bcow_tool::metrics::MetricsArgs;
use bcow_tool::notify::notify;
use bcow_tool::program::{end, start_log};
use bcow_tool::registry::{is_plain, with_auth_file};
use bcow_tool::sandbox::SandboxArgs;
use bcow_tool::tool::{Tool, parse_pool};
use bcow_tool::{At, RegistryArgs};
use clap::Parser;
use nix::sys::signal::{SigSet, Signal};

use crate::answers::Answers;
use crate::blobs::Blobs;
use crate::error::Error;
use crate::files::Files;
use crate::mounting::Mounted;
use crate::mounts::Mounts;
use crate::store::Store;
use crate::uses::Uses;

/// Threads that read requests. Requests that take long have threads of their own.
const THREADS: usize = 4;

/// An additional layer store for podman and cri-o: layers on BCoW images
///
/// Before podman, buildah, skopeo or cri-o pull a layer, they look for it in the directory STORE.
/// If a BCoW image is attached to the ordinary image in the registry, the layer is there: a mount
/// by `bcow`, which fetches what containers read.
#[derive(Debug, Parser)]
#[command(name = "bcow-layer-store", version, max_term_width = 100)]
struct Args {
    /// The directory to mount the store on, which storage.conf names
    #[arg(value_name = "STORE")]
    store: PathBuf,
    /// Directory for mounts, records and the cache. Only one process can use it
    #[arg(long, value_name = "DIR", default_value = "/var/lib/bcow-layer-store")]
    root: PathBuf,
    /// The program bcow [default: beside this program, else in PATH]
    #[arg(long, value_name = "PATH")]
    bcow: Option<PathBuf>,
    /// Let the process of this pool serve all mounts of layers (see `bcow pool`); it must run
    #[arg(long, value_name = "NAME", value_parser = parse_pool)]
    pool: Option<String>,
    /// Largest size in bytes of DIR/blobs: layers of ordinary images that `podman save` and `podman
    /// push` read
    #[arg(long, value_name = "BYTES", default_value_t = 8 << 30)]
    blob_limit: u64,
    #[command(flatten)]
    sandbox: SandboxArgs,
    #[command(flatten)]
    metrics: MetricsArgs,
    #[command(flatten)]
    registry: RegistryArgs,
}

fn main() -> ExitCode {
    let args = Args::parse();
    start_log();
    end(serve(&args))
}

fn serve(args: &Args) -> Result<(), Error> {
    // Before threads exist.
    let signals: SigSet = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP]
        .into_iter()
        .collect();
    signals
        .thread_block()
        .map_err(|errno| Error::State(format!("cannot block signals: {errno}")))?;
    if !rustix::process::geteuid().is_root() {
        return Err(Error::State(
            "only root can mount the store; without root, run it in podman's user namespace: \
             podman unshare bcow-layer-store ..."
                .to_owned(),
        ));
    }
    args.sandbox.enter().map_err(Error::State)?;
    let tool = Tool::new(args.bcow.clone())?;
    if let Some(name) = &args.pool
        && let Err(error) = tool.require_pool(name)
    {
        tracing::warn!("{error}; until it runs, images are pulled whole");
    }
    let (root, _lock) = take_root(&args.root)?;
    let cache = root.join("cache");
    args.registry.require_auth_file().map_err(Error::State)?;
    // Mounts would fail without the cache that their options name.
    if let Err(error) = make_private(&cache) {
        tracing::error!("{error}");
    }
    let options = args.registry.options(&cache).map_err(Error::State)?;
    let mut of_mounts: Vec<OsString> = with_auth_file(&options.of_commands, &options.auth_file)
        .into_iter()
        .map(OsString::from)
        .collect();
    for (option, value) in [("complete", &args.registry.complete), ("pool", &args.pool)] {
        of_mounts.extend(value.iter().map(|it| format!("--{option}={it}").into()));
    }
    of_mounts.extend(["-o".into(), "allow_other,suid,dev,overlay_lower".into()]);
    let uses = Uses::open(root.join("layers"));
    let auth_file = options.auth_file.clone();
    let mounts = Mounts::new(root.join("mounts"), tool.clone(), of_mounts, auth_file);
    let blobs = Blobs::open(root.join("blobs"), args.blob_limit, tool.clone(), &options);
    let store = Store::start(Answers::new(tool, options), uses, mounts, blobs)?;
    let mut config = fuser::Config::default();
    config.n_threads = Some(THREADS);
    let shown = Arc::clone(&store);
    let metrics = args.metrics.serve(move || shown.page());
    let _metrics = metrics.map_err(Error::State)?;
    let (mounted, session) = Mounted::new(&args.store, Files::new(store), config)?;
    let is_ending = Arc::new(AtomicBool::new(false));
    let ending = Arc::clone(&is_ending);
    let serve = move || {
        if let Err(error) = session.run() {
            tracing::error!("cannot serve the store: {error}");
        }
        if !ending.load(Ordering::SeqCst) {
            tracing::error!("the store was unmounted");
            std::process::exit(1);
        }
    };
    let started = std::thread::Builder::new().spawn(serve);
    started.at("start a thread for", &args.store)?;
    // The kernel keeps the attributes: see `files`.
    fs::metadata(&args.store).at("examine", &args.store)?;
    tracing::info!("serving at {}", args.store.display());
    notify("READY=1");
    // sigwait(3) fails only for an invalid set.
    let _ = signals.wait();
    notify("STOPPING=1");
    is_ending.store(true, Ordering::SeqCst);
    Ok(mounted.end()?)
}

/// Creates the directory, and locks it. Returns its absolute path, and the lock.
fn take_root(root: &Path) -> Result<(PathBuf, File), Error> {
    make_private(root)?;
    let root = fs::canonicalize(root).at("use", root)?;
    // It becomes a part of the options of mounts.
    match root.to_str() {
        Some(text) if is_plain(text) => {}
        _ => {
            return Err(Error::State(format!(
                "{} cannot be the directory of the store: its name has a comma, a quotation mark, \
                 a backslash or a control character, or is not UTF-8",
                root.display()
            )));
        }
    }
    match lock(&root)? {
        Some(lock) => Ok((root, lock)),
        None => Err(Error::State(format!(
            "another process uses {}",
            root.display()
        ))),
    }
}
