//! CRC32C (spec, preamble).

use crc_fast::{CrcAlgorithm, checksum};

/// CRC32C of `bytes`.
pub fn crc32c(bytes: &[u8]) -> u32 {
    checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// Whether `found` is the `expected` checksum. Always true in fuzzing builds, where a checksum would only keep
/// the fuzzer from the code behind it.
pub fn crc32c_matches(expected: u32, found: u32) -> bool {
    cfg!(fuzzing) || expected == found
}

#[cfg(test)]
mod tests {
    #[test]
    fn check_value_is_the_specs() {
        assert_eq!(super::crc32c(b"123456789"), 0xE306_9283);
    }
}
