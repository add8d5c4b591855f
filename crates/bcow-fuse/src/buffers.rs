//! The memory into which the kernel copies requests.
//!
//! For a killed process, the kernel makes no page present any more. If the copy of a request needs
//! one, the request fails with EIO (fuse_dev_do_read in fs/fuse/dev.c), and no other process gets
//! it. Without that, a thread that is killed with a request leaves it to the next process of the
//! pool. A new buffer has no pages. So a thread makes the pages of its buffer present before it
//! receives a request: see [`crate::first_messages`]. While a thread is parked, it receives no
//! request, and needs no pages.

use std::cell::Cell;

use bcow_mount::Pages;
use fuser::Request;

/// Largest write request in bytes if another process can take the mount over: each thread that
/// waits for requests has memory for one.
pub(crate) const WRITE_BYTES_IN_POOL: u32 = 256 << 10;
/// Bytes of the head of the longest request.
const HEAD_BYTES: usize = 4096;

thread_local! {
    /// The buffer of this thread, which serves one mount, from its first message on.
    static BUFFER: Cell<Option<Pages>> = const { Cell::new(None) };
}

/// Makes the memory present that this thread needs for any request. `request` is where all requests
/// of the thread begin.
pub(crate) fn make_present(request: &Request) {
    if BUFFER.get().is_none() {
        let pages = Pages::of(request, HEAD_BYTES + WRITE_BYTES_IN_POOL as usize);
        pages.make_present();
        BUFFER.set(Some(pages));
    }
}

/// Runs `park`, in which this thread receives no request.
pub(crate) fn without_pages(park: impl FnOnce()) {
    let pages = BUFFER.get();
    if let Some(pages) = pages {
        // The library still has the head of the request that has been answered.
        let data = pages.after(2 * HEAD_BYTES);
        // SAFETY: the request has been answered, so nothing reads its data.
        #[allow(unsafe_code)]
        unsafe {
            data.release();
        }
    }
    park();
    if let Some(pages) = pages {
        pages.make_present();
    }
}
