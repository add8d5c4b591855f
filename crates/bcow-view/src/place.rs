//! The places of content: which blocks of files are in windows, and which become fragments.

use bcow_erofs::reader::{ExtentSource, Filesystem, Inode};
use bcow_ext4::{BlockRange, Geometry};

use crate::{BLOCK_BYTES, ViewError};

/// Blocks of a group of ext4. Windows begin at multiples of it, so that they are whole regions of a
/// file with regions of up to 128 MiB.
const GROUP: u64 = 32_768;

/// The most fragments of a view. A small image can name the same blocks any number of times.
const MAX_FRAGMENTS: usize = 1 << 22;

/// A range of the EROFS device in the ext4's address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// First block in the ext4: a multiple of 32,768.
    pub start: u64,
    /// First block on the device.
    pub device_start: u64,
    /// Number of blocks.
    pub blocks: u64,
}

impl Window {
    fn range(&self) -> BlockRange {
        BlockRange {
            start: self.start,
            count: self.blocks,
        }
    }
}

/// A block of the ext4 with bytes of the device at its start, and zeros behind them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fragment {
    /// The block in the ext4.
    pub block: u64,
    /// First byte on the device.
    pub device_offset: u64,
    /// Number of bytes, 1 to 4096.
    pub bytes: u32,
}

/// A run of blocks of a file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Piece {
    /// First block in the file.
    pub logical: u32,
    pub blocks: u32,
    pub source: RunOrigin,
}

/// Where a run of blocks comes from.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RunOrigin {
    /// From this block of the device on.
    Device(u64),
    /// From this fragment on, counted from the first.
    Fragment(u64),
}

/// Cuts files into pieces. Two that see the same files in the same order give the same pieces.
pub(crate) struct Pieces {
    /// A bit for each block of the device that a file has.
    taken: Vec<u64>,
    /// Device offset and length of each fragment.
    fragments: Vec<(u64, u32)>,
}

impl Pieces {
    pub fn new(device_blocks: u64) -> Pieces {
        Pieces {
            taken: vec![0; device_blocks.div_ceil(64) as usize],
            fragments: Vec::new(),
        }
    }

    /// Calls `each` with the pieces of a regular file, in order.
    pub fn of_file(
        &mut self,
        fs: &Filesystem,
        inode: &Inode,
        each: &mut dyn FnMut(Piece),
    ) -> Result<(), ViewError> {
        let mut run: Option<Piece> = None;
        for extent in fs.extents(inode, 0) {
            let extent = extent?;
            let ExtentSource::Device { offset } = extent.source else {
                continue;
            };
            let mut done = 0;
            while done < extent.length {
                let bytes = (extent.length - done).min(BLOCK_BYTES);
                let piece = Piece {
                    logical: ((extent.offset + done) / BLOCK_BYTES) as u32,
                    blocks: 1,
                    source: self.block(offset + done, bytes as u32)?,
                };
                done += bytes;
                run = match run {
                    Some(run) if continues(&run, &piece) => Some(Piece {
                        blocks: run.blocks + 1,
                        ..run
                    }),
                    before => {
                        before.into_iter().for_each(&mut *each);
                        Some(piece)
                    }
                };
            }
        }
        run.into_iter().for_each(each);
        Ok(())
    }

    /// The source of a block with these bytes of the device.
    fn block(&mut self, offset: u64, bytes: u32) -> Result<RunOrigin, ViewError> {
        let block = offset / BLOCK_BYTES;
        let is_whole = offset.is_multiple_of(BLOCK_BYTES) && u64::from(bytes) == BLOCK_BYTES;
        if is_whole && let Some(word) = self.taken.get_mut((block / 64) as usize) {
            let bit = 1 << (block % 64);
            if *word & bit == 0 {
                *word |= bit;
                return Ok(RunOrigin::Device(block));
            }
        }
        if self.fragments.len() == MAX_FRAGMENTS {
            return Err(ViewError::Fragments(MAX_FRAGMENTS));
        }
        self.fragments.push((offset, bytes));
        Ok(RunOrigin::Fragment(self.fragments.len() as u64 - 1))
    }
}

fn continues(run: &Piece, next: &Piece) -> bool {
    let blocks = u64::from(run.blocks);
    let is_adjacent = match (run.source, next.source) {
        (RunOrigin::Device(a), RunOrigin::Device(b)) => a + blocks == b,
        (RunOrigin::Fragment(a), RunOrigin::Fragment(b)) => a + blocks == b,
        _ => false,
    };
    is_adjacent && run.logical.checked_add(run.blocks) == Some(next.logical)
}

/// The places of windows and fragments in the ext4.
pub(crate) struct Layout {
    /// In the order of the device.
    pub windows: Vec<Window>,
    fragments: Vec<BlockRange>,
    /// Blocks in a region of the file, and in the file system.
    region_blocks: u64,
    blocks: u64,
}

