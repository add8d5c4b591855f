//! Shared by the tests: images in memory, the dump of an oracle, and external checkers.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;
use std::process::Command;
use std::sync::Arc;

use bcow_erofs::debug::{DumpOptions, dump_to_string};
use bcow_erofs::merge::merge;
use bcow_erofs::overlay::{ReadOptions, TreeForm, read_layer};
use bcow_erofs::reader::Filesystem;
use bcow_erofs::tree::*;
use bcow_erofs::writer::{ContentWindow, Plan, WriteOptions, device_table};
use bcow_testkit::{has_program, lacks};

pub const BLOCK: usize = 4096;

/// An address space with file data, as a converter writes it.
pub struct Space {
    pub bytes: Vec<u8>,
    pub tails: Vec<u8>,
    pub inline_max: u16,
}

impl std::fmt::Debug for Space {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Space of {} bytes, {} of tails",
            self.bytes.len(),
            self.tails.len()
        )
    }
}

impl Space {
    pub fn new(inline_max: u16) -> Self {
        Space {
            bytes: vec![0; BLOCK],
            tails: Vec::new(),
            inline_max,
        }
    }

    /// Stores a file as the converter does: whole blocks, and a tail apart if it is short enough.
    pub fn file(&mut self, content: &[u8]) -> Content {
        let start = (self.bytes.len() / BLOCK) as u32;
        let rest = content.len() % BLOCK;
        let tail = (rest > 0 && rest <= usize::from(self.inline_max)).then_some(Tail {
            offset: self.tails.len() as u64,
            length: rest as u16,
        });
        let (in_blocks, apart) = content.split_at(match tail {
            Some(_) => content.len() - rest,
            None => content.len(),
        });
        self.tails.extend_from_slice(apart);
        self.bytes.extend_from_slice(in_blocks);
        self.bytes
            .resize(self.bytes.len().next_multiple_of(BLOCK), 0);
        Content {
            size: content.len() as u64,
            blocks: Blocks::Flat { start },
            tail,
        }
    }

    /// Stores a file in chunks; those not given are holes.
    pub fn chunked(
        &mut self,
        size: u64,
        chunk_shift: u8,
        chunks: &BTreeMap<u64, Vec<u8>>,
    ) -> Content {
        let mut runs: Vec<ChunkRun> = Vec::new();
        let chunk_bytes = BLOCK << chunk_shift;
        let mut previous_full = true;
        for (&index, data) in chunks {
            assert!(data.len() <= chunk_bytes);
            let start = (self.bytes.len() / BLOCK) as u32;
            match runs.last_mut() {
                Some(last) if last.first + last.count == index && previous_full => last.count += 1,
                _ => runs.push(ChunkRun {
                    first: index,
                    count: 1,
                    start,
                }),
            }
            let left = (size - index * chunk_bytes as u64).min(chunk_bytes as u64) as usize;
            self.bytes.extend_from_slice(data);
            self.bytes
                .resize(start as usize * BLOCK + left.next_multiple_of(BLOCK), 0);
            previous_full = left == chunk_bytes;
        }
        Content {
            size,
            blocks: Blocks::Chunked {
                chunk_shift,
                runs: runs.into(),
            },
            tail: None,
        }
    }

