//! The mount table, read from `/proc/self/mountinfo`.
//!
//! bcow reads the kernel's list instead of the mount itself: a `stat` of a mount whose daemon hangs
//! would also hang.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use bcow_mount::filesystem::Kind;
use bcow_mount::{HiddenName, backing_of, file_of_source};
use bcow_union::unescape;

/// The file-system type of bcow mounts in `/proc/self/mountinfo`.
pub(crate) const FS_TYPE: &str = "fuse.bcow";

/// One line of `/proc/self/mountinfo` (proc_pid_mountinfo(5)).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MountEntry {
    /// The number of the mount.
    id: u32,
    /// The number of the mount that has the mountpoint.
    parent: u32,
    /// Device number as the kernel writes it, `major:minor`.
    pub(crate) device: String,
    /// Whether the mount shows the whole file system, and not only a directory of it.
    pub(crate) is_whole: bool,
    /// The mountpoint.
    pub(crate) target: PathBuf,
    /// File-system type with subtype.
    pub(crate) fs_type: String,
    /// The source of the mount.
    pub(crate) source: OsString,
    /// Whether this mount has the option `rw`. The file system itself may be read-only.
    pub(crate) is_writable: bool,
    /// Uid and gid of the only user that may enter a FUSE mount without `allow_other`.
    pub(crate) owner: Option<(u32, u32)>,
}

/// The driver of a bcow mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Driver {
    /// The process of the mount answers requests for files.
    Fuse,
    /// A file system driver of the kernel uses a loop device, and the process serves the file
    /// behind this device.
    Kernel(HiddenName),
    /// A file system driver of the kernel reads this file, and no process serves the mount.
    Direct(PathBuf),
}

impl MountEntry {
    /// The driver, if it is a mount of bcow.
    pub(crate) fn driver(&self) -> Option<Driver> {
        if self.fs_type == FS_TYPE {
            return Some(Driver::Fuse);
        }
        // An ordinary user can choose the source of a mount of another type, so it proves nothing.
        let is_of_disks = Kind::ALL.iter().any(|kind| kind.name() == self.fs_type);
        if !is_of_disks {
            return None;
        }
        let source = Path::new(&self.source);
        if self.fs_type == Kind::Erofs.name()
            && let Some(file) = file_of_source(source)
        {
            return Some(Driver::Direct(file));
        }
        backing_of(source).map(Driver::Kernel)
    }
}

/// All mounts of this mount namespace that are below the root directory of this process.
pub(crate) fn mounts() -> io::Result<Vec<MountEntry>> {
    Ok(std::fs::read("/proc/self/mountinfo")?
        .split(|&byte| byte == b'\n')
        .filter_map(parse)
        .collect())
}

/// The topmost mount at exactly `target`, a path without symbolic links.
pub(crate) fn mounted_at(target: &Path) -> io::Result<Option<MountEntry>> {
    Ok(look_up(&mounts()?, target)
        .filter(|entry| entry.target == target)
        .cloned())
}

/// The mount that the path `target`, without symbolic links, leads to. `None` if the root directory
/// of this process is no mountpoint, and no mount below it is on the path.
///
/// The order of the list proves nothing: an older mount can be moved onto a newer one. So this
/// follows the path as the kernel does.
fn look_up<'m>(mounts: &'m [MountEntry], target: &Path) -> Option<&'m MountEntry> {
    let mut places: Vec<&Path> = target.ancestors().collect();
    places.reverse();
    // The mount of the root directory, or those right below it: their parents are not listed.
    let is_listed = |id| mounts.iter().any(|entry| entry.id == id);
    let is_first = |entry: &MountEntry| entry.parent == entry.id || !is_listed(entry.parent);
    let mut found: Option<&MountEntry> = None;
    for place in places {
        let at_place = || mounts.iter().filter(|entry| entry.target == place);
        if found.is_none() {
            found = at_place().find(|entry| is_first(entry));
            // A lookup begins in the root directory and not in a mount that covers it.
            if place == Path::new("/") {
                continue;
            }
        }
        while let Some(below) = found
            && let Some(above) = at_place().find(|entry| entry.parent == below.id)
        {
            found = Some(above);
        }
    }
    found
}

/// All paths where the file system with this device number is visible. A mount may be moved, or
/// bound to other directories.
pub(crate) fn places_of(device: &str) -> io::Result<Vec<PathBuf>> {
    Ok(visible(&mounts()?, device, |_| true))
}

