//! Tests of unions that take over the nodes of another one, also in the middle of a change. They
//! need root (for `trusted.` attributes) and mkfs.erofs.

use std::fs;
use std::ops::{ControlFlow, Range};

use bcow_testkit::noise;
use rustix::fs::XattrFlags;
use rustix::io::Errno;

use super::resent::New;
use super::tests::{BIG, BLOCK, Fixture, ROOT, plain, sized};
use super::{Attributes, Changes, ImageContent, RenameMode, SHARED_BYTES, SyncScope, XattrMode};
use crate::node::NodeId;
use crate::options::{SyncPolicy, UnionOptions};

fn options() -> UnionOptions {
    UnionOptions {
        can_be_taken_over: true,
        ..UnionOptions::default()
    }
}

pub(super) fn open() -> Option<Fixture> {
    Fixture::new(options())
}

/// With partial files of small files too.
fn partial() -> Option<Fixture> {
    Fixture::new(UnionOptions {
        small_bytes: 0,
        ..options()
    })
}

/// Names in the work directory of files without a name in the tree.
fn orphans(fixture: &Fixture) -> usize {
    let names = fs::read_dir(fixture.upper().join(".bcow/work")).unwrap();
    names
        .filter(|name| {
            let name = name.as_ref().unwrap().file_name();
            name.to_string_lossy().starts_with("orphan-")
        })
        .count()
}

pub(super) fn create(fixture: &Fixture, parent: NodeId, name: &str) -> NodeId {
    let made = fixture
        .fs()
        .make(&ROOT, parent, name.as_bytes(), 0o644, &New::File);
    made.unwrap().node
}

pub(super) fn mkdir(fixture: &Fixture, parent: NodeId, name: &str) -> NodeId {
    let made = fixture
        .fs()
        .make(&ROOT, parent, name.as_bytes(), 0o755, &New::Directory);
    made.unwrap().node
}

pub(super) fn attributes(fixture: &Fixture, id: NodeId) -> Attributes {
    fixture.fs().attributes(id).unwrap()
}

#[test]
fn nodes_stay_valid_with_their_references() {
    let Some(mut fixture) = open() else { return };
    let (many, file) = (fixture.get("many").node, fixture.get("many/3").node);
    let directory = mkdir(&fixture, many, "directory");
    let long = "n".repeat(200);
    let new = create(&fixture, directory, &long);
    fixture.write(new, 0, b"new");
    // Under another name, in a directory that was moved.
    let fs = fixture.fs();
    let (root, how) = (NodeId::ROOT, RenameMode::Replace);
    fs.rename(many, b"directory", root, b"moved", how).unwrap();
    fs.rename(root, b"many", directory, b"m", how).unwrap();
    // Three references in all.
    assert_eq!(fixture.get(&format!("moved/{long}")).node, new);
    assert_eq!(fixture.get(&format!("moved/{long}")).node, new);
    for _ in 0..2 {
        fixture.take_over();
        assert_eq!(fixture.read(new), b"new");
        assert_eq!(fixture.read(file), vec![3; 2 * BLOCK as usize]);
        assert_eq!(fixture.fs().lookup(many, b"3").unwrap().unwrap().node, file);
        fixture.fs().forget(file, 1);
    }
    assert_eq!(fixture.get("moved/m/3").node, file);
    fixture.write(file, 0, b"written");
    assert_eq!(&fixture.content("moved/m/3")[..8], b"written\x03");
    fixture.fs().forget(new, 2);
    assert_eq!(attributes(&fixture, new).size, 3);
    fixture.fs().forget(new, 1);
    fixture.fs().table.purge();
    assert_eq!(fixture.fs().attributes(new).unwrap_err(), Errno::STALE);
}

