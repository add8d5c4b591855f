//! Content is read back as written, in every layout; damage is detected and located.

use std::sync::Arc;

use bcow::check::{CheckOptions, check};
use bcow::{
    BlockDevice, Compression, Image, ImageWriter, Mapping, MemoryStorage, OpenOptions, Verify,
    WriterOptions, Written, verify_written,
};
use bcow_testkit::{SmallDisk, WriteLog, assert_sound, changed, read};

/// Content of all kinds: text, zeros, noise.
fn content(bytes: usize) -> Vec<u8> {
    let mut state = 7u64;
    let mut out = Vec::with_capacity(bytes);
    while out.len() < bytes {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
        let run = 1000 + (state >> 40) as usize % 300_000;
        match state >> 61 {
            0..=1 => out.resize(out.len() + run, 0),
            2..=4 => out.extend(b"some text that repeats, ".iter().cycle().take(run)),
            _ => out.extend((0..run).map(|i| {
                let x = (i as u64 ^ state).wrapping_mul(0x9E37_79B9_7F4A_7C15);
                (x >> 56) as u8
            })),
        }
    }
    out.truncate(bytes);
    out
}

fn write(options: &WriterOptions, files: &[u8], tree: &[u8]) -> (Arc<MemoryStorage>, Written, u64) {
    let storage = Arc::new(MemoryStorage::default());
    let mut writer = ImageWriter::on_storage(storage.clone(), options.clone()).unwrap();
    for piece in files.chunks(77_777) {
        writer.append(piece).unwrap();
    }
    let at = writer.begin_metadata().unwrap();
    writer.append(tree).unwrap();
    let written = writer
        .finish(b"superblock", &serde_json::json!({"tool": "test"}))
        .unwrap();
    verify_written(&written, options.threads).unwrap();
    (storage, written, at)
}

fn all_options() -> Vec<WriterOptions> {
    let mut all = Vec::new();
    for block_bytes in [None, Some(4096), Some(65536), Some(4 << 20)] {
        for (compression, plain) in [
            (Compression::Zstd { level: 1 }, false),
            (Compression::None, false),
            (Compression::None, true),
        ] {
            all.push(WriterOptions {
                compression,
                plain,
                block_bytes,
                threads: 1,
                ..WriterOptions::default()
            });
        }
    }
    all
}

#[test]
fn content_reads_back_in_every_layout() {
    let (files, tree) = (content(9_500_000), content(300_000));
    for options in all_options() {
        let (storage, written, at) = write(&options, &files, &tree);
        for verify in [Verify::Checksums, Verify::Merkle] {
            let open = changed(OpenOptions::default(), |new| new.verify = verify);
            let image = Image::open_storage(storage.clone(), &open).unwrap();
            assert_eq!(image.size(), written.size(), "{options:?}");
            let whole = read(&*image, 0, image.size() as usize);
            assert!(whole[..1024].iter().all(|&b| b == 0));
            assert_eq!(&whole[1024..1034], b"superblock");
            assert!(whole[4096..4096 + files.len()] == files[..], "{options:?}");
            let at = at as usize;
            assert!(whole[at..at + tree.len()] == tree[..], "{options:?}");
            let mut small = [0; 5000];
            image.read_at(123_457, &mut small).unwrap();
            assert!(small[..] == whole[123_457..128_457]);
            assert_eq!(image.metadata().unwrap()["tool"], "test");
        }
        assert_sound(storage);
    }
}

#[test]
fn bytes_do_not_depend_on_the_number_of_threads() {
    let (files, tree) = (content(6_000_000), content(100_000));
    for options in all_options() {
        let (one, ..) = write(&options, &files, &tree);
        let options = WriterOptions {
            threads: 3,
            ..options
        };
        let (three, ..) = write(&options, &files, &tree);
        assert!(one.to_vec() == three.to_vec(), "{options:?}");
    }
}

#[test]
fn plain_file_is_an_image_of_its_address_space() {
    let options = changed(WriterOptions::default(), |new| new.plain = true);
    let (storage, written, _) = write(&options, &content(1_000_000), &content(5000));
    let image = Image::open_storage(storage.clone(), &OpenOptions::default()).unwrap();
    let whole = read(&*image, 0, written.size() as usize);
    assert!(storage.to_vec()[1024..whole.len()] == whole[1024..]);
}

