//! The socket between a supervisor and the process of its pool. Each packet is a JSON document,
//! some with descriptors.
//!
//! The two may be of different versions of bcow: a packet that a reader does not know is ignored,
//! as are fields that it does not know.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use serde::{Deserialize, Serialize};

use crate::asked::Bytes;

/// Environment variable of a process that a supervisor has started. Its standard input is the
/// socket.
pub const MARK: &str = "BCOW_POOL_IS_KEPT";

/// The exit status with which a process asks for another one in its place.
pub const AGAIN: u8 = 75;

/// Most bytes of a packet. All are much shorter.
const MAX_BYTES: usize = 64 << 10;
/// Most descriptors of a packet.
const MAX_DESCRIPTORS: usize = 2;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "packet", rename_all = "kebab-case")]
pub enum Packet {
    /// To the process, first: the socket of the pool, with its descriptor, and the one for metrics
    /// if there is one.
    Socket {
        /// Start time of the pool in seconds since 1970.
        since: u64,
        /// The processes that the pool had before.
        restarts: u64,
        #[serde(rename = "keeper")]
        supervisor: u32,
        /// The log file: an absolute path.
        log_file: Option<Bytes>,
        /// Whether the supervisor knows [`Packet::Shared`]: an earlier version does not.
        #[serde(default)]
        keeps_shared: bool,
    },
    /// To the supervisor: a mount to keep, with its connection to the kernel and its record. To the
    /// process: a mount to take over, with the same.
    #[serde(alias = "mount")]
    Keep {
        /// The number of the mount.
        number: u64,
        /// The device number of the mount.
        device: Option<String>,
        /// Whether the kernel driver serves the mount.
        #[serde(default)]
        is_disk: bool,
    },
    /// To the process: it has everything, and begins.
    Begin,
    /// To the process: a signal for the pool. To the supervisor: a signal that this process leaves
    /// to the next one.
    End {
        /// The name of the signal.
        signal: String,
    },
    /// To the supervisor: the pool takes requests.
    Ready,
    /// After [`Packet::Keep`]: the ledger of a mount with an upper, or the hidden mount of one with
    /// the kernel driver.
    #[serde(rename = "ledger")]
    Companion {
        /// The number of the mount.
        number: u64,
    },
    /// After [`Packet::Keep`]: the file of a disk, which keeps its lock, and its ledger.
    Disk {
        /// The number of the mount.
        number: u64,
    },
    /// After [`Packet::Keep`]: the pipe for the outcome of a mount with an upper or a disk.
    Outcome {
        /// The number of the mount.
        number: u64,
    },
    /// After [`Packet::Keep`]: the root directory of the upper, and its lock file, which stays
    /// locked.
    Upper {
        /// The number of the mount.
        number: u64,
    },
    /// To the supervisor: the mount has ended.
    Release {
        /// The number of the mount.
        number: u64,
    },
    /// To the supervisor, before each new slot is used, and to the process: the hidden mount of the
    /// files that mounts share, with its connection to the kernel and its descriptor.
    Shared {
        /// The flags of the FUSE protocol that are in use.
        agreed: u64,
        /// The slot of the next image.
        next_slot: u32,
    },
    /// To an opener: open a file, with the descriptor of the hidden mount and a socket for the
    /// answer.
    Open {
        /// The name of the file.
        name: String,
    },
    /// From an opener: the file, with its descriptor.
    Opened {
        /// The error number; 0 if there is a file.
        errno: i32,
    },
    /// A packet of a later version.
    #[serde(other)]
    Unknown,
}

/// One end of the socket.
#[derive(Debug)]
pub struct Link(OwnedFd);

/// Whether to wait for a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Until there is one, or the other end is closed.
    Yes,
    /// Fail with [`io::ErrorKind::WouldBlock`].
    No,
}

impl Link {
    /// Both ends.
    pub fn pair() -> io::Result<(Link, Link)> {
        let flags = SocketFlags::CLOEXEC;
        let kind = SocketType::SEQPACKET;
        let (one, other) = rustix::net::socketpair(AddressFamily::UNIX, kind, flags, None)?;
        Ok((Link(one), Link(other)))
    }

