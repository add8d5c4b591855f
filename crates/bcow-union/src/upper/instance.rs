//! Opens an upper for its one writer.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use bcow::format::hex;
use bcow::lock::FileLock;
use parking_lot::Mutex;
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;

use super::directory::{
    lock, open_inside, open_or_create, open_or_create_root, open_root, remove_acl, remove_acls,
    same_device,
};
use super::overlap::refuse_overlap;
use super::packed::refuse_packed;
use super::part::sweep;
use super::probe::{Refused, probe};
use super::record::{self, PartialForm};
use super::work::{self, Temporary, TemporaryNames};
use super::xattr::each_name;
use super::{
    Attribute, DEFAULT_ACL, HeldUpper, ImageName, InstanceRecord, META, Names, Namespace,
    Ownership, SCHEMA, UpperError, volatile,
};
use crate::options::SyncPolicy;

/// The origin of an upper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Provenance {
    /// Created by this open, in a directory that was empty or missing.
    Created,
    /// Created by this open, in a directory that had files in it, from overlayfs or any other
    /// source.
    Adopted,
    /// Created earlier.
    Existing,
}

/// What a process that has ended leaves of an upper.
#[derive(Debug)]
pub(crate) struct Before<'a> {
    /// The upper; `None` if it was not kept, and is at its path.
    pub held: Option<&'a HeldUpper>,
    /// Files whose names in the work directory begin with this stay.
    pub kept: &'a str,
}

/// An upper that is open for writing. Only this process may change it.
#[derive(Debug)]
pub struct Instance {
    names: Names,
    record: InstanceRecord,
    begun: Provenance,
    temporaries: TemporaryNames,
    /// Held during one link(2).
    whiteouts: Mutex<Whiteouts>,
    /// Dropped last.
    at: Directories,
}

/// Names in the work directory of whiteouts that are the source of links.
#[derive(Debug, Default)]
struct Whiteouts {
    current: Option<String>,
    /// Used when the current one has the largest number of links that the host allows, and the host
    /// has no free inode.
    spare: Option<String>,
}

impl Instance {
    /// Opens the upper at `path` for writing, with the image `image`, and empties its work
    /// directory.
    ///
    /// A missing directory is created with mode 0700 if its parent exists. A directory that is not
    /// an upper becomes one. The lock is held while this lives. `note` is stored with the lock;
    /// other processes that find the upper locked show it.
    pub fn open(path: &Path, image: ImageName<'_>, note: &str) -> Result<Instance, UpperError> {
        Self::open_as(path, image, note, None)
    }

    /// As [`Instance::open`], but with an upper that another process has used until it ended, and
    /// creates nothing.
    pub(crate) fn open_again(
        path: &Path,
        image: ImageName<'_>,
        note: &str,
        before: &Before<'_>,
    ) -> Result<Instance, UpperError> {
        Self::open_as(path, image, note, Some(before))
    }

    fn open_as(
        path: &Path,
        image: ImageName<'_>,
        note: &str,
        before: Option<&Before<'_>>,
    ) -> Result<Instance, UpperError> {
        refuse_overlap(path)?;
        let held = before.and_then(|before| before.held);
        let (root, is_created) = match (before, held) {
            (None, _) => open_or_create_root(path)?,
            (Some(_), None) => (open_root(path)?, false),
            (Some(_), Some(held)) => (held.open_root(path)?, false),
        };
        // An empty [`META`] directory can be left by an interrupted first open.
        let is_empty = work::list(root.as_fd())
            .map_err(|errno| UpperError::io(path, "list it", errno))?
            .iter()
            .all(|name| name == META.as_bytes());
        let meta = match before {
            None => open_or_create(root.as_fd(), path, META)?,
            Some(_) => existing_meta(root.as_fd(), path)?,
        };
        let at = Directories::open(path, root, meta, note, held)?;
        let record = InstanceRecord::read(at.meta.as_fd(), path)?;
        match &record {
            Some(record) => {
                record::require_image(path, record.identity(), &record.image_name, image)?;
            }
            None if before.is_some() => return Err(no_record(path)),
            None => {}
        }
        let found = match at.probe(before.map(|before| before.kept)) {
            Err(error) if record.is_none() => {
                at.abandon(is_created);
                return Err(error);
            }
            other => other?,
        };
        let (record, begun) = match record {
            Some(mut record) => {
                if record.partials.is_none() {
                    refuse_packed(path, at.root.as_fd(), record.namespace)?;
                    record.partials = Some(PartialForm::Sparse);
                    record::write(&record, at.meta.as_fd(), path)?;
                }
                (record, Provenance::Existing)
            }
            None => {
                let is_users = marked_by_user(at.root.as_fd());
                let namespace = if is_users { Namespace::User } else { found.namespace };
                let record = InstanceRecord {
                    schema: SCHEMA.into(),
                    image: hex(&image.identity),
                    image_name: image.name.into(),
                    namespace,
                    ownership: found.ownership,
                    partials: Some(PartialForm::Sparse),
                    snapshot: None,
                    created_by: concat!("bcow ", env!("CARGO_PKG_VERSION")).into(),
                };
                if is_empty {
                    // The ACL was inherited from the parent directory, not set for the container.
                    // The container's root would show it.
                    remove_acl(at.root.as_fd(), DEFAULT_ACL).map_err(|errno| {
                        UpperError::io(path, "remove the ACL that it inherited", errno)
                    })?;
                }
                record::write(&record, at.meta.as_fd(), path)?;
                rustix::fs::fsync(&at.root)
                    .map_err(|errno| UpperError::io(path, "synchronize it", errno))?;
                let begun = if is_empty { Provenance::Created } else { Provenance::Adopted };
                (record, begun)
            }
        };
        at.finish(record, begun, found)
    }

