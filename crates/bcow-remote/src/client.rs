//! One HTTP client for all files: connections, TLS, limits of time and number.

use std::io::{self, Read};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use flate2::read::MultiGzDecoder;
use rustls::crypto::ring;
use ureq::http::{HeaderMap, Method, Request, Response};
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::unversioned::transport::{Connector, DefaultConnector};
use ureq::{Agent, AsSendBody, Body, SendBody};

use crate::address::{Address, Transport};
use crate::deadline::Deadlines;
use crate::error::{Fault, Problem, printable};
use crate::fetcher::{self, ClientName, Fetcher};
use crate::figures::{Counters, Traffic};
use crate::resolver::TimedResolver;
use crate::retry_budget::RetryBudget;
use crate::servers::{CONNECTIONS, Permit, Servers};

/// Connections that wait for the next request, to all servers.
const IDLE_CONNECTIONS: usize = 4 * CONNECTIONS;
/// Largest size of the headers of an answer.
const HEADER_BYTES: usize = 64 << 10;
/// Largest rest of an answer that is read so that its connection can be used again. A longer one
/// would take longer than a new connection.
const MAX_REST_BYTES: usize = 16 << 10;
/// Time for a connection, TLS included.
const CONNECT: Duration = Duration::from_secs(10);
/// The lowest rate at which a server may take a stream, in bytes per second.
const SLOWEST_UPLOAD: u64 = 8 << 10;

/// The usual variables that name other certificates.
const CERTIFICATES: [&str; 2] = ["SSL_CERT_FILE", "SSL_CERT_DIR"];

pub(crate) struct Client {
    plain: Agent,
    /// Made for the first request to an `https` address: the certificates of this machine are
    /// hundreds of files, and an image that is in the cache needs no request.
    encrypted: OnceLock<Result<Agent, Problem>>,
    pub(crate) transport: Transport,
    servers: Servers,
    pub(crate) counters: Arc<Counters>,
    /// The process that makes the connections for [`crate::source`], and the name of this client
    /// there; `None` is this one.
    pub(crate) fetcher: Option<(Arc<Fetcher>, ClientName)>,
}

/// What a request sends.
pub(crate) enum Content<'b> {
    Nothing,
    Bytes(&'b [u8]),
    /// As many bytes of the reader. They may take long, but not stop for long.
    Stream(&'b mut dyn Read, u64),
}

/// The limits of one request: the longest silence, and the end of its answer.
struct Limits {
    silence: Duration,
    /// The time to send a stream in.
    sending: Duration,
    deadline: Instant,
}

/// The head of an answer, and its body, which is not read yet.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: AnswerBody,
}

/// The body of an answer. The request counts as running until this is dropped.
pub(crate) struct AnswerBody {
    reader: BodyReader,
    /// Bytes that have not been read, if the answer says how many it has.
    left: Option<u64>,
    longest_silence: Duration,
    deadline: Instant,
}

enum BodyReader {
    /// From a connection of this process.
    Connection {
        reader: Box<ureq::BodyReader<'static>>,
        traffic: Arc<Traffic>,
        running: Running,
    },
    Fetcher(fetcher::Body),
}

/// A request that is under way until this is dropped.
struct Running {
    counters: Arc<Counters>,
    _permit: Permit,
}

impl Client {
    pub(crate) fn new(transport: Transport, fetcher: Option<(Arc<Fetcher>, ClientName)>) -> Self {
        let client = Client {
            plain: agent(TlsConfig::default()),
            encrypted: OnceLock::new(),
            transport,
            servers: Servers::default(),
            counters: Arc::default(),
            fetcher,
        };
        // The process of a mount changes its directory later.
        let mut places = CERTIFICATES.iter().filter_map(std::env::var_os);
        if places.any(|paths| std::env::split_paths(&paths).any(|path| path.is_relative())) {
            client.encrypted();
        }
        client
    }

