//! Any bytes as an ext4: its journal is replayed, its tree read.
//!
//! Each block is given with its number, in two bytes, and its content; all others have zeros. So a
//! file system with a journal is a small input. Checksums of the metadata are switched off, and
//! those of the journal where its superblock says so.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use bcow_ext4::{FileKind, FilesystemBytes, InodeNumber, ReadError, Reader};

const BLOCK: usize = 4096;
/// Size of the device: as many blocks as two bytes can number.
const BYTES: u64 = 256 << 20;
const MAX_NAMES: usize = 1 << 16;
const MAX_INODES: usize = 512;

/// A device of this size, and those of its blocks that are not zeros.
pub struct Blocks {
    pub bytes: u64,
    pub written: BTreeMap<u64, [u8; BLOCK]>,
}

impl FilesystemBytes for Blocks {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < buf.len() {
            let at = offset as usize + done;
            let count = (BLOCK - at % BLOCK).min(buf.len() - done);
            let part = &mut buf[done..done + count];
            match self.written.get(&((at / BLOCK) as u64)) {
                Some(block) => part.copy_from_slice(&block[at % BLOCK..][..count]),
                None => part.fill(0),
            }
            done += count;
        }
        Ok(())
    }
}

pub fn fuzz(bytes: &[u8]) {
    let mut written = BTreeMap::new();
    let (records, _) = bytes.as_chunks::<{ 2 + BLOCK }>();
    for record in records {
        let mut block = [0; BLOCK];
        block.copy_from_slice(&record[2..]);
        written.insert(u16::from_le_bytes([record[0], record[1]]).into(), block);
    }
    if let Some(block) = written.get_mut(&0) {
        // METADATA_CHECKSUM, of the features that allow reading only.
        block[1024 + 101] &= !4;
    }
    let bytes = BYTES;
    let _ = read_all(Box::new(Blocks { bytes, written }));
}

/// Reads the tree of a file system, and the begin of each file.
pub fn read_all(source: Box<dyn FilesystemBytes>) -> Result<(), ReadError> {
    let reader = Reader::open(source)?;
    let mut seen = BTreeSet::new();
    let mut pending = vec![InodeNumber::ROOT];
    let mut first_error = Ok(());
    while let Some(number) = pending.pop() {
        if !seen.insert(number) || seen.len() > MAX_INODES {
            continue;
        }
        // What is damaged hides nothing else from the fuzzer.
        match read_inode(&reader, number) {
            Ok(found) => pending.extend(found),
            Err(error) => first_error = first_error.and(Err(error)),
        }
    }
    first_error?;
    reader.metadata_blocks()?;
    reader.block_bitmap(0)?;
    Ok(())
}

/// Reads one inode. Returns the inodes in it, if it is a directory.
fn read_inode(reader: &Reader, number: InodeNumber) -> Result<Vec<InodeNumber>, ReadError> {
    let inode = reader.inode(number)?;
    reader.xattrs(&inode)?;
    match inode.kind {
        FileKind::Directory => {
            let names = reader.names(&inode, MAX_NAMES)?;
            return Ok(names.into_iter().map(|name| name.inode).collect());
        }
        FileKind::Symlink => drop(reader.read_link(&inode)?),
        FileKind::Regular => {
            let extents = reader.extents(&inode)?;
            let mut begin = vec![0; inode.size.min(3 * BLOCK as u64) as usize];
            reader.read(&extents, 0, &mut begin)?;
        }
        _ => {}
    }
    Ok(Vec::new())
}
