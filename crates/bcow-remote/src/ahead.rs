//! Fetches ahead of the reads of a mount: first the parts of files that a start is known to read,
//! then the rest of the files.
//!
//! Reads of programs come first. They have connections of their own, and never wait for a place
//! in a queue; while one of them waits for a server, the parts are fetched over one connection
//! only, and the rest of the files with [`Complete::Idle`] not at all. A read of a chunk that is
//! being fetched waits for that chunk, not for those behind it. A failure here is no failure of a
//! read: it is logged, and tried again after a pause.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bcow::Storage;

use crate::error::{Problem, RemoteError};
use crate::file::{RemoteFile, Warm};

/// Number of connections at a time. Several keep the network busy between the end of an answer and
/// the begin of the next one.
const CONNECTIONS: usize = 3;
/// Bytes of a request for a part, at most. Reads share the network with what is on its way.
const PIECE_BYTES: u64 = 1 << 20;
/// What is fetched of the parts if there is no cache: memory holds no more.
const UNCACHED_BYTES: u64 = 16 << 20;
/// How often a thread that waits looks whether it shall end.
const LOOK: Duration = Duration::from_millis(50);
/// The first pause after a failure; each further one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Attempts at a piece of a part. A read that needs it fetches it by itself.
const ATTEMPTS: u32 = 4;

/// Whether the rest of the files is fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Complete {
    /// Always.
    Always,
    /// While no read waits for a server.
    Idle,
    /// Never.
    Never,
}

/// A range of a file that will be read soon.
pub struct Part {
    /// The file.
    pub file: Arc<RemoteFile>,
    /// Bytes of the file.
    pub range: Range<u64>,
}

/// What is fetched ahead.
pub struct Ahead {
    /// In the order in which they are needed.
    pub parts: Vec<Part>,
    /// The files of which the rest is fetched.
    pub files: Vec<Arc<RemoteFile>>,
    /// Whether it is.
    pub complete: Complete,
    /// Gets what the user may want to know.
    pub report: fn(&AheadEvent),
}

/// An event of [`Ahead::run`].
#[derive(Debug)]
pub enum AheadEvent {
    /// All parts are present.
    Fetched {
        /// Their bytes.
        bytes: u64,
    },
    /// Some of the parts could not be fetched.
    Missing {
        /// Their bytes.
        bytes: u64,
    },
    /// All files are present as a whole.
    Complete {
        /// Number of files.
        files: usize,
        /// Their bytes.
        bytes: u64,
    },
    /// The rest of the files is not fetched.
    NotCompleted(RemoteError),
    /// The first failure in a row; fetching goes on after a pause.
    Failed(RemoteError),
}

impl fmt::Display for AheadEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AheadEvent::Fetched { bytes } => write!(f, "fetched ahead: {bytes} bytes"),
            AheadEvent::Missing { bytes } => {
                write!(f, "fetched ahead: {bytes} bytes are missing")
            }
            AheadEvent::Complete { files, bytes } => {
                write!(
                    f,
                    "complete: {files} files with {bytes} bytes are in the cache"
                )
            }
            AheadEvent::NotCompleted(error) => write!(f, "not completed: {error}"),
            AheadEvent::Failed(error) => write!(f, "not fetched ahead: {error}; trying again"),
        }
    }
}

impl Ahead {
    /// Fetches; returns at the end, or soon after `stop` is set.
    pub fn run(&self, stop: &AtomicBool) {
        self.fetch_parts(stop);
        if self.complete == Complete::Never {
            return;
        }
        let mut bytes = 0;
        for file in &self.files {
            if !self.complete_file(file, stop) {
                return;
            }
            bytes += file.len().unwrap_or(0);
        }
        let files = self.files.len();
        if files > 0 {
            (self.report)(&AheadEvent::Complete { files, bytes });
        }
    }

