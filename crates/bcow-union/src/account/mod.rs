//! The space that an upper uses, and its limits.
//!
//! The host decides how much space a file takes: the account adds up the allocated sizes
//! (`st_blocks`) that the host reports. A change first reserves space ([`Account::reserve`],
//! [`Account::reserve_write`]). After the change, each file and directory that it touched is
//! measured ([`Account::measure`]), and then the reservation ends.

mod error;
mod reservation;
mod write;

use std::collections::HashMap;
use std::io;
use std::sync::PoisonError;

use bcow::sync::atomic::{AtomicU64, Ordering};
use bcow::sync::{Mutex, MutexGuard};

use crate::blocks::BLOCK_BYTES;

pub use error::LimitReached;
pub use reservation::Reservation;

/// Number of shards of a table. Measurements in different shards do not wait for each other.
const SHARDS: usize = 32;

/// Limits of an upper; `None` is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    /// Upper bound of the stored bytes.
    pub bytes: Option<u64>,
    /// Upper bound of the inodes.
    pub inodes: Option<u64>,
}

/// Counts the bytes and inodes that an upper stores, against its limits. Counts nothing if there is
/// no limit.
///
/// A measurement replaces the last one of the same file. So it can be repeated or come late, and a
/// failed change needs no correction.
#[derive(Debug, Default)]
pub struct Account {
    limits: Limits,
    /// Sum of the measured and the reserved bytes. A measurement precedes the end of the
    /// reservation, so for a moment the sum can be too high, but not too low.
    used: AtomicU64,
    /// Sum of the measured and the reserved inodes.
    inodes: AtomicU64,
    /// Number of reservations of bytes or inodes.
    reservations: AtomicU64,
    /// Stored bytes by the number of the host's inode.
    files: Table,
    /// Stored bytes of the maps of partial files, by the partial file's id. A map has an entry from
    /// the creation of its partial file, before the first flush creates its file.
    maps: Table,
}

/// The last measurement of each file.
#[derive(Debug, Default)]
struct Table {
    /// A shard's lock is held while one of its files is measured, so that the last measurement
    /// determines the figure, and until the sums have changed accordingly. A leaf lock.
    shards: [Mutex<HashMap<u64, u64>>; SHARDS],
}

impl Table {
    fn shard(&self, number: u64) -> MutexGuard<'_, HashMap<u64, u64>> {
        let shard = &self.shards[(number % SHARDS as u64) as usize];
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Account {
    /// The account of an upper that may store `limit` bytes.
    #[cfg(any(test, feature = "testing"))]
    pub fn new(limit: Option<u64>) -> Self {
        Self::with_limits(Limits {
            bytes: limit,
            inodes: None,
        })
    }

    /// The account of an upper with these limits.
    pub fn with_limits(limits: Limits) -> Self {
        Account {
            limits,
            ..Account::default()
        }
    }

    /// Whether there is a limit.
    pub fn is_limited(&self) -> bool {
        self.limits != Limits::default()
    }

    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Stored and reserved bytes.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Acquire)
    }

    /// Number of counted and reserved inodes.
    pub fn inodes(&self) -> u64 {
        self.inodes.load(Ordering::Acquire)
    }

    /// Bytes that can still be reserved; `None` without a limit.
    pub fn left(&self) -> Option<u64> {
        Some(self.limits.bytes?.saturating_sub(self.used()))
    }

    /// Inodes that can still be created; `None` without a limit.
    pub fn inodes_left(&self) -> Option<u64> {
        Some(self.limits.inodes?.saturating_sub(self.inodes()))
    }

    /// Sets the bytes of the host's inode `inode` to the result of `stored`, which reads them from
    /// the host. The first measurement of an inode also counts the inode.
    pub fn measure(&self, inode: u64, stored: impl FnOnce() -> io::Result<u64>) -> io::Result<()> {
        self.set(&self.files, inode, stored)
    }

    /// As [`Account::measure`], for the map of partial file `id`. A map that is smaller than a
    /// block, or does not exist yet, counts as one block.
    pub(crate) fn measure_map(
        &self,
        id: u64,
        stored: impl FnOnce() -> io::Result<u64>,
    ) -> io::Result<()> {
        self.set(&self.maps, id, || Ok(stored()?.max(BLOCK_BYTES)))
    }

    /// Releases the bytes and the inode of a removed file. It may be called more than once, but not
    /// after the host could have given the inode number to another file.
    pub fn forget(&self, inode: u64) {
        self.remove(&self.files, inode);
    }

    /// Releases the map of partial file `id`.
    pub(crate) fn forget_map(&self, id: u64) {
        self.remove(&self.maps, id);
    }

    /// Excludes a measured inode, which is never removed, from the count of inodes.
    pub fn exempt_inode(&self) {
        subtract(&self.inodes, 1);
    }

    fn set(
        &self,
        table: &Table,
        number: u64,
        stored: impl FnOnce() -> io::Result<u64>,
    ) -> io::Result<()> {
        if !self.is_limited() {
            return Ok(());
        }
        let mut shard = table.shard(number);
        let now = stored()?;
        let before = shard.insert(number, now);
        if before.is_none() {
            self.inodes.fetch_add(1, Ordering::AcqRel);
        }
        let before = before.unwrap_or(0);
        self.used
            .fetch_add(now.saturating_sub(before), Ordering::AcqRel);
        subtract(&self.used, before.saturating_sub(now));
        Ok(())
    }

    fn remove(&self, table: &Table, number: u64) {
        let mut shard = table.shard(number);
        if let Some(bytes) = shard.remove(&number) {
            subtract(&self.used, bytes);
            subtract(&self.inodes, 1);
        }
    }
}

/// Subtracts an amount that was added before.
fn subtract(sum: &AtomicU64, less: u64) {
    let before = sum.fetch_sub(less, Ordering::AcqRel);
    debug_assert!(before >= less, "{before} - {less}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_measurement_counts() {
        let account = Account::new(Some(10 * 4096));
        let measure = |inode, bytes| account.measure(inode, || Ok(bytes)).unwrap();
        measure(1, 8192);
        measure(2, 4096);
        measure(1, 4096);
        measure(1, 4096);
        assert_eq!((account.used(), account.inodes()), (8192, 2));
        account.measure_map(1, || Ok(0)).unwrap();
        assert_eq!((account.used(), account.inodes()), (3 * 4096, 3));
        for _ in 0..2 {
            account.forget(1);
            account.forget_map(1);
        }
        assert_eq!((account.used(), account.inodes()), (4096, 1));
        let failed = account.measure(2, || Err(io::ErrorKind::Other.into()));
        assert!(failed.is_err());
        assert_eq!((account.used(), account.inodes()), (4096, 1));
    }

    #[test]
    fn an_account_without_a_limit_measures_nothing() {
        let account = Account::new(None);
        let never = || panic!("measured");
        account.measure(1, never).unwrap();
        assert_eq!((account.used(), account.inodes()), (0, 0));
    }
}
