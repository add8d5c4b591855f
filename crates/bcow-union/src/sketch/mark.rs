//! The mark of an open sketch, and what happens when a barrier fails.

use std::sync::OnceLock;

use rustix::io::Errno;

use super::host::MarkedFile;
use super::{SketchError, SketchMark};

/// What the mark on the host's file says.
pub(super) struct MarkState {
    pub(super) written: SketchMark,
    /// Whether it may not be durable.
    pub(super) unsynced: bool,
}

impl MarkState {
    /// Of a mark that is there, and was perhaps written just now.
    pub(super) fn new(written: SketchMark) -> Self {
        MarkState {
            written,
            unsynced: true,
        }
    }

    /// Makes the mark say this, if it does not. Says whether it was changed.
    pub(super) fn change(
        &mut self,
        host: &dyn MarkedFile,
        mark: SketchMark,
    ) -> Result<bool, SketchError> {
        if mark == self.written {
            return Ok(false);
        }
        host.set_mark(&mark)
            .map_err(|error| SketchError::host("change the mark of a sketch", &error))?;
        self.written = mark;
        self.unsynced = true;
        Ok(true)
    }
}

/// Keeps a sketch from being written to once a barrier failed: the host may have dropped what it could not write, and say
/// nothing of it next time.
#[derive(Default)]
pub(super) struct Fence(OnceLock<Errno>);

impl Fence {
    /// Refuses once a barrier has failed.
    pub(super) fn check(&self) -> Result<(), SketchError> {
        match self.0.get() {
            Some(&errno) => Err(SketchError::Refused { errno }),
            None => Ok(()),
        }
    }

    /// A barrier.
    pub(super) fn sync(
        &self,
        sync: impl FnOnce() -> std::io::Result<()>,
    ) -> Result<(), SketchError> {
        sync().map_err(|error| {
            let error = SketchError::host("sync", &error);
            let _ = self.0.set(error.errno());
            error
        })
    }
}

/// Marks a file as a sketch that was none.
pub(super) fn mark_new(host: &dyn MarkedFile, mark: &SketchMark) -> Result<(), SketchError> {
    host.set_mark(mark)
        .and_then(|()| host.set_foreign())
        .map_err(|error| SketchError::host("mark a file as a sketch", &error))
}

/// Size of a sketch's host file.
pub(super) fn size_of(host: &dyn MarkedFile) -> Result<u64, SketchError> {
    host.content()
        .size()
        .map_err(|error| SketchError::host("look at the size of a sketch", &error))
}
