//! The *mounter*: a process that does for the process of a mount what that one cannot in its
//! sandbox.
//!
//! - With the kernel driver, it mounts, freezes, grows and unmounts the file system of a disk:
//!   Landlock refuses mounts.
//! - With the FUSE driver, it unmounts: Landlock refuses that, and fusermount3 needs new
//!   privileges. For a mount with an upper, it also reads the groups and capabilities of the
//!   processes that use the mount. The process of the mount has no access to the files of other
//!   processes in /proc: these files have secrets too.
//!
//! The mounter has the rights of the user. Its mountpoint and the options of its mount are those of
//! the command line: a request cannot name others. Only the first request mounts, or names a mount.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;

use bcow_mount::filesystem::{self, Kind, Settings};
use bcow_mount::{Access, HiddenMount, HiddenName, LoopDevice, hold_frozen};
use nix::sys::signal::{SigSet, SigmaskHow};
use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::process::WaitOptions;
use serde::{Deserialize, Serialize};

use crate::callers::{self, Callers};
use crate::disk::Barriers;
use crate::error::MountError;
use crate::growth;
use crate::loop_mount::LoopMount;
use crate::mountinfo::{self, FS_TYPE, MountEntry};
use crate::options::MountOptions;
use crate::packets::{self, Packet};
use crate::unmount::{Unmounted, unmount_places};
use bcow_sandbox::fork::{fork, keep_only, let_others_run_first};
use bcow_sandbox::{Sandbox, When};

/// A request. The mounter answers each with one packet, except [`Request::Serve`]: the process of
/// the mount waits for nothing then.
#[derive(Debug, Serialize, Deserialize)]
enum Request {
    /// With the descriptor of the hidden mount.
    Mount(Wanted),
    /// Names a mount with the FUSE driver by its device number. With a socket for questions about
    /// callers, if the mount has an upper.
    Serve(String),
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
pub(crate) struct Wanted {
    /// [`Kind::name`].
    pub(crate) kind: String,
    /// The name of the file in the hidden mount.
    pub(crate) name: String,
    pub(crate) is_writable: bool,
    pub(crate) has_barriers: bool,
}

/// The loop device of a mounted file system.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Attached {
    pub(crate) device: PathBuf,
    pub(crate) has_direct_io: bool,
}

/// The mount that a mounter is for.
#[derive(Debug, Clone, Copy)]
pub struct Task<'a> {
    pub target: &'a Path,
    pub options: &'a MountOptions,
    /// Whether it may have the kernel driver. Otherwise the mounter only unmounts.
    pub may_mount: bool,
}

/// The mounter, as the process of the mount knows it. It ends with that process.
#[derive(Debug)]
pub struct Mounter {
    /// The lock is held for a request and its answer; no other lock is taken meanwhile.
    socket: Mutex<OwnedFd>,
}

impl Mounter {
    /// Starts it: see [`start_on`].
    pub fn start(task: Task<'_>, sandbox: When) -> io::Result<Self> {
        let (own, of_mounter) = packets::pair()?;
        start_on(&of_mounter, task, sandbox)?;
        Ok(Mounter::at(own))
    }

    /// The one at the other end of this socket.
    pub fn at(socket: OwnedFd) -> Self {
        let socket = Mutex::new(socket);
        Mounter { socket }
    }

    /// Names the mount with the FUSE driver that this process serves. If `asks_for_callers`, the
    /// mounter is asked for the callers of all mounts of this process from now on.
    pub(crate) fn serve(&self, device: &str, asks_for_callers: bool) -> Result<(), MountError> {
        let request = Request::Serve(device.to_owned());
        if !asks_for_callers {
            return send(&self.socket.lock(), &request, &[]);
        }
        let (own, of_mounter) = UnixStream::pair().map_err(broken)?;
        send(&self.socket.lock(), &request, &[of_mounter.as_fd()])?;
        Callers::new(own).use_always();
        Ok(())
    }

