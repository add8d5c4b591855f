//! Writes the layers of an ordinary image as files for the erofs snapshotter of containerd 2.4.
//!
//! The snapshotter looks for layers in the directories of its option `layer_content_caches`. If it
//! finds the file of a layer there, it neither fetches nor unpacks the layer.
//!
//! The names are `DIR/sha256/XX/DIFFID.erofs`. DIFFID is the diffID without `sha256:`, and XX is
//! its first two digits.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use bcow::{Image, OpenOptions};
use bcow_erofs::overlay::{DEVICE, IMPLICIT, LINK};
use bcow_erofs::reader::{ErofsError, FileType, Filesystem, Inode, Walk};
use bcow_images::error::{CommandError, Context};
use bcow_images::names::quoted;
use bcow_oci::{
    ConvertOptions, DiffId, LayoutOptions, LayoutPlace, Progress, Source, convert_to_layout,
    diff_ids,
};
use serde::Serialize;

/// Writes the layers of `source` into `directory`, which is made if it is missing. An existing file
/// is kept: containerd may have mounted it. If all files exist, no layer is read. `layers` is the
/// directory with layers that were converted before.
pub(crate) fn convert(
    source: &Source,
    directory: &Path,
    layers: Option<&Path>,
    options: &ConvertOptions,
    progress: &dyn Progress,
) -> Result<CacheReport, CommandError> {
    let cache = Cache { directory };
    let layers = match cache.kept(source, options)? {
        Some(layers) => layers,
        None => cache.write(layers, source, options, progress)?,
    };
    Ok(CacheReport { layers })
}

/// The layers of an image in the cache.
#[derive(Debug, Serialize)]
pub struct CacheReport {
    /// The lowest first.
    pub layers: Vec<CachedLayer>,
}

/// The file of a layer in the cache.
#[derive(Debug, Serialize)]
pub struct CachedLayer {
    /// The layer.
    pub diff_id: DiffId,
    /// The path of its file.
    #[serde(rename = "file")]
    pub path: PathBuf,
    /// The size of this file. A kept file can differ from one that this version would write.
    pub file_bytes: u64,
    /// Whether this conversion wrote it.
    pub is_new: bool,
}

/// A directory of the option `layer_content_caches`.
struct Cache<'d> {
    directory: &'d Path,
}

impl Cache<'_> {
    fn cannot(&self) -> String {
        format!("cannot write containerd-cache:{}", self.directory.display())
    }

    /// The path of the file of a layer.
    fn path(&self, diff_id: &DiffId) -> Result<PathBuf, CommandError> {
        let name = diff_id.0.hex();
        if diff_id.0.sha256().is_none() {
            return Err(CommandError::new(self.cannot())
                .caused_by_text(format!("the diffID {diff_id} is not a SHA-256")));
        }
        let place = self.directory.join("sha256").join(&name[..2]);
        Ok(place.join(format!("{name}.erofs")))
    }

    /// The layers of `source`, if the cache has the files of all of them.
    fn kept(
        &self,
        source: &Source,
        options: &ConvertOptions,
    ) -> Result<Option<Vec<CachedLayer>>, CommandError> {
        let Some(diff_ids) = diff_ids(source, options)? else {
            return Ok(None);
        };
        // The conversion reports an image without layers.
        if diff_ids.is_empty() {
            return Ok(None);
        }
        let mut layers = Vec::new();
        for diff_id in diff_ids {
            let path = self.path(&diff_id)?;
            match path.symlink_metadata() {
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
                found => found.context(|| self.cannot())?,
            };
            layers.push(self.layer(diff_id, path, false)?);
        }
        Ok(Some(layers))
    }

    /// The layer with the file at `path`.
    fn layer(
        &self,
        diff_id: DiffId,
        path: PathBuf,
        is_new: bool,
    ) -> Result<CachedLayer, CommandError> {
        let cannot = || CommandError::new(self.cannot());
        let metadata = path
            .metadata()
            .map_err(|error| cannot().caused_by_text(format!("{}: {error}", path.display())))?;
        if metadata.is_file() {
            Ok(CachedLayer {
                diff_id,
                path,
                file_bytes: metadata.len(),
                is_new,
            })
        } else {
            Err(cannot().caused_by_text(format!("{} is not a regular file", path.display())))
        }
    }

    /// Converts all layers, and adds the files that the cache does not have.
    fn write(
        &self,
        layers: Option<&Path>,
        source: &Source,
        options: &ConvertOptions,
        progress: &dyn Progress,
    ) -> Result<Vec<CachedLayer>, CommandError> {
        let cannot = || self.cannot();
        // Declared before `scratch`, so it is dropped after `scratch`: while the scratch directory
        // exists, `directory` is not empty.
        let mut new_directories = NewDirectories::default();
        new_directories.make(self.directory).context(cannot)?;
        // On the file system of `directory`, so that link(2) can publish each file.
        let scratch = tempfile::Builder::new()
            .prefix(".bcow-")
            .tempdir_in(self.directory)
            .context(cannot)?;
        let layout = LayoutOptions {
            place: LayoutPlace {
                path: scratch.path().join("layout"),
                ..LayoutPlace::default()
            },
            cache: layers.map(Path::to_owned),
            ..LayoutOptions::default()
        };
        let report = convert_to_layout(source, &layout, options, progress)?;
        let blobs = layout.place.path.join("blobs/sha256");
        let mut made = Vec::new();
        for layer in report.layers {
            let path = self.path(&layer.diff_id)?;
            let blob = blobs.join(layer.digest.hex());
            refuse_unlike_overlayfs(&blob, &layer.diff_id).map_err(|error| {
                CommandError::new(cannot())
                    .caused_by_text(error)
                    .hint("containerd can still pull and unpack this image without these files")
            })?;
            made.push((layer.diff_id, blob, path));
        }
        let mut layers = Vec::new();
        for (diff_id, blob, path) in made {
            let place = path.parent().unwrap_or(self.directory);
            new_directories.make(place).context(cannot)?;
            let is_new = match fs::hard_link(&blob, &path) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => false,
                linked => linked.context(cannot).map(|()| true)?,
            };
            sync(place).context(cannot)?;
            layers.push(self.layer(diff_id, path, is_new)?);
        }
        Ok(layers)
    }
}

