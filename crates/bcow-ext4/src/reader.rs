//! Reads an ext4 file system in the state that its next mount would show.
//!
//! If the file system has checksums, the reader compares each structure with its checksum, except
//! block bitmaps. A guest that crafts a file system can cause errors, but not unbounded use of
//! memory: a loop is an error, and a list is never longer than the metadata that was read for it.

mod directory;
mod error;
mod extents;
mod inode;
mod journal;
mod xattr;

use std::collections::HashMap;
use std::io;

use zerocopy::FromBytes;
use zerocopy::little_endian::U32;

use crate::checksum::Checksum;
use crate::format::{
    BLOCK_BYTES, BLOCKS_PER_GROUP, DESCRIPTOR_BYTES, DESCRIPTORS_PER_BLOCK, GroupDescriptor,
    INODE_BYTES, INODES_PER_BLOCK, MAGIC, SUPERBLOCK_OFFSET, SuperBlock, incompatible,
    inode_number, read_only_compatible,
};
use crate::geometry::has_backup;
use crate::output::BlockBuffer;
use crate::{BlockRange, FileKind, InodeNumber};

pub use directory::Name;
pub use error::{Features, ReadError, Structure};
pub use extents::{Extents, MappedExtent};
pub use inode::Inode;

/// The incompatible features that this reader supports.
const KNOWN: u32 = incompatible::FILE_TYPE
    | incompatible::RECOVER
    | incompatible::META_BLOCK_GROUPS
    | incompatible::EXTENTS
    | incompatible::BITS_64
    | incompatible::MULTIPLE_MOUNTS
    | incompatible::FLEXIBLE_GROUPS
    | incompatible::XATTR_INODES
    | incompatible::CHECKSUM_SEED
    | incompatible::LARGE_DIRECTORIES;

/// The incompatible features that this reader requires.
const NEEDED: u32 = incompatible::FILE_TYPE | incompatible::EXTENTS | incompatible::BITS_64;

/// The bytes of a file system.
pub trait FilesystemBytes: Send + Sync {
    /// Number of bytes.
    fn bytes(&self) -> u64;

    /// Fills `buf` with the bytes at `offset`.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()>;
}

/// A file system, open for reading. The file system must not change meanwhile.
pub struct Reader {
    source: Box<dyn FilesystemBytes>,
    blocks: u64,
    inodes: u32,
    inodes_per_group: u32,
    first_meta_group: u64,
    /// The seed of the checksums, if the file system has checksums.
    seed: Option<Checksum>,
    /// Blocks whose content is in the journal, and the place of the content there.
    replayed: HashMap<u64, journal::JournaledBlock>,
}

impl Reader {
    /// Opens the file system in `source`. If its journal has changes that are not in their places,
    /// they are read from the journal. Nothing is written.
    pub fn open(source: Box<dyn FilesystemBytes>) -> Result<Reader, ReadError> {
        let mut reader = Reader {
            source,
            blocks: 1,
            inodes: 0,
            inodes_per_group: 1,
            first_meta_group: 0,
            seed: None,
            replayed: HashMap::new(),
        };
        let superblock = reader.superblock()?;
        reader.accept_superblock(&superblock)?;
        if superblock.incompatible.get() & incompatible::RECOVER != 0 {
            let number = InodeNumber(superblock.journal_inode.get());
            reader.replayed = journal::replay(&reader, number)?;
            let superblock = reader.superblock()?;
            reader.accept_superblock(&superblock)?;
        }
        Ok(reader)
    }

    /// Number of blocks.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Number of inodes, including free ones.
    pub fn inodes(&self) -> u32 {
        self.inodes
    }