/// The same, but without the paths that show only a directory of the file system.
pub(crate) fn whole_places_of(device: &str) -> io::Result<Vec<PathBuf>> {
    Ok(visible(&mounts()?, device, |entry| entry.is_whole))
}

/// The selected targets of a device, in the order of the list, without those that another mount
/// covers, at the same path or at a directory above.
fn visible(
    mounts: &[MountEntry],
    device: &str,
    is_selected: impl Fn(&MountEntry) -> bool,
) -> Vec<PathBuf> {
    let is_on_top =
        |entry: &MountEntry| look_up(mounts, &entry.target).is_some_and(|top| top.id == entry.id);
    mounts
        .iter()
        .filter(|entry| entry.device == device && is_selected(entry) && is_on_top(entry))
        .map(|entry| entry.target.clone())
        .collect()
}

/// The mount of a line; `None` if the line is not in the kernel's form.
pub(crate) fn parse(line: &[u8]) -> Option<MountEntry> {
    let mut fields = line.split(|&byte| byte == b' ');
    let number = |field: &[u8]| std::str::from_utf8(field).ok()?.parse().ok();
    let id = number(fields.next()?)?;
    let parent = number(fields.next()?)?;
    let device = fields.next()?;
    let root = fields.next()?;
    let target = fields.next()?;
    let mut options = fields.next()?.split(|&byte| byte == b',');
    // After the mount options comes a variable number of optional fields. A dash ends them.
    fields.find(|&field| field == b"-")?;
    let fs_type = fields.next()?;
    let source = fields.next()?;
    let of_filesystem = fields.next().unwrap_or_default();
    Some(MountEntry {
        id,
        parent,
        device: String::from_utf8_lossy(device).into_owned(),
        is_whole: root == b"/",
        target: PathBuf::from(OsString::from_vec(unescape(target))),
        fs_type: String::from_utf8_lossy(fs_type).into_owned(),
        source: OsString::from_vec(unescape(source)),
        is_writable: options.any(|option| option == b"rw"),
        owner: owner(of_filesystem),
    })
}

