//! Bytes and meaning of the NBD protocol, as its document ("doc/proto.md" of the NBD project) has them: numbers,
//! requests, replies. Big-endian throughout. No I/O.

/// First eight bytes a server says: "NBDMAGIC".
pub const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// What each option begins with: "IHAVEOPT".
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// What each reply to an option begins with.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// What a request begins with.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// What a request with extended headers begins with.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// What a simple reply begins with.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// What a chunk of a structured reply begins with.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// What a chunk of a reply with extended headers begins with.
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Names of exports and queries are no longer than this.
pub const MAX_STRING_BYTES: usize = 4096;
/// Most bytes of content that one request carries in either direction.
pub const MAX_PAYLOAD_BYTES: u32 = 32 << 20;

/// Flags of the server's greeting.
pub mod handshake_flag {
    /// The server speaks fixed newstyle.
    pub const FIXED_NEWSTYLE: u16 = 1;
    /// The server can leave out the 124 zeros after EXPORT_NAME.
    pub const NO_ZEROES: u16 = 2;
}

/// Flags of the client's answer to the greeting.
pub mod client_flag {
    /// The client speaks fixed newstyle.
    pub const FIXED_NEWSTYLE: u32 = 1;
    /// The client does not want the 124 zeros.
    pub const NO_ZEROES: u32 = 2;
}

/// Options of the handshake.
pub mod option {
    /// Take this export, or be disconnected.
    pub const EXPORT_NAME: u32 = 1;
    /// End the session.
    pub const ABORT: u32 = 2;
    /// List the exports.
    pub const LIST: u32 = 3;
    /// Begin TLS.
    pub const STARTTLS: u32 = 5;
    /// Tell about an export.
    pub const INFO: u32 = 6;
    /// Take this export.
    pub const GO: u32 = 7;
    /// Reply in chunks.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// List metadata contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Choose metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Requests and replies with 64-bit lengths.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Types of replies to options.
pub mod option_reply {
    const ERROR: u32 = 1 << 31;

    /// Done.
    pub const ACK: u32 = 1;
    /// One export of a list.
    pub const SERVER: u32 = 2;
    /// One piece of information.
    pub const INFO: u32 = 3;
    /// One metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// The server does not know the option.
    pub const ERR_UNSUP: u32 = ERROR | 1;
    /// The server's owner does not want it.
    pub const ERR_POLICY: u32 = ERROR | 2;
    /// The option makes no sense, here or at all.
    pub const ERR_INVALID: u32 = ERROR | 3;
    /// The client must begin TLS first.
    pub const ERR_TLS_REQD: u32 = ERROR | 5;
    /// There is no such export.
    pub const ERR_UNKNOWN: u32 = ERROR | 6;
    /// The server is ending.
    pub const ERR_SHUTDOWN: u32 = ERROR | 7;
    /// The option's data are too long.
    pub const ERR_TOO_BIG: u32 = ERROR | 9;
}

/// Types of information about an export.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// The name by which the server calls it.
    pub const NAME: u16 = 1;
    /// A description for people.
    pub const DESCRIPTION: u16 = 2;
    /// Limits on sizes of requests.
    pub const BLOCK_SIZE: u16 = 3;
}

