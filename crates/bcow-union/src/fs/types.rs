//! Arguments and answers of requests.

use bcow_erofs::reader::{FileType, Inode};
use bcow_erofs::tree::{DeviceNumber, Timestamp};

use crate::node::NodeId;

/// The process that makes a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Caller {
    /// Effective user id (`fsuid`).
    pub uid: u32,
    /// Effective group id (`fsgid`).
    pub gid: u32,
    /// Process id.
    pub pid: u32,
    /// Permission bits that new files do not get.
    pub umask: u32,
}

/// An inode's attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes {
    /// Node id, which is also `st_ino`.
    pub node: NodeId,
    pub kind: FileType,
    /// Permission bits with the set-id and sticky bits (`0o7777`).
    pub permissions: u16,
    /// Number of names (links).
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Size in bytes.
    pub size: u64,
    /// Allocated size in units of 512 bytes. Data that still comes from the image counts as
    /// allocated.
    pub sectors: u64,
    /// Device number in the kernel's 32-bit form; 0 for inodes that are not devices.
    pub rdev: u32,
    /// Time of last access.
    pub atime: Timestamp,
    /// Time of last change of the content.
    pub mtime: Timestamp,
    /// Time of last change of content or attributes.
    pub ctime: Timestamp,
}

impl Attributes {
    /// The attributes of an inode of the image, with its allocated size.
    pub fn of_inode(node: NodeId, inode: &Inode, sectors: u64) -> Self {
        Attributes {
            node,
            kind: inode.kind,
            permissions: inode.permissions,
            nlink: inode.nlink,
            uid: inode.uid,
            gid: inode.gid,
            size: inode.size,
            sectors,
            rdev: inode.rdev.map_or(0, encode_device),
            // EROFS stores one time per inode; the kernel's driver also shows it as all three
            // times.
            atime: inode.mtime,
            mtime: inode.mtime,
            ctime: inode.mtime,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetTime {
    /// The current time.
    Now,
    /// This time.
    At(Timestamp),
}

/// The attributes that `set_attributes` changes; `None` leaves one as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Changes {
    /// New permission bits.
    pub permissions: Option<u16>,
    /// New owner.
    pub uid: Option<u32>,
    /// New group.
    pub gid: Option<u32>,
    /// New size in bytes.
    pub size: Option<u64>,
    /// New time of last access.
    pub atime: Option<SetTime>,
    /// New time of last change of the content.
    pub mtime: Option<SetTime>,
    /// With a new size: remove set-id bits and capabilities, as for a write without privileges.
    pub drop_privileges: bool,
}

/// Whether a write leaves set-id bits and capabilities as they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Privileges {
    /// The writer may keep set-id bits. Capabilities go, because the host removes them.
    Keep,
    /// Late write-back of data: keeps both. The original write has already removed what it had to
    /// remove.
    KeepAll,
    /// The write removes both.
    Drop,
}

/// How a rename treats an existing object at the new name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RenameMode {
    /// The rename replaces it.
    Replace,
    /// The rename fails with EEXIST.
    NoReplace,
    /// The two objects exchange their names.
    Exchange,
}

/// What `sync` makes durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SyncScope {
    /// The content and the metadata needed to read it (`fdatasync`).
    Data,
    /// All attributes too (`fsync`).
    All,
}

/// Operation of `allocate`, as of `fallocate(2)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allocate {
    /// Reserves space; the file may grow.
    Extend,
    /// Reserves space; the size does not change.
    KeepSize,
    /// Makes a hole; the size does not change.
    PunchHole,
    /// Makes a range of zeros; the file may grow.
    ZeroExtend,
    /// Makes a range of zeros; the size does not change.
    ZeroKeep,
}

#[derive(Debug, Clone, Copy)]
pub struct DirectoryEntry<'a> {
    /// Bytes of the name.
    pub name: &'a [u8],
    /// The node that it names.
    pub node: NodeId,
    /// Type of the node.
    pub kind: FileType,
    /// Cookie from which a listing continues after this entry.
    pub next_cookie: u64,
}

/// An entry of a directory, with attributes.
#[derive(Debug, Clone, Copy)]
pub struct EntryPlus<'a> {
    /// Bytes of the name.
    pub name: &'a [u8],
    /// Attributes of the named node. `.` and `..` count no reference. `Err` is a damaged node, of
    /// which only the id is known: the receiver of the entry forgets it once, as the kernel does.
    pub attributes: Result<Attributes, NodeId>,
    /// Type of the node.
    pub kind: FileType,
    /// Cookie from which a listing continues after this entry.
    pub next_cookie: u64,
}

/// Figures of the whole file system (`statfs`), in blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Figures {
    /// Size of a block in bytes.
    pub block_bytes: u32,
    /// Number of blocks.
    pub blocks: u64,
    /// Free blocks.
    pub free: u64,
    /// Free blocks available to users without privileges.
    pub available: u64,
    /// Number of inodes.
    pub inodes: u64,
    pub inodes_free: u64,
}

/// The kernel's 32-bit form of a device number (`new_encode_dev`), from the lowest bit: minor bits
/// 0-7, then 12 bits of major, then minor bits 8-19.
pub fn encode_device(device: DeviceNumber) -> u32 {
    (device.minor & 0xff) | (device.major << 8) | ((device.minor & !0xff) << 12)
}

/// The reverse of [`encode_device`].
pub(super) fn decode_device(rdev: u32) -> DeviceNumber {
    DeviceNumber {
        major: (rdev >> 8) & 0xfff,
        minor: (rdev & 0xff) | ((rdev >> 12) & 0xf_ff00),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_number_is_encoded_as_the_kernel_decodes_it() {
        for (major, minor, encoded) in [
            (1, 3, 0x103),
            (0xfff, 0xfffff, 0xffff_ffff),
            (8, 0x12345, 0x1230_0845),
        ] {
            let number = DeviceNumber { major, minor };
            assert_eq!(encode_device(number), encoded);
            assert_eq!(decode_device(encoded), number);
        }
    }
}
