//! Replays the record log of a writable file (spec section 10).

use bcow_format::{
    Crc32c, Entry, FormatError, Header, RECORD_ALIGN_BYTES, RECORD_HEADER_BYTES, Record,
    RecordPrefix, Stored, crc32c_matches,
};

use crate::Error;
use crate::storage::Storage;

/// Size in bytes of a read of the log; a longer record is read as a whole.
const READ_BYTES: u64 = 1 << 18;

/// The content of a log. Its memory is bounded by a multiple of the size of the log.
#[derive(Debug, Clone, Default)]
pub(crate) struct Replayed {
    /// The valid records, in order.
    pub(crate) records: Vec<Record>,
    /// Sequence number of the next record.
    pub(crate) next_sequence: u64,
    /// Offset in the log of the next record, in bytes.
    pub(crate) tail: u64,
    /// Length of the file with everything that the header and the records name.
    pub(crate) file_bytes: u64,
    /// Whether the last record was dropped: it is written completely, but one of its blocks is
    /// missing or does not match its checksum.
    pub(crate) dropped: bool,
}

impl Replayed {
    /// Sequence number of the last valid record; 0 if the log is empty.
    pub(crate) fn last_sequence(&self) -> u64 {
        self.next_sequence - 1
    }
}

/// Reads the log that `header` names. Checks the records completely, except whether their mappings
/// fit the tables.
pub(crate) fn replay(storage: &dyn Storage, header: &Header) -> Result<Replayed, Error> {
    let length = storage.length()?;
    let mut replayed = Replayed {
        next_sequence: 1,
        file_bytes: header.file_bytes,
        ..Replayed::default()
    };
    let mut log = Log {
        storage,
        start: header.log.0,
        bytes: header.log.1,
        buffer: Vec::new(),
        at: 0,
    };
    let mut last_start = 0;
    while let Some(record) = next_record(&mut log, header, &replayed)? {
        last_start = replayed.tail;
        replayed.tail += bcow_format::record_bytes(record.mappings.len()) as u64;
        replayed.next_sequence += 1;
        replayed.file_bytes = record.file_bytes;
        replayed.records.push(record);
    }
    check_end(&mut log, header, &replayed)?;
    if let Some(last) = replayed.records.last()
        && !is_complete(storage, last, length)?
    {
        replayed.records.pop();
        replayed.next_sequence -= 1;
        replayed.tail = last_start;
        replayed.dropped = true;
        replayed.file_bytes = replayed
            .records
            .last()
            .map_or(header.file_bytes, |record| record.file_bytes);
    }
    check_length(&replayed.records, length)?;
    Ok(replayed)
}

/// The bytes of the log, through a buffer.
struct Log<'a> {
    storage: &'a dyn Storage,
    start: u64,
    bytes: u64,
    buffer: Vec<u8>,
    /// Offset in the log of the first byte of the buffer.
    at: u64,
}

impl Log<'_> {
    /// Whether `bytes` bytes from `at` on are in the buffer.
    fn holds(&self, at: u64, bytes: u64) -> bool {
        at >= self.at && at + bytes <= self.at + self.buffer.len() as u64
    }

    /// The first place of a record from `at` on that is not in a hole of the file, or the end of
    /// the log.
    fn data_from(&self, at: u64) -> u64 {
        let found = self.storage.data_from(self.start + at);
        let skipped = found.saturating_sub(self.start + at).min(self.bytes - at);
        // A record that begins in the hole would begin with zeros.
        at + skipped - skipped % RECORD_ALIGN_BYTES as u64
    }

    /// Returns `bytes` bytes of the log from `at` on; the range lies inside the log.
    fn get(&mut self, at: u64, bytes: u64) -> Result<&[u8], Error> {
        if !self.holds(at, bytes) {
            let take = bytes.max(READ_BYTES).min(self.bytes - at);
            self.buffer.resize(take as usize, 0);
            self.at = at;
            let place = self.start + at;
            self.storage
                .read_at(place, &mut self.buffer)
                .map_err(|source| Error::io("read the record log", place, source))?;
        }
        let skip = (at - self.at) as usize;
        Ok(&self.buffer[skip..skip + bytes as usize])
    }
}

