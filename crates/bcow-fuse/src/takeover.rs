//! A process takes over a mount from one that has ended.
//!
//! The connection to the kernel is a descriptor of /dev/fuse, and the mount lives as long as a
//! process has it open. The kernel sends INIT only once, and what both sides agreed on then stays.
//! fuser begins each session with an INIT, so it gets one from here, with the flags agreed on.
//!
//! The process before may have ended at any moment: the kernel sends the requests that it has read
//! and not answered once more (FUSE_NOTIFY_RESEND, Linux 6.9). Requests to an image without an
//! upper can be answered twice. With an upper, the number of such a request shows that the kernel
//! sends it again, and the union finds out whether it was executed.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use bcow_union::HeldUpper;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SendFlags;

use crate::error::MountError;
use crate::first_messages::{self, FirstMessages, replace};
use crate::mount::Mount;
use crate::unmount::Unmounted;

/// A mount that another process can serve.
#[derive(Debug)]
pub struct Handover {
    /// The connection to the kernel.
    pub connection: OwnedFd,
    /// The canonical mountpoint.
    pub target: PathBuf,
    /// The device number of the mount, if the kernel lists the mount.
    pub device: Option<String>,
    /// The flags of the protocol that the kernel and the first process agreed on.
    pub agreed: u64,
    /// The ledger of the upper, if the mount has one: see [`bcow_union::fs::UnionFs::take_over`].
    pub ledger: Option<OwnedFd>,
    /// The upper, if the mount has one. The process that takes over has opened it again already.
    pub upper: Option<HeldUpper>,
    /// The pipe for the outcome, if the mount has an upper. `bcow umount` may have it open.
    pub outcome: Option<OwnedFd>,
}

impl Handover {
    /// Unmounts a mount that no process serves. Programs that wait for answers get an error.
    pub fn unmount(self) -> Unmounted {
        Mount::of(self.target, self.device, self.connection).unmount()
    }

    /// Whether the mount has ended: the kernel has closed the connection.
    pub fn has_ended(&self) -> bool {
        let mut connection = [PollFd::new(&self.connection, PollFlags::empty())];
        let polled = poll(&mut connection, Some(&Timespec::default()));
        polled.is_ok() && connection[0].revents().contains(PollFlags::ERR)
    }
}

/// Whether the kernel sends requests again on demand. Makes it do so for all requests that this
/// process, or one before it, has read and not answered.
pub(crate) fn resend(connection: BorrowedFd<'_>) -> Result<bool, MountError> {
    /// FUSE_NOTIFY_RESEND of linux/fuse.h, in the place of an error number.
    const RESEND: u32 = 7;
    const BYTES: u32 = 16;
    let mut message = Vec::with_capacity(BYTES as usize);
    message.extend_from_slice(&BYTES.to_ne_bytes());
    message.extend_from_slice(&RESEND.to_ne_bytes());
    // A message that answers no request.
    message.extend_from_slice(&0_u64.to_ne_bytes());
    match rustix::io::write(connection, &message) {
        // The mount has ended if there is no such device.
        Ok(_) | Err(Errno::NODEV) => Ok(true),
        Err(Errno::INVAL) => Ok(false),
        Err(errno) => Err(MountError::process("let the kernel send requests again")(
            errno,
        )),
    }
}

/// A session on a connection to the kernel. If another process has served it, the kernel has sent
/// INIT before, and the flags `agreed` are agreed on. With `first`, each thread receives its first
/// message before a request is received.
pub(crate) fn session<F: fuser::Filesystem>(
    filesystem: F,
    connection: OwnedFd,
    agreed: Option<u64>,
    config: fuser::Config,
    first: Option<&FirstMessages>,
) -> Result<fuser::Session<F>, MountError> {
    // The kernel itself refuses other users (see `Access`), so fuser need not.
    let all = fuser::SessionACL::All;
    let begin = || {
        let threads = config.n_threads.unwrap_or(1);
        let ours = connection.try_clone()?;
        let session = match agreed {
            None => fuser::Session::from_fd(filesystem, connection, all, config)?,
            Some(agreed) => continued(filesystem, connection, agreed, config)?,
        };
        if let Some(first) = first {
            let (messages, end) = first_messages::socket()?;
            replace(session.as_fd().as_raw_fd(), end.as_fd())?;
            first.begin(session.as_fd(), threads, messages, ours)?;
        }
        Ok(session)
    };
    begin().map_err(MountError::Session)
}

