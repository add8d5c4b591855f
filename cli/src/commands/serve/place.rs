//! Where clients find the server: sockets, and the URIs that name them.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

use bcow_nbd::{ListenAddress, Listener, activation};

use super::failure;
use crate::error::{CommandError, Context};

/// Takes the sockets that a service manager passed; otherwise listens on those of the command line;
/// without any, on [`default_socket`]. Sockets from both are an error.
pub fn listeners(
    socket: Option<&PathBuf>,
    addresses: &[String],
) -> Result<Vec<Listener>, CommandError> {
    let mut listeners = activation::passed_listeners().map_err(|error| failure(&error))?;
    if !listeners.is_empty() && (socket.is_some() || !addresses.is_empty()) {
        return Err(CommandError::usage(
            "sockets are passed by a service manager, and --socket or --listen name others",
        ));
    }
    if let Some(path) = socket {
        listeners.push(Listener::unix(path).map_err(|error| failure(&error.into()))?);
    }
    for address in addresses {
        for address in resolve(address)? {
            listeners.push(Listener::tcp(address).map_err(|error| failure(&error.into()))?);
        }
    }
    if listeners.is_empty() {
        listeners.push(Listener::unix(&default_socket()?).map_err(|error| failure(&error.into()))?);
    }
    Ok(listeners)
}

fn resolve(address: &str) -> Result<Vec<SocketAddr>, CommandError> {
    let cannot = || format!("cannot listen on {address}");
    let found: Vec<SocketAddr> = address.to_socket_addrs().context(cannot)?.collect();
    if found.is_empty() {
        Err(CommandError::new(cannot()).caused_by_text("the name has no address"))
    } else {
        Ok(found)
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

/// The URI of an export, with the scheme `nbd` or `nbds`; `None` if clients cannot address the
/// socket, or if its path cannot be made absolute.
pub fn uri(place: &ListenAddress, export: &str, scheme: &str) -> Option<String> {
    let export = percent_encoded(export.as_bytes());
    match place {
        ListenAddress::Unix(path) => {
            let path = std::path::absolute(path).ok()?;
            let path = percent_encoded(path.as_os_str().as_encoded_bytes());
            Some(format!("{scheme}+unix:///{export}?socket={path}"))
        }
        ListenAddress::Tcp(address) => Some(format!("{scheme}://{address}/{export}")),
        ListenAddress::Unnamed => None,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_hold_any_name() {
        let place = ListenAddress::Unix("/run/a b?c".into());
        assert_eq!(
            uri(&place, "ä", "nbd").as_deref(),
            Some("nbd+unix:///%C3%A4?socket=/run/a%20b%3Fc")
        );
        let place = ListenAddress::Tcp("[::1]:10809".parse().unwrap());
        assert_eq!(
            uri(&place, "", "nbds").as_deref(),
            Some("nbds://[::1]:10809/")
        );
        assert_eq!(uri(&ListenAddress::Unnamed, "", "nbds"), None);
    }
}
