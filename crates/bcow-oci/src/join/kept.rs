//! The file of a joined image that stays for later joins of the same parts.

use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use bcow::format::{Use, hex};
use bcow::{Error, Image, NewFile, OpenOptions, RestoredFile, Storage, header_of};
use bcow_erofs::tree::Tree;
use rustix::fs::{CWD, Mode, OFlags};
use serde_json::{Map, Value, json};

use super::{JoinPart, JoinSource};
use crate::error::ConvertError;

/// The field of the metadata with [`described`].
const FIELD: &str = "joined";
/// Changes when a join writes other bytes for the same parts.
const VERSION: u64 = 1;
/// Permission bits with which other users can write.
const OTHERS_WRITE: u32 = 0o022;

/// Opens the file at `path`, if it is of these parts. Reads compare the checksums of its bytes. A
/// file that other users can write is not used.
pub(super) fn open(
    path: &Path,
    source: &Arc<JoinSource>,
    open: impl Fn(Arc<dyn Storage>) -> Result<Arc<Image>, Error>,
) -> Option<Arc<Image>> {
    let again = (path.to_owned(), source.clone());
    let again = move || make_again(&again.0, &again.1);
    let storage = RestoredFile::new(open_own(path)?, path.to_owned(), again);
    let image = open(Arc::new(storage)).ok()?;
    let metadata = image.metadata().ok()?;
    (metadata[FIELD] == described(&source.parts)).then_some(image)
}

fn open_own(path: &Path) -> Option<File> {
    // Without O_NONBLOCK, the opening of a FIFO would wait for a writer.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = File::from(rustix::fs::openat(CWD, path, flags, Mode::empty()).ok()?);
    let found = file.metadata().ok()?;
    (found.is_file() && is_own(&found)).then_some(file)
}

/// Makes the file at `path` again, or its content in memory if that fails.
fn make_again(path: &Path, source: &JoinSource) -> Result<File, Box<dyn std::error::Error>> {
    let tree = source.tree()?;
    let kept = make(path, source, &tree).map(|()| open_own(path));
    Ok(match kept.inspect_err(|error| tracing::warn!("{error}")) {
        Ok(Some(file)) => file,
        _ => source.write_in_memory(&tree, &source.kept_fields())?,
    })
}

impl JoinSource {
    /// The fields of the metadata of a kept file.
    fn kept_fields(&self) -> Map<String, Value> {
        let mut fields = self.fields.clone();
        fields.insert(FIELD.into(), described(&self.parts));
        fields
    }
}

/// Makes the file at `path`, and replaces one of other parts. Concurrent makers do no harm: each
/// gives the name to a file with the same content.
pub(super) fn make(path: &Path, source: &JoinSource, tree: &Tree) -> Result<(), ConvertError> {
    let failed = |error| ConvertError::write("write", path, error);
    if !may_replace(path) {
        let why = "the file exists, and has no merged metadata of layers";
        return Err(failed(std::io::Error::other(why)));
    }
    let new = NewFile::create(path).map_err(|error| failed(std::io::Error::other(error)))?;
    // The umask may allow more.
    rustix::fs::fchmod(new.file(), Mode::from_raw_mode(0o600))
        .map_err(|errno| failed(errno.into()))?;
    let file = new.file().try_clone().map_err(failed)?;
    source.write(tree, file, path, &source.kept_fields())?;
    new.complete()
        .map_err(|error| failed(std::io::Error::other(error)))
}

/// Whether `path` is free, or has an empty file, a file of a join, or a damaged image.
fn may_replace(path: &Path) -> bool {
    let metadata_of = |file: File| {
        let image = Image::open_storage(Arc::new(file), &OpenOptions::default())?;
        image.metadata()
    };
    let is_of_join = |file: File| {
        header_of(&file).is_some_and(|header| header.purpose == Use::Image)
            && metadata_of(file).map_or(true, |metadata| metadata.get(FIELD).is_some())
    };
    match path.metadata() {
        Err(_) => true,
        Ok(found) if found.len() == 0 => true,
        Ok(found) => found.is_file() && File::open(path).is_ok_and(is_of_join),
    }
}

/// What the file is made of.
fn described(parts: &[JoinPart]) -> Value {
    let identities = parts.iter().map(|part| hex(&part.image.identity_hash()));
    let identities: Vec<String> = identities.collect();
    json!({ "version": VERSION, "parts": identities })
}

/// Whether only this user and root can have written a file.
fn is_own(metadata: &Metadata) -> bool {
    let own = rustix::process::geteuid().as_raw();
    [own, 0].contains(&metadata.uid()) && metadata.mode() & OTHERS_WRITE == 0
}
