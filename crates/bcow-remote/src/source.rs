//! The bytes of one file on a server, in ranges. They are not checked here.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use ureq::http::Method;

use crate::address::Address;
use crate::auth::Auth;
use crate::client::{Answer, AnswerBody, Client};
use crate::error::{Fault, Problem};
use crate::patience::Patience;
use crate::s3::{Request, Signer};

/// Redirects, one after the other.
const MAX_REDIRECTS: u32 = 5;

pub(crate) struct Source {
    client: Arc<Client>,
    address: Address,
    /// Access to the server of `address`. No other server gets what it returns.
    access: Access,
    /// The address to which the server redirected the last request. Asking the server again for
    /// each range would cost a request more. The lock is held to copy the address only.
    redirected: Mutex<Option<Address>>,
    version: OnceLock<Version>,
}

/// The access to a server.
pub(crate) enum Access {
    /// Everyone has it.
    Open,
    Registry(Arc<Auth>),
    S3(Signer),
}

/// What a server says of the version of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Version {
    tag: Option<String>,
    modified: Option<String>,
    length: Option<u64>,
}

/// An answer to a request for a range.
pub(crate) enum Ranged {
    /// The range, or the beginning of it.
    Part {
        /// Number of bytes in the body; at least 1, and at most as many as requested.
        bytes: u64,
        /// Length of the whole file, if the server knows it.
        total: Option<u64>,
        /// Whether the server announces another version than in its first answer.
        has_changed: bool,
        body: AnswerBody,
    },
    /// The server ignores ranges: the whole file follows.
    Whole {
        /// Its length, if the server says.
        length: Option<u64>,
        body: AnswerBody,
    },
}

impl Source {
    pub(crate) fn new(client: Arc<Client>, address: Address, access: Access) -> Self {
        Source {
            client,
            address,
            access,
            redirected: Mutex::new(None),
            version: OnceLock::new(),
        }
    }

    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    /// Requests the bytes from `start` to before `end`.
    pub(crate) fn range(&self, start: u64, end: u64, patience: &Patience) -> Result<Ranged, Fault> {
        let range = format!("bytes={start}-{}", end - 1);
        let answer = self.get(&[("range", &range)], patience)?;
        refuse_compressed(&answer)?;
        match answer.status {
            206 => {
                let (from, to, total) = content_range(&answer).ok_or_else(|| {
                    Problem::Answer("status 206 without a valid Content-Range".into()).transient()
                })?;
                if from != start || to >= end {
                    return Err(Problem::Answer(format!(
                        "it has bytes {from}..{}, not {start}..{end}",
                        to.saturating_add(1)
                    ))
                    .transient());
                }
                Ok(Ranged::Part {
                    has_changed: self.has_changed(&answer, total),
                    bytes: to - from + 1,
                    total,
                    body: answer.body,
                })
            }
            200 => Ok(Ranged::Whole {
                length: content_length(&answer),
                body: answer.body,
            }),
            _ => Err(answer.refusal()),
        }
    }

    /// Requests all bytes. Returns their number too, if the server says.
    pub(crate) fn whole(&self, patience: &Patience) -> Result<(Option<u64>, AnswerBody), Fault> {
        let answer = self.get(&[], patience)?;
        refuse_compressed(&answer)?;
        match answer.status {
            200 => Ok((content_length(&answer), answer.body)),
            _ => Err(answer.refusal()),
        }
    }

    /// Sends a request to the address to which the server redirected the last one, or to the
    /// server.
    fn get(&self, headers: &[(&str, &str)], patience: &Patience) -> Result<Answer, Fault> {
        let remembered = self.redirected().clone();
        if let Some(address) = remembered {
            match self.send(&address, headers, patience) {
                // The address may be signed for a time. The server knows the present one.
                Ok(answer) if !matches!(answer.status, 200 | 206 | 416) => {}
                Ok(answer) => return Ok(answer),
                Err(fault) => tracing::debug!("{address}: {}", fault.problem),
            }
            *self.redirected() = None;
        }
        let mut address = self.address.clone();
        for _ in 0..=MAX_REDIRECTS {
            let answer = self.send(&address, headers, patience)?;
            if !is_redirect(answer.status) {
                if address != self.address && matches!(answer.status, 200 | 206) {
                    *self.redirected() = Some(address);
                }
                return Ok(answer);
            }
            let location = answer.header("location").unwrap_or_default();
            address = address.join(location).map_err(Problem::permanent)?;
            answer.body.finish();
            tracing::debug!("{} redirects to {address}", self.address);
        }
        Err(Problem::Redirects(MAX_REDIRECTS).permanent())
    }

