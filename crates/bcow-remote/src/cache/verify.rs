//! The check of cached bytes against the Merkle tree of their file.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;

use bcow::format::{HASH_BYTES, HEADER_AREA_BYTES, choose_header};
use rustix::fs::{OFlags, SeekFrom};
use rustix::io::Errno;
use serde::Serialize;

use super::eviction::punch_out;
use super::{Cache, MANIFEST_BYTES, document_name, name, sha256};
use crate::tree::{Chunk, Chunks, Hash, HashPlace, Root, matches};

/// The result of the check of a cached file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Verified {
    /// The length of the remote file; `None` if the cache does not have its header.
    pub file_bytes: Option<u64>,
    /// Bytes that match the Merkle tree.
    pub right_bytes: u64,
    /// Bytes of chunks that did not match, and were punched out.
    pub damaged_bytes: u64,
    /// Bytes whose hashes the cache does not have. They are checked when they are read.
    pub unknown_bytes: u64,
}

impl Verified {
    /// Whether the cache has the whole file.
    pub fn is_complete(&self) -> bool {
        self.file_bytes
            .is_some_and(|bytes| self.right_bytes >= bytes)
    }
}

impl Cache {
    /// Compares what the cache has of a file with the Merkle tree, and punches out what is wrong.
    /// Processes that use the file fetch that again. `progress` gets the number of bytes that were
    /// checked, and returns whether to go on. `None`: the cache does not have the file.
    pub fn verify(
        &self,
        root: Root,
        progress: &mut dyn FnMut(u64) -> bool,
    ) -> io::Result<Option<Verified>> {
        let file = match self.open_file(&name(&root.0), OFlags::empty()) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let Some(check) = Check::begin(&file, &root.0)? else {
            // Nothing of the file can be checked, and nothing of it is used.
            let damaged_bytes = file.metadata()?.len();
            file.set_len(0)?;
            return Ok(Some(Verified {
                damaged_bytes,
                ..Verified::default()
            }));
        };
        check.run(progress).map(Some)
    }

    /// Compares a manifest with its digest, and removes it if it is wrong. Returns whether it is
    /// right.
    pub fn verify_manifest(&self, digest: &[u8; 32]) -> io::Result<bool> {
        let digest = format!("sha256:{}", data_encoding::HEXLOWER.encode(digest));
        let name = document_name(&digest);
        let is_right = match self.open_file(&name, OFlags::empty()) {
            Ok(file) => {
                let mut bytes = Vec::new();
                file.take(MANIFEST_BYTES).read_to_end(&mut bytes)?;
                sha256(&bytes) == digest
            }
            // Removed meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => true,
            Err(error) => return Err(error),
        };
        if !is_right {
            self.remove_unused(&name)?;
        }
        Ok(is_right)
    }
}

struct Check<'f> {
    file: &'f File,
    chunks: Chunks,
    canonical: [u8; HEADER_AREA_BYTES],
    /// The last chunk of each level whose content was needed for hashes, if it is right.
    path: Vec<Option<(u64, Option<Vec<u8>>)>>,
    verified: Verified,
}

