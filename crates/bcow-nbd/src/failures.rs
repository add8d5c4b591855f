//! Reports of requests that failed at the device, and of refused clients, for the server's log.
//! Their number is limited, so that a client that retries cannot fill the log.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bcow::Error;

use crate::proto::{Command, Request};
use crate::sync::{Mutex, lock};

/// This many failures are reported one by one; after that, each time their number has doubled.
const LOGGED_SINGLY: u64 = 16;

/// A request that failed at the device.
#[derive(Debug, Clone, Copy)]
pub struct FailedRequest<'a> {
    /// The name of the export.
    pub export: &'a str,
    /// The command of the request.
    pub command: Command,
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// The cause.
    pub error: &'a Error,
    /// Number of failures so far, those that were not reported included.
    pub count: u64,
}

impl fmt::Display for FailedRequest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (command, length, offset) = (self.command, self.length, self.offset);
        write!(
            f,
            "{command:?} of {length} bytes at byte {offset} failed: {}",
            self.error
        )?;
        let count = self.count;
        if count > LOGGED_SINGLY {
            write!(f, " (failed request number {count}; not all are logged)")
        } else {
            Ok(())
        }
    }
}

/// The receiver of reports of failed requests. The default is the log.
#[derive(Clone)]
pub struct FailureReport(Arc<dyn Fn(&FailedRequest<'_>) + Send + Sync>);

impl FailureReport {
    /// Sends reports to `report`. The threads that execute the requests call it.
    pub fn new(report: impl Fn(&FailedRequest<'_>) + Send + Sync + 'static) -> Self {
        FailureReport(Arc::new(report))
    }
}

impl Default for FailureReport {
    fn default() -> Self {
        FailureReport::new(|failed| tracing::error!("{:?}: {failed}", failed.export))
    }
}

/// Counts the requests that failed.
#[derive(Default)]
pub(crate) struct FailureCount(AtomicU64);

impl FailureCount {
    pub(crate) fn add(&self, export: &str, request: &Request, error: &Error, to: &FailureReport) {
        let count = self.0.fetch_add(1, Ordering::Relaxed) + 1;
        if is_logged(count) {
            (to.0)(&FailedRequest {
                export,
                command: request.command,
                offset: request.offset,
                length: request.length,
                error,
                count,
            });
        }
    }
}

/// Limit of log lines for refused clients in [`REFUSAL_WINDOW`].
const REFUSALS: u32 = 16;
/// The period of the limit [`REFUSALS`].
const REFUSAL_WINDOW: Duration = Duration::from_secs(60);

/// Logs refused clients with the reason. The client may not show the reason to its user, so the
/// server's log must.
#[derive(Default)]
pub(crate) struct RefusalLog(Mutex<Window>);

#[derive(Default)]
struct Window {
    began: Option<Instant>,
    lines: u32,
    left_out: u64,
}

impl RefusalLog {
    /// Reports the client `id` with address `from`.
    pub(crate) fn report(&self, id: u64, from: &str, why: &dyn fmt::Display) {
        let Some(left_out) = lock(&self.0).admit(Instant::now()) else {
            return;
        };
        if left_out > 0 {
            tracing::warn!("{left_out} more refused clients are not logged");
        }
        tracing::warn!("client {id} at {from} is refused: {why}");
    }
}

impl Window {
    /// Whether the next refusal gets a log line. `Some` then holds the number of refusals that got
    /// no line since the last report of such a number.
    fn admit(&mut self, now: Instant) -> Option<u64> {
        let began = *self.began.get_or_insert(now);
        if now.saturating_duration_since(began) >= REFUSAL_WINDOW {
            self.began = Some(now);
            self.lines = 0;
        }
        if self.lines == REFUSALS {
            self.left_out += 1;
            return None;
        }
        self.lines += 1;
        Some(std::mem::take(&mut self.left_out))
    }
}

fn is_logged(count: u64) -> bool {
    count <= LOGGED_SINGLY || count.is_power_of_two()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_beyond_the_limit_of_a_minute_are_only_counted() {
        let mut window = Window::default();
        let begin = Instant::now();
        let logged = (0..1000).filter(|_| window.admit(begin).is_some()).count();
        assert_eq!(logged, REFUSALS as usize);
        let later = begin + REFUSAL_WINDOW;
        assert_eq!(window.admit(later), Some(1000 - u64::from(REFUSALS)));
        assert_eq!(window.admit(later), Some(0));
    }

    #[test]
    fn a_million_failures_give_32_log_lines() {
        let lines = (1..=1 << 20).filter(|&count| is_logged(count)).count();
        assert_eq!(lines, 16 + 16);
    }
}
