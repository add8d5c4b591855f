//! Opens remote files.

use std::sync::{Arc, Weak};

use crate::address::Address;
use crate::error::{Problem, RemoteError};
use crate::figures::Figures;
use crate::file::RemoteFile;
use crate::mirrors::Sources;
use crate::s3::{S3, S3Name};
use crate::shared::{Options, Shared};
use crate::source::{Access, Source};
use crate::tree::{Expected, Root};

/// Opens remote files, which share connections, tokens, memory and the cache. A clone shares them
/// too.
#[derive(Clone)]
pub struct Remote {
    pub(crate) shared: Arc<Shared>,
}

/// A [`Remote`] that lives as long as its clones or its files do.
pub struct WeakRemote(Weak<Shared>);

impl WeakRemote {
    /// The remote, as long as it lives.
    pub fn upgrade(&self) -> Option<Remote> {
        let shared = self.0.upgrade()?;
        Some(Remote { shared })
    }
}

impl Remote {
    /// A reference that does not keep connections and memory.
    pub fn downgrade(&self) -> WeakRemote {
        WeakRemote(Arc::downgrade(&self.shared))
    }

    /// No connection is made.
    pub fn new(options: Options) -> Result<Remote, Problem> {
        let shared = Arc::new(Shared::new(options)?);
        Ok(Remote { shared })
    }

    /// Opens the file at an address. With a root hash, only the file with this root is opened, and
    /// the server is not asked if the cache has enough of it.
    pub fn open(
        &self,
        address: &Address,
        expected: Option<Expected>,
    ) -> Result<RemoteFile, RemoteError> {
        self.open_named(address, expected, || Access::Open)
    }

    /// As [`Remote::open`], for a file in S3.
    pub fn open_in_s3(
        &self,
        server: &S3,
        name: &S3Name,
        expected: Option<Expected>,
    ) -> Result<RemoteFile, RemoteError> {
        let address = server.address(name);
        let address = address.map_err(|problem| problem.at(name.to_string()))?;
        self.open_named(&address, expected, || Access::S3(server.signer()))
    }

    /// Opens the file at an address. Without a root hash and without the server, it is the file
    /// that the address led to last.
    fn open_named(
        &self,
        address: &Address,
        expected: Option<Expected>,
        access: impl Fn() -> Access,
    ) -> Result<RemoteFile, RemoteError> {
        let shared = &self.shared;
        let sources = || {
            let client = &shared.client;
            let origin = Source::new(Arc::clone(client), address.clone(), access());
            let mut sources = Sources::new(origin);
            for mirror in &shared.mirrors {
                let added = sources.add(mirror, address.path(), client, Access::Open);
                added.map_err(|problem| problem.at(address.to_string()))?;
            }
            Ok(sources)
        };
        let opened = RemoteFile::open(shared, &Arc::new(sources()?), expected);
        let cache = shared.options.cache.as_ref().filter(|_| expected.is_none());
        let (Some(cache), name) = (cache, address.with_secrets()) else {
            return opened;
        };
        let error = match opened {
            Ok(file) => {
                cache.record_name(&name, &address.to_string(), &file.root().to_string());
                return Ok(file);
            }
            Err(error) if error.problem.is_unreachable() => error,
            Err(error) => return Err(error),
        };
        let missing = |why: &str| {
            error
                .problem
                .clone()
                .and_not_cached(why)
                .at(error.place.as_str())
        };
        let recorded = cache.recorded_target(&name);
        let recorded = recorded.and_then(|(target, age)| Some((target.parse::<Root>().ok()?, age)));
        let Some((Root(root), age)) = recorded else {
            return Err(missing("the cache has no record of this URL"));
        };
        match RemoteFile::open_cached(shared, &Arc::new(sources()?), &root) {
            Some(file) => {
                let here = file.presence();
                tracing::warn!(
                    "{address}: {}; using the file to which the URL resolved {age} ago; the cache \
                     has {} KiB of its {} KiB",
                    error.problem,
                    here.held_bytes >> 10,
                    here.file_bytes.div_ceil(1024)
                );
                Ok(file)
            }
            None => Err(missing("the header of the file is not in the cache")),
        }
    }

    /// The counters.
    pub fn figures(&self) -> Figures {
        self.shared.figures()
    }
}
