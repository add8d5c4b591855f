//! Trees in memory, and images of them.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::Command;

use bcow_ext4::{
    BlockRange, Content, DeviceNumber, DirEntry, Ext4Error, Extent, FileKind, Geometry,
    GeometryOptions, Identity, InodeNumber, Node, Sink, Summary, Timestamp, Writer, Xattr,
};
use tempfile::NamedTempFile;

pub const BLOCK: u64 = 4096;

/// The type of an inode, and what belongs to it.
#[derive(Debug, Clone)]
pub enum Kind {
    /// Length in bytes, and runs of blocks: first block in the file, and number.
    File(u64, Vec<(u32, u32)>),
    /// Names, and the places of their inodes in the tree.
    Directory(BTreeMap<Vec<u8>, usize>),
    Symlink(Vec<u8>),
    CharDevice(u32, u32),
    BlockDevice(u32, u32),
    Fifo,
    Socket,
}

#[derive(Debug, Clone)]
pub struct Inode {
    pub permissions: u16,
    pub uid: u32,
    pub gid: u32,
    pub modified: (i64, u32),
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    pub kind: Kind,
}

/// The first inode is the root.
#[derive(Debug, Clone)]
pub struct Tree(pub Vec<Inode>);

impl Tree {
    pub fn new() -> Tree {
        Tree(vec![inode(Kind::Directory(BTreeMap::new()))])
    }

    pub fn add(&mut self, directory: usize, name: impl AsRef<[u8]>, inode: Inode) -> usize {
        self.0.push(inode);
        self.link(directory, name, self.0.len() - 1);
        self.0.len() - 1
    }

    pub fn link(&mut self, directory: usize, name: impl AsRef<[u8]>, inode: usize) {
        let Kind::Directory(entries) = &mut self.0[directory].kind else {
            panic!("{directory} is no directory");
        };
        entries.insert(name.as_ref().to_vec(), inode);
    }
}

pub fn inode(kind: Kind) -> Inode {
    Inode {
        permissions: 0o755,
        uid: 0,
        gid: 0,
        modified: (1_700_000_000, 123_456_789),
        xattrs: Vec::new(),
        kind,
    }
}

/// A directory `large` with 120,000 names of two files, so that its hash tree has two levels.
pub fn large_directory() -> Tree {
    let mut tree = Tree::new();
    let large = tree.add(0, "large", directory());
    let target = tree.add(0, "target", file(1));
    // A file has at most 65,000 names.
    let second = tree.add(0, "second", file(1));
    for n in 0..120_000 {
        let inode = if n % 2 == 0 { target } else { second };
        tree.link(large, format!("entry number {n}"), inode);
    }
    tree
}

pub fn directory() -> Inode {
    inode(Kind::Directory(BTreeMap::new()))
}

/// A file without holes.
pub fn file(bytes: u64) -> Inode {
    let blocks = bytes.div_ceil(BLOCK) as u32;
    let runs = if blocks == 0 { vec![] } else { vec![(0, blocks)] };
    inode(Kind::File(bytes, runs))
}

/// The content of a block that is no hole.
pub fn block_content(inode: usize, block: u32) -> [u8; BLOCK as usize] {
    let mut bytes = [0; BLOCK as usize];
    for (n, word) in bytes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let value = (inode as u64) << 40 | u64::from(block) << 9 | n as u64;
        *word = (value.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1).to_le_bytes();
    }
    bytes
}

struct Host<'f>(&'f File);

impl Sink for Host<'_> {
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> std::io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }
}

pub struct Image {
    pub file: NamedTempFile,
    pub summary: Summary,
}

pub fn identity() -> Identity {
    Identity {
        uuid: *b"\x10\x32\x54\x76\x98\xba\x4c\xfe\x80\x02\x04\x06\x08\x0a\x0c\x0e",
        hash_seed: *b"seed of the hash",
        label: *b"bcow-test\0\0\0\0\0\0\0",
        created: 1_600_000_000,
        lost_and_found: true,
    }
}

