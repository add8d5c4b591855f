//! A storage that computes what a power cut may leave.
//!
//! A disk may keep any part of the operations since the last sync, in any order, torn between
//! sectors of 512 bytes. It keeps all operations before that.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

use bcow::{MemoryStorage, Storage};

use crate::Random;

/// Size in bytes of a sector, which a disk writes atomically.
const SECTOR: u64 = 512;

/// A storage in memory that records every operation in the order of the calls.
#[derive(Default)]
pub struct PowerCut {
    content: MemoryStorage,
    operations: Mutex<Vec<Operation>>,
    /// Number of changes that still succeed; `None` for all.
    left: Mutex<Option<u64>>,
    prefers_written_space: AtomicBool,
}

/// A recorded operation.
#[derive(Debug, Clone)]
enum Operation {
    Write(u64, Vec<u8>),
    SetLen(u64),
    Punch(u64, u64),
    /// The start of a sync. Operations recorded later need not be durable when the sync returns.
    Sync,
}

/// The fate of one operation in a power cut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fate {
    /// Nothing of it is kept.
    Lost,
    Kept,
    /// For each sector of a write, whether it is kept.
    Torn(Vec<bool>),
}

/// The operations between two syncs; a power cut may keep any part of them.
#[derive(Debug, Clone)]
pub struct Window {
    /// Indices in the list of all operations.
    pub operations: Range<usize>,
}

impl PowerCut {
    /// Storage with this durable content.
    pub fn new(content: Vec<u8>) -> Self {
        let cut = PowerCut::default();
        cut.record(Operation::Write(0, content.clone()));
        cut.record(Operation::Sync);
        PowerCut {
            content: MemoryStorage::new(content),
            ..cut
        }
    }

    /// Lets this many changes succeed and no more, as if the process were killed then; `None` for
    /// all.
    pub fn stop_after(&self, changes: Option<u64>) {
        *lock(&self.left) = changes;
    }

    /// Lets a disk on this storage initialise space ahead.
    pub fn prefer_written_space(&self) {
        self.prefers_written_space.store(true, Ordering::Relaxed);
    }

    fn pass(&self) -> io::Result<()> {
        match &mut *lock(&self.left) {
            None => Ok(()),
            Some(0) => Err(io::ErrorKind::Interrupted.into()),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
        }
    }

    /// Number of operations so far.
    pub fn operations(&self) -> usize {
        self.log().len()
    }

    /// The windows between syncs; the last one is open. A power cut at any moment leaves a state
    /// that one at the end of a window may leave too.
    pub fn windows(&self) -> Vec<Window> {
        let log = self.log();
        let mut windows = Vec::new();
        let mut start = 0;
        for (index, operation) in log.iter().enumerate() {
            if matches!(operation, Operation::Sync) {
                windows.push(Window {
                    operations: start..index,
                });
                start = index + 1;
            }
        }
        windows.push(Window {
            operations: start..log.len(),
        });
        windows
    }

    /// Calls `f` with each window and the durable content at its start.
    pub fn walk(&self, mut f: impl FnMut(&Window, &[u8])) {
        let mut content = Vec::new();
        let mut applied = 0;
        for window in self.windows() {
            for operation in &self.log()[applied..window.operations.start] {
                apply(&mut content, operation);
            }
            applied = window.operations.start;
            f(&window, &content);
        }
    }

    /// The content after a power cut in this window, which started with the content `durable`.
    pub fn after(&self, durable: &[u8], window: &Window, fates: &[Fate]) -> Vec<u8> {
        let log = self.log();
        let mut content = durable.to_vec();
        for (operation, fate) in log[window.operations.clone()].iter().zip(fates) {
            match (fate, operation) {
                (Fate::Lost, _) => {}
                (Fate::Torn(kept), Operation::Write(offset, bytes)) => {
                    for (piece, kept) in sectors(*offset, bytes.len() as u64).zip(kept) {
                        let from = (piece.start - offset) as usize..(piece.end - offset) as usize;
                        if *kept {
                            write(&mut content, piece.start, &bytes[from]);
                        }
                    }
                }
                (_, operation) => apply(&mut content, operation),
            }
        }
        content
    }

