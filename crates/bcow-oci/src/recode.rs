//! Rewrites an image in BCoW form: with another block size or compression, plain, or without files
//! below it.
//!
//! An image that holds all its content keeps its address space; only the storage of its blocks
//! changes. A conversion to another form and back gives the same file. An image that refers to
//! other files (a stack, or a commit over an image) is written anew from its tree: its address
//! space also shows content of those files that no file in the tree uses. So is an image whose
//! content is placed by a trace of what a start reads.

use std::path::Path;
use std::sync::Arc;

use bcow::format::incompatible;
use bcow::{BlockDevice, Content, Image, ImageWriter, WriterOptions, Written};
use bcow_erofs::overlay::{ReadOptions, TreeForm, read_layer};
use bcow_erofs::reader::Filesystem;
use serde_json::{Map, Value, json};

use crate::cancel::Cancel;
use crate::commit::{Commit, commit};
use crate::error::ConvertError;
use crate::image_file::{ImagesByDigest, image_error, read_back, writer_options};
use crate::metadata::{options_json, tool};
use crate::null::some_fields;
use crate::options::{ConvertOptions, LayerReport, Progress, Report};
use crate::output::Output;
use crate::space::{BLOCK_BYTES, REGION_BYTES};

/// Bytes per read.
const READ_BYTES: u64 = 1 << 20;
/// The first bytes of the first block belong to the header slots of a file; the superblock follows.
const SUPERBLOCK_FROM: u64 = 1024;

/// Rewrites `image`, whose file system has the form `form`, to `destination`. The destination is
/// created or replaced atomically, or stays as it was. `name` is the image's name in messages.
pub fn recode(
    image: &Arc<Image>,
    form: TreeForm,
    name: &str,
    destination: &Path,
    options: &ConvertOptions,
    progress: &dyn Progress,
) -> Result<Report, ConvertError> {
    let unreadable = |error: bcow::Error| ConvertError::read_through(name, error);
    let metadata = match image.metadata().map_err(unreadable)? {
        Value::Object(metadata) => metadata,
        _ => Map::new(),
    };
    let features = image.header().features;
    let shows_others = features.has_incompatible(incompatible::WINDOWS)
        || features.has_incompatible(incompatible::BACKING);
    let recoding = Recoding {
        image,
        form,
        name,
        destination,
        options,
        progress,
        metadata,
    };
    if shows_others || options.prefetch.is_some() {
        recoding.tree()
    } else {
        recoding.blocks()
    }
}

struct Recoding<'r> {
    image: &'r Arc<Image>,
    form: TreeForm,
    name: &'r str,
    destination: &'r Path,
    options: &'r ConvertOptions,
    progress: &'r dyn Progress,
    /// The image's JSON section.
    metadata: Map<String, Value>,
}

