//! Times that the host's file does not have, and those that it has by accident.
//!
//! A copy-up adds an entry to the host's directory of the parent, which the mount shows already.
//! The modification time can be restored, the change time cannot. So the change time of a directory
//! that is merged with one of the image is its modification time, which is right after a copy-up
//! and after a change of its names. After any other change of the directory, a mark records it.
//!
//! The same mark records times that the host cannot store, for example because its inodes have 32
//! bits for the seconds.

use std::fs::File;
use std::os::fd::AsFd;

use bcow_erofs::reader::Inode;
use bcow_erofs::tree::Timestamp;
use rustix::fs::Stat;
use rustix::io::Errno;

use super::lookup::Access;
use super::nodes::{Content, Node, Upper};
use super::types::{Attributes, SetTime};
use super::{UnionFs, host};
use crate::host::{HiddenChange, file_times};
use crate::partial::Partial;
use crate::upper::{Attribute, Mark, TimesMark};

impl UnionFs {
    /// Sets times of a node that is in the upper.
    pub(super) fn set_times(
        &self,
        node: &Node,
        atime: Option<SetTime>,
        mtime: Option<SetTime>,
    ) -> Result<(), Errno> {
        let file = self.open_upper(node, Access::Path)?;
        let state = node.read_state();
        let upper = state.upper.as_ref().ok_or(Errno::STALE)?;
        let set = || self.set_and_record(node, upper, &file, atime, mtime);
        match &state.content {
            Content::Partial(partial) => partial.hold_times(|_| set()),
            _ if node.is_directory() => {
                let _times = node.times.lock();
                set()
            }
            _ => set(),
        }
    }

    /// Records that a program changed attributes of the node, which is in the upper.
    pub(super) fn attributes_have_changed(&self, node: &Node) {
        // Only the change time is wrong if this fails.
        if node.is_merged()
            && let Err(errno) = self.set_times(node, None, None)
        {
            tracing::debug!("cannot record the change time of a directory: {errno}");
        }
    }

    /// Sets times, and records those that the host's file does not have. The times of the file are
    /// held.
    fn set_and_record(
        &self,
        node: &Node,
        upper: &Upper,
        file: &File,
        atime: Option<SetTime>,
        mtime: Option<SetTime>,
    ) -> Result<(), Errno> {
        let mut known = upper.times_mark.lock();
        let before = match *known {
            Some(mark) => {
                let (_, host_mtime) = host::times(&rustix::fs::fstat(file)?);
                Some(mark).filter(|mark| mark.applies_to(host_mtime))
            }
            None => None,
        };
        host::set_times(file, atime, mtime)?;
        let is_given = |time| matches!(time, Some(SetTime::At(_)));
        if known.is_none() && !node.is_merged() && !is_given(atime) && !is_given(mtime) {
            return Ok(());
        }
        let stat = rustix::fs::fstat(file)?;
        let (host_atime, host_mtime) = host::times(&stat);
        let shown = |set, before: Option<Timestamp>, host| match set {
            Some(SetTime::At(time)) => time,
            Some(SetTime::Now) => host,
            None => before.unwrap_or(host),
        };
        let mark = TimesMark {
            host_mtime,
            mtime: shown(mtime, before.map(|mark| mark.mtime), host_mtime),
            atime: shown(atime, before.map(|mark| mark.atime), host_atime),
            ctime: host::timestamp(stat.st_ctime, stat.st_ctime_nsec),
        };
        if node.is_merged() || is_beyond_host(&mark, host_atime) {
            // A mark that replaces another needs no room.
            let _room = if known.is_none() { Some(self.room(0, 0)?) } else { None };
            *known = self.set_times_mark(node, file, mark)?;
        } else if known.is_some() {
            Mark::Times.clear(Attribute::Path(file.as_fd()), self.upper.namespace())?;
            self.measure(file);
            *known = None;
        }
        Ok(())
    }

    /// Gives a copy of an inode of the image its times. Gives the mark if the host cannot store
    /// them.
    pub(super) fn set_times_of_copy(
        &self,
        file: &File,
        inode: &Inode,
    ) -> Result<Option<TimesMark>, Errno> {
        let time = inode.mtime;
        host::set_times(file, Some(SetTime::At(time)), Some(SetTime::At(time)))?;
        let (host_atime, host_mtime) = host::times(&rustix::fs::fstat(file)?);
        let mark = TimesMark {
            host_mtime,
            mtime: time,
            atime: time,
            ctime: time,
        };
        if !is_beyond_host(&mark, host_atime) || !self.can_be_marked(inode.kind) {
            return Ok(None);
        }
        self.set_mark(file, Mark::Times, &mark.encode())?;
        Ok(Some(mark))
    }

    /// Reads the mark of the root, which no lookup finds.
    pub(super) fn read_times_of_root(&self, file: &File) -> Result<(), Errno> {
        let name = Mark::Times.name(self.upper.namespace());
        let Some(value) = Attribute::Path(file.as_fd()).get(name)? else {
            return Ok(());
        };
        match TimesMark::decode(&value) {
            Ok(mark) => {
                if let Some(upper) = &self.root.read_state().upper {
                    *upper.times_mark.lock() = Some(mark);
                }
            }
            Err(error) => self.damaged(b"", &error.to_string()),
        }
        Ok(())
    }

    /// Sets the mark; `None` if the host permits no marks on this type of file.
    fn set_times_mark(
        &self,
        node: &Node,
        file: &File,
        mark: TimesMark,
    ) -> Result<Option<TimesMark>, Errno> {
        if !self.can_be_marked(node.kind) {
            return Ok(None);
        }
        let set = self.set_mark(file, Mark::Times, &mark.encode());
        self.measure(file);
        set.map(|()| Some(mark))
    }
}

impl Upper {
    /// Runs `change`, which changes marks of the host's file, and hides its change time. A change
    /// of attributes by a program at the same moment can be hidden too.
    pub(super) fn hiding_change<T>(
        &self,
        file: &File,
        change: impl FnOnce() -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let mut hidden = self.hidden_change.lock();
        let shown = HiddenChange::shown(*hidden, file_times(&rustix::fs::fstat(file)?));
        let done = change()?;
        *hidden = Some(HiddenChange {
            host: file_times(&rustix::fs::fstat(file)?).changed,
            shown,
        });
        Ok(done)
    }

    /// Shows the change time that the mount has shown of a partial file, also after its promotion.
    pub(super) fn take_hidden_change(&self, partial: &Partial) {
        partial.hold_times(|hidden| *self.hidden_change.lock() = hidden);
    }

    /// Replaces the times of the host's file, whose stat is `stat`, by those that programs have
    /// set.
    pub(super) fn show_times(&self, node: &Node, stat: &Stat, attributes: &mut Attributes) {
        let mark = *self.times_mark.lock();
        let mark = mark.filter(|mark| mark.applies_to(attributes.mtime));
        if let Some(mark) = &mark {
            (attributes.atime, attributes.mtime) = (mark.atime, mark.mtime);
        }
        if node.is_merged() {
            attributes.ctime = mark.map_or(attributes.mtime, |mark| mark.ctime);
        } else {
            let shown = HiddenChange::shown(*self.hidden_change.lock(), file_times(stat));
            attributes.ctime = host::timestamp_of(shown);
        }
    }
}

/// Whether the host's file does not have the times of the mark.
fn is_beyond_host(mark: &TimesMark, host_atime: Timestamp) -> bool {
    (mark.mtime, mark.atime) != (mark.host_mtime, host_atime)
}
