//! Sparse files in tar: the old GNU headers, and the PAX records of GNU tar in the versions 0.0,
//! 0.1 and 1.0.

use super::number;
use crate::error::TarProblem;

/// Upper bound of the data runs of one file. A run takes 16 bytes of memory.
pub(crate) const MAX_RUNS: usize = 1 << 18;

/// The map of a sparse file: its size, and its data runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SparseMap {
    /// Size of the file in bytes.
    pub size: u64,
    /// Data runs in file order. Runs are not empty and do not overlap.
    pub runs: Vec<Run>,
}

/// A run of data in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    /// Offset in the file in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
}

impl SparseMap {
    /// Validates the runs (offset, length) of an archive, and joins adjacent runs. `stored` is the
    /// number of data bytes of the file in the archive.
    pub(crate) fn new(
        size: u64,
        runs: impl IntoIterator<Item = (u64, u64)>,
        stored: u64,
    ) -> Result<SparseMap, TarProblem> {
        let bad = |problem| TarProblem::BadSparse { problem };
        if i64::try_from(size).is_err() {
            return Err(bad("the file is too large"));
        }
        let mut map = SparseMap {
            size,
            runs: Vec::new(),
        };
        let (mut end, mut total) = (0u64, 0u64);
        for (offset, length) in runs {
            let run_end = offset
                .checked_add(length)
                .filter(|&e| e <= size)
                .ok_or_else(|| bad("a run ends beyond the file"))?;
            if offset < end {
                return Err(bad("the runs overlap or are out of order"));
            }
            end = run_end;
            total += length;
            if length == 0 {
                continue;
            }
            match map.runs.last_mut() {
                Some(last) if last.offset + last.length == offset => last.length += length,
                _ => map.runs.push(Run { offset, length }),
            }
        }
        if total != stored {
            return Err(bad("the runs do not add up to the bytes in the archive"));
        }
        Ok(map)
    }
}

/// The values of the `GNU.sparse.*` records of a file, before all of them are read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct SparseRecords {
    pub major: Option<u64>,
    pub minor: Option<u64>,
    /// The name of the file; that of the header is only for programs without sparse files.
    pub name: Option<Vec<u8>>,
    /// The size of the file in bytes.
    size: Option<u64>,
    /// The recorded number of runs.
    count: Option<u64>,
    /// Alternating offsets and lengths of the runs, in versions 0.0 and 0.1.
    numbers: Vec<u64>,
}

/// The place of the sparse map of a file with PAX records.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PaxSparse {
    /// The file is not sparse.
    No,
    /// Versions 0.0 and 0.1: the map is in the records.
    InRecords { size: u64, runs: Vec<(u64, u64)> },
    /// Version 1.0: the map is in front of the data.
    InData { size: u64 },
}

impl SparseRecords {
    /// Applies the record `GNU.sparse.KEY`.
    pub(crate) fn apply(&mut self, key: &[u8], value: &[u8]) -> Result<(), TarProblem> {
        let bad = |problem| TarProblem::BadSparse { problem };
        let number = || number::decimal(value).ok_or_else(|| bad("a record is not a number"));
        match key {
            b"major" => self.major = Some(number()?),
            b"minor" => self.minor = Some(number()?),
            b"size" | b"realsize" => self.size = Some(number()?),
            b"numblocks" => self.count = Some(number()?),
            b"name" if value.contains(&0) => return Err(TarProblem::ZeroInName),
            b"name" => self.name = Some(value.to_vec()),
            b"offset" | b"numbytes" => {
                let is_length = key == b"numbytes";
                if is_length != (self.numbers.len() % 2 == 1) {
                    return Err(bad("offsets and lengths do not alternate"));
                }
                self.push(number()?)?;
            }
            b"map" => {
                self.numbers.clear();
                for text in value.split(|&b| b == b',').filter(|t| !t.is_empty()) {
                    let value = number::decimal(text)
                        .ok_or_else(|| bad("the map is not a list of numbers"))?;
                    self.push(value)?;
                }
            }
            _ => return Err(bad("an unknown record")),
        }
        Ok(())
    }

    /// Adds an offset or a length of the map.
    fn push(&mut self, number: u64) -> Result<(), TarProblem> {
        if self.numbers.len() >= 2 * MAX_RUNS {
            return Err(TarProblem::BadSparse {
                problem: "too many runs",
            });
        }
        self.numbers.push(number);
        Ok(())
    }