    /// Blocks whose content is in the journal and not yet in its place.
    pub fn replayed_blocks(&self) -> impl Iterator<Item = u64> + '_ {
        self.replayed.keys().copied()
    }

    /// The inodes of a group, and the block where their table begins.
    pub fn inode_table(&self, group: u32) -> Result<InodeTable, ReadError> {
        let first = group
            .checked_mul(self.inodes_per_group)
            .and_then(|first| first.checked_add(1))
            .filter(|first| *first <= self.inodes);
        let damaged = || Structure::Group(group).damaged("it has no inodes");
        let first = first.ok_or_else(damaged)?;
        let descriptor = self.descriptor(group)?;
        let start = wide(descriptor.inode_table_low, descriptor.inode_table_high);
        Ok(InodeTable {
            first: InodeNumber(first),
            inodes: self.inodes_per_group,
            blocks: BlockRange {
                start,
                count: (self.inodes_per_group / INODES_PER_BLOCK).into(),
            },
        })
    }

    /// Reads the content of a block, as it is after a replay of the journal.
    pub fn block(&self, block: u64) -> Result<Box<BlockBuffer>, ReadError> {
        let mut buffer = Box::new([0; BLOCK_BYTES]);
        self.read_blocks(block, &mut buffer[..])?;
        Ok(buffer)
    }

    /// Reads whole blocks, as they are after a replay of the journal.
    pub fn read_blocks(&self, first: u64, buf: &mut [u8]) -> Result<(), ReadError> {
        let count = (buf.len() / BLOCK_BYTES) as u64;
        if first.checked_add(count).is_none_or(|end| end > self.blocks) {
            return Err(Structure::Block(first).damaged("it is behind the end of the file system"));
        }
        self.source.read_at(first * BLOCK_BYTES as u64, buf)?;
        if self.replayed.is_empty() {
            return Ok(());
        }
        let (places, _) = buf.as_chunks_mut::<BLOCK_BYTES>();
        for (block, place) in (first..).zip(places) {
            if let Some(journaled) = self.replayed.get(&block) {
                self.source
                    .read_at(journaled.block * BLOCK_BYTES as u64, place)?;
                journaled.restore(place);
            }
        }
        Ok(())
    }

    /// Reads content at byte `offset` of a file with these extents. Holes and unwritten extents
    /// read as zeros.
    pub fn read(&self, extents: &Extents, offset: u64, buf: &mut [u8]) -> Result<(), ReadError> {
        let mut done = 0;
        while done < buf.len() {
            let at = offset + done as u64;
            let block = at / BLOCK_BYTES as u64;
            let within = (at % BLOCK_BYTES as u64) as usize;
            let rest = &mut buf[done..];
            let n = rest.len().min(BLOCK_BYTES - within);
            match extents.find(block).filter(|run| run.is_written) {
                None => rest[..n].fill(0),
                Some(run) => {
                    let skipped = block - u64::from(run.logical);
                    let whole = (rest.len() / BLOCK_BYTES) as u64;
                    let count = whole.min(u64::from(run.blocks) - skipped) as usize;
                    if within == 0 && count > 0 {
                        let part = &mut rest[..count * BLOCK_BYTES];
                        self.read_blocks(run.physical + skipped, part)?;
                        done += count * BLOCK_BYTES;
                        continue;
                    }
                    let block = self.block(run.physical + skipped)?;
                    rest[..n].copy_from_slice(&block[within..within + n]);
                }
            }
            done += n;
        }
        Ok(())
    }

    /// Reads the target of a symbolic link.
    pub fn read_link(&self, inode: &Inode) -> Result<Vec<u8>, ReadError> {
        let damaged = |problem| Structure::Inode(inode.number).damaged(problem);
        if inode.kind != FileKind::Symlink {
            return Err(damaged("it is no symbolic link"));
        }
        if let Some(target) = inode.short_target() {
            return Ok(target.to_vec());
        }
        if inode.size >= BLOCK_BYTES as u64 {
            return Err(damaged("the target of the link is too long"));
        }
        let mut target = vec![0; inode.size as usize];
        self.read(&self.extents(inode)?, 0, &mut target)?;
        Ok(target)
    }

    /// Reads the bytes of an inode in its table. An inode that was never used has zeros.
    pub fn raw_inode(&self, number: InodeNumber) -> Result<[u8; INODE_BYTES], ReadError> {
        let index = number
            .0
            .checked_sub(1)
            .filter(|_| number.0 <= self.inodes)
            .ok_or_else(|| Structure::Inode(number).damaged("the file system has no such inode"))?;
        let table = self.inode_table(index / self.inodes_per_group)?;
        let within = index % self.inodes_per_group;
        let block = self.block(table.blocks.start + u64::from(within / INODES_PER_BLOCK))?;
        let (inodes, _) = block.as_chunks::<INODE_BYTES>();
        Ok(inodes[(within % INODES_PER_BLOCK) as usize])
    }

    /// The first block of a copy of this file system that has another UUID. All other blocks of the
    /// copy are the same.
    ///
    /// The superblock of the copy records the seed of the checksums, which otherwise follows from
    /// the UUID (feature `metadata_csum_seed`). The backups of the superblock have the old UUID,
    /// and so the same seed. `e2fsck` updates them when it next writes.
    pub fn first_block_with_uuid(&self, uuid: [u8; 16]) -> Result<Box<BlockBuffer>, ReadError> {
        use zerocopy::IntoBytes;
        let mut superblock = self.superblock()?;
        superblock.uuid = uuid;
        if let Some(seed) = self.seed {
            let features = superblock.incompatible.get() | incompatible::CHECKSUM_SEED;
            superblock.incompatible = features.into();
            superblock.checksum_seed = seed.0.into();
            superblock.checksum = Checksum::of_superblock(&superblock).0.into();
        }
        let mut block = self.block(0)?;
        let place = &mut block[SUPERBLOCK_OFFSET..][..size_of::<SuperBlock>()];
        place.copy_from_slice(superblock.as_bytes());
        Ok(block)
    }

    /// The seed of the checksums of an inode and of its metadata blocks.
    fn seed_of(&self, number: InodeNumber, generation: u32) -> Option<Checksum> {
        Some(self.seed?.of_generation(number.0, generation))
    }

    fn superblock(&self) -> Result<SuperBlock, ReadError> {
        if self.source.bytes() < BLOCK_BYTES as u64 {
            return Err(ReadError::NoExt4);
        }
        let block = self.block(0)?;
        let superblock = SuperBlock::read_from_prefix(&block[SUPERBLOCK_OFFSET..]);
        Ok(superblock.map_err(|_| ReadError::NoExt4)?.0)
    }

    /// Checks the superblock, and takes the geometry and the seed from it.
    fn accept_superblock(&mut self, superblock: &SuperBlock) -> Result<(), ReadError> {
        let damaged = |problem| Structure::Superblock.damaged(problem);
        if superblock.magic.get() != MAGIC {
            return Err(ReadError::NoExt4);
        }
        let features = superblock.incompatible.get();
        let unknown = features & !KNOWN;
        if unknown != 0 {
            return Err(ReadError::Features(Features(unknown)));
        }
        let is_other_layout = features & NEEDED != NEEDED
            || superblock.log_block_size.get() != 2
            || usize::from(superblock.inode_bytes.get()) != INODE_BYTES
            || usize::from(superblock.descriptor_bytes.get()) != DESCRIPTOR_BYTES
            || u64::from(superblock.blocks_per_group.get()) != BLOCKS_PER_GROUP
            || superblock.first_data_block.get() != 0;
        if is_other_layout {
            return Err(ReadError::Layout);
        }
        let has_checksums =
            superblock.read_only_compatible.get() & read_only_compatible::METADATA_CHECKSUM != 0;
        if has_checksums {
            let expected = Checksum::of_superblock(superblock);
            if expected.0 != superblock.checksum.get() {
                return Err(damaged("its checksum is wrong"));
            }
        }
        self.seed = has_checksums.then(|| match features & incompatible::CHECKSUM_SEED {
            0 => Checksum::of_file_system(&superblock.uuid),
            _ => Checksum(superblock.checksum_seed.get()),
        });
        self.blocks = wide(superblock.blocks_low, superblock.blocks_high);
        let bytes = self.blocks.checked_mul(BLOCK_BYTES as u64);
        if bytes.is_none_or(|bytes| bytes == 0 || bytes > self.source.bytes()) {
            return Err(damaged("the file system is longer than the disk"));
        }
        self.inodes = superblock.inodes.get();
        self.inodes_per_group = superblock.inodes_per_group.get();
        let groups = self.blocks.div_ceil(BLOCKS_PER_GROUP);
        let is_count = self.inodes_per_group > 0
            && self.inodes_per_group.is_multiple_of(INODES_PER_BLOCK)
            && u64::from(self.inodes_per_group) <= BLOCKS_PER_GROUP
            && u64::from(self.inodes_per_group) * groups == u64::from(self.inodes);
        if !is_count || self.inodes < inode_number::FIRST {
            return Err(damaged("its counts of inodes contradict each other"));
        }
        self.first_meta_group = match features & incompatible::META_BLOCK_GROUPS {
            0 => u64::MAX,
            _ => superblock.first_meta_group.get().into(),
        };
        Ok(())
    }

    /// The blocks of the file system itself: superblocks, descriptors, bitmaps, inode tables and
    /// the journal. Ranges may overlap.
    pub fn metadata_blocks(&self) -> Result<Vec<BlockRange>, ReadError> {
        let mut metadata: Vec<BlockRange> = Vec::new();
        let groups = self.blocks.div_ceil(BLOCKS_PER_GROUP);
        let descriptors = groups.div_ceil(DESCRIPTORS_PER_BLOCK);
        let at_front = descriptors.min(self.first_meta_group);
        for group in 0..groups {
            let start = group * BLOCKS_PER_GROUP;
            if has_backup(group as u32) {
                let count = 1 + at_front;
                metadata.push(BlockRange { start, count });
            }
            let nth = group / DESCRIPTORS_PER_BLOCK;
            if nth >= self.first_meta_group {
                // At most a backup of the superblock and one block of descriptors. Only some groups
                // have them; a view has none of these groups.
                metadata.push(BlockRange { start, count: 2 });
            }
            let d = self.descriptor(group as u32)?;
            let table_blocks = u64::from(self.inodes_per_group / INODES_PER_BLOCK);
            let found = [
                (d.block_bitmap_low, d.block_bitmap_high, 1),
                (d.inode_bitmap_low, d.inode_bitmap_high, 1),
                (d.inode_table_low, d.inode_table_high, table_blocks),
            ];
            for (low, high, count) in found {
                let start = wide(low, high);
                metadata.push(BlockRange { start, count });
            }
        }
        let journal = self.inode(InodeNumber(inode_number::JOURNAL))?;
        let extents = self.extents(&journal)?;
        let nodes = extents.nodes.iter();
        metadata.extend(nodes.map(|&start| BlockRange { start, count: 1 }));
        metadata.extend(extents.content.iter().map(|run| BlockRange {
            start: run.physical,
            count: run.blocks.into(),
        }));
        Ok(metadata)
    }

    fn descriptor(&self, group: u32) -> Result<GroupDescriptor, ReadError> {
        let group = u64::from(group);
        let nth = group / DESCRIPTORS_PER_BLOCK;
        let block = if nth < self.first_meta_group {
            1 + nth
        } else {
            let first = nth * DESCRIPTORS_PER_BLOCK;
            first * BLOCKS_PER_GROUP + u64::from(has_backup(first as u32))
        };
        let buffer = self.block(block)?;
        let at = (group % DESCRIPTORS_PER_BLOCK) as usize * DESCRIPTOR_BYTES;
        let bytes = &buffer[at..at + DESCRIPTOR_BYTES];
        let damaged = |problem| Structure::Group(group as u32).damaged(problem);
        let Ok(mut descriptor) = GroupDescriptor::read_from_bytes(bytes) else {
            return Err(damaged("it is too short"));
        };
        if let Some(seed) = self.seed {
            use zerocopy::IntoBytes;
            let stored = descriptor.checksum.get();
            descriptor.checksum = 0.into();
            let seed = seed.with(&(group as u32).to_le_bytes());
            if seed.with(descriptor.as_bytes()).halves().0 != stored {
                return Err(damaged("the checksum of its descriptor is wrong"));
            }
        }
        Ok(descriptor)
    }

    /// The bitmap of the blocks of a group that are in use; `None` if only the metadata of the
    /// file system itself is in use there.
    pub fn block_bitmap(&self, group: u32) -> Result<Option<Box<BlockBuffer>>, ReadError> {
        let descriptor = self.descriptor(group)?;
        if descriptor.flags.get() & crate::format::group_flags::BLOCKS_UNUSED != 0 {
            return Ok(None);
        }
        let block = wide(descriptor.block_bitmap_low, descriptor.block_bitmap_high);
        Ok(Some(self.block(block)?))
    }
}

/// The inodes of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InodeTable {
    pub first: InodeNumber,
    /// Number of inodes.
    pub inodes: u32,
    /// The blocks of the table.
    pub blocks: BlockRange,
}

fn wide(low: U32, high: U32) -> u64 {
    u64::from(high.get()) << 32 | u64::from(low.get())
}