#[test]
fn files_are_shared_until_they_are_opened_for_writing_or_changed() {
    let Some(mut fixture) = open() else { return };
    let big = fixture.get("big").node;
    let content = |fixture: &Fixture, path| {
        let node = fixture.get(path).node;
        fixture.fs().image_content(node).unwrap()
    };
    let is_unchanged =
        |fixture: &Fixture| matches!(content(fixture, "big"), ImageContent::Unchanged(_));
    assert!(BIG as u64 > SHARED_BYTES);
    assert!(is_unchanged(&fixture));
    // A change of attributes is no change of the content.
    let fs = fixture.fs();
    fs.set_xattr(big, b"user.a", b"1", XattrMode::Any).unwrap();
    assert!(is_unchanged(&fixture));
    assert_eq!(content(&fixture, "a"), ImageContent::Never, "it is small");
    assert_eq!(content(&fixture, "many"), ImageContent::Never);
    fixture.take_over();
    assert!(is_unchanged(&fixture));
    fixture.fs().open_for_writing(big).unwrap();
    assert!(!is_unchanged(&fixture));
    fixture.take_over();
    assert!(!is_unchanged(&fixture));
    // The kernel has forgotten all descriptors, and the open has not come yet.
    fixture.fs().forget(big, 1 + 2 + 1 + 1 + 1);
    assert!(!is_unchanged(&fixture));
    fixture.fs().forget(big, 1);
    fixture.take_over();
    assert!(!is_unchanged(&fixture));
    fixture.fs().end_awaited_open(big);
    assert!(!is_unchanged(&fixture));
    fixture.fs().forget(big, 2);
    fixture.fs().table.purge();
    assert!(is_unchanged(&fixture));
    fixture.write(big, 0, b"written");
    assert_eq!(content(&fixture, "big"), ImageContent::Changed);
    fixture.take_over();
    assert_eq!(content(&fixture, "big"), ImageContent::Changed);
}

#[test]
fn backings_stay_as_long_as_the_kernel_holds_their_nodes() {
    let Some(mut fixture) = open() else { return };
    let (big, other) = (fixture.get("big").node, fixture.get("h1").node);
    let none = || panic!("there is one already");
    assert_eq!(fixture.fs().open_image_with(big, || Ok(7)).unwrap(), 7);
    assert_eq!(fixture.fs().open_image_with(big, none).unwrap(), 7);
    assert_eq!(fixture.fs().open_image_with(other, || Ok(8)).unwrap(), 8);
    let full = || Err(std::io::ErrorKind::OutOfMemory.into());
    let many = fixture.get("many").node;
    fixture.fs().open_image_with(many, full).unwrap_err();
    assert!(fixture.fs().forgotten_backings(other).is_empty());
    fixture.fs().forget(other, 1);
    // The process ends before it closes the backing.
    fixture.take_over();
    assert_eq!(fixture.fs().left_over_backings(), [8]);
    assert!(fixture.fs().left_over_backings().is_empty());
    assert_eq!(fixture.fs().open_image_with(big, none).unwrap(), 7);
    fixture.fs().forget(big, 1);
    assert_eq!(fixture.fs().forgotten_backings(big), [7]);
    fixture.take_over();
    assert!(fixture.fs().left_over_backings().is_empty());
}

#[test]
fn whole_files_of_the_upper_become_backings_while_no_descriptor_sends_requests() {
    let Some(mut fixture) = open() else { return };
    let none = |_: &fs::File| panic!("not now");
    let new = create(&fixture, NodeId::ROOT, "new");
    let open = |fixture: &Fixture, id, number| fixture.fs().open_file(id, |_| Ok(number)).unwrap();
    assert_eq!(open(&fixture, new, 5), Some(5));
    assert_eq!(fixture.fs().open_file(new, none).unwrap(), Some(5));
    assert_eq!(fixture.fs().upper_backing(new), Some(5));
    // In the image, then in a batch, then whole.
    let small = fixture.get("a").node;
    assert_eq!(fixture.fs().open_file(small, none).unwrap(), None);
    fixture.write(small, 0, b"written");
    assert_eq!(fixture.fs().open_file(small, none).unwrap(), None);
    fixture.fs().sync(small, SyncScope::All).unwrap();
    for _ in 0..3 {
        assert_eq!(fixture.fs().open_file(small, none).unwrap(), None);
        fixture.fs().closed(small);
    }
    fixture.fs().closed(small);
    fixture.fs().closed(small);
    let full = |_: &fs::File| Err(std::io::ErrorKind::OutOfMemory.into());
    assert_eq!(fixture.fs().open_file(small, full).unwrap(), None);
    fixture.fs().closed(small);
    assert_eq!(open(&fixture, small, 6), Some(6));
    // A partial file.
    let big = fixture.get("big").node;
    fixture.write(big, 0, b"written");
    assert_eq!(fixture.fs().open_file(big, none).unwrap(), None);
    // Truncated to nothing, and not durable.
    let other = fixture.get("h1").node;
    fixture
        .fs()
        .set_attributes(
            other,
            &Changes {
                size: Some(0),
                ..Changes::default()
            },
        )
        .unwrap();
    assert_eq!(fixture.fs().open_file(other, none).unwrap(), None);
    // The next process does not know which descriptors the kernel has.
    let unopened = create(&fixture, NodeId::ROOT, "unopened");
    assert!(!fixture.fs().may_be_mapped(new));
    fixture.take_over();
    assert_eq!(fixture.fs().open_file(new, none).unwrap(), Some(5));
    assert!(fixture.fs().may_be_mapped(new));
    assert_eq!(fixture.fs().open_file(small, none).unwrap(), Some(6));
    assert_eq!(fixture.fs().open_file(unopened, none).unwrap(), None);
    fixture.fs().closed(unopened);
    assert_eq!(fixture.fs().open_file(unopened, none).unwrap(), None);
    // Both backings of a node that the kernel has forgotten.
    assert_eq!(fixture.fs().open_image_with(new, || Ok(7)).unwrap(), 7);
    let mut closed = Vec::new();
    fixture
        .fs()
        .forget_and(new, 1, || closed = fixture.fs().forgotten_backings(new));
    assert_eq!(closed, [7, 5]);
    assert_eq!(fixture.fs().upper_backing(new), None);
    assert_eq!(fixture.get("new").node, new);
    fixture.fs().table.purge();
    assert_eq!(open(&fixture, new, 8), Some(8));
}

