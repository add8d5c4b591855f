//! Checks that the ranges of a file do not overlap, and finds unused space of a writable file.

use bcow_format::{FreeRange, Header, SECTOR_BYTES, Section, State, Stored, incompatible};

use super::regions::Used;
use super::{Finding, Report};
use crate::log::Replayed;

type Range = (u64, u64);

/// Checks the space that the sections, regions, log and free list of the file use.
pub(super) fn check(
    header: &Header,
    replayed: &Replayed,
    used: Used,
    free: &[FreeRange],
    report: &mut Report,
) {
    let mut in_tables = sections(header);
    in_tables.extend(used.in_tables.iter().map(range));
    let mut all = in_tables.clone();
    all.extend(used.logged.iter().map(range));
    check_overlaps(all, header.state == State::Sealed, report);
    if header.state == State::Sealed {
        return;
    }
    let free: Vec<Range> = free
        .iter()
        .map(|range| (range.start, range.start + range.bytes))
        .collect();
    check_free(&mut in_tables, &free, report);
    if used.incomplete {
        return;
    }
    // Leaked space is below the header's `file_bytes`, and no table, record or list names it. From
    // `file_bytes` on, a writer treats all space as free that no record names.
    let mut named = in_tables;
    named.extend(&free);
    named.extend(used.replaced.iter().map(range));
    for record in &replayed.records {
        let stored = record.mappings.iter().filter_map(|m| m.entry.stored());
        named.extend(stored.map(|stored| range(&stored)));
    }
    let leaked = unnamed_bytes(named, header.file_bytes);
    let mut in_use = sections(header);
    in_use.extend(used.in_tables.iter().chain(&used.logged).map(range));
    if let Some(writable) = &mut report.writable {
        writable.leaked_bytes = leaked;
        writable.free_bytes = unnamed_bytes(in_use, replayed.file_bytes) - leaked;
    }
    if leaked > 0 {
        let message = format!("{leaked} bytes of the file are neither in use nor in the list");
        let finding = Finding::warning("leak", "free list", message);
        report.add(finding.repaired_by("adds the space to the list"));
    }
}

fn range(stored: &Stored) -> Range {
    (stored.at.0, stored.end())
}

/// The sections that the header names, as ranges of the file. The first is the sector of the
/// header, except in a plain file, where a block contains it.
fn sections(header: &Header) -> Vec<Range> {
    let mut ranges = Vec::new();
    if !header.features.has_incompatible(incompatible::PLAIN) {
        ranges.push((0, SECTOR_BYTES));
    }
    let section = |section: &Section| (section.offset, section.offset + u64::from(section.bytes));
    for part in [
        &header.root,
        &header.metadata,
        &header.backings,
        &header.free,
    ] {
        if part.bytes > 0 {
            ranges.push(section(part));
        }
    }
    let (log, log_bytes) = header.log;
    if log_bytes > 0 {
        ranges.push((log, log + log_bytes));
    }
    if let Some(tree) = &header.merkle {
        ranges.push((tree.offset, header.file_bytes));
    }
    ranges
}

/// In a sealed file, several entries may name the same stored block; any other overlap is an error
/// (spec section 5).
fn check_overlaps(mut ranges: Vec<Range>, may_share: bool, report: &mut Report) {
    ranges.sort_unstable();
    if may_share {
        ranges.dedup();
    }
    for pair in ranges.windows(2) {
        let ((start, end), (next, next_end)) = (pair[0], pair[1]);
        if next < end {
            let place = format!("bytes {next}..{} of the file", end.min(next_end));
            let message = format!("stored ranges {start}..{end} and {next}..{next_end} overlap");
            report.add(Finding::error("overlap", place, message));
        }
    }
}

/// The free list belongs to the header: it must not contain places that tables name, but may
/// contain places that records name.
fn check_free(in_tables: &mut [Range], free: &[Range], report: &mut Report) {
    in_tables.sort_unstable();
    let mut free = free.iter().peekable();
    for &(start, end) in in_tables.iter() {
        while free.next_if(|range| range.1 <= start).is_some() {}
        if let Some(&&(first, last)) = free.peek()
            && first < end
        {
            let place = format!("bytes {}..{} of the file", first.max(start), last.min(end));
            let message = format!("in use as part of {start}..{end}, and in the free list");
            report.add(Finding::error("overlap", place, message));
        }
    }
}

/// Bytes of whole sectors below `end` that no range touches.
fn unnamed_bytes(mut named: Vec<Range>, end: u64) -> u64 {
    named.sort_unstable();
    let whole = |from: u64, to: u64| {
        (to / SECTOR_BYTES * SECTOR_BYTES).saturating_sub(from.next_multiple_of(SECTOR_BYTES))
    };
    let mut bytes = 0;
    let mut at = SECTOR_BYTES;
    for (start, last) in named {
        bytes += whole(at, start.min(end));
        at = at.max(last);
    }
    bytes + whole(at, end)
}
