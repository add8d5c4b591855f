//! Reads a written file back and compares it with the appended content.

use std::sync::Arc;

use bcow_format::crc32c;

use super::Written;
use super::layout::Placed;
use crate::checked::{CheckedFile, read_block};
use crate::{BlockProblem, Error, Image, OpenOptions, threads};

/// Number of blocks that one thread takes at a time.
const BATCH: usize = 64;

/// Opens the written file again, decodes every block, and compares it with the appended content by
/// the CRC32C from before the encoding. The Merkle tree is not verified again, because it was
/// computed from the bytes of the file.
pub fn verify_written(written: &Written, thread_count: usize) -> Result<(), Error> {
    let image = Image::open_storage(written.storage.clone(), &OpenOptions::default())?;
    if *image.header() != written.header {
        return Err(Error::Unsupported(
            "the header read back is not the one written".into(),
        ));
    }
    image.metadata()?;
    let file = CheckedFile {
        storage: Arc::clone(&written.storage),
        verifier: None,
    };
    let placed: Vec<Placed> = written.layout.placed().collect();
    let batches = placed.len().div_ceil(BATCH) as u64;
    for (region, entry) in written.windows.entries() {
        let found = image.piece(region << written.header.region_shift)?.entry;
        if found != entry {
            return Err(Error::Unsupported(format!(
                "root entry {region} reads back as {found:?}, was written as {entry:?}"
            )));
        }
    }
    threads::map_indexed(batches, thread_count, |batch| {
        let start = batch as usize * BATCH;
        placed[start..placed.len().min(start + BATCH)]
            .iter()
            .try_for_each(|placed| verify_block(&image, &file, placed))
    })?;
    Ok(())
}

/// Checks that the tables lead to the place of the block, and that the block there is the appended
/// one.
fn verify_block(image: &Image, file: &CheckedFile, placed: &Placed) -> Result<(), Error> {
    let piece = image.piece(placed.logical)?;
    let wrong = |problem: String| Error::BadBlock {
        logical: placed.logical,
        stored: 0,
        problem: BlockProblem::Decompress(problem),
    };
    let record = placed.record;
    let stored = piece.entry.stored();
    if piece.entry != record.entry || (stored.is_some() && piece.start != placed.logical) {
        return Err(wrong(format!("written as {record:?}, found as {piece:?}")));
    }
    if let Some(stored) = stored {
        let found = crc32c(&read_block(file, &piece, &stored)?);
        if found != record.logical_crc {
            return Err(wrong(format!(
                "reads back with checksum {found:#010x}, was appended with {:#010x}",
                record.logical_crc
            )));
        }
    }
    Ok(())
}
