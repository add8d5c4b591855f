//! Changes of a file as a whole: change of the backing, clear, rebuild of the free list.
//! `resize.rs` has another one.
//!
//! Each change closes the gate, writes all pending changes into the tables, and then writes one
//! checkpoint with a changed header.

use bcow_format::{BackingEntry, Entry, Header, SECTOR_BYTES, Section, incompatible};

use super::blocks::Blocks;
use super::checkpoint::{Change, section_range};
use super::committer::{Committer, Taken};
use super::create::backing_table;
use super::extents::Extents;
use super::locks::Closed;
use super::regions::read_blocks;
use super::space::sectors;
use super::{Disk, DiskConfig, Inner, Operation};
use crate::image::Below;
use crate::root::Root;
use crate::sync::{Arc, lock};
use crate::{BlockDevice, Error};

/// The maximum memory in bytes of the tables that differ from the file in an idle disk.
const MAX_IDLE_BYTES: u64 = 4 << 20;

impl Disk {
    /// Releases the tables in memory that the disk can read again from the file. If the other
    /// tables take much memory, this writes a checkpoint first, so that they can be released too.
    pub fn release_memory(&self) -> Result<(), Error> {
        let writes_checkpoint = lock(&self.inner.committer).logged_bytes > MAX_IDLE_BYTES;
        let written = if writes_checkpoint { self.checkpoint() } else { Ok(()) };
        self.inner.regions.clear_clean();
        written
    }

    /// Sets or removes the backing. This changes only the reference: the caller makes sure that the
    /// new backing has the right content.
    pub fn set_backing(
        &self,
        backing: Option<(BackingEntry, Arc<dyn BlockDevice>)>,
    ) -> Result<(), Error> {
        self.change_backing(backing, |_, _| Ok(()))
    }

    /// Gives a backing to a disk that has none, without a change of the content: all absent blocks,
    /// which are zeros, get entries for zeros.
    pub fn add_backing(
        &self,
        entry: BackingEntry,
        device: Arc<dyn BlockDevice>,
    ) -> Result<(), Error> {
        let bytes = entry.size;
        self.change_backing(Some((entry, device)), |operation, next| {
            if operation.config.backing.is_some() {
                return Err(Error::Unsupported("a second backing".into()));
            }
            operation.keep_zeros(bytes, next)
        })
    }

