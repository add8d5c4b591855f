//! Configures the devices of the kernel's nbd driver over generic netlink (linux/nbd-netlink.h).
//!
//! The driver gets sockets that are past the handshake, and the size and flags of the export.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with,
};

use crate::error::Error;

const NLMSG_ERROR: u16 = 2;
const REQUEST_WITH_ACK: u16 = 1 | 4;
const HEADER_BYTES: usize = 16 + 4;

/// The generic netlink controller, which returns the numbers of the other families.
const CONTROL: u16 = 0x10;
const CONTROL_GET_FAMILY: u8 = 3;
const CONTROL_FAMILY_ID: u16 = 1;
const CONTROL_FAMILY_NAME: u16 = 2;

/// Type flag of a nested attribute.
const NESTED: u16 = 1 << 15;

mod command {
    pub(super) const CONNECT: u8 = 1;
    pub(super) const DISCONNECT: u8 = 2;
}

mod attribute {
    pub(super) const INDEX: u16 = 1;
    pub(super) const SIZE_BYTES: u16 = 2;
    pub(super) const BLOCK_SIZE_BYTES: u16 = 3;
    pub(super) const TIMEOUT: u16 = 4;
    pub(super) const SERVER_FLAGS: u16 = 5;
    pub(super) const CLIENT_FLAGS: u16 = 6;
    pub(super) const SOCKETS: u16 = 7;
    pub(super) const DEAD_CONN_TIMEOUT: u16 = 8;
    pub(super) const SOCK_ITEM: u16 = 1;
    pub(super) const SOCK_FD: u16 = 1;
}

/// Client flag: disconnect when the last program closes the device.
const DISCONNECT_ON_CLOSE: u64 = 1 << 1;

/// The configuration of a device to attach.
#[derive(Debug)]
pub struct Connect<'a> {
    /// Number of the device: 3 for /dev/nbd3.
    pub index: u32,
    /// Size in bytes.
    pub size: u64,
    /// Logical block size in bytes: a power of two from 512 to 4096.
    pub block_bytes: u64,
    /// See [`crate::proto::transmission_flag`].
    pub flags: u16,
    /// Connections past the handshake. The kernel takes its own references to them.
    pub sockets: &'a [BorrowedFd<'a>],
    /// How long a request may take before the kernel treats its connection as dead; `None` for no
    /// limit.
    pub timeout: Option<Duration>,
    /// How long the kernel waits for a new connection when all are dead; `None` for no wait.
    pub dead_timeout: Option<Duration>,
    /// Whether the kernel disconnects the device when the last program closes it.
    pub until_closed: bool,
}

impl Connect<'_> {
    /// Encodes the attributes of the message.
    fn attributes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        put(&mut out, attribute::INDEX, &self.index.to_ne_bytes());
        put(&mut out, attribute::SIZE_BYTES, &self.size.to_ne_bytes());
        let block = self.block_bytes.to_ne_bytes();
        put(&mut out, attribute::BLOCK_SIZE_BYTES, &block);
        let flags = u64::from(self.flags).to_ne_bytes();
        put(&mut out, attribute::SERVER_FLAGS, &flags);
        if self.until_closed {
            let flags = DISCONNECT_ON_CLOSE.to_ne_bytes();
            put(&mut out, attribute::CLIENT_FLAGS, &flags);
        }
        for (kind, timeout) in [
            (attribute::TIMEOUT, self.timeout),
            (attribute::DEAD_CONN_TIMEOUT, self.dead_timeout),
        ] {
            if let Some(timeout) = timeout {
                put(&mut out, kind, &timeout.as_secs().to_ne_bytes());
            }
        }
        let mut items = Vec::new();
        for socket in self.sockets {
            let mut item = Vec::new();
            // Descriptors are never negative.
            let number = socket.as_raw_fd() as u32;
            put(&mut item, attribute::SOCK_FD, &number.to_ne_bytes());
            put(&mut items, attribute::SOCK_ITEM | NESTED, &item);
        }
        put(&mut out, attribute::SOCKETS | NESTED, &items);
        out
    }
}

/// A netlink connection to the driver.
pub struct Driver {
    socket: OwnedFd,
    family: u16,
    sequence: u32,
}

/// Why the driver refused a command.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    #[error("the kernel's nbd driver is not loaded")]
    NotLoaded,
    /// The device is already attached, or is being detached.
    #[error("/dev/nbd{0} is in use")]
    Busy(u32),
    /// The device is not attached.
    #[error("/dev/nbd{0} is not attached")]
    NotAttached(u32),
    #[error("the kernel lets only root attach and detach devices")]
    NotPermitted,
    #[error(transparent)]
    Other(#[from] Error),
}

