//! Requests that failed at the device, for the server's log. A client that tries again and again does not fill it.

use std::sync::atomic::{AtomicU64, Ordering};

use bcow::Error;

use crate::proto::Request;

/// So many failures are told one by one; then each time their number has doubled.
const TOLD: u64 = 16;

#[derive(Default)]
pub(crate) struct FailureLog {
    count: AtomicU64,
}

impl FailureLog {
    pub(crate) fn report(&self, export: &str, request: &Request, error: &Error) {
        let count = self.count.fetch_add(1, Ordering::Relaxed) + 1;
        if !is_told(count) {
            return;
        }
        let Request {
            command,
            offset,
            length,
            ..
        } = request;
        tracing::error!("{export:?}: {command:?} of {length} bytes at {offset}: {error}");
        if count > TOLD {
            tracing::error!("that was the {count}th failed request; not all are told");
        }
    }
}

fn is_told(count: u64) -> bool {
    count <= TOLD || count.is_power_of_two()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_million_failures_are_some_dozen_lines() {
        let lines = (1..=1 << 20).filter(|&count| is_told(count)).count();
        assert_eq!(lines, 16 + 16);
    }
}
