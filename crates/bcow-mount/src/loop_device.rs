//! Loop devices.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::Error;
use crate::ioctl::{self, Config};
use crate::name::HiddenName;

/// Logical block size of each device in bytes: the smallest of Linux. So programs can use
/// `O_DIRECT` with the alignment of an ordinary hard disk. A file system with larger blocks still
/// sends whole ones.
const BLOCK_BYTES: u32 = 512;
/// Each time that another process takes the free device first, the next one is asked for.
const MAX_RACES: u32 = 64;

/// Whether a loop device can be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    ReadOnly,
    ReadWrite,
}

impl Access {
    pub(crate) fn flags(self) -> OFlags {
        match self {
            Access::ReadOnly => OFlags::RDONLY,
            Access::ReadWrite => OFlags::RDWR,
        }
    }
}

/// An attached loop device. The kernel detaches the file when neither this nor a mount nor another
/// process has the device open any more, even if this process is killed.
#[derive(Debug)]
pub struct LoopDevice {
    number: u32,
    path: PathBuf,
    device: OwnedFd,
}

impl LoopDevice {
    /// Attaches `file` to a free device, with direct I/O if the file allows it.
    pub fn attach(file: impl AsFd, access: Access) -> Result<Self, Error> {
        let control = |action| {
            move |errno: Errno| Error::Control {
                action,
                source: errno.into(),
            }
        };
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let controller =
            rustix::fs::open("/dev/loop-control", flags, Mode::empty()).map_err(control("open"))?;
        for _ in 0..MAX_RACES {
            let number = ioctl::free_device(&controller).map_err(control("get a device from"))?;
            match Self::attach_to(number, file.as_fd(), access) {
                Attempt::Attached(device) => return Ok(device),
                Attempt::Busy => {}
                // A static /dev, as in a container, lacks the nodes of devices that are made later.
                Attempt::NoNode => return Self::attach_to_any_node(file.as_fd(), access),
                Attempt::Failed(error) => return Err(error),
            }
        }
        Err(Error::NoFreeDevice)
    }

    /// Tries the devices that `/dev` has nodes of, one after the other.
    fn attach_to_any_node(file: impl AsFd, access: Access) -> Result<Self, Error> {
        let entries = std::fs::read_dir("/dev").into_iter().flatten().flatten();
        let mut numbers: Vec<u32> = entries
            .filter_map(|entry| number_in(entry.file_name().to_str()?))
            .collect();
        numbers.sort_unstable();
        for number in numbers {
            match Self::attach_to(number, file.as_fd(), access) {
                Attempt::Attached(device) => return Ok(device),
                Attempt::Busy | Attempt::NoNode => {}
                Attempt::Failed(error) => return Err(error),
            }
        }
        Err(Error::NoFreeDevice)
    }

    fn attach_to(number: u32, file: impl AsFd, access: Access) -> Attempt {
        let path = PathBuf::from(format!("/dev/loop{number}"));
        let failed = |action, errno| Attempt::Failed(Error::of_loop(action, &path)(errno));
        let flags = access.flags() | OFlags::CLOEXEC;
        let device = match rustix::fs::open(&path, flags, Mode::empty()) {
            Ok(device) => device,
            Err(Errno::NOENT | Errno::NXIO | Errno::NODEV) => return Attempt::NoNode,
            Err(Errno::BUSY) => return Attempt::Busy,
            Err(errno) => return failed("open", errno),
        };
        let mut flags = ioctl::AUTOCLEAR | ioctl::DIRECT_IO;
        if access == Access::ReadOnly {
            flags |= ioctl::READ_ONLY;
        }
        // Descriptors are not negative.
        let fd = file.as_fd().as_raw_fd().unsigned_abs();
        match ioctl::configure(&device, Config::new(fd, BLOCK_BYTES, flags)) {
            Ok(()) => {}
            Err(Errno::BUSY) => return Attempt::Busy,
            Err(errno) => return failed("attach the disk to", errno),
        }
        let attached = LoopDevice {
            number,
            path,
            device,
        };
        // The kernel falls back to buffered I/O silently. That is correct, but caches pages twice.
        if !attached.has_direct_io() {
            tracing::warn!("{} has no direct I/O", attached.path.display());
        }
        Attempt::Attached(attached)
    }

