//! Attributes: read by stat, changed by chmod, chown, truncate and utimens.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use bcow_erofs::reader::{FileType, Inode, Nid};
use bcow_erofs::tree::DeviceNumber;
use rustix::fs::Stat;
use rustix::io::Errno;

use super::lookup::Access;
use super::nodes::{Content, Node, NodeState, Upper};
use super::types::{Attributes, Changes, SetTime, encode_device};
use super::{UnionFs, host};
use crate::host::{HiddenChange, file_times};
use crate::node::NodeId;
use crate::partial::Partial;
use crate::upper::{Attribute, OVERRIDE, Override, Ownership, XattrMode, host_mode};

/// The kernel's attribute for file capabilities.
pub(super) const CAPABILITIES: &[u8] = b"security.capability";

impl UnionFs {
    pub fn attributes(&self, id: NodeId) -> Result<Attributes, Errno> {
        self.attributes_of(&*self.node(id)?)
    }

    pub(super) fn attributes_of(&self, node: &Node) -> Result<Attributes, Errno> {
        loop {
            let state = node.read_state();
            let Some(upper) = &state.upper else {
                drop(state);
                return self.attributes_below(node);
            };
            let Some(file) = &upper.file else {
                drop(state);
                self.open_upper(node, Access::Path)?;
                continue;
            };
            let shown = |stat: Stat| {
                let mut attributes = attributes_above(node, &stat);
                upper.show_times(node, &stat, &mut attributes);
                attributes
            };
            let mut attributes = match &state.content {
                Content::Partial(partial) => shown(stat_partial(partial, file)?),
                _ if node.is_directory() => {
                    let _times = node.times.lock();
                    shown(rustix::fs::fstat(&**file)?)
                }
                _ => shown(rustix::fs::fstat(&**file)?),
            };
            if self.keeps_owner(node) {
                self.take_owner(node, file, &mut attributes)?;
            }
            if upper.indexed {
                let names = self.count_names(node.lower, file)?;
                attributes.nlink = u32::try_from(names.max(0)).unwrap_or(u32::MAX);
            }
            if let Some(nid) = node.lower.filter(|_| node.is_merged()) {
                self.take_form_of_merged(nid, &mut attributes)?;
            }
            if node.is_directory() && node.is_removed.load(Ordering::Acquire) {
                attributes.nlink = 0;
            }
            if node.kind == FileType::Regular {
                self.take_size(node, &state, upper, &mut attributes)?;
            }
            return Ok(attributes);
        }
    }

    /// Takes owner, mode and device from the attribute that keeps them.
    fn take_owner(
        &self,
        node: &Node,
        file: &File,
        attributes: &mut Attributes,
    ) -> Result<(), Errno> {
        let Some(owner) = self.read_owner(file)? else {
            if node.id == NodeId::ROOT {
                let root = self.image.inode(self.image.root())?;
                attributes.uid = root.uid;
                attributes.gid = root.gid;
                attributes.permissions = root.permissions;
            }
            return Ok(());
        };
        attributes.uid = owner.uid;
        attributes.gid = owner.gid;
        attributes.permissions = owner.permissions;
        if owner.kind.is_some() {
            attributes.rdev = owner.device.map_or(0, encode_device);
        }
        Ok(())
    }

    /// Sets the link count, size and sectors of a directory that is merged with one of the image.
    ///
    /// They are the same before and after its copy-up, and do not depend on the entries that the
    /// host's directory has: a copy-up adds entries to it. Counting the subdirectories would need
    /// both listings; a link count of 1 says, as in overlayfs and btrfs, that they are not counted.
    fn take_form_of_merged(&self, nid: Nid, attributes: &mut Attributes) -> Result<(), Errno> {
        let inode = self.image.inode(nid)?;
        attributes.nlink = links_of(&inode);
        attributes.size = inode.size;
        attributes.sectors = self.image.sectors(&inode)?;
        Ok(())
    }

    /// Sets size and sectors of a file with bytes in the image.
    fn take_size(
        &self,
        node: &Node,
        state: &NodeState,
        upper: &Upper,
        attributes: &mut Attributes,
    ) -> Result<(), Errno> {
        let Some(nid) = node.lower.filter(|_| upper.needs_image) else {
            return Ok(());
        };
        let inode = self.image.inode(nid)?;
        match &state.content {
            Content::Plain => return Ok(()),
            Content::Partial(partial) => attributes.size = partial.size(),
            // The host's file of a partial file has the right size.
            Content::Unknown if upper.is_partial => {}
            // A copy of metadata has the image's size. The host's file can have another size after
            // a crash undid a copy.
            Content::Unknown | Content::Lower => attributes.size = inode.size,
        }
        let whole = attributes.size.div_ceil(4096).saturating_mul(8);
        let below = self.image.sectors(&inode)?;
        attributes.sectors = attributes.sectors.saturating_add(below).min(whole);
        Ok(())
    }

