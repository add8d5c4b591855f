//! CRC32C (spec, preamble), and hashes as text.

use crc_fast::{CrcAlgorithm, Digest, checksum};

/// CRC32C of `bytes`.
pub fn crc32c(bytes: &[u8]) -> u32 {
    checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// Bytes in hexadecimal, in lower case.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The bytes of 64 hexadecimal digits; `None` for any other text.
pub fn from_hex(text: &str) -> Option<[u8; 32]> {
    let mut bytes = [0; 32];
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    if pairs.len() != bytes.len() || !rest.is_empty() {
        return None;
    }
    let digit = |byte: u8| char::from(byte).to_digit(16);
    for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
        *byte = ((digit(*high)? << 4) | digit(*low)?) as u8;
    }
    Some(bytes)
}

/// CRC32C of bytes that are passed in several parts.
#[derive(Debug, Clone)]
pub struct Crc32c(Digest);

impl Crc32c {
    /// Starts with the CRC32C of no bytes.
    #[expect(clippy::new_without_default, reason = "`default` would say less")]
    pub fn new() -> Self {
        Crc32c(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }

    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The CRC32C of all bytes so far.
    pub fn finish(&self) -> u32 {
        self.0.finalize() as u32
    }
}

/// Whether `found` is the `expected` checksum.
pub fn crc32c_matches(expected: u32, found: u32) -> bool {
    #[cfg(feature = "testing")]
    if IGNORED.load(std::sync::atomic::Ordering::Relaxed) {
        return true;
    }
    expected == found
}

/// Whether wrong checksums are accepted.
#[cfg(feature = "testing")]
static IGNORED: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

/// Accepts wrong checksums in this process from now on. For fuzz targets: a checksum would keep
/// them from the code behind its check.
#[cfg(feature = "testing")]
pub fn ignore_checksums() {
    IGNORED.store(true, std::sync::atomic::Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    #[test]
    fn check_value_is_the_specs() {
        assert_eq!(super::crc32c(b"123456789"), 0xE306_9283);
        let mut pieces = super::Crc32c::new();
        pieces.update(b"1234");
        pieces.update(b"56789");
        assert_eq!(pieces.finish(), 0xE306_9283);
    }
}
