//! Reservations for new files.

use super::{Account, LimitReached, add, take_up_to};

/// Bytes and inodes that are reserved for a new file. The drop releases the unused part.
#[derive(Debug)]
pub struct Reservation<'a> {
    account: &'a Account,
    bytes: u64,
    inodes: u64,
}

impl Account {
    /// Reserves bytes and inodes. Fails and reserves nothing if a limit leaves no room.
    pub fn reserve(&self, bytes: u64, inodes: u64) -> Result<Reservation<'_>, LimitReached> {
        let mut room = self.unreserved();
        self.charge(bytes)
            .map_err(|error| LimitReached::Bytes(error.limit))?;
        room.bytes = bytes;
        if take_up_to(&self.inodes, self.inode_limit, inodes, inodes) < inodes {
            let reached = LimitReached::Inodes(self.inode_limit.unwrap_or(u64::MAX));
            reached.note();
            return Err(reached);
        }
        room.inodes = inodes;
        Ok(room)
    }

    /// An empty reservation: use of it is counted even above the limit.
    pub fn unreserved(&self) -> Reservation<'_> {
        Reservation {
            account: self,
            bytes: 0,
            inodes: 0,
        }
    }
}

impl<'a> Reservation<'a> {
    pub(super) fn account(&self) -> &'a Account {
        self.account
    }

    /// Uses `bytes` of the reservation. If the reservation is smaller, the rest is counted all the
    /// same.
    pub fn use_bytes(&mut self, bytes: u64) {
        let covered = self.bytes.min(bytes);
        self.bytes -= covered;
        self.account.add(bytes - covered);
    }

    /// Uses an inode of the reservation, or counts one if the reservation has none left.
    pub fn use_inode(&mut self) {
        match self.inodes {
            0 => add(&self.account.inodes, 1),
            _ => self.inodes -= 1,
        }
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.account.release(self.bytes);
        self.account.release_inodes(self.inodes);
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
    fn unused_reservation_is_released() {
        let account = account();
        let mut room = account.reserve(8 * 4096, 2).unwrap();
        assert_eq!((account.used(), account.inodes()), (8 * 4096, 2));
        room.use_bytes(3 * 4096);
        room.use_inode();
        drop(room);
        assert_eq!((account.used(), account.inodes()), (3 * 4096, 1));
    }

    #[test]
    fn reservation_without_free_inodes_takes_no_bytes() {
        let account = account();
        let error = account.reserve(4096, 3).unwrap_err();
        assert_eq!(error, LimitReached::Inodes(2));
        assert_eq!((account.used(), account.inodes()), (0, 0));
        assert!(account.reserve(11 * 4096, 1).is_err());
        assert_eq!((account.used(), account.inodes()), (0, 0));
    }

    #[test]
    fn use_above_the_reservation_is_counted() {
        let account = account();
        let mut room = account.reserve(4096, 1).unwrap();
        room.use_bytes(12 * 4096);
        room.use_inode();
        drop(room);
        assert_eq!((account.used(), account.inodes()), (12 * 4096, 1));
        assert!(account.is_above());
    }
}
