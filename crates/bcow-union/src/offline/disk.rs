//! The changes of a disk that shows the image as ext4, read from the blocks that the disk stores.
//!
//! [`Compared`] has the inodes of the view that have changed; all others are inodes of the image. A
//! changed directory is compared with that of the view, name by name. In an unchanged directory,
//! only the names that lead to changed inodes are visited. So the work depends on the number of
//! changes, and on the size of the changed directories. In addition, there is one walk over the
//! names of the image.

mod files;
mod origin;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use bcow::{BlockDevice, Image};
use bcow_erofs::reader::Filesystem;
use bcow_erofs::tree::{Attributes, Directory, LayerTree, Node, NodeId, NodeKind, Timestamp};
use bcow_ext4::{FileKind, Inode, InodeNumber, ReadError};
use bcow_view::{Compared, Numbers};

use self::origin::Origins;
use super::builder::{Builder, join};
use super::changes::{Changes, Scope};
use super::error::{ChangesError, Problem, at};
use super::splice::PiecePlace;
use crate::upper::DiskReader;

/// A directory that `e2fsck` makes, for files without a name.
const LOST_AND_FOUND: &[u8] = b"lost+found";

/// A disk over the view of an image.
pub struct DiskOverView {
    pub disk: Arc<dyn BlockDevice>,
    /// The files of the disk in front of the view, in any order.
    pub above: Vec<Arc<Image>>,
    pub view: Arc<dyn BlockDevice>,
    /// Keeps writers away from the disk until it is dropped, if the disk itself does not.
    pub lock: Option<Arc<DiskReader>>,
}

impl Changes {
    /// Reads the changes of a disk to the image with the file system `lower` on `device`. The disk
    /// does not change meanwhile. As [`Changes::read`], with the files that the disk changed in
    /// place of those of the upper.
    pub fn of_disk(
        disk: DiskOverView,
        lower: Arc<Filesystem>,
        device: Arc<dyn BlockDevice>,
        scope: Scope<'_>,
        max_inodes: u64,
    ) -> Result<Changes, ChangesError> {
        let here = at(b"");
        let numbers = Numbers::new(&lower).map_err(|error| here(error.into()))?;
        let compared = Compared::new(disk.disk, &disk.above, disk.view, &numbers);
        let compared = Arc::new(compared.map_err(|error| here(error.into()))?);
        let origins = Origins::new(&lower, &numbers);
        let lists = origins.lists(compared.changed()).map_err(&here)?;
        let mut reader = Reader {
            disk: &compared,
            origins,
            lists,
            builder: Builder::new(&lower, max_inodes),
            visits: Vec::new(),
            pending: Vec::new(),
            seen: HashSet::new(),
            files: HashMap::new(),
            copies: BTreeMap::new(),
            max_names: usize::try_from(max_inodes).unwrap_or(usize::MAX),
        };
        reader.run()?;
        let builder = reader.builder;
        let place = PiecePlace::Disk {
            compared: compared.clone(),
            _lock: disk.lock,
        };
        let index = BTreeMap::new();
        Changes::of(builder, scope, lower.clone(), device, place, index)
    }
}

struct Reader<'r> {
    disk: &'r Compared,
    origins: Origins<'r>,
    /// The names that lead to changed inodes, by directory of the view.
    lists: HashMap<InodeNumber, BTreeMap<Vec<u8>, InodeNumber>>,
    builder: Builder<'r>,
    visits: Vec<Visit>,
    /// Visits that remain to be done.
    pending: Vec<usize>,
    /// Directories that were found. A directory has one name.
    seen: HashSet<InodeNumber>,
    /// Files that were read: the node, or `None` for one that is the image's.
    files: HashMap<InodeNumber, Option<NodeId>>,
    /// Files of the image that have a new name.
    copies: BTreeMap<InodeNumber, NodeId>,
    max_names: usize,
}

/// A directory of the disk.
struct Visit {
    /// The visit of the directory above, and the name in it.
    parent: usize,
    name: Vec<u8>,
    path: Vec<u8>,
    number: InodeNumber,
    attributes: Attributes,
    /// The node, if the layer has the directory already.
    node: Option<NodeId>,
    /// Whether the layer lists all names. Otherwise the image has the same directory at this path.
    is_whole: bool,
}

