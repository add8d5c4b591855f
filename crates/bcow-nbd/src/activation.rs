//! Sockets that a service manager passes (sd_listen_fds(3)), and status messages to it
//! (sd_notify(3)).

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use bcow_listen::Listener;
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::net::sockopt::{socket_acceptconn, socket_type};
use rustix::net::{SocketType, getsockname};

use crate::error::Error;

/// Number of the first passed descriptor.
const FIRST: RawFd = 3;
/// Limit of the passed sockets. A larger number is a mistake.
const MAX_SOCKETS: RawFd = 1024;

/// The listening sockets that the service manager passed to this process; empty if there are none.
/// The process can take them once.
pub fn passed_listeners() -> Result<Vec<Listener>, Error> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    let pid = std::env::var("LISTEN_PID").ok();
    let count = std::env::var("LISTEN_FDS").ok();
    let Some(count) = count_for(std::process::id(), pid.as_deref(), count.as_deref())? else {
        return Ok(Vec::new());
    };
    if TAKEN.swap(true, Ordering::SeqCst) {
        return Err(Error::Activation("they are already in use".into()));
    }
    let numbers = FIRST..FIRST + count;
    numbers
        .map(|number| listener(take(number)?, number))
        .collect()
}

/// Number of sockets that the variables announce for process `me`.
fn count_for(me: u32, pid: Option<&str>, count: Option<&str>) -> Result<Option<RawFd>, Error> {
    let (Some(pid), Some(count)) = (pid, count) else {
        return Ok(None);
    };
    // The variables may be for the parent process.
    if pid.parse() != Ok(me) {
        return Ok(None);
    }
    match count.parse() {
        Ok(0) => Ok(None),
        Ok(count @ 1..=MAX_SOCKETS) => Ok(Some(count)),
        _ => Err(Error::Activation(format!("LISTEN_FDS is {count:?}"))),
    }
}

fn take(number: RawFd) -> Result<OwnedFd, Error> {
    // Check that the descriptor is open: `OwnedFd` requires it.
    if !std::path::Path::new(&format!("/proc/self/fd/{number}")).exists() {
        return Err(Error::Activation(format!(
            "descriptor {number} is not open"
        )));
    }
    // SAFETY: The descriptor is open (checked above). LISTEN_PID is this process, so the service
    // manager passed ownership to it. No other code opens descriptors by number, and
    // `passed_listeners` runs this once.
    #[allow(unsafe_code)]
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    // Child processes must not inherit it.
    let _ = fcntl_setfd(&fd, FdFlags::CLOEXEC);
    Ok(fd)
}

fn listener(fd: OwnedFd, number: RawFd) -> Result<Listener, Error> {
    let listens = socket_acceptconn(&fd).unwrap_or(false);
    if !listens || socket_type(&fd) != Ok(SocketType::STREAM) {
        let problem = format!(
            "descriptor {number} is not a listening stream socket; the unit needs Accept=no"
        );
        return Err(Error::Activation(problem));
    }
    let address =
        getsockname(&fd).map_err(|errno| Error::host("inspect a passed socket", errno))?;
    Ok(Listener::passed(fd, address))
}

/// Connected to the service manager.
static MANAGER: OnceLock<UnixDatagram> = OnceLock::new();

/// Connects to the service manager if NOTIFY_SOCKET names its socket: a process in a sandbox cannot
/// do that any more.
pub fn connect() -> io::Result<()> {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else {
        return Ok(());
    };
    let address = match name.as_bytes() {
        [b'@', rest @ ..] => SocketAddr::from_abstract_name(rest)?,
        path => SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(path))?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.connect_addr(&address)?;
    let _ = MANAGER.set(socket);
    Ok(())
}

/// Sends `state`, such as "READY=1", to the service manager if the process has [`connect`]ed to it.
pub fn notify(state: &str) -> io::Result<()> {
    MANAGER
        .get()
        .map_or(Ok(()), |manager| manager.send(state.as_bytes()).map(drop))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sockets_for_this_process_are_taken() {
        assert!(matches!(count_for(7, None, Some("1")), Ok(None)));
        assert!(matches!(count_for(7, Some("8"), Some("1")), Ok(None)));
        assert!(matches!(count_for(7, Some("7"), Some("0")), Ok(None)));
        assert!(matches!(count_for(7, Some("7"), Some("2")), Ok(Some(2))));
        for nonsense in ["-1", "", "1000000", "two"] {
            assert!(
                count_for(7, Some("7"), Some(nonsense)).is_err(),
                "{nonsense}"
            );
        }
    }
}
