//! Caches of decoded content, with one budget for all files that share them.
//!
//! A stack of a thousand layers is a thousand files; separate budgets would multiply.

use std::sync::atomic::{AtomicU64, Ordering};

use bcow_format::{Entry, SubBlockTable};
use quick_cache::sync::Cache;
use quick_cache::{OptionsBuilder, Weighter};
use serde::{Deserialize, Serialize};

use crate::merged::MergedTable;
use crate::owners::Owners;
use crate::storage::Version;
use crate::sync::Arc;
use crate::verify::Verify;

const DEFAULT_BYTES: u64 = 64 << 20;
/// The budget of decoded sub-block tables is the block budget divided by this, and so is that of
/// the merged tables of chains.
const TABLE_SHARE: u64 = 8;
/// The budget of verified pieces of Merkle trees is the block budget divided by this.
const PIECE_SHARE: u64 = 16;
/// The budget of the owners of blocks in chains is the block budget divided by this. With the
/// default of 64 MiB, they take 8 MiB, for 30 GiB of address space.
const OWNERS_SHARE: u64 = 8;
/// Number of files whose identities a common cache remembers. A forgotten file gets a new one.
const MAX_FILES: usize = 1 << 14;
/// Least budget for these pieces in bytes. Without them each read would hash up to the root.
const LEAST_PIECE_BYTES: u64 = 1 << 20;
/// The part of a cache for entries that were used again after some time. The rest is for new
/// entries. Requests of several threads need a block some requests apart, so new blocks must stay
/// that long; the default of quick_cache, 0.97, leaves room for two of them in each shard.
const HOT_SHARE: f64 = 0.75;

/// A cache with a budget for decoded blocks. Clones share it, and so do all files opened with it;
/// the keys of each file are separate.
///
/// The cache is sharded. No shard lock is held while a block is read or decoded.
#[derive(Clone)]
pub struct BlockCache(Arc<Caches>);

struct Caches {
    bytes: u64,
    asked: AtomicU64,
    missed: AtomicU64,
    blocks: Cache<BlockKey, Arc<Vec<u8>>, BlockWeight>,
    tables: Cache<TableKey, Arc<SubBlockTable>, TableWeight>,
    pieces: Cache<PieceKey, Arc<Vec<u8>>, BlockWeight>,
    owners: Cache<TableKey, Arc<Owners>, OwnersWeight>,
    merged: Cache<TableKey, Arc<MergedTable>, MergedWeight>,
    /// For a common cache: the files that were opened.
    files: Option<Cache<OpenedAs, FileId>>,
}

/// What a sealed file was opened as. Blocks that were only checked by their checksums are not for a
/// file that is verified.
type OpenedAs = (Version, Verify);

/// Counters and state of a [`BlockCache`], for decoded blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheFigures {
    /// The budget in bytes.
    pub limit_bytes: u64,
    /// Bytes in the cache.
    pub held_bytes: u64,
    /// Lookups that found the block.
    pub hits: u64,
    /// Blocks that were read and decoded.
    pub misses: u64,
}

/// Identifies a file in a shared cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct FileId(u64);

impl FileId {
    pub(crate) fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        FileId(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Everything that determines the content of a block. Entries with the same stored range share the
/// decoded block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct BlockKey {
    pub(crate) file: FileId,
    pub(crate) entry: Entry,
    pub(crate) length: u32,
}

/// A region of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct TableKey {
    pub(crate) file: FileId,
    pub(crate) region: u64,
}

/// A chunk-sized piece of the Merkle tree of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PieceKey {
    pub(crate) file: FileId,
    pub(crate) level: usize,
    pub(crate) index: u64,
}

impl BlockCache {
    /// A cache with a budget of `bytes` for decoded blocks. In addition it uses up to an eighth of
    /// that for sub-block tables, a quarter for the maps of chains, and for files that are verified
    /// by a Merkle tree up to a sixteenth (at least 1 MiB).
    pub fn new(bytes: u64) -> Self {
        BlockCache::with_files(bytes, None)
    }

    /// A cache as that of [`BlockCache::new`], in which files that are opened several times are
    /// cached once, as long as they are sealed and do not change.
    pub fn common(bytes: u64) -> Self {
        BlockCache::with_files(bytes, Some(Cache::new(MAX_FILES)))
    }

    fn with_files(bytes: u64, files: Option<Cache<OpenedAs, FileId>>) -> Self {
        BlockCache(Arc::new(Caches {
            files,
            bytes,
            asked: AtomicU64::new(0),
            missed: AtomicU64::new(0),
            blocks: cache(bytes, BlockWeight),
            tables: cache(bytes / TABLE_SHARE, TableWeight),
            pieces: cache((bytes / PIECE_SHARE).max(LEAST_PIECE_BYTES), BlockWeight),
            owners: cache(bytes / OWNERS_SHARE, OwnersWeight),
            merged: cache(bytes / TABLE_SHARE, MergedWeight),
        }))
    }

