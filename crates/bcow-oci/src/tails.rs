//! Keeps file tails until the inodes are written. The inodes are written after all other content. A
//! tail is the last partial block of a file, or a small file as a whole; EROFS stores it behind the
//! inode.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use bcow_erofs::tree::{Tail, TailSource};

use crate::error::ConvertError;

/// Limit of the tails in memory, in bytes. Before they exceed it, they are written to the file.
const MEMORY_BYTES: usize = 8 << 20;
/// Bytes per read from the file. One read serves many tails, because tails are read in about the
/// order in which they were stored.
const READ_BYTES: usize = 256 << 10;

/// Longest tail in bytes: a whole block is not stored behind an inode.
const MAX_TAIL: u16 = 4095;

/// Tails: the newest, up to 8 MiB, in memory; all older ones in an unnamed file.
pub(crate) struct TailStore {
    directory: PathBuf,
    file: Option<File>,
    /// Bytes in the file; memory has the bytes that follow.
    spilled: u64,
    memory: Vec<u8>,
    /// The last read from the file: its offset and its bytes.
    read_ahead: Mutex<(u64, Vec<u8>)>,
}

impl TailStore {
    /// `directory` is the directory in which the unnamed file is created, if one is needed.
    pub(crate) fn new(directory: &Path) -> Self {
        TailStore {
            directory: directory.to_owned(),
            file: None,
            spilled: 0,
            memory: Vec::new(),
            read_ahead: Mutex::default(),
        }
    }

    /// Stores a tail of 1 to 4095 bytes, given as two slices. Other lengths are errors.
    pub(crate) fn push(&mut self, first: &[u8], second: &[u8]) -> Result<Tail, ConvertError> {
        let length = first.len() + second.len();
        let stored = u16::try_from(length).ok();
        let Some(stored) = stored.filter(|length| (1..=MAX_TAIL).contains(length)) else {
            let source = io::Error::other(format!("it has {length} bytes"));
            return Err(ConvertError::write(
                "keep a file tail for",
                &self.directory,
                source,
            ));
        };
        // The tails in memory are written to the file before the new tail is added, so that no tail
        // is partly in the file.
        if self.memory.len() + length > MEMORY_BYTES {
            self.spill().map_err(|source| {
                ConvertError::write("write a temporary file in", &self.directory, source)
            })?;
        }
        let offset = self.spilled + self.memory.len() as u64;
        self.memory.extend_from_slice(first);
        self.memory.extend_from_slice(second);
        Ok(Tail {
            offset,
            length: stored,
        })
    }

    fn spill(&mut self) -> io::Result<()> {
        let file = match &mut self.file {
            Some(file) => file,
            None => self.file.insert(tempfile::tempfile_in(&self.directory)?),
        };
        file.write_all(&self.memory)?;
        self.spilled += self.memory.len() as u64;
        self.memory.clear();
        Ok(())
    }
}

impl TailSource for TailStore {
    fn read_tail(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let end = offset
            .checked_add(buf.len() as u64)
            .ok_or(io::ErrorKind::InvalidInput)?;
        let Some(file) = self.file.as_ref().filter(|_| offset < self.spilled) else {
            let at = (offset - self.spilled) as usize;
            let bytes = self
                .memory
                .get(at..at + buf.len())
                .ok_or(io::ErrorKind::UnexpectedEof)?;
            buf.copy_from_slice(bytes);
            return Ok(());
        };
        let mut cache = self.read_ahead.lock().unwrap_or_else(|e| e.into_inner());
        let (start, bytes) = &mut *cache;
        if offset < *start || end > *start + bytes.len() as u64 {
            bytes.resize(
                READ_BYTES
                    .min((self.spilled - offset) as usize)
                    .max(buf.len()),
                0,
            );
            *start = offset;
            if let Err(error) = file.read_exact_at(bytes, offset) {
                bytes.clear();
                return Err(error);
            }
        }
        let at = (offset - *start) as usize;
        buf.copy_from_slice(&bytes[at..at + buf.len()]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_lengths_are_refused() {
        let mut store = TailStore::new(&std::env::temp_dir());
        for (first, second) in [(0, 0), (4096, 0), (1, 4095), (65_536, 1)] {
            let pushed = store.push(&vec![0; first], &vec![0; second]);
            assert!(pushed.is_err(), "{first} + {second}");
        }
        assert_eq!(store.push(&[1], &[0; 4094]).unwrap().length, 4095);
    }

    #[test]
    fn tails_read_back_from_memory_and_from_the_file() {
        let mut store = TailStore::new(&std::env::temp_dir());
        let bytes = |i: u32| vec![(i % 251) as u8; 1 + (i as usize * 37) % 4095];
        let mut tails = Vec::new();
        for i in 0..10_000 {
            let tail = bytes(i);
            let cut = tail.len() / 3;
            tails.push(store.push(&tail[..cut], &tail[cut..]).unwrap());
        }
        assert!(store.spilled > 0 && !store.memory.is_empty());
        for i in (0..10_000).chain([5, 9_999, 0, 4_000]) {
            let tail = tails[i as usize];
            let mut buf = vec![0; tail.length.into()];
            store.read_tail(tail.offset, &mut buf).unwrap();
            assert_eq!(buf, bytes(i));
        }
    }
}
