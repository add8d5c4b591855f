//! The list of what a start reads, in an image (spec section 13, `prefetch`).
//!
//! It is made of a trace ([`crate::trace`]): first the superblock and the metadata that lookups of
//! the trace's files need, then the content, in the order of the trace.

use std::collections::HashSet;
use std::sync::Arc;

use bcow_erofs::tree::{NodeId, NodeKind, Tree};
use bcow_erofs::writer::Plan;
use serde_json::{Value, json};

use crate::digest::Digest;
use crate::error::ConvertError;
use crate::space::BLOCK_BYTES;
use crate::text::plural;
use crate::trace::{Trace, TraceError, TracePart};

/// The greatest number of ranges in an image; what follows is left out.
const MAX_RANGES: usize = 1 << 16;
/// Ranges with at most this many blocks between them become one.
const GAP_BLOCKS: u64 = 3;

/// What a start reads, for a conversion.
#[derive(Debug, Clone)]
pub struct Prefetch {
    trace: Arc<Trace>,
    /// The digest of the trace's text.
    digest: String,
}

impl Prefetch {
    /// Reads a trace of `bcow mount --record`.
    pub fn parse(text: &[u8]) -> Result<Self, TraceError> {
        Ok(Prefetch {
            trace: Arc::new(Trace::parse(text)?),
            digest: Digest::of(text).to_string(),
        })
    }

    /// The regular files of the trace in this tree, each once, in order.
    pub(crate) fn files(&self, tree: &Tree) -> Vec<NodeId> {
        let mut known = HashSet::new();
        let paths = self.trace.parts.iter().filter_map(|part| match part {
            TracePart::File { path, .. } => Some(path),
            TracePart::Directory { .. } => None,
        });
        paths
            .filter_map(|path| tree.find(path))
            .filter(|&id| matches!(tree.node(id).kind, NodeKind::Regular(_)) && known.insert(id))
            .collect()
    }

    /// The value of the metadata's key for an image of this plan.
    pub(crate) fn describe(&self, tree: &Tree, plan: &Plan<'_>) -> Result<Value, ConvertError> {
        let mut ranges = Ranges::default();
        ranges.add(0, 1);
        self.metadata(tree, plan, &mut ranges);
        let mut known = HashSet::new();
        let mut missing = 0;
        for part in &self.trace.parts {
            let TracePart::File { path, blocks } = part else {
                continue;
            };
            let found = tree.find(path).map(|id| (id, &tree.node(id).kind));
            let Some((id, NodeKind::Regular(content))) = found else {
                missing += 1;
                continue;
            };
            if !known.insert(id) {
                continue;
            }
            // Reads of one file overtake one another; in order, they are fewer ranges.
            let mut blocks = blocks.clone();
            blocks.sort_unstable();
            for (first, count) in blocks {
                plan.content_blocks(content, first..first + count, &mut |first, count| {
                    ranges.add(first, count);
                });
                if ranges.0.len() > MAX_RANGES {
                    break;
                }
            }
        }
        if known.is_empty() {
            return Err(ConvertError::Options(
                "the trace names no file of this image".to_owned(),
            ));
        }
        if missing > 0 {
            let files = plural(missing, "file");
            tracing::warn!("the trace names {files} that the image does not have");
        }
        if ranges.0.len() > MAX_RANGES {
            tracing::warn!("the list of what a start reads ends after {MAX_RANGES} ranges");
            ranges.0.truncate(MAX_RANGES);
        }
        Ok(json!({"trace": self.digest, "ranges": ranges.0}))
    }

    /// Adds the directories that lookups of the trace's paths read, and the inodes.
    fn metadata(&self, tree: &Tree, plan: &Plan<'_>, ranges: &mut Ranges) {
        let mut inodes = HashSet::from([Tree::ROOT]);
        let mut directories = HashSet::from([Tree::ROOT]);
        for part in &self.trace.parts {
            let (TracePart::File { path, .. } | TracePart::Directory { path }) = part;
            let mut at = Tree::ROOT;
            for name in path.split(|&byte| byte == b'/') {
                let NodeKind::Directory(directory) = &tree.node(at).kind else {
                    break;
                };
                directories.insert(at);
                let Some(&child) = directory.children.get(name) else {
                    break;
                };
                inodes.insert(child);
                at = child;
            }
            if let TracePart::Directory { path } = part
                && let Some(id) = tree.find(path)
                && let NodeKind::Directory(directory) = &tree.node(id).kind
            {
                directories.insert(id);
                inodes.extend(directory.children.values());
            }
        }
        for place in plan.metadata_places() {
            let is_needed = if place.is_blocks {
                directories.contains(&place.node)
            } else {
                inodes.contains(&place.node)
            };
            if is_needed {
                let first = place.bytes.start / BLOCK_BYTES;
                let end = place.bytes.end.div_ceil(BLOCK_BYTES);
                ranges.add(first, end - first);
            }
        }
    }
}

/// Ranges of blocks of the address space.
#[derive(Default)]
struct Ranges(Vec<[u64; 2]>);

impl Ranges {
    fn add(&mut self, first: u64, count: u64) {
        let end = first + count;
        match self.0.last_mut() {
            Some([last, blocks]) if first >= *last && first <= *last + *blocks + GAP_BLOCKS => {
                *blocks = (*blocks).max(end - *last);
            }
            _ => self.0.push([first, count]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_ranges_become_one() {
        let mut ranges = Ranges::default();
        for (first, count) in [(0, 1), (10, 2), (11, 3), (17, 1), (22, 1), (5, 1)] {
            ranges.add(first, count);
        }
        assert_eq!(ranges.0, [[0, 1], [10, 8], [22, 1], [5, 1]]);
    }
}
