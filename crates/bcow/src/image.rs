//! An open BCoW file, for reading.
//!
//! A read finds the entry that covers the address (root table, then a cached sub-block table), and
//! then the block: in the block cache, or in `storage`, with a check of the checksum and a zstd
//! decoder. The only locks are those of the caches; they are sharded, and not held across I/O of
//! another block.

mod below;

use std::any::Any;
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use bcow_format::{
    BackingEntry, BlockShift, Entry, Header, Section, State, Stored, SubBlockTable,
    check_fragments, decode_backings, incompatible,
};
use sha2::{Digest, Sha256};

use crate::cache::{BlockKey, FileId, TableKey};
use crate::checked::{CheckedFile, check_raw, read_block, read_header, read_metadata, read_table};
use crate::device::checked_range;
use crate::log;
use crate::merkle::Verifier;
use crate::overlay::{LoggedRegion, Overlay};
use crate::piece::Piece;
use crate::root::{Root, check_windows};
use crate::storage::Storage;
use crate::verify::Verify;
use crate::{BlockCache, BlockDevice, Error, Extent, Mapping, ShownBy, Status};

pub(crate) use below::Below;

static ZEROS: [u8; 1 << 16] = [0; 1 << 16];

/// Options for opening a file for reading.
#[derive(Debug, Clone, Default)]
pub struct OpenOptions {
    /// Cache for decoded blocks. Files opened with clones of these options share its budget.
    pub cache: BlockCache,
    /// Verification of reads.
    pub verify: Verify,
}

/// Resolves the backings of a file. Only backings that it returns are opened.
pub trait BackingResolver {
    /// Returns the backing. With `None`, only reads that need the backing fail.
    fn resolve(&self, backing: &BackingEntry) -> Result<Option<Arc<dyn BlockDevice>>, Error>;
}

/// Resolves no backing.
pub struct NoBackings;

impl BackingResolver for NoBackings {
    fn resolve(&self, _: &BackingEntry) -> Result<Option<Arc<dyn BlockDevice>>, Error> {
        Ok(None)
    }
}

/// Resolves each backing to the same device; with `None`, to no device.
pub struct OneBacking(pub Option<Arc<dyn BlockDevice>>);

impl BackingResolver for OneBacking {
    fn resolve(&self, _: &BackingEntry) -> Result<Option<Arc<dyn BlockDevice>>, Error> {
        Ok(self.0.clone())
    }
}

/// Resolves each backing to a device of the recorded size whose reads fail, for callers that only
/// change references.
pub struct UnreadBackings;

impl BackingResolver for UnreadBackings {
    fn resolve(&self, backing: &BackingEntry) -> Result<Option<Arc<dyn BlockDevice>>, Error> {
        Ok(Some(Arc::new(Unread(backing.size))))
    }
}

struct Unread(u64);

impl BlockDevice for Unread {
    fn size(&self) -> u64 {
        self.0
    }

    fn read_at(&self, _: u64, _: &mut [u8]) -> Result<(), Error> {
        Err(Error::Unsupported(
            "a backing that was opened for its reference only is read".into(),
        ))
    }
}

/// An open BCoW file.
pub struct Image {
    file: CheckedFile,
    header: Header,
    root: Root,
    /// The mappings of the record log, which take precedence over the tables.
    logged: Overlay,
    last_sequence: u64,
    backings: Vec<(BackingEntry, Option<Arc<dyn BlockDevice>>)>,
    /// Backing 0 of a disk, which its absent blocks show, if it is available.
    below: Option<Arc<Below>>,
    id: FileId,
    cache: BlockCache,
}

impl Image {
    /// Opens a file without backings.
    pub fn open(path: &Path, options: &OpenOptions) -> Result<Arc<Image>, Error> {
        let file = File::open(path).map_err(|source| Error::io("open", 0, source))?;
        Image::open_storage(Arc::new(file), options)
    }

    /// Opens a file without backings, on any storage.
    pub fn open_storage(
        storage: Arc<dyn Storage>,
        options: &OpenOptions,
    ) -> Result<Arc<Image>, Error> {
        Image::open_with_backings(storage, options, &NoBackings)
    }

