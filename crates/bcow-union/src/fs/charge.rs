//! Space that a change of names, attributes or directories needs.
//!
//! Such a change reserves one block before it begins, or the size of a large value, and is measured
//! afterwards. The reservation fails if a limit leaves no block. A removal reserves nothing.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use rustix::io::Errno;

use super::UnionFs;
use super::nodes::Node;
use crate::account::Reservation;
use crate::blocks::BLOCK_BYTES;
use crate::host::{HostFile, errno_of, stored_bytes};

impl UnionFs {
    /// Reserves at least one block, and inodes; `ENOSPC` at a limit.
    pub(super) fn room(&self, bytes: usize, inodes: u64) -> Result<Reservation<'_>, Errno> {
        let bytes = (bytes.max(1) as u64).next_multiple_of(BLOCK_BYTES);
        self.account
            .reserve(bytes, inodes)
            .map_err(|_| Errno::NOSPC)
    }

    /// Updates the counted space of an inode after a change. `file` may be open with `O_PATH`.
    pub(super) fn measure(&self, file: impl AsFd) {
        if self.account.is_limited() {
            let stat = || Ok(rustix::fs::fstat(&file)?);
            let stored = || stat().map(|stat| stored_bytes(&stat));
            let measured = stat().and_then(|stat| self.account.measure(stat.st_ino, stored));
            self.log_failed_measurement(measured);
        }
    }

    /// As [`UnionFs::measure`], for a file whose inode number is known.
    pub(super) fn measure_inode(&self, inode: u64, file: &File) {
        let measured = self.account.measure(inode, || file.stored_bytes());
        self.log_failed_measurement(measured);
    }

    /// Updates the counted space of a node whose file in the upper is open.
    pub(super) fn measure_if_open(&self, node: &Node) {
        if let Some(upper) = &node.read_state().upper
            && let Some(file) = &upper.file
        {
            self.measure_inode(upper.host_inode, file);
        }
    }

    fn log_failed_measurement(&self, measured: io::Result<()>) {
        if let Err(error) = measured {
            // The old figure stays until the next measurement.
            let errno = errno_of(&error);
            self.host_failed(b"", "cannot read the allocated size of a file", errno);
        }
    }

    /// Called when a node's object in the upper has no name any more, or never had one: the drop of
    /// the node gives back its space.
    pub(super) fn release_on_drop(&self, node: &Node) {
        if self.account.is_limited() {
            node.release_on_drop(&self.account);
        }
    }
}
