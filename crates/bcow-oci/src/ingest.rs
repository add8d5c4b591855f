//! Reads one layer from its tar archive into a tree, and stores the content of its files.

use std::collections::{BTreeMap, HashMap};

use bcow_erofs::tree::{Attributes, Blocks, Content, LayerTree, Node, NodeId, NodeKind};

use crate::builder::{LayerBuilder, Slot, keep_xattr};
use crate::content::{ContentSink, ContentWriter, Data};
use crate::error::{ConvertError, LimitKind, TarPlace, TarProblem, Unplaced, check_limit};
use crate::hidden::UpperLayers;
use crate::layer::Reading;
use crate::path::{MAX_PATH_BYTES, components};
use crate::recognise::{MAX_BYTES, is_marker_file, recognise};
use crate::tar::{EntryKind, TarEntry, TarReader};
use crate::warnings::Warnings;

/// Longest symlink target, as in Linux.
const MAX_TARGET_BYTES: usize = 4095;

/// The input and context of one layer.
pub(crate) struct LayerIngest<'i, S> {
    /// The layer's name in messages.
    pub name: &'i str,
    pub reading: &'i Reading<'i>,
    /// Whether to refuse an archive that contains container images.
    pub recognise: bool,
    pub content: &'i mut ContentWriter<S>,
    pub uppers: &'i mut UpperLayers,
    pub builder: LayerBuilder<'i>,
    pub warnings: &'i mut Warnings,
    /// Apparent size of the hidden files so far.
    pub hidden_bytes: &'i mut u64,
    /// Number in the archive of each dropped file; empty at the start.
    pub dropped: HashMap<NodeId, u64>,
    /// Empty at the start.
    pub rescue: Rescue,
}

/// A layer that was read.
pub(crate) struct Ingested {
    pub tree: LayerTree,
    pub entries: u64,
    /// Files that were dropped as hidden, but have another name that is visible.
    pub rescue: Rescue,
}

/// Dropped entries of a layer whose content is needed, by their number in the archive.
///
/// They require a second reading of the layer. The case is rare: an upper layer deletes one of
/// several hardlinks, and that hardlink comes first in the archive.
#[derive(Debug, Default)]
pub(crate) struct Rescue(BTreeMap<u64, NodeId>);

impl Rescue {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<S: ContentSink> LayerIngest<'_, S> {
    /// Reads all entries.
    pub(crate) fn run(mut self, tar: &mut TarReader<'_>) -> Result<Ingested, ConvertError> {
        let mut entries = 0;
        while let Some(entry) = tar.next_entry().map_err(|e| e.of(self.name))? {
            self.entry(entries, entry, tar)?;
            entries += 1;
        }
        let (dropped, uppers, mut rescue) = (self.dropped, self.uppers, self.rescue);
        let tree = self.builder.finish(|builder, slot, id| {
            if let Some(&number) = dropped.get(&id)
                && !uppers.hides(builder, slot)
            {
                rescue.0.insert(number, id);
            }
        });
        Ok(Ingested {
            tree,
            entries,
            rescue,
        })
    }

    fn entry(
        &mut self,
        number: u64,
        mut entry: TarEntry,
        tar: &mut TarReader<'_>,
    ) -> Result<(), ConvertError> {
        let layer = self.name;
        let path = std::mem::take(&mut entry.path);
        let error = |e: Unplaced| e.at(TarPlace::entry(layer, &path));
        check_limit(LimitKind::PathBytes, path.len() as u64, MAX_PATH_BYTES)
            .map_err(|exceeded| error(exceeded.into()))?;
        let names = components(&path).map_err(|p| error(p.into()))?;
        // Internal files of aufs; the opaque mark has the same prefix.
        let internal = |name: &&[u8]| name.starts_with(b".wh..wh.");
        let Some((&last, parents)) = names.split_last() else {
            if entry.kind != EntryKind::Directory {
                return Err(error(TarProblem::RootNotDirectory.into()));
            }
            let attributes = self.attributes(&path, &mut entry)?;
            return self.builder.directory(None, attributes).map_err(error);
        };
        if last == b".wh..wh..opq" && !parents.iter().any(internal) {
            let dir = self.builder.enter(parents).map_err(error)?;
            self.builder.set_opaque(dir);
            return Ok(());
        }
        if names.iter().any(internal) {
            return Ok(());
        }
        let dir = self.builder.enter(parents).map_err(error)?;
        if let Some(hidden) = last.strip_prefix(b".wh.") {
            return match hidden {
                b"" | b"." | b".." => Err(error(TarProblem::BadWhiteout.into())),
                hidden => self.builder.whiteout(dir, hidden).map_err(error),
            };
        }
        let slot = Slot {
            dir,
            name: last.into(),
        };
        let attributes = self.attributes(&path, &mut entry)?;
        let kind = match entry.kind {
            EntryKind::Hardlink => {
                let linked = self.builder.hardlink(&slot, &entry.link, attributes);
                if let Some(id) = linked.map_err(error)? {
                    self.check_visible(&slot, id);
                }
                return Ok(());
            }
            EntryKind::Directory => {
                return self
                    .builder
                    .directory(Some(&slot), attributes)
                    .map_err(error);
            }
            EntryKind::Regular => {
                if parents.is_empty() && self.recognise {
                    self.refuse_image(last, &entry, tar)?;
                }
                return self.regular(number, &path, &entry, &slot, attributes, tar);
            }
            EntryKind::Symlink => NodeKind::Symlink(self.target(&path, &entry)?),
            EntryKind::CharDevice(number) => NodeKind::CharDevice(number),
            EntryKind::BlockDevice(number) => NodeKind::BlockDevice(number),
            EntryKind::Fifo => NodeKind::Fifo,
        };
        self.builder
            .node(&slot, Node { attributes, kind })
            .map_err(error)?;
        Ok(())
    }

