//! Blocks of a file: their size, and sets of them.

use std::collections::BTreeMap;
use std::ops::Range;

/// Bytes of a block, the unit of copy-on-write and of the size limit.
pub const BLOCK_BYTES: u64 = 4096;

/// Blocks of a region. A region is the unit of allocation of a [`BlockSet`].
const REGION_BLOCKS: u64 = 512;
const WORDS: usize = (REGION_BLOCKS / 64) as usize;

/// A set of block numbers.
///
/// A region (2 MiB) of which some blocks are in the set takes one bit of memory for each of its
/// blocks. A range of adjacent regions that are completely in the set takes one map entry.
#[derive(Debug, Clone, Default)]
pub struct BlockSet {
    some: BTreeMap<u64, Box<[u64; WORDS]>>,
    /// Ranges of regions that are completely in the set: start to end. They neither overlap nor
    /// touch.
    whole: BTreeMap<u64, u64>,
    len: u64,
}

impl BlockSet {
    /// The number of blocks in the set.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether a block is in the set.
    pub fn contains(&self, block: u64) -> bool {
        let (region, word, bit) = place(block);
        match self.some.get(&region) {
            Some(words) => words[word] >> bit & 1 == 1,
            None => self.whole_end(region).is_some(),
        }
    }

    /// Whether all of `blocks` are in the set.
    pub fn contains_all(&self, blocks: Range<u64>) -> bool {
        let mut at = blocks.start;
        while at < blocks.end {
            let (inside, end) = self.run(at, blocks.end);
            if !inside {
                return false;
            }
            at = end;
        }
        true
    }

    /// Whether `block` is in the set, and the end of a run of blocks for which the answer is the
    /// same. The run ends at `end` at the latest. It may end before the answer changes.
    pub fn run(&self, block: u64, end: u64) -> (bool, u64) {
        let (region, first_word, bit) = place(block);
        if let Some(words) = self.some.get(&region) {
            let inside = words[first_word] >> bit & 1 == 1;
            let start = region * REGION_BLOCKS;
            // A one bit where a block differs from `block`.
            let differs = |word: usize| if inside { !words[word] } else { words[word] };
            let mut here = differs(first_word) & (u64::MAX << bit);
            for word in first_word..WORDS {
                if word > first_word {
                    here = differs(word);
                }
                if here != 0 {
                    let at = start + word as u64 * 64 + u64::from(here.trailing_zeros());
                    return (inside, at.min(end));
                }
            }
            return (inside, (start + REGION_BLOCKS).min(end));
        }
        if let Some(whole_end) = self.whole_end(region) {
            return (true, whole_end.saturating_mul(REGION_BLOCKS).min(end));
        }
        let next_some = self.some.range(region..).next().map(|(next, _)| *next);
        let next_whole = self.whole.range(region..).next().map(|(next, _)| *next);
        let next = next_some.into_iter().chain(next_whole).min();
        let until = next.map_or(end, |next| next.saturating_mul(REGION_BLOCKS));
        (false, until.min(end))
    }

    /// The maximal ranges of `within` that are in the set, in order.
    pub fn runs(&self, within: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        let mut at = within.start;
        std::iter::from_fn(move || {
            let mut found: Option<Range<u64>> = None;
            while at < within.end {
                let (inside, end) = self.run(at, within.end);
                match &mut found {
                    None if inside => found = Some(at..end),
                    Some(range) if inside => range.end = end,
                    Some(_) => break,
                    None => {}
                }
                at = end;
            }
            found
        })
    }

    /// Adds `blocks` and returns the number of them that were not in the set.
    pub fn insert(&mut self, blocks: Range<u64>) -> u64 {
        let before = self.len;
        for piece in pieces(blocks) {
            match piece {
                Piece::Part(region, bits) => self.insert_part(region, bits),
                Piece::Regions(regions) => self.insert_regions(regions),
            }
        }
        self.len - before
    }

    /// Removes `blocks` and returns the number of them that were in the set.
    pub fn remove(&mut self, blocks: Range<u64>) -> u64 {
        let before = self.len;
        for piece in pieces(blocks) {
            match piece {
                Piece::Part(region, bits) => self.remove_part(region, bits),
                Piece::Regions(regions) => self.remove_regions(regions),
            }
        }
        before - self.len
    }

    /// Adds all blocks of another set.
    pub fn extend(&mut self, other: &BlockSet) {
        for run in other.runs(0..u64::MAX) {
            self.insert(run);
        }
    }

    /// The end of the range of complete regions that contains `region`.
    fn whole_end(&self, region: u64) -> Option<u64> {
        let (_, end) = self.whole.range(..=region).next_back()?;
        (*end > region).then_some(*end)
    }

    fn insert_part(&mut self, region: u64, bits: Range<u64>) {
        if self.whole_end(region).is_some() {
            return;
        }
        let words = self.some.entry(region).or_default();
        let mut full = true;
        for (index, word) in words.iter_mut().enumerate() {
            let added = mask(index, &bits) & !*word;
            self.len += u64::from(added.count_ones());
            *word |= added;
            full &= *word == u64::MAX;
        }
        if full {
            self.some.remove(&region);
            self.join(region..region + 1);
        }
    }

    fn insert_regions(&mut self, regions: Range<u64>) {
        self.remove_regions(regions.clone());
        self.len += (regions.end - regions.start).saturating_mul(REGION_BLOCKS);
        self.join(regions);
    }

