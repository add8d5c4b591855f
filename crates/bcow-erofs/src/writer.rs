//! Lays a tree out as an EROFS file system and writes its metadata.
//!
//! File data lies in the address space already. What is written here is one run of blocks behind it, the
//! metadata area: inodes with their xattrs, chunk tables and tails; directory blocks; shared xattrs at the
//! end. The superblock in block 0 is made last.
//!
//! ```text
//! metadata_start                                                         end
//! | slot 0 empty | root (nid 1) | its directory blocks, children's inodes | first
//!   subdirectory: directory blocks, children's inodes | ... | shared xattrs |
//! ```
//!
//! The order is that of a depth-first walk, and each directory's blocks come just before the inodes of its
//! children: `ls -l` and `find` read forward. Slot 0 stays empty because an inode number of 0 means "no
//! file" to many programs, and so that the root gets nid 1, FUSE's number for it.

mod dirs;
mod emit;
mod layout;
mod space;
mod xattrs;

use zerocopy::IntoBytes;

use crate::format::{self, DeviceSlot, SuperBlock, compatible, incompatible};
use crate::tree::{TailSource, Tree, show};
use emit::Emitter;
use layout::Layout;
use xattrs::XattrTable;

pub use xattrs::{XattrProblem, check as check_xattr};

/// Where and how the metadata is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteOptions {
    /// Byte position in the address space where the metadata starts; a multiple of 4096, and at least that
    /// (block 0 belongs to the superblock). File data lies elsewhere.
    pub metadata_start: u64,
    /// Biggest tail that a regular file keeps beside its inode, in bytes, at most [`MAX_INLINE`].
    /// Longer ones are in blocks already; a [`crate::tree::Tail`] that is longer is refused.
    pub inline_max: u16,
}

/// The most that [`WriteOptions::inline_max`] may be.
///
/// A tail must not cross a block, wherever its inode's xattrs end (a multiple of 4 bytes); up to this length
/// there is always a place for the inode that makes that so.
pub const MAX_INLINE: u16 = 4032;

/// Why a tree cannot be written as EROFS.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The file system would pass 2^32 blocks, or its metadata 2^32 inode slots.
    #[error(
        "the file system's metadata would span bytes {start}..{end}; \
         EROFS addresses reach to 16 TiB, and 128 GiB of metadata"
    )]
    TooLarge {
        /// Start of the metadata in bytes.
        start: u64,
        /// End of the metadata in bytes, as far as it was laid out.
        end: u64,
    },
    /// An option is out of range.
    #[error("{option} = {value}: {reason}")]
    Option {
        /// Field of [`WriteOptions`].
        option: &'static str,
        /// Its value.
        value: u64,
        /// What is allowed.
        reason: &'static str,
    },
    /// A tail is longer than [`WriteOptions::inline_max`].
    #[error("{}: a tail of {length} bytes, but at most {inline_max} are kept inline", show(.path))]
    Tail {
        /// Path of the file.
        path: Vec<u8>,
        /// Length of its tail.
        length: u16,
        /// What the options allow.
        inline_max: u16,
    },
    /// An extended attribute that EROFS cannot hold.
    #[error(
        "{}: cannot store the extended attribute {}: {problem}",
        show(.path), String::from_utf8_lossy(.name).escape_debug()
    )]
    Xattr {
        /// Path of the file.
        path: Vec<u8>,
        /// Full name of the attribute.
        name: Vec<u8>,
        /// Which limit it passes.
        problem: XattrProblem,
    },
}

/// Why [`Plan::write`] stopped.
#[derive(Debug, thiserror::Error)]
pub enum EmitError<E> {
    /// A tail could not be read back.
    #[error("cannot read a file tail back: {0}")]
    Tail(std::io::Error),
    /// The output refused.
    #[error(transparent)]
    Output(E),
}

/// A laid-out file system, ready to be written.
pub struct Plan<'t> {
    tree: &'t Tree,
    metadata_block: u32,
    layout: Layout,
    xattrs: XattrTable<'t>,
    uuid: [u8; 16],
    windows: Vec<ContentWindow>,
    extra_devices: u16,
}

/// Content whose place in the address space is known only when the metadata is laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContentWindow {
    /// The block address from which on the tree names it.
    pub from: u32,
    /// The block of the address space where it lies.
    pub to: u32,
    /// How many blocks.
    pub blocks: u32,
}

