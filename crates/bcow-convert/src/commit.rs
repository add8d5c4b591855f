//! The changes in the upper of a writable mount, as a layer or an image.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use bcow::chain::directory_of;
use bcow::format::{Use, hex, is_plain_name};
use bcow_erofs::merge::merge;
use bcow_erofs::overlay::{ReadOptions, TreeForm, read_layer};
use bcow_erofs::tree::Tree as ErofsTree;
use bcow_images::args::COMMIT_TO;
use bcow_images::error::CommandError;
use bcow_images::image::{LayerArgs, OpenImage, StoreArgs};
use bcow_images::push::Destination;
use bcow_images::readable_upper::ReadableUpper;
use bcow_images::replace::{self, Force, Replacement};
use bcow_images::upper::Joined;
use bcow_images::{Name, changes};
use bcow_oci::commit::{Base, Commit};
use bcow_oci::digest::Algorithm;
use bcow_oci::export::{
    KnownLayer, LayerCompression, Layers, LayoutExport, OciReport, TarForm, TarReport,
    export_layout,
};
use bcow_oci::{Annotations, Digest, LayoutPlace, Limits, Report, store};
use bcow_union::offline::{Changes, LOWER_START, Scope, Spliced};
use serde_json::{Map, Value, json};

use crate::export::{Output, export_failure, export_options, layers_of_stack, to_archive};
use crate::options::{Encoding, as_digest, source_date_epoch};
use crate::work::Work;

/// A commit of an upper, as the user asks for it.
pub struct UpperCommit<'a> {
    /// The image of the upper.
    pub image: &'a Name,
    /// The upper, or a disk that shows the image. It may be in use.
    pub upper: &'a Path,
    /// What to write.
    pub new: &'a Name,
    /// The content of a BCoW file.
    pub content: NewContent,
    /// How a BCoW file is written.
    pub encoding: Encoding,
    /// Compression of the layers of an OCI image.
    pub layer_compression: LayerCompression,
    /// Layers on top of the image.
    pub layers: &'a LayerArgs,
    /// Where files below the image are looked up.
    pub stores: &'a StoreArgs,
}

/// The content of a new image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NewContent {
    /// The changes.
    Layer,
    /// The whole visible content, with the image below it.
    Merged,
    /// The whole visible content.
    Whole,
}

/// What a commit of an upper wrote.
pub enum CommitOutput {
    /// A layer archive, in a file or on the stream.
    Archive(Option<PathBuf>, TarReport),
    /// An OCI image, with its name.
    Layout(String, OciReport),
    /// A BCoW file.
    File(PathBuf, Box<Report>),
}

impl UpperCommit<'_> {
    /// Makes a layer or an image of the changes in the upper. A layer archive without a file goes
    /// to the stream.
    pub fn run(
        &self,
        stream: &mut dyn Write,
        work: &Work<'_>,
    ) -> Result<CommitOutput, CommandError> {
        let remote = &self.stores.remote;
        let destination = Destination::of(self.new, &COMMIT_TO, remote, self.image)?;
        refuse_inside(self.upper, &destination)?;
        let image = OpenImage::open(self.image, &self.layers.layers, self.stores)?;
        // Dropped behind all that reads it.
        let upper = ReadableUpper::find(self.upper, work.messages)?;
        refuse_inside(&upper.of, &destination)?;
        let changes = changes::read(&image, &upper, self.stores, Scope::Layer, work.messages)?;
        work.progress.phase("committing");
        let commit = OpenCommit {
            asked: self,
            image: &image,
            work,
        };
        match destination {
            Destination::Tar(path) => {
                let output = match &path {
                    Some(path) => Output::File(path),
                    None => Output::Stream(stream),
                };
                let report = commit.archive(changes, output)?;
                Ok(CommitOutput::Archive(path, report))
            }
            Destination::Layout(layout) => commit.layout(changes, &layout),
            Destination::File(path) => {
                let mut report = commit.file(changes, &path)?;
                report.merkle_root = as_digest(&report.merkle_root);
                Ok(CommitOutput::File(path, Box::new(report)))
            }
            _ => Err(COMMIT_TO.refuse(self.new).into()),
        }
    }
}

/// Fails if the new file would lie in the upper: the next mount would show it.
fn refuse_inside(upper: &Path, destination: &Destination) -> Result<(), CommandError> {
    let path = match destination {
        Destination::File(path) | Destination::Tar(Some(path)) => path,
        Destination::Layout(layout) => &layout.path,
        _ => return Ok(()),
    };
    // A layout may have no directory yet.
    let above = std::path::absolute(path)
        .ok()
        .and_then(|path| path.ancestors().find_map(|above| above.canonicalize().ok()));
    match (above, upper.canonicalize()) {
        (Some(above), Ok(upper)) if upper.is_dir() && above.starts_with(&upper) => Err(
            CommandError::usage(format!("{} is in the upper", path.display()))
                .hint("name a place outside of the upper"),
        ),
        _ => Ok(()),
    }
}

/// A commit of an upper, with its open image.
struct OpenCommit<'a> {
    asked: &'a UpperCommit<'a>,
    image: &'a OpenImage,
    work: &'a Work<'a>,
}