    /// Mounts the file system in a file of `hidden`, which other threads serve.
    pub(crate) fn mount(
        &self,
        wanted: Wanted,
        hidden: BorrowedFd<'_>,
    ) -> Result<Attached, MountError> {
        match self.ask(&Request::Mount(wanted), &[hidden])? {
            (Answer::Mounted(attached), _) => Ok(attached),
            _ => Err(broken(Errno::PROTO)),
        }
    }

    pub(crate) fn grow(&self, bytes: u64) -> Result<(), MountError> {
        self.ask(&Request::Grow(bytes), &[]).map(drop)
    }

    /// Starts a process that freezes the file system.
    pub(crate) fn freeze(&self) -> io::Result<UnixStream> {
        let (_, socket) = self.ask(&Request::Freeze, &[]).map_err(io::Error::other)?;
        socket
            .map(UnixStream::from)
            .ok_or_else(|| Errno::PROTO.into())
    }

    pub(crate) fn thaw(&self) -> Result<(), MountError> {
        self.ask(&Request::Thaw, &[]).map(drop)
    }

    /// If the mount is in use, unmounts lazily.
    pub(crate) fn unmount(&self) -> Unmounted {
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
        let socket = self.socket.lock();
        send(&socket, request, descriptors)?;
        let answered = packets::receive(&socket).map_err(broken)?;
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

fn send(
    socket: &OwnedFd,
    request: &Request,
    descriptors: &[BorrowedFd<'_>],
) -> Result<(), MountError> {
    let bytes = serde_json::to_vec(request).map_err(|_| broken(Errno::PROTO))?;
    packets::send(socket, &bytes, descriptors).map_err(broken)
}

/// Starts the mounter that answers at `socket`. This process has one thread, and none of the
/// descriptors that only one process may have.
pub fn start_on(socket: &OwnedFd, task: Task<'_>, sandbox: When) -> io::Result<()> {
    // A later step fails with the reason if it cannot be used.
    let target = &task.target.canonicalize().unwrap_or_default();
    // Signals to all processes of a terminal or of a service: the process of the mount decides when
    // the mounter ends.
    let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    let serve = || {
        let _ = rustix::process::setsid();
        if !task.may_mount {
            // It wakes up when the process of the mount ends, for which `bcow umount` waits. With
            // the kernel driver, a paused file system can wait for it.
            let_others_run_first();
        }
        let kept = keep_only(&[socket.as_raw_fd()], c"bcow-mounter");
        if kept.is_ok() && Sandbox::of_helper(sandbox).is_ok() {
            let _ = serve(socket, Task { target, ..task });
        }
    };
    let started = fork(serve);
    before.thread_set_mask()?;
    started.map(drop)
}

fn broken(error: impl Into<io::Error>) -> MountError {
    MountError::process("ask the process that mounts")(error.into())
}

/// Mounts the file system of the file `name` in `hidden` at `target`.
pub(crate) fn mount(
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

/// The mount that the first request made or named.
enum Mounted {
    Kernel {
        place: LoopMount,
        kind: Kind,
    },
    /// With the device number.
    Fuse(String),
    /// The mount is gone: another one can get its device number.
    Unknown,
}

impl Mounted {
    fn unmount(&mut self) -> Unmounted {
        let device = match self {
            Mounted::Kernel { place, .. } => return place.unmount(),
            Mounted::Fuse(device) => device,
            Mounted::Unknown => return Unmounted::Stays,
        };
        let Ok(mounts) = mountinfo::mounts() else {
            return Unmounted::Stays;
        };
        let is_own = |mount: &MountEntry| mount.device == *device && mount.fs_type == FS_TYPE;
        let is_listed = mounts.iter().any(is_own);
        let unmounted = if is_listed { unmount_places(Some(device)) } else { Unmounted::Stays };
        if !is_listed || unmounted != Unmounted::Stays {
            *self = Mounted::Unknown;
        }
        unmounted
    }
}

/// Answers requests until the other process has ended.
fn serve(socket: &OwnedFd, task: Task<'_>) -> io::Result<()> {
    let mut mounted: Option<Mounted> = None;
    while let Some(packet) = packets::receive(socket)? {
        // Processes that have ended.
        while let Ok(Some(_)) = rustix::process::wait(WaitOptions::NOHANG) {}
        let Ok(request) = serde_json::from_slice(&packet.bytes) else {
            return Err(Errno::PROTO.into());
        };
        let (is_first, is_answered) = (mounted.is_none(), !matches!(request, Request::Serve(_)));
        let descriptor = packet.descriptors.into_iter().next();
        let done = execute(request, descriptor, task, &mut mounted);
        if !is_answered {
            continue;
        }
        let (answer, descriptor) = match done {
            Ok(done) => done,
            Err(error) => (failure(&error), None),
        };
        let descriptor = descriptor.as_ref().map(AsFd::as_fd);
        let bytes = serde_json::to_vec(&answer)?;
        let sent = packets::send(socket, &bytes, descriptor.as_slice());
        if let (Err(_), true, Some(mounted)) = (&sent, is_first, &mut mounted) {
            // The other process was killed meanwhile.
            mounted.unmount();
        }
        sent?;
    }
    Ok(())
}

type Done = (Answer, Option<UnixStream>);

fn execute(
    request: Request,
    descriptor: Option<OwnedFd>,
    task: Task<'_>,
    mounted: &mut Option<Mounted>,
) -> Result<Done, MountError> {
    let answer = match (request, mounted.as_mut(), descriptor) {
        (Request::Mount(wanted), None, Some(hidden)) if task.may_mount => {
            let (made, attached) = first_mount(&wanted, hidden, task)?;
            *mounted = Some(made);
            Answer::Mounted(attached)
        }
        (Request::Serve(device), None, socket) => {
            if let Some(socket) = socket {
                answer_for_callers(socket.into()).map_err(broken)?;
            }
            *mounted = Some(Mounted::Fuse(device));
            Answer::Done
        }
        (Request::Unmount, Some(mounted), _) => Answer::Unmounted(mounted.unmount()),
        (request, Some(Mounted::Kernel { place, kind }), _) => {
            return of_kernel(&request, task.target, place, *kind);
        }
        _ => return Err(broken(Errno::PROTO)),
    };
    Ok((answer, None))
}

/// The requests for a mount with the kernel driver.
fn of_kernel(
    request: &Request,
    target: &Path,
    place: &LoopMount,
    kind: Kind,
) -> Result<Done, MountError> {
    match request {
        Request::Grow(bytes) => growth::grow_own(target, kind, *bytes)?,
        Request::Freeze => {
            let started = start_freezer(place);
            let failed = MountError::process("start the process that freezes");
            return Ok((Answer::Done, Some(started.map_err(failed)?)));
        }
        Request::Thaw => {
            let thawed = bcow_mount::thaw(target, place.number());
            thawed.map_err(MountError::process("thaw the file system"))?;
        }
        _ => return Err(broken(Errno::PROTO)),
    }
    Ok((Answer::Done, None))
}

/// With a thread of its own: a process that uses the mount can wait for the answer while the
/// unmount waits for that process.
fn answer_for_callers(socket: UnixStream) -> io::Result<()> {
    let answer = move || drop(callers::serve(&socket));
    thread::Builder::new().spawn(answer).map(drop)
}

fn first_mount(
    wanted: &Wanted,
    hidden: OwnedFd,
    task: Task<'_>,
) -> Result<(Mounted, Attached), MountError> {
    let Task {
        target, options, ..
    } = task;
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
    Ok((Mounted::Kernel { place, kind }, attached))
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
    fn does(request: &Request, descriptor: Option<OwnedFd>, mounted: &mut Option<Mounted>) -> bool {
        let request = serde_json::to_vec(request).unwrap();
        let request = serde_json::from_slice(&request).unwrap();
        let options = MountOptions::default();
        execute(request, descriptor, task(&options), mounted).is_ok()
    }

    fn task(options: &MountOptions) -> Task<'_> {
        Task {
            target: Path::new("/mnt"),
            options,
            may_mount: true,
        }
    }

    fn null() -> Option<OwnedFd> {
        Some(std::fs::File::open("/dev/null").unwrap().into())
    }

    #[test]
    fn only_the_first_request_mounts_and_the_others_need_it() {
        let named = format!("bcow:{}:disk", std::process::id());
        for request in [
            Request::Grow(1 << 30),
            Request::Freeze,
            Request::Thaw,
            Request::Unmount,
        ] {
            assert!(!does(&request, None, &mut None), "{request:?}");
        }
        for (kind, name) in [("ext4", "/etc/passwd"), ("ext4", "../x"), ("proc", &*named)] {
            assert!(
                !does(&wanted(kind, name), null(), &mut None),
                "{kind} {name}"
            );
        }
        assert!(!does(&wanted("ext4", &named), None, &mut None));
        // No loop device has this file, so there is nothing to unmount.
        let name = HiddenName::parse(&format!("/{named}")).unwrap();
        let place = LoopMount::new("/mnt".into(), "/dev/loop-none".into(), name);
        let mut mounted = Some(Mounted::Kernel {
            place,
            kind: Kind::Ext4,
        });
        assert!(!does(&wanted("ext4", &named), null(), &mut mounted));
        assert!(!does(&Request::Serve("0:1".to_owned()), None, &mut mounted));
        assert!(does(&Request::Unmount, None, &mut mounted));
        assert!(!does(&Request::Thaw, None, &mut mounted));
    }

    #[test]
    fn a_mounter_of_the_fuse_driver_only_unmounts_the_mount_that_was_named_first() {
        let named = format!("bcow:{}:disk", std::process::id());
        let mut mounted = None;
        // No mount has this device number.
        assert!(does(&Request::Serve("0:0".to_owned()), None, &mut mounted));
        for request in [
            wanted("ext4", &named),
            Request::Serve("0:1".to_owned()),
            Request::Grow(1 << 30),
            Request::Freeze,
            Request::Thaw,
        ] {
            assert!(!does(&request, null(), &mut mounted), "{request:?}");
        }
        assert!(matches!(&mounted, Some(Mounted::Fuse(device)) if device == "0:0"));
        assert!(does(&Request::Unmount, None, &mut mounted));
        assert!(matches!(mounted, Some(Mounted::Unknown)));
        assert!(!does(&Request::Serve("0:1".to_owned()), None, &mut mounted));
    }

    #[test]
    fn a_mounter_for_the_fuse_driver_does_not_mount() {
        let options = MountOptions::default();
        let named = format!("bcow:{}:disk", std::process::id());
        let refused = |may_mount| {
            let task = Task {
                may_mount,
                ..task(&options)
            };
            let done = execute(wanted("ext4", &named), null(), task, &mut None);
            done.unwrap_err().to_string()
        };
        // What it tries to mount is no hidden mount.
        assert_ne!(refused(true), refused(false));
        assert_eq!(refused(false), broken(Errno::PROTO).to_string());
    }

    #[test]
    fn a_mounter_answers_for_callers_and_ends_with_its_socket() {
        let (own, other) = packets::pair().unwrap();
        let serving = thread::spawn(move || {
            serve(&other, task(&MountOptions::default())).unwrap();
        });
        let mounter = Mounter::at(own);
        let (asking, of_mounter) = UnixStream::pair().unwrap();
        let request = Request::Serve("0:0".to_owned());
        send(&mounter.socket.lock(), &request, &[of_mounter.as_fd()]).unwrap();
        drop(of_mounter);
        // A request that is not answered does not disturb the next one.
        send(&mounter.socket.lock(), &request, &[]).unwrap();
        assert_eq!(mounter.unmount(), Unmounted::Stays);
        let callers = Callers::new(asking);
        assert!(callers.ask(std::process::id()).unwrap().is_some());
        drop(mounter);
        serving.join().unwrap();
    }

    #[test]
    fn an_error_crosses_to_the_other_process_with_its_cause_and_its_hint() {
        let (own, other) = packets::pair().unwrap();
        let error = MountError::Kernel(bcow_mount::Error::Grow {
            kind: "ext4",
            source: Errno::PERM.into(),
        });
        packets::send(&other, &serde_json::to_vec(&failure(&error)).unwrap(), &[]).unwrap();
        let mounter = Mounter::at(own);
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
