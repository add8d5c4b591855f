//! Checks the directories in [`META`] and the numbers of names of files.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bcow_erofs::reader::Nid;
use bcow_erofs::tree::{LayerTree, NodeId, NodeKind};
use rustix::fs::{AtFlags, Stat};
use rustix::io::Errno;

use super::{CheckedImage, Checker, MAX_FILES, Repair, file_type};
use crate::offline::changes::{Changes, Scope};
use crate::offline::error::{ChangesError, Problem};
use crate::upper::beneath::is_regular;
use crate::upper::{
    Attribute, META, Mark, Marks, NlinkDelta, UpperReader, entry_name, is_whiteout,
    parse_entry_name, work,
};

impl Checker<'_> {
    pub(super) fn index(&mut self) -> Result<(), Errno> {
        let Some(dir) = meta(self.upper, "index")? else {
            return Ok(());
        };
        for name in sorted(dir.as_fd())? {
            let path = [META.as_bytes(), b"/index/", &name].concat();
            let Some(nid) = parse_entry_name(&name) else {
                let message = "not the name of an index entry";
                self.report.warning("upper-unknown-file", &path, message);
                continue;
            };
            let stat = rustix::fs::statat(&dir, &name[..], AtFlags::SYMLINK_NOFOLLOW)?;
            let marks = self.marks(Attribute::Named(dir.as_fd(), &name), &path)?;
            if let Some(message) = self.index_problem(nid, &stat, &marks) {
                self.report.error("upper-index", &path, message);
            }
            if let Some(other) = self.indexed.insert(stat.st_ino, nid) {
                let message = format!("it is the same file as the entry of inode {other}");
                self.report.error("upper-index", &path, message);
            }
            // If the image is given, its names are counted instead, which is more exact than the
            // mark.
            let is_leak = self.image.is_none()
                && match marks.nlink {
                    Some(NlinkDelta::Upper(extra)) => stat.st_nlink as i64 + i64::from(extra) <= 0,
                    Some(NlinkDelta::Lower(_)) | None => false,
                };
            if is_leak {
                // If the entry is a partial file, its map is a leak too.
                self.report_unreferenced(name, None);
            } else if marks.partial.is_some() && is_regular(&stat) {
                // The partial file may have no name in the tree.
                self.partial(&path, &stat, &marks, None);
            }
        }
        Ok(())
    }

    /// Why an entry of the index is not the file for the image's inode `nid`; `None` if it is.
    fn index_problem(&self, nid: u64, stat: &Stat, marks: &Marks) -> Option<String> {
        let kind = file_type(stat);
        if is_whiteout(stat) || kind == rustix::fs::FileType::Directory {
            return Some("it is not a file with several names".into());
        }
        if self.has_unsuitable_owner(stat, marks) {
            return Some("the type in its owner attribute does not suit the host's file".into());
        }
        let Some(origin) = &marks.origin else {
            return Some("it has no origin in the image".into());
        };
        if origin.nid != nid {
            return Some(format!("its origin is inode {} of the image", origin.nid));
        }
        self.origin(self.image?, origin, kind, marks).err()
    }

    pub(super) fn maps(&mut self) -> Result<(), Errno> {
        let Some(dir) = meta(self.upper, "maps")? else {
            return Ok(());
        };
        for name in sorted(dir.as_fd())? {
            let path = [META.as_bytes(), b"/maps/", &name].concat();
            match parse_entry_name(&name) {
                None => {
                    let message = "not the name of a map";
                    self.report.warning("upper-unknown-file", &path, message);
                }
                Some(id) if self.partials.contains_key(&id) => {}
                // If marks are damaged, the map may belong to one of those files.
                Some(_) if !self.report.is_sound() => {
                    let message = "no partial file with readable marks uses this map";
                    self.report.warning("upper-map-leak", &path, message);
                }
                Some(_) => {
                    let message = "no partial file uses this map";
                    let repair = Repair::Map(name);
                    self.report
                        .repairable("upper-map-leak", &path, message, repair);
                }
            }
        }
        Ok(())
    }

    pub(super) fn work(&mut self) -> Result<(), Errno> {
        let Some(dir) = meta(self.upper, "work")? else {
            return Ok(());
        };
        let mut count = 0;
        for name in work::list(dir.as_fd())? {
            let stat = rustix::fs::statat(&dir, &name[..], AtFlags::SYMLINK_NOFOLLOW)?;
            // A mount keeps whiteouts there for later changes. They are not a leak, because a new
            // mount creates its own.
            count += usize::from(!is_whiteout(&stat));
        }
        if count > 0 {
            let path = format!("{META}/work").into_bytes();
            let message = format!("unused temporary files: {count}");
            self.report
                .repairable("upper-work-leak", &path, &message, Repair::Work);
        }
        Ok(())
    }

    /// Composes the union and counts the names of files with several names.
    pub(super) fn links(&mut self, image: &CheckedImage) {
        if !self.report.is_sound() {
            return;
        }
        if self.indexed.is_empty() {
            return;
        }
        let (filesystem, device) = (image.filesystem.clone(), image.device.clone());
        let changes = match Changes::read(self.upper, filesystem, device, Scope::Layer, MAX_FILES) {
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
        let counts = names(&changes.layer);
        let temporaries = self.temporaries().unwrap_or_default();
        let mut entries: Vec<(u64, u64)> = self.indexed.iter().map(|(&i, &nid)| (nid, i)).collect();
        entries.sort_unstable();
        for (nid, host_inode) in entries {
            let name = entry_name(nid).into_bytes();
            let node = changes.index.get(&nid);
            let names = node.and_then(|node| counts.get(node)).copied().unwrap_or(0);
            let Ok((links, said)) = self.links_of(&name) else {
                continue;
            };
            // A temporary is an additional link of the file until the next writer empties the
            // directory.
            let held = temporaries.get(&host_inode).copied().unwrap_or(0);
            if names == 0 {
                let is_alone = links - held == 1;
                self.report_unreferenced(name, is_alone.then_some(host_inode));
                continue;
            }
            let (says, is_right) = match said {
                Some(NlinkDelta::Lower(extra)) => {
                    let below = image.filesystem.inode(Nid(nid));
                    let says = below.map_or(0, |inode| i64::from(inode.nlink)) + i64::from(extra);
                    // A crash during the removal of a name leaves this value.
                    (says, says == names || says == names + 1)
                }
                Some(NlinkDelta::Upper(extra)) => {
                    let says = links - held + i64::from(extra);
                    (says, says == names)
                }
                None => (links - held, false),
            };
            if is_right {
                continue;
            }
            let path = [META.as_bytes(), b"/index/", &name].concat();
            let message = format!("its mark records {says} names, but it has {names}");
            match i32::try_from(names - (links - held)) {
                Ok(delta) => {
                    let repair = Repair::Nlink(name, delta);
                    self.report
                        .repairable("upper-nlink", &path, &message, repair);
                }
                Err(_) => self.report.warning("upper-nlink", &path, message),
            }
        }
    }

    /// Reports an entry of the index without a name, and queues its removal. If the entry is a
    /// partial file and `host_inode` is given (the entry is the file's only link), its map is
    /// removed too.
    fn report_unreferenced(&mut self, name: Vec<u8>, host_inode: Option<u64>) {
        let path = [META.as_bytes(), b"/index/", &name].concat();
        let message = "it is unreachable: no name refers to it";
        let repair = Repair::Index(name);
        self.report
            .repairable("upper-index-leak", &path, message, repair);
        let mut partials = self.partials.iter();
        if let Some(host_inode) = host_inode
            && let Some((id, _)) = partials.find(|(_, (inode, _))| *inode == host_inode)
        {
            let map = entry_name(*id).into_bytes();
            let dir = meta(self.upper, "maps").ok().flatten();
            // A partial file has a map only after its first flush.
            let exists = |dir| rustix::fs::statat(dir, &map[..], AtFlags::SYMLINK_NOFOLLOW).is_ok();
            if dir.is_some_and(exists) {
                self.report.repairs.push(Repair::Map(map));
            }
        }
    }

    /// The number of links of an entry of the index on the host, and the value of its mark.
    fn links_of(&self, name: &[u8]) -> Result<(i64, Option<NlinkDelta>), Errno> {
        let dir = meta(self.upper, "index")?.ok_or(Errno::NOENT)?;
        let stat = rustix::fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let at = Attribute::Named(dir.as_fd(), name);
        let value = at.get(Mark::Nlink.name(self.names.namespace))?;
        let said = value.and_then(|value| NlinkDelta::decode(&value).ok());
        Ok((stat.st_nlink as i64, said))
    }

    /// The number of temporaries that are links of a file, by host inode number.
    fn temporaries(&self) -> Result<HashMap<u64, i64>, Errno> {
        let mut held = HashMap::new();
        if let Some(dir) = meta(self.upper, "work")? {
            for name in work::list(dir.as_fd())? {
                let stat = rustix::fs::statat(&dir, &name[..], AtFlags::SYMLINK_NOFOLLOW)?;
                *held.entry(stat.st_ino).or_default() += 1;
            }
        }
        Ok(held)
    }
}

/// The number of names of each file in a layer.
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
