//! Writes a sealed disk from pieces in any order: stored bytes, windows and fragments.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use bcow_format::{
    BackingEntry, BlockShift, Entry, Features, Header, MAX_ADDRESS, MAX_ROOT_ENTRIES, SECTOR_BYTES,
    State, SubBlockTable, Use, encode_root, encode_table, incompatible, read_only_compatible,
};
use sha2::{Digest, Sha256};

use super::encode::Encoder;
use super::pipeline::{Placement, Sink};
use super::windows::{Windows, window_entries};
use super::{Appender, Compression, write_merkle, write_slots};
use crate::Error;
use crate::storage::Storage;

/// Properties of a disk that is composed of pieces.
#[derive(Debug, Clone)]
pub struct Composition {
    /// Size of the address space in bytes, a multiple of 4096.
    pub size: u64,
    /// log2 of the region size, 12 to 30.
    pub region_shift: u8,
    /// log2 of the size of stored blocks, 12 to 24 and at most `region_shift`.
    pub block_shift: u8,
    /// Compression of stored blocks.
    pub compression: Compression,
    /// The backings that windows and fragments show.
    pub backings: Vec<BackingEntry>,
}

/// Writes a sealed disk. What is not written is a hole. A region has one kind of content: stored
/// bytes, or a window, or fragments.
pub struct Composer {
    form: Composition,
    block_shift: BlockShift,
    encoder: Encoder,
    sink: Sink,
    /// The stored blocks, by index, with the SHA-256 of their content.
    blocks: BTreeMap<u64, ([u8; 32], Entry)>,
    /// Blocks of which some bytes are still to come.
    begun: BTreeMap<u64, Begun>,
    /// Equal blocks are stored once.
    known: HashMap<[u8; 32], Entry>,
    windows: BTreeMap<u64, Entry>,
    /// By sector.
    fragments: BTreeMap<u64, Entry>,
}

struct Begun {
    bytes: Vec<u8>,
    missing: usize,
}

/// The content of a region.
#[derive(Default)]
struct Region {
    blocks: Vec<(u64, Entry)>,
    fragments: Vec<(u64, Entry)>,
    window: Option<Entry>,
}

impl Composer {
    /// Begins a file in empty storage. The caller gives the file its name after `finish`.
    pub fn new(storage: Arc<dyn Storage>, form: Composition) -> Result<Self, Error> {
        let unsupported = |problem: String| Err(Error::Unsupported(problem));
        let Some(block_shift) = BlockShift::new(form.block_shift) else {
            return unsupported(format!("blocks of 2^{} bytes", form.block_shift));
        };
        if !(form.block_shift..=30).contains(&form.region_shift)
            || !form.size.is_multiple_of(SECTOR_BYTES)
            || form.size.div_ceil(1 << form.region_shift) > MAX_ROOT_ENTRIES
        {
            return unsupported(format!(
                "a disk of {} bytes in regions of 2^{} bytes",
                form.size, form.region_shift
            ));
        }
        Ok(Composer {
            encoder: Encoder::new(form.compression)?,
            sink: Sink::new(storage, Placement::Packed),
            form,
            block_shift,
            blocks: BTreeMap::new(),
            begun: BTreeMap::new(),
            known: HashMap::new(),
            windows: BTreeMap::new(),
            fragments: BTreeMap::new(),
        })
    }

    /// Stores bytes at `offset` of the address space. Each byte is stored at most once.
    pub fn write_at(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.check_range(offset, bytes.len() as u64)?;
        let (mut at, mut rest) = (offset, bytes);
        while !rest.is_empty() {
            let index = at >> self.block_shift.get();
            let start = index << self.block_shift.get();
            let length = u64::from(self.block_shift.bytes()).min(self.form.size - start) as usize;
            let within = (at - start) as usize;
            let n = rest.len().min(length - within);
            let begun = self.begun.entry(index).or_insert_with(|| Begun {
                bytes: vec![0; length],
                missing: length,
            });
            if self.blocks.contains_key(&index) || begun.missing < n {
                return Err(Error::Unsupported(format!(
                    "bytes {at}+{n} of the address space are written twice"
                )));
            }
            begun.bytes[within..within + n].copy_from_slice(&rest[..n]);
            begun.missing -= n;
            if begun.missing == 0
                && let Some(begun) = self.begun.remove(&index)
            {
                self.store(index, begun.bytes)?;
            }
            at += n as u64;
            rest = &rest[n..];
        }
        Ok(())
    }

