//! The file system of a writable mount, independent of the kernel's protocol (FUSE).
//!
//! Requests name nodes. There is no state per open file: a file that lost its last name lives until
//! the kernel forgets its node. Only the kernel (in tests, the code in its place) changes the tree.
//!
//! A request for a name goes through [`lookup`], which searches the upper first and the image
//! second. An object that exists only in the image is copied up before it changes ([`copy_up`]),
//! without its bytes. The first write copies the bytes, or makes a partial file ([`first_write`]).

mod acl;
mod attributes;
mod background;
mod backings;
mod charge;
mod content;
mod copy_up;
mod descriptors;
mod directory;
mod first_write;
mod host;
mod links;
mod lookup;
mod lower;
mod namespace;
mod nodes;
mod open_partials;
mod orphans;
mod plain;
mod recount;
mod remove;
mod rename;
mod report;
mod resent;
#[cfg(test)]
mod resent_tests;
mod restore;
mod room;
mod sharing;
mod snapshot;
mod sync;
#[cfg(test)]
mod takeover_tests;
#[cfg(test)]
mod tests;
mod times;
mod types;
mod unrestored;
mod upper_entry;
mod xattr;

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use bcow_erofs::reader::{FileType, Filesystem};
use parking_lot::Mutex;
use rustix::io::Errno;

pub use crate::upper::XattrMode;
pub use report::Report;
pub use resent::{New, RequestId};
pub use sharing::{ImageContent, SHARED_BYTES};
pub use types::{
    Allocate, Attributes, Caller, Changes, DirectoryEntry, EntryPlus, Figures, Privileges,
    RenameMode, SetTime, SyncScope, encode_device,
};

use crate::account::{Account, LimitReached};
use crate::errors::{ErrorKind, ErrorLog, Failure, escaped};
use crate::image::Image;
use crate::ledger::{Inherited, Ledger};
use crate::log::{self, Severity};
use crate::node::NodeId;
use crate::options::UnionOptions;
use crate::partial::{PartialError, Partials};
use crate::upper::{Before, HeldUpper, ImageName, Instance, Marks, UpperError};
use directory::Listings;
use nodes::{HostPlace, Node, NodeState, NodeTable, Upper};

/// The image below a union.
pub struct LowerImage {
    /// The file system in the image.
    pub fs: Arc<Filesystem>,
    /// Identity of the image: no two images have the same one.
    pub identity: [u8; 32],
    /// The user's name for the image.
    pub name: String,
}

/// A mounted union.
pub struct UnionFs {
    image: Arc<Image>,
    upper: Instance,
    table: NodeTable,
    root: Arc<Node>,
    partials: Partials,
    open_partials: open_partials::OpenPartials,
    account: Arc<Account>,
    options: UnionOptions,
    listings: Listings,
    pending_frees: room::PendingFrees,
    /// Files that were copied up whole and whose flush is pending: one sync makes them all durable.
    /// The lock is held only to add or to take files.
    batch: Mutex<Vec<Arc<Node>>>,
    /// The upper, open for the `syncfs` of a batch. The host reports a write-back error once to
    /// each open file, also an error of another file. With a separate descriptor a batch does not
    /// take the report from [`UnionFs::sync_all`].
    batch_host: File,
    /// Upper bound of the number of descriptors that nodes hold, except during a recount:
    /// descriptors of dropped nodes count until the next recount.
    descriptors: AtomicUsize,
    /// Above both numbers, idle descriptors are closed. The second one is twice the number of those
    /// that could not be closed the last time.
    descriptors_share: descriptors::Share,
    descriptors_least: AtomicUsize,
    copied_whole: AtomicU64,
    copied_metadata: AtomicU64,
    /// Outcome of [`UnionFs::close`], once there is one. The lock is held while the union closes,
    /// and is acquired before all other locks.
    closed: Mutex<Option<Result<(), Errno>>>,
    background: Arc<background::Background>,
    /// What a process needs to take over the mount; `None` if none shall.
    ledger: Option<Arc<Ledger>>,
    /// Nodes that the kernel forgot, with partial files that have changes which no flush has
    /// recorded. The lock is held only to add or to take nodes. Always empty without a ledger.
    unrecorded: Mutex<Vec<Arc<Node>>>,
    /// Held while a change is restored; acquired after the lock of a node's state.
    unrestored: Mutex<unrestored::Unrestored>,
    /// The changes of names that processes before had begun, by the numbers of requests.
    begun: BTreeMap<u64, links::Begun>,
    /// Files that the kernel uses instead of nodes.
    backings: backings::Backings,
    /// The lock is held only to add or to take nodes.
    awaited_opens: Mutex<sharing::AwaitedOpens>,
}

