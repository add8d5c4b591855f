//! Directory listings.
//!
//! A listing takes all names when it is read from the start, and does not change while names come
//! and go. So each name that exists during the whole listing appears once, as POSIX requires.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bcow_erofs::reader::{FileType, Nid};
use parking_lot::Mutex;
use rustix::fs::Dir;
use rustix::io::Errno;

use super::lookup::UPPER_ONLY;
use super::nodes::{HostPlace, Node};
use super::types::{DirectoryEntry, EntryPlus};
use super::upper_entry::UpperEntry;
use super::{UnionFs, host};
use crate::node::NodeId;
use crate::upper::is_whiteout;

/// Open directories, by handle.
#[derive(Debug)]
pub(super) struct Listings {
    next: AtomicU64,
    /// Whether another process may continue a listing: then its cookies depend on the names only.
    can_be_taken_over: bool,
    /// Held to find, add or remove a listing.
    open: Mutex<HashMap<u64, Arc<Listing>>>,
}

#[derive(Debug)]
struct Listing {
    node: Arc<Node>,
    names: Mutex<Option<Arc<Vec<Name>>>>,
}

impl Listing {
    fn new(node: Arc<Node>) -> Arc<Self> {
        let names = Mutex::default();
        Arc::new(Listing { node, names })
    }
}

/// A name at the time when the listing was taken.
#[derive(Debug)]
struct Name {
    name: Box<[u8]>,
    from: From,
    /// The cookie with which the listing continues after this name. Cookies increase.
    next_cookie: u64,
}

impl Listings {
    /// `generation` is the number of processes that served the mount before, if another process may
    /// take it over.
    pub(super) fn new(generation: Option<u64>) -> Self {
        /// More handles than a process opens.
        const HANDLES_BITS: u32 = 40;
        Listings {
            // A handle of an earlier process is not one of this process.
            next: AtomicU64::new(generation.unwrap_or(0) << HANDLES_BITS),
            can_be_taken_over: generation.is_some(),
            open: Mutex::default(),
        }
    }
}

/// The source of a name.
#[derive(Debug, Clone, Copy)]
pub(super) enum From {
    /// `.` or `..`, with the node that it names.
    Dot(NodeId),
    /// The upper, with the host's type and inode number.
    UpperEntry { kind: FileType, inode: u64 },
    /// The image.
    Below { nid: Nid, kind: FileType },
}

impl UnionFs {
    /// Opens a directory for listing and gives the handle; `ENOTDIR` for other types.
    pub fn open_directory(&self, id: NodeId) -> Result<u64, Errno> {
        let node = self.node(id)?;
        if !node.is_directory() {
            return Err(Errno::NOTDIR);
        }
        let handle = self.listings.next.fetch_add(1, Ordering::Relaxed) + 1;
        self.listings.open.lock().insert(handle, Listing::new(node));
        Ok(handle)
    }

    pub fn close_directory(&self, handle: u64) {
        let closed = self.listings.open.lock().remove(&handle);
        drop(closed);
    }

