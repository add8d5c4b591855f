//! Writes images into OCI image layouts, and into registries.
//!
//! An archive is written from unnamed files when all blobs are complete. In a directory, blobs are
//! unnamed files until the whole image is complete. Then the blobs get their names, and the new
//! index, written under a lock, is renamed into place last. So after a crash at any time, the
//! layout has the old image or the new one, and the images of other writers stay. If an image
//! fails, the writer removes a layout that it created for this image. A registry gets the blobs
//! from unnamed files when all are complete, and the manifest last.

use std::collections::{BTreeMap, HashSet};
use std::fs::{DirEntry, File};
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use bcow::Storage;
use bcow_erofs::reader::Timestamp;
use rustix::fs::FlockOperation;
use serde_json::{Map, Value, json};

use super::{
    Descriptor, IndexDocument, MAX_MANIFEST_BYTES, OCI_INDEX, blob, manifest_bytes, parse,
};
use crate::archive::Files;
use crate::blob::{BlobReader, open_regular, read_error};
use crate::cancel::Cancel;
use crate::digest::{Algorithm, Digest};
use crate::error::{ConvertError, check_equal, check_size};
use crate::in_order::InOrder;
use crate::left_out::{Annotations, NAME};
use crate::options::Progress;
use crate::output::Output;
use crate::parallel;
use crate::platform::Platform;
use crate::repository::Upload;
use crate::tar::writer::{EntryError, Kind, TarHeader, TarWriter};
use crate::text::plural;

/// Bytes per read when a blob is copied into an archive.
const COPY_BYTES: usize = 1 << 20;
/// Blobs that are sent to a registry at one time.
const UPLOADS_AT_ONCE: usize = 4;
/// The content of the file `oci-layout`.
const LAYOUT: &str = r#"{"imageLayoutVersion":"1.0.0"}"#;

/// The form of a layout on disk, or a registry.
#[derive(Debug, Clone, Default)]
pub enum LayoutForm {
    /// A directory; its other images stay.
    #[default]
    Directory,
    /// A tar archive of a layout; it replaces an existing file.
    Archive,
    /// A name in a registry. The directory has the blobs until they are sent, without names.
    Registry(Arc<dyn Upload>),
}

/// The place of an image in a layout or in a registry.
#[derive(Debug, Clone, Default)]
pub struct LayoutPlace {
    /// The layout's directory, created if it is missing, or the file of an archive. For a registry,
    /// a directory that has space for the image until it is sent.
    pub path: PathBuf,
    /// Directory, archive or registry.
    pub form: LayoutForm,
    /// Name of the image in the layout. A registry has it in [`LayoutPlace::form`].
    pub reference: Option<String>,
    /// Whether one image may replace an index, which has images for several platforms.
    pub replaces_index: bool,
}

impl LayoutPlace {
    /// The spelling.
    pub fn shown(&self) -> String {
        match &self.reference {
            Some(reference) => format!("{}:{reference}", self.without_reference()),
            None => self.without_reference(),
        }
    }

    /// Fails if one image would replace an index, unless that is allowed.
    pub(crate) fn require_no_index(&self) -> Result<(), ConvertError> {
        if self.replaces_index {
            return Ok(());
        }
        let count = match &self.form {
            LayoutForm::Archive => None,
            LayoutForm::Registry(upload) => {
                let name = upload.name();
                let there = upload.named();
                match there.map_err(|source| read_error("read", &name, source))? {
                    // What cannot be parsed is no index.
                    Some(bytes) => parse(&name, &bytes).ok().and_then(count_of),
                    None => None,
                }
            }
            LayoutForm::Directory => self.index_there()?,
        };
        match count {
            Some(count) => Err(ConvertError::refused(
                format!(
                    "{} is an index of {}, which one image would replace",
                    self.shown(),
                    plural(count as u64, "manifest")
                ),
                "write to another name; `bcow convert --platform all` makes an index, and --force \
                 of `convert` and `copy` replaces it by one image",
            )),
            None => Ok(()),
        }
    }

