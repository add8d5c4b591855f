//! What the reader finds, in whole and in damaged file systems.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, LazyLock};

use bcow_ext4::{FileKind, FilesystemBytes, InodeNumber, ReadError, Reader};
use bcow_testkit::{has_program, lacks};
use proptest::prelude::*;

use super::programs::random_tree;
use super::tree::{BLOCK, Kind, Tree, block_content, check, image, of_all_kinds};

const NAMES: usize = 1 << 20;

/// A file system, with some bytes changed. Counts the bytes that are read.
#[derive(Clone)]
struct Damaged {
    file: Arc<fs::File>,
    changed: Arc<BTreeMap<u64, u8>>,
}

impl FilesystemBytes for Damaged {
    fn bytes(&self) -> u64 {
        self.file.metadata().expect("metadata").len()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buf, offset)?;
        for (at, bits) in self.changed.range(offset..offset + buf.len() as u64) {
            buf[(at - offset) as usize] ^= bits;
        }
        Ok(())
    }
}

fn source(image: &super::tree::Image, changed: BTreeMap<u64, u8>) -> Damaged {
    Damaged {
        file: Arc::new(image.file.reopen().expect("the file")),
        changed: Arc::new(changed),
    }
}

/// Compares what the reader finds with a tree.
fn compare(tree: &Tree, reader: &Reader) {
    let mut pending = vec![(0, InodeNumber::ROOT)];
    while let Some((index, number)) = pending.pop() {
        let expected = &tree.0[index];
        let found = reader.inode(number).expect("an inode");
        assert_eq!(found.permissions, expected.permissions);
        assert_eq!((found.uid, found.gid), (expected.uid, expected.gid));
        let modified = (found.modified.seconds, found.modified.nanoseconds);
        assert_eq!(modified, expected.modified);
        let xattrs: BTreeMap<_, _> = expected.xattrs.iter().cloned().collect();
        assert_eq!(reader.xattrs(&found).expect("attributes"), xattrs);
        let device = found.device.map(|device| (device.major, device.minor));
        match &expected.kind {
            Kind::File(bytes, runs) => {
                assert_eq!((found.kind, found.size), (FileKind::Regular, *bytes));
                let extents = reader.extents(&found).expect("extents");
                for (logical, block) in runs
                    .iter()
                    .flat_map(|(first, count)| (*first..first + count).map(|n| (n, n)))
                {
                    let mut content = [0; BLOCK as usize];
                    let at = u64::from(logical) * BLOCK;
                    reader.read(&extents, at, &mut content).expect("content");
                    // In the last block, the length ends the content.
                    let length = (*bytes - at).min(BLOCK) as usize;
                    assert!(content[..length] == block_content(index, block)[..length]);
                }
                let blocks: u64 = extents
                    .content
                    .iter()
                    .map(|run| u64::from(run.blocks))
                    .sum();
                let expected: u64 = runs.iter().map(|(_, count)| u64::from(*count)).sum();
                assert_eq!(blocks, expected);
            }
            Kind::Directory(entries) => {
                assert_eq!(found.kind, FileKind::Directory);
                let names = reader.names(&found, NAMES).expect("names");
                let names: BTreeMap<_, _> = names
                    .into_iter()
                    .filter(|name| !(index == 0 && name.name == b"lost+found"))
                    .map(|name| (name.name, name.inode))
                    .collect();
                assert!(names.keys().eq(entries.keys()));
                let pairs = entries.values().zip(names.values());
                pending.extend(pairs.map(|(&index, &number)| (index, number)));
            }
            Kind::Symlink(target) => {
                assert_eq!(&reader.read_link(&found).expect("a target"), target);
            }
            &Kind::CharDevice(major, minor) => {
                assert_eq!(
                    (found.kind, device),
                    (FileKind::CharDevice, Some((major, minor)))
                );
            }
            &Kind::BlockDevice(major, minor) => {
                assert_eq!(
                    (found.kind, device),
                    (FileKind::BlockDevice, Some((major, minor)))
                );
            }
            Kind::Fifo => assert_eq!(found.kind, FileKind::Fifo),
            Kind::Socket => assert_eq!(found.kind, FileKind::Socket),
        }
    }
}

/// Reads all that a file system has, except content.
fn read_all(source: Damaged) -> Result<(), ReadError> {
    let reader = Reader::open(Box::new(source))?;
    let mut seen = std::collections::BTreeSet::new();
    let mut pending = vec![InodeNumber::ROOT];
    while let Some(number) = pending.pop() {
        if !seen.insert(number) {
            continue;
        }
        let inode = reader.inode(number)?;
        reader.xattrs(&inode)?;
        reader.extents(&inode)?;
        match inode.kind {
            FileKind::Directory => {
                let names = reader.names(&inode, NAMES)?;
                pending.extend(names.into_iter().map(|name| name.inode));
            }
            FileKind::Symlink => drop(reader.read_link(&inode)?),
            _ => {}
        }
    }
    reader.metadata_blocks()?;
    Ok(())
}

#[test]
fn the_reader_shows_the_tree() {
    let tree = of_all_kinds();
    for bytes in [64 << 20, 20 << 30] {
        let image = image(&tree, bytes);
        let reader = Reader::open(Box::new(source(&image, BTreeMap::new())));
        compare(&tree, &reader.expect("a file system"));
    }
}

