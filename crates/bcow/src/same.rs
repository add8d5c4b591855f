//! Detects ranges of two images that have the same bytes, without reading them.

use crate::storage::FileIdentity;
use crate::{BlockDevice, Image, Mapping};

/// Returns how many bytes, up to `length`, are known to be the same from `a_offset` on in `a` and
/// from `b_offset` on in `b`. The bytes are the same at one offset of one file. Otherwise the
/// tables decide: both are zeros, or both are stored at one place of one file. 0 means that the
/// caller has to read and compare.
///
/// Of two files, equal digests are not trusted: their backings count as the same only if both
/// images opened the same file.
pub fn known_same(a: &Image, a_offset: u64, b: &Image, b_offset: u64, length: u64) -> u64 {
    if a_offset == b_offset && same_file(a.identity(), b.identity()) {
        return length;
    }
    let (Some(here), Some(there)) = (Run::at(a, a_offset), Run::at(b, b_offset)) else {
        return 0;
    };
    if here.is_same_as(&there) {
        here.length.min(there.length).min(length)
    } else {
        0
    }
}

/// Bytes of an image that are stored together.
struct Run {
    length: u64,
    is_zero: bool,
    /// The image, or the backing that shows here, with the first byte in its address space.
    file: Option<FileIdentity>,
    offset: u64,
    /// The stored block, if the image stores it, with the first byte in the decoded block.
    block: Option<(Mapping, u64)>,
}

impl Run {
    fn at(image: &Image, offset: u64) -> Option<Run> {
        let extent = image.map(offset).ok()?;
        let skip = offset - extent.offset;
        let own = Run {
            length: extent.length - skip,
            is_zero: false,
            file: image.identity(),
            offset,
            block: None,
        };
        let zeros = |run| Run {
            is_zero: true,
            ..run
        };
        Some(match extent.mapping {
            Mapping::Zero | Mapping::Hole => zeros(own),
            Mapping::Open { .. } => own,
            mapping @ (Mapping::Raw { .. } | Mapping::Compressed { .. }) => Run {
                block: Some((mapping, skip)),
                ..own
            },
            Mapping::Backing { bytes, .. } if skip >= bytes => zeros(own),
            Mapping::Backing {
                index,
                offset,
                bytes,
                ..
            } => {
                let device = image.backing(index)?;
                let offset = offset + skip;
                // Beyond the end of the backing there are zeros, which the caller compares.
                let there = device.size().checked_sub(offset)?;
                Run {
                    length: own.length.min(bytes - skip).min(there),
                    file: device.identity(),
                    offset,
                    ..own
                }
            }
        })
    }

    fn is_same_as(&self, other: &Run) -> bool {
        if self.is_zero || other.is_zero {
            return self.is_zero && other.is_zero;
        }
        same_file(self.file, other.file)
            && (self.offset == other.offset || (self.block.is_some() && self.block == other.block))
    }
}

fn same_file(a: Option<FileIdentity>, b: Option<FileIdentity>) -> bool {
    a.is_some() && a == b
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{Compression, ImageWriter, OpenOptions, WriterOptions};

    fn image(directory: &std::path::Path, name: &str, blocks: &[u8]) -> Arc<Image> {
        let mut create = std::fs::File::options();
        create.read(true).write(true).create_new(true);
        let file = create.open(directory.join(name)).unwrap();
        let options = WriterOptions {
            compression: Compression::None,
            ..WriterOptions::default()
        };
        let mut writer = ImageWriter::on_storage(Arc::new(file), options).unwrap();
        for &block in blocks {
            writer.append(&vec![block; 1 << 20]).unwrap();
        }
        writer.finish(&[], &serde_json::json!({})).unwrap();
        Image::open(&directory.join(name), &OpenOptions::default()).unwrap()
    }

    #[test]
    fn one_file_opened_twice_is_the_same_and_a_copy_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let a = image(directory.path(), "a", &[1, 0, 2]);
        let again = Image::open(&directory.path().join("a"), &OpenOptions::default()).unwrap();
        assert_eq!(known_same(&a, 4096, &again, 4096, 3 << 20), 3 << 20);
        assert_eq!(known_same(&a, 4096, &again, 8192, 100), 0);
        let copy = image(directory.path(), "b", &[1, 0, 2]);
        assert_eq!(known_same(&a, 4096, &copy, 4096, 100), 0);
    }

    #[test]
    fn zeros_are_the_same_wherever_they_are() {
        let directory = tempfile::tempdir().unwrap();
        let a = image(directory.path(), "a", &[1, 0, 0, 0]);
        let b = image(directory.path(), "b", &[2, 2, 0, 0]);
        // Up to the end of the block of the first image.
        let found = known_same(&a, (3 << 20) - 100, &b, (3 << 20) + 100, 5000);
        assert_eq!(found, 100);
        assert_eq!(known_same(&a, 3 << 20, &b, 2 << 20, 5000), 0);
    }
}
