//! Counters: what each server was asked and sent, what failed, and what waits.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::error::Problem;
use crate::lock::lock;

/// Servers that are counted each on its own. Redirects can lead to any number.
const SERVERS: usize = 16;
/// The name under which further servers are counted together.
const OTHER_SERVERS: &str = "other";
/// The rate is that of the last seconds, as many as this.
const RATE_SECONDS: u64 = 10;
/// Seconds that are kept: those of the rate, the running one, and some that no thread uses.
const KEPT_SECONDS: usize = 16;

/// Counters of all remote files of a process.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Figures {
    /// Bytes that were fetched and checked.
    pub fetched_bytes: u64,
    /// Bytes that were read from the cache on the disk and checked.
    pub cached_bytes: u64,
    /// Requests of every kind, and the bytes of their answers, by server.
    pub servers: Vec<ServerFigures>,
    /// Bytes per second that arrived during the last ten seconds, from all servers.
    pub bytes_per_second: u64,
    /// Requests whose answers have not arrived completely.
    pub running_requests: u64,
    /// Reads that wait for a server.
    pub waiting_reads: u64,
    /// The time that the longest of these reads has waited.
    pub longest_wait: Duration,
    /// Attempts after a failed one.
    pub retries: u64,
    /// Tokens that token servers have issued.
    pub tokens: u64,
    /// Failed attempts by kind (see [`Problem::kind`]), with zeros.
    #[serde(skip)]
    pub errors: Vec<(&'static str, u64)>,
}

/// Counters of one server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerFigures {
    /// `https://HOST[:PORT]`; or `other` for all servers after the first sixteen.
    pub server: String,
    pub requests: u64,
    /// Bytes of the bodies of its answers.
    pub received_bytes: u64,
}

/// The counters behind [`Figures`].
#[derive(Default)]
pub(crate) struct Counters {
    /// When the first bytes arrived, or the rate was asked for.
    started: OnceLock<Instant>,
    /// The lock is held for a lookup before a request, never during one.
    servers: Mutex<Vec<Arc<Traffic>>>,
    seconds: [Second; KEPT_SECONDS],
    pub(crate) running_requests: AtomicU64,
    retries: AtomicU64,
    pub(crate) tokens: AtomicU64,
    errors: [AtomicU64; Problem::KINDS.len()],
    /// When each waiting read began to wait. The lock is held to add, remove or look through
    /// entries, never during a request.
    waiting: Mutex<BTreeMap<u64, Instant>>,
    next_wait: AtomicU64,
}

/// The traffic of one server.
pub(crate) struct Traffic {
    server: String,
    requests: AtomicU64,
    received_bytes: AtomicU64,
}

/// Bytes of one second.
#[derive(Default)]
struct Second {
    /// Counts from 1, from the start.
    number: AtomicU64,
    bytes: AtomicU64,
}

/// A read that waits for a server until this is dropped.
pub(crate) struct Waiting<'c> {
    counters: &'c Counters,
    number: u64,
}

impl Counters {
    /// Counts a request to a server. Its answer counts with what this returns.
    pub(crate) fn request(&self, server: String) -> Arc<Traffic> {
        let mut servers = lock(&self.servers);
        let server =
            if !servers.iter().any(|known| known.server == server) && servers.len() >= SERVERS {
                OTHER_SERVERS.to_owned()
            } else {
                server
            };
        let known = servers.iter().find(|known| known.server == server);
        let traffic = known.cloned().unwrap_or_else(|| {
            let new = Arc::new(Traffic {
                server,
                requests: AtomicU64::new(0),
                received_bytes: AtomicU64::new(0),
            });
            servers.push(Arc::clone(&new));
            new
        });
        traffic.requests.fetch_add(1, Ordering::Relaxed);
        traffic
    }

