//! Renaming.
//!
//! A node is copied up before it moves. Where the image has the old name, a whiteout must hide it.
//! The host leaves the whiteout in the same step (`RENAME_WHITEOUT`); or a directory exchanges
//! places with the whiteout at its new name.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bcow_erofs::reader::FileType;
use parking_lot::MutexGuard;
use rustix::fs::RenameFlags;
use rustix::io::Errno;

use super::lookup::Access;
use super::namespace::check_new_name;
use super::nodes::{HostPlace, Node};
use super::types::{RenameMode, SetTime};
use super::upper_entry::{UpperEntry, UpperObject};
use super::{UnionFs, host};
use crate::ledger::Placing;
use crate::node::NodeId;
use crate::upper::xattr::each_name;
use crate::upper::{Attribute, Mark, Temporary, XattrMode};

/// One end of a rename: a name and its directory. The directory is in the upper and the lock of its
/// names is held.
struct End<'a> {
    parent: &'a Arc<Node>,
    directory: Arc<File>,
    name: &'a [u8],
    /// Whether the image has this name in this directory.
    is_below: bool,
}

impl UnionFs {
    /// Renames `name` in `parent` to `new_name` in `new_parent`.
    pub fn rename(
        &self,
        parent: NodeId,
        name: &[u8],
        new_parent: NodeId,
        new_name: &[u8],
        how: RenameMode,
    ) -> Result<(), Errno> {
        self.rename_numbered(0, (parent, name), (new_parent, new_name), how)
            .map(drop)
    }

    /// The same for the request with this number. Gives the nodes of which names have changed.
    pub(super) fn rename_numbered(
        &self,
        number: u64,
        (parent, name): (NodeId, &[u8]),
        (new_parent, new_name): (NodeId, &[u8]),
        how: RenameMode,
    ) -> Result<Vec<NodeId>, Errno> {
        let parent = self.node(parent)?;
        let new_parent = self.node(new_parent)?;
        if matches!(name, b"." | b"..") || matches!(new_name, b"." | b"..") {
            return Err(Errno::BUSY);
        }
        check_new_name(new_name)?;
        if self.is_reserved(&parent, name) || self.is_reserved(&new_parent, new_name) {
            return Err(Errno::PERM);
        }
        let node = self.find_existing(&parent, name)?;
        // Before the locks, because this may copy up the directories above, which locks their
        // parents.
        self.ensure_upper(&node)?;
        self.ensure_directory(&parent)?;
        self.ensure_directory(&new_parent)?;
        match self.find(&new_parent, new_name)? {
            Some(there) if how == RenameMode::Exchange || self.has_names_below(&there)? => {
                self.ensure_upper(&there)?;
            }
            _ => {}
        }
        let _locked = lock_both(&parent, &new_parent);
        let from = self.end(&parent, name)?;
        let to = self.end(&new_parent, new_name)?;
        let node = self.find_existing(&parent, name)?;
        let there = self.find(&new_parent, new_name)?;
        match (how, &there) {
            (RenameMode::NoReplace, Some(_)) => return Err(Errno::EXIST),
            (RenameMode::Exchange, None) => return Err(Errno::NOENT),
            (_, Some(there)) if there.id == node.id => return Ok(Vec::new()),
            (RenameMode::Exchange, Some(there)) => {
                self.exchange(number, &from, &node, &to, there)?;
            }
            (_, there) => self.move_to(number, &from, &node, &to, there.as_ref())?,
        }
        Ok([Some(node), there]
            .into_iter()
            .flatten()
            .map(|node| node.id)
            .collect())
    }

    fn end<'a>(&self, parent: &'a Arc<Node>, name: &'a [u8]) -> Result<End<'a>, Errno> {
        Ok(End {
            directory: self.open_upper(parent, Access::Directory)?,
            is_below: self.lookup_lower(parent, name)?.is_some(),
            parent,
            name,
        })
    }

    /// Makes sure that the name itself is in the upper, and that the node records its path in the
    /// image.
    fn make_movable(&self, end: &End<'_>, node: &Arc<Node>) -> Result<(), Errno> {
        self.copy_up_locked(end.parent, &end.directory, end.name, node)?;
        if !node.is_directory() {
            // The node may be in the upper under another name only, or in the index only.
            self.open_upper(node, Access::Path)?;
            self.copy_up_name(end.parent, &end.directory, end.name, node)?;
        }
        self.redirect(node)
    }