impl<'t> Plan<'t> {
    /// Lays `tree` out.
    ///
    /// The same tree and options give the same plan. Memory: some 30 bytes per inode beside the tree.
    pub fn new(tree: &'t Tree, options: &WriteOptions) -> Result<Plan<'t>, WriteError> {
        let block = format::BLOCK_BYTES as u64;
        let start = options.metadata_start;
        if start == 0 || !start.is_multiple_of(block) {
            return Err(WriteError::Option {
                option: "metadata_start",
                value: start,
                reason: "a multiple of 4096 above 0 is needed",
            });
        }
        if options.inline_max > MAX_INLINE {
            return Err(WriteError::Option {
                option: "inline_max",
                value: options.inline_max.into(),
                reason: "at most 4032 bytes fit beside an inode",
            });
        }
        let xattrs = XattrTable::new(tree)?;
        let layout = Layout::new(tree, options, &xattrs)?;
        let plan = Plan {
            tree,
            // Checked by the layout, whose end is below 2^32 blocks.
            metadata_block: (start / block) as u32,
            layout,
            xattrs,
            uuid: [0; 16],
            windows: Vec::new(),
            extra_devices: 0,
        };
        let end = start.saturating_add(plan.metadata_bytes());
        if end / block >= u64::from(format::NULL_BLOCK) {
            return Err(WriteError::TooLarge { start, end });
        }
        Ok(plan)
    }

    /// Sets the volume id, which is zero otherwise. Something derived from the content keeps images
    /// deterministic.
    pub fn with_uuid(mut self, uuid: [u8; 16]) -> Self {
        self.uuid = uuid;
        self
    }

    /// Says where content lies that the tree names by other addresses: so what lies behind the metadata can be addressed
    /// before the size of the metadata is known. `windows` are sorted by `from`; addresses in none of them stay.
    ///
    /// [`WriteError::TooLarge`] if the end of a window passes 2^32 blocks.
    pub fn with_windows(mut self, windows: Vec<ContentWindow>) -> Result<Self, WriteError> {
        let block = format::BLOCK_BYTES as u64;
        for window in &windows {
            let end = u64::from(window.to) + u64::from(window.blocks);
            if end >= u64::from(format::NULL_BLOCK) {
                return Err(WriteError::TooLarge {
                    start: u64::from(self.metadata_block) * block,
                    end: end * block,
                });
            }
        }
        self.windows = windows;
        Ok(self)
    }

    /// Says that a table of so many devices ([`device_table`]) stands at byte 4096, right behind the superblock's
    /// block.
    pub fn with_device_table(mut self, devices: u16) -> Self {
        self.extra_devices = devices;
        self
    }

    /// Where the content at this block of the tree's addresses lies in the address space.
    fn place(&self, block: u32) -> u32 {
        let behind = self.windows.partition_point(|window| window.from <= block);
        match self.windows[..behind].last() {
            Some(window) if block - window.from < window.blocks => {
                window.to + (block - window.from)
            }
            _ => block,
        }
    }

    /// Size of the metadata in bytes, a multiple of 4096.
    pub fn metadata_bytes(&self) -> u64 {
        let block = format::BLOCK_BYTES as u64;
        (self.layout.blocks() + self.xattrs.shared_bytes().div_ceil(block)) * block
    }

    /// Number of inodes.
    pub fn inodes(&self) -> u64 {
        self.tree.len() as u64
    }

    /// Writes exactly [`Plan::metadata_bytes`] bytes to `out`, in order, in pieces of up to 128 KiB.
    /// Tails come from `tails`.
    pub fn write<E>(
        &self,
        tails: &dyn TailSource,
        out: &mut dyn FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), EmitError<E>> {
        Emitter::new(self, tails, out).run()
    }

    /// Bytes 1024..4096 of block 0, with checksum. `total_blocks` is the size of the address space in
    /// blocks of 4096 bytes, which `statfs` shows.
    pub fn superblock(&self, total_blocks: u64) -> [u8; 3072] {
        let time = self.layout.build_time();
        let mut features = 0;
        if self.layout.has_chunks() {
            features |= incompatible::CHUNKED_FILE;
        }
        let mut device_table_slot = 0;
        if self.extra_devices > 0 {
            features |= incompatible::DEVICE_TABLE;
            device_table_slot = format::BLOCK_BYTES / size_of::<DeviceSlot>();
        }
        // No shared xattrs: the address is never used.
        let xattr_block = match self.xattrs.shared_bytes() {
            0 => 0,
            _ => self.metadata_block + self.layout.blocks() as u32,
        };
        let mut superblock = SuperBlock {
            magic: format::MAGIC.into(),
            checksum: 0.into(),
            feature_compat: (compatible::SUPERBLOCK_CHECKSUM | compatible::MTIME).into(),
            block_shift: format::BLOCK_SHIFT,
            extension_slots: 0,
            root_nid: (self.layout.placed(Tree::ROOT).nid as u16).into(),
            inodes: self.inodes().into(),
            build_time: (time.seconds as u64).into(),
            build_time_nanoseconds: time.nanoseconds.into(),
            blocks: u32::try_from(total_blocks).unwrap_or(u32::MAX).into(),
            metadata_block: self.metadata_block.into(),
            xattr_block: xattr_block.into(),
            uuid: self.uuid,
            volume_name: [0; 16],
            feature_incompat: features.into(),
            compression: 0.into(),
            extra_devices: self.extra_devices.into(),
            device_table_slot: (device_table_slot as u16).into(),
            directory_block_shift: 0,
            xattr_prefix_count: 0,
            xattr_prefix_start: 0.into(),
            packed_nid: 0.into(),
            reserved: [0; 24],
        };
        let mut bytes = [0; format::BLOCK_BYTES - format::SUPERBLOCK_OFFSET];
        bytes[..size_of::<SuperBlock>()].copy_from_slice(superblock.as_bytes());
        superblock.checksum = format::superblock_checksum(&bytes).into();
        bytes[..size_of::<SuperBlock>()].copy_from_slice(superblock.as_bytes());
        bytes
    }
}

/// A device beside the one that holds the metadata, for a kernel mount with `device=` options.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    /// Size in blocks of 4096 bytes.
    pub blocks: u32,
    /// Block of the address space where it is shown; not 0.
    pub start: u32,
}

/// The bytes of a device table, with zeros up to a multiple of 4096 bytes.
pub fn device_table(devices: &[Device]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for device in devices {
        let slot = DeviceSlot {
            tag: [0; 64],
            blocks: device.blocks.into(),
            mapped_block: device.start.into(),
            reserved: [0; 56],
        };
        bytes.extend_from_slice(slot.as_bytes());
    }
    bytes.resize(bytes.len().next_multiple_of(format::BLOCK_BYTES), 0);
    bytes
}
