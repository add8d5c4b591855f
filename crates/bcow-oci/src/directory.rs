//! A directory of the host as a source.
//!
//! The walk uses directory handles and never follows symlinks (except the given path itself), so a
//! process that replaces a directory with a symlink cannot redirect the walk. Entries come in byte
//! order of their names, so that the image does not depend on the host's order. The walk does not
//! enter other file systems: their mount points become empty directories, with a warning (the root
//! file system of a running system has /proc and the like there). A file that changes while it is
//! read is an error, because the image would have a mixture of two versions.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, CString, OsStr};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::slice;

use bcow_erofs::tree::{Attributes, DeviceNumber, LayerTree, Node, NodeId, NodeKind, Timestamp};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, SeekFrom, Stat};
use rustix::io::Errno;

use crate::blob::read_error;
use crate::builder::{Budget, LayerBuilder, Slot, keep_xattr};
use crate::content::{ContentSink, ContentWriter};
use crate::error::{ConvertError, TarPlace, Unplaced};
use crate::layer::Reading;
use crate::run_data::RunData;
use crate::tar::{Run, SparseMap, sparse::MAX_RUNS};
use crate::warnings::Warnings;

/// The kernel's limit for the value of an extended attribute, and for the list of names.
const MAX_XATTR_BYTES: usize = 64 << 10;

/// Reads the tree below `root`.
pub(crate) fn read_directory<S: ContentSink>(
    root: &Path,
    content: &mut ContentWriter<S>,
    budget: &mut Budget,
    warnings: &mut Warnings,
    reading: &Reading<'_>,
) -> Result<LayerTree, ConvertError> {
    let failed = |e| read_error("open", &root.display().to_string(), e);
    let fd = rustix::fs::open(
        root,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .map_err(failed)?;
    let stat = rustix::fs::fstat(&fd).map_err(failed)?;
    let mut walk = Walk {
        content,
        builder: LayerBuilder::new(budget),
        warnings,
        reading,
        device: stat.st_dev,
        links: HashMap::new(),
        buffer: vec![0; MAX_XATTR_BYTES],
    };
    let mut attributes = attributes(&stat);
    attributes.xattrs = walk.xattrs(&fd, c".", root)?;
    walk.builder
        .directory(None, attributes)
        .map_err(|e| e.at(TarPlace::entry("", b".")))?;
    walk.run(fd, root)?;
    Ok(walk.builder.finish(|_, _, _| ()))
}

struct Walk<'w, S> {
    content: &'w mut ContentWriter<S>,
    builder: LayerBuilder<'w>,
    warnings: &'w mut Warnings,
    reading: &'w Reading<'w>,
    device: u64,
    /// Paths of files with several names, by inode number.
    links: HashMap<u64, Vec<u8>>,
    /// For the names or a value of extended attributes.
    buffer: Vec<u8>,
}

/// A directory that is being read.
struct Level {
    fd: OwnedFd,
    path: PathBuf,
    /// The directory's path in the image.
    inner: Vec<u8>,
    /// The directory's node in the tree.
    id: NodeId,
    /// Names still to be read, last first.
    names: Vec<CString>,
}

