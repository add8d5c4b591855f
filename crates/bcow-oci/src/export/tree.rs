//! From a file system to the entries of an archive.

use std::collections::HashMap;
use std::io::Write;
use std::sync::atomic::Ordering;

use bcow_erofs::reader::{
    DeviceNumber, ErofsError, ExtentSource, FileType, Filesystem, Inode, Nid, Walk,
};

use super::tar::{Entry, EntryError, Kind, MAX_PAX_BYTES, TarWriter};
use super::{ExportError, ExportOptions, TarReport};
use crate::options::Progress;
use crate::tar::{MAX_RUNS, Run};

/// Content is read so much at a time.
const PIECE: u64 = 1 << 20;
/// Paths of inodes with several names, at most.
const MAX_LINK_BYTES: usize = 1 << 29;
/// What whiteouts of layers begin with.
const WHITEOUT: &[u8] = b".wh.";

/// What the archive is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// A tree for whoever unpacks tar archives.
    Tree,
}

/// One file system on its way into an archive.
pub(super) struct TreeExport<'e> {
    fs: &'e Filesystem,
    form: Form,
    options: &'e ExportOptions,
    progress: &'e dyn Progress,
    /// The first path of each inode of which more names may come.
    links: HashMap<Nid, FirstName>,
    link_bytes: usize,
    report: TarReport,
}

struct FirstName {
    path: Vec<u8>,
    /// Names to come, as the inode says.
    left: u32,
}

/// What stopped the reading of content.
enum Stop {
    Read(ErofsError),
    Write(std::io::Error),
}

impl<'e> TreeExport<'e> {
    pub(super) fn new(
        fs: &'e Filesystem,
        form: Form,
        options: &'e ExportOptions,
        progress: &'e dyn Progress,
    ) -> Self {
        TreeExport {
            fs,
            form,
            options,
            progress,
            links: HashMap::new(),
            link_bytes: 0,
            report: TarReport::default(),
        }
    }

    /// Writes the whole archive.
    pub(super) fn write<W: Write>(mut self, out: W) -> Result<TarReport, ExportError> {
        let mut tar = TarWriter::new(out);
        let mut walk = Walk::new(self.fs);
        while let Some(inode) = walk.next().map_err(|e| read_error(walk.path(), e))? {
            self.check_cancel()?;
            self.inode(walk.path(), &inode, &mut tar)?;
        }
        tar.finish().map_err(ExportError::Write)?;
        if self.report.sockets > 0 {
            self.progress.warning(&format!(
                "left out sockets, which tar has no form for: {}",
                self.report.sockets
            ));
        }
        Ok(self.report)
    }

    fn check_cancel(&self) -> Result<(), ExportError> {
        match &self.options.cancel {
            Some(cancel) if cancel.load(Ordering::Relaxed) => Err(ExportError::Interrupted),
            _ => Ok(()),
        }
    }

    fn inode<W: Write>(
        &mut self,
        path: &[u8],
        inode: &Inode,
        tar: &mut TarWriter<W>,
    ) -> Result<(), ExportError> {
        self.check_name(path)?;
        if inode.kind == FileType::Socket {
            self.report.sockets += 1;
            return Ok(());
        }
        if let Some(first) = self.first_name(path, inode)? {
            let kind = Kind::Hardlink { target: &first };
            return self.entry(path, inode, kind, &[], tar);
        }
        let xattrs = self
            .fs
            .xattrs(inode)
            .map_err(|error| read_error(path, error))?;
        let number = inode.rdev.unwrap_or(DeviceNumber { major: 0, minor: 0 });
        let kind = match inode.kind {
            FileType::Regular => return self.regular(path, inode, &xattrs, tar),
            FileType::Directory => Kind::Directory,
            FileType::Symlink => {
                let target = self.fs.read_link(inode).map_err(|e| read_error(path, e))?;
                let kind = Kind::Symlink { target: &target };
                return self.entry(path, inode, kind, &xattrs, tar);
            }
            FileType::CharDevice => Kind::CharDevice(number),
            FileType::BlockDevice => Kind::BlockDevice(number),
            FileType::Fifo | FileType::Socket => Kind::Fifo,
        };
        self.entry(path, inode, kind, &xattrs, tar)
    }

    /// A file of this name is a whiteout to whoever reads the archive as a layer.
    fn check_name(&self, path: &[u8]) -> Result<(), ExportError> {
        let name = path.rsplit(|&b| b == b'/').next().unwrap_or(path);
        if name.starts_with(WHITEOUT) {
            match self.form {
                Form::Tree => self.progress.warning(&format!(
                    "{} begins with .wh., which readers of image layers take for a whiteout",
                    crate::error::quoted(path)
                )),
            }
        }
        Ok(())
    }

