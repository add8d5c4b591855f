//! Figures: what `statfs` says, what the upper stores, what `bcow stats` shows.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{Dir, FileType, Mode, OFlags};
use rustix::io::Errno;

use super::nodes::Node;
use super::types::Figures;
use super::{UnionFs, host};
use crate::account::{self, Account, StoredBlocks};
use crate::options::SyncPolicy;
use crate::sketch::{SketchStatus, Statistics};
use crate::upper::beneath::open_beneath;
use crate::upper::{Instance, META};

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

/// Counts what an upper stores already. Each inode counts once.
pub(super) fn count_stored(upper: &Instance, account: &Arc<Account>) -> Result<(), Errno> {
    let mut seen = std::collections::HashSet::new();
    // By path: there may be more directories than descriptors.
    let mut todo = vec![Vec::new()];
    while let Some(path) = todo.pop() {
        let directory = open_beneath(upper.root(), &path, OFlags::RDONLY | OFlags::DIRECTORY)?;
        for entry in Dir::read_from(&directory)? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if matches!(name, b"." | b"..") || path.is_empty() && name == META.as_bytes() {
                continue;
            }
            let Some(stat) = host::stat_at(&directory, name)? else {
                continue;
            };
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory if path.is_empty() => todo.push(name.to_vec()),
                FileType::Directory => todo.push([&path, &b"/"[..], name].concat()),
                FileType::RegularFile if stat.st_nlink == 1 || seen.insert(stat.st_ino) => {
                    count_file(&directory, name, account)?;
                }
                _ => {}
            }
        }
    }
    for entry in Dir::read_from(upper.index())? {
        let entry = entry?;
        if let Some(stat) = host::stat_at(upper.index(), entry.file_name().to_bytes())?
            && FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
            && seen.insert(stat.st_ino)
        {
            count_file(upper.index(), entry.file_name().to_bytes(), account)?;
        }
    }
    Ok(())
}

fn count_file(directory: impl AsFd, name: &[u8], account: &Account) -> Result<(), Errno> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::openat(directory, name, flags, Mode::empty())?);
    account::count(&file, account).map_err(|error| error.errno())
}