    /// The identity of a sealed file with this version.
    pub(crate) fn sealed_file(&self, version: Option<Version>, verify: Verify) -> FileId {
        match (&self.0.files, version) {
            (Some(files), Some(version)) => {
                let opened = files.get_or_insert_with(&(version, verify), || {
                    Ok::<_, std::convert::Infallible>(FileId::next())
                });
                opened.unwrap_or_else(|never| match never {})
            }
            _ => FileId::next(),
        }
    }

    pub(crate) fn block<E>(
        &self,
        key: BlockKey,
        read: impl FnOnce() -> Result<Vec<u8>, E>,
    ) -> Result<Arc<Vec<u8>>, E> {
        self.0.asked.fetch_add(1, Ordering::Relaxed);
        self.0.blocks.get_or_insert_with(&key, || {
            self.0.missed.fetch_add(1, Ordering::Relaxed);
            read().map(Arc::new)
        })
    }

    /// Drops everything in the cache. Later reads fill it again.
    pub fn release(&self) {
        self.0.blocks.retain(|_, _| false);
        self.0.tables.retain(|_, _| false);
        self.0.pieces.retain(|_, _| false);
        self.0.owners.retain(|_, _| false);
        self.0.merged.retain(|_, _| false);
    }

    /// Returns the counters and the state.
    pub fn figures(&self) -> CacheFigures {
        // In this order, so that misses never exceed lookups.
        let misses = self.0.missed.load(Ordering::Relaxed);
        CacheFigures {
            limit_bytes: self.0.bytes,
            held_bytes: self.0.blocks.weight(),
            hits: self.0.asked.load(Ordering::Relaxed).saturating_sub(misses),
            misses,
        }
    }

    pub(crate) fn table<E>(
        &self,
        key: TableKey,
        read: impl FnOnce() -> Result<SubBlockTable, E>,
    ) -> Result<Arc<SubBlockTable>, E> {
        self.0
            .tables
            .get_or_insert_with(&key, || read().map(Arc::new))
    }

    pub(crate) fn piece<E>(
        &self,
        key: PieceKey,
        read: impl FnOnce() -> Result<Vec<u8>, E>,
    ) -> Result<Arc<Vec<u8>>, E> {
        self.0
            .pieces
            .get_or_insert_with(&key, || read().map(Arc::new))
    }

    /// The owners of the blocks of a region of a chain; unknown ones if the cache has none.
    pub(crate) fn owners(&self, key: TableKey) -> Arc<Owners> {
        let new = || Ok::<_, std::convert::Infallible>(Arc::new(Owners::new()));
        let owners = self.0.owners.get_or_insert_with(&key, new);
        owners.unwrap_or_else(|never| match never {})
    }

    /// The same, if the cache has them.
    pub(crate) fn known_owners(&self, key: TableKey) -> Option<Arc<Owners>> {
        self.0.owners.peek(&key)
    }

    /// The entries of a region of a chain, if the cache has them.
    pub(crate) fn merged(&self, key: TableKey) -> Option<Arc<MergedTable>> {
        self.0.merged.get(&key)
    }

    /// Replaces the entries of a region of a chain.
    pub(crate) fn set_merged(&self, key: TableKey, table: MergedTable) {
        self.0.merged.insert(key, Arc::new(table));
    }
}

/// 64 MiB, not shared.
impl Default for BlockCache {
    fn default() -> Self {
        BlockCache::new(DEFAULT_BYTES)
    }
}

impl std::fmt::Debug for BlockCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BlockCache")
            .field("bytes", &self.0.bytes)
            .finish_non_exhaustive()
    }
}

#[derive(Clone)]
struct TableWeight;

impl Weighter<TableKey, Arc<SubBlockTable>> for TableWeight {
    fn weight(&self, _: &TableKey, table: &Arc<SubBlockTable>) -> u64 {
        (table.entries.len() * size_of::<Entry>()) as u64 + 64
    }
}

#[derive(Clone)]
struct OwnersWeight;

impl Weighter<TableKey, Arc<Owners>> for OwnersWeight {
    fn weight(&self, _: &TableKey, _: &Arc<Owners>) -> u64 {
        Owners::bytes()
    }
}

#[derive(Clone)]
struct MergedWeight;

impl Weighter<TableKey, Arc<MergedTable>> for MergedWeight {
    fn weight(&self, _: &TableKey, _: &Arc<MergedTable>) -> u64 {
        MergedTable::bytes()
    }
}

