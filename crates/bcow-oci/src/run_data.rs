//! The content of a file, from runs of another file or of a device.

use std::collections::VecDeque;

use crate::content::Data;
use crate::error::ConvertError;
use crate::options::Progress;

/// Reads bytes of the source, from a byte on.
pub(crate) type ReadAt<'d> = dyn Fn(u64, &mut [u8]) -> Result<(), ConvertError> + 'd;

/// The bytes of several runs in sequence.
pub(crate) struct RunData<'d> {
    read: &'d ReadAt<'d>,
    progress: &'d dyn Progress,
    /// First byte in the source and number of bytes of what is still to be read.
    runs: VecDeque<(u64, u64)>,
    buffer: Vec<u8>,
    /// Bytes of the buffer that were read, and those of them that were consumed.
    filled: usize,
    taken: usize,
}

impl<'d> RunData<'d> {
    /// `runs` have the first byte in the source and the number of bytes.
    pub(crate) fn new(
        read: &'d ReadAt<'d>,
        progress: &'d dyn Progress,
        runs: impl Iterator<Item = (u64, u64)>,
    ) -> Self {
        RunData {
            read,
            progress,
            runs: runs.collect(),
            buffer: Vec::new(),
            filled: 0,
            taken: 0,
        }
    }
}

impl Data for RunData<'_> {
    fn window(&mut self, wanted: usize) -> Result<(&[u8], &[u8]), ConvertError> {
        self.buffer.copy_within(self.taken..self.filled, 0);
        self.filled -= self.taken;
        self.taken = 0;
        if self.buffer.len() < wanted {
            self.buffer.resize(wanted, 0);
        }
        while self.filled < wanted {
            let Some((at, left)) = self.runs.front_mut() else {
                return Err(ConvertError::changed("a file's content"));
            };
            let length = (*left).min((wanted - self.filled) as u64);
            let end = self.filled + length as usize;
            (self.read)(*at, &mut self.buffer[self.filled..end])?;
            self.progress.advance(length);
            self.filled = end;
            (*at, *left) = (*at + length, *left - length);
            if *left == 0 {
                self.runs.pop_front();
            }
        }
        Ok((&self.buffer[..wanted], &[]))
    }

    fn consume(&mut self, bytes: usize) {
        self.taken += bytes;
    }
}
