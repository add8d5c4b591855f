//! Sets of blocks, as ranges.

use std::ops::Range;

/// Ranges that do not touch each other, in ascending order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Ranges(Vec<Range<u64>>);

impl Ranges {
    /// The union of ranges in any order.
    pub fn new(mut all: Vec<Range<u64>>) -> Ranges {
        all.retain(|range| range.start < range.end);
        all.sort_unstable_by_key(|range| range.start);
        let mut joined: Vec<Range<u64>> = Vec::new();
        for range in all {
            match joined.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => joined.push(range),
            }
        }
        Ranges(joined)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.0.iter().cloned()
    }

    /// The parts of the ranges that are in `within`.
    pub fn inside(&self, within: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        let first = self.0.partition_point(|range| range.end <= within.start);
        self.0[first..]
            .iter()
            .map(move |range| range.start.max(within.start)..range.end.min(within.end))
            .take_while(|range| range.start < range.end)
    }

    /// These ranges without others.
    pub fn without(&self, others: &Ranges) -> Ranges {
        let mut rest = Vec::new();
        for range in self.iter() {
            let mut start = range.start;
            for other in others.inside(range.clone()) {
                if start < other.start {
                    rest.push(start..other.start);
                }
                start = other.end;
            }
            if start < range.end {
                rest.push(start..range.end);
            }
        }
        Ranges(rest)
    }
}

#[cfg(test)]
mod tests {
    use super::Ranges;

    #[test]
    fn ranges_that_touch_are_joined() {
        let ranges = Ranges::new(vec![5..7, 1..3, 3..4, 6..6, 6..9]);
        assert_eq!(ranges, Ranges(vec![1..4, 5..9]));
    }

    #[test]
    fn parts_and_rests_are_found() {
        let ranges = Ranges::new(vec![1..4, 5..9, 20..30]);
        let inside: Vec<_> = ranges.inside(3..6).collect();
        assert_eq!(inside, [3..4, 5..6]);
        assert_eq!(ranges.inside(9..20).count(), 0);
        let rest = ranges.without(&Ranges::new(vec![0..2, 3..6, 22..23, 29..40]));
        assert_eq!(rest, Ranges(vec![2..3, 6..9, 20..22, 23..29]));
    }
}
