//! Reads which bytes of a partial file are stored in the upper and which are the image's.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

use bcow_erofs::reader::Inode;
use rustix::fs::{OFlags, SeekFrom};
use rustix::io::Errno;

use super::body::{Body, Own, Piece, PieceSource};
use super::error::Problem;
use crate::blocks::{BLOCK_BYTES, BlockSet};
use crate::host::errno_of;
use crate::partial::journal::SECTOR_BYTES;
use crate::partial::{self, Damage, Unreadable};
use crate::upper::beneath::{is_not_regular_error, open_regular, open_regular_beneath};
use crate::upper::{META, PartialMark, UpperReader, entry_name};

const READ_BYTES: usize = 256 << 10;

/// The host's file of a partial file.
pub(super) struct HostFile<'a> {
    /// The path below the upper.
    pub(super) path: &'a [u8],
    /// Inode number.
    pub(super) inode: u64,
    /// Size in bytes.
    pub(super) size: u64,
}

/// The content of a partial file as pieces.
pub(super) fn body(
    upper: &UpperReader,
    mark: &PartialMark,
    host: &HostFile<'_>,
    lower: Inode,
) -> Result<Body, Problem> {
    check_mark(mark, &lower).map_err(Problem::Partial)?;
    let file = open_regular_beneath(upper.root(), host.path)?;
    Ok(Body {
        size: host.size,
        own: Some(Own::Host {
            path: host.path.to_vec(),
            inode: host.inode,
        }),
        lower: Some(lower),
        pieces: pieces(upper, mark, &file, host.size, &lower)?,
    })
}

/// Checks the stored data of a partial file. The error describes the damage.
pub(super) fn check(
    upper: &UpperReader,
    mark: &PartialMark,
    host: &HostFile<'_>,
    lower: Option<&Inode>,
) -> Result<(), Problem> {
    match lower {
        Some(lower) => body(upper, mark, host, *lower).map(drop),
        // The lower file is not known, so its number of blocks comes from the map.
        None if mark.map_exists => read_map(upper, mark, None).map(drop),
        None => Ok(()),
    }
}

/// Whether the host's file of `size` bytes holds all content of the partial file at its own
/// offsets.
pub(super) fn is_complete(
    upper: &UpperReader,
    mark: &PartialMark,
    size: u64,
) -> Result<bool, Problem> {
    let covered = mark.lower_limit.min(size).div_ceil(BLOCK_BYTES);
    if covered == 0 || !mark.map_exists {
        return Ok(covered == 0);
    }
    Ok(read_map(upper, mark, None)?.contains_all(0..covered))
}

fn check_mark(mark: &PartialMark, lower: &Inode) -> Result<(), String> {
    if !mark.has_supported_blocks() {
        return Err(format!(
            "its blocks are of 2^{} bytes, which this version does not know",
            mark.block_shift
        ));
    }
    if mark.lower_limit > lower.size {
        Err(format!(
            "its mark covers {} bytes of a file of the image that has {}",
            mark.lower_limit, lower.size
        ))
    } else {
        Ok(())
    }
}

fn pieces(
    upper: &UpperReader,
    mark: &PartialMark,
    file: &OwnedFd,
    size: u64,
    lower: &Inode,
) -> Result<Vec<Piece>, Problem> {
    let limit = mark.lower_limit.min(size);
    let covered = limit.div_ceil(BLOCK_BYTES);
    let present = if mark.map_exists {
        read_map(upper, mark, Some(lower.size.div_ceil(BLOCK_BYTES)))?
    } else {
        BlockSet::default()
    };
    let stored = data_runs(file, size)?;
    let mut pieces = Pieces {
        all: Vec::new(),
        limit,
    };
    let mut at = 0;
    for run in present.runs(0..covered) {
        pieces.not_stored(at, run.start * BLOCK_BYTES);
        at = (run.end * BLOCK_BYTES).min(size);
        pieces.stored(run.start * BLOCK_BYTES, at, &stored);
    }
    let end = (covered * BLOCK_BYTES).min(size);
    pieces.not_stored(at, end);
    pieces.stored(end, size, &stored);
    Ok(pieces.all)
}

