//! Finds the files of a damaged image whose content cannot be read.

use std::ops::Range;

use bcow::{BlockDevice, Image, Mapping};

use crate::reader::{ExtentSource, FileType, Filesystem, Inode, Walk};

/// The number of ranges that are kept with their own errors. A truncated file has an unreadable
/// range for each of its blocks.
const MAX_EXACT_RANGES: usize = 1 << 16;

/// A part of the address space of an image that cannot be read.
#[derive(Debug)]
pub struct UnreadableRange {
    /// The bytes of the address space.
    pub bytes: Range<u64>,
    /// The cause.
    pub error: bcow::Error,
}

/// Reads every stored block of `image`, and returns the ranges that cannot be read, in order. If
/// the table of a region is damaged, the range is the whole region. Behind the first 65,536 ranges,
/// adjacent ones are returned as one, with the error of the first.
pub fn unreadable_ranges(image: &Image) -> Vec<UnreadableRange> {
    let header = image.header();
    let mut unreadable = Vec::new();
    let mut at = 0;
    while at < header.size {
        let (end, read) = match image.map(at) {
            Ok(extent) => {
                let is_stored = matches!(
                    extent.mapping,
                    Mapping::Raw { .. } | Mapping::Compressed { .. } | Mapping::Open { .. }
                );
                let read = if is_stored {
                    image.read_with(extent.offset, extent.length, &mut |_| {})
                } else {
                    Ok(())
                };
                (extent.offset + extent.length, read)
            }
            Err(error) => {
                let next_region = (at >> header.region_shift) + 1;
                (next_region << header.region_shift, Err(error))
            }
        };
        if let Err(error) = read {
            add(&mut unreadable, at..end, error);
        }
        at = end;
    }
    unreadable
}

/// Adds a range. Above [`MAX_EXACT_RANGES`], adjacent ranges become one range with the first error.
fn add(unreadable: &mut Vec<UnreadableRange>, bytes: Range<u64>, error: bcow::Error) {
    let is_full = unreadable.len() >= MAX_EXACT_RANGES;
    match unreadable.last_mut() {
        Some(last) if is_full && last.bytes.end == bytes.start => last.bytes.end = bytes.end,
        _ => unreadable.push(UnreadableRange { bytes, error }),
    }
}

/// A file with content in an unreadable part of the address space.
#[derive(Debug)]
pub struct DamagedFile<'r> {
    /// The path from the root; begins with a slash.
    pub path: Vec<u8>,
    /// The first byte of the file that cannot be read.
    pub offset: u64,
    /// The part of the address space with that byte.
    pub range: &'r UnreadableRange,
}

/// The files that [`damaged_files`] found.
#[derive(Debug, Default)]
pub struct DamagedFiles<'r> {
    /// The first files that were found, in the order of the tree.
    pub files: Vec<DamagedFile<'r>>,
    /// The number of further damaged files.
    pub omitted: u64,
}

/// Finds the files with content in one of `ranges`, which are in order. The result names at most
/// `limit` files.
///
/// The search does not read content, only the maps of the files: a hostile image can have many long
/// files with the same content. It skips parts of the tree that cannot be read.
pub fn damaged_files<'r>(
    fs: &Filesystem,
    ranges: &'r [UnreadableRange],
    limit: usize,
) -> DamagedFiles<'r> {
    let mut damaged = DamagedFiles::default();
    let mut walk = Walk::new(fs);
    loop {
        let inode = match walk.next() {
            Ok(Some(inode)) => inode,
            Ok(None) => break,
            Err(_) => continue,
        };
        if inode.kind == FileType::Regular
            && let Some((offset, range)) = first_unreadable(fs, &inode, ranges)
        {
            if damaged.files.len() == limit {
                damaged.omitted += 1;
                continue;
            }
            let path = [b"/", walk.path()].concat();
            damaged.files.push(DamagedFile {
                path,
                offset,
                range,
            });
        }
    }
    damaged
}

/// The first byte of a file that lies in one of the ranges, and that range. `None` also if the map
/// of the file cannot be read.
fn first_unreadable<'r>(
    fs: &Filesystem,
    inode: &Inode,
    ranges: &'r [UnreadableRange],
) -> Option<(u64, &'r UnreadableRange)> {
    for extent in fs.extents(inode, 0) {
        let extent = extent.ok()?;
        let ExtentSource::Device { offset } = extent.source else {
            continue;
        };
        let next = ranges.partition_point(|range| range.bytes.end <= offset);
        if let Some(range) = ranges.get(next)
            && range.bytes.start < offset.saturating_add(extent.length)
        {
            let skipped = range.bytes.start.saturating_sub(offset);
            return Some((extent.offset + skipped, range));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_ranges_become_one_above_the_limit() {
        let mut ranges = Vec::new();
        let error = |at| bcow::Error::Merkle {
            start: at,
            end: at + 1,
        };
        let limit = MAX_EXACT_RANGES as u64;
        for at in 0..limit + 3 {
            add(&mut ranges, at..at + 1, error(at));
        }
        assert_eq!(ranges.len(), MAX_EXACT_RANGES);
        let last = ranges.last().unwrap();
        assert_eq!(last.bytes, limit - 1..limit + 3);
        assert_eq!(last.error.to_string(), error(limit - 1).to_string());
        add(&mut ranges, limit + 4..limit + 5, error(limit + 4));
        assert_eq!(ranges.len(), MAX_EXACT_RANGES + 1);
    }
}
