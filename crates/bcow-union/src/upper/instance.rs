//! Opens an upper for its one writer.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bcow::lock::FileLock;
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;

use super::beneath::open_regular;
use super::overlap::refuse_overlap;
use super::probe::{Refused, permits, probe};
use super::work::{self, Temporary, TemporaryNames};
use super::{
    ACCESS_ACL, Attribute, DEFAULT_ACL, META, Names, Namespace, Ownership, Record, SCHEMA,
    UpperError,
};

/// The image that an upper is used with.
#[derive(Debug, Clone, Copy)]
pub struct ImageName<'a> {
    /// What identifies it.
    pub identity: [u8; 32],
    /// What to call it in messages.
    pub name: &'a str,
}

/// How an upper came to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begun {
    /// Now, in a directory that was empty or missing.
    New,
    /// Now, in a directory that had files in it: overlayfs's, or anybody's.
    Adopted,
    /// Earlier.
    Before,
}

/// An upper that this process, and no other, may change.
#[derive(Debug)]
pub struct Instance {
    path: PathBuf,
    root: OwnedFd,
    maps: OwnedFd,
    index: OwnedFd,
    work: OwnedFd,
    names: Names,
    record: Record,
    begun: Begun,
    temporaries: TemporaryNames,
    /// Held for a link.
    whiteouts: Mutex<Whiteouts>,
    _lock: FileLock,
}

/// Names in the work directory of whiteouts that others are links of.
#[derive(Debug, Default)]
struct Whiteouts {
    current: Option<String>,
    /// For the time when the current one has as many names as the host permits, and the host no inode left.
    spare: Option<String>,
}

impl Instance {
    /// Opens the upper at `path` to be changed, as one of `image`'s, and empties its work directory.
    ///
    /// A directory that is missing is created if its parent exists, for its owner only; one that is no upper becomes one.
    /// Its lock is held as long as this lives; `note` tells those who are refused who holds it.
    pub fn open(path: &Path, image: ImageName<'_>, note: &str) -> Result<Instance, UpperError> {
        refuse_overlap(path)?;
        let (root, is_created) = match open_root(path) {
            Err(UpperError::Missing { .. }) => {
                create_root(path)?;
                (open_root(path)?, true)
            }
            other => (other?, false),
        };
        // Ours alone may be what an interrupted first opening left.
        let is_empty = work::list(root.as_fd())
            .map_err(|errno| failed(path, "list it", errno))?
            .iter()
            .all(|name| name == META.as_bytes());
        let meta = open_or_create(root.as_fd(), path, META)?;
        let lock = lock(meta.as_fd(), path, note)?;
        let opening = Opening::open(path, root, meta, lock)?;
        let record = Record::read(opening.meta.as_fd(), path)?;
        if let Some(record) = &record
            && let Some(belongs) = record.identity()
            && belongs != image.identity
        {
            return Err(UpperError::AnotherImage {
                path: path.to_owned(),
                belongs: Box::new((belongs, record.image_name.clone())),
                image: Box::new((image.identity, image.name.to_owned())),
            });
        }
        let found = match opening.probe() {
            Err(error) if record.is_none() => {
                opening.abandon(is_created);
                return Err(error);
            }
            other => other?,
        };
        let (record, begun) = match record {
            Some(record) => (record, Begun::Before),
            None => {
                let namespace = match marked_by_user(opening.root.as_fd()) {
                    true => Namespace::User,
                    false => found.namespace,
                };
                let record = Record {
                    schema: SCHEMA.into(),
                    image: hex(&image.identity),
                    image_name: image.name.into(),
                    namespace,
                    ownership: found.ownership,
                    created_by: concat!("bcow ", env!("CARGO_PKG_VERSION")).into(),
                };
                if is_empty {
                    // Nobody set it for the container, whose root would show it.
                    remove_acl(opening.root.as_fd(), DEFAULT_ACL)
                        .map_err(|errno| failed(path, "remove the ACL that it inherited", errno))?;
                }
                record.write(opening.meta.as_fd(), path)?;
                work::make_durable(opening.root.as_fd())
                    .map_err(|errno| failed(path, "synchronise it", errno))?;
                let begun = match is_empty {
                    true => Begun::New,
                    false => Begun::Adopted,
                };
                (record, begun)
            }
        };
        opening.finish(record, begun, found)
    }

