//! Which blocks of one file of the host count.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use super::{Account, NoSpace};
use crate::Seek;
use crate::sketch::blocks::BlockSet;
use crate::sketch::host::HostFile;
use crate::sketch::{BLOCK_BYTES, SketchError};

/// The blocks of one file of the host that hold something, each charged to the account when it first does.
///
/// All writes to the file announce themselves ([`StoredBlocks::reserve`]) before, so that a write for which there is no room
/// changes nothing; holes that are made are told afterwards. What the file held before the first of it is asked of the host, which
/// also knows after a crash; space that was only allocated is then no longer counted. The host does not always tell the same of
/// such space, so the account remembers what it was charged for. Without a limit nothing of this happens.
#[derive(Debug)]
pub struct StoredBlocks {
    account: Arc<Account>,
    set: Mutex<Option<BlockSet>>,
}

/// What [`StoredBlocks::reserve`] gave.
#[derive(Debug)]
pub struct Reserved {
    /// Its first byte.
    start: u64,
    /// End of the range for which there is room.
    pub end: u64,
    /// Blocks that count from now on.
    new: Vec<Range<u64>>,
}

/// How much is reserved where there is not room for all.
#[derive(Debug, Clone, Copy)]
enum Most {
    ThereIsRoomFor,
    AllOrNothing,
}

/// Charges what a file counts that is there already: its blocks of 4 KiB in which there is data.
pub fn count(file: &dyn HostFile, account: &Account) -> Result<(), SketchError> {
    let data = scan(file)?.len() * BLOCK_BYTES;
    account.add(data);
    // Space that was only allocated looks like data once somebody has read it.
    let takes = file
        .stored_bytes()
        .map_err(|error| SketchError::host("look at its space", &error))?;
    if takes > data {
        account.remember(inode_of(file)?, data);
    }
    Ok(())
}

impl StoredBlocks {
    /// Of a file whose blocks, if it has some, are in the account already.
    pub fn new(account: Arc<Account>) -> Self {
        StoredBlocks {
            account,
            set: Mutex::new(None),
        }
    }

    /// Charges what the bytes `range` take that is not there yet: for all of it, or for so much from its start as there is
    /// room for, up to the end of a block, but at least one byte.
    pub fn reserve(&self, file: &dyn HostFile, range: Range<u64>) -> Result<Reserved, SketchError> {
        self.take(file, range, Most::ThereIsRoomFor)
    }

    /// As [`StoredBlocks::reserve`], for all of it or nothing.
    pub fn reserve_all(
        &self,
        file: &dyn HostFile,
        range: Range<u64>,
    ) -> Result<Reserved, SketchError> {
        self.take(file, range, Most::AllOrNothing)
    }

    fn take(
        &self,
        file: &dyn HostFile,
        range: Range<u64>,
        most: Most,
    ) -> Result<Reserved, SketchError> {
        let mut reserved = Reserved {
            start: range.start,
            end: range.end,
            new: Vec::new(),
        };
        if self.account.limit().is_none() || range.is_empty() {
            return Ok(reserved);
        }
        let mut guard = self.known(file)?;
        let Some(set) = guard.as_mut() else {
            return Ok(reserved);
        };
        let blocks = touched(&range);
        let missing = (blocks.end - blocks.start - set.count(blocks.clone())) * BLOCK_BYTES;
        let charged = match most {
            Most::ThereIsRoomFor => self.account.charge_up_to(missing, BLOCK_BYTES),
            // Before anything is in the set, as others rely on what is.
            Most::AllOrNothing => {
                self.account.charge(missing)?;
                missing
            }
        };
        let mut left = charged / BLOCK_BYTES;
        let mut at = blocks.start;
        while at < blocks.end {
            let (inside, mut end) = set.run(at, blocks.end);
            if !inside {
                end = end.min(at + left);
                if end == at {
                    break;
                }
                left -= end - at;
                set.insert(at..end);
                reserved.new.push(at..end);
            }
            at = end;
        }
        reserved.end = (at * BLOCK_BYTES).min(range.end);
        if reserved.end <= range.start {
            let wanted = missing;
            return Err(SketchError::NoSpace(NoSpace {
                wanted,
                ..self.account.no_space(wanted)
            }));
        }
        Ok(reserved)
    }

