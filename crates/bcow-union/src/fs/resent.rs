//! Requests that the kernel sends again.
//!
//! When a process ends, the kernel sends the requests that the process has read and not answered to
//! the process that takes over. The first process may have executed such a request. Most requests
//! can be executed twice. The others are changes of names: the kernel holds the lock of the
//! directory until it gets the answer, and sends such a request only if it knows that the name does
//! not exist (to create it) or exists (to remove it). So the present state of the name shows
//! whether the request was executed. After an exchange, both names exist as before; so the ledger
//! records which node had the first name. It also records a removal during which the number of
//! names of a file is not exact.

use std::sync::atomic::Ordering;

use bcow_erofs::reader::FileType;
use rustix::io::Errno;

use super::lookup::Access;
use super::types::{Attributes, Caller, RenameMode};
use super::{UnionFs, host};
use crate::node::NodeId;
use crate::upper::XattrMode;

/// The number of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestId {
    /// The number, the same each time that the kernel sends the request.
    pub number: u64,
    /// Whether a process that has ended may have executed the request.
    pub is_resent: bool,
}

impl RequestId {
    /// The outcome of a removal, which fails with `missing` if there is nothing to remove. If the
    /// request may have been executed before, it was then removed by this very request.
    pub fn removed(self, outcome: Result<(), Errno>, missing: Errno) -> Result<(), Errno> {
        match outcome {
            Err(errno) if errno == missing && self.is_resent => Ok(()),
            outcome => outcome,
        }
    }
}

/// An object that a request creates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum New<'a> {
    /// An empty regular file.
    File,
    Directory,
    /// A symbolic link to this target.
    Symlink(&'a [u8]),
    /// A device, pipe or socket, with the device number in the kernel's 32-bit form.
    Special(FileType, u32),
}

impl New<'_> {
    /// The object of mknod(2): `mode` has its type, `rdev` is a device number in the kernel's
    /// 32-bit form. `EPERM` for the device 0:0, which would be a whiteout (the kernel's overlayfs
    /// refuses it with the same error), `EINVAL` for types of other requests.
    pub fn of_mode(mode: u32, rdev: u32) -> Result<Self, Errno> {
        match host::kind_of(mode) {
            FileType::Regular => Ok(New::File),
            FileType::CharDevice if rdev == 0 => Err(Errno::PERM),
            FileType::Directory | FileType::Symlink => Err(Errno::INVAL),
            kind => Ok(New::Special(kind, rdev)),
        }
    }

    /// The type of the object.
    pub fn kind(&self) -> FileType {
        match self {
            New::File => FileType::Regular,
            New::Directory => FileType::Directory,
            New::Symlink(_) => FileType::Symlink,
            New::Special(kind, _) => *kind,
        }
    }
}

impl UnionFs {
    /// As [`UnionFs::make`], for a request that may have been executed before.
    pub fn make_requested(
        &self,
        request: RequestId,
        caller: &Caller,
        parent: NodeId,
        name: &[u8],
        permissions: u16,
        new: &New<'_>,
    ) -> Result<Attributes, Errno> {
        match self.make(caller, parent, name, permissions, new) {
            Err(Errno::EXIST) if request.is_resent => {
                self.finish_new(caller, parent, name, permissions, new)
            }
            made => made,
        }
    }

    /// Finishes the creation of an object that exists already.
    fn finish_new(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &[u8],
        permissions: u16,
        new: &New<'_>,
    ) -> Result<Attributes, Errno> {
        let parent = self.node(parent)?;
        let node = self.find_existing(&parent, name)?;
        if node.kind != new.kind() || node.read_state().upper.is_none() {
            return Err(Errno::EXIST);
        }
        {
            let _names = parent.names.lock();
            let file = self.open_upper(&node, Access::Path)?;
            self.own_new(caller, &parent, permissions, new, &file)?;
            parent.names_changed.change();
        }
        node.name_is_new.store(true, Ordering::Release);
        self.hold(&node)
    }

    /// As [`UnionFs::link`], for a request that may have been executed before.
    pub fn link_requested(
        &self,
        request: RequestId,
        id: NodeId,
        parent: NodeId,
        name: &[u8],
    ) -> Result<Attributes, Errno> {
        match self.link(id, parent, name) {
            Err(Errno::EXIST) if request.is_resent => {}
            linked => return linked,
        }
        let parent = self.node(parent)?;
        let node = self.find_existing(&parent, name)?;
        if node.id != id {
            return Err(Errno::EXIST);
        }
        parent.names_changed.change();
        node.name_is_new.store(true, Ordering::Release);
        self.hold(&node)
    }

    /// As [`UnionFs::unlink`], for a request that may have been executed before. Gives the node
    /// that had the name, or `None` if another process has executed the request.
    pub fn unlink_requested(
        &self,
        request: RequestId,
        parent: NodeId,
        name: &[u8],
    ) -> Result<Option<NodeId>, Errno> {
        if request.is_resent {
            if self.find(&self.node(parent)?, name)?.is_none() {
                self.finish_removal(request.number)?;
                return Ok(None);
            }
            self.begin_again(request.number);
        }
        self.unlink_numbered(request.number, parent, name).map(Some)
    }

    /// As [`UnionFs::rename`], for a request that may have been executed before. Gives the nodes of
    /// which names have changed, or none if another process has executed the request.
    pub fn rename_requested(
        &self,
        request: RequestId,
        (parent, name): (NodeId, &[u8]),
        (new_parent, new_name): (NodeId, &[u8]),
        how: RenameMode,
    ) -> Result<Vec<NodeId>, Errno> {
        if request.is_resent {
            if self.has_renamed(request, parent, name, new_parent, new_name, how)? {
                if how != RenameMode::Exchange {
                    // Of the file that was replaced.
                    self.finish_removal(request.number)?;
                }
                return Ok(Vec::new());
            }
            self.begin_again(request.number);
        }
        self.rename_numbered(request.number, (parent, name), (new_parent, new_name), how)
    }

    fn has_renamed(
        &self,
        request: RequestId,
        parent: NodeId,
        name: &[u8],
        new_parent: NodeId,
        new_name: &[u8],
        how: RenameMode,
    ) -> Result<bool, Errno> {
        let (parent, new_parent) = (self.node(parent)?, self.node(new_parent)?);
        let source = self.find(&parent, name)?;
        let target = self.find(&new_parent, new_name)?;
        Ok(match (how, source, target) {
            (RenameMode::Exchange, Some(source), _) => {
                let before = self.begun.get(&request.number);
                before.is_some_and(|before| source.id != NodeId(before.node))
            }
            (RenameMode::Exchange, None, _) => false,
            (_, None, Some(_)) => true,
            _ => false,
        })
    }

    /// As [`UnionFs::set_xattr`], for a request that may have been executed before.
    pub fn set_xattr_requested(
        &self,
        request: RequestId,
        id: NodeId,
        name: &[u8],
        value: &[u8],
        how: XattrMode,
    ) -> Result<(), Errno> {
        match self.set_xattr(id, name, value, how) {
            Err(Errno::EXIST) if request.is_resent && self.xattr(id, name)? == value => Ok(()),
            other => other,
        }
    }
}
