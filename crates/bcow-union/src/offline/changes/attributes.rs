//! Owners, modes, types and extended attributes.

use std::collections::BTreeMap;

use bcow_erofs::reader::FileType;
use bcow_erofs::tree::{Attributes, DeviceNumber, Xattrs};
use rustix::fs::Stat;

use super::Reader;
use crate::host::kind_of;
use crate::offline::error::Problem;
use crate::upper::xattr::each_name;
use crate::upper::{ACCESS_ACL, Attribute, MarkError, Marks, Override, Ownership, modified};

impl Reader<'_> {
    /// The attribute with the owner and the type that the container sees, if it is in use.
    fn owner(&self, marks: &Marks) -> Option<Override> {
        marks
            .owner
            .filter(|_| self.names.ownership == Ownership::Override)
    }

    /// The type that the container sees.
    pub(super) fn kind(&self, stat: &Stat, marks: &Marks) -> Result<FileType, MarkError> {
        match self.owner(marks) {
            Some(owner) => owner.kind_over(stat),
            None => Ok(kind_of(stat.st_mode)),
        }
    }

    /// The number of a device, as the container sees it.
    pub(super) fn device(&self, stat: &Stat, marks: &Marks) -> DeviceNumber {
        match self.owner(marks) {
            Some(owner) if owner.kind.is_some() => owner.device.unwrap_or_default(),
            _ => DeviceNumber {
                major: rustix::fs::major(stat.st_rdev),
                minor: rustix::fs::minor(stat.st_rdev),
            },
        }
    }

    pub(super) fn attributes(
        &mut self,
        stat: &Stat,
        marks: &Marks,
        at: Attribute<'_>,
        kind: FileType,
    ) -> Result<Attributes, Problem> {
        let mut attributes = Attributes {
            permissions: (stat.st_mode & 0o7777) as u16,
            uid: stat.st_uid,
            gid: stat.st_gid,
            mtime: marks
                .times
                .filter(|times| times.applies_to(modified(stat)))
                .map_or(modified(stat), |times| times.mtime),
            xattrs: self.xattrs_above(at)?,
        };
        if let Some(owner) = self.owner(marks).filter(|_| kind != FileType::Symlink) {
            (attributes.uid, attributes.gid) = (owner.uid, owner.gid);
            attributes.permissions = owner.permissions;
        }
        Ok(attributes)
    }

    pub(super) fn xattrs_above(&mut self, at: Attribute<'_>) -> Result<Option<Xattrs>, Problem> {
        let mut all = BTreeMap::new();
        let list = at.list()?;
        for stored in each_name(&list) {
            let Some(name) = self.names.shown_name(stored, false) else {
                continue;
            };
            if !self.builder.keeps_xattr(&name) {
                continue;
            }
            if let Some(value) = at.get(stored)? {
                all.insert(name.into_owned(), value);
            }
        }
        Ok(self.builder.share(all))
    }

    /// The attributes of the root of an instance. The container's access ACL of the root is not the
    /// one of the host's directory.
    pub(super) fn with_acl_of_root(
        &mut self,
        shown: Option<Xattrs>,
        at: Attribute<'_>,
    ) -> Result<Option<Xattrs>, Problem> {
        let mut all = shown.map_or_else(BTreeMap::new, |shown| (*shown).clone());
        all.remove(ACCESS_ACL);
        if let Some(acl) = at.get(&self.names.stored_name(ACCESS_ACL, true))? {
            all.insert(ACCESS_ACL.to_vec(), acl);
        }
        Ok(self.builder.share(all))
    }
}
