//! The upload of one blob, in one request or in pieces.

use std::cell::RefCell;
use std::io::{self, Read};

use ureq::http::Method;

use super::access::Access;
use crate::address::{Address, query};
use crate::client::{Answer, Content};
use crate::error::{Fault, Problem};
use crate::refusal::refusal;
use crate::retry_budget::RetryBudget;

/// Bytes of a piece, at first.
pub(super) const PIECE_BYTES: u64 = 64 << 20;
const SHORTEST_PIECE_BYTES: u64 = 1 << 20;
/// Pieces in a row after which the next one is longer again.
const PIECES_BEFORE_GROWTH: u32 = 4;
/// Limit of broken pieces in a row, without progress between them.
const MAX_BREAKS: u32 = 5;

/// Returns the content of a blob from an offset on.
pub type Open<'o> = dyn Fn(u64) -> io::Result<Box<dyn Read>> + 'o;

/// The blob to send.
#[derive(Clone, Copy)]
pub(super) struct Blob<'b> {
    pub(super) digest: &'b str,
    pub(super) length: u64,
    pub(super) open: &'b Open<'b>,
}

/// An upload that the registry has begun.
pub(super) struct Session<'s> {
    access: &'s Access,
    blob: Blob<'s>,
    /// The address of the next request.
    location: Address,
    /// The number of bytes that have arrived.
    at: u64,
}

/// The reason why a session ended before the registry had the blob.
pub(super) enum Ended {
    /// Another session may succeed.
    Lost(Problem),
    /// The registry takes no pieces.
    NoPieces(Problem),
    Failed(Problem),
}

/// The reason why a piece did not arrive.
enum Piece {
    /// The connection broke, or the registry failed. A shorter piece may arrive.
    Broken(Fault),
    /// The registry limits the requests. The same piece may arrive later.
    Throttled(Fault),
    Ended(Ended),
}

impl<'s> Session<'s> {
    pub(super) fn new(access: &'s Access, blob: Blob<'s>, location: Address) -> Self {
        Session {
            access,
            blob,
            location,
            at: 0,
        }
    }

    /// Sends the blob in one request.
    pub(super) fn whole(&self) -> Result<(), Ended> {
        let budget = self.access.shared.reading();
        let address = with_digest(&self.location, self.blob.digest)?;
        let headers = [("content-type", "application/octet-stream")];
        let range = (0, self.blob.length);
        let sent = self.stream(Method::PUT, &address, &headers, range, &budget);
        match sent {
            Ok(answer) => completed(answer),
            Err(fault) => Err(ended(fault)),
        }
    }

    /// Sends `length` bytes of the blob from `offset` on.
    fn stream(
        &self,
        method: Method,
        address: &Address,
        headers: &[(&str, &str)],
        (offset, length): (u64, u64),
        budget: &RetryBudget,
    ) -> Result<Answer, Fault> {
        let unreadable = |error: &io::Error| Problem::Content(error.to_string()).permanent();
        let failed = RefCell::new(None);
        let mut reader = Watched {
            content: (self.blob.open)(offset).map_err(|error| unreadable(&error))?,
            left: length,
            failed: &failed,
        };
        let content = Content::Stream(&mut reader, length);
        let sent = self.access.send(method, address, headers, content, budget);
        match (sent, failed.into_inner()) {
            (Err(_), Some(error)) => Err(unreadable(&error)),
            (sent, _) => sent,
        }
    }

