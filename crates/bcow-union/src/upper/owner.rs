//! Owner, mode and type of a file if the host cannot store them: the attribute
//! `user.containers.override_stat`, in the format of containers-storage and fuse-overlayfs.
//!
//! The value is `UID:GID:MODE:TYPE`. The mode is octal. The type is `file`, `dir`, `symlink`,
//! `pipe`, `socket`, `block-MAJOR-MINOR`, or `char-MAJOR-MINOR`. Symbolic links cannot have the
//! attribute.

use bcow_erofs::reader::FileType;
use bcow_erofs::tree::DeviceNumber;
use rustix::fs::Stat;

use super::MarkError;
use crate::host::kind_of;

/// The name of the attribute.
pub const OVERRIDE: &[u8] = NAME.as_bytes();
const NAME: &str = "user.containers.override_stat";

/// The owner, mode and type that the container sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Override {
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Permission bits with set-id and sticky bits (`0o7777`).
    pub permissions: u16,
    /// Type; `None` if the attribute has none, as from older writers. The host file's type is used
    /// then.
    pub kind: Option<FileType>,
    /// The number of a device; `None` is 0:0.
    pub device: Option<DeviceNumber>,
}

/// The types, with their names in the attribute.
const KINDS: [(FileType, &str); 7] = [
    (FileType::Regular, "file"),
    (FileType::Directory, "dir"),
    (FileType::Symlink, "symlink"),
    (FileType::Fifo, "pipe"),
    (FileType::Socket, "socket"),
    (FileType::BlockDevice, "block"),
    (FileType::CharDevice, "char"),
];

fn is_device(kind: FileType) -> bool {
    matches!(kind, FileType::BlockDevice | FileType::CharDevice)
}

impl Override {
    /// The type that the container sees for a host file with this attribute. Fails if the host file
    /// cannot represent the type.
    pub(crate) fn kind_over(&self, stat: &Stat) -> Result<FileType, MarkError> {
        let host = kind_of(stat.st_mode);
        let suits = match self.kind {
            Some(kind @ (FileType::Directory | FileType::Symlink)) => host == kind,
            // A type that the host, or this user, cannot create is represented by an empty regular
            // file.
            Some(_) => host == FileType::Regular,
            None => true,
        };
        if suits {
            Ok(self.kind.unwrap_or(host))
        } else {
            Err(MarkError::new(NAME, self.encode().as_bytes()))
        }
    }

    /// The attribute's value.
    pub fn encode(&self) -> String {
        let mode = self.permissions & 0o7777;
        let mut text = format!("{}:{}:{mode:04o}", self.uid, self.gid);
        let named = KINDS.into_iter().find(|(kind, _)| self.kind == Some(*kind));
        if let Some((kind, name)) = named {
            text += ":";
            text += name;
            if is_device(kind) {
                let DeviceNumber { major, minor } = self.device.unwrap_or_default();
                text += &format!("-{major}-{minor}");
            }
        }
        text
    }

    /// Decodes a value. Type bits in the mode and a missing type are accepted.
    pub fn decode(value: &[u8]) -> Result<Override, MarkError> {
        let bad = || MarkError::new(NAME, value);
        let text = std::str::from_utf8(value).map_err(|_| bad())?;
        // Some writers include a trailing NUL.
        let mut parts = text.trim_end_matches('\0').splitn(4, ':');
        let mut next = || parts.next().ok_or_else(bad);
        let (uid, gid, mode) = (next()?, next()?, next()?);
        let kind = parts.next();
        let number = |text: &str| {
            if text.bytes().all(|byte| byte.is_ascii_digit()) {
                text.parse::<u32>().map_err(|_| bad())
            } else {
                Err(bad())
            }
        };
        let octal = mode.bytes().all(|byte| matches!(byte, b'0'..=b'7'));
        let mode = if octal {
            u32::from_str_radix(mode, 8).map_err(|_| bad())?
        } else {
            return Err(bad());
        };
        let (mut known, mut device) = (None, None);
        if let Some(kind) = kind.filter(|kind| !kind.is_empty()) {
            let mut words = kind.splitn(3, '-');
            let name = words.next();
            let found = KINDS.into_iter().find(|(_, known)| name == Some(*known));
            let (kind, _) = found.ok_or_else(bad)?;
            if is_device(kind) {
                let mut next = || number(words.next().ok_or_else(bad)?);
                let (major, minor) = (next()?, next()?);
                device = Some(DeviceNumber { major, minor });
            } else if words.next().is_some() {
                return Err(bad());
            }
            known = Some(kind);
        }
        Ok(Override {
            uid: number(uid)?,
            gid: number(gid)?,
            permissions: (mode & 0o7777) as u16,
            kind: known,
            device,
        })
    }
}

/// The mode of a host file that has an [`Override`]: its owner on the host can always read and
/// write it, and search it if it is a directory. Set-id bits are cleared, because they would apply
/// to the user on the host, not to the container's owner.
pub fn host_mode(permissions: u16, is_directory: bool) -> u32 {
    let least = if is_directory { 0o700 } else { 0o600 };
    u32::from(permissions) & 0o777 | least
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_comes_back() {
        let number = |major, minor| Some(DeviceNumber { major, minor });
        let kinds = [
            (None, None, "0:65534:4755"),
            (Some(FileType::Regular), None, "0:65534:4755:file"),
            (Some(FileType::Directory), None, "0:65534:4755:dir"),
            (Some(FileType::Symlink), None, "0:65534:4755:symlink"),
            (Some(FileType::Fifo), None, "0:65534:4755:pipe"),
            (Some(FileType::Socket), None, "0:65534:4755:socket"),
            (
                Some(FileType::BlockDevice),
                number(8, 1),
                "0:65534:4755:block-8-1",
            ),
            (
                Some(FileType::CharDevice),
                number(1, 3),
                "0:65534:4755:char-1-3",
            ),
        ];
        for (kind, device, text) in kinds {
            let owner = Override {
                uid: 0,
                gid: 65534,
                permissions: 0o4755,
                kind,
                device,
            };
            assert_eq!(owner.encode(), text);
            assert_eq!(Override::decode(text.as_bytes()).unwrap(), owner);
        }
    }

    #[test]
    fn values_of_other_writers_are_decoded() {
        let read = |text: &str| Override::decode(text.as_bytes()).unwrap();
        assert_eq!(read("1000:100:755").permissions, 0o755);
        assert_eq!(read("1000:100:100644").permissions, 0o644);
        assert_eq!(read("1:2:0600:file\0").kind, Some(FileType::Regular));
        assert_eq!(read("1:2:0040755:dir").permissions, 0o755);
    }

    #[test]
    fn nonsense_is_refused() {
        let texts: [&[u8]; 15] = [
            b"",
            b"1",
            b"1:2",
            b"1:2:",
            b":2:644",
            b"1:2:8",
            b"1:2:+7",
            b"-1:2:644",
            b"1:2:644:door",
            b"1:2:644:char",
            b"1:2:644:char-1",
            b"1:2:644:char-1-x",
            b"1:2:644:file-1-2",
            b"4294967296:2:644",
            b"1:2:\xff",
        ];
        for text in texts {
            let read = Override::decode(text);
            // An empty mode is no mode.
            assert!(
                read.is_err(),
                "{:?} is {read:?}",
                String::from_utf8_lossy(text)
            );
        }
    }
}
