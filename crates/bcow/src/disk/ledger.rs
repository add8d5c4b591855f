//! The ledger of a disk: the changes that no flush has recorded, for a process that continues to
//! serve the disk after this one was killed.
//!
//! The written bytes are in the file, and so in the host's page cache, which survives the process.
//! Only the entries that name their places are in its memory. The ledger has these entries, in a
//! storage that survives the process too: a memory file that another process has open. It does not
//! survive the machine.
//!
//! A record is appended under the lock of the region that has the block, before the request is
//! answered. So the records of one block are in the order of its changes, and a record that was
//! written in part belongs to a request without an answer. When a flush has succeeded, all records
//! in front of its beginning are dropped.
//!
//! ```text
//! 0    header: magic, version, start of the records, end of the missing records, lost writes
//! 64   records of 40 bytes, each with a checksum; a part that fails it counts as absent
//! ```

use std::io;
use std::ops::Range;

use bcow_format::{crc32c, crc32c_matches};

use crate::sync::Arc;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::{Error, Storage};

const MAGIC: [u8; 8] = *b"bcowdled";
/// The version of the layout. A process refuses other versions.
const VERSION: u64 = 1;
const START_AT: u64 = 16;
const INCOMPLETE_AT: u64 = 24;
const LOST_AT: u64 = 32;
const HEADER_BYTES: u64 = 64;
const RECORD_BYTES: usize = 40;
/// Records that are read at a time.
const AT_ONCE: u64 = 4096;
/// The end of the missing records in a ledger that no process may use any more.
const REFUSED: u64 = u64::MAX;

/// The ledger of a disk; see [`Disk::open_with_ledger`].
///
/// [`Disk::open_with_ledger`]: crate::Disk::open_with_ledger
pub struct Ledger {
    storage: Arc<dyn Storage>,
    /// Where the next record goes.
    tail: AtomicU64,
    /// Where the records begin that count. Only a flush changes it, and one flush runs at a time.
    start: AtomicU64,
    /// Records in front of this place are missing.
    incomplete: AtomicU64,
}

/// A record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LedgerRecord {
    /// First byte of the first block.
    pub(super) at: u64,
    /// log2 of the block size.
    pub(super) shift: u8,
    pub(super) change: Noted,
}

/// The change of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Noted {
    /// Blocks of this length in bytes together have new entries.
    Set(u64, NewEntry),
    /// A range of an incomplete block was written.
    Wrote(Part),
    /// A block is not incomplete any more.
    Completed,
}

/// The new entry of the blocks of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NewEntry {
    Absent,
    Zero,
    /// The blocks are stored one behind the other, from this place on.
    Stored(u64),
    /// One block is stored at this place. Only a part of it was written.
    Incomplete(u64, Part),
}

/// A range of bytes of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) start: u32,
    pub(super) end: u32,
}

impl From<Range<u32>> for Part {
    fn from(range: Range<u32>) -> Self {
        Part {
            start: range.start,
            end: range.end,
        }
    }
}

impl Ledger {
    /// Begins a ledger in an empty storage.
    pub fn create(storage: Arc<dyn Storage>) -> io::Result<Self> {
        let mut header = [0; HEADER_BYTES as usize];
        header[..8].copy_from_slice(&MAGIC);
        header[8..16].copy_from_slice(&VERSION.to_le_bytes());
        header[16..24].copy_from_slice(&HEADER_BYTES.to_le_bytes());
        storage.write_at(0, &header)?;
        Ok(Ledger {
            storage,
            tail: AtomicU64::new(HEADER_BYTES),
            start: AtomicU64::new(HEADER_BYTES),
            incomplete: AtomicU64::new(0),
        })
    }

