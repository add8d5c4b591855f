//! The note of a volatile use: a mount with [`SyncPolicy::Volatile`] never synchronizes the upper.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::BorrowedFd;
use std::path::Path;

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::UpperError;
use super::beneath::open_regular;
use super::work::unlink;
use crate::host::errno_of;
use crate::options::SyncPolicy;

/// The name of the note in [`META`](super::META). Its content is the boot id of the use.
const FILE: &str = "volatile";
/// Bytes of the note that are read.
const MAX_BYTES: u64 = 256;

/// Refuses an upper whose volatile use did not end cleanly before a reboot. Writes or removes the
/// note for this use.
pub(super) fn refuse_after_volatile(
    path: &Path,
    root: BorrowedFd<'_>,
    meta: BorrowedFd<'_>,
    policy: SyncPolicy,
) -> Result<(), UpperError> {
    let failed = |action| move |source: Errno| UpperError::io(path, action, source);
    let was_volatile = match note(meta, path)? {
        // Within the same boot only the process died: the host's kernel still has all data.
        Some(note) if note != boot_id() => {
            return Err(UpperError::Volatile(path.to_owned()));
        }
        note => note.is_some(),
    };
    match policy {
        SyncPolicy::Volatile => {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC;
            let note = open_regular(meta, FILE, flags).map_err(failed("leave a note in it"))?;
            let note = File::from(note);
            (&note)
                .write_all(&boot_id())
                .map_err(|error| failed("leave a note in it")(errno_of(&error)))?;
            rustix::fs::fsync(&note)
                .and_then(|()| rustix::fs::fsync(meta))
                .map_err(failed("leave a note in it"))
        }
        SyncPolicy::Strict | SyncPolicy::Batch(_) if !was_volatile => Ok(()),
        SyncPolicy::Strict | SyncPolicy::Batch(_) => {
            // Data of the earlier volatile use becomes durable only by this sync.
            rustix::fs::syncfs(root).map_err(failed("synchronize it"))?;
            forget(meta).map_err(failed("remove a note from it"))
        }
    }
}

/// Removes the note, if there is one.
pub(super) fn forget(meta: BorrowedFd<'_>) -> Result<(), Errno> {
    unlink(meta, FILE.as_bytes())
}

/// Whether the machine stopped during a volatile use. The content may then be damaged in any way.
pub(super) fn is_lost(meta: BorrowedFd<'_>, path: &Path) -> Result<bool, UpperError> {
    Ok(note(meta, path)?.is_some_and(|note| note != boot_id()))
}

fn note(meta: BorrowedFd<'_>, path: &Path) -> Result<Option<Vec<u8>>, UpperError> {
    let failed = |errno| UpperError::io(path, "look for a note in it", errno);
    let note = match open_regular(meta, FILE, OFlags::RDONLY) {
        Err(Errno::NOENT) => return Ok(None),
        other => other.map_err(failed)?,
    };
    let mut text = Vec::new();
    File::from(note)
        .take(MAX_BYTES)
        .read_to_end(&mut text)
        .map_err(|error| failed(errno_of(&error)))?;
    Ok(Some(text))
}

/// The kernel's id of the current boot.
fn boot_id() -> Vec<u8> {
    std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}
