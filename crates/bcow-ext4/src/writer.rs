//! Writes the metadata of a file system.

use std::borrow::Cow;

use zerocopy::{FromZeros, IntoBytes};

use crate::checksum::Checksum;
use crate::directory;
use crate::extents;
use crate::format::{
    BLOCK_BYTES, BLOCKS_PER_GROUP, DESCRIPTOR_BYTES, DESCRIPTORS_PER_BLOCK, EXTRA_BYTES,
    FAST_LINK_BYTES, GroupDescriptor, HASH_HALF_MD4, INODE_BYTES, JOURNAL_MAGIC,
    JOURNAL_SUPERBLOCK, JournalSuperBlock, LINK_MAX, MAGIC, SUPERBLOCK_OFFSET, SuperBlock,
    UNSIGNED_HASH, compatible, group_flags, halves_of_32, halves_of_64, incompatible, inode_flags,
    inode_number, read_only_compatible,
};
use crate::geometry::Geometry;
use crate::hash::NameHasher;
use crate::inode::{self, Body};
use crate::links::LinkCheck;
use crate::node::{
    Content, DeviceNumber, DirEntry, Extent, FileKind, InodeNumber, Node, Timestamp,
};
use crate::output::{Output, Sink};
use crate::space::{Space, set_bits};
use crate::table::InodeTable;
use crate::xattr::{self, IN_INODE_BYTES};
use crate::{BlockRange, Ext4Error, InodeProblem};

/// The name of the directory in which `e2fsck` puts files without a name.
const LOST_AND_FOUND: &[u8] = b"lost+found";

/// Blocks of `lost+found`, so that `e2fsck` need not allocate any.
const LOST_AND_FOUND_BLOCKS: u64 = 4;

/// The most blocks of a file: block numbers in a file have 32 bits, the last of which is reserved.
const FILE_BLOCKS: u64 = u32::MAX as u64;

/// What tells a file system from others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// The UUID. It is also the seed of all checksums.
    pub uuid: [u8; 16],
    /// The seed of the hashes of names.
    pub hash_seed: [u8; 16],
    /// The volume's name, filled up with NULs.
    pub label: [u8; 16],
    /// Time of creation, in seconds since 1970.
    pub created: u32,
    /// Whether the root directory has a `lost+found`, as `mke2fs` makes it. `e2fsck` makes it if it
    /// is missing. A tree with an entry of this name needs `false`.
    pub lost_and_found: bool,
}

/// What the finished file system has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Summary {
    /// Inodes in use, with the reserved ones.
    pub inodes: u32,
    pub free_blocks: u64,
}

/// Writes a tree, inode by inode.
pub struct Writer<'a> {
    geometry: &'a Geometry,
    identity: Identity,
    output: Output<'a>,
    hasher: NameHasher,
    table: InodeTable,
    links: LinkCheck,
    /// The first number after the reserved ones and `lost+found`.
    first: u32,
    has_root: bool,
}