    /// The number of manifests of the index that has the name in the layout's directory.
    fn index_there(&self) -> Result<Option<usize>, ConvertError> {
        if !self.path.join("index.json").exists() {
            return Ok(None);
        }
        let files = Files::directory(&self.path)?;
        let read = |bytes: Vec<u8>| parse::<IndexDocument>(&files.name(), &bytes).ok();
        let index = files
            .document("index.json", MAX_MANIFEST_BYTES)?
            .and_then(read);
        let entries = index.and_then(|index| index.manifests).unwrap_or_default();
        let is_there = |entry: &&Descriptor| {
            entry.is_index() && entry.annotation(NAME) == self.reference.as_deref()
        };
        let found = entries.iter().find(is_there);
        // A damaged index is one all the same.
        Ok(found.map(|entry| {
            let bytes = manifest_bytes(&files, "index", entry).ok();
            let index = bytes.and_then(|(_, bytes)| read(bytes));
            index.and_then(count_of).unwrap_or_default()
        }))
    }

    /// The layout alone.
    pub fn without_reference(&self) -> String {
        let transport = match &self.form {
            LayoutForm::Directory => "oci",
            LayoutForm::Archive => "oci-archive",
            LayoutForm::Registry(upload) => return upload.name(),
        };
        format!("{transport}:{}", self.path.display())
    }
}

/// The number of manifests of an index; `None` if the document is not one.
fn count_of(index: IndexDocument) -> Option<usize> {
    index.manifests.map(|manifests| manifests.len())
}

/// Writes into one layout.
pub(crate) struct LayoutWriter {
    /// The directory, or the archive's file.
    directory: PathBuf,
    sink: Sink,
    /// The directory for new blobs.
    blobs: PathBuf,
    /// Directories that were created for this image, outermost first. They are removed unless the
    /// image is published.
    created: Vec<PathBuf>,
    /// Cancels when it becomes true.
    cancel: Option<Arc<AtomicBool>>,
}

/// Where complete blobs go.
enum Sink {
    /// Into the directory.
    Directory,
    Archive(Output),
    Registry(Arc<dyn Upload>),
}

/// A complete blob that has no name yet.
pub(crate) struct NewBlob {
    output: Output,
    pub digest: Digest,
    pub size: u64,
    /// The media type of a manifest or an index, which registries store apart from blobs.
    manifest: Option<String>,
}

/// The entry of a manifest or an index in an index.
pub(crate) struct ManifestEntry {
    pub media_type: String,
    pub digest: Digest,
    pub size: u64,
    pub artifact_type: Option<&'static str>,
    pub platform: Option<Platform>,
    pub reference: Option<String>,
    /// The manifest that this one is attached to.
    pub subject: Option<Digest>,
    /// The annotations of the entry, without that for the name.
    pub annotations: Annotations,
}

impl LayoutWriter {
    /// Opens the layout in a directory, creates a layout if the directory is missing or empty, or
    /// starts an archive. `cancel` ends the reads of blobs when it becomes true.
    pub(crate) fn open(
        place: &LayoutPlace,
        cancel: Option<Arc<AtomicBool>>,
    ) -> Result<LayoutWriter, ConvertError> {
        let path = &place.path;
        let (blobs, sink) = match &place.form {
            LayoutForm::Directory => return LayoutWriter::in_directory(path, cancel),
            LayoutForm::Archive => {
                let output = Output::create(path)?;
                (output.directory().to_owned(), Sink::Archive(output))
            }
            LayoutForm::Registry(upload) => (path.clone(), Sink::Registry(Arc::clone(upload))),
        };
        Ok(LayoutWriter {
            directory: path.clone(),
            sink,
            blobs,
            created: Vec::new(),
            cancel,
        })
    }

