//! Checks a whole file system for damage.
//!
//! The check lists every directory, decodes every inode, walks xattrs and chunk tables, and
//! compares link counts and the order of names with the actual tree. Its time and memory grow with
//! the actual metadata and not with the counts in it: an inode whose bytes overlap another's is
//! reported but not walked, so each byte of metadata is walked once. File data is read once, even
//! if files share it.
//!
//! The place of a finding is a path, `inode N`, `superblock` or `data`.
//!
//! | code | |
//! |---|---|
//! | `erofs-data` | File data cannot be read from the device |
//! | `erofs-device` | Metadata cannot be read from the device |
//! | `erofs-device-size` | The file system is larger than its device |
//! | `erofs-directory` | A directory's content is damaged |
//! | `erofs-directory-twice` | A directory has two names, or contains itself |
//! | `erofs-dirent-dots` | `.` or `..` is missing or names something else |
//! | `erofs-dirent-order` | Names are not sorted, so lookups miss them |
//! | `erofs-dirent-type` | An entry's type is not its inode's |
//! | `erofs-extent-range` | File content lies beyond the device |
//! | `erofs-inode` | An inode is damaged |
//! | `erofs-inode-count` | The superblock's number of inodes is wrong |
//! | `erofs-limit` | The check stopped early |
//! | `erofs-nlink` | A link count is wrong |
//! | `erofs-overlap` | Two inodes or directories use the same bytes |
//! | `erofs-unsupported` | Something that this reader does not have |
//! | `erofs-xattr` | Extended attributes are damaged |

use std::collections::BTreeMap;
use std::ops::ControlFlow;

pub use bcow::check::{Finding, Severity};

use crate::reader::{ErofsError, ExtentSource, FileType, Filesystem, Inode, InodeProblem, Nid};
use crate::tree::display_path;

/// Options of a check.
#[derive(Debug, Clone, Copy, Default)]
pub struct CheckOptions {
    /// Also read every byte of the files' extents.
    pub read_data: bool,
}

/// Limit on findings; more of them add no information.
const MAX_FINDINGS: usize = 1000;

/// Limit on data extents in memory. At the limit the check merges them, and reads them if there are
/// still too many.
const MAX_EXTENTS: usize = 1 << 20;

/// Data is read in pieces of this many bytes, so that an error has a precise place.
const READ_BYTES: u64 = 1 << 20;

/// Checks the whole tree. An empty list means no damage. After a thousand findings, a last one
/// reports the limit.
pub fn check(fs: &Filesystem, options: &CheckOptions) -> Vec<Finding> {
    let mut checker = Checker {
        fs,
        read_data: options.read_data,
        findings: Vec::new(),
        seen: BTreeMap::new(),
        directories: Vec::new(),
        pending: Vec::new(),
        extents: Vec::new(),
    };
    checker.run();
    checker.findings
}

/// A range of metadata in use, by its start.
struct Seen {
    end: u64,
    /// `None` for the blocks of a directory.
    inode: Option<SeenInode>,
}

struct SeenInode {
    nid: Nid,
    kind: FileType,
    /// The link count in the inode.
    nlink: u32,
    /// The link count in the tree: the number of names; for a directory, computed from its
    /// subdirectories.
    names: u32,
}

/// The name of a directory, for paths.
struct Directory {
    parent: u32,
    name: Box<[u8]>,
}

/// A directory that is to be listed.
struct Pending {
    inode: Inode,
    parent: Nid,
    /// Index into `Checker::directories`.
    index: u32,
}

struct Checker<'a> {
    fs: &'a Filesystem,
    read_data: bool,
    findings: Vec<Finding>,
    seen: BTreeMap<u64, Seen>,
    directories: Vec<Directory>,
    pending: Vec<Pending>,
    /// Data to be read: start and end on the device.
    extents: Vec<(u64, u64)>,
}