/// Makes an image, with the content at its places. Runs of content lie one block apart.
pub fn image(tree: &Tree, bytes: u64) -> Image {
    let options = GeometryOptions {
        bytes,
        inodes: tree.0.len() as u32,
        journal_blocks: None,
    };
    let geometry = Geometry::new(options).expect("a geometry");
    let area = geometry
        .whole_areas()
        .max_by_key(|area| area.count)
        .unwrap_or(BlockRange {
            start: geometry.front_end() + 64,
            count: geometry.blocks() - geometry.front_end() - 64,
        });
    let mut at = area.start;
    let mut places: Vec<Vec<Extent>> = Vec::new();
    for inode in &tree.0 {
        let mut extents = Vec::new();
        if let Kind::File(_, runs) = &inode.kind {
            for &(logical, blocks) in runs {
                extents.push(Extent {
                    logical,
                    physical: at,
                    blocks,
                });
                at += u64::from(blocks) + 1;
            }
        }
        places.push(extents);
    }
    let area = BlockRange {
        start: area.start,
        count: at - area.start,
    };
    let file = NamedTempFile::new().expect("a file");
    file.as_file()
        .set_len(geometry.blocks() * BLOCK)
        .expect("a size");
    let summary = write(tree, &places, &geometry, &[area], file.as_file()).expect("ext4");
    for (number, extents) in places.iter().enumerate() {
        for extent in extents {
            for n in 0..extent.blocks {
                let content = block_content(number, extent.logical + n);
                let offset = (extent.physical + u64::from(n)) * BLOCK;
                file.as_file()
                    .write_all_at(&content, offset)
                    .expect("written");
            }
        }
    }
    Image { file, summary }
}

fn write(
    tree: &Tree,
    places: &[Vec<Extent>],
    geometry: &Geometry,
    areas: &[BlockRange],
    file: &File,
) -> Result<Summary, Ext4Error> {
    let mut sink = Host(file);
    let mut writer = Writer::new(geometry, identity(), areas, &mut sink)?;
    let mut parents = vec![0; tree.0.len()];
    let mut links = vec![0; tree.0.len()];
    for (number, inode) in tree.0.iter().enumerate() {
        if let Kind::Directory(entries) = &inode.kind {
            for &child in entries.values() {
                parents[child] = number;
                links[child] += 1;
            }
        }
    }
    for (number, inode) in tree.0.iter().enumerate() {
        let parent = writer.number(parents[number] as u32);
        let entries = entries(tree, number, &writer);
        let content = match &inode.kind {
            Kind::File(bytes, _) => Content::File {
                bytes: *bytes,
                extents: &places[number],
            },
            Kind::Directory(_) => Content::Directory {
                parent,
                entries: &entries,
            },
            Kind::Symlink(target) => Content::Symlink(target),
            &Kind::CharDevice(major, minor) => Content::CharDevice(DeviceNumber { major, minor }),
            &Kind::BlockDevice(major, minor) => Content::BlockDevice(DeviceNumber { major, minor }),
            Kind::Fifo => Content::Fifo,
            Kind::Socket => Content::Socket,
        };
        let xattrs: Vec<Xattr<'_>> = inode
            .xattrs
            .iter()
            .map(|(name, value)| Xattr { name, value })
            .collect();
        let time = Timestamp {
            seconds: inode.modified.0,
            nanoseconds: inode.modified.1,
        };
        writer.add(&Node {
            permissions: inode.permissions,
            uid: inode.uid,
            gid: inode.gid,
            accessed: time,
            modified: time,
            changed: time,
            created: time,
            links: links[number],
            xattrs: &xattrs,
            content,
        })?;
    }
    writer.finish()
}

fn entries<'t>(tree: &'t Tree, number: usize, writer: &Writer<'_>) -> Vec<DirEntry<'t>> {
    let Kind::Directory(entries) = &tree.0[number].kind else {
        return Vec::new();
    };
    let entry = |(name, &child): (&'t Vec<u8>, &usize)| DirEntry {
        name,
        inode: writer.number(child as u32),
        kind: match tree.0[child].kind {
            Kind::File(..) => FileKind::Regular,
            Kind::Directory(_) => FileKind::Directory,
            Kind::Symlink(_) => FileKind::Symlink,
            Kind::CharDevice(..) => FileKind::CharDevice,
            Kind::BlockDevice(..) => FileKind::BlockDevice,
            Kind::Fifo => FileKind::Fifo,
            Kind::Socket => FileKind::Socket,
        },
    };
    assert_eq!(writer.number(0), InodeNumber::ROOT);
    entries.iter().map(entry).collect()
}

/// Requires that `e2fsck` finds nothing to say.
pub fn check(image: &Image) {
    let output = Command::new("e2fsck")
        .args(["-f", "-n"])
        .arg(image.file.path())
        .output()
        .expect("e2fsck runs");
    let text = String::from_utf8_lossy(&output.stdout);
    // The name of each pass, and one line with counts: anything else is a complaint.
    let complaints: Vec<&str> = text
        .lines()
        .filter(|line| !line.starts_with("Pass ") && !line.contains(" blocks"))
        .collect();
    if !output.status.success() || !complaints.is_empty() {
        let kept = std::env::temp_dir().join("bcow-ext4-failed");
        let _ = std::fs::copy(image.file.path(), &kept);
        panic!("{output:?}\nthe image is {}", kept.display());
    }
}

