//! Parts of a file from a server that sends whole files only.

use std::sync::TryLockError;
use std::sync::atomic::Ordering;

use super::{FEWEST_BYTES, MAX_BYTES, RemoteFile, Run};
use crate::cache::CacheFile;
use crate::client::AnswerBody;
use crate::error::{Fault, Problem};
use crate::lock::lock;
use crate::shared::Options;

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

/// Fails if a file of this length cannot be fetched whole and kept.
pub(super) fn require_room(options: &Options, file_bytes: u64) -> Result<(), Problem> {
    require_length(options, file_bytes)?;
    let Some(cache) = &options.cache else {
        let why = "there is no cache to keep the whole file in".to_owned();
        return Err(Problem::NoRanges(why));
    };
    match cache.limit() {
        Some(limit) if limit < file_bytes => Err(Problem::NoRanges(format!(
            "the whole file has {file_bytes} bytes, and the limit of the cache is {limit}"
        ))),
        _ => Ok(()),
    }
}

fn require_length(options: &Options, file_bytes: u64) -> Result<(), Problem> {
    let most = options.whole_bytes;
    if file_bytes > most {
        let why = format!("the file is longer than {most} bytes");
        return Err(Problem::NoRanges(why));
    }
    Ok(())
}

impl RemoteFile {
    /// Writes the whole file into the cache: its beginning, and what follows in an answer. As with
    /// any cache file, its bytes are checked when they are read. What does not arrive, the reads
    /// fetch.
    pub(super) fn keep_whole(&self, head: &[u8], body: AnswerBody) -> Result<(), Problem> {
        let cannot = |error: &str| {
            let why = format!("the whole file cannot be written into the cache: {error}");
            Problem::NoRanges(why)
        };
        let cached = self.cached.as_ref();
        let cached = cached.ok_or_else(|| cannot("its file cannot be opened"))?;
        cached.write(0, head);
        let mut whole = InOrder {
            file: self,
            body,
            at: head.len() as u64,
            extended_at: 0,
            cached: Some(cached),
        };
        while whole.at < self.file_bytes {
            let end = self.file_bytes.min(whole.at + MAX_BYTES);
            let arrived = whole.skip_to(end);
            if let Some(error) = cached.failure() {
                return Err(cannot(&error));
            }
            if let Err(fault) = arrived {
                tracing::debug!("{}: not read to its end: {}", self.name(), fault.problem);
                return Ok(());
            }
        }
        let counter = &self.shared.fetched_bytes;
        counter.fetch_add(self.file_bytes, Ordering::Relaxed);
        whole.body.release();
        Ok(())
    }

    /// Takes the rest of a run from an answer that has the whole file. If the cache has room for
    /// the file, all of it goes there, so that the next reads find it.
    pub(super) fn take_from_whole(&self, body: AnswerBody, run: &mut Run<'_>) -> Result<(), Fault> {
        require_length(&self.shared.options, self.file_bytes).map_err(Problem::permanent)?;
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
                return self.take_from_cache(run);
            }
        };
        let mut whole = InOrder {
            file: self,
            body,
            at: 0,
            extended_at: 0,
            cached,
        };
        whole.skip_to(self.chunks.start(run.next()))?;
        while run.left() > 0 {
            let mut bytes = vec![0; self.chunks.length(run.next())];
            whole.read_exact(&mut bytes)?;
            if !self.take(run, bytes) {
                return Err(Problem::WrongBytes.transient());
            }
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
    fn take_from_cache(&self, run: &mut Run<'_>) -> Result<(), Fault> {
        let before = run.done;
        while let Some(hash) = run.hashes.get(run.done as usize)
            && let Some(bytes) = self.present(run.next(), hash)
        {
            run.arrived(&bytes);
        }
        if run.done > before {
            Ok(())
        } else {
            let why = "the cache does not keep the whole file".to_owned();
            Err(Problem::NoRanges(why).transient())
        }
    }
}