    /// Counts what is written whether there is room or not: what was there before must be readable, and may need repair first.
    pub fn add(&self, file: &dyn HostFile, range: Range<u64>) -> Result<(), SketchError> {
        if self.account.limit().is_none() || range.is_empty() {
            return Ok(());
        }
        let mut guard = self.known(file)?;
        if let Some(set) = guard.as_mut() {
            let blocks = touched(&range);
            let missing = blocks.end - blocks.start - set.count(blocks.clone());
            set.insert(blocks);
            self.account.add(missing * BLOCK_BYTES);
        }
        Ok(())
    }

    /// Nothing was written of what was reserved, but for the bytes before `end`.
    pub fn undo(&self, reserved: Reserved, end: u64) {
        let kept = match end > reserved.start {
            true => end.div_ceil(BLOCK_BYTES),
            // Nor of the block that it begins in.
            false => 0,
        };
        for blocks in reserved.new {
            self.drop_blocks(blocks.start.max(kept)..blocks.end);
        }
    }

    /// Has to be called before a hole is made, with the file as it is then.
    pub fn look(&self, file: &dyn HostFile) -> Result<(), SketchError> {
        if self.account.limit().is_some() {
            drop(self.known(file)?);
        }
        Ok(())
    }

    /// A hole was made of the bytes `range`, in blocks that lie in it as a whole.
    pub fn punched(&self, range: Range<u64>) {
        self.drop_blocks(range.start.div_ceil(BLOCK_BYTES)..range.end / BLOCK_BYTES);
    }

    /// The file was cut off at `size`, where it was longer.
    pub fn truncated(&self, size: u64) {
        self.drop_blocks(size.div_ceil(BLOCK_BYTES)..u64::MAX);
    }

    /// The file goes, and all that it holds.
    pub fn release_all(&self, file: &dyn HostFile) -> Result<(), SketchError> {
        self.look(file)?;
        self.truncated(0);
        Ok(())
    }

    /// The file lives on, but nobody announces writes here until it is looked at again: what was only allocated, which will not be
    /// found then, no longer counts. Nobody may write to it meanwhile.
    pub fn let_go(&self, file: &dyn HostFile) -> Result<(), SketchError> {
        let mut guard = self.lock();
        let Some(set) = guard.as_mut() else {
            return Ok(());
        };
        let inode = inode_of(file)?;
        let data = scan(file)?;
        for run in data.runs(0..u64::MAX) {
            set.remove(run);
        }
        self.account.release(set.len() * BLOCK_BYTES);
        self.account.remember(inode, data.len() * BLOCK_BYTES);
        *guard = None;
        Ok(())
    }

    fn drop_blocks(&self, blocks: Range<u64>) {
        if blocks.is_empty() {
            return;
        }
        if let Some(set) = self.lock().as_mut() {
            let removed = set.remove(blocks);
            self.account.release(removed * BLOCK_BYTES);
        }
    }

    fn known(&self, file: &dyn HostFile) -> Result<MutexGuard<'_, Option<BlockSet>>, SketchError> {
        let mut set = self.lock();
        if set.is_none() {
            let inode = inode_of(file)?;
            let found = scan(file)?;
            let bytes = found.len() * BLOCK_BYTES;
            // What was charged for it is what will be given back.
            let charged = self.account.recall(inode).unwrap_or(bytes);
            self.account.add(bytes.saturating_sub(charged));
            self.account.release(charged.saturating_sub(bytes));
            *set = Some(found);
        }
        Ok(set)
    }

    fn lock(&self) -> MutexGuard<'_, Option<BlockSet>> {
        self.set
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// The blocks that the bytes of a range lie in.
fn touched(range: &Range<u64>) -> Range<u64> {
    range.start / BLOCK_BYTES..range.end.div_ceil(BLOCK_BYTES)
}

fn inode_of(file: &dyn HostFile) -> Result<u64, SketchError> {
    file.inode()
        .map_err(|error| SketchError::host("look at its inode number", &error))
}

