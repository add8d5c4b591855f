//! A disk that the kernel mounts, and how long it is in use.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bcow::BlockDevice;
use bcow::operation::LiveDisk;
use bcow_union::HeldUpper;
use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;

/// Time between a discard and the flush that returns its space to the host. Discards come in
/// groups.
const DISCARD_PAUSE: Duration = Duration::from_secs(1);

/// The content of a mount with the kernel driver.
#[derive(Clone)]
pub enum Device {
    /// A disk. The session closes it when the mount has ended.
    Writable(Arc<LiveDisk>),
    /// An address space that does not change.
    ReadOnly(Arc<dyn BlockDevice>),
}

impl Device {
    /// The content, for reads.
    pub fn block_device(&self) -> &dyn BlockDevice {
        match self {
            Device::Writable(disk) => &**disk,
            Device::ReadOnly(device) => &**device,
        }
    }
}

/// Whether a flush of the file system makes its data durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Barriers {
    /// Yes.
    On,
    /// No: data is durable after the end of the mount.
    Off,
}

pub struct DiskMount {
    /// The content.
    pub device: Device,
    /// The file of the disk, for messages.
    pub path: PathBuf,
    /// The upper that the disk belongs to.
    pub upper: Option<PathBuf>,
    /// The same, for another process; `None` if none shall continue.
    pub held: Option<HeldUpper>,
    /// Whether flushes are honoured.
    pub barriers: Barriers,
    /// What another process needs to continue with the disk; `None` if none shall.
    pub files: Option<DiskFiles>,
    /// Called when the disk is closed, and before `bcow umount` returns.
    pub on_closed: Option<OnClosed>,
}

/// What another process needs to continue with a disk, also if this process is killed: the kernel
/// relies on all that it has written.
#[derive(Debug)]
pub struct DiskFiles {
    /// The file of the disk. It keeps its lock as long as a process has this descriptor.
    pub file: OwnedFd,
    /// The memory file with the [`bcow::Ledger`] of the disk.
    pub ledger: OwnedFd,
}

impl DiskFiles {
    /// Further descriptors of the same files.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(DiskFiles {
            file: self.file.try_clone()?,
            ledger: self.ledger.try_clone()?,
        })
    }
}

/// Releases what belongs to a disk; the argument says whether the disk has all written data.
pub type OnClosed = Box<dyn FnOnce(bool) + Send>;

/// How long the file of the disk is in use.
#[derive(Debug, Default)]
pub(crate) struct Lifetime {
    /// A leaf lock.
    state: Mutex<DiskState>,
    /// Signals the end, and the first discard since the last flush for discards.
    changed: Condvar,
    discarded: AtomicBool,
    /// The first error of a write or a flush, after which the kernel may have lost data.
    lost: OnceLock<Errno>,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum DiskState {
    /// The file was not opened yet.
    #[default]
    New,
    /// The file is open, by the loop device.
    Open,
    /// The file is open, and another process will serve it.
    HandedOver,
    /// The file was closed, or the service has ended.
    Ended,
}

impl Lifetime {
    /// Of a file that the loop device opened when another process served it. `lost` is the error
    /// after which that process may have lost data.
    pub(crate) fn taken_over(lost: Option<Errno>) -> Self {
        let lifetime = Lifetime::default();
        *lifetime.state.lock() = DiskState::Open;
        if let Some(errno) = lost {
            lifetime.lose(errno);
        }
        lifetime
    }

    /// Records that another process will serve the file, unless it was closed. Returns whether that
    /// is so.
    pub(crate) fn hand_over(&self) -> bool {
        let mut state = self.state.lock();
        let is_open = *state == DiskState::Open;
        if is_open {
            *state = DiskState::HandedOver;
        }
        is_open
    }

    /// Records that the file was closed. Never returns after [`Lifetime::hand_over`]: the kernel
    /// sends the request again, to the other process.
    pub(crate) fn release(&self) {
        let mut state = self.state.lock();
        while *state == DiskState::HandedOver {
            self.changed.wait(&mut state);
        }
        *state = DiskState::Ended;
        drop(state);
        self.changed.notify_all();
    }

    /// Records the opening. Only the first one is allowed: the file is for one loop device.
    pub(crate) fn open(&self) -> bool {
        let mut state = self.state.lock();
        let is_first = *state == DiskState::New;
        if is_first {
            *state = DiskState::Open;
        }
        is_first
    }

    /// Records the end of the service.
    pub(crate) fn end(&self) {
        let mut state = self.state.lock();
        if *state != DiskState::HandedOver {
            *state = DiskState::Ended;
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Records that data may be lost.
    pub(crate) fn lose(&self, errno: Errno) {
        let _ = self.lost.set(errno);
    }

    /// The first error after which data may be lost.
    pub(crate) fn lost(&self) -> Option<Errno> {
        self.lost.get().copied()
    }

    pub(crate) fn has_ended(&self) -> bool {
        *self.state.lock() == DiskState::Ended
    }

    /// Records a discard. The file system does not flush after it, but the host gets the space back
    /// at a flush.
    pub(crate) fn discard(&self) {
        if !self.discarded.swap(true, Ordering::Relaxed) {
            let _state = self.state.lock();
            self.changed.notify_all();
        }
    }

    /// Waits for the end. Calls `flush` some time after a discard.
    pub(crate) fn wait(&self, flush: impl Fn()) {
        let mut state = self.state.lock();
        while *state != DiskState::Ended {
            if !self.discarded.load(Ordering::Relaxed) {
                self.changed.wait(&mut state);
                continue;
            }
            let timeout = self.changed.wait_for(&mut state, DISCARD_PAUSE);
            if timeout.timed_out() && *state != DiskState::Ended {
                drop(state);
                self.discarded.store(false, Ordering::Relaxed);
                flush();
                state = self.state.lock();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    #[test]
    fn a_close_after_the_handover_is_left_to_the_other_process() {
        let lifetime = Arc::new(Lifetime::taken_over(Some(Errno::NOSPC)));
        assert_eq!(lifetime.lost(), Some(Errno::NOSPC));
        assert!(!lifetime.open(), "the loop device has the file");
        assert!(lifetime.hand_over());
        let (sender, receiver) = mpsc::channel();
        let closing = Arc::clone(&lifetime);
        // The thread waits until the end of the process.
        thread::spawn(move || {
            closing.release();
            let _ = sender.send(());
        });
        let waited = receiver.recv_timeout(Duration::from_millis(50));
        assert_eq!(waited, Err(mpsc::RecvTimeoutError::Timeout));
        assert!(!lifetime.has_ended());
    }

    #[test]
    fn a_file_that_was_closed_is_not_handed_over() {
        let lifetime = Lifetime::default();
        assert!(!lifetime.hand_over(), "it was not opened yet");
        assert!(lifetime.open());
        lifetime.release();
        assert!(lifetime.has_ended());
        assert!(!lifetime.hand_over());
    }
}
