//! Statistics: the answers for `statfs` and `bcow stats`.

use std::sync::atomic::Ordering;

use rustix::io::Errno;

use serde::{Deserialize, Serialize};

use super::UnionFs;
use super::types::Figures;
use crate::account::Limits;
use crate::blocks::BLOCK_BYTES;
use crate::options::SyncPolicy;
use crate::partial::PartialFigures;

/// Counters and state of a union. A part of the schema `bcow.stats/1`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The directory of the upper.
    pub path: String,
    /// When bcow makes copy-ups durable: `strict`, `batch=N` or `volatile`.
    pub sync: String,
    /// Limit of the stored bytes.
    pub limit_bytes: Option<u64>,
    /// Bytes stored; not counted without a limit.
    pub stored_bytes: Option<u64>,
    /// Limit of the inodes in the upper. Also `None` from versions that do not report it.
    #[serde(default)]
    pub limit_inodes: Option<u64>,
    /// Inodes in the upper; not counted without a limit.
    #[serde(default)]
    pub stored_inodes: Option<u64>,
    /// Inodes that the kernel knows.
    pub nodes: u64,
    /// Files of the image that were copied up without data, since the mount.
    pub copied_metadata: u64,
    /// Files of the image that were copied up with all data, since the mount.
    pub copied_whole: u64,
    /// Files of the image that were written in part.
    #[serde(rename = "sketches")]
    pub partials: PartialFigures,
    /// The descriptor of the process on which it finally reports whether the upper holds all
    /// written data; the mount sets it. `bcow umount` uses it. `None` from versions that do not
    /// report it.
    #[serde(default)]
    pub outcome_descriptor: Option<i32>,
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
        let mut partials = PartialFigures {
            open: 0,
            present_blocks: 0,
            incomplete_blocks: 0,
            ..self.partials.statistics()
        };
        for (partial, _) in self.open_partials.all() {
            partials.open += 1;
            // A damaged partial file has no status.
            if let Ok(status) = partial.status() {
                partials.blocks += status.blocks;
                partials.present_blocks += status.present;
                partials.incomplete_blocks += status.incomplete;
                partials.stored_bytes += status.stored_bytes;
            }
        }
        let Limits { bytes, inodes } = self.account.limits();
        Report {
            path: self.upper.path().display().to_string(),
            sync: match self.options.sync {
                SyncPolicy::Strict => "strict".to_owned(),
                SyncPolicy::Batch(count) => format!("batch={count}"),
                SyncPolicy::Volatile => "volatile".to_owned(),
            },
            limit_bytes: bytes,
            stored_bytes: bytes.map(|_| self.account.used()),
            limit_inodes: inodes,
            stored_inodes: inodes.map(|_| self.account.inodes()),
            nodes: self.table.len() as u64,
            copied_metadata: self.copied_metadata.load(Ordering::Relaxed),
            copied_whole: self.copied_whole.load(Ordering::Relaxed),
            partials,
            outcome_descriptor: None,
        }
    }
}
