//! `instance.json`: the image and the driver that an upper belongs to, and how the upper stores the
//! changes.

use std::io::Read;
use std::os::fd::BorrowedFd;
use std::path::Path;

use bcow::format::from_hex;
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::beneath::open_regular;
use super::{Driver, META, Namespace, Ownership, UpperError, work};
use crate::host::errno_of;

/// The schema of an upper of the FUSE driver.
pub const SCHEMA: &str = "bcow.instance/1";
/// The schema of an upper of the kernel driver. Versions that know only the first one refuse it.
pub const DISK_SCHEMA: &str = "bcow.instance/2";
/// The name of the disk in [`META`], in an upper of the kernel driver.
pub(super) const DISK: &str = "disk.bcow";
/// The name of the file in [`META`], and of the temporary file that replaces it.
pub(super) const FILE: &str = "instance.json";
const NEW_FILE: &str = "instance.json.new";
/// The longest record that is read, in bytes.
const MAX_BYTES: u64 = 64 << 10;

/// The image of an upper.
#[derive(Debug, Clone, Copy)]
pub struct ImageName<'a> {
    pub identity: [u8; 32],
    /// Its name in messages.
    pub name: &'a str,
}

/// The content of `instance.json` of an upper of the FUSE driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceRecord {
    /// The schema: [`SCHEMA`].
    pub schema: String,
    /// The identity of the image, as 64 hexadecimal digits.
    pub image: String,
    /// The name of the image when the upper was created.
    pub image_name: String,
    /// The namespace of the marks.
    pub namespace: Namespace,
    /// The place of owners.
    pub ownership: Ownership,
    /// The form of the partial files; `None` in an upper of a development version that also made
    /// packed ones.
    #[serde(default, rename = "sketches", skip_serializing_if = "Option::is_none")]
    pub partials: Option<PartialForm>,
    /// The name of the snapshot; `None` in any other upper.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// The program that created the upper.
    pub created_by: String,
}

/// The form of the partial files of an upper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PartialForm {
    /// Each block at its own offset.
    Sparse,
}

/// The content of `instance.json` of an upper of the kernel driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskRecord {
    /// The schema: [`DISK_SCHEMA`].
    pub schema: String,
    /// The driver: [`Driver::Kernel`].
    #[serde(rename = "door")]
    pub driver: Driver,
    /// The file system on the disk.
    pub fs: FileSystem,
    /// Size of the file system in bytes.
    pub size: u64,
    /// The identity of the image, as 64 hexadecimal digits.
    pub image: String,
    /// The name of the image when the upper was created.
    pub image_name: String,
    /// The program that created the upper.
    pub created_by: String,
}

/// The file system on the disk of an upper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FileSystem {
    /// ext4.
    Ext4,
}

/// What the directory [`META`] says of its upper.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Recorded {
    Nothing,
    /// No record, but a disk: a mount with the kernel driver did not begin the upper completely.
    DiskOnly,
    /// An upper of the FUSE driver.
    Tree(InstanceRecord),
    /// An upper of the kernel driver.
    Disk(DiskRecord),
}

impl Recorded {
    /// Reads the record in the directory `meta` of the upper at `path`.
    pub fn read(meta: BorrowedFd<'_>, path: &Path) -> Result<Recorded, UpperError> {
        let path = path.join(META).join(FILE);
        let io = |source| UpperError::Io {
            path: path.clone(),
            action: "read it",
            source,
        };
        let damaged = |problem: String| UpperError::Record {
            path: path.clone(),
            problem,
        };
        let file = match open_regular(meta, FILE, OFlags::RDONLY) {
            Ok(file) => file,
            Err(Errno::NOENT) => {
                return match rustix::fs::statat(meta, DISK, AtFlags::SYMLINK_NOFOLLOW) {
                    Ok(_) => Ok(Recorded::DiskOnly),
                    Err(Errno::NOENT) => Ok(Recorded::Nothing),
                    Err(errno) => Err(io(errno)),
                };
            }
            Err(Errno::INVAL) => return Err(damaged("it is not a regular file".into())),
            Err(errno) => return Err(io(errno)),
        };
        let mut text = Vec::new();
        std::fs::File::from(file)
            .take(MAX_BYTES + 1)
            .read_to_end(&mut text)
            .map_err(|error| io(errno_of(&error)))?;
        if text.len() as u64 > MAX_BYTES {
            return Err(damaged(format!("it is longer than {MAX_BYTES} bytes")));
        }
        // The schema is checked first, because a newer schema may have other fields.
        let value: serde_json::Value =
            serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
        let failed = |error: serde_json::Error| damaged(error.to_string());
        let recorded = match value.get("schema").and_then(|schema| schema.as_str()) {
            Some(SCHEMA) => Recorded::Tree(serde_json::from_value(value).map_err(failed)?),
            Some(DISK_SCHEMA) => Recorded::Disk(serde_json::from_value(value).map_err(failed)?),
            Some(schema) => {
                return Err(UpperError::UnknownSchema {
                    schema: schema.into(),
                    path,
                });
            }
            None => return Err(damaged("it names no schema".into())),
        };
        let (identity, driver) = match &recorded {
            Recorded::Tree(record) => (record.identity(), None),
            Recorded::Disk(record) => (record.identity(), Some(record.driver)),
            Recorded::Nothing | Recorded::DiskOnly => (None, None),
        };
        match (identity, driver) {
            (None, _) => Err(damaged("its image is not an identity".into())),
            (Some(_), Some(Driver::Fuse)) => Err(damaged("its driver has another schema".into())),
            (Some(_), _) => Ok(recorded),
        }
    }

