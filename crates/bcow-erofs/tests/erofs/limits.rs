//! Values up to the limits of the format work; larger ones are a precise error.

use crate::support::*;
use bcow_erofs::reader::FileType;
use bcow_erofs::tree::*;
use bcow_erofs::writer::{Plan, WriteError, WriteOptions};

#[test]
fn a_directory_of_100_000_names_of_any_bytes_is_sorted_and_searched() {
    let mut layer = LayerTree::new();
    let dir = put(&mut layer, "d", directory());
    let mut names = Vec::new();
    for i in 0..100_000u32 {
        let mut name = i.wrapping_mul(0x9e37_79b1).to_be_bytes().to_vec();
        name.iter_mut()
            .filter(|b| **b == 0 || **b == b'/')
            .for_each(|b| *b = b'\xff');
        name.extend_from_slice(i.to_string().as_bytes());
        // Some of the longest.
        if i % 1000 == 0 {
            name.resize(255, b'x');
        }
        let id = layer.add(node(NodeKind::Fifo));
        layer.insert(dir, &name, id);
        names.push(name);
    }
    let tree = layer.into_tree().unwrap();
    let image = Space::new(0).image(&tree);
    check(&image);
    fsck(&image);
    let fs = open(&image);
    let dir = fs.inode(fs.resolve(b"d").unwrap().unwrap()).unwrap();
    for name in &names {
        let entry = fs.lookup(&dir, name).unwrap().unwrap();
        assert_eq!(entry.kind, FileType::Fifo);
    }
    assert!(fs.lookup(&dir, b"absent").unwrap().is_none());
    assert!(fs.lookup(&dir, b"").unwrap().is_none());
    assert!(fs.lookup(&dir, &[b'x'; 256]).unwrap().is_none());
    assert!(fs.lookup(&dir, b"a/b").unwrap().is_none());
}

#[test]
fn more_names_or_subdirectories_than_16_bits_are_counted() {
    let mut layer = LayerTree::new();
    put(&mut layer, "d", directory());
    put(&mut layer, "links", directory());
    let file = put(&mut layer, "links/file", node(NodeKind::Fifo));
    let d = layer.child(LayerTree::ROOT, b"d").unwrap();
    let links = layer.child(LayerTree::ROOT, b"links").unwrap();
    for i in 0..70_000 {
        let id = layer.add(directory());
        layer.insert(d, i.to_string().as_bytes(), id);
        layer.insert(links, i.to_string().as_bytes(), file);
    }
    let image = Space::new(0).image(&layer.into_tree().unwrap());
    check(&image);
    let fs = open(&image);
    let inode = |path: &str| {
        fs.inode(fs.resolve(path.as_bytes()).unwrap().unwrap())
            .unwrap()
    };
    assert_eq!(inode("d").nlink, 70_002);
    assert_eq!(inode("links/file").nlink, 70_001);
}

fn plan_with_xattr(name: &[u8], value: &[u8]) -> Result<u64, WriteError> {
    let mut layer = LayerTree::new();
    put(&mut layer, "d", directory());
    let mut fifo = node(NodeKind::Fifo);
    fifo.attributes.xattrs = xattrs(&[(b"user.a", b"1"), (name, value)]);
    put(&mut layer, "d/f", fifo);
    let tree = layer.into_tree().unwrap();
    let options = WriteOptions {
        metadata_start: 4096,
        inline_max: 0,
    };
    Plan::new(&tree, &options).map(|plan| plan.metadata_bytes())
}

#[test]
fn xattrs_that_erofs_cannot_store_are_refused_by_name() {
    let message = |name: &[u8], value: &[u8]| plan_with_xattr(name, value).unwrap_err().to_string();
    assert_eq!(
        message(b"user.big", &[0; 65_536]),
        "/d/f: cannot store the extended attribute user.big: \
         the value has 65536 bytes, more than 65535"
    );
    assert!(message(b"system.nfs4_acl", b"").contains("EROFS has no such name prefix"));
    assert!(message(b"user.", b"").contains("EROFS has no such name prefix"));
    assert!(message(b"system.posix_acl_access2", b"").contains("EROFS has no such name prefix"));
    assert!(message(b"user.a\0b", b"").contains("NUL"));
    assert!(message(&[b"user.", &[b'n'; 251][..]].concat(), b"").contains("256 bytes"));
    assert!(plan_with_xattr(&[b"user.", &[b'n'; 250][..]].concat(), b"").is_ok());
    assert!(plan_with_xattr(b"user.big", &[0; 65_535]).is_ok());
}

