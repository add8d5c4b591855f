//! Requests that failed at the device, and clients that were refused, for the server's log. A client that tries again and again does
//! not fill it.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use bcow::Error;

use crate::proto::{Command, Request};
use crate::sync::Mutex;

/// So many failures are told one by one; then each time their number has doubled.
const TOLD: u64 = 16;

/// A request that failed at the device.
#[derive(Debug, Clone, Copy)]
pub struct FailedRequest<'a> {
    /// The name of the export.
    pub export: &'a str,
    /// What was asked for.
    pub command: Command,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// Why.
    pub error: &'a Error,
    /// How many failed so far; not all are reported.
    pub count: u64,
}

impl fmt::Display for FailedRequest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FailedRequest {
            command,
            offset,
            length,
            error,
            count,
            ..
        } = self;
        write!(
            f,
            "{command:?} of {length} bytes at byte {offset} failed: {error}"
        )?;
        match *count > TOLD {
            true => write!(f, " (failed request number {count}; not all are logged)"),
            false => Ok(()),
        }
    }
}

/// Says where reports of failed requests go: to the log, if nothing else is said.
#[derive(Clone)]
pub struct FailureReport(Arc<dyn Fn(&FailedRequest<'_>) + Send + Sync>);

impl FailureReport {
    /// To `report`, which is called by the threads that carry requests out.
    pub fn new(report: impl Fn(&FailedRequest<'_>) + Send + Sync + 'static) -> Self {
        FailureReport(Arc::new(report))
    }
}

impl Default for FailureReport {
    fn default() -> Self {
        FailureReport::new(|failed| tracing::error!("{:?}: {failed}", failed.export))
    }
}

impl fmt::Debug for FailureReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FailureReport")
    }
}

#[derive(Default)]
pub(crate) struct FailureLog {
    count: AtomicU64,
    report: FailureReport,
}

impl FailureLog {
    pub(crate) fn new(report: FailureReport) -> Self {
        FailureLog {
            count: AtomicU64::new(0),
            report,
        }
    }

    pub(crate) fn report(&self, export: &str, request: &Request, error: &Error) {
        let count = self.count.fetch_add(1, Ordering::Relaxed) + 1;
        if !is_told(count) {
            return;
        }
        (self.report.0)(&FailedRequest {
            export,
            command: request.command,
            offset: request.offset,
            length: request.length,
            error,
            count,
        });
    }
}

/// So many refused clients have a line each
const REFUSALS: u32 = 16;
/// in this time.
const REFUSAL_WINDOW: Duration = Duration::from_secs(60);

/// Clients that were refused, and why: the only one that knows it is the server's owner, if the client does not say.
#[derive(Default)]
pub(crate) struct RefusalLog(Mutex<Window>);

#[derive(Default)]
struct Window {
    began: Option<Instant>,
    lines: u32,
    left_out: u64,
}

impl RefusalLog {
    /// `from` is where client `id` comes from.
    pub(crate) fn report(&self, id: u64, from: &str, why: &dyn fmt::Display) {
        let told = {
            let mut window = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            window.tell(Instant::now())
        };
        let Some(left_out) = told else {
            return;
        };
        if left_out > 0 {
            tracing::warn!("{left_out} more clients were refused, which are not listed");
        }
        tracing::warn!("client {id}, from {from}, is refused: {why}");
    }
}

impl Window {
    /// Whether the next one has a line: then, how many had none before it, of which nothing was said yet.
    fn tell(&mut self, now: Instant) -> Option<u64> {
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

fn is_told(count: u64) -> bool {
    count <= TOLD || count.is_power_of_two()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_beyond_some_in_a_minute_are_counted_only() {
        let mut window = Window::default();
        let begin = Instant::now();
        let told = (0..1000).filter(|_| window.tell(begin).is_some()).count();
        assert_eq!(told, REFUSALS as usize);
        let later = begin + REFUSAL_WINDOW;
        assert_eq!(window.tell(later), Some(1000 - u64::from(REFUSALS)));
        assert_eq!(window.tell(later), Some(0));
    }

    #[test]
    fn a_million_failures_are_some_dozen_lines() {
        let lines = (1..=1 << 20).filter(|&count| is_told(count)).count();
        assert_eq!(lines, 16 + 16);
    }
}
