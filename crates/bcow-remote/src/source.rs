//! Requests for the bytes of one file on a server, by connections of this process or by those of
//! the fetcher. The callers verify the bytes.

use std::sync::{Arc, Mutex, OnceLock};

use ureq::http::Method;

use crate::address::Address;
use crate::auth::Auth;
use crate::client::{Answer, AnswerBody, Client};
use crate::error::{Fault, Problem};
use crate::fetcher::{AccessTo, Head, Opened, Page};
use crate::lock::lock;
use crate::refusal::{Refused, refused};
use crate::retry_budget::RetryBudget;
use crate::s3::{Request, Signer};

/// Most redirects that one request follows.
const MAX_REDIRECTS: u32 = 5;
/// The code with which a registry refuses what it does not implement (distribution specification,
/// "Error Codes").
const UNSUPPORTED: &str = "UNSUPPORTED";

/// One file on a server, or a document.
pub(crate) enum Source {
    Direct(Box<Direct>),
    Fetched(Fetched),
}

/// A file that the fetcher reaches.
pub(crate) struct Fetched {
    client: Arc<Client>,
    address: Address,
    opened: Opened,
}

/// A file that this process reaches.
pub(crate) struct Direct {
    client: Arc<Client>,
    address: Address,
    /// Authorization for the server of `address`. Requests to other servers do not carry it.
    access: Access,
    /// The address to which the server redirected the last request. The next request goes to this
    /// address, which saves the redirect. The lock is held only while the address is copied.
    redirect_target: Mutex<Option<Address>>,
    /// The version in the first answer.
    version: OnceLock<Version>,
}

/// The authorization that a server requires.
pub(crate) enum Access {
    /// None.
    Open,
    /// A token or a password.
    Registry(Arc<Auth>),
    /// Signed requests.
    S3(Signer),
}

/// The version of a file, from the headers of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Version {
    tag: Option<String>,
    modified: Option<String>,
    length: Option<u64>,
}

/// An answer to a request for a range.
pub(crate) enum RangeAnswer {
    /// The range, or the first part of it.
    Part {
        /// Number of bytes in the body; at least 1, and at most as many as requested.
        bytes: u64,
        /// Length of the whole file, if the server sends it.
        total: Option<u64>,
        /// Whether the version differs from that in the first answer.
        has_changed: bool,
        body: AnswerBody,
    },
    /// The whole file: the server ignores ranges.
    Whole {
        /// Length of the file, if the server sends it.
        length: Option<u64>,
        body: AnswerBody,
    },
}

impl Access {
    /// What the fetcher, which has the credentials, knows it by.
    fn named(&self) -> AccessTo {
        match self {
            Access::Open => AccessTo::Open,
            Access::Registry(auth) => {
                let (server, repository) = auth.names();
                AccessTo::Registry {
                    server: server.to_owned(),
                    repository: repository.to_owned(),
                }
            }
            Access::S3(_) => AccessTo::S3,
        }
    }
}

impl Source {
    pub(crate) fn new(client: Arc<Client>, address: Address, access: Access) -> Self {
        match &client.fetcher {
            Some((fetcher, name)) => Source::Fetched(Fetched {
                opened: fetcher.open(name, &address, access.named()),
                address,
                client,
            }),
            None => Source::Direct(Box::new(Direct {
                client,
                address,
                access,
                redirect_target: Mutex::new(None),
                version: OnceLock::new(),
            })),
        }
    }

    pub(crate) fn address(&self) -> &Address {
        match self {
            Source::Direct(direct) => &direct.address,
            Source::Fetched(fetched) => &fetched.address,
        }
    }

    /// Requests the bytes `start..end`, at least one.
    pub(crate) fn range(
        &self,
        start: u64,
        end: u64,
        budget: &RetryBudget,
    ) -> Result<RangeAnswer, Fault> {
        match self {
            Source::Direct(direct) => direct.range(start, end, budget),
            Source::Fetched(fetched) => fetched.range(start, end, budget),
        }
    }

    /// Requests the whole file. Also returns its length, if the server sends it.
    pub(crate) fn whole(&self, budget: &RetryBudget) -> Result<(Option<u64>, AnswerBody), Fault> {
        match self {
            Source::Direct(direct) => direct.whole(budget),
            Source::Fetched(fetched) => fetched.whole(budget),
        }
    }

    /// Requests a whole document of at most `max_bytes` bytes.
    pub(crate) fn document(
        &self,
        headers: &[(&str, &str)],
        max_bytes: u64,
        budget: &RetryBudget,
    ) -> Result<Vec<u8>, Fault> {
        match self {
            Source::Direct(direct) => direct.document(headers, max_bytes, budget),
            Source::Fetched(fetched) => fetched.document(headers, max_bytes, budget),
        }
    }