    /// The end of this process, if a supervisor has started it. Other programs that this process
    /// starts do not inherit it.
    pub fn of_this_process() -> Option<Link> {
        std::env::var_os(MARK)?;
        let input = std::io::stdin();
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&input).ok()?.st_mode);
        // A shell may have exported the variable by accident.
        if kind != FileType::Socket {
            return None;
        }
        let link = Link(input.as_fd().try_clone_to_owned().ok()?);
        let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        rustix::stdio::dup2_stdin(null.ok()?).ok()?;
        Some(link)
    }

    /// Another descriptor of the same end.
    pub fn try_clone(&self) -> io::Result<Link> {
        self.0.try_clone().map(Link)
    }

    pub fn send(&self, packet: &Packet, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let bytes = serde_json::to_vec(packet)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        loop {
            let part = [IoSlice::new(&bytes)];
            match rustix::net::sendmsg(&self.0, &part, &mut control, SendFlags::NOSIGNAL) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Receives a packet and its descriptors; `None` if the other end is closed.
    pub fn receive(&self, wait: Wait) -> io::Result<Option<(Packet, Vec<OwnedFd>)>> {
        let mut bytes = vec![0; MAX_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = match wait {
            Wait::Yes => RecvFlags::CMSG_CLOEXEC,
            Wait::No => RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
        };
        let received = loop {
            let mut part = [IoSliceMut::new(&mut bytes)];
            match rustix::net::recvmsg(&self.0, &mut part, &mut control, flags) {
                // The process of the other end has ended, and had not read all packets. The kernel
                // reports this once; the packets that it had sent follow.
                Err(Errno::INTR | Errno::CONNRESET) => {}
                received => break received?,
            }
        };
        let mut descriptors = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                descriptors.extend(received);
            }
        }
        match received.bytes {
            0 => Ok(None),
            count => Ok(Some((
                serde_json::from_slice(&bytes[..count])?,
                descriptors,
            ))),
        }
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<OwnedFd> for Link {
    fn from(socket: OwnedFd) -> Self {
        Link(socket)
    }
}

impl From<Link> for OwnedFd {
    fn from(link: Link) -> Self {
        link.0
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    #[test]
    fn packets_keep_their_order_and_their_descriptors() {
        let (supervisor, process) = Link::pair().unwrap();
        let (mut reader, writer) = io::pipe().unwrap();
        let keep = Packet::Keep {
            number: 7,
            device: Some("0:52".to_owned()),
            is_disk: false,
        };
        process.send(&Packet::Ready, &[]).unwrap();
        process.send(&keep, &[writer.as_fd()]).unwrap();
        drop((process, writer));
        let receive = || supervisor.receive(Wait::Yes).unwrap();
        assert!(matches!(receive(), Some((Packet::Ready, none)) if none.is_empty()));
        let (packet, mut descriptors) = receive().unwrap();
        assert_eq!(packet, keep);
        let mut writer = std::fs::File::from(descriptors.remove(0));
        writer.write_all(b"x").unwrap();
        drop(writer);
        let mut bytes = Vec::new();
        reader.read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes, b"x");
        assert!(descriptors.is_empty());
        assert!(receive().is_none());
    }

    #[test]
    fn packets_of_later_versions_are_ignored() {
        let later = br#"{"packet":"sing","more":1}"#;
        assert_eq!(
            serde_json::from_slice::<Packet>(later).unwrap(),
            Packet::Unknown
        );
        let more = br#"{"packet":"release","number":7,"more":1}"#;
        let expected = Packet::Release { number: 7 };
        assert_eq!(serde_json::from_slice::<Packet>(more).unwrap(), expected);
        // An earlier version does not know mounts with the kernel driver, and has another name for
        // a mount to take over.
        for earlier in [
            br#"{"packet":"keep","number":7,"device":null}"#.as_slice(),
            br#"{"packet":"mount","number":7,"device":null}"#,
        ] {
            let expected = Packet::Keep {
                number: 7,
                device: None,
                is_disk: false,
            };
            assert_eq!(serde_json::from_slice::<Packet>(earlier).unwrap(), expected);
        }
    }

    #[test]
    fn packets_arrive_also_if_the_sender_has_not_read_its_own() {
        let (supervisor, process) = Link::pair().unwrap();
        let end = Packet::End {
            signal: "SIGTERM".to_owned(),
        };
        supervisor.send(&end, &[]).unwrap();
        let release = Packet::Release { number: 7 };
        process.send(&release, &[]).unwrap();
        drop(process);
        let (packet, _) = supervisor.receive(Wait::No).unwrap().unwrap();
        assert_eq!(packet, release);
        assert!(supervisor.receive(Wait::No).unwrap().is_none());
    }

    #[test]
    fn an_empty_socket_is_no_end() {
        let (supervisor, process) = Link::pair().unwrap();
        let error = supervisor.receive(Wait::No).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        drop(process);
        assert!(supervisor.receive(Wait::No).unwrap().is_none());
    }
}
