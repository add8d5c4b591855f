//! What a process that serves a mount shows of itself, and how it fails.

use std::sync::{Mutex, MutexGuard, PoisonError};

use bcow_union::log::{self, Severity};

use bcow_mount::CLOSING;

/// Locks a mutex, also after a panic, which is a bug and ends the process.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes the name [`CLOSING`].
pub fn show_closing() {
    // Only other commands' reports use the name, so an error is ignored.
    let _ = rustix::thread::set_name(CLOSING);
}

/// Makes the process abort on a panic. If only the thread ended, the program that waits for its
/// reply would wait forever and could not be interrupted. When the process ends, the kernel fails
/// the requests in flight.
pub fn abort_on_panic() {
    let default_hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        default_hook(info);
        log::log(Severity::Error, &info.to_string());
        std::process::abort();
    }));
}
