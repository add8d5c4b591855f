//! What a process of a pool needs to take over a mount, beside the connection to the kernel: a
//! sealed memory file, which the supervisor holds and does not read.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use bcow_fuse::kernel::{DiskHandover, LoopMount};
use bcow_images::error::CommandError;
use bcow_images::running::Service;
use bcow_mount::HiddenName;
use bcow_mounts::MountArgs;
use bcow_union::HeldUpper;
use rustix::fs::{MemfdFlags, SealFlags};
use serde::{Deserialize, Serialize};

use crate::asked::{Asked, Bytes};
use crate::protocol::MAX_REQUEST_BYTES;

/// The version of the record of a mount with the FUSE driver. A process refuses later ones.
const VERSION: u64 = 1;
/// The version of the record of a mount with the kernel driver.
const DISK_VERSION: u64 = 3;
/// The version of the record of a mount that shares files.
const SHARED_VERSION: u64 = 4;
/// The version of the record of a mount that also shares files of its layers.
const LAYERS_VERSION: u64 = 5;
/// Most bytes of a record: it has the request of the client, and paths.
const MAX_BYTES: u64 = 2 * MAX_REQUEST_BYTES as u64;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountRecord {
    version: u64,
    #[serde(flatten)]
    pub asked: Asked,
    /// The canonical mountpoint.
    pub target: Bytes,
    /// The flags of the FUSE protocol that are in use.
    pub agreed: u64,
    /// The identity of the image, in hexadecimal digits: the numbers of inodes that the kernel has
    /// are valid for this image only.
    pub identity: String,
    /// The entry for `bcow ps`.
    pub service: Service,
    /// The slot of the image, if the mount shares files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    slot: Option<u32>,
    /// The slots of the layers, the lowest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    layer_slots: Vec<u32>,
    /// Only for a mount with the kernel driver.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<DiskRecord>,
}

/// The part of a [`MountRecord`] that only a mount with the kernel driver has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskRecord {
    /// The loop device of the mount.
    loop_device: Bytes,
    /// The name of the file behind it.
    file: String,
    /// Whether it is a disk; an image never changes.
    pub is_writable: bool,
}

impl MountRecord {
    /// The record of a mount that was asked for in this way.
    pub fn new(
        asked: Asked,
        target: OsString,
        agreed: u64,
        identity: String,
        service: Service,
    ) -> Self {
        MountRecord {
            version: VERSION,
            asked,
            target: (&*target).into(),
            agreed,
            identity,
            service,
            slot: None,
            layer_slots: Vec::new(),
            disk: None,
        }
    }

    /// The record of the same mount, with the slots of its image and layers.
    pub fn with_slots(self, slots: &[u32]) -> Self {
        let version = match slots {
            [] => self.version,
            [_] => SHARED_VERSION,
            [_, _, ..] => LAYERS_VERSION,
        };
        MountRecord {
            version,
            slot: slots.first().copied(),
            layer_slots: slots.iter().skip(1).copied().collect(),
            ..self
        }
    }

    /// The slots of the image and of its layers; none if the mount shares no files.
    pub fn slots(&self) -> Vec<u32> {
        self.slot.iter().chain(&self.layer_slots).copied().collect()
    }

    /// The record of the same mount, if it is with the kernel driver.
    pub fn with_kernel_driver(self, handover: &DiskHandover) -> Self {
        let place = &handover.place;
        MountRecord {
            version: DISK_VERSION,
            agreed: handover.agreed,
            disk: Some(DiskRecord {
                loop_device: place.loop_device.as_os_str().into(),
                file: place.name.to_string(),
                is_writable: handover.disk.is_some(),
            }),
            ..self
        }
    }

    /// The options of the mount. The upper is where it is now.
    pub fn args(&self, upper: Option<&HeldUpper>) -> Result<MountArgs, CommandError> {
        let mut args = self.asked.args()?;
        if let Some(path) = upper.and_then(HeldUpper::path) {
            args.set_upper(path);
        }
        Ok(args)
    }

    /// The entry for `bcow ps`. The upper is where it is now.
    pub fn service(&self, upper: Option<&HeldUpper>) -> Service {
        let mut service = self.service.clone();
        if let Some(path) = upper.and_then(HeldUpper::path) {
            service.upper = Some(path.to_string_lossy().into_owned());
        }
        service
    }

