//! The read-only file system of a mount: what each request means, without the kernel's protocol around it.
//!
//! Everything here takes `&self` and no lock: the reader below decodes from the block cache, the content
//! cannot change, and nothing is kept per open file.

use std::ops::ControlFlow;
use std::sync::Arc;

use bcow_erofs::reader::{FileType, Filesystem, Inode, Nid};
use bcow_union::errors::ErrorLog;
use bcow_union::image::Image;
use bcow_union::node::NodeId;
use rustix::io::Errno;

pub use bcow_union::Seek;
pub use bcow_union::fs::Entry;
pub use bcow_union::image::COUNTED_EXTENTS;

/// Longest name of a directory entry.
const NAME_MAX: usize = 255;

/// A mounted image.
pub struct ImageFs {
    image: Image,
}

/// An inode and how the kernel calls it.
#[derive(Debug, Clone)]
pub struct Node {
    /// The kernel's name for it.
    pub id: NodeId,
    /// Type, owner, size and so on.
    pub inode: Inode,
    /// Allocated size in units of 512 bytes. Holes do not count.
    pub sectors: u64,
}

/// Figures of the whole file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Statistics {
    /// Size of a block in bytes.
    pub block_bytes: u32,
    /// Number of blocks. None is free.
    pub blocks: u64,
    /// Number of inodes. None is free.
    pub inodes: u64,
}

/// Whether names of `trusted.` attributes are listed: as in other file systems, for the privileged only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrustedNames {
    /// With them.
    Shown,
    /// Without them.
    Hidden,
}

/// What `access` asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wish {
    /// To read or to know that it is there.
    Read,
    /// To write.
    Write,
    /// To execute a file or enter a directory.
    Execute,
}

impl ImageFs {
    /// The file system of `fs`.
    pub fn new(fs: Arc<Filesystem>) -> Self {
        ImageFs {
            image: Image::new(fs),
        }
    }

    /// Where its errors are counted and logged.
    pub fn errors(&self) -> &Arc<ErrorLog> {
        self.image.errors()
    }

    /// The inode that `name` names in `parent`; `None` if there is no such name.
    pub fn lookup(&self, parent: NodeId, name: &[u8]) -> Result<Option<Node>, Errno> {
        if name.len() > NAME_MAX {
            return Err(Errno::NAMETOOLONG);
        }
        let directory = self.directory(parent)?;
        match self.image.lookup(directory.nid, name)? {
            Some(nid) => self.node_of(nid).map(Some),
            None => Ok(None),
        }
    }

    /// The inode.
    pub fn node(&self, id: NodeId) -> Result<Node, Errno> {
        self.node_of(self.image.nid(id))
    }

    /// Calls `each` for the entries of a directory, `.` and `..` among them, from `cookie` on, where 0 is
    /// the start and others come from [`Entry::next_cookie`].
    pub fn read_dir(
        &self,
        id: NodeId,
        cookie: u64,
        each: &mut dyn FnMut(Entry<'_>) -> ControlFlow<()>,
    ) -> Result<(), Errno> {
        let directory = self.directory(id)?;
        self.image.read_dir(&directory, cookie, &mut |entry| {
            each(Entry {
                name: entry.name,
                node: self.image.node(entry.nid),
                kind: entry.kind,
                next_cookie: entry.next_cookie,
            })
        })
    }

    /// Where a symbolic link points.
    pub fn read_link(&self, id: NodeId) -> Result<Vec<u8>, Errno> {
        let inode = self.image.inode(self.image.nid(id))?;
        if inode.kind != FileType::Symlink {
            return Err(Errno::INVAL);
        }
        self.image.read_link(&inode)
    }

    /// Hands `length` bytes at `offset`, or as many as there are, in one piece to `reply`.
    ///
    /// Bytes that lie in one piece in the block cache are lent from there; others are put together in
    /// `scratch`.
    pub fn read<R>(
        &self,
        id: NodeId,
        offset: u64,
        length: u32,
        scratch: &mut Vec<u8>,
        reply: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, Errno> {
        let inode = self.image.inode(self.image.nid(id))?;
        match inode.kind {
            FileType::Regular => {}
            FileType::Directory => return Err(Errno::ISDIR),
            _ => return Err(Errno::INVAL),
        }
        scratch.clear();
        self.image.lend(&inode, offset, length, scratch, reply)
    }

    /// The next data or hole at or behind `offset`.
    pub fn seek(&self, id: NodeId, offset: u64, seek: Seek) -> Result<u64, Errno> {
        let inode = self.image.inode(self.image.nid(id))?;
        if inode.kind != FileType::Regular {
            return Err(Errno::INVAL);
        }
        if offset >= inode.size {
            return Err(Errno::NXIO);
        }
        self.image.seek(&inode, offset, seek)?.ok_or(Errno::NXIO)
    }

    /// The value of an extended attribute.
    pub fn xattr(&self, id: NodeId, name: &[u8]) -> Result<Vec<u8>, Errno> {
        let inode = self.image.inode(self.image.nid(id))?;
        self.image.xattr(&inode, name)?.ok_or(Errno::NODATA)
    }

    /// The names of the extended attributes, each with a zero byte behind it, as `listxattr` has them.
    pub fn xattr_names(&self, id: NodeId, trusted: TrustedNames) -> Result<Vec<u8>, Errno> {
        let inode = self.image.inode(self.image.nid(id))?;
        let mut names = Vec::new();
        for (name, _) in self.image.xattrs(&inode)? {
            if trusted == TrustedNames::Shown || !name.starts_with(b"trusted.") {
                names.extend_from_slice(&name);
                names.push(0);
            }
        }
        Ok(names)
    }

    /// Whether a mount in which nobody but the kernel's mode bits decides lets a caller do this. Whoever may
    /// enter it may read everything, but a file without any execute bit is no program.
    pub fn access(&self, id: NodeId, wish: Wish) -> Result<(), Errno> {
        let inode = self.image.inode(self.image.nid(id))?;
        match wish {
            Wish::Read => Ok(()),
            Wish::Write => Err(Errno::ROFS),
            Wish::Execute if inode.kind == FileType::Regular && inode.permissions & 0o111 == 0 => {
                Err(Errno::ACCESS)
            }
            Wish::Execute => Ok(()),
        }
    }

    /// Figures of the whole file system.
    pub fn statistics(&self) -> Statistics {
        let superblock = self.image.superblock();
        Statistics {
            block_bytes: superblock.block_bytes,
            blocks: superblock.blocks,
            inodes: superblock.inodes,
        }
    }

    fn directory(&self, id: NodeId) -> Result<Inode, Errno> {
        let inode = self.image.inode(self.image.nid(id))?;
        match inode.kind {
            FileType::Directory => Ok(inode),
            _ => Err(Errno::NOTDIR),
        }
    }

    fn node_of(&self, nid: Nid) -> Result<Node, Errno> {
        let inode = self.image.inode(nid)?;
        Ok(Node {
            id: self.image.node(nid),
            sectors: self.image.sectors(&inode)?,
            inode,
        })
    }
}
