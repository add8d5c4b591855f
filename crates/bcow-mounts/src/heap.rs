//! Settings of glibc's allocator that reduce the memory of a server.

/// Makes the allocator map each buffer of at least 4 MiB separately. Freeing such a buffer then
/// returns its memory to the kernel. Must be called before other threads start.
///
/// By default, glibc raises the threshold when a mapped buffer is freed, and takes later buffers
/// from the heap; a threshold that was set stays. The buffers of ended threads would stay in the
/// heap. For a new thread, the allocator would fill such a buffer with zeros, which makes all of it
/// resident: 16 MiB for each thread of a mount.
pub fn map_large_buffers() {
    #[cfg(target_env = "gnu")]
    {
        const MMAP_THRESHOLD: i32 = 4 << 20;
        // The free bytes at the end of the heap that the allocator may retain.
        const TRIM_THRESHOLD: i32 = 32 << 20;
        // SAFETY: `mallopt` takes integers only, and no other thread allocates yet.
        #[allow(unsafe_code)]
        unsafe {
            libc::mallopt(libc::M_MMAP_THRESHOLD, MMAP_THRESHOLD);
            libc::mallopt(libc::M_TRIM_THRESHOLD, TRIM_THRESHOLD);
        }
    }
}

/// Makes all threads allocate from one arena. Must be called before other threads start.
///
/// By default, glibc creates up to eight arenas for each CPU, and retains freed memory in each
/// arena. A server with a cache of 64 MiB then takes 170 MiB; with one arena, it takes 85 MiB.
pub fn use_one_arena() {
    // SAFETY: `mallopt` takes integers only, and no other thread allocates yet.
    #[cfg(target_env = "gnu")]
    #[allow(unsafe_code)]
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}
