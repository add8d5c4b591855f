//! Charges the blocks of one host file to the account.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::{Account, ChargeError};
use crate::Seek;
use crate::blocks::{BLOCK_BYTES, BlockSet};
use crate::host::HostFile;

/// The charged blocks of one host file: the blocks with data, and preallocated space. A block is
/// charged when it first stores data.
///
/// Each write to the file calls [`StoredBlocks::reserve`] first, so a write for which there is no
/// space changes nothing. A punched hole is released afterwards. The first call finds the existing
/// data blocks of the file with `SEEK_DATA` and `SEEK_HOLE`, so no record of them is needed after a
/// crash. The host does not list the offsets of preallocated space, only how much space the file
/// takes in total. So the charge of this space is a sum; if the limit leaves no room for a write,
/// the blocks of the write are looked for in the space. Without a limit, this type does nothing.
#[derive(Debug)]
pub struct StoredBlocks {
    account: Arc<Account>,
    /// `None` until the file is examined. A thread that changes the set holds the lock until it has
    /// changed the charge of the file accordingly. Locks of the account are acquired under it.
    set: Mutex<Option<TrackedBlocks>>,
}

/// The blocks of an examined file, and the number of their extents.
#[derive(Debug, Default)]
struct TrackedBlocks {
    set: BlockSet,
    extents: u64,
    /// Bytes of space that was preallocated before the file was examined. `set` does not contain
    /// its blocks.
    preallocated: u64,
    /// Whether the file ever had such space. Then a write can turn a part of it into data, so each
    /// reservation measures it again.
    had_preallocated: bool,
}

/// The number of extents that ext4 stores in an inode.
const INLINE_EXTENTS: u64 = 4;

/// The smallest number of extents in a block of ext4's extent tree. A split leaves a block half
/// full.
const EXTENTS_PER_BLOCK: u64 = 170;

impl TrackedBlocks {
    /// Adds blocks and returns the number of them that were not in the set.
    fn insert(&mut self, blocks: Range<u64>) -> u64 {
        if blocks.is_empty() {
            return 0;
        }
        let before = self.extents_around(&blocks);
        let added = self.set.insert(blocks.clone());
        self.extents = (self.extents + self.extents_around(&blocks)).saturating_sub(before);
        added
    }

    fn remove(&mut self, blocks: Range<u64>) {
        let before = self.extents_around(&blocks);
        self.set.remove(blocks.clone());
        self.extents = (self.extents + self.extents_around(&blocks)).saturating_sub(before);
    }

    /// The number of extents that lie in a range or touch it. A change of the range does not affect
    /// the other extents.
    fn extents_around(&self, blocks: &Range<u64>) -> u64 {
        let around = blocks.start.saturating_sub(1)..blocks.end.saturating_add(1);
        self.set.runs(around).count() as u64
    }

    /// Bytes of the blocks, of the blocks of ext4's extent tree, and of preallocated space.
    fn bytes(&self) -> u64 {
        (self.set.len() + self.tree_blocks()) * BLOCK_BYTES + self.preallocated
    }

    /// Measures the preallocated space: the space that the file takes on the host, without the
    /// blocks in the set and without the attributes.
    fn measure_preallocated(
        &mut self,
        file: &dyn HostFile,
        account: &Account,
    ) -> Result<(), ChargeError> {
        let failed = ChargeError::host("read its allocated size");
        let on_host = file.stored_bytes().map_err(failed)?;
        let attributes = account.overhead.bytes_of(inode_of(file)?);
        self.preallocated = 0;
        self.preallocated = on_host.saturating_sub(self.bytes() + attributes);
        self.had_preallocated |= self.preallocated > 0;
        Ok(())
    }

    /// Bytes of those of `blocks` that are not in the set.
    fn missing_bytes(&self, blocks: &Range<u64>) -> u64 {
        (blocks.end - blocks.start - self.set.count(blocks.clone())) * BLOCK_BYTES
    }

