//! Decodes stored bytes to blocks: checksum, then zstd (spec sections 5 and 11).

use std::cell::RefCell;

use bcow_format::{HEADER_AREA_BYTES, Stored, crc32c, crc32c_matches};
use zstd::bulk::Decompressor;

use crate::error::BlockProblem;

thread_local! {
    // One context per thread: making one costs more than decompressing a small block.
    static DECOMPRESSOR: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
}

/// Encoding of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Encoding {
    Raw,
    Zstd,
}

/// Decodes the block whose stored bytes are `bytes`. `length` is the length of the block.
pub(crate) fn decode_block(
    mut bytes: Vec<u8>,
    stored: &Stored,
    encoding: Encoding,
    length: u32,
) -> Result<Vec<u8>, BlockProblem> {
    if stored.at.0 == 0 {
        // The first block of a plain file has the header slots in its first bytes.
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
    if !frame.starts_with(&0xFD2F_B528u32.to_le_bytes()) {
        return Err(wrong("no zstd frame"));
    }
    // The library would continue with a second frame; the format has exactly one.
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
