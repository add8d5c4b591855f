//! Copy-up: gives an object of the image a place in the upper, and defers the copy of its bytes
//! where possible.
//!
//! Each copy is completed in the work directory and moved into place with one rename. After a crash
//! the object is either in the image only or complete in the upper. A regular file becomes a *copy
//! of metadata*: a host file of the right size without blocks, with overlayfs's metacopy mark.
//! [`super::first_write`] copies the bytes later, or makes a partial file.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bcow_erofs::reader::{FileType, Inode, Nid};
use parking_lot::Mutex;
use rustix::fs::{AtFlags, Dir};
use rustix::io::Errno;

use super::attributes::{CAPABILITIES, owner_of_inode};
use super::lookup::{Access, index_name};
use super::nodes::{Content, HostPlace, Node, NodeState, Upper};
use super::types::SetTime;
use super::xattr::is_layer_mark;
use super::{UnionFs, host};
use crate::upper::{
    Attribute, META, Mark, Metacopy, Namespace, Origin, Override, Provenance, Temporary, TimesMark,
    XattrMode,
};

impl UnionFs {
    /// Gives the root of a new upper the attributes and times of the image's root. Owner and mode
    /// remain the image's until a request changes them; the override attribute then records them.
    /// The origin mark is set last and records that this step was done.
    pub(super) fn complete_root(&self) -> Result<(), Errno> {
        let file = self.open_upper(&self.root, Access::Directory)?;
        let completed = self.complete_root_at(&file);
        self.measure(&*file);
        completed?;
        self.read_times_of_root(&file)
    }

    fn complete_root_at(&self, file: &File) -> Result<(), Errno> {
        let origin = Mark::Origin.name(self.upper.namespace());
        let is_complete = Attribute::Path(file.as_fd()).get(origin)?.is_some();
        if is_complete {
            return Ok(());
        }
        let inode = self.image.inode(self.image.root())?;
        if self.upper.provenance() == Provenance::Adopted {
            self.adopt_root(file, &inode)?;
            return self.set_origin(file, inode.nid);
        }
        if is_nonempty(file)? {
            // If the root of the upper has entries, the upper was used before. Its attributes stay,
            // because a program may have changed them.
            return self.set_origin(file, inode.nid);
        }
        self.copy_xattrs(&inode, file)?;
        if self.uses_override() {
            // Other tools take this attribute of the root as the sign that the upper records all
            // owners in override attributes.
            self.set_override(file, &owner_of_inode(&inode))?;
        }
        self.set_times_of_copy(file, &inode)?;
        self.set_origin(file, inode.nid)
    }

    /// Adopts the root of an upper that another program made: its attributes stay as overlayfs
    /// shows them. If owner or mode of the host's directory differ from those of the image's root,
    /// the override attribute records those of the directory.
    fn adopt_root(&self, file: &File, inode: &Inode) -> Result<(), Errno> {
        if self.uses_override() || self.read_owner(file)?.is_some() {
            return Ok(());
        }
        let stat = rustix::fs::fstat(file)?;
        let of_upper = Override {
            uid: stat.st_uid,
            gid: stat.st_gid,
            permissions: (stat.st_mode & 0o7777) as u16,
            ..owner_of_inode(inode)
        };
        if of_upper == owner_of_inode(inode) {
            Ok(())
        } else {
            self.set_override(file, &of_upper)
        }
    }

    /// The node's directory in the upper. Copies up the directory, and first the directories above
    /// it, where they are missing.
    pub(super) fn ensure_directory(&self, node: &Arc<Node>) -> Result<Arc<File>, Errno> {
        // A loop up to the first directory that is in the upper, and back down: recursion could
        // overflow the stack on a deep path.
        let mut missing = Vec::new();
        let mut here = Arc::clone(node);
        loop {
            if here.read_state().upper.is_some() {
                break;
            }
            match here.place() {
                HostPlace::At { parent, .. } => missing.push(std::mem::replace(&mut here, parent)),
                // The directory was removed while a program still uses it.
                HostPlace::Nowhere | HostPlace::Root => return Err(Errno::NOENT),
            }
        }
        while let Some(directory) = missing.pop() {
            self.copy_up_at_place(&directory)?;
            // Each copied directory is open now, and there may be more directories than
            // descriptors.
            self.limit_descriptors();
        }
        self.open_upper(node, Access::Directory)
    }

    /// Makes sure that the node is in the upper.
    pub(super) fn ensure_upper(&self, node: &Arc<Node>) -> Result<(), Errno> {
        if node.read_state().upper.is_some() {
            return Ok(());
        }
        if node.is_directory() {
            return self.ensure_directory(node).map(drop);
        }
        self.copy_up_at_place(node)
    }

