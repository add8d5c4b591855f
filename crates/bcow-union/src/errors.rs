//! What went wrong in a mount: counted by kind, kept for those who ask, and logged once per place.

use std::collections::{HashSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use rustix::io::Errno;

use crate::log::{self, Severity};

/// Most places whose errors are remembered.
const PLACES: usize = 1024;
/// When so many places were logged, this is the shortest time between two further lines.
const INTERVAL: Duration = Duration::from_secs(10);
/// The shortest time between two lines about a lack of room or of the process's resources: such errors come and go.
const SHORTAGE_INTERVAL: Duration = Duration::from_secs(600);
/// How many different errors are kept.
const KEPT: usize = 8;
/// Most paths of a file that are named; a file with more names has this many of them named.
pub const NAMED_PATHS: usize = 4;

thread_local! {
    /// Whether this thread reported an error since it was last asked.
    static HAS_REPORTED: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// What kind of error it is. Their names are stable: metrics and statistics have them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum ErrorKind {
    /// Bytes of the image are not what its checksums say, or make no sense.
    ImageDamage,
    /// The host failed to read the image's file.
    ImageIo,
    /// The image asks for something that this version does not have.
    ImageUnsupported,
    /// Something in the upper is not as it was left.
    UpperDamage,
    /// The host failed to read or write the upper.
    UpperIo,
    /// There was no room: the host's file system is full, or the upper's limit is reached.
    NoSpace,
    /// The process had too little memory or too few descriptors.
    Resources,
}

impl ErrorKind {
    /// All of them, in the order of their numbers.
    pub const ALL: [ErrorKind; 7] = [
        ErrorKind::ImageDamage,
        ErrorKind::ImageIo,
        ErrorKind::ImageUnsupported,
        ErrorKind::UpperDamage,
        ErrorKind::UpperIo,
        ErrorKind::NoSpace,
        ErrorKind::Resources,
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            ErrorKind::ImageDamage => "image-damage",
            ErrorKind::ImageIo => "image-io",
            ErrorKind::ImageUnsupported => "image-unsupported",
            ErrorKind::UpperDamage => "upper-damage",
            ErrorKind::UpperIo => "upper-io",
            ErrorKind::NoSpace => "no-space",
            ErrorKind::Resources => "resources",
        }
    }

    /// The kind of an error that a writable mount answers and that has not been reported, as the host gave it; `None` of
    /// those that are answers to a program's mistake.
    pub fn of_errno(errno: Errno) -> Option<ErrorKind> {
        match errno {
            Errno::NOSPC | Errno::DQUOT => Some(ErrorKind::NoSpace),
            Errno::NOMEM | Errno::MFILE | Errno::NFILE => Some(ErrorKind::Resources),
            // A file system that met an error is often made read-only.
            Errno::IO | Errno::ROFS | Errno::NODEV | Errno::NOTCONN | Errno::TIMEDOUT => {
                Some(ErrorKind::UpperIo)
            }
            _ => None,
        }
    }

    /// Whether it is about the whole mount rather than about one file.
    fn is_shortage(self) -> bool {
        matches!(self, ErrorKind::NoSpace | ErrorKind::Resources)
    }
}

/// What a mount is, for those who read its log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Subject {
    /// The image: its file, or its place in a layout.
    pub image: String,
    /// Where it is mounted.
    pub mountpoint: String,
}

/// Something that failed.
#[derive(Debug, Clone, Copy)]
pub struct Failure<'a> {
    /// The kind.
    pub kind: ErrorKind,
    /// The inode, by its number in the mount.
    pub inode: u64,
    /// What could not be done, behind "cannot".
    pub action: &'static str,
    /// Where in the file, in bytes, if it is about a place in its content.
    pub offset: Option<u64>,
    /// Why.
    pub cause: &'a dyn std::error::Error,
}

/// An error that happened, perhaps more than once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordedError {
    /// When it happened last, in seconds since 1970.
    pub unix_seconds: u64,
    /// How often it happened.
    pub count: u64,
    /// The kind.
    pub kind: ErrorKind,
    /// The inode, by its number in the mount.
    pub inode: u64,
    /// Paths of the file in the mount; at most [`NAMED_PATHS`], and none if they are not known.
    pub paths: Vec<String>,
    /// What could not be done, behind "cannot".
    pub action: &'static str,
    /// Where in the file it happened last, in bytes.
    pub offset: Option<u64>,
    /// Why.
    pub cause: String,
}

