//! The error log of a mount: counts errors by kind, records the last different ones for
//! `bcow stats`, and logs the first error of each place (inode and action).

mod kind;

use std::borrow::Cow;
use std::collections::{HashSet, VecDeque};
use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::log::{self, Severity};

pub use kind::ErrorKind;

/// Upper bound of the places that the log records as logged.
const MAX_LOGGED_PLACES: usize = 1024;
/// Shortest time between two log lines after [`MAX_LOGGED_PLACES`] places were logged.
const LINE_INTERVAL: Duration = Duration::from_secs(10);
/// Shortest time between two log lines about a shortage of one kind. A shortage can end and occur
/// again, so it is logged more than once.
const SHORTAGE_INTERVAL: Duration = Duration::from_secs(600);
/// Upper bound of the different errors that are recorded.
const MAX_RECENT: usize = 8;
/// Upper bound of the paths that an error names for a file with several names.
pub(crate) const NAMED_PATHS: usize = 4;

thread_local! {
    /// Whether this thread reported an error since the last [`ErrorLog::take_reported`].
    static HAS_REPORTED: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// The mount that log lines name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Subject {
    /// The image: its file, or its path in an OCI layout.
    pub image: String,
    pub mountpoint: String,
}

/// A failed operation.
#[derive(Debug, Clone, Copy)]
pub struct Failure<'a> {
    pub kind: ErrorKind,
    /// Inode number in the mount.
    pub inode: u64,
    /// The failed action: the text that follows the word "cannot".
    pub action: &'static str,
    /// Offset in the file in bytes, for an error at a place in its content.
    pub offset: Option<u64>,
    pub cause: &'a dyn std::error::Error,
}

/// An error that occurred at least once. A part of the schema `bcow.stats/1`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedError {
    /// Time of the last occurrence, in seconds since 1970.
    pub unix_seconds: u64,
    /// The same time in UTC, in the format of RFC 3339.
    pub time: String,
    /// Number of occurrences.
    pub count: u64,
    /// The name of the kind.
    pub kind: String,
    /// The inode number in the mount; 0 if the error has no inode.
    pub inode: u64,
    /// Paths of the file in the mount: at most four, none if they are unknown.
    pub paths: Vec<String>,
    /// The failed action: the text that follows the word "cannot". Empty for an error of
    /// [`ErrorLog::report_problem`], whose cause is a full message.
    pub action: String,
    /// Offset in the file of the last occurrence, in bytes.
    pub offset: Option<u64>,
    /// The cause, as text.
    pub cause: String,
}

