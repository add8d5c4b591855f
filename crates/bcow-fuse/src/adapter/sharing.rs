//! How a mount lets the kernel read and write files elsewhere than in this process: *passthrough*.
//!
//! An inode of the kernel is used either by passthrough or by requests, never by both at a time. So
//! the kernel gets two numbers for a file of the image: the number of the node, which shows the
//! content of the image and is only ever opened by passthrough, and the same number with [`ALIAS`],
//! which shows what the union has. `st_ino` is always the number of the node. A file that the image
//! never shared has only the number of the node, which shows what the union has.
//!
//! - A lookup gives the number of the node as long as the content is unchanged, and the alias
//!   afterwards.
//! - An open of the node's number for reading is passthrough. Any other open of this number, or one
//!   after a change, fails with ESTALE. The kernel then looks the path up again, and opens what
//!   this lookup gives: the alias. It does so once per open.
//! - The number that shows what the union has is opened by passthrough to the file of the upper
//!   once that has all content: the union decides this at an open while no other descriptor is
//!   open, and then all later opens are of the same kind. So the union counts the descriptors that
//!   send requests.
//! - All other requests mean the same with both numbers.
//!
//! The kernel caches attributes for each number. From the first change on, it does not cache those
//! of the node's number, and those of the alias only while the file has one name. A change of
//! attributes by the node's number makes the kernel drop those of the alias, and so does a change
//! of a name, of which the request does not say by which number the kernel knows the file. After a
//! write by passthrough, the kernel requests the times again, but not after a write to a map: see
//! [`MAPPED`]. A process can end between a change and its message, so the next one makes the kernel
//! drop the attributes of all changed files.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, SystemTime};

use bcow_erofs::reader::Nid;
use bcow_mount::close_backing;
use bcow_union::NodeId;
use bcow_union::fs::{EntryPlus, ImageContent, SyncScope, UnionFs};
use fuser::{BackingId, FileAttr, FileHandle, FopenFlags, INodeNo, OpenFlags, ReplyOpen, Request};
use rustix::io::Errno;

use super::{ALIAS, FOREVER, GENERATION, id, is_alias};
use crate::shared::SharedImage;

/// What a mount with shared files needs, beside its union.
pub(crate) struct Sharing {
    image: SharedImage,
    /// The connection to the kernel.
    connection: OwnedFd,
}

/// How the kernel opens a file.
pub(super) enum Opening {
    /// By requests to this process.
    Ordinary,
    /// By passthrough, to the backing with this number, which has the content of the image.
    Unchanged(u32),
    /// By passthrough, to the backing with this number.
    Passed(u32),
    /// By another number: it must look the path up again.
    Again,
}

/// The handle of a descriptor that sends requests: the union counts these.
pub(super) const COUNTED: FileHandle = FileHandle(1);
/// The handle of a descriptor that shows the content of the image: the union counts these too.
pub(super) const UNCHANGED: FileHandle = FileHandle(2);

/// How long the kernel may cache the attributes of a file that programs may map for writing: the
/// host then changes the times of the file, and the kernel does not know. With no caching, each
/// `lseek` to the end of the file would be a request.
const MAPPED: Duration = Duration::from_millis(10);

impl Sharing {
    pub(crate) fn new(image: SharedImage, connection: OwnedFd) -> Self {
        Sharing { image, connection }
    }

    /// Brings the kernel up to date when this process takes a mount over. A new mount has no nodes.
    pub(super) fn begin(&self, fs: &UnionFs) {
        self.close_left_over(fs);
        for node in fs.changed_images() {
            self.drop_attributes(node.0);
            self.drop_attributes(node.0 | ALIAS);
        }
    }

    /// Closes what a listing or a process before has left over.
    pub(super) fn close_left_over(&self, fs: &UnionFs) {
        for number in fs.left_over_backings() {
            self.close(number);
        }
    }

