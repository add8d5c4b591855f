//! The snapshotter's record of one snapshot: a line of JSON.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bcow_tool::registry::is_plain;
use serde::{Deserialize, Serialize};

/// The schema of a record without a remote layer. A reader refuses an unknown schema.
const SCHEMA: &str = "bcow.snapshot/1";
/// The schema of a record with a remote layer. The first release does not know it, and refuses the
/// record.
const SCHEMA_REMOTE: &str = "bcow.snapshot/2";
/// The schema of an active snapshot with a layer. An earlier version would make the layer again, of
/// a directory without files.
const SCHEMA_APPLIED: &str = "bcow.snapshot/3";

/// The kind of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A read-only snapshot (containerd's word; not an ext4 view).
    View,
    /// Writable.
    Active,
    /// Immutable; it can be a parent.
    Committed,
}

impl Kind {
    /// The name in filters and records.
    pub fn name(self) -> &'static str {
        match self {
            Kind::View => "view",
            Kind::Active => "active",
            Kind::Committed => "committed",
        }
    }
}

/// The number of a snapshot. It names the files of the snapshot, and never changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Id(pub u64);

impl Id {
    /// The largest number, so that there is always a next one.
    pub const MAX: Id = Id(u64::MAX >> 1);
}

impl std::fmt::Display for Id {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Labels of a snapshot.
pub type Labels = BTreeMap<String, String>;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotRecord {
    schema: String,
    /// The number.
    pub id: Id,
    pub kind: Kind,
    /// The name by which containerd knows the snapshot.
    pub name: String,
    /// The name of the parent, a committed snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// When the snapshot was prepared or committed, in nanoseconds since 1970.
    pub created_ns: u64,
    /// When the record was last changed, likewise.
    pub updated_ns: u64,
    /// containerd's labels.
    #[serde(default)]
    pub labels: Labels,
    /// Whether the snapshot has a layer on the disk of this machine. A committed one has none if it
    /// was committed without a change, or if its layer is remote. An active one has it if the
    /// archive of a layer was applied to it.
    #[serde(default)]
    pub has_layer: bool,
    /// Whether containerd has given the files to the IDs of a user namespace, so that the mounts
    /// for this namespace need no mapping.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_remapped: bool,
    /// The layer of a committed snapshot, if it is in a registry instead of on the disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote: Option<RemoteLayer>,
}

/// Why a record cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadRecord {
    /// A later version has written it.
    #[error("unsupported schema {0:?}")]
    Unsupported(String),
    /// It is not a record, or not a possible one. The text says why.
    #[error("{0}")]
    Damaged(String),
}

/// The field of a record that every schema has.
#[derive(Deserialize)]
struct OnlySchema {
    schema: String,
}

/// A layer of an image in BCoW form in a registry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteLayer {
    /// The name of the image, with the digest of its manifest.
    pub image: String,
    /// The number of layers of the image that the snapshot shows, counted from the lowest. At least
    /// 1, and at most the number of layers of the image.
    pub layers: usize,
    /// The root hashes of the files of the image: the stack, then the layers from the lowest.
    pub files: Vec<String>,
}

impl RemoteLayer {
    /// The name by which bcow opens this layer with those below it.
    pub fn name(&self) -> String {
        if self.is_whole() {
            self.image.clone()
        } else {
            format!("{}#layers={}", self.image, self.layers)
        }
    }

    /// Whether this is the uppermost layer of the image.
    pub fn is_whole(&self) -> bool {
        self.files.len().checked_sub(1) == Some(self.layers)
    }
}

impl SnapshotRecord {
    /// The record of a new snapshot.
    pub fn new(id: Id, kind: Kind, name: String, parent: Option<String>, labels: Labels) -> Self {
        let now = now_ns();
        SnapshotRecord {
            schema: SCHEMA.to_owned(),
            id,
            kind,
            name,
            parent,
            created_ns: now,
            updated_ns: now,
            labels,
            has_layer: false,
            is_remapped: false,
            remote: None,
        }
    }