    /// Sends the blob in pieces of `piece_bytes`, which is halved after each broken piece, and
    /// grows again. Calls `report` with the number of bytes that have arrived.
    pub(super) fn in_pieces(
        &mut self,
        piece_bytes: &mut u64,
        report: &mut dyn FnMut(u64),
    ) -> Result<(), Ended> {
        let mut breaks = 0;
        let mut arrived_pieces = 0;
        let mut farthest = self.at;
        let mut budget = self.access.shared.uploading();
        while self.at < self.blob.length {
            let bytes = (*piece_bytes).min(self.blob.length - self.at);
            let before = self.at;
            let fault = match self.piece(bytes) {
                Ok(()) if self.at > before => None,
                Ok(()) => {
                    return Err(Ended::Failed(Problem::Answer(
                        "it does not count the bytes that were sent".into(),
                    )));
                }
                Err(Piece::Ended(ended)) => return Err(ended),
                Err(Piece::Throttled(fault)) => Some(fault),
                Err(Piece::Broken(fault)) => {
                    breaks += 1;
                    if breaks > MAX_BREAKS {
                        return Err(Ended::Failed(fault.problem));
                    }
                    *piece_bytes = (*piece_bytes / 2).max(SHORTEST_PIECE_BYTES);
                    Some(fault)
                }
            };
            match fault {
                Some(fault) => {
                    arrived_pieces = 0;
                    budget.wait(fault).map_err(Ended::Failed)?;
                    self.ask(bytes)?;
                }
                None => {
                    arrived_pieces += 1;
                    if arrived_pieces % PIECES_BEFORE_GROWTH == 0 {
                        *piece_bytes = (*piece_bytes * 2).min(PIECE_BYTES);
                    }
                }
            }
            // The registry may lose bytes at each break, so a byte is progress only once.
            if self.at > farthest {
                farthest = self.at;
                breaks = 0;
                budget.progress();
                report(self.at);
            }
        }
        let address = with_digest(&self.location, self.blob.digest)?;
        let last = self.access.persist(|budget| {
            let content = Content::Bytes(&[]);
            let sent = self
                .access
                .send(Method::PUT, &address, &[], content, budget);
            match sent? {
                answer if is_throttled(&answer) => Err(refusal(answer)),
                answer => Ok(answer),
            }
        });
        completed(last.map_err(Ended::Lost)?)
    }

    /// Sends the next piece.
    fn piece(&mut self, bytes: u64) -> Result<(), Piece> {
        let budget = self.access.shared.reading();
        let range = format!("{}-{}", self.at, self.at + bytes - 1);
        let headers = [
            ("content-type", "application/octet-stream"),
            ("content-range", range.as_str()),
        ];
        let address = self.location.clone();
        let sent = self.stream(Method::PATCH, &address, &headers, (self.at, bytes), &budget);
        let answer = sent.map_err(|fault| {
            if fault.is_transient {
                Piece::Broken(fault)
            } else {
                Piece::Ended(ended(fault))
            }
        })?;
        let failed = match answer.status {
            200..=204 => {
                let sent = self.at + bytes;
                self.follow(&answer, &address).map_err(Piece::Ended)?;
                self.at = match answer.header("range") {
                    Some(range) => arrived(range, sent).map_err(Piece::Ended)?,
                    None if answer.status == 202 => sent,
                    None => 0,
                };
                return Ok(());
            }
            // Some registries take one piece only.
            400 | 405 | 411 | 413 | 415 | 416 | 501 => Ended::NoPieces,
            404 | 409 => Ended::Lost,
            _ if is_throttled(&answer) => return Err(Piece::Throttled(refusal(answer))),
            408 | 425 | 500.. => return Err(Piece::Broken(refusal(answer))),
            _ => Ended::Failed,
        };
        Err(Piece::Ended(failed(refusal(answer).problem)))
    }

    /// Requests from the registry how much of the upload has arrived. `sent_bytes` is the length of
    /// the piece that broke.
    fn ask(&mut self, sent_bytes: u64) -> Result<(), Ended> {
        let address = self.location.clone();
        let mut budget = self.access.shared.reading();
        let answer = loop {
            let asked = self
                .access
                .send(Method::GET, &address, &[], Content::Nothing, &budget);
            let fault = match asked {
                Ok(answer) if matches!(answer.status, 200..=204) => break answer,
                Ok(answer) => refusal(answer),
                Err(fault) => fault,
            };
            // A registry that has forgotten the upload answers with an error.
            budget.wait(fault).map_err(Ended::Lost)?;
        };
        self.follow(&answer, &address)?;
        self.at = match answer.header("range") {
            Some(range) => arrived(range, self.at + sent_bytes)?,
            None => 0,
        };
        Ok(())
    }

