//! Converted layers that exist already: in the destination layout, and in a cache.
//!
//! A cache is a directory. An *entry* is a file `ALGORITHM-DIFFID-OPTIONS/DIGEST.bcow` in it: the
//! layer with this diffID, made with certain options by a certain version of bcow. OPTIONS is a
//! hash of the options and the version, DIGEST is the SHA-256 of the file.
//!
//! An entry gets its name when all its bytes are written. Each use copies the entry, and compares
//! the hash of the copied bytes with the name. So several processes may use a cache at once, and
//! any file in the cache may be deleted at any time. An entry with wrong content is removed, and an
//! entry that cannot be read stays; both are made again.
//!
//! Empty files `ALGORITHM-HEX.source` beside an entry have the digests of blobs. A conversion has
//! read each of these blobs, and found that its uncompressed archive has the diffID of the layer.

use std::collections::{BinaryHeap, HashMap};
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::LayerOrigin;
use super::manifest::{self, LayoutLayer};
use super::stored::{LayerRequest, StoredLayer, Unusable};
use crate::blob::open_regular;
use crate::digest::{Algorithm, Digest};
use crate::error::ConvertError;
use crate::layout::write::LayoutWriter;
use crate::options::Progress;
use crate::output::Output;

/// Limit on the entries of one layer that are tried.
const MAX_ENTRIES: usize = 16;
const EXTENSION: &str = "bcow";

/// A directory of converted layers.
pub(crate) struct LayerCache {
    directory: PathBuf,
}

impl LayerCache {
    pub(crate) fn open(directory: &Path) -> Result<LayerCache, ConvertError> {
        std::fs::create_dir_all(directory)
            .map_err(|source| ConvertError::write("create", directory, source))?;
        Ok(LayerCache {
            directory: directory.to_owned(),
        })
    }

    /// The directory of the entries for this request.
    fn directory_of(&self, request: &LayerRequest) -> PathBuf {
        let options = format!("{}\n{}", request.tool, request.options);
        let id = &request.diff_id.0;
        self.directory.join(format!(
            "{}-{}-{}",
            id.algorithm().name(),
            id.hex(),
            &Digest::of(options.as_bytes()).hex()[..16]
        ))
    }

    /// Copies the requested layer from the cache into a new blob of the layout. Returns `None` if
    /// the cache has no usable entry. An entry with wrong content is removed.
    pub(crate) fn get(
        &self,
        request: &LayerRequest,
        layout: &LayoutWriter,
        progress: &dyn Progress,
    ) -> Result<Option<StoredLayer>, ConvertError> {
        let directory = self.directory_of(request);
        let files = match std::fs::read_dir(&directory) {
            Ok(files) => files,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => {
                progress.warning(&format!(
                    "cannot read {}: {error}; the layer is converted again",
                    directory.display()
                ));
                return Ok(None);
            }
        };
        let paths = files
            .filter_map(|file| Some(file.ok()?.path()))
            .filter(|path| path.extension().is_some_and(|e| e == EXTENSION));
        for path in first(paths, MAX_ENTRIES) {
            let (problem, then) = match self.copy(&path, request, layout)? {
                Ok(Some(layer)) => return Ok(Some(layer)),
                // Another process removed the entry.
                Ok(None) => continue,
                Err(problem @ Unusable::Unreadable(_)) => (problem, ""),
                Err(problem @ Unusable::Wrong(_)) => (problem, remove(&path)),
            };
            progress.warning(&format!(
                "cache entry {}: {problem}; {then}the layer is converted again",
                path.display()
            ));
        }
        Ok(None)
    }

