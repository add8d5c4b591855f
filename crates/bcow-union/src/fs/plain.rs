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
        let end = offset + data.len() as u64;
        let (_reserved, end) = self
            .account
            .reserve_write(&*file, offset..end)
            .map_err(|error| self.content_failed(node, error))?;
        let data = &data[..(end - offset) as usize];
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
        self.measure_plain(state, &file);
        match (written, result) {
            (0, Err(errno)) => Err(errno),
            (written, _) => Ok(written),
        }
    }

    pub(super) fn resize_plain(&self, state: &NodeState, size: u64) -> Result<(), Errno> {
        let file = plain_file(state)?;
        rustix::fs::ftruncate(&*file, size)?;
        self.measure_plain(state, &file);
        Ok(())
    }

    pub(super) fn allocate_plain(
        &self,
        node: &Node,
        state: &NodeState,
        offset: u64,
        length: u64,
        how: Allocate,
    ) -> Result<(), Errno> {
        let file = plain_file(state)?;
        let flags = match how {
            Allocate::Extend => FallocateFlags::empty(),
            Allocate::KeepSize => FallocateFlags::KEEP_SIZE,
            Allocate::PunchHole => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            Allocate::ZeroExtend => FallocateFlags::ZERO_RANGE,
            Allocate::ZeroKeep => FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
        };
        let range = match how {
            Allocate::PunchHole => 0..0,
            _ => offset..offset + length,
        };
        let _reserved = self
            .account
            .reserve_whole_write(&*file, range)
            .map_err(|error| self.content_failed(node, error))?;
        let allocated = rustix::fs::fallocate(&*file, flags, offset, length);
        self.measure_plain(state, &file);
        allocated
    }

    /// Updates the counted space of a plain file after a change of its content.
    fn measure_plain(&self, state: &NodeState, file: &File) {
        if let Some(upper) = &state.upper {
            self.measure_inode(upper.host_inode, file);
        }
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
