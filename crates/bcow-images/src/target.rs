//! What has snapshots: disks, uppers, and the directories where they are mounted.

use std::path::{Path, PathBuf};

use bcow_union::{Driver, recover_snapshots};

use crate::disks::{is_disk, lock_note};
use crate::error::{CommandError, Context};
use crate::name::Name;
use crate::running;
use crate::snapshots::{disk_path, find_snapshot};
use crate::upper::cannot_use;

/// Something that can have snapshots.
#[derive(Debug, Clone)]
pub enum Target {
    /// A disk.
    Disk(Name),
    /// The upper of a writable mount, with links resolved.
    Upper(PathBuf),
}

impl Target {
    /// What `name` leads to: a disk, an upper, or a directory where either is mounted.
    pub fn of(name: &Name) -> Result<Target, CommandError> {
        let path = name.path().unwrap_or(name.shown());
        if !path.is_dir() {
            return Ok(Target::Disk(name.clone()));
        }
        let cannot = || format!("cannot open {}", name.display());
        let path = path.canonicalize().context(cannot)?;
        match running::mount_at(&path) {
            Some((_, mount)) => match mount.upper {
                Some(upper) => Target::of_upper(Path::new(&upper)),
                None if is_disk(Path::new(&mount.image)) => {
                    Ok(Target::Disk(Name::file(Path::new(&mount.image))))
                }
                None => Err(CommandError::new(cannot())
                    .caused_by_text("the mount is read-only, and has no upper")),
            },
            None => Target::of_upper(&path),
        }
    }

    fn of_upper(path: &Path) -> Result<Target, CommandError> {
        let cannot = || format!("cannot open {}", path.display());
        match bcow_union::driver_of(path).map_err(|error| cannot_use(&error))? {
            Some(driver) => {
                if driver == Driver::Fuse {
                    recover_snapshots(path, &lock_note("snapshot"));
                }
                Ok(Target::Upper(path.canonicalize().context(cannot)?))
            }
            None => Err(CommandError::new(cannot())
                .caused_by_text("it is no mount of bcow, and no upper of one")),
        }
    }

    /// As [`Target::of`], also for `TARGET@NAME` of a mount or an upper. Of a disk, that is the
    /// name of a file.
    pub fn with_snapshot(name: &Name) -> Result<(Target, Option<String>), CommandError> {
        let path = name.path().unwrap_or(name.shown());
        let text = path.to_str().unwrap_or_default();
        match text.rsplit_once('@') {
            Some((of, snapshot)) if !path.exists() && Path::new(of).is_dir() => {
                let target = Target::of(&Name::file(Path::new(of)))?;
                match target {
                    Target::Disk(disk) => {
                        let path = find_snapshot(of, &disk_path(&disk)?, snapshot)?;
                        Ok((Target::Disk(Name::file(&path)), None))
                    }
                    upper => Ok((upper, Some(snapshot.to_owned()))),
                }
            }
            _ => Ok((Target::of(name)?, None)),
        }
    }
}