#[test]
fn extents_cover_the_address_space() {
    for options in all_options() {
        let (storage, written, _) = write(&options, &content(5_000_000), &content(5000));
        let image = Image::open_storage(storage, &OpenOptions::default()).unwrap();
        let mut next = 0;
        for extent in image.extents() {
            let extent = extent.unwrap();
            assert_eq!(extent.offset, next);
            next += extent.length;
            if let Mapping::Raw { stored } = extent.mapping {
                assert_eq!(u64::from(stored.bytes), extent.length);
            }
        }
        assert_eq!(next, written.size());
    }
}

/// Damages single bytes. Each read returns the right content or an error, and the check finds the
/// damage.
#[test]
fn damage_anywhere_is_found_and_never_read() {
    let (files, tree) = (content(400_000), content(20_000));
    for options in all_options() {
        let (storage, written, _) = write(&options, &files, &tree);
        let good = storage.to_vec();
        let image = Image::open_storage(storage, &OpenOptions::default()).unwrap();
        let whole = read(&*image, 0, written.size() as usize);
        for place in (1024..good.len()).step_by(good.len() / 97) {
            let mut bad = good.clone();
            bad[place] ^= 0x10;
            let storage = Arc::new(MemoryStorage::new(bad));
            let report = check(storage.clone(), &CheckOptions::FULL).unwrap();
            assert!(!report.is_sound(), "{options:?}: byte {place}");
            let mut found = vec![0; written.size() as usize];
            if let Ok(image) = Image::open_storage(storage, &OpenOptions::default())
                && image.read_at(0, &mut found).is_ok()
            {
                assert!(found == whole, "{options:?}: byte {place}");
            }
        }
    }
}

#[test]
fn either_slot_serves() {
    let (storage, written, _) = write(&WriterOptions::default(), b"x", b"y");
    for slot in [0, 512] {
        let mut bad = storage.to_vec();
        bad[slot + 100] ^= 1;
        let storage = Arc::new(MemoryStorage::new(bad));
        let open = changed(OpenOptions::default(), |new| new.verify = Verify::Merkle);
        let image = Image::open_storage(storage.clone(), &open).unwrap();
        assert_eq!(image.size(), written.size());
        let report = check(storage, &CheckOptions::FULL).unwrap();
        assert!(report.is_sound());
        assert_eq!(report.findings[0].code, "header-slot");
    }
}

#[test]
fn an_address_space_of_a_terabyte_of_zeros_is_written_at_once() {
    let storage = Arc::new(MemoryStorage::default());
    let mut writer = ImageWriter::on_storage(storage.clone(), WriterOptions::default()).unwrap();
    writer.append_zeros(1 << 40).unwrap();
    let written = writer.finish(&[], &serde_json::json!({})).unwrap();
    assert_eq!(written.size(), (1 << 40) + 4096);
    verify_written(&written, 1).unwrap();
    assert!(storage.to_vec().len() < 5 << 20);
}

#[test]
fn full_disk_is_reported_by_append_or_finish() {
    let files = content(30_000_000);
    for threads in [1, 2] {
        for room in [5_000, 2_000_000] {
            let options = WriterOptions {
                compression: Compression::None,
                threads,
                ..WriterOptions::default()
            };
            let disk = Arc::new(SmallDisk::new(room));
            let mut writer = ImageWriter::on_storage(disk, options).unwrap();
            let error = writer
                .append(&files)
                .err()
                .or_else(|| writer.finish(&[], &serde_json::json!({})).err())
                .expect("no room, no image");
            assert!(matches!(
                error,
                bcow::Error::Io { source, .. } if source.kind() == std::io::ErrorKind::StorageFull
            ));
        }
    }
}

/// The header is written last, so a file from a crash before that is not a BCoW file.
#[test]
fn a_file_that_was_not_finished_does_not_open() {
    for options in all_options() {
        let log = Arc::new(WriteLog::default());
        let mut writer = ImageWriter::on_storage(log.clone(), options.clone()).unwrap();
        writer.append(&content(3_000_000)).unwrap();
        writer
            .finish(b"superblock", &serde_json::json!({}))
            .unwrap();
        for count in 0..=log.writes() {
            let left = Arc::new(log.after(count));
            let opened = Image::open_storage(left, &OpenOptions::default());
            assert_eq!(opened.is_ok(), count == log.writes(), "{options:?}");
        }
    }
}