    fn fetch_parts(&self, stop: &AtomicBool) {
        let pieces = pieces(&self.parts);
        if pieces.is_empty() {
            return;
        }
        let next = AtomicUsize::new(0);
        let failed_bytes = AtomicU64::new(0);
        let work = |connection: usize| {
            loop {
                let demand = pieces[0].file.demand();
                while connection > 0 && !stop.load(Ordering::Relaxed) {
                    if demand.wait_for_none(LOOK) {
                        break;
                    }
                }
                let piece = pieces.get(next.fetch_add(1, Ordering::Relaxed));
                let Some(piece) = piece.filter(|_| !stop.load(Ordering::Relaxed)) else {
                    return;
                };
                if !self.fetch_piece(piece, stop) {
                    let bytes = length(&piece.range);
                    failed_bytes.fetch_add(bytes, Ordering::Relaxed);
                }
            }
        };
        std::thread::scope(|scope| {
            for connection in 1..CONNECTIONS.min(pieces.len()) {
                let work = &work;
                scope.spawn(move || work(connection));
            }
            work(0);
        });
        if stop.load(Ordering::Relaxed) {
            return;
        }
        (self.report)(&match failed_bytes.into_inner() {
            0 => AheadEvent::Fetched {
                bytes: pieces.iter().map(|piece| length(&piece.range)).sum(),
            },
            bytes => AheadEvent::Missing { bytes },
        });
    }

    /// Fetches the rest of a file. `false`: stopped, or the cache cannot have it.
    fn complete_file(&self, file: &RemoteFile, stop: &AtomicBool) -> bool {
        let warm = Warm {
            connections: CONNECTIONS,
            stop,
            before: &|| {
                while self.complete == Complete::Idle
                    && !stop.load(Ordering::Relaxed)
                    && !file.demand().wait_for_none(LOOK)
                {}
            },
            progress: &|_| {},
        };
        let mut pause = FIRST_PAUSE;
        loop {
            match file.warm(&warm) {
                Ok(()) => return !stop.load(Ordering::Relaxed),
                Err(error) if matches!(error.problem, Problem::NotKept(_)) => {
                    (self.report)(&AheadEvent::NotCompleted(error));
                    return false;
                }
                Err(error) => pause = self.after(error, pause, stop),
            }
            if stop.load(Ordering::Relaxed) {
                return false;
            }
        }
    }

    /// `false`: it was given up.
    fn fetch_piece(&self, piece: &Piece<'_>, stop: &AtomicBool) -> bool {
        let mut pause = FIRST_PAUSE;
        for _ in 0..ATTEMPTS {
            match piece.file.fetch_ahead(&piece.range, stop) {
                Ok(()) => return true,
                Err(error) => pause = self.after(error, pause, stop),
            }
        }
        false
    }

    /// Waits after a failure. Returns the next pause.
    fn after(&self, error: RemoteError, pause: Duration, stop: &AtomicBool) -> Duration {
        match pause == FIRST_PAUSE {
            true => (self.report)(&AheadEvent::Failed(error)),
            false => tracing::debug!("not fetched ahead: {error}"),
        }
        let end = Instant::now() + pause;
        while Instant::now() < end && !stop.load(Ordering::Relaxed) {
            std::thread::sleep(LOOK);
        }
        (pause * 2).min(LONGEST_PAUSE)
    }
}

struct Piece<'p> {
    file: &'p RemoteFile,
    range: Range<u64>,
}

/// Cuts parts into pieces of one request each.
fn pieces(parts: &[Part]) -> Vec<Piece<'_>> {
    let mut pieces = Vec::new();
    let mut uncached_bytes = 0;
    for Part { file, range } in parts {
        let mut start = range.start;
        while start < range.end {
            let end = range.end.min(start + PIECE_BYTES);
            if !file.has_cache() {
                uncached_bytes += end - start;
                if uncached_bytes > UNCACHED_BYTES {
                    return pieces;
                }
            }
            pieces.push(Piece {
                file,
                range: start..end,
            });
            start = end;
        }
    }
    pieces
}

fn length(range: &Range<u64>) -> u64 {
    range.end - range.start
}
