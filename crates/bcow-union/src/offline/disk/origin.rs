//! The objects of the image that inodes of the view stand for.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use bcow_erofs::reader::{Filesystem, Inode};
use bcow_ext4::InodeNumber;
use bcow_view::{Numbers, ViewName};

use crate::offline::builder::join;
use crate::offline::error::Problem;

/// The image, by numbers of the view.
pub(super) struct Origins<'r> {
    lower: &'r Filesystem,
    numbers: &'r Numbers,
}

impl<'r> Origins<'r> {
    pub(super) fn new(lower: &'r Filesystem, numbers: &'r Numbers) -> Self {
        Origins { lower, numbers }
    }

    /// The inode of the image; `None` for a number that the view does not use.
    pub(super) fn inode(&self, number: InodeNumber) -> Result<Option<Inode>, Problem> {
        match self.numbers.nid(number) {
            Some(nid) => Ok(Some(self.lower.inode(nid)?)),
            None => Ok(None),
        }
    }

    /// For each directory with something changed below it: the names that lead there.
    pub(super) fn lists(
        &self,
        changed: &BTreeSet<InodeNumber>,
    ) -> Result<HashMap<InodeNumber, BTreeMap<Vec<u8>, InodeNumber>>, Problem> {
        let (names, above) = self.names(changed)?;
        let mut lists: HashMap<_, BTreeMap<_, _>> = HashMap::new();
        for name in names.into_iter().chain(above.into_values()) {
            let list = lists.entry(name.directory).or_default();
            list.insert(name.name, name.inode);
        }
        Ok(lists)
    }

    /// All paths of inodes in the image, in order.
    pub(super) fn paths(
        &self,
        wanted: &BTreeSet<InodeNumber>,
    ) -> Result<Vec<(Vec<u8>, InodeNumber)>, Problem> {
        let (names, above) = self.names(wanted)?;
        let mut paths = Vec::with_capacity(names.len());
        for name in names {
            let mut parts = vec![&name.name];
            let mut directory = name.directory;
            while let Some(name) = above.get(&directory) {
                parts.push(&name.name);
                directory = name.directory;
            }
            let path = parts.into_iter().rev();
            let path = path.fold(Vec::new(), |path, name| join(&path, name));
            paths.push((path, name.inode));
        }
        paths.sort_unstable();
        Ok(paths)
    }

    /// The names of inodes, and the name of each directory above them.
    fn names(
        &self,
        wanted: &BTreeSet<InodeNumber>,
    ) -> Result<(Vec<ViewName>, HashMap<InodeNumber, ViewName>), Problem> {
        let names = self.numbers.names(self.lower, wanted)?;
        let mut above: HashMap<InodeNumber, ViewName> = HashMap::new();
        let mut next: BTreeSet<InodeNumber> = names.iter().map(|name| name.directory).collect();
        loop {
            next.retain(|number| *number != InodeNumber::ROOT && !above.contains_key(number));
            if next.is_empty() {
                return Ok((names, above));
            }
            let found = self.numbers.names(self.lower, &next)?;
            next = found.iter().map(|name| name.directory).collect();
            above.extend(found.into_iter().map(|name| (name.inode, name)));
        }
    }
}