/// Uid and gid of the owner, from the FUSE options of the file system.
fn owner(options: &[u8]) -> Option<(u32, u32)> {
    let options = options.split(|&byte| byte == b',');
    let number = |name: &[u8]| {
        let value = options
            .clone()
            .find_map(|option| option.strip_prefix(name))?;
        std::str::from_utf8(value).ok()?.parse().ok()
    };
    if options.clone().any(|option| option == b"allow_other") {
        None
    } else {
        Some((number(b"user_id=")?, number(b"group_id=")?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn place_of_a_device_is_where_nothing_covers_it() {
        let mounts = list(&[
            "9 1 8:1 / / rw - ext4 d rw",
            "10 9 0:50 / /a rw - fuse.bcow x rw",
            "11 9 0:51 / /b rw - fuse.bcow x rw",
            "12 9 0:50 / /c rw - fuse.bcow x rw",
            "13 10 0:60 / /a rw - tmpfs t rw",
            "14 9 0:51 /etc /d rw - fuse.bcow x rw",
            "15 9 0:50 / /e/f rw - fuse.bcow x rw",
            "16 9 0:60 / /e rw - tmpfs t rw",
        ]);
        let all = |device| visible(&mounts, device, |_| true);
        assert_eq!(all("0:50"), [Path::new("/c")]);
        assert_eq!(all("0:51"), [Path::new("/b"), Path::new("/d")]);
        assert!(all("0:52").is_empty());
        let whole = visible(&mounts, "0:51", |entry| entry.is_whole);
        assert_eq!(whole, [Path::new("/b")]);
    }

    fn list(lines: &[&str]) -> Vec<MountEntry> {
        let lines = lines.iter().map(|line| line.as_bytes());
        lines.filter_map(parse).collect()
    }

    fn device_at(mounts: &[MountEntry], path: &str) -> Option<String> {
        look_up(mounts, Path::new(path)).map(|entry| entry.device.clone())
    }

    #[test]
    fn mount_that_was_moved_onto_a_newer_one_is_found() {
        let mounts = list(&[
            "9 1 8:1 / / rw - ext4 d rw",
            "10 11 0:50 / /b rw - fuse.bcow x rw",
            "11 9 0:60 / /b rw - tmpfs t rw",
        ]);
        assert_eq!(device_at(&mounts, "/b").as_deref(), Some("0:50"));
        assert_eq!(visible(&mounts, "0:50", |_| true), [Path::new("/b")]);
        assert!(visible(&mounts, "0:60", |_| true).is_empty());
    }

    #[test]
    fn mount_inside_a_covering_mount_is_found() {
        let mounts = list(&[
            "9 1 8:1 / / rw - ext4 d rw",
            "10 9 0:50 / /a/b rw - fuse.bcow x rw",
            "12 11 0:51 / /a/b rw - fuse.bcow x rw",
            "11 9 0:60 / /a rw - tmpfs t rw",
        ]);
        assert_eq!(device_at(&mounts, "/a/b").as_deref(), Some("0:51"));
        assert_eq!(device_at(&mounts, "/a/c").as_deref(), Some("0:60"));
        assert_eq!(device_at(&mounts, "/c").as_deref(), Some("8:1"));
        assert!(visible(&mounts, "0:50", |_| true).is_empty());
    }

    #[test]
    fn lookup_begins_in_the_root_directory_of_the_process() {
        // In chroot(2) into a directory that is no mountpoint.
        let mounts = list(&[
            "10 9 0:50 / /a rw - fuse.bcow x rw",
            "11 10 0:60 / /a rw - tmpfs t rw",
        ]);
        assert_eq!(device_at(&mounts, "/a").as_deref(), Some("0:60"));
        assert_eq!(device_at(&mounts, "/b"), None);
        // Absolute paths do not lead to a mount that covers the root directory.
        let mounts = list(&[
            "1 1 8:1 / / rw - ext4 d rw",
            "2 1 0:50 / /a rw - fuse.bcow x rw",
            "3 1 0:60 / / rw - tmpfs t rw",
        ]);
        assert_eq!(device_at(&mounts, "/a").as_deref(), Some("0:50"));
    }

    #[test]
    fn direct_mount_is_known_by_its_type_and_source() {
        let driver = |line: &str| parse(line.as_bytes()).unwrap().driver();
        let file = Path::new("/images/a b.bcow").to_owned();
        let direct = r"1 2 0:3 / /m ro - erofs /./images/a\040b.bcow ro";
        assert_eq!(driver(direct), Some(Driver::Direct(file)));
        assert_eq!(driver(&direct.replace("erofs", "fuse.x")), None);
        assert_eq!(driver("1 2 0:3 / /m ro - erofs /images/a.bcow ro"), None);
    }

    #[test]
    fn line_with_optional_fields_and_escapes_is_read() {
        let line = b"36 35 98:0 /mnt1 /mnt\\0402\\134x rw,noatime master:1 shared:7 - \
                     fuse.bcow /a\\011b rw,errors=continue";
        let entry = parse(line).unwrap();
        assert_eq!(entry.device, "98:0");
        assert_eq!(entry.target, Path::new("/mnt 2\\x"));
        assert_eq!(entry.fs_type, FS_TYPE);
        assert_eq!(entry.source, "/a\tb");
        assert!(entry.is_writable);
    }

    #[test]
    fn owner_of_a_mount_for_one_user_is_read() {
        let of = |options: &[u8]| {
            let line = [b"1 2 0:3 / /m ro - fuse.bcow x ", options].concat();
            parse(&line).unwrap().owner
        };
        assert_eq!(of(b"rw,user_id=7,group_id=80"), Some((7, 80)));
        assert_eq!(
            of(b"rw,user_id=0,group_id=0,default_permissions"),
            Some((0, 0))
        );
        assert_eq!(of(b"rw,user_id=7,group_id=80,allow_other"), None);
        assert_eq!(of(b"rw,errors=continue"), None);
    }

    #[test]
    fn line_without_optional_fields_is_read() {
        let entry = parse(b"22 1 0:21 / / ro,relatime - tmpfs tmpfs rw").unwrap();
        assert!(!entry.is_writable);
        assert_eq!(
            (entry.target.as_path(), entry.fs_type.as_str()),
            (Path::new("/"), "tmpfs")
        );
    }

    #[test]
    fn cut_off_line_is_skipped() {
        assert_eq!(parse(b"36 35 98:0 /mnt1 /mnt2 rw,noatime master:1"), None);
        assert_eq!(parse(b""), None);
    }

    #[test]
    fn root_is_mounted_and_found() {
        assert!(mounted_at(Path::new("/")).unwrap().is_some());
    }
}