    fn in_directory(
        directory: &Path,
        cancel: Option<Arc<AtomicBool>>,
    ) -> Result<LayoutWriter, ConvertError> {
        let refuse = |problem| ConvertError::Destination {
            path: directory.to_owned(),
            problem,
        };
        match std::fs::read_dir(directory) {
            Ok(mut entries) => {
                let is_layout = directory.join("oci-layout").exists();
                if !is_layout
                    && entries.any(|entry| !entry.is_ok_and(|entry| is_incomplete_layout(&entry)))
                {
                    return Err(refuse("it is neither an OCI image layout nor empty"));
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
                return Err(refuse("it is not a directory"));
            }
            Err(source) => {
                return Err(ConvertError::write("open", directory, source));
            }
        }
        let mut writer = LayoutWriter {
            directory: directory.to_owned(),
            sink: Sink::Directory,
            blobs: directory.join("blobs/sha256"),
            created: Vec::new(),
            cancel,
        };
        let blobs = writer.blobs.clone();
        for path in [directory, &directory.join("blobs"), &blobs] {
            writer.make_directory(path)?;
        }
        Ok(writer)
    }

    fn make_directory(&mut self, path: &Path) -> Result<(), ConvertError> {
        match std::fs::create_dir(path) {
            Ok(()) => self.created.push(path.to_owned()),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(source) => return Err(ConvertError::write("create", path, source)),
        }
        Ok(())
    }

    /// Whether the layout keeps the blobs of other images.
    pub(crate) fn keeps_other_images(&self) -> bool {
        matches!(self.sink, Sink::Directory)
    }

    /// The registry that the image is written to.
    pub(crate) fn upload(&self) -> Option<&dyn Upload> {
        match &self.sink {
            Sink::Registry(upload) => Some(&**upload),
            _ => None,
        }
    }

    /// The layout's directory, or the archive's file.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The path of the blob with this digest, whether or not it exists.
    pub(crate) fn blob_path(&self, digest: &Digest) -> PathBuf {
        self.directory.join(super::blob_path(digest))
    }

    /// Starts a blob; [`LayoutWriter::finish`] completes it.
    pub(crate) fn new_blob(&self) -> Result<Output, ConvertError> {
        Output::unnamed(&self.blobs)
    }

    /// The same for the blob with this digest: continues what an interrupted copy left. In an
    /// archive, a blob begins with nothing.
    pub(crate) fn resumed_blob(&self, digest: &Digest) -> Result<Output, ConvertError> {
        if self.keeps_other_images() {
            Output::resumed_unnamed(&self.blobs, &digest.hex())
        } else {
            self.new_blob()
        }
    }

    /// Whether the layout has the blob already. It is read and hashed, because a blob with the
    /// right name can have other content.
    pub(crate) fn has_blob(&self, digest: &Digest, bytes: u64) -> Result<bool, ConvertError> {
        if !self.keeps_other_images() {
            return Ok(false);
        }
        let path = self.blob_path(digest);
        let blob = open_regular(&path)?.filter(|blob| blob.length() == Some(bytes));
        let Some(file) = blob.and_then(|blob| blob.file()) else {
            return Ok(false);
        };
        let found = Digest::of_storage_until(&*file, digest.algorithm(), self.cancel())
            .map_err(|error| read_error("read", &path.display().to_string(), error))?;
        Ok(found == *digest)
    }

    /// Computes the digest of a written blob and makes its bytes durable.
    pub(crate) fn finish(&self, output: Output) -> Result<NewBlob, ConvertError> {
        let file = output.file()?;
        let failed = |action| move |source| ConvertError::write(action, &self.blobs, source);
        let digest = Digest::of_storage_until(&file, Algorithm::Sha256, self.cancel())
            .map_err(failed("read back"))?;
        let size = Storage::len(&file).map_err(failed("read back"))?;
        file.sync_all().map_err(failed("sync"))?;
        Ok(NewBlob {
            output,
            digest,
            size,
            manifest: None,
        })
    }

    /// The manifest or the index with these bytes.
    pub(crate) fn manifest(&self, bytes: &[u8], media_type: &str) -> Result<NewBlob, ConvertError> {
        Ok(NewBlob {
            manifest: Some(media_type.to_owned()),
            ..self.document(bytes)?
        })
    }

    /// A copy of a blob of another place, with the same digest.
    pub(crate) fn copy_of(
        &self,
        files: &Files,
        kind: &str,
        descriptor: &Descriptor,
    ) -> Result<NewBlob, ConvertError> {
        let (place, expected, blob) = blob(files, kind, descriptor)?;
        let output = self.new_blob()?;
        let mut file = output.file()?;
        let mut reader = BlobReader::new(&blob, self.cancel());
        let mut buffer = vec![0; COPY_BYTES];
        loop {
            let count = reader
                .read(&mut buffer)
                .map_err(|source| read_error("read", &place, source))?;
            if count == 0 {
                break;
            }
            file.write_all(&buffer[..count])
                .map_err(|source| ConvertError::write("write", &self.blobs, source))?;
        }
        let copy = self.finish(output)?;
        check_size(&place, descriptor.size, copy.size)?;
        check_equal(&place, "digest", &expected, &copy.digest)?;
        Ok(copy)
    }

    /// A blob with these bytes.
    pub(crate) fn document(&self, bytes: &[u8]) -> Result<NewBlob, ConvertError> {
        let output = self.new_blob()?;
        output
            .file()?
            .write_all(bytes)
            .map_err(|source| ConvertError::write("write", &self.blobs, source))?;
        self.finish(output)
    }

    /// Gives the blobs their names, and adds the manifest to the index; or sends them.
    pub(crate) fn publish(
        mut self,
        blobs: Vec<NewBlob>,
        entry: &ManifestEntry,
        progress: &dyn Progress,
    ) -> Result<(), ConvertError> {
        match std::mem::replace(&mut self.sink, Sink::Directory) {
            Sink::Archive(archive) => return self.pack(archive, blobs, entry),
            Sink::Registry(upload) => return self.send(&*upload, &blobs, entry, progress),
            Sink::Directory => {}
        }
        for blob in blobs {
            blob.output.name_as(&blob.digest.hex())?;
        }
        sync_directory(&self.blobs)?;
        // Without the lock, each of two writers would drop the other's entry. Closing the
        // descriptor releases the lock.
        let lock = File::open(&self.directory)
            .map_err(|source| ConvertError::write("open", &self.directory, source))?;
        rustix::fs::flock(&lock, FlockOperation::LockExclusive)
            .map_err(|error| ConvertError::write("lock", &self.directory, error.into()))?;
        let layout = self.directory.join("oci-layout");
        if !layout.exists() {
            replace(&layout, LAYOUT.as_bytes())?;
        }
        self.update_index(entry)?;
        // From here on the layout has an image, so its directories stay.
        self.created.clear();
        Ok(())
    }

    /// Writes the archive. The same blobs give the same bytes.
    fn pack(
        &self,
        archive: Output,
        blobs: Vec<NewBlob>,
        entry: &ManifestEntry,
    ) -> Result<(), ConvertError> {
        let failed = |source| ConvertError::write("write", &self.directory, source);
        let index = json!({
            "schemaVersion": 2,
            "mediaType": OCI_INDEX,
            "manifests": [entry.descriptor()],
        });
        let blobs: BTreeMap<String, NewBlob> = blobs
            .into_iter()
            .map(|blob| (format!("blobs/sha256/{}", blob.digest.hex()), blob))
            .collect();
        let out = BufWriter::with_capacity(COPY_BYTES, archive.file()?);
        let mut members = Members(TarWriter::new(out));
        members
            .document("oci-layout", LAYOUT.as_bytes())
            .map_err(failed)?;
        members
            .document("index.json", index.to_string().as_bytes())
            .map_err(failed)?;
        for directory in ["blobs/", "blobs/sha256/"] {
            members.begin(directory, Kind::Directory).map_err(failed)?;
        }
        for (path, blob) in &blobs {
            let file = blob.file()?;
            let content = self.content(file, 0, blob.size);
            members.file(path, content, blob.size).map_err(failed)?;
        }
        let mut out = members.0.finish().map_err(failed)?;
        out.flush().map_err(failed)?;
        drop(out);
        archive.publish()
    }

    fn update_index(&self, entry: &ManifestEntry) -> Result<(), ConvertError> {
        let path = self.directory.join("index.json");
        let bad = |problem: String| ConvertError::layout(path.display().to_string(), problem);
        let mut index: Map<String, Value> = match open_regular(&path)? {
            Some(blob) => serde_json::from_slice(&blob.document(MAX_MANIFEST_BYTES, None)?)
                .map_err(|error| bad(format!("invalid document: {error}")))?,
            None => Map::from_iter([
                ("schemaVersion".to_owned(), json!(2)),
                ("mediaType".to_owned(), json!(OCI_INDEX)),
            ]),
        };
        let manifests = index.entry("manifests").or_insert_with(|| json!([]));
        if manifests.is_null() {
            *manifests = json!([]);
        }
        let Value::Array(manifests) = manifests else {
            return Err(bad("its manifests are not a list".to_owned()));
        };
        // The new image replaces an image of the same name. An image without a name replaces one
        // without a name and of the same artifact type.
        manifests.retain(|other| {
            let name = other.get("annotations").and_then(|all| all.get(NAME));
            match &entry.reference {
                Some(reference) => name.and_then(Value::as_str) != Some(reference),
                None => {
                    name.is_some()
                        || entry.artifact_type != other.get("artifactType").and_then(Value::as_str)
                }
            }
        });
        manifests.push(entry.descriptor());
        let bytes = serde_json::to_vec(&index).map_err(|error| bad(error.to_string()))?;
        replace(&path, &bytes)
    }

    /// Sends the blobs, several at a time, then the manifests in their order, and that of the entry
    /// last.
    fn send(
        &self,
        upload: &dyn Upload,
        blobs: &[NewBlob],
        entry: &ManifestEntry,
        progress: &dyn Progress,
    ) -> Result<(), ConvertError> {
        let name = PathBuf::from(upload.name());
        // The client of the registry replaces the error of a cancelled read.
        let failed = |source| {
            if self.cancel().is_set() {
                ConvertError::Interrupted
            } else {
                ConvertError::write("write", &name, source)
            }
        };
        progress.phase("sending");
        let mut seen = HashSet::new();
        let (parts, manifests): (Vec<usize>, Vec<usize>) = (0..blobs.len())
            .filter(|&index| seen.insert(&blobs[index].digest))
            .partition(|&index| blobs[index].manifest.is_none());
        progress.total(Some(parts.iter().map(|&index| blobs[index].size).sum()));
        let sent = |bytes| progress.advance(bytes);
        parallel::run(&parts, UPLOADS_AT_ONCE, &AtomicBool::new(false), |index| {
            let blob = &blobs[index];
            let open = |offset| -> io::Result<Box<dyn Read>> {
                let file = blob.file().map_err(io::Error::other)?;
                Ok(Box::new(self.content(file, offset, blob.size)))
            };
            upload
                .blob(&blob.digest, blob.size, &open, &sent)
                .map_err(failed)
        })?;
        let others = |&index: &usize| blobs[index].digest != entry.digest;
        let last = manifests.iter().copied().filter(|index| !others(index));
        for index in manifests.iter().copied().filter(others).chain(last) {
            let NewBlob { digest, size, .. } = &blobs[index];
            let media_type = blobs[index].manifest.as_deref().unwrap_or_default();
            let mut bytes = vec![0; *size as usize];
            let file = blobs[index].file()?;
            file.read_exact_at(&mut bytes, 0).map_err(failed)?;
            match &entry.subject {
                _ if *digest != entry.digest => upload.store(&bytes, media_type, digest),
                None => upload.manifest(&bytes, media_type, digest),
                Some(subject) => {
                    upload.attach(&bytes, media_type, digest, subject, &entry.descriptor())
                }
            }
            .map_err(failed)?;
        }
        Ok(())
    }

    /// The bytes of a blob from `at` on.
    fn content(&self, file: File, at: u64, end: u64) -> InOrder {
        InOrder {
            storage: Arc::new(file),
            at,
            end,
            cancel: self.cancel.clone(),
        }
    }

    fn cancel(&self) -> Cancel<'_> {
        Cancel::new(self.cancel.as_deref())
    }
}

