//! A union on an upper of its own, with requests by path.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use bcow_erofs::reader::FileType;
use bcow_testkit::{changed, lacks_mkfs};
use bcow_union::fs::{
    Attributes, Caller, Changes, LowerImage, New, Privileges, RenameMode, SyncScope, UnionFs,
    XattrMode,
};
use bcow_union::{NodeId, UnionOptions};
use rustix::io::Errno;
use tempfile::TempDir;

use crate::host;
use crate::image::{self, Image};
use crate::tree::{Bytes, FirstNames, PathState, Tree, join};

pub const ROOT: Caller = Caller {
    uid: 0,
    gid: 0,
    pid: 1,
    umask: 0o022,
};

/// A union that can be closed and opened again, with its image and its upper. Files are created as
/// root.
pub struct Union {
    directory: TempDir,
    image: &'static Image,
    pub options: UnionOptions,
    fs: Option<Arc<UnionFs>>,
    /// Nodes that were looked up. The fixture forgets them as a kernel does.
    known: Mutex<HashSet<NodeId>>,
}

/// An open union on the image `few`. This function and the following ones return `None` if the
/// machine lacks a requirement.
pub fn open() -> Option<Union> {
    open_with(UnionOptions::default())
}

/// An open union on the image `few`.
pub fn open_with(options: UnionOptions) -> Option<Union> {
    closed_on(image::few, options).map(Union::opened)
}

/// An open union on the image `many`, with partial files.
pub fn open_many() -> Option<Union> {
    closed_on(image::many, UnionOptions::default()).map(Union::opened)
}

/// A union on the image `few` that is not opened yet and has no upper.
pub fn closed() -> Option<Union> {
    closed_on(image::few, UnionOptions::default())
}

/// A union on this image that is not opened yet.
pub fn closed_on(image: fn() -> &'static Image, options: UnionOptions) -> Option<Union> {
    if lacks_mkfs() {
        return None;
    }
    Some(Union {
        directory: tempfile::tempdir().unwrap(),
        image: image(),
        options,
        fs: None,
        known: Mutex::default(),
    })
}

/// The default options with a limit of the stored bytes.
pub fn with_limit(bytes: u64) -> UnionOptions {
    changed(UnionOptions::default(), |new| new.size_limit = Some(bytes))
}

/// An open union on the image `few`, with a limit that leaves room for this many blocks.
pub fn open_with_blocks(blocks: u64) -> Option<Union> {
    let mut union = open_with(with_limit(1 << 30))?;
    let empty = union.fs().report().stored_bytes.unwrap();
    union.close();
    union.options.size_limit = Some(empty + blocks * 4096);
    Some(union.opened())
}

/// Opening, closing and paths.
impl Union {
    pub fn lower(&self) -> LowerImage {
        LowerImage {
            fs: self.image.filesystem(),
            identity: [7; 32],
            name: "image".into(),
        }
    }

    pub fn open(&mut self) {
        let fs = UnionFs::open(self.lower(), &self.upper(), "a test", &self.options).unwrap();
        fs.start_background().unwrap();
        self.fs = Some(fs);
    }

    /// Creates an upper as that of an ordinary user: it stores owners in attributes.
    pub fn begin_with_owners_in_attributes(&self) {
        fs::create_dir_all(self.host(".bcow")).unwrap();
        let record = serde_json::json!({
            "schema": "bcow.instance/1",
            "image": "07".repeat(32),
            "image_name": "image",
            "namespace": "user",
            "ownership": "override",
            "created_by": "a test",
        });
        fs::write(self.host(".bcow/instance.json"), record.to_string()).unwrap();
    }

    fn opened(mut self) -> Union {
        self.open();
        self
    }

    pub fn close(&mut self) {
        self.take().close().unwrap();
    }

    /// Takes the open union out, for a test that closes it in another way.
    pub fn take(&mut self) -> Arc<UnionFs> {
        self.fs.take().unwrap()
    }

    /// Closes and opens the union, as an unmount and a mount do.
    pub fn reopen(&mut self) {
        self.close();
        self.open();
    }

