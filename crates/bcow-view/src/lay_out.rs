//! Lays out the tree of an EROFS as an ext4.

use bcow_erofs::reader::{FileType, Filesystem, Inode, PathIndex};
use bcow_ext4::{
    Content, DeviceNumber, DirEntry, Ext4Error, Extent, FileKind, Geometry, GeometryOptions,
    Identity, InodeNumber, MAX_BYTES, Node, Sink, Summary, Timestamp, Writer, Xattr,
};

use crate::BLOCK_BYTES;
use crate::error::ViewError;
use crate::numbers::{self, Known};
use crate::place::{Fragment, Layout, Pieces, Window};
use crate::survey::{Survey, kind};

/// Most names that are read to name the file of an error.
const MAX_NAMES: usize = 1 << 24;

/// What a view depends on, besides the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Size of the ext4 in bytes.
    pub bytes: u64,
    /// Blocks of the journal, or `None` for a length by the size.
    pub journal_blocks: Option<u32>,
    /// What the UUID and the seed of the hashes are taken from: the identity of the image.
    pub seed: [u8; 32],
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct View {
    /// Size of the ext4 in bytes.
    pub bytes: u64,
    /// Windows, in the order of the EROFS device.
    pub windows: Vec<Window>,
    /// Fragments, in ascending order of their blocks.
    pub fragments: Vec<Fragment>,
    /// What the ext4 has.
    pub summary: Summary,
}

/// The least size in whole MiB above `bytes`, which do not fit, that `fits`; `None` if no size up
/// to the largest ext4 does.
fn least_size(bytes: u64, fits: impl Fn(u64) -> bool) -> Option<u64> {
    let (mut below, last) = (bytes >> 20, MAX_BYTES >> 20);
    let mut enough = (below + 1).next_power_of_two();
    while !fits(enough << 20) {
        below = enough;
        enough *= 2;
        if enough > last {
            return None;
        }
    }
    while below + 1 < enough {
        let middle = below.midpoint(enough);
        if fits(middle << 20) { enough = middle } else { below = middle }
    }
    Some(enough << 20)
}

/// Lays out a view. The metadata of the ext4 goes to `sink`. The same tree and options give the
/// same bytes.
pub fn lay_out(fs: &Filesystem, options: &Options, sink: &mut dyn Sink) -> Result<View, ViewError> {
    let block_bytes = fs.superblock().block_bytes;
    if u64::from(block_bytes) != BLOCK_BYTES {
        return Err(ViewError::BlockBytes(block_bytes));
    }
    let survey = Survey::new(fs).map_err(|error| name_file(error, fs, None))?;
    write(fs, options, &survey, sink).map_err(|error| name_file(error, fs, Some(&survey)))
}

/// Replaces the number of an inode in an error by a path of the file.
fn name_file(error: ViewError, fs: &Filesystem, survey: Option<&Survey>) -> ViewError {
    let nid = match &error {
        ViewError::Erofs(error) => error.nid(),
        ViewError::Ext4(Ext4Error::Inode { inode, .. }) => {
            survey.and_then(|survey| survey.numbers.nid(*inode))
        }
        _ => None,
    };
    let path = nid.and_then(|nid| PathIndex::new(fs, MAX_NAMES).paths(nid, 1).pop());
    let Some(path) = path else {
        return error;
    };
    let path = String::from_utf8_lossy(&path).escape_debug().to_string();
    match error {
        ViewError::Erofs(source) => ViewError::Unreadable { path, source },
        ViewError::Ext4(Ext4Error::Inode { problem, .. }) => ViewError::Inode { path, problem },
        other => other,
    }
}

fn write(
    fs: &Filesystem,
    options: &Options,
    survey: &Survey,
    sink: &mut dyn Sink,
) -> Result<View, ViewError> {
    let device_blocks = fs.device_bytes() / BLOCK_BYTES;
    let place = |bytes| -> Result<Option<(Geometry, Layout)>, Ext4Error> {
        let geometry = Geometry::new(GeometryOptions {
            bytes,
            inodes: survey.numbers.inodes.len() as u32,
            journal_blocks: options.journal_blocks,
        })?;
        let region_blocks = (1 << region_shift(bytes)) / BLOCK_BYTES;
        let layout = Layout::new(&geometry, device_blocks, survey.fragments, region_blocks);
        Ok(layout.map(|layout| (geometry, layout)))
    };
    let (geometry, layout) = match place(options.bytes) {
        Ok(Some(placed)) => placed,
        refused => {
            let fits = |bytes| matches!(place(bytes), Ok(Some(_)));
            return Err(match (least_size(options.bytes, fits), refused) {
                (Some(least), _) => ViewError::TooSmall {
                    bytes: options.bytes,
                    least,
                },
                // No size fits: the error has another cause.
                (None, Err(error)) => error.into(),
                (None, Ok(_)) => {
                    let (bytes, problem) = (MAX_BYTES, "is too small for the image");
                    Ext4Error::Size { bytes, problem }.into()
                }
            });
        }
    };
    let identity = identity(fs, options);
    let mut writer = Writer::new(&geometry, identity, &layout.content(), sink)?;
    let mut pieces = Pieces::new(device_blocks);
    for known in &survey.numbers.inodes {
        let inode = fs.inode(known.nid)?;
        let add = Adding {
            fs,
            survey,
            layout: &layout,
        };
        add.inode(&inode, known, &mut pieces, &mut writer)?;
    }
    let summary = writer.finish()?;
    Ok(View {
        bytes: geometry.blocks() * BLOCK_BYTES,
        fragments: layout.placed_fragments(&pieces),
        windows: layout.windows,
        summary,
    })
}