/// Writes members of an archive, without attributes of the host.
struct Members<W: Write>(TarWriter<W>);

impl<W: Write> Members<W> {
    fn begin(&mut self, path: &str, kind: Kind<'_>) -> io::Result<()> {
        let permissions = match kind {
            Kind::Directory => 0o755,
            _ => 0o644,
        };
        let entry = TarHeader {
            path: path.as_bytes(),
            kind,
            permissions,
            uid: 0,
            gid: 0,
            mtime: Timestamp::default(),
            xattrs: &[],
        };
        self.0.entry(&entry).map_err(|error| match error {
            EntryError::Io(error) => error,
            EntryError::PaxBytes(_) => io::ErrorKind::InvalidInput.into(),
        })
    }

    fn document(&mut self, path: &str, bytes: &[u8]) -> io::Result<()> {
        let size = bytes.len() as u64;
        self.begin(path, Kind::Regular { size })?;
        self.0.data(bytes)
    }

    fn file(&mut self, path: &str, mut content: InOrder, size: u64) -> io::Result<()> {
        self.begin(path, Kind::Regular { size })?;
        let mut buffer = vec![0; COPY_BYTES];
        loop {
            match content.read(&mut buffer)? {
                0 => return Ok(()),
                count => self.0.data(&buffer[..count])?,
            }
        }
    }
}