    fn move_to(
        &self,
        number: u64,
        from: &End<'_>,
        node: &Arc<Node>,
        to: &End<'_>,
        there: Option<&Arc<Node>>,
    ) -> Result<(), Errno> {
        if node.is_directory() && self.is_inside(to.parent, node) {
            return Err(Errno::INVAL);
        }
        let mut object = None;
        if let Some(there) = there {
            match (node.is_directory(), there.is_directory()) {
                (true, false) => return Err(Errno::NOTDIR),
                (false, true) => return Err(Errno::ISDIR),
                _ => {}
            }
            if there.is_directory() {
                let _inside = there.names.try_lock().ok_or(Errno::BUSY)?;
                if !self.is_empty(there)? {
                    return Err(Errno::NOTEMPTY);
                }
            } else if self.has_names_below(there)? {
                self.copy_up_locked(to.parent, &to.directory, to.name, there)?;
            }
            object = Some((there, self.open_for_removal(there)?));
        }
        self.make_movable(from, node)?;
        self.hide_lower(node, to)?;
        let above = self.lookup_upper(&to.directory, to.name)?;
        let _room = match above {
            UpperEntry::Object(_) | UpperEntry::Whiteout => None,
            UpperEntry::Absent => Some(self.room(0, 0)?),
        };
        let was_indexed_only = there.is_some_and(|there| {
            !there.is_directory()
                && !matches!(above, UpperEntry::Object(_))
                && there.lower.is_some()
        });
        let cleared = match &above {
            UpperEntry::Object(found) if node.is_directory() => {
                Some(self.replace_directory(to, found)?)
            }
            _ => None,
        };
        // The host's link count does not change when a name goes that exists only in the image.
        let recount = match there {
            Some(there) if was_indexed_only => self.begin_removal(number, there)?,
            _ => None,
        };
        let names = match there {
            Some(there) if recount.is_none() => self.lock_names(there)?,
            _ => None,
        };
        let _placing = self.may_get(node, to);
        let placed = if matches!(above, UpperEntry::Whiteout) && node.is_directory() {
            // The directory and the whiteout exchange places: the old name may need a whiteout
            // anyway.
            rename(from, to, RenameFlags::EXCHANGE)
        } else if from.is_below {
            self.rename_leaving_whiteout(from, to)
        } else {
            rename(from, to, RenameFlags::empty())
        };
        self.end_recount(recount, i64::from(placed.is_ok()));
        drop(names);
        self.measure(&*to.directory);
        self.measure(&*from.directory);
        if let Err(errno) = placed {
            if let Some(cleared) = cleared {
                // If the old directory cannot be moved back, the new one with the same attributes
                // stays.
                let kind = rustix::fs::FileType::Directory;
                let _ = cleared.exchange(to.directory.as_fd(), to.name, kind);
            }
            return Err(errno);
        }
        if let (Some(there), Some(cleared)) = (there, cleared) {
            self.keep_directory(there, cleared);
        }
        if matches!(above, UpperEntry::Whiteout) && node.is_directory() && !from.is_below {
            let none = rustix::fs::AtFlags::empty();
            if let Err(errno) = rustix::fs::unlinkat(&*from.directory, from.name, none) {
                // The whiteout that is left hides no name.
                self.host_failed(from.name, "a whiteout cannot be removed", errno);
            }
        }
        from.parent.names_changed.change();
        to.parent.names_changed.change();
        if let Some((there, object)) = object {
            self.name_removed(to.parent, to.name, there, object);
        }
        moved(node, from, to);
        self.attributes_have_changed(node);
        Ok(())
    }

    fn exchange(
        &self,
        number: u64,
        from: &End<'_>,
        node: &Arc<Node>,
        to: &End<'_>,
        there: &Arc<Node>,
    ) -> Result<(), Errno> {
        for (directory, inner) in [(node, to.parent), (there, from.parent)] {
            if directory.is_directory() && self.is_inside(inner, directory) {
                return Err(Errno::INVAL);
            }
        }
        self.make_movable(from, node)?;
        self.make_movable(to, there)?;
        self.hide_lower(node, to)?;
        self.hide_lower(there, from)?;
        let _placing = (self.may_get(node, to), self.may_get(there, from));
        if let Some(ledger) = &self.ledger {
            ledger.begin_change(number, node.id.0);
        }
        rename(from, to, RenameFlags::EXCHANGE)?;
        from.parent.names_changed.change();
        to.parent.names_changed.change();
        moved(node, from, to);
        moved(there, to, from);
        self.attributes_have_changed(node);
        self.attributes_have_changed(there);
        Ok(())
    }

    /// Records that the node may be at this place from now on, until the drop of the result.
    fn may_get<'n>(&self, node: &'n Node, to: &End<'_>) -> Option<Placing<'n>> {
        let entry = node.entry()?;
        to.parent.enter(entry.ledger());
        Some(entry.may_get(to.parent.id.0, to.name))
    }