#[test]
fn xattrs_beyond_what_an_inode_counts_name_the_last_one() {
    let big = vec![1; 65_535];
    let mut layer = LayerTree::new();
    let mut fifo = node(NodeKind::Fifo);
    let names: Vec<String> = (0..5).map(|i| format!("user.{i}")).collect();
    let pairs: Vec<(&[u8], &[u8])> = names.iter().map(|n| (n.as_bytes(), &big[..])).collect();
    fifo.attributes.xattrs = xattrs(&pairs);
    put(&mut layer, "f", fifo);
    let tree = layer.into_tree().unwrap();
    let options = WriteOptions {
        metadata_start: 4096,
        inline_max: 0,
    };
    let e = Plan::new(&tree, &options).err().unwrap().to_string();
    assert!(
        e.starts_with("/f: cannot store the extended attribute user.3"),
        "{e}"
    );
}

#[test]
fn shared_xattrs_beyond_the_count_of_an_inode_are_stored() {
    let names: Vec<String> = (0..300).map(|i| format!("user.{i:03}")).collect();
    let pairs: Vec<(&[u8], &[u8])> = names
        .iter()
        .map(|n| (n.as_bytes(), &b"a value worth sharing"[..]))
        .collect();
    let mut layer = LayerTree::new();
    for i in 0..4 {
        let mut fifo = node(NodeKind::Fifo);
        fifo.attributes.xattrs = xattrs(&pairs);
        put(&mut layer, &format!("f{i}"), fifo);
    }
    let tree = layer.into_tree().unwrap();
    let space = Space::new(0);
    let image = space.image(&tree);
    check(&image);
    fsck(&image);
    assert_eq!(dump(&image), expected_dump(&tree, &space));
}

#[test]
fn an_address_space_beyond_16_tib_is_refused() {
    let tree = LayerTree::new().into_tree().unwrap();
    let plan = |metadata_start| {
        let options = WriteOptions {
            metadata_start,
            inline_max: 0,
        };
        Plan::new(&tree, &options).map(|_| ())
    };
    assert_eq!(plan((1 << 44) - 12288), Ok(()));
    assert!(matches!(
        plan((1 << 44) - 4096),
        Err(WriteError::TooLarge { .. })
    ));
    assert!(matches!(plan(1 << 60), Err(WriteError::TooLarge { .. })));
    assert!(matches!(plan(!4095), Err(WriteError::TooLarge { .. })));
    assert!(matches!(plan(0), Err(WriteError::Option { .. })));
    assert!(matches!(plan(5000), Err(WriteError::Option { .. })));
}

/// A tree with one file, `f`, whose tail has 1500 bytes.
fn with_tail(space: &mut Space) -> Tree {
    let mut layer = LayerTree::new();
    put(&mut layer, "f", regular(space.file(&[1; 1500])));
    layer.into_tree().unwrap()
}

#[test]
fn tails_over_the_limit_are_refused_with_their_path() {
    let mut space = Space::new(2000);
    let tree = with_tail(&mut space);
    let options = |inline_max| WriteOptions {
        metadata_start: 4096,
        inline_max,
    };
    let e = Plan::new(&tree, &options(1000)).err().unwrap();
    assert_eq!(
        e.to_string(),
        "/f: the length in bytes of its tail is 1500, the limit is 1000"
    );
    assert!(matches!(
        Plan::new(&tree, &options(4033)).err(),
        Some(WriteError::Option { .. })
    ));
}

#[test]
fn a_failing_output_and_a_failing_tail_store_stop_the_writing() {
    let mut space = Space::new(2000);
    let tree = with_tail(&mut space);
    let plan = space.plan(&tree);
    let full = plan.write(&space.tails, &mut |_| Err("full"));
    assert_eq!(full.unwrap_err().to_string(), "full");
    let lost = plan.write::<&str>(&Vec::new(), &mut |_| Ok(()));
    assert!(
        lost.unwrap_err()
            .to_string()
            .contains("cannot read a file tail back")
    );
}
