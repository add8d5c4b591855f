//! Fetches ahead of the reads of a mount: first the parts of files that a start is known to read,
//! then the rest of the files.
//!
//! Reads of programs come first. They have connections of their own, and never wait for a place
//! in a queue; while one of them waits for a server, fewer bytes of the parts are requested at one
//! time, and none of the rest of the files with [`Complete::Idle`]. A read of a chunk that is
//! being fetched waits for that chunk, not for those behind it. A failure here is no failure of a
//! read: it is logged, and tried again after a pause.

mod window;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bcow::Storage;
use bcow::sync::start;

use crate::error::{Problem, RemoteError};
use crate::file::{Pace, RemoteFile, Warm};
use window::{Whole, Window};

/// Number of connections at a time for the parts: some of them are small.
const CONNECTIONS: usize = 6;
/// The same for the rest of the files. Several keep the network busy between the end of an answer
/// and the begin of the next one.
const CONNECTIONS_FOR_THE_REST: usize = 3;
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
    Always,
    /// While no read waits for a server.
    Idle,
    Never,
}

/// A range of a file that will be read soon.
pub struct Part {
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
    /// Gets what the user may want to know, and whether it is a failure.
    pub report: fn(&str, bool),
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
            let text = format!("complete: {files} files with {bytes} bytes are in the cache");
            (self.report)(&text, false);
        }
    }

    fn fetch_parts(&self, stop: &AtomicBool) {
        let Some(first) = self.parts.first() else {
            return;
        };
        let demand = first.file.demand();
        let wholes = self.parts.iter().map(|part| Whole {
            range: part.range.clone(),
            is_uncached: !part.file.has_cache(),
        });
        let window = Window::new(wholes.collect(), UNCACHED_BYTES);
        let fetched_bytes = AtomicU64::new(0);
        let failed_bytes = AtomicU64::new(0);
        let work = || {
            while let Some(piece) = window.take(stop, || demand.is_present()) {
                let file = &self.parts[piece.whole].file;
                let pace = self.fetch_piece(file, &piece.range, stop);
                let counter = match pace {
                    Ok(_) => &fetched_bytes,
                    Err(GivenUp) => &failed_bytes,
                };
                counter.fetch_add(piece.bytes(), Ordering::Relaxed);
                window.done(&piece, pace.ok().flatten());
            }
        };
        std::thread::scope(|scope| {
            // This thread works too, alone if the system refuses others.
            let _ = (1..window.pieces(CONNECTIONS)).all(|_| start(scope, work));
            work();
        });
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let (fetched, missing) = (fetched_bytes.into_inner(), failed_bytes.into_inner());
        let text = match missing {
            0 => format!("fetched ahead: {fetched} bytes"),
            missing => format!("fetched ahead: {missing} bytes are missing"),
        };
        (self.report)(&text, missing > 0);
    }

    /// Fetches the rest of a file. `false`: stopped, or the cache cannot have it.
    fn complete_file(&self, file: &RemoteFile, stop: &AtomicBool) -> bool {
        let warm = Warm {
            connections: CONNECTIONS_FOR_THE_REST,
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
                    (self.report)(&format!("not completed: {error}"), false);
                    return false;
                }
                Err(error) => pause = self.after(&error, pause, stop),
            }
            if stop.load(Ordering::Relaxed) {
                return false;
            }
        }
    }

    /// Fetches a piece. Returns the pace of the server, if the piece shows it.
    fn fetch_piece(
        &self,
        file: &RemoteFile,
        range: &Range<u64>,
        stop: &AtomicBool,
    ) -> Result<Option<Pace>, GivenUp> {
        let mut pause = FIRST_PAUSE;
        for _ in 0..ATTEMPTS {
            match file.fetch_ahead(range, stop) {
                Ok(pace) => return Ok(pace),
                Err(error) => pause = self.after(&error, pause, stop),
            }
        }
        Err(GivenUp)
    }

    /// Waits after a failure. Returns the next pause.
    fn after(&self, error: &RemoteError, pause: Duration, stop: &AtomicBool) -> Duration {
        if pause == FIRST_PAUSE {
            (self.report)(&format!("not fetched ahead: {error}; trying again"), true)
        } else {
            tracing::debug!("not fetched ahead: {error}")
        }
        let end = Instant::now() + pause;
        while Instant::now() < end && !stop.load(Ordering::Relaxed) {
            std::thread::sleep(LOOK);
        }
        (pause * 2).min(LONGEST_PAUSE)
    }
}

/// A piece could not be fetched. A read that needs it fetches it by itself.
struct GivenUp;