    fn attributes_below(&self, node: &Node) -> Result<Attributes, Errno> {
        let inode = self.image.inode(node.lower.ok_or(Errno::STALE)?)?;
        let is_removed = node.is_removed.load(Ordering::Acquire);
        Ok(Attributes {
            nlink: if is_removed { 0 } else { links_of(&inode) },
            ..Attributes::of_inode(node.id, &inode, self.image.sectors(&inode)?)
        })
    }

    /// Whether the file may have set-id bits or capabilities. `false` is certain.
    pub fn may_be_privileged(&self, id: NodeId) -> Result<bool, Errno> {
        Ok(self.node(id)?.may_be_privileged.load(Ordering::Acquire))
    }

    /// Changes the given attributes and gives all attributes afterwards.
    pub fn set_attributes(&self, id: NodeId, changes: &Changes) -> Result<Attributes, Errno> {
        let node = self.node(id)?;
        if let Some(size) = changes.size {
            self.set_size(&node, size)?;
            if changes.drop_privileges {
                self.drop_privileges(&node)?;
            }
        }
        let owner = changes.uid.is_some() || changes.gid.is_some();
        let times = changes.atime.is_some() || changes.mtime.is_some();
        if owner || times || changes.permissions.is_some() {
            if node.kind == FileType::Symlink && changes.permissions.is_some() {
                return Err(Errno::OPNOTSUPP);
            }
            self.ensure_upper(&node)?;
            let file = self.open_upper(&node, Access::Path)?;
            if owner || changes.permissions.is_some() {
                self.change_owner(&node, &file, changes)?;
            }
            if let (Some(permissions), true) = (changes.permissions, self.keeps_owner(&node)) {
                self.update_acl_mode(&node, permissions)?;
            }
            if times {
                if let Content::Partial(partial) = &node.read_state().content {
                    partial
                        .settle()
                        .map_err(|error| self.content_failed(&node, error))?;
                }
                let mut kernel_time = node.kernel_time.lock();
                self.set_times(&node, changes.atime, changes.mtime)?;
                match changes.mtime {
                    Some(SetTime::At(time)) => *kernel_time = Some(time),
                    Some(SetTime::Now) => *kernel_time = None,
                    None => {}
                }
            } else {
                self.attributes_have_changed(&node);
            }
        }
        self.attributes_of(&node)
    }