/// Every structure has a checksum: a changed byte of one is found where it is read.
#[test]
fn a_changed_byte_of_metadata_is_an_error_or_is_not_read() {
    let tree = of_all_kinds();
    let image = image(&tree, 64 << 20);
    read_all(source(&image, BTreeMap::new())).expect("a whole file system");
    // The superblock, the first descriptor, the first inodes.
    let reader = Reader::open(Box::new(source(&image, BTreeMap::new()))).expect("a file system");
    let table = reader.inode_table(0).expect("a table").blocks.start * BLOCK;
    let root = table + 256;
    for at in [
        1024 + 4,
        1024 + 104,
        4096 + 8,
        root + 4,
        root + 40,
        root + 128,
    ] {
        let damaged = read_all(source(&image, BTreeMap::from([(at, 0x10)])));
        assert!(damaged.is_err(), "byte {at}");
    }
}

/// The changes that put `bytes` at byte `at` of a file system.
fn put(image: &super::tree::Image, at: u64, bytes: &[u8]) -> BTreeMap<u64, u8> {
    let mut old = vec![0; bytes.len()];
    let file = image.file.as_file();
    file.read_exact_at(&mut old, at).expect("bytes");
    let bits = old.iter().zip(bytes).map(|(old, new)| old ^ new);
    (at..).zip(bits).collect()
}

type Change = fn(&super::tree::Image, u64, u64) -> BTreeMap<u64, u8>;

/// The names of the root directory of an image with one file, after `change` of the places of its
/// inode and of its only block. No checksums are compared.
fn names_after(change: Change) -> Result<Vec<bcow_ext4::Name>, ReadError> {
    let mut tree = Tree::new();
    tree.add(0, "file", super::tree::file(1));
    let image = image(&tree, 64 << 20);
    // Without METADATA_CHECKSUM, 0x400, of the features that allow reading only.
    let plain = BTreeMap::from([(1024 + 101, 4)]);
    let reader = Reader::open(Box::new(source(&image, plain.clone()))).expect("a file system");
    let inode = reader.inode_table(0).expect("a table").blocks.start * BLOCK + 256;
    let root = reader.inode(InodeNumber::ROOT).expect("the root");
    let block = reader.extents(&root).expect("extents").content[0].physical;
    assert_eq!(reader.names(&root, NAMES).expect("names").len(), 2);
    let mut changed = change(&image, inode, block);
    changed.extend(plain);
    let reader = Reader::open(Box::new(source(&image, changed))).expect("a file system");
    reader.names(&reader.inode(InodeNumber::ROOT)?, NAMES)
}

#[test]
fn directories_that_cannot_be_are_refused() {
    let repeated: Change = |image, inode, block| {
        // Four extents of one block each, in the inode.
        let mut tree = [0xf30a_u16, 4, 4, 0, 0, 0].map(u16::to_le_bytes).concat();
        for logical in 0..4u32 {
            tree.extend(logical.to_le_bytes());
            tree.extend([1, 0, 0, 0]);
            tree.extend((block as u32).to_le_bytes());
        }
        let mut changed = put(image, inode + 40, &tree);
        changed.extend(put(image, inode + 4, &(4 * BLOCK as u32).to_le_bytes()));
        changed
    };
    let too_long: Change = |image, inode, _| put(image, inode + 108, &1u32.to_le_bytes());
    // The last record of the block has 12 bytes.
    let behind_its_block: Change =
        |image, _, block| put(image, block * BLOCK + BLOCK - 12 + 4, &16u16.to_le_bytes());
    for (change, expected) in [
        (repeated, "inode 2: two blocks of the directory"),
        (too_long, "inode 2: the directory is longer"),
        (behind_its_block, "damaged: inode 2"),
    ] {
        let error = names_after(change).expect_err("a refusal").to_string();
        assert!(error.contains(expected), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 8,
        max_shrink_iters: 100,
        ..ProptestConfig::default()
    })]
    #[test]
    fn the_reader_shows_random_trees(tree in random_tree()) {
        let image = image(&tree, 64 << 20);
        let reader = Reader::open(Box::new(source(&image, BTreeMap::new())));
        compare(&tree, &reader.expect("a file system"));
    }

    /// Changed bytes cause neither a panic nor an endless loop.
    #[test]
    fn damage_is_an_error_at_most(
        places in prop::collection::btree_map(0u64..6 << 20, 1u8.., 1..200)
    ) {
        static IMAGE: LazyLock<super::tree::Image> =
            LazyLock::new(|| image(&of_all_kinds(), 64 << 20));
        let _ = read_all(source(&IMAGE, places));
    }
}

/// The rest of its metadata is that of the original.
#[test]
fn a_copy_with_another_uuid_is_sound() {
    if lacks("e2fsck", has_program("e2fsck")) {
        return;
    }
    let tree = of_all_kinds();
    let image = image(&tree, 2 << 30);
    let open = || Reader::open(Box::new(source(&image, BTreeMap::new()))).expect("a file system");
    let uuid = *b"\x01\x02\x03\x04\x05\x06\x47\x08\x89\x0a\x0b\x0c\x0d\x0e\x0f\x10";
    let block = open().first_block_with_uuid(uuid).expect("a block");
    let before = fs::read(image.file.path()).expect("the image");
    let file = image.file.as_file();
    file.write_all_at(&block[..], 0).expect("a write");
    check(&image);
    compare(&tree, &open());
    // A copy of the copy has the same seed.
    let mut old = [0; 16];
    old.copy_from_slice(&before[1024 + 0x68..][..16]);
    let again = open().first_block_with_uuid(old).expect("a block");
    file.write_all_at(&again[..], 0).expect("a write");
    check(&image);
    compare(&tree, &open());
}
