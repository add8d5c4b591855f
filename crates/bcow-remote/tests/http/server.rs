//! A small HTTP server on the loopback, which answers as a test wants.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A request.
#[derive(Debug, Clone)]
pub struct Asked {
    /// Counts the requests from 0.
    pub number: usize,
    /// The same for requests on one connection.
    pub connection: u16,
    pub method: String,
    pub path: String,
    /// First and last byte.
    pub range: Option<(usize, usize)>,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Asked {
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut headers = self.headers.iter();
        headers.find(|(n, _)| n == name).map(|(_, value)| &**value)
    }
}

/// An answer.
pub enum Reply {
    /// The range of these bytes, as a good server sends it.
    File(Arc<Vec<u8>>),
    /// The same, with another ETag than the other files have.
    Tagged(Arc<Vec<u8>>, &'static str),
    /// All of the bytes with status 200.
    Whole(Arc<Vec<u8>>),
    /// Status, headers and body.
    Answer(u16, Vec<(&'static str, String)>, Vec<u8>),
    /// These bytes, then the connection is closed.
    Raw(Vec<u8>),
    /// These bytes; then the connection is closed at the moment when another request comes.
    Reset(Vec<u8>),
    /// These bytes in equal pieces, with this pause before each; then the connection is closed.
    Slow(Vec<u8>, usize, Duration),
    /// These bytes again and again until the client closes the connection.
    Endless(Vec<u8>),
    /// These bytes, then silence until the client gives up.
    Stall(Vec<u8>),
}

type Answers = dyn Fn(&Asked) -> Reply + Send + Sync;
/// The number of bytes of a request's body that the server reads before it closes the connection.
type Cut = dyn Fn(&Asked) -> Option<usize> + Send + Sync;

pub struct Server {
    pub address: String,
    asked: Arc<Mutex<Vec<Asked>>>,
    stop: Arc<AtomicBool>,
}

/// Bounds each wait of the server, so that no test hangs.
const PATIENCE: Duration = Duration::from_secs(20);

impl Server {
    pub fn start(answers: impl Fn(&Asked) -> Reply + Send + Sync + 'static) -> Server {
        Server::cutting(|_| None, answers)
    }

    /// A server that breaks connections. A request that was cut is answered too, but the answer is
    /// not sent.
    pub fn cutting(
        cut: impl Fn(&Asked) -> Option<usize> + Send + Sync + 'static,
        answers: impl Fn(&Asked) -> Reply + Send + Sync + 'static,
    ) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address").to_string();
        let asked = Arc::<Mutex<Vec<Asked>>>::default();
        let stop = Arc::<AtomicBool>::default();
        let answers: Arc<Answers> = Arc::new(answers);
        let cut: Arc<Cut> = Arc::new(cut);
        let shared = (Arc::clone(&asked), Arc::clone(&stop));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if shared.1.load(Ordering::SeqCst) {
                    break;
                }
                let (answers, asked, stop) = (
                    Arc::clone(&answers),
                    Arc::clone(&shared.0),
                    Arc::clone(&shared.1),
                );
                let Ok(stream) = stream else { break };
                let cut = Arc::clone(&cut);
                std::thread::spawn(move || serve(stream, &*cut, &*answers, &asked, &stop));
            }
        });
        Server {
            address,
            asked,
            stop,
        }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// The requests so far.
    pub fn asked(&self) -> Vec<Asked> {
        self.asked.lock().expect("no panic").clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        // Wakes the accepting thread.
        let _ = TcpStream::connect(&self.address);
    }
}

