//! Restores a damaged sealed file from other copies of it.

use std::ops::Range;
use std::sync::Arc;

use bcow_format::{HEADER_AREA_BYTES, Header, MerkleShape, choose_header, hex};

use crate::cache::FileId;
use crate::checked::read_header;
use crate::merkle::Verifier;
use crate::storage::Storage;
use crate::{BlockCache, Error, threads};

/// Chunks whose results are in memory at one time: a file can have any number of chunks. At the end
/// of a batch, threads wait for the last one.
const BATCH_CHUNKS: u64 = if cfg!(test) { 4 } else { 1 << 14 };

/// The result of [`restore`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Restored {
    /// The restored ranges, in file order, adjacent ones merged: the header slots, damaged chunks
    /// behind them, and damaged pieces of the tree.
    pub written: Vec<Range<u64>>,
    /// Damaged ranges for which no copy has intact bytes that a tree confirms, in the same form.
    pub unrestored: Vec<Range<u64>>,
    /// Number of bytes that were cut off: those beyond the length that the header states.
    pub cut_off: u64,
}

impl Restored {
    /// Whether the file was changed.
    pub fn is_changed(&self) -> bool {
        !self.written.is_empty() || self.cut_off > 0
    }

    /// The number of bytes that were written.
    pub fn written_bytes(&self) -> u64 {
        self.written
            .iter()
            .map(|range| range.end - range.start)
            .sum()
    }
}

/// A file cannot be restored. Nothing was written, unless the error is [`RestoreError::File`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// The file is writable, or was sealed without a Merkle tree.
    #[error("the file has no Merkle tree, so a copy cannot be compared with it")]
    NoTree,
    /// Both header slots are damaged, and the caller does not know the root hash either.
    #[error("both header slots are damaged, so the original content of the file is unknown")]
    UnknownRoot,
    /// No copy with the Merkle root of the file can be used.
    #[error("no copy has the content of the file (Merkle root {})", hex(root))]
    NoCopy {
        /// The root hash of the file.
        root: [u8; 32],
    },
    /// The file cannot be read or written.
    #[error(transparent)]
    File(#[from] Error),
}

/// A file with the wanted Merkle tree: a copy, or the file itself.
struct TreeCopy<'c> {
    storage: &'c dyn Storage,
    header: Header,
    verifier: Verifier,
}

/// Damaged bytes of the file.
struct Damage {
    range: Range<u64>,
    is_restored: bool,
}

impl Damage {
    fn continues_with(&self, next: &Damage) -> bool {
        self.range.end == next.range.start && self.is_restored == next.is_restored
    }
}

/// Restores the damaged bytes of the sealed file `file` from `copies`. `root` is its Merkle root as
/// recorded elsewhere; it is used only if both header slots of `file` are damaged. A copy with
/// another root is ignored. A copy may be damaged itself: every chunk and every piece of the tree
/// is checked before it is written. Header slots are copied from a copy whose header the tree
/// confirms. The tree confirms the slot that has this header; the other slot is copied unchecked.
///
/// Only damaged chunks, damaged pieces of the tree and damaged header slots are written, in place,
/// and the length of the file is corrected. An interruption leaves the file no worse than before.
pub fn restore(
    file: &dyn Storage,
    root: Option<[u8; 32]>,
    copies: &[Arc<dyn Storage>],
    thread_count: usize,
) -> Result<Restored, RestoreError> {
    let mut area = [0; HEADER_AREA_BYTES];
    let header_is_readable = file.read_at(0, &mut area).is_ok();
    let header = choose_header(&area).ok().filter(|_| header_is_readable);
    let wanted = match (&header, root) {
        (Some(header), _) => header.merkle.as_ref().ok_or(RestoreError::NoTree)?.root,
        (None, Some(root)) => root,
        (None, None) => return Err(RestoreError::UnknownRoot),
    };
    let copies: Vec<TreeCopy<'_>> = copies
        .iter()
        .filter_map(|storage| TreeCopy::of(&**storage, read_header(&**storage).ok()?))
        .filter(|copy| Some(wanted) == copy.header.merkle.as_ref().map(|tree| tree.root))
        .filter(|copy| match &header {
            Some(header) => header.merkle == copy.header.merkle,
            // The position of the tree is taken from the copy, so the tree must confirm it.
            None => copy.header_is_verified(),
        })
        .collect();
    let [first, ..] = &copies[..] else {
        return Err(RestoreError::NoCopy { root: wanted });
    };
    let shape = first.verifier.shape();
    let end = first.header.file_bytes;
    let length = file.length()?;
    if length < end {
        // The bytes that follow are zeros until they are restored.
        file.set_length("extend", end)?;
    }

    let mut restored = Restored::default();
    let verified = copies.iter().find(|copy| copy.header_is_verified());
    // The file's own tree confirms its sound chunks even where the tree of each copy is damaged.
    let is_sound =
        |own: &Header| verified.is_none_or(|copy| copy.header.canonical() == own.canonical());
    let own = header.clone().filter(is_sound);
    let own = own.and_then(|header| TreeCopy::of(file, header));
    let sources: Vec<&TreeCopy<'_>> = own.iter().chain(&copies).collect();
    let mut tree = restore_tree(file, &sources, shape)?;
    tree.reverse();
    let mut found = restore_chunks(file, &sources, shape, thread_count)?;
    found.append(&mut tree);
    // The slots are left as they are if their canonical header is that of the copy. They may then
    // differ in generation, Merkle root and checksum. `repair` rewrites a single damaged slot.
    if let Some(copy) = verified
        && header
            .as_ref()
            .is_none_or(|header| header.canonical() != copy.header.canonical())
    {
        let mut slots = [0; HEADER_AREA_BYTES];
        copy.storage.read(0, &mut slots)?;
        file.write(0, &slots)?;
        restored.written.push(0..HEADER_AREA_BYTES as u64);
    }
    for Damage { range, is_restored } in found {
        let list = if is_restored { &mut restored.written } else { &mut restored.unrestored };
        match list.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => list.push(range),
        }
    }
    if length > end && restored.unrestored.is_empty() {
        file.set_length("truncate", end)?;
        restored.cut_off = length - end;
    }
    file.make_durable()?;
    Ok(restored)
}

