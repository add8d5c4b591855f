//! Trees that ext4 cannot hold, and descriptions that contradict themselves.

use bcow_ext4::{
    BlockRange, Content, DeviceNumber, DirEntry, Extent, FileKind, Geometry, GeometryOptions,
    InodeNumber, Node, Sink, Timestamp, Writer, Xattr,
};

use super::tree::identity;

struct Nowhere;

impl Sink for Nowhere {
    fn write_at(&mut self, _: u64, _: &[u8]) -> std::io::Result<()> {
        Ok(())
    }
}

const GEOMETRY: GeometryOptions = GeometryOptions {
    bytes: 64 << 20,
    inodes: 100,
    journal_blocks: None,
};

const AREA: BlockRange = BlockRange {
    start: 10_000,
    count: 1000,
};

fn node<'a>(content: Content<'a>, xattrs: &'a [Xattr<'a>]) -> Node<'a> {
    Node {
        permissions: 0o644,
        uid: 0,
        gid: 0,
        accessed: Timestamp::default(),
        modified: Timestamp::default(),
        changed: Timestamp::default(),
        created: Timestamp::default(),
        links: 1,
        xattrs,
        content,
    }
}

/// Adds a root with a name for each of `nodes`, then these, and returns the error.
fn refusal(names: &[(&[u8], u32, FileKind)], nodes: &[Node<'_>]) -> String {
    let geometry = Geometry::new(GEOMETRY).expect("a geometry");
    let mut sink = Nowhere;
    let mut writer = Writer::new(&geometry, identity(), &[AREA], &mut sink).expect("a writer");
    let entries: Vec<DirEntry<'_>> = names
        .iter()
        .map(|&(name, n, kind)| DirEntry {
            name,
            inode: writer.number(n),
            kind,
        })
        .collect();
    let root = Content::Directory {
        parent: InodeNumber::ROOT,
        entries: &entries,
    };
    let mut result = writer.add(&node(root, &[]));
    for node in nodes {
        result = result.and_then(|_| writer.add(node));
    }
    let result = result.and_then(|_| writer.finish());
    result.expect_err("a refusal").to_string()
}

/// What is said of one inode with the name `file`.
fn refusal_of(node: Node<'_>) -> String {
    let kind = node.content.kind();
    refusal(&[(b"file", 1, kind)], &[node])
}

fn file<'a>(bytes: u64, extents: &'a [Extent]) -> Node<'a> {
    node(Content::File { bytes, extents }, &[])
}

#[test]
fn extents_are_in_order_and_inside_the_areas() {
    let extent = |logical, physical, blocks| Extent {
        logical,
        physical,
        blocks,
    };
    let order = "inode 12: extent 1 is out of order, empty, or behind the end of the file";
    let range = "inode 12: extent 1 lies outside the areas of content";
    let shared = "inode 12: extent 1 has blocks that are in use already";
    let first = extent(0, 10_000, 2);
    for (second, expected) in [
        (extent(1, 10_002, 1), order),
        (extent(2, 10_002, 0), order),
        (extent(99, 10_002, 2), order),
        (extent(u32::MAX, 10_002, u32::MAX), order),
        (extent(2, 9999, 1), range),
        (extent(2, 10_999, 2), range),
        (extent(2, u64::MAX, 2), range),
        (extent(2, 10_001, 1), shared),
    ] {
        assert_eq!(
            refusal_of(file(100 * 4096, &[first, second])),
            expected,
            "{second:?}"
        );
    }
}

#[test]
fn values_out_of_range_are_refused() {
    let device = DeviceNumber {
        major: 4096,
        minor: 0,
    };
    let long = [b'x'; 4096];
    let huge = [1; 4000];
    let xattr = |name, value| [Xattr { name, value }];
    let attribute = |xattrs: &[Xattr<'_>]| refusal_of(node(Content::Fifo, xattrs));
    assert_eq!(
        refusal_of(node(Content::CharDevice(device), &[])),
        "inode 12: device 4096:0 is out of ext4's range"
    );
    assert_eq!(
        refusal_of(node(Content::Symlink(&long), &[])),
        "inode 12: a link target of 4096 bytes; ext4 allows 1 to 4095"
    );
    assert_eq!(
        refusal_of(file(16 << 40, &[])),
        "inode 12: a file of 17592186044416 bytes is longer than ext4 allows"
    );
    let links = Node {
        links: 65_001,
        ..node(Content::Fifo, &[])
    };
    assert_eq!(
        refusal_of(links),
        "inode 12: 65001 links; ext4 allows 1 to 65000"
    );
    assert_eq!(
        attribute(&[
            Xattr {
                name: b"user.a",
                value: &huge
            },
            Xattr {
                name: b"user.b",
                value: &huge
            }
        ]),
        "inode 12: extended attributes do not fit into the inode and one block of 4096 bytes"
    );
    assert_eq!(
        attribute(&xattr(b"system.data", b"")),
        "inode 12: the attribute name \"system.data\" has no prefix of ext4's, or is too long"
    );
    assert_eq!(
        attribute(&xattr(b"system.posix_acl_access", b"")),
        "inode 12: the attribute \"system.posix_acl_access\" is not a POSIX ACL"
    );
}

#[test]
fn names_and_inodes_that_do_not_fit_together_are_refused() {
    let fifo = node(Content::Fifo, &[]);
    let pipe = FileKind::Fifo;
    assert_eq!(
        refusal(&[(b"a", 1, pipe), (b"b", 1, pipe)], &[fifo]),
        "inode 12: 1 links, but 2 names"
    );
    assert_eq!(refusal(&[], &[fifo]), "inode 12: 1 links, but 0 names");
    assert_eq!(
        refusal(&[(b"a", 1, pipe)], &[]),
        "inode 12: a directory has a name for it, but it was not described"
    );
    assert_eq!(
        refusal(&[(b"a", 1, FileKind::Socket)], &[fifo]),
        "inode 12: the name in directory 0 says another type, or the directory another parent"
    );
    assert_eq!(
        refusal(&[(b"a", 1, pipe), (b"a", 2, pipe)], &[fifo, fifo]),
        "inode 2: the name \"a\" occurs twice"
    );
    for name in [&b""[..], b".", b"..", b"a/b", b"a\0", &[b'x'; 256]] {
        let message = refusal(&[(name, 1, pipe)], &[fifo]);
        assert!(message.starts_with("inode 2: the name \""), "{message}");
    }
    let below_itself = Content::Directory {
        parent: InodeNumber::ROOT,
        entries: &[],
    };
    assert_eq!(
        refusal(&[], &[node(below_itself, &[])]),
        "inode 12: 1 links, but 0 names"
    );
}

#[test]
fn areas_of_content_are_free_of_metadata() {
    let geometry = Geometry::new(GeometryOptions {
        bytes: 1 << 30,
        ..GEOMETRY
    });
    let geometry = geometry.expect("a geometry");
    let mut sink = Nowhere;
    for (start, count, expected) in [
        (0, 1, "tables, the journal or another area is there"),
        (
            geometry.front_end() - 1,
            1,
            "tables, the journal or another area is there",
        ),
        (98_304, 1, "a backup of the superblock is there"),
        (98_000, 10_000, "a backup of the superblock is there"),
        (262_140, 5, "the file system ends before"),
        (u64::MAX, 5, "the file system ends before"),
    ] {
        let area = BlockRange { start, count };
        let result = Writer::new(&geometry, identity(), &[area], &mut sink);
        let message = result.err().expect("a refusal").to_string();
        assert!(message.ends_with(expected), "{start}: {message}");
    }
}
