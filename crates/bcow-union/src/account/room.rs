//! Reservations for new files.

use super::{Account, NoRoom, add, take_up_to};

/// Bytes and inodes that are reserved for a new file. The drop releases the unused part.
#[derive(Debug)]
pub struct Room<'a> {
    account: &'a Account,
    bytes: u64,
    inodes: u64,
}

impl Account {
    /// Reserves bytes and inodes. Fails and reserves nothing if a limit leaves no room.
    pub fn reserve(&self, bytes: u64, inodes: u64) -> Result<Room<'_>, NoRoom> {
        let mut room = self.no_room();
        self.charge(bytes).map_err(NoRoom::Bytes)?;
        room.bytes = bytes;
        if take_up_to(&self.inodes, self.inode_limit, inodes, inodes) < inodes {
            return Err(NoRoom::Inodes {
                used: self.inodes(),
                limit: self.inode_limit.unwrap_or(u64::MAX),
            });
        }
        room.inodes = inodes;
        Ok(room)
    }

    /// An empty reservation: use of it is counted even above the limit.
    pub fn no_room(&self) -> Room<'_> {
        Room {
            account: self,
            bytes: 0,
            inodes: 0,
        }
    }
}

impl<'a> Room<'a> {
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

impl Drop for Room<'_> {
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
    fn room_that_is_not_used_is_given_back() {
        let account = account();
        let mut room = account.reserve(8 * 4096, 2).unwrap();
        assert_eq!((account.used(), account.inodes()), (8 * 4096, 2));
        room.use_bytes(3 * 4096);
        room.use_inode();
        drop(room);
        assert_eq!((account.used(), account.inodes()), (3 * 4096, 1));
    }

    #[test]
    fn what_fails_for_want_of_inodes_takes_no_bytes() {
        let account = account();
        let error = account.reserve(4096, 3).unwrap_err();
        assert_eq!(error, NoRoom::Inodes { used: 0, limit: 2 });
        assert_eq!((account.used(), account.inodes()), (0, 0));
        assert!(account.reserve(11 * 4096, 1).is_err());
        assert_eq!((account.used(), account.inodes()), (0, 0));
    }

    #[test]
    fn what_takes_more_than_was_reserved_is_counted() {
        let account = account();
        let mut room = account.reserve(4096, 1).unwrap();
        room.use_bytes(12 * 4096);
        room.use_inode();
        drop(room);
        assert_eq!((account.used(), account.inodes()), (12 * 4096, 1));
        assert!(account.is_above());
    }
}
