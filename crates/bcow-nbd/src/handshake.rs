//! The handshake: from the greeting until the client has selected an export.

use std::sync::Arc;
use std::time::Instant;

use crate::context::{Context, Contexts};
use crate::error::SessionEnd;
use crate::export::{Export, Selection};
use crate::proto::{
    Framing, INIT_MAGIC, MAX_PAYLOAD_BYTES, MAX_STRING_BYTES, OPTION_MAGIC, OPTION_REPLY_MAGIC,
    client_flag, handshake_flag, info, option, option_reply, take_u16, take_u32, take_u64,
};
use crate::receive::Receiver;
use crate::reply::truncated;
use crate::shared::Shared;
use crate::socket::{Patience, Socket};
use crate::tls;

/// Largest accepted data of an option: a name and some dozens of queries.
const MAX_OPTION_BYTES: usize = 64 << 10;
/// Largest data that the server receives and discards, so that it can reply to the option with an
/// error.
const MAX_SKIPPED_BYTES: u32 = 1 << 20;
/// Preferred block size of the device, in bytes.
const PREFERRED_BYTES: u32 = 4096;
/// Longest message of an error reply, in bytes.
const MESSAGE_BYTES: usize = 1024;

/// Result of a handshake after which the connection is intact.
pub(crate) enum Outcome {
    /// The transmission phase starts.
    Selected(Selection),
    /// The client ended the session.
    Left,
}

/// The server's side of a handshake.
pub(crate) struct Handshake<'a> {
    pub(crate) shared: &'a Arc<Shared>,
    pub(crate) socket: &'a Socket,
    pub(crate) receiver: &'a mut Receiver,
    pub(crate) deadline: Option<Instant>,
    /// Whether the limit of clients is reached, so that the server refuses every option.
    pub(crate) is_full: bool,
    /// Whether the server refused an option because the client did not use TLS.
    pub(crate) wants_tls: bool,
    /// Whether the client does without the zeros behind the reply to EXPORT_NAME.
    pub(crate) no_zeroes: bool,
    pub(crate) negotiated: Negotiated,
}

/// The state of the negotiation. STARTTLS resets it.
#[derive(Default)]
pub(crate) struct Negotiated {
    framing: Framing,
    /// The selected contexts, and the export for which the client selected them.
    contexts: Option<(Arc<Export>, Contexts)>,
}