    pub fn plan<'t>(&self, tree: &'t Tree) -> Plan<'t> {
        let options = WriteOptions {
            metadata_start: self.bytes.len() as u64,
            inline_max: self.inline_max,
        };
        Plan::new(tree, &options).unwrap()
    }

    /// The whole image.
    pub fn image(&self, tree: &Tree) -> Vec<u8> {
        let plan = self.plan(tree);
        let mut image = self.bytes.clone();
        plan.write::<std::convert::Infallible>(&self.tails, &mut |piece| {
            image.extend_from_slice(piece);
            Ok(())
        })
        .unwrap();
        assert_eq!(
            image.len() as u64,
            self.bytes.len() as u64 + plan.metadata_bytes()
        );
        let superblock = plan.superblock((image.len() / BLOCK) as u64);
        image[1024..BLOCK].copy_from_slice(&superblock);
        image
    }

    /// A file's bytes, found in the space without the code under test.
    pub fn content(&self, content: &Content) -> Vec<u8> {
        let size = content.size as usize;
        let at = |block: u32| block as usize * BLOCK;
        let mut bytes = vec![0; size];
        match &content.blocks {
            Blocks::Flat { start } => {
                let tail = content.tail.map_or(0, |tail| usize::from(tail.length));
                let whole = size - tail;
                bytes[..whole].copy_from_slice(&self.bytes[at(*start)..at(*start) + whole]);
                if let Some(tail) = content.tail {
                    let from = tail.offset as usize;
                    let stored = &self.tails[from..from + usize::from(tail.length)];
                    bytes[whole..].copy_from_slice(stored);
                }
            }
            Blocks::Chunked { chunk_shift, runs } => {
                let chunk_bytes = BLOCK << chunk_shift;
                for run in runs {
                    let from = run.first as usize * chunk_bytes;
                    let to = (from + run.count as usize * chunk_bytes).min(size);
                    bytes[from..to].copy_from_slice(&self.bytes[at(run.start)..][..to - from]);
                }
            }
            Blocks::Dropped => panic!("dropped"),
        }
        bytes
    }
}

/// A tree with inodes of every type.
pub fn everything() -> (Tree, Space) {
    let mut space = Space::new(2000);
    let mut layer = LayerTree::new();
    layer.node_mut(LayerTree::ROOT).attributes = attributes(0o755, 0, 0, 1_700_000_000);
    let mut add = |path: &str, kind: NodeKind, attributes: Attributes| {
        put(&mut layer, path, Node { attributes, kind })
    };
    let plain = |mode| attributes(mode, 0, 0, 1_700_000_000);
    add(
        "dir",
        NodeKind::Directory(Directory::default()),
        plain(0o1777),
    );
    add(
        "dir/empty",
        NodeKind::Regular(space.file(b"")),
        plain(0o644),
    );
    add(
        "dir/tiny",
        NodeKind::Regular(space.file(b"x")),
        plain(0o4755),
    );
    for size in [
        1999, 2000, 2001, 4095, 4096, 4097, 8191, 8192, 10_000, 100_000,
    ] {
        let content: Vec<u8> = (0..size).map(|i| (i * 7 % 251) as u8).collect();
        let kind = NodeKind::Regular(space.file(&content));
        add(&format!("dir/file{size}"), kind, plain(0o600));
    }
    let sparse = BTreeMap::from([(1, vec![1; 8192]), (2, vec![2; 8192]), (50, vec![3; 100])]);
    let kind = NodeKind::Regular(space.chunked(50 * 8192 + 100, 1, &sparse));
    add("dir/sparse", kind, plain(0o644));
    let kind = NodeKind::Regular(space.chunked(1 << 26, 10, &BTreeMap::new()));
    add("dir/all-hole", kind, plain(0o644));
    let owner = attributes(0o644, 70_000, 80_000, -5);
    add("dir/big-ids", NodeKind::Regular(space.file(b"ids")), owner);
    let mut times = attributes(0o644, 1, 2, 5_000_000_000);
    times.mtime.nanoseconds = 123_456_789;
    add("dir/times", NodeKind::Fifo, times);
    add("dir/socket", NodeKind::Socket, plain(0o755));
    let device = |major, minor| DeviceNumber { major, minor };
    add("dir/null", NodeKind::CharDevice(device(1, 3)), plain(0o666));
    add(
        "dir/disk",
        NodeKind::BlockDevice(device(259, 1_000_000)),
        plain(0o660),
    );
    add(
        "dir/link",
        NodeKind::Symlink(b"../dir/tiny"[..].into()),
        plain(0o777),
    );
    add(
        "dir/long-link",
        NodeKind::Symlink(vec![b'l'; 4095].into()),
        plain(0o777),
    );
    let id = add(
        "dir/one",
        NodeKind::Regular(space.file(b"linked")),
        plain(0o644),
    );
    link(&mut layer, "dir/two", id);
    link(&mut layer, "three", id);

    let mut with = |path: &str, kind: NodeKind, set: Option<Xattrs>| {
        let mut attributes = plain(0o755);
        attributes.xattrs = set;
        put(&mut layer, path, Node { attributes, kind })
    };
    let capability = b"\x01\x00\x00\x02\x00\x20\x00\x00\0\0\0\0\0\0\0\0\0\0\0\0";
    let kind = NodeKind::Regular(space.file(b"ping"));
    with(
        "dir/capable",
        kind,
        xattrs(&[(b"security.capability", capability)]),
    );
    // Owner rw, user 1000 r, group r, mask r, others none.
    let acl =
        b"\x02\0\0\0\x01\0\x06\0\xff\xff\xff\xff\x02\0\x04\0\xe8\x03\0\0\x04\0\x04\0\xff\xff\xff\
        \xff\x10\0\x04\0\xff\xff\xff\xff\x20\0\0\0\xff\xff\xff\xff";
    let names: [&[u8]; 2] = [b"system.posix_acl_access", b"system.posix_acl_default"];
    let kind = NodeKind::Directory(Directory::default());
    with("acl", kind, xattrs(&[(names[0], acl), (names[1], acl)]));
    let binary: Vec<u8> = (0..=255).collect();
    for i in 0..20 {
        // A shared value, and one of its own.
        let own = format!("value {i}");
        let set = xattrs(&[
            (b"user.shared", &binary),
            (b"user.own", own.as_bytes()),
            (b"trusted.t", b""),
        ]);
        let kind = NodeKind::Regular(space.file(own.as_bytes()));
        with(&format!("acl/f{i}"), kind, set);
    }
    let large = vec![b'v'; 65_535];
    // Not user.: the VFS shows none of those on a link.
    let set = xattrs(&[
        (b"trusted.a", &large[..]),
        (b"trusted.b", &large[..60_000]),
        (b"trusted.c", b"c"),
    ]);
    with(
        "large-xattrs",
        NodeKind::Regular(space.file(&[b'L'; 5000])),
        set.clone(),
    );
    with(
        "large-link",
        NodeKind::Symlink(b"tiny".to_vec().into()),
        set,
    );
    (layer.into_tree().unwrap(), space)
}

