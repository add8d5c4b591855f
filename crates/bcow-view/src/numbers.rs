//! The numbers of inodes: which inode of an image is which inode of its view.
//!
//! The view numbers the inodes of a tree in the order of a walk, one level after the other. So the
//! number of an inode follows from the directories of the image alone.

use std::collections::{BTreeSet, HashMap};

use bcow_erofs::reader::{Child, Children, ErofsError, FileType, Filesystem, Inode, Nid};
use bcow_ext4::InodeNumber;

use crate::ViewError;

/// The number of the second inode; the first one is the root. The numbers in front of it are
/// ext4's own.
const SECOND: u32 = 11;

/// An inode that has been found.
pub(crate) struct Known {
    pub nid: Nid,
    /// The type that the first name says.
    pub kind: FileType,
    /// Names that directories have for it.
    pub links: u32,
    /// The place of the first directory with such a name in the walk. The root's is its own.
    pub parent: u32,
}

/// All inodes of a tree, directories before their entries.
pub struct Numbers {
    pub(crate) inodes: Vec<Known>,
    places: HashMap<Nid, u32>,
    /// Places of inodes, and of a further directory that has a name for each.
    more: Vec<(u32, u32)>,
}

/// A name in the tree of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ViewName {
    pub directory: InodeNumber,
    pub name: Vec<u8>,
    pub inode: InodeNumber,
}

impl Numbers {
    /// Numbers the inodes of a tree that has a view.
    pub fn new(fs: &Filesystem) -> Result<Numbers, ViewError> {
        Numbers::walk(fs, &mut |known| match known.kind {
            FileType::Directory => Ok(Some(fs.inode(known.nid)?)),
            _ => Ok(None),
        })
    }

    /// Walks over the tree. `open` returns the inodes that are directories.
    pub(crate) fn walk(
        fs: &Filesystem,
        open: &mut dyn FnMut(&Known) -> Result<Option<Inode>, ViewError>,
    ) -> Result<Numbers, ViewError> {
        let mut numbers = Numbers {
            inodes: Vec::new(),
            places: HashMap::new(),
            more: Vec::new(),
        };
        numbers.find(fs.root(), FileType::Directory, 0)?;
        let mut at = 0;
        while let Some(known) = numbers.inodes.get(at) {
            if let Some(directory) = open(known)? {
                numbers.directory(fs, &directory, at as u32)?;
            }
            at += 1;
        }
        numbers.more.sort_unstable();
        Ok(numbers)
    }

    /// The place of an inode in the walk.
    pub(crate) fn place(&self, nid: Nid) -> u32 {
        // The same entries were read before, by the walk.
        self.places.get(&nid).copied().unwrap_or(u32::MAX)
    }

    /// The greatest number of an inode.
    pub fn last(&self) -> InodeNumber {
        number((self.inodes.len() as u32).saturating_sub(1))
    }

    /// The inode of the image that has this number in the view.
    pub fn nid(&self, inode: InodeNumber) -> Option<Nid> {
        Some(self.inodes.get(self.place_of(inode)? as usize)?.nid)
    }

    /// The number in the view of an inode of the image.
    pub fn number(&self, nid: Nid) -> Option<InodeNumber> {
        Some(number(*self.places.get(&nid)?))
    }

    fn place_of(&self, inode: InodeNumber) -> Option<u32> {
        let place = match inode {
            InodeNumber::ROOT => 0,
            inode => inode.get().checked_sub(SECOND)? + 1,
        };
        ((place as usize) < self.inodes.len()).then_some(place)
    }

    /// All names of `wanted` inodes in the tree. Reads the directories that have such names.
    pub fn names(
        &self,
        fs: &Filesystem,
        wanted: &BTreeSet<InodeNumber>,
    ) -> Result<Vec<ViewName>, ViewError> {
        let mut directories = BTreeSet::new();
        for place in wanted.iter().filter_map(|inode| self.place_of(*inode)) {
            if place > 0 {
                directories.insert(self.inodes[place as usize].parent);
            }
            let from = self.more.partition_point(|(child, _)| *child < place);
            let further = self.more[from..].iter();
            let further = further.take_while(|(child, _)| *child == place);
            directories.extend(further.map(|(_, directory)| *directory));
        }
        let mut names = Vec::new();
        for place in directories {
            let directory = fs.inode(self.inodes[place as usize].nid)?;
            each_child(fs, &directory, &mut |child| {
                if let Some(inode) = self.number(child.nid)
                    && wanted.contains(&inode)
                {
                    names.push(ViewName {
                        directory: number(place),
                        name: child.name,
                        inode,
                    });
                }
                Ok(())
            })?;
        }
        Ok(names)
    }

    fn directory(
        &mut self,
        fs: &Filesystem,
        directory: &Inode,
        place: u32,
    ) -> Result<(), ViewError> {
        each_child(fs, directory, &mut |child| {
            let is_known = self.places.contains_key(&child.nid);
            if is_known && child.kind == FileType::Directory {
                return Err(ErofsError::DirectoryTwice { nid: child.nid }.into());
            }
            self.find(child.nid, child.kind, place)
        })
    }

    fn find(&mut self, nid: Nid, kind: FileType, parent: u32) -> Result<(), ViewError> {
        let next = self.inodes.len();
        let place = *self.places.entry(nid).or_insert(next as u32);
        if place as usize == next {
            // Some numbers are ext4's own.
            if next > u32::MAX as usize - 16 {
                return Err(ViewError::Inodes);
            }
            self.inodes.push(Known {
                nid,
                kind,
                links: 0,
                parent,
            });
        } else {
            self.more.push((place, parent));
        }
        self.inodes[place as usize].links += 1;
        Ok(())
    }
}

/// The number of the inode at a place of the walk, as the writer gives it.
fn number(place: u32) -> InodeNumber {
    match place.checked_sub(1) {
        None => InodeNumber::ROOT,
        Some(n) => InodeNumber::new(SECOND.saturating_add(n)),
    }
}

/// Calls `each` with the entries of a directory.
pub(crate) fn each_child(
    fs: &Filesystem,
    directory: &Inode,
    each: &mut dyn FnMut(Child) -> Result<(), ViewError>,
) -> Result<(), ViewError> {
    let mut children = Children::sorted(*directory);
    while let Some(child) = children.next(fs)? {
        each(child)?;
    }
    Ok(())
}
