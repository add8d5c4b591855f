//! Files of the image whose content the kernel reads from elsewhere.
//!
//! All mounts of an image that a process serves can share one page cache for the files that they
//! have not changed. The kernel then reads such a file by *passthrough*, from a *backing* that the
//! adapter registers once per node ([`super::backings`]). This module says which files that can be.
//!
//! The state of a file only goes from unchanged to changed, for as long as the kernel holds its
//! node. An open for writing counts as a change: the kernel writes a shared mapping back long after
//! the program has changed it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bcow_erofs::reader::{FileType, Nid};
use rustix::io::Errno;

use super::UnionFs;
use super::nodes::{Content, Node, Upper};
use crate::Seek;
use crate::image::Image;
use crate::ledger::Flags;
use crate::node::NodeId;

/// The smallest file that is shared, in bytes. A file that programs write after others have opened
/// it gets a second inode of the kernel, and locks and inotify watches belong to an inode of the
/// kernel. Files that programs use as locks are smaller than this. So are most configuration files,
/// and a small file saves little memory.
pub const SHARED_BYTES: u64 = 16 << 10;

/// Whether the kernel may read the content of a node from the image itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageContent {
    /// Never: it is not a regular file of the image, or the file is smaller than [`SHARED_BYTES`].
    Never,
    /// It has the content of this inode of the image.
    Unchanged(Nid),
    /// Not any more: the content was changed, or the file was opened for writing.
    Changed,
}

/// How long a node is kept for an open that was sent to another lookup. The program may be killed
/// meanwhile, so the open may never come.
const AWAITED_FOR: Duration = Duration::from_secs(30);

/// Nodes of files that a program is about to open for writing. The kernel may forget the node
/// before it looks the path up again, and the lookup must know of the first attempt.
#[derive(Debug, Default)]
pub(super) struct AwaitedOpens(HashMap<NodeId, (Arc<Node>, Instant)>);

impl UnionFs {
    /// The image. Its error log is that of the union.
    pub fn image(&self) -> &Arc<Image> {
        &self.image
    }

    /// The path of a node in the image, without the leading slash; `None` if the node has no name.
    pub fn image_path(&self, id: NodeId) -> Option<Vec<u8>> {
        let node = self.node(id).ok()?;
        self.lower_path(&node).ok()
    }

    /// Whether the kernel may read the content of a node from the image.
    pub fn image_content(&self, id: NodeId) -> Result<ImageContent, Errno> {
        let node = self.node(id)?;
        let Some(nid) = node.lower.filter(|_| node.kind == FileType::Regular) else {
            return Ok(ImageContent::Never);
        };
        let is_large = match node.is_large.get() {
            Some(&is_large) => is_large,
            None => {
                let is_large = self.image.inode(nid)?.size >= SHARED_BYTES;
                *node.is_large.get_or_init(|| is_large)
            }
        };
        Ok(match is_large {
            false => ImageContent::Never,
            true if is_unchanged(&node) => ImageContent::Unchanged(nid),
            true => ImageContent::Changed,
        })
    }

    /// The nodes of which the kernel may not read the content from the image any more.
    pub fn changed_images(&self) -> Vec<NodeId> {
        let mut found = Vec::new();
        self.table.for_each(&mut |node| {
            // The first condition needs no inode of the image.
            if !is_unchanged(node) && self.image_content(node.id) == Ok(ImageContent::Changed) {
                found.push(node.id);
            }
        });
        found
    }

    /// Records that a program opens the file for writing. The kernel will look its path up again.
    pub fn open_for_writing(&self, id: NodeId) -> Result<(), Errno> {
        let node = self.node(id)?;
        node.was_opened_for_writing.store(true, Ordering::Release);
        if let Some(entry) = node.entry() {
            entry.set_flags(Flags::OPENED_FOR_WRITING, true);
        }
        // No lookup finds a file without a name.
        if !node.is_removed.load(Ordering::Acquire) {
            self.await_open(node);
        }
        Ok(())
    }

    /// Keeps a node until [`UnionFs::end_awaited_open`].
    pub(super) fn await_open(&self, node: Arc<Node>) {
        let mut awaited = self.awaited_opens.lock();
        awaited.0.insert(node.id, (node, Instant::now()));
    }

    /// Ends the wait for opens that have not come in time.
    pub(super) fn drop_late_opens(&self) {
        let is_late = |_: &NodeId, (_, since): &mut (_, Instant)| since.elapsed() > AWAITED_FOR;
        let late: Vec<_> = self.awaited_opens.lock().0.extract_if(is_late).collect();
        for (_, (node, _)) in late {
            self.table.drop_node(node);
        }
    }

    /// The open that [`UnionFs::open_for_writing`] has announced has come, or cannot come.
    pub fn end_awaited_open(&self, id: NodeId) {
        let awaited = self.awaited_opens.lock().0.remove(&id);
        if let Some((node, _)) = awaited {
            self.table.drop_node(node);
        }
    }

    /// As [`UnionFs::seek`], in the file as the image has it.
    pub fn seek_in_image(&self, id: NodeId, offset: u64, seek: Seek) -> Result<u64, Errno> {
        let nid = self.node(id)?.lower.ok_or(Errno::INVAL)?;
        let inode = self.image.inode(nid)?;
        if offset >= inode.size {
            return Err(Errno::NXIO);
        }
        self.image.seek(&inode, offset, seek)?.ok_or(Errno::NXIO)
    }
}

fn is_unchanged(node: &Node) -> bool {
    if node.was_opened_for_writing.load(Ordering::Acquire) {
        return false;
    }
    let state = node.read_state();
    match (&state.content, &state.upper) {
        (Content::Lower, _) | (Content::Unknown, None) => true,
        // A copy of metadata.
        (
            Content::Unknown,
            Some(Upper {
                needs_image,
                is_partial,
                ..
            }),
        ) => *needs_image && !is_partial,
        (Content::Plain | Content::Partial(_), _) => false,
    }
}
