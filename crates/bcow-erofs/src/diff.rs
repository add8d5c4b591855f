//! Compares two file systems path by path.
//!
//! The comparison walks both trees in parallel. Its memory grows with the number of directories and
//! of inodes with several names, not with the number of files.

use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};

use crate::overlay::is_whiteout;
use crate::reader::{
    Child, Children, ErofsError, ExtentSource, FileExtent, FileType, Filesystem, Inode, MAX_DEPTH,
    Nid,
};

/// Bytes of content per comparison.
const PIECE: u64 = 256 << 10;

/// The properties to compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Compare {
    /// Everything: metadata and content.
    #[default]
    All,
    /// Types and metadata, as shown by stat, readlink and listxattr: permissions, owners,
    /// modification times, sizes, device numbers, link targets, extended attributes, and which
    /// names share an inode. Content is not read.
    Metadata,
    /// Types, file content, link targets and device numbers.
    Content,
}

/// Options of a comparison.
#[derive(Default)]
pub struct DiffOptions<'k> {
    /// The properties to compare.
    pub compare: Compare,
    /// Returns, without reading, the number of bytes that are equal from two device offsets (first
    /// tree, second tree) on, up to a length; 0 if unknown. `None` reads everything.
    pub known_same: Option<&'k KnownSame<'k>>,
}

/// See [`DiffOptions::known_same`].
pub type KnownSame<'k> = dyn Fn(u64, u64, u64) -> u64 + 'k;

/// One of the two trees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The first tree.
    A,
    /// The second tree.
    B,
}

/// A tree cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {}", crate::tree::display_path(path))]
pub struct DiffError {
    /// The tree that cannot be read.
    pub side: Side,
    /// The path from the root; begins with a slash.
    pub path: Vec<u8>,
    /// The cause.
    #[source]
    pub source: ErofsError,
}

/// The reason why a comparison ended early.
#[derive(Debug)]
pub enum Stopped<E> {
    /// A tree cannot be read.
    Tree(DiffError),
    /// The caller's function failed.
    Caller(E),
}

impl<E> From<DiffError> for Stopped<E> {
    fn from(error: DiffError) -> Self {
        Stopped::Tree(error)
    }
}

/// A difference at a path. Inodes are in the order first tree, second tree.
#[derive(Debug)]
pub enum Change<'c> {
    /// Only the second tree has the path.
    Added(&'c Inode),
    /// Only the first tree has the path.
    Removed(&'c Inode),
    /// The types differ; no other properties were compared.
    Retyped(&'c Inode, &'c Inode),
    /// The types are equal and other properties differ.
    Changed(&'c Inode, &'c Inode, &'c Differences),
}

/// The differences of two inodes of one type.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Differences {
    /// The permission bits differ.
    pub permissions: bool,
    /// The users differ.
    pub uid: bool,
    /// The groups differ.
    pub gid: bool,
    /// The sizes differ (regular files only).
    pub size: bool,
    /// The modification times differ.
    pub mtime: bool,
    /// The device numbers differ.
    pub device: bool,
    /// The link targets differ: the first's and the second's target.
    pub target: Option<(Vec<u8>, Vec<u8>)>,
    /// The extended attributes that differ, by name.
    pub xattrs: Vec<(Vec<u8>, XattrChange)>,
    /// The inodes have different sets or numbers of names.
    pub links: bool,
    /// The contents differ.
    pub content: Option<ContentDifference>,
}

/// The difference of an extended attribute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum XattrChange {
    /// Only the second inode has it.
    Added,
    /// Only the first inode has it.
    Removed,
    /// The values differ.
    Changed,
}

/// The difference of two contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContentDifference {
    /// The lengths differ; no content was read.
    Length,
    /// Byte offset of the first difference.
    At(u64),
}

/// Called for each path at which the trees differ; an error ends the comparison.
pub type Each<'f, E> = dyn FnMut(&[u8], Change<'_>) -> Result<(), E> + 'f;

/// Numbers of paths by their difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DiffSummary {
    /// Paths of the second tree only.
    pub added: u64,
    /// Paths of the first tree only.
    pub removed: u64,
    /// Paths that differ, with the same type in both trees.
    pub changed: u64,
    /// Paths whose types differ.
    pub retyped: u64,
    /// Paths without a difference.
    pub same: u64,
    /// Bytes of content that were read from each tree to compare them.
    pub compared_bytes: u64,
}

