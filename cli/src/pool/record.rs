//! What a process of a pool needs to take over a mount, beside the connection to the kernel: a
//! sealed memory file, which the keeper holds and does not read.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, SealFlags};
use serde::{Deserialize, Serialize};

use super::protocol::{Bytes, MAX_REQUEST_BYTES};
use crate::running::Service;

/// The version of the record. A process refuses later ones.
const VERSION: u64 = 1;
/// Most bytes of a record: it has the request of the client, and paths.
const MAX_BYTES: u64 = 2 * MAX_REQUEST_BYTES as u64;

/// The record of a mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    version: u64,
    /// The command line of `bcow mount`, from the name of the program on.
    pub arguments: Vec<Bytes>,
    /// The directory to which its paths are relative.
    pub directory: Bytes,
    /// The canonical mountpoint.
    pub target: Bytes,
    /// The flags of the FUSE protocol that are in use.
    pub agreed: u64,
    /// The identity of the image, in hexadecimal digits: the numbers of inodes that the kernel has
    /// are valid for this image only.
    pub identity: String,
    /// The entry for `bcow ps`.
    pub service: Service,
}

/// The part of a [`Record`] that the request for the mount has.
#[derive(Debug, Clone)]
pub struct Asked {
    /// As [`Record::arguments`].
    pub arguments: Vec<Bytes>,
    /// As [`Record::directory`].
    pub directory: Bytes,
}

impl Record {
    /// The record of a mount that was asked for in this way.
    pub fn new(
        asked: Asked,
        target: OsString,
        agreed: u64,
        identity: String,
        service: Service,
    ) -> Self {
        Record {
            version: VERSION,
            arguments: asked.arguments,
            directory: asked.directory,
            target: (&*target).into(),
            agreed,
            identity,
            service,
        }
    }

    /// Writes the record to a memory file that cannot change.
    pub fn store(&self) -> io::Result<OwnedFd> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let mut file = File::from(rustix::fs::memfd_create("bcow-kept-mount", flags)?);
        let json = serde_json::to_vec(self)?;
        if json.len() as u64 > MAX_BYTES {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        file.write_all(&json)?;
        let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(file.as_fd(), seals)?;
        Ok(file.into())
    }

    /// Reads a record that this process, or one before it, stored.
    pub fn load(file: OwnedFd) -> io::Result<Self> {
        let file = File::from(file);
        let bytes = file.metadata()?.len();
        if bytes > MAX_BYTES {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let mut json = vec![0; bytes as usize];
        // The processes share the position in the file.
        file.read_exact_at(&mut json, 0)?;
        let record: Record = serde_json::from_slice(&json)?;
        match record.version {
            VERSION => Ok(record),
            other => Err(io::Error::other(format!(
                "the record has version {other}, and this program has version {VERSION}"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        let asked = Asked {
            arguments: vec![Bytes::Text("bcow".to_owned()), Bytes::Other(vec![0xff])],
            directory: Bytes::Text("/".to_owned()),
        };
        let service = Service {
            kind: "mount".to_owned(),
            image: "/a.bcow".to_owned(),
            layers: Vec::new(),
            export: None,
            upper: None,
            at: vec!["/mnt".to_owned()],
            mode: "ro".to_owned(),
            since: 7,
            device: None,
            descriptor: None,
            pool: Some("pool".to_owned()),
        };
        Record::new(asked, "/mnt".into(), 1 << 40, "00ff".to_owned(), service)
    }

    #[test]
    fn records_come_back_as_often_as_needed() {
        let file = record().store().unwrap();
        for _ in 0..2 {
            assert_eq!(Record::load(file.try_clone().unwrap()).unwrap(), record());
        }
        File::from(file).write_all(b"x").unwrap_err();
    }

    #[test]
    fn records_of_later_versions_are_refused() {
        let later = Record {
            version: 2,
            ..record()
        };
        let error = Record::load(later.store().unwrap()).unwrap_err();
        assert!(error.to_string().contains("version 2"), "{error}");
    }
}