    /// The mountpoint, the loop device and the hidden file of a mount with the kernel driver.
    pub fn place(&self, disk: &DiskRecord) -> io::Result<LoopMount> {
        let name = HiddenName::parse(&format!("/{}", disk.file));
        Ok(LoopMount {
            target: PathBuf::from(OsString::from(self.target.clone())),
            device: self.service.device.clone(),
            loop_device: PathBuf::from(OsString::from(disk.loop_device.clone())),
            name: name.ok_or(io::ErrorKind::InvalidData)?,
        })
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
    pub fn load(file: &OwnedFd) -> io::Result<Self> {
        let file = File::from(file.try_clone()?);
        let bytes = file.metadata()?.len();
        if bytes > MAX_BYTES {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let mut json = vec![0; bytes as usize];
        // The processes share the position in the file.
        file.read_exact_at(&mut json, 0)?;
        let record: MountRecord = serde_json::from_slice(&json)?;
        match record.version {
            VERSION | DISK_VERSION | SHARED_VERSION | LAYERS_VERSION => Ok(record),
            other => Err(io::Error::other(format!(
                "the record has version {other}, and this program reads versions up to \
                 {LAYERS_VERSION}"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use bcow_fuse::kernel::DiskFiles;

    use super::*;

    fn record() -> MountRecord {
        let asked = Asked {
            arguments: vec![Bytes::Text("bcow".to_owned()), Bytes::Other(vec![0xff])],
            directory: Bytes::Text("/".to_owned()),
        };
        let service = Service {
            kind: "mount".to_owned(),
            image: "/a.bcow".to_owned(),
            at: vec!["/mnt".to_owned()],
            mode: "ro".to_owned(),
            since: 7,
            pool: Some("pool".to_owned()),
            ..Service::default()
        };
        MountRecord::new(asked, "/mnt".into(), 1 << 40, "00ff".to_owned(), service)
    }

    #[test]
    fn records_come_back_as_often_as_needed() {
        let file = record().store().unwrap();
        for _ in 0..2 {
            assert_eq!(MountRecord::load(&file).unwrap(), record());
        }
        File::from(file).write_all(b"x").unwrap_err();
    }

    #[test]
    fn the_record_of_a_mount_that_shares_files_has_its_slot() {
        // A program that does not know such records must not serve the mount.
        for (slots, version) in [(&[7][..], 4), (&[7, 1, 2], 5)] {
            let stored = record().with_slots(slots).store().unwrap();
            let loaded = MountRecord::load(&stored).unwrap();
            assert_eq!((loaded.version, &*loaded.slots()), (version, slots));
        }
        assert_eq!(record().with_slots(&[]), record());
    }

    #[test]
    fn the_record_of_a_disk_has_its_place() {
        let place = LoopMount {
            target: "/mnt".into(),
            device: None,
            loop_device: "/dev/loop7".into(),
            name: HiddenName {
                pid: 3,
                disk: "a.bcow".to_owned(),
            },
        };
        let descriptor = || File::open("/dev/null").unwrap().into();
        let handover = DiskHandover {
            connection: descriptor(),
            hidden: descriptor(),
            place: place.clone(),
            agreed: 1 << 15,
            disk: Some(DiskFiles {
                file: descriptor(),
                ledger: descriptor(),
            }),
            upper: None,
            outcome: None,
        };
        let stored = record().with_kernel_driver(&handover).store().unwrap();
        let loaded = MountRecord::load(&stored).unwrap();
        // A program that does not know such records must not serve the mount with the other driver.
        assert_eq!(loaded.version, 3);
        assert_eq!(loaded.agreed, 1 << 15);
        let disk = loaded.disk.as_ref().unwrap();
        assert!(disk.is_writable);
        assert_eq!(loaded.place(disk).unwrap(), place);
        let damaged = DiskRecord {
            file: "another".to_owned(),
            ..disk.clone()
        };
        loaded.place(&damaged).unwrap_err();
    }

    #[test]
    fn records_of_later_versions_are_refused() {
        let later = MountRecord {
            version: 6,
            ..record()
        };
        let error = MountRecord::load(&later.store().unwrap()).unwrap_err();
        assert!(error.to_string().contains("version 6"), "{error}");
    }
}
