//! Counts the content of an upper when it is opened.

use std::collections::HashSet;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::fs::{Dir, FileType, Mode, OFlags};
use rustix::io::Errno;

use super::host;
use super::orphans::PREFIX;
use crate::account::{Account, ChargeError, DataBlocks, HostInodes};
use crate::blocks::BLOCK_BYTES;
use crate::upper::beneath::open_directory_beneath;
use crate::upper::{Attribute, Instance, META, Mark, PartialMark, XattrMode, is_whiteout, list};

/// Counts the bytes and inodes that an upper stores. Each inode counts once. Whiteouts are links to
/// shared inodes and count only as names. The parts of an empty upper do not count.
pub(super) fn count_stored(upper: &Instance, account: &Arc<Account>) -> Result<(), Errno> {
    let inode = |directory: BorrowedFd<'_>| Ok::<_, Errno>(rustix::fs::fstat(directory)?.st_ino);
    account.overhead.set_host_inodes(HostInodes {
        exempt: vec![
            // Two blocks: the root also has the attributes of the image's root.
            (inode(upper.root())?, 2 * BLOCK_BYTES),
            (inode(upper.index())?, BLOCK_BYTES),
            (inode(upper.maps())?, BLOCK_BYTES),
        ],
        has_small_inodes: has_small_inodes(upper)?,
    });
    let mut count = Count {
        account,
        partial_mark: Mark::Partial.name(upper.namespace()),
        seen: HashSet::new(),
    };
    count.maps(upper)?;
    count.tree(upper)?;
    count.index(upper)?;
    count.orphans(upper)
}

struct Count<'a> {
    account: &'a Arc<Account>,
    partial_mark: &'static [u8],
    /// Counted inodes that have several names.
    seen: HashSet<u64>,
}

impl Count<'_> {
    fn tree(&mut self, upper: &Instance) -> Result<(), Errno> {
        // By path: there may be more directories than descriptors.
        let mut todo = vec![Vec::new()];
        while let Some(path) = todo.pop() {
            let directory = open_directory_beneath(upper.root(), &path)?;
            self.overhead(&directory, 0)?;
            for entry in Dir::read_from(&directory)? {
                let entry = entry?;
                let name = entry.file_name().to_bytes();
                if matches!(name, b"." | b"..") || path.is_empty() && name == META.as_bytes() {
                    continue;
                }
                if !self.entry(&directory, name)? {
                    continue;
                }
                todo.push(if path.is_empty() {
                    name.to_vec()
                } else {
                    [&path, &b"/"[..], name].concat()
                });
            }
        }
        Ok(())
    }

    /// Counts files without a name that programs use, after another process has ended.
    fn orphans(&mut self, upper: &Instance) -> Result<(), Errno> {
        for name in list(upper.work())? {
            if name.starts_with(PREFIX.as_bytes()) {
                self.entry(upper.work(), &name)?;
            }
        }
        Ok(())
    }

    /// Counts files whose only name may be in the index.
    fn index(&mut self, upper: &Instance) -> Result<(), Errno> {
        self.overhead(upper.index(), 0)?;
        for entry in Dir::read_from(upper.index())? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if !matches!(name, b"." | b"..") {
                self.entry(upper.index(), name)?;
            }
        }
        Ok(())
    }

    fn maps(&mut self, upper: &Instance) -> Result<(), Errno> {
        self.overhead(upper.maps(), 0)?;
        for entry in Dir::read_from(upper.maps())? {
            let entry = entry?;
            let id = entry.file_name().to_str().ok();
            let id = id.and_then(|name| u64::from_str_radix(name, 16).ok());
            let stat = host::stat_at(upper.maps(), entry.file_name().to_bytes())?;
            if let (Some(id), Some(stat)) = (id, stat) {
                let bytes = u64::try_from(stat.st_size).unwrap_or(0);
                self.account
                    .add_map(id, bytes, &mut self.account.unreserved());
            }
        }
        Ok(())
    }

    /// Counts the inode of a name. Gives whether it is a directory, whose bytes are counted when it
    /// is opened.
    fn entry(&mut self, directory: impl AsFd, name: &[u8]) -> Result<bool, Errno> {
        let directory = directory.as_fd();
        let Some(stat) = host::stat_at(directory, name)? else {
            return Ok(false);
        };
        let kind = FileType::from_raw_mode(stat.st_mode);
        let is_counted =
            kind != FileType::Directory && stat.st_nlink > 1 && !self.seen.insert(stat.st_ino);
        if is_counted || is_whiteout(&stat) {
            return Ok(false);
        }
        self.account.add_inode();
        match kind {
            FileType::Directory => return Ok(true),
            FileType::RegularFile => {
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
                let file = rustix::fs::openat(directory, name, flags, Mode::empty())?;
                let file = File::from(file);
                self.bytes(&file).map_err(|error| error.errno())?;
            }
            _ => {
                if let Some(file) = host::open_path(directory, name)? {
                    self.overhead(&file, 0)?;
                }
            }
        }
        Ok(false)
    }

    fn bytes(&self, file: &File) -> Result<(), ChargeError> {
        if self.account.limit().is_none() {
            return Ok(());
        }
        let found = DataBlocks::scan(file)?;
        let failed = |errno: Errno| ChargeError::host("read its attributes")(errno.into());
        let names = Attribute::Open(file.as_fd()).list().map_err(failed)?;
        if !names.is_empty() {
            self.overhead(file, found.bytes()).map_err(failed)?;
        }
        if names
            .split(|&byte| byte == 0)
            .any(|name| name == self.partial_mark)
        {
            self.unwritten_map(file).map_err(failed)?;
        }
        found.count(file, self.account)
    }

    /// Counts the map of a partial file, also if the first flush has not created it yet.
    fn unwritten_map(&self, file: &File) -> Result<(), Errno> {
        let value = Attribute::Open(file.as_fd()).get(self.partial_mark)?;
        // A partial file with an invalid mark has no map.
        if let Some(Ok(mark)) = value.map(|value| PartialMark::decode(&value)) {
            let mut room = self.account.unreserved();
            self.account.add_map(mark.id, BLOCK_BYTES, &mut room);
        }
        Ok(())
    }

    fn overhead(&self, file: impl AsFd, data: u64) -> Result<(), Errno> {
        let mut room = self.account.unreserved();
        self.account
            .overhead
            .recount_with_data(file, data, &mut room)
    }
}

/// Whether the host's inodes are too small for any attribute, so that the first one takes a block.
fn has_small_inodes(upper: &Instance) -> Result<bool, Errno> {
    let (temporary, file) = upper.temporary_file(0o600)?;
    let name = upper.names().stored_name(b"user.x");
    Attribute::Open(file.as_fd()).set(&name, b"x", XattrMode::Any)?;
    let stat = rustix::fs::fstat(&file)?;
    drop(temporary);
    Ok(stat.st_blocks > 0)
}