impl OpenCommit<'_> {
    /// The changes as a layer in overlayfs's form.
    fn layer(&self, changes: Changes) -> Result<Spliced, CommandError> {
        let tree = changes.layer.into_overlay().joined(self.asked.upper)?;
        changes.store.filesystem(&tree).joined(self.asked.upper)
    }

    fn archive(&self, changes: Changes, output: Output<'_>) -> Result<TarReport, CommandError> {
        let layer = self.layer(changes)?;
        let (tree, jobs) = (&layer.filesystem, self.asked.encoding.jobs);
        to_archive(self.image, tree, TarForm::Layer, output, jobs, self.work)
    }

    fn layout(&self, changes: Changes, layout: &LayoutPlace) -> Result<CommitOutput, CommandError> {
        self.image.refuse_as_destination(layout)?;
        let layer = self.layer(changes)?;
        let metadata = self.image.metadata()?;
        let whole = self.image.tree()?;
        let below = layers_of_stack(self.image, &metadata)?;
        let layers = match &below[..] {
            [] => {
                let lowest = match self.image.form()? {
                    TreeForm::Whole => TarForm::Flattened,
                    TreeForm::Layer => TarForm::Layer,
                };
                Layers::new(lowest, [whole.filesystem(), &layer.filesystem])
            }
            below => {
                let mut known = KnownLayer::of_stack(&metadata);
                known.resize(below.len(), None);
                let mut layers: Vec<_> = below.iter().zip(known).collect();
                layers.push((&layer.filesystem, None));
                Layers {
                    lowest: TarForm::Layer,
                    layers,
                }
            }
        };
        let config = config_after(metadata.get("config"), below.len().max(1))?;
        // The annotations of the base do not describe the new image.
        let destination = LayoutExport {
            annotations: Annotations::new(),
            place: layout.clone(),
            compression: self.asked.layer_compression,
        };
        let options = export_options(self.asked.encoding.jobs, self.work);
        let progress = self.work.progress;
        let report = export_layout(&layers, config.as_ref(), &destination, &options, progress)
            .map_err(|error| export_failure(self.image, &error))?;
        Ok(CommitOutput::Layout(layout.without_reference(), report))
    }

    fn file(&self, changes: Changes, path: &Path) -> Result<Report, CommandError> {
        let content = self.asked.content;
        let is_image = self.image.image().header().purpose == Use::Image;
        if !is_image && content != NewContent::Whole {
            return Err(
                CommandError::new(format!("cannot write {}", path.display()))
                    .caused_by_text(format!(
                        "{} is a disk, which cannot be below an image",
                        self.asked.image.display()
                    ))
                    .hint("store everything in it (--flatten), or write the changes to tar:FILE"),
            );
        }
        self.image.refuse_own_file(path)?;
        let _replaced = replace::check(path, Replacement::Image, Force::NoOption)?;
        let store = changes.store.clone();
        let tree = match content {
            NewContent::Layer => changes.layer.into_overlay().joined(self.asked.upper)?,
            NewContent::Merged | NewContent::Whole => self.merged(changes)?,
        };
        let spliced = store.filesystem(&tree).joined(self.asked.upper)?;
        let base = match content {
            NewContent::Whole => Vec::new(),
            NewContent::Layer | NewContent::Merged => self.bases(),
        };
        let commit = Commit {
            tree,
            device: &*spliced.device,
            base,
            described: self.described(content)?,
        };
        let options = self.asked.encoding.convert_options(self.work)?;
        let report = bcow_oci::commit::commit(commit, path, &options, self.work.progress)?;
        if report.base_bytes > 0 {
            self.warn_of_images_elsewhere(path);
        }
        Ok(report)
    }

    /// Warns of each image below that bcow will not find from the directory of `path`.
    fn warn_of_images_elsewhere(&self, path: &Path) {
        let own = directory_of(path);
        let is_beside = |image: &OpenImage| {
            file_name(image).is_some() && directory_of(&image.opened().path) == own
        };
        let parts = self.image.parts().iter().map(|part| &part.image);
        let images = std::iter::once(self.image)
            .filter(|image| image.parts().is_empty())
            .chain(parts);
        for image in images.filter(|image| is_referable(image) && !is_beside(image)) {
            let remedy = match image.opened().is_stack() {
                _ if image.remote().is_some() => {
                    "copy it there with `bcow copy`, or name the place of a copy with --store"
                }
                true => "name its layout with --store",
                false => "put it there, or name its place with --store",
            };
            self.work.messages.warning(&format_args!(
                "{} needs {}, which is not in the same directory: {remedy} wherever {0} is used",
                path.display(),
                image.path().display()
            ));
        }
    }

    fn merged(&self, changes: Changes) -> Result<ErofsTree, CommandError> {
        let lower = self.image.tree()?.into_filesystem();
        let options = ReadOptions {
            form: self.image.form()?,
            place: &|offset, _| u32::try_from((LOWER_START + offset) / 4096).ok(),
            tails: LOWER_START,
            max_inodes: Limits::default().max_entries,
        };
        let below = read_layer(&lower, &options).joined(self.asked.upper)?;
        merge(vec![below, changes.layer]).joined(self.asked.upper)
    }

    /// The images below, each with its start in the address space below the changes. An image to
    /// which no file can refer is left out: the new file gets a copy of the content that it needs
    /// from that image.
    fn bases(&self) -> Vec<Base<'_>> {
        let all = match self.image.parts() {
            [] => vec![(0, self.image)],
            parts => parts.iter().map(|part| (part.start, &part.image)).collect(),
        };
        let referable = all.into_iter().filter(|(_, image)| is_referable(image));
        referable.map(|(start, image)| base(start, image)).collect()
    }

    fn described(&self, content: NewContent) -> Result<Map<String, Value>, CommandError> {
        let mut all = Map::new();
        if let Some(created) = source_date_epoch()?.and_then(bcow_oci::rfc3339) {
            all.insert("created".into(), json!(created));
        }
        let of = json!({ "over": hex(&self.image.identity()) });
        match content {
            NewContent::Layer => {
                all.insert("layer".into(), of);
            }
            NewContent::Merged | NewContent::Whole => {
                all.insert("commit".into(), of);
                let metadata = self.image.metadata()?;
                if let Some(config) = metadata.get("config") {
                    all.insert("config".into(), config.clone());
                }
            }
        }
        Ok(all)
    }
}

