//! Lays out a tree as an EROFS file system and writes its metadata.
//!
//! File data is in the address space already. The writer adds one run of blocks behind it, the
//! metadata area: inodes with their xattrs, chunk tables and tails; directory blocks; and shared
//! xattrs at the end. The superblock in block 0 is made last.
//!
//! ```text
//! metadata_start                                                         end
//! | slot 0 empty | root (nid 1) | its directory blocks, children's inodes | first
//!   subdirectory: directory blocks, children's inodes | ... | shared xattrs |
//! ```
//!
//! The order is that of a depth-first walk, and each directory's blocks come just before the inodes
//! of its children, so `ls -l` and `find` read forward. Slot 0 stays empty, because many programs
//! take the inode number 0 for "no file", and so that the root gets nid 1, its number in FUSE.

mod dirs;
mod emit;
mod layout;
mod places;
mod space;
mod xattrs;

use zerocopy::{FromZeros, IntoBytes};

use crate::format::{self, DeviceSlot, SuperBlock, compatible, incompatible};
use crate::tree::{TailSource, Tree, display_path};
use emit::Emitter;
use layout::Layout;
use xattrs::XattrTable;

pub use places::MetadataPlace;
pub use xattrs::XattrProblem;

/// The location of the metadata, and options of the layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteOptions {
    /// Byte position of the metadata in the address space: a multiple of 4096, and at least 4096
    /// (block 0 has the superblock). File data lies elsewhere.
    pub metadata_start: u64,
    /// Longest inline tail of a regular file, in bytes, at most [`MAX_INLINE`]. Longer tails must
    /// be in blocks already; a longer [`crate::tree::Tail`] is an error.
    pub inline_max: u16,
}

/// Largest value of [`WriteOptions::inline_max`], in bytes.
///
/// A tail must not cross a block boundary, and an inode's xattrs can end at any multiple of 4
/// bytes. Up to this length, the layout can always place the inode so that its tail fits into the
/// block.
pub const MAX_INLINE: u16 = 4032;

/// A tree cannot be written as EROFS.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The file system would exceed 2^32 blocks, or its metadata 2^32 inode slots.
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
        /// The field of [`WriteOptions`].
        option: &'static str,
        /// Its value.
        value: u64,
        /// The allowed values.
        reason: &'static str,
    },
    /// A tail is longer than [`WriteOptions::inline_max`].
    #[error(
        "{}: the length in bytes of its tail is {length}, the limit is {inline_max}",
        display_path(.path)
    )]
    Tail {
        /// Path of the file.
        path: Vec<u8>,
        /// Length of its tail.
        length: u16,
        /// The limit in the options.
        inline_max: u16,
    },
    /// EROFS cannot store an extended attribute.
    #[error(
        "{}: cannot store the extended attribute {}: {problem}",
        display_path(.path), String::from_utf8_lossy(.name).escape_debug()
    )]
    Xattr {
        /// Path of the file.
        path: Vec<u8>,
        /// Full name of the attribute.
        name: Vec<u8>,
        /// The limit that the attribute exceeds.
        problem: XattrProblem,
    },
}

/// The reason why [`Plan::write`] stopped.
#[derive(Debug, thiserror::Error)]
pub enum EmitError<E> {
    /// A tail could not be read back.
    #[error("cannot read a file tail back: {0}")]
    Tail(std::io::Error),
    /// The output returned an error.
    #[error(transparent)]
    Output(E),
}

/// The layout of a file system, ready to be written.
pub struct Plan<'t> {
    tree: &'t Tree,
    metadata_block: u32,
    layout: Layout,
    xattrs: XattrTable<'t>,
    uuid: [u8; 16],
    windows: Vec<ContentWindow>,
    extra_devices: u16,
}

/// A range of content whose address is known only after the metadata is laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContentWindow {
    /// First block address in the tree.
    pub from: u32,
    /// First block in the address space.
    pub to: u32,
    /// Number of blocks.
    pub blocks: u32,
}

impl<'t> Plan<'t> {
    /// Lays out `tree`.
    ///
    /// The same tree and options give the same plan. A plan takes about 30 bytes of memory per
    /// inode, in addition to the tree.
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
            // The layout has checked that its end is below 2^32 blocks.
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

