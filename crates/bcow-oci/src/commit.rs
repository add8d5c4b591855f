//! Writes changes over an image as a new image: a layer that refers to the images below, or a
//! complete image.
//!
//! The input is a tree whose contents are addresses of a device. From byte [`BASE_FROM`] on, that
//! device is the address space of the images below. Content there is either referenced through a
//! window and not stored, so that a changed block of a file costs one stored block; or it is
//! copied, and the new image does not need the images below.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use bcow::{BlockDevice, Error, Image, ImageWriter};
use bcow_erofs::tree::{Blocks, ChunkRun, Content, Tree};
use bcow_erofs::writer::MAX_INLINE;
use serde_json::{Map, Value, json};

use crate::blob;
use crate::cancel::Cancel;
use crate::content::ContentWriter;
use crate::digest::Digest;
use crate::ending::Ending;
use crate::error::{ConvertError, TarPlace, Unplaced};
use crate::image_file::{ImageSink, ImagesByDigest, image_error, read_back, writer_options};
use crate::metadata::{Metadata, options_json, tool};
use crate::null::some_fields;
use crate::options::{ConvertOptions, Progress, Report};
use crate::output::Output;
use crate::run_data::RunData;
use crate::space::{BLOCK_BYTES, FIRST_LOWER_BLOCK, PIECE_BYTES, Shown, inline_max};
use crate::tails::TailStore;
use crate::tar::{Run, SparseMap};

/// The byte where the address space of the images below begins in a device of changes.
pub const BASE_FROM: u64 = (FIRST_LOWER_BLOCK as u64) * BLOCK_BYTES;

/// An image below.
pub struct Base<'b> {
    /// The byte where this image begins in the address space below.
    pub start: u64,
    /// The image's address space.
    pub image: Arc<Image>,
    /// Returns the SHA-256 digest of the image's file. Called only if content of the image is
    /// referenced.
    pub digest: Box<dyn Fn() -> io::Result<[u8; 32]> + 'b>,
    /// The file name under which the image is looked up in the directory of the new image.
    pub name: Option<String>,
}

impl Base<'_> {
    /// The entry of this image in the JSON section.
    fn described(&self, digest: &[u8; 32]) -> Value {
        let header = self.image.header();
        let root = header.merkle.as_ref().map(|tree| tree.root);
        let root = root.map(|root| json!(Digest::from_sha256(root)));
        some_fields([
            ("digest", Some(json!(Digest::from_sha256(*digest)))),
            ("file_bytes", Some(json!(header.file_bytes))),
            ("merkle_root", root),
            ("name", self.name.as_ref().map(|name| json!(name))),
        ])
        .into()
    }

    /// Whether `bytes` bytes at byte `at` of the address space below lie in this image.
    fn contains(&self, at: u64, bytes: u64) -> bool {
        at.checked_sub(self.start)
            .and_then(|at| at.checked_add(bytes))
            .is_some_and(|end| end <= self.image.size())
    }
}

/// The input of a commit.
pub struct Commit<'c> {
    /// The tree.
    pub tree: Tree,
    /// The device that the contents of the tree refer to.
    pub device: &'c dyn BlockDevice,
    /// The images whose content is referenced and not stored; if empty, all content is stored. The
    /// images do not overlap.
    pub base: Vec<Base<'c>>,
    /// Fields to add to the JSON section.
    pub described: Map<String, Value>,
}

