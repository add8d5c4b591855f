//! Comparison of two address spaces.

use std::ops::Range;

use bcow_format::SECTOR_BYTES;

use super::STEP_BYTES;
use crate::{BlockDevice, Content, Error, Image, Status, known_same};

/// The reason why a comparison ended early.
#[derive(Debug, thiserror::Error)]
pub enum CompareError<E> {
    /// The first image cannot be read.
    #[error("the first image: {0}")]
    First(Error),
    /// The second image cannot be read.
    #[error("the second image: {0}")]
    Second(Error),
    /// The caller ended the comparison.
    #[error("ended by the caller")]
    Sink(E),
}

/// Calls `sink` with each range in which two images show different content, in order; neighbouring
/// ranges are merged. Ranges begin and end at sectors of 4096 bytes. Data of the larger image
/// behind the end of the other one differs, unless it is zeros.
///
/// Ranges that the tables show to be the same are not read.
pub fn compare<E>(
    a: &Image,
    b: &Image,
    sink: &mut dyn FnMut(Range<u64>) -> Result<(), E>,
) -> Result<(), CompareError<E>> {
    let size = a.size().max(b.size());
    let both = a.size().min(b.size());
    let mut run: Option<Range<u64>> = None;
    let mut buffers = [Vec::new(), Vec::new()];
    let mut at = 0;
    while at < size {
        if at < both {
            let same = known_same(a, at, b, at, both - at);
            if same > 0 {
                at += same;
                continue;
            }
        }
        let length = STEP_BYTES.min(size - at);
        let first = status_or_hole(a, at, length).map_err(CompareError::First)?;
        let second = status_or_hole(b, at, first.length).map_err(CompareError::Second)?;
        let length = second.length;
        if first.content == Content::Data || second.content == Content::Data {
            read_or_zeros(a, at, length, &mut buffers[0]).map_err(CompareError::First)?;
            read_or_zeros(b, at, length, &mut buffers[1]).map_err(CompareError::Second)?;
            for range in differing_sectors(at, &buffers[0], &buffers[1]) {
                match &mut run {
                    Some(run) if run.end == range.start => run.end = range.end,
                    _ => {
                        if let Some(ended) = run.replace(range) {
                            sink(ended).map_err(CompareError::Sink)?;
                        }
                    }
                }
            }
        }
        at += length;
    }
    run.map_or(Ok(()), sink).map_err(CompareError::Sink)
}

/// Status of a device from `at` on; a hole behind its end.
pub(super) fn status_or_hole(
    device: &dyn BlockDevice,
    at: u64,
    length: u64,
) -> Result<Status, Error> {
    let there = device.size().saturating_sub(at).min(length);
    let status = match there {
        0 => Status::hole(length),
        _ => device.status(at, there)?,
    };
    Ok(Status {
        length: status.length.clamp(1, length),
        ..status
    })
}

/// Reads `length` bytes from `at` on; zeros behind the end of the device.
pub(super) fn read_or_zeros(
    device: &dyn BlockDevice,
    at: u64,
    length: u64,
    buffer: &mut Vec<u8>,
) -> Result<(), Error> {
    buffer.clear();
    buffer.resize(length as usize, 0);
    match device.size().saturating_sub(at).min(length) {
        0 => Ok(()),
        there => device.read_at(at, &mut buffer[..there as usize]),
    }
}

/// The sectors of two buffers of one length, from byte `at` on, that differ.
pub(super) fn differing_sectors<'a>(
    at: u64,
    a: &'a [u8],
    b: &'a [u8],
) -> impl Iterator<Item = Range<u64>> + 'a {
    const SECTOR: usize = SECTOR_BYTES as usize;
    let sectors = a.chunks(SECTOR).zip(b.chunks(SECTOR));
    (at..)
        .step_by(SECTOR)
        .zip(sectors)
        .filter(|(_, (a, b))| a != b)
        .map(|(start, (a, _))| start..start + a.len() as u64)
}
