//! The index, which counts the links of files that have several links in the image.

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use bcow_union::offline::{Scope, check};
use bcow_union::testing::upper::{Attribute, Mark, Namespace, Origin};
use rustix::fs::{CWD, FileType as HostType, Mode};
use rustix::io::Errno;

use crate::fixture::{Union, open_many};
use crate::host::{attribute, make_whiteout, set_attribute};
use crate::unmounted::partial;

/// The attribute in which the index stores the number of links.
const NAMES: &str = "trusted.overlay.nlink";

/// The links of the file with four links.
const LINKS: [&str; 4] = ["h1", "a/h2", "a/b/h3", "g/h4"];

/// Access to the only entry of the index.
impl Union {
    pub fn entry_of_index(&self) -> Option<PathBuf> {
        let mut entries = fs::read_dir(self.host(".bcow/index")).unwrap();
        entries.next().map(|entry| entry.unwrap().path())
    }

    pub fn names_mark(&self) -> String {
        let value = attribute(&self.entry_of_index().unwrap(), NAMES).unwrap();
        String::from_utf8(value).unwrap()
    }

    fn set_names_mark(&self, value: &str) {
        set_attribute(&self.entry_of_index().unwrap(), NAMES, value.as_bytes());
    }
}

/// A closed union in which the file with four links was written.
fn linked(length: usize) -> Option<Union> {
    let mut union = open_many()?;
    union.write("h1", 0, &vec![b'x'; length]);
    union.close();
    assert_eq!(union.names_mark(), "U+2");
    Some(union)
}

/// A crash may occur between the steps of a copy-up, of adding a link, and of removing one. The
/// mark is relative to the number of links in the image, and all links show the written content.
#[test]
fn the_number_of_names_survives_a_crash_while_links_change() {
    // Whether the copy is in its place; the mark; whether a link was removed; the expected number
    // of links.
    for (is_placed, mark, is_removed, said) in [
        (false, "L+0", false, 4),
        (true, "L+0", false, 4),
        (true, "L+0", true, 4),
        (true, "L-1", true, 3),
    ] {
        let Some(mut union) = linked(3) else { return };
        union.set_names_mark(mark);
        if !is_placed {
            fs::remove_file(union.host("h1")).unwrap();
        }
        if is_removed {
            fs::create_dir(union.host("g")).unwrap();
            make_whiteout(&union.host("g/h4"));
        }
        union.assert_sound();
        union.open();
        assert_eq!(union.get("a/h2").unwrap().nlink, said);
        assert_eq!(&union.names_mark()[..1], "U");
        let mut left = said;
        for name in LINKS {
            let Some(found) = union.get(name) else {
                continue;
            };
            assert_eq!(found.nlink, left, "{mark} {name}");
            assert_eq!(&union.read(found.node)[..3], b"xxx", "{mark} {name}");
            union.unlink(name).unwrap();
            left -= 1;
        }
        assert_eq!(union.entry_of_index().is_some(), left > 0, "{mark}");
        union.close();
        if left > 0 {
            assert_eq!(union.found(), ["upper-index-leak"]);
            union.repair();
        }
        union.assert_sound();
    }
}

#[test]
fn an_entry_of_the_index_without_a_name_is_removed_with_its_map() {
    let Some(union) = linked(5000) else { return };
    union.assert_sound();
    assert_eq!(union.maps(), 1);
    fs::remove_file(union.host("h1")).unwrap();
    for name in ["a", "a/b", "g"] {
        fs::create_dir(union.host(name)).unwrap();
    }
    for name in LINKS {
        make_whiteout(&union.host(name));
    }
    // The mark says that the file has four links.
    assert_eq!(union.names_mark(), "U+2");
    assert_eq!(union.found(), ["upper-index-leak"]);
    union.repair();
    assert_eq!(union.entry_of_index(), None);
    assert_eq!(union.maps(), 0);
    union.assert_sound();
}

#[test]
fn a_wrong_number_of_names_is_corrected() {
    let Some(union) = linked(1) else { return };
    union.set_names_mark("U+9");
    let report = union.checked();
    assert_eq!(union.found(), ["upper-nlink"]);
    let instance = union.instance().unwrap();
    assert_eq!(check::repair(&instance, &report).unwrap().len(), 1);
    drop(instance);
    union.assert_sound();
}

