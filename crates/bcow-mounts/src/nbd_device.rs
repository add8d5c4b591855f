//! Finds, examines and detaches block devices of the kernel's nbd driver.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bcow_images::error::{CommandError, Context};
use bcow_images::running;
use bcow_nbd::netlink::{Driver, DriverError};

/// How long `detach` waits until the server has closed the disk and ended.
const SERVER_EXIT_TIMEOUT: Duration = Duration::from_secs(60);

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
            return Err(not_nbd(path));
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
            None if major == NBD_MAJOR && name.is_none() => {
                Err(CommandError::new(format!("cannot use {shown}"))
                    .caused_by_text("the kernel has no such device")
                    .hint(NO_DRIVER))
            }
            None => Err(not_nbd(path)),
        }
    }

    /// The number N of /dev/nbdN.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// The ID of the process that attached the device; `None` if the device is not attached.
    pub fn attaching_pid(&self) -> Option<u32> {
        let pid = fs::read_to_string(format!("/sys/block/nbd{}/pid", self.index)).ok()?;
        pid.trim().parse().ok()
    }

    /// Fails if the device is attached.
    pub fn refuse_attached(&self) -> Result<(), CommandError> {
        match self.attaching_pid() {
            None => Ok(()),
            Some(pid) => Err(
                CommandError::new(format!("cannot use {}", self.path.display()))
                    .caused_by_text(format!("it is attached already, by process {pid}"))
                    .hint("detach it with `bcow detach`, or use another device"),
            ),
        }
    }

    /// Describes a use of the device or of a partition of it: a mount in this mount namespace,
    /// swap, or another device on top. A program that has the device open is not found, nor is a
    /// mount whose file system has a device number of its own (btrfs). An error means that the use
    /// is unknown.
    pub fn in_use_by(&self) -> io::Result<Option<String>> {
        let name = format!("nbd{}", self.index);
        find_use(Path::new("/sys/block"), Path::new("/proc"), &name)
    }

    /// Writes the dirty pages of the device to the server and flushes it.
    pub fn flush(&self) -> Result<(), CommandError> {
        File::open(&self.path)
            .and_then(|device| device.sync_all())
            .context(|| format!("cannot flush {}", self.path.display()))
    }

    /// Detaches the device. Data that was not flushed is lost.
    pub fn disconnect(&self) -> Result<(), CommandError> {
        Driver::open()
            .and_then(|mut driver| driver.disconnect(self.index))
            .map_err(|error| driver_failure(&error))
    }
}

/// See [`NbdDevice::in_use_by`]. `blocks` is /sys/block, and `processes` is /proc.
fn find_use(blocks: &Path, processes: &Path, name: &str) -> io::Result<Option<String>> {
    let block = blocks.join(name);
    let mut parts = vec![block.clone()];
    for entry in fs::read_dir(&block).map_err(unreadable(&block))? {
        let entry = entry.map_err(unreadable(&block))?;
        if entry.file_name().to_string_lossy().starts_with(name) {
            parts.push(entry.path());
        }
    }
    let mounts = processes.join("self/mountinfo");
    let mounts = fs::read(&mounts).map_err(unreadable(&mounts))?;
    // A kernel without swap has no such file.
    let swaps = if_there(&processes.join("swaps"), |swaps| fs::read(swaps))?.unwrap_or_default();
    for part in parts {
        let part_name = part.file_name().unwrap_or_default().to_string_lossy();
        // A partition can vanish meanwhile.
        let Some(number) = if_there(&part.join("dev"), |dev| fs::read_to_string(dev))? else {
            continue;
        };
        if let Some(place) = mounted_at(&mounts, number.trim()) {
            return Ok(Some(format!("{part_name} is mounted at {place}")));
        }
        let swap = format!("/dev/{part_name} ");
        let mut swaps = swaps.split(|&byte| byte == b'\n');
        if swaps.any(|line| line.starts_with(swap.as_bytes())) {
            return Ok(Some(format!("{part_name} is used for swap")));
        }
        let first = |holders: &Path| fs::read_dir(holders)?.next().transpose();
        if let Some(holder) = if_there(&part.join("holders"), first)?.flatten() {
            let holder = holder.file_name().to_string_lossy().into_owned();
            return Ok(Some(format!("{part_name} is part of {holder}")));
        }
    }
    Ok(None)
}

