//! Restores a damaged sealed file from other copies of it.

use std::ops::Range;
use std::sync::Arc;

use bcow_format::{HEADER_AREA_BYTES, Header, MerkleShape, choose_header};

use crate::cache::FileId;
use crate::checked::read_header;
use crate::merkle::Verifier;
use crate::storage::Storage;
use crate::{BlockCache, Error, threads};

/// The result of [`restore`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Restored {
    /// Ranges of the file that were written, in file order, adjacent ones merged.
    pub written: Vec<Range<u64>>,
    /// Damaged ranges that no copy has intact.
    pub left: Vec<Range<u64>>,
}

/// A file cannot be restored. Nothing was written, except for [`RestoreError::File`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// The file is writable, or was sealed without a Merkle tree.
    #[error("the file has no Merkle tree, so a copy cannot be compared with it")]
    NoTree,
    /// Both header slots are damaged, and the caller does not know the root hash either.
    #[error("both header slots are damaged, so the original content of the file is unknown")]
    Unknown,
    /// No copy has the Merkle root of the file.
    #[error("no copy has the content of the file (Merkle root {})", hex(root))]
    NoCopy {
        /// The root hash of the file.
        root: [u8; 32],
    },
    /// The file cannot be read or written.
    #[error(transparent)]
    File(#[from] Error),
}

fn hex(root: &[u8; 32]) -> String {
    root.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Another file with the same Merkle tree.
struct Copy<'c> {
    storage: &'c dyn Storage,
    header: Header,
    verifier: Verifier,
}

/// Makes the sealed file in `file` whole again, with bytes of `copies`. `root` is its Merkle root,
/// if another file names it; it is needed only if both header slots are damaged. A copy with
/// another root is ignored, and a copy may be damaged itself: every byte is checked against the
/// tree before it is written.
///
/// Only wrong bytes are written, in place. An interruption leaves the file no worse than before.
pub fn restore(
    file: &dyn Storage,
    root: Option<[u8; 32]>,
    copies: &[Arc<dyn Storage>],
    thread_count: usize,
) -> Result<Restored, RestoreError> {
    let mut area = [0; HEADER_AREA_BYTES];
    let header_is_readable = file.read_at(0, &mut area).is_ok();
    let header = choose_header(&area).ok().filter(|_| header_is_readable);
    let wanted = match (&header, root) {
        (Some(header), _) => header.merkle.as_ref().ok_or(RestoreError::NoTree)?.root,
        (None, Some(root)) => root,
        (None, None) => return Err(RestoreError::Unknown),
    };
    let tree_of = |header: &Header| header.merkle.clone();
    let copies: Vec<Copy<'_>> = copies
        .iter()
        .filter_map(|storage| same_content(&**storage, wanted))
        .filter(|copy| match &header {
            Some(header) => tree_of(header) == tree_of(&copy.header),
            // Nothing else says where the tree is.
            None => copy.header_is_covered(),
        })
        .collect();
    let [first, ..] = &copies[..] else {
        return Err(RestoreError::NoCopy { root: wanted });
    };
    let shape = first.verifier.shape();
    let end = first.header.file_bytes;
    let length = length(file)?;
    if length < end {
        // The bytes that follow are zeros until they are restored.
        file.set_len(end)
            .map_err(|source| Error::io("extend", length, source))?;
    }

    let mut restored = Restored::default();
    let covered = copies.iter().find(|copy| copy.header_is_covered());
    // The file's own tree confirms its sound chunks even where the tree of each copy is damaged.
    let own = header.as_ref().and_then(|header| {
        let verifier = Verifier::new(header, FileId::next(), &BlockCache::default())?;
        let is_sound = covered.is_none_or(|copy| copy.header.canonical() == header.canonical());
        is_sound.then(|| Copy {
            storage: file,
            header: header.clone(),
            verifier,
        })
    });
    let trusted: Vec<&Copy<'_>> = own.iter().chain(&copies).collect();
    let mut tree = tree(file, &trusted, shape)?;
    tree.reverse();
    let mut found = chunks(file, &trusted, shape, thread_count)?;
    found.append(&mut tree);
    // Slots of the same content may have other generations, so sound slots stay.
    if let Some(copy) = covered
        && header
            .as_ref()
            .is_none_or(|header| header.canonical() != copy.header.canonical())
    {
        let mut slots = [0; HEADER_AREA_BYTES];
        let source = |source| Error::io("read", 0, source);
        copy.storage.read_at(0, &mut slots).map_err(source)?;
        write(file, 0, &slots)?;
        restored.written.push(0..HEADER_AREA_BYTES as u64);
    }
    for (range, written) in found {
        let list = match written {
            true => &mut restored.written,
            false => &mut restored.left,
        };
        match list.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => list.push(range),
        }
    }
    if length > end && restored.left.is_empty() {
        file.set_len(end)
            .map_err(|source| Error::io("truncate", end, source))?;
        restored.written.push(end..length);
    }
    file.sync().map_err(|source| Error::io("sync", 0, source))?;
    Ok(restored)
}

