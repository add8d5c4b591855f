//! Servers that misbehave, at each kind of request: what arrives is right, or there is an error
//! that names the server, after a bounded number of requests and bytes.

use std::io::{Read, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bcow::Storage;
use bcow_remote::{Options, Reference, Registry, Remote, RemoteError, Upload};
use flate2::Compression;
use flate2::write::GzEncoder;

use super::registry::{DIGEST, Stranger};
use super::server::{Asked, Reply, Server, answer, ranged};
use super::upload::{self, Habits, LARGE, State, digest, noise};
use super::{AT, IS_FETCHED, LONG, TIMEOUT, image, options, starts_at};

/// Requests of one operation, at most. An upload begins five times, and asks for its place each
/// time.
const MANY: usize = 64;
const MANIFEST: &[u8] = br#"{"schemaVersion": 2}"#;
const LIST: &[u8] = br#"{"manifests": [{"artifactType": "a/b", "digest": "sha256:1"}]}"#;

/// A kind of request, which a server answers badly. It answers all others well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Manifest,
    Token,
    Referrers,
    Blob,
    Head,
    Range,
    BlobIsThere,
    BeginUpload,
    Piece,
    EndUpload,
    PutManifest,
    GetManifest,
}

use Kind::*;

const KINDS: [Kind; 12] = [
    Manifest,
    Token,
    Referrers,
    Blob,
    Head,
    Range,
    BlobIsThere,
    BeginUpload,
    Piece,
    EndUpload,
    PutManifest,
    GetManifest,
];

/// As many of them read.
const READING: usize = 6;

impl Kind {
    fn is_of(self, asked: &Asked) -> bool {
        let is = |method: &str, path: &str| asked.method == method && asked.path.contains(path);
        match self {
            Manifest | GetManifest => is("GET", "/manifests/"),
            Token => is("GET", "/token"),
            Referrers => is("GET", "/referrers/"),
            Blob => is("GET", "/blobs/sha256:b") && asked.header("authorization").is_some(),
            Head => starts_at(asked, 0),
            Range => starts_at(asked, AT),
            BlobIsThere => is("HEAD", "/blobs/"),
            BeginUpload => is("POST", "/blobs/uploads/"),
            Piece => is("PATCH", "/blobs/uploads/"),
            EndUpload => is("PUT", "/blobs/uploads/"),
            PutManifest => is("PUT", "/manifests/"),
        }
    }

    fn is_upload(self) -> bool {
        use Kind::{BeginUpload, BlobIsThere, EndUpload, GetManifest, Piece, PutManifest};
        matches!(
            self,
            BlobIsThere | BeginUpload | Piece | EndUpload | PutManifest | GetManifest
        )
    }
}

/// A registry with an image, which gives a token to any client.
struct Good {
    image: Arc<Vec<u8>>,
    state: Arc<Mutex<State>>,
}

impl Good {
    fn new() -> Self {
        Good {
            image: image(1).0,
            state: Arc::default(),
        }
    }

