//! Renaming.
//!
//! What moves is in the upper by then, and what the image has at the old name must not show through: a whiteout stays there. The
//! host leaves it in the same step (`RENAME_WHITEOUT`), or it changes places with one that was at the new name.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};

use bcow_erofs::reader::FileType;
use rustix::fs::RenameFlags;
use rustix::io::Errno;

use super::charge::NAME_BYTES;
use super::lookup::{Above, Access, Found};
use super::namespace::check_new_name;
use super::nodes::{Node, Place};
use super::types::{RenameHow, SetTime};
use super::{UnionFs, host};
use crate::node::NodeId;
use crate::upper::{Mark, Temporary};

/// A name and its directory, in the upper and with its names locked.
struct End<'a> {
    parent: &'a Arc<Node>,
    directory: Arc<File>,
    name: &'a [u8],
    /// Whether the image has this name here.
    is_below: bool,
}

impl UnionFs {
    /// Renames.
    pub fn rename(
        &self,
        parent: NodeId,
        name: &[u8],
        new_parent: NodeId,
        new_name: &[u8],
        how: RenameHow,
    ) -> Result<(), Errno> {
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
        // Without locks, as those above may have to be copied up.
        self.prepare(&parent, &node)?;
        self.ensure_directory(&new_parent)?;
        match self.find(&new_parent, new_name)? {
            Some(there) if how == RenameHow::Exchange || self.has_names_below(&there)? => {
                self.prepare(&new_parent, &there)?;
            }
            _ => {}
        }
        let _locked = lock_both(&parent, &new_parent);
        let from = self.end(&parent, name)?;
        let to = self.end(&new_parent, new_name)?;
        let node = self.find_existing(&parent, name)?;
        let there = self.find(&new_parent, new_name)?;
        match (how, there) {
            (RenameHow::NoReplace, Some(_)) => Err(Errno::EXIST),
            (RenameHow::Exchange, None) => Err(Errno::NOENT),
            (_, Some(there)) if there.id == node.id => Ok(()),
            (RenameHow::Exchange, Some(there)) => self.exchange(&from, &node, &to, &there),
            (_, there) => self.move_to(&from, &node, &to, there.as_ref()),
        }
    }

    /// Brings into the upper what will move.
    fn prepare(&self, parent: &Arc<Node>, node: &Arc<Node>) -> Result<(), Errno> {
        self.ensure_upper(node)?;
        self.ensure_directory(parent)?;
        Ok(())
    }

    fn end<'a>(&self, parent: &'a Arc<Node>, name: &'a [u8]) -> Result<End<'a>, Errno> {
        Ok(End {
            directory: self.open_upper(parent, Access::Directory)?,
            is_below: self.look_below(parent, name)?.is_some(),
            parent,
            name,
        })
    }

    /// Sees that the name itself is in the upper and that the node says where in the image it was.
    fn make_movable(&self, end: &End<'_>, node: &Arc<Node>) -> Result<(), Errno> {
        if node.read_state().upper.is_none() {
            self.copy_up_locked(end.parent, &end.directory, end.name, node)?;
        }
        if !node.is_directory() {
            // It may be in the upper by another name, or by the index only.
            self.open_upper(node, Access::Path)?;
            self.copy_up_name(end.parent, &end.directory, end.name, node)?;
        }
        self.redirect(node)
    }

    fn move_to(
        &self,
        from: &End<'_>,
        node: &Arc<Node>,
        to: &End<'_>,
        there: Option<&Arc<Node>>,
    ) -> Result<(), Errno> {
        if node.is_directory() && self.is_inside(to.parent, node) {
            return Err(Errno::INVAL);
        }
        let mut parting = None;
        if let Some(there) = there {
            match (node.is_directory(), there.is_directory()) {
                (true, false) => return Err(Errno::NOTDIR),
                (false, true) => return Err(Errno::ISDIR),
                _ => {}
            }
            if there.is_directory() {
                let _inside = there.try_lock_names().ok_or(Errno::BUSY)?;
                if !self.is_empty(there)? {
                    return Err(Errno::NOTEMPTY);
                }
            } else if self.has_names_below(there)? {
                self.copy_up_locked_if_needed(to, there)?;
            }
            parting = Some((there, self.part(there)?));
        }
        self.make_movable(from, node)?;
        self.hide_below(node, to)?;
        let above = self.look_above(&to.directory, to.name)?;
        let new_names = u64::from(!matches!(above, Above::Found(_) | Above::Whiteout));
        let mut room = self.room(new_names * NAME_BYTES, 0)?;
        let was_indexed_only = there.is_some_and(|there| {
            !there.is_directory() && !matches!(above, Above::Found(_)) && there.lower.is_some()
        });
        let cleared = match &above {
            Above::Found(found) if node.is_directory() => Some(self.clear_way(to, found)?),
            _ => None,
        };
        // Of a name that only the image has, the host does not count that it goes.
        let recount = match there {
            Some(there) if was_indexed_only => self.begin_recount(there)?,
            _ => None,
        };
        let placed = if matches!(above, Above::Whiteout) && node.is_directory() {
            // They change places: the whiteout is then where one may be needed anyway.
            rename(from, to, RenameFlags::EXCHANGE)
        } else if from.is_below {
            self.rename_leaving_whiteout(from, to)
        } else {
            rename(from, to, RenameFlags::empty())
        };
        self.end_recount(recount, i64::from(placed.is_ok()));
        self.settle_in(&*to.directory, &mut room);
        self.settle_in(&*from.directory, &mut room);
        if let Err(errno) = placed {
            if let Some(cleared) = cleared {
                // What cannot come back left one behind that looks the same.
                let kind = rustix::fs::FileType::Directory;
                let _ = cleared.exchange(to.directory.as_fd(), to.name, kind);
            }
            return Err(errno);
        }
        drop(cleared);
        if matches!(above, Above::Whiteout) && node.is_directory() && !from.is_below {
            let none = rustix::fs::AtFlags::empty();
            if let Err(errno) = rustix::fs::unlinkat(&*from.directory, from.name, none) {
                // It hides nothing.
                self.host_failed(from.name, "a whiteout cannot be removed", errno);
            }
        }
        from.parent.names_have_changed();
        to.parent.names_have_changed();
        if let Some((there, parting)) = parting {
            self.parted(to.parent, to.name, there, parting);
        }
        moved(node, from, to);
        Ok(())
    }