impl Checker<'_> {
    fn run(&mut self) {
        let superblock = self.fs.superblock();
        let claimed = superblock.blocks * u64::from(superblock.block_bytes);
        if claimed > self.fs.device_bytes() {
            let device = self.fs.device_bytes();
            let message = format!("{claimed} bytes of file system on a device of {device} bytes");
            self.report(Finding::error("erofs-device-size", "superblock", message));
        }
        self.visit_root();
        while let Some(directory) = self.pending.pop() {
            if self.full() {
                break;
            }
            self.directory(&directory);
        }
        self.read_extents();
        if !self.full() {
            self.counts();
        }
    }

    fn visit_root(&mut self) {
        self.directories.push(Directory {
            parent: 0,
            name: Box::default(),
        });
        match self.fs.inode(self.fs.root()) {
            Ok(inode) => {
                if self.inode(&inode, 0, b"") {
                    self.pending.push(Pending {
                        inode,
                        parent: inode.nid,
                        index: 0,
                    });
                }
            }
            Err(e) => self.error(&e, 0, b""),
        }
    }

    fn directory(&mut self, dir: &Pending) {
        let fs = self.fs;
        let own = dir.inode.nid;
        let mut last: Vec<u8> = Vec::new();
        let mut is_first = true;
        let (mut dot, mut dot_dot) = (false, false);
        let result = fs.read_dir(&dir.inode, 0, &mut |entry| {
            if !is_first && entry.name <= &last[..] {
                let message = "the name does not sort behind the one before it";
                self.found("erofs-dirent-order", dir.index, entry.name, message);
            }
            is_first = false;
            last.clear();
            last.extend_from_slice(entry.name);
            match entry.name {
                b"." => {
                    dot = true;
                    self.dot(dir.index, entry.name, entry.nid, own);
                }
                b".." => {
                    dot_dot = true;
                    self.dot(dir.index, entry.name, entry.nid, dir.parent);
                }
                name => self.entry(dir, name, entry.nid, entry.kind),
            }
            if self.full() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        match result {
            Err(e) => self.error(&e, dir.index, b""),
            Ok(()) if dot && dot_dot || self.full() => {}
            Ok(()) => {
                let message = "the directory has no `.` or no `..`";
                self.found("erofs-dirent-dots", dir.index, b"", message);
            }
        }
    }

    fn dot(&mut self, index: u32, name: &[u8], found: Nid, expected: Nid) {
        if found != expected {
            let message = format!("names inode {found} instead of {expected}");
            self.found("erofs-dirent-dots", index, name, message);
        }
    }

    fn entry(&mut self, dir: &Pending, name: &[u8], nid: Nid, kind: FileType) {
        if let Some(known) = self.known(nid) {
            known.names = known.names.saturating_add(1);
            let known_kind = known.kind;
            if known_kind == FileType::Directory {
                let message = format!("directory {nid} has another name already");
                self.found("erofs-directory-twice", dir.index, name, message);
            }
            self.entry_type(dir.index, name, kind, known_kind);
            return;
        }
        let inode = match self.fs.inode(nid) {
            Ok(inode) => inode,
            Err(e) => return self.error(&e, dir.index, name),
        };
        self.entry_type(dir.index, name, kind, inode.kind);
        let sound = self.inode(&inode, dir.index, name);
        if inode.kind != FileType::Directory {
            return;
        }
        if let Some(parent) = self.known(dir.inode.nid) {
            parent.names = parent.names.saturating_add(1);
        }
        // 32 bits are enough for an index: each directory has an inode of 32 bytes, and 2^32 of
        // them exceed any memory.
        if let (true, Ok(index)) = (sound, u32::try_from(self.directories.len())) {
            self.directories.push(Directory {
                parent: dir.index,
                name: name.into(),
            });
            self.pending.push(Pending {
                inode,
                parent: dir.inode.nid,
                index,
            });
        }
    }

    fn entry_type(&mut self, index: u32, name: &[u8], said: FileType, is: FileType) {
        if said != is {
            let message = format!("the entry says {said:?}, the inode {is:?}");
            self.found("erofs-dirent-type", index, name, message);
        }
    }

    /// Records a new inode; returns true if its parts may be walked.
    fn inode(&mut self, inode: &Inode, index: u32, name: &[u8]) -> bool {
        let (start, end) = inode.footprint(self.fs);
        let seen = Seen {
            end,
            inode: Some(SeenInode {
                nid: inode.nid,
                kind: inode.kind,
                nlink: inode.nlink,
                names: match inode.kind {
                    FileType::Directory => 2,
                    _ => 1,
                },
            }),
        };
        if !self.claim(start, seen, index, name) {
            return false;
        }
        if let Err(e) = self.fs.check_xattrs(inode) {
            self.error(&e, index, name);
        }
        let walked = match inode.kind {
            FileType::Regular => self.regular(inode),
            FileType::Symlink => self.fs.read_link(inode).map(|_| true),
            FileType::Directory => self.directory_blocks(inode, index, name),
            _ => Ok(true),
        };
        walked.unwrap_or_else(|e| {
            self.error(&e, index, name);
            false
        })
    }

    fn regular(&mut self, inode: &Inode) -> Result<bool, ErofsError> {
        for extent in self.fs.extents(inode, 0) {
            let extent = extent?;
            if let (ExtentSource::Device { offset }, true) = (extent.source, self.read_data) {
                self.extents.push((offset, offset + extent.length));
                if self.extents.len() >= MAX_EXTENTS {
                    self.merge_extents();
                }
            }
        }
        Ok(true)
    }

    /// Claims the blocks of a directory that are not inline: shared blocks would be walked
    /// repeatedly.
    fn directory_blocks(
        &mut self,
        inode: &Inode,
        index: u32,
        name: &[u8],
    ) -> Result<bool, ErofsError> {
        let (start, end) = inode.footprint(self.fs);
        for extent in self.fs.extents(inode, 0) {
            let extent = extent?;
            let ExtentSource::Device { offset } = extent.source else {
                let message = format!("byte {} of the directory is in a hole", extent.offset);
                self.found("erofs-directory", index, name, message);
                return Ok(false);
            };
            let is_inline = offset >= start && offset + extent.length <= end;
            let seen = Seen {
                end: offset + extent.length,
                inode: None,
            };
            if !is_inline && !self.claim(offset, seen, index, name) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Marks bytes of metadata as used. If some of them are used already, reports this and returns
    /// false.
    fn claim(&mut self, start: u64, seen: Seen, index: u32, name: &[u8]) -> bool {
        let before = self.seen.range(..seen.end).next_back();
        if before.is_some_and(|(_, other)| other.end > start) {
            let end = seen.end;
            let message = format!("bytes {start}..{end} of the device are used by something else");
            self.found("erofs-overlap", index, name, message);
            return false;
        }
        self.seen.insert(start, seen);
        true
    }

    fn known(&mut self, nid: Nid) -> Option<&mut SeenInode> {
        let start = self.fs.nid_offset(nid)?;
        let inode = self.seen.get_mut(&start)?.inode.as_mut()?;
        (inode.nid == nid).then_some(inode)
    }

    /// Checks that need the complete walk.
    fn counts(&mut self) {
        let mut inodes = 0;
        let mut wrong = Vec::new();
        for inode in self.seen.values().filter_map(|seen| seen.inode.as_ref()) {
            inodes += 1;
            // Link count 1 of a directory means "not counted".
            let uncounted = inode.kind == FileType::Directory && inode.nlink == 1;
            if inode.nlink != inode.names && !uncounted && wrong.len() <= MAX_FINDINGS {
                wrong.push((inode.nid, inode.nlink, inode.names));
            }
        }
        for (nid, says, names) in wrong {
            let message = format!("the link count is {says}, but the number of links is {names}");
            self.report(Finding::error(
                "erofs-nlink",
                format!("inode {nid}"),
                message,
            ));
        }
        let claimed = self.fs.superblock().inodes;
        // If a part could not be read, the counts differ in any case.
        if inodes != claimed && self.findings.is_empty() {
            let message =
                format!("the number of inodes is {inodes}, but the superblock says {claimed}");
            let finding = Finding::error("erofs-inode-count", "superblock", message);
            self.report(finding.of(Severity::Warning));
        }
    }

    /// Sorts and merges the extents. If there are still too many, reads them and clears the list.
    fn merge_extents(&mut self) {
        self.extents.sort_unstable();
        self.extents.dedup_by(|next, kept| {
            let joins = next.0 <= kept.1;
            if joins {
                kept.1 = kept.1.max(next.1);
            }
            joins
        });
        if self.extents.len() >= MAX_EXTENTS / 2 {
            self.read_extents();
        }
    }

    fn read_extents(&mut self) {
        self.extents.sort_unstable();
        let mut done = 0;
        for (start, end) in std::mem::take(&mut self.extents) {
            let mut at = start.max(done);
            while at < end && !self.full() {
                let piece = READ_BYTES.min(end - at);
                if let Err(e) = self.fs.verify_range(at, piece) {
                    let message = format!("bytes {at}..{}: {e}", at + piece);
                    self.report(Finding::error("erofs-data", "data", message));
                }
                at += piece;
            }
            done = done.max(end);
        }
    }

    fn error(&mut self, e: &ErofsError, index: u32, name: &[u8]) {
        let code = match e {
            ErofsError::Device(_) => "erofs-device",
            ErofsError::UnsupportedInode { .. }
            | ErofsError::UnsupportedFeature { .. }
            | ErofsError::UnsupportedValue { .. } => "erofs-unsupported",
            ErofsError::Inode {
                problem: InodeProblem::Content { .. },
                ..
            } => "erofs-extent-range",
            ErofsError::Directory { .. } => "erofs-directory",
            ErofsError::Xattr { .. } => "erofs-xattr",
            _ => "erofs-inode",
        };
        self.found(code, index, name, e.to_string());
    }

    /// Reports an error of a directory (`name` is empty) or of an entry in it.
    fn found(&mut self, code: &'static str, index: u32, name: &[u8], message: impl Into<String>) {
        self.report(Finding::error(code, self.path(index, name), message));
    }

    fn report(&mut self, finding: Finding) {
        if self.full() {
            return;
        }
        self.findings.push(finding);
        if self.findings.len() == MAX_FINDINGS {
            let message = format!("more than {MAX_FINDINGS} findings, the rest was not looked at");
            self.findings
                .push(Finding::error("erofs-limit", "superblock", message));
        }
    }

    fn full(&self) -> bool {
        self.findings.len() > MAX_FINDINGS
    }

    /// The path of a directory (`name` is empty) or of an entry in it.
    fn path(&self, index: u32, name: &[u8]) -> String {
        let mut names: Vec<&[u8]> = Vec::new();
        if !name.is_empty() {
            names.push(name);
        }
        let mut at = index;
        while at != 0 {
            let directory = &self.directories[at as usize];
            names.push(&directory.name);
            at = directory.parent;
        }
        names.reverse();
        display_path(&names.join(&b'/'))
    }
}
