//! Writing of files into S3: small ones in one request, others in parts (multipart upload).
//!
//! A part is sent with its SHA-256, which the server compares. If a process ended in the middle of
//! an upload, the next one to the same key finds its parts, compares them by their checksums, and
//! sends only the others. An upload that fails is aborted, so that no parts are left.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use data_encoding::BASE64;
use sha2::{Digest, Sha256};
use ureq::http::Method;

use crate::address::{Address, encode};
use crate::client::Answer;
use crate::error::{Fault, Problem, RemoteError, printable};
use crate::remote::Remote;
use crate::retry_budget::RetryBudget;
use crate::s3::{EXPLANATION_BYTES, Request, S3, S3Name, Signer, element, explanation};
use crate::shared::Shared;
use crate::upload::each_once;

/// Bytes of a part, and of a file that is sent in one request, at most. Larger files have larger
/// parts.
const PART_BYTES: u64 = 8 << 20;
/// Parts of an upload, as S3 limits them.
const MAX_PARTS: u64 = 10_000;
/// Largest file, as S3 limits it.
const MAX_BYTES: u64 = 5 << 40;
/// Largest size of a list of parts or uploads.
const LIST_BYTES: u64 = 4 << 20;
/// Pages of a list of parts.
const MAX_PAGES: u32 = 100;
/// How often an upload begins anew because the server has forgotten it.
const MAX_UPLOADS: u32 = 3;
/// The algorithm of the checksums of parts.
const ALGORITHM: &str = "SHA256";
/// The metadata of the object that names its content, by which an answer that was lost is
/// recognised.
const MARK: &str = "x-amz-meta-bcow-merkle-root";

/// Whether a file that exists is replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replace {
    /// An existing file is replaced.
    Allowed,
    /// An existing file is an error.
    Refused,
}

/// What is written.
pub struct S3Content<'c> {
    /// Length in bytes.
    pub length: u64,
    /// The root hash, in hexadecimal.
    pub root: &'c str,
    /// Reads bytes at an offset.
    pub read_at: &'c dyn Fn(u64, &mut [u8]) -> io::Result<()>,
}

/// The place of a file in S3, for writing.
pub struct S3Upload {
    shared: Arc<Shared>,
    address: Address,
    bucket: Address,
    key: String,
    name: String,
    signer: Signer,
}

/// A part that has arrived.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Part {
    tag: String,
    /// Base64 of the SHA-256.
    checksum: String,
    bytes: u64,
}

/// An upload that has begun.
struct Begun {
    id: String,
    parts: BTreeMap<u64, Part>,
}

impl S3Upload {
    /// The place of a file. No connection is made.
    pub fn new(remote: &Remote, server: &S3, name: &S3Name) -> Result<S3Upload, RemoteError> {
        let at = |problem: Problem| problem.at(name.to_string());
        Ok(S3Upload {
            shared: Arc::clone(&remote.shared),
            address: server.address(name).map_err(at)?,
            bucket: server.bucket(name).map_err(at)?,
            key: name.key.clone(),
            name: name.to_string(),
            signer: server.signer(),
        })
    }

    /// Fails if there is a file of this name. A server may not tell this user.
    pub fn require_absent(&self) -> Result<(), RemoteError> {
        let found = self.head().map_err(|problem| self.failed(problem))?;
        match found {
            None => Ok(()),
            Some(_) => Err(self.failed(Problem::Exists)),
        }
    }

    /// Whether the file is there already, as this program has written it: with this length and this
    /// root hash.
    pub fn has(&self, content: &S3Content<'_>) -> Result<bool, RemoteError> {
        let found = self.head().map_err(|problem| self.failed(problem))?;
        Ok(found.is_some_and(|found| {
            found.length == Some(content.length) && found.root.as_deref() == Some(content.root)
        }))
    }

