//! The adapter of the hidden mount with the files that mounts share.
//!
//! Its root directory has a file for each regular file of each image, by the name
//! [`SharedFile::name`]. It cannot be listed. No process opens the files but through the mounts
//! that share them, and those check permissions.

use std::ffi::OsStr;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bcow_erofs::reader::FileType;
use bcow_union::{Image, NodeId};
use fuser::{
    FileAttr, FileHandle, FopenFlags, INodeNo, InitFlags, KernelConfig, LockOwner, OpenFlags,
    ReplyAttr, ReplyData, ReplyEntry, ReplyOpen, Request,
};
use rustix::io::Errno;

use super::{NO_INODE, negotiate, reply};
use crate::request_threads::{Kind, RequestThreads};
use crate::shared::slots::{SharedFile, Slots};

/// Implements fuser's trait for the files of all images.
pub(crate) struct SharedTree {
    pub(crate) slots: Arc<Slots>,
    pub(crate) request_threads: Arc<RequestThreads>,
    /// The number of reads.
    pub(crate) reads: Arc<AtomicU64>,
    /// The flags of the protocol that are in use, for a process that takes the mount over.
    pub(crate) agreed: Arc<AtomicU64>,
    /// Whether the kernel opens files without a request.
    pub(crate) opens_unasked: bool,
}

impl SharedTree {
    /// Calls `answer` with the attributes of a file.
    fn with_attributes(
        &self,
        file: SharedFile,
        answer: impl FnOnce(Result<FileAttr, Errno>) + Send + 'static,
    ) {
        self.slots.with_images(file.slot, move |images| {
            answer(any_of(images, |image| attributes(image, file)));
        });
    }
}

/// A failure that takes longer is that of a server which does not answer.
const BRIEF: Duration = Duration::from_secs(1);

/// The result of the first image that has one. The images are equal, but each has an error log of
/// its own, which is that of a mount. A server that does not answer is that of all of them, and a
/// read waits for it only once.
fn any_of<I, T>(images: &[I], mut read: impl FnMut(&I) -> Result<T, Errno>) -> Result<T, Errno> {
    let begun = Instant::now();
    let mut result = Err(Errno::IO);
    for image in images {
        result = read(image);
        if result.is_ok() || begun.elapsed() > BRIEF {
            break;
        }
    }
    result
}

fn attributes(image: &Image, file: SharedFile) -> Result<FileAttr, Errno> {
    let inode = image.inode(file.nid)?;
    if inode.kind != FileType::Regular {
        return Err(Errno::INVAL);
    }
    Ok(FileAttr {
        ino: INodeNo(file.number()),
        size: inode.size,
        blocks: inode.size.div_ceil(512),
        kind: fuser::FileType::RegularFile,
        perm: 0o400,
        nlink: 1,
        ..NO_INODE
    })
}

impl fuser::Filesystem for SharedTree {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let enabled = negotiate(config, InitFlags::FUSE_ASYNC_DIO);
        // Readahead of an image whose server does not answer must not delay that of others.
        let _ = config.set_max_background(u16::MAX);
        self.agreed.store(enabled.bits(), Ordering::Relaxed);
        self.opens_unasked = enabled.contains(InitFlags::FUSE_NO_OPEN_SUPPORT);
        Ok(())
    }

    fn lookup(&self, _request: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let _turn = self.request_threads.begin(Kind::Brief);
        match name.to_str().and_then(SharedFile::parse) {
            Some(file) => self.with_attributes(file, |found| reply::entry(found, reply)),
            None => reply::found(Ok(None), reply),
        }
    }

    fn getattr(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        let _turn = self.request_threads.begin(Kind::Brief);
        match SharedFile::of_number(ino.0) {
            Some(file) => self.with_attributes(file, |found| reply::attributes(found, reply)),
            None => {
                let directory = FileAttr {
                    ino: INodeNo(NodeId::ROOT.0),
                    kind: fuser::FileType::Directory,
                    perm: 0o500,
                    nlink: 2,
                    ..NO_INODE
                };
                reply::attributes(Ok(directory), reply);
            }
        }
    }

    fn open(&self, _request: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply::opened(self.opens_unasked, FopenFlags::FOPEN_KEEP_CACHE, reply);
    }

    fn read(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let _turn = self.request_threads.begin(Kind::Brief);
        self.reads.fetch_add(1, Ordering::Relaxed);
        let Some(SharedFile { slot, nid }) = SharedFile::of_number(ino.0) else {
            return reply.error(fuser::Errno::EISDIR);
        };
        self.slots.with_images(slot, move |images| {
            reply::read(reply, |scratch, send| {
                any_of(images, |image| {
                    scratch.clear();
                    let inode = image.inode(nid)?;
                    image.lend(&inode, offset, size, scratch, |bytes| send(bytes))
                })
            });
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_image_waits_for_a_server_that_does_not_answer() {
        for (pause, reads) in [(Duration::ZERO, 3), (BRIEF * 2, 1)] {
            let mut asked = Vec::new();
            let result = any_of(&[1, 2, 3, 4], |&image| {
                asked.push(image);
                std::thread::sleep(pause);
                if image == 3 { Ok(()) } else { Err(Errno::IO) }
            });
            assert_eq!(asked.len(), reads);
            assert_eq!(result.is_ok(), pause.is_zero());
        }
    }
}