    /// Opens an upper that exists, whatever image it belongs to, to be repaired.
    pub fn open_existing(path: &Path, note: &str) -> Result<Instance, UpperError> {
        let root = open_root(path)?;
        let missing = || UpperError::Record {
            path: path.join(META),
            problem: "there is no record of an image in it".into(),
        };
        let meta = match work::open_directory(root.as_fd(), META.as_bytes()) {
            Err(Errno::NOENT) => return Err(missing()),
            other => other.map_err(|errno| meta_failed(path, META, errno))?,
        };
        let lock = lock(meta.as_fd(), path, note)?;
        let opening = Opening::open(path, root, meta, lock)?;
        let record = Record::read(opening.meta.as_fd(), path)?.ok_or_else(missing)?;
        let found = opening.probe()?;
        opening.finish(record, Begun::Before, found)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The root of the tree.
    pub fn root(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }

    /// The directory of the sketches' maps.
    pub fn maps(&self) -> BorrowedFd<'_> {
        self.maps.as_fd()
    }

    /// The directory of lower files with several names.
    pub fn index(&self) -> BorrowedFd<'_> {
        self.index.as_fd()
    }

    /// The directory of temporaries.
    pub fn work(&self) -> BorrowedFd<'_> {
        self.work.as_fd()
    }

    /// How attributes are named.
    pub fn names(&self) -> Names {
        self.names
    }

    /// Where marks are kept.
    pub fn namespace(&self) -> Namespace {
        self.names.namespace
    }

    /// Where owners are kept.
    pub fn ownership(&self) -> Ownership {
        self.names.ownership
    }

    /// What its `instance.json` says.
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// How it came to be. The root of a new one has nothing of the image's root yet.
    pub fn begun(&self) -> Begun {
        self.begun
    }

    /// A name in the work directory that nothing has.
    pub fn temporary_name(&self) -> String {
        Temporary::name(&self.temporaries)
    }

    /// A new regular file in the work directory, open for reading and writing. The process's umask applies to `mode`, here
    /// and below.
    pub fn temporary_file(&self, mode: u32) -> Result<(Temporary<'_>, File), Errno> {
        let name = self.temporary_name();
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.work, &*name, flags, Mode::from_raw_mode(mode))?;
        work::leave_access_time(&file);
        let temporary = Temporary::adopt(self.work(), name, FileType::RegularFile);
        Ok((temporary, file.into()))
    }

    /// A new directory in the work directory.
    pub fn temporary_directory(&self, mode: u32) -> Result<(Temporary<'_>, OwnedFd), Errno> {
        let name = self.temporary_name();
        rustix::fs::mkdirat(&self.work, &*name, Mode::from_raw_mode(mode | 0o700))?;
        let dir = work::open_directory(self.work(), name.as_bytes());
        let temporary = Temporary::adopt(self.work(), name, FileType::Directory);
        let dir = dir?;
        work::leave_access_time(&dir);
        Ok((temporary, dir))
    }

    /// A new device, pipe or socket in the work directory; `device` is in the form of `makedev`.
    pub fn temporary_node(
        &self,
        kind: FileType,
        mode: u32,
        device: u64,
    ) -> Result<Temporary<'_>, Errno> {
        let name = self.temporary_name();
        let mode = Mode::from_raw_mode(mode);
        rustix::fs::mknodat(&self.work, &*name, kind, mode, device)?;
        Ok(Temporary::adopt(self.work(), name, kind))
    }

    /// A new symbolic link in the work directory.
    pub fn temporary_symlink(&self, target: &[u8]) -> Result<Temporary<'_>, Errno> {
        let name = self.temporary_name();
        rustix::fs::symlinkat(target, &self.work, &*name)?;
        Ok(Temporary::adopt(self.work(), name, FileType::Symlink))
    }

    /// A new name of a whiteout in the work directory.
    pub fn temporary_whiteout(&self) -> Result<Temporary<'_>, Errno> {
        let name = self.temporary_name();
        self.link_whiteout(self.work(), name.as_bytes())?;
        let kind = FileType::CharacterDevice;
        Ok(Temporary::adopt(self.work(), name, kind))
    }

    /// Makes a whiteout of `name` in `dir`, in one step. `present` is the type of what has the name now; a directory must
    /// be free of anything but whiteouts, which the caller has checked.
    pub fn white_out(
        &self,
        dir: BorrowedFd<'_>,
        name: &[u8],
        present: Option<FileType>,
    ) -> Result<(), Errno> {
        match present {
            None => self.link_whiteout(dir, name),
            Some(FileType::Directory) => self
                .temporary_whiteout()?
                .exchange(dir, name, FileType::Directory)
                .map(drop)
                .map_err(|(_, errno)| errno),
            Some(_) => self
                .temporary_whiteout()?
                .place(dir, name)
                .map_err(|(_, errno)| errno),
        }
    }

    /// Makes whiteouts to be kept, so that names can be hidden later when the host has no inode for one. What cannot be made now is
    /// made when it is needed.
    pub fn keep_whiteouts(&self) {
        let kept = &mut *self.lock_whiteouts();
        for slot in [&mut kept.current, &mut kept.spare] {
            if slot.is_none() {
                *slot = self.make_whiteout().ok();
            }
        }
    }

    /// Gives a whiteout that is kept for this one more name: one inode serves thousands of them, as in overlayfs.
    fn link_whiteout(&self, dir: BorrowedFd<'_>, name: &[u8]) -> Result<(), Errno> {
        let mut kept = self.lock_whiteouts();
        // The one that is kept, the spare one, and one that is made now.
        let mut attempts = 3;
        loop {
            let whiteout = match kept.current.take().or_else(|| kept.spare.take()) {
                Some(whiteout) => whiteout,
                None => self.make_whiteout()?,
            };
            let linked = rustix::fs::linkat(self.work(), &*whiteout, dir, name, AtFlags::empty());
            attempts -= 1;
            match linked {
                // It has as many names as the host permits, or somebody removed it.
                Err(Errno::MLINK | Errno::NOENT) if attempts > 0 => {
                    let _ = rustix::fs::unlinkat(self.work(), &*whiteout, AtFlags::empty());
                    continue;
                }
                _ => kept.current = Some(whiteout),
            }
            if kept.spare.is_none() {
                kept.spare = self.make_whiteout().ok();
            }
            return match linked {
                // A host without links of devices.
                Err(Errno::PERM | Errno::NOTSUP) => {
                    let kind = FileType::CharacterDevice;
                    rustix::fs::mknodat(dir, name, kind, Mode::empty(), 0)
                }
                other => other,
            };
        }
    }

    /// A whiteout of its own in the work directory: its name there.
    fn make_whiteout(&self) -> Result<String, Errno> {
        let name = self.temporary_name();
        let kind = FileType::CharacterDevice;
        rustix::fs::mknodat(self.work(), &*name, kind, Mode::empty(), 0)?;
        Ok(name)
    }

    /// Removes from the work directory what is kept there for the next change.
    pub fn put_away(&self) {
        let mut kept = self.lock_whiteouts();
        for whiteout in [kept.current.take(), kept.spare.take()]
            .into_iter()
            .flatten()
        {
            let _ = rustix::fs::unlinkat(&self.work, &*whiteout, AtFlags::empty());
        }
    }

    fn lock_whiteouts(&self) -> MutexGuard<'_, Whiteouts> {
        self.whiteouts
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves what has the name `name` in `dir` to the work directory, where it is removed when the result is dropped.
    pub fn take_out(
        &self,
        dir: BorrowedFd<'_>,
        name: &[u8],
        kind: FileType,
    ) -> Result<Temporary<'_>, Errno> {
        let temporary = self.temporary_name();
        rustix::fs::renameat(dir, name, &self.work, &*temporary)?;
        Ok(Temporary::adopt(self.work(), temporary, kind))
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        self.put_away();
    }
}

