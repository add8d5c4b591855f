//! Writes file content into the address space, and stores equal pieces once.
//!
//! A file up to 1 MiB is one piece; a larger file has one piece per MiB. Pieces are looked up by
//! their BLAKE3 hash, so a file that is stored already takes no space, and a file that is partly
//! stored takes space for the rest. A file whose pieces are adjacent becomes one run of blocks.
//! Files that are stored inline, beside their inodes, are not looked up: they occupy no blocks to
//! share.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use bcow_erofs::tree::{Blocks, ChunkRun, Content, Tail};

use crate::error::{ConvertError, Exceeded, LimitKind, Unplaced, check_limit};
use crate::lower::{LowerIndex, LowerPiece};
use crate::space::{BLOCK_BYTES, FIRST_LOWER_BLOCK, PIECE_BYTES, Shown};
use crate::tails::TailStore;
use crate::tar::SparseMap;

const PIECE_BLOCKS: u64 = PIECE_BYTES as u64 / BLOCK_BYTES;
/// Largest number of chunks in a chunked file.
const MAX_FILE_CHUNKS: u64 = 1 << 20;
/// The same for a sparse file, whose holes take no space in the archive.
const MAX_SPARSE_CHUNKS: u64 = 1 << 16;
/// Largest number of chunks of all sparse files. A chunk takes eight bytes in the image.
const MAX_CHUNKS: u64 = 32 << 20;
/// Number of blocks that EROFS can address.
const MAX_BLOCKS: u64 = 1 << 32;

/// The destination of content.
pub(crate) trait ContentSink {
    /// Next byte of the address space.
    fn position(&self) -> u64;
    /// Appends bytes.
    fn append(&mut self, bytes: &[u8]) -> Result<(), ConvertError>;
    /// Appends zeros.
    fn append_zeros(&mut self, count: u64) -> Result<(), ConvertError>;
}

/// The data of one file.
pub(crate) trait Data {
    /// The next `wanted` bytes in two pieces. Fewer bytes are an error.
    fn window(&mut self, wanted: usize) -> Result<(&[u8], &[u8]), ConvertError>;
    /// Consumes `bytes` bytes.
    fn consume(&mut self, bytes: usize);
}

/// Statistics in bytes of file content.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ContentStats {
    /// All content.
    pub content_bytes: u64,
    /// The part of `content_bytes` that was stored already.
    pub deduplicated_bytes: u64,
    /// The part of `content_bytes` that a lower layer has.
    pub lower_bytes: u64,
}

/// Stores the content of files.
pub(crate) struct ContentWriter<S> {
    sink: S,
    tails: TailStore,
    inline_max: usize,
    known: HashMap<[u8; 32], Stored>,
    lower: Option<Arc<LowerIndex>>,
    /// The lower layers that content refers to.
    lower_used: BTreeSet<u32>,
    chunks: u64,
    /// Bytes of chunks of sparse files. Most of them may be zeros that the archive does not
    /// contain.
    sparse_bytes: u64,
    max_bytes: u64,
    stats: ContentStats,
    scratch: Vec<u8>,
}

/// Location of a piece.
#[derive(Debug, Clone, Copy)]
struct Stored {
    start: u32,
    tail: Option<Tail>,
}

impl<S: ContentSink> ContentWriter<S> {
    /// Tails of up to `inline_max` bytes are kept apart, to be stored beside their inodes. The
    /// chunks of sparse files may take `max_bytes` in total.
    pub(crate) fn new(sink: S, tails: TailStore, inline_max: u16, max_bytes: u64) -> Self {
        ContentWriter {
            sink,
            tails,
            inline_max: inline_max.into(),
            known: HashMap::new(),
            lower: None,
            lower_used: BTreeSet::new(),
            chunks: 0,
            sparse_bytes: 0,
            max_bytes,
            stats: ContentStats::default(),
            scratch: Vec::new(),
        }
    }

    /// Content that lower layers have is from now on referenced there and not stored.
    pub(crate) fn deduplicate_against(&mut self, lower: Arc<LowerIndex>) {
        self.lower = Some(lower);
    }