    /// Writes the file. It appears whole or not at all. `sent` learns of each byte that has
    /// arrived, or was there. Returns the number of bytes that were sent.
    pub fn write(
        &self,
        content: &S3Content<'_>,
        replace: Replace,
        sent: &dyn Fn(u64),
    ) -> Result<u64, RemoteError> {
        if content.length > MAX_BYTES {
            let why = format!("files in S3 have at most {MAX_BYTES} bytes");
            return Err(self.failed(Problem::Content(why)));
        }
        let written = if content.length <= PART_BYTES {
            self.whole(content, replace, sent)
        } else {
            self.in_parts(content, replace, sent)
        };
        written.map_err(|problem| self.failed(problem))
    }

    fn failed(&self, problem: Problem) -> RemoteError {
        problem.at(self.name.as_str())
    }

    fn whole(
        &self,
        content: &S3Content<'_>,
        replace: Replace,
        sent: &dyn Fn(u64),
    ) -> Result<u64, Problem> {
        let bytes = read(content, 0, content.length)?;
        let checksum = checksum(&bytes);
        let mut headers = vec![
            ("content-type", "application/octet-stream"),
            ("x-amz-checksum-sha256", checksum.as_str()),
            (MARK, content.root),
        ];
        if replace == Replace::Refused {
            headers.push(("if-none-match", "*"));
        }
        let tag = self.persist(|budget| {
            let answer = self.send(Method::PUT, &self.address, &headers, &bytes, budget)?;
            match answer.status {
                200..=204 => Ok(Some(tag_of(&answer)?)),
                // An earlier answer may have been lost.
                412 => Ok(None),
                _ => Err(refusal(answer)),
            }
        })?;
        self.check(content, tag.as_deref())?;
        sent(content.length);
        Ok(content.length)
    }

    fn in_parts(
        &self,
        content: &S3Content<'_>,
        replace: Replace,
        sent: &dyn Fn(u64),
    ) -> Result<u64, Problem> {
        let mut report = each_once(sent);
        let mut uploads = 0;
        loop {
            uploads += 1;
            // What the server has just forgotten is not looked for again.
            let found = if uploads == 1 { self.find_unfinished() } else { Ok(None) };
            let found = found.unwrap_or_else(|problem| {
                tracing::debug!("{}: no earlier upload is continued: {problem}", self.name);
                None
            });
            let begun = match found {
                Some(begun) => begun,
                None => self.begin(content)?,
            };
            let result = self
                .send_parts(&begun, content, &mut report)
                .and_then(|(parts, bytes)| Ok((self.complete(&begun.id, &parts, replace)?, bytes)));
            match result {
                Ok((tag, bytes)) => {
                    self.check(content, Some(&tag))?;
                    return Ok(bytes);
                }
                // The server does not know the upload any more.
                Err(problem @ Problem::NotFound(_)) => {
                    // An earlier answer may have been lost.
                    if self.check(content, None).is_ok() {
                        return Ok(content.length);
                    }
                    if uploads == MAX_UPLOADS {
                        return Err(problem);
                    }
                    tracing::debug!("{}: the upload begins anew: {problem}", self.name);
                }
                Err(problem) => {
                    self.abort(&begun.id);
                    return Err(problem);
                }
            }
        }
    }

    /// Sends the parts that the server does not have. Returns all, and the number of bytes that
    /// were sent.
    fn send_parts(
        &self,
        begun: &Begun,
        content: &S3Content<'_>,
        report: &mut dyn FnMut(u64),
    ) -> Result<(BTreeMap<u64, Part>, u64), Problem> {
        let part_bytes = part_bytes(content.length);
        let mut parts = BTreeMap::new();
        let mut sent = 0;
        for number in 1..=content.length.div_ceil(part_bytes) {
            let start = (number - 1) * part_bytes;
            let bytes = read(content, start, part_bytes.min(content.length - start))?;
            let checksum = checksum(&bytes);
            let there = begun.parts.get(&number);
            let part = match there
                .filter(|part| part.checksum == checksum && part.bytes == bytes.len() as u64)
            {
                Some(part) => part.clone(),
                None => {
                    sent += bytes.len() as u64;
                    Part {
                        tag: self.send_part(&begun.id, number, &bytes, &checksum)?,
                        bytes: bytes.len() as u64,
                        checksum,
                    }
                }
            };
            parts.insert(number, part);
            report(start + bytes.len() as u64);
        }
        Ok((parts, sent))
    }