    /// Takes the address of the next request from an answer.
    fn follow(&mut self, answer: &Answer, address: &Address) -> Result<(), Ended> {
        if answer.header("location").is_some() {
            self.location =
                location(answer, address).map_err(|fault| Ended::Failed(fault.problem))?;
        }
        Ok(())
    }
}

/// Whether a registry limits the requests.
fn is_throttled(answer: &Answer) -> bool {
    matches!(answer.status, 429 | 503)
}

fn ended(fault: Fault) -> Ended {
    if fault.is_transient {
        Ended::Lost(fault.problem)
    } else {
        Ended::Failed(fault.problem)
    }
}

/// The answer to the last request for a blob.
fn completed(answer: Answer) -> Result<(), Ended> {
    match answer.status {
        200..=204 => Ok(()),
        400 | 404 | 408 | 409 | 416 | 425 | 429 | 500.. => {
            Err(Ended::Lost(refusal(answer).problem))
        }
        _ => Err(Ended::Failed(refusal(answer).problem)),
    }
}

/// The address of the next request of an upload: any form of URL, on any server.
pub(super) fn location(answer: &Answer, address: &Address) -> Result<Address, Fault> {
    let text = answer.header("location").ok_or_else(|| {
        let why = "it begins an upload and does not name its place (Location)";
        Problem::Answer(why.into()).permanent()
    })?;
    address.join(text).map_err(Problem::permanent)
}

fn with_digest(location: &Address, digest: &str) -> Result<Address, Ended> {
    let query = query(&[("digest", digest)]);
    location.with_query(&query).map_err(Ended::Failed)
}

/// The number of bytes that have arrived, from a range. At most `most` bytes can have arrived.
fn arrived(range: &str, most: u64) -> Result<u64, Ended> {
    let problem = match length(range) {
        Some(length) if length <= most => return Ok(length),
        Some(_) => "it counts more bytes than were sent",
        None => "its range is invalid",
    };
    Err(Ended::Lost(Problem::Answer(problem.into())))
}

/// The number of bytes in a range, `0-LAST` or `bytes=0-LAST`.
pub(crate) fn length(range: &str) -> Option<u64> {
    let range = range.trim();
    let (first, last) = range
        .strip_prefix("bytes=")
        .unwrap_or(range)
        .split_once('-')?;
    match (first.trim(), last.trim().parse::<u64>().ok()?) {
        // Some registries answer this for an upload without any byte. If it has one byte, the
        // registry refuses the byte that is sent again, or overwrites it with the same one.
        ("0", 0) => Some(0),
        ("0", last) => last.checked_add(1),
        _ => None,
    }
}

/// Reads the content to send, and stores the error that ends the reading: the error of the client
/// does not have it.
struct Watched<'w> {
    content: Box<dyn Read>,
    left: u64,
    failed: &'w RefCell<Option<io::Error>>,
}

impl Read for Watched<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let wanted = self.left.min(buf.len() as u64) as usize;
        if wanted == 0 {
            return Ok(0);
        }
        let read = match self.content.read(&mut buf[..wanted]) {
            Ok(0) => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
            read => read,
        };
        match read {
            Ok(count) => {
                self.left -= count as u64;
                Ok(count)
            }
            Err(error) => {
                *self.failed.borrow_mut() = Some(error);
                Err(io::Error::other("the content cannot be read"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn length_of_a_range_is_read_in_each_form() {
        for (range, bytes) in [
            ("0-9", Some(10)),
            ("bytes=0-9", Some(10)),
            (" 0-0 ", Some(0)),
            ("1-9", None),
            ("0-x", None),
            ("0-18446744073709551615", None),
            ("", None),
        ] {
            assert_eq!(length(range), bytes, "{range}");
        }
    }
}
