//! The resource limits of the process (getrlimit(2)).

use nix::sys::signal::{SigSet, Signal};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Adapts the limits for any command. Call this before other threads exist.
pub fn adapt() {
    // A stack needs one descriptor per layer; `bcow extract` needs one per level of the tree. If
    // the limit stays low, a command that needs more descriptors fails with its own error.
    let maximum = getrlimit(Resource::Nofile).maximum;
    let _ = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: maximum,
            maximum,
        },
    );
    // A write beyond the limit of file sizes then fails with EFBIG. Otherwise the signal would end
    // the process, and with it a mount.
    let _ = SigSet::from(Signal::SIGXFSZ).thread_block();
}

/// Lifts the limit of file sizes as far as this user may. A process that serves other programs
/// writes for them, and the limit is that of the shell that started it.
pub fn lift_file_size() {
    let unlimited = Rlimit {
        current: None,
        maximum: None,
    };
    if setrlimit(Resource::Fsize, unlimited).is_err() {
        let maximum = getrlimit(Resource::Fsize).maximum;
        let _ = setrlimit(
            Resource::Fsize,
            Rlimit {
                current: maximum,
                maximum,
            },
        );
    }
}
