//! Traces: which parts of an image a start reads, in order.
//!
//! A trace names files by path and their content by blocks of the file, not by places in the image.
//! So it fits every image that has these files: one converted again, with other options, or from a
//! newer version of the source. What a program looks up, but does not read, is recorded by
//! directory: the names in it, and the inodes of its entries.
//!
//! The file is text, one JSON object in each line: first `{"bcow_trace": 1, ...}`, then the parts
//! in the order of their first use.

use std::fmt::Write as _;

use serde_json::{Map, Value, json};

use crate::digest::hex;

/// The version of the format.
const VERSION: u64 = 1;
/// Bytes of a block of a file.
pub const TRACE_BLOCK_BYTES: u64 = 4096;
/// The longest trace that is read.
pub const MAX_TRACE_BYTES: u64 = 64 << 20;
/// The greatest number of block ranges in a trace.
pub const MAX_TRACE_RANGES: usize = 1 << 20;

/// A trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    /// Identity of the image that was read.
    pub image: [u8; 32],
    /// Whether more was read than the trace has.
    pub truncated: bool,
    /// In the order of their first use.
    pub parts: Vec<TracePart>,
}

/// A part of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TracePart {
    /// Blocks of a file.
    File {
        /// The path, without leading slash.
        path: Vec<u8>,
        /// First block and number of blocks of 4096 bytes, in the order of their first use.
        blocks: Vec<(u64, u64)>,
    },
    /// The names in a directory, and the inodes of its entries.
    Directory {
        /// The path, without leading slash; empty for the root.
        path: Vec<u8>,
    },
}

/// A trace cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TraceError {
    /// The first line is not that of a trace.
    #[error("it is no trace of `bcow mount --record`")]
    NoTrace,
    /// The trace is of another version.
    #[error("it is a trace of version {0}; this bcow reads version {VERSION}")]
    Version(u64),
    /// A line is not as it must be.
    #[error("line {line}: {problem}")]
    Line {
        /// Number of the line, from 1 on.
        line: usize,
        /// The problem.
        problem: &'static str,
    },
}

impl Trace {
    /// Reads a trace.
    pub fn parse(text: &[u8]) -> Result<Trace, TraceError> {
        let mut lines = text
            .split(|&byte| byte == b'\n')
            .enumerate()
            .filter(|(_, line)| !line.is_empty());
        let header = lines.next().and_then(|(_, line)| object(line));
        let header = header.ok_or(TraceError::NoTrace)?;
        match header.get("bcow_trace").and_then(Value::as_u64) {
            Some(VERSION) => {}
            Some(version) => return Err(TraceError::Version(version)),
            None => return Err(TraceError::NoTrace),
        }
        let image = header.get("image").and_then(Value::as_str);
        let image = image
            .and_then(|hex| data_encoding::HEXLOWER.decode(hex.as_bytes()).ok())
            .and_then(|bytes| bytes.try_into().ok())
            .ok_or(TraceError::Line {
                line: 1,
                problem: "`image` is not a hash in hexadecimal",
            })?;
        let mut ranges = 0;
        let parts = lines
            .map(|(index, line)| {
                part(line, &mut ranges).map_err(|problem| TraceError::Line {
                    line: index + 1,
                    problem,
                })
            })
            .collect::<Result<_, _>>()?;
        Ok(Trace {
            image,
            truncated: header.get("truncated") == Some(&Value::Bool(true)),
            parts,
        })
    }

    /// The text of the trace.
    pub fn to_text(&self) -> String {
        let mut header = Map::new();
        header.insert("bcow_trace".into(), json!(VERSION));
        header.insert("image".into(), json!(hex(&self.image)));
        if self.truncated {
            header.insert("truncated".into(), json!(true));
        }
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = writeln!(text, "{}", Value::Object(header));
        for part in &self.parts {
            let line = match part {
                TracePart::File { path, blocks } => {
                    let mut line = named("file", path);
                    line.insert("blocks".into(), json!(blocks));
                    line
                }
                TracePart::Directory { path } => named("directory", path),
            };
            let _ = writeln!(text, "{}", Value::Object(line));
        }
        text
    }
}

