//! Converted layers that exist already: in the destination layout, and in a cache.
//!
//! A cache is a directory. The file `DIFFID-OPTIONS/DIGEST.bcow` in it is the layer with this
//! diffID, made with certain options by a certain version: OPTIONS is a hash of the options and the
//! version, DIGEST is the digest of the file. An entry gets its name when it is complete. Each use
//! copies the entry, hashes the copy and compares the hash with the name. So several processes may
//! use a cache at once, any file in the cache may be deleted at any time, and a corrupt entry is
//! removed and made again. Empty files `ALGORITHM-HEX.source` beside an entry record which blobs
//! were verified to be the layer.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use super::Made;
use super::manifest::{self, LayoutLayer};
use super::stored::{StoredLayer, Wanted};
use crate::blob::open_regular;
use crate::digest::{Algorithm, Digest, Hasher};
use crate::error::ConvertError;
use crate::layout::write::{LayoutWriter, digest_of, write_error};
use crate::options::Progress;
use crate::output::Output;

/// Limit on the files of an entry that are tried.
const MAX_FILES: usize = 16;
const ENDING: &str = "bcow";

/// A directory of converted layers.
pub(crate) struct LayerCache {
    directory: PathBuf,
}

impl LayerCache {
    pub(crate) fn open(directory: &Path) -> Result<LayerCache, ConvertError> {
        std::fs::create_dir_all(directory)
            .map_err(|source| write_error("create", directory, source))?;
        Ok(LayerCache {
            directory: directory.to_owned(),
        })
    }

    fn entry(&self, wanted: &Wanted) -> PathBuf {
        let options = format!("{}\n{}", wanted.tool, wanted.options);
        let id = &wanted.diff_id.0;
        self.directory.join(format!(
            "{}-{}-{}",
            id.algorithm().name(),
            id.hex(),
            &Digest::of(options.as_bytes()).hex()[..16]
        ))
    }

    /// Copies the wanted layer for the layout. A corrupt entry is removed.
    pub(crate) fn get(
        &self,
        wanted: &Wanted,
        layout: &LayoutWriter,
        progress: &dyn Progress,
    ) -> Result<Option<StoredLayer>, ConvertError> {
        let Ok(files) = std::fs::read_dir(self.entry(wanted)) else {
            return Ok(None);
        };
        let mut paths: Vec<PathBuf> = files
            .filter_map(|file| Some(file.ok()?.path()))
            .filter(|path| path.extension().is_some_and(|e| e == ENDING))
            .take(MAX_FILES)
            .collect();
        paths.sort();
        for path in paths {
            match self.copy(&path, wanted, layout)? {
                Ok(layer) => return Ok(Some(layer)),
                Err(problem) => {
                    let dropped = match std::fs::remove_file(&path) {
                        Ok(()) => "it was dropped",
                        // Another process removed the entry first.
                        Err(e) if e.kind() == io::ErrorKind::NotFound => "it was dropped",
                        Err(_) => "it cannot be deleted",
                    };
                    progress.warning(&format!(
                        "cache entry {}: {problem}; {dropped}, and the layer is converted again",
                        path.display()
                    ));
                }
            }
        }
        Ok(None)
    }

