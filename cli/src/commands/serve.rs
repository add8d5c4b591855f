//! `bcow serve`

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bcow::{BlockCache, OpenOptions};
use bcow_nbd::{Device, Export, Exports, Listener, Server, ServerOptions};

use crate::error::{CommandError, Context};
use crate::image::{OpenImage, StoreArgs};
use crate::names;
use crate::ui::Ui;

/// Serve images as network block devices (NBD)
///
/// Prints a URI for each image when clients can connect, and serves until SIGTERM or SIGINT comes; then requests
/// that are being carried out are finished. Clients are virtual machines, the kernel's nbd driver, qemu-img, nbdcopy and
/// the like.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The images: files, oci:DIR[:REF] or oci:DIR@sha256:DIGEST
    #[arg(value_name = "IMG", value_hint = clap::ValueHint::FilePath, required_unless_present = "exports")]
    images: Vec<PathBuf>,
    /// Serve an image under another name than that of its file (repeatable)
    #[arg(long = "export", value_name = "NAME=IMG")]
    exports: Vec<String>,
    /// What lists of exports say of an image (repeatable: for one image after the other)
    #[arg(long = "description", value_name = "TEXT")]
    descriptions: Vec<String>,
    /// Listen on this Unix socket, for this user only [default: one in $XDG_RUNTIME_DIR/bcow]
    #[arg(short, long, value_name = "PATH", value_hint = clap::ValueHint::FilePath)]
    socket: Option<PathBuf>,
    /// Listen on this TCP address; port 0 takes a free one (repeatable)
    #[arg(short, long = "listen", value_name = "ADDR:PORT")]
    addresses: Vec<String>,
    /// Memory for decoded blocks
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = crate::size::parse)]
    cache_size: u64,
    /// Most clients at a time
    #[arg(long, value_name = "N", default_value = "256", value_parser = clap::value_parser!(u16).range(1..))]
    max_clients: u16,
    /// Most requests of one connection that are carried out at a time
    #[arg(long, value_name = "N", default_value = "16", value_parser = clap::value_parser!(u16).range(1..=256))]
    in_flight: u16,
    /// Bytes per second that each connection may read and write together
    #[arg(long, value_name = "SIZE", value_parser = crate::size::parse)]
    rate: Option<u64>,
    /// End when there was no client for so long
    #[arg(long, value_name = "SECONDS")]
    exit_on_idle: Option<u32>,
    /// Disconnect a client that has not chosen an export by then; 0 for never
    #[arg(long, value_name = "SECONDS", default_value = "10")]
    handshake_timeout: u32,
    /// Disconnect a client that stops in the middle of a request, or does not take its replies, for so long; 0 for
    /// never. Clients may be silent between requests
    #[arg(long, value_name = "SECONDS", default_value = "60")]
    request_timeout: u32,
    #[command(flatten)]
    stores: StoreArgs,
}

/// Serves until a signal comes.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let signals = Signals::block()?;
    let named = named_images(args)?;
    let exports = open(&named, args)?;
    let listeners = listeners(args)?;
    let server = Server::new(exports, options(args)).map_err(|error| failure(&error))?;
    signals.stop_at_first(&server)?;
    let mut out = ui.output();
    for listener in &listeners {
        for (name, _) in &named {
            let name = if named.len() == 1 { "" } else { name };
            if let Some(uri) = uri(listener, name) {
                writeln!(out, "{uri}")?;
            }
        }
    }
    out.finish()?;
    server.serve(&listeners).map_err(|error| failure(&error))
}

/// Names of exports and of their images, as the user wants them.
fn named_images(args: &Args) -> Result<Vec<(String, PathBuf)>, CommandError> {
    let mut named = Vec::new();
    for image in &args.images {
        named.push((default_name(image), image.clone()));
    }
    for export in &args.exports {
        match export.split_once('=') {
            Some((name, image)) if !image.is_empty() => {
                named.push((name.to_owned(), PathBuf::from(image)));
            }
            _ => {
                let message = format!("--export {export:?} is not of the form NAME=IMG");
                return Err(CommandError::usage(message));
            }
        }
    }
    if args.descriptions.len() > named.len() {
        return Err(CommandError::usage(
            "there are more descriptions than images",
        ));
    }
    Ok(named)
}

/// The file's name; what is no file has its whole name.
fn default_name(image: &Path) -> String {
    let text = image.to_string_lossy();
    match (text.starts_with("oci:"), image.file_name()) {
        (false, Some(name)) => name.to_string_lossy().into_owned(),
        _ => text.into_owned(),
    }
}

fn open(named: &[(String, PathBuf)], args: &Args) -> Result<Exports, CommandError> {
    let options = OpenOptions {
        cache: BlockCache::new(args.cache_size),
        ..OpenOptions::default()
    };
    let mut exports = Vec::new();
    for (index, (name, path)) in named.iter().enumerate() {
        let image = OpenImage::open_with(path, &args.stores, &options)?;
        exports.push(Export {
            name: name.clone(),
            description: args.descriptions.get(index).cloned().unwrap_or_default(),
            device: Device::ReadOnly(image.image().clone()),
        });
    }
    Exports::new(exports).map_err(|error| failure(&error))
}