/// Whether a file can refer to the image on its own. It cannot refer to a single layer of an image
/// on another machine.
fn is_referable(image: &OpenImage) -> bool {
    image.remote().is_some() || !image.name().is_remote()
}

/// An image that begins at byte `start` of the address space below the changes.
fn base(start: u64, image: &OpenImage) -> Base<'_> {
    Base {
        start,
        image: image.image().clone(),
        digest: Box::new(|| digest(image)),
        name: file_name(image),
    }
}

/// The file name by which other files name the image; `None` in a layout, where the digest names
/// it.
fn file_name(image: &OpenImage) -> Option<String> {
    let path = image.name().path()?.canonicalize().ok()?;
    let name = path.file_name()?.to_str()?;
    is_plain_name(name).then(|| name.to_owned())
}

/// The digest of the file of the image: known in a layout or a registry, else computed.
fn digest(image: &OpenImage) -> std::io::Result<[u8; 32]> {
    if let Some(remote) = image.remote() {
        // A manifest may have another algorithm.
        if let Some(known) = remote.digest.as_ref().and_then(Digest::sha256) {
            return Ok(known);
        }
        return sha256(&Digest::of_storage(&*remote.storage, Algorithm::Sha256)?);
    }
    let local = image.name().local();
    let located = local.and_then(|image| store::locate(&image).ok());
    let known = located.and_then(|located| located.digest?.sha256());
    match known {
        Some(digest) => Ok(digest),
        None => {
            let file = File::open(&image.opened().path)?;
            sha256(&Digest::of_storage(&file, Algorithm::Sha256)?)
        }
    }
}

fn sha256(digest: &Digest) -> std::io::Result<[u8; 32]> {
    let invalid = || std::io::Error::other(format!("{digest} is no SHA-256 digest"));
    digest.sha256().ok_or_else(invalid)
}

/// The configuration of the image with one layer more, on `below` layers.
fn config_after(config: Option<&Value>, below: usize) -> Result<Option<Value>, CommandError> {
    let Some(Value::Object(config)) = config else {
        return Ok(config.cloned());
    };
    let mut config = config.clone();
    let created = match source_date_epoch()? {
        Some(seconds) => Some(seconds),
        None => std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .ok()
            .and_then(|since| i64::try_from(since.as_secs()).ok()),
    };
    let created = created.and_then(bcow_oci::rfc3339).map(Value::from);
    let is_layer = |entry: &&Value| entry.get("empty_layer") != Some(&json!(true));
    let mut history = match config.get("history").and_then(Value::as_array) {
        Some(history) if history.iter().filter(is_layer).count() == below => history.clone(),
        _ => {
            vec![json!({"comment": "a layer of the image below"}); below]
        }
    };
    let mut entry = json!({"created_by": "bcow commit"});
    if let Some(created) = created {
        entry["created"] = created.clone();
        config.insert("created".into(), created);
    }
    history.push(entry);
    config.insert("history".into(), history.into());
    Ok(Some(Value::Object(config)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_says_who_made_the_last_layer() {
        let history = json!([{"created_by": "one"}, {"created_by": "x", "empty_layer": true}]);
        let config = json!({"os": "linux", "history": history});
        let after = config_after(Some(&config), 1).unwrap().unwrap();
        let history = after["history"].as_array().unwrap();
        assert_eq!(history.len(), 3);
        assert_eq!(history[0]["created_by"], "one");
        assert_eq!(history[2]["created_by"], "bcow commit");
        let after = config_after(Some(&config), 3).unwrap().unwrap();
        assert_eq!(after["history"].as_array().unwrap().len(), 4);
        assert_eq!(config_after(None, 1).unwrap(), None);
    }
}
