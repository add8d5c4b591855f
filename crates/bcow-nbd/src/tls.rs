//! TLS: certificates, and the layer between the socket and the protocol.

use std::fmt;
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{CertificateError, RootCertStore, ServerConfig, ServerConnection};

use crate::error::Error;
use crate::sync::{Mutex, lock};

/// Size of the receive buffer in bytes: several records.
const CIPHERTEXT_BYTES: usize = 64 << 10;

/// The certificate of a server, and the clients that it accepts.
#[derive(Clone)]
pub struct Tls {
    config: Arc<ServerConfig>,
    /// Whether clients must use TLS.
    pub(crate) required: bool,
}

/// Whether clients must use TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlsWhen {
    /// The server refuses clients without TLS.
    Required,
    /// The client decides.
    Allowed,
}

impl Tls {
    /// Reads PEM files: the certificate chain of the server, its private key and, if clients must
    /// have certificates, the root certificates for clients.
    pub fn load(
        certificate: &Path,
        key: &Path,
        client_roots: Option<&Path>,
        when: TlsWhen,
    ) -> Result<Self, Error> {
        let chain = certificates(certificate)?;
        let private = PrivateKeyDer::from_pem_file(key)
            .map_err(|error| bad(key, format!("no private key: {error}")))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|error| bad(certificate, error))?;
        let builder = match client_roots {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let mut roots = RootCertStore::empty();
                for root in certificates(path)? {
                    roots.add(root).map_err(|error| bad(path, error))?;
                }
                let verifier =
                    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                        .build()
                        .map_err(|error| bad(path, error))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let config = builder
            .with_single_cert(chain, private)
            .map_err(|error| bad(certificate, error))?;
        Ok(Tls {
            config: Arc::new(config),
            required: when == TlsWhen::Required,
        })
    }

    /// The server's TLS state for a new connection.
    pub(crate) fn connection(&self) -> io::Result<ServerConnection> {
        ServerConnection::new(self.config.clone()).map_err(io::Error::other)
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let found: Vec<_> = CertificateDer::pem_file_iter(path)
        .map_err(|error| bad(path, error))?
        .collect::<Result<_, _>>()
        .map_err(|error| bad(path, error))?;
    if found.is_empty() {
        Err(bad(path, "the file has no certificate"))
    } else {
        Ok(found)
    }
}

fn bad(path: &Path, problem: impl fmt::Display) -> Error {
    Error::Tls {
        path: path.display().to_string(),
        problem: problem.to_string(),
    }
}

/// Explains an error of the TLS handshake, for the server's log.
pub(crate) fn explain(error: &io::Error) -> String {
    if error.kind() == io::ErrorKind::UnexpectedEof {
        return "the client disconnected during the handshake".into();
    }
    if error.kind() == io::ErrorKind::TimedOut {
        return "the client took too long".into();
    }
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    match inner {
        Some(rustls::Error::InvalidCertificate(CertificateError::Other(other)))
            if format!("{other:?}").contains("UnsupportedCertVersion") =>
        {
            "the client's certificate is not of X.509 version 3".into()
        }
        Some(error) => error.to_string(),
        None => error.to_string(),
    }
}

/// The TLS state of a connection. One thread receives while others send. No thread waits for the
/// socket while it holds the lock of the connection.
pub(crate) struct Layer {
    connection: Mutex<ServerConnection>,
    incoming: Mutex<Incoming>,
}

/// Received ciphertext that is not decrypted yet.
struct Incoming {
    buf: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Layer {
    pub(crate) fn new(connection: ServerConnection) -> Self {
        Layer {
            connection: Mutex::new(connection),
            incoming: Mutex::new(Incoming {
                buf: vec![0; CIPHERTEXT_BYTES].into_boxed_slice(),
                start: 0,
                end: 0,
            }),
        }
    }

    /// Runs the TLS handshake. `send` gets TLS's messages, also after an error.
    pub(crate) fn handshake(
        &self,
        mut receive: impl FnMut(&mut [u8]) -> io::Result<usize>,
        mut send: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut incoming = lock(&self.incoming);
        loop {
            let (message, done) = self.outgoing()?;
            send(&message)?;
            if done {
                return Ok(());
            }
            if let Err(error) = self.decrypt_more(&mut incoming, &mut receive) {
                // Send the alert, so that the client learns the reason.
                if let Ok((message, _)) = self.outgoing() {
                    let _ = send(&message);
                }
                return Err(error);
            }
        }
    }

    /// Decrypts into `buf`; returns 0 at the end of the stream.
    pub(crate) fn receive(
        &self,
        buf: &mut [u8],
        mut receive: impl FnMut(&mut [u8]) -> io::Result<usize>,
        mut send: impl FnMut(&Self) -> io::Result<()>,
    ) -> io::Result<usize> {
        let mut incoming = lock(&self.incoming);
        loop {
            match lock(&self.connection).reader().read(buf) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return read,
            }
            self.decrypt_more(&mut incoming, &mut receive)?;
            // For example the reply to a key update.
            if lock(&self.connection).wants_write() {
                send(self)?;
            }
        }
    }

    /// Encrypts a part of `bytes`, appends it to `out`, and returns the number of encrypted bytes.
    pub(crate) fn encrypt(&self, bytes: &[u8], out: &mut Vec<u8>) -> io::Result<usize> {
        let mut connection = lock(&self.connection);
        let count = connection.writer().write(bytes)?;
        while connection.wants_write() {
            connection.write_tls(out)?;
        }
        Ok(count)
    }

    /// Appends the close message to `out`.
    pub(crate) fn close(&self, out: &mut Vec<u8>) -> io::Result<()> {
        lock(&self.connection).send_close_notify();
        self.encrypt(&[], out).map(drop)
    }

    fn outgoing(&self) -> io::Result<(Vec<u8>, bool)> {
        let mut out = Vec::new();
        self.encrypt(&[], &mut out)?;
        Ok((out, !lock(&self.connection).is_handshaking()))
    }

    fn decrypt_more(
        &self,
        incoming: &mut Incoming,
        receive: &mut impl FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<()> {
        if incoming.start == incoming.end {
            let count = receive(&mut incoming.buf)?;
            incoming.start = 0;
            incoming.end = count;
            if count == 0 {
                // Without a close message, an attacker may have cut the stream. This must not look
                // like a regular end.
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        let mut connection = lock(&self.connection);
        let mut rest = &incoming.buf[incoming.start..incoming.end];
        let count = connection.read_tls(&mut rest)?;
        incoming.start += count;
        connection.process_new_packets().map_err(io::Error::other)?;
        Ok(())
    }
}