impl Recoding<'_> {
    /// Stores the same address space in another way.
    fn blocks(self) -> Result<Report, ConvertError> {
        let output = Output::create(self.destination)?;
        let metadata_start = self.metadata_start();
        let mut options = writer_options(self.options, self.options.threads.max(1))?;
        // A change of the block size happens at the start of a region.
        let change_at = match options.block_bytes {
            None if !options.plain => metadata_start - metadata_start % REGION_BYTES,
            _ => metadata_start,
        };
        options.metadata_first = change_at < BLOCK_BYTES;
        let written = self.copy(&output, options, change_at)?;
        if self.options.verify {
            self.progress.phase("verify");
            let below = ImagesByDigest::default();
            read_back(&written, output.file()?, &below, self.options.threads)?;
        }
        self.cancel().check()?;
        self.progress.phase("syncing");
        let content = self.metadata.get("content");
        let recorded = |key: &str| content.and_then(|content| content[key].as_u64());
        let report = Report {
            entries: recorded("entries").unwrap_or(0),
            content_bytes: recorded("file_bytes").unwrap_or(0),
            deduplicated_bytes: recorded("deduplicated_bytes").unwrap_or(0),
            layers: self.layers(),
            verified: self.options.verify,
            ..Report::of(&written)
        };
        output.publish()?;
        Ok(report)
    }

    /// The byte where the file system's metadata begins, or the end if the image does not record
    /// it.
    fn metadata_start(&self) -> u64 {
        let size = self.image.size();
        self.metadata
            .get("content")
            .and_then(|content| content["metadata_start"].as_u64())
            .filter(|&start| start.is_multiple_of(BLOCK_BYTES) && start < size)
            .unwrap_or(size)
    }

    fn copy(
        &self,
        output: &Output,
        options: WriterOptions,
        change_at: u64,
    ) -> Result<Written, ConvertError> {
        let image = self.image;
        self.progress.phase("writing");
        self.progress.total(Some(image.size()));
        let mut superblock = vec![0; (BLOCK_BYTES - SUPERBLOCK_FROM) as usize];
        image
            .read_at(SUPERBLOCK_FROM, &mut superblock)
            .map_err(|error| self.unreadable(error))?;
        let begins = options.metadata_first;
        let failed = |error| self.failed(error);
        let mut writer = ImageWriter::create(output.file()?, options).map_err(failed)?;
        if !begins {
            self.range(&mut writer, change_at)?;
            writer.begin_metadata().map_err(failed)?;
        }
        self.range(&mut writer, image.size())?;
        writer
            .finish(&superblock, &Value::Object(self.described()))
            .map_err(failed)
    }

    /// Copies the image's blocks up to byte `end`.
    fn range(&self, writer: &mut ImageWriter, end: u64) -> Result<(), ConvertError> {
        let unreadable = |error| self.unreadable(error);
        let failed = |error| self.failed(error);
        let mut buffer = Vec::new();
        while writer.position() < end {
            self.cancel().check()?;
            let at = writer.position();
            let status = self.image.status(at, end - at).map_err(unreadable)?;
            let there = status.length.min(end - at);
            let length = match status.content {
                Content::Zero | Content::Hole => {
                    writer.append_zeros(there).map_err(failed)?;
                    there
                }
                Content::Data => {
                    let length = there.min(READ_BYTES);
                    buffer.resize(length as usize, 0);
                    self.image.read_at(at, &mut buffer).map_err(unreadable)?;
                    writer.append(&buffer).map_err(failed)?;
                    length
                }
            };
            self.progress.advance(length);
        }
        Ok(())
    }

    /// Writes the tree anew, with all its content.
    fn tree(self) -> Result<Report, ConvertError> {
        let filesystem = Filesystem::open(self.image.clone())
            .map_err(|error| ConvertError::layout(self.name, error))?;
        let read = ReadOptions {
            form: self.form,
            place: &|offset, _| u32::try_from(offset / BLOCK_BYTES).ok(),
            tails: 0,
            max_inodes: self.options.limits.max_entries,
        };
        let tree = read_layer(&filesystem, &read)
            .map_err(|error| ConvertError::layout(self.name, error))?;
        let tree = match self.form {
            TreeForm::Layer => tree.into_overlay(),
            TreeForm::Whole => tree.into_tree(),
        };
        let tree = tree.map_err(|problem| ConvertError::layout(self.name, problem))?;
        self.progress.phase("writing");
        let mut described = self.described();
        // The places change; a new list is made of the options.
        described.shift_remove("prefetch");
        let changes = Commit {
            tree,
            device: &**self.image,
            base: Vec::new(),
            described,
        };
        let written = commit(changes, self.destination, self.options, self.progress)?;
        Ok(Report {
            layers: self.layers(),
            ..written
        })
    }

    /// The JSON section of the new image: its original source, and the new storage options.
    fn described(&self) -> Map<String, Value> {
        let mut all = self.metadata.clone();
        // These fields describe the files below the image, which the new image does not need.
        all.shift_remove("backings");
        all.shift_remove("commit");
        if let Some(Value::Array(layers)) = all.get_mut("layers") {
            layers.iter_mut().for_each(flatten_layer);
        }
        all.insert("tool".into(), json!(tool(self.options)));
        all.insert("options".into(), options_json(self.options));
        all.shift_remove("created");
        if let Some(created) = self.options.source_date_epoch.and_then(crate::rfc3339) {
            all.insert("created".into(), json!(created));
        }
        all
    }

    fn layers(&self) -> Vec<LayerReport> {
        let described = self.described();
        let layers = described.get("layers").and_then(Value::as_array);
        let layer = |layer: &Value| LayerReport {
            digest: layer["digest"].as_str().and_then(|text| text.parse().ok()),
            diff_id: layer["diff_id"]
                .as_str()
                .and_then(|text| text.parse().ok())
                .map(crate::DiffId),
            media_type: layer["media_type"].as_str().map(str::to_owned),
            stored_bytes: layer["stored_bytes"].as_u64().unwrap_or(0),
            bytes: layer["tar_bytes"].as_u64().unwrap_or(0),
            entries: 0,
        };
        layers.into_iter().flatten().map(layer).collect()
    }

    fn unreadable(&self, error: bcow::Error) -> ConvertError {
        ConvertError::read_through(self.name, error)
    }

    fn failed(&self, error: bcow::Error) -> ConvertError {
        image_error(self.destination, error)
    }

    fn cancel(&self) -> Cancel<'_> {
        Cancel::new(self.options.cancel.as_deref())
    }
}

/// Converts a stack's layer entry into that of an image that holds all its content (spec section
/// 13).
fn flatten_layer(layer: &mut Value) {
    let Some(Value::Object(source)) = layer.get("source") else {
        return;
    };
    *layer = some_fields([
        ("diff_id", layer.get("diff_id").cloned()),
        ("tar_bytes", source.get("tar_bytes").cloned()),
    ])
    .into();
}
