//! Records which parts of an image are read.

use std::collections::HashMap;
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bcow::{BlockDevice, Error, FileIdentity, Status};
use bcow_erofs::reader::{ErofsError, ExtentSource, FileType, Filesystem, Walk};
use bcow_oci::trace::{MAX_TRACE_RANGES, TRACE_BLOCK_BYTES, Trace, TracePart};

use crate::error::{CommandError, Context};
use crate::new_file::NewFile;

/// The largest image that can be recorded: one bit is kept for each of its sectors.
const MAX_BYTES: u64 = 1 << 40;
const SECTOR_BYTES: u64 = TRACE_BLOCK_BYTES;
/// The greatest number of files with the same content among which those that were read are looked
/// for.
const MAX_SHARING: usize = 64;

/// An address space that records which of its sectors are read, each once.
pub struct Recorder {
    device: Arc<dyn BlockDevice>,
    /// One bit for each sector.
    seen: Vec<AtomicU64>,
    /// Ranges of sectors in the order of their first use. The lock is held to add one, and only by
    /// a read of sectors that were not read before.
    ranges: Mutex<Vec<Range<u64>>>,
    /// More was read than the list has.
    is_full: AtomicBool,
}

impl Recorder {
    /// Fails for an address space that is too large.
    pub fn new(device: Arc<dyn BlockDevice>) -> Result<Arc<Self>, CommandError> {
        if device.size() > MAX_BYTES {
            return Err(CommandError::new(
                "recording of images larger than 1 TiB is not supported yet",
            ));
        }
        let words = device.size().div_ceil(64 * SECTOR_BYTES);
        Ok(Arc::new(Recorder {
            device,
            seen: (0..words).map(|_| AtomicU64::new(0)).collect(),
            ranges: Mutex::default(),
            is_full: AtomicBool::new(false),
        }))
    }

    fn note(&self, offset: u64, length: u64) {
        if length == 0 {
            return;
        }
        let last = (offset + length - 1) / SECTOR_BYTES;
        let mut sector = offset / SECTOR_BYTES;
        while sector <= last {
            let in_word = (64 - sector % 64).min(last - sector + 1);
            let mask = (u64::MAX >> (64 - in_word)) << (sector % 64);
            let Some(word) = self.seen.get((sector / 64) as usize) else {
                return;
            };
            // Most reads are of what was read before.
            if word.load(Ordering::Relaxed) & mask != mask {
                let before = word.fetch_or(mask, Ordering::Relaxed);
                self.add(sector - sector % 64, mask & !before);
            }
            sector += in_word;
        }
    }

    /// Whether a byte of the sector that contains `offset` was read.
    fn has_read(&self, offset: u64) -> bool {
        let sector = offset / SECTOR_BYTES;
        let word = self.seen.get((sector / 64) as usize);
        word.is_some_and(|word| word.load(Ordering::Relaxed) >> (sector % 64) & 1 == 1)
    }

    /// Adds the sectors from `start` on whose bits are set.
    fn add(&self, start: u64, mut bits: u64) {
        let mut ranges = self.ranges();
        while bits != 0 {
            let first = u64::from(bits.trailing_zeros());
            let count = u64::from((bits >> first).trailing_ones());
            bits &= !((u64::MAX >> (64 - count)) << first);
            let first = start + first;
            let has_room = ranges.len() < MAX_TRACE_RANGES / 2;
            match ranges.last_mut() {
                Some(last) if last.end == first => last.end += count,
                _ if has_room => ranges.push(first..first + count),
                _ => self.is_full.store(true, Ordering::Relaxed),
            }
        }
    }

    fn ranges(&self) -> MutexGuard<'_, Vec<Range<u64>>> {
        // The list is changed by single additions, and valid after a panic.
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BlockDevice for Recorder {
    fn size(&self) -> u64 {
        self.device.size()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        self.device.read_at(offset, buf)?;
        self.note(offset, buf.len() as u64);
        Ok(())
    }

    fn read_with(
        &self,
        offset: u64,
        length: u64,
        sink: &mut dyn FnMut(&[u8]),
    ) -> Result<(), Error> {
        self.device.read_with(offset, length, sink)?;
        self.note(offset, length);
        Ok(())
    }

    fn status(&self, offset: u64, length: u64) -> Result<Status, Error> {
        self.device.status(offset, length)
    }

    fn identity(&self) -> Option<FileIdentity> {
        self.device.identity()
    }
}

/// A recording that becomes a trace at its end.
pub struct Recording {
    recorder: Arc<Recorder>,
    identity: [u8; 32],
    destination: PathBuf,
}

impl Recording {
    /// Records reads of `device`, which shows the image with this identity, for a trace at
    /// `destination`.
    pub fn start(
        device: Arc<dyn BlockDevice>,
        identity: [u8; 32],
        destination: &Path,
    ) -> Result<Self, CommandError> {
        let cannot = || format!("cannot record to {}", destination.display());
        // The process changes its directory later. A directory that is missing is an error now, and
        // not after the mount.
        let destination = std::path::absolute(destination).context(cannot)?;
        drop(NewFile::create(&destination)?);
        Ok(Recording {
            recorder: Recorder::new(device)?,
            identity,
            destination,
        })
    }

