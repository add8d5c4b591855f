//! Copies the content of an upper into an empty directory: its tree, its index and its maps.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bcow::copy_file;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, Timespec, Timestamps};
use rustix::io::Errno;

use super::beneath::{open_directory_beneath, open_regular_beneath};
use super::xattr::each_name;
use super::{Attribute, META, Namespace, UpperReader, XattrMode, is_whiteout, work};
use crate::host::errno_of;

/// The directories of [`META`] that belong to the content.
const PARTS: [&str; 2] = ["maps", "index"];

/// Copies the content of an upper into the directory `to`, and gives `to` the attributes of its
/// root. No process changes the tree, its index or its maps meanwhile; but writes to files by
/// passthrough may go on, and what files without a name have in the index and the maps may be
/// removed. Nothing is durable yet.
///
/// Files share their stored blocks with the copies if the host can do so (`FICLONE`); otherwise the
/// stored ranges are copied. Change times and inode numbers are those of the copies.
pub(super) fn copy_content(from: &UpperReader, to: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut copier = Copier {
        from: from.root(),
        to,
        namespace: from.names().namespace,
        links: HashMap::new(),
        pending: vec![Vec::new()],
        directories: Vec::new(),
    };
    for part in [META.to_owned()]
        .into_iter()
        .chain(PARTS.map(|part| format!("{META}/{part}")))
    {
        rustix::fs::mkdirat(to, &part, Mode::RWXU)?;
        if part != META && exists(from.root(), &part)? {
            copier.pending.push(part.into_bytes());
        }
    }
    while let Some(path) = copier.pending.pop() {
        copier.directory(&path)?;
        copier.directories.push(path);
    }
    // Each directory is in front of those in it. Its times are set after all changes of its names.
    while let Some(path) = copier.directories.pop() {
        let (source, target) = copier.open_both(&path)?;
        let stat = rustix::fs::fstat(&source)?;
        let (source, target) = (Place::of(&source), Place::of(&target));
        copier.attributes(source, target, &stat)?;
    }
    Ok(())
}

struct Copier<'c> {
    from: BorrowedFd<'c>,
    to: BorrowedFd<'c>,
    namespace: Namespace,
    /// The first copied path of each file with several names, by inode number.
    links: HashMap<u64, Vec<u8>>,
    /// Directories whose entries are still to be copied, by path: there may be more directories
    /// than descriptors.
    pending: Vec<Vec<u8>>,
    /// Directories that lack their attributes.
    directories: Vec<Vec<u8>>,
}

/// An object, by its name in an open directory; `.` for the directory itself.
#[derive(Clone, Copy)]
struct Place<'p> {
    dir: BorrowedFd<'p>,
    name: &'p [u8],
}

impl<'p> Place<'p> {
    fn of(dir: &'p OwnedFd) -> Place<'p> {
        Place {
            dir: dir.as_fd(),
            name: b".",
        }
    }

    fn xattrs(&self) -> Attribute<'p> {
        match self.name {
            b"." => Attribute::Open(self.dir),
            name => Attribute::Named(self.dir, name),
        }
    }
}

