//! Encodes a block into its stored form.

use bcow_format::crc32c;
use zstd::bulk::Compressor;

use super::Compression;
use crate::Error;

/// An encoded block.
pub(super) struct Encoded {
    pub(super) form: Form,
    /// CRC32C of the block before encoding, for the verification of the written file; 0, and not
    /// used, for a zero block.
    pub(super) logical_crc: u32,
}

/// The stored form of a block.
pub(super) enum Form {
    Zero,
    Raw(Vec<u8>),
    Zstd { frame: Vec<u8>, crc: u32 },
}

/// An encoder; each thread has its own.
pub(super) struct Encoder(Option<Compressor<'static>>);

impl Encoder {
    pub(super) fn new(compression: Compression) -> Result<Self, Error> {
        match compression {
            Compression::None => Ok(Encoder(None)),
            Compression::Zstd { level } => match Compressor::new(level) {
                Ok(compressor) => Ok(Encoder(Some(compressor))),
                Err(error) => Err(Error::Unsupported(format!("zstd level {level}: {error}"))),
            },
        }
    }

    /// Fails if there is no memory to compress: a block that is stored uncompressed for that reason
    /// makes the file another one.
    pub(super) fn encode(&mut self, block: Vec<u8>) -> Result<Encoded, Error> {
        if is_zero(&block) {
            return Ok(Encoded {
                form: Form::Zero,
                logical_crc: 0,
            });
        }
        let logical_crc = crc32c(&block);
        let form = match self.compress(&block)? {
            Some(frame) => Form::Zstd {
                crc: crc32c(&frame),
                frame,
            },
            None => Form::Raw(block),
        };
        Ok(Encoded { form, logical_crc })
    }

    /// Returns a zstd frame if it saves at least a thirty-second of the block; less is not worth
    /// the decompression.
    fn compress(&mut self, block: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        let Some(compressor) = &mut self.0 else {
            return Ok(None);
        };
        let worthwhile = block.len() - block.len() / 32;
        let mut frame = Vec::with_capacity(zstd_safe::compress_bound(block.len()));
        let compressed = compressor.compress_to_buffer(block, &mut frame);
        compressed.map_err(|source| Error::Io {
            action: "compress",
            offset: 0,
            source,
        })?;
        if frame.len() > worthwhile {
            return Ok(None);
        }
        // Many frames may wait in the queue of the sink.
        frame.shrink_to_fit();
        Ok(Some(frame))
    }
}

/// Whether all bytes are zero. For most blocks the first bytes decide.
fn is_zero(bytes: &[u8]) -> bool {
    bytes
        .chunks(256)
        .all(|chunk| chunk.iter().fold(0, |all, byte| all | byte) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn incompressible_block_is_stored_raw() {
        let mut state = 1u64;
        let noise: Vec<u8> = std::iter::repeat_with(|| {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 56) as u8
        })
        .take(65536)
        .collect();
        let mut encoder = Encoder::new(Compression::Zstd { level: 3 }).unwrap();
        let mut form = |block| encoder.encode(block).unwrap().form;
        assert!(matches!(form(noise), Form::Raw(_)));
        assert!(matches!(form(vec![7; 65536]), Form::Zstd { .. }));
        assert!(matches!(form(vec![0; 65536]), Form::Zero));
    }
}
