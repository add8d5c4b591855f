//! Where a mount says what went wrong: standard error in the foreground, the system log in the background.

use std::collections::HashSet;
use std::os::unix::net::UnixDatagram;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use bcow_erofs::reader::Nid;

/// Sockets that take syslog datagrams: the traditional one, and the journal's own.
const SYSLOG_SOCKETS: [&str; 2] = ["/dev/log", "/run/systemd/journal/dev-log"];

/// Facility "daemon" (RFC 5424, section 6.2.1), shifted into place.
const FACILITY: u8 = 3 << 3;

/// How bad it is; the numbers are syslog's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Severity {
    /// Something failed.
    Error = 3,
    /// Something is not as it should be.
    Warning = 4,
}

static SYSLOG: OnceLock<UnixDatagram> = OnceLock::new();

/// From now on this process logs to the system log. Without one, it stays with standard error.
pub fn use_syslog() {
    let Ok(socket) = UnixDatagram::unbound() else {
        return;
    };
    // A daemon that cannot log shall rather not log than stand still.
    let usable = socket.set_nonblocking(true).is_ok()
        && SYSLOG_SOCKETS
            .iter()
            .any(|path| socket.connect(path).is_ok());
    if usable {
        let _ = SYSLOG.set(socket);
    }
}

/// Writes one line.
pub fn log(severity: Severity, message: &str) {
    match SYSLOG.get() {
        Some(socket) => {
            let _ = socket.send(datagram(severity, message).as_bytes());
        }
        None => match severity {
            Severity::Error => tracing::error!("{message}"),
            Severity::Warning => tracing::warn!("{message}"),
        },
    }
}

/// The form that `syslog(3)` sends, without the time, which the receiver adds.
fn datagram(severity: Severity, message: &str) -> String {
    format!(
        "<{}>bcow[{}]: {}",
        FACILITY | severity as u8,
        std::process::id(),
        message.replace('\n', " ")
    )
}

/// Most places whose damage is remembered.
const PLACES: usize = 1024;
/// When so many places were reported, this is the shortest time between two further lines.
const INTERVAL: Duration = Duration::from_secs(10);

/// Reports damage once per place, so that a program which retries does not fill the log.
#[derive(Debug, Default)]
pub struct DamageLog {
    state: Mutex<Reported>,
}

#[derive(Debug, Default)]
struct Reported {
    places: HashSet<(Nid, &'static str)>,
    last: Option<Instant>,
}

impl DamageLog {
    /// Logs that `action` failed on an inode, unless it did so before.
    pub fn report(&self, nid: Nid, action: &'static str, error: &dyn std::error::Error) {
        if self.is_news(nid, action) {
            log(
                Severity::Error,
                &format!("inode {}: cannot {action}: {}", nid.0, with_causes(error)),
            );
        }
    }

    fn is_news(&self, nid: Nid, action: &'static str) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.places.contains(&(nid, action)) {
            return false;
        }
        if state.places.len() < PLACES {
            state.places.insert((nid, action));
            return true;
        }
        let due = state.last.is_none_or(|last| last.elapsed() >= INTERVAL);
        if due {
            state.last = Some(Instant::now());
        }
        due
    }
}

fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        // Transparent errors repeat their cause's text.
        if !text.ends_with(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datagram_is_one_line_with_priority_and_tag() {
        let text = datagram(Severity::Error, "a\nb");
        assert_eq!(text, format!("<27>bcow[{}]: a b", std::process::id()));
    }

    #[test]
    fn same_damage_is_news_once() {
        let log = DamageLog::default();
        assert!(log.is_news(Nid(1), "read"));
        assert!(!log.is_news(Nid(1), "read"));
        assert!(log.is_news(Nid(1), "list"));
        assert!(log.is_news(Nid(2), "read"));
    }

    #[test]
    fn endless_new_damage_is_limited() {
        let log = DamageLog::default();
        let lines = (0..10 * PLACES as u64)
            .filter(|&nid| log.is_news(Nid(nid), "read"))
            .count();
        assert_eq!(lines, PLACES + 1);
    }
}
