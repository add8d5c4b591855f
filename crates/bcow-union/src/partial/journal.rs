//! The on-disk format of a partial file's map: a header and records, one sector of 512 bytes each.
//! The layout is in docs/upper.md.
//!
//! A record lists blocks that are present. It is appended only after the data of the blocks is on
//! the disk. So each valid record of an append can be used, even if a crash tore the append. The
//! format assumes that the disk writes a sector of 512 bytes atomically, and that parts of a file
//! that were never written read as zeros. So a sector is a valid record, or all zeros because of a
//! crash, or damaged. Each record also holds the index of the first record of its append. All
//! records before that index were durable when the append began, so zeros before it are damage.

use bcow_format::{Crc32c, crc32c_matches};

use super::error::Damage;
use crate::blocks::{BLOCK_BYTES, BlockSet};
use crate::bytes::u64_at;

/// Bytes of the header and of each record.
pub const SECTOR_BYTES: usize = 512;
const MAGIC: [u8; 8] = *b"bcow map";
const VERSION: u8 = 1;
/// The offset of the checksum in a sector.
const CRC: usize = SECTOR_BYTES - 4;
const RUNS: u8 = 1;
const BITS: u8 = 2;
/// The offset of the runs or bits in a record.
const PAYLOAD: usize = 24;
const RUN_BYTES: usize = 16;
const MAX_RUNS: usize = (CRC - PAYLOAD) / RUN_BYTES;
const MAX_WORDS: usize = (CRC - PAYLOAD) / 8;
/// The number of blocks that a record of bits covers.
const WINDOW: u64 = MAX_WORDS as u64 * 64;

type Sector = [u8; SECTOR_BYTES];

/// The header of a map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The partial file's number.
    pub id: u64,
    /// Blocks of the lower file. A record that names a block beyond them is damaged.
    pub blocks: u64,
    /// The number of records that were durable when the header was written.
    pub confirmed: u64,
}

/// The offset of [`Header::blocks`] in the header.
pub(super) const BLOCKS_AT: usize = 24;

impl Header {
    /// Encodes the header as a sector.
    pub fn encode(&self) -> Sector {
        let mut sector = [0; SECTOR_BYTES];
        sector[..8].copy_from_slice(&MAGIC);
        sector[8] = VERSION;
        sector[9] = BLOCK_BYTES.trailing_zeros() as u8;
        put(&mut sector, 16, self.id);
        put(&mut sector, BLOCKS_AT, self.blocks);
        put(&mut sector, 32, self.confirmed);
        seal(&mut sector, self.id, 0);
        sector
    }

    /// Decodes the header of the map of partial file `id` over a lower file of `blocks` blocks.
    /// Fails if the header is damaged, or belongs to another partial file or lower file.
    pub fn decode(sector: &Sector, id: u64, blocks: u64) -> Result<Header, Damage> {
        if sector[..8] != MAGIC {
            return Err(Damage::Header);
        }
        let header = Header {
            id: u64_at(sector, 16),
            blocks: u64_at(sector, BLOCKS_AT),
            confirmed: u64_at(sector, 32),
        };
        if !is_sealed(sector, header.id, 0) {
            return Err(Damage::Header);
        }
        if sector[8] != VERSION {
            return Err(Damage::Version(sector[8]));
        }
        if u32::from(sector[9]) != BLOCK_BYTES.trailing_zeros() {
            return Err(Damage::BlockShift(sector[9]));
        }
        if header.id != id {
            return Err(Damage::Other {
                expected: id,
                found: header.id,
            });
        }
        if header.blocks != blocks {
            return Err(Damage::Blocks {
                expected: blocks,
                found: header.blocks,
            });
        }
        Ok(header)
    }
}

/// The most bytes that [`encode`] returns for a file of this many blocks.
pub(super) fn most_bytes(blocks: u64) -> u64 {
    // All records but the last begin at least this many blocks apart.
    let apart = WINDOW - 64;
    (blocks / apart + 2) * SECTOR_BYTES as u64
}

