//! The space that an upper uses, and its limits.

mod error;
mod limits;
mod maps;
mod overhead;
mod reservation;
mod stored;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

pub use error::{ChargeError, LimitReached, NoSpace};
pub use limits::Limits;
pub use overhead::{
    HostInodes, Overhead, attribute_bytes, attributes_take, stored_attributes, target_takes,
};
pub use reservation::Reservation;
pub use stored::{DataBlocks, StoredBlocks};

/// Counts the bytes and inodes that an upper stores, against its limits. Bytes are counted in whole
/// blocks of 4 KiB: blocks with data of files, and blocks beside the data ([`Overhead`]).
///
/// Space is charged before it is used. A change that does not fit is refused before it has any
/// effect. A charge never takes the sum above the limit, also with concurrent threads.
#[derive(Debug, Default)]
pub struct Account {
    limit: Option<u64>,
    inode_limit: Option<u64>,
    used: AtomicU64,
    inodes: AtomicU64,
    /// Bytes that inodes take beside their data.
    pub(crate) overhead: Overhead,
    /// Bytes of the maps of partial files, by the partial file's id. A leaf lock.
    maps: Mutex<HashMap<u64, u64>>,
    /// Charged bytes of files that are not tracked now, by inode number: only files for which a new
    /// scan can give another number. A leaf lock, held for a lookup.
    charged: Mutex<HashMap<u64, u64>>,
}

impl Account {
    /// The account of an upper that may store `limit` bytes. Without a limit it only counts.
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
            limit: limits.bytes,
            inode_limit: limits.inodes,
            ..Account::default()
        }
    }

    /// Whether there is a limit. Only then all that the upper stores is counted.
    pub fn is_limited(&self) -> bool {
        self.limit.is_some() || self.inode_limit.is_some()
    }

    pub fn inode_limit(&self) -> Option<u64> {
        self.inode_limit
    }

    /// Number of counted inodes.
    pub fn inodes(&self) -> u64 {
        self.inodes.load(Ordering::Relaxed)
    }

    /// Inodes that can still be created; `None` without a limit.
    pub fn inodes_left(&self) -> Option<u64> {
        Some(self.inode_limit?.saturating_sub(self.inodes()))
    }

    /// Whether the counted bytes exceed the limit.
    pub fn is_above(&self) -> bool {
        self.limit.is_some_and(|limit| self.used() > limit)
    }

    /// The limit in bytes.
    pub fn limit(&self) -> Option<u64> {
        self.limit
    }

    /// Bytes that were charged or added and not released.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Bytes that can still be charged; `None` without a limit.
    pub fn left(&self) -> Option<u64> {
        Some(self.limit?.saturating_sub(self.used()))
    }

    /// Charges `bytes`, or fails and charges nothing.
    pub fn charge(&self, bytes: u64) -> Result<(), NoSpace> {
        match self.charge_up_to(bytes, bytes) {
            0 if bytes > 0 => Err(self.no_space(bytes)),
            _ => Ok(()),
        }
    }

    /// Charges up to `bytes`: all of them, or as many whole units of `unit` bytes as fit. Gives the
    /// bytes charged.
    pub fn charge_up_to(&self, bytes: u64, unit: u64) -> u64 {
        take_up_to(&self.used, self.limit, bytes, unit)
    }

    /// Counts bytes that are stored already, also above the limit.
    pub fn add(&self, bytes: u64) {
        add(&self.used, bytes);
    }

    /// Releases bytes that were charged or added.
    pub fn release(&self, bytes: u64) {
        subtract(&self.used, bytes);
    }

    /// Counts an inode that exists already, also above the limit.
    pub fn add_inode(&self) {
        add(&self.inodes, 1);
    }

    pub fn release_inodes(&self, count: u64) {
        subtract(&self.inodes, count);
    }

    /// Releases a freed inode of the host, with the bytes that it took beside its data.
    pub fn release_inode(&self, inode: u64) {
        self.release(self.overhead.forget(inode));
        self.release_inodes(1);
    }

    /// Remembers the bytes that are charged for the file with this inode number. A later scan of
    /// the file can give another number.
    pub fn remember(&self, inode: u64, bytes: u64) {
        self.charged.lock().insert(inode, bytes);
    }

    /// Takes the remembered bytes of the file with this inode number; `None` if there are none.
    pub fn recall(&self, inode: u64) -> Option<u64> {
        self.charged.lock().remove(&inode)
    }

    /// The error for `wanted` bytes that do not fit.
    pub fn no_space(&self, wanted: u64) -> NoSpace {
        let limit = self.limit.unwrap_or(u64::MAX);
        LimitReached::Bytes(limit).note();
        NoSpace {
            wanted,
            used: self.used(),
            limit,
        }
    }
}

/// Adds `wanted` to `used`, or as many whole `unit`s as the limit leaves. Gives the amount added.
fn take_up_to(used: &AtomicU64, limit: Option<u64>, wanted: u64, unit: u64) -> u64 {
    let mut now = used.load(Ordering::Relaxed);
    loop {
        let room = limit.map_or(u64::MAX, |limit| limit.saturating_sub(now));
        let taken = if wanted <= room { wanted } else { room - room % unit.max(1) };
        let after = now.saturating_add(taken);
        // Relaxed order suffices: the counter publishes no other memory.
        match used.compare_exchange_weak(now, after, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return taken,
            Err(other) => now = other,
        }
    }
}

fn add(used: &AtomicU64, more: u64) {
    let _ = used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
        Some(used.saturating_add(more))
    });
}

fn subtract(used: &AtomicU64, less: u64) {
    let _ = used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
        Some(used.saturating_sub(less))
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn charge_above_the_limit_is_refused_and_changes_nothing() {
        let account = Account::new(Some(10 * 4096));
        account.charge(9 * 4096).unwrap();
        let error = account.charge(2 * 4096).unwrap_err();
        assert_eq!((error.wanted, error.used), (2 * 4096, 9 * 4096));
        assert_eq!(account.charge_up_to(5 * 4096, 4096), 4096);
        assert_eq!(account.left(), Some(0));
        account.charge(0).unwrap();
        account.release(4096);
        account.charge(4096).unwrap();
    }

    #[test]
    fn an_upper_that_is_above_its_limit_takes_nothing_more() {
        let account = Account::new(Some(4096));
        account.add(3 * 4096);
        assert!(account.charge(1).is_err());
        assert_eq!(account.left(), Some(0));
        account.release(3 * 4096);
        account.charge(4096).unwrap();
    }

    #[test]
    fn limit_holds_under_concurrent_charges() {
        let account = Account::new(Some(1000 * 4096));
        let taken: u64 = std::thread::scope(|scope| {
            let charge = || (0..1000).filter(|_| account.charge(4096).is_ok()).count() as u64;
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(charge)).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .sum()
        });
        assert_eq!((taken, account.used()), (1000, 1000 * 4096));
    }
}
