//! Reads, changes and lists of extended attributes, capabilities and ACLs included.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bcow_erofs::reader::FileType;
use rustix::io::Errno;

use super::UnionFs;
use super::attributes::CAPABILITIES;
use super::lookup::Access;
use super::nodes::{Capabilities, Content, Node};
use super::types::Changes;
use crate::node::NodeId;
use crate::upper::{ACCESS_ACL, Attribute, DEFAULT_ACL, XattrMode};

/// Longest name of an attribute, in bytes.
const NAME_MAX: usize = 255;

/// Longest value of an attribute, in bytes.
const VALUE_MAX: usize = 64 << 10;

impl UnionFs {
    /// The value of an extended attribute; `ENODATA` if the node does not have it.
    pub fn xattr(&self, id: NodeId, name: &[u8]) -> Result<Vec<u8>, Errno> {
        let node = self.node(id)?;
        let value = match name {
            CAPABILITIES => self.capabilities_of(&node)?,
            _ => self.xattr_of(&node, name)?,
        };
        value.ok_or(Errno::NODATA)
    }

    /// The capabilities of a file. The kernel requests them before the first write to a file, and
    /// again after each request for the attributes of the file. So the node remembers that the file
    /// has none.
    fn capabilities_of(&self, node: &Node) -> Result<Option<Vec<u8>>, Errno> {
        let Some(mut known) = node.capabilities.try_lock() else {
            // A write or a change of the capabilities is in progress.
            return self.xattr_of(node, CAPABILITIES);
        };
        if *known == Capabilities::None {
            return Ok(None);
        }
        let value = self.xattr_of(node, CAPABILITIES)?;
        if value.is_none() {
            *known = Capabilities::None;
        }
        Ok(value)
    }

    /// The value of an attribute of a node, from the upper or from the image.
    pub(super) fn xattr_of(&self, node: &Node, name: &[u8]) -> Result<Option<Vec<u8>>, Errno> {
        if node.read_state().upper.is_none() {
            if is_layer_mark(name) {
                return Ok(None);
            }
            let inode = self.image.inode(node.lower.ok_or(Errno::STALE)?)?;
            return self.image.xattr(&inode, name);
        }
        let file = self.open_upper(node, Access::Path)?;
        let stored = self.stored_name(node, name)?;
        Attribute::Path(file.as_fd()).get(&stored)
    }

    /// The names of all extended attributes, each followed by a zero byte, as in listxattr(2). For
    /// a user without `CAP_SYS_ADMIN`, the caller must remove the names that begin with `trusted.`.
    pub fn xattr_names(&self, id: NodeId) -> Result<Vec<u8>, Errno> {
        let node = self.node(id)?;
        if node.read_state().upper.is_none() {
            let inode = self.image.inode(node.lower.ok_or(Errno::STALE)?)?;
            let mut list = Vec::new();
            for (name, _) in self.image.xattrs(&inode)? {
                if !is_layer_mark(&name) {
                    list.extend_from_slice(&name);
                    list.push(0);
                }
            }
            return Ok(list);
        }
        let file = self.open_upper(&node, Access::Path)?;
        let stored = Attribute::Path(file.as_fd()).list()?;
        let names = self.upper.names();
        Ok(names.shown_list(&stored, node.id == NodeId::ROOT))
    }

    /// Sets an extended attribute. Errors include `E2BIG` for a value above 64 KiB, `ERANGE` for a
    /// name that is empty or too long, `EOPNOTSUPP` for a name that no file system of Linux
    /// accepts, and `EPERM` for a `user.` attribute of a node that is neither a regular file nor a
    /// directory.
    pub fn set_xattr(
        &self,
        id: NodeId,
        name: &[u8],
        value: &[u8],
        how: XattrMode,
    ) -> Result<(), Errno> {
        let node = self.node(id)?;
        check(name)?;
        check_namespace(name)?;
        if value.len() > VALUE_MAX {
            return Err(Errno::TOOBIG);
        }
        if name.starts_with(b"user.")
            && !matches!(node.kind, FileType::Regular | FileType::Directory)
        {
            return Err(Errno::PERM);
        }
        let _lock = (name == CAPABILITIES).then(|| {
            let mut known = node.capabilities.lock();
            *known = Capabilities::Unknown;
            known
        });
        self.set_any(&node, name, value, how)
    }

    /// Sets an attribute, and updates the node for it. Fails if the limits of the upper leave no
    /// room for it. The caller holds the lock of the node's capabilities, if it sets these.
    fn set_any(
        &self,
        node: &Arc<Node>,
        name: &[u8],
        value: &[u8],
        how: XattrMode,
    ) -> Result<(), Errno> {
        self.ensure_upper(node)?;
        if name == CAPABILITIES && node.kind == FileType::Regular {
            // The host removes the capabilities at each write to the host file, so the partial file
            // must have no pending writes.
            let state = self.known_content(node)?;
            if let Content::Partial(partial) = &state.content {
                partial
                    .flush(self.durability())
                    .map_err(|error| self.content_failed(node, error))?;
            }
        }
        let file = self.open_upper(node, Access::Path)?;
        let stored = self.stored_name(node, name)?;
        let room = self.room(value.len(), 0)?;
        let set = Attribute::Path(file.as_fd()).set(&stored, value, how);
        self.measure(&*file);
        drop(room);
        set?;
        self.attributes_have_changed(node);
        match name {
            CAPABILITIES => node.may_be_privileged.store(true, Ordering::Release),
            DEFAULT_ACL => node.may_have_default_acl.store(true, Ordering::Release),
            // The ACL is stored under another name. So the host does not update the mode.
            ACCESS_ACL if self.keeps_owner(node) => self.apply_acl_mode(node, value)?,
            _ => {}
        }
        Ok(())
    }

