//! The whole visible state of a union or an image.

use std::collections::{BTreeMap, HashMap};
use std::fmt::{self, Debug};

use bcow_erofs::reader::{FileType, Filesystem, Walk};

/// The visible state of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathState {
    pub kind: FileType,
    pub permissions: u16,
    pub owner: (u32, u32),
    pub mtime: (i64, u32),
    /// The number of links and the first path; `None` for directories.
    pub names: Option<(u32, String)>,
    pub content: Bytes,
}

/// Content. A failed assertion prints only its start.
#[derive(Clone, PartialEq, Eq)]
pub struct Bytes(pub Vec<u8>);

impl Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let start = &self.0[..self.0.len().min(8)];
        write!(f, "{} bytes, {start:?}…", self.0.len())
    }
}

/// The visible state of each path. The path of the root is empty.
pub type Tree = BTreeMap<String, PathState>;

/// The first path of each file in a walk of the tree in order.
#[derive(Default)]
pub struct FirstNames(HashMap<u64, String>);

impl FirstNames {
    /// The value of [`PathState::names`] for the file `id` at `path`.
    pub fn of(&mut self, kind: FileType, id: u64, nlink: u32, path: &str) -> Option<(u32, String)> {
        let first = self.0.entry(id).or_insert_with(|| path.to_owned());
        (kind != FileType::Directory).then(|| (nlink, first.clone()))
    }
}

pub fn join(path: &str, name: &str) -> String {
    match path {
        "" => name.to_owned(),
        path => format!("{path}/{name}"),
    }
}

/// The tree of an image.
pub fn tree_of(fs: &Filesystem) -> Tree {
    let mut tree = Tree::new();
    let mut firsts = FirstNames::default();
    let mut walk = Walk::new(fs);
    while let Some(inode) = walk.next().unwrap() {
        let path = String::from_utf8(walk.path().to_vec()).unwrap();
        let content = match inode.kind {
            FileType::Regular => {
                let mut content = vec![0; inode.size as usize];
                assert_eq!(fs.read(&inode, 0, &mut content).unwrap(), content.len());
                content
            }
            FileType::Symlink => fs.read_link(&inode).unwrap(),
            _ => Vec::new(),
        };
        let seen = PathState {
            kind: inode.kind,
            permissions: inode.permissions,
            owner: (inode.uid, inode.gid),
            mtime: (inode.mtime.seconds, inode.mtime.nanoseconds),
            names: firsts.of(inode.kind, inode.nid.0, inode.nlink, &path),
            content: Bytes(content),
        };
        tree.insert(path, seen);
    }
    tree
}

/// Asserts for each path that `found` equals `shown`.
pub fn assert_same<T: Debug + PartialEq>(
    shown: &BTreeMap<String, T>,
    found: &BTreeMap<String, T>,
    what: &str,
) {
    for path in shown.keys().chain(found.keys()) {
        assert_eq!(shown.get(path), found.get(path), "{what}: {path:?}");
    }
}
