//! File systems of the kernel: which one a device holds, and its mount.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, fsconfig_create, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen, move_mount,
};

use crate::Error;

/// Bytes at the start of a device in which [`detect`] looks.
pub const HEAD_BYTES: usize = 68 << 10;
/// Most bytes of one message of the kernel, and most messages.
const MESSAGE_BYTES: usize = 1024;
const MAX_MESSAGES: usize = 8;

/// A file system that can be mounted with the kernel driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// ext4, or an ext2 or ext3, which the same driver mounts.
    Ext4,
    Xfs,
    Btrfs,
    /// EROFS, read-only.
    Erofs,
}

impl Kind {
    pub const ALL: [Kind; 4] = [Kind::Ext4, Kind::Xfs, Kind::Btrfs, Kind::Erofs];

    /// The kernel's name of it.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Ext4 => "ext4",
            Kind::Xfs => "xfs",
            Kind::Btrfs => "btrfs",
            Kind::Erofs => "erofs",
        }
    }
}

/// Finds the file system of a device by the magic number in the first [`HEAD_BYTES`] of it, or in
/// fewer bytes if the device is smaller.
pub fn detect(head: &[u8]) -> Result<Kind, Error> {
    let bytes = |at: usize, count: usize| head.get(at..at + count);
    for (at, magic, kind) in [
        (0x438, &[0x53, 0xef][..], Kind::Ext4),
        (0, b"XFSB", Kind::Xfs),
        (0x10040, b"_BHRfS_M", Kind::Btrfs),
        (0x400, &[0xe2, 0xe1, 0xf5, 0xe0], Kind::Erofs),
    ] {
        if bytes(at, magic.len()) == Some(magic) {
            return Ok(kind);
        }
    }
    Err(Error::NoFileSystem {
        found: match bytes(510, 2) {
            Some([0x55, 0xaa]) => "a partition table or a boot sector",
            _ if head.iter().all(|&byte| byte == 0) => "only zeros at its start",
            _ => "an unknown file system, or none",
        },
    })
}

/// The size that the superblock of an ext4 says, in bytes, from the first [`HEAD_BYTES`] of its
/// device. The journal may have a later one.
pub fn ext4_bytes(head: &[u8]) -> u64 {
    let number = |at: usize| match head.get(at..at + 4) {
        Some(b) => u64::from(u32::from_le_bytes([b[0], b[1], b[2], b[3]])),
        None => 0,
    };
    const BITS_64: u64 = 0x80;
    let high = match number(0x460) & BITS_64 {
        0 => 0,
        _ => number(0x550),
    };
    let blocks = high << 32 | number(0x404);
    blocks.saturating_mul(1024 << number(0x418).min(6))
}

/// When a program's access updates a file's access time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessTimes {
    /// Never.
    Off,
    /// At the first access after a change, and once a day.
    Relative,
    /// As `Relative`, but not for directories.
    RelativeForFiles,
}

/// Settings of a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// No program can write.
    pub read_only: bool,
    /// Set-user-ID programs have no effect.
    pub nosuid: bool,
    /// Devices do not work.
    pub nodev: bool,
    /// Programs cannot be executed.
    pub noexec: bool,
    /// Updates of access times.
    pub access_times: AccessTimes,
    /// Each write is durable before it returns.
    pub sync: bool,
    /// Freed blocks are discarded at once.
    pub discard: bool,
    /// Seconds between commits of the journal; only ext4 and Btrfs have that setting.
    pub commit_seconds: Option<u32>,
    /// The file system flushes the device where its journal needs that.
    pub barriers: bool,
}

/// What holds a file system.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MountSource<'a> {
    /// A block device, or a file with an EROFS.
    pub(crate) source: &'a Path,
    /// Further devices of an EROFS.
    pub(crate) devices: &'a [PathBuf],
    /// Whether the kernel bypasses the page cache of a file, if it can.
    pub(crate) direct_io: bool,
}

/// Mounts the file system of `device`, the path of a block device, on the directory `target`.
pub fn mount(device: &Path, kind: Kind, target: &Path, settings: Settings) -> Result<(), Error> {
    let source = MountSource {
        source: device,
        devices: &[],
        direct_io: false,
    };
    mount_source(source, kind, target, settings)
}

/// Fails if this process may not mount a file system of this kind, because it lacks the privilege.
/// A later [`mount`] can still fail.
pub fn require_privilege(kind: Kind) -> Result<(), Error> {
    /// A path that never leads to a device.
    const NO_DEVICE: &str = "/dev/null/none";
    // The kernel checks the privilege of a mount before its source.
    let tried = fsopen(kind.name(), FsOpenFlags::FSOPEN_CLOEXEC).and_then(|configuration| {
        fsconfig_set_string(&configuration, "source", NO_DEVICE)?;
        fsconfig_create(&configuration)
    });
    match tried {
        Err(Errno::PERM) => Err(Error::NotPermitted { kind: kind.name() }),
        _ => Ok(()),
    }
}

pub(crate) fn mount_source(
    source: MountSource<'_>,
    kind: Kind,
    target: &Path,
    settings: Settings,
) -> Result<(), Error> {
    let directory_flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let failed_with = |errno: Errno, log| Error::Mount {
        kind: kind.name(),
        target: target.to_owned(),
        log,
        source: errno.into(),
    };
    let failed = |errno| failed_with(errno, Vec::new());
    let directory = rustix::fs::open(target, directory_flags, Mode::empty()).map_err(failed)?;
    let configuration = fsopen(kind.name(), FsOpenFlags::FSOPEN_CLOEXEC).map_err(failed)?;
    let (cloexec, attributes) = (FsMountFlags::FSMOUNT_CLOEXEC, attributes(settings));
    let mount = configure(&configuration, source, kind, settings)
        .and_then(|()| fsmount(&configuration, cloexec, attributes))
        .map_err(|errno| failed_with(errno, messages(&configuration)))?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(&mount, "", &directory, "", flags).map_err(failed)
}