    /// Sets the volume id, which is zero by default. An id derived from the content keeps images
    /// deterministic.
    pub fn with_uuid(mut self, uuid: [u8; 16]) -> Self {
        self.uuid = uuid;
        self
    }

    /// Sets the actual addresses of content that the tree addresses by other numbers. So content
    /// behind the metadata can have an address before the size of the metadata is known. `windows`
    /// are sorted by `from`; addresses outside all windows stay unchanged.
    ///
    /// Returns [`WriteError::TooLarge`] if the end of a window exceeds 2^32 blocks.
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

    /// Declares a table of `devices` devices ([`device_table`]) at byte 4096, directly behind the
    /// superblock's block.
    pub fn with_device_table(mut self, devices: u16) -> Self {
        self.extra_devices = devices;
        self
    }

    /// The block in the address space for a block address of the tree.
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
        (self.layout.blocks + self.xattrs.shared_bytes.div_ceil(block)) * block
    }

    /// Number of inodes.
    pub fn inodes(&self) -> u64 {
        self.tree.len() as u64
    }

    /// Writes exactly [`Plan::metadata_bytes`] bytes to `out`, in order, in pieces of up to 128
    /// KiB. Tails are read from `tails`.
    pub fn write<E>(
        &self,
        tails: &dyn TailSource,
        out: &mut dyn FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), EmitError<E>> {
        Emitter::new(self, tails, out).run()
    }

    /// Bytes 1024..4096 of block 0, with checksum. `total_blocks` is the size of the address space
    /// in blocks of 4096 bytes; `statfs` shows it.
    pub fn superblock(&self, total_blocks: u64) -> [u8; 3072] {
        let time = self.layout.build_time;
        let mut features = 0;
        if self.layout.has_chunks {
            features |= incompatible::CHUNKED_FILE;
        }
        let mut device_table_slot = 0;
        if self.extra_devices > 0 {
            features |= incompatible::DEVICE_TABLE;
            device_table_slot = format::BLOCK_BYTES / size_of::<DeviceSlot>();
        }
        // Without shared xattrs, the address is never used.
        let xattr_block = match self.xattrs.shared_bytes {
            0 => 0,
            _ => self.metadata_block + self.layout.blocks as u32,
        };
        let mut superblock = SuperBlock {
            magic: format::MAGIC.into(),
            feature_compat: (compatible::SUPERBLOCK_CHECKSUM | compatible::MTIME).into(),
            block_shift: format::BLOCK_SHIFT,
            root_nid: (self.layout.placed(Tree::ROOT).nid as u16).into(),
            inodes: self.inodes().into(),
            build_time: (time.seconds as u64).into(),
            build_time_nanoseconds: time.nanoseconds.into(),
            blocks: u32::try_from(total_blocks).unwrap_or(u32::MAX).into(),
            metadata_block: self.metadata_block.into(),
            xattr_block: xattr_block.into(),
            uuid: self.uuid,
            feature_incompat: features.into(),
            extra_devices: self.extra_devices.into(),
            device_table_slot: (device_table_slot as u16).into(),
            ..SuperBlock::new_zeroed()
        };
        let mut bytes = [0; format::BLOCK_BYTES - format::SUPERBLOCK_OFFSET];
        bytes[..size_of::<SuperBlock>()].copy_from_slice(superblock.as_bytes());
        superblock.checksum = format::superblock_checksum(&bytes).into();
        bytes[..size_of::<SuperBlock>()].copy_from_slice(superblock.as_bytes());
        bytes
    }
}

/// Number of bytes of a device table.
pub fn device_table_bytes(devices: u16) -> u64 {
    let bytes = usize::from(devices) * size_of::<DeviceSlot>();
    bytes.next_multiple_of(format::BLOCK_BYTES) as u64
}

/// The bytes of a device table, padded with zeros to a multiple of 4096 bytes. Each window is an
/// extra device, beside the one with the metadata, for a kernel mount with `device=` options.
pub fn device_table(devices: &[ContentWindow]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for device in devices {
        let slot = DeviceSlot {
            tag: [0; 64],
            blocks: device.blocks.into(),
            mapped_block: device.to.into(),
            reserved: [0; 56],
        };
        bytes.extend_from_slice(slot.as_bytes());
    }
    bytes.resize(bytes.len().next_multiple_of(format::BLOCK_BYTES), 0);
    bytes
}
