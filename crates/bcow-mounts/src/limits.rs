//! The resource limits of the process (getrlimit(2)), and its umask.

use nix::sys::signal::{SigSet, Signal};
use rustix::fs::Mode;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Adapts the limits for any command. Call this before other threads exist.
pub fn adapt() {
    // A stack needs one descriptor per layer; `bcow extract` needs one per level of the tree. If
    // the limit stays low, a command that needs more descriptors fails with its own error.
    raise(Resource::Nofile);
    // A write beyond the limit of file sizes then fails with EFBIG. Otherwise the signal would end
    // the process, and with it a mount.
    let _ = SigSet::from(Signal::SIGXFSZ).thread_block();
}

/// Adapts the limits for a process that serves other programs. It writes for them, and the limits
/// are those of the shell that started it.
pub fn adapt_for_service() {
    // A umask that takes rights from the owner would make the files of an upper unusable.
    let own = Mode::RWXU;
    let umask = rustix::process::umask(own);
    rustix::process::umask(umask - own);
    let unlimited = Rlimit {
        current: None,
        maximum: None,
    };
    if setrlimit(Resource::Fsize, unlimited).is_err() {
        raise(Resource::Fsize);
    }
}

/// Raises a limit as far as every user may.
fn raise(resource: Resource) {
    let maximum = getrlimit(resource).maximum;
    let raised = Rlimit {
        current: maximum,
        maximum,
    };
    let _ = setrlimit(resource, raised);
}
