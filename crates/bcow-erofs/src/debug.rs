//! A canonical text form of a file system, for snapshots, tests and fuzzers.
//!
//! One line per name, depth first, names in byte order:
//!
//! ```text
//! PATH TYPE+PERMISSIONS NLINK UID:GID SIZE MTIME [-> TARGET] [dev MAJOR:MINOR] [= FIRST PATH]
//!     [crc64 C] [@NAME=VALUE ...]
//! ```
//!
//! Directories have no size, because it depends on the writer. Bytes that are not printable ASCII
//! are escaped. An unreadable part gives a line with the error.

use std::collections::HashMap;
use std::fmt::Write;
use std::ops::ControlFlow;
use std::sync::Arc;

pub use crate::format::superblock_checksum;

use crate::check::{CheckOptions, check};
use crate::merge::merge;
use crate::overlay::{ReadOptions, TreeForm, read_layer};
use crate::reader::{ErofsError, FileType, Filesystem, Inode, Nid};
use crate::writer::{MAX_INLINE, Plan, WriteOptions};

/// The contents and limits of a dump.
#[derive(Debug, Clone, Copy)]
pub struct DumpOptions {
    /// Read files and print a checksum (CRC-64/NVME) of their content.
    pub content: bool,
    /// Limit on names. At the limit, the dump ends with a line that reports it.
    pub max_names: u64,
    /// Limit on bytes of content and xattrs that are read.
    pub max_content_bytes: u64,
}

impl Default for DumpOptions {
    fn default() -> Self {
        DumpOptions {
            content: true,
            max_names: u64::MAX,
            max_content_bytes: u64::MAX,
        }
    }
}