    /// Calls `each` for the entries from `cookie` on, including `.` and `..`, until it breaks.
    /// Cookie 0 is the start; other cookies come from [`DirectoryEntry::next_cookie`].
    ///
    /// A handle that this process has not given is of a process before; `id` is its directory.
    pub fn read_directory(
        &self,
        id: NodeId,
        handle: u64,
        cookie: u64,
        each: &mut dyn FnMut(DirectoryEntry<'_>) -> ControlFlow<()>,
    ) -> Result<(), Errno> {
        let (directory, names) = self.names_from(id, handle, cookie)?;
        let above = self.upper_directory(&directory)?;
        for name in after(&names, cookie) {
            let (node, kind) = self.identify(&directory, above.as_deref(), name);
            let flow = each(DirectoryEntry {
                name: &name.name,
                node,
                kind,
                next_cookie: name.next_cookie,
            });
            if flow.is_break() {
                break;
            }
        }
        Ok(())
    }

    /// As [`UnionFs::read_directory`], with attributes. Counts a reference for each entry that
    /// `each` takes, except `.` and `..`; also for a damaged one if its node exists already. Names
    /// that were removed meanwhile are left out.
    pub fn read_directory_plus(
        &self,
        id: NodeId,
        handle: u64,
        cookie: u64,
        each: &mut dyn FnMut(EntryPlus<'_>) -> ControlFlow<()>,
    ) -> Result<(), Errno> {
        let (directory, names) = self.names_from(id, handle, cookie)?;
        for name in after(&names, cookie) {
            let next_cookie = name.next_cookie;
            let is_dot = matches!(name.from, From::Dot(_));
            let (node, attributes, kind) = match self.find(&directory, &name.name) {
                Ok(Some(node)) => {
                    let attributes = self.attributes_of(&node).map_err(|_| node.id);
                    let kind = node.kind;
                    (Some(node), attributes, kind)
                }
                Ok(None) => continue,
                // A damaged entry must not hide the other entries. A lookup of its name gets the
                // error.
                Err(_) => {
                    let (id, kind) = self.identify(&directory, None, name);
                    (self.table.get(id), Err(id), kind)
                }
            };
            // Counted before the call: the kernel may use the entry before this function returns.
            // Counted for a damaged entry too: the kernel makes no inode of it, but sends a forget.
            let held = node.filter(|_| !is_dot);
            if let Some(node) = &held {
                self.table.hold(node, 1);
            }
            let flow = each(EntryPlus {
                name: &name.name,
                attributes,
                kind,
                next_cookie,
            });
            if flow.is_break() {
                if let Some(id) = held.map(|node| node.id) {
                    self.take_back(id, 1);
                }
                break;
            }
        }
        self.limit_descriptors();
        Ok(())
    }

    /// The directory of a handle and its names. A read from the start takes the names again.
    fn names_from(
        &self,
        id: NodeId,
        handle: u64,
        cookie: u64,
    ) -> Result<(Arc<Node>, Arc<Vec<Name>>), Errno> {
        let listing = self.listings.open.lock().get(&handle).cloned();
        let listing = match listing {
            Some(listing) => listing,
            // A process before this one gave the handle for the directory `id`.
            None if self.listings.can_be_taken_over => {
                let listing = Listing::new(self.node(id)?);
                let mut open = self.listings.open.lock();
                Arc::clone(open.entry(handle).or_insert(listing))
            }
            None => return Err(Errno::BADF),
        };
        let mut names = listing.names.lock();
        let taken = match &*names {
            Some(taken) if cookie > 0 => Arc::clone(taken),
            _ => Arc::new(self.take_names(&listing.node)?),
        };
        *names = Some(Arc::clone(&taken));
        drop(names);
        Ok((Arc::clone(&listing.node), taken))
    }

    fn take_names(&self, node: &Arc<Node>) -> Result<Vec<Name>, Errno> {
        let parent = match node.place() {
            HostPlace::At { parent, .. } => parent.id,
            HostPlace::Root | HostPlace::Nowhere => node.id,
        };
        let named = |name: &[u8], from| Name {
            name: name.into(),
            from,
            next_cookie: 0,
        };
        let (dot, dots) = (From::Dot(node.id), From::Dot(parent));
        let mut names = vec![named(b".", dot), named(b"..", dots)];
        if !matches!(node.place(), HostPlace::Nowhere) {
            self.each_name(node, &mut |name, from| {
                names.push(named(name, from));
                ControlFlow::Continue(())
            })?;
        }
        if self.listings.can_be_taken_over {
            number_by_names(&mut names)
        } else {
            number(&mut names)
        }
        Ok(names)
    }

    /// Inode number and type of a name. A copied-up object keeps its inode number of the image,
    /// which its marks in the upper's directory `above` give.
    fn identify(&self, directory: &Node, above: Option<&File>, name: &Name) -> (NodeId, FileType) {
        match name.from {
            From::Dot(node) => (node, FileType::Directory),
            From::Below { nid, kind } => (self.image.node(nid), kind),
            From::UpperEntry { kind, inode } => {
                if let Some(above) = above
                    && let Ok(UpperEntry::Object(found)) = self.lookup_upper(above, &name.name)
                {
                    return match self.lower_of(directory, &name.name, &found) {
                        Ok(Some(nid)) => (self.image.node(nid), found.kind),
                        _ => (NodeId(UPPER_ONLY | inode), found.kind),
                    };
                }
                (NodeId(UPPER_ONLY | inode), kind)
            }
        }
    }

    /// Calls `each` for every visible name of the directory, except `.` and `..`.
    pub(super) fn each_name(
        &self,
        node: &Node,
        each: &mut dyn FnMut(&[u8], From) -> ControlFlow<()>,
    ) -> Result<(), Errno> {
        // Names that hide the image's: whiteouts, and names that the upper has too.
        let mut covered: HashSet<Box<[u8]>> = HashSet::new();
        if let Some(directory) = self.upper_directory(node)? {
            let own = host::open_directory(directory.as_fd(), b".")?;
            for entry in Dir::new(own)? {
                let entry = entry?;
                let name = entry.file_name().to_bytes();
                if matches!(name, b"." | b"..") || self.is_reserved(node, name) {
                    continue;
                }
                let kind = match entry.file_type() {
                    rustix::fs::FileType::CharacterDevice | rustix::fs::FileType::Unknown => {
                        match host::stat_at(directory.as_fd(), name)? {
                            None => continue,
                            Some(stat) if is_whiteout(&stat) => None,
                            Some(stat) => Some(host::kind_of(stat.st_mode)),
                        }
                    }
                    kind => Some(host::kind_of(kind.as_raw_mode())),
                };
                if node.lower.is_some() {
                    covered.insert(name.into());
                }
                if let Some(kind) = kind {
                    let from = From::UpperEntry {
                        kind,
                        inode: entry.ino(),
                    };
                    if each(name, from).is_break() {
                        return Ok(());
                    }
                }
            }
        }
        let Some(directory) = node.lower else {
            return Ok(());
        };
        let directory = self.image.inode(directory)?;
        self.image.read_dir(&directory, 0, &mut |entry| {
            let name = entry.name;
            let is_dot = matches!(name, b"." | b"..");
            if is_dot || covered.contains(name) || self.is_reserved(node, name) {
                return ControlFlow::Continue(());
            }
            let (nid, kind) = (entry.nid, entry.kind);
            each(name, From::Below { nid, kind })
        })
    }
}

fn after(names: &[Name], cookie: u64) -> &[Name] {
    &names[names.partition_point(|name| name.next_cookie <= cookie)..]
}

/// Cookies in the order of the names.
fn number(names: &mut [Name]) {
    for (cookie, name) in (1..).zip(names) {
        name.next_cookie = cookie;
    }
}

/// Cookies that are the same in each process: hash values of the names. The names are in the order
/// of the cookies, `.` and `..` first.
fn number_by_names(names: &mut [Name]) {
    const DOTS: usize = 2;
    let (dots, others) = names.split_at_mut(DOTS.min(names.len()));
    number(dots);
    for name in &mut *others {
        name.next_cookie = hash(&name.name);
    }
    others.sort_unstable_by(|one, other| {
        (one.next_cookie, &one.name).cmp(&(other.next_cookie, &other.name))
    });
    let mut last = DOTS as u64;
    for name in others {
        // Names with equal values follow each other.
        name.next_cookie = name.next_cookie.max(last + 1);
        last = name.next_cookie;
    }
}

/// FNV-1a, of 62 bits: programs see the cookies as positive offsets.
fn hash(name: &[u8]) -> u64 {
    const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0100_0000_01b3;
    let value = name.iter().fold(BASIS, |value, &byte| {
        (value ^ u64::from(byte)).wrapping_mul(PRIME)
    });
    value >> 2
}
