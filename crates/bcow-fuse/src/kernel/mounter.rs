//! The *mounter*: a process that mounts, freezes, grows and unmounts the file system of a disk for
//! the process that serves the disk. That one is in a sandbox, and Landlock refuses it mounts.
//!
//! The mounter has the rights of the user. Its mountpoint and the options of its mount are those of
//! the command line: a request cannot name others, and only the first one mounts.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use bcow_mount::filesystem::{self, Kind, Settings};
use bcow_mount::{Access, HiddenMount, HiddenName, LoopDevice, hold_frozen};
use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::process::WaitOptions;
use serde::{Deserialize, Serialize};

use super::place::LoopMount;
use crate::disk::Barriers;
use crate::error::MountError;
use crate::growth;
use crate::options::MountOptions;
use crate::packets::{self, Packet};
use crate::unmount::Unmounted;
use bcow_sandbox::fork::{fork, keep_only};
use bcow_sandbox::{Sandbox, When};

/// A request. The mounter answers each with one packet.
#[derive(Debug, Serialize, Deserialize)]
enum Request {
    /// With the descriptor of the hidden mount.
    Mount(Wanted),
    /// Grows the file system to a size in bytes.
    Grow(u64),
    /// Answered with the descriptor of a socket, for [`bcow_mount::while_frozen`].
    Freeze,
    Thaw,
    Unmount,
}

#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Mounted(Attached),
    Done,
    Unmounted(Unmounted),
    Failed {
        message: String,
        /// The number of the system's error.
        errno: i32,
        hint: Option<String>,
    },
}

/// What a process asks to mount.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Wanted {
    /// [`Kind::name`].
    pub(super) kind: String,
    /// The name of the file in the hidden mount.
    pub(super) name: String,
    pub(super) is_writable: bool,
    pub(super) has_barriers: bool,
}

/// The loop device of a mounted file system.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Attached {
    pub(super) device: PathBuf,
    pub(super) has_direct_io: bool,
}

/// The process, as the one that serves the disk knows it. It ends with that process.
#[derive(Debug)]
pub struct Mounter {
    /// The lock is held for a request and its answer; no other lock is taken meanwhile.
    socket: Mutex<OwnedFd>,
}

impl Mounter {
    /// Starts it, for a mount at `target`. This process has one thread, and none of the descriptors
    /// that only one process may have.
    pub fn start(target: &Path, options: &MountOptions, sandbox: When) -> io::Result<Self> {
        // A later step fails with the reason if it cannot be used.
        let target = target.canonicalize().unwrap_or_default();
        let (own, of_mounter) = packets::pair()?;
        let serve = || {
            let kept = keep_only(&[of_mounter.as_raw_fd()], c"bcow-mounter");
            if kept.is_ok() && Sandbox::of_helper(sandbox).is_ok() {
                let _ = serve(&of_mounter, &target, options);
            }
        };
        fork(serve)?;
        let socket = Mutex::new(own);
        Ok(Mounter { socket })
    }

    /// Mounts the file system in a file of `hidden`, which other threads serve.
    pub(super) fn mount(
        &self,
        wanted: Wanted,
        hidden: BorrowedFd<'_>,
    ) -> Result<Attached, MountError> {
        match self.ask(&Request::Mount(wanted), &[hidden])? {
            (Answer::Mounted(attached), _) => Ok(attached),
            _ => Err(broken(Errno::PROTO)),
        }
    }

    pub(super) fn grow(&self, bytes: u64) -> Result<(), MountError> {
        self.ask(&Request::Grow(bytes), &[]).map(drop)
    }

    /// Starts a process that freezes the file system.
    pub(super) fn freeze(&self) -> io::Result<UnixStream> {
        let (_, socket) = self.ask(&Request::Freeze, &[]).map_err(io::Error::other)?;
        socket
            .map(UnixStream::from)
            .ok_or_else(|| Errno::PROTO.into())
    }

    pub(super) fn thaw(&self) -> Result<(), MountError> {
        self.ask(&Request::Thaw, &[]).map(drop)
    }

    pub(super) fn unmount(&self) -> Unmounted {
        match self.ask(&Request::Unmount, &[]) {
            Ok((Answer::Unmounted(unmounted), _)) => unmounted,
            _ => Unmounted::Stays,
        }
    }