/// Writes an image of changes to `destination`. The destination is created or replaced atomically,
/// or stays as it was.
pub fn commit(
    commit: Commit<'_>,
    destination: &Path,
    options: &ConvertOptions,
    progress: &dyn Progress,
) -> Result<Report, ConvertError> {
    if options.plain && !commit.base.is_empty() {
        return Err(ConvertError::Options(
            "a plain image cannot refer to content of the image below".to_owned(),
        ));
    }
    let output = Output::create(destination)?;
    let failed = |error| image_error(destination, error);
    let writer = ImageWriter::create(
        output.file()?,
        writer_options(options, options.threads.max(1))?,
    )
    .map_err(failed)?;
    let inline_max = inline_max(options.plain);
    let sink = ImageSink::new(writer, destination);
    let tails = TailStore::new(output.directory());
    let never = AtomicBool::new(false);
    let mut store = ContentStore {
        content: ContentWriter::new(sink, tails, inline_max, options.limits.max_bytes),
        device: commit.device,
        referenced_bytes: vec![0; commit.base.len()],
        base: commit.base,
        cancel: Cancel::new(options.cancel.as_deref()).or(&never),
        progress,
    };
    let mut tree = commit.tree;
    let prefetch = options.prefetch.as_ref();
    // What a start reads is together, before all others.
    let first = prefetch.map_or(Vec::new(), |prefetch| prefetch.files(&tree));
    tree.replace_contents(&first, &mut |content| store.store(content))?;
    let stats = store.content.stats();
    let (sink, tails) = store.content.into_parts();
    let mut metadata = Metadata::new(&tool(options), options_json(options), commit.described);
    let base = store.base.into_iter().zip(&store.referenced_bytes);
    let base = base
        .filter(|(_, bytes)| **bytes > 0)
        .map(|(base, _)| {
            let digest = (base.digest)().map_err(|error| {
                blob::read_error("take the digest of", "the image below", error)
            })?;
            Ok((base, digest))
        })
        .collect::<Result<Vec<_>, ConvertError>>()?;
    if base
        .iter()
        .any(|(base, _)| base.start >= BASE_FROM || base.image.size() >= BASE_FROM)
    {
        let why = "the image below is larger than 8 TiB".to_owned();
        return Err(ConvertError::Options(why));
    }
    if !base.is_empty() {
        let described = base.iter().map(|(base, digest)| base.described(digest));
        metadata.backings(described.collect());
    }
    let shown = base.iter().map(|(base, digest)| Shown {
        first_block: (BASE_FROM + base.start) / BLOCK_BYTES,
        bytes: base.image.size(),
        digest: *digest,
        size: base.image.size(),
    });
    let ending = Ending {
        tree: &tree,
        tails: &tails,
        shown: &shown.collect::<Vec<_>>(),
        as_devices: false,
        // Tails that remain in the images below have the length that they have there.
        inline_max: if base.is_empty() { inline_max } else { MAX_INLINE },
        stats,
        prefetch,
        path: destination,
    };
    let written = ending.write(sink.into_writer(), metadata)?;
    if options.verify {
        progress.phase("verify");
        let below = base
            .iter()
            .map(|(base, digest)| (*digest, base.image.clone()));
        let below = ImagesByDigest(below.collect());
        read_back(&written, output.file()?, &below, options.threads)?;
    }
    store.cancel.check()?;
    progress.phase("syncing");
    let report = Report {
        entries: tree.len() as u64,
        content_bytes: stats.content_bytes,
        deduplicated_bytes: stats.deduplicated_bytes,
        base_bytes: store.referenced_bytes.iter().sum(),
        verified: options.verify,
        ..Report::of(&written)
    };
    output.publish()?;
    Ok(report)
}

/// Stores contents in the image.
struct ContentStore<'s> {
    content: ContentWriter<ImageSink>,
    device: &'s dyn BlockDevice,
    /// The images whose content may be referenced, and the number of referenced bytes of each.
    base: Vec<Base<'s>>,
    referenced_bytes: Vec<u64>,
    cancel: Cancel<'s>,
    progress: &'s dyn Progress,
}

/// A run of a file's blocks on the device.
#[derive(Debug, Clone, Copy)]
struct DeviceRun {
    /// First byte in the file, and number of bytes. The last run may end within a block.
    offset: u64,
    length: u64,
    /// First byte on the device.
    at: u64,
}

