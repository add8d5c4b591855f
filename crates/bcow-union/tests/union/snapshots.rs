//! Snapshots of an upper, at rest and while it is in use; forks, and the way back.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use bcow_erofs::reader::FileType;
use bcow_testkit::Random;
use bcow_union::fs::{New, UnionFs};
use bcow_union::{
    Instance, NodeId, UnionOptions, UpperError, UpperReader, fork_upper, list_snapshots,
    remove_snapshot, roll_back_upper, snapshot_path, take_snapshot,
};

use crate::fixture::{ROOT, Union, closed, closed_on, open_many, with_limit};
use crate::image::{self, noise};
use crate::random::change;
use crate::tree::assert_same;

const NOTE: &str = "a test";

/// What the host has of the tree, the index and the maps of an upper: everything except inode
/// numbers and change times.
fn host_tree(upper: &Path) -> BTreeMap<String, String> {
    let mut tree = BTreeMap::new();
    let mut first = BTreeMap::new();
    let mut todo: Vec<String> = ["", ".bcow/index", ".bcow/maps"].map(String::from).into();
    while let Some(at) = todo.pop() {
        let path = if at.is_empty() { upper.to_owned() } else { upper.join(&at) };
        let found = fs::symlink_metadata(&path).unwrap();
        if found.is_dir() {
            let mut names: Vec<_> = fs::read_dir(&path)
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .filter(|name| name != ".bcow")
                .collect();
            // The last one is visited first.
            names.sort_by(|a, b| b.cmp(a));
            todo.extend(names.iter().map(|name| crate::tree::join(&at, name)));
        }
        let mut list = vec![0; 4096];
        let length = rustix::fs::llistxattr(&path, &mut list[..]).unwrap();
        let mut xattrs: Vec<_> = list[..length]
            .split(|&byte| byte == 0)
            .filter(|name| !name.is_empty())
            .map(|name| {
                let mut value = vec![0; 4096];
                let length = rustix::fs::lgetxattr(&path, name, &mut value[..]).unwrap();
                (name.to_vec(), value[..length].to_vec())
            })
            .collect();
        xattrs.sort();
        let content = if found.is_file() {
            format!("{:?}", bcow_format::crc32c(&fs::read(&path).unwrap()))
        } else {
            format!("{:?}", fs::read_link(&path).ok())
        };
        let name = first.entry(found.ino()).or_insert_with(|| at.clone());
        let times = (found.mtime(), found.mtime_nsec());
        let (links, size) = if found.is_dir() { (0, 0) } else { (found.nlink(), found.size()) };
        let state = format!(
            "{:o} {}:{} {} {name} x{links} {size} {times:?} {content} {xattrs:?}",
            found.mode(),
            found.uid(),
            found.gid(),
            found.rdev(),
        );
        tree.insert(at, state);
    }
    tree
}

/// Opens the upper at `path` in place of that of the union, which is closed.
fn opened_instead(union: &mut Union, path: &Path) {
    fs::rename(union.upper(), union.directory().join("aside")).unwrap();
    fs::rename(path, union.upper()).unwrap();
    union.open();
}

/// Random changes, with a snapshot between two groups of them.
fn agrees(options: UnionOptions, owners_in_attributes: bool, seed: u64) {
    let Some(mut union) = closed_on(image::many, options) else {
        return;
    };
    if owners_in_attributes {
        union.begin_with_owners_in_attributes();
    }
    let what = format!("seed {seed}");
    let mut random = Random::new(seed);
    let changes = |union: &Union, random: &mut Random| {
        for _ in 0..20 + random.below(30) {
            change(union, random);
        }
    };
    union.open();
    changes(&union, &mut random);
    // A part of it is durable, and known only by the upper.
    union.reopen();
    changes(&union, &mut random);
    let shown = union.tree();
    let one = union.fs().snapshot("one", || ()).unwrap();
    assert_eq!(one, snapshot_path(&union.upper(), "one"));
    let seen = host_tree(&one);
    assert_same(&shown, &union.tree(), &what);
    changes(&union, &mut random);
    let later = union.tree();
    union.close();
    assert_same(&seen, &host_tree(&one), &what);
    union.assert_sound();

    let two = take_snapshot(&union.upper(), "two", NOTE).unwrap();
    assert_same(&host_tree(&union.upper()), &host_tree(&two), &what);
    let fork = union.directory().join("fork");
    fork_upper(&one, &fork).unwrap();
    roll_back_upper(&union.upper(), "one", NOTE).unwrap();
    union.assert_sound();
    union.open();
    assert_same(&shown, &union.tree(), &what);
    changes(&union, &mut random);
    union.close();
    roll_back_upper(&union.upper(), "two", NOTE).unwrap();
    union.open();
    assert_same(&later, &union.tree(), &what);
    union.close();
    let names = list_snapshots(&union.upper()).unwrap();
    let names: Vec<_> = names.iter().map(|found| &*found.name).collect();
    assert_eq!(names.len(), 2);
    assert!(names.contains(&"one") && names.contains(&"two"));
    assert_same(&seen, &host_tree(&one), &what);

    // The fork needs no file of the upper.
    opened_instead(&mut union, &fork);
    fs::remove_dir_all(union.directory().join("aside")).unwrap();
    assert_same(&shown, &union.tree(), &what);
    union.close();
    union.assert_sound();
}