    /// The inode's first path, if this is a further one.
    fn first_name(&mut self, path: &[u8], inode: &Inode) -> Result<Option<Vec<u8>>, ExportError> {
        if inode.kind == FileType::Directory || inode.nlink < 2 {
            return Ok(None);
        }
        if let Some(first) = self.links.get_mut(&inode.nid) {
            // The last name frees the memory; if the inode has more names than it says, they begin a new file.
            first.left -= 1;
            if first.left > 0 {
                return Ok(Some(first.path.clone()));
            }
            let first = self.links.remove(&inode.nid);
            self.link_bytes -= first.as_ref().map_or(0, |first| first.path.len());
            return Ok(first.map(|first| first.path));
        }
        self.link_bytes += path.len();
        if self.link_bytes > MAX_LINK_BYTES {
            let allowed = MAX_LINK_BYTES;
            return Err(ExportError::Hardlinks { allowed });
        }
        let first = FirstName {
            path: path.to_vec(),
            left: inode.nlink - 1,
        };
        self.links.insert(inode.nid, first);
        Ok(None)
    }

    fn entry<W: Write>(
        &mut self,
        path: &[u8],
        inode: &Inode,
        kind: Kind<'_>,
        xattrs: &[(Vec<u8>, Vec<u8>)],
        tar: &mut TarWriter<W>,
    ) -> Result<(), ExportError> {
        let name = match inode.kind {
            FileType::Directory if path.is_empty() => b"./".to_vec(),
            FileType::Directory => [path, b"/"].concat(),
            _ => path.to_vec(),
        };
        let entry = Entry {
            path: &name,
            kind,
            permissions: inode.permissions,
            uid: inode.uid,
            gid: inode.gid,
            mtime: inode.mtime,
            xattrs,
        };
        tar.entry(&entry).map_err(|error| match error {
            EntryError::Io(error) => ExportError::Write(error),
            EntryError::PaxBytes(bytes) => ExportError::Unrepresentable {
                path: rooted(path),
                problem: format!(
                    "its names and extended attributes take {bytes} bytes, readers of tar take {MAX_PAX_BYTES}"
                ),
            },
        })?;
        self.report.entries += 1;
        Ok(())
    }

    fn regular<W: Write>(
        &mut self,
        path: &[u8],
        inode: &Inode,
        xattrs: &[(Vec<u8>, Vec<u8>)],
        tar: &mut TarWriter<W>,
    ) -> Result<(), ExportError> {
        let size = inode.size;
        let runs = runs(self.fs, inode).map_err(|e| read_error(path, e))?;
        let whole = [Run {
            offset: 0,
            length: size,
        }];
        let (kind, data) = match &runs {
            Some(runs) => (Kind::Sparse { size, runs }, &runs[..]),
            None => (Kind::Regular { size }, &whole[..]),
        };
        self.entry(path, inode, kind, xattrs, tar)?;
        for run in data {
            let mut done = 0;
            while done < run.length {
                self.check_cancel()?;
                let piece = PIECE.min(run.length - done);
                copy(self.fs, inode, run.offset + done, piece, tar).map_err(|stop| match stop {
                    Stop::Read(error) => read_error(path, error),
                    Stop::Write(error) => ExportError::Write(error),
                })?;
                self.progress.advance(piece);
                self.report.content_bytes += piece;
                done += piece;
            }
        }
        Ok(())
    }
}

/// A run of a file's bytes into the archive.
fn copy<W: Write>(
    fs: &Filesystem,
    inode: &Inode,
    offset: u64,
    length: u64,
    tar: &mut TarWriter<W>,
) -> Result<(), Stop> {
    let mut written = Ok(());
    fs.read_with(inode, offset, length, &mut |bytes| {
        if written.is_ok() {
            written = tar.data(bytes);
        }
    })
    .map_err(Stop::Read)?;
    written.map_err(Stop::Write)
}

/// Where a file has data, if it has holes. Where there are more runs than readers take, the smallest holes count as data.
fn runs(fs: &Filesystem, inode: &Inode) -> Result<Option<Vec<Run>>, ErofsError> {
    let mut smallest = 1;
    loop {
        if let Some(runs) = runs_between(fs, inode, smallest)? {
            let is_whole = matches!(runs[..], [Run { offset: 0, length }] if length == inode.size);
            let is_sparse = inode.size > 0 && !is_whole;
            return Ok(is_sparse.then_some(runs));
        }
        smallest = (smallest * 2).max(8192);
    }
}

/// The runs between holes of at least `smallest` bytes; `None` if they are too many.
fn runs_between(
    fs: &Filesystem,
    inode: &Inode,
    smallest: u64,
) -> Result<Option<Vec<Run>>, ErofsError> {
    let mut runs: Vec<Run> = Vec::new();
    for extent in fs.extents(inode, 0) {
        let extent = extent?;
        let is_hole = extent.source == ExtentSource::Hole;
        if is_hole && extent.length >= smallest {
            continue;
        }
        let is_full = runs.len() + 1 >= MAX_RUNS;
        match runs.last_mut() {
            Some(last) if last.offset + last.length == extent.offset => {
                last.length += extent.length;
            }
            // One less, for the empty run that stands for a hole at the end.
            _ if is_full => return Ok(None),
            _ => runs.push(Run {
                offset: extent.offset,
                length: extent.length,
            }),
        }
    }
    Ok(Some(runs))
}

fn rooted(path: &[u8]) -> Vec<u8> {
    [b"/", path].concat()
}

fn read_error(path: &[u8], source: ErofsError) -> ExportError {
    ExportError::Read {
        path: rooted(path),
        source,
    }
}
