//! Incomplete blocks: partly written blocks, and the ranges that programs wrote, in memory only.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Instant;

/// The written ranges of one block, in order. A range is the first byte in the block and the byte
/// after the last one. Ranges neither overlap nor touch.
#[derive(Debug, Default, Clone)]
pub(super) struct Written(Vec<(u16, u16)>);

impl Written {
    /// Adds a range and merges it with the ranges that it touches.
    pub(super) fn insert(&mut self, range: Range<u64>) {
        let (mut start, mut end) = (range.start as u16, range.end as u16);
        self.0.retain(|other| {
            let apart = other.1 < start || other.0 > end;
            if !apart {
                start = start.min(other.0);
                end = end.max(other.1);
            }
            apart
        });
        let at = self.0.partition_point(|other| other.0 < start);
        self.0.insert(at, (start, end));
    }

    /// Removes all bytes at and after `length`, because the file was truncated.
    pub(super) fn truncate(&mut self, length: u64) {
        let length = length as u16;
        self.0.retain(|range| range.0 < length);
        if let Some(last) = self.0.last_mut() {
            last.1 = last.1.min(length);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The parts of `0..length` that no range covers.
    pub(super) fn gaps(&self, length: u64) -> Vec<Range<u64>> {
        let mut gaps = Vec::new();
        let mut at = 0;
        for &(start, end) in &self.0 {
            if at < length.min(start.into()) {
                gaps.push(at..length.min(start.into()));
            }
            at = end.into();
        }
        if at < length {
            gaps.push(at..length);
        }
        gaps
    }

    /// Whether the ranges cover all of `0..length`.
    pub(super) fn covers(&self, length: u64) -> bool {
        matches!(self.0[..], [(0, end), ..] if u64::from(end) >= length)
    }
}

#[derive(Debug)]
pub(super) struct IncompleteBlock {
    pub(super) written: Written,
    /// The time of the block's first write.
    pub(super) first_written: Instant,
    /// Whether a background thread failed to complete the block. Background threads then ignore the
    /// block. The next flush, or the next read that needs it, completes the block or returns the
    /// error.
    pub(super) has_failed: bool,
}

/// The incomplete blocks of a part of a file, by block number. Each part has a lock of its own.
pub(super) type Stripe = BTreeMap<u64, IncompleteBlock>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_the_unwritten_ranges() {
        let mut written = Written::default();
        for range in [10..20, 30..40, 15..32] {
            written.insert(range);
        }
        assert_eq!(written.gaps(50), [0..10, 40..50]);
        assert_eq!(written.gaps(35), vec![0..10]);
        assert_eq!(written.gaps(5), vec![0..5]);
        assert!(!written.covers(1));
        written.insert(0..10);
        assert!(written.covers(40) && !written.covers(41));
        written.insert(40..4096);
        assert_eq!(written.gaps(4096), []);
        written.truncate(35);
        assert_eq!(written.gaps(4096), vec![35..4096]);
        written.truncate(0);
        assert!(written.is_empty());
    }
}
