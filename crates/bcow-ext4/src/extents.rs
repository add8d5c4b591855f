//! Extent trees.

use zerocopy::IntoBytes;

use crate::checksum::Checksum;
use crate::format::{BLOCK_BYTES, EXTENT_MAGIC, ExtentHeader, ExtentIndex, ExtentLeaf};
use crate::output::Output;
use crate::{BlockRange, Ext4Error, Extent};

/// Bytes of an entry, and of the head of a node.
const ENTRY: usize = size_of::<ExtentLeaf>();

/// Entries of the node in the inode.
const ROOT_ENTRIES: usize = 60 / ENTRY - 1;

/// Entries of a node in a block; the checksum is behind them.
const BLOCK_ENTRIES: usize = BLOCK_BYTES / ENTRY - 1;

/// The longest extent in blocks.
const MAX_BLOCKS: u32 = 32_768;

/// The root of a tree, and the blocks that its other nodes take.
pub(crate) struct Tree {
    pub root: [u8; 60],
    pub blocks: u64,
}

/// The extents of a file that lies in `ranges`, one behind the other.
pub(crate) fn of_ranges(ranges: &[BlockRange]) -> Vec<Extent> {
    let mut logical = 0;
    let mut extents = Vec::new();
    for range in ranges {
        extents.push(Extent {
            logical,
            physical: range.start,
            blocks: range.count as u32,
        });
        logical += range.count as u32;
    }
    extents
}

/// Builds the tree of extents in ascending order, and writes the nodes that the inode cannot hold.
/// `seed` is that of the inode.
pub(crate) fn build(
    extents: &[Extent],
    seed: Checksum,
    output: &mut Output<'_>,
) -> Result<Tree, Ext4Error> {
    let mut entries: Vec<(u32, [u8; ENTRY])> = Vec::with_capacity(extents.len());
    for extent in joined(extents) {
        let leaf = ExtentLeaf {
            logical: extent.logical.into(),
            blocks: (extent.blocks as u16).into(),
            physical_high: ((extent.physical >> 32) as u16).into(),
            physical_low: (extent.physical as u32).into(),
        };
        entries.push((extent.logical, zerocopy::transmute!(leaf)));
    }
    let mut depth = 0;
    let mut blocks = 0;
    while entries.len() > ROOT_ENTRIES {
        let mut above = Vec::with_capacity(entries.len().div_ceil(BLOCK_ENTRIES));
        for node in entries.chunks(BLOCK_ENTRIES) {
            let mut buffer = [0; BLOCK_BYTES];
            fill(&mut buffer, node, BLOCK_ENTRIES, depth);
            let tail = (1 + BLOCK_ENTRIES) * ENTRY;
            let checksum = seed.with(&buffer[..tail]);
            buffer[tail..].copy_from_slice(&checksum.0.to_le_bytes());
            let block = output.allocate()?;
            output.write(block, &buffer)?;
            blocks += 1;
            let logical = node[0].0;
            let index = ExtentIndex {
                logical: logical.into(),
                node_low: (block as u32).into(),
                node_high: ((block >> 32) as u16).into(),
                unused: 0.into(),
            };
            above.push((logical, zerocopy::transmute!(index)));
        }
        entries = above;
        depth += 1;
    }
    let mut root = [0; 60];
    fill(&mut root, &entries, ROOT_ENTRIES, depth);
    Ok(Tree { root, blocks })
}

/// Writes a node's head and entries.
fn fill(node: &mut [u8], entries: &[(u32, [u8; ENTRY])], max: usize, depth: u16) {
    let header = ExtentHeader {
        magic: EXTENT_MAGIC.into(),
        entries: (entries.len() as u16).into(),
        max: (max as u16).into(),
        depth: depth.into(),
        generation: 0.into(),
    };
    node[..ENTRY].copy_from_slice(header.as_bytes());
    for (place, (_, entry)) in node[ENTRY..].chunks_exact_mut(ENTRY).zip(entries) {
        place.copy_from_slice(entry);
    }
}

/// Joins adjacent extents and splits long ones.
fn joined(extents: &[Extent]) -> Vec<Extent> {
    let mut joined: Vec<Extent> = Vec::with_capacity(extents.len());
    for &extent in extents {
        let mut rest = extent;
        while rest.blocks > 0 {
            let last = joined.last_mut().filter(|last| {
                last.logical + last.blocks == rest.logical
                    && last.physical + u64::from(last.blocks) == rest.physical
                    && last.blocks < MAX_BLOCKS
            });
            let count = match last {
                Some(last) => {
                    let count = rest.blocks.min(MAX_BLOCKS - last.blocks);
                    last.blocks += count;
                    count
                }
                None => {
                    let blocks = rest.blocks.min(MAX_BLOCKS);
                    joined.push(Extent { blocks, ..rest });
                    blocks
                }
            };
            rest.blocks -= count;
            if rest.blocks > 0 {
                rest.logical += count;
                rest.physical += u64::from(count);
            }
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::joined;
    use crate::Extent;

    fn extent(logical: u32, physical: u64, blocks: u32) -> Extent {
        Extent {
            logical,
            physical,
            blocks,
        }
    }

    #[test]
    fn adjacent_extents_are_joined_and_long_ones_split() {
        let given = [
            extent(0, 100, 2),
            extent(2, 102, 40_000),
            extent(50_000, 200_000, 1),
            extent(50_001, 300_000, 1),
        ];
        let expected = [
            extent(0, 100, 32_768),
            extent(32_768, 32_868, 7_234),
            extent(50_000, 200_000, 1),
            extent(50_001, 300_000, 1),
        ];
        assert_eq!(joined(&given), expected);
    }
}
