//! The door of a mount: which one serves it, and why.

use std::path::Path;

use bcow_union::{Door, SyncPolicy};

use super::{Args, DoorChoice};
use crate::disks::is_disk;
use crate::error::CommandError;
use crate::upper::cannot_use;

/// The way of a mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Way {
    /// The FUSE door.
    Fuse {
        /// Why this one.
        reason: String,
    },
    /// The kernel door, if the disk or image holds a file system for it. Else the FUSE door, if the
    /// user does not insist.
    Content,
    /// The kernel door, with an upper.
    Upper {
        /// Why this one.
        reason: String,
    },
}

/// Selects the way, and refuses options that it does not have.
///
/// New uppers begin at the FUSE door unless the user asks for the kernel door: an upper is then a
/// tree of files that other programs read, and it needs no privilege.
pub fn select(args: &Args) -> Result<Way, CommandError> {
    let Some(upper) = args.upper.path() else {
        return select_without_upper(args);
    };
    let found = bcow_union::door_of(upper).map_err(|error| cannot_use(&error))?;
    let belongs = || "the upper belongs to it".to_owned();
    let asked = || "as --door says".to_owned();
    let way = match (args.door, found) {
        (DoorChoice::Fuse, Some(door @ Door::Kernel))
        | (DoorChoice::Kernel, Some(door @ Door::Fuse)) => {
            return Err(other_door(upper, door));
        }
        (_, Some(Door::Kernel)) => Way::Upper { reason: belongs() },
        (_, Some(Door::Fuse)) => Way::Fuse { reason: belongs() },
        (DoorChoice::Kernel, None) => Way::Upper { reason: asked() },
        (DoorChoice::Fuse, None) => Way::Fuse { reason: asked() },
        (DoorChoice::Auto, None) => Way::Fuse {
            reason: format!("new uppers begin here; {}", kernel_for_new_uppers()),
        },
    };
    match way {
        Way::Upper { .. } => refuse_what_only_fuse_has(args)?,
        _ if args.upper.size().is_some() => {
            return Err(CommandError::usage(
                "--size is for the file system of an upper of the kernel door",
            )
            .hint("`--size-limit` limits an upper of the FUSE door"));
        }
        _ => {}
    }
    Ok(way)
}

fn select_without_upper(args: &Args) -> Result<Way, CommandError> {
    let is_disk = args.image.path().is_some_and(is_disk);
    // The kernel mounts an image only if the user asks for it, because its driver then parses what
    // the image holds.
    let way = match args.door {
        DoorChoice::Kernel => Way::Content,
        DoorChoice::Auto if is_disk && !args.has_layers() => Way::Content,
        DoorChoice::Auto => Way::Fuse {
            reason: super::DOOR_OF_IMAGES.to_owned(),
        },
        DoorChoice::Fuse => Way::Fuse {
            reason: "as --door says".to_owned(),
        },
    };
    match &way {
        Way::Fuse { .. } if args.upper.sync() != SyncPolicy::Strict => {
            Err(CommandError::usage("--sync needs an upper or a disk")
                .hint("`--upper DIR` names the directory that takes the changes"))
        }
        Way::Content => {
            refuse_what_only_fuse_has(args)?;
            Ok(way)
        }
        _ => Ok(way),
    }
}

fn refuse_what_only_fuse_has(args: &Args) -> Result<(), CommandError> {
    if matches!(args.upper.sync(), SyncPolicy::Batch(_)) {
        return Err(CommandError::usage(
            "--sync batch is for the FUSE door, where files are copied to the upper",
        )
        .hint("`-o commit=SECONDS` is the interval in which ext4 makes all changes durable"));
    }
    match args.upper.only_for_fuse() {
        None => Ok(()),
        Some(option) => {
            let refused = CommandError::usage(format!(
                "{option} is not supported at the kernel door, where the upper is a file system"
            ));
            Err(match option {
                "--size-limit" | "--inode-limit" => {
                    refused.hint("`--size` sets the size of a new file system")
                }
                _ => refused.hint("leave it out, or begin an upper with `--door fuse`"),
            })
        }
    }
}

/// The error of an upper that belongs to `door`, for a mount at the other one.
fn other_door(upper: &Path, door: Door) -> CommandError {
    let (belongs, other) = match door {
        Door::Fuse => ("FUSE", "kernel"),
        Door::Kernel => ("kernel", "FUSE"),
    };
    CommandError::usage(format!(
        "the upper {} belongs to the {belongs} door, and cannot be mounted at the {other} door",
        upper.display()
    ))
    .hint(format!(
        "mount it with `--door {}`, or name another upper",
        door.name()
    ))
}

/// How a new upper gets to the kernel door, or why it does not.
fn kernel_for_new_uppers() -> &'static str {
    if !rustix::process::geteuid().is_root() {
        return "the kernel door is for root only";
    }
    match Path::new("/dev/loop-control").exists() {
        true => "--door kernel begins one at the kernel door",
        false => "the kernel door needs /dev/loop-control",
    }
}