/// Directories that this command made, in the order in which it made them. The drop removes the
/// empty ones, which remain after a failure. A directory with files is kept, because each file is
/// complete.
#[derive(Default)]
struct NewDirectories(Vec<PathBuf>);

impl NewDirectories {
    /// Makes `directory` and its missing parents, each with a durable name.
    fn make(&mut self, directory: &Path) -> io::Result<()> {
        let is_missing = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
        let missing: Vec<&Path> = directory.ancestors().take_while(is_missing).collect();
        for new in missing.into_iter().rev() {
            match fs::create_dir(new) {
                Ok(()) => self.0.push(new.to_owned()),
                // Another process has made it.
                Err(error) if error.kind() == ErrorKind::AlreadyExists && new.is_dir() => {}
                Err(error) => return Err(error),
            }
            let parent = new.parent().filter(|parent| !parent.as_os_str().is_empty());
            sync(parent.unwrap_or(Path::new(".")))?;
        }
        if directory.is_dir() { Ok(()) } else { Err(ErrorKind::NotADirectory.into()) }
    }
}

impl Drop for NewDirectories {
    fn drop(&mut self) {
        for directory in self.0.iter().rev() {
            let _ = fs::remove_dir(directory);
        }
    }
}

fn sync(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

/// Fails if overlayfs shows an inode of the layer in another way than a program that unpacks the
/// layer. containerd stacks the files with overlayfs.
fn refuse_unlike_overlayfs(blob: &Path, diff_id: &DiffId) -> Result<(), String> {
    let damaged = |error: &dyn std::fmt::Display| format!("layer {diff_id}: {error}");
    let image = Image::open(blob, &OpenOptions::default()).map_err(|error| damaged(&error))?;
    let fs = Filesystem::open(image).map_err(|error| damaged(&error))?;
    let mut walk = Walk::new(&fs);
    while let Some(inode) = walk.next().map_err(|error| damaged(&error))? {
        // The root directory is an exception: few layers have an entry for it.
        let is_root = walk.path().is_empty();
        let problem = unlike_overlayfs(&fs, &inode).map_err(|error| damaged(&error))?;
        if let Some(problem) = problem.filter(|_| !is_root) {
            let path = quoted(walk.path());
            return Err(format!("layer {diff_id}: {path} {problem}"));
        }
    }
    Ok(())
}

/// Why overlayfs cannot represent an inode of a layer (see [`bcow_erofs::overlay`]); `None` if it
/// can.
fn unlike_overlayfs(fs: &Filesystem, inode: &Inode) -> Result<Option<&'static str>, ErofsError> {
    let (mark, problem) = match inode.kind {
        FileType::Directory => (
            IMPLICIT,
            "is a directory without an entry of its own, whose attributes are those in the layers \
             below",
        ),
        FileType::Symlink => (LINK, "is a hard link to a file of the layers below"),
        FileType::CharDevice => (DEVICE, "is the device 0:0, which would be a whiteout"),
        _ => return Ok(None),
    };
    let is_marked = inode.has_xattrs() && fs.xattr(inode, mark)?.is_some();
    Ok(is_marked.then_some(problem))
}
