//! Files with several links, and without any.

use std::fs;

use bcow_union::NodeId;
use bcow_union::fs::RenameMode;
use rustix::io::Errno;

use crate::fixture::{open, open_many};
use crate::host;

#[test]
fn hardlinks_of_the_image_stay_one_file() {
    let Some(mut union) = open() else { return };
    let node = union.id("h1");
    assert_eq!(union.id("h2"), node);
    union.write("h1", 0, b"TWO");
    assert_eq!(union.content("h2"), b"TWO names");
    union.reopen();
    assert_eq!(union.content("h2"), b"TWO names");
    assert_eq!(union.get("h2").unwrap().nlink, 2);
    let dir = union.id("dir");
    union.fs().link(union.id("h2"), dir, b"h3").unwrap();
    assert_eq!(union.get("h1").unwrap().nlink, 3);
    union.assert_kept();
    union.rename("h2", "h4").unwrap();
    assert_eq!(union.get("h4").unwrap().nlink, 3);
    union.assert_kept();
    for name in ["h1", "dir/h3"] {
        union.unlink(name).unwrap();
        union.assert_kept();
    }
    assert_eq!(union.get("h4").unwrap().nlink, 1);
    assert_eq!(union.content("h4"), b"TWO names");
    let open = union.id("h4");
    union.unlink("h4").unwrap();
    assert_eq!(union.read(open), b"TWO names");
    assert_eq!(union.fs().attributes(open).unwrap().nlink, 0);
    assert_eq!(host::count(&union.host(".bcow/index")), 0);
    union.assert_kept();
}

#[test]
fn one_of_two_lower_names_removed_leaves_one() {
    let Some(mut union) = open() else { return };
    union.unlink("h2").unwrap();
    assert_eq!(union.get("h1").unwrap().nlink, 1);
    assert_eq!(union.content("h1"), b"two names");
    union.assert_kept();
    union.unlink("h1").unwrap();
    assert!(union.get("h1").is_none());
    union.assert_kept();
}

#[test]
fn unlinked_file_lives_until_it_is_forgotten() {
    let Some(mut union) = open() else { return };
    let small = union.id("small");
    union.unlink("small").unwrap();
    assert_eq!(union.read(small), b"small file\n");
    union.write_to(small, 0, b"S").unwrap();
    assert_eq!(union.read(small), b"Small file\n");
    assert_eq!(union.fs().attributes(small).unwrap().nlink, 0);
    union.fs().forget(small, 1);
    assert_eq!(union.fs().attributes(small), Err(Errno::STALE));
    union.assert_kept();
}

#[test]
fn a_copy_up_of_one_of_several_names_that_fails_leaves_nothing() {
    let Some(mut union) = open_many() else { return };
    let file = union.id("h1");
    // A file created directly on the host is in the place of the copy.
    fs::write(union.host("h1"), b"in the way").unwrap();
    for _ in 0..3 {
        assert_eq!(union.write_to(file, 0, b"x"), Err(Errno::EXIST));
        assert_eq!(union.entry_of_index(), None);
    }
    fs::remove_file(union.host("h1")).unwrap();
    union.write_to(file, 0, b"x").unwrap();
    assert_eq!(union.get("g/h4").unwrap().nlink, 4);
    union.close();
    union.assert_sound();
}

#[test]
fn a_further_name_that_cannot_be_copied_up_still_counts() {
    let Some(union) = open_many() else { return };
    union.write("h1", 0, b"x");
    let (file, parent) = (union.id("h1"), union.id("a/b"));
    union.set_permissions("a/b", 0o700);
    // No link can be created in a directory that was removed on the host.
    fs::remove_dir(union.host("a/b")).unwrap();
    for _ in 0..3 {
        let fs = union.fs();
        let moved = fs.rename(parent, b"h3", NodeId::ROOT, b"new", RenameMode::Replace);
        assert_eq!(moved, Err(Errno::NOENT));
        assert_eq!(fs.unlink(parent, b"h3"), Err(Errno::NOENT));
        assert_eq!(fs.attributes(file).unwrap().nlink, 4);
        assert_eq!(union.names_mark(), "U+2");
    }
}
