//! Writes disks. Only a disk has absent ranges, a backing that these ranges show, and a block size
//! for each region.

use bcow_format::{
    BackingEntry, BlockShift, Entry, MAX_ADDRESS, MAX_LOG_BYTES, MAX_ROOT_ENTRIES, SECTOR_BYTES,
};

use super::{ImageWriter, REGION_SHIFT, WriterOptions};
use crate::{BlockDevice, Content, Error};

/// log2 of the largest region size, 2^30 bytes.
const MAX_REGION_SHIFT: u8 = 30;
/// log2 of the default block size of [`append_disk`]. It is smaller than that of the content of an
/// image: guests read 4 KiB at scattered addresses, and each such read decodes a block.
const AUTO_DISK_SHIFT: u8 = 16;
/// Bytes per read of the source.
const READ_BYTES: u64 = 1 << 20;

/// The options of a new disk, in addition to [`WriterOptions`].
#[derive(Debug, Clone, Default)]
pub struct DiskForm {
    /// Size of the address space in bytes, a multiple of 4096.
    pub size: u64,
    /// The backing that absent ranges show; without one they are holes.
    pub backing: Option<BackingEntry>,
    /// log2 of the region size, 12 to 30; `None` selects the default.
    pub region_shift: Option<u8>,
    /// Size of the record log in bytes, a multiple of 4096. With a log the file is writable and has
    /// no Merkle tree; with 0 it is sealed.
    pub log_bytes: u64,
}

/// Which content of a device [`append_disk`] stores in the new disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// All content of the chain. The new disk must have no backing, because its holes would show
    /// the backing.
    All,
    /// The content that the first file of the chain determines. The rest stays absent, so the new
    /// disk needs the backing of that file. A device with windows or fragments is refused: their
    /// content would be lost, because absent ranges show the backing at their own address only.
    Own,
}

impl DiskForm {
    pub(super) fn is_writable(&self) -> bool {
        self.log_bytes > 0
    }

    /// Checks the options. Returns log2 of the region size.
    pub(super) fn check(&self, options: &WriterOptions) -> Result<u8, Error> {
        let unsupported = |problem: String| Err(Error::Unsupported(problem));
        if options.plain || options.erofs || options.metadata_first {
            return unsupported("a disk in the form of an image".into());
        }
        if !self.size.is_multiple_of(SECTOR_BYTES) || self.size > MAX_ADDRESS {
            return unsupported(format!(
                "a disk of {} bytes: sizes are multiples of {SECTOR_BYTES}, and at most \
                 {MAX_ADDRESS}",
                self.size
            ));
        }
        if !self.log_bytes.is_multiple_of(SECTOR_BYTES) || self.log_bytes > MAX_LOG_BYTES {
            return unsupported(format!("a record log of {} bytes", self.log_bytes));
        }
        let shift = match self.region_shift {
            Some(shift) => shift,
            None => (REGION_SHIFT..MAX_REGION_SHIFT)
                .find(|shift| self.size.div_ceil(1 << shift) <= MAX_ROOT_ENTRIES)
                .unwrap_or(MAX_REGION_SHIFT),
        };
        if !(12..=MAX_REGION_SHIFT).contains(&shift)
            || self.size.div_ceil(1 << shift) > MAX_ROOT_ENTRIES
        {
            return unsupported(format!(
                "a disk of {} bytes in regions of 2^{shift}",
                self.size
            ));
        }
        Ok(shift)
    }
}

impl ImageWriter {
    /// Appends `count` absent bytes to a disk, or zeros to an image.
    ///
    /// Only whole blocks can be absent; the last block may be cut off by the end of the disk.
    /// Without a backing, other parts of the range are appended as zeros, which read the same. With
    /// a backing, they are an error.
    pub fn append_absent(&mut self, mut count: u64) -> Result<(), Error> {
        let Some(form) = &self.options.disk else {
            return self.append_zeros(count);
        };
        if count > 0 {
            self.windows.check_no_windows()?;
        }
        let (size, has_backing) = (form.size, form.backing.is_some());
        let length = u64::from(self.block_shift.bytes());
        while count > 0 {
            let filled = self.block.len() as u64;
            let to_end = self.position() + count >= size;
            if filled == 0 && (count >= length || to_end) {
                let blocks = if to_end { count.div_ceil(length) } else { count / length };
                self.pipeline.run(Entry::Absent, blocks)?;
                let bytes = count.min(blocks * length);
                self.block_start += bytes;
                count -= bytes;
                continue;
            }
            if has_backing {
                return Err(Error::Unsupported(format!(
                    "{count} absent bytes at byte {} in blocks of {length}",
                    self.position()
                )));
            }
            let n = count.min(length - filled);
            self.append_zeros(n)?;
            count -= n;
        }
        Ok(())
    }

