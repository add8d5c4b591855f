//! One BCoW file, copied and checked against its Merkle tree.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bcow::check::{RestoreError, restore};
use bcow::{Storage, header_of};

use crate::blob::read_error;
use crate::cancel::Cancel;
use crate::digest::{Algorithm, Digest, hex};
use crate::error::{ConvertError, check_equal};

/// Length of the header slots, whose bytes the Merkle tree covers in part only.
const SLOTS_BYTES: usize = 1024;

/// A sealed BCoW file that is copied.
#[derive(Clone)]
pub struct CopyFile {
    /// The name in messages.
    pub name: String,
    /// The bytes.
    pub storage: Arc<dyn Storage>,
    /// Length in bytes.
    pub bytes: u64,
    /// The root of the Merkle tree.
    pub merkle_root: [u8; 32],
    /// Whether the storage checks what it reads against the root.
    pub is_checked: bool,
}

impl CopyFile {
    /// The file with these bytes. Its header must have a Merkle tree.
    pub fn new(
        name: String,
        storage: Arc<dyn Storage>,
        is_checked: bool,
    ) -> Result<CopyFile, ConvertError> {
        let Some(header) = header_of(&*storage) else {
            return Err(ConvertError::layout(name, "it is not a BCoW file"));
        };
        let Some(tree) = &header.merkle else {
            return Err(ConvertError::refused(
                format!("{name} has no Merkle tree, without which a copy cannot be checked"),
                "`bcow seal` makes a disk immutable, with a Merkle tree",
            ));
        };
        Ok(CopyFile {
            merkle_root: tree.root,
            bytes: header.file_bytes,
            name,
            storage,
            is_checked,
        })
    }

    pub(super) fn digest(&self, cancel: Option<&AtomicBool>) -> Result<Digest, ConvertError> {
        Digest::of_storage_until(&*self.storage, Algorithm::Sha256, Cancel::new(cancel))
            .map_err(|error| self.unreadable(error))
    }

    fn unreadable(&self, source: io::Error) -> ConvertError {
        read_error("read", &self.name, source)
    }

    /// Completes `file`, which may have any part of the bytes, right or wrong. Every chunk is
    /// compared with the Merkle tree, and only what is missing or wrong is read from the source.
    /// Returns the number of bytes that were written.
    pub(super) fn complete(
        &self,
        file: &File,
        destination: &Path,
        threads: usize,
        cancel: Option<&Arc<AtomicBool>>,
    ) -> Result<u64, ConvertError> {
        let failed = |source| ConvertError::write("write", destination, source);
        let watched = Arc::new(Watched {
            storage: Arc::clone(&self.storage),
            cancel: cancel.cloned(),
            failed: Mutex::new(None),
        });
        let copies = [Arc::clone(&watched) as Arc<dyn Storage>];
        let restored = restore(file, Some(self.merkle_root), &copies, threads);
        Cancel::new(cancel.map(|cancel| &**cancel)).check()?;
        if let Some(error) = watched.failed().take() {
            return Err(self.unreadable(error));
        }
        let restored = restored.map_err(|error| match error {
            RestoreError::File(error) => failed(io::Error::other(error)),
            error => ConvertError::layout(&self.name, error),
        })?;
        if let Some(wrong) = restored.unrestored.first() {
            return Err(ConvertError::layout(
                &self.name,
                format!(
                    "bytes {}..{} do not match the Merkle tree",
                    wrong.start, wrong.end
                ),
            ));
        }
        // Slots of the same content can differ, and the copy has the same bytes.
        let mut slots = [0; SLOTS_BYTES];
        self.storage
            .read_at(0, &mut slots)
            .map_err(|error| self.unreadable(error))?;
        Storage::write_at(file, 0, &slots).map_err(failed)?;
        Storage::set_len(file, self.bytes).map_err(failed)?;
        Ok(restored.written_bytes())
    }

    /// Checks that the file has the digest, if its storage does not check what it reads. `cancel`
    /// ends the check when it becomes true.
    pub fn check(
        &self,
        expected: &Digest,
        cancel: Option<&AtomicBool>,
    ) -> Result<(), ConvertError> {
        if self.is_checked {
            return Ok(());
        }
        check_equal(&self.name, "digest", expected, &self.digest(cancel)?)
    }

    /// The root of the Merkle tree, in hexadecimal.
    pub(super) fn root(&self) -> String {
        hex(&self.merkle_root)
    }
}

/// Reads a source, and stops at the first error: a server that has gone is not waited for at each
/// chunk.
struct Watched {
    storage: Arc<dyn Storage>,
    cancel: Option<Arc<AtomicBool>>,
    /// The first error. The lock is held to look at it, never during a read.
    failed: Mutex<Option<io::Error>>,
}

impl Watched {
    fn failed(&self) -> MutexGuard<'_, Option<io::Error>> {
        // An error is valid after a panic elsewhere.
        self.failed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Storage for Watched {
    fn len(&self) -> io::Result<u64> {
        self.storage.len()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        if Cancel::new(self.cancel.as_deref()).is_set() || self.failed().is_some() {
            return Err(io::Error::other("the copy has ended"));
        }
        self.storage.read_at(offset, buf).map_err(|error| {
            let kind = error.kind();
            self.failed().get_or_insert(error);
            kind.into()
        })
    }

    fn write_at(&self, _: u64, _: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn set_len(&self, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

/// A part of a file on this machine: a member of an archive.
pub(super) struct Member {
    pub(super) file: Arc<File>,
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

impl Storage for Member {
    fn len(&self) -> io::Result<u64> {
        Ok(self.bytes)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        offset
            .checked_add(buf.len() as u64)
            .filter(|&end| end <= self.bytes)
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        Storage::read_at(&*self.file, self.offset + offset, buf)
    }

    fn write_at(&self, _: u64, _: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn set_len(&self, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}
