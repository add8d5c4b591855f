//! Opens an upper for reading while no process writes to it.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::directory::{meta_failed, open_inside, open_root};
use super::instance::marked_by_user;
use super::lock::lock_shared;
use super::probe::can_read_trusted;
use super::{Instance, InstanceRecord, META, Names, Namespace, Ownership, UpperError};
use super::{volatile, work};

/// An upper that no process writes to while this lives, or while the content of
/// [`Changes`](super::Changes) that were read with it lives.
///
/// An upper that overlayfs left has no [`META`] and so no lock. Writers to such an upper cannot be
/// kept away.
#[derive(Debug)]
pub struct UpperReader {
    path: PathBuf,
    root: OwnedFd,
    meta: Option<OwnedFd>,
    names: Names,
    record: Option<InstanceRecord>,
    lock: Option<Arc<File>>,
}

impl UpperReader {
    /// Opens the upper at `path` for reading. Fails if a writer holds its lock.
    pub fn open(path: &Path) -> Result<UpperReader, UpperError> {
        let root = open_root(path)?;
        let meta = open_inside(root.as_fd(), path, META)?;
        let (lock, record) = match &meta {
            None => (None, None),
            Some(meta) => (
                lock_shared(meta.as_fd(), path)?,
                InstanceRecord::read(meta.as_fd(), path)?,
            ),
        };
        let can_read_trusted = can_read_trusted(root.as_fd()).map_err(|errno| {
            UpperError::io(path, "find out which attributes can be read", errno)
        })?;
        let names = match &record {
            // Marks that this user cannot see would count as missing. A metadata copy would then
            // read as a file of zeros.
            Some(record) if record.namespace == Namespace::Trusted && !can_read_trusted => {
                return Err(UpperError::NamespaceDenied(
                    path.to_owned(),
                    record.namespace,
                ));
            }
            Some(record) => Names {
                namespace: record.namespace,
                ownership: record.ownership,
            },
            // The names that a mount would choose for a new upper.
            None => {
                let is_users = marked_by_user(root.as_fd()) || !can_read_trusted;
                let (namespace, ownership) = if is_users {
                    (Namespace::User, Ownership::Override)
                } else {
                    (Namespace::Trusted, Ownership::Native)
                };
                Names {
                    namespace,
                    ownership,
                }
            }
        };
        Ok(UpperReader {
            path: path.to_owned(),
            root,
            meta,
            names,
            record,
            lock: lock.map(Arc::new),
        })
    }

    /// A reader for the process that holds the writer's lock. No other process can write.
    pub fn of(instance: &Instance) -> Result<UpperReader, UpperError> {
        let path = instance.path();
        let root = work::open_directory(instance.root(), b".")
            .map_err(|errno| UpperError::io(path, "open it", errno))?;
        let meta = work::open_directory(root.as_fd(), META.as_bytes())
            .map_err(|errno| meta_failed(path, META, errno))?;
        Ok(UpperReader {
            path: path.to_owned(),
            root,
            meta: Some(meta),
            names: instance.names(),
            record: Some(instance.record().clone()),
            lock: None,
        })
    }

    /// The path of the upper.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The root of the tree.
    pub(crate) fn root(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }

    /// The names of attributes.
    pub fn names(&self) -> Names {
        self.names
    }

    /// The content of its `instance.json`, if there is one.
    pub fn record(&self) -> Option<&InstanceRecord> {
        self.record.as_ref()
    }

    /// The shared lock, for readers that outlive this; `None` if the upper has no lock.
    pub(crate) fn lock(&self) -> Option<Arc<File>> {
        self.lock.clone()
    }

    /// Whether the machine stopped while the upper was mounted with `--sync volatile`. The content
    /// may then be damaged in any way.
    pub fn is_lost(&self) -> Result<bool, UpperError> {
        match &self.meta {
            Some(meta) => volatile::is_lost(meta.as_fd(), &self.path),
            None => Ok(false),
        }
    }

    /// The directory `name` of [`META`], if it exists.
    pub(crate) fn meta_directory(&self, name: &str) -> Result<Option<OwnedFd>, UpperError> {
        let Some(meta) = &self.meta else {
            return Ok(None);
        };
        open_inside(meta.as_fd(), &self.path.join(META), name)
    }
}
