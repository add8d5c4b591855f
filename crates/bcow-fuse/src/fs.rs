//! The read-only file system of a mount: the meaning of each request, independent of the FUSE
//! protocol.
//!
//! All methods take `&self` and use no lock. The reader decodes blocks through the block cache, the
//! content cannot change, and there is no state per open file.

use std::ops::ControlFlow;
use std::sync::Arc;

use bcow_erofs::reader::{FileType, Filesystem, Inode, Nid};
use bcow_union::errors::ErrorLog;
use bcow_union::{Image, NodeId};
use rustix::io::Errno;

use crate::lower::{self, OverlayLower};

pub use bcow_union::COUNTED_EXTENTS;
pub use bcow_union::Seek;
pub use bcow_union::fs::DirectoryEntry;

/// Longest name of a directory entry, in bytes.
const NAME_MAX: usize = 255;

/// A mounted image.
pub struct ImageFs {
    image: Image,
    /// For a lower directory of overlayfs.
    lower: Option<Box<OverlayLower>>,
}

/// An inode and its number in the mount.
#[derive(Debug, Clone)]
pub struct Node {
    /// The inode number that the kernel uses.
    pub id: NodeId,
    /// Type, owner, size and so on.
    pub inode: Inode,
    /// Allocated size in units of 512 bytes. Holes do not count.
    pub sectors: u64,
}

/// Figures of the whole file system, for `statfs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Statistics {
    /// Size of a block in bytes.
    pub block_bytes: u32,
    /// Number of blocks. No block is free.
    pub blocks: u64,
    /// Number of inodes. No inode is free.
    pub inodes: u64,
}

/// Whether a listing contains the names of `trusted.` attributes. As in other file systems, only
/// privileged callers see them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrustedNames {
    /// List them.
    Shown,
    /// Leave them out.
    Hidden,
}

/// The kind of access that an `access` request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessKind {
    /// To read, or to test for existence.
    Read,
    Write,
    /// To execute a file or enter a directory.
    Execute,
}

impl ImageFs {
    /// The file system of `fs`.
    pub fn new(fs: Arc<Filesystem>) -> Self {
        ImageFs {
            image: Image::new(fs),
            lower: None,
        }
    }

    /// The same file system as a lower directory of overlayfs.
    pub fn as_overlay_lower(self, lower: OverlayLower) -> Self {
        ImageFs {
            lower: Some(Box::new(lower)),
            ..self
        }
    }

    /// The log that counts and records the errors of this file system.
    pub fn errors(&self) -> &Arc<ErrorLog> {
        self.image.errors()
    }

    /// Looks up `name` in the directory `parent`. `None` if the directory has no such entry.
    pub fn lookup(&self, parent: NodeId, name: &[u8]) -> Result<Option<Node>, Errno> {
        if name.len() > NAME_MAX {
            return Err(Errno::NAMETOOLONG);
        }
        let directory = self.directory(parent)?;
        match self.image.lookup(directory.nid, name)? {
            Some(nid) => self.node_of(nid).map(Some),
            None if parent == NodeId::ROOT => {
                let whiteout = self.lower.as_ref().and_then(|lower| lower.find(name));
                whiteout.map(|id| self.node(id)).transpose()
            }
            None => Ok(None),
        }
    }

    /// Reads an inode.
    pub fn node(&self, id: NodeId) -> Result<Node, Errno> {
        if self.is_whiteout(id) {
            Ok(Node {
                id,
                inode: self.inode(id)?,
                sectors: 0,
            })
        } else {
            self.node_of(self.image.nid(id))
        }
    }

    fn is_whiteout(&self, id: NodeId) -> bool {
        self.lower
            .as_ref()
            .is_some_and(|lower| lower.is_whiteout(id))
    }

    fn inode(&self, id: NodeId) -> Result<Inode, Errno> {
        if self.is_whiteout(id) {
            Ok(OverlayLower::whiteout(self.inode(NodeId::ROOT)?))
        } else {
            self.image.inode(self.image.nid(id))
        }
    }

