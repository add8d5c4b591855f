//! The JSON sections of converted images (spec section 13). They do not depend on the host, the
//! time, or the place and the name of the source: equal images give equal files.

use serde_json::{Map, Value, json};

use crate::content::ContentStats;
use crate::digest::Digest;
use crate::image::Image;
use crate::null::some_fields;
use crate::options::{Compression, ConvertOptions, LayerReport};

/// A section that is being built.
pub(crate) struct Metadata(Map<String, Value>);

impl Metadata {
    /// The section of an image that represents a whole source: flattened, or a stack.
    pub(crate) fn of_source(
        image: Option<&Image>,
        options: &ConvertOptions,
        layers: Vec<Value>,
    ) -> Self {
        let created = options.source_date_epoch.and_then(crate::rfc3339);
        let mut all = some_fields([
            ("tool", Some(json!(tool(options)))),
            ("created", created.map(|created| json!(created))),
            ("options", Some(options_json(options))),
        ]);
        all.insert("layers".into(), Value::Array(layers));
        if let Some(config) = image.and_then(|image| image.config.as_ref()) {
            all.insert("config_digest".into(), json!(Digest::of(&config.bytes)));
            all.insert("config".into(), config.document.clone());
        }
        Metadata(all)
    }

    /// A section with the fields `described`.
    pub(crate) fn new(tool: &str, options: Value, described: Map<String, Value>) -> Self {
        let mut all = Map::from_iter([
            ("tool".to_owned(), json!(tool)),
            ("options".to_owned(), options),
        ]);
        all.extend(described);
        Metadata(all)
    }

    /// Adds the identities of the files that the image names by digest.
    pub(crate) fn backings(&mut self, backings: Vec<Value>) {
        self.0.insert("backings".into(), Value::Array(backings));
    }

    /// Adds the statistics of the content.
    pub(crate) fn content(&mut self, entries: u64, stats: ContentStats, metadata_start: u64) {
        let mut content = json!({
            "entries": entries,
            "file_bytes": stats.content_bytes,
            "deduplicated_bytes": stats.deduplicated_bytes,
            "metadata_start": metadata_start,
        });
        if stats.lower_bytes > 0 {
            content["lower_bytes"] = json!(stats.lower_bytes);
        }
        self.0.insert("content".into(), content);
    }

    /// Adds the prefetch list.
    pub(crate) fn prefetch(&mut self, described: Value) {
        self.0.insert("prefetch".into(), described);
    }

    pub(crate) fn into_json(self) -> Value {
        Value::Object(self.0)
    }
}

/// The name and version of the tool.
pub(crate) fn tool(options: &ConvertOptions) -> String {
    format!("bcow {}", options.tool_version)
}

/// The options that determine an image's bytes, without the prefetch list.
pub(crate) fn options_json(options: &ConvertOptions) -> Value {
    let compress = match (options.plain, options.compression) {
        (true, _) | (_, Compression::None) => json!("none"),
        (_, Compression::Zstd { level }) => json!(format!("zstd:{level}")),
    };
    let block_size = match options.block_bytes {
        Some(bytes) => json!(bytes),
        None => json!("auto"),
    };
    json!({"compress": compress, "plain": options.plain, "block_size": block_size})
}

/// A source layer's entry in the metadata of a flattened image. It does not depend on the
/// compression of the layer in the source.
pub(crate) fn flattened_layer(layer: &LayerReport) -> Value {
    some_fields([
        ("diff_id", layer.diff_id.as_ref().map(|d| json!(d))),
        ("tar_bytes", Some(json!(layer.bytes))),
    ])
    .into()
}