impl DiffSummary {
    /// Whether the trees are equal.
    pub fn is_same(&self) -> bool {
        self.added == 0 && self.removed == 0 && self.changed == 0 && self.retyped == 0
    }
}

/// Calls `each` for every path at which the trees differ, in the order of names, a directory before
/// its contents. The calls include all paths below a directory that only one tree has. Paths begin
/// with a slash; the root is `/`.
pub fn diff<'d, E>(
    a: &'d Filesystem,
    b: &'d Filesystem,
    options: &'d DiffOptions<'d>,
    each: &'d mut Each<'d, E>,
) -> Result<DiffSummary, Stopped<E>> {
    let mut differ = Differ {
        trees: [Tree::new(a), Tree::new(b)],
        options,
        each,
        path: b"/".to_vec(),
        visited: 0,
        summary: DiffSummary::default(),
        buffers: [Vec::new(), Vec::new()],
    };
    differ.run()?;
    Ok(differ.summary)
}

const A: usize = 0;
const B: usize = 1;

struct Differ<'d, E> {
    trees: [Tree<'d>; 2],
    options: &'d DiffOptions<'d>,
    each: &'d mut Each<'d, E>,
    path: Vec<u8>,
    /// Number of the current path, counted from the start of the walk.
    visited: u64,
    summary: DiffSummary,
    buffers: [Vec<u8>; 2],
}

struct Tree<'d> {
    fs: &'d Filesystem,
    /// The directories that were visited.
    seen: HashSet<Nid>,
    /// The first path of each inode with several names, by the number of the visit.
    first_visits: HashMap<Nid, FirstVisit>,
}

struct FirstVisit {
    number: u64,
    /// For an inode of the first tree: the inode of the second tree that it was compared with last,
    /// and the result.
    compared: Option<(Nid, Option<ContentDifference>)>,
}

/// The directories at one level of the walk, in one tree or both.
struct Level {
    children: [Option<Ordered>; 2],
    /// Length of the directory's path in bytes.
    path_bytes: usize,
}

/// A directory's children, and the next one.
struct Ordered {
    children: Children,
    next: Option<Child>,
}

impl<'d> Tree<'d> {
    fn new(fs: &'d Filesystem) -> Self {
        Tree {
            fs,
            seen: HashSet::new(),
            first_visits: HashMap::new(),
        }
    }

    fn enter(&mut self, directory: &Inode) -> Result<Ordered, ErofsError> {
        if !self.seen.insert(directory.nid) {
            return Err(ErofsError::DirectoryTwice { nid: directory.nid });
        }
        let mut ordered = Ordered {
            children: Children::sorted(*directory),
            next: None,
        };
        ordered.advance(self.fs)?;
        Ok(ordered)
    }
}

impl Ordered {
    /// Returns the next child and advances.
    fn advance(&mut self, fs: &Filesystem) -> Result<Option<Child>, ErofsError> {
        let next = self.children.next(fs)?;
        Ok(std::mem::replace(&mut self.next, next))
    }
}

fn side(index: usize) -> Side {
    match index {
        A => Side::A,
        _ => Side::B,
    }
}

