//! A mounted file system that makes no changes for a while.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::mpsc;

use rustix::io::Errno;

use crate::Error;
use crate::apart::close_others;
use crate::ioctl;

/// Runs `work` while the file system at `target`, with the device number `device`, is frozen: all
/// that programs have written is on its device, without a log to replay, and writers wait. `None`
/// for `device` accepts any file system. If another program has frozen it, that program thaws it.
///
/// A thread without the descriptors of this process freezes: see [`crate::run_apart`]. If this
/// process is killed, the file system stays frozen; see [`thaw`].
pub fn while_frozen<T>(
    target: &Path,
    device: Option<&str>,
    work: impl FnOnce() -> T,
) -> Result<T, Error> {
    let failed = |source: io::Error| Error::Freeze {
        target: target.to_owned(),
        source,
    };
    std::thread::scope(|scope| {
        let (report, reported) = mpsc::channel();
        let (done, is_done) = mpsc::channel::<()>();
        let freezer = std::thread::Builder::new().name("freeze".into());
        let freezer = freezer.spawn_scoped(scope, move || {
            close_others(None);
            let frozen = open(target, device).and_then(freeze);
            let (frozen, result) = match frozen {
                Ok(frozen) => (Some(frozen), Ok(())),
                Err(error) => (None, Err(error)),
            };
            let _ = report.send(result);
            // Ends with an error, when `done` is dropped.
            let _ = is_done.recv();
            drop(frozen);
        });
        freezer.map_err(failed)?;
        let ended = |_| io::Error::from(io::ErrorKind::BrokenPipe);
        let frozen = reported.recv().map_err(ended).flatten();
        frozen.map_err(failed)?;
        let result = work();
        drop(done);
        Ok(result)
    })
}

/// Thaws the file system at `target` after the death of the process that froze it. Returns whether
/// it was frozen.
pub fn thaw(target: &Path) -> bool {
    File::open(target).is_ok_and(|directory| ioctl::thaw(directory).is_ok())
}

/// Opens the root of the file system.
fn open(target: &Path, device: Option<&str>) -> io::Result<File> {
    let directory = File::open(target)?;
    let number = directory.metadata()?.dev();
    let number = format!(
        "{}:{}",
        rustix::fs::major(number),
        rustix::fs::minor(number)
    );
    if device.is_some_and(|device| device != number) {
        return Err(Errno::NODEV.into());
    }
    Ok(directory)
}

/// A frozen file system. Dropping this thaws it, unless another program has frozen it.
struct Frozen {
    directory: File,
    is_own: bool,
}

fn freeze(directory: File) -> io::Result<Frozen> {
    // Most data is written before programs have to wait.
    rustix::fs::syncfs(&directory)?;
    let is_own = match ioctl::freeze(&directory) {
        Ok(()) => true,
        Err(Errno::BUSY) => false,
        Err(errno) => return Err(errno.into()),
    };
    Ok(Frozen { directory, is_own })
}

impl Drop for Frozen {
    fn drop(&mut self) {
        if self.is_own
            && let Err(errno) = ioctl::thaw(&self.directory)
        {
            tracing::error!("cannot thaw a file system: {errno}");
        }
    }
}
