//! Where a plan puts things in the address space.

use std::ops::Range;

use super::Plan;
use crate::format::{BLOCK_BYTES, SLOT_BYTES};
use crate::tree::{Blocks, ChunkRun, Content, NodeId};

/// A piece of the metadata.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetadataPlace {
    /// The node it belongs to.
    pub node: NodeId,
    /// Whether it is the blocks of a directory or link; otherwise it is the inode, with what is
    /// stored beside it.
    pub is_blocks: bool,
    /// Bytes of the address space. A piece reaches to the start of the next one.
    pub bytes: Range<u64>,
}

impl Plan<'_> {
    /// The pieces of the metadata, in the order of the address space, without the shared xattrs.
    pub fn metadata_places(&self) -> impl Iterator<Item = MetadataPlace> + '_ {
        let start = u64::from(self.metadata_block) * BLOCK_BYTES as u64;
        let items = &self.layout.items;
        let byte = move |slot: u32| start + u64::from(slot) * SLOT_BYTES as u64;
        let end = start + self.layout.blocks * BLOCK_BYTES as u64;
        items.iter().enumerate().map(move |(index, item)| {
            let next = items.get(index + 1).map_or(end, |next| byte(next.slot));
            MetadataPlace {
                node: item.node,
                is_blocks: item.blocks,
                bytes: byte(item.slot)..next,
            }
        })
    }

    /// Calls `sink` with each run of these blocks of a file: the first block of the address space,
    /// and the number. Blocks that are holes, or beside the inode, are left out.
    pub fn content_blocks(
        &self,
        content: &Content,
        blocks: Range<u64>,
        sink: &mut dyn FnMut(u64, u64),
    ) {
        stored_runs(content, blocks, &mut |block, count| {
            sink(self.place(block).into(), count);
        });
    }
}

/// Calls `sink` with the runs of these blocks, by their addresses in the tree.
fn stored_runs(content: &Content, blocks: Range<u64>, sink: &mut dyn FnMut(u32, u64)) {
    let tail = content.tail.map_or(0, |tail| u64::from(tail.length));
    let whole = (content.size - tail).div_ceil(BLOCK_BYTES as u64);
    let end = blocks.end.min(whole);
    let mut run = |first: u64, behind: u64, start: u32| {
        let from = blocks.start.max(first);
        let to = end.min(behind);
        // Below 2^32, because all content is.
        if from < to
            && let Ok(block) = u32::try_from(u64::from(start) + (from - first))
        {
            sink(block, to - from);
        }
    };
    match &content.blocks {
        Blocks::Flat { start } => run(0, whole, *start),
        Blocks::Dropped => {}
        Blocks::Chunked { chunk_shift, runs } => {
            let behind = |run: &ChunkRun| (run.first + run.count) << chunk_shift;
            let skipped = runs.partition_point(|run| behind(run) <= blocks.start);
            for chunks in &runs[skipped..] {
                let first = chunks.first << chunk_shift;
                if first >= end {
                    break;
                }
                run(first, behind(chunks), chunks.start);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::Tail;

    fn found(content: &Content, blocks: Range<u64>) -> Vec<(u32, u64)> {
        let mut found = Vec::new();
        stored_runs(content, blocks, &mut |block, count| {
            found.push((block, count));
        });
        found
    }

    #[test]
    fn a_flat_file_has_its_blocks_without_the_tail() {
        let mut content = Content {
            size: 10 * 4096 + 5,
            blocks: Blocks::Flat { start: 100 },
            tail: Some(Tail {
                offset: 0,
                length: 5,
            }),
        };
        assert_eq!(found(&content, 0..u64::MAX), [(100, 10)]);
        assert_eq!(found(&content, 3..5), [(103, 2)]);
        assert_eq!(found(&content, 10..11), []);
        content.tail = None;
        assert_eq!(found(&content, 9..20), [(109, 2)]);
    }

    #[test]
    fn a_file_in_chunks_has_its_runs_without_the_holes() {
        let run = |first, count, start| ChunkRun {
            first,
            count,
            start,
        };
        // Chunks of 2 blocks; the last one has 1.
        let content = Content {
            size: 19 * 4096,
            blocks: Blocks::Chunked {
                chunk_shift: 1,
                runs: [run(1, 2, 500), run(3, 1, 40), run(8, 2, 900)].into(),
            },
            tail: None,
        };
        assert_eq!(found(&content, 0..100), [(500, 4), (40, 2), (900, 3)]);
        assert_eq!(found(&content, 5..7), [(503, 1), (40, 1)]);
        assert_eq!(found(&content, 8..16), []);
        assert_eq!(found(&content, 18..19), [(902, 1)]);
    }
}
