//! An inode as `ls -l` shows it, and as JSON does.

use bcow::format::hex;
use bcow_erofs::reader::{FileType, Inode, Timestamp};
use bcow_oci::rfc3339;
use serde_json::{Map, Value, json};

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

/// Puts everything that an inode has into a JSON object; `path` is for messages.
pub fn put_json(
    object: &mut Map<String, Value>,
    tree: &Tree,
    inode: &Inode,
    path: &[u8],
) -> Result<(), CommandError> {
    object.insert("type".into(), type_name(inode.kind).into());
    object.insert("mode".into(), format!("{:04o}", inode.permissions).into());
    object.insert("uid".into(), inode.uid.into());
    object.insert("gid".into(), inode.gid.into());
    object.insert("size".into(), inode.size.into());
    object.insert("links".into(), inode.nlink.into());
    object.insert("mtime".into(), full_time(inode.mtime).into());
    object.insert("inode".into(), inode.ino.into());
    if let Some(device) = inode.rdev {
        object.insert(
            "device".into(),
            json!({ "major": device.major, "minor": device.minor }),
        );
    }
    if inode.kind == FileType::Symlink {
        let target = tree.read(path, |fs| fs.read_link(inode))?;
        names::put_json(object, "target", &target);
    }
    let xattrs = tree.read(path, |fs| fs.xattrs(inode))?;
    if !xattrs.is_empty() {
        let xattrs: Vec<Value> = xattrs
            .iter()
            .map(|(name, value)| {
                let mut object = Map::new();
                names::put_json(&mut object, "name", name);
                object.insert("value_hex".into(), hex(value).into());
                Value::Object(object)
            })
            .collect();
        object.insert("xattrs".into(), xattrs.into());
    }
    Ok(())
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
