//! The mark of an open partial file, and the fence that stops writes after a failed barrier.

use std::sync::OnceLock;

use rustix::io::Errno;

use super::host::MarkedFile;
use super::shared::Shared;
use super::{PartialError, PartialMark};

/// The state of the mark on the host's file.
pub(super) struct MarkState {
    pub(super) written: PartialMark,
    /// Whether the mark may not be durable.
    pub(super) unsynced: bool,
}

impl MarkState {
    /// The state of an existing mark. It counts as not durable, because it may have been written
    /// just now.
    pub(super) fn new(written: PartialMark) -> Self {
        MarkState {
            written,
            unsynced: true,
        }
    }

    /// Writes the mark if it differs from the current one.
    pub(super) fn change(
        &mut self,
        host: &dyn MarkedFile,
        mark: PartialMark,
    ) -> Result<(), PartialError> {
        if mark != self.written {
            host.set_mark(&mark)
                .map_err(PartialError::host("change the mark of a partial file"))?;
            self.written = mark;
            self.unsynced = true;
        }
        Ok(())
    }
}

/// Refuses all writes to a partial file after a barrier has failed. The host's kernel may have
/// dropped the dirty pages that it could not write, and the next fsync may not report the loss.
#[derive(Default)]
pub(super) struct Fence(OnceLock<Errno>);

impl Fence {
    /// Fails if a barrier has failed.
    pub(super) fn check(&self) -> Result<(), PartialError> {
        match self.0.get() {
            Some(&errno) => Err(PartialError::Refused { errno }),
            None => Ok(()),
        }
    }

    /// Runs a barrier. Its failure closes the fence.
    pub(super) fn sync(
        &self,
        sync: impl FnOnce() -> std::io::Result<()>,
    ) -> Result<(), PartialError> {
        sync().map_err(|error| {
            let error = PartialError::host("sync")(error);
            let _ = self.0.set(error.errno());
            error
        })
    }
}

/// Sets the marks of a new partial file on a metadata copy. If this fails, the marks are removed
/// again. A mark that stayed would show the lower file's bytes in any later use of the file.
pub(super) fn mark_new(
    shared: &Shared,
    host: &dyn MarkedFile,
    mark: &PartialMark,
) -> Result<(), PartialError> {
    let marked = host.set_mark(mark).and_then(|()| host.set_reject_marks());
    marked.map_err(|error| {
        if let Err(error) = host.restore_marks() {
            // The file stays a partial file without stored blocks. It reads the same as the
            // metadata copy.
            let error = PartialError::host("remove the marks of a partial file")(error);
            shared.log("cannot undo the creation of a partial file", &error);
        }
        PartialError::host("mark a file as a partial file")(error)
    })
}

/// Sets the size of the host's file to the size of the lower file. A metadata copy already has this
/// size, unless a crash or a full host interrupted its creation. In that case its content is not
/// valid and is discarded.
pub(super) fn fit_size(host: &dyn MarkedFile, size: u64) -> Result<(), PartialError> {
    if size_of(host)? == size {
        return Ok(());
    }
    let content = host.content();
    let failed = PartialError::host("empty the file of a partial file");
    content.set_size(0).map_err(failed)?;
    content.set_size(size).map_err(failed)
}

/// Size of a partial file's host file.
pub(super) fn size_of(host: &dyn MarkedFile) -> Result<u64, PartialError> {
    host.content()
        .size()
        .map_err(PartialError::host("read the size of a partial file"))
}
