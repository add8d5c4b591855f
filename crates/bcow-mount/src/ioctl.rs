//! The requests of the loop driver (linux/loop.h). rustix has none of them, so this leaf of the
//! workspace needs `unsafe`.

#![allow(unsafe_code)]

use std::ffi::c_void;
use std::os::fd::AsFd;

use rustix::io::Result;
use rustix::ioctl::{Ioctl, IoctlOutput, NoArg, Opcode, Setter, ioctl};

const GET_FREE: Opcode = 0x4c82;
const CONFIGURE: Opcode = 0x4c0a;
const CLEAR: Opcode = 0x4c01;

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

/// Asks for the number of a free device.
struct GetFree;

// SAFETY: The request takes no argument and returns the number as the result of the call.
unsafe impl Ioctl for GetFree {
    type Output = u32;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        GET_FREE
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::null_mut()
    }

    unsafe fn output_from_ptr(number: IoctlOutput, _: *mut c_void) -> Result<u32> {
        // The kernel's numbers are not negative.
        Ok(number.unsigned_abs())
    }
}

/// The number of a free loop device. The kernel creates a device if all are in use.
pub(crate) fn free_device(control: impl AsFd) -> Result<u32> {
    // SAFETY: See the implementation.
    unsafe { ioctl(control, GetFree) }
}

/// Attaches the file of `config`.
pub(crate) fn configure(device: impl AsFd, config: Config) -> Result<()> {
    // SAFETY: The request reads a `struct loop_config`, whose layout `Config` has.
    unsafe { ioctl(device, Setter::<CONFIGURE, Config>::new(config)) }
}

/// Detaches the file, at once or at the last close of the device.
pub(crate) fn clear(device: impl AsFd) -> Result<()> {
    // SAFETY: The request takes no argument.
    unsafe { ioctl(device, NoArg::<CLEAR>::new()) }
}