impl Copier<'_> {
    fn open_both(&self, path: &[u8]) -> Result<(OwnedFd, OwnedFd), Errno> {
        let source = open_directory_beneath(self.from, path)?;
        Ok((source, open_directory_beneath(self.to, path)?))
    }

    fn directory(&mut self, path: &[u8]) -> Result<(), Errno> {
        let (source, target) = self.open_both(path)?;
        let below_meta = path.strip_prefix(META.as_bytes());
        let is_part = below_meta.is_some_and(|below| below.starts_with(b"/"));
        for name in work::list(source.as_fd())? {
            let at = match path {
                b"" if name == META.as_bytes() => continue,
                b"" => name.clone(),
                path => [path, b"/", &name].concat(),
            };
            let [source, target] = [&source, &target].map(|dir| Place {
                dir: dir.as_fd(),
                name: &name,
            });
            match self.entry(source, target, at) {
                // The kernel has forgotten a file without a name.
                Err(Errno::NOENT) if is_part => work::unlink(target.dir, target.name)?,
                copied => copied?,
            }
        }
        Ok(())
    }

    fn entry(&mut self, source: Place<'_>, target: Place<'_>, at: Vec<u8>) -> Result<(), Errno> {
        let stat = rustix::fs::statat(source.dir, source.name, AtFlags::SYMLINK_NOFOLLOW)?;
        let Place { dir, name } = target;
        let kind = FileType::from_raw_mode(stat.st_mode);
        if kind == FileType::Directory {
            rustix::fs::mkdirat(dir, name, Mode::RWXU)?;
            self.pending.push(at);
            return Ok(());
        }
        if let Some(first) = self.links.get(&stat.st_ino) {
            match self.link(first, target) {
                // Whiteouts are links to few inodes, which the host may not support.
                Err(Errno::MLINK | Errno::PERM | Errno::NOTSUP) if is_whiteout(&stat) => {}
                other => return other,
            }
        }
        match kind {
            FileType::RegularFile => {
                let from = File::from(open_regular_beneath(source.dir, source.name)?);
                work::set_noatime_new(&from);
                let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
                let to = rustix::fs::openat(dir, name, flags, Mode::from_raw_mode(0o600))?;
                copy_file(&from, &File::from(to)).map_err(|error| errno_of(&error))?;
            }
            FileType::Symlink => {
                let symlink = rustix::fs::readlinkat(source.dir, source.name, Vec::new())?;
                rustix::fs::symlinkat(&*symlink, dir, name)?;
            }
            kind => rustix::fs::mknodat(dir, name, kind, Mode::from_raw_mode(0o600), stat.st_rdev)?,
        }
        self.attributes(source, target, &stat)?;
        if stat.st_nlink > 1 {
            self.links.insert(stat.st_ino, at);
        }
        Ok(())
    }

    /// Makes `target` another name of the copy at the path `first`.
    fn link(&self, first: &[u8], target: Place<'_>) -> Result<(), Errno> {
        let slash = first.iter().rposition(|&byte| byte == b'/');
        let (above, name) = slash.map_or((&b""[..], first), |at| (&first[..at], &first[at + 1..]));
        let above = open_directory_beneath(self.to, above)?;
        rustix::fs::linkat(above, name, target.dir, target.name, AtFlags::empty())
    }

    /// Copies owner, mode, extended attributes and times.
    fn attributes(&self, source: Place<'_>, target: Place<'_>, stat: &Stat) -> Result<(), Errno> {
        let Place { dir, name } = target;
        let nofollow = AtFlags::SYMLINK_NOFOLLOW;
        let (user, group) = (stat.st_uid, stat.st_gid);
        let (user, group) = (
            rustix::fs::Uid::from_raw(user),
            rustix::fs::Gid::from_raw(group),
        );
        rustix::fs::chownat(dir, name, Some(user), Some(group), nofollow)?;
        // After the owner: a change of owner removes capabilities.
        for attribute in each_name(&source.xattrs().list()?) {
            // Where the marks are `user.`, other attributes are the host's.
            let is_own = self.namespace == Namespace::Trusted || attribute.starts_with(b"user.");
            if is_own && let Some(value) = source.xattrs().get(attribute)? {
                target.xattrs().set(attribute, &value, XattrMode::Any)?;
            }
        }
        if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
            let mode = Mode::from_raw_mode(stat.st_mode);
            rustix::fs::chmodat(dir, name, mode, AtFlags::empty())?;
        }
        let times = Timestamps {
            last_access: timespec(stat.st_atime, stat.st_atime_nsec),
            last_modification: timespec(stat.st_mtime, stat.st_mtime_nsec),
        };
        rustix::fs::utimensat(dir, name, &times, nofollow)
    }
}

fn timespec(seconds: i64, nanoseconds: u64) -> Timespec {
    Timespec {
        tv_sec: seconds,
        tv_nsec: nanoseconds as i64,
    }
}

fn exists(root: BorrowedFd<'_>, path: &str) -> Result<bool, Errno> {
    match open_directory_beneath(root, path.as_bytes()) {
        Ok(_) => Ok(true),
        Err(Errno::NOENT) => Ok(false),
        Err(errno) => Err(errno),
    }
}