    /// Size of a region in bytes.
    fn region_bytes(&self) -> u64 {
        1 << self.region_shift
    }

    /// Sets the block size from the current position on. The position must be the start of a
    /// region: a block that is being filled would be lost.
    fn begin_blocks(&mut self, shift: u8) -> Result<(), Error> {
        self.windows.check_no_windows()?;
        if !self.position().is_multiple_of(self.region_bytes()) {
            return Err(Error::Unsupported(format!(
                "a device from byte {} on, which is not the start of a region of {} bytes",
                self.position(),
                self.region_bytes()
            )));
        }
        let shift = BlockShift::new(shift).unwrap_or(BlockShift::MIN);
        if shift != self.block_shift {
            self.block_shift = shift;
            self.block = Vec::with_capacity(shift.bytes() as usize);
            self.layout.begin(self.block_start, shift);
        }
        Ok(())
    }
}

/// A range of a region with one kind of content.
struct Run {
    offset: u64,
    length: u64,
    kind: RunKind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum RunKind {
    Data,
    Zeros,
    Absent,
}

/// Appends the content of `device`, from the writer's position to the end of the device. The
/// position must be the start of a region, and no window may be before it.
///
/// Calls `step` after each piece with the length of the piece in bytes. An error of `step` ends the
/// copy.
///
/// With [`Keep::Own`], each region gets the largest block size with which no block is partly
/// absent, so no content of the backing is stored. The writer's block size is the upper limit.
pub fn append_disk<E: From<Error>>(
    writer: &mut ImageWriter,
    device: &dyn BlockDevice,
    keep: Keep,
    step: &mut dyn FnMut(u64) -> Result<(), E>,
) -> Result<(), E> {
    if keep == Keep::Own && device.has_windows() {
        return Err(E::from(Error::Unsupported(
            "the disk has windows or fragments: a copy without the content of its backings would \
             lose them"
                .into(),
        )));
    }
    let form = writer.options.disk.as_ref();
    if keep == Keep::All && form.is_some_and(|form| form.backing.is_some()) {
        return Err(E::from(Error::Unsupported(
            "all content of a device, in a disk with a backing: its holes would show the backing"
                .into(),
        )));
    }
    let size = device.size();
    let largest = match writer.options.block_bytes {
        Some(_) => writer.block_shift.get(),
        None => AUTO_DISK_SHIFT.min(writer.region_shift),
    };
    writer.begin_blocks(largest)?;
    let mut buffer = Vec::new();
    let mut start = writer.position();
    while start < size {
        let end = (start + writer.region_bytes()).min(size);
        let runs = runs(device, start, end, keep)?;
        if let [only] = &runs[..]
            && only.kind == RunKind::Absent
        {
            writer.append_absent(only.length)?;
            step(only.length)?;
            start = end;
            continue;
        }
        if keep == Keep::Own {
            writer.begin_blocks(block_shift(&runs, largest, end))?;
        }
        for run in &runs {
            match run.kind {
                RunKind::Data => append_data(writer, device, run, &mut buffer, step)?,
                RunKind::Zeros => writer.append_zeros(run.length)?,
                RunKind::Absent => writer.append_absent(run.length)?,
            }
            if run.kind != RunKind::Data {
                step(run.length)?;
            }
        }
        start = end;
    }
    Ok(())
}

/// The runs of content in `start..end`; neighbours of one kind are merged.
fn runs(device: &dyn BlockDevice, start: u64, end: u64, keep: Keep) -> Result<Vec<Run>, Error> {
    let mut runs: Vec<Run> = Vec::new();
    let mut at = start;
    while at < end {
        let status = device.status(at, end - at)?;
        let kind = match (keep, status.content) {
            (Keep::Own, _) if status.depth != 1 => RunKind::Absent,
            (Keep::All, Content::Hole) => RunKind::Absent,
            (_, Content::Data) => RunKind::Data,
            (_, Content::Zero | Content::Hole) => RunKind::Zeros,
        };
        let length = status.length.clamp(1, end - at);
        match runs.last_mut() {
            Some(last) if last.kind == kind => last.length += length,
            _ => runs.push(Run {
                offset: at,
                length,
                kind,
            }),
        }
        at += length;
    }
    Ok(runs)
}

/// log2 of the largest block size, up to `largest`, with which no block is partly absent.
fn block_shift(runs: &[Run], largest: u8, end: u64) -> u8 {
    let edges = runs.iter().filter(|run| run.kind == RunKind::Absent);
    let bits = edges.fold(1u64 << largest, |bits, run| {
        let run_end = run.offset + run.length;
        // A block of any size can end at `end`, which is the end of the region or of the disk.
        bits | run.offset | if run_end == end { 0 } else { run_end }
    });
    (bits.trailing_zeros() as u8).clamp(BlockShift::MIN.get(), largest)
}

fn append_data<E: From<Error>>(
    writer: &mut ImageWriter,
    device: &dyn BlockDevice,
    run: &Run,
    buffer: &mut Vec<u8>,
    step: &mut dyn FnMut(u64) -> Result<(), E>,
) -> Result<(), E> {
    let mut done = 0;
    while done < run.length {
        let n = READ_BYTES.min(run.length - done);
        buffer.resize(n as usize, 0);
        device.read_at(run.offset + done, buffer)?;
        writer.append(buffer)?;
        step(n)?;
        done += n;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bcow_format::{BackingName, Use};

    use super::*;
    use crate::{
        Disk, Image, Mapping, MemoryStorage, NoBackings, OneBacking, OpenOptions, WritableDevice,
        check, verify_written,
    };

    fn named(size: u64) -> BackingEntry {
        BackingEntry {
            name: BackingName::FileName {
                name: "base".into(),
                identity: Some([7; 32]),
            },
            size,
        }
    }

    fn writer(storage: &Arc<MemoryStorage>, disk: DiskForm, threads: usize) -> ImageWriter {
        let options = WriterOptions {
            threads,
            disk: Some(disk),
            ..WriterOptions::default()
        };
        ImageWriter::on_storage(storage.clone(), options).unwrap()
    }

    fn append(writer: &mut ImageWriter, device: &dyn BlockDevice, keep: Keep) {
        append_disk::<Error>(writer, device, keep, &mut |_| Ok(())).unwrap();
    }

    fn content(device: &dyn BlockDevice) -> Vec<u8> {
        let mut all = vec![0; device.size() as usize];
        device.read_at(0, &mut all).unwrap();
        all
    }

    /// Ten and a half regions of zeros, except for 4 KiB, a whole region and the last byte.
    fn sample() -> Vec<u8> {
        let mut bytes = vec![0; (42 << 20) + 12288];
        bytes[(9 << 20) + 4096..][..4096].fill(1);
        for (i, byte) in bytes[16 << 20..20 << 20].iter_mut().enumerate() {
            *byte = (i % 251) as u8;
        }
        bytes.last_mut().into_iter().for_each(|last| *last = 9);
        bytes
    }

    #[test]
    fn a_disk_reads_as_what_it_was_made_of() {
        let bytes = sample();
        for threads in [1, 3] {
            let storage = Arc::new(MemoryStorage::default());
            let form = DiskForm {
                size: bytes.len() as u64,
                ..DiskForm::default()
            };
            let mut writer = writer(&storage, form, threads);
            append(&mut writer, &bytes, Keep::All);
            let written = writer.finish(&[], &serde_json::json!({})).unwrap();
            verify_written(&written, 2).unwrap();
            let image = Image::open_storage(storage, &OpenOptions::default()).unwrap();
            assert_eq!(image.header().purpose, Use::Disk);
            assert!(content(&*image) == bytes);
        }
    }

    #[test]
    fn only_what_a_disk_has_itself_is_stored_in_its_layer() {
        let base = sample();
        let size = base.len() as u64;
        let resolver = OneBacking(Some(Arc::new(base.clone())));
        // The source, over `base`: absent except a sector, 1 MiB of zeros and the last sector.
        let storage = Arc::new(MemoryStorage::default());
        let form = DiskForm {
            size,
            backing: Some(named(size)),
            ..DiskForm::default()
        };
        let mut first = writer(&storage, form.clone(), 1);
        first.begin_blocks(12).unwrap();
        first.append_absent(40960).unwrap();
        first.append(&[5; 4096]).unwrap();
        first.append_absent((16 << 20) - 45056).unwrap();
        first.append_zeros(1 << 20).unwrap();
        first.append_absent((25 << 20) + 8192).unwrap();
        first.append(&[6; 4096]).unwrap();
        let written = first.finish(&[], &serde_json::json!({})).unwrap();
        verify_written(&written, 1).unwrap();
        let options = OpenOptions::default();
        let disk = Image::open_with_backings(storage, &options, &resolver).unwrap();
        let mut expected = base;
        expected[40960..45056].fill(5);
        expected[16 << 20..17 << 20].fill(0);
        let end = expected.len();
        expected[end - 4096..].fill(6);
        assert!(content(&*disk) == expected);

        let storage = Arc::new(MemoryStorage::default());
        let mut layer = writer(&storage, form, 2);
        append(&mut layer, &*disk, Keep::Own);
        layer.finish(&[], &serde_json::json!({})).unwrap();
        let layer = Image::open_with_backings(storage, &options, &resolver).unwrap();
        assert!(content(&*layer) == expected);
        let own: u64 = layer
            .extents()
            .map(|extent| extent.unwrap())
            .filter(|extent| !matches!(extent.mapping, Mapping::Backing { .. }))
            .map(|extent| extent.length)
            .sum();
        assert_eq!(own, 4096 + (1 << 20) + 4096);
    }

    #[test]
    fn a_disk_to_be_written_has_a_log_and_no_tree() {
        let bytes = sample();
        let storage = Arc::new(MemoryStorage::default());
        let form = DiskForm {
            size: bytes.len() as u64,
            log_bytes: 1 << 20,
            ..DiskForm::default()
        };
        let mut writer = writer(&storage, form, 1);
        append(&mut writer, &bytes, Keep::All);
        let written = writer.finish(&[], &serde_json::json!({})).unwrap();
        assert_eq!(written.header.log.1, 1 << 20);
        assert!(written.header.merkle.is_none());
        assert_eq!(written.file_bytes(), storage.to_vec().len() as u64);
        verify_written(&written, 1).unwrap();
        let image = Image::open_storage(storage.clone(), &OpenOptions::default()).unwrap();
        assert!(content(&*image) == bytes);
        drop(image);
        // Later writes, small and large, go over compressed blocks.
        let disk = Disk::open(storage.clone(), &OpenOptions::default(), &NoBackings).unwrap();
        let mut expected = bytes;
        for (at, length) in [(0, 512), ((9 << 20) + 5000, 100), (17 << 20, 3 << 20)] {
            expected[at..at + length].fill(7);
            disk.write_at(at as u64, &expected[at..at + length])
                .unwrap();
        }
        disk.flush().unwrap();
        assert!(content(&disk) == expected);
        assert_eq!(disk.rebuild_free_list().unwrap(), 0);
        disk.close().unwrap();
        let report = check::check(storage.clone(), &check::CheckOptions::FULL).unwrap();
        assert!(report.findings.is_empty(), "{:?}", report.findings);
        let image = Image::open_storage(storage, &OpenOptions::default()).unwrap();
        assert!(content(&*image) == expected);
    }

    #[test]
    fn sizes_that_no_disk_has_are_refused() {
        for size in [1, 4095, (1 << 48) + 4096] {
            let options = WriterOptions {
                disk: Some(DiskForm {
                    size,
                    ..DiskForm::default()
                }),
                ..WriterOptions::default()
            };
            let storage = Arc::new(MemoryStorage::default());
            assert!(ImageWriter::on_storage(storage, options).is_err(), "{size}");
        }
    }

    #[test]
    fn the_largest_and_the_smallest_disk_can_be_written() {
        for size in [0, 4096, 1 << 48] {
            let storage = Arc::new(MemoryStorage::default());
            let form = DiskForm {
                size,
                ..DiskForm::default()
            };
            let mut writer = writer(&storage, form, 1);
            writer.append_absent(size).unwrap();
            writer.finish(&[], &serde_json::json!({})).unwrap();
            let image = Image::open_storage(storage.clone(), &OpenOptions::default()).unwrap();
            assert_eq!(image.size(), size);
            let report = check::check(storage, &check::CheckOptions::FULL).unwrap();
            assert!(report.findings.is_empty(), "{:?}", report.findings);
        }
    }

    #[test]
    fn a_partly_filled_block_in_front_of_a_device_is_refused() {
        let form = DiskForm {
            size: 8 << 20,
            ..DiskForm::default()
        };
        let mut writer = writer(&Arc::new(MemoryStorage::default()), form, 1);
        writer.append(&[1; 4096]).unwrap();
        let device = vec![2; 8 << 20];
        let appended = append_disk::<Error>(&mut writer, &device, Keep::All, &mut |_| Ok(()));
        assert!(matches!(appended, Err(Error::Unsupported(_))));
    }

    #[test]
    fn absent_bytes_after_a_window_are_refused() {
        let form = DiskForm {
            size: 16 << 20,
            ..DiskForm::default()
        };
        let mut writer = writer(&Arc::new(MemoryStorage::default()), form, 1);
        writer.append_absent(4 << 20).unwrap();
        let below = writer.add_backing(named(4 << 20));
        writer.append_window(below, 0, 4 << 20).unwrap();
        let appended = writer.append_absent(8 << 20);
        assert!(matches!(appended, Err(Error::Unsupported(_))));
    }

    #[test]
    fn all_content_is_not_stored_over_a_backing() {
        let form = DiskForm {
            size: 8 << 20,
            backing: Some(named(8 << 20)),
            ..DiskForm::default()
        };
        let mut writer = writer(&Arc::new(MemoryStorage::default()), form, 1);
        let device = vec![0; 8 << 20];
        let appended = append_disk::<Error>(&mut writer, &device, Keep::All, &mut |_| Ok(()));
        assert!(matches!(appended, Err(Error::Unsupported(_))));
    }
}
