//! Encodes replies. They are appended to one buffer, so that many small replies are sent at once,
//! and the content of a read is read directly into the send buffer.

use bcow::Error;

use crate::errno::Failure;
use crate::proto::{
    EXTENDED_REPLY_MAGIC, Framing, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, chunk,
};

/// Longest message of an error, in bytes.
const MESSAGE_BYTES: usize = 512;

/// A buffer of replies that are not sent yet.
pub(crate) struct Replies {
    framing: Framing,
    /// The length is the capacity. All bytes are initialised, so that content can be read into the
    /// buffer.
    buf: Vec<u8>,
    used: usize,
    /// Number of complete replies in the buffer.
    count: usize,
}

/// Whether a chunk is the last of its reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Last {
    Yes,
    No,
}

/// An extent of a metadata context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StatusExtent {
    pub(crate) length: u64,
    pub(crate) flags: u32,
}

impl Replies {
    pub(crate) fn new(framing: Framing) -> Self {
        Replies {
            framing,
            buf: Vec::new(),
            used: 0,
            count: 0,
        }
    }

    pub(crate) fn framing(&self) -> Framing {
        self.framing
    }

    /// The bytes to send.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.buf[..self.used]
    }

    /// Number of complete replies in the buffer.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Empties the buffer after its bytes were sent.
    pub(crate) fn clear(&mut self) {
        self.used = 0;
        self.count = 0;
    }

    /// Size of the buffer in bytes.
    pub(crate) fn capacity(&self) -> usize {
        self.buf.len()
    }

    /// Frees the memory of the buffer. The buffer must have no bytes to send.
    pub(crate) fn release(&mut self) {
        self.buf = Vec::new();
        self.clear();
    }

    /// Appends a reply of success without content.
    pub(crate) fn done(&mut self, cookie: u64) {
        match self.framing {
            Framing::Simple => self.simple(cookie, 0),
            Framing::Structured | Framing::Extended => {
                self.chunk(cookie, 0, Last::Yes, chunk::NONE, 0);
            }
        }
    }

    /// Appends an error reply, with the offset `at` of the error if it is known.
    pub(crate) fn failed(&mut self, cookie: u64, offset: u64, failure: &Failure, at: Option<u64>) {
        if self.framing == Framing::Simple {
            return self.simple(cookie, failure.errno as u32);
        }
        let message = truncated(&failure.message, MESSAGE_BYTES);
        let (kind, place) = match at {
            Some(_) => (chunk::ERROR_OFFSET, 8),
            None => (chunk::ERROR, 0),
        };
        let length = 4 + 2 + message.len() + place;
        self.chunk(cookie, offset, Last::Yes, kind, length as u64);
        self.put(&(failure.errno as u32).to_be_bytes());
        self.put(&(message.len() as u16).to_be_bytes());
        self.put(message.as_bytes());
        if let Some(at) = at {
            self.put(&at.to_be_bytes());
        }
    }

    /// Appends the content of a read, or one chunk of it. `fill` writes `length` bytes. If `fill`
    /// fails, the buffer is left as it was before.
    pub(crate) fn data(
        &mut self,
        cookie: u64,
        request_offset: u64,
        offset: u64,
        length: usize,
        last: Last,
        fill: impl FnOnce(&mut [u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let before = self.used;
        let data = before + self.framing.data_header_bytes();
        self.reserve(self.framing.data_header_bytes() + length);
        fill(&mut self.buf[data..data + length])?;
        match self.framing {
            Framing::Simple => self.simple(cookie, 0),
            Framing::Structured | Framing::Extended => {
                let bytes = length as u64 + 8;
                self.chunk(cookie, request_offset, last, chunk::OFFSET_DATA, bytes);
                self.put(&offset.to_be_bytes());
            }
        }
        self.used += length;
        Ok(())
    }

    /// Appends a range of zeros of a read. Not for simple replies, which cannot express it.
    pub(crate) fn hole(
        &mut self,
        cookie: u64,
        request_offset: u64,
        offset: u64,
        length: u32,
        last: Last,
    ) {
        self.chunk(cookie, request_offset, last, chunk::OFFSET_HOLE, 12);
        self.put(&offset.to_be_bytes());
        self.put(&length.to_be_bytes());
    }

    /// Appends the extents of one metadata context.
    pub(crate) fn status(
        &mut self,
        cookie: u64,
        request_offset: u64,
        context: u32,
        extents: &[StatusExtent],
        last: Last,
    ) {
        let count = extents.len();
        if self.framing == Framing::Extended {
            let bytes = 8 + 16 * count as u64;
            self.chunk(cookie, request_offset, last, chunk::BLOCK_STATUS_EXT, bytes);
            self.put(&context.to_be_bytes());
            self.put(&(count as u32).to_be_bytes());
            for extent in extents {
                self.put(&extent.length.to_be_bytes());
                self.put(&u64::from(extent.flags).to_be_bytes());
            }
        } else {
            let bytes = 4 + 8 * count as u64;
            self.chunk(cookie, request_offset, last, chunk::BLOCK_STATUS, bytes);
            self.put(&context.to_be_bytes());
            for extent in extents {
                // The request had a 32-bit length, and no extent is longer than the request.
                let length = u32::try_from(extent.length).unwrap_or(u32::MAX);
                self.put(&length.to_be_bytes());
                self.put(&extent.flags.to_be_bytes());
            }
        }
    }

    fn simple(&mut self, cookie: u64, errno: u32) {
        self.count += 1;
        self.put(&SIMPLE_REPLY_MAGIC.to_be_bytes());
        self.put(&errno.to_be_bytes());
        self.put(&cookie.to_be_bytes());
    }

    fn chunk(&mut self, cookie: u64, request_offset: u64, last: Last, kind: u16, bytes: u64) {
        let flags = match last {
            Last::Yes => chunk::DONE,
            Last::No => 0,
        };
        self.count += usize::from(last == Last::Yes);
        let extended = self.framing == Framing::Extended;
        let magic = if extended { EXTENDED_REPLY_MAGIC } else { STRUCTURED_REPLY_MAGIC };
        self.put(&magic.to_be_bytes());
        self.put(&flags.to_be_bytes());
        self.put(&kind.to_be_bytes());
        self.put(&cookie.to_be_bytes());
        if extended {
            self.put(&request_offset.to_be_bytes());
            self.put(&bytes.to_be_bytes());
        } else {
            // A chunk is always shorter than 4 GiB: pieces and messages have limits.
            self.put(&(bytes as u32).to_be_bytes());
        }
    }

    fn put(&mut self, bytes: &[u8]) {
        self.reserve(bytes.len());
        self.buf[self.used..self.used + bytes.len()].copy_from_slice(bytes);
        self.used += bytes.len();
    }

    fn reserve(&mut self, bytes: usize) {
        let needed = self.used + bytes;
        if self.buf.len() < needed {
            // Rare: the buffer keeps its size for later requests.
            let room = needed.next_multiple_of(16 << 10);
            self.buf.reserve_exact(room - self.buf.len());
            self.buf.resize(room, 0);
        }
    }
}

/// The longest prefix of `text` with at most `bytes` bytes.
pub(crate) fn truncated(text: &str, bytes: usize) -> &str {
    let mut end = bytes.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use bcow::format::hex;

    use super::*;
    use crate::proto::Errno;

    #[test]
    fn replies_look_as_the_protocol_says() {
        let mut replies = Replies::new(Framing::Simple);
        replies.done(1);
        assert_eq!(hex(replies.bytes()), "67446698000000000000000000000001");

        let mut replies = Replies::new(Framing::Structured);
        let filled = replies.data(2, 16, 16, 2, Last::Yes, |buf| {
            buf.copy_from_slice(b"ab");
            Ok(())
        });
        filled.unwrap();
        assert_eq!(
            hex(replies.bytes()),
            "668e33ef\
             0001\
             0001\
             0000000000000002\
             0000000a\
             0000000000000010\
             6162"
        );

        let mut replies = Replies::new(Framing::Extended);
        let extent = StatusExtent {
            length: 1 << 33,
            flags: 3,
        };
        replies.status(3, 4, 1, &[extent], Last::Yes);
        assert_eq!(
            hex(replies.bytes()),
            "6e8a278c\
             0001\
             0006\
             0000000000000003\
             0000000000000004\
             0000000000000018\
             00000001\
             00000001\
             0000000200000000\
             0000000000000003"
        );
    }

    #[test]
    fn nothing_of_content_that_could_not_be_read_is_sent() {
        let mut replies = Replies::new(Framing::Structured);
        replies.done(1);
        let before = replies.bytes().to_vec();
        let failed = replies.data(2, 0, 0, 100, Last::Yes, |_| {
            Err(Error::Unsupported("no".into()))
        });
        assert!(failed.is_err());
        assert_eq!(replies.bytes(), before);
    }

    #[test]
    fn an_error_says_where_and_what() {
        let mut replies = Replies::new(Framing::Structured);
        let failure = Failure::new(Errno::Io, "bad");
        replies.failed(5, 0, &failure, Some(4096));
        assert_eq!(
            hex(replies.bytes()),
            "668e33ef\
             0001\
             8002\
             0000000000000005\
             00000011\
             00000005\
             0003\
             626164\
             0000000000001000"
        );
    }

    #[test]
    fn long_messages_are_cut_between_characters() {
        assert_eq!(truncated("aäb", 2), "a");
        assert_eq!(truncated("ab", 512), "ab");
    }
}
