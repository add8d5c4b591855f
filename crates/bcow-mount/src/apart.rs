//! Calls that wait for this very process.
//!
//! While a thread opens the hidden file, attaches it to a loop device (the kernel synchronizes the
//! file then), or mounts or unmounts the file system, the kernel waits for other threads of the
//! process, which serve its blocks. If the process is killed then, those threads end, but the
//! waiting thread cannot be interrupted. As long as it shares the table of descriptors, it also
//! keeps `/dev/fuse` open, so the kernel would never learn that nothing answers any more: the
//! process would hang forever.

#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd};

/// The standard streams have the descriptors below this one.
const FIRST: libc::c_uint = 3;

/// Runs `work` in a thread without the descriptors of this process, other than the standard
/// streams. `work` must not use or drop an object that has a descriptor and that it did not make.
/// Returns `None` if no thread can be started.
pub fn run_apart<T: Send>(work: impl FnOnce() -> T + Send) -> Option<T> {
    run(None, work)
}

/// As [`run_apart`]; but the thread also has the descriptor `kept`.
pub fn run_apart_with<T: Send>(kept: BorrowedFd<'_>, work: impl FnOnce() -> T + Send) -> Option<T> {
    run(Some(kept), work)
}

fn run<T: Send>(kept: Option<BorrowedFd<'_>>, work: impl FnOnce() -> T + Send) -> Option<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .name("apart".into())
            .spawn_scoped(scope, || {
                close_others(kept);
                work()
            })
            .ok()?;
        thread.join().ok()
    })
}

/// Gives this thread a table of descriptors of its own, without those of the process. Where a
/// kernel refuses, the thread keeps the descriptors.
fn close_others(kept: Option<BorrowedFd<'_>>) {
    const CLOSE_RANGE_UNSHARE: libc::c_int = 2;
    // Descriptors are not negative.
    let kept = kept.map(|kept| kept.as_raw_fd().unsigned_abs());
    let above = kept.map_or(FIRST, |kept| (kept + 1).max(FIRST));
    // SAFETY: The call takes only integers. With this flag, the thread gets a copy of the table,
    // and the call closes descriptors of the copy only, which no object of this thread has.
    let result = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            above,
            libc::c_uint::MAX,
            CLOSE_RANGE_UNSHARE,
        )
    };
    let Some(kept) = kept.filter(|kept| result == 0 && *kept > FIRST) else {
        return;
    };
    // SAFETY: As above. The first call has succeeded, so the table is that of this thread.
    unsafe {
        libc::syscall(libc::SYS_close_range, FIRST, kept - 1, 0 as libc::c_int);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;

    fn link_of(file: &File) -> String {
        format!("/proc/thread-self/fd/{}", file.as_raw_fd())
    }

    #[test]
    fn other_threads_keep_their_descriptors() {
        let file = tempfile::tempfile().unwrap();
        let link = link_of(&file);
        assert!(std::fs::read_link(&link).is_ok());
        assert!(run_apart(|| std::fs::read_link(&link)).unwrap().is_err());
        assert!(std::fs::read_link(&link).is_ok());
    }

    #[test]
    fn only_the_kept_descriptor_stays() {
        let files = [(); 3].map(|()| tempfile::tempfile().unwrap());
        let links = files.each_ref().map(link_of);
        let found = run_apart_with(files[1].as_fd(), || {
            links
                .each_ref()
                .map(|link| std::fs::read_link(link).is_ok())
        });
        assert_eq!(found, Some([false, true, false]));
        for link in &links {
            assert!(std::fs::read_link(link).is_ok());
        }
        // A standard stream stays anyway.
        let found = run_apart_with(std::io::stdout().as_fd(), || {
            links
                .each_ref()
                .map(|link| std::fs::read_link(link).is_ok())
        });
        assert_eq!(found, Some([false; 3]));
    }
}
