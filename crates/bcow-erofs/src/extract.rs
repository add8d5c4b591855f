//! Extracts a tree, or a part of one, into a directory of the host.
//!
//! The names in the file system may be hostile, and so may be other processes that can write to the
//! destination. The kernel therefore never resolves a whole path: [`beneath`] opens each directory
//! from the descriptor of its parent with openat2(RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS). A name is
//! a single component, which [`Children`](crate::reader::Children) checks. Every file is created
//! new (O_EXCL, mkdir, link, mknod) and then used by descriptor.

mod attributes;
mod beneath;
mod error;

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

use crate::reader::{Children, ErofsError, ExtentSource, FileType, Filesystem, Inode, Nid};
use beneath::{create_beneath, is_directory, join, open_beneath, split};

pub use error::{Attribute, ExtractError};

/// Bytes of content between two checks for cancellation.
const PIECE: u64 = 4 << 20;

/// Options of an extraction.
#[derive(Debug, Clone)]
pub struct ExtractOptions {
    /// What to do with files that already exist at the destination.
    pub existing: Existing,
    /// What to do with parts of the file system that cannot be read.
    pub unreadable: Unreadable,
    /// Whether files get the owners that they have in the file system. Without owners, files have
    /// no set-user-ID and set-group-ID bits either.
    pub owners: bool,
    /// Whether files get their extended attributes, ACLs and file capabilities included.
    pub xattrs: bool,
    /// A flag that cancels the extraction soon after it becomes true.
    pub cancel: Option<Arc<AtomicBool>>,
}

impl Default for ExtractOptions {
    /// Everything that the user of this process may set; no file is replaced.
    fn default() -> Self {
        ExtractOptions {
            existing: Existing::Refuse,
            unreadable: Unreadable::Fail,
            owners: is_privileged(),
            xattrs: true,
            cancel: None,
        }
    }
}

/// What to do with files that already exist at the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Existing {
    /// An existing file is an error. An existing directory keeps its attributes.
    Refuse,
    /// Existing files are replaced, never written into. Existing directories below the destination
    /// get the attributes of the file system.
    Replace,
}

/// What to do with parts of the file system that cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unreadable {
    /// The extraction ends with the error.
    Fail,
    /// The extraction reports the part ([`Progress::unreadable`]), leaves it out, and goes on.
    LeaveOut,
}

/// Observes an extraction.
pub trait Progress {
    /// `bytes` more bytes of file content are written.
    fn advance(&self, bytes: u64);

    /// A part of the file system is left out, because it cannot be read.
    fn unreadable(&self, error: &ExtractError);
}

/// Observes nothing.
impl Progress for () {
    fn advance(&self, _: u64) {}

    fn unreadable(&self, _: &ExtractError) {}
}

/// The result of an extraction.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExtractReport {
    /// Names that were created, directories included.
    pub entries: u64,
    /// Bytes of file content, without holes.
    pub content_bytes: u64,
    /// Parts that were left out because they cannot be read: files, names of a directory,
    /// attributes of a directory.
    pub unreadable: u64,
    /// Device nodes that were left out because only root can create them.
    pub devices: LeftOut,
    /// Extended attributes that were left out because only root can set them.
    pub xattrs: LeftOut,
}

/// A number of objects that were left out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LeftOut {
    /// The number.
    pub count: u64,
    /// The first file, as a path below the destination.
    pub first: Vec<u8>,
}

impl LeftOut {
    fn add(&mut self, path: &[u8]) {
        if self.count == 0 {
            self.first = path.to_vec();
        }
        self.count += 1;
    }
}

/// Extracts `start`, whose path in `fs` is `source`, into the directory `destination`.
///
/// Of a directory, the contents are extracted into the destination, which gets the attributes of
/// that directory if it is created. A file of another type is extracted under the last name of
/// `source`. The destination is created if it is missing; links in its path are followed.
///
/// Files get their mode, modification time, extended attributes, owners and hard links, as far as
/// `options` and the privileges of the process allow; holes stay holes. Nothing outside the
/// destination is written. After an error, the files extracted so far remain; a destination that
/// was created is removed if it is empty.
///
/// Permission bits of a directory that the umask takes from its owner can make the extraction fail.
pub fn extract(
    fs: &Filesystem,
    start: &Inode,
    source: &[u8],
    destination: &Path,
    options: &ExtractOptions,
    progress: &dyn Progress,
) -> Result<ExtractReport, ExtractError> {
    let name = match start.kind {
        FileType::Directory => None,
        _ => Some(last_name(source)?),
    };
    let (root, is_new) = open_destination(destination)?;
    let duplicate = root.try_clone().map_err(|source| ExtractError::Create {
        path: destination.to_owned(),
        source,
    })?;
    let mut extraction = Extraction {
        fs,
        options,
        progress,
        destination,
        root: duplicate,
        is_privileged: is_privileged(),
        first_names: HashMap::new(),
        seen: HashSet::new(),
        report: ExtractReport::default(),
    };
    let extracted = match name {
        None => extraction.tree(start, source, root, is_new),
        Some(name) => extraction.single(start, source, &root, name, is_new),
    };
    if extracted.is_err() && is_new {
        // Succeeds only if the directory is empty.
        let _ = rustix::fs::rmdir(destination);
    }
    extracted.map(|()| extraction.report)
}

