//! The limit of the bytes that an upper may store.

use std::fs;

use bcow_union::fs::Allocate;
use rustix::io::Errno;

use crate::fixture::{Union, open_with, open_with_blocks, with_limit};
use crate::host::attribute;
use crate::image::{BIG, big, noise};

#[test]
fn limit_counts_stored_bytes_and_a_removal_releases_them() {
    // Ten blocks, and those for attributes, the map and extent records.
    let Some(mut union) = open_with_blocks(13) else {
        return;
    };
    let left = |union: &Union| union.fs().statistics().unwrap().available;
    let node = union.id("big");
    let rest = union.create("rest", 0o644).unwrap().node;
    for block in 0..10 {
        union.write("big", block * 8192, b"x");
    }
    union.sync("big");
    let unused = left(&union) * 4096;
    if unused > 0 {
        let written = union.write_to(rest, 0, &noise(3, unused as usize + 1));
        assert_eq!(written, Ok(unused as u32));
    }
    assert_eq!(union.write_to(node, 100_001, b"x"), Err(Errno::NOSPC));
    // Stored blocks can be overwritten.
    union.write("big", 0, b"y");
    union.reopen();
    let node = union.id("big");
    assert_eq!(union.write_to(node, 100_001, b"x"), Err(Errno::NOSPC));
    union.write("big", 0, b"z");
    union.unlink("rest").unwrap();
    union.unlink("big").unwrap();
    union.forget_all();
    let new = union.create("new", 0o644).unwrap().node;
    assert_eq!(left(&union), 13);
    let data = noise(3, 11 * 4096);
    assert_eq!(union.write_to(new, 0, &data), Ok(11 * 4096));
    let data = noise(3, 3 * 4096);
    assert_eq!(union.write_to(new, 11 * 4096, &data), Ok(2 * 4096));
    assert_eq!(union.write_to(new, 13 * 4096, b"x"), Err(Errno::NOSPC));
    // A hole makes room, and a write into it takes the room again.
    union
        .fs()
        .allocate(new, 4096, 4096, Allocate::PunchHole)
        .unwrap();
    assert_eq!(left(&union), 1);
    assert_eq!(union.write_to(new, 5000, b"x"), Ok(1));
    assert_eq!(union.write_to(new, 13 * 4096, b"x"), Err(Errno::NOSPC));
    union.set_size("new", 10 * 4096);
    assert_eq!(left(&union), 3);
    // A removal frees the space also of a file that no request has used since the mount.
    union.reopen();
    union.unlink("new").unwrap();
    union.forget_all();
    let new = union.create("newer", 0o644).unwrap().node;
    assert_eq!(union.write_to(new, 0, &data), Ok(3 * 4096));
    assert_eq!(left(&union), 10);
}

#[test]
fn space_that_was_allocated_is_free_when_the_file_is_gone() {
    let Some(union) = open_with(with_limit(100 * 4096)) else {
        return;
    };
    let fs = union.fs();
    let empty = fs.report().stored_bytes.unwrap();
    let used = || (fs.report().stored_bytes.unwrap() - empty) / 4096;
    let new = union.create("new", 0o644).unwrap().node;
    fs.allocate(new, 0, 90 * 4096, Allocate::Extend).unwrap();
    union.write("new", 4096, b"some bytes");
    assert_eq!(used(), 90);
    // Forgets of the kernel do not change this.
    fs.forget(new, 1000);
    assert_eq!(used(), 90);
    union.write("new", 0, b"more");
    assert_eq!(used(), 90);
    let node = union.id("new");
    union.unlink("new").unwrap();
    fs.forget(node, 1000);
    assert_eq!(used(), 0);
}

#[test]
fn hard_links_count_once_and_until_the_last_is_gone() {
    let Some(mut union) = open_with(with_limit(1 << 20)) else {
        return;
    };
    let empty = union.fs().report();
    let figures = |union: &Union| {
        let report = union.fs().report();
        let bytes = report.stored_bytes.unwrap() - empty.stored_bytes.unwrap();
        (
            bytes / 4096,
            report.stored_inodes.unwrap() - empty.stored_inodes.unwrap(),
        )
    };
    let node = union.create("one", 0o644).unwrap().node;
    union.write("one", 0, &noise(3, 5 * 4096));
    let root = bcow_union::NodeId::ROOT;
    for name in ["two", "three"] {
        union.fs().link(node, root, name.as_bytes()).unwrap();
    }
    assert_eq!(figures(&union), (5, 1));
    union.reopen();
    assert_eq!(figures(&union), (5, 1));
    for (name, left) in [("one", (5, 1)), ("two", (5, 1)), ("three", (0, 0))] {
        union.unlink(name).unwrap();
        union.forget_all();
        assert_eq!(figures(&union), left, "{name}");
    }
}

#[test]
fn parallel_writers_stay_within_the_limit_and_use_all_of_it() {
    let Some(union) = open_with_blocks(500) else {
        return;
    };
    let nodes: Vec<_> = (0..4)
        .map(|index| union.create(&format!("f{index}"), 0o644).unwrap().node)
        .collect();
    std::thread::scope(|scope| {
        for (index, node) in nodes.iter().enumerate() {
            let union = &union;
            scope.spawn(move || {
                let data = vec![7; (index * 2 + 1) * 4096 + index * 100];
                let mut at = 0;
                while let Ok(written) = union.write_to(*node, at, &data) {
                    at += u64::from(written);
                    // Stored blocks can always be overwritten.
                    let again = (written as usize).min(data.len());
                    let again = &data[..again];
                    let whole = union.write_to(*node, at - u64::from(written), again);
                    assert_eq!(whole, Ok(written));
                }
            });
        }
    });
    // A write that found no space has not seen the space that other writes gave back later.
    while union.write_to(nodes[0], 1 << 30, b"x") == Ok(1) {}
    let report = union.fs().report();
    let limit = report.limit_bytes.unwrap();
    assert!(report.stored_bytes.unwrap() <= limit, "{report:?}");
    assert!(
        report.stored_bytes.unwrap() + 8 * 4096 >= limit,
        "{report:?}"
    );
}

#[test]
fn a_first_write_without_room_leaves_the_images_file() {
    // The limit is enough for its name and its attributes, but not for its bytes.
    let Some(mut union) = open_with_blocks(3) else {
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
