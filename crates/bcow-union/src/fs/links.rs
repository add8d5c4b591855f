//! How many names a file has whose names are partly in the image only.
//!
//! A mark on the host's file says it, in one of two forms of overlayfs's: relative to the host's own count ([`NlinkDelta::Upper`]),
//! which stays right while names come and go in the upper; or relative to the image's ([`NlinkDelta::Lower`]), which is right
//! whatever the host's count is. Where the host's count changes and the number of names does not, or the other way round, the
//! second form is there meanwhile, so that a crash leaves a count that is right, or one too high where a name was about to
//! go. It is never too low: a file that is said to have no name is given up.
//!
//! The node's state is locked from the first mark to the second. A mark of the second form that somebody finds with that lock held
//! is what a crash, or a failure, left.

use std::fs::File;
use std::sync::{Arc, RwLockWriteGuard};

use bcow_erofs::reader::Nid;
use rustix::io::Errno;

use super::UnionFs;
use super::lookup::Access;
use super::nodes::{Node, State};
use crate::upper::{Mark, NlinkDelta};

/// A change of links, or names, that is under way: nobody else sees the node.
pub(super) struct Recount<'n> {
    _state: RwLockWriteGuard<'n, State>,
    file: Arc<File>,
    /// How many names there were before.
    names: i64,
}

impl UnionFs {
    /// How many names an indexed file has, which was the image's inode `lower`.
    pub(super) fn count_names(&self, lower: Option<Nid>, file: &File) -> Result<i64, Errno> {
        let links = || links_of(file);
        match (self.read_marks(file)?.nlink, lower) {
            (Some(NlinkDelta::Upper(delta)), _) => Ok(links()? + i64::from(delta)),
            (Some(NlinkDelta::Lower(delta)), Some(nid)) => {
                Ok(i64::from(self.image.inode(nid)?.nlink) + i64::from(delta))
            }
            (Some(NlinkDelta::Lower(_)) | None, _) => links(),
        }
    }

    /// Says how many names a file has, relative to the host's count.
    pub(super) fn set_names_upper(&self, file: &File, names: i64) -> Result<(), Errno> {
        self.set_nlink(file, names - links_of(file)?, NlinkDelta::Upper)
    }

    /// Says how many names a file has, relative to the image's count.
    pub(super) fn set_names_lower(&self, lower: Nid, file: &File, names: i64) -> Result<(), Errno> {
        let below = i64::from(self.image.inode(lower)?.nlink);
        self.set_nlink(file, names - below, NlinkDelta::Lower)
    }

    fn set_nlink(&self, file: &File, delta: i64, of: fn(i32) -> NlinkDelta) -> Result<(), Errno> {
        let delta = i32::try_from(delta).map_err(|_| Errno::MLINK)?;
        self.set_mark(file, Mark::Nlink, of(delta).encode().as_bytes())
    }

    /// Sees that the host's count may change together with the number of names: says the number relative to it if a crash or
    /// a failure left the other form.
    pub(super) fn settle_names(&self, node: &Node) -> Result<(), Errno> {
        if !is_indexed(&node.read_state()) {
            return Ok(());
        }
        self.settle_names_locked(node, &mut node.write_state())
    }

    /// As [`UnionFs::settle_names`], with the node's state locked.
    pub(super) fn settle_names_locked(&self, node: &Node, state: &mut State) -> Result<(), Errno> {
        if !is_indexed(state) {
            return Ok(());
        }
        let file = self.open_upper_locked(node, state, Access::Path)?;
        match (self.read_marks(&file)?.nlink, node.lower) {
            (Some(NlinkDelta::Lower(_)), Some(_)) => {
                let names = self.count_names(node.lower, &file)?;
                let set = self.set_names_upper(&file, names);
                self.settle(&*file);
                set
            }
            _ => Ok(()),
        }
    }

    /// To be called before the host's count changes without the number of names, or the other way round; `None` if the host alone
    /// counts the names of this node.
    pub(super) fn begin_recount<'n>(&self, node: &'n Node) -> Result<Option<Recount<'n>>, Errno> {
        let mut state = node.write_state();
        let Some(lower) = node.lower.filter(|_| is_indexed(&state)) else {
            return Ok(None);
        };
        let file = self.open_upper_locked(node, &mut state, Access::Path)?;
        let names = self.count_names(Some(lower), &file)?;
        self.set_names_lower(lower, &file, names)?;
        Ok(Some(Recount {
            _state: state,
            file,
            names,
        }))
    }

    /// To be called when it is done, or failed: the file has `lost` names fewer.
    pub(super) fn end_recount(&self, recount: Option<Recount<'_>>, lost: i64) {
        let Some(recount) = recount else { return };
        if let Err(errno) = self.set_names_upper(&recount.file, recount.names - lost) {
            // What is there says at most so many too much, and whoever changes it next says it anew.
            self.host_failed(b"", "cannot note a number of names", errno);
        }
        self.settle(&*recount.file);
    }
}

impl Recount<'_> {
    pub(super) fn file(&self) -> &File {
        &self.file
    }
}

fn is_indexed(state: &State) -> bool {
    state.upper.as_ref().is_some_and(|upper| upper.indexed)
}

fn links_of(file: &File) -> Result<i64, Errno> {
    Ok(i64::try_from(rustix::fs::fstat(file)?.st_nlink).unwrap_or(i64::MAX))
}