impl Driver {
    /// Connects to the driver.
    pub fn open() -> Result<Self, DriverError> {
        Driver::of_family(b"nbd\0")
    }

    fn of_family(family: &[u8]) -> Result<Self, DriverError> {
        let socket = socket_with(
            AddressFamily::NETLINK,
            // Netlink does not distinguish it from SOCK_RAW, which a sandbox refuses.
            SocketType::DGRAM,
            SocketFlags::CLOEXEC,
            Some(netlink::GENERIC),
        )
        .map_err(|errno| Error::host("open a netlink socket", errno))?;
        let mut driver = Driver {
            socket,
            family: CONTROL,
            sequence: 0,
        };
        let mut name = Vec::new();
        put(&mut name, CONTROL_FAMILY_NAME, family);
        let reply = match driver.request(CONTROL_GET_FAMILY, &name) {
            Ok(reply) => reply,
            Err(RequestError::Refused(Errno::NOENT)) => return Err(DriverError::NotLoaded),
            Err(error) => return Err(error.during("find the nbd driver").into()),
        };
        driver.family = attributes(&reply)
            .find(|(kind, _)| *kind == CONTROL_FAMILY_ID)
            .and_then(|(_, value)| value.try_into().ok())
            .map(u16::from_ne_bytes)
            .ok_or(DriverError::NotLoaded)?;
        Ok(driver)
    }

    /// Attaches a device. Programs can use the device when this returns.
    pub fn connect(&mut self, device: &Connect<'_>) -> Result<(), DriverError> {
        match self.request(command::CONNECT, &device.attributes()) {
            Ok(_) => Ok(()),
            Err(RequestError::Refused(Errno::BUSY)) => Err(DriverError::Busy(device.index)),
            Err(RequestError::Refused(Errno::PERM)) => Err(DriverError::NotPermitted),
            Err(error) => {
                let action = format!("attach /dev/nbd{}", device.index);
                Err(error.during(&action).into())
            }
        }
    }

    /// Detaches a device. The kernel completes the requests in flight first.
    pub fn disconnect(&mut self, index: u32) -> Result<(), DriverError> {
        let mut attributes = Vec::new();
        put(&mut attributes, attribute::INDEX, &index.to_ne_bytes());
        match self.request(command::DISCONNECT, &attributes) {
            Ok(_) => Ok(()),
            Err(RequestError::Refused(Errno::PERM)) => Err(DriverError::NotPermitted),
            Err(RequestError::Refused(Errno::INVAL | Errno::NOENT)) => {
                Err(DriverError::NotAttached(index))
            }
            Err(error) => {
                let action = format!("detach /dev/nbd{index}");
                Err(error.during(&action).into())
            }
        }
    }

    /// Sends a command and waits for its acknowledgement. Returns the attributes of the reply that
    /// came before it.
    fn request(&mut self, command: u8, attributes: &[u8]) -> Result<Vec<u8>, RequestError> {
        self.sequence += 1;
        let bytes = message(self.family, self.sequence, command, attributes);
        let kernel = SocketAddrNetlink::new(0, 0);
        sendto(&self.socket, &bytes, SendFlags::empty(), &kernel).map_err(RequestError::Failed)?;
        let mut buf = vec![0; 64 << 10];
        let mut reply = Vec::new();
        loop {
            let count = match recv(self.socket.as_fd(), &mut buf[..], RecvFlags::empty()) {
                Ok((count, _)) => count,
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(RequestError::Failed(errno)),
            };
            let mut rest = &buf[..count];
            while let Some((header, body)) = take_message(&mut rest) {
                if header.sequence != self.sequence {
                    continue;
                }
                if header.kind == NLMSG_ERROR {
                    return match body.first_chunk().map(|code| i32::from_ne_bytes(*code)) {
                        Some(0) => Ok(reply),
                        Some(code) => Err(RequestError::Refused(Errno::from_raw_os_error(-code))),
                        None => Err(RequestError::Failed(Errno::BADMSG)),
                    };
                }
                // Skip the command, its version and a reserved field.
                reply = body.get(4..).unwrap_or_default().to_vec();
            }
        }
    }
}

/// The failure of a command.
enum RequestError {
    Refused(Errno),
    Failed(Errno),
}

impl RequestError {
    fn during(self, action: &str) -> Error {
        let (RequestError::Refused(errno) | RequestError::Failed(errno)) = self;
        Error::host(action, io::Error::from(errno))
    }
}

struct Header {
    kind: u16,
    sequence: u32,
}

