//! The gRPC service: decodes requests, and maps errors to status codes.
//!
//! The operations block, on the disk and on `bcow`; each runs on a thread of its own.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use prost::Message;
use tonic::body::Body;
use tonic::server::Grpc;
use tonic::{Code, Request, Response, Status};
use tonic_prost::ProstCodec;
use tower::{Service, service_fn};

use crate::error::Error;
use crate::filter::Filters;
use crate::images::ImageService;
use crate::protocol::{self as wire, DIFF_SERVICE, SERVICE};
use crate::record::{Kind, Labels, SnapshotRecord};
use crate::snapshots::Snapshots;

/// Bytes of one message of a list, at most about that: a client accepts 4 MiB.
const LIST_BYTES: usize = 1 << 20;

/// The service over these snapshots, and CRI's image service beside it.
#[derive(Clone)]
pub struct SnapshotService {
    snapshots: Arc<Snapshots>,
    images: Option<ImageService>,
}

impl SnapshotService {
    /// A service for any number of connections.
    pub fn new(snapshots: Arc<Snapshots>, images: Option<ImageService>) -> Self {
        SnapshotService { snapshots, images }
    }
}

impl Service<http::Request<Body>> for SnapshotService {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let snapshots = self.snapshots.clone();
        let images = self.images.clone();
        Box::pin(async move {
            Ok(
                match images.filter(|_| ImageService::has(request.uri().path())) {
                    Some(images) => images.answer(request).await,
                    None => route(snapshots, request).await,
                },
            )
        })
    }
}

async fn route(snapshots: Arc<Snapshots>, request: http::Request<Body>) -> http::Response<Body> {
    let path = request.uri().path();
    let named = path.strip_prefix('/').unwrap_or_default();
    let method = named
        .strip_prefix(SERVICE)
        .and_then(|rest| rest.strip_prefix('/'));
    if named.strip_prefix(DIFF_SERVICE) == Some("/Apply") {
        return unary(snapshots, request, apply).await;
    }
    match method {
        Some("Prepare") => unary(snapshots, request, prepare).await,
        Some("View") => unary(snapshots, request, view).await,
        Some("Mounts") => unary(snapshots, request, mounts).await,
        Some("Commit") => unary(snapshots, request, commit).await,
        Some("Remove") => unary(snapshots, request, remove).await,
        Some("Stat") => unary(snapshots, request, stat).await,
        Some("Update") => unary(snapshots, request, update).await,
        Some("Usage") => unary(snapshots, request, usage).await,
        Some("Cleanup") => unary(snapshots, request, clean_up).await,
        Some("List") => list(snapshots, request).await,
        _ => Status::unimplemented(format!("unknown method {path}")).into_http(),
    }
}

/// An operation: a request becomes an answer.
type Operation<Q, A> = fn(&Snapshots, Q) -> Result<A, Error>;

async fn unary<Q, A>(
    snapshots: Arc<Snapshots>,
    request: http::Request<Body>,
    operation: Operation<Q, A>,
) -> http::Response<Body>
where
    Q: Message + Default + std::fmt::Debug + 'static,
    A: Message + 'static,
{
    let method = request.uri().path().to_owned();
    let answer = move |request: Request<Q>| {
        let (snapshots, method) = (snapshots.clone(), method.clone());
        async move {
            let answer = run(snapshots, method, operation, request.into_inner()).await;
            answer.map(Response::new)
        }
    };
    Grpc::new(ProstCodec::<A, Q>::default())
        .unary(service_fn(answer), request)
        .await
}

async fn list(snapshots: Arc<Snapshots>, request: http::Request<Body>) -> http::Response<Body> {
    let method = request.uri().path().to_owned();
    let answer = move |request: Request<wire::List>| {
        let (snapshots, method) = (snapshots.clone(), method.clone());
        async move {
            let parts = run(snapshots, method, listed, request.into_inner()).await?;
            let parts = parts.into_iter().map(Ok::<_, Status>);
            Ok(Response::new(tokio_stream::iter(parts)))
        }
    };
    Grpc::new(ProstCodec::<wire::Listed, wire::List>::default())
        .server_streaming(service_fn(answer), request)
        .await
}

