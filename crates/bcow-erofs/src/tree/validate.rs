//! Validates an arena of nodes from any source and makes a [`Tree`] of it.

use super::{Attributes, Blocks, Content, LayerTree, Node, NodeId, NodeKind, Tree};
use crate::format;

/// A tree is not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}: {problem}", display_path(.path))]
pub struct TreeError {
    /// Path of the entry.
    pub path: Vec<u8>,
    /// What is wrong with it.
    pub problem: TreeProblem,
}

/// What is wrong with an entry of a tree.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TreeProblem {
    /// A name is empty, longer than 255 bytes, `.` or `..`, or contains `/` or NUL.
    #[error("bad file name: {0}")]
    Name(&'static str),
    /// A directory has two names, or contains itself. The path is the second name found.
    #[error("the directory has a second name")]
    DirectoryLinkedTwice,
    /// A symbolic link's target is empty, too long (this is its length), or contains a NUL.
    #[error("bad link target: its length in bytes is {0}; 1 to 4095 bytes without NUL are allowed")]
    Symlink(usize),
    /// The description of a file's content contradicts itself.
    #[error("bad content: {0}")]
    Content(&'static str),
    /// The content of a visible file was dropped as hidden.
    #[error("the content was dropped, but the file is visible")]
    Dropped,
    /// Permissions, nanoseconds or a device number are out of range.
    #[error("{0} is out of range")]
    Attribute(&'static str),
    /// A hardlink names a file that no layer has, or an object that cannot have hardlinks.
    #[error("hardlink to {}: {reason}", display_path(.target))]
    Link {
        /// The target of the link.
        target: Vec<u8>,
        /// Why the link is invalid.
        reason: &'static str,
    },
}

impl TreeProblem {
    pub(crate) fn at(self, path: Vec<u8>) -> TreeError {
        let problem = self;
        TreeError { path, problem }
    }
}

/// A path, with or without its leading slash, in messages: control characters are escaped, and
/// bytes that are not UTF-8 are replaced.
pub(crate) fn display_path(path: &[u8]) -> String {
    let mut text = String::from("/");
    let path = path.strip_prefix(b"/").unwrap_or(path);
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
    /// Makes a file system of this single layer: drops whiteouts and validates all nodes.
    ///
    /// A link to a file of a lower layer is an error, [`TreeError::Link`].
    pub fn into_tree(self) -> Result<Tree, TreeError> {
        validated_tree(self.nodes)
    }
}

/// Validates the nodes reachable from node 0, and renumbers them so that a directory's children are
/// adjacent and parents come before children. The nodes move within the arena, because a second
/// arena would be the largest use of memory in a conversion.
pub(crate) fn validated_tree(mut arena: Vec<Node>) -> Result<Tree, TreeError> {
    let mut walk = Walk {
        new_ids: vec![UNSEEN; arena.len()],
        old_ids: vec![0],
        parents: vec![0],
    };
    walk.new_ids[0] = 0;
    check_attributes(&arena[0].attributes).map_err(|e| e.at(Vec::new()))?;
    if !matches!(arena[0].kind, NodeKind::Directory(_)) {
        return Err(TreeProblem::Content("the root is not a directory").at(Vec::new()));
    }

    // Directories by new id. A stack and not recursion: the input decides the depth.
    let mut pending = vec![0u32];
    while let Some(dir) = pending.pop() {
        let place = walk.old_ids[dir as usize] as usize;
        let NodeKind::Directory(directory) = &mut arena[place].kind else {
            continue;
        };
        directory.opaque = false;
        directory.implicit = false;
        let mut children = std::mem::take(&mut directory.children);
        children.retain(|_, id| !matches!(arena[id.index()].kind, NodeKind::Whiteout));
        let first_new = pending.len();
        for (name, id) in &mut children {
            let new = walk
                .child(&arena, dir, name, *id)
                .map_err(|e| e.at(walk.path(&arena, dir, name)))?;
            if let Child::New(new) = new
                && matches!(arena[id.index()].kind, NodeKind::Directory(_))
            {
                pending.push(new);
            }
            let (Child::New(new) | Child::Known(new)) = new;
            *id = NodeId(new);
        }
        // The stack returns the last one first; names must be walked in order.
        pending[first_new..].reverse();
        if let NodeKind::Directory(directory) = &mut arena[place].kind {
            directory.children = children;
        }
    }

    // Each swap moves a node to its final position.
    let mut new_ids = walk.new_ids;
    for place in 0..arena.len() {
        while new_ids[place] != UNSEEN && new_ids[place] as usize != place {
            let target = new_ids[place] as usize;
            arena.swap(place, target);
            new_ids.swap(place, target);
        }
    }
    arena.truncate(walk.old_ids.len());
    arena.shrink_to_fit();
    Ok(Tree { nodes: arena })
}

const UNSEEN: u32 = u32::MAX;

/// The state of the renumbering. Children of walked directories have new ids, the others old ids.
struct Walk {
    new_ids: Vec<u32>,
    old_ids: Vec<u32>,
    /// By new id: the new id of the first directory that names the node.
    parents: Vec<u32>,
}

/// The new id of a directory entry's node.
enum Child {
    New(u32),
    Known(u32),
}

impl Walk {
    /// Checks an entry and gives its node a number.
    fn child(
        &mut self,
        arena: &[Node],
        dir: u32,
        name: &[u8],
        id: NodeId,
    ) -> Result<Child, TreeProblem> {
        check_name(name)?;
        let known = self.new_ids[id.index()];
        let node = &arena[id.index()];
        if known != UNSEEN {
            return match node.kind {
                NodeKind::Directory(_) => Err(TreeProblem::DirectoryLinkedTwice),
                _ => Ok(Child::Known(known)),
            };
        }
        check_node(node)?;
        let new = self.old_ids.len() as u32;
        self.new_ids[id.index()] = new;
        self.old_ids.push(id.0);
        self.parents.push(dir);
        Ok(Child::New(new))
    }

    /// The path of an entry of the current directory. All directories above it have been walked.
    fn path(&self, arena: &[Node], dir: u32, name: &[u8]) -> Vec<u8> {
        let mut names = vec![name];
        let mut at = dir;
        while at != 0 {
            let parent = self.parents[at as usize];
            let place = self.old_ids[parent as usize] as usize;
            if let NodeKind::Directory(directory) = &arena[place].kind
                && let Some((name, _)) = directory.children.iter().find(|(_, id)| id.0 == at)
            {
                names.push(name);
            }
            at = parent;
        }
        names.reverse();
        names.join(&b'/')
    }
}

/// Moves a node out of an arena and leaves an empty one.
pub(crate) fn take_node(node: &mut Node) -> Node {
    let empty = Node {
        attributes: Attributes::default(),
        kind: NodeKind::Fifo,
    };
    std::mem::replace(node, empty)
}

fn check_name(name: &[u8]) -> Result<(), TreeProblem> {
    let reason = match name {
        b"" => "it is empty",
        b"." | b".." => "it is reserved",
        _ if name.len() > format::NAME_MAX => "it is longer than 255 bytes",
        _ if name.contains(&b'/') => "there is a slash in it",
        _ if name.contains(&0) => "there is a NUL in it",
        _ => return Ok(()),
    };
    Err(TreeProblem::Name(reason))
}

fn check_attributes(attributes: &Attributes) -> Result<(), TreeProblem> {
    if attributes.permissions > 0o7777 {
        return Err(TreeProblem::Attribute("the permission bits"));
    }
    if attributes.mtime.nanoseconds >= 1_000_000_000 {
        return Err(TreeProblem::Attribute("the nanoseconds of the time"));
    }
    Ok(())
}

fn check_node(node: &Node) -> Result<(), TreeProblem> {
    check_attributes(&node.attributes)?;
    match &node.kind {
        NodeKind::Directory(_) | NodeKind::Fifo | NodeKind::Socket | NodeKind::Whiteout => Ok(()),
        NodeKind::Regular(content) => check_content(content),
        NodeKind::Symlink(target) => {
            if target.is_empty() || target.len() > 4095 || target.contains(&0) {
                return Err(TreeProblem::Symlink(target.len()));
            }
            Ok(())
        }
        NodeKind::CharDevice(device) | NodeKind::BlockDevice(device) => {
            if device.major >= 1 << 12 || device.minor >= 1 << 20 {
                return Err(TreeProblem::Attribute("the device number"));
            }
            Ok(())
        }
        NodeKind::LowerLink(target) => Err(TreeProblem::Link {
            target: target.to_vec(),
            reason: "no layer below has such a file",
        }),
    }
}

fn check_content(content: &Content) -> Result<(), TreeProblem> {
    let block = format::BLOCK_BYTES as u64;
    let size = content.size;
    if size > i64::MAX as u64 {
        return Err(TreeProblem::Content("it is larger than 2^63 - 1 bytes"));
    }
    match &content.blocks {
        Blocks::Dropped => Err(TreeProblem::Dropped),
        Blocks::Flat { start } => {
            let blocks = match content.tail {
                Some(tail) => {
                    if tail.length == 0 || u64::from(tail.length) != size % block {
                        return Err(TreeProblem::Content(
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
                return Err(TreeProblem::Content("a file in chunks has a tail"));
            }
            if *chunk_shift > 31 {
                return Err(TreeProblem::Content("the chunk size is beyond 2^31 blocks"));
            }
            let blocks = size.div_ceil(block);
            let chunks = blocks.div_ceil(1 << chunk_shift);
            let mut free_from = 0u64;
            for run in runs {
                let end = run.first.checked_add(run.count);
                let end = end.filter(|&end| end <= chunks && run.count > 0);
                let Some(end) = end.filter(|_| run.first >= free_from) else {
                    return Err(TreeProblem::Content("its chunks overlap or pass its end"));
                };
                let stored = (end << chunk_shift).min(blocks) - (run.first << chunk_shift);
                check_run(run.start, stored)?;
                free_from = end;
            }
            Ok(())
        }
    }
}

/// Block addresses have 32 bits, and the last one means "hole".
fn check_run(start: u32, blocks: u64) -> Result<(), TreeProblem> {
    match u64::from(start).checked_add(blocks) {
        Some(end) if end <= u64::from(format::NULL_BLOCK) => Ok(()),
        _ if blocks == 0 => Ok(()),
        _ => Err(TreeProblem::Content("its blocks lie beyond 16 TiB")),
    }
}
