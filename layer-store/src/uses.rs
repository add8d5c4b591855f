//! Which layers container engines use, and how often.
//!
//! ```text
//! LAYERS/HASH.json   the reference, the digest, the layer, and the number of uses
//! ```
//!
//! A record is durable before the engine gets its answer. It says where the layer is, so that a
//! container starts without a question to the registry.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use bcow_tool::resolved::sha256;
use bcow_tool::{At, HostError};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::layer::Layer;

/// A reference and a digest.
type Key = (String, String);

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Record {
    reference: String,
    digest: String,
    uses: u64,
    layer: Layer,
}

/// The layers in use.
pub struct Uses {
    directory: PathBuf,
    /// Protects the records, and their files against each other's writers.
    records: Mutex<HashMap<Key, Record>>,
}

impl Uses {
    /// The records in `directory`. A record that cannot be read is reported and not used.
    pub fn open(directory: PathBuf) -> Result<Self, Error> {
        fs::create_dir_all(&directory).at("create", &directory)?;
        let mut records = HashMap::new();
        for entry in fs::read_dir(&directory).at("list", &directory)? {
            let path = entry.at("list", &directory)?.path();
            match path.extension().and_then(|ending| ending.to_str()) {
                // Of a process that ended while it was writing.
                Some("new") => fs::remove_file(&path).at("remove", &path)?,
                Some("json") => match read(&path) {
                    Ok(record) => {
                        let key = (record.reference.clone(), record.digest.clone());
                        records.insert(key, record);
                    }
                    Err(error) => tracing::error!("{error}; the record is ignored"),
                },
                _ => {}
            }
        }
        Ok(Uses {
            directory,
            records: Mutex::new(records),
        })
    }

    /// The layer, if it is in use.
    pub fn layer(&self, reference: &str, digest: &str) -> Option<Layer> {
        let records = self.records.lock();
        let record = records.get(&(reference.to_owned(), digest.to_owned()))?;
        Some(record.layer.clone())
    }

    /// Adds a use of a layer.
    pub fn add(&self, reference: &str, digest: &str, layer: &Layer) -> Result<(), Error> {
        let mut records = self.records.lock();
        let key = (reference.to_owned(), digest.to_owned());
        let mut record = records.get(&key).cloned().unwrap_or_else(|| Record {
            reference: reference.to_owned(),
            digest: digest.to_owned(),
            uses: 0,
            layer: layer.clone(),
        });
        record.uses = record.uses.saturating_add(1);
        self.write(&record)?;
        records.insert(key, record);
        Ok(())
    }

    /// Releases a use of a layer. Returns whether it was the last one.
    pub fn release(&self, reference: &str, digest: &str) -> Result<bool, Error> {
        let mut records = self.records.lock();
        let key = (reference.to_owned(), digest.to_owned());
        let Some(mut record) = records.get(&key).cloned() else {
            return Ok(false);
        };
        record.uses = record.uses.saturating_sub(1);
        if record.uses > 0 {
            self.write(&record)?;
            records.insert(key, record);
            return Ok(false);
        }
        let path = self.path(&record);
        fs::remove_file(&path).at("remove", &path)?;
        self.sync()?;
        records.remove(&key);
        Ok(true)
    }

    /// The names of the mounts of the layers in use.
    pub fn mounts(&self) -> HashSet<String> {
        let records = self.records.lock();
        records.values().map(|it| it.layer.mount_name()).collect()
    }

    fn path(&self, record: &Record) -> PathBuf {
        let name = sha256(&format!("{}\n{}", record.reference, record.digest));
        self.directory.join(format!("{}.json", &name[..32]))
    }

    fn write(&self, record: &Record) -> Result<(), Error> {
        let path = self.path(record);
        let new = path.with_extension("new");
        let text = serde_json::to_vec_pretty(record)
            .map_err(|error| Error::State(format!("cannot write {}: {error}", path.display())))?;
        let mut file = File::create(&new).at("create", &new)?;
        file.write_all(&text)
            .and_then(|()| file.sync_all())
            .at("write", &new)?;
        fs::rename(&new, &path).at("write", &path)?;
        Ok(self.sync()?)
    }

    fn sync(&self) -> Result<(), HostError> {
        let directory = File::open(&self.directory).at("open", &self.directory)?;
        directory.sync_all().at("write", &self.directory)
    }
}

fn read(path: &Path) -> Result<Record, Error> {
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
        let open = || Uses::open(directory.path().join("layers")).unwrap();
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
        let uses = Uses::open(directory.path().to_owned()).unwrap();
        assert!(uses.mounts().is_empty());
        assert!(!directory.path().join("y.new").exists());
        assert!(directory.path().join("x.json").exists());
    }
}