    /// Opens the ledger of a process that has ended. Fails with [`Error::Inconsistent`] if it is
    /// not a ledger of this version.
    pub fn open(storage: Arc<dyn Storage>) -> Result<Self, Error> {
        let read = |source| Error::io("read the ledger", 0, source);
        let mut header = [0; HEADER_BYTES as usize];
        storage.read_at(0, &mut header).map_err(read)?;
        let version = number(&header, 8);
        if header[..8] != MAGIC || version != VERSION {
            return Err(Error::Inconsistent(format!(
                "the ledger of the disk has version {version}, and this program reads version \
                 {VERSION}"
            )));
        }
        let length = storage.len().map_err(read)?;
        let records = length.saturating_sub(HEADER_BYTES);
        // The last record may have been written in part.
        let tail = HEADER_BYTES + records.next_multiple_of(RECORD_BYTES as u64);
        let start = number(&header, START_AT);
        if start < HEADER_BYTES || start > tail {
            return Err(Error::Inconsistent(format!(
                "the records of the ledger begin at {start} and end at {tail}"
            )));
        }
        Ok(Ledger {
            storage,
            tail: AtomicU64::new(tail),
            start: AtomicU64::new(start),
            incomplete: AtomicU64::new(number(&header, INCOMPLETE_AT)),
        })
    }

    /// Records that the answer to a write or a flush was this error (an errno), after which data
    /// may be lost. Only the first one counts.
    pub fn set_lost(&self, errno: i32) -> io::Result<()> {
        match self.lost()? {
            Some(_) => Ok(()),
            None => self.storage.write_at(LOST_AT, &errno.to_le_bytes()),
        }
    }

    /// The first error after which data may be lost.
    pub fn lost(&self) -> io::Result<Option<i32>> {
        let mut bytes = [0; 4];
        self.storage.read_at(LOST_AT, &mut bytes)?;
        Ok(Some(i32::from_le_bytes(bytes)).filter(|errno| *errno != 0))
    }

    /// Appends records. If that fails, no process can continue after this one, until a flush.
    pub(super) fn append(&self, records: &[LedgerRecord]) -> Result<(), Error> {
        let bytes: Vec<u8> = records.iter().flat_map(LedgerRecord::encode).collect();
        let length = bytes.len() as u64;
        let at = self.tail.fetch_add(length, Ordering::AcqRel);
        match self.storage.write_at(at, &bytes) {
            Ok(()) => Ok(()),
            Err(_) => self.set_incomplete(at + length),
        }
    }

    /// No process can continue after this one any more.
    pub(super) fn refuse(&self) {
        // The disk has failed already, and has an error to report.
        let _ = self.set_incomplete(REFUSED);
    }

    fn set_incomplete(&self, end: u64) -> Result<(), Error> {
        self.incomplete.fetch_max(end, Ordering::AcqRel);
        // The page exists already, so this does not fail for lack of memory.
        let end = self.incomplete.load(Ordering::Acquire).to_le_bytes();
        let written = self.storage.write_at(INCOMPLETE_AT, &end);
        written.map_err(|source| Error::io("write the ledger", INCOMPLETE_AT, source))
    }

    /// The place of the next record.
    pub(super) fn tail(&self) -> u64 {
        self.tail.load(Ordering::Acquire)
    }

    /// Drops the records in front of `start`: a flush has recorded their changes.
    pub(super) fn drop_before(&self, start: u64) {
        let old = self.start.load(Ordering::Relaxed);
        if start <= old {
            return;
        }
        // Older records that stay do no harm: all later ones stay too.
        if self
            .storage
            .write_at(START_AT, &start.to_le_bytes())
            .is_ok()
        {
            self.start.store(start, Ordering::Relaxed);
            let _ = self.storage.punch(old, start - old);
        }
    }

    /// Fails if changes are missing that the ended process has answered.
    pub(super) fn check_complete(&self) -> Result<(), Error> {
        let start = self.start.load(Ordering::Relaxed);
        match self.incomplete.load(Ordering::Acquire) {
            REFUSED => Err(Error::WriteRefused {
                cause: "writing to the file failed earlier, and its state is unknown".into(),
            }),
            end if end > start => Err(Error::Inconsistent(
                "the ledger of the disk lacks changes".into(),
            )),
            _ => Ok(()),
        }
    }

