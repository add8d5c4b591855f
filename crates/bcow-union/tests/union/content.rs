//! Content of files: small files, which are copied up whole, and partial files of large files.

use std::fs;
use std::os::unix::fs::MetadataExt;

use bcow_union::fs::SyncScope;
use bcow_union::testing::upper::PartialMark;

use crate::fixture::{open, open_with, with_limit};
use crate::host::{attribute, set_attribute};
use crate::image::{BIG, big, noise};

#[test]
fn small_file_is_copied_by_its_first_write() {
    let Some(mut union) = open() else { return };
    let node = union.id("small");
    union.write("small", 6, b"FILE");
    assert_eq!(union.content("small"), b"small FILE\n");
    assert_eq!(fs::read(union.host("small")).unwrap(), b"small FILE\n");
    union.fs().sync(node, SyncScope::All).unwrap();
    assert_eq!(union.id("small"), node);
    union.assert_kept();
}

#[test]
fn first_write_to_a_large_file_stores_the_touched_blocks() {
    let Some(mut union) = open() else { return };
    let node = union.id("big");
    let mut expected = big();
    union.write("big", 100_000, b"hello");
    expected[100_000..100_005].copy_from_slice(b"hello");
    assert_eq!(union.content("big"), expected);
    let host = fs::metadata(union.host("big")).unwrap();
    assert_eq!(host.len(), BIG as u64);
    assert!(host.blocks() <= 16 + 8, "{}", host.blocks());
    union.fs().sync(node, SyncScope::Data).unwrap();
    union.assert_kept();
    assert_eq!(union.content("big"), expected);
    // Truncate and extend: the truncated data does not come back.
    union.set_size("big", 150_001);
    union.set_size("big", 200_000);
    expected.truncate(150_001);
    expected.resize(200_000, 0);
    assert_eq!(union.content("big"), expected);
    union.assert_kept();
    assert_eq!(union.content("big"), expected);
    // Completely overwritten, the file no longer needs the image.
    let all = noise(9, 200_000);
    union.write("big", 0, &all);
    union.assert_kept();
    assert_eq!(union.content("big"), all);
}

/// This holds even if a failing host left the mark of a partial file that was not completed.
#[test]
fn a_file_that_was_emptied_shows_nothing_of_the_images_again() {
    const MARK: &str = "trusted.bcow.sketch";
    let Some(mut union) = open() else { return };
    union.write("big", 5, b"x");
    union.sync("big");
    let mark = attribute(&union.host("big"), MARK).unwrap();
    let mut mark = PartialMark::decode(&mark).unwrap();
    mark.map_exists = false;
    union.unlink("big").unwrap();
    union.reopen();
    union.set_permissions("h1", 0o600);
    mark.lower_limit = 9;
    set_attribute(&union.host("h1"), MARK, &mark.encode());
    union.set_size("h1", 0);
    union.write("h1", 0, b"new");
    union.sync("h1");
    assert_eq!(attribute(&union.host("h1"), MARK), None);
    union.assert_kept();
    assert_eq!(union.content("h1"), b"new");
}

#[test]
fn a_partial_of_a_file_without_a_name_leaves_nothing_behind() {
    let Some(mut union) = open_with(with_limit(1 << 20)) else {
        return;
    };
    let node = union.id("big");
    union.unlink("big").unwrap();
    let before = union.fs().report().stored_bytes.unwrap();
    let mut expected = big();
    for at in [5000, 100_000] {
        union.write_to(node, at, b"hello").unwrap();
        expected[at as usize..][..5].copy_from_slice(b"hello");
        union.fs().sync(node, SyncScope::All).unwrap();
    }
    assert!(union.fs().report().stored_bytes.unwrap() > before);
    assert_eq!(union.read(node), expected);
    assert_eq!(union.maps(), 0);
    union.fs().forget(node, 1000);
    assert_eq!(union.fs().report().stored_bytes.unwrap(), before);
    union.assert_kept();
    assert!(union.get("big").is_none());
}

#[test]
fn renamed_and_removed_partials_leave_nothing_behind() {
    let Some(mut union) = open() else { return };
    union.write("big", 5000, b"hello");
    union.sync("big");
    assert_eq!(union.maps(), 1);
    union.rename("big", "dir/BIG").unwrap();
    union.assert_kept();
    let mut expected = big();
    expected[5000..5005].copy_from_slice(b"hello");
    assert_eq!(union.content("dir/BIG"), expected);
    let node = union.id("dir/BIG");
    union.unlink("dir/BIG").unwrap();
    assert_eq!(union.maps(), 0);
    union.write_to(node, 0, b"still").unwrap();
    expected[..5].copy_from_slice(b"still");
    assert_eq!(union.read(node), expected);
    union.assert_kept();
    assert!(union.get("dir/BIG").is_none());
}