/// The blocks in which a file has data.
fn scan(file: &dyn HostFile) -> Result<BlockSet, SketchError> {
    let failed = |error: std::io::Error| SketchError::host("look for holes", &error);
    let mut set = BlockSet::default();
    let mut at = 0;
    while let Some(start) = file.seek(at, Seek::Data).map_err(failed)? {
        let end = file.seek(start, Seek::Hole).map_err(failed)?;
        let end = end.unwrap_or(start).max(start + 1);
        set.insert(touched(&(start..end)));
        at = end;
    }
    Ok(set)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

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
    fn what_does_not_fit_is_short_at_the_end_of_a_block() {
        let (account, stored, file) = setup(3);
        stored.reserve(&file, 2 * B..3 * B).unwrap();
        // Blocks 0 and 1 fit, 2 is there, 3 does not.
        let reserved = stored.reserve(&file, 10..4 * B).unwrap();
        assert_eq!((reserved.end, account.left()), (3 * B, Some(0)));
        assert!(
            stored
                .reserve(&file, 3 * B..4 * B)
                .unwrap_err()
                .is_no_space()
        );
        stored.reserve(&file, 0..3 * B).unwrap();
        stored.undo(reserved, 0);
        assert_eq!(account.used(), B);
        assert!(stored.reserve_all(&file, 3 * B..6 * B).is_err());
        assert_eq!(account.used(), B);
    }

    #[test]
    fn a_block_of_which_nothing_was_written_does_not_count() {
        let (account, stored, file) = setup(10);
        for (start, written_to, blocks) in [(10, 10, 0), (10, 0, 0), (B, B, 0), (10, 11, 1)] {
            let reserved = stored.reserve(&file, start..3 * B).unwrap();
            stored.undo(reserved, written_to);
            assert_eq!(account.used(), blocks * B, "{start}, {written_to}");
        }
    }

    #[test]
    fn what_was_only_allocated_counts_until_it_is_let_go() {
        let (account, stored, file) = setup(10);
        let used = || account.used() / B;
        stored.reserve_all(&file, 0..6 * B).unwrap();
        file.write_all_at(&[1; 5000], B).unwrap();
        assert_eq!(used(), 6);
        stored.let_go(&file).unwrap();
        assert_eq!(used(), 2);
        stored.reserve_all(&file, 0..2 * B).unwrap();
        assert_eq!(used(), 3);
        stored.release_all(&file).unwrap();
        assert_eq!(used(), 0);
    }

    #[test]
    fn what_was_only_allocated_and_looks_like_data_later_is_not_given_back_twice() {
        let (account, _, file) = setup(10);
        file.write_all_at(&[1; 5000], B).unwrap();
        HostFile::allocate(&file, 4 * B, 4 * B).unwrap();
        file.set_len(8 * B).unwrap();
        account.add(3 * B);
        count(&file, &account).unwrap();
        let used = || account.used() / B;
        assert_eq!(used(), 5);
        let read = || file.read_exact_at(&mut [0; 4 * B as usize], 4 * B).unwrap();
        for _ in 0..3 {
            // The host takes pages that were read for data.
            read();
            let stored = StoredBlocks::new(Arc::clone(&account));
            stored.look(&file).unwrap();
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
            stored.let_go(&file).unwrap();
            assert_eq!(used(), 5);
        }
        read();
        let stored = StoredBlocks::new(Arc::clone(&account));
        stored.release_all(&file).unwrap();
        assert_eq!(used(), 3);
    }

    #[test]
    fn what_fails_takes_nothing_from_who_reserved_at_the_same_time() {
        let (account, stored, file) = setup(3);
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    stored.reserve_all(&file, 0..6 * B).unwrap_err();
                }
            });
            let lost = (0..20_000).find(|_| {
                let reserved = stored.reserve(&file, B..2 * B).unwrap();
                std::thread::yield_now();
                let lost = account.used() < B;
                stored.undo(reserved, 0);
                lost
            });
            done.store(true, std::sync::atomic::Ordering::Relaxed);
            assert_eq!(lost, None);
        });
    }

    #[test]
    fn what_was_there_before_is_not_charged_again() {
        let (account, stored, file) = setup(4);
        file.write_all_at(&[1; 5000], 3 * B).unwrap();
        file.set_len(100 * B).unwrap();
        count(&file, &account).unwrap();
        assert_eq!(account.used(), 2 * B);
        stored.reserve(&file, 3 * B..5 * B).unwrap();
        assert_eq!(account.used(), 2 * B);
        stored.look(&file).unwrap();
        stored.truncated(0);
        assert_eq!(account.used(), 0);
    }

    #[test]
    fn without_a_limit_nothing_is_asked_of_the_host() {
        let stored = StoredBlocks::new(Arc::default());
        let file = tempfile::tempfile().unwrap();
        assert_eq!(stored.reserve(&file, 0..1 << 40).unwrap().end, 1 << 40);
        assert!(stored.lock().is_none());
    }
}