    /// Opens an existing upper of any image, for repair.
    pub fn open_existing(path: &Path, note: &str) -> Result<Instance, UpperError> {
        let root = open_root(path)?;
        let meta = existing_meta(root.as_fd(), path)?;
        let at = Directories::open(path, root, meta, note, None)?;
        let record = InstanceRecord::read(at.meta.as_fd(), path)?;
        let record = record.ok_or_else(|| no_record(path))?;
        let found = at.probe(None)?;
        at.finish(record, Provenance::Existing, found)
    }

    /// What another process needs to continue with the upper.
    pub(crate) fn hold(&self) -> io::Result<HeldUpper> {
        HeldUpper::new(self.at.root.as_fd(), self.at.lock.file())
    }

    /// The path of the upper.
    pub fn path(&self) -> &Path {
        &self.at.path
    }

    /// The root of the tree.
    pub fn root(&self) -> BorrowedFd<'_> {
        self.at.root.as_fd()
    }

    /// The directory [`META`].
    pub(super) fn meta(&self) -> BorrowedFd<'_> {
        self.at.meta.as_fd()
    }

    /// The directory of the partial files' maps.
    pub(crate) fn maps(&self) -> BorrowedFd<'_> {
        self.at.maps.as_fd()
    }

    /// The directory of the index: files for which the image has several names.
    pub(crate) fn index(&self) -> BorrowedFd<'_> {
        self.at.index.as_fd()
    }

    /// The directory of temporaries.
    pub(crate) fn work(&self) -> BorrowedFd<'_> {
        self.at.work.as_fd()
    }

    /// The names of attributes.
    pub(crate) fn names(&self) -> Names {
        self.names
    }

    /// The namespace of the marks.
    pub fn namespace(&self) -> Namespace {
        self.names.namespace
    }

    /// The place of owners.
    pub(crate) fn ownership(&self) -> Ownership {
        self.names.ownership
    }

    /// The content of its `instance.json`.
    pub fn record(&self) -> &InstanceRecord {
        &self.record
    }

    /// The origin of the upper. The root of a new upper does not have the attributes of the image's
    /// root yet.
    pub fn provenance(&self) -> Provenance {
        self.begun
    }

    /// An unused name in the work directory.
    pub(crate) fn temporary_name(&self) -> String {
        self.temporaries.next_name()
    }

    /// Creates a regular file in the work directory, open for reading and writing. Here and in the
    /// methods below, the process's umask applies to `mode`.
    pub fn temporary_file(&self, mode: u32) -> Result<(Temporary<'_>, File), Errno> {
        let name = self.temporary_name();
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(self.work(), &*name, flags, Mode::from_raw_mode(mode))?;
        work::set_noatime_new(&file);
        Ok((self.temporary_at(name, FileType::RegularFile), file.into()))
    }

    /// Creates a directory in the work directory.
    pub fn temporary_directory(&self) -> Result<(Temporary<'_>, File), Errno> {
        let name = self.temporary_name();
        rustix::fs::mkdirat(self.work(), &*name, Mode::RWXU)?;
        let dir = work::open_directory(self.work(), name.as_bytes());
        let temporary = self.temporary_at(name, FileType::Directory);
        let dir = dir?;
        work::set_noatime_new(&dir);
        Ok((temporary, dir.into()))
    }

    /// The object `name` of this type in the work directory. It is removed when the result is
    /// dropped: a directory with everything in it.
    pub(crate) fn temporary_at(&self, name: String, kind: FileType) -> Temporary<'_> {
        Temporary::adopt(self.work(), name, kind)
    }

    /// Creates a device, pipe or socket in the work directory. `device` has the format of
    /// `makedev`.
    pub fn temporary_node(
        &self,
        kind: FileType,
        mode: u32,
        device: u64,
    ) -> Result<Temporary<'_>, Errno> {
        let name = self.temporary_name();
        let mode = Mode::from_raw_mode(mode);
        rustix::fs::mknodat(self.work(), &*name, kind, mode, device)?;
        Ok(self.temporary_at(name, kind))
    }

    /// Creates a symbolic link in the work directory.
    pub fn temporary_symlink(&self, target: &[u8]) -> Result<Temporary<'_>, Errno> {
        let name = self.temporary_name();
        rustix::fs::symlinkat(target, self.work(), &*name)?;
        Ok(self.temporary_at(name, FileType::Symlink))
    }

    /// Creates a whiteout in the work directory.
    pub(crate) fn temporary_whiteout(&self) -> Result<Temporary<'_>, Errno> {
        let name = self.temporary_name();
        self.link_whiteout(self.work(), name.as_bytes())?;
        Ok(self.temporary_at(name, FileType::CharacterDevice))
    }

    /// Creates a whiteout at `name` in `dir`, atomically. `present` is the type of the object that
    /// has the name now. A directory may contain only whiteouts; the caller checks this.
    pub fn place_whiteout(
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
                .map(drop),
            Some(_) => self.temporary_whiteout()?.place(dir, name),
        }
    }

    /// Creates spare whiteouts, so that names can be hidden later even if the host has no free
    /// inode. A failure is ignored: the whiteout is then created when it is needed.
    pub fn prepare_whiteouts(&self) {
        let kept = &mut *self.whiteouts.lock();
        for slot in [&mut kept.current, &mut kept.spare] {
            if slot.is_none() {
                *slot = self.make_whiteout().ok();
            }
        }
    }

    /// Links a kept whiteout to `name`. One inode serves thousands of whiteouts, as in overlayfs.
    fn link_whiteout(&self, dir: BorrowedFd<'_>, name: &[u8]) -> Result<(), Errno> {
        let mut kept = self.whiteouts.lock();
        // The current whiteout, the spare one, and a new one.
        let mut attempts = 3;
        loop {
            let whiteout = match kept.current.take().or_else(|| kept.spare.take()) {
                Some(whiteout) => whiteout,
                None => self.make_whiteout()?,
            };
            let linked = rustix::fs::linkat(self.work(), &*whiteout, dir, name, AtFlags::empty());
            attempts -= 1;
            match linked {
                // The whiteout has the largest number of links that the host allows, or another
                // process removed it.
                Err(Errno::MLINK | Errno::NOENT) if attempts > 0 => {
                    let _ = work::unlink(self.work(), whiteout.as_bytes());
                    continue;
                }
                _ => kept.current = Some(whiteout),
            }
            if kept.spare.is_none() {
                kept.spare = self.make_whiteout().ok();
            }
            return match linked {
                // The host does not support links of device nodes.
                Err(Errno::PERM | Errno::NOTSUP) => {
                    let kind = FileType::CharacterDevice;
                    rustix::fs::mknodat(dir, name, kind, Mode::empty(), 0)
                }
                other => other,
            };
        }
    }

    /// Creates a whiteout inode in the work directory and returns its name there.
    fn make_whiteout(&self) -> Result<String, Errno> {
        let name = self.temporary_name();
        let kind = FileType::CharacterDevice;
        rustix::fs::mknodat(self.work(), &*name, kind, Mode::empty(), 0)?;
        Ok(name)
    }

    /// Refuses an upper whose last use was volatile and did not end before a reboot. Leaves a note
    /// if this use is volatile.
    pub(crate) fn refuse_after_volatile(&self, policy: SyncPolicy) -> Result<(), UpperError> {
        volatile::refuse_after_volatile(self.path(), self.root(), self.at.meta.as_fd(), policy)
    }

    /// Removes the note of a volatile use, which has ended.
    pub(crate) fn forget_volatile(&self) -> Result<(), Errno> {
        volatile::forget(self.at.meta.as_fd())
    }

    /// Removes the kept whiteouts from the work directory.
    pub(crate) fn remove_spare_whiteouts(&self) {
        let mut kept = self.whiteouts.lock();
        let names = [kept.current.take(), kept.spare.take()];
        for whiteout in names.into_iter().flatten() {
            let _ = work::unlink(self.work(), whiteout.as_bytes());
        }
    }

    /// Moves the object at `name` in `dir` to the work directory. The drop of the result removes
    /// it.
    pub fn move_to_work(
        &self,
        dir: BorrowedFd<'_>,
        name: &[u8],
        kind: FileType,
    ) -> Result<Temporary<'_>, Errno> {
        let temporary = self.temporary_name();
        rustix::fs::renameat(dir, name, self.work(), &*temporary)?;
        Ok(self.temporary_at(temporary, kind))
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        self.remove_spare_whiteouts();
    }
}

