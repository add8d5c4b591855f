//! `bcow serve`

pub mod open;
mod place;
pub mod ready;

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bcow::BlockCache;
use bcow::chain::directory_of;
use bcow_images::sandbox::{self, SandboxArgs};
use bcow_images::{Name, NameParts};
use bcow_nbd::{Exports, ListenAddress, Listener, Server, ServerOptions, Tls, TlsWhen, activation};

use crate::disks::is_writable_disk;
use crate::error::{CommandError, Context};
use crate::heap;
use crate::image::StoreArgs;
use crate::limits;
use crate::names;
use crate::running;
use crate::ui::Ui;
use bcow_images::args::{IMAGE, NameParser};
use bcow_sandbox::{Access, Attributes, CapabilitySet, OF_DISK, Sandbox};
use open::{DeviceOptions, Served};
use ready::{PidFile, Signals, Waiting};

/// Serve images and disks as network block devices (NBD)
///
/// Clients are virtual machines, the kernel's nbd driver, qemu-img, nbdcopy and others. The command
/// prints a URI for each export when clients can connect, and serves in the foreground until
/// SIGTERM, SIGINT or SIGHUP. Then it completes the requests in flight, makes all written data
/// durable, and exits.
///
/// Sealed images and disks are read-only. Writable disks (`bcow create`) are served for writing,
/// and no other process can write to them in the meantime.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Sockets passed by systemd (socket activation) replace --socket and --listen. For a service of
Type=notify, the server notifies systemd when it is ready.

TLS needs a certificate and a key (PEM). It encrypts the connection and identifies the server. Only
--tls-ca restricts who can connect: each client then needs a certificate, signed by one of the
certificates in that file. Without --tls-ca, every client that can reach a TCP address can read all
exports and write to writable exports, also with --tls require. With --tls allow, --tls-ca restricts
only clients that use TLS.")]
pub struct Args {
    /// The images and disks: files, oci:DIR[:REF], oci:DIR@sha256:DIGEST, https://..., s3://... or
    /// docker://...
    #[arg(
        value_name = "IMG",
        value_hint = clap::ValueHint::FilePath,
        required_unless_present = "exports"
    )]
    #[arg(value_parser = NameParser(IMAGE))]
    images: Vec<Name>,
    /// Serve an image under NAME instead of its file name (repeatable)
    #[arg(long = "export", value_name = "NAME=IMG")]
    exports: Vec<String>,
    /// Description of an export, which clients see in lists of exports (repeatable: first for each
    /// IMG, then for each --export)
    #[arg(long = "description", value_name = "TEXT")]
    descriptions: Vec<String>,
    /// Make all exports read-only
    #[arg(short, long, conflicts_with = "snapshot")]
    read_only: bool,
    /// Make all exports writable and discard all writes at the end; until then, one unnamed file
    /// per export in $TMPDIR (or /tmp) stores them
    #[arg(long)]
    snapshot: bool,
    /// Size of the cache of decoded blocks of all exports together
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = crate::size::parse)]
    cache_size: u64,
    #[command(flatten)]
    stores: StoreArgs,
    #[command(flatten)]
    sandbox: SandboxArgs,
    #[command(flatten)]
    listen: ListenArgs,
    #[command(flatten)]
    limits: LimitArgs,
    #[command(flatten)]
    tls: TlsArgs,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Where to listen")]
