//! Reads the names in a directory, in the order of its blocks.

use zerocopy::FromBytes;

use super::{Inode, ReadError, Reader, Structure};
use crate::checksum::Checksum;
use crate::format::{BLOCK_BYTES, DirectoryEntry, DirectoryTail, entry_type, inode_flags};
use crate::node::{FileKind, InodeNumber};
use crate::output::BlockBuffer;

/// Bytes of a directory entry without its name.
const HEAD: usize = size_of::<DirectoryEntry>();
/// Bytes of the checksum record at the end of a block.
const TAIL: usize = size_of::<DirectoryTail>();
/// Bytes of the entry `.`, and of the entry `..` without the unused end of its record.
const DOT_BYTES: usize = 12;
/// Bytes in front of the index entries of the root of a hash tree: `.`, `..` and the description of
/// the tree.
const ROOT_HEAD: usize = 32;
/// Bytes in front of the index entries of another node: one empty directory entry.
const NODE_HEAD: usize = 8;
/// Bytes of an index entry, and of the checksum behind the room for them.
const INDEX: usize = 8;

/// A name in a directory, and the inode with this name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Name {
    pub name: Vec<u8>,
    pub inode: InodeNumber,
}

impl Reader {
    /// Reads the names in a directory, without `.` and `..`. Fails if the directory has more than
    /// `max` names. Each block of the file system is read at most once, also if the directory is
    /// damaged.
    pub fn names(&self, directory: &Inode, max: usize) -> Result<Vec<Name>, ReadError> {
        let damaged = |problem| Structure::Inode(directory.number).damaged(problem);
        if directory.kind != FileKind::Directory {
            return Err(damaged("it is no directory"));
        }
        let blocks = directory.size.div_ceil(BLOCK_BYTES as u64);
        if blocks > self.blocks {
            return Err(damaged("the directory is longer than the file system"));
        }
        let extents = self.extents(directory)?;
        // Blocks without names do not count against `max`.
        if extents.overlap() {
            return Err(damaged("two blocks of the directory are in the same place"));
        }
        let mut names = Vec::new();
        let mut next = 0;
        for run in &extents.content {
            if u64::from(run.logical) != next || !run.is_written {
                break;
            }
            next = run.end();
            for n in 0..u64::from(run.blocks) {
                if u64::from(run.logical) + n >= blocks {
                    break;
                }
                let block = self.block(run.physical + n)?;
                let records = self.records(directory, &block, run.logical == 0 && n == 0)?;
                read(&block, &records, &mut names).map_err(damaged)?;
                if names.len() > max {
                    return Err(damaged("the directory has too many names"));
                }
            }
        }
        if next >= blocks {
            Ok(names)
        } else {
            Err(damaged("the directory has a hole"))
        }
    }

    /// Compares a block of a directory with its checksum. Returns the place of the records that can
    /// have names. Without checksums, that is the whole block.
    fn records(
        &self,
        directory: &Inode,
        block: &BlockBuffer,
        is_first: bool,
    ) -> Result<Records, ReadError> {
        let Some(seed) = self.seed_of(directory.number, directory.generation) else {
            return Ok(Records {
                end: BLOCK_BYTES,
                limit: BLOCK_BYTES,
            });
        };
        let damaged = |problem| Structure::Inode(directory.number).damaged(problem);
        // In a node of the hash tree, the first record extends to the end of the block; in the
        // root, the record of `..` does. A checksum record at the end of the block is no criterion:
        // it can remain from a time when the block had names.
        let is_node = directory.flags & inode_flags::INDEX != 0
            && if is_first {
                record(&block[DOT_BYTES..]) == Some(BLOCK_BYTES - DOT_BYTES)
            } else {
                record(&block[..]) == Some(BLOCK_BYTES)
            };
        // A node of the hash tree has no names, except `.` and `..` in the root.
        let (records, stored, found) = if is_node {
            let head = if is_first { ROOT_HEAD } else { NODE_HEAD };
            let (stored, found) = node_checksums(block, head, seed)
                .ok_or_else(|| damaged("a node of the directory's hash tree is damaged"))?;
            let records = Records {
                end: if is_first { 2 * DOT_BYTES } else { 0 },
                limit: BLOCK_BYTES,
            };
            (records, stored, found)
        } else {
            let covered = BLOCK_BYTES - TAIL;
            let stored = stored_checksum(block)
                .ok_or_else(|| damaged("a block of the directory has no checksum"))?;
            let records = Records {
                end: covered,
                limit: covered,
            };
            (records, stored, seed.with(&block[..covered]))
        };
        if stored == found {
            Ok(records)
        } else {
            Err(damaged("the checksum of a block of the directory is wrong"))
        }
    }
}