    fn answer(&self, asked: &Asked, kind: Kind) -> Reply {
        if asked.path.starts_with("/token") {
            return Reply::Answer(200, vec![], br#"{"token": "good"}"#.to_vec());
        }
        if asked.header("authorization") != Some("Bearer good") {
            let host = asked.header("host").unwrap_or_default();
            let challenge = format!(r#"Bearer realm="http://{host}/token""#);
            return Reply::Answer(401, vec![("www-authenticate", challenge)], Vec::new());
        }
        if kind.is_upload() {
            let mut state = self.state.lock().expect("no panic");
            return upload::answer(asked, Habits::default(), &mut state);
        }
        let text = |bytes: &[u8]| Reply::Answer(200, vec![], bytes.to_vec());
        match &*asked.path {
            path if path.contains("/referrers/") => text(LIST),
            path if path.contains("/manifests/sha256-") => text(LIST),
            path if path.contains("/manifests/") => text(MANIFEST),
            _ => Reply::File(Arc::clone(&self.image)),
        }
    }
}

/// What an operation brings: the bytes and those that are right, or an error.
type Outcome = Result<(Vec<u8>, Vec<u8>), Error>;

struct Error {
    text: String,
    kind: &'static str,
}

impl From<RemoteError> for Error {
    fn from(error: RemoteError) -> Self {
        Error {
            kind: error.problem.kind(),
            text: error.to_string(),
        }
    }
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        let found = RemoteError::below(&error).cloned();
        found.expect("an error of this crate").into()
    }
}

/// The operation that makes requests of this kind.
fn operate(kind: Kind, server: &Server, good: &Good, timeout: Duration) -> Outcome {
    let remote = Remote::new(Options {
        timeout,
        ..options(None)
    })
    .expect("a client");
    let name = format!("docker://{}/team/image:1", server.address);
    let name: Reference = name.parse().expect("a reference");
    let keychain = Arc::new(Stranger);
    let upload = Upload::new(&remote, name.clone(), Arc::clone(&keychain) as _, None);
    let upload = upload.expect("an address");
    let registry = Registry::new(&remote, name, keychain);
    let (right, root) = (&good.image, image(1).1);
    Ok(match kind {
        Manifest | Token => (registry.manifest()?, MANIFEST.to_vec()),
        Referrers => {
            let found: serde_json::Value =
                serde_json::from_slice(&registry.referrers(DIGEST, "a/b")?).expect("JSON");
            let right: serde_json::Value = serde_json::from_slice(LIST).expect("JSON");
            let entries = |index: &serde_json::Value| index["manifests"].to_string().into_bytes();
            (entries(&found), entries(&right))
        }
        Blob => {
            let name = format!("sha256:b{}", "0".repeat(63));
            let mut bytes = Vec::new();
            let length = right.len() as u64;
            registry.download(&name, length)?.read_to_end(&mut bytes)?;
            (bytes, right.to_vec())
        }
        Head | Range => {
            let mut bytes = vec![0; 5000];
            let file = registry.blob(DIGEST, Some(root.into()))?;
            file.read_at(AT as u64, &mut bytes)?;
            (bytes, right[AT..AT + 5000].to_vec())
        }
        BlobIsThere | BeginUpload | Piece | EndUpload => {
            let bytes = noise(LARGE);
            upload::send(&upload, &bytes).0?;
            let state = good.state.lock().expect("no panic");
            let there = state.blobs.get(&digest(&bytes)).cloned();
            (there.unwrap_or_default(), bytes.to_vec())
        }
        PutManifest | GetManifest => {
            upload.manifest(MANIFEST, "a/b", &digest(MANIFEST))?;
            let state = good.state.lock().expect("no panic");
            (state.manifests["1"].clone(), MANIFEST.to_vec())
        }
    })
}

/// How often a bad answer is given before good ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Times {
    Once,
    Always,
}

/// Runs an operation with bad answers, and checks what holds for all: the bytes are right, or an
/// error names the server; few requests, few bytes.
fn run(
    kind: Kind,
    times: Times,
    bad: impl Fn(&Asked, &dyn Fn() -> Reply) -> Reply + Send + Sync + 'static,
    shown: &str,
) -> Option<Error> {
    run_for(LONG, kind, times, bad, shown)
}

/// The same with another time-out.
fn run_for(
    timeout: Duration,
    kind: Kind,
    times: Times,
    bad: impl Fn(&Asked, &dyn Fn() -> Reply) -> Reply + Send + Sync + 'static,
    shown: &str,
) -> Option<Error> {
    let good = Arc::new(Good::new());
    let of_server = Arc::clone(&good);
    let count = AtomicUsize::new(0);
    let server = Server::start(move |asked| {
        let is_bad = kind.is_of(asked)
            && (times == Times::Always || count.fetch_add(1, Ordering::SeqCst) == 0);
        let good = || of_server.answer(asked, kind);
        if is_bad { bad(asked, &good) } else { good() }
    });
    let outcome = operate(kind, &server, &good, timeout);
    let requests = server.asked().len();
    assert!(requests <= MANY, "{kind:?}, {shown}: {requests} requests");
    match outcome {
        Ok((found, right)) => {
            assert!(found == right, "{kind:?}, {shown}: other bytes");
            None
        }
        Err(error) => {
            let names_server = error.text.contains(&server.address);
            assert!(names_server, "{kind:?}, {shown}: {}", error.text);
            Some(error)
        }
    }
}

