//! Writes a file in one pass from a stream of content: a sealed image, or a disk.
//!
//! `append` fills blocks. Encoders (other threads, or the calling thread) detect zeros, compress
//! and checksum full blocks. A sink writes the results in the order of the blocks, so the bytes of
//! the file do not depend on the number of threads. Tables, metadata and the Merkle tree follow,
//! and the header is written last.
//!
//! Windows may follow the content: they show ranges of backings, and store only root entries.
//!
//! A [`Composer`] writes pieces in any order instead of a stream.

mod composer;
mod disk;
mod encode;
mod layout;
mod pipeline;
mod verify;
mod windows;

use std::fs::File;
use std::sync::Arc;

use bcow_format::{
    BackingEntry, BlockShift, Entry, Features, HEADER_AREA_BYTES, Header, MAX_METADATA_BYTES,
    MAX_ROOT_ENTRIES, MerkleShape, MerkleTree, SECTOR_BYTES, Section, State, Use, compatible,
    encode_root, incompatible, read_only_compatible,
};

use crate::storage::Storage;
use crate::{Error, merkle};
use layout::Layout;
use pipeline::{Pipeline, Placement};
use windows::Windows;

pub use composer::{Composer, Composition};
pub use disk::{DiskForm, Keep, append_disk};
pub use verify::verify_written;

/// log2 of the default block size for the content of files: large blocks compress better, and a
/// cold read fetches neighbouring data.
const AUTO_CONTENT_SHIFT: u8 = 18;
/// log2 of the default block size for file system metadata: small, because a lookup touches little.
const AUTO_METADATA_SHIFT: u8 = 14;
/// log2 of the default block size of a plain file. It only determines how much a read must verify.
const AUTO_PLAIN_SHIFT: u8 = 16;
/// log2 of the region size of two-level files.
const REGION_SHIFT: u8 = 22;
/// A file with at most this many blocks of one size has no sub-block tables.
const SINGLE_LEVEL_BLOCKS: u64 = 1024;
/// log2 of the chunk size of the Merkle tree. The tree takes 0.2 % of the file, and a small read
/// hashes little.
const MERKLE_CHUNK_SHIFT: u8 = 14;

/// Compression of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// None.
    None,
    /// A block becomes a zstd frame where that is shorter.
    Zstd {
        /// Compression level, -7 to 22.
        level: i32,
    },
}

/// Options for writing an image.
#[derive(Debug, Clone)]
pub struct WriterOptions {
    /// Compression of blocks. A plain image always uses [`Compression::None`].
    pub compression: Compression,
    /// Stores every block at its own address, so that the file is also a raw image of its content.
    pub plain: bool,
    /// Block size in bytes for the whole image, a power of two from 4 KiB to 4 MiB; `None` selects
    /// the defaults.
    pub block_bytes: Option<u32>,
    /// Number of encoder threads; with 1 the calling thread does all the work.
    pub threads: usize,
    /// Whether the address space will hold an EROFS file system (a feature bit).
    pub erofs: bool,
    /// The image has no content of files: appended data is file system metadata from the first
    /// byte.
    pub metadata_first: bool,
    /// Makes a disk of this form instead of an image.
    pub disk: Option<DiskForm>,
}

impl Default for WriterOptions {
    fn default() -> Self {
        WriterOptions {
            compression: Compression::Zstd { level: 3 },
            plain: false,
            block_bytes: None,
            threads: 1,
            erofs: false,
            metadata_first: false,
            disk: None,
        }
    }
}

/// Writes a file in one pass. See the documentation of the module.
pub struct ImageWriter {
    storage: Arc<dyn Storage>,
    options: WriterOptions,
    pipeline: Pipeline,
    /// The block being filled, which starts at `block_start`.
    block: Vec<u8>,
    block_start: u64,
    block_shift: BlockShift,
    /// The block at byte 0, kept until `finish` adds its first bytes.
    first: Option<Vec<u8>>,
    /// log2 of the region size, which `finish` may reduce.
    region_shift: u8,
    layout: Layout,
    windows: Windows,
}

/// A finished file.
pub struct Written {
    storage: Arc<dyn Storage>,
    layout: Layout,
    windows: Windows,
    /// The header as written.
    pub header: Header,
}

impl Written {
    /// Root hash of the Merkle tree.
    pub fn merkle_root(&self) -> [u8; 32] {
        self.header
            .merkle
            .as_ref()
            .map_or([0; 32], |tree| tree.root)
    }

    /// Length of the file in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.header.file_bytes
    }

    /// Size of the address space in bytes.
    pub fn size(&self) -> u64 {
        self.header.size
    }
}