    pub(super) fn change_owner(
        &self,
        node: &Node,
        file: &File,
        changes: &Changes,
    ) -> Result<(), Errno> {
        let changes_owner = changes.uid.is_some() || changes.gid.is_some();
        if self.keeps_owner(node) {
            // The attribute is read and rewritten as a whole, so the node's lock is held.
            let _state = node.write_state();
            let mut owner = self.read_override(node, file)?;
            owner.uid = changes.uid.unwrap_or(owner.uid);
            owner.gid = changes.gid.unwrap_or(owner.gid);
            if changes_owner && node.kind == FileType::Regular {
                owner.permissions = without_set_id(owner.permissions);
                self.remove_capabilities(file)?;
            }
            owner.permissions = changes.permissions.unwrap_or(owner.permissions);
            if node.id == NodeId::ROOT {
                self.set_override(file, &owner)?
            } else {
                self.write_override(file, &owner)?
            }
        } else {
            if changes_owner {
                // The host removes set-id bits and capabilities.
                host::set_owner(file, changes.uid, changes.gid)?;
            }
            if let Some(permissions) = changes.permissions {
                host::set_mode(file, permissions)?;
            }
        }
        // The change may have added the attribute that keeps the owner, or removed the
        // capabilities.
        self.measure(file);
        if changes.permissions.is_some_and(|bits| bits & 0o6000 != 0) {
            node.may_be_privileged.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Whether an attribute keeps owner and mode of this node: for all nodes where the process may
    /// not chown, and always for the root, because the host's directory may be more private than
    /// the container's root.
    pub(super) fn keeps_owner(&self, node: &Node) -> bool {
        (node.id == NodeId::ROOT || self.uses_override()) && node.kind != FileType::Symlink
    }

    /// Whether attributes keep the owners of all nodes except symlinks.
    pub(super) fn uses_override(&self) -> bool {
        self.upper.ownership() == Ownership::Override
    }

    fn read_override(&self, node: &Node, file: &File) -> Result<Override, Errno> {
        if let Some(owner) = self.read_owner(file)? {
            return Ok(owner);
        }
        if node.id == NodeId::ROOT {
            return Ok(owner_of_inode(&self.image.inode(self.image.root())?));
        }
        let stat = rustix::fs::fstat(file)?;
        Ok(Override {
            uid: stat.st_uid,
            gid: stat.st_gid,
            permissions: (stat.st_mode & 0o7777) as u16,
            kind: None,
            device: None,
        })
    }

    /// Writes the override attribute alone: the mode of the host's file stays, as for the root.
    pub(super) fn set_override(&self, file: &File, owner: &Override) -> Result<(), Errno> {
        Attribute::Path(file.as_fd()).set(OVERRIDE, owner.encode().as_bytes(), XattrMode::Any)
    }

    /// Writes the override attribute, and sets the corresponding mode of the host's file.
    pub(super) fn write_override(&self, file: &File, owner: &Override) -> Result<(), Errno> {
        self.set_override(file, owner)?;
        let is_directory = owner.kind == Some(FileType::Directory);
        host::set_mode(file, host_mode(owner.permissions, is_directory) as u16)
    }

    pub(super) fn read_owner(&self, file: &File) -> Result<Option<Override>, Errno> {
        match Attribute::Path(file.as_fd()).get(OVERRIDE)? {
            Some(value) => Override::decode(&value).map(Some).map_err(|error| {
                self.damaged(b"", &error.to_string());
                Errno::IO
            }),
            None => Ok(None),
        }
    }

    fn remove_capabilities(&self, file: &File) -> Result<(), Errno> {
        let name = self
            .upper
            .names()
            .stored_name(CAPABILITIES, false)
            .into_owned();
        Attribute::Path(file.as_fd()).clear(&name).map(drop)
    }

    /// Removes set-id bits and capabilities, as after a write without privileges.
    pub(super) fn drop_privileges(&self, node: &Node) -> Result<(), Errno> {
        if !node.may_be_privileged.load(Ordering::Acquire) {
            return Ok(());
        }
        let file = self.open_upper(node, Access::Path)?;
        {
            let _held = node.capabilities.lock();
            self.remove_capabilities(&file)?;
        }
        self.measure(&*file);
        let permissions = if self.keeps_owner(node) {
            self.read_override(node, &file)?.permissions
        } else {
            (rustix::fs::fstat(&*file)?.st_mode & 0o7777) as u16
        };
        let kept = without_set_id(permissions);
        if kept != permissions {
            let changes = Changes {
                permissions: Some(kept),
                ..Changes::default()
            };
            self.change_owner(node, &file, &changes)?;
        }
        node.may_be_privileged.store(false, Ordering::Release);
        Ok(())
    }
}

/// Clears the set-user-ID bit, and the set-group-ID bit if the file is group-executable. Without
/// group execution that bit does not mean set-group-ID.
pub(super) fn without_set_id(permissions: u16) -> u16 {
    let mut kept = permissions & !0o4000;
    if permissions & 0o0010 != 0 {
        kept &= !0o2000;
    }
    kept
}

/// The link count that the mount shows for an inode of the image whose names no program changed.
fn links_of(inode: &Inode) -> u32 {
    match inode.kind {
        FileType::Directory => 1,
        _ => inode.nlink,
    }
}

/// Owner, mode and type of an inode of the image, in the form of the attribute.
pub(super) fn owner_of_inode(inode: &Inode) -> Override {
    Override {
        uid: inode.uid,
        gid: inode.gid,
        permissions: inode.permissions,
        kind: Some(inode.kind),
        device: inode.rdev,
    }
}

/// The stat of the host file of a partial file, at a moment when its times are those of the last
/// change by a program.
fn stat_partial(partial: &Partial, file: &File) -> Result<Stat, Errno> {
    partial.hold_times(|hidden| {
        let mut stat = rustix::fs::fstat(file)?;
        let shown = HiddenChange::shown(hidden, file_times(&stat));
        (stat.st_ctime, stat.st_ctime_nsec) = (shown.tv_sec, shown.tv_nsec as u64);
        Ok(stat)
    })
}

/// The attributes of a node as the host has them.
pub(super) fn attributes_above(node: &Node, stat: &Stat) -> Attributes {
    let (atime, mtime) = host::times(stat);
    Attributes {
        node: node.id,
        kind: node.kind,
        permissions: (stat.st_mode & 0o7777) as u16,
        nlink: u32::try_from(UnionFs::links_in_tree(node, stat.st_nlink)).unwrap_or(u32::MAX),
        uid: stat.st_uid,
        gid: stat.st_gid,
        size: u64::try_from(stat.st_size).unwrap_or(0),
        sectors: u64::try_from(stat.st_blocks).unwrap_or(0),
        rdev: encode_device(DeviceNumber {
            major: rustix::fs::major(stat.st_rdev),
            minor: rustix::fs::minor(stat.st_rdev),
        }),
        atime,
        mtime,
        ctime: host::timestamp(stat.st_ctime, stat.st_ctime_nsec),
    }
}