impl<E> Differ<'_, E> {
    fn run(&mut self) -> Result<(), Stopped<E>> {
        let mut roots = [None; 2];
        for (index, root) in roots.iter_mut().enumerate() {
            let fs = self.trees[index].fs;
            *root = Some(self.at(index, fs.inode(fs.root()))?);
        }
        let mut levels = Vec::from_iter(self.visit(roots)?);
        while let Some(level) = levels.last_mut() {
            self.path.truncate(level.path_bytes);
            let Some(children) = self.step(level)? else {
                levels.pop();
                continue;
            };
            if let Some(level) = self.visit(children)? {
                if levels.len() == MAX_DEPTH {
                    let index = level.children.iter().position(Option::is_some);
                    let too_deep = ErofsError::TooDeep { limit: MAX_DEPTH };
                    return Err(self.read_error(index.unwrap_or(A), too_deep).into());
                }
                levels.push(level);
            }
        }
        Ok(())
    }

    /// Advances to the next name in one directory or both; `None` at the end.
    fn step(&mut self, level: &mut Level) -> Result<Option<[Option<Inode>; 2]>, DiffError> {
        let [a, b] = level
            .children
            .each_ref()
            .map(|ordered| ordered.as_ref().and_then(|o| o.next.as_ref()));
        let order = match (a, b) {
            (None, None) => return Ok(None),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some(a), Some(b)) => a.name.cmp(&b.name),
        };
        let takes = [order != Ordering::Greater, order != Ordering::Less];
        let mut inodes = [None; 2];
        let mut is_named = false;
        for index in [A, B] {
            let Some(ordered) = level.children[index].as_mut().filter(|_| takes[index]) else {
                continue;
            };
            let fs = self.trees[index].fs;
            let taken = ordered.advance(fs);
            let Some(child) = self.at(index, taken)? else {
                continue;
            };
            if !is_named {
                if !self.path.ends_with(b"/") {
                    self.path.push(b'/');
                }
                self.path.extend_from_slice(&child.name);
                is_named = true;
            }
            inodes[index] = Some(self.at(index, fs.inode(child.nid))?);
        }
        Ok(Some(inodes))
    }

    /// Compares the inodes at the current path; returns the directories to enter.
    fn visit(&mut self, inodes: [Option<Inode>; 2]) -> Result<Option<Level>, Stopped<E>> {
        self.visited += 1;
        let firsts = [A, B].map(|index| self.first_visit(index, inodes[index].as_ref()));
        match &inodes {
            [Some(a), Some(b)] => self.both(a, b, firsts[A] != firsts[B])?,
            [Some(a), None] => {
                self.summary.removed += 1;
                self.report(Change::Removed(a))?;
            }
            [None, Some(b)] => {
                self.summary.added += 1;
                self.report(Change::Added(b))?;
            }
            [None, None] => {}
        }
        let mut level = Level {
            children: [None, None],
            path_bytes: self.path.len(),
        };
        for index in [A, B] {
            if let Some(inode) = &inodes[index]
                && inode.kind == FileType::Directory
            {
                let entered = self.trees[index].enter(inode);
                level.children[index] = Some(self.at(index, entered)?);
            }
        }
        Ok(level.children.iter().any(Option::is_some).then_some(level))
    }

    /// The number of the first path of this inode. If this number is equal in both trees for every
    /// path, both trees have the same groups of hardlinks.
    fn first_visit(&mut self, index: usize, inode: Option<&Inode>) -> u64 {
        match inode {
            Some(inode) if inode.kind != FileType::Directory && inode.nlink > 1 => {
                let visits = &mut self.trees[index].first_visits;
                let first = visits.entry(inode.nid).or_insert(FirstVisit {
                    number: self.visited,
                    compared: None,
                });
                first.number
            }
            _ => self.visited,
        }
    }

    fn both(&mut self, a: &Inode, b: &Inode, links: bool) -> Result<(), Stopped<E>> {
        if a.kind != b.kind || self.whiteout(A, a)? != self.whiteout(B, b)? {
            self.summary.retyped += 1;
            return self.report(Change::Retyped(a, b));
        }
        let what = self.differences(a, b, links)?;
        if what == Differences::default() {
            self.summary.same += 1;
            return Ok(());
        }
        self.summary.changed += 1;
        self.report(Change::Changed(a, b, &what))
    }

    fn whiteout(&self, index: usize, inode: &Inode) -> Result<bool, DiffError> {
        self.at(index, is_whiteout(self.trees[index].fs, inode))
    }

    fn differences(&mut self, a: &Inode, b: &Inode, links: bool) -> Result<Differences, DiffError> {
        let compare = self.options.compare;
        let mut what = Differences {
            device: a.rdev != b.rdev,
            ..Differences::default()
        };
        if a.kind == FileType::Symlink {
            let targets = (self.target(A, a)?, self.target(B, b)?);
            what.target = (targets.0 != targets.1).then_some(targets);
        }
        let is_file = a.kind == FileType::Regular;
        if compare != Compare::Content {
            what.permissions = a.permissions != b.permissions;
            what.uid = a.uid != b.uid;
            what.gid = a.gid != b.gid;
            what.size = is_file && a.size != b.size;
            what.mtime = a.mtime != b.mtime;
            what.links = links || (a.kind != FileType::Directory && a.nlink != b.nlink);
            what.xattrs = self.xattrs(a, b)?;
        }
        if compare != Compare::Metadata && is_file {
            what.content = self.content(a, b)?;
        }
        Ok(what)
    }

    fn target(&self, index: usize, link: &Inode) -> Result<Vec<u8>, DiffError> {
        self.at(index, self.trees[index].fs.read_link(link))
    }

    fn xattrs(&self, a: &Inode, b: &Inode) -> Result<Vec<(Vec<u8>, XattrChange)>, DiffError> {
        if !a.has_xattrs() && !b.has_xattrs() {
            return Ok(Vec::new());
        }
        let mut lists = [Vec::new(), Vec::new()];
        for (index, inode) in [(A, a), (B, b)] {
            lists[index] = self.at(index, self.trees[index].fs.xattrs(inode))?;
            lists[index].sort();
        }
        let mut changes = Vec::new();
        let [mut a, mut b] = lists.map(|list| list.into_iter().peekable());
        loop {
            let order = match (a.peek(), b.peek()) {
                (None, None) => return Ok(changes),
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                (Some((a, _)), Some((b, _))) => a.cmp(b),
            };
            let before = a.next_if(|_| order != Ordering::Greater);
            let after = b.next_if(|_| order != Ordering::Less);
            match (before, after) {
                (Some(before), Some(after)) if before == after => {}
                (Some((name, _)), Some(_)) => changes.push((name, XattrChange::Changed)),
                (Some((name, _)), None) => changes.push((name, XattrChange::Removed)),
                (None, Some((name, _))) => changes.push((name, XattrChange::Added)),
                (None, None) => {}
            }
        }
    }

    fn content(&mut self, a: &Inode, b: &Inode) -> Result<Option<ContentDifference>, DiffError> {
        if a.size != b.size {
            return Ok(Some(ContentDifference::Length));
        }
        // Use the result of an earlier name, because a comparison reads the whole file.
        if let Some(first) = self.trees[A].first_visits.get(&a.nid)
            && let Some((nid, result)) = first.compared
            && nid == b.nid
        {
            return Ok(result);
        }
        let result = self.compare_bytes(a, b)?.map(ContentDifference::At);
        if let Some(first) = self.trees[A].first_visits.get_mut(&a.nid) {
            first.compared = Some((b.nid, result));
        }
        Ok(result)
    }

    /// The first byte that differs in two files of equal size.
    fn compare_bytes(&mut self, a: &Inode, b: &Inode) -> Result<Option<u64>, DiffError> {
        let trees = [self.trees[A].fs, self.trees[B].fs];
        let mut extents = [trees[A].extents(a, 0), trees[B].extents(b, 0)];
        let mut current: [Option<FileExtent>; 2] = [None; 2];
        let mut at = 0;
        while at < a.size {
            let mut length = a.size - at;
            let mut sources = [None; 2];
            for index in [A, B] {
                if current[index].is_none_or(|extent| extent.offset + extent.length <= at) {
                    let next = extents[index].next().transpose();
                    current[index] = self.at(index, next)?;
                }
                if let Some(extent) = current[index] {
                    let passed = at - extent.offset;
                    length = length.min(extent.length - passed);
                    if let ExtentSource::Device { offset } = extent.source {
                        sources[index] = Some(offset + passed);
                    }
                }
            }
            if let ([Some(a), Some(b)], Some(known_same)) = (sources, self.options.known_same) {
                let known = known_same(a, b, length).min(length);
                if known > 0 {
                    at += known;
                    continue;
                }
            }
            if sources == [None; 2] {
                at += length;
                continue;
            }
            let length = length.min(PIECE) as usize;
            for index in [A, B] {
                let mut buffer = std::mem::take(&mut self.buffers[index]);
                buffer.resize(length, 0);
                let read = match sources[index] {
                    Some(offset) => trees[index].device_read(offset, &mut buffer),
                    None => {
                        buffer.fill(0);
                        Ok(())
                    }
                };
                self.buffers[index] = buffer;
                self.at(index, read)?;
            }
            self.summary.compared_bytes += length as u64;
            let [here, there] = &self.buffers;
            if here != there {
                let same = here.iter().zip(there).take_while(|(a, b)| a == b).count();
                return Ok(Some(at + same as u64));
            }
            at += length as u64;
        }
        Ok(None)
    }

    fn report(&mut self, change: Change<'_>) -> Result<(), Stopped<E>> {
        (self.each)(&self.path, change).map_err(Stopped::Caller)
    }

    fn at<T>(&self, index: usize, result: Result<T, ErofsError>) -> Result<T, DiffError> {
        result.map_err(|source| self.read_error(index, source))
    }

    fn read_error(&self, index: usize, source: ErofsError) -> DiffError {
        DiffError {
            side: side(index),
            path: self.path.clone(),
            source,
        }
    }
}