/// An upper whose lock is held and whose directories are there.
struct Opening {
    path: PathBuf,
    root: OwnedFd,
    meta: OwnedFd,
    maps: OwnedFd,
    index: OwnedFd,
    work: OwnedFd,
    lock: FileLock,
}

impl Opening {
    fn open(
        path: &Path,
        root: OwnedFd,
        meta: OwnedFd,
        lock: FileLock,
    ) -> Result<Opening, UpperError> {
        let below = |name: &str| {
            let dir = open_or_create(meta.as_fd(), path, name)?;
            same_device(root.as_fd(), dir.as_fd(), path, name)?;
            remove_acls(dir.as_fd(), path)?;
            Ok::<_, UpperError>(dir)
        };
        same_device(root.as_fd(), meta.as_fd(), path, "")?;
        remove_acls(meta.as_fd(), path)?;
        Ok(Opening {
            path: path.to_owned(),
            maps: below("maps")?,
            index: below("index")?,
            work: below("work")?,
            root,
            meta,
            lock,
        })
    }

    /// Empties the work directory and finds out what the host permits.
    fn probe(&self) -> Result<Names, UpperError> {
        let path = &self.path;
        work::empty(self.work.as_fd())
            .map_err(|errno| failed(path, "empty its work directory", errno))?;
        probe(self.work.as_fd()).map_err(|refused| match refused {
            Refused::Attributes => UpperError::NoAttributes { path: path.clone() },
            Refused::Whiteouts(source) => UpperError::NoWhiteouts {
                path: path.clone(),
                source,
            },
            Refused::Io(errno) => failed(path, "write to its work directory", errno),
        })
    }