    /// Adds the first `most` of those `blocks` that are not in the set, and lists them in `new`.
    /// Returns the first block that is still missing, or the end of the range.
    fn insert_first(&mut self, blocks: Range<u64>, most: u64, new: &mut Vec<Range<u64>>) -> u64 {
        let mut left = most;
        let mut at = blocks.start;
        while at < blocks.end {
            let (is_known, mut end) = self.set.run(at, blocks.end);
            if !is_known {
                end = end.min(at + left);
                if end == at {
                    break;
                }
                left -= end - at;
                self.insert(at..end);
                new.push(at..end);
            }
            at = end;
        }
        at
    }

    /// Moves those of `blocks` that lie in preallocated space to the set.
    ///
    /// A host that has read such a block into its page cache reports the block as data (ext4, xfs).
    /// A hole is no data after a read. A block that the host does not report stays in the sum: on
    /// btrfs and tmpfs, and behind the end of the file.
    fn find_preallocated(
        &mut self,
        file: &dyn HostFile,
        blocks: &Range<u64>,
    ) -> Result<(), ChargeError> {
        let failed = ChargeError::host("look for preallocated space");
        let mut at = blocks.start;
        while at < blocks.end && self.preallocated >= BLOCK_BYTES {
            let (is_known, end) = self.set.run(at, blocks.end);
            if is_known {
                at = end;
                continue;
            }
            let offset = at * BLOCK_BYTES;
            let is_behind_the_end = file.read_at(offset, &mut [0]).map_err(failed)? == 0;
            if is_behind_the_end {
                break;
            }
            if file.seek(offset, Seek::Data).map_err(failed)? == Some(offset) {
                self.preallocated -= BLOCK_BYTES;
                self.insert(at..at + 1);
            }
            at += 1;
        }
        Ok(())
    }

    /// The number of blocks of ext4's extent tree outside the inode.
    fn tree_blocks(&self) -> u64 {
        if self.extents <= INLINE_EXTENTS {
            return 0;
        }
        let leaves = self.extents.div_ceil(EXTENTS_PER_BLOCK);
        let index_blocks =
            if leaves > INLINE_EXTENTS { leaves.div_ceil(EXTENTS_PER_BLOCK) } else { 0 };
        leaves + index_blocks
    }
}

/// The result of [`StoredBlocks::reserve`].
#[derive(Debug)]
pub struct ReservedRange {
    /// The first byte of the range.
    start: u64,
    /// The end of the part of the range for which there is space.
    pub end: u64,
    /// The blocks that this reservation charged.
    new: Vec<Range<u64>>,
}

/// The amount to reserve if there is not enough space for the whole range.
#[derive(Debug, Clone, Copy)]
enum Wanted {
    AsMuchAsFits,
    All,
}

/// The blocks of an existing file that contain data.
#[derive(Debug)]
pub struct DataBlocks(TrackedBlocks);

impl DataBlocks {
    /// Finds the blocks with data in a file.
    pub fn scan(file: &dyn HostFile) -> Result<DataBlocks, ChargeError> {
        scan(file).map(DataBlocks)
    }

    /// The bytes of the blocks.
    pub fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    /// Adds these blocks and the preallocated space to the account. The space for attributes is
    /// already in the account.
    pub fn count(mut self, file: &dyn HostFile, account: &Account) -> Result<(), ChargeError> {
        self.0.measure_preallocated(file, account)?;
        account.add(self.0.bytes());
        // After a program has read preallocated space, the host reports it as data. So a later scan
        // can give another number.
        if self.0.preallocated > 0 {
            account.remember(inode_of(file)?, self.0.bytes());
        }
        Ok(())
    }
}

impl StoredBlocks {
    /// The blocks of a file. The account already includes the file's existing blocks.
    pub fn new(account: Arc<Account>) -> Self {
        StoredBlocks {
            account,
            set: Mutex::new(None),
        }
    }

    /// Charges the blocks of the bytes `range` that are not charged yet. If there is not enough
    /// space for all of them, it charges as many from the start as fit. The reserved range then
    /// ends at the end of a block, and has at least one byte. Fails if not even one byte fits.
    pub fn reserve(
        &self,
        file: &dyn HostFile,
        range: Range<u64>,
    ) -> Result<ReservedRange, ChargeError> {
        self.take(file, range, Wanted::AsMuchAsFits)
    }