    fn encrypted(&self) -> &Result<Agent, Problem> {
        self.encrypted.get_or_init(|| certificates().map(agent))
    }

    /// The connections to an address.
    fn agent(&self, address: &Address) -> Result<&Agent, Fault> {
        if !address.is_encrypted() {
            return Ok(&self.plain);
        }
        let agent = self.encrypted().as_ref();
        agent.map_err(|problem| problem.clone().permanent())
    }

    /// Waits for the turn of a request to an address, which the fetcher sends.
    pub(crate) fn turn(&self, address: &Address, budget: &RetryBudget) -> Result<Permit, Fault> {
        address.check(self.transport).map_err(Problem::permanent)?;
        self.servers.get(&address.origin()).begin(budget)
    }

    /// Sends a GET request, and returns what the server answers, with any status. The answer must
    /// be complete at the deadline of `budget`.
    pub(crate) fn get(
        &self,
        address: &Address,
        headers: &[(&str, &str)],
        budget: &RetryBudget,
    ) -> Result<Answer, Fault> {
        self.send(Method::GET, address, headers, Content::Nothing, budget)
    }

    /// Sends a request, and returns what the server answers, with any status. The answer must be
    /// complete at the deadline of `budget`; the time in which a stream is sent does not count.
    pub(crate) fn send(
        &self,
        method: Method,
        address: &Address,
        headers: &[(&str, &str)],
        content: Content<'_>,
        budget: &RetryBudget,
    ) -> Result<Answer, Fault> {
        let agent = self.agent(address)?;
        address.check(self.transport).map_err(Problem::permanent)?;
        let server = self.servers.get(&address.origin());
        let permit = server.begin(budget)?;
        let left = budget.left();
        if left.is_zero() {
            return Err(Problem::Timeout(left).permanent());
        }
        let running = Running::new(&self.counters, permit);
        let traffic = self.counters.request(address.origin());
        let silence = budget.longest_silence().min(left);
        let may_repeat = method.is_idempotent();
        let mut request = Request::builder().method(method).uri(address.uri());
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        // The bytes of a range are those of the file, not of a compressed form.
        request = request.header("accept-encoding", "identity");
        let sending = match &content {
            Content::Stream(_, length) => Duration::from_secs(length / SLOWEST_UPLOAD),
            _ => Duration::ZERO,
        };
        let limits = Limits {
            silence,
            sending,
            deadline: budget.deadline(),
        };
        let invalid = |_| Problem::Answer("it led to an invalid request".into()).permanent();
        let begun = Instant::now();
        let response = match content {
            Content::Nothing => {
                let request = request.body(()).map_err(invalid)?;
                match run(agent, request.clone(), &limits) {
                    Err(error) if may_repeat && is_closed(&error) => run(agent, request, &limits),
                    other => other,
                }
            }
            Content::Bytes(bytes) => run(agent, request.body(bytes).map_err(invalid)?, &limits),
            Content::Stream(reader, length) => {
                let request = request.header("content-length", length);
                let body = SendBody::from_reader(reader);
                run(agent, request.body(body).map_err(invalid)?, &limits)
            }
        };
        let response = response.map_err(|error| fault(&error, silence))?;
        let answer = answer(response, &limits, begun.elapsed(), running, traffic);
        if let Some(pause) = answer.retry_after() {
            server.wants_quiet(pause, Problem::Busy(answer.status));
        }
        Ok(answer)
    }
}

/// Reads the certificates of this machine.
fn certificates() -> Result<TlsConfig, Problem> {
    let found = rustls_native_certs::load_native_certs();
    if found.certs.is_empty() {
        let why = found.errors.first().map_or_else(
            || "there are none; install ca-certificates, or set SSL_CERT_FILE".to_owned(),
            ToString::to_string,
        );
        return Err(Problem::Certificates(why));
    }
    for error in &found.errors {
        tracing::warn!("cannot read a certificate: {error}");
    }
    let roots = found.certs.iter().map(|cert| Certificate::from_der(cert));
    let roots: RootCerts = roots.map(|cert| cert.to_owned()).into();
    Ok(TlsConfig::builder()
        .root_certs(roots)
        .unversioned_rustls_crypto_provider(ring::default_provider().into())
        .build())
}