    /// Adds regions to the ranges of complete regions. None of them may be in the set.
    fn join(&mut self, regions: Range<u64>) {
        let Range { mut start, mut end } = regions;
        if let Some((&before, &before_end)) = self.whole.range(..start).next_back()
            && before_end == start
        {
            start = before;
        }
        if let Some(after_end) = self.whole.remove(&end) {
            end = after_end;
        }
        self.whole.insert(start, end);
    }

    fn remove_part(&mut self, region: u64, bits: Range<u64>) {
        if self.whole_end(region).is_some() {
            self.cut_out(region..region + 1);
            self.some.insert(region, Box::new([u64::MAX; WORDS]));
        }
        let Some(words) = self.some.get_mut(&region) else {
            return;
        };
        let mut empty = true;
        for (index, word) in words.iter_mut().enumerate() {
            let removed = mask(index, &bits) & *word;
            self.len -= u64::from(removed.count_ones());
            *word &= !removed;
            empty &= *word == 0;
        }
        if empty {
            self.some.remove(&region);
        }
    }

    fn remove_regions(&mut self, regions: Range<u64>) {
        while let Some((&region, words)) = self.some.range(regions.clone()).next() {
            let held: u32 = words.iter().map(|word| word.count_ones()).sum();
            self.len -= u64::from(held);
            self.some.remove(&region);
        }
        self.len -= self.cut_out(regions).saturating_mul(REGION_BLOCKS);
    }

    /// Removes regions from the ranges of complete regions and returns the number of them that were
    /// there.
    fn cut_out(&mut self, regions: Range<u64>) -> u64 {
        let mut removed = 0;
        while let Some((&start, &end)) = self.whole.range(..regions.end).next_back()
            && end > regions.start
        {
            self.whole.remove(&start);
            if end > regions.end {
                self.whole.insert(regions.end, end);
            }
            if start < regions.start {
                self.whole.insert(start, regions.start);
            }
            removed += end.min(regions.end) - start.max(regions.start);
        }
        removed
    }
}

/// The region of a block, the word in the region, and the bit in the word.
fn place(block: u64) -> (u64, usize, u32) {
    let within = block % REGION_BLOCKS;
    (
        block / REGION_BLOCKS,
        (within / 64) as usize,
        (within % 64) as u32,
    )
}

/// The bits of a region's word `word` that are in the range `bits` of the region.
fn mask(word: usize, bits: &Range<u64>) -> u64 {
    let first = word as u64 * 64;
    let start = bits.start.clamp(first, first + 64) - first;
    let end = bits.end.clamp(first, first + 64) - first;
    match end - start {
        0 => 0,
        64 => u64::MAX,
        count => ((1 << count) - 1) << start,
    }
}

enum Piece {
    /// Bits of one region.
    Part(u64, Range<u64>),
    Regions(Range<u64>),
}

fn pieces(blocks: Range<u64>) -> impl Iterator<Item = Piece> {
    let mut at = blocks.start;
    std::iter::from_fn(move || {
        if at >= blocks.end {
            return None;
        }
        let region = at / REGION_BLOCKS;
        let start = region * REGION_BLOCKS;
        let whole = blocks.end / REGION_BLOCKS;
        if at == start && whole > region {
            at = whole * REGION_BLOCKS;
            return Some(Piece::Regions(region..whole));
        }
        let end = start.saturating_add(REGION_BLOCKS).min(blocks.end);
        let bits = at - start..end - start;
        at = end;
        Some(Piece::Part(region, bits))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use bcow_testkit::Random;

    #[test]
    fn block_set_agrees_with_a_plain_list() {
        for seed in 0..40 {
            let mut random = Random::new(seed);
            let mut set = BlockSet::default();
            let mut model = vec![false; 3000];
            for _ in 0..200 {
                let start = random.below(3000);
                let most = *random.pick(&[2, 70, 600, 3000]);
                let range = start..(start + random.below(most)).min(3000);
                let insert = random.below(3) > 0;
                let mut changed = 0;
                for block in range.clone() {
                    changed += u64::from(model[block as usize] != insert);
                    model[block as usize] = insert;
                }
                let count =
                    if insert { set.insert(range.clone()) } else { set.remove(range.clone()) };
                assert_eq!(count, changed, "{range:?}");
                let inside = |block: u64| model[block as usize];
                assert_eq!(set.len(), (0..3000).filter(|at| inside(*at)).count() as u64);
                assert_eq!(set.contains(start), inside(start));
                let mut listed = vec![false; 3000];
                let mut last = None;
                for run in set.runs(0..3000) {
                    assert!(run.start < run.end && last.is_none_or(|last| last < run.start));
                    last = Some(run.end);
                    listed[run.start as usize..run.end as usize].fill(true);
                }
                assert_eq!(listed, model);
                let count = model[range.start as usize..range.end as usize].iter();
                let count = count.filter(|inside| **inside).count() as u64;
                assert_eq!(
                    set.contains_all(range.clone()),
                    count == range.end - range.start
                );
            }
        }
    }

    #[test]
    fn full_regions_take_no_memory() {
        let mut set = BlockSet::default();
        for block in 0..10 * REGION_BLOCKS {
            set.insert(block..block + 1);
        }
        assert!(set.some.is_empty());
        assert_eq!(set.whole.len(), 1);
        assert_eq!(set.insert(0..1 << 51), (1 << 51) - 10 * REGION_BLOCKS);
        assert_eq!((set.whole.len(), set.len()), (1, 1 << 51));
        assert_eq!(set.remove(1000..1001), 1);
        assert_eq!((set.whole.len(), set.some.len()), (2, 1));
    }
}
