//! Reads a storage in order, for an upload or an archive.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use bcow::Storage;

use crate::cancel::Cancel;

/// Reads the bytes of a storage from `at` to `end`, until the operation is cancelled.
pub(crate) struct InOrder {
    pub storage: Arc<dyn Storage>,
    pub at: u64,
    pub end: u64,
    pub cancel: Option<Arc<AtomicBool>>,
}

impl io::Read for InOrder {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        Cancel::new(self.cancel.as_deref()).check()?;
        let count = (self.end - self.at).min(buf.len() as u64) as usize;
        self.storage.read_at(self.at, &mut buf[..count])?;
        self.at += count as u64;
        Ok(count)
    }
}