pub fn attributes(permissions: u16, uid: u32, gid: u32, seconds: i64) -> Attributes {
    Attributes {
        permissions,
        uid,
        gid,
        mtime: Timestamp {
            seconds,
            nanoseconds: 0,
        },
        xattrs: None,
    }
}

pub fn node(kind: NodeKind) -> Node {
    Node {
        attributes: attributes(0o644, 0, 0, 0),
        kind,
    }
}

pub fn regular(content: Content) -> Node {
    node(NodeKind::Regular(content))
}

pub fn directory() -> Node {
    Node {
        attributes: attributes(0o755, 0, 0, 0),
        kind: NodeKind::Directory(Directory::default()),
    }
}

pub fn symlink(target: &[u8]) -> Node {
    Node {
        attributes: attributes(0o777, 0, 0, 0),
        kind: NodeKind::Symlink(target.into()),
    }
}

pub fn xattrs(pairs: &[(&[u8], &[u8])]) -> Option<Xattrs> {
    let pairs = pairs
        .iter()
        .map(|(name, value)| (name.to_vec(), value.to_vec()));
    Some(Arc::new(pairs.collect()))
}

/// Adds a node under a path whose parents exist.
pub fn put(layer: &mut LayerTree, path: &str, node: Node) -> NodeId {
    let id = layer.add(node);
    link(layer, path, id);
    id
}

/// Gives a node another path.
pub fn link(layer: &mut LayerTree, path: &str, id: NodeId) {
    let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
    let mut at = LayerTree::ROOT;
    for part in dir.split('/').filter(|part| !part.is_empty()) {
        at = layer
            .child(at, part.as_bytes())
            .unwrap_or_else(|| panic!("no {part} in {path}"));
    }
    layer.insert(at, name.as_bytes(), id);
}

pub fn open(image: &[u8]) -> Filesystem {
    Filesystem::open(Arc::new(image.to_vec())).unwrap()
}

