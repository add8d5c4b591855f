//! The images and layers whose files are shared, and the numbers of the files.

use std::collections::BTreeMap;
use std::sync::Arc;

use bcow::Verify;
use bcow_erofs::reader::Nid;
use bcow_union::Image;
use parking_lot::Mutex;

use super::workers::Workers;
use crate::error::MountError;

/// The bits of a number that have the inode in the image; the bits above have the slot. An inode of
/// the image is the place of its metadata in units of 32 bytes, so 40 bits are enough for 32 TiB.
const NID_BITS: u32 = 40;
/// The slots of a hidden mount. The highest bit of a number stays zero.
const MAX_SLOTS: u32 = 1 << 23;

/// Mounts of images with equal keys, or with layers with equal keys, share files: the files have
/// the same content, and each read of it has been verified in the same way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageKey {
    pub identity: [u8; 32],
    /// What each read verifies.
    pub verify: Verify,
    /// For an image for which reads can wait for a server: a number for the server's name of it.
    pub remote: Option<u64>,
}

/// A file of an image, or of a layer, in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SharedFile {
    pub(crate) slot: u32,
    pub(crate) nid: Nid,
}

impl SharedFile {
    /// `None` for a slot that no image gets, and for an inode that has no number.
    pub(crate) fn new(slot: u32, nid: Nid) -> Option<Self> {
        let has_number = (1..MAX_SLOTS).contains(&slot) && nid.0 >> NID_BITS == 0;
        has_number.then_some(SharedFile { slot, nid })
    }

    /// The number of its node. No process needs to know the node to answer a request for it.
    pub(crate) fn number(self) -> u64 {
        (u64::from(self.slot) << NID_BITS) | self.nid.0
    }

    /// The file with this number; `None` for other nodes.
    pub(crate) fn of_number(number: u64) -> Option<Self> {
        let slot = u32::try_from(number >> NID_BITS).ok()?;
        Self::new(slot, Nid(number & ((1 << NID_BITS) - 1)))
    }

    /// Its name in the root directory.
    pub(crate) fn name(self) -> String {
        format!("{}-{}", self.slot, self.nid.0)
    }

    /// The file with this name; `None` for other names.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        let (slot, nid) = name.split_once('-')?;
        let file = Self::new(slot.parse().ok()?, Nid(nid.parse().ok()?))?;
        (file.name() == name).then_some(file)
    }
}

/// The slots, and the images in them. A slot is never used for another key: the kernel caches pages
/// of its files longer than the image is mounted.
#[derive(Default)]
pub(crate) struct Slots(Mutex<SlotTable>);

struct SlotTable {
    slots: BTreeMap<u32, OpenSlot>,
    /// The slot of the next image.
    next: u32,
    /// Whether mounts of the process before will take their slots.
    is_taking_over: bool,
    waiting: Vec<(u32, Answer)>,
}

#[derive(Clone)]
struct OpenSlot {
    key: ImageKey,
    /// Empty when all mounts have ended.
    images: Images,
    /// The threads that answer requests, if that can wait for a server.
    workers: Option<Arc<Workers>>,
}

/// One image for each mount: equal content, but each has its own error log.
type Images = Arc<[Arc<Image>]>;
/// Answers a request, from one of the images.
type Answer = Box<dyn FnOnce(&[Arc<Image>]) + Send>;

impl Default for SlotTable {
    fn default() -> Self {
        SlotTable {
            slots: BTreeMap::new(),
            next: 1,
            is_taking_over: false,
            waiting: Vec::new(),
        }
    }
}

impl Slots {
    /// From now on, a request for a slot that has no image waits for [`Slots::put_again`] or
    /// [`Slots::end_takeover`]. `next` is the slot of the next new image.
    pub(crate) fn begin_takeover(&self, next: u32) {
        let mut table = self.0.lock();
        table.next = next.max(1);
        table.is_taking_over = true;
    }

    /// No mount will take a slot of the process before any more.
    pub(crate) fn end_takeover(&self) {
        let waiting = {
            let mut table = self.0.lock();
            table.is_taking_over = false;
            std::mem::take(&mut table.waiting)
        };
        for (_, answer) in waiting {
            answer(&[]);
        }
    }

