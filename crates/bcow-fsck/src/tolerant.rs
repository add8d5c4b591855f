//! Reads a file on another machine although the server sends wrong bytes.

use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use bcow::{FileIdentity, Storage, header_of};
use bcow_remote::{Problem, RemoteError};

/// Limit of the wrong chunks of one file. Each costs further requests.
const MAX_WRONG_CHUNKS: usize = 1000;

/// A file whose wrong chunks read as zeros, so that a check finds them as it finds damage in a file
/// of this machine. Other errors, and more than [`MAX_WRONG_CHUNKS`] wrong chunks, are errors of
/// reading.
struct Tolerant {
    storage: Arc<dyn Storage>,
    chunk_bytes: u64,
    /// Offsets of the wrong chunks. The lock is never held while chunks are fetched.
    wrong: Mutex<BTreeSet<u64>>,
}

/// Makes a storage tolerant. One without a Merkle tree stays as it is.
pub fn tolerant(storage: Arc<dyn Storage>) -> Arc<dyn Storage> {
    let tree = header_of(&*storage).and_then(|header| header.merkle);
    match tree {
        Some(tree) => Arc::new(Tolerant {
            storage,
            chunk_bytes: 1 << tree.chunk_shift,
            wrong: Mutex::default(),
        }),
        None => storage,
    }
}

impl Tolerant {
    /// Whether a chunk of the range is known to be wrong.
    fn meets_wrong(&self, offset: u64, bytes: u64) -> bool {
        let first = offset - offset % self.chunk_bytes;
        let wrong = self.wrong.lock().unwrap_or_else(PoisonError::into_inner);
        wrong
            .range(first..offset.saturating_add(bytes))
            .next()
            .is_some()
    }

    /// Reads a part of one chunk.
    fn read_part(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let start = offset - offset % self.chunk_bytes;
        let wrong = || self.wrong.lock().unwrap_or_else(PoisonError::into_inner);
        if !wrong().contains(&start) {
            match self.storage.read_at(offset, buf) {
                Err(error) if is_wrong(&error) => {
                    tracing::info!("{error}");
                    let mut wrong = wrong();
                    wrong.insert(start);
                    if wrong.len() > MAX_WRONG_CHUNKS {
                        return Err(error);
                    }
                }
                read => return read,
            }
        }
        buf.fill(0);
        Ok(())
    }
}

/// Whether the server sent bytes that do not match the Merkle tree.
fn is_wrong(error: &io::Error) -> bool {
    RemoteError::below(error).is_some_and(|error| matches!(error.problem, Problem::WrongBytes))
}

impl Storage for Tolerant {
    fn len(&self) -> io::Result<u64> {
        self.storage.len()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        if !self.meets_wrong(offset, buf.len() as u64) {
            match self.storage.read_at(offset, buf) {
                Err(error) if is_wrong(&error) => {}
                read => return read,
            }
        }
        let mut at = offset;
        let mut rest = buf;
        while !rest.is_empty() {
            let left = self.chunk_bytes - at % self.chunk_bytes;
            let (part, behind) = rest.split_at_mut(left.min(rest.len() as u64) as usize);
            self.read_part(at, part)?;
            at += part.len() as u64;
            rest = behind;
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.storage.write_at(offset, bytes)
    }

    fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.storage.set_len(bytes)
    }

    fn sync(&self) -> io::Result<()> {
        self.storage.sync()
    }

    fn identity(&self) -> Option<FileIdentity> {
        self.storage.identity()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of ones on a server that sends other bytes for some chunks.
    struct Wrong(fn(u64) -> bool);

    const CHUNK: u64 = 16;

    impl Storage for Wrong {
        fn len(&self) -> io::Result<u64> {
            Ok(u64::MAX)
        }

        fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
            let end = offset + buf.len() as u64;
            if (offset / CHUNK..end.div_ceil(CHUNK)).any(self.0) {
                return Err(RemoteError {
                    place: "there".into(),
                    problem: Problem::WrongBytes,
                }
                .into());
            }
            buf.fill(1);
            Ok(())
        }

        fn write_at(&self, _: u64, _: &[u8]) -> io::Result<()> {
            Err(io::ErrorKind::Unsupported.into())
        }

        fn set_len(&self, _: u64) -> io::Result<()> {
            Err(io::ErrorKind::Unsupported.into())
        }

        fn sync(&self) -> io::Result<()> {
            Ok(())
        }
    }

    fn tolerant(is_wrong: fn(u64) -> bool) -> Tolerant {
        Tolerant {
            storage: Arc::new(Wrong(is_wrong)),
            chunk_bytes: CHUNK,
            wrong: Mutex::default(),
        }
    }

    #[test]
    fn wrong_chunks_read_as_zeros_and_others_as_they_are() {
        let file = tolerant(|chunk| chunk == 2);
        for _ in 0..2 {
            let mut bytes = [9; 60];
            file.read_at(10, &mut bytes).expect("bytes");
            let expected: Vec<u8> = (10..70).map(|at| u8::from(at / CHUNK != 2)).collect();
            assert_eq!(bytes.to_vec(), expected);
        }
        let mut bytes = [9; 4];
        file.read_at(40, &mut bytes).expect("bytes");
        assert_eq!(bytes, [0; 4]);
    }

    #[test]
    fn a_file_with_too_many_wrong_chunks_is_an_error() {
        let file = tolerant(|_| true);
        let most = MAX_WRONG_CHUNKS as u64 * CHUNK;
        let mut bytes = vec![9; most as usize];
        file.read_at(0, &mut bytes).expect("bytes");
        file.read_at(most, &mut [0]).expect_err("the next one");
    }
}
