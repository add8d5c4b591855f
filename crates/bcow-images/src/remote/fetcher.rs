//! Starts the process that makes connections for one that decodes images.

use std::io;
use std::sync::Arc;

use bcow_remote::{Fetcher, Setup};
use bcow_sandbox::fork::{fork, keep_descriptors};
use bcow_sandbox::{Sandbox, Service, When};
use nix::sys::signal::SigSet;

use crate::s3;

/// Starts it. It ends with this process, which has one thread, and loses its secrets.
pub(super) fn start(setup: Setup, when: When) -> io::Result<Arc<Fetcher>> {
    let (fetcher, sockets) = Fetcher::pair()?;
    fork(move || {
        s3::keep_secrets();
        s3::forget_secrets();
        // Those to all processes of a service or of a terminal: the other process decides when it
        // ends.
        let _ = SigSet::all().thread_block();
        let kept = keep_descriptors(&sockets.descriptors(), c"bcow-fetcher");
        let entered = kept.is_ok() && Sandbox::of_service(when, Service::Connections).is_ok();
        if entered {
            // The other process sees the end of the sockets.
            let _ = sockets.serve(setup);
        }
    })?;
    s3::forget_secrets();
    Ok(Arc::new(fetcher))
}