    /// Shows `bytes` bytes of a backing from byte `address` on, at `offset`: the start of a region.
    pub fn window(
        &mut self,
        offset: u64,
        backing: u32,
        address: u64,
        bytes: u64,
    ) -> Result<(), Error> {
        self.check_range(offset, bytes)?;
        let region_bytes = 1u64 << self.form.region_shift;
        if !offset.is_multiple_of(region_bytes)
            || !(address | bytes).is_multiple_of(SECTOR_BYTES)
            || bytes == 0
        {
            return Err(Error::Unsupported(format!(
                "a window of {bytes} bytes onto byte {address} at byte {offset}"
            )));
        }
        self.check_shown(backing, address, bytes)?;
        let shift = self.form.region_shift;
        for (region, entry) in
            (offset >> shift..).zip(window_entries(backing, address, bytes, shift))
        {
            if self.windows.insert(region, entry).is_some() {
                return Err(mixed(region));
            }
        }
        Ok(())
    }

    /// Shows 1 to 4096 bytes of a backing from byte `address` on, at `offset`: the start of a
    /// sector. The rest of the sector reads as zeros.
    pub fn fragment(
        &mut self,
        offset: u64,
        backing: u32,
        address: u64,
        bytes: u32,
    ) -> Result<(), Error> {
        self.check_range(offset, SECTOR_BYTES)?;
        if !offset.is_multiple_of(SECTOR_BYTES) || !(1..=SECTOR_BYTES).contains(&u64::from(bytes)) {
            return Err(Error::Unsupported(format!(
                "a fragment of {bytes} bytes at byte {offset}"
            )));
        }
        self.check_shown(backing, address, bytes.into())?;
        let entry = Entry::Fragment {
            address,
            bytes,
            backing,
        };
        match self.fragments.insert(offset / SECTOR_BYTES, entry) {
            None => Ok(()),
            Some(_) => Err(Error::Unsupported(format!(
                "two fragments at byte {offset}"
            ))),
        }
    }

    fn check_range(&self, offset: u64, length: u64) -> Result<(), Error> {
        crate::device::checked_range(offset, length, self.form.size).map(|_| ())
    }

    fn check_shown(&self, backing: u32, address: u64, bytes: u64) -> Result<(), Error> {
        let size = self
            .form
            .backings
            .get(backing as usize)
            .map(|entry| entry.size);
        match (size, address.checked_add(bytes)) {
            (Some(size), Some(end)) if end <= size.min(MAX_ADDRESS) => Ok(()),
            _ => Err(Error::Unsupported(format!(
                "bytes {address}+{bytes} of backing {backing}, which has {} bytes",
                size.unwrap_or(0)
            ))),
        }
    }

    fn store(&mut self, index: u64, bytes: Vec<u8>) -> Result<(), Error> {
        let digest: [u8; 32] = Sha256::digest(&bytes).into();
        let entry = match self.known.get(&digest) {
            Some(&entry) => entry,
            None => {
                let entry = match self.sink.store(0, self.encoder.encode(bytes)?)?.entry {
                    // As a hole, like what is not written.
                    Entry::Zero => Entry::Absent,
                    entry => entry,
                };
                self.known.insert(digest, entry);
                entry
            }
        };
        self.blocks.insert(index, (digest, entry));
        Ok(())
    }

    fn end_blocks(&mut self) -> Result<(), Error> {
        while let Some((index, begun)) = self.begun.pop_first() {
            self.store(index, begun.bytes)?;
        }
        Ok(())
    }

    /// A hash of all content, which must be complete: of the bytes before compression, and of the
    /// places that windows and fragments show. It does not depend on the compressor.
    pub fn content_hash(&mut self) -> Result<[u8; 32], Error> {
        self.end_blocks()?;
        let mut hasher = Sha256::new();
        let numbers = |kind: u64, index: u64, shown: &Entry| {
            let (backing, range) = shown.shown().unwrap_or_default();
            let numbers = [kind, index, backing.into(), range.start, range.end];
            numbers.map(u64::to_le_bytes).concat()
        };
        hasher.update(self.form.size.to_le_bytes());
        for (&index, (digest, entry)) in &self.blocks {
            if *entry != Entry::Absent {
                hasher.update(numbers(0, index << self.block_shift.get(), entry));
                hasher.update(digest);
            }
        }
        for (&region, entry) in &self.windows {
            hasher.update(numbers(1, region << self.form.region_shift, entry));
        }
        for (&sector, entry) in &self.fragments {
            hasher.update(numbers(2, sector * SECTOR_BYTES, entry));
        }
        Ok(hasher.finalize().into())
    }