impl ImageWriter {
    /// Starts an image in an empty file. The caller gives the file its final name after `finish`.
    pub fn create(file: File, options: WriterOptions) -> Result<Self, Error> {
        Self::on_storage(Arc::new(file), options)
    }

    /// Starts an image in empty storage.
    pub fn on_storage(storage: Arc<dyn Storage>, options: WriterOptions) -> Result<Self, Error> {
        let region_shift = match &options.disk {
            Some(form) => form.check(&options)?,
            None => REGION_SHIFT,
        };
        let shift = match options.block_bytes {
            None if options.plain => AUTO_PLAIN_SHIFT,
            None if options.metadata_first => AUTO_METADATA_SHIFT,
            None => AUTO_CONTENT_SHIFT.min(region_shift),
            Some(bytes) => BlockShift::from_bytes(bytes)
                .filter(|shift| shift.get() <= region_shift)
                .ok_or_else(|| {
                    Error::Unsupported(format!(
                        "block size {bytes}: must be a power of two from 4096 to {}",
                        1u64 << region_shift
                    ))
                })?
                .get(),
        };
        let block_shift = shift_of(shift);
        let compression = if options.plain { Compression::None } else { options.compression };
        let placement = match &options.disk {
            _ if options.plain => Placement::Plain,
            Some(form) if form.is_writable() => Placement::Sectors,
            _ => Placement::Packed,
        };
        let mut windows = Windows::default();
        if let Some(backing) = options.disk.as_ref().and_then(|form| form.backing.clone()) {
            windows.add_backing(backing);
        }
        let mut writer = ImageWriter {
            pipeline: Pipeline::start(storage.clone(), compression, placement, options.threads)?,
            storage,
            options,
            block: Vec::with_capacity(block_shift.bytes() as usize),
            block_start: 0,
            block_shift,
            first: None,
            region_shift,
            layout: Layout::default(),
            windows,
        };
        writer.layout.begin(0, block_shift);
        if writer.options.disk.is_none() {
            // The first sector belongs to the header slots and the superblock.
            writer.append_zeros(SECTOR_BYTES)?;
        }
        Ok(writer)
    }

    /// The address of the next appended byte: initially 4096 in an image, 0 in a disk.
    pub fn position(&self) -> u64 {
        match self.windows.end() {
            Some(end) => end,
            None => self.block_start + self.block.len() as u64,
        }
    }

    /// Appends content. After a window, only windows can follow.
    pub fn append(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        self.windows.check_no_windows()?;
        let length = self.block_shift.bytes() as usize;
        while !bytes.is_empty() {
            let n = bytes.len().min(length - self.block.len());
            self.block.extend_from_slice(&bytes[..n]);
            bytes = &bytes[n..];
            if self.block.len() == length {
                self.end_block()?;
            }
        }
        Ok(())
    }

    /// Appends zeros; whole blocks of zeros store nothing.
    pub fn append_zeros(&mut self, mut count: u64) -> Result<(), Error> {
        if count > 0 {
            self.windows.check_no_windows()?;
        }
        let length = u64::from(self.block_shift.bytes());
        while count > 0 {
            let filled = self.block.len() as u64;
            if filled == 0 && !self.is_first_block() && count >= length {
                let blocks = count / length;
                self.pipeline.run(Entry::Zero, blocks)?;
                self.block_start += blocks * length;
                count -= blocks * length;
                continue;
            }
            let n = count.min(length - filled);
            self.block.resize((filled + n) as usize, 0);
            count -= n;
            if filled + n == length {
                self.end_block()?;
            }
        }
        Ok(())
    }

    /// Appends zeros up to the next multiple of `align`, a power of two.
    pub fn align(&mut self, align: u64) -> Result<(), Error> {
        let position = self.position();
        self.append_zeros(position.next_multiple_of(align) - position)
    }

    /// Ends the content of files. Data appended from now on is file system metadata, with its own
    /// block size. Returns the start of the metadata, a multiple of 4096 bytes.
    pub fn begin_metadata(&mut self) -> Result<u64, Error> {
        self.windows.check_no_windows()?;
        if self.options.metadata_first {
            self.align(SECTOR_BYTES)?;
            return Ok(self.position());
        }
        let metadata_shift = match self.options.block_bytes {
            None if !self.options.plain => shift_of(AUTO_METADATA_SHIFT),
            _ => self.block_shift,
        };
        if metadata_shift == self.block_shift {
            self.align(SECTOR_BYTES)?;
        } else {
            self.align(1 << REGION_SHIFT)?;
            self.block_shift = metadata_shift;
            self.layout.begin(self.block_start, metadata_shift);
        }
        Ok(self.position())
    }