impl UnionFs {
    /// Opens the union of an image and the upper at `upper`. An upper that belongs to no image yet
    /// becomes the image's. While the union holds the upper, `note` names the holder to processes
    /// that are refused.
    ///
    /// Fails if the upper belongs to another image or is in use, if its last volatile use did not
    /// end cleanly before a reboot, or if the host fails.
    pub fn open(
        lower: LowerImage,
        upper: &Path,
        note: &str,
        options: &UnionOptions,
    ) -> Result<Arc<UnionFs>, UpperError> {
        Self::open_with(lower, upper, note, options, None)
    }

    /// As [`UnionFs::open`], for a mount that another process served until it ended: the nodes that
    /// the kernel holds stay valid, and no completed write is lost. `ledger` is that of the other
    /// process ([`UnionFs::ledger`]), and `held` its upper ([`UnionFs::hold_upper`]), or `None` if
    /// it was not kept; the image and the options must be the same.
    pub fn take_over(
        lower: LowerImage,
        upper: &Path,
        note: &str,
        options: &UnionOptions,
        ledger: OwnedFd,
        held: Option<&HeldUpper>,
    ) -> Result<Arc<UnionFs>, UpperError> {
        let inherited = Ledger::read(ledger).map_err(|source| UpperError::Ledger { source })?;
        Self::open_with(lower, upper, note, options, Some((inherited, held)))
    }

    fn open_with(
        lower: LowerImage,
        upper: &Path,
        note: &str,
        options: &UnionOptions,
        before: Option<(Inherited, Option<&HeldUpper>)>,
    ) -> Result<Arc<UnionFs>, UpperError> {
        let image_name = ImageName {
            identity: lower.identity,
            name: &lower.name,
        };
        let (instance, inherited) = match before {
            None => (Instance::open(upper, image_name, note)?, None),
            Some((inherited, held)) => {
                let kept = orphans::PREFIX;
                let before = Before { held, kept };
                let instance = Instance::open_again(upper, image_name, note, &before)?;
                (instance, Some(inherited))
            }
        };
        let generation = inherited.as_ref().map_or(0, |before| before.generation + 1);
        let ledger = if options.can_be_taken_over {
            Some(Ledger::new(generation).map_err(|source| UpperError::Ledger { source })?)
        } else {
            None
        };
        let failed = |action| move |errno| UpperError::io(upper, action, errno);
        instance.refuse_after_volatile(options.sync)?;
        let descriptors_share = descriptors::Share::new();
        let account = Arc::new(Account::with_limits(options.limits()));
        instance.prepare_whiteouts();
        let partials = Partials::new(&instance, Arc::clone(&account), options)
            .map_err(failed("prepare it for partial files"))?;
        let options = on_host(options.clone(), partials.host_has_holes(), upper);
        let image = Arc::new(Image::new(lower.fs));
        let directory = host::open_directory(instance.root(), b".").map_err(failed("open it"))?;
        let root = root_node(&image, directory).map_err(failed("examine it"))?;
        let batch_host = host::open_directory(instance.root(), b".").map_err(failed("open it"))?;
        if let Some(ledger) = &ledger {
            partials.record_in(ledger);
        }
        let table = NodeTable::new(ledger.clone());
        let root = table.get_or_insert(NodeId::ROOT, || root);
        table.hold(&root, 1);
        let mut union = Arc::new(UnionFs {
            image,
            upper: instance,
            table,
            root,
            partials,
            open_partials: open_partials::OpenPartials::default(),
            account,
            options,
            listings: Listings::new(ledger.as_ref().map(|ledger| ledger.generation())),
            pending_frees: room::PendingFrees::default(),
            batch: Mutex::default(),
            batch_host,
            descriptors: AtomicUsize::new(0),
            descriptors_share,
            descriptors_least: AtomicUsize::new(0),
            copied_whole: AtomicU64::new(0),
            copied_metadata: AtomicU64::new(0),
            closed: Mutex::default(),
            background: Arc::default(),
            ledger,
            unrecorded: Mutex::default(),
            unrestored: Mutex::default(),
            begun: BTreeMap::new(),
            backings: backings::Backings::default(),
            awaited_opens: Mutex::default(),
        });
        union
            .complete_root()
            .map_err(failed("copy the image's root to it"))?;
        if let Some(inherited) = inherited {
            union
                .restore(inherited)
                .map_err(failed("find the files that the kernel uses"))?;
        }
        if union.account.is_limited() {
            recount::count_stored(&union.upper, &union.account)
                .map_err(failed("count its stored bytes"))?;
        }
        Ok(union)
    }

