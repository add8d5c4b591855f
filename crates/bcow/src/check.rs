//! Examines a file: structure, checksums, Merkle tree, and with `data` every block.
//!
//! The order is that of spec section 12. What a damaged part makes unreadable is not examined further; all else is.

use std::sync::Arc;

use bcow_format::{
    Entry, Header, SECTOR_BYTES, Section, Stored, SubBlockTable, decode_backings, decode_root,
    incompatible,
};

use crate::cache::FileId;
use crate::codec::Encoding;
use crate::image::{
    CheckedFile, Piece, check_windows, read_block, read_header, read_metadata, read_table,
};
use crate::merkle::Verifier;
use crate::storage::Storage;
use crate::{BlockCache, Error, threads};

/// At most this many findings are kept; a file of garbage would have millions.
const MOST_FINDINGS: usize = 1000;

/// How much to examine.
#[derive(Debug, Clone)]
pub struct CheckOptions {
    /// Read and decode every block, and hash every chunk of the file.
    pub data: bool,
    /// Threads that do so.
    pub threads: usize,
}

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// Content is lost or cannot be trusted.
    Error,
    /// Nothing is lost, but something is not as a writer should leave it.
    Warning,
}

/// Something wrong, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Stable code: spec section 12.
    pub code: &'static str,
    /// How bad.
    pub severity: Severity,
    /// Where: "header", "root table", "region 17", "byte 4096 of the address space".
    pub place: String,
    /// What.
    pub message: String,
}

/// What was examined and found.
#[derive(Debug, Default)]
pub struct Report {
    /// In the order of the file's structure.
    pub findings: Vec<Finding>,
    /// Findings beyond those kept.
    pub omitted: u64,
    /// Sub-block tables examined.
    pub tables: u64,
    /// Stored blocks seen.
    pub blocks: u64,
    /// Stored bytes read and decoded (0 without `data`).
    pub bytes_read: u64,
}

impl Report {
    /// Whether nothing of severity [`Severity::Error`] was found.
    pub fn is_sound(&self) -> bool {
        self.findings
            .iter()
            .all(|finding| finding.severity != Severity::Error)
    }

    fn add(&mut self, finding: Finding) {
        if self.findings.len() < MOST_FINDINGS {
            self.findings.push(finding);
        } else {
            self.omitted += 1;
        }
    }

    /// Notes what is wrong with the file; gives back what is wrong with the host.
    fn note(&mut self, place: impl Into<String>, error: Error) -> Result<(), Error> {
        match error.code() {
            Some(code) => {
                self.add(Finding {
                    code,
                    severity: Severity::Error,
                    place: place.into(),
                    message: error.to_string(),
                });
                Ok(())
            }
            None => Err(error),
        }
    }
}

