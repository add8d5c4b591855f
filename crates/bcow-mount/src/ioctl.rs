//! The requests of the loop driver (linux/loop.h), those that grow or freeze a mounted file system,
//! one of FUSE, and `truncate(2)`. rustix has none of them, so this leaf of the workspace needs
//! `unsafe`.

#![allow(unsafe_code)]

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::io::{Errno, Result};
use rustix::ioctl::{Getter, NoArg, Opcode, Setter, ioctl, opcode};

const GET_FREE: u16 = 0x4c82;
const CONFIGURE: Opcode = 0x4c0a;
const SET_CAPACITY: Opcode = 0x4c07;
/// `EXT4_IOC_RESIZE_FS`, with the number of blocks.
const EXT4_RESIZE: Opcode = opcode::write::<u64>(b'f', 16);
/// `XFS_IOC_FSGEOMETRY_V1`.
const XFS_GEOMETRY: Opcode = opcode::read::<XfsGeometry>(b'X', 100);
/// `XFS_IOC_FSGROWFSDATA`.
const XFS_GROW: Opcode = opcode::write::<XfsGrowth>(b'X', 110);
/// `FIFREEZE` and `FITHAW`. Their argument has no meaning.
const FREEZE: Opcode = opcode::read_write::<i32>(b'X', 119);
const THAW: Opcode = opcode::read_write::<i32>(b'X', 120);
/// `BTRFS_IOC_RESIZE`.
const BTRFS_RESIZE: Opcode = opcode::write::<BtrfsName>(0x94, 3);

/// `FUSE_DEV_IOC_BACKING_CLOSE`, with the number of the backing file.
const BACKING_CLOSE: Opcode = opcode::write::<u32>(229, 2);

/// Flags of [`Config::flags`].
pub(crate) const READ_ONLY: u32 = 1;
pub(crate) const AUTOCLEAR: u32 = 4;
pub(crate) const DIRECT_IO: u32 = 16;

/// `struct loop_config`, with `struct loop_info64` in it. A zero leaves a choice to the kernel.
#[repr(C)]
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// The descriptor of the file.
    pub(crate) fd: u32,
    /// Logical block size in bytes.
    pub(crate) block_bytes: u32,
    /// Device, inode and so on of the file, which the kernel fills in; then offset and limit.
    numbers: [u64; 5],
    /// Number of the device, type and size of a key.
    more: [u32; 3],
    pub(crate) flags: u32,
    /// Names and key.
    texts: [u8; 160],
    init: [u64; 2],
    reserved: [u64; 8],
}

const _: () = assert!(size_of::<Config>() == 304);
const _: () = assert!(std::mem::offset_of!(Config, flags) == 60);

impl Config {
    pub(crate) fn new(fd: u32, block_bytes: u32, flags: u32) -> Self {
        Config {
            fd,
            block_bytes,
            numbers: [0; 5],
            more: [0; 3],
            flags,
            texts: [0; 160],
            init: [0; 2],
            reserved: [0; 8],
        }
    }
}

/// The number of a free loop device. The kernel creates a device if all are in use.
pub(crate) fn free_device(control: impl AsFd) -> Result<u32> {
    let control = control.as_fd().as_raw_fd();
    // SAFETY: The request takes no argument and returns the number as the result of the call.
    match unsafe { libc::ioctl(control, GET_FREE.into()) } {
        number @ 0.. => Ok(number.unsigned_abs()),
        _ => Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
}

/// Attaches the file of `config`.
pub(crate) fn configure(device: impl AsFd, config: Config) -> Result<()> {
    // SAFETY: The request reads a `struct loop_config`, whose layout `Config` has.
    unsafe { ioctl(device, Setter::<CONFIGURE, Config>::new(config)) }
}

/// Has the device take the size that its file has now.
pub(crate) fn set_capacity(device: impl AsFd) -> Result<()> {
    // SAFETY: The request takes no argument.
    unsafe { ioctl(device, NoArg::<SET_CAPACITY>::new()) }
}

/// `struct xfs_fsop_geom_v1`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct XfsGeometry {
    pub(crate) block_bytes: u32,
    unused: [u32; 6],
    /// How much of the space inodes may take.
    pub(crate) most_inodes_percent: u32,
    pub(crate) blocks: u64,
    rest: [u64; 9],
}

