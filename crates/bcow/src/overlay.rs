//! The mappings of the record log, as an overlay over the tables (spec section 10, "A mapping").
//!
//! The overlay stores pieces, not tables: one mapping of 24 bytes may give a region a table of
//! 262,144 entries (4 KiB blocks in a region of 1 GiB), but adds at most two pieces here.

use std::collections::{BTreeMap, BTreeSet, btree_map};

use bcow_format::{BlockShift, Entry, FormatError, Header, LogMapping, Record, Stored};

use crate::Error;
use crate::piece::Piece;
use crate::root::Root;

/// The regions that the records of a log change, by index.
#[derive(Debug, Default)]
pub(crate) struct Overlay(BTreeMap<u64, LoggedRegion>);

/// One region with the mappings of all records applied.
#[derive(Debug, Clone)]
pub(crate) struct LoggedRegion {
    /// The entry for the bytes that no piece covers: the last mapping of the whole region, or else
    /// the root entry. If it is a table, the entries of that table apply.
    pub(crate) base: Entry,
    /// The pieces, if the region is divided into blocks by a stored table or by a record.
    blocks: Option<Blocks>,
}

/// The pieces of a region that is divided into blocks.
#[derive(Debug, Clone)]
struct Blocks {
    /// The block size of the region.
    shift: BlockShift,
    /// The end and the entry of each piece, by its first byte; both bytes count from the start of
    /// the region. Pieces are disjoint and consist of whole blocks. A stored piece is one block. A
    /// zero or absent piece can have several blocks.
    pieces: BTreeMap<u64, (u64, Entry)>,
}

impl Overlay {
    /// Applies `records` to the entries of `root`. `table_shift` returns the block size of the
    /// stored table of a region. It returns `None` if the table is not readable. Mappings of blocks
    /// of this region are then ignored, until a mapping of the whole region replaces the table.
    pub(crate) fn new(
        records: &[Record],
        header: &Header,
        root: &Root,
        mut table_shift: impl FnMut(u64, &Stored) -> Result<Option<BlockShift>, Error>,
    ) -> Result<Overlay, Error> {
        let mut regions = BTreeMap::new();
        let mut unreadable = BTreeSet::new();
        for record in records {
            for (index, mapping) in record.mappings.iter().enumerate() {
                let region = mapping.at.0 >> header.region_shift;
                let whole = mapping.shift == header.region_shift;
                let logged = match regions.entry(region) {
                    btree_map::Entry::Occupied(known) => known.into_mut(),
                    btree_map::Entry::Vacant(new) => {
                        let base = root[region as usize];
                        let shift = match &base {
                            // A mapping of the whole region replaces the table, so the table is not
                            // read and may be damaged.
                            Entry::Table(stored) if !whole => {
                                if unreadable.contains(&region) {
                                    continue;
                                }
                                let Some(shift) = table_shift(region, stored)? else {
                                    unreadable.insert(region);
                                    continue;
                                };
                                Some(shift)
                            }
                            _ => None,
                        };
                        new.insert(LoggedRegion::new(base, shift))
                    }
                };
                logged
                    .apply(mapping, header)
                    .map_err(|problem| FormatError::Record {
                        sequence: record.sequence,
                        problem: format!("mapping {index}: {problem}"),
                    })?;
            }
        }
        Ok(Overlay(regions))
    }

    /// The regions that the log changes, in order.
    pub(crate) fn regions(&self) -> impl Iterator<Item = u64> + '_ {
        self.0.keys().copied()
    }

    /// The stored ranges of all mappings that no later mapping has replaced.
    pub(crate) fn stored(&self) -> impl Iterator<Item = Stored> + '_ {
        self.0.values().flat_map(LoggedRegion::stored)
    }

    /// A region that the log changes.
    pub(crate) fn region(&self, region: u64) -> Option<&LoggedRegion> {
        self.0.get(&region)
    }
}

