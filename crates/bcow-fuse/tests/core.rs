//! The file system without a mount.

mod support;

use std::ops::ControlFlow;
use std::sync::Arc;

use bcow_erofs::reader::FileType;
use bcow_erofs::tree::{Attributes, DeviceNumber, Directory, LayerTree, Node, NodeKind};
use bcow_fuse::NodeId;
use bcow_fuse::fs::{AccessKind, ImageFs, Seek, TrustedNames};
use bcow_fuse::lower::{OverlayLower, OverlayXattrs};
use bcow_testkit::noise;
use rustix::io::Errno;
use support::{open, written, written_image};

fn fs() -> ImageFs {
    ImageFs::new(open(Arc::new(written_image())))
}

fn id(fs: &ImageFs, name: &[u8]) -> NodeId {
    fs.lookup(NodeId::ROOT, name).unwrap().unwrap().id
}

fn listed(fs: &ImageFs, mut cookie: u64, at_once: usize) -> Vec<Vec<u8>> {
    let mut names = Vec::new();
    loop {
        let mut seen = 0;
        fs.read_dir(NodeId::ROOT, cookie, &mut |entry| {
            if seen == at_once {
                return ControlFlow::Break(());
            }
            seen += 1;
            cookie = entry.next_cookie;
            names.push(entry.name.to_vec());
            ControlFlow::Continue(())
        })
        .unwrap();
        if seen < at_once {
            return names;
        }
    }
}

#[test]
fn root_is_node_one_and_its_own_parent() {
    let fs = fs();
    for name in [&b"."[..], b".."] {
        assert_eq!(id(&fs, name), NodeId::ROOT);
    }
    assert_eq!(fs.node(NodeId::ROOT).unwrap().inode.nlink, 2);
}

#[test]
fn listing_in_pieces_equals_listing_at_once() {
    let fs = fs();
    let all = listed(&fs, 0, 100);
    assert_eq!(all.len(), 4);
    for at_once in 1..4 {
        assert_eq!(listed(&fs, 0, at_once), all);
    }
}

#[test]
fn missing_name_is_none_and_too_long_a_name_an_error() {
    let fs = fs();
    assert!(fs.lookup(NodeId::ROOT, b"missing").unwrap().is_none());
    assert!(fs.lookup(NodeId::ROOT, &[b'n'; 255]).unwrap().is_some());
    let error = fs.lookup(NodeId::ROOT, &[b'n'; 256]).unwrap_err();
    assert_eq!(error, Errno::NAMETOOLONG);
}

#[test]
fn wrong_kind_of_node_is_refused_as_posix_has_it() {
    let fs = fs();
    let file = id(&fs, b"sparse");
    let nothing = &mut |_: bcow_fuse::fs::DirectoryEntry<'_>| ControlFlow::Continue(());
    assert_eq!(fs.lookup(file, b"x").unwrap_err(), Errno::NOTDIR);
    assert_eq!(fs.read_dir(file, 0, nothing).unwrap_err(), Errno::NOTDIR);
    assert_eq!(fs.read_link(file).unwrap_err(), Errno::INVAL);
    let read = fs.read(NodeId::ROOT, 0, 1, &mut Vec::new(), |_| ());
    assert_eq!(read.unwrap_err(), Errno::ISDIR);
    let seek = fs.seek(NodeId::ROOT, 0, Seek::Data);
    assert_eq!(seek.unwrap_err(), Errno::INVAL);
}

#[test]
fn read_is_short_at_the_end_only() {
    let fs = fs();
    let file = id(&fs, b"sparse");
    let mut expected = vec![0; 3 * 4096];
    expected[4096..8192].copy_from_slice(&noise(3, 4096));
    let mut scratch = Vec::new();
    for offset in [0, 1, 4095, 4096, 8191, 8192, 12_287, 12_288, 20_000] {
        for length in [0, 1, 4096, 9000, u32::MAX] {
            let got = fs
                .read(file, offset, length, &mut scratch, <[u8]>::to_vec)
                .unwrap();
            let start = (offset as usize).min(expected.len());
            let end = (start + length as usize).min(expected.len());
            assert!(got == expected[start..end], "{length} bytes at {offset}");
        }
    }
    let got = fs.read(file, u64::MAX, 1, &mut scratch, <[u8]>::len);
    assert_eq!(got.unwrap(), 0);
}

#[test]
fn nobody_may_write_and_plain_files_are_no_programs() {
    let fs = fs();
    let file = id(&fs, b"sparse");
    assert_eq!(fs.access(file, AccessKind::Read), Ok(()));
    assert_eq!(fs.access(file, AccessKind::Write), Err(Errno::ROFS));
    assert_eq!(fs.access(file, AccessKind::Execute), Err(Errno::ACCESS));
    assert_eq!(fs.access(NodeId::ROOT, AccessKind::Execute), Ok(()));
}

#[test]
fn file_without_attributes_has_none() {
    let fs = fs();
    let file = id(&fs, b"sparse");
    assert_eq!(fs.xattr(file, b"user.x"), Err(Errno::NODATA));
    assert_eq!(fs.xattr_names(file, TrustedNames::Shown), Ok(Vec::new()));
}