struct ListenArgs {
    /// Unix socket to listen on, for this user only [default: without --listen, a socket in
    /// $XDG_RUNTIME_DIR/bcow; for root without this variable, in /run/bcow]
    #[arg(short, long, value_name = "PATH", value_hint = clap::ValueHint::FilePath)]
    socket: Option<PathBuf>,
    /// TCP address to listen on; port 0 selects a free port (repeatable)
    #[arg(short = 'l', long = "listen", value_name = "ADDR:PORT")]
    addresses: Vec<String>,
    /// Write the process ID to this file
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pid_file: Option<PathBuf>,
    /// Write a newline to this file descriptor when clients can connect
    #[arg(long, value_name = "FD")]
    ready_fd: Option<u32>,
    /// Exit when no client has been connected for this time
    #[arg(long, value_name = "SECONDS")]
    exit_on_idle: Option<u32>,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Limits for clients")]
struct LimitArgs {
    /// Maximum number of connections
    #[arg(
        long,
        value_name = "N",
        default_value = "256",
        value_parser = clap::value_parser!(u16).range(1..)
    )]
    max_clients: u16,
    /// Maximum number of requests in flight per connection
    #[arg(
        long,
        value_name = "N",
        default_value = "16",
        value_parser = clap::value_parser!(u16).range(1..=256)
    )]
    in_flight: u16,
    /// Maximum bytes per second per connection, reads and writes together [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = crate::size::parse)]
    rate: Option<u64>,
    /// Seconds until a client must have selected an export; 0 for no limit
    #[arg(long, value_name = "SECONDS", default_value = "10")]
    handshake_timeout: u32,
    /// Seconds that a client may pause within a request, or while it receives a reply; 0 for no
    /// limit. A client may be idle between requests without a limit
    #[arg(long, value_name = "SECONDS", default_value = "60")]
    request_timeout: u32,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "TLS")]
struct TlsArgs {
    /// Refuse connections without TLS (require), or also serve them (allow)
    #[arg(
        long,
        value_name = "WHEN",
        default_value = "require",
        requires = "tls_cert"
    )]
    tls: TlsChoice,
    /// Certificate chain of the server
    #[arg(long, value_name = "FILE", requires = "tls_key", value_hint = clap::ValueHint::FilePath)]
    tls_cert: Option<PathBuf>,
    /// Private key of the certificate
    #[arg(long, value_name = "FILE", requires = "tls_cert", value_hint = clap::ValueHint::FilePath)]
    tls_key: Option<PathBuf>,
    /// Accept only clients with a certificate that one of the certificates in FILE has signed
    #[arg(long, value_name = "FILE", requires = "tls_cert", value_hint = clap::ValueHint::FilePath)]
    tls_ca: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum TlsChoice {
    /// Clients without TLS are refused
    Require,
    /// Clients may use TLS or not
    Allow,
}

/// Serves until a signal arrives, or until no client has been connected for the time of
/// --exit-on-idle.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    heap::use_one_arena();
    limits::adapt_for_service();
    let signals = Signals::block()?;
    let named = named_images(args)?;
    if !args.read_only && !args.snapshot {
        refuse_second_writer(&named)?;
    }
    let mut options = server_options(args)?;
    // Before the sandbox, which refuses the copy of a descriptor.
    let waiting = Waiting::open(args.listen.ready_fd)?;
    let images = named.iter().map(|(_, image)| image);
    let sandbox = args
        .sandbox
        .begin_with_sockets(images, &args.stores, args.cache_size)?;
    let mut served = Served::default();
    let opening = DeviceOptions {
        stores: &args.stores,
        cache: BlockCache::new(args.cache_size),
        access: open::Access::of_options(args.read_only, args.snapshot),
        command: "serve",
    };
    for (index, (name, path)) in named.iter().enumerate() {
        let description = args.descriptions.get(index).cloned().unwrap_or_default();
        served.add(path, name.clone(), description, &opening)?;
    }
    options.failures = served.failure_report();
    let result = serve(args, ui, signals, waiting, sandbox, options, &served);
    // The disks are closed also after a failure of the server. The close flushes each disk. All
    // flushes of clients have ended by then, and an additional flush is harmless.
    let closed = served.close();
    result.and(closed)
}