fn agent(tls: TlsConfig) -> Agent {
    let config = Agent::config_builder()
        .tls_config(tls)
        .http_status_as_error(false)
        // Followed by `Source`, which keeps credentials away from other servers.
        .max_redirects(0)
        .max_response_header_size(HEADER_BYTES)
        .max_idle_connections(IDLE_CONNECTIONS)
        .max_idle_connections_per_host(CONNECTIONS)
        .user_agent(concat!("bcow/", env!("CARGO_PKG_VERSION")))
        // ureq counts all input behind an interim answer (1xx) as headers.
        .input_buffer_size(HEADER_BYTES)
        .build();
    let connector = DefaultConnector::default().chain(Deadlines);
    Agent::with_parts(config, connector, TimedResolver)
}

/// Sends a request, and waits for the head of its answer.
fn run<B: AsSendBody>(
    agent: &Agent,
    request: Request<B>,
    limits: &Limits,
) -> Result<Response<Body>, ureq::Error> {
    let silence = limits.silence;
    let request = agent
        .configure_request(request)
        .timeout_resolve(Some(CONNECT.min(silence)))
        .timeout_connect(Some(CONNECT.min(silence)))
        .timeout_send_request(Some(silence))
        .timeout_send_body(Some(silence + limits.sending))
        .timeout_per_write(Some(silence))
        .timeout_recv_response(Some(silence))
        .timeout_per_read(Some(silence))
        .build();
    agent.run(request)
}

/// Whether the server closed the connection before it answered. A server may close a connection
/// after any answer without saying so, at the moment when the next request uses it again. The
/// request is then sent once more, at once (RFC 9112, section 9.3.1).
fn is_closed(error: &ureq::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset};
    let ureq::Error::Io(error) = error else {
        return false;
    };
    matches!(
        error.kind(),
        ConnectionReset | ConnectionAborted | BrokenPipe
    )
}

/// The answer behind the head `response`, which arrived after `elapsed`.
fn answer(
    response: Response<Body>,
    limits: &Limits,
    elapsed: Duration,
    running: Running,
    traffic: Arc<Traffic>,
) -> Answer {
    let (head, body) = response.into_parts();
    Answer {
        status: head.status.as_u16(),
        headers: head.headers,
        body: AnswerBody {
            left: body.content_length(),
            reader: BodyReader::Connection {
                reader: Box::new(body.into_reader()),
                traffic,
                running,
            },
            longest_silence: limits.silence,
            deadline: if limits.sending.is_zero() {
                limits.deadline
            } else {
                // The time of the content does not count.
                limits.deadline + elapsed
            },
        },
    }
}

impl Answer {
    /// A header's value, if it is text.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// The content, which may have at most `most` bytes. Some servers compress documents although
    /// the request does not allow it.
    pub(crate) fn document(mut self, most: u64) -> Result<Vec<u8>, Fault> {
        let coding = self.header("content-encoding").unwrap_or_default().trim();
        let is_gzip = match &*coding.to_ascii_lowercase() {
            "" | "identity" => false,
            "gzip" | "x-gzip" => true,
            other => {
                let why = format!("it is encoded as {}", printable(other));
                return Err(Problem::Answer(why).permanent());
            }
        };
        let bytes = self.body.read_document(most)?;
        if !is_gzip {
            return Ok(bytes);
        }
        let mut decoded = Vec::new();
        let mut decoder = MultiGzDecoder::new(&*bytes).take(most + 1);
        match decoder.read_to_end(&mut decoded) {
            Ok(_) if decoded.len() as u64 > most => Err(too_long(most)),
            Ok(_) => Ok(decoded),
            Err(error) => {
                Err(Problem::Answer(format!("its gzip stream is damaged: {error}")).transient())
            }
        }
    }