    /// Determines the version and the map from all records.
    pub(crate) fn resolve(&self) -> Result<PaxSparse, TarProblem> {
        let bad = |problem| TarProblem::BadSparse { problem };
        let size = || self.size.ok_or_else(|| bad("the file's size is missing"));
        match (self.major, self.minor) {
            (Some(1), Some(0)) => Ok(PaxSparse::InData { size: size()? }),
            (None, None) if *self == SparseRecords::default() => Ok(PaxSparse::No),
            (None, None) | (Some(0), Some(0 | 1)) => {
                if self.numbers.len() % 2 == 1 {
                    return Err(bad("a run has no length"));
                }
                let runs: Vec<_> = self.numbers.chunks_exact(2).map(|p| (p[0], p[1])).collect();
                match self.count {
                    Some(count) if count != runs.len() as u64 => {
                        Err(bad("the number of runs differs from the recorded number"))
                    }
                    _ => Ok(PaxSparse::InRecords {
                        size: size()?,
                        runs,
                    }),
                }
            }
            _ => Err(bad("an unknown version")),
        }
    }
}

/// Reads the map of version 1.0 block by block. The map has one decimal number per line: the number
/// of runs, and then the offset and the length of each run.
#[derive(Debug, Default)]
pub(crate) struct MapReader {
    /// The incomplete last line.
    line: Vec<u8>,
    /// The number of runs, if it was read.
    count: Option<usize>,
    /// Alternating offsets and lengths of the runs.
    numbers: Vec<u64>,
}

impl MapReader {
    /// Reads the next block of the data. Returns whether the map ends in this block; the rest of
    /// the block is padding then.
    pub(crate) fn read_block(&mut self, block: &[u8]) -> Result<bool, TarProblem> {
        let bad = |problem| TarProblem::BadSparse { problem };
        for &byte in block {
            if byte != b'\n' {
                self.line.push(byte);
                // Every 64-bit number fits into 20 digits.
                if self.line.len() > 20 {
                    return Err(bad("the map is not a list of numbers"));
                }
                continue;
            }
            let number = number::decimal(&self.line)
                .ok_or_else(|| bad("the map is not a list of numbers"))?;
            self.line.clear();
            match self.count {
                None if number > MAX_RUNS as u64 => {
                    return Err(bad("too many runs"));
                }
                None => self.count = Some(number as usize),
                Some(_) => self.numbers.push(number),
            }
            if self
                .count
                .is_some_and(|count| self.numbers.len() == 2 * count)
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The runs (offset, length) that were read.
    pub(crate) fn runs(&self) -> impl Iterator<Item = (u64, u64)> {
        self.numbers.chunks_exact(2).map(|pair| (pair[0], pair[1]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_that_contradicts_itself_is_refused() {
        let check = |size, runs: &[(u64, u64)], stored| {
            SparseMap::new(size, runs.iter().copied(), stored).map_err(|e| e.to_string())
        };
        assert_eq!(
            check(100, &[(0, 10), (10, 5), (50, 0), (60, 40)], 55)
                .unwrap()
                .runs,
            [
                Run {
                    offset: 0,
                    length: 15
                },
                Run {
                    offset: 60,
                    length: 40
                }
            ]
        );
        assert!(check(100, &[], 0).is_ok());
        assert!(check(100, &[(0, 101)], 101).is_err());
        assert!(check(100, &[(1, u64::MAX)], 0).is_err());
        assert!(check(100, &[(50, 10), (0, 10)], 20).is_err());
        assert!(check(100, &[(0, 10), (5, 10)], 20).is_err());
        assert!(check(100, &[(0, 10)], 11).is_err());
        assert!(check(u64::MAX, &[], 0).is_err());
    }

    #[test]
    fn a_map_in_the_data_may_straddle_blocks() {
        let text = b"2\n0\n512\n1048576\n4096\n\0\0\0";
        for split in 1..text.len() - 4 {
            let mut reader = MapReader::default();
            let done = reader.read_block(&text[..split]).unwrap();
            assert!(done || reader.read_block(&text[split..]).unwrap());
            assert_eq!(
                reader.runs().collect::<Vec<_>>(),
                [(0, 512), (1_048_576, 4096)]
            );
        }
    }

    #[test]
    fn a_map_with_a_hostile_count_is_refused_before_an_allocation() {
        for text in [
            &b"999999999999\n"[..],
            b"x\n",
            b"\n",
            b"111111111111111111111",
        ] {
            assert!(MapReader::default().read_block(text).is_err());
        }
    }
}