    /// Copies the entry at `path` into a new blob, and checks the copied bytes; `None` if the entry
    /// does not exist any more. The outer error is an error of the new blob.
    fn copy(
        &self,
        path: &Path,
        request: &LayerRequest,
        layout: &LayoutWriter,
    ) -> Result<Result<Option<StoredLayer>, Unusable>, ConvertError> {
        let wrong = |problem: &str| Ok(Err(Unusable::Wrong(problem.to_owned())));
        let named = path.file_stem().and_then(|name| name.to_str());
        let named: Option<Digest> = named.and_then(|hex| format!("sha256:{hex}").parse().ok());
        let Some(named) = named else {
            return wrong("the name of the entry is not a digest");
        };
        let entry = match open_file(path) {
            Ok(Some(entry)) => entry,
            Ok(None) => return Ok(Ok(None)),
            Err(unusable) => return Ok(Err(unusable)),
        };
        let output = layout.new_blob()?;
        let mut file = output.file()?;
        let mut buffer = vec![0; 1 << 20];
        loop {
            let read = match (&*entry).read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Ok(Err(unreadable(&error))),
            };
            file.write_all(&buffer[..read])
                .map_err(|source| ConvertError::write("write to", layout.directory(), source))?;
        }
        let blob = layout.finish(output)?;
        if blob.digest != named {
            return wrong("it is damaged: its digest differs from its name");
        }
        Ok(StoredLayer::of_blob(blob, request, LayerOrigin::Cache)?.map(Some))
    }

    /// Whether the cache records that the blob with this digest has the requested diffID.
    pub(crate) fn has_source(&self, request: &LayerRequest, source: Option<&Digest>) -> bool {
        source.is_some_and(|source| self.source_record_path(request, source).exists())
    }

    /// Records that the blob with this digest has the requested diffID. A failure is ignored: the
    /// next use verifies the blob again.
    pub(crate) fn record_source(&self, request: &LayerRequest, source: Option<&Digest>) {
        if let Some(source) = source {
            let _ = File::create(self.source_record_path(request, source));
        }
    }

    fn source_record_path(&self, request: &LayerRequest, source: &Digest) -> PathBuf {
        self.directory_of(request).join(format!(
            "{}-{}.source",
            source.algorithm().name(),
            source.hex()
        ))
    }

    /// Adds a layer to the cache. A failure gives a warning, not an error.
    pub(crate) fn put(&self, request: &LayerRequest, layer: &StoredLayer, progress: &dyn Progress) {
        if let Err(error) = self.try_put(request, layer) {
            let error = with_cause(&error);
            progress.warning(&format!("cannot add a layer to the cache: {error}"));
        }
    }

    fn try_put(&self, request: &LayerRequest, layer: &StoredLayer) -> Result<(), ConvertError> {
        let Some(blob) = &layer.new else {
            return Ok(());
        };
        let directory = self.directory_of(request);
        std::fs::create_dir_all(&directory)
            .map_err(|source| ConvertError::write("create", &directory, source))?;
        let output = Output::unnamed(&directory)?;
        let mut from = blob.file()?;
        // `from` shares its file position with the descriptor through which the blob was written,
        // so the position is the end of the blob.
        io::Seek::rewind(&mut from).map_err(|e| ConvertError::write("read back", &directory, e))?;
        io::copy(&mut from, &mut output.file()?)
            .map_err(|source| ConvertError::write("write to", &directory, source))?;
        // Nothing is synced: if a crash damages the entry, the next use removes it.
        output.name_as(&format!("{}.{EXTENSION}", layer.digest.hex()))
    }
}

/// The first `count` paths in the order of their names, without a list of all paths.
fn first(paths: impl Iterator<Item = PathBuf>, count: usize) -> Vec<PathBuf> {
    let mut first = BinaryHeap::with_capacity(count + 1);
    for path in paths {
        first.push(path);
        if first.len() > count {
            first.pop();
        }
    }
    first.into_sorted_vec()
}

/// Removes an entry. Returns the part of the warning about it.
fn remove(path: &Path) -> &'static str {
    match std::fs::remove_file(path) {
        Ok(()) => "it was removed, and ",
        // Another process removed the entry first.
        Err(e) if e.kind() == io::ErrorKind::NotFound => "it was removed, and ",
        Err(_) => "it cannot be removed, and ",
    }
}

fn unreadable(error: &io::Error) -> Unusable {
    Unusable::Unreadable(format!("it cannot be read: {error}"))
}

/// The text of an error and of its cause.
fn with_cause(error: &ConvertError) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

/// The BCoW layers of the images in a layout, as their manifests describe them.
#[derive(Default)]
pub(crate) struct LayoutLayers {
    by_diff_id: HashMap<String, Vec<LayoutLayer>>,
}

impl LayoutLayers {
    /// Reads the manifests of the layout in `directory`, if there is one. Unreadable images are
    /// skipped; a command that uses them reports the error.
    pub(crate) fn find(directory: &Path) -> Result<LayoutLayers, ConvertError> {
        let mut by_diff_id: HashMap<String, Vec<LayoutLayer>> = HashMap::new();
        for layer in manifest::layers_in(directory)? {
            by_diff_id
                .entry(layer.diff_id.clone())
                .or_default()
                .push(layer);
        }
        Ok(LayoutLayers { by_diff_id })
    }

    /// Whether a manifest names the blob with this digest as the source of a layer with the
    /// requested diffID.
    pub(crate) fn has_source(&self, request: &LayerRequest, source: Option<&Digest>) -> bool {
        let layers = self.by_diff_id.get(&request.diff_id.to_string());
        let source = source.map(Digest::to_string);
        source.is_some()
            && layers.is_some_and(|layers| layers.iter().any(|layer| layer.source == source))
    }

