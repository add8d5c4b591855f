//! Damaged and hostile images give findings with their code and errors with their place, and never
//! cause a panic.

use std::sync::Arc;

use crate::support::*;
use bcow_erofs::check::{CheckOptions, Severity, check};
use bcow_erofs::debug::{fuzz_read, superblock_checksum};
use bcow_erofs::reader::{ErofsError, Filesystem};
use bcow_erofs::tree::*;
use proptest::prelude::*;

/// A small image: `d/a`, `d/b` (regular), `d/link`, `e/` with a hundred names, a file in chunks,
/// xattrs.
fn small() -> Vec<u8> {
    let mut space = Space::new(2000);
    let mut layer = LayerTree::new();
    put(&mut layer, "d", directory());
    put(&mut layer, "d/a", regular(space.file(&[b'a'; 5000])));
    put(&mut layer, "d/b", regular(space.file(b"bbb")));
    put(&mut layer, "d/link", symlink(b"a"));
    put(&mut layer, "e", directory());
    for i in 0..200 {
        let mut fifo = node(NodeKind::Fifo);
        fifo.attributes.xattrs = xattrs(&[(b"user.shared", b"a shared value"), (b"user.i", &[i])]);
        put(
            &mut layer,
            &format!("e/a longer name, for two blocks {i:03}"),
            fifo,
        );
    }
    let chunks = [(0, vec![1; 4096]), (2, vec![2; 4096]), (3, vec![3; 10])].into();
    put(
        &mut layer,
        "chunked",
        regular(space.chunked(12_298, 0, &chunks)),
    );
    let tree = layer.into_tree().unwrap();
    space.image(&tree)
}

/// The offset of an inode in the image.
fn inode_at(image: &[u8], path: &str) -> usize {
    let fs = open(image);
    let nid = fs.resolve(path.as_bytes()).unwrap().unwrap();
    (fs.superblock().metadata_offset + nid.0 * 32) as usize
}

/// The offset of the directory entry of a unique name.
fn name_at(image: &[u8], name: &[u8]) -> usize {
    image
        .windows(name.len())
        .position(|window| window == name)
        .unwrap()
}

fn put16(image: &mut [u8], at: usize, value: u16) {
    image[at..at + 2].copy_from_slice(&value.to_le_bytes());
}