fn message(family: u16, sequence: u32, command: u8, attributes: &[u8]) -> Vec<u8> {
    let length = HEADER_BYTES + attributes.len();
    let mut out = Vec::with_capacity(length);
    out.extend((length as u32).to_ne_bytes());
    out.extend(family.to_ne_bytes());
    out.extend(REQUEST_WITH_ACK.to_ne_bytes());
    out.extend(sequence.to_ne_bytes());
    // The port number; the kernel fills it in.
    out.extend(0u32.to_ne_bytes());
    // The command, the first version of its family, and a reserved field.
    out.extend([command, 1, 0, 0]);
    out.extend(attributes);
    out
}

fn take_message<'a>(bytes: &mut &'a [u8]) -> Option<(Header, &'a [u8])> {
    let length = u32::from_ne_bytes(*bytes.first_chunk()?) as usize;
    let whole = bytes.get(..length).filter(|whole| whole.len() >= 16)?;
    let header = Header {
        kind: u16::from_ne_bytes([whole[4], whole[5]]),
        sequence: u32::from_ne_bytes([whole[8], whole[9], whole[10], whole[11]]),
    };
    *bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    Some((header, &whole[16..]))
}

/// Appends an attribute.
fn put(out: &mut Vec<u8>, kind: u16, value: &[u8]) {
    // Cannot overflow: values are far smaller than 64 KiB.
    out.extend(((4 + value.len()) as u16).to_ne_bytes());
    out.extend(kind.to_ne_bytes());
    out.extend(value);
    out.resize(out.len().next_multiple_of(4), 0);
}

/// Decodes the attributes of a message. Removes the flags from their types.
fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = u16::from_ne_bytes(*bytes.first_chunk()?) as usize;
        let whole = bytes.get(..length).filter(|whole| whole.len() >= 4)?;
        let kind = u16::from_ne_bytes([whole[2], whole[3]]);
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind & !NESTED, &whole[4..]))
    })
}

#[cfg(test)]
#[cfg(target_endian = "little")]
mod tests {
    use bcow::format::hex;

    use super::*;

    #[test]
    fn a_device_is_described_as_the_kernel_reads_it() {
        let (one, two) = std::os::unix::net::UnixStream::pair().unwrap();
        let sockets = [one.as_fd(), two.as_fd()];
        let device = Connect {
            index: 3,
            size: 1 << 30,
            block_bytes: 512,
            flags: 0x105,
            sockets: &sockets,
            timeout: Some(Duration::from_secs(30)),
            dead_timeout: None,
            until_closed: true,
        };
        let encoded = message(0x1b, 9, command::CONNECT, &device.attributes());
        let [one, two] = sockets.map(|socket| hex(&(socket.as_raw_fd() as u32).to_ne_bytes()));
        let expected = [
            // Length, family, flags, sequence, port; command and version.
            "74000000 1b00 0500 09000000 00000000 01 01 0000",
            "0800 0100 03000000",
            "0c00 0200 0000004000000000",
            "0c00 0300 0002000000000000",
            "0c00 0500 0501000000000000",
            "0c00 0600 0200000000000000",
            "0c00 0400 1e00000000000000",
            "1c00 0780",
            "0c00 0180 0800 0100",
            &one,
            "0c00 0180 0800 0100",
            &two,
        ];
        assert_eq!(hex(&encoded), expected.concat().replace(' ', ""));
    }

    #[test]
    fn answers_are_taken_apart_and_short_ones_do_no_harm() {
        let mut encoded = Vec::new();
        put(&mut encoded, CONTROL_FAMILY_NAME, b"nbd\0");
        put(&mut encoded, CONTROL_FAMILY_ID, &0x1bu16.to_ne_bytes());
        let bytes = message(CONTROL, 5, 1, &encoded);
        let mut rest = &bytes[..];
        let (header, body) = take_message(&mut rest).unwrap();
        assert_eq!((header.kind, header.sequence, rest.len()), (CONTROL, 5, 0));
        let found: Vec<(u16, &[u8])> = attributes(&body[4..]).collect();
        assert_eq!(found, [(2, &b"nbd\0"[..]), (1, &[0x1b, 0])]);
        for cut in 0..bytes.len() {
            assert!(take_message(&mut &bytes[..cut]).is_none());
            attributes(&bytes[..cut]).for_each(drop);
        }
        assert!(take_message(&mut &[0; 40][..]).is_none());
    }

    #[test]
    fn without_a_driver_the_error_says_so() {
        // Every kernel has the family `nlctrl`, and none has the other one.
        let found = Driver::of_family(b"nlctrl\0").map(|driver| driver.family);
        assert!(matches!(found, Ok(CONTROL)), "{found:?}");
        let found = Driver::of_family(b"bcow-no-driver\0").map(drop);
        assert!(matches!(found, Err(DriverError::NotLoaded)), "{found:?}");
    }
}
