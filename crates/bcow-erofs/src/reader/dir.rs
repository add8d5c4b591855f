//! Directories: lookup and listing.

use std::cmp::Ordering;
use std::ops::ControlFlow;

use zerocopy::FromBytes;

use super::{DirectoryProblem, ErofsError, FileType, Filesystem, Inode, Nid};
use crate::format::{BLOCK_BYTES, Dirent, NAME_MAX, UNKNOWN_TYPE};

const DIRENT: usize = size_of::<Dirent>();

/// A directory entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirEntry<'a> {
    /// The inode's number. It is not validated; [`Filesystem::inode`] validates it.
    pub nid: Nid,
    /// The name, 1..=255 bytes without slash and NUL.
    pub name: &'a [u8],
    /// The type in the directory entry.
    pub kind: FileType,
    /// The cookie from which [`Filesystem::read_dir`] continues behind this entry.
    pub next_cookie: u64,
}

impl Filesystem {
    /// Finds a name in a directory, including `.` and `..`. Reads about log2(blocks) blocks.
    pub fn lookup<'n>(
        &self,
        dir: &Inode,
        name: &'n [u8],
    ) -> Result<Option<DirEntry<'n>>, ErofsError> {
        dir.require(FileType::Directory, "directory")?;
        if !valid_name(name) {
            return Ok(None);
        }
        let mut buf = [0; BLOCK_BYTES];
        let (mut low, mut high) = (0, dir.size.div_ceil(self.block_bytes()));
        while low < high {
            let middle = low + (high - low) / 2;
            let block = self.directory_block(dir, middle, &mut buf)?;
            if name < block.name(0)? {
                high = middle;
            } else if name > block.name(block.count - 1)? {
                low = middle + 1;
            } else {
                let Some(index) = block.find(name)? else {
                    return Ok(None);
                };
                return Ok(Some(self.entry(&block, index, name)?));
            }
        }
        Ok(None)
    }

    /// Lists a directory from `cookie` on, including `.` and `..`, sorted by bytes. `each` stops
    /// the listing with [`ControlFlow::Break`]. Cookie 0 is the start; others come from
    /// [`DirEntry::next_cookie`]. Any other value gives some entries or none.
    pub fn read_dir(
        &self,
        dir: &Inode,
        cookie: u64,
        each: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>,
    ) -> Result<(), ErofsError> {
        dir.require(FileType::Directory, "directory")?;
        let mut buf = [0; BLOCK_BYTES];
        let block_bytes = self.block_bytes();
        let first = cookie / block_bytes;
        let mut skip = ((cookie % block_bytes) as usize).div_ceil(DIRENT);
        for number in first..dir.size.div_ceil(block_bytes) {
            let block = self.directory_block(dir, number, &mut buf)?;
            for index in skip..block.count {
                let name = block.name(index)?;
                if !valid_name(name) {
                    return Err(block.damaged(DirectoryProblem::Name { entry: index }));
                }
                if each(self.entry(&block, index, name)?).is_break() {
                    return Ok(());
                }
            }
            skip = 0;
        }
        Ok(())
    }

    fn directory_block<'b>(
        &self,
        dir: &Inode,
        number: u64,
        buf: &'b mut [u8; BLOCK_BYTES],
    ) -> Result<Block<'b>, ErofsError> {
        let block_bytes = self.block_bytes();
        let start = number * block_bytes;
        // The superblock allows blocks of at most BLOCK_BYTES.
        let length = (dir.size - start).min(block_bytes) as usize;
        self.read_content(dir, start, &mut buf[..length])?;
        Block::new(dir.nid, number, &buf[..length])
    }

    /// The entry with this index, whose name is `name`.
    fn entry<'n>(
        &self,
        block: &Block<'_>,
        index: usize,
        name: &'n [u8],
    ) -> Result<DirEntry<'n>, ErofsError> {
        let dirent = block.dirent(index)?;
        let nid = Nid(dirent.nid.get());
        let file_type = dirent.file_type;
        let kind = match FileType::from_dirent(file_type) {
            Some(kind) => kind,
            None if file_type == UNKNOWN_TYPE => self.inode(nid)?.kind,
            None => {
                return Err(block.damaged(DirectoryProblem::FileType {
                    entry: index,
                    file_type,
                }));
            }
        };
        let start = block.number * self.block_bytes();
        let next = index + 1;
        let is_last = next == block.count;
        let behind = if is_last { self.block_bytes() } else { (next * DIRENT) as u64 };
        Ok(DirEntry {
            nid,
            name,
            kind,
            next_cookie: start + behind,
        })
    }
}

fn valid_name(name: &[u8]) -> bool {
    !name.is_empty() && name.len() <= NAME_MAX && !name.iter().any(|&b| b == 0 || b == b'/')
}

/// A block of a directory with a valid number of entries. Each name and entry is checked when it is
/// read.
struct Block<'b> {
    dir: Nid,
    number: u64,
    bytes: &'b [u8],
    /// At least 1.
    count: usize,
}

impl<'b> Block<'b> {
    fn new(dir: Nid, number: u64, bytes: &'b [u8]) -> Result<Self, ErofsError> {
        let mut block = Block {
            dir,
            number,
            bytes,
            count: 1,
        };
        if bytes.len() < DIRENT {
            return Err(block.damaged(DirectoryProblem::Short(bytes.len())));
        }
        // The entries end where the first name starts.
        let first = block.dirent(0)?.name_offset.get();
        let end = usize::from(first);
        if end == 0 || end % DIRENT != 0 || end >= bytes.len() {
            return Err(block.damaged(DirectoryProblem::FirstNameOffset(first)));
        }
        block.count = end / DIRENT;
        Ok(block)
    }

    fn damaged(&self, problem: DirectoryProblem) -> ErofsError {
        ErofsError::Directory {
            nid: self.dir,
            block: self.number,
            problem,
        }
    }

    fn dirent(&self, index: usize) -> Result<&'b Dirent, ErofsError> {
        let bytes = self.bytes.get(index * DIRENT..).unwrap_or_default();
        match Dirent::ref_from_prefix(bytes) {
            Ok((dirent, _)) => Ok(dirent),
            Err(_) => Err(self.damaged(DirectoryProblem::Short(self.bytes.len()))),
        }
    }

    /// The bytes of a name: up to the next name; the last name ends at the block's end or at a NUL.
    fn name(&self, index: usize) -> Result<&'b [u8], ErofsError> {
        let start = usize::from(self.dirent(index)?.name_offset.get());
        let is_last = index + 1 == self.count;
        let end = if is_last {
            self.bytes.len()
        } else {
            usize::from(self.dirent(index + 1)?.name_offset.get())
        };
        if start < self.count * DIRENT || start >= end || end > self.bytes.len() {
            return Err(self.damaged(DirectoryProblem::NameRange {
                entry: index,
                start,
                end,
            }));
        }
        let name = &self.bytes[start..end];
        match name.iter().position(|&b| b == 0) {
            Some(length) if is_last => Ok(&name[..length]),
            _ => Ok(name),
        }
    }

    fn find(&self, name: &[u8]) -> Result<Option<usize>, ErofsError> {
        let (mut low, mut high) = (0, self.count);
        while low < high {
            let middle = low + (high - low) / 2;
            match name.cmp(self.name(middle)?) {
                Ordering::Equal => return Ok(Some(middle)),
                Ordering::Less => high = middle,
                Ordering::Greater => low = middle + 1,
            }
        }
        Ok(None)
    }
}
