//! What a change stores, charged before it is made.
//!
//! A change first takes room for the most that it may store beside the bytes of files, which fails if a limit leaves none, and then
//! counts what the host stores: of each inode and directory that it touched, once it did. What was not used is given back.

use std::fs::File;
use std::os::fd::AsFd;

use bcow_erofs::reader::{FileType, Inode};
use rustix::io::Errno;

use super::UnionFs;
use super::nodes::Node;
use crate::account::{self, Room, StoredBlocks};
use crate::sketch::BLOCK_BYTES;

/// What a directory may grow by for one more name. (A tree of them may split more than one block, which is counted then.)
pub(super) const NAME_BYTES: u64 = BLOCK_BYTES;

/// Bytes of all the marks that a copy has, and of an owner that is kept.
pub(super) const MARKS_BYTES: u64 = 400;

impl UnionFs {
    /// Room for bytes beside the data of files, and for inodes.
    pub(super) fn room(&self, bytes: u64, inodes: u64) -> Result<Room<'_>, Errno> {
        match self.account.is_limited() {
            true => self
                .account
                .reserve(bytes, inodes)
                .map_err(|_| Errno::NOSPC),
            false => Ok(self.account.no_room()),
        }
    }

    /// Room for a copy of an inode of the image, beside its data.
    pub(super) fn room_for_copy(&self, inode: &Inode, names: u64) -> Result<Room<'_>, Errno> {
        if !self.account.is_limited() {
            return Ok(self.account.no_room());
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

    /// Room for a name that hides one of the image. Such a name seldom makes its directory larger, and removing has to be possible
    /// when the limit is reached: so it is only refused above the limit.
    pub(super) fn room_to_hide(&self) -> Result<Room<'_>, Errno> {
        match self.account.is_above() {
            true => Err(Errno::NOSPC),
            false => Ok(self.account.no_room()),
        }
    }

    /// Room for an attribute that a file will have, in the place of one of this name if there is one.
    pub(super) fn room_for_attribute(
        &self,
        file: &File,
        name: &[u8],
        value: usize,
    ) -> Result<Room<'_>, Errno> {
        if !self.account.is_limited() {
            return Ok(self.account.no_room());
        }
        let before = account::stored_attributes(file)?;
        let after = before + account::attribute_bytes(name, value);
        let more = account::attributes_take(after) - account::attributes_take(before);
        self.room(more, 0)
    }

    /// Counts an inode that was just made, open in any way, in its place.
    pub(super) fn made(&self, file: &File, room: &mut Room<'_>) {
        if self.account.is_limited() {
            room.use_inode();
            self.settle_in(file, room);
        }
    }

    /// Counts what an inode takes now beside its data.
    pub(super) fn settle(&self, file: impl AsFd) {
        self.settle_in(file, &mut self.account.no_room());
    }

    /// As [`UnionFs::settle`], against room that was taken for it.
    pub(super) fn settle_in(&self, file: impl AsFd, room: &mut Room<'_>) {
        if !self.account.is_limited() {
            return;
        }
        let counted = self.account.beside.settle(file, room);
        self.say_if_not_counted(counted);
    }

    /// Counts anew what a node takes, if it is open: the host takes capabilities away by itself.
    pub(super) fn settle_again(&self, node: &Node) {
        let file = match &node.read_state().upper {
            Some(upper) => upper.file.clone(),
            None => None,
        };
        if let Some(file) = file {
            self.settle_node(node, &file);
        }
    }

    /// As [`UnionFs::settle`], of what a node is in the upper.
    pub(super) fn settle_node(&self, node: &Node, file: &File) {
        let mut room = self.account.no_room();
        match node.stored.get().and_then(StoredBlocks::charged) {
            Some(data) if self.account.is_limited() => {
                let counted = self.account.beside.count(file, data, &mut room);
                self.say_if_not_counted(counted);
            }
            _ => self.settle_in(file, &mut room),
        }
    }

    fn say_if_not_counted(&self, counted: Result<(), Errno>) {
        if let Err(errno) = counted {
            // It counts as before, until it is looked at again.
            self.host_failed(b"", "cannot count what it stores", errno);
        }
    }

    /// The last name of what a node is in the upper went, or it never had one: what it takes is given back with the node.
    pub(super) fn departs(&self, node: &Node) {
        if self.account.is_limited() {
            node.departs_from(&self.account);
        }
    }
}