/// The place of the records of a block that can have names, from the start of the block on.
struct Records {
    /// The last record begins before this byte.
    end: usize,
    /// No record extends beyond this byte. It is behind `end` in the root of a hash tree, where the
    /// record of `..` extends over the index entries.
    limit: usize,
}

/// The stored and the computed checksum of a node of a hash tree. `head` is the number of bytes in
/// front of the index entries. `None` if the node claims more entries than fit into a block.
fn node_checksums(
    block: &BlockBuffer,
    head: usize,
    seed: Checksum,
) -> Option<(Checksum, Checksum)> {
    let half = |at: usize| usize::from(u16::from_le_bytes([block[at], block[at + 1]]));
    let (limit, count) = (half(head), half(head + 2));
    let tail = head + limit * INDEX;
    let used = block.get(..head + count * INDEX)?;
    let (reserved, stored) = block.get(tail..tail + INDEX)?.split_at(4);
    let stored = u32::from_le_bytes([stored[0], stored[1], stored[2], stored[3]]);
    let found = seed.with(used).with(reserved).with(&[0; 4]);
    Some((Checksum(stored), found))
}

/// The checksum at the end of a block with names; `None` if the block has no checksum record.
fn stored_checksum(block: &BlockBuffer) -> Option<Checksum> {
    let tail = DirectoryTail::read_from_bytes(&block[BLOCK_BYTES - TAIL..]).ok()?;
    let is_tail = tail.zero.get() == 0
        && usize::from(tail.record_bytes.get()) == TAIL
        && tail.name_bytes == 0
        && tail.file_type == entry_type::CHECKSUM;
    is_tail.then(|| Checksum(tail.checksum.get()))
}

/// The length in bytes of the record at the start of `bytes`; `None` if `bytes` is shorter than the
/// head of a record.
fn record(bytes: &[u8]) -> Option<usize> {
    let (entry, _) = DirectoryEntry::read_from_prefix(bytes).ok()?;
    Some(entry.record_bytes.get().into())
}

/// Appends the names in `block`. The error describes the damage.
fn read(block: &BlockBuffer, records: &Records, names: &mut Vec<Name>) -> Result<(), &'static str> {
    let mut at = 0;
    while at < records.end {
        let rest = &block[at..records.limit];
        let damaged = "a block of the directory is damaged";
        let Ok((entry, behind)) = DirectoryEntry::read_from_prefix(rest) else {
            return Err(damaged);
        };
        let name_bytes = usize::from(entry.name_bytes);
        let length = usize::from(entry.record_bytes.get());
        if length < HEAD
            || !length.is_multiple_of(4)
            || name_bytes > length - HEAD
            || length > rest.len()
        {
            return Err(damaged);
        }
        let name = &behind[..name_bytes];
        if entry.inode.get() != 0 && !matches!(name, b"." | b"..") {
            if name.is_empty() || name.contains(&b'/') || name.contains(&0) {
                return Err("a name in the directory is not allowed");
            }
            names.push(Name {
                name: name.to_vec(),
                inode: InodeNumber(entry.inode.get()),
            });
        }
        at += length;
    }
    Ok(())
}
