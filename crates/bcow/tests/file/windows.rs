//! Windows: a small image shows the content of other images, and an error names the image at fault.

use std::collections::HashMap;
use std::sync::Arc;

use bcow::format::{BackingEntry, BackingName, Uba};
use bcow::{
    BackingResolver, BlockDevice, Composer, Composition, Compression, DiskForm, Error, Image,
    ImageWriter, Mapping, MemoryStorage, OpenOptions, ShownBy, Verify, WriterOptions, Written,
    verify_written,
};
use bcow_testkit::{assert_sound, changed, noise, read};
use sha2::{Digest, Sha256};

const REGION: u64 = 4 << 20;

/// Files by digest.
#[derive(Default)]
struct Store(HashMap<[u8; 32], Vec<u8>>);

impl Store {
    fn add(&mut self, bytes: Vec<u8>, size: u64) -> BackingEntry {
        let digest = Sha256::digest(&bytes).into();
        self.0.insert(digest, bytes);
        BackingEntry {
            name: BackingName::Digest(digest),
            size,
        }
    }
}

struct Resolver<'a>(&'a Store, OpenOptions);

impl BackingResolver for Resolver<'_> {
    fn resolve(&self, backing: &BackingEntry) -> Result<Option<Arc<dyn BlockDevice>>, Error> {
        let BackingName::Digest(digest) = &backing.name else {
            return Ok(None);
        };
        let Some(bytes) = self.0.0.get(digest) else {
            return Ok(None);
        };
        let storage = Arc::new(MemoryStorage::new(bytes.clone()));
        Ok(Some(Image::open_with_backings(storage, &self.1, self)?))
    }
}

fn all_options() -> Vec<WriterOptions> {
    let mut all = Vec::new();
    for block_bytes in [None, Some(4096), Some(4 << 20)] {
        for (compression, plain) in [
            (Compression::Zstd { level: 1 }, false),
            (Compression::None, true),
        ] {
            all.push(WriterOptions {
                compression,
                plain,
                block_bytes,
                threads: 2,
                ..WriterOptions::default()
            });
        }
    }
    all
}

fn layer(store: &mut Store, options: &WriterOptions, content: &[u8]) -> BackingEntry {
    let storage = Arc::new(MemoryStorage::default());
    let mut writer = ImageWriter::on_storage(storage.clone(), options.clone()).unwrap();
    writer.append(content).unwrap();
    let written = writer.finish(b"layer", &serde_json::json!({})).unwrap();
    store.add(storage.to_vec(), written.size())
}

fn stack(
    options: &WriterOptions,
    metadata: &[u8],
    backings: &[&BackingEntry],
) -> (Arc<MemoryStorage>, Written, Vec<u64>) {
    let storage = Arc::new(MemoryStorage::default());
    let options = WriterOptions {
        metadata_first: true,
        ..options.clone()
    };
    let mut writer = ImageWriter::on_storage(storage.clone(), options.clone()).unwrap();
    assert_eq!(writer.begin_metadata().unwrap(), 4096);
    writer.append(metadata).unwrap();
    let mut starts = Vec::new();
    for backing in backings {
        let index = writer.add_backing((*backing).clone());
        starts.push(writer.append_window(index, 0, backing.size).unwrap());
    }
    let written = writer
        .finish(b"stack", &serde_json::json!({"tool": "test"}))
        .unwrap();
    verify_written(&written, options.threads).unwrap();
    (storage, written, starts)
}

fn open(storage: &Arc<MemoryStorage>, store: &Store, verify: Verify) -> Arc<Image> {
    let options = changed(OpenOptions::default(), |new| new.verify = verify);
    let resolver = Resolver(store, options.clone());
    Image::open_with_backings(storage.clone(), &options, &resolver).unwrap()
}

#[test]
fn a_stack_shows_its_layers_whole() {
    let (one, two) = (noise(1, 5_000_000), noise(2, 70_000));
    let tree = noise(3, 100_000);
    for options in all_options() {
        let mut store = Store::default();
        let lower = layer(&mut store, &options, &one);
        let upper = layer(&mut store, &options, &two);
        let (storage, written, starts) = stack(&options, &tree, &[&lower, &upper, &lower]);
        let alone = WriterOptions {
            threads: 1,
            ..options.clone()
        };
        let (same, ..) = stack(&alone, &tree, &[&lower, &upper, &lower]);
        assert!(same.to_vec() == storage.to_vec(), "{options:?}");
        assert!(written.file_bytes() < 300_000 || options.block_bytes == Some(4 << 20));
        assert_eq!(starts[0], REGION);
        assert!(starts.iter().all(|start| start % REGION == 0));
        for verify in [Verify::Checksums, Verify::Merkle] {
            let image = open(&storage, &store, verify);
            assert_eq!(read(&*image, 1024, 5), b"stack");
            assert!(read(&*image, 4096, tree.len()) == tree);
            for (start, content) in starts.iter().zip([&one, &two, &one]) {
                assert_eq!(read(&*image, start + 1024, 5), b"layer");
                assert!(read(&*image, start + 4096, content.len()) == *content);
            }
            // After the end of a window come zeros, and then the next window.
            let end = starts[0] + lower.size;
            let gap = read(&*image, end, (starts[1] - end) as usize);
            assert!(gap.iter().all(|&byte| byte == 0));
            let across = read(&*image, end - 10, (starts[1] + 1029 - end + 10) as usize);
            assert_eq!(across[across.len() - 5..], *b"layer");
        }
        assert_sound(storage);
    }
}

