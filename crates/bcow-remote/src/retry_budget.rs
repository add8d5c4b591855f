//! The time and the attempts that an operation has, and the pauses between its attempts.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Fault, Problem};
use crate::figures::Counters;

/// The first pause; each further one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Attempts of an operation that opens a file: a wrong address should fail soon.
const OPENING_ATTEMPTS: u32 = 3;
/// How long an upload waits for a server that limits the requests, in time-outs: no program waits
/// for it.
const PATIENCE: u32 = 5;

/// The time and the attempts that are left for one operation, such as a read.
pub(crate) struct RetryBudget {
    timeout: Duration,
    /// The time from one progress to the next.
    time: Duration,
    deadline: Instant,
    /// Attempts that a server refuses because of their number do not count.
    is_patient: bool,
    attempts: u32,
    most_attempts: u32,
    /// Why the attempt before the current one failed.
    before: Option<Problem>,
    counters: Arc<Counters>,
}

impl RetryBudget {
    /// For a read of an open file: any number of attempts in `timeout`.
    pub(crate) fn reading(timeout: Duration, counters: &Arc<Counters>) -> Self {
        RetryBudget {
            timeout,
            time: timeout,
            deadline: Instant::now() + timeout,
            is_patient: false,
            attempts: 0,
            most_attempts: u32::MAX,
            before: None,
            counters: Arc::clone(counters),
        }
    }

    /// For one request of another process, which attempts it again itself. `left` is the time that
    /// is left of its own budget.
    pub(crate) fn of_request(timeout: Duration, left: Duration, counters: &Arc<Counters>) -> Self {
        let longest = Duration::from_secs(24 * 3600);
        RetryBudget {
            time: left,
            deadline: Instant::now() + left.min(longest),
            ..RetryBudget::reading(timeout.min(longest), counters)
        }
    }

    /// For the first request for a file: few attempts, in `timeout`.
    pub(crate) fn opening(timeout: Duration, counters: &Arc<Counters>) -> Self {
        RetryBudget {
            most_attempts: OPENING_ATTEMPTS,
            ..RetryBudget::reading(timeout, counters)
        }
    }

    /// For a request of an upload: few attempts, except at a server that limits the requests.
    pub(crate) fn uploading(timeout: Duration, counters: &Arc<Counters>) -> Self {
        let time = timeout * PATIENCE;
        RetryBudget {
            time,
            deadline: Instant::now() + time,
            is_patient: true,
            ..RetryBudget::opening(timeout, counters)
        }
    }

    /// The time that the operation had at its begin, and that one server may take.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// The latest time at which an attempt has the time that a server may be silent for.
    pub(crate) fn last_start(&self) -> Instant {
        let silence = self.longest_silence();
        self.deadline.checked_sub(silence).unwrap_or(self.deadline)
    }

    /// The end of the time. No attempt continues after it.
    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// The longest time in which a server may send nothing: a third of all the time, so that an
    /// attempt whose connection stalls leaves time for another one.
    pub(crate) fn longest_silence(&self) -> Duration {
        (self.timeout / 3).max(Duration::from_millis(50))
    }

    /// The time that is left.
    pub(crate) fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// The server was not waited for during this time.
    pub(crate) fn shift(&mut self, time: Duration) {
        self.deadline += time;
    }

    /// Extends the time to that of one attempt, if less is left.
    pub(crate) fn leave_an_attempt(&mut self) {
        let attempt = Instant::now() + self.longest_silence();
        self.deadline = self.deadline.max(attempt);
    }

    /// Right bytes have arrived: the time starts again.
    pub(crate) fn progress(&mut self) {
        self.deadline = Instant::now() + self.time;
        self.attempts = 0;
        self.before = None;
    }

    /// Attempts something until it succeeds, or until no attempt is left.
    pub(crate) fn run<T>(
        mut self,
        attempt: impl Fn(&RetryBudget) -> Result<T, Fault>,
    ) -> Result<T, Problem> {
        loop {
            match attempt(&self) {
                Ok(value) => return Ok(value),
                Err(fault) => self.wait(fault)?,
            }
        }
    }

