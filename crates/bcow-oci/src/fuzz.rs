//! Tar ingestion for a fuzzer: bytes in memory, no disk, no threads.

use std::collections::HashMap;
use std::io::Read;
use std::path::Path;

use bcow_erofs::merge::merge;
use bcow_erofs::writer::{Plan, WriteOptions};

use crate::builder::{Budget, LayerBuilder};
use crate::cancel::Cancel;
use crate::content::{ContentSink, ContentWriter};
use crate::error::ConvertError;
use crate::hidden::UpperLayers;
use crate::ingest::{LayerIngest, Rescue};
use crate::layer::{Format, Reading};
use crate::options::Limits;
use crate::stream::{ChunkStream, MemorySource};
use crate::tails::TailStore;
use crate::tar::TarReader;
use crate::warnings::Warnings;

/// Limit on decompressed bytes.
const MAX_BYTES: u64 = 4 << 20;

/// Reads `bytes`, plain or compressed, as the tar archives of two layers, merges them and lays out
/// the tree. Header checksums are not checked. The length of `bytes` selects the chunk size of the
/// stream. The last byte selects the number of blocks after which the first layer ends; in complete
/// archives it is 0, which gives one layer over an empty one. Errors are expected; only a panic or
/// a hang is a finding.
pub fn fuzz_ingest(bytes: &[u8]) {
    let mut tar = Vec::new();
    // The bytes that were decompressed before the damage are read.
    let _ = match Format::of(bytes) {
        Format::Gzip => flate2::read::MultiGzDecoder::new(bytes)
            .take(MAX_BYTES)
            .read_to_end(&mut tar),
        Format::Zstd => match zstd::stream::read::Decoder::new(bytes) {
            Ok(decoder) => decoder.take(MAX_BYTES).read_to_end(&mut tar),
            Err(error) => Err(error),
        },
        _ => Read::take(bytes, MAX_BYTES).read_to_end(&mut tar),
    };
    // Single bytes of a long archive would take a second, and find nothing more.
    let chunk_bytes = (1 + bytes.len() % 97 * 37).max(tar.len() >> 12);
    let boundary = usize::from(tar.last().copied().unwrap_or(0)) * 512;
    let (upper, lower) = tar.split_at(match boundary {
        0 => tar.len(),
        boundary => boundary.min(tar.len()),
    });
    // A real image stays far below these limits.
    let mut budget = Budget {
        entries: 0,
        max_entries: 10_000,
        name_bytes: 0,
    };
    let tails = TailStore::new(Path::new("/nonexistent"));
    let mut content = ContentWriter::new(Nowhere { position: 4096 }, tails, 300, 1 << 40);
    let mut uppers = UpperLayers::default();
    for layer in [upper, lower] {
        let read = ingest(layer, chunk_bytes, &mut budget, &mut content, &mut uppers);
        if read.is_err() {
            return;
        }
    }
    let mut layers = uppers.into_layers();
    layers.reverse();
    let Ok(tree) = merge(layers) else { return };
    let (sink, tails) = content.into_parts();
    let options = WriteOptions {
        metadata_start: sink.position.next_multiple_of(4096),
        inline_max: 300,
    };
    let Ok(plan) = Plan::new(&tree, &options) else {
        return;
    };
    if plan.metadata_bytes() > 64 << 20 {
        return; // a sparse file's chunks: long, and always the same
    }
    let mut written = 0;
    let result = plan.write(
        &tails,
        &mut |bytes| -> Result<(), std::convert::Infallible> {
            written += bytes.len() as u64;
            Ok(())
        },
    );
    if result.is_ok() {
        assert_eq!(written, plan.metadata_bytes());
    }
}

fn ingest(
    layer: &[u8],
    chunk_bytes: usize,
    budget: &mut Budget,
    content: &mut ContentWriter<Nowhere>,
    uppers: &mut UpperLayers,
) -> Result<(), ConvertError> {
    let stream = ChunkStream::new(Box::new(MemorySource::new(layer, chunk_bytes)));
    let mut tar = TarReader::new(stream).without_checksums();
    let read = LayerIngest {
        name: "layer",
        reading: &Reading::new(&Limits::default(), &(), Cancel::default()),
        recognise: true,
        content,
        uppers,
        builder: LayerBuilder::new(budget),
        warnings: &mut Warnings::default(),
        hidden_bytes: &mut 0,
        dropped: HashMap::new(),
        rescue: Rescue::default(),
    }
    .run(&mut tar)?;
    if read.rescue.is_empty() {
        uppers.push(read.tree);
    }
    Ok(())
}

/// Counts content and discards it.
struct Nowhere {
    position: u64,
}

impl ContentSink for Nowhere {
    fn position(&self) -> u64 {
        self.position
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), ConvertError> {
        self.append_zeros(bytes.len() as u64)
    }

    fn append_zeros(&mut self, count: u64) -> Result<(), ConvertError> {
        self.position += count;
        Ok(())
    }
}