    pub fn fs(&self) -> &UnionFs {
        self.fs.as_deref().unwrap()
    }

    pub fn image(&self) -> &'static Image {
        self.image
    }

    /// The directory that contains the upper.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    pub fn upper(&self) -> PathBuf {
        self.directory.path().join("upper")
    }

    /// The path of a file on the host.
    pub fn host(&self, path: &str) -> PathBuf {
        self.upper().join(path)
    }

    /// Number of maps of partial files.
    pub fn maps(&self) -> usize {
        host::count(&self.host(".bcow/maps"))
    }
}

/// Requests that change nothing.
impl Union {
    pub fn get(&self, path: &str) -> Option<Attributes> {
        let mut found = self.fs().attributes(NodeId::ROOT).unwrap();
        for name in path.split('/').filter(|name| !name.is_empty()) {
            found = self.lookup(found.node, name.as_bytes())?;
        }
        Some(found)
    }

    pub fn lookup(&self, parent: NodeId, name: &[u8]) -> Option<Attributes> {
        let found = self.fs().lookup(parent, name).unwrap()?;
        self.known.lock().unwrap().insert(found.node);
        Some(found)
    }

    pub fn id(&self, path: &str) -> NodeId {
        let found = self.get(path);
        found.unwrap_or_else(|| panic!("{path} is there")).node
    }

    /// The parent directory of a path, and the name in it.
    fn place<'a>(&self, path: &'a str) -> (NodeId, &'a [u8]) {
        let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
        (self.id(parent), name.as_bytes())
    }

    pub fn content(&self, path: &str) -> Vec<u8> {
        self.read(self.id(path))
    }

    pub fn read(&self, id: NodeId) -> Vec<u8> {
        let (mut all, mut scratch) = (Vec::new(), Vec::new());
        loop {
            let at = all.len() as u64;
            let read = self.fs().read(id, at, 65536, &mut scratch, <[u8]>::to_vec);
            let read = read.unwrap();
            if read.is_empty() {
                return all;
            }
            all.extend(read);
        }
    }

    pub fn names(&self, path: &str) -> Vec<String> {
        self.names_of(self.id(path))
    }

    pub fn names_of(&self, id: NodeId) -> Vec<String> {
        let handle = self.fs().open_directory(id).unwrap();
        let mut names = Vec::new();
        let mut take = |entry: bcow_union::fs::DirectoryEntry<'_>| {
            names.push(String::from_utf8(entry.name.to_vec()).unwrap());
            ControlFlow::Continue(())
        };
        self.fs().read_directory(id, handle, 0, &mut take).unwrap();
        self.fs().close_directory(handle);
        names.retain(|name| name != "." && name != "..");
        names.sort();
        names
    }

    pub fn xattr(&self, path: &str, name: &str) -> Result<Vec<u8>, Errno> {
        self.fs().xattr(self.id(path), name.as_bytes())
    }

    /// The names in sorted order.
    pub fn xattr_names(&self, path: &str) -> Vec<String> {
        let names = self.fs().xattr_names(self.id(path)).unwrap();
        let names = String::from_utf8(names).unwrap();
        let mut names: Vec<_> = names.split_terminator('\0').map(str::to_owned).collect();
        names.sort();
        names
    }

    /// All paths with their node, number of links, and visible state.
    fn walk(&self) -> BTreeMap<String, (NodeId, u32, PathState)> {
        let mut tree = BTreeMap::new();
        let mut firsts = FirstNames::default();
        let mut todo = vec![(String::new(), self.get("").unwrap())];
        while let Some((path, found)) = todo.pop() {
            let content = match found.kind {
                FileType::Directory => {
                    // `todo` is a stack: push the last name first, so that paths are visited in
                    // order.
                    for name in self.names_of(found.node).into_iter().rev() {
                        let child = self.lookup(found.node, name.as_bytes());
                        todo.push((join(&path, &name), child.unwrap()));
                    }
                    Vec::new()
                }
                FileType::Regular => self.read(found.node),
                FileType::Symlink => self.fs().read_link(found.node).unwrap(),
                _ => Vec::new(),
            };
            let seen = PathState {
                kind: found.kind,
                permissions: found.permissions,
                owner: (found.uid, found.gid),
                mtime: (found.mtime.seconds, found.mtime.nanoseconds),
                names: firsts.of(found.kind, found.node.0, found.nlink, &path),
                content: Bytes(content),
            };
            tree.insert(path, (found.node, found.nlink, seen));
        }
        tree
    }

    pub fn tree(&self) -> Tree {
        let all = self.walk().into_iter();
        all.map(|(path, (_, _, seen))| (path, seen)).collect()
    }

    /// Asserts that closing and opening the union changes nothing visible.
    pub fn assert_kept(&mut self) {
        let before = self.walk();
        self.reopen();
        crate::tree::assert_same(&before, &self.walk(), "opened again");
    }
}