impl Drop for LayoutWriter {
    fn drop(&mut self) {
        for path in self.created.iter().rev() {
            // A directory that another writer uses is not empty and stays.
            let _ = std::fs::remove_dir(path);
        }
    }
}

impl NewBlob {
    /// The file of the blob, for reading.
    pub(crate) fn file(&self) -> Result<File, ConvertError> {
        self.output.file()
    }
}

impl ManifestEntry {
    /// The entry of a manifest without a name.
    pub(crate) fn of(manifest: &NewBlob) -> Self {
        ManifestEntry {
            media_type: manifest.manifest.clone().unwrap_or_default(),
            digest: manifest.digest.clone(),
            size: manifest.size,
            artifact_type: None,
            platform: None,
            reference: None,
            subject: None,
            annotations: Annotations::new(),
        }
    }

    pub(crate) fn descriptor(&self) -> Value {
        let mut all = descriptor(&self.media_type, &self.digest, self.size);
        if let Some(artifact_type) = self.artifact_type {
            all.insert("artifactType".into(), json!(artifact_type));
        }
        let mut annotations = self.annotations.clone();
        let name = self.reference.iter().cloned();
        annotations.extend(name.map(|name| (NAME.to_owned(), name)));
        if !annotations.is_empty() {
            all.insert("annotations".into(), json!(annotations));
        }
        if let Some(platform) = &self.platform {
            all.insert("platform".into(), json!(platform));
        }
        Value::Object(all)
    }
}