    fn send_part(
        &self,
        id: &str,
        number: u64,
        bytes: &[u8],
        checksum: &str,
    ) -> Result<String, Problem> {
        let query = format!("partNumber={number}&uploadId={}", encode(id));
        let address = self.address.with_query(&query)?;
        let headers = [("x-amz-checksum-sha256", checksum)];
        self.persist(|budget| {
            let answer = self.send(Method::PUT, &address, &headers, bytes, budget)?;
            match answer.status {
                200..=204 => tag_of(&answer),
                _ => Err(refusal(answer)),
            }
        })
    }

    fn begin(&self, content: &S3Content<'_>) -> Result<Begun, Problem> {
        let address = self.address.with_query("uploads=")?;
        let headers = [
            ("content-type", "application/octet-stream"),
            ("x-amz-checksum-algorithm", ALGORITHM),
            (MARK, content.root),
        ];
        let text = self.text(Method::POST, &address, &headers)?;
        let id = element(&text, "UploadId").map(unescape);
        let id = id.ok_or_else(|| Problem::Answer("an upload without an ID".into()))?;
        Ok(Begun {
            id,
            parts: BTreeMap::new(),
        })
    }

    /// The last upload to this key that has not ended, with its parts. Not every server lists them.
    fn find_unfinished(&self) -> Result<Option<Begun>, Problem> {
        let query = format!("prefix={}&uploads=", encode(&self.key));
        let text = self.text(Method::GET, &self.bucket.with_query(&query)?, &[])?;
        let uploads = elements(&text, "Upload")
            .filter(|upload| element(upload, "Key").map(unescape).as_ref() == Some(&self.key));
        let Some(id) = uploads
            .filter_map(|upload| element(upload, "UploadId"))
            .last()
        else {
            return Ok(None);
        };
        let id = unescape(id);
        let mut parts = BTreeMap::new();
        let mut after = String::new();
        for _ in 0..MAX_PAGES {
            let query = format!("{after}uploadId={}", encode(&id));
            let text = self.text(Method::GET, &self.address.with_query(&query)?, &[])?;
            for part in elements(&text, "Part") {
                let (Some(number), Some(tag), Some(bytes)) = (
                    element(part, "PartNumber").and_then(|number| number.parse().ok()),
                    element(part, "ETag"),
                    element(part, "Size").and_then(|size| size.parse().ok()),
                ) else {
                    continue;
                };
                let part = Part {
                    tag: unescape(tag),
                    checksum: element(part, "ChecksumSHA256")
                        .unwrap_or_default()
                        .to_owned(),
                    bytes,
                };
                parts.insert(number, part);
            }
            match (
                element(&text, "IsTruncated"),
                element(&text, "NextPartNumberMarker"),
            ) {
                (Some("true"), Some(marker)) => {
                    after = format!("part-number-marker={}&", encode(marker));
                }
                _ => break,
            }
        }
        // An upload of another program may take no such checksums.
        let is_own = parts.values().all(|part| !part.checksum.is_empty());
        tracing::debug!("{}: an earlier upload has {} parts", self.name, parts.len());
        Ok((is_own && !parts.is_empty()).then_some(Begun { id, parts }))
    }

    fn text(
        &self,
        method: Method,
        address: &Address,
        headers: &[(&str, &str)],
    ) -> Result<String, Problem> {
        self.persist(|budget| {
            let answer = self.send(method.clone(), address, headers, &[], budget)?;
            match answer.status {
                200 => document(answer),
                _ => Err(refusal(answer)),
            }
        })
    }

