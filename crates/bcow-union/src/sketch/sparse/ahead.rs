//! Completing blocks ahead of who writes in order and synchronises each step: the log of a database.
//!
//! A flush with new blocks takes a barrier more than one without, for the map, and both wait for the host's journal. A log maps
//! new blocks with nearly every commit. So when flush after flush goes on where the last one ended, the next blocks (a mebibyte) are completed
//! from the lower file and mapped with them; the following flushes then cost what they cost on a plain file.

use std::ops::Range;

use super::super::host::write_all;
use super::super::locks::{lock, read};
use super::super::{Sketch, SketchError};
use super::{BLOCK_BYTES, Frame, Source, Sparse, UNIT_BLOCKS};

/// Flushes in order before anything is completed ahead.
const IN_ORDER: u32 = 4;
/// How far a flush may begin from where the last one ended.
const NEAR_BLOCKS: u64 = 4;

/// Where flushes went.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    /// The block behind the last that a flush mapped.
    next: u64,
    /// How many flushes in a row went on there.
    in_order: u32,
}

impl Sparse {
    /// To be called before a flush takes what it maps: adds blocks to that if flushes go forward in order.
    ///
    /// Not where space is limited: it is for the program to use up.
    pub(super) fn go_ahead(&self, frame: &Frame) {
        let most = self.shared.options.ahead_blocks;
        if most == 0 || self.shared.account.limit().is_some() || !frame.marked {
            return;
        }
        let new = {
            let presence = read(&self.presence);
            let mut runs = presence.unrecorded.runs(0..u64::MAX);
            match runs.next() {
                Some(first) => first.start..runs.last().unwrap_or(first).end,
                None => return,
            }
        };
        let mut ahead = lock(&self.ahead);
        let is_near = new.start <= ahead.next.saturating_add(NEAR_BLOCKS)
            && ahead.next <= new.start.saturating_add(NEAR_BLOCKS)
            && new.end > ahead.next;
        ahead.in_order = match is_near {
            true => ahead.in_order.saturating_add(1),
            false => 0,
        };
        ahead.next = new.end;
        if ahead.in_order < IN_ORDER {
            return;
        }
        let end = new.end.saturating_add(most).min(frame.covered());
        ahead.next = end.max(new.end);
        drop(ahead);
        // What fails is met again by who reads or writes it. Nobody wrote to the file, so it shall not look so.
        let _ = self
            .times
            .hold()
            .unseen(self.content(), || self.fetch(frame, new.end..end));
    }

    /// Completes blocks that nobody wrote to.
    fn fetch(&self, frame: &Frame, blocks: Range<u64>) -> Result<(), SketchError> {
        let mut at = blocks.start;
        while at < blocks.end {
            let end = ((at / UNIT_BLOCKS + 1) * UNIT_BLOCKS).min(blocks.end);
            let start = at * BLOCK_BYTES;
            let length = (end * BLOCK_BYTES).min(self.size()).saturating_sub(start);
            let mut bytes = vec![0; length as usize];
            self.read_lower(frame, start, &mut bytes)?;
            let stripe = self.stripe(at);
            let mut block = at;
            while block < end {
                let (source, until) = self.source(frame, &stripe, block, end);
                let run = block..until;
                block = until;
                if source != Source::Lower {
                    continue;
                }
                let within = |block: u64| ((block - at) * BLOCK_BYTES).min(length) as usize;
                let piece = &bytes[within(run.start)..within(run.end)];
                write_all(self.content(), run.start * BLOCK_BYTES, piece)
                    .map_err(|error| SketchError::host("complete a block of a sketch", &error))?;
                self.set_present(run);
            }
            drop(stripe);
            at = end;
        }
        Ok(())
    }
}