    /// The driver that the upper belongs to, if it belongs to one.
    pub fn driver(&self) -> Option<Driver> {
        match self {
            Recorded::Nothing => None,
            Recorded::Tree(_) => Some(Driver::Fuse),
            Recorded::DiskOnly | Recorded::Disk(_) => Some(Driver::Kernel),
        }
    }
}

impl InstanceRecord {
    /// The identity as bytes; `None` if the text is not a valid identity, which a read rejects.
    pub fn identity(&self) -> Option<[u8; 32]> {
        from_hex(&self.image)
    }

    /// Fails for a snapshot, which never changes.
    pub(super) fn refuse_snapshot(&self, path: &Path) -> Result<(), UpperError> {
        match &self.snapshot {
            Some(_) => Err(UpperError::Snapshot(path.to_owned())),
            None => Ok(()),
        }
    }

    /// Reads the record in the directory `meta` of the upper at `path`; `None` if it is missing.
    /// Fails for an upper of another driver.
    pub(super) fn read(
        meta: BorrowedFd<'_>,
        path: &Path,
    ) -> Result<Option<InstanceRecord>, UpperError> {
        match Recorded::read(meta, path)? {
            Recorded::Nothing => Ok(None),
            Recorded::Tree(record) => Ok(Some(record)),
            Recorded::DiskOnly | Recorded::Disk(_) => Err(UpperError::OtherDriver {
                path: path.to_owned(),
                driver: Driver::Kernel,
            }),
        }
    }
}

impl DiskRecord {
    /// The identity as bytes; `None` if the text is not a valid identity, which a read rejects.
    pub fn identity(&self) -> Option<[u8; 32]> {
        from_hex(&self.image)
    }
}

/// Fails unless the image of the upper at `path`, which has this identity and name, is `image`.
pub(super) fn require_image(
    path: &Path,
    identity: Option<[u8; 32]>,
    name: &str,
    image: ImageName<'_>,
) -> Result<(), UpperError> {
    if identity == Some(image.identity) {
        return Ok(());
    }
    Err(UpperError::AnotherImage {
        path: path.to_owned(),
        belongs: Box::new((identity.unwrap_or_default(), name.to_owned())),
        image: Box::new((image.identity, image.name.to_owned())),
    })
}

/// Writes a record atomically and makes it durable.
pub(super) fn write(
    record: &impl Serialize,
    meta: BorrowedFd<'_>,
    path: &Path,
) -> Result<(), UpperError> {
    let io = |source| UpperError::Io {
        path: path.join(META).join(FILE),
        action: "write it",
        source,
    };
    let mut text = serde_json::to_vec(record).map_err(|_| io(Errno::INVAL))?;
    text.push(b'\n');
    // A temporary file of an earlier attempt, or a foreign object. It is removed before the open,
    // because the open of a pipe would block.
    work::unlink(meta, NEW_FILE.as_bytes()).map_err(io)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(meta, NEW_FILE, flags, Mode::from_raw_mode(0o600));
    let file = std::fs::File::from(file.map_err(io)?);
    let written = std::io::Write::write_all(&mut &file, &text).and_then(|()| file.sync_all());
    let moved = written
        .map_err(|error| errno_of(&error))
        .and_then(|()| rustix::fs::renameat(meta, NEW_FILE, meta, FILE))
        .and_then(|()| rustix::fs::fsync(meta));
    if moved.is_err() {
        let _ = work::unlink(meta, NEW_FILE.as_bytes());
    }
    moved.map_err(io)
}