/// The errors of one mount. Not a hot path: requests that succeed do not come here.
#[derive(Debug, Default)]
pub struct ErrorLog {
    subject: OnceLock<Subject>,
    counts: [AtomicU64; ErrorKind::ALL.len()],
    /// Held to look at it and to change it; nothing else is locked inside, and nothing is written to a log.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// What was logged.
    places: HashSet<(u64, &'static str)>,
    last_line: Option<Instant>,
    last_shortage: [Option<Instant>; ErrorKind::ALL.len()],
    /// The errors that happened last, each once, the latest at the end.
    recent: VecDeque<RecordedError>,
}

impl ErrorLog {
    /// Says what the errors are of. The first call counts.
    pub fn set_subject(&self, subject: Subject) {
        let _ = self.subject.set(subject);
    }

    /// How many errors of a kind there were.
    pub fn count(&self, kind: ErrorKind) -> u64 {
        self.counts[kind as usize].load(Ordering::Relaxed)
    }

    /// The different errors that happened last, the latest first.
    pub fn recent(&self) -> Vec<RecordedError> {
        self.state().recent.iter().rev().cloned().collect()
    }

    /// Whether this thread reported an error since it was last asked that.
    pub fn take_reported() -> bool {
        HAS_REPORTED.take()
    }

    /// Counts an error and keeps it, and logs it unless the same was logged for the same inode. `paths` says where the inode is
    /// in the mount; it is asked only for what is not kept already.
    pub fn report(&self, failure: &Failure<'_>, paths: impl FnOnce() -> Vec<String>) {
        HAS_REPORTED.set(true);
        self.counts[failure.kind as usize].fetch_add(1, Ordering::Relaxed);
        let cause = with_causes(failure.cause);
        let (known, is_news) = {
            let mut state = self.state();
            (
                state.update(failure, &cause),
                state.is_news(failure, Instant::now()),
            )
        };
        if known && !is_news {
            return;
        }
        // Without the lock, since this may read the image.
        let paths = paths();
        if is_news {
            let severity = match failure.kind.is_shortage() {
                true => Severity::Warning,
                false => Severity::Error,
            };
            log::log(severity, &self.line(failure, &paths, &cause));
        }
        if !known {
            let mut state = self.state();
            // Another thread may have met the same meanwhile.
            if !state.update(failure, &cause) {
                state.remember(failure, paths, cause);
            }
        }
    }

    /// Counts and logs a problem that is no failure of a request and has a text of its own, which names the place.
    pub fn note(&self, kind: ErrorKind, severity: Severity, path: Option<String>, problem: &str) {
        HAS_REPORTED.set(true);
        self.counts[kind as usize].fetch_add(1, Ordering::Relaxed);
        let place = path
            .as_ref()
            .map_or_else(String::new, |path| format!("{path}: "));
        log::log(severity, &format!("{}{place}{problem}", self.prefix()));
        let failure = Failure {
            kind,
            inode: 0,
            action: "",
            offset: None,
            cause: &Problem(problem.to_owned()),
        };
        self.state()
            .remember(&failure, path.into_iter().collect(), problem.to_owned());
    }

    /// What a line about this mount starts with.
    pub fn prefix(&self) -> String {
        match self.subject.get() {
            Some(Subject { image, mountpoint }) => format!("{image} at {mountpoint}: "),
            None => String::new(),
        }
    }