impl<S: ContentSink> Walk<'_, S> {
    fn run(&mut self, root: OwnedFd, path: &Path) -> Result<(), ConvertError> {
        let names = sorted_names(&root, path)?;
        let mut levels = vec![Level {
            fd: root,
            path: path.to_owned(),
            inner: Vec::new(),
            id: LayerTree::ROOT,
            names,
        }];
        while let Some(level) = levels.last_mut() {
            self.reading.cancel.check()?;
            let Some(name) = level.names.pop() else {
                levels.pop();
                continue;
            };
            if let Some(below) = self.entry(level, &name)? {
                levels.push(below);
            }
        }
        Ok(())
    }

    /// Reads one entry; returns a directory to enter.
    fn entry(&mut self, level: &Level, name: &CStr) -> Result<Option<Level>, ConvertError> {
        let path = level.path.join(OsStr::from_bytes(name.to_bytes()));
        let text = path.display().to_string();
        let stat = rustix::fs::statat(&level.fd, name, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|e| vanished("read", &text, e))?;
        let slot = Slot {
            dir: level.id,
            name: name.to_bytes().into(),
        };
        let inner = match &level.inner[..] {
            [] => name.to_bytes().to_vec(),
            parent => [parent, b"/", name.to_bytes()].concat(),
        };
        let failed = |e: Unplaced| e.at(TarPlace::entry("", text.as_bytes()));
        let kind = FileType::from_raw_mode(stat.st_mode);
        if kind != FileType::Directory && stat.st_nlink > 1 {
            if let Some(first) = self.links.get(&stat.st_ino) {
                self.builder
                    .hardlink(&slot, first, Attributes::default())
                    .map_err(failed)?;
                return Ok(None);
            }
            self.links.insert(stat.st_ino, inner.clone());
        }
        let mut attributes = attributes(&stat);
        attributes.xattrs = self.xattrs(&level.fd, name, &path)?;
        let device = || DeviceNumber {
            major: rustix::fs::major(stat.st_rdev),
            minor: rustix::fs::minor(stat.st_rdev),
        };
        let kind = match kind {
            FileType::Directory => {
                self.builder
                    .directory(Some(&slot), attributes)
                    .map_err(failed)?;
                return self.descend(level, &slot, name, path, inner, &stat);
            }
            FileType::RegularFile => {
                NodeKind::Regular(self.regular(&level.fd, name, &text, &stat)?)
            }
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(&level.fd, name, Vec::new())
                    .map_err(|e| vanished("read", &text, e))?;
                NodeKind::Symlink(target.into_bytes().into())
            }
            FileType::CharacterDevice => NodeKind::CharDevice(device()),
            FileType::BlockDevice => NodeKind::BlockDevice(device()),
            FileType::Fifo => NodeKind::Fifo,
            FileType::Socket => NodeKind::Socket,
            _ => {
                self.warnings.skipped("files of an unknown type left out");
                return Ok(None);
            }
        };
        self.builder
            .node(&slot, Node { attributes, kind })
            .map_err(failed)?;
        Ok(None)
    }

    fn descend(
        &mut self,
        level: &Level,
        slot: &Slot,
        name: &CStr,
        path: PathBuf,
        inner: Vec<u8>,
        stat: &Stat,
    ) -> Result<Option<Level>, ConvertError> {
        if stat.st_dev != self.device {
            self.warnings
                .skipped("mount points of other file systems left empty");
            return Ok(None);
        }
        let text = path.display().to_string();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&level.fd, name, flags, Mode::empty())
            .map_err(|e| vanished("open", &text, e))?;
        let opened = rustix::fs::fstat(&fd).map_err(|e| read_error("read", &text, e))?;
        if (opened.st_dev, opened.st_ino) != (stat.st_dev, stat.st_ino) {
            return Err(ConvertError::changed(&text));
        }
        let names = sorted_names(&fd, &path)?;
        let id = self
            .builder
            .tree()
            .child(slot.dir, &slot.name)
            .unwrap_or(LayerTree::ROOT);
        Ok(Some(Level {
            fd,
            path,
            inner,
            id,
            names,
        }))
    }

    fn regular(
        &mut self,
        dir: &OwnedFd,
        name: &CStr,
        text: &str,
        stat: &Stat,
    ) -> Result<bcow_erofs::tree::Content, ConvertError> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(dir, name, flags, Mode::empty())
            .map_err(|e| vanished("open", text, e))?;
        let same = |now: &Stat| state(now) == state(stat);
        let opened = rustix::fs::fstat(&fd).map_err(|e| read_error("read", text, e))?;
        if !same(&opened) {
            return Err(ConvertError::changed(text));
        }
        let size = stat.st_size as u64;
        self.reading
            .count(size, || TarPlace::entry("", text.as_bytes()))?;
        let map = if (stat.st_blocks as u64) * 512 < size {
            data_runs(&fd, size, text)?
        } else {
            None
        };
        let file = File::from(fd);
        let read = |at: u64, bytes: &mut [u8]| {
            file.read_exact_at(bytes, at).map_err(|e| match e.kind() {
                std::io::ErrorKind::UnexpectedEof => ConvertError::changed(text),
                _ => read_error("read", text, e),
            })
        };
        let whole = Run {
            offset: 0,
            length: size,
        };
        let runs = map
            .as_ref()
            .map_or(slice::from_ref(&whole), |map| &map.runs[..]);
        let runs = runs.iter().map(|run| (run.offset, run.length));
        let mut data = RunData::new(&read, self.reading.progress, runs);
        let content = match &map {
            Some(map) => self.content.sparse(map, &mut data),
            None => self.content.file(size, &mut data),
        }
        .map_err(|e| e.at(TarPlace::entry("", text.as_bytes())))?;
        let after = rustix::fs::fstat(&file).map_err(|e| read_error("read", text, e))?;
        if !same(&after) {
            return Err(ConvertError::changed(text));
        }
        Ok(content)
    }

    /// The extended attributes of `name` in `dir`, read through /proc: the system calls that take a
    /// descriptor fail for symlinks and devices.
    fn xattrs(
        &mut self,
        dir: &OwnedFd,
        name: &CStr,
        path: &Path,
    ) -> Result<Option<bcow_erofs::tree::Xattrs>, ConvertError> {
        let text = path.display().to_string();
        let failed = |e| vanished("read the extended attributes of", &text, e);
        let mut at = format!("/proc/self/fd/{}/", dir.as_raw_fd()).into_bytes();
        at.extend_from_slice(name.to_bytes());
        let list = match rustix::fs::llistxattr(&at[..], &mut self.buffer[..]) {
            Err(Errno::OPNOTSUPP) => return Ok(None),
            length => self.buffer[..length.map_err(failed)?].to_vec(),
        };
        let mut xattrs = BTreeMap::new();
        for name in list.split(|&b| b == 0).filter(|name| !name.is_empty()) {
            if !keep_xattr(name, self.warnings) {
                continue;
            }
            let length = rustix::fs::lgetxattr(&at[..], name, &mut self.buffer[..]);
            let value = self.buffer[..length.map_err(failed)?].to_vec();
            xattrs.insert(name.to_vec(), value);
        }
        self.builder
            .share_xattrs(xattrs)
            .map_err(|e| e.at(TarPlace::entry("", text.as_bytes())))
    }
}

