//! Space that a change needs, charged before the change.
//!
//! A change first reserves its maximum overhead: the stored bytes that are not file data. The
//! reservation fails if a limit leaves too little space. After the change, the overhead of each
//! inode and directory that the change touched is counted, and the unused rest of the reservation
//! is released.

use std::fs::File;
use std::os::fd::AsFd;

use bcow_erofs::reader::{FileType, Inode};
use rustix::io::Errno;

use super::UnionFs;
use super::nodes::Node;
use crate::account::{self, Reservation, StoredBlocks};
use crate::blocks::BLOCK_BYTES;

/// Bytes reserved for a new directory entry: one block. If a directory with an htree splits more
/// than one block, the recount after the change charges the other blocks.
pub(super) const NAME_BYTES: u64 = BLOCK_BYTES;

/// Upper bound of the bytes of the marks and the override attribute of a copied-up inode.
pub(super) const MARKS_BYTES: u64 = 400;

impl UnionFs {
    /// Reserves overhead bytes and inodes; `ENOSPC` at a limit.
    pub(super) fn room(&self, bytes: u64, inodes: u64) -> Result<Reservation<'_>, Errno> {
        if self.account.is_limited() {
            self.account
                .reserve(bytes, inodes)
                .map_err(|_| Errno::NOSPC)
        } else {
            Ok(self.account.unreserved())
        }
    }

    /// Reserves the overhead of a copy of an inode of the image, with `names` new directory
    /// entries.
    pub(super) fn room_for_copy(
        &self,
        inode: &Inode,
        names: u64,
    ) -> Result<Reservation<'_>, Errno> {
        if !self.account.is_limited() {
            return Ok(self.account.unreserved());
        }
        let mut attributes = MARKS_BYTES;
        if inode.has_xattrs() {
            for (name, value) in self.image.xattrs(inode)? {
                attributes += account::attribute_bytes(&name, value.len());
            }
        }
        let own = match inode.kind {
            FileType::Directory => BLOCK_BYTES,
            FileType::Symlink => account::target_takes(inode.size),
            _ => 0,
        };
        let attributes = account::attributes_take(attributes);
        self.room(names * NAME_BYTES + own + attributes, 1)
    }

    /// Room for a whiteout. A whiteout seldom makes its directory larger, and a removal must be
    /// possible at the limit: so it is refused (`ENOSPC`) only above the limit.
    pub(super) fn room_to_hide(&self) -> Result<Reservation<'_>, Errno> {
        if self.account.is_above() {
            self.account.no_space(0);
            Err(Errno::NOSPC)
        } else {
            Ok(self.account.unreserved())
        }
    }

    /// Reserves room for an attribute of a file, which may replace one of the same name.
    pub(super) fn room_for_attribute(
        &self,
        file: &File,
        name: &[u8],
        value: usize,
    ) -> Result<Reservation<'_>, Errno> {
        if !self.account.is_limited() {
            return Ok(self.account.unreserved());
        }
        let before = account::stored_attributes(file)?;
        let after = before + account::attribute_bytes(name, value);
        let more = account::attributes_take(after) - account::attributes_take(before);
        self.room(more, 0)
    }

    /// Counts a new inode and its overhead, against its reservation.
    /// `file` may be open with `O_PATH`.
    pub(super) fn count_new(&self, file: &File, room: &mut Reservation<'_>) {
        if self.account.is_limited() {
            room.use_inode();
            self.recount_overhead_in(file, room);
        }
    }

    /// Updates the counted overhead of an inode.
    pub(super) fn recount_overhead(&self, file: impl AsFd) {
        self.recount_overhead_in(file, &mut self.account.unreserved());
    }

    /// As [`UnionFs::recount_overhead`], against reserved room.
    pub(super) fn recount_overhead_in(&self, file: impl AsFd, room: &mut Reservation<'_>) {
        if !self.account.is_limited() {
            return;
        }
        let counted = self.account.overhead.recount(file, room);
        self.log_count_failure(counted);
    }

    /// Updates the counted overhead of a node whose upper file is open, after a change for which
    /// the host may have removed `security.capability`.
    pub(super) fn recount_if_open(&self, node: &Node) {
        let file = match &node.read_state().upper {
            Some(upper) => upper.file.clone(),
            None => None,
        };
        if let Some(file) = file {
            self.recount_node(node, &file);
        }
    }

    /// As [`UnionFs::recount_overhead`], for a node's object in the upper.
    pub(super) fn recount_node(&self, node: &Node, file: &File) {
        let mut room = self.account.unreserved();
        match node.stored.get().and_then(StoredBlocks::charged) {
            Some(data) if self.account.is_limited() => {
                let counted = self
                    .account
                    .overhead
                    .recount_with_data(file, data, &mut room);
                self.log_count_failure(counted);
            }
            _ => self.recount_overhead_in(file, &mut room),
        }
    }

    fn log_count_failure(&self, counted: Result<(), Errno>) {
        if let Err(errno) = counted {
            // The old count stays until the next one.
            self.host_failed(b"", "cannot update the space accounting of an inode", errno);
        }
    }

    /// Called when a node's object in the upper has no name any more, or never had one: the drop of
    /// the node gives back its charge.
    pub(super) fn release_on_drop(&self, node: &Node) {
        if self.account.is_limited() {
            node.release_on_drop(&self.account);
        }
    }
}