/// Encodes `present` as records of runs or of bits, whichever describes more blocks. The caller
/// appends them together. `first` is the index of the first of them (0 for the record after the
/// header).
pub fn encode(present: &BlockSet, header: &Header, first: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut index = first;
    let mut runs = present.runs(0..header.blocks).peekable();
    let mut ahead = std::collections::VecDeque::new();
    loop {
        while ahead.len() <= MAX_RUNS
            && let Some(run) = runs.next()
        {
            ahead.push_back(run);
        }
        let Some(next) = ahead.front() else {
            return bytes;
        };
        let window = next.start / 64 * 64;
        let dense = ahead
            .get(MAX_RUNS)
            .is_some_and(|run| run.start < window.saturating_add(WINDOW));
        let mut sector = [0; SECTOR_BYTES];
        put(&mut sector, 8, first);
        if dense {
            sector[0] = BITS;
            put(&mut sector, 16, window);
            let end = window.saturating_add(WINDOW);
            while let Some(run) = ahead.front_mut().filter(|run| run.start < end) {
                for block in run.start..run.end.min(end) {
                    let bit = (block - window) as usize;
                    sector[PAYLOAD + bit / 8] |= 1 << (bit % 8);
                }
                if run.end > end {
                    run.start = end;
                    break;
                }
                ahead.pop_front();
                ahead.extend(runs.next());
            }
        } else {
            sector[0] = RUNS;
            let count = ahead.len().min(MAX_RUNS);
            put(&mut sector, 16, count as u64);
            for (slot, run) in ahead.drain(..count).enumerate() {
                let at = PAYLOAD + slot * RUN_BYTES;
                put(&mut sector, at, run.start);
                put(&mut sector, at + 8, run.end - run.start);
            }
        }
        seal(&mut sector, header.id, index + 1);
        bytes.extend_from_slice(&sector);
        index += 1;
    }
}

/// The result of a replay of all records.
#[derive(Debug, Default)]
pub struct Replayed {
    pub present: BlockSet,
    /// The number of valid records before the first sector of zeros.
    pub records: u64,
    /// Whether there are sectors or bytes behind the records, left by a crash.
    pub torn: bool,
}

/// Reads records, sector by sector.
#[derive(Debug)]
pub struct Replay {
    header: Header,
    next: u64,
    /// The index of the first sector of zeros.
    gap: Option<u64>,
    /// The number of records that must exist, by the header or by a later record.
    confirmed: u64,
    replayed: Replayed,
}

/// The index of the damaged sector (0 for the header), and its damage.
pub type At = (u64, Damage);

impl Replay {
    /// Starts the replay of the map with this header.
    pub fn new(header: Header) -> Self {
        Replay {
            header,
            next: 0,
            gap: None,
            confirmed: header.confirmed,
            replayed: Replayed::default(),
        }
    }

    /// Replays the next sector.
    pub fn sector(&mut self, sector: &Sector) -> Result<(), At> {
        let index = self.next;
        self.next += 1;
        if sector.iter().all(|byte| *byte == 0) {
            self.gap.get_or_insert(index);
            return Ok(());
        }
        let damaged = |damage| Err((index + 1, damage));
        let begun = u64_at(sector, 8);
        if !is_sealed(sector, self.header.id, index + 1) || begun > index {
            return damaged(Damage::Record);
        }
        self.confirmed = self.confirmed.max(begun);
        if let Err(damage) = take(sector, self.header.blocks, &mut self.replayed.present) {
            return damaged(damage);
        }
        if self.gap.is_none() {
            self.replayed.records = self.next;
        }
        Ok(())
    }

    /// Ends the replay. `bytes_left` says whether the file ends with a part of a sector.
    pub fn finish(self, bytes_left: bool) -> Result<Replayed, At> {
        if let Some(gap) = self.gap.filter(|gap| *gap < self.confirmed) {
            return Err((gap + 1, Damage::Record));
        }
        if self.next < self.confirmed {
            let expected = self.confirmed;
            return Err((self.next + 1, Damage::Cut { expected }));
        }
        Ok(Replayed {
            torn: self.gap.is_some() || bytes_left,
            ..self.replayed
        })
    }
}

/// Adds the blocks of a record to `present`.
fn take(sector: &Sector, blocks: u64, present: &mut BlockSet) -> Result<(), Damage> {
    let what = u64_at(sector, 16);
    match sector[0] {
        RUNS => {
            if what == 0 || what > MAX_RUNS as u64 {
                return Err(Damage::Record);
            }
            for slot in 0..what as usize {
                let at = PAYLOAD + slot * RUN_BYTES;
                let (start, count) = (u64_at(sector, at), u64_at(sector, at + 8));
                let end = start.checked_add(count).filter(|end| *end <= blocks);
                let Some(end) = end.filter(|_| count > 0) else {
                    return Err(Damage::Range);
                };
                present.insert(start..end);
            }
        }
        BITS => {
            if what >= blocks || !what.is_multiple_of(64) {
                return Err(Damage::Range);
            }
            for word in 0..MAX_WORDS {
                let mut bits = u64_at(sector, PAYLOAD + word * 8);
                let first = what.saturating_add(word as u64 * 64);
                while bits != 0 {
                    let start = bits.trailing_zeros();
                    let count = (!(bits >> start)).trailing_zeros();
                    let range = first.saturating_add(start.into());
                    let end = range.saturating_add(count.into());
                    if end > blocks {
                        return Err(Damage::Range);
                    }
                    present.insert(range..end);
                    let upto = start + count;
                    bits = if upto == 64 { 0 } else { bits >> upto << upto };
                }
            }
        }
        _ => return Err(Damage::Record),
    }
    Ok(())
}

