//! The servers of a process: how many requests run at each, and until when one wants none.
//!
//! Each server has requests of its own, so that one that stalls delays no read from another. At one
//! server, requests begin in the order in which they were made.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Fault, Problem};
use crate::lock::lock;
use crate::retry_budget::RetryBudget;

/// Requests at one time to one server. More would compete for the same network.
pub(crate) const CONNECTIONS: usize = 16;
/// Longest pause that a server can ask for.
const LONGEST_QUIET: Duration = Duration::from_secs(60);
/// Servers that are remembered without a request under way. Redirects can lead to any number.
const IDLE_SERVERS: usize = 64;

#[derive(Default)]
pub(crate) struct Servers {
    /// By `SCHEME://HOST[:PORT]`. The lock is held for a lookup, never during a request.
    known: Mutex<HashMap<String, Arc<Server>>>,
}

#[derive(Default)]
pub(crate) struct Server {
    /// The lock is held to look at the queue and to change it, never during a request.
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    running: usize,
    /// The requests that have not begun, the oldest first.
    waiting: VecDeque<u64>,
    next: u64,
    /// Until when the server wants no request, and why.
    quiet: Option<(Instant, Problem)>,
}

/// A request to a server, until this is dropped.
pub(crate) struct Permit(Arc<Server>);

impl Servers {
    pub(crate) fn get(&self, origin: &str) -> Arc<Server> {
        let mut known = lock(&self.known);
        if let Some(server) = known.get(origin) {
            return Arc::clone(server);
        }
        if known.len() >= IDLE_SERVERS {
            known.retain(|_, server| {
                Arc::strong_count(server) > 1 || lock(&server.queue).is_quiet()
            });
        }
        let server = Arc::<Server>::default();
        known.insert(origin.to_owned(), Arc::clone(&server));
        server
    }
}

impl Queue {
    fn is_quiet(&self) -> bool {
        let quiet = self.quiet.as_ref();
        quiet.is_some_and(|(until, _)| *until > Instant::now())
    }
}

impl Server {
    /// Waits for the turn of a request. While the server wants no request, this waits as long as
    /// `budget` leaves time for one attempt. A request that comes later than that fails with the
    /// reason of the server.
    pub(crate) fn begin(self: &Arc<Self>, budget: &RetryBudget) -> Result<Permit, Fault> {
        let last_start = budget.last_start();
        let is_late = Instant::now() >= last_start;
        let mut queue = lock(&self.queue);
        let ticket = queue.next;
        queue.next += 1;
        queue.waiting.push_back(ticket);
        let result = loop {
            let now = Instant::now();
            let quiet = queue.quiet.as_ref().filter(|(until, _)| *until > now);
            let wake = match quiet {
                Some((_, problem)) if is_late => break Err(problem.clone().permanent()),
                Some((until, _)) if now < last_start => (*until).min(last_start),
                _ if queue.running < CONNECTIONS && queue.waiting.front() == Some(&ticket) => {
                    queue.running += 1;
                    break Ok(Permit(Arc::clone(self)));
                }
                _ => budget.deadline(),
            };
            let Some(left) = wake.checked_duration_since(now).filter(|t| !t.is_zero()) else {
                break Err(Problem::Timeout(budget.longest_silence()).permanent());
            };
            let waited = self.changed.wait_timeout(queue, left);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        };
        queue.waiting.retain(|&other| other != ticket);
        drop(queue);
        self.changed.notify_all();
        result
    }

    /// The server wants no request for this time.
    pub(crate) fn wants_quiet(&self, time: Duration, problem: Problem) {
        let until = Instant::now() + time.min(LONGEST_QUIET);
        let mut queue = lock(&self.queue);
        let is_longer = |(other, _): &(Instant, Problem)| *other < until;
        if queue.quiet.as_ref().is_none_or(is_longer) {
            queue.quiet = Some((until, problem));
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        lock(&self.0.queue).running -= 1;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(time: Duration) -> RetryBudget {
        RetryBudget::reading(time, &Arc::default())
    }

    const LONG: Duration = Duration::from_secs(600);
    const SHORT: Duration = Duration::from_millis(20);

    #[test]
    fn server_whose_requests_all_hang_does_not_delay_another_one() {
        let servers = Servers::default();
        let stalled = servers.get("https://a");
        let hanging: Vec<_> = (0..CONNECTIONS)
            .map(|_| stalled.begin(&budget(LONG)).expect("a place"))
            .collect();
        let late = stalled.begin(&budget(SHORT)).map(drop);
        let late = late.expect_err("no place");
        assert!(matches!(late.problem, Problem::Timeout(_)));
        servers.get("https://b").begin(&budget(LONG)).expect("free");
        drop(hanging);
        stalled.begin(&budget(LONG)).expect("free again");
    }

    #[test]
    fn requests_begin_in_their_order() {
        let server = Arc::<Server>::default();
        let mut running: Vec<_> = (0..CONNECTIONS)
            .map(|_| server.begin(&budget(LONG)).expect("a place"))
            .collect();
        let begun = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for n in 0..4 {
                let (server, begun) = (&server, &begun);
                scope.spawn(move || {
                    let permit = server.begin(&budget(LONG)).expect("a place");
                    begun.lock().expect("no panic").push(n);
                    drop(permit);
                });
                while lock(&server.queue).waiting.len() <= n {
                    std::thread::yield_now();
                }
            }
            // Each that ends lets the next one begin.
            running.pop();
        });
        assert_eq!(begun.into_inner().expect("no panic"), [0, 1, 2, 3]);
    }

    #[test]
    fn server_that_wants_quiet_gets_one_request_when_the_time_is_nearly_over() {
        let server = Arc::<Server>::default();
        server.wants_quiet(LONG, Problem::Busy(429));
        // It waits for two thirds of its time.
        server.begin(&budget(SHORT * 3)).expect("one attempt");
        let over = budget(Duration::ZERO);
        let late = server.begin(&over).map(drop).expect_err("no time is left");
        assert!(matches!(late.problem, Problem::Busy(429)));
        let until = lock(&server.queue).quiet.as_ref().map(|(until, _)| *until);
        assert!(until.is_some_and(|until| until <= Instant::now() + LONGEST_QUIET));
    }

    #[test]
    fn servers_that_are_not_in_use_are_forgotten() {
        let servers = Servers::default();
        let kept = servers.get("https://kept");
        servers
            .get("https://quiet")
            .wants_quiet(LONG, Problem::Busy(503));
        for n in 0..IDLE_SERVERS * 3 {
            servers.get(&format!("https://{n}"));
        }
        assert!(servers.known.lock().expect("no panic").len() <= IDLE_SERVERS);
        assert!(Arc::ptr_eq(&kept, &servers.get("https://kept")));
        assert!(lock(&servers.get("https://quiet").queue).is_quiet());
    }
}
