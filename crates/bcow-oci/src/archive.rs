//! The files of an image layout: in a directory, or in a tar archive whose members are read in
//! place. The bytes of an archive that is compressed as a whole go into a temporary file first. A
//! registry has the blobs of images only.

use std::collections::HashMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::blob::{Blob, BlobReader, open_regular, read_error};
use crate::cancel::Cancel;
use crate::digest::Digest;
use crate::error::{ConvertError, LimitKind, TarPlace, check_limit};
use crate::layer::{Format, LayerInput, Reading, read_layer};
use crate::path::components;
use crate::recognise::{MAX_BYTES, recognise};
use crate::repository::Repository;
use crate::stream::{CHUNK_BYTES, ChunkSource, ChunkStream};
use crate::tar::{EntryKind, TarReader};

/// Limit on the members of an archive. An image has a few members per layer.
const MAX_MEMBERS: u64 = 100_000;
/// A small chunk, because headers are far apart.
const HEADER_CHUNK_BYTES: usize = 4096;

/// The files of a layout or archive by their path in it.
pub(crate) enum Files {
    Directory(PathBuf),
    Archive(Archive),
    Registry(Arc<dyn Repository>),
}

/// The path of a blob in a layout.
pub(crate) fn blob_path(digest: &Digest) -> String {
    format!("blobs/{}/{}", digest.algorithm().name(), digest.hex())
}

impl Files {
    /// A layout in a directory.
    pub(crate) fn directory(path: &Path) -> Result<Files, ConvertError> {
        let name = path.display().to_string();
        let metadata = std::fs::metadata(path).map_err(|e| read_error("open", &name, e))?;
        if metadata.is_dir() {
            Ok(Files::Directory(path.to_owned()))
        } else {
            Err(ConvertError::layout(
                name,
                "not a directory; for an image layout in a tar archive, use oci-archive:",
            ))
        }
    }

    /// The name of the layout in messages.
    pub(crate) fn name(&self) -> String {
        match self {
            Files::Directory(path) => path.display().to_string(),
            Files::Archive(archive) => archive.name.clone(),
            Files::Registry(repository) => repository.name(),
        }
    }

    /// The file at `path`, which is relative and has plain names only; `None` if the file does not
    /// exist.
    pub(crate) fn open(&self, path: &str) -> Result<Option<Blob>, ConvertError> {
        match self {
            Files::Directory(directory) => open_regular(&directory.join(path)),
            Files::Archive(archive) => Ok(archive.open(path)),
            Files::Registry(_) => Ok(None),
        }
    }

    /// The blob with a digest; `None` if it is missing. A registry is asked when the blob is read,
    /// which then must have `size` bytes.
    pub(crate) fn blob(&self, digest: &Digest, size: u64) -> Result<Option<Blob>, ConvertError> {
        match self {
            Files::Registry(repository) => {
                let repository = Arc::clone(repository);
                Ok(Some(Blob::remote(repository, digest.clone(), size)))
            }
            _ => self.open(&blob_path(digest)),
        }
    }

    /// Reads the file at `path` as a document of at most `limit` bytes; `None` if the file does not
    /// exist.
    pub(crate) fn document(&self, path: &str, limit: u64) -> Result<Option<Vec<u8>>, ConvertError> {
        match self.open(path)? {
            Some(blob) => blob.document(limit, None).map(Some),
            None => Ok(None),
        }
    }
}

/// A tar archive, indexed by one pass over its headers.
pub(crate) struct Archive {
    name: String,
    pub blob: Blob,
    members: HashMap<Vec<u8>, Member>,
}

/// Where the bytes of a compressed archive go, and how they are read.
pub(crate) struct Spool<'s> {
    /// The directory for a file without a name.
    pub directory: &'s Path,
    pub reading: Reading<'s>,
}

impl Spool<'_> {
    /// The uncompressed bytes, in a file, because the members of a compressed archive or of a pipe
    /// cannot be read in place.
    pub(crate) fn uncompressed(&self, blob: Blob) -> Result<Blob, ConvertError> {
        let name = blob.name.clone();
        let input = LayerInput::unverified(blob);
        let progress = self.reading.progress;
        progress.phase("reading the archive");
        progress.total(input.blob.length());
        let failed = |source| {
            let action = "write the uncompressed archive to a file in";
            ConvertError::write(action, self.directory, source)
        };
        let mut file = tempfile::tempfile_in(self.directory).map_err(failed)?;
        let (length, _) = read_layer(&input, &self.reading, |mut stream| {
            loop {
                let (first, second) = stream.window(CHUNK_BYTES)?;
                let bytes = first.len() + second.len();
                if bytes == 0 {
                    return Ok(stream.position());
                }
                file.write_all(first).map_err(failed)?;
                file.write_all(second).map_err(failed)?;
                stream.consume(bytes);
            }
        })?;
        tracing::info!(
            "{name}: {length} bytes decompressed into {:?}",
            self.directory
        );
        Ok(Blob::range(name, Arc::new(file), 0, length))
    }
}

enum Member {
    File {
        offset: u64,
        length: u64,
    },
    /// An old `docker save` stores a layer that occurs twice once, and a link to it.
    Link(Vec<u8>),
}

impl Archive {
    /// Opens an archive and finds its members.
    pub(crate) fn open_file(path: &Path, spool: &Spool<'_>) -> Result<Archive, ConvertError> {
        let name = path.display().to_string();
        if path.is_dir() {
            return Err(ConvertError::layout(
                name,
                "it is a directory; for an image layout in a directory, use oci:",
            ));
        }
        let Some(blob) = open_regular(path)? else {
            return Err(read_error("open", &name, rustix::io::Errno::NOENT));
        };
        Archive::of(blob, spool)
    }

