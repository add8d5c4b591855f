//! CRI's image service in front of containerd's, for the credentials of pulls.
//!
//! A kubelet sends the credentials for an image, of a pull secret or of one of its credential
//! providers, with the request PullImage; containerd passes none to snapshotters. So this service
//! is between both: it notes the credentials of a pull, and containerd answers all requests.

use std::path::PathBuf;
use std::sync::Arc;

use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message;
use prost::bytes::{Buf, BufMut, Bytes};
use tokio::net::UnixStream;
use tonic::body::Body;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::{Extensions, Request, Response, Status};
use tower::service_fn;

use crate::credentials::Pull;
use crate::protocol::{self as wire, IMAGE_SERVICE};
use crate::repository::Repository;
use crate::snapshots::Snapshots;

/// The path of the request that has credentials.
const PULL_IMAGE: &str = "/runtime.v1.ImageService/PullImage";

/// The image service of the containerd at a socket.
#[derive(Clone)]
pub struct ImageService {
    containerd: PathBuf,
    snapshots: Arc<Snapshots>,
}

impl ImageService {
    /// The service of the containerd at this socket, with the credentials for these snapshots.
    pub fn new(containerd: PathBuf, snapshots: Arc<Snapshots>) -> Self {
        ImageService {
            containerd,
            snapshots,
        }
    }

    /// Whether a request is for this service.
    pub fn has(path: &str) -> bool {
        let service = path
            .strip_prefix('/')
            .and_then(|path| path.split('/').next());
        service == Some(IMAGE_SERVICE)
    }

    pub async fn answer(self, request: http::Request<Body>) -> http::Response<Body> {
        if request.uri().path() == PULL_IMAGE {
            let answer = move |request: Request<Bytes>| {
                let service = self.clone();
                async move { service.pull(request).await }
            };
            let mut server = tonic::server::Grpc::new(Plain);
            return server.unary(service_fn(answer), request).await;
        }
        match self.forward(request).await {
            Ok(response) => response,
            Err(status) => status.into_http(),
        }
    }

    async fn pull(&self, request: Request<Bytes>) -> Result<Response<Bytes>, Status> {
        let (metadata, _, message) = request.into_parts();
        let pull = wire::PullImage::decode(message.clone())
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        let snapshots = self.snapshots.clone();
        let pull = blocking(move || begin(&snapshots, &pull)).await?;
        let service = self.clone();
        let forward = move |request: http::Request<Body>| {
            let service = service.clone();
            async move { service.forward(request).await }
        };
        let request = Request::from_parts(metadata, Extensions::default(), message);
        let path = http::uri::PathAndQuery::from_static(PULL_IMAGE);
        let answer = tonic::client::Grpc::new(service_fn(forward))
            .unary(request, path, Plain)
            .await;
        if let (Ok(_), Some(pull)) = (&answer, pull) {
            let snapshots = self.snapshots.clone();
            blocking(move || snapshots.keep_credentials(&pull)).await?;
        }
        answer
    }

    /// Lets containerd answer a request.
    async fn forward(&self, request: http::Request<Body>) -> Result<http::Response<Body>, Status> {
        let unavailable = |error: &dyn std::fmt::Display| {
            let path = self.containerd.display();
            Status::unavailable(format!("cannot ask containerd at {path}: {error}"))
        };
        // One connection for each request: a kubelet has few, and none depends on the state of an
        // older connection.
        let stream = UnixStream::connect(&self.containerd).await;
        let stream = TokioIo::new(stream.map_err(|error| unavailable(&error))?);
        let (mut sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), stream)
                .await
                .map_err(|error| unavailable(&error))?;
        // Ends when the answer has been read, or is dropped.
        tokio::spawn(connection);
        let (mut parts, body) = request.into_parts();
        let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
        // HTTP/2 requires a server in the URI, also for a Unix socket.
        parts.uri = format!("http://localhost{path}")
            .parse()
            .map_err(|error| unavailable(&error))?;
        let request = http::Request::from_parts(parts, body);
        let response = sender.send_request(request).await;
        Ok(response
            .map_err(|error| unavailable(&error))?
            .map(Body::new))
    }
}

/// Notes the credentials of a pull, if it has any.
fn begin(snapshots: &Snapshots, pull: &wire::PullImage) -> Option<Pull> {
    let image = &pull.image.as_ref()?.image;
    let auth = pull.auth.as_ref()?;
    let begun = snapshots.begin_pull(Repository::of(image)?, auth);
    begun.unwrap_or_else(|error| {
        tracing::warn!("{image}: cannot use the credentials of the pull: {error}");
        None
    })
}

/// Runs what blocks on a thread of its own.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Status> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| Status::internal(error.to_string()))
}

/// Messages as they are, with the fields that are not known here.
#[derive(Clone, Copy)]
struct Plain;

impl Codec for Plain {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Plain;
    type Decoder = Plain;

    fn encoder(&mut self) -> Plain {
        Plain
    }

    fn decoder(&mut self) -> Plain {
        Plain
    }
}

impl Encoder for Plain {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, message: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(message);
        Ok(())
    }
}

impl Decoder for Plain {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}
