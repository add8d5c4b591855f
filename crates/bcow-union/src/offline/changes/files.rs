//! Files of the layer that are not directories: their nodes, and the sources of their content.

use std::os::fd::{AsFd, OwnedFd};

use bcow_erofs::reader::{FileType, Inode, Nid};
use bcow_erofs::tree::{Node, NodeId, NodeKind};
use rustix::fs::AtFlags;
use rustix::io::Errno;

use super::{Pending, Reader, UpperObject};
use crate::offline::body::{Body, Own, Piece, PieceSource};
use crate::offline::error::Problem;
use crate::offline::partial::{self, HostFile};
use crate::upper::beneath::open_regular_beneath;
use crate::upper::{Attribute, META, Marks, Metacopy, entry_name, is_whiteout};

impl Reader<'_> {
    /// Adds the node of an object that is not a directory. All names of a host file have one node.
    pub(super) fn file_node(
        &mut self,
        object: &UpperObject<'_>,
        parent: Option<&Inode>,
        lower_inode: Option<Inode>,
    ) -> Result<NodeId, Problem> {
        let has_names = object.stat.st_nlink > 1;
        if has_names && let Some(&node) = self.hosts.get(&object.stat.st_ino) {
            return Ok(node);
        }
        let at = Attribute::Named(object.dir, object.name);
        let attributes = self.attributes(&object.stat, &object.marks, at, object.kind)?;
        let device = self.device(&object.stat, &object.marks);
        let kind = match object.kind {
            FileType::Regular => {
                let body = self.body(object, parent, lower_inode)?;
                NodeKind::Regular(self.builder.content(body)?)
            }
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(object.dir, object.name, Vec::new())?;
                NodeKind::Symlink(target.into_bytes().into())
            }
            FileType::CharDevice => NodeKind::CharDevice(device),
            FileType::BlockDevice => NodeKind::BlockDevice(device),
            FileType::Fifo => NodeKind::Fifo,
            // A directory does not get here: the callers handle directories themselves.
            FileType::Socket | FileType::Directory => NodeKind::Socket,
        };
        let node = self.builder.add(Node { attributes, kind })?;
        if has_names {
            self.hosts.insert(object.stat.st_ino, node);
        }
        Ok(node)
    }

    /// Adds an entry of the image to a directory of the layer that must list all its entries.
    pub(super) fn add_lower_entry(
        &mut self,
        dir: &Pending,
        name: &[u8],
        nid: Nid,
        path: &[u8],
    ) -> Result<(), Problem> {
        let inode = self.builder.lower.inode(nid)?;
        let node = match inode.kind {
            FileType::Directory => {
                let node = self.builder.lower_directory(&inode)?;
                let node = self.builder.add(node)?;
                self.builder.whole.insert(node);
                self.pending.push(Pending {
                    node,
                    path: path.to_vec(),
                    in_upper: false,
                    lower: Some(inode),
                    is_whole: true,
                });
                node
            }
            _ => self.lower_node(nid)?,
        };
        self.builder.tree.insert(dir.node, name, node);
        Ok(())
    }

    /// The node of a file of the image that is not a directory. If the file was changed under
    /// another of its names, this is the node of the changed file.
    pub(super) fn lower_node(&mut self, nid: Nid) -> Result<NodeId, Problem> {
        if self.index.contains_key(&nid.0) {
            return self.index_node(nid);
        }
        let inode = self.builder.lower.inode(nid)?;
        self.builder.lower_file(&inode)
    }

    /// The node of the changed file that the index has for an inode of the image. Fails if the
    /// entry is not a copy of this inode.
    pub(super) fn index_node(&mut self, nid: Nid) -> Result<NodeId, Problem> {
        let known = |reader: &Self| {
            let inode = reader.index.get(&nid.0)?;
            reader.hosts.get(inode).copied()
        };
        if self.examined.contains(&nid)
            && let Some(node) = known(self)
        {
            return Ok(node);
        }
        let Some(dir) = self.index_directory()? else {
            return Err(Problem::Host(Errno::NOENT));
        };
        let name = entry_name(nid.0).into_bytes();
        let stat = rustix::fs::statat(&dir, &name[..], AtFlags::SYMLINK_NOFOLLOW)?;
        let marks = Marks::read(Attribute::Named(dir.as_fd(), &name), self.names.namespace)?;
        let kind = self.kind(&stat, &marks)?;
        let origin = self.origin(&marks, kind)?;
        if is_whiteout(&stat) || origin.is_none_or(|inode| inode.nid != nid) {
            return Err(Problem::Index { nid: nid.0 });
        }
        self.examined.insert(nid);
        // The node may exist already: the file also has names in the tree of the upper.
        if let Some(node) = known(self) {
            return Ok(node);
        }
        let path = [META.as_bytes(), b"/index/", &name].concat();
        let object = UpperObject {
            dir: dir.as_fd(),
            name: &name,
            path: &path,
            stat,
            marks,
            kind,
        };
        let lower_inode = self.builder.lower.inode(nid)?;
        let node = self.file_node(&object, None, Some(lower_inode))?;
        self.hosts.insert(stat.st_ino, node);
        Ok(node)
    }

    /// The directory of the index; `None` if the upper has no index.
    pub(super) fn index_directory(&self) -> Result<Option<OwnedFd>, Problem> {
        Ok(self.upper.meta_directory("index")?)
    }

    /// The content of a regular file as pieces of the host file, of the image and of holes.
    pub(super) fn body(
        &self,
        object: &UpperObject<'_>,
        parent: Option<&Inode>,
        lower_inode: Option<Inode>,
    ) -> Result<Body, Problem> {
        let size = u64::try_from(object.stat.st_size).unwrap_or(0);
        if let Some(mark) = &object.marks.partial {
            let lower = self.lower_of(object, parent, lower_inode)?;
            let host = HostFile {
                path: object.path,
                inode: object.stat.st_ino,
                size,
            };
            return partial::body(self.upper, mark, &host, lower);
        }
        match object.marks.metacopy {
            Metacopy::None => Ok(Body {
                size,
                own: Some(Own::Host {
                    path: object.path.to_vec(),
                    inode: object.stat.st_ino,
                }),
                lower: None,
                pieces: self.host_pieces(object, size)?,
            }),
            Metacopy::Whole => {
                let lower = self.lower_of(object, parent, lower_inode)?;
                Ok(Body::of_lower(lower))
            }
            Metacopy::Partial => Err(Problem::Partial(
                "its metacopy mark is that of a partial file, but it has no partial file mark"
                    .into(),
            )),
        }
    }

    /// The file of the image with the content of a metadata copy, or with the blocks that a partial
    /// file does not store.
    pub(super) fn lower_of(
        &self,
        object: &UpperObject<'_>,
        parent: Option<&Inode>,
        lower_inode: Option<Inode>,
    ) -> Result<Inode, Problem> {
        if let Some(inode) = self.origin(&object.marks, FileType::Regular)? {
            return Ok(inode);
        }
        let redirected = self.redirected(&object.marks, parent)?;
        redirected
            .unwrap_or(lower_inode)
            .filter(|inode| inode.kind == FileType::Regular)
            .ok_or(Problem::NoLower { kind: "file" })
    }

    /// The runs of data and holes of a host file of `size` bytes.
    pub(super) fn host_pieces(
        &self,
        object: &UpperObject<'_>,
        size: u64,
    ) -> Result<Vec<Piece>, Problem> {
        // A file with blocks for all its bytes counts as one run of data, and is not opened.
        if (object.stat.st_blocks as u64).saturating_mul(512) >= size {
            return Ok(vec![Piece::new(size, PieceSource::Own)]);
        }
        let file = open_regular_beneath(self.upper.root(), object.path)?;
        Ok(partial::data_runs(&file, size)?)
    }
}
