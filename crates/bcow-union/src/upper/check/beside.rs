//! What lies beside the tree, and how many names files have.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bcow_erofs::tree::{LayerTree, NodeId, NodeKind};
use rustix::fs::AtFlags;
use rustix::io::Errno;

use super::{CheckedImage, Checker, MOST_FILES, Repair};
use crate::upper::changes::parse_id;
use crate::upper::{
    Attribute, Changes, ChangesError, META, Mark, NlinkDelta, Problem, Scope, UpperReader, work,
};

impl Checker<'_> {
    pub(super) fn index(&mut self) -> Result<(), Errno> {
        let Some(dir) = meta(self.upper, "index")? else {
            return Ok(());
        };
        for name in sorted(dir.as_fd())? {
            let path = [META.as_bytes(), b"/index/", &name].concat();
            let Some(nid) = parse_id(&name) else {
                let message = "it has no name of an entry of the index";
                self.report.warning("upper-unknown-file", &path, message);
                continue;
            };
            let stat = rustix::fs::statat(&dir, &name[..], AtFlags::SYMLINK_NOFOLLOW)?;
            let marks = self.marks(Attribute::Named(dir.as_fd(), &name), &path)?;
            if let Some(origin) = &marks.origin
                && origin.nid != nid
            {
                let message = format!("its origin is inode {} of the image", origin.nid);
                self.report.error("upper-index", &path, message);
            }
            if let Some(other) = self.indexed.insert(stat.st_ino, nid) {
                let message = format!("it is the same file as that of inode {other}");
                self.report.error("upper-index", &path, message);
            }
            let extra = match marks.nlink {
                Some(NlinkDelta::Upper(extra)) => i64::from(extra),
                _ => 0,
            };
            if stat.st_nlink as i64 + extra <= 0 {
                let message = "nothing names it any more";
                self.report.warning("upper-index-leak", &path, message);
                self.report.repairs.push(Repair::Index(name));
            } else if marks.sketch.is_some() {
                // It may have no name in the tree.
                self.sketch(&path, &stat, &marks, None);
            }
        }
        Ok(())
    }

    pub(super) fn maps(&mut self) -> Result<(), Errno> {
        let Some(dir) = meta(self.upper, "maps")? else {
            return Ok(());
        };
        for name in sorted(dir.as_fd())? {
            let path = [META.as_bytes(), b"/maps/", &name].concat();
            match parse_id(&name) {
                None => {
                    let message = "it has no name of a map";
                    self.report.warning("upper-unknown-file", &path, message);
                }
                Some(id) if self.sketches.contains_key(&id) => {}
                // If marks are damaged, it may be of one of those.
                Some(_) if !self.report.is_sound() => {
                    let message = "no sketch has this map, as far as marks can be read";
                    self.report.warning("upper-map-leak", &path, message);
                }
                Some(_) => {
                    self.report
                        .warning("upper-map-leak", &path, "no sketch has this map");
                    self.report.repairs.push(Repair::Map(name));
                }
            }
        }
        Ok(())
    }

    pub(super) fn work(&mut self) -> Result<(), Errno> {
        let Some(dir) = meta(self.upper, "work")? else {
            return Ok(());
        };
        let count = work::list(dir.as_fd())?.len();
        if count > 0 {
            let path = format!("{META}/work").into_bytes();
            let message = format!("temporaries that nobody needs any more: {count}");
            self.report.warning("upper-work-leak", &path, message);
            self.report.repairs.push(Repair::Work);
        }
        Ok(())
    }

    /// Puts the union together, and counts the names of what has several.
    pub(super) fn links(&mut self, image: &CheckedImage) {
        if !self.report.is_sound() {
            return;
        }
        let (filesystem, device) = (image.filesystem.clone(), image.device.clone());
        let changes = match Changes::read(self.upper, filesystem, device, Scope::Layer, MOST_FILES)
        {
            Ok(changes) => changes,
            Err(ChangesError {
                path,
                problem: problem @ Problem::TooMany { .. },
            }) => {
                let message = format!("{problem}: their names are not counted");
                self.report.warning("upper-union", &path, message);
                return;
            }
            Err(ChangesError { path, problem }) => {
                self.report.error("upper-union", &path, problem.to_string());
                return;
            }
        };
        if changes.index.is_empty() {
            return;
        }
        let counts = names(&changes.layer);
        for (nid, node) in &changes.index {
            let name = format!("{nid:016x}").into_bytes();
            let path = [META.as_bytes(), b"/index/", &name].concat();
            let Ok((links, extra)) = self.links_of(&name) else {
                continue;
            };
            let names = counts.get(node).copied().unwrap_or(0);
            let expected = names - links;
            if extra != expected && names > 0 {
                let message = format!(
                    "it says that it has {} names, and has {names}",
                    links + extra
                );
                self.report.warning("upper-nlink", &path, message);
                if let Ok(delta) = i32::try_from(expected) {
                    self.report.repairs.push(Repair::Nlink(name, delta));
                }
            }
        }
    }

    /// Names on the host of an entry of the index, and how many more it says there are.
    fn links_of(&self, name: &[u8]) -> Result<(i64, i64), Errno> {
        let dir = meta(self.upper, "index")?.ok_or(Errno::NOENT)?;
        let stat = rustix::fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let at = Attribute::Named(dir.as_fd(), name);
        let value = at.get(Mark::Nlink.name(self.names.namespace))?;
        let extra = match value.as_deref().map(NlinkDelta::decode) {
            Some(Ok(NlinkDelta::Upper(extra))) => i64::from(extra),
            _ => 0,
        };
        Ok((stat.st_nlink as i64, extra))
    }
}

/// How many names each file of a layer has.
fn names(layer: &LayerTree) -> HashMap<NodeId, i64> {
    let mut counts: HashMap<NodeId, i64> = HashMap::new();
    let mut seen = HashSet::from([LayerTree::ROOT]);
    let mut pending = vec![LayerTree::ROOT];
    while let Some(id) = pending.pop() {
        let NodeKind::Directory(directory) = &layer.node(id).kind else {
            continue;
        };
        for &child in directory.children.values() {
            *counts.entry(child).or_default() += 1;
            if seen.insert(child) {
                pending.push(child);
            }
        }
    }
    counts
}

fn meta(upper: &UpperReader, name: &str) -> Result<Option<OwnedFd>, Errno> {
    upper
        .meta_directory(name)
        .map_err(|error| error.errno().unwrap_or(Errno::NOTDIR))
}

fn sorted(dir: BorrowedFd<'_>) -> Result<Vec<Vec<u8>>, Errno> {
    let mut names = work::list(dir)?;
    names.sort_unstable();
    Ok(names)
}