    /// Opens a file with the backings that `resolver` returns.
    pub fn open_with_backings(
        storage: Arc<dyn Storage>,
        options: &OpenOptions,
        resolver: &dyn BackingResolver,
    ) -> Result<Arc<Image>, Error> {
        let mut image = Image::open_file(storage, options, resolver)?;
        if image.absent_shows_backing()
            && let Some((entry, Some(device))) = image.backings.first()
        {
            let below = Below::new(entry.clone(), Arc::clone(device), &image.cache);
            image.below = Some(below);
        }
        Ok(Arc::new(image))
    }

    /// Opens the file of a disk whose backing is open already, with the same map.
    pub(crate) fn open_over(
        storage: Arc<dyn Storage>,
        options: &OpenOptions,
        below: Option<Arc<Below>>,
    ) -> Result<Arc<Image>, Error> {
        let device = below.as_ref().map(|below| Arc::clone(below.device()));
        let mut image = Image::open_file(storage, options, &OneBacking(device))?;
        image.below = below;
        Ok(Arc::new(image))
    }

    fn open_file(
        storage: Arc<dyn Storage>,
        options: &OpenOptions,
        resolver: &dyn BackingResolver,
    ) -> Result<Image, Error> {
        let header = read_header(&*storage)?;
        // The content of a file that is not sealed may change while it is open.
        let version = match header.state {
            State::Sealed => storage.version(),
            State::Writable => None,
        };
        let id = options.cache.sealed_file(version, options.verify);
        let verifier = match options.verify {
            Verify::Checksums => None,
            Verify::Merkle => {
                Some(Verifier::new(&header, id, &options.cache).ok_or_else(|| {
                    Error::Unsupported("the file has no Merkle tree to verify by".into())
                })?)
            }
        };
        let file = CheckedFile { storage, verifier };
        let root = Root::read(&file, &header)?;
        let entries = decode_backings(&file.read_section(&header.backings)?, &header)?;
        check_windows(&root, &entries)?;
        let mut backings = Vec::with_capacity(entries.len());
        for entry in entries {
            let device = resolver
                .resolve(&entry)
                .map_err(|error| error.in_backing(&entry.name))?;
            if let Some(device) = &device
                && device.size() != entry.size
            {
                return Err(Error::WrongBacking {
                    name: entry.name.to_string(),
                    expected: entry.size,
                    found: device.size(),
                });
            }
            backings.push((entry, device));
        }
        let mut image = Image {
            id,
            cache: options.cache.clone(),
            file,
            header,
            root,
            logged: Overlay::default(),
            last_sequence: 0,
            backings,
            below: None,
        };
        image.replay()?;
        Ok(image)
    }

    fn replay(&mut self) -> Result<(), Error> {
        let replayed = log::replay(&*self.file.storage, &self.header)?;
        self.logged = Overlay::new(
            &replayed.records,
            &self.header,
            &self.root,
            |region, stored| Ok(Some(self.table(region, stored)?.block_shift)),
        )?;
        self.last_sequence = replayed.last_sequence();
        Ok(())
    }

    /// Opens the same file again, verified by its Merkle tree and without content of backings. So
    /// its bytes are authenticated by the identity of the file.
    pub fn verified(&self, cache: &BlockCache) -> Result<Arc<Image>, Error> {
        let options = OpenOptions {
            cache: cache.clone(),
            verify: Verify::Merkle,
        };
        Image::open_with_backings(Arc::clone(&self.file.storage), &options, &UnreadBackings)
    }

    /// Identity of the file, when another file names it as a backing (spec section 8). It changes
    /// with the content.
    pub fn identity_hash(&self) -> [u8; 32] {
        identity(&self.header, self.last_sequence)
    }

    /// The header of the file.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The backings that the file names.
    pub fn backings(&self) -> impl Iterator<Item = &BackingEntry> {
        self.backings.iter().map(|(entry, _)| entry)
    }

    /// The backing of a disk: absent ranges show its content.
    pub fn disk_backing(&self) -> Option<&BackingEntry> {
        self.backings()
            .next()
            .filter(|_| self.absent_shows_backing())
    }

    /// The backing with this index of the backing table, if it is available.
    pub fn backing(&self, index: u32) -> Option<&Arc<dyn BlockDevice>> {
        self.backings.get(index as usize)?.1.as_ref()
    }

