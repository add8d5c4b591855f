//! A page for Prometheus: `GET /metrics`, and nothing else of HTTP.
//!
//! The duration of a connection, the length of a request and the number of clients are limited. No
//! other work of the process waits for a client.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::ToSocketAddrs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{SocketFlags, accept_with};

use crate::error::ListenError;
use crate::listener::{ListenAddress, Listener};

/// Limit of the duration of a connection.
const CONNECTION_TIMEOUT: Duration = Duration::from_millis(if cfg!(test) { 500 } else { 5000 });
/// Limit of a request in bytes.
const REQUEST_BYTES: usize = 8 << 10;
/// Limit of the connections at a time. Further connections are closed.
const AT_ONCE: usize = 8;
/// Pause after a failed accept, which mostly means too few descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// A listening socket for metrics. Dropping it closes the socket.
#[derive(Debug)]
pub struct Metrics {
    listener: Listener,
    /// Whether the address leaves the port to the host.
    has_chosen_port: bool,
}

impl Metrics {
    /// Listens at `unix:PATH` or `HOST:PORT`.
    pub fn listen(address: &str) -> Result<Self, ListenError> {
        let unusable = |error: io::Error| ListenError::Address(error.to_string());
        let listener = match address.strip_prefix("unix:") {
            // The process can change its directory.
            Some(path) => Listener::unix(&std::path::absolute(path).map_err(unusable)?)?,
            None => {
                let found = address.to_socket_addrs().map_err(unusable)?.next();
                let none = || ListenError::Address("the name has no address".to_owned());
                Listener::tcp(found.ok_or_else(none)?)?
            }
        };
        Ok(Metrics {
            listener,
            has_chosen_port: address.ends_with(":0"),
        })
    }

    pub fn place(&self) -> &ListenAddress {
        self.listener.place()
    }

    /// The URL of the page, if the host has chosen the port: only this process knows it.
    pub fn chosen_url(&self) -> Option<String> {
        match self.place() {
            ListenAddress::Tcp(address) if self.has_chosen_port => {
                Some(format!("http://{address}/metrics"))
            }
            _ => None,
        }
    }

    /// Answers requests from now on. `text` returns the metrics of the moment.
    pub fn answer(&self, text: impl Fn() -> String + Send + Sync + 'static) -> io::Result<()> {
        answer_at(self.listener.as_fd().try_clone_to_owned()?, text)
    }
}

