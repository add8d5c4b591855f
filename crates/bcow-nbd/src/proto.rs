//! The encoding of the NBD protocol as in "doc/proto.md" of the NBD project: constants, requests
//! and replies. All numbers are big-endian. This module does no I/O.

/// First eight bytes of the server's greeting: "NBDMAGIC".
pub const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Start of each option: "IHAVEOPT".
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Start of each reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Start of a request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Start of a request with an extended header.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// Start of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Start of a chunk of a structured reply.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// Start of a chunk of a reply with an extended header.
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Longest name of an export, and longest query, in bytes.
pub const MAX_STRING_BYTES: usize = 4096;
/// Largest payload of a request or a reply, in bytes.
pub const MAX_PAYLOAD_BYTES: u32 = 32 << 20;

/// Handshake flags of the server.
pub mod handshake_flag {
    /// The server uses the fixed newstyle handshake.
    pub const FIXED_NEWSTYLE: u16 = 1;
    /// The server can omit the 124 zero bytes after EXPORT_NAME.
    pub const NO_ZEROES: u16 = 2;
}

/// Flags of the client's reply to the greeting.
pub mod client_flag {
    /// The client uses the fixed newstyle handshake.
    pub const FIXED_NEWSTYLE: u32 = 1;
    /// The client does not want the 124 zero bytes.
    pub const NO_ZEROES: u32 = 2;
}

/// Options of the handshake.
pub mod option {
    /// Select an export; the server disconnects on an error.
    pub const EXPORT_NAME: u32 = 1;
    /// End the session.
    pub const ABORT: u32 = 2;
    /// List the exports.
    pub const LIST: u32 = 3;
    /// Start TLS.
    pub const STARTTLS: u32 = 5;
    /// Get information about an export.
    pub const INFO: u32 = 6;
    /// Select an export.
    pub const GO: u32 = 7;
    /// Use structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// List metadata contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Select metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Use requests and replies with 64-bit lengths.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Types of replies to options.
pub mod option_reply {
    const ERROR: u32 = 1 << 31;

    /// Success, or the end of a list.
    pub const ACK: u32 = 1;
    /// One export of a list.
    pub const SERVER: u32 = 2;
    /// One piece of information.
    pub const INFO: u32 = 3;
    /// One metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// The server does not support the option.
    pub const ERR_UNSUP: u32 = ERROR | 1;
    /// The server's configuration forbids the option.
    pub const ERR_POLICY: u32 = ERROR | 2;
    /// The option or its data is invalid.
    pub const ERR_INVALID: u32 = ERROR | 3;
    /// The client must start TLS first.
    pub const ERR_TLS_REQD: u32 = ERROR | 5;
    /// The export does not exist.
    pub const ERR_UNKNOWN: u32 = ERROR | 6;
    /// The server is stopping.
    pub const ERR_SHUTDOWN: u32 = ERROR | 7;
    /// The data of the option is too long.
    pub const ERR_TOO_BIG: u32 = ERROR | 9;
}

/// Types of information about an export.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// The canonical name of the export.
    pub const NAME: u16 = 1;
    /// A description for users.
    pub const DESCRIPTION: u16 = 2;
    /// Limits of the sizes of requests.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Properties of an export.
pub mod transmission_flag {
    /// Always set.
    pub const HAS_FLAGS: u16 = 1;
    /// The export is read-only.
    pub const READ_ONLY: u16 = 1 << 1;
    /// FLUSH is supported.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// The flag FUA is supported.
    pub const SEND_FUA: u16 = 1 << 3;
    /// TRIM is supported.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// WRITE_ZEROES is supported.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// The flag DF is supported.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection covers writes on all connections.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// CACHE is supported.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// The flag FAST_ZERO is supported.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Flags of requests.
pub mod command_flag {
    /// Make the data durable before the reply.
    pub const FUA: u16 = 1;
    /// Allocate space for the zeros.
    pub const NO_HOLE: u16 = 1 << 1;
    /// Send the whole content in one chunk.
    pub const DF: u16 = 1 << 2;
    /// Return only one extent.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Fail if zeroing is not faster than a write.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// A payload of the length in the header follows (extended headers).
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Types of reply chunks.
pub mod chunk {
    /// No content; only carries the flag `DONE`.
    pub const NONE: u16 = 0;
    /// Content of a read.
    pub const OFFSET_DATA: u16 = 1;
    /// A range of zeros in a read.
    pub const OFFSET_HOLE: u16 = 2;
    /// Extents of one metadata context.
    pub const BLOCK_STATUS: u16 = 5;
    /// Extents of one metadata context, with 64-bit lengths.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    pub const ERROR: u16 = (1 << 15) | 1;
    pub const ERROR_OFFSET: u16 = (1 << 15) | 2;
    /// Flag: the last chunk of the reply.
    pub const DONE: u16 = 1;
}

/// Flags of extents in the context `base:allocation`.
pub mod allocation {
    /// The extent takes no space.
    pub const HOLE: u32 = 1;
    /// The extent reads as zeros.
    pub const ZERO: u32 = 2;
}

/// Error numbers of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Errno {
    /// Not permitted.
    Perm = 1,
    /// I/O error.
    Io = 5,
    /// Out of memory.
    NoMemory = 12,
    /// Invalid request.
    Invalid = 22,
    /// No space left.
    NoSpace = 28,
    /// The value is too large.
    Overflow = 75,
    NotSupported = 95,
    /// The server is stopping.
    Shutdown = 108,
}

/// The command of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Read content.
    Read,
    /// Write content.
    Write,
    /// End the session. It has no reply.
    Disconnect,
    /// Make earlier writes durable.
    Flush,
    /// Discard a range.
    Trim,
    /// Read a range ahead.
    Cache,
    WriteZeroes,
    /// Get the status of a range in the selected metadata contexts.
    BlockStatus,
    /// A command that this server does not support.
    Unknown(u16),
}

impl Command {
    /// Converts from the number of the protocol.
    pub fn from_wire(number: u16) -> Self {
        match number {
            0 => Command::Read,
            1 => Command::Write,
            2 => Command::Disconnect,
            3 => Command::Flush,
            4 => Command::Trim,
            5 => Command::Cache,
            6 => Command::WriteZeroes,
            7 => Command::BlockStatus,
            other => Command::Unknown(other),
        }
    }
}

/// Format of requests and replies in a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Framing {
    /// Requests with 28-byte headers; one reply for each.
    #[default]
    Simple,
    /// Requests as in `Simple`; replies in chunks.
    Structured,
    /// Requests and chunks with 32-byte headers and 64-bit lengths.
    Extended,
}