/// Examines the file in `storage`. An error means the host failed; what is wrong with the file is in the report.
pub fn check(storage: Arc<dyn Storage>, options: &CheckOptions) -> Result<Report, Error> {
    let mut report = Report::default();
    let header = match read_header(&*storage) {
        Ok(header) => header,
        Err(error) => {
            report.note("header", error)?;
            return Ok(report);
        }
    };
    check_slots(&*storage, &header, &mut report)?;
    let verifier = Verifier::new(&header, FileId::next(), &BlockCache::default());
    let file = CheckedFile {
        storage,
        verifier: None,
    };
    match check_root(&file, &header) {
        Ok(root) => {
            check_metadata(&file, &header, &mut report)?;
            check_regions(&file, &header, &root, options, &mut report)?;
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

/// A sealed file has two good slots; one is enough to read it, but then the next accident counts.
fn check_slots(storage: &dyn Storage, header: &Header, report: &mut Report) -> Result<(), Error> {
    let mut area = [0; bcow_format::HEADER_AREA_BYTES];
    storage
        .read_at(0, &mut area)
        .map_err(|source| Error::io("read", 0, source))?;
    for (name, slot) in ["A", "B"].iter().zip(area.chunks(bcow_format::SLOT_BYTES)) {
        let good = bcow_format::choose_header(slot).is_ok();
        if !good && header.state == bcow_format::State::Sealed {
            report.add(Finding {
                code: "header-slot",
                severity: Severity::Warning,
                place: format!("header slot {name}"),
                message: "is damaged or empty; the other slot serves".into(),
            });
        }
    }
    Ok(())
}

fn check_root(file: &CheckedFile, header: &Header) -> Result<Vec<Entry>, Error> {
    let root = decode_root(&file.read_section(&header.root)?, header)?;
    let backings = decode_backings(&file.read_section(&header.backings)?, header)?;
    check_windows(&root, &backings)?;
    Ok(root)
}

fn check_metadata(file: &CheckedFile, header: &Header, report: &mut Report) -> Result<(), Error> {
    match read_metadata(file, header) {
        Ok(_) => Ok(()),
        Err(error) => report.note("metadata", error),
    }
}

/// What examining one region found.
#[derive(Default)]
struct RegionReport {
    errors: Vec<(String, Error)>,
    stored: Vec<Stored>,
    tables: u64,
    bytes_read: u64,
}

fn check_regions(
    file: &CheckedFile,
    header: &Header,
    root: &[Entry],
    options: &CheckOptions,
    report: &mut Report,
) -> Result<(), Error> {
    let mut ranges = sections(header);
    let regions = threads::map_indexed(root.len() as u64, options.threads, |region| {
        check_region(file, header, region, &root[region as usize], options.data)
    })?;
    for region in regions {
        report.tables += region.tables;
        report.bytes_read += region.bytes_read;
        for (place, error) in region.errors {
            report.note(place, error)?;
        }
        ranges.extend(
            region
                .stored
                .iter()
                .map(|stored| (stored.at.0, stored.end())),
        );
    }
    report.blocks = (ranges.len() - sections(header).len()) as u64 - report.tables;
    check_overlaps(ranges, report);
    Ok(())
}

fn check_region(
    file: &CheckedFile,
    header: &Header,
    region: u64,
    entry: &Entry,
    data: bool,
) -> Result<RegionReport, Error> {
    let mut report = RegionReport::default();
    let start = region << header.region_shift;
    let length = header.region_length(region);
    let block = |report: &mut RegionReport, piece: Piece| -> Result<(), Error> {
        let (stored, encoding) = match piece.entry {
            // Nothing to compare its bytes with.
            Entry::Open(stored) => {
                report.stored.push(stored);
                return Ok(());
            }
            Entry::Raw(stored) => (stored, Encoding::Raw),
            Entry::Zstd(stored) => (stored, Encoding::Zstd),
            _ => return Ok(()),
        };
        report.stored.push(stored);
        if data {
            report.bytes_read += u64::from(stored.bytes);
            match read_block(file, &piece, &stored, encoding) {
                Ok(_) => {}
                Err(error @ Error::Io { .. }) => return Err(error),
                Err(error) => {
                    let place = format!("region {region}, byte {}", piece.start);
                    report.errors.push((place, error));
                }
            }
        }
        Ok(())
    };
    match entry {
        Entry::Table(stored) => {
            report.stored.push(*stored);
            report.tables += 1;
            let table: SubBlockTable = match read_table(file, header, region, stored) {
                Ok(table) => table,
                Err(error @ Error::Io { .. }) => return Err(error),
                Err(error) => {
                    report.errors.push((format!("region {region}"), error));
                    return Ok(report);
                }
            };
            let block_bytes = u64::from(table.block_shift.bytes());
            for (index, entry) in (0..).zip(table.entries.iter()) {
                let piece = Piece {
                    start: start + index * block_bytes,
                    length: block_bytes.min(length - index * block_bytes),
                    entry: *entry,
                };
                block(&mut report, piece)?;
            }
        }
        entry => block(
            &mut report,
            Piece {
                start,
                length,
                entry: *entry,
            },
        )?,
    }
    Ok(report)
}

/// The sections that the header names, as ranges of the file; the header's own sector first, unless a plain block lies there.
fn sections(header: &Header) -> Vec<(u64, u64)> {
    let mut ranges = Vec::new();
    if !header.features.has_incompatible(incompatible::PLAIN) {
        ranges.push((0, SECTOR_BYTES));
    }
    let section = |section: &Section| (section.offset, section.offset + u64::from(section.bytes));
    for part in [&header.root, &header.metadata, &header.backings] {
        if part.bytes > 0 {
            ranges.push(section(part));
        }
    }
    if let Some(tree) = &header.merkle {
        ranges.push((tree.offset, header.file_bytes));
    }
    ranges
}

/// Content that is stored once may be named twice; anything else must not overlap (spec section 5).
fn check_overlaps(mut ranges: Vec<(u64, u64)>, report: &mut Report) {
    ranges.sort_unstable();
    ranges.dedup();
    for pair in ranges.windows(2) {
        let ((start, end), (next, next_end)) = (pair[0], pair[1]);
        if next < end {
            report.add(Finding {
                code: "overlap",
                severity: Severity::Error,
                place: format!("bytes {next}..{} of the file", end.min(next_end)),
                message: format!("stored ranges {start}..{end} and {next}..{next_end} overlap"),
            });
        }
    }
}