/// The next record; `None` at the end of the log.
fn next_record(
    log: &mut Log<'_>,
    header: &Header,
    before: &Replayed,
) -> Result<Option<Record>, Error> {
    let (at, left) = (before.tail, log.bytes - before.tail);
    if left < RECORD_HEADER_BYTES as u64 {
        return Ok(None);
    }
    let prefix = log.get(at, RECORD_HEADER_BYTES as u64)?;
    let Some(prefix) = RecordPrefix::read(prefix, header.generation) else {
        return Ok(None);
    };
    if prefix.sequence != before.next_sequence
        || !(RECORD_HEADER_BYTES as u64..=left).contains(&prefix.bytes.into())
        || !prefix.bytes.is_multiple_of(RECORD_ALIGN_BYTES as u32)
    {
        return Ok(None);
    }
    let bytes = log.get(at, prefix.bytes.into())?;
    Ok(Record::decode(bytes, header, before.file_bytes)?)
}

/// Fails if the header of a later record lies behind the end of the log. A writer writes a record
/// only when the record before it is durable. So the record at the end was durable, and is damaged:
/// no crash leaves such a file.
///
/// The header is enough, as the rest of the later record may be damaged or incomplete. The log
/// never held blocks, and a record of an earlier header has another generation.
fn check_end(log: &mut Log<'_>, header: &Header, end: &Replayed) -> Result<(), Error> {
    let mut at = end.tail + RECORD_ALIGN_BYTES as u64;
    while at + RECORD_HEADER_BYTES as u64 <= log.bytes {
        if !log.holds(at, RECORD_HEADER_BYTES as u64) {
            // Most of the log of a new disk was never written.
            at = log.data_from(at);
            if at + RECORD_HEADER_BYTES as u64 > log.bytes {
                break;
            }
        }
        let bytes = log.get(at, RECORD_HEADER_BYTES as u64)?;
        if let Some(later) = RecordPrefix::read(bytes, header.generation)
            && later.sequence > end.next_sequence
        {
            let problem = format!(
                "it is damaged at byte {} of the file, and record {} follows at byte {}",
                log.start + end.tail,
                later.sequence,
                log.start + at
            );
            let sequence = end.next_sequence;
            return Err(FormatError::Record { sequence, problem }.into());
        }
        at += RECORD_ALIGN_BYTES as u64;
    }
    Ok(())
}

