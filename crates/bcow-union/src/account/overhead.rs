//! The space that an inode of the host takes beside its data: extended attributes, targets of
//! symbolic links, blocks of directories.
//!
//! The count follows ext4 with inodes of 256 bytes, and matches `du` there. Other hosts take more
//! or less. A target or attributes that fit into the inode count as zero. For directories, symbolic
//! links and devices, a larger figure from the host counts instead.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::OnceLock;

use parking_lot::Mutex;
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

use super::{DataBlocks, Reservation};
use crate::blocks::BLOCK_BYTES;
use crate::upper::Attribute;
use crate::upper::xattr::each_name;

/// The longest target of a symbolic link that ext4 stores in the inode, in bytes.
const TARGET_INSIDE: u64 = 59;

/// The bytes of attributes that ext4 stores in the inode.
const ATTRIBUTES_INSIDE: u64 = 88;

/// The bytes that an attribute takes beside its name and value.
const ENTRY_BYTES: u64 = 16;

/// The number of shards of the table. Changes in different shards do not wait for each other.
const SHARDS: usize = 16;

/// The bytes beside the data, by inode number. Inodes with zero bytes have no entry.
#[derive(Debug)]
pub struct Overhead {
    /// Held while an inode is examined, so that the last examination determines the figure. A leaf
    /// lock.
    shards: [Mutex<HashMap<u64, u64>>; SHARDS],
    host: OnceLock<HostInodes>,
}

impl Default for Overhead {
    fn default() -> Self {
        Overhead {
            shards: std::array::from_fn(|_| Mutex::default()),
            host: OnceLock::new(),
        }
    }
}

/// Properties of the host.
#[derive(Debug, Default)]
pub struct HostInodes {
    /// Bytes that the directories of an empty upper take, by inode number. They do not count.
    pub exempt: Vec<(u64, u64)>,
    /// Whether the inodes have no place for attributes, so that the smallest attribute takes a
    /// block.
    pub has_small_inodes: bool,
}

impl Overhead {
    /// Sets the host's properties. Call this once, before any inode is examined.
    pub fn set_host_inodes(&self, host: HostInodes) {
        let _ = self.host.set(host);
    }

    /// Examines an inode of the host and counts the difference to the last examination. `file` may
    /// be open with `O_PATH`.
    pub fn recount(&self, file: impl AsFd, room: &mut Reservation<'_>) -> Result<(), Errno> {
        self.examine(file, None, room)
    }

    /// As [`Overhead::recount`], for an inode whose data takes `data_bytes`.
    pub fn recount_with_data(
        &self,
        file: impl AsFd,
        data_bytes: u64,
        room: &mut Reservation<'_>,
    ) -> Result<(), Errno> {
        self.examine(file, Some(data_bytes), room)
    }

    fn examine(
        &self,
        file: impl AsFd,
        data: Option<u64>,
        room: &mut Reservation<'_>,
    ) -> Result<(), Errno> {
        let file = file.as_fd();
        let inode = rustix::fs::fstat(file)?.st_ino;
        let mut shard = self.shard(inode);
        let before = shard.get(&inode).copied().unwrap_or(0);
        // The second fstat, under the lock: another thread may have changed the inode in the
        // meantime.
        let stat = rustix::fs::fstat(file)?;
        let host = u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
        let attributes = stored_attributes(file)?;
        let has_small_inodes = self.host().is_some_and(|host| host.has_small_inodes);
        let mut outside = attributes_take(attributes);
        let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        if is_file && attributes > 0 && outside == 0 {
            // A host does not move attributes back into the inode when there is room again.
            let is_outside = match data {
                Some(data) => host > data,
                None => before > 0 && host > data_in(file)?,
            };
            if has_small_inodes || is_outside {
                outside = BLOCK_BYTES;
            }
        }
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let now = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => outside,
            FileType::Directory => {
                let entries = size.max(1).next_multiple_of(BLOCK_BYTES);
                host.max(entries + attributes_take(attributes))
                    .saturating_sub(self.exempt(inode))
            }
            FileType::Symlink => host.max(target_takes(size) + attributes_take(attributes)),
            _ => host.max(attributes_take(attributes)),
        };
        match now {
            0 => shard.remove(&inode),
            _ => shard.insert(inode, now),
        };
        // This happens under the lock. Otherwise a concurrent examination could release bytes that
        // are not counted yet.
        if now > before {
            room.use_bytes(now - before)
        } else {
            room.account().release(before - now)
        }
        Ok(())
    }

    /// The bytes of an inode at its last examination.
    pub(super) fn bytes_of(&self, inode: u64) -> u64 {
        self.shard(inode).get(&inode).copied().unwrap_or(0)
    }

    /// Removes the entry of a deleted inode and returns its bytes.
    pub(super) fn forget(&self, inode: u64) -> u64 {
        self.shard(inode).remove(&inode).unwrap_or(0)
    }

    fn host(&self) -> Option<&HostInodes> {
        self.host.get()
    }

    fn exempt(&self, inode: u64) -> u64 {
        let exempt = self.host().map_or(&[][..], |host| &host.exempt);
        let found = exempt.iter().find(|(number, _)| *number == inode);
        found.map_or(0, |(_, bytes)| *bytes)
    }

    fn shard(&self, inode: u64) -> parking_lot::MutexGuard<'_, HashMap<u64, u64>> {
        self.shards[(inode % SHARDS as u64) as usize].lock()
    }
}

