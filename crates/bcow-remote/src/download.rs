//! A whole blob, read in order. A connection that breaks is continued where it broke.
//!
//! The bytes are not checked here: the caller knows the digest of the whole.

use std::io::{self, Read};
use std::sync::Arc;
use std::time::Instant;

use crate::client::AnswerBody;
use crate::error::{Fault, Problem};
use crate::patience::Patience;
use crate::shared::Shared;
use crate::source::{Ranged, Source};

/// Bytes that must arrive before the time for a silent server begins again. So a server that sends
/// a byte now and then does not hold a reader for ever.
const PROGRESS_BYTES: u64 = 64 << 10;
/// Times that the bytes before a break are fetched again, from a server that does not know ranges.
const MOST_RESTARTS: u32 = 5;
/// Bytes per read of what is skipped.
const SKIP_BYTES: usize = 64 << 10;

/// The bytes of a blob, from the first to the last.
pub struct Download {
    shared: Arc<Shared>,
    source: Source,
    length: u64,
    /// Bytes that the caller has got.
    at: u64,
    /// The running answer, and the number of bytes that came from it.
    body: Option<(AnswerBody, u64)>,
    patience: Patience,
    /// Bytes since the time began again.
    fresh_bytes: u64,
    /// When the last read ended. The time that the caller takes does not count.
    left_at: Instant,
    restarts: u32,
    is_complete: bool,
}

impl Download {
    /// The blob at `source`, which must have `length` bytes. No connection is made.
    pub(crate) fn new(shared: Arc<Shared>, source: Source, length: u64) -> Self {
        Download {
            patience: shared.opening(),
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
                    self.patience.wait(fault)?;
                }
            }
        }
    }

    fn advance(&mut self, bytes: u64) {
        if self.at == 0 {
            // The server has the blob. From here on it may be gone for a while.
            self.patience = self.shared.reading();
        }
        self.at += bytes;
        self.fresh_bytes += bytes;
        if self.fresh_bytes >= PROGRESS_BYTES {
            self.fresh_bytes = 0;
            self.patience.progress();
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
        body.extend(self.patience.left());
        match body.read(buf)? {
            0 if *got > 0 => {
                self.body = None;
                Ok(None)
            }
            0 => Err(Problem::Answer("it has no bytes".into()).for_now()),
            count => {
                *got += count as u64;
                Ok(Some(count))
            }
        }
    }

    /// Requests what is missing.
    fn request(&mut self) -> Result<AnswerBody, Fault> {
        let (announced, body) = match self.at {
            0 => self.source.whole(&self.patience)?,
            at => {
                tracing::debug!("{}: continued at byte {at}", self.source.address());
                match self.source.range(at, self.length, &self.patience)? {
                    Ranged::Part { total, body, .. } => (total, body),
                    Ranged::Whole { length, body } => (length, self.skip(body)?),
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
        .for_good()
    }

    /// Skips the bytes that the caller has already.
    fn skip(&mut self, mut body: AnswerBody) -> Result<AnswerBody, Fault> {
        self.restarts += 1;
        if self.restarts > MOST_RESTARTS {
            return Err(Problem::Connection(format!(
                "the connection broke {} times, and the server does not send the rest of a blob",
                self.restarts
            ))
            .for_good());
        }
        let mut buf = vec![0; SKIP_BYTES];
        let mut left = self.at;
        while left > 0 {
            let step = left.min(SKIP_BYTES as u64) as usize;
            body.extend(self.shared.options.timeout);
            body.read_exact(&mut buf[..step])?;
            left -= step as u64;
        }
        self.patience.progress();
        Ok(body)
    }

    /// Checks that the server has no byte more.
    fn complete(&mut self) -> Result<(), Problem> {
        if let Some((mut body, _)) = self.body.take() {
            body.extend(self.patience.left());
            // A connection that breaks here has brought everything.
            if body.read(&mut [0]).is_ok_and(|count| count > 0) {
                return Err(Problem::Answer(format!(
                    "the blob has more than {} bytes there",
                    self.length
                )));
            }
        }
        self.is_complete = true;
        Ok(())
    }
}

impl Read for Download {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let wanted = (self.length - self.at).min(buf.len() as u64) as usize;
        if buf.is_empty() || self.is_complete {
            return Ok(0);
        }
        self.patience.shift(self.left_at.elapsed());
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
