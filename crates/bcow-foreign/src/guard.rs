//! Converts panics of a library to errors.
//!
//! imago reads untrusted images and uses the values in them as indexes. bcow first checks for the
//! known problems (`qcow2::header`). An unknown problem must not end a program that serves other
//! disks or still has to clean up. So each call of imago that uses the content of a file runs under
//! [`guarded`]. Every other panic ends the process: the command's panic hook calls [`is_guarded`].
//!
//! Rejected alternatives: a separate process for imago needs a protocol for each read; a build
//! profile that aborts on panic cannot catch panics.

use std::cell::Cell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

#[cfg(not(panic = "unwind"))]
compile_error!("a panic over a damaged qcow2 image must be caught: build with panic = \"unwind\"");

thread_local! {
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Whether a panic of this thread becomes an error. A panic hook should then print nothing.
pub fn is_guarded() -> bool {
    GUARDED.get()
}

/// Calls `work` and converts a panic to an error of the kind [`io::ErrorKind::Other`]. After a
/// panic, data that `work` has changed may be inconsistent; the caller must not use it again.
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

/// A caught panic.
#[derive(Debug, thiserror::Error)]
#[error("the image is damaged; its reader panicked ({0})")]
pub(crate) struct Panicked(String);

/// Whether the error is a caught panic.
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
