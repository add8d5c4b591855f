//! The layers of a stack, and what each adds and hides.

use std::collections::HashMap;
use std::iter::Sum;

use bcow_erofs::account::{LayerAccount, account};
use bcow_erofs::reader::Filesystem;
use bcow_oci::store::{Opened, StackLayer};
use serde::Serialize;
use serde_json::Value;

use super::StorageFacts;
use crate::error::{CommandError, Context};

/// The layers of a stack.
#[derive(Serialize)]
pub struct StackFacts {
    /// The lowest first.
    pub layers: Vec<LayerFacts>,
    /// The number of different files.
    pub files: u64,
    /// Bytes of the layers' files, each file once.
    pub layers_bytes: u64,
    pub stack_bytes: u64,
    pub source_bytes: u64,
    pub shared_bytes: u64,
    pub saved_bytes_estimate: u64,
}

/// A layer of a stack.
#[derive(Serialize)]
pub struct LayerFacts {
    pub digest: String,
    #[serde(skip)]
    pub short: String,
    pub diff_id: Value,
    /// `None` if the layer is missing.
    pub path: Option<String>,
    pub file_bytes: u64,
    /// As the next ones: known if no layer is missing.
    pub adds: Option<NamedBytes>,
    pub hides: Option<NamedBytes>,
    pub hidden: Option<NamedBytes>,
    pub whiteouts: Option<u64>,
    /// Bytes of file content that the layer shares with lower layers instead of storing them.
    pub shared_bytes: u64,
    /// The estimated size of that content in the file, by the compression of the layers.
    pub saved_bytes_estimate: u64,
    /// The source of the layer, in the metadata of the stack.
    pub source: Value,
}

/// Names in a tree, and the bytes of their files.
#[derive(Clone, Copy, Serialize)]
pub struct NamedBytes {
    pub entries: u64,
    pub bytes: u64,
}

impl Sum for NamedBytes {
    fn sum<I: Iterator<Item = NamedBytes>>(amounts: I) -> NamedBytes {
        let (entries, bytes) = (0, 0);
        amounts.fold(NamedBytes { entries, bytes }, |sum, one| NamedBytes {
            entries: sum.entries.saturating_add(one.entries),
            bytes: sum.bytes.saturating_add(one.bytes),
        })
    }
}

fn sum(numbers: impl Iterator<Item = u64>) -> u64 {
    numbers.fold(0, u64::saturating_add)
}

impl StackFacts {
    /// Examines the layers; returns the reason too if a part of them cannot be read.
    pub fn examine(opened: &Opened, metadata: &Value) -> (StackFacts, Option<CommandError>) {
        let mut failure = None;
        let accounts = accounts(opened).unwrap_or_else(|error| {
            failure = Some(error);
            None
        });
        let ratio = stored_part(opened);
        let described: HashMap<&str, &Value> = metadata["layers"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|layer| Some((layer["digest"].as_str()?, layer)))
            .collect();
        let layer = |index: usize, layer: &StackLayer| {
            let digest = layer.recorded.digest.to_string();
            let said = described.get(&*digest).copied().unwrap_or(&Value::Null);
            let shared_bytes = layer.file.as_ref().map_or(0, |file| {
                let metadata = file.image.metadata().unwrap_or_default();
                metadata["content"]["lower_bytes"].as_u64().unwrap_or(0)
            });
            let account = accounts.as_ref().map(|all| all[index]);
            let amount = |of: fn(&LayerAccount) -> (u64, u64)| {
                let (entries, bytes) = of(account.as_ref()?);
                Some(NamedBytes { entries, bytes })
            };
            LayerFacts {
                digest,
                short: layer.recorded.digest.short(),
                diff_id: said["diff_id"].clone(),
                path: layer
                    .file
                    .as_ref()
                    .map(|file| file.path.to_string_lossy().into_owned()),
                file_bytes: layer.recorded.file_bytes,
                adds: amount(|a| (a.added_entries, a.added_bytes)),
                hides: amount(|a| (a.hides_entries, a.hides_bytes)),
                hidden: amount(|a| (a.hidden_entries, a.hidden_bytes)),
                whiteouts: account.map(|account| account.whiteouts),
                shared_bytes,
                saved_bytes_estimate: (shared_bytes as f64 * ratio) as u64,
                source: said["source"].clone(),
            }
        };
        let layers = opened.layers.iter().enumerate();
        let layers: Vec<LayerFacts> = layers.map(|(index, one)| layer(index, one)).collect();
        let files: HashMap<&str, u64> = layers
            .iter()
            .map(|layer| (&*layer.digest, layer.file_bytes))
            .collect();
        let source_bytes = |layer: &LayerFacts| layer.source["stored_bytes"].as_u64().unwrap_or(0);
        let stack = StackFacts {
            files: files.len() as u64,
            layers_bytes: sum(files.into_values()),
            stack_bytes: opened.image.header().file_bytes,
            source_bytes: sum(layers.iter().map(source_bytes)),
            shared_bytes: sum(layers.iter().map(|layer| layer.shared_bytes)),
            saved_bytes_estimate: sum(layers.iter().map(|layer| layer.saved_bytes_estimate)),
            layers,
        };
        (stack, failure)
    }
}

/// What each layer adds and hides; `None` if a layer is missing.
fn accounts(opened: &Opened) -> Result<Option<Vec<LayerAccount>>, CommandError> {
    let mut filesystems = HashMap::new();
    for layer in &opened.layers {
        let Some(file) = &layer.file else {
            return Ok(None);
        };
        if !filesystems.contains_key(&layer.recorded.digest) {
            let filesystem = Filesystem::open(file.image.clone())
                .context(|| format!("cannot read the file system in {}", file.path.display()))?;
            filesystems.insert(&layer.recorded.digest, filesystem);
        }
    }
    let layers: Vec<&Filesystem> = opened
        .layers
        .iter()
        .filter_map(|layer| filesystems.get(&layer.recorded.digest))
        .collect();
    let accounts = account(&layers).context(|| "cannot compare the layers")?;
    Ok(Some(accounts))
}

/// Stored bytes of file content for each byte of it, over all layers.
fn stored_part(opened: &Opened) -> f64 {
    let (mut kept, mut stored) = (0, 0);
    for file in opened.layers.iter().filter_map(|layer| layer.file.as_ref()) {
        let metadata = file.image.metadata().unwrap_or_default();
        let start = metadata["content"]["metadata_start"].as_u64();
        let (storage, _) = StorageFacts::measure(&file.image, start);
        kept += storage.content.kept_bytes();
        stored += storage.content.stored_bytes;
    }
    match kept {
        0 => 0.0,
        kept => stored as f64 / kept as f64,
    }
}