fn options(args: &Args) -> ServerOptions {
    let seconds = |seconds: u32| match seconds {
        0 => None,
        seconds => Some(Duration::from_secs(seconds.into())),
    };
    ServerOptions {
        max_clients: args.max_clients.into(),
        in_flight: args.in_flight.into(),
        rate: args.rate,
        handshake_timeout: seconds(args.handshake_timeout),
        request_timeout: seconds(args.request_timeout),
        exit_on_idle: args
            .exit_on_idle
            .map(|seconds| Duration::from_secs(seconds.into())),
        ..ServerOptions::default()
    }
}

fn listeners(args: &Args) -> Result<Vec<Listener>, CommandError> {
    let mut listeners = Vec::new();
    if let Some(path) = &args.socket {
        listeners.push(Listener::unix(path).map_err(|error| failure(&error))?);
    }
    for address in &args.addresses {
        for address in resolve(address)? {
            listeners.push(Listener::tcp(address).map_err(|error| failure(&error))?);
        }
    }
    if listeners.is_empty() {
        let path = default_socket()?;
        listeners.push(Listener::unix(&path).map_err(|error| failure(&error))?);
    }
    Ok(listeners)
}

fn resolve(address: &str) -> Result<Vec<SocketAddr>, CommandError> {
    let cannot = || format!("cannot listen on {address}");
    let found: Vec<SocketAddr> = address.to_socket_addrs().context(cannot)?.collect();
    match found.is_empty() {
        true => Err(CommandError::new(cannot()).caused_by_text("the name has no address")),
        false => Ok(found),
    }
}

/// A socket of this process in the user's runtime directory.
fn default_socket() -> Result<PathBuf, CommandError> {
    let runtime = match std::env::var_os("XDG_RUNTIME_DIR").filter(|path| !path.is_empty()) {
        Some(path) => PathBuf::from(path),
        None if rustix::process::geteuid().is_root() => PathBuf::from("/run"),
        None => {
            return Err(CommandError::usage(
                "there is no place for a socket: XDG_RUNTIME_DIR is not set",
            )
            .hint("name one with --socket PATH"));
        }
    };
    let directory = runtime.join("bcow");
    std::fs::create_dir_all(&directory)
        .context(|| format!("cannot make {}", directory.display()))?;
    Ok(directory.join(format!("serve-{}.sock", std::process::id())))
}

/// By which clients find an export.
fn uri(listener: &Listener, export: &str) -> Option<String> {
    let export = percent_encoded(export.as_bytes());
    if let Some(path) = listener.unix_path() {
        let path = std::path::absolute(path).ok()?;
        let path = percent_encoded(path.as_os_str().as_encoded_bytes());
        Some(format!("nbd+unix:///{export}?socket={path}"))
    } else {
        let address = listener.tcp_address()?;
        Some(format!("nbd://{address}/{export}"))
    }
}

/// For use in a URI (RFC 3986); slashes stay, as paths are easier to read with them.
fn percent_encoded(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for &byte in bytes {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                text.push(byte.into());
            }
            other => text += &format!("%{other:02X}"),
        }
    }
    text
}

/// The signals that end the server, blocked so that a thread can wait for them.
struct Signals(nix::sys::signal::SigSet);

impl Signals {
    /// To be called before other threads start.
    fn block() -> Result<Self, CommandError> {
        use nix::sys::signal::{SigSet, Signal};
        let signals: SigSet = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]
            .into_iter()
            .collect();
        signals
            .thread_block()
            .context(|| "cannot block signals".to_owned())?;
        Ok(Signals(signals))
    }

    /// The first signal ends the server in an orderly way, the second at once.
    fn stop_at_first(self, server: &Server) -> Result<(), CommandError> {
        let stopper = server.stopper();
        std::thread::Builder::new()
            .name("signals".into())
            .spawn(move || {
                // sigwait(3) fails for an invalid set only.
                if self.0.wait().is_ok() {
                    stopper.stop();
                }
                if let Ok(signal) = self.0.wait() {
                    std::process::exit(128 + signal as i32);
                }
            })
            .context(|| "cannot start a thread".to_owned())?;
        Ok(())
    }
}

/// The library's error in the command's form.
fn failure(error: &bcow_nbd::Error) -> CommandError {
    let failure = CommandError::new(names::printable(&error.to_string()).into_owned());
    match std::error::Error::source(error) {
        Some(source) => failure.caused_by(source),
        None => failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_hold_any_name() {
        assert_eq!(percent_encoded(b"/run/a b?c"), "/run/a%20b%3Fc");
        assert_eq!(percent_encoded("ä".as_bytes()), "%C3%A4");
    }

    #[test]
    fn exports_are_called_like_their_files() {
        assert_eq!(
            default_name(Path::new("/images/debian.bcow")),
            "debian.bcow"
        );
        assert_eq!(
            default_name(Path::new("oci:store:small")),
            "oci:store:small"
        );
    }
}
