//! The records of all snapshots, in memory, and which of them an operation is changing.

use std::collections::{BTreeMap, HashSet};

use crate::error::Error;
use crate::record::{Id, Kind, Labels, RemoteLayer, SnapshotRecord};

/// The snapshots by name.
#[derive(Default)]
pub struct Index {
    entries: BTreeMap<String, IndexedSnapshot>,
    /// Names that an operation holds.
    held: HashSet<String>,
    /// The number of the next snapshot.
    next: u64,
}

/// The layers that a snapshot shows.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Chain {
    /// The lowest layers, if they are in a registry.
    pub remote: Option<RemoteLayer>,
    /// The layers on the disk, from the lowest.
    pub layers: Vec<Id>,
    /// Whether the files belong to the IDs of a user namespace.
    pub is_remapped: bool,
}

struct IndexedSnapshot {
    record: SnapshotRecord,
    /// Whether the snapshot is on the disk. Until then only its claim on the parent counts.
    is_made: bool,
}

impl Index {
    /// An index of records on the disk, with different names. `next` is above all numbers in use.
    pub fn new(records: Vec<SnapshotRecord>, next: u64) -> Self {
        let made = |record: SnapshotRecord| {
            let entry = IndexedSnapshot {
                is_made: true,
                record,
            };
            (entry.record.name.clone(), entry)
        };
        Index {
            entries: records.into_iter().map(made).collect(),
            held: HashSet::new(),
            next,
        }
    }

    /// Whether an operation holds the name.
    pub fn is_held(&self, name: &str) -> bool {
        self.held.contains(name)
    }

    /// Lets an operation hold the name.
    pub fn hold(&mut self, name: &str) {
        self.held.insert(name.to_owned());
    }

    /// Ends the hold. A snapshot that was begun under it and not finished is forgotten.
    pub fn release(&mut self, name: &str) {
        self.held.remove(name);
        if self.entries.get(name).is_some_and(|entry| !entry.is_made) {
            self.entries.remove(name);
        }
    }

    pub fn get(&self, name: &str) -> Result<&SnapshotRecord, Error> {
        let entry = self.entries.get(name).filter(|entry| entry.is_made);
        entry
            .map(|entry| &entry.record)
            .ok_or_else(|| Error::NotFound(name.to_owned()))
    }

    /// All records, by name.
    pub fn all(&self) -> impl Iterator<Item = &SnapshotRecord> {
        let made = self.entries.values().filter(|entry| entry.is_made);
        made.map(|entry| &entry.record)
    }

    /// The record for a list. If its parent is lost, it shows none: containerd's garbage collection
    /// begins at snapshots without a parent.
    pub fn shown(&self, record: &SnapshotRecord) -> SnapshotRecord {
        let mut shown = record.clone();
        shown
            .parent
            .take_if(|parent| !self.entries.contains_key(parent));
        shown
    }

    /// The layers of a committed snapshot.
    pub fn chain(&self, name: &str) -> Result<Chain, Error> {
        let mut chain = Chain::default();
        let (mut next, mut below) = (Some(name), 0);
        while let Some(parent) = next {
            let record = self.get(parent)?;
            below += 1;
            if below > self.entries.len() {
                // No operation makes such records.
                return Err(Error::State(format!(
                    "snapshot {name:?} is damaged: it is above itself"
                )));
            }
            if let Some(remote) = &record.remote {
                // It shows the layers below it, too.
                chain.remote = Some(remote.clone());
                break;
            }
            if record.has_layer {
                chain.layers.push(record.id);
            }
            chain.is_remapped |= record.is_remapped;
            next = record.parent.as_deref();
        }
        chain.layers.reverse();
        Ok(chain)
    }

    /// Whether the snapshot is the parent of another one.
    pub fn has_children(&self, name: &str) -> bool {
        let mut entries = self.entries.values();
        entries.any(|entry| entry.record.parent.as_deref() == Some(name))
    }

    /// Fails if there is a snapshot of this name.
    pub fn require_free(&self, name: &str) -> Result<(), Error> {
        if self.entries.contains_key(name) {
            Err(Error::Exists(name.to_owned()))
        } else {
            Ok(())
        }
    }

    /// Fails if the snapshot cannot be a parent.
    pub fn require_committed(&self, name: &str) -> Result<(), Error> {
        if self.get(name)?.kind == Kind::Committed {
            Ok(())
        } else {
            Err(Error::Invalid(format!(
                "the parent {name:?} is not a committed snapshot"
            )))
        }
    }

    /// Begins a new snapshot: gives it a number, and keeps its parent from being removed.
    pub fn begin(
        &mut self,
        kind: Kind,
        name: &str,
        parent: Option<&str>,
        labels: Labels,
    ) -> Result<SnapshotRecord, Error> {
        if let Some(parent) = parent {
            self.require_committed(parent)?;
        }
        self.require_free(name)?;
        let id = Id(self.next);
        self.next += 1;
        let parent = parent.map(str::to_owned);
        let record = SnapshotRecord::new(id, kind, name.to_owned(), parent, labels);
        let entry = IndexedSnapshot {
            record: record.clone(),
            is_made: false,
        };
        self.entries.insert(name.to_owned(), entry);
        Ok(record)
    }

