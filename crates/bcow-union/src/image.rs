//! A mounted image: its inodes, with errors logged and converted to errnos. Read-only and writable
//! mounts read the image through it.

use std::ops::ControlFlow;
use std::sync::{Arc, OnceLock};

use bcow_erofs::reader::{
    DirEntry, ErofsError, ExtentSource, FileType, Filesystem, Inode, Nid, PathIndex, Superblock,
    Symlinks, XattrList,
};
use rustix::io::Errno;

use crate::Seek;
use crate::errno::{errno, kind};
use crate::errors::{ErrorLog, Failure, NAMED_PATHS, escaped};
use crate::node::{NodeId, NodeIds};

/// Upper bound of the extents that a stat counts to get the allocated size of a sparse file. Beyond
/// it the file counts as fully allocated, so that a stat stays cheap.
pub const COUNTED_EXTENTS: usize = 1 << 16;

/// Upper bound of the names that are read to find the paths of inodes with errors.
const MAX_NAMES: usize = 1 << 19;

/// A mounted image. It logs each error before it returns the errno.
pub struct Image {
    fs: Arc<Filesystem>,
    ids: NodeIds,
    errors: Arc<ErrorLog>,
    /// Built for the first error that needs a path.
    names: OnceLock<PathIndex>,
}

impl Image {
    /// The image with the file system `fs`.
    pub fn new(fs: Arc<Filesystem>) -> Self {
        Image::with_errors(fs, Arc::default())
    }

    /// As [`Image::new`], with the log of another image.
    pub fn with_errors(fs: Arc<Filesystem>, errors: Arc<ErrorLog>) -> Self {
        Image {
            ids: NodeIds::new(fs.root()),
            errors,
            names: OnceLock::new(),
            fs,
        }
    }

    /// The file system. Errors of its methods are not logged.
    pub fn filesystem(&self) -> &Filesystem {
        &self.fs
    }

    /// The log that counts errors of the image.
    pub fn errors(&self) -> &Arc<ErrorLog> {
        &self.errors
    }

    /// Paths of an inode in the image, for display; empty if none is known. The first call reads
    /// all directories.
    pub fn shown_paths(&self, nid: Nid) -> Vec<String> {
        let names = self
            .names
            .get_or_init(|| PathIndex::new(&self.fs, MAX_NAMES));
        let paths = names.paths(nid, NAMED_PATHS);
        paths.iter().map(|path| escaped(path)).collect()
    }

    /// The root directory.
    pub fn root(&self) -> Nid {
        self.fs.root()
    }

    /// The UUID in the superblock.
    pub fn uuid(&self) -> [u8; 16] {
        self.fs.superblock().uuid
    }

    /// The node id of an inode.
    pub fn node(&self, nid: Nid) -> NodeId {
        self.ids.node(nid)
    }

    /// The inode of a node id.
    pub fn nid(&self, node: NodeId) -> Nid {
        self.ids.nid(node)
    }

    pub fn superblock(&self) -> &Superblock {
        self.fs.superblock()
    }

    /// Reads an inode.
    pub fn inode(&self, nid: Nid) -> Result<Inode, Errno> {
        self.noted(nid, "read the inode", self.fs.inode(nid))
    }

    /// Looks up `name` in a directory; `None` if there is no such name.
    pub fn lookup(&self, directory: Nid, name: &[u8]) -> Result<Option<Nid>, Errno> {
        let inode = self.inode(directory)?;
        let found = self.fs.lookup(&inode, name);
        let found = self.noted(directory, "look up a name", found)?;
        Ok(found.map(|entry| entry.nid))
    }

    /// Calls `each` for the entries of a directory from `cookie` on, including `.` and `..`. Cookie
    /// 0 is the start.
    pub fn read_dir(
        &self,
        directory: &Inode,
        cookie: u64,
        each: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>,
    ) -> Result<(), Errno> {
        let read = self.fs.read_dir(directory, cookie, each);
        self.noted(directory.nid, "list", read)
    }

    /// Resolves an absolute path without following symlinks; `None` if there is no such file.
    pub fn at_path(&self, path: &[u8]) -> Result<Option<Nid>, Errno> {
        let found = self.fs.resolve_with(path, Symlinks::Keep);
        self.noted(self.root(), "resolve a redirect", found)
    }

    /// Target of a symbolic link.
    pub fn read_link(&self, inode: &Inode) -> Result<Vec<u8>, Errno> {
        self.noted(inode.nid, "read the link", self.fs.read_link(inode))
    }

    /// The value of an extended attribute; `None` if the inode does not have it.
    pub fn xattr(&self, inode: &Inode, name: &[u8]) -> Result<Option<Vec<u8>>, Errno> {
        let value = self.fs.xattr(inode, name);
        self.noted(inode.nid, "read an extended attribute", value)
    }

    /// All extended attributes, with their values.
    pub fn xattrs(&self, inode: &Inode) -> Result<XattrList, Errno> {
        let all = self.fs.xattrs(inode);
        self.noted(inode.nid, "list the extended attributes", all)
    }

    /// Lends `length` bytes at `offset` in pieces to `sink`. The range lies inside the file.
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

    /// Passes up to `length` bytes at `offset`, fewer at the end of the file, as one slice to
    /// `reply`. A range that is contiguous in the block cache is lent from there; other ranges are
    /// assembled in `scratch`, which must be empty.
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
            // Not reachable: if `reply` was taken, there is a result.
            (None, None) => Err(Errno::IO),
        }
    }

    /// Reads bytes at `offset` until `buf` is full. The range lies inside the file.
    pub fn read(&self, inode: &Inode, offset: u64, buf: &mut [u8]) -> Result<(), Errno> {
        let mut filled = 0;
        self.read_with(inode, offset, buf.len() as u64, &mut |piece| {
            buf[filled..filled + piece.len()].copy_from_slice(piece);
            filled += piece.len();
        })?;
        // Short only for a range beyond the end, for which callers do not ask.
        if filled == buf.len() { Ok(()) } else { Err(Errno::IO) }
    }

    /// Offset of the next data or hole at or after `offset`, which lies inside the file. The end of
    /// the file counts as a hole; `None` if no data follows.
    pub fn seek(&self, inode: &Inode, offset: u64, seek: Seek) -> Result<Option<u64>, Errno> {
        for extent in self.fs.extents(inode, offset) {
            let extent = self.noted(inode.nid, "map", extent)?;
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

    /// Allocated size of a file in units of 512 bytes, without holes.
    pub fn sectors(&self, inode: &Inode) -> Result<u64, Errno> {
        let block_bytes = u64::from(self.fs.superblock().block_bytes);
        let whole = inode.size.div_ceil(block_bytes).saturating_mul(block_bytes) / 512;
        if inode.kind != FileType::Regular {
            return Ok(whole);
        }
        let mut bytes = 0_u64;
        for (index, extent) in self.fs.extents(inode, 0).enumerate() {
            let extent = self.noted(inode.nid, "map", extent)?;
            if index == COUNTED_EXTENTS {
                return Ok(whole);
            }
            if !matches!(extent.source, ExtentSource::Hole) {
                bytes = bytes.saturating_add(extent.length);
            }
        }
        Ok(bytes.div_ceil(block_bytes).saturating_mul(block_bytes) / 512)
    }

    /// Logs the error of a read of an inode, and gives its errno.
    fn noted<T>(
        &self,
        nid: Nid,
        action: &'static str,
        read: Result<T, ErofsError>,
    ) -> Result<T, Errno> {
        read.map_err(|error| self.failure_at(nid, action, None, &error))
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