/// The result of `read`; `None` if the file does not exist.
fn if_there<T>(path: &Path, read: impl FnOnce(&Path) -> io::Result<T>) -> io::Result<Option<T>> {
    match read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        read => read.map(Some).map_err(unreadable(path)),
    }
}

/// Adds the path to an error.
fn unreadable(path: &Path) -> impl FnOnce(io::Error) -> io::Error {
    move |error| {
        io::Error::new(
            error.kind(),
            format!("cannot read {}: {error}", path.display()),
        )
    }
}

/// The first mountpoint of the device `number` (`MAJOR:MINOR`) in `mounts`, the content of
/// /proc/self/mountinfo. The kernel's escapes, such as `\040`, remain in it.
fn mounted_at(mounts: &[u8], number: &str) -> Option<String> {
    let place = mounts.split(|&byte| byte == b'\n').find_map(|line| {
        let mut fields = line.split(|&byte| byte == b' ');
        (fields.nth(2)? == number.as_bytes())
            .then(|| fields.nth(1))
            .flatten()
    });
    place.map(|place| String::from_utf8_lossy(place).into_owned())
}

/// The major number of nbd devices (linux/major.h).
const NBD_MAJOR: u32 = 43;

const NO_DRIVER: &str = "`modprobe nbd` loads the kernel's nbd driver, and makes its devices";

fn not_nbd(path: &Path) -> CommandError {
    CommandError::new(format!("cannot use {}", path.display()))
        .caused_by_text("it is not a whole device of the nbd driver")
        .hint("they are called /dev/nbd0, /dev/nbd1, and so on")
}

/// The error for a failed request to the driver, with a hint.
pub fn driver_failure(error: &DriverError) -> CommandError {
    let failure = CommandError::of(error);
    match error {
        DriverError::NotLoaded => failure.hint(NO_DRIVER),
        DriverError::NotPermitted => failure.hint("run the command as root"),
        _ => failure,
    }
}

/// Detaches the device with the device file `path`, and waits for the end of its server. With
/// `force`, also if the device is in use, or if the flush fails.
pub fn detach(path: &Path, force: bool) -> Result<(), CommandError> {
    let device = NbdDevice::find(path)?;
    let shown = path.display();
    let Some(server) = device.attaching_pid() else {
        return Err(CommandError::new(format!("{shown} is not attached")));
    };
    let cannot = || CommandError::new(format!("cannot detach {shown}"));
    if !force {
        match device.in_use_by() {
            Ok(None) => {}
            Ok(Some(user)) => {
                let failure = cannot().caused_by_text(user);
                return Err(failure.hint("unmount the device first, or use --force"));
            }
            Err(error) => {
                let failure = cannot().caused_by(&error);
                return Err(failure.hint("--force does not check whether the device is in use"));
            }
        }
    }
    let flushed = device.flush();
    let unflushed = disconnect(flushed, force, || device.disconnect())?;
    // The end of a server of another program is not waited for.
    let name = std::fs::read_to_string(format!("/proc/{server}/comm")).unwrap_or_default();
    let is_free = || {
        device.attaching_pid().is_none()
            && (name.trim() != "bcow" || running::state(server).is_none())
    };
    if !waits_until_free(is_free, SERVER_EXIT_TIMEOUT) {
        return Err(
            CommandError::new(format!("cannot detach {shown} completely"))
                .caused_by_text(format!(
                    "process {server}, which serves it, has not closed the disk within {} seconds",
                    SERVER_EXIT_TIMEOUT.as_secs()
                ))
                .hint("the disk is in use until that process has ended; `bcow ps` shows its state"),
        );
    }
    match unflushed {
        None => Ok(()),
        Some(error) => Err(error.caused_by_text("the device is detached; unwritten data is lost")),
    }
}

/// Disconnects the device after an attempt to flush it. If the flush failed, the device stays
/// attached; with `force` it is disconnected, and the result has the error of the flush.
fn disconnect(
    flushed: Result<(), CommandError>,
    force: bool,
    disconnect: impl FnOnce() -> Result<(), CommandError>,
) -> Result<Option<CommandError>, CommandError> {
    let unflushed = match flushed {
        Err(error) if !force => {
            return Err(error.hint("--force detaches the device, and loses the unwritten data"));
        }
        flushed => flushed.err(),
    };
    disconnect()?;
    Ok(unflushed)
}

