//! The memory of a mount at rest.
//!
//! A machine may have hundreds of mounts, most of them at rest. The kernel caches what programs
//! have read, so the caches of this process then serve no purpose.

use std::sync::Arc;
use std::time::Duration;

use crate::stats::MountStats;

/// A mount is at rest when no request came for this long.
const REST: Duration = Duration::from_secs(10);

/// Starts a thread that releases the caches whenever the mount comes to rest. The thread ends some
/// time after the mount. The caches of a pool belong to all its mounts, so a mount in a pool has no
/// such thread.
pub(crate) fn watch(stats: &Arc<MountStats>) {
    if stats.pool().is_some() {
        return;
    }
    let stats = Arc::downgrade(stats);
    watch_all(move || {
        let stats = stats.upgrade()?;
        let requests = stats.requests();
        Some((requests, move || stats.release_memory()))
    });
}

/// Starts a thread that looks at the number of requests at intervals, and releases caches when it
/// did not change. `look` returns that number and the function that releases; the thread ends with
/// the first `None`.
pub fn watch_all<F: FnOnce()>(look: impl Fn() -> Option<(u64, F)> + Send + 'static) {
    // Without the thread, the caches stay.
    let _ = std::thread::Builder::new()
        .name("idle".into())
        .spawn(move || {
            let mut seen = 0;
            let mut is_released = true;
            loop {
                std::thread::sleep(REST);
                let Some((requests, release)) = look() else {
                    return;
                };
                if requests != seen {
                    (seen, is_released) = (requests, false);
                } else if !is_released {
                    bcow_mount::release_heap(release);
                    is_released = true;
                }
            }
        });
}