    /// Copies up a node whose parent is in the upper or will be copied up here.
    fn copy_up_at_place(&self, node: &Arc<Node>) -> Result<(), Errno> {
        loop {
            let HostPlace::At { parent, name } = node.place() else {
                return self.copy_up_nameless(node);
            };
            let directory = if node.is_directory() {
                // The directories above were copied up before.
                self.open_upper(&parent, Access::Directory)?
            } else {
                self.ensure_directory(&parent)?
            };
            let _names = parent.names.lock();
            // Another thread may have renamed or removed it meanwhile.
            if node.is_at(&parent, &name) {
                return self.copy_up_locked(&parent, &directory, &name, node);
            }
        }
    }

    /// Copies up a node that exists only in the image, as `name` in `directory`. Does nothing if
    /// the node is in the upper. `directory` is the upper's directory of `parent`, and the caller
    /// holds the lock of its names.
    pub(super) fn copy_up_locked(
        &self,
        parent: &Node,
        directory: &File,
        name: &[u8],
        node: &Node,
    ) -> Result<(), Errno> {
        // The usual case does not wait for I/O of the node.
        if node.read_state().upper.is_some() {
            return Ok(());
        }
        let mut state = node.write_state();
        if state.upper.is_some() {
            return Ok(());
        }
        let inode = self.image.inode(node.lower.ok_or(Errno::STALE)?)?;
        let has_hard_links = inode.kind != FileType::Directory && inode.nlink > 1;
        let _room = self.room(0, 1)?;
        let (temporary, file, times_mark) = self.make_copy(&inode)?;
        let links = i64::from(inode.nlink);
        if has_hard_links {
            self.set_names_lower(inode.nid, &file, links)?;
            host::link(&file, self.upper.index(), &index_name(inode.nid))?;
        }
        let placed = preserve_times(parent, directory, || {
            temporary.place_new(directory.as_fd(), name)
        });
        self.measure(directory);
        if has_hard_links {
            self.measure(self.upper.index());
        }
        if let Err(errno) = placed {
            if has_hard_links {
                self.remove_index_entry(inode.nid);
            }
            return Err(errno);
        }
        parent.names_changed.change();
        if has_hard_links && let Err(errno) = self.set_names_upper(&file, links) {
            // The present mark is correct. The next change of the link count writes it again.
            self.host_failed(name, "cannot write the nlink mark", errno);
        }
        self.measure(&file);
        self.finish_copy(node, &mut state, &inode, (file, times_mark), has_hard_links)
    }

    /// Adds the name `name` in `directory` to a node that is in the upper under another name or in
    /// the index.
    pub(super) fn copy_up_name(
        &self,
        parent: &Node,
        directory: &File,
        name: &[u8],
        node: &Node,
    ) -> Result<(), Errno> {
        if host::stat_at(directory, name)?.is_some() {
            return Ok(());
        }
        let _room = self.room(0, 0)?;
        // The host's link count grows by one, and the number of names stays.
        let recount = self.begin_recount(node)?.ok_or(Errno::STALE)?;
        let linked = preserve_times(parent, directory, || {
            host::link(&recount.file, directory, name)
        });
        self.end_recount(Some(recount), 0);
        self.measure(directory);
        linked?;
        parent.names_changed.change();
        Ok(())
    }

    /// Removes the index entry of an inode. Returns whether the inode has none now.
    pub(super) fn remove_index_entry(&self, nid: Nid) -> bool {
        match rustix::fs::unlinkat(self.upper.index(), index_name(nid), AtFlags::empty()) {
            Ok(()) => self.measure(self.upper.index()),
            Err(Errno::NOENT) => {}
            // `fsck` finds the stale entry.
            Err(errno) => {
                self.host_failed(&index_name(nid), "cannot remove the index entry", errno);
                return false;
            }
        }
        true
    }

    /// Copies up a file that has no name any more but is still open.
    fn copy_up_nameless(&self, node: &Node) -> Result<(), Errno> {
        let mut state = node.write_state();
        if state.upper.is_some() {
            return Ok(());
        }
        if node.is_directory() {
            return Err(Errno::NOENT);
        }
        let inode = self.image.inode(node.lower.ok_or(Errno::STALE)?)?;
        let _room = self.room(0, 1)?;
        // `_temporary` unlinks the file when it is dropped; the descriptor stays open.
        let (_temporary, file, times_mark) = self.make_copy(&inode)?;
        self.measure(&file);
        self.keep_orphan(node, &file);
        self.release_on_drop(node);
        self.finish_copy(node, &mut state, &inode, (file, times_mark), false)
    }