    /// Calls `apply` with each record, in the order of the changes of each block.
    pub(super) fn replay(
        &self,
        mut apply: impl FnMut(LedgerRecord) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let io = |at| move |source| Error::io("read the ledger", at, source);
        let end = self.storage.len().map_err(io(0))?;
        let mut at = self.start.load(Ordering::Relaxed);
        while at < end {
            let mut bytes = vec![0; (end - at).min(AT_ONCE * RECORD_BYTES as u64) as usize];
            self.storage.read_at(at, &mut bytes).map_err(io(at))?;
            for record in bytes
                .chunks_exact(RECORD_BYTES)
                .filter_map(LedgerRecord::decode)
            {
                apply(record)?;
            }
            at += bytes.len() as u64;
        }
        Ok(())
    }
}

impl LedgerRecord {
    /// Adds the blocks of `next`, if they follow the blocks of this record in the address space and
    /// in the file. Returns whether it did.
    pub(super) fn extend(&mut self, next: &LedgerRecord) -> bool {
        let (Noted::Set(length, entry), Noted::Set(more, next_entry)) =
            (&mut self.change, next.change)
        else {
            return false;
        };
        let follows = match (*entry, next_entry) {
            (NewEntry::Stored(place), NewEntry::Stored(next)) => place + *length == next,
            (NewEntry::Absent, NewEntry::Absent) | (NewEntry::Zero, NewEntry::Zero) => true,
            _ => false,
        };
        if !follows || self.at + *length != next.at || self.shift != next.shift {
            return false;
        }
        *length += more;
        true
    }