fn object(line: &[u8]) -> Option<Map<String, Value>> {
    match serde_json::from_slice(line) {
        Ok(Value::Object(object)) => Some(object),
        _ => None,
    }
}

/// An object with a path: as text, or in hexadecimal if it is not UTF-8.
fn named(kind: &str, path: &[u8]) -> Map<String, Value> {
    let (key, path) = match std::str::from_utf8(path) {
        Ok(path) => (kind.to_owned(), path.to_owned()),
        Err(_) => (format!("{kind}_hex"), data_encoding::HEXLOWER.encode(path)),
    };
    Map::from_iter([(key, json!(path))])
}

fn path(line: &Map<String, Value>, kind: &str) -> Option<Vec<u8>> {
    if let Some(path) = line.get(kind) {
        return path.as_str().map(|path| path.as_bytes().to_vec());
    }
    let path = line.get(&format!("{kind}_hex"))?.as_str()?;
    data_encoding::HEXLOWER.decode(path.as_bytes()).ok()
}

fn part(line: &[u8], ranges: &mut usize) -> Result<TracePart, &'static str> {
    let line = object(line).ok_or("it is no JSON object")?;
    if let Some(path) = path(&line, "directory") {
        return Ok(TracePart::Directory { path });
    }
    let path = path(&line, "file").ok_or("it names neither a file nor a directory")?;
    let blocks = line.get("blocks").and_then(Value::as_array);
    let blocks = blocks.ok_or("`blocks` is not an array")?;
    *ranges += blocks.len();
    if *ranges > MAX_TRACE_RANGES {
        return Err("the trace has too many ranges");
    }
    let range = |pair: &Value| {
        let [first, count] = pair.as_array()?.as_slice() else {
            return None;
        };
        let (first, count) = (first.as_u64()?, count.as_u64()?);
        let end = first.checked_add(count)?;
        (count > 0 && end <= u64::MAX / TRACE_BLOCK_BYTES).then_some((first, count))
    };
    let blocks = blocks.iter().map(range).collect::<Option<_>>();
    Ok(TracePart::File {
        path,
        blocks: blocks.ok_or("a range is not a first block and a number of blocks")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace() -> Trace {
        Trace {
            image: [7; 32],
            truncated: false,
            parts: vec![
                TracePart::Directory { path: Vec::new() },
                TracePart::File {
                    path: b"usr/bin/x\n".to_vec(),
                    blocks: vec![(4, 2), (0, 1)],
                },
                TracePart::File {
                    path: b"caf\xe9".to_vec(),
                    blocks: vec![(0, 1)],
                },
            ],
        }
    }

    #[test]
    fn a_trace_is_read_as_it_was_written() {
        let text = trace().to_text();
        assert_eq!(Trace::parse(text.as_bytes()), Ok(trace()));
        assert_eq!(text.lines().count(), 4);
    }

    #[test]
    fn other_files_and_wrong_lines_are_refused() {
        for text in ["", "x", "{}", "[1]"] {
            assert_eq!(Trace::parse(text.as_bytes()), Err(TraceError::NoTrace));
        }
        let newer = br#"{"bcow_trace": 2}"#;
        assert_eq!(Trace::parse(newer), Err(TraceError::Version(2)));
        let header = trace().to_text().lines().next().unwrap().to_owned();
        for line in [
            "x",
            "{}",
            r#"{"file": 3}"#,
            r#"{"file": "a"}"#,
            r#"{"file": "a", "blocks": [[0]]}"#,
            r#"{"file": "a", "blocks": [[0, 0]]}"#,
            r#"{"file": "a", "blocks": [[18446744073709551615, 1]]}"#,
            r#"{"directory_hex": "x"}"#,
        ] {
            let text = format!("{header}\n{line}\n");
            let error = Trace::parse(text.as_bytes()).unwrap_err();
            assert!(matches!(error, TraceError::Line { line: 2, .. }), "{line}");
        }
    }
}
