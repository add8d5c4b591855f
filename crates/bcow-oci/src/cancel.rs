//! Cancellation of a conversion or an export.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

/// The caller cancelled the operation: an error, or the cause of a failed read, of which the
/// constructors of `ConvertError` make `ConvertError::Interrupted`.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
pub(crate) struct Cancelled;

impl From<Cancelled> for io::Error {
    fn from(error: Cancelled) -> Self {
        // Not `ErrorKind::Interrupted`: readers retry after that error.
        io::Error::other(error)
    }
}

/// Whether a read failed because the caller cancelled the operation.
pub(crate) fn is_cancellation(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<Cancelled>())
}

/// The flags that cancel the work: the caller's, and the work's own flag, which is set when one of
/// several parallel layers fails.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Cancel<'c> {
    caller: Option<&'c AtomicBool>,
    own: Option<&'c AtomicBool>,
}

impl<'c> Cancel<'c> {
    /// Cancels when the caller's flag is set.
    pub(crate) fn new(caller: Option<&'c AtomicBool>) -> Self {
        Cancel { caller, own: None }
    }

    /// Cancels also when `own` is set.
    pub(crate) fn or(self, own: &'c AtomicBool) -> Self {
        Cancel {
            own: Some(own),
            ..self
        }
    }

    pub(crate) fn is_set(self) -> bool {
        [self.caller, self.own]
            .into_iter()
            .flatten()
            .any(|flag| flag.load(Ordering::Relaxed))
    }

    /// Fails if the operation is cancelled.
    pub(crate) fn check(self) -> Result<(), Cancelled> {
        if self.is_set() { Err(Cancelled) } else { Ok(()) }
    }
}