fn continued<F: fuser::Filesystem>(
    filesystem: F,
    connection: OwnedFd,
    agreed: u64,
    config: fuser::Config,
) -> io::Result<fuser::Session<F>> {
    let (kernel, ours) = first_messages::socket()?;
    rustix::net::send(&kernel, &init(agreed), SendFlags::NOSIGNAL)?;
    let session = fuser::Session::from_fd(filesystem, ours, fuser::SessionACL::All, config)?;
    replace(session.as_fd().as_raw_fd(), connection.as_fd())?;
    Ok(session)
}

/// Another descriptor of the same open file.
pub(crate) fn duplicate(descriptor: BorrowedFd<'_>) -> Result<OwnedFd, MountError> {
    let duplicate = descriptor.try_clone_to_owned();
    duplicate.map_err(MountError::process("duplicate a descriptor of the mount"))
}

/// The request INIT of a kernel that offers `flags` (fuse_in_header and fuse_init_in of
/// linux/fuse.h).
fn init(flags: u64) -> Vec<u8> {
    const OPERATION: u32 = 26;
    const NUMBER: u64 = 1;
    const HEADER_BYTES: usize = 40;
    const BYTES: usize = HEADER_BYTES + 64;
    const VERSION: [u32; 2] = [7, 40];
    const READAHEAD_BYTES: u32 = 1 << 20;
    /// The flags beyond the 32nd are valid.
    const EXTENDED: u32 = 1 << 30;
    let mut request = Vec::with_capacity(BYTES);
    request.extend_from_slice(&(BYTES as u32).to_ne_bytes());
    request.extend_from_slice(&OPERATION.to_ne_bytes());
    request.extend_from_slice(&NUMBER.to_ne_bytes());
    request.resize(HEADER_BYTES, 0);
    let [low, high] = [flags as u32, (flags >> 32) as u32];
    for field in [
        VERSION[0],
        VERSION[1],
        READAHEAD_BYTES,
        low | EXTENDED,
        high,
    ] {
        request.extend_from_slice(&field.to_ne_bytes());
    }
    request.resize(BYTES, 0);
    request
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    struct Flags(Arc<AtomicU64>);

    impl fuser::Filesystem for Flags {
        fn init(
            &mut self,
            _request: &fuser::Request,
            config: &mut fuser::KernelConfig,
        ) -> io::Result<()> {
            self.0
                .store(config.capabilities().bits(), Ordering::Relaxed);
            Ok(())
        }
    }

    #[test]
    fn session_knows_the_flags_and_uses_the_connection() {
        let agreed = fuser::InitFlags::FUSE_DO_READDIRPLUS.bits()
            | fuser::InitFlags::FUSE_NO_OPENDIR_SUPPORT.bits()
            | 1 << 40;
        let (connection, kernel) = io::pipe().unwrap();
        let seen = Arc::default();
        let fuse = session(
            Flags(Arc::clone(&seen)),
            connection.into(),
            Some(agreed),
            fuser::Config::default(),
            None,
        );
        assert_eq!(seen.load(Ordering::Relaxed), agreed);
        // The end of this connection is the end of the session.
        drop(kernel);
        let mut byte = [0];
        assert_eq!(rustix::io::read(fuse.unwrap().as_fd(), &mut byte), Ok(0));
    }

    #[test]
    fn the_kernel_is_asked_with_a_message_that_answers_no_request() {
        let (mut reader, writer) = io::pipe().unwrap();
        assert!(resend(writer.as_fd()).unwrap());
        drop(writer);
        let mut message = Vec::new();
        reader.read_to_end(&mut message).unwrap();
        let expected = [&16_u32.to_ne_bytes()[..], &7_u32.to_ne_bytes(), &[0; 8]].concat();
        assert_eq!(message, expected);
        // A descriptor that cannot be written to.
        resend(reader.as_fd()).unwrap_err();
    }
}
