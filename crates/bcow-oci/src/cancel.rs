//! Whether a conversion shall stop.

use std::sync::atomic::{AtomicBool, Ordering};

/// The flags that stop a conversion: the caller's, and one of its own where several layers are read at once and one
/// has failed.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Cancel<'c> {
    caller: Option<&'c AtomicBool>,
    own: Option<&'c AtomicBool>,
}

impl<'c> Cancel<'c> {
    /// Stops when the caller says so.
    pub(crate) fn new(caller: Option<&'c AtomicBool>) -> Self {
        Cancel { caller, own: None }
    }

    /// Stops also when `own` is set.
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