    /// Puts images into the slots of their keys, which are returned. Calls `announce` with the next
    /// free slot before a new one is used.
    pub(crate) fn put(
        &self,
        images: &[(ImageKey, Arc<Image>)],
        announce: impl FnOnce(u32) -> Result<(), MountError>,
    ) -> Result<Vec<u32>, MountError> {
        let mut table = self.0.lock();
        let mut next = table.next;
        let mut found = Vec::with_capacity(images.len());
        for (key, _) in images {
            // An image can have a layer twice.
            let before = images
                .iter()
                .zip(&found)
                .find(|((other, _), _)| other == key);
            let known = table.slots.iter().find(|(_, open)| open.key == *key);
            let slot = before.map(|(_, &slot)| slot);
            let slot = slot.or_else(|| known.map(|(&slot, _)| slot));
            found.push(slot.unwrap_or(next));
            next += u32::from(slot.is_none());
        }
        if next > MAX_SLOTS {
            return Err(MountError::NoSharing("the process had too many images"));
        }
        if next > table.next {
            announce(next)?;
            table.next = next;
        }
        for (&slot, (key, image)) in found.iter().zip(images) {
            table.add(slot, *key, image);
        }
        Ok(found)
    }

    /// Puts the image of a mount that this process takes over into its slot, and answers the
    /// requests that wait for it. Fails if the slot has another image.
    pub(crate) fn put_again(&self, slot: u32, key: ImageKey, image: &Arc<Image>) -> bool {
        let (open, ready): (OpenSlot, Vec<_>) = {
            let mut table = self.0.lock();
            let known = table.slots.get(&slot);
            if slot >= table.next || known.is_some_and(|open| open.key != key) {
                return false;
            }
            let open = table.add(slot, key, image);
            let waiting = std::mem::take(&mut table.waiting);
            let (ready, others) = waiting.into_iter().partition(|(one, _)| *one == slot);
            table.waiting = others;
            (open, ready)
        };
        for (_, answer) in ready {
            open.clone().give(answer);
        }
        true
    }

    /// The mount of an image has ended. The slot stays that of its key: the next mount with this
    /// key finds the pages that the kernel still has.
    pub(crate) fn remove(&self, slot: u32, image: &Arc<Image>) {
        if let Some(open) = self.0.lock().slots.get_mut(&slot) {
            let others = open.images.iter().filter(|one| !Arc::ptr_eq(one, image));
            open.images = others.cloned().collect();
        }
    }

    /// Calls `answer` with the images of a slot, which are equal; with none if there are none.
    /// Another thread may do so, during a takeover or if the answer can wait for a server.
    pub(crate) fn with_images(
        &self,
        slot: u32,
        answer: impl FnOnce(&[Arc<Image>]) + Send + 'static,
    ) {
        let open = {
            let mut table = self.0.lock();
            let open = table
                .slots
                .get(&slot)
                .filter(|open| !open.images.is_empty());
            let open = open.cloned();
            // Another mount of the image may still be taken over.
            if open.is_none() && table.is_taking_over {
                return table.waiting.push((slot, Box::new(answer)));
            }
            open
        };
        match open {
            Some(open) => open.give(answer),
            None => answer(&[]),
        }
    }
}

impl OpenSlot {
    fn give(self, answer: impl FnOnce(&[Arc<Image>]) + Send + 'static) {
        match self.workers {
            Some(workers) => workers.run(move || answer(&self.images)),
            None => answer(&self.images),
        }
    }
}

impl SlotTable {
    fn add(&mut self, slot: u32, key: ImageKey, image: &Arc<Image>) -> OpenSlot {
        let open = self.slots.entry(slot).or_insert_with(|| OpenSlot {
            key,
            images: Images::default(),
            workers: key.remote.map(|_| Arc::default()),
        });
        open.images = open.images.iter().chain([image]).cloned().collect();
        open.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_known_by_its_number_and_by_its_name() {
        for (slot, nid) in [(1, 0), (7, 36), (MAX_SLOTS - 1, (1 << NID_BITS) - 1)] {
            let file = SharedFile::new(slot, Nid(nid)).unwrap();
            assert_eq!(SharedFile::of_number(file.number()), Some(file));
            assert_eq!(SharedFile::parse(&file.name()), Some(file));
            assert_eq!(file.number() >> 63, 0);
        }
        assert_eq!(SharedFile::new(1, Nid(1 << NID_BITS)), None);
        // The number would be that of a file in slot 1.
        assert_eq!(SharedFile::parse(&format!("{}-5", (1 << 24) + 1)), None);
        assert_eq!(SharedFile::of_number(1), None, "the root directory");
        for name in [
            "",
            "1",
            "1-",
            "-1",
            "0-7",
            "01-7",
            "1-7-",
            "x-7",
            "1-1099511627776",
        ] {
            assert_eq!(SharedFile::parse(name), None, "{name}");
        }
    }
}