pub fn dump(image: &[u8]) -> String {
    dump_to_string(&open(image), &DumpOptions::default())
}

/// The dump that a tree should give, made from the tree alone.
pub fn expected_dump(tree: &Tree, space: &Space) -> String {
    let mut nlink: HashMap<NodeId, u32> = HashMap::from([(Tree::ROOT, 2)]);
    for id in tree.ids() {
        let NodeKind::Directory(directory) = &tree.node(id).kind else {
            continue;
        };
        for &child in directory.children.values() {
            let is_directory = matches!(tree.node(child).kind, NodeKind::Directory(_));
            *nlink.entry(child).or_default() += 1 + u32::from(is_directory);
            if is_directory {
                *nlink.entry(id).or_default() += 1;
            }
        }
    }
    let mut text = String::new();
    let mut first: HashMap<NodeId, Vec<u8>> = HashMap::new();
    let mut pending = vec![(Vec::new(), Tree::ROOT)];
    while let Some((path, id)) = pending.pop() {
        let node = tree.node(id);
        let a = &node.attributes;
        let (letter, size) = match &node.kind {
            NodeKind::Directory(_) => ('d', None),
            NodeKind::Regular(content) => ('-', Some(content.size)),
            NodeKind::Symlink(target) => ('l', Some(target.len() as u64)),
            NodeKind::CharDevice(_) => ('c', Some(0)),
            NodeKind::BlockDevice(_) => ('b', Some(0)),
            NodeKind::Fifo => ('p', Some(0)),
            NodeKind::Socket => ('s', Some(0)),
            other => panic!("{other:?} in a tree"),
        };
        let shown = if path.is_empty() { "/".into() } else { escape(&path) };
        let perm = a.permissions;
        write!(
            text,
            "{shown} {letter}{perm:04o} {} {}:{}",
            nlink[&id], a.uid, a.gid
        )
        .unwrap();
        if let Some(size) = size {
            write!(text, " {size}").unwrap();
        }
        write!(text, " {}.{:09}", a.mtime.seconds, a.mtime.nanoseconds).unwrap();
        if let Some(known) = first.get(&id) {
            writeln!(text, " = {}", escape(known)).unwrap();
            continue;
        }
        first.insert(id, path.clone());
        match &node.kind {
            NodeKind::Symlink(target) => write!(text, " -> {}", escape(target)).unwrap(),
            NodeKind::Regular(content) => {
                let algorithm = crc_fast::CrcAlgorithm::Crc64Nvme;
                let crc = crc_fast::checksum(algorithm, &space.content(content));
                write!(text, " crc64 {crc:016x}").unwrap();
            }
            NodeKind::CharDevice(d) | NodeKind::BlockDevice(d) => {
                write!(text, " dev {}:{}", d.major, d.minor).unwrap();
            }
            NodeKind::Directory(directory) => {
                for (name, &child) in directory.children.iter().rev() {
                    pending.push(([&path[..], b"/", name].concat(), child));
                }
            }
            _ => {}
        }
        for (name, value) in a.xattrs.iter().flat_map(|set| set.iter()) {
            write!(text, " @{}={}", escape(name), escape(value)).unwrap();
        }
        text.push('\n');
    }
    text
}

pub fn escape(bytes: &[u8]) -> String {
    let mut text = String::new();
    for &b in bytes {
        match b {
            b'\\' | b'=' | b'@' => write!(text, "\\x{b:02x}").unwrap(),
            b'!'..=b'~' => text.push(b as char),
            _ => write!(text, "\\x{b:02x}").unwrap(),
        }
    }
    text
}

/// Whether a tool is installed. In CI, a missing tool is a failure.
pub fn have(tool: &str) -> bool {
    !lacks(tool, has_program(tool))
}

/// Whether the test may mount EROFS images.
pub fn can_mount() -> bool {
    let known = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    !lacks("root", rustix::process::geteuid().is_root())
        && !lacks("EROFS of the kernel", known.contains("erofs"))
}