fn is_privileged() -> bool {
    rustix::process::geteuid().is_root()
}

fn last_name(path: &[u8]) -> Result<&[u8], ExtractError> {
    let name = path.rsplit(|&byte| byte == b'/').next().unwrap_or(path);
    match name {
        b"" | b"." | b".." => Err(ExtractError::NoName {
            path: path.to_vec(),
        }),
        name => Ok(name),
    }
}

/// The directory to extract into, and whether it was created for that.
fn open_destination(path: &Path) -> Result<(OwnedFd, bool), ExtractError> {
    let failed = |error: Errno| ExtractError::Create {
        path: path.to_owned(),
        source: error.into(),
    };
    let is_new = match rustix::fs::mkdir(path, Mode::RWXU) {
        Ok(()) => true,
        Err(Errno::EXIST) => false,
        Err(error) => return Err(failed(error)),
    };
    // The caller chose this path, so links in it are the caller's own.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(fd) => Ok((fd, is_new)),
        Err(source) => Err(ExtractError::Destination {
            path: path.to_owned(),
            source: source.into(),
        }),
    }
}

struct Extraction<'a> {
    fs: &'a Filesystem,
    options: &'a ExtractOptions,
    progress: &'a dyn Progress,
    destination: &'a Path,
    root: OwnedFd,
    is_privileged: bool,
    /// The first extracted name of each inode with several names, below the destination.
    first_names: HashMap<Nid, Vec<u8>>,
    /// In a valid file system each directory has one parent; otherwise the walk might not end.
    seen: HashSet<Nid>,
    report: ExtractReport,
}

/// An inode, and its path in the file system for errors.
#[derive(Clone, Copy)]
struct NamedInode<'s> {
    inode: &'s Inode,
    path: &'s [u8],
}

/// A name to create.
struct Target<'t> {
    parent: &'t OwnedFd,
    name: &'t [u8],
    /// The path below the destination.
    path: Vec<u8>,
}

/// A directory between the start and the current entry.
struct Level {
    inode: Inode,
    /// Its path in the file system.
    source: Vec<u8>,
    /// Its path below the destination.
    path: Vec<u8>,
    fd: OwnedFd,
    /// Whether it gets the attributes of the file system.
    sets_attributes: bool,
    children: Children,
}