    /// Sends a request, with authorization if the address is on the server that requires it.
    fn send(
        &self,
        address: &Address,
        headers: &[(&str, &str)],
        patience: &Patience,
    ) -> Result<Answer, Fault> {
        let auth = match &self.access {
            _ if !address.same_server(&self.address) => None,
            Access::Open => None,
            Access::Registry(auth) => Some(auth),
            Access::S3(signer) => {
                let request = Request {
                    method: Method::GET,
                    address,
                    headers,
                    bytes: &[],
                };
                return signer.send(&self.client, &request, patience);
            }
        };
        let Some(auth) = auth else {
            return self.client.get(address, headers, patience);
        };
        let send = |authorization: Option<&str>| {
            let mut headers = headers.to_vec();
            headers.extend(authorization.map(|value| ("authorization", value)));
            self.client.get(address, &headers, patience)
        };
        let authorization = auth.header(&self.client, &self.address, patience)?;
        let answer = send(authorization.as_deref())?;
        if answer.status != 401 {
            return Ok(answer);
        }
        // The request ends before the one for a token begins.
        let challenge = answer.headers;
        answer.body.finish();
        let sent = authorization.as_deref();
        auth.accept_challenge(&challenge, sent, &self.client, &self.address, patience)?;
        let authorization = auth.header(&self.client, &self.address, patience)?;
        send(authorization.as_deref())
    }

    /// Requests a whole document.
    pub(crate) fn document(
        &self,
        headers: &[(&str, &str)],
        most_bytes: u64,
        patience: &Patience,
    ) -> Result<Vec<u8>, Fault> {
        let mut answer = self.get(headers, patience)?;
        match answer.status {
            200 => answer.body.read_document(most_bytes),
            _ => Err(answer.refusal()),
        }
    }

    fn redirected(&self) -> MutexGuard<'_, Option<Address>> {
        // An address is valid after a panic elsewhere.
        self.redirected
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the server announces another version of the file than at first. This only explains
    /// bytes that do not match: servers behind one name may give one file different tags.
    fn has_changed(&self, answer: &Answer, length: Option<u64>) -> bool {
        let text = |name| answer.header(name).map(str::to_owned);
        let found = Version {
            tag: text("etag"),
            modified: text("last-modified"),
            length,
        };
        *self.version.get_or_init(|| found.clone()) != found
    }
}

/// Whether a status means that the answer is elsewhere.
pub(crate) fn is_redirect(status: u16) -> bool {
    matches!(status, 301 | 302 | 303 | 307 | 308)
}

fn refuse_compressed(answer: &Answer) -> Result<(), Fault> {
    match answer.header("content-encoding") {
        None | Some("identity") => Ok(()),
        Some(_) => {
            Err(Problem::Answer("it is compressed, which was not requested".into()).permanent())
        }
    }
}

fn content_length(answer: &Answer) -> Option<u64> {
    answer.header("content-length")?.trim().parse().ok()
}

/// `bytes FIRST-LAST/TOTAL`.
fn content_range(answer: &Answer) -> Option<(u64, u64, Option<u64>)> {
    let (range, total) = answer
        .header("content-range")?
        .trim()
        .strip_prefix("bytes")?
        .trim_start()
        .split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
    let total = match total.trim() {
        "*" => None,
        number => Some(number.parse().ok()?),
    };
    let is_valid = first <= last && total.is_none_or(|total| last < total);
    is_valid.then_some((first, last, total))
}
