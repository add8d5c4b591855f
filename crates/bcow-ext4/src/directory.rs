//! Directories: one block of names, or a hash tree over blocks of names.

use zerocopy::IntoBytes;

use crate::checksum::Checksum;
use crate::format::{
    BLOCK_BYTES, DirectoryEntry, DirectoryTail, HASH_HALF_MD4, IndexRoot, NAME_MAX, entry_type,
};
use crate::hash::{NameHash, NameHasher};
use crate::node::{DirEntry, InodeNumber};
use crate::output::{BlockBuffer, Output, blocks_of};
use crate::{BlockRange, Ext4Error, InodeProblem};

/// Bytes for names in a block; the checksum is behind them.
const LEAF_BYTES: usize = BLOCK_BYTES - size_of::<DirectoryTail>();

/// Bytes of names in a new block of a hash tree, so that further names do not split every block.
const FILL_BYTES: usize = LEAF_BYTES * 4 / 5;

/// Bytes in front of the index entries of the root: `.`, `..` and the description of the tree.
const ROOT_HEAD: usize = 32;

/// Bytes in front of the index entries of a node: one empty directory entry.
const NODE_HEAD: usize = 8;

/// Bytes of an index entry, and of the checksum behind the room for them.
const INDEX: usize = 8;

/// Room for index entries, in the root and in a node.
const ROOT_ENTRIES: usize = (BLOCK_BYTES - ROOT_HEAD) / INDEX - 1;
const NODE_ENTRIES: usize = (BLOCK_BYTES - NODE_HEAD) / INDEX - 1;

/// A directory's own number, its parent, and the seed of its checksums.
#[derive(Clone, Copy)]
pub(crate) struct Identity {
    pub own: InodeNumber,
    pub parent: InodeNumber,
    pub seed: Checksum,
}

/// A directory that has been written.
pub(crate) struct Written {
    pub ranges: Vec<BlockRange>,
    pub has_index: bool,
}

/// An entry with the hash of its name.
struct Hashed<'a, 'e> {
    hash: NameHash,
    entry: &'a DirEntry<'e>,
}