/// What an export can do.
pub mod transmission_flag {
    /// Always there.
    pub const HAS_FLAGS: u16 = 1;
    /// Cannot be written.
    pub const READ_ONLY: u16 = 1 << 1;
    /// Knows FLUSH.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// Knows the flag FUA.
    pub const SEND_FUA: u16 = 1 << 3;
    /// Knows TRIM.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// Knows WRITE_ZEROES.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// Knows the flag DF.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection covers what others wrote.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// Knows CACHE.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// Knows the flag FAST_ZERO.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Flags of requests.
pub mod command_flag {
    /// Durable before the reply.
    pub const FUA: u16 = 1;
    /// Zeros that take space.
    pub const NO_HOLE: u16 = 1 << 1;
    /// The read's content in one chunk.
    pub const DF: u16 = 1 << 2;
    /// One extent of a status.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Zeros faster than a write, or not at all.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// A payload of the request's length follows (extended headers).
    pub const PAYLOAD_LEN: u16 = 1 << 5;
    /// All of them.
    pub const KNOWN: u16 = FUA | NO_HOLE | DF | REQ_ONE | FAST_ZERO | PAYLOAD_LEN;
}

/// Types of reply chunks.
pub mod chunk {
    /// Nothing but the flag that it is the last.
    pub const NONE: u16 = 0;
    /// Content.
    pub const OFFSET_DATA: u16 = 1;
    /// Zeros.
    pub const OFFSET_HOLE: u16 = 2;
    /// Extents of one metadata context.
    pub const BLOCK_STATUS: u16 = 5;
    /// Extents of one metadata context, with 64-bit lengths.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// An error.
    pub const ERROR: u16 = (1 << 15) | 1;
    /// An error, and where.
    pub const ERROR_OFFSET: u16 = (1 << 15) | 2;
    /// Flag: the last chunk of the reply.
    pub const DONE: u16 = 1;
}

/// Extents of the context `base:allocation`.
pub mod allocation {
    /// Takes no space.
    pub const HOLE: u32 = 1;
    /// Reads as zeros.
    pub const ZERO: u32 = 2;
}

/// Error numbers as they go over the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Errno {
    /// Not permitted.
    Perm = 1,
    /// Input or output failed.
    Io = 5,
    /// No memory.
    NoMemory = 12,
    /// Makes no sense.
    Invalid = 22,
    /// No space left.
    NoSpace = 28,
    /// Too large.
    Overflow = 75,
    /// Not supported.
    NotSupported = 95,
    /// The server is ending.
    Shutdown = 108,
}

/// What a request wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Content.
    Read,
    /// Put content.
    Write,
    /// End the session; has no reply.
    Disconnect,
    /// Make what was written durable.
    Flush,
    /// Give space back.
    Trim,
    /// Read ahead.
    Cache,
    /// Put zeros.
    WriteZeroes,
    /// What is known of a range.
    BlockStatus,
    /// Something this server does not know.
    Unknown(u16),
}

impl Command {
    /// From its number.
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

/// How requests and replies look in a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Framing {
    /// Requests of 28 bytes, each with one reply.
    #[default]
    Simple,
    /// The same requests; replies in chunks.
    Structured,
    /// Requests and chunks of 32 bytes, with 64-bit lengths.
    Extended,
}

impl Framing {
    /// Bytes of a request without its payload.
    pub fn request_bytes(self) -> usize {
        match self {
            Framing::Simple | Framing::Structured => 28,
            Framing::Extended => 32,
        }
    }

    /// Bytes of the header of a chunk that carries a read's content, with the offset that stands before the content.
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
    /// What is wanted.
    pub command: Command,
    /// Stands in the reply.
    pub cookie: u64,
    /// First byte.
    pub offset: u64,
    /// Bytes, of the range or of the payload.
    pub length: u64,
}

impl Request {
    /// Decodes a header; `None` if it does not begin with the magic or is too short.
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

    /// Whether a flag is set.
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

/// Takes two bytes off the front.
pub fn take_u16(bytes: &mut &[u8]) -> Option<u16> {
    let (first, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(u16::from_be_bytes(*first))
}

/// Takes four bytes off the front.
pub fn take_u32(bytes: &mut &[u8]) -> Option<u32> {
    let (first, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(u32::from_be_bytes(*first))
}

/// Takes eight bytes off the front.
pub fn take_u64(bytes: &mut &[u8]) -> Option<u64> {
    let (first, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(u64::from_be_bytes(*first))
}

/// Takes `length` bytes off the front.
pub fn take_bytes<'a>(bytes: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let (first, rest) = bytes.split_at_checked(length)?;
    *bytes = rest;
    Some(first)
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