    /// The fault of an answer with an unsuccessful status.
    pub(crate) fn refusal(&self) -> Fault {
        match self.status {
            401 | 403 => Problem::denied(self.status, "").permanent(),
            404 | 410 => Problem::NotFound(self.status).permanent(),
            416 => Problem::OutOfRange.permanent(),
            status if is_busy(status) => Problem::Busy(status).transient(),
            status => Problem::Status(status).permanent(),
        }
    }

    /// The pause that a busy server asks for, in seconds. The form with a date is ignored: clocks
    /// differ.
    fn retry_after(&self) -> Option<Duration> {
        let seconds = self
            .header("retry-after")
            .filter(|_| is_busy(self.status))?;
        Some(Duration::from_secs(seconds.trim().parse().ok()?))
    }
}

/// Whether a status reports a failure that may be temporary.
pub(crate) fn is_busy(status: u16) -> bool {
    matches!(status, 408 | 425 | 429 | 500 | 502 | 503 | 504)
}

impl Running {
    fn new(counters: &Arc<Counters>, permit: Permit) -> Self {
        counters.running_requests.fetch_add(1, Ordering::Relaxed);
        Running {
            counters: Arc::clone(counters),
            _permit: permit,
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let counter = &self.counters.running_requests;
        counter.fetch_sub(1, Ordering::Relaxed);
    }
}

impl AnswerBody {
    /// The body of an answer that the fetcher gets, with `left` bytes.
    pub(crate) fn of_fetcher(body: fetcher::Body, left: Option<u64>, budget: &RetryBudget) -> Self {
        AnswerBody {
            reader: BodyReader::Fetcher(body),
            left,
            longest_silence: budget.longest_silence(),
            deadline: budget.deadline(),
        }
    }

    /// Fills `buf`, as far as the answer goes. Returns the number of bytes.
    pub(crate) fn fill(&mut self, buf: &mut [u8]) -> Result<usize, Fault> {
        let mut done = 0;
        while done < buf.len() {
            match self.read(&mut buf[done..])? {
                0 => break,
                count => done += count,
            }
        }
        Ok(done)
    }

    /// Fills `buf`.
    pub(crate) fn read_exact(&mut self, buf: &mut [u8]) -> Result<(), Fault> {
        if self.fill(buf)? == buf.len() {
            return Ok(());
        }
        let ended = io::ErrorKind::UnexpectedEof.into();
        Err(body_fault(ended, Duration::ZERO))
    }

    /// The next bytes, which are the last ones.
    pub(crate) fn into_bytes(mut self, count: u64) -> Result<Vec<u8>, Fault> {
        let mut bytes = vec![0; count as usize];
        self.read_exact(&mut bytes)?;
        self.release();
        Ok(bytes)
    }

    /// Reads the rest, which may have at most `most` bytes.
    pub(crate) fn read_document(&mut self, most: u64) -> Result<Vec<u8>, Fault> {
        let mut bytes = Vec::new();
        let mut buf = vec![0; 64 << 10];
        loop {
            let count = self.read(&mut buf)?;
            if count == 0 {
                return Ok(bytes);
            }
            bytes.extend_from_slice(&buf[..count]);
            if bytes.len() as u64 > most {
                return Err(too_long(most));
            }
        }
    }

    /// Ends an answer whose bytes are all here. The connection is used again if the answer has said
    /// how long it is: to learn of another end, the caller would have to wait for the server.
    pub(crate) fn release(self) {
        match self.reader {
            _ if self.left != Some(0) => {}
            // ureq learns of the end by a read that returns 0.
            BodyReader::Connection { mut reader, .. } => drop(reader.read(&mut [0])),
            BodyReader::Fetcher(body) => body.release(),
        }
    }

