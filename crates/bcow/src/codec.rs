//! Decodes stored bytes to blocks: checksum, then zstd (spec sections 5 and 11).

use std::cell::RefCell;

use bcow_format::{HEADER_AREA_BYTES, Stored, crc32c, crc32c_matches};
use zstd::bulk::Decompressor;

use crate::error::BlockProblem;

thread_local! {
    // One context per thread: creating a context takes longer than decompressing a small block.
    static DECOMPRESSOR: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
}

/// The first bytes of a zstd frame (RFC 8878, section 3.1.1).
const ZSTD_MAGIC: [u8; 4] = 0xFD2F_B528u32.to_le_bytes();

/// Encoding of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Encoding {
    Raw,
    Zstd,
}

/// Verifies and decodes the stored bytes of a block. `length` is the length of the decoded block in
/// bytes. A raw block must have this length already.
pub(crate) fn decode_block(
    mut bytes: Vec<u8>,
    stored: &Stored,
    encoding: Encoding,
    length: u32,
) -> Result<Vec<u8>, BlockProblem> {
    if stored.at.0 == 0 {
        // The stored bytes begin with the header slots, which read as zeros (spec section 11).
        let slots = bytes.len().min(HEADER_AREA_BYTES);
        bytes[..slots].fill(0);
    }
    let found = crc32c(&bytes);
    if !crc32c_matches(stored.crc, found) {
        return Err(BlockProblem::Checksum {
            expected: stored.crc,
            found,
        });
    }
    match encoding {
        Encoding::Raw => Ok(bytes),
        Encoding::Zstd => decompress(&bytes, length as usize),
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
