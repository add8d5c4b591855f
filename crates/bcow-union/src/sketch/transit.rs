//! Blocks in transit: the written ranges of each, in memory only.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Instant;

/// The written ranges of bytes within one block, in order. They neither overlap nor touch.
#[derive(Debug, Default, Clone)]
pub(super) struct Written(Vec<(u16, u16)>);

impl Written {
    /// Adds a range and merges it with the ranges that it touches.
    pub(super) fn insert(&mut self, range: Range<u64>) {
        let (mut start, mut end) = (range.start as u16, range.end as u16);
        self.0.retain(|have| {
            let apart = have.1 < start || have.0 > end;
            if !apart {
                start = start.min(have.0);
                end = end.max(have.1);
            }
            apart
        });
        let at = self.0.partition_point(|have| have.0 < start);
        self.0.insert(at, (start, end));
    }

    /// Removes the bytes from `length` on.
    pub(super) fn cut(&mut self, length: u64) {
        let length = length as u16;
        self.0.retain(|have| have.0 < length);
        if let Some(last) = self.0.last_mut() {
            last.1 = last.1.min(length);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The parts of `0..length` that are in no range.
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

    /// Whether one range contains all of `0..length`.
    pub(super) fn covers(&self, length: u64) -> bool {
        matches!(self.0[..], [(0, end), ..] if u64::from(end) >= length)
    }
}

/// A block in transit.
#[derive(Debug)]
pub(super) struct Transit {
    pub(super) written: Written,
    /// The time of the block's first write.
    pub(super) since: Instant,
    /// Whether the background threads failed to complete the block. They leave it to the next read
    /// or flush that needs it, which returns the error if it persists.
    pub(super) has_failed: bool,
}

/// The blocks in transit of a part of a file.
pub(super) type Stripe = BTreeMap<u64, Transit>;

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
        written.cut(35);
        assert_eq!(written.gaps(4096), vec![35..4096]);
        written.cut(0);
        assert!(written.is_empty());
    }
}
