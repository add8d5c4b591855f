//! Listening sockets: Unix sockets and TCP.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, fchmod};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrAny, SocketAddrUnix, SocketFlags, SocketType, bind, listen,
    socket_with,
};

use crate::error::ListenError;

/// Limit of connections that wait to be accepted. The host may have a lower limit.
const BACKLOG: i32 = 1024;

/// A listening socket. Dropping a Unix socket removes its name.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    /// Device and inode of the Unix socket that this process bound.
    bound: Option<(u64, u64)>,
    place: ListenAddress,
}

/// The address of a listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListenAddress {
    /// A Unix socket with this name.
    Unix(PathBuf),
    /// A TCP address.
    Tcp(SocketAddr),
    /// A socket without an address that clients could use.
    Unnamed,
}

impl Listener {
    /// Listens on a Unix socket to which only this user can connect. Replaces the socket of a
    /// server that no longer runs.
    pub fn unix(path: &Path) -> Result<Self, ListenError> {
        let failed = |source| ListenError::host(path.display(), source);
        let fd = match bind_unix(path) {
            Err(Errno::ADDRINUSE) => {
                remove_if_dead(path)?;
                bind_unix(path)
            }
            bound => bound,
        }
        .map_err(|errno| failed(errno.into()))?;
        let metadata = fs::symlink_metadata(path).map_err(failed)?;
        Ok(Listener {
            fd,
            bound: Some((metadata.dev(), metadata.ino())),
            place: ListenAddress::Unix(path.to_owned()),
        })
    }

    /// Listens on a TCP address. With port 0, the host selects a port.
    pub fn tcp(address: SocketAddr) -> Result<Self, ListenError> {
        let failed = |source| ListenError::host(address, source);
        let listener = TcpListener::bind(address).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Listener {
            fd: listener.into(),
            bound: None,
            place: ListenAddress::Tcp(address),
        })
    }

    /// Uses a socket that another process created and will remove.
    pub fn passed(fd: OwnedFd, address: SocketAddrAny) -> Self {
        let unix = |address: SocketAddrUnix| {
            let path = address.path_bytes()?;
            Some(PathBuf::from(OsStr::from_bytes(path)))
        };
        let place = match SocketAddr::try_from(address.clone()) {
            Ok(address) => ListenAddress::Tcp(address),
            Err(_) => SocketAddrUnix::try_from(address)
                .ok()
                .and_then(unix)
                .map_or(ListenAddress::Unnamed, ListenAddress::Unix),
        };
        Listener {
            fd,
            bound: None,
            place,
        }
    }

    /// The address of the listener.
    pub fn place(&self) -> &ListenAddress {
        &self.place
    }

    /// Sets options on an accepted connection.
    pub fn prepare(&self, socket: &OwnedFd) {
        if let ListenAddress::Tcp(_) = self.place {
            // Errors are ignored: without these options, the connection is slower, or its loss is
            // detected later.
            let _ = rustix::net::sockopt::set_tcp_nodelay(socket, true);
            let _ = rustix::net::sockopt::set_socket_keepalive(socket, true);
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let (Some(bound), ListenAddress::Unix(path)) = (self.bound, &self.place) {
            // Another server may have replaced the socket since.
            let ours = fs::symlink_metadata(path)
                .is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == bound);
            if ours {
                let _ = fs::remove_file(path);
            }
        }
    }
}

fn bind_unix(path: &Path) -> Result<OwnedFd, Errno> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // `bind` gives the name the mode of the socket, so other users can never connect.
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    bind(&socket, &address)?;
    listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Removes a socket on which no server listens.
fn remove_if_dead(path: &Path) -> Result<(), ListenError> {
    let shown = || path.display().to_string();
    let failed = |source| ListenError::host(path.display(), source);
    let metadata = fs::symlink_metadata(path).map_err(failed)?;
    if !metadata.file_type().is_socket() {
        return Err(ListenError::NoSocket(shown()));
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(failed)
        }
        // A server answers, or this cannot be determined.
        _ => Err(ListenError::InUse(shown())),
    }
}