    /// Reads to the end of the answer, if that is near. Without this, the connection is closed, and
    /// the next request makes a new one.
    pub(crate) fn finish(mut self) {
        let mut rest = [0; 4 << 10];
        let mut done = 0;
        while done <= MAX_REST_BYTES {
            match self.read(&mut rest) {
                Ok(count) if count > 0 => done += count,
                // A failed connection is not used again either.
                _ => return,
            }
        }
    }

    /// Reads some bytes; 0 at the end. Each read takes a limited time; this check limits that of
    /// all reads together, however few bytes each of them brings.
    pub(crate) fn read(&mut self, buf: &mut [u8]) -> Result<usize, Fault> {
        let silence = self.longest_silence;
        let time = self.deadline.saturating_duration_since(Instant::now());
        if time.is_zero() {
            return Err(Problem::Timeout(silence).transient());
        }
        let count = match &mut self.reader {
            BodyReader::Connection {
                reader,
                traffic,
                running,
            } => {
                let read = reader.read(buf);
                let count = read.map_err(|error| body_fault(error, silence))?;
                running.counters.received(traffic, count as u64);
                count
            }
            BodyReader::Fetcher(body) => body.read(buf, time)?,
        };
        self.left = self.left.map(|left| left.saturating_sub(count as u64));
        Ok(count)
    }

    /// Bytes that have not been read; `None` if the answer does not say how many it has.
    pub(crate) fn left(&self) -> Option<u64> {
        self.left
    }

    /// The time for the body begins again.
    pub(crate) fn extend(&mut self, time: Duration) {
        self.deadline = Instant::now() + time;
    }
}

fn too_long(most: u64) -> Fault {
    Problem::Answer(format!("it has more than {most} bytes")).permanent()
}

fn body_fault(error: io::Error, silence: Duration) -> Fault {
    if error.kind() == io::ErrorKind::UnexpectedEof {
        return Problem::Connection("the connection ended in the middle of an answer".into())
            .transient();
    }
    fault(&ureq::Error::from(error), silence)
}

/// The fault of a request that got no answer. The text has no address: that of `ureq` could have
/// the query.
fn fault(error: &ureq::Error, silence: Duration) -> Fault {
    match error {
        ureq::Error::Timeout(_) => Problem::Timeout(silence).transient(),
        ureq::Error::HostNotFound => Problem::Connection("host not found".into()).transient(),
        ureq::Error::Io(error) => match error.kind() {
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
                Problem::Timeout(silence).transient()
            }
            // rustls reports a certificate that it refuses in this form.
            io::ErrorKind::InvalidData => tls_problem(error).permanent(),
            _ => Problem::Connection(format!("no connection to the server: {error}")).transient(),
        },
        ureq::Error::Rustls(error) => Problem::Tls(error.to_string()).permanent(),
        ureq::Error::Tls(why) => Problem::Tls((*why).to_owned()).permanent(),
        ureq::Error::Protocol(error) => Problem::Answer(error.to_string()).transient(),
        ureq::Error::LargeResponseHeader(..) => {
            Problem::Answer(format!("its headers have more than {HEADER_BYTES} bytes")).permanent()
        }
        ureq::Error::ConnectProxyFailed(_) => {
            Problem::Connection("the proxy refuses the connection".into()).transient()
        }
        ureq::Error::InvalidProxyUrl => {
            Problem::Connection("the URL of the proxy is invalid".into()).permanent()
        }
        _ => Problem::Connection("the request failed".into()).transient(),
    }
}

fn tls_problem(error: &io::Error) -> Problem {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    match inner {
        // The first byte of a server that speaks HTTP is the H of HTTP.
        Some(rustls::Error::InvalidMessage(rustls::InvalidMessage::InvalidContentType)) => {
            Problem::NoTls
        }
        _ => Problem::Tls(error.to_string()),
    }
}