    /// The ledger for a process that takes over the mount ([`UnionFs::take_over`]); `None` without
    /// [`UnionOptions::can_be_taken_over`].
    pub fn ledger(&self) -> Option<BorrowedFd<'_>> {
        self.ledger.as_ref().map(|ledger| ledger.descriptor())
    }

    /// The upper, for a process that takes over the mount.
    pub fn hold_upper(&self) -> io::Result<HeldUpper> {
        self.upper.hold()
    }

    pub fn upper_path(&self) -> &Path {
        self.upper.path()
    }

    /// The node with this id, which the kernel must hold; `ESTALE` if the table does not have it.
    /// Each request calls this before it acquires a lock.
    fn node(&self, id: NodeId) -> Result<Arc<Node>, Errno> {
        self.limit_descriptors();
        if id == NodeId::ROOT {
            return Ok(Arc::clone(&self.root));
        }
        self.table.get(id).ok_or(Errno::STALE)
    }

    /// Looks up `name` in `parent`; `None` if there is no such name. Counts one reference to the
    /// node.
    pub fn lookup(&self, parent: NodeId, name: &[u8]) -> Result<Option<Attributes>, Errno> {
        let parent = self.node(parent)?;
        let found = self.find(&parent, name)?;
        found.map(|node| self.hold(&node)).transpose()
    }

    /// Releases `count` references that lookups and similar requests counted.
    pub fn forget(&self, id: NodeId, count: u64) {
        self.forget_and(id, count, || ());
    }

    /// As [`UnionFs::forget`]. Calls `forgotten` if these were the last references, before the
    /// space of a removed file is free.
    pub fn forget_and(&self, id: NodeId, count: u64, forgotten: impl FnOnce()) {
        if id == NodeId::ROOT {
            return;
        }
        let Some(node) = self.table.release(id, count) else {
            return;
        };
        forgotten();
        self.drop_forgotten(node);
    }

    /// Drops a node to which the kernel has no references.
    fn drop_forgotten(&self, node: Arc<Node>) {
        if !node.is_removed.load(Ordering::Acquire) {
            let Some(node) = self.keep_unrecorded(node) else {
                return;
            };
            // A process that takes over finds a file of the batch by this name, if by no other.
            if !node.read_state().is_in_batch() {
                self.drop_orphan(&node);
            }
            // The host may have stored metadata when it wrote back the data.
            self.measure_if_open(&node);
            return self.table.drop_node(node);
        }
        // No lookup finds it any more, and its space is to be freed.
        self.end_awaited_open(node.id);
        self.pending_frees.forgotten(|| {
            self.drop_orphan(&node);
            // A background thread may hold the node for a moment longer.
            node.release();
            self.leave_batch(&node);
            self.table.drop_node(node);
        });
    }

    /// Target of a symbolic link; `EINVAL` for other types.
    pub fn read_link(&self, id: NodeId) -> Result<Vec<u8>, Errno> {
        let node = self.node(id)?;
        if node.kind != FileType::Symlink {
            return Err(Errno::INVAL);
        }
        if let Some(target) = node.target.get() {
            return Ok(target.to_vec());
        }
        if node.read_state().upper.is_some() {
            let link = self.open_upper(&node, lookup::Access::Path)?;
            let target = rustix::fs::readlinkat(&*link, c"", Vec::new())?.into_bytes();
            let _ = node.target.set(target.as_slice().into());
            return Ok(target);
        }
        let inode = self.image.inode(node.lower.ok_or(Errno::STALE)?)?;
        self.image.read_link(&inode)
    }

    /// Reads the marks of an object in the upper. A damaged mark is logged and answered with `EIO`.
    fn read_marks(&self, file: &File) -> Result<Marks, Errno> {
        use crate::upper::{Attribute, ReadMarksError};
        let read = Marks::read(Attribute::Path(file.as_fd()), self.upper.namespace());
        let damage = match read {
            Ok(mut marks) => match marks.owner_damage.take() {
                Some(damage) if self.uses_override() => damage,
                _ => return Ok(marks),
            },
            Err(ReadMarksError::Io(errno)) => return Err(errno),
            Err(ReadMarksError::Mark(damage)) => damage,
        };
        self.damaged(b"", &damage.to_string());
        Err(Errno::IO)
    }

    /// The log that counts errors of the image and of the upper.
    pub fn errors(&self) -> &Arc<ErrorLog> {
        self.image.errors()
    }

    /// Counts and logs an error of the host that fails a request, for requests about which nothing
    /// else was reported. In the log line, `action` follows the word "cannot".
    pub fn request_failed(&self, id: NodeId, action: &'static str, errno: Errno) {
        let Some(kind) = ErrorKind::of_errno(errno) else {
            return;
        };
        let failure = Failure {
            kind,
            inode: id.0,
            action,
            offset: None,
            cause: &match kind {
                ErrorKind::NoSpace => self.why_no_space(errno),
                _ => std::io::Error::from(errno),
            },
        };
        let node = self.node(id).ok();
        self.errors().report(&failure, || {
            node.map_or_else(Vec::new, |node| self.shown_paths(&node))
        });
    }

    /// The cause of a request that found no space: a limit, or the host.
    fn why_no_space(&self, errno: Errno) -> std::io::Error {
        if let Some(limit) = LimitReached::take() {
            return std::io::Error::other(limit);
        }
        let shortage = match errno {
            Errno::DQUOT => "the quota is used up",
            _ => "no space or no inode is left",
        };
        let upper = self.upper.path().display();
        std::io::Error::other(format!("{shortage} on the file system of {upper}"))
    }

    /// Counts and logs damage of the upper.
    fn damaged(&self, name: &[u8], problem: &str) {
        self.note_problem(ErrorKind::UpperDamage, name, problem);
    }

    /// Counts and logs a failure of the host that fails no request.
    fn host_failed(&self, name: &[u8], what: &str, errno: Errno) {
        let kind = ErrorKind::of_errno(errno).unwrap_or(ErrorKind::UpperIo);
        self.note_problem(kind, name, &format!("{what}: {errno}"));
    }

    fn note_problem(&self, kind: ErrorKind, name: &[u8], problem: &str) {
        let upper = self.upper.path().display();
        let path = match name {
            [] => upper.to_string(),
            name => format!("{upper}: {}", escaped(name)),
        };
        self.errors().report_problem(kind, path, problem);
    }

    /// Paths of a node in the mount, for display. For a node without a name: its paths in the
    /// image. Empty if no path is known.
    fn shown_paths(&self, node: &Node) -> Vec<String> {
        match (path_of(node), node.lower) {
            (Some(path), _) => vec![escaped(&path)],
            (None, Some(nid)) => self.image.shown_paths(nid),
            (None, None) => Vec::new(),
        }
    }

    /// Counts and logs an error of a file's content, and gives the errno for the program.
    fn content_failed(&self, node: &Node, error: impl Into<PartialError>) -> Errno {
        let error = error.into();
        // Errors of the image have no kind here: the image has already reported them, with their
        // cause.
        if let Some(kind) = error.kind() {
            let failure = Failure {
                kind,
                inode: node.id.0,
                action: "use the partial file",
                offset: None,
                cause: &error,
            };
            self.errors().report(&failure, || self.shown_paths(node));
        }
        error.errno()
    }
}