    fn finish_copy(
        &self,
        node: &Node,
        state: &mut NodeState,
        inode: &Inode,
        (file, times_mark): (File, Option<TimesMark>),
        indexed: bool,
    ) -> Result<(), Errno> {
        let stat = rustix::fs::fstat(&file)?;
        if inode.kind == FileType::Symlink {
            let _ = node.target.set(self.image.read_link(inode)?.into());
        }
        let is_regular = inode.kind == FileType::Regular;
        let is_fully_open = is_regular || inode.kind == FileType::Directory;
        state.upper = Some(Upper {
            indexed,
            needs_image: is_regular,
            times_mark: Mutex::new(times_mark),
            ..Upper::made(file, stat.st_ino, is_fully_open)
        });
        if is_regular {
            state.content = Content::Lower;
        }
        if let Some(entry) = node.entry() {
            entry.set_host_inode(stat.st_ino);
        }
        self.descriptors.fetch_add(1, Ordering::Relaxed);
        self.copied_metadata.fetch_add(1, Ordering::Relaxed);
        node.name_is_new.store(true, Ordering::Release);
        Ok(())
    }

    /// Whether the host's copy of this inode would be a whiteout: the image has a character device
    /// 0:0, and the upper does not record types in override attributes.
    pub(super) fn would_be_whiteout(&self, inode: &Inode) -> bool {
        let device = inode.rdev.map(|device| (device.major, device.minor));
        inode.kind == FileType::CharDevice && device == Some((0, 0)) && !self.uses_override()
    }

    /// Makes a copy of an inode in the work directory, complete except for its bytes, and opens it.
    /// Gives also its mark of times that the host cannot store.
    fn make_copy(&self, inode: &Inode) -> Result<(Temporary<'_>, File, Option<TimesMark>), Errno> {
        if self.would_be_whiteout(inode) {
            return Err(Errno::PERM);
        }
        let (temporary, file) = match inode.kind {
            FileType::Directory => self.upper.temporary_directory()?,
            FileType::Regular => {
                let (temporary, file) = self.upper.temporary_file(0o600)?;
                rustix::fs::ftruncate(&file, inode.size)?;
                (temporary, file)
            }
            FileType::Symlink => {
                let target = self.image.read_link(inode)?;
                self.opened(self.upper.temporary_symlink(&target)?)?
            }
            FileType::CharDevice | FileType::BlockDevice | FileType::Fifo | FileType::Socket => {
                self.make_special(inode.kind, inode.rdev)?
            }
        };
        self.copy_xattrs(inode, &file)?;
        self.set_origin(&file, inode.nid)?;
        if inode.kind == FileType::Regular {
            self.set_metacopy(&file, Metacopy::Whole)?;
        }
        if self.uses_override() && inode.kind != FileType::Symlink {
            self.write_override(&file, &owner_of_inode(inode))?;
        } else if !self.uses_override() {
            host::set_owner(&file, Some(inode.uid), Some(inode.gid))?;
            if inode.kind != FileType::Symlink {
                host::set_mode(&file, inode.permissions)?;
            }
        }
        // After the owner: a change of owner removes capabilities.
        self.copy_capabilities(inode, &file)?;
        let times_mark = self.set_times_of_copy(&file, inode)?;
        Ok((temporary, file, times_mark))
    }

    /// Makes a device, pipe or socket in the work directory. Where owners and types are kept in
    /// attributes, a regular file represents it.
    pub(super) fn make_special(
        &self,
        kind: FileType,
        device: Option<bcow_erofs::tree::DeviceNumber>,
    ) -> Result<(Temporary<'_>, File), Errno> {
        if self.uses_override() {
            return self.upper.temporary_file(0o600);
        }
        let number = device.map_or(0, |device| rustix::fs::makedev(device.major, device.minor));
        let kind = rustix::fs::FileType::from_raw_mode(kind.mode_bits());
        self.opened(self.upper.temporary_node(kind, 0o600, number)?)
    }