    /// Takes away what was made for an upper that cannot be one.
    fn abandon(&self, is_created: bool) {
        // What cannot be removed harms nobody.
        let _ = rustix::fs::unlinkat(&self.meta, "lock", AtFlags::empty());
        for name in ["maps", "index", "work"] {
            let _ = rustix::fs::unlinkat(&self.meta, name, AtFlags::REMOVEDIR);
        }
        let _ = rustix::fs::unlinkat(&self.root, META, AtFlags::REMOVEDIR);
        if is_created {
            let _ = std::fs::remove_dir(&self.path);
        }
    }

    fn finish(self, record: Record, begun: Begun, found: Names) -> Result<Instance, UpperError> {
        let names = Names {
            namespace: record.namespace,
            ownership: record.ownership,
        };
        let (namespace, ownership) = permits(found, names);
        if !namespace {
            return Err(UpperError::NamespaceDenied {
                path: self.path,
                namespace: names.namespace,
            });
        }
        if !ownership {
            return Err(UpperError::OwnershipDenied {
                path: self.path,
                ownership: names.ownership,
            });
        }
        Ok(Instance {
            path: self.path,
            root: self.root,
            maps: self.maps,
            index: self.index,
            work: self.work,
            names,
            record,
            begun,
            temporaries: TemporaryNames::default(),
            whiteouts: Mutex::default(),
            _lock: self.lock,
        })
    }
}

/// Opens the upper's root, which may be named by a link: it is the user who names it.
pub(super) fn open_root(path: &Path) -> Result<OwnedFd, UpperError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| match errno {
        Errno::NOENT => UpperError::Missing {
            path: path.to_owned(),
        },
        Errno::NOTDIR => UpperError::NotADirectory {
            path: path.to_owned(),
        },
        errno => failed(path, "open it", errno),
    })
}

fn create_root(path: &Path) -> Result<(), UpperError> {
    match rustix::fs::mkdir(path, Mode::from_raw_mode(0o700)) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(Errno::NOENT) => Err(UpperError::NoParent {
            path: path.to_owned(),
        }),
        Err(errno) => Err(failed(path, "create it", errno)),
    }
}