    /// Counts a failed attempt after which another server is asked.
    pub(crate) fn give_up(&self, problem: &Problem) {
        self.counters.failed(problem);
    }

    /// Waits before the next attempt; fails if no time is left.
    pub(crate) fn wait(&mut self, fault: Fault) -> Result<(), Problem> {
        self.attempts += 1;
        self.counters.failed(&fault.problem);
        let problem = self.telling(fault.problem);
        if !fault.is_transient {
            return Err(problem);
        }
        let doubled = FIRST_PAUSE.saturating_mul(1 << (self.attempts - 1).min(10));
        let longest = doubled.min(LONGEST_PAUSE);
        // Half of the pause is random, so that clients that failed together come back one after the
        // other.
        let pause = longest / 2 + longest.mul_f64(random() / 2.0);
        let is_late = self
            .deadline
            .checked_duration_since(Instant::now())
            .is_none_or(|left| left <= pause);
        let is_last = self.attempts >= self.most_attempts;
        if (is_last && !(self.is_patient && problem.is_throttling())) || is_late {
            return Err(problem);
        }
        tracing::debug!("again in {} ms: {problem}", pause.as_millis());
        self.before = Some(problem);
        std::thread::sleep(pause);
        self.counters.tried_again();
        Ok(())
    }

    /// The problem to report: that of the attempt before, if the deadline left the last attempt
    /// less time than a server may be silent for. Its time-out says nothing about the server.
    fn telling(&mut self, last: Problem) -> Problem {
        let cut_short = matches!(&last, Problem::Timeout(time) if *time < self.longest_silence());
        match self.before.take() {
            Some(before) if cut_short => before,
            _ => last,
        }
    }
}

/// A number from 0 to 1. It need not be unpredictable.
fn random() -> f64 {
    let bits = RandomState::new().build_hasher().finish();
    bits as f64 / u64::MAX as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permanent_fault_is_not_tried_again() {
        let mut budget = RetryBudget::reading(Duration::from_secs(60), &Arc::default());
        budget
            .wait(Problem::NotFound(404).permanent())
            .expect_err("no retry");
    }

    #[test]
    fn a_pause_beyond_the_deadline_is_not_begun() {
        let mut budget = RetryBudget::reading(Duration::ZERO, &Arc::default());
        let fault = Problem::Busy(429).transient();
        budget.wait(fault).expect_err("too long");
    }

    #[test]
    fn an_attempt_cut_short_by_the_deadline_does_not_hide_the_cause() {
        let mut budget = RetryBudget::reading(Duration::from_secs(60), &Arc::default());
        let cause = Problem::Connection("refused".into());
        budget.wait(cause.transient()).expect("time is left");
        let cut = Problem::Timeout(Duration::from_millis(1));
        let reported = budget.wait(cut.permanent()).expect_err("the end");
        assert!(matches!(reported, Problem::Connection(_)), "{reported}");
        budget.wait(Problem::Busy(503).transient()).expect("time");
        let silent = Problem::Timeout(budget.longest_silence());
        let reported = budget.wait(silent.permanent()).expect_err("the end");
        assert!(matches!(reported, Problem::Timeout(_)), "{reported}");
    }

    #[test]
    fn upload_waits_for_a_server_that_limits_requests_and_for_no_other() {
        let budget = || RetryBudget::uploading(Duration::from_secs(60), &Arc::default());
        let mut patient = budget();
        for _ in 0..=OPENING_ATTEMPTS {
            let limited = patient.wait(Problem::Busy(429).transient());
            limited.expect("time is left");
        }
        let mut attempts = 1;
        let mut other = budget();
        while other.wait(Problem::Busy(500).transient()).is_ok() {
            attempts += 1;
        }
        assert_eq!(attempts, OPENING_ATTEMPTS);
    }

    #[test]
    fn opening_ends_after_some_attempts() {
        let mut budget = RetryBudget::opening(Duration::from_secs(60), &Arc::default());
        let mut attempts = 1;
        while budget.wait(Problem::Busy(503).transient()).is_ok() {
            attempts += 1;
        }
        assert_eq!(attempts, OPENING_ATTEMPTS);
    }
}