/// Calls `line` with each line of the dump, without newline.
fn dump(fs: &Filesystem, options: &DumpOptions, line: &mut dyn FnMut(&str)) {
    let mut dumper = Dumper {
        fs,
        options,
        line,
        names: 0,
        content_left: options.max_content_bytes,
        first_paths: HashMap::new(),
    };
    // Children to be dumped, the next one last. The input decides the depth, so this is not
    // recursive.
    let mut pending = vec![(Vec::new(), fs.root())];
    while let Some((path, nid)) = pending.pop() {
        if dumper.names >= options.max_names {
            (dumper.line)("... and more");
            return;
        }
        let Some(inode) = dumper.name(&path, nid) else {
            continue;
        };
        let first = pending.len();
        let result = fs.read_dir(&inode, 0, &mut |entry| {
            if entry.name != b"." && entry.name != b".." {
                let mut path = path.clone();
                path.push(b'/');
                path.extend_from_slice(entry.name);
                pending.push((path, entry.nid));
            }
            // Children beyond the limit are not kept.
            if pending.len() as u64 > options.max_names {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
        if let Err(e) = result {
            dumper.error(&path, &e);
        }
        pending[first..].reverse();
    }
}

/// The whole dump as one string.
pub fn dump_to_string(fs: &Filesystem, options: &DumpOptions) -> String {
    let mut text = String::new();
    dump(fs, options, &mut |line| {
        text.push_str(line);
        text.push('\n');
    });
    text
}

/// Opens `bytes` as a file system and calls all functions of the reader, within limits. For a
/// fuzzer: the function must neither panic nor hang on any input.
pub fn fuzz_read(bytes: &[u8]) {
    let Ok(fs) = Filesystem::open(Arc::new(bytes.to_vec())) else {
        return;
    };
    let options = DumpOptions {
        content: true,
        max_names: 2_000,
        max_content_bytes: 16 << 20,
    };
    let mut names = 0;
    dump(&fs, &options, &mut |line| {
        names += 1;
        if names < 50 {
            let path = line.split(' ').next().unwrap_or_default();
            let _ = fs.resolve_with(path.as_bytes(), crate::reader::Symlinks::Follow);
        }
    });
    if let Ok(root) = fs.inode(fs.root()) {
        for cookie in [1, 12, 4095, 4096, u64::MAX] {
            let _ = fs.read_dir(&root, cookie, &mut |_| ControlFlow::Continue(()));
        }
        let _ = fs.xattr(&root, b"user.x");
        let _ = fs.lookup(&root, b"..");
    }
    // The file system as two layers of a stack.
    let _ = crate::account::account(&[&fs, &fs]);
    merge_with_itself(&fs);
    // The following check reads each device byte a bounded number of times.
    let _ = check(&fs, &CheckOptions { read_data: true });
}

/// Reads the file system as a layer, merges it with itself, and lays out the result.
fn merge_with_itself(fs: &Filesystem) {
    let options = ReadOptions {
        form: TreeForm::Layer,
        place: &|offset, _| u32::try_from(offset / 4096).ok(),
        tails: 0,
        max_inodes: 2_000,
    };
    let layer = || read_layer(fs, &options).ok();
    let Some(layers) = [layer(), layer()].into_iter().collect::<Option<Vec<_>>>() else {
        return;
    };
    if let Ok(tree) = merge(layers) {
        let _ = Plan::new(
            &tree,
            &WriteOptions {
                metadata_start: 4096,
                inline_max: MAX_INLINE,
            },
        );
    }
}

struct Dumper<'a> {
    fs: &'a Filesystem,
    options: &'a DumpOptions,
    line: &'a mut dyn FnMut(&str),
    names: u64,
    content_left: u64,
    first_paths: HashMap<Nid, Vec<u8>>,
}

impl Dumper<'_> {
    /// Dumps a name; returns the inode if it is a directory to enter.
    fn name(&mut self, path: &[u8], nid: Nid) -> Option<Inode> {
        self.names += 1;
        let inode = match self.fs.inode(nid) {
            Ok(inode) => inode,
            Err(e) => {
                self.error(path, &e);
                return None;
            }
        };
        let mut text = String::new();
        escape(path, &mut text);
        if path.is_empty() {
            text.push('/');
        }
        let _ = write!(
            text,
            " {}{:04o} {} {}:{}",
            letter(inode.kind),
            inode.permissions,
            inode.nlink,
            inode.uid,
            inode.gid
        );
        if inode.kind != FileType::Directory {
            let _ = write!(text, " {}", inode.size);
        }
        let time = inode.mtime;
        let _ = write!(text, " {}.{:09}", time.seconds, time.nanoseconds);
        if let Some(known) = self.first_paths.get(&nid) {
            text.push_str(" = ");
            escape(known, &mut text);
            (self.line)(&text);
            return None;
        }
        // Directories count with any link count, so that a cycle ends here.
        if inode.nlink > 1 || inode.kind == FileType::Directory {
            self.first_paths.insert(nid, path.to_vec());
        }
        if let Err(e) = self.details(&inode, &mut text) {
            let _ = write!(text, " error: {e}");
        }
        (self.line)(&text);
        (inode.kind == FileType::Directory).then_some(inode)
    }

    fn details(&mut self, inode: &Inode, text: &mut String) -> Result<(), ErofsError> {
        match inode.kind {
            FileType::Symlink => {
                text.push_str(" -> ");
                escape(&self.fs.read_link(inode)?, text);
            }
            FileType::Regular if self.options.content => self.content(inode, text)?,
            _ => {}
        }
        if let Some(device) = inode.rdev {
            let _ = write!(text, " dev {}:{}", device.major, device.minor);
        }
        if self.content_left == 0 {
            return Ok(());
        }
        let mut xattrs = self.fs.xattrs(inode)?;
        xattrs.sort();
        let bytes = xattrs.iter().map(|(_, value)| value.len() as u64).sum();
        self.content_left = self.content_left.saturating_sub(bytes);
        for (name, value) in xattrs {
            text.push_str(" @");
            escape(&name, text);
            text.push('=');
            escape(&value, text);
        }
        Ok(())
    }

    fn content(&mut self, inode: &Inode, text: &mut String) -> Result<(), ErofsError> {
        if inode.size > self.content_left {
            text.push_str(" (content not read)");
            return Ok(());
        }
        self.content_left -= inode.size;
        let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme);
        self.fs
            .read_with(inode, 0, inode.size, &mut |piece| digest.update(piece))?;
        let _ = write!(text, " crc64 {:016x}", digest.finalize());
        Ok(())
    }

    fn error(&mut self, path: &[u8], e: &ErofsError) {
        let mut text = String::new();
        escape(path, &mut text);
        let _ = write!(text, " error: {e}");
        (self.line)(&text);
    }
}

fn letter(kind: FileType) -> char {
    match kind {
        FileType::Regular => '-',
        FileType::Directory => 'd',
        FileType::CharDevice => 'c',
        FileType::BlockDevice => 'b',
        FileType::Fifo => 'p',
        FileType::Socket => 's',
        FileType::Symlink => 'l',
    }
}

/// Escapes as `\xNN` all bytes except printable ASCII without space, `=`, `@` and backslash.
fn escape(bytes: &[u8], text: &mut String) {
    for &b in bytes {
        match b {
            b'!'..=b'~' if !b"\\=@".contains(&b) => text.push(char::from(b)),
            _ => {
                let _ = write!(text, "\\x{b:02x}");
            }
        }
    }
}
