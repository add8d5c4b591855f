//! The limit on open descriptors: closes those that are not in use.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::process::{Resource, Rlimit};

use super::UnionFs;
use super::nodes::{Content, HostPlace, NodeState, Upper};

/// Descriptors of an open partial file: its host file and its map.
const DESCRIPTORS_OF_PARTIAL: usize = 2;

/// With a smaller share, most requests would look for descriptors to close.
const LEAST_SHARE: usize = 16;

/// The number of unions of this process, each with a [`Share`].
static UNIONS: AtomicUsize = AtomicUsize::new(0);

impl UnionFs {
    /// Closes idle descriptors if nodes and open partial files hold more than the limit. Every
    /// request calls this before it acquires a lock, because it may open a descriptor.
    pub(super) fn limit_descriptors(&self) {
        self.limit_descriptors_to(self.descriptors_share.now());
    }

    pub(super) fn limit_descriptors_to(&self, share: usize) {
        let limit = share.max(self.descriptors_least.load(Ordering::Relaxed));
        if self.descriptors_held() <= limit {
            return;
        }
        self.close_idle_descriptors(false);
        // Most of the others belong to partial files with unflushed data.
        if self.descriptors_held() > limit / 2 {
            self.close_idle_descriptors(true);
        }
        // If most descriptors are in use, the next attempt must not follow soon: it would visit all
        // nodes and close few descriptors.
        self.descriptors_least
            .store(2 * self.descriptors_held(), Ordering::Relaxed);
    }

    /// Closes descriptors that are not in use, and counts the others. With `flush`, also flushes
    /// and closes partial files with unflushed data.
    pub(super) fn close_idle_descriptors(&self, flush: bool) {
        for (partial, node) in self.open_partials.all() {
            if node.strong_count() > 0 {
                continue;
            }
            if flush && !partial.is_recorded() {
                let _ = partial.flush(self.durability());
            }
            self.open_partials.drop_unused(partial);
        }
        // The count begins again. Concurrent threads count the descriptors that they open from here
        // on, so some of these can count twice; none is missed.
        self.descriptors.store(0, Ordering::Relaxed);
        let mut held = 0;
        self.table.for_each(&mut |node| {
            // Another thread uses the node.
            let Some(mut state) = node.try_write_state() else {
                held += 1;
                return;
            };
            let can_be_found_again = match node.place() {
                HostPlace::At { .. } => true,
                HostPlace::Root | HostPlace::Nowhere => false,
            };
            if can_be_found_again {
                self.close_partial(&mut state, flush);
            }
            match &mut state.upper {
                // Another thread that references the file may be about to remove its name, and then
                // no request could open the file again.
                Some(Upper {
                    file: Some(file),
                    in_batch: false,
                    ..
                }) if !can_be_found_again || Arc::strong_count(file) > 1 => held += 1,
                Some(Upper {
                    file: file @ Some(_),
                    is_fully_open,
                    in_batch: false,
                    ..
                }) => {
                    *file = None;
                    *is_fully_open = false;
                }
                Some(Upper { file: Some(_), .. }) => held += 1,
                _ => {}
            }
        });
        self.descriptors.fetch_add(held, Ordering::Relaxed);
    }

    /// Upper bound of the descriptors that nodes and open partial files hold.
    fn descriptors_held(&self) -> usize {
        let partials = usize::try_from(self.partials.open_count()).unwrap_or(usize::MAX);
        self.descriptors
            .load(Ordering::Relaxed)
            .saturating_add(partials.saturating_mul(DESCRIPTORS_OF_PARTIAL))
    }

    /// Closes the partial file of a node, if all its data is recorded. A name must lead to the
    /// node, so that a later request can open the partial file again. The caller holds the lock of
    /// the node's state.
    fn close_partial(&self, state: &mut NodeState, flush: bool) {
        let Content::Partial(partial) = &state.content else {
            return;
        };
        if flush && !partial.is_recorded() {
            // After an error the partial file stays open, and a later fsync returns the error.
            let _ = partial.flush(self.durability());
        }
        if self.open_partials.close(&mut state.content)
            && let Some(upper) = &mut state.upper
        {
            upper.needs_image = true;
            upper.is_partial = true;
        }
    }
}

/// The descriptors that the nodes and open partial files of a union may hold: a share of those of
/// the process, which all unions of the process have. An idle union keeps more until the next pass
/// of its background thread.
#[derive(Debug)]
pub(super) struct Share {
    of_all: usize,
}

impl Share {
    /// Raises the limit of descriptors of the process to its hard limit. All unions together have
    /// half of the limit.
    pub(super) fn new() -> Self {
        let limits = rustix::process::getrlimit(Resource::Nofile);
        if limits.current != limits.maximum {
            let raised = Rlimit {
                current: limits.maximum,
                maximum: limits.maximum,
            };
            let _ = rustix::process::setrlimit(Resource::Nofile, raised);
        }
        let of_all = match rustix::process::getrlimit(Resource::Nofile).current {
            Some(limit) => usize::try_from(limit / 2).unwrap_or(usize::MAX),
            None => 1 << 19,
        };
        UNIONS.fetch_add(1, Ordering::Relaxed);
        Share { of_all }
    }

    fn now(&self) -> usize {
        (self.of_all / UNIONS.load(Ordering::Relaxed).max(1)).max(LEAST_SHARE)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        UNIONS.fetch_sub(1, Ordering::Relaxed);
    }
}