impl<'c> TreeCopy<'c> {
    /// Returns `None` if the file with this header has no tree.
    fn of(storage: &'c dyn Storage, header: Header) -> Option<Self> {
        Some(TreeCopy {
            verifier: Verifier::new(&header, FileId::next(), &BlockCache::default())?,
            storage,
            header,
        })
    }

    /// Whether chunk 0, which includes the canonical header, matches the tree. Then the position
    /// and the chunk size of the tree, which the header states, are right too.
    fn header_is_verified(&self) -> bool {
        self.verifier.read_at(self.storage, 0, &mut [0]).is_ok()
    }
}

/// Restores the covered bytes behind the header slots. Returns the damage in file order, adjacent
/// ranges merged. The tree of any source can confirm the bytes of any source.
fn restore_chunks(
    file: &dyn Storage,
    sources: &[&TreeCopy<'_>],
    shape: &MerkleShape,
    thread_count: usize,
) -> Result<Vec<Damage>, Error> {
    let restore_chunk = |index: u64| {
        let start = index * shape.chunk_bytes;
        let end = shape.covered_bytes.min(start + shape.chunk_bytes);
        // `restore` writes the header slots, which the tree does not cover.
        let skip = match index {
            0 => HEADER_AREA_BYTES,
            _ => 0,
        };
        let mut stored = vec![0; (end - start) as usize];
        // An unreadable sector of the host counts as damage: writing often makes it readable.
        let readable = file.read_at(start, &mut stored).is_ok();
        let mut damage = Damage {
            range: start + skip as u64..end,
            is_restored: false,
        };
        // The first source whose tree is intact for this chunk decides whether bytes are correct.
        for with_tree in sources {
            let matches = |chunk| with_tree.verifier.matches(with_tree.storage, index, chunk);
            match matches(stored.clone()) {
                Ok(true) if readable => return Ok(None),
                Ok(_) => {}
                Err(_) => continue,
            }
            for source in sources {
                let mut bytes = vec![0; stored.len()];
                if source.storage.read_at(start, &mut bytes).is_ok()
                    && matches(bytes.clone()).unwrap_or(false)
                {
                    file.write(damage.range.start, &bytes[skip..])?;
                    damage.is_restored = true;
                    break;
                }
            }
            break;
        }
        Ok::<_, Error>(Some(damage))
    };
    let mut found: Vec<Damage> = Vec::new();
    let chunks = shape.chunks();
    for first in (0..chunks).step_by(BATCH_CHUNKS as usize) {
        let count = BATCH_CHUNKS.min(chunks - first);
        let batch = threads::map_indexed(count, thread_count, |n| restore_chunk(first + n))?;
        for damage in batch.into_iter().flatten() {
            match found.last_mut() {
                Some(last) if last.continues_with(&damage) => last.range.end = damage.range.end,
                _ => found.push(damage),
            }
        }
    }
    Ok(found)
}

/// Restores the stored tree, from the root downwards, so that each restored level can confirm the
/// next one. Returns the damage in reverse file order.
fn restore_tree(
    file: &dyn Storage,
    sources: &[&TreeCopy<'_>],
    shape: &MerkleShape,
) -> Result<Vec<Damage>, Error> {
    let mut found = Vec::new();
    for (level, (_, bytes)) in shape.levels.iter().enumerate().rev() {
        for index in (0..bytes.div_ceil(shape.chunk_bytes)).rev() {
            let range = sources[0].verifier.piece_range(level, index);
            let correct = sources
                .iter()
                .find_map(|source| source.verifier.piece(source.storage, level, index).ok());
            let mut stored = vec![0; (range.end - range.start) as usize];
            let readable = file.read_at(range.start, &mut stored).is_ok();
            if let Some(correct) = &correct {
                if readable && **correct == stored {
                    continue;
                }
                file.write(range.start, correct)?;
            }
            found.push(Damage {
                range,
                is_restored: correct.is_some(),
            });
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Compression, ImageWriter, MemoryStorage, WriterOptions};

    #[test]
    fn damage_in_several_batches_is_reported_as_one_range() {
        let storage = Arc::new(MemoryStorage::default());
        let options = WriterOptions {
            compression: Compression::None,
            ..WriterOptions::default()
        };
        let mut writer = ImageWriter::on_storage(storage.clone(), options).unwrap();
        let noise = |i: u64| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8;
        let content: Vec<u8> = (0..1 << 20).map(noise).collect();
        writer.append(&content).unwrap();
        writer.finish(b"", &serde_json::json!({})).unwrap();
        let file = storage.to_vec();
        let mut damaged = file.clone();
        let range = 1 << 17..7 << 17;
        damaged[range.clone()].fill(0xAA);
        let damaged = MemoryStorage::new(damaged);
        let copies = [storage as Arc<dyn Storage>];
        let result = restore(&damaged, None, &copies, 2).unwrap();
        let [written] = &result.written[..] else {
            panic!("{result:?}");
        };
        assert_eq!(*written, range.start as u64..range.end as u64);
        assert!(damaged.to_vec() == file);
    }
}
