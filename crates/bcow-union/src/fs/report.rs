//! Figures: what `statfs` says, what the upper stores, what `bcow stats` shows.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::io::Errno;

use super::UnionFs;
use super::nodes::Node;
use super::types::Figures;
use crate::account::StoredBlocks;
use crate::options::SyncPolicy;
use crate::sketch::{SketchStatus, Statistics};

/// The unit in which space is counted.
const BLOCK_BYTES: u64 = 4096;

/// What a union did and holds.
#[derive(Debug, Clone)]
pub struct Report {
    /// Where the upper is.
    pub upper: String,
    /// How the user called the image.
    pub image: String,
    /// When copy-ups are made durable.
    pub sync: SyncPolicy,
    /// Inodes that the kernel holds.
    pub nodes: u64,
    /// Most bytes that may be stored.
    pub limit_bytes: Option<u64>,
    /// Bytes that are stored and counted: with a limit all, without one those of sketches.
    pub counted_bytes: u64,
    /// Most inodes that there may be.
    pub limit_inodes: Option<u64>,
    /// Inodes that there are; without a limit they are not counted.
    pub counted_inodes: u64,
    /// Files copied up without their bytes.
    pub copied_metadata: u64,
    /// Files copied whole.
    pub copied_whole: u64,
    /// Sketches that are open, and what they hold together.
    pub open_sketches: u64,
    /// Their blocks.
    pub blocks: SketchStatus,
    /// Counters of all sketches since the start.
    pub sketches: Statistics,
}

impl UnionFs {
    /// Figures of the whole file system: the host's, or those of the limit.
    pub fn statistics(&self) -> Result<Figures, Errno> {
        let host = rustix::fs::fstatvfs(self.upper.root())?;
        let unit = host.f_frsize.max(1);
        let in_blocks = |count: u64| count.saturating_mul(unit) / BLOCK_BYTES;
        let mut figures = Figures {
            block_bytes: BLOCK_BYTES as u32,
            blocks: in_blocks(host.f_blocks),
            free: in_blocks(host.f_bfree),
            available: in_blocks(host.f_bavail),
            inodes: host.f_files,
            inodes_free: host.f_ffree,
        };
        if let Some(limit) = self.account.limit() {
            let left = self.account.left().unwrap_or(0) / BLOCK_BYTES;
            figures.blocks = limit / BLOCK_BYTES;
            figures.free = figures.free.min(left);
            figures.available = figures.available.min(left);
        }
        if let (Some(limit), Some(left)) = (self.account.inode_limit(), self.account.inodes_left())
        {
            // A host that counts no inodes, as btrfs, says that there are none.
            figures.inodes_free = match figures.inodes {
                0 => left,
                _ => figures.inodes_free.min(left),
            };
            figures.inodes = limit;
        }
        Ok(figures)
    }

    /// What this union did and holds.
    pub fn report(&self) -> Report {
        let mut open = 0;
        let mut blocks = SketchStatus::default();
        for (sketch, _) in self.open_sketches.all() {
            open += 1;
            // One that is damaged has nothing to tell.
            if let Ok(status) = sketch.status() {
                blocks.blocks += status.blocks;
                blocks.present += status.present;
                blocks.in_transit += status.in_transit;
                blocks.stored_bytes += status.stored_bytes;
            }
        }
        Report {
            upper: self.upper.path().display().to_string(),
            image: self.upper.record().image_name.clone(),
            sync: self.options.sync,
            nodes: self.table.len() as u64,
            limit_bytes: self.account.limit(),
            counted_bytes: self.account.used(),
            limit_inodes: self.account.inode_limit(),
            counted_inodes: self.account.inodes(),
            copied_metadata: self.copied_metadata.load(Ordering::Relaxed),
            copied_whole: self.copied_whole.load(Ordering::Relaxed),
            open_sketches: open,
            blocks,
            sketches: self.sketches.statistics(),
        }
    }

    /// What a plain file stores.
    pub(super) fn stored<'n>(&self, node: &'n Node) -> &'n StoredBlocks {
        node.stored
            .get_or_init(|| StoredBlocks::new(Arc::clone(&self.account)))
    }
}