#[test]
fn an_upper_with_a_limit_has_no_backings() {
    let limited = UnionOptions {
        size_limit: Some(1 << 30),
        ..options()
    };
    let Some(fixture) = Fixture::new(limited) else {
        return;
    };
    let new = create(&fixture, NodeId::ROOT, "new");
    let none = |_: &fs::File| panic!("each write must be counted");
    assert_eq!(fixture.fs().open_file(new, none).unwrap(), None);
    assert!(fixture.fs().why_not_passed().is_some());
}

#[test]
fn removed_files_and_directories_in_use_stay() {
    let Some(mut fixture) = open() else { return };
    let removed = create(&fixture, NodeId::ROOT, "removed");
    let replaced = create(&fixture, NodeId::ROOT, "replaced");
    let linked = create(&fixture, NodeId::ROOT, "linked");
    let directory = mkdir(&fixture, NodeId::ROOT, "directory");
    let [below, copied, big] = ["a", "b", "big"].map(|name| fixture.get(name).node);
    fixture.write(removed, 0, b"removed");
    fixture.write(replaced, 0, b"replaced");
    fixture.write(linked, 0, b"linked");
    fixture.write(copied, 0, b"S");
    fixture.write(big, 5000, b"written");
    let fs = fixture.fs();
    fs.link(linked, NodeId::ROOT, b"other").unwrap();
    for name in ["removed", "a", "b", "big", "linked"] {
        fs.unlink(NodeId::ROOT, name.as_bytes()).unwrap();
    }
    let root = NodeId::ROOT;
    fs.remove_directory(root, b"directory").unwrap();
    fs.rename(root, b"c", root, b"replaced", RenameMode::Replace)
        .unwrap();
    // A file of the image is copied up although it has no name.
    fixture.write(below, 6, b"FILE");
    let mut expected = noise(1, BIG);
    expected[5000..5007].copy_from_slice(b"written");
    for _ in 0..2 {
        fixture.take_over();
        for (id, content) in [
            (removed, &b"removed"[..]),
            (replaced, b"replaced"),
            (linked, b"linked"),
            (below, b"small FILE\n"),
            (copied, b"Small file\n"),
            (big, &expected),
        ] {
            assert!(fixture.read(id) == content);
            let links = attributes(&fixture, id).nlink;
            assert_eq!(links, u32::from(id == linked));
        }
        assert_eq!(attributes(&fixture, directory).nlink, 0);
        assert_eq!(fixture.content("replaced"), b"small file\n");
        assert_eq!(fixture.content("other"), b"linked");
        fixture.fs().forget(linked, 1);
    }
    fixture.write(removed, 0, b"REMOVED");
    assert_eq!(fixture.read(removed), b"REMOVED");
    assert_eq!(orphans(&fixture), 7);
    for id in [removed, replaced, below, copied, big, directory] {
        fixture.fs().forget(id, 10);
    }
    fixture.fs().forget(linked, 10);
    assert_eq!(orphans(&fixture), 0);
    assert_eq!(fixture.content("other"), b"linked");
    let mut maps = fs::read_dir(fixture.upper().join(".bcow/maps")).unwrap();
    assert!(maps.next().is_none());
}