    /// Records a snapshot that is on the disk, in place of the one that was named `old`.
    pub fn put(&mut self, old: &str, record: SnapshotRecord) {
        self.entries.remove(old);
        let entry = IndexedSnapshot {
            is_made: true,
            record,
        };
        self.entries.insert(entry.record.name.clone(), entry);
    }

    /// Forgets a snapshot that is no longer on the disk.
    pub fn remove(&mut self, name: &str) {
        self.entries.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(index: &mut Index, name: &str, parent: Option<&str>) -> Result<SnapshotRecord, Error> {
        index.begin(Kind::Active, name, parent, Labels::new())
    }

    fn commit(index: &mut Index, name: &str, parent: Option<&str>, has_layer: bool) -> Id {
        let record = begin(index, "key", parent).unwrap();
        let record = record.committed(name.to_owned(), Labels::new(), has_layer);
        let id = record.id;
        index.put("key", record);
        id
    }

    #[test]
    fn a_snapshot_that_is_being_made_is_hidden_and_keeps_its_parent() {
        let mut index = Index::default();
        commit(&mut index, "p", None, true);
        begin(&mut index, "a", Some("p")).unwrap();
        assert!(matches!(index.get("a"), Err(Error::NotFound(_))));
        assert!(matches!(index.require_free("a"), Err(Error::Exists(_))));
        assert!(index.has_children("p"));
        index.hold("a");
        index.release("a");
        index.require_free("a").unwrap();
        assert!(!index.has_children("p"));
    }

    #[test]
    fn a_chain_has_the_layers_from_the_lowest() {
        let mut index = Index::default();
        let low = commit(&mut index, "low", None, true);
        commit(&mut index, "same", Some("low"), false);
        let high = commit(&mut index, "high", Some("same"), true);
        assert_eq!(index.chain("high").unwrap().layers, [low, high]);
        assert_eq!(index.chain("same").unwrap().layers, [low]);
        assert!(matches!(index.chain("none"), Err(Error::NotFound(_))));
    }

    #[test]
    fn a_chain_that_does_not_end_is_an_error() {
        let record = |id, name: &str, parent: &str| {
            let parent = Some(parent.to_owned());
            SnapshotRecord::new(
                Id(id),
                Kind::Committed,
                name.to_owned(),
                parent,
                Labels::new(),
            )
        };
        let records = vec![
            record(1, "a", "b"),
            record(2, "b", "a"),
            record(3, "c", "c"),
        ];
        let index = Index::new(records, 4);
        for name in ["a", "b", "c"] {
            let error = index.chain(name).unwrap_err();
            assert!(matches!(error, Error::State(_)), "{error}");
        }
    }

    #[test]
    fn a_layer_in_a_registry_shows_what_is_below_it() {
        let mut index = Index::default();
        commit(&mut index, "low", None, true);
        let remote = RemoteLayer {
            image: "docker://h/r@sha256:a".to_owned(),
            layers: 2,
            files: vec![String::new(); 4],
        };
        let record = begin(&mut index, "middle", Some("low")).unwrap();
        index.put("middle", record.in_registry(remote.clone()));
        let high = commit(&mut index, "high", Some("middle"), true);
        let expected = Chain {
            remote: Some(remote),
            layers: vec![high],
            is_remapped: false,
        };
        assert_eq!(index.chain("high").unwrap(), expected);
    }

    #[test]
    fn what_is_above_a_remapped_snapshot_is_remapped() {
        let mut index = Index::default();
        commit(&mut index, "image", None, true);
        for (key, is_remapped) in [("ns/7/sha256:a-remap", true), ("ns/8/a-remap", false)] {
            let active = begin(&mut index, key, Some("image")).unwrap();
            index.put(
                key,
                active.committed("users".to_owned(), Labels::new(), true),
            );
            commit(&mut index, "above", Some("users"), true);
            assert_eq!(index.chain("above").unwrap().is_remapped, is_remapped);
            index.remove("above");
            index.remove("users");
        }
        assert!(!index.chain("image").unwrap().is_remapped);
    }

    #[test]
    fn a_parent_must_be_committed() {
        let mut index = Index::default();
        let record = begin(&mut index, "a", None).unwrap();
        index.put("a", record);
        let error = begin(&mut index, "b", Some("a")).unwrap_err();
        assert!(matches!(error, Error::Invalid(_)), "{error}");
        let error = begin(&mut index, "b", Some("c")).unwrap_err();
        assert!(matches!(error, Error::NotFound(_)), "{error}");
        index.require_free("b").unwrap();
    }

    #[test]
    fn a_snapshot_whose_parent_is_lost_is_listed_without_it() {
        let mut index = Index::default();
        let low = commit(&mut index, "low", None, true);
        commit(&mut index, "high", Some("low"), true);
        let parents = |index: &Index| -> Vec<_> {
            let shown = index.all().map(|record| index.shown(record));
            shown.map(|record| record.parent).collect()
        };
        assert_eq!(parents(&index), [Some("low".to_owned()), None]);
        let kept = index.all().filter(|record| record.id != low);
        let index = Index::new(kept.cloned().collect(), 3);
        assert_eq!(parents(&index), [None]);
        assert!(matches!(index.chain("high"), Err(Error::NotFound(_))));
    }
}