    /// Decides about an open.
    pub(super) fn open(
        &self,
        fs: &UnionFs,
        ino: INodeNo,
        flags: OpenFlags,
    ) -> Result<Opening, Errno> {
        let node = id(ino);
        if is_alias(ino) {
            fs.end_awaited_open(node);
            return self.open_union(fs, ino, flags);
        }
        match fs.image_content(node)? {
            ImageContent::Never => return self.open_union(fs, ino, flags),
            ImageContent::Unchanged(nid) if flags.0 & libc::O_ACCMODE == libc::O_RDONLY => {
                match self.image_backing(fs, node, nid) {
                    Ok(number) => return Ok(Opening::Unchanged(number)),
                    // So the number was never opened. The alias needs no backing.
                    Err(error) => tracing::warn!("cannot share inode {}: {error}", nid.0),
                }
            }
            // Also after a change: if the kernel forgets the node before it looks the path up
            // again, a file that was opened for writing and not written counts as unchanged.
            ImageContent::Unchanged(_) | ImageContent::Changed => {}
        }
        fs.open_for_writing(node)?;
        self.drop_attributes(node.0);
        Ok(Opening::Again)
    }

    /// Opens a number that shows what the union has.
    fn open_union(&self, fs: &UnionFs, ino: INodeNo, flags: OpenFlags) -> Result<Opening, Errno> {
        let node = id(ino);
        let make = |file: &File| BackingId::create_raw(&self.connection, file);
        let Some(number) = fs.open_file(node, make)? else {
            return Ok(Opening::Ordinary);
        };
        if flags.0 & libc::O_ACCMODE == libc::O_RDWR {
            fs.open_for_mapping(node);
            self.drop_attributes(ino.0);
        }
        if flags.0 & libc::O_DSYNC != 0 {
            // The host makes the written data durable, and not the names that lead to the file.
            fs.sync(node, SyncScope::Data)?;
        }
        Ok(Opening::Passed(number))
    }

    /// The number of the backing with the content of the image.
    fn image_backing(&self, fs: &UnionFs, node: NodeId, nid: Nid) -> io::Result<u32> {
        if let Some(number) = fs.open_image(node) {
            return Ok(number);
        }
        // Without a lock: this can wait for the opener.
        let file = self.image.open(nid, || fs.image_path(node))?;
        fs.open_image_with(node, || BackingId::create_raw(&self.connection, &*file))
    }

    /// A descriptor with this handle was closed.
    pub(super) fn closed(&self, fs: &UnionFs, node: NodeId, handle: FileHandle) {
        match handle {
            COUNTED => fs.closed(node),
            UNCHANGED => {
                if let Some(number) = fs.image_closed(node) {
                    self.close(number);
                }
            }
            _ => {}
        }
    }

    /// The kernel has forgotten references to a node.
    pub(super) fn forgotten(&self, fs: &UnionFs, node: NodeId) {
        for number in fs.forgotten_backings(node) {
            self.close(number);
        }
    }

    fn close(&self, number: u32) {
        // The end of the connection closes it too.
        if let Err(error) = close_backing(self.connection.as_fd(), number) {
            tracing::debug!("cannot close the backing {number}: {error}");
        }
    }

    /// The attributes for an entry. Their number is the one by which the kernel is to know the
    /// node.
    pub(super) fn entry(fs: &UnionFs, attributes: FileAttr) -> FileAttr {
        let alias = if is_changed(fs, &attributes) { ALIAS } else { 0 };
        FileAttr {
            ino: INodeNo(attributes.ino.0 | alias),
            ..attributes
        }
    }

    /// How long the kernel may cache the attributes of a number at most.
    pub(super) fn longest_validity(fs: &UnionFs, ino: INodeNo, attributes: &FileAttr) -> Duration {
        let is_only_one = is_alias(ino) && attributes.nlink <= 1;
        if !is_only_one && is_changed(fs, attributes) {
            Duration::ZERO
        } else if fs.may_be_mapped(id(ino)) {
            MAPPED
        } else {
            FOREVER
        }
    }

    /// Whether the number is that of a file which programs opened before its first change: they
    /// read the content of the image.
    pub(super) fn is_outdated(fs: &UnionFs, ino: INodeNo) -> bool {
        !is_alias(ino) && fs.image_content(id(ino)) == Ok(ImageContent::Changed)
    }

