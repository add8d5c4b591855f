//! The upper of a writable mount: its files on the host.
//!
//! The tree has overlayfs's format (`Documentation/filesystems/overlayfs.rst`): whiteouts, opaque
//! directories, redirects, origins, metadata copies. Data that overlayfs does not know is in
//! [`META`]. docs/upper.md has the layout.
//!
//! An upper of the kernel driver ([`DiskInstance`], [`DiskReader`]) has no tree, but a disk in
//! [`META`]. [`driver_of`] says which of the two a directory is.
//!
//! [`Instance`] opens the directory for its one writer, [`UpperReader`] for readers. [`Marks`] are
//! the attributes that say what a file of the upper represents. [`Names`] separates the container's
//! attributes from them. [`Override`] stores owners where the host cannot. All files are opened
//! through descriptors, by names relative to them. bcow never follows a symbolic link that a
//! container created.

pub(crate) mod beneath;
mod copy;
mod directory;
mod disk;
mod driver;
mod error;
mod held;
mod instance;
mod lock;
pub mod marks;
mod names;
mod overlap;
mod owner;
mod packed;
mod part;
mod probe;
mod reader;
mod record;
mod snapshots;
mod times;
mod volatile;
pub(crate) mod work;
pub(crate) mod xattr;

pub use disk::{DiskInstance, DiskReader, disk_path, driver_of};
pub use driver::Driver;
pub use error::{MarkError, ReadMarksError, UpperError};
pub use held::HeldUpper;
pub(crate) use held::is_removed;
pub(crate) use instance::Before;
pub use instance::{Instance, Provenance};
pub use marks::{
    Mark, Marks, Metacopy, NlinkDelta, Origin, PartialMark, REDIRECT_NOWHERE, Redirect,
};
pub(crate) use names::{ACCESS_ACL, DEFAULT_ACL};
pub use names::{Names, Namespace, Ownership};
pub use owner::{OVERRIDE, Override, host_mode};
pub(crate) use part::SNAPSHOTS;
pub use part::UnfinishedUpper;
pub use reader::UpperReader;
pub use record::{DiskRecord, FileSystem, ImageName, InstanceRecord, SCHEMA};
pub(crate) use snapshots::NewSnapshot;
pub use snapshots::{
    UpperSnapshot, fork_upper, list_snapshots, recover_snapshots, remove_snapshot, roll_back_upper,
    snapshot_directory, snapshot_path, take_snapshot,
};
pub use times::TimesMark;
pub(crate) use times::modified;
pub(crate) use work::list;
pub(crate) use work::set_noatime_new;
pub use work::{Temporary, is_whiteout};
pub use xattr::{Attribute, XattrMode};

/// The directory in the upper's root for everything that is not part of the tree.
pub const META: &str = ".bcow";

/// The name of an entry of the index or of a map: its number in 16 hexadecimal digits.
pub(crate) fn entry_name(number: u64) -> String {
    format!("{number:016x}")
}

/// The number in the name of an entry of the index or of a map: 16 hexadecimal digits.
pub(crate) fn parse_entry_name(name: &[u8]) -> Option<u64> {
    let digits = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    if name.len() != 16 || !name.iter().all(digits) {
        return None;
    }
    u64::from_str_radix(std::str::from_utf8(name).ok()?, 16).ok()
}
