//! What is there when an upper is opened: of the image, of another program, of a mount that was killed.

use std::fs;
use std::sync::{Barrier, mpsc};
use std::thread;
use std::time::{Duration, SystemTime};

use bcow_union::fs::UnionFs;
use bcow_union::options::{SyncPolicy, UnionOptions};
use rustix::fs::{CWD, FileType, Mode, makedev};
use rustix::io::Errno;

use crate::fixture::{closed, open, open_with};
use crate::host::{count, make_whiteout, set_attribute};
use crate::image::{BIG, big};

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

/// Overlayfs names the old name only of what was renamed in its directory.
#[test]
fn what_overlayfs_renamed_can_be_moved_again() {
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
fn the_root_of_an_adopted_upper_stays_what_it_was_made() {
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
        // Killed after its record was written, or before.
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
    // Once it has names, its time is its own.
    union.create("new", 0o644).unwrap();
    let after = union.get("").unwrap().mtime;
    assert_ne!(after, before);
    union.reopen();
    assert_eq!(union.get("").unwrap().mtime, after);
}

/// A process that was told to end twice ends when the first close is done, not when the second was asked for.
#[test]
fn whoever_closes_while_another_does_waits_for_the_outcome() {
    let options = UnionOptions {
        sync: SyncPolicy::Volatile,
        ..UnionOptions::default()
    };
    let Some(mut union) = open_with(options) else {
        return;
    };
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
                    // The last thing that a close does is to remove it.
                    assert!(!note.exists());
                });
            }
        });
        drop(fs);
        union.open();
    }
}

/// A process ends while threads of it still hold the union.
#[test]
fn who_closed_need_not_drop() {
    let Some(mut union) = open() else { return };
    // The first record is confirmed as the map is made, the second not.
    union.write("big", 4096, b"x");
    union.sync("big");
    union.write("big", 20 * 4096, b"x");
    union.unlink("small").unwrap();
    // Whiteouts for the next names.
    assert_eq!(count(&union.host(".bcow/work")), 2);
    let held = union.take();
    held.close().unwrap();
    assert_eq!(count(&union.host(".bcow/work")), 0);
    let mut maps = fs::read_dir(union.host(".bcow/maps")).unwrap();
    let path = maps.next().unwrap().unwrap().path();
    let map = fs::read(&path).unwrap();
    // How many records there must be: all but the header.
    let confirmed = u64::from_le_bytes(map[32..40].try_into().unwrap());
    assert_eq!((confirmed, map.len()), (2, 3 * 512));
    // Dropping it does nothing more.
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
        let options = UnionOptions {
            sync: SyncPolicy::Volatile,
            ..UnionOptions::default()
        };
        let Some(mut union) = open_with(options) else {
            return;
        };
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
