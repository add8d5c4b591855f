//! Ctrl-C during long work: stop soon, clean up, and report it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::sys::signal::{SigSet, Signal};

use crate::error::CommandError;
pub use crate::error::interrupted;

/// How long the work may take to notice the signal. It never does while it waits for standard input
/// or for a disk that hangs; files without a name then vanish with the process.
const GRACE: Duration = Duration::from_secs(2);

/// Whether a signal has requested the end of the command.
#[derive(Clone, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Catches SIGINT, SIGTERM and SIGHUP from now on. Call it before other threads start: they
    /// inherit that these signals wait for the thread started here.
    ///
    /// If the handler cannot be installed, the signals keep their effect, and the process ends
    /// without cleanup.
    pub fn catch() -> Self {
        let interrupt = Interrupt::default();
        let signals: SigSet = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]
            .into_iter()
            .collect();
        if signals.thread_block().is_err() {
            return interrupt;
        }
        let flag = interrupt.0.clone();
        let started = std::thread::Builder::new()
            .name("signals".into())
            .spawn(move || {
                if let Ok(signal) = signals.wait() {
                    flag.store(true, Ordering::Relaxed);
                    std::thread::sleep(GRACE);
                    std::process::exit(128 + signal as i32);
                }
            });
        if started.is_err() {
            // If no thread waits for the blocked signals, the process would ignore them.
            let _ = signals.thread_unblock();
        }
        interrupt
    }

    /// The flag itself, for libraries that check it.
    pub fn flag(&self) -> Arc<AtomicBool> {
        self.0.clone()
    }

    /// Fails if a signal has requested the end.
    pub fn check(&self) -> Result<(), CommandError> {
        if self.0.load(Ordering::Relaxed) { Err(interrupted()) } else { Ok(()) }
    }
}