/// Listens, announces the exports, and answers the requests of clients.
fn serve(
    args: &Args,
    ui: &Ui,
    signals: Signals,
    waiting: Waiting,
    mut sandbox: Sandbox,
    options: ServerOptions,
    served: &Served,
) -> Result<(), CommandError> {
    let exports = Exports::new(served.exports.clone()).map_err(|error| failure(&error))?;
    let listeners = place::listeners(args.listen.socket.as_ref(), &args.listen.addresses)?;
    let tls = options.tls.as_ref().map(|_| args.tls.tls);
    let scheme = if tls.is_some() { "nbds" } else { "nbd" };
    let server = Server::new(exports, options).map_err(|error| failure(&error))?;
    let stopper = server.stopper();
    warn_of_plain_addresses(&listeners, tls, ui);
    let pid_file = args.listen.pid_file.as_deref();
    let _pid_file = pid_file.map(PidFile::write).transpose()?;
    // Before the first thread.
    confine(&mut sandbox, &listeners, pid_file, served, &args.stores)?;
    signals.on_first(move || {
        let _ = activation::notify("STOPPING=1");
        stopper.stop();
    })?;
    let mut out = ui.output();
    // If there is only one export, the empty name also selects it. So the URI omits the name.
    let is_single = served.exports.len() == 1;
    let uri = |listener: &Listener, name: &str| {
        place::uri(listener.place(), if is_single { "" } else { name }, scheme)
    };
    // The services are published before a URI is printed. So a program that has read a URI finds
    // the server in `bcow ps`.
    let mut services = served.services("serve", |name| {
        let uris = listeners.iter().filter_map(|listener| uri(listener, name));
        uris.collect()
    });
    sandbox
        .finish(attributes(served, &args.stores))
        .context(sandbox::cannot)?;
    for service in &mut services {
        service.sandbox = sandbox.in_force();
    }
    let _published = running::publish(services);
    for listener in &listeners {
        for export in &served.exports {
            if let Some(uri) = uri(listener, &export.name) {
                writeln!(out, "{uri}")?;
            }
        }
    }
    out.finish()?;
    waiting.announce()?;
    server.serve(&listeners).map_err(|error| failure(&error))
}

/// Leaves to the process the directories of the disks that it serves for writing, for snapshots,
/// and the removal of its own names at the end.
fn confine(
    sandbox: &mut Sandbox,
    listeners: &[Listener],
    pid_file: Option<&Path>,
    served: &Served,
    stores: &StoreArgs,
) -> Result<(), CommandError> {
    sandbox::seal(stores)?;
    let sockets = listeners
        .iter()
        .filter_map(|listener| match listener.place() {
            ListenAddress::Unix(path) => Some(path.as_path()),
            _ => None,
        });
    let removed = sockets.chain(pid_file).map(directory_of);
    let removed = removed.map(|path| (path, Access::Remove));
    let (mut paths, capabilities) = needs(served, stores);
    paths.extend(removed);
    sandbox
        .confine(&paths, capabilities | CapabilitySet::DAC_OVERRIDE)
        .context(sandbox::cannot)
}

/// The files and capabilities that a process needs while it serves: for a snapshot of a disk, the
/// directory of the disk, and for files on other machines, the cache.
pub(super) fn needs(
    served: &Served,
    stores: &StoreArgs,
) -> (Vec<(PathBuf, Access)>, CapabilitySet) {
    let mut files = stores.remote.rights().files;
    let mut capabilities = CapabilitySet::empty();
    if !files.is_empty() {
        // The cache may be that of another user.
        capabilities = CapabilitySet::DAC_OVERRIDE;
    }
    files.push((PathBuf::from("/proc/self"), Access::Read));
    let written = served.directories();
    if !written.is_empty() {
        capabilities |= OF_DISK;
    }
    files.extend(written.into_iter().map(|path| (path, Access::Write)));
    (files, capabilities)
}

/// The attributes of files that a process changes while it serves: a snapshot of a disk gets the
/// owner and the mode of the disk.
pub(super) fn attributes(served: &Served, stores: &StoreArgs) -> Attributes {
    if served.directories().is_empty() {
        stores.remote.rights().attributes
    } else {
        Attributes::OfOpenFiles
    }
}

/// Warns of each TCP address that other machines can reach, if the server accepts clients without
/// TLS.
fn warn_of_plain_addresses(listeners: &[Listener], tls: Option<TlsChoice>, ui: &Ui) {
    let reason = match tls {
        None => "TLS is off (--tls-cert)",
        Some(TlsChoice::Allow) => "TLS is not required (--tls require)",
        Some(TlsChoice::Require) => return,
    };
    for listener in listeners {
        if let ListenAddress::Tcp(address) = listener.place()
            && !address.ip().is_loopback()
        {
            ui.warning(format_args!(
                "every client that reaches {address} is served, without encryption: {reason}"
            ));
        }
    }
}

