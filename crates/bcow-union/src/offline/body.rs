//! The content of a file of the union, composed of pieces of the file above the image (on the host,
//! or on a disk) and of the image's file.

use std::sync::Arc;

use bcow_erofs::reader::{ExtentSource, Filesystem, Inode};
use bcow_erofs::tree::{Blocks, ChunkRun, Content};
use bcow_ext4::Extents;

use super::addresses::{LOWER_START, Segments};
use super::error::Problem;
use crate::blocks::BLOCK_BYTES;

/// The largest number of chunks of a file in pieces. Each takes eight bytes of memory. With chunks
/// of 4 KiB, this is 16 GiB of file size.
const MAX_CHUNKS: u64 = 4 << 20;

/// The source of a piece of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PieceSource {
    /// The file above the image, at the same offset.
    Own,
    /// The lower file, at the same offset.
    Lower,
    /// Zeros.
    Hole,
}

/// A run of a file's bytes. The next piece begins where it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    /// The end of the run: the offset after its last byte.
    pub(super) end: u64,
    /// The source of the run.
    pub(super) source: PieceSource,
}

impl Piece {
    pub(super) fn new(end: u64, source: PieceSource) -> Self {
        Piece { end, source }
    }

    /// Adds the bytes up to `end` to pieces of a file, in order.
    pub(super) fn push(pieces: &mut Vec<Piece>, end: u64, source: PieceSource) {
        let start = pieces.last().map_or(0, |last| last.end);
        match pieces.last_mut() {
            _ if end <= start => {}
            Some(last) if last.source == source => last.end = end,
            _ => pieces.push(Piece { end, source }),
        }
    }
}

/// The file above the image.
#[derive(Debug, Clone)]
pub(super) enum Own {
    /// A file of the upper.
    Host {
        /// The path below the upper.
        path: Vec<u8>,
        /// Inode number.
        inode: u64,
    },
    /// These blocks of the disk.
    Disk(Arc<Extents>),
}

/// A regular file.
#[derive(Debug, Clone)]
pub(super) struct Body {
    /// Size in bytes.
    pub(super) size: u64,
    /// The file with the pieces that are not the image's; `None` if all content is the image's.
    pub(super) own: Option<Own>,
    /// The lower file, if there is one.
    pub(super) lower: Option<Inode>,
    /// The pieces, up to `size`.
    pub(super) pieces: Vec<Piece>,
}

impl Body {
    /// An unchanged file of the image.
    pub(super) fn of_lower(inode: Inode) -> Body {
        Body {
            size: inode.size,
            own: None,
            lower: Some(inode),
            pieces: vec![Piece::new(inode.size, PieceSource::Lower)],
        }
    }

    /// The piece that holds byte `offset`.
    pub(super) fn piece(&self, offset: u64) -> Piece {
        let index = self.pieces.partition_point(|piece| piece.end <= offset);
        let piece = self.pieces.get(index).copied();
        piece.unwrap_or(Piece::new(u64::MAX, PieceSource::Hole))
    }

    /// The place of the content in the spliced device. The image's bytes keep their place there if
    /// whole chunks lie in whole blocks of the image. The rest gets addresses in `segments`, which
    /// read this body.
    pub(super) fn content(
        &self,
        index: u32,
        lower: &Filesystem,
        segments: &mut Segments,
    ) -> Result<Content, Problem> {
        let size = self.size;
        let mut shift = 0;
        while size.div_ceil(BLOCK_BYTES << shift) > MAX_CHUNKS {
            shift += 1;
        }
        let mut chunks = Chunks {
            body: index,
            size,
            shift,
            runs: Vec::new(),
            open: None,
            segments,
        };
        let mut start = 0;
        for piece in &self.pieces {
            let end = piece.end.min(size);
            match piece.source {
                _ if start >= end => {}
                PieceSource::Hole => {}
                PieceSource::Own => chunks.own(start, end)?,
                PieceSource::Lower => {
                    if let Some(inode) = &self.lower {
                        lower_piece(inode, start, end, lower, &mut chunks)?;
                    }
                }
            }
            start = end;
        }
        chunks.finish()
    }
}

