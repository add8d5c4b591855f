//! The list of what a start reads, in the metadata of an image (spec section 13, `prefetch`).
//!
//! A list is a hint from wherever the image comes from. What it names is looked up within bounds,
//! and it can name nothing but blocks of the image.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use bcow::chain::MAX_DEPTH;
use bcow::format::{BackingName, Stored};
use bcow::{BlockDevice, Error, Image, Mapping};
use serde_json::Value;

use crate::image::OpenImage;

/// The greatest number of ranges of a prefetch list that are used (spec section 13).
const MAX_RANGES: usize = 1 << 16;
/// Bytes of the sectors in which a prefetch list counts.
const SECTOR_BYTES: u64 = 4096;
/// The greatest number of extents that are looked up, as a list may name the same ones repeatedly.
const MAX_EXTENTS: usize = 1 << 20;

/// An image, with the images whose blocks it shows.
pub struct Shown {
    image: Arc<Image>,
    /// The images below it, by the digest of their file.
    below: HashMap<[u8; 32], Arc<Image>>,
}

/// The list of an image.
pub struct List {
    shown: Shown,
    /// Bytes of the address space, in the order of their use.
    ranges: Vec<Range<u64>>,
}

impl Shown {
    /// Reads nothing.
    pub fn by(image: &OpenImage) -> Self {
        let opened = image.opened();
        let layers = opened.layers.iter().filter_map(|layer| {
            let file = layer.file.as_ref()?;
            Some((layer.recorded.digest.sha256()?, Arc::clone(&file.image)))
        });
        Shown {
            image: Arc::clone(&opened.image),
            below: layers.collect(),
        }
    }

    /// The image itself.
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// The list in the metadata of the image, if there is one that keeps the rules.
    pub fn list(self, metadata: &Value) -> Option<List> {
        let ranges = ranges(metadata, self.image.size())?;
        Some(List {
            shown: self,
            ranges,
        })
    }
}

impl List {
    /// Number of ranges.
    pub fn ranges(&self) -> usize {
        self.ranges.len()
    }

    /// Bytes of the address space in them.
    pub fn bytes(&self) -> u64 {
        let lengths = self.ranges.iter().map(|range| range.end - range.start);
        lengths.fold(0, u64::saturating_add)
    }

    /// Calls `sink` with each stored block of the ranges, once, in their order, and the image that
    /// has it.
    pub fn blocks(&self, sink: &mut dyn FnMut(&Image, Stored)) -> Result<(), Error> {
        let mut lookup = Lookup {
            below: &self.shown.below,
            known: HashSet::new(),
            extents_left: MAX_EXTENTS,
            sink,
        };
        for range in &self.ranges {
            lookup.find(&self.shown.image, range.clone(), 0)?;
        }
        Ok(())
    }
}

struct Lookup<'l> {
    below: &'l HashMap<[u8; 32], Arc<Image>>,
    /// Blocks, by their image and their place in its file.
    known: HashSet<(*const Image, u64)>,
    extents_left: usize,
    sink: &'l mut dyn FnMut(&Image, Stored),
}

impl Lookup<'_> {
    fn find(&mut self, image: &Arc<Image>, range: Range<u64>, depth: u32) -> Result<(), Error> {
        let mut at = range.start;
        while at < range.end.min(image.size()) && self.extents_left > 0 {
            self.extents_left -= 1;
            let extent = image.map(at)?;
            let end = extent.offset + extent.length;
            match extent.mapping {
                Mapping::Raw { stored } | Mapping::Compressed { stored }
                    if self.known.insert((Arc::as_ptr(image), stored.at.0)) =>
                {
                    (self.sink)(image, stored);
                }
                Mapping::Backing {
                    index,
                    offset,
                    bytes,
                    ..
                } if depth < MAX_DEPTH => {
                    let shown_end = (extent.offset + bytes).min(range.end);
                    if let Some(below) = self.image_below(image, index)
                        && at < shown_end
                    {
                        let start = offset + (at - extent.offset);
                        self.find(&below, start..start + (shown_end - at), depth + 1)?;
                    }
                }
                _ => {}
            }
            at = end;
        }
        Ok(())
    }

    fn image_below(&self, image: &Image, index: u32) -> Option<Arc<Image>> {
        match &image.backings().nth(index as usize)?.name {
            BackingName::Digest(digest) => self.below.get(digest).map(Arc::clone),
            _ => None,
        }
    }
}

/// The ranges of the address space in the prefetch list, in bytes. `None` without a list, or with
/// an invalid one.
fn ranges(metadata: &Value, size: u64) -> Option<Vec<Range<u64>>> {
    let list = metadata.get("prefetch")?.get("ranges")?.as_array()?;
    let range = |pair: &Value| {
        let [first, count] = pair.as_array()?.as_slice() else {
            return None;
        };
        let start = first.as_u64()?.checked_mul(SECTOR_BYTES)?;
        let bytes = count.as_u64()?.checked_mul(SECTOR_BYTES)?;
        let end = bytes.checked_add(start)?;
        (start < end && end <= size).then_some(start..end)
    };
    match list.len() {
        0..=MAX_RANGES => list.iter().map(range).collect(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn found(list: &Value) -> Option<Vec<Range<u64>>> {
        let metadata = json!({"prefetch": {"ranges": list}});
        ranges(&metadata, 10 * SECTOR_BYTES)
    }

    #[test]
    fn a_list_has_ranges_of_sectors() {
        assert_eq!(ranges(&json!({}), 40960), None);
        let two = Some(vec![32768..40960, 0..4096]);
        assert_eq!(found(&json!([[8, 2], [0, 1]])), two);
    }

    #[test]
    fn a_list_that_breaks_the_rules_is_unused() {
        for wrong in [
            json!([[8, 3]]),
            json!([[0, 1], [1, 0]]),
            json!([[1]]),
            json!([3]),
            json!([[-1, 2]]),
            json!([[u64::MAX, 2]]),
            json!([[u64::MAX / SECTOR_BYTES, 2]]),
            json!({"0": [0, 1]}),
            Value::from(vec![json!([0, 1]); MAX_RANGES + 1]),
        ] {
            assert_eq!(found(&wrong), None);
        }
    }
}
