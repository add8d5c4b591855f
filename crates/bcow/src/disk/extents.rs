//! Sets of byte ranges of a file.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// A set of ranges that neither overlap nor touch.
#[derive(Debug, Default, Clone)]
pub(super) struct Extents {
    /// Start to end.
    by_start: BTreeMap<u64, u64>,
    /// Length and start, to find a range by its length.
    by_length: BTreeSet<(u64, u64)>,
    total: u64,
}

impl Extents {
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// The length of the longest range; 0 in an empty set.
    pub(super) fn longest(&self) -> u64 {
        self.by_length.last().map_or(0, |(length, _)| *length)
    }

    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = Range<u64>> + '_ {
        self.by_start.iter().map(|(&start, &end)| start..end)
    }

    /// Adds a range, which may overlap ranges of the set.
    pub(super) fn insert(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let Range { mut start, mut end } = range;
        if let Some((&before, &before_end)) = self.by_start.range(..=start).next_back()
            && before_end >= start
        {
            start = before;
            end = end.max(before_end);
        }
        while let Some((&next, &next_end)) = self.by_start.range(start..=end).next() {
            end = end.max(next_end);
            self.drop_range(next, next_end);
        }
        self.add_range(start, end);
    }

    /// Removes a range, which may be in the set only in part.
    pub(super) fn remove(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        if let Some((&start, &end)) = self.by_start.range(..range.start).next_back()
            && end > range.start
        {
            self.drop_range(start, end);
            self.add_range(start, range.start);
            self.add_range(range.start, end);
        }
        while let Some((&start, &end)) = self.by_start.range(range.clone()).next() {
            self.drop_range(start, end);
            if end > range.end {
                self.add_range(range.end, end);
            }
        }
    }

    /// Whether all of a range is in the set.
    pub(super) fn contains(&self, range: &Range<u64>) -> bool {
        let before = self.by_start.range(..=range.start).next_back();
        before.is_some_and(|(_, &end)| end >= range.end)
    }

    /// Removes and returns up to `most` bytes, a multiple of `unit`: from the smallest range that
    /// has `most` bytes, else from the largest range. `None` if no range has `unit` bytes.
    pub(super) fn take(&mut self, unit: u64, most: u64) -> Option<Range<u64>> {
        let (length, start) = match self.by_length.range((most.max(unit), 0)..).next() {
            Some(&found) => found,
            None => *self.by_length.last()?,
        };
        if length < unit {
            return None;
        }
        let taken = length.min(most) / unit * unit;
        self.drop_range(start, start + length);
        if taken < length {
            self.add_range(start + taken, start + length);
        }
        Some(start..start + taken)
    }

    fn add_range(&mut self, start: u64, end: u64) {
        self.by_start.insert(start, end);
        self.by_length.insert((end - start, start));
        self.total += end - start;
    }

    fn drop_range(&mut self, start: u64, end: u64) {
        self.by_start.remove(&start);
        self.by_length.remove(&(end - start, start));
        self.total -= end - start;
    }
}

/// A small set of byte ranges within one block.
#[derive(Debug, Default, Clone)]
pub(super) struct Ranges(Vec<Range<u32>>);

impl Ranges {
    /// Adds a range and merges it with the ranges that it touches.
    pub(super) fn insert(&mut self, range: Range<u32>) {
        let (mut start, mut end) = (range.start, range.end);
        self.0.retain(|have| {
            let apart = have.end < start || have.start > end;
            if !apart {
                start = start.min(have.start);
                end = end.max(have.end);
            }
            apart
        });
        let at = self.0.partition_point(|have| have.start < start);
        self.0.insert(at, start..end);
    }

    /// The first range; empty in an empty set.
    pub(super) fn first(&self) -> Range<u32> {
        self.0.first().cloned().unwrap_or_default()
    }

    /// The parts of `0..length` that are in no range.
    pub(super) fn gaps(&self, length: u32) -> Vec<Range<u32>> {
        let mut gaps = Vec::new();
        let mut at = 0;
        for range in &self.0 {
            if range.start > at {
                gaps.push(at..range.start);
            }
            at = range.end;
        }
        if at < length {
            gaps.push(at..length);
        }
        gaps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(extents: &Extents) -> Vec<Range<u64>> {
        assert_eq!(extents.by_start.len(), extents.by_length.len());
        let total: u64 = extents.iter().map(|range| range.end - range.start).sum();
        assert_eq!(total, extents.total());
        extents.iter().collect()
    }

    #[test]
    fn neighbours_merge() {
        let mut extents = Extents::default();
        for range in [10..20, 30..40, 20..30, 50..60, 0..5] {
            extents.insert(range);
        }
        assert_eq!(ranges(&extents), [0..5, 10..40, 50..60]);
        extents.insert(4..55);
        assert_eq!(ranges(&extents).first(), Some(&(0..60)));
    }

    #[test]
    fn what_is_removed_splits() {
        let mut extents = Extents::default();
        extents.insert(0..100);
        extents.remove(10..20);
        extents.remove(15..30);
        extents.remove(90..200);
        assert_eq!(ranges(&extents), [0..10, 30..90]);
        extents.remove(0..1000);
        assert_eq!(ranges(&extents), []);
    }

    #[test]
    fn the_smallest_range_that_fits_is_taken_or_else_the_largest() {
        let mut extents = Extents::default();
        for range in [0..8, 100..120, 200..300] {
            extents.insert(range);
        }
        assert_eq!(extents.take(4, 16), Some(100..116));
        assert_eq!(extents.take(4, 1000), Some(200..300));
        assert_eq!(extents.take(16, 16), None);
        assert_eq!(ranges(&extents), [0..8, 116..120]);
    }

    #[test]
    fn gaps_are_what_was_not_written() {
        let mut written = Ranges::default();
        for range in [10..20, 30..40, 15..32] {
            written.insert(range);
        }
        assert_eq!(written.gaps(50), [0..10, 40..50]);
        written.insert(0..10);
        written.insert(40..50);
        assert_eq!(written.gaps(50), []);
    }
}
