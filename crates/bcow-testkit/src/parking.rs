//! Reads that are parked until a test releases them, for exact interleavings of threads.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use bcow::{BlockDevice, Error, MemoryStorage, Storage};

/// A test fails after this time if its read does not come or is not released.
const PATIENCE: Duration = Duration::from_secs(60);

/// The parked reads of a device or a storage. Clones share them.
#[derive(Clone, Default)]
pub struct Parking(Arc<Shared>);

#[derive(Default)]
struct Shared {
    /// Held for a few instructions, never during a read.
    spots: Mutex<Vec<Spot>>,
    changed: Condvar,
}

struct Spot {
    range: Range<u64>,
    moment: Moment,
    state: PermitState,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum PermitState {
    Free,
    Taken,
    Left,
}

/// When a read is parked: it then returns the bytes from after or from before the wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// Before the bytes are read.
    Before,
    /// After the bytes were read.
    After,
}

/// One parked read. Dropping this releases the read.
pub struct Parked {
    parking: Parking,
    index: usize,
}

impl Parking {
    /// Parks the next read that touches `range`, once.
    pub fn hold(&self, range: Range<u64>, moment: Moment) -> Parked {
        let mut spots = self.spots();
        spots.push(Spot {
            range,
            moment,
            state: PermitState::Free,
        });
        Parked {
            parking: self.clone(),
            index: spots.len() - 1,
        }
    }

    fn spots(&self) -> MutexGuard<'_, Vec<Spot>> {
        self.0
            .spots
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn wait<'a>(&'a self, spots: MutexGuard<'a, Vec<Spot>>, index: usize, state: PermitState) {
        let condition = |spots: &mut Vec<Spot>| spots[index].state != state;
        let waited = self
            .0
            .changed
            .wait_timeout_while(spots, PATIENCE, condition);
        let (spots, waited) = waited.unwrap_or_else(|poisoned| poisoned.into_inner());
        drop(spots);
        assert!(!waited.timed_out(), "a parked read is waited for in vain");
    }

    /// Called by a read of `range`.
    fn pass(&self, range: &Range<u64>, moment: Moment) {
        let mut spots = self.spots();
        let chosen = spots.iter().position(|spot| {
            let meets = spot.range.start < range.end && range.start < spot.range.end;
            meets && spot.moment == moment && spot.state == PermitState::Free
        });
        if let Some(index) = chosen {
            spots[index].state = PermitState::Taken;
            self.0.changed.notify_all();
            self.wait(spots, index, PermitState::Left);
        }
    }
}

impl Parked {
    /// Waits until the read is parked.
    pub fn wait(&self) {
        let spots = self.parking.spots();
        if spots[self.index].state == PermitState::Free {
            self.parking.wait(spots, self.index, PermitState::Taken);
        }
    }

    /// Releases the read.
    pub fn release(self) {}
}

impl Drop for Parked {
    fn drop(&mut self) {
        self.parking.spots()[self.index].state = PermitState::Left;
        self.parking.0.changed.notify_all();
    }
}

/// A device or a storage whose chosen reads are parked.
#[derive(Default)]
pub struct Parkable<T> {
    content: T,
    /// The parked reads.
    pub parking: Parking,
}

impl<T> Parkable<T> {
    /// Wraps this content; no read is parked yet.
    pub fn new(content: T) -> Self {
        Parkable {
            content,
            parking: Parking::default(),
        }
    }

    fn read<E>(
        &self,
        offset: u64,
        buf: &mut [u8],
        read: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let range = offset..offset + buf.len() as u64;
        self.parking.pass(&range, Moment::Before);
        let outcome = read(buf);
        self.parking.pass(&range, Moment::After);
        outcome
    }
}

impl<D: BlockDevice> BlockDevice for Parkable<Arc<D>> {
    fn size(&self) -> u64 {
        self.content.size()
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        self.read(offset, buf, |buf| self.content.read_at(offset, buf))
    }
}

impl Storage for Parkable<Arc<MemoryStorage>> {
    crate::forward!(content: len, write_at, set_len, sync);

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.read(offset, buf, |buf| self.content.read_at(offset, buf))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_waits_until_it_is_let_go_and_sees_the_bytes_of_its_moment() {
        for (moment, seen) in [(Moment::Before, 2), (Moment::After, 1)] {
            let content = Arc::new(MemoryStorage::new(vec![1; 8]));
            let storage = Parkable::new(content);
            let parked = storage.parking.hold(4..5, moment);
            let mut other = [0; 4];
            storage.read_at(0, &mut other).unwrap();
            std::thread::scope(|scope| {
                let reader = scope.spawn(|| {
                    let mut bytes = [0; 8];
                    storage.read_at(0, &mut bytes).map(|()| bytes)
                });
                parked.wait();
                storage.write_at(0, &[2; 8]).unwrap();
                parked.release();
                assert_eq!(reader.join().unwrap().unwrap(), [seen; 8]);
            });
        }
    }
}