/// Runs an operation on a thread where it can block.
async fn run<Q, A>(
    snapshots: Arc<Snapshots>,
    method: String,
    operation: Operation<Q, A>,
    request: Q,
) -> Result<A, Status>
where
    Q: Message + std::fmt::Debug + 'static,
    A: Send + 'static,
{
    tracing::debug!("{method}: {request:?}");
    let work =
        move || operation(&snapshots, request).inspect_err(|error| snapshots.count_failure(error));
    match tokio::task::spawn_blocking(work).await {
        Ok(answer) => answer.map_err(|error| status(&method, &error)),
        Err(error) => {
            tracing::error!("{method}: {error}");
            Err(Status::internal(error.to_string()))
        }
    }
}

fn status(method: &str, error: &Error) -> Status {
    let code = match error {
        Error::NotFound(_) => Code::NotFound,
        Error::Exists(_) => Code::AlreadyExists,
        Error::State(_) | Error::Mount(_) => Code::FailedPrecondition,
        Error::Invalid(_) => Code::InvalidArgument,
        Error::Unsupported(_) => Code::Unimplemented,
        Error::Unanswered(_) => Code::Unavailable,
        Error::Tool(_) | Error::Host(_) => Code::Internal,
    };
    match error.kind() {
        None => tracing::debug!("{method}: {error}"),
        Some("registry" | "mount") => tracing::error!("{method}: {error}"),
        Some(_) => tracing::warn!("{method}: {error}"),
    }
    Status::new(code, error.to_string())
}

fn prepare(snapshots: &Snapshots, request: wire::Create) -> Result<wire::Mounts, Error> {
    create(snapshots, Kind::Active, request)
}

fn view(snapshots: &Snapshots, request: wire::Create) -> Result<wire::Mounts, Error> {
    create(snapshots, Kind::View, request)
}

fn create(snapshots: &Snapshots, kind: Kind, request: wire::Create) -> Result<wire::Mounts, Error> {
    let parent = non_empty(&request.parent);
    let labels = request.labels.into_iter().collect();
    let mounts = snapshots.create(kind, &request.key, parent, labels)?;
    Ok(wire::Mounts { mounts })
}

fn mounts(snapshots: &Snapshots, request: wire::Key) -> Result<wire::Mounts, Error> {
    let mounts = snapshots.mounts(&request.key)?;
    Ok(wire::Mounts { mounts })
}

fn commit(snapshots: &Snapshots, request: wire::Commit) -> Result<wire::Empty, Error> {
    let parent = non_empty(&request.parent);
    let labels = request.labels.into_iter().collect();
    snapshots.commit(&request.name, &request.key, parent, labels)?;
    Ok(wire::Empty {})
}

fn apply(snapshots: &Snapshots, request: wire::Apply) -> Result<wire::Applied, Error> {
    let blob = request
        .diff
        .ok_or_else(|| Error::Invalid("the request has no descriptor".to_owned()))?;
    let applied = snapshots.apply(&blob, &request.mounts)?;
    Ok(wire::Applied {
        applied: Some(applied),
    })
}

fn remove(snapshots: &Snapshots, request: wire::Key) -> Result<wire::Empty, Error> {
    snapshots.remove(&request.key)?;
    Ok(wire::Empty {})
}

fn stat(snapshots: &Snapshots, request: wire::Key) -> Result<wire::InfoAnswer, Error> {
    let record = snapshots.stat(&request.key)?;
    Ok(wire::InfoAnswer {
        info: Some(info(record)),
    })
}

fn update(snapshots: &Snapshots, request: wire::Update) -> Result<wire::InfoAnswer, Error> {
    let new = request
        .info
        .ok_or_else(|| Error::Invalid("the request has no snapshot".to_owned()))?;
    let paths = request.mask.unwrap_or_default().paths;
    let record = snapshots.update(&new.name, |labels| {
        relabel(labels, new.labels.into_iter().collect(), &paths)
    })?;
    Ok(wire::InfoAnswer {
        info: Some(info(record)),
    })
}

