//! The extents of a disk with the files below it: the data of each address in the file that has it.

use std::ops::Range;
use std::sync::Arc;

use bcow::{BlockDevice, Error, Extent, FileIdentity, Image, Mapping, ShownBy};

/// The extents of an address space, in order. Adjacent extents with one mapping are one.
pub struct ChainExtents {
    /// Each below the one before.
    files: Vec<Arc<Image>>,
    at: u64,
    end: u64,
    /// The next extent, as far as it is known.
    pending: Option<(usize, Extent)>,
}

impl ChainExtents {
    /// The extents within `range` of `files`: a disk and the files below it, or an image alone. The
    /// first and the last extent may exceed the range.
    pub fn new(files: Vec<Arc<Image>>, range: Range<u64>) -> Self {
        ChainExtents {
            files,
            at: range.start,
            end: range.end,
            pending: None,
        }
    }

    /// The extent of `at`, and the place in the chain of the file that has it.
    fn extent_at(&self, at: u64) -> Result<(usize, Extent), Error> {
        let mut file = 0;
        let mut extent = self.files[0].map(at)?;
        // Below an absent entry, the file has the same bytes at the same address.
        while let Mapping::Backing {
            by: ShownBy::Absent,
            offset,
            bytes,
            ..
        } = extent.mapping
            && offset == extent.offset
            && bytes == extent.length
            && let Some(below) = self.files.get(file + 1)
            && identity_below(&self.files[file]) == below.identity()
        {
            file += 1;
            let end = extent.offset + extent.length;
            if at >= below.size() {
                extent = Extent {
                    offset: extent.offset.max(below.size()),
                    length: end - extent.offset.max(below.size()),
                    mapping: Mapping::Hole,
                };
                continue;
            }
            extent = cut(below.map(at)?, extent.offset..end);
        }
        Ok((file, extent))
    }
}

impl Iterator for ChainExtents {
    /// The place in the chain of the file that has the data, and the extent.
    type Item = Result<(usize, Extent), Error>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.at < self.end {
            let (file, extent) = match self.extent_at(self.at) {
                Ok(found) => found,
                Err(error) => {
                    // The error is the last item, behind what is known.
                    self.at = self.end;
                    return Some(Err(error));
                }
            };
            self.at = extent.offset.saturating_add(extent.length);
            if let Some((run_file, run)) = &mut self.pending
                && *run_file == file
                && (join(run, &extent) || (file > 0 && join_block(run, &extent)))
            {
                continue;
            }
            if let Some(run) = self.pending.replace((file, extent)) {
                return Some(Ok(run));
            }
        }
        self.pending.take().map(Ok)
    }
}

fn identity_below(image: &Image) -> Option<FileIdentity> {
    image.backing(0).and_then(|below| below.identity())
}

/// The part of an extent within `range`. A stored block keeps its full UBA and size.
fn cut(extent: Extent, range: Range<u64>) -> Extent {
    let offset = extent.offset.max(range.start);
    let length = (extent.offset + extent.length).min(range.end) - offset;
    let mapping = match extent.mapping {
        Mapping::Backing {
            by,
            index,
            offset: from,
            bytes,
        } => {
            let skip = offset - extent.offset;
            Mapping::Backing {
                by,
                index,
                offset: from + skip,
                bytes: bytes.saturating_sub(skip).min(length),
            }
        }
        mapping => mapping,
    };
    Extent {
        offset,
        length,
        mapping,
    }
}

/// Extends the run by `next` if both have one mapping. Zeros, holes and windows are not stored in
/// blocks, so they are shown as one range.
fn join(run: &mut Extent, next: &Extent) -> bool {
    match (&mut run.mapping, next.mapping) {
        (Mapping::Zero, Mapping::Zero) | (Mapping::Hole, Mapping::Hole) => {}
        (
            Mapping::Backing {
                by,
                index,
                offset,
                bytes,
            },
            Mapping::Backing {
                by: next_by,
                index: next_index,
                offset: next_offset,
                bytes: next_bytes,
            },
        ) if *by == next_by
            && *index == next_index
            && *bytes == run.length
            && offset.checked_add(*bytes) == Some(next_offset) =>
        {
            *bytes += next_bytes;
        }
        _ => return false,
    }
    run.length += next.length;
    true
}

/// Extends the run by `next` if both are pieces of one stored block of a lower file, which smaller
/// blocks of the files above divide.
fn join_block(run: &mut Extent, next: &Extent) -> bool {
    let is_stored = matches!(
        run.mapping,
        Mapping::Raw { .. } | Mapping::Compressed { .. } | Mapping::Open { .. }
    );
    let is_one = is_stored && run.mapping == next.mapping;
    if is_one {
        run.length += next.length;
    }
    is_one
}