    /// The address space to read.
    pub fn device(&self) -> Arc<dyn BlockDevice> {
        Arc::clone(&self.recorder) as Arc<dyn BlockDevice>
    }

    /// The path of the trace.
    pub fn destination(&self) -> &Path {
        &self.destination
    }

    /// Writes the trace.
    pub fn finish(&self) -> Result<(), CommandError> {
        let cannot = || format!("cannot write {}", self.destination.display());
        let ranges = self.recorder.ranges().clone();
        let tree = Filesystem::open(Arc::clone(&self.recorder.device)).context(cannot)?;
        let (parts, is_truncated) = parts(&tree, &ranges, &self.recorder).context(cannot)?;
        let trace = Trace {
            image: self.identity,
            truncated: is_truncated || self.recorder.is_full.load(Ordering::Relaxed),
            parts,
        };
        let new = NewFile::create(&self.destination)?;
        let mut file = new.file();
        file.write_all(trace.to_text().as_bytes()).context(cannot)?;
        new.complete()
    }
}

/// A place in the address space that belongs to an object of the file system.
#[derive(Debug, Clone, Copy)]
struct ObjectRange {
    start: u64,
    end: u64,
    /// Index of the file or directory.
    object: u32,
    /// For content of a file: the byte of the file at `start`.
    offset: u64,
}

/// The names of an image's objects, and where their bytes are.
#[derive(Default)]
struct Places {
    paths: Vec<Vec<u8>>,
    /// Where the inode of each object begins.
    inodes: Vec<u64>,
    /// Content of files, outside of their inodes.
    content: Vec<ObjectRange>,
    /// Inodes with what is stored beside them, and content of directories; each belongs to the
    /// directory whose lookup reads it.
    metadata: Vec<ObjectRange>,
}

impl Places {
    fn of(tree: &Filesystem) -> Result<Self, ErofsError> {
        let mut places = Places::default();
        let mut directories: HashMap<Vec<u8>, u32> = HashMap::new();
        let mut walk = Walk::new(tree);
        while let Some(inode) = walk.next()? {
            let path = walk.path();
            let parent = match path.iter().rposition(|&byte| byte == b'/') {
                Some(slash) => &path[..slash],
                None => b"",
            };
            let is_directory = inode.kind == FileType::Directory;
            let own = places.paths.len() as u32;
            if is_directory {
                directories.insert(path.to_vec(), own);
            }
            // A directory comes before its contents; the root is its own parent.
            let of_parent = directories.get(parent).copied().unwrap_or_default();
            let (start, end) = inode.footprint(tree);
            places.metadata.push(ObjectRange {
                start,
                end,
                object: of_parent,
                offset: 0,
            });
            let mut has_place = is_directory;
            if matches!(inode.kind, FileType::Directory | FileType::Regular) {
                for extent in tree.extents(&inode, 0) {
                    let extent = extent?;
                    let ExtentSource::Device { offset } = extent.source else {
                        continue;
                    };
                    let place = ObjectRange {
                        start: offset,
                        end: offset + extent.length,
                        object: own,
                        offset: extent.offset,
                    };
                    match is_directory {
                        true => places.metadata.push(place),
                        false if inode.is_inline_tail(offset) => {}
                        false => {
                            has_place = true;
                            places.content.push(place);
                        }
                    }
                }
            }
            if has_place {
                places.paths.push(path.to_vec());
                places.inodes.push(start);
            }
        }
        places.content.sort_unstable_by_key(|place| place.start);
        places.metadata.sort_unstable_by_key(|place| place.start);
        Ok(places)
    }