    /// As [`StoredBlocks::reserve`], but charges the whole range or fails.
    pub fn reserve_all(
        &self,
        file: &dyn HostFile,
        range: Range<u64>,
    ) -> Result<ReservedRange, ChargeError> {
        self.take(file, range, Wanted::All)
    }

    fn take(
        &self,
        file: &dyn HostFile,
        range: Range<u64>,
        wanted: Wanted,
    ) -> Result<ReservedRange, ChargeError> {
        let mut reserved = ReservedRange {
            start: range.start,
            end: range.end,
            new: Vec::new(),
        };
        if self.account.limit().is_none() || range.is_empty() {
            return Ok(reserved);
        }
        let mut guard = self.known(file)?;
        let Some(known) = guard.as_mut() else {
            return Ok(reserved);
        };
        // Writes since the last measurement may have used preallocated space.
        self.reexamine_locked(file, known)?;
        let blocks = touched(&range);
        // The charge comes before the insertion: a failed reservation must not remove blocks from
        // the set again.
        let charged = self.charge_missing(file, known, &blocks, wanted)?;
        let before = known.bytes();
        let end = known.insert_first(blocks.clone(), charged / BLOCK_BYTES, &mut reserved.new);
        // Blocks of the extent tree are charged even above the limit. There are few of them.
        self.settle_bytes(before + charged, known.bytes());
        reserved.end = (end * BLOCK_BYTES).min(range.end);
        if reserved.end <= range.start {
            let missing = known.missing_bytes(&blocks);
            return Err(self.account.no_space(missing).into());
        }
        Ok(reserved)
    }

    /// Charges those of `blocks` that are not in the set: all of them or, if `wanted` permits, as
    /// many as fit. Returns the bytes charged.
    fn charge_missing(
        &self,
        file: &dyn HostFile,
        known: &mut TrackedBlocks,
        blocks: &Range<u64>,
        wanted: Wanted,
    ) -> Result<u64, ChargeError> {
        let charge = |missing| {
            let unit = match wanted {
                Wanted::AsMuchAsFits => BLOCK_BYTES,
                Wanted::All => missing,
            };
            self.account.charge_up_to(missing, unit)
        };
        let mut missing = known.missing_bytes(blocks);
        let mut charged = charge(missing);
        // Some of the blocks may lie in preallocated space, which is charged already.
        let left = self.account.left().unwrap_or(u64::MAX);
        let most = left.saturating_add(known.preallocated);
        let may_fit = matches!(wanted, Wanted::AsMuchAsFits) || missing <= most;
        if charged < missing && known.preallocated > 0 && may_fit {
            self.account.release(charged);
            let before = known.bytes();
            let found = known.find_preallocated(file, blocks);
            self.settle_bytes(before, known.bytes());
            found?;
            missing = known.missing_bytes(blocks);
            charged = charge(missing);
        }
        match wanted {
            Wanted::All if charged < missing => Err(self.account.no_space(missing).into()),
            _ => Ok(charged),
        }
    }

    /// Measures the preallocated space again, and updates the charge. To be called after an
    /// allocation of space, because a part of the range may have been preallocated before.
    pub fn reexamine(&self, file: &dyn HostFile) -> Result<(), ChargeError> {
        match self.set.lock().as_mut() {
            Some(known) => self.reexamine_locked(file, known),
            None => Ok(()),
        }
    }

    fn reexamine_locked(
        &self,
        file: &dyn HostFile,
        known: &mut TrackedBlocks,
    ) -> Result<(), ChargeError> {
        if known.had_preallocated {
            let before = known.bytes();
            known.measure_preallocated(file, &self.account)?;
            self.settle_bytes(before, known.bytes());
        }
        Ok(())
    }

    /// The bytes that the file is charged for; `None` before the file was examined.
    pub fn charged(&self) -> Option<u64> {
        self.set.lock().as_ref().map(TrackedBlocks::bytes)
    }

