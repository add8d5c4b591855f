//! Where a mount says what went wrong: standard error in the foreground, the system log in the background, and a file if
//! one is named.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::SystemTime;

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

static LOG_FILE: OnceLock<PathBuf> = OnceLock::new();

/// From now on this process also appends its lines to the file at `path`, which is made if it is missing. The first call counts.
pub fn use_file(path: &Path) -> io::Result<()> {
    // It will change its directory.
    let path = std::path::absolute(path)?;
    open_log_file(&path)?;
    let _ = LOG_FILE.set(path);
    Ok(())
}

/// Opened for each line, which are few: a log that was rotated away is begun anew without a signal.
fn open_log_file(path: &Path) -> io::Result<File> {
    File::options().append(true).create(true).open(path)
}

fn to_file(path: &Path, severity: Severity, message: &str) {
    let now = SystemTime::UNIX_EPOCH
        .elapsed()
        .map_or(0, |now| now.as_secs() as i64);
    let line = format!(
        "{} bcow[{}]: {}: {}\n",
        bcow::rfc3339(now).unwrap_or_default(),
        std::process::id(),
        match severity {
            Severity::Error => "error",
            Severity::Warning => "warning",
        },
        message.replace('\n', " ")
    );
    // In one piece, lest lines of several processes mix. A log on a full disk must not stop a mount.
    let _ = open_log_file(path).and_then(|mut file| file.write_all(line.as_bytes()));
}

/// Writes one line.
pub fn log(severity: Severity, message: &str) {
    if let Some(path) = LOG_FILE.get() {
        to_file(path, severity, message);
    }
    match SYSLOG.get() {
        Some(socket) => {
            let _ = socket.send(datagram(severity, message).as_bytes());
        }
        None => match severity {
            Severity::Error => tracing::error!(target: "bcow", "{message}"),
            Severity::Warning => tracing::warn!(target: "bcow", "{message}"),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datagram_is_one_line_with_priority_and_tag() {
        let text = datagram(Severity::Error, "a\nb");
        assert_eq!(text, format!("<27>bcow[{}]: a b", std::process::id()));
    }

    #[test]
    fn lines_are_appended_to_a_file_with_time_process_and_severity() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        to_file(&path, Severity::Error, "a\nb");
        to_file(&path, Severity::Warning, "c");
        let log = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<_> = log
            .lines()
            .map(|line| line.split_once(' ').unwrap().1)
            .collect();
        let tag = format!("bcow[{}]", std::process::id());
        let expected = [format!("{tag}: error: a b"), format!("{tag}: warning: c")];
        assert_eq!(lines, expected);
    }
}