/// The options on the file system of the upper. A partial file needs holes.
fn on_host(options: UnionOptions, has_holes: bool, upper: &Path) -> UnionOptions {
    if has_holes {
        return options;
    }
    log::log(
        Severity::Warning,
        &format!(
            "{}: its file system has no holes in files, so the first write to a file of the image \
             copies the whole file",
            upper.display()
        ),
    );
    UnionOptions {
        small_bytes: u64::MAX,
        ..options
    }
}

/// Path of a node in the mount; `None` if the node has no name any more.
fn path_of(node: &Node) -> Option<Vec<u8>> {
    let mut names = Vec::new();
    let mut place = node.place();
    while let HostPlace::At { parent, name } = place {
        names.push(name);
        place = parent.place();
    }
    if matches!(place, HostPlace::Nowhere) {
        return None;
    }
    let mut path = Vec::new();
    for name in names.iter().rev() {
        path.push(b'/');
        path.extend_from_slice(name);
    }
    if path.is_empty() {
        path.push(b'/');
    }
    Some(path)
}

fn root_node(image: &Image, directory: File) -> Result<Node, Errno> {
    let stat = rustix::fs::fstat(&directory)?;
    let node = Node::new(
        NodeId::ROOT,
        FileType::Directory,
        Some(image.root()),
        HostPlace::Root,
    );
    *node.write_state() = NodeState::of(Some(Upper::made(directory, stat.st_ino, true)));
    Ok(node)
}
