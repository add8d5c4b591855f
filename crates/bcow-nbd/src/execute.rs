//! Execution of requests on the device.

use bcow::{BlockDevice, Content, Space, WritableDevice};

use crate::client::Client;
use crate::context::Context;
use crate::errno::{Failure, out_of_range};
use crate::error::SessionEnd;
use crate::export::Selection;
use crate::proto::{Command, Errno, Framing, MAX_PAYLOAD_BYTES, Request, command_flag};
use crate::reply::{Last, Replies, StatusExtent};

/// Limit of the extents of one context in one reply. The client sends another request for the rest.
const MAX_EXTENTS: usize = 4096;
/// Limit of the pieces that one BLOCK_STATUS examines. Adjacent equal pieces are reported as one
/// extent.
const MAX_PIECES: usize = 1 << 16;
/// Shortest range of zeros in bytes for which a read sends a hole instead of content.
const HOLE_WORTH_BYTES: u64 = 64 << 10;
/// Limit of the bytes that CACHE reads ahead.
const MAX_CACHED_BYTES: u64 = 64 << 20;

/// Checks a request: the command is known, its flags belong to it, the export permits it, and the
/// range is inside the device.
pub(crate) fn check(selection: &Selection, request: &Request) -> Result<(), Failure> {
    let invalid = |message: &str| Err(Failure::new(Errno::Invalid, message));
    let structured = selection.framing >= Framing::Structured;
    let allowed = match request.command {
        Command::Read if structured => command_flag::DF,
        Command::Write if selection.framing == Framing::Extended => command_flag::PAYLOAD_LEN,
        Command::WriteZeroes => command_flag::NO_HOLE | command_flag::FAST_ZERO,
        Command::BlockStatus => command_flag::REQ_ONE,
        Command::Unknown(number) => {
            return invalid(&format!("unknown command {number}"));
        }
        _ => 0,
    };
    // FUA is valid with every command, but has an effect only on commands that write.
    if request.flags & !(allowed | command_flag::FUA) != 0 {
        return invalid("a flag is unknown or belongs to another command");
    }
    let changes = matches!(
        request.command,
        Command::Write | Command::Trim | Command::WriteZeroes
    );
    if changes && selection.export.device.writer().is_none() {
        return Err(Failure::new(Errno::Perm, "the export is read-only"));
    }
    let size = selection.export.device.reader().size();
    let end = request.offset.checked_add(request.length);
    if request.command != Command::Flush && end.is_none_or(|end| end > size) {
        let message = format!("the range ends beyond the end of the export ({size} bytes)");
        return Err(Failure::new(out_of_range(request.command), message));
    }
    if request.command == Command::Read && request.length > u64::from(MAX_PAYLOAD_BYTES) {
        let errno = if structured { Errno::Overflow } else { Errno::Invalid };
        return Err(Failure::new(errno, "a read is larger than 32 MiB"));
    }
    if request.command == Command::BlockStatus {
        if selection.contexts.is_empty() {
            return invalid("no metadata context is selected");
        }
        if request.length == 0 {
            return invalid("a status request of zero bytes");
        }
    }
    Ok(())
}

/// Executes a request that [`check`] accepted. Sends replies to reads larger than `piece` bytes in
/// several parts; leaves all other replies in `replies`. An error of the device becomes a reply; an
/// `Err` ends the session.
pub(crate) fn run(
    client: &Client,
    request: &Request,
    payload: &[u8],
    piece: usize,
    replies: &mut Replies,
) -> Result<(), SessionEnd> {
    let device = &client.selection.export.device;
    let done = match (request.command, device.writer()) {
        (Command::Read, _) => return read(client, request, piece, replies),
        (Command::BlockStatus, _) => {
            status(client, request, replies);
            return Ok(());
        }
        (Command::Cache, _) => cache(device.reader(), request),
        (_, Some(writer)) => change(writer, request, payload),
        (_, None) => Ok(()),
    };
    reply(client, request, done, replies);
    Ok(())
}

fn reply(client: &Client, request: &Request, done: Result<(), bcow::Error>, replies: &mut Replies) {
    match done {
        Ok(()) => replies.done(request.cookie),
        Err(error) => fail(client, request, &error, None, replies),
    }
}

/// Reports an error of the device, and replies with an error of the protocol.
fn fail(
    client: &Client,
    request: &Request,
    error: &bcow::Error,
    at: Option<u64>,
    replies: &mut Replies,
) {
    let (shared, export) = (&client.shared, &client.selection.export);
    let to = &shared.options.failures;
    shared.failures.add(&export.name, request, error, to);
    let failure = Failure::of_device(request.command, error);
    replies.failed(request.cookie, request.offset, &failure, at);
}

fn change(
    device: &dyn WritableDevice,
    request: &Request,
    payload: &[u8],
) -> Result<(), bcow::Error> {
    let Request { offset, length, .. } = *request;
    match request.command {
        Command::Write => device.write_at(offset, payload)?,
        Command::WriteZeroes => {
            let keep = request.has(command_flag::NO_HOLE);
            if keep && request.has(command_flag::FAST_ZERO) {
                // Zeros with allocated space are written like data.
                return Err(bcow::Error::Unsupported(
                    "zeros with allocated space are not faster than a write".into(),
                ));
            }
            let space = if keep { Space::Keep } else { Space::Free };
            device.write_zeroes(offset, length, space)?;
        }
        Command::Trim => device.discard(offset, length)?,
        Command::Flush => return device.flush(),
        _ => return Ok(()),
    }
    if request.has(command_flag::FUA) { device.flush() } else { Ok(()) }
}

