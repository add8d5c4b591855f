//! The differences from the image, as a layer.

use std::fs;
use std::os::fd::AsFd;

use bcow_erofs::reader::ExtentSource;
use bcow_union::UpperError;
use bcow_union::offline::{Scope, Spliced, lower_offset};
use bcow_union::testing::upper::{Attribute, Mark, Namespace};

use crate::fixture::{Union, open_many};
use crate::host::{make_whiteout, set_attribute};
use crate::image::{ACCESS_ACL, acl};
use crate::tree::{assert_same, tree_of};
use crate::unmounted::{partial, spliced};

/// The changes alone as a file system.
fn layer_of(union: &Union) -> Spliced {
    let changes = union.changes(Scope::Layer);
    spliced(&changes.store, vec![changes.layer])
}

#[test]
fn bytes_of_the_image_are_not_stored_again() {
    let Some(mut union) = open_many() else { return };
    union.write("large", 1_000_000, b"x");
    union.close();
    let spliced = layer_of(&union);
    let fs = &spliced.filesystem;
    let inode = fs.inode(fs.resolve(b"large").unwrap().unwrap()).unwrap();
    let mut own = 0;
    for extent in fs.extents(&inode, 0) {
        let extent = extent.unwrap();
        match extent.source {
            ExtentSource::Device { offset } if lower_offset(offset).is_none() => {
                own += extent.length;
            }
            _ => {}
        }
    }
    // The changed block, and the end of the file, which the image stores inline after the inode.
    assert!(own <= 2 * 4096, "{own}");
}

#[test]
fn the_acl_of_the_root_is_the_mounts_and_not_the_directorys() {
    let Some(mut union) = open_many() else { return };
    let of = |entries: [(u16, u16); 4]| acl(&entries.map(|(tag, may)| (tag, may, u32::MAX)));
    let of_mount = of([(0x01, 7), (0x04, 5), (0x10, 5), (0x20, 1)]);
    let of_host = of([(0x01, 7), (0x04, 0), (0x10, 7), (0x20, 0)]);
    union.set_xattr("", ACCESS_ACL, &of_mount);
    union.close();
    set_attribute(&union.upper(), ACCESS_ACL, &of_host);
    let spliced = layer_of(&union);
    let fs = &spliced.filesystem;
    let root = fs.inode(fs.root()).unwrap();
    let acls: Vec<_> = fs.xattrs(&root).unwrap().into_iter().collect();
    assert_eq!(acls, [(ACCESS_ACL.as_bytes().to_vec(), of_mount)]);
    assert_eq!(root.permissions, 0o751);
}

#[test]
fn marks_of_the_root_do_not_matter() {
    let Some(mut union) = partial() else { return };
    let before = union.put_together();
    let root = fs::File::open(union.upper()).unwrap();
    let at = Attribute::Open(root.as_fd());
    Mark::Opaque.set(at, Namespace::Trusted, b"y").unwrap();
    union.open();
    let shown = union.tree();
    union.close();
    assert_same(&shown, &union.put_together(), "put together");
    assert_same(&shown, &before, "before it was marked");
    union.assert_touched(&tree_of(&union.image().filesystem()), &shown);
    // A check with the image knows which names it has.
    make_whiteout(&union.host("white"));
    assert_eq!(union.found(), ["upper-whiteout"]);
}

#[test]
fn writer_is_refused_while_content_of_the_upper_is_read() {
    let Some(union) = partial() else { return };
    let spliced = layer_of(&union);
    assert!(matches!(union.instance(), Err(UpperError::InUse { .. })));
    union.reader();
    assert!(matches!(union.instance(), Err(UpperError::InUse { .. })));
    drop(spliced);
    union.instance().unwrap();
}