/// `BCOW_ROUNDS` sets the number of rounds.
#[test]
fn snapshots_forks_and_rollbacks_show_what_the_union_did() {
    let count = std::env::var("BCOW_ROUNDS").map_or(6, |count| count.parse().unwrap());
    for seed in 0..count {
        agrees(UnionOptions::default(), seed % 2 == 1, seed);
    }
}

#[test]
fn copy_has_all_attributes_and_stores_no_holes() {
    let Some(mut union) = open_many() else { return };
    union.write("large", 0, &noise(5, 8192));
    union.create("file", 0o4751).unwrap();
    union.set_xattr("file", "user.a", b"b");
    union.set_xattr("file", "trusted.overlay.opaque", b"of the container");
    let null = New::Special(FileType::CharDevice, 0x103);
    let made = union.fs().make(&ROOT, NodeId::ROOT, b"null", 0o666, &null);
    made.unwrap();
    union.close();
    let upper = union.upper();
    rustix::fs::chown(union.host("file"), Some(rustix::fs::Uid::from_raw(7)), None).unwrap();
    let one = take_snapshot(&upper, "one", NOTE).unwrap();
    assert_same(&host_tree(&upper), &host_tree(&one), "copied");
    let stored = |upper: &Path| fs::metadata(upper.join("large")).unwrap().blocks() * 512;
    assert_eq!(stored(&one), stored(&upper));
}

#[test]
fn snapshots_do_not_count_against_the_limit() {
    let Some(mut union) = closed_on(image::few, with_limit(1 << 20)) else {
        return;
    };
    union.open();
    union.create("file", 0o644).unwrap();
    union.write("file", 0, &noise(1, 600 << 10));
    union.sync_all();
    let stored = union.fs().report().stored_bytes;
    for name in ["one", "two"] {
        union.fs().snapshot(name, || ()).unwrap();
    }
    assert_eq!(union.fs().report().stored_bytes, stored);
    union.reopen();
    assert_eq!(union.fs().report().stored_bytes, stored);
}

#[test]
fn snapshot_is_no_upper_of_a_writer() {
    let Some(mut union) = open_many() else { return };
    let one = union.fs().snapshot("one", || ()).unwrap();
    let again = union.fs().snapshot("one", || ()).unwrap_err();
    assert!(matches!(again, UpperError::Exists(path) if path == one));
    for name in ["", ".", "..", "a/b", ".removed", "@"] {
        let error = union.fs().snapshot(name, || ()).unwrap_err();
        assert!(matches!(error, UpperError::Io { .. }), "{name:?}: {error}");
    }
    union.close();
    let opened = UnionFs::open(union.lower(), &one, NOTE, &union.options);
    assert!(matches!(opened.err(), Some(UpperError::Snapshot(path)) if path == one));
    let opened = Instance::open_existing(&one, NOTE);
    assert!(matches!(opened.err(), Some(UpperError::Snapshot(path)) if path == one));
    assert_eq!(crate::host::count(&union.host(".bcow/work")), 0);
}