    /// Adds a backing and returns its index. An image names backings by digest only; `finish`
    /// refuses other names.
    pub fn add_backing(&mut self, backing: BackingEntry) -> u32 {
        self.windows.add_backing(backing)
    }

    /// Adds a window at the next region: it shows `bytes` bytes of a backing from byte `address` of
    /// its address space on. Both are multiples of 4096. All content and metadata must be appended
    /// before. Returns the address of the window.
    pub fn append_window(&mut self, backing: u32, address: u64, bytes: u64) -> Result<u64, Error> {
        let start = self
            .windows
            .check(self.position(), backing, address, bytes)?;
        if self.windows.end().is_none() {
            self.append_zeros(start - self.position())?;
        }
        self.windows.push(start, backing, address, bytes);
        Ok(start)
    }

    /// Whether the block being filled is the one that receives the superblock.
    fn is_first_block(&self) -> bool {
        self.block_start == 0 && self.options.disk.is_none()
    }

    fn end_block(&mut self) -> Result<(), Error> {
        let length = self.block.len() as u64;
        let next = Vec::with_capacity(self.block_shift.bytes() as usize);
        let block = std::mem::replace(&mut self.block, next);
        if self.is_first_block() {
            self.first = Some(block);
            self.pipeline.run(Entry::Zero, 1)?;
        } else {
            self.pipeline.block(self.block_start, block)?;
        }
        self.block_start += length;
        Ok(())
    }

    /// Finishes the image: writes the rest of the content, the tables, `metadata` (spec section
    /// 13), the Merkle tree and the header. `superblock`, at most 3072 bytes, becomes the address
    /// space from byte 1024 on. Nothing is synced.
    pub fn finish(
        mut self,
        superblock: &[u8],
        metadata: &serde_json::Value,
    ) -> Result<Written, Error> {
        if superblock.len() > SECTOR_BYTES as usize - HEADER_AREA_BYTES {
            return Err(Error::Unsupported(format!(
                "a superblock of {} bytes",
                superblock.len()
            )));
        }
        self.align(SECTOR_BYTES)?;
        let size = self.position();
        if let Some(form) = &self.options.disk
            && form.size != size
        {
            return Err(Error::Unsupported(format!(
                "{size} bytes in a disk of {}",
                form.size
            )));
        }
        if !self.block.is_empty() {
            self.end_block()?;
        }
        let mut first = self.first.take();
        if let Some(first) = &mut first {
            first[HEADER_AREA_BYTES..HEADER_AREA_BYTES + superblock.len()]
                .copy_from_slice(superblock);
        }
        let end = self.pipeline.finish(first, &mut self.layout)?;
        let align = match &self.options.disk {
            Some(form) if form.is_writable() => SECTOR_BYTES,
            _ => 16,
        };
        let mut out = Appender {
            storage: &*self.storage,
            align,
            // A window stores no data here, so a plain file may be shorter than its address space.
            at: if self.options.plain && self.windows.is_empty() { size } else { end },
        };

        let region_shift = self.region_shift(size);
        if size.div_ceil(1 << region_shift) > MAX_ROOT_ENTRIES {
            return Err(Error::Unsupported(format!(
                "an image of {size} bytes in blocks of {} bytes",
                1u64 << region_shift
            )));
        }
        let fill = match self.options.disk {
            Some(_) => Entry::Absent,
            None => Entry::Zero,
        };
        let mut root = self
            .layout
            .write_tables(size, region_shift, fill, &mut out)?;
        for (region, entry) in self.windows.entries() {
            root[region as usize] = entry;
        }
        let root = out.section(&encode_root(&root))?;
        let metadata = out.metadata(metadata)?;
        let purpose = match self.options.disk {
            Some(_) => Use::Disk,
            None => Use::Image,
        };
        let backings = out.section(&self.windows.backing_table(purpose)?)?;
        let log = match &self.options.disk {
            Some(form) if form.is_writable() => out.room(form.log_bytes)?,
            _ => (0, 0),
        };
        out.pad()?;

        let state = if log == (0, 0) { State::Sealed } else { State::Writable };
        let mut header = Header {
            features: self.features(),
            root,
            metadata,
            backings,
            backing_count: self.windows.backing_count(),
            log,
            ..Header::new(purpose, state, region_shift, size)
        };
        if header.state == State::Sealed {
            write_merkle(&mut header, &mut out, self.options.threads)?;
        } else {
            header.file_bytes = out.at;
        }
        write_slots(&*self.storage, &mut header)?;
        Ok(Written {
            storage: self.storage,
            layout: self.layout,
            windows: self.windows,
            header,
        })
    }