impl Copy<'_> {
    /// Whether the tree confirms the header, and so the shape of the tree.
    fn header_is_covered(&self) -> bool {
        self.verifier.read_at(self.storage, 0, &mut [0]).is_ok()
    }
}

fn same_content(storage: &dyn Storage, root: [u8; 32]) -> Option<Copy<'_>> {
    let header = read_header(storage).ok()?;
    let verifier = Verifier::new(&header, FileId::next(), &BlockCache::default())?;
    (header.merkle.as_ref()?.root == root).then_some(Copy {
        storage,
        header,
        verifier,
    })
}

/// Restores the covered bytes. Returns the damaged ranges in file order, with whether each one was
/// restored. The tree of any copy, and of the file itself, can confirm the bytes of any copy.
fn chunks(
    file: &dyn Storage,
    copies: &[&Copy<'_>],
    shape: &MerkleShape,
    thread_count: usize,
) -> Result<Vec<(Range<u64>, bool)>, Error> {
    let found = threads::map_indexed(shape.chunks(), thread_count, |index| {
        let start = index * shape.chunk_bytes;
        let range = start..shape.covered_bytes.min(start + shape.chunk_bytes);
        let mut have = vec![0; (range.end - range.start) as usize];
        // An unreadable sector of the host counts as damage: writing often makes it readable.
        let readable = file.read_at(start, &mut have).is_ok();
        for judge in copies {
            let holds = |chunk| judge.verifier.holds(judge.storage, index, chunk);
            match holds(have.clone()) {
                Ok(true) if readable => return Ok(None),
                Ok(_) => {}
                // The tree of this copy is damaged here.
                Err(_) => continue,
            }
            for copy in copies {
                let mut bytes = vec![0; have.len()];
                if copy.storage.read_at(start, &mut bytes).is_ok()
                    && holds(bytes.clone()).unwrap_or(false)
                {
                    // The header area is not chosen here.
                    let skip = match index {
                        0 => HEADER_AREA_BYTES,
                        _ => 0,
                    };
                    write(file, start + skip as u64, &bytes[skip..])?;
                    return Ok(Some((range, true)));
                }
            }
            break;
        }
        Ok::<_, Error>(Some((range, false)))
    })?;
    Ok(found.into_iter().flatten().collect())
}

/// Restores the stored tree, from the root downwards, so that each restored level can confirm the
/// next one. Returns the damaged ranges in reverse order, with whether each one was restored.
fn tree(
    file: &dyn Storage,
    copies: &[&Copy<'_>],
    shape: &MerkleShape,
) -> Result<Vec<(Range<u64>, bool)>, Error> {
    let mut found = Vec::new();
    for (level, (_, bytes)) in shape.levels.iter().enumerate().rev() {
        for index in (0..bytes.div_ceil(shape.chunk_bytes)).rev() {
            let range = copies[0].verifier.piece_range(level, index);
            let right = copies
                .iter()
                .find_map(|copy| copy.verifier.piece(copy.storage, level, index).ok());
            let mut have = vec![0; (range.end - range.start) as usize];
            let readable = file.read_at(range.start, &mut have).is_ok();
            match right {
                Some(right) if readable && *right == have => {}
                Some(right) => {
                    write(file, range.start, &right)?;
                    found.push((range, true));
                }
                None => found.push((range, false)),
            }
        }
    }
    Ok(found)
}

fn length(file: &dyn Storage) -> Result<u64, Error> {
    file.len()
        .map_err(|source| Error::io("read the length, not a", 0, source))
}

fn write(file: &dyn Storage, at: u64, bytes: &[u8]) -> Result<(), Error> {
    file.write_at(at, bytes)
        .map_err(|source| Error::io("write", at, source))
}
