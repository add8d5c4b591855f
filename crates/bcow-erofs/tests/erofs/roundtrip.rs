//! The reader reads what the writer writes, and fsck.erofs accepts it.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::support::*;
use bcow_erofs::reader::{ExtentSource, FileType};
use bcow_erofs::tree::*;
use proptest::prelude::*;
use proptest::sample::Index;

#[test]
fn everything_is_read_back_as_it_was_written() {
    let (tree, space) = everything();
    let image = space.image(&tree);
    assert_eq!(dump(&image), expected_dump(&tree, &space));
    check(&image);
    fsck(&image);
}

#[test]
fn a_file_of_a_tebibyte_that_is_one_hole_is_small() {
    let mut space = Space::new(0);
    let mut layer = LayerTree::new();
    let content = space.chunked(1 << 40, 20, &BTreeMap::new());
    put(&mut layer, "hole", regular(content));
    let tree = layer.into_tree().unwrap();
    let image = space.image(&tree);
    assert!(image.len() < 16384);
    let fs = open(&image);
    let hole = fs.inode(fs.resolve(b"hole").unwrap().unwrap()).unwrap();
    assert_eq!(hole.size, 1 << 40);
    let extents: Vec<_> = fs.extents(&hole, 4096).map(Result::unwrap).collect();
    assert_eq!(extents.len(), 1);
    assert_eq!(extents[0].length, (1 << 40) - 4096);
    assert_eq!(extents[0].source, ExtentSource::Hole);
    let mut buf = [1; 100];
    assert_eq!(fs.read(&hole, (1 << 40) - 10, &mut buf).unwrap(), 10);
    assert_eq!(buf[..10], [0; 10]);
    check(&image);
}

/// fsck.erofs reads beyond the end of an inode, so an image must not end with one.
#[test]
fn an_inode_may_fall_anywhere_in_the_last_block() {
    for count in 0..=130 {
        let mut layer = LayerTree::new();
        for i in 0..count {
            put(&mut layer, &format!("d{i:03}"), node(NodeKind::Fifo));
        }
        let image = Space::new(0).image(&layer.into_tree().unwrap());
        check(&image);
        fsck(&image);
    }
}

fn arbitrary_tree() -> impl Strategy<Value = (Tree, Space)> {
    let name = prop_oneof![
        proptest::collection::vec(any::<u8>(), 1..12),
        proptest::collection::vec(any::<u8>(), 200..=255),
        "[-!#.a-c]{1,3}".prop_map(String::into_bytes),
    ]
    .prop_map(|mut name: Vec<u8>| {
        name.iter_mut()
            .filter(|b| **b == 0 || **b == b'/')
            .for_each(|b| *b = b'_');
        name
    })
    .prop_filter("reserved", |name| name != b"." && name != b"..");
    let xattrs = proptest::option::of(proptest::collection::btree_map(
        prop_oneof![
            Just(b"security.capability".to_vec()),
            Just(b"system.posix_acl_access".to_vec()),
            "(user|trusted|security)[.][a-z]{1,20}".prop_map(String::into_bytes),
        ],
        prop_oneof![
            Just(b"shared value".to_vec()),
            proptest::collection::vec(any::<u8>(), 0..100),
            proptest::collection::vec(any::<u8>(), 3000..9000),
        ],
        1..4,
    ));
    let attributes = (0u16..0o10000, ids(), ids(), times(), xattrs).prop_map(
        |(permissions, uid, gid, mtime, xattrs)| Attributes {
            permissions,
            uid,
            gid,
            mtime,
            xattrs: xattrs.map(Arc::new),
        },
    );
    let kind = prop_oneof![
        3 => Just(Kind::Directory),
        4 => (0usize..20_000, any::<u8>()).prop_map(|(size, seed)| Kind::File(size, seed)),
        1 => (1u64..300_000, 0u8..4, proptest::collection::vec(any::<bool>(), 80))
            .prop_map(|(size, shift, holes)| Kind::Sparse(size, shift, holes)),
        2 => proptest::collection::vec(1u8..=255, 1..300).prop_map(Kind::Symlink),
        1 => proptest::collection::vec(1u8..=255, 3900..4096).prop_map(Kind::Symlink),
        1 => (0u32..4096, 0u32..1 << 20, any::<bool>()).prop_map(|(a, b, c)| Kind::Device(a, b, c)),
        1 => any::<bool>().prop_map(Kind::Special),
        2 => any::<Index>().prop_map(Kind::Hardlink),
    ];
    let entries = proptest::collection::vec((any::<Index>(), name, attributes, kind), 0..80);
    (entries, 0u16..=4032).prop_map(|(entries, inline_max)| grow(entries, inline_max))
}