/// The attributes that must not change while a file is read.
fn state(stat: &Stat) -> impl PartialEq + use<> {
    (
        (stat.st_dev, stat.st_ino, stat.st_mode),
        (stat.st_size, stat.st_mtime, stat.st_mtime_nsec),
    )
}

fn attributes(stat: &Stat) -> Attributes {
    Attributes {
        permissions: (stat.st_mode & 0o7777) as u16,
        uid: stat.st_uid,
        gid: stat.st_gid,
        mtime: Timestamp {
            seconds: stat.st_mtime,
            nanoseconds: stat.st_mtime_nsec as u32,
        },
        xattrs: None,
    }
}

/// An entry that was listed and is now missing or of another type has changed.
fn vanished(action: &'static str, what: &str, error: Errno) -> ConvertError {
    match error {
        Errno::NOENT | Errno::LOOP | Errno::NOTDIR | Errno::NODATA => ConvertError::changed(what),
        error => read_error(action, what, error),
    }
}

/// The names in a directory, last first.
fn sorted_names(fd: &OwnedFd, path: &Path) -> Result<Vec<CString>, ConvertError> {
    let failed = |e| read_error("read", &path.display().to_string(), e);
    let mut names = Vec::new();
    for entry in Dir::read_from(fd).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        if !matches!(name.to_bytes(), b"." | b"..") {
            names.push(name.to_owned());
        }
    }
    names.sort_unstable_by(|a, b| b.cmp(a));
    Ok(names)
}

/// The data runs of the file; `None` if the file system does not report them, or if there are too
/// many.
fn data_runs(fd: &impl AsFd, size: u64, text: &str) -> Result<Option<SparseMap>, ConvertError> {
    let mut runs = Vec::new();
    let mut at = 0;
    while at < size {
        let start = match rustix::fs::seek(fd, SeekFrom::Data(at)) {
            Ok(start) => start.min(size),
            Err(Errno::NXIO) => break,
            Err(Errno::INVAL) => return Ok(None),
            Err(error) => return Err(read_error("read", text, error)),
        };
        let end = match rustix::fs::seek(fd, SeekFrom::Hole(start)) {
            Ok(end) => end.min(size),
            Err(Errno::NXIO) => break,
            Err(error) => return Err(read_error("read", text, error)),
        };
        if end <= start || runs.len() == MAX_RUNS {
            return Ok(None);
        }
        runs.push((start, end - start));
        at = end;
    }
    let stored = runs.iter().map(|&(_, length)| length).sum();
    Ok(SparseMap::new(size, runs, stored).ok())
}