/// The directories of an upper whose lock is held.
#[derive(Debug)]
struct Directories {
    path: PathBuf,
    root: OwnedFd,
    meta: OwnedFd,
    maps: OwnedFd,
    index: OwnedFd,
    work: OwnedFd,
    lock: FileLock,
}

impl Directories {
    fn open(
        path: &Path,
        root: OwnedFd,
        meta: OwnedFd,
        note: &str,
        held: Option<&HeldUpper>,
    ) -> Result<Self, UpperError> {
        // An upper of the other driver stays as it is, and so does a snapshot.
        if let Some(record) = InstanceRecord::read(meta.as_fd(), path)? {
            record.refuse_snapshot(path)?;
        }
        let lock = lock(meta.as_fd(), path, note, held)?;
        sweep(path, meta.as_fd())?;
        let below = |name: &str| {
            let dir = open_or_create(meta.as_fd(), path, name)?;
            same_device(root.as_fd(), dir.as_fd(), path, name)?;
            remove_acls(dir.as_fd(), path)?;
            Ok::<_, UpperError>(dir)
        };
        same_device(root.as_fd(), meta.as_fd(), path, "")?;
        remove_acls(meta.as_fd(), path)?;
        Ok(Directories {
            path: path.to_owned(),
            maps: below("maps")?,
            index: below("index")?,
            work: below("work")?,
            root,
            meta,
            lock,
        })
    }