    /// Calls `each` for the entries of a directory, `.` and `..` included. `cookie` is 0 for the
    /// first entry, or an [`DirectoryEntry::next_cookie`] of an earlier call.
    pub fn read_dir(
        &self,
        id: NodeId,
        cookie: u64,
        each: &mut dyn FnMut(DirectoryEntry<'_>) -> ControlFlow<()>,
    ) -> Result<(), Errno> {
        let directory = self.directory(id)?;
        let mut flow = ControlFlow::Continue(());
        if cookie < lower::FIRST {
            self.image.read_dir(&directory, cookie, &mut |entry| {
                flow = each(DirectoryEntry {
                    name: entry.name,
                    node: self.image.node(entry.nid),
                    kind: entry.kind,
                    next_cookie: entry.next_cookie,
                });
                flow
            })?;
        }
        if let (NodeId::ROOT, Some(lower), ControlFlow::Continue(())) = (id, &self.lower, flow) {
            lower.list(cookie, each);
        }
        Ok(())
    }

    /// The target of a symbolic link.
    pub fn read_link(&self, id: NodeId) -> Result<Vec<u8>, Errno> {
        let inode = self.inode(id)?;
        if inode.kind != FileType::Symlink {
            return Err(Errno::INVAL);
        }
        self.image.read_link(&inode)
    }

    /// Calls `reply` once with `length` bytes from `offset` on, or with fewer at the end of the
    /// file.
    ///
    /// Bytes that are contiguous in the block cache are passed without a copy. Others are copied
    /// into `scratch`.
    pub fn read<R>(
        &self,
        id: NodeId,
        offset: u64,
        length: u32,
        scratch: &mut Vec<u8>,
        reply: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, Errno> {
        let inode = self.inode(id)?;
        match inode.kind {
            FileType::Regular => {}
            FileType::Directory => return Err(Errno::ISDIR),
            _ => return Err(Errno::INVAL),
        }
        scratch.clear();
        self.image.lend(&inode, offset, length, scratch, reply)
    }

    /// The offset of the next data or hole at or after `offset`.
    pub fn seek(&self, id: NodeId, offset: u64, seek: Seek) -> Result<u64, Errno> {
        let inode = self.inode(id)?;
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
        if self.is_whiteout(id) {
            return Err(Errno::NODATA);
        }
        if let Some(lower) = self.lower.as_ref().filter(|lower| lower.is_obeyed(name)) {
            return match lower.mark(self.image.nid(id)) {
                Some(mark) if mark == name => Ok(b"y".to_vec()),
                _ => Err(Errno::NODATA),
            };
        }
        let inode = self.inode(id)?;
        self.image.xattr(&inode, name)?.ok_or(Errno::NODATA)
    }

    /// The names of the extended attributes, each followed by a zero byte, in the format of
    /// `listxattr`.
    pub fn xattr_names(&self, id: NodeId, trusted: TrustedNames) -> Result<Vec<u8>, Errno> {
        let mut names = Vec::new();
        if self.is_whiteout(id) {
            return Ok(names);
        }
        let mut add = |name: &[u8]| {
            if trusted == TrustedNames::Shown || !name.starts_with(b"trusted.") {
                names.extend_from_slice(name);
                names.push(0);
            }
        };
        let lower = self.lower.as_ref();
        let inode = self.inode(id)?;
        for (name, _) in self.image.xattrs(&inode)? {
            if !lower.is_some_and(|lower| lower.is_obeyed(&name)) {
                add(&name);
            }
        }
        if let Some(mark) = lower.and_then(|lower| lower.mark(inode.nid)) {
            add(mark);
        }
        Ok(names)
    }

    /// Whether an `access` request succeeds in a mount without `default_permissions`. Every user
    /// who may enter the mount may read every file, but a file without any execute bit cannot be
    /// executed.
    pub fn access(&self, id: NodeId, kind: AccessKind) -> Result<(), Errno> {
        let inode = self.inode(id)?;
        match kind {
            AccessKind::Read => Ok(()),
            AccessKind::Write => Err(Errno::ROFS),
            AccessKind::Execute
                if inode.kind == FileType::Regular && inode.permissions & 0o111 == 0 =>
            {
                Err(Errno::ACCESS)
            }
            AccessKind::Execute => Ok(()),
        }
    }

    /// Figures of the whole file system, for `statfs`.
    pub fn statistics(&self) -> Statistics {
        let superblock = self.image.superblock();
        Statistics {
            block_bytes: superblock.block_bytes,
            blocks: superblock.blocks,
            inodes: superblock.inodes,
        }
    }

    fn directory(&self, id: NodeId) -> Result<Inode, Errno> {
        let inode = self.inode(id)?;
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
