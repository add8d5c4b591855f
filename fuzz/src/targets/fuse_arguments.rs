//! What programs in a mount and the kernel send, as far as bcow reads the bytes itself: ranges of
//! IDs and attributes with IDs, names of hidden files, the list of mounts. The first byte selects
//! one.

pub fn fuzz(bytes: &[u8]) {
    bcow_fuse::fuzz_arguments(bytes);
}