    /// Refuses an archive if a file in its root shows that it contains container images.
    fn refuse_image(
        &self,
        name: &[u8],
        entry: &TarEntry,
        tar: &mut TarReader<'_>,
    ) -> Result<(), ConvertError> {
        if !is_marker_file(name) || entry.sparse.is_some() || entry.stored > MAX_BYTES {
            return Ok(());
        }
        let data = tar.data(entry.stored as usize);
        let (first, second) = data.map_err(|e| e.of(self.name))?;
        match recognise(name, &[first, second].concat()) {
            Some(form) => Err(ConvertError::HoldsImage {
                place: self.name.to_owned(),
                form,
                source_text: None,
            }),
            None => Ok(()),
        }
    }

    fn regular(
        &mut self,
        number: u64,
        path: &[u8],
        entry: &TarEntry,
        slot: &Slot,
        attributes: Attributes,
        tar: &mut TarReader<'_>,
    ) -> Result<(), ConvertError> {
        if let Some(map) = &entry.sparse {
            let holes = map.size.saturating_sub(entry.stored);
            self.reading
                .count(holes, || TarPlace::entry(self.name, path))?;
        }
        let hidden = self.uppers.hides(&self.builder, slot);
        let stored = if hidden {
            *self.hidden_bytes += entry.stored;
            Content {
                size: entry.sparse.as_ref().map_or(entry.stored, |map| map.size),
                blocks: Blocks::Dropped,
                tail: None,
            }
        } else {
            store(self.name, path, entry, tar, self.content)?
        };
        let node = Node {
            attributes,
            kind: NodeKind::Regular(stored),
        };
        let id = self
            .builder
            .node(slot, node)
            .map_err(|e| e.at(TarPlace::entry(self.name, path)))?;
        if hidden {
            self.dropped.insert(id, number);
        }
        Ok(())
    }

    /// Handles a new name of a file of this layer: if the name is visible, the content is needed.
    fn check_visible(&mut self, slot: &Slot, id: NodeId) {
        if let Some(&number) = self.dropped.get(&id)
            && !self.uppers.hides(&self.builder, slot)
        {
            self.rescue.0.insert(number, id);
        }
    }

    fn target(&self, path: &[u8], entry: &TarEntry) -> Result<Box<[u8]>, ConvertError> {
        let problem = match entry.link.len() {
            0 => TarProblem::EmptyTarget,
            bytes if bytes > MAX_TARGET_BYTES => TarProblem::TargetTooLong { bytes },
            _ => return Ok(entry.link.as_slice().into()),
        };
        let place = TarPlace::entry(self.name, path);
        Err(ConvertError::Tar { place, problem })
    }

    fn attributes(
        &mut self,
        path: &[u8],
        entry: &mut TarEntry,
    ) -> Result<Attributes, ConvertError> {
        let mut xattrs = std::mem::take(&mut entry.xattrs);
        xattrs.retain(|name, _| keep_xattr(name, self.warnings));
        let xattrs = self
            .builder
            .share_xattrs(xattrs)
            .map_err(|e| e.at(TarPlace::entry(self.name, path)))?;
        Ok(Attributes {
            permissions: entry.permissions,
            uid: entry.uid,
            gid: entry.gid,
            mtime: entry.mtime,
            xattrs,
        })
    }
}

/// Stores the content of the entries in `rescue`, from a second reading of the layer; returns its
/// size.
pub(crate) fn rescue<S: ContentSink>(
    rescue: &Rescue,
    name: &str,
    tar: &mut TarReader<'_>,
    tree: &mut LayerTree,
    content: &mut ContentWriter<S>,
) -> Result<u64, ConvertError> {
    let (mut number, mut bytes) = (0, 0);
    while let Some(entry) = tar.next_entry().map_err(|e| e.of(name))? {
        if let Some(&id) = rescue.0.get(&number) {
            let stored = store(name, &entry.path, &entry, tar, content)?;
            tree.node_mut(id).kind = NodeKind::Regular(stored);
            bytes += entry.stored;
        }
        number += 1;
    }
    Ok(bytes)
}

/// Stores an entry's data.
fn store<S: ContentSink>(
    layer: &str,
    path: &[u8],
    entry: &TarEntry,
    tar: &mut TarReader<'_>,
    content: &mut ContentWriter<S>,
) -> Result<Content, ConvertError> {
    let mut data = EntryData { layer, tar };
    let stored = match &entry.sparse {
        Some(map) => content.sparse(map, &mut data),
        None => content.file(entry.stored, &mut data),
    };
    stored.map_err(|e| e.at(TarPlace::entry(layer, path)))
}

struct EntryData<'d, 's> {
    layer: &'d str,
    tar: &'d mut TarReader<'s>,
}

impl Data for EntryData<'_, '_> {
    fn window(&mut self, wanted: usize) -> Result<(&[u8], &[u8]), ConvertError> {
        let layer = self.layer;
        self.tar.data(wanted).map_err(|e| e.of(layer))
    }

    fn consume(&mut self, bytes: usize) {
        self.tar.consume(bytes);
    }
}