impl LoggedRegion {
    /// A region before any record, from its root entry. `table_shift` is the block size of the
    /// region's table, if the root entry is a table.
    pub(crate) fn new(base: Entry, table_shift: Option<BlockShift>) -> Self {
        LoggedRegion {
            base,
            blocks: table_shift.map(|shift| Blocks {
                shift,
                pieces: BTreeMap::new(),
            }),
        }
    }

    /// Applies one mapping of this region. On an error the region is unchanged.
    pub(crate) fn apply(&mut self, mapping: &LogMapping, header: &Header) -> Result<(), String> {
        let LogMapping { at, shift, entry } = *mapping;
        if shift == header.region_shift {
            *self = LoggedRegion::new(entry, None);
            return Ok(());
        }
        if self.blocks.is_none() {
            if !matches!(self.base, Entry::Absent | Entry::Zero) {
                return Err(format!(
                    "a mapping of 2^{shift} bytes in a region of one block"
                ));
            }
            let block_shift =
                BlockShift::new(shift).ok_or_else(|| format!("blocks of 2^{shift} bytes"))?;
            self.blocks = Some(Blocks {
                shift: block_shift,
                pieces: BTreeMap::new(),
            });
        }
        let Some(blocks) = &mut self.blocks else {
            return Ok(());
        };
        let may_span_blocks = matches!(entry, Entry::Absent | Entry::Zero);
        if shift != blocks.shift.get() && !(may_span_blocks && shift > blocks.shift.get()) {
            return Err(format!(
                "a mapping of 2^{shift} bytes in a region of blocks of 2^{} bytes",
                blocks.shift.get()
            ));
        }
        let region = at.0 >> header.region_shift;
        let start = at.0 - (region << header.region_shift);
        let end = (start + (1 << shift)).min(header.region_length(region));
        blocks.replace(start, end, entry);
        Ok(())
    }

    /// The block size of the region; `None` if it is one block, or absent or zero as a whole.
    pub(crate) fn block_shift(&self) -> Option<BlockShift> {
        self.blocks.as_ref().map(|blocks| blocks.shift)
    }

    /// The stored ranges of the mappings of this region.
    fn stored(&self) -> impl Iterator<Item = Stored> + '_ {
        let base = match self.base {
            // No record made the table and the blocks that it names. Any other stored base is the
            // mapping of a record.
            Entry::Table(_) => None,
            entry => entry.stored(),
        };
        let pieces = self.blocks.iter().flat_map(|blocks| blocks.pieces.values());
        base.into_iter()
            .chain(pieces.filter_map(|(_, entry)| entry.stored()))
    }

    /// The block that covers byte `offset` of the region, which is `length` bytes long, or the
    /// whole region if it is not divided. The piece counts from the start of the region. `None`:
    /// the entry is in the stored table of the region.
    pub(crate) fn piece(&self, offset: u64, length: u64) -> Option<Piece> {
        let Some(blocks) = &self.blocks else {
            return Some(Piece {
                start: 0,
                length,
                entry: self.base,
            });
        };
        let block = u64::from(blocks.shift.bytes());
        let start = offset / block * block;
        let logged = blocks.pieces.range(..=offset).next_back();
        let entry = match (logged, self.base) {
            (Some((_, &(end, entry))), _) if offset < end => entry,
            (_, Entry::Table(_)) => return None,
            (_, base) => base,
        };
        Some(Piece {
            start,
            length: block.min(length - start),
            entry,
        })
    }
}

impl Blocks {
    /// Sets the entry of the bytes `start..end`. Of earlier pieces, only the parts outside remain.
    fn replace(&mut self, start: u64, end: u64, entry: Entry) {
        if let Some((&first, &(last, before))) = self.pieces.range(..start).next_back()
            && last > start
        {
            self.pieces.insert(first, (start, before));
            if last > end {
                self.pieces.insert(end, (last, before));
            }
        }
        while let Some((&first, &(last, covered))) = self.pieces.range(start..end).next() {
            self.pieces.remove(&first);
            if last > end {
                self.pieces.insert(end, (last, covered));
            }
        }
        self.pieces.insert(start, (end, entry));
    }
}

