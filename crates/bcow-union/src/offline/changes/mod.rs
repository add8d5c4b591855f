//! The changes of an upper to an image, read while no process writes to the upper.
//!
//! The result is a layer over the image ([`Changes::layer`]). A directory that exists in both lists
//! only the entries that differ. Removed names are whiteouts. A renamed directory is in the layer
//! completely, as an opaque directory with its new name.

mod attributes;
mod files;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use bcow::BlockDevice;
use bcow_erofs::reader::{FileType, Filesystem, Inode, Nid};
use bcow_erofs::tree::{Directory, LayerTree, Node, NodeId, NodeKind};
use rustix::fs::{AtFlags, Stat};

use super::builder::{Builder, join};
use super::error::{ChangesError, Problem, at};
use super::splice::{PiecePlace, Store};
use crate::upper::beneath::open_directory_beneath;
use crate::upper::{
    Attribute, META, Marks, Names, Redirect, UpperReader, is_whiteout, parse_entry_name, work,
};

/// The directory of the files for which the image has several names.
const INDEX: &[u8] = b".bcow/index";

/// The changes of an upper.
pub struct Changes {
    /// The layer over the image. Contents are addresses of [`Changes::store`].
    pub layer: LayerTree,
    /// The image's objects at the paths of the layer, with everything below removed or hidden
    /// directories. A comparison needs them. Empty with [`Scope::Layer`].
    pub touched: LayerTree,
    /// The content.
    pub store: Arc<Store>,
    /// The nodes of changed inodes that have several names in the image, by the image's inode
    /// number.
    pub index: BTreeMap<u64, NodeId>,
    /// Attributes that no image can have, by name, with the number of times they were left out.
    pub dropped_xattrs: BTreeMap<Vec<u8>, u64>,
}

/// The extent of a read.
#[derive(Debug, Clone, Copy)]
pub enum Scope<'a> {
    /// The layer only.
    Layer,
    /// Also the image's objects at the paths of the layer.
    Touched,
    /// Also the image's objects at the paths of the layer and of this one, which another upper of
    /// the image makes.
    TouchedByBoth(&'a LayerTree),
}

impl Changes {
    /// Reads the changes of `upper` to the image with the file system `lower` on `device`.
    /// `max_inodes` limits the number of nodes. Memory use is proportional to the number of files
    /// of the upper. No content is read.
    pub fn read(
        upper: &UpperReader,
        lower: Arc<Filesystem>,
        device: Arc<dyn BlockDevice>,
        scope: Scope<'_>,
        max_inodes: u64,
    ) -> Result<Changes, ChangesError> {
        let root = open_directory_beneath(upper.root(), b"");
        let root = root.map_err(|errno| at(b"")(errno.into()))?;
        let known = index_of(upper).map_err(at(INDEX))?;
        let mut reader = Reader {
            upper,
            names: upper.names(),
            builder: Builder::new(&lower, max_inodes),
            hosts: HashMap::new(),
            index: known,
            examined: HashSet::new(),
            pending: Vec::new(),
        };
        reader.run()?;
        let changed = reader.index.iter().filter_map(|(nid, inode)| {
            let node = reader.hosts.get(inode)?;
            Some((*nid, *node))
        });
        let index = changed.collect();
        let place = PiecePlace::Upper {
            root,
            _lock: upper.lock(),
        };
        Changes::of(reader.builder, scope, lower.clone(), device, place, index)
    }

    /// The changes that `builder` has read, over the file system `lower` on `device`. `place` has
    /// the content that is not the image's.
    pub(super) fn of(
        mut builder: Builder<'_>,
        scope: Scope<'_>,
        lower: Arc<Filesystem>,
        device: Arc<dyn BlockDevice>,
        place: PiecePlace,
        index: BTreeMap<u64, NodeId>,
    ) -> Result<Changes, ChangesError> {
        let layer = builder.take();
        match scope {
            Scope::Layer => {}
            Scope::Touched => builder.touched(&[&layer])?,
            Scope::TouchedByBoth(other) => builder.touched(&[&layer, other])?,
        }
        Ok(Changes {
            layer,
            touched: builder.tree,
            index,
            dropped_xattrs: builder.dropped_xattrs,
            store: Arc::new(Store {
                lower,
                device,
                place,
                bodies: builder.bodies,
                segments: builder.segments,
                open: Default::default(),
            }),
        })
    }
}

/// The files of the index: host inode numbers by the image's inode numbers.
fn index_of(upper: &UpperReader) -> Result<HashMap<u64, u64>, Problem> {
    let mut known = HashMap::new();
    let Some(dir) = upper.meta_directory("index")? else {
        return Ok(known);
    };
    for name in work::list(dir.as_fd())? {
        if let Some(nid) = parse_entry_name(&name) {
            let stat = rustix::fs::statat(&dir, &name[..], AtFlags::SYMLINK_NOFOLLOW)?;
            known.insert(nid, stat.st_ino);
        }
    }
    Ok(known)
}

