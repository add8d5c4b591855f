//! Uncompressed bytes in large chunks, passed on without copying.

use std::collections::VecDeque;

use crate::error::ConvertError;

/// Size of the chunks from the reading thread to the parser: a multiple of tar's 512, so that no
/// tar header crosses a chunk boundary.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;

/// A source of chunks. Chunks may have any size except zero; full ones ([`CHUNK_BYTES`]) are
/// fastest.
pub(crate) trait ChunkSource {
    /// The next chunk, or `None` at the end. The source may reuse the buffer `used`, which has
    /// stale bytes.
    fn next_chunk(&mut self, used: Option<Vec<u8>>) -> Result<Option<Vec<u8>>, ConvertError>;

    /// Skips up to this many bytes without reading them; returns the number of skipped bytes.
    fn skip(&mut self, _bytes: u64) -> u64 {
        0
    }
}

/// A sliding window over the chunks.
pub(crate) struct ChunkStream<'s> {
    source: Box<dyn ChunkSource + 's>,
    /// At most two chunks, none empty. The window begins in the first.
    chunks: VecDeque<Vec<u8>>,
    /// Start of the window in the first chunk.
    at: usize,
    position: u64,
    ended: bool,
    spare: Vec<Vec<u8>>,
}

impl<'s> ChunkStream<'s> {
    pub(crate) fn new(source: Box<dyn ChunkSource + 's>) -> Self {
        ChunkStream {
            source,
            chunks: VecDeque::with_capacity(2),
            at: 0,
            position: 0,
            ended: false,
            spare: Vec::new(),
        }
    }

    /// Bytes consumed so far.
    pub(crate) fn position(&self) -> u64 {
        self.position
    }

    /// The next `bytes` bytes in two pieces, the second often empty; fewer bytes only at the end of
    /// the stream. The call consumes no bytes.
    pub(crate) fn window(&mut self, bytes: usize) -> Result<(&[u8], &[u8]), ConvertError> {
        while self.available() < bytes && !self.ended {
            self.fetch()?;
        }
        let mut chunks = self.chunks.iter();
        let first = chunks.next().map_or(&[][..], |c| &c[self.at..]);
        if first.len() >= bytes {
            return Ok((&first[..bytes], &[]));
        }
        let second = chunks.next().map_or(&[][..], |c| &c[..]);
        Ok((first, &second[..second.len().min(bytes - first.len())]))
    }

    /// Consumes `bytes` bytes that an earlier [`ChunkStream::window`] returned.
    pub(crate) fn consume(&mut self, mut bytes: usize) {
        self.position += bytes as u64;
        while bytes > 0 {
            let left = self.chunks.front().map_or(0, |c| c.len() - self.at);
            if bytes < left {
                self.at += bytes;
                return;
            }
            assert!(left > 0, "consumed more than was shown");
            bytes -= left;
            self.drop_first();
        }
    }

    /// Skips `bytes` bytes; returns the number of bytes missing at the end of the stream.
    pub(crate) fn skip(&mut self, mut bytes: u64) -> Result<u64, ConvertError> {
        while bytes > 0 {
            if self.available() == 0 {
                if self.ended {
                    break;
                }
                let skipped = self.source.skip(bytes);
                self.position += skipped;
                bytes -= skipped;
                if skipped == 0 {
                    self.fetch()?;
                }
                continue;
            }
            let step = bytes.min(self.available() as u64) as usize;
            self.consume(step);
            bytes -= step as u64;
        }
        Ok(bytes)
    }

    fn available(&self) -> usize {
        self.chunks.iter().map(Vec::len).sum::<usize>() - self.at
    }

    fn drop_first(&mut self) {
        self.spare.extend(self.chunks.pop_front());
        self.at = 0;
    }

    fn fetch(&mut self) -> Result<(), ConvertError> {
        match self.source.next_chunk(self.spare.pop())? {
            None => self.ended = true,
            Some(chunk) if self.chunks.len() < 2 => self.chunks.push_back(chunk),
            // Only a source with small chunks reaches this arm.
            Some(chunk) => self.chunks[1].extend_from_slice(&chunk),
        }
        Ok(())
    }
}

#[cfg(any(test, feature = "testing"))]
/// Bytes in memory as a source of chunks of a given size.
pub(crate) struct MemorySource<'b> {
    bytes: &'b [u8],
    chunk_bytes: usize,
}

#[cfg(any(test, feature = "testing"))]
impl<'b> MemorySource<'b> {
    pub(crate) fn new(bytes: &'b [u8], chunk_bytes: usize) -> Self {
        MemorySource { bytes, chunk_bytes }
    }
}

#[cfg(any(test, feature = "testing"))]
impl ChunkSource for MemorySource<'_> {
    fn next_chunk(&mut self, used: Option<Vec<u8>>) -> Result<Option<Vec<u8>>, ConvertError> {
        if self.bytes.is_empty() {
            return Ok(None);
        }
        let (chunk, rest) = self.bytes.split_at(self.chunk_bytes.min(self.bytes.len()));
        self.bytes = rest;
        let mut buffer = used.unwrap_or_default();
        buffer.clear();
        buffer.extend_from_slice(chunk);
        Ok(Some(buffer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_shows_the_same_bytes_whatever_the_chunks() {
        let bytes: Vec<u8> = (0..10_000u32).map(|i| (i * 7 % 251) as u8).collect();
        for chunk_bytes in [1, 3, 512, 4096, 20_000] {
            let mut stream = ChunkStream::new(Box::new(MemorySource::new(&bytes, chunk_bytes)));
            let mut seen = Vec::new();
            for step in [1, 500, 3000, 7, 900].into_iter().cycle() {
                let (a, b) = stream.window(step).unwrap();
                seen.extend_from_slice(a);
                seen.extend_from_slice(b);
                let n = a.len() + b.len();
                if n == 0 {
                    break;
                }
                stream.consume(n);
            }
            assert_eq!(seen, bytes);
            assert_eq!(stream.position(), 10_000);
        }
    }

    #[test]
    fn a_skip_beyond_the_end_says_what_is_missing() {
        let bytes = [0; 1000];
        let mut stream = ChunkStream::new(Box::new(MemorySource::new(&bytes, 300)));
        assert_eq!(stream.skip(400).unwrap(), 0);
        assert_eq!(stream.skip(700).unwrap(), 100);
    }
}
