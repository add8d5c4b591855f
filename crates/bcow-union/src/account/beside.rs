//! What an inode of the host takes beside its data: extended attributes, the targets of symbolic links, the blocks of directories.
//!
//! Counted as ext4 with inodes of 256 bytes stores it, which is what `du` says there; other hosts store as much or less. A target
//! and attributes that fit into the inode count nothing. Where a host says that it stores more, that counts.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::{Mutex, OnceLock, PoisonError};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

use super::{Found, Room};
use crate::sketch::BLOCK_BYTES;
use crate::upper::Attribute;

/// Longest target of a symbolic link that lies in the inode.
const TARGET_INSIDE: u64 = 59;

/// Bytes of attributes that lie in an inode.
const ATTRIBUTES_INSIDE: u64 = 88;

/// What an attribute takes beside its name and its value.
const ENTRY_BYTES: u64 = 16;

/// How many parts the table has, so that changes seldom wait for each other.
const SHARDS: usize = 16;

/// Bytes by inode number, of inodes that take some.
#[derive(Debug)]
pub struct Beside {
    /// Held while an inode is looked at, so that the last look is the one that counts. A leaf.
    shards: [Mutex<HashMap<u64, u64>>; SHARDS],
    footing: OnceLock<Footing>,
}

impl Default for Beside {
    fn default() -> Self {
        Beside {
            shards: std::array::from_fn(|_| Mutex::default()),
            footing: OnceLock::new(),
        }
    }
}

/// What is to be known of the host.
#[derive(Debug, Default)]
pub struct Footing {
    /// Bytes that directories take when an upper is empty, by inode number: they do not count.
    pub spared: Vec<(u64, u64)>,
    /// Whether the smallest attribute takes a block, as inodes have no place for any.
    pub has_small_inodes: bool,
}

impl Beside {
    /// To be said once, before anything is looked at.
    pub fn set_footing(&self, footing: Footing) {
        let _ = self.footing.set(footing);
    }

    /// Looks at an inode of the host, open in any way, and counts the difference to what it took before.
    pub fn settle(&self, file: impl AsFd, room: &mut Room<'_>) -> Result<(), Errno> {
        self.look(file, None, room)
    }

    /// As [`Beside::settle`], of an inode that has `data` bytes of data.
    pub fn count(&self, file: impl AsFd, data: u64, room: &mut Room<'_>) -> Result<(), Errno> {
        self.look(file, Some(data), room)
    }

    fn look(&self, file: impl AsFd, data: Option<u64>, room: &mut Room<'_>) -> Result<(), Errno> {
        let file = file.as_fd();
        let inode = rustix::fs::fstat(file)?.st_ino;
        let mut shard = self.shard(inode);
        let before = shard.get(&inode).copied().unwrap_or(0);
        // Again, with the lock: another may have changed it meanwhile.
        let stat = rustix::fs::fstat(file)?;
        let host = u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
        let attributes = stored_attributes(file)?;
        let has_small_inodes = self.footing().is_some_and(|host| host.has_small_inodes);
        let mut outside = attributes_take(attributes);
        let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        if is_file && attributes > 0 && outside == 0 {
            // A host moves none of them back into the inode when there is room again.
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
                    .saturating_sub(self.spared(inode))
            }
            FileType::Symlink => host.max(target_takes(size) + attributes_take(attributes)),
            _ => host.max(attributes_take(attributes)),
        };
        match now {
            0 => shard.remove(&inode),
            _ => shard.insert(inode, now),
        };
        // Inside the lock, or a look in between would be given back before it is counted.
        match now > before {
            true => room.use_bytes(now - before),
            false => room.account().release(before - now),
        }
        Ok(())
    }

    /// Bytes that an inode took when it was last looked at.
    pub(super) fn of(&self, inode: u64) -> u64 {
        self.shard(inode).get(&inode).copied().unwrap_or(0)
    }

    /// The inode is gone: the bytes that it took.
    pub(super) fn forget(&self, inode: u64) -> u64 {
        self.shard(inode).remove(&inode).unwrap_or(0)
    }

    fn footing(&self) -> Option<&Footing> {
        self.footing.get()
    }

    fn spared(&self, inode: u64) -> u64 {
        let spared = self.footing().map_or(&[][..], |host| &host.spared);
        let found = spared.iter().find(|(number, _)| *number == inode);
        found.map_or(0, |(_, bytes)| *bytes)
    }

    fn shard(&self, inode: u64) -> std::sync::MutexGuard<'_, HashMap<u64, u64>> {
        self.shards[(inode % SHARDS as u64) as usize]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes of data of a regular file, open in any way.