    /// Fates of the operations of a window: every subset if there are at most `exhaustive`
    /// operations, else the most critical subsets; and `samples` random ones with torn writes.
    pub fn fates(
        &self,
        window: &Window,
        exhaustive: usize,
        samples: usize,
        random: &mut Random,
    ) -> Vec<Vec<Fate>> {
        let log = self.log();
        let operations = &log[window.operations.clone()];
        let count = operations.len();
        let of = |kept: &dyn Fn(usize) -> bool| -> Vec<Fate> {
            (0..count)
                .map(|index| if kept(index) { Fate::Kept } else { Fate::Lost })
                .collect()
        };
        let mut fates = Vec::new();
        if count <= exhaustive {
            for mask in 0..1u64 << count {
                fates.push(of(&|index| mask >> index & 1 == 1));
            }
        } else {
            fates.push(of(&|_| false));
            fates.push(of(&|_| true));
            // The last operations of a window are those that name the others.
            for index in 0..count {
                if index < 16 || index + 16 >= count || random.one_in(count as u64 / 16) {
                    fates.push(of(&|other| other != index));
                    fates.push(of(&|other| other == index));
                    fates.push(of(&|other| other < index));
                }
            }
        }
        if count == 0 {
            return fates;
        }
        for _ in 0..samples {
            let (lost_in, torn_in) = *random.pick(&[(2, 4), (8, 2), (8, 8), (2, 1), (30, 30)]);
            let fate = operations.iter().map(|operation| {
                if random.one_in(lost_in) {
                    return Fate::Lost;
                }
                match operation {
                    Operation::Write(offset, bytes) if random.one_in(torn_in) => {
                        tear(*offset, bytes.len() as u64, random)
                    }
                    _ => Fate::Kept,
                }
            });
            fates.push(fate.collect());
        }
        fates
    }

    /// Lists the operations of a window for a failure message.
    pub fn describe(&self, window: &Window) -> String {
        let log = self.log();
        let lines = log[window.operations.clone()].iter().enumerate();
        lines
            .map(|(index, operation)| match operation {
                Operation::Write(at, bytes) => format!("{index}: write {at}+{}\n", bytes.len()),
                other => format!("{index}: {other:?}\n"),
            })
            .collect()
    }

    fn record(&self, operation: Operation) {
        self.log().push(operation);
    }

