//! Finds, examines and detaches block devices of the kernel's nbd driver.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use bcow_nbd::netlink::{Driver, DriverError};

use crate::error::{CommandError, Context};

/// A device /dev/nbdN.
#[derive(Debug, Clone)]
pub struct NbdDevice {
    path: PathBuf,
    index: u32,
}

impl NbdDevice {
    /// The device with the device file `path`. Fails if `path` is no device of the nbd driver.
    pub fn find(path: &Path) -> Result<Self, CommandError> {
        let shown = path.display();
        let metadata = fs::metadata(path).map_err(|error| {
            let failure = CommandError::new(format!("cannot use {shown}")).caused_by(&error);
            match error.kind() {
                io::ErrorKind::NotFound => failure.hint(NO_DRIVER),
                _ => failure,
            }
        })?;
        if !metadata.file_type().is_block_device() {
            return Err(no_device(path));
        }
        let number = metadata.rdev();
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        // The kernel's name of the device. The device file can have any other name.
        let name = fs::read_link(format!("/sys/dev/block/{major}:{minor}"))
            .ok()
            .and_then(|link| Some(link.file_name()?.to_str()?.to_owned()));
        let index = name
            .as_deref()
            .and_then(|name| name.strip_prefix("nbd"))
            .and_then(|index| index.parse().ok());
        match index {
            Some(index) => Ok(NbdDevice {
                path: path.to_owned(),
                index,
            }),
            None if major == MAJOR && name.is_none() => {
                Err(CommandError::new(format!("cannot use {shown}"))
                    .caused_by_text("the kernel has no such device")
                    .hint(NO_DRIVER))
            }
            None => Err(no_device(path)),
        }
    }

    /// The number N of /dev/nbdN.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// The ID of the process that attached the device; `None` if the device is not attached.
    pub fn attached_by(&self) -> Option<u32> {
        let pid = fs::read_to_string(format!("/sys/block/nbd{}/pid", self.index)).ok()?;
        pid.trim().parse().ok()
    }

    /// Fails if the device is attached.
    pub fn refuse_attached(&self) -> Result<(), CommandError> {
        match self.attached_by() {
            None => Ok(()),
            Some(pid) => Err(
                CommandError::new(format!("cannot use {}", self.path.display()))
                    .caused_by_text(format!("it is attached already, by process {pid}"))
                    .hint("`bcow detach` frees it; or take another one"),
            ),
        }
    }

    /// Describes a use of the device or of a partition of it: a mount in this mount namespace,
    /// swap, or another device on top. A program that has the device open is not found, nor is a
    /// mount whose file system has a device number of its own (btrfs).
    pub fn in_use_by(&self) -> Option<String> {
        let name = format!("nbd{}", self.index);
        let block = PathBuf::from("/sys/block").join(&name);
        let mut parts = vec![block.clone()];
        for entry in fs::read_dir(&block).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with(&name) {
                parts.push(entry.path());
            }
        }
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
        parts.iter().find_map(|part| {
            let number = fs::read_to_string(part.join("dev")).ok()?;
            let part_name = part.file_name()?.to_string_lossy().into_owned();
            mounted_at(&mounts, number.trim())
                .map(|place| format!("{part_name} is mounted at {place}"))
                .or_else(|| {
                    let swap = format!("/dev/{part_name} ");
                    swaps
                        .lines()
                        .any(|line| line.starts_with(&swap))
                        .then(|| format!("{part_name} is used for swap"))
                })
                .or_else(|| {
                    let holder = fs::read_dir(part.join("holders")).ok()?.next()?.ok()?;
                    let holder = holder.file_name().to_string_lossy().into_owned();
                    Some(format!("{part_name} is part of {holder}"))
                })
        })
    }

    /// Writes the dirty pages of the device to the server and flushes it, then detaches the device.
    /// If the flush fails, the device stays attached.
    pub fn detach(&self) -> Result<(), CommandError> {
        File::open(&self.path)
            .and_then(|device| device.sync_all())
            .context(|| format!("cannot flush {}", self.path.display()))?;
        Driver::open()
            .and_then(|mut driver| driver.disconnect(self.index))
            .map_err(|error| driver_failure(&error))
    }
}

/// The first mountpoint of the device `number` (`MAJOR:MINOR`) in `mounts`, the content of
/// /proc/self/mountinfo. The kernel's escapes, such as `\040`, remain in it.
fn mounted_at<'a>(mounts: &'a str, number: &str) -> Option<&'a str> {
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ');
        (fields.nth(2)? == number).then(|| fields.nth(1)).flatten()
    })
}

/// The major number of nbd devices (linux/major.h).
const MAJOR: u32 = 43;

const NO_DRIVER: &str = "`modprobe nbd` loads the kernel's nbd driver, and makes its devices";

fn no_device(path: &Path) -> CommandError {
    CommandError::new(format!("cannot use {}", path.display()))
        .caused_by_text("it is no device of the nbd driver")
        .hint("they are called /dev/nbd0, /dev/nbd1, and so on")
}

/// The error for a failed request to the driver, with a hint.
pub fn driver_failure(error: &DriverError) -> CommandError {
    let failure = CommandError::new(error.to_string());
    let failure = match std::error::Error::source(error) {
        Some(source) => failure.caused_by(source),
        None => failure,
    };
    match error {
        DriverError::NotLoaded => failure.hint(NO_DRIVER),
        DriverError::NotPermitted => failure.hint("run it as root"),
        _ => failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_found_by_device_number() {
        let mounts = "22 1 254:0 / / rw - ext4 /dev/vda rw\n\
                      40 22 43:32 / /mnt/a\\040b rw,relatime shared:1 - ext4 /dev/nbd1 rw\n";
        assert_eq!(mounted_at(mounts, "43:32"), Some("/mnt/a\\040b"));
        assert_eq!(mounted_at(mounts, "43:3"), None);
    }

    #[test]
    fn what_is_no_nbd_device_is_refused() {
        for path in ["/dev/null", "/etc", "/dev/there-is-no-such-device"] {
            assert!(NbdDevice::find(Path::new(path)).is_err(), "{path}");
        }
    }
}