    /// Opens the device at `path`, as the one behind which the hidden file `name` is. As long as
    /// this lives, the kernel gives the device to no other file.
    pub fn of_mount(path: &Path, name: &HiddenName) -> Result<Self, Error> {
        let replaced = || Error::Replaced {
            device: path.to_owned(),
        };
        let number = path.to_str().and_then(|path| path.strip_prefix("/dev/"));
        let number = number.and_then(number_in).ok_or_else(replaced)?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let device =
            rustix::fs::open(path, flags, Mode::empty()).map_err(Error::of_loop("open", path))?;
        if backing_of(path).as_ref() == Some(name) {
            Ok(LoopDevice {
                number,
                path: path.to_owned(),
                device,
            })
        } else {
            Err(replaced())
        }
    }

    /// Takes the size that the file has now.
    pub fn take_size_of_file(&self) -> Result<(), Error> {
        ioctl::set_capacity(&self.device).map_err(Error::of_loop("change the size of", &self.path))
    }

    /// The path of its node.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether requests bypass the page cache of the file below.
    pub fn has_direct_io(&self) -> bool {
        sysfs(self.number, "dio").is_some_and(|value| value.trim() == "1")
    }
}

/// The result of a try to attach a file to one device.
enum Attempt {
    Attached(LoopDevice),
    /// Another process has the device.
    Busy,
    /// `/dev` has no node of it, or the node has no device.
    NoNode,
    Failed(Error),
}

/// The hidden file behind the loop device `source` (`/dev/loopN`), if it is one of bcow's.
pub fn backing_of(source: &Path) -> Option<HiddenName> {
    HiddenName::parse(&file_behind(source)?)
}

/// Whether the process behind the loop device `source` answers. Waits for a process that hangs. A
/// device that this user may not read counts as served.
pub fn is_served(source: &Path) -> bool {
    /// A direct read needs an aligned buffer.
    #[repr(align(4096))]
    struct Page([u8; 4096]);
    let mut page = Page([0; 4096]);
    let flags = OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC;
    match rustix::fs::open(source, flags, Mode::empty()) {
        Ok(device) => rustix::io::read(device, &mut page.0) != Err(Errno::IO),
        Err(_) => true,
    }
}

/// The file behind the loop device `source` (`/dev/loopN`), as the kernel shows its path.
pub(crate) fn file_behind(source: &Path) -> Option<String> {
    let number = number_in(source.to_str()?.strip_prefix("/dev/")?)?;
    let text = sysfs(number, "backing_file")?;
    Some(text.strip_suffix('\n').unwrap_or(&text).to_owned())
}

fn sysfs(number: u32, attribute: &str) -> Option<String> {
    std::fs::read_to_string(format!("/sys/block/loop{number}/loop/{attribute}")).ok()
}

/// N of `loopN`.
fn number_in(name: &str) -> Option<u32> {
    let digits = name.strip_prefix("loop")?;
    digits.parse().ok().filter(|_| !digits.starts_with('+'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_devices_have_a_number() {
        assert_eq!(number_in("loop0"), Some(0));
        assert_eq!(number_in("loop17"), Some(17));
        for other in ["loop", "loop-control", "loop0p1", "sda", "loop+1"] {
            assert_eq!(number_in(other), None, "{other}");
        }
    }

    #[test]
    fn device_of_another_program_has_no_hidden_file() {
        assert_eq!(backing_of(Path::new("/dev/sda")), None);
        assert_eq!(backing_of(Path::new("/dev/loop4294967295")), None);
        assert_eq!(backing_of(Path::new("loop0")), None);
    }
}