    /// Empties the work directory, except for names that begin with `kept`, and probes what the
    /// host permits.
    fn probe(&self, kept: Option<&str>) -> Result<Names, UpperError> {
        let path = &self.path;
        work::empty(self.work.as_fd(), kept)
            .map_err(|errno| UpperError::io(path, "empty its work directory", errno))?;
        probe(self.work.as_fd()).map_err(|refused| match refused {
            Refused::Attributes => UpperError::NoAttributes(path.clone()),
            Refused::Whiteouts(source) => UpperError::NoWhiteouts {
                path: path.clone(),
                source,
            },
            Refused::Io(errno) => UpperError::io(path, "write to its work directory", errno),
        })
    }

    /// Removes the files of an upper that could not be created.
    fn abandon(&self, is_created: bool) {
        // Files that cannot be removed are harmless.
        let _ = rustix::fs::unlinkat(&self.meta, "lock", AtFlags::empty());
        for name in ["maps", "index", "work"] {
            let _ = rustix::fs::unlinkat(&self.meta, name, AtFlags::REMOVEDIR);
        }
        let _ = rustix::fs::unlinkat(&self.root, META, AtFlags::REMOVEDIR);
        if is_created {
            let _ = std::fs::remove_dir(&self.path);
        }
    }

    fn finish(
        self,
        record: InstanceRecord,
        begun: Provenance,
        found: Names,
    ) -> Result<Instance, UpperError> {
        let names = Names {
            namespace: record.namespace,
            ownership: record.ownership,
        };
        if names.namespace == Namespace::Trusted && found.namespace == Namespace::User {
            return Err(UpperError::NamespaceDenied(self.path, names.namespace));
        }
        if names.ownership == Ownership::Native && found.ownership == Ownership::Override {
            return Err(UpperError::OwnershipDenied(self.path));
        }
        Ok(Instance {
            names,
            record,
            begun,
            temporaries: TemporaryNames::default(),
            whiteouts: Mutex::default(),
            at: self,
        })
    }
}

/// Opens [`META`] of an upper that must have been begun.
fn existing_meta(root: BorrowedFd<'_>, path: &Path) -> Result<OwnedFd, UpperError> {
    open_inside(root, path, META)?.ok_or_else(|| no_record(path))
}

fn no_record(path: &Path) -> UpperError {
    UpperError::Record {
        path: path.join(META),
        problem: "it has no record of an image".into(),
    }
}

/// Whether overlayfs, mounted with `userxattr`, has set marks on a root.
pub(super) fn marked_by_user(root: BorrowedFd<'_>) -> bool {
    let list = Attribute::Open(root).list().unwrap_or_default();
    let has = |prefix: &[u8]| each_name(&list).any(|name| name.starts_with(prefix));
    has(b"user.overlay.") && !has(b"trusted.overlay.")
}
