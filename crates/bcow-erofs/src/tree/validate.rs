//! From an arena that anything may have built to a [`Tree`] that readers and writers may trust.

use super::{Attributes, Blocks, Content, LayerTree, Node, NodeId, NodeKind, Tree};
use crate::format;

/// Why a tree is not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TreeError {
    /// A name is empty, longer than 255 bytes, `.`, `..`, or has `/` or NUL in it.
    #[error("{}: bad file name: {reason}", show(.path))]
    Name {
        /// Path of the entry.
        path: Vec<u8>,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A directory has two names, or contains itself.
    #[error("{}: the directory has a second name", show(.path))]
    DirectoryLinkedTwice {
        /// The second name found.
        path: Vec<u8>,
    },
    /// A symbolic link's target is empty, too long, or has a NUL in it.
    #[error("{}: bad link target of {length} bytes: 1 to 4095 are allowed, and no NUL", show(.path))]
    Symlink {
        /// Path of the link.
        path: Vec<u8>,
        /// Length of its target.
        length: usize,
    },
    /// A file's content description contradicts itself.
    #[error("{}: bad content: {reason}", show(.path))]
    Content {
        /// Path of the file.
        path: Vec<u8>,
        /// What is wrong.
        reason: &'static str,
    },
    /// A file is visible whose content was dropped as hidden.
    #[error("{}: the content was dropped, but the file is visible", show(.path))]
    Dropped {
        /// Path of the file.
        path: Vec<u8>,
    },
    /// Permissions, nanoseconds or a device number are out of range.
    #[error("{}: {what} is out of range", show(.path))]
    Attribute {
        /// Path of the entry.
        path: Vec<u8>,
        /// Which attribute.
        what: &'static str,
    },
    /// A hardlink names a file that no layer has, or something that cannot be linked to.
    #[error("{}: hardlink to {}: {reason}", show(.path), show(.target))]
    Link {
        /// Path of the link.
        path: Vec<u8>,
        /// What it names.
        target: Vec<u8>,
        /// Why that does not work.
        reason: &'static str,
    },
}

/// A path for people: control characters escaped, bytes that are no UTF-8 replaced.
pub(crate) fn show(path: &[u8]) -> String {
    let mut text = String::from("/");
    for c in String::from_utf8_lossy(path).chars() {
        if c.is_control() {
            text.extend(c.escape_default());
        } else {
            text.push(c);
        }
    }
    text
}

impl LayerTree {
    /// This layer on its own as a file system: whiteouts are dropped, everything is validated.
    ///
    /// A link to a file of a lower layer is [`TreeError::Link`].
    pub fn into_tree(self) -> Result<Tree, TreeError> {
        build(self.nodes)
    }
}

/// Validates what is reachable from node 0 and renumbers it so that a directory's children lie next to
/// each other, parents before children.
pub(crate) fn build(mut arena: Vec<Node>) -> Result<Tree, TreeError> {
    const UNSEEN: u32 = u32::MAX;
    let mut new_ids = vec![UNSEEN; arena.len()];
    // (old id, id of the directory that names it, in new numbers): what path_of walks on an error.
    let mut nodes: Vec<Node> = Vec::with_capacity(arena.len());
    let mut parents: Vec<u32> = Vec::with_capacity(arena.len());
    let fail = |nodes: &[Node], parents: &[u32], dir: u32, name: &[u8], e: Problem| {
        let mut path = path_of(nodes, parents, dir);
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(name);
        e.at(path)
    };

    let root = take(&mut arena[0]);
    new_ids[0] = 0;
    check_attributes(&root.attributes).map_err(|e| e.at(Vec::new()))?;
    if !matches!(root.kind, NodeKind::Directory(_)) {
        return Err(Problem::Content("the root is no directory").at(Vec::new()));
    }
    nodes.push(root);
    parents.push(0);

    // Directories whose children are still numbered in the old way. A stack, not recursion: depth is input.
    let mut pending = vec![0u32];
    while let Some(dir) = pending.pop() {
        let NodeKind::Directory(directory) = &mut nodes[dir as usize].kind else {
            continue;
        };
        directory.opaque = false;
        directory.implicit = false;
        let mut children = std::mem::take(&mut directory.children);
        children.retain(|_, id| !matches!(arena[id.0 as usize].kind, NodeKind::Whiteout));
        let first_new = pending.len();
        for (name, id) in &mut children {
            let old = id.0 as usize;
            check_name(name).map_err(|e| fail(&nodes, &parents, dir, name, e))?;
            if new_ids[old] != UNSEEN {
                let known = new_ids[old];
                if matches!(nodes[known as usize].kind, NodeKind::Directory(_)) {
                    let e = Problem::DirectoryLinkedTwice;
                    return Err(fail(&nodes, &parents, dir, name, e));
                }
                *id = NodeId(known);
                continue;
            }
            let node = take(&mut arena[old]);
            check_node(&node).map_err(|e| fail(&nodes, &parents, dir, name, e))?;
            let new = nodes.len() as u32;
            if matches!(node.kind, NodeKind::Directory(_)) {
                pending.push(new);
            }
            new_ids[old] = new;
            *id = NodeId(new);
            nodes.push(node);
            parents.push(dir);
        }
        // The stack gives the last first; names shall be walked in order.
        pending[first_new..].reverse();
        if let NodeKind::Directory(directory) = &mut nodes[dir as usize].kind {
            directory.children = children;
        }
    }
    nodes.shrink_to_fit();
    Ok(Tree { nodes })
}