fn put(sector: &mut Sector, at: usize, value: u64) {
    sector[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

/// The checksum of a sector. It covers the partial file's number and the sector's index, so that a
/// sector from another map or place is detected.
fn checksum(sector: &Sector, id: u64, index: u64) -> u32 {
    let mut crc = Crc32c::new();
    crc.update(&id.to_le_bytes());
    crc.update(&index.to_le_bytes());
    crc.update(&sector[..CRC]);
    crc.finish()
}

fn seal(sector: &mut Sector, id: u64, index: u64) {
    let crc = checksum(sector, id, index);
    sector[CRC..].copy_from_slice(&crc.to_le_bytes());
}

fn is_sealed(sector: &Sector, id: u64, index: u64) -> bool {
    let mut crc = [0; 4];
    crc.copy_from_slice(&sector[CRC..]);
    crc32c_matches(u32::from_le_bytes(crc), checksum(sector, id, index))
}

#[cfg(test)]
mod tests {
    use super::*;
    use bcow_testkit::Random;

    const BLOCKS: u64 = 100_000;

    fn header() -> Header {
        Header {
            id: 7,
            blocks: BLOCKS,
            confirmed: 0,
        }
    }

    fn replay(header: Header, bytes: &[u8]) -> Result<Replayed, At> {
        let mut replay = Replay::new(header);
        let (sectors, left) = bytes.as_chunks::<SECTOR_BYTES>();
        for sector in sectors {
            replay.sector(sector)?;
        }
        replay.finish(!left.is_empty())
    }

    fn runs(set: &BlockSet) -> Vec<std::ops::Range<u64>> {
        set.runs(0..u64::MAX).collect()
    }

    fn random_set(random: &mut Random) -> BlockSet {
        let mut set = BlockSet::default();
        let dense = random.one_in(2);
        for _ in 0..random.below(400) {
            let start = random.below(if dense { 8000 } else { BLOCKS });
            let most = *random.pick(&[1, 3, 5000]);
            let count = 1 + random.below(most);
            set.insert(start..(start + count).min(BLOCKS));
        }
        set
    }

    #[test]
    fn recorded_blocks_are_replayed() {
        for seed in 0..200 {
            let mut random = Random::new(seed);
            let mut all = BlockSet::default();
            let mut bytes = Vec::new();
            for _ in 0..3 {
                let set = random_set(&mut random);
                let first = (bytes.len() / SECTOR_BYTES) as u64;
                bytes.extend(encode(&set, &header(), first));
                all.extend(&set);
            }
            let replayed = replay(header(), &bytes).unwrap();
            assert_eq!(runs(&replayed.present), runs(&all), "seed {seed}");
            assert_eq!(replayed.records, (bytes.len() / SECTOR_BYTES) as u64);
            assert!(!replayed.torn);
        }
    }

    #[test]
    fn records_take_the_promised_space() {
        for seed in 0..200 {
            let mut random = Random::new(seed);
            let set = random_set(&mut random);
            let bytes = encode(&set, &header(), 0).len() as u64;
            assert!(bytes <= most_bytes(BLOCKS), "seed {seed}: {bytes}");
        }
        let mut set = BlockSet::default();
        for block in (0..BLOCKS).step_by(130) {
            set.insert(block..block + 1);
        }
        let bytes = encode(&set, &header(), 0).len() as u64;
        assert!(bytes <= most_bytes(BLOCKS), "{bytes}");
        assert!(bytes > most_bytes(BLOCKS) / 2, "{bytes}");
    }

    #[test]
    fn many_single_blocks_side_by_side_become_bits() {
        let mut set = BlockSet::default();
        for block in (0..WINDOW).step_by(2) {
            set.insert(block..block + 1);
        }
        assert_eq!(encode(&set, &header(), 0).len(), SECTOR_BYTES);
        let mut far = BlockSet::default();
        for block in (0..MAX_RUNS as u64).map(|at| at * 3000) {
            far.insert(block..block + 1000);
        }
        assert_eq!(encode(&far, &header(), 0).len(), SECTOR_BYTES);
    }

    fn three_appends() -> (Vec<u8>, Vec<usize>) {
        let mut random = Random::new(3);
        let mut bytes = Vec::new();
        let mut ends = vec![0];
        for _ in 0..3 {
            let mut set = random_set(&mut random);
            set.insert(0..1);
            for block in (20_000..40_000).step_by(2) {
                set.insert(block..block + 1);
            }
            let first = (bytes.len() / SECTOR_BYTES) as u64;
            bytes.extend(encode(&set, &header(), first));
            ends.push(bytes.len() / SECTOR_BYTES);
        }
        (bytes, ends)
    }

    #[test]
    fn a_torn_append_is_dropped_and_damage_before_it_is_not() {
        let (bytes, ends) = three_appends();
        let last = ends[2]..ends[3];
        assert!(last.len() > 2);
        for sector in 0..ends[3] {
            let mut zeroed = bytes.clone();
            zeroed[sector * SECTOR_BYTES..][..SECTOR_BYTES].fill(0);
            let result = replay(header(), &zeroed);
            if last.contains(&sector) {
                let replayed = result.unwrap();
                assert!(replayed.torn);
                assert_eq!(replayed.records, sector as u64);
            } else {
                let expected = (sector as u64 + 1, Damage::Record);
                assert_eq!(result.unwrap_err(), expected);
            }
        }
        let cut = &bytes[..bytes.len() - 100];
        assert!(replay(header(), cut).unwrap().torn);
    }

    #[test]
    fn a_changed_byte_is_damage_wherever_it_is() {
        let (bytes, _) = three_appends();
        for at in (0..bytes.len()).step_by(37) {
            let mut changed = bytes.clone();
            changed[at] ^= 0x10;
            let expected = ((at / SECTOR_BYTES) as u64 + 1, Damage::Record);
            assert_eq!(replay(header(), &changed).unwrap_err(), expected);
        }
        let sector = header().encode();
        for at in 0..SECTOR_BYTES {
            let mut changed = sector;
            changed[at] ^= 1;
            assert_eq!(
                Header::decode(&changed, 7, BLOCKS),
                Err(Damage::Header),
                "{at}"
            );
        }
    }

    #[test]
    fn records_are_those_of_their_place_and_map() {
        let (bytes, ends) = three_appends();
        let mut swapped = bytes.clone();
        swapped.rotate_left(SECTOR_BYTES);
        assert!(replay(header(), &swapped).is_err());
        let other = Header { id: 8, ..header() };
        assert!(replay(other, &bytes).is_err());
        let confirmed = Header {
            confirmed: ends[3] as u64,
            ..header()
        };
        replay(confirmed, &bytes).unwrap();
        let cut = &bytes[..bytes.len() - SECTOR_BYTES];
        let expected = (
            ends[3] as u64,
            Damage::Cut {
                expected: ends[3] as u64,
            },
        );
        assert_eq!(replay(confirmed, cut).unwrap_err(), expected);
        assert!(!replay(header(), cut).unwrap().torn);
    }

    #[test]
    fn headers_of_others_are_refused_by_name() {
        let sector = header().encode();
        assert_eq!(Header::decode(&sector, 7, BLOCKS), Ok(header()));
        let other = Damage::Other {
            expected: 9,
            found: 7,
        };
        assert_eq!(Header::decode(&sector, 9, BLOCKS), Err(other));
        let longer = Damage::Blocks {
            expected: BLOCKS + 1,
            found: BLOCKS,
        };
        assert_eq!(Header::decode(&sector, 7, BLOCKS + 1), Err(longer));
        let with = |at: usize, value: u8| {
            let mut changed = sector;
            changed[at] = value;
            seal(&mut changed, 7, 0);
            Header::decode(&changed, 7, BLOCKS)
        };
        assert_eq!(with(8, 2), Err(Damage::Version(2)));
        assert_eq!(with(9, 16), Err(Damage::BlockShift(16)));
    }

    #[test]
    fn records_about_blocks_that_there_are_not_are_refused() {
        let mut far = BlockSet::default();
        far.insert(BLOCKS - 1..BLOCKS + 1);
        let wide = Header {
            blocks: BLOCKS + 1,
            ..header()
        };
        let bytes = encode(&far, &wide, 0);
        assert_eq!(replay(header(), &bytes).unwrap_err(), (1, Damage::Range));
        for block in (BLOCKS - 200..BLOCKS + 1).step_by(2) {
            far.insert(block..block + 1);
        }
        let bytes = encode(&far, &wide, 0);
        assert_eq!(bytes[0], BITS);
        assert_eq!(replay(header(), &bytes).unwrap_err(), (1, Damage::Range));
        replay(wide, &bytes).unwrap();
    }
}