const _: () = assert!(size_of::<XfsGeometry>() == 112);
const _: () = assert!(std::mem::offset_of!(XfsGeometry, blocks) == 32);

/// `struct xfs_growfs_data`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct XfsGrowth {
    blocks: u64,
    most_inodes_percent: u32,
    padding: u32,
}

/// `struct btrfs_ioctl_vol_args`.
#[repr(C)]
struct BtrfsName {
    fd: i64,
    name: [u8; 4088],
}

/// Grows the mounted ext4 that has `directory` to a number of blocks.
pub(crate) fn grow_ext4(directory: impl AsFd, blocks: u64) -> Result<()> {
    // SAFETY: The request reads a number of 64 bits.
    unsafe { ioctl(directory, Setter::<EXT4_RESIZE, u64>::new(blocks)) }
}

/// The geometry of the mounted XFS that has `directory`.
pub(crate) fn xfs_geometry(directory: impl AsFd) -> Result<XfsGeometry> {
    // SAFETY: The request writes a `struct xfs_fsop_geom_v1`, whose layout `XfsGeometry` has.
    unsafe { ioctl(directory, Getter::<XFS_GEOMETRY, XfsGeometry>::new()) }
}

/// Grows the mounted XFS that has `directory` to a number of blocks.
pub(crate) fn grow_xfs(directory: impl AsFd, blocks: u64, most_inodes_percent: u32) -> Result<()> {
    let growth = XfsGrowth {
        blocks,
        most_inodes_percent,
        padding: 0,
    };
    // SAFETY: The request reads a `struct xfs_growfs_data`, whose layout `XfsGrowth` has.
    unsafe { ioctl(directory, Setter::<XFS_GROW, XfsGrowth>::new(growth)) }
}

/// Grows the mounted Btrfs that has `directory` to the size of its first device.
pub(crate) fn grow_btrfs(directory: impl AsFd) -> Result<()> {
    let mut name = [0; 4088];
    name[..3].copy_from_slice(b"max");
    let name = BtrfsName { fd: 0, name };
    // SAFETY: The request reads a `struct btrfs_ioctl_vol_args`, whose layout `BtrfsName` has. The
    // name ends with a zero.
    unsafe { ioctl(directory, Setter::<BTRFS_RESIZE, BtrfsName>::new(name)) }
}

/// Freezes the mounted file system that has `directory`.
pub(crate) fn freeze(directory: impl AsFd) -> Result<()> {
    // SAFETY: The request ignores its argument.
    unsafe { ioctl(directory, NoArg::<FREEZE>::new()) }
}

/// Ends [`freeze`].
pub(crate) fn thaw(directory: impl AsFd) -> Result<()> {
    // SAFETY: As above.
    unsafe { ioctl(directory, NoArg::<THAW>::new()) }
}

/// Closes the backing file `number` of the FUSE mount at the other end of `connection`.
pub(crate) fn close_backing(connection: impl AsFd, number: u32) -> Result<()> {
    // SAFETY: The request reads a number of 32 bits.
    unsafe { ioctl(connection, Setter::<BACKING_CLOSE, u32>::new(number)) }
}

/// Sets the size of the file at `path`, without opening it.
pub(crate) fn truncate(path: &Path, bytes: u64) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let bytes = i64::try_from(bytes).map_err(|_| io::ErrorKind::FileTooLarge)?;
    // SAFETY: The call reads a string that ends with a zero.
    match unsafe { libc::truncate(path.as_ptr(), bytes) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