/// Calls a function with each case, several at a time: some wait for a server.
fn for_each<T: Sync>(cases: &[T], check: impl Fn(&T) + Sync) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..24 {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::SeqCst)) {
                    check(case);
                }
            });
        }
    });
}

fn all_kinds<T: Copy>(cases: &[T]) -> Vec<(Kind, T)> {
    let of_kind = |&kind: &Kind| cases.iter().map(move |&case| (kind, case));
    // A fetcher sends no uploads.
    let kinds = &KINDS[..if IS_FETCHED { READING } else { KINDS.len() }];
    kinds.iter().flat_map(of_kind).collect()
}

#[test]
fn every_status_at_every_request_is_an_error_of_its_kind_or_does_no_harm() {
    let statuses = [
        300, 304, 400, 401, 402, 403, 404, 405, 406, 408, 409, 410, 411, 413, 415, 416, 418, 421,
        422, 425, 429, 451, 500, 501, 502, 503, 504, 505, 507, 511, 599,
    ];
    for_each(&all_kinds(&statuses), |&(kind, status)| {
        let shown = format!("status {status}");
        let bad = move |_: &Asked, _: &dyn Fn() -> Reply| Reply::Answer(status, vec![], Vec::new());
        let is_busy = matches!(status, 408 | 425 | 429 | 500 | 502 | 503 | 504);
        let timeout = if is_busy { TIMEOUT } else { LONG };
        let error = run_for(timeout, kind, Times::Always, bad, &shown);
        let Some(error) = error else {
            // What a registry does not have, or does not do, has another way.
            let is_harmless = match kind {
                Referrers => matches!(status, 404 | 405 | 406 | 501),
                BlobIsThere => matches!(status, 403 | 404),
                Piece => matches!(status, 400 | 405 | 411 | 413 | 415 | 416 | 501),
                _ => false,
            };
            assert!(is_harmless, "{kind:?}: status {status} is no error");
            return;
        };
        let kinds: &[&str] = match status {
            // Without a challenge.
            401 | 403 => &["denied"],
            404 if kind == GetManifest => &["other"],
            404 | 410 => &["not-found"],
            // When the file was opened, it was long enough.
            416 if kind == Range => &["changed"],
            // The time-out is short, and the machine can be slow.
            _ if is_busy => &["busy", "timeout"],
            _ => &["other"],
        };
        let text = &error.text;
        assert!(kinds.contains(&error.kind), "{kind:?}, {shown}: {text}");
    });
}

#[test]
fn one_failure_that_may_pass_is_no_error() {
    let statuses = [408, 425, 429, 500, 502, 503, 504];
    let headers = [None, Some("0"), Some("x"), Some("-1"), Some("")];
    let cases = statuses
        .iter()
        .flat_map(|&status| headers.map(|header| (status, header)));
    let cases: Vec<(u16, Option<&str>)> = cases.collect();
    for_each(&all_kinds(&cases), |&(kind, (status, pause))| {
        let bad = move |_: &Asked, _: &dyn Fn() -> Reply| {
            let header = pause.map(|pause| ("retry-after", pause.to_owned()));
            Reply::Answer(status, header.into_iter().collect(), Vec::new())
        };
        let shown = format!("status {status}, {pause:?}");
        if let Some(error) = run(kind, Times::Once, bad, &shown) {
            panic!("{kind:?}, {shown}: {}", error.text);
        }
    });
}

