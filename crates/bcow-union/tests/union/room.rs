//! The limit of the bytes that an upper may store.

use std::fs;

use bcow_union::fs::Allocate;
use rustix::io::Errno;

use crate::fixture::{open_with, with_limit};
use crate::host::attribute;
use crate::image::{BIG, big, noise};

#[test]
fn limit_counts_stored_bytes_and_a_removal_releases_them() {
    // Ten blocks, the blocks for attributes, the map and extent records, and the most that a
    // copy-up needs temporarily.
    let Some(mut union) = open_with(with_limit(13 * 4096)) else {
        return;
    };
    let node = union.id("big");
    for block in 0..10 {
        union.write("big", block * 8192, b"x");
    }
    assert_eq!(union.write_to(node, 100_001, b"x"), Err(Errno::NOSPC));
    // Stored blocks can be overwritten.
    union.write("big", 0, b"y");
    union.reopen();
    let node = union.id("big");
    assert_eq!(union.write_to(node, 100_001, b"x"), Err(Errno::NOSPC));
    union.unlink("big").unwrap();
    union.fs().forget(node, 1000);
    let new = union.create("new", 0o644).unwrap().node;
    let data = noise(3, 11 * 4096);
    assert_eq!(union.write_to(new, 0, &data), Ok(11 * 4096));
    let data = noise(3, 3 * 4096);
    assert_eq!(union.write_to(new, 11 * 4096, &data), Ok(2 * 4096));
    assert_eq!(union.write_to(new, 13 * 4096, b"x"), Err(Errno::NOSPC));
    // This includes a file that no request has used since the mount.
    union.reopen();
    let node = union.id("new");
    union.unlink("new").unwrap();
    union.fs().forget(node, 1000);
    let new = union.create("newer", 0o644).unwrap().node;
    assert_eq!(union.write_to(new, 0, &data), Ok(3 * 4096));
}

#[test]
fn space_that_was_allocated_is_free_when_the_file_is_gone() {
    let Some(union) = open_with(with_limit(100 * 4096)) else {
        return;
    };
    let fs = union.fs();
    let used = || fs.report().counted_bytes / 4096;
    let new = union.create("new", 0o644).unwrap().node;
    fs.allocate(new, 0, 90 * 4096, Allocate::Extend).unwrap();
    union.write("new", 4096, b"some bytes");
    assert_eq!(used(), 90);
    // Forgets of the kernel do not change this.
    fs.forget(new, 1000);
    assert_eq!(used(), 90);
    union.write("new", 0, b"more");
    assert_eq!(used(), 91);
    union.write("new", 0, b"more");
    assert_eq!(used(), 90);
    let node = union.id("new");
    union.unlink("new").unwrap();
    fs.forget(node, 1000);
    assert_eq!(used(), 0);
}

#[test]
fn a_first_write_without_room_leaves_the_images_file() {
    // The limit is enough for its name and its attributes, but not for its bytes.
    let Some(mut union) = open_with(with_limit(2 * 4096)) else {
        return;
    };
    union.set_permissions("big", 0o600);
    union.rename("big", "BIG").unwrap();
    let host = union.host("BIG");
    let before = union.get("BIG").unwrap().mtime;
    for _ in 0..3 {
        let node = union.id("BIG");
        for _ in 0..2 {
            assert_eq!(union.write_to(node, 5, b"x"), Err(Errno::NOSPC));
            assert_eq!(union.content("BIG"), big());
        }
        assert_eq!(fs::metadata(&host).unwrap().len(), BIG as u64);
        let xattr = |name| attribute(&host, name);
        assert_eq!(xattr("trusted.bcow.sketch"), None);
        assert_eq!(xattr("trusted.overlay.metacopy"), Some(vec![]));
        assert_eq!(xattr("trusted.overlay.redirect"), Some(b"/big".to_vec()));
        union.assert_kept();
    }
    assert_eq!(union.get("BIG").unwrap().mtime, before);
    // With enough space, the file is writable.
    union.options.size_limit = None;
    union.reopen();
    union.write("BIG", 5, b"x");
    union.assert_kept();
    let mut expected = big();
    expected[5] = b'x';
    assert_eq!(union.content("BIG"), expected);
}
