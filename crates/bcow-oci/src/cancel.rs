//! Cancellation of a conversion or an export.

use std::sync::atomic::{AtomicBool, Ordering};

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
}