/// The bytes of an answer, as a good server sends it.
fn raw(asked: &Asked, reply: Reply) -> Vec<u8> {
    match reply {
        Reply::File(bytes) => ranged(asked, &bytes, "\"one\""),
        Reply::Answer(status, headers, body) => answer(status, &headers, &body),
        _ => unreachable!("no other answer is good"),
    }
}

/// An answer without its length: chunked, or to the end of the connection.
fn without_length(bytes: &[u8], is_chunked: bool) -> (Vec<u8>, Vec<u8>) {
    let end = bytes
        .windows(4)
        .position(|four| four == b"\r\n\r\n")
        .expect("a head")
        + 4;
    let head = String::from_utf8_lossy(&bytes[..end - 2]);
    let mut lines: Vec<&str> = head.lines().collect();
    lines.retain(|line| !line.to_ascii_lowercase().starts_with("content-length:"));
    if is_chunked {
        lines.push("transfer-encoding: chunked");
    }
    let head = lines.join("\r\n") + "\r\n\r\n";
    (head.into_bytes(), bytes[end..].to_vec())
}

#[test]
fn unusual_forms_of_good_answers_are_understood() {
    let forms = [
        "103",
        "100",
        "100 twice",
        "103 with a length",
        "many 1xx",
        "chunked",
        "endless chunks",
        "closed",
        "closed at the next request",
        "no reason",
    ];
    let kinds = [Manifest, Token, Referrers, Blob, Head, Range];
    let cases: Vec<_> = kinds
        .iter()
        .flat_map(|kind| forms.map(|form| (*kind, form)))
        .collect();
    for_each(&cases, |&(kind, form)| {
        let bad = move |asked: &Asked, good: &dyn Fn() -> Reply| {
            let good = raw(asked, good());
            let before = |text: &str| Reply::Raw([text.as_bytes(), &good].concat());
            match form {
                "103" => before("HTTP/1.1 103 Early Hints\r\nlink: </x>; rel=preload\r\n\r\n"),
                "100" => before("HTTP/1.1 100 Continue\r\n\r\n"),
                "100 twice" => before(&"HTTP/1.1 100 Continue\r\n\r\n".repeat(2)),
                "103 with a length" => before("HTTP/1.1 103 x\r\ncontent-length: 9\r\n\r\n"),
                "many 1xx" => before(&"HTTP/1.1 102 Processing\r\n\r\n".repeat(20)),
                "chunked" | "endless chunks" => {
                    let (head, body) = without_length(&good, true);
                    let size = format!("{:x}\r\n", body.len());
                    let bytes = [&head, size.as_bytes(), &body, b"\r\n"].concat();
                    match form {
                        "chunked" => Reply::Raw([&bytes[..], b"0\r\n\r\n"].concat()),
                        _ if matches!(kind, Blob | Head | Range) && !body.is_empty() => {
                            Reply::Stall(bytes)
                        }
                        // The end of a document is known by its end only.
                        _ => Reply::Raw([&bytes[..], b"0\r\n\r\n"].concat()),
                    }
                }
                "closed" => {
                    let (head, body) = without_length(&good, false);
                    Reply::Raw([head, body].concat())
                }
                "closed at the next request" => Reply::Reset(good),
                _ => {
                    let text = String::from_utf8_lossy(&good[..12]).into_owned();
                    Reply::Raw([text.as_bytes(), &good[14..]].concat())
                }
            }
        };
        // A wait for an end that never comes would take a third of this.
        let timeout = if form == "endless chunks" { 60 * LONG } else { LONG };
        if let Some(error) = run_for(timeout, kind, Times::Always, bad, form) {
            panic!("{kind:?}, {form}: {}", error.text);
        }
    });
}

