//! Where a mount shows which part of which file system: lines of `/proc/PID/mountinfo`
//! (proc_pid_mountinfo(5)).

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// A directory: its file system, and its path there. It does not depend on the mount.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct DirectoryPlace {
    device: Vec<u8>,
    path: PathBuf,
}

impl DirectoryPlace {
    /// The place of the directory at `path`, which the mount with this number shows; `None` if the
    /// list has no such mount.
    pub(crate) fn of(path: &Path, mount: &[u8], mountinfo: &[u8]) -> Option<DirectoryPlace> {
        mountinfo
            .split(|&byte| byte == b'\n')
            .find_map(|line| {
                let mut fields = line.split(|&byte| byte == b' ');
                (fields.next()? == mount).then_some(fields)
            })
            .and_then(|mut fields| {
                let device = fields.nth(1)?.to_owned();
                let [root, target] = [fields.next()?, fields.next()?]
                    .map(|field| PathBuf::from(OsString::from_vec(unescape(field))));
                let path = root.join(path.strip_prefix(target).ok()?);
                Some(DirectoryPlace { device, path })
            })
    }

    /// Whether it is the same directory as `outer`, or anywhere in it.
    pub(crate) fn is_within(&self, outer: &DirectoryPlace) -> bool {
        self.device == outer.device && self.path.starts_with(&outer.path)
    }
}

/// Decodes `\ooo`: the kernel writes space, tab, newline and backslash in this form.
pub fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, after)) = rest.split_first() {
        match after {
            [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', tail @ ..] if byte == b'\\' => {
                out.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                rest = tail;
            }
            _ => {
                out.push(byte);
                rest = after;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bind_mounts_show_the_same_place() {
        let list: &[u8] = b"20 1 8:1 / / rw - ext4 x rw\n\
            31 20 8:1 /a\\040b/c /mnt rw shared:1 - ext4 x rw\n\
            32 20 8:2 /a\\040b/c /other rw - ext4 y rw";
        let place =
            |path: &str, mount: &[u8]| DirectoryPlace::of(Path::new(path), mount, list).unwrap();
        let direct = place("/a b/c/d", b"20");
        assert_eq!(place("/mnt/d", b"31"), direct);
        assert!(direct.is_within(&place("/mnt", b"31")));
        assert!(!direct.is_within(&place("/other", b"32")));
        assert!(!place("/mnt", b"31").is_within(&direct));
        assert!(!place("/a b/cd", b"20").is_within(&place("/mnt", b"31")));
        assert_eq!(DirectoryPlace::of(Path::new("/mnt"), b"3", list), None);
        assert_eq!(
            DirectoryPlace::of(Path::new("/elsewhere"), b"31", list),
            None
        );
    }
}
