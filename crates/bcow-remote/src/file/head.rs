//! The beginning of a remote file, which says where everything else is.

use bcow::format::{HEADER_AREA_BYTES, Header, choose_header};

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
    /// What follows these bytes, if the server sends the whole file.
    pub(super) rest: Option<AnswerBody>,
}

/// The beginning of a file with this root, from the first mirror that has it.
pub(super) fn of_mirrors(shared: &Shared, sources: &Sources, root: Hash) -> Option<Head> {
    let budget = shared.of_mirror();
    sources.usable().find_map(|copy| {
        let head = match copy.source.range(0, HEAD_BYTES, &budget) {
            Ok(RangeAnswer::Part {
                bytes, total, body, ..
            }) => body
                .into_bytes(bytes)
                .and_then(|bytes| parse_head(bytes, total, None, Some(root))),
            Ok(RangeAnswer::Whole { .. }) => {
                Err(Problem::NoRanges("it is a mirror".to_owned()).permanent())
            }
            Err(fault) => Err(fault),
        };
        head.inspect_err(|fault| {
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
        let mut fault = match read_head(&sources.origin, &budget, pin) {
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
fn read_head(source: &Source, budget: &RetryBudget, pin: Option<Hash>) -> Result<Head, Fault> {
    match source.range(0, HEAD_BYTES, budget) {
        Ok(RangeAnswer::Part {
            bytes: length,
            total,
            body,
            ..
        }) => parse_head(body.into_bytes(length)?, total, None, pin),
        Ok(RangeAnswer::Whole { length, mut body }) => {
            let mut bytes = vec![0; HEADER_AREA_BYTES];
            let there = body.fill(&mut bytes)?;
            bytes.truncate(there);
            parse_head(bytes, length, Some(body), pin)
        }
        // A file without a first byte.
        Err(fault) if matches!(fault.problem, Problem::OutOfRange) => {
            Err(Problem::Format(bcow::format::FormatError::NotBcow).permanent())
        }
        Err(fault) => Err(fault),
    }
}

/// The head in the first bytes of a file, of which the server may have said the length.
fn parse_head(
    bytes: Vec<u8>,
    length: Option<u64>,
    rest: Option<AnswerBody>,
    pin: Option<Hash>,
) -> Result<Head, Fault> {
    let invalid = |error| Problem::Format(error).permanent();
    let mut slots = [0; HEADER_AREA_BYTES];
    let there = bytes.len().min(HEADER_AREA_BYTES);
    slots[..there].copy_from_slice(&bytes[..there]);
    let header = choose_header(&slots[..there]).map_err(invalid)?;
    let Some(tree) = &header.merkle else {
        return Err(Problem::NoTree.permanent());
    };
    if let Some(pin) = pin.filter(|pin| *pin != tree.root) {
        return Err(Problem::WrongRoot {
            found: Root(tree.root).to_string(),
            expected: Root(pin).to_string(),
        }
        .permanent());
    }
    if let Some(length) = length {
        header.check_file_length(length).map_err(invalid)?;
    }
    Ok(Head {
        bytes,
        header,
        slots,
        rest,
    })
}