    /// Changes the charge of the file from `before` to `now` bytes.
    fn settle_bytes(&self, before: u64, now: u64) {
        self.account.add(now.saturating_sub(before));
        self.account.release(before.saturating_sub(now));
    }

    /// Releases the blocks of a reservation that were not written. The write ended at byte `end`.
    pub fn release_unwritten(&self, reserved: ReservedRange, end: u64) {
        // If nothing was written, the first block is released too.
        let kept = if end > reserved.start { end.div_ceil(BLOCK_BYTES) } else { 0 };
        for blocks in reserved.new {
            self.drop_blocks(blocks.start.max(kept)..blocks.end);
        }
    }

    /// Finds the existing blocks of the file, if this was not done before. To be called before a
    /// hole is punched or the file is truncated.
    pub fn examine(&self, file: &dyn HostFile) -> Result<(), ChargeError> {
        if self.account.limit().is_some() {
            drop(self.known(file)?);
        }
        Ok(())
    }

    /// Releases the blocks that lie completely in a punched range.
    pub fn punched(&self, range: Range<u64>) {
        self.drop_blocks(range.start.div_ceil(BLOCK_BYTES)..range.end / BLOCK_BYTES);
    }

    /// Releases the blocks behind the new size of a truncated file.
    pub fn truncated(&self, size: u64) {
        self.drop_blocks(size.div_ceil(BLOCK_BYTES)..u64::MAX);
        if size == 0
            && let Some(known) = self.set.lock().as_mut()
        {
            self.account
                .release(std::mem::take(&mut known.preallocated));
        }
    }

    /// Releases all blocks of a file that is about to be removed.
    pub fn release_all(&self, file: &dyn HostFile) -> Result<(), ChargeError> {
        self.examine(file)?;
        self.truncated(0);
        Ok(())
    }

    /// Ends the tracking of a file that continues to exist, and remembers its charge in the
    /// account. The next call examines the file again. The caller ensures that no thread writes to
    /// the file in between.
    pub fn stop_tracking(&self, file: &dyn HostFile) -> Result<(), ChargeError> {
        let mut guard = self.set.lock();
        if let Some(known) = guard.as_mut() {
            // Writes into preallocated space can split its extents, so the extent tree grows.
            let before = known.bytes();
            known.measure_preallocated(file, &self.account)?;
            self.settle_bytes(before, known.bytes());
            // A later scan does not find preallocated space, so it can give another number.
            self.account.remember(inode_of(file)?, known.bytes());
            *guard = None;
        }
        Ok(())
    }

    fn drop_blocks(&self, blocks: Range<u64>) {
        if blocks.is_empty() {
            return;
        }
        if let Some(known) = self.set.lock().as_mut() {
            let before = known.bytes();
            known.remove(blocks);
            self.settle_bytes(before, known.bytes());
        }
    }

    /// The tracked blocks. The first call examines the file.
    fn known(
        &self,
        file: &dyn HostFile,
    ) -> Result<MutexGuard<'_, Option<TrackedBlocks>>, ChargeError> {
        let mut set = self.set.lock();
        if set.is_none() {
            let mut found = scan(file)?;
            let inode = inode_of(file)?;
            if let Some(charged) = self.account.recall(inode) {
                // Later releases start from the measured number. So the charge is changed to it
                // now.
                found
                    .measure_preallocated(file, &self.account)
                    .inspect_err(|_| self.account.remember(inode, charged))?;
                self.settle_bytes(charged, found.bytes());
            }
            *set = Some(found);
        }
        Ok(set)
    }
}

/// The blocks that contain the bytes of a range.
fn touched(range: &Range<u64>) -> Range<u64> {
    range.start / BLOCK_BYTES..range.end.div_ceil(BLOCK_BYTES)
}

fn inode_of(file: &dyn HostFile) -> Result<u64, ChargeError> {
    file.inode()
        .map_err(ChargeError::host("read its inode number"))
}

