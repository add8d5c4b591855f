//! Which layers container engines use, and how often.
//!
//! ```text
//! LAYERS/HASH.json   the reference, the digest, the layer, and the number of uses
//! ```
//!
//! A record is durable before the engine gets its answer. It says where the layer is, so that a
//! container starts without a question to the registry. The end of a use holds also if the disk is
//! full; its record is written as soon as there is space.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use bcow_tool::At;
use bcow_tool::host::{entries_if_any, remove_if_any, replace, sync};
use bcow_tool::resolved::sha256;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::layer::Layer;

/// A reference and a digest.
type Key = (String, String);

#[derive(Debug, Clone, Serialize, Deserialize)]
struct ReferenceUses {
    reference: String,
    digest: String,
    uses: u64,
    layer: Layer,
}

/// The layers in use.
pub struct Uses {
    directory: PathBuf,
    /// Protects the records, and their files against each other's writers.
    records: Mutex<Records>,
}

#[derive(Default)]
struct Records {
    all: HashMap<Key, ReferenceUses>,
    /// The records whose files have more uses than they have.
    unwritten: HashSet<Key>,
}

impl Uses {
    /// The records in `directory`. A record that cannot be read is reported and not used.
    pub fn open(directory: PathBuf) -> Self {
        let mut all = HashMap::new();
        let paths = entries_if_any(&directory).unwrap_or_else(|error| {
            tracing::error!("{error}");
            Vec::new()
        });
        for path in paths {
            let used = match path.extension().and_then(|ending| ending.to_str()) {
                // Of a process that ended while it was writing.
                Some("new") => remove_if_any(&path).map_err(Error::from),
                Some("json") => read(&path).map(|record| {
                    let key = (record.reference.clone(), record.digest.clone());
                    all.insert(key, record);
                }),
                _ => Ok(()),
            };
            if let Err(error) = used {
                tracing::error!("{error}; the file is ignored");
            }
        }
        Uses {
            directory,
            records: Mutex::new(Records {
                all,
                unwritten: HashSet::new(),
            }),
        }
    }

    /// The layer, if it is in use.
    pub fn layer(&self, reference: &str, digest: &str) -> Option<Layer> {
        let records = self.records.lock();
        let record = records
            .all
            .get(&(reference.to_owned(), digest.to_owned()))?;
        Some(record.layer.clone())
    }

    /// Adds a use of a layer.
    pub fn add(&self, reference: &str, digest: &str, layer: &Layer) -> Result<(), Error> {
        let mut records = self.records.lock();
        let key = (reference.to_owned(), digest.to_owned());
        let mut record = records
            .all
            .get(&key)
            .cloned()
            .unwrap_or_else(|| ReferenceUses {
                reference: reference.to_owned(),
                digest: digest.to_owned(),
                uses: 0,
                layer: layer.clone(),
            });
        record.uses = record.uses.saturating_add(1);
        self.write(&record)?;
        records.unwritten.remove(&key);
        records.all.insert(key, record);
        Ok(())
    }

    /// Releases a use of a layer. Returns whether it was the last one.
    pub fn release(&self, reference: &str, digest: &str) -> Result<bool, Error> {
        let mut records = self.records.lock();
        let key = (reference.to_owned(), digest.to_owned());
        let Some(mut record) = records.all.get(&key).cloned() else {
            return Ok(false);
        };
        record.uses = record.uses.saturating_sub(1);
        if record.uses > 0 {
            if let Err(error) = self.write(&record) {
                tracing::warn!("{error}; the record of the end of a use is written later");
                records.unwritten.insert(key.clone());
            }
            records.all.insert(key, record);
            return Ok(false);
        }
        remove_if_any(&self.path(&record))?;
        sync(&self.directory)?;
        records.unwritten.remove(&key);
        records.all.remove(&key);
        Ok(true)
    }

    /// Writes the records that could not be written when a use ended.
    pub fn write_rest(&self) {
        let Records { all, unwritten } = &mut *self.records.lock();
        unwritten.retain(|key| all.get(key).is_some_and(|it| self.write(it).is_err()));
    }