impl<'f> Check<'f> {
    /// `None` if the header is missing or wrong.
    fn begin(file: &'f File, root: &Hash) -> io::Result<Option<Self>> {
        let mut slots = [0; HEADER_AREA_BYTES];
        match file.read_exact_at(&mut slots, 0) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(error) => return Err(error),
        }
        let Ok(header) = choose_header(&slots) else {
            return Ok(None);
        };
        let tree = header.merkle.as_ref().filter(|tree| tree.root == *root);
        let Some(tree) = tree else {
            return Ok(None);
        };
        let chunks = Chunks::new(tree);
        let mut check = Check {
            file,
            path: (0..chunks.levels()).map(|_| None).collect(),
            chunks,
            canonical: header.canonical(),
            verified: Verified {
                file_bytes: Some(header.file_bytes),
                ..Verified::default()
            },
        };
        // Until the first chunk matches, the header is only a claim.
        let hash = check.hash(Chunk::FIRST)?;
        let first = check.read(Chunk::FIRST)?;
        let is_right = hash.is_some_and(|hash| check.is_right(Chunk::FIRST, &first, &hash));
        Ok(is_right.then_some(check))
    }

    fn run(mut self, progress: &mut dyn FnMut(u64) -> bool) -> io::Result<Verified> {
        // The tree from its top, so that what is wrong in it is out before what is below.
        for level in (0..self.chunks.levels()).rev() {
            if !self.check_level(level, progress)? {
                return Ok(self.verified);
            }
        }
        // The root itself is known from the name.
        let root = *self.chunks.root();
        let at = self.chunks.root_offset();
        let end = at + HASH_BYTES;
        self.file.write_all_at(&root, at)?;
        self.verified.right_bytes += HASH_BYTES;
        if self.file.metadata()?.len() > end {
            self.file.set_len(end)?;
        }
        Ok(self.verified)
    }

    /// Checks what the file has of a level. Returns whether to go on.
    fn check_level(
        &mut self,
        level: usize,
        progress: &mut dyn FnMut(u64) -> bool,
    ) -> io::Result<bool> {
        let mut checked_to = None;
        let mut at = 0;
        while let Some((start, end)) = next_data(self.file, at)? {
            at = end;
            let Some((first, count)) = self.chunks.touched(level, start, end) else {
                continue;
            };
            for n in 0..count {
                let chunk = first.after(n);
                if checked_to.is_some_and(|last| chunk <= last) {
                    continue;
                }
                checked_to = Some(chunk);
                self.check_chunk(chunk)?;
                if !progress(self.chunks.length(chunk) as u64) {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    fn check_chunk(&mut self, chunk: Chunk) -> io::Result<()> {
        let length = self.chunks.length(chunk) as u64;
        let Some(hash) = self.hash(chunk)? else {
            self.verified.unknown_bytes += length;
            return Ok(());
        };
        // The second look is for a chunk that another process was writing during the first.
        for _ in 0..2 {
            let bytes = self.read(chunk)?;
            if self.is_right(chunk, &bytes, &hash) {
                self.verified.right_bytes += length;
                return Ok(());
            }
            // Missing: the host's block at its end has bytes of the next chunk.
            if bytes.iter().all(|&byte| byte == 0) {
                return Ok(());
            }
        }
        punch_out(self.file, self.chunks.start(chunk), length)?;
        self.verified.damaged_bytes += length;
        Ok(())
    }

    fn is_right(&self, chunk: Chunk, bytes: &[u8], hash: &Hash) -> bool {
        matches(chunk, bytes, hash, &self.canonical)
    }

    /// The hash of a chunk; `None` if the cache does not have it.
    fn hash(&mut self, chunk: Chunk) -> io::Result<Option<Hash>> {
        let (parent, at) = match self.chunks.hash_place(chunk) {
            HashPlace::Root => return Ok(Some(*self.chunks.root())),
            HashPlace::In(parent, at) => (parent, at),
        };
        let known = &self.path[parent.level];
        if known
            .as_ref()
            .is_none_or(|(index, _)| *index != parent.index)
        {
            let bytes = match self.hash(parent)? {
                Some(hash) => {
                    let bytes = self.read(parent)?;
                    self.is_right(parent, &bytes, &hash).then_some(bytes)
                }
                None => None,
            };
            self.path[parent.level] = Some((parent.index, bytes));
        }
        let bytes = self.path[parent.level]
            .as_ref()
            .and_then(|(_, bytes)| bytes.as_ref());
        Ok(bytes.map(|bytes| {
            let mut hash = Hash::default();
            hash.copy_from_slice(&bytes[at..at + HASH_BYTES as usize]);
            hash
        }))
    }

    /// The bytes of a chunk; zeros behind the end of the file.
    fn read(&self, chunk: Chunk) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; self.chunks.length(chunk)];
        let mut done = 0;
        while done < bytes.len() {
            let at = self.chunks.start(chunk) + done as u64;
            match self.file.read_at(&mut bytes[done..], at) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(bytes)
    }
}

/// The first range of data at or behind `at`.
fn next_data(file: &File, at: u64) -> io::Result<Option<(u64, u64)>> {
    let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok(None),
        // The file system does not know holes.
        Err(Errno::INVAL) => {
            let length = file.metadata()?.len();
            return Ok((at < length).then_some((at, length)));
        }
        Err(error) => return Err(error.into()),
    };
    let end = match rustix::fs::seek(file, SeekFrom::Hole(start)) {
        Ok(end) => end,
        Err(_) => file.metadata()?.len(),
    };
    Ok((start < end).then_some((start, end)))
}