#[test]
fn broken_answers_are_errors_or_are_asked_for_again() {
    let forms = [
        "nothing",
        "garbage",
        "empty lines",
        "half a head",
        "half a body",
        "1xx without end",
        "101",
        "1xx that never end",
        "a flood of headers",
        "a wrong length",
        "two lengths",
        "an unknown encoding",
        "damaged gzip",
        "a redirect to itself",
        "a redirect to nothing",
        "a redirect without a target",
        "a redirect to a file",
    ];
    for_each(&all_kinds(&forms), |&(kind, form)| {
        // The content of this answer says nothing.
        if kind == EndUpload && (form.contains("encoding") || form.contains("gzip")) {
            return;
        }
        for times in [Times::Once, Times::Always] {
            let bad = move |asked: &Asked, good: &dyn Fn() -> Reply| {
                let good = || raw(asked, good());
                let redirect = |target: &str| {
                    Reply::Answer(307, vec![("location", target.to_owned())], Vec::new())
                };
                let encoded = |coding: &str| {
                    let headers = vec![("content-encoding", coding.to_owned())];
                    Reply::Answer(200, headers, b"\x1f\x8bdamaged".to_vec())
                };
                match form {
                    "nothing" => Reply::Raw(Vec::new()),
                    "garbage" => Reply::Raw(b"SSH-2.0-x\r\n\r\n".to_vec()),
                    "empty lines" => Reply::Raw(b"\r\n\r\n".to_vec()),
                    "half a head" => Reply::Raw(good()[..20].to_vec()),
                    "half a body" => {
                        let good = good();
                        Reply::Raw(good[..good.len() - 1].to_vec())
                    }
                    "1xx without end" => {
                        Reply::Raw("HTTP/1.1 103 x\r\n\r\n".repeat(20_000).into_bytes())
                    }
                    // The server stops when the client closes the connection.
                    "1xx that never end" => Reply::Endless(b"HTTP/1.1 103 x\r\n\r\n".to_vec()),
                    "101" => Reply::Raw(b"HTTP/1.1 101 x\r\n\r\n".to_vec()),
                    "a flood of headers" => {
                        let flood = "a: b\r\n".repeat(20_000);
                        Reply::Raw(format!("HTTP/1.1 200 x\r\n{flood}\r\n").into_bytes())
                    }
                    "a wrong length" => {
                        Reply::Raw(b"HTTP/1.1 200 x\r\ncontent-length: -1\r\n\r\n".to_vec())
                    }
                    "two lengths" => {
                        let lengths = "content-length: 1\r\ncontent-length: 2\r\n";
                        Reply::Raw(format!("HTTP/1.1 200 x\r\n{lengths}\r\nxx").into_bytes())
                    }
                    "an unknown encoding" => encoded("br"),
                    "damaged gzip" => encoded("gzip"),
                    "a redirect to itself" => redirect(&asked.path),
                    "a redirect to nothing" => redirect(""),
                    "a redirect without a target" => Reply::Answer(302, vec![], Vec::new()),
                    _ => redirect("file:///etc/passwd"),
                }
            };
            let timeout = if form.contains("never") { TIMEOUT } else { LONG };
            let error = run_for(timeout, kind, times, bad, form);
            // An upload that the registry has taken does not need the answer.
            let may_arrive = matches!(kind, BlobIsThere | EndUpload | Piece | PutManifest)
                // The chunks that are read are in the first half.
                || (kind == Range && form == "half a body");
            let is_error = error.is_some();
            assert!(
                is_error || times == Times::Once || may_arrive,
                "{kind:?}, {form}: no error"
            );
        }
    });
}

