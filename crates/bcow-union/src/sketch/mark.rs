//! The mark of an open sketch, and what happens when a barrier fails.

use std::sync::OnceLock;

use rustix::io::Errno;

use super::host::MarkedFile;
use super::shared::Shared;
use super::{SketchError, SketchMark};
use crate::account::StoredBlocks;

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

/// Marks a file as a sketch that was none. If that fails, it is none again: a mark that stayed would let the lower file's bytes
/// show through whatever the file becomes instead.
pub(super) fn mark_new(
    shared: &Shared,
    host: &dyn MarkedFile,
    mark: &SketchMark,
) -> Result<(), SketchError> {
    let marked = host.set_mark(mark).and_then(|()| host.set_foreign());
    marked.map_err(|error| {
        take_back(shared, host);
        SketchError::host("mark a file as a sketch", &error)
    })
}

/// Makes a metadata copy again of what could not become a sketch.
pub(super) fn take_back(shared: &Shared, host: &dyn MarkedFile) {
    if let Err(error) = host.take_marks_back() {
        // It is a sketch of which nothing is stored then, which reads the same.
        let error = SketchError::host("take the marks of a sketch back", &error);
        shared.log("a file that could not become a sketch", &error);
    }
}

/// Sees to it that the host's file is as long as the lower file. A metadata copy is, unless a crash or a full host came between,
/// and what it has then counts for nothing.
pub(super) fn make_fit(
    host: &dyn MarkedFile,
    stored: &StoredBlocks,
    size: u64,
) -> Result<(), SketchError> {
    if size_of(host)? == size {
        return Ok(());
    }
    let content = host.content();
    stored.look(content)?;
    let failed = |error| SketchError::host("empty the file of a sketch", &error);
    content.set_size(0).map_err(failed)?;
    stored.truncated(0);
    content.set_size(size).map_err(failed)
}

/// Size of a sketch's host file.
pub(super) fn size_of(host: &dyn MarkedFile) -> Result<u64, SketchError> {
    host.content()
        .size()
        .map_err(|error| SketchError::host("look at the size of a sketch", &error))
}
