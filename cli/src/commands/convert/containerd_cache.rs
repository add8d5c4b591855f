//! Writes the layers of an ordinary image as files for the erofs snapshotter of containerd 2.4.
//!
//! The snapshotter looks for layers in the directories of its option `layer_content_caches`. If it
//! finds the file of a layer there, it neither fetches nor unpacks the layer.
//!
//! The names are `DIR/sha256/XX/DIFFID.erofs`. DIFFID is the diffID without `sha256:`, and XX is
//! its first two digits.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use bcow::{Image, OpenOptions};
use bcow_erofs::overlay::{DEVICE, IMPLICIT, LINK};
use bcow_erofs::reader::{ErofsError, FileType, Filesystem, Inode, Walk};
use bcow_oci::{ConvertOptions, LayoutForm, LayoutOptions, Source, convert_to_layout};
use serde_json::json;

use super::Args;
use crate::conversion::failure;
use crate::error::{CommandError, Context};
use crate::names::quoted;
use crate::size::{Human, plural};
use crate::ui::Ui;

/// Writes the layers of `source` into `directory`, which is made if it is missing. An existing file
/// is kept: containerd may have mounted it.
pub fn run(
    args: &Args,
    source: &Source,
    directory: &Path,
    options: &ConvertOptions,
    ui: &Ui,
) -> Result<(), CommandError> {
    check(args, source)?;
    let cannot = || format!("cannot write containerd-cache:{}", directory.display());
    let is_missing = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
    let missing: Vec<&Path> = directory.ancestors().take_while(is_missing).collect();
    // Declared before `scratch`, so it is dropped after `scratch`: while the scratch directory
    // exists, `directory` is not empty.
    let new_directories = NewDirectories(missing);
    fs::create_dir_all(directory).context(cannot)?;
    for new in &new_directories.0 {
        let parent = new.parent().filter(|parent| !parent.as_os_str().is_empty());
        sync(parent.unwrap_or(Path::new("."))).context(cannot)?;
    }
    // On the file system of `directory`, so that link(2) can publish each file.
    let scratch = tempfile::Builder::new()
        .prefix(".bcow-")
        .tempdir_in(directory)
        .context(cannot)?;
    let layout = LayoutOptions {
        directory: scratch.path().join("layout"),
        form: LayoutForm::Directory,
        cache: args.cache.clone(),
        ..LayoutOptions::default()
    };
    let progress = ui.progress();
    let report =
        convert_to_layout(source, &layout, options, &progress).map_err(|error| failure(&error))?;
    drop(progress);
    let mut made = Vec::new();
    for layer in &report.layers {
        let diff_id = layer.diff_id.to_string();
        let digest = layer.digest.to_string();
        let (Some(name), Some(blob)) = (digits(&diff_id), digits(&digest)) else {
            return Err(CommandError::new(cannot()).caused_by_text(format!(
                "the diffID {diff_id} or the digest {digest} of its file is not a SHA-256"
            )));
        };
        let blob = layout.directory.join("blobs/sha256").join(blob);
        require_overlayfs(&blob, &diff_id).map_err(|error| {
            CommandError::new(cannot())
                .caused_by_text(error)
                .hint("containerd unpacks this image without a cache")
        })?;
        // All users can read the file, for any umask: they may share the cache.
        fs::set_permissions(&blob, fs::Permissions::from_mode(0o644)).context(cannot)?;
        let place = directory.join("sha256").join(&name[..2]);
        made.push((layer, blob, place.join(format!("{name}.erofs")), place));
    }
    let mut layers = Vec::new();
    let mut new = 0;
    for (layer, blob, path, place) in made {
        fs::create_dir_all(&place).context(cannot)?;
        let is_new = match fs::hard_link(&blob, &path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => false,
            linked => linked.context(cannot).map(|()| true)?,
        };
        for place in [&*place, &directory.join("sha256"), directory] {
            sync(place).context(cannot)?;
        }
        new += usize::from(is_new);
        layers.push(json!({
            "diff_id": layer.diff_id,
            "file": path,
            "file_bytes": layer.file_bytes,
            "is_new": is_new,
        }));
    }
    if args.json {
        return ui.print_json(&json!({
            "schema": "bcow.convert-containerd-cache/1",
            "layers": layers,
        }));
    }
    let bytes = report.layers.iter().map(|layer| layer.file_bytes).sum();
    ui.status(format_args!(
        "containerd-cache:{}: {} of {} in all, {new} new",
        directory.display(),
        plural(layers.len() as u64, "layer"),
        Human(bytes),
    ));
    Ok(())
}

/// `directory` and its parents, as far as this command makes them; the innermost is first. The drop
/// removes the empty ones, which remain after a failure. A directory with files is kept, because
/// each file is complete.
struct NewDirectories<'d>(Vec<&'d Path>);

impl Drop for NewDirectories<'_> {
    fn drop(&mut self) {
        for directory in &self.0 {
            let _ = fs::remove_dir(directory);
        }
    }
}

fn sync(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

/// Refuses options and sources that cannot be used for containerd-cache:.
fn check(args: &Args, source: &Source) -> Result<(), CommandError> {
    let option = match args {
        Args {
            dedup_lower: true, ..
        } => Some("--dedup-lower"),
        Args {
            prefetch: Some(_), ..
        } => Some("--prefetch"),
        _ => None,
    };
    if let Some(option) = option {
        return Err(
            CommandError::usage(format!("{option} cannot be used with containerd-cache:"))
                .hint("containerd uses the file of a layer over any other layers"),
        );
    }
    match source {
        Source::Directory(path) => Err(CommandError::usage(format!(
            "{} is no image whose layers containerd could ask for",
            path.display()
        ))
        .hint("name an image in layers: oci:DIR[:REF], docker://HOST/REPO[:TAG]")),
        _ => Ok(()),
    }
}

/// The error for a source in BCoW form, which this command does not convert yet.
pub fn not_ordinary(source: &str) -> CommandError {
    CommandError::usage(format!(
        "{source} is in BCoW form: its layers for containerd-cache: are not supported yet"
    ))
    .hint("name the ordinary image, whose diffIDs containerd asks for")
}

/// Fails if overlayfs shows an inode of the layer in another way than a program that unpacks the
/// layer. containerd stacks the files with overlayfs.
fn require_overlayfs(blob: &Path, diff_id: &str) -> Result<(), String> {
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

/// The digits of a digest in text form; `None` if it is not a SHA-256.
fn digits(digest: &str) -> Option<&str> {
    digest
        .strip_prefix("sha256:")
        .filter(|digits| digits.len() == 64)
}
