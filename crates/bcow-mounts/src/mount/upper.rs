//! The upper of a mount with the FUSE driver, and where an upper may be.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow_erofs::reader::Filesystem;
use bcow_images::error::{CommandError, Context};
use bcow_images::image::OpenImage;
use bcow_images::names;
use bcow_images::running;
use bcow_union::fs::{LowerImage, UnionFs};
use bcow_union::{NodeId, UpperError};

use super::host::{Host, UpperUse};
use crate::args::MountArgs;
use crate::helper;
use bcow_images::image::Messages;
use bcow_images::upper::{cannot_use, note};

/// The union of `image`, with its file system `tree`, and the upper. `None` if the mount has no
/// upper, or the upper is to be left alone.
pub fn open(
    args: &MountArgs,
    image: &OpenImage,
    tree: &Arc<Filesystem>,
    host: &Host<'_>,
    upper_use: UpperUse<'_>,
    ui: &dyn Messages,
) -> Result<Option<Arc<UnionFs>>, CommandError> {
    let before = match upper_use {
        UpperUse::New => None,
        UpperUse::TakeOver { ledger, upper, .. } => Some((ledger, upper)),
        UpperUse::None => return Ok(None),
    };
    let Some(path) = args.upper.path() else {
        return Ok(None);
    };
    let options = args.upper.options(host.pool.is_some());
    // The process changes its directory later, and publishes the path of the upper.
    let path =
        &std::path::absolute(path).context(|| format!("cannot use upper {}", path.display()))?;
    let note = note(args.directory());
    host.let_signals_through()?;
    host.when_free(ui, || {
        let lower = LowerImage {
            fs: Arc::clone(tree),
            identity: image.identity(),
            name: image.path().to_string_lossy().into_owned(),
        };
        let Some((ledger, held)) = before else {
            return UnionFs::open(lower, path, &note, &options);
        };
        let ledger = ledger.try_clone_to_owned();
        let ledger = ledger.map_err(|source| UpperError::Ledger { source })?;
        UnionFs::take_over(lower, path, &note, &options, ledger, held)
    })
    .map(Some)
    .map_err(|error| cannot_use(&error))
}

/// Fails if one of the upper and the mountpoint is inside the other: the mount would cover its own
/// upper, or be inside it.
pub fn refuse_one_in_the_other(upper: &Path, mountpoint: &Path) -> Result<(), CommandError> {
    let (Ok(mountpoint), Ok(resolved)) = (mountpoint.canonicalize(), resolve(upper)) else {
        // A later step fails with the reason.
        return Ok(());
    };
    let relation = if resolved == mountpoint {
        "is the mountpoint"
    } else if resolved.starts_with(&mountpoint) {
        "is inside the mountpoint"
    } else if mountpoint.starts_with(&resolved) {
        "contains the mountpoint"
    } else {
        return Ok(());
    };
    Err(
        CommandError::usage(format!("upper {} {relation}", upper.display()))
            .hint("choose a directory beside the mountpoint"),
    )
}

/// The owner of the root directory that `union` shows, if this user cannot write there. Root of a
/// user namespace can.
pub fn owner_who_is_needed(union: &UnionFs) -> Option<u32> {
    use rustix::process::{getegid, geteuid, getgroups};
    const WRITE: u16 = 0o2;
    // If the root is damaged, the first program that accesses it gets the error.
    let root = union.attributes(NodeId::ROOT).ok()?;
    let user = geteuid();
    let is_in = |group: u32| {
        let groups = getgroups().unwrap_or_default();
        getegid().as_raw() == group || groups.iter().any(|one| one.as_raw() == group)
    };
    let class = match () {
        () if root.uid == user.as_raw() => root.permissions >> 6,
        () if is_in(root.gid) => root.permissions >> 3,
        () => root.permissions,
    };
    if user.is_root() || class & WRITE != 0 { None } else { Some(root.uid) }
}

/// Warns that this user can change little in the mount. The hint is a command with which the user
/// can change everything.
pub fn warn_of_owner(
    owner: u32,
    image: &Path,
    directory: &Path,
    has_hint: bool,
    ui: &dyn Messages,
) {
    let user = running::user_name(rustix::process::geteuid().as_raw());
    let owner = running::user_name(owner);
    ui.warning(&format_args!(
        "the root directory of {} belongs to {owner}, and {user} cannot write to it: the kernel \
         checks every access by the owners and modes in the image",
        image.display()
    ));
    let mut words = std::env::args_os();
    if !has_hint || helper::is_called(words.next().as_deref()) {
        return;
    }
    let words: Vec<String> = words.map(|word| names::quoted(word.as_bytes())).collect();
    let script = r#"bcow "$@" && { sh; bcow umount "$0"; }"#;
    ui.hint(&format!(
        "unmount it and run this line instead, which mounts it in a user namespace, starts a \
         shell there as root, and unmounts it afterwards: unshare -rm -- sh -c '{script}' {} {}",
        names::quoted(directory.as_os_str().as_bytes()),
        words.join(" ")
    ));
}

/// Where the upper is, or where it would be made.
fn resolve(upper: &Path) -> std::io::Result<PathBuf> {
    match upper.canonicalize() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let absolute = std::path::absolute(upper)?;
            match (absolute.parent(), absolute.file_name()) {
                (Some(parent), Some(name)) => Ok(parent.canonicalize()?.join(name)),
                _ => Err(error),
            }
        }
        other => other,
    }
}