#[derive(Clone)]
struct BlockWeight;

impl<K> Weighter<K, Arc<Vec<u8>>> for BlockWeight {
    fn weight(&self, _: &K, block: &Arc<Vec<u8>>) -> u64 {
        block.capacity() as u64 + 64
    }
}

/// A sharded cache of `bytes`. There are few shards, so that a shard can hold several of the
/// largest blocks.
fn cache<K, V, W>(bytes: u64, weighter: W) -> Cache<K, V, W>
where
    K: Eq + std::hash::Hash + Clone,
    V: Clone,
    W: Weighter<K, V> + Clone,
{
    let options = OptionsBuilder::new()
        .estimated_items_capacity((bytes >> 18).max(16) as usize)
        .weight_capacity(bytes.max(1))
        .shards(4)
        .hot_allocation(HOT_SHARE)
        .build();
    match options {
        Ok(options) => {
            Cache::with_options(options, weighter, Default::default(), Default::default())
        }
        // The builder fails only if a field is missing; this constructor is the fallback.
        Err(_) => Cache::with_weighter(16, bytes.max(1), weighter),
    }
}

#[cfg(test)]
mod tests {
    use bcow_format::{Stored, Uba};

    use super::*;

    fn key(file: FileId) -> BlockKey {
        BlockKey {
            file,
            entry: Entry::Raw(Stored {
                at: Uba(4096),
                bytes: 4096,
                crc: 0,
            }),
            length: 4096,
        }
    }

    #[test]
    fn a_sealed_file_has_one_identity_in_a_common_cache() {
        let version = |byte| Some(Version::Checked([byte; 32]));
        let cache = BlockCache::common(1 << 20);
        let first = cache.sealed_file(version(1), Verify::Checksums);
        assert_eq!(first, cache.sealed_file(version(1), Verify::Checksums));
        for other in [
            cache.sealed_file(version(1), Verify::Merkle),
            cache.sealed_file(version(2), Verify::Checksums),
            cache.sealed_file(None, Verify::Checksums),
            BlockCache::new(1 << 20).sealed_file(version(1), Verify::Checksums),
        ] {
            assert_ne!(first, other);
        }
    }

    #[test]
    fn many_files_share_one_budget() {
        let cache = BlockCache::new(1 << 20);
        for _ in 0..1000 {
            let shared = cache.clone();
            let read = || Ok::<_, ()>(vec![1; 1 << 14]);
            shared.block(key(FileId::next()), read).unwrap();
        }
        let held = cache.0.blocks.weight();
        assert!((1 << 19..=1 << 20).contains(&held), "{held}");
    }

    #[test]
    fn blocks_whose_halves_are_read_out_of_order_are_decoded_once() {
        const BYTES: u32 = 1 << 18;
        const AT_A_TIME: u64 = 6;
        let cache = BlockCache::default();
        let file = FileId::next();
        let read = |number: u64| {
            let key = BlockKey {
                entry: Entry::Raw(Stored {
                    at: Uba(number * u64::from(BYTES)),
                    bytes: BYTES,
                    crc: 0,
                }),
                length: BYTES,
                ..key(file)
            };
            let read = || Ok::<_, ()>(vec![0; BYTES as usize]);
            cache.block(key, read).unwrap();
        };
        // More blocks than the cache holds.
        let blocks = 100 * AT_A_TIME;
        for first in (0..blocks).step_by(AT_A_TIME as usize) {
            for request in (first..first + AT_A_TIME).rev() {
                read(request);
                read(request + 1);
            }
        }
        assert_eq!(cache.figures().misses, blocks + 1);
    }

    #[test]
    fn released_cache_is_empty_and_fills_again() {
        let cache = BlockCache::default();
        let key = key(FileId::next());
        let read = || Ok::<_, ()>(vec![7; 4096]);
        for misses in 1..=2 {
            assert_eq!(*cache.block(key, read).unwrap(), [7; 4096]);
            assert_eq!(cache.figures().misses, misses);
            assert!(cache.figures().held_bytes >= 4096);
            cache.release();
            assert_eq!(cache.figures().held_bytes, 0);
        }
    }

    #[test]
    fn what_lies_at_one_place_of_two_files_is_not_mixed_up() {
        let cache = BlockCache::default();
        let (one, two) = (FileId::next(), FileId::next());
        for _ in 0..2 {
            for (file, byte) in [(one, 1), (two, 2)] {
                let block = cache.block(key(file), || Ok::<_, ()>(vec![byte])).unwrap();
                assert_eq!(*block, [byte]);
            }
        }
        let figures = cache.figures();
        assert_eq!((figures.hits, figures.misses), (2, 2));
        assert!((2..1000).contains(&figures.held_bytes), "{figures:?}");
    }
}
