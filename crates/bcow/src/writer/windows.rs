//! Windows onto backings. In the address space they follow the content.

use bcow_format::{
    BackingEntry, BackingName, Entry, MAX_ADDRESS, MAX_BACKINGS, MAX_ROOT_ENTRIES, SECTOR_BYTES,
    Use, encode_backings,
};

use super::REGION_SHIFT;
use crate::Error;

const REGION_BYTES: u64 = 1 << REGION_SHIFT;

/// The entries of the regions of a window, which shows `bytes` bytes of a backing from byte
/// `address` on.
pub(super) fn window_entries(
    backing: u32,
    address: u64,
    bytes: u64,
    region_shift: u8,
) -> impl Iterator<Item = Entry> {
    let region_bytes = 1u64 << region_shift;
    let starts = (0..bytes).step_by(region_bytes as usize);
    starts.map(move |done| Entry::Window {
        address: address + done,
        sectors: ((bytes - done).min(region_bytes) / SECTOR_BYTES) as u32,
        backing,
    })
}

/// The backings of an image being written, and the windows onto them.
#[derive(Debug, Default)]
pub(super) struct Windows {
    pub(super) backings: Vec<BackingEntry>,
    windows: Vec<Window>,
}

/// A run of root entries that map to one contiguous range of a backing.
#[derive(Debug, Clone, Copy)]
struct Window {
    /// Address of the window in the image.
    start: u64,
    /// Index of the backing.
    backing: u32,
    /// Start of the range in the backing.
    backing_address: u64,
    bytes: u64,
}

impl Windows {
    pub(super) fn is_empty(&self) -> bool {
        self.windows.is_empty()
    }

    /// The address just after the last window; `None` without windows.
    pub(super) fn end(&self) -> Option<u64> {
        self.windows.last().map(|last| last.start + last.bytes)
    }

    /// Fails if there is a window: content cannot follow one.
    pub(super) fn check_no_windows(&self) -> Result<(), Error> {
        match self.end() {
            None => Ok(()),
            Some(_) => Err(Error::Unsupported(
                "cannot append content after a window".into(),
            )),
        }
    }

    pub(super) fn add_backing(&mut self, backing: BackingEntry) -> u32 {
        self.backings.push(backing);
        (self.backings.len() - 1) as u32
    }

    /// Checks a window that is to be added after address `position`, the end of the content and the
    /// windows so far. Returns its start: `position` rounded up to a region.
    pub(super) fn check(
        &self,
        position: u64,
        backing: u32,
        address: u64,
        bytes: u64,
    ) -> Result<u64, Error> {
        let refused = |why: String| {
            Error::Unsupported(format!(
                "a window of {bytes} bytes at byte {address} of backing {backing}: {why}"
            ))
        };
        let Some(entry) = self.backings.get(backing as usize) else {
            return Err(refused(format!(
                "the image has only {} backings",
                self.backings.len()
            )));
        };
        if bytes == 0
            || !bytes.is_multiple_of(SECTOR_BYTES)
            || !address.is_multiple_of(SECTOR_BYTES)
        {
            return Err(refused(format!(
                "not in whole sectors of {SECTOR_BYTES} bytes"
            )));
        }
        if address
            .checked_add(bytes)
            .is_none_or(|end| end > entry.size)
        {
            return Err(refused(format!(
                "the backing has only {} bytes",
                entry.size
            )));
        }
        if address + bytes > MAX_ADDRESS {
            return Err(refused(format!("addresses end at {MAX_ADDRESS}")));
        }
        position
            .checked_next_multiple_of(REGION_BYTES)
            .filter(|start| {
                start
                    .checked_add(bytes)
                    .is_some_and(|end| end.div_ceil(REGION_BYTES) <= MAX_ROOT_ENTRIES)
            })
            .ok_or_else(|| {
                refused(format!(
                    "the window does not fit after byte {position}: the address space is limited \
                     to {} bytes",
                    MAX_ROOT_ENTRIES * REGION_BYTES
                ))
            })
    }

    /// Adds a window that [`Windows::check`] accepted.
    pub(super) fn push(&mut self, start: u64, backing: u32, address: u64, bytes: u64) {
        self.windows.push(Window {
            start,
            backing,
            backing_address: address,
            bytes,
        });
    }

    /// Each region that is part of a window, with its entry.
    pub(super) fn entries(&self) -> impl Iterator<Item = (u64, Entry)> + '_ {
        self.windows.iter().flat_map(|window| {
            let (address, bytes) = (window.backing_address, window.bytes);
            let entries = window_entries(window.backing, address, bytes, REGION_SHIFT);
            (window.start >> REGION_SHIFT..).zip(entries)
        })
    }

    pub(super) fn backing_count(&self) -> u32 {
        self.backings.len() as u32
    }

    /// The encoded backing table. Fails if the format does not allow the backings in a file for
    /// this purpose.
    pub(super) fn backing_table(&self, purpose: Use) -> Result<Vec<u8>, Error> {
        if self.backings.len() > MAX_BACKINGS as usize {
            return Err(Error::Unsupported(format!(
                "{} backings; the format holds {MAX_BACKINGS}",
                self.backings.len()
            )));
        }
        let not_by_digest = |entry: &&BackingEntry| !matches!(entry.name, BackingName::Digest(_));
        if purpose == Use::Image
            && let Some(entry) = self.backings.iter().find(not_by_digest)
        {
            return Err(Error::Unsupported(format!(
                "backing {}: an image names its backings by digest",
                entry.name
            )));
        }
        if let Some(entry) = self
            .backings
            .iter()
            .find(|entry| !entry.size.is_multiple_of(SECTOR_BYTES) || entry.size > MAX_ADDRESS)
        {
            return Err(Error::Unsupported(format!(
                "backing {}: invalid size of {} bytes (not a multiple of {SECTOR_BYTES}, or larger \
                 than {MAX_ADDRESS})",
                entry.name, entry.size
            )));
        }
        encode_backings(&self.backings).map_err(|error| Error::Unsupported(error.to_string()))
    }
}
