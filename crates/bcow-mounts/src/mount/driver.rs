//! Selects the driver of a mount, and gives the reason.

use std::path::Path;

use bcow_images::disks::is_disk;
use bcow_images::error::CommandError;
use bcow_union::{Driver, SyncPolicy};

use crate::args::{DriverChoice, MountArgs};
use bcow_images::upper::cannot_use;

/// How a mount is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Way {
    /// The FUSE driver.
    Fuse {
        /// Why this one.
        reason: String,
    },
    /// The kernel driver, if the content is a file system for it. Otherwise the FUSE driver, unless
    /// the user asks for the kernel driver.
    Content,
    /// The kernel driver, with an upper.
    Upper {
        /// Why this one.
        reason: String,
    },
}

/// Selects the way, and refuses options that it does not have.
///
/// New uppers begin with the FUSE driver unless the user asks for the kernel driver: an upper is
/// then a tree of files that other programs read, and it needs no privilege.
pub fn select(args: &MountArgs) -> Result<Way, CommandError> {
    let Some(upper) = args.upper.path() else {
        return select_without_upper(args);
    };
    let found = bcow_union::driver_of(upper).map_err(|error| cannot_use(&error))?;
    let belongs = || "the upper belongs to it".to_owned();
    let asked = || "as --driver says".to_owned();
    let way = match (args.driver, found) {
        (DriverChoice::Fuse, Some(driver @ Driver::Kernel))
        | (DriverChoice::Kernel, Some(driver @ Driver::Fuse)) => {
            return Err(other_driver(upper, driver));
        }
        (_, Some(Driver::Kernel)) => Way::Upper { reason: belongs() },
        (_, Some(Driver::Fuse)) => Way::Fuse { reason: belongs() },
        (DriverChoice::Kernel, None) => Way::Upper { reason: asked() },
        (DriverChoice::Fuse, None) => Way::Fuse { reason: asked() },
        (DriverChoice::Auto, None) => Way::Fuse {
            reason: format!("the default for a new upper; {}", kernel_for_new_uppers()),
        },
    };
    match way {
        Way::Upper { .. } => refuse_what_only_fuse_has(args)?,
        _ if args.upper.size.is_some() => {
            return Err(CommandError::usage(
                "--size is for the file system of an upper of the kernel driver",
            )
            .hint("`--size-limit` limits an upper of the FUSE driver"));
        }
        _ => {}
    }
    Ok(way)
}

fn select_without_upper(args: &MountArgs) -> Result<Way, CommandError> {
    let is_disk = args.image.path().is_some_and(is_disk);
    // The kernel mounts an image only if the user asks for it, because its driver then parses what
    // the image holds.
    let way = match args.driver {
        DriverChoice::Kernel => Way::Content,
        DriverChoice::Auto if is_disk && !args.has_layers() => Way::Content,
        DriverChoice::Auto => Way::Fuse {
            reason: super::DRIVER_OF_IMAGES.to_owned(),
        },
        DriverChoice::Fuse => Way::Fuse {
            reason: "as --driver says".to_owned(),
        },
    };
    match &way {
        Way::Fuse { .. } if args.upper.sync != SyncPolicy::Strict => {
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

fn refuse_what_only_fuse_has(args: &MountArgs) -> Result<(), CommandError> {
    if matches!(args.upper.sync, SyncPolicy::Batch(_)) {
        return Err(CommandError::usage(
            "--sync batch is for the FUSE driver, where files are copied to the upper",
        )
        .hint("`-o commit=SECONDS` is the interval in which ext4 makes all changes durable"));
    }
    match args.upper.only_for_fuse() {
        None => Ok(()),
        Some(option) => {
            let refused = CommandError::usage(format!(
                "{option} is not supported with the kernel driver, where the upper is a file system"
            ));
            Err(match option {
                "--size-limit" | "--inode-limit" => {
                    refused.hint("`--size` sets the size of a new file system")
                }
                _ => refused.hint("leave it out, or begin an upper with `--driver fuse`"),
            })
        }
    }
}

/// The error for an upper that belongs to `driver`, in a mount with the other driver.
fn other_driver(upper: &Path, driver: Driver) -> CommandError {
    let (belongs, other) = match driver {
        Driver::Fuse => ("FUSE", "kernel"),
        Driver::Kernel => ("kernel", "FUSE"),
    };
    CommandError::usage(format!(
        "the upper {} belongs to the {belongs} driver, and cannot be mounted with the {other} \
         driver",
        upper.display()
    ))
    .hint(format!(
        "mount it with `--driver {}`, or name another upper",
        driver.name()
    ))
}

/// How a new upper gets the kernel driver, or why it does not.
fn kernel_for_new_uppers() -> &'static str {
    if !rustix::process::geteuid().is_root() {
        return "the kernel driver is for root only";
    }
    if Path::new("/dev/loop-control").exists() {
        "--driver kernel makes one with the kernel driver"
    } else {
        "the kernel driver needs /dev/loop-control"
    }
}