    fn exchange(
        &self,
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
        self.hide_below(node, to)?;
        self.hide_below(there, from)?;
        rename(from, to, RenameFlags::EXCHANGE)?;
        from.parent.names_have_changed();
        to.parent.names_have_changed();
        moved(node, from, to);
        moved(there, to, from);
        Ok(())
    }

    fn copy_up_locked_if_needed(&self, end: &End<'_>, node: &Arc<Node>) -> Result<(), Errno> {
        // Its state is not held any more when it is copied up.
        let is_above = node.read_state().upper.is_some();
        match is_above {
            true => Ok(()),
            false => self.copy_up_locked(end.parent, &end.directory, end.name, node),
        }
    }

    /// A directory that has nothing of the image must not be merged with one that the image has at its new name.
    fn hide_below(&self, node: &Node, to: &End<'_>) -> Result<(), Errno> {
        if !node.is_directory() || node.lower.is_some() || !to.is_below {
            return Ok(());
        }
        let file = self.open_upper(node, Access::Directory)?;
        let name = Mark::Opaque.name(self.upper.namespace());
        let mut room = self.room_for_attribute(&file, name, 1)?;
        let set = self.set_mark(&file, Mark::Opaque, b"y");
        self.settle_in(&*file, &mut room);
        set
    }

    /// An empty directory, `found`, is about to be replaced, which on the host may have whiteouts in it: one that has none, and
    /// looks the same, takes its place. Gives back the old one, which goes when that is dropped.
    fn clear_way(&self, to: &End<'_>, found: &Found) -> Result<Temporary<'_>, Errno> {
        let (temporary, fd) = self.upper.temporary_directory(0o700)?;
        let file = File::from(fd);
        // What the host does not let us copy is missed only if we are killed before the next step.
        let _ = self.make_alike(found, &file);
        self.set_mark(&file, Mark::Opaque, b"y")?;
        temporary
            .exchange(
                to.directory.as_fd(),
                to.name,
                rustix::fs::FileType::Directory,
            )
            .map_err(|(_, errno)| errno)
    }

    /// Gives a directory owner, mode, attributes and times of another.
    fn make_alike(&self, found: &Found, file: &File) -> Result<(), Errno> {
        let stat = &found.stat;
        if !self.keeps_owners() {
            host::set_owner(file, Some(stat.st_uid), Some(stat.st_gid))?;
        }
        host::set_mode(file, (stat.st_mode & 0o7777) as u16)?;
        self.copy_stored_attributes(&found.file, file)?;
        let (atime, mtime) = host::times(stat);
        host::set_times(file, Some(SetTime::At(atime)), Some(SetTime::At(mtime)))
    }

    fn rename_leaving_whiteout(&self, from: &End<'_>, to: &End<'_>) -> Result<(), Errno> {
        // Made before anything is changed.
        let whiteout = self.upper.temporary_whiteout()?;
        match rename(from, to, RenameFlags::WHITEOUT) {
            Ok(()) => {
                // The host made one of its own, which would take an inode for each name.
                let _ = whiteout.place(from.directory.as_fd(), from.name);
                return Ok(());
            }
            // A host without it, or without an inode for it.
            Err(Errno::INVAL | Errno::NOSYS | Errno::NOSPC | Errno::DQUOT) => {}
            other => return other,
        }
        // For a moment both names are there; never none.
        rename(from, to, RenameFlags::empty())?;
        whiteout
            .place_new(from.directory.as_fd(), from.name)
            .map_err(|(_, errno)| errno)
    }

    /// Whether `node` is `directory` or lies below it.
    fn is_inside(&self, node: &Arc<Node>, directory: &Node) -> bool {
        let mut here = Arc::clone(node);
        loop {
            if here.id == directory.id {
                return true;
            }
            match here.place() {
                Place::At { parent, .. } => here = parent,
                Place::Root | Place::Nowhere => return false,
            }
        }
    }
}

fn rename(from: &End<'_>, to: &End<'_>, flags: RenameFlags) -> Result<(), Errno> {
    rustix::fs::renameat_with(&*from.directory, from.name, &*to.directory, to.name, flags)
}

/// Says where a node is now.
fn moved(node: &Arc<Node>, from: &End<'_>, to: &End<'_>) {
    node.name_is_new.store(true, Ordering::Release);
    if node.is_at(from.parent, from.name) || node.kind != FileType::Directory {
        node.set_place(Place::At {
            parent: Arc::clone(to.parent),
            name: to.name.into(),
        });
    }
}

/// Locks the names of two directories, which may be one.
fn lock_both<'n>(
    one: &'n Node,
    other: &'n Node,
) -> (MutexGuard<'n, ()>, Option<MutexGuard<'n, ()>>) {
    match one.id.0.cmp(&other.id.0) {
        std::cmp::Ordering::Equal => (one.lock_names(), None),
        std::cmp::Ordering::Less => {
            let first = one.lock_names();
            (first, Some(other.lock_names()))
        }
        std::cmp::Ordering::Greater => {
            let first = other.lock_names();
            (first, Some(one.lock_names()))
        }
    }
}
