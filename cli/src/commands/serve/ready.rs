//! Signals that end the server, and the notification that the server is ready.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use bcow_nbd::activation;
use nix::sys::signal::{SigSet, Signal};
use rustix::io::Errno;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};

use crate::error::{CommandError, Context};

/// The signals that end the server, blocked so that a thread can wait for them.
pub struct Signals(SigSet);

impl Signals {
    /// Blocks the signals. Call this before other threads start: they inherit the mask.
    pub fn block() -> Result<Self, CommandError> {
        let signals: SigSet = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]
            .into_iter()
            .collect();
        signals
            .thread_block()
            .context(|| "cannot block signals".to_owned())?;
        Ok(Signals(signals))
    }

    /// The first signal calls `end`; the second one ends the process.
    pub fn on_first(self, end: impl FnOnce() + Send + 'static) -> Result<(), CommandError> {
        std::thread::Builder::new()
            .name("signals".into())
            .spawn(move || {
                // sigwait(3) fails for an invalid set only.
                if self.0.wait().is_ok() {
                    end();
                }
                if let Ok(signal) = self.0.wait() {
                    std::process::exit(128 + signal as i32);
                }
            })
            .context(|| "cannot start a thread".to_owned())?;
        Ok(())
    }
}

/// The programs that wait for the server: the service manager, and the reader of a descriptor.
pub struct Waiting(Option<(u32, io::Result<File>)>);

impl Waiting {
    /// Connects to the service manager, and opens the descriptor `fd`.
    pub fn open(fd: Option<u32>) -> Result<Self, CommandError> {
        activation::connect().context(|| CANNOT_NOTIFY)?;
        Ok(Waiting(fd.map(|fd| (fd, copy_of(fd)))))
    }

    /// Notifies them that clients can connect.
    pub fn announce(self) -> Result<(), CommandError> {
        activation::notify("READY=1").context(|| CANNOT_NOTIFY)?;
        if let Some((fd, file)) = self.0 {
            file.and_then(|mut file| file.write_all(b"\n"))
                .context(|| format!("cannot write to descriptor {fd} that the server is ready"))?;
        }
        Ok(())
    }
}

const CANNOT_NOTIFY: &str = "cannot notify the service manager that the server is ready";

/// A copy of the descriptor of this number: this process may not own the descriptor itself.
fn copy_of(fd: u32) -> io::Result<File> {
    let number = i32::try_from(fd).map_err(|_| Errno::BADF)?;
    let copied = pidfd_open(getpid(), PidfdFlags::empty())
        .and_then(|own| pidfd_getfd(own, number, PidfdGetfdFlags::empty()));
    match copied {
        // Older kernels, and the filters of some containers. A socket cannot be opened this way.
        Err(Errno::NOSYS | Errno::PERM) => File::options()
            .write(true)
            .open(format!("/proc/self/fd/{fd}")),
        copied => Ok(File::from(copied?)),
    }
}

/// A file with the ID of this process, removed on drop.
pub struct PidFile(PathBuf);

impl PidFile {
    /// Writes the file; replaces an existing file of that name.
    pub fn write(path: &Path) -> Result<Self, CommandError> {
        fs::write(path, format!("{}\n", std::process::id()))
            .context(|| format!("cannot write {}", path.display()))?;
        Ok(PidFile(path.to_owned()))
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        // A stale file is harmless: its reader finds that the process does not exist.
        let _ = fs::remove_file(&self.0);
    }
}
