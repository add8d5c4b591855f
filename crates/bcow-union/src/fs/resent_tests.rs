//! Tests of requests that the kernel sends again to a union that has taken over. They need root
//! (for `trusted.` attributes) and mkfs.erofs.

use std::fs;
use std::os::fd::AsFd;

use rustix::io::Errno;

use super::resent::{New, RequestId};
use super::takeover_tests::{attributes, create, mkdir, open};
use super::tests::{Fixture, ROOT};
use super::{RenameMode, XattrMode};
use crate::node::NodeId;

const RESENT: RequestId = RequestId {
    number: 77,
    is_resent: true,
};
const FRESH: RequestId = RequestId {
    is_resent: false,
    ..RESENT
};

/// A request was executed, and the process ended before it recorded the end of the change.
#[test]
fn executed_changes_of_names_are_recognized() {
    let Some(mut fixture) = open() else { return };
    let [one, other] = ["one", "other"].map(|name| {
        let id = create(&fixture, NodeId::ROOT, name);
        fixture.write(id, 0, name.as_bytes());
        id
    });
    let directory = mkdir(&fixture, NodeId::ROOT, "directory");
    let upper = fixture.upper();
    let root = NodeId::ROOT;
    // Both places are recorded before a rename. It was not executed...
    let announce = |fixture: &Fixture, id: NodeId, parent: NodeId, name: &[u8]| {
        let node = fixture.fs().node(id).unwrap();
        std::mem::forget(node.entry().unwrap().may_get(parent.0, name));
    };
    announce(&fixture, one, directory, b"target");
    fixture.take_over();
    assert_eq!(fixture.get("one").node, one);
    let rename = |fixture: &Fixture, name: &[u8], to: NodeId, new: &[u8], how| {
        fixture
            .fs()
            .rename_requested(RESENT, (root, name), (to, new), how)
    };
    rename(&fixture, b"one", directory, b"first", RenameMode::Replace).unwrap();
    // ... or it was executed.
    announce(&fixture, other, directory, b"second");
    fs::rename(upper.join("other"), upper.join("directory/second")).unwrap();
    fixture.take_over();
    assert_eq!(fixture.read(other), b"other");
    rename(
        &fixture,
        b"other",
        directory,
        b"second",
        RenameMode::NoReplace,
    )
    .unwrap();
    assert_eq!(fixture.get("directory/second").node, other);
    // A name that never was there is an error also at the second time.
    let missing = rename(&fixture, b"none", directory, b"third", RenameMode::Replace);
    assert_eq!(missing, Err(Errno::NOENT));
}

/// The process ends before, during or after an exchange of two names, which the kernel asks for
/// again; and so does the next process.
#[test]
fn exchanges_are_executed_once() {
    let Some(mut fixture) = open() else { return };
    let root = NodeId::ROOT;
    let directory = mkdir(&fixture, root, "directory");
    let upper = fixture.upper().join("directory");
    let [one, other] = ["one", "other"].map(|name| create(&fixture, directory, name));
    // The name that is exchanged need not be the one that is recorded.
    fixture.fs().link(one, root, b"link").unwrap();
    let names =
        |fixture: &Fixture| ["directory/one", "directory/other"].map(|name| fixture.get(name).node);
    let exchange = |fixture: &Fixture, request: RequestId| {
        let (one, other) = ((directory, &b"one"[..]), (directory, &b"other"[..]));
        let fs = fixture.fs();
        fs.rename_requested(request, one, other, RenameMode::Exchange)
    };
    let numbered = |number, is_resent| RequestId { number, is_resent };
    let mut expected = [one, other];
    for (number, moment) in (1..).zip(["unknown", "announced", "moved", "recorded"]) {
        let recorded = |id: NodeId, name: &[u8]| {
            let node = fixture.fs().node(id).unwrap();
            std::mem::forget(node.entry().unwrap().may_get(directory.0, name));
        };
        match moment {
            "announced" | "moved" => {
                recorded(expected[0], b"other");
                recorded(expected[1], b"one");
                let ledger = fixture.fs().ledger.as_ref().unwrap();
                ledger.begin_change(number, expected[0].0);
                if moment == "moved" {
                    let (from, to) = (upper.join("one"), upper.join("other"));
                    let (flags, cwd) = (rustix::fs::RenameFlags::EXCHANGE, rustix::fs::CWD);
                    rustix::fs::renameat_with(cwd, from, cwd, to, flags).unwrap();
                }
            }
            "recorded" => drop(exchange(&fixture, numbered(number, false)).unwrap()),
            _ => {}
        }
        expected.reverse();
        fixture.take_over();
        if moment != "unknown" {
            // This one is killed before it gets the request.
            fixture.take_over();
        }
        for _ in 0..2 {
            exchange(&fixture, numbered(number, true)).unwrap();
            assert_eq!(names(&fixture), expected, "{moment}");
            fixture.take_over();
            assert_eq!(names(&fixture), expected, "{moment}");
        }
    }
}

