//! Sets the attributes of extracted files.
//!
//! The order matters: a change of owner clears set-user-ID bits and capabilities; without write
//! permission an owner cannot set extended attributes; all other changes may change the times.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::fs::{AtFlags, CWD, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags};
use rustix::io::Errno;

use super::beneath::open_beneath;
use super::error::{Attribute, ExtractError};
use super::{Extraction, NamedInode, Target, read};
use crate::reader::{FileType, Inode};

impl Extraction<'_> {
    /// Sets the attributes of a regular file or a directory.
    pub(super) fn set_attributes(
        &mut self,
        source: NamedInode<'_>,
        path: &[u8],
        fd: BorrowedFd<'_>,
    ) -> Result<(), ExtractError> {
        self.set_owner(source, path, fd)?;
        self.set_xattrs(source, path, |name, value| {
            rustix::fs::fsetxattr(fd, name, value, XattrFlags::empty())
        })?;
        rustix::fs::fchmod(fd, self.mode(source.inode))
            .map_err(|error| self.cannot_set(path, Attribute::Mode, error))?;
        rustix::fs::futimens(fd, &times(source.inode))
            .map_err(|error| self.cannot_set(path, Attribute::Time, error))
    }

    /// Sets the attributes of a symbolic link, device, pipe or socket, none of which may be opened.
    pub(super) fn set_attributes_unopened(
        &mut self,
        source: NamedInode<'_>,
        target: &Target<'_>,
    ) -> Result<(), ExtractError> {
        let path = &target.path[..];
        let flags = OFlags::PATH | OFlags::NOFOLLOW;
        let fd = open_beneath(target.parent.as_fd(), target.name, flags)
            .map_err(|error| self.cannot_create(path, error))?;
        // A path in /proc names exactly this inode, and such a link is not followed further.
        let by_descriptor = format!("/proc/self/fd/{}", fd.as_raw_fd());
        self.set_owner(source, path, fd.as_fd())?;
        self.set_xattrs(source, path, |name, value| {
            rustix::fs::setxattr(&by_descriptor[..], name, value, XattrFlags::empty())
        })?;
        if source.inode.kind != FileType::Symlink {
            let mode = self.mode(source.inode);
            rustix::fs::chmodat(CWD, &by_descriptor[..], mode, AtFlags::empty())
                .map_err(|error| self.cannot_set(path, Attribute::Mode, error))?;
        }
        let times = times(source.inode);
        rustix::fs::utimensat(CWD, &by_descriptor[..], &times, AtFlags::empty())
            .map_err(|error| self.cannot_set(path, Attribute::Time, error))
    }

    fn set_owner(
        &self,
        source: NamedInode<'_>,
        path: &[u8],
        fd: BorrowedFd<'_>,
    ) -> Result<(), ExtractError> {
        if !self.options.owners {
            return Ok(());
        }
        let Inode { uid, gid, .. } = *source.inode;
        // -1 means "unchanged" to chown(2), and is no user.
        if uid == u32::MAX || gid == u32::MAX {
            let path = source.path.to_vec();
            return Err(ExtractError::Owner { path, uid, gid });
        }
        let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
        rustix::fs::chownat(fd, "", Some(uid), Some(gid), AtFlags::EMPTY_PATH)
            .map_err(|error| self.cannot_set(path, Attribute::Owner, error))
    }

    fn set_xattrs(
        &mut self,
        source: NamedInode<'_>,
        path: &[u8],
        set: impl Fn(&[u8], &[u8]) -> Result<(), Errno>,
    ) -> Result<(), ExtractError> {
        if !self.options.xattrs {
            return Ok(());
        }
        for (name, value) in read(source.path, self.fs.xattrs(source.inode))? {
            match set(&name, &value) {
                Ok(()) => {}
                Err(Errno::PERM | Errno::NOTSUP | Errno::ACCESS) if !self.is_privileged => {
                    self.report.xattrs.add(path);
                }
                Err(error) => return Err(self.cannot_set(path, Attribute::Xattr(name), error)),
            }
        }
        Ok(())
    }

    /// Without the owners of the file system, a program must not run as the user who extracts it.
    fn mode(&self, inode: &Inode) -> Mode {
        let mask = match (self.options.owners, inode.kind) {
            (true, _) => 0o7777,
            (false, FileType::Directory) => 0o1777,
            (false, _) => 0o777,
        };
        Mode::from_raw_mode(u32::from(inode.permissions) & mask)
    }

    fn cannot_set(&self, path: &[u8], attribute: Attribute, error: Errno) -> ExtractError {
        ExtractError::Attribute {
            path: self.at(path),
            attribute,
            source: error.into(),
        }
    }
}

/// EROFS has one time per inode. The reader refuses nanoseconds that utimensat(2) takes for "now"
/// and "unchanged".
fn times(inode: &Inode) -> Timestamps {
    let time = Timespec {
        tv_sec: inode.mtime.seconds,
        tv_nsec: inode.mtime.nanoseconds.into(),
    };
    Timestamps {
        last_access: time,
        last_modification: time,
    }
}