/// Whether the entry is part of an incomplete layout of a writer that is active or was killed.
fn is_incomplete_layout(entry: &DirEntry) -> bool {
    let name = entry.file_name();
    let name = name.as_encoded_bytes();
    name == b"blobs" || (name.starts_with(b".bcow-") && name.ends_with(b".part"))
}

/// A descriptor without annotations.
pub(crate) fn descriptor(media_type: &str, digest: &Digest, size: u64) -> Map<String, Value> {
    Map::from_iter([
        ("mediaType".to_owned(), json!(media_type)),
        ("digest".to_owned(), json!(digest)),
        ("size".to_owned(), json!(size)),
    ])
}

/// The same with annotations.
pub(crate) fn annotated(
    media_type: &str,
    digest: &Digest,
    size: u64,
    annotations: &BTreeMap<&str, String>,
) -> Value {
    let mut all = descriptor(media_type, digest, size);
    all.insert("annotations".into(), json!(annotations));
    Value::Object(all)
}

/// The text of a document; `what` is its name in messages.
pub(crate) fn json_bytes(value: &Value, what: &Path) -> Result<Vec<u8>, ConvertError> {
    serde_json::to_vec(value)
        .map_err(|error| ConvertError::layout(what.display().to_string(), error))
}

/// Replaces a small file atomically.
fn replace(path: &Path, bytes: &[u8]) -> Result<(), ConvertError> {
    let output = Output::create(path)?;
    output
        .file()?
        .write_all(bytes)
        .map_err(|source| ConvertError::write("write", path, source))?;
    output.publish()
}

fn sync_directory(path: &Path) -> Result<(), ConvertError> {
    File::open(path)
        .and_then(|directory| directory.sync_all())
        .map_err(|source| ConvertError::write("sync", path, source))
}
