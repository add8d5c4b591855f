//! Checks the regions of a file: their tables and blocks, with the records applied.

use bcow_format::{BackingEntry, Entry, Header, Stored, SubBlockTable, check_fragments};

use super::{CheckOptions, Report};
use crate::checked::{CheckedFile, read_block, read_table};
use crate::overlay::{LoggedRegion, Overlay};
use crate::piece::Piece;
use crate::root::Root;
use crate::{Error, threads};

/// The file under check.
pub(super) struct Subject<'a> {
    pub(super) file: &'a CheckedFile,
    pub(super) header: &'a Header,
    pub(super) root: &'a Root,
    pub(super) backings: &'a [BackingEntry],
    pub(super) logged: &'a Overlay,
}

/// The places in the file that the regions use.
#[derive(Default)]
pub(super) struct Used {
    /// Named by tables only.
    pub(super) in_tables: Vec<Stored>,
    /// Named by records.
    pub(super) logged: Vec<Stored>,
    /// Named by tables, but replaced by records.
    pub(super) replaced: Vec<Stored>,
    /// Whether a part was unreadable, so that there may be further places.
    pub(super) incomplete: bool,
}

/// The result for one region.
#[derive(Default)]
struct RegionReport {
    errors: Vec<(String, Error)>,
    used: Used,
    tables: u64,
    blocks: u64,
    open_blocks: u64,
    bytes_read: u64,
}

/// Checks all regions.
pub(super) fn check(
    subject: &Subject<'_>,
    options: &CheckOptions,
    report: &mut Report,
) -> Result<Used, Error> {
    let mut used = Used::default();
    let count = subject.root.len() as u64;
    let regions = threads::map_indexed(count, options.threads, |region| {
        check_region(subject, region, options.data)
    })?;
    for region in regions {
        report.tables += region.tables;
        report.blocks += region.blocks;
        report.bytes_read += region.bytes_read;
        if let Some(writable) = &mut report.writable {
            writable.open_blocks += region.open_blocks;
        }
        for (place, error) in region.errors {
            report.note(place, error)?;
        }
        used.in_tables.extend(region.used.in_tables);
        used.logged.extend(region.used.logged);
        used.replaced.extend(region.used.replaced);
        used.incomplete |= region.used.incomplete;
    }
    Ok(used)
}

fn check_region(subject: &Subject<'_>, region: u64, data: bool) -> Result<RegionReport, Error> {
    let mut report = RegionReport::default();
    let root = subject.root[region as usize];
    let logged = subject.logged.region(region);
    let length = subject.header.region_length(region);
    let start = region << subject.header.region_shift;
    let table = match root {
        Entry::Table(stored) => {
            let replaced = logged.is_some_and(|logged| logged.base != root);
            let table = check_table(subject, region, &stored, replaced, &mut report)?;
            if table.is_none() && !replaced {
                return Ok(report);
            }
            table
        }
        _ => None,
    };
    let mut at = 0;
    while at < length {
        let (piece, is_logged) = piece_at(root, table.as_ref(), logged, at, length);
        check_block(subject, region, start, &piece, is_logged, data, &mut report)?;
        at = piece.start + piece.length;
    }
    replaced_entries(root, table.as_ref(), logged, length, &mut report.used);
    Ok(report)
}

/// Reads the stored table of the region. If a record replaced the whole region, the table only
/// shows which places were used before.
fn check_table(
    subject: &Subject<'_>,
    region: u64,
    stored: &Stored,
    replaced: bool,
    report: &mut RegionReport,
) -> Result<Option<SubBlockTable>, Error> {
    if replaced {
        report.used.replaced.push(*stored)
    } else {
        report.tables += 1;
        report.used.in_tables.push(*stored);
    }
    let backing_bytes = |index: u32| {
        let backing = subject.backings.get(index as usize);
        backing.map_or(0, |entry| entry.size)
    };
    let table = read_table(subject.file, subject.header, region, stored).and_then(|table| {
        check_fragments(&table, region, backing_bytes)?;
        Ok(table)
    });
    match table {
        Ok(table) => Ok(Some(table)),
        Err(error) if error.code().is_none() => Err(error),
        Err(error) => {
            report.used.incomplete = true;
            if !replaced {
                report.errors.push((format!("region {region}"), error));
            }
            Ok(None)
        }
    }
}

/// The piece that covers byte `at` of the region, with offsets in the region, and whether a record
/// set it.
fn piece_at(
    root: Entry,
    table: Option<&SubBlockTable>,
    logged: Option<&LoggedRegion>,
    at: u64,
    length: u64,
) -> (Piece, bool) {
    let logged = logged.and_then(|logged| logged.piece(at, length));
    let stored = || match table {
        Some(table) => Piece::of_table(table, at, length),
        None => Piece {
            start: 0,
            length,
            entry: root,
        },
    };
    (logged.unwrap_or_else(stored), logged.is_some())
}

/// Checks a piece, given by its offset in a region that begins at `region_start`.
fn check_block(
    subject: &Subject<'_>,
    region: u64,
    region_start: u64,
    piece: &Piece,
    is_logged: bool,
    data: bool,
    report: &mut RegionReport,
) -> Result<(), Error> {
    let Some(stored) = piece.entry.stored() else {
        return Ok(());
    };
    if is_logged {
        report.used.logged.push(stored)
    } else {
        report.used.in_tables.push(stored)
    }
    report.blocks += 1;
    report.open_blocks += u64::from(matches!(piece.entry, Entry::Open(_)));
    if !data {
        return Ok(());
    }
    let piece = Piece {
        start: region_start + piece.start,
        ..*piece
    };
    report.bytes_read += u64::from(stored.bytes);
    // Of an open block, which has no checksum, this only shows that the bytes are readable.
    if let Err(error) = read_block(subject.file, &piece, &stored) {
        if error.code().is_none() {
            return Err(error);
        }
        let place = format!("region {region}, byte {}", piece.start);
        report.errors.push((place, error));
    }
    Ok(())
}

/// Adds the places that the tables name and that records replaced.
fn replaced_entries(
    root: Entry,
    table: Option<&SubBlockTable>,
    logged: Option<&LoggedRegion>,
    length: u64,
    used: &mut Used,
) {
    let Some(logged) = logged else {
        return;
    };
    match table {
        Some(table) => {
            let block = u64::from(table.block_shift.bytes());
            for (index, entry) in (0..).zip(&table.entries) {
                if logged.base != root || logged.piece(index * block, length).is_some() {
                    used.replaced.extend(entry.stored());
                }
            }
        }
        // The place of the table was added when it was read.
        None if matches!(root, Entry::Table(_)) => {}
        None => used.replaced.extend(root.stored()),
    }
}
