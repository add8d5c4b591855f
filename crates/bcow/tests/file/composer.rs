//! A composed disk: stored bytes, windows and fragments in any order.

use std::sync::Arc;

use bcow::format::{BackingEntry, BackingName};
use bcow::operation::{RewriteOptions, rewrite};
use bcow::{
    BlockDevice, Composer, Composition, Compression, Content, CreateOptions, Disk, Error, Image,
    Keep, Layout, Mapping, MemoryStorage, OneBacking, OpenOptions, ShownBy, WritableDevice,
};
use bcow_testkit::{assert_sound, content, noise, read};

const SIZE: u64 = (6 << 16) + 8192;
const BACKING: u64 = 5 << 16;

fn composition() -> Composition {
    Composition {
        size: SIZE,
        region_shift: 16,
        block_shift: 14,
        compression: Compression::Zstd { level: 3 },
        backings: vec![BackingEntry {
            name: BackingName::FileName {
                name: "below".into(),
                identity: None,
            },
            size: BACKING,
        }],
    }
}

/// A file, its content hash, and the content that it must have.
fn composed(pieces: &[(u64, Vec<u8>)]) -> (Arc<MemoryStorage>, [u8; 32], Vec<u8>) {
    let below = noise(5, BACKING as usize);
    let storage = Arc::new(MemoryStorage::default());
    let mut composer = Composer::new(storage.clone(), composition()).unwrap();
    let mut expected = vec![0; SIZE as usize];
    for (offset, bytes) in pieces {
        composer.write_at(*offset, bytes).unwrap();
        expected[*offset as usize..][..bytes.len()].copy_from_slice(bytes);
    }
    let region = 1 << 16;
    composer.fragment(2 * region + 4096, 0, 777, 100).unwrap();
    composer
        .fragment(2 * region, 0, BACKING - 4096, 4096)
        .unwrap();
    composer.window(3 * region, 0, 8192, region + 4096).unwrap();
    let mut show = |at: u64, from: u64, bytes: u64| {
        let shown = &below[from as usize..][..bytes as usize];
        expected[at as usize..][..bytes as usize].copy_from_slice(shown);
    };
    show(2 * region + 4096, 777, 100);
    show(2 * region, BACKING - 4096, 4096);
    show(3 * region, 8192, region + 4096);
    let hash = composer.content_hash().unwrap();
    composer
        .finish(&serde_json::json!({ "tool": "test" }))
        .unwrap();
    (storage, hash, expected)
}

fn pieces() -> Vec<(u64, Vec<u8>)> {
    vec![
        (100, vec![7; 5000]),
        (6 << 16, noise(1, 8192)),
        (0, vec![1; 100]),
        (16384, vec![0; 16384]),
        (65536 + 32768, vec![9; 16384]),
        (32768, vec![9; 16384]),
    ]
}

fn open(storage: Arc<MemoryStorage>) -> Arc<Image> {
    let below = Arc::new(noise(5, BACKING as usize)) as Arc<dyn BlockDevice>;
    Image::open_with_backings(storage, &OpenOptions::default(), &OneBacking(Some(below))).unwrap()
}

#[test]
fn pieces_in_any_order_give_the_same_content() {
    let (storage, hash, expected) = composed(&pieces());
    assert_sound(storage.clone());
    let image = open(storage);
    assert!(content(&*image) == expected);
    // Pieces of blocks, across their borders.
    for (at, length) in [
        (2 * 65536 + 4090, 200),
        (3 * 65536 - 5, 10),
        (4 * 65536 + 4000, 500),
    ] {
        let found = read(&*image, at as u64, length);
        assert!(found == expected[at..at + length], "{at}");
    }
    let mut reversed = pieces();
    reversed.reverse();
    let (again, same, expected_again) = composed(&reversed);
    assert_eq!(hash, same);
    assert!(expected == expected_again);
    assert!(content(&*open(again)) == expected);
    let mut other = pieces();
    other[0].1[0] = 8;
    assert_ne!(hash, composed(&other).1);
}

#[test]
fn equal_blocks_are_stored_once_and_zeros_not_at_all() {
    let (storage, _, _) = composed(&pieces());
    let image = open(storage);
    let at = |offset| image.map(offset).unwrap().mapping;
    assert_eq!(at(32768), at(65536 + 32768));
    assert_eq!(at(16384), Mapping::Hole);
    assert_eq!(at(5 << 16), Mapping::Hole);
}