/// The process ends when a name of the image is hidden, and before the file has the number of its
/// names.
#[test]
fn removals_are_counted_once() {
    let Some(mut fixture) = open() else { return };
    let root = NodeId::ROOT;
    let id = fixture.get("h2").node;
    fixture.write(id, 0, b"changed");
    assert_eq!(attributes(&fixture, id).nlink, 2);
    {
        let fs = fixture.fs();
        let node = fs.node(id).unwrap();
        drop(fs.begin_removal(RESENT.number, &node).unwrap());
        let upper = fs::File::open(fixture.upper()).unwrap();
        fs.upper.place_whiteout(upper.as_fd(), b"h1", None).unwrap();
    }
    // The first one is killed before it gets the request, the others before they answer it.
    for round in 0..4 {
        fixture.take_over();
        if round > 0 {
            fixture.fs().unlink_requested(RESENT, root, b"h1").unwrap();
            assert_eq!(attributes(&fixture, id).nlink, 1);
            assert_eq!(fixture.get("h2").nlink, 1);
        }
    }
    let missing = fixture.fs().unlink_requested(FRESH, root, b"h1");
    assert_eq!(missing, Err(Errno::NOENT));
    fixture.fs().unlink(root, b"h2").unwrap();
    assert_eq!(attributes(&fixture, id).nlink, 0);
}

/// Before the request comes again, other requests use the file by its other name, also in a process
/// that is killed then.
#[test]
fn removals_are_counted_once_after_other_requests() {
    for (kills, is_executed) in [(0, true), (0, false), (2, true), (2, false)] {
        let Some(mut fixture) = open() else { return };
        let root = NodeId::ROOT;
        let id = fixture.get("h2").node;
        fixture.write(id, 0, b"changed");
        {
            let fs = fixture.fs();
            let node = fs.node(id).unwrap();
            drop(fs.begin_removal(RESENT.number, &node).unwrap());
            if is_executed {
                let upper = fs::File::open(fixture.upper()).unwrap();
                fs.upper.place_whiteout(upper.as_fd(), b"h1", None).unwrap();
            }
        }
        for _ in 0..=kills {
            fixture.take_over();
            fixture.fs().link(id, root, b"more").unwrap();
            fixture.fs().unlink(root, b"more").unwrap();
        }
        for _ in 0..3 {
            fixture.fs().unlink_requested(RESENT, root, b"h1").unwrap();
            assert_eq!(attributes(&fixture, id).nlink, 1, "{kills} {is_executed}");
            fixture.take_over();
        }
        fixture.fs().unlink(root, b"h2").unwrap();
        assert_eq!(attributes(&fixture, id).nlink, 0);
    }
}

