//! Copies the content of a sketch into a file of its own.

use std::fs::File;
use std::os::unix::fs::FileExt;

use super::{Sketch, SketchError};
use crate::Seek;

/// Bytes of one read and write.
const COPY_BYTES: u64 = 256 << 10;

/// Writes the data of a sketch into an empty file, sets the file's size, and returns the number of
/// bytes written.
pub(super) fn copy_out(sketch: &dyn Sketch, to: &File) -> Result<u64, SketchError> {
    let failed = SketchError::host("write a copy of a sketch");
    let mut buf = vec![0; COPY_BYTES as usize];
    let mut copied = 0;
    let mut at = 0;
    while let Some(start) = sketch.seek(at, Seek::Data)? {
        let end = sketch.seek(start, Seek::Hole)?.unwrap_or(start);
        at = start;
        while at < end {
            let piece = &mut buf[..(end - at).min(COPY_BYTES) as usize];
            let read = sketch.read_at(at, piece)?;
            if read == 0 {
                break;
            }
            to.write_all_at(&piece[..read], at).map_err(failed)?;
            at += read as u64;
            copied += read as u64;
        }
        at = at.max(end);
    }
    to.set_len(sketch.size()).map_err(failed)?;
    Ok(copied)
}
