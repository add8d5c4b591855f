//! The beginning of a remote file, which says where everything else is.

use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;

use bcow::format::{HEADER_AREA_BYTES, Header, choose_header};

use super::FEWEST_BYTES;
use crate::cache::CacheFile;
use crate::client::AnswerBody;
use crate::error::{Fault, Problem, RemoteError};
use crate::mirrors::Sources;
use crate::retry_budget::RetryBudget;
use crate::shared::Shared;
use crate::source::{RangeAnswer, Source};
use crate::tree::{Hash, Root};

/// Bytes of the first request for a file.
pub(super) const HEAD_BYTES: u64 = 32 << 10;

/// The beginning of a file.
pub(super) struct Head {
    pub(super) bytes: Vec<u8>,
    pub(super) header: Header,
    pub(super) slots: [u8; HEADER_AREA_BYTES],
    /// The cache file, if the file was fetched whole.
    pub(super) cached: Option<CacheFile>,
}

/// The beginning of a file with this root, from the first mirror that has it.
pub(super) fn of_mirrors(shared: &Shared, sources: &Sources, root: Hash) -> Option<Head> {
    let budget = shared.of_mirror();
    sources.usable().find_map(|copy| {
        let head = match copy.source.range(0, HEAD_BYTES, &budget) {
            Ok(RangeAnswer::Part {
                bytes, total, body, ..
            }) => head_of_part(bytes, total, body, Some(root)),
            Ok(RangeAnswer::Whole { .. }) => {
                Err(Problem::NoRanges("it is a mirror".to_owned()).permanent())
            }
            Err(fault) => Err(fault),
        };
        head.map_err(|fault| {
            budget.give_up(&fault.problem);
            copy.failed(&fault.problem, &copy.source.address().to_string());
        })
        .ok()
    })
}

/// The beginning of a file, from the server that its name leads to.
pub(super) fn of_server(
    shared: &Shared,
    sources: &Sources,
    pin: Option<Hash>,
) -> Result<Head, RemoteError> {
    let mut budget = shared.opening();
    let mut is_second = false;
    loop {
        let mut fault = match read_head(shared, &sources.origin, &budget, pin) {
            Ok(head) => return Ok(head),
            Err(fault) => fault,
        };
        // The network may have damaged it.
        if matches!(fault.problem, Problem::Format(_)) && !is_second {
            is_second = true;
            fault = fault.problem.transient();
        }
        budget
            .wait(fault)
            .map_err(|problem| problem.at(sources.address().to_string()))?;
    }
}

/// Requests the beginning of a file, and reads its header.
fn read_head(
    shared: &Shared,
    source: &Source,
    budget: &RetryBudget,
    pin: Option<Hash>,
) -> Result<Head, Fault> {
    match source.range(0, HEAD_BYTES, budget) {
        Ok(RangeAnswer::Part {
            bytes: length,
            total,
            body,
            ..
        }) => head_of_part(length, total, body, pin),
        Ok(RangeAnswer::Whole { length, body }) => fetch_whole(shared, length, body, pin),
        // A file without a first byte.
        Err(fault) if matches!(fault.problem, Problem::OutOfRange) => {
            Err(Problem::Format(bcow::format::FormatError::NotBcow).permanent())
        }
        Err(fault) => Err(fault),
    }
}

fn head_of_part(
    length: u64,
    total: Option<u64>,
    body: AnswerBody,
    pin: Option<Hash>,
) -> Result<Head, Fault> {
    let bytes = body.into_bytes(length)?;
    let (header, slots) = parse_head(&bytes, pin)?;
    if let Some(total) = total {
        let is_whole = header.check_file_length(total);
        is_whole.map_err(|error| Problem::Format(error).permanent())?;
    }
    Ok(Head {
        bytes,
        header,
        slots,
        cached: None,
    })
}

fn parse_head(bytes: &[u8], pin: Option<Hash>) -> Result<(Header, [u8; HEADER_AREA_BYTES]), Fault> {
    let mut slots = [0; HEADER_AREA_BYTES];
    let there = bytes.len().min(HEADER_AREA_BYTES);
    slots[..there].copy_from_slice(&bytes[..there]);
    let header =
        choose_header(&slots[..there]).map_err(|error| Problem::Format(error).permanent())?;
    let Some(tree) = &header.merkle else {
        return Err(Problem::NoTree.permanent());
    };
    match pin {
        Some(pin) if pin != tree.root => Err(Problem::WrongRoot {
            found: Root(tree.root).to_string(),
            expected: Root(pin).to_string(),
        }
        .permanent()),
        _ => Ok((header, slots)),
    }
}

/// Writes the whole file into the cache, from a server that does not send ranges. As with any cache
/// file, its bytes are checked when they are read.
fn fetch_whole(
    shared: &Shared,
    length: Option<u64>,
    mut body: AnswerBody,
    pin: Option<Hash>,
) -> Result<Head, Fault> {
    let most = shared.options.whole_bytes;
    let refuse = |why: String| Err(Problem::NoRanges(why).permanent());
    let Some(cache) = &shared.options.cache else {
        return refuse("there is no cache to keep the whole file in".into());
    };
    let cannot = |error: io::Error| {
        Problem::NoRanges(format!(
            "the whole file cannot be written into the cache: {error}"
        ))
        .permanent()
    };
    let new = cache.new_file().map_err(cannot)?;
    let mut head = Vec::new();
    let mut buf = vec![0; 256 << 10];
    let mut at = 0;
    let mut extended_at = 0;
    let mut parsed = None;
    // The bytes that are read: those of the file, once its header is known.
    let mut end = most;
    while at < end {
        let count = body.read(&mut buf)?;
        // A slow network may take long for a whole file, but not for a part of it.
        if at - extended_at >= FEWEST_BYTES {
            body.extend(shared.options.timeout);
            extended_at = at;
        }
        let count = count.min(usize::try_from(end - at).unwrap_or(usize::MAX));
        let bytes = &buf[..count];
        if head.len() < HEADER_AREA_BYTES {
            head.extend_from_slice(&bytes[..count.min(HEADER_AREA_BYTES - head.len())]);
        }
        // A file that is not the right one is not fetched to its end.
        if parsed.is_none() && (head.len() == HEADER_AREA_BYTES || count == 0) {
            let (header, slots) = parse_head(&head, pin)?;
            if let Some(length) = length {
                let is_whole = header.check_file_length(length);
                is_whole.map_err(|error| Problem::Format(error).permanent())?;
            }
            let bytes = header.file_bytes;
            if bytes > most {
                return refuse(format!("the file is longer than {most} bytes"));
            }
            if let Some(limit) = cache.limit().filter(|&limit| limit < bytes) {
                return refuse(format!(
                    "the whole file has {bytes} bytes, and the limit of the cache is {limit}"
                ));
            }
            end = bytes;
            parsed = Some((header, slots));
        }
        if count == 0 {
            break;
        }
        new.file().write_all_at(bytes, at).map_err(cannot)?;
        at += count as u64;
    }
    body.release();
    let Some((header, slots)) = parsed else {
        return Err(Problem::NoTree.permanent());
    };
    let is_whole = header.check_file_length(at);
    is_whole.map_err(|error| Problem::Format(error).permanent())?;
    let root = header.merkle.as_ref().map_or([0; 32], |tree| tree.root);
    shared.fetched_bytes.fetch_add(at, Ordering::Relaxed);
    Ok(Head {
        bytes: Vec::new(),
        header,
        slots,
        cached: Some(new.publish(&root).map_err(cannot)?),
    })
}
