//! Files of the layer: their types, and the sources of their bytes.

use std::os::fd::{AsFd, OwnedFd};

use bcow_erofs::reader::{FileType, Inode, Nid};
use bcow_erofs::tree::{Node, NodeId, NodeKind};
use rustix::fs::AtFlags;
use rustix::io::Errno;

use super::{Kind, Pending, Reader, UpperObject};
use crate::offline::body::{Body, Holder, Own, Piece, Source};
use crate::offline::error::Problem;
use crate::offline::sketched::{self, HostFile};
use crate::upper::beneath::open_regular_beneath;
use crate::upper::{Attribute, META, Marks, Metacopy, entry_name, is_whiteout};

impl Reader<'_> {
    /// The node of an object that is not a directory.
    pub(super) fn file(
        &mut self,
        above: &UpperObject<'_>,
        parent: Option<&Inode>,
        below: Option<Inode>,
    ) -> Result<NodeId, Problem> {
        let has_names = above.stat.st_nlink > 1;
        if has_names && let Some(&node) = self.hosts.get(&above.stat.st_ino) {
            return Ok(node);
        }
        let at = Attribute::Named(above.dir, above.name);
        let attributes = self.attributes(&above.stat, &above.marks, at, above.kind)?;
        let kind = match above.kind {
            Kind::Regular => {
                let body = self.body(above, parent, below)?;
                NodeKind::Regular(self.builder.content(body)?)
            }
            Kind::Symlink => {
                let target = rustix::fs::readlinkat(above.dir, above.name, Vec::new())?;
                NodeKind::Symlink(target.into_bytes().into())
            }
            Kind::Char(number) => NodeKind::CharDevice(number),
            Kind::Block(number) => NodeKind::BlockDevice(number),
            Kind::Fifo => NodeKind::Fifo,
            Kind::Socket | Kind::Directory => NodeKind::Socket,
        };
        let node = self.builder.add(Node { attributes, kind })?;
        if has_names {
            self.hosts.insert(above.stat.st_ino, node);
        }
        Ok(node)
    }

    /// Adds an entry of the image to a directory that lists all its entries.
    pub(super) fn below(
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
            _ => self.node_below(nid)?,
        };
        self.builder.tree.insert(dir.node, name, node);
        Ok(())
    }

    /// The node of a file of the image: unchanged, or as it was changed under another name.
    pub(super) fn node_below(&mut self, nid: Nid) -> Result<NodeId, Problem> {
        if self.index.contains_key(&nid.0) {
            return self.indexed(nid);
        }
        let inode = self.builder.lower.inode(nid)?;
        self.builder.lower_file(&inode)
    }

    /// The node of an entry of the index.
    pub(super) fn indexed(&mut self, nid: Nid) -> Result<NodeId, Problem> {
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
        let became = self.origin(&marks, kind.file_type())?;
        if is_whiteout(&stat) || became.is_none_or(|inode| inode.nid != nid) {
            return Err(Problem::Index { nid: nid.0 });
        }
        self.examined.insert(nid);
        // The file may have been found by one of its names in the tree.
        if let Some(node) = known(self) {
            return Ok(node);
        }
        let path = [META.as_bytes(), b"/index/", &name].concat();
        let above = UpperObject {
            dir: dir.as_fd(),
            name: &name,
            path: &path,
            stat,
            marks,
            kind,
        };
        let below = self.builder.lower.inode(nid)?;
        let node = self.file(&above, None, Some(below))?;
        self.hosts.insert(stat.st_ino, node);
        Ok(node)
    }

    pub(super) fn index_directory(&self) -> Result<Option<OwnedFd>, Problem> {
        match self.upper.meta_directory("index") {
            Ok(dir) => Ok(dir),
            Err(error) => Err(Problem::Host(error.errno().unwrap_or(Errno::IO))),
        }
    }

    /// The content of a regular file, as pieces.
    pub(super) fn body(
        &self,
        above: &UpperObject<'_>,
        parent: Option<&Inode>,
        below: Option<Inode>,
    ) -> Result<Body, Problem> {
        let size = u64::try_from(above.stat.st_size).unwrap_or(0);
        let host = |holder| {
            Some(Own::Host {
                path: above.path.to_vec(),
                inode: above.stat.st_ino,
                holder,
            })
        };
        if let Some(mark) = &above.marks.sketch {
            let lower = self.lower_of(above, parent, below)?;
            let host = HostFile {
                path: above.path,
                inode: above.stat.st_ino,
                size,
            };
            return sketched::body(self.upper, mark, &host, lower);
        }
        match above.marks.metacopy {
            Metacopy::None => Ok(Body {
                size,
                own: host(Holder::Plain),
                lower: None,
                pieces: self.host_pieces(above, size)?,
            }),
            Metacopy::Whole => Ok(Body::of_lower(self.lower_of(above, parent, below)?)),
            Metacopy::Sketch => Err(Problem::Sketch(
                "it is marked as a sketch, but has no sketch mark".into(),
            )),
        }
    }

    /// The file of the image that a metadata copy or a sketch continues.
    pub(super) fn lower_of(
        &self,
        above: &UpperObject<'_>,
        parent: Option<&Inode>,
        below: Option<Inode>,
    ) -> Result<Inode, Problem> {
        if let Some(inode) = self.origin(&above.marks, FileType::Regular)? {
            return Ok(inode);
        }
        let found = match self.redirected(&above.marks, parent)? {
            Some(found) => found,
            None => below,
        };
        found
            .filter(|inode| inode.kind == FileType::Regular)
            .ok_or(Problem::NoLower { kind: "file" })
    }

    /// The runs of data of a host file.
    pub(super) fn host_pieces(
        &self,
        above: &UpperObject<'_>,
        size: u64,
    ) -> Result<Vec<Piece>, Problem> {
        let whole = vec![Piece {
            end: size,
            source: Source::Own,
        }];
        if (above.stat.st_blocks as u64).saturating_mul(512) >= size {
            return Ok(whole);
        }
        let file = open_regular_beneath(self.upper.root(), above.path)?;
        Ok(sketched::data_runs(&file, size)?)
    }
}
