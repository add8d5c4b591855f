//! Looks up the addresses of servers.

use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;

use ureq::Error;
use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::NextTimeout;

/// The resolver of ureq, in a thread for each lookup, as the lookups of the C library have no
/// deadline. ureq can start such a thread too, but panics if the system refuses it.
#[derive(Debug)]
pub(crate) struct TimedResolver;

impl Resolver for TimedResolver {
    fn resolve(
        &self,
        uri: &Uri,
        config: &Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, Error> {
        let (uri, config) = (uri.clone(), config.clone());
        let (sender, receiver) = sync_channel(1);
        thread::Builder::new().spawn(move || {
            let untimed = NextTimeout::default();
            let found = DefaultResolver::default().resolve(&uri, &config, untimed);
            // The request may have met its deadline.
            let _ = sender.send(found);
        })?;
        match receiver.recv_timeout(*timeout.after) {
            Ok(found) => found,
            Err(RecvTimeoutError::Timeout) => Err(Error::Timeout(timeout.reason)),
            // The thread has panicked.
            Err(RecvTimeoutError::Disconnected) => Err(Error::HostNotFound),
        }
    }
}