    /// Finds the members of an archive.
    pub(crate) fn of(blob: Blob, spool: &Spool<'_>) -> Result<Archive, ConvertError> {
        let name = blob.name.clone();
        let mut start = [0; 8];
        let read = std::io::Read::read(&mut BlobReader::new(&blob, Cancel::default()), &mut start)
            .map_err(|e| read_error("read", &name, e))?;
        let blob = match Format::of(&start[..read]) {
            Format::Plain => blob,
            _ => spool.uncompressed(blob)?,
        };
        let mut members = HashMap::new();
        let source = InPlace {
            name: &name,
            reader: BlobReader::new(&blob, Cancel::default()),
        };
        let mut tar = TarReader::new(ChunkStream::new(Box::new(source)));
        while let Some(entry) = tar.next_entry().map_err(|e| e.of(&name))? {
            let error = |problem| ConvertError::Tar {
                place: TarPlace::entry(&name, &entry.path),
                problem,
            };
            let names = components(&entry.path).map_err(error)?;
            let member = match entry.kind {
                EntryKind::Regular if entry.sparse.is_none() => Member::File {
                    offset: tar.position(),
                    length: entry.stored,
                },
                EntryKind::Hardlink | EntryKind::Symlink => {
                    let parents = match entry.kind {
                        EntryKind::Symlink => &names[..names.len().saturating_sub(1)],
                        _ => &[],
                    };
                    let target = [&parents.join(&b'/')[..], b"/", &entry.link].concat();
                    match components(&target) {
                        Ok(target) => Member::Link(target.join(&b'/')),
                        // A link out of the archive names no member: the archive may be that of a
                        // root file system.
                        Err(_) => continue,
                    }
                }
                _ => continue,
            };
            members.insert(names.join(&b'/'), member);
            check_limit(LimitKind::ArchiveMembers, members.len() as u64, MAX_MEMBERS)
                .map_err(|exceeded| exceeded.at(TarPlace::layer(&name)))?;
        }
        drop(tar);
        Ok(Archive {
            name,
            blob,
            members,
        })
    }

    /// Whether it contains container images, in a form that `docker::find` reads.
    pub(crate) fn has_image(&self) -> bool {
        ["manifest.json", "oci-layout"].into_iter().any(|name| {
            let content = self
                .open(name)
                .and_then(|blob| blob.document(MAX_BYTES, None).ok());
            content.is_some_and(|content| recognise(name.as_bytes(), &content).is_some())
        })
    }

    fn open(&self, path: &str) -> Option<Blob> {
        let names = components(path.as_bytes()).ok()?;
        let mut key = names.join(&b'/');
        // No known writer makes a link to a link.
        for _ in 0..4 {
            match self.members.get(&key)? {
                Member::File { offset, length } => {
                    let name = format!("{} in {}", path, self.name);
                    return self.blob.part(name, *offset, *length);
                }
                Member::Link(target) => key = target.clone(),
            }
        }
        None
    }
}

/// Whether the first member of a tar archive has a name as in archives of images. The result is
/// `false` for what is no archive.
pub(crate) fn begins_as_image(blob: &Blob, reading: &Reading<'_>) -> bool {
    let input = LayerInput::unverified(blob.clone());
    let begins = read_layer(&input, &reading.uncounted(), |stream| {
        let mut tar = TarReader::new(stream);
        while let Ok(Some(entry)) = tar.next_entry() {
            // The root directory has no name.
            if let Some(first) = components(&entry.path).unwrap_or_default().first() {
                return Ok(is_of_image(first));
            }
        }
        Ok(false)
    });
    begins.is_ok_and(|(begins, _)| begins)
}

/// Whether programs that write archives of images use this name in the root of an archive: those of
/// an OCI layout and of `docker save`, and those of blobs, `[sha256:]HEX[.json|.tar|.tar.gz]`.
fn is_of_image(name: &[u8]) -> bool {
    const NAMES: [&[u8]; 5] = [
        b"blobs",
        b"index.json",
        b"manifest.json",
        b"oci-layout",
        b"repositories",
    ];
    let hex = name.strip_prefix(b"sha256:").unwrap_or(name);
    let (hex, ending) = hex.split_at(hex.len().min(64));
    let is_blob = hex.len() == 64
        && hex.iter().all(u8::is_ascii_hexdigit)
        && [&b""[..], b".json", b".tar", b".tar.gz"].contains(&ending);
    is_blob || NAMES.contains(&name)
}

/// Reads headers and skips the data between them.
struct InPlace<'b> {
    name: &'b str,
    reader: BlobReader<'b>,
}

impl ChunkSource for InPlace<'_> {
    fn next_chunk(&mut self, used: Option<Vec<u8>>) -> Result<Option<Vec<u8>>, ConvertError> {
        let mut chunk = used.unwrap_or_default();
        chunk.resize(HEADER_CHUNK_BYTES, 0);
        let read = std::io::Read::read(&mut self.reader, &mut chunk)
            .map_err(|e| read_error("read", self.name, e))?;
        chunk.truncate(read);
        Ok((read > 0).then_some(chunk))
    }

    fn skip(&mut self, bytes: u64) -> u64 {
        self.reader.skip(bytes)
    }
}