impl ContentStore<'_> {
    /// Stores a file's content, or the part of it that cannot be referenced.
    fn store(&mut self, content: &Content) -> Result<Content, ConvertError> {
        self.cancel.check()?;
        let failed = |error: Unplaced| error.at(TarPlace::layer("the changes"));
        let runs = runs(content);
        let mut referenced = 0;
        for run in &runs {
            if let Some(base) = self.base_of(run) {
                self.referenced_bytes[base] += run.length;
                referenced += 1;
            }
        }
        if referenced == 0 {
            return self.copy(content, &runs).map_err(failed);
        }
        if referenced == runs.len() {
            return self.reference(content).map_err(failed);
        }
        self.store_in_part(content, &runs).map_err(failed)
    }

    /// The image that has the run, if its content may be referenced.
    fn base_of(&self, run: &DeviceRun) -> Option<usize> {
        let at = run.at.checked_sub(BASE_FROM)?;
        let bytes = run.length.next_multiple_of(BLOCK_BYTES);
        self.base.iter().position(|base| base.contains(at, bytes))
    }

    /// Stores all of the content.
    fn copy(&mut self, content: &Content, runs: &[DeviceRun]) -> Result<Content, Unplaced> {
        let mut pieces: Vec<DeviceRun> = runs.to_vec();
        if let Some(tail) = content.tail {
            let length = u64::from(tail.length);
            pieces.push(DeviceRun {
                offset: content.size - length,
                length,
                at: tail.offset,
            });
        }
        let device = self.device;
        let read = |at: u64, bytes: &mut [u8]| device.read_at(at, bytes).map_err(read_error);
        let places = pieces.iter().map(|run| (run.at, run.length));
        let mut data = RunData::new(&read, self.progress, places);
        let stored: u64 = pieces.iter().map(|run| run.length).sum();
        if stored == content.size {
            return self.content.file(content.size, &mut data);
        }
        let runs = pieces.iter().map(|run| Run {
            offset: run.offset,
            length: run.length,
        });
        let map = SparseMap {
            size: content.size,
            runs: runs.collect(),
        };
        self.content.sparse(&map, &mut data)
    }

    /// References all of the content; only an inline tail is stored.
    fn reference(&mut self, content: &Content) -> Result<Content, Unplaced> {
        let mut referenced = content.clone();
        if let Some(tail) = content.tail {
            let mut bytes = vec![0; tail.length.into()];
            self.device
                .read_at(tail.offset, &mut bytes)
                .map_err(read_error)?;
            referenced.tail = Some(self.content.tail(&bytes)?);
        }
        Ok(referenced)
    }

    /// Stores some chunks and references the others.
    fn store_in_part(
        &mut self,
        content: &Content,
        runs: &[DeviceRun],
    ) -> Result<Content, Unplaced> {
        let Blocks::Chunked { chunk_shift, .. } = content.blocks else {
            return self.copy(content, runs);
        };
        let chunk = BLOCK_BYTES << chunk_shift;
        let mut chunks: Vec<ChunkRun> = Vec::new();
        let mut push = |run: ChunkRun| match chunks.last_mut() {
            Some(last)
                if last.first + last.count == run.first
                    && u64::from(last.start) + (last.count << chunk_shift)
                        == u64::from(run.start) =>
            {
                last.count += run.count;
            }
            _ => chunks.push(run),
        };
        let device = self.device;
        let read = |at: u64, bytes: &mut [u8]| device.read_at(at, bytes).map_err(read_error);
        for run in runs {
            let first = run.offset / chunk;
            if self.base_of(run).is_some() {
                push(ChunkRun {
                    first,
                    count: run.length.div_ceil(chunk),
                    start: (run.at / BLOCK_BYTES) as u32,
                });
                continue;
            }
            let place = std::iter::once((run.at, run.length));
            let mut data = RunData::new(&read, self.progress, place);
            let mut done = 0;
            while done < run.length {
                // A chunk is contiguous.
                let length = (run.length - done).min(chunk.max(PIECE_BYTES as u64));
                let start = self.content.run(length, &mut data)?;
                push(ChunkRun {
                    first: first + done / chunk,
                    count: length.div_ceil(chunk),
                    start,
                });
                done += length;
            }
        }
        Ok(Content {
            size: content.size,
            blocks: Blocks::Chunked {
                chunk_shift,
                runs: chunks.into(),
            },
            tail: None,
        })
    }
}

/// The runs of a file's blocks on the device.
fn runs(content: &Content) -> Vec<DeviceRun> {
    let tail = content.tail.map_or(0, |tail| u64::from(tail.length));
    let in_blocks = content.size - tail;
    let device = |block: u32| u64::from(block) * BLOCK_BYTES;
    match &content.blocks {
        Blocks::Flat { start } if in_blocks > 0 => vec![DeviceRun {
            offset: 0,
            length: in_blocks,
            at: device(*start),
        }],
        Blocks::Flat { .. } | Blocks::Dropped => Vec::new(),
        Blocks::Chunked { chunk_shift, runs } => {
            let chunk = BLOCK_BYTES << chunk_shift;
            let bytes = |run: &ChunkRun| {
                let offset = run.first * chunk;
                DeviceRun {
                    offset,
                    length: (run.count * chunk).min(content.size.saturating_sub(offset)),
                    at: device(run.start),
                }
            };
            let runs = runs.iter().map(bytes).filter(|run| run.length > 0);
            runs.collect()
        }
    }
}

fn read_error(error: Error) -> ConvertError {
    ConvertError::read_through("a file's content", error)
}