/// Asserts that fsck.erofs finds no error, in file contents either.
pub fn fsck(image: &[u8]) {
    if !have("fsck.erofs") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("image");
    std::fs::write(&file, image).unwrap();
    let out = Command::new("fsck.erofs")
        .arg("--extract")
        .arg(&file)
        .output()
        .unwrap();
    let text =
        String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    assert!(
        out.status.success() && !text.contains("<E>"),
        "fsck.erofs: {text}"
    );
}

/// Asserts that the checker of this crate finds no damage.
pub fn check(image: &[u8]) {
    let options = bcow_erofs::check::CheckOptions { read_data: true };
    assert_eq!(bcow_erofs::check::check(&open(image), &options), []);
}

/// Two layers with content, the merged tree, and the position of each layer.
pub struct Stack {
    pub layers: Vec<Vec<u8>>,
    /// Superblock, device table, metadata.
    pub primary: Vec<u8>,
    pub starts: Vec<u32>,
}

pub fn stack() -> Stack {
    let contents = |seed: u8| -> Vec<u8> { (0..100_000).map(|i| (i as u8) ^ seed).collect() };
    let layers: Vec<Vec<u8>> = [1, 2]
        .map(|seed| {
            let mut space = Space::new(256);
            let mut layer = LayerTree::new();
            let mut file = |name: &str, content: Content| {
                put(&mut layer, name, regular(content));
            };
            file("same", space.file(&contents(seed)));
            file(&format!("large{seed}"), space.file(&contents(seed + 10)));
            file(&format!("tail{seed}"), space.file(&contents(seed)[..4196]));
            file(&format!("tiny{seed}"), space.file(&[seed; 9]));
            let chunks = BTreeMap::from([(1, vec![seed; 4096]), (5, vec![seed; 4096])]);
            file(&format!("sparse{seed}"), space.chunked(40_000, 0, &chunks));
            space.image(&layer.into_overlay().unwrap())
        })
        .into();
    let mut trees = Vec::new();
    let mut tails = Vec::new();
    let mut starts = Vec::new();
    // Addresses behind the windows' start: one layer behind the other, with a gap.
    let mut next = 0;
    for image in &layers {
        let options = ReadOptions {
            form: TreeForm::Layer,
            place: &|offset, _| Some(next + (offset / BLOCK as u64) as u32),
            tails: tails.len() as u64,
            max_inodes: 1000,
        };
        trees.push(read_layer(&open(image), &options).unwrap());
        tails.extend_from_slice(image);
        starts.push(next);
        next += (image.len() as u64 / BLOCK as u64) as u32 + 3;
    }
    let tree = merge(trees).unwrap();
    let options = WriteOptions {
        metadata_start: 2 * BLOCK as u64,
        inline_max: 256,
    };
    let plan = Plan::new(&tree, &options).unwrap();
    let end = 2 + (plan.metadata_bytes() / BLOCK as u64) as u32;
    let to = end + 7;
    let plan = plan
        .with_windows(vec![ContentWindow {
            from: 0,
            to,
            blocks: next,
        }])
        .unwrap()
        .with_device_table(2);
    for start in &mut starts {
        *start += to;
    }
    let devices: Vec<ContentWindow> = starts
        .iter()
        .zip(&layers)
        .map(|(&to, image)| ContentWindow {
            from: 0,
            to,
            blocks: (image.len() as u64 / BLOCK as u64) as u32,
        })
        .collect();
    let mut primary = vec![0; BLOCK];
    primary.extend(device_table(&devices));
    plan.write::<std::convert::Infallible>(&tails, &mut |bytes| {
        primary.extend_from_slice(bytes);
        Ok(())
    })
    .unwrap();
    primary[1024..4096].copy_from_slice(&plan.superblock(end.into()));
    Stack {
        layers,
        primary,
        starts,
    }
}

impl Stack {
    /// The address space with all layers in it.
    pub fn flat(&self) -> Vec<u8> {
        let mut flat = self.primary.clone();
        for (layer, &start) in self.layers.iter().zip(&self.starts) {
            flat.resize(start as usize * BLOCK, 0);
            flat.extend_from_slice(layer);
        }
        flat
    }
}