    /// What the absent blocks of a disk show, if it is available.
    pub(crate) fn below(&self) -> Option<&Arc<Below>> {
        self.below.as_ref()
    }

    /// The metadata section (spec section 13); an empty object if the file has no such section.
    pub fn metadata(&self) -> Result<serde_json::Value, Error> {
        read_metadata(&self.file, &self.header)
    }

    /// Returns the entry at byte `offset` of the address space, and the range for which it holds.
    pub fn map(&self, offset: u64) -> Result<Extent, Error> {
        checked_range(offset, 1, self.header.size)?;
        Ok(Extent::of(
            &self.piece(offset)?,
            self.absent_shows_backing(),
        ))
    }

    /// All extents, in the order of the address space. The iterator ends after an error.
    pub fn extents(&self) -> impl Iterator<Item = Result<Extent, Error>> + '_ {
        let mut next = 0;
        std::iter::from_fn(move || {
            if next >= self.header.size {
                return None;
            }
            let extent = self.map(next);
            next = match &extent {
                Ok(extent) => extent.offset + extent.length,
                Err(_) => u64::MAX,
            };
            Some(extent)
        })
    }

    fn absent_shows_backing(&self) -> bool {
        self.header.features.has_incompatible(incompatible::BACKING)
    }

    /// The root table, without the mappings of the log.
    pub(crate) fn root(&self) -> &Root {
        &self.root
    }

    /// The bytes of the file.
    pub(crate) fn storage(&self) -> &Arc<dyn Storage> {
        &self.file.storage
    }

    pub(crate) fn file_id(&self) -> FileId {
        self.id
    }

    pub(crate) fn read_section(&self, section: &Section) -> Result<Vec<u8>, Error> {
        self.file.read_section(section)
    }

    /// The regions that the log changes.
    pub(crate) fn logged_regions(&self) -> impl Iterator<Item = u64> + '_ {
        self.logged.regions()
    }

    /// The block size of a region that the log changes; `None` if the region is one block.
    pub(crate) fn logged_block_shift(&self, region: u64) -> Option<BlockShift> {
        self.logged.region(region)?.block_shift()
    }

    /// The blocks that the log maps to places in the file.
    pub(crate) fn logged_blocks(&self) -> impl Iterator<Item = Stored> + '_ {
        self.logged.stored()
    }

    /// The piece that covers `offset`, which lies inside the address space.
    pub(crate) fn piece(&self, offset: u64) -> Result<Piece, Error> {
        self.region(offset).piece(self, offset)
    }

    /// Calls `each` with the pieces of this file that cover a range of the address space, in order.
    /// Looks up the table of a region once.
    fn each_piece(&self, range: Range<u64>, mut each: impl FnMut(&Piece)) -> Result<(), Error> {
        let mut at = range.start;
        while at < range.end {
            let mut region = self.region(at);
            let end = range.end.min(region.start + region.length);
            while at < end {
                let piece = region.piece(self, at)?;
                each(&piece);
                at = piece.start + piece.length;
            }
        }
        Ok(())
    }

    /// See [`Below::smallest_block`].
    fn smallest_block(&self, range: Range<u64>) -> Result<Option<u8>, Error> {
        let mut smallest = None;
        if self.header.state != State::Sealed {
            self.each_piece(range, |piece| {
                let shift = piece.length.ilog2() as u8;
                if piece.entry != Entry::Absent && smallest.is_none_or(|least| shift < least) {
                    smallest = Some(shift);
                }
            })?;
        }
        Ok(smallest)
    }

    fn region(&self, offset: u64) -> ImageRegion<'_> {
        let index = offset >> self.header.region_shift;
        ImageRegion {
            index,
            start: index << self.header.region_shift,
            length: self.header.region_length(index),
            logged: self.logged.region(index),
            root: self.root[index as usize],
            table: None,
        }
    }

    fn table(&self, region: u64, stored: &Stored) -> Result<Arc<SubBlockTable>, Error> {
        let key = TableKey {
            file: self.id,
            region,
        };
        self.cache.table(key, || {
            let table = self.restored(|| read_table(&self.file, &self.header, region, stored))?;
            let features = &self.header.features;
            if features.has_incompatible(incompatible::FRAGMENTS) {
                check_fragments(&table, region, |index| {
                    let backing = self.backings.get(index as usize);
                    backing.map_or(0, |(entry, _)| entry.size)
                })?;
            }
            Ok(table)
        })
    }

    fn block(&self, piece: &Piece, stored: &Stored) -> Result<Arc<Vec<u8>>, Error> {
        let key = BlockKey {
            file: self.id,
            entry: piece.entry,
            length: piece.length as u32,
        };
        self.cache.block(key, || {
            self.restored(|| read_block(&self.file, piece, stored))
        })
    }

    /// Reads a part of the file, and once more if the first read fails and the storage can restore
    /// its content.
    fn restored<T>(&self, mut read: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
        match read() {
            Err(_) if self.file.storage.restore() => read(),
            result => result,
        }
    }

    /// Reads raw blocks from `first` on, as long as they are contiguous in the file and fit into
    /// `buf` as a whole. `at` must be the start of `first`. The bytes go directly into `buf`, past
    /// the block cache, because the page cache of the host has them in the same form. Returns the
    /// number of bytes; 0 if `first` is not such a block. `pieces` finds the blocks behind it.
    fn read_raw(
        &self,
        first: &Piece,
        pieces: &dyn Fn(u64) -> Result<Piece, Error>,
        at: u64,
        buf: &mut [u8],
    ) -> Result<usize, Error> {
        let mut run: Vec<(Piece, Stored)> = Vec::new();
        let (mut bytes, mut piece) = (0, *first);
        loop {
            let end = run.last().map(|(_, stored)| stored.end());
            let follows = |stored: &Stored| end.is_none_or(|end| stored.at.0 == end);
            match piece.entry {
                // The first block of a plain file is not stored as it is: it contains the header
                // slots.
                Entry::Raw(stored)
                    if piece.start == at + bytes
                        && bytes + piece.length <= buf.len() as u64
                        && u64::from(stored.bytes) == piece.length
                        && stored.at.0 != 0
                        && follows(&stored) =>
                {
                    run.push((piece, stored));
                    bytes += piece.length;
                }
                _ => break,
            }
            if bytes == buf.len() as u64 {
                break;
            }
            piece = pieces(at + bytes)?;
        }
        let Some((_, stored)) = run.first() else {
            return Ok(0);
        };
        self.restored(|| {
            self.file.read_at(stored.at.0, &mut buf[..bytes as usize])?;
            let mut rest = &buf[..bytes as usize];
            for (piece, stored) in &run {
                let (block, behind) = rest.split_at(piece.length as usize);
                rest = behind;
                check_raw(piece.start, stored, block)?;
            }
            Ok(bytes as usize)
        })
    }

    /// Reads a range of the address space, whose pieces `pieces` finds.
    fn read_pieces(
        &self,
        offset: u64,
        buf: &mut [u8],
        pieces: &dyn Fn(u64) -> Result<Piece, Error>,
    ) -> Result<(), Error> {
        let end = offset + buf.len() as u64;
        let mut at = offset;
        while at < end {
            let rest = &mut buf[(at - offset) as usize..];
            let piece = pieces(at)?;
            let raw = self.read_raw(&piece, pieces, at, rest)?;
            if raw > 0 {
                at += raw as u64;
                continue;
            }
            let take = (piece.start + piece.length).min(end) - at;
            let part = &mut rest[..take as usize];
            match piece.entry {
                Entry::Absent if self.absent_shows_backing() => {
                    self.shown_by_absent(at)?.read_at(at, part)?;
                }
                Entry::Open(stored) => {
                    self.file.read_at(stored.at.0 + at - piece.start, part)?;
                }
                _ => {
                    let mut done = 0;
                    self.give_piece(&piece, at, take, &mut |bytes| {
                        part[done..done + bytes.len()].copy_from_slice(bytes);
                        done += bytes.len();
                    })?;
                }
            }
            at += take;
        }
        Ok(())
    }

    /// Same as [`Image::read_pieces`], for a sink as that of [`BlockDevice::read_with`].
    fn give_pieces(
        &self,
        range: Range<u64>,
        pieces: &dyn Fn(u64) -> Result<Piece, Error>,
        sink: &mut dyn FnMut(&[u8]),
    ) -> Result<(), Error> {
        let mut at = range.start;
        while at < range.end {
            let piece = pieces(at)?;
            let take = (piece.start + piece.length).min(range.end) - at;
            self.give_piece(&piece, at, take, sink)?;
            at += take;
        }
        Ok(())
    }

    /// Gives `take` bytes of a piece, from byte `at` of the address space on, to `sink`.
    fn give_piece(
        &self,
        piece: &Piece,
        at: u64,
        take: u64,
        sink: &mut dyn FnMut(&[u8]),
    ) -> Result<(), Error> {
        let skip = at - piece.start;
        match piece.entry {
            Entry::Raw(stored) | Entry::Zstd(stored) => {
                let block = self.block(piece, &stored)?;
                sink(&block[skip as usize..(skip + take) as usize]);
            }
            Entry::Open(stored) => self.read_stored(stored.at.0 + skip, take, sink)?,
            Entry::Window { .. } | Entry::Fragment { .. } => {
                let (backing, shown) = piece.entry.shown().unwrap_or_default();
                let from = shown.start + skip;
                let there = shown.end.saturating_sub(from).min(take);
                if there > 0 {
                    self.read_backing(backing, at, from, there, sink)?;
                }
                give_zeros(take - there, sink);
            }
            Entry::Absent if self.absent_shows_backing() => {
                self.shown_by_absent(at)?.read_with(at, take, sink)?;
            }
            Entry::Absent | Entry::Zero | Entry::Table(_) => give_zeros(take, sink),
        }
        Ok(())
    }

    /// The status of a piece from byte `at` of the address space on, of at most `length` bytes.
    fn piece_status(&self, piece: &Piece, at: u64, length: u64) -> Result<Status, Error> {
        let skip = at - piece.start;
        let length = (piece.length - skip).min(length);
        match Extent::of(piece, self.absent_shows_backing()).mapping {
            Mapping::Raw { .. } | Mapping::Compressed { .. } | Mapping::Open { .. } => {
                Ok(Status::data(length))
            }
            Mapping::Zero => Ok(Status::zeros(length)),
            Mapping::Hole => Ok(Status::hole(length)),
            // The block of a fragment counts as data as a whole: callers work with whole sectors.
            Mapping::Backing {
                by: ShownBy::Fragment,
                index,
                offset,
                bytes,
            } => {
                let below = self.backing_status(index, offset, 0, bytes, 1)?;
                Ok(Status {
                    depth: below.depth.max(2),
                    ..Status::data(length)
                })
            }
            Mapping::Backing {
                by: ShownBy::Absent,
                offset,
                ..
            } => match (self.shown_by_absent(offset), self.disk_backing()) {
                (Err(_), Some(entry)) if at >= entry.size => Ok(Status::hole(length)),
                (below, _) => below?.status(at, length),
            },
            Mapping::Backing {
                by: ShownBy::Window,
                index,
                offset,
                bytes,
            } => self.backing_status(index, offset, skip, bytes, length),
        }
    }

    /// Reads bytes of the file past the block cache: a writer may change them in place.
    fn read_stored(&self, at: u64, length: u64, sink: &mut dyn FnMut(&[u8])) -> Result<(), Error> {
        let mut buf = vec![0; length.min(1 << 18) as usize];
        let mut done = 0;
        while done < length {
            let n = (length - done).min(buf.len() as u64) as usize;
            self.file.read_at(at + done, &mut buf[..n])?;
            sink(&buf[..n]);
            done += n as u64;
        }
        Ok(())
    }

    fn read_backing(
        &self,
        index: u32,
        logical: u64,
        offset: u64,
        length: u64,
        sink: &mut dyn FnMut(&[u8]),
    ) -> Result<(), Error> {
        let (entry, device) = &self.backings[index as usize];
        let device = device.as_ref().ok_or_else(|| missing(entry, logical))?;
        let there = entry.size.saturating_sub(offset).min(length);
        if there > 0 {
            device
                .read_with(offset, there, sink)
                .map_err(|error| error.in_backing(&entry.name))?;
        }
        give_zeros(length - there, sink);
        Ok(())
    }

    /// What absent blocks show, for the one at `logical`.
    fn shown_by_absent(&self, logical: u64) -> Result<&Below, Error> {
        match (&self.below, self.backings.first()) {
            (None, Some((entry, _))) => Err(missing(entry, logical)),
            (Some(below), _) => Ok(below),
            (None, None) => Err(Error::Inconsistent("a disk without its backing".into())),
        }
    }

    /// Status of a window that shows `bytes` bytes from `offset` on, followed by zeros; for
    /// `length` bytes from byte `skip` of it on.
    fn backing_status(
        &self,
        index: u32,
        offset: u64,
        skip: u64,
        bytes: u64,
        length: u64,
    ) -> Result<Status, Error> {
        let (entry, device) = &self.backings[index as usize];
        let shown = bytes.min(entry.size.saturating_sub(offset));
        if skip >= shown {
            return Ok(Status::hole(length));
        }
        let length = length.min(shown - skip);
        let device = device.as_ref().ok_or_else(|| missing(entry, offset))?;
        let below = device
            .status(offset + skip, length)
            .map_err(|error| error.in_backing(&entry.name))?;
        Ok(below.one_deeper())
    }
}