/// The place of an error: an inode, and the failed action. For an error of
/// [`ErrorLog::report_problem`]: zero, and the path and the problem.
type ErrorPlace = (u64, Cow<'static, str>);

/// The errors of one mount. A request without an error does not use it.
#[derive(Debug, Default)]
pub struct ErrorLog {
    subject: OnceLock<Subject>,
    counts: [AtomicU64; ErrorKind::ALL.len()],
    /// The places and the recorded errors. A leaf lock: a thread that holds it acquires no other
    /// lock and logs nothing.
    state: Mutex<ErrorLogState>,
}

#[derive(Debug, Default)]
struct ErrorLogState {
    /// Places that were logged.
    places: HashSet<ErrorPlace>,
    /// Time of the last line about a place that is not in `places` because the set is full.
    last_line: Option<Instant>,
    /// Time of the last line about a shortage, by the number of its kind.
    last_shortage: [Option<Instant>; ErrorKind::ALL.len()],
    /// The different errors that occurred last; the latest is at the end.
    recent: VecDeque<RecordedError>,
}

impl ErrorLog {
    /// Sets the mount that log lines name. Only the first call has an effect.
    pub fn set_subject(&self, subject: Subject) {
        let _ = self.subject.set(subject);
    }

    /// Number of errors of a kind.
    pub fn count(&self, kind: ErrorKind) -> u64 {
        self.counts[kind as usize].load(Ordering::Relaxed)
    }

    /// The different errors that occurred last, the latest first.
    pub fn recent(&self) -> Vec<RecordedError> {
        self.state.lock().recent.iter().rev().cloned().collect()
    }

    /// Whether this thread reported an error since the last call.
    pub fn take_reported() -> bool {
        HAS_REPORTED.take()
    }

    /// Counts and records an error. Logs it in these cases:
    ///
    /// - the first failure of an action on an inode. After 1024 of these, one in 10 seconds;
    /// - a shortage, if its kind was not logged in the last 10 minutes.
    ///
    /// `paths` returns the paths of the inode in the mount. It is called only if the error is
    /// logged, or is not recorded yet.
    pub fn report(&self, failure: &Failure<'_>, paths: impl FnOnce() -> Vec<String>) {
        self.note(failure, (failure.inode, failure.action.into()), paths);
    }

    /// As [`ErrorLog::report`], for a problem that has no inode and no action. `path` names the
    /// place, and `problem` is the message.
    pub(crate) fn report_problem(&self, kind: ErrorKind, path: String, problem: &str) {
        let failure = Failure {
            kind,
            inode: 0,
            action: "",
            offset: None,
            cause: &Problem(problem.to_owned()),
        };
        let place = (0, format!("{path}: {problem}").into());
        self.note(&failure, place, || vec![path]);
    }

    fn note(&self, failure: &Failure<'_>, place: ErrorPlace, paths: impl FnOnce() -> Vec<String>) {
        HAS_REPORTED.set(true);
        self.counts[failure.kind as usize].fetch_add(1, Ordering::Relaxed);
        let cause = with_causes(failure.cause);
        let (is_recorded, must_log) = {
            let mut state = self.state.lock();
            (
                state.update(failure, &cause),
                state.must_log(failure.kind, place, Instant::now()),
            )
        };
        if is_recorded && !must_log {
            return;
        }
        // Outside the lock, because `paths` may read the image.
        let error = RecordedError::of(failure, paths(), cause);
        if must_log {
            let severity =
                if failure.kind.is_shortage() { Severity::Warning } else { Severity::Error };
            log::log(severity, &self.line(&error));
        }
        if !is_recorded {
            self.state.lock().record(failure, error);
        }
    }

    fn line(&self, error: &RecordedError) -> String {
        match self.subject.get() {
            Some(Subject { image, mountpoint }) => format!("{image} at {mountpoint}: {error}"),
            None => error.to_string(),
        }
    }
}

impl RecordedError {
    fn of(failure: &Failure<'_>, paths: Vec<String>, cause: String) -> Self {
        let (unix_seconds, time) = now();
        RecordedError {
            unix_seconds,
            time,
            count: 1,
            kind: failure.kind.name().to_owned(),
            inode: failure.inode,
            paths,
            action: failure.action.to_owned(),
            offset: failure.offset,
            cause,
        }
    }
}

impl fmt::Display for RecordedError {
    /// The error in the format of the log: the paths of its inode, or the number if no path is
    /// known, and then the message.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.paths.is_empty() {
            write!(f, "{}: ", self.paths.join(" = "))?;
        } else if self.inode != 0 {
            write!(f, "inode {}: ", self.inode)?;
        }
        if !self.action.is_empty() {
            write!(f, "cannot {}", self.action)?;
            if let Some(offset) = self.offset {
                write!(f, " at byte {offset}")?;
            }
            f.write_str(": ")?;
        }
        f.write_str(&self.cause)
    }
}

impl ErrorLogState {
    /// Counts an occurrence of a recorded error. Returns `false` if the error is not recorded.
    fn update(&mut self, failure: &Failure<'_>, cause: &str) -> bool {
        let is_same_cause = |recorded: &RecordedError| {
            recorded.cause == cause
                || failure.kind.is_io()
                    && is_near(recorded.offset, failure.offset)
                    && is_same_but_for_numbers(&recorded.cause, cause)
        };
        let same = |recorded: &RecordedError| {
            recorded.kind == failure.kind.name()
                && recorded.inode == failure.inode
                && recorded.action == failure.action
                && is_same_cause(recorded)
        };
        let Some(index) = self.recent.iter().position(same) else {
            return false;
        };
        if let Some(mut recorded) = self.recent.remove(index) {
            recorded.count += 1;
            (recorded.unix_seconds, recorded.time) = now();
            recorded.offset = failure.offset;
            cause.clone_into(&mut recorded.cause);
            self.recent.push_back(recorded);
        }
        true
    }

    /// Records an error, or counts an occurrence if another thread has recorded it meanwhile.
    fn record(&mut self, failure: &Failure<'_>, error: RecordedError) {
        if self.update(failure, &error.cause) {
            return;
        }
        if self.recent.len() == MAX_RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(error);
    }

