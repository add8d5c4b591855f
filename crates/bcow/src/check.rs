//! Checks a file: structure, checksums, Merkle tree, and with `data` every block.
//!
//! The order is that of spec section 12. Parts that are unreadable because of damage are skipped;
//! all others are checked.

use std::sync::Arc;

use bcow_format::{BackingEntry, FreeRange, Header, State, decode_backings, decode_free};
use serde::Serialize;

use crate::cache::FileId;
use crate::checked::{CheckedFile, read_header, read_metadata, read_table};
use crate::log::{self, Replayed};
use crate::merkle::Verifier;
use crate::overlay::Overlay;
use crate::root::{Root, check_windows};
use crate::storage::Storage;
use crate::{BlockCache, Error};

mod finding;
mod regions;
mod repair;
mod restore;
mod space;

pub use finding::{Finding, Findings, Place, Severity};
pub use repair::{Repair, repair};
pub use restore::{RestoreError, Restored, restore};

/// Options of a check.
#[derive(Debug, Clone)]
pub struct CheckOptions {
    /// Read and decode every block, and hash every chunk of the file.
    pub data: bool,
    /// Number of threads for this.
    pub threads: usize,
}

impl CheckOptions {
    /// All of the file, on one thread.
    pub const FULL: CheckOptions = CheckOptions {
        data: true,
        threads: 1,
    };
}

/// The result of a check.
#[derive(Debug, Default)]
pub struct Report {
    /// Findings in the order of the structure of the file.
    pub findings: Findings,
    /// Number of sub-block tables checked.
    pub tables: u64,
    /// Number of stored blocks seen.
    pub blocks: u64,
    /// Stored bytes read and decoded (0 without `data`).
    pub bytes_read: u64,
    /// Further results of a writable file.
    pub writable: Option<Writable>,
}

/// Results that only a writable file has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Writable {
    /// Number of valid records in the log.
    pub records: u64,
    /// Whether the last record of the log is incomplete because its blocks are missing, as after a
    /// power cut.
    pub dropped_record: bool,
    /// Number of blocks without a checksum, which are changed in place.
    pub open_blocks: u64,
    /// Free bytes of the file.
    pub free_bytes: u64,
    /// Bytes of the file that are neither used nor free, so that no writer reuses them.
    pub leaked_bytes: u64,
}

impl Report {
    /// Whether no finding is an error.
    pub fn is_sound(&self) -> bool {
        self.findings.is_sound()
    }

    /// Adds a finding for an error of the file; returns an error of the host.
    fn note(&mut self, place: impl Into<Place>, error: Error) -> Result<(), Error> {
        match error.code() {
            Some(code) => {
                self.add(Finding::error(code, place, error.to_string()));
                Ok(())
            }
            None => Err(error),
        }
    }

    fn add(&mut self, finding: Finding) {
        self.findings.add(finding);
    }
}

/// Checks the file in `storage`. Problems of the file are in the report; an error means that the
/// host failed.
pub fn check(storage: Arc<dyn Storage>, options: &CheckOptions) -> Result<Report, Error> {
    match read_header(&*storage) {
        Ok(header) => check_as(storage, &header, options),
        Err(error) => {
            let mut report = Report::default();
            report.note("header", error)?;
            Ok(report)
        }
    }
}

/// Checks the file with this header.
fn check_as(
    storage: Arc<dyn Storage>,
    header: &Header,
    options: &CheckOptions,
) -> Result<Report, Error> {
    let mut report = Report::default();
    check_slots(&*storage, header, &mut report)?;
    let verifier = Verifier::new(header, FileId::next(), &BlockCache::default());
    let file = CheckedFile {
        storage,
        verifier: None,
    };
    match check_root(&file, header) {
        Ok((root, backings)) => {
            if let Err(error) = read_metadata(&file, header) {
                report.note("metadata", error)?;
            }
            let free = check_free_list(&file, header, &mut report)?;
            if let Some((replayed, overlay)) = check_log(&file, header, &root, &mut report)? {
                let subject = regions::Subject {
                    file: &file,
                    header,
                    root: &root,
                    backings: &backings,
                    logged: &overlay,
                };
                let ranges = regions::check(&subject, options, &mut report)?;
                space::check(header, &replayed, ranges, &free, &mut report);
            }
        }
        Err(error) => report.note("root table", error)?,
    }
    if let Some(verifier) = verifier {
        for error in verifier.check_all(&*file.storage, options.data, options.threads)? {
            report.note("Merkle tree", error)?;
        }
    }
    Ok(report)
}

/// A sealed file has two valid slots. One is enough to read it, but the next damage could lose it.
fn check_slots(storage: &dyn Storage, header: &Header, report: &mut Report) -> Result<(), Error> {
    let mut area = [0; bcow_format::HEADER_AREA_BYTES];
    storage.read(0, &mut area)?;
    for (name, slot) in ["A", "B"].iter().zip(area.chunks(bcow_format::SLOT_BYTES)) {
        let good = bcow_format::choose_header(slot).is_ok();
        if !good && header.state == State::Sealed {
            let message = "is damaged or empty; the other slot serves";
            let finding = Finding::warning("header-slot", format!("header slot {name}"), message);
            report.add(finding.repaired_by("writes the slot again"));
        }
    }
    Ok(())
}

fn check_root(file: &CheckedFile, header: &Header) -> Result<(Root, Vec<BackingEntry>), Error> {
    let root = Root::read(file, header)?;
    let backings = decode_backings(&file.read_section(&header.backings)?, header)?;
    check_windows(&root, &backings)?;
    Ok((root, backings))
}

fn check_free_list(
    file: &CheckedFile,
    header: &Header,
    report: &mut Report,
) -> Result<Vec<FreeRange>, Error> {
    let bytes = file.read_section(&header.free)?;
    Ok(decode_free(&bytes, header).unwrap_or_else(|error| {
        let finding = Finding::error(error.code(), "free list", error.to_string());
        report.add(finding.repaired_by("makes a new list"));
        Vec::new()
    }))
}

/// Reads the record log. Returns `None` if the log is damaged: the places of blocks are unknown
/// then.
fn check_log(
    file: &CheckedFile,
    header: &Header,
    root: &Root,
    report: &mut Report,
) -> Result<Option<(Replayed, Overlay)>, Error> {
    let read = || {
        let replayed = log::replay(&*file.storage, header)?;
        let shift = |region, stored: &_| match read_table(file, header, region, stored) {
            Ok(table) => Ok(Some(table.block_shift)),
            // The region of the mapping is damaged; the check of the region reports it.
            Err(error) if error.code().is_some() => Ok(None),
            Err(error) => Err(error),
        };
        let overlay = Overlay::new(&replayed.records, header, root, shift)?;
        Ok((replayed, overlay))
    };
    match read() {
        Ok((replayed, overlay)) => {
            if header.state == State::Writable {
                report.writable = Some(Writable {
                    records: replayed.records.len() as u64,
                    dropped_record: replayed.dropped,
                    ..Writable::default()
                });
            }
            Ok(Some((replayed, overlay)))
        }
        Err(error) => {
            report.note("record log", error)?;
            Ok(None)
        }
    }
}
