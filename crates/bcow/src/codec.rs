//! Decodes stored bytes to blocks: checksum, then zstd (spec sections 5 and 11).

use std::cell::RefCell;

use bcow_format::{Entry, HEADER_AREA_BYTES, Stored, crc32c, crc32c_matches};
use zstd::bulk::Decompressor;

use crate::error::BlockProblem;

thread_local! {
    // One context per thread: creating a context takes longer than decompressing a small block.
    static DECOMPRESSOR: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
}

/// The first bytes of a zstd frame (RFC 8878, section 3.1.1).
const ZSTD_MAGIC: [u8; 4] = 0xFD2F_B528u32.to_le_bytes();

/// Verifies and decodes the stored bytes of a block with this entry. `length` is the length of the
/// decoded block in bytes. A block that is not compressed must have this length already.
pub(crate) fn decode_block(
    mut bytes: Vec<u8>,
    entry: &Entry,
    length: u64,
) -> Result<Vec<u8>, BlockProblem> {
    let (Entry::Raw(stored) | Entry::Zstd(stored)) = entry else {
        // An open block has no checksum.
        return Ok(bytes);
    };
    if stored.at.0 == 0 {
        // The stored bytes begin with the header slots, which read as zeros (spec section 11).
        let slots = bytes.len().min(HEADER_AREA_BYTES);
        bytes[..slots].fill(0);
    }
    check_crc(stored, &bytes)?;
    match entry {
        Entry::Zstd(_) => decompress(&bytes, length as usize),
        _ => Ok(bytes),
    }
}

/// Compares stored bytes with the checksum in their entry.
pub(crate) fn check_crc(stored: &Stored, bytes: &[u8]) -> Result<(), BlockProblem> {
    let (expected, found) = (stored.crc, crc32c(bytes));
    if crc32c_matches(expected, found) {
        Ok(())
    } else {
        Err(BlockProblem::Checksum { expected, found })
    }
}

fn decompress(frame: &[u8], length: usize) -> Result<Vec<u8>, BlockProblem> {
    let wrong = |problem: &str| BlockProblem::Decompress(problem.to_owned());
    if !frame.starts_with(&ZSTD_MAGIC) {
        return Err(wrong("no zstd frame"));
    }
    // The library accepts several frames in sequence; the format allows exactly one.
    match zstd_safe::find_frame_compressed_size(frame) {
        Ok(bytes) if bytes == frame.len() => {}
        Ok(_) => return Err(wrong("bytes follow the frame")),
        Err(code) => return Err(wrong(zstd_safe::get_error_name(code))),
    }
    let mut block = Vec::with_capacity(length);
    DECOMPRESSOR.with_borrow_mut(|slot| {
        let decompressor = match slot {
            Some(decompressor) => decompressor,
            None => slot.insert(
                Decompressor::new().map_err(|error| BlockProblem::Decompress(error.to_string()))?,
            ),
        };
        decompressor
            .decompress_to_buffer(frame, &mut block)
            .map_err(|error| BlockProblem::Decompress(error.to_string()))
    })?;
    if block.len() != length {
        return Err(BlockProblem::Decompress(format!(
            "{} bytes instead of {length}",
            block.len()
        )));
    }
    Ok(block)
}
