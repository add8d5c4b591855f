//! Plain images with the kernel driver: the kernel reads them, and no process serves the mount.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use bcow_fuse::options::Access;
use bcow_fuse::{MountError, MountOptions};
use bcow_images::image::OpenImage;
use bcow_images::plain;

use super::{Running, announce};
use crate::args::MountArgs;

/// Permission bits with which other users can write, and the one that keeps them from replacing
/// files of a directory.
const OTHERS_WRITE: u32 = 0o022;
const STICKY: u32 = 0o1000;

/// The files of an image that the kernel can read by itself, or the reason why a process must serve
/// the image.
pub fn files(args: &MountArgs, image: &OpenImage) -> Result<Vec<PathBuf>, String> {
    let needs = |what: &str| Err(format!("{what} needs a process"));
    if !image.parts().is_empty() {
        return needs("a layer on the command line");
    }
    if args.image.is_remote() {
        return needs("a remote image");
    }
    let Ok(Some(files)) = plain::files(image) else {
        return needs("an image that is not plain");
    };
    // The kernel verifies nothing.
    for (option, is_given) in [
        ("--verify", args.verify.is_some()),
        ("--root-hash", args.stores.remote.root_hash.is_some()),
        ("--metrics", args.metrics.is_some()),
        ("--record", args.record.is_some()),
        ("--foreground", args.foreground),
        ("--pool", args.pool.is_some()),
    ] {
        if is_given {
            return needs(option);
        }
    }
    // bcow has checked the metadata that the kernel parses, and nothing checks it again.
    match files.iter().find(|file| !only_this_user_changes(file)) {
        None => Ok(files),
        Some(file) => needs(&format!(
            "{}, which another user can change or replace,",
            file.display()
        )),
    }
}

/// Whether only this user and root can change the file at `path`, or replace it.
fn only_this_user_changes(path: &Path) -> bool {
    let own = rustix::process::geteuid().as_raw();
    path.ancestors().enumerate().all(|(above, path)| {
        let Ok(metadata) = path.symlink_metadata() else {
            return false;
        };
        let mode = metadata.mode();
        let is_shared = mode & OTHERS_WRITE != 0 && (above == 0 || mode & STICKY == 0);
        [own, 0].contains(&metadata.uid()) && !is_shared
    })
}

/// Mounts, and returns when programs can use the mount. Nothing has to stay behind.
pub fn run(
    files: &[PathBuf],
    running: Running<'_>,
    options: &MountOptions,
) -> Result<(), MountError> {
    let args = running.args;
    bcow_fuse::mount_files(files, args.directory(), options)?;
    announce(running.readiness, args, Access::Owner, running.ui)
}