    /// Makes the file of its parts. Returns its tag.
    fn complete(
        &self,
        id: &str,
        parts: &BTreeMap<u64, Part>,
        replace: Replace,
    ) -> Result<String, Problem> {
        let listed: String = parts
            .iter()
            .map(|(number, part)| {
                format!(
                    "<Part><ChecksumSHA256>{}</ChecksumSHA256><ETag>{}</ETag><PartNumber>{number}\
                     </PartNumber></Part>",
                    part.checksum,
                    escape(&part.tag)
                )
            })
            .collect();
        let body = format!(
            "<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">{listed}\
             </CompleteMultipartUpload>"
        );
        let address = self
            .address
            .with_query(&format!("uploadId={}", encode(id)))?;
        let mut headers = vec![("content-type", "application/xml")];
        if replace == Replace::Refused {
            headers.push(("if-none-match", "*"));
        }
        self.persist(|budget| {
            let answer = self.send(Method::POST, &address, &headers, body.as_bytes(), budget)?;
            match answer.status {
                200 => {
                    let text = document(answer)?;
                    match (element(&text, "ETag"), element(&text, "Code")) {
                        (Some(tag), _) => Ok(unescape(tag)),
                        (None, Some("InternalError" | "SlowDown" | "ServiceUnavailable")) => {
                            Err(Problem::Busy(500).transient())
                        }
                        (None, code) => Err(Problem::Refused {
                            status: 200,
                            explanation: printable(code.unwrap_or("an answer without a tag")),
                        }
                        .permanent()),
                    }
                }
                412 => Err(Problem::Exists.permanent()),
                _ => Err(refusal(answer)),
            }
        })
    }

    fn abort(&self, id: &str) {
        let aborted = self
            .address
            .with_query(&format!("uploadId={}", encode(id)))
            .and_then(|address| {
                self.persist(|budget| {
                    let answer = self.send(Method::DELETE, &address, &[], &[], budget)?;
                    match answer.status {
                        200..=204 | 404 => Ok(()),
                        _ => Err(refusal(answer)),
                    }
                })
            });
        if let Err(problem) = aborted {
            tracing::warn!(
                "{}: parts that have arrived stay until the next upload to this name: {problem}",
                self.name
            );
        }
    }

    /// Compares the file on the server with what was sent.
    fn check(&self, content: &S3Content<'_>, tag: Option<&str>) -> Result<(), Problem> {
        let missing = || Problem::Answer("the file is not there after its upload".into());
        let found = self.head()?.ok_or_else(missing)?;
        let is_ours = found.root.as_deref() == Some(content.root);
        match tag {
            // Another writer was first.
            None if !is_ours => Err(Problem::Exists),
            _ if found.length != Some(content.length) => Err(Problem::Answer(format!(
                "the file has {} bytes there, and {} here",
                found
                    .length
                    .map_or("?".to_owned(), |length| length.to_string()),
                content.length
            ))),
            Some(tag) if found.tag.as_deref() != Some(tag) => Err(Problem::Answer(
                "the file there has another tag than the upload: another program has written it"
                    .into(),
            )),
            _ => Ok(()),
        }
    }

    /// What the server has under the name; `None` if it has nothing, or does not tell this user.
    fn head(&self) -> Result<Option<Head>, Problem> {
        self.persist(|budget| {
            let answer = match self.send(Method::HEAD, &self.address, &[], &[], budget) {
                Ok(answer) => answer,
                // The server hides from this user what is not there. A wrong key looks the same, as
                // the answer to HEAD has no text; a later request explains it.
                Err(fault) if matches!(fault.problem, Problem::Denied { status: 403, .. }) => {
                    return Ok(None);
                }
                Err(fault) => return Err(fault),
            };
            let text = |name| answer.header(name).map(str::to_owned);
            match answer.status {
                200 => Ok(Some(Head {
                    length: text("content-length").and_then(|length| length.trim().parse().ok()),
                    tag: text("etag"),
                    root: text(MARK),
                })),
                404 => Ok(None),
                _ => Err(answer.refusal()),
            }
        })
    }

    fn send(
        &self,
        method: Method,
        address: &Address,
        headers: &[(&str, &str)],
        bytes: &[u8],
        budget: &RetryBudget,
    ) -> Result<Answer, Fault> {
        let request = Request {
            method,
            address,
            headers,
            bytes,
        };
        self.signer.send(&self.shared.client, &request, budget)
    }