/// log2 of the region size of a file with a view of `bytes` bytes: the root table is short, and
/// windows and fragments, which begin at groups of 128 MiB, begin at regions.
pub(crate) fn region_shift(bytes: u64) -> u8 {
    const MAX_REGIONS: u64 = 1 << 16;
    let is_short = |shift: &u8| bytes >> shift <= MAX_REGIONS;
    (22..27).find(is_short).unwrap_or(27)
}

/// The UUID is of version 8, which is for values of an application's own.
fn identity(fs: &Filesystem, options: &Options) -> Identity {
    let mut uuid = [0; 16];
    let mut hash_seed = [0; 16];
    uuid.copy_from_slice(&options.seed[..16]);
    hash_seed.copy_from_slice(&options.seed[16..]);
    uuid[6] = uuid[6] & 0x0f | 0x80;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    let seconds = fs.superblock().build_time.seconds;
    Identity {
        uuid,
        hash_seed,
        label: [0; 16],
        created: seconds.clamp(0, u32::MAX.into()) as u32,
        // The tree is that of the image, without an entry of the file system's own.
        lost_and_found: false,
    }
}

/// What an inode's description is made of.
struct Adding<'v> {
    fs: &'v Filesystem,
    survey: &'v Survey,
    layout: &'v Layout,
}

impl Adding<'_> {
    fn inode(
        &self,
        inode: &Inode,
        known: &Known,
        pieces: &mut Pieces,
        writer: &mut Writer<'_>,
    ) -> Result<(), ViewError> {
        let xattrs = self.fs.xattrs(inode)?;
        let xattrs: Vec<Xattr<'_>> = xattrs
            .iter()
            .map(|(name, value)| Xattr { name, value })
            .collect();
        let mut extents = Vec::new();
        let mut names = Vec::new();
        let mut target = Vec::new();
        let rdev = inode.rdev.unwrap_or_default();
        let device = DeviceNumber {
            major: rdev.major,
            minor: rdev.minor,
        };
        match inode.kind {
            FileType::Regular => extents = self.extents(inode, pieces)?,
            FileType::Directory => names = self.names(inode, writer)?,
            FileType::Symlink => target = self.fs.read_link(inode)?,
            _ => {}
        }
        let entries: Vec<DirEntry<'_>> = names
            .iter()
            .map(|(name, inode, kind)| DirEntry {
                name,
                inode: *inode,
                kind: *kind,
            })
            .collect();
        let content = match inode.kind {
            FileType::Regular => Content::File {
                bytes: inode.size,
                extents: &extents,
            },
            FileType::Directory => Content::Directory {
                parent: writer.number(known.parent),
                entries: &entries,
            },
            FileType::Symlink => Content::Symlink(&target),
            FileType::CharDevice => Content::CharDevice(device),
            FileType::BlockDevice => Content::BlockDevice(device),
            FileType::Fifo => Content::Fifo,
            FileType::Socket => Content::Socket,
        };
        // EROFS has one time.
        let time = Timestamp {
            seconds: inode.mtime.seconds,
            nanoseconds: inode.mtime.nanoseconds,
        };
        let node = Node {
            permissions: inode.permissions,
            uid: inode.uid,
            gid: inode.gid,
            accessed: time,
            modified: time,
            changed: time,
            created: time,
            links: known.links,
            xattrs: &xattrs,
            content,
        };
        writer.add(&node)?;
        Ok(())
    }

    fn extents(&self, inode: &Inode, pieces: &mut Pieces) -> Result<Vec<Extent>, ViewError> {
        let mut extents = Vec::new();
        pieces.of_file(self.fs, inode, &mut |piece| {
            let mut logical = piece.logical;
            for range in self.layout.place(piece.source, piece.blocks) {
                extents.push(Extent {
                    logical,
                    physical: range.start,
                    blocks: range.count as u32,
                });
                logical += range.count as u32;
            }
        })?;
        Ok(extents)
    }

    fn names(
        &self,
        inode: &Inode,
        writer: &Writer<'_>,
    ) -> Result<Vec<(Vec<u8>, InodeNumber, FileKind)>, ViewError> {
        let mut names = Vec::new();
        numbers::each_child(self.fs, inode, &mut |child| {
            let number = writer.number(self.survey.numbers.place(child.nid));
            names.push((child.name, number, kind(child.kind)));
            Ok(())
        })?;
        Ok(names)
    }
}
