//! Layers in overlayfs form: written, read back, and merged behind windows.

use crate::support::*;
use bcow_erofs::merge::merge;
use bcow_erofs::overlay::{IMPLICIT, LayerError, OPAQUE, ReadOptions, TreeForm, read_layer};
use bcow_erofs::reader::FileType;
use bcow_erofs::tree::*;
use bcow_erofs::writer::{ContentWindow, Plan, WriteOptions};

/// Reads a layer back; its content keeps its addresses.
fn read_back(image: &[u8]) -> Result<LayerTree, LayerError> {
    let options = ReadOptions {
        form: TreeForm::Layer,
        place: &|offset, _| u32::try_from(offset / 4096).ok(),
        tails: 0,
        max_inodes: 1000,
    };
    read_layer(&open(image), &options)
}

#[test]
fn a_layer_in_overlayfs_form_reads_back_unchanged() {
    let (tree, space) = everything();
    let image = space.image(&tree);
    let again = read_back(&image).unwrap().into_tree().unwrap();
    // The tails lie in the first image now.
    let mut second = Space::new(2000);
    second.bytes = space.bytes.clone();
    second.tails = image.clone();
    assert_eq!(dump(&second.image(&again)), dump(&image));
}

fn marked_layer() -> LayerTree {
    let mut layer = LayerTree::new();
    put(&mut layer, "gone", node(NodeKind::Whiteout));
    let mut opaque = directory();
    if let NodeKind::Directory(directory) = &mut opaque.kind {
        directory.opaque = true;
    }
    put(&mut layer, "opaque", opaque);
    put(&mut layer, "opaque/new", symlink(b"x"));
    let mut implicit = directory();
    implicit.attributes = Attributes::default();
    if let NodeKind::Directory(directory) = &mut implicit.kind {
        directory.implicit = true;
    }
    put(&mut layer, "implicit", implicit);
    put(&mut layer, "implicit/new", symlink(b"x"));
    let number = DeviceNumber { major: 0, minor: 0 };
    put(&mut layer, "device", node(NodeKind::CharDevice(number)));
    let target = b"dir/lower".as_slice();
    put(&mut layer, "link", node(NodeKind::LowerLink(target.into())));
    layer
}

fn lower_layer() -> LayerTree {
    let mut layer = LayerTree::new();
    layer.node_mut(LayerTree::ROOT).attributes = attributes(0o700, 5, 6, 7);
    put(&mut layer, "dir", directory());
    put(&mut layer, "dir/lower", symlink(b"lower"));
    put(&mut layer, "gone", symlink(b"x"));
    put(&mut layer, "opaque", directory());
    put(&mut layer, "opaque/old", symlink(b"x"));
    let attributes = attributes(0o711, 8, 9, 10);
    let kind = NodeKind::Directory(Directory::default());
    put(&mut layer, "implicit", Node { attributes, kind });
    put(&mut layer, "implicit/old", symlink(b"x"));
    layer
}

#[test]
fn marks_say_what_a_layer_says() {
    let space = Space::new(0);
    let image = space.image(&marked_layer().into_overlay().unwrap());
    check(&image);
    fsck(&image);
    let fs = open(&image);
    let get = |path: &str| {
        let nid = fs.resolve(path.as_bytes()).unwrap().unwrap();
        fs.inode(nid).unwrap()
    };
    // As in overlayfs.
    let gone = get("gone");
    assert_eq!(gone.kind, FileType::CharDevice);
    assert_eq!(gone.rdev, Some(DeviceNumber { major: 0, minor: 0 }));
    assert!(!gone.has_xattrs());
    let xattr = |path, name| fs.xattr(&get(path), name).unwrap();
    assert_eq!(xattr("opaque", OPAQUE).as_deref(), Some(&b"y"[..]));
    assert_eq!(xattr("", IMPLICIT).as_deref(), Some(&b"y"[..]));

    let again = read_back(&image).unwrap();
    let of_tree =
        |upper: LayerTree| dump(&space.image(&merge(vec![lower_layer(), upper]).unwrap()));
    let text = of_tree(again);
    assert_eq!(text, of_tree(marked_layer()));
    assert!(text.contains("/link l0777 2 "), "{text}");
    assert!(!text.contains("trusted."), "{text}");
}

#[test]
fn a_directory_in_itself_is_refused() {
    let mut layer = LayerTree::new();
    put(&mut layer, "a", directory());
    put(&mut layer, "a/bbbb", directory());
    let mut image = Space::new(0).image(&layer.into_tree().unwrap());
    let fs = open(&image);
    let nid = |path: &str| fs.resolve(path.as_bytes()).unwrap().unwrap();
    let (a, b) = (nid("a").0.to_le_bytes(), nid("a/bbbb").0.to_le_bytes());
    let at: Vec<_> = (0..image.len() - 8)
        .filter(|&i| image[i..i + 8] == b)
        .collect();
    for at in at {
        image[at..at + 8].copy_from_slice(&a);
    }
    assert!(matches!(
        read_back(&image),
        Err(LayerError::DirectoryLinkedTwice { .. })
    ));
}

#[test]
fn more_inodes_than_allowed_are_refused() {
    let mut layer = LayerTree::new();
    for i in 0..1000 {
        put(&mut layer, &i.to_string(), node(NodeKind::Fifo));
    }
    let image = Space::new(0).image(&layer.into_tree().unwrap());
    assert!(matches!(
        read_back(&image),
        Err(LayerError::TooMany { allowed: 1000 })
    ));
}

#[test]
fn merged_layers_are_read_through_their_windows() {
    let stack = stack();
    let flat = stack.flat();
    check(&flat);
    let text = dump(&flat);
    for seed in [1, 2] {
        let layer = dump(&stack.layers[seed - 1]);
        let own: Vec<_> = layer
            .lines()
            .filter(|line| line.contains(&format!("{seed} -")))
            .collect();
        assert!(own.len() >= 4, "{layer}");
        for line in own {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }
}

#[test]
fn windows_beyond_the_addresses_are_refused() {
    let tree = LayerTree::new().into_tree().unwrap();
    let options = WriteOptions {
        metadata_start: 4096,
        inline_max: 0,
    };
    let plan = || Plan::new(&tree, &options).unwrap();
    let window = |blocks| {
        vec![ContentWindow {
            from: 0,
            to: 5,
            blocks,
        }]
    };
    assert!(plan().with_windows(window(u32::MAX - 6)).is_ok());
    assert!(plan().with_windows(window(u32::MAX - 5)).is_err());
}