#[test]
fn removal_takes_only_the_snapshot_of_this_name() {
    let Some(union) = open_many() else { return };
    let upper = union.upper();
    let paths = ["one", "two"].map(|name| union.fs().snapshot(name, || ()).unwrap());
    let reader = UpperReader::open(&paths[0]).unwrap();
    let error = remove_snapshot(&upper, "one", NOTE).unwrap_err();
    assert!(matches!(error, UpperError::InUse(..)), "{error}");
    drop(reader);
    remove_snapshot(&upper, "one", NOTE).unwrap();
    assert_eq!(crate::host::count(&union.host(".bcow/snapshots")), 1);
    assert!(paths[1].exists());
    for name in ["one", "..", "three"] {
        let error = remove_snapshot(&upper, name, NOTE).unwrap_err();
        assert!(!error.to_string().is_empty());
    }
    let rolled_back = roll_back_upper(&upper, "two", NOTE).unwrap_err();
    assert!(
        matches!(rolled_back, UpperError::InUse(..)),
        "{rolled_back}"
    );
}

#[test]
fn snapshots_return_from_a_rollback_that_was_killed() {
    let Some(mut union) = closed() else { return };
    union.open();
    union.create("before", 0o644).unwrap();
    let one = union.fs().snapshot("one", || ()).unwrap();
    union.close();
    let seen = host_tree(&one);
    // Before and after the exchange of the two directories: the snapshots are in the other one.
    let part = union.directory().join(".upper.bcow-part");
    fs::create_dir_all(part.join("upper/.bcow")).unwrap();
    fs::rename(
        union.host(".bcow/snapshots"),
        part.join("upper/.bcow/snapshots"),
    )
    .unwrap();
    union.open();
    // The union holds the lock.
    assert!(!part.exists());
    assert_same(&seen, &host_tree(&one), "returned");
    union.close();
    // What another fork to the same name left.
    fs::create_dir_all(part.join("upper/some/where")).unwrap();
    let error = fork_upper(&one, &union.upper()).unwrap_err();
    assert!(matches!(error, UpperError::Exists(_)), "{error}");
    roll_back_upper(&union.upper(), "one", NOTE).unwrap();
    assert!(!part.exists());
    union.assert_sound();
}

#[test]
fn snapshots_that_cannot_return_are_kept() {
    let Some(mut union) = closed() else { return };
    union.open();
    let one = union.fs().snapshot("one", || ()).unwrap();
    union.close();
    let seen = host_tree(&one);
    let part = union.directory().join(".upper.bcow-part");
    let moved = part.join("upper/.bcow/snapshots");
    fs::create_dir_all(moved.parent().unwrap()).unwrap();
    fs::rename(union.host(".bcow/snapshots"), &moved).unwrap();
    // Of another writer.
    fs::create_dir_all(one.join("other")).unwrap();
    let upper = union.upper();
    for _ in 0..2 {
        let opened = UnionFs::open(union.lower(), &upper, NOTE, &union.options);
        assert!(opened.is_err());
        assert_same(&seen, &host_tree(&moved.join("one")), "kept");
    }
    // A fork that would get the name of an upper which was moved away.
    let aside = union.directory().join("aside");
    fs::rename(&upper, &aside).unwrap();
    let error = fork_upper(&aside, &upper).unwrap_err();
    assert!(
        matches!(&error, UpperError::Exists(path) if *path == part),
        "{error}"
    );
    fs::rename(&aside, &upper).unwrap();
    fs::remove_dir_all(&one).unwrap();
    union.open();
    assert!(!part.exists());
    assert_same(&seen, &host_tree(&one), "returned");
}

#[test]
fn files_without_a_name_may_end_during_a_snapshot() {
    const FILES: usize = 100;
    let Some(union) = open_many() else { return };
    let upper = union.upper();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // As a FORGET, which does not wait for a snapshot.
        scope.spawn(|| {
            for count in 0.. {
                let map = union.host(&format!(".bcow/maps/{}", 1000 + count % FILES));
                if count >= FILES {
                    fs::remove_file(&map).unwrap();
                }
                fs::write(&map, "a map").unwrap();
                if is_over.load(Ordering::Relaxed) {
                    return;
                }
            }
        });
        let taken: Result<Vec<_>, _> = (0..20)
            .map(|number| union.fs().snapshot(&format!("s{number}"), || ()))
            .collect();
        is_over.store(true, Ordering::Relaxed);
        taken.unwrap();
    });
    assert_eq!(list_snapshots(&upper).unwrap().len(), 20);
}