    /// The lower layers that content refers to.
    pub(crate) fn lower_used(&self) -> Vec<Shown> {
        let lower = self.lower.as_ref();
        lower.map_or(Vec::new(), |lower| lower.used(&self.lower_used))
    }

    pub(crate) fn stats(&self) -> ContentStats {
        self.stats
    }

    pub(crate) fn into_parts(self) -> (S, TailStore) {
        (self.sink, self.tails)
    }

    /// Stores a file of `size` bytes without holes.
    pub(crate) fn file(&mut self, size: u64, data: &mut dyn Data) -> Result<Content, Unplaced> {
        if size <= PIECE_BYTES as u64 {
            let (first, second) = data.window(size as usize)?;
            let stored = self.piece(first, second, true)?;
            data.consume(size as usize);
            return Ok(Content {
                size,
                blocks: Blocks::Flat {
                    start: stored.start,
                },
                tail: stored.tail,
            });
        }
        if size.div_ceil(PIECE_BYTES as u64) > MAX_FILE_CHUNKS {
            let start = self.verbatim(size, data)?;
            return Ok(Content {
                size,
                blocks: Blocks::Flat { start },
                tail: None,
            });
        }
        let mut runs = Runs::default();
        let mut left = size;
        for index in 0.. {
            if left == 0 {
                break;
            }
            let wanted = left.min(PIECE_BYTES as u64) as usize;
            let (first, second) = data.window(wanted)?;
            let stored = self.piece(first, second, false)?;
            data.consume(wanted);
            runs.add(index, stored.start, PIECE_BLOCKS);
            left -= wanted as u64;
        }
        Ok(Content {
            size,
            blocks: runs.into_blocks(PIECE_BLOCKS.ilog2() as u8, size),
            tail: None,
        })
    }

    /// Stores a file with holes. `data` has the bytes of the runs without the holes.
    pub(crate) fn sparse(
        &mut self,
        map: &SparseMap,
        data: &mut dyn Data,
    ) -> Result<Content, Unplaced> {
        let shift = sparse_shift(map);
        let chunk_bytes = BLOCK_BYTES << shift;
        if !map.runs.is_empty() {
            self.chunks += map.size.div_ceil(chunk_bytes);
            check_limit(LimitKind::Chunks, self.chunks, MAX_CHUNKS)?;
        }
        let mut runs = Runs::default();
        let mut pieces = Pieces::new(map, chunk_bytes);
        while let Some(chunk) = pieces.next_chunk() {
            let length = chunk_bytes.min(map.size - chunk * chunk_bytes);
            self.sparse_bytes += length;
            check_limit(LimitKind::SparseFill, self.sparse_bytes, self.max_bytes)?;
            let start = match usize::try_from(length) {
                Ok(length) if length <= PIECE_BYTES => {
                    let mut bytes = std::mem::take(&mut self.scratch);
                    bytes.clear();
                    bytes.resize(length, 0);
                    while let Some((at, count)) = pieces.next_part(chunk) {
                        let (first, second) = data.window(count)?;
                        bytes[at as usize..][..first.len()].copy_from_slice(first);
                        bytes[at as usize + first.len()..][..second.len()].copy_from_slice(second);
                        data.consume(count);
                    }
                    let stored = if bytes.iter().all(|&b| b == 0) {
                        None
                    } else {
                        Some(self.piece(&bytes, &[], false)?)
                    };
                    self.scratch = bytes;
                    stored.map(|stored| stored.start)
                }
                _ => Some(self.sparse_chunk(chunk, length, &mut pieces, data)?),
            };
            if let Some(start) = start {
                runs.add(chunk, start, 1 << shift);
            }
        }
        Ok(Content {
            size: map.size,
            blocks: Blocks::Chunked {
                chunk_shift: shift,
                runs: runs.0.into(),
            },
            tail: None,
        })
    }

