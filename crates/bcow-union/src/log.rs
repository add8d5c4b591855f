//! Log output of a mount: standard error in the foreground, the system log in the background, and
//! also a file if one is named.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

/// Sockets for syslog datagrams: the traditional one, and the journal's.
const SYSLOG_SOCKETS: [&str; 2] = ["/dev/log", "/run/systemd/journal/dev-log"];

/// Facility "daemon" (RFC 5424, section 6.2.1), shifted into place.
const FACILITY: u8 = 3 << 3;

/// Severity of a message; the numbers are syslog's (RFC 5424, section 6.2.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Severity {
    /// An operation failed.
    Error = 3,
    /// A problem that is not an error of one file, such as a shortage of space.
    Warning = 4,
    /// No problem, but something that the user wants to know.
    Notice = 5,
}

static SYSLOG: OnceLock<UnixDatagram> = OnceLock::new();

static IS_SYSLOG_USED: AtomicBool = AtomicBool::new(false);

/// Sends the messages of this process to the system log from now on. Without a system log,
/// standard error is still used.
pub fn use_syslog() {
    connect_syslog();
    IS_SYSLOG_USED.store(true, Ordering::Relaxed);
}

/// Connects to the system log, for a process that cannot do that later.
pub fn connect_syslog() {
    let Some(Ok(socket)) = SYSLOG.get().is_none().then(UnixDatagram::unbound) else {
        return;
    };
    // Non-blocking: a full log must not block the daemon. The message is lost instead.
    let usable = socket.set_nonblocking(true).is_ok()
        && SYSLOG_SOCKETS
            .iter()
            .any(|path| socket.connect(path).is_ok());
    if usable {
        let _ = SYSLOG.set(socket);
    }
}

static LOG_FILE: OnceLock<PathBuf> = OnceLock::new();

/// Appends the messages of this process also to the file at `path` from now on, and creates the
/// file if it is missing. Only the first call has an effect. Fails if the file cannot be opened.
pub fn use_file(path: &Path) -> io::Result<()> {
    // The process changes its working directory later.
    let path = std::path::absolute(path)?;
    open_log_file(&path)?;
    let _ = LOG_FILE.set(path);
    Ok(())
}

/// Opens the log file. It is opened for each of the few lines: after a rotation the next line
/// creates a new file, without a signal.
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
            Severity::Notice => "notice",
        },
        message.replace('\n', " ")
    );
    // One write, so that lines of several processes do not mix. Errors are ignored: a log on a full
    // disk must not stop a mount.
    let _ = open_log_file(path).and_then(|mut file| file.write_all(line.as_bytes()));
}

/// Logs a message as one line.
pub fn log(severity: Severity, message: &str) {
    if let Some(path) = LOG_FILE.get() {
        to_file(path, severity, message);
    }
    match SYSLOG
        .get()
        .filter(|_| IS_SYSLOG_USED.load(Ordering::Relaxed))
    {
        Some(socket) => {
            let _ = socket.send(datagram(severity, message).as_bytes());
        }
        None => match severity {
            Severity::Error => tracing::error!(target: "bcow", "{message}"),
            Severity::Warning => tracing::warn!(target: "bcow", "{message}"),
            Severity::Notice => tracing::info!(target: "bcow", "{message}"),
        },
    }
}

/// The datagram format of `syslog(3)`, without the time, which the receiver adds.
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
