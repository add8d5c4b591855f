//! Modes, owners and extended attributes.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::time::Instant;

use bcow_erofs::tree::Timestamp;
use bcow_testkit::changed;
use bcow_union::NodeId;
use bcow_union::fs::{Attributes, Changes, Privileges, SetTime, XattrMode};
use rustix::io::Errno;

use crate::fixture::{Union, closed, open};
use crate::host::{attribute, set_attribute};
use crate::image::{ACCESS_ACL, BIG, acl_of_user, big, noise};

#[test]
fn changing_attributes_of_a_big_file_copies_no_byte() {
    let Some(mut union) = open() else { return };
    let before = union.get("big").unwrap();
    let changes = Changes {
        permissions: Some(0o600),
        uid: Some(7),
        ..Changes::default()
    };
    let after = union.fs().set_attributes(before.node, &changes).unwrap();
    assert_eq!((after.permissions, after.uid), (0o600, 7));
    assert_eq!((after.node, after.size), (before.node, before.size));
    let host = fs::metadata(union.host("big")).unwrap();
    // At most one block, which the host may use for attributes.
    assert_eq!(host.len(), BIG as u64);
    assert!(host.blocks() <= 8, "{}", host.blocks());
    assert_eq!(host.permissions().mode() & 0o7777, 0o600);
    assert_eq!(union.content("big"), big());
    union.assert_kept();
}

/// A user who may enter the container's root directory must not get access to the directory on the
/// host.
#[test]
fn acl_of_the_root_does_not_reach_the_host() {
    let Some(mut union) = open() else { return };
    let upper = union.upper();
    let on_host = || {
        let mode = fs::metadata(&upper).unwrap().mode() & 0o7777;
        (mode, attribute(&upper, ACCESS_ACL))
    };
    let seen = |union: &Union| {
        let names = union.xattr_names("");
        let times = names.iter().filter(|name| *name == ACCESS_ACL).count();
        let mode = union.get("").unwrap().permissions;
        (mode, times, union.xattr("", ACCESS_ACL))
    };
    let private = (0o700, None);
    assert_eq!(on_host(), private);
    assert_eq!(seen(&union), (0o775, 1, Ok(acl_of_user(7))));
    let (name, acl) = (ACCESS_ACL.as_bytes(), acl_of_user(3));
    let set = union
        .fs()
        .set_xattr(NodeId::ROOT, name, &acl, XattrMode::Replace);
    set.unwrap();
    union.reopen();
    assert_eq!(on_host(), private);
    assert_eq!(seen(&union), (0o775, 1, Ok(acl_of_user(3))));
    // The host's own ACL has no effect in the union.
    set_attribute(&upper, ACCESS_ACL, &acl_of_user(0));
    assert_eq!(seen(&union), (0o775, 1, Ok(acl_of_user(3))));
    union.fs().remove_xattr(NodeId::ROOT, name).unwrap();
    assert_eq!(seen(&union), (0o775, 0, Err(Errno::NODATA)));
    assert_eq!(on_host(), (0o775, Some(acl_of_user(0))));
}

#[test]
fn opaque_marks_of_the_container_do_not_reach_the_host() {
    const OPAQUE: &str = "trusted.overlay.opaque";
    let Some(mut union) = open() else { return };
    union.set_xattr("dir", OPAQUE, b"y");
    union.set_xattr("dir", "user.x", b"1");
    assert_eq!(union.xattr("dir", OPAQUE).unwrap(), b"y");
    union.assert_kept();
    assert_eq!(union.names("dir"), ["sub", "x"]);
    assert_eq!(union.xattr_names("dir"), [OPAQUE, "user.x"]);
}

/// The host removes capabilities with each write.
#[test]
fn capabilities_of_a_partial_stay_until_its_next_write() {
    const NAME: &str = "security.capability";
    const CAPABILITY: [u8; 20] = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let Some(mut union) = open() else { return };
    let assert_has = |union: &Union| {
        let found = union.xattr("big", NAME);
        assert_eq!(found.as_deref(), Ok(&CAPABILITY[..]));
    };
    union.write("big", 100_000, b"hello");
    union.sync("big");
    union.write("big", 200_000, b"more");
    union.set_xattr("big", NAME, &CAPABILITY);
    for _ in 0..2 {
        union.sync("big");
        union.reopen();
        assert_eq!(&union.content("big")[200_000..200_004], b"more");
        assert_has(&union);
    }
    union.write("big", 0, b"x");
    assert_eq!(union.xattr("big", NAME), Err(Errno::NODATA));
    // Also on a partial file that the kernel forgot before all data was on the host.
    union.fs().forget(union.id("big"), 1000);
    union.set_xattr("big", NAME, &CAPABILITY);
    union.fs().sync_all().unwrap();
    assert_has(&union);
    // Writeback of the kernel removes no capability, neither when it arrives nor when its block
    // is completed.
    let node = union.id("big");
    let write_back = |at| union.fs().write(node, at, b"late", Privileges::KeepAll);
    assert_eq!(write_back(150_000), Ok(4));
    union.fs().sync_all().unwrap();
    assert_has(&union);
    union.fs().remove_xattr(node, NAME.as_bytes()).unwrap();
    assert_eq!(write_back(160_000), Ok(4));
    assert_eq!(union.xattr("big", NAME), Err(Errno::NODATA));
}