    /// Makes the kernel drop the attributes that it has cached for the alias, because the node is
    /// changed by this number.
    pub(super) fn changed(&self, fs: &UnionFs, ino: INodeNo) {
        if Self::is_outdated(fs, ino) {
            self.drop_attributes(ino.0 | ALIAS);
        }
    }

    /// Makes the kernel drop the attributes that it has cached for a number. It must not drop pages
    /// here: it would wait until this process has answered the writes of dirty ones.
    fn drop_attributes(&self, number: u64) {
        /// FUSE_NOTIFY_INVAL_INODE of linux/fuse.h, in the place of an error number.
        const INVALIDATE: u32 = 2;
        const BYTES: u32 = 40;
        /// No byte of the content.
        const FROM: i64 = -1;
        let mut message = Vec::with_capacity(BYTES as usize);
        message.extend_from_slice(&BYTES.to_ne_bytes());
        message.extend_from_slice(&INVALIDATE.to_ne_bytes());
        // A message that answers no request.
        message.extend_from_slice(&0_u64.to_ne_bytes());
        message.extend_from_slice(&number.to_ne_bytes());
        message.extend_from_slice(&FROM.to_ne_bytes());
        // The length: to the end.
        message.extend_from_slice(&0_i64.to_ne_bytes());
        let _ = rustix::io::write(&self.connection, &message);
    }

    /// Answers a listing with attributes by one name without attributes: fuser would list an alias
    /// as the inode number. The answer of fuser that follows has no request any more, and the
    /// kernel ignores it.
    pub(super) fn list_alone(&self, request: &Request, name: &[u8]) {
        self.answer(request, name);
    }

    /// Answers a CREATE: the file is opened by passthrough, for which fuser has no answer. The one
    /// of fuser that follows is ignored, as in [`Sharing::list_alone`].
    pub(super) fn created(
        &self,
        request: &Request,
        attributes: &FileAttr,
        valid: Duration,
        number: u32,
    ) {
        self.answer(request, &created_and_passed(attributes, valid, number));
    }

    fn answer(&self, request: &Request, body: &[u8]) {
        let length = HEADER_BYTES + body.len();
        let mut reply = Vec::with_capacity(length);
        // The length of a reply has 32 bits.
        reply.extend_from_slice(&(length as u32).to_ne_bytes());
        reply.extend_from_slice(&0_u32.to_ne_bytes());
        reply.extend_from_slice(&request.unique().0.to_ne_bytes());
        reply.extend_from_slice(body);
        if let Err(errno) = rustix::io::write(&self.connection, &reply) {
            tracing::debug!("cannot answer a request: {errno}");
        }
    }
}

/// The size of fuse_out_header.
const HEADER_BYTES: usize = 16;

/// A name without attributes, as fuse_direntplus of linux/fuse.h: node 0 says that there are none.
pub(super) fn without_attributes(entry: &EntryPlus<'_>, attributes: &FileAttr) -> Vec<u8> {
    const ENTRY_BYTES: usize = 128;
    /// The type in the upper bits of a mode, of which a listing has the upper four.
    const REGULAR: u32 = libc::S_IFREG >> 12;
    let mut listed = vec![0; ENTRY_BYTES];
    listed.extend_from_slice(&id(attributes.ino).0.to_ne_bytes());
    listed.extend_from_slice(&entry.next_cookie.to_ne_bytes());
    // A name has at most 255 bytes.
    listed.extend_from_slice(&(entry.name.len() as u32).to_ne_bytes());
    listed.extend_from_slice(&REGULAR.to_ne_bytes());
    listed.extend_from_slice(entry.name);
    listed.resize(listed.len().next_multiple_of(8), 0);
    listed
}

