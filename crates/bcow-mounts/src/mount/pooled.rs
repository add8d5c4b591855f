//! Mounts in the process of a pool. It opens their content again, for the process after it.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bcow_fuse::kernel::DiskFiles;
use bcow_images::NameParts;
use bcow_images::error::CommandError;
use bcow_images::views;
use bcow_union::HeldUpper;

use super::driver::Way;
use super::fuse::{self, Mounted, Opened};
use super::host::{Host, UpperUse};
use super::{DRIVER_OF_IMAGES, Made, check, kernel, make, settle};
use crate::args::MountArgs;
use crate::disk_ledger::LedgerUse;
use bcow_images::image::Messages;

/// Pauses between the attempts to open a remote image, whose server may be reachable again after a
/// while.
pub const PAUSES: [Duration; 5] = [
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(4),
    Duration::from_secs(8),
    Duration::from_secs(15),
];

/// Mounts in this process, which is that of a pool. Relative paths in `args` start at the working
/// directory of this thread.
///
/// `devices` are the device numbers of the mounts of the pool.
pub fn mount(
    args: &MountArgs,
    host: &Host<'_>,
    devices: &[String],
    ui: &dyn Messages,
) -> Result<Mounted, CommandError> {
    let (way, mut options) = check(args)?;
    refuse_own_mounts(args, devices)?;
    match make(args, way, &mut options, host, |_| Ok(None), ui)? {
        Made::Served(mounted) => Ok(*mounted),
        // Unreachable: [`direct::files`] requires a process for each mount with --pool.
        Made::Direct(_) => Err(CommandError::new("no process serves this mount")),
    }
}

/// Opens again the image of a mount of the pool with the FUSE driver: to take the mount over from
/// another process, or to check that another process can. There is one attempt more than `pauses`.
pub fn open_again(
    args: &MountArgs,
    host: &Host<'_>,
    pauses: &[Duration],
    upper_use: UpperUse<'_>,
    ui: &dyn Messages,
) -> Result<Opened, CommandError> {
    let (way, mut options) = check(args)?;
    let reason = match way {
        Way::Fuse { reason } => reason,
        // The process that made the mount found that the content belongs to the FUSE driver.
        Way::Content | Way::Upper { .. } => {
            settle(args, &mut options)?;
            DRIVER_OF_IMAGES.to_owned()
        }
    };
    attempt_after(pauses, || {
        fuse::open(args, options.clone(), reason.clone(), host, upper_use, ui)
    })
}

/// Opens again the content of a mount with the kernel driver, to take the mount over from another
/// process; a disk, with the files and the upper of that process.
pub fn open_disk_again(
    args: &MountArgs,
    host: &Host<'_>,
    disk_files: Option<(&DiskFiles, Option<&HeldUpper>)>,
    ui: &dyn Messages,
) -> Result<kernel::Opened, CommandError> {
    let ledger_use = match disk_files {
        Some((files, upper)) => LedgerUse::Continue(files, upper),
        None => LedgerUse::None,
    };
    let (way, options) = check(args)?;
    attempt_after(&PAUSES, || {
        kernel::again::open(args, &way, &options, host, ledger_use, ui)
    })
}

/// Calls `open`, and calls it again after each of the pauses as long as the error may pass.
fn attempt_after<T>(
    pauses: &[Duration],
    mut open: impl FnMut() -> Result<T, CommandError>,
) -> Result<T, CommandError> {
    let mut pauses = pauses.iter();
    loop {
        match (open(), pauses.next()) {
            (Err(error), Some(&pause)) if error.may_pass() => std::thread::sleep(pause),
            (opened, _) => return opened,
        }
    }
}

/// Refuses paths that are inside a mount of this pool. The process would then send requests to
/// itself, and when it ends, the kernel would wait for answers that the process no longer gives.
/// Backings have no paths here: they are in the directory of their disk or in one of these
/// directories.
fn refuse_own_mounts(args: &MountArgs, devices: &[String]) -> Result<(), CommandError> {
    let stores = &args.stores;
    let mut paths: Vec<PathBuf> = args.upper.path().map(Path::to_owned).into_iter().collect();
    paths.extend(args.merged.clone());
    paths.extend(stores.directories()?);
    paths.extend(stores.backing_dirs()?.iter().cloned());
    // A local file can have a backing on another machine, or a view.
    paths.extend(stores.remote.cache_directory());
    paths.extend(views::directory(None));
    for name in std::iter::once(&args.image).chain(&args.layers()?) {
        paths.extend(match name.parts() {
            NameParts::Layout { directory, .. } | NameParts::Blob { directory, .. } => {
                Some(directory.clone())
            }
            _ => name.path().map(Path::to_owned),
        });
    }
    for path in paths {
        // A path that does not exist yet will be on the file system of its nearest directory that
        // exists.
        let existing = path.ancestors().find_map(|path| {
            if path.as_os_str().is_empty() {
                std::fs::metadata(".").ok()
            } else {
                std::fs::metadata(path).ok()
            }
        });
        let Some(metadata) = existing else { continue };
        let device = metadata.dev();
        let device = format!(
            "{}:{}",
            rustix::fs::major(device),
            rustix::fs::minor(device)
        );
        if devices.contains(&device) {
            return Err(CommandError::new(format!(
                "{} is inside a mount of the same pool, which is not supported yet",
                path.display()
            ))
            .hint("mount one of the two in another pool, or without --pool"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use bcow_oci::store::{LayerProblem, StoreError};
    use bcow_remote::{Problem, RemoteError};

    use super::*;
    use bcow_images::image::cannot_open;

    /// The number of attempts if each of them fails with `problem`.
    fn attempts_with(problem: &Problem) -> usize {
        let mut attempts = 0;
        let failed = attempt_after(&[Duration::ZERO; 3], || {
            attempts += 1;
            let error = RemoteError {
                place: "https://host/image.bcow".to_owned(),
                problem: problem.clone(),
            };
            Err::<(), _>(CommandError::new("cannot open it").caused_by(&error))
        });
        failed.unwrap_err();
        attempts
    }

    #[test]
    fn only_failures_that_may_pass_are_tried_again() {
        assert_eq!(attempts_with(&Problem::Timeout(Duration::ZERO)), 4);
        assert_eq!(attempts_with(&Problem::Changed), 1);
    }

    #[test]
    fn layer_whose_server_does_not_answer_is_tried_again() {
        let layer = LayerProblem::Open {
            name: "layer 1 of 2".to_owned(),
            path: "docker://host/image".into(),
            source: Box::new(RemoteError {
                place: "https://host/layer".to_owned(),
                problem: Problem::Busy(503),
            }),
        };
        let error = StoreError::Layers {
            first: Arc::new(layer),
            others: 1,
        };
        let failure = cannot_open(Path::new("docker://host/image"), &error);
        assert!(failure.may_pass());
        let text = "2 files are missing or wrong; the first: cannot open layer 1 of 2 in \
                    docker://host/image: https://host/layer: \
                    the server reports a temporary failure (status 503)";
        assert_eq!(failure.causes(), [text]);
    }

    #[test]
    fn an_image_that_is_there_again_is_opened() {
        let mut results = vec![Ok(7), Err(CommandError::new("x").passes_if(true))];
        let opened = attempt_after(&[Duration::ZERO; 3], || results.pop().unwrap());
        assert_eq!(opened.unwrap(), 7);
    }
}