/// As if the process were killed after the kernel has forgotten the files.
#[test]
fn the_next_process_drops_what_is_forgotten() {
    let Some(mut fixture) = open() else { return };
    let root = NodeId::ROOT;
    let linked = create(&fixture, root, "linked");
    let removed = create(&fixture, root, "removed");
    let [big, directory] = [fixture.get("big").node, mkdir(&fixture, root, "directory")];
    fixture.write(big, 5000, b"written");
    let fs = fixture.fs();
    fs.link(linked, root, b"other").unwrap();
    for name in ["linked", "removed", "big"] {
        fs.unlink(root, name.as_bytes()).unwrap();
    }
    fs.remove_directory(root, b"directory").unwrap();
    assert_eq!(orphans(&fixture), 4);
    for id in [linked, removed, big, directory] {
        drop(fixture.fs().table.release(id, 10).unwrap());
    }
    fixture.take_over();
    assert_eq!(orphans(&fixture), 0);
    assert_eq!(fixture.get("other").nlink, 1);
    let mut maps = fs::read_dir(fixture.upper().join(".bcow/maps")).unwrap();
    assert!(maps.next().is_none());
}

#[test]
fn a_forgotten_file_has_no_name_in_the_work_directory_after_its_flush() {
    let Some(fixture) = open() else { return };
    let (fs, big) = (fixture.fs(), fixture.get("big").node);
    fixture.write(big, 5000, b"written");
    fs.link(big, NodeId::ROOT, b"other").unwrap();
    fs.unlink(NodeId::ROOT, b"big").unwrap();
    assert_eq!(attributes(&fixture, big).nlink, 1);
    // No flush has recorded this write.
    fixture.write(big, 50_000, b"written");
    fs.forget(big, 10);
    assert_eq!(fs.unrecorded.lock().len(), 1);
    for _ in 0..2 {
        fs.run_periodic();
    }
    assert!(fs.unrecorded.lock().is_empty());
    assert_eq!(orphans(&fixture), 0);
    assert_eq!(fixture.get("other").nlink, 1);
}

#[test]
fn a_forgotten_file_of_the_batch_keeps_its_content() {
    let batch = UnionOptions {
        sync: SyncPolicy::Batch(8),
        ..options()
    };
    let Some(mut fixture) = Fixture::new(batch) else {
        return;
    };
    let small = fixture.get("a").node;
    let fs = fixture.fs();
    fs.link(small, NodeId::ROOT, b"other").unwrap();
    fs.unlink(NodeId::ROOT, b"a").unwrap();
    fixture.write(small, 0, b"S");
    fs.forget(small, 10);
    fixture.take_over();
    assert_eq!(fixture.content("other"), b"Small file\n");
    fixture.fs().forget(small, 10);
    fixture.fs().finish_batch().unwrap();
    assert_eq!(orphans(&fixture), 0);
    assert_eq!(fixture.get("other").nlink, 1);
    assert_eq!(fixture.content("other"), b"Small file\n");
}

#[test]
fn files_with_several_names_in_the_image_are_found_by_the_index() {
    let Some(mut fixture) = open() else { return };
    let id = fixture.get("h1").node;
    fixture.write(id, 0, b"written");
    fixture.fs().unlink(NodeId::ROOT, b"h1").unwrap();
    fixture.take_over();
    assert_eq!(&fixture.read(id)[..7], b"written");
    assert_eq!(attributes(&fixture, id).nlink, 1);
    assert_eq!(fixture.get("h2").node, id);
    fixture.fs().unlink(NodeId::ROOT, b"h2").unwrap();
    fixture.take_over();
    assert_eq!(&fixture.read(id)[..7], b"written");
    assert_eq!(attributes(&fixture, id).nlink, 0);
    fixture.fs().forget(id, 10);
    let mut index = fs::read_dir(fixture.upper().join(".bcow/index")).unwrap();
    assert!(index.next().is_none());
}

