//! Copies of this process that do one thing with the rights of the user, for a process that enters
//! a sandbox later.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::Pid;

/// Starts a copy of this process, which does `work` and ends. The caller has one thread.
pub fn fork(work: impl FnOnce()) -> io::Result<Pid> {
    // SAFETY: the process has one thread, so the new process is a complete copy of it.
    #[allow(unsafe_code)]
    match unsafe { libc::fork() } {
        0 => {
            // A panic must not continue in the functions that have called this one.
            let _ = catch_unwind(AssertUnwindSafe(work));
            // Not `exit`, which would write what the caller has left in buffers.
            // SAFETY: the call takes an integer.
            #[allow(unsafe_code)]
            unsafe {
                libc::_exit(0)
            }
        }
        -1 => Err(io::Error::last_os_error()),
        pid => Pid::from_raw(pid).ok_or_else(|| Errno::CHILD.into()),
    }
}

/// Whether this process has no other thread.
pub fn has_one_thread() -> bool {
    // SAFETY: the call takes an integer. It changes nothing if the process has one thread, and
    // fails otherwise (unshare(2)).
    #[allow(unsafe_code)]
    let unshared = unsafe { libc::unshare(libc::CLONE_THREAD) };
    // A container manager can have refused the call. Reading the directory takes ten times as long.
    // Without /proc, the count is not known; it is a property of this program alone.
    unshared == 0 || !std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() > 1)
}

/// This process takes the CPU from no other one when it wakes up: for one that wakes up when
/// another one ends, and would delay that end. It is otherwise as fast as before (sched(7),
/// `SCHED_BATCH`).
pub fn let_others_run_first() {
    // SAFETY: the call reads this structure, for which all zero is the priority that it requires.
    #[allow(unsafe_code)]
    unsafe {
        let priority: libc::sched_param = std::mem::zeroed();
        // Nothing else depends on it.
        let _ = libc::sched_setscheduler(0, libc::SCHED_BATCH, &raw const priority);
    }
}

/// Overwrites the value of a variable of the environment, which then is empty: the other processes
/// of the user can read it as long as it is in the memory of this one. This process has one thread.
pub fn forget_variable(name: &CStr) {
    // SAFETY: the value is a string in the memory of this process, where the program may change it.
    // No other thread reads it.
    #[allow(unsafe_code)]
    unsafe {
        let value = libc::getenv(name.as_ptr());
        if !value.is_null() {
            value.write_bytes(0, libc::strlen(value));
        }
    }
}

/// Gives the process a name, the root directory and /dev/null, and closes all descriptors but
/// these: others wait for the end of pipes.
pub fn keep_only(kept: &[RawFd], name: &CStr) -> io::Result<()> {
    rustix::process::chdir("/")?;
    keep_descriptors(kept, name)
}

/// The same without the root directory.
pub fn keep_descriptors(kept: &[RawFd], name: &CStr) -> io::Result<()> {
    let _ = rustix::thread::set_name(name);
    let null = rustix::fs::open("/dev/null", OFlags::RDWR, Mode::empty())?;
    rustix::stdio::dup2_stdin(null.as_fd())?;
    rustix::stdio::dup2_stdout(null.as_fd())?;
    rustix::stdio::dup2_stderr(null.as_fd())?;
    // It is closed below, unless it is one of the three.
    std::mem::forget(null);
    // Linux before 5.9 has no such call, and a container manager can refuse it.
    close_all_but(kept).or_else(|_| close_listed_but(kept))
}

/// Closes the ranges of descriptors between these and the standard streams.
fn close_all_but(kept: &[RawFd]) -> io::Result<()> {
    let mut kept: Vec<u32> = kept.iter().filter_map(|&fd| fd.try_into().ok()).collect();
    kept.sort_unstable();
    let mut first = 3;
    for end in kept.into_iter().chain([u32::MAX]) {
        if first < end {
            close_range(first, end - 1, 0)?;
        }
        first = first.max(end.saturating_add(1));
    }
    Ok(())
}

/// Closes all descriptors above standard error in programs that this process starts from now on:
/// sets the flag that std sets on its own descriptors anyway.
pub fn keep_descriptors_from_programs() {
    /// Linux 5.11. Before, programs inherit these descriptors.
    const CLOSE_RANGE_CLOEXEC: u32 = 4;
    let _ = close_range(3, u32::MAX, CLOSE_RANGE_CLOEXEC);
}

/// Closes these descriptors and those between them. The process uses none of them any more, and
/// drops no object that owns one, unless the flags are for later.
fn close_range(first: u32, last: u32, flags: u32) -> io::Result<()> {
    // SAFETY: the call takes integers.
    #[allow(unsafe_code)]
    let closed = unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) };
    match closed {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// As [`close_all_but`], which takes less time.
fn close_listed_but(kept: &[RawFd]) -> io::Result<()> {
    // The list itself is complete before one is closed.
    let mut open = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd")? {
        open.extend(
            entry?
                .file_name()
                .to_str()
                .and_then(|name| name.parse::<RawFd>().ok()),
        );
    }
    for descriptor in open {
        if descriptor > 2 && !kept.contains(&descriptor) {
            // SAFETY: the call takes an integer. As for `close_range`.
            #[allow(unsafe_code)]
            unsafe {
                libc::close(descriptor)
            };
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alone::is_alone;

    #[test]
    fn other_threads_are_noticed() {
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || ended.recv().is_err());
        assert!(!has_one_thread());
        // A copy has only the thread that made it.
        // SAFETY: the copy makes two calls of the system.
        #[allow(unsafe_code)]
        let status = unsafe {
            match libc::fork() {
                0 => libc::_exit(i32::from(!has_one_thread())),
                copy => {
                    let mut status = -1;
                    libc::waitpid(copy, &raw mut status, 0);
                    status
                }
            }
        };
        assert_eq!(status, 0);
        drop(end);
        assert!(other.join().unwrap());
    }

    #[test]
    fn only_kept_descriptors_stay_open_with_and_without_the_call_for_ranges() {
        if !is_alone("only_kept_descriptors", "BCOW_TEST_OF_DESCRIPTORS") {
            return;
        }
        let open = |number: RawFd| rustix::fs::stat(format!("/proc/self/fd/{number}")).is_ok();
        for close in [close_all_but, close_listed_but] {
            // SAFETY: the call takes integers, and this process has no use of these descriptors.
            #[allow(unsafe_code)]
            for number in 3..20 {
                assert_eq!(unsafe { libc::dup2(1, number) }, number);
            }
            close(&[17, 5, 1, 6]).unwrap();
            let left: Vec<_> = (0..20).filter(|&number| open(number)).collect();
            assert_eq!(left, [0, 1, 2, 5, 6, 17]);
            close(&[]).unwrap();
            assert!((3..20).all(|number| !open(number)));
        }
    }

    #[test]
    fn a_value_that_is_forgotten_is_in_no_file_of_the_process() {
        // Of all tests of this crate, only this one looks at the environment.
        let marked = "BCOW_TEST_OF_FORGETTING";
        if !is_alone("a_value_that_is_forgotten", marked) {
            return;
        }
        forget_variable(c"BCOW_TEST_OF_FORGETTING");
        forget_variable(c"BCOW_TEST_OF_NOTHING");
        assert_eq!(std::env::var(marked).as_deref(), Ok(""));
        let environment = std::fs::read("/proc/self/environ").unwrap();
        assert!(!environment.windows(8).any(|part| part == b"a secret"));
    }
}