impl Reader<'_> {
    fn run(&mut self) -> Result<(), ChangesError> {
        self.root().map_err(at(b""))?;
        while let Some(next) = self.pending.pop() {
            let path = self.visits[next].path.clone();
            self.directory(next).map_err(|(name, problem)| {
                let path = match &name[..] {
                    [] => path,
                    name => join(&path, name),
                };
                at(&path)(problem)
            })?;
        }
        self.link_copies()
    }

    fn root(&mut self) -> Result<(), Problem> {
        let inode = self.disk.disk().inode(InodeNumber::ROOT)?;
        let attributes = self.attributes(&inode)?;
        *self.builder.tree.node_mut(LayerTree::ROOT) = Node {
            attributes: attributes.clone(),
            kind: NodeKind::Directory(Directory::default()),
        };
        self.visit(Visit {
            parent: 0,
            name: Vec::new(),
            path: Vec::new(),
            number: InodeNumber::ROOT,
            attributes,
            node: Some(LayerTree::ROOT),
            is_whole: false,
        })
    }

    fn visit(&mut self, visit: Visit) -> Result<(), Problem> {
        if !self.seen.insert(visit.number) {
            return Err(Problem::DirectoryTwice(visit.number.get()));
        }
        self.pending.push(self.visits.len());
        self.visits.push(visit);
        Ok(())
    }

    /// Reads a directory. An error names the entry, or nothing.
    fn directory(&mut self, at: usize) -> Result<(), (Vec<u8>, Problem)> {
        let here = |error: Problem| (Vec::new(), error);
        let number = self.visits[at].number;
        if self.visits[at].is_whole {
            for (name, inode) in self.names(number).map_err(here)? {
                self.entry(at, &name, inode, Below::Nothing)
                    .map_err(|problem| (name, problem))?;
            }
            return Ok(());
        }
        if !self.disk.changed().contains(&number) {
            let names = self.lists.get(&number).cloned().unwrap_or_default();
            for (name, inode) in names {
                self.kept(at, &name, inode, inode)
                    .map_err(|problem| (name, problem))?;
            }
            return Ok(());
        }
        if self.has_changed(at).map_err(here)? {
            self.node_of(at).map_err(here)?;
        }
        let after = self.names(number).map_err(here)?;
        let before = self.names_in_view(number).map_err(here)?;
        for (name, was) in &before {
            let done = match after.get(name) {
                Some(inode) => self.kept(at, name, *was, *inode),
                None => self
                    .node_of(at)
                    .and_then(|node| self.builder.add_whiteout(node, name)),
            };
            done.map_err(|problem| (name.clone(), problem))?;
        }
        for (name, inode) in after {
            if before.contains_key(&name) {
                continue;
            }
            let is_own = number == InodeNumber::ROOT && name == LOST_AND_FOUND;
            let done = if is_own && self.is_empty_directory(inode).map_err(here)? {
                Ok(())
            } else {
                self.entry(at, &name, inode, Below::Nothing)
            };
            done.map_err(|problem| (name, problem))?;
        }
        Ok(())
    }

    /// Reads a name that the image has too, as that of inode `was`.
    fn kept(
        &mut self,
        at: usize,
        name: &[u8],
        was: InodeNumber,
        number: InodeNumber,
    ) -> Result<(), Problem> {
        let is_same = was == number;
        if is_same && !self.disk.changed().contains(&number) && !self.lists.contains_key(&number) {
            return Ok(());
        }
        let before = self.disk.view().inode(was).map_err(Problem::View)?;
        let below = match before.kind {
            FileKind::Directory => Below::Directory,
            _ => Below::File,
        };
        if !is_same {
            return self.entry(at, name, number, below);
        }
        let inode = self.disk.disk().inode(number)?;
        let is_directory = inode.kind == FileKind::Directory;
        match below {
            Below::Directory if is_directory && inode.generation == before.generation => {
                let attributes = self.attributes(&inode)?;
                let path = join(&self.visits[at].path, name);
                self.visit(Visit {
                    parent: at,
                    name: name.to_vec(),
                    path,
                    number,
                    attributes,
                    node: None,
                    is_whole: false,
                })
            }
            _ if is_directory => self.entry(at, name, number, below),
            _ => {
                if let Some(file) = self.file(number)? {
                    let directory = self.node_of(at)?;
                    self.builder.tree.insert(directory, name, file);
                }
                Ok(())
            }
        }
    }

    /// Adds an object that the image does not have at this path.
    fn entry(
        &mut self,
        at: usize,
        name: &[u8],
        number: InodeNumber,
        below: Below,
    ) -> Result<(), Problem> {
        let inode = self.disk.disk().inode(number)?;
        if inode.kind != FileKind::Directory {
            let node = match self.file(number)? {
                Some(node) => node,
                None => self.renamed_file(number)?,
            };
            let directory = self.node_of(at)?;
            self.builder.tree.insert(directory, name, node);
            return Ok(());
        }
        let attributes = self.attributes(&inode)?;
        let directory = self.node_of(at)?;
        let node = self.builder.add(Node {
            attributes: attributes.clone(),
            kind: NodeKind::Directory(Directory {
                opaque: below == Below::Directory,
                ..Directory::default()
            }),
        })?;
        self.builder.tree.insert(directory, name, node);
        self.builder.whole.insert(node);
        let path = join(&self.visits[at].path, name);
        self.visit(Visit {
            parent: at,
            name: name.to_vec(),
            path,
            number,
            attributes,
            node: Some(node),
            is_whole: true,
        })
    }

    /// The node of a directory. The layer gets it, and those above it, if it lacks them.
    fn node_of(&mut self, at: usize) -> Result<NodeId, Problem> {
        let mut missing = Vec::new();
        let mut next = at;
        let mut above = loop {
            match self.visits[next].node {
                Some(node) => break node,
                None => missing.push(next),
            }
            next = self.visits[next].parent;
        };
        for at in missing.into_iter().rev() {
            let node = self.builder.add(Node {
                attributes: self.visits[at].attributes.clone(),
                kind: NodeKind::Directory(Directory::default()),
            })?;
            let visit = &mut self.visits[at];
            visit.node = Some(node);
            self.builder.tree.insert(above, &visit.name, node);
            above = node;
        }
        Ok(above)
    }

    /// Whether the attributes of a directory differ from those in the image.
    fn has_changed(&mut self, at: usize) -> Result<bool, Problem> {
        let visit = &self.visits[at];
        let Some(below) = self.origins.inode(visit.number)? else {
            return Ok(true);
        };
        let before = self.builder.lower_attributes(&below)?;
        Ok(before != self.visits[at].attributes)
    }

    /// The names of a directory of the disk.
    fn names(&self, number: InodeNumber) -> Result<BTreeMap<Vec<u8>, InodeNumber>, Problem> {
        Ok(self.names_in(self.disk.disk(), number)?)
    }

    fn names_in_view(
        &self,
        number: InodeNumber,
    ) -> Result<BTreeMap<Vec<u8>, InodeNumber>, Problem> {
        let names = self.names_in(self.disk.view(), number);
        names.map_err(Problem::View)
    }

    fn names_in(
        &self,
        reader: &bcow_ext4::Reader,
        number: InodeNumber,
    ) -> Result<BTreeMap<Vec<u8>, InodeNumber>, ReadError> {
        let names = reader.names(&reader.inode(number)?, self.max_names)?;
        let names = names.into_iter().map(|name| (name.name, name.inode));
        Ok(names.collect())
    }

    fn is_empty_directory(&self, number: InodeNumber) -> Result<bool, Problem> {
        let inode = self.disk.disk().inode(number)?;
        Ok(inode.kind == FileKind::Directory && self.names(number)?.is_empty())
    }

    fn attributes(&mut self, inode: &Inode) -> Result<Attributes, Problem> {
        let mut xattrs = self.disk.disk().xattrs(inode)?;
        xattrs.retain(|name, _| self.builder.keeps_xattr(name));
        Ok(Attributes {
            permissions: inode.permissions,
            uid: inode.uid,
            gid: inode.gid,
            mtime: Timestamp {
                seconds: inode.modified.seconds,
                nanoseconds: inode.modified.nanoseconds,
            },
            xattrs: self.builder.share(xattrs),
        })
    }

    /// Replaces files of the image under new names by links to their names in the image, if such a
    /// name stays visible.
    fn link_copies(&mut self) -> Result<(), ChangesError> {
        let wanted = self.copies.keys().copied().collect();
        for (path, inode) in self.origins.paths(&wanted).map_err(at(b""))? {
            if let Some(node) = self.copies.get(&inode) {
                self.builder.link_below(&path, *node);
            }
        }
        Ok(())
    }
}

/// What the image has at a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Below {
    /// Nothing, or what another entry of the layer hides.
    Nothing,
    Directory,
    /// Something else.
    File,
}

impl From<ReadError> for Problem {
    fn from(error: ReadError) -> Self {
        Problem::Disk(error)
    }
}