/// As if the process were killed after the failed removal.
#[test]
fn an_index_entry_that_stays_keeps_its_map() {
    let Some(fixture) = partial() else { return };
    let id = fixture.get("h1").node;
    fixture.write(id, 0, b"written");
    fixture.fs().run_periodic();
    for name in [b"h1", b"h2"] {
        fixture.fs().unlink(NodeId::ROOT, name).unwrap();
    }
    let count = |directory: &str| {
        let names = fs::read_dir(fixture.upper().join(directory)).unwrap();
        names.count()
    };
    assert_eq!((count(".bcow/index"), count(".bcow/maps")), (1, 1));
    let mut index = fs::read_dir(fixture.upper().join(".bcow/index")).unwrap();
    let entry = index.next().unwrap().unwrap().path();
    // A directory cannot be removed as a file.
    fs::remove_file(&entry).unwrap();
    fs::create_dir(&entry).unwrap();
    fixture.fs().forget(id, 10);
    assert_eq!((count(".bcow/index"), count(".bcow/maps")), (1, 1));
}

#[test]
fn written_bytes_of_partials_stay() {
    let Some(mut fixture) = partial() else { return };
    let id = fixture.get("big").node;
    let mut expected = noise(1, BIG);
    let mut change = |fixture: &Fixture, offset: usize, data: &[u8]| {
        fixture.write(id, offset as u64, data);
        expected[offset..offset + data.len()].copy_from_slice(data);
        expected.clone()
    };
    // Parts of blocks, whole blocks, and a block that is complete after the second write.
    change(&fixture, 100, b"part");
    change(&fixture, 8192, &[7; 8192]);
    change(&fixture, 20_480, &[8; 2000]);
    let mut now = change(&fixture, 22_480, &[9; 2096]);
    for round in 0..4 {
        fixture.take_over();
        assert!(fixture.read(id) == now, "{round}");
        match round {
            // The block is complete now, and this write is not the first one.
            0 => now = change(&fixture, 3000, b"completed block"),
            // Nothing that a flush has recorded comes back from the ledger.
            1 => fixture.fs().run_periodic(),
            2 => now = change(&fixture, 40_000, b"after the flush"),
            _ => {}
        }
    }
    // The kernel forgets the file: its changes are not recorded yet.
    fixture.fs().forget(id, 10);
    fixture.take_over();
    assert!(fixture.content("big") == now);
    fixture.fs().forget(id, 10);
    fixture.fs().run_periodic();
    assert!(fixture.fs().unrecorded.lock().is_empty());
    fixture.take_over();
    assert!(fixture.content("big") == now);
}

/// A file that cannot be opened for a while does not lose what was written before.
#[test]
fn written_bytes_wait_until_the_partial_can_be_opened() {
    for is_forgotten in [false, true] {
        let Some(mut fixture) = partial() else { return };
        let id = fixture.get("big").node;
        let mut expected = noise(1, BIG);
        for (offset, data) in [(8192, &[7; 8192][..]), (100, b"part")] {
            fixture.write(id, offset as u64, data);
            expected[offset..offset + data.len()].copy_from_slice(data);
            if offset == 8192 {
                fixture.fs().run_periodic();
            }
        }
        let maps = fixture.upper().join(".bcow/maps");
        let map = fs::read_dir(&maps).unwrap().next().unwrap().unwrap().path();
        let elsewhere = fixture.upper().join("../map");
        fs::rename(&map, &elsewhere).unwrap();
        for _ in 0..2 {
            fixture.take_over();
            assert_eq!(fixture.try_read(id).unwrap_err(), Errno::IO);
            if is_forgotten {
                fixture.fs().forget(id, 10);
                assert_eq!(fixture.get("big").node, id);
            }
            assert_eq!(fixture.try_read(id).unwrap_err(), Errno::IO);
            fixture.fs().run_periodic();
            fixture.fs().run_periodic();
            fixture.fs().sync_all().unwrap_err();
        }
        fs::rename(&elsewhere, &map).unwrap();
        if is_forgotten {
            fixture.take_over();
        }
        assert!(fixture.content("big") == expected);
        fixture.fs().sync_all().unwrap();
    }
}