#[test]
fn the_map_and_the_status_of_fragments_are_those_of_whole_blocks() {
    let (storage, _, _) = composed(&pieces());
    let image = open(storage);
    let extent = image.map(2 * 65536 + 5000).unwrap();
    assert_eq!((extent.offset, extent.length), (2 * 65536 + 4096, 4096));
    let fragment = Mapping::Backing {
        by: ShownBy::Fragment,
        index: 0,
        offset: 777,
        bytes: 100,
    };
    assert_eq!(extent.mapping, fragment);
    let status = image.status(2 * 65536 + 4096, 65536).unwrap();
    assert_eq!(
        (status.length, status.content, status.depth),
        (4096, Content::Data, 2)
    );
}

/// The map of a chain has a file with windows and fragments, which reads them itself.
#[test]
fn disks_over_windows_and_fragments_show_them() {
    let (storage, _, mut expected) = composed(&pieces());
    let view = open(storage);
    let mut top = view.clone() as Arc<dyn BlockDevice>;
    let written = [(2 * 65536 + 4096, 1), (3 * 65536 + 8192, 2)];
    for (at, byte) in written {
        let storage = Arc::new(MemoryStorage::default());
        let options = CreateOptions {
            layout: Layout::Space,
            block_bytes: Some(4096),
            ..CreateOptions::disk(SIZE)
        };
        let backing = Some(bcow_testkit::below(top.clone()));
        let disk = Disk::create(storage.clone(), &options, backing, &OpenOptions::default());
        let disk = disk.unwrap();
        disk.write_at(at, &[byte; 4096]).unwrap();
        expected[at as usize..][..4096].fill(byte);
        assert!(content(&disk) == expected);
        disk.close().unwrap();
        let below = OneBacking(Some(top));
        top = Image::open_with_backings(storage, &OpenOptions::default(), &below).unwrap();
    }
    for at in (0..SIZE).rev().step_by(4096).map(|last| last / 4096 * 4096) {
        let status = top.status(at, 4096).unwrap();
        assert_eq!(status.length, 4096);
        let found = (status.depth, status.content);
        if let Some((_, byte)) = written.iter().find(|(start, _)| *start == at) {
            assert_eq!(found, (3 - u32::from(*byte), Content::Data));
            continue;
        }
        let alone = view.status(at, 4096).unwrap();
        let depth = if alone.depth == 0 { 0 } else { alone.depth + 2 };
        assert_eq!(found, (depth, alone.content), "at {at}");
    }
    assert!(content(&*top) == expected);
    let mut given = Vec::new();
    top.read_with(0, SIZE, &mut |bytes| given.extend_from_slice(bytes))
        .unwrap();
    assert!(given == expected);
}

#[test]
fn what_does_not_fit_is_refused() {
    let new = || Composer::new(Arc::new(MemoryStorage::default()), composition()).unwrap();
    let refused = |result: Result<(), Error>| assert!(result.is_err());
    refused(new().window(4096, 0, 0, 4096));
    refused(new().window(65536, 1, 0, 4096));
    refused(new().window(65536, 0, BACKING, 4096));
    refused(new().window(65536, 0, 100, 4096));
    refused(new().fragment(65536, 0, BACKING - 1, 2));
    refused(new().fragment(65537, 0, 0, 2));
    refused(new().fragment(65536, 0, 0, 4097));
    refused(new().fragment(SIZE, 0, 0, 1));
    refused(new().write_at(SIZE - 1, &[1, 2]));
    let mut twice = new();
    twice.write_at(0, &[1; 16384]).unwrap();
    refused(twice.write_at(0, &[1]));
    let mut mixed = new();
    mixed.window(65536, 0, 0, 4096).unwrap();
    mixed.write_at(65536 + 32768, &[1]).unwrap();
    assert!(mixed.finish(&serde_json::json!({})).is_err());
}

#[test]
fn the_own_content_of_a_disk_with_windows_is_not_stored_without_them() {
    let (storage, _, expected) = composed(&[(0, noise(1, 16384))]);
    let over = OneBacking(Some(Arc::new(noise(5, BACKING as usize))));
    let disk = Image::open_with_backings(storage, &OpenOptions::default(), &over).unwrap();
    let new = || Arc::new(MemoryStorage::default());
    let form = RewriteOptions::sealed(&disk, Keep::Own);
    let Err(error) = rewrite(&*disk, new(), form, &()) else {
        panic!("the content of the windows and fragments is lost");
    };
    assert!(error.to_string().contains("windows"), "{error}");
    // All content can be stored.
    let whole = new();
    let form = RewriteOptions::sealed(&disk, Keep::All);
    rewrite(&*disk, whole.clone(), form, &()).unwrap();
    let whole = Image::open_storage(whole, &OpenOptions::default()).unwrap();
    assert!(content(&*whole) == expected);
}