#[test]
fn map_shows_windows_region_by_region() {
    let options = WriterOptions::default();
    let mut store = Store::default();
    let lower = layer(&mut store, &options, &noise(1, 5_000_000));
    let (storage, _, starts) = stack(&options, b"tree", &[&lower]);
    let image = Image::open_storage(storage, &OpenOptions::default()).unwrap();
    let windows: Vec<_> = image
        .extents()
        .map(|extent| extent.unwrap())
        .filter(|extent| extent.offset >= starts[0])
        .map(|extent| (extent.offset, extent.length, extent.mapping))
        .collect();
    let rest = lower.size - REGION;
    let backing = |offset, bytes| Mapping::Backing {
        by: ShownBy::Window,
        index: 0,
        offset,
        bytes,
    };
    assert_eq!(
        windows,
        [
            (REGION, REGION, backing(0, REGION)),
            (2 * REGION, rest, backing(REGION, rest)),
        ]
    );
}

#[test]
fn a_plain_stack_is_an_image_up_to_its_last_stored_block() {
    for block_bytes in [None, Some(4096)] {
        let options = WriterOptions {
            plain: true,
            block_bytes,
            ..WriterOptions::default()
        };
        let mut store = Store::default();
        let lower = layer(&mut store, &options, &noise(1, 90_000));
        let tree = noise(3, 100_000);
        let (storage, written, _) = stack(&options, &tree, &[&lower]);
        let file = storage.to_vec();
        assert_eq!(file[1024..1029], *b"stack");
        assert!(file[4096..4096 + tree.len()] == tree);
        assert!(written.file_bytes() < 200_000);
        let image = open(&storage, &store, Verify::Merkle);
        for extent in image.extents() {
            let extent = extent.unwrap();
            if let Mapping::Raw { stored } = extent.mapping {
                assert_eq!(stored.at, Uba(extent.offset));
            }
        }
    }
}

#[test]
fn windows_follow_content_and_reach_through_two_files() {
    for options in all_options() {
        let mut store = Store::default();
        let shared = noise(1, 8192);
        let lower = layer(&mut store, &options, &shared);
        let storage = Arc::new(MemoryStorage::default());
        let mut writer = ImageWriter::on_storage(storage.clone(), options.clone()).unwrap();
        let own = noise(2, 6_000_000);
        writer.append(&own).unwrap();
        writer.begin_metadata().unwrap();
        writer.append(b"tree").unwrap();
        let index = writer.add_backing(lower.clone());
        let start = writer.append_window(index, 4096, 8192).unwrap();
        let written = writer.finish(b"layer", &serde_json::json!({})).unwrap();
        verify_written(&written, 2).unwrap();
        assert_eq!(written.size(), start + 8192);
        assert_sound(storage.clone());
        let upper = store.add(storage.to_vec(), written.size());

        let (storage, _, starts) = stack(&options, b"merged", &[&lower, &upper]);
        let image = open(&storage, &store, Verify::Checksums);
        assert!(read(&*image, starts[1] + 4096, own.len()) == own);
        assert!(read(&*image, starts[1] + start, 8192) == shared);
    }
}

#[test]
fn windows_that_cannot_be_are_refused() {
    let storage = Arc::new(MemoryStorage::default());
    let mut writer = ImageWriter::on_storage(storage, WriterOptions::default()).unwrap();
    let backing = |size| BackingEntry {
        name: BackingName::Digest([7; 32]),
        size,
    };
    let small = writer.add_backing(backing(8192));
    let huge = writer.add_backing(backing(1 << 48));
    for (index, address, bytes, why) in [
        (9, 0, 4096, "only 2 backings"),
        (small, 0, 0, "whole sectors"),
        (small, 0, 4097, "whole sectors"),
        (small, 512, 4096, "whole sectors"),
        (small, 0, 12288, "only 8192 bytes"),
        (small, 8192, 4096, "only 8192 bytes"),
        (small, u64::MAX - 4095, 8192, "only 8192 bytes"),
        (huge, 0, 1 << 44, "does not fit"),
        (huge, 0, 1 << 48, "does not fit"),
    ] {
        let error = writer.append_window(index, address, bytes).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
    }
    // The rejected calls changed nothing.
    assert_eq!(writer.position(), 4096);
    assert_eq!(writer.append_window(small, 4096, 4096).unwrap(), REGION);
    assert_eq!(writer.position(), REGION + 4096);
    for error in [
        writer.append(b"x").unwrap_err(),
        writer.append_zeros(1).unwrap_err(),
        writer.begin_metadata().unwrap_err(),
    ] {
        assert_eq!(error.to_string(), "cannot append content after a window");
    }
}