#[derive(Debug, Clone)]
enum Kind {
    Directory,
    File(usize, u8),
    Sparse(u64, u8, Vec<bool>),
    Symlink(Vec<u8>),
    Device(u32, u32, bool),
    Special(bool),
    Hardlink(Index),
}

fn ids() -> impl Strategy<Value = u32> {
    prop_oneof![3 => Just(0), 1 => 0u32..70_000, 1 => any::<u32>()]
}

fn times() -> impl Strategy<Value = Timestamp> {
    prop_oneof![
        Just((1_700_000_000, 0)),
        (any::<i32>().prop_map(i64::from), 0u32..1_000_000_000),
        (any::<i64>(), 0u32..1_000_000_000),
    ]
    .prop_map(|(seconds, nanoseconds)| Timestamp {
        seconds,
        nanoseconds,
    })
}

fn grow(entries: Vec<(Index, Vec<u8>, Attributes, Kind)>, inline_max: u16) -> (Tree, Space) {
    let mut space = Space::new(inline_max);
    let mut layer = LayerTree::new();
    let mut directories = vec![LayerTree::ROOT];
    let mut files = Vec::new();
    for (parent, name, attributes, kind) in entries {
        let parent = directories[parent.index(directories.len())];
        if layer.child(parent, &name).is_some() {
            continue;
        }
        let kind = match kind {
            Kind::Hardlink(which) => {
                if !files.is_empty() {
                    layer.insert(parent, &name, files[which.index(files.len())]);
                }
                continue;
            }
            Kind::Directory => NodeKind::Directory(Directory::default()),
            Kind::File(size, seed) => {
                let content: Vec<u8> = (0..size).map(|i| (i as u8).wrapping_mul(seed)).collect();
                NodeKind::Regular(space.file(&content))
            }
            Kind::Sparse(size, shift, holes) => {
                let chunk = 4096u64 << shift;
                let chunks = (0..size.div_ceil(chunk))
                    .filter(|&i| !holes[i as usize % holes.len()])
                    .map(|i| (i, vec![i as u8 + 1; (size - i * chunk).min(chunk) as usize]))
                    .collect();
                NodeKind::Regular(space.chunked(size, shift, &chunks))
            }
            Kind::Symlink(target) => NodeKind::Symlink(target.into()),
            Kind::Device(major, minor, is_block) => {
                let number = DeviceNumber { major, minor };
                if is_block {
                    NodeKind::BlockDevice(number)
                } else {
                    NodeKind::CharDevice(number)
                }
            }
            Kind::Special(true) => NodeKind::Fifo,
            Kind::Special(false) => NodeKind::Socket,
        };
        let is_directory = matches!(kind, NodeKind::Directory(_));
        let id = layer.add(Node { attributes, kind });
        layer.insert(parent, &name, id);
        if is_directory { directories.push(id) } else { files.push(id) }
    }
    (layer.into_tree().unwrap(), space)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn any_tree_is_read_back_as_it_was_written((tree, space) in arbitrary_tree()) {
        let image = space.image(&tree);
        prop_assert_eq!(dump(&image), expected_dump(&tree, &space));
        check(&image);
        every_name_is_found(&image);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn any_tree_passes_fsck_erofs((tree, space) in arbitrary_tree()) {
        fsck(&space.image(&tree));
    }
}

fn every_name_is_found(image: &[u8]) {
    let fs = open(image);
    let mut pending = vec![fs.root()];
    while let Some(nid) = pending.pop() {
        let dir = fs.inode(nid).unwrap();
        let mut names = Vec::new();
        let mut cookies = vec![0];
        fs.read_dir(&dir, 0, &mut |entry| {
            names.push((entry.name.to_vec(), entry.nid, entry.kind));
            cookies.push(entry.next_cookie);
            std::ops::ControlFlow::Continue(())
        })
        .unwrap();
        for (position, (name, nid, kind)) in names.iter().enumerate() {
            let found = fs.lookup(&dir, name).unwrap().expect("listed, so there");
            assert_eq!((found.nid, found.kind), (*nid, *kind));
            assert_eq!(found.next_cookie, cookies[position + 1]);
            // Listing goes on where a cookie says.
            let mut next = None;
            fs.read_dir(&dir, cookies[position], &mut |entry| {
                next = Some(entry.name.to_vec());
                std::ops::ControlFlow::Break(())
            })
            .unwrap();
            assert_eq!(next.as_ref(), Some(name));
            let mut absent = name.clone();
            absent.push(b'\x01');
            if !names.iter().any(|(name, ..)| *name == absent) {
                assert_eq!(fs.lookup(&dir, &absent).unwrap(), None);
            }
            if *kind == FileType::Directory && !name.starts_with(b".") {
                pending.push(*nid);
            }
        }
    }
}

#[test]
fn reads_from_any_byte_to_any_byte_agree_with_the_content() {
    let (tree, space) = everything();
    let image = space.image(&tree);
    let fs = open(&image);
    for name in [
        "file4097",
        "file10000",
        "sparse",
        "tiny",
        "empty",
        "file8192",
    ] {
        let path = format!("dir/{name}");
        let id = tree.find(path.as_bytes()).unwrap();
        let NodeKind::Regular(content) = &tree.node(id).kind else {
            panic!()
        };
        let content = space.content(content);
        let inode = fs
            .inode(fs.resolve(path.as_bytes()).unwrap().unwrap())
            .unwrap();
        for start in [
            0,
            1,
            4095,
            4096,
            4097,
            8192,
            9999,
            20_000,
            409_600,
            u64::MAX,
        ] {
            for length in [0usize, 1, 4096, 5000, 100_000] {
                let from = (start as usize).min(content.len());
                let to = from.saturating_add(length).min(content.len());
                let mut buf = vec![0xee; length];
                let n = fs.read(&inode, start, &mut buf).unwrap();
                assert_eq!(&buf[..n], &content[from..to], "{name} {start}+{length}");
                let mut lent = Vec::new();
                fs.read_with(&inode, start, length as u64, &mut |b| {
                    lent.extend_from_slice(b)
                })
                .unwrap();
                assert_eq!(lent, &content[from..to]);
            }
        }
    }
}

#[test]
fn a_dump_reads_like_this() {
    let mut space = Space::new(100);
    let mut layer = LayerTree::new();
    put(&mut layer, "-d", directory());
    let mut file = regular(space.file(b"content"));
    file.attributes = attributes(0o4755, 1000, 70_000, -1);
    file.attributes.xattrs = xattrs(&[(b"user.b", b"\x00="), (b"user.a", b"")]);
    let id = put(&mut layer, "-d/a file", file);
    link(&mut layer, "-d/same", id);
    let number = DeviceNumber { major: 1, minor: 3 };
    put(&mut layer, "null", node(NodeKind::CharDevice(number)));
    put(&mut layer, "link", symlink(b"-d/a file"));
    let image = space.image(&layer.into_tree().unwrap());
    insta::assert_snapshot!(dump(&image), @r"
    / d0755 3 0:0 0.000000000
    /-d d0755 2 0:0 0.000000000
    /-d/a\x20file -4755 2 1000:70000 7 -1.000000000 crc64 96155d5f25504c61 @user.a= @user.b=\x00\x3d
    /-d/same -4755 2 1000:70000 7 -1.000000000 = /-d/a\x20file
    /link l0777 1 0:0 9 0.000000000 -> -d/a\x20file
    /null c0644 1 0:0 0 0.000000000 dev 1:3
    ");
}

#[test]
fn the_same_tree_gives_the_same_bytes() {
    let (tree, space) = everything();
    let again = everything();
    assert!(space.image(&tree) == again.1.image(&again.0));
}

#[test]
fn equal_xattr_values_are_stored_once() {
    let (tree, space) = everything();
    let image = space.image(&tree);
    let value: Vec<u8> = (0..=255).collect();
    let copies = image
        .windows(value.len())
        .filter(|window| *window == value)
        .count();
    assert_eq!(copies, 1);
}

#[test]
fn most_inodes_are_compact() {
    // 1000 files of one time, 10 of another: 32 bytes each, but 64 for the ten.
    let mut layer = LayerTree::new();
    for i in 0..1010 {
        let seconds = if i < 1000 { 1_600_000_000 } else { i };
        let node = Node {
            attributes: attributes(0o644, 0, 0, seconds),
            kind: NodeKind::Fifo,
        };
        put(&mut layer, &format!("f{i:04}"), node);
    }
    let tree = layer.into_tree().unwrap();
    let space = Space::new(0);
    let names = 1012 * 12 + 1010 * 5 + 3;
    let inodes = 1000 * 32 + 11 * 64;
    let plan = space.plan(&tree);
    assert!(plan.metadata_bytes() < (names + inodes) * 105 / 100 + 8192);
    assert_eq!(dump(&space.image(&tree)), expected_dump(&tree, &space));
}
