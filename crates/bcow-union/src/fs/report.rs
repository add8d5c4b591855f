//! Statistics: the answers for `statfs` and `bcow stats`.

use std::sync::atomic::Ordering;

use rustix::io::Errno;

use super::UnionFs;
use super::types::Figures;
use crate::blocks::BLOCK_BYTES;
use crate::options::SyncPolicy;
use crate::partial::{PartialStatus, Statistics};

/// Counters and state of a union.
#[derive(Debug, Clone)]
pub struct Report {
    /// Path of the upper.
    pub upper: String,
    /// The user's name for the image.
    pub image: String,
    /// When copy-ups are made durable.
    pub sync: SyncPolicy,
    /// Inodes that the kernel holds.
    pub nodes: u64,
    /// Limit of stored bytes.
    pub limit_bytes: Option<u64>,
    /// Counted bytes; 0 without a limit, as they are not counted then.
    pub counted_bytes: u64,
    pub limit_inodes: Option<u64>,
    /// Counted inodes; 0 without a limit, as they are not counted then.
    pub counted_inodes: u64,
    /// Files that were copied up without their bytes.
    pub copied_metadata: u64,
    /// Files that were copied whole.
    pub copied_whole: u64,
    /// Number of open partial files.
    pub open_partials: u64,
    /// Blocks of the open partial files together.
    pub blocks: PartialStatus,
    /// Counters of all partial files since the mount.
    pub partials: Statistics,
}

impl UnionFs {
    /// Figures of the whole file system: the host's, reduced to the limits if there are any.
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
        let limits = self.account.limits();
        if let Some(limit) = limits.bytes {
            let left = self.account.left().unwrap_or(0) / BLOCK_BYTES;
            figures.blocks = limit / BLOCK_BYTES;
            figures.free = figures.free.min(left);
            figures.available = figures.available.min(left);
        }
        if let (Some(limit), Some(left)) = (limits.inodes, self.account.inodes_left()) {
            // A host without an inode count, as btrfs, reports 0.
            figures.inodes_free = match figures.inodes {
                0 => left,
                _ => figures.inodes_free.min(left),
            };
            figures.inodes = limit;
        }
        Ok(figures)
    }

    /// Gives the counters and the state of this union.
    pub fn report(&self) -> Report {
        let mut open = 0;
        let mut blocks = PartialStatus::default();
        for (partial, _) in self.open_partials.all() {
            open += 1;
            // A damaged partial file has no status.
            if let Ok(status) = partial.status() {
                blocks.blocks += status.blocks;
                blocks.present += status.present;
                blocks.incomplete += status.incomplete;
                blocks.stored_bytes += status.stored_bytes;
            }
        }
        Report {
            upper: self.upper.path().display().to_string(),
            image: self.upper.record().image_name.clone(),
            sync: self.options.sync,
            nodes: self.table.len() as u64,
            limit_bytes: self.account.limits().bytes,
            counted_bytes: self.account.used(),
            limit_inodes: self.account.limits().inodes,
            counted_inodes: self.account.inodes(),
            copied_metadata: self.copied_metadata.load(Ordering::Relaxed),
            copied_whole: self.copied_whole.load(Ordering::Relaxed),
            open_partials: open,
            blocks,
            partials: self.partials.statistics(),
        }
    }
}
