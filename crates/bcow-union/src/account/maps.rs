//! The space of the maps of partial files.

use super::{Account, Reservation};
use crate::blocks::BLOCK_BYTES;

impl Account {
    /// Counts the map of partial file `id`, which exists or will exist, with `bytes` bytes. Does
    /// nothing if the map is already counted.
    pub fn add_map(&self, id: u64, bytes: u64, room: &mut Reservation<'_>) {
        let bytes = bytes.next_multiple_of(BLOCK_BYTES);
        self.maps.lock().entry(id).or_insert_with(|| {
            room.use_inode();
            room.use_bytes(bytes);
            bytes
        });
    }

    /// Raises the figure of the map of partial file `id` to `bytes` bytes.
    pub(crate) fn grow_map(&self, id: u64, bytes: u64) {
        let bytes = bytes.next_multiple_of(BLOCK_BYTES);
        if let Some(before) = self.maps.lock().get_mut(&id)
            && *before < bytes
        {
            self.add(bytes - *before);
            *before = bytes;
        }
    }

    /// Sets the figure of the map of partial file `id` to `bytes` bytes.
    pub(crate) fn set_map(&self, id: u64, bytes: u64) {
        let bytes = bytes.next_multiple_of(BLOCK_BYTES);
        if let Some(before) = self.maps.lock().get_mut(&id) {
            self.add(bytes.saturating_sub(*before));
            self.release(before.saturating_sub(bytes));
            *before = bytes;
        }
    }

    /// Releases the map of partial file `id`.
    pub(crate) fn release_map(&self, id: u64) {
        let removed = self.maps.lock().remove(&id);
        if let Some(bytes) = removed {
            self.release(bytes);
            self.release_inodes(1);
        }
    }
}