    /// Writes the tables, `metadata` (spec section 13), the Merkle tree and the header. Nothing is
    /// synced. Returns the header.
    pub fn finish(mut self, metadata: &serde_json::Value) -> Result<Header, Error> {
        self.end_blocks()?;
        self.sink.flush()?;
        let storage = Arc::clone(&self.sink.storage);
        let mut out = Appender {
            storage: &*storage,
            align: 16,
            at: self.sink.end,
        };
        let size = self.form.size;
        let features = self.features();
        let root = self.write_tables(&mut out)?;
        let root = out.section(&encode_root(&root))?;
        let metadata = out.metadata(metadata)?;
        let mut table = Windows::default();
        table
            .backings
            .extend(std::mem::take(&mut self.form.backings));
        let backings = out.section(&table.backing_table(Use::Disk)?)?;
        out.pad()?;
        let mut header = Header {
            features,
            root,
            metadata,
            backings,
            backing_count: table.backing_count(),
            ..Header::new(Use::Disk, State::Sealed, self.form.region_shift, size)
        };
        write_merkle(&mut header, &mut out, 1)?;
        write_slots(&*storage, &mut header)?;
        Ok(header)
    }

    fn features(&self) -> Features {
        let mut entries = self.blocks.values().map(|(_, entry)| entry);
        let has_zstd = entries.any(|entry| matches!(entry, Entry::Zstd(_)));
        let bits = [
            (incompatible::ZSTD, has_zstd),
            (incompatible::WINDOWS, !self.windows.is_empty()),
            (incompatible::FRAGMENTS, !self.fragments.is_empty()),
        ];
        let set = bits.iter().filter(|(_, is_set)| *is_set);
        Features {
            incompatible: set.fold(0, |mask, (bit, _)| mask | bit),
            read_only_compatible: read_only_compatible::MERKLE,
            compatible: 0,
        }
    }

    /// Writes the sub-block tables. Returns the root entries.
    fn write_tables(&mut self, out: &mut Appender<'_>) -> Result<Vec<Entry>, Error> {
        let region_shift = self.form.region_shift;
        let count = self.form.size.div_ceil(1 << region_shift);
        let mut root = vec![Entry::Absent; count as usize];
        for (number, region) in self.regions() {
            let length = (self.form.size - (number << region_shift)).min(1 << region_shift);
            root[number as usize] = match region {
                Region {
                    window: Some(window),
                    blocks,
                    fragments,
                } if blocks.is_empty() && fragments.is_empty() => window,
                Region {
                    window: None,
                    blocks,
                    fragments,
                } if blocks.is_empty() => {
                    write_table(number, length, BlockShift::MIN, &fragments, out)?
                }
                Region {
                    window: None,
                    blocks,
                    fragments,
                } if fragments.is_empty() => {
                    write_table(number, length, self.block_shift, &blocks, out)?
                }
                _ => return Err(mixed(number)),
            };
        }
        Ok(root)
    }

    /// The regions with content. Blocks and fragments have their index in the region.
    fn regions(&mut self) -> BTreeMap<u64, Region> {
        let mut regions: BTreeMap<u64, Region> = BTreeMap::new();
        let per_region = self.form.region_shift - self.block_shift.get();
        for (index, (_, entry)) in std::mem::take(&mut self.blocks) {
            if entry != Entry::Absent {
                let region = regions.entry(index >> per_region).or_default();
                region.blocks.push((index & ((1 << per_region) - 1), entry));
            }
        }
        let per_region = self.form.region_shift - BlockShift::MIN.get();
        for (index, entry) in std::mem::take(&mut self.fragments) {
            let region = regions.entry(index >> per_region).or_default();
            let place = (index & ((1 << per_region) - 1), entry);
            region.fragments.push(place);
        }
        for (number, entry) in std::mem::take(&mut self.windows) {
            regions.entry(number).or_default().window = Some(entry);
        }
        regions
    }
}

fn write_table(
    region: u64,
    length: u64,
    block_shift: BlockShift,
    entries: &[(u64, Entry)],
    out: &mut Appender<'_>,
) -> Result<Entry, Error> {
    let count = length.div_ceil(block_shift.bytes().into()) as usize;
    let mut table = SubBlockTable {
        block_shift,
        entries: vec![Entry::Absent; count].into(),
    };
    for &(index, entry) in entries {
        table.entries[index as usize] = entry;
    }
    let section = out.section(&encode_table(region, &table))?;
    Ok(Entry::Table(section.stored()))
}

fn mixed(region: u64) -> Error {
    Error::Unsupported(format!("region {region} has content of two kinds"))
}