/// A tree whose root has an inode of this kind, with attributes, under each name.
fn tree(names: &[(&[u8], NodeKind)]) -> Arc<bcow_erofs::reader::Filesystem> {
    let xattrs = [
        "trusted.overlay.opaque",
        "trusted.overlay.redirect",
        "user.overlay.opaque",
    ];
    let mut layer = LayerTree::new();
    for (name, kind) in names {
        let node = layer.add(Node {
            attributes: Attributes {
                xattrs: Some(Arc::new(
                    xattrs
                        .map(|name| (name.into(), b"x".to_vec()))
                        .into_iter()
                        .collect(),
                )),
                ..Attributes::default()
            },
            kind: kind.clone(),
        });
        layer.insert(LayerTree::ROOT, name, node);
    }
    open(Arc::new(written(&layer.into_tree().unwrap(), &[])))
}

#[test]
fn lower_directory_of_overlayfs_hides_what_is_below_it() {
    let directory = || NodeKind::Directory(Directory::default());
    let link = || NodeKind::Symlink(b"target".to_vec().into());
    let merged = tree(&[(b"dir", directory()), (b"kept", link())]);
    let layers = [
        tree(&[
            (b"kept", directory()),
            (b"gone", directory()),
            (b"a", link()),
        ]),
        tree(&[(b"dir", directory()), (b"kept", link())]),
    ];
    let layers: Vec<_> = layers.iter().map(|layer| &**layer).collect();
    for (xattrs, mark, stored, filtered) in [
        (
            OverlayXattrs::Trusted,
            &b"trusted.overlay.opaque"[..],
            &b"user.overlay.opaque"[..],
            &b"trusted.overlay.redirect"[..],
        ),
        (
            OverlayXattrs::User,
            b"user.overlay.opaque",
            b"trusted.overlay.opaque",
            b"user.overlay.redirect",
        ),
    ] {
        let lower = OverlayLower::new(&merged, layers.iter().copied(), xattrs).unwrap();
        let fs = ImageFs::new(merged.clone()).as_overlay_lower(lower);
        let all = listed(&fs, 0, 100);
        let expected: [&[u8]; 6] = [b".", b"..", b"dir", b"kept", b"a", b"gone"];
        assert_eq!(all, expected);
        for at_once in 1..6 {
            assert_eq!(listed(&fs, 0, at_once), all);
        }
        for name in [&b"a"[..], b"gone"] {
            let node = fs.lookup(NodeId::ROOT, name).unwrap().unwrap();
            assert_eq!(node.inode.kind, FileType::CharDevice);
            assert_eq!(node.inode.rdev, Some(DeviceNumber { major: 0, minor: 0 }));
            assert_eq!((node.inode.nlink, node.inode.size, node.sectors), (1, 0, 0));
            assert_eq!(fs.node(node.id).unwrap().id, node.id);
            assert_eq!(fs.xattr_names(node.id, TrustedNames::Shown), Ok(Vec::new()));
            assert_eq!(fs.xattr(node.id, mark), Err(Errno::NODATA));
            assert_eq!(fs.read_link(node.id), Err(Errno::INVAL));
            let inside = fs.lookup(node.id, b"x").unwrap_err();
            assert_eq!(inside, Errno::NOTDIR);
        }
        let dir = id(&fs, b"dir");
        assert!(fs.lookup(dir, b"gone").unwrap().is_none());
        assert_eq!(fs.xattr(dir, mark), Ok(b"y".to_vec()));
        assert_eq!(fs.xattr(dir, stored), Ok(b"x".to_vec()));
        for file in [dir, id(&fs, b"kept")] {
            assert_eq!(fs.xattr(file, filtered), Err(Errno::NODATA));
        }
        assert_eq!(fs.xattr(id(&fs, b"kept"), mark), Err(Errno::NODATA));
        assert_eq!(fs.xattr(NodeId::ROOT, mark), Err(Errno::NODATA));
        let names = fs.xattr_names(dir, TrustedNames::Shown).unwrap();
        let names: Vec<&[u8]> = names.split_inclusive(|&byte| byte == 0).collect();
        assert_eq!(
            names.iter().filter(|name| name.starts_with(mark)).count(),
            1
        );
        assert!(!names.iter().any(|name| name.starts_with(filtered)));
    }
}

#[test]
fn any_node_id_is_answered_without_a_panic() {
    let fs = fs();
    let ids = (0..300)
        .chain([1 << 59, 1 << 62, (1 << 62) + 1, (1 << 62) + 2, u64::MAX])
        .map(NodeId);
    for id in ids {
        let _ = fs.node(id);
        let _ = fs.lookup(id, b"sparse");
        let _ = fs.read(id, 0, 4096, &mut Vec::new(), |_| ());
        let _ = fs.seek(id, 0, Seek::Hole);
        let _ = fs.xattr_names(id, TrustedNames::Shown);
    }
}

#[test]
fn semantics_page_names_the_limits_of_the_code() {
    let text = include_str!("../../../docs/semantics.md");
    let opening = text.split("\n## ").nth(1).unwrap();
    assert!(
        opening.starts_with("Tenets\n"),
        "the page opens with its tenets"
    );
    assert!(opening.contains("1. **No silent wrong data.**"));
    // Line breaks do not matter.
    let page = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(page.contains("its number in FUSE is 1") && NodeId::ROOT == NodeId(1));
    let counted = bcow_fuse::fs::COUNTED_EXTENTS;
    assert_eq!(counted, 65_536);
    assert!(page.contains("more than 65,536 pieces"));
    for option in ["default_permissions", "allow_other"] {
        let mut options = bcow_fuse::MountOptions::default();
        options.apply(option.as_ref()).unwrap();
        assert!(page.contains(&format!("| `{option}` |")));
    }
}
