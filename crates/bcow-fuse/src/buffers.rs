//! The memory into which the kernel copies requests.
//!
//! For a killed process, the kernel makes no page present any more. If the copy of a request needs
//! one, the request fails with EIO (fuse_dev_do_read in fs/fuse/dev.c), and no other process gets
//! it. Without that, a thread that is killed with a request leaves it to the next process of the
//! pool. A new buffer has no pages. So a thread makes the pages of its buffer present when it has
//! received its first request, which usually fits into the page that the allocator has written.

use std::cell::Cell;

use fuser::Request;

/// Bytes of the head of the longest request.
const HEAD_BYTES: usize = 4096;

thread_local! {
    /// Whether this thread, which serves one mount, has its pages.
    static IS_PRESENT: Cell<bool> = const { Cell::new(false) };
}

/// Makes the memory present that this thread needs for requests with up to `data_bytes` of data.
/// `request` is where all requests of the thread begin.
pub(crate) fn make_present(request: &Request, data_bytes: u32) {
    if !IS_PRESENT.replace(true) {
        bcow_mount::make_present(request, HEAD_BYTES + data_bytes as usize);
    }
}
