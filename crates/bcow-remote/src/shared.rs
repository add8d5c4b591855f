//! What all remote files of a process share: options, connections, memory and counters.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use quick_cache::sync::{Cache as MemoryCache, DefaultLifecycle};
use quick_cache::{DefaultHashBuilder, OptionsBuilder, Weighter};

use crate::address::{Address, Transport};
use crate::auth::Auth;
use crate::cache::Cache;
use crate::client::Client;
use crate::demand::Demand;
use crate::error::Problem;
use crate::fetcher::{ClientName, Fetcher};
use crate::figures::Figures;
use crate::lock::lock;
use crate::mirrors::Mirror;
use crate::retry_budget::RetryBudget;
use crate::tree::Chunk;

/// Memory for checked chunks of all files.
const MEMORY_BYTES: u64 = 32 << 20;
/// Parts of that memory with locks of their own. A chunk of the largest size (1 MiB) fits in each.
const SHARDS: usize = 8;

/// Options for remote files.
#[derive(Clone)]
pub struct Options {
    /// Allow plain HTTP, which every machine on the way can read. Bytes are checked all the same.
    pub insecure: bool,
    /// The longest time that a read waits for bytes. It starts again when some arrive.
    pub timeout: Duration,
    /// Where fetched chunks are kept.
    pub cache: Option<Cache>,
    /// Other servers that may have what a server has. They are asked first, in this order, for
    /// bytes whose hash is known.
    pub mirrors: Vec<Address>,
    /// The directory for files without a name.
    pub scratch: PathBuf,
    /// The longest file that is fetched whole if the server does not send ranges.
    pub whole_bytes: u64,
    /// The process that makes the connections for reads; `None` is this one.
    pub fetcher: Option<Arc<Fetcher>>,
    /// The file with the credentials for registries that the fetcher uses; `None`: the usual ones.
    pub keys: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            insecure: false,
            timeout: Duration::from_secs(30),
            cache: None,
            mirrors: Vec::new(),
            scratch: std::env::temp_dir(),
            whole_bytes: 4 << 30,
            fetcher: None,
            keys: None,
        }
    }
}

/// What each file refers to.
pub(crate) struct Shared {
    pub(crate) options: Options,
    pub(crate) client: Arc<Client>,
    pub(crate) mirrors: Vec<Arc<Mirror>>,
    pub(crate) memory: MemoryCache<MemoryKey, Arc<[u8]>, ByLength>,
    pub(crate) fetched_bytes: AtomicU64,
    pub(crate) cached_bytes: AtomicU64,
    /// The reads of programs that wait for a server.
    pub(crate) demand: Demand,
    next_file: AtomicU64,
    /// The access to repositories that are in use, by server and repository. The lock is held for a
    /// lookup only.
    accesses: Mutex<HashMap<(String, String), Weak<Auth>>>,
}

/// A checked chunk of an open file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct MemoryKey {
    pub(crate) file: u64,
    pub(crate) chunk: Chunk,
}

/// Chunks count with their length.
#[derive(Clone)]
pub(crate) struct ByLength;

impl Weighter<MemoryKey, Arc<[u8]>> for ByLength {
    fn weight(&self, _: &MemoryKey, chunk: &Arc<[u8]>) -> u64 {
        chunk.len() as u64
    }
}

impl Shared {
    pub(crate) fn new(options: Options) -> Result<Self, Problem> {
        let transport = if options.insecure { Transport::PlainToo } else { Transport::TlsOnly };
        let fetcher = options.fetcher.clone().map(|fetcher| {
            let name = ClientName {
                insecure: options.insecure,
                keys: options.keys.clone(),
            };
            (fetcher, name)
        });
        let mirrors = options.mirrors.iter().map(|mirror| {
            mirror.check(transport)?;
            Ok(Arc::new(Mirror::new(mirror.clone())))
        });
        let mirrors = mirrors.collect::<Result<_, Problem>>()?;
        let memory = OptionsBuilder::new()
            .estimated_items_capacity((MEMORY_BYTES >> 14) as usize)
            .weight_capacity(MEMORY_BYTES)
            .shards(SHARDS)
            .build()
            .map_err(|error| Problem::Connection(error.to_string()))?;
        let memory = MemoryCache::with_options(
            memory,
            ByLength,
            DefaultHashBuilder::default(),
            DefaultLifecycle::default(),
        );
        Ok(Shared {
            client: Arc::new(Client::new(transport, fetcher)),
            mirrors,
            options,
            memory,
            fetched_bytes: AtomicU64::new(0),
            cached_bytes: AtomicU64::new(0),
            demand: Demand::default(),
            next_file: AtomicU64::new(0),
            accesses: Mutex::default(),
        })
    }

    /// The access to a repository: that of the files that are open there, which has a token, or a
    /// new one.
    pub(crate) fn access(
        &self,
        server: &str,
        repository: &str,
        make: impl FnOnce() -> Auth,
    ) -> Arc<Auth> {
        let mut accesses = lock(&self.accesses);
        let name = (server.to_owned(), repository.to_owned());
        if let Some(access) = accesses.get(&name).and_then(Weak::upgrade) {
            return access;
        }
        accesses.retain(|_, access| access.strong_count() > 0);
        let access = Arc::new(make());
        accesses.insert(name, Arc::downgrade(&access));
        access
    }

    pub(crate) fn figures(&self) -> Figures {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let own = self.client.counters.figures();
        // What concerns connections is counted by the process that makes them.
        let connections = match &self.client.fetcher {
            Some((fetcher, name)) => fetcher.figures(name).unwrap_or_default(),
            None => own.clone(),
        };
        Figures {
            fetched_bytes: get(&self.fetched_bytes),
            cached_bytes: get(&self.cached_bytes),
            servers: connections.servers,
            bytes_per_second: connections.bytes_per_second,
            running_requests: connections.running_requests,
            tokens: connections.tokens,
            ..own
        }
    }

    /// The budget of a read of an open file.
    pub(crate) fn reading(&self) -> RetryBudget {
        RetryBudget::reading(self.options.timeout, &self.client.counters)
    }

    /// The budget of the first request for a file.
    pub(crate) fn opening(&self) -> RetryBudget {
        RetryBudget::opening(self.options.timeout, &self.client.counters)
    }

    /// The budget of a request of an upload.
    pub(crate) fn uploading(&self) -> RetryBudget {
        RetryBudget::uploading(self.options.timeout, &self.client.counters)
    }

    /// The budget of the only request to a mirror: the other servers need time too.
    pub(crate) fn of_mirror(&self) -> RetryBudget {
        RetryBudget::reading(self.options.timeout / 4, &self.client.counters)
    }

    /// The budget of a fetch in the background. A read may wait for this fetch before it begins
    /// its own, so the time is shorter.
    pub(crate) fn in_background(&self) -> RetryBudget {
        RetryBudget::opening(self.options.timeout / 4, &self.client.counters)
    }

    /// How long a process waits for another one that fetches, and makes no progress.
    pub(crate) fn longest_claim(&self) -> Duration {
        self.options.timeout / 4
    }

    /// A number for a file that is opened.
    pub(crate) fn file_number(&self) -> u64 {
        self.next_file.fetch_add(1, Ordering::Relaxed)
    }
}