    /// The layers in use, each with the number of uses.
    pub fn layers(&self) -> Vec<(Layer, u64)> {
        let records = self.records.lock();
        let records = records.all.values();
        records.map(|it| (it.layer.clone(), it.uses)).collect()
    }

    /// The names of the mounts of the layers in use.
    pub fn mounts(&self) -> HashSet<String> {
        let records = self.records.lock();
        let records = records.all.values();
        records.map(|it| it.layer.mount_name()).collect()
    }

    fn path(&self, record: &ReferenceUses) -> PathBuf {
        let name = sha256(&format!("{}\n{}", record.reference, record.digest));
        self.directory.join(format!("{}.json", &name[..32]))
    }

    fn write(&self, record: &ReferenceUses) -> Result<(), Error> {
        let path = self.path(record);
        let new = path.with_extension("new");
        let text = serde_json::to_vec_pretty(record)
            .map_err(|error| Error::State(format!("cannot write {}: {error}", path.display())))?;
        fs::create_dir_all(&self.directory).at("create", &self.directory)?;
        Ok(replace(&path, &new, &text)?)
    }
}

fn read(path: &Path) -> Result<ReferenceUses, Error> {
    let text = fs::read(path).at("read", path)?;
    serde_json::from_slice(&text)
        .map_err(|error| Error::State(format!("cannot use {}: {error}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layer::tests::{digest, layer};

    #[test]
    fn uses_survive_a_restart_and_end_with_the_last_release() {
        let directory = tempfile::tempdir().unwrap();
        let open = || Uses::open(directory.path().join("layers"));
        let (image, a) = ("h.org/r:1", digest('a'));
        let uses = open();
        assert!(!uses.release(image, &a).unwrap(), "unknown");
        uses.add(image, &a, &layer('a', '1')).unwrap();
        // The layer of the first use counts.
        uses.add(image, &a, &layer('a', '2')).unwrap();
        uses.add(image, &digest('b'), &layer('b', '2')).unwrap();
        let again = open();
        assert_eq!(again.layer(image, &a), Some(layer('a', '1')));
        assert_eq!(again.layer("h.org/r:2", &a), None);
        assert_eq!(again.mounts().len(), 1, "the source is the same");
        assert!(!again.release(image, &a).unwrap());
        let again = open();
        assert!(again.release(image, &a).unwrap());
        assert_eq!(open().layer(image, &a), None);
        assert!(again.release(image, &digest('b')).unwrap());
        assert!(open().mounts().is_empty());
        assert_eq!(
            fs::read_dir(directory.path().join("layers"))
                .unwrap()
                .count(),
            0
        );
    }

    #[test]
    fn damaged_record_is_ignored() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("x.json"), "{").unwrap();
        fs::write(directory.path().join("y.new"), "{").unwrap();
        // Cannot be removed as a file.
        fs::create_dir(directory.path().join("z.new")).unwrap();
        let uses = Uses::open(directory.path().to_owned());
        assert!(uses.mounts().is_empty());
        assert!(!directory.path().join("y.new").exists());
        assert!(directory.path().join("x.json").exists());
    }

    #[test]
    fn end_of_a_use_that_cannot_be_written_is_written_later() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("layers");
        let (image, a) = ("h.org/r:1", digest('a'));
        let uses = Uses::open(path.clone());
        for _ in 0..2 {
            uses.add(image, &a, &layer('a', '1')).unwrap();
        }
        // A directory has the name of the new file.
        let json = entries_if_any(&path).unwrap().remove(0);
        let obstacle = json.with_extension("new");
        fs::create_dir(&obstacle).unwrap();
        assert!(!uses.release(image, &a).unwrap());
        uses.write_rest();
        assert_eq!(read(&json).unwrap().uses, 2);
        fs::remove_dir(&obstacle).unwrap();
        uses.write_rest();
        assert_eq!(read(&json).unwrap().uses, 1);
        assert!(uses.release(image, &a).unwrap());
        assert!(entries_if_any(&path).unwrap().is_empty());
    }
}