    /// Tries some times.
    fn persist<T>(&self, attempt: impl Fn(&RetryBudget) -> Result<T, Fault>) -> Result<T, Problem> {
        self.shared.opening().run(attempt)
    }
}

/// What the server says of a file.
struct Head {
    length: Option<u64>,
    tag: Option<String>,
    root: Option<String>,
}

/// The length of the parts of a file, except the last one.
fn part_bytes(length: u64) -> u64 {
    length
        .div_ceil(MAX_PARTS)
        .next_multiple_of(1 << 20)
        .max(PART_BYTES)
}

fn read(content: &S3Content<'_>, offset: u64, length: u64) -> Result<Vec<u8>, Problem> {
    let mut bytes = vec![0; length as usize];
    (content.read_at)(offset, &mut bytes).map_err(|error| Problem::Content(error.to_string()))?;
    Ok(bytes)
}

fn checksum(bytes: &[u8]) -> String {
    BASE64.encode(&Sha256::digest(bytes))
}

fn tag_of(answer: &Answer) -> Result<String, Fault> {
    let tag = answer.header("etag").map(str::to_owned);
    tag.ok_or_else(|| Problem::Answer("it has no ETag".into()).permanent())
}

fn document(mut answer: Answer) -> Result<String, Fault> {
    let bytes = answer.body.read_document(LIST_BYTES)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The error of an answer, with the explanation of the server.
fn refusal(mut answer: Answer) -> Fault {
    let fault = answer.refusal();
    if !matches!(fault.problem, Problem::Status(_) | Problem::NotFound(_)) {
        return fault;
    }
    let status = answer.status;
    let text = answer.body.read_document(EXPLANATION_BYTES);
    let text = text.unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    if element(&text, "Code") == Some("NoSuchUpload") {
        return fault;
    }
    let Some(explanation) = explanation(&text) else {
        return fault;
    };
    let problem = Problem::Refused {
        status,
        explanation,
    };
    match status {
        // Two requests at one time.
        409 => problem.transient(),
        _ => problem.permanent(),
    }
}

/// The content of the elements of this name, which does not contain itself.
pub(crate) fn elements<'t>(text: &'t str, name: &str) -> impl Iterator<Item = &'t str> {
    let (begin, end) = (format!("<{name}>"), format!("</{name}>"));
    let mut rest = text;
    std::iter::from_fn(move || {
        let (_, behind) = rest.split_once(&begin)?;
        let (content, after) = behind.split_once(&end)?;
        rest = after;
        Some(content)
    })
}

pub(crate) fn unescape(text: &str) -> String {
    let named = [
        ("&quot;", "\""),
        ("&#34;", "\""),
        ("&apos;", "'"),
        ("&#39;", "'"),
        ("&lt;", "<"),
        ("&gt;", ">"),
        ("&amp;", "&"),
    ];
    let replaced = |text: String, (from, to)| text.replace(from, to);
    named.into_iter().fold(text.to_owned(), replaced)
}

pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_files_have_larger_parts_and_at_most_as_many_as_s3_allows() {
        assert_eq!(part_bytes(PART_BYTES + 1), PART_BYTES);
        for length in [80 << 30, 100 << 30, MAX_BYTES] {
            assert!(length.div_ceil(part_bytes(length)) <= MAX_PARTS);
        }
        assert_eq!(part_bytes(100 << 30) % (1 << 20), 0);
    }

    #[test]
    fn elements_of_lists_are_found() {
        let text = "<L><Upload><Key>a&amp;b</Key><UploadId>1</UploadId></Upload>\
                    <Upload><Key>c</Key></Upload></L>";
        let keys: Vec<_> = elements(text, "Upload")
            .filter_map(|upload| element(upload, "Key").map(unescape))
            .collect();
        assert_eq!(keys, ["a&b", "c"]);
        assert_eq!(unescape(&escape("\"a&<b\"")), "\"a&<b\"");
    }
}
