//! Reads and validates single parts of a BCoW file, without a cache.

use std::sync::Arc;

use bcow_format::{
    FormatError, HEADER_AREA_BYTES, Header, Section, SectionKind, Stored, SubBlockTable,
    choose_header, crc32c, decode_table,
};

use crate::codec::{check_crc, decode_block};
use crate::merkle::Verifier;
use crate::piece::Piece;
use crate::storage::Storage;
use crate::{BlockProblem, Error};

/// The storage of a file; reads are verified by the Merkle tree if that was requested.
pub(crate) struct CheckedFile {
    pub(crate) storage: Arc<dyn Storage>,
    pub(crate) verifier: Option<Verifier>,
}

impl CheckedFile {
    pub(crate) fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        match &self.verifier {
            Some(verifier) => verifier.read_at(&*self.storage, offset, buf),
            None => self.storage.read(offset, buf),
        }
    }

    /// Reads a section. The header was checked against the length of the file, so the length of the
    /// section is valid.
    pub(crate) fn read_section(&self, section: &Section) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; section.bytes as usize];
        self.read_at(section.offset, &mut bytes)?;
        Ok(bytes)
    }
}

/// Reads and validates the header of a file, and checks that the file has the length it states.
pub(crate) fn read_header(storage: &dyn Storage) -> Result<Header, Error> {
    let length = storage.length()?;
    let mut area = [0; HEADER_AREA_BYTES];
    let there = length.min(HEADER_AREA_BYTES as u64) as usize;
    storage.read(0, &mut area[..there])?;
    let header = choose_header(&area[..there])?;
    header.check_file_length(length)?;
    Ok(header)
}

/// Reads and validates the sub-block table that root entry `region` names.
pub(crate) fn read_table(
    file: &CheckedFile,
    header: &Header,
    region: u64,
    stored: &Stored,
) -> Result<SubBlockTable, Error> {
    // The entry was checked to lie inside the file, so this allocates no more than the size of the
    // file.
    let mut bytes = vec![0; stored.bytes as usize];
    file.read_at(stored.at.0, &mut bytes)?;
    Ok(decode_table(&bytes, stored, region, header)?)
}

/// Reads and decodes the block of a piece, which is `stored`. A block without a checksum is only
/// read.
pub(crate) fn read_block(
    file: &CheckedFile,
    piece: &Piece,
    stored: &Stored,
) -> Result<Vec<u8>, Error> {
    let mut bytes = vec![0; stored.bytes as usize];
    file.read_at(stored.at.0, &mut bytes)?;
    let decoded = decode_block(bytes, &piece.entry, piece.length);
    decoded.map_err(|problem| bad_block(piece.start, stored, problem))
}

/// Compares the bytes of a raw block at byte `logical` of the address space with its checksum.
pub(crate) fn check_raw(logical: u64, stored: &Stored, bytes: &[u8]) -> Result<(), Error> {
    check_crc(stored, bytes).map_err(|problem| bad_block(logical, stored, problem))
}

fn bad_block(logical: u64, stored: &Stored, problem: BlockProblem) -> Error {
    Error::BadBlock {
        logical,
        stored: stored.at.0,
        problem,
    }
}

/// Reads and validates the metadata section; an empty object if the file has no such section.
pub(crate) fn read_metadata(
    file: &CheckedFile,
    header: &Header,
) -> Result<serde_json::Value, Error> {
    if header.metadata.bytes == 0 {
        return Ok(serde_json::Value::Object(Default::default()));
    }
    let bytes = file.read_section(&header.metadata)?;
    Ok(decode_metadata(&bytes, header)?)
}

fn decode_metadata(bytes: &[u8], header: &Header) -> Result<serde_json::Value, FormatError> {
    let found = crc32c(bytes);
    header.metadata.check(SectionKind::Metadata, found)?;
    let value: serde_json::Value = serde_json::from_slice(bytes)
        .map_err(|error| FormatError::MetadataJson(error.to_string()))?;
    if !value.is_object() {
        return Err(FormatError::MetadataJson("not an object".into()));
    }
    Ok(value)
}
