//! Latencies of requests: a lock-free histogram for each kind of request.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// A kind of request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Operation {
    /// Look up a name.
    Lookup,
    /// Get attributes.
    Stat,
    /// Set attributes or the size.
    SetAttributes,
    /// Read a symbolic link.
    ReadLink,
    /// Create a file.
    Create,
    /// Create a file, device, pipe or socket with `mknod`.
    MakeNode,
    /// Create a directory.
    MakeDirectory,
    /// Create a symbolic link.
    Symlink,
    /// Remove a name.
    Unlink,
    RemoveDirectory,
    Rename,
    /// Create a hard link.
    Link,
    /// Open a file.
    Open,
    /// Read a file.
    Read,
    /// Write a file.
    Write,
    /// Flush a file or directory.
    Sync,
    /// Allocate or release space.
    Allocate,
    /// Find data or a hole.
    Seek,
    /// Copy a range from file to file.
    CopyRange,
    /// Get an extended attribute, or the list of their names.
    GetXattr,
    /// Set or remove an extended attribute.
    SetXattr,
    OpenDirectory,
    /// List a directory.
    ReadDirectory,
    /// Get the figures of the file system.
    StatFs,
}

/// Each kind, in the order of the numbers, with its name in reports and the action for error
/// messages, to follow "cannot".
#[rustfmt::skip]
const OPERATIONS: [(Operation, &str, &str); 24] = [
    (Operation::Lookup, "lookup", "look up a name"),
    (Operation::Stat, "stat", "read its attributes"),
    (Operation::SetAttributes, "setattr", "change its attributes or size"),
    (Operation::ReadLink, "readlink", "read the link"),
    (Operation::Create, "create", "create a file in it"),
    (Operation::MakeNode, "mknod", "create a device, pipe or socket in it"),
    (Operation::MakeDirectory, "mkdir", "create a directory in it"),
    (Operation::Symlink, "symlink", "create a symbolic link in it"),
    (Operation::Unlink, "unlink", "remove a name from it"),
    (Operation::RemoveDirectory, "rmdir", "remove a directory from it"),
    (Operation::Rename, "rename", "rename an entry of it"),
    (Operation::Link, "link", "give it another name"),
    (Operation::Open, "open", "open it"),
    (Operation::Read, "read", "read"),
    (Operation::Write, "write", "write"),
    (Operation::Sync, "fsync", "flush it"),
    (Operation::Allocate, "fallocate", "allocate space"),
    (Operation::Seek, "lseek", "find data or holes"),
    (Operation::CopyRange, "copy_file_range", "copy to it"),
    (Operation::GetXattr, "getxattr", "read an extended attribute"),
    (Operation::SetXattr, "setxattr", "set an extended attribute"),
    (Operation::OpenDirectory, "opendir", "open the directory"),
    (Operation::ReadDirectory, "readdir", "list"),
    (Operation::StatFs, "statfs", "read the figures of the file system"),
];

impl Operation {
    /// All kinds, in the order of their numbers.
    pub(crate) fn all() -> impl Iterator<Item = Operation> {
        OPERATIONS.iter().map(|(operation, ..)| *operation)
    }

    /// The name in reports.
    pub(crate) fn name(self) -> &'static str {
        OPERATIONS[self as usize].1
    }

    /// The action for error messages, to follow "cannot".
    pub(crate) fn action(self) -> &'static str {
        OPERATIONS[self as usize].2
    }
}

/// Number of buckets of a histogram. Bucket `i` counts requests that took from `2^(i-1)` ns to less
/// than `2^i` ns. The last bucket also counts all slower requests (above 4.6 minutes).
pub(crate) const BUCKETS: usize = 40;

/// A histogram for each kind of request, and the number of requests in flight.
#[derive(Debug)]
pub(crate) struct Latencies {
    histograms: [Histogram; OPERATIONS.len()],
    in_flight: AtomicU64,
}

#[derive(Debug)]
struct Histogram {
    buckets: [AtomicU64; BUCKETS],
    total_ns: AtomicU64,
}

/// The content of a histogram at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Requests in each bucket.
    pub(crate) buckets: [u64; BUCKETS],
    /// Sum of all times in ns.
    pub(crate) total_ns: u64,
}

