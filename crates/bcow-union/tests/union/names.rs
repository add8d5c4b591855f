//! Names: creating, removing, renaming and listing them.

use std::fs;
use std::mem::MaybeUninit;
use std::ops::ControlFlow;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

use bcow_testkit::changed;
use bcow_union::fs::{Caller, Changes, New, RenameMode, XattrMode};
use bcow_union::{NodeId, UnionOptions};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::fs::{Gid, IFlags, Uid};
use rustix::io::Errno;

use crate::fixture::{ROOT, Union, closed, closed_on, open};
use crate::host::{is_whiteout, set_attribute};
use crate::image;

const USER: Caller = Caller {
    uid: 65534,
    gid: 65534,
    pid: 1,
    umask: 0,
};

/// Runs `run` as an ordinary user, in a thread of its own: in Linux, each thread has its own
/// credentials.
fn as_ordinary_user(run: impl FnOnce() + Send) {
    let (uid, gid) = (Uid::from_raw(USER.uid), Gid::from_raw(USER.gid));
    let thread = || {
        rustix::thread::set_thread_res_gid(gid, gid, gid).unwrap();
        rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
        run();
    };
    std::thread::scope(|scope| scope.spawn(thread).join().unwrap());
}

/// A closed union whose upper belongs to the user of [`as_ordinary_user`].
fn of_user() -> Option<Union> {
    let union = closed()?;
    fs::create_dir(union.upper()).unwrap();
    let everyone = fs::Permissions::from_mode(0o755);
    fs::set_permissions(union.directory(), everyone).unwrap();
    chown(union.upper(), Some(USER.uid), Some(USER.gid)).unwrap();
    Some(union)
}

#[test]
fn removed_names_are_whiteouts_and_new_ones_take_their_place() {
    let Some(mut union) = open() else { return };
    union.unlink("small").unwrap();
    assert!(union.get("small").is_none());
    assert!(is_whiteout(&union.host("small")));
    assert_eq!(union.remove_directory("dir"), Err(Errno::NOTEMPTY));
    union.unlink("dir/sub/y").unwrap();
    union.remove_directory("dir/sub").unwrap();
    union.unlink("dir/x").unwrap();
    union.remove_directory("dir").unwrap();
    assert!(is_whiteout(&union.host("dir")));
    union.assert_kept();
    union.make_directory("dir", 0o777).unwrap();
    assert!(union.names("dir").is_empty());
    assert_eq!(union.get("dir").unwrap().permissions, 0o755);
    union.create("small", 0o666).unwrap();
    assert_eq!(union.content("small"), b"");
    assert_eq!(union.create("big", 0o666), Err(Errno::EXIST));
    union.assert_kept();
}

#[test]
fn lower_directory_is_renamed_with_all_that_is_in_it() {
    let Some(mut union) = open() else { return };
    let (dir, y) = (union.id("dir"), union.id("dir/sub/y"));
    union
        .rename_how("dir", "moved", RenameMode::NoReplace)
        .unwrap();
    assert!(union.get("dir").is_none());
    assert!(is_whiteout(&union.host("dir")));
    assert_eq!((union.id("moved"), union.id("moved/sub/y")), (dir, y));
    union.write("moved/sub/y", 1, b"es");
    assert_eq!(union.rename("moved", "moved/in"), Err(Errno::INVAL));
    // Rename over an empty lower directory, and create another directory at the old path.
    union.rename("moved", "empty").unwrap();
    union.make_directory("dir", 0o700).unwrap();
    assert!(union.names("dir").is_empty());
    assert_eq!(union.names("empty"), ["sub", "x"]);
    assert_eq!(union.content("empty/sub/y"), b"yes");
    union.assert_kept();
    union
        .rename_how("dir", "empty", RenameMode::Exchange)
        .unwrap();
    assert_eq!(union.names("dir"), ["sub", "x"]);
    assert!(union.names("empty").is_empty());
    union.assert_kept();
}

