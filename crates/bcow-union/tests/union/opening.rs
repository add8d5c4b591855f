//! The state of an upper when it is opened: from the image, from another program, or from a mount
//! that was killed.

use std::fs;
use std::sync::{Barrier, mpsc};
use std::thread;
use std::time::{Duration, SystemTime};

use bcow_union::fs::UnionFs;
use bcow_union::{SyncPolicy, UnionOptions};
use rustix::fs::{CWD, FileType, Mode, makedev};
use rustix::io::Errno;

use crate::fixture::{Union, closed, open, open_with};
use crate::host::{count, make_whiteout, set_attribute};
use crate::image::{BIG, big};

fn volatile() -> Option<Union> {
    open_with(UnionOptions {
        sync: SyncPolicy::Volatile,
        ..UnionOptions::default()
    })
}

#[test]
fn fresh_union_shows_the_image_and_its_upper_stays_empty() {
    let Some(mut union) = open() else { return };
    assert_eq!(
        union.names(""),
        ["big", "dir", "empty", "h1", "h2", "link", "small"]
    );
    assert_eq!(union.content("small"), b"small file\n");
    assert_eq!(union.content("big"), big());
    assert_eq!(union.get("h1").unwrap().nlink, 2);
    union.assert_kept();
    let left: Vec<_> = fs::read_dir(union.upper())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(left, [".bcow"]);
}

/// After a rename within a directory, overlayfs records only the old name, without a path.
#[test]
fn directory_that_overlayfs_renamed_can_be_renamed_again() {
    let Some(mut union) = closed() else { return };
    fs::create_dir_all(union.host("moved")).unwrap();
    set_attribute(&union.host("moved"), "trusted.overlay.redirect", b"dir");
    make_whiteout(&union.host("dir"));
    let copy = fs::File::create(union.host("copy")).unwrap();
    copy.set_len(BIG as u64).unwrap();
    set_attribute(&union.host("copy"), "trusted.overlay.redirect", b"big");
    set_attribute(&union.host("copy"), "trusted.overlay.metacopy", b"");
    make_whiteout(&union.host("big"));
    union.open();
    assert_eq!(union.names("moved"), ["sub", "x"]);
    for (name, new) in [("moved", "empty/DIR"), ("copy", "empty/COPY")] {
        union.rename(name, new).unwrap();
    }
    union.assert_kept();
    assert_eq!(union.names("empty/DIR"), ["sub", "x"]);
    assert_eq!(union.content("empty/COPY"), big());
}

#[test]
fn root_of_an_adopted_upper_keeps_its_attributes() {
    let Some(mut union) = closed() else { return };
    fs::create_dir(union.upper()).unwrap();
    fs::write(union.host("theirs"), b"x").unwrap();
    union.open();
    union.set_permissions("", 0o711);
    union.unlink("theirs").unwrap();
    let before = union.get("").unwrap();
    for _ in 0..2 {
        union.reopen();
        let after = union.get("").unwrap();
        assert_eq!((after.mtime, after.permissions), (before.mtime, 0o711));
    }
}

#[test]
fn a_root_that_was_not_completed_is_so_by_the_next_mount() {
    let Some(mut union) = open() else { return };
    let before = union.get("").unwrap().mtime;
    union.close();
    for has_record in [true, false] {
        // Killed after or before the mount wrote its record.
        rustix::fs::removexattr(union.upper(), "trusted.overlay.origin").unwrap();
        if !has_record {
            fs::remove_file(union.host(".bcow/instance.json")).unwrap();
        }
        let root = fs::File::open(union.upper()).unwrap();
        root.set_modified(SystemTime::now()).unwrap();
        union.open();
        assert_eq!(union.get("").unwrap().mtime, before);
        union.close();
    }
    union.open();
    // The root has its own modification time after its first change.
    union.create("new", 0o644).unwrap();
    let after = union.get("").unwrap().mtime;
    assert_ne!(after, before);
    union.reopen();
    assert_eq!(union.get("").unwrap().mtime, after);
}

/// A process that is asked to end twice exits when the first close has completed, not at the second
/// request.
#[test]
fn concurrent_close_waits_for_the_outcome() {
    let Some(mut union) = volatile() else { return };
    let note = union.host(".bcow/volatile");
    for round in 0..5 {
        for block in 0..70 {
            union.write("big", block * 4096 + round, b"x");
        }
        assert!(note.exists());
        let fs = union.take();
        let together = Barrier::new(4);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    together.wait();
                    fs.close().unwrap();
                    // Removing this file is the last step of a close.
                    assert!(!note.exists());
                });
            }
        });
        drop(fs);
        union.open();
    }
}

/// A process exits while its threads still hold the union.
#[test]
fn closed_union_need_not_be_dropped() {
    let Some(mut union) = open() else { return };
    // The creation of the map confirms the first record, but not the second.
    union.write("big", 4096, b"x");
    union.sync("big");
    union.write("big", 20 * 4096, b"x");
    union.unlink("small").unwrap();
    // Whiteouts for later removals.
    assert_eq!(count(&union.host(".bcow/work")), 2);
    let held = union.take();
    held.close().unwrap();
    assert_eq!(count(&union.host(".bcow/work")), 0);
    let mut maps = fs::read_dir(union.host(".bcow/maps")).unwrap();
    let path = maps.next().unwrap().unwrap().path();
    let map = fs::read(&path).unwrap();
    // The number of confirmed records, without the header.
    let confirmed = u64::from_le_bytes(map[32..40].try_into().unwrap());
    assert_eq!((confirmed, map.len()), (2, 3 * 512));
    // Dropping the union after a close does nothing.
    drop(held);
    assert_eq!(fs::read(&path).unwrap(), map);
    union.open();
    assert!(union.get("small").is_none());
    assert_eq!(union.content("big")[4096], b'x');
}

#[test]
fn a_note_of_no_synchronisation_that_is_no_file_is_refused() {
    let mode = Mode::from_raw_mode(0o600);
    for (kind, device) in [
        (FileType::Fifo, 0),
        (FileType::CharacterDevice, makedev(1, 5)),
        (FileType::CharacterDevice, makedev(1, 3)),
    ] {
        let Some(mut union) = volatile() else { return };
        union.close();
        let note = union.host(".bcow/volatile");
        rustix::fs::mknodat(CWD, &note, kind, mode, device).unwrap();
        let (sender, receiver) = mpsc::channel();
        let (lower, upper, options) = (union.lower(), union.upper(), union.options.clone());
        thread::spawn(move || {
            sender.send(UnionFs::open(lower, &upper, "a test", &options).map(drop))
        });
        let opened = receiver.recv_timeout(Duration::from_secs(20));
        let refused = opened.expect("it hangs").unwrap_err();
        assert_eq!(refused.errno(), Some(Errno::INVAL), "{kind:?}: {refused}");
        let read = union.reader().is_lost();
        assert_eq!(read.unwrap_err().errno(), Some(Errno::INVAL), "{kind:?}");
    }
}