    /// A temporary, and its object open with `O_PATH`.
    pub(super) fn opened<'t>(
        &self,
        temporary: Temporary<'t>,
    ) -> Result<(Temporary<'t>, File), Errno> {
        let (work, name) = temporary.at();
        let file = host::open_path(work, name.as_bytes())?.ok_or(Errno::STALE)?;
        Ok((temporary, file))
    }

    fn copy_xattrs(&self, inode: &Inode, file: &File) -> Result<(), Errno> {
        if !inode.has_xattrs() {
            return Ok(());
        }
        let xattr_names = self.upper.names();
        for (name, value) in self.image.xattrs(inode)? {
            if is_layer_mark(&name) || name == CAPABILITIES {
                continue;
            }
            let stored = xattr_names.stored_name(&name, inode.nid == self.image.root());
            match Attribute::Path(file.as_fd()).set(&stored, &value, XattrMode::Any) {
                // The host has no such attributes for symlinks.
                Err(Errno::PERM | Errno::NOTSUP) if inode.kind == FileType::Symlink => {}
                other => other?,
            }
        }
        Ok(())
    }

    fn copy_capabilities(&self, inode: &Inode, file: &File) -> Result<(), Errno> {
        if inode.has_xattrs()
            && let Some(value) = self.image.xattr(inode, CAPABILITIES)?
        {
            let stored = self.upper.names().stored_name(CAPABILITIES, false);
            Attribute::Path(file.as_fd()).set(&stored, &value, XattrMode::Any)?;
        }
        Ok(())
    }

    pub(super) fn set_origin(&self, file: &File, nid: Nid) -> Result<(), Errno> {
        let origin = Origin {
            uuid: self.image.uuid(),
            nid: nid.0,
        };
        match self.set_mark(file, Mark::Origin, &origin.encode()) {
            // Without the mark, the object has another inode number after a remount.
            Err(Errno::PERM | Errno::NOTSUP)
                if !self.can_be_marked(self.image.inode(nid)?.kind) =>
            {
                Ok(())
            }
            other => other,
        }
    }

    /// Whether an object of this type can have marks on the host. The host permits `user.`
    /// attributes only on regular files and directories.
    pub(super) fn can_be_marked(&self, kind: FileType) -> bool {
        self.upper.namespace() == Namespace::Trusted
            || match kind {
                FileType::Regular | FileType::Directory => true,
                FileType::Symlink => false,
                // Where owners are kept in attributes, the object on the host is a regular file.
                _ => self.uses_override(),
            }
    }

    pub(super) fn set_metacopy(&self, file: &File, metacopy: Metacopy) -> Result<(), Errno> {
        match metacopy.encode() {
            Some(value) => self.set_mark(file, Mark::Metacopy, value),
            None => Mark::Metacopy
                .clear(Attribute::Path(file.as_fd()), self.upper.namespace())
                .map(drop),
        }
    }

    pub(super) fn set_mark(&self, file: &File, mark: Mark, value: &[u8]) -> Result<(), Errno> {
        mark.set(Attribute::Path(file.as_fd()), self.upper.namespace(), value)
    }

    /// Path of a node in the image, without the leading slash.
    pub(super) fn lower_path(&self, node: &Node) -> Result<Vec<u8>, Errno> {
        let mut components: Vec<Box<[u8]>> = Vec::new();
        let redirect_of = |node: &Node| {
            node.read_state()
                .upper
                .as_ref()
                .and_then(|upper| upper.redirect.clone())
        };
        let mut redirect = redirect_of(node);
        let mut place = node.place();
        while redirect.is_none() {
            match place {
                HostPlace::Root => break,
                HostPlace::Nowhere => return Err(Errno::NOENT),
                HostPlace::At { parent, name } => {
                    components.push(name);
                    redirect = redirect_of(&parent);
                    place = parent.place();
                }
            }
        }
        let mut path = redirect.map_or_else(Vec::new, Vec::from);
        for name in components.iter().rev() {
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(name);
        }
        Ok(path)
    }
}

/// Whether the upper's root has an entry of the tree.
fn is_nonempty(root: &File) -> Result<bool, Errno> {
    for entry in Dir::read_from(root)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if !matches!(name, b"." | b"..") && name != META.as_bytes() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Runs `change`, which adds an entry that the union already shows to a host directory, and then
/// restores the times of the directory. The lock of the node's times hides the intermediate times.
pub(super) fn preserve_times<T>(
    node: &Node,
    directory: &File,
    change: impl FnOnce() -> Result<T, Errno>,
) -> Result<T, Errno> {
    let _times = node.times.lock();
    let before = rustix::fs::fstat(directory)?;
    let changed = change()?;
    let (atime, mtime) = host::times(&before);
    let (atime, mtime) = (SetTime::At(atime), SetTime::At(mtime));
    // Only the times of the directory are wrong if this fails.
    let _ = host::set_times(directory, Some(atime), Some(mtime));
    Ok(changed)
}
