//! `instance.json`: the image that an upper belongs to, and how the upper stores marks and owners.

use std::io::Read;
use std::os::fd::BorrowedFd;
use std::path::Path;

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::beneath::open_regular;
use super::{META, Namespace, Ownership, UpperError};

/// The schema that this version writes and reads.
pub const SCHEMA: &str = "bcow.instance/1";
/// The name of the file in [`META`], and of the temporary file that replaces it.
const FILE: &str = "instance.json";
const NEW_FILE: &str = "instance.json.new";
/// The longest record that is read, in bytes.
const MOST_BYTES: u64 = 64 << 10;

/// The content of `instance.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
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
    /// The program that created the upper.
    pub created_by: String,
}

impl Record {
    /// The identity as bytes; `None` if the text is not a valid identity. [`Record::read`] rejects
    /// such a text.
    pub fn identity(&self) -> Option<[u8; 32]> {
        let digits = self.image.as_bytes();
        if digits.len() != 64 || !digits.iter().all(u8::is_ascii_hexdigit) {
            return None;
        }
        let mut identity = [0; 32];
        for (index, byte) in identity.iter_mut().enumerate() {
            let pair = self.image.get(2 * index..2 * index + 2)?;
            *byte = u8::from_str_radix(pair, 16).ok()?;
        }
        Some(identity)
    }

    /// Reads the record in the directory `meta` of the upper at `path`; `None` if it is missing.
    pub(super) fn read(meta: BorrowedFd<'_>, path: &Path) -> Result<Option<Record>, UpperError> {
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
            Err(Errno::NOENT) => return Ok(None),
            Err(Errno::INVAL) => return Err(damaged("it is not a regular file".into())),
            Err(errno) => return Err(io(errno)),
        };
        let mut text = Vec::new();
        std::fs::File::from(file)
            .take(MOST_BYTES + 1)
            .read_to_end(&mut text)
            .map_err(|error| io(Errno::from_io_error(&error).unwrap_or(Errno::IO)))?;
        if text.len() as u64 > MOST_BYTES {
            return Err(damaged(format!("it is longer than {MOST_BYTES} bytes")));
        }
        // The schema is checked first, because a newer schema may have other fields.
        let value: serde_json::Value =
            serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
        match value.get("schema").and_then(|schema| schema.as_str()) {
            Some(SCHEMA) => {}
            Some(schema) => {
                return Err(UpperError::UnknownSchema {
                    schema: schema.into(),
                    path,
                });
            }
            None => return Err(damaged("it names no schema".into())),
        }
        let record: Record =
            serde_json::from_value(value).map_err(|error| damaged(error.to_string()))?;
        if record.identity().is_none() {
            return Err(damaged("its image is not an identity".into()));
        }
        Ok(Some(record))
    }

    /// Writes the record atomically and makes it durable.
    pub(super) fn write(&self, meta: BorrowedFd<'_>, path: &Path) -> Result<(), UpperError> {
        let io = |source| UpperError::Io {
            path: path.join(META).join(FILE),
            action: "write it",
            source,
        };
        let mut text = serde_json::to_vec(self).map_err(|_| io(Errno::INVAL))?;
        text.push(b'\n');
        // A temporary file of an earlier attempt, or a foreign object. It is removed before the
        // open, because the open of a pipe would block.
        match rustix::fs::unlinkat(meta, NEW_FILE, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(io(errno)),
        }
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(meta, NEW_FILE, flags, Mode::from_raw_mode(0o600));
        let file = std::fs::File::from(file.map_err(io)?);
        let written = std::io::Write::write_all(&mut &file, &text).and_then(|()| file.sync_all());
        let moved = written
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
            .and_then(|()| rustix::fs::renameat(meta, NEW_FILE, meta, FILE))
            .and_then(|()| rustix::fs::fsync(meta));
        if moved.is_err() {
            let _ = rustix::fs::unlinkat(meta, NEW_FILE, AtFlags::empty());
        }
        moved.map_err(io)
    }
}
