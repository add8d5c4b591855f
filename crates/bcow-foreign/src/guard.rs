//! Where a panic of a library is an error.
//!
//! imago reads images that come from anywhere, and indexes what it read. What is known of that is checked before
//! (`qcow2::header`); what is not known shall not end a program that serves other disks or is about to clean up. So imago is
//! called under [`guarded`] only. Everywhere else a panic ends the process: the command's panic hook asks [`is_guarded`].
//!
//! Rejected: a process of its own for imago, with a protocol between the two for each read; a profile that aborts, where
//! nothing can be caught.

use std::cell::Cell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

#[cfg(not(panic = "unwind"))]
compile_error!("a panic over a damaged qcow2 image must be caught: build with panic = \"unwind\"");

thread_local! {
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Whether a panic of this thread becomes an error. For a panic hook, which has nothing to say then.
pub fn is_guarded() -> bool {
    GUARDED.get()
}

/// Calls `work`; a panic is an error of the kind [`io::ErrorKind::Other`]. What `work` has changed may be in any state
/// then, and is not to be used again.
pub(crate) fn guarded<T>(work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let before = GUARDED.replace(true);
    let result = catch_unwind(AssertUnwindSafe(work));
    GUARDED.set(before);
    result.unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("no message");
        Err(io::Error::other(Panicked(text.to_owned())))
    })
}

/// A panic that was caught.
#[derive(Debug, thiserror::Error)]
#[error("the image is damaged in a way that its reader was not prepared for ({0})")]
pub(crate) struct Panicked(String);

/// Whether an error is a panic that was caught.
pub(crate) fn is_panic(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<Panicked>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_where_it_is_guarded() {
        let error = guarded(|| -> io::Result<()> {
            assert!(is_guarded());
            let empty: [u8; 0] = [];
            let _ = empty[std::hint::black_box(2)];
            Ok(())
        })
        .unwrap_err();
        assert!(is_panic(&error), "{error}");
        assert!(error.to_string().contains("index out of bounds"), "{error}");
        assert!(!is_guarded());
        assert_eq!(guarded(|| Ok(5)).unwrap(), 5);
        assert!(!is_panic(
            &guarded(|| -> io::Result<()> { Err(io::ErrorKind::NotFound.into()) }).unwrap_err()
        ));
    }
}