#[test]
fn wrong_link_counts_are_distinct_from_those_of_a_crash() {
    let Some(union) = linked(3) else { return };
    for (mark, wrong) in [("L+0", 0), ("L+1", 0), ("L+2", 1), ("L-1", 1), ("U+3", 1)] {
        union.set_names_mark(mark);
        assert_eq!(union.found(), vec!["upper-nlink"; wrong], "{mark}");
        if wrong > 0 {
            union.repair();
            assert_eq!(union.names_mark(), "U+2");
            union.assert_sound();
        }
    }
    // A temporary file is not a link, neither while it exists nor after its removal.
    union.set_names_mark("U+2");
    let entry = union.entry_of_index().unwrap();
    fs::hard_link(entry, union.host(".bcow").join("work").join("0")).unwrap();
    assert_eq!(union.found(), ["upper-work-leak"]);
    union.set_names_mark("U+7");
    union.repair();
    assert_eq!(union.names_mark(), "U+2");
    union.assert_sound();
}

/// Without the image the links cannot be counted, and a count that is too low must not delete the
/// file.
#[test]
fn an_entry_of_the_index_that_has_names_is_never_removed() {
    let Some(union) = linked(3) else { return };
    union.set_names_mark("U-2");
    assert_eq!(union.found(), ["upper-nlink"]);
    union.repair();
    assert_eq!(union.names_mark(), "U+2");
}

/// Access by inode numbers of the image.
impl Union {
    fn nid(&self, path: &str) -> u64 {
        let found = self.image().filesystem().resolve(path.as_bytes());
        found.unwrap().unwrap().0
    }

    /// Records inode `nid` of the image as the origin of `name` in `directory`.
    fn set_origin(&self, directory: &Path, name: &str, nid: u64) {
        let uuid = self.image().filesystem().superblock().uuid;
        let directory = fs::File::open(directory).unwrap();
        let at = Attribute::Named(directory.as_fd(), name.as_bytes());
        let origin = Origin { uuid, nid }.encode();
        Mark::Origin.set(at, Namespace::Trusted, &origin).unwrap();
    }
}

#[test]
fn an_entry_of_the_index_is_taken_only_for_the_inode_that_it_was() {
    let make = |path: &Path, kind, device| {
        rustix::fs::mknodat(CWD, path, kind, Mode::from_raw_mode(0o666), device).unwrap();
    };
    let null = rustix::fs::makedev(1, 3);
    for (what, origin) in [
        ("a device", None),
        ("a device", Some("h1")),
        ("a pipe", Some("h1")),
        ("a whiteout", None),
        ("a directory", Some("h1")),
        ("a link", Some("h1")),
        ("a file", None),
        ("a file", Some("large")),
        ("a file of the tree", Some("large")),
    ] {
        let Some(mut union) = partial() else { return };
        let index = union.host(".bcow/index");
        let name = format!("{:016x}", union.nid("h1"));
        let path = index.join(&name);
        match what {
            "a device" => make(&path, HostType::CharacterDevice, null),
            "a pipe" => make(&path, HostType::Fifo, 0),
            "a whiteout" => make_whiteout(&path),
            "a directory" => fs::create_dir(&path).unwrap(),
            "a link" => symlink("/dev/null", &path).unwrap(),
            "a file" => fs::write(&path, "x").unwrap(),
            _ => fs::hard_link(union.host("large"), &path).unwrap(),
        }
        if let Some(origin) = origin {
            union.set_origin(&index, &name, union.nid(origin));
        }
        union.open();
        for (parent, name) in [("", "h1"), ("g", "h4")] {
            let found = union.fs().lookup(union.id(parent), name.as_bytes());
            assert_eq!(found.unwrap_err(), Errno::IO, "{what} {origin:?}");
        }
        assert!(union.get("large").is_some());
        union.close();
        assert!(union.found().contains(&"upper-index"), "{what} {origin:?}");
        assert!(!union.checked().is_sound());
        assert!(union.try_changes(Scope::Layer).is_err(), "{what}");
    }
}
