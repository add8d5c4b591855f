//! A mounted image: what its inodes are, with errors that were logged and are errnos. Both kinds of mount read it through this.

use std::ops::ControlFlow;
use std::sync::{Arc, OnceLock};

use bcow_erofs::reader::{
    DirEntry, ErofsError, ExtentSource, FileType, Filesystem, Inode, Nid, PathIndex, Superblock,
    Symlinks, XattrList,
};
use rustix::io::Errno;

use crate::Seek;
use crate::errno::{errno, kind};
use crate::errors::{ErrorLog, Failure, NAMED_PATHS, shown};
use crate::node::{NodeId, NodeIds};

/// Chunks up to which the allocated size of a sparse file is counted exactly. A stat shall stay cheap.
pub const COUNTED_EXTENTS: usize = 1 << 16;

/// Names that are looked at to find a damaged inode's path.
const MOST_NAMES: usize = 1 << 19;

/// An image, whose errors have been logged when they come out here as errnos.
pub struct Image {
    fs: Arc<Filesystem>,
    ids: NodeIds,
    errors: Arc<ErrorLog>,
    /// Made when the first error asks for a path.
    names: OnceLock<PathIndex>,
}

impl Image {
    /// The image with this file system.
    pub fn new(fs: Arc<Filesystem>) -> Self {
        Image {
            ids: NodeIds::new(fs.root()),
            errors: Arc::default(),
            names: OnceLock::new(),
            fs,
        }
    }

    /// Where its errors are counted and logged.
    pub fn errors(&self) -> &Arc<ErrorLog> {
        &self.errors
    }

    /// Paths of an inode in the image, for people; none if they are not known. The first call reads all directories.
    pub fn shown_paths(&self, nid: Nid) -> Vec<String> {
        let names = self
            .names
            .get_or_init(|| PathIndex::new(&self.fs, MOST_NAMES));
        let paths = names.paths(nid, NAMED_PATHS);
        paths.iter().map(|path| shown(path)).collect()
    }

    /// Its root directory.
    pub fn root(&self) -> Nid {
        self.fs.root()
    }

    /// Its volume id.
    pub fn uuid(&self) -> [u8; 16] {
        self.fs.superblock().uuid
    }

    /// What the kernel calls an inode.
    pub fn node(&self, nid: Nid) -> NodeId {
        self.ids.node(nid)
    }

    /// The inode that the kernel calls so.
    pub fn nid(&self, node: NodeId) -> Nid {
        self.ids.nid(node)
    }

    /// The superblock.
    pub fn superblock(&self) -> &Superblock {
        self.fs.superblock()
    }

    /// An inode.
    pub fn inode(&self, nid: Nid) -> Result<Inode, Errno> {
        self.fs
            .inode(nid)
            .map_err(|error| self.failure(nid, "read the inode", &error))
    }

    /// What `name` names in a directory.
    pub fn lookup(&self, directory: Nid, name: &[u8]) -> Result<Option<Nid>, Errno> {
        let inode = self.inode(directory)?;
        let found = self
            .fs
            .lookup(&inode, name)
            .map_err(|error| self.failure(directory, "look up a name", &error))?;
        Ok(found.map(|entry| entry.nid))
    }

    /// Calls `each` for the entries of a directory from `cookie` on, `.` and `..` among them, where 0 is the start.
    pub fn read_dir(
        &self,
        directory: &Inode,
        cookie: u64,
        each: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>,
    ) -> Result<(), Errno> {
        self.fs
            .read_dir(directory, cookie, each)
            .map_err(|error| self.failure(directory.nid, "list", &error))
    }

    /// What an absolute path names, following no symlinks.
    pub fn at_path(&self, path: &[u8]) -> Result<Option<Nid>, Errno> {
        self.fs
            .resolve_with(path, Symlinks::Keep)
            .map_err(|error| self.failure(self.root(), "find what a redirect names", &error))
    }

    /// Where a symbolic link points.
    pub fn read_link(&self, inode: &Inode) -> Result<Vec<u8>, Errno> {
        self.fs
            .read_link(inode)
            .map_err(|error| self.failure(inode.nid, "read the link", &error))
    }

    /// The value of an extended attribute.
    pub fn xattr(&self, inode: &Inode, name: &[u8]) -> Result<Option<Vec<u8>>, Errno> {
        self.fs
            .xattr(inode, name)
            .map_err(|error| self.failure(inode.nid, "read an extended attribute", &error))
    }