impl AsFd for Metrics {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

/// As [`Metrics::answer`], at a socket that another process has made.
pub fn answer_at(
    socket: OwnedFd,
    text: impl Fn() -> String + Send + Sync + 'static,
) -> io::Result<()> {
    std::thread::Builder::new()
        .name("metrics".into())
        .spawn(move || accept_all(&socket, &Arc::new(text)))
        .map(drop)
}

fn accept_all<F>(socket: &OwnedFd, text: &Arc<F>)
where
    F: Fn() -> String + Send + Sync + 'static,
{
    let busy = Arc::new(AtomicUsize::new(0));
    loop {
        let Ok(connection) = accept_with(socket, SocketFlags::CLOEXEC) else {
            std::thread::sleep(PAUSE);
            continue;
        };
        let place = Seat::take(&busy);
        let Some(place) = place else { continue };
        let text = Arc::clone(text);
        // If no thread can be started, the connection closes.
        let _ = std::thread::Builder::new()
            .name("metrics".into())
            .stack_size(256 << 10)
            .spawn(move || {
                let _place = place;
                // A failed connection needs no report.
                let _ = serve(connection, &*text);
            });
    }
}

/// One of the [`AT_ONCE`] places for connections.
struct Seat(Arc<AtomicUsize>);

impl Seat {
    fn take(busy: &Arc<AtomicUsize>) -> Option<Self> {
        let seat = Seat(Arc::clone(busy));
        (busy.fetch_add(1, Ordering::Relaxed) < AT_ONCE).then_some(seat)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn serve(connection: OwnedFd, text: &dyn Fn() -> String) -> io::Result<()> {
    let deadline = Instant::now() + CONNECTION_TIMEOUT;
    let mut stream = File::from(connection);
    let mut request = Vec::new();
    let mut piece = [0; 1024];
    let (status, has_body) = loop {
        if let Some(status) = status(&request) {
            break status;
        }
        set_timeout(&stream, Timeout::Recv, deadline)?;
        match stream.read(&mut piece)? {
            0 => return Ok(()),
            n => request.extend_from_slice(&piece[..n]),
        }
    };
    let body = if status == OK { text() } else { format!("{status}\n") };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len(),
    );
    let mut reply = head.into_bytes();
    if has_body {
        reply.extend_from_slice(body.as_bytes());
    }
    let mut rest = &reply[..];
    while !rest.is_empty() {
        set_timeout(&stream, Timeout::Send, deadline)?;
        match stream.write(rest)? {
            0 => return Ok(()),
            n => rest = &rest[n..],
        }
    }
    Ok(())
}

fn set_timeout(stream: &File, direction: Timeout, deadline: Instant) -> io::Result<()> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(set_socket_timeout(stream, direction, Some(left))?)
}

const OK: &str = "200 OK";
const BAD_REQUEST: &str = "400 Bad Request";
const NOT_FOUND: &str = "404 Not Found";
const WRONG_METHOD: &str = "405 Method Not Allowed";
const TOO_LONG: &str = "431 Request Header Fields Too Large";

/// The status of the reply to a request, and whether the reply has a body; `None` if the request is
/// not complete.
fn status(request: &[u8]) -> Option<(&'static str, bool)> {
    let ended = request.windows(4).any(|four| four == b"\r\n\r\n")
        || request.windows(2).any(|two| two == b"\n\n");
    if !ended {
        return (request.len() > REQUEST_BYTES).then_some((TOO_LONG, true));
    }
    let line = request.split(|&byte| byte == b'\n').next().unwrap_or(b"");
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let words: Vec<&[u8]> = line.split(|&byte| byte == b' ').collect();
    Some(match words[..] {
        [method, target, version] if version.starts_with(b"HTTP/1.") => {
            let path = target.split(|&byte| byte == b'?').next().unwrap_or(b"");
            match (method, path) {
                (b"GET", b"/metrics") => (OK, true),
                (b"HEAD", b"/metrics") => (OK, false),
                (b"GET" | b"HEAD", _) => (NOT_FOUND, true),
                _ => (WRONG_METHOD, true),
            }
        }
        _ => (BAD_REQUEST, true),
    })
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use super::*;

    #[test]
    fn only_one_page_exists() {
        for (request, expected) in [
            ("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", Some((OK, true))),
            ("GET /metrics?a=b HTTP/1.0\n\n", Some((OK, true))),
            ("HEAD /metrics HTTP/1.1\r\n\r\n", Some((OK, false))),
            ("GET / HTTP/1.1\r\n\r\n", Some((NOT_FOUND, true))),
            ("GET /metricsx HTTP/1.1\r\n\r\n", Some((NOT_FOUND, true))),
            ("POST /metrics HTTP/1.1\r\n\r\n", Some((WRONG_METHOD, true))),
            ("GET /metrics\r\n\r\n", Some((BAD_REQUEST, true))),
            ("\r\n\r\n", Some((BAD_REQUEST, true))),
            ("GET /metrics HTTP/1.1\r\nHost: x\r\n", None),
            ("", None),
        ] {
            assert_eq!(status(request.as_bytes()), expected, "{request:?}");
        }
        assert_eq!(status(&[b'a'; REQUEST_BYTES + 1]), Some((TOO_LONG, true)));
    }

    fn server() -> (Metrics, std::net::SocketAddr) {
        let metrics = Metrics::listen("127.0.0.1:0").unwrap();
        metrics.answer(|| "x 1\n".to_owned()).unwrap();
        let ListenAddress::Tcp(address) = *metrics.place() else {
            panic!("{:?}", metrics.place());
        };
        (metrics, address)
    }

    #[test]
    fn a_request_in_pieces_is_answered_whole() {
        let (_metrics, address) = server();
        let mut client = TcpStream::connect(address).unwrap();
        for piece in ["GET /met", "rics HTTP/1.1\r", "\nHost: a\r\n", "\r\n"] {
            client.write_all(piece.as_bytes()).unwrap();
            client.flush().unwrap();
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        assert!(answer.contains("\r\nContent-Length: 4\r\n"), "{answer}");
        assert!(answer.ends_with("\r\n\r\nx 1\n"), "{answer}");
    }

    #[test]
    fn silent_and_endless_clients_do_not_block_other_clients() {
        let (_metrics, address) = server();
        let _silent: Vec<_> = (0..AT_ONCE)
            .map(|_| TcpStream::connect(address).unwrap())
            .collect();
        let start = Instant::now();
        // Silent clients occupy all places until their time has passed.
        let wait_for_answer = || loop {
            let mut client = TcpStream::connect(address).unwrap();
            let mut answer = String::new();
            let _ = client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n");
            let read = client.read_to_string(&mut answer);
            if read.is_ok() && answer.contains("200 OK") {
                break;
            }
            assert!(start.elapsed() < 100 * CONNECTION_TIMEOUT, "{answer}");
            std::thread::sleep(Duration::from_millis(50));
        };
        wait_for_answer();
        let endless = [b'a'; 4 * REQUEST_BYTES];
        let mut client = TcpStream::connect(address).unwrap();
        // The server may close the connection during the write.
        let _ = client.write_all(&endless);
        wait_for_answer();
    }

    #[test]
    fn socket_file_is_removed_on_drop() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("metrics");
        let address = format!("unix:{}", path.display());
        let metrics = Metrics::listen(&address).unwrap();
        assert!(path.exists());
        assert!(Metrics::listen(&address).is_err());
        drop(metrics);
        assert!(!path.exists());
    }
}