/// A request in progress. Its time is counted when this is dropped.
#[derive(Debug)]
#[must_use]
pub(crate) struct Running<'a> {
    histogram: &'a Histogram,
    in_flight: &'a AtomicU64,
    start: Instant,
}

impl Default for Latencies {
    fn default() -> Self {
        Latencies {
            histograms: std::array::from_fn(|_| Histogram {
                buckets: std::array::from_fn(|_| AtomicU64::new(0)),
                total_ns: AtomicU64::new(0),
            }),
            in_flight: AtomicU64::new(0),
        }
    }
}

impl Latencies {
    /// Measures from now until the result is dropped.
    pub(crate) fn time(&self, operation: Operation) -> Running<'_> {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        Running {
            histogram: &self.histograms[operation as usize],
            in_flight: &self.in_flight,
            start: Instant::now(),
        }
    }

    /// The number of requests that are being answered.
    pub(crate) fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// The counts so far.
    pub(crate) fn counts(&self, operation: Operation) -> Counts {
        let histogram = &self.histograms[operation as usize];
        Counts {
            buckets: std::array::from_fn(|i| histogram.buckets[i].load(Ordering::Relaxed)),
            total_ns: histogram.total_ns.load(Ordering::Relaxed),
        }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let ns = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.histogram.buckets[bucket(ns)].fetch_add(1, Ordering::Relaxed);
        self.histogram.total_ns.fetch_add(ns, Ordering::Relaxed);
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The bucket of a time in ns: the number of its binary digits.
fn bucket(ns: u64) -> usize {
    ((u64::BITS - ns.leading_zeros()) as usize).min(BUCKETS - 1)
}

/// The upper limit of a bucket in ns, exclusive.
pub(crate) fn upper_ns(bucket: usize) -> u64 {
    1 << bucket
}

impl Counts {
    /// Number of requests.
    pub(crate) fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// The time in ns within which `share` (0 to 1) of the requests were answered. Assumes an even
    /// distribution within a bucket. 0 without requests.
    pub(crate) fn quantile_ns(&self, share: f64) -> u64 {
        let count = self.count();
        let wanted = share * count as f64;
        let mut below = 0.0;
        for (index, &here) in self.buckets.iter().enumerate() {
            let here = here as f64;
            if here > 0.0 && below + here >= wanted {
                let (from, to) = (upper_ns(index) / 2, upper_ns(index));
                return from + ((to - from) as f64 * (wanted - below) / here) as u64;
            }
            below += here;
        }
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_stand_at_their_numbers() {
        for (index, operation) in Operation::all().enumerate() {
            assert_eq!(operation as usize, index);
        }
        let names: std::collections::HashSet<_> = Operation::all().map(Operation::name).collect();
        assert_eq!(names.len(), OPERATIONS.len());
    }

    #[test]
    fn a_time_is_below_its_bucket_and_not_below_the_one_before() {
        for ns in [0, 1, 2, 3, 4, 1023, 1024, 1_000_000_000] {
            let bucket = bucket(ns);
            assert!(ns < upper_ns(bucket), "{ns}");
            assert!(bucket == 0 || ns >= upper_ns(bucket - 1), "{ns}");
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn only_the_kind_that_ran_is_counted() {
        let latencies = Latencies::default();
        let running = latencies.time(Operation::Write);
        assert_eq!(latencies.in_flight(), 1);
        drop(running);
        assert_eq!(latencies.in_flight(), 0);
        drop(latencies.time(Operation::Write));
        assert_eq!(latencies.counts(Operation::Write).count(), 2);
        assert_eq!(latencies.counts(Operation::Read).count(), 0);
    }

    #[test]
    fn quantiles_lie_in_the_right_bucket() {
        let mut counts = Counts {
            buckets: [0; BUCKETS],
            total_ns: 0,
        };
        assert_eq!(counts.quantile_ns(0.5), 0);
        counts.buckets[10] = 90;
        counts.buckets[20] = 10;
        assert!((512..=1024).contains(&counts.quantile_ns(0.5)));
        assert_eq!(counts.quantile_ns(0.9), 1024);
        assert!((1 << 19..=1 << 20).contains(&counts.quantile_ns(0.99)));
        assert_eq!(counts.quantile_ns(1.0), 1 << 20);
    }
}
