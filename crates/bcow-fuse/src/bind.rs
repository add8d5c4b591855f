//! Bind mounts of BCoW mounts.

use std::path::Path;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, MoveMountFlags, OpenTreeFlags, move_mount, open_tree};

use crate::error::MountError;
use crate::mount::usable_mountpoint;
use crate::mountinfo;
use crate::options::MountOptions;
use crate::unmount::{MountedImage, WhenBusy, mounted_image, unmount};

/// Shows the mount with this device number at `target` too, with the `ro`, `nosuid`, `nodev` and
/// `noexec` of `options`. `None` if this mount namespace does not show the whole mount any more.
///
/// The bind mount holds the file system: it continues until the last of the two is unmounted. A
/// device number belongs to the next mount as soon as the old one has ended, so the caller must
/// check which mount it has got.
pub fn bind(
    device: &str,
    target: &Path,
    options: &MountOptions,
) -> Result<Option<MountedImage>, MountError> {
    let target = usable_mountpoint(target)?;
    let refused = |errno: Errno| MountError::Refused {
        path: target.clone(),
        source: errno.into(),
    };
    let places = mountinfo::whole_places_of(device)
        .map_err(MountError::process("read /proc/self/mountinfo"))?;
    for place in places {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_SYMLINK_NOFOLLOW;
        let tree = match open_tree(CWD, &place, flags) {
            Ok(tree) => tree,
            // Unmounted meanwhile, or not bindable.
            Err(Errno::NOENT | Errno::INVAL | Errno::NOTCONN) => continue,
            Err(errno) => return Err(refused(errno)),
        };
        // Another file system may be there by now. This sends no request to it.
        let how = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let stat = rustix::fs::statx(&tree, c"", how, StatxFlags::TYPE).map_err(refused)?;
        if format!("{}:{}", stat.stx_dev_major, stat.stx_dev_minor) != device {
            continue;
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(&target, flags, Mode::empty()).map_err(refused)?;
        let both =
            MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        move_mount(&tree, "", &directory, "", both).map_err(refused)?;
        let restricted =
            rustix::mount::mount_remount(&target, MountFlags::BIND | restrictions(options), c"");
        let bound = restricted
            .map_err(refused)
            .and_then(|()| mounted_image(&target));
        if bound.is_err() {
            // The first error is the one to report.
            let _ = unmount(&target, WhenBusy::Detach);
        }
        return bound.map(Some);
    }
    Ok(None)
}

/// The restrictions of one mount of a file system.
fn restrictions(options: &MountOptions) -> MountFlags {
    let own = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    let mut flags = options.flags() & own;
    flags.set(MountFlags::RDONLY, options.asks_for_read_only());
    flags
}
