//! The file of a joined image that stays for later joins of the same parts.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use bcow::format::Use;
use bcow::{Error, FileIdentity, Image, NewFile, OpenOptions, Storage, Version, header_of};
use bcow_erofs::tree::Tree;
use rustix::fs::{CWD, Mode, OFlags};
use serde_json::{Map, Value, json};

use super::{JoinPart, Source};
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
    source: &Arc<Source>,
    open: impl Fn(Arc<dyn Storage>) -> Result<Arc<Image>, Error>,
) -> Option<Arc<Image>> {
    let storage = KeptFile {
        file: open_own(path)?,
        again: OnceLock::new(),
        path: path.to_owned(),
        source: source.clone(),
    };
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

/// The file, of which all bytes can be made again.
struct KeptFile {
    file: File,
    /// The file that was made when damage was found; `None` if that failed.
    again: OnceLock<Option<File>>,
    path: PathBuf,
    source: Arc<Source>,
}

impl KeptFile {
    fn current(&self) -> &File {
        let again = self.again.get().and_then(Option::as_ref);
        again.unwrap_or(&self.file)
    }

    fn make_again(&self) -> Option<File> {
        let path = self.path.display();
        let made = self.source.tree().and_then(|tree| {
            let kept = make(&self.path, &self.source, &tree);
            let kept = kept.map(|()| open_own(&self.path));
            match kept.inspect_err(|error| tracing::warn!("{error}")) {
                Ok(Some(file)) => Ok(file),
                _ => self
                    .source
                    .write_in_memory(&tree, &self.source.kept_fields()),
            }
        });
        match made {
            // Positions of the damaged file are in use.
            Ok(file) if header_of(&file) == header_of(&self.file) => {
                tracing::warn!("{path} was damaged, and was made again from the layers");
                Some(file)
            }
            Ok(_) => {
                tracing::error!("{path} is damaged, and was written by another version of bcow");
                None
            }
            Err(error) => {
                tracing::error!("{path} is damaged, and cannot be made again: {error}");
                None
            }
        }
    }
}

impl Storage for KeptFile {
    fn len(&self) -> io::Result<u64> {
        Storage::len(self.current())
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        Storage::read_at(self.current(), offset, buf)
    }
    fn write_at(&self, _: u64, _: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }
    fn set_len(&self, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
    fn restore(&self) -> bool {
        self.again.get_or_init(|| self.make_again()).is_some()
    }
    fn identity(&self) -> Option<FileIdentity> {
        Storage::identity(&self.file)
    }
    fn version(&self) -> Option<Version> {
        Storage::version(&self.file)
    }
}

impl Source {
    /// The fields of the metadata of a kept file.
    fn kept_fields(&self) -> Map<String, Value> {
        let mut fields = self.fields.clone();
        fields.insert(FIELD.into(), described(&self.parts));
        fields
    }
}

/// Makes the file at `path`, and replaces one of other parts. Concurrent makers do no harm: each
/// gives the name to a file with the same content.
pub(super) fn make(path: &Path, source: &Source, tree: &Tree) -> Result<(), ConvertError> {
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
    let identities = parts.iter().map(|part| {
        let identity = part.image.identity_hash();
        identity.iter().map(|byte| format!("{byte:02x}")).collect()
    });
    let identities: Vec<String> = identities.collect();
    json!({ "version": VERSION, "parts": identities })
}

/// Whether only this user and root can have written a file.
fn is_own(metadata: &Metadata) -> bool {
    let own = rustix::process::geteuid().as_raw();
    [own, 0].contains(&metadata.uid()) && metadata.mode() & OTHERS_WRITE == 0
}
