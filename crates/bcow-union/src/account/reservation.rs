//! Space that changes in progress may need.

use std::time::Duration;

use bcow::sync::atomic::{AtomicU64, Ordering};
use bcow::sync::thread;

use super::{Account, LimitReached, subtract};

/// Pauses of a thread that finds no space while other threads have reservations.
const PAUSES: u32 = if bcow::sync::SMALL { 3 } else { 50 };
const PAUSE: Duration = Duration::from_millis(1);

/// Bytes and inodes that are reserved for a change. The drop, after the measurement of the change,
/// gives them back.
#[derive(Debug)]
pub struct Reservation<'a> {
    account: &'a Account,
    pub(super) bytes: u64,
    inodes: u64,
}

impl Account {
    /// Reserves bytes and inodes. Fails and reserves nothing if a limit leaves no room.
    pub fn reserve(&self, bytes: u64, inodes: u64) -> Result<Reservation<'_>, LimitReached> {
        self.wait_for_others(bytes, inodes);
        let reserved = self.reserve_up_to(bytes, bytes, inodes);
        match (self.limits.bytes, self.limits.inodes) {
            (Some(limit), _) if reserved.bytes < bytes => Err(LimitReached::Bytes(limit).noted()),
            (_, Some(limit)) if reserved.inodes < inodes => {
                Err(LimitReached::Inodes(limit).noted())
            }
            _ => Ok(reserved),
        }
    }

    /// Reserves `bytes`, or as many whole units of `unit` bytes as fit; and `inodes` or none.
    /// Reserves nothing if there is no limit.
    pub(super) fn reserve_up_to(&self, bytes: u64, unit: u64, inodes: u64) -> Reservation<'_> {
        let mut reserved = Reservation {
            account: self,
            bytes: 0,
            inodes: 0,
        };
        if !self.is_limited() || bytes == 0 && inodes == 0 {
            return reserved;
        }
        // Counted before the sums change: a thread that finds no space must find the reservation.
        self.reservations.fetch_add(1, Ordering::AcqRel);
        reserved.bytes = take_up_to(&self.used, self.limits.bytes, bytes, unit);
        reserved.inodes = take_up_to(&self.inodes, self.limits.inodes, inodes, inodes);
        if reserved.is_empty() {
            subtract(&self.reservations, 1);
        }
        reserved
    }

    /// Waits for up to 50 ms, as long as there is no room for a change and other threads have
    /// reservations. These can be larger than the space that the threads then use.
    pub(super) fn wait_for_others(&self, bytes: u64, inodes: u64) {
        for _ in 0..PAUSES {
            let fits = self.left().is_none_or(|left| left >= bytes)
                && self.inodes_left().is_none_or(|left| left >= inodes);
            if fits || self.reservations.load(Ordering::Acquire) == 0 {
                return;
            }
            thread::sleep(PAUSE);
        }
    }
}

impl Reservation<'_> {
    fn is_empty(&self) -> bool {
        self.bytes == 0 && self.inodes == 0
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if !self.is_empty() {
            subtract(&self.account.used, self.bytes);
            subtract(&self.account.inodes, self.inodes);
            subtract(&self.account.reservations, 1);
        }
    }
}

/// Adds `wanted` to `used`, or as many whole `unit`s as the limit leaves. Gives the amount added.
fn take_up_to(used: &AtomicU64, limit: Option<u64>, wanted: u64, unit: u64) -> u64 {
    let mut now = used.load(Ordering::Acquire);
    loop {
        let room = limit.unwrap_or(u64::MAX).saturating_sub(now);
        let taken = if wanted <= room { wanted } else { room - room % unit.max(1) };
        match used.compare_exchange(now, now + taken, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return taken,
            Err(other) => now = other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::account::Limits;

    fn account() -> Account {
        Account::with_limits(Limits {
            bytes: Some(10 * 4096),
            inodes: Some(2),
        })
    }

    #[test]
    fn reservation_ends_with_its_drop() {
        let account = account();
        let room = account.reserve(8 * 4096, 2).unwrap();
        assert_eq!((account.used(), account.inodes()), (8 * 4096, 2));
        account.measure(7, || Ok(3 * 4096)).unwrap();
        drop(room);
        assert_eq!((account.used(), account.inodes()), (3 * 4096, 1));
        drop(account.reserve(7 * 4096, 1).unwrap());
    }

    #[test]
    fn reservation_that_does_not_fit_changes_nothing() {
        let account = account();
        for (bytes, inodes, error) in [
            (4096, 3, LimitReached::Inodes(2)),
            (11 * 4096, 1, LimitReached::Bytes(10 * 4096)),
        ] {
            assert_eq!(account.reserve(bytes, inodes).unwrap_err(), error);
            assert_eq!((account.used(), account.inodes()), (0, 0));
        }
        // More can be stored than the limit permits, for example if the limit was lowered.
        account.measure(7, || Ok(11 * 4096)).unwrap();
        assert!(account.reserve(1, 0).is_err());
        assert_eq!(account.left(), Some(0));
        account.forget(7);
        drop(account.reserve(10 * 4096, 2).unwrap());
    }

    #[test]
    fn limit_holds_under_concurrent_reservations() {
        let account = Account::new(Some(1000 * 4096));
        let taken: u64 = std::thread::scope(|scope| {
            let store = |inode: u64| {
                (0..1000)
                    .filter(|round| {
                        account.reserve(4096, 0).is_ok_and(|_reserved| {
                            let inode = inode * 1000 + round;
                            account.measure(inode, || Ok(4096)).is_ok()
                        })
                    })
                    .count() as u64
            };
            let threads: Vec<_> = (0..4)
                .map(|thread| scope.spawn(move || store(thread)))
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .sum()
        });
        assert_eq!((taken, account.used()), (1000, 1000 * 4096));
    }
}