/// Whether the blocks of the last record are present. The record and its blocks become durable
/// together, in any order.
fn is_complete(storage: &dyn Storage, record: &Record, length: u64) -> Result<bool, Error> {
    let mut buffer = vec![0; READ_BYTES as usize];
    for mapping in &record.mappings {
        let (Entry::Raw(stored) | Entry::Zstd(stored)) = mapping.entry else {
            continue;
        };
        if stored.end() > length || !matches_checksum(storage, &stored, &mut buffer)? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn matches_checksum(
    storage: &dyn Storage,
    stored: &Stored,
    buffer: &mut [u8],
) -> Result<bool, Error> {
    let mut at = stored.at.0;
    let mut crc = Crc32c::new();
    while at < stored.end() {
        let n = (stored.end() - at).min(buffer.len() as u64) as usize;
        storage.read(at, &mut buffer[..n])?;
        crc.update(&buffer[..n]);
        at += n as u64;
    }
    Ok(crc32c_matches(stored.crc, crc.finish()))
}

/// Fails if a stored range of a valid record ends beyond the end of the file.
fn check_length(records: &[Record], found: u64) -> Result<(), FormatError> {
    let ends = records
        .iter()
        .flat_map(|record| &record.mappings)
        .filter_map(|mapping| Some(mapping.entry.stored()?.end()));
    match ends.max() {
        Some(expected) if expected > found => Err(FormatError::Truncated { expected, found }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use bcow_format::{
        Features, Lba, LogMapping, State, Uba, Use, crc32c, encode_record, incompatible,
    };

    use super::*;
    use crate::MemoryStorage;

    const LOG: u64 = 4096;
    const BLOCKS: u64 = 8192;

    fn header() -> Header {
        Header {
            generation: 7,
            features: Features {
                incompatible: incompatible::RECORDS,
                ..Features::default()
            },
            file_bytes: BLOCKS,
            log: (LOG, 4096),
            ..Header::new(Use::Disk, State::Writable, 22, 8 << 20)
        }
    }

    fn content(block: u64) -> Vec<u8> {
        vec![block as u8 + 1; 4096]
    }

    /// A record with one mapping: block n of the file becomes block n of the address space.
    fn record(sequence: u64) -> Record {
        let block = sequence - 1;
        let stored = Stored {
            at: Uba(BLOCKS + block * 4096),
            bytes: 4096,
            crc: crc32c(&content(block)),
        };
        Record {
            sequence,
            file_bytes: stored.end(),
            mappings: vec![LogMapping {
                at: Lba(block * 4096),
                shift: 12,
                entry: Entry::Raw(stored),
            }],
        }
    }

    /// A file with `count` records and their blocks.
    fn file(count: u64) -> MemoryStorage {
        let storage = MemoryStorage::default();
        storage.set_len(BLOCKS).unwrap();
        let mut at = LOG;
        for sequence in 1..=count {
            let bytes = encode_record(&record(sequence), &header());
            storage.write_at(at, &bytes).unwrap();
            storage
                .write_at(BLOCKS + (sequence - 1) * 4096, &content(sequence - 1))
                .unwrap();
            at += bytes.len() as u64;
        }
        storage
    }

    const RECORD: u64 = 80;

    fn last(storage: &MemoryStorage) -> (u64, u64, u64) {
        let replayed = replay(storage, &header()).unwrap();
        let expected: Vec<_> = (1..replayed.next_sequence).map(record).collect();
        assert_eq!(replayed.records, expected);
        (replayed.last_sequence(), replayed.tail, replayed.file_bytes)
    }

    #[test]
    fn records_are_found_up_to_the_first_that_is_not_whole() {
        assert_eq!(last(&file(0)), (0, 0, BLOCKS));
        assert_eq!(last(&file(3)), (3, 3 * RECORD, BLOCKS + 3 * 4096));
        for byte in [0, 4, 8, 16, 24, 50, 79] {
            let storage = file(2);
            storage.write_at(LOG + RECORD + byte, &[0xAA]).unwrap();
            assert_eq!(last(&storage), (1, RECORD, BLOCKS + 4096), "{byte}");
        }
    }

    #[test]
    fn a_damaged_record_in_front_of_a_later_one_is_an_error() {
        for (damaged, count) in [(1, 2), (1, 4), (3, 4)] {
            for byte in [0, 4, 8, 16, 24, 50, 79] {
                let storage = file(count);
                let at = LOG + (damaged - 1) * RECORD;
                storage.write_at(at + byte, &[0xAA]).unwrap();
                let error = replay(&storage, &header()).unwrap_err();
                assert_eq!(error.code(), Some("record"), "{byte}");
                let expected = format!(
                    "record {damaged}: it is damaged at byte {at} of the file, and record {} \
                     follows at byte {}",
                    damaged + 1,
                    at + RECORD
                );
                assert_eq!(error.to_string(), expected, "{byte}");
            }
        }
        // The later record is incomplete too, as a power cut leaves it.
        let storage = file(3);
        storage.write_at(LOG + RECORD, &[0xAA]).unwrap();
        storage.write_at(LOG + 2 * RECORD + 60, &[0xAA]).unwrap();
        assert_eq!(
            replay(&storage, &header()).unwrap_err().code(),
            Some("record")
        );
        // The last place of a log in which a record fits, and not the next one.
        for (at, is_found) in [(4096 - 48, true), (4096 - 32, false)] {
            let storage = file(1);
            let bytes = encode_record(&record(9), &header());
            storage.write_at(LOG, &[0xAA]).unwrap();
            let most = (4096 - at) as usize;
            storage
                .write_at(LOG + at, &bytes[..most.min(bytes.len())])
                .unwrap();
            assert_eq!(replay(&storage, &header()).is_err(), is_found);
        }
    }

    #[test]
    fn a_later_record_behind_a_hole_is_found() {
        use std::os::unix::fs::FileExt;

        let header = Header {
            log: (LOG, 8 << 20),
            ..header()
        };
        let bytes = encode_record(&record(9), &header);
        // In front of the first byte of a page, and behind it.
        for at in [1 << 20, (3 << 20) - 16, (8 << 20) - RECORD] {
            let storage = tempfile::tempfile().unwrap();
            FileExt::write_at(&storage, &[0xAA; 16], LOG).unwrap();
            storage.set_len(LOG + (16 << 20)).unwrap();
            assert_eq!(replay(&storage, &header).unwrap().last_sequence(), 0);
            FileExt::write_at(&storage, &bytes, LOG + at).unwrap();
            let error = replay(&storage, &header).unwrap_err().to_string();
            assert!(error.ends_with(&format!("record 9 follows at byte {}", LOG + at)));
        }
    }

    #[test]
    fn records_of_an_earlier_generation_behind_the_end_are_no_damage() {
        let earlier = Header {
            generation: 6,
            ..header()
        };
        let storage = file(1);
        for sequence in 2..=9 {
            let bytes = encode_record(&record(sequence), &earlier);
            storage
                .write_at(LOG + (sequence - 1) * RECORD, &bytes)
                .unwrap();
        }
        assert_eq!(last(&storage).0, 1);
        storage.write_at(LOG, &[0xAA]).unwrap();
        assert_eq!(last(&storage).0, 0);
    }

    #[test]
    fn a_log_that_is_full_ends_there() {
        let fit = 4096 / RECORD;
        assert_eq!(last(&file(fit)).0, fit);
    }

    #[test]
    fn the_last_record_counts_only_with_its_blocks() {
        let storage = file(3);
        storage.write_at(BLOCKS + 2 * 4096 + 9, &[0xAA]).unwrap();
        assert_eq!(last(&storage), (2, 2 * RECORD, BLOCKS + 2 * 4096));
        assert!(replay(&storage, &header()).unwrap().dropped);
        let storage = file(3);
        storage.set_len(BLOCKS + 3 * 4096 - 1).unwrap();
        assert_eq!(last(&storage).0, 2);
        // Replay does not check the blocks of an earlier record; here, those of the second.
        storage.write_at(BLOCKS, &[0xAA]).unwrap();
        assert_eq!(last(&storage).0, 2);
    }

    #[test]
    fn a_file_shorter_than_its_records_was_cut() {
        let storage = file(3);
        let mut empty = record(4);
        empty.file_bytes = record(3).file_bytes;
        empty.mappings.clear();
        let bytes = encode_record(&empty, &header());
        storage.write_at(LOG + 3 * RECORD, &bytes).unwrap();
        storage.set_len(BLOCKS + 2 * 4096).unwrap();
        let error = replay(&storage, &header()).unwrap_err();
        assert_eq!(error.code(), Some("truncated"));
    }

    #[test]
    fn an_intact_record_that_breaks_a_rule_is_an_error() {
        let code = |record: &Record| {
            let storage = file(0);
            let bytes = encode_record(record, &header());
            storage.write_at(LOG, &bytes).unwrap();
            replay(&storage, &header()).unwrap_err().code()
        };
        let mut smaller = record(1);
        smaller.file_bytes = BLOCKS - 1;
        assert_eq!(code(&smaller), Some("record"));
        let mut outside = record(1);
        outside.mappings[0].at = Lba(8 << 20);
        assert_eq!(code(&outside), Some("record"));
        let mut twice = record(1);
        twice.mappings.push(LogMapping {
            at: Lba(4096),
            ..twice.mappings[0]
        });
        assert_eq!(code(&twice), Some("record"));
    }
}
