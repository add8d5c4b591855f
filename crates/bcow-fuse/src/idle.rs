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
/// time after the mount.
pub(crate) fn watch(stats: &Arc<MountStats>) {
    let stats = Arc::downgrade(stats);
    // Without the thread, the caches stay.
    let _ = std::thread::Builder::new()
        .name("idle".into())
        .spawn(move || {
            let mut seen = 0;
            let mut is_released = true;
            loop {
                std::thread::sleep(REST);
                let Some(stats) = stats.upgrade() else {
                    return;
                };
                let requests = stats.requests();
                if requests != seen {
                    (seen, is_released) = (requests, false);
                } else if !is_released {
                    bcow_mount::release_heap(|| stats.release_memory());
                    is_released = true;
                }
            }
        });
}
