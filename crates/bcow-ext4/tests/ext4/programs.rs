//! What e2fsprogs say.

use std::process::Command;

use bcow_testkit::{has_program, lacks};
use proptest::prelude::*;

use super::tree::{
    BLOCK, Inode, Kind, Tree, check, directory, file, image, inode, large_directory, of_all_kinds,
};

fn without_e2fsprogs() -> bool {
    lacks("e2fsck", has_program("e2fsck")) || lacks("debugfs", has_program("debugfs"))
}

fn debugfs(path: &std::path::Path, request: &str) -> String {
    let output = Command::new("debugfs")
        .args(["-R", request])
        .arg(path)
        .output()
        .expect("debugfs runs");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn e2fsck_accepts_every_kind_of_inode() {
    if without_e2fsprogs() {
        return;
    }
    let tree = of_all_kinds();
    for bytes in [64 << 20, 700 << 20, 20 << 30] {
        let image = image(&tree, bytes);
        check(&image);
        assert_eq!(image.summary.inodes, 11 + tree.0.len() as u32 - 1);
    }
}

#[test]
fn e2fsck_accepts_sizes_at_the_borders_of_groups() {
    if without_e2fsprogs() {
        return;
    }
    let group = 128 << 20;
    let mut tree = Tree::new();
    tree.add(0, "file", file(9000));
    for bytes in [
        8 << 20,
        (8 << 20) + 4095,
        group - 4096,
        group,
        group + 4096,
        group + 60 * 4096,
        3 * group + 8192,
        4 * group + 4096,
        64 * group,
        65 * group + 4096,
        200 << 30,
        4 << 40,
    ] {
        check(&image(&tree, bytes));
    }
}

#[test]
fn debugfs_reads_what_was_described() {
    if without_e2fsprogs() {
        return;
    }
    let image = image(&of_all_kinds(), 64 << 20);
    let path = image.file.path();
    let far = debugfs(path, "stat /all/far");
    assert!(far.contains("Size: 17592186036224"), "{far}");
    assert!(far.contains("(4294967292):"), "{far}");
    let owned = debugfs(path, "stat /all/owned");
    assert!(
        owned.contains("User: 305419896   Group: -2023406815"),
        "{owned}"
    );
    assert!(owned.contains("mtime: 0x6553f100:1d6f3454"), "{owned}");
    let comb = debugfs(path, "dump_extents \"/all/large comb\"");
    assert!(comb.contains(" 2/ 2   1/340"), "{}", &comb[..500]);
    let journal = debugfs(path, "logdump -S");
    assert!(journal.contains("Journal starts at block 0"), "{journal}");
}

/// More leaves than the root of a hash tree indexes, so there is a second level.
#[test]
fn a_directory_of_120_000_entries_has_a_hash_tree() {
    if without_e2fsprogs() {
        return;
    }
    let image = image(&large_directory(), 256 << 20);
    check(&image);
    let dump = debugfs(image.file.path(), "htree_dump /large");
    assert!(dump.contains("Indirect levels: 1"), "{}", &dump[..500]);
}

#[test]
fn a_directory_of_more_than_65_000_subdirectories_has_one_link() {
    if without_e2fsprogs() {
        return;
    }
    let mut tree = Tree::new();
    let large = tree.add(0, "large", directory());
    for n in 0..65_001 {
        tree.add(large, format!("{n}"), directory());
    }
    let image = image(&tree, 1 << 30);
    check(&image);
    let stat = debugfs(image.file.path(), "stat /large");
    assert!(stat.contains("Links: 1 "), "{stat}");
}

#[test]
fn the_same_tree_gives_the_same_bytes() {
    let tree = of_all_kinds();
    let [a, b] = [image(&tree, 64 << 20), image(&tree, 64 << 20)];
    let read = |image: &super::tree::Image| std::fs::read(image.file.path()).expect("read");
    assert!(read(&a) == read(&b));
}

/// A change to a tree, with a number that chooses where.
#[derive(Debug, Clone)]
enum Step {
    Add(usize, Vec<u8>, Inode),
    Link(usize, Vec<u8>, usize),
}

fn name() -> impl Strategy<Value = Vec<u8>> {
    let byte = any::<u8>().prop_map(
        |byte| {
            if matches!(byte, 0 | b'/' | b'.') { b'x' } else { byte }
        },
    );
    prop_oneof![
        4 => proptest::collection::vec(byte.clone(), 1..20),
        1 => proptest::collection::vec(byte, 200..256),
    ]
}

fn kind() -> impl Strategy<Value = Kind> {
    let blocks = proptest::collection::btree_set(0u32..300, 0..40);
    prop_oneof![
        3 => Just(Kind::Directory(Default::default())),
        3 => (blocks, 0u64..BLOCK).prop_map(|(blocks, cut)| {
            let bytes = blocks.last().map_or(cut, |&last| (u64::from(last) + 1) * BLOCK - cut);
            Kind::File(bytes, blocks.into_iter().map(|block| (block, 1)).collect())
        }),
        1 => proptest::collection::vec(1u8.., 1..200).prop_map(Kind::Symlink),
        1 => (0u32..4096, 0u32..1 << 20).prop_map(|(major, minor)| Kind::CharDevice(major, minor)),
    ]
}

fn xattr() -> impl Strategy<Value = (Vec<u8>, Vec<u8>)> {
    let prefix = prop_oneof![Just("user."), Just("trusted."), Just("security.")];
    let value = proptest::collection::vec(any::<u8>(), 0..200);
    (prefix, "[a-z]{1,30}", value)
        .prop_map(|(prefix, name, value)| ([prefix.as_bytes(), name.as_bytes()].concat(), value))
}

fn step() -> impl Strategy<Value = Step> {
    let owner = (any::<u32>(), any::<u32>(), 0u16..0o10000);
    // `e2fsck` takes later times for errors of old kernels.
    let time = (-(1i64 << 31)..10_737_418_240, 0u32..1_000_000_000);
    let xattrs = proptest::collection::btree_map("[a-z]{3}", xattr(), 0..5);
    prop_oneof![
        5 => (any::<usize>(), name(), kind(), owner, time, xattrs).prop_map(
            |(at, name, kind, (uid, gid, permissions), modified, xattrs)| {
                let mut seen = std::collections::BTreeSet::new();
                let mut xattrs: Vec<_> = xattrs.into_values().collect();
                // The kernel shows `user.` on files and directories only.
                let has_user = matches!(kind, Kind::File(..) | Kind::Directory(_));
                xattrs.retain(|(name, _): &(Vec<u8>, _)| {
                    (has_user || !name.starts_with(b"user.")) && seen.insert(name.clone())
                });
                let kind_of = Inode { permissions, uid, gid, modified, xattrs, ..inode(kind) };
                Step::Add(at, name, kind_of)
            }
        ),
        1 => (any::<usize>(), name(), any::<usize>())
            .prop_map(|(at, name, of)| Step::Link(at, name, of)),
    ]
}

pub fn random_tree() -> impl Strategy<Value = Tree> {
    proptest::collection::vec(step(), 0..80).prop_map(|steps| {
        let mut tree = Tree::new();
        for step in steps {
            let (Step::Add(at, name, _) | Step::Link(at, name, _)) = &step;
            let directories: Vec<usize> = (0..tree.0.len())
                .filter(|&n| matches!(tree.0[n].kind, Kind::Directory(_)))
                .collect();
            let at = directories[at % directories.len()];
            let Kind::Directory(entries) = &tree.0[at].kind else {
                unreachable!()
            };
            let of = match &step {
                Step::Link(_, _, of) => Some(of % tree.0.len()),
                Step::Add(..) => None,
            };
            let is_directory = of.is_some_and(|of| matches!(tree.0[of].kind, Kind::Directory(_)));
            if entries.contains_key(name) || is_directory {
                continue;
            }
            match step {
                Step::Add(_, name, inode) => {
                    tree.add(at, name, inode);
                }
                Step::Link(_, name, _) => tree.link(at, name, of.expect("a link")),
            }
        }
        tree
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 12,
        max_shrink_iters: 100,
        ..ProptestConfig::default()
    })]
    #[test]
    fn e2fsck_accepts_random_trees(tree in random_tree()) {
        if !without_e2fsprogs() {
            check(&image(&tree, 64 << 20));
        }
    }
}