fn serve(
    stream: TcpStream,
    cut: &Cut,
    answers: &Answers,
    asked: &Mutex<Vec<Asked>>,
    stop: &AtomicBool,
) -> Option<()> {
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    stream.set_write_timeout(Some(PATIENCE)).ok()?;
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let mut stream = stream;
    let connection = stream.peer_addr().ok()?.port();
    while !stop.load(Ordering::SeqCst) {
        let mut request = read_request(&mut reader)?;
        request.number = asked.lock().ok()?.len();
        request.connection = connection;
        let cut = cut(&request);
        let length = request.header("content-length");
        let length: usize = length.and_then(|text| text.parse().ok()).unwrap_or(0);
        request.body = vec![0; cut.unwrap_or(length).min(length)];
        reader.read_exact(&mut request.body).ok()?;
        {
            let mut all = asked.lock().ok()?;
            request.number = all.len();
            all.push(request.clone());
        }
        if stop.load(Ordering::SeqCst) {
            return None;
        }
        let reply = answers(&request);
        if cut.is_some() {
            return None;
        }
        match reply {
            Reply::File(bytes) => stream
                .write_all(&ranged(&request, &bytes, "\"one\""))
                .ok()?,
            Reply::Tagged(bytes, tag) => {
                stream.write_all(&ranged(&request, &bytes, tag)).ok()?;
            }
            Reply::Whole(bytes) => stream.write_all(&answer(200, &[], &bytes)).ok()?,
            Reply::Answer(status, headers, body) => {
                let mut bytes = answer(status, &headers, &body);
                if request.method == "HEAD" {
                    bytes.truncate(bytes.len() - body.len());
                }
                stream.write_all(&bytes).ok()?;
            }
            Reply::Raw(bytes) => {
                stream.write_all(&bytes).ok()?;
                return None;
            }
            Reply::Reset(bytes) => {
                stream.write_all(&bytes).ok()?;
                // A close with unread bytes resets the connection.
                let _ = stream.peek(&mut [0]);
                return None;
            }
            Reply::Endless(bytes) => {
                let many = bytes.repeat(1000);
                while !stop.load(Ordering::SeqCst) {
                    stream.write_all(&many).ok()?;
                }
                return None;
            }
            Reply::Slow(bytes, pieces, pause) => {
                for piece in bytes.chunks(bytes.len().div_ceil(pieces)) {
                    std::thread::sleep(pause);
                    stream.write_all(piece).ok()?;
                }
                return None;
            }
            Reply::Stall(bytes) => {
                stream.write_all(&bytes).ok()?;
                // Until the client closes the connection.
                let _ = stream.read(&mut [0]);
                return None;
            }
        }
    }
    None
}

fn read_request(reader: &mut BufReader<TcpStream>) -> Option<Asked> {
    let mut line = String::new();
    if reader.read_line(&mut line).ok()? == 0 {
        return None;
    }
    let mut words = line.split(' ');
    let method = words.next()?.to_owned();
    let path = words.next()?.to_owned();
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(": ") else {
            break;
        };
        headers.push((name.to_ascii_lowercase(), value.to_owned()));
    }
    let range = headers
        .iter()
        .find(|(name, _)| name == "range")
        .and_then(|(_, value)| {
            let (first, last) = value.strip_prefix("bytes=")?.split_once('-')?;
            Some((first.parse().ok()?, last.parse().ok()?))
        });
    Some(Asked {
        number: 0,
        connection: 0,
        method,
        path,
        range,
        headers,
        body: Vec::new(),
    })
}

/// An answer as it is sent.
pub fn answer(status: u16, headers: &[(&str, String)], body: &[u8]) -> Vec<u8> {
    let mut text = format!("HTTP/1.1 {status} x\r\ncontent-length: {}\r\n", body.len());
    for (name, value) in headers {
        text += &format!("{name}: {value}\r\n");
    }
    let mut bytes = (text + "\r\n").into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

/// A good answer to a request for a range.
pub fn ranged(asked: &Asked, file: &[u8], tag: &str) -> Vec<u8> {
    let tag = ("etag", tag.to_owned());
    let Some((first, last)) = asked.range else {
        return answer(200, &[tag], file);
    };
    if first >= file.len() {
        let range = format!("bytes */{}", file.len());
        return answer(416, &[("content-range", range)], b"");
    }
    let last = last.min(file.len() - 1);
    let range = format!("bytes {first}-{last}/{}", file.len());
    answer(206, &[("content-range", range), tag], &file[first..=last])
}