    /// Stores one chunk that is too large for a lookup.
    fn sparse_chunk(
        &mut self,
        chunk: u64,
        length: u64,
        pieces: &mut Pieces<'_>,
        data: &mut dyn Data,
    ) -> Result<u32, Unplaced> {
        let start = self.next_block(length)?;
        let mut written = 0;
        while let Some((at, count)) = pieces.next_part(chunk) {
            self.sink.append_zeros(at - written)?;
            let (first, second) = data.window(count)?;
            self.sink.append(first)?;
            self.sink.append(second)?;
            data.consume(count);
            self.stats.content_bytes += count as u64;
            written = at + count as u64;
        }
        let padded = length.next_multiple_of(BLOCK_BYTES);
        self.sink.append_zeros(padded - written)?;
        Ok(start)
    }

    /// Stores a run of a file in one place, padded to whole blocks. A run up to [`PIECE_BYTES`] is
    /// looked up.
    pub(crate) fn run(&mut self, length: u64, data: &mut dyn Data) -> Result<u32, Unplaced> {
        if length > PIECE_BYTES as u64 {
            return self.verbatim(length, data);
        }
        let (first, second) = data.window(length as usize)?;
        let stored = self.piece(first, second, false)?;
        data.consume(length as usize);
        Ok(stored.start)
    }

    /// Keeps the tail of a file apart, to be stored beside its inode.
    pub(crate) fn tail(&mut self, bytes: &[u8]) -> Result<Tail, Unplaced> {
        self.stats.content_bytes += bytes.len() as u64;
        Ok(self.tails.push(bytes, &[])?)
    }

    /// Stores data without a lookup of its pieces.
    fn verbatim(&mut self, size: u64, data: &mut dyn Data) -> Result<u32, Unplaced> {
        let start = self.next_block(size)?;
        let mut left = size;
        while left > 0 {
            let wanted = left.min(PIECE_BYTES as u64) as usize;
            let (first, second) = data.window(wanted)?;
            self.sink.append(first)?;
            self.sink.append(second)?;
            data.consume(wanted);
            left -= wanted as u64;
        }
        self.sink
            .append_zeros(size.next_multiple_of(BLOCK_BYTES) - size)?;
        self.stats.content_bytes += size;
        Ok(start)
    }

    /// Stores one piece, or finds it among those that are stored.
    fn piece(&mut self, first: &[u8], second: &[u8], may_tail: bool) -> Result<Stored, Unplaced> {
        let length = first.len() + second.len();
        if length == 0 {
            return Ok(Stored {
                start: 0,
                tail: None,
            });
        }
        self.stats.content_bytes += length as u64;
        if may_tail && length <= self.inline_max {
            // The tail is stored beside each inode, so a lookup would save nothing.
            let tail = Some(self.tails.push(first, second)?);
            return Ok(Stored { start: 0, tail });
        }
        let key = if second.is_empty() {
            *blake3::hash(first).as_bytes()
        } else {
            let mut hasher = blake3::Hasher::new();
            hasher.update(first).update(second);
            *hasher.finalize().as_bytes()
        };
        match self.known.get(&key) {
            Some(stored) if may_tail || stored.tail.is_none() => {
                self.stats.deduplicated_bytes += length as u64;
                return Ok(*stored);
            }
            _ => {}
        }
        if let Some(found) = self.lower_piece(&key, may_tail) {
            let whole = length - usize::from(found.tail);
            let cut = whole.min(first.len());
            let tail = match found.tail {
                0 => None,
                _ => Some(self.tails.push(&first[cut..], &second[whole - cut..])?),
            };
            let start = found.start;
            let stored = Stored { start, tail };
            self.stats.lower_bytes += whole as u64;
            self.lower_used.insert(found.layer);
            self.known.insert(key, stored);
            return Ok(stored);
        }
        let start = self.next_block(length as u64)?;
        let rest = length % BLOCK_BYTES as usize;
        let stored = if may_tail && rest > 0 && rest <= self.inline_max {
            let whole = length - rest;
            let cut = whole.min(first.len());
            self.sink.append(&first[..cut])?;
            self.sink.append(&second[..whole - cut])?;
            let tail = self.tails.push(&first[cut..], &second[whole - cut..])?;
            Stored {
                start,
                tail: Some(tail),
            }
        } else {
            self.sink.append(first)?;
            self.sink.append(second)?;
            if rest > 0 {
                self.sink.append_zeros(BLOCK_BYTES - rest as u64)?;
            }
            Stored { start, tail: None }
        };
        self.known.insert(key, stored);
        Ok(stored)
    }