/// Waits until the device and its disk are free; `false` if they are still in use after the time.
fn waits_until_free(is_free: impl Fn() -> bool, timeout: Duration) -> bool {
    let end = Instant::now() + timeout;
    while !is_free() {
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_found_by_device_number() {
        // The kernel does not escape bytes that are no UTF-8.
        let mounts = b"22 1 254:0 / / rw - ext4 /dev/vda rw\n\
                       39 22 254:1 / /mnt/\xff rw - ext4 /dev/vdb rw\n\
                       40 22 43:32 / /mnt/a\\040b rw,relatime shared:1 - ext4 /dev/nbd1 rw\n";
        let place = mounted_at(mounts, "43:32");
        assert_eq!(place.as_deref(), Some("/mnt/a\\040b"));
        assert_eq!(mounted_at(mounts, "43:3"), None);
    }

    #[test]
    fn unknown_use_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| {
            let path = directory.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        };
        let remove = |name: &str| fs::remove_file(directory.path().join(name)).unwrap();
        let find = || find_use(directory.path(), &directory.path().join("proc"), "nbd0");
        let error = find().unwrap_err().to_string();
        assert!(
            error.starts_with("cannot read ") && error.contains("/nbd0: "),
            "{error}"
        );
        write("nbd0/dev", b"43:0\n");
        write("nbd0/nbd0p1/dev", b"43:1\n");
        let error = find().unwrap_err().to_string();
        assert!(error.contains("/self/mountinfo: "), "{error}");
        let other = b"22 1 254:0 / / rw - ext4 /dev/vda rw\n";
        write("proc/self/mountinfo", other);
        // Neither a kernel without swap nor a device without holders is an error.
        assert_eq!(find().unwrap(), None);
        write(
            "proc/self/mountinfo",
            b"40 22 43:1 / /mnt/\xff rw - ext4 /dev/nbd0p1 rw\n",
        );
        let user = find().unwrap().unwrap();
        assert_eq!(user, "nbd0p1 is mounted at /mnt/\u{fffd}");
        write("proc/self/mountinfo", other);
        write("proc/swaps", b"Filename Type\n/dev/nbd0p1 partition\n");
        assert_eq!(find().unwrap().unwrap(), "nbd0p1 is used for swap");
        remove("proc/swaps");
        write("nbd0/nbd0p1/holders/dm-0", b"");
        assert_eq!(find().unwrap().unwrap(), "nbd0p1 is part of dm-0");
        remove("nbd0/nbd0p1/holders/dm-0");
        fs::create_dir(directory.path().join("proc/swaps")).unwrap();
        let error = find().unwrap_err().to_string();
        assert!(error.contains("/swaps: "), "{error}");
    }

    #[test]
    fn what_is_no_nbd_device_is_refused() {
        for path in ["/dev/null", "/etc", "/dev/there-is-no-such-device"] {
            assert!(NbdDevice::find(Path::new(path)).is_err(), "{path}");
        }
    }

    #[test]
    fn a_server_that_does_not_end_is_an_error() {
        assert!(waits_until_free(|| true, Duration::ZERO));
        assert!(!waits_until_free(|| false, Duration::ZERO));
    }

    #[test]
    fn failed_flush_keeps_the_device_unless_forced() {
        let error = || CommandError::new("cannot flush the device");
        let run = |flushed, force| {
            let mut disconnected = false;
            let result = disconnect(flushed, force, || {
                disconnected = true;
                Ok(())
            });
            (disconnected, result)
        };
        assert!(matches!(run(Ok(()), false), (true, Ok(None))));
        assert!(matches!(run(Err(error()), false), (false, Err(_))));
        // The failure is reported all the same.
        assert!(matches!(run(Err(error()), true), (true, Ok(Some(_)))));
        let refused = disconnect(Err(error()), true, || {
            Err(CommandError::new("not permitted"))
        });
        assert_eq!(refused.unwrap_err().message(), "not permitted");
    }
}