    /// Whether a failure at a place must be logged now. If so, records that it was logged.
    fn must_log(&mut self, kind: ErrorKind, place: ErrorPlace, now: Instant) -> bool {
        let due = |last: Option<Instant>, interval| {
            last.is_none_or(|last| now.duration_since(last) >= interval)
        };
        if kind.is_shortage() {
            let last = &mut self.last_shortage[kind as usize];
            let is_due = due(*last, SHORTAGE_INTERVAL);
            if is_due {
                *last = Some(now);
            }
            return is_due;
        }
        if self.places.contains(&place) {
            return false;
        }
        if self.places.len() < MAX_LOGGED_PLACES {
            self.places.insert(place);
            return true;
        }
        let is_due = due(self.last_line, LINE_INTERVAL);
        if is_due {
            self.last_line = Some(now);
        }
        is_due
    }
}

/// Whether two errors are so near in a file that one bad place of the host can be the cause of
/// both: readahead and its repetitions read different ranges around it.
fn is_near(one: Option<u64>, other: Option<u64>) -> bool {
    /// The longest read of the kernel, in bytes.
    const READ_BYTES: u64 = 1 << 20;
    match (one, other) {
        (Some(one), Some(other)) => one.abs_diff(other) <= READ_BYTES,
        _ => false,
    }
}

fn is_same_but_for_numbers(one: &str, other: &str) -> bool {
    let words = |text: &str| {
        let words = text.split(|c: char| c.is_ascii_digit() || c == ',');
        words
            .filter(|word| !word.is_empty())
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    words(one) == words(other)
}

/// A path in messages. Control characters are escaped, because a terminal interprets them.
pub fn escaped(path: &[u8]) -> String {
    let mut escaped = String::new();
    for char in String::from_utf8_lossy(path).chars() {
        if char.is_control() {
            escaped.extend(char.escape_default())
        } else {
            escaped.push(char)
        }
    }
    escaped
}

/// An error that is only a text.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Problem(String);

/// The current time in seconds since 1970, and as text.
fn now() -> (u64, String) {
    let elapsed = SystemTime::UNIX_EPOCH.elapsed();
    let seconds = elapsed.map_or(0, |elapsed| elapsed.as_secs());
    let text = i64::try_from(seconds).ok().and_then(bcow::rfc3339);
    (seconds, text.unwrap_or_default())
}

/// The text of an error and of its causes, separated by colons.
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = without_number(error.to_string());
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = without_number(error.to_string());
        // The text of a transparent error is that of its cause, and some errors include their
        // cause.
        if !text.ends_with(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = error.source();
    }
    text
}

