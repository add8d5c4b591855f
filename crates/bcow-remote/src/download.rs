//! A whole blob, read in order. A connection that breaks is continued where it broke.
//!
//! The bytes are not checked here: the caller knows the digest of the whole. Only those of a mirror
//! are: a blob of a mirror is stored in a file without a name and compared with its digest before
//! its first byte is returned, so that another server can be asked if it is wrong.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::sync::Arc;
use std::time::Instant;

use data_encoding::HEXLOWER;
use sha2::{Digest, Sha256};

use crate::client::AnswerBody;
use crate::error::{Fault, Problem};
use crate::mirrors::{Mirror, Sources};
use crate::retry_budget::RetryBudget;
use crate::shared::Shared;
use crate::source::{RangeAnswer, Source};

/// Bytes that must arrive before the time for a silent server begins again. So a server that sends
/// a byte now and then does not hold a reader for ever.
const PROGRESS_BYTES: u64 = 64 << 10;
/// Times that the bytes before a break are fetched again, from a server that does not know ranges.
const MAX_RESTARTS: u32 = 5;
/// Bytes per read of what is skipped.
const SKIP_BYTES: usize = 64 << 10;
/// Bytes per read of what comes from a mirror.
const MIRROR_BYTES: usize = 256 << 10;

/// The bytes of a blob, from the first to the last.
pub struct Download {
    shared: Arc<Shared>,
    source: Source,
    length: u64,
    /// Bytes that the caller has got.
    at: u64,
    /// The running answer, and the number of bytes that came from it.
    body: Option<(AnswerBody, u64)>,
    budget: RetryBudget,
    /// Bytes since the time began again.
    fresh_bytes: u64,
    /// When the last read ended. The time that the caller takes does not count.
    left_at: Instant,
    restarts: u32,
    is_complete: bool,
    /// `sha256:HEX`.
    digest: String,
    /// The copies on mirrors that were not asked yet, the next one last.
    mirrors: Vec<(Arc<Mirror>, Source)>,
    /// The blob of a mirror, which has the digest, at the next byte of the caller.
    from_mirror: Option<File>,
}

impl Download {
    /// The blob with this digest, which must have `length` bytes. No connection is made.
    pub(crate) fn new(shared: Arc<Shared>, sources: Sources, digest: &str, length: u64) -> Self {
        let (source, mut mirrors) = sources.into_parts();
        mirrors.reverse();
        Download {
            digest: digest.to_owned(),
            mirrors,
            from_mirror: None,
            budget: shared.opening(),
            shared,
            source,
            length,
            at: 0,
            body: None,
            fresh_bytes: 0,
            left_at: Instant::now(),
            restarts: 0,
            is_complete: false,
        }
    }

    fn some(&mut self, buf: &mut [u8]) -> Result<usize, Problem> {
        loop {
            match self.attempt(buf) {
                Ok(Some(count)) => {
                    self.advance(count as u64);
                    return Ok(count);
                }
                Ok(None) => {}
                Err(fault) => {
                    self.body = None;
                    self.budget.wait(fault)?;
                }
            }
        }
    }

    fn advance(&mut self, bytes: u64) {
        if self.at == 0 {
            // The server has the blob. From here on it may be gone for a while.
            self.budget = self.shared.reading();
        }
        self.at += bytes;
        self.fresh_bytes += bytes;
        if self.fresh_bytes >= PROGRESS_BYTES {
            self.fresh_bytes = 0;
            self.budget.progress();
        }
    }

    /// Reads some bytes; `None` if the answer ended after it had brought some.
    fn attempt(&mut self, buf: &mut [u8]) -> Result<Option<usize>, Fault> {
        let (body, got) = match &mut self.body {
            Some(running) => running,
            None => {
                let body = self.request()?;
                self.body.insert((body, 0))
            }
        };
        body.extend(self.budget.left());
        match body.read(buf)? {
            0 if *got > 0 => {
                self.body = None;
                Ok(None)
            }
            0 => Err(Problem::Answer("it has no bytes".into()).transient()),
            count => {
                *got += count as u64;
                Ok(Some(count))
            }
        }
    }

    /// Requests what is missing.
    fn request(&mut self) -> Result<AnswerBody, Fault> {
        let (announced, body) = match self.at {
            0 => self.source.whole(&self.budget)?,
            at => {
                tracing::debug!("{}: continued at byte {at}", self.source.address());
                match self.source.range(at, self.length, &self.budget)? {
                    RangeAnswer::Part { total, body, .. } => (total, body),
                    RangeAnswer::Whole { length, body } => (length, self.skip(body)?),
                }
            }
        };
        match announced {
            Some(found) if found != self.length => Err(self.wrong_length(found)),
            _ => Ok(body),
        }
    }