fn put32(image: &mut [u8], at: usize, value: u32) {
    image[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

/// Sets the checksum of a changed superblock.
fn sign(image: &mut [u8]) {
    let sum = superblock_checksum(&image[1024..4096]);
    put32(image, 1028, sum);
}

/// The findings after a change of the image, which gets the offset of this inode.
fn damaged(path: &str, change: impl Fn(&mut [u8], usize)) -> Vec<(&'static str, String)> {
    let mut image = small();
    let at = inode_at(&image, path);
    change(&mut image, at);
    findings(&image)
}

/// Codes and places of all findings.
fn findings(image: &[u8]) -> Vec<(&'static str, String)> {
    let fs = Filesystem::open(Arc::new(image.to_vec())).unwrap();
    let findings = check(&fs, &CheckOptions { read_data: true });
    for finding in &findings {
        assert!(finding.code.starts_with("erofs-"), "{}", finding.code);
    }
    fuzz_read(image);
    findings
        .into_iter()
        .map(|finding| (finding.code, finding.place.to_string()))
        .collect()
}

fn found(code: &'static str, place: &str) -> Vec<(&'static str, String)> {
    vec![(code, place.to_owned())]
}

#[test]
fn a_sound_image_has_no_findings() {
    assert_eq!(findings(&small()), []);
}

#[test]
fn a_wrong_link_count_is_found() {
    let mut image = small();
    let at = inode_at(&image, "d/b");
    let nid = (at - open(&image).superblock().metadata_offset as usize) / 32;
    put16(&mut image, at + 6, 5);
    assert_eq!(
        findings(&image),
        found("erofs-nlink", &format!("inode {nid}"))
    );
}

#[test]
fn content_beyond_the_device_is_found() {
    // The inode is refused, so its name is not counted.
    assert_eq!(
        damaged("d/a", |image, at| put32(image, at + 16, 1_000_000)),
        found("erofs-extent-range", "/d/a")
    );
    assert_eq!(
        damaged("chunked", |image, at| put32(image, at + 36, 1_000_000)),
        found("erofs-extent-range", "/chunked")
    );
}

#[test]
fn damaged_inodes_are_found() {
    for (offset, value, message) in [
        (4u16, 0o10644u16 | 0o160_000, "no file type"),
        (0, 5 << 1, "data layout 5 does not exist"),
        (2, 0xffff, "lies beyond the end of the device"),
    ] {
        let mut image = small();
        let at = inode_at(&image, "d/b");
        put16(&mut image, at + usize::from(offset), value);
        assert_eq!(findings(&image), found("erofs-inode", "/d/b"));
        let fs = open(&image);
        let nid = fs.lookup(&fs.inode(fs.resolve(b"d").unwrap().unwrap()).unwrap(), b"b");
        let e = fs.inode(nid.unwrap().unwrap().nid).unwrap_err().to_string();
        assert!(e.contains(message), "{e}");
    }
    // A format bit of newer kernels.
    let found_in_b = damaged("d/b", |image, at| image[at] |= 0x10);
    assert_eq!(found_in_b, found("erofs-unsupported", "/d/b"));
    // An inline tail across the end of a block, and one over the next inode.
    let tail_at = |start| damaged("d/b", move |image, at| put32(image, at + 8, start));
    assert_eq!(tail_at(4095), found("erofs-inode", "/d/b"));
    assert_eq!(tail_at(500)[0].0, "erofs-overlap");
}

#[test]
fn names_out_of_order_are_found() {
    let mut image = small();
    let at = name_at(&image, b"a longer name, for two blocks 005");
    image[at + 30] = b'1';
    assert_eq!(
        findings(&image),
        found("erofs-dirent-order", "/e/a longer name, for two blocks 006")
    );
}

#[test]
fn damaged_directory_blocks_are_found() {
    let mut image = small();
    let at = name_at(&image, b"...a longer name");
    image[at + 5] = b'/';
    assert_eq!(findings(&image), found("erofs-directory", "/e")[..1]);
    for value in [0, 1, 12 * 400, 0xffff] {
        let mut image = small();
        // The first block of e starts with the entry of the first name.
        let at = name_at(&image, b"...a longer name") / BLOCK * BLOCK;
        put16(&mut image, at + 8, value);
        assert_eq!(findings(&image)[0], found("erofs-directory", "/e")[0]);
    }
}

#[test]
fn wrong_dots_and_types_are_found() {
    let mut image = small();
    let block = name_at(&image, b"...a longer name") / BLOCK * BLOCK;
    image[block + 12] = 77;
    assert_eq!(findings(&image), found("erofs-dirent-dots", "/e/.."));
    let mut image = small();
    image[block + 24 + 10] = 1;
    assert_eq!(
        findings(&image),
        found("erofs-dirent-type", "/e/a longer name, for two blocks 000")
    );
    image[block + 24 + 10] = 9;
    assert_eq!(findings(&image)[0], found("erofs-directory", "/e")[0]);
}

#[test]
fn a_directory_inside_itself_is_found_and_ends() {
    let mut image = small();
    let fs = open(&image);
    let e = fs.resolve(b"e").unwrap().unwrap().0;
    let block = name_at(&image, b"...a longer name") / BLOCK * BLOCK;
    image[block + 24..block + 32].copy_from_slice(&e.to_le_bytes());
    image[block + 24 + 10] = 2;
    let findings = findings(&image);
    let name = "/e/a longer name, for two blocks 000";
    assert_eq!(findings[0], found("erofs-directory-twice", name)[0]);
}

#[test]
fn damaged_xattrs_are_found() {
    let name = "e/a longer name, for two blocks 003";
    // The number of shared attributes, a shared one, the length of a value, and a long prefix,
    // which this reader does not support.
    type Change<'c> = &'c dyn Fn(&mut [u8], usize);
    let changes: [(&str, Change<'_>); 4] = [
        ("erofs-xattr", &|image, at| image[at + 32 + 4] = 200),
        ("erofs-xattr", &|image, at| {
            put32(image, at + 32 + 12, u32::MAX)
        }),
        ("erofs-xattr", &|image, at| {
            put16(image, at + 32 + 12 + 4 + 2, 5000)
        }),
        ("erofs-unsupported", &|image, at| {
            image[at + 32 + 12 + 4 + 1] = 0x81
        }),
    ];
    for (code, change) in changes {
        assert_eq!(damaged(name, change), found(code, &format!("/{name}")));
    }
}

#[test]
fn superblock_fields_are_checked() {
    let mut image = small();
    put32(&mut image, 1024 + 36, 1_000_000);
    sign(&mut image);
    assert_eq!(findings(&image), found("erofs-device-size", "superblock"));
    let mut image = small();
    put32(&mut image, 1024 + 16, 3);
    sign(&mut image);
    assert_eq!(findings(&image), found("erofs-inode-count", "superblock"));
    let fs = open(&image);
    assert_eq!(
        check(&fs, &CheckOptions::default())[0].severity,
        Severity::Warning
    );
}

#[test]
fn an_invalid_or_unsupported_superblock_is_refused_with_the_reason() {
    let refusal = |change: &dyn Fn(&mut [u8])| {
        let mut image = small();
        change(&mut image);
        sign(&mut image);
        Filesystem::open(Arc::new(image)).err().unwrap().to_string()
    };
    assert_eq!(
        refusal(&|image| image[1024] = 0),
        "not an EROFS file system (magic number 0xe0f5e100 instead of 0xe0f5e1e2)"
    );
    assert_eq!(
        refusal(&|image| put32(image, 1024 + 80, 0x8000_01c4)),
        "EROFS feature not supported: xattr-prefixes, 48bit, metabox, bit 0x80000000"
    );
    // A device table that lies beyond the end.
    assert!(
        refusal(&|image| {
            put32(image, 1024 + 80, 0x8);
            put16(image, 1024 + 86, 1);
            put16(image, 1024 + 88, u16::MAX);
        })
        .contains("device table slot")
    );
    assert!(refusal(&|image| image[1024 + 12] = 16).contains("block size shift of 16"));
    assert!(refusal(&|image| image[1024 + 90] = 1).contains("directory block size shift"));
    assert!(refusal(&|image| put32(image, 1024 + 40, 9_999_999)).contains("metadata block"));
    assert!(refusal(&|image| put32(image, 1024 + 32, 1_000_000_000)).contains("nanoseconds"));
    // The root is not a directory.
    let nid =
        (inode_at(&small(), "d/b") - open(&small()).superblock().metadata_offset as usize) / 32;
    assert!(refusal(&|image| put16(image, 1024 + 14, nid as u16)).contains("not a directory"));
    let mut image = small();
    image[2000] = 1;
    let e = Filesystem::open(Arc::new(image)).err().unwrap();
    assert!(matches!(e, ErofsError::SuperblockChecksum { .. }));
    for length in [0, 1024, 1100, 1152, 4000] {
        let image = small()[..length].to_vec();
        let e = Filesystem::open(Arc::new(image)).err().unwrap();
        assert!(
            matches!(
                e,
                ErofsError::TooSmall { .. } | ErofsError::Superblock { .. }
            ),
            "{e}"
        );
    }
}

#[test]
fn operations_on_the_wrong_type_are_errors_of_the_caller() {
    let image = small();
    let fs = open(&image);
    let inode = |path: &str| {
        fs.inode(fs.resolve(path.as_bytes()).unwrap().unwrap())
            .unwrap()
    };
    let wrong = |e: ErofsError| assert!(matches!(e, ErofsError::WrongKind { .. }));
    wrong(fs.read(&inode("d"), 0, &mut [0]).unwrap_err());
    wrong(fs.read_link(&inode("d/a")).unwrap_err());
    wrong(fs.lookup(&inode("d/a"), b"x").unwrap_err());
    wrong(
        fs.read_dir(&inode("d/a"), 0, &mut |_| {
            std::ops::ControlFlow::Continue(())
        })
        .unwrap_err(),
    );
}

#[test]
fn links_are_followed_inside_the_file_system_up_to_a_limit() {
    use bcow_erofs::reader::Symlinks::{Follow, Keep};
    let mut layer = LayerTree::new();
    put(&mut layer, "d", directory());
    let file = put(&mut layer, "d/file", node(NodeKind::Fifo));
    put(&mut layer, "abs", symlink(b"/d/../d/./file"));
    put(&mut layer, "d/up", symlink(b"../../../d"));
    put(&mut layer, "loop", symlink(b"loop"));
    put(&mut layer, "dangling", symlink(b"nothing"));
    let _ = file;
    let image = Space::new(0).image(&layer.into_tree().unwrap());
    let fs = open(&image);
    let file = fs.resolve(b"/d/file").unwrap();
    assert!(file.is_some());
    assert_eq!(fs.resolve_with(b"abs", Follow).unwrap(), file);
    assert_eq!(fs.resolve_with(b"d/up/up/file", Follow).unwrap(), file);
    assert_eq!(fs.resolve_with(b"dangling", Follow).unwrap(), None);
    assert!(matches!(
        fs.resolve_with(b"loop", Follow),
        Err(ErofsError::TooManyLinks)
    ));
    assert!(fs.resolve_with(b"loop", Keep).unwrap().is_some());
    assert_eq!(fs.resolve(b"d/up/file").unwrap(), None);
    assert_eq!(fs.resolve(b"../d/x/../file").unwrap(), file);
    assert_eq!(fs.resolve(b"").unwrap(), Some(fs.root()));
    assert_eq!(fs.resolve(b"d/file/x").unwrap(), None);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn damaged_bytes_neither_panic_nor_hang(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..30),
        cut in proptest::option::of(any::<prop::sample::Index>()),
    ) {
        let mut image = small();
        let metadata = open(&image).superblock().metadata_offset as usize;
        for (place, value) in changes {
            // Mostly in the metadata; sometimes in the superblock.
            let range = if value % 8 == 0 { 1024..1152 } else { metadata..image.len() };
            image[range.start + place.index(range.len())] = value;
        }
        if let Some(cut) = cut {
            image.truncate(4096 + cut.index(image.len() - 4096));
        }
        sign(&mut image);
        fuzz_read(&image);
    }
}