/// The bytes of data of a regular file. `file` may be open with `O_PATH`.
fn data_in(file: BorrowedFd<'_>) -> Result<u64, Errno> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let found = DataBlocks::scan(&file).map_err(|error| error.errno())?;
    Ok(found.bytes())
}

/// The bytes that the target of a symbolic link takes outside the inode. `length` is in bytes.
pub fn target_takes(length: u64) -> u64 {
    match length {
        0..=TARGET_INSIDE => 0,
        length => length.next_multiple_of(BLOCK_BYTES),
    }
}

/// The bytes that attributes take outside the inode. `bytes` is their sum by [`attribute_bytes`].
pub fn attributes_take(bytes: u64) -> u64 {
    match bytes {
        0..=ATTRIBUTES_INSIDE => 0,
        bytes => bytes.next_multiple_of(BLOCK_BYTES),
    }
}

/// The bytes of one attribute. The prefix of the name up to the first dot is stored as a number.
pub fn attribute_bytes(name: &[u8], value: usize) -> u64 {
    let own = match name.iter().position(|&byte| byte == b'.') {
        Some(dot) => name.len() - dot - 1,
        None => name.len(),
    };
    ENTRY_BYTES + (own as u64).next_multiple_of(4) + (value as u64).next_multiple_of(4)
}

/// The bytes of all attributes of a file, by [`attribute_bytes`].
pub fn stored_attributes(file: impl AsFd) -> Result<u64, Errno> {
    let mut at = Attribute::Open(file.as_fd());
    let names = match at.list() {
        // The descriptor is open with `O_PATH`.
        Err(Errno::BADF) => {
            at = Attribute::Path(file.as_fd());
            at.list()?
        }
        names => names?,
    };
    let mut bytes = 0;
    for name in each_name(&names) {
        if let Some(value) = at.get(name)? {
            bytes += attribute_bytes(name, value.len());
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::account::Account;
    use crate::upper::XattrMode;

    #[test]
    fn attributes_count_when_they_leave_the_inode_and_until_the_last_is_gone() {
        let file = tempfile::tempfile().unwrap();
        let at = Attribute::Path(file.as_fd());
        if at.set(b"user.a", &[1; 60], XattrMode::Any).is_err() {
            // The host does not support attributes.
            return;
        }
        let account = Account::new(Some(1 << 20));
        let blocks = || {
            account
                .overhead
                .recount(&file, &mut account.unreserved())
                .unwrap();
            account.used() / BLOCK_BYTES
        };
        assert_eq!(blocks(), 0);
        at.set(b"user.b", &[1; 60], XattrMode::Any).unwrap();
        assert_eq!(blocks(), 1);
        at.remove(b"user.a").unwrap();
        assert_eq!(blocks(), 1);
        at.remove(b"user.b").unwrap();
        assert_eq!(blocks(), 0);
    }

    #[test]
    fn an_inode_that_is_gone_takes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("link");
        std::os::unix::fs::symlink("x".repeat(4000), &path).unwrap();
        let account = Account::new(Some(1 << 20));
        let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::NOFOLLOW;
        let link = rustix::fs::open(&path, flags, rustix::fs::Mode::empty()).unwrap();
        account.add_inode();
        for _ in 0..2 {
            account
                .overhead
                .recount(&link, &mut account.unreserved())
                .unwrap();
            assert_eq!((account.used(), account.inodes()), (BLOCK_BYTES, 1));
        }
        account.release_inode(rustix::fs::fstat(&link).unwrap().st_ino);
        assert_eq!((account.used(), account.inodes()), (0, 0));
    }

    #[test]
    fn attributes_inside_the_inode_take_no_block() {
        assert_eq!((target_takes(59), target_takes(60)), (0, BLOCK_BYTES));
        assert_eq!(attribute_bytes(b"trusted.a", 68), 88);
        assert_eq!((attributes_take(88), attributes_take(89)), (0, BLOCK_BYTES));
        assert_eq!(attributes_take(5000), 2 * BLOCK_BYTES);
    }
}