    fn wrong_length(&self, found: u64) -> Fault {
        Problem::Answer(format!(
            "the blob has {found} bytes there, and {} by its descriptor",
            self.length
        ))
        .permanent()
    }

    /// Skips the bytes that the caller has already.
    fn skip(&mut self, mut body: AnswerBody) -> Result<AnswerBody, Fault> {
        self.restarts += 1;
        if self.restarts > MAX_RESTARTS {
            return Err(Problem::Connection(format!(
                "the connection broke {} times, and the server does not send the rest of a blob",
                self.restarts
            ))
            .permanent());
        }
        let mut buf = vec![0; SKIP_BYTES];
        let mut left = self.at;
        while left > 0 {
            let step = left.min(SKIP_BYTES as u64) as usize;
            body.extend(self.shared.options.timeout);
            body.read_exact(&mut buf[..step])?;
            left -= step as u64;
        }
        self.budget.progress();
        Ok(body)
    }

    /// Looks for the blob on the mirrors.
    fn ask_mirrors(&mut self) {
        while let Some((mirror, source)) = self.mirrors.pop() {
            if !mirror.is_usable() {
                continue;
            }
            let place = source.address().to_string();
            let (shared, source) = (Arc::clone(&self.shared), Sources::new(source));
            match Download::new(shared, source, &self.digest, self.length).into_file() {
                Ok(file) => {
                    tracing::debug!("{place}: used in place of {}", self.source.address());
                    self.from_mirror = Some(file);
                    self.mirrors.clear();
                }
                Err(NotKept::Mirror(Problem::NotFound(_))) => {
                    tracing::debug!("{place}: the mirror does not have it");
                }
                Err(NotKept::Mirror(problem)) => {
                    self.budget.give_up(&problem);
                    mirror.failed(&problem, &place);
                }
                Err(NotKept::Here(error)) => {
                    let scratch = self.shared.options.scratch.display();
                    tracing::warn!(
                        "mirrors are not asked: cannot store a blob in {scratch}: {error}"
                    );
                    self.mirrors.clear();
                }
            }
        }
    }

    /// Stores the blob of a mirror, and checks its digest.
    fn into_file(mut self) -> Result<File, NotKept> {
        let mut file =
            tempfile::tempfile_in(&self.shared.options.scratch).map_err(NotKept::Here)?;
        let mut hasher = Sha256::new();
        let mut buf = vec![0; MIRROR_BYTES];
        self.budget = self.shared.of_mirror();
        while self.at < self.length {
            let wanted = (self.length - self.at).min(buf.len() as u64) as usize;
            let count = self.some(&mut buf[..wanted]).map_err(NotKept::Mirror)?;
            hasher.update(&buf[..count]);
            file.write_all(&buf[..count]).map_err(NotKept::Here)?;
        }
        self.complete().map_err(NotKept::Mirror)?;
        let found = format!("sha256:{}", HEXLOWER.encode(&hasher.finalize()));
        if found != self.digest {
            return Err(NotKept::Mirror(Problem::WrongDigest(found)));
        }
        file.rewind().map_err(NotKept::Here)?;
        Ok(file)
    }

    /// Checks that the server announces no byte more.
    fn complete(&mut self) -> Result<(), Problem> {
        // An answer that does not say how many bytes it has need never end.
        if let Some((body, _)) = self.body.take() {
            if body.left().is_some_and(|left| left > 0) {
                return Err(Problem::Answer(format!(
                    "the blob has more than {} bytes there",
                    self.length
                )));
            }
            body.release();
        }
        self.is_complete = true;
        Ok(())
    }
}

/// Why there is no copy of a mirror's blob.
enum NotKept {
    Mirror(Problem),
    /// The file for it cannot be written.
    Here(io::Error),
}

impl Read for Download {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let wanted = (self.length - self.at).min(buf.len() as u64) as usize;
        if buf.is_empty() || self.is_complete {
            return Ok(0);
        }
        if self.at == 0 && !self.mirrors.is_empty() {
            self.ask_mirrors();
            self.left_at = Instant::now();
            self.budget = self.shared.opening();
        }
        if let Some(file) = &mut self.from_mirror {
            let count = file.read(&mut buf[..wanted])?;
            self.at += count as u64;
            return Ok(count);
        }
        self.budget.shift(self.left_at.elapsed());
        let result = match wanted {
            0 => self.complete().map(|()| 0),
            wanted => self.some(&mut buf[..wanted]),
        };
        self.left_at = Instant::now();
        result.map_err(|problem| {
            let place = match self.at {
                0 => self.source.address().to_string(),
                at => format!("bytes {at}..{} of {}", self.length, self.source.address()),
            };
            problem.at(place).into()
        })
    }
}