/// Checks the names of a directory.
pub(crate) fn check_names(entries: &[DirEntry<'_>]) -> Result<(), InodeProblem> {
    for entry in entries {
        let name = entry.name;
        let is_allowed = (1..=NAME_MAX).contains(&name.len())
            && name != b"."
            && name != b".."
            && !name.iter().any(|&byte| byte == b'/' || byte == 0);
        if !is_allowed {
            return Err(InodeProblem::Name(name.to_vec()));
        }
    }
    Ok(())
}

/// Writes a directory.
pub(crate) fn write(
    identity: Identity,
    entries: &[DirEntry<'_>],
    hasher: &NameHasher,
    output: &mut Output<'_>,
) -> Result<Written, Ext4Error> {
    let mut hashed: Vec<Hashed<'_, '_>> = entries
        .iter()
        .map(|entry| Hashed {
            hash: hasher.hash(entry.name),
            entry,
        })
        .collect();
    hashed.sort_unstable_by(|a, b| (a.hash, a.entry.name).cmp(&(b.hash, b.entry.name)));
    let twice = hashed
        .windows(2)
        .find(|pair| pair[0].entry.name == pair[1].entry.name);
    if let Some(pair) = twice {
        let problem = InodeProblem::NameTwice(pair[0].entry.name.to_vec());
        return Err(identity.own.refused(problem));
    }
    let bytes: usize = entries.iter().map(|entry| record_bytes(entry.name)).sum();
    if bytes + 2 * record_bytes(b"..") <= LEAF_BYTES {
        return write_blocks(identity, entries, 1, output);
    }
    write_tree(identity, &hashed, output)
}

/// Writes a directory of `blocks` blocks with all names in the first one, so that further names
/// find room in it without allocation.
pub(crate) fn write_blocks(
    identity: Identity,
    entries: &[DirEntry<'_>],
    blocks: u64,
    output: &mut Output<'_>,
) -> Result<Written, Ext4Error> {
    let ranges = output.space.allocate_all(blocks)?;
    let mut leaf = Leaf::new();
    leaf.push(identity.own, b".", entry_type::DIRECTORY);
    leaf.push(identity.parent, b"..", entry_type::DIRECTORY);
    for entry in entries {
        leaf.push(entry.inode, entry.name, entry.kind.entry_type());
    }
    output.write(ranges[0].start, &leaf.finish(identity.seed))?;
    for block in blocks_of(&ranges).skip(1) {
        output.write(block, &Leaf::new().finish(identity.seed))?;
    }
    Ok(Written {
        ranges,
        has_index: false,
    })
}

/// Block 0 is the root, the nodes come next, then the leaves.
fn write_tree(
    identity: Identity,
    entries: &[Hashed<'_, '_>],
    output: &mut Output<'_>,
) -> Result<Written, Ext4Error> {
    let leaves = split(entries);
    let nodes = match leaves.len() {
        ..=ROOT_ENTRIES => 0,
        count => count.div_ceil(NODE_ENTRIES),
    };
    if nodes > ROOT_ENTRIES {
        let problem = InodeProblem::DirectoryEntries(entries.len());
        return Err(identity.own.refused(problem));
    }
    let blocks = 1 + nodes + leaves.len();
    let ranges = output.space.allocate_all(blocks as u64)?;
    // The index entries of the leaves: the least hash of each, and its block in the directory.
    let mut index = Vec::with_capacity(leaves.len());
    let mut before = None;
    let places = blocks_of(&ranges).skip(1 + nodes);
    for ((n, names), place) in leaves.iter().enumerate().zip(places) {
        let first = names[0].hash.major;
        // An odd hash: names with this hash are also in the leaf before.
        let hash = first | u32::from(before == Some(first));
        index.push((hash, (1 + nodes + n) as u32));
        before = names.last().map(|entry| entry.hash.major);
        let mut leaf = Leaf::new();
        for Hashed { entry, .. } in *names {
            leaf.push(entry.inode, entry.name, entry.kind.entry_type());
        }
        output.write(place, &leaf.finish(identity.seed))?;
    }
    if nodes > 0 {
        let mut above = Vec::with_capacity(nodes);
        for ((n, part), place) in (1..)
            .zip(index.chunks(NODE_ENTRIES))
            .zip(blocks_of(&ranges).skip(1))
        {
            above.push((part[0].0, n));
            output.write(place, &node(part, identity.seed))?;
        }
        index = above;
    }
    output.write(ranges[0].start, &root_block(identity, &index, nodes > 0))?;
    Ok(Written {
        ranges,
        has_index: true,
    })
}

/// The names of each leaf.
fn split<'h, 'a, 'e>(entries: &'h [Hashed<'a, 'e>]) -> Vec<&'h [Hashed<'a, 'e>]> {
    let mut leaves = Vec::new();
    let mut start = 0;
    let mut bytes = 0;
    for (at, hashed) in entries.iter().enumerate() {
        let record = record_bytes(hashed.entry.name);
        if bytes + record > FILL_BYTES {
            leaves.push(&entries[start..at]);
            start = at;
            bytes = 0;
        }
        bytes += record;
    }
    leaves.push(&entries[start..]);
    leaves
}

fn root_block(identity: Identity, index: &[(u32, u32)], has_nodes: bool) -> BlockBuffer {
    let mut buffer = [0; BLOCK_BYTES];
    let dot = record_bytes(b".");
    put_record(
        &mut buffer[..dot],
        identity.own,
        b".",
        entry_type::DIRECTORY,
    );
    put_record(
        &mut buffer[dot..],
        identity.parent,
        b"..",
        entry_type::DIRECTORY,
    );
    let description = IndexRoot {
        zero: 0.into(),
        hash_version: HASH_HALF_MD4,
        info_bytes: size_of::<IndexRoot>() as u8,
        levels: has_nodes.into(),
        flags: 0,
    };
    let info = ROOT_HEAD - size_of::<IndexRoot>();
    buffer[info..ROOT_HEAD].copy_from_slice(description.as_bytes());
    put_index(&mut buffer, ROOT_HEAD, ROOT_ENTRIES, index, identity.seed);
    buffer
}

fn node(index: &[(u32, u32)], seed: Checksum) -> BlockBuffer {
    let mut buffer = [0; BLOCK_BYTES];
    put_record(&mut buffer, InodeNumber(0), b"", 0);
    put_index(&mut buffer, NODE_HEAD, NODE_ENTRIES, index, seed);
    buffer
}

/// Writes index entries, each a hash and a block, from byte `head` on. The room for the first hash
/// holds the limit and the number of entries.
fn put_index(
    buffer: &mut BlockBuffer,
    head: usize,
    limit: usize,
    index: &[(u32, u32)],
    seed: Checksum,
) {
    for (place, (hash, block)) in buffer[head..].chunks_exact_mut(INDEX).zip(index) {
        place[..4].copy_from_slice(&hash.to_le_bytes());
        place[4..].copy_from_slice(&block.to_le_bytes());
    }
    buffer[head..head + 2].copy_from_slice(&(limit as u16).to_le_bytes());
    buffer[head + 2..head + 4].copy_from_slice(&(index.len() as u16).to_le_bytes());
    let used = head + index.len() * INDEX;
    // The checksum covers the entries in use, and its own room as zeros.
    let checksum = seed.with(&buffer[..used]).with(&[0; INDEX]);
    let tail = head + limit * INDEX;
    buffer[tail + 4..tail + INDEX].copy_from_slice(&checksum.0.to_le_bytes());
}

/// A block of names.
struct Leaf {
    buffer: BlockBuffer,
    /// Start and end of the last record.
    last: usize,
    end: usize,
}

impl Leaf {
    fn new() -> Leaf {
        Leaf {
            buffer: [0; BLOCK_BYTES],
            last: 0,
            end: 0,
        }
    }

    fn push(&mut self, inode: InodeNumber, name: &[u8], file_type: u8) {
        let bytes = record_bytes(name);
        put_record(
            &mut self.buffer[self.end..self.end + bytes],
            inode,
            name,
            file_type,
        );
        self.last = self.end;
        self.end += bytes;
    }

    /// Extends the last record to the end of the block, and appends the checksum.
    fn finish(mut self, seed: Checksum) -> BlockBuffer {
        let bytes = ((LEAF_BYTES - self.last) as u16).to_le_bytes();
        self.buffer[self.last + 4..self.last + 6].copy_from_slice(&bytes);
        let tail = DirectoryTail {
            zero: 0.into(),
            record_bytes: (size_of::<DirectoryTail>() as u16).into(),
            name_bytes: 0,
            file_type: entry_type::CHECKSUM,
            checksum: seed.with(&self.buffer[..LEAF_BYTES]).0.into(),
        };
        self.buffer[LEAF_BYTES..].copy_from_slice(tail.as_bytes());
        self.buffer
    }
}

/// Bytes of a directory entry without room behind it.
fn record_bytes(name: &[u8]) -> usize {
    size_of::<DirectoryEntry>() + name.len().next_multiple_of(4)
}

/// Writes an entry that takes all of `room`.
fn put_record(room: &mut [u8], inode: InodeNumber, name: &[u8], file_type: u8) {
    let head = DirectoryEntry {
        inode: inode.0.into(),
        record_bytes: (room.len() as u16).into(),
        name_bytes: name.len() as u8,
        file_type,
    };
    let (place, rest) = room.split_at_mut(size_of::<DirectoryEntry>());
    place.copy_from_slice(head.as_bytes());
    rest[..name.len()].copy_from_slice(name);
}