    /// Runs a write that preserves the capabilities of the file. The host removes them at each
    /// write, so this function saves them before the write and sets them again afterwards. They are
    /// also set if the write copies the file up.
    pub(super) fn preserving_capabilities<T>(
        &self,
        id: NodeId,
        write: impl FnOnce() -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        if self.upper.names().stored_name(CAPABILITIES, false) != CAPABILITIES {
            // The capabilities are stored under another name, which the host does not interpret.
            return write();
        }
        let node = self.node(id)?;
        // The lock is held during the write. Otherwise, a concurrent write would find no
        // capabilities, and a concurrent change would be lost when they are set again.
        let mut known = node.capabilities.lock();
        let saved = match *known {
            Capabilities::None => None,
            Capabilities::Unknown => self.xattr_of(&node, CAPABILITIES)?,
        };
        let Some(saved) = saved else {
            *known = Capabilities::None;
            drop(known);
            return write();
        };
        let written = write();
        // The capabilities are set again also after a failed write, and also if the file still has
        // them: `set_any` completes the pending writes of a partial file, which would remove them
        // later.
        let restored = self.set_any(&node, CAPABILITIES, &saved, XattrMode::Any);
        written.and_then(|written| restored.map(|()| written))
    }

    /// Removes an extended attribute; `ENODATA` if the node does not have it, unless it is an ACL.
    pub fn remove_xattr(&self, id: NodeId, name: &[u8]) -> Result<(), Errno> {
        let node = self.node(id)?;
        check(name)?;
        let _lock = (name == CAPABILITIES).then(|| node.capabilities.lock());
        if self.xattr_of(&node, name)?.is_none() {
            return match name {
                // As in the kernel, the removal of an ACL that does not exist succeeds.
                ACCESS_ACL | DEFAULT_ACL => Ok(()),
                _ => Err(Errno::NODATA),
            };
        }
        self.ensure_upper(&node)?;
        let file = self.open_upper(&node, Access::Path)?;
        let stored = self.stored_name(&node, name)?;
        let removed = Attribute::Path(file.as_fd()).remove(&stored);
        self.measure(&*file);
        self.attributes_have_changed(&node);
        removed
    }

    /// Sets the permission bits that correspond to a new access ACL.
    fn apply_acl_mode(&self, node: &Node, acl: &[u8]) -> Result<(), Errno> {
        let bits = super::acl::mode_of(acl)?;
        let permissions = self.attributes_of(node)?.permissions & !0o777 | bits;
        let file = self.open_upper(node, Access::Path)?;
        let changes = Changes {
            permissions: Some(permissions),
            ..Changes::default()
        };
        self.change_owner(node, &file, &changes)
    }

    /// Updates the access ACL for a new mode. Only for nodes whose ACL is stored under another
    /// name, so that the host does not update it.
    pub(super) fn update_acl_mode(&self, node: &Node, permissions: u16) -> Result<(), Errno> {
        let Some(acl) = self.xattr_of(node, ACCESS_ACL)? else {
            return Ok(());
        };
        let changed = super::acl::with_mode(&acl, permissions)?;
        let file = self.open_upper(node, Access::Path)?;
        Attribute::Path(file.as_fd()).set(
            &self.stored_name(node, ACCESS_ACL)?,
            &changed,
            XattrMode::Any,
        )
    }

    /// The name under which the host stores an attribute.
    fn stored_name(&self, node: &Node, name: &[u8]) -> Result<Vec<u8>, Errno> {
        check(name)?;
        let names = self.upper.names();
        let stored = names.stored_name(name, node.id == NodeId::ROOT);
        // The escaped name is too long for the host.
        if stored.len() > NAME_MAX {
            Err(Errno::RANGE)
        } else {
            Ok(stored.into_owned())
        }
    }
}

/// Whether an attribute in the image is a mark of overlayfs or of bcow. A mount does not show
/// these: they have no meaning in a union that has the whole image as its lower.
pub(super) fn is_layer_mark(name: &[u8]) -> bool {
    name.starts_with(b"trusted.overlay.") || name.starts_with(b"trusted.bcow.")
}

/// Checks the name of an attribute.
fn check(name: &[u8]) -> Result<(), Errno> {
    match name.len() {
        0 => Err(Errno::RANGE),
        length if length > NAME_MAX => Err(Errno::RANGE),
        _ if name.contains(&0) => Err(Errno::INVAL),
        _ => Ok(()),
    }
}

/// Checks that the name of a new attribute is in a namespace of Linux. The host does not check this
/// where the upper stores the attribute under a `user.` name.
fn check_namespace(name: &[u8]) -> Result<(), Errno> {
    let rest = [b"user.".as_slice(), b"trusted.", b"security."]
        .into_iter()
        .find_map(|namespace| name.strip_prefix(namespace));
    match rest {
        Some([]) => Err(Errno::INVAL),
        Some(_) => Ok(()),
        None if name == ACCESS_ACL || name == DEFAULT_ACL => Ok(()),
        None => Err(Errno::OPNOTSUPP),
    }
}