/// Requests that change the union.
impl Union {
    pub fn create(&self, path: &str, mode: u16) -> Result<Attributes, Errno> {
        let (parent, name) = self.place(path);
        self.fs().make(&ROOT, parent, name, mode, &New::File)
    }

    pub fn make_directory(&self, path: &str, mode: u16) -> Result<Attributes, Errno> {
        let (parent, name) = self.place(path);
        self.fs().make(&ROOT, parent, name, mode, &New::Directory)
    }

    pub fn unlink(&self, path: &str) -> Result<(), Errno> {
        let (parent, name) = self.place(path);
        self.fs().unlink(parent, name)
    }

    pub fn remove_directory(&self, path: &str) -> Result<(), Errno> {
        let (parent, name) = self.place(path);
        self.fs().remove_directory(parent, name)
    }

    /// Renames and replaces an existing file of the new name.
    pub fn rename(&self, from: &str, to: &str) -> Result<(), Errno> {
        self.rename_how(from, to, RenameMode::Replace)
    }

    pub fn rename_how(&self, from: &str, to: &str, how: RenameMode) -> Result<(), Errno> {
        let (parent, name) = self.place(from);
        let (to_parent, to_name) = self.place(to);
        self.fs().rename(parent, name, to_parent, to_name, how)
    }

    /// Writes all bytes.
    pub fn write(&self, path: &str, offset: u64, data: &[u8]) {
        let written = self.write_to(self.id(path), offset, data).unwrap();
        assert_eq!(written as usize, data.len());
    }

    /// Writes as an unprivileged user.
    pub fn write_to(&self, id: NodeId, offset: u64, data: &[u8]) -> Result<u32, Errno> {
        self.fs().write(id, offset, data, Privileges::Drop)
    }

    /// Flushes everything, as an unmount does before its end.
    pub fn sync_all(&self) {
        self.fs().sync_all().unwrap();
    }

    /// Forgets all nodes that were looked up.
    pub fn forget_all(&self) {
        let known = std::mem::take(&mut *self.known.lock().unwrap());
        for id in known {
            self.fs().forget(id, u64::MAX);
        }
    }

    pub fn sync(&self, path: &str) {
        self.fs().sync(self.id(path), SyncScope::All).unwrap();
    }

    pub fn set_attributes(&self, path: &str, changes: &Changes) -> Attributes {
        self.fs().set_attributes(self.id(path), changes).unwrap()
    }

    pub fn set_permissions(&self, path: &str, permissions: u16) {
        let changes = Changes {
            permissions: Some(permissions),
            ..Changes::default()
        };
        self.set_attributes(path, &changes);
    }

    pub fn set_size(&self, path: &str, size: u64) {
        let changes = changed(Changes::default(), |new| new.size = Some(size));
        self.set_attributes(path, &changes);
    }

    pub fn set_xattr(&self, path: &str, name: &str, value: &[u8]) {
        let (id, name) = (self.id(path), name.as_bytes());
        self.fs()
            .set_xattr(id, name, value, XattrMode::Any)
            .unwrap();
    }
}