    /// Whether this active snapshot is the one in which containerd gives all files of an image to
    /// the IDs of a user namespace, for a snapshotter without the capability `remap-ids`. Its name,
    /// behind that of the namespace, is a digest and `-remap`.
    pub fn is_for_remap(&self) -> bool {
        let own = self.name.rsplit('/').next().unwrap_or(&self.name);
        own.starts_with("sha256:") && own.ends_with("-remap")
    }

    /// Turns this new record into the record of a committed snapshot whose layer is in a registry.
    pub fn in_registry(self, remote: RemoteLayer) -> Self {
        SnapshotRecord {
            schema: SCHEMA_REMOTE.to_owned(),
            kind: Kind::Committed,
            remote: Some(remote),
            ..self
        }
    }

    /// The record of this active snapshot with a layer.
    pub fn applied(&self) -> Self {
        SnapshotRecord {
            schema: SCHEMA_APPLIED.to_owned(),
            has_layer: true,
            updated_ns: now_ns(),
            ..self.clone()
        }
    }

    /// The record of this active snapshot after its commit. It has only the new labels.
    pub fn committed(&self, name: String, labels: Labels, has_layer: bool) -> Self {
        let parent = self.parent.clone();
        SnapshotRecord {
            has_layer,
            is_remapped: self.is_for_remap(),
            ..SnapshotRecord::new(self.id, Kind::Committed, name, parent, labels)
        }
    }

    /// This record with other labels.
    pub fn relabelled(&self, labels: Labels) -> Self {
        SnapshotRecord {
            labels,
            updated_ns: now_ns(),
            ..self.clone()
        }
    }

    /// The line of JSON, with its newline.
    pub fn encode(&self) -> serde_json::Result<Vec<u8>> {
        let mut line = serde_json::to_vec(self)?;
        line.push(b'\n');
        Ok(line)
    }

    /// Reads what [`encode`](Self::encode) wrote.
    pub fn decode(bytes: &[u8]) -> Result<Self, BadRecord> {
        let invalid = |error: serde_json::Error| BadRecord::Damaged(error.to_string());
        // The other fields of a newer schema may have types and values that are unknown here.
        let OnlySchema { schema } = serde_json::from_slice(bytes).map_err(invalid)?;
        if ![SCHEMA, SCHEMA_REMOTE, SCHEMA_APPLIED].contains(&&*schema) {
            return Err(BadRecord::Unsupported(schema));
        }
        let record: SnapshotRecord = serde_json::from_slice(bytes).map_err(invalid)?;
        let expected = match record.remote {
            None if record.kind == Kind::Active && record.has_layer => SCHEMA_APPLIED,
            None => SCHEMA,
            Some(_) => SCHEMA_REMOTE,
        };
        if schema != expected {
            return Err(BadRecord::Unsupported(schema));
        }
        if let Some(remote) = &record.remote {
            let count = remote.files.len().saturating_sub(1);
            if !(1..=count).contains(&remote.layers) {
                return Err(BadRecord::Damaged(format!(
                    "it shows {} layers of an image with {count} layers",
                    remote.layers
                )));
            }
            // They become options of a mount, and names of files in the cache.
            let is_name = |root: &String| is_plain(root) && !root.contains('/');
            if !is_plain(&remote.image) || !remote.files.iter().all(is_name) {
                return Err(BadRecord::Damaged(format!(
                    "the name of its image, {:?}, or of a file of it cannot be used",
                    remote.image
                )));
            }
            if record.has_layer {
                let problem = "its layer is on the disk and in a registry";
                return Err(BadRecord::Damaged(problem.to_owned()));
            }
        }
        if record.id > Id::MAX {
            return Err(BadRecord::Damaged(format!(
                "the number {} is too large",
                record.id
            )));
        }
        if record.name.is_empty() {
            return Err(BadRecord::Damaged("the name is empty".to_owned()));
        }
        Ok(record)
    }
}

fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let nanoseconds = since.unwrap_or(Duration::ZERO).as_nanos();
    u64::try_from(nanoseconds).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let labels = Labels::from([("a\"b".to_owned(), "ü\n".to_owned())]);
        for (kind, parent) in [
            (Kind::View, None),
            (Kind::Active, Some("p".to_owned())),
            (Kind::Committed, Some("sha256:x".to_owned())),
        ] {
            let record =
                SnapshotRecord::new(Id(7), kind, "k8s.io/1/x".into(), parent, labels.clone());
            let line = record.encode().unwrap();
            assert_eq!(line.iter().filter(|&&byte| byte == b'\n').count(), 1);
            assert_eq!(SnapshotRecord::decode(&line).unwrap(), record);
        }
    }

    #[test]
    fn a_layer_in_a_registry_has_a_schema_of_its_own() {
        let remote = RemoteLayer {
            image: "docker://h/r@sha256:a".to_owned(),
            layers: 1,
            files: vec!["s".into(), "1".into(), "2".into()],
        };
        assert_eq!(remote.name(), "docker://h/r@sha256:a#layers=1");
        let whole = RemoteLayer {
            layers: 2,
            ..remote.clone()
        };
        assert_eq!(whole.name(), "docker://h/r@sha256:a");
        let record = SnapshotRecord::new(Id(1), Kind::Committed, "a".into(), None, Labels::new());
        let record = record.in_registry(remote);
        let line = String::from_utf8(record.encode().unwrap()).unwrap();
        assert!(line.contains("bcow.snapshot/2"), "{line}");
        assert_eq!(SnapshotRecord::decode(line.as_bytes()).unwrap(), record);
        let error =
            SnapshotRecord::decode(line.replace("shot/2", "shot/1").as_bytes()).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("unsupported schema"), "{error}");
    }

    #[test]
    fn damaged_and_newer_records_are_refused() {
        let record = SnapshotRecord::new(Id(1), Kind::Active, "a".into(), None, Labels::new());
        let line = String::from_utf8(record.encode().unwrap()).unwrap();
        for (bad, expected) in [
            ("", "EOF"),
            (&line[..line.len() / 2], "EOF"),
            (&line.replace("shot/1", "shot/2")[..], "unsupported schema"),
            (&line.replace("\"a\"", "\"\""), "the name is empty"),
            (&line.replace("active", "other"), "unknown variant"),
            (
                &line.replace(":1,", ":18446744073709551615,"),
                "is too large",
            ),
            // A newer schema is named even if its other fields are unknown.
            (
                &line.replace("shot/1", "shot/9").replace("active", "other"),
                "unsupported schema \"bcow.snapshot/9\"",
            ),
        ] {
            let error = SnapshotRecord::decode(bad.as_bytes())
                .unwrap_err()
                .to_string();
            assert!(error.contains(expected), "{bad}: {error}");
        }
    }

    #[test]
    fn impossible_layers_in_a_registry_are_refused() {
        let record = |layers, has_layer| {
            let remote = RemoteLayer {
                image: "docker://h/r@sha256:a".to_owned(),
                layers,
                files: vec!["s".into(), "1".into(), "2".into()],
            };
            let record =
                SnapshotRecord::new(Id(1), Kind::Committed, "a".into(), None, Labels::new());
            let mut record = record.in_registry(remote);
            record.has_layer = has_layer;
            SnapshotRecord::decode(&record.encode().unwrap())
        };
        for layers in [1, 2] {
            record(layers, false).unwrap();
        }
        for layers in [0, 3, usize::MAX] {
            let error = record(layers, false).unwrap_err().to_string();
            assert!(error.contains("of an image with 2 layers"), "{error}");
        }
        let named = |image: &str, file: &str| {
            let remote = RemoteLayer {
                image: image.to_owned(),
                layers: 1,
                files: vec!["s".to_owned(), file.to_owned()],
            };
            let record =
                SnapshotRecord::new(Id(1), Kind::Committed, "a".into(), None, Labels::new());
            SnapshotRecord::decode(&record.in_registry(remote).encode().unwrap())
        };
        for (image, file) in [
            ("docker://h/r,suid", "1"),
            ("docker://h/r", "../../1"),
            ("", "1"),
        ] {
            let error = named(image, file).unwrap_err().to_string();
            assert!(error.contains("cannot be used"), "{error}");
        }
        let error = record(1, true).unwrap_err().to_string();
        assert!(error.contains("on the disk and in a registry"), "{error}");
    }
}
