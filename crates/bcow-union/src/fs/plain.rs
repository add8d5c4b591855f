//! Changes of plain files: all bytes are in the upper's file.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::UnionFs;
use super::nodes::{Content, Node, NodeState};
use super::types::Allocate;
use crate::host::errno_of;

impl UnionFs {
    pub(super) fn write_plain(
        &self,
        node: &Node,
        state: &NodeState,
        offset: u64,
        data: &[u8],
    ) -> Result<usize, Errno> {
        let file = plain_file(state)?;
        let failed = |error| self.content_failed(node, error);
        let stored = self.stored(node);
        let end = offset + data.len() as u64;
        let reserved = stored.reserve(&*file, offset..end).map_err(failed)?;
        let data = &data[..(reserved.end - offset) as usize];
        let mut written = 0;
        let mut result = Ok(());
        while written < data.len() {
            match file.write_at(&data[written..], offset + written as u64) {
                Ok(0) => break,
                Ok(count) => written += count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    result = Err(errno_of(&error));
                    break;
                }
            }
        }
        if written < data.len() {
            let kept = if written > 0 { offset + written as u64 } else { 0 };
            stored.release_unwritten(reserved, kept);
        }
        match (written, result) {
            (0, Err(errno)) => Err(errno),
            (written, _) => Ok(written),
        }
    }

    pub(super) fn resize_plain(&self, node: &Node, file: &File, size: u64) -> Result<(), Errno> {
        let stored = self.stored(node);
        stored
            .examine(file)
            .map_err(|error| self.content_failed(node, error))?;
        rustix::fs::ftruncate(file, size)?;
        stored.truncated(size);
        Ok(())
    }

    pub(super) fn allocate_plain(
        &self,
        node: &Node,
        file: &File,
        offset: u64,
        length: u64,
        how: Allocate,
    ) -> Result<(), Errno> {
        let flags = match how {
            Allocate::Extend => FallocateFlags::empty(),
            Allocate::KeepSize => FallocateFlags::KEEP_SIZE,
            Allocate::PunchHole => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            Allocate::ZeroExtend => FallocateFlags::ZERO_RANGE,
            Allocate::ZeroKeep => FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
        };
        let failed = |error| self.content_failed(node, error);
        let stored = self.stored(node);
        let range = offset..offset + length;
        if how == Allocate::PunchHole {
            stored.examine(file).map_err(failed)?;
            rustix::fs::fallocate(file, flags, offset, length)?;
            stored.punched(range);
            return Ok(());
        }
        let reserved = stored.reserve_all(file, range).map_err(failed)?;
        rustix::fs::fallocate(file, flags, offset, length).inspect_err(|_| {
            stored.release_unwritten(reserved, 0);
        })?;
        stored.reexamine(file).map_err(failed)
    }
}

/// The descriptor of a file that is plain or about to be.
pub(super) fn plain_file(state: &NodeState) -> Result<Arc<File>, Errno> {
    state
        .upper
        .as_ref()
        .filter(|upper| upper.is_fully_open)
        .and_then(|upper| upper.file.clone())
        .ok_or(Errno::STALE)
}

/// Runs `change` on a plain file while no request writes to it. `None` if the file is not plain or
/// not open any more.
///
/// A write charges its blocks, and stores them later. A change that frees space must not run in
/// between: it would release the charge of a block that the write then stores.
pub(super) fn without_writes<T>(
    node: &Node,
    change: impl FnOnce(&File) -> Result<T, Errno>,
) -> Option<Result<T, Errno>> {
    let state = node.write_state();
    match &state.content {
        Content::Plain => plain_file(&state).ok().map(|file| change(&file)),
        _ => None,
    }
}

/// Marks all bytes as in the upper's file.
pub(super) fn set_plain(state: &mut NodeState) {
    state.content = Content::Plain;
    if let Some(upper) = &mut state.upper {
        upper.needs_image = false;
        upper.is_partial = false;
    }
}

/// Reads up to `length` bytes; fewer at the end of the file.
pub(super) fn read_into(
    scratch: &mut Vec<u8>,
    length: u32,
    read: impl Fn(&mut [u8]) -> std::io::Result<usize>,
) -> Result<(), Errno> {
    scratch.resize(length as usize, 0);
    loop {
        match read(scratch) {
            // A read of a regular file is short only at its end.
            Ok(count) => {
                scratch.truncate(count);
                return Ok(());
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(errno_of(&error)),
        }
    }
}