    /// All extended attributes.
    pub fn xattrs(&self, inode: &Inode) -> Result<XattrList, Errno> {
        self.fs
            .xattrs(inode)
            .map_err(|error| self.failure(inode.nid, "list the extended attributes", &error))
    }

    /// Lends `length` bytes from `offset` on in pieces; the range lies inside the file.
    pub fn read_with(
        &self,
        inode: &Inode,
        offset: u64,
        length: u64,
        sink: &mut dyn FnMut(&[u8]),
    ) -> Result<(), Errno> {
        let mut read = 0;
        let mut sink = |piece: &[u8]| {
            read += piece.len() as u64;
            sink(piece);
        };
        self.fs
            .read_with(inode, offset, length, &mut sink)
            .map_err(|error| self.failure_at(inode.nid, "read", Some(offset + read), &error))
    }

    /// Hands `length` bytes at `offset`, or as many as there are, in one piece to `reply`. Bytes that lie in one piece in the
    /// block cache are lent from there; others are put together in `scratch`, which is empty.
    pub fn lend<R>(
        &self,
        inode: &Inode,
        offset: u64,
        length: u32,
        scratch: &mut Vec<u8>,
        reply: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, Errno> {
        let length = inode.size.saturating_sub(offset).min(length.into());
        let mut reply = Some(reply);
        let mut result = None;
        if length > 0 {
            self.read_with(inode, offset, length, &mut |piece| {
                if piece.len() as u64 == length
                    && let Some(reply) = reply.take()
                {
                    result = Some(reply(piece));
                } else {
                    scratch.extend_from_slice(piece);
                }
            })?;
        }
        match (result, reply) {
            (Some(result), _) => Ok(result),
            (None, Some(reply)) => Ok(reply(scratch)),
            // The reply was taken, so there is a result.
            (None, None) => Err(Errno::IO),
        }
    }

    /// Fills `buf`; the range lies inside the file.
    pub fn read(&self, inode: &Inode, offset: u64, buf: &mut [u8]) -> Result<(), Errno> {
        let mut filled = 0;
        self.read_with(inode, offset, buf.len() as u64, &mut |piece| {
            buf[filled..filled + piece.len()].copy_from_slice(piece);
            filled += piece.len();
        })?;
        // Fewer only behind the end, where the caller does not ask.
        if filled == buf.len() {
            Ok(())
        } else {
            Err(Errno::IO)
        }
    }

    /// The next data or hole at or behind `offset`, which lies inside the file.
    pub fn seek(&self, inode: &Inode, offset: u64, seek: Seek) -> Result<Option<u64>, Errno> {
        for extent in self.fs.extents(inode, offset) {
            let extent = extent.map_err(|error| self.failure(inode.nid, "map", &error))?;
            let is_hole = matches!(extent.source, ExtentSource::Hole);
            if is_hole == (seek == Seek::Hole) {
                return Ok(Some(extent.offset.max(offset)));
            }
        }
        Ok(match seek {
            Seek::Data => None,
            Seek::Hole => Some(inode.size),
        })
    }

    /// Allocated size in units of 512 bytes. Holes do not count.
    pub fn sectors(&self, inode: &Inode) -> Result<u64, Errno> {
        let block_bytes = u64::from(self.fs.superblock().block_bytes);
        let whole = inode.size.div_ceil(block_bytes).saturating_mul(block_bytes) / 512;
        if inode.kind != FileType::Regular {
            return Ok(whole);
        }
        let mut bytes = 0_u64;
        for (index, extent) in self.fs.extents(inode, 0).enumerate() {
            let extent = extent.map_err(|error| self.failure(inode.nid, "map", &error))?;
            if index == COUNTED_EXTENTS {
                return Ok(whole);
            }
            if !matches!(extent.source, ExtentSource::Hole) {
                bytes = bytes.saturating_add(extent.length);
            }
        }
        Ok(bytes.div_ceil(block_bytes).saturating_mul(block_bytes) / 512)
    }

    fn failure(&self, nid: Nid, action: &'static str, error: &ErofsError) -> Errno {
        self.failure_at(nid, action, None, error)
    }

    fn failure_at(
        &self,
        nid: Nid,
        action: &'static str,
        offset: Option<u64>,
        error: &ErofsError,
    ) -> Errno {
        let failure = Failure {
            kind: kind(error),
            inode: self.node(nid).0,
            action,
            offset,
            cause: error,
        };
        self.errors.report(&failure, || self.shown_paths(nid));
        errno(error)
    }
}