impl Handshake<'_> {
    /// Serves options until the client has selected an export or ends the session.
    pub(crate) fn run(&mut self) -> Result<Outcome, SessionEnd> {
        let mut greeting = Vec::with_capacity(18);
        greeting.extend(INIT_MAGIC.to_be_bytes());
        greeting.extend(OPTION_MAGIC.to_be_bytes());
        let flags = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
        greeting.extend(flags.to_be_bytes());
        self.send(&greeting)?;

        let flags = self.take(4, take_u32)?;
        let known = client_flag::FIXED_NEWSTYLE | client_flag::NO_ZEROES;
        if flags & !known != 0 {
            return Err(SessionEnd::Protocol("unknown client flags"));
        }
        self.no_zeroes = flags & client_flag::NO_ZEROES != 0;

        loop {
            if let Some(outcome) = self.option()? {
                return Ok(outcome);
            }
        }
    }

    /// Serves one option. Returns the outcome if it ends the handshake.
    fn option(&mut self) -> Result<Option<Outcome>, SessionEnd> {
        let (magic, option, length) = self.take(16, |bytes| {
            Some((take_u64(bytes)?, take_u32(bytes)?, take_u32(bytes)?))
        })?;
        if magic != OPTION_MAGIC {
            return Err(SessionEnd::Protocol(
                "an option does not begin with the magic",
            ));
        }
        if length as usize > MAX_OPTION_BYTES {
            if length > MAX_SKIPPED_BYTES || option == option::EXPORT_NAME {
                return Err(SessionEnd::Protocol("an option is too long"));
            }
            self.receiver.skip(self.socket, u64::from(length))?;
            self.refuse(option, option_reply::ERR_TOO_BIG, "the option is too long")?;
            return Ok(None);
        }
        let length = length as usize;
        self.receiver
            .fill_until(self.socket, length, self.deadline)?;
        let data = self.receiver.available()[..length].to_vec();
        self.receiver.consume(length);
        self.answer(option, &data)
    }

    fn answer(&mut self, option: u32, data: &[u8]) -> Result<Option<Outcome>, SessionEnd> {
        if option == option::ABORT {
            // The client may have disconnected without waiting for the reply. That is not an error.
            let _ = self.reply(option, option_reply::ACK, &[]);
            return Ok(Some(Outcome::Left));
        }
        if let Some((kind, message)) = self.refused(option) {
            self.wants_tls |= kind == option_reply::ERR_TLS_REQD;
            if option == option::EXPORT_NAME {
                return Err(SessionEnd::Protocol(message));
            }
            self.refuse(option, kind, message)?;
            return Ok(None);
        }
        match option {
            option::STARTTLS => self.start_tls(data)?,
            option::EXPORT_NAME => return self.export_name(data),
            option::LIST if data.is_empty() => self.list()?,
            option::INFO | option::GO => return self.info(option, data),
            option::STRUCTURED_REPLY if data.is_empty() => {
                if self.negotiated.framing == Framing::Extended {
                    let message =
                        "extended headers are already selected and include structured replies";
                    self.refuse(option, option_reply::ERR_INVALID, message)?;
                } else {
                    self.negotiated.framing = Framing::Structured;
                    self.reply(option, option_reply::ACK, &[])?;
                }
            }
            option::EXTENDED_HEADERS if data.is_empty() => {
                self.negotiated.framing = Framing::Extended;
                self.reply(option, option_reply::ACK, &[])?;
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                self.meta_context(option, data)?;
            }
            option::LIST | option::STRUCTURED_REPLY | option::EXTENDED_HEADERS => {
                let message = "the option must have no data";
                self.refuse(option, option_reply::ERR_INVALID, message)?;
            }
            _ => self.refuse(option, option_reply::ERR_UNSUP, "unknown option")?,
        }
        Ok(None)
    }

    /// The error with which the server refuses the option in its present state, if it does.
    fn refused(&self, option: u32) -> Option<(u32, &'static str)> {
        if self.shared.is_stopping() {
            return Some((option_reply::ERR_SHUTDOWN, "the server is shutting down"));
        }
        let tls = self.shared.options.tls.as_ref();
        if tls.is_some_and(|tls| tls.required)
            && !self.socket.is_tls()
            && option != option::STARTTLS
        {
            return Some((option_reply::ERR_TLS_REQD, "this server requires TLS"));
        }
        let full = (option_reply::ERR_POLICY, "the limit of clients is reached");
        self.is_full.then_some(full)
    }

    fn start_tls(&mut self, data: &[u8]) -> Result<(), SessionEnd> {
        let option = option::STARTTLS;
        let Some(tls) = &self.shared.options.tls else {
            let message = "this server has no TLS certificate";
            return self.refuse(option, option_reply::ERR_POLICY, message);
        };
        if self.socket.is_tls() || !data.is_empty() {
            let message = "TLS is already active, or the option has data";
            return self.refuse(option, option_reply::ERR_INVALID, message);
        }
        // Refuse bytes that follow STARTTLS at once. An attacker may have inserted them as
        // plaintext, and the server would treat them as sent under TLS (CVE-2021-3716).
        if !self.receiver.available().is_empty() {
            return Err(SessionEnd::Protocol(
                "data follows STARTTLS before the reply",
            ));
        }
        self.reply(option, option_reply::ACK, &[])?;
        self.socket
            .start_tls(tls, self.deadline)
            .map_err(|error| SessionEnd::Tls(tls::explain(&error)))?;
        self.negotiated = Negotiated::default();
        Ok(())
    }

    fn export_name(&mut self, name: &[u8]) -> Result<Option<Outcome>, SessionEnd> {
        // EXPORT_NAME has no error reply.
        let Some(export) = self.shared.exports.find(name).cloned() else {
            return Err(SessionEnd::Protocol("no export has the requested name"));
        };
        let mut reply = Vec::with_capacity(134);
        reply.extend(export.device.reader().size().to_be_bytes());
        let flags = export.transmission_flags(self.negotiated.framing);
        reply.extend(flags.to_be_bytes());
        if !self.no_zeroes {
            reply.resize(reply.len() + 124, 0);
        }
        self.send(&reply)?;
        Ok(Some(self.select(export)))
    }

    fn list(&mut self) -> Result<(), SessionEnd> {
        let exports = &self.shared.exports;
        for export in exports.iter() {
            let mut data = Vec::new();
            data.extend((export.name.len() as u32).to_be_bytes());
            data.extend(export.name.as_bytes());
            data.extend(export.description.as_bytes());
            self.reply(option::LIST, option_reply::SERVER, &data)?;
        }
        self.reply(option::LIST, option_reply::ACK, &[])
    }

    fn info(&mut self, option: u32, data: &[u8]) -> Result<Option<Outcome>, SessionEnd> {
        let Some((name, wanted)) = parse_info(data) else {
            let message = "the data of the option is invalid";
            self.refuse(option, option_reply::ERR_INVALID, message)?;
            return Ok(None);
        };
        let Some(export) = self.find_or_refuse(option, name)? else {
            return Ok(None);
        };
        let size = export.device.reader().size();
        let mut data = info::EXPORT.to_be_bytes().to_vec();
        data.extend(size.to_be_bytes());
        let flags = export.transmission_flags(self.negotiated.framing);
        data.extend(flags.to_be_bytes());
        self.reply(option, option_reply::INFO, &data)?;

        let mut data = info::BLOCK_SIZE.to_be_bytes().to_vec();
        for bytes in [1, PREFERRED_BYTES, MAX_PAYLOAD_BYTES] {
            data.extend(bytes.to_be_bytes());
        }
        self.reply(option, option_reply::INFO, &data)?;

        for (kind, text) in [
            (info::NAME, &export.name),
            (info::DESCRIPTION, &export.description),
        ] {
            if wanted.contains(&kind) {
                let mut data = kind.to_be_bytes().to_vec();
                data.extend(text.as_bytes());
                self.reply(option, option_reply::INFO, &data)?;
            }
        }
        self.reply(option, option_reply::ACK, &[])?;
        Ok(match option {
            option::GO => Some(self.select(export)),
            _ => None,
        })
    }

    fn meta_context(&mut self, option: u32, data: &[u8]) -> Result<(), SessionEnd> {
        let choose = option == option::SET_META_CONTEXT;
        if choose {
            // Any attempt to select discards the earlier selection, even if it fails.
            self.negotiated.contexts = None;
        }
        if choose && self.negotiated.framing == Framing::Simple {
            let message = "metadata contexts need structured replies";
            return self.refuse(option, option_reply::ERR_INVALID, message);
        }
        let Some((name, queries)) = parse_queries(data) else {
            let message = "the data of the option is invalid";
            return self.refuse(option, option_reply::ERR_INVALID, message);
        };
        let Some(export) = self.find_or_refuse(option, name)? else {
            return Ok(());
        };
        let mut contexts = Contexts::default();
        for query in &queries {
            for context in Context::listed_by(query) {
                // A selection needs the full name of a context.
                if !choose || context.name().as_bytes() == *query {
                    contexts.insert(context);
                }
            }
        }
        if !choose && queries.is_empty() {
            for context in Context::ALL {
                contexts.insert(context);
            }
        }
        for context in contexts.iter() {
            let id = if choose { context.id() } else { 0 };
            let mut data = id.to_be_bytes().to_vec();
            data.extend(context.name().as_bytes());
            self.reply(option, option_reply::META_CONTEXT, &data)?;
        }
        self.reply(option, option_reply::ACK, &[])?;
        if choose {
            self.negotiated.contexts = Some((export, contexts));
        }
        Ok(())
    }

    fn find_or_refuse(
        &mut self,
        option: u32,
        name: &[u8],
    ) -> Result<Option<Arc<Export>>, SessionEnd> {
        let found = self.shared.exports.find(name).cloned();
        if found.is_none() {
            let shown = String::from_utf8_lossy(name);
            let message = format!("no export has the name {shown:?}");
            self.refuse(option, option_reply::ERR_UNKNOWN, &message)?;
        }
        Ok(found)
    }

    fn refuse(&mut self, option: u32, kind: u32, message: &str) -> Result<(), SessionEnd> {
        let message = truncated(message, MESSAGE_BYTES);
        self.reply(option, kind, message.as_bytes())
    }

    fn reply(&mut self, option: u32, kind: u32, data: &[u8]) -> Result<(), SessionEnd> {
        let mut bytes = Vec::with_capacity(20 + data.len());
        bytes.extend(OPTION_REPLY_MAGIC.to_be_bytes());
        bytes.extend(option.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        // Data are names, texts and numbers, which are all short.
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        self.send(&bytes)
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), SessionEnd> {
        self.socket.send(bytes, Patience::until(self.deadline))?;
        Ok(())
    }

    /// Receives and decodes `length` bytes.
    fn take<T>(
        &mut self,
        length: usize,
        decode: impl FnOnce(&mut &[u8]) -> Option<T>,
    ) -> Result<T, SessionEnd> {
        self.receiver
            .fill_until(self.socket, length, self.deadline)?;
        let decoded = decode(&mut &self.receiver.available()[..length]);
        self.receiver.consume(length);
        decoded.ok_or(SessionEnd::Protocol("a message is too short"))
    }

    fn select(&mut self, export: Arc<Export>) -> Outcome {
        // Ignore contexts that were selected for another export.
        let contexts = match self.negotiated.contexts.take() {
            Some((chosen, contexts)) if Arc::ptr_eq(&chosen, &export) => contexts,
            _ => Contexts::default(),
        };
        Outcome::Selected(Selection {
            export,
            framing: self.negotiated.framing,
            contexts,
        })
    }
}

/// Decodes the data of INFO and GO: a name and the types of information.
fn parse_info(mut data: &[u8]) -> Option<(&[u8], Vec<u16>)> {
    let name = take_string(&mut data)?;
    let count = take_u16(&mut data)?;
    let wanted: Option<_> = (0..count).map(|_| take_u16(&mut data)).collect();
    let wanted = wanted?;
    data.is_empty().then_some((name, wanted))
}

/// Decodes the data of LIST_META_CONTEXT and SET_META_CONTEXT: a name and the queries.
fn parse_queries(mut data: &[u8]) -> Option<(&[u8], Vec<&[u8]>)> {
    let name = take_string(&mut data)?;
    let count = take_u32(&mut data)?;
    let queries: Option<_> = (0..count).map(|_| take_string(&mut data)).collect();
    let queries = queries?;
    data.is_empty().then_some((name, queries))
}

fn take_string<'a>(data: &mut &'a [u8]) -> Option<&'a [u8]> {
    let length = take_u32(data)? as usize;
    if length > MAX_STRING_BYTES {
        return None;
    }
    data.split_off(..length)
}