    fn ask(
        &self,
        request: &Request,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(Answer, Option<OwnedFd>), MountError> {
        let bytes = serde_json::to_vec(request).map_err(|_| broken(Errno::PROTO))?;
        let socket = self.socket.lock();
        let answered = packets::send(&socket, &bytes, descriptors)
            .and_then(|()| packets::receive(&socket))
            .map_err(broken)?;
        let Packet { bytes, descriptors } = answered.ok_or_else(|| broken(Errno::PIPE))?;
        match serde_json::from_slice(&bytes) {
            Ok(Answer::Failed {
                message,
                errno,
                hint,
            }) => Err(MountError::Kernel(bcow_mount::Error::OfOtherProcess {
                message,
                source: io::Error::from_raw_os_error(errno),
                hint,
            })),
            Ok(answer) => Ok((answer, descriptors.into_iter().next())),
            Err(_) => Err(broken(Errno::PROTO)),
        }
    }
}

fn broken(error: impl Into<io::Error>) -> MountError {
    MountError::process("ask the process that mounts")(error.into())
}

/// Mounts the file system of the file `name` in `hidden` at `target`.
pub(super) fn mount(
    hidden: &HiddenMount,
    name: &HiddenName,
    access: Access,
    kind: Kind,
    target: &Path,
    settings: Settings,
) -> Result<Attached, bcow_mount::Error> {
    let file = hidden.open(&name.to_string(), access)?;
    // Dropped at the end: the loop device lives as long as the mount then.
    let device = LoopDevice::attach(file.as_fd(), access)?;
    filesystem::mount(device.path(), kind, target, settings)?;
    Ok(Attached {
        device: device.path().to_owned(),
        has_direct_io: device.has_direct_io(),
    })
}

/// What the mounter has mounted.
struct Mounted {
    place: LoopMount,
    kind: Kind,
}

/// Answers requests until the other process has ended.
fn serve(socket: &OwnedFd, target: &Path, options: &MountOptions) -> io::Result<()> {
    let mut mounted: Option<Mounted> = None;
    while let Some(packet) = packets::receive(socket)? {
        // Processes that have ended.
        while let Ok(Some(_)) = rustix::process::wait(WaitOptions::NOHANG) {}
        let is_first = mounted.is_none();
        let (answer, descriptor) = match execute(packet, target, options, &mut mounted) {
            Ok(done) => done,
            Err(error) => (failure(&error), None),
        };
        let descriptor = descriptor.as_ref().map(AsFd::as_fd);
        let bytes = serde_json::to_vec(&answer)?;
        let sent = packets::send(socket, &bytes, descriptor.as_slice());
        if let (Err(_), true, Some(mounted)) = (&sent, is_first, &mounted) {
            // The other process was killed meanwhile.
            mounted.place.unmount();
        }
        sent?;
    }
    Ok(())
}

type Done = (Answer, Option<UnixStream>);

fn execute(
    packet: Packet,
    target: &Path,
    options: &MountOptions,
    mounted: &mut Option<Mounted>,
) -> Result<Done, MountError> {
    let request = serde_json::from_slice(&packet.bytes).map_err(|_| broken(Errno::PROTO))?;
    let hidden = packet.descriptors.into_iter().next();
    let answer = match (request, &mounted, hidden) {
        (Request::Mount(wanted), None, Some(hidden)) => {
            let (made, attached) = first_mount(&wanted, hidden, target, options)?;
            *mounted = Some(made);
            Answer::Mounted(attached)
        }
        (Request::Grow(bytes), Some(mounted), _) => {
            growth::grow_own(target, mounted.kind, bytes)?;
            Answer::Done
        }
        (Request::Freeze, Some(mounted), _) => {
            let started = start_freezer(&mounted.place);
            let failed = MountError::process("start the process that freezes");
            return Ok((Answer::Done, Some(started.map_err(failed)?)));
        }
        (Request::Thaw, Some(mounted), _) => {
            let thawed = bcow_mount::thaw(target, mounted.place.number());
            thawed.map_err(MountError::process("thaw the file system"))?;
            Answer::Done
        }
        (Request::Unmount, Some(mounted), _) => Answer::Unmounted(mounted.place.unmount()),
        _ => return Err(broken(Errno::PROTO)),
    };
    Ok((answer, None))
}

fn first_mount(
    wanted: &Wanted,
    hidden: OwnedFd,
    target: &Path,
    options: &MountOptions,
) -> Result<(Mounted, Attached), MountError> {
    let refused = || broken(Errno::INVAL);
    let mut kinds = Kind::ALL.into_iter();
    let kind = kinds.find(|kind| kind.name() == wanted.kind);
    let name = HiddenName::parse(&format!("/{}", wanted.name));
    let (kind, name) = kind.zip(name).ok_or_else(refused)?;
    let barriers = if wanted.has_barriers { Barriers::On } else { Barriers::Off };
    let settings = options.settings(!wanted.is_writable, Path::new(&name.disk), barriers)?;
    let access = if wanted.is_writable { Access::ReadWrite } else { Access::ReadOnly };
    let hidden = HiddenMount::of(hidden);
    let attached = mount(&hidden, &name, access, kind, target, settings)?;
    let place = LoopMount::new(target.to_owned(), attached.device.clone(), name);
    Ok((Mounted { place, kind }, attached))
}

/// Starts a process that freezes the file system. Returns the other end of its socket.
fn start_freezer(place: &LoopMount) -> io::Result<UnixStream> {
    let (own, of_freezer) = UnixStream::pair()?;
    fork(|| {
        let kept = keep_only(&[of_freezer.as_raw_fd()], c"bcow-freezer");
        let _ = kept
            .and_then(|()| hold_frozen(&place.target, place.number(), &of_freezer, &of_freezer));
    })?;
    Ok(own)
}

fn failure(error: &MountError) -> Answer {
    let source = std::error::Error::source(error);
    let source = source.and_then(|source| source.downcast_ref::<io::Error>());
    Answer::Failed {
        message: error.to_string(),
        errno: source
            .and_then(io::Error::raw_os_error)
            .unwrap_or(libc::EIO),
        hint: error.hint().map(str::to_owned),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(kind: &str, name: &str) -> Request {
        Request::Mount(Wanted {
            kind: kind.to_owned(),
            name: name.to_owned(),
            is_writable: true,
            has_barriers: true,
        })
    }

    /// Whether a mounter does what is asked. `mounted` is what it has mounted before.
    fn does(request: &Request, descriptors: Vec<OwnedFd>, mounted: &mut Option<Mounted>) -> bool {
        let packet = Packet {
            bytes: serde_json::to_vec(request).unwrap(),
            descriptors,
        };
        execute(packet, Path::new("/mnt"), &MountOptions::default(), mounted).is_ok()
    }

    #[test]
    fn only_the_first_request_mounts_and_the_others_need_it() {
        let null = || vec![std::fs::File::open("/dev/null").unwrap().into()];
        let named = format!("bcow:{}:disk", std::process::id());
        for request in [
            Request::Grow(1 << 30),
            Request::Freeze,
            Request::Thaw,
            Request::Unmount,
        ] {
            assert!(!does(&request, Vec::new(), &mut None), "{request:?}");
        }
        for (kind, name) in [("ext4", "/etc/passwd"), ("ext4", "../x"), ("proc", &*named)] {
            assert!(
                !does(&wanted(kind, name), null(), &mut None),
                "{kind} {name}"
            );
        }
        assert!(!does(&wanted("ext4", &named), Vec::new(), &mut None));
        // No loop device has this file, so there is nothing to unmount.
        let name = HiddenName::parse(&format!("/{named}")).unwrap();
        let place = LoopMount::new("/mnt".into(), "/dev/loop-none".into(), name);
        let mut mounted = Some(Mounted {
            place,
            kind: Kind::Ext4,
        });
        assert!(!does(&wanted("ext4", &named), null(), &mut mounted));
        assert!(does(&Request::Unmount, Vec::new(), &mut mounted));
        assert!(!does(&Request::Thaw, Vec::new(), &mut mounted));
    }

    #[test]
    fn an_error_crosses_to_the_other_process_with_its_cause_and_its_hint() {
        let (own, other) = packets::pair().unwrap();
        let error = MountError::Kernel(bcow_mount::Error::Grow {
            kind: "ext4",
            source: Errno::PERM.into(),
        });
        packets::send(&other, &serde_json::to_vec(&failure(&error)).unwrap(), &[]).unwrap();
        let mounter = Mounter {
            socket: Mutex::new(own),
        };
        let crossed = mounter.grow(1).unwrap_err();
        assert_eq!(crossed.to_string(), error.to_string());
        assert_eq!(crossed.hint(), error.hint());
        let cause = std::error::Error::source(&crossed).expect("a cause");
        assert_eq!(cause.to_string(), io::Error::from(Errno::PERM).to_string());
        drop(other);
        assert!(mounter.grow(1).is_err());
        assert_eq!(mounter.unmount(), Unmounted::Stays);
    }
}