/// The labels after an update of the fields at `paths`; without paths, of all that can change.
/// A label with an empty value is removed.
pub fn relabel(old: &Labels, new: Labels, paths: &[String]) -> Result<Labels, Error> {
    let mut labels = old.clone();
    if paths.is_empty() {
        labels.clone_from(&new);
    }
    for path in paths {
        match path.strip_prefix("labels.") {
            Some(label) => {
                let value = new.get(label).cloned().unwrap_or_default();
                labels.insert(label.to_owned(), value);
            }
            None if path == "labels" => labels.clone_from(&new),
            None => {
                return Err(Error::Invalid(format!(
                    "cannot update the field {path:?} of a snapshot"
                )));
            }
        }
    }
    labels.retain(|_, value| !value.is_empty());
    Ok(labels)
}

fn usage(snapshots: &Snapshots, request: wire::Key) -> Result<wire::Usage, Error> {
    let usage = snapshots.usage(&request.key)?;
    Ok(wire::Usage {
        size: i64::try_from(usage.bytes).unwrap_or(i64::MAX),
        inodes: i64::try_from(usage.inodes).unwrap_or(i64::MAX),
    })
}

fn clean_up(snapshots: &Snapshots, _: wire::Empty) -> Result<wire::Empty, Error> {
    snapshots.clean_up()?;
    Ok(wire::Empty {})
}

/// The selected snapshots, in messages of a bounded size.
fn listed(snapshots: &Snapshots, request: wire::List) -> Result<Vec<wire::Listed>, Error> {
    let filters = Filters::parse(&request.filters)?;
    let mut parts = Vec::new();
    let mut part = wire::Listed::default();
    let mut bytes = 0;
    for record in snapshots.list(&filters) {
        let info = info(record);
        bytes += info.encoded_len();
        part.info.push(info);
        if bytes >= LIST_BYTES {
            bytes = 0;
            parts.push(std::mem::take(&mut part));
        }
    }
    if !part.info.is_empty() {
        parts.push(part);
    }
    Ok(parts)
}

fn info(record: SnapshotRecord) -> wire::Info {
    let kind = match record.kind {
        Kind::View => wire::Kind::View,
        Kind::Active => wire::Kind::Active,
        Kind::Committed => wire::Kind::Committed,
    };
    wire::Info {
        name: record.name,
        parent: record.parent.unwrap_or_default(),
        kind: kind.into(),
        created_at: Some(timestamp(record.created_ns)),
        updated_at: Some(timestamp(record.updated_ns)),
        labels: record.labels.into_iter().collect(),
    }
}

fn timestamp(since_1970_ns: u64) -> wire::Timestamp {
    const SECOND: u64 = 1_000_000_000;
    wire::Timestamp {
        seconds: i64::try_from(since_1970_ns / SECOND).unwrap_or(i64::MAX),
        nanos: i32::try_from(since_1970_ns % SECOND).unwrap_or(0),
    }
}

fn non_empty(text: &str) -> Option<&str> {
    Some(text).filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        let owned = |&(k, v): &(&str, &str)| (k.to_owned(), v.to_owned());
        pairs.iter().map(owned).collect()
    }

    #[test]
    fn an_update_changes_the_fields_of_the_mask() {
        let old = labels(&[("a", "1"), ("b", "2")]);
        let new = labels(&[("a", "9"), ("c", "3"), ("d.e/f", "4")]);
        for (paths, expected) in [
            (&[][..], new.clone()),
            (&["labels"], new.clone()),
            (&["labels.a", "labels.b"], labels(&[("a", "9")])),
            (
                &["labels.d.e/f"],
                labels(&[("a", "1"), ("b", "2"), ("d.e/f", "4")]),
            ),
        ] {
            let paths: Vec<String> = paths.iter().map(|&path| path.to_owned()).collect();
            assert_eq!(relabel(&old, new.clone(), &paths).unwrap(), expected);
        }
        let error = relabel(&old, new, &["parent".to_owned()]).unwrap_err();
        assert!(matches!(error, Error::Invalid(_)), "{error}");
    }
}