    fn line(&self, failure: &Failure<'_>, paths: &[String], cause: &str) -> String {
        let place = place(failure.inode, paths);
        let offset = match failure.offset {
            Some(offset) => format!(" at byte {offset}"),
            None => String::new(),
        };
        let action = failure.action;
        format!("{}{place}: cannot {action}{offset}: {cause}", self.prefix())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Counts an error that is kept already; `false` if it is not.
    fn update(&mut self, failure: &Failure<'_>, cause: &str) -> bool {
        let same = |kept: &RecordedError| {
            kept.kind == failure.kind
                && kept.inode == failure.inode
                && kept.action == failure.action
                && kept.cause == cause
        };
        let Some(index) = self.recent.iter().position(same) else {
            return false;
        };
        if let Some(mut kept) = self.recent.remove(index) {
            kept.count += 1;
            kept.unix_seconds = now();
            kept.offset = failure.offset;
            self.recent.push_back(kept);
        }
        true
    }

    fn remember(&mut self, failure: &Failure<'_>, paths: Vec<String>, cause: String) {
        if self.update(failure, &cause) {
            return;
        }
        if self.recent.len() == KEPT {
            self.recent.pop_front();
        }
        self.recent.push_back(RecordedError {
            unix_seconds: now(),
            count: 1,
            kind: failure.kind,
            inode: failure.inode,
            paths,
            action: failure.action,
            offset: failure.offset,
            cause,
        });
    }

    fn is_news(&mut self, failure: &Failure<'_>, now: Instant) -> bool {
        let due = |last: Option<Instant>, interval| {
            last.is_none_or(|last| now.duration_since(last) >= interval)
        };
        if failure.kind.is_shortage() {
            let last = &mut self.last_shortage[failure.kind as usize];
            let is_due = due(*last, SHORTAGE_INTERVAL);
            if is_due {
                *last = Some(now);
            }
            return is_due;
        }
        let place = (failure.inode, failure.action);
        if self.places.contains(&place) {
            return false;
        }
        if self.places.len() < PLACES {
            self.places.insert(place);
            return true;
        }
        let is_due = due(self.last_line, INTERVAL);
        if is_due {
            self.last_line = Some(now);
        }
        is_due
    }
}

/// How an inode is named: by its paths, or by its number if none is known.
pub fn place(inode: u64, paths: &[String]) -> String {
    match paths {
        [] => format!("inode {inode}"),
        paths => paths.join(" = "),
    }
}

/// A path in the mount for people: characters that would move a cursor are escaped.
pub fn shown(path: &[u8]) -> String {
    let mut shown = String::new();
    for char in String::from_utf8_lossy(path).chars() {
        match char.is_control() {
            true => shown.extend(char.escape_default()),
            false => shown.push(char),
        }
    }
    shown
}

/// A problem in words.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Problem(String);

fn now() -> u64 {
    SystemTime::UNIX_EPOCH
        .elapsed()
        .map_or(0, |elapsed| elapsed.as_secs())
}

fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = without_number(error.to_string());
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = without_number(error.to_string());
        // Transparent errors repeat their cause's text, and some tell it themselves.
        if !text.ends_with(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = error.source();
    }
    text
}

/// "No such file or directory" says it; its number helps no reader.
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

    #[test]
    fn same_damage_is_news_once() {
        let (mut state, now) = (State::default(), Instant::now());
        assert!(state.is_news(&failure(1, "read"), now));
        assert!(!state.is_news(&failure(1, "read"), now));
        assert!(state.is_news(&failure(1, "list"), now));
        assert!(state.is_news(&failure(2, "read"), now));
    }

    #[test]
    fn endless_new_damage_is_limited() {
        let (mut state, now) = (State::default(), Instant::now());
        let lines = (0..10 * PLACES as u64)
            .filter(|&inode| state.is_news(&failure(inode, "read"), now))
            .count();
        assert_eq!(lines, PLACES + 1);
    }

    #[test]
    fn lack_of_room_is_news_again_after_a_while() {
        let (mut state, now) = (State::default(), Instant::now());
        let full = |inode| Failure {
            kind: ErrorKind::NoSpace,
            ..failure(inode, "write")
        };
        assert!(state.is_news(&full(1), now));
        assert!(!state.is_news(&full(2), now));
        assert!(state.is_news(&full(2), now + SHORTAGE_INTERVAL));
    }

    #[test]
    fn every_error_is_counted_and_each_kept_once_with_its_path() {
        let log = ErrorLog::default();
        let asked = std::cell::Cell::new(0);
        for offset in [0, 4096] {
            let failure = Failure {
                offset: Some(offset),
                ..failure(7, "read")
            };
            log.report(&failure, || {
                asked.set(asked.get() + 1);
                vec!["/a/b".to_owned()]
            });
        }
        assert_eq!(asked.get(), 1, "paths are looked for once");
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
        assert_eq!(recent.len(), KEPT);
        assert_eq!(recent[0].inode, 199, "the latest is first");
        assert_eq!(log.count(ErrorKind::ImageDamage), 102);
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
            log.line(&failure, &paths, "checksum is wrong")
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
            "/images/web.bcow at /srv/web: /bin/sh = /bin/dash: cannot read at byte 4096: checksum is wrong"
        );
    }

    #[test]
    fn names_of_kinds_are_unique_and_in_the_order_of_their_numbers() {
        let names: HashSet<_> = ErrorKind::ALL.iter().map(|kind| kind.name()).collect();
        assert_eq!(names.len(), ErrorKind::ALL.len());
        for (index, kind) in ErrorKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, index);
        }
    }

    #[test]
    fn names_cannot_move_a_cursor() {
        assert_eq!(shown("/ü\u{1b}[2J\n".as_bytes()), "/ü\\u{1b}[2J\\n");
    }
}