impl<'a> Writer<'a> {
    /// Begins a file system. Files have their content in the areas `content` only, and no metadata
    /// is written there.
    pub fn new(
        geometry: &'a Geometry,
        identity: Identity,
        content: &[BlockRange],
        sink: &'a mut dyn Sink,
    ) -> Result<Writer<'a>, Ext4Error> {
        let first = inode_number::FIRST + u32::from(identity.lost_and_found);
        Ok(Writer {
            geometry,
            identity,
            output: Output {
                space: Space::new(geometry, content)?,
                sink,
                seed: Checksum::of_file_system(&identity.uuid),
            },
            hasher: NameHasher::new(&identity.hash_seed),
            table: InodeTable::new(geometry),
            links: LinkCheck::new(first),
            first,
            has_root: false,
        })
    }

    /// The number of the `n`-th inode that is added. The first, with `n` = 0, is the root.
    pub fn number(&self, n: u32) -> InodeNumber {
        match n.checked_sub(1) {
            None => InodeNumber::ROOT,
            Some(n) => InodeNumber(self.first.saturating_add(n)),
        }
    }

    /// Adds the next inode. The first one is the root directory. A directory is added after its
    /// parent; otherwise the order is free.
    pub fn add(&mut self, node: &Node<'_>) -> Result<InodeNumber, Ext4Error> {
        let next = self.links.described() + u32::from(self.has_root);
        let number = self.number(next);
        if number.0 > self.geometry.inodes() {
            let inodes = self.geometry.inodes();
            return Err(Ext4Error::NoInodes { inodes });
        }
        let refuse = |problem| number.refused(problem);
        let is_directory = node.content.kind() == FileKind::Directory;
        if !self.has_root && !is_directory {
            return Err(refuse(InodeProblem::Parent(InodeNumber::ROOT)));
        }
        if !is_directory && !(1..=LINK_MAX).contains(&node.links) {
            return Err(refuse(InodeProblem::Links(node.links)));
        }
        self.links.record_inode(number, node)?;
        self.has_root = true;
        let mut body = match node.content {
            Content::File { bytes, extents } => self.file(number, bytes, extents)?,
            Content::Directory { parent, entries } => self.directory(number, parent, entries)?,
            Content::Symlink(target) => self.symlink(number, target)?,
            Content::CharDevice(device) | Content::BlockDevice(device) => {
                let DeviceNumber { major, minor } = device;
                let block = inode::device(device);
                Body {
                    block: block.ok_or(refuse(InodeProblem::Device { major, minor }))?,
                    ..empty()
                }
            }
            Content::Fifo | Content::Socket => empty(),
        };
        if !is_directory {
            body.links = node.links as u16;
        }
        let stored = xattr::store(number, node.xattrs, &mut self.output)?;
        body.xattrs = stored.in_inode;
        if let Some(block) = stored.block {
            body.xattr_block = block;
            body.blocks += 1;
        }
        self.put(number, node, &body)?;
        Ok(number)
    }

    fn put(&mut self, number: InodeNumber, node: &Node<'_>, body: &Body) -> Result<(), Ext4Error> {
        let bytes = inode::encode(node, body, self.output.seed.of_inode(number.0));
        self.table
            .put(number, &bytes, self.geometry, &mut self.output)
    }

    /// Writes what is left, the superblock last.
    pub fn finish(mut self) -> Result<Summary, Ext4Error> {
        if !self.has_root {
            return Err(InodeNumber::ROOT.refused(InodeProblem::Missing));
        }
        self.links.finish()?;
        if self.identity.lost_and_found {
            self.lost_and_found()?;
        }
        let journal = self.journal()?;
        self.table.finish(self.geometry, &mut self.output)?;
        let summary = Summary {
            inodes: self.first - 1 + self.links.described(),
            free_blocks: (0..self.geometry.groups())
                .map(|group| u64::from(self.output.space.free_blocks(group)))
                .sum(),
        };
        let descriptors = self.groups(summary.inodes)?;
        self.superblocks(&descriptors, &journal, &summary)?;
        Ok(summary)
    }

    fn file(
        &mut self,
        number: InodeNumber,
        bytes: u64,
        extents: &[Extent],
    ) -> Result<Body, Ext4Error> {
        let refuse = |problem| number.refused(problem);
        let file_blocks = bytes.div_ceil(BLOCK_BYTES as u64);
        if file_blocks > FILE_BLOCKS {
            return Err(refuse(InodeProblem::FileBytes(bytes)));
        }
        let mut from = 0;
        for (n, extent) in extents.iter().enumerate() {
            let logical = u64::from(extent.logical);
            let end = logical + u64::from(extent.blocks);
            if extent.blocks == 0 || logical < from || end > file_blocks {
                return Err(refuse(InodeProblem::ExtentOrder(n)));
            }
            from = end;
            let range = BlockRange {
                start: extent.physical,
                count: extent.blocks.into(),
            };
            let is_range = range.start.checked_add(range.count).is_some();
            if !is_range || !self.output.space.is_content(range) {
                return Err(refuse(InodeProblem::ExtentRange(n)));
            }
            if !self.output.space.mark_content(range) {
                return Err(refuse(InodeProblem::ExtentShared(n)));
            }
        }
        self.body(number, bytes, extents)
    }

    /// An inode with content in these extents.
    fn body(
        &mut self,
        number: InodeNumber,
        bytes: u64,
        extents: &[Extent],
    ) -> Result<Body, Ext4Error> {
        let seed = self.output.seed.of_inode(number.0);
        let tree = extents::build(extents, seed, &mut self.output)?;
        let blocks = extents.iter().map(|extent| u64::from(extent.blocks));
        Ok(Body {
            bytes,
            block: tree.root,
            blocks: blocks.sum::<u64>() + tree.blocks,
            flags: inode_flags::EXTENTS,
            ..empty()
        })
    }

    fn directory(
        &mut self,
        number: InodeNumber,
        parent: InodeNumber,
        entries: &[DirEntry<'_>],
    ) -> Result<Body, Ext4Error> {
        directory::check_names(entries).map_err(|problem| number.refused(problem))?;
        self.links.record_names(number, entries)?;
        let own = directory::Identity {
            own: number,
            parent,
            seed: self.output.seed.of_inode(number.0),
        };
        let mut all = Cow::Borrowed(entries);
        if number == InodeNumber::ROOT && self.identity.lost_and_found {
            all.to_mut().push(DirEntry {
                name: LOST_AND_FOUND,
                inode: InodeNumber(inode_number::FIRST),
                kind: FileKind::Directory,
            });
        }
        let written = directory::write(own, &all, &self.hasher, &mut self.output)?;
        self.table.count_directory(number);
        let is_directory = |entry: &&DirEntry<'_>| entry.kind == FileKind::Directory;
        self.directory_body(number, &written, all.iter().filter(is_directory).count())
    }

    fn directory_body(
        &mut self,
        number: InodeNumber,
        written: &directory::Written,
        subdirectories: usize,
    ) -> Result<Body, Ext4Error> {
        let blocks: u64 = written.ranges.iter().map(|range| range.count).sum();
        let extents = extents::of_ranges(&written.ranges);
        let mut body = self.body(number, blocks * BLOCK_BYTES as u64, &extents)?;
        if written.has_index {
            body.flags |= inode_flags::INDEX;
        }
        // From there on, ext4 does not count.
        body.links = match subdirectories as u32 + 2 {
            links @ ..LINK_MAX => links as u16,
            _ => 1,
        };
        Ok(body)
    }

    fn symlink(&mut self, number: InodeNumber, target: &[u8]) -> Result<Body, Ext4Error> {
        if target.is_empty() || target.len() >= BLOCK_BYTES || target.contains(&0) {
            return Err(number.refused(InodeProblem::LinkTarget(target.len())));
        }
        let bytes = target.len() as u64;
        if target.len() < FAST_LINK_BYTES {
            let mut block = [0; 60];
            block[..target.len()].copy_from_slice(target);
            return Ok(Body {
                bytes,
                block,
                ..empty()
            });
        }
        let range = self.output.space.allocate(1)?;
        let mut buffer = [0; BLOCK_BYTES];
        buffer[..target.len()].copy_from_slice(target);
        self.output.write(range.start, &buffer)?;
        self.body(number, bytes, &extents::of_ranges(&[range]))
    }

    /// A node of the file system's own: owned by root, made when it was made.
    fn own_node<'n>(&self, permissions: u16, content: Content<'n>) -> Node<'n> {
        let time = Timestamp {
            seconds: self.identity.created.into(),
            nanoseconds: 0,
        };
        Node {
            permissions,
            uid: 0,
            gid: 0,
            accessed: time,
            modified: time,
            changed: time,
            created: time,
            links: 1,
            xattrs: &[],
            content,
        }
    }

    fn lost_and_found(&mut self) -> Result<(), Ext4Error> {
        let number = InodeNumber(inode_number::FIRST);
        let own = directory::Identity {
            own: number,
            parent: InodeNumber::ROOT,
            seed: self.output.seed.of_inode(number.0),
        };
        let written = directory::write_blocks(own, &[], LOST_AND_FOUND_BLOCKS, &mut self.output)?;
        let body = self.directory_body(number, &written, 0)?;
        self.table.count_directory(number);
        let content = Content::Directory {
            parent: InodeNumber::ROOT,
            entries: &[],
        };
        self.put(number, &self.own_node(0o700, content), &body)
    }

    /// Writes the journal. Returns its inode's place for blocks, and its length in bytes.
    fn journal(&mut self) -> Result<([u8; 60], u64), Ext4Error> {
        let number = InodeNumber(inode_number::JOURNAL);
        let ranges = self.geometry.journal();
        let blocks: u64 = ranges.iter().map(|range| range.count).sum();
        let bytes = blocks * BLOCK_BYTES as u64;
        let header = JournalSuperBlock {
            magic: JOURNAL_MAGIC.into(),
            block_type: JOURNAL_SUPERBLOCK.into(),
            header_sequence: 0.into(),
            block_bytes: (BLOCK_BYTES as u32).into(),
            blocks: (blocks as u32).into(),
            first: 1.into(),
            sequence: 1.into(),
            start: 0.into(),
            uuid: self.identity.uuid,
            users: 1.into(),
            ..JournalSuperBlock::new_zeroed()
        };
        let mut buffer = [0; BLOCK_BYTES];
        buffer[..size_of::<JournalSuperBlock>()].copy_from_slice(header.as_bytes());
        self.output.write(ranges[0].start, &buffer)?;
        let mut body = self.body(number, bytes, &extents::of_ranges(ranges))?;
        body.links = 1;
        let content = Content::File {
            bytes,
            extents: &[],
        };
        self.put(number, &self.own_node(0o600, content), &body)?;
        Ok((body.block, bytes))
    }

    /// Writes bitmaps. Returns the descriptors of all groups.
    fn groups(&mut self, inodes: u32) -> Result<Vec<u8>, Ext4Error> {
        let per_group = self.geometry.inodes_per_group();
        let bytes = self.geometry.descriptor_blocks() as usize * BLOCK_BYTES;
        let mut all = vec![0; bytes];
        let (descriptors, _) = all.as_chunks_mut::<DESCRIPTOR_BYTES>();
        for (group, place) in (0..self.geometry.groups()).zip(descriptors) {
            let used = inodes.saturating_sub(group * per_group).min(per_group);
            let descriptor = self.group(group, used)?;
            place.copy_from_slice(descriptor.as_bytes());
        }
        Ok(all)
    }

    fn group(&mut self, group: u32, used_inodes: u32) -> Result<GroupDescriptor, Ext4Error> {
        let tables = self.geometry.tables(group);
        let per_group = self.geometry.inodes_per_group();
        let mut descriptor = GroupDescriptor::new_zeroed();
        let mut flags = group_flags::TABLE_ZEROED;
        let seed = self.output.seed;
        match self.output.space.group(group).copied() {
            None => flags |= group_flags::BLOCKS_UNUSED,
            Some(bitmap) => {
                self.output.write(tables.block_bitmap, &bitmap)?;
                let (low, high) = seed.with(&bitmap).halves();
                descriptor.block_bitmap_checksum_low = low.into();
                descriptor.block_bitmap_checksum_high = high.into();
            }
        }
        if used_inodes == 0 {
            flags |= group_flags::INODES_UNUSED;
        } else {
            let mut bitmap = [0; BLOCK_BYTES];
            set_bits(&mut bitmap, 0, used_inodes as usize);
            set_bits(&mut bitmap, per_group as usize, BLOCKS_PER_GROUP as usize);
            self.output.write(tables.inode_bitmap, &bitmap)?;
            let (low, high) = seed.with(&bitmap[..per_group as usize / 8]).halves();
            descriptor.inode_bitmap_checksum_low = low.into();
            descriptor.inode_bitmap_checksum_high = high.into();
        }
        let free_blocks = self.output.space.free_blocks(group);
        // All numbers below the greatest are in use: what is free was never used.
        let free_inodes = per_group - used_inodes;
        let d = &mut descriptor;
        (d.block_bitmap_low, d.block_bitmap_high) = halves_of_64(tables.block_bitmap);
        (d.inode_bitmap_low, d.inode_bitmap_high) = halves_of_64(tables.inode_bitmap);
        (d.inode_table_low, d.inode_table_high) = halves_of_64(tables.inode_table);
        (d.free_blocks_low, d.free_blocks_high) = halves_of_32(free_blocks);
        (d.free_inodes_low, d.free_inodes_high) = halves_of_32(free_inodes);
        (d.unused_inodes_low, d.unused_inodes_high) = halves_of_32(free_inodes);
        (d.directories_low, d.directories_high) = halves_of_32(self.table.directories(group));
        descriptor.flags = flags.into();
        let checksum = seed.with(&group.to_le_bytes()).with(descriptor.as_bytes());
        descriptor.checksum = checksum.halves().0.into();
        Ok(descriptor)
    }

    /// Writes the backups of superblock and descriptors, then the descriptors, and the superblock
    /// last.
    fn superblocks(
        &mut self,
        descriptors: &[u8],
        journal: &([u8; 60], u64),
        summary: &Summary,
    ) -> Result<(), Ext4Error> {
        let mut superblock = self.superblock(journal, summary);
        for &group in self.geometry.backups() {
            let start = self.geometry.group_range(group).start * BLOCK_BYTES as u64;
            superblock.group = (group as u16).into();
            superblock.checksum = Checksum::of_superblock(&superblock).0.into();
            self.output.sink.write_at(start, superblock.as_bytes())?;
            self.output
                .sink
                .write_at(start + BLOCK_BYTES as u64, descriptors)?;
        }
        self.output.sink.write_at(BLOCK_BYTES as u64, descriptors)?;
        superblock.group = 0.into();
        superblock.checksum = Checksum::of_superblock(&superblock).0.into();
        let at = SUPERBLOCK_OFFSET as u64;
        Ok(self.output.sink.write_at(at, superblock.as_bytes())?)
    }

    fn superblock(&self, journal: &([u8; 60], u64), summary: &Summary) -> SuperBlock {
        let geometry = self.geometry;
        let mut superblock = SuperBlock::new_zeroed();
        superblock.inodes = geometry.inodes().into();
        (superblock.blocks_low, superblock.blocks_high) = halves_of_64(geometry.blocks());
        let free_blocks = halves_of_64(summary.free_blocks);
        (superblock.free_blocks_low, superblock.free_blocks_high) = free_blocks;
        superblock.free_inodes = (geometry.inodes() - summary.inodes).into();
        superblock.log_block_size = 2.into();
        superblock.log_cluster_size = 2.into();
        superblock.blocks_per_group = (BLOCKS_PER_GROUP as u32).into();
        superblock.clusters_per_group = (BLOCKS_PER_GROUP as u32).into();
        superblock.inodes_per_group = geometry.inodes_per_group().into();
        superblock.write_time = self.identity.created.into();
        superblock.check_time = self.identity.created.into();
        superblock.make_time = self.identity.created.into();
        superblock.max_mounts = u16::MAX.into();
        superblock.magic = MAGIC.into();
        superblock.state = 1.into();
        superblock.errors = REMOUNT_READ_ONLY.into();
        superblock.revision = 1.into();
        superblock.first_inode = inode_number::FIRST.into();
        superblock.inode_bytes = (INODE_BYTES as u16).into();
        superblock.compatible =
            (compatible::JOURNAL | compatible::XATTR | compatible::DIRECTORY_INDEX).into();
        superblock.incompatible = (incompatible::FILE_TYPE
            | incompatible::META_BLOCK_GROUPS
            | incompatible::EXTENTS
            | incompatible::BITS_64
            | incompatible::FLEXIBLE_GROUPS)
            .into();
        superblock.read_only_compatible = (read_only_compatible::SPARSE_SUPERBLOCKS
            | read_only_compatible::LARGE_FILE
            | read_only_compatible::HUGE_FILE
            | read_only_compatible::DIRECTORY_LINKS
            | read_only_compatible::EXTRA_INODE_BYTES
            | read_only_compatible::METADATA_CHECKSUM)
            .into();
        superblock.uuid = self.identity.uuid;
        superblock.label = self.identity.label;
        superblock.journal_inode = inode_number::JOURNAL.into();
        superblock.hash_seed = self.identity.hash_seed;
        superblock.hash_version = HASH_HALF_MD4;
        superblock.journal_backup_type = 1;
        superblock.descriptor_bytes = (DESCRIPTOR_BYTES as u16).into();
        superblock.mount_options = (OPTION_XATTR | OPTION_ACL).into();
        superblock.first_meta_group = (geometry.descriptor_blocks() as u32).into();
        let (words, _) = journal.0.as_chunks::<4>();
        for (place, word) in superblock.journal_blocks.iter_mut().zip(words) {
            *place = u32::from_le_bytes(*word).into();
        }
        superblock.journal_blocks[15] = ((journal.1 >> 32) as u32).into();
        superblock.journal_blocks[16] = (journal.1 as u32).into();
        superblock.min_extra_bytes = EXTRA_BYTES.into();
        superblock.want_extra_bytes = EXTRA_BYTES.into();
        superblock.flags = UNSIGNED_HASH.into();
        superblock.log_groups_per_flex = LOG_GROUPS_PER_FLEX;
        superblock.checksum_type = CRC32C;
        superblock
    }
}

/// After an error the kernel mounts the file system read-only.
const REMOUNT_READ_ONLY: u16 = 2;
/// Extended attributes and ACLs without a mount option.
const OPTION_XATTR: u32 = 0x4;
const OPTION_ACL: u32 = 0x8;
/// The value of `mke2fs`: groups that Linux takes as one when it places new files.
const LOG_GROUPS_PER_FLEX: u8 = 4;
/// Type of checksums.
const CRC32C: u8 = 1;

const _: () = assert!(BLOCK_BYTES == DESCRIPTORS_PER_BLOCK as usize * DESCRIPTOR_BYTES);

/// An inode without content and attributes.
fn empty() -> Body {
    Body {
        bytes: 0,
        block: [0; 60],
        blocks: 0,
        flags: 0,
        links: 0,
        xattr_block: 0,
        xattrs: [0; IN_INODE_BYTES],
    }
}
