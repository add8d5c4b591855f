//! Creation of names: files, directories, symbolic links, devices and hard links.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bcow_erofs::reader::FileType;
use rustix::fs::{AtFlags, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::attributes::attributes_above;
use super::lookup::{Access, NAME_MAX, UPPER_ONLY};
use super::nodes::{Capabilities, Content, HostPlace, Node, NodeState, Upper};
use super::resent::New;
use super::types::{Attributes, Caller, decode_device};
use super::upper_entry::UpperEntry;
use super::{UnionFs, host};
use crate::node::NodeId;
use crate::upper::{
    ACCESS_ACL, Attribute, DEFAULT_ACL, Mark, Override, Temporary, XattrMode, set_noatime_new,
};

/// Set-group-ID bit.
const SET_GID: u16 = 0o2000;

/// A free place for a new name.
pub(super) struct NewName {
    /// The directory on the host.
    pub(super) directory: Arc<File>,
    /// Whether a whiteout is at the name.
    pub(super) is_whited_out: bool,
}

/// Owner, mode and ACL of a new inode.
struct NewOwner {
    uid: u32,
    gid: u32,
    permissions: u16,
    /// The parent's default ACL, which the new inode inherits.
    acl: Option<Vec<u8>>,
    /// The group that the host gives to an inode in the parent, if the host's directory determines
    /// it, and if that is known.
    host_group: HostGroup,
}

/// The group of an inode that the host makes in a directory.
#[derive(Debug, Clone, Copy)]
enum HostGroup {
    /// Only the host's directory shows it.
    Unknown,
    OfProcess,
    /// That of the directory.
    Inherited(u32),
}

/// A new node, and its attributes on the host if they are those of the node.
type Made = (Arc<Node>, Option<Stat>);

impl UnionFs {
    /// Creates an object and gives its attributes. Counts one reference to the new node.
    ///
    /// Errors include: `EEXIST` if the name exists, `EPERM` for the name of the upper's own
    /// directory, `ENOSPC` at a limit of the upper.
    pub fn make(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &[u8],
        permissions: u16,
        new: &New<'_>,
    ) -> Result<Attributes, Errno> {
        let parent = self.node(parent)?;
        check_new_name(name)?;
        self.ensure_directory(&parent)?;
        let (node, stat) = {
            let _names = parent.names.lock();
            match self.make_named(caller, &parent, name, permissions, new) {
                // The name exists, or it has a whiteout.
                Err(Errno::EXIST) => {
                    let new_name = self.new_name(&parent, name)?;
                    self.make_in(caller, &parent, &new_name, name, permissions, new)?
                }
                made => made?,
            }
        };
        match stat {
            Some(stat) => {
                let attributes = attributes_above(&node, &stat);
                self.table.hold(&node, 1);
                Ok(attributes)
            }
            None => self.hold(&node),
        }
    }

    /// Makes an object of a name that neither the image nor the upper has; `EEXIST` otherwise. The
    /// kernel looked the name up before, so this is the usual case, and the host checks the name in
    /// the upper when it makes the object.
    fn make_named(
        &self,
        caller: &Caller,
        parent: &Arc<Node>,
        name: &[u8],
        permissions: u16,
        new: &New<'_>,
    ) -> Result<Made, Errno> {
        if self.is_reserved(parent, name) {
            return Err(Errno::PERM);
        }
        if self.lookup_lower(parent, name)?.is_some() {
            return Err(Errno::EXIST);
        }
        let new_name = NewName {
            directory: self.open_upper(parent, Access::Directory)?,
            is_whited_out: false,
        };
        self.make_in(caller, parent, &new_name, name, permissions, new)
    }

    fn make_in(
        &self,
        caller: &Caller,
        parent: &Arc<Node>,
        new_name: &NewName,
        name: &[u8],
        permissions: u16,
        new: &New<'_>,
    ) -> Result<Made, Errno> {
        let owned = self.owned_in(caller, parent, permissions, new)?;
        let room = self.room(0, 1)?;
        let made = self.make_at(parent, new_name, name, &owned, new);
        self.measure(&*new_name.directory);
        let (file, stat) = made?;
        self.measure(&file);
        drop(room);
        parent.names_changed.change();
        let host_inode = match &stat {
            Some(stat) => stat.st_ino,
            None => rustix::fs::fstat(&file)?.st_ino,
        };
        let node = self.new_node(parent, name, new, &owned, file, host_inode)?;
        Ok((node, stat))
    }

    /// The free place of `name` in `parent`; `EEXIST` if the name exists. The parent is in the
    /// upper, and the caller holds the lock of its names.
    pub(super) fn new_name(&self, parent: &Node, name: &[u8]) -> Result<NewName, Errno> {
        if self.is_reserved(parent, name) {
            return Err(Errno::PERM);
        }
        let directory = self.open_upper(parent, Access::Directory)?;
        let is_whited_out = match self.lookup_upper(&directory, name)? {
            UpperEntry::Object(_) => return Err(Errno::EXIST),
            UpperEntry::Whiteout => true,
            UpperEntry::Absent if self.lookup_lower(parent, name)?.is_some() => {
                return Err(Errno::EXIST);
            }
            UpperEntry::Absent => false,
        };
        Ok(NewName {
            directory,
            is_whited_out,
        })
    }

    /// Owner, mode and ACL of an inode that `caller` creates in `parent`.
    fn owned_in(
        &self,
        caller: &Caller,
        parent: &Node,
        permissions: u16,
        new: &New<'_>,
    ) -> Result<NewOwner, Errno> {
        let above = self.attributes_of(parent)?;
        let inherits_group = above.permissions & SET_GID != 0;
        let acl = match new {
            New::Symlink(_) => None,
            _ => self.default_acl(parent)?,
        };
        // A default ACL replaces the umask.
        let mut permissions = match new {
            New::Symlink(_) => permissions,
            _ if acl.is_some() => permissions,
            _ => permissions & !(caller.umask as u16 & 0o777),
        };
        if inherits_group && matches!(new, New::Directory) {
            permissions |= SET_GID;
        }
        let host_group = match (self.keeps_owner(parent), inherits_group) {
            (true, _) => HostGroup::Unknown,
            (false, true) => HostGroup::Inherited(above.gid),
            (false, false) => HostGroup::OfProcess,
        };
        Ok(NewOwner {
            uid: caller.uid,
            gid: if inherits_group { above.gid } else { caller.gid },
            permissions,
            acl,
            host_group,
        })
    }

    fn default_acl(&self, parent: &Node) -> Result<Option<Vec<u8>>, Errno> {
        if !parent.may_have_default_acl.load(Ordering::Acquire) {
            return Ok(None);
        }
        let acl = self.xattr_of(parent, DEFAULT_ACL)?;
        if acl.is_none() {
            parent.may_have_default_acl.store(false, Ordering::Release);
        }
        Ok(acl)
    }

    /// Makes the object on the host, complete, and opens it.
    fn make_at(
        &self,
        parent: &Node,
        new_name: &NewName,
        name: &[u8],
        owned: &NewOwner,
        new: &New<'_>,
    ) -> Result<(File, Option<Stat>), Errno> {
        if matches!(new, New::File | New::Directory)
            && !new_name.is_whited_out
            && owned.acl.is_none()
            && self.inherits_right_owner(new_name, owned)?
        {
            return self.make_in_place(new_name, name, owned, new);
        }
        let (temporary, file) = match new {
            New::File => self.upper.temporary_file(0o600)?,
            New::Directory => self.upper.temporary_directory()?,
            New::Symlink(target) => self.opened(self.upper.temporary_symlink(target)?)?,
            New::Special(kind, rdev) => self.make_special(*kind, Some(decode_device(*rdev)))?,
        };
        self.own(&file, owned, new)?;
        if matches!(new, New::Directory) && self.lookup_lower(parent, name)?.is_some() {
            // The new directory must not be merged with the image's directory of this name.
            self.set_mark(&file, Mark::Opaque, b"y")?;
        }
        place(temporary, new_name, name, matches!(new, New::Directory))?;
        Ok((file, None))
    }

    /// Whether an inode that the host creates in this place has the right owner at once. Then a
    /// crash cannot leave it with another owner.
    fn inherits_right_owner(&self, new_name: &NewName, owned: &NewOwner) -> Result<bool, Errno> {
        if self.uses_override() || owned.uid != rustix::process::geteuid().as_raw() {
            return Ok(false);
        }
        let group = match owned.host_group {
            HostGroup::Unknown => {
                let stat = rustix::fs::fstat(&*new_name.directory)?;
                match stat.st_mode & u32::from(SET_GID) {
                    0 => HostGroup::OfProcess,
                    _ => HostGroup::Inherited(stat.st_gid),
                }
            }
            known => known,
        };
        Ok(match group {
            HostGroup::Inherited(gid) => owned.gid == gid,
            HostGroup::OfProcess | HostGroup::Unknown => {
                owned.gid == rustix::process::getegid().as_raw()
            }
        })
    }

    /// Makes a file or a directory under its own name.
    fn make_in_place(
        &self,
        new_name: &NewName,
        name: &[u8],
        owned: &NewOwner,
        new: &New<'_>,
    ) -> Result<(File, Option<Stat>), Errno> {
        let directory = &*new_name.directory;
        // The set-id and sticky bits are set after the owner.
        let mode = Mode::from_raw_mode(u32::from(owned.permissions) & 0o777);
        let (opened, removal) = if matches!(new, New::Directory) {
            rustix::fs::mkdirat(directory, name, mode)?;
            (host::open_directory(directory, name), AtFlags::REMOVEDIR)
        } else {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
            let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = rustix::fs::openat(directory, name, flags, mode)?;
            set_noatime_new(&file);
            (Ok(File::from(file)), AtFlags::empty())
        };
        let made = opened.and_then(|file| {
            let stat = self.own(&file, owned, new)?;
            Ok((file, stat))
        });
        if made.is_err() {
            let _ = rustix::fs::unlinkat(directory, name, removal);
        }
        made
    }

    /// Sets owner, mode and ACL. Gives the attributes on the host if owner and mode were right.
    fn own(&self, file: &File, owned: &NewOwner, new: &New<'_>) -> Result<Option<Stat>, Errno> {
        let is_symlink = matches!(new, New::Symlink(_));
        let (access, permissions) = match &owned.acl {
            Some(default) => super::acl::inherited(default, owned.permissions)?,
            None => (None, owned.permissions),
        };
        if let Some(default) = &owned.acl {
            let names = self.upper.names();
            let at = Attribute::Path(file.as_fd());
            if let Some(access) = access {
                at.set(
                    &names.stored_name(ACCESS_ACL, false),
                    &access,
                    XattrMode::Any,
                )?;
            }
            if matches!(new, New::Directory) {
                at.set(
                    &names.stored_name(DEFAULT_ACL, false),
                    default,
                    XattrMode::Any,
                )?;
            }
        }
        if self.uses_override() {
            if !is_symlink {
                let owner = Override {
                    uid: owned.uid,
                    gid: owned.gid,
                    permissions,
                    kind: Some(new.kind()),
                    device: match new {
                        New::Special(_, rdev) => Some(decode_device(*rdev)),
                        _ => None,
                    },
                };
                self.write_override(file, &owner)?;
            }
            return Ok(None);
        }
        let stat = rustix::fs::fstat(file)?;
        let has_owner = (stat.st_uid, stat.st_gid) == (owned.uid, owned.gid);
        let has_mode = is_symlink || stat.st_mode & 0o7777 == u32::from(permissions);
        if !has_owner {
            host::set_owner(file, Some(owned.uid), Some(owned.gid))?;
        }
        // After the owner: a change of owner removes set-id bits.
        if !has_mode {
            host::set_mode(file, permissions)?;
        }
        Ok((has_owner && has_mode).then_some(stat))
    }

    /// Sets owner, mode and ACL of an object that a process made which may not have set them.
    pub(super) fn own_new(
        &self,
        caller: &Caller,
        parent: &Node,
        permissions: u16,
        new: &New<'_>,
        file: &File,
    ) -> Result<(), Errno> {
        let owned = self.owned_in(caller, parent, permissions, new)?;
        self.own(file, &owned, new).map(drop)
    }

    /// The node of a new object.
    fn new_node(
        &self,
        parent: &Arc<Node>,
        name: &[u8],
        new: &New<'_>,
        owned: &NewOwner,
        file: File,
        host_inode: u64,
    ) -> Result<Arc<Node>, Errno> {
        let id = NodeId(UPPER_ONLY | host_inode);
        let kind = new.kind();
        let is_fully_open = matches!(new, New::File | New::Directory);
        let state = NodeState {
            upper: Some(Upper::made(file, host_inode, is_fully_open)),
            content: match kind {
                FileType::Regular => Content::Plain,
                _ => Content::Unknown,
            },
        };
        let mut state = Some(state);
        let node = self.table.get_or_insert(id, || {
            let node = Node::new(id, kind, None, HostPlace::at(parent, name));
            let is_privileged = owned.permissions & 0o6000 != 0;
            node.may_be_privileged
                .store(is_privileged, Ordering::Release);
            *node.capabilities.lock() = Capabilities::None;
            if let Some(state) = state.take() {
                *node.write_state() = state;
            }
            node.name_is_new.store(true, Ordering::Release);
            if let New::Symlink(target) = new {
                let _ = node.target.set((*target).into());
            }
            node
        });
        // After the insertion: a recount that began in between would not find the node.
        self.descriptors.fetch_add(1, Ordering::Relaxed);
        // The open descriptor keeps the host from reusing the inode number, so the id must be new.
        match state {
            None => Ok(node),
            Some(_) => Err(Errno::STALE),
        }
    }

    /// Adds a hard link to a file. Counts one reference to its node.
    pub fn link(&self, id: NodeId, parent: NodeId, name: &[u8]) -> Result<Attributes, Errno> {
        let node = self.node(id)?;
        let parent = self.node(parent)?;
        check_new_name(name)?;
        if node.is_directory() {
            return Err(Errno::PERM);
        }
        if matches!(node.place(), HostPlace::Nowhere) && self.attributes_of(&node)?.nlink == 0 {
            return Err(Errno::NOENT);
        }
        self.ensure_upper(&node)?;
        self.redirect(&node)?;
        self.ensure_directory(&parent)?;
        {
            let _names = parent.names.lock();
            let new_name = self.new_name(&parent, name)?;
            let _room = self.room(0, 0)?;
            let file = self.open_upper(&node, Access::Path)?;
            let names = self.lock_names(&node)?;
            if new_name.is_whited_out {
                let temporary = self.upper.temporary_name();
                host::link(&file, self.upper.work(), temporary.as_bytes())?;
                let kind = rustix::fs::FileType::RegularFile;
                let temporary = self.upper.temporary_at(temporary, kind);
                temporary.place(new_name.directory.as_fd(), name)?;
            } else {
                host::link(&file, &*new_name.directory, name)?;
            }
            drop(names);
            self.measure(&*new_name.directory);
            parent.names_changed.change();
            node.name_is_new.store(true, Ordering::Release);
            if matches!(node.place(), HostPlace::Nowhere) {
                node.set_place(HostPlace::at(&parent, name));
            }
        }
        self.hold(&node)
    }

    /// Records a node's path in the image in its redirect mark, before the node gets another path.
    /// Only for nodes that still use a part of the image.
    pub(super) fn redirect(&self, node: &Node) -> Result<(), Errno> {
        let needs = node.read_state().upper.as_ref().is_some_and(|upper| {
            let uses_image = node.is_directory() || upper.needs_image || upper.in_batch;
            upper.redirect.is_none() && node.lower.is_some() && uses_image
        });
        if !needs {
            return Ok(());
        }
        // If the inode has several names in the image, the node's known name may exist only in the
        // upper.
        let path = match self.lower_path(node) {
            Ok(path) if self.image.at_path(&path)? == node.lower => Some(path),
            Ok(_) | Err(Errno::NOENT) => None,
            Err(errno) => return Err(errno),
        };
        let file = self.open_upper(node, Access::Path)?;
        let value = match &path {
            Some(path) => crate::upper::Redirect::Path(path.clone()).encode(),
            // This union uses the origin mark. The redirect must keep overlayfs from using a name.
            None => crate::upper::REDIRECT_NOWHERE.to_vec(),
        };
        let _room = self.room(value.len(), 0)?;
        if let (Some(nid), Some(upper)) = (node.lower, &mut node.write_state().upper)
            && !upper.has_origin
        {
            // overlayfs made this copy, and it was found by its name. That name will lead
            // elsewhere.
            self.set_origin(&file, nid)?;
            upper.has_origin = true;
        }
        let marked = self.set_mark(&file, Mark::Redirect, &value);
        self.measure(&*file);
        match marked {
            // The path is longer than an attribute can be. This union uses the origin mark.
            Err(Errno::NOSPC | Errno::TOOBIG | Errno::RANGE) => {}
            other => other?,
        }
        if let Some(upper) = &mut node.write_state().upper {
            upper.redirect = Some(path.unwrap_or_default().into_boxed_slice());
        }
        Ok(())
    }
}

/// Moves a temporary to its place, over a whiteout if there is one.
fn place(
    temporary: Temporary<'_>,
    new_name: &NewName,
    name: &[u8],
    is_directory: bool,
) -> Result<(), Errno> {
    let directory = new_name.directory.as_fd();
    match (new_name.is_whited_out, is_directory) {
        (false, _) => temporary.place_new(directory, name),
        (true, false) => temporary.place(directory, name),
        // rename(2) cannot put a directory over a whiteout. After the exchange the temporary is the
        // whiteout, which is removed.
        (true, true) => temporary
            .exchange(directory, name, rustix::fs::FileType::CharacterDevice)
            .map(drop),
    }
}

/// Checks a name for a new object.
pub(super) fn check_new_name(name: &[u8]) -> Result<(), Errno> {
    match name {
        b"" => Err(Errno::NOENT),
        b"." | b".." => Err(Errno::EXIST),
        name if name.len() > NAME_MAX => Err(Errno::NAMETOOLONG),
        name if name.contains(&b'/') || name.contains(&0) => Err(Errno::INVAL),
        _ => Ok(()),
    }
}
