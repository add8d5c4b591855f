//! Rebase: another backing, with the same visible content.

use std::sync::Arc;

use bcow_format::BackingEntry;

use super::compare::{differing_sectors, read_or_zeros, status_or_hole};
use super::{Monitor, OperationError, Phase, STEP_BYTES, step};
use crate::{
    BlockDevice, Content, Disk, Error, OpenOptions, Space, Storage, UnreadBackings, WritableDevice,
};

/// Replaces the backing of `disk` by `new`; `None` removes the backing. Where the disk shows its
/// backing and the new backing has other data, the old data is first written into the disk. Returns
/// the number of bytes that were written or zeroed for that.
///
/// A disk without a backing stores all its data, so nothing is compared or written for it.
///
/// The new backing is recorded when all data is durable, in one step.
pub fn rebase(
    disk: Disk,
    new: Option<(BackingEntry, Arc<dyn BlockDevice>)>,
    monitor: &dyn Monitor,
) -> Result<u64, OperationError> {
    let new = match new {
        Some((entry, device)) if disk.backing().is_none() => {
            disk.add_backing(entry, device)
                .and_then(|()| disk.close())
                .map_err(OperationError::Write)?;
            return Ok(0);
        }
        new => new,
    };
    let none: Arc<dyn BlockDevice> = Arc::new(Vec::new());
    let shown = new.as_ref().map_or(&none, |(_, device)| device).clone();
    monitor.phase(Phase::Compare, Some(disk.size()));
    let (mut at, mut written) = (0, 0);
    let mut buffers = [Vec::new(), Vec::new()];
    while at < disk.size() {
        let length = STEP_BYTES.min(disk.size() - at);
        let (done, kept) = keep_piece(&disk, &*shown, at, length, &mut buffers)?;
        at += done;
        written += kept;
        step(monitor, done)?;
    }
    disk.set_backing(new)
        .and_then(|()| disk.close())
        .map_err(OperationError::Write)?;
    Ok(written)
}

/// Records another backing in the disk in `storage`, or none, without a look at the old backing,
/// which need not exist: the disk then shows the data of the new backing.
pub fn rebase_reference(
    storage: Arc<dyn Storage>,
    new: Option<(BackingEntry, Arc<dyn BlockDevice>)>,
    options: &OpenOptions,
) -> Result<(), Error> {
    let disk = Disk::open(storage, options, &UnreadBackings)?;
    disk.set_backing(new)?;
    disk.close()
}

/// Compares one piece of at most `length` bytes. Returns how many bytes were compared, and how many
/// of them written.
fn keep_piece(
    disk: &Disk,
    new: &dyn BlockDevice,
    at: u64,
    length: u64,
    [old_bytes, new_bytes]: &mut [Vec<u8>; 2],
) -> Result<(u64, u64), OperationError> {
    let old = status_or_hole(disk, at, length).map_err(OperationError::Read)?;
    if old.depth == 1 {
        return Ok((old.length, 0));
    }
    let there = status_or_hole(new, at, old.length).map_err(OperationError::Read)?;
    let length = there.length;
    if old.content != Content::Data && there.content != Content::Data {
        return Ok((length, 0));
    }
    read_or_zeros(disk, at, length, old_bytes).map_err(OperationError::Read)?;
    read_or_zeros(new, at, length, new_bytes).map_err(OperationError::Read)?;
    let mut written = 0;
    for range in differing_sectors(at, old_bytes, new_bytes) {
        let bytes = &old_bytes[(range.start - at) as usize..(range.end - at) as usize];
        if bytes.iter().all(|&byte| byte == 0) {
            disk.write_zeroes(range.start, bytes.len() as u64, Space::Free)
        } else {
            disk.write_at(range.start, bytes)
        }
        .map_err(OperationError::Write)?;
        written += bytes.len() as u64;
    }
    Ok((length, written))
}