/// The exports as (name, image): first each IMG, then each --export. Descriptions are matched in
/// this order.
fn named_images(args: &Args) -> Result<Vec<(String, Name)>, CommandError> {
    let mut named = Vec::new();
    for image in &args.images {
        named.push((default_name(image), image.clone()));
    }
    for export in &args.exports {
        match export.split_once('=') {
            Some((name, image)) if !image.is_empty() => {
                named.push((name.to_owned(), IMAGE.parse(image.as_ref())?));
            }
            _ => {
                let message = format!("--export {export:?} is not of the form NAME=IMG");
                return Err(CommandError::usage(message));
            }
        }
    }
    if args.descriptions.len() > named.len() {
        return Err(CommandError::usage(
            "there are more descriptions than exports",
        ));
    }
    Ok(named)
}

/// Refuses a writable disk that is named twice: the second opening would be refused because of the
/// first.
fn refuse_second_writer(named: &[(String, Name)]) -> Result<(), CommandError> {
    let mut seen = HashMap::new();
    for (_, image) in named {
        let Some(path) = image.path().filter(|_| is_writable_disk(image)) else {
            continue;
        };
        // A file that cannot be examined fails when it is opened.
        let Ok(file) = path.metadata() else {
            continue;
        };
        if let Some(first) = seen.insert((file.dev(), file.ino()), image) {
            return Err(CommandError::usage(format!(
                "{first} and {image} are one disk, which only one export can change"
            ))
            .hint("name the disk once, or serve it with --read-only"));
        }
    }
    Ok(())
}

/// The export name of an image: the last component of a path or URL; for other images, the whole
/// name. The query of a URL is omitted, because it can contain a signature that gives access, and
/// every client can list the names.
fn default_name(image: &Name) -> String {
    let path = match image.parts() {
        NameParts::File(path) | NameParts::Bcow(path) => path,
        _ if image.is_remote() => {
            let url = image.text().to_string_lossy();
            let address = url.split('?').next().unwrap_or_default();
            return address.rsplit('/').next().unwrap_or_default().to_owned();
        }
        _ => return image.to_string(),
    };
    let name = path.file_name().unwrap_or(path.as_os_str());
    name.to_string_lossy().into_owned()
}

fn server_options(args: &Args) -> Result<ServerOptions, CommandError> {
    let seconds = |seconds: u32| match seconds {
        0 => None,
        seconds => Some(Duration::from_secs(seconds.into())),
    };
    let idle = args.listen.exit_on_idle;
    Ok(ServerOptions {
        max_clients: args.limits.max_clients.into(),
        in_flight: args.limits.in_flight.into(),
        rate: args.limits.rate,
        handshake_timeout: seconds(args.limits.handshake_timeout),
        request_timeout: seconds(args.limits.request_timeout),
        exit_on_idle: idle.map(|seconds| Duration::from_secs(seconds.into())),
        tls: tls(&args.tls)?,
        ..ServerOptions::default()
    })
}

fn tls(args: &TlsArgs) -> Result<Option<Tls>, CommandError> {
    let (Some(certificate), Some(key)) = (&args.tls_cert, &args.tls_key) else {
        return Ok(None);
    };
    let when = match args.tls {
        TlsChoice::Require => TlsWhen::Required,
        TlsChoice::Allow => TlsWhen::Allowed,
    };
    let tls = Tls::load(certificate, key, args.tls_ca.as_deref(), when);
    tls.map(Some).map_err(|error| failure(&error))
}

/// Converts an error of bcow-nbd. Escapes control characters in its text.
pub fn failure(error: &bcow_nbd::Error) -> CommandError {
    CommandError::new(names::printable(&error.to_string())).caused_by_source_of(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_an_export_is_that_of_its_file() {
        for (image, name) in [
            ("/images/debian.bcow", "debian.bcow"),
            ("bcow:oci:x", "oci:x"),
            ("..", ".."),
            ("oci:store:small", "oci:store:small"),
            ("docker://host/team/debian:12", "debian:12"),
        ] {
            assert_eq!(default_name(&IMAGE.parse(image.as_ref()).unwrap()), name);
        }
    }

    #[test]
    fn the_name_of_an_export_omits_the_query_of_a_url() {
        for url in [
            "https://host/a.bcow",
            "https://host/dir/a.bcow?signature=secret",
            "https://host/a.bcow?path=/b&signature=sec/ret",
            "http://host/a.bcow?",
        ] {
            assert_eq!(
                default_name(&IMAGE.parse(url.as_ref()).unwrap()),
                "a.bcow",
                "{url}"
            );
        }
    }
}
