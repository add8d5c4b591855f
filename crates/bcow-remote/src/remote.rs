//! Opens remote files.

use std::sync::Arc;

use crate::address::Address;
use crate::error::{Problem, RemoteError};
use crate::figures::Figures;
use crate::file::RemoteFile;
use crate::s3::{S3, S3Name};
use crate::shared::{Options, Shared};
use crate::source::{Access, Source};
use crate::tree::{Hash, Root};

/// Opens remote files, which share connections, memory and the cache.
pub struct Remote {
    pub(crate) shared: Arc<Shared>,
}

impl Remote {
    /// Reads the certificates of this machine. No connection is made.
    pub fn new(options: Options) -> Result<Remote, Problem> {
        let shared = Arc::new(Shared::new(options)?);
        Ok(Remote { shared })
    }

    /// Opens the file at an address. With a root hash, only the file with this root is opened, and
    /// the server is not asked if the cache has enough of it.
    pub fn open(&self, address: &Address, root: Option<Root>) -> Result<RemoteFile, RemoteError> {
        let pin: Option<Hash> = root.map(|root| root.0);
        let client = Arc::clone(&self.shared.client);
        let source = Source::new(client, address.clone(), Access::Open);
        RemoteFile::open(Arc::clone(&self.shared), source, pin)
    }

    /// As [`Remote::open`], for a file in S3.
    pub fn open_in_s3(
        &self,
        server: &S3,
        name: &S3Name,
        root: Option<Root>,
    ) -> Result<RemoteFile, RemoteError> {
        let pin: Option<Hash> = root.map(|root| root.0);
        let client = Arc::clone(&self.shared.client);
        let address = server.address(name);
        let address = address.map_err(|problem| problem.at(name.to_string()))?;
        let source = Source::new(client, address, Access::S3(server.signer()));
        RemoteFile::open(Arc::clone(&self.shared), source, pin)
    }

    /// The counters.
    pub fn figures(&self) -> Figures {
        self.shared.figures()
    }
}