/// They show neither the content of the image nor a file that was removed.
#[test]
fn files_whose_places_cannot_be_read_are_errors() {
    let Some(mut fixture) = partial() else { return };
    let (many, file) = (fixture.get("many").node, fixture.get("many/3").node);
    let (big, sound) = (fixture.get("big").node, fixture.get("a").node);
    for id in [file, big, sound] {
        fixture.write(id, 0, b"changed");
    }
    let (name, flags) = ("trusted.bcow.sketch", XattrFlags::empty());
    let mark_of_big = {
        let mut value = Vec::with_capacity(4096);
        let path = fixture.upper().join("big");
        rustix::fs::getxattr(path, name, rustix::buffer::spare_capacity(&mut value)).unwrap();
        value
    };
    for path in ["many", "big"].map(|path| fixture.upper().join(path)) {
        rustix::fs::setxattr(path, name, b"damaged", flags).unwrap();
    }
    fixture.take_over();
    for id in [many, file, big] {
        assert_eq!(fixture.fs().attributes(id).unwrap_err(), Errno::STALE);
    }
    let found = fixture.fs().lookup(NodeId::ROOT, b"big");
    assert_eq!(found.unwrap_err(), Errno::IO);
    assert_eq!(&fixture.read(sound)[..7], b"changed");
    // The changes are not lost.
    fixture.fs().run_periodic();
    let path = fixture.upper().join("big");
    rustix::fs::setxattr(path, name, &mark_of_big, flags).unwrap();
    assert_eq!(&fixture.content("big")[..7], b"changed");
}

/// Such a block is present, so that later writes in it are not recorded.
#[test]
fn a_block_that_was_complete_at_the_end_of_the_file_stays_when_the_file_grows() {
    let start = BIG - BIG % BLOCK as usize;
    // Perhaps written bytes that a truncation cuts, and the new end of the file; then two writes.
    let cases = [
        (None, [start..BIG + 100, BIG + 100..BIG + 5000]),
        (
            Some((start + 50..start + 200, start + 100)),
            [start..start + 50, start + 100..start + 1000],
        ),
    ];
    for (cut, writes) in cases {
        let Some(mut fixture) = partial() else { return };
        let id = fixture.get("big").node;
        let mut expected = noise(1, BIG);
        let change = |expected: &mut Vec<u8>, range: Range<usize>| {
            let data = noise(range.end as u64, range.len());
            fixture.write(id, range.start as u64, &data);
            expected.resize(expected.len().max(range.end), 0);
            expected[range].copy_from_slice(&data);
        };
        if let Some((range, end)) = &cut {
            change(&mut expected, range.clone());
            fixture.set(id, sized(*end as u64));
            expected.truncate(*end);
        }
        for range in writes {
            change(&mut expected, range);
        }
        fixture.take_over();
        assert!(fixture.read(id) == expected, "{cut:?}");
    }
}

#[test]
fn an_orderly_end_makes_the_changes_of_partials_durable() {
    let Some(mut fixture) = partial() else { return };
    let id = fixture.get("big").node;
    fixture.write(id, 0, b"kept");
    fixture.fs().prepare_takeover().unwrap();
    fixture.take_over();
    assert_eq!(&fixture.read(id)[..4], b"kept");
    fixture.fs().sync(id, SyncScope::All).unwrap();
}

#[test]
fn small_files_that_are_not_durable_yet_stay() {
    let options = UnionOptions {
        sync: SyncPolicy::Batch(100),
        ..options()
    };
    let Some(mut fixture) = Fixture::new(options) else {
        return;
    };
    let (one, other) = (fixture.get("a").node, fixture.get("b").node);
    fixture.write(one, 0, b"S");
    fixture.write(other, 0, b"T");
    fixture.fs().forget(other, 1);
    for _ in 0..2 {
        fixture.take_over();
        assert_eq!(fixture.read(one), b"Small file\n");
        assert_eq!(fixture.content("b"), b"Tmall file\n");
        assert_eq!(fixture.fs().batch.lock().len(), 2);
    }
    fixture.fs().sync(one, SyncScope::Data).unwrap();
    fixture.fs().finish_batch().unwrap();
    fixture.take_over();
    assert!(fixture.fs().batch.lock().is_empty());
    assert_eq!(fixture.read(one), b"Small file\n");
}