#[test]
fn attributes_outside_the_namespaces_of_linux_are_refused() {
    for is_override in [false, true] {
        let Some(mut union) = closed() else { return };
        if is_override {
            union.begin_with_owners_in_attributes();
        }
        union.open();
        union.create("new", 0o644).unwrap();
        let id = union.id("new");
        let set = |name: &str| {
            let name = name.as_bytes();
            union.fs().set_xattr(id, name, b"x", XattrMode::Any)
        };
        for name in ["nonsense", "system.foo", "btrfs.x", "userx.y", "users"] {
            assert_eq!(set(name), Err(Errno::OPNOTSUPP), "{name}");
        }
        for name in ["user.", "trusted.", "security."] {
            assert_eq!(set(name), Err(Errno::INVAL), "{name}");
        }
        for name in ["user.a", "trusted.a", "security.a"] {
            assert_eq!(set(name), Ok(()), "{name}");
        }
        assert_eq!(
            union.xattr_names("new"),
            ["security.a", "trusted.a", "user.a"]
        );
    }
}

#[test]
fn copy_up_changes_no_attribute_of_the_directories_above() {
    let Some(mut union) = open() else { return };
    let directories = ["", "dir", "dir/sub"];
    let attributes = |union: &Union| directories.map(|path| union.get(path).unwrap());
    let before = attributes(&union);
    union.write("dir/sub/y", 0, b"new");
    union.write("big", 5000, b"new");
    // Another name of a file that was copied up.
    let owner = changed(Changes::default(), |new| new.uid = Some(7));
    union.set_attributes("h1", &owner);
    assert_eq!(attributes(&union), before);
    for path in directories {
        union.names(path);
    }
    assert_eq!(attributes(&union), before);
    union.reopen();
    assert_eq!(attributes(&union), before);
}

#[test]
fn change_time_of_a_directory_is_that_of_the_last_change_by_a_program() {
    let Some(mut union) = open() else { return };
    let dir = |union: &Union| union.get("dir").unwrap();
    let image = dir(&union);
    let mode = changed(Changes::default(), |new| new.permissions = Some(0o700));
    let changed = union.set_attributes("dir", &mode);
    assert_eq!(changed.mtime, image.mtime);
    assert!(changed.ctime > image.ctime, "{changed:?}");
    // A copy-up below does not change it.
    union.write("dir/x", 0, b"new");
    assert_eq!(dir(&union), changed);
    union.set_xattr("dir", "user.name", b"1");
    assert!(dir(&union).ctime >= changed.ctime);
    union.create("dir/new", 0o644).unwrap();
    let names = dir(&union);
    assert!(
        names.ctime == names.mtime && names.ctime > image.ctime,
        "{names:?}"
    );
    let time = Some(SetTime::At(image.mtime));
    let times = Changes {
        atime: time,
        mtime: time,
        ..Changes::default()
    };
    let set = union.set_attributes("dir", &times);
    assert!(
        set.mtime == image.mtime && set.ctime >= names.ctime,
        "{set:?}"
    );
    union.reopen();
    assert_eq!(union.get("dir").unwrap(), set);
}

#[test]
fn times_that_the_host_cannot_store_stay() {
    for native in [true, false] {
        let Some(mut union) = closed() else { return };
        if !native {
            union.begin_with_owners_in_attributes();
        }
        union.open();
        for seconds in [16_725_225_600, -5_000_000_000] {
            for path in ["small", "big", "dir", ""] {
                let time = Timestamp {
                    seconds,
                    nanoseconds: 123_456_789,
                };
                let times = Changes {
                    atime: Some(SetTime::At(time)),
                    mtime: Some(SetTime::At(time)),
                    ..Changes::default()
                };
                let mode = changed(Changes::default(), |new| new.permissions = Some(0o700));
                let set = union.set_attributes(path, &times);
                assert_eq!((set.mtime, set.atime), (time, time), "{path}");
                let set = union.set_attributes(path, &mode);
                assert_eq!((set.mtime, set.atime), (time, time), "{path}");
                union.reopen();
                let found = union.get(path).unwrap();
                assert_eq!((found.mtime, found.atime), (time, time), "{path}");
            }
        }
        // A change by a program sets the time, and so does a time that the host can store.
        union.write("small", 0, b"new");
        assert!(union.get("small").unwrap().mtime.seconds > 1_700_000_000);
        let now = changed(Changes::default(), |new| new.mtime = Some(SetTime::Now));
        let set = union.set_attributes("dir", &now);
        assert!((1_700_000_000..15_000_000_000).contains(&set.mtime.seconds));
        union.close();
        union.assert_sound();
    }
}

#[test]
fn background_work_on_a_partial_changes_no_time() {
    let Some(union) = open() else { return };
    let times = || {
        let found = union.get("big").unwrap();
        (found.atime, found.mtime, found.ctime)
    };
    union.write("big", 100_000, b"hello");
    let written = times();
    union.sync_all();
    assert_eq!(times(), written);
    union.write("big", 0, &noise(9, BIG));
    let written = times();
    let start = Instant::now();
    while attribute(&union.host("big"), "trusted.bcow.sketch").is_some() {
        assert_eq!(times(), written);
        assert!(
            start.elapsed().as_secs() < 60,
            "the partial file is not promoted"
        );
        std::thread::yield_now();
    }
    assert_eq!(times(), written);
    union.set_permissions("big", 0o600);
    assert!(times().2 > written.2);
}

#[test]
fn flush_of_a_small_file_changes_no_time() {
    let Some(union) = open() else { return };
    union.write("small", 0, b"new");
    let written = union.get("small").unwrap();
    union.sync_all();
    let flushed = union.get("small").unwrap();
    let times = |found: &Attributes| (found.atime, found.mtime, found.ctime);
    assert_eq!(times(&flushed), times(&written));
    union.set_permissions("small", 0o600);
    assert!(union.get("small").unwrap().ctime >= written.ctime);
}