    /// Opens the requested layer in the layout. Returns `None` if the layout has no usable blob of
    /// it. With `verify`, a blob whose digest differs from its name is not usable.
    pub(crate) fn get(
        &self,
        request: &LayerRequest,
        layout: &LayoutWriter,
        verify: bool,
        progress: &dyn Progress,
    ) -> Result<Option<StoredLayer>, ConvertError> {
        let Some(layers) = self.by_diff_id.get(&request.diff_id.to_string()) else {
            return Ok(None);
        };
        for layer in layers.iter().filter(|layer| layer.is_made_as(request)) {
            let path = layout.blob_path(&layer.digest);
            match open_layer(&path, layer, request, verify) {
                Ok(Some(found)) => return Ok(Some(found)),
                Ok(None) => {}
                Err(problem) => progress.warning(&format!(
                    "{}: {problem}; the layer is converted again",
                    path.display()
                )),
            }
        }
        Ok(None)
    }
}

/// Opens a regular file; `None` if it does not exist. A pipe or a device in its place is refused: a
/// read of it might never end. The path is not opened again, because another file can take its
/// place at any time.
fn open_file(path: &Path) -> Result<Option<Arc<File>>, Unusable> {
    match open_regular(path) {
        Ok(blob) => Ok(blob.and_then(|blob| blob.file())),
        Err(error @ ConvertError::Read { .. }) => Err(Unusable::Unreadable(with_cause(&error))),
        Err(error) => Err(Unusable::Wrong(error.to_string())),
    }
}

/// Opens the blob at `path`; `None` if it does not exist.
fn open_layer(
    path: &Path,
    layer: &LayoutLayer,
    request: &LayerRequest,
    verify: bool,
) -> Result<Option<StoredLayer>, Unusable> {
    let wrong = |problem: String| Err(Unusable::Wrong(problem));
    let Some(file) = open_file(path)? else {
        return Ok(None);
    };
    let found = file.metadata().map_err(|e| unreadable(&e))?.len();
    if found != layer.size {
        return wrong(format!(
            "its length in bytes is {found}, not {}",
            layer.size
        ));
    }
    if verify {
        let digest = Digest::of_storage(&*file, Algorithm::Sha256).map_err(|e| unreadable(&e))?;
        if digest != layer.digest {
            return wrong("it is damaged: its digest differs from its name".to_owned());
        }
    }
    StoredLayer::open(
        file,
        layer.digest.clone(),
        layer.size,
        request,
        LayerOrigin::Layout,
    )
    .map(Some)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::digest::DiffId;
    use crate::layout::write::LayoutPlace;

    /// Replaces `path` by a FIFO and by a regular file, in turn.
    fn alternate(path: &Path) {
        use rustix::fs::{CWD, FileType, Mode, mknodat};
        let other = path.with_extension("other");
        mknodat(CWD, &other, FileType::Fifo, Mode::RUSR, 0).unwrap();
        std::fs::rename(&other, path).unwrap();
        std::fs::write(&other, b"").unwrap();
        std::fs::rename(&other, path).unwrap();
    }

    #[test]
    fn a_fifo_that_takes_the_place_of_an_entry_does_not_block() {
        let dir = tempfile::tempdir().unwrap();
        let request = LayerRequest {
            diff_id: DiffId(Digest::of(b"archive")),
            options: serde_json::json!({}),
            tool: "test".into(),
            open: bcow::OpenOptions::default(),
        };
        let cache = LayerCache::open(&dir.path().join("cache")).unwrap();
        let entry = cache.directory_of(&request).join(format!("{:064}.bcow", 0));
        std::fs::create_dir(cache.directory_of(&request)).unwrap();
        let is_done = Arc::new(AtomicBool::new(false));
        let changer = std::thread::spawn({
            let is_done = is_done.clone();
            move || {
                while !is_done.load(Ordering::Relaxed) {
                    alternate(&entry);
                }
            }
        });
        let (done, end) = mpsc::channel();
        let layout = LayoutPlace {
            path: dir.path().join("layout"),
            ..LayoutPlace::default()
        };
        std::thread::spawn(move || {
            let layout = LayoutWriter::open(&layout, None).unwrap();
            for _ in 0..2000 {
                assert!(cache.get(&request, &layout, &()).unwrap().is_none());
            }
            done.send(()).unwrap();
        });
        let end = end.recv_timeout(Duration::from_secs(60));
        is_done.store(true, Ordering::Relaxed);
        changer.join().unwrap();
        assert!(end.is_ok(), "a read of an entry blocks");
    }
}
