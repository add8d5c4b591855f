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
    // Not close_range, which needs Linux 5.9. The list itself is complete before one is closed.
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
            // SAFETY: the call takes an integer. This process uses none of these descriptors any
            // more, and drops no object that owns one.
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
    fn a_value_that_is_forgotten_is_in_no_file_of_the_process() {
        // Of all tests of this crate, only this one looks at the environment, in a process of its
        // own.
        let marked = "BCOW_TEST_OF_FORGETTING";
        if std::env::var(marked).is_err() {
            let this = std::env::current_exe().unwrap();
            let mut again = std::process::Command::new(this);
            again.args(["a_value_that_is_forgotten", "--test-threads", "1"]);
            let done = again.env(marked, "a secret").status().unwrap();
            assert!(done.success());
            return;
        }
        forget_variable(c"BCOW_TEST_OF_FORGETTING");
        forget_variable(c"BCOW_TEST_OF_NOTHING");
        assert_eq!(std::env::var(marked).as_deref(), Ok(""));
        let environment = std::fs::read("/proc/self/environ").unwrap();
        assert!(!environment.windows(8).any(|part| part == b"a secret"));
    }
}