impl Extraction<'_> {
    /// Extracts a file that is not a directory.
    fn single(
        &mut self,
        inode: &Inode,
        path: &[u8],
        root: &OwnedFd,
        name: &[u8],
        is_new: bool,
    ) -> Result<(), ExtractError> {
        let target = Target {
            parent: root,
            name,
            path: name.to_vec(),
        };
        let extracted = self.node(NamedInode { inode, path }, &target);
        self.pass(extracted)?;
        if !is_new {
            return Ok(());
        }
        // No directory of the file system gives the new destination its mode.
        rustix::fs::fchmod(root, Mode::from_raw_mode(0o755))
            .map_err(|error| self.cannot_create(b"", error))
    }

    /// Extracts the contents of the directory `start` into `fd`.
    fn tree(
        &mut self,
        start: &Inode,
        source: &[u8],
        fd: OwnedFd,
        is_new: bool,
    ) -> Result<(), ExtractError> {
        self.seen.insert(start.nid);
        let mut levels = vec![Level {
            inode: *start,
            source: source.to_vec(),
            path: Vec::new(),
            fd,
            sets_attributes: is_new,
            children: Children::new(*start),
        }];
        while let Some(level) = levels.last_mut() {
            let next = level.children.next(self.fs);
            // The names behind a damaged part of a directory cannot be found.
            let next = self.pass(read(&level.source, next))?.flatten();
            let Some(child) = next else {
                self.finish(level)?;
                levels.pop();
                continue;
            };
            self.check_cancelled()?;
            let source = join(&level.source, &child.name);
            let inode = self.fs.inode(child.nid);
            let Some(inode) = self.pass(read(&source, inode))? else {
                continue;
            };
            let target = Target {
                parent: &level.fd,
                name: &child.name,
                path: join(&level.path, &child.name),
            };
            if inode.kind != FileType::Directory {
                let (inode, path) = (&inode, &source[..]);
                let extracted = self.node(NamedInode { inode, path }, &target);
                self.pass(extracted)?;
                continue;
            }
            let nid = inode.nid;
            let entered = self.seen.insert(nid).then_some(());
            let entered = entered.ok_or(ErofsError::DirectoryTwice { nid });
            if self.pass(read(&source, entered))?.is_none() {
                continue;
            }
            let (fd, is_new) = self.directory(&target)?;
            let path = target.path;
            levels.push(Level {
                inode,
                source,
                path,
                fd,
                sets_attributes: is_new || self.options.existing == Existing::Replace,
                children: Children::new(inode),
            });
        }
        Ok(())
    }

    /// Reports an unreadable part of the file system and returns `None` if the options say to leave
    /// it out.
    fn pass<T>(&mut self, result: Result<T, ExtractError>) -> Result<Option<T>, ExtractError> {
        let leaves_out = self.options.unreadable == Unreadable::LeaveOut;
        match result {
            Ok(value) => Ok(Some(value)),
            Err(error) if leaves_out && error.is_in_image() => {
                self.progress.unreadable(&error);
                self.report.unreadable += 1;
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    fn check_cancelled(&self) -> Result<(), ExtractError> {
        let flag = self.options.cancel.as_ref();
        if flag.is_some_and(|flag| flag.load(Ordering::Relaxed)) {
            Err(ExtractError::Cancelled)
        } else {
            Ok(())
        }
    }

    /// Sets the attributes of a directory. Its times are set last: each new entry changes them.
    fn finish(&mut self, level: &Level) -> Result<(), ExtractError> {
        if level.sets_attributes {
            let source = NamedInode {
                inode: &level.inode,
                path: &level.source,
            };
            let set = self.set_attributes(source, &level.path, level.fd.as_fd());
            self.pass(set)?;
        }
        self.report.entries += 1;
        Ok(())
    }

    /// Creates the directory, or opens an existing one; returns whether it is new.
    fn directory(&self, target: &Target<'_>) -> Result<(OwnedFd, bool), ExtractError> {
        let (parent, name) = (target.parent, target.name);
        let replaces = self.options.existing == Existing::Replace;
        let mut created = rustix::fs::mkdirat(parent, name, Mode::RWXU);
        if created == Err(Errno::EXIST) && replaces && !is_directory(parent, name) {
            self.unlink(target)?;
            created = rustix::fs::mkdirat(parent, name, Mode::RWXU);
        }
        let is_new = match created {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(error) => return Err(self.cannot_create(&target.path, error)),
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW;
        match open_beneath(parent.as_fd(), name, flags) {
            Ok(fd) => Ok((fd, is_new)),
            Err(Errno::NOTDIR | Errno::LOOP) if !is_new => {
                Err(self.cannot_create(&target.path, Errno::EXIST))
            }
            Err(error) => Err(self.cannot_create(&target.path, error)),
        }
    }

    /// Creates a file that is not a directory.
    fn node(&mut self, source: NamedInode<'_>, target: &Target<'_>) -> Result<(), ExtractError> {
        let inode = source.inode;
        let replaces = self.options.existing == Existing::Replace;
        if replaces && !is_directory(target.parent, target.name) {
            self.unlink(target)?;
        }
        if inode.nlink > 1 {
            if let Some(first) = self.first_names.get(&inode.nid) {
                self.hardlink(first, target)?;
                self.report.entries += 1;
                return Ok(());
            }
            self.first_names.insert(inode.nid, target.path.clone());
        }
        let created = match inode.kind {
            FileType::Regular => self.regular(source, target),
            FileType::Symlink => self.symlink(source, target),
            _ => self.special(source, target),
        };
        match created {
            Ok(()) => self.report.entries += 1,
            // Other names of the inode cannot be links to a name that is not there.
            Err(_) => {
                self.first_names.remove(&inode.nid);
            }
        }
        created
    }

    fn unlink(&self, target: &Target<'_>) -> Result<(), ExtractError> {
        match rustix::fs::unlinkat(target.parent, target.name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(self.cannot_create(&target.path, error)),
        }
    }

    fn hardlink(&self, first: &[u8], target: &Target<'_>) -> Result<(), ExtractError> {
        let (directory, first_name) = split(first);
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        let directory = open_beneath(self.root.as_fd(), directory, flags);
        let linked = directory.and_then(|directory| {
            let (parent, name) = (target.parent, target.name);
            rustix::fs::linkat(directory, first_name, parent, name, AtFlags::empty())
        });
        match linked {
            Ok(()) => Ok(()),
            Err(Errno::EXIST) => Err(self.cannot_create(&target.path, Errno::EXIST)),
            // The first name was left out, with a warning, because it is a device.
            Err(Errno::NOENT) if !self.is_privileged => Ok(()),
            Err(error) => Err(ExtractError::Link {
                path: self.at(&target.path),
                first: self.at(first),
                source: error.into(),
            }),
        }
    }

    fn regular(&mut self, source: NamedInode<'_>, target: &Target<'_>) -> Result<(), ExtractError> {
        let file = create_beneath(target.parent, target.name)
            .map(File::from)
            .map_err(|error| self.cannot_create(&target.path, error))?;
        let written = self.content(source, &target.path, &file);
        let set = written.and_then(|()| self.set_attributes(source, &target.path, file.as_fd()));
        self.keep(target, set)
    }

    /// Removes the new file if its creation failed: a name with half a file would look complete.
    fn keep(
        &self,
        target: &Target<'_>,
        created: Result<(), ExtractError>,
    ) -> Result<(), ExtractError> {
        if created.is_err() {
            let _ = rustix::fs::unlinkat(target.parent, target.name, AtFlags::empty());
        }
        created
    }

    fn content(
        &mut self,
        source: NamedInode<'_>,
        path: &[u8],
        file: &File,
    ) -> Result<(), ExtractError> {
        let inode = source.inode;
        let destination = self.destination;
        let cannot_write = |error| ExtractError::Write {
            path: below(destination, path),
            source: error,
        };
        // The length comes first: unwritten parts are then holes.
        file.set_len(inode.size).map_err(cannot_write)?;
        for extent in self.fs.extents(inode, 0) {
            let extent = read(source.path, extent)?;
            if extent.source == ExtentSource::Hole {
                continue;
            }
            let mut offset = extent.offset;
            let end = extent.offset.saturating_add(extent.length).min(inode.size);
            while offset < end {
                self.check_cancelled()?;
                let length = PIECE.min(end - offset);
                let mut at = offset;
                let mut written = Ok(());
                let mut sink = |bytes: &[u8]| {
                    if written.is_ok() {
                        written = file.write_all_at(bytes, at);
                    }
                    at += bytes.len() as u64;
                };
                let result = self.fs.read_with(inode, offset, length, &mut sink);
                read(source.path, result)?;
                written.map_err(cannot_write)?;
                self.progress.advance(length);
                self.report.content_bytes += length;
                offset += length;
            }
        }
        Ok(())
    }

    fn symlink(&mut self, source: NamedInode<'_>, target: &Target<'_>) -> Result<(), ExtractError> {
        let link = read(source.path, self.fs.read_link(source.inode))?;
        rustix::fs::symlinkat(&link[..], target.parent, target.name)
            .map_err(|error| self.cannot_create(&target.path, error))?;
        let set = self.set_attributes_unopened(source, target);
        self.keep(target, set)
    }

    /// Creates a device, pipe or socket.
    fn special(&mut self, source: NamedInode<'_>, target: &Target<'_>) -> Result<(), ExtractError> {
        let kind = match source.inode.kind {
            FileType::CharDevice => rustix::fs::FileType::CharacterDevice,
            FileType::BlockDevice => rustix::fs::FileType::BlockDevice,
            FileType::Socket => rustix::fs::FileType::Socket,
            _ => rustix::fs::FileType::Fifo,
        };
        let number = source.inode.rdev;
        let number = number.map_or(0, |number| rustix::fs::makedev(number.major, number.minor));
        match rustix::fs::mknodat(target.parent, target.name, kind, Mode::empty(), number) {
            Ok(()) => {}
            Err(Errno::PERM) if !self.is_privileged => {
                self.report.devices.add(&target.path);
                return Ok(());
            }
            Err(Errno::PERM) => {
                return Err(ExtractError::Mknod {
                    path: self.at(&target.path),
                    source: Errno::PERM.into(),
                });
            }
            Err(error) => return Err(self.cannot_create(&target.path, error)),
        }
        let set = self.set_attributes_unopened(source, target);
        self.keep(target, set)
    }

    /// The path on the host of a path below the destination.
    fn at(&self, path: &[u8]) -> PathBuf {
        below(self.destination, path)
    }

    fn cannot_create(&self, path: &[u8], error: Errno) -> ExtractError {
        let path = self.at(path);
        match error {
            Errno::EXIST => ExtractError::Exists { path },
            Errno::NOSYS => ExtractError::NoOpenat2 { path },
            error => ExtractError::Create {
                path,
                source: error.into(),
            },
        }
    }
}

fn below(destination: &Path, path: &[u8]) -> PathBuf {
    match path {
        b"" => destination.to_owned(),
        path => destination.join(std::ffi::OsStr::from_bytes(path)),
    }
}

/// Adds the path to an error of the reader.
fn read<T>(path: &[u8], result: Result<T, ErofsError>) -> Result<T, ExtractError> {
    result.map_err(|source| ExtractError::Read {
        path: path.to_vec(),
        source,
    })
}
