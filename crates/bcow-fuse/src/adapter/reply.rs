//! How requests are answered: with what was asked for, or the error.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;

use bcow_union::Seek;
use bcow_union::fs::Entry;
use fuser::{
    FileAttr, FileHandle, FopenFlags, INodeNo, ReplyAttr, ReplyData, ReplyDirectory,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyWrite, ReplyXattr,
};
use rustix::io::Errno;

use super::{FOREVER, GENERATION, NOBODY, file_type};
use crate::stats;

thread_local! {
    /// Where a thread puts together what it replies with.
    static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The answer to a request that failed, which is noted for the statistics.
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
    match result {
        Ok(attributes) => reply.attr(&FOREVER, &attributes),
        Err(errno) => reply.error(to_fuser(errno)),
    }
}

/// Answers with what is there now.
pub(super) fn entry(result: Result<FileAttr, Errno>, reply: ReplyEntry) {
    found(result.map(Some), reply);
}

/// Answers a lookup.
pub(super) fn found(result: Result<Option<FileAttr>, Errno>, reply: ReplyEntry) {
    match result {
        // Node 0 says: not there, and you may remember that.
        Ok(found) => reply.entry(&FOREVER, &found.unwrap_or(NOBODY), GENERATION),
        Err(errno) => reply.error(to_fuser(errno)),
    }
}

/// Answers an open of something of which nothing is kept. ENOSYS means, where the kernel can do that: open without asking, keep
/// the page cache, and do not tell about closing.
pub(super) fn opened(unasked: bool, flags: FopenFlags, reply: ReplyOpen) {
    match unasked {
        true => reply.error(fuser::Errno::ENOSYS),
        false => reply.opened(FileHandle(0), flags),
    }
}

/// Answers a read. `read` gets room to put bytes together and hands them on: the reply goes out from inside, while the block
/// that it lends is held.
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

/// Answers a listing. `list` hands on name by name, for as long as there is room.
pub(super) fn listing(
    mut reply: ReplyDirectory,
    list: impl FnOnce(&mut dyn FnMut(Entry<'_>) -> ControlFlow<()>) -> Result<(), Errno>,
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

/// Answers a listing with attributes. `list` hands on each name, its cookie, and what it names.
pub(super) fn listing_plus(
    mut reply: ReplyDirectoryPlus,
    list: impl FnOnce(&mut dyn FnMut(&[u8], u64, &FileAttr) -> ControlFlow<()>) -> Result<(), Errno>,
) {
    let result = list(&mut |name, next_cookie, attributes| {
        flow(reply.add(
            attributes.ino,
            next_cookie,
            OsStr::from_bytes(name),
            &FOREVER,
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
    match full {
        true => ControlFlow::Break(()),
        false => ControlFlow::Continue(()),
    }
}

/// Answers an lseek for data or holes.
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

/// Answers as `getxattr` and `listxattr` want it: the size, or the bytes if there is room for them.
pub(super) fn sized(result: Result<Vec<u8>, Errno>, room: u32, reply: ReplyXattr) {
    match result {
        // At most 64 KiB, by the format.
        Ok(bytes) if room == 0 => reply.size(bytes.len() as u32),
        Ok(bytes) if bytes.len() <= room as usize => reply.data(&bytes),
        Ok(_) => reply.error(fuser::Errno::ERANGE),
        Err(errno) => reply.error(to_fuser(errno)),
    }
}
