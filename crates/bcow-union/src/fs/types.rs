//! What requests say and what they are answered with.

use bcow_erofs::reader::FileType;
use bcow_erofs::tree::Timestamp;

use crate::node::NodeId;

/// Who asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Caller {
    /// Effective user of the file system.
    pub uid: u32,
    /// Effective group of the file system.
    pub gid: u32,
    /// Process.
    pub pid: u32,
    /// Permissions that new files shall not have.
    pub umask: u32,
}

/// An inode's attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes {
    /// Which it is; its `st_ino` too.
    pub node: NodeId,
    /// Type.
    pub kind: FileType,
    /// Permission bits with set-id and sticky bits (`0o7777`).
    pub permissions: u16,
    /// Number of names.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Size in bytes.
    pub size: u64,
    /// Allocated size in units of 512 bytes; what still comes from the image counts as if it were allocated.
    pub sectors: u64,
    /// Of devices, the number in the kernel's 32-bit form.
    pub rdev: u32,
    /// Last access.
    pub atime: Timestamp,
    /// Last change of the content.
    pub mtime: Timestamp,
    /// Last change of anything.
    pub ctime: Timestamp,
}

/// A time to set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetTime {
    /// The present.
    Now,
    /// This.
    At(Timestamp),
}

/// What `set_attributes` changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Changes {
    /// New permission bits.
    pub permissions: Option<u16>,
    /// New owner.
    pub uid: Option<u32>,
    /// New group.
    pub gid: Option<u32>,
    /// New size.
    pub size: Option<u64>,
    /// New time of last access.
    pub atime: Option<SetTime>,
    /// New time of last change.
    pub mtime: Option<SetTime>,
    /// With a new size: take away set-id bits and capabilities, as for a write by somebody without privileges.
    pub drop_privileges: bool,
}

/// Whether a write leaves set-id bits and capabilities as they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Privileges {
    /// The writer may keep set-id bits. Capabilities go, as the host takes them away.
    Keep,
    /// Nobody writes: what was written before comes late, and what had to go went when it was written.
    KeepAll,
    /// Take them away.
    Drop,
}

/// How a rename treats what is at the new name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RenameHow {
    /// Takes its place.
    Replace,
    /// Fails with EEXIST.
    NoReplace,
    /// The two change places.
    Exchange,
}

/// What `sync` makes durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SyncWhat {
    /// The content and what is needed to read it.
    Data,
    /// The attributes too.
    All,
}

/// What `allocate` does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allocate {
    /// Reserves space; the file grows.
    Extend,
    /// Reserves space; the size stays.
    KeepSize,
    /// Makes a hole.
    PunchHole,
    /// Makes zeros; the file grows.
    ZeroExtend,
    /// Makes zeros; the size stays.
    ZeroKeep,
}

/// One name of a directory.
#[derive(Debug, Clone, Copy)]
pub struct Entry<'a> {
    /// Its bytes.
    pub name: &'a [u8],
    /// What it names.
    pub node: NodeId,
    /// Its type.
    pub kind: FileType,
    /// Where to go on behind this entry.
    pub next_cookie: u64,
}

/// One name of a directory, with what it names.
#[derive(Debug, Clone, Copy)]
pub struct EntryPlus<'a> {
    /// Its bytes.
    pub name: &'a [u8],
    /// What it names. For `.` and `..` no reference is counted. In error, for what is damaged, only its id is known;
    /// whoever is shown it forgets it once, as the kernel does.
    pub attributes: Result<Attributes, NodeId>,
    /// Its type.
    pub kind: FileType,
    /// Where to go on behind this entry.
    pub next_cookie: u64,
}

/// Figures of the whole file system, in blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Figures {
    /// Size of a block in bytes.
    pub block_bytes: u32,
    /// Number of blocks.
    pub blocks: u64,
    /// Free blocks.
    pub free: u64,
    /// Free blocks for ordinary users.
    pub available: u64,
    /// Number of inodes.
    pub inodes: u64,
    /// Free inodes.
    pub inodes_free: u64,
}