#[test]
fn listings_continue_where_they_were() {
    let Some(mut fixture) = open() else { return };
    let many = fixture.get("many").node;
    let handle = fixture.fs().open_directory(many).unwrap();
    let mut names = Vec::new();
    let mut cookie = 0;
    loop {
        let before = names.len();
        let mut left = 7;
        fixture
            .fs()
            .read_directory(many, handle, cookie, &mut |entry| {
                if left == 0 {
                    return ControlFlow::Break(());
                }
                left -= 1;
                names.push(String::from_utf8(entry.name.to_vec()).unwrap());
                cookie = entry.next_cookie;
                ControlFlow::Continue(())
            })
            .unwrap();
        if names.len() == before {
            break;
        }
        // Other names come and go.
        fixture.take_over();
        create(&fixture, many, &format!("new{before}"));
    }
    for number in 0..40 {
        let name = number.to_string();
        assert_eq!(
            names.iter().filter(|one| **one == name).count(),
            1,
            "{name}"
        );
    }
    let new = fixture.fs().open_directory(many).unwrap();
    assert_ne!(new, handle);
    fixture.fs().close_directory(handle);
    fixture.fs().close_directory(new);
}

#[test]
fn limits_count_removed_files_in_use() {
    let options = UnionOptions {
        size_limit: Some(100 * BLOCK),
        ..options()
    };
    let Some(mut fixture) = Fixture::new(options) else {
        return;
    };
    let empty = fixture.counted();
    let id = create(&fixture, NodeId::ROOT, "new");
    fixture.write(id, 0, &[7; 10 * BLOCK as usize]);
    fixture.fs().unlink(NodeId::ROOT, b"new").unwrap();
    let counted = fixture.counted();
    assert!(counted >= empty + 10 * BLOCK);
    fixture.take_over();
    assert_eq!(fixture.counted(), counted);
    fixture.fs().forget(id, 1);
    assert_eq!(fixture.counted(), empty);
}

#[test]
fn a_file_that_is_found_again_before_its_partial_is_recorded_is_not_released() {
    let options = UnionOptions {
        small_bytes: 0,
        size_limit: Some(1000 * BLOCK),
        ..options()
    };
    for is_forgotten_first in [false, true] {
        let Some(fixture) = Fixture::new(options.clone()) else {
            return;
        };
        found_again(&fixture, is_forgotten_first);
    }
}

fn found_again(fixture: &Fixture, is_forgotten_first: bool) {
    let empty = fixture.counted();
    let id = fixture.get("big").node;
    fixture.write(id, 0, b"written");
    fixture.fs().forget(id, 1);
    assert_eq!(fixture.fs().unrecorded.lock().len(), 1);
    // The kernel finds it again. It becomes plain, and loses its name while a program has it open.
    assert_eq!(fixture.get("big").node, id);
    fixture.write(id, 0, &noise(2, BIG));
    let node = fixture.fs().node(id).unwrap();
    fixture.fs().promote_if_complete(&node);
    drop(node);
    fixture.fs().unlink(NodeId::ROOT, b"big").unwrap();
    let counted = fixture.counted();
    let bytes = BIG as u64 / BLOCK * BLOCK;
    assert!(counted >= empty + bytes);
    if !is_forgotten_first {
        fixture.fs().run_periodic();
        assert_eq!(fixture.counted(), counted);
        assert_eq!(fixture.read(id), noise(2, BIG));
    }
    fixture.fs().forget(id, 10);
    let released = fixture.counted();
    assert!(released < counted - bytes + BLOCK && released >= empty);
    // Nothing is released twice.
    fixture.fs().run_periodic();
    assert_eq!(fixture.counted(), released);
}

#[test]
fn a_union_without_a_ledger_leaves_no_names() {
    let Some(fixture) = plain() else { return };
    let id = create(&fixture, NodeId::ROOT, "new");
    fixture.fs().unlink(NodeId::ROOT, b"new").unwrap();
    assert_eq!(orphans(&fixture), 0);
    assert!(fixture.fs().ledger().is_none());
    fixture.write(id, 0, b"written");
    assert_eq!(fixture.read(id), b"written");
}

#[test]
fn the_next_writer_removes_what_no_process_took_over() {
    let Some(mut fixture) = open() else { return };
    let id = create(&fixture, NodeId::ROOT, "new");
    fixture.write(id, 0, b"written");
    fixture.fs().unlink(NodeId::ROOT, b"new").unwrap();
    assert_eq!(orphans(&fixture), 1);
    fixture.reopen();
    assert_eq!(orphans(&fixture), 0);
}