#[test]
fn a_directory_that_cannot_be_replaced_stays_as_it_was() {
    let Some(mut union) = open() else { return };
    let from = union.make_directory("from", 0o755).unwrap().node;
    union.make_directory("target", 0o755).unwrap();
    let changes = Changes {
        permissions: Some(0o711),
        uid: Some(5),
        ..Changes::default()
    };
    union.set_attributes("target", &changes);
    union.set_xattr("target", "user.x", b"y");
    let before = union.get("target").unwrap();
    // The host refuses to rename an immutable file.
    let host = fs::File::open(union.host("from")).unwrap();
    if rustix::fs::ioctl_setflags(&host, IFlags::IMMUTABLE).is_err() {
        return;
    }
    let moved = union.rename("from", "target");
    rustix::fs::ioctl_setflags(&host, IFlags::empty()).unwrap();
    assert_eq!(moved, Err(Errno::PERM));
    for _ in 0..2 {
        let after = union.get("target").unwrap();
        assert_eq!((after.node, after.uid), (before.node, 5));
        assert_eq!((after.permissions, after.mtime), (0o711, before.mtime));
        assert_eq!(union.xattr("target", "user.x").unwrap(), b"y");
        union.reopen();
    }
    assert_eq!(union.id("from"), from);
    union.rename("from", "target").unwrap();
    assert_eq!(union.id("target"), from);
    union.assert_kept();
}

/// For each entry that a listing shows without attributes, the kernel sends one forget.
#[test]
fn damaged_entries_of_a_listing_take_no_reference_from_an_open_file() {
    let Some(union) = open() else { return };
    const NAME: &str = "trusted.overlay.metacopy";
    union.write("small", 0, b"S");
    let new = union.create("new", 0o644).unwrap().node;
    for name in ["small", "new"] {
        set_attribute(&union.host(name), NAME, b"bad");
    }
    for taken in 0..12 {
        let handle = union.fs().open_directory(NodeId::ROOT).unwrap();
        let mut shown = Vec::new();
        let mut left = taken;
        union
            .fs()
            .read_directory_plus(NodeId::ROOT, handle, 0, &mut |entry| {
                if left == 0 {
                    return ControlFlow::Break(());
                }
                left -= 1;
                let is_dot = matches!(entry.name, b"." | b"..");
                shown.push((entry.attributes.map(|found| found.node), is_dot));
                ControlFlow::Continue(())
            })
            .unwrap();
        union.fs().close_directory(handle);
        for (node, is_dot) in shown {
            match node {
                _ if is_dot => {}
                Ok(node) | Err(node) => union.fs().forget(node, 1),
            }
        }
    }
    rustix::fs::removexattr(union.host("new"), NAME).unwrap();
    let found = union.fs().attributes(new).map(|found| found.node);
    assert_eq!(found, Ok(new));
    // The reference from the creation is the last one.
    union.fs().forget(new, 1);
    assert_eq!(union.fs().attributes(new), Err(Errno::STALE));
}

#[test]
fn meta_directory_is_not_part_of_the_tree() {
    let Some(union) = open() else { return };
    assert!(union.get(".bcow").is_none());
    assert_eq!(union.create(".bcow", 0o600), Err(Errno::PERM));
    assert_eq!(union.rename("small", ".bcow"), Err(Errno::PERM));
    union.create("dir/.bcow", 0o600).unwrap();
}

/// If owners are stored in an attribute, the owner must be able to set it for any mode.
#[test]
fn ordinary_user_creates_objects_whose_mode_denies_access() {
    let Some(mut union) = of_user() else { return };
    as_ordinary_user(|| {
        union.open();
        let (fs, root) = (union.fs(), NodeId::ROOT);
        let file = fs.make(&USER, root, b"object", 0o444, &New::File).unwrap();
        assert_eq!((file.uid, file.permissions), (USER.uid, 0o444));
        union.write("object", 0, b"object");
        fs.make(&USER, root, b"none", 0, &New::File).unwrap();
        for (name, mode) in [(&b"closed"[..], 0o555), (b"shut", 0)] {
            let made = fs.make(&USER, root, name, mode, &New::Directory);
            assert_eq!(made.unwrap().permissions, mode);
        }
        union.assert_kept();
        assert_eq!(union.content("object"), b"object");
        union.close();
    });
}