/// Opens a directory of ours, which is `name` in `dir`; creates it if it is missing.
fn open_or_create(dir: BorrowedFd<'_>, upper: &Path, name: &str) -> Result<OwnedFd, UpperError> {
    let path = match name {
        META => upper.to_owned(),
        _ => upper.join(META),
    };
    match rustix::fs::mkdirat(dir, name, Mode::from_raw_mode(0o700)) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(errno) => return Err(failed(upper, "create its directory .bcow", errno)),
    }
    work::open_directory(dir, name.as_bytes()).map_err(|errno| meta_failed(&path, name, errno))
}

/// What it means that a directory of ours could not be opened.
pub(super) fn meta_failed(parent: &Path, name: &str, errno: Errno) -> UpperError {
    let path = parent.join(name);
    match errno {
        Errno::NOTDIR | Errno::LOOP => UpperError::NotADirectory { path },
        errno => failed(&path, "open it", errno),
    }
}

/// Takes the ACLs away that a directory of ours inherited from one above: what is made in it would get them, and be the
/// container's with them. Overlayfs does the same with its work directory.
fn remove_acls(dir: BorrowedFd<'_>, upper: &Path) -> Result<(), UpperError> {
    let removed = remove_acl(dir, DEFAULT_ACL).and_then(|()| {
        if Attribute::Open(dir).get(ACCESS_ACL)?.is_some() {
            // Without it, the group would be let in that the mask was for.
            rustix::fs::fchmod(dir, Mode::from_raw_mode(0o700))?;
            remove_acl(dir, ACCESS_ACL)?;
        }
        Ok(())
    });
    removed.map_err(|errno| {
        failed(
            upper,
            "remove inherited ACLs from its directory .bcow",
            errno,
        )
    })
}

/// Removes an ACL that is there. Whom the directory does not belong to may not even try.
fn remove_acl(dir: BorrowedFd<'_>, name: &[u8]) -> Result<(), Errno> {
    let at = Attribute::Open(dir);
    match at.get(name)? {
        Some(_) => at.clear(name).map(drop),
        None => Ok(()),
    }
}

fn same_device(
    root: BorrowedFd<'_>,
    dir: BorrowedFd<'_>,
    upper: &Path,
    name: &str,
) -> Result<(), UpperError> {
    let path = upper.join(META).join(name);
    let device = |fd: BorrowedFd<'_>| {
        let stat = rustix::fs::fstat(fd).map_err(|errno| failed(&path, "open it", errno))?;
        Ok::<_, UpperError>(stat.st_dev)
    };
    match device(root)? == device(dir)? {
        true => Ok(()),
        false => Err(UpperError::AnotherFileSystem { path }),
    }
}

pub(super) fn open_lock(meta: BorrowedFd<'_>, flags: OFlags) -> Result<Option<File>, Errno> {
    match open_regular(meta, "lock", flags) {
        Ok(file) => Ok(Some(file.into())),
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// The writer's lock.
fn lock(meta: BorrowedFd<'_>, path: &Path, note: &str) -> Result<FileLock, UpperError> {
    let io = |errno| failed(path, "open its lock .bcow/lock", errno);
    let file = open_lock(meta, OFlags::RDWR | OFlags::CREATE)
        .and_then(|file| file.ok_or(Errno::NOENT))
        .map_err(io)?;
    let lock = FileLock::exclusive(&file, note).map_err(|holder| UpperError::InUse {
        path: path.to_owned(),
        holder,
    })?;
    // Of two that begin at the same time, the later one finds the other's lock.
    refuse_overlap(path)?;
    Ok(lock)
}

/// Whether overlayfs, mounted with `userxattr`, has marked a root.
pub(super) fn marked_by_user(root: BorrowedFd<'_>) -> bool {
    let list = Attribute::Open(root).list().unwrap_or_default();
    let has = |prefix: &[u8]| {
        list.split(|&byte| byte == 0)
            .any(|name| name.starts_with(prefix))
    };
    has(b"user.overlay.") && !has(b"trusted.overlay.")
}

pub(super) fn failed(path: &Path, action: &'static str, source: Errno) -> UpperError {
    match source {
        Errno::ROFS => UpperError::ReadOnly {
            path: path.to_owned(),
        },
        source => UpperError::Io {
            path: path.to_owned(),
            action,
            source,
        },
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