impl BlockDevice for Image {
    fn size(&self) -> u64 {
        self.header.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        checked_range(offset, buf.len() as u64, self.header.size)?;
        self.read_pieces(offset, buf, &|at| self.piece(at))
    }

    fn read_with(
        &self,
        offset: u64,
        length: u64,
        sink: &mut dyn FnMut(&[u8]),
    ) -> Result<(), Error> {
        let range = checked_range(offset, length, self.header.size)?;
        self.give_pieces(range, &|at| self.piece(at), sink)
    }

    fn status(&self, offset: u64, length: u64) -> Result<Status, Error> {
        let range = checked_range(offset, length.max(1), self.header.size)?;
        self.piece_status(&self.piece(offset)?, offset, range.end - offset)
    }

    fn has_windows(&self) -> bool {
        let features = &self.header.features;
        features.has_incompatible(incompatible::WINDOWS | incompatible::FRAGMENTS)
    }

    fn identity(&self) -> Option<crate::storage::FileIdentity> {
        self.file.storage.identity()
    }

    fn into_any(self: Arc<Self>) -> Option<Arc<dyn Any + Send + Sync>> {
        Some(self)
    }
}

/// A region of an image.
struct ImageRegion<'a> {
    index: u64,
    /// First byte in the address space.
    start: u64,
    /// Length in bytes.
    length: u64,
    logged: Option<&'a LoggedRegion>,
    root: Entry,
    /// The table, once a piece needed it.
    table: Option<Arc<SubBlockTable>>,
}