/// A crash can leave such directories in the work directory, and the next opening removes them.
#[test]
fn ordinary_user_removes_unfinished_directories_without_permissions() {
    let Some(mut union) = of_user() else { return };
    as_ordinary_user(|| {
        union.open();
        union.close();
        let work = union.host(".bcow/work");
        for (outer, inner) in [(0o555, 0o555), (0o555, 0), (0, 0o555)] {
            let top = work.join(format!("{outer}-{inner}"));
            let inside = top.join("inside");
            fs::create_dir_all(&inside).unwrap();
            for directory in [&top, &inside] {
                fs::write(directory.join("file"), b"").unwrap();
            }
            fs::set_permissions(&inside, fs::Permissions::from_mode(inner)).unwrap();
            fs::set_permissions(&top, fs::Permissions::from_mode(outer)).unwrap();
        }
        union.open();
        let names = fs::read_dir(&work)
            .unwrap()
            .map(|entry| entry.unwrap().file_name());
        let left: Vec<_> = names
            .filter(|name| name.to_string_lossy().contains('-'))
            .collect();
        assert!(left.is_empty(), "{left:?}");
        union.close();
    });
}

/// A new file with another owner than the mount's gets its name only when it is complete. A crash
/// therefore leaves no file with the wrong owner.
#[test]
fn new_object_has_its_owner_when_it_has_its_name() {
    let Some(union) = open() else { return };
    let watch = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).unwrap();
    let what = WatchFlags::CREATE | WatchFlags::MOVED_TO;
    inotify::add_watch(&watch, union.upper(), what).unwrap();
    let (fs, root) = (union.fs(), NodeId::ROOT);
    fs.make(&USER, root, b"file", 0o644, &New::File).unwrap();
    fs.make(&USER, root, b"directory", 0o755, &New::Directory)
        .unwrap();
    fs.make(&ROOT, root, b"own", 0o644, &New::File).unwrap();
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut reader = inotify::Reader::new(&watch, &mut buffer);
    let mut seen = Vec::new();
    while let Ok(event) = reader.next() {
        let name = event.file_name().unwrap().to_str().unwrap().to_owned();
        seen.push((name, event.events().contains(ReadFlags::MOVED_TO)));
    }
    let want = [("file", true), ("directory", true), ("own", false)];
    assert_eq!(seen, want.map(|(name, moved)| (name.to_owned(), moved)));
    for name in ["file", "directory"] {
        let host = fs::metadata(union.host(name)).unwrap();
        assert_eq!((host.uid(), host.gid()), (USER.uid, USER.gid));
    }
}

/// A copy of such a device would be a whiteout.
#[test]
fn a_device_that_is_a_whiteout_elsewhere_stays_or_is_removed() {
    let Some(mut union) = closed_on(image::crowd, UnionOptions::default()) else {
        return;
    };
    union.open();
    let before = union.get("device").unwrap();
    let id = before.node;
    let refused = Err(Errno::PERM);
    let changes = changed(Changes::default(), |new| new.permissions = Some(0o666));
    let set = union.fs().set_attributes(id, &changes);
    assert_eq!(set.map(drop), refused);
    let set = union.fs().set_xattr(id, b"trusted.x", b"y", XattrMode::Any);
    assert_eq!(set, refused);
    let linked = union.fs().link(id, NodeId::ROOT, b"linked");
    assert_eq!(linked.map(drop), refused);
    assert_eq!(union.rename("device", "moved"), refused);
    let exchanged = union.rename_how("f1", "device", RenameMode::Exchange);
    assert_eq!(exchanged, refused);
    assert_eq!(union.get("device").unwrap(), before);
    // Renaming the directory moves the device with it.
    union.rename("devices", "moved").unwrap();
    assert_eq!(union.get("moved/other").unwrap(), before);
    union.assert_kept();
    union.unlink("device").unwrap();
    union.rename("f1", "moved/other").unwrap();
    union.assert_kept();
    assert!(union.get("device").is_none());
    assert_eq!(union.content("moved/other"), b"small file\n");
}
