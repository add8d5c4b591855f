//! Limits of the memory and bandwidth that clients use.

use std::time::{Duration, Instant};

use crate::sync::{Condvar, Mutex, lock, wait_timeout};

/// Memory for large requests: one budget for the whole server, in bytes.
pub(crate) struct Memory {
    left: Mutex<u64>,
    freed: Condvar,
}

impl Memory {
    pub(crate) fn new(bytes: u64) -> Self {
        Memory {
            left: Mutex::new(bytes),
            freed: Condvar::new(),
        }
    }

    /// Reserves `bytes`. Waits up to `timeout` for other requests to release memory; `false` if
    /// that is not enough.
    pub(crate) fn reserve(&self, bytes: u64, timeout: Duration) -> bool {
        let mut left = lock(&self.left);
        let end = Instant::now() + timeout;
        while *left < bytes {
            let rest = end.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                break;
            }
            (left, _) = wait_timeout(&self.freed, &self.left, left, rest);
        }
        let is_enough = *left >= bytes;
        if is_enough {
            *left -= bytes;
        }
        is_enough
    }

    /// Releases reserved bytes.
    pub(crate) fn release(&self, bytes: u64) {
        *lock(&self.left) += bytes;
        self.freed.notify_all();
    }
}

/// How much unused time a client may catch up on at once.
const BURST: Duration = Duration::from_secs(1);

/// Limits a client to a number of bytes per second, with a burst of one second.
pub(crate) struct Rate {
    bytes_per_second: u64,
    /// The time at which all requested bytes are due at the limited rate.
    due: Mutex<Instant>,
}

impl Rate {
    pub(crate) fn new(bytes_per_second: u64) -> Self {
        let now = Instant::now();
        Rate {
            bytes_per_second: bytes_per_second.max(1),
            due: Mutex::new(now.checked_sub(BURST).unwrap_or(now)),
        }
    }

    /// How long to wait before the next `bytes`.
    pub(crate) fn delay(&self, bytes: u64) -> Duration {
        self.delay_at(Instant::now(), bytes)
    }

    fn delay_at(&self, now: Instant, bytes: u64) -> Duration {
        let mut due = lock(&self.due);
        let delay = due.saturating_duration_since(now);
        let cost = bytes as f64 / self.bytes_per_second as f64;
        // Limit the cost to about a year, so that the time does not overflow.
        let from = now.checked_sub(BURST).map_or(*due, |least| least.max(*due));
        *due = from + Duration::from_secs_f64(cost.min(3e7));
        delay
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_memory_can_be_reserved_again() {
        let memory = Memory::new(10);
        assert!(memory.reserve(8, Duration::ZERO));
        assert!(!memory.reserve(3, Duration::ZERO));
        memory.release(8);
        assert!(memory.reserve(10, Duration::ZERO));
    }

    #[test]
    fn bytes_beyond_the_rate_wait() {
        let rate = Rate::new(1000);
        let start = *rate.due.lock().unwrap() + BURST;
        let later = |ms: u64| start + Duration::from_millis(ms);
        assert_eq!(rate.delay_at(later(0), 1000), Duration::ZERO);
        // The burst allowed the first second's bytes at once.
        assert_eq!(rate.delay_at(later(0), 500), Duration::ZERO);
        assert_eq!(rate.delay_at(later(0), 1), Duration::from_millis(500));
        assert_eq!(rate.delay_at(later(501), 1), Duration::ZERO);
    }
}
