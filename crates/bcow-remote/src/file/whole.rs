//! Parts of a file from a server that sends whole files only.

use std::sync::{Arc, TryLockError};

use super::{FEWEST_BYTES, RemoteFile, Run};
use crate::cache::CacheFile;
use crate::client::AnswerBody;
use crate::error::{Fault, Problem};
use crate::lock::lock;
use crate::tree::Chunk;

/// Bytes of one read of what no chunk of the run has.
const STEP_BYTES: u64 = 64 << 10;

/// The bytes of a whole file, in their order.
struct InOrder<'f> {
    file: &'f RemoteFile,
    body: AnswerBody,
    at: u64,
    /// Where the time for the next bytes began.
    extended_at: u64,
    /// The cache file that gets all bytes. Its reader checks them.
    cached: Option<&'f CacheFile>,
}

impl InOrder<'_> {
    fn read_exact(&mut self, bytes: &mut [u8]) -> Result<(), Fault> {
        // A slow network may take long for a whole file, but not for a part of it.
        if self.at - self.extended_at >= FEWEST_BYTES {
            self.body.extend(self.file.shared.options.timeout);
            self.extended_at = self.at;
        }
        self.body.read_exact(bytes)?;
        if let Some(cached) = self.cached {
            cached.write(self.at, bytes);
        }
        self.at += bytes.len() as u64;
        Ok(())
    }

    /// Reads up to this offset.
    fn skip_to(&mut self, end: u64) -> Result<(), Fault> {
        let mut buf = vec![0; STEP_BYTES as usize];
        while self.at < end {
            let step = (end - self.at).min(STEP_BYTES) as usize;
            self.read_exact(&mut buf[..step])?;
        }
        Ok(())
    }
}

impl RemoteFile {
    /// Takes the rest of a run from an answer that has the whole file. If the cache has room for
    /// the file, all of it goes there, so that the next reads find it.
    pub(super) fn take_from_whole(
        &self,
        body: AnswerBody,
        run: &Run<'_>,
        done: &mut u64,
        sink: &mut dyn FnMut(Chunk, &Arc<[u8]>),
    ) -> Result<(), Fault> {
        let most = self.shared.options.whole_bytes;
        if self.file_bytes > most {
            let why = format!("the file is longer than {most} bytes");
            return Err(Problem::NoRanges(why).permanent());
        }
        let has_room = |cached: &&CacheFile| {
            let limit = cached.limit();
            limit.is_none_or(|limit| self.file_bytes <= limit)
        };
        let cached = self.cached.as_ref().filter(has_room);
        let _alone = match (cached, self.whole.try_lock()) {
            (None, _) => None,
            (Some(_), Ok(alone)) => Some(alone),
            (Some(_), Err(TryLockError::Poisoned(alone))) => Some(alone.into_inner()),
            (Some(_), Err(TryLockError::WouldBlock)) => {
                drop(body);
                drop(lock(&self.whole));
                return self.take_from_cache(run, done, sink);
            }
        };
        let mut whole = InOrder {
            file: self,
            body,
            at: 0,
            extended_at: 0,
            cached,
        };
        whole.skip_to(self.chunks.start(run.first.after(*done)))?;
        while let Some(hash) = run.hashes.get(*done as usize) {
            let chunk = run.first.after(*done);
            let mut bytes = vec![0; self.chunks.length(chunk)];
            whole.read_exact(&mut bytes)?;
            if !self.matches(chunk, &bytes, hash) {
                return Err(Problem::WrongBytes.transient());
            }
            sink(chunk, &self.keep(chunk, bytes.into(), run.purpose));
            *done += 1;
        }
        if cached.is_some()
            && let Err(fault) = whole.skip_to(self.file_bytes)
        {
            tracing::debug!("{}: not read to its end: {}", self.name(), fault.problem);
        }
        if whole.at == self.file_bytes {
            whole.body.release();
        }
        Ok(())
    }

    /// Takes the rest of a run from the cache, into which another thread has fetched the file.
    fn take_from_cache(
        &self,
        run: &Run<'_>,
        done: &mut u64,
        sink: &mut dyn FnMut(Chunk, &Arc<[u8]>),
    ) -> Result<(), Fault> {
        let before = *done;
        while let Some(hash) = run.hashes.get(*done as usize) {
            let chunk = run.first.after(*done);
            let Some(bytes) = self.present(chunk, hash) else {
                break;
            };
            sink(chunk, &bytes);
            *done += 1;
        }
        if *done > before {
            Ok(())
        } else {
            let why = "the cache does not keep the whole file".to_owned();
            Err(Problem::NoRanges(why).transient())
        }
    }
}
