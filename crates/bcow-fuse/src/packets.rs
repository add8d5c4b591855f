//! Packets with descriptors, on a pair of sockets between this process and one that it has started.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};

/// Most bytes of a packet: some paths and options.
const MAX_BYTES: usize = 64 << 10;
/// Most descriptors of a packet.
const MAX_DESCRIPTORS: usize = 2;

/// A packet that was received.
#[derive(Debug)]
pub(crate) struct Packet {
    pub(crate) bytes: Vec<u8>,
    pub(crate) descriptors: Vec<OwnedFd>,
}

/// A new pair of sockets.
pub(crate) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (flags, kind) = (SocketFlags::CLOEXEC, SocketType::SEQPACKET);
    Ok(rustix::net::socketpair(
        AddressFamily::UNIX,
        kind,
        flags,
        None,
    )?)
}

/// Sends a packet, which is not empty. A process in a sandbox can send only those without
/// descriptors.
pub(crate) fn send(
    socket: &OwnedFd,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    if descriptors.is_empty() {
        retry(|| rustix::net::send(socket, bytes, SendFlags::NOSIGNAL))?;
        return Ok(());
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(descriptors));
    let part = [IoSlice::new(bytes)];
    retry(|| rustix::net::sendmsg(socket, &part, &mut control, SendFlags::NOSIGNAL))?;
    Ok(())
}

/// Waits for a packet; `None` when the other end is closed.
pub(crate) fn receive(socket: &OwnedFd) -> io::Result<Option<Packet>> {
    // Looks at the length first: it takes time to fill a buffer for the longest packet with zeros.
    let flags = RecvFlags::PEEK | RecvFlags::TRUNC;
    let mut no_bytes: [u8; 0] = [];
    let (_, length) = retry(|| rustix::net::recv(socket, &mut no_bytes, flags))?;
    let mut bytes = vec![0; length.min(MAX_BYTES)];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut part = [IoSliceMut::new(&mut bytes)];
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = retry(|| rustix::net::recvmsg(socket, &mut part, &mut control, flags))?;
    let descriptors = control.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(received) => received.collect(),
        _ => Vec::new(),
    });
    let descriptors = descriptors.collect();
    bytes.truncate(received.bytes);
    let is_end = bytes.is_empty();
    Ok((!is_end).then_some(Packet { bytes, descriptors }))
}

fn retry<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            done => return Ok(done?),
        }
    }
}