fn data_in(file: BorrowedFd<'_>) -> Result<u64, Errno> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let found = Found::look(&file).map_err(|error| error.errno())?;
    Ok(found.bytes())
}

/// Bytes that the target of a symbolic link takes outside the inode.
pub fn target_takes(length: u64) -> u64 {
    match length {
        0..=TARGET_INSIDE => 0,
        length => length.next_multiple_of(BLOCK_BYTES),
    }
}

/// Bytes that attributes take outside the inode, which are so many by [`attribute_bytes`].
pub fn attributes_take(bytes: u64) -> u64 {
    match bytes {
        0..=ATTRIBUTES_INSIDE => 0,
        bytes => bytes.next_multiple_of(BLOCK_BYTES),
    }
}

/// Bytes of one attribute, whose namespace is stored as a number.
pub fn attribute_bytes(name: &[u8], value: usize) -> u64 {
    let own = match name.iter().position(|&byte| byte == b'.') {
        Some(dot) => name.len() - dot - 1,
        None => name.len(),
    };
    ENTRY_BYTES + (own as u64).next_multiple_of(4) + (value as u64).next_multiple_of(4)
}

/// Bytes of all attributes of a file.
pub fn stored_attributes(file: impl AsFd) -> Result<u64, Errno> {
    let mut at = Attribute::Open(file.as_fd());
    let names = match at.list() {
        // Open as a name only.
        Err(Errno::BADF) => {
            at = Attribute::Path(file.as_fd());
            at.list()?
        }
        names => names?,
    };
    let mut bytes = 0;
    for name in names.split(|&byte| byte == 0) {
        if !name.is_empty()
            && let Some(value) = at.get(name)?
        {
            bytes += attribute_bytes(name, value.len());
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::account::Account;
    use crate::upper::SetHow;

    #[test]
    fn attributes_count_when_they_leave_the_inode_and_until_the_last_is_gone() {
        let file = tempfile::tempfile().unwrap();
        let at = Attribute::Path(file.as_fd());
        if at.set(b"user.a", &[1; 60], SetHow::Any).is_err() {
            // A host without attributes has none to count.
            return;
        }
        let account = Account::new(Some(1 << 20));
        let blocks = || {
            account
                .beside
                .settle(&file, &mut account.no_room())
                .unwrap();
            account.used() / BLOCK_BYTES
        };
        assert_eq!(blocks(), 0);
        at.set(b"user.b", &[1; 60], SetHow::Any).unwrap();
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
                .beside
                .settle(&link, &mut account.no_room())
                .unwrap();
            assert_eq!((account.used(), account.inodes()), (BLOCK_BYTES, 1));
        }
        account.inode_gone(rustix::fs::fstat(&link).unwrap().st_ino);
        assert_eq!((account.used(), account.inodes()), (0, 0));
    }

    #[test]
    fn what_fits_into_an_inode_takes_no_block() {
        assert_eq!((target_takes(59), target_takes(60)), (0, BLOCK_BYTES));
        assert_eq!(attribute_bytes(b"trusted.a", 68), 88);
        assert_eq!((attributes_take(88), attributes_take(89)), (0, BLOCK_BYTES));
        assert_eq!(attributes_take(5000), 2 * BLOCK_BYTES);
    }
}