#[cfg(test)]
mod tests {
    use bcow_format::{Features, Lba, State, Uba, Use, incompatible};

    use super::*;

    fn header() -> Header {
        Header {
            features: Features {
                incompatible: incompatible::RECORDS,
                ..Features::default()
            },
            file_bytes: 1 << 20,
            log: (4096, 4096),
            ..Header::new(Use::Disk, State::Writable, 16, (1 << 17) + (1 << 13))
        }
    }

    fn stored(at: u64) -> Entry {
        Entry::Raw(Stored {
            at: Uba(at),
            bytes: 4096,
            crc: 0,
        })
    }

    fn mapping(at: u64, shift: u8, entry: Entry) -> LogMapping {
        LogMapping {
            at: Lba(at),
            shift,
            entry,
        }
    }

    /// The entry of each block of 4 KiB of the region.
    fn entries(region: &LoggedRegion) -> Vec<Option<Entry>> {
        (0..16)
            .map(|block| Some(region.piece(block << 12, 1 << 16)?.entry))
            .collect()
    }

    #[test]
    fn later_mappings_replace_parts_of_earlier_ones() {
        let mut region = LoggedRegion::new(Entry::Absent, None);
        let mut expected = vec![Some(Entry::Absent); 16];
        let steps = [
            (3, 12, stored(8192)),
            (0, 15, Entry::Zero),
            (4, 14, Entry::Absent),
            (5, 12, stored(12288)),
            (8, 15, Entry::Zero),
            (6, 13, Entry::Zero),
            (4, 13, Entry::Zero),
            (15, 12, stored(16384)),
            (12, 14, Entry::Absent),
        ];
        for (block, shift, entry) in steps {
            region
                .apply(&mapping(block << 12, shift, entry), &header())
                .unwrap();
            let blocks = 1 << (shift - 12);
            expected[block as usize..block as usize + blocks].fill(Some(entry));
            assert_eq!(entries(&region), expected);
        }
        region
            .apply(&mapping(0, 16, Entry::Zero), &header())
            .unwrap();
        assert_eq!(entries(&region), vec![Some(Entry::Zero); 16]);
        assert_eq!(region.piece(4096, 1 << 16).unwrap().length, 1 << 16);
    }

    #[test]
    fn a_mapping_must_fit_the_block_size() {
        let table = Entry::Table(Stored {
            at: Uba(4096),
            bytes: 16 + 8 * 16,
            crc: 0,
        });
        let mut region = LoggedRegion::new(table, BlockShift::new(13));
        let header = header();
        assert!(
            region
                .apply(&mapping(0, 12, stored(8192)), &header)
                .is_err()
        );
        assert!(region.apply(&mapping(0, 12, Entry::Zero), &header).is_err());
        assert!(
            region
                .apply(&mapping(0, 14, stored(8192)), &header)
                .is_err()
        );
        region
            .apply(&mapping(1 << 14, 14, Entry::Zero), &header)
            .unwrap();
        assert_eq!(region.piece(0, 1 << 16), None);
        let block = Piece {
            start: 3 << 13,
            length: 1 << 13,
            entry: Entry::Zero,
        };
        assert_eq!(region.piece((3 << 13) + 5, 1 << 16), Some(block));
        let mut region = LoggedRegion::new(stored(8192), None);
        assert!(region.apply(&mapping(0, 12, Entry::Zero), &header).is_err());
    }

    #[test]
    fn the_last_region_ends_with_the_address_space() {
        let mut region = LoggedRegion::new(Entry::Absent, None);
        region
            .apply(&mapping(1 << 17, 14, Entry::Zero), &header())
            .unwrap();
        let whole = Piece {
            start: 0,
            length: 1 << 13,
            entry: Entry::Zero,
        };
        assert_eq!(region.piece(4096, 1 << 13), Some(whole));
    }
}
