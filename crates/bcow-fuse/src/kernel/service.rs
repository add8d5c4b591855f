//! The threads that answer requests for the file of a disk, and the hidden mount that has it.

use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use bcow_mount::{HiddenMount, run_apart_with};
use parking_lot::Mutex;

use crate::adapter::disk::{DiskFile, FLAGS};
use crate::disk::Lifetime;
use crate::error::MountError;
use crate::first_messages::FirstMessages;
use crate::takeover::{self, duplicate};

pub(super) struct Service {
    descriptors: Arc<Descriptors>,
    thread: Option<JoinHandle<io::Result<()>>>,
    lifetime: Arc<Lifetime>,
}

/// The descriptors of a hidden mount.
#[derive(Debug)]
pub(super) struct Descriptors {
    /// The kernel ends the mount when its last descriptor is closed. The lock is held to close it,
    /// to duplicate it, and while the kernel mounts the file system; never for a request.
    hidden: Mutex<Option<HiddenMount>>,
    /// The connection to the kernel, if another process can take it over. The lock is held to close
    /// it, and to duplicate it; taken after that of the hidden mount.
    connection: Arc<Mutex<Option<OwnedFd>>>,
    /// The flags of the protocol that are in use.
    agreed: u64,
}

impl Service {
    /// Serves a new hidden mount with `threads` threads.
    pub(super) fn start(
        file: DiskFile,
        threads: usize,
        (hidden, connection): (HiddenMount, OwnedFd),
    ) -> Result<Self, MountError> {
        let ours = duplicate(connection.as_fd())?;
        let lifetime = Arc::clone(&file.lifetime);
        let first = file.first_messages.clone();
        let (config, first_of) = (config(threads), first.as_deref());
        let session = takeover::session(file, connection, None, config, first_of)?;
        // Before the first request, which would be sent again otherwise.
        let ours = takeover::resend(ours.as_fd())?.then_some(ours);
        Service::run((session, first), hidden, ours, FLAGS.bits(), lifetime)
    }

    /// Serves a hidden mount that another process has served. The kernel sends the requests again
    /// that this process has not answered.
    pub(super) fn take_over(
        file: DiskFile,
        threads: usize,
        hidden: OwnedFd,
        connection: OwnedFd,
        agreed: u64,
    ) -> Result<Self, MountError> {
        let ours = duplicate(connection.as_fd())?;
        let lifetime = Arc::clone(&file.lifetime);
        let first = file.first_messages.clone();
        let (config, first_of) = (config(threads), first.as_deref());
        let session = takeover::session(file, connection, Some(agreed), config, first_of)?;
        let ours = takeover::resend(ours.as_fd())?.then_some(ours);
        Service::run(
            (session, first),
            HiddenMount::of(hidden),
            ours,
            agreed,
            lifetime,
        )
    }

    fn run(
        (session, first): (fuser::Session<DiskFile>, Option<Arc<FirstMessages>>),
        hidden: HiddenMount,
        connection: Option<OwnedFd>,
        agreed: u64,
        lifetime: Arc<Lifetime>,
    ) -> Result<Self, MountError> {
        let ending = Arc::clone(&lifetime);
        let connection = Arc::new(Mutex::new(connection));
        let kept = Arc::clone(&connection);
        let thread = std::thread::Builder::new()
            .name("disk".into())
            .spawn(move || {
                let ended = session.run();
                if let Some(first) = first {
                    // If a thread could not be started, the others wait for it.
                    first.end();
                }
                ending.end();
                // If the threads could not read from it, the requests that wait fail now.
                *kept.lock() = None;
                ended
            })
            .map_err(MountError::process("start a thread"))?;
        Ok(Service {
            descriptors: Arc::new(Descriptors {
                hidden: Mutex::new(Some(hidden)),
                connection,
                agreed,
            }),
            thread: Some(thread),
            lifetime,
        })
    }

    /// Runs `work` in a thread that has no descriptor of this process but that of the hidden mount.
    /// The other threads answer the requests that `work` waits for.
    pub(super) fn apart<T: Send>(
        &self,
        work: impl FnOnce(&HiddenMount) -> Result<T, bcow_mount::Error> + Send,
    ) -> Result<T, MountError> {
        self.with_hidden(|hidden| {
            let done = run_apart_with(hidden.as_fd(), || work(hidden));
            Ok(done.ok_or_else(MountError::no_thread)??)
        })
    }

    /// Runs `work` while the hidden mount exists.
    pub(super) fn with_hidden<T>(
        &self,
        work: impl FnOnce(&HiddenMount) -> Result<T, MountError>,
    ) -> Result<T, MountError> {
        // Only `stop` takes the hidden mount.
        match &*self.descriptors.hidden.lock() {
            Some(hidden) => work(hidden),
            None => Err(MountError::Session(io::ErrorKind::NotConnected.into())),
        }
    }

    pub(super) fn descriptors(&self) -> &Arc<Descriptors> {
        &self.descriptors
    }

    /// Ends the service without a wait for its threads, which end with the process.
    pub(super) fn abandon(&mut self) {
        self.thread = None;
    }

    /// Ends the service, when the file is closed.
    pub(super) fn stop(&mut self) -> Result<(), MountError> {
        *self.descriptors.hidden.lock() = None;
        let Some(thread) = self.thread.take() else {
            return Ok(());
        };
        match thread.join() {
            Ok(ended) => ended.map_err(MountError::Session),
            // The hook of a panic has ended the process.
            Err(_) => Ok(()),
        }
    }
}

impl Descriptors {
    /// The number of the descriptor of the hidden mount.
    pub(super) fn number(&self) -> Option<RawFd> {
        self.hidden.lock().as_ref().map(HiddenMount::descriptor)
    }

    /// See [`Descriptors::agreed`].
    pub(super) fn agreed(&self) -> u64 {
        self.agreed
    }

    /// Whether another process can take the connection over. It cannot on a kernel before Linux
    /// 6.9.
    pub(super) fn can_be_handed_over(&self) -> bool {
        self.connection.lock().is_some()
    }

    /// Duplicates of the connection and of the hidden mount, for another process; `None` if none
    /// can take them over, or the service has ended.
    pub(super) fn duplicate(&self) -> Result<Option<(OwnedFd, OwnedFd)>, MountError> {
        let (hidden, connection) = (self.hidden.lock(), self.connection.lock());
        let (Some(connection), Some(hidden)) = (&*connection, &*hidden) else {
            return Ok(None);
        };
        Ok(Some((
            duplicate(connection.as_fd())?,
            duplicate(hidden.as_fd())?,
        )))
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.stop();
        self.lifetime.end();
    }
}

fn config(threads: usize) -> fuser::Config {
    let mut config = fuser::Config::default();
    config.n_threads = Some(threads.max(1));
    config
}
