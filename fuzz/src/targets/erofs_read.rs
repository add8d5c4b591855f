//! Any bytes as an EROFS image: checked, walked and read.

/// The first byte of the compatible features of the superblock. Its bit 0 says that the superblock
/// has a checksum.
const COMPATIBLE: usize = 1024 + 8;

pub fn fuzz(bytes: &[u8]) {
    let mut image = bytes.to_vec();
    if let Some(features) = image.get_mut(COMPATIBLE) {
        *features &= !1;
    }
    bcow_erofs::debug::fuzz_read(&image);
}