impl Framing {
    /// Size of a request without its payload, in bytes.
    pub fn request_bytes(self) -> usize {
        match self {
            Framing::Simple | Framing::Structured => 28,
            Framing::Extended => 32,
        }
    }

    /// Size of the header of a content chunk, in bytes, with the offset field that precedes the
    /// content.
    pub fn data_header_bytes(self) -> usize {
        match self {
            Framing::Simple => 16,
            Framing::Structured => 20 + 8,
            Framing::Extended => 32 + 8,
        }
    }
}

/// A request without its payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// See [`command_flag`].
    pub flags: u16,
    pub command: Command,
    /// Identifies the request; the reply repeats it.
    pub cookie: u64,
    /// Offset of the first byte.
    pub offset: u64,
    /// Length of the range or of the payload, in bytes.
    pub length: u64,
}

impl Request {
    /// Decodes a header. `None` if `bytes` is too short or does not start with the magic number.
    pub fn decode(framing: Framing, bytes: &[u8]) -> Option<Request> {
        let mut bytes = bytes.get(..framing.request_bytes())?;
        let magic = take_u32(&mut bytes)?;
        let flags = take_u16(&mut bytes)?;
        let command = Command::from_wire(take_u16(&mut bytes)?);
        let cookie = take_u64(&mut bytes)?;
        let offset = take_u64(&mut bytes)?;
        let (expected, length) = match framing {
            Framing::Simple | Framing::Structured => {
                (REQUEST_MAGIC, u64::from(take_u32(&mut bytes)?))
            }
            Framing::Extended => (EXTENDED_REQUEST_MAGIC, take_u64(&mut bytes)?),
        };
        (magic == expected).then_some(Request {
            flags,
            command,
            cookie,
            offset,
            length,
        })
    }

    /// Whether the flag is set.
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

/// Removes a 16-bit number from the front; `None` if `bytes` is too short.
pub fn take_u16(bytes: &mut &[u8]) -> Option<u16> {
    let (first, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(u16::from_be_bytes(*first))
}

/// Removes a 32-bit number from the front; `None` if `bytes` is too short.
pub fn take_u32(bytes: &mut &[u8]) -> Option<u32> {
    let (first, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(u32::from_be_bytes(*first))
}

/// Removes a 64-bit number from the front; `None` if `bytes` is too short.
pub fn take_u64(bytes: &mut &[u8]) -> Option<u64> {
    let (first, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(u64::from_be_bytes(*first))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compact(length: u32) -> Vec<u8> {
        let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
        bytes.extend([0, 4, 0, 0]);
        bytes.extend(7u64.to_be_bytes());
        bytes.extend(8u64.to_be_bytes());
        bytes.extend(length.to_be_bytes());
        bytes
    }

    #[test]
    fn compact_request_is_decoded() {
        let request = Request::decode(Framing::Structured, &compact(9)).unwrap();
        let expected = Request {
            flags: command_flag::DF,
            command: Command::Read,
            cookie: 7,
            offset: 8,
            length: 9,
        };
        assert_eq!(request, expected);
    }

    #[test]
    fn wrong_magic_and_short_headers_are_no_requests() {
        let bytes = compact(9);
        assert_eq!(Request::decode(Framing::Simple, &bytes[..27]), None);
        assert_eq!(Request::decode(Framing::Extended, &bytes), None);
        let mut bytes = bytes;
        bytes[0] ^= 1;
        assert_eq!(Request::decode(Framing::Simple, &bytes), None);
    }

    #[test]
    fn headers_have_the_sizes_of_the_protocol() {
        let sizes = [Framing::Simple, Framing::Structured, Framing::Extended]
            .map(|framing| (framing.request_bytes(), framing.data_header_bytes()));
        assert_eq!(sizes, [(28, 16), (28, 28), (32, 40)]);
    }
}