fn cache(device: &dyn BlockDevice, request: &Request) -> Result<(), bcow::Error> {
    let length = request.length.min(MAX_CACHED_BYTES);
    device.read_with(request.offset, length, &mut |_| {})
}

/// Executes a write whose payload is larger than the available memory. After an error, receives and
/// discards the rest of the payload.
pub(crate) fn write_in_pieces(
    client: &Client,
    request: &Request,
    buf: &mut [u8],
    mut receive: impl FnMut(&mut [u8]) -> Result<(), SessionEnd>,
    replies: &mut Replies,
) -> Result<(), SessionEnd> {
    let writer = client.selection.export.device.writer();
    let (mut done, mut at) = (Ok(()), 0);
    while at < request.length {
        let n = (request.length - at).min(buf.len() as u64);
        let piece = &mut buf[..n as usize];
        receive(piece)?;
        if let (Ok(()), Some(device)) = (&done, writer) {
            done = device.write_at(request.offset + at, piece);
        }
        at += n;
    }
    if let (Ok(()), true, Some(device)) = (&done, request.has(command_flag::FUA), writer) {
        done = device.flush();
    }
    reply(client, request, done, replies);
    Ok(())
}

fn read(
    client: &Client,
    request: &Request,
    piece: usize,
    replies: &mut Replies,
) -> Result<(), SessionEnd> {
    let device = client.selection.export.device.reader();
    let Request {
        cookie,
        offset,
        length,
        ..
    } = *request;
    let structured = replies.framing() != Framing::Simple;
    if structured && length == 0 {
        replies.done(cookie);
        return Ok(());
    }
    let may_split = structured && !request.has(command_flag::DF);
    let send_holes = may_split && length >= HOLE_WORTH_BYTES;
    let mut at = 0;
    loop {
        let here = offset + at;
        let left = length - at;
        let hole = if send_holes { zeros(device, here, left) } else { Zeros::Not(left) };
        let (n, is_hole) = match hole {
            Zeros::These(n) => (n, true),
            Zeros::Not(n) => (n.min(piece as u64), false),
        };
        let last = if at + n == length { Last::Yes } else { Last::No };
        if is_hole {
            // Reads are limited to 32 MiB, so the length fits.
            replies.hole(cookie, offset, here, n as u32, last);
        } else {
            let filled = replies.data(cookie, offset, here, n as usize, last, |buf| {
                device.read_at(here, buf)
            });
            if let Err(error) = filled {
                fail(client, request, &error, Some(here), replies);
                return Ok(());
            }
        }
        at += n;
        if last == Last::Yes {
            return Ok(());
        }
        if replies.bytes().len() >= piece {
            client.send(replies)?;
        }
    }
}

enum Zeros {
    /// This many bytes are zeros.
    These(u64),
    /// This many bytes may have any value.
    Not(u64),
}

/// Finds the first run at `offset`: zeros that are long enough to send as a hole, or other bytes.
fn zeros(device: &dyn BlockDevice, offset: u64, length: u64) -> Zeros {
    let run = |from: u64, zero: bool| {
        let mut end = from;
        while end < offset + length {
            // If the status fails, treat the range as data: the read then returns the error.
            match device.status(end, offset + length - end) {
                Ok(status) if (status.content != Content::Data) == zero => {
                    end += status.length.max(1);
                }
                Ok(_) => break,
                Err(_) if zero => break,
                Err(_) => return offset + length,
            }
        }
        end.min(offset + length)
    };
    let end = run(offset, true);
    if end - offset >= HOLE_WORTH_BYTES || end == offset + length {
        return Zeros::These(end - offset);
    }
    Zeros::Not(run(end, false) - offset)
}

fn status(client: &Client, request: &Request, replies: &mut Replies) {
    let device = client.selection.export.device.reader();
    let contexts = client.selection.contexts;
    let count = contexts.iter().count();
    let mut found = Vec::with_capacity(count);
    for context in contexts.iter() {
        match extents(device, context, request) {
            Ok(extents) => found.push((context, extents)),
            Err(error) => return fail(client, request, &error, None, replies),
        }
    }
    for (index, (context, extents)) in found.iter().enumerate() {
        let last = if index + 1 == count { Last::Yes } else { Last::No };
        replies.status(request.cookie, request.offset, context.id(), extents, last);
    }
}

fn extents(
    device: &dyn BlockDevice,
    context: Context,
    request: &Request,
) -> Result<Vec<StatusExtent>, bcow::Error> {
    let most = if request.has(command_flag::REQ_ONE) { 1 } else { MAX_EXTENTS };
    let mut extents: Vec<StatusExtent> = Vec::new();
    let mut at = 0;
    for _ in 0..MAX_PIECES {
        if at >= request.length {
            break;
        }
        let status = match device.status(request.offset + at, request.length - at) {
            Ok(status) => status,
            // Return the extents before the error. The client sends another request from there on.
            Err(error) if extents.is_empty() => return Err(error),
            Err(_) => break,
        };
        let length = status.length.clamp(1, request.length - at);
        let flags = context.flags(&status);
        let full = extents.len() == most;
        match extents.last_mut() {
            Some(last) if last.flags == flags => last.length += length,
            _ if full => break,
            _ => extents.push(StatusExtent { length, flags }),
        }
        at += length;
    }
    Ok(extents)
}
