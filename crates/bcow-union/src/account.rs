//! What an upper stores, and how much it may.

mod beside;
mod maps;
mod room;
mod stored;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

pub use beside::{
    Beside, Footing, attribute_bytes, attributes_take, stored_attributes, target_takes,
};
pub use maps::CountedMaps;
pub use room::{NoRoom, Room};
pub use stored::{Found, Reserved, StoredBlocks};

/// Most bytes and inodes that an upper may store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    /// Bytes.
    pub bytes: Option<u64>,
    /// Inodes.
    pub inodes: Option<u64>,
}

/// The bytes and inodes that an upper stores, and how many there may be. Bytes are counted in whole blocks of 4 KiB: those in which
/// files have data, and those that lie beside the data ([`Beside`]).
///
/// Space is charged before it is used: what does not fit is refused before anything changes. A charge never takes the sum above the
/// limit, whichever threads charge at the same time.
#[derive(Debug, Default)]
pub struct Account {
    limit: Option<u64>,
    inode_limit: Option<u64>,
    used: AtomicU64,
    inodes: AtomicU64,
    /// What inodes take beside their data.
    pub(crate) beside: Beside,
    /// Bytes of the maps of sketches, by the number of the sketch. A leaf.
    maps: Mutex<HashMap<u64, u64>>,
    /// What files are charged with that are not looked after, by inode number: those of which looking again may give another
    /// figure. A leaf, held for a lookup.
    charged: Mutex<HashMap<u64, u64>>,
}

/// The limit leaves no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no space left: {used} of {limit} bytes are used, {wanted} more are needed")]
pub struct NoSpace {
    /// Bytes that were asked for.
    pub wanted: u64,
    /// Bytes in use.
    pub used: u64,
    /// Bytes there may be.
    pub limit: u64,
}

impl Account {
    /// Of an upper that may store `limit` bytes; without a limit it only counts.
    pub fn new(limit: Option<u64>) -> Self {
        Self::with_limits(Limits {
            bytes: limit,
            inodes: None,
        })
    }

    /// Of an upper with these limits.
    pub fn with_limits(limits: Limits) -> Self {
        Account {
            limit: limits.bytes,
            inode_limit: limits.inodes,
            ..Account::default()
        }
    }

    /// Whether there is a limit, so that what the upper stores is counted.
    pub fn is_limited(&self) -> bool {
        self.limit.is_some() || self.inode_limit.is_some()
    }

    /// Inodes that there may be.
    pub fn inode_limit(&self) -> Option<u64> {
        self.inode_limit
    }

    /// Inodes that there are.
    pub fn inodes(&self) -> u64 {
        self.inodes.load(Ordering::Relaxed)
    }

    /// Inodes that may still be made.
    pub fn inodes_left(&self) -> Option<u64> {
        Some(self.inode_limit?.saturating_sub(self.inodes()))
    }

    /// Whether more is stored than the limit permits.
    pub fn is_above(&self) -> bool {
        self.limit.is_some_and(|limit| self.used() > limit)
    }

    /// Bytes that may be stored.
    pub fn limit(&self) -> Option<u64> {
        self.limit
    }

    /// Bytes that are stored, as far as they were charged or added.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Bytes that may still be stored.
    pub fn left(&self) -> Option<u64> {
        Some(self.limit?.saturating_sub(self.used()))
    }

    /// Takes `bytes`, or fails and takes nothing.
    pub fn charge(&self, bytes: u64) -> Result<(), NoSpace> {
        match self.charge_up_to(bytes, bytes) {
            0 if bytes > 0 => Err(self.no_space(bytes)),
            _ => Ok(()),
        }
    }

    /// Takes as many whole `unit`s as there is room for, up to `bytes`, and says how many bytes that was.
    pub fn charge_up_to(&self, bytes: u64, unit: u64) -> u64 {
        take_up_to(&self.used, self.limit, bytes, unit)
    }

    /// Counts what is there already, be it above the limit.
    pub fn add(&self, bytes: u64) {
        add(&self.used, bytes);
    }

    /// Gives back what was charged or added.
    pub fn release(&self, bytes: u64) {
        subtract(&self.used, bytes);
    }

    /// Counts an inode that is there already, be it above the limit.
    pub fn add_inode(&self) {
        add(&self.inodes, 1);
    }

    /// Gives back inodes.
    pub fn release_inodes(&self, count: u64) {
        subtract(&self.inodes, count);
    }

    /// An inode of the host is gone, with all that lay beside its data.
    pub fn inode_gone(&self, inode: u64) {
        self.release(self.beside.forget(inode));
        self.release_inodes(1);
    }

    /// So many bytes are charged for the file with this inode number, whatever is found in it later.
    pub fn remember(&self, inode: u64, bytes: u64) {
        self.lock_charged().insert(inode, bytes);
    }

    /// The bytes that are charged for the file with this inode number, if that was remembered since it was last asked.
    pub fn recall(&self, inode: u64) -> Option<u64> {
        self.lock_charged().remove(&inode)
    }

    fn lock_charged(&self) -> MutexGuard<'_, HashMap<u64, u64>> {
        self.charged.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The error that says that `wanted` bytes do not fit.
    pub fn no_space(&self, wanted: u64) -> NoSpace {
        NoSpace {
            wanted,
            used: self.used(),
            limit: self.limit.unwrap_or(u64::MAX),
        }
    }
}

/// Adds to `used` as many whole `unit`s as the limit leaves, up to `wanted`; gives how much that was.
fn take_up_to(used: &AtomicU64, limit: Option<u64>, wanted: u64, unit: u64) -> u64 {
    let mut now = used.load(Ordering::Relaxed);
    loop {
        let room = limit.map_or(u64::MAX, |limit| limit.saturating_sub(now));
        let taken = match wanted <= room {
            true => wanted,
            false => room - room % unit.max(1),
        };
        let after = now.saturating_add(taken);
        // Nothing else is published by it, so no order is needed.
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
    fn what_does_not_fit_is_refused_and_changes_nothing() {
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
    fn the_limit_holds_whoever_charges_at_the_same_time() {
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