/// A directory of the root with entries of all types and sizes that ext4 stores differently.
pub fn of_all_kinds() -> Tree {
    let mut tree = Tree::new();
    tree.0[0].permissions = 0o751;
    let all = tree.add(0, "all", directory());
    tree.0[all].permissions = 0o1777;
    tree.add(all, "empty", file(0));
    tree.add(all, "byte", file(1));
    let hard = tree.add(all, "block", file(BLOCK));
    tree.link(all, "hard link", hard);
    tree.link(0, b"\xff\xfe not UTF-8\n", hard);
    tree.add(all, "big", file(3 << 20));
    tree.add(all, "hole", inode(Kind::File(10 << 20, vec![])));
    tree.add(
        all,
        "in pieces",
        inode(Kind::File(40 * BLOCK - 1, vec![(1, 2), (7, 1), (39, 1)])),
    );
    let comb = |runs: u32| (0..runs).map(|n| (2 * n, 1)).collect();
    tree.add(all, "comb", inode(Kind::File(10 * BLOCK, comb(5))));
    tree.add(
        all,
        "large comb",
        inode(Kind::File(3000 * BLOCK, comb(1500))),
    );
    tree.add(
        all,
        "far",
        inode(Kind::File(
            (16 << 40) - 2 * BLOCK,
            vec![(0, 1), (u32::MAX - 3, 1)],
        )),
    );
    for bytes in [1, 59, 60, 61, 4095] {
        let target = vec![b'x'; bytes];
        tree.add(all, format!("link {bytes}"), inode(Kind::Symlink(target)));
    }
    tree.add(all, "null", inode(Kind::CharDevice(1, 3)));
    tree.add(all, "whiteout", inode(Kind::CharDevice(0, 0)));
    tree.add(all, "new device", inode(Kind::BlockDevice(259, 0x1_2345)));
    tree.add(all, "fifo", inode(Kind::Fifo));
    tree.add(all, "socket", inode(Kind::Socket));
    tree.add(all, [b'n'; 255], file(5000));
    for (n, seconds) in [-1 << 31, -1, 0, 1 << 31, 1 << 32, 15_032_385_535]
        .into_iter()
        .enumerate()
    {
        let mut old = file(0);
        old.modified = (seconds, n as u32);
        tree.add(all, format!("time {n}"), old);
    }
    let mut owned = file(77);
    (owned.uid, owned.gid, owned.permissions) = (0x1234_5678, 0x8765_4321, 0o6755);
    tree.add(all, "owned", owned);
    tree.add(0, "attributes", directory());
    let at = tree.0.len() - 1;
    for (n, xattrs) in xattrs().into_iter().enumerate() {
        let mut with = if n % 2 == 0 { file(10) } else { directory() };
        with.xattrs = xattrs;
        tree.add(at, format!("{n}"), with);
    }
    tree
}

fn xattrs() -> Vec<Vec<(Vec<u8>, Vec<u8>)>> {
    let pair = |name: &str, value: &[u8]| (name.as_bytes().to_vec(), value.to_vec());
    let mut acl = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in [
        (1u16, 7u16, u32::MAX),
        (2, 6, 1000),
        (2, 5, 70_000),
        (4, 5, u32::MAX),
        (8, 4, 5),
        (0x10, 7, u32::MAX),
        (0x20, 5, u32::MAX),
    ] {
        acl.extend(tag.to_le_bytes());
        acl.extend(permissions.to_le_bytes());
        acl.extend(id.to_le_bytes());
    }
    let capability = [
        1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    ];
    vec![
        vec![pair("user.a", b"1")],
        vec![
            pair("user.empty", b""),
            pair("trusted.t", b"\0\xff"),
            pair("user.b", b"12345"),
        ],
        vec![pair("system.posix_acl_access", &acl)],
        vec![
            pair("system.posix_acl_access", &acl),
            pair("system.posix_acl_default", &acl),
        ],
        vec![
            pair("security.capability", &capability),
            pair("user.x", &[7; 300]),
        ],
        vec![
            pair("user.large", &[9; 3900]),
            pair("user.small", b"in the inode"),
        ],
        (0..60)
            .map(|n| pair(&format!("user.many-{n}"), &[n; 17]))
            .collect(),
        vec![pair(&format!("user.{}", "n".repeat(250)), b"a long name")],
    ]
}