/// A pending directory.
struct Pending {
    node: NodeId,
    /// The path in the union.
    path: Vec<u8>,
    /// Whether the directory is in the upper. If so, it has the same path there.
    in_upper: bool,
    /// The directory of the image that it continues.
    lower: Option<Inode>,
    /// Whether the layer must list all its entries.
    is_whole: bool,
}

struct Reader<'r> {
    upper: &'r UpperReader,
    names: Names,
    builder: Builder<'r>,
    /// Files of the upper with several names, by host inode number.
    hosts: HashMap<u64, NodeId>,
    index: HashMap<u64, u64>,
    /// Inodes of the image whose entry of the index was verified.
    examined: HashSet<Nid>,
    pending: Vec<Pending>,
}

/// An object of the upper. Functions also take `lower_inode`, the inode of the image at the same
/// path, and `parent`, the directory of the image that the parent of the object continues.
struct UpperObject<'a> {
    dir: BorrowedFd<'a>,
    name: &'a [u8],
    path: &'a [u8],
    stat: Stat,
    marks: Marks,
    /// The type that the container sees.
    kind: FileType,
}

impl Reader<'_> {
    fn run(&mut self) -> Result<(), ChangesError> {
        self.root().map_err(at(b""))?;
        while let Some(next) = self.pending.pop() {
            self.directory(next)?;
        }
        // A change through one name of an inode applies to all its names.
        let indexed = self.index.keys().map(|&nid| Nid(nid)).collect();
        for (path, nid) in self.builder.names_of(&indexed)? {
            if self.builder.shows_through(&path) {
                let node = self.lower_node(nid).map_err(at(&path))?;
                self.builder.insert_below(&path, node).map_err(at(&path))?;
            }
        }
        self.links_below()
    }

    /// Replaces files of the image in renamed directories by links to their other names, if such a
    /// name stays visible.
    fn links_below(&mut self) -> Result<(), ChangesError> {
        let builder = &mut self.builder;
        let listed = builder.lowers.keys().copied().collect();
        for (path, nid) in builder.names_of(&listed)? {
            if let Some(&node) = builder.lowers.get(&nid) {
                builder.link_below(&path, node);
            }
        }
        Ok(())
    }

    /// The root continues the image's root. Its marks do not matter.
    fn root(&mut self) -> Result<(), Problem> {
        let fd = self.upper.root();
        let stat = rustix::fs::fstat(fd)?;
        let marks = Marks::read(Attribute::Open(fd), self.names.namespace)?;
        let lower_inode = self.builder.lower.inode(self.builder.lower.root())?;
        let mut attributes =
            self.attributes(&stat, &marks, Attribute::Open(fd), FileType::Directory)?;
        // The mode of an instance's root on the host is more restrictive than in the container.
        if self.upper.record().is_some() {
            match &marks.owner {
                Some(owner) => {
                    (attributes.uid, attributes.gid) = (owner.uid, owner.gid);
                    attributes.permissions = owner.permissions;
                }
                None => {
                    (attributes.uid, attributes.gid) = (lower_inode.uid, lower_inode.gid);
                    attributes.permissions = lower_inode.permissions;
                }
            }
            attributes.xattrs =
                self.with_acl_of_root(attributes.xattrs.take(), Attribute::Open(fd))?;
        }
        *self.builder.tree.node_mut(LayerTree::ROOT) = Node {
            attributes,
            kind: NodeKind::Directory(Directory::default()),
        };
        self.pending.push(Pending {
            node: LayerTree::ROOT,
            path: Vec::new(),
            in_upper: true,
            lower: Some(lower_inode),
            is_whole: false,
        });
        Ok(())
    }

    fn directory(&mut self, dir: Pending) -> Result<(), ChangesError> {
        let mut seen: BTreeSet<Vec<u8>> = BTreeSet::new();
        if dir.in_upper {
            let fd = open_directory_beneath(self.upper.root(), &dir.path)
                .map_err(|errno| at(&dir.path)(errno.into()))?;
            let mut names = work::list(fd.as_fd()).map_err(|errno| at(&dir.path)(errno.into()))?;
            names.sort_unstable();
            for name in names {
                if dir.path.is_empty() && name == META.as_bytes() {
                    continue;
                }
                let path = join(&dir.path, &name);
                self.entry(&dir, fd.as_fd(), &name, &path)
                    .map_err(at(&path))?;
                seen.insert(name);
            }
        }
        if let (true, Some(lower)) = (dir.is_whole, &dir.lower) {
            let mut children = bcow_erofs::reader::Children::sorted(*lower);
            while let Some(child) = children
                .next(self.builder.lower)
                .map_err(|error| at(&dir.path)(error.into()))?
            {
                if seen.contains(&child.name) {
                    continue;
                }
                let path = join(&dir.path, &child.name);
                self.add_lower_entry(&dir, &child.name, child.nid, &path)
                    .map_err(at(&path))?;
            }
        }
        Ok(())
    }

    /// Reads one name of the upper.
    fn entry(
        &mut self,
        dir: &Pending,
        fd: BorrowedFd<'_>,
        name: &[u8],
        path: &[u8],
    ) -> Result<(), Problem> {
        let stat = rustix::fs::statat(fd, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let lower_inode = match &dir.lower {
            Some(lower) => self.child(lower, name)?,
            None => None,
        };
        if is_whiteout(&stat) {
            if !dir.is_whole && lower_inode.is_some() {
                self.builder.add_whiteout(dir.node, name)?;
            }
            return Ok(());
        }
        let marks = Marks::read(Attribute::Named(fd, name), self.names.namespace)?;
        let kind = self.kind(&stat, &marks)?;
        let object = UpperObject {
            dir: fd,
            name,
            path,
            stat,
            marks,
            kind,
        };
        match kind {
            FileType::Directory => self.subdirectory(dir, &object, lower_inode),
            _ => {
                let node = self.file_node(&object, dir.lower.as_ref(), lower_inode)?;
                self.builder.tree.insert(dir.node, name, node);
                Ok(())
            }
        }
    }

    fn subdirectory(
        &mut self,
        dir: &Pending,
        object: &UpperObject<'_>,
        lower_inode: Option<Inode>,
    ) -> Result<(), Problem> {
        let lower = self.continued_directory(object, dir.lower.as_ref(), lower_inode)?;
        let is_at_path = |inode: &Inode| lower_inode.is_some_and(|found| found.nid == inode.nid);
        let is_whole = dir.is_whole || !lower.as_ref().is_some_and(is_at_path);
        let hides = lower_inode.is_some_and(|found| found.kind == FileType::Directory);
        let at = Attribute::Named(object.dir, object.name);
        let attributes = self.attributes(&object.stat, &object.marks, at, object.kind)?;
        let node = self.builder.add(Node {
            attributes,
            kind: NodeKind::Directory(Directory {
                opaque: !dir.is_whole && is_whole && hides,
                ..Directory::default()
            }),
        })?;
        self.builder.tree.insert(dir.node, object.name, node);
        if is_whole {
            self.builder.whole.insert(node);
        }
        self.pending.push(Pending {
            node,
            path: object.path.to_vec(),
            in_upper: true,
            lower,
            is_whole,
        });
        Ok(())
    }

    /// The directory of the image that a directory of the upper continues.
    fn continued_directory(
        &self,
        object: &UpperObject<'_>,
        parent: Option<&Inode>,
        lower_inode: Option<Inode>,
    ) -> Result<Option<Inode>, Problem> {
        if object.marks.opaque {
            return Ok(None);
        }
        if let Some(inode) = self.origin(&object.marks, FileType::Directory)? {
            return Ok(Some(inode));
        }
        let is_directory = |inode: &Inode| inode.kind == FileType::Directory;
        match self.redirected(&object.marks, parent)? {
            Some(found) => {
                let found = found.filter(is_directory);
                found
                    .map(Some)
                    .ok_or(Problem::NoLower { kind: "directory" })
            }
            None => Ok(lower_inode.filter(is_directory)),
        }
    }

    /// The inode that the origin names, if it belongs to this image and has this type.
    fn origin(&self, marks: &Marks, kind: FileType) -> Result<Option<Inode>, Problem> {
        let Some(origin) = &marks.origin else {
            return Ok(None);
        };
        if origin.uuid != self.builder.lower.superblock().uuid {
            return Ok(None);
        }
        let inode = self.builder.lower.inode(Nid(origin.nid))?;
        Ok((inode.kind == kind).then_some(inode))
    }

    /// The target of the redirect; `None` without a redirect, `Some(None)` if the target does not
    /// exist.
    fn redirected(
        &self,
        marks: &Marks,
        parent: Option<&Inode>,
    ) -> Result<Option<Option<Inode>>, Problem> {
        Ok(match (&marks.redirect, parent) {
            (None, _) => None,
            (Some(Redirect::Path(path)), _) => {
                let nid = self.builder.lower.resolve(path)?;
                Some(nid.map(|nid| self.builder.lower.inode(nid)).transpose()?)
            }
            (Some(Redirect::Sibling(name)), Some(parent)) => Some(self.child(parent, name)?),
            (Some(Redirect::Sibling(_)), None) => Some(None),
        })
    }

    /// The inode of `name` in a directory of the image.
    fn child(&self, directory: &Inode, name: &[u8]) -> Result<Option<Inode>, Problem> {
        let entry = self.builder.lower.lookup(directory, name)?;
        let inode = entry.map(|entry| self.builder.lower.inode(entry.nid));
        Ok(inode.transpose()?)
    }
}