/// Collects pieces, in order.
struct Pieces {
    all: Vec<Piece>,
    /// The visible bytes of the lower file.
    limit: u64,
}

impl Pieces {
    fn not_stored(&mut self, start: u64, end: u64) {
        if start < self.limit {
            Piece::push(&mut self.all, end.min(self.limit), PieceSource::Lower);
        }
        if end > self.limit {
            Piece::push(&mut self.all, end, PieceSource::Hole);
        }
    }

    /// Adds bytes of the host's file. `runs` are its data and holes.
    fn stored(&mut self, start: u64, end: u64, runs: &[Piece]) {
        let mut at = start;
        let first = runs.partition_point(|run| run.end <= start);
        for run in &runs[first..] {
            if at >= end {
                break;
            }
            at = run.end.min(end);
            Piece::push(&mut self.all, at, run.source);
        }
    }
}

/// Reads all data of the host's file at `path`, of `size` bytes.
pub(super) fn read_all(upper: &UpperReader, path: &[u8], size: u64) -> Result<(), Errno> {
    let file = open_regular_beneath(upper.root(), path)?;
    let mut buffer = vec![0; READ_BYTES];
    let mut at = 0;
    for run in data_runs(&file, size)? {
        while at < run.end && run.source == PieceSource::Own {
            let wanted = buffer.len().min((run.end - at) as usize);
            match rustix::io::pread(&file, &mut buffer[..wanted], at) {
                // The file ends before its size.
                Ok(0) => return Err(Errno::IO),
                Ok(read) => at += read as u64,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        at = run.end;
    }
    Ok(())
}

/// The runs of data and holes of a host file, up to `size`.
pub(super) fn data_runs(file: &OwnedFd, size: u64) -> Result<Vec<Piece>, Errno> {
    let mut runs = Vec::new();
    let mut at = 0;
    while at < size {
        let data = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(data) => data.min(size),
            Err(Errno::NXIO) => size,
            // A host without support for holes.
            Err(Errno::INVAL) if at == 0 => 0,
            Err(errno) => return Err(errno),
        };
        if data > at {
            runs.push(Piece::new(data, PieceSource::Hole));
        }
        if data >= size {
            break;
        }
        let hole = match rustix::fs::seek(file, SeekFrom::Hole(data)) {
            Ok(hole) => hole.clamp(data + 1, size),
            Err(Errno::INVAL) => size,
            Err(errno) => return Err(errno),
        };
        runs.push(Piece::new(hole, PieceSource::Own));
        at = hole;
    }
    Ok(runs)
}

/// Reads the map of a partial file over a lower file of `blocks` blocks. `None`: takes the number
/// of blocks from the map.
fn read_map(
    upper: &UpperReader,
    mark: &PartialMark,
    blocks: Option<u64>,
) -> Result<BlockSet, Problem> {
    let name = entry_name(mark.id);
    let damaged = |sector: u64, damage: &Damage| {
        Problem::Partial(format!(
            "{META}/maps/{name}: at byte {}: {damage}",
            sector * SECTOR_BYTES as u64
        ))
    };
    let missing = || damaged(0, &Damage::Missing);
    let maps = upper.meta_directory("maps")?.ok_or_else(missing)?;
    let file = match open_regular(maps.as_fd(), &name, OFlags::RDONLY) {
        Err(Errno::NOENT) => return Err(missing()),
        Err(errno) if is_not_regular_error(errno) => return Err(damaged(0, &Damage::NoFile)),
        other => File::from(other?),
    };
    match partial::read_map(&file, mark.id, blocks) {
        Ok((_, replayed)) => Ok(replayed.present),
        Err(Unreadable::Host(error)) => Err(Problem::Host(errno_of(&error))),
        Err(Unreadable::Damaged((sector, damage))) => Err(damaged(sector, &damage)),
    }
}
