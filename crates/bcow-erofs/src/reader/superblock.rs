//! The superblock.

use bcow::BlockDevice;
use zerocopy::FromBytes;

use super::error::names;
use super::{ErofsError, Nid};
use crate::format::{self, DeviceSlot, SLOT_BYTES, SuperBlock, compatible, incompatible};
use crate::tree::Timestamp;

/// The supported incompatible features. The bits for compression only mean that compressed files
/// may exist; opening such a file is an error.
const SUPPORTED: u32 = incompatible::ZERO_PADDING
    | incompatible::COMPRESSION_CONFIGS
    | incompatible::CHUNKED_FILE
    | incompatible::DEVICE_TABLE
    | incompatible::COMPRESSED_TAILS
    | incompatible::FRAGMENTS;

/// The fields of a valid superblock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Superblock {
    /// Block size in bytes, 512..=4096.
    pub block_bytes: u32,
    /// The root directory.
    pub root: Nid,
    /// Number of inodes, not verified.
    pub inodes: u64,
    /// Number of blocks, not verified.
    pub blocks: u64,
    /// Time of compact inodes.
    pub build_time: Timestamp,
    /// Volume id.
    pub uuid: [u8; 16],
    /// Volume name without trailing NULs.
    pub volume_name: Vec<u8>,
    /// Compatible feature bits.
    pub features_compatible: u32,
    /// Incompatible feature bits.
    pub features_incompatible: u32,
    /// First byte of the metadata area.
    pub metadata_offset: u64,
    /// First byte of the shared xattrs.
    pub xattr_offset: u64,
    /// Byte addresses of the extra devices in the first device's address space, in order; 0 for a
    /// device that is not mapped.
    pub devices: Vec<u64>,
}

impl Superblock {
    /// All feature bits by name, compatible ones first.
    pub fn features(&self) -> Vec<String> {
        let mut all = names(self.features_compatible, compatible::NAMES);
        all.extend(names(self.features_incompatible, incompatible::NAMES));
        all
    }

    pub(super) fn read(device: &dyn BlockDevice) -> Result<Superblock, ErofsError> {
        let device_bytes = device.size();
        let offset = format::SUPERBLOCK_OFFSET;
        let raw_bytes = size_of::<SuperBlock>();
        if device_bytes < (offset + raw_bytes) as u64 {
            return Err(ErofsError::TooSmall { device_bytes });
        }
        // Read to the end of the largest block, for the checksum.
        let mut buf = [0; format::BLOCK_BYTES - format::SUPERBLOCK_OFFSET];
        let available = buf.len().min((device_bytes - offset as u64) as usize);
        device.read_at(offset as u64, &mut buf[..available])?;
        let Ok((raw, _)) = SuperBlock::ref_from_prefix(&buf) else {
            return Err(ErofsError::TooSmall { device_bytes });
        };
        let found = raw.magic.get();
        if found != format::MAGIC {
            return Err(ErofsError::NotErofs { found });
        }
        let unsupported = |field, value| Err(ErofsError::UnsupportedValue { field, value });
        let damaged = |field, value| Err(ErofsError::Superblock { field, value });
        let unknown = raw.feature_incompat.get() & !SUPPORTED;
        if unknown != 0 {
            return Err(ErofsError::UnsupportedFeature { bits: unknown });
        }
        if !(9..=format::BLOCK_SHIFT).contains(&raw.block_shift) {
            return unsupported("block size shift", raw.block_shift.into());
        }
        if raw.directory_block_shift != 0 {
            let value = raw.directory_block_shift.into();
            return unsupported("directory block size shift", value);
        }
        check_checksum(raw, &buf, available)?;
        let build_time = Timestamp {
            seconds: raw.build_time.get() as i64,
            nanoseconds: raw.build_time_nanoseconds.get(),
        };
        if build_time.nanoseconds >= 1_000_000_000 {
            return damaged("build time nanoseconds", build_time.nanoseconds.into());
        }
        let metadata_offset = u64::from(raw.metadata_block.get()) << raw.block_shift;
        let root = Nid(raw.root_nid.get().into());
        if metadata_offset + root.0 * SLOT_BYTES as u64 >= device_bytes {
            return damaged("metadata block", raw.metadata_block.get().into());
        }
        let devices = read_devices(device, raw)?;
        let name = &raw.volume_name;
        let name_bytes = name.iter().position(|&b| b == 0).unwrap_or(name.len());
        Ok(Superblock {
            block_bytes: 1 << raw.block_shift,
            root,
            inodes: raw.inodes.get(),
            blocks: raw.blocks.get().into(),
            build_time,
            uuid: raw.uuid,
            volume_name: name[..name_bytes].to_vec(),
            features_compatible: raw.feature_compat.get(),
            features_incompatible: raw.feature_incompat.get(),
            metadata_offset,
            xattr_offset: u64::from(raw.xattr_block.get()) << raw.block_shift,
            devices,
        })
    }
}

fn read_devices(device: &dyn BlockDevice, raw: &SuperBlock) -> Result<Vec<u64>, ErofsError> {
    // Without devices, the same bit means a second compression algorithm.
    if raw.feature_incompat.get() & incompatible::DEVICE_TABLE == 0 {
        return Ok(Vec::new());
    }
    let slot_bytes = size_of::<DeviceSlot>();
    let offset = u64::from(raw.device_table_slot.get()) * slot_bytes as u64;
    // At most 8 MiB, and checked to be on the device.
    let bytes = usize::from(raw.extra_devices.get()) * slot_bytes;
    if offset + bytes as u64 > device.size() {
        return Err(ErofsError::Superblock {
            field: "device table slot",
            value: raw.device_table_slot.get().into(),
        });
    }
    let mut table = vec![0; bytes];
    device.read_at(offset, &mut table)?;
    let slots = table.chunks_exact(slot_bytes);
    Ok(slots
        .filter_map(|slot| DeviceSlot::ref_from_bytes(slot).ok())
        .map(|slot| u64::from(slot.mapped_block.get()) << raw.block_shift)
        .collect())
}

// Cargo does not know the cfg that cargo-fuzz sets.
#[allow(unexpected_cfgs)]
fn check_checksum(raw: &SuperBlock, buf: &[u8], available: usize) -> Result<(), ErofsError> {
    // A fuzzer would never produce a valid checksum.
    if raw.feature_compat.get() & compatible::SUPERBLOCK_CHECKSUM == 0 {
        return Ok(());
    }
    // The checksum covers the rest of the block that holds the superblock; with small blocks, one
    // block's length.
    let block = 1usize << raw.block_shift;
    let covered = match block.checked_sub(format::SUPERBLOCK_OFFSET) {
        None | Some(0) => block,
        Some(rest) => rest,
    };
    let expected = raw.checksum.get();
    let Some(bytes) = buf[..available].get(..covered) else {
        let device_bytes = (format::SUPERBLOCK_OFFSET + available) as u64;
        return Err(ErofsError::TooSmall { device_bytes });
    };
    let found = format::superblock_checksum(bytes);
    if found != expected {
        return Err(ErofsError::SuperblockChecksum { expected, found });
    }
    Ok(())
}