/// A new file that is opened by passthrough, as fuse_entry_out and fuse_open_out of linux/fuse.h.
fn created_and_passed(attributes: &FileAttr, valid: Duration, number: u32) -> Vec<u8> {
    let times = [attributes.atime, attributes.mtime, attributes.ctime]
        .map(|time| time.duration_since(SystemTime::UNIX_EPOCH))
        .map(|since| since.unwrap_or_default());
    let (ino, seconds) = (attributes.ino.0, valid.as_secs());
    let flags = FopenFlags::FOPEN_PASSTHROUGH | FopenFlags::FOPEN_NOFLUSH;
    let entry = [
        [ino, GENERATION.0, seconds, seconds]
            .map(u64::to_ne_bytes)
            .concat(),
        [valid.subsec_nanos(); 2].map(u32::to_ne_bytes).concat(),
        [ino, attributes.size, attributes.blocks]
            .map(u64::to_ne_bytes)
            .concat(),
        times.map(|time| time.as_secs().to_ne_bytes()).concat(),
        times.map(|time| time.subsec_nanos().to_ne_bytes()).concat(),
        [
            libc::S_IFREG | u32::from(attributes.perm),
            attributes.nlink,
            attributes.uid,
            attributes.gid,
            attributes.rdev,
            attributes.blksize,
            0,
        ]
        .map(u32::to_ne_bytes)
        .concat(),
    ];
    let handle = 0_u64.to_ne_bytes();
    let opened = [flags.bits(), number].map(u32::to_ne_bytes).concat();
    [&*entry.concat(), &handle, &*opened].concat()
}

/// Replies that the kernel uses the backing with this number.
pub(super) fn opened(number: u32, handle: FileHandle, reply: ReplyOpen) {
    // SAFETY: the number is that of an open backing of this connection. `into_raw` below keeps it
    // open.
    #[allow(unsafe_code)]
    let backing = unsafe { reply.wrap_backing(number) };
    // The kernel has nothing that a close would have to flush.
    reply.opened_passthrough(handle, FopenFlags::FOPEN_NOFLUSH, &backing);
    let _ = backing.into_raw();
}

fn is_changed(fs: &UnionFs, attributes: &FileAttr) -> bool {
    attributes.kind == fuser::FileType::RegularFile
        && fs.image_content(id(attributes.ino)) == Ok(ImageContent::Changed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapter::NO_INODE;

    #[test]
    fn a_name_without_attributes_has_the_number_of_the_node() {
        let node = 0x1234;
        let attributes = FileAttr {
            ino: INodeNo(node | ALIAS),
            ..NO_INODE
        };
        let entry = EntryPlus {
            name: b"name",
            attributes: Err(NodeId(node)),
            kind: bcow_erofs::reader::FileType::Regular,
            next_cookie: 77,
        };
        let listed = without_attributes(&entry, &attributes);
        assert_eq!(listed[..128], [0; 128]);
        let mut expected = [node, 77].map(u64::to_ne_bytes).concat();
        expected.extend([4_u32, 8].map(u32::to_ne_bytes).concat());
        expected.extend(b"name\0\0\0\0");
        assert_eq!(listed[128..], expected);
    }

    #[test]
    fn a_new_file_has_its_attributes_and_the_number_of_the_backing() {
        let attributes = FileAttr {
            ino: INodeNo(0x1234),
            size: 5,
            mtime: SystemTime::UNIX_EPOCH + Duration::new(6, 7),
            perm: 0o640,
            nlink: 1,
            uid: 8,
            gid: 9,
            ..NO_INODE
        };
        let reply = created_and_passed(&attributes, Duration::new(1, 2), 3);
        let long = |at: usize| u64::from_ne_bytes(reply[at..at + 8].try_into().unwrap());
        let short = |at: usize| u32::from_ne_bytes(reply[at..at + 4].try_into().unwrap());
        assert_eq!(reply.len(), 128 + 16);
        // The number, the times of validity, and the attributes from byte 40 on.
        assert_eq!(
            [0, 16, 24, 40, 48, 72].map(long),
            [0x1234, 1, 1, 0x1234, 5, 6]
        );
        assert_eq!([32, 36, 92, 100].map(short), [2, 2, 7, 0o100640]);
        assert_eq!([104, 108, 112, 120].map(short), [1, 8, 9, 4096]);
        // The open file.
        assert_eq!([136, 140].map(short), [1 << 7 | 1 << 5, 3]);
    }
}