/// Moves a node out of an arena and leaves something small.
pub(crate) fn take(node: &mut Node) -> Node {
    let empty = Node {
        attributes: Attributes::default(),
        kind: NodeKind::Fifo,
    };
    std::mem::replace(node, empty)
}

/// What is wrong with a node, before its path is known.
enum Problem {
    Name(&'static str),
    DirectoryLinkedTwice,
    Symlink(usize),
    Content(&'static str),
    Dropped,
    Attribute(&'static str),
    Link(Vec<u8>),
}

impl Problem {
    fn at(self, path: Vec<u8>) -> TreeError {
        match self {
            Problem::Name(reason) => TreeError::Name { path, reason },
            Problem::DirectoryLinkedTwice => TreeError::DirectoryLinkedTwice { path },
            Problem::Symlink(length) => TreeError::Symlink { path, length },
            Problem::Content(reason) => TreeError::Content { path, reason },
            Problem::Dropped => TreeError::Dropped { path },
            Problem::Attribute(what) => TreeError::Attribute { path, what },
            Problem::Link(target) => TreeError::Link {
                path,
                target,
                reason: "no layer below has such a file",
            },
        }
    }
}

/// The path of a directory that is already numbered. Its parent still may hold old ids, or none while it
/// is being walked, so the name is looked for by new id and left as `?` where it cannot be known.
fn path_of(nodes: &[Node], parents: &[u32], dir: u32) -> Vec<u8> {
    let mut names: Vec<&[u8]> = Vec::new();
    let mut at = dir;
    while at != 0 {
        let parent = parents[at as usize];
        let name = match &nodes[parent as usize].kind {
            NodeKind::Directory(directory) => directory
                .children
                .iter()
                .find(|(_, id)| id.0 == at)
                .map_or(&b"?"[..], |(name, _)| name),
            _ => b"?",
        };
        names.push(name);
        at = parent;
    }
    names.reverse();
    names.join(&b'/')
}

fn check_name(name: &[u8]) -> Result<(), Problem> {
    let reason = match name {
        b"" => "it is empty",
        b"." | b".." => "it is reserved",
        _ if name.len() > format::NAME_MAX => "it is longer than 255 bytes",
        _ if name.contains(&b'/') => "there is a slash in it",
        _ if name.contains(&0) => "there is a NUL in it",
        _ => return Ok(()),
    };
    Err(Problem::Name(reason))
}

fn check_attributes(attributes: &Attributes) -> Result<(), Problem> {
    if attributes.permissions > 0o7777 {
        return Err(Problem::Attribute("the permission bits"));
    }
    if attributes.mtime.nanoseconds >= 1_000_000_000 {
        return Err(Problem::Attribute("the nanoseconds of the time"));
    }
    Ok(())
}

fn check_node(node: &Node) -> Result<(), Problem> {
    check_attributes(&node.attributes)?;
    match &node.kind {
        NodeKind::Directory(_) | NodeKind::Fifo | NodeKind::Socket | NodeKind::Whiteout => Ok(()),
        NodeKind::Regular(content) => check_content(content),
        NodeKind::Symlink(target) => {
            if target.is_empty() || target.len() > 4095 || target.contains(&0) {
                return Err(Problem::Symlink(target.len()));
            }
            Ok(())
        }
        NodeKind::CharDevice(device) | NodeKind::BlockDevice(device) => {
            if device.major >= 1 << 12 || device.minor >= 1 << 20 {
                return Err(Problem::Attribute("the device number"));
            }
            Ok(())
        }
        NodeKind::LowerLink(target) => Err(Problem::Link(target.to_vec())),
    }
}

fn check_content(content: &Content) -> Result<(), Problem> {
    let block = format::BLOCK_BYTES as u64;
    let size = content.size;
    if size > i64::MAX as u64 {
        return Err(Problem::Content("it is larger than 2^63 - 1 bytes"));
    }
    match &content.blocks {
        Blocks::Dropped => Err(Problem::Dropped),
        Blocks::Flat { start } => {
            let blocks = match content.tail {
                Some(tail) => {
                    if tail.length == 0 || u64::from(tail.length) != size % block {
                        return Err(Problem::Content(
                            "the tail is not what is behind the blocks",
                        ));
                    }
                    size / block
                }
                None => size.div_ceil(block),
            };
            check_run(*start, blocks)
        }
        Blocks::Chunked { chunk_shift, runs } => {
            if content.tail.is_some() {
                return Err(Problem::Content("a file in chunks has a tail"));
            }
            if *chunk_shift > 31 {
                return Err(Problem::Content("the chunk size is beyond 2^31 blocks"));
            }
            let blocks = size.div_ceil(block);
            let chunks = blocks.div_ceil(1 << chunk_shift);
            let mut free_from = 0u64;
            for run in runs {
                let end = run.first.checked_add(run.count);
                let end = end.filter(|&end| end <= chunks && run.count > 0);
                let Some(end) = end.filter(|_| run.first >= free_from) else {
                    return Err(Problem::Content("its chunks overlap or pass its end"));
                };
                let stored = (end << chunk_shift).min(blocks) - (run.first << chunk_shift);
                check_run(run.start, stored)?;
                free_from = end;
            }
            Ok(())
        }
    }
}

/// Block addresses are 32 bits wide and the last is reserved for "hole".
fn check_run(start: u32, blocks: u64) -> Result<(), Problem> {
    match u64::from(start).checked_add(blocks) {
        Some(end) if end <= u64::from(format::NULL_BLOCK) => Ok(()),
        _ if blocks == 0 => Ok(()),
        _ => Err(Problem::Content("its blocks lie beyond 16 TiB")),
    }
}
