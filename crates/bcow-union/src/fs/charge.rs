//! Space that a change needs, charged before the change.
//!
//! A change first reserves room for the most that it may store beside the bytes of files. That
//! fails if a limit leaves too little. After the change, the stored size of each inode and
//! directory that it touched is counted, and the rest of the room is given back.

use std::fs::File;
use std::os::fd::AsFd;

use bcow_erofs::reader::{FileType, Inode};
use rustix::io::Errno;

use super::UnionFs;
use super::nodes::Node;
use crate::account::{self, Reservation, StoredBlocks};
use crate::blocks::BLOCK_BYTES;

/// Bytes by which a directory may grow for one more name. (An indexed directory may split more than
/// one block. The count after the change includes that.)
pub(super) const NAME_BYTES: u64 = BLOCK_BYTES;

/// Upper bound of the bytes of a copy's marks together with a kept owner.
pub(super) const MARKS_BYTES: u64 = 400;

impl UnionFs {
    /// Reserves room for bytes beside the data of files, and for inodes; `ENOSPC` at a limit.
    pub(super) fn room(&self, bytes: u64, inodes: u64) -> Result<Reservation<'_>, Errno> {
        match self.account.is_limited() {
            true => self
                .account
                .reserve(bytes, inodes)
                .map_err(|_| Errno::NOSPC),
            false => Ok(self.account.unreserved()),
        }
    }

    /// Reserves room for a copy of an inode of the image, beside its data.
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
        match self.account.is_above() {
            true => Err(Errno::NOSPC),
            false => Ok(self.account.unreserved()),
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

    /// Counts a new inode and the bytes that it stores beside its data, against its reservation.
    /// `file` may be open with `O_PATH`.
    pub(super) fn count_new(&self, file: &File, room: &mut Reservation<'_>) {
        if self.account.is_limited() {
            room.use_inode();
            self.settle_in(file, room);
        }
    }

    /// Counts again the bytes that an inode takes beside its data.
    pub(super) fn settle(&self, file: impl AsFd) {
        self.settle_in(file, &mut self.account.unreserved());
    }

    /// As [`UnionFs::settle`], against reserved room.
    pub(super) fn settle_in(&self, file: impl AsFd, room: &mut Reservation<'_>) {
        if !self.account.is_limited() {
            return;
        }
        let counted = self.account.overhead.settle(file, room);
        self.log_count_failure(counted);
    }

    /// Counts a node again, if it is open: the host may have removed its capabilities.
    pub(super) fn settle_again(&self, node: &Node) {
        let file = match &node.read_state().upper {
            Some(upper) => upper.file.clone(),
            None => None,
        };
        if let Some(file) = file {
            self.settle_node(node, &file);
        }
    }

    /// As [`UnionFs::settle`], for a node's object in the upper.
    pub(super) fn settle_node(&self, node: &Node, file: &File) {
        let mut room = self.account.unreserved();
        match node.stored.get().and_then(StoredBlocks::charged) {
            Some(data) if self.account.is_limited() => {
                let counted = self.account.overhead.count(file, data, &mut room);
                self.log_count_failure(counted);
            }
            _ => self.settle_in(file, &mut room),
        }
    }

    fn log_count_failure(&self, counted: Result<(), Errno>) {
        if let Err(errno) = counted {
            // The old count stays until the next one.
            self.host_failed(b"", "cannot count the stored bytes", errno);
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
