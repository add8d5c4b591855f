//! Replies to requests: the result or the error.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use bcow_union::Seek;
use bcow_union::fs::DirectoryEntry;
use fuser::{
    FileAttr, FileHandle, FopenFlags, INodeNo, ReplyAttr, ReplyData, ReplyDirectory,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyWrite, ReplyXattr,
};
use rustix::io::Errno;

use super::privileges::validity;
use super::{FOREVER, GENERATION, NO_INODE, file_type};
use crate::stats;

thread_local! {
    /// The buffer in which a thread assembles its replies.
    static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Converts the error of a failed request and records the failure for the statistics.
pub(super) fn to_fuser(errno: Errno) -> fuser::Errno {
    stats::note_failure(errno);
    fuser::Errno::from_i32(errno.raw_os_error())
}

pub(super) fn empty(result: Result<(), Errno>, reply: ReplyEmpty) {
    match result {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(to_fuser(errno)),
    }
}

pub(super) fn bytes(result: Result<Vec<u8>, Errno>, reply: ReplyData) {
    match result {
        Ok(bytes) => reply.data(&bytes),
        Err(errno) => reply.error(to_fuser(errno)),
    }
}

pub(super) fn written(result: Result<u32, Errno>, reply: ReplyWrite) {
    match result {
        Ok(written) => reply.written(written),
        Err(errno) => reply.error(to_fuser(errno)),
    }
}

pub(super) fn attributes(result: Result<FileAttr, Errno>, reply: ReplyAttr) {
    attributes_within(result, FOREVER, reply);
}

/// Replies with attributes that the kernel may cache for `longest` at most.
pub(super) fn attributes_within(
    result: Result<FileAttr, Errno>,
    longest: Duration,
    reply: ReplyAttr,
) {
    match result {
        Ok(attributes) => reply.attr(&validity(&attributes).min(longest), &attributes),
        Err(errno) => reply.error(to_fuser(errno)),
    }
}

/// Replies with an entry that exists now.
pub(super) fn entry(result: Result<FileAttr, Errno>, reply: ReplyEntry) {
    found(result.map(Some), reply);
}

/// Replies to a lookup.
pub(super) fn found(result: Result<Option<FileAttr>, Errno>, reply: ReplyEntry) {
    found_within(result, FOREVER, reply);
}

/// Replies to a lookup with attributes that the kernel may cache for `longest` at most.
pub(super) fn found_within(
    result: Result<Option<FileAttr>, Errno>,
    longest: Duration,
    reply: ReplyEntry,
) {
    match result {
        // Node 0 tells the kernel that the name does not exist, and that it may cache this.
        Ok(found) => {
            let attributes = found.unwrap_or(NO_INODE);
            let valid = validity(&attributes).min(longest);
            reply.entry_with_ttls(&valid, &FOREVER, &attributes, GENERATION);
        }
        Err(errno) => reply.error(to_fuser(errno)),
    }
}

/// Replies to an open for which bcow keeps no state. If the kernel negotiated this (`unasked`),
/// ENOSYS means: open without a request from now on, keep the page cache, and send no request on
/// close.
pub(super) fn opened(unasked: bool, flags: FopenFlags, reply: ReplyOpen) {
    if unasked {
        reply.error(fuser::Errno::ENOSYS)
    } else {
        reply.opened(FileHandle(0), flags)
    }
}

/// Replies to a read. `read` gets a scratch buffer and a function that sends the reply. It calls
/// this function while it still holds the cached block from which the bytes come.
pub(super) fn read(
    reply: ReplyData,
    read: impl FnOnce(&mut Vec<u8>, &mut dyn FnMut(&[u8])) -> Result<(), Errno>,
) {
    let mut reply = Some(reply);
    let result = SCRATCH.with_borrow_mut(|scratch| {
        read(scratch, &mut |bytes| {
            if let Some(reply) = reply.take() {
                reply.data(bytes);
            }
        })
    });
    if let (Err(errno), Some(reply)) = (result, reply) {
        reply.error(to_fuser(errno));
    }
}

/// Replies to a listing. `list` passes the entries one by one until the reply is full.
pub(super) fn listing(
    mut reply: ReplyDirectory,
    list: impl FnOnce(&mut dyn FnMut(DirectoryEntry<'_>) -> ControlFlow<()>) -> Result<(), Errno>,
) {
    let result = list(&mut |entry| {
        flow(reply.add(
            INodeNo(entry.node.0),
            entry.next_cookie,
            file_type(entry.kind),
            OsStr::from_bytes(entry.name),
        ))
    });
    match result {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(to_fuser(errno)),
    }
}

/// Receives a name, its cookie, its attributes, and how long the kernel may cache these at most.
type ListPlus<'a> = &'a mut dyn FnMut(&[u8], u64, &FileAttr, Duration) -> ControlFlow<()>;

/// Replies to a listing with attributes. `list` passes the entries one by one until the reply is
/// full.
pub(super) fn listing_plus(
    mut reply: ReplyDirectoryPlus,
    list: impl FnOnce(ListPlus<'_>) -> Result<(), Errno>,
) {
    let result = list(&mut |name, next_cookie, attributes, longest| {
        flow(reply.add(
            attributes.ino,
            next_cookie,
            OsStr::from_bytes(name),
            &validity(attributes).min(longest),
            attributes,
            GENERATION,
        ))
    });
    match result {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(to_fuser(errno)),
    }
}

fn flow(full: bool) -> ControlFlow<()> {
    if full { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
}

/// Replies to an lseek for data or holes.
pub(super) fn seek(
    offset: i64,
    whence: i32,
    reply: ReplyLseek,
    seek: impl FnOnce(u64, Seek) -> Result<u64, Errno>,
) {
    let what = match whence {
        libc::SEEK_DATA => Seek::Data,
        libc::SEEK_HOLE => Seek::Hole,
        _ => return reply.error(fuser::Errno::EINVAL),
    };
    let Ok(offset) = u64::try_from(offset) else {
        return reply.error(fuser::Errno::ENXIO);
    };
    match seek(offset, what).map(i64::try_from) {
        Ok(Ok(found)) => reply.offset(found),
        Ok(Err(_)) => reply.error(fuser::Errno::EOVERFLOW),
        Err(errno) => reply.error(to_fuser(errno)),
    }
}

/// Replies to `getxattr` or `listxattr`: with the size if `room` is 0, with the bytes if they fit,
/// or with ERANGE.
pub(super) fn sized(result: Result<Vec<u8>, Errno>, room: u32, reply: ReplyXattr) {
    match result {
        // The format limits values to 64 KiB.
        Ok(bytes) if room == 0 => reply.size(bytes.len() as u32),
        Ok(bytes) if bytes.len() <= room as usize => reply.data(&bytes),
        Ok(_) => reply.error(fuser::Errno::ERANGE),
        Err(errno) => reply.error(to_fuser(errno)),
    }
}