    fn encode(&self) -> [u8; RECORD_BYTES] {
        let none = Part { start: 0, end: 0 };
        let (kind, length, place, part) = match self.change {
            Noted::Set(length, NewEntry::Absent) => (1, length, 0, none),
            Noted::Set(length, NewEntry::Zero) => (2, length, 0, none),
            Noted::Set(length, NewEntry::Stored(place)) => (3, length, place, none),
            Noted::Set(length, NewEntry::Incomplete(place, part)) => (4, length, place, part),
            Noted::Wrote(part) => (5, 0, 0, part),
            Noted::Completed => (6, 0, 0, none),
        };
        let mut bytes = [0; RECORD_BYTES];
        bytes[4] = kind;
        bytes[5] = self.shift;
        bytes[8..16].copy_from_slice(&self.at.to_le_bytes());
        bytes[16..24].copy_from_slice(&length.to_le_bytes());
        bytes[24..32].copy_from_slice(&place.to_le_bytes());
        bytes[32..36].copy_from_slice(&part.start.to_le_bytes());
        bytes[36..].copy_from_slice(&part.end.to_le_bytes());
        let crc = crc32c(&bytes[4..]);
        bytes[..4].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<LedgerRecord> {
        let expected = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        if !crc32c_matches(expected, crc32c(&bytes[4..])) {
            return None;
        }
        let (length, place) = (number(bytes, 16), number(bytes, 24));
        let ends = number(bytes, 32);
        let part = Part {
            start: ends as u32,
            end: (ends >> 32) as u32,
        };
        let change = match bytes[4] {
            1 => Noted::Set(length, NewEntry::Absent),
            2 => Noted::Set(length, NewEntry::Zero),
            3 => Noted::Set(length, NewEntry::Stored(place)),
            4 => Noted::Set(length, NewEntry::Incomplete(place, part)),
            5 => Noted::Wrote(part),
            6 => Noted::Completed,
            _ => return None,
        };
        Some(LedgerRecord {
            at: number(bytes, 8),
            shift: bytes[5],
            change,
        })
    }
}

fn number(bytes: &[u8], at: u64) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[at as usize..at as usize + 8]);
    u64::from_le_bytes(number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryStorage;

    fn record(at: u64, change: Noted) -> LedgerRecord {
        let shift = 12;
        LedgerRecord { at, shift, change }
    }

    fn set(at: u64, entry: NewEntry) -> LedgerRecord {
        record(at, Noted::Set(4096, entry))
    }

    fn records() -> Vec<LedgerRecord> {
        let range = Part { start: 5, end: 70 };
        vec![
            set(0, NewEntry::Absent),
            set(4096, NewEntry::Zero),
            set(1 << 40, NewEntry::Stored(1 << 47)),
            set(8192, NewEntry::Incomplete(4096, range)),
            record(8192, Noted::Wrote(range)),
            record(8192, Noted::Completed),
        ]
    }

    fn replayed(ledger: &Ledger) -> Vec<LedgerRecord> {
        let mut records = Vec::new();
        let replayed = ledger.replay(|record| {
            records.push(record);
            Ok(())
        });
        replayed.unwrap();
        records
    }

    #[test]
    fn another_process_reads_what_was_not_dropped() {
        let storage = Arc::new(MemoryStorage::default());
        let ledger = Ledger::create(storage.clone()).unwrap();
        ledger.append(&records()[..3]).unwrap();
        let middle = ledger.tail();
        ledger.append(&records()[3..]).unwrap();
        ledger.set_lost(28).unwrap();
        ledger.set_lost(5).unwrap();
        let next = Ledger::open(storage.clone()).unwrap();
        assert_eq!(replayed(&next), records());
        assert_eq!(next.lost().unwrap(), Some(28));
        ledger.drop_before(middle);
        let next = Ledger::open(storage.clone()).unwrap();
        assert_eq!(replayed(&next), records()[3..]);
        // The next process appends to it.
        next.append(&records()[..1]).unwrap();
        assert_eq!(replayed(&Ledger::open(storage).unwrap()).len(), 4);
    }

    #[test]
    fn a_record_that_was_written_in_part_is_absent() {
        let storage = Arc::new(MemoryStorage::default());
        let ledger = Ledger::create(storage.clone()).unwrap();
        ledger.append(&[records()[0], records()[3]]).unwrap();
        storage.set_len(HEADER_BYTES + 60).unwrap();
        let next = Ledger::open(storage.clone()).unwrap();
        assert_eq!(replayed(&next), records()[..1]);
        next.append(&records()[2..3]).unwrap();
        let next = Ledger::open(storage).unwrap();
        assert_eq!(replayed(&next), [records()[0], records()[2]]);
    }

    #[test]
    fn a_ledger_that_lacks_records_is_refused_until_a_flush() {
        let storage = Arc::new(MemoryStorage::default());
        let ledger = Ledger::create(storage.clone()).unwrap();
        ledger.append(&records()).unwrap();
        ledger.set_incomplete(ledger.tail()).unwrap();
        Ledger::open(storage.clone())
            .unwrap()
            .check_complete()
            .unwrap_err();
        ledger.drop_before(ledger.tail());
        Ledger::open(storage.clone())
            .unwrap()
            .check_complete()
            .unwrap();
        ledger.refuse();
        ledger.drop_before(ledger.tail());
        Ledger::open(storage.clone())
            .unwrap()
            .check_complete()
            .unwrap_err();
        storage.write_at(8, &[2]).unwrap();
        let error = Ledger::open(storage).err().unwrap().to_string();
        assert!(error.contains("version 2"), "{error}");
    }

    #[test]
    fn neighbours_share_a_record() {
        let set = |at, place| set(at, NewEntry::Stored(place));
        let mut one = set(0, 8192);
        assert!(one.extend(&set(4096, 12288)));
        assert!(!one.extend(&set(8192, 12288)));
        assert!(!one.extend(&set(12288, 16384)));
        assert!(one.extend(&set(8192, 16384)));
    }
}