    /// The inner error is the reason why the entry is unusable.
    fn copy(
        &self,
        path: &Path,
        wanted: &Wanted,
        layout: &LayoutWriter,
    ) -> Result<Result<StoredLayer, String>, ConvertError> {
        let named = path.file_stem().and_then(|name| name.to_str());
        let named: Option<Digest> = named.and_then(|hex| format!("sha256:{hex}").parse().ok());
        let Some(named) = named else {
            return Ok(Err("its name is no digest".to_owned()));
        };
        // Reading a pipe or a device in place of the entry might never end.
        match open_regular(path) {
            Ok(Some(_)) => {}
            Ok(None) => return Ok(Err("it is gone".to_owned())),
            Err(error) => return Ok(Err(error.to_string())),
        }
        let mut entry = match File::open(path) {
            Ok(entry) => entry,
            Err(error) => return Ok(Err(error.to_string())),
        };
        let output = layout.new_blob()?;
        let mut file = output.file()?;
        let mut hasher = Hasher::new(Algorithm::Sha256);
        let mut buffer = vec![0; 1 << 20];
        loop {
            let read = match entry.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Ok(Err(error.to_string())),
            };
            hasher.update(&buffer[..read]);
            file.write_all(&buffer[..read])
                .map_err(|source| write_error("write to", layout.directory(), source))?;
        }
        if hasher.finish() != named {
            return Ok(Err("it is damaged: its digest is not its name".to_owned()));
        }
        let blob = layout.finish(output)?;
        let file = blob.file()?;
        Ok(
            StoredLayer::open(file, blob.digest.clone(), blob.size, wanted, Made::Cache).map(
                |mut layer| {
                    layer.new = Some(blob);
                    layer
                },
            ),
        )
    }

    /// Whether the blob with this digest was verified to be the layer before.
    pub(crate) fn knows(&self, wanted: &Wanted, source: Option<&Digest>) -> bool {
        source.is_some_and(|source| self.mark(wanted, source).exists())
    }

    /// Records that the blob was verified. A failure is ignored: the next use verifies the blob
    /// again.
    pub(crate) fn learn(&self, wanted: &Wanted, source: Option<&Digest>) {
        if let Some(source) = source {
            let _ = File::create(self.mark(wanted, source));
        }
    }

    fn mark(&self, wanted: &Wanted, source: &Digest) -> PathBuf {
        self.entry(wanted).join(format!(
            "{}-{}.source",
            source.algorithm().name(),
            source.hex()
        ))
    }

    /// Adds a layer to the cache. A failure gives a warning, not an error.
    pub(crate) fn put(&self, wanted: &Wanted, layer: &StoredLayer, progress: &dyn Progress) {
        if let Err(error) = self.try_put(wanted, layer) {
            let cause = match std::error::Error::source(&error) {
                Some(source) => format!(": {source}"),
                None => String::new(),
            };
            progress.warning(&format!("the cache does not keep a layer: {error}{cause}"));
        }
    }

    fn try_put(&self, wanted: &Wanted, layer: &StoredLayer) -> Result<(), ConvertError> {
        let Some(blob) = &layer.new else {
            return Ok(());
        };
        let directory = self.entry(wanted);
        std::fs::create_dir_all(&directory)
            .map_err(|source| write_error("create", &directory, source))?;
        let output = Output::unnamed(&directory)?;
        let mut from = blob.file()?;
        // The descriptor shares its position with the writer's.
        io::Seek::rewind(&mut from).map_err(|e| write_error("read back", &directory, e))?;
        io::copy(&mut from, &mut output.file()?)
            .map_err(|source| write_error("write to", &directory, source))?;
        output.name_as(&format!("{}.{ENDING}", layer.digest.hex()))
    }
}

/// The BCoW layers of the images in a layout.
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

    /// Whether the blob with this digest was verified to be the layer before.
    pub(crate) fn knows(&self, wanted: &Wanted, source: Option<&Digest>) -> bool {
        let layers = self.by_diff_id.get(&wanted.diff_id.to_string());
        let source = source.map(Digest::to_string);
        source.is_some()
            && layers.is_some_and(|layers| layers.iter().any(|layer| layer.source == source))
    }

    /// Opens the wanted layer in the layout.
    pub(crate) fn get(
        &self,
        wanted: &Wanted,
        layout: &LayoutWriter,
        verify: bool,
        progress: &dyn Progress,
    ) -> Result<Option<StoredLayer>, ConvertError> {
        let Some(layers) = self.by_diff_id.get(&wanted.diff_id.to_string()) else {
            return Ok(None);
        };
        for layer in layers.iter().filter(|layer| layer.is_made_as(wanted)) {
            let path = layout.blob_path(&layer.digest);
            match open_layer(&path, layer, wanted, verify) {
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

/// The inner error is the reason why the blob does not match its manifest.
fn open_layer(
    path: &Path,
    layer: &LayoutLayer,
    wanted: &Wanted,
    verify: bool,
) -> Result<Option<StoredLayer>, String> {
    if open_regular(path).map_err(|e| e.to_string())?.is_none() {
        return Ok(None);
    }
    let file = File::open(path).map_err(|e| e.to_string())?;
    let found = file.metadata().map_err(|e| e.to_string())?.len();
    if found != layer.size {
        return Err(format!("it has {found} bytes, not {}", layer.size));
    }
    if verify {
        let (digest, _) = digest_of(&file).map_err(|e| e.to_string())?;
        if digest != layer.digest {
            return Err("it is damaged: its digest is not its name".to_owned());
        }
    }
    StoredLayer::open(file, layer.digest.clone(), layer.size, wanted, Made::Layout).map(Some)
}