    /// Marks a directory that has no part in the image as opaque if the image has its new name: it
    /// must not be merged with the image's directory of that name.
    fn hide_lower(&self, node: &Node, to: &End<'_>) -> Result<(), Errno> {
        if !node.is_directory() || node.lower.is_some() || !to.is_below {
            return Ok(());
        }
        let file = self.open_upper(node, Access::Directory)?;
        let _room = self.room(0, 0)?;
        let set = self.set_mark(&file, Mark::Opaque, b"y");
        self.measure(&*file);
        set
    }

    /// Prepares the replacement of the empty directory `found`. On the host it may contain
    /// whiteouts, so rename(2) would fail: an empty directory with the same attributes takes its
    /// place. Gives the old directory, which is removed when the result is dropped.
    fn replace_directory(&self, to: &End<'_>, found: &UpperObject) -> Result<Temporary<'_>, Errno> {
        let (temporary, file) = self.upper.temporary_directory()?;
        // An incomplete copy is visible only if the process is killed before the next step.
        let _ = self.copy_attributes(found, &file);
        self.set_mark(&file, Mark::Opaque, b"y")?;
        let kind = rustix::fs::FileType::Directory;
        temporary.exchange(to.directory.as_fd(), to.name, kind)
    }

    /// Gives a directory the owner, mode, attributes and times of another.
    fn copy_attributes(&self, found: &UpperObject, file: &File) -> Result<(), Errno> {
        let stat = &found.stat;
        if !self.uses_override() {
            host::set_owner(file, Some(stat.st_uid), Some(stat.st_gid))?;
        }
        host::set_mode(file, (stat.st_mode & 0o7777) as u16)?;
        self.copy_stored_attributes(&found.file, file)?;
        let (atime, mtime) = host::times(stat);
        host::set_times(file, Some(SetTime::At(atime)), Some(SetTime::At(mtime)))
    }

    /// Copies all attributes in their stored form, except a redirect.
    fn copy_stored_attributes(&self, from: &File, to: &File) -> Result<(), Errno> {
        let (from, to) = (Attribute::Path(from.as_fd()), Attribute::Path(to.as_fd()));
        let redirect = Mark::Redirect.name(self.upper.namespace());
        for name in each_name(&from.list()?).filter(|name| *name != redirect) {
            if let Some(value) = from.get(name)? {
                to.set(name, &value, XattrMode::Any)?;
            }
        }
        Ok(())
    }

    fn rename_leaving_whiteout(&self, from: &End<'_>, to: &End<'_>) -> Result<(), Errno> {
        // Made first, so that a failure changes nothing.
        let whiteout = self.upper.temporary_whiteout()?;
        match rename(from, to, RenameFlags::WHITEOUT) {
            Ok(()) => {
                // Replaces the host's whiteout by a link to the shared one. The host's own takes
                // one inode per name.
                let _ = whiteout.place(from.directory.as_fd(), from.name);
                return Ok(());
            }
            // The host has no `RENAME_WHITEOUT`, or no free inode for it.
            Err(Errno::INVAL | Errno::NOSYS | Errno::NOSPC | Errno::DQUOT) => {}
            other => return other,
        }
        // Between the two steps the image's old name is visible beside the new name. No name is
        // missing.
        rename(from, to, RenameFlags::empty())?;
        whiteout.place_new(from.directory.as_fd(), from.name)
    }

    /// Whether `node` is `directory` or lies below it.
    fn is_inside(&self, node: &Arc<Node>, directory: &Node) -> bool {
        let mut here = Arc::clone(node);
        loop {
            if here.id == directory.id {
                return true;
            }
            match here.place() {
                HostPlace::At { parent, .. } => here = parent,
                HostPlace::Root | HostPlace::Nowhere => return false,
            }
        }
    }
}

fn rename(from: &End<'_>, to: &End<'_>, flags: RenameFlags) -> Result<(), Errno> {
    rustix::fs::renameat_with(&*from.directory, from.name, &*to.directory, to.name, flags)
}

/// Updates the place of a node that moved.
fn moved(node: &Arc<Node>, from: &End<'_>, to: &End<'_>) {
    node.name_is_new.store(true, Ordering::Release);
    if node.is_at(from.parent, from.name) || node.kind != FileType::Directory {
        node.set_place(HostPlace::at(to.parent, to.name));
    }
}

/// Locks the names of two directories, which may be the same.
fn lock_both<'n>(
    one: &'n Node,
    other: &'n Node,
) -> (MutexGuard<'n, ()>, Option<MutexGuard<'n, ()>>) {
    let (first, second) = if one.id.0 <= other.id.0 { (one, other) } else { (other, one) };
    let locked = first.names.lock();
    (locked, (first.id != second.id).then(|| second.names.lock()))
}