#[test]
fn backings_that_an_image_cannot_name_are_refused() {
    let digest = BackingName::Digest([7; 32]);
    let cases = [
        (
            BackingName::FileName {
                name: "low.bcow".into(),
                identity: None,
            },
            4096,
            1,
            "by digest",
        ),
        (digest.clone(), 4095, 1, "4095 bytes"),
        (digest.clone(), (1 << 48) + 4096, 1, "bytes"),
        (digest, 4096, 65537, "the format holds 65536"),
    ];
    for (name, size, count, why) in cases {
        let storage = Arc::new(MemoryStorage::default());
        let mut writer = ImageWriter::on_storage(storage, WriterOptions::default()).unwrap();
        for _ in 0..count {
            let name = name.clone();
            writer.add_backing(BackingEntry { name, size });
        }
        let error = writer.finish(&[], &serde_json::json!({})).err().unwrap();
        assert!(error.to_string().contains(why), "{error}");
    }
}

#[test]
fn errors_name_the_backing() {
    let options = WriterOptions::default();
    let mut store = Store::default();
    let lower = layer(&mut store, &options, &noise(1, 90_000));
    let (storage, _, starts) = stack(&options, b"tree", &[&lower]);
    let name = lower.name.to_string();

    let alone = Image::open_storage(storage.clone(), &OpenOptions::default()).unwrap();
    assert_eq!(read(&*alone, 4096, 4), b"tree");
    let error = alone.read_at(starts[0] + 5, &mut [0]).unwrap_err();
    assert!(
        matches!(&error, Error::MissingBacking { name: found, logical }
        if *found == name && *logical == starts[0] + 5)
    );

    for bytes in store.0.values_mut() {
        bytes[50_000] ^= 1;
    }
    let damaged = open(&storage, &store, Verify::Checksums);
    let error = damaged.read_at(starts[0] + 5, &mut [0]).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with(&format!("backing {name}: block at byte 0 "))
    );
    assert_eq!(error.code(), Some("block-crc"));
    assert!(matches!(error.innermost(), Error::BadBlock { .. }));

    for bytes in store.0.values_mut() {
        bytes.truncate(20_000);
    }
    let resolver = Resolver(&store, OpenOptions::default());
    let error = Image::open_with_backings(storage, &OpenOptions::default(), &resolver)
        .err()
        .unwrap();
    assert!(
        error
            .to_string()
            .starts_with(&format!("backing {name}: the file is 20000 bytes"))
    );
    assert_eq!(error.code(), Some("truncated"));
}

#[test]
fn a_name_that_does_not_fit_into_the_table_is_refused() {
    // A length of 16 bits would be 4.
    let long = "name".repeat((1 << 14) + 1);
    for name in [
        BackingName::FileName {
            name: long.clone(),
            identity: None,
        },
        BackingName::Url {
            url: format!("s3://{long}"),
            merkle_root: [1; 32],
        },
    ] {
        let backing = BackingEntry { name, size: 4096 };
        let options = WriterOptions {
            disk: Some(DiskForm {
                size: 4096,
                backing: Some(backing),
                ..DiskForm::default()
            }),
            ..WriterOptions::default()
        };
        let storage = Arc::new(MemoryStorage::default());
        let mut writer = ImageWriter::on_storage(storage, options).unwrap();
        writer.append_absent(4096).unwrap();
        let written = writer.finish(&[], &serde_json::json!({}));
        assert!(matches!(written, Err(Error::Unsupported(_))));
    }
}

#[test]
fn a_window_onto_an_address_of_more_than_48_bits_is_refused() {
    let backing = BackingEntry {
        name: BackingName::Digest([1; 32]),
        size: 1 << 49,
    };
    let storage = Arc::new(MemoryStorage::default());
    let mut writer = ImageWriter::on_storage(storage.clone(), WriterOptions::default()).unwrap();
    let below = writer.add_backing(backing.clone());
    let added = writer.append_window(below, 1 << 48, 4096);
    assert!(matches!(added, Err(Error::Unsupported(_))));
    let form = Composition {
        size: 1 << 22,
        region_shift: 22,
        block_shift: 16,
        compression: Compression::None,
        backings: vec![backing],
    };
    let mut composer = Composer::new(storage, form).unwrap();
    assert!(composer.window(0, 0, 1 << 48, 4096).is_err());
    assert!(composer.fragment(0, 0, 1 << 48, 1).is_err());
}