    fn log(&self) -> MutexGuard<'_, Vec<Operation>> {
        lock(&self.operations)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn tear(offset: u64, length: u64, random: &mut Random) -> Fate {
    let count = sectors(offset, length).count() as u64;
    let kept: Vec<bool> = match random.below(3) {
        0 => {
            let end = random.below(count + 1);
            (0..count).map(|sector| sector < end).collect()
        }
        1 => {
            let start = random.below(count + 1);
            (0..count).map(|sector| sector >= start).collect()
        }
        _ => (0..count).map(|_| random.one_in(2)).collect(),
    };
    Fate::Torn(kept)
}

/// Splits a range at sector boundaries.
fn sectors(offset: u64, length: u64) -> impl Iterator<Item = Range<u64>> {
    let end = offset + length;
    (offset / SECTOR..end.div_ceil(SECTOR))
        .map(move |sector| (sector * SECTOR).max(offset)..((sector + 1) * SECTOR).min(end))
}

fn write(content: &mut Vec<u8>, offset: u64, bytes: &[u8]) {
    let (start, end) = (offset as usize, offset as usize + bytes.len());
    if content.len() < end {
        content.resize(end, 0);
    }
    content[start..end].copy_from_slice(bytes);
}

fn apply(content: &mut Vec<u8>, operation: &Operation) {
    match operation {
        Operation::Write(offset, bytes) => write(content, *offset, bytes),
        Operation::SetLen(bytes) => content.resize(*bytes as usize, 0),
        Operation::Punch(offset, bytes) => {
            let end = ((offset + bytes) as usize).min(content.len());
            if let Some(range) = content.get_mut(*offset as usize..end) {
                range.fill(0);
            }
        }
        Operation::Sync => {}
    }
}

impl Storage for PowerCut {
    crate::forward!(content: len, read_at);

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.pass()?;
        // Under the lock of the log, so that the log has the order in which the content changed.
        let mut log = self.log();
        log.push(Operation::Write(offset, bytes.to_vec()));
        self.content.write_at(offset, bytes)
    }
    fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.pass()?;
        let mut log = self.log();
        log.push(Operation::SetLen(bytes));
        self.content.set_len(bytes)
    }
    fn sync(&self) -> io::Result<()> {
        self.pass()?;
        self.record(Operation::Sync);
        Ok(())
    }
    fn prefers_written_space(&self) -> bool {
        self.prefers_written_space.load(Ordering::Relaxed)
    }
    fn punch(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.pass()?;
        let mut log = self.log();
        log.push(Operation::Punch(offset, bytes));
        self.content.punch(offset, bytes)
    }
    fn data_from(&self, offset: u64) -> u64 {
        self.content.data_from(offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_synced_stays_and_the_rest_may_go() {
        let disk = PowerCut::new(vec![1; 1024]);
        disk.write_at(0, &[2; 512]).unwrap();
        disk.sync().unwrap();
        disk.write_at(256, &[3; 512]).unwrap();
        disk.set_len(2048).unwrap();
        disk.punch(0, 512).unwrap();
        let mut windows = Vec::new();
        disk.walk(|window, durable| windows.push((window.clone(), durable.to_vec())));
        assert_eq!(windows.len(), 3);
        let (last, durable) = &windows[2];
        let fates = disk.fates(last, 4, 400, &mut Random::new(1));
        assert_eq!(fates.len(), 8 + 400);
        let mut images: Vec<_> = fates
            .iter()
            .map(|fates| disk.after(durable, last, fates))
            .map(|image| {
                (
                    image.len(),
                    [0, 255, 256, 511, 512, 767, 768].map(|at| image[at]),
                )
            })
            .collect();
        images.sort();
        images.dedup();
        for (length, bytes) in &images {
            assert!([1024, 2048].contains(length));
            assert!([[2; 2], [0; 2]].contains(&[bytes[0], bytes[1]]));
            assert!([[2, 2], [3, 3], [0, 0]].contains(&[bytes[2], bytes[3]]));
            assert!([[1, 1], [3, 3]].contains(&[bytes[4], bytes[5]]));
            assert_eq!(bytes[6], 1);
        }
        // Torn in the middle of the write, with and without the other two operations.
        assert!(images.contains(&(1024, [2, 2, 3, 3, 1, 1, 1])));
        assert!(images.contains(&(2048, [0, 0, 0, 0, 3, 3, 1])));
        assert!(images.contains(&(1024, [2, 2, 2, 2, 1, 1, 1])));
        let (first, before) = &windows[1];
        assert_eq!(disk.after(before, first, &[Fate::Lost]), vec![1; 1024]);
    }

    #[test]
    fn a_sync_covers_what_was_issued_before_it() {
        let disk = PowerCut::default();
        disk.write_at(0, &[1]).unwrap();
        disk.sync().unwrap();
        disk.write_at(1, &[1]).unwrap();
        let mut seen = Vec::new();
        disk.walk(|window, durable| {
            for fate in [Fate::Lost, Fate::Kept] {
                seen.push(disk.after(durable, window, &[fate]));
            }
        });
        assert_eq!(seen, [vec![], vec![1], vec![1], vec![1, 1]]);
        assert_eq!(disk.operations(), 3);
    }
}