    /// Requests a page of a list, of at most `max_bytes` bytes. `None`: the server does not know
    /// this list.
    pub(crate) fn page(
        &self,
        headers: &[(&str, &str)],
        max_bytes: u64,
        budget: &RetryBudget,
    ) -> Result<Option<Page>, Fault> {
        match self {
            Source::Direct(direct) => direct.page(headers, max_bytes, budget),
            Source::Fetched(fetched) => fetched.page(headers, max_bytes, budget),
        }
    }
}

impl Fetched {
    fn range(&self, start: u64, end: u64, budget: &RetryBudget) -> Result<RangeAnswer, Fault> {
        let permit = self.client.turn(&self.address, budget)?;
        let (head, left, body) = self.opened.range(start, end, permit, budget)?;
        let body = AnswerBody::of_fetcher(body, left, budget);
        match head {
            Head::Part {
                bytes,
                total,
                has_changed,
            } if (1..=end - start).contains(&bytes) => Ok(RangeAnswer::Part {
                bytes,
                total,
                has_changed,
                body,
            }),
            Head::Part { .. } => {
                let why = "it has another number of bytes than was requested";
                Err(Problem::Answer(why.into()).permanent())
            }
            Head::Whole { length } => Ok(RangeAnswer::Whole { length, body }),
        }
    }

    fn whole(&self, budget: &RetryBudget) -> Result<(Option<u64>, AnswerBody), Fault> {
        let permit = self.client.turn(&self.address, budget)?;
        let (head, left, body) = self.opened.whole(permit, budget)?;
        let (Head::Whole { length } | Head::Part { total: length, .. }) = head;
        Ok((length, AnswerBody::of_fetcher(body, left, budget)))
    }

    fn document(
        &self,
        headers: &[(&str, &str)],
        max_bytes: u64,
        budget: &RetryBudget,
    ) -> Result<Vec<u8>, Fault> {
        let _permit = self.client.turn(&self.address, budget)?;
        self.opened.document(headers, max_bytes, budget)
    }

    fn page(
        &self,
        headers: &[(&str, &str)],
        max_bytes: u64,
        budget: &RetryBudget,
    ) -> Result<Option<Page>, Fault> {
        let _permit = self.client.turn(&self.address, budget)?;
        self.opened.page(headers, max_bytes, budget)
    }
}

impl Direct {
    fn range(&self, start: u64, end: u64, budget: &RetryBudget) -> Result<RangeAnswer, Fault> {
        let range = format!("bytes={start}-{}", end - 1);
        let answer = self.get(&[("range", &range)], budget)?;
        refuse_compressed(&answer)?;
        match answer.status {
            206 => {
                let range = answer.header("content-range").and_then(content_range);
                let (from, to, total) = range.ok_or_else(|| {
                    Problem::Answer("status 206 without a valid Content-Range".into()).transient()
                })?;
                if from != start || to >= end {
                    return Err(Problem::Answer(format!(
                        "it has bytes {from}..{}, not {start}..{end}",
                        to.saturating_add(1)
                    ))
                    .transient());
                }
                Ok(RangeAnswer::Part {
                    has_changed: self.has_changed(&answer, total),
                    bytes: to - from + 1,
                    total,
                    body: answer.body,
                })
            }
            200 => Ok(RangeAnswer::Whole {
                length: content_length(&answer),
                body: answer.body,
            }),
            _ => Err(answer.refusal()),
        }
    }

    fn whole(&self, budget: &RetryBudget) -> Result<(Option<u64>, AnswerBody), Fault> {
        let answer = self.get(&[], budget)?;
        refuse_compressed(&answer)?;
        match answer.status {
            200 => Ok((content_length(&answer), answer.body)),
            _ => Err(answer.refusal()),
        }
    }

