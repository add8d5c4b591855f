//! Owner, mode and type of a file if the host cannot store them: the attribute
//! `user.containers.override_stat`, in the format of containers-storage and fuse-overlayfs.
//!
//! The value is `UID:GID:MODE:TYPE`. The mode is octal. The type is `file`, `dir`, `symlink`,
//! `pipe`, `socket`, `block-MAJOR-MINOR`, or `char-MAJOR-MINOR`. Symbolic links cannot have the
//! attribute.

use rustix::fs::{FileType, Stat};

use super::MarkError;

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
    pub kind: Option<OverrideKind>,
}

/// The type of a file as the container sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OverrideKind {
    /// A regular file.
    File,
    Directory,
    /// A symbolic link.
    Symlink,
    /// A named pipe.
    Pipe,
    Socket,
    /// A block device.
    Block {
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
    /// A character device.
    Char {
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
}

impl OverrideKind {
    /// The file type, without a device number.
    pub(crate) fn file_type(self) -> bcow_erofs::reader::FileType {
        use bcow_erofs::reader::FileType;
        match self {
            OverrideKind::File => FileType::Regular,
            OverrideKind::Directory => FileType::Directory,
            OverrideKind::Symlink => FileType::Symlink,
            OverrideKind::Pipe => FileType::Fifo,
            OverrideKind::Socket => FileType::Socket,
            OverrideKind::Block { .. } => FileType::BlockDevice,
            OverrideKind::Char { .. } => FileType::CharDevice,
        }
    }

    /// Whether a host file of type `host` can represent this type. A type that the host, or this
    /// user, cannot create is represented by an empty regular file.
    fn suits(self, host: FileType) -> bool {
        host == match self {
            OverrideKind::Directory => FileType::Directory,
            OverrideKind::Symlink => FileType::Symlink,
            OverrideKind::File
            | OverrideKind::Pipe
            | OverrideKind::Socket
            | OverrideKind::Block { .. }
            | OverrideKind::Char { .. } => FileType::RegularFile,
        }
    }
}

impl Override {
    /// The type that the container sees for a host file with this attribute; `None` if it is the
    /// host file's type. Fails if the host file cannot represent the type.
    pub(crate) fn kind_over(&self, stat: &Stat) -> Result<Option<OverrideKind>, MarkError> {
        match self.kind {
            Some(kind) if !kind.suits(FileType::from_raw_mode(stat.st_mode)) => {
                Err(MarkError::new(NAME, self.encode().as_bytes()))
            }
            kind => Ok(kind),
        }
    }

    /// The attribute's value.
    pub fn encode(&self) -> String {
        let Override {
            uid,
            gid,
            permissions,
            kind,
        } = self;
        let mode = permissions & 0o7777;
        let kind = match kind {
            None => return format!("{uid}:{gid}:{mode:04o}"),
            Some(OverrideKind::File) => "file",
            Some(OverrideKind::Directory) => "dir",
            Some(OverrideKind::Symlink) => "symlink",
            Some(OverrideKind::Pipe) => "pipe",
            Some(OverrideKind::Socket) => "socket",
            Some(OverrideKind::Block { major, minor }) => &format!("block-{major}-{minor}"),
            Some(OverrideKind::Char { major, minor }) => &format!("char-{major}-{minor}"),
        };
        format!("{uid}:{gid}:{mode:04o}:{kind}")
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
        let kind = match kind {
            None | Some("") => None,
            Some("file") => Some(OverrideKind::File),
            Some("dir") => Some(OverrideKind::Directory),
            Some("symlink") => Some(OverrideKind::Symlink),
            Some("pipe") => Some(OverrideKind::Pipe),
            Some("socket") => Some(OverrideKind::Socket),
            Some(device) => {
                let mut parts = device.splitn(3, '-');
                let (kind, major, minor) = (parts.next(), parts.next(), parts.next());
                let major = number(major.ok_or_else(bad)?)?;
                let minor = number(minor.ok_or_else(bad)?)?;
                match kind {
                    Some("block") => Some(OverrideKind::Block { major, minor }),
                    Some("char") => Some(OverrideKind::Char { major, minor }),
                    _ => return Err(bad()),
                }
            }
        };
        Ok(Override {
            uid: number(uid)?,
            gid: number(gid)?,
            permissions: (mode & 0o7777) as u16,
            kind,
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
        let kinds = [
            (None, "0:65534:4755"),
            (Some(OverrideKind::File), "0:65534:4755:file"),
            (Some(OverrideKind::Directory), "0:65534:4755:dir"),
            (Some(OverrideKind::Symlink), "0:65534:4755:symlink"),
            (Some(OverrideKind::Pipe), "0:65534:4755:pipe"),
            (Some(OverrideKind::Socket), "0:65534:4755:socket"),
            (
                Some(OverrideKind::Block { major: 8, minor: 1 }),
                "0:65534:4755:block-8-1",
            ),
            (
                Some(OverrideKind::Char { major: 1, minor: 3 }),
                "0:65534:4755:char-1-3",
            ),
        ];
        for (kind, text) in kinds {
            let owner = Override {
                uid: 0,
                gid: 65534,
                permissions: 0o4755,
                kind,
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
        assert_eq!(read("1:2:0600:file\0").kind, Some(OverrideKind::File));
        assert_eq!(read("1:2:0040755:dir").permissions, 0o755);
    }

    #[test]
    fn nonsense_is_refused() {
        let texts: [&[u8]; 14] = [
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
