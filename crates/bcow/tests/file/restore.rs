//! Restoring a damaged file from other copies: the file gets the bytes of the original, and a range
//! that no copy has intact stays as it is and is reported.

use std::fs;
use std::io;
use std::sync::Arc;

use bcow::check::{CheckOptions, RestoreError, Restored, check, restore};
use bcow::format::choose_header;
use bcow::{Compression, Image, ImageWriter, MemoryStorage, OpenOptions, Storage, WriterOptions};
use proptest::prelude::*;

use crate::vectors::folder;

/// A sealed image whose content does not repeat.
fn image(seed: u64) -> Vec<u8> {
    let storage = Arc::new(MemoryStorage::default());
    let options = WriterOptions {
        compression: Compression::None,
        ..WriterOptions::default()
    };
    let mut writer = ImageWriter::on_storage(storage.clone(), options).unwrap();
    let noise = |i: u64| (i ^ seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56;
    let content: Vec<u8> = (0..1 << 20).map(|i| noise(i) as u8).collect();
    writer.append(&content).unwrap();
    writer.begin_metadata().unwrap();
    writer.append(b"tree").unwrap();
    writer.finish(b"", &serde_json::json!({})).unwrap();
    storage.to_vec()
}

/// A file whose tree has two levels.
fn two_levels() -> Vec<u8> {
    fs::read(folder("valid/merkle-two-levels.bcow")).unwrap()
}

fn root(file: &[u8]) -> [u8; 32] {
    choose_header(file).unwrap().merkle.unwrap().root
}

fn copies(files: &[&[u8]]) -> Vec<Arc<dyn Storage>> {
    let storage =
        |file: &&[u8]| -> Arc<dyn Storage> { Arc::new(MemoryStorage::new(file.to_vec())) };
    files.iter().map(storage).collect()
}

/// The file after the repair, and the result.
fn restored(
    damaged: &[u8],
    root: Option<[u8; 32]>,
    from: &[&[u8]],
) -> (Vec<u8>, Result<Restored, RestoreError>) {
    let storage = MemoryStorage::new(damaged.to_vec());
    let result = restore(&storage, root, &copies(from), 2);
    (storage.to_vec(), result)
}

#[test]
fn a_sound_file_stays_as_it_is() {
    for file in [image(1), two_levels()] {
        let (after, result) = restored(&file, None, &[&file]);
        assert_eq!(result.unwrap(), Restored::default());
        assert!(after == file);
    }
}

#[test]
fn the_tree_of_any_copy_confirms_the_bytes_of_all() {
    let file = two_levels();
    let tree = choose_header(&file).unwrap().merkle.unwrap().offset as usize;
    let mut without_tree = file.clone();
    without_tree[tree..].fill(0);
    let (after, result) = restored(&file, None, &[&without_tree]);
    assert_eq!(result.unwrap(), Restored::default());
    assert!(after == file);
    // The copy has the lost bytes, and the file has the tree.
    let mut damaged = file.clone();
    damaged[5000..6000].fill(0xAA);
    let (after, result) = restored(&damaged, None, &[&without_tree]);
    assert_eq!(result.unwrap().unrestored, []);
    assert!(after == file);
}

#[test]
fn two_damaged_copies_make_each_other_whole() {
    let file = image(2);
    let (mut one, mut two) = (file.clone(), file.clone());
    one[300_000..300_100].fill(0xAA);
    two[700_000..900_000].fill(0xAA);
    let (first, result) = restored(&one, None, &[&two]);
    assert_eq!(result.unwrap().unrestored, []);
    assert!(first == file);
    let (second, result) = restored(&two, None, &[&one]);
    assert_eq!(result.unwrap().unrestored, []);
    assert!(second == file);
}

#[test]
fn a_range_that_no_copy_has_is_reported_and_stays() {
    let file = image(3);
    let mut damaged = file.clone();
    damaged[300_000] ^= 1;
    damaged[700_000] ^= 1;
    let mut copy = file.clone();
    copy[300_001] ^= 1;
    let (after, result) = restored(&damaged, None, &[&copy]);
    let result = result.unwrap();
    assert_eq!((result.written.len(), result.unrestored.len()), (1, 1));
    assert!(result.unrestored[0].contains(&300_000), "{result:?}");
    let mut expected = file;
    expected[300_000] ^= 1;
    assert!(after == expected);
}

#[test]
fn copies_with_other_content_are_not_used() {
    let mut damaged = image(4);
    let wanted = root(&damaged);
    damaged[500_000] ^= 1;
    let other = image(5);
    let mut forged = image(5);
    // The other content under the header of this one.
    forged[..1024].copy_from_slice(&damaged[..1024]);
    let (after, result) = restored(&damaged, None, &[&other]);
    assert!(matches!(result, Err(RestoreError::NoCopy { root }) if root == wanted));
    assert!(after == damaged);
    let (after, result) = restored(&damaged, None, &[&forged]);
    assert_eq!(result.unwrap().written, []);
    assert!(after == damaged);
}

#[test]
fn a_lost_header_needs_the_root_from_elsewhere() {
    let file = image(6);
    let mut damaged = file.clone();
    damaged[..1024].fill(0);
    let (after, result) = restored(&damaged, None, &[&file]);
    assert!(matches!(result, Err(RestoreError::UnknownRoot)));
    assert!(after == damaged);
    let (after, result) = restored(&damaged, Some(root(&file)), &[&file]);
    assert_eq!(result.unwrap().written, vec![0..1024]);
    assert!(after == file);
    let (_, result) = restored(b"short", Some(root(&file)), &[&file]);
    assert_eq!(result.unwrap().unrestored, []);
}

#[test]
fn a_forged_header_of_the_same_root_is_replaced() {
    let file = image(7);
    let mut header = choose_header(&file).unwrap();
    header.metadata.crc ^= 1;
    header.generation += 5;
    let mut forged = file.clone();
    forged[..512].copy_from_slice(&header.encode());
    let (after, result) = restored(&forged, None, &[&file]);
    assert_eq!(result.unwrap().written, vec![0..1024]);
    assert!(after == file);
    // As a copy it must not spoil a sound file.
    let (after, result) = restored(&file, None, &[&forged]);
    assert_eq!(result.unwrap().written, []);
    assert!(after == file);
}

#[test]
fn a_file_gets_its_length_back() {
    let file = two_levels();
    for cut in [1024, 5000, file.len() - 1] {
        let (after, result) = restored(&file[..cut], None, &[&file]);
        assert_eq!(result.unwrap().unrestored, [], "{cut}");
        assert!(after == file, "{cut}");
    }
    let longer = [&file[..], b"more"].concat();
    let (after, result) = restored(&longer, None, &[&file]);
    let result = result.unwrap();
    assert_eq!((&result.written[..], result.cut_off), (&[][..], 4));
    assert!(after == file);
}

#[test]
fn each_restored_byte_is_counted_once() {
    let file = image(10);
    // The header slots and every chunk are damaged.
    let damaged = vec![0xAA; file.len()];
    let (after, result) = restored(&damaged, Some(root(&file)), &[&file]);
    let result = result.unwrap();
    assert!(after == file);
    assert_eq!(result.written, vec![0..file.len() as u64]);
    assert_eq!(result.written_bytes(), file.len() as u64);
}

/// A storage whose length the host does not tell.
struct NoLength;

impl Storage for NoLength {
    fn len(&self) -> io::Result<u64> {
        Err(io::Error::other("no such device"))
    }
    fn read_at(&self, _: u64, _: &mut [u8]) -> io::Result<()> {
        Err(io::ErrorKind::UnexpectedEof.into())
    }
    fn write_at(&self, _: u64, _: &[u8]) -> io::Result<()> {
        Ok(())
    }
    fn set_len(&self, _: u64) -> io::Result<()> {
        Ok(())
    }
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn an_error_of_the_length_names_no_offset() {
    let file = image(9);
    let error = restore(&NoLength, Some(root(&file)), &copies(&[&file]), 1).unwrap_err();
    assert_eq!(error.to_string(), "cannot get the length: no such device");
    let error = Image::open_storage(Arc::new(NoLength), &OpenOptions::default()).err();
    let error = error.map(|error| error.to_string());
    assert_eq!(
        error.as_deref(),
        Some("cannot get the length: no such device")
    );
}

#[test]
fn a_writable_file_has_no_tree() {
    let disk = Arc::new(MemoryStorage::default());
    bcow::Disk::create_alone(disk.clone(), &bcow::CreateOptions::disk(1 << 20))
        .unwrap()
        .close()
        .unwrap();
    let disk = disk.to_vec();
    let (after, result) = restored(&disk, None, &[&image(1)]);
    assert!(matches!(result, Err(RestoreError::NoTree)));
    assert!(after == disk);
}

proptest! {
    /// Any damage behind the header is mended if no byte is damaged in all copies; and no damage
    /// gives a file that differs from the original without a report.
    #[test]
    fn any_damage_is_mended_or_reported(
        deep in any::<bool>(),
        spots in proptest::collection::vec((any::<usize>(), 1usize..200, 0usize..3), 1..12),
    ) {
        let file = if deep { two_levels() } else { image(8) };
        let mut versions = vec![file.clone(); 3];
        for (at, length, version) in spots {
            let at = 1024 + at % (file.len() - 1024);
            let end = file.len().min(at + length);
            for byte in &mut versions[version][at..end] {
                *byte = !*byte;
            }
        }
        let (after, result) = restored(&versions[0], None, &[&versions[1], &versions[2]]);
        let result = result.unwrap();
        prop_assert_eq!(after == file, result.unrestored.is_empty());
        for (at, (have, right)) in after.iter().zip(&file).enumerate() {
            let reported = result.unrestored.iter().any(|range| range.contains(&(at as u64)));
            prop_assert!(have == right || reported, "byte {}", at);
        }
        let report = check(Arc::new(MemoryStorage::new(after)), &CheckOptions::FULL).unwrap();
        prop_assert_eq!(report.is_sound(), result.unrestored.is_empty());
    }
}