    /// The first place of metadata that ends behind `at`. Such places hardly overlap.
    fn metadata_from(&self, at: u64) -> usize {
        let begun = self.metadata.partition_point(|place| place.start <= at);
        let mut first = begun;
        while first > 0 && begun - first < 64 {
            first -= 1;
            if self.metadata[first].end > at {
                return first;
            }
        }
        begun
    }

    /// The files with content in this sector, each with the block of the file. Several files share
    /// the sector if they have the same content. A program that reads one of them reads its inode
    /// first, so these are the files whose inodes were read; one file if none was.
    fn files(&self, sector: u64, recorder: &Recorder) -> Vec<(u32, u64)> {
        let start = sector * SECTOR_BYTES;
        let begun = self.content.partition_point(|place| place.start <= start);
        let first = begun.saturating_sub(MAX_SHARING);
        let sharing = self.content[first..begun].iter().rev();
        let mut sharing: Vec<&ObjectRange> = sharing.filter(|place| place.end > start).collect();
        let has_inode =
            |place: &&ObjectRange| recorder.has_read(self.inodes[place.object as usize]);
        if sharing.iter().any(has_inode) {
            sharing.retain(has_inode)
        } else {
            sharing.truncate(1)
        }
        let block =
            |place: &ObjectRange| (place.offset + (start - place.start)) / TRACE_BLOCK_BYTES;
        sharing
            .into_iter()
            .map(|place| (place.object, block(place)))
            .collect()
    }

    /// The directory to which most of the metadata in this sector belongs. A neighbour with a few
    /// inodes in the sector was probably not meant.
    fn directory(&self, sector: u64) -> Option<u32> {
        let (start, end) = (sector * SECTOR_BYTES, (sector + 1) * SECTOR_BYTES);
        let mut bytes: Vec<(u32, u64)> = Vec::new();
        for place in &self.metadata[self.metadata_from(start)..] {
            if place.start >= end {
                break;
            }
            let part = place.end.min(end).saturating_sub(place.start.max(start));
            match bytes.iter_mut().find(|(object, _)| *object == place.object) {
                Some((_, sum)) => *sum += part,
                None => bytes.push((place.object, part)),
            }
        }
        let most = bytes.into_iter().max_by_key(|&(_, sum)| sum);
        most.filter(|&(_, sum)| sum > 0).map(|(object, _)| object)
    }
}

/// The parts of the image in these ranges, each object once, and whether the trace has no room for
/// all of them.
fn parts(
    tree: &Filesystem,
    ranges: &[Range<u64>],
    recorder: &Recorder,
) -> Result<(Vec<TracePart>, bool), ErofsError> {
    let mut left = MAX_TRACE_RANGES;
    let mut is_truncated = false;
    let places = Places::of(tree)?;
    let mut parts = Vec::new();
    let mut known: HashMap<(u32, bool), usize> = HashMap::new();
    let path = |object: u32| places.paths[object as usize].clone();
    for range in ranges {
        for sector in range.clone() {
            let files = places.files(sector, recorder);
            if files.is_empty()
                && let Some(object) = places.directory(sector)
            {
                known.entry((object, false)).or_insert_with(|| {
                    parts.push(TracePart::Directory { path: path(object) });
                    parts.len() - 1
                });
            }
            for (object, block) in files {
                let index = *known.entry((object, true)).or_insert_with(|| {
                    parts.push(TracePart::File {
                        path: path(object),
                        blocks: Vec::new(),
                    });
                    parts.len() - 1
                });
                let TracePart::File { blocks, .. } = &mut parts[index] else {
                    continue;
                };
                match blocks.last_mut() {
                    Some((first, count)) if *first + *count == block => *count += 1,
                    _ if left == 0 => is_truncated = true,
                    _ => {
                        blocks.push((block, 1));
                        left -= 1;
                    }
                }
            }
        }
    }
    Ok((parts, is_truncated))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sectors_are_recorded_once_and_in_order() {
        let recorder = Recorder::new(Arc::new(vec![0; 1 << 20])).expect("small");
        let mut buf = [0; 5000];
        for offset in [100_000, 0, 4096, 100_000, 99_000] {
            recorder.read_at(offset, &mut buf).expect("inside");
        }
        recorder.read_with(0, 1 << 20, &mut |_| {}).expect("inside");
        assert!(recorder.read_at(1 << 20, &mut buf).is_err());
        let found: Vec<_> = recorder
            .ranges()
            .iter()
            .map(|range| (range.start, range.end - range.start))
            .collect();
        assert_eq!(found, [(24, 2), (0, 24), (26, 230)]);
    }
}