impl Layout {
    /// Places windows onto `device_blocks` blocks, and fragments, between the superblock's backups.
    /// A region has `region_blocks` blocks. `None`: the file system is too small.
    pub fn new(
        geometry: &Geometry,
        device_blocks: u64,
        fragments: u64,
        region_blocks: u64,
    ) -> Option<Layout> {
        let mut free = geometry.whole_areas().collect();
        let mut device_start = 0;
        let mut windows = Vec::new();
        for range in take(&mut free, device_blocks)? {
            windows.push(Window {
                start: range.start,
                device_start,
                blocks: range.count,
            });
            device_start += range.count;
        }
        let fragments = take(&mut free, fragments)?;
        Some(Layout {
            windows,
            fragments,
            region_blocks,
            blocks: geometry.blocks(),
        })
    }

    /// The areas of content, up to the end of a region: a region with content has no metadata.
    pub fn content(&self) -> Vec<BlockRange> {
        let windows = self.windows.iter().map(Window::range);
        let content = windows.chain(self.fragments.iter().copied());
        content
            .map(|range| {
                let end = range.end().next_multiple_of(self.region_blocks);
                BlockRange {
                    start: range.start,
                    count: end.min(self.blocks) - range.start,
                }
            })
            .collect()
    }

    /// Where a run of blocks lies in the ext4, in one or more pieces.
    pub fn place(&self, source: RunOrigin, blocks: u32) -> Vec<BlockRange> {
        let blocks = blocks.into();
        match source {
            RunOrigin::Device(start) => {
                section(self.windows.iter().map(Window::range), start, blocks)
            }
            RunOrigin::Fragment(start) => section(self.fragments.iter().copied(), start, blocks),
        }
    }

    pub fn placed_fragments(&self, pieces: &Pieces) -> Vec<Fragment> {
        let blocks = self
            .fragments
            .iter()
            .flat_map(|range| range.start..range.end());
        blocks
            .zip(&pieces.fragments)
            .map(|(block, &(device_offset, bytes))| Fragment {
                block,
                device_offset,
                bytes,
            })
            .collect()
    }
}

/// Takes `blocks` from free areas, whole groups at a time: in one piece if one area is long enough,
/// else in the order of the areas.
fn take(free: &mut Vec<BlockRange>, blocks: u64) -> Option<Vec<BlockRange>> {
    let mut taken = Vec::new();
    let mut left = blocks;
    while left > 0 {
        let at = free.iter().position(|area| area.count >= left).unwrap_or(0);
        let area = free.get_mut(at)?;
        let count = left.min(area.count);
        taken.push(BlockRange {
            start: area.start,
            count,
        });
        left -= count;
        let used = count.next_multiple_of(GROUP).min(area.count);
        area.start += used;
        area.count -= used;
        if area.count == 0 {
            free.remove(at);
        }
    }
    Some(taken)
}

/// The blocks `start` to `start + count` of ranges that follow each other.
fn section(ranges: impl Iterator<Item = BlockRange>, start: u64, count: u64) -> Vec<BlockRange> {
    let mut pieces = Vec::new();
    let mut at = 0;
    let end = start + count;
    for range in ranges {
        let from = start.max(at);
        let until = end.min(at + range.count);
        if from < until {
            pieces.push(BlockRange {
                start: range.start + (from - at),
                count: until - from,
            });
        }
        at += range.count;
    }
    pieces
}

#[cfg(test)]
mod tests {
    use bcow_ext4::{BlockRange, Geometry, GeometryOptions};

    use super::{GROUP, Layout, RunOrigin};

    fn layout(bytes: u64, device_blocks: u64, fragments: u64) -> Option<Layout> {
        let options = GeometryOptions {
            bytes,
            inodes: 0,
            journal_blocks: None,
        };
        let geometry = Geometry::new(options).expect("a geometry");
        Layout::new(&geometry, device_blocks, fragments, 1024)
    }

    fn groups(layout: &Layout) -> Vec<(u64, u64)> {
        let windows = layout.windows.iter();
        windows
            .map(|window| (window.start / GROUP, window.blocks))
            .collect()
    }

    #[test]
    fn windows_are_in_one_piece_where_a_gap_is_long_enough() {
        let small = layout(64 << 30, 15 * GROUP, 100).expect("room");
        assert_eq!(groups(&small), [(10, 15 * GROUP)]);
        assert_eq!(small.fragments[0].start, 26 * GROUP);
        let large = layout(64 << 30, 15 * GROUP + 1, 100).expect("room");
        assert_eq!(groups(&large), [(28, 15 * GROUP + 1)]);
        assert_eq!(large.fragments[0].start, 10 * GROUP);
    }

    #[test]
    fn windows_are_split_where_no_gap_is_long_enough() {
        let layout = layout(16 << 30, 55 * GROUP, 1).expect("room");
        assert!(layout.windows.len() > 1);
        let total: u64 = layout.windows.iter().map(|window| window.blocks).sum();
        assert_eq!(total, 55 * GROUP);
        // A run over the border of two windows is in two pieces.
        let first = layout.windows[0];
        let expected = [
            BlockRange {
                start: first.start + first.blocks - 1,
                count: 1,
            },
            BlockRange {
                start: layout.windows[1].start,
                count: 2,
            },
        ];
        assert_eq!(
            layout.place(RunOrigin::Device(first.blocks - 1), 3),
            expected
        );
    }

    #[test]
    fn content_that_does_not_fit_is_refused() {
        assert!(layout(1 << 30, 8 * GROUP, 0).is_none());
    }
}