    fn region_shift(&self, size: u64) -> u8 {
        if !self.windows.is_empty()
            || matches!(&self.options.disk, Some(form) if form.region_shift.is_some())
        {
            return self.region_shift;
        }
        match self.layout.uniform_shift() {
            Some(shift) if size.div_ceil(shift.bytes().into()) <= SINGLE_LEVEL_BLOCKS => {
                shift.get()
            }
            _ => self.region_shift,
        }
    }

    fn features(&self) -> Features {
        let mut features = Features::default();
        match &self.options.disk {
            Some(form) if form.is_writable() => features.incompatible |= incompatible::RECORDS,
            _ => features.read_only_compatible |= read_only_compatible::MERKLE,
        }
        let form = self.options.disk.as_ref();
        if let Some(backing) = form.and_then(|form| form.backing.as_ref()) {
            features.incompatible |= backing.features();
        }
        if self.layout.has_zstd() {
            features.incompatible |= incompatible::ZSTD;
        }
        if !self.windows.is_empty() {
            features.incompatible |= incompatible::WINDOWS;
        }
        if self.options.plain {
            features.incompatible |= incompatible::PLAIN;
        }
        if self.options.erofs {
            features.compatible |= compatible::EROFS;
        }
        features
    }
}

/// Hashes everything written so far, and appends the tree.
fn write_merkle(
    header: &mut Header,
    out: &mut Appender<'_>,
    thread_count: usize,
) -> Result<(), Error> {
    header.merkle = Some(MerkleTree {
        chunk_shift: MERKLE_CHUNK_SHIFT,
        offset: out.at,
        root: [0; 32],
    });
    let shape = MerkleShape::new(out.at, MERKLE_CHUNK_SHIFT);
    header.file_bytes = out.at + shape.total_bytes();
    let tree = merkle::build(out.storage, &shape, &header.canonical(), thread_count)?;
    out.bytes(&tree)?;
    if let Some(merkle) = &mut header.merkle {
        merkle.root.copy_from_slice(&tree[tree.len() - 32..]);
    }
    Ok(())
}

/// Writes both header slots: if one is damaged, a reader uses the other. In a sealed file, slot B
/// is newer; in a writable file, both are equal at rest.
fn write_slots(storage: &dyn Storage, header: &mut Header) -> Result<(), Error> {
    let mut slots = Vec::with_capacity(HEADER_AREA_BYTES);
    let generations = match header.state {
        State::Sealed => [1, 2],
        State::Writable => [1, 1],
    };
    for generation in generations {
        header.generation = generation;
        slots.extend_from_slice(&header.encode());
    }
    storage.write(0, &slots)
}

/// For a shift that is a constant of this module or was checked before.
fn shift_of(shift: u8) -> BlockShift {
    BlockShift::new(shift).unwrap_or(BlockShift::MIN)
}

/// Appends sections to the file.
struct Appender<'a> {
    storage: &'a dyn Storage,
    /// Alignment of sections in bytes.
    align: u64,
    at: u64,
}

impl Appender<'_> {
    fn bytes(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.storage.write(self.at, bytes)?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    fn pad(&mut self) -> Result<(), Error> {
        let zeros = self.at.next_multiple_of(self.align) - self.at;
        self.bytes(&vec![0; zeros as usize])
    }

    /// Reserves whole sectors without writing them.
    fn room(&mut self, bytes: u64) -> Result<(u64, u64), Error> {
        let offset = self.at.next_multiple_of(SECTOR_BYTES);
        self.at = offset + bytes;
        self.storage.set_length("grow the file", self.at)?;
        Ok((offset, bytes))
    }

    fn metadata(&mut self, metadata: &serde_json::Value) -> Result<Section, Error> {
        let json = metadata.to_string();
        if json.len() > MAX_METADATA_BYTES as usize {
            return Err(Error::Unsupported(format!(
                "metadata of {} bytes; the format holds {MAX_METADATA_BYTES}",
                json.len()
            )));
        }
        self.section(json.as_bytes())
    }

    fn section(&mut self, bytes: &[u8]) -> Result<Section, Error> {
        if bytes.is_empty() {
            return Ok(Section::default());
        }
        self.pad()?;
        let section = Section::of(self.at, bytes);
        self.bytes(bytes)?;
        Ok(section)
    }
}