    /// Sends a GET request to the target of the last redirect. Without one, or if that request
    /// fails, sends the request to the server and follows its redirects.
    fn get(&self, headers: &[(&str, &str)], budget: &RetryBudget) -> Result<Answer, Fault> {
        let target = lock(&self.redirect_target).clone();
        if let Some(address) = target {
            match self.send(&address, headers, budget) {
                // The signature of the address may have expired. The server redirects to a new one.
                Ok(answer) if !matches!(answer.status, 200 | 206 | 416) => {}
                Ok(answer) => return Ok(answer),
                Err(fault) => tracing::debug!("{address}: {}", fault.problem),
            }
            *lock(&self.redirect_target) = None;
        }
        let mut address = self.address.clone();
        for _ in 0..=MAX_REDIRECTS {
            let answer = self.send(&address, headers, budget)?;
            if !is_redirect(answer.status) {
                if address != self.address && matches!(answer.status, 200 | 206) {
                    *lock(&self.redirect_target) = Some(address);
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

    /// Sends a GET request. Adds the authorization if `address` is on the server of this file.
    fn send(
        &self,
        address: &Address,
        headers: &[(&str, &str)],
        budget: &RetryBudget,
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
                return signer.send(&self.client, &request, budget);
            }
        };
        let Some(auth) = auth else {
            return self.client.get(address, headers, budget);
        };
        auth.send(&self.address, budget, |authorization| {
            let mut headers = headers.to_vec();
            headers.extend(authorization.map(|value| ("authorization", value)));
            self.client.get(address, &headers, budget)
        })
    }

    fn document(
        &self,
        headers: &[(&str, &str)],
        max_bytes: u64,
        budget: &RetryBudget,
    ) -> Result<Vec<u8>, Fault> {
        let answer = self.get(headers, budget)?;
        match answer.status {
            200 => answer.document(max_bytes),
            _ => Err(refused(answer).fault),
        }
    }

    fn page(
        &self,
        headers: &[(&str, &str)],
        max_bytes: u64,
        budget: &RetryBudget,
    ) -> Result<Option<Page>, Fault> {
        let answer = self.get(headers, budget)?;
        match answer.status {
            200 => {
                let next = next_page(&answer).map(|target| self.address.join(target));
                let kind = answer.header("content-type").unwrap_or_default();
                Ok(Some(Page {
                    is_json: kind.is_empty() || kind.contains("json"),
                    next: next.transpose().map_err(Problem::permanent)?,
                    bytes: answer.document(max_bytes)?,
                }))
            }
            404 | 405 | 406 | 501 => Ok(None),
            _ => match refused(answer) {
                Refused { code, .. } if code == UNSUPPORTED => Ok(None),
                Refused { fault, .. } => Err(fault),
            },
        }
    }

    /// Whether the version in an answer differs from that in the first answer. The result only
    /// explains bytes that do not match: the servers behind one name can give one file different
    /// ETags.
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

/// Whether a status is a redirect.
pub(crate) fn is_redirect(status: u16) -> bool {
    matches!(status, 301 | 302 | 303 | 307 | 308)
}

/// Fails if the server compressed the content.
fn refuse_compressed(answer: &Answer) -> Result<(), Fault> {
    match answer.header("content-encoding") {
        None => Ok(()),
        Some(coding) if coding.trim().eq_ignore_ascii_case("identity") => Ok(()),
        Some(_) => {
            Err(Problem::Answer("it is compressed, which was not requested".into()).permanent())
        }
    }
}

/// The target of the link to the next page (RFC 8288): `<TARGET>; rel="next"`.
fn next_page(answer: &Answer) -> Option<&str> {
    let fields = answer.headers.get_all("link").iter();
    let mut fields = fields.filter_map(|field| field.to_str().ok());
    fields.find_map(next_target)
}

/// The target in the value of one `Link` header.
pub(crate) fn next_target(field: &str) -> Option<&str> {
    let mut links = field
        .split('<')
        .skip(1)
        .filter_map(|link| link.split_once('>'));
    let is_next = |parameter: &str| {
        let value = parameter
            .split_once('=')
            .filter(|(name, _)| name.trim().eq_ignore_ascii_case("rel"));
        value.is_some_and(|(_, value)| {
            let mut relations = value.trim().trim_matches('"').split_whitespace();
            relations.any(|relation| relation.eq_ignore_ascii_case("next"))
        })
    };
    links.find_map(|(target, parameters)| {
        parameters.split([';', ',']).any(is_next).then_some(target)
    })
}

fn content_length(answer: &Answer) -> Option<u64> {
    answer.header("content-length")?.trim().parse().ok()
}

/// The first byte, the last byte and the length of the file in a valid `Content-Range` header:
/// `bytes FIRST-LAST/TOTAL`, with `*` for an unknown length.
pub(crate) fn content_range(value: &str) -> Option<(u64, u64, Option<u64>)> {
    let (unit, range) = value.trim().split_once(' ')?;
    if !unit.eq_ignore_ascii_case("bytes") {
        return None;
    }
    let (range, total) = range.trim_start().split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
    let total = match total.trim() {
        "*" => None,
        number => Some(number.parse().ok()?),
    };
    let is_valid = first <= last && total.is_none_or(|total| last < total);
    is_valid.then_some((first, last, total))
}
