//! Where clients come from: Unix sockets with a name, TCP.

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

use crate::error::Error;

/// Connections that may wait to be accepted; the host may allow fewer.
const BACKLOG: i32 = 1024;

/// A socket that clients can connect to. A Unix socket's name vanishes with it.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    name: Option<Name>,
    place: Place,
}

/// Where a listener can be found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// A Unix socket with this name.
    Unix(PathBuf),
    /// A TCP address.
    Tcp(SocketAddr),
    /// Somewhere that has no name for clients.
    Unnamed,
}

/// The name of a Unix socket, while it is ours.
#[derive(Debug)]
struct Name {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl Listener {
    /// A Unix socket that only this user can connect to. The socket of a server that is gone is replaced.
    pub fn unix(path: &Path) -> Result<Self, Error> {
        let failed =
            |source: io::Error| Error::host(format!("listen on {}", path.display()), source);
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
            name: Some(Name {
                path: path.to_owned(),
                device: metadata.dev(),
                inode: metadata.ino(),
            }),
            place: Place::Unix(path.to_owned()),
        })
    }

    /// TCP; port 0 lets the host choose one.
    pub fn tcp(address: SocketAddr) -> Result<Self, Error> {
        let failed = |source| Error::host(format!("listen on {address}"), source);
        let listener = TcpListener::bind(address).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Listener {
            fd: listener.into(),
            name: None,
            place: Place::Tcp(address),
        })
    }

    /// A socket that somebody else made and will remove.
    pub(crate) fn passed(fd: OwnedFd, address: SocketAddrAny) -> Self {
        let unix = |address: SocketAddrUnix| {
            let path = address.path_bytes()?;
            Some(PathBuf::from(OsStr::from_bytes(path)))
        };
        let place = match SocketAddr::try_from(address.clone()) {
            Ok(address) => Place::Tcp(address),
            Err(_) => SocketAddrUnix::try_from(address)
                .ok()
                .and_then(unix)
                .map_or(Place::Unnamed, Place::Unix),
        };
        Listener {
            fd,
            name: None,
            place,
        }
    }

    /// Where clients find it.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// Sets up an accepted connection.
    pub(crate) fn prepare(&self, socket: &OwnedFd) {
        if let Place::Tcp(_) = self.place {
            // Without these a connection is slower, or its end is noticed later; it works all the same.
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
        if let Some(name) = &self.name {
            // Another server may have put its own socket there by now.
            let ours = fs::symlink_metadata(&name.path).is_ok_and(|metadata| {
                (metadata.dev(), metadata.ino()) == (name.device, name.inode)
            });
            if ours {
                let _ = fs::remove_file(&name.path);
            }
        }
    }
}

fn bind_unix(path: &Path) -> Result<OwnedFd, Errno> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // The name gets the socket's mode: so there is no moment in which others could connect.
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    bind(&socket, &address)?;
    listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Removes the name of a socket that nobody listens on.
fn remove_if_dead(path: &Path) -> Result<(), Error> {
    let shown = || path.display().to_string();
    let failed = |source| Error::host(format!("listen on {}", path.display()), source);
    if !fs::symlink_metadata(path)
        .map_err(failed)?
        .file_type()
        .is_socket()
    {
        return Err(Error::NoSocket(shown()));
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(failed)
        }
        // It answers, or it cannot be told that it does not.
        _ => Err(Error::InUse(shown())),
    }
}