/// Finds the blocks of a file that contain data.
fn scan(file: &dyn HostFile) -> Result<TrackedBlocks, ChargeError> {
    let failed = ChargeError::host("look for holes");
    let mut found = TrackedBlocks::default();
    let mut at = 0;
    while let Some(start) = file.seek(at, Seek::Data).map_err(failed)? {
        let end = file.seek(start, Seek::Hole).map_err(failed)?;
        let end = end.unwrap_or(start).max(start + 1);
        found.insert(touched(&(start..end)));
        at = end;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;
    use std::os::unix::fs::FileExt;
    use std::sync::atomic::{AtomicBool, Ordering};

    use rustix::fs::Timespec;

    const B: u64 = BLOCK_BYTES;

    fn setup(limit: u64) -> (Arc<Account>, StoredBlocks, std::fs::File) {
        let account = Arc::new(Account::new(Some(limit * B)));
        let stored = StoredBlocks::new(Arc::clone(&account));
        (account, stored, tempfile::tempfile().unwrap())
    }

    #[test]
    fn a_block_counts_when_it_is_first_stored() {
        let (account, stored, file) = setup(10);
        assert_eq!(stored.reserve(&file, 100..200).unwrap().end, 200);
        assert_eq!(account.used(), B);
        stored.reserve(&file, 0..B + 1).unwrap();
        stored.reserve(&file, B..2 * B).unwrap();
        assert_eq!(account.used(), 2 * B);
        stored.truncated(B + 1);
        assert_eq!(account.used(), 2 * B);
        stored.truncated(B);
        assert_eq!(account.used(), B);
        stored.reserve(&file, 5 * B..9 * B).unwrap();
        stored.punched(5 * B + 1..8 * B - 1);
        assert_eq!(account.used(), 4 * B);
        stored.truncated(0);
        assert_eq!(account.used(), 0);
    }

    #[test]
    fn blocks_of_the_extent_tree_are_charged() {
        let (account, stored, file) = setup(10_000);
        let write = |block: u64| stored.reserve(&file, block * B..block * B + 1).unwrap();
        for block in 0..4 {
            write(2 * block);
        }
        assert_eq!(account.used(), 4 * B);
        write(8);
        assert_eq!(account.used(), 6 * B);
        // The writes below join the extents.
        for block in 0..4 {
            write(2 * block + 1);
        }
        assert_eq!(account.used(), 9 * B);
        for block in 0..1000 {
            write(100 + 2 * block);
        }
        assert_eq!(account.used(), (9 + 1000 + 6 + 1) * B);
        stored.punched(100 * B..3000 * B);
        assert_eq!(account.used(), 9 * B);
        stored.truncated(0);
        assert_eq!(account.used(), 0);
    }

    #[test]
    fn reservation_is_cut_short_at_the_end_of_a_block() {
        let (account, stored, file) = setup(3);
        stored.reserve(&file, 2 * B..3 * B).unwrap();
        // Blocks 0 and 1 fit, block 2 is already charged, block 3 does not fit.
        let reserved = stored.reserve(&file, 10..4 * B).unwrap();
        assert_eq!((reserved.end, account.left()), (3 * B, Some(0)));
        assert!(matches!(
            stored.reserve(&file, 3 * B..4 * B),
            Err(ChargeError::NoSpace(_))
        ));
        stored.reserve(&file, 0..3 * B).unwrap();
        stored.release_unwritten(reserved, 0);
        assert_eq!(account.used(), B);
        assert!(stored.reserve_all(&file, 3 * B..6 * B).is_err());
        assert_eq!(account.used(), B);
    }

    #[test]
    fn block_without_a_written_byte_is_not_charged() {
        let (account, stored, file) = setup(10);
        for (start, written_to, blocks) in [(10, 10, 0), (10, 0, 0), (B, B, 0), (10, 11, 1)] {
            let reserved = stored.reserve(&file, start..3 * B).unwrap();
            stored.release_unwritten(reserved, written_to);
            assert_eq!(account.used(), blocks * B, "{start}, {written_to}");
        }
    }

    #[test]
    fn preallocated_space_counts_at_any_offset() {
        let (account, stored, file) = setup(10);
        let used = || account.used() / B;
        stored.reserve_all(&file, 0..6 * B).unwrap();
        HostFile::allocate(&file, 0, 6 * B).unwrap();
        let write = |block: u64| {
            let reserved = stored.reserve(&file, block * B..(block + 1) * B);
            file.write_all_at(&[1; B as usize], block * B).unwrap();
            reserved.map(|reserved| assert_eq!(reserved.end, (block + 1) * B))
        };
        write(1).unwrap();
        assert_eq!(used(), 6);
        stored.stop_tracking(&file).unwrap();
        assert_eq!(used(), 6);
        // A write into preallocated space takes no more space, as the next write finds.
        write(2).unwrap();
        write(2).unwrap();
        assert_eq!(used(), 6);
        // A write elsewhere does.
        write(8).unwrap();
        assert_eq!(used(), 7);
        stored.stop_tracking(&file).unwrap();
        assert_eq!(used(), 7);
        stored.release_all(&file).unwrap();
        assert_eq!(used(), 0);
    }

    #[test]
    fn preallocated_space_that_becomes_data_is_not_released_twice() {
        let (account, _, file) = setup(10);
        file.write_all_at(&[1; 5000], B).unwrap();
        HostFile::allocate(&file, 4 * B, 4 * B).unwrap();
        file.set_len(8 * B).unwrap();
        account.add(3 * B);
        DataBlocks::scan(&file)
            .unwrap()
            .count(&file, &account)
            .unwrap();
        let used = || account.used() / B;
        assert_eq!(used(), 9);
        let read = || file.read_exact_at(&mut [0; 4 * B as usize], 4 * B).unwrap();
        for _ in 0..3 {
            // The host reports pages of preallocated space as data after a read.
            read();
            let stored = StoredBlocks::new(Arc::clone(&account));
            stored.examine(&file).unwrap();
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
            stored.stop_tracking(&file).unwrap();
            assert_eq!(used(), 9);
        }
        read();
        let stored = StoredBlocks::new(Arc::clone(&account));
        stored.release_all(&file).unwrap();
        assert_eq!(used(), 3);
    }

    #[test]
    fn write_into_preallocated_space_needs_no_room_after_a_remount() {
        if bcow_testkit::lacks_reports_of_preallocated_space() {
            return;
        }
        let (account, _, file) = setup(6);
        HostFile::allocate(&file, 2 * B, 6 * B).unwrap();
        file.set_len(20 * B).unwrap();
        DataBlocks::scan(&file)
            .unwrap()
            .count(&file, &account)
            .unwrap();
        let stored = StoredBlocks::new(Arc::clone(&account));
        let write = |range: Range<u64>| {
            let reserved = stored.reserve(&file, range.clone());
            reserved.map(|reserved| {
                let length = (reserved.end - range.start) as usize;
                file.write_all_at(&vec![1; length], range.start).unwrap();
                reserved.end
            })
        };
        assert_eq!((account.used(), account.left()), (6 * B, Some(0)));
        assert_eq!(write(3 * B + 10..4 * B + 10).unwrap(), 4 * B + 10);
        // The write ends at the hole.
        assert_eq!(write(7 * B..10 * B).unwrap(), 8 * B);
        for hole in [0..B, B..3 * B, 8 * B..9 * B, 30 * B..31 * B] {
            assert!(write(hole).is_err());
        }
        stored.reserve_all(&file, 2 * B..8 * B).unwrap();
        assert_eq!(account.used(), 6 * B);
        assert_eq!(file.stored_bytes().unwrap(), 6 * B);
        stored.release_all(&file).unwrap();
        assert_eq!(account.used(), 0);
    }

    #[test]
    fn allocation_of_a_hole_does_not_use_preallocated_space_of_another_place() {
        let (account, _, file) = setup(6);
        HostFile::allocate(&file, 0, 6 * B).unwrap();
        file.set_len(40 * B).unwrap();
        DataBlocks::scan(&file)
            .unwrap()
            .count(&file, &account)
            .unwrap();
        let stored = StoredBlocks::new(Arc::clone(&account));
        for start in [10 * B, 20 * B, 30 * B] {
            stored.reserve_all(&file, start..start + 6 * B).unwrap_err();
        }
        assert_eq!(account.used(), 6 * B);
    }

    #[test]
    fn charge_survives_a_failed_measurement() {
        let (account, stored, file) = setup(10);
        stored.reserve_all(&file, 0..6 * B).unwrap();
        HostFile::allocate(&file, 0, 6 * B).unwrap();
        stored.stop_tracking(&file).unwrap();
        let file = Unmeasured {
            file,
            fails: AtomicBool::new(true),
        };
        stored.examine(&file).unwrap_err();
        file.fails.store(false, Ordering::Relaxed);
        assert_eq!(account.used(), 6 * B);
        stored.release_all(&file).unwrap();
        assert_eq!(account.used(), 0);
    }

    /// A file whose stored bytes cannot be read while `fails` is set.
    struct Unmeasured {
        file: std::fs::File,
        fails: AtomicBool,
    }

    impl HostFile for Unmeasured {
        fn stored_bytes(&self) -> io::Result<u64> {
            if self.fails.load(Ordering::Relaxed) {
                Err(rustix::io::Errno::IO.into())
            } else {
                self.file.stored_bytes()
            }
        }
        fn inode(&self) -> io::Result<u64> {
            self.file.inode()
        }
        fn seek(&self, offset: u64, what: Seek) -> io::Result<Option<u64>> {
            self.file.seek(offset, what)
        }
        fn size(&self) -> io::Result<u64> {
            self.file.size()
        }
        fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
            HostFile::read_at(&self.file, offset, buf)
        }
        fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<usize> {
            HostFile::write_at(&self.file, offset, bytes)
        }
        fn set_size(&self, size: u64) -> io::Result<()> {
            self.file.set_size(size)
        }
        fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
            self.file.punch(offset, length)
        }
        fn allocate(&self, offset: u64, length: u64) -> io::Result<()> {
            HostFile::allocate(&self.file, offset, length)
        }
        fn times(&self) -> io::Result<crate::host::FileTimes> {
            HostFile::times(&self.file)
        }
        fn set_modified(&self, time: Timespec) -> io::Result<()> {
            HostFile::set_modified(&self.file, time)
        }
        fn sync_data(&self) -> io::Result<()> {
            HostFile::sync_data(&self.file)
        }
        fn sync_all(&self) -> io::Result<()> {
            HostFile::sync_all(&self.file)
        }
    }

    #[test]
    fn failed_reservation_releases_no_blocks_of_a_concurrent_one() {
        let (account, stored, file) = setup(3);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    stored.reserve_all(&file, 0..6 * B).unwrap_err();
                    // The other thread waits for the lock.
                    std::thread::yield_now();
                }
            });
            let lost = (0..20_000).find(|_| {
                let reserved = stored.reserve(&file, B..2 * B).unwrap();
                std::thread::yield_now();
                let lost = account.used() < B;
                stored.release_unwritten(reserved, 0);
                lost
            });
            done.store(true, Ordering::Relaxed);
            assert_eq!(lost, None);
        });
    }

    #[test]
    fn existing_blocks_are_not_charged_again() {
        let (account, stored, file) = setup(4);
        file.write_all_at(&[1; 5000], 3 * B).unwrap();
        file.set_len(100 * B).unwrap();
        DataBlocks::scan(&file)
            .unwrap()
            .count(&file, &account)
            .unwrap();
        assert_eq!(account.used(), 2 * B);
        stored.reserve(&file, 3 * B..5 * B).unwrap();
        assert_eq!(account.used(), 2 * B);
        stored.examine(&file).unwrap();
        stored.truncated(0);
        assert_eq!(account.used(), 0);
    }

    #[test]
    fn account_without_a_limit_does_not_examine_the_host() {
        let stored = StoredBlocks::new(Arc::default());
        let file = tempfile::tempfile().unwrap();
        assert_eq!(stored.reserve(&file, 0..1 << 40).unwrap().end, 1 << 40);
        assert!(stored.set.lock().is_none());
    }
}
