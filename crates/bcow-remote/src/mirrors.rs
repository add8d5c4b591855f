//! Mirrors: other servers that may have the bytes of a file.
//!
//! A mirror is asked only for bytes whose hash is known, so it need not be trusted: it never
//! resolves a name. After a failure, a mirror gets no request for a while.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::address::Address;
use crate::client::Client;
use crate::error::Problem;
use crate::source::{Access, Source};

/// How long a mirror that failed is not asked.
const PAUSE: Duration = Duration::from_secs(60);
/// The same for a mirror that sent wrong bytes.
const PAUSE_AFTER_WRONG_BYTES: Duration = Duration::from_secs(600);

/// A server that may have what other servers have.
pub(crate) struct Mirror {
    base: Address,
    started: Instant,
    /// Milliseconds from `started` until the mirror is asked again; 0 without a failure.
    paused_until: AtomicU64,
}

impl Mirror {
    pub(crate) fn new(base: Address) -> Self {
        Mirror {
            base,
            started: Instant::now(),
            paused_until: AtomicU64::new(0),
        }
    }

    /// The address of a file on the mirror, which has this path on its own server.
    pub(crate) fn address(&self, path: &str) -> Result<Address, Problem> {
        self.base.with_path(path)
    }

    /// Host and port, for lookups of credentials.
    pub(crate) fn server(&self) -> &str {
        self.base.server()
    }

    pub(crate) fn is_usable(&self) -> bool {
        self.now() >= self.paused_until.load(Ordering::Relaxed)
    }

    /// Reacts to a failure at `place`, which names the mirror.
    pub(crate) fn failed(&self, problem: &Problem, place: &str) {
        let pause = match problem {
            Problem::WrongBytes
            | Problem::Changed
            | Problem::WrongRoot { .. }
            | Problem::WrongDigest(_) => PAUSE_AFTER_WRONG_BYTES,
            _ => PAUSE,
        };
        tracing::warn!(
            "{place}: {problem}; this mirror is not asked for {} s",
            pause.as_secs()
        );
        let until = self.now() + pause.as_millis() as u64;
        self.paused_until.fetch_max(until, Ordering::Relaxed);
    }

    fn now(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }
}

/// The servers that may have a file: the one that its name leads to, and mirrors.
pub(crate) struct Sources {
    pub(crate) origin: Source,
    mirrors: Vec<OnMirror>,
}

/// A file on a mirror.
pub(crate) struct OnMirror {
    mirror: Arc<Mirror>,
    pub(crate) source: Source,
    /// The mirror does not have the file.
    is_absent: AtomicBool,
}

impl Sources {
    pub(crate) fn new(origin: Source) -> Self {
        Sources {
            origin,
            mirrors: Vec::new(),
        }
    }

    /// Adds the file on a mirror, which has this path on its own server.
    pub(crate) fn add(
        &mut self,
        mirror: &Arc<Mirror>,
        path: &str,
        client: &Arc<Client>,
        access: Access,
    ) -> Result<(), Problem> {
        let address = mirror.address(path)?;
        self.mirrors.push(OnMirror {
            mirror: Arc::clone(mirror),
            source: Source::new(Arc::clone(client), address, access),
            is_absent: AtomicBool::new(false),
        });
        Ok(())
    }

    /// The copies on mirrors that are not left alone at the moment, in the order of the mirrors.
    pub(crate) fn usable(&self) -> impl Iterator<Item = &OnMirror> {
        self.mirrors
            .iter()
            .filter(|copy| !copy.is_absent.load(Ordering::Relaxed) && copy.mirror.is_usable())
    }

    /// The file on the server that its name leads to, and the copies on mirrors.
    pub(crate) fn into_parts(self) -> (Source, Vec<(Arc<Mirror>, Source)>) {
        let copies = self.mirrors.into_iter();
        let copies = copies.map(|copy| (copy.mirror, copy.source)).collect();
        (self.origin, copies)
    }

    /// The address on the server that the name leads to.
    pub(crate) fn address(&self) -> &Address {
        self.origin.address()
    }
}

impl OnMirror {
    /// Reacts to a failure at `place`, which names the mirror.
    pub(crate) fn failed(&self, problem: &Problem, place: &str) {
        match problem {
            Problem::NotFound(_) => {
                tracing::debug!("{place}: {problem}");
                self.is_absent.store(true, Ordering::Relaxed);
            }
            problem => self.mirror.failed(problem, place),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mirror_that_failed_is_left_alone() {
        let base = Address::parse("https://mirror:5000/base/").expect("an address");
        let mirror = Mirror::new(base);
        assert!(mirror.is_usable());
        let address = mirror.address("/v2/a/blobs/x").expect("an address");
        assert_eq!(address.to_string(), "https://mirror:5000/base/v2/a/blobs/x");
        mirror.failed(&Problem::Busy(503), "there");
        assert!(!mirror.is_usable());
    }
}
