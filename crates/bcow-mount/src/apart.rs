//! Calls that wait for this very process.
//!
//! While a thread mounts or unmounts the file system, the kernel waits for other threads of the
//! process, which serve its blocks. If the process is killed then, those threads end, but the
//! waiting thread cannot be interrupted. As long as it shares the table of descriptors, it also
//! keeps `/dev/fuse` open, so the kernel would never learn that nothing answers any more: the
//! process would hang forever.

#![allow(unsafe_code)]

/// Runs `work` in a thread without the descriptors of this process, other than the standard
/// streams. `work` must not use or drop an object that has a descriptor. Returns `None` if no
/// thread can be started.
pub fn run_apart<T: Send>(work: impl FnOnce() -> T + Send) -> Option<T> {
    const CLOSE_RANGE_UNSHARE: libc::c_int = 2;
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .name("apart".into())
            .spawn_scoped(scope, || {
                // SAFETY: The call takes only integers. With this flag, the thread gets a copy of
                // the table, and the call closes descriptors of the copy only, which no object of
                // this thread has. Where a kernel refuses, the thread keeps the descriptors.
                unsafe {
                    libc::syscall(
                        libc::SYS_close_range,
                        3 as libc::c_uint,
                        libc::c_uint::MAX,
                        CLOSE_RANGE_UNSHARE,
                    );
                }
                work()
            })
            .ok()?;
        thread.join().ok()
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn other_threads_keep_their_descriptors() {
        let file = tempfile::tempfile().unwrap();
        let link = format!("/proc/thread-self/fd/{}", file.as_raw_fd());
        assert!(std::fs::read_link(&link).is_ok());
        assert!(run_apart(|| std::fs::read_link(&link)).unwrap().is_err());
        assert!(std::fs::read_link(&link).is_ok());
    }
}