    fn change_backing(
        &self,
        backing: Option<(BackingEntry, Arc<dyn BlockDevice>)>,
        adapt: impl FnOnce(Operation<'_>, &mut NextState) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let table = backing.as_ref().map(|(entry, _)| backing_table(entry));
        let table = table.transpose()?;
        self.inner.maintain(|operation, _, next| {
            adapt(operation, next)?;
            next.change.freed.push(section_range(&next.header.backings));
            next.header.backings = match &table {
                Some(bytes) => operation.write_section(bytes, &mut next.change)?,
                None => Section::default(),
            };
            next.header.backing_count = backing.is_some().into();
            let bits = &mut next.header.features.incompatible;
            *bits &= !(incompatible::BACKING | incompatible::VIEWS | incompatible::URLS);
            if let Some((entry, _)) = &backing {
                *bits |= entry.features();
            }
            let cache = &operation.cache;
            next.backing = backing.map(|(entry, device)| Below::new(entry, device, cache));
            Ok(())
        })
    }

    /// Drops all stored data: the disk then reads as its backing, or as zeros.
    pub fn clear(&self) -> Result<(), Error> {
        self.inner.maintain(|_, committer, next| {
            next.root = Root::absent(next.root.len());
            next.change.freed.extend(space_of_blocks(committer).iter());
            Ok(())
        })
    }

    /// Rebuilds the free list from the tables, which recovers leaked space. Returns the number of
    /// recovered bytes.
    pub fn rebuild_free_list(&self) -> Result<u64, Error> {
        let mut found = 0;
        self.inner.maintain(|operation, committer, next| {
            let mut lost = space_of_blocks(committer);
            committer.free.iter().for_each(|range| lost.remove(range));
            for (region, entry) in next.root.iter() {
                let entries = entry.stored().into_iter();
                entries.map(sectors).for_each(|range| lost.remove(range));
                if let Entry::Table(_) = entry {
                    let blocks = operation.read_blocks(region, entry)?;
                    let entries = blocks.iter().filter_map(|entry| entry.stored());
                    entries.map(sectors).for_each(|range| lost.remove(range));
                }
            }
            found = lost.total();
            next.change.freed.extend(lost.iter());
            Ok(())
        })?;
        Ok(found)
    }
}

/// The state of the disk after the change.
pub(super) struct NextState {
    pub(super) header: Header,
    pub(super) root: Root,
    backing: Option<Arc<Below>>,
    pub(super) change: Change,
}

impl Inner {
    /// Applies `change` to the whole file: writes all pending changes, calls `change`, and makes
    /// the result durable with one checkpoint. No other operation runs meanwhile.
    pub(super) fn maintain(
        self: &Arc<Self>,
        change: impl FnOnce(Operation<'_>, &Committer, &mut NextState) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut closed = self.gate.close();
        let mut committer = lock(&self.committer);
        self.apply(&mut closed, &mut committer, change)?;
        // The change is durable. After a failure here, the next opening truncates the file; if the
        // copy of the header fails, the next write or flush is refused with the cause.
        let _ = self.truncate_to_content(&mut committer);
        Ok(())
    }

    fn apply(
        self: &Arc<Self>,
        closed: &mut Closed<'_, DiskConfig>,
        committer: &mut Committer,
        change: impl FnOnce(Operation<'_>, &Committer, &mut NextState) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let config = Arc::clone(closed.get());
        let operation = self.operation(&config);
        operation.commit(committer)?;
        if let Some(ledger) = &self.ledger {
            // Nothing is pending, and the change may remove the blocks that its records name.
            ledger.drop_before(ledger.tail());
        }
        if committer.tail > 0 {
            operation.checkpoint(committer, &Taken::default())?;
        }
        let mut next = NextState {
            header: committer.header.clone(),
            root: self.regions.root(),
            backing: config.backing.clone(),
            change: Change::default(),
        };
        let changed = change(operation, committer, &mut next);
        self.or_free(changed, &next.change)?;
        let NextState {
            header,
            root,
            backing,
            mut change,
        } = next;
        let prepared = self.prepare(committer, header, &root, std::iter::empty(), &mut change);
        let prepared = self.or_free(prepared, &change)?;
        self.switch(committer, prepared)?;
        closed.replace(DiskConfig::new(&committer.header, backing));
        self.regions.set_root(root);
        self.regions.clear();
        Ok(())
    }

    /// Ends the change of a file after its checkpoint: makes both header slots equal, and releases
    /// the free space.
    fn truncate_to_content(&self, committer: &mut Committer) -> Result<(), Error> {
        self.write_other_slot(committer)?;
        // Nothing is pending, so all space that the header does not use is free.
        let end = committer.file_bytes;
        self.file.storage.set_length("truncate the file", end)?;
        self.punch(&committer.free);
        committer.small_flushes = 0;
        self.space.reset(committer.free.clone(), end);
        Ok(())
    }
}

impl Operation<'_> {
    /// The entries that a root entry names.
    fn read_blocks(self, region: u64, entry: Entry) -> Result<Blocks, Error> {
        read_blocks(&self.file, &self.config.header, region, entry)
    }

    /// Makes all absent entries in the regions of the first `bytes` bytes entries for zeros.
    fn keep_zeros(self, bytes: u64, next: &mut NextState) -> Result<(), Error> {
        let shown = bytes.div_ceil(1 << self.region_shift);
        for region in 0..shown.min(next.root.len() as u64) {
            let entry = next.root[region as usize];
            let mut blocks = self.read_blocks(region, entry)?;
            if blocks.replace_all(Entry::Absent, Entry::Zero) {
                self.write_table(region, &blocks, &mut next.root, &mut next.change)?;
            }
        }
        Ok(())
    }
}

/// The ranges of the file that the header does not name: those of blocks, tables and free space.
fn space_of_blocks(committer: &Committer) -> Extents {
    let mut space = Extents::default();
    space.insert(SECTOR_BYTES..committer.file_bytes);
    let header = &committer.header;
    let (log, log_bytes) = header.log;
    space.remove(log..log + log_bytes);
    for section in [
        &header.metadata,
        &header.backings,
        &header.root,
        &header.free,
    ] {
        space.remove(section_range(section));
    }
    space
}