    /// Counts bytes of an answer.
    pub(crate) fn received(&self, traffic: &Traffic, bytes: u64) {
        traffic.received_bytes.fetch_add(bytes, Ordering::Relaxed);
        let now = self.second();
        let second = &self.seconds[now as usize % KEPT_SECONDS];
        // Two threads that begin a second at the same time may lose the bytes of one of them, which
        // the rate does not show.
        if second.number.swap(now, Ordering::Relaxed) != now {
            second.bytes.store(0, Ordering::Relaxed);
        }
        second.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts a failed attempt.
    pub(crate) fn failed(&self, problem: &Problem) {
        let kind = problem.kind();
        if let Some(place) = Problem::KINDS.iter().position(|known| *known == kind) {
            self.errors[place].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts an attempt after a failed one.
    pub(crate) fn tried_again(&self) {
        self.retries.fetch_add(1, Ordering::Relaxed);
    }

    /// A read begins to wait.
    pub(crate) fn wait(&self) -> Waiting<'_> {
        let number = self.next_wait.fetch_add(1, Ordering::Relaxed);
        lock(&self.waiting).insert(number, Instant::now());
        Waiting {
            counters: self,
            number,
        }
    }

    /// The number of the running second, from 1 on.
    fn second(&self) -> u64 {
        let started = self.started.get_or_init(Instant::now);
        started.elapsed().as_secs() + 1
    }

    fn bytes_per_second(&self) -> u64 {
        let now = self.second();
        let span = RATE_SECONDS.min(now - 1);
        let recent = self.seconds.iter().filter(|second| {
            let number = second.number.load(Ordering::Relaxed);
            number < now && number + span >= now
        });
        let bytes: u64 = recent
            .map(|second| second.bytes.load(Ordering::Relaxed))
            .sum();
        bytes.checked_div(span).unwrap_or(0)
    }

    /// The counters at this moment, except those of checked bytes.
    pub(crate) fn figures(&self) -> Figures {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let servers = lock(&self.servers);
        let servers = servers.iter().map(|traffic| ServerFigures {
            server: traffic.server.clone(),
            requests: get(&traffic.requests),
            received_bytes: get(&traffic.received_bytes),
        });
        let servers = servers.collect();
        let waiting = lock(&self.waiting);
        Figures {
            servers,
            bytes_per_second: self.bytes_per_second(),
            running_requests: get(&self.running_requests),
            waiting_reads: waiting.len() as u64,
            longest_wait: waiting
                .values()
                .map(Instant::elapsed)
                .max()
                .unwrap_or_default(),
            retries: get(&self.retries),
            tokens: get(&self.tokens),
            errors: Problem::KINDS
                .iter()
                .zip(&self.errors)
                .map(|(kind, count)| (*kind, get(count)))
                .collect(),
            ..Figures::default()
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        lock(&self.counters.waiting).remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_beyond_the_limit_are_counted_together() {
        let counters = Counters::default();
        for n in 0..SERVERS + 5 {
            let traffic = counters.request(format!("https://host-{n}"));
            counters.received(&traffic, 10);
        }
        let again = counters.request("https://host-0".to_owned());
        counters.received(&again, 1);
        let servers = counters.figures().servers;
        assert_eq!(servers.len(), SERVERS + 1);
        assert_eq!((servers[0].requests, servers[0].received_bytes), (2, 11));
        let other = &servers[SERVERS];
        assert_eq!(other.server, OTHER_SERVERS);
        assert_eq!((other.requests, other.received_bytes), (5, 50));
    }

    #[test]
    fn reads_wait_until_they_end() {
        let counters = Counters::default();
        let first = counters.wait();
        let second = counters.wait();
        assert_eq!(counters.figures().waiting_reads, 2);
        drop(first);
        assert_eq!(counters.figures().waiting_reads, 1);
        drop(second);
        let figures = counters.figures();
        assert_eq!(
            (figures.waiting_reads, figures.longest_wait),
            (0, Duration::ZERO)
        );
    }

    #[test]
    fn every_kind_of_error_is_counted() {
        let counters = Counters::default();
        counters.failed(&Problem::Busy(503));
        counters.failed(&Problem::WrongBytes);
        counters.failed(&Problem::Redirects(5));
        let errors = counters.figures().errors;
        assert_eq!(errors.iter().map(|(_, count)| count).sum::<u64>(), 3);
        assert!(errors.contains(&("busy", 1)) && errors.contains(&("timeout", 0)));
    }
}
