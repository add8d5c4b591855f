//! An inode as `ls -l` shows it, and as JSON does.

use bcow::format::hex;
use bcow_erofs::reader::{FileType, Inode, Timestamp};
use bcow_oci::rfc3339;
use serde::Serialize;
use serde_json::{Value, json};

use crate::error::CommandError;
use crate::image::Tree;
use crate::names;

/// The word for a file type in JSON.
pub fn type_name(kind: FileType) -> &'static str {
    match kind {
        FileType::Regular => "file",
        FileType::Directory => "directory",
        FileType::Symlink => "symlink",
        FileType::CharDevice => "char_device",
        FileType::BlockDevice => "block_device",
        FileType::Fifo => "fifo",
        FileType::Socket => "socket",
    }
}

/// Type and permissions in ten letters: `-rwxr-xr-x`.
pub fn mode_letters(kind: FileType, bits: u16) -> String {
    let kind = match kind {
        FileType::Regular => '-',
        FileType::Directory => 'd',
        FileType::Symlink => 'l',
        FileType::CharDevice => 'c',
        FileType::BlockDevice => 'b',
        FileType::Fifo => 'p',
        FileType::Socket => 's',
    };
    let mut text = String::with_capacity(10);
    text.push(kind);
    // Shift of the triple, the special bit that belongs to it, and its letter.
    for (shift, special, letter) in [(6, 0o4000, 's'), (3, 0o2000, 's'), (0, 0o1000, 't')] {
        text.push(if bits >> shift & 4 != 0 { 'r' } else { '-' });
        text.push(if bits >> shift & 2 != 0 { 'w' } else { '-' });
        text.push(match (bits & special != 0, bits >> shift & 1 != 0) {
            (true, true) => letter,
            (true, false) => letter.to_ascii_uppercase(),
            (false, true) => 'x',
            (false, false) => '-',
        });
    }
    text
}

/// A time in UTC, to the minute: `2024-02-29 12:34`.
pub fn short_time(time: Timestamp) -> String {
    match rfc3339(time.seconds) {
        Some(text) => format!("{} {}", &text[..10], &text[11..16]),
        None => format!("@{}", time.seconds),
    }
}

/// A time in UTC as RFC 3339 has it, with nine digits behind the second. Years that RFC 3339 cannot
/// write come as `@SECONDS.NANOSECONDS`.
pub fn full_time(time: Timestamp) -> String {
    match rfc3339(time.seconds) {
        Some(text) => format!("{}.{:09}Z", &text[..19], time.nanoseconds),
        None => format!("@{}.{:09}", time.seconds, time.nanoseconds),
    }
}

/// An inode, as JSON has it.
#[derive(Serialize)]
pub struct InodeFacts {
    /// As [`type_name`] says it.
    #[serde(rename = "type")]
    pub kind: &'static str,
    mode: String,
    uid: u32,
    gid: u32,
    size: u64,
    links: u32,
    mtime: String,
    inode: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    target_hex: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    xattrs: Vec<XattrFacts>,
}

#[derive(Serialize)]
struct XattrFacts {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name_hex: Option<String>,
    value_hex: String,
}

impl InodeFacts {
    /// Everything that an inode has; `path` is for messages.
    pub fn of(tree: &Tree, inode: &Inode, path: &[u8]) -> Result<Self, CommandError> {
        let is_link = inode.kind == FileType::Symlink;
        let target = is_link.then(|| tree.read(path, |fs| fs.read_link(inode)));
        let target = target.transpose()?;
        let xattrs = tree.read(path, |fs| fs.xattrs(inode))?;
        Ok(InodeFacts {
            kind: type_name(inode.kind),
            mode: format!("{:04o}", inode.permissions),
            uid: inode.uid,
            gid: inode.gid,
            size: inode.size,
            links: inode.nlink,
            mtime: full_time(inode.mtime),
            inode: inode.ino,
            device: inode
                .rdev
                .map(|device| json!({ "major": device.major, "minor": device.minor })),
            target: target.as_deref().map(names::text),
            target_hex: target.as_deref().and_then(names::text_hex),
            xattrs: xattrs
                .iter()
                .map(|(name, value)| XattrFacts {
                    name: names::text(name),
                    name_hex: names::text_hex(name),
                    value_hex: hex(value),
                })
                .collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_print_as_date_prints_them() {
        let at = |seconds| {
            full_time(Timestamp {
                seconds,
                nanoseconds: 5,
            })
        };
        assert_eq!(at(0), "1970-01-01T00:00:00.000000005Z");
        assert_eq!(at(-1), "1969-12-31T23:59:59.000000005Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00.000000005Z");
        assert_eq!(at(1_709_210_096), "2024-02-29T12:34:56.000000005Z");
        assert_eq!(at(4_107_542_400), "2100-03-01T00:00:00.000000005Z");
        assert_eq!(at(253_402_300_799), "9999-12-31T23:59:59.000000005Z");
        assert_eq!(at(253_402_300_800), "@253402300800.000000005");
        assert_eq!(at(i64::MIN), "@-9223372036854775808.000000005");
    }

    #[test]
    fn modes_print_as_ls_prints_them() {
        assert_eq!(mode_letters(FileType::Regular, 0o644), "-rw-r--r--");
        assert_eq!(mode_letters(FileType::Regular, 0o4755), "-rwsr-xr-x");
        assert_eq!(mode_letters(FileType::Regular, 0o6644), "-rwSr-Sr--");
        assert_eq!(mode_letters(FileType::Directory, 0o1777), "drwxrwxrwt");
        assert_eq!(mode_letters(FileType::Directory, 0o1776), "drwxrwxrwT");
        assert_eq!(mode_letters(FileType::Symlink, 0o777), "lrwxrwxrwx");
    }
}