fn configure(
    configuration: &OwnedFd,
    source: MountSource<'_>,
    kind: Kind,
    settings: Settings,
) -> rustix::io::Result<()> {
    fsconfig_set_string(configuration, "source", source.source)?;
    for device in source.devices {
        fsconfig_set_string(configuration, "device", device)?;
    }
    if source.direct_io {
        match fsconfig_set_flag(configuration, "directio") {
            // Linux before 6.15 does not know it.
            Ok(()) | Err(Errno::INVAL) => {}
            Err(errno) => return Err(errno),
        }
    }
    let mut flags = Vec::new();
    if settings.read_only {
        flags.push("ro");
    }
    if settings.sync {
        flags.push("sync");
    }
    if settings.discard && kind != Kind::Erofs {
        flags.push("discard");
    }
    match kind {
        Kind::Ext4 => {
            // The default of an ext4 without this setting in its superblock is to continue.
            fsconfig_set_string(configuration, "errors", "remount-ro")?;
            if !settings.barriers {
                flags.push("nobarrier");
            }
        }
        Kind::Btrfs if !settings.barriers => flags.push("nobarrier"),
        // Disks over one backing, and copies of a disk, have the same UUID.
        Kind::Xfs => flags.push("nouuid"),
        _ => {}
    }
    if let Some(seconds) = settings.commit_seconds {
        fsconfig_set_string(configuration, "commit", seconds.to_string())?;
    }
    for flag in flags {
        fsconfig_set_flag(configuration, flag)?;
    }
    fsconfig_create(configuration)
}

fn attributes(settings: Settings) -> MountAttrFlags {
    let mut attributes = match settings.access_times {
        AccessTimes::Off => MountAttrFlags::MOUNT_ATTR_NOATIME,
        AccessTimes::Relative => MountAttrFlags::MOUNT_ATTR_RELATIME,
        AccessTimes::RelativeForFiles => MountAttrFlags::MOUNT_ATTR_NODIRATIME,
    };
    attributes.set(MountAttrFlags::MOUNT_ATTR_RDONLY, settings.read_only);
    attributes.set(MountAttrFlags::MOUNT_ATTR_NOSUID, settings.nosuid);
    attributes.set(MountAttrFlags::MOUNT_ATTR_NODEV, settings.nodev);
    attributes.set(MountAttrFlags::MOUNT_ATTR_NOEXEC, settings.noexec);
    attributes
}

/// The messages that the kernel keeps with a configuration: `e ext4: text`, one for each read.
fn messages(configuration: impl AsFd) -> Vec<String> {
    let mut messages = Vec::new();
    let mut buf = [0; MESSAGE_BYTES];
    while messages.len() < MAX_MESSAGES {
        match rustix::io::read(configuration.as_fd(), &mut buf) {
            Ok(read) if read > 0 => {
                let text = String::from_utf8_lossy(&buf[..read]);
                let text = text.trim_end();
                let is_marked = text.as_bytes().get(1) == Some(&b' ');
                messages.push(if is_marked { &text[2..] } else { text }.to_owned());
            }
            _ => break,
        }
    }
    messages
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(parts: &[(usize, &[u8])]) -> Vec<u8> {
        let mut head = vec![0; HEAD_BYTES];
        for (at, bytes) in parts {
            head[*at..at + bytes.len()].copy_from_slice(bytes);
        }
        head
    }

    #[test]
    fn file_systems_are_known_by_their_magic_numbers() {
        for (at, magic, kind) in [
            (0x438, &[0x53_u8, 0xef][..], Kind::Ext4),
            (0, b"XFSB", Kind::Xfs),
            (0x10040, b"_BHRfS_M", Kind::Btrfs),
            (0x400, &[0xe2, 0xe1, 0xf5, 0xe0], Kind::Erofs),
        ] {
            assert_eq!(detect(&head(&[(at, magic)])).unwrap(), kind);
        }
    }

    #[test]
    fn other_content_is_refused_and_described() {
        for (head, expected) in [
            (head(&[]), "only zeros"),
            (head(&[(510, &[0x55, 0xaa])]), "partition table"),
            (head(&[(0, b"hsqs")]), "unknown"),
            (vec![1; 100], "unknown"),
            (Vec::new(), "zeros"),
        ] {
            let error = detect(&head).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn size_of_an_ext4_is_in_its_superblock() {
        let of = |parts: &[(usize, &[u8])]| ext4_bytes(&head(parts));
        let (small, large) = ([(0x404, &[5][..])], (0x550, &[1][..]));
        assert_eq!(of(&small), 5 << 10);
        assert_eq!(of(&[small[0], (0x418, &[2])]), 5 << 12);
        // Without the feature of 64 bits, the high part has another meaning.
        assert_eq!(of(&[small[0], large]), 5 << 10);
        assert_eq!(
            of(&[small[0], large, (0x460, &[0x80])]),
            ((1 << 32) + 5) << 10
        );
        assert_eq!(ext4_bytes(&[]), 0);
    }
}