/// Removes the number of an OS error: the text before it has the same meaning.
fn without_number(mut text: String) -> String {
    if let Some((before, number)) = text.rsplit_once(" (os error ")
        && number.ends_with(')')
    {
        text.truncate(before.len());
    }
    text
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustix::io::Errno;

    use super::*;

    fn failure(inode: u64, action: &'static str) -> Failure<'static> {
        Failure {
            kind: ErrorKind::ImageDamage,
            inode,
            action,
            offset: None,
            cause: &Errno::IO,
        }
    }

    fn must_log(state: &mut ErrorLogState, inode: u64, action: &'static str, now: Instant) -> bool {
        state.must_log(ErrorKind::ImageDamage, (inode, action.into()), now)
    }

    #[test]
    fn same_damage_is_logged_once() {
        let (mut state, now) = (ErrorLogState::default(), Instant::now());
        assert!(must_log(&mut state, 1, "read", now));
        assert!(!must_log(&mut state, 1, "read", now));
        assert!(must_log(&mut state, 1, "list", now));
        assert!(must_log(&mut state, 2, "read", now));
    }

    #[test]
    fn endless_new_damage_is_limited() {
        let (mut state, now) = (ErrorLogState::default(), Instant::now());
        let lines = (0..10 * MAX_LOGGED_PLACES as u64)
            .filter(|&inode| must_log(&mut state, inode, "read", now))
            .count();
        assert_eq!(lines, MAX_LOGGED_PLACES + 1);
    }

    #[test]
    fn shortage_is_logged_again_after_an_interval() {
        let (mut state, now) = (ErrorLogState::default(), Instant::now());
        let mut full =
            |inode, now| state.must_log(ErrorKind::NoSpace, (inode, "write".into()), now);
        assert!(full(1, now));
        assert!(!full(2, now));
        assert!(full(2, now + SHORTAGE_INTERVAL));
    }

    /// Counts the log lines of this thread.
    #[derive(Clone, Default)]
    struct Lines(Arc<AtomicU64>);

    impl tracing::Subscriber for Lines {
        fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
            true
        }
        fn event(&self, _: &tracing::Event<'_>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
        fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }
        fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
        fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
        fn enter(&self, _: &tracing::span::Id) {}
        fn exit(&self, _: &tracing::span::Id) {}
    }

    #[test]
    fn repeated_problem_is_counted_and_logged_once() {
        let (log, lines) = (ErrorLog::default(), Lines::default());
        tracing::subscriber::with_default(lines.clone(), || {
            for path in ["/upper", "/upper", "/upper: a", "/upper"] {
                log.report_problem(ErrorKind::UpperIo, path.to_owned(), "cannot sync");
            }
        });
        assert_eq!(lines.0.load(Ordering::Relaxed), 2);
        assert_eq!(log.count(ErrorKind::UpperIo), 4);
    }

    #[test]
    fn every_error_is_counted_and_each_recorded_once_with_its_path() {
        let log = ErrorLog::default();
        let calls = std::cell::Cell::new(0);
        for offset in [0, 4096] {
            let failure = Failure {
                offset: Some(offset),
                ..failure(7, "read")
            };
            log.report(&failure, || {
                calls.set(calls.get() + 1);
                vec!["/a/b".to_owned()]
            });
        }
        assert_eq!(calls.get(), 1, "paths are searched once");
        assert!(ErrorLog::take_reported());
        assert!(!ErrorLog::take_reported());
        assert_eq!(log.count(ErrorKind::ImageDamage), 2);
        assert_eq!(log.count(ErrorKind::ImageIo), 0);
        let recent = log.recent();
        let [error] = &recent[..] else {
            panic!("{recent:?}");
        };
        assert_eq!((error.count, error.offset), (2, Some(4096)));
        assert_eq!(error.paths, ["/a/b"]);
        for inode in 100..200 {
            log.report(&failure(inode, "read"), Vec::new);
        }
        let recent = log.recent();
        assert_eq!(recent.len(), MAX_RECENT);
        assert_eq!(recent[0].inode, 199, "the latest is first");
        assert_eq!(log.count(ErrorKind::ImageDamage), 102);
    }

    #[test]
    fn one_bad_place_of_the_host_is_one_error() {
        let log = ErrorLog::default();
        let report = |kind, offset: u64, cause: &str| {
            let failure = Failure {
                kind,
                offset: Some(offset),
                cause: &Problem(cause.to_owned()),
                ..failure(7, "read")
            };
            log.report(&failure, Vec::new);
        };
        // Readahead, then smaller and smaller reads.
        for offset in [0, 1 << 17, (1 << 17) + 4096] {
            let cause = format!("cannot read at byte {}: I/O error", offset + 512);
            report(ErrorKind::ImageIo, offset, &cause);
        }
        let recent = log.recent();
        let [error] = &recent[..] else {
            panic!("{recent:?}");
        };
        assert_eq!((error.count, error.offset), (3, Some((1 << 17) + 4096)));
        // Another place, another cause, and damage, whose place is that of a block.
        report(
            ErrorKind::ImageIo,
            1 << 30,
            "cannot read at byte 7: I/O error",
        );
        report(
            ErrorKind::ImageIo,
            0,
            "cannot read at byte 7: no such device",
        );
        report(ErrorKind::ImageDamage, 0, "block at byte 0");
        report(ErrorKind::ImageDamage, 4096, "block at byte 4096");
        assert_eq!(log.recent().len(), 5);
    }

    #[test]
    fn line_names_image_mountpoint_path_place_and_cause() {
        let log = ErrorLog::default();
        let failure = Failure {
            offset: Some(4096),
            ..failure(7, "read")
        };
        let line = |paths: &[&str]| {
            let paths: Vec<_> = paths.iter().map(|&path| path.to_owned()).collect();
            let cause = "checksum is wrong".to_owned();
            log.line(&RecordedError::of(&failure, paths, cause))
        };
        let rest = "inode 7: cannot read at byte 4096: checksum is wrong";
        assert_eq!(line(&[]), rest);
        log.set_subject(Subject {
            image: "/images/web.bcow".to_owned(),
            mountpoint: "/srv/web".to_owned(),
        });
        assert_eq!(line(&[]), format!("/images/web.bcow at /srv/web: {rest}"));
        assert_eq!(
            line(&["/bin/sh", "/bin/dash"]),
            "/images/web.bcow at /srv/web: /bin/sh = /bin/dash: \
             cannot read at byte 4096: checksum is wrong"
        );
    }

    #[test]
    fn names_cannot_move_a_cursor() {
        assert_eq!(escaped("/ü\u{1b}[2J\n".as_bytes()), "/ü\\u{1b}[2J\\n");
    }
}