    fn lower_piece(&self, key: &[u8; 32], may_tail: bool) -> Option<LowerPiece> {
        let found = self.lower.as_ref()?.find(key)?;
        (may_tail || found.tail == 0).then_some(found)
    }

    /// Number of the next block, if `bytes` more bytes fit.
    fn next_block(&self, bytes: u64) -> Result<u32, Unplaced> {
        let position = self.sink.position();
        debug_assert!(position.is_multiple_of(BLOCK_BYTES));
        let block = position / BLOCK_BYTES;
        let end = block.saturating_add(bytes.div_ceil(BLOCK_BYTES));
        let allowed = match self.lower {
            Some(_) => FIRST_LOWER_BLOCK.into(),
            None => MAX_BLOCKS,
        };
        match u32::try_from(block) {
            Ok(block) if end < allowed => Ok(block),
            _ => Err(Unplaced::Limit(Exceeded {
                kind: LimitKind::AddressSpace,
                value: end.saturating_mul(BLOCK_BYTES),
                allowed: allowed * BLOCK_BYTES,
            })),
        }
    }
}

/// Chunk size of a sparse file, as a shift from a block: small, so that holes remain holes, but
/// large enough that the list of chunks is not larger than the data.
fn sparse_shift(map: &SparseMap) -> u8 {
    let allowed = if map.runs.is_empty() { 1 } else { MAX_SPARSE_CHUNKS };
    let chunk_blocks = map.size.div_ceil(BLOCK_BYTES).div_ceil(allowed).max(1);
    chunk_blocks.next_power_of_two().ilog2().min(31) as u8
}

/// Collects chunk runs and merges adjacent ones.
#[derive(Default)]
struct Runs(Vec<ChunkRun>);

impl Runs {
    fn add(&mut self, chunk: u64, start: u32, chunk_blocks: u64) {
        if let Some(last) = self.0.last_mut() {
            let behind = u64::from(last.start) + last.count * chunk_blocks;
            if last.first + last.count == chunk && behind == u64::from(start) {
                last.count += 1;
                return;
            }
        }
        self.0.push(ChunkRun {
            first: chunk,
            count: 1,
            start,
        });
    }

    fn into_blocks(self, chunk_shift: u8, size: u64) -> Blocks {
        let chunks = size.div_ceil(BLOCK_BYTES << chunk_shift);
        match self.0[..] {
            [run] if run.first == 0 && run.count == chunks => Blocks::Flat { start: run.start },
            _ => Blocks::Chunked {
                chunk_shift,
                runs: self.0.into(),
            },
        }
    }
}

/// Iterates over a sparse map chunk by chunk.
struct Pieces<'m> {
    map: &'m SparseMap,
    chunk_bytes: u64,
    run: usize,
    /// Bytes of the current run that were returned.
    done: u64,
}

impl<'m> Pieces<'m> {
    fn new(map: &'m SparseMap, chunk_bytes: u64) -> Self {
        Pieces {
            map,
            chunk_bytes,
            run: 0,
            done: 0,
        }
    }

    /// The chunk that contains the next data.
    fn next_chunk(&self) -> Option<u64> {
        let run = self.map.runs.get(self.run)?;
        Some((run.offset + self.done) / self.chunk_bytes)
    }

    /// The next data within `chunk`: its offset in the chunk and its length, at most one piece.
    fn next_part(&mut self, chunk: u64) -> Option<(u64, usize)> {
        let run = self.map.runs.get(self.run)?;
        let at = run.offset + self.done;
        let chunk_start = chunk * self.chunk_bytes;
        if at / self.chunk_bytes != chunk {
            return None;
        }
        let count = (run.length - self.done)
            .min(self.chunk_bytes - (at - chunk_start))
            .min(PIECE_BYTES as u64);
        self.done += count;
        if self.done == run.length {
            self.run += 1;
            self.done = 0;
        }
        Some((at - chunk_start, count as usize))
    }
}