fn lower_piece(
    inode: &Inode,
    start: u64,
    end: u64,
    lower: &Filesystem,
    chunks: &mut Chunks<'_>,
) -> Result<(), Problem> {
    for extent in lower.extents(inode, start) {
        let extent = extent.map_err(Problem::Image)?;
        if extent.offset >= end {
            break;
        }
        let extent_end = (extent.offset + extent.length).min(end);
        if let ExtentSource::Device { offset } = extent.source {
            chunks.below(extent.offset, extent_end, offset)?;
        }
    }
    Ok(())
}

/// Collects the runs of a file. Pieces are added in order.
struct Chunks<'s> {
    body: u32,
    size: u64,
    shift: u8,
    runs: Vec<ChunkRun>,
    /// The first chunk and the end of a run of own chunks that has no addresses yet.
    open: Option<(u64, u64)>,
    segments: &'s mut Segments,
}

impl Chunks<'_> {
    fn chunk_bytes(&self) -> u64 {
        BLOCK_BYTES << self.shift
    }

    /// Adds bytes that are read through the body.
    fn own(&mut self, start: u64, end: u64) -> Result<(), Problem> {
        let first = start / self.chunk_bytes();
        let last = end.div_ceil(self.chunk_bytes());
        match &mut self.open {
            Some((_, open_end)) if first <= *open_end => *open_end = (*open_end).max(last),
            _ => {
                self.close()?;
                self.open = Some((first, last));
            }
        }
        Ok(())
    }

    /// Adds bytes that lie at byte `device` of the image.
    fn below(&mut self, start: u64, end: u64, device: u64) -> Result<(), Problem> {
        let chunk = self.chunk_bytes();
        let first = start.div_ceil(chunk);
        let last = if end == self.size { end.div_ceil(chunk) } else { end / chunk };
        let at = device + (first * chunk).saturating_sub(start);
        if first >= last || !at.is_multiple_of(BLOCK_BYTES) {
            return self.own(start, end);
        }
        if start < first * chunk {
            self.own(start, first * chunk)?;
        }
        // The chunks that an earlier piece has taken stay as they are.
        let taken = self.open.map_or(0, |(_, open_end)| open_end);
        let (first, at) =
            if taken > first { (taken, at + (taken - first) * chunk) } else { (first, at) };
        self.close()?;
        if first < last {
            let start =
                u32::try_from((LOWER_START + at) / BLOCK_BYTES).map_err(|_| Problem::TooLarge)?;
            self.push(ChunkRun {
                first,
                count: last - first,
                start,
            });
        }
        if last * chunk < end {
            self.own(last * chunk, end)?;
        }
        Ok(())
    }

    fn push(&mut self, run: ChunkRun) {
        if let Some(before) = self.runs.last_mut() {
            let next = u64::from(before.start) + (before.count << self.shift);
            if before.first + before.count == run.first && next == u64::from(run.start) {
                before.count += run.count;
                return;
            }
        }
        self.runs.push(run);
    }

    fn close(&mut self) -> Result<(), Problem> {
        let Some((first, end)) = self.open.take() else {
            return Ok(());
        };
        let offset = first * self.chunk_bytes();
        let bytes = (end * self.chunk_bytes()).min(self.size) - offset;
        let start = self
            .segments
            .add(self.body, offset, bytes)
            .ok_or(Problem::TooLarge)?;
        self.push(ChunkRun {
            first,
            count: end - first,
            start,
        });
        Ok(())
    }

    fn finish(mut self) -> Result<Content, Problem> {
        self.close()?;
        let chunks = self.size.div_ceil(self.chunk_bytes());
        let blocks = match &self.runs[..] {
            [] if self.size == 0 => Blocks::Flat { start: 0 },
            [run] if run.first == 0 && run.count == chunks => Blocks::Flat { start: run.start },
            _ => Blocks::Chunked {
                chunk_shift: self.shift,
                runs: self.runs.into(),
            },
        };
        Ok(Content {
            size: self.size,
            blocks,
            tail: None,
        })
    }
}
