//! The last part of an image: the metadata of its file system, and a window onto each image that
//! has content of its files.

use std::fs::File;
use std::path::Path;

use bcow::format::{BackingEntry, BackingName};
use bcow::{Error, ImageWriter, WriterOptions, Written};
use bcow_erofs::tree::{TailSource, Tree};
use bcow_erofs::writer::{
    ContentWindow, Plan, WriteError, WriteOptions, device_table, device_table_bytes,
};

use crate::content::ContentStats;
use crate::error::ConvertError;
use crate::image_file::{emit, image_error, plan_error};
use crate::metadata::Metadata;
use crate::prefetch::Prefetch;
use crate::space::{BLOCK_BYTES, REGION_BYTES, Shown};

/// What follows the content of an image.
pub(crate) struct Ending<'e> {
    pub tree: &'e Tree,
    pub tails: &'e dyn TailSource,
    /// The images with windows, in the order of their block numbers.
    pub shown: &'e [Shown],
    /// Whether the kernel mounts each of these images as a device of the file system.
    pub as_devices: bool,
    /// Longest inline tail, in bytes.
    pub inline_max: u16,
    /// Statistics of the content, for the metadata.
    pub stats: ContentStats,
    /// What a start reads.
    pub prefetch: Option<&'e Prefetch>,
    /// The path in messages.
    pub path: &'e Path,
}

impl Ending<'_> {
    /// Writes a stack, which has nothing else.
    pub(crate) fn write_stack(
        self,
        file: File,
        mut options: WriterOptions,
        metadata: Metadata,
    ) -> Result<Written, ConvertError> {
        options.metadata_first = true;
        let writer = ImageWriter::create(file, options);
        let writer = writer.map_err(|error| image_error(self.path, error))?;
        self.write(writer, metadata)
    }

    /// Completes the image.
    pub(crate) fn write(
        self,
        mut writer: ImageWriter,
        mut metadata: Metadata,
    ) -> Result<Written, ConvertError> {
        let Ending { tree, shown, .. } = self;
        let failed = |error| image_error(self.path, error);
        let unplanned = |error| plan_error(self.path, error);
        let devices = if self.as_devices { shown.len() as u16 } else { 0 };
        let start = writer.begin_metadata().map_err(failed)?;
        let options = WriteOptions {
            metadata_start: start + device_table_bytes(devices),
            inline_max: self.inline_max,
        };
        let plan = Plan::new(tree, &options).map_err(unplanned)?;
        let metadata_end = options.metadata_start + plan.metadata_bytes();
        let windows = windows(shown, metadata_end).map_err(unplanned)?;
        if devices > 0 {
            writer.append(&device_table(&windows)).map_err(failed)?;
        }
        let plan = plan
            .with_windows(windows.clone())
            .map_err(unplanned)?
            .with_device_table(devices);
        emit(&plan, self.tails, &mut writer, self.path)?;
        for (image, window) in shown.iter().zip(&windows) {
            let backing = writer.add_backing(BackingEntry {
                name: BackingName::Digest(image.digest),
                size: image.size,
            });
            let appended = writer.append_window(backing, 0, image.bytes);
            let (found, planned) = (
                appended.map_err(failed)?,
                u64::from(window.to) * BLOCK_BYTES,
            );
            if found != planned {
                return Err(failed(Error::Unsupported(format!(
                    "a window at byte {found}: the metadata expects the window at byte {planned}"
                ))));
            }
        }
        metadata.content(plan.inodes(), self.stats, options.metadata_start);
        if let Some(prefetch) = self.prefetch {
            metadata.prefetch(prefetch.describe(tree, &plan)?);
        }
        // If the images are devices, the first device ends with the metadata.
        let total = match devices {
            0 => writer.position(),
            _ => metadata_end,
        };
        let superblock = plan.superblock(total / BLOCK_BYTES);
        writer
            .finish(&superblock, &metadata.into_json())
            .map_err(failed)
    }
}

/// The windows behind the metadata, each at a region boundary.
fn windows(shown: &[Shown], metadata_end: u64) -> Result<Vec<ContentWindow>, WriteError> {
    let mut next = metadata_end;
    let window = |image: &Shown| {
        let start = next.next_multiple_of(REGION_BYTES);
        next = start.saturating_add(image.bytes);
        let (to, blocks) = (start / BLOCK_BYTES, image.bytes / BLOCK_BYTES);
        match (
            u32::try_from(image.first_block),
            u32::try_from(to),
            u32::try_from(blocks),
        ) {
            (Ok(from), Ok(to), Ok(blocks)) => Ok(ContentWindow { from, to, blocks }),
            _ => Err(WriteError::TooLarge { start, end: next }),
        }
    };
    shown.iter().map(window).collect()
}