impl ImageRegion<'_> {
    /// The piece that covers byte `offset` of the address space.
    fn piece(&mut self, image: &Image, offset: u64) -> Result<Piece, Error> {
        let (at, length) = (offset - self.start, self.length);
        let logged = self.logged.and_then(|logged| logged.piece(at, length));
        let piece = match (logged, self.root) {
            (Some(piece), _) => piece,
            (None, Entry::Table(stored)) => {
                let table = match &mut self.table {
                    Some(table) => table,
                    none => none.insert(image.table(self.index, &stored)?),
                };
                Piece::of_table(table, at, length)
            }
            (None, entry) => Piece {
                start: 0,
                length,
                entry,
            },
        };
        Ok(Piece {
            start: self.start + piece.start,
            ..piece
        })
    }
}

fn missing(entry: &BackingEntry, logical: u64) -> Error {
    Error::MissingBacking {
        name: entry.name.to_string(),
        logical,
    }
}

/// Identity of the file with this header, when another file names it as a backing (spec section 8).
/// `last_sequence` is the sequence number of the last valid record in its log; 0 if the log is
/// empty.
pub fn identity(header: &Header, last_sequence: u64) -> [u8; 32] {
    if let Some(tree) = &header.merkle {
        return tree.root;
    }
    let mut hasher = Sha256::new();
    hasher.update(header.encode());
    hasher.update(last_sequence.to_le_bytes());
    hasher.finalize().into()
}

/// Calls `sink` with `count` zeros, in pieces.
pub fn give_zeros(count: u64, sink: &mut dyn FnMut(&[u8])) {
    let mut left = count;
    while left > 0 {
        let n = left.min(ZEROS.len() as u64);
        sink(&ZEROS[..n as usize]);
        left -= n;
    }
}
