//! Checks a qcow2 header before imago reads it (qemu's docs/interop/qcow2.rst).
//!
//! imago uses values of the feature name table as indexes without a check, allocates an L1 table of
//! any size, reads encrypted clusters as plain ones, and ignores the header extensions of version
//! 2, where qemu also writes the format of the backing file.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::MAGIC;

/// Limit of the entries of an L1 table: 32 MiB, as in qemu.
const MAX_L1_ENTRIES: u64 = (32 << 20) / 8;
const V2_BYTES: u64 = 72;
const V3_BYTES: u64 = 104;
const END: u32 = 0;
const BACKING_FORMAT: u32 = 0xe279_2aca;
const FEATURE_NAMES: u32 = 0x6803_f857;
const FEATURE_NAME_BYTES: u64 = 48;

/// Values of a header that bcow reads itself.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// Cluster size in bytes.
    pub cluster_bytes: u64,
    /// Format of the backing file, if the image records it.
    pub backing_format: Option<String>,
}

/// Why a header cannot be used: an [`io::Error`], or what is invalid or not supported.
type Problem = Box<dyn std::error::Error + Send + Sync>;

impl Header {
    /// Reads and checks the header of `file`; `None` if the file does not begin with the magic
    /// number.
    pub(super) fn read(file: &File) -> Result<Option<Header>, Problem> {
        let mut bytes = [0; V3_BYTES as usize];
        let read = read_up_to(file, &mut bytes, 0)?;
        let u32_at = |at: usize| u32::from_be_bytes([0, 1, 2, 3].map(|i| bytes[at + i]));
        let u64_at = |at: usize| u64::from(u32_at(at)) << 32 | u64::from(u32_at(at + 4));
        if !bytes[..read].starts_with(MAGIC) {
            return Ok(None);
        }
        let version = u32_at(4);
        let header_bytes = match version {
            2 => V2_BYTES,
            3 => u64::from(u32_at(100)),
            _ => return Err(format!("qcow2 version {version} is not supported").into()),
        };
        if (read as u64) < header_bytes.clamp(V2_BYTES, V3_BYTES) {
            return Err("it ends inside its header".into());
        }
        let cluster_bits = u32_at(20);
        if !(9..=21).contains(&cluster_bits) {
            return Err(
                format!("its cluster size of 2^{cluster_bits} bytes is not supported").into(),
            );
        }
        let cluster_bytes = 1 << cluster_bits;
        if version == 3 && !(V3_BYTES..=cluster_bytes).contains(&header_bytes) {
            return Err(format!("the length of its header is {header_bytes}").into());
        }
        match u32_at(32) {
            0 => {}
            1 | 2 => return Err("it is encrypted".into()),
            other => return Err(format!("it has an unknown encryption method ({other})").into()),
        }
        check_l1(u32_at(36).into(), u64_at(24), cluster_bytes)?;
        let backing_offset = u64_at(8);
        let end = match backing_offset {
            0 => cluster_bytes,
            offset if (header_bytes..=cluster_bytes).contains(&offset) => offset,
            _ => return Err("the name of its backing file lies outside its first cluster".into()),
        };
        let backing_format = extensions(file, version, header_bytes, end)?;
        Ok(Some(Header {
            cluster_bytes,
            backing_format,
        }))
    }
}

/// Checks that the L1 table covers a disk of `size` bytes and is within the limit.
fn check_l1(entries: u64, size: u64, cluster_bytes: u64) -> Result<(), Problem> {
    let covered = cluster_bytes * (cluster_bytes / 8);
    if entries > MAX_L1_ENTRIES {
        return Err(
            format!("its L1 table has {entries} entries, the limit is {MAX_L1_ENTRIES}").into(),
        );
    }
    if entries < size.div_ceil(covered) {
        return Err("its L1 table is too small for its disk".into());
    }
    Ok(())
}

/// Reads the header extensions and returns the format of the backing file.
fn extensions(file: &File, version: u32, start: u64, end: u64) -> Result<Option<String>, Problem> {
    let mut format: Option<String> = None;
    let mut at = start;
    loop {
        if at + 8 > end {
            // Old images of version 2 have no extensions and thus no end mark. imago does not read
            // extensions of version 2.
            return match version {
                2 => Ok(format),
                _ => Err("its header extensions have no end".into()),
            };
        }
        let mut head = [0; 8];
        read_exactly(file, &mut head, at)?;
        let kind = u32::from_be_bytes([head[0], head[1], head[2], head[3]]);
        let length = u64::from(u32::from_be_bytes([head[4], head[5], head[6], head[7]]));
        at += 8;
        if length > end - at {
            return Err("a header extension does not fit into its header".into());
        }
        match kind {
            END => return Ok(format),
            BACKING_FORMAT => {
                // The longest format name in qemu.
                if length > 15 {
                    return Err("the name of its backing file's format is too long".into());
                }
                let mut name = vec![0; length as usize];
                read_exactly(file, &mut name, at)?;
                let name = String::from_utf8(name)
                    .map_err(|_| "the name of its backing file's format is not UTF-8")?;
                if format.as_ref().is_some_and(|before| *before != name) {
                    return Err("it records two formats of its backing file".into());
                }
                format = Some(name);
            }
            FEATURE_NAMES if !length.is_multiple_of(FEATURE_NAME_BYTES) => {
                return Err(format!(
                    "the length of its feature name table, {length}, is not a multiple of \
                     {FEATURE_NAME_BYTES}"
                )
                .into());
            }
            _ => {}
        }
        at += length.next_multiple_of(8);
    }
}

fn read_exactly(file: &File, buf: &mut [u8], at: u64) -> Result<(), Problem> {
    match read_up_to(file, buf, at)? {
        read if read == buf.len() => Ok(()),
        _ => Err("it ends inside its header".into()),
    }
}

fn read_up_to(file: &File, buf: &mut [u8], at: u64) -> io::Result<usize> {
    let mut read = 0;
    while read < buf.len() {
        match file.read_at(&mut buf[read..], at + read as u64) {
            Ok(0) => break,
            Ok(more) => read += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(read)
}