#[test]
fn compressed_documents_are_read() {
    let compress = |bytes: &[u8]| {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(bytes).expect("compressed");
        encoder.finish().expect("compressed")
    };
    for kind in [Manifest, Token, Referrers, GetManifest] {
        for coding in ["gzip", "GZIP", "x-gzip", "identity"] {
            let bad = move |_: &Asked, good: &dyn Fn() -> Reply| match good() {
                Reply::Answer(200, mut headers, mut body) => {
                    headers.push(("content-encoding", coding.to_owned()));
                    if coding != "identity" {
                        body = compress(&body);
                    }
                    Reply::Answer(200, headers, body)
                }
                reply => reply,
            };
            if let Some(error) = run(kind, Times::Always, bad, coding) {
                panic!("{kind:?}, {coding}: {}", error.text);
            }
        }
        // A few bytes that would be gigabytes.
        let bomb = compress(&vec![b' '; 64 << 20]);
        let bad = move |_: &Asked, _: &dyn Fn() -> Reply| {
            let headers = vec![("content-encoding", "gzip".to_owned())];
            Reply::Answer(200, headers, bomb.clone())
        };
        let error = run(kind, Times::Always, bad, "a bomb").expect("too long");
        assert!(error.text.contains("more than"), "{}", error.text);
    }
}

#[test]
fn long_documents_are_not_read_to_their_end() {
    for kind in [Manifest, Token, Referrers, GetManifest] {
        let bad =
            |_: &Asked, _: &dyn Fn() -> Reply| Reply::Answer(200, vec![], vec![b' '; 8 << 20]);
        let error = run(kind, Times::Always, bad, "8 MiB").expect("too long");
        assert!(error.text.contains("more than"), "{}", error.text);
    }
}

#[test]
fn odd_tokens_open_the_registry_or_are_errors() {
    for (token, opens) in [
        (r#"{"token": "", "access_token": "good"}"#, true),
        (r#"{"token": null, "access_token": "good"}"#, true),
        (r#"{"access_token": "good", "expires_in": "300"}"#, true),
        (r#"{"token": "good", "expires_in": 0}"#, true),
        (r#"{"token": "good", "expires_in": -1}"#, true),
        (r#"{"token": "good", "expires_in": 1e99}"#, true),
        (
            r#"{"token": "good", "expires_in": "soon", "issued_at": 7}"#,
            true,
        ),
        (r#"{"token": "", "access_token": ""}"#, false),
        (r#"{"token": 7}"#, false),
        ("{}", false),
        (r#"{"token": "a\r\nb: c"}"#, false),
        ("[]", false),
        ("", false),
        ("good", false),
    ] {
        let bad = move |_: &Asked, _: &dyn Fn() -> Reply| {
            Reply::Answer(200, vec![], token.as_bytes().to_vec())
        };
        let error = run(Token, Times::Always, bad, token);
        assert_eq!(error.is_none(), opens, "{token}");
    }
}

#[test]
fn place_of_an_upload_may_be_relative_and_must_be_there() {
    let replace = |location: fn(&str) -> Option<String>| {
        move |_: &Asked, good: &dyn Fn() -> Reply| {
            let (status, mut headers, body) = match good() {
                Reply::Answer(status, headers, body) => (status, headers, body),
                reply => return reply,
            };
            let found = headers.iter().position(|(name, _)| *name == "location");
            if let Some(found) = found {
                let (name, own) = headers.remove(found);
                headers.extend(location(&own).map(|new| (name, new)));
            }
            Reply::Answer(status, headers, body)
        }
    };
    // From `/v2/team/image/blobs/uploads/`, and from the place itself.
    let relative: [fn(&str) -> Option<String>; 3] = [
        |own| Some(own.replace("/v2/team/image/blobs/uploads/", "./")),
        |own| Some(own.replace("/v2/team/image/blobs/uploads/", "../../blobs/./uploads/")),
        |own| Some(own.replace("/v2/team", "/x/../v2/team")),
    ];
    for location in relative {
        for kind in [BeginUpload, Piece] {
            if let Some(error) = run(kind, Times::Always, replace(location), "relative") {
                panic!("{kind:?}: {}", error.text);
            }
        }
    }
    let error = run(BeginUpload, Times::Always, replace(|_| None), "no place");
    let text = error.expect("no place").text;
    assert!(
        text.contains("does not name its place (Location)"),
        "{text}"
    );
}