/// Nothing is exchanged before the ledger has the request.
#[test]
fn exchanges_are_recorded_first() {
    let Some(mut fixture) = open() else { return };
    let directory = mkdir(&fixture, NodeId::ROOT, "directory");
    let [one, other] = ["one", "other"].map(|name| create(&fixture, directory, name));
    let held = fs::File::open(fixture.upper().join("directory")).unwrap();
    let exchange = |fixture: &Fixture, request| {
        let (one, other) = ((directory, &b"one"[..]), (directory, &b"other"[..]));
        let fs = fixture.fs();
        fs.rename_requested(request, one, other, RenameMode::Exchange)
    };
    let flags = rustix::fs::ioctl_getflags(&held).unwrap();
    let immutable = flags | rustix::fs::IFlags::IMMUTABLE;
    match rustix::fs::ioctl_setflags(&held, immutable) {
        Err(Errno::PERM) if !rustix::process::geteuid().is_root() => return,
        set => set.unwrap(),
    }
    assert_eq!(exchange(&fixture, FRESH), Err(Errno::PERM));
    rustix::fs::ioctl_setflags(&held, flags).unwrap();
    fixture.take_over();
    assert_eq!(fixture.fs().begun[&FRESH.number].node, one.0);
    exchange(&fixture, RESENT).unwrap();
    assert_eq!(fixture.get("directory/one").node, other);
}

#[test]
fn objects_that_exist_already_are_finished() {
    let Some(mut fixture) = open() else { return };
    let root = NodeId::ROOT;
    // The process ended before it set the mode, whose bits the host does not set at once.
    for name in ["file", "directory"] {
        let path = fixture.upper().join(name);
        match name {
            "file" => fs::write(path, b"").unwrap(),
            _ => fs::create_dir(path).unwrap(),
        }
    }
    fixture.take_over();
    for (name, new) in [("file", New::File), ("directory", New::Directory)] {
        let fs = fixture.fs();
        let made = fs
            .make_requested(RESENT, &ROOT, root, name.as_bytes(), 0o6751, &new)
            .unwrap();
        assert_eq!(made.permissions, 0o6751, "{name}");
        assert_eq!(fixture.get(name).node, made.node);
        let other = fs.make_requested(
            RESENT,
            &ROOT,
            root,
            name.as_bytes(),
            0o644,
            &New::Symlink(b"x"),
        );
        assert_eq!(other, Err(Errno::EXIST));
    }
    // The image's own file was not made by a request.
    let image = fixture
        .fs()
        .make_requested(RESENT, &ROOT, root, b"c", 0o644, &New::File);
    assert_eq!(image, Err(Errno::EXIST));
    // The first attempt of a request fails.
    let file = fixture
        .fs()
        .make_requested(FRESH, &ROOT, root, b"file", 0o644, &New::File);
    assert_eq!(file, Err(Errno::EXIST));
    let id = fixture.get("file").node;
    fixture.fs().link(id, root, b"linked").unwrap();
    let link = |request, name: &[u8]| fixture.fs().link_requested(request, id, root, name);
    assert_eq!(link(RESENT, b"linked").unwrap().nlink, 2);
    assert_eq!(link(FRESH, b"linked"), Err(Errno::EXIST));
    assert_eq!(link(RESENT, b"c"), Err(Errno::EXIST));
    // Names that are removed already.
    let fs = fixture.fs();
    for removed in [fs.unlink(root, b"none"), fs.remove_directory(root, b"none")] {
        assert_eq!(RESENT.removed(removed, Errno::NOENT), Ok(()));
        assert_eq!(FRESH.removed(removed, Errno::NOENT), Err(Errno::NOENT));
    }
    // Attributes.
    let fs = fixture.fs();
    let set = |value: &[u8], request| {
        fs.set_xattr_requested(request, id, b"user.name", value, XattrMode::Create)
    };
    set(b"one", FRESH).unwrap();
    assert_eq!(set(b"one", FRESH), Err(Errno::EXIST));
    assert_eq!(set(b"other", RESENT), Err(Errno::EXIST));
    set(b"one", RESENT).unwrap();
    let remove =
        |request: RequestId| request.removed(fs.remove_xattr(id, b"user.name"), Errno::NODATA);
    remove(FRESH).unwrap();
    remove(RESENT).unwrap();
    let again = remove(FRESH);
    assert_eq!(again, Err(Errno::NODATA));
}
